"""What a bench has shown, in words: what is worth it, what is slower, what can't be told, and what to type."""

from .. import ladder
from .ratios import Verdict, distance
from .rows import gains_cpu_memory
from .words import typed_cell, words_on_ratio

SURPRISE = (
    "should compute the same as the row above, and is left out of the noise. A claim of ours is wrong here, or a "
    "process was slow, which --rounds {} would tell"
)


def answer(table):
    """Return what a bench has shown, as a list of (heading, words). The largest gains and losses come first."""
    lines = []
    for verdict in Verdict:
        rows = [outcome for outcome in table.rows if outcome.verdict is verdict]
        if rows:
            lines.append((verdict.value, words_on_rows(rows, verdict, table.bench)))
    for outcome in table.rows:
        if outcome.steps_to_pay:
            longer = outcome.warmup_s - outcome.base.warmup_s
            words = f"{outcome.row.label} has a warm-up that is {longer:.0f} s longer"
            lines.append(("has to pay first", f"{words}, and is ahead after about {outcome.steps_to_pay:,.0f} steps"))
    if table.fastest:
        words = words_on_ratio(table.fastest.ratio_to_first)
        lines.append(("all together", f"{table.fastest.row.label} is {words} x {table.rows[0].row.label}"))
    typed = words_to_type(table)
    if typed:
        lines.append(("what to type", " | ".join(typed)))
    return lines


def words_on_rows(rows, verdict, bench):
    """Return the words on all rows of one verdict, and what would tell more, or why they are alike."""
    match verdict:
        case Verdict.FASTER | Verdict.SLOWER:
            rows.sort(key=lambda outcome: -distance(outcome.ratio.value))
            return ", ".join(words_on_difference(outcome) for outcome in rows)
        case Verdict.SAME:
            measured = [name_of_change(outcome) for outcome in rows if not outcome.is_same_computation]
            alike = [name_of_change(outcome) for outcome in rows if outcome.is_same_computation]
            parts = [", ".join(measured)] if measured else []
            if alike:
                parts.append(f"{', '.join(alike)}: the same computation here")
            return "; ".join(parts)
        case Verdict.UNCLEAR:
            remedy = "more --steps, or a quieter machine," if bench["in_turn"] else f"--rounds {2 * bench['rounds']}"
            return f"{', '.join(name_and_ratio(outcome) for outcome in rows)}: {remedy} may tell"
        case Verdict.UNEXPECTED:
            names = ", ".join(name_and_ratio(outcome) for outcome in rows)
            return f"{names}: {SURPRISE.format(max(3, 2 * bench['rounds']))}"


def words_on_difference(outcome):
    """Return the name of what is faster or slower, its ratio, and for what is slower what the ladder says of it."""
    words = f"{name_of_change(outcome)} {outcome.ratio.value:.2f}"
    if outcome.verdict is Verdict.SLOWER and outcome.effect and outcome.effect.words:
        return f"{words} ({outcome.effect.words})"
    return words


def name_and_ratio(outcome):
    """Return the name of a change, and its ratio with the ±."""
    return f"{name_of_change(outcome)} {words_on_ratio(outcome.ratio)}"


def name_of_change(outcome):
    """Return what a row has that the row above does not: its technique where that is all, and else its own label."""
    row = outcome.row
    if gains_cpu_memory(row, outcome.base.row):
        return "memory variables"
    others = [stage for stage in outcome.skipped if stage is not row.stage]
    if others:
        return f"{row.label} with {ladder.words_on_stages(others)}"
    if row.stage is None or row.stage.technique is None or row.launcher or row.flags:
        return row.label
    return f"{row.label} {row.stage.technique}"


def words_to_type(table):
    """Return what to type for the gains that a bench found, a list of words."""
    typed = []
    for outcome in table.rows:
        row = outcome.row
        if outcome.verdict is not Verdict.FASTER:
            continue
        if gains_cpu_memory(row, outcome.base.row):
            typed.append("three variables in front of python, see stages/memory.md")
        elif row.added or (row.stage and not row.launcher and not row.flags):
            typed.append(typed_cell(outcome))
    return typed
