"""The statistics of a bench: a median, how far it may be off, and when a ratio counts as a difference."""

from harness.bench import ratios
from harness.bench.ratios import Noise, Ratio, Verdict

import math
import random
import re
import statistics

import pytest
from conftest import ROOT


@pytest.mark.parametrize("n, k", [(10, 2), (17, 5), (20, 6), (71, 27)])
def test_the_spread_of_a_median_is_the_wider_half_of_its_interval(n, k):
    """k by the tables of the sign test (Conover, Practical Nonparametric Statistics)."""
    samples = [float(i**2) for i in range(n)]
    random.Random(n).shuffle(samples)
    median, spread = ratios.median_and_spread(samples)
    assert median == statistics.median(samples)
    assert spread == (n - k) ** 2 - median  # squares are wider apart above the median
    assert ratios.median_and_spread([-x for x in samples]) == (-median, spread)


def test_the_spread_of_a_few_samples_is_by_students_t():
    """1.38, 1.40 and 1.47: their standard deviation is 0.0473, and t of two degrees 4.303."""
    spread = pytest.approx(4.303 * 0.04726 / math.sqrt(3), rel=1e-3)
    assert ratios.median_and_spread([1.40, 1.38, 1.47]) == (1.40, spread)
    assert ratios.median_and_spread([1.0, 3.0]) == (2.0, None)


def test_a_ratio_that_drifts_reaches_both_halves():
    steady = [1.5, 1.51, 1.49, 1.5] * 5
    assert ratios.ratio_of_turns(steady).halves is None
    falls = ratios.ratio_of_turns([2.5] * 5 + [1.8] * 4 + [1.45] * 5 + [1.4] * 6)
    assert falls == (1.45, pytest.approx(0.7), 1, (2.15, 1.4))
    assert ratios.ratio_of_turns([1.04] * 10 + [1.0] * 10).halves is None  # 4 % make no difference


@pytest.mark.parametrize(
    "value, spread, rounds, pairs, expected",
    [
        (1.10, 0.04, 1, 1, Verdict.FASTER),
        (1.10, 0.06, 1, 2, Verdict.UNCLEAR),  # 0.05 + 0.06 explain it, of few pairs
        (1.10, 0.06, 1, 3, Verdict.FASTER),  # of three in quadrature: 0.078
        (1.10, 0.09, 1, 3, Verdict.UNCLEAR),
        (1.10, 0.09, 3, 1, Verdict.FASTER),  # of rounds the larger one
        (1.045, 0.01, 3, 3, Verdict.UNCLEAR),
        (1.01, 0.02, 1, 1, Verdict.UNCLEAR),
        (1.0, 0.0, 1, 1, Verdict.SAME),
        (0.92, 0.01, 1, 1, Verdict.SLOWER),  # its inverse is 1.087 ± 0.012
        (0.92, 0.04, 1, 1, Verdict.UNCLEAR),
        (2.00, None, 1, 3, Verdict.UNCLEAR),
    ],
)
def test_a_ratio_is_judged_by_its_spread_and_a_noise_of_5_percent(value, spread, rounds, pairs, expected):
    assert ratios.judge(Ratio(value, spread, rounds), Noise(0.05, pairs)) is expected


def test_the_noise_is_the_worst_of_few_pairs_and_twice_the_rms_of_three():
    pairs = [Ratio(1.01, 0.1), Ratio(1 / 1.03, 0.1), Ratio(1.5, None)]
    assert ratios.noise_of_pairs(pairs) == (pytest.approx(0.03), 2)
    rms = math.sqrt((0.01**2 + 0.03**2 + 0.02**2) / 3)
    assert ratios.noise_of_pairs([*pairs, Ratio(1.02, 0.1)]) == (pytest.approx(2 * rms), 3)
    assert ratios.noise_of_pairs([Ratio(1.5, None)]) is None


# How often a bench errs. A ladder on a CPU has four pairs of one computation, on a card three.
PAIRS = {1: [("s06 again", "s06")]}
PAIRS[4] = [*PAIRS[1], ("s02", "s01"), ("s08", "s07"), ("s09", "s08")]
PAIRS[3] = [*PAIRS[1], ("s08", "s07"), ("s09", "s08")]
ROWS = [("s07", "s06"), ("s10", "s09"), ("s11", "s10")]
PROCESSES = {name for pair in PAIRS[4] + ROWS for name in pair}


def simulated_times(generator, rounds, offset):
    """Return {round: seconds of 20 turns} of a row whose processes differ by an offset (sd) for their whole lives.

    Two such rows have ratios that differ by 2.4 % from turn to turn, as in the records, with a tail in 5 % of steps.
    """
    times = {}
    for number in range(rounds):
        seconds = math.exp(generator.gauss(0, offset))
        times[number] = []
        for _ in range(20):
            tail = generator.expovariate(1 / 0.03) if generator.random() < 0.05 else 0
            times[number].append(seconds * math.exp(generator.gauss(0, 0.0155) + tail))
    return times


def share_of_differences(pairs, rounds, offset, gain=1.0, benches=1000):
    """Return how often a row that is `gain` times as fast as another is called faster or slower."""
    generator = random.Random(1)
    called = 0
    for _ in range(benches):
        times = {name: simulated_times(generator, rounds, offset) for name in sorted(PROCESSES)}
        noise = ratios.noise_of_pairs([ratios.ratio_of_rounds(times[a], times[b]) for a, b in PAIRS[pairs]])
        for name, base in ROWS:
            ratio = ratios.ratio_of_rounds(times[name], times[base])
            ratio = ratio._replace(value=gain * ratio.value, spread=gain * ratio.spread)
            called += ratios.judge(ratio, noise) in (Verdict.FASTER, Verdict.SLOWER)
    return called / (benches * len(ROWS))


@pytest.mark.parametrize(
    "row, pairs, rounds",
    [("20 turns, one control", 1, 1), ("20 turns, the ladder's four pairs", 4, 1), ("three rounds, one control", 1, 3)],
)
def test_the_page_of_results_says_how_often_a_bench_errs(row, pairs, rounds):
    """Of 100 equal rows of the ladder it calls 5 different where processes differ by 1 %, and finds 41 that are 3 %
    faster. By the sum of noise and ± it would be 2 and 31."""
    page = (ROOT / "results" / "README.md").read_text("utf-8")
    cells = re.search(rf"^\| {row} \| (.*) \|$", page, re.MULTILINE)[1].split(" | ")
    simulated = []
    for gain in (1.0, 1.03):
        for offset in (0, 0.01):
            simulated.append(100 * share_of_differences(pairs, rounds, offset, gain))
    assert [int(cell) for cell in cells] == pytest.approx(simulated, abs=2)
    if pairs == 4:
        assert simulated[1] < 5.5 and simulated[3] > 37
