"""What is said of a row of the table, in the terminal and on a page: cells, and words for a note."""

import textwrap

from .. import ladder, scripts
from ..figures import UNEVEN
from .ratios import Verdict
from .rows import gains_cpu_memory, goes_without_cpu_memory, runs_the_same
from .table import LONG_WARMUP

NOTHING = "–"  # a cell without a figure
PATH_TO_STAGES = "../stages/"  # from a page in results/
IN_BRACKETS = (Verdict.SAME, Verdict.UNCLEAR)
MOST_OF_A_REASON = 300  # letters of a cell that says why a row failed


# Figures


def number_cell(value, form, scale=1):
    """Return the cell of a number, which may be None."""
    return NOTHING if value is None else form.format(scale * value)


def speed_cell(outcome):
    """Return the cell of a row's tokens per second; its unit stands beside it where it counts something else."""
    if outcome.tok_per_sec is None:
        return NOTHING
    cell = f"{outcome.tok_per_sec:,.0f}"
    return cell if outcome.unit == "tok" else f"{cell} {outcome.unit}s"


def words_on_speed(outcome):
    """Return the speed of a row with its unit, as "1,000 tok/sec"."""
    return f"{outcome.tok_per_sec:,.0f} {'tok' if outcome.unit == 'tok' else outcome.unit + 's'}/sec"


def words_on_ratio(ratio):
    """Return a Ratio with its ±, as "1.35 ± 0.63"."""
    words = f"{ratio.value:.2f}"
    return words if ratio.spread is None else f"{words} ± {ratio.spread:.2f}"


def ratio_cell(outcome):
    """Return the cell that compares a row with the one above; in brackets where no difference is shown."""
    if outcome.ratio is None:
        return NOTHING
    cell = words_on_ratio(outcome.ratio)
    return f"({cell})" if outcome.verdict in IN_BRACKETS else cell


def ratio_to_reference_cell(outcome):
    """Return the cell that compares a row with the reference, without a ±."""
    ratio = outcome.ratio_to_reference
    return NOTHING if ratio is None else f"{ratio.value:.2f}"


# What a row is


def linked_cell(outcome, folder):
    """Return a row's title, with a link to its stage."""
    row = outcome.row
    return f"[{row.title}]({folder}{row.stage.name}.py)" if row.stage else row.title


def typed_cell(outcome):
    """Return what the reader of a row types: the stage's line, or the row's own command.

    Where a row skips stages, these are named first, because the ratio includes their gains.
    """
    row, skipped = outcome.row, outcome.skipped
    above = outcome.base.row if outcome.base else None
    if row.added and runs_the_same(row, above):
        text = ladder.ADDED[row.added[-1]].line
    elif goes_without_cpu_memory(row):
        text = "without the memory variables"
    elif row.is_watched and gains_cpu_memory(row, above):
        text = "with the memory variables"
    elif row.stage and not row.launcher and not row.flags:
        text = row.stage.line
        skipped = [stage for stage in skipped if stage is not row.stage]  # its line is shown
    else:
        text = f"`{row.name}`"
    if not skipped:
        return text
    return f"{ladder.words_on_stages(skipped)}, {text}"


# Notes


def note_cell(outcome, bench):
    """Return what the technique of a row does on this machine, and why the row failed or is not complete."""
    parts = []
    if outcome.error:
        parts.append(failure(outcome.error))
    elif outcome.rounds < bench["rounds"] and bench["in_turn"]:
        parts.append(f"{outcome.steps} of {planned_steps(bench)} steps")
    elif outcome.rounds < bench["rounds"]:
        parts.append(f"{outcome.rounds} of {bench['rounds']} rounds")
    parts += words_on_models(outcome)
    if outcome.effect and outcome.effect.words:
        parts.append(outcome.effect.words)
    parts += words_on_script(outcome)
    if outcome.is_same_computation:
        parts.append("same computation as the row above")
    if outcome.warmup_s and outcome.warmup_s > LONG_WARMUP:
        parts.append(f"{outcome.warmup_s:.0f} s of warm-up")
    return "; ".join(parts)


def planned_steps(bench):
    """Return how many steps of a row were to be counted, in all rounds."""
    return bench["rounds"] * (bench["steps"] - bench["warmup"])


def words_on_models(outcome):
    """Return what is said where a row trains another model than the row above, a list of words."""
    if not outcome.is_another_model:
        return []
    return [f"another model: {outcome.parameters:,} parameters beside {outcome.base.parameters:,}"]


def words_on_script(outcome):
    """Return what is said of a watched script, a list of words: what it has of the ladder, lacks, and waits for.

    For a row that adds a technique to the row above, it is what became of that.
    """
    techniques = outcome.techniques
    if techniques is None:
        return []
    words = []
    if outcome.base and runs_the_same(outcome.row, outcome.base.row):
        words += words_on_added(outcome)
    else:
        has, lacks, remarks = scripts.words_on_techniques(techniques)
        words += [f"has {has}", f"lacks {lacks}", *remarks]
    if outcome.is_out_of_turn:
        words.append("took its steps without turns, since what loads its data would get ahead")
    if outcome.waiting_share:
        share = 100 * outcome.waiting_share
        words.append(f"{share:.0f} % of its time waits for a DataLoader, so its speed is that of all steps together")
    if outcome.dt_ms and outcome.dt_mean_ms > UNEVEN * outcome.dt_ms:
        words.append(f"uneven: the mean of a step is {outcome.dt_mean_ms:.0f} ms, its median {outcome.dt_ms:.0f}")
    return words


def words_on_added(outcome):
    """Return what became of the techniques that a row adds to the row above, a list of words."""
    words = []
    for name in outcome.row.added:
        if name in outcome.base.row.added:
            continue
        if not scripts.uses(outcome.techniques, name):
            words.append(scripts.words_on_missing(outcome.techniques, name))
        elif outcome.base.techniques and scripts.uses(outcome.base.techniques, name):
            words.append(f"{name} is in it already")
    return words


def failure(error):
    """Return why a row failed, by the error line of its record, in one line."""
    if error["out_of_memory"]:
        return "out of memory"
    message = "".join(letter if letter.isprintable() else " " for letter in error["message"])
    return textwrap.shorten(f"failed: {message}", MOST_OF_A_REASON, placeholder=" ...")
