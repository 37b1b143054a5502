"""What is said of a row of the table, in the terminal and on a page: cells, and words for a note."""

import re
import textwrap

from .. import ladder, scripts
from ..figures import waiting_share, waits_for_data
from .ratios import Verdict

NOTHING = "–"  # a cell without a figure
MOST_OF_A_COMMAND = 40  # letters of a cell
MOST_OF_A_REASON = 300  # letters of a cell that says why a row failed
LONG_WARMUP = 10  # seconds that are worth a word
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
    return cell if outcome.unit == "tok" else f"{cell} {UNITS[outcome.unit]}"


def words_on_speed(outcome):
    """Return the speed of a row with its unit, as "1,000 tok/sec"."""
    return f"{outcome.tok_per_sec:,.0f} {'tok' if outcome.unit == 'tok' else UNITS[outcome.unit]}/sec"


def words_on_ratio(ratio):
    """Return a Ratio with its ±, as "1.35 ± 0.63"."""
    words = f"{ratio.value:.2f}"
    return words if ratio.spread is None else f"{words} ± {ratio.spread:.2f}"


def ratio_cell(outcome):
    """Return the cell that compares a row with the one above; in brackets where no difference is shown."""
    if outcome.ratio is None:
        return NOTHING
    cell = words_on_ratio(outcome.ratio)
    return f"({cell})" if is_in_brackets(outcome) else cell


def is_in_brackets(outcome):
    """Tell whether a row's ratio shows no difference to the row above."""
    return outcome.verdict in (Verdict.SAME, Verdict.UNCLEAR) or outcome.adds_nothing


# What a row is


def code(text):
    """Return a text in backticks, which markdown then leaves as it is."""
    return f"`{text.replace('`', chr(39))}`"


def quoted(title):
    """Return a title for a page, in backticks where markdown would read its signs."""
    return title if re.fullmatch(r"[\w+./ -]*", title) else code(title)


def linked_title(row, path_to_stages):
    """Return a row's title for a page, with a link to its stage."""
    title = quoted(row.title)
    return f"[{title}]({path_to_stages}{row.stage.name}.py)" if row.stage else title


def name_of_change(outcome):
    """Return a row's title, and what it adds to the row above where the title does not say that."""
    row = outcome.row
    if outcome.gains_memory:
        return f"{row.title} with memory variables"
    skipped = skipped_stages(outcome)
    if skipped:
        return f"{row.title} with {ladder.words_on_stages(skipped)}"
    if outcome.adds_its_stage and row.stage.technique and row.title == row.stage.short:
        return f"{row.title} {row.stage.technique}"
    return row.title


def skipped_stages(outcome):
    """Return the Stages between the row above and a row of the ladder, as far as they do something here."""
    if outcome.row.stage is None:
        return []
    return [stage for stage in outcome.added if stage is not outcome.row.stage]


def typed_cell(outcome):
    """Return what the reader of a row types: the code of its technique, or the row's own command.

    Where a row skips stages, these are named first, because the ratio includes their gains.
    """
    row, skipped = outcome.row, skipped_stages(outcome)
    if not row.keeps_memory:
        return "without the memory variables"
    if outcome.gains_memory:
        return "three variables of the environment"
    if outcome.adds_nothing:
        return NOTHING
    if outcome.added and not row.stage:
        return ", ".join(code_of_technique(stage, outcome) for stage in outcome.added)
    text = code(row.name) if len(row.name) <= MOST_OF_A_COMMAND else "its command, below"
    if outcome.adds_its_stage and not row.launcher and not row.flags:
        text = row.stage.line
    return f"{ladder.words_on_stages(skipped)}, {text}" if skipped else text


def code_of_technique(stage, outcome):
    """Return the code of a stage's technique in a row: in a script that of its own optimizer and framework."""
    return scripts.what_to_type(outcome.techniques, stage) if outcome.techniques else stage.line


# Notes


def note_cell(outcome, bench):
    """Return what the technique of a row does on this machine, and why the row failed or is not complete."""
    parts = words_on_comparison(outcome)
    if len(outcome.means) < bench["rounds"] and not outcome.error:
        parts.append(f"{len(outcome.means)} of {bench['rounds']} rounds, {len(outcome.counted)} counted steps")
    if outcome.effect and outcome.effect.words:
        parts.append(outcome.effect.words)
    parts += words_on_script(outcome) + outcome.remarks_on_card
    if outcome.is_same_computation:
        parts.append("same computation as the row above")
    if outcome.warmup_s and outcome.warmup_s > LONG_WARMUP:
        parts.append(f"{outcome.warmup_s:.0f} s of warm-up")
    return "; ".join(parts)


def words_on_comparison(outcome):
    """Return why a row has no ratio to the row above, or why that is not all to know, a list of words."""
    if outcome.error:
        return [failure(outcome.error)]
    base = outcome.base
    if base and base.model and outcome.model and base.model != outcome.model:
        return ["not compared with the row above, which trains another model, or counts something else"]
    if outcome.ratio and outcome.ratio.halves:
        first, second = outcome.ratio.halves
        return [f"its gain went from {first:.2f} in the first half of its turns to {second:.2f} in the second"]
    return []


def words_on_script(outcome):
    """Return what is said of a watched script, a list of words: what it has of the ladder, lacks, and waits for.

    For a row that adds a technique to the row above, it is why that took no effect.
    """
    techniques = outcome.techniques
    if techniques is None:
        return []
    words = []
    for name in outcome.added_in_vain:
        is_in_it = scripts.uses(techniques, name)
        words.append(f"{name} is in it already" if is_in_it else scripts.words_on_missing(techniques, name))
    if not (outcome.added or outcome.added_in_vain or outcome.gains_memory):
        has, lacks, remarks = scripts.words_on_techniques(techniques)
        words += [f"has {has}", f"lacks {lacks}", *remarks]
    if outcome.ran_on:
        words.append(f"ran on the {outcome.ran_on} in a bench of another device: pass --device {outcome.ran_on}")
    if outcome.is_out_of_turn:
        words.append("took its steps without turns, since what loads its data would get ahead")
    if waits_for_data(outcome.counted):
        words.append(f"{100 * waiting_share(outcome.counted):.0f} % of its time waits for a DataLoader")
    return words


def failure(error):
    """Return why a row failed, by the error line of its record, in one line."""
    if error["out_of_memory"]:
        return "out of memory"
    message = "".join(letter if letter.isprintable() else " " for letter in error["message"])
    return textwrap.shorten(f"failed: {message}", MOST_OF_A_REASON, placeholder=" ...")
