"""Workers: processes that take a step when asked, led in turn."""

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
from .ladder import FOLDER, NAMES
from .record import WARMUP

PATIENCE = 600  # seconds that a step may take, with its compilation
PATIENCE_AT_THE_END = 40  # seconds in which a process ends that was told to: torchrun gives its ranks 30
PAUSE = 0.02  # seconds between the steps of two workers: the last one's threads may still spin, waiting for work


@dataclass(frozen=True)
class Row:
    """What is started for a row of the table, for a second run of one, or for the probe.

    name: in the records and the table. script: what Python runs. change: the words of the table. base: the name of the
    row that it is compared with. control_of: the name of the row that it is a second run of. flags: what it gets beyond
    the flags that all rows share. ranks: processes under torchrun; 0 runs the script without it. env: variables beside
    those of the bench. batch_size: what the mode `limit` tries. memory_budget: bytes that it may hold.
    """

    name: str
    script: Path
    change: str = ""
    base: str | None = None
    control_of: str | None = None
    is_probe: bool = False
    flags: tuple[str, ...] = ()
    ranks: int = 0
    env: dict[str, str] = field(default_factory=dict)
    batch_size: int | None = None
    memory_budget: int | None = None

    def about(self):
        """Return what the record tells of it, a dict."""
        return {
            "name": self.name,
            "stage": self.script.stem,
            "change": self.change,
            "base": self.base,
            "control_of": self.control_of,
            "is_probe": self.is_probe,
            "ranks": self.ranks,
        }


@dataclass(frozen=True)
class Enough:
    """When a row has been measured long enough: after so many counted steps, which also took so many seconds."""

    steps: int
    seconds: float


def say(line):
    """Print a line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)


class Worker:
    """A row at work, in a process of its own. It takes a step for each ask(), and ends by itself when the bench dies.

    run: the results.Run that it fills. Its figures are looked up there.
    """

    def __init__(self, row, flags, results, session):
        """Start the process. flags: what all rows share. results: the Results that keep each line of its record."""
        self.row = row
        self.results = results
        self.session = session
        self.keep({"kind": "start", "batch_size": row.batch_size})
        self.run = results.rows[row.name].run(session, row.batch_size)
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
        )
        if row.memory_budget:  # beyond it PyTorch's allocation fails
            resource.prlimit(self.process.pid, resource.RLIMIT_DATA, (row.memory_budget, row.memory_budget))

    @property
    def is_live(self):
        """Whether it can be asked for another step, or for its summary."""
        return self.run.summary is None and self.run.error is None

    @property
    def memory(self):
        """The most bytes that it held, of all ranks; 0 before its first step and without a meter."""
        if not self.run.steps:
            return 0
        return (self.run.steps[-1].get("memory") or 0) * max(1, self.row.ranks)

    def keep(self, entry):
        """Keep a line of its record."""
        self.results.add(self.session, self.row.name, entry)

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
                entry = entry_of(line)
                if entry is None:
                    continue
                self.keep(entry)
                if entry["kind"] == "header" and self.has_other_corpus(entry):
                    self.fail("trains on another text than the bench, as after a failed download: start it again")
                    return
                if entry["kind"] == "summary" and not self.process.stdin.closed:  # nobody asked for it
                    self.fail("ended before its last step")
                if entry["kind"] in ("step", "summary"):
                    return
            status = self.process.wait()
            self.stderr.seek(0)
            message = error_message(self.stderr.read(), status)
            is_short = status == -signal.SIGKILL or re.search(machine.OUT_OF_MEMORY, message) is not None
            self.fail(message[:200], out_of_memory=is_short)
        except TimeoutError:
            self.send(signal.SIGTERM)
            self.fail(f"no answer in {PATIENCE} s: stopped")
        finally:
            signal.alarm(0)

    def has_other_corpus(self, header):
        """Tell whether the run of a stage trains on another text than the bench, or in other tokens."""
        corpus = [header["settings"]["corpus"], header["settings"]["tokenizer"]]
        return header["stage"] in NAMES and corpus != self.results.bench["corpus"]

    def has_enough(self, enough):
        """Tell whether it has taken Enough counted steps."""
        counted = self.run.steps[WARMUP:]
        return len(counted) >= enough.steps and sum(step["dt"] for step in counted) >= enough.seconds

    def fail(self, message, out_of_memory=False):
        """Note in the record, and on stderr, why the process can't go on."""
        self.keep({"kind": "error", "error": message, "out_of_memory": out_of_memory})
        say(f"{self.row.name} failed: {message}")

    def stop(self):
        """End the process and all that it started, at once where it does not end by itself."""
        self.close()
        if self.run.has_ended:
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


def entry_of(line):
    """Return a line of a record as a dict, or None for what a script printed before parse_args() took its stdout."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    is_of_record = isinstance(entry, dict) and entry.get("kind") in ("header", "step", "summary")
    return entry if is_of_record else None


def error_message(stderr, status):
    """Return what a process said of its end, in one line: its last error, or its exit status."""
    if status == -signal.SIGKILL:
        return "killed by the system, most likely out of memory: try a smaller --batch-size"
    for line in reversed(stderr.splitlines()):
        line = re.sub(r"^\[rank\d+\]: ", "", line.strip())  # torchrun's mark
        of_ours = re.match(r"(?:\S+\.py: )?error: (.+)", line)  # argparse names the script before it
        if of_ours:
            return of_ours[1]
        is_of_python = re.fullmatch(r"[\w.]*(Error|Exception)(: \S.*)?", line)  # the last line of its report
        if is_of_python or re.search(machine.OUT_OF_MEMORY, line):
            return line
    if status == 0:
        return "ended without log.finish(), or before its last step"
    return f"exit status {status}"


def lead(rows, flags, results, session, steps, enough=None, tell=None):
    """Take fresh workers of some rows through the warm-up and so many counted steps, one step each in turn.

    flags: what all rows share. results: the Results that keep all lines, under this session. enough: an Enough after
    which a row takes no more steps. tell: called after each turn with its number and the seconds of all turns so far.
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
            worker = Worker(row, flags, results, session)
            workers.append(worker)
            for _ in range(WARMUP):
                take_step(worker)
        take_turns(workers, steps, enough, tell)
        for worker in workers:
            worker.close()
        for worker in workers:
            if worker.is_live:
                worker.wait()
        return len(workers)
    finally:
        for worker in workers:
            worker.stop()


def take_turns(workers, steps, enough, tell):
    """Take so many steps with each worker that lives, in turn."""
    began = time.monotonic()
    for turn in range(1, steps + 1):
        waiting = [worker for worker in workers if worker.is_live and not (enough and worker.has_enough(enough))]
        if not waiting:
            return
        for worker in waiting:
            if len(waiting) > 1:
                time.sleep(PAUSE)
            take_step(worker)
        workers.reverse()  # there and back, so that a drift of the machine's speed hits all alike
        if tell:
            tell(turn, time.monotonic() - began)


def take_step(worker):
    """Ask a worker for a step, and wait until it has taken it."""
    if worker.is_live:
        worker.ask()
        worker.wait()
