"""A worker is the process of a row, or what launched its ranks. Each rank takes a step when the bench asks for it."""

import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from multiprocessing import connection
from pathlib import Path

from .. import leader
from ..common import tell

# Seconds that a step may take. The first one includes the start and the compilation, and NCCL waits 600 s for a rank
# before it says which one is missing.
PATIENCE = 660
PATIENCE_AT_THE_END = 10  # seconds that a process has to leave by itself
MOST_OUTPUT = 20_000  # bytes that are read of what a row printed, its end
LAST_LINES = 20  # of them, shown where a process left no error line
TORCHRUNS_REPORT = re.compile(r"^.*torch/distributed/elastic/", re.MULTILINE)  # how its report of failed ranks begins
# What this report says of each of them. The one that failed first is the last one in it.
FAILED_RANK = re.compile(r"^ *rank *: (\d+).*\n *exitcode *: (-?\d+)", re.MULTILINE)


class Worker:
    """A row at work.

    run: the results.Run that it fills. ranks: {connection: whether this rank waits for a request}. groups: the process
    groups that are to end with it; torchrun starts each rank in one of its own. folder: for its socket and what it
    prints. to_close: what is to be closed when the process has ended.
    """

    def __init__(self, row, results, round_number):
        """Start the process. results: the Results that keep each line of its record."""
        self.row = row
        self.results = results
        self.round_number = round_number
        self.keep({"kind": "start"})
        self.run = results.runs[row.name, round_number]
        self.ranks = {}
        self.number_of_ranks = 1  # until one says how many there are
        self.steps = []  # lines of steps that not all ranks are known to have taken
        self.other_losses = []  # the lines of other ranks on these
        self.groups = set()
        self.to_close = contextlib.ExitStack()
        tell(f"{row.title}: start and warm-up")
        try:
            self.start()
        except OSError as error:  # too many files or processes are open, or the launcher is gone
            self.fail(f"it can't be started: {error}", "")

    def start(self):
        """Start the process, and listen to it. Raises OSError where the system has no room for it."""
        self.folder = self.to_close.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        path = os.path.join(self.folder, "socket")
        self.server = self.to_close.enter_context(socket.socket(socket.AF_UNIX))
        self.server.bind(path)
        self.server.listen()
        with open(os.path.join(self.folder, "output"), "wb") as output:
            self.process = subprocess.Popen(
                self.row.command(self.results.bench),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.row.environment(self.results.bench) | {leader.PATH: path},
                start_new_session=True,  # Ctrl-C reaches the bench alone
            )
        self.to_close.callback(self.process.wait)
        self.groups.add(self.process.pid)

    @property
    def is_live(self):
        """Whether it can be asked for another step, or for its summary."""
        return self.run.summary is None and self.run.error is None

    def take_steps_until(self, count):
        """Take steps until it has so many. The first request brings two, since a script takes one step by itself."""
        while self.is_live and len(self.run.steps) < count:
            self.ask(leader.STEP)

    def ask(self, request):
        """Ask all ranks for a step, or for the end, and wait until that is done. A row that fails is ended here."""
        self.wait()  # for its start
        if self.is_live:
            for rank in self.ranks:
                self.ranks[rank] = False
                with contextlib.suppress(OSError):  # where it is gone, the end of its connection is heard next
                    rank.send_bytes(request)
            self.wait()

    def wait(self):
        """Hear the ranks until all wait for a request, or the summary came. A row that comes to neither fails."""
        deadline = time.monotonic() + PATIENCE
        while self.is_live:
            if len(self.ranks) == self.number_of_ranks and all(self.ranks.values()):
                self.keep_steps()
                return
            speakers = connection.wait([self.server, *self.ranks], timeout=0.5)
            if self.server in speakers:
                rank = connection.Connection(self.server.accept()[0].detach())
                self.ranks[self.to_close.enter_context(rank)] = False
            elif speakers:
                self.hear(speakers[0])
            elif self.process.poll() is not None:  # the process has ended, or what launched the ranks
                self.fail_as_it_ended()
            elif time.monotonic() > deadline:
                self.fail(f"no step in {PATIENCE} s: stopped", self.last_lines())

    def hear(self, rank):
        """Take in a line of a rank, see leader.py, or the end of its connection."""
        try:
            line = json.loads(rank.recv_bytes())
        except (EOFError, OSError):
            del self.ranks[rank]
            if not self.ranks:  # a launcher ends the others where one has failed
                self.fail_as_it_ended()
            return
        match line["kind"]:
            case "hello":
                self.number_of_ranks = line["ranks"]
                self.groups.add(line["group"])
            case "ready":
                self.ranks[rank] = True
            case "notice":
                tell(f"{self.row.title}: {line['message']}")
            case "step":
                self.steps.append(line)
            case "loss":
                self.other_losses.append(line)
            case "error":
                self.fail_as_it_ended(line)
            case _:
                self.keep(line)

    def keep_steps(self):
        """Keep the steps that all ranks have taken, each with the mean of their losses."""
        for step in self.steps:
            lines = [step] + [line for line in self.other_losses if line["step"] == step["step"]]
            losses = [line["loss"] for line in lines if line.get("loss") is not None]
            self.keep(step | {"loss": statistics.mean(losses)} if losses else step)
        self.steps, self.other_losses = [], []

    def keep(self, line):
        """Keep a line of its record."""
        self.results.add(line | {"name": self.row.name, "round": self.round_number})

    def fail_as_it_ended(self, error=None):
        """Fail by an exception, or by how the process ended: by which signal, or with which exit status.

        error: the line of the exception that a rank sent. That rank may only have lost another one, which was killed.
        """
        rank, status = self.end_of_process()
        rank_was_killed = rank is not None and status != 1  # one that raised exits with 1
        if error and not rank_was_killed:
            message = error["message"]
            if "in DataLoader worker process" in message:
                message = message.splitlines()[-1]  # which has the reason
            self.fail(message, error["traceback"], error["out_of_memory"])
            return
        printed = self.last_lines()
        if status is None:
            message = "the connection of a rank ended, and nothing tells why"
        elif status < 0:
            message = f"killed by {name_of_signal(-status)}"
        elif status == 0:
            message = f"ended after {len(self.run.steps)} of {self.results.bench['steps']} steps"
        else:
            message = f"exit status {status}"
            if printed:
                message += f"; last printed: {printed.splitlines()[-1]}"
        if rank is not None:
            message = f"rank {rank}: {message}"
        # hardly anything sends SIGKILL but Linux, where memory is short
        self.fail(message, printed, out_of_memory=status == -signal.SIGKILL)

    def end_of_process(self):
        """Wait for the process to end. Return (rank, exit status) of the rank that failed first, by torchrun's report.

        Without a report rank is None, and the status that of the process, or None where it does not end. A signal is a
        negative status.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_AT_THE_END)
        failed_ranks = FAILED_RANK.findall(self.printed())
        if not failed_ranks:
            return None, self.process.returncode
        rank, status = failed_ranks[-1]
        return rank, int(status)

    def printed(self):
        """Return the end of what the row printed."""
        path = Path(self.folder, "output")
        with path.open("rb") as output:
            output.seek(max(0, path.stat().st_size - MOST_OUTPUT))
            return output.read().decode("utf-8", "replace")

    def last_lines(self):
        """Return the last lines that the row printed, without torchrun's report of its ranks below them."""
        own_output = TORCHRUNS_REPORT.split(self.printed(), maxsplit=1)[0]
        return "\n".join(own_output.strip().splitlines()[-LAST_LINES:])

    def fail(self, message, details, out_of_memory=False):
        """Keep and print why the row can't go on, and end it, since it would disturb the rows that go on.

        details: the traceback, or the last lines that it printed, or "".
        """
        self.keep({"kind": "error", "message": message, "traceback": details, "out_of_memory": out_of_memory})
        tell(f"{self.row.title} failed: {message}")
        if details and not out_of_memory:
            tell(details)
        self.close()

    def close(self):
        """End all that the row has started. After its summary it may first leave by itself."""
        if self.run.summary:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE_AT_THE_END)
        while self.groups:  # each once, since a later process may get the same number
            with contextlib.suppress(OSError):  # it may be gone
                os.killpg(self.groups.pop(), signal.SIGKILL)
        self.to_close.close()


def name_of_signal(number):
    """Return "SIGKILL" for 9; real-time signals have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
