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
from .forecast import forecast_of
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


def measure(results, path, folder, stage_args):
    """Measure all rounds, and show the table after each. Return False where not all rows can be alive at once.

    Every second round runs the rows in reverse order, so that a drift of the machine's speed affects all alike. The
    probe always comes first: it warms a card up. path: of the record. folder: for the sockets of the workers.
    stage_args: {name of a row: the flags of its stage}.
    """
    probe, *rows = results.rows.values()
    began = time.monotonic()
    for round_number in range(results.bench["rounds"]):
        order = [probe, *rows]
        if results.bench["in_turn"]:
            if not take_turns(order, results, round_number, folder, stage_args):
                return False
        else:
            for row in order:
                run_alone(row, results, round_number, folder, stage_args)
                if row.is_probe:
                    end_where_nothing_runs(results.error(row))
                tell_end_of_run(results, row, time.monotonic() - began)
        show(results, path)
        rows.reverse()
    if results.bench["in_turn"]:
        add_rounds(rows, results, path, folder, stage_args)
    return True


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


def add_rounds(rows, results, path, folder, stage_args):
    """Take the rows that took no turns through as many rounds as they need, there and back. rows: in the next order."""
    first_runs = {row: results.runs[row.name, 0] for row in rows}
    rows = [row for row, run in first_runs.items() if run.may_wait_for_data and run.summary]
    for round_number in range(results.bench["rounds"], ROUNDS if rows else 0):
        tell(f"round {round_number + 1} of {ROUNDS} of the rows that take no turns")
        for row in rows:
            run_alone(row, results, round_number, folder, stage_args)
        show(results, path)
        rows.reverse()


def predict(results, folder, stage_args):
    """Print what each row should bring, and nothing more. Return the exit status, 1 where nothing can be said.

    It takes the warm-up of the probe, and of the first script, whose techniques are to be seen.
    """
    probe, *rows = results.rows.values()
    scripts = [row for row in rows if row.is_watched]
    for row in [probe, *scripts[:1]]:
        with contextlib.closing(Worker(row, results, 0, folder)) as worker:
            worker.take_steps(WARMUP)
            worker.ask(END)
        if row.is_probe:
            end_where_nothing_runs(results.error(row))
    words = page.expectations(forecast_of(results, stage_args)) if results.error(probe) is None else None
    say(words or "nothing can be predicted: no row is a stage, or a script whose model is a GPT-2")
    return 0 if words else 1


def warm_up(worker, stage_args):
    """Take a worker through its warm-up. Print what each row should bring, once that is known.

    Of stages it is known after the warm-up of the probe, and of scripts after that of the first script.
    """
    worker.take_steps(WARMUP)
    rows = worker.results.table_rows
    if worker.row is rows[0] and worker.round_number == 0:
        check_first_row(worker)
    scripts = [row for row in rows if row.is_watched]
    is_known = worker.row.is_probe and len(scripts) < len(rows) or worker.row in scripts[:1]
    if is_known and worker.round_number == 0 and worker.is_live:
        words = page.expectations(forecast_of(worker.results, stage_args))
        if words:
            tell(words)


def check_first_row(worker):
    """Exit with one line where the first row failed before its first step, and all others run the same script."""
    error, rows = worker.run.error, worker.results.table_rows
    if not error or error["out_of_memory"] or worker.run.steps or len({row.script for row in rows}) > 1:
        return
    reason = f"{worker.row.script} failed before its first step: {error['message']}"
    if error["message"].startswith("ModuleNotFoundError"):
        reason += f" in {sys.executable}; pass the Python that runs the script, as in make climb SCRIPT=... PY=python"
    refuse(reason)


def run_alone(row, results, round_number, folder, stage_args):
    """Take a fresh process of a row through its warm-up and its counted steps, and end it."""
    with contextlib.closing(Worker(row, results, round_number, folder)) as worker:
        warm_up(worker, stage_args)
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


def take_turns(rows, results, round_number, folder, stage_args):
    """Take processes of all rows through their warm-up, one after the other, and then through their steps in turn.

    A script that may load its data ahead takes all its steps at once, and ends. Return False where not all rows can be
    alive at once, which round 0 tells.
    """
    workers = []
    with contextlib.ExitStack() as stack:
        for row in rows:
            if round_number == 0 and not holds_another(workers):
                live = [worker for worker in workers if worker.is_live]
                tell(f"memory holds {len(live)} of {len(rows)} processes at once, so they run one after the other")
                return False
            worker = stack.enter_context(contextlib.closing(Worker(row, results, round_number, folder)))
            workers.append(worker)
            warm_up(worker, stage_args)
            if round_number == 0 and lacks_a_port(worker.run):
                tell("two rows use one port, so they run one after the other")
                return False
            if worker.run.may_wait_for_data:
                tell(f"{row.title}: takes its steps at once, since it would load its data in the turns of others")
                take_counted_steps(worker)
                worker.close()
        step_in_turn(workers, results)
        for worker in workers:
            worker.ask(END)
    return True


def lacks_a_port(run):
    """Tell whether a process failed because another one has the port that it asks for."""
    return run.error is not None and "address already in use" in run.error["traceback"].lower()


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


def tell_end_of_run(results, row, elapsed):
    """Print how fast a row was that ran alone, how many runs have ended, and what time the others will take."""
    words = f"{row.title} has ended"
    outcome = table_of(results).outcomes.get(row.name)  # the probe has none
    if outcome and outcome.tok_per_sec:
        words = f"{row.title}: {words_on_speed(outcome)}"
        if outcome.ratio and not row.control_of:
            words += f", {outcome.ratio.value:.2f} x {outcome.base.row.title}"
    ended, total = len(results.runs), results.bench["rounds"] * len(results.rows)
    tell(f"{words}; {ended} of {total} runs, {about(elapsed / ended * (total - ended))} left")


def show(results, path):
    """Write the page and its picture, and print the short table and the verdict. path: of the record."""
    table = table_of(results)
    texts = {".svg": picture.draw(table, path.stem), ".md": page.page(table, path.stem)}
    try:
        for suffix, text in texts.items():
            with whole_file(path.with_suffix(suffix)) as unfinished:
                unfinished.write_text(text, encoding="utf-8")
        written = f"written to results/{path.stem}.md, from the steps in results/{path.name}"
    except OSError as error:
        written = f"results/{path.stem}.md was not written: {error.strerror}"
    say(page.terminal_at_the_end(table))
    tell(written)
