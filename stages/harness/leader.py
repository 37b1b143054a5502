"""A worker is a process that takes a step when asked. Session leads several in turn, Trainings several side by side."""

import contextlib
import functools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from . import machine, results
from .results import WARMUP

PATIENCE = 5  # seconds in which a process ends that was told to, or that has closed its output
TORCHRUN_PATIENCE = 40  # seconds: torchrun itself gives its ranks 30 before it kills them
PATIENCE_WITH_ONE = 0.005  # seconds that Trainings waits for one worker before it looks at the next
REPORT_EVERY = 5  # seconds between two reports of Trainings
TOOK_STEP, ENDED = "took its step", "ended"  # what a worker has done
PAUSE = 0.02  # seconds between the steps of two workers: the last one's threads may still spin, waiting for work
KILLED_MESSAGE = "killed by the system, most likely out of memory: try a smaller --batch-size"
# what a process says of its end: a line of ours, or the last line of Python's report, with torchrun's mark
# before it
ERROR_LINE = re.compile(r"(?:\[rank\d+\]: )?(?:.*\berror: (.+)|([\w.]*(?:Error|Exception): \S.*))")
# torchrun's report of a rank that a signal ended; the last one is of the rank that ended first
SIGNAL_LINE = re.compile(r"\s*traceback : Signal \d+ \((\w+)\) received by PID \d+")


@dataclass(frozen=True)
class Row:
    """A row of the table, or a probe: what is started for it.

    name: in the records and the table. script: the path of the file that Python runs. change: the words of
    the table. flags: what it gets beyond the flags that all rows share. ranks: processes under torchrun; 0
    runs the script without it. env: variables that take the place of those in the bench's own environment;
    None leaves one out.
    """

    name: str
    script: Path
    change: str = ""
    flags: tuple[str, ...] = ()
    ranks: int = 0
    env: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why a worker failed. reason: a word of results.REASONS; message: a line for the user."""

    reason: str
    message: str


def say(line, brief=False):
    """Print a line of progress on stderr. On a terminal a brief line stays only until the next line replaces it."""
    if sys.stderr is None:  # the bench was started with a closed one
        return
    try:
        if sys.stderr.isatty():
            ending = "\n"
            if brief:
                line = line[: shutil.get_terminal_size().columns - 1]  # a line that wraps can't be replaced as a whole
                ending = ""
            print(f"\r\033[K{line}", end=ending, file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
    except OSError:  # a terminal that is gone costs no record
        silence(sys.stderr)


def silence(stream):
    """Let a stream that can't be written lead nowhere: Python would try again when it ends, and fail for that."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def error_message(text):
    """What a process said of its end: its last error line, else the signal that torchrun names, else its last line."""
    lines = text.strip().splitlines()
    for line in reversed(lines):
        match = ERROR_LINE.fullmatch(line)
        if match:
            return (match[1] or match[2])[:200]
    for line in reversed(lines):
        match = SIGNAL_LINE.fullmatch(line)
        if match:
            return KILLED_MESSAGE if match[1] == "SIGKILL" else f"ended by {match[1]}"
    return lines[-1][:200] if lines else ""


def environment_of(row):
    """The environment variables of a row's process, a dict."""
    env = os.environ | {"PYTHONSAFEPATH": ""} | row.env  # without the safe path a stage finds the harness beside itself
    return {name: value for name, value in env.items() if value is not None}


class Worker:
    """A row at work, in a process of its own. It takes a step for each ask() and ends by itself when the bench dies.

    failure: why it failed, a Failure, or None. memory: the most bytes that it held, of all ranks. speed:
    tokens per second of its last step.
    """

    def __init__(self, row, flags, timeout, keep, memory_budget=None):
        """Start the process. keep(entry) gets each line of its record, a dict.

        flags: what all rows share. timeout: seconds that a step may take. memory_budget: bytes that it may
        hold, or None.
        """
        self.row = row
        self.timeout = timeout
        self.keep = keep
        self.memory_budget = memory_budget
        self.failure = None
        self.memory = 0
        self.speed = 0.0
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            self._command(flags),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            start_new_session=True,  # Ctrl-C reaches the bench alone, which then stops its workers in order
            env=environment_of(row),
        )
        self.lines = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _command(self, flags):
        command = [sys.executable]
        if self.row.ranks:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.row.ranks}"]
        return [*command, str(self.row.script), *flags, *self.row.flags, "--worker"]

    def _read(self):
        """Queue the lines of the record, then None where the output ends. A library may print lines of its own."""
        for line in self.process.stdout:
            if line.startswith(b'{"kind":') and line.endswith(b"}\n"):
                with contextlib.suppress(ValueError):  # two lines in one, where a signal broke off the first
                    self.lines.put(json.loads(line))
        self.lines.put(None)

    def ask(self):
        """Ask for one step, and do not wait for it."""
        self.deadline = time.monotonic() + self.timeout
        with contextlib.suppress(OSError):  # the process is gone: took_step() finds out why
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    def close(self):
        """Ask for the summary, and do not wait for it."""
        self.deadline = time.monotonic() + self.timeout  # it may take the held-out loss first
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def took_step(self):
        """Wait until the step or the process has ended. Whether it was the step; if not, `failure` says more."""
        done = None
        while done is None:
            done = self.look(0.05)
        return done == TOOK_STEP

    def look(self, seconds):
        """What the process has done, for which this waits up to so many seconds: TOOK_STEP, ENDED, or None for neither.

        Where it ended, `failure` says whether that was too early.
        """
        if self.failure:
            return ENDED
        try:
            entry = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.failure = self._failure_in_waiting()
            return ENDED if self.failure else None
        if entry is None:
            self.failure = self._failure_of_exit()
            return ENDED
        if entry["kind"] == "error":
            self.failure = self._failure_of_error(entry)
            return ENDED
        self.keep(entry)
        if entry["kind"] == "step":
            self._look_at(entry)
            return TOOK_STEP
        return None

    def _look_at(self, step):
        """Keep how much memory the process holds, and how fast its step was."""
        held = (step.get("memory") or 0) * max(1, self.row.ranks)
        self.memory = max(self.memory, held)
        if "tokens" in step:
            self.speed = step["tokens"] / step["dt"]

    def _failure_in_waiting(self):
        """The Failure of a process that takes too long or too much, or None."""
        if time.monotonic() > self.deadline:
            message = f"no answer in {self.timeout:.0f} s: stopped; raise --timeout if it is only slow"
            return Failure(results.NO_ANSWER, message)
        if self.memory_budget and machine.resident_memory(self.process.pid) > self.memory_budget:
            message = f"out of memory: more than the budget of {self.memory_budget / 1e9:.1f} GB"
            return Failure(results.OUT_OF_MEMORY, message)
        return None

    def _failure_of_error(self, entry):
        """The Failure that a process wrote into its record, by the words of the rank that failed first."""
        # where a rank dies, rank 0 loses its peer, or torchrun interrupts it
        is_of_another_rank = entry["reason"] in (results.ANOTHER_RANK_ENDED, results.INTERRUPTED)
        if self.row.ranks > 1 and is_of_another_rank:
            return Failure(results.ANOTHER_RANK_ENDED, f"another rank has ended: {self._message_of_others(entry)}")
        return Failure(entry["reason"], entry["error"])

    def _message_of_others(self, entry):
        """What the ranks said of their end beside the one that wrote this error into the record."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(TORCHRUN_PATIENCE)  # torchrun's report comes last
        lines = [line for line in self._stderr().splitlines() if entry["error"] not in line]
        return error_message("\n".join(lines))

    def _failure_of_exit(self):
        """The Failure of a process that has closed its output, or None where it ended as it should."""
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return Failure(results.CRASHED, "closed its output, and did not end")
        if status == -signal.SIGKILL:
            return Failure(results.KILLED, KILLED_MESSAGE)
        message = error_message(self._stderr())
        if status == 2:
            return Failure(results.BAD_INPUT, message)
        if status != 0:
            how = f"exit status {status}"
            return Failure(results.CRASHED, f"{how}: {message}" if message else how)
        if not self.process.stdin.closed:
            return Failure(results.CRASHED, "ended before its last step")
        return None

    def _stderr(self):
        self.stderr.seek(0)
        return self.stderr.read().decode(errors="replace")

    def stop(self):
        """End the process and all that it started, at once where it does not end by itself. Its failure is kept."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # torchrun's ranks are in sessions of their own, and it alone reaches them
            self.process.wait(TORCHRUN_PATIENCE if self.row.ranks else PATIENCE)
        self.signal(signal.SIGKILL)
        self.process.wait()
        if self.failure:
            self.keep({"kind": "error", "reason": self.failure.reason, "error": self.failure.message})
        self.reader.join(PATIENCE)
        pipes = [self.process.stdin, self.stderr]
        if not self.reader.is_alive():  # else a process out of reach holds the pipe, and closing it would wait
            pipes.append(self.process.stdout)
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.close()

    def signal(self, signal_number):
        """Send a signal to the process and to all that it started in its group."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal_number)


def append_line(path, session, name, entry):
    """Append a worker's line, a dict, to the results file, with the session and the name of its row."""
    line = {"kind": entry["kind"], "session": session, "name": name} | entry
    with open(path, "a", encoding="utf-8") as f:
        f.write(json.dumps(line) + "\n")


def single_step(row, flags, timeout):
    """(step, failure) of a row's process that takes one step and ends; one of the two is None.

    step: the line that it wrote of its step, a dict. failure: why there is none, a Failure. Nothing goes to
    a record.
    """
    lines = []
    worker = Worker(row, flags, timeout, lines.append)
    try:
        worker.ask()
        if not worker.took_step():
            return None, worker.failure
        step = lines[-1]
        worker.close()
        worker.took_step()  # it has ended now, and the device is free for the next one
        return step, None
    finally:
        worker.stop()


def stop_all(workers):
    """End workers and all that they started. All are told before one is waited for, since each takes its time."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    for worker in workers:
        worker.stop()


class Session:
    """Fresh workers of some rows, led through warm-up and counted steps, one step each in turn.

    live: the workers that are at work. failed: the names of the rows whose worker failed.
    """

    def __init__(self, path, number, flags, timeout, memory_budget=None, sessions_after=0):
        """Nothing starts before lead().

        path: the results file, to which the workers' lines go under the session's number. flags, timeout,
        memory_budget: as of a Worker. sessions_after: how many sessions of as many steps come after this one.
        """
        self.path = path
        self.number = number
        self.flags = flags
        self.timeout = timeout
        self.memory_budget = memory_budget
        self.sessions_after = sessions_after
        self.live = []
        self.failed = set()

    def keep(self, name, entry):
        """Append a line to the results file, with the session and the name of its row."""
        append_line(self.path, self.number, name, entry)

    def start(self, row):
        """Start a row's Worker, and add it to those that are live."""
        keep = functools.partial(self.keep, row.name)
        worker = Worker(row, self.flags, self.timeout, keep, self.memory_budget)
        self.live.append(worker)
        return worker

    def room(self):
        """How many workers to start next: one at first, then two at once, since a compilation keeps one core busy.

        Each takes 1.5 times what the last one held, as far as is known; 0 where no memory is left for that.
        """
        most = 2 if self.live else 1
        needed = 0.0
        for worker in self.live:
            if worker.memory:
                needed = 1.5 * worker.memory
        if needed == 0:
            return most
        return min(most, int(machine.free_memory() // needed))

    def lead(self, rows, steps):
        """Take as many of the rows as memory holds through warm-up and so many counted steps; the names that failed."""
        try:
            self.warm_up(rows)
            self.take_steps(steps)
            self.ask_together(list(self.live), Worker.close)  # all at once, since each takes its time to leave
        finally:
            stop_all(self.live)
        return self.failed

    def warm_up(self, rows):
        """Start the rows, as many at once as room() says, and take each through its warm-up."""
        waiting = list(rows)
        while waiting:
            room = self.room()
            if room == 0:
                return
            started = [self.start(row) for row in waiting[:room]]
            del waiting[:room]
            place = f"{len(rows) - len(waiting)}/{len(rows)}"
            if self.sessions_after:
                place += f", then {self.sessions_after} more"
            say(f"[{place}] {', '.join(worker.row.name for worker in started)}: start and warm-up", brief=True)
            for _ in range(WARMUP):
                self.ask_together([worker for worker in started if worker.failure is None])

    def take_steps(self, steps):
        """Take every live worker through its counted steps, one worker after the other."""
        began = time.monotonic()
        for step in range(1, steps + 1):
            order = list(self.live)
            if step % 2 == 0:
                order.reverse()  # there and back, so that a drift of the machine's speed hits the first and last alike
            for worker in order:
                if len(order) > 1:
                    time.sleep(PAUSE)
                self.ask_together([worker])
            steps_left = steps - step + steps * self.sessions_after
            seconds_left = (time.monotonic() - began) / step * steps_left
            speeds = [f"{worker.row.name.split('_')[0]} {worker.speed:,.0f}" for worker in self.live if worker.speed]
            say(f"step {step}/{steps}, {seconds_left:.0f} s left | tok/sec {', '.join(speeds)}", brief=True)

    def ask_together(self, workers, ask=Worker.ask):
        """Ask workers for a step at once, wait for all of them, and drop those that failed."""
        for worker in workers:
            ask(worker)
        for worker in workers:
            worker.took_step()
        for worker in workers:
            if worker.failure:
                say(f"{worker.row.name} failed: {worker.failure.message}")
                self.failed.add(worker.row.name)
                self.live.remove(worker)
                worker.stop()


class Training:
    """One run of Trainings: a row, the number of its session, the steps it took so far, and its worker.

    Of the worker's lines it keeps the header, the error, and the summary with the training curve. The steps
    themselves are not written: six hundred of them would take a hundred times as much room as all that a
    page shows of a run.
    """

    def __init__(self, path, session, row, flags, timeout, steps):
        """Start the worker. path: the results file; flags, timeout: as of a Worker; steps: how many it is to take."""
        self.steps = steps
        self.path = path
        self.session = session
        self.row = row
        self.losses = []
        self.worker = Worker(row, flags, timeout, self.keep)

    def keep(self, entry):
        """Append the worker's line to the results file, unless it is a step, or the summary of too few."""
        if entry["kind"] == "step":
            self.losses.append(entry["loss"])
            return
        if entry["kind"] == "summary":
            if len(self.losses) < self.steps:  # a user's script that ends by itself: an error follows
                return
            entry = entry | {"curve": results.training_curve(self.losses)}
        append_line(self.path, self.session, self.row.name, entry)


class Trainings:
    """Runs that train side by side, each in a fresh process and at its own pace: for their losses, not for their speed.

    live: the Trainings that are at work. most_memory: the most bytes that one of them held.
    """

    def __init__(self, path, flags, timeout, steps, at_once):
        """Nothing starts before lead().

        path: the results file. flags, timeout: as of a Worker. steps: how many each run takes, warm-up
        included. at_once: how many may run at a time, where there is memory for them.
        """
        self.path = path
        self.flags = flags
        self.timeout = timeout
        self.steps = steps
        self.at_once = at_once
        self.live = []
        self.most_memory = 0
        self.runs = 0
        self.runs_ended = 0
        self.steps_taken = 0

    def lead(self, runs):
        """Take all runs through their steps, in this order. runs: a list of (number of the session, Row)."""
        waiting = list(runs)
        self.runs = len(waiting)
        self.began = self.reported = time.monotonic()
        try:
            while waiting or self.live:
                while waiting and self.has_room():
                    session, row = waiting.pop(0)
                    self.start(session, row)
                for training in list(self.live):
                    self.look_at(training)
                if time.monotonic() > self.reported + REPORT_EVERY:
                    self.report()
        finally:
            stop_all([training.worker for training in self.live])

    def has_room(self):
        """Whether another run may start: two at first, which show what one holds, then as many as memory holds."""
        if len(self.live) >= self.at_once:
            return False
        if self.most_memory == 0:
            return len(self.live) < 2
        needed = 1.5 * self.most_memory
        for training in self.live:  # what the others will still take
            needed += max(0, self.most_memory - training.worker.memory)
        return not self.live or machine.free_memory() > needed

    def start(self, session, row):
        """Start a run, and ask for its first step."""
        training = Training(self.path, session, row, self.flags, self.timeout, self.steps)
        self.live.append(training)
        training.worker.ask()

    def look_at(self, training):
        """See whether a run took its step, and ask for the next; where it has ended, let it go."""
        worker = training.worker
        done = worker.look(PATIENCE_WITH_ONE)
        if done == TOOK_STEP:
            self.steps_taken += 1
            self.most_memory = max(self.most_memory, worker.memory)
            if len(training.losses) < self.steps:
                worker.ask()
            else:
                worker.close()
        elif done == ENDED:
            self.live.remove(training)
            self.runs_ended += 1
            if worker.failure:
                self.steps_taken += self.steps - len(training.losses)  # they are no longer to come
                say(f"{training.row.name} failed: {worker.failure.message}")
            worker.stop()
            self.report()

    def report(self):
        """Say which runs are at work, how far they are, and how long all will take."""
        self.reported = time.monotonic()
        places = []
        for training in self.live:
            place = f"step {len(training.losses)}/{self.steps}"
            if len(training.losses) == self.steps:
                place = "held-out loss"
            places.append(f"{training.row.name} (run {training.session + 1}) {place}")
        left = ""
        if self.steps_taken:
            steps_left = self.runs * self.steps - self.steps_taken
            seconds = (self.reported - self.began) / self.steps_taken * steps_left
            left = f", {seconds:,.0f} s left"
        say(f"[{self.runs_ended}/{self.runs} runs{left}] {', '.join(places)}", brief=True)
