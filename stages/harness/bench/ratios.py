"""The ratio of two speeds: how it is taken, how far it may be off, and what it shows."""

import math
import statistics
from enum import Enum
from typing import NamedTuple

ALIKE = 0.05  # a ratio that is surely nearer to 1 than this makes no difference
FEWEST_SAMPLES = 3  # below it nothing is known of how far a ratio may be off
FEWEST_PAIRS = 3  # of one computation, for their rms to say how far such rows come out apart
# The 97.5 % quantiles of Student's t by the number of samples, where these are too few for an exact interval.
STUDENTS_T = {3: 4.303, 4: 3.182, 5: 2.776}


class Ratio(NamedTuple):
    """How many times as fast one row is as another.

    spread: how far the true ratio may be from value, with a probability of 95 %; None below three samples. rounds: how
    many rounds of fresh processes it rests on. halves: where it drifts, its medians in the first and the second half.
    """

    value: float
    spread: float | None
    rounds: int = 1
    halves: tuple | None = None


class Noise(NamedTuple):
    """How far from 1 the ratios of rows come out that compute the same, as a distance(), and of how many pairs."""

    size: float
    pairs: int


class Verdict(Enum):
    """What a ratio shows, and what that is called."""

    FASTER = "worth it"
    SLOWER = "slower"
    SAME = "no difference"
    UNCLEAR = "can't be told"


NOT_SHOWN_TO_DIFFER = (Verdict.SAME, Verdict.UNCLEAR)

# from steps to a ratio


def seconds_of_a_token(steps):
    """Return the seconds that a token took in all of some steps together; None where they are without tokens."""
    tokens = sum(step["tokens"] for step in steps)
    return sum(step["dt"] for step in steps) / tokens if tokens else None


def ratio_of_rounds(times, times_of_base, in_turn=True):
    """Return the Ratio of the speeds of two rows, or None where nothing pairs up.

    times, times_of_base: {round: list of seconds per token}; None is a step without tokens. in_turn: whether both rows
    took their steps in the same turns. Then the turns of a single round are its samples. Each of several rounds gives
    one sample, because its turns share two processes and say nothing of others. Without turns that is the ratio of the
    round's two medians.
    """
    by_round = []
    for number in times.keys() & times_of_base.keys():
        pairs = [(median_of_known(times[number]), median_of_known(times_of_base[number]))]
        if in_turn:
            pairs = zip(times[number], times_of_base[number], strict=False)  # one may have taken fewer turns
        ratios = [base / ours for ours, base in pairs if ours is not None and base is not None]
        if ratios:
            by_round.append(ratios)
    if not by_round:
        return None
    if len(by_round) == 1:
        return ratio_of_turns(by_round[0])
    value, spread = median_and_spread([statistics.median(ratios) for ratios in by_round])
    return Ratio(value, spread, len(by_round))


def median_of_known(times):
    """Return the median of times without those that are None; None where no time is known."""
    known = [time for time in times if time is not None]
    return statistics.median(known) if known else None


def ratio_of_turns(ratios):
    """Return the Ratio of two rows by their ratios in each turn. Where it drifts, its spread reaches both halves.

    It drifts where the halves differ by more than 5 %, and one of them is further from the median than the spread. In
    4,000 simulated rows without a drift that was so in none.
    """
    value, spread = median_and_spread(ratios)
    if spread is None:
        return Ratio(value, None)
    middle = len(ratios) // 2
    first, second = statistics.median(ratios[:middle]), statistics.median(ratios[middle:])
    larger_deviation = max(abs(first - value), abs(second - value))
    if larger_deviation > spread and distance(first / second) > ALIKE:
        return Ratio(value, larger_deviation, halves=(first, second))
    return Ratio(value, spread)


# medians and their intervals


def order_statistic(n):
    """Return the largest k for which the k-th smallest and k-th largest of n samples enclose the median with 95 %.

    The samples are independent, and of any distribution: each is below the median with probability 1/2, so how many are
    below it follows the binomial distribution (Conover, Practical Nonparametric Statistics). It is 0 below six samples.
    """
    k = 0
    missed = 2 / 2**n  # the probability that all samples lie on one side of the median
    while missed <= 0.05:
        k += 1
        missed += 2 * math.comb(n, k) / 2**n
    return k


def median_and_spread(samples):
    """Return the median of samples and its spread, the distance to the farther end of its 95 % interval.

    Below six samples that is the interval of Student's t, which covers 93 to 95 % around a median. Below three there is
    no spread: it is None.
    """
    ordered = sorted(samples)
    median = statistics.median(ordered)
    n = len(ordered)
    if n < FEWEST_SAMPLES:
        return median, None
    if n in STUDENTS_T:
        return median, STUDENTS_T[n] * statistics.stdev(ordered) / math.sqrt(n)
    k = order_statistic(n)
    return median, max(ordered[-k] - median, median - ordered[k - 1])


# what a ratio shows


def distance(ratio):
    """Return how far a ratio of two speeds is from 1, the same for its inverse: 0.25 for 1.25 and for 0.8."""
    return max(ratio, 1 / ratio) - 1


def noise_of_pairs(ratios):
    """Return the Noise of pairs of one computation by their Ratios; None without any that has a spread.

    It is twice the rms of their distances, and of fewer than three the worst.
    """
    distances = [distance(ratio.value) for ratio in ratios if ratio.spread is not None]
    if not distances:
        return None
    size = max(distances)
    if len(distances) >= FEWEST_PAIRS:
        size = 2 * math.sqrt(statistics.mean(each**2 for each in distances))
    return Noise(size, len(distances))


def reach(ratio, noise):
    """Return how far from 1 chance alone may bring a Ratio, as a distance(). A test simulates how often it does.

    Each round has fresh processes, so the spread of several rounds holds how much these differ, and so does the noise:
    the larger one counts. The spread of a single round only holds how much steps differ, and the noise comes on top:
    in quadrature, or as a sum where few pairs tell of it.
    """
    spread = ratio.spread
    if ratio.value < 1:
        spread /= ratio.value**2  # about that of its inverse
    if ratio.rounds > 1:
        return max(noise.size, spread)
    if noise.pairs < FEWEST_PAIRS:
        return noise.size + spread
    return math.hypot(noise.size, spread)


def judge(ratio, noise):
    """Return the Verdict on a Ratio, by the Noise of its bench."""
    if ratio.spread is None:
        return Verdict.UNCLEAR
    farthest = reach(ratio, noise)
    if distance(ratio.value) > farthest:
        return Verdict.FASTER if ratio.value > 1 else Verdict.SLOWER
    if distance(ratio.value) + farthest <= ALIKE:
        return Verdict.SAME
    return Verdict.UNCLEAR
