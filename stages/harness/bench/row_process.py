"""A process of a row: it is started, allowed steps, watched, and ended with all processes that it has started."""

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from ..common import tell
from ..figures import tokens_per_second, words_on_speed
from ..steps import TURNS
from .failure import error_line, error_of, last_lines

ENOUGH_SECONDS = 6.0  # of counted steps; a card's clock settles within them
# Seconds without a step after which a row is stopped. The first step includes the start and
# the compilation, and NCCL waits 600 s for a rank before it says which one is missing.
PATIENCE = 660
PATIENCE_AT_THE_END = 35  # seconds that a row has to end when it is asked to; torchrun gives its ranks 30
PAUSE = 0.01  # seconds between two polls of a row
STEPS_OF_A_START = 2  # a row starts and compiles in the first one, and says what it is with the second one
MOST_OUTPUT = 20_000  # bytes: why a row failed is looked for in the end of what it printed


class RowProcess:
    """A process of a row in a round. It gives the Results the lines of its record, and why it failed.

    allowed: how many steps it may take so far. may_end: whether no more steps are wanted. steps_per_turn: how many it
    takes in a turn. turn: the number of its turn; None before the first one, and if it takes none. has_ended: whether
    it has ended, or was stopped.
    """

    def __init__(self, row, results, round_number):
        self.row, self.results, self.round_number = row, results, round_number
        self.temporary_folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        self.folder = Path(self.temporary_folder.name)
        self.output, self.gate = self.folder / "output", self.folder / "gate"
        self.allowed = 0
        self.allow(STEPS_OF_A_START)
        self.records = {}  # {rank: the open file of its record}
        self.errors = {}  # {rank: the line "error" of its record}
        self.may_end = False
        self.steps_per_turn = 1
        self.turn = None
        self.has_ended = False
        self.keep({"kind": "start"})  # makes its Run, and counts the process, whose number is in the command
        self.run = results.runs[row.name, round_number]
        self.process = self.start()

    def start(self):
        """Start its process, and return the Popen."""
        bench, number = self.results.bench, self.results.processes
        with self.output.open("wb") as out:
            return subprocess.Popen(
                # env also runs a launcher without #!, as a shell does, and exits with a status if it can't run one
                ["env", *self.row.command(bench, number, self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.row.variables(bench),
                start_new_session=True,  # Ctrl-C reaches the bench alone
            )

    @property
    def memory(self):
        """The bytes that its ranks have in memory; 0 without a meter, and before its first step."""
        if not self.run.steps:
            return 0
        return len(self.records) * (self.run.steps[-1].memory or 0)

    @property
    def steps_taken(self):
        """How many steps a rank has taken: the mean, rounded down; 0 before rank 0 has reported what it saw.

        No rank takes more steps than the gate allows. So the mean is as large only when all ranks have taken them.
        """
        if self.run.seen is None:
            return 0
        return (len(self.run.steps) + len(self.run.steps_of_other_ranks)) // self.run.seen.world_size

    @property
    def speed(self):
        """Its speed in words, by its last steps."""
        if not self.run.steps:
            return "no step was timed"
        return words_on_speed(tokens_per_second(self.run.steps[-2:], uneven=True), self.run.seen.unit)

    def steps_in(self, seconds):
        """Return how many steps fill these seconds, at least 1."""
        dts = [step.dt for step in self.run.steps[STEPS_OF_A_START:][-5:]]
        return max(1, math.ceil(seconds / statistics.median(dts))) if dts else 1

    def take_enough(self):
        """Let it take TURNS counted steps, and more until they fill ENOUGH_SECONDS, but no more than --steps allows."""
        most = self.results.bench["steps"] - self.run.warmup
        if self.results.bench["environment"]["device"] != "cpu":
            most -= 1  # the last one is left for the profile that watch.py makes on a card
        first = min(TURNS, most)
        self.take(first)
        self.take(max(0, min(self.steps_in(ENOUGH_SECONDS), most) - first))

    def take(self, steps):
        """Let it take some more steps, and wait until it has."""
        if self.has_ended:
            return
        self.allow(steps)
        self.wait()

    def allow(self, steps):
        """Allow it some more steps, by a byte of the gate for each: see watch/gate.py."""
        self.allowed += steps
        try:
            with self.gate.open("ab") as gate:
                gate.write(b"." * steps)
        except OSError:  # the disk is full: without a gate the row ends
            self.gate.unlink(missing_ok=True)

    def let_end(self):
        """Let it stop. On a card it takes one more step first, which is profiled."""
        self.may_end = True
        self.gate.unlink(missing_ok=True)  # on a full disk there was none

    def wait(self):
        """Wait until it has taken all steps that it may take, or has ended. If it hangs, it is stopped.

        Polls are counted. A clock would go on while the whole machine is paused, and a row would seem to hang.
        """
        polls = 0  # since the last line of its record
        while not self.has_ended and (self.may_end or self.steps_taken < self.allowed):
            time.sleep(PAUSE)
            status = self.process.poll()  # before its last lines are read
            polls = 0 if self.read() else polls + 1
            error = self.error_of_silence(polls) if status is None else self.error_at_its_end(status)
            self.has_ended = status is not None or error is not None
            if error:
                self.fail(error)
            elif self.has_ended and not self.may_end:
                self.keep({"kind": "early end"})

    def error_at_its_end(self, status):
        """Return the line of the record that says why it failed, or None. status: of its exit."""
        if status:
            return error_of(status, self.printed(), self.errors)
        taken, warmup = len(self.run.steps), self.run.warmup
        if taken > warmup:
            return None
        message = f"ended after {taken} steps, and the first {warmup} are warm-up"
        return error_line(message, last_lines(self.printed()))

    def error_of_silence(self, polls):
        """Return the line of the record that says why a silent row is stopped, or None. polls: since its last line."""
        if polls * PAUSE > PATIENCE:
            return error_line(f"no step within {PATIENCE} s, so it was stopped", last_lines(self.printed()))
        return None

    def printed(self):
        """Return the end of what it printed."""
        with self.output.open("rb") as file:
            file.seek(max(0, self.output.stat().st_size - MOST_OUTPUT))
            return file.read().decode("utf-8", "replace")

    def read(self):
        """Keep the new lines of its records, of which each rank has one. Return whether there were new lines."""
        has_news = False
        for path in self.folder.glob("record*"):
            rank = int(path.suffix[1:] or "0")
            if rank not in self.records:
                self.records[rank] = path.open("rb")
            for line in new_lines(self.records[rank]):
                has_news = True
                if line["kind"] == "error":
                    self.errors[rank] = line
                elif rank == 0:
                    self.keep(line)
                elif line["kind"] == "step":
                    self.keep(line | {"kind": "step of another rank"})
        return has_news

    def fail(self, error):
        """Keep why it failed, a line of the record, and end what is left of it, which would disturb other rows."""
        self.keep(error)
        tell(f"{self.row.title} failed: {error['message']}")
        if error["traceback"] and not error["out_of_memory"]:
            tell(error["traceback"])
        end_group(self.process)

    def keep(self, line):
        """Give the Results a line."""
        self.results.add(line | {"name": self.row.name, "round": self.round_number, "turn": self.turn})

    def close(self):
        """End it and what it has started, and remove its folder."""
        end_group(self.process)
        for file in self.records.values():
            file.close()
        self.temporary_folder.cleanup()


def new_lines(file):
    """Yield the new lines of a file of JSON. A line that is not yet complete is left for later."""
    while True:
        place = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(place)
            return
        yield json.loads(line)


def end_group(process):
    """End a process and what it has started, which may have outlived it. torchrun ends its ranks when it is asked."""
    try:
        send_to_group(process, signal.SIGTERM)
    finally:  # also if Ctrl-C is pressed once more
        send_to_group(process, signal.SIGKILL)


def send_to_group(process, signal_number):
    """Send a signal to a process and what it has started, and wait for the process."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal_number)
        process.wait(PATIENCE_AT_THE_END)
