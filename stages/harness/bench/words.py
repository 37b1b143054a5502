"""What is said of a row of the table, in the terminal and on a page: cells, and words for a note."""

import re
import textwrap

from .. import ladder, scripts
from ..figures import LONG_WAIT, UNEVEN
from .ratios import Verdict
from .rows import gains_cpu_memory, goes_without_cpu_memory
from .table import LONG_WARMUP

NOTHING = "–"  # a cell without a figure
BELOW = "its command, below"
PATH_TO_STAGES = "../stages/"  # from a page in results/
MOST_OF_A_COMMAND = 40  # letters of a cell
MOST_OF_A_REASON = 300  # letters of a cell that says why a row failed
UNITS = {"tok": "tokens", "sample": "samples", "step": "steps"}


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
    if outcome.ratio is None or outcome.error:
        return NOTHING
    cell = words_on_ratio(outcome.ratio)
    return f"({cell})" if is_in_brackets(outcome) else cell


def is_in_brackets(outcome):
    """Tell whether a row's ratio shows no difference to the row above, or is none of two comparable models."""
    shows_none = outcome.verdict in (Verdict.SAME, Verdict.UNCLEAR) or outcome.adds_nothing
    return shows_none or outcome.is_another_model


def ratio_to_reference_cell(outcome):
    """Return the cell that compares a row with the reference, without a ±."""
    ratio = outcome.ratio_to_reference
    return NOTHING if ratio is None else f"{ratio.value:.2f}"


# What a row is


def code(text):
    """Return a text in backticks, which markdown then leaves as it is."""
    return f"`{text.replace('`', chr(39))}`"


def title_cell(outcome):
    """Return a row's title for a page, in backticks where markdown would read its signs."""
    title = outcome.row.title
    return title if re.fullmatch(r"[\w+./ ]*", title) else code(title)


def linked_cell(outcome, folder):
    """Return a row's title, with a link to its stage."""
    stage = outcome.row.stage
    return f"[{title_cell(outcome)}]({folder}{stage.name}.py)" if stage else title_cell(outcome)


def typed_cell(outcome):
    """Return what the reader of a row types: the code of its technique, or the row's own command.

    Where a row skips stages, these are named first, because the ratio includes their gains.
    """
    row, skipped = outcome.row, outcome.skipped
    text = code_of_row(outcome)
    if text is None:
        text = code(row.name) if len(row.name) <= MOST_OF_A_COMMAND else BELOW
    elif row.stage:
        skipped = [stage for stage in skipped if stage is not row.stage]  # its line is shown
    return f"{ladder.words_on_stages(skipped)}, {text}" if skipped else text


def has_command_below(outcome):
    """Tell whether a row's command is too long for its cell."""
    return len(outcome.row.name) > MOST_OF_A_COMMAND and code_of_row(outcome) is None


def code_of_row(outcome):
    """Return what a row adds to the one above, in markdown; None where that is told by its command."""
    row = outcome.row
    if outcome.adds_nothing:
        return "; ".join(words_on_added(outcome))
    if outcome.added:
        return ", ".join(code_of_added(outcome, name) for name in outcome.added)
    if goes_without_cpu_memory(row):
        return "without the memory variables"
    if row.is_watched and outcome.base and gains_cpu_memory(row, outcome.base.row):
        return "with the memory variables"
    if row.stage and not row.launcher and not row.flags:
        return row.stage.line
    return None


def code_of_added(outcome, name):
    """Return the code of a technique that is added from outside; a fused update has the script's own optimizer."""
    if name == "fused" and outcome.techniques:
        return code(f"{outcome.techniques['optimizer']}(..., fused=True)")
    return ladder.ADDED[name].line


# Notes


def note_cell(outcome, bench):
    """Return what the technique of a row does on this machine, and why the row failed or is not complete."""
    parts = []
    if outcome.error:
        parts.append(failure(outcome.error))
    elif outcome.rounds < bench["rounds"] and bench["in_turn"]:
        planned = bench["rounds"] * (bench["steps"] - bench["warmup"])
        parts.append(f"{outcome.steps} of {planned} steps")
    elif outcome.rounds < bench["rounds"]:
        parts.append(f"{outcome.rounds} of {bench['rounds']} rounds")
    parts += words_on_base(outcome)
    if outcome.effect and outcome.effect.words:
        parts.append(outcome.effect.words)
    parts += words_on_script(outcome) + outcome.words_on_card
    if outcome.is_same_computation and not outcome.adds_nothing:
        parts.append("same computation as the row above")
    if outcome.warmup_s and outcome.warmup_s > LONG_WARMUP:
        parts.append(f"{outcome.warmup_s:.0f} s of warm-up")
    return "; ".join(parts)


def words_on_base(outcome):
    """Return why a row can't be compared with the row above, or not by its speed alone, a list of words."""
    base = outcome.base
    if outcome.is_another_model:
        return [f"another model: {outcome.parameters:,} parameters beside {base.parameters:,}"]
    if base and base.unit and outcome.unit and outcome.unit != base.unit:
        return [f"counts {UNITS[outcome.unit]}, and the row above {UNITS[base.unit]}, which have no ratio"]
    if outcome.ratio and outcome.ratio.halves:
        first, second = outcome.ratio.halves
        return [f"x above drifts: {first:.2f} in the first half of its turns, {second:.2f} in the second"]
    return []


def words_on_script(outcome):
    """Return what is said of a watched script, a list of words: what it has of the ladder, lacks, and waits for.

    For a row that adds a technique to the row above, it is what became of that.
    """
    techniques = outcome.techniques
    if techniques is None:
        return []
    words = []
    if outcome.added:
        words += words_on_added(outcome)
    elif not (outcome.base and gains_cpu_memory(outcome.row, outcome.base.row)):
        has, lacks, remarks = scripts.words_on_techniques(techniques)
        words += [f"has {has}", f"lacks {lacks}", *remarks]
    if outcome.ran_on:
        words.append(f"ran on the {outcome.ran_on} in a bench of another device: pass --device {outcome.ran_on}")
    if outcome.is_out_of_turn:
        words.append("took its steps without turns, since what loads its data would get ahead")
    if outcome.waiting_share > LONG_WAIT:
        words.append(f"{100 * outcome.waiting_share:.0f} % of its time waits for a DataLoader")
    if outcome.dt_ms and outcome.dt_mean_ms > UNEVEN * outcome.dt_ms:
        words.append(f"uneven: the mean of a step is {outcome.dt_mean_ms:.0f} ms, its median {outcome.dt_ms:.0f}")
    if outcome.by_all_steps:
        words.append("its speed is that of all steps together")
    return words


def words_on_added(outcome):
    """Return why techniques that a row should add to the row above made no difference, a list of words."""
    words = []
    for name in outcome.added:
        if name in outcome.in_effect:
            continue
        if scripts.uses(outcome.techniques, name):
            words.append(f"{name} is in it already")
        else:
            words.append(scripts.words_on_missing(outcome.techniques, name))
    return words


def failure(error):
    """Return why a row failed, by the error line of its record, in one line."""
    if error["out_of_memory"]:
        return "out of memory"
    message = "".join(letter if letter.isprintable() else " " for letter in error["message"])
    return textwrap.shorten(f"failed: {message}", MOST_OF_A_REASON, placeholder=" ...")
