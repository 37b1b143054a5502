"""What a bench has shown, in words: what is worth it, what is slower, what it can't tell, and what to type."""

from .cells import quoted, ratio_cell
from .ratios import NOT_SHOWN_TO_DIFFER, Verdict, distance


def answer(table):
    """Return what a bench has shown, as a list of (heading, text). The largest gains and losses come first."""
    lines = []
    for verdict in Verdict:
        rows = [outcome for outcome in table.shown if outcome.comparison.verdict is verdict]
        if verdict not in NOT_SHOWN_TO_DIFFER:
            rows.sort(key=lambda outcome: -distance(outcome.comparison.ratio.value))
        if rows:
            lines.append((verdict.value, ", ".join(words_on_verdict(outcome) for outcome in rows)))
    for heading, text in (("to tell more", cost_of_more(table)), ("all together", all_together(table))):
        if text:
            lines.append((heading, text))
    for outcome in table.shown:
        if outcome.comparison.verdict is Verdict.FASTER:
            typed = [("what to type", code) for code in outcome.comparison.change.code]
            lines += [line for line in typed if line not in lines]
    return lines


def words_on_verdict(outcome):
    """Return what a row changes, by which ratio, and the reason if one is known."""
    comparison = outcome.comparison
    words = quoted(comparison.change.title)
    if comparison.verdict is not Verdict.SAME:
        words += f" {ratio_cell(comparison.ratio)}"
    reason = reason_of_verdict(outcome)
    return f"{words} ({quoted(reason)})" if reason else words


def reason_of_verdict(outcome):
    """Return why a row has its verdict, or None if its ± alone says it."""
    comparison = outcome.comparison
    is_same_computation = comparison.change.is_same_computation
    if is_same_computation and comparison.verdict is Verdict.UNCLEAR:
        return f"should be as fast as {comparison.base.row.title}, so one was disturbed: measure again"
    if is_same_computation or comparison.verdict is Verdict.SLOWER:
        return outcome.words
    return None


def cost_of_more(table):
    """Return what would tell more of what is unclear, and how long it takes.

    None if nothing is unclear, or if more rounds do not help, since a row was disturbed.
    """
    unclear = [outcome for outcome in table.shown if outcome.comparison.verdict is Verdict.UNCLEAR]
    if all(reason_of_verdict(outcome) for outcome in unclear):
        return None
    return f"twice the rounds, by --rounds {2 * table.bench['rounds']}, make each ± smaller, and take twice as long"


def all_together(table):
    """Return what all rows bring together: the fastest of one process beside the first, which may be `plain`.

    None if that says no more than the second row does, or if no ± is known.
    """
    first, *others = table.shown
    compared = [outcome for outcome in others if outcome.comparison.ratio_to_first and outcome.seen.world_size == 1]
    if not compared:
        return None
    fastest = max(compared, key=lambda outcome: outcome.comparison.ratio_to_first.value)
    ratio = fastest.comparison.ratio_to_first
    if fastest is others[0] or ratio.spread is None:
        return None
    return f"{quoted(fastest.row.title)} is {ratio_cell(ratio)} times as fast as {quoted(first.row.title)}"
