"""The statistics of a bench: a median, how far it may be off, and when a ratio counts as a difference."""

from harness.bench.ratios import Ratio, Verdict, distance, judge, median_and_spread

import math
import random
import statistics

import pytest


@pytest.mark.parametrize("n, k", [(2, 1), (5, 1), (6, 1), (8, 1), (9, 2), (17, 5), (20, 6), (71, 27)])
def test_the_spread_of_a_median_is_the_wider_half_of_its_interval(n, k):
    """k by the tables of the sign test (Conover, Practical Nonparametric Statistics); below 6 the whole range."""
    samples = [float(i**2) for i in range(n)]
    random.Random(n).shuffle(samples)
    median, spread = median_and_spread(samples)
    assert median == statistics.median(samples)
    assert spread == (n - k) ** 2 - median  # squares are wider apart above the median
    assert median_and_spread([-x for x in samples]) == (-median, spread)


@pytest.mark.parametrize(
    "value, spread, noise, expected",
    [
        (1.10, 0.04, 0.05, Verdict.FASTER),
        (1.10, 0.06, 0.05, Verdict.UNCLEAR),  # the larger of the two alone would call it faster
        (1.015, 0.01, 0.02, Verdict.SAME),
        (1.02, 0.03, 0.02, Verdict.UNCLEAR),
        (1.35, 0.63, 0.01, Verdict.UNCLEAR),
        (0.99, 0.01, 0.02, Verdict.SAME),
        (0.80, 0.03, 0.20, Verdict.SLOWER),  # its inverse is 1.25 ± 0.047
        (0.80, 0.03, 0.21, Verdict.UNCLEAR),
        (2.00, None, 0.01, Verdict.UNCLEAR),
    ],
)
def test_a_ratio_is_judged_by_the_sum_of_noise_and_its_own_spread(value, spread, noise, expected):
    assert judge(Ratio(value, spread), noise) is expected


def share_of_differences(samples, noise, offset, gain=1.0):
    """Return how often a row is called faster or slower than another, over many benches with one A/A control.

    samples: of each row. noise: by how much samples of one process differ. offset: by how much processes differ for
    their whole lives. gain: how many times as fast the row really is.
    """
    generator = random.Random(1)

    def speeds():
        speed_of_process = generator.gauss(0, offset)
        return [math.exp(speed_of_process + generator.gauss(0, noise)) for _ in range(samples)]

    def ratio(ours, theirs):
        return Ratio(*median_and_spread([a / b for a, b in zip(ours, theirs, strict=True)]))

    benches = 4000
    called = 0
    for _ in range(benches):
        base = speeds()
        control = ratio(speeds(), base)
        compared = ratio([gain * speed for speed in speeds()], base)
        called += judge(compared, distance(control.value)) in (Verdict.FASTER, Verdict.SLOWER)
    return called / benches


def test_rows_of_one_speed_are_called_different_as_often_as_readme_says():
    """The larger of noise and ± called 12 % of them different, and 28 % where processes differ by 1 %."""
    assert share_of_differences(3, 0.003, 0) == pytest.approx(0.05, abs=0.015)
    assert share_of_differences(20, 0.014, 0.01) == pytest.approx(0.14, abs=0.02)


def test_a_gain_of_2_percent_is_seen():
    assert share_of_differences(3, 0.003, 0, gain=1.02) > 0.97
