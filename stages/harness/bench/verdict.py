"""What the ratios of a bench show: what is faster, what is slower, what makes no difference, and what can't be told."""

import math
from enum import Enum
from typing import NamedTuple

from .. import ladder
from .results import Ratio
from .rows import Row, gains_cpu_memory

ALIKE = 0.05  # rows that differ by less make no difference
LONG_WARMUP = 10  # seconds that are worth a word
MOST_STEPS = 500  # that are worth a try, to make a ± smaller
SURPRISE = (
    "should compute the same as the row above, and is left out of the noise. A claim of ours is wrong here, or a "
    "process was slow, which --rounds {} would tell"
)


class Verdict(Enum):
    """What a ratio shows, and what that is called."""

    FASTER = "worth it"
    SLOWER = "slower"
    SAME = "no difference"
    UNCLEAR = "can't be told"
    UNEXPECTED = "unexpected"  # the row should compute the same as the one above, and its speed differs


IN_BRACKETS = (Verdict.SAME, Verdict.UNCLEAR)


class Pair(NamedTuple):
    """Two rows that do the same computation.

    is_repeat: whether one is a second run of the other. Otherwise that is our claim: the stage changes nothing here.
    """

    row: Row
    base: Row
    ratio: Ratio
    is_repeat: bool


def distance(ratio):
    """Return how far a ratio of two speeds is from 1, the same for its inverse: 0.25 for 1.25 and for 0.8."""
    return max(ratio, 1 / ratio) - 1


def spread_of_distance(ratio):
    """Return the spread of the distance() of a Ratio: its own, or about that of its inverse where it is below 1."""
    return ratio.spread if ratio.value > 1 else ratio.spread / ratio.value**2


def judge(ratio, noise):
    """Return the Verdict on a Ratio. noise: how far apart rows of the same speed came out, as a distance().

    With one control, rows of the same speed are called faster or slower in 5 % of benches of three rounds, and in 14 %
    where processes differ by 1 % for their whole lives: a test simulates both. A single sample tells nothing.
    """
    if ratio.spread is None:
        return Verdict.UNCLEAR
    reach = noise + spread_of_distance(ratio)
    if distance(ratio.value) > reach:
        return Verdict.FASTER if ratio.value > 1 else Verdict.SLOWER
    if distance(ratio.value) + reach <= ALIKE:
        return Verdict.SAME
    return Verdict.UNCLEAR


def repeats_the_row_above(results, row):
    """Tell whether a row does the same computation as the row above, because its stage changes nothing here."""
    above, effect = results.above(row), results.effect(row)
    if above is None or above.stage is None or effect is None:
        return False
    is_next_stage = ladder.between(above.stage, row.stage) == (row.stage,)
    has_same_command = row.launcher == above.launcher and row.flags == above.flags
    return is_next_stage and has_same_command and effect.same_computation


def pairs_of_one_computation(results):
    """Return the Pairs of a bench, without rows that failed."""
    candidates = [(row, results.rows[row.control_of], True) for row in results.rows.values() if row.control_of]
    for row in results.table_rows:
        if repeats_the_row_above(results, row):
            candidates.append((row, results.above(row), False))
    pairs = []
    for row, base, is_repeat in candidates:
        ratio = results.compare(row, base)
        if ratio and not results.error(row) and not results.error(base):
            pairs.append(Pair(row, base, ratio, is_repeat))
    return pairs


def is_contradicted(pair, pairs):
    """Tell whether a bench contradicts our claim that two rows do the same computation.

    It does where their ratio is further from 1 than the sum of its ± and the noise. Here the noise is that of second
    runs alone, and at least 5 %.
    """
    if pair.is_repeat or pair.ratio.spread is None:
        return False
    repeats = [distance(each.ratio.value) for each in pairs if each.is_repeat]
    return judge(pair.ratio, max([ALIKE, *repeats])) in (Verdict.FASTER, Verdict.SLOWER)


def noise_of(results):
    """Return how far from 1 a ratio may be by chance, as a distance(): that of the worst of the pairs.

    A pair that contradicts our claim is left out. None without a pair, and where every pair has a single sample, as
    after one round on a card.
    """
    return noise_among(pairs_of_one_computation(results))


def noise_among(pairs):
    """Return the noise of a bench, by its Pairs: see noise_of()."""
    distances = []
    for pair in pairs:
        if pair.ratio.spread is not None and not is_contradicted(pair, pairs):
            distances.append(distance(pair.ratio.value))
    return max(distances, default=None)


def verdict_on(results, row):
    """Return the Verdict on a row beside the row above.

    None where they can't be compared, where one of them failed, and where they train different models. Where the noise
    is not known, it is None or UNEXPECTED.
    """
    above = results.above(row)
    ratio = results.compare(row, above)
    if ratio is None or results.error(row) or results.error(above) or results.trains_another_model(row, above):
        return None
    pairs = pairs_of_one_computation(results)
    claims = [pair for pair in pairs if pair.row is row and not pair.is_repeat]
    if claims and is_contradicted(claims[0], pairs):
        return Verdict.UNEXPECTED
    noise = noise_among(pairs)
    if noise is None:
        return None
    if claims and ratio.spread is not None:
        return Verdict.SAME
    return judge(ratio, noise)


# In words


def verdict_lines(results):
    """Return what a bench has shown, as a list of (heading, words). The largest gains and losses come first."""
    rows_by_verdict = {verdict: [] for verdict in Verdict}
    for row in results.table_rows:
        verdict = verdict_on(results, row)
        if verdict:
            rows_by_verdict[verdict].append(row)
    lines = []
    for verdict, rows in rows_by_verdict.items():
        if verdict in (Verdict.FASTER, Verdict.SLOWER):
            rows.sort(key=lambda row: -distance(results.compare(row, results.above(row)).value))
        if rows:
            lines.append((verdict.value, words_on_rows(results, rows, verdict)))
    return lines + words_on_compiling(results) + words_on_all_together(results)


def words_on_rows(results, rows, verdict):
    """Return the words on all rows of one verdict, and what would tell more, or why they are alike."""
    if verdict is Verdict.UNCLEAR:
        rows_by_remedy = {}
        for row in rows:
            rows_by_remedy.setdefault(remedy(results, row), []).append(row)
        parts = [f"{names_of(results, each, verdict)}: {words}" for words, each in rows_by_remedy.items()]
        return "; ".join(parts)
    if verdict is Verdict.SAME:
        alike = [row for row in rows if repeats_the_row_above(results, row)]
        measured = [row for row in rows if row not in alike]
        parts = [names_of(results, measured, verdict)] if measured else []
        if alike:
            parts.append(f"{names_of(results, alike, verdict)}: the same computation here")
        return "; ".join(parts)
    words = names_of(results, rows, verdict)
    if verdict is Verdict.UNEXPECTED:
        return f"{words}: {SURPRISE.format(max(3, 2 * results.bench['rounds']))}"
    return words


def names_of(results, rows, verdict):
    """Return the words on some rows, one after the other."""
    return ", ".join(words_on_row(results, row, verdict) for row in rows)


def words_on_row(results, row, verdict):
    """Return a row's name and its ratio to the row above, in the words that suit a verdict."""
    ratio = results.compare(row, results.above(row))
    name = name_of_change(results, row)
    effect = results.effect(row)
    match verdict:
        case Verdict.SAME:
            return name
        case Verdict.SLOWER if effect and effect.words:
            return f"{name} {ratio.value:.2f} ({effect.words})"
        case Verdict.FASTER | Verdict.SLOWER:
            return f"{name} {ratio.value:.2f}"
        case Verdict.UNCLEAR | Verdict.UNEXPECTED:
            return f"{name} {words_on_ratio(ratio)}"


def words_on_ratio(ratio, digits=2):
    """Return a Ratio with its ±, as "1.35 ± 0.63"."""
    words = f"{ratio.value:.{digits}f}"
    return words if ratio.spread is None else f"{words} ± {ratio.spread:.{digits}f}"


def name_of_change(results, row):
    """Return what a row has that the row above does not: its technique where that is all, and else its own label."""
    if gains_cpu_memory(row, results.above(row)):
        return "memory variables"
    others = [stage for stage in results.stages_crossed(row) if stage is not row.stage]
    if others:
        return f"{row.label} with {ladder.words_on_stages(others)}"
    if row.stage is None or row.stage.technique is None or row.launcher or row.flags:
        return row.label
    return f"{row.label} {row.stage.technique}"


def remedy(results, row):
    """Return what would tell more about a row whose verdict is UNCLEAR."""
    if not results.bench["in_turn"]:
        return f"--rounds {2 * results.bench['rounds']} may tell"
    if results.compare(row, results.above(row)).spread is None:
        return "more steps may tell"
    needed = steps_needed(results, row)
    return "a quieter machine may tell" if needed > MOST_STEPS else f"--steps {needed:.0f} may tell"


def steps_needed(results, row):
    """Estimate the --steps after which the ± of a row is small enough for a verdict, in hundreds; inf where none is.

    A ± shrinks with the root of the number of turns.
    """
    ratio, noise = results.compare(row, results.above(row)), noise_of(results)
    away = distance(ratio.value)
    small_enough = max(away - noise, ALIKE - away - noise)
    if small_enough <= 0:
        return math.inf
    turns = len(results.counted(row)) / results.bench["rounds"]
    turns *= (spread_of_distance(ratio) / small_enough) ** 2
    return 100 * math.ceil((results.bench["warmup"] + turns) / 100)


def words_on_compiling(results):
    """Return after how many steps a long warm-up has paid, as a list of (heading, words)."""
    lines = []
    for row in results.table_rows:
        if verdict_on(results, row) is not Verdict.FASTER:
            continue
        ours, theirs = results.figures(row), results.figures(results.above(row))
        longer = ours["warmup_s"] - theirs["warmup_s"]
        if longer > LONG_WARMUP:
            ratio = results.compare(row, results.above(row))
            seconds_saved = ours["dt_ms"] / 1000 * (ratio.value - 1)  # of each step
            words = f"{row.label} has a warm-up that is {longer:.0f} s longer, and is ahead after about "
            lines.append(("has to pay first", f"{words}{longer / seconds_saved:,.0f} steps"))
    return lines


def words_on_all_together(results):
    """Return how many times as fast as the first row the fastest one is, as a list of one (heading, words) or none."""
    first, noise = results.table_rows[0], noise_of(results)
    if noise is None or results.error(first):
        return []
    faster = {}
    for row in results.table_rows[1:]:
        ratio = results.compare(row, first)
        if ratio is None or results.error(row) or results.trains_another_model(row, first):
            continue
        if judge(ratio, noise) is Verdict.FASTER:
            faster[row] = ratio
    if not faster:
        return []
    fastest = max(faster, key=lambda row: faster[row].value)
    return [("all together", f"{fastest.label} is {words_on_ratio(faster[fastest])} x {first.label}")]
