"""Leads the rows of a bench through their steps, and tells how far they are.

On a CPU all rows are alive at once, and take one step each in turn, so that a drift of the machine's speed affects all
alike. On an accelerator, and where memory does not hold them all, each runs alone, in rounds of fresh processes.
"""

import contextlib
import re
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
TELL_EVERY = 5  # turns


def measure(results, path, folder, stage_args):
    """Measure all rounds, and show the table after each. Return False where memory does not hold all rows at once.

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
    tell(f"{worker.row.title}: start and warm-up")
    worker.take_steps(WARMUP)
    rows = worker.results.table_rows
    scripts = [row for row in rows if row.is_watched]
    is_known = worker.row.is_probe and len(scripts) < len(rows) or worker.row in scripts[:1]
    if is_known and worker.round_number == 0 and worker.is_live:
        words = page.expectations(forecast_of(worker.results, stage_args))
        if words:
            tell(words)


def run_alone(row, results, round_number, folder, stage_args):
    """Take a fresh process of a row through its warm-up, and its counted steps until these are enough."""
    with contextlib.closing(Worker(row, results, round_number, folder)) as worker:
        warm_up(worker, stage_args)
        run = worker.run
        while worker.is_live and len(run.steps) < results.bench["steps"] and not has_enough(run):
            worker.ask(STEP)
        worker.ask(END)


def has_enough(run):
    """Tell whether a run that is alone on its device has counted enough steps, for long enough."""
    return len(run.counted) >= COUNTED_STEPS and sum(step["dt"] for step in run.counted) >= ENOUGH_SECONDS


def take_turns(rows, results, round_number, folder, stage_args):
    """Take processes of all rows through their warm-up, one after the other, and then through their steps in turn.

    A script that may wait for its data takes all its steps at once, and ends: while others take theirs, its loader
    would get ahead. Return False where memory does not hold all rows at once, which round 0 tells.
    """
    turns = results.bench["steps"] - WARMUP
    workers = []
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        for row in rows:
            if round_number == 0 and not holds_another(workers):
                live = [worker for worker in workers if worker.is_live]
                tell(f"memory holds {len(live)} of {len(rows)} processes at once, so they run one after the other")
                return False
            worker = stack.enter_context(contextlib.closing(Worker(row, results, round_number, folder)))
            workers.append(worker)
            warm_up(worker, stage_args)
            if worker.run.may_wait_for_data:
                tell(f"{row.title}: takes its steps without turns, since what loads its data would get ahead")
                worker.take_steps(turns)
                worker.ask(END)
                worker.close()
            tell_start(workers, rows, turns, time.monotonic() - began)
        step_in_turn(workers, turns, results)
        for worker in workers:
            worker.ask(END)
    return True


def step_in_turn(workers, turns, results):
    """Let each worker that is still alive take so many steps, in turn, there and back."""
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


def tell_start(workers, rows, turns, elapsed):
    """Print how many rows have started, and what time their starts and turns will take, by those of the first ones.

    Nothing is told where no row but the probe has taken a step, since what its steps take says nothing about others.
    """
    dts = [worker.run.steps[-1]["dt"] for worker in workers if worker.run.steps and not worker.row.is_probe]
    if dts and len(workers) < len(rows):
        seconds_of_starts = elapsed / len(workers) * (len(rows) - len(workers))
        seconds_of_turns = turns * len(rows) * (PAUSE + sum(dts) / len(dts))
        seconds_left = seconds_of_starts + seconds_of_turns
        tell(f"{len(workers)} of {len(rows)} are warm, {about(seconds_left)} left in this round")


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
