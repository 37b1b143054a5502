"""Runs the rows of a bench in rounds of fresh processes, and says how far it is.

In a round all rows are alive at once and take turns, a step each; or each one runs to its end, one after the other.
"""

import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from .. import meters
from ..common import tell
from . import page, picture
from .table import table_of

ROUNDS = 3  # fewer would give no ±
TURNS = 7  # of a row in a round
# The first steps of a process are slower than the later ones, those of `plain` most of all.
WARMUP_ON_CPU = 20
ENOUGH_SECONDS = 6.0  # of counted steps, in which a card's clock settles
MOST_COUNTED_STEPS = 160  # on a card
SHORTEST_TURN = 0.02  # seconds, which a script with shorter steps fills with several
# Seconds without a step after which a row is stopped. The first one includes the start and the compilation, and NCCL
# waits 600 s for a rank before it says which one is missing.
PATIENCE = 660
PATIENCE_AT_THE_END = 35  # seconds that a row has to end when it is asked to; torchrun gives its ranks 30
MOST_OUTPUT = 20_000  # bytes that are read of what a row printed, its end
LAST_LINES = 20  # of them, shown if it failed
TORCHRUNS_REPORT = re.compile(r"^.*torch/distributed/elastic/", re.MULTILINE)  # how its report of failed ranks begins
# What this report says of each of them. The one that failed first is the last one in it.
FAILED_RANK = re.compile(r"^ *rank *: (\d+).*\n *exitcode *: (-?\d+)", re.MULTILINE)
# How Python, PyTorch, cuBLAS and NCCL say that memory is short when they raise a plain error. The last one is oneDNN's.
# With "a primitive descriptor" it says that it has no kernel, so the pattern leaves that out.
OUT_OF_MEMORY = re.compile(
    r"out of memory|[Cc]an(no|')t allocate|ALLOC_FAILED|MemoryError|bad_alloc|Thread creation failed"
    r"|could not create a primitive(?! descriptor)"
)


def measure(results, path):
    """Measure all rounds, and show the table after each. path: of the record.

    They end with the first one if no row has taken a step in it.
    """
    progress = Progress(results)
    for number in range(results.bench["rounds"]):
        if results.bench["turns"]:
            reason = take_turns(number, results, progress)
            if reason:
                tell(f"{reason}, so rows run one after the other")
                results.add({"kind": "apart", "reason": reason})
                progress = Progress(results)
        if not results.bench["turns"]:
            run_one_after_the_other(number, results, progress)
        show(results, path)
        if not any(run.steps for run in results.runs.values()):
            tell("no row has taken a step, so the bench ends here")
            return


class Progress:
    """Says how much of a bench is done, counted in steps, and how long the rest should take."""

    def __init__(self, results):
        self.bench, self.rows = results.bench, len(results.rows)
        self.began = time.monotonic()
        self.done = 0
        self.steps_of_a_row = self.bench["warmup"] + (self.bench["turns"] or self.bench["steps"])

    def tell(self, what, steps):
        """Tell what was done, in so many steps more."""
        self.done += steps
        share = self.done / (self.bench["rounds"] * self.rows * self.steps_of_a_row)
        left = (time.monotonic() - self.began) * (1 / share - 1)
        words = f"about {left / 60:.0f} min" if left > 90 else f"about {left:.0f} s"
        tell(f"{what}; {words} left in all")


def take_turns(number, results, progress):
    """Take fresh processes of all rows through their warm-up, one after the other, and then through turns.

    Return why they can't, or None. number: of the round; it is decided in the first.
    """
    warmup, turns = results.bench["warmup"], results.bench["turns"]
    with contextlib.ExitStack() as stack:
        processes = []
        for row in in_order(number, results):
            process = stack.enter_context(contextlib.closing(RowProcess(row, results, number)))
            processes.append(process)
            process.take(warmup)
            reason = why_not_in_turn(processes, results)
            if reason and number == 0:
                return reason
            progress.tell(f"round {number + 1}: {row.title} is warm", warmup)
        steps = {process: process.steps_of_a_turn() for process in processes}
        for _ in range(turns):
            for process in processes:
                process.take(steps[process])
            processes.reverse()  # so that a drift of speed affects all alike
        progress.tell(f"round {number + 1}: all rows took {turns} turns", turns * len(processes))
        for process in processes:
            process.let_end()
        for process in processes:
            process.wait()
    return None


def why_not_in_turn(processes, results):
    """Return why the rows of the RowProcesses that are alive can't take turns, together with one more, or None."""
    row, seen = processes[-1].row, processes[-1].run.seen
    if seen and seen.loaders:
        return f"the workers of {row.title} load its data ahead, while others have their turns"
    is_short = meters.free_memory() < 1.5 * max(process.memory for process in processes)
    if is_short and len(processes) < len(results.rows):
        return f"memory does not hold all {len(results.rows)} processes at once"
    return None


def run_one_after_the_other(number, results, progress):
    """Run a fresh process of each row to its end."""
    for row in in_order(number, results):
        with contextlib.closing(RowProcess(row, results, number)) as process:
            process.wait()
        progress.tell(f"round {number + 1}: {words_on_end(row, results)}", progress.steps_of_a_row)


def in_order(number, results):
    """Return the Rows in the order of a round: there and back, so that a drift of speed affects all alike.

    One that has failed is not started again.
    """
    rows = [row for row in results.rows.values() if not results.error(row)]
    if number % 2:
        rows.reverse()
    return rows


# A process


class RowProcess:
    """A process of a row, in a round. The Results keep the lines of its record, and why it failed.

    has_ended: whether it has, or never began. run: the Run of its lines.
    """

    def __init__(self, row, results, number):
        self.row, self.results, self.number = row, results, number
        self.folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        self.output, self.gate = Path(self.folder.name, "output"), Path(self.folder.name, "gate")
        self.gate.touch()
        self.allowed = 0  # steps
        self.records = {}  # {rank: RankRecord}
        self.kept = 0  # lines of rank 0
        self.process = None
        self.has_ended = False
        self.keep({"kind": "start"})
        try:
            with self.output.open("wb") as out:
                self.process = subprocess.Popen(
                    row.command(results.bench, number, Path(self.folder.name)),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=row.environment(results.bench),
                    start_new_session=True,  # Ctrl-C reaches the bench alone
                )
        except OSError as error:  # too many files or processes are open, or the launcher is gone
            self.fail(error_line(f"it can't be started: {error}"))

    @property
    def run(self):
        return self.results.runs[self.row.name, self.number]

    @property
    def memory(self):
        """The bytes that its ranks have in memory; 0 without a meter, and before its first step."""
        return len(self.records) * (self.run.steps[-1]["memory"] or 0) if self.run.steps else 0

    def steps_of_a_turn(self):
        """Return how many steps it takes in a turn: one, or as many short ones as fill 20 ms.

        A stage takes one in any case, since --steps sets its schedule.
        """
        dts = [step["dt"] for step in self.run.steps[-5:]]
        if self.row.takes_flags or not dts:
            return 1
        return math.ceil(SHORTEST_TURN / statistics.median(dts))

    def take(self, steps):
        """Let it take so many steps more, and wait until it has."""
        if self.has_ended:
            return
        self.allowed += steps
        with self.gate.open("ab") as gate:
            gate.write(b"." * steps)
        self.wait(self.allowed)

    def let_end(self):
        """Let it end, when it has taken all its turns."""
        self.gate.unlink(missing_ok=True)  # with its folder, if it has failed

    def wait(self, steps=None):
        """Wait until it has taken so many steps in all, or has ended. If it hangs, it is ended."""
        deadline = time.monotonic() + PATIENCE
        while not self.has_ended and (steps is None or len(self.run.steps) < steps):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.01 if steps else 1)
                self.has_ended = True
            if self.read():
                deadline = time.monotonic() + PATIENCE
            elif time.monotonic() > deadline and not self.has_ended:
                self.fail(error_line(f"no step in {PATIENCE} s: stopped", last_lines(end_of_text(self.output))))
        if self.has_ended and self.process and not self.run.error:
            self.check_end()

    def check_end(self):
        """Keep why it failed, if it did."""
        errors = {rank: record.error for rank, record in self.records.items() if record.error}
        error = error_of(self.process.returncode, end_of_text(self.output), errors)
        if error is None and len(self.run.steps) <= self.results.bench["warmup"]:
            ended = f"ended after {len(self.run.steps)} steps"
            error = error_line(f"{ended}, and the first {self.results.bench['warmup']} are warm-up")
        if error:
            self.fail(error)

    def read(self):
        """Keep the new lines of its record. Return whether there were some.

        Each rank writes a record of its own. A step is kept when all have taken it, with the mean of their losses.
        """
        for path in Path(self.folder.name).glob("record*"):
            rank = int(path.suffix[1:] or "0")
            self.records.setdefault(rank, RankRecord(path)).read()
        lines = self.records[0].lines if 0 in self.records else []
        kept_before = self.kept
        for line in lines[self.kept :]:
            if line["kind"] == "step":
                losses = [each.losses[line["step"]] for each in self.records.values() if line["step"] in each.losses]
                if len(losses) < self.run.seen.world_size and not self.has_ended:
                    break
                if None not in losses:
                    line = line | {"loss": statistics.mean(losses)}
            self.keep(line)
            self.kept += 1
        return self.kept > kept_before

    def fail(self, error):
        """Keep why it failed, a line of the record, and end what is left of it, which would disturb the others."""
        self.keep(error)
        tell(f"{self.row.title} failed: {error['message']}")
        if error["traceback"] and not error["out_of_memory"]:
            tell(error["traceback"])
        self.has_ended = True
        self.close()

    def keep(self, line):
        """Keep a line of its record."""
        self.results.add(line | {"name": self.row.name, "round": self.number})

    def close(self):
        """End it and what it has started."""
        if self.process:
            end(self.process)
        self.folder.cleanup()


class RankRecord:
    """The record of a rank, read on as it grows. error: its line "error", or None. lines: all others."""

    def __init__(self, path):
        self.path = path
        self.lines = []
        self.losses = {}  # {step: loss}
        self.error = None
        self.bytes_read = 0

    def read(self):
        """Read on. A line without its end is read later."""
        with self.path.open("rb") as file:
            file.seek(self.bytes_read)
            complete = file.read().rpartition(b"\n")[0]
        if not complete:
            return
        self.bytes_read += len(complete) + 1
        for line in map(json.loads, complete.splitlines()):
            if line["kind"] == "error":
                self.error = line
                continue
            self.lines.append(line)
            if line["kind"] == "step":
                self.losses[line["step"]] = line["loss"]


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


# Why it failed


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

    is_killed: by SIGKILL, which hardly anything sends but Linux, when memory is short.
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


# What is shown


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
    """Print the short table and the verdict, and write the page and its picture. path: of the record.

    What goes wrong with a page costs that page alone, and nothing that is measured.
    """
    try:
        table = table_of(results)
        print(page.terminal(table))
        write(path.with_suffix(".svg"), picture.draw(table, path.stem))
        write(path.with_suffix(".md"), page.page(table, path.stem))
        tell(f"written to results/{path.stem}.md, from the steps in results/{path.name}")
    except Exception as error:
        tell(f"results/{path.stem}.md was not written ({error}): `python bench.py --render {path.stem}` draws it")


def write(path, text):
    """Replace a file as a whole or not at all. Raises OSError, for example if the disk is full."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
