"""The verdict: what the ratios of a bench show, by one rule, and what it says of that."""

from harness.bench.results import Ratio, median_and_spread
from harness.bench.verdict import (
    Verdict,
    distance,
    judge,
    noise_of,
    pairs_of_one_computation,
    verdict_lines,
    verdict_on,
)

import math
import random

import pytest
from fixtures.records import MINI, failure, results_of, row, run, summary


def verdict(results, name):
    """Return the Verdict on a row of this name."""
    return verdict_on(results, results.rows[name])


def names_of_pairs(results):
    """Return the names of the rows that are runs of one computation."""
    return {(pair.row.name, pair.base.name) for pair in pairs_of_one_computation(results)}


# The rule


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


# Pairs of one computation, and the noise


def test_the_ratio_of_two_models_is_no_verdict():
    other = {"shape": MINI | {"n_embd": 99}}
    results = results_of(run("a", [1.0] * 2), run("a again", [1.1] * 2), run("b", [1.0] * 2, **other))
    assert results.compare(results.rows["b"], results.rows["a"]).value == 1
    assert verdict(results, "b") is None
    assert verdict_lines(results) == []


@pytest.mark.parametrize("dt, noise", [(1.0, 0), (2.0, 1), (0.5, 1), (1.25, 0.25), (0.8, 0.25)])
def test_the_noise_is_how_far_a_row_and_its_second_run_came_out_apart(dt, noise):
    results = results_of(run("a", [1.0] * 2), run("a again", [dt] * 2))
    assert noise_of(results) == pytest.approx(noise)


def test_the_noise_is_the_worst_of_all_pairs_of_one_computation():
    """Without TF32 units s02 is s01, and s08 takes the steps of s07."""
    runs = [run("s01", [1.0] * 2), run("s02", [0.96] * 2), run("s07", [0.5] * 2), run("s07 again", [0.49] * 2)]
    results = results_of(*runs, run("s08", [0.5] * 2))
    assert names_of_pairs(results) == {("s07 again", "s07"), ("s02", "s01"), ("s08", "s07")}
    assert noise_of(results) == pytest.approx(1 / 0.96 - 1)


@pytest.mark.parametrize("names, in_turn", [(["a", "b"], True), (["a", "a again", "b"], False)])
def test_without_a_control_or_a_second_round_nothing_is_said(names, in_turn):
    results = results_of(*[run(name, [0.1 if name == "b" else 1.0] * 3) for name in names], in_turn=in_turn)
    assert noise_of(results) is None
    assert verdict(results, "b") is None
    assert verdict_lines(results) == []


def test_a_stage_that_does_nothing_here_is_a_control_of_the_stage_before():
    missing = {"compile": False, "fallbacks": {"compile": "no compiler"}, "amp_dtype": "float32", "accum": 1}
    results = results_of(*[run(f"s{number:02d}", [1.0], **missing) for number in range(1, 13)])
    expected = {("s02", "s01"), ("s03", "s02"), ("s04", "s03"), ("s08", "s07"), ("s09", "s08"), ("s11", "s10")}
    assert names_of_pairs(results) == expected


@pytest.mark.parametrize("names", [("s01", "s08"), ("mine", "s02"), ("s01", "mine"), ("s02", "s01")], ids=" ".join)
def test_a_row_is_no_control_where_the_one_above_is_not_the_stage_before(names):
    assert names_of_pairs(results_of(*[run(name, [1.0]) for name in names])) == set()


@pytest.mark.parametrize(
    "of_s07, of_s08, is_control",
    [
        ({}, {"flags": ("--lr", "1")}, False),
        ({}, {"launcher": ("env", "A=b")}, False),
        ({"flags": ("--lr", "1")}, {"flags": ("--lr", "1")}, True),
    ],
)
def test_a_row_is_a_control_of_the_stage_before_where_both_have_the_same_command(of_s07, of_s08, is_control):
    rows = [row("s07", **of_s07), row("s08", above="s07", **of_s08)]
    results = results_of(run("s07", [1.0]), run("s08", [1.0]), rows=rows)
    assert len(names_of_pairs(results)) == is_control


@pytest.mark.parametrize("failed", ["a", "a again"])
def test_a_run_that_failed_is_no_control(failed):
    ends = {failed: failure("boom")}
    runs = [run(name, [1.0] * 2, end=ends.get(name, summary())) for name in ("a", "a again")]
    assert names_of_pairs(results_of(*runs)) == set()


def test_a_single_round_of_a_row_tells_nothing_whatever_the_noise():
    """Only rounds that both rows ended give a ratio, and one ratio has no interval."""
    both = [run(name, [1.0], number) for name in ("a", "a again") for number in range(3)]
    once = [run("b", [0.1]), run("b", [0.1], 1, end=None), run("b", [0.1], 2, end=None)]
    results = results_of(*both, *once, in_turn=False, rounds=3)
    assert noise_of(results) == 0
    assert verdict(results, "b") is Verdict.UNCLEAR


def test_a_stage_that_is_known_to_do_nothing_makes_no_difference_however_wide_its_spread():
    runs = [run("s01", [1.0, 1.0]), run("s01 again", [1.0, 1.0]), run("s02", [0.9, 1.1])]
    results = results_of(*runs)
    assert results.compare(results.rows["s02"], results.rows["s01"]).spread == pytest.approx(0.1, abs=0.01)
    assert verdict(results, "s02") is Verdict.SAME


def test_a_pair_that_contradicts_our_claim_is_named_and_is_no_noise():
    """s02 is twice as fast on a device that we say has no TF32. The steps of s08 are 3 % off: that is noise."""
    runs = [run("s01", [1.0] * 2), run("s02", [0.5] * 2), run("s02 again", [0.5] * 2), run("s07", [0.25] * 2)]
    results = results_of(*runs, run("s08", [0.25 * 1.03] * 2))
    assert noise_of(results) == pytest.approx(0.03)
    assert verdict(results, "s02") is Verdict.UNEXPECTED
    assert verdict(results, "s07") is Verdict.FASTER
    words = dict(verdict_lines(results))
    assert words["unexpected"].startswith("s02 TF32 2.00 ± 0.00: should compute the same as the row above")


def test_a_second_run_of_a_row_is_noise_however_bad_and_excuses_a_claim():
    runs = [run("s01", [1.0] * 2), run("s02", [0.5] * 2), run("s02 again", [1.25] * 2), run("s03", [0.1] * 2)]
    results = results_of(*runs)
    assert noise_of(results) == pytest.approx(1.5)
    assert verdict(results, "s02") is Verdict.SAME
    assert verdict(results, "s03") is Verdict.FASTER


def test_a_wrong_claim_is_named_where_it_is_the_only_pair():
    results = results_of(run("s01", [1.0] * 2), run("s02", [0.5] * 2), run("s03", [0.25] * 2))
    assert names_of_pairs(results) == {("s02", "s01")}
    assert noise_of(results) is None
    assert verdict(results, "s03") is None
    [(heading, words)] = verdict_lines(results)
    assert (heading, words.split(":")[0]) == ("unexpected", "s02 TF32 2.00 ± 0.00")
    assert words.endswith("--rounds 3 would tell")


# The answer


def test_the_answer_has_each_kind_of_verdict_the_largest_first():
    """On a machine whose noise is 1 %: s04 takes 40 s more of warm-up, and saves 1 / 12 s in each step."""
    runs = [
        run("s01", [0.6] * 20),
        run("s02", [0.6] * 20),
        run("s03", [0.25] * 20, warmup_dt=1),
        run("s03 again", [0.2525] * 20),
        run("s04", [1 / 6] * 20, warmup_dt=11),
        run("s05", [1 / 6] * 10 + [1 / 5] * 10),
        run("s06", [1 / 6] * 10 + [1 / 5] * 10),
        run("s07", [0.2] * 20),
        run("s12", [0.25] * 20),
    ]
    assert verdict_lines(results_of(*runs)) == [
        ("worth it", "s03 autocast 2.40, s04 compile 1.50"),
        ("slower", "s12 with s08 to s11 0.80 (one process: what DDP itself costs)"),
        ("no difference", "s06 a vocabulary in 64s; s02 TF32: the same computation here"),
        ("can't be told", "s05 flash attention 0.92 ± 0.08, s07 clipping 0.92 ± 0.08: --steps 100 may tell"),
        ("has to pay first", "s04 has a warm-up that is 40 s longer, and is ahead after about 480 steps"),
        ("all together", "s04 is 3.60 ± 0.00 x s01"),
    ]


def test_each_row_that_cannot_be_told_has_its_own_remedy():
    """With a noise of 2 %, b needs a ± of 0.02, 2.3 times as many turns. c needs one of 0.005, 35 times as many."""
    runs = [run("a", [1.0] * 20), run("a again", [1.02] * 20)]
    runs += [run("b", [1 / 1.04] * 12 + [1 / 1.07] * 8), run("c", [1 / 1.0251] * 12 + [1 / 1.0551] * 8)]
    rows = [row("a"), row("a again", control_of="a"), row("b", above="a"), row("c", above="a")]
    words = dict(verdict_lines(results_of(*runs, rows=rows)))["can't be told"]
    assert words == "b 1.04 ± 0.03: --steps 100 may tell; c 1.03 ± 0.03: a quieter machine may tell"


def test_in_rounds_more_rounds_may_tell():
    dts = {"a": [1.0, 1.0, 1.0], "a again": [1.0, 1.0, 1.0], "b": [0.9, 1.0, 1.1]}
    runs = [run(name, [dt], number) for name, each in dts.items() for number, dt in enumerate(each)]
    words = dict(verdict_lines(results_of(*runs, in_turn=False, rounds=3)))
    assert words == {"can't be told": "b 1.00 ± 0.11: --rounds 6 may tell"}


def test_a_row_that_failed_has_no_verdict():
    runs = [run("a", [1.0] * 3), run("a again", [1.0] * 3), run("b", [0.1] * 2, end=failure("CUDA out of memory"))]
    results = results_of(*runs, run("c", [0.1] * 3))
    assert verdict(results, "b") is verdict(results, "c") is None
    assert dict(verdict_lines(results)) == {"all together": "c is 10.00 ± 0.00 x a"}


def test_the_memory_variables_are_named_where_they_are_all_that_differs():
    runs = [run("plain", [1.0] * 3), run("s01", [0.5] * 3), run("s01 again", [0.5] * 3)]
    assert dict(verdict_lines(results_of(*runs)))["worth it"] == "memory variables 2.00"


def test_a_single_sample_hides_no_gain_of_another_row():
    runs = [run("a", [1.0] * 3), run("a again", [1.0] * 3), run("b", [0.5] * 3), run("c", [0.4])]
    words = dict(verdict_lines(results_of(*runs)))
    assert words["all together"] == "b is 2.00 ± 0.00 x a"
    assert words["can't be told"] == "c 1.25: more steps may tell"
