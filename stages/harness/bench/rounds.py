"""Runs the rows of a bench in rounds of fresh processes, and says how far it is.

In a round all rows are alive at once and take turns, each of a step or of several if these are short; or they run one
after the other, each until it has enough.
"""

import itertools
import math
import os
import time
import traceback
from contextlib import ExitStack, closing

from .. import meters
from ..common import say, tell
from . import page, picture
from .ratios import FEWEST_ROUNDS
from .row_process import STEPS_OF_A_START, RowProcess
from .table import table_of

ROUNDS = FEWEST_ROUNDS
SHORTEST_TURN = 0.02  # seconds; a script with shorter steps takes several in a turn
SPARE_MEMORY = 1.5  # for the next row, this many times the memory of the largest row so far must be free


def measure(results, path):
    """Measure all rounds, and show the table after each. path: of the record.

    It ends as soon as all rows have failed.
    """
    for round_number in range(results.bench["rounds"]):
        measure_round(round_number, results)
        show(results, path)
        if all(results.error(row) for row in results.rows.values()):
            tell("all rows have failed, so the bench ends here")
            return


def measure_round(round_number, results):
    """Run a fresh process of each row. If rows can't take turns, no later round lets them."""
    if results.bench["turns"]:
        reason = take_turns(round_number, results)
        if reason is None:
            return
        tell(f"{reason}, so rows run one after the other")
        results.add({"kind": "apart", "reason": reason})  # forgets the turns, and what was measured so far
    run_one_after_the_other(round_number, results)


def report(round_number, what, results):
    """Report what was done in a round, and how long the bench should still take, by the processes so far."""
    rows = [row for row in results.rows.values() if not results.error(row)]
    to_come = sum(results.bench["rounds"] - len(results.runs_of(row.name)) for row in rows)
    seconds_of_one = (time.monotonic() - results.began) / len(results.runs)
    minutes = math.ceil(to_come * seconds_of_one / 60)
    time_left = f"; about {minutes} min left" if minutes else ""
    tell(f"round {round_number + 1}: {what}{time_left}")


def take_turns(round_number, results):
    """Take fresh processes of all rows through their warm-up, one after the other, and then through turns.

    Return why rows can't take turns, or None. Only the first round looks for a reason.
    """
    processes = []
    with ExitStack() as to_close:
        reason = warm_up(round_number, results, processes, to_close)
        if reason:
            return reason
        for turn in range(results.bench["turns"]):
            for process in processes:
                process.turn = turn
                process.take(process.steps_per_turn)
            processes.reverse()  # so that a drift of speed affects all alike
        if any(process.run.turns for process in processes):
            report(round_number, f"the {results.bench['turns']} turns are over", results)
        for process in processes:
            process.let_end()
        for process in processes:
            process.wait()
    return None


def warm_up(round_number, results, processes, to_close):
    """Start a process of each row, and take it through its warm-up. Return why rows can't take turns, or None.

    Two rows start at once, since a start and a compilation take one core. The first row starts alone, so that a script
    that fails at its start fails once. processes: a list, to which the processes are added. to_close: an ExitStack.
    """
    rows = in_order(round_number, results)
    while True:
        next_rows = list(itertools.islice(rows, max(1, rows_that_fit(processes))))
        if not next_rows:
            return None
        started = [to_close.enter_context(closing(RowProcess(row, results, round_number))) for row in next_rows]
        processes += started
        for process in started:
            process.wait()
        for process in started:
            process.take(process.run.warmup - STEPS_OF_A_START)
            if round_number == 0:
                reason = why_not_in_turn(process, processes, results)
                if reason:
                    return reason
            if not process.row.takes_flags:  # a stage takes one step in a turn, since --steps sets its schedule
                process.steps_per_turn = process.steps_in(SHORTEST_TURN)
            if not process.has_ended:
                report(round_number, f"{process.row.title} has warmed up: {process.speed}", results)


def rows_that_fit(processes):
    """Return how many more rows fit into memory: 0, 1 or 2, since no more than two start at once.

    processes: the RowProcesses so far. If their memory is not known, it is 1.
    """
    largest = max((process.memory for process in processes), default=0)
    if not largest:
        return 1
    return min(2, int(meters.free_memory() / (SPARE_MEMORY * largest)))


def why_not_in_turn(process, processes, results):
    """Return why a RowProcess that has warmed up can't take turns with all others, or None. processes: those so far."""
    if process.run.seen and process.run.seen.loaders:
        return f"the workers of {process.row.title} load its data ahead, during the turns of other rows"
    waiting = [row for row in results.rows.values() if not (results.runs_of(row.name) or results.error(row))]
    if waiting and rows_that_fit(processes) == 0:
        return f"memory can't hold all {len(results.rows)} processes at once"
    return None


def run_one_after_the_other(round_number, results):
    """Run a fresh process of each row, until it has counted enough steps."""
    for row in in_order(round_number, results):
        with closing(RowProcess(row, results, round_number)) as process:
            process.take(process.run.warmup - STEPS_OF_A_START)
            process.take_enough()
            process.let_end()
            process.wait()
        report(round_number, f"{row.title} has ended: {process.speed}", results)


def in_order(round_number, results):
    """Yield the Rows in the order of a round, in reverse every other time, so that a drift of speed affects all alike.

    A row that has failed is left out, also if it failed after an earlier row was yielded.
    """
    rows = list(results.rows.values())
    if round_number % 2:
        rows.reverse()
    for row in rows:
        if not results.error(row):
            yield row


# What is shown


def show(results, path):
    """Draw the page. If that fails, only the page is lost, and the bench goes on. path: of the record."""
    try:
        draw(results, path)
    except Exception:
        tell(traceback.format_exc())
        tell(f"results/{path.stem}.md was not written; the steps are in results/{path.name}")


def draw(results, path):
    """Print the short table and the verdict, and write the page and its picture. path: of the record."""
    table = table_of(results)
    svg, markdown = picture.svg(table, path.stem), page.page(table, path.stem)  # both before a file is replaced
    say(page.terminal(table))
    write(path.with_suffix(".svg"), svg)
    write(path.with_suffix(".md"), markdown)
    tell(f"written to results/{path.stem}.md, from the steps in results/{path.name}")


def write(path, text):
    """Replace a file as a whole or not at all. Raises OSError, for example if the disk is full."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files may be any bytes
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
