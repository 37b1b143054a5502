"""A worker is the process of a row, or what launched its ranks. Each rank takes a step when the bench asks for it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from multiprocessing import connection

from .. import leader
from ..common import tell

# Seconds that a step may take. The first one includes the start and the compilation, and NCCL waits 600 s for a rank
# before it says which one is missing.
PATIENCE = 660
PATIENCE_AT_THE_END = 10  # seconds that a process has to leave by itself
MOST_OUTPUT = 20_000  # bytes that are kept of what a row prints
LAST_LINES = 20  # of them, shown where a process left no error line
TORCHRUNS_FILES = "torch/distributed/elastic/"  # its report of failed ranks begins with their names


class Worker:
    """A row at work.

    run: the results.Run that it fills. ranks: {connection: whether this rank waits for a request}. groups: the process
    groups that are to end with it; torchrun starts each rank in one of its own. output: the end of what it printed.
    """

    def __init__(self, row, results, round_number, folder):
        """Start the process. results: the Results that keep each line of its record. folder: of the bench's sockets."""
        self.row = row
        self.results = results
        self.round_number = round_number
        self.keep({"kind": "start"})
        tell(f"{row.title}: start and warm-up")
        self.run = results.runs[row.name, round_number]
        self.ranks = {}
        self.number_of_ranks = 1  # until one says how many there are
        self.is_to_end = False
        self.output = b""
        self.groups = set()
        self.server = None
        self.process = None
        try:
            self.start(folder)
        except (OSError, RuntimeError) as error:  # too many files or processes are open, or the launcher is gone
            self.fail(f"it can't be started: {error}", "")

    def start(self, folder):
        """Start the process, and listen to it. Raises OSError or RuntimeError where the system has no room for it."""
        path = tempfile.mktemp(dir=folder)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(path)
        self.server.listen()
        self.process = subprocess.Popen(
            self.row.command(self.results.bench),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env=os.environ | self.row.variables(self.results.bench) | {leader.PATH: path},
            start_new_session=True,  # Ctrl-C reaches the bench alone
        )
        self.groups.add(self.process.pid)
        self.reader = threading.Thread(target=self.read_output, daemon=True)
        self.reader.start()

    def read_output(self):
        """Take in what the row prints, so that it never waits for a reader. This is a thread."""
        with self.process.stdout as pipe:
            while printed := pipe.read(65_536):
                self.output = (self.output + printed)[-MOST_OUTPUT:]

    def keep(self, line):
        """Keep a line of its record."""
        self.results.add(line | {"name": self.row.name, "round": self.round_number})

    @property
    def is_live(self):
        """Whether it can be asked for another step, or for its summary."""
        return self.run.summary is None and self.run.error is None

    @property
    def is_ready(self):
        """Whether all its ranks are there and wait for a request."""
        return len(self.ranks) == self.number_of_ranks and all(self.ranks.values())

    def take_steps(self, count):
        """Take steps, one after the other."""
        for _ in range(count):
            self.ask(leader.STEP)

    def ask(self, request):
        """Ask all ranks for a step, or for the end, and wait until that is done. A row that fails is ended here."""
        self.wait()  # for its start
        self.is_to_end = request == leader.END
        if self.is_live:
            for rank in self.ranks:
                self.ranks[rank] = False
                with contextlib.suppress(OSError):  # where it is gone, the end of its connection is heard next
                    rank.send_bytes(request)
            self.wait()

    def wait(self):
        """Hear the ranks until all wait for a request, or the summary came. A row that comes to neither fails."""
        deadline = time.monotonic() + PATIENCE
        while self.is_live and not self.is_ready:
            speakers = connection.wait([self.server, *self.ranks], timeout=0.5)
            if speakers:
                self.hear(speakers[0])
            elif self.process.poll() is not None:  # before any rank was there
                self.fail_as_it_ended()
            elif time.monotonic() > deadline:
                self.fail(f"no step in {PATIENCE} s: stopped", self.last_lines())

    def hear(self, speaker):
        """Take in a line of a rank, see leader.py, or the end of its connection; or let a new rank in."""
        if speaker is self.server:
            rank = connection.Connection(self.server.accept()[0].detach())
            self.ranks[rank] = False
            return
        try:
            line = json.loads(speaker.recv_bytes())
        except (EOFError, OSError):
            del self.ranks[speaker]
            if not (self.is_to_end and self.ranks):  # else the summary may still come, from rank 0
                self.fail_as_it_ended()
            return
        match line["kind"]:
            case "hello":
                self.number_of_ranks = line["ranks"]
                self.groups.add(line["group"])
            case "ready":
                self.ranks[speaker] = True
            case "notice":
                tell(f"{self.row.title}: {line['message']}")
            case "error":
                # A rank that raised exits with 1. Another status is that of a rank which this one only lost.
                if self.number_of_ranks > 1 and self.exit_status() not in (None, 1):
                    self.fail_as_it_ended()
                else:
                    self.fail(reason_of(line["message"]), line["traceback"], line["out_of_memory"])
            case _:
                self.keep(line)

    def fail_as_it_ended(self):
        """Fail by how the process ended: by which signal, or with which exit status."""
        status = self.exit_status()
        said = self.last_lines()
        if status is None:
            message = "the connection of a rank ended, and nothing tells why"
        elif status == -signal.SIGKILL:
            message = "killed by SIGKILL, most likely since memory was short"
        elif status < 0:
            message = f"killed by {signal.Signals(-status).name}"
        elif status == 0:
            message = f"ended after {len(self.run.steps)} of {self.results.bench['steps']} steps"
        elif said:
            message = f"exit status {status}; last printed: {said.splitlines()[-1]}"
        else:
            message = f"exit status {status}"
        first_failure = self.first_failure()
        if first_failure:
            message = f"rank {first_failure[0]}: {message}"
        self.fail(message, said, out_of_memory=status == -signal.SIGKILL)

    def exit_status(self):
        """Return the exit status of a process that ends, negative for a signal; None where it does not end.

        Of several ranks it is that of the one that failed first.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_AT_THE_END)
        self.reader.join(PATIENCE_AT_THE_END / 10)  # it goes on where a child of the process can print
        first_failure = self.first_failure()
        return int(first_failure[1]) if first_failure else self.process.returncode

    def first_failure(self):
        """Return (rank, exit status) of the rank that failed first, two texts, or None where torchrun reports none."""
        # the report tells how each rank ended, the one that failed first below the others
        failures = re.findall(r"^ *rank *: (\d+).*\n *exitcode *: (-?\d+)", self.printed(), re.MULTILINE)
        return failures[-1] if failures else None

    def printed(self):
        """Return the end of what the row printed."""
        return self.output.decode("utf-8", "replace")

    def last_lines(self):
        """Return the last lines that the row printed, without torchrun's report of its ranks below them."""
        printed, _, report = self.printed().partition(TORCHRUNS_FILES)
        lines = printed.strip().splitlines()
        if report:
            lines = lines[:-1]  # it begins with the time
        return "\n".join(lines[-LAST_LINES:])

    def fail(self, message, said, out_of_memory=False):
        """Keep and print why the row can't go on, and end it, since it would disturb the rows that go on.

        said: the traceback, or what it last printed.
        """
        self.keep({"kind": "error", "message": message, "traceback": said, "out_of_memory": out_of_memory})
        tell(f"{self.row.title} failed: {message}")
        if not out_of_memory and said not in ("", message):
            tell(said)
        self.close()

    def close(self):
        """End all that the row has started. After its summary it may first leave by itself."""
        if self.run.summary:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE_AT_THE_END)
        for group in self.groups:
            with contextlib.suppress(OSError):  # it may be gone
                os.killpg(group, signal.SIGKILL)
        self.groups = set()  # a later process may get the same number
        if self.process:
            self.process.wait()
        for each in (self.server, *self.ranks):
            if each:
                each.close()


def reason_of(message):
    """Return the message of an exception; of one in a process of a DataLoader its last line, which has the reason."""
    return message.splitlines()[-1] if "in DataLoader worker process" in message else message
