"""Medians and means of samples, each with the half of its 95 % interval."""

import math
import statistics


def order_statistic(n):
    """Return k, such that the k-th smallest and k-th largest of n samples enclose the median in 95 % of cases.

    That is exact for any distribution: a sample is below the median with probability 1/2, so how many are below it
    follows the binomial distribution (Conover, Practical Nonparametric Statistics). The largest such k is taken. Below
    six samples there is none, and 1 stands for the whole range.
    """
    largest = 1
    missed = 0.0  # how often the median lies outside of the k-th samples
    for k in range(1, n // 2 + 1):
        missed += 2 * math.comb(n, k - 1) / 2**n
        if missed <= 0.05:
            largest = k
    return largest


def median_and_spread(samples):
    """Return the median of samples and the wider half of its exact 95 % interval; below six samples of their range.

    A single sample has no spread, which is None.
    """
    ordered = sorted(samples)
    median = statistics.median(ordered)
    if len(ordered) == 1:
        return median, None
    k = order_statistic(len(ordered))
    return median, max(ordered[-k] - median, median - ordered[k - 1])


# Student's t for a two-sided interval of 95 %, by degrees of freedom from 1 on
STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def student_t(degrees):
    """Return Student's t for a two-sided interval of 95 %, for 1 degree of freedom or more."""
    if degrees > len(STUDENT_T):
        return STUDENT_T[-1]  # which makes the interval up to 9 % too wide
    return STUDENT_T[degrees - 1]


def mean_and_spread(samples):
    """Return the mean of samples and the half of its 95 % interval by Student's t, None for a single sample."""
    n = len(samples)
    mean = statistics.mean(samples)
    if n == 1:
        return mean, None
    return mean, student_t(n - 1) * statistics.stdev(samples) / math.sqrt(n)


def distance(ratio):
    """Return how far a ratio of two speeds is from 1, the same for its inverse: 0.25 for 1.25 and for 0.8."""
    return max(ratio, 1 / ratio) - 1
