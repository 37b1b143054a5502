"""Runs the rows of a bench in rounds of fresh processes, and tells how far it is.

In a round all rows are alive at once, and take one step each in turn; or each one runs to its end.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .. import machine
from ..common import ROOT, refuse, say, tell, whole_file
from ..figures import WARMUP
from . import page, picture
from .forecast import words_on_forecast
from .table import table_of

ROUNDS = 3  # fewer would give no ±
ENOUGH_SECONDS = 6.0  # of counted steps, in which a card's clock settles
MOST_COUNTED_STEPS = 160
# Seconds without a step after which a row is stopped. The first one includes the start and the compilation, and NCCL
# waits 600 s for a rank before it says which one is missing.
PATIENCE = 660
PATIENCE_AT_THE_END = 35  # seconds that a row has to end when it is asked to; torchrun gives its ranks 30
MOST_OUTPUT = 20_000  # bytes that are read of what a row printed, its end
LAST_LINES = 20  # of them, shown where it failed
TORCHRUNS_REPORT = re.compile(r"^.*torch/distributed/elastic/", re.MULTILINE)  # how its report of failed ranks begins
# What this report says of each of them. The one that failed first is the last one in it.
FAILED_RANK = re.compile(r"^ *rank *: (\d+).*\n *exitcode *: (-?\d+)", re.MULTILINE)
# How Python, PyTorch, cuBLAS and NCCL say that memory is short, where they raise a plain error. The last one is
# oneDNN's. With "a primitive descriptor" it says that it has no kernel, so the pattern leaves that out.
OUT_OF_MEMORY = re.compile(
    r"out of memory|[Cc]an(no|')t allocate|ALLOC_FAILED|MemoryError|bad_alloc|Thread creation failed"
    r"|could not create a primitive(?! descriptor)"
)


def measure(results, path):
    """Measure all rounds, and show the table after each. path: of the record."""
    probe(results)
    rounds = results.bench["rounds"]
    began = time.monotonic()
    for number in range(rounds):
        reason = take_turns(number, results) if results.bench["turns"] else None
        if reason:
            tell(f"{reason}, so rows run one after the other")
            results.add({"kind": "apart", "reason": reason})
            began = time.monotonic()
        if not results.bench["turns"]:
            run_all(number, results, began)
        left = (time.monotonic() - began) / (number + 1) * (rounds - number - 1)
        tell(f"round {number + 1} of {rounds}, {words_on_time(left)} left")
        show(results, path)


def take_turns(number, results):
    """Take fresh processes of all rows through their warm-up, one after the other, and then through turns.

    Return why they can't, or None. number: of the round; it is decided in the first.
    """
    rows, turns = in_order(number, results), results.bench["turns"]
    with contextlib.ExitStack() as stack:
        processes = []
        for row in rows:
            process = stack.enter_context(contextlib.closing(RowProcess(row, results, number)))
            processes.append(process)
            process.take(WARMUP)
            end_where_all_would_fail(row, results)
            reason = why_not_in_turn(processes, results)
            if reason and number == 0:
                return reason
        tell(f"round {number + 1}: all rows are warm, and take {turns} turns")
        for turn in range(1, turns + 1):
            for process in processes:
                process.take(1, is_last=turn == turns)
            processes.reverse()  # so that a drift of speed affects all alike
    return None


def why_not_in_turn(processes, results):
    """Return why the rows of the RowProcesses that are alive can't take turns, together with one more, or None."""
    row = processes[-1].row
    techniques = results.runs[row.name, 0].techniques
    if techniques and techniques["loaders"]:
        return f"{row.title} loads its data ahead, in the turns of others"
    is_short = machine.free_memory() < 1.5 * max(process.memory for process in processes)
    if is_short and len(processes) < len(results.rows):
        return f"memory does not hold all {len(results.rows)} processes at once"
    return None


def run_all(number, results, began):
    """Run a fresh process of each row to its end, one after the other. began: when the first round did."""
    rows, rounds = in_order(number, results), results.bench["rounds"]
    for done, row in enumerate(rows, number * len(rows) + 1):
        run_row(row, results, number)
        left = words_on_time((time.monotonic() - began) / done * (rounds * len(rows) - done))
        tell(f"{words_on_end(row, results)}; round {number + 1} of {rounds}, {left} left in all")
        end_where_all_would_fail(row, results)


def in_order(number, results):
    """Return the Rows in the order of a round: there and back, so that a drift of speed affects all alike."""
    return [*results.rows.values()][:: -1 if number % 2 else 1]


def probe(results):
    """Measure how fast the machine is, and say what each row should bring. Exit where nothing runs on its card."""
    program = [sys.executable, str(ROOT / "stages" / "harness" / "bench" / "probe.py")]
    with contextlib.closing(Process(lambda record: [*program, record, *results.bench["flags"]], os.environ)) as process:
        try:
            process.wait()
        finally:
            for line in process.record.new_lines():
                results.add(line)
    error = process.error
    if not error:
        say(words_on_forecast(results))
    elif re.search("(CUDA|HIP) error", error["traceback"]) and not error["out_of_memory"]:
        remedy = "another process may hold it, or its driver may be broken"
        if "no kernel image" in error["traceback"]:
            remedy = "install a PyTorch that is built for it, most likely with an older CUDA"
        refuse(f"nothing runs on this card, so the bench ends here: {remedy}")
    else:
        tell(f"nothing can be predicted, since the probe failed: {error['message']}")


def run_row(row, results, number):
    """Run a fresh process of a row to its end."""
    with contextlib.closing(RowProcess(row, results, number)) as process:
        process.take()


# A process


class Process:
    """A process that writes a record. has_ended: whether it has, or never began. error: why it failed, or None."""

    def __init__(self, command_of, environment):
        """command_of: returns its command, by the path of the record."""
        self.folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        folder = Path(self.folder.name)
        self.record, self.gate, self.output = Record(folder / "record"), folder / "gate", folder / "output"
        self.gate.touch()
        self.process = self.error = None
        try:
            with self.output.open("wb") as out:
                self.process = subprocess.Popen(
                    command_of(str(self.record.path)),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the bench alone
                )
        except OSError as error:  # too many files or processes are open, or the launcher is gone
            self.error = error_line(f"it can't be started: {error}")
        self.has_ended = self.process is None

    def wait(self, steps=None):
        """Wait until so many steps of each rank stand in the record, or it has ended, or hangs: then it is ended."""
        deadline = time.monotonic() + PATIENCE
        while not self.has_ended and (steps is None or self.record.steps < steps):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1 if steps is None else 0.01)
                self.has_ended = True
            if self.record.read():
                deadline = time.monotonic() + PATIENCE
            elif not self.has_ended and time.monotonic() > deadline:
                self.has_ended = True
                end(self.process)
                self.error = error_line(f"no step in {PATIENCE} s: stopped", last_lines(end_of_text(self.output)))
        if self.has_ended and not self.error:
            self.error = error_of(self.process.returncode, end_of_text(self.output), self.record.errors)

    def close(self):
        """End it and what it has started."""
        if self.process:
            end(self.process)
        self.folder.cleanup()


class RowProcess(Process):
    """A process of a row, in a round. The Results keep the lines of its record, and why it failed."""

    def __init__(self, row, results, number):
        self.row, self.results, self.number = row, results, number
        self.allowed = 0  # steps
        self.keep({"kind": "start"})
        gate = "gate" if results.bench["turns"] else None
        super().__init__(lambda record: row.command(results.bench, record, gate), row.environment(results.bench))

    @property
    def memory(self):
        """The bytes that its ranks have in memory; 0 without a meter, and before its first step."""
        steps = self.results.runs[self.row.name, self.number].steps
        return len(self.record.lines) * (steps[-1]["memory"] or 0) if steps else 0

    def take(self, steps=None, is_last=False):
        """Let it take so many steps more, or run to its end. is_last: whether it ends behind them."""
        if steps and self.allowed and self.has_ended:
            return
        try:
            if steps:
                self.allowed += steps
                with self.gate.open("ab") as gate:
                    gate.write(b"." * steps)
            self.wait(self.allowed if steps and not is_last else None)
        finally:
            self.record.read()
            for line in self.record.new_lines():
                self.keep(line)
        if self.has_ended and not self.error and self.record.steps <= WARMUP:
            self.error = error_line(f"ended after {self.record.steps} steps, and the first {WARMUP} are warm-up")
        if self.error:
            self.keep(self.error)
            tell(f"{self.row.title} failed: {self.error['message']}")
            if self.error["traceback"] and not self.error["out_of_memory"]:
                tell(self.error["traceback"])
            self.close()  # since what is left of it would disturb the others

    def keep(self, line):
        """Keep a line of its record."""
        self.results.add(line | {"name": self.row.name, "round": self.number})


class Record:
    """The record of a process, read on as it grows. Each rank writes one of its own, FILE, FILE.1 and so on: see Log.

    lines: {rank: its lines so far}.
    """

    def __init__(self, path):
        self.path = path
        self.lines = {}
        self.bytes_read = {}
        self.taken = 0  # lines of rank 0 that new_lines() has returned

    def read(self):
        """Read on. Return whether there was a new line. One without its end is read later."""
        has_new = False
        for path in self.path.parent.glob(f"{self.path.name}*"):
            rank = int(path.suffix[1:] or "0")
            lines, begin = self.lines.setdefault(rank, []), self.bytes_read.get(rank, 0)
            with path.open("rb") as file:
                file.seek(begin)
                complete = file.read().rpartition(b"\n")[0]
            if complete:
                self.bytes_read[rank] = begin + len(complete) + 1
                lines += map(json.loads, complete.splitlines())
                has_new = True
        return has_new

    @property
    def steps(self):
        """How many steps each rank has taken."""
        header = next((line for line in self.lines.get(0, []) if line["kind"] == "header"), None)
        if header is None or len(self.lines) < header["settings"]["world_size"]:
            return 0
        return min(sum(line["kind"] == "step" for line in lines) for lines in self.lines.values())

    @property
    def errors(self):
        """{rank: its error line}."""
        return {rank: line for rank, lines in self.lines.items() for line in lines if line["kind"] == "error"}

    def new_lines(self):
        """Return the lines of rank 0 that were not returned yet, each step with the mean of the losses of all ranks."""
        losses = {}  # {step: those of all ranks}
        for line in itertools.chain(*self.lines.values()):
            if line["kind"] == "step":
                losses.setdefault(line["step"], []).append(line["loss"])
        new = [line.copy() for line in self.lines.get(0, [])[self.taken :]]
        self.taken += len(new)
        for line in new:
            if line["kind"] == "step" and None not in losses[line["step"]]:
                line["loss"] = statistics.mean(losses[line["step"]])
        return [line for line in new if line["kind"] != "error"]


def end(process):
    """End a process and what it has started, which may have outlived it. torchrun ends its ranks when it is asked."""
    if os.name == "nt":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True)
        process.wait()
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(PATIENCE_AT_THE_END)


def end_of_text(path):
    """Return the end of a text file, which may have grown large."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_OUTPUT))
        return file.read().decode("utf-8", "replace")


def error_of(status, printed, errors):
    """Return why a process failed, an error line: by the exception of a rank, a signal, or what it printed at last.

    It is None for status 0. errors: {rank: the error line of its record}. Of several ranks the one counts that failed
    first, by torchrun's report, since the others may only have lost it.
    """
    if status == 0:
        return None
    failed_ranks = [(int(rank), int(status)) for rank, status in FAILED_RANK.findall(printed)]
    rank, status = failed_ranks[-1] if failed_ranks else (0, status)
    if rank in errors:
        message, details = errors[rank]["message"], errors[rank]["traceback"]
    else:
        message, details = f"exit status {status}", last_lines(printed)
        if status < 0:
            message = f"killed by {name_of_signal(-status)}"
        elif details:
            message += f"; last printed: {details.splitlines()[-1]}"
    if failed_ranks:
        message = f"rank {rank}: {message}"
    return error_line(message, details, is_killed=status == -9)


def error_line(message, details="", is_killed=False):
    """Return the line of a record that says why a row failed. details: the traceback, or the last lines it printed.

    is_killed: by SIGKILL, which hardly anything sends but Linux, where memory is short.
    """
    out_of_memory = is_killed or OUT_OF_MEMORY.search(message) is not None
    return {"kind": "error", "message": message, "traceback": details, "out_of_memory": out_of_memory}


def last_lines(printed):
    """Return the last lines that a row printed, without torchrun's report of its ranks below them."""
    own_output = TORCHRUNS_REPORT.split(printed, maxsplit=1)[0]
    return "\n".join(own_output.strip().splitlines()[-LAST_LINES:])


def name_of_signal(number):
    """Return "SIGKILL" for 9; real-time signals have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_where_all_would_fail(row, results):
    """Exit with one line where the first row failed before its first step, and all rows have its command."""
    first, *others = results.table_rows
    run = results.runs[row.name, 0]
    commands = {str((other.launcher, other.script, other.flags)) for other in results.table_rows}
    if row != first or run.error is None or run.steps or run.error["out_of_memory"] or len(commands) > 1:
        return
    reason = run.error["message"]
    if "ModuleNotFoundError" in reason:
        reason += f" in {sys.executable}; pass the Python that runs it, as in make climb SCRIPT=... PY=python"
    refuse(f"{row.script} failed before its first step: {reason}")


# What is told


def words_on_time(seconds):
    """Return a time as "about 4 min"."""
    return f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {seconds:.0f} s"


def words_on_end(row, results):
    """Return how fast a row was, in words."""
    outcome = table_of(results).outcomes[row.name]
    if outcome.error:
        return f"{row.title} has failed"
    words = f"{row.title} has ended"
    if outcome.tok_per_sec:
        words += f": {outcome.tok_per_sec:,.0f} {outcome.unit}/sec"
    if outcome.comparison.ratio:
        words += f", {outcome.comparison.ratio.value:.2f} x {outcome.comparison.base.row.title}"
    return words


def show(results, path):
    """Print the short table and the verdict, and write the page and its picture. path: of the record."""
    table = table_of(results)
    say(page.terminal(table))
    try:
        write(path.with_suffix(".svg"), picture.draw(table, path.stem))
        write(path.with_suffix(".md"), page.page(table, path.stem))
        tell(f"written to results/{path.stem}.md, from the steps in results/{path.name}")
    except OSError as error:
        tell(f"results/{path.stem}.md was not written: {error.strerror}")


def write(path, text):
    """Replace a file as a whole. Raises OSError where that fails."""
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
