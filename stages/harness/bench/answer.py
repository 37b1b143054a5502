"""What a bench has shown, in words: what is worth it, what is slower, and what it can't tell."""

from .cells import quoted, ratio_cell
from .ratios import NOT_SHOWN_TO_DIFFER, Verdict, distance, judge

WIDE = 0.25  # of a ratio: a ± that shows that the machine was busy


def answer(table):
    """Return what a bench has shown, as a list of (heading, text). The largest gains and losses come first."""
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
        rounds = 2 * table.bench["rounds"]
        lines.append(("to tell more", f"--rounds {rounds} makes each ± smaller, and takes twice as long"))
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
    """Return what a row changes, by which ratio, and the reason if one is known."""
    words = quoted(outcome.change.label)
    if outcome.verdict is not Verdict.SAME:
        words += f" {ratio_cell(outcome.ratio)}"
    reason = reason_of_verdict(outcome)
    return f"{words} ({quoted(reason)})" if reason else words


def reason_of_verdict(outcome):
    """Return why a row has its verdict, or None if its ± alone says it."""
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
    """Return how fast the fastest row of one process is beside the first, maybe `plain`.

    Of rows that compute the same it is the first. None if that says no more than the second row does, or if no ± is
    known.
    """
    first, *others = table.shown
    compared = [outcome for outcome in others if outcome.ratio_to_first and outcome.seen.world_size == 1]
    if not compared:
        return None
    fastest = max(compared, key=lambda outcome: outcome.ratio_to_first.value)
    while fastest.change.is_same_computation and fastest.base in [first, *compared]:
        fastest = fastest.base
    ratio = fastest.ratio_to_first
    if fastest in table.shown[:2] or ratio.spread is None or ratio.value < 1:  # below 1: the first row is the fastest
        return None
    title = quoted(fastest.row.title)
    if fastest.row.added and fastest.base.row.added:  # of a climb: it has what its base adds, too
        title = f"up to {title}"
    return f"{title}: {ratio_cell(ratio, judge(ratio, table.disturbance))} times as fast as {quoted(first.row.title)}"
