"""The statistics of a bench: a ratio, how far it may be off, and when it counts as a difference."""

from harness.bench import ratios
from harness.bench.ratios import Ratio, Scatter, Verdict

import math
import random
import re
import statistics

import pytest
from conftest import ROOT


def test_a_ratio_is_the_geometric_mean_of_its_rounds_and_three_give_a_spread():
    """2, 2 and 4. The logarithms have a standard deviation of log(2) / sqrt(3), more than that of all rows."""
    logs = ratios.logs_of_rounds({0: 1.0, 1: 1.0, 2: 0.5, 3: 1.0}, {2: 2.0, 1: 2.0, 0: 2.0})
    ratio = ratios.ratio_of(logs, Scatter(0.01, 4))
    assert ratio.value == pytest.approx(2 ** (4 / 3))
    assert ratio.spread / ratio.value == pytest.approx(math.expm1(2.776 * math.log(2) / 3), rel=0.01)
    assert ratios.ratio_of(logs[:2], Scatter(0.01, 4)).spread is None
    assert ratios.ratio_of([], None) is None


def test_a_row_that_scatters_less_than_all_rows_has_their_spread():
    steady, other = [0.1, 0.1, 0.1], [0.0, 0.02, 0.04]
    scatter = ratios.scatter_of([steady, other, [0.5], []])
    assert scatter == (pytest.approx(0.02 / math.sqrt(2)), 4)
    spread = ratios.ratio_of(steady, scatter).spread / math.exp(0.1)
    assert spread == pytest.approx(math.expm1(2.776 * scatter.sd / math.sqrt(3)), rel=0.01)
    assert ratios.scatter_of([[0.5]]) is None


@pytest.mark.parametrize("freedom, t", [(2, 4.303), (3, 3.182), (4, 2.776), (6, 2.447), (10, 2.228), (26, 2.056)])
def test_students_t_is_that_of_the_tables(freedom, t):
    assert ratios.students_t(freedom) == pytest.approx(t, rel=0.005)


@pytest.mark.parametrize(
    "value, spread, expected",
    [
        (1.10, 0.09, Verdict.FASTER),
        (1.10, 0.12, Verdict.UNCLEAR),
        (1.045, 0.01, Verdict.UNCLEAR),  # the noise is 5 %
        (1.01, 0.02, Verdict.UNCLEAR),
        (1.0, 0.0, Verdict.SAME),
        (0.92, 0.01, Verdict.SLOWER),  # its inverse is 1.087
        (0.96, 0.01, Verdict.UNCLEAR),
        (2.00, None, Verdict.UNCLEAR),
    ],
)
def test_a_ratio_is_judged_by_its_spread_or_a_noise_of_5_percent(value, spread, expected):
    assert ratios.judge(Ratio(value, spread), 0.05) is expected


def test_the_noise_is_the_worst_pair():
    assert ratios.noise_of_pairs([Ratio(1.01, 0.1), Ratio(1 / 1.03, 0.1), Ratio(1.5, None)]) == pytest.approx(0.03)
    assert ratios.noise_of_pairs([Ratio(1.5, None)]) is None


# How often a bench errs. A ladder on a CPU has four pairs of one computation.
LADDER = ["s01", "s02", "s03", "s04", "s05", "s06", "s07", "s08", "s09", "s10", "s11", "s12"]
NEIGHBORS = [("s06 again", "s06"), *zip(LADDER[1:], LADDER, strict=False)]
PAIRS = {1: [("s06 again", "s06")]}
PAIRS[4] = [*PAIRS[1], ("s02", "s01"), ("s08", "s07"), ("s09", "s08")]
ROWS = [("s07", "s06"), ("s10", "s09"), ("s11", "s10")]


def simulated_times(generator, offset, steps=7):
    """Return {round: seconds} of a row whose processes differ by an offset (sd) for their whole lives.

    Steps differ by 1.55 %, as in the records, with a tail in 5 % of them.
    """
    times = {}
    for number in range(3):
        seconds = []
        for _ in range(steps):
            tail = generator.expovariate(1 / 0.03) if generator.random() < 0.05 else 0
            seconds.append(math.exp(generator.gauss(0, 0.0155) + tail))
        times[number] = statistics.median(seconds) * math.exp(generator.gauss(0, offset))
    return times


def share_of_differences(pairs, neighbors, offset, gain=1.0, benches=1000):
    """Return how often a row that is `gain` times as fast as another is called faster or slower."""
    generator = random.Random(1)
    called = []
    for _ in range(benches):
        times = {name: simulated_times(generator, offset) for name in [*LADDER, "s06 again"]}
        logs = {(a, b): ratios.logs_of_rounds(times[a], times[b]) for a, b in NEIGHBORS}
        scatter = ratios.scatter_of([logs[each] for each in neighbors])
        noise = ratios.noise_of_pairs([ratios.ratio_of(logs[pair], scatter) for pair in pairs])
        for each in ROWS:
            if each in neighbors:
                ratio = ratios.ratio_of([log + math.log(gain) for log in logs[each]], scatter)
                called.append(ratios.judge(ratio, noise) in (Verdict.FASTER, Verdict.SLOWER))
    return statistics.mean(called)


@pytest.mark.parametrize(
    "row, pairs, neighbors",
    [
        ("two rows and a control", PAIRS[1], [("s06 again", "s06"), ("s07", "s06")]),
        ("the ladder, one control", PAIRS[1], NEIGHBORS),
        ("the ladder, its four pairs", PAIRS[4], NEIGHBORS),
    ],
)
def test_the_page_of_results_says_how_often_a_bench_errs(row, pairs, neighbors):
    """Of 100 equal rows fewer than 5 are called different."""
    page = (ROOT / "results" / "README.md").read_text("utf-8")
    cells = re.search(rf"^\| {row} \| (.*) \|$", page, re.MULTILINE)[1].split(" | ")
    simulated = []
    for gain in (1.0, 1.03):
        for offset in (0, 0.01):
            simulated.append(100 * share_of_differences(pairs, neighbors, offset, gain))
    assert [int(cell) for cell in cells] == pytest.approx(simulated, abs=2)
    assert max(simulated[:2]) < 5.5
