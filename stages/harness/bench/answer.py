"""What a bench has shown, in words: what is worth it, what is slower, what can't be told, and what to type."""

from .ratios import Verdict, distance, judge
from .rows import CPU_MEMORY
from .words import LONG_WARMUP, code, code_of_technique, name_of_change, quoted, words_on_ratio


def answer(table):
    """Return what a bench has shown, as a list of (heading, text). The largest gains and losses come first."""
    lines = []
    for verdict in Verdict:
        rows = [outcome for outcome in table.rows if outcome.verdict is verdict]
        if verdict in (Verdict.FASTER, Verdict.SLOWER):
            rows.sort(key=lambda outcome: -distance(outcome.ratio.value))
        if rows:
            lines.append((verdict.value, ", ".join(words_on_verdict(outcome) for outcome in rows)))
    cost = words_on_cost(table)
    if cost:
        lines.append(("to tell more", cost))
    if table.together and table.noise and len(table.rows) > 2:
        words = words_on_ratio(table.together)
        if judge(table.together, table.noise) in (Verdict.SAME, Verdict.UNCLEAR):
            words = f"({words})"
        title, title_of_first = quoted(table.last.row.title), quoted(table.rows[0].row.title)
        lines.append(("all together", f"the last row, {title}, is {words} times as fast as {title_of_first}"))
    typed = []
    for outcome in table.rows:
        typed += [line for line in code_of_gain(outcome) if line not in typed]
    for number, line in enumerate(typed, 1):
        lines.append((f"what to type {number}", line))
    return lines


def words_on_verdict(outcome):
    """Return what a row changes, by which ratio, and the reason where one is known."""
    words = quoted(name_of_change(outcome))
    if outcome.verdict is Verdict.UNCLEAR:
        words += f" {words_on_ratio(outcome.ratio)}"
    elif outcome.verdict is not Verdict.SAME:
        words += f" {outcome.ratio.value:.2f}"
    reason = reason_of_verdict(outcome)
    return f"{words} ({reason})" if reason else words


def reason_of_verdict(outcome):
    """Return why a row has its verdict, or None where its ± alone says it."""
    if outcome.is_contradicted:
        return "should be as fast as the row above, so one of the two was disturbed: --rounds 3 may tell"
    if outcome.base.is_contradicted:
        return "the row above may have been disturbed"
    if outcome.verdict is Verdict.FASTER:
        return words_on_paying(outcome)
    if outcome.effect and (outcome.verdict is Verdict.SLOWER or outcome.is_same_computation):
        return outcome.effect.words
    return None


def words_on_paying(outcome):
    """Return after how many steps a gain has made up for a longer warm-up; None where that is hardly longer."""
    longer = outcome.warmup_s - outcome.base.warmup_s
    if longer < LONG_WARMUP:
        return None
    seconds_saved = outcome.dt_ms / 1000 * (outcome.ratio.value - 1)  # in each step
    return f"pays after about {longer / seconds_saved:,.0f} steps, since its warm-up takes {longer:.0f} s longer"


def words_on_cost(table):
    """Return what would tell more of what can't be told, and how long it takes; None where all is told."""
    unclear = [outcome for outcome in table.rows if outcome.verdict is Verdict.UNCLEAR]
    if all(outcome.is_contradicted or outcome.base.is_contradicted for outcome in unclear):
        return None
    bench = table.bench
    ran = [outcome for outcome in table.outcomes.values() if outcome.counted]
    counted = sum(step["dt"] for outcome in ran for step in outcome.counted)
    seconds = counted + sum(outcome.warmup_s * max(1, len(outcome.means)) for outcome in ran)
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


def code_of_gain(outcome):
    """Return the code that makes a row faster than the one above, a list; none where it is not faster."""
    if outcome.verdict is not Verdict.FASTER:
        return []
    if outcome.gains_memory:
        variables = " ".join(f"{name}={value}" for name, value in CPU_MEMORY.items())
        return [f"{code(variables)} in front of `python`"]
    return [code_of_technique(stage, outcome) for stage in outcome.added if not stage.for_the_loss]
