"""The ratio of two speeds: how it is taken, how far it may be off, and what it shows."""

import math
import statistics
from enum import Enum
from typing import NamedTuple

ALIKE = 0.05  # rows that differ by less make no difference


class Ratio(NamedTuple):
    """How many times as fast one row is as another.

    spread: from value to the farther end of its 95 % interval; None for a single sample.
    """

    value: float
    spread: float | None


class Verdict(Enum):
    """What a ratio shows, and what that is called."""

    FASTER = "worth it"
    SLOWER = "slower"
    SAME = "no difference"
    UNCLEAR = "can't be told"
    UNEXPECTED = "unexpected"  # the row should compute the same as the one above, and its speed differs


# from steps to a ratio


def seconds_per_token(step):
    """Return the seconds that a token took in a step; None where a script took the step without tokens."""
    return step["dt"] / step["tokens"] if step["tokens"] else None


def seconds_per_flop(step):
    """Return the seconds of a FLOP in a step of the probe, of a matmul in its fastest dtype."""
    return 1 / max(step["peak"].values())


def samples_of(runs, in_turn, time_of_step):
    """Return the times of a row that can be compared with those of another, a dict {key: seconds}.

    Two rows are compared where their keys agree. Where rows take turns, the key is (round, turn), and the time that of
    a step. Otherwise the key is the round, and the time the median of its steps.
    """
    samples = {}
    for run in runs:
        times = {(run.round, turn): time_of_step(step) for turn, step in enumerate(run.counted)}
        times = {key: time for key, time in times.items() if time is not None}
        if in_turn:
            samples |= times
        elif times and run.summary:  # a round that was cut off says little
            samples[run.round] = statistics.median(times.values())
    return samples


def ratio_of_samples(samples, samples_of_base):
    """Return the Ratio of the speeds of two rows, or None where no samples pair up."""
    ratios = [samples_of_base[key] / samples[key] for key in samples if key in samples_of_base]
    return Ratio(*median_and_spread(ratios)) if ratios else None


def ratio_of_all_steps(steps, steps_of_base):
    """Return the Ratio of the speeds of two rows, each of all its steps together; None where one has no tokens.

    The spread is the distance to the farther one of the ratios of their first and of their second halves.
    """
    ratio = ratio_of_speeds(steps, steps_of_base)
    if ratio is None:
        return None
    middle, middle_of_base = len(steps) // 2, len(steps_of_base) // 2
    halves = [
        ratio_of_speeds(steps[:middle], steps_of_base[:middle_of_base]),
        ratio_of_speeds(steps[middle:], steps_of_base[middle_of_base:]),
    ]
    if None in halves:
        return Ratio(ratio, None)
    return Ratio(ratio, max(abs(half - ratio) for half in halves))


def ratio_of_speeds(steps, steps_of_base):
    """Return how many times as fast some steps are as others, all tokens over all seconds; None without tokens."""
    tokens, tokens_of_base = [sum(step["tokens"] for step in each) for each in (steps, steps_of_base)]
    if not (tokens and tokens_of_base):
        return None
    seconds, seconds_of_base = [sum(step["dt"] for step in each) for each in (steps, steps_of_base)]
    return tokens / seconds * seconds_of_base / tokens_of_base


# medians and their intervals


def order_statistic(n):
    """Return the largest k for which the k-th smallest and k-th largest of n samples enclose the median.

    They do with a probability of 95 % or more, for independent samples of any distribution: each sample is below the
    median with probability 1/2, so how many are below it follows the binomial distribution (Conover, Practical
    Nonparametric Statistics). Below six samples there is no such k, and 1 is returned, for the smallest and the largest
    sample.
    """
    largest = 1
    missed = 0.0  # the probability that the median lies outside the range from the k-th smallest to the k-th largest
    for k in range(1, n // 2 + 1):
        missed += 2 * math.comb(n, k - 1) / 2**n
        if missed <= 0.05:
            largest = k
    return largest


def median_and_spread(samples):
    """Return the median of samples and its spread: the distance to the farther end of its 95 % interval.

    Below six samples their whole range stands for the interval. The spread of a single sample is None.
    """
    ordered = sorted(samples)
    median = statistics.median(ordered)
    if len(ordered) == 1:
        return median, None
    k = order_statistic(len(ordered))
    return median, max(ordered[-k] - median, median - ordered[k - 1])


# what a ratio shows


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
