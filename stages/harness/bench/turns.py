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
from ..flags import parse
from ..leader import END, STEP
from . import page, picture
from .forecast import forecast_of
from .rows import PROBE
from .table import table_of
from .words import words_on_speed
from .workers import Worker

PAUSE = 0.02  # seconds between the steps of two workers: threads of the one that just stepped may still spin
# A row that runs alone stops when it has COUNTED_STEPS which took ENOUGH_SECONDS together, in which a card's clock
# settles, and at the latest after MOST_COUNTED_STEPS.
ENOUGH_SECONDS = 6.0
MOST_COUNTED_STEPS = 160
ROUNDS = 3  # of rows that run one after the other: a single round would give no ±
TELL_EVERY = 5  # turns


def measure_in_turn(results, path):
    """Measure all rounds in turn, and show the table after each. Return False where not all rows can be alive at once.

    A row that loads its data ahead takes no turns. It then goes on alone, until it has taken as many rounds as rows
    need that run alone. path: of the record.
    """
    rows = list(results.rows.values())
    rounds = results.bench["rounds"]
    for round_number in range(rounds):
        if not take_turns(in_order(rows, round_number), results, round_number):
            return False
        show(results, path)
    rows = [row for row in rows if results.runs[row.name, 0].may_wait_for_data and not results.error(row)]
    if rows:
        measure_alone(rows, range(rounds, ROUNDS), results, path)
    return True


def measure_alone(rows, rounds, results, path):
    """Measure rows one after the other, in fresh processes, and show the table after each round.

    rounds: the numbers of the rounds, a range. path: of the record.
    """
    began = time.monotonic()
    ended, all_runs = 0, len(rounds) * len(rows)
    for round_number in rounds:
        for row in in_order(rows, round_number):
            run_alone(row, results, round_number)
            ended += 1
            seconds_left = (time.monotonic() - began) / ended * (all_runs - ended)
            tell(f"{words_on_end(row, results)}; {ended} of {all_runs} runs, {about(seconds_left)} left")
        show(results, path)


def in_order(rows, round_number):
    """Return rows in the order of a round: odd rounds are in reverse, so that a drift of speed affects all alike.

    The probe always comes first: it warms a card up.
    """
    probes = [row for row in rows if row.is_probe]
    others = [row for row in rows if not row.is_probe]
    if round_number % 2:
        others.reverse()
    return probes + others


def predict(results):
    """Print what each row should bring, and nothing more. Return the exit status, 1 where nothing can be said."""
    for row in rows_that_foretell(results):
        with contextlib.closing(Worker(row, results, 0)) as worker:
            worker.take_steps(WARMUP)
            worker.ask(END)
        if row.is_probe:
            end_where_nothing_runs(results.error(row))
    words = expectations(results)
    say(words or "nothing can be predicted: no row is a stage, or a script whose model is a GPT-2")
    return 0 if words else 1


def rows_that_foretell(results):
    """Return the rows whose warm-up shows what each row should bring: the probe and, for its techniques, a script."""
    scripts = [row for row in results.table_rows if row.is_watched]
    return [results.rows[PROBE], *scripts[:1]]


def expectations(results):
    """Return what each row should bring, in words, or None where nothing can be said."""
    if results.error(results.rows[PROBE]):
        return None
    shared = parse(None, results.bench["flags"], machine.free_memory_by_a_child)
    flags = {}
    for row in results.table_rows:
        flags[row.name] = shared
        if row.is_of_the_ladder and row.flags:
            flags[row.name] = parse(None, [*results.bench["flags"], *row.flags], machine.free_memory_by_a_child)
    return page.expectations(forecast_of(results, flags))


def warm_up(worker):
    """Take a worker through its warm-up. In round 0 this may end the bench, or show what each row should bring."""
    worker.take_steps(WARMUP)
    if worker.round_number > 0:
        return
    row, results = worker.row, worker.results
    if row.is_probe:
        end_where_nothing_runs(worker.run.error)
    if row == results.table_rows[0]:
        end_where_no_row_starts(worker)
    if row in rows_that_foretell(results):
        words = expectations(results)
        if words:
            tell(words)


def end_where_nothing_runs(error):
    """Exit with one line where the probe could run nothing on a card, since every row would fail by it.

    error: the error line of the probe, or None.
    """
    if error is None or error["out_of_memory"] or not re.search("(CUDA|HIP) error", error["message"]):
        return
    remedy = "another process may hold it, or its driver may be broken"
    if "no kernel image" in error["message"]:
        remedy = "install a PyTorch that is built for it, most likely with an older CUDA"
    refuse(f"nothing runs on this card, so the bench ends here: {remedy}")


def end_where_no_row_starts(worker):
    """Exit with one line where the first row failed before its first step, and all others run the same script."""
    run, script = worker.run, worker.row.script
    if run.steps or run.error is None or run.error["out_of_memory"]:
        return
    if any(row.script != script for row in worker.results.table_rows):
        return
    reason = f"{script} failed before its first step: {run.error['message']}"
    if run.error["message"].startswith("ModuleNotFoundError"):
        reason += f" in {sys.executable}; pass the Python that runs it, as in make climb SCRIPT=... PY=python"
    refuse(reason)


def run_alone(row, results, round_number):
    """Take a fresh process of a row through its warm-up and its counted steps, and end it."""
    with contextlib.closing(Worker(row, results, round_number)) as worker:
        warm_up(worker)
        take_counted_steps(worker)


def take_counted_steps(worker):
    """Take the counted steps of a row at once, and end it. Where no row takes turns, it stops when these are enough."""
    bench, run = worker.results.bench, worker.run
    while worker.is_live and len(run.steps) < bench["steps"]:
        if has_enough(run) and not bench["in_turn"]:
            break
        worker.ask(STEP)
    worker.ask(END)


def has_enough(run):
    """Tell whether a run that is alone on its device has counted enough steps, for long enough."""
    return len(run.counted) >= COUNTED_STEPS and sum(step["dt"] for step in run.counted) >= ENOUGH_SECONDS


def take_turns(rows, results, round_number):
    """Take processes of all rows through their warm-up, one after the other, and then through their steps in turn.

    A script that may load its data ahead takes all its steps at once, and ends. Return False where not all rows can be
    alive at once, which round 0 tells.
    """
    workers = []
    with contextlib.ExitStack() as stack:
        for row in rows:
            if round_number == 0 and not holds_another(workers):
                tell(f"memory does not hold all {len(rows)} processes at once, so they run one after the other")
                return False
            worker = stack.enter_context(contextlib.closing(Worker(row, results, round_number)))
            workers.append(worker)
            warm_up(worker)
            if worker.run.may_wait_for_data:
                rounds = max(ROUNDS, results.bench["rounds"])
                tell(f"{row.title}: loads its data ahead, so it takes its steps at once, in {rounds} rounds")
                take_counted_steps(worker)
                worker.close()
        step_in_turn(workers, results)
        for worker in workers:
            worker.ask(END)
    return True


def step_in_turn(workers, results):
    """Let each worker that is still alive take its counted steps, in turn, there and back."""
    turns = results.bench["steps"] - WARMUP
    began = time.monotonic()
    for turn in range(1, turns + 1):
        for worker in workers:
            if worker.is_live:
                time.sleep(PAUSE)
                worker.ask(STEP)
        workers.reverse()
        if turn % TELL_EVERY == 0 and turn < turns:
            seconds_left = (time.monotonic() - began) / turn * (turns - turn)
            tell(f"turn {turn} of {turns}, {about(seconds_left)} left in this round")
            tell(page.terminal(table_of(results)))


def holds_another(workers):
    """Tell whether memory holds another process, which may need half as much again as the largest so far.

    On a system without meters of memory both sides are 0.
    """
    largest = max((worker.run.memory for worker in workers), default=0)
    return machine.free_memory() >= 1.5 * largest


# What is told


def about(seconds):
    """Return a time for people, as "about 4 min"."""
    return f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {seconds:.0f} s"


def words_on_end(row, results):
    """Return how fast a row was that ran alone, in words."""
    outcome = table_of(results).outcomes.get(row.name)  # the probe has none
    if outcome is None or not outcome.tok_per_sec:
        return f"{row.title} has ended"
    words = f"{row.title}: {words_on_speed(outcome)}"
    if outcome.ratio and not row.control_of:
        words += f", {outcome.ratio.value:.2f} x {outcome.base.row.title}"
    return words


def show(results, path):
    """Write the page and its picture, and print the short table and the verdict. path: of the record."""
    table = table_of(results)
    texts = {".svg": picture.draw(table, path.stem), ".md": page.page(table, path.stem)}
    written = f"written to results/{path.stem}.md, from the steps in results/{path.name}"
    try:
        for suffix, text in texts.items():
            with whole_file(path.with_suffix(suffix)) as unfinished:
                unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        written = f"results/{path.stem}.md was not written: {error.strerror}"
    say(page.terminal_at_the_end(table))
    tell(written)
