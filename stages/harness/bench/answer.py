"""What a bench has shown, in words: what is worth it, what is slower, what can't be told, and what to type."""

from .. import ladder
from .ratios import Verdict, distance, judge
from .rows import gains_cpu_memory, not_shared
from .table import Reason
from .words import code, code_of_added, title_cell, words_on_ratio


def answer(table):
    """Return what a bench has shown, as a list of (heading, words). The largest gains and losses come first."""
    lines = []
    for verdict in Verdict:
        rows = [outcome for outcome in table.rows if outcome.verdict is verdict]
        if rows:
            lines.append((verdict.value, words_on_rows(rows, verdict)))
    cost = words_on_cost(table)
    if cost:
        lines.append(("to tell more", cost))
    for outcome in table.rows:
        if outcome.steps_to_pay:
            longer = outcome.warmup_s - outcome.base.warmup_s
            words = f"{title_cell(outcome)} has a warm-up that is {longer:.0f} s longer"
            lines.append(("has to pay first", f"{words}, and is ahead after about {outcome.steps_to_pay:,.0f} steps"))
    if table.together and table.noise and len(table.rows) > 2:
        words = words_on_ratio(table.together)
        if judge(table.together, table.noise) in (Verdict.SAME, Verdict.UNCLEAR):
            words = f"({words})"
        lines.append(("all together", f"{title_cell(table.last)} is {words} x {title_cell(table.rows[0])}"))
    typed = code_to_type(table)
    if typed:
        lines.append(("what to type", " | ".join(typed)))
    return lines


def words_on_rows(rows, verdict):
    """Return the words on all rows of one verdict, and why those are alike that compute the same."""
    if verdict is Verdict.UNCLEAR:
        return ", ".join(words_on_unclear(outcome) for outcome in rows)
    if verdict is Verdict.SAME:
        measured = ", ".join(name_of_change(outcome) for outcome in rows if not outcome.is_same_computation)
        alike = ", ".join(name_of_change(outcome) for outcome in rows if outcome.is_same_computation)
        if alike:
            alike += ": the same computation here"
        return "; ".join(words for words in (measured, alike) if words)
    rows.sort(key=lambda outcome: -distance(outcome.ratio.value))
    return ", ".join(words_on_difference(outcome) for outcome in rows)


def words_on_difference(outcome):
    """Return the name of what is faster or slower, its ratio, and for what is slower what the ladder says of it."""
    words = f"{name_of_change(outcome)} {outcome.ratio.value:.2f}"
    if outcome.verdict is Verdict.SLOWER and outcome.effect and outcome.effect.words:
        return f"{words} ({outcome.effect.words})"
    return words


def words_on_unclear(outcome):
    """Return the name of a change, its ratio with the ±, and why it can't be told, where that is not the ±."""
    words = f"{name_of_change(outcome)} {words_on_ratio(outcome.ratio)}"
    return f"{words} ({outcome.reason.value})" if outcome.reason else words


def name_of_change(outcome):
    """Return what a row has that the row above does not: its technique where that is all, and else its own title."""
    row = outcome.row
    if gains_cpu_memory(row, outcome.base.row):
        return "memory variables"
    others = [stage for stage in outcome.skipped if stage is not row.stage]
    if others:
        return f"{title_cell(outcome)} with {ladder.words_on_stages(others)}"
    if row.stage is None or row.stage.technique is None or row.launcher or row.flags:
        return title_cell(outcome)
    return f"{row.title} {row.stage.technique}"


def words_on_cost(table):
    """Return what would tell more of what can't be told, and how long it takes; None where all is told."""
    unclear = [outcome for outcome in table.rows if outcome.verdict is Verdict.UNCLEAR]
    if all(outcome.reason in (Reason.WRONG_CLAIM, Reason.BELOW_WRONG_CLAIM) for outcome in unclear):
        return None
    bench = table.bench
    ran = [outcome for outcome in table.outcomes.values() if outcome.steps]
    counted = sum(outcome.steps * outcome.dt_mean_ms / 1000 for outcome in ran)
    seconds = counted + sum(outcome.warmup_s * max(1, outcome.rounds) for outcome in ran)
    if bench["in_turn"] and bench["rounds"] == 1:
        steps = bench["warmup"] + 4 * (bench["steps"] - bench["warmup"])
        seconds += 3 * counted
        words, flag = "four times the steps halve each ±", f"--steps {steps}"
    else:
        rounds = max(3, 2 * bench["rounds"])
        seconds *= rounds / bench["rounds"]
        words, flag = "more rounds make each ± smaller", f"--rounds {rounds}"
    minutes = max(1, round(seconds / 60))
    return f'{words}: {flag} (with make ARGS="{flag}"), about {minutes} min'


def code_to_type(table):
    """Return what to type for the gains that a bench found, a list of words in markdown."""
    typed = []
    for outcome in table.rows:
        if outcome.verdict is Verdict.FASTER:
            typed += code_of_gain(outcome)
    return list(dict.fromkeys(typed))


def code_of_gain(outcome):
    """Return the code of each technique that makes a row faster than the one above, a list."""
    row, above = outcome.row, outcome.base.row
    if gains_cpu_memory(row, above):
        return ["three variables in front of python, see stages/memory.md"]
    if outcome.added:
        return [code_of_added(outcome, name) for name in outcome.in_effect]
    lines = [stage.line for stage in outcome.skipped if not stage.for_the_loss]
    if row.script == above.script:
        own = not_shared(row.launcher, [above.launcher]) + not_shared(row.flags, [above.flags])
        lines += [code(word) for word in own]
    return lines
