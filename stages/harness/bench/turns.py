"""Leads the rows of a bench through their steps, and tells how far they are.

On a CPU all rows are alive at once, and take one step each in turn, so that a drift of the machine's speed affects all
alike. A script that loads its data ahead would load it in the turns of others, so it takes its steps at once, in rounds
of fresh processes. On an accelerator, and where not all can be alive at once, each row runs so.
"""

import contextlib
import re
import sys
import time

from .. import machine
from ..common import refuse, say, tell, whole_file
from ..figures import COUNTED_STEPS, WARMUP
from ..leader import END, STEP
from . import page, picture
from .forecast import words_on_forecast
from .rows import PROBE
from .table import table_of
from .workers import Worker

PAUSE = 0.02  # seconds between the steps of two workers: threads of the one that just stepped may still spin
# A row that runs alone stops when it has COUNTED_STEPS which took ENOUGH_SECONDS together, in which a card's clock
# settles, and at the latest after MOST_COUNTED_STEPS.
ENOUGH_SECONDS = 6.0
MOST_COUNTED_STEPS = 160
ROUNDS = 3  # of rows that run one after the other: fewer would give no ±
TELL_EVERY = 5  # turns


def measure(results, path):
    """Measure all rounds, and show the table after each. Return False where not all rows can be alive at once.

    path: of the record.
    """
    for round_number in range(max(results.bench["rounds"], ROUNDS)):
        rows = rows_of_round(round_number, results)
        if rows:
            if not take_round(rows, round_number, results):
                return False
            show(results, path)
    return True


def rows_of_round(round_number, results):
    """Return the Rows that start in a round, in its order.

    Behind the rounds of the bench these are the rows that take no turns while others do, since fewer than three rounds
    would give them no ±. The probe comes first, because it warms a card up. Odd rounds are in reverse, so that a drift
    of speed affects all alike.
    """
    probe, *rows = results.rows.values()
    if round_number % 2:
        rows.reverse()
    if round_number < results.bench["rounds"]:
        return [probe, *rows]
    if not results.bench["in_turn"]:
        return []
    return [row for row in rows if results.runs[row.name, 0].loads_ahead and not results.error(row)]


def take_round(rows, round_number, results):
    """Take a fresh process of each row through its warm-up, and then through its counted steps, in turn or at once.

    In turn, processes of all rows are alive at once, but for a script that may load its data ahead. Return False where
    memory does not hold them, which is asked in round 0 alone.
    """
    workers = []  # that take turns
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        for number, row in enumerate(rows, 1):
            if round_number == 0 and memory_is_short(workers):
                tell(f"memory does not hold all {len(rows)} processes at once, so they run one after the other")
                return False
            worker = stack.enter_context(contextlib.closing(Worker(row, results, round_number)))
            warm_up(worker)
            if results.bench["in_turn"] and not worker.run.loads_ahead:
                workers.append(worker)
            else:
                take_counted_steps(worker)
                worker.close()
                words = words_on_end(row, results)
                if not results.bench["in_turn"]:
                    words += f"; {number} of {len(rows)} runs, {words_on_time_left(began, number, len(rows))}"
                tell(words)
        if workers:
            step_in_turn(workers, results)
    return True


def memory_is_short(workers):
    """Tell whether memory may not hold another process, which may need half as much again as the largest so far.

    On a system without meters of memory both sides are 0.
    """
    largest = 0
    for worker in workers:
        if worker.is_live and not worker.row.is_probe:
            largest = max(largest, worker.number_of_ranks * (worker.run.steps[-1]["memory"] or 0))
    return machine.free_memory() < 1.5 * largest


def step_in_turn(workers, results):
    """Let each worker that is still alive take its counted steps, in turn, there and back, and end."""
    turns = results.bench["steps"] - WARMUP
    began = time.monotonic()
    for turn in range(1, turns + 1):
        for worker in workers:
            if worker.is_live:
                time.sleep(PAUSE)
                worker.ask(STEP)
        workers.reverse()
        if turn % TELL_EVERY == 0 and turn < turns:
            tell(f"turn {turn} of {turns}, {words_on_time_left(began, turn, turns)}")
            tell(page.terminal(table_of(results)))
    for worker in workers:
        worker.ask(END)


def take_counted_steps(worker):
    """Take the counted steps of a row at once, and end it. Where no row takes turns, it stops when these are enough."""
    bench, run = worker.results.bench, worker.run
    while worker.is_live and len(run.steps) < bench["steps"]:
        seconds = sum(step["dt"] for step in run.counted)
        has_enough = len(run.counted) >= COUNTED_STEPS and seconds >= ENOUGH_SECONDS
        if has_enough and not bench["in_turn"]:
            break
        worker.ask(STEP)
    worker.ask(END)


def warm_up(worker):
    """Take a worker through its warm-up. In round 0 this may end the bench, and shows what each row should bring."""
    worker.take_steps_until(WARMUP)
    if worker.round_number == 0:
        end_where_all_would_fail(worker.run, worker.row, worker.results.table_rows)
        if worker.row.is_probe:
            say(words_on_forecast(worker.results))


def end_where_all_would_fail(run, row, rows):
    """Exit with one line where a row failed before its first step by what all rows need: the card, or their script.

    rows: those of the table. The card is tried by the probe, and a script by the first row, where all rows have its
    command.
    """
    if run.error is None or run.steps or run.error["out_of_memory"]:
        return
    reason = run.error["message"]
    if row.is_probe and re.search("(CUDA|HIP) error", reason):
        remedy = "another process may hold it, or its driver may be broken"
        if "no kernel image" in reason:
            remedy = "install a PyTorch that is built for it, most likely with an older CUDA"
        refuse(f"nothing runs on this card, so the bench ends here: {remedy}")
    commands = [(other.launcher, other.script, other.flags) for other in rows]
    if row == rows[0] and commands.count(commands[0]) == len(rows):
        if reason.startswith("ModuleNotFoundError"):
            reason += f" in {sys.executable}; pass the Python that runs it, as in make climb SCRIPT=... PY=python"
        refuse(f"{row.script} failed before its first step: {reason}")


def predict(results):
    """Start the probe alone, and print what each stage should bring."""
    with contextlib.closing(Worker(results.rows[PROBE], results, 0)) as worker:
        warm_up(worker)
        worker.ask(END)


# What is told


def words_on_time_left(began, done, planned):
    """Return how long a round still takes, as "about 4 min left in this round". began: by time.monotonic()."""
    seconds = (time.monotonic() - began) / done * (planned - done)
    time_left = f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
    return f"about {time_left} left in this round"


def words_on_end(row, results):
    """Return how fast a row was that ran alone, in words."""
    words = f"{row.title} has ended"
    outcome = table_of(results).outcomes.get(row.name)  # the probe has none
    if outcome and outcome.tok_per_sec:
        words += f": {outcome.tok_per_sec:,.0f} {outcome.unit}/sec"
    if outcome and outcome.comparison.ratio:
        words += f", {outcome.comparison.ratio.value:.2f} x {outcome.comparison.base.row.title}"
    return words


def show(results, path):
    """Print the short table and the verdict, and write the page and its picture. path: of the record."""
    table = table_of(results)
    say(page.terminal_at_the_end(table))
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
