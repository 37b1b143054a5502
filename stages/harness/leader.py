"""Runs workers, processes that take a step when asked, and leads several of them in turn, or all at once."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from . import machine
from .ladder import FOLDER
from .records import WARMUP

PATIENCE = 600  # seconds that a step may take, with its compilation
PATIENCE_AT_THE_END = 40  # seconds in which a process ends that was told to: torchrun gives its ranks 30
PAUSE = 0.02  # seconds between the steps of two workers: the last one's threads may still spin, waiting for work
REPORT_EVERY = 5  # seconds between two lines of progress
# What a process says of its end: a line of ours, or the last line of Python's report, with torchrun's mark before it.
ERROR_LINE = re.compile(r"(?:\[rank\d+\]: )?(?:.*\berror: (.+)|([\w.]*(?:Error|Exception): \S.*))")


@dataclass(frozen=True)
class Row:
    """A row of the table, or a probe: what is started for it.

    name: in the records and the table. script: what Python runs. change: the words of the table. flags: what it gets
    beyond the flags that all rows share. ranks: processes under torchrun; 0 runs the script without it. env:
    variables beside those of the bench. memory_budget: bytes that it may hold, or None.
    """

    name: str
    script: Path
    change: str = ""
    flags: tuple[str, ...] = ()
    ranks: int = 0
    env: dict[str, str] = field(default_factory=dict)
    memory_budget: int | None = None


@dataclass(frozen=True)
class Enough:
    """When a row has been measured long enough: after so many counted steps, which also took so many seconds."""

    steps: int
    seconds: float = 0.0


def say(line):
    """Print a line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def error_message(stderr, status):
    """Return what a process said of its end, in one line: its last error, or its exit status."""
    if status == -signal.SIGKILL:
        return "killed by the system, most likely out of memory: try a smaller --batch-size"
    for line in reversed(stderr.splitlines()):
        match = ERROR_LINE.fullmatch(line.strip())
        if match:
            return (match[1] or match[2])[:200]
    if status == 0:
        return "ended before its last step"
    return f"exit status {status}"


class Worker:
    """A row at work, in a process of its own. It takes a step for each ask(), and ends by itself when the bench dies.

    is_live: whether it can be asked for another step. has_summary: whether that has come. counted: the seconds of its
    steps after the warm-up. memory: the most bytes that it held, of all ranks.
    """

    def __init__(self, row, flags, keep):
        """Start the process. flags: what all rows share. keep(name, entry) gets each line of its record, a dict."""
        self.row = row
        self.keep = keep
        self.is_live = True
        self.has_summary = False
        self.steps = 0
        self.counted = []
        self.memory = 0
        self.stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        command = [sys.executable]
        if row.ranks:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={row.ranks}"]
        python_path = str(FOLDER)  # where the harness is
        if os.environ.get("PYTHONPATH"):
            python_path += os.pathsep + os.environ["PYTHONPATH"]
        self.process = subprocess.Popen(
            [*command, str(row.script), *flags, *row.flags, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONPATH": python_path} | row.env,
            start_new_session=True,  # Ctrl-C reaches the bench alone, which then stops its workers
            preexec_fn=self.limit_memory if row.memory_budget else None,
        )

    def limit_memory(self):
        """In the new process: let PyTorch's allocation fail beyond the budget."""
        resource.setrlimit(resource.RLIMIT_DATA, (self.row.memory_budget, self.row.memory_budget))

    def ask(self):
        """Ask for one step, and do not wait for it."""
        with contextlib.suppress(OSError):  # the process is gone: wait() finds out why
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def close(self):
        """Ask for the summary, and do not wait for it."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def wait(self):
        """Wait until the step, or the summary, has come. A process that comes to neither has failed."""
        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(PATIENCE)
        try:
            for line in self.process.stdout:
                if not line.startswith('{"kind": '):
                    continue  # a script has printed it before parse_args(), which keeps stdout for the record
                try:
                    entry = json.loads(line)
                except ValueError:
                    self.fail("wrote a line to the pipe of its record that is no JSON")
                    return
                self.keep(self.row.name, entry)
                if entry["kind"] == "step":
                    self.note_step(entry)
                    return
                if entry["kind"] == "summary":
                    self.note_summary()
                    return
            status = self.process.wait()
            self.stderr.seek(0)
            self.fail(error_message(self.stderr.read(), status))
        except TimeoutError:
            self.send(signal.SIGTERM)
            self.fail(f"no answer in {PATIENCE} s: stopped")
        finally:
            signal.alarm(0)

    def note_step(self, entry):
        """Keep how long a step took, and how much memory the process holds."""
        self.steps += 1
        if self.steps > WARMUP and "dt" in entry:
            self.counted.append(entry["dt"])
        self.memory = (entry.get("memory") or 0) * max(1, self.row.ranks)

    def note_summary(self):
        """Keep that the run has ended. One that nobody asked to end has failed. What comes later costs no row."""
        if not self.process.stdin.closed:
            self.fail("ended before its last step")
        self.is_live = False
        self.has_summary = True

    def has_enough(self, enough):
        """Tell whether it has taken Enough counted steps."""
        return self.steps - WARMUP >= enough.steps and sum(self.counted) >= enough.seconds

    def fail(self, message):
        """Note in the record, and on stderr, why the process can't go on."""
        self.is_live = False
        self.keep(self.row.name, {"kind": "error", "error": message})
        say(f"{self.row.name} failed: {message}")

    def stop(self):
        """End the process and all that it started, at once where it does not end by itself."""
        self.close()
        if self.has_summary:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE_AT_THE_END)
        self.send(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_AT_THE_END)  # torchrun's ranks are out of our reach: it ends them
        self.send(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.stderr.close()

    def send(self, signal_number):
        """Send a signal to the process and to all that it started in its group."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal_number)


def give_up(signal_number, frame):
    raise TimeoutError


def lead(rows, flags, keep, steps, enough=None, together=False):
    """Take fresh workers of some rows through the warm-up and so many counted steps, one step each in turn.

    flags: what all rows share. keep(name, entry) gets each line of their records. enough: an Enough after which a row
    takes no more steps, or None. together: whether all take each counted step at the same time instead of in turn.
    Returns how many rows started, from the first on: those for which no memory is left do not.
    """
    workers = []
    try:
        for row in rows:
            # a process may need half as much again before it reports its own memory
            if workers and machine.free_memory() < 1.5 * max(worker.memory for worker in workers):
                say(f"{row.name} and those below it have to wait: there is no memory for another process")
                break
            say(f"{row.name}: start and warm-up")
            worker = Worker(row, flags, keep)
            workers.append(worker)
            for _ in range(WARMUP):
                take_step([worker])
        take_counted_steps(workers, steps, enough, together)
        for worker in workers:
            worker.close()
        for worker in workers:
            if worker.is_live:
                worker.wait()
        return len(workers)
    finally:
        for worker in workers:
            worker.stop()


def take_counted_steps(workers, steps, enough, together):
    """Take so many steps with each worker that lives, and say every few seconds how far they are."""
    began = reported = time.monotonic()
    for step in range(1, steps + 1):
        waiting = [worker for worker in workers if worker.is_live and not (enough and worker.has_enough(enough))]
        if not waiting:
            return
        if together:
            take_step(waiting)
        else:
            for worker in waiting:
                time.sleep(PAUSE)
                take_step([worker])
            workers.reverse()  # there and back, so that a drift of the machine's speed hits all alike
        now = time.monotonic()
        if now > reported + REPORT_EVERY:
            reported = now
            left = (now - began) / step * (steps - step)
            say(f"step {step}/{steps}, at most {left:.0f} s left")


def take_step(workers):
    """Ask some workers for a step, and wait until each has taken it."""
    live = [worker for worker in workers if worker.is_live]
    for worker in live:
        worker.ask()
    for worker in live:
        worker.wait()
