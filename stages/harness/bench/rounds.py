"""Runs the rows of a bench, one after the other in rounds of fresh processes, and tells how far it is."""

import contextlib
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ..common import ROOT, refuse, say, tell, whole_file
from ..figures import WARMUP
from . import page, picture
from .forecast import words_on_forecast
from .results import lines_of
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
    """Measure all rounds, there and back, and show the table after each. path: of the record."""
    probe(results)
    rows, rounds = [*results.rows.values()], results.bench["rounds"]
    began, done = time.monotonic(), 0
    for round_number in range(rounds):
        for row in rows[::-1] if round_number % 2 else rows:  # so that a drift of speed affects all alike
            run_row(row, results, round_number)
            done += 1
            left = (time.monotonic() - began) / done * (rounds * len(rows) - done)
            tell(
                f"{words_on_end(row, results)}; round {round_number + 1} of {rounds}, {words_on_time(left)} left in all"
            )
            end_where_all_would_fail(row, results)
        show(results, path)


def probe(results):
    """Measure how fast the machine is, and say what each row should bring. Exit where nothing runs on its card."""
    program = [sys.executable, str(ROOT / "stages" / "harness" / "bench" / "probe.py")]
    error = run(lambda record: [*program, record, *results.bench["flags"]], os.environ, results.add)
    if not error:
        say(words_on_forecast(results))
    elif re.search("(CUDA|HIP) error", error["traceback"]) and not error["out_of_memory"]:
        remedy = "another process may hold it, or its driver may be broken"
        if "no kernel image" in error["traceback"]:
            remedy = "install a PyTorch that is built for it, most likely with an older CUDA"
        refuse(f"nothing runs on this card, so the bench ends here: {remedy}")
    else:
        tell(f"nothing can be predicted, since the probe failed: {error['message']}")


def run_row(row, results, round_number):
    """Run a row to its end. The Results keep the lines of its record, and why it failed."""

    def keep(line):
        results.add(line | {"name": row.name, "round": round_number})

    keep({"kind": "start"})
    error = run(lambda record: row.command(results.bench, record), row.environment(results.bench), keep)
    steps = results.runs[row.name, round_number].steps
    if not error and len(steps) <= WARMUP:
        error = error_line(f"ended after {len(steps)} steps, and the first {WARMUP} are warm-up")
    if error:
        keep(error)
        tell(f"{row.title} failed: {error['message']}")
        if error["traceback"] and not error["out_of_memory"]:
            tell(error["traceback"])


def run(command_of, environment, keep):
    """Run a process to its end, and keep the lines of its record. Return why it failed, an error line, or None.

    command_of: returns its command, by the path of the record. keep: takes each line, also where the bench is
    interrupted.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        record, output = Path(folder, "record"), Path(folder, "output")
        try:
            with output.open("wb") as out:
                process = subprocess.Popen(
                    command_of(str(record)),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the bench alone
                )
        except OSError as error:  # too many files or processes are open, or the launcher is gone
            return error_line(f"it can't be started: {error}")
        try:
            hangs = not wait(process, record)
        finally:
            end(process)
            lines, errors = lines_of_ranks(record)
            for line in lines:
                keep(line)
        printed = end_of_text(output)
    if hangs:
        return error_line(f"no step in {PATIENCE} s: stopped", last_lines(printed))
    return error_of(process.returncode, printed, errors)


def wait(process, record):
    """Wait until a process has ended. Return False where it hangs: its record has no new line for too long."""
    size, deadline = 0, time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
            return True
        if record.exists() and record.stat().st_size > size:
            size, deadline = record.stat().st_size, time.monotonic() + PATIENCE
    return False


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


def lines_of_ranks(record):
    """Return (the lines of a record, each step with the mean of the losses of all ranks, {rank: its error line}).

    Each rank has written a record of its own: see Log.
    """
    paths = {int(path.suffix[1:] or "0"): path for path in record.parent.glob(f"{record.name}*")}
    records = {rank: lines_of(path) for rank, path in paths.items()}
    errors = {rank: line for rank, lines in records.items() for line in lines if line["kind"] == "error"}
    losses = {}  # {step: those of all ranks}
    for line in itertools.chain(*records.values()):
        if line["kind"] == "step":
            losses.setdefault(line["step"], []).append(line["loss"])
    lines = [line for line in records.get(0, []) if line["kind"] != "error"]
    for line in lines:
        if line["kind"] == "step" and None not in losses[line["step"]]:
            line["loss"] = statistics.mean(losses[line["step"]])
    return lines, errors


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
