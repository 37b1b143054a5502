"""From the lines of a record to runs, samples, ratios and verdicts."""

from harness import intervals, record
from harness.record import WARMUP
from harness.results import Results

import json
import random
import statistics

import pytest
from conftest import FLOAT32, error_of
from fixtures.records import CPU, failure, header, probed, results_of, row, run, summary

import bench

S01, S02, S03, S04, S05, S06 = "s01_baseline", "s02_tf32", "s03_bf16", "s04_compile", "s05_flash", "s06_vocab"
S07, S08, S09, S10, S11, S12 = "s07_clip", "s08_cosine", "s09_decay", "s10_fused", "s11_accum", "s12_ddp"


def text_of(results):
    """Return the text of the record that a bench with these Results leaves."""
    return json.dumps(results.bench) + "\n" + results.file.getvalue()


def ratio(results, name, base):
    """Return the (ratio, spread) of two rows."""
    return results.compare(results.rows[name], results.rows[base])


def verdict(results, name):
    """Return the verdict on a row against the one above."""
    return results.verdict(results.rows[name], results.rows[name].base)


# the format


def documented_lines():
    """Return the lines that the docstring of record.py shows as examples."""
    text = " ".join(line.strip() for line in record.__doc__.splitlines() if line.startswith("    "))
    lines = []
    while text:
        line, length = json.JSONDecoder().raw_decode(text)
        lines.append(line)
        text = text[length:].strip()
    return lines


def pairs_of_controls(results):
    """Return the names of the rows that are runs of one computation."""
    return {(control.row.name, control.base.name) for control in results.controls}


def test_the_documented_lines_are_the_record_of_a_bench(tmp_path):
    head, step, last, own, *of_probe = documented_lines()
    place = {"session": 0, "name": S01}
    lines = [own, of_probe[0] | place, head | place, step | place, last | place, *of_probe]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    results = Results.load(path)
    assert results.rows[S01].runs[0].has_ended
    assert results.rows[S01].facts["sdpa"] == "flash"
    assert results.probe.runs[0].error == "out of memory at batch size 4"


def test_a_stage_writes_the_documented_keys_and_so_do_these_tests(stages):
    head, step, last, *_ = documented_lines()
    ran = stages("s10", *FLOAT32)
    for written in (ran.header, header(S01)):
        assert written.keys() == head.keys()
        for part in ("settings", "shape", "environment"):
            assert written[part].keys() == head[part].keys()
    assert ran.of_kind("step")[0].keys() == step.keys()
    assert ran.summary.keys() == summary().keys() == last.keys() - {"eval"}


def test_a_bench_writes_the_documented_keys_and_so_do_these_tests():
    argv = ["s01", "s02", "--device", "cpu", "--size", "tiny", "--no-compile"]
    args = bench.parse_command(argv)
    rows, reference = args.mode.rows(args)
    own = documented_lines()[3]
    for written in (bench.own_line(args, rows, reference, argv), results_of(rows=[row(S01)]).bench):
        assert written.keys() == own.keys()
        assert written["rows"][0].keys() == own["rows"][0].keys()


def test_a_record_is_read_as_it_was_written_but_a_line_that_a_kill_cut_off(tmp_path):
    written = results_of(run(S01, [1.0, 3.0], end=None), run(S01, [2.0, 4.0], session=1, end=None))
    path = tmp_path / "x.jsonl"
    path.write_text(text_of(written))
    assert Results.load(path).rows[S01].runs == written.rows[S01].runs
    for cut in (1, 20):
        path.write_text(text_of(written)[:-cut])
        assert [step["dt"] for step in Results.load(path).rows[S01].counted_steps] == [1.0, 3.0, 2.0]


OLD_BENCH = {"kind": "bench", "rows": [{"name": S01, "stage": S01}]}


@pytest.mark.parametrize("text", ["", '{"kind": ', "5", json.dumps(header(S01)), json.dumps(OLD_BENCH)])
def test_what_is_no_record_of_a_bench_of_this_version_is_refused(text, tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text(f"{text}\n")
    assert f"{path} is no record of a bench of this version" in error_of(capsys, Results.load, path)


def test_a_run_that_is_started_again_replaces_the_one_of_its_session():
    interrupted = run(S01, [1.0, 1.0], end=failure("interrupted"))
    results = results_of(interrupted, run(S01, [2.0], session=1), run(S01, [3.0]))
    assert [step["dt"] for step in results.rows[S01].counted_steps] == [2.0, 3.0]
    assert results.error(results.rows[S01]) is None


def test_another_code_is_what_differs_in_more_than_comments_and_docstrings():
    code = 'def f(x):\n    """Return x."""\n    return x + 1\n'
    same = '"""A module."""\n\n\ndef f(x):\n    """Return\n    y."""\n    return x + 1  # one\n'
    assert record.code_of(same) == record.code_of(code)
    for other in (code.replace("1", "2"), code.replace('    """', '    x = """')):
        assert record.code_of(other) != record.code_of(code)
    assert record.code_of('x = "# 1"') != record.code_of('x = "# 2"')
    assert record.code_of("if a:\n    b\nc\n") != record.code_of("if a:\n    b\n    c\n")


# the figures of a run


def test_the_figures_of_a_run_are_those_of_its_steps_after_the_warm_up():
    """The counted steps take 25, 36, 49 and 64 s; quartiles as numpy's: 25 + 3/4 * 11, and 49 + 1/4 * 15."""
    steps = [{"dt": (i + 1.0) ** 2, "tokens": 980, "memory": 1000 - i} for i in range(8)]
    figures = record.figures_of(steps)
    assert (figures["dt_q1_ms"], figures["dt_ms"], figures["dt_q3_ms"]) == (33_250, 42_500, 52_750)
    assert figures["tok_per_sec"] == 980 / 42.5
    assert (figures["memory"], figures["counted"], figures["warmup_s"]) == (996, 4, 1 + 4 + 9 + 16)


def test_a_run_without_counted_steps_shows_its_last_one():
    figures = record.figures_of([{"dt": dt, "tokens": 1, "memory": None} for dt in (1.0, 4.0, 9.0)])
    assert (figures["counted"], figures["dt_ms"], figures["warmup_s"], figures["memory"]) == (0, 9000, 14, 0)


def test_a_rows_figures_are_those_of_all_its_runs():
    first = run(S01, [4.0, 1.0], memory=2, end=summary(reserved=3_000), warmup_dt=3.0)
    second = run(S01, [9.0], memory=1, session=1, end=summary(reserved=5_000))
    figures = results_of(first, second, run(S01, [16.0, 25.0], memory=None, session=2, end=None)).rows[S01].figures
    assert (figures["dt_ms"], figures["counted"]) == (9000, 5)
    assert (figures["memory"], figures["reserved"]) == (2_000_000_000, 5_000)
    assert figures["warmup_s"] == 3 * WARMUP  # of the first run, which may compile


def test_the_warm_up_is_the_records_own():
    results = results_of(run(S01, [8.0, 8.0, 1.0]), run(S02, [8.0, 2.0, 2.0]), warmup=6)
    assert [step["dt"] for step in results.rows[S01].counted_steps] == [1.0]
    assert results.rows[S01].figures["warmup_s"] == 4 * 2.0 + 2 * 8.0
    assert ratio(results, S01, S02)[0] == 2


# medians and their intervals


@pytest.mark.parametrize("n, k", [(2, 1), (5, 1), (6, 1), (8, 1), (9, 2), (17, 5), (20, 6), (71, 27)])
def test_the_spread_of_a_median_is_the_wider_half_of_its_interval(n, k):
    """k by the tables of the sign test (Conover, Practical Nonparametric Statistics); below 6 the whole range."""
    samples = [float(i**2) for i in range(n)]
    random.Random(n).shuffle(samples)
    median, spread = intervals.median_and_spread(samples)
    assert median == statistics.median(samples)
    assert spread == (n - k) ** 2 - median  # squares are wider apart above the median
    assert intervals.median_and_spread([-x for x in samples]) == (-median, spread)


# ratios


def test_a_ratio_is_the_median_of_the_ratios_within_the_turns():
    """The ratios are 4, 1 and 1.5. Their mean is 2.2, and the median times of both rows are equal."""
    results = results_of(run("a", [1.0, 4.0, 9.0]), run("b", [0.25, 4.0, 6.0]))
    assert ratio(results, "b", "a") == pytest.approx((1.5, 2.5))


def test_a_turn_that_one_row_did_not_take_is_in_no_ratio():
    a = [run("a", [1.0, 1.0, 9.0]), run("a", [4.0], session=1)]
    b = [run("b", [0.5, 0.25]), run("b", [8.0], session=2)]
    assert ratio(results_of(*a, *b), "b", "a") == (3, 1)
    assert ratio(results_of(a[1], b[1]), "b", "a") is None


def test_a_round_of_fresh_processes_gives_one_ratio_by_their_medians():
    """The medians are 1, 2 and 1 s, and 0.5, 1 and 0.25 s."""
    a = [run("a", dts, i) for i, dts in enumerate([[1.0, 1.0, 1.5], [9.0, 2.0, 2.0], [1.0]])]
    b = [run("b", dts, i) for i, dts in enumerate([[0.5], [1.0], [9.0, 0.25, 0.25]])]
    assert ratio(results_of(*a, *b, pair_by="round"), "b", "a") == (2, 2)
    assert ratio(results_of(a[0], b[0], pair_by="round"), "b", "a") == (2, None)


def test_speed_is_in_tokens_and_not_in_steps():
    results = results_of(run("a", [1.0], tokens=1000), run("b", [1.5], tokens=3000))
    assert ratio(results, "b", "a")[0] == 2


def test_the_share_of_the_peak_is_by_the_models_shape():
    """The model takes 6 (12 * 2 * 3**2 + 5 * 3) + 12 * 2 * 3 * 7 = 1890 FLOP for a token, with its context of 7."""
    shape = {"vocab_size": 5, "block_size": 7, "n_layer": 2, "n_head": 1, "n_embd": 3}
    a_gpt, no_gpt = run("a GPT", [1.0] * 2, shape=shape, seq_len=4), run("no GPT", [1.0] * 2, shape=None)
    results = results_of(a_gpt, no_gpt, probed(float32=1e7, bfloat16=1e8))
    shares = [results.peak_share(row) for row in results.table_rows]
    assert shares == [pytest.approx(1890 * 1000 / 1e8), None]


# controls, noise and verdicts


@pytest.mark.parametrize("dt, noise", [(1.0, 0), (2.0, 1), (0.5, 1), (1.25, 0.25), (0.8, 0.25)])
def test_the_noise_is_how_far_a_row_and_its_second_run_came_out_apart(dt, noise):
    assert results_of(run("a", [1.0] * 2), run("a again", [dt] * 2)).noise == pytest.approx(noise)


def test_the_noise_is_the_worst_of_all_pairs_of_one_computation():
    """Without TF32 units s02 is s01, and s08 takes the steps of s07."""
    runs = [run(S01, [1.0] * 2), run(S02, [0.96] * 2), run(S07, [0.5] * 2), run(f"{S07} again", [0.49] * 2)]
    results = results_of(*runs, run(S08, [0.5] * 2))
    assert pairs_of_controls(results) == {(f"{S07} again", S07), (S02, S01), (S08, S07)}
    assert results.noise == pytest.approx(1 / 0.96 - 1)


@pytest.mark.parametrize("names, pair_by", [(["a", "b"], "turn"), (["a", "a again", "b"], "round")])
def test_without_a_control_or_a_second_round_nothing_is_a_difference(names, pair_by):
    results = results_of(*[run(name, [0.1 if name == "b" else 1.0] * 3) for name in names], pair_by=pair_by)
    assert (results.noise, verdict(results, "b")) == (None, "")


def test_a_stage_that_does_nothing_here_is_a_control_of_the_stage_before():
    missing = {"compile": False, "fallbacks": {"compile": "no compiler"}, "amp_dtype": "float32", "accum": 1}
    names = [S01, S02, S03, S04, S05, S06, S07, S08, S09, S10, S11, S12]
    results = results_of(*[run(name, [1.0], **missing) for name in names])
    assert pairs_of_controls(results) == {(S02, S01), (S03, S02), (S04, S03), (S08, S07), (S09, S08), (S11, S10)}


@pytest.mark.parametrize("names", [(S01, S08), ("mine", S02), (S01, "mine")], ids=" below ".join)
def test_a_row_is_no_control_where_the_one_above_is_not_the_stage_before(names):
    assert results_of(*[run(name, [1.0]) for name in names]).controls == []


@pytest.mark.parametrize("failed", ["a", "a again"])
def test_a_run_that_failed_is_no_control(failed):
    ends = {failed: failure("boom")}
    runs = [run(name, [1.0] * 2, end=ends.get(name, summary())) for name in ("a", "a again")]
    assert results_of(*runs).controls == []


@pytest.mark.parametrize("dt", [0.94, 1.06])
def test_a_row_of_the_same_steps_that_differs_by_far_is_no_measure_of_noise(dt):
    results = results_of(run(S01, [1.0] * 2), run(f"{S01} again", [1.01] * 2), run(S02, [dt] * 2))
    assert results.suspicious == [results.rows[S02]]
    assert results.noise == pytest.approx(0.01)


@pytest.mark.parametrize("again, dts", [(1.01, [1.04, 1.04]), (1.04, [1.11, 1.11]), (1.01, [0.7, 1.01])])
def test_a_row_of_the_same_steps_that_differs_by_less_is_a_measure_of_noise(again, dts):
    """By 4 %; by 11 %, not three times the 4 % of the A/A pair; by 21 %, which is within its own spread of 0.22."""
    results = results_of(run(S01, [1.0] * 2), run(f"{S01} again", [again] * 2), run(S02, dts))
    assert results.suspicious == []
    assert results.noise > 0.039


@pytest.mark.parametrize(
    "dts, expected",
    [
        ([0.77, 0.77], "faster"),
        ([1.30, 1.30], "slower"),  # 0.77 times as fast, and less than 25 % below 1
        ([0.81, 0.81], "no difference"),
        ([1.24, 1.24], "no difference"),
        ([0.5, 1.1], "no difference"),  # 1.45 ± 0.55
    ],
)
def test_a_difference_is_beyond_its_interval_and_beyond_the_noise_of_25_percent(dts, expected):
    results = results_of(run("a", [1.0, 1.0]), run("a again", [1.25, 1.25]), run("b", dts))
    assert verdict(results, "b") == expected


# predictions

# One layer, one head, one channel, one token, one word: 13 weights in matmuls, 14 in all, 56 bytes.
ONE = {"vocab_size": 1, "block_size": 1, "n_layer": 1, "n_head": 1, "n_embd": 1}
RATES = {"float32": 1, "tf32": 3, "bfloat16": 2, "float16": 4, "copy": 10}


def run_of_one(name, **settings):
    """Return a run of that model in float32, not compiled, in one micro-batch."""
    about = {"shape": ONE, "batch_size": 1, "amp_dtype": "float32", "compile": False, "accum": 1} | settings
    return run(name, [1.0], **about)


def predicted(results, name):
    """Return what is predicted for a row against the one above."""
    return results.predicted(results.rows[name])


def test_a_prediction_is_the_ratio_of_the_sums_of_all_parts():
    """78 FLOP with weights, 12 of attention; 68 bytes of scores, 24 of logits, 132 residual, 80 gelu, 116 projections,
    and 20 * 56 of AdamW."""
    environment = CPU | {"tf32": True}
    runs = [run_of_one(S01, environment=environment), run_of_one(S02, environment=environment)]
    results = results_of(*runs, probed(**RATES))
    assert predicted(results, S02) == pytest.approx((90 + 154) / (30 + 154))


def test_a_prediction_is_by_all_stages_below_the_row_above():
    """Flash attention: 7 FLOP in place of 12, no scores, 60 bytes of projections. Clipping moves 3 numbers for each
    weight, AdamW 20, or 7 in one kernel."""
    results = results_of(*[run_of_one(name) for name in (S06, S09, S10)], probed(**RATES))
    assert predicted(results, S09) == pytest.approx((85 + 29.6 + 20 * 5.6) / (85 + 29.6 + 23 * 5.6))
    assert predicted(results, S10) == pytest.approx((85 + 29.6 + 23 * 5.6) / (85 + 29.6 + 10 * 5.6))


def test_a_row_of_amp_is_predicted_by_its_own_dtype():
    """In 16 bits: 34 bytes of scores, 36 logits, 180 residual, 40 gelu, 58 projections, 156 casts. float16 is unscaled
    in 2 passes over the gradient."""
    rows = [row("peak"), row("float32", S03)]
    rows += [row(dtype, S03, base="float32") for dtype in ("float16", "bfloat16")]
    runs = [run_of_one(dtype, stage=S03, amp_dtype=dtype) for dtype in ("float32", "float16", "bfloat16")]
    results = results_of(probed(**RATES), *runs, rows=rows, mode="amp")
    assert predicted(results, "float32") is None
    assert predicted(results, "float16") == pytest.approx(244 / (90 / 4 + 50.4 + 22 * 5.6))
    assert predicted(results, "bfloat16") == pytest.approx(244 / (90 / 2 + 50.4 + 20 * 5.6))


@pytest.mark.parametrize("names", [(S05, S06), (S05, S07), ("mine", S02), (S01, "mine")], ids=" below ".join)
def test_what_flops_and_bytes_do_not_tell_is_not_predicted(names):
    assert predicted(results_of(*[run_of_one(name) for name in names], probed(**RATES)), names[1]) is None


def test_nothing_is_predicted_without_what_it_takes():
    above, below = run_of_one(S09), run_of_one(S10)
    assert predicted(results_of(above, below, probed(**RATES)), S09) is None  # the first row
    assert predicted(results_of(above, below), S10) is None  # no probe
    assert predicted(results_of(above, below, probed(bfloat16=1)), S10) is None  # no rate of float32
    assert predicted(results_of(above, run_of_one(S10, shape=None), probed(**RATES)), S10) is None  # no GPT
    plain = run_of_one("plain", stage=S01)
    assert predicted(results_of(plain, run_of_one(S01), probed(**RATES)), S01) is None  # its memory is no FLOP


def test_rates_are_medians_over_the_counted_steps_of_all_rounds():
    rounds = [probed(1, session, float32=rate, copy=rate / 10) for session, rate in enumerate((1e12, 9e12, 2e12))]
    rates = results_of(run(S01, [1.0]), *rounds).rates
    assert (rates.matmul, rates.copy) == ({"float32": 2e12}, 2e11)


# what a row lacks, and its losses


def test_in_turn_a_later_session_makes_up_for_one_that_failed():
    failed, again = run(S01, [1.0], end=failure("boom")), run(S01, [1.0], session=1)
    before, after = results_of(failed, steps=WARMUP + 2), results_of(failed, again, steps=WARMUP + 2)
    assert before.error(before.rows[S01]) == "boom"
    assert before.steps_missing(before.rows[S01]) == 1
    assert after.is_finished(after.rows[S01])


def test_in_turn_a_failure_as_a_partner_costs_nothing_that_was_complete():
    whole, failed = run(S01, [1.0, 1.0]), run(S01, [1.0], session=1, end=failure("boom"))
    results = results_of(whole, failed, steps=WARMUP + 2)
    assert results.error(results.rows[S01]) is None
    assert results.is_finished(results.rows[S01])


@pytest.mark.parametrize("end, error", [(summary(), None), (None, None), (failure("boom"), "boom")])
def test_a_row_is_finished_once_every_round_of_it_has_ended_well(end, error):
    """A round that failed is not hidden by the later one that ended."""
    results = results_of(run(S01, [1.0], end=end), run(S01, [1.0], session=1), pair_by="round", rounds=2)
    assert results.error(results.rows[S01]) == error
    assert results.is_finished(results.rows[S01]) is (end == summary())


def test_losses_are_shown_at_the_last_step_that_all_rows_took():
    baseline = [run(S01, [1.0] * 5), run(S01, [1.0], session=1)]
    results = results_of(*baseline, run(S02, [1.0] * 3), run(S03, [], end=failure("boom")))
    assert results.last_common_step() == WARMUP + 2
    assert [results.loss_at(row, 7) for row in results.table_rows] == [5 - 0.7, None, None]
