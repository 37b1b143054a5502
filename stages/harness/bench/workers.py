"""Workers: each is the process of a row, and takes one step when the bench asks for it."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time

from .. import leader, machine
from ..figures import COUNTED_STEPS, WARMUP
from .reaper import send

PATIENCE = 600  # seconds that an answer may take: the first one includes the start and the compilation
PATIENCE_AT_THE_END = 40  # seconds that a process has to end after it was told to: torchrun gives its ranks 30
PAUSE = 0.02  # seconds between the steps of two workers: threads of the one that just stepped may still spin
# A row that runs alone stops when it has COUNTED_STEPS which took ENOUGH_SECONDS together, in which a card's clock
# settles, and at the latest after MOST_COUNTED_STEPS.
ENOUGH_SECONDS = 6.0
MOST_COUNTED_STEPS = 160
POLL = 1.0  # seconds between two looks whether a process has ended, should a child of it hide that
POLL_AT_THE_END = 0.05  # seconds
AT_ONCE = 65_536  # bytes that are read at once
MOST_READS = 100  # of what a process has left that has ended
MOST_OUTPUT = 20_000  # bytes that are kept of what a row prints
TORCHRUNS_FILES = "torch/distributed/elastic/"  # its report of failed ranks begins with their names
LAST_LINES = 20  # of them, shown where a process left no error line


class NotEnoughMemory(Exception):
    """The rows can't all be alive at once."""


def say(line):
    """Print a line of progress on stderr, whose terminal may be gone."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def about(seconds):
    """Return a time for people, as "about 4 min"."""
    return f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {seconds:.0f} s"


class Rank:
    """A process of a row, as the bench hears it: the row itself, or one of several that torchrun started.

    hello: its first line, or None before that. group: its process group, or None. is_ready: whether it waits for a
    request.
    """

    def __init__(self, connection):
        self.connection = connection
        self.unread = b""  # the beginning of a line
        self.hello = None
        self.group = None
        self.is_ready = False
        self.is_open = True

    def read_lines(self):
        """Return the lines that have come, as dicts."""
        try:
            received = self.connection.recv(AT_ONCE)
        except ConnectionResetError:
            received = b""
        self.is_open = received != b""
        *lines, self.unread = (self.unread + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def ask(self):
        """Ask it for a step."""
        self.is_ready = False
        with contextlib.suppress(OSError):  # where it is gone, the worker finds out why
            self.connection.sendall(b"\n")

    def ask_for_the_end(self):
        """Ask it for its summary."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)


class Worker:
    """A row at work, in a process of its own or in several ranks. It takes one step for each request.

    run: the results.Run that it fills.
    """

    def __init__(self, row, results, round_number, reaper):
        """Start the process. results: the Results that keep each line of its record. reaper: it ends the process."""
        self.row = row
        self.results = results
        self.round_number = round_number
        self.reaper = reaper
        self.keep({"kind": "start"})
        self.run = results.runs[row.name, round_number]
        self.ranks = []
        self.output = b""  # the end of what it printed
        self.prints = True  # until it closes its stdout
        self.is_to_end = False
        self.is_over = False  # what it sends from then on is no part of its record
        path = reaper.path_of_socket()
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(path)
        self.server.listen()
        self.process = subprocess.Popen(
            row.command(results.bench),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | row.variables(results.bench) | {leader.PATH: path},
            start_new_session=True,  # Ctrl-C reaches the bench alone, which then stops its workers
        )
        reaper.add(self.process.pid)

    @property
    def is_live(self):
        """Whether it can be asked for another step, or for its summary."""
        return self.run.summary is None and self.run.error is None

    @property
    def is_ready(self):
        """Whether all its ranks are there and wait for a request for a step."""
        if self.is_to_end:
            return False
        ranks = [rank for rank in self.ranks if rank.hello and rank.is_open]
        if not ranks:
            return False
        return len(ranks) == ranks[0].hello["ranks"] and all(rank.is_ready for rank in ranks)

    @property
    def groups_of_ranks(self):
        """The process groups of its ranks. torchrun starts each rank in one of its own."""
        return {rank.group for rank in self.ranks if rank.group}

    @property
    def groups(self):
        """All process groups of the row: those of its ranks, and that of what launched them."""
        return {self.process.pid} | self.groups_of_ranks

    def keep(self, line):
        """Keep a line of its record."""
        self.results.add(line | {"name": self.row.name, "round": self.round_number})

    def step(self):
        """Ask for a step, and wait until it is taken."""
        self.wait()
        if self.is_live:
            for rank in self.ranks:
                rank.ask()
            self.wait()

    def take_steps(self, count):
        """Take steps, one after the other. Where rows take turns, it is stopped before and behind them."""
        self.resume()
        for _ in range(count):
            self.step()
        if self.results.bench["in_turn"]:
            self.pause()

    def pause(self):
        """Stop the row while others take steps: its threads, and the processes that load its data, would work on.

        torchrun itself goes on, since each of its ranks has a group of its own. It only waits for them.
        """
        if self.is_live:
            for group in self.groups_of_ranks:
                send(group, signal.SIGSTOP)

    def resume(self):
        """Let a stopped row go on."""
        if self.is_live:
            for group in self.groups_of_ranks:
                send(group, signal.SIGCONT)

    def close(self):
        """Ask for the summary. wait() receives that."""
        self.is_to_end = True
        self.resume()
        for rank in self.ranks:
            rank.ask_for_the_end()

    def wait(self):
        """Wait until the row is ready for its next step, or has sent its summary. One that comes to neither has failed.

        A process that ends is noticed within a second, also where a child of it holds the socket open. A row that fails
        is ended here: its threads, or its other ranks, would disturb the rows that go on.
        """
        deadline = time.monotonic() + PATIENCE
        while self.is_live and not self.is_ready:
            if self.process.poll() is not None:
                self.hear_the_rest()
                if self.is_live:
                    self.fail_as_it_ended()
            elif time.monotonic() > deadline:
                self.fail(f"no step in {PATIENCE} s: stopped", self.last_lines())
            else:
                self.listen(POLL)
        if self.run.error and not self.is_over:
            end([self])

    def hear_the_rest(self):
        """Take in what a process has left that has ended. A child of it may go on to print."""
        for _ in range(MOST_READS):
            if not self.listen(0):
                return

    def listen(self, seconds):
        """Take in what the row says and prints; wait for that at most so long. Return whether there was anything."""
        ranks = {rank.connection: rank for rank in self.ranks if rank.is_open}
        files = [self.server, *ranks]
        if self.prints:
            files.append(self.process.stdout)
        readable, _, _ = select.select(files, [], [], seconds)
        for file in readable:
            if file is self.server:
                self.ranks.append(Rank(self.server.accept()[0]))
            elif file is self.process.stdout:
                printed = os.read(file.fileno(), AT_ONCE)
                self.prints = printed != b""
                self.output = (self.output + printed)[-MOST_OUTPUT:]
            else:
                for line in ranks[file].read_lines():
                    self.take_in(line, ranks[file])
        return bool(readable)

    def take_in(self, line, rank):
        """Take in a line of a rank: see leader.py."""
        match line["kind"]:
            case "hello":
                rank.hello = line
                with contextlib.suppress(ProcessLookupError):  # it may be gone by now
                    rank.group = os.getpgid(line["pid"])
                    self.reaper.add(rank.group)
            case _ if self.is_over:
                pass
            case "ready":
                rank.is_ready = True
            case "notice":
                say(f"{self.row.label}: {line['message']}")
            case "error":
                if self.is_live:
                    self.keep(line)
                    self.tell(line)
            case _:
                self.keep(line)

    def fail_as_it_ended(self):
        """Keep how the process ended, where it left no error line: by which signal, or with which exit status."""
        said = self.last_lines()
        status = self.process.returncode
        # torchrun reports how each rank ended, the one that failed first below the others
        reported = re.findall(r"^ *exitcode *: (-?\d+)", self.printed(), re.MULTILINE)
        if reported and TORCHRUNS_FILES in self.printed():
            status = int(reported[-1])
        out_of_memory = status == -signal.SIGKILL
        if out_of_memory:
            message = "killed by SIGKILL, most likely since memory was short"
        elif status < 0:
            message = f"killed by {signal.Signals(-status).name}"
        elif status == 0:
            message = f"ended after {len(self.run.steps)} of {self.results.bench['steps']} steps"
        elif said:
            message = f"exit status {status}; it last said: {said.splitlines()[-1]}"
        else:
            message = f"exit status {status}"
        self.fail(message, said, out_of_memory)

    def printed(self):
        """Return the end of what the row printed."""
        return self.output.decode("utf-8", "replace")

    def last_lines(self):
        """Return the last lines that the row printed, without torchrun's report of its ranks below them."""
        lines = []
        for line in self.printed().strip().splitlines():
            if TORCHRUNS_FILES in line:
                break
            lines.append(line)
        return "\n".join(lines[-LAST_LINES:])

    def fail(self, message, said="", out_of_memory=False):
        """Keep a line that says why the process can't go on, and tell it."""
        error = {"kind": "error", "message": message, "traceback": said, "out_of_memory": out_of_memory}
        self.keep(error)
        self.tell(error)

    def tell(self, error):
        """Print why the process failed, by the error line of its record."""
        say(f"{self.row.label} failed: {error['message']}")
        if not error["out_of_memory"] and error["traceback"] not in ("", error["message"]):
            say(error["traceback"])


def stop(workers):
    """End the processes of workers. Those that sent their summary may first take their time to leave."""
    for worker in workers:
        worker.close()
    wait_for_exits([worker for worker in workers if worker.run.summary])
    end([worker for worker in workers if not worker.is_over])
    for worker in workers:
        for file in (worker.server, worker.process.stdout, *[rank.connection for rank in worker.ranks]):
            file.close()


def end(workers):
    """End the processes of workers, and all that these started in their groups, by SIGTERM and then by SIGKILL.

    What they send from now on is no part of a record: a script may catch SIGTERM, and say that it failed.
    """
    for worker in workers:
        worker.is_over = True
        for group in worker.groups:
            send(group, signal.SIGTERM, signal.SIGCONT)
    wait_for_exits(workers)
    for worker in workers:
        for group in worker.groups:
            send(group, signal.SIGKILL)
    for worker in workers:
        worker.process.wait()
        for group in worker.groups:
            worker.reaper.forget(group)


def wait_for_exits(workers):
    """Wait until the processes of workers have ended, for some seconds at most."""
    deadline = time.monotonic() + PATIENCE_AT_THE_END
    while time.monotonic() < deadline:
        left = [worker for worker in workers if worker.process.poll() is None]
        if not left:
            return
        for worker in left:
            worker.listen(POLL_AT_THE_END)  # one that prints much would wait for a reader


def has_enough(run):
    """Tell whether a run that is alone on its device has counted enough steps, for long enough."""
    return len(run.counted) >= COUNTED_STEPS and sum(step["dt"] for step in run.counted) >= ENOUGH_SECONDS


def lead(rows, results, round_number, reaper, tell_warm=None, tell_turn=None):
    """Take fresh workers of some rows through the warm-up, one after the other, and then through their counted steps.

    Counted steps are taken in turn. results: the Results that keep all lines. reaper: a Reaper. tell_warm: called with
    each Row that is warm. tell_turn: called after each turn with its number and the seconds of all turns so far. Raises
    NotEnoughMemory where the rows can't all be alive at once.
    """
    workers = []
    try:
        began = time.monotonic()
        for row in rows:
            # Later rounds start the same processes as the first one. The next process may need half as much again as
            # the largest so far. On a system without meters of memory both sides are 0.
            is_first_round = round_number == 0
            largest = max((worker.run.memory for worker in workers), default=0)
            if is_first_round and machine.free_memory() < 1.5 * largest:
                live = [worker for worker in workers if worker.is_live]
                raise NotEnoughMemory(f"memory holds {len(live)} of {len(rows)} processes at once")
            say(f"{row.label}: start and warm-up")
            worker = Worker(row, results, round_number, reaper)
            workers.append(worker)
            worker.take_steps(WARMUP)
            if tell_warm:
                tell_warm(row)
            left = seconds_left(workers, rows, results, time.monotonic() - began)
            if left is not None and len(workers) < len(rows):
                say(f"{len(workers)} of {len(rows)} are warm, {about(left)} left in this round")
        take_turns(workers, results.bench["steps"] - WARMUP, results.bench["in_turn"], tell_turn)
        for worker in workers:
            worker.close()
        for worker in workers:
            worker.wait()
    finally:
        stop(workers)


def seconds_left(workers, rows, results, elapsed):
    """Estimate the seconds that starts and turns will take, from those of the workers that are warm.

    None where no row but the probe is warm: what its steps take says nothing about the others.
    """
    warm = [worker for worker in workers if worker.run.steps]
    dts = [worker.run.steps[-1]["dt"] for worker in warm if not worker.row.is_probe]
    if not dts:
        return None
    dts_of_probe = [worker.run.steps[-1]["dt"] for worker in warm if worker.row.is_probe]
    others = len(rows) - len(dts_of_probe)
    seconds_of_turn = sum(dts_of_probe) + others * sum(dts) / len(dts) + PAUSE * len(rows)
    seconds_of_start = elapsed / len(workers)
    return seconds_of_start * (len(rows) - len(workers)) + seconds_of_turn * (results.bench["steps"] - WARMUP)


def take_turns(workers, steps, in_turn, tell_turn):
    """Take so many steps with each live worker, in turn. One that runs alone stops once it has_enough().

    A script that may wait for its data takes all its steps before the others. While it is stopped between two turns,
    its reads and sleeps go on, and its loader would seem faster than it is.
    """
    for worker in workers:
        if in_turn and worker.is_live and worker.run.may_wait_for_data:
            say(f"{worker.row.label}: takes its steps without turns, since what loads its data would get ahead")
            worker.take_steps(steps)
    began = time.monotonic()
    workers = [worker for worker in workers if not (in_turn and worker.run.may_wait_for_data)]
    for turn in range(1, steps + 1):
        waiting = [worker for worker in workers if worker.is_live]
        if not in_turn:
            waiting = [worker for worker in waiting if not has_enough(worker.run)]
        if not waiting:
            return
        for worker in waiting:
            if len(waiting) > 1:
                time.sleep(PAUSE)
            worker.take_steps(1)
        workers.reverse()  # there and back, so that a drift of the machine's speed affects all alike
        if tell_turn:
            tell_turn(turn, time.monotonic() - began)
