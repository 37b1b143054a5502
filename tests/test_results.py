"""From the lines of a record to runs, samples, ratios and verdicts."""

from harness import results
from harness.results import CONTROL, PEAK, WARMUP, ResultsError

import json
import math
import random
import statistics

import pytest
from fixtures.records import (
    CPU,
    GPT2,
    bench_line,
    failure,
    header,
    in_bench,
    peak_step,
    probe_lines,
    results_of,
    results_of_text,
    run_lines,
    summary,
    text_of_lines,
    text_of_record,
)

S01, S02, S03 = "s01_baseline", "s02_tf32", "s03_bf16"
S04, S07, S08 = "s04_compile", "s07_clip", "s08_cosine"
CARD = {"sm_clock": 1980.0, "power": 310.5, "temperature": 45.0, "power_limit": None}


def squares(n):
    """The steps of a run: step i takes (i + 1) ** 2 seconds for 980 tokens, and reaches a loss of 9 - i."""
    steps = []
    for i in range(n):
        step = {"kind": "step", "step": i, "dt": (i + 1.0) ** 2, "loss": 9.0 - i, "tokens": 980}
        steps.append(step | {"memory": 1000 - i, "meter": "peak RSS"})
    return steps


# the format


def documented_lines():
    """The objects of JSON that the docstring of results.py shows as examples, in its order."""
    text = " ".join(line.strip() for line in results.__doc__.splitlines() if line.startswith("    "))
    lines = []
    while text:
        line, length = json.JSONDecoder().raw_decode(text)
        lines.append(line)
        text = text[length:].strip()
    return lines


def test_the_docstring_shows_a_line_of_each_kind_that_can_be_read(tmp_path):
    path = tmp_path / "record.jsonl"
    lines = documented_lines()
    path.write_text(text_of_lines(lines))
    assert results.read(path) == lines
    kinds = [line["kind"] for line in lines]
    assert kinds == ["header", "step", "summary", "error", "bench", "step", "step"]


def test_the_documented_lines_make_a_bench():
    head, step, last, _, bench, peak, all_reduce = documented_lines()
    run = in_bench([head, step, last], S02, session=0)
    read = results_of_text(text_of_lines([bench, *run, peak, all_reduce]))
    assert read.rows == [S01, S02]
    assert read.runs[0, S02].summary["sdpa"] == "flash"
    assert read.runs[0, PEAK].steps == [peak]
    assert read.runs[0, "all-reduce 2 ranks"].steps == [all_reduce]


def test_a_last_line_that_was_cut_off_is_left_out():
    text = text_of_record(run_lines(S01, [1.0, 1.0], end=None))
    assert len(results_of_text(text).counted_steps(S01)) == 2
    assert len(results_of_text(text[:-1]).counted_steps(S01)) == 1
    assert len(results_of_text(text[:-20]).counted_steps(S01)) == 1


@pytest.mark.parametrize("text", ["", "\n", "rubbish\n", "[]\n", "{}\n", '{"kind": "bench"}\n', "\x00\xff\n"])
def test_what_is_no_record_of_a_bench_is_refused(text):
    with pytest.raises(ResultsError, match="x.jsonl.*(NAME|remove it)"):
        results_of_text(text)


def test_a_record_of_one_stage_is_no_record_of_a_bench():
    with pytest.raises(ResultsError, match="is no record of a bench"):
        results_of_text(text_of_lines([header(S01)]))


def test_two_benches_in_one_file_are_refused():
    text = text_of_record(run_lines(S01, [1.0]))
    with pytest.raises(ResultsError, match="a second bench begins"):
        results_of_text(text + text)


@pytest.mark.parametrize(
    "number",
    [
        "0",
        "-1",
        "true",
        "null",
        '"1"',
        "[]",
        "{}",
        "NaN",
        "Infinity",
        "1e400",
        "1e-320",
        pytest.param("9" * 400, id="400 digits"),
        pytest.param("9" * 5000, id="5000 digits"),
        pytest.param("[" * 300_000 + "]" * 300_000, id="nested 300,000 times"),
    ],
)
def test_a_time_that_is_no_positive_number_is_refused_by_its_line(number):
    text = text_of_record(run_lines(S01, [0.5])).replace('"dt": 0.5', f'"dt": {number}')
    with pytest.raises(ResultsError, match=f"line {WARMUP + 3} is damaged"):
        results_of_text(text)


@pytest.mark.parametrize(
    "key, value",
    [
        ("warmup", -1),
        ("warmup", 0),
        ("warmup", 9),
        ("steps", 0),
        ("steps", WARMUP),
        ("rounds", 0),
        ("corpus_tokens", 0),
        ("corpus_tokens", "x"),
        ("sources", []),
        ("command", "python bench.py --data 'no end"),
        ("mode", "x"),
        ("environment", {}),
        ("change", {}),
        ("change", []),
        ("change", {"s01|s02": "a bar"}),
        ("change", {"s01\n": "two lines"}),
        ("change", {"peak": "a row with the probe's name"}),
        ("change", {"s01": None}),
        ("rates", 6e-4),
        ("rates", ["6e-4"]),
        ("rates", [0]),
        ("rates", [3e-4, 6e-4]),  # where no row has a rate
    ],
)
def test_a_bench_that_could_not_have_run_is_refused(key, value):
    line = bench_line([run_lines(S01, [1.0])]) | {key: value}
    with pytest.raises(ResultsError, match="line 1 is damaged"):
        results_of_text(text_of_lines([line]))


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([{"kind": "other"}], id="another kind"),
        pytest.param([{"kind": "header"}], id="a header without a stage"),
        pytest.param([header("../bench")], id="a stage in another folder"),
        pytest.param([header(S01, batch_size=0)], id="an empty batch"),
        pytest.param([header(S01, shape=GPT2 | {"n_layer": -1})], id="a model of less than a layer"),
        pytest.param([header(S01, fallbacks={"compile": None})], id="a fallback without a reason"),
        pytest.param([summary(eval=None)], id="an evaluation without a loss"),
        pytest.param([summary(eval=-1)], id="an evaluation with a negative loss"),
        pytest.param([summary(curve=5.0)], id="a curve of one number"),
        pytest.param([summary(curve=[5.0, None])], id="a curve with a gap"),
        pytest.param([summary(curve=[5.0, -1])], id="a curve with a negative loss"),
        pytest.param([header(S01, lr=0)], id="a learning rate of 0"),
        pytest.param([header(S01, lr="fast")], id="a learning rate that is no number"),
        pytest.param([summary(reserved="x")], id="reserved memory that is no number"),
        pytest.param([summary(card={"start": CARD})], id="a card without its end"),
        pytest.param([summary(card={"start": CARD, "end": CARD | {"power": "x"}})], id="a power that is no number"),
        pytest.param([summary(compile_cache="x")], id="a cache that neither hit nor missed"),
        pytest.param([failure("boom", reason="another")], id="a reason that is none of ours"),
        pytest.param([{"kind": "step", "step": 0, "dt": 0.1, "bytes": 0}], id="an all-reduce of no bytes"),
        pytest.param([{"kind": "step", "step": 0, "dt": 0, "bytes": 8}], id="an all-reduce in no time"),
        pytest.param([{"kind": "step", "step": 0, "size": 8, "peak": {}}], id="a peak without a dtype"),
        pytest.param([{"kind": "step", "step": 0, "size": 8, "peak": {"x": 0}}], id="a peak of 0"),
        pytest.param([{"kind": "step", "step": 0, "size": 8, "peak": {"a|b": 1}}], id="a dtype with a bar"),
        pytest.param([{"kind": "step", "step": 0} | peak_step(x=1, copy=-1)], id="a negative copy"),
        pytest.param([{"kind": "step", "step": 0} | peak_step(x=1, clear={"4 kB": 1})], id="a rate of pages missing"),
        pytest.param([{"kind": "step", "step": 0} | peak_step(x=1, clear={"4 kB": 1, "2 MB": 0})], id="clears nothing"),
        pytest.param([squares(1)[0] | {"loss": -1}], id="a negative loss"),
        pytest.param([squares(1)[0] | {"memory": -1}], id="negative memory"),
    ],
)
def test_a_line_that_could_not_be_drawn_is_refused_by_its_number(lines):
    text = text_of_lines([bench_line([], rows=[S01]), *in_bench(lines, S01, 0)])
    with pytest.raises(ResultsError, match="line 2 is damaged"):
        results_of_text(text)


@pytest.mark.parametrize(
    "place",
    [{"session": -1}, {"session": "x"}, {"session": None}, {"name": ""}, {"name": "a|b"}, {"name": None}],
)
def test_a_line_without_its_session_and_row_is_refused(place):
    text = text_of_lines([bench_line([], rows=[S01]), header(S01) | {"session": 0, "name": S01} | place])
    with pytest.raises(ResultsError, match="a run is damaged"):
        results_of_text(text)


def test_a_row_with_the_steps_of_the_probe_is_refused():
    for name in (S01, "all-reduce 2 ranks"):
        with pytest.raises(ResultsError, match="another kind of run"):
            results_of(run_lines(S01, [1.0]), probe_lines([peak_step(float32=1e9)], name=name))


def test_the_probe_measures_the_same_rates_in_every_step():
    first = peak_step(float32=1e9)
    clear = {"4 kB": 1e9, "2 MB": 1e9}
    others = [peak_step(float32=1e9, bfloat16=1e9), peak_step(float32=1e9, copy=1e9)]
    others.append(peak_step(float32=1e9, clear=clear))
    for second in others:
        with pytest.raises(ResultsError, match="other rates"):
            results_of(run_lines(S01, [1.0]), probe_lines([first, second]))


@pytest.mark.parametrize("key", ["kind", "mode", "steps"])
def test_a_message_is_one_line_that_a_terminal_does_not_obey(key):
    text = text_of_lines([bench_line([], rows=[S01]) | {key: "\x1b[2J\n\ud800" * 99}])
    with pytest.raises(ResultsError) as raised:
        results_of_text(text)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 300


# runs


def test_a_run_holds_what_its_process_wrote():
    lines = run_lines(S01, [1.0], end=summary(eval=6.0))
    run = results.run_of(lines)
    assert run.header == lines[0]
    assert run.steps == lines[1:-1]
    assert run.summary == lines[-1]
    assert run.error is None
    assert run.ended


def test_a_run_has_ended_by_a_summary_or_an_error_only():
    assert not results.run_of(run_lines(S01, [1.0], end=None)).ended
    assert results.run_of(run_lines(S01, [1.0], end=failure("boom"))).ended


def test_a_header_starts_its_run_afresh():
    interrupted = run_lines(S01, [1.0, 1.0], end=failure("interrupted", "interrupted"))
    run = results.run_of(interrupted + run_lines(S01, [3.0]))
    assert len(run.steps) == WARMUP + 1
    assert run.steps[-1]["dt"] == 3.0
    assert run.error is None


def test_a_step_that_is_there_twice_or_missing_is_refused():
    lines = run_lines(S01, [1.0, 1.0])
    head, steps, last = lines[:1], lines[1:-1], lines[-1:]
    with pytest.raises(ResultsError, match=f"step 0 stands where step {WARMUP + 2} is due"):
        results_of(head + steps + steps + last)
    with pytest.raises(ResultsError, match="step 0 stands where step 1 is due"):
        results_of(head + steps[:1] + steps + last)
    with pytest.raises(ResultsError, match="step 2 stands where step 1 is due"):
        results_of(lines[:2] + lines[3:])


def test_steps_of_two_sessions_are_numbered_by_themselves():
    read = results_of(run_lines(S01, [1.0]), run_lines(S01, [2.0], session=1))
    assert [step["dt"] for step in read.counted_steps(S01)] == [1.0, 2.0]


# the figures of a run


def test_a_runs_figures_are_those_of_its_steps_after_the_warm_up():
    """The counted steps take 25, 36, 49, 64 and 81 s."""
    assert results.summarize(squares(9)) == {
        "dt_ms": 49_000,
        "dt_q1_ms": 36_000,
        "dt_q3_ms": 64_000,
        "tok_per_sec": 20,
        "memory": 996,
        "meter": "peak RSS",
        "loss": 1.0,
        "counted": 5,
        "warmup_s": 1 + 4 + 9 + 16,
    }


def test_quartiles_lie_between_two_steps_where_none_is_at_a_quarter():
    """Of 25, 36, 49 and 64 s, as numpy and R by default: 25 + 3/4 * 11, and 49 + 1/4 * 15."""
    figures = results.summarize(squares(8))
    assert figures["dt_q1_ms"] == 33_250
    assert figures["dt_ms"] == 42_500
    assert figures["dt_q3_ms"] == 52_750


def test_a_run_without_counted_steps_shows_its_last_one():
    figures = results.summarize(squares(3))
    assert figures["counted"] == 0
    assert figures["dt_ms"] == figures["dt_q1_ms"] == figures["dt_q3_ms"] == 9000
    assert figures["tok_per_sec"] == 980 / 9
    assert figures["loss"] == 7.0
    assert figures["warmup_s"] == 14


def test_memory_that_nothing_could_measure_is_none():
    steps = squares(6)
    for step in steps:
        step["memory"] = None
    assert results.summarize(steps)["memory"] is None


def test_a_rows_figures_are_those_of_all_its_sessions():
    read = results_of(
        run_lines(S01, [4.0, 1.0], memory=1, end=summary(reserved=3_000)),
        run_lines(S01, [9.0], memory=2, session=1, end=summary(reserved=5_000)),
        run_lines(S01, [16.0, 25.0], memory=1, session=2, end=summary(reserved=4_000)),
    )
    figures = read.summary(S01)
    assert figures["dt_ms"] == 9000
    assert figures["counted"] == 5
    assert figures["memory"] == 2_000_000_000
    assert figures["reserved"] == 5_000  # the most, as of the memory
    assert figures["warmup_s"] == 2 * WARMUP  # of the first session


def test_a_row_without_counted_steps_has_no_figures():
    read = results_of(run_lines(S01, [], end=failure("boom")), rows=[S01, S02])
    assert read.summary(S01) is None
    assert read.summary(S02) is None


# estimates


@pytest.mark.parametrize("n, k", [(2, 1), (5, 1), (6, 1), (8, 1), (9, 2), (20, 6), (30, 10), (71, 27)])
def test_interval_of_a_median_reaches_to_the_order_statistics_of_the_sign_test(n, k):
    """k by the tables of the sign test (Conover, Practical Nonparametric Statistics); below 6 it is 1."""
    samples = [float(i**2) for i in range(n)]
    random.Random(n).shuffle(samples)
    estimate = results.median_estimate(samples)
    median = statistics.median(samples)
    assert estimate.value == median
    assert estimate.spread == max((n - k) ** 2 - median, median - (k - 1) ** 2)


@pytest.mark.parametrize("n", [6, 9, 20])
def test_interval_of_a_median_covers_it_in_95_percent_of_cases(n):
    """Samples of an exponential distribution, whose median is log 2."""
    draws = random.Random(7)
    covered = 0
    for _ in range(1000):
        estimate = results.median_estimate([draws.expovariate(1) for _ in range(n)])
        covered += abs(estimate.value - math.log(2)) <= estimate.spread
    assert covered >= 940


def share_within(t, degrees):
    """The share of Student's t distribution between -t and t, its density summed by the midpoint rule."""
    scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    width = t / 2000
    share = 0.0
    for i in range(2000):
        x = (i + 0.5) * width
        share += 2 * width * scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    return share


@pytest.mark.parametrize("n", range(2, 32))
def test_interval_of_a_mean_is_that_of_students_t(n):
    """The t of n samples, to the two decimals of the table, holds 95 % of the density."""
    samples = [float(i**2) for i in range(n)]
    estimate = results.mean_estimate(samples)
    assert estimate.value == statistics.mean(samples)
    t = estimate.spread / statistics.stdev(samples) * math.sqrt(n)
    assert share_within(t - 0.0051, n - 1) < 0.95 < share_within(t + 0.0051, n - 1)


@pytest.mark.parametrize("n", [32, 50, 1000])
def test_interval_of_a_mean_of_many_samples_is_a_little_too_wide(n):
    samples = [float(i % 7) for i in range(n)]
    t = results.mean_estimate(samples).spread / statistics.stdev(samples) * math.sqrt(n)
    assert 1.96 < t <= 1.04 * 1.96 + 0.005


def test_a_single_sample_has_no_interval():
    assert results.median_estimate([3.0]) == results.Estimate(3.0, None)
    assert results.mean_estimate([3.0]) == results.Estimate(3.0, None)


def test_an_estimate_as_text():
    assert results.Estimate(1.8249, 0.0612).text() == "1.82 ± 0.06"
    assert results.Estimate(1.8249, 0.0612).text(digits=3) == "1.825 ± 0.061"
    assert results.Estimate(1.95, None).text() == "1.95"


# ratios


def test_a_ratio_is_the_median_of_the_ratios_within_the_rounds():
    """The ratios are 4, 1 and 1.5. Their mean is 2.2, and the median times of both rows are equal."""
    read = results_of(run_lines("a", [1.0, 4.0, 9.0]), run_lines("b", [0.25, 4.0, 6.0]))
    ratio = read.compare("b", "a")
    assert ratio.value == pytest.approx(1.5)
    assert ratio.spread == pytest.approx(4 - 1.5)
    assert read.compare("a", "b").value == pytest.approx(1 / 1.5)


def test_a_load_that_hits_a_whole_round_shows_in_no_ratio():
    read = results_of(run_lines("a", [1.0, 8.0, 1.0]), run_lines("b", [0.5, 4.0, 0.5]))
    assert read.compare("b", "a") == results.Estimate(2.0, 0.0)


def test_a_round_that_one_row_did_not_take_is_left_out():
    read = results_of(run_lines("a", [1.0, 1.0, 9.0]), run_lines("b", [0.5, 0.25]))
    assert read.compare("b", "a").value == 3


def test_rows_are_compared_within_the_sessions_that_they_share():
    read = results_of(
        run_lines("a", [1.0], session=0),
        run_lines("a", [4.0], session=1),
        run_lines("b", [1.0], session=1),
        run_lines("b", [8.0], session=2),
    )
    assert read.compare("b", "a").value == 4


def test_rows_without_a_common_session_are_not_compared():
    read = results_of(run_lines("a", [1.0], session=0), run_lines("b", [0.5], session=1))
    assert read.compare("b", "a") is None


def test_a_row_is_not_compared_with_itself():
    assert results_of(run_lines("a", [1.0])).compare("a", "a") is None


def test_a_round_of_fresh_processes_is_a_session_by_its_median():
    read = results_of(
        *[run_lines("a", dts, i) for i, dts in enumerate([[1.0, 1.0, 1.5], [2.0, 2.0, 9.0], [1.0]])],
        *[run_lines("b", dts, i) for i, dts in enumerate([[0.5], [1.0], [0.25, 0.25, 9.0]])],
        interleaved=False,
    )
    ratio = read.compare("b", "a")
    assert ratio.value == 2
    assert ratio.spread == 2  # of 2, 2 and 4


def test_speed_is_in_tokens_and_not_in_steps():
    read = results_of(run_lines("a", [1.0], tokens=1000), run_lines("b", [1.5], tokens=3000))
    assert read.compare("b", "a").value == 2


def test_held_out_losses_are_compared_within_seeds():
    """By hand: the differences are -0.11, -0.10 and -0.09, their interval 4.30 * 0.01 / sqrt(3) = 0.0248."""
    losses = {"a": (6.0, 6.3, 6.6), "b": (5.89, 6.2, 6.51)}
    runs = []
    for name in losses:
        for seed, loss in enumerate(losses[name]):
            runs.append(run_lines(name, [1.0], session=seed, end=summary(eval=loss)))
    without_loss = run_lines("a", [1.0], session=3)
    difference = results_of(*runs, without_loss, mode="loss", interleaved=False).compare("b", "a")
    assert difference.value == pytest.approx(-0.1)
    assert difference.spread == pytest.approx(0.0248, abs=1e-4)


def test_share_of_the_peak_is_the_median_of_the_shares_within_rounds():
    """Of the larger peak, in the third round; the medians of both are those of the second.

    mini at T 256 takes 6 (12 * 6 * 384**2 + 50257 * 384) + 12 * 6 * 384 * 256 = 186,571,008 FLOP per token.
    """
    peak = probe_lines([peak_step(float32=1e11, bfloat16=rate) for rate in (4e12, 4e12, 1e12)])
    one_rank = run_lines("one", [1.0, 4.0, 10.0])  # for 1000 tokens
    two_ranks = run_lines("two", [1.0, 4.0, 10.0], world_size=2)
    read = results_of(one_rank, two_ranks, peak)
    assert read.peak_share("one") == pytest.approx(186_571_008 * 100 / 1e12)
    assert read.peak_share("two") == pytest.approx(186_571_008 * 100 / 1e12 / 2)  # of one of its ranks


def test_share_of_the_peak_goes_by_the_shape_of_the_model():
    """gpt2 at T 1024 takes 6 (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024 = 854,438,400 FLOP."""
    run = run_lines("one", [1.0], shape=GPT2, seq_len=1024)
    read = results_of(run, probe_lines([peak_step(float32=1e12)]))
    assert read.peak_share("one") == pytest.approx(854_438_400 * 1000 / 1e12)


def test_a_row_has_no_share_of_a_peak_that_was_not_measured():
    assert results_of(run_lines("one", [1.0])).peak_share("one") is None


# noise and verdicts


@pytest.mark.parametrize("ratio, worst", [(1.0, 0), (1.5, 0.5), (0.5, 1), (0.7, 0.4286), (1 / 0.7, 0.4286)])
def test_a_ratio_and_its_inverse_are_as_far_from_1(ratio, worst):
    assert results.distance(ratio) == pytest.approx(worst, abs=1e-4)
    read = results_of(run_lines("a", [1.0] * 6), run_lines("a" + CONTROL, [1 / ratio] * 6))
    assert read.noise() == pytest.approx(worst, abs=1e-4)


def test_noise_is_what_lasts_for_a_whole_process_and_not_the_scatter_between_rounds():
    read = results_of(run_lines("a", [1.0] * 2), run_lines("a" + CONTROL, [1 / 0.99, 1 / 1.01]))
    assert read.noise() == pytest.approx(0, abs=1e-9)


def test_the_noise_is_the_worst_of_all_pairs_of_one_computation():
    """Without TF32 units s02 is s01, and s08 takes the steps of s07: none of them can be called faster."""
    read = results_of(
        run_lines(S01, [1.0] * 6),
        run_lines(S02, [0.8] * 6),
        run_lines(S07, [0.5] * 6),
        run_lines(S07 + CONTROL, [0.49] * 6),
        run_lines(S08, [0.45] * 6),
    )
    assert set(read.controls()) == {(S07 + CONTROL, S07), (S02, S01), (S08, S07)}
    assert read.noise() == pytest.approx(0.25)
    assert read.verdict(S02) == "no difference"
    assert read.verdict(S07) == "faster"
    assert read.verdict(S08) == "no difference"


def test_a_technique_that_the_machine_has_is_no_control():
    with_tf32 = CPU | {"tf32": True}
    runs = [run_lines(name, [1.0], environment=with_tf32) for name in (S01, S02)]
    assert results_of(*runs).controls() == {}


def test_s04_without_a_compiler_is_the_program_of_s03():
    missing = {"compile": "left out, no C++ compiler found"}
    read = results_of(
        run_lines(S03, [1.0] * 6, compile=False, fallbacks=missing),
        run_lines(S04, [0.5] * 6, compile=False, fallbacks=missing),
    )
    assert set(read.controls()) == {(S04, S03)}
    assert read.noise() == 1
    assert read.verdict(S04) == "no difference"


def test_s04_with_a_compiler_is_no_control():
    read = results_of(run_lines(S03, [1.0] * 6), run_lines(S04, [0.5] * 6))
    assert read.controls() == {}


def test_a_stage_is_no_control_where_the_row_above_is_not_the_stage_before():
    assert results_of(run_lines(S01, [1.0] * 6), run_lines(S08, [1.0] * 6)).controls() == {}


def test_two_processes_of_one_program_are_a_control_in_the_ladder_only():
    runs = [run_lines(S07, [1.0]), run_lines(S08, [1.0])]
    assert results_of(*runs, mode="ladder").controls() != {}
    assert results_of(*runs, mode="amp").controls() == {}


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
    control = run_lines("a" + CONTROL, [1.05, 1.05])
    assert results_of(run_lines("a", [1.0, 1.0]), control, run_lines("b", dts)).verdict("b") == verdict


def test_without_a_control_no_difference_is_called_one():
    read = results_of(run_lines("a", [1.0, 1.0]), run_lines("b", [0.5, 0.5]))
    assert read.noise() is None
    assert read.verdict("b") == ""


@pytest.mark.parametrize(
    "mode, verdict",
    [("ladder", "slower"), ("amp", "faster"), ("scale", "faster"), ("memory", "faster")],
)
def test_the_ladder_compares_with_the_row_above_and_the_other_modes_with_the_first(mode, verdict):
    runs = [run_lines("a", [1.0] * 2), run_lines("a" + CONTROL, [1.0] * 2)]
    runs += [run_lines("b", [0.25] * 2), run_lines("c", [0.5] * 2)]
    assert results_of(*runs, mode=mode).verdict("c") == verdict


@pytest.mark.parametrize(
    "losses, verdict",
    [
        ((6.0, 6.1, 6.2), "lower"),
        ((8.0, 8.1, 8.2), "higher"),
        ((6.5, 7.5, 7.1), "no difference"),
        ((6.0,), ""),
    ],
)
def test_a_loss_is_lower_or_higher_beyond_its_interval(losses, verdict):
    runs = [run_lines("a", [1.0], session=i, end=summary(eval=7 + i / 10)) for i in range(3)]
    runs += [run_lines("b", [1.0], session=i, end=summary(eval=loss)) for i, loss in enumerate(losses)]
    assert results_of(*runs, mode="loss", interleaved=False).verdict("b") == verdict


def test_a_loss_is_compared_with_that_of_the_row_above():
    runs = []
    for name, loss in (("a", 7), ("b", 5), ("c", 6)):
        runs += [run_lines(name, [1.0], session=i, end=summary(eval=loss + i / 10)) for i in range(3)]
    assert results_of(*runs, mode="loss", interleaved=False).verdict("c") == "higher"


def test_the_first_row_has_no_verdict():
    read = results_of(run_lines("a", [1.0]), run_lines("a" + CONTROL, [1.0]))
    assert read.verdict("a") == ""


# what a row lacks


@pytest.mark.parametrize(
    "reason, problem",
    [
        (results.CRASHED, "failed: boom"),
        (results.INTERRUPTED, "failed: boom"),
        (results.BAD_INPUT, "failed: boom"),
        (results.OUT_OF_MEMORY, "boom"),
        (results.NOT_FOR_THIS_DEVICE, "boom"),
    ],
)
def test_a_problem_is_the_error_of_the_last_run(reason, problem):
    failed = run_lines(S01, [1.0], session=1, end=failure("boom", reason))
    read = results_of(run_lines(S01, [1.0]), failed)
    assert read.problem(S01) == problem
    assert read.is_complete() == (reason == results.NOT_FOR_THIS_DEVICE)


def test_an_error_counts_until_the_row_has_run_again():
    read = results_of(run_lines(S01, [1.0], end=failure("boom")), run_lines(S01, [1.0], session=1))
    assert read.problem(S01) == ""
    assert read.is_complete()


def test_a_row_needs_all_its_counted_steps():
    read = results_of(run_lines(S01, [1.0, 1.0]), run_lines(S02, [1.0], end=None), rows=[S01, S02, S03])
    assert [read.problem(name) for name in (S01, S02, S03)] == ["", "not finished", "not run"]
    assert not read.is_complete()


def test_a_row_needs_the_steps_of_all_rounds():
    first, second = run_lines(S01, [1.0, 1.0]), run_lines(S01, [1.0, 1.0], session=1)
    assert not results_of(first, rounds=2, interleaved=False).is_complete()
    assert results_of(first, second, rounds=2, interleaved=False).is_complete()


def test_limit_is_complete_where_every_stage_has_a_batch_that_fits():
    fits = run_lines("s05_flash B1", [1.0], session=1)
    fails = run_lines("s06_vocab B1", [], end=failure("out of memory", "out-of-memory"))
    assert results_of(fits, mode="limit", rows=["s05_flash"]).is_complete()
    assert not results_of(fits, fails, mode="limit", rows=["s05_flash", "s06_vocab"]).is_complete()


def test_limit_tries_batches_of_each_stage():
    runs = [run_lines(name, []) for name in ("s05_flash B1", "s05_flash B16", "s06_vocab B2")]
    read = results_of(*runs, mode="limit", rows=["s05_flash", "s06_vocab"])
    assert read.batches("s05_flash") == {1: "s05_flash B1", 16: "s05_flash B16"}


# learning rates


@pytest.mark.parametrize(
    "rate, text",
    [(6e-4, "6e-4"), (1.2e-3, "1.2e-3"), (0.00015, "1.5e-4"), (0.5, "5e-1"), (1, "1e0"), (1 / 3, "3.333333e-1")],
)
def test_a_rate_is_written_in_one_way(rate, text):
    assert results.rate_text(rate) == text


def test_the_name_of_a_row_tells_its_stage_and_its_rate():
    assert results.name_at_rate("s06_vocab", 1.2e-3) == "s06_vocab lr 1.2e-3"
    assert results.stage_and_rate("s06_vocab lr 1.2e-3") == ("s06_vocab", "1.2e-3")
    assert results.stage_and_rate("s06_vocab") == ("s06_vocab", "")


def loss_run(name, session, held_out, curve=(5.0, 4.5)):
    """The lines of a run of the mode `loss`."""
    return run_lines(name, [], session=session, end=summary(eval=held_out, curve=list(curve)))


def results_at_rates(losses, rates=(3e-4, 6e-4), rounds=2, runs=()):
    """The Results of a bench of several rates. losses: {(stage, rate): held-out loss of each seed, in order}."""
    runs = list(runs)
    names = []
    for (stage, rate), held_out in losses.items():
        name = results.name_at_rate(stage, rate)
        names.append(name)
        for seed, loss in enumerate(held_out):
            runs.append(loss_run(name, seed, loss))
    return results_of(*runs, mode="loss", rates=list(rates), rounds=rounds, rows=names)


def test_a_stages_best_rate_has_the_lowest_mean_over_the_seeds():
    read = results_at_rates(
        {("a", 3e-4): [6.0, 5.0], ("a", 6e-4): [5.2, 5.6], ("b", 3e-4): [5.0, 5.1], ("b", 6e-4): []}
    )
    assert read.best_rate("a") == 6e-4
    assert read.best_rate("b") == 3e-4
    assert read.best_rows() == {"a": "a lr 6e-4", "b": "b lr 3e-4"}


def test_rates_are_compared_over_the_seeds_that_all_of_them_have():
    """At 6e-4 the first seed is worse, and the mean is lower for the second seed alone."""
    read = results_at_rates({("a", 3e-4): [5.5], ("a", 6e-4): [5.6, 4.0]})
    assert read.best_rate("a") == 3e-4


def test_a_rate_at_which_a_seed_diverged_is_not_the_best():
    diverged = run_lines("a lr 6e-4", [], session=1, end=failure("the loss is nan", "loss-not-finite"))
    read = results_at_rates({("a", 3e-4): [6.0, 6.0], ("a", 6e-4): [5.0]}, runs=[diverged])
    assert read.best_rate("a") == 3e-4


def test_a_stage_without_a_loss_has_no_best_rate():
    read = results_at_rates({("a", 3e-4): [], ("a", 6e-4): []})
    assert read.stages() == ["a"]
    assert read.best_rate("a") is None
    assert read.best_rows() == {}


def test_a_bench_of_one_rate_has_no_rates_to_compare():
    assert results_of(loss_run(S01, 0, 5.0), mode="loss", rates=[6e-4]).rates == []


def test_a_row_of_losses_is_complete_where_every_seed_has_one():
    read = results_at_rates({("a", 3e-4): [6.0, 6.0], ("a", 6e-4): [5.0]})
    assert read.problem("a lr 3e-4") == ""
    assert read.problem("a lr 6e-4") == "not finished"
    assert not read.is_complete()


def test_curves_of_different_lengths_are_refused():
    with pytest.raises(ResultsError, match="different numbers of points"):
        results_of(loss_run("a", 0, 5.0), loss_run("a", 1, 5.0, curve=[1.0]), mode="loss")


def test_a_point_of_a_curve_is_the_mean_over_a_twentieth_of_the_steps():
    """Step i of 40 has a loss of i: the points are steps 2 and 3, 4 and 5, ... 38 and 39."""
    curve = results.training_curve([float(i) for i in range(40)])
    assert curve[:2] == [2.5, 4.5]
    assert curve[-1] == 38.5
    assert len(curve) == 19


def test_a_short_run_has_a_point_for_each_step_but_the_first():
    assert results.training_curve([9.0, 8.0, 7.0]) == [8.0, 7.0]


def test_of_a_script_that_is_gone_nobody_can_tell_whether_it_is_stale():
    assert not results_of(run_lines("mine", [1.0], code="0" * 64)).is_stale("mine")
    assert results_of(run_lines(S01, [1.0], code="0" * 64)).is_stale(S01)


# age, steps and losses


def test_a_row_is_stale_once_the_code_of_its_stage_has_changed():
    read = results_of(run_lines(S01, [1.0]), run_lines(S02, [1.0], code="1" * 64), rows=[S01, S02, S03])
    assert [read.is_stale(name) for name in (S01, S02, S03)] == [False, True, False]


def test_a_row_of_limit_is_stale_too():
    runs = [run_lines(f"{S01} B1", []), run_lines(f"{S02} B1", []), run_lines(f"{S02} B2", [], code="1" * 64)]
    read = results_of(*runs, mode="limit", rows=[S01, S02, S03])
    assert [read.is_stale(name) for name in (S01, S02, S03)] == [False, True, False]


def test_losses_are_shown_at_the_last_step_that_all_rows_took():
    read = results_of(
        run_lines(S01, [1.0] * 5),
        run_lines(S02, [1.0] * 3, end=failure("boom")),
        run_lines(S03, [], end=failure("boom")),
    )
    assert read.last_common_step() == WARMUP + 2
    assert read.loss_at(S01, 6) == 5 - 0.6
    assert read.loss_at(S02, 7) is None
    assert read.loss_at(S03, 6) is None


def test_a_row_took_the_steps_of_its_longest_run():
    read = results_of(run_lines(S01, [1.0], end=failure("boom")), run_lines(S01, [1.0] * 3, session=1))
    assert read.last_common_step() == WARMUP + 2
    assert read.loss_at(S01, WARMUP + 2) == 5 - 0.6


def test_a_loss_that_is_not_finite_is_none():
    lines = run_lines(S01, [1.0], end=failure("the loss is nan", "loss-not-finite"))
    lines[-2]["loss"] = None
    assert results_of(lines).loss_at(S01, WARMUP) is None


def test_the_attention_kernel_is_that_of_any_run():
    read = results_of(run_lines(S01, [1.0]), run_lines(S01, [1.0], session=1, end=summary(sdpa="cudnn")))
    assert read.sdpa(S01) == "cudnn"
    assert read.sdpa(S02) is None


def test_the_cache_of_torch_compile_is_that_of_the_first_run_whose_warm_up_is_shown():
    first = run_lines(S04, [1.0], end=summary(compile_cache="miss"))
    second = run_lines(S04, [1.0], session=1, end=summary(compile_cache="hit"))
    assert results_of(first, second).compile_cache(S04) == "miss"
    assert results_of(first, second).effect(S04).note == "active: 8 s of warm-up"
    assert results_of(second).effect(S04).note == "active: 8 s of warm-up, found in the cache"
    assert results_of(run_lines(S04, [1.0], end=None)).compile_cache(S04) is None
    assert results_of(run_lines(S04, [1.0])).compile_cache(S04) is None  # in an older record
    assert results_of(first, rows=[S01, S04]).compile_cache(S01) is None


def test_below_plain_each_row_is_compared_with_it_and_with_s01():
    runs = [run_lines("plain", [4.0]), run_lines(S01, [2.0]), run_lines(S02, [1.0])]
    results = results_of(*runs)
    assert results.bases() == ["plain", S01]
    assert results.compare(S02, "plain").value == 4
    assert results.row_above(S01) == "plain"
    assert results_of(*runs[1:]).bases() == [S01]
    assert results_of(*runs, mode="memory").bases() == ["plain"]


def test_page_faults_are_the_median_of_the_counted_steps():
    results = results_of(run_lines(S01, [1.0] * 3, faults=[1, 4, 9]), run_lines(S02, [1.0] * 3))
    assert results.page_faults(S01) == 4
    assert results.page_faults(S02) is None


# predictions


def predicted_ladder(*rows, rates=None, **settings):
    """A bench of some stages of gpt2 at B 1, T 1024 in float32, each of whose steps takes a second."""
    measured_rates = rates or peak_step(float32=1e12, copy=1e10)
    about = {"shape": GPT2, "batch_size": 1, "seq_len": 1024, "amp_dtype": "float32", "compile": True} | settings
    runs = [run_lines(stage, [1.0, 1.0], tokens=1024, **about) for stage in rows]
    return results_of(*runs, probe_lines([measured_rates] * 2), rows=list(rows))


def test_a_prediction_takes_the_saving_from_the_measured_step_of_the_row_above():
    bench = predicted_ladder("s09_decay", "s10_fused")
    # 13 numbers of 4 bytes for each of 124.3 million parameters, at 10 GB/s: 646 ms of 1000
    assert bench.predicted_saving("s10_fused") == pytest.approx(0.646, rel=0.005)
    assert bench.predicted("s10_fused") == pytest.approx(1 / (1 - 0.646), rel=0.01)


def test_a_cost_makes_the_prediction_less_than_one():
    bench = predicted_ladder("s06_vocab", "s07_clip")
    # 3 numbers of 4 bytes: 149 ms
    assert bench.predicted("s07_clip") == pytest.approx(1 / 1.149, rel=0.005)


def test_a_prediction_for_accumulation_is_by_micro_batch():
    bench = predicted_ladder("s10_fused", "s11_accum", accum=2)
    # a half of 10 numbers, less a half of the 3 that adding takes: 3.5 numbers of 4 bytes, 174 ms
    assert bench.predicted_saving("s11_accum") == pytest.approx(0.174, rel=0.005)


def test_a_row_may_stand_two_stages_above():
    bench = predicted_ladder("s02_tf32", "s04_compile")
    assert bench.predicted_saving("s04_compile") > 0


@pytest.mark.parametrize(
    "rows",
    [("s05_flash", "s06_vocab"), ("s05_flash", "s07_clip"), ("mine", "s02_tf32"), ("s01_baseline", "mine")],
    ids=str,
)
def test_what_arithmetic_can_not_tell_is_not_predicted(rows):
    assert predicted_ladder(*rows).predicted(rows[-1]) is None


def test_the_first_row_has_no_prediction():
    assert predicted_ladder("s01_baseline", "s02_tf32").predicted("s01_baseline") is None


def test_more_than_the_whole_step_is_not_saved():
    slow_copy = peak_step(float32=1e12, copy=1e9)
    assert predicted_ladder("s09_decay", "s10_fused", rates=slow_copy).predicted("s10_fused") is None


def test_without_the_rate_of_a_copy_nothing_is_predicted():
    assert predicted_ladder("s09_decay", "s10_fused", rates=peak_step(float32=1e12)).predicted("s10_fused") is None


def test_without_the_rate_of_its_type_a_stage_is_not_predicted():
    bench = predicted_ladder("s02_tf32", "s03_bf16", amp_dtype="float16")
    assert bench.predicted("s03_bf16") is None


def test_ranks_should_divide_the_step_of_one_and_wait_for_the_all_reduce():
    one = run_lines("1 rank", [1.0, 1.0], accum=4)
    two = run_lines("2 ranks", [0.7, 0.7], accum=4, world_size=2)
    all_reduce = [{"dt": 0.125, "bytes": 65_000_000}] * 2
    bench = results_of(
        one, two, probe_lines(all_reduce, "all-reduce 2 ranks"), mode="scale", rows=["1 rank", "2 ranks"]
    )
    assert bench.predicted("2 ranks") == pytest.approx(1 / (0.5 + 0.125))
    assert bench.predicted("1 rank") is None


def test_rates_are_medians_over_the_rounds():
    steps = [peak_step(float32=rate, copy=rate / 10) for rate in (1e12, 2e12, 9e12)]
    bench = results_of(run_lines(S01, [1.0, 1.0, 1.0]), probe_lines(steps))
    assert bench.machine_rates().matmul == {"float32": 2e12}
    assert bench.machine_rates().copy == 2e11
