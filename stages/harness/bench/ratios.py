"""The ratio of two speeds: how it is taken, how far it may be off, and what it shows."""

import math
import statistics
from enum import Enum
from typing import NamedTuple

ALIKE = 0.05  # a ratio that is surely nearer to 1 than this makes no difference
FEWEST_ROUNDS = 3  # with fewer, nothing is said of how far a ratio may be off


class Ratio(NamedTuple):
    """How many times as fast one row is as another.

    spread: how far the true ratio may be from value, with a probability of 95 %; None below three rounds.
    """

    value: float
    spread: float | None


class Scatter(NamedTuple):
    """How far the ratios of a typical row lie apart from round to round, by the median of all rows' variances.

    sd: the standard deviation of their logarithms. freedom: on how many independent differences it rests.
    """

    sd: float
    freedom: int


class Verdict(Enum):
    """What a ratio shows, and what that is called."""

    FASTER = "worth it"
    SLOWER = "slower"
    SAME = "no difference"
    UNCLEAR = "can't tell"


NOT_SHOWN_TO_DIFFER = (Verdict.SAME, Verdict.UNCLEAR)


def logs_of_rounds(times, times_of_base):
    """Return the logarithm of the ratio of two speeds in each round that both rows have ended, a list.

    times, times_of_base: {round: seconds of a token in each turn}. Both took a turn one after the other, on a machine
    that was as busy for one as for the other, so a round's ratio is the median of those of its turns.
    """
    logs = []
    for number in times.keys() & times_of_base.keys():
        turns = zip(times[number], times_of_base[number], strict=False)  # one may have ended sooner
        logs.append(statistics.median(math.log(base / ours) for ours, base in turns))
    return logs


def scatter_of(logs_of_all):
    """Return the Scatter of the lists of logs_of_rounds() of all rows; None if no list has two rounds."""
    lists = [logs for logs in logs_of_all if len(logs) > 1]
    freedom = sum(len(logs) - 1 for logs in lists)
    if not freedom:
        return None
    typical = statistics.median(map(statistics.variance, lists))
    if len(lists) > 2:  # else it is the mean, which is more than a median by this factor (Wilson and Hilferty)
        typical /= (1 - 2 / (9 * freedom / len(lists))) ** 3
    return Scatter(math.sqrt(typical), freedom)


def ratio_of(logs, scatter):
    """Return the Ratio of two rows by logs_of_rounds(), or None without a round.

    Its value is the geometric mean of the rounds. A row scatters as a typical row, or as it did itself if that is more:
    by three rounds of its own alone, the ± would be twice as wide.
    """
    if not logs:
        return None
    value = math.exp(statistics.mean(logs))
    if len(logs) < FEWEST_ROUNDS or scatter is None:
        return Ratio(value, None)
    sd = max(scatter.sd, statistics.stdev(logs))
    return Ratio(value, value * math.expm1(students_t(scatter.freedom) * sd / math.sqrt(len(logs))))


def students_t(freedom):
    """Return the 97.5 % quantile of Student's t, to 0.4 %, for 2 degrees of freedom or more."""
    return 1.96 + 2.37 / freedom + 2.52 / freedom**2 + 4.22 / freedom**3


# what a ratio shows


def distance(ratio):
    """Return how far a ratio of two speeds is from 1, the same for its inverse: 0.25 for 1.25 and for 0.8."""
    return max(ratio, 1 / ratio) - 1


def judge(ratio, disturbance=0.0):
    """Return the Verdict on a ratio. One that is nearer to 1 than its spread, or than the disturbance, shows nothing.

    disturbance: how far from 1 the control came out, if chance can't explain that.
    """
    if ratio.spread is None:
        return Verdict.UNCLEAR
    spread = ratio.spread / ratio.value  # in percent a ratio and its inverse have the same
    reach = max(spread, disturbance)
    if distance(ratio.value) > reach:
        return Verdict.FASTER if ratio.value > 1 else Verdict.SLOWER
    if distance(ratio.value) + reach <= ALIKE:
        return Verdict.SAME
    return Verdict.UNCLEAR
