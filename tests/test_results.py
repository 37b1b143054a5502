"""From the lines of a record to runs, samples, ratios and verdicts."""

from harness import intervals, records, results
from harness.records import WARMUP
from harness.results import PEAK, Results

import json
import math
import random
import statistics

import pytest
from conftest import error_of
from fixtures.records import (
    GPT2,
    bench_line,
    failure,
    header,
    peak,
    probe_lines,
    results_of,
    results_of_text,
    run_lines,
    summary,
    text_of,
)

S01, S02, S03, S04, S05 = "s01_baseline", "s02_tf32", "s03_bf16", "s04_compile", "s05_flash"
S07, S08, S09, S10, S11, S12 = "s07_clip", "s08_cosine", "s09_decay", "s10_fused", "s11_accum", "s12_ddp"


def squares(n):
    """Return n steps: step i takes (i + 1)**2 seconds for 980 tokens, and less memory than the one before."""
    return [{"dt": (i + 1.0) ** 2, "tokens": 980, "memory": 1000 - i} for i in range(n)]


# the format


def documented_lines():
    """Return the lines that the docstring of records.py shows as examples."""
    text = " ".join(line.strip() for line in records.__doc__.splitlines() if line.startswith("    "))
    text = text.replace(", ...]", "]").replace("{...}", "{}").replace(", ...}", "}")
    lines = []
    while text:
        line, length = json.JSONDecoder().raw_decode(text)
        lines.append(line)
        text = text[length:].strip()
    return lines


def test_the_documented_lines_make_a_bench():
    head, step, last, bench, peak_step, all_reduce = documented_lines()
    place = {"session": 0, "name": S01}
    read = results_of_text(text_of([bench, head | place, step | place, last | place, peak_step, all_reduce]))
    assert list(read.rows) == [S01]
    assert read.runs[0, S01].summary["sdpa"] == "flash"
    assert read.runs[0, PEAK].steps == [peak_step]
    assert read.runs[0, "all-reduce of 2 ranks"].steps == [all_reduce]


def test_the_records_of_these_tests_have_the_documented_keys():
    head, _, _, bench, _, _ = documented_lines()
    assert header(S01).keys() == head.keys()
    assert header(S01)["settings"].keys() == head["settings"].keys()
    assert header(S01)["environment"].keys() == head["environment"].keys()
    assert bench_line([]).keys() == bench.keys()


def test_a_last_line_that_a_kill_cut_off_is_left_out():
    text = text_of([bench_line([]), *run_lines(S01, [1.0, 1.0], end=None)])
    assert len(results_of_text(text).counted_steps(S01)) == 2
    assert len(results_of_text(text[:-1]).counted_steps(S01)) == 1
    assert len(results_of_text(text[:-20]).counted_steps(S01)) == 1


def assert_refused(path, text, message, capsys):
    """See that a record exits with one line and status 2."""
    path.write_text(text)
    line = error_of(capsys, Results, path)
    assert line.startswith(f"error: {path}")
    assert message in line


def test_a_line_that_is_no_json_is_refused_by_its_number(tmp_path, capsys):
    text = text_of([bench_line([]), *run_lines(S01, [1.0])]).replace('"dt": 1.0', '"dt": ')
    assert_refused(tmp_path / "x.jsonl", text, f"line {WARMUP + 3}: ", capsys)


@pytest.mark.parametrize("text", ["", text_of([header(S01)])], ids=["an empty file", "the record of one stage"])
def test_what_is_no_record_of_a_bench_is_refused(text, tmp_path, capsys):
    assert_refused(tmp_path / "x.jsonl", text, "is no record of a bench", capsys)


def test_a_step_that_is_missing_or_there_twice_is_refused(tmp_path, capsys):
    bench, lines = bench_line([]), run_lines(S01, [1.0, 1.0])
    fourth = lines[4]
    missing, twice = lines.copy(), lines.copy()
    missing.remove(fourth)
    twice.insert(4, fourth)
    path = tmp_path / "x.jsonl"
    assert_refused(path, text_of([bench, *missing]), "s01_baseline has step 4 where step 3 is due", capsys)
    assert_refused(path, text_of([bench, *twice]), "s01_baseline has step 3 where step 4 is due", capsys)


# runs


def test_a_header_starts_its_run_afresh():
    interrupted = run_lines(S01, [1.0, 1.0], end=failure("interrupted"))
    run = results_of(interrupted, run_lines(S01, [3.0])).runs[0, S01]
    assert [step["dt"] for step in run.steps[WARMUP:]] == [3.0]
    assert run.error is None


def test_the_first_step_starts_a_run_of_the_probe_afresh():
    """The probe writes no header."""
    interrupted = probe_lines([peak(float32=1e12)] * 2) + [failure("boom") | {"session": 0, "name": PEAK}]
    run = results_of(interrupted, probe_lines([peak(float32=2e12)] * 2)).runs[0, PEAK]
    assert [step["peak"]["float32"] for step in run.steps] == [2e12] * (WARMUP + 2)
    assert run.error is None


def test_a_rows_facts_have_the_attention_kernel_of_whichever_run_ended():
    read = results_of(run_lines(S01, [1.0], end=None), run_lines(S01, [1.0], session=1, end=summary(sdpa="cudnn")))
    assert read.run_facts(S01)["sdpa"] == "cudnn"
    assert read.run_facts(S02) is None


# the figures of a run


def test_a_runs_figures_are_those_of_its_steps_after_the_warm_up():
    """The counted steps take 25, 36, 49, 64 and 81 s."""
    assert results.summarize(squares(9)) == {
        "dt_ms": 49_000,
        "dt_q1_ms": 36_000,
        "dt_q3_ms": 64_000,
        "tok_per_sec": 20,
        "memory": 996,
        "counted": 5,
        "warmup_s": 1 + 4 + 9 + 16,
    }


def test_quartiles_lie_between_two_steps_where_none_is_at_a_quarter():
    """Of 25, 36, 49 and 64 s, as numpy and R by default: 25 + 3/4 * 11, and 49 + 1/4 * 15."""
    figures = results.summarize(squares(8))
    assert (figures["dt_q1_ms"], figures["dt_ms"], figures["dt_q3_ms"]) == (33_250, 42_500, 52_750)


def test_a_run_without_counted_steps_shows_its_last_one():
    figures = results.summarize(squares(3))
    assert figures["counted"] == 0
    assert figures["dt_ms"] == figures["dt_q1_ms"] == figures["dt_q3_ms"] == 9000
    assert figures["warmup_s"] == 14


def test_memory_that_nothing_could_measure_is_0():
    assert results.summarize([step | {"memory": None} for step in squares(6)])["memory"] == 0


def test_a_rows_figures_are_those_of_all_its_runs():
    figures = results_of(
        run_lines(S01, [4.0, 1.0], memory=1, end=summary(reserved=3_000), warmup_dt=3.0),
        run_lines(S01, [9.0], memory=2, session=1, end=summary(reserved=5_000)),
        run_lines(S01, [16.0, 25.0], memory=1, session=2, end=None),
    ).summary(S01)
    assert figures["dt_ms"] == 9000
    assert figures["counted"] == 5
    assert figures["memory"] == 2_000_000_000
    assert figures["reserved"] == 5_000
    assert figures["warmup_s"] == 3 * WARMUP  # of the first run, which may compile


# medians, means, and their intervals


def share_missed(n, k):
    """Return how often the median of a distribution is outside of the k-th smallest and k-th largest of n samples.

    That is when fewer than k of n tosses of a coin are heads, or fewer than k are tails.
    """
    return 2 * sum(math.comb(n, heads) for heads in range(k)) / 2**n


def test_the_interval_of_a_median_is_the_narrowest_that_holds_it_in_95_percent():
    for n in range(6, 161):
        k = intervals.order_statistic(n)
        assert share_missed(n, k) <= 0.05 < share_missed(n, k + 1)


@pytest.mark.parametrize("n, k", [(2, 1), (5, 1), (6, 1), (9, 2), (20, 6), (71, 27)])
def test_the_spread_of_a_median_is_the_wider_half_of_its_interval(n, k):
    """k by the tables of the sign test (Conover, Practical Nonparametric Statistics); below 6 the whole range."""
    samples = [float(i**2) for i in range(n)]
    random.Random(n).shuffle(samples)
    median, spread = intervals.median_and_spread(samples)
    assert median == statistics.median(samples)
    assert spread == (n - k) ** 2 - median  # squares are wider apart above the median
    assert intervals.median_and_spread([-x for x in samples]) == (-median, spread)


def test_the_spread_of_a_mean_is_by_students_t():
    """By hand: the deviations are -2, -1, 0 and 3, and Student's t of 3 degrees of freedom is 3.18."""
    mean, spread = intervals.mean_and_spread([1.0, 2.0, 3.0, 6.0])
    assert (mean, spread) == (3, pytest.approx(3.18 * math.sqrt(14 / 3) / 2))


def test_a_single_sample_has_no_interval():
    assert intervals.median_and_spread([3.0]) == (3.0, None)
    assert intervals.mean_and_spread([3.0]) == (3.0, None)


# ratios


def test_a_ratio_is_the_median_of_the_ratios_within_the_turns():
    """The ratios are 4, 1 and 1.5. Their mean is 2.2, and the median times of both rows are equal."""
    read = results_of(run_lines("a", [1.0, 4.0, 9.0]), run_lines("b", [0.25, 4.0, 6.0]))
    assert read.compare("b", "a") == pytest.approx((1.5, 2.5))
    assert read.compare("a", "b")[0] == pytest.approx(1 / 1.5)


def test_a_turn_that_one_row_did_not_take_is_left_out():
    read = results_of(run_lines("a", [1.0, 1.0, 9.0]), run_lines("b", [0.5, 0.25]))
    assert read.compare("b", "a")[0] == 3


def test_rows_are_compared_within_the_sessions_that_they_share():
    a = [run_lines("a", [dt], session) for session, dt in ((0, 1.0), (1, 4.0))]
    b = [run_lines("b", [dt], session) for session, dt in ((1, 1.0), (2, 8.0))]
    assert results_of(*a, *b).compare("b", "a")[0] == 4
    assert results_of(a[0], b[0]).compare("b", "a") is None


def test_a_round_of_fresh_processes_gives_a_ratio_by_their_medians():
    """The medians are 1, 2 and 1 s, and 0.5, 1 and 0.25 s."""
    a = [run_lines("a", dts, i) for i, dts in enumerate([[1.0, 1.0, 1.5], [2.0, 2.0, 9.0], [1.0]])]
    b = [run_lines("b", dts, i) for i, dts in enumerate([[0.5], [1.0], [0.25, 0.25, 9.0]])]
    assert results_of(*a, *b, pair_by="session").compare("b", "a") == (2, 2)


def test_speed_is_in_tokens_and_not_in_steps():
    read = results_of(run_lines("a", [1.0], tokens=1000), run_lines("b", [1.5], tokens=3000))
    assert read.compare("b", "a")[0] == 2


def test_held_out_losses_are_compared_within_seeds():
    """By hand: the differences are -0.11, -0.10 and -0.09, their interval 4.30 * 0.01 / sqrt(3) = 0.0248."""
    runs = []
    for name, losses in {"a": (6.0, 6.3, 6.6, 9.9), "b": (5.89, 6.2, 6.51)}.items():
        for seed, loss in enumerate(losses):
            runs.append(run_lines(name, None, session=seed, end=summary(eval=loss)))
    value, spread = results_of(*runs, mode="loss", pair_by="seed").compare("b", "a")
    assert value == pytest.approx(-0.1)
    assert spread == pytest.approx(0.0248, abs=1e-4)


def test_share_of_the_peak_is_that_of_one_rank_by_the_highest_rate():
    """The model takes 6 (12 * 6 * 384**2 + 50257 * 384) + 12 * 6 * 384 * 256 = 186,571,008 FLOP for a token.

    1000 tokens take 1 s, while the peak is 4 TFLOP/s. In the third turn both are slower by four.
    """
    rates = [peak(float32=1e11, bfloat16=rate) for rate in (4e12, 4e12, 1e12)]
    rows = [run_lines("one", [1.0, 1.0, 4.0]), run_lines("two", [1.0, 1.0, 4.0], world_size=2)]
    rows.append(run_lines("no GPT", [1.0] * 3, shape=None))
    read = results_of(*rows, probe_lines(rates))
    assert read.peak_share("one") == pytest.approx(186_571_008 * 1000 / 4e12)
    assert read.peak_share("two") == pytest.approx(186_571_008 * 1000 / 4e12 / 2)
    assert read.peak_share("no GPT") is None
    assert results_of(*rows).peak_share("one") is None  # nothing was probed


# controls, noise and verdicts


@pytest.mark.parametrize("ratio, worst", [(1.0, 0), (1.5, 0.5), (0.5, 1), (0.8, 0.25), (1.25, 0.25)])
def test_a_control_and_its_inverse_are_as_noisy(ratio, worst):
    read = results_of(run_lines("a", [1.0] * 6), run_lines("a again", [1 / ratio] * 6))
    assert read.noise == pytest.approx(worst)


def test_noise_is_what_lasts_for_a_whole_process_and_not_the_scatter_between_turns():
    read = results_of(run_lines("a", [1.0] * 2), run_lines("a again", [1 / 0.99, 1 / 1.01]))
    assert read.noise == pytest.approx(0, abs=1e-9)


def test_the_noise_is_the_worst_of_all_pairs_of_one_computation():
    """Without TF32 units s02 is s01, and s08 takes the steps of s07: none of them can be called faster."""
    read = results_of(
        run_lines(S01, [1.0] * 6),
        run_lines(S02, [0.8] * 6),
        run_lines(S07, [0.5] * 6),
        run_lines(f"{S07} again", [0.49] * 6),
        run_lines(S08, [0.45] * 6),
    )
    assert set(read.controls) == {(f"{S07} again", S07), (S02, S01), (S08, S07)}
    assert read.noise == pytest.approx(0.25)
    assert [read.verdict(name) for name in (S02, S07, S08)] == ["no difference", "faster", "no difference"]


def test_the_noise_of_a_single_round_is_the_t_interval_of_a_ratio():
    """By hand: deviations of 0.4 % twice and of 0 twice, in 3 degrees of freedom: 0.3266 %; of a ratio sqrt(2) times
    that, 0.4619 %; Student's t is 3.18."""
    times = {S07: 1.000, f"{S07} again": 1.004, S08: 0.996, S09: 1.000}
    runs = [run_lines(name, [dt] * 3) for name, dt in times.items()]
    assert results_of(*runs, pair_by="session").noise == pytest.approx(3.18 * 0.004619, rel=1e-3)
    assert results_of(*runs, pair_by="session", rounds=2).noise == pytest.approx(1.004 / 1.000 - 1, rel=1e-2)


def test_the_noise_of_a_single_round_has_each_computation_by_its_own_mean():
    """By hand: s01 and s02 are 1 % from their mean of 1, s07 and its control from theirs of 10: 2e-4 and 2e-4 in 2
    degrees of freedom, t 4.30."""
    times = {S01: 0.99, S02: 1.01, S07: 9.9, f"{S07} again": 10.1}
    runs = [run_lines(name, [dt]) for name, dt in times.items()]
    noise = results_of(*runs, pair_by="session").noise
    assert noise == pytest.approx(4.30 * math.sqrt(2 * 4e-4 / 2), rel=1e-3)


def test_a_stage_that_does_nothing_here_is_a_control_of_the_stage_before():
    missing = {"compile": "left out, no C++ compiler found"}
    about = {"compile": False, "fallbacks": missing, "amp_dtype": "float32", "accum": 1}
    runs = [run_lines(name, [1.0] * 6, **about) for name in (S01, S02, S03, S04, S05, S10, S11, S12)]
    assert set(results_of(*runs).controls) == {(S02, S01), (S03, S02), (S04, S03), (S11, S10)}


def test_a_stage_is_no_control_where_the_row_above_is_not_the_stage_before():
    assert results_of(run_lines(S01, [1.0]), run_lines(S08, [1.0])).controls == {}
    assert results_of(run_lines("mine", [1.0]), run_lines(S02, [1.0])).controls == {}


def test_a_run_that_failed_is_no_control():
    failed = run_lines("a again", [1.0], end=failure("boom"))
    assert results_of(run_lines("a", [1.0]), failed).controls == {}


def test_a_stage_that_does_nothing_is_a_control_in_the_ladder_only():
    assert results_of(run_lines(S07, [1.0]), run_lines(S08, [1.0]), mode="limit").controls == {}


@pytest.mark.parametrize(
    "dts, verdict",
    [
        pytest.param([0.9, 0.9], "faster", id="beyond the noise of 5 %"),
        pytest.param([1.1, 1.1], "slower", id="the other way"),
        pytest.param([0.96, 0.96], "no difference", id="within the noise"),
        pytest.param([1.04, 1.04], "no difference", id="within the noise, the other way"),
        pytest.param([0.5, 1.1], "no difference", id="within the interval of 1.45 ± 0.55"),
    ],
)
def test_a_difference_counts_beyond_its_interval_and_beyond_the_noise(dts, verdict):
    control = run_lines("a again", [1.05, 1.05])
    assert results_of(run_lines("a", [1.0, 1.0]), control, run_lines("b", dts)).verdict("b") == verdict


@pytest.mark.parametrize("ratio, verdict", [(1.30, "faster"), (1 / 1.30, "slower"), (1 / 1.24, "no difference")])
def test_at_a_large_noise_a_ratio_and_its_inverse_have_the_same_right(ratio, verdict):
    """The noise is 25 %. The inverse of 1.30 is 0.77, less than 25 % below 1, and a difference all the same."""
    runs = [run_lines("a", [1.0] * 2), run_lines("a again", [0.8] * 2), run_lines("b", [1 / ratio] * 2)]
    assert results_of(*runs).verdict("b") == verdict


def test_without_a_control_no_difference_is_called_one():
    read = results_of(run_lines("a", [1.0, 1.0]), run_lines("b", [0.5, 0.5]))
    assert read.noise is None
    assert read.verdict("b") == ""


@pytest.mark.parametrize("mode, verdict", [("ladder", "slower"), ("amp", "faster"), ("scale", "faster")])
def test_the_ladder_compares_with_the_row_above_and_the_other_modes_with_the_first(mode, verdict):
    runs = [run_lines(name, [dt] * 2) for name, dt in (("a", 1.0), ("a again", 1.0), ("b", 0.25), ("c", 0.5))]
    read = results_of(*runs, mode=mode)
    assert read.verdict("c") == verdict
    assert read.verdict("a") == ""


# predictions


def ladder_of_gpt2(*stages, copy=1e10, dt=1.0, rates=None, **settings):
    """Return a bench of stages of gpt2 at B 1, T 1024, in float32 without TF32, each of whose steps takes dt seconds.

    The weights are 12 * 12 * 768**2 + (50257 + 1024) * 768 = 124,318,464, and 123,532,032 of them in matmuls. The
    scores are 12 * 12 * 1024**2 = 150,994,944 numbers. By default the machine does 1 TFLOP/s, and copies 10 GB/s.
    """
    about = {"shape": GPT2, "batch_size": 1, "seq_len": 1024, "amp_dtype": "float32"} | settings
    runs = [run_lines(stage, [dt] * 2, tokens=1024, **about) for stage in stages]
    probed = peak(copy=copy, **(rates or {"float32": 1e12}))
    return results_of(*runs, probe_lines([probed] * 2))


@pytest.mark.parametrize("dt", [1.0, 3.0])
def test_a_prediction_takes_the_saving_from_the_measured_step_of_the_row_above(dt):
    saved = 13 * 4 * 124_318_464 / 1e10  # AdamW moves 20 numbers for each weight, or 7 in one kernel
    predicted = ladder_of_gpt2(S09, S10, dt=dt).predicted(S10)
    assert predicted == pytest.approx(dt / (dt - saved))


def test_a_prediction_of_several_micro_batches_is_by_the_micro_batch():
    """A step is a second for 1024 tokens, so that a step of two micro-batches is one for each."""
    about = {"shape": GPT2, "batch_size": 1, "seq_len": 1024, "amp_dtype": "float32", "accum": 2}
    runs = [run_lines(S10, [1.0] * 2, tokens=1024, **about)]
    runs += [run_lines(stage, [2.0] * 2, tokens=2048, **about) for stage in (S11, S12)]
    read = results_of(*runs, probe_lines([peak(float32=1e12)] * 2))
    one_number = 4 * 124_318_464 / 1e10
    # an update of 7 + 3 numbers for each micro-batch, or half of it and half of the 3 that adding gradients takes
    assert read.predicted(S11) == pytest.approx(1 / (1 - 3.5 * one_number))
    assert read.predicted(S12) == pytest.approx(1 / (1 + 2 * one_number))  # half of DDP's 4


def test_a_row_may_stand_several_stages_below_the_row_above():
    cost = 3 * 4 * 124_318_464 / 1e10
    assert ladder_of_gpt2("s06_vocab", S09).predicted(S09) == pytest.approx(1 / (1 + cost))


@pytest.mark.parametrize("rows", [(S05, "s06_vocab"), (S05, S07), ("mine", S02), (S01, "mine")], ids=str)
def test_what_flops_and_bytes_do_not_tell_is_not_predicted(rows):
    assert ladder_of_gpt2(*rows).predicted(rows[-1]) is None


def test_nothing_is_predicted_without_what_it_takes():
    assert ladder_of_gpt2(S09, S10).predicted(S09) is None  # the first row
    assert ladder_of_gpt2(S09, S10, copy=1e9).predicted(S10) is None  # more would be saved than there is
    assert ladder_of_gpt2(S02, S03, amp_dtype="float16").predicted(S03) is None  # no rate of float16
    assert results_of(run_lines(S09, [1.0]), run_lines(S10, [1.0])).predicted(S10) is None  # no probe
    assert results_of(run_lines(S09, [1.0]), run_lines(S10, None)).predicted(S10) is None  # no step


def test_ranks_should_divide_the_step_of_one_and_wait_for_the_all_reduce():
    rows = {1: ("1 rank", 1.0), 2: ("2 ranks", 0.7), 4: ("4 ranks", 0.5)}
    runs = [run_lines(name, [dt] * 3, world_size=size, accum=4) for size, (name, dt) in rows.items()]
    for size, dts in ((2, (0.125, 0.1, 0.9)), (4, (0.15, 0.1, 0.9))):  # medians 0.125 and 0.15
        runs.append(probe_lines([{"dt": dt, "bytes": 65_000_000} for dt in dts], f"all-reduce of {size} ranks"))
    read = results_of(*runs, mode="scale", rows=[name for name, _ in rows.values()])
    assert read.predicted("1 rank") is None
    assert read.predicted("2 ranks") == pytest.approx(1 / (0.5 + 0.125))
    assert read.predicted("4 ranks") == pytest.approx((0.5 + 0.125) / (0.25 + 0.15))


def test_rates_are_medians_over_the_counted_steps():
    probed = probe_lines([peak(float32=rate, copy=rate / 10) for rate in (1e12, 2e12, 9e12)])
    rates = results_of(run_lines(S01, [1.0] * 3), probed).rates
    assert rates.matmul == {"float32": 2e12}
    assert rates.copy == 2e11


# what a row lacks, and its losses


def test_a_row_is_stale_once_the_code_of_its_stage_has_changed():
    rows = {"plain": S01, S01: S01, S02: S02, "mine": "mine"}
    runs = [run_lines(name, [1.0], stage=stage, code="1" * 64) for name, stage in rows.items()]
    runs.append(run_lines(S03, [1.0]))
    read = results_of(*runs)
    stale = [name for name in read.rows if read.is_stale(name)]
    assert stale == ["plain", S01, S02]  # nobody can tell of a script of one's own


def test_an_error_counts_until_the_row_has_run_again():
    failed = run_lines(S01, [1.0], end=failure("boom"))
    again = run_lines(S01, [1.0], session=1)
    assert results_of(failed).error(S01) == "boom"
    assert not results_of(failed).is_finished(S01)
    assert results_of(failed, again).error(S01) is None
    assert results_of(failed, again).is_finished(S01)


def test_losses_are_shown_at_the_last_step_that_all_rows_took():
    short = run_lines(S02, [1.0] * 3, end=failure("boom"))
    read = results_of(run_lines(S01, [1.0] * 5), short, run_lines(S03, None, end=failure("boom")))
    assert read.last_common_step() == WARMUP + 2
    assert read.loss_at(S01, 6) == 5 - 0.6
    assert read.loss_at(S02, 7) is None
    assert read.loss_at(S03, 6) is None
