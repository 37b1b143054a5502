"""What a bench has shown, in words: what is worth it, what is slower, and what it can't tell."""

from .cells import quoted, ratio_cell
from .ratios import NOT_SHOWN_TO_DIFFER, Verdict, distance, judge

WIDE = 0.25  # of its ratio: with a ± as large as this, the machine was busy


def answer(table):
    """Return what a bench has shown, a list of (heading, text). In each text the largest gains or losses come first."""
    lines = []
    for verdict in Verdict:
        rows = [outcome for outcome in table.shown if outcome.verdict is verdict]
        if verdict not in NOT_SHOWN_TO_DIFFER:
            rows.sort(key=lambda outcome: -distance(outcome.ratio.value))
        if rows:
            lines.append((verdict.value, ", ".join(words_on_verdict(outcome) for outcome in rows)))
    reason = why_busy(table)
    if reason:
        lines.append(("busy machine", f"{reason}: close other programs, and measure again"))
    elif any(outcome.verdict is Verdict.UNCLEAR for outcome in table.shown):
        advice = f"--rounds {2 * table.bench['rounds']} makes each ± smaller, and takes twice as long"
        lines.append(("to tell more", advice))
    fastest = fastest_row(table)
    if fastest:
        lines.append(("fastest row", fastest))
    return lines


def why_busy(table):
    """Return what shows that other programs took a part of the machine, or None."""
    ratios = [outcome.ratio for outcome in table.shown if outcome.ratio]
    load = table.bench["environment"].get("load", 0)
    if ratios and load > 1:
        return f"the load was {load:.2f} times the cores when the bench began"
    if any(ratio.spread and ratio.spread >= WIDE * ratio.value for ratio in ratios):
        return "a ± is a quarter of its ratio, or more"
    return None


def words_on_verdict(outcome):
    """Return what a row changes, its ratio if that differs from 1, and the reason if one is known."""
    words = quoted(outcome.change.label)
    if outcome.verdict is not Verdict.SAME:
        words += f" {ratio_cell(outcome.ratio)}"
    reason = reason_of_verdict(outcome)
    return f"{words} ({quoted(reason)})" if reason else words


def reason_of_verdict(outcome):
    """Return why a row has its verdict, or None if there is nothing to say but its ratio and ±."""
    is_same_computation = outcome.change.is_same_computation
    stage = outcome.row.stage
    if is_same_computation and outcome.verdict is Verdict.UNCLEAR:
        return f"should be as fast as {outcome.base.row.title}, so one was disturbed: measure again"
    if outcome.row.added:  # what is known of its stage is no reason for what was added to it
        return None
    if outcome.verdict is Verdict.SLOWER and stage and stage.left_out_by:
        return f"leave it out of all rows with {stage.left_out_by}"
    if is_same_computation or outcome.verdict is Verdict.SLOWER:
        return outcome.words
    return None


def fastest_row(table):
    """Return how many times as fast as the first row the fastest row is, in words, or None if that says nothing new.

    Only rows of one process count. Of rows that compute the same, the first one is called the fastest.
    """
    first, *others = table.shown
    compared = [outcome for outcome in others if outcome.ratio_to_first and outcome.seen.world_size == 1]
    if not compared:
        return None
    fastest = max(compared, key=lambda outcome: outcome.ratio_to_first.value)
    fastest = first_that_computes_the_same(fastest, [first, *compared])
    ratio = fastest.ratio_to_first
    if fastest in table.shown[:2]:  # the ratio of the second row to the one above says it already
        return None
    if ratio.spread is None:
        return None
    if ratio.value < 1:  # the first row is the fastest
        return None
    title = quoted(fastest.row.title)
    if fastest.row.added and fastest.base.row.added:  # in a climb a row has what its base adds, too
        title = f"up to {title}"
    return f"{title}: {ratio_cell(ratio, judge(ratio, table.disturbance))} times as fast as {quoted(first.row.title)}"


def first_that_computes_the_same(outcome, candidates):
    """Return the first of the candidates that a row leads back to, from base to base, while both compute the same."""
    while outcome.change.is_same_computation and outcome.base in candidates:
        outcome = outcome.base
    return outcome
