"""What a bench has shown, in words: what is worth it, what is slower, what can't be told, and what to type."""

from .cells import quoted, ratio_cell
from .ratios import NOT_SHOWN_TO_DIFFER, Verdict, distance, judge
from .table import compare


def answer(table):
    """Return what a bench has shown, as a list of (heading, text). The largest gains and losses come first."""
    lines = []
    for verdict in Verdict:
        rows = [each for each in table.shown if each.comparison.verdict is verdict and not adds_nothing(each)]
        if verdict not in NOT_SHOWN_TO_DIFFER:
            rows.sort(key=lambda outcome: -distance(outcome.comparison.ratio.value))
        if rows:
            lines.append((verdict.value, ", ".join(words_on_verdict(outcome) for outcome in rows)))
    for heading, text in (("to tell more", cost_of_more(table)), ("all together", all_together(table))):
        if text:
            lines.append((heading, text))
    typed = []
    for outcome in table.shown:
        if outcome.comparison.verdict is Verdict.FASTER:
            typed += [line for line in outcome.comparison.change.code if line not in typed]
    for number, line in enumerate(typed, 1):
        lines.append((f"what to type {number}", line))
    return lines


def adds_nothing(outcome):
    """Tell whether none of the techniques that were added to a script took effect. Its note says why."""
    return bool(outcome.row.added) and outcome.comparison.change.is_same_computation


def words_on_verdict(outcome):
    """Return what a row changes, by which ratio, and the reason where one is known."""
    comparison = outcome.comparison
    words = quoted(comparison.change.title)
    if comparison.verdict is Verdict.UNCLEAR:
        words += f" {ratio_cell(comparison.ratio)}"
    elif comparison.verdict is not Verdict.SAME:
        words += f" {comparison.ratio.value:.2f}"
    reason = reason_of_verdict(outcome)
    return f"{words} ({reason})" if reason else words


def reason_of_verdict(outcome):
    """Return why a row has its verdict, or None where its ± alone says it."""
    comparison = outcome.comparison
    if comparison.is_contradicted:
        return "should be as fast as the row above, so one of the two was disturbed: measure again"
    if comparison.base.comparison.is_contradicted:
        return "the row above may have been disturbed"
    if comparison.verdict is Verdict.SLOWER or comparison.change.is_same_computation:
        return outcome.words
    return None


def cost_of_more(table):
    """Return what would tell more of what can't be told, and how long it takes.

    None where nothing is unclear, and where no more steps help, since a row was disturbed.
    """
    unclear = [outcome for outcome in table.shown if outcome.comparison.verdict is Verdict.UNCLEAR]
    if all(reason_of_verdict(outcome) for outcome in unclear):
        return None
    runs = [run for outcome in table.outcomes.values() for run in outcome.runs]
    rounds_so_far = max(run.round for run in runs) + 1
    rounds = max(3, 2 * rounds_so_far)
    seconds = sum(step["dt"] for run in runs for step in run.steps) * rounds / rounds_so_far
    minutes = max(1, round(seconds / 60))
    flag = f"--rounds {rounds}"
    return f'more rounds make each ± smaller: {flag} (with make ARGS="{flag}"), about {minutes} min of steps'


def all_together(table):
    """Return what all rows bring together: the fastest of one process beside the first, which may be `plain`.

    None if that says no more than the second row does, or if no ± is known.
    """
    first, *others = table.shown
    compared = [outcome for outcome in others if outcome.seen and outcome.seen.world_size == 1]
    ratios = {outcome: compare(outcome, first, table) for outcome in compared}
    compared = [outcome for outcome in compared if ratios[outcome] and ratios[outcome].spread is not None]
    if not compared:
        return None
    fastest = max(compared, key=lambda outcome: ratios[outcome].value)
    if fastest is others[0]:
        return None
    cell = ratio_cell(ratios[fastest], judge(ratios[fastest], table.least))
    return f"{quoted(fastest.row.title)} is {cell} times as fast as {quoted(first.row.title)}"
