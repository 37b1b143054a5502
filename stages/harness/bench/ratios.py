"""The ratio of two speeds: how it is taken, how far it may be off, and what it shows."""

import math
import statistics
from enum import Enum
from typing import NamedTuple

ALIKE = 0.05  # a ratio that is surely nearer to 1 than this makes no difference
LEAST = 0.01  # nor does one that is nearer to 1 than this, however surely it differs from 1
FEWEST_ROUNDS = 3  # with fewer, nothing is said of how far a ratio may be off


class Ratio(NamedTuple):
    """How many times as fast one row is as another.

    spread: the true ratio is between value - spread and value + spread, with a probability of 95 % if all rows scatter
    alike. For a row that scatters more than the others the probability is lower. None if there are fewer than three
    rounds.
    """

    value: float
    spread: float | None


class Verdict(Enum):
    """What a ratio shows, and what that is called."""

    FASTER = "worth it"
    SLOWER = "slower"
    SAME = "no difference"
    UNCLEAR = "can't tell"


NOT_SHOWN_TO_DIFFER = (Verdict.SAME, Verdict.UNCLEAR)


def logs_of_rounds(speeds, speeds_of_base):
    """Return the logarithm of the ratio of two speeds in each round that both rows have ended, a list.

    speeds, speeds_of_base: {round: tokens per second in each turn}. In a turn the two rows ran shortly one after the
    other, on a machine that was about as busy for both. So each turn has a ratio, and a round has the median of them.
    """
    logs = []
    for number in speeds.keys() & speeds_of_base.keys():
        turns = zip(speeds[number], speeds_of_base[number], strict=False)  # a script may have ended after fewer turns
        logs.append(statistics.median(math.log(ours / base) for ours, base in turns))
    return logs


def scatter_of(logs_of_all):
    """Return how far the ratios of a typical row lie apart from round to round: (sd, degrees of freedom).

    sd is the standard deviation of their logarithms, by the median of all rows' variances. None if no row has two
    rounds. logs_of_all: the lists of logs_of_rounds() of all rows.
    """
    lists = [logs for logs in logs_of_all if len(logs) > 1]
    freedom = sum(len(logs) - 1 for logs in lists)
    if not freedom:
        return None
    typical = statistics.median(statistics.variance(logs) for logs in lists)
    if len(lists) > 2:  # else the median is the mean
        # Few rounds give too small a variance more often than too large a one, so the median of many is below the true
        # one: for normal noise by this factor (Wilson and Hilferty's approximation of chi-squared, 1931).
        freedom_of_one = freedom / len(lists)
        typical /= (1 - 2 / (9 * freedom_of_one)) ** 3
    return math.sqrt(typical), freedom


def ratio_of(logs, scatter):
    """Return the Ratio of two rows by logs_of_rounds(), or None without a round. scatter: of scatter_of().

    Its value is the geometric mean of the rounds. For its spread a row is taken to scatter as a typical row, or as it
    did itself if that is more. By its own three rounds alone, the spread would be twice as wide.
    """
    if not logs:
        return None
    value = math.exp(statistics.mean(logs))
    if len(logs) < FEWEST_ROUNDS or scatter is None:
        return Ratio(value, None)
    sd_of_typical_row, freedom = scatter
    sd = max(sd_of_typical_row, statistics.stdev(logs))
    return Ratio(value, value * math.expm1(students_t(freedom) * sd / math.sqrt(len(logs))))


def students_t(freedom):
    """Return the 97.5 % quantile of Student's t, to 0.4 %, for 2 degrees of freedom or more.

    It is that of the normal distribution and three corrections. The first one is from Abramowitz and Stegun, 26.7.5.
    The other two are fitted to tables of t: with those of 26.7.5 it would be 3 % too low for 2 degrees of freedom.
    """
    return 1.96 + 2.37 / freedom + 2.52 / freedom**2 + 4.22 / freedom**3


# what a ratio shows


def distance(ratio):
    """Return how far a ratio of two speeds is from 1, the same for its inverse: 0.25 for 1.25 and for 0.8."""
    return max(ratio, 1 / ratio) - 1


def judge(ratio, disturbance=0.0, is_same_computation=False):
    """Return the Verdict on a Ratio; None without one, and with fewer than three rounds.

    A ratio that is nearer to 1 than its spread, than the disturbance, or than LEAST shows nothing. A row that should be
    as fast as its base is never called faster or slower: if it comes out so, it was disturbed. disturbance: how far
    from 1 the control came out, if chance can't explain that. is_same_computation: whether the row should be as fast.
    """
    if ratio is None or ratio.spread is None:
        return None
    spread = ratio.spread / ratio.value  # in percent a ratio and its inverse have the same
    reach = max(spread, disturbance)
    from_1 = distance(ratio.value)
    if is_same_computation:
        return Verdict.SAME if from_1 <= max(reach, ALIKE) else Verdict.UNCLEAR
    if from_1 > reach and from_1 >= LEAST:
        return Verdict.FASTER if ratio.value > 1 else Verdict.SLOWER
    return Verdict.SAME if from_1 + reach <= ALIKE else Verdict.UNCLEAR
