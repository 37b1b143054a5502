"""From the lines of a record to runs, samples, ratios, noise and predictions."""

from harness import machine, record
from harness.bench.results import median_and_spread
from harness.figures import WARMUP, figures_of

import json
import random
import statistics

import pytest
import torch
from conftest import FLOAT32
from fixtures.records import CPU, failure, header, probed, results_of, row, rows_of_names, run, summary

import bench


def ratio(results, name, base):
    """Return the (ratio, spread) of two rows."""
    return results.compare(results.rows[name], results.rows[base])


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


def test_a_stage_writes_the_documented_keys_and_so_do_these_tests(stages):
    head, step, last, *_ = documented_lines()
    ran = stages("s10", *FLOAT32)
    for written in (ran.header, header("s01")):
        assert written.keys() == head.keys()
        for part in ("settings", "shape", "environment"):
            assert written[part].keys() == head[part].keys()
    assert ran.of_kind("step")[0].keys() == step.keys()
    assert ran.summary.keys() == summary().keys() == last.keys() - {"eval"}


def test_a_bench_writes_the_documented_keys_and_so_do_these_tests(monkeypatch):
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("cpu"))
    args = bench.parse_command(["s01", "--seed", "5"])
    own = documented_lines()[3]
    for written in (bench.new_bench(args, [], in_turn=True), results_of(rows=[row("s01")]).bench):
        assert written.keys() == own.keys()
        assert written["rows"][0].keys() == own["rows"][0].keys()


# the figures of a run


def test_the_figures_of_some_steps_are_their_median_quartiles_and_speed():
    """Steps of 25, 36, 49 and 64 s; quartiles as numpy's: 25 + 3/4 * 11, and 49 + 1/4 * 15."""
    steps = [{"dt": dt, "tokens": 980, "memory": memory} for dt, memory in ((25, 4), (36, 3), (49, 2), (64, None))]
    figures = figures_of(steps)
    assert (figures["dt_q1_ms"], figures["dt_ms"], figures["dt_q3_ms"]) == (33_250, 42_500, 52_750)
    assert (figures["tok_per_sec"], figures["memory"]) == (pytest.approx(980 / 42.5, rel=1e-12), 4)


def test_the_speed_of_steps_with_different_tokens_is_that_of_the_median_step():
    """Speeds of 10, 20 and 40 tokens per second; 200 / 10 would be those of the median dt and the first tokens."""
    steps = [{"dt": dt, "tokens": tokens, "memory": 0} for dt, tokens in ((20, 200), (10, 400), (5, 100), (1, 0))]
    assert figures_of(steps)["tok_per_sec"] == 20


def test_a_rows_figures_are_those_of_all_its_runs():
    first = run("s01", [4.0, 1.0], memory=2, end=summary(reserved=3_000), warmup_dt=3.0)
    second = run("s01", [9.0], memory=1, number=1, end=summary(reserved=5_000))
    results = results_of(first, second, run("s01", [16.0, 25.0], memory=None, number=2, end=None))
    figures = results.figures(results.reference)
    assert figures["dt_ms"] == 9000
    assert (figures["memory"], figures["reserved"]) == (2_000_000_000, 5_000)
    assert figures["warmup_s"] == 3 * WARMUP  # of the first run, which may compile


def test_the_warm_up_is_the_records_own():
    results = results_of(run("s01", [8.0, 8.0, 1.0]), run("s02", [8.0, 2.0, 2.0]), warmup=6)
    assert [step["dt"] for step in results.counted(results.reference)] == [1.0]
    assert results.figure(results.reference, "warmup_s") == 4 * 1.0 + 2 * 8.0
    assert ratio(results, "s01", "s02")[0] == 2


# medians and their intervals


@pytest.mark.parametrize("n, k", [(2, 1), (5, 1), (6, 1), (8, 1), (9, 2), (17, 5), (20, 6), (71, 27)])
def test_the_spread_of_a_median_is_the_wider_half_of_its_interval(n, k):
    """k by the tables of the sign test (Conover, Practical Nonparametric Statistics); below 6 the whole range."""
    samples = [float(i**2) for i in range(n)]
    random.Random(n).shuffle(samples)
    median, spread = median_and_spread(samples)
    assert median == statistics.median(samples)
    assert spread == (n - k) ** 2 - median  # squares are wider apart above the median
    assert median_and_spread([-x for x in samples]) == (-median, spread)


# ratios


def test_a_ratio_is_the_median_of_the_ratios_within_the_turns():
    """The ratios are 4, 1 and 1.5. Their mean is 2.2, and the median times of both rows are equal."""
    results = results_of(run("a", [1.0, 4.0, 9.0]), run("b", [0.25, 4.0, 6.0]))
    assert ratio(results, "b", "a") == pytest.approx((1.5, 2.5))


def test_a_turn_that_one_row_did_not_take_is_in_no_ratio():
    a = [run("a", [1.0, 1.0, 9.0]), run("a", [4.0], number=1)]
    b = [run("b", [0.5, 0.25]), run("b", [8.0], number=2)]
    assert ratio(results_of(*a, *b), "b", "a") == (3, 1)
    assert ratio(results_of(a[1], b[1]), "b", "a") is None


def test_a_round_of_fresh_processes_gives_one_ratio_by_their_medians():
    """The medians are 1, 2 and 1 s, and 0.5, 1 and 0.25 s."""
    a = [run("a", dts, i) for i, dts in enumerate([[1.0, 1.0, 1.5], [9.0, 2.0, 1.0], [1.0]])]
    b = [run("b", dts, i) for i, dts in enumerate([[0.5], [1.0], [9.0, 0.25, 0.125]])]
    assert ratio(results_of(*a, *b, in_turn=False), "b", "a") == (2, 2)
    assert ratio(results_of(a[0], b[0], in_turn=False), "b", "a") == (2, None)


def test_a_round_in_which_one_row_failed_pairs_with_no_other():
    a = [run("a", [4.0], end=failure("boom")), run("a", [2.0], number=1)]
    b = [run("b", [0.5]), run("b", [1.0], number=1)]
    assert ratio(results_of(*a, *b, in_turn=False), "b", "a") == (2, None)


def test_speed_is_in_tokens_and_not_in_steps():
    results = results_of(run("a", [1.0], tokens=1000), run("b", [1.5], tokens=3000))
    assert ratio(results, "b", "a")[0] == 2


def test_a_gpt_is_not_compared_with_a_model_whose_tokens_are_another_thing():
    results = results_of(run("a", [1.0]), run("b", [1.0], unit="sample"), run("c", [0.5], unit="sample"))
    assert ratio(results, "b", "a") is None
    assert ratio(results, "c", "b")[0] == 2


def test_a_script_that_waits_for_its_data_is_as_fast_as_all_its_steps_together():
    """Two batches come at once, and none for a while: 4 steps of 1000 tokens in 2 s, and in halves of 1 s each."""
    bursts = {"dts": [0.99, 0.01, 0.99, 0.01], "wait": 0.4, "warmup_dt": 0.5}
    steady = {"dts": [0.99, 0.01, 0.99, 0.01], "wait": 0.01, "warmup_dt": 0.5}
    results = results_of(run("a", [0.25] * 4), run("b", **bursts), run("c", **steady), in_turn=True)
    b, c = results.rows["b"], results.rows["c"]
    assert results.figure(b, "tok_per_sec") == pytest.approx(2000)
    assert ratio(results, "b", "a") == (pytest.approx(0.5), pytest.approx(0))
    assert results.figure(c, "tok_per_sec") == pytest.approx(2000)  # the median is the mean of the two in the middle
    assert results.compare(c, results.rows["a"]).spread > 12


def test_what_a_technique_should_bring_a_script_is_predicted_by_its_work():
    """In bfloat16 the matmuls, which are nearly all of a step here, should take half the time."""
    rates = probed(float32=1e9, bfloat16=2e9, copy=1e15)
    about = {"techniques": {}, "parameters": 30_000_000}
    rows = [row("probe"), row("train.py")]
    rows.append(row("+ bf16", above="train.py", script="train.py"))
    rows.append(row("+ bf16 more", above="+ bf16", script="train.py"))
    rows.append(row("other.py", above="+ bf16 more"))
    results = results_of(
        rates,
        run("train.py", [1.0], **about),
        run("+ bf16", [1.0], **about | {"techniques": {"autocast": "bfloat16"}}),
        run("+ bf16 more", [1.0], **about | {"techniques": {"autocast": "bfloat16"}}),
        run("other.py", [1.0], **about),
        rows=rows,
    )
    assert results.predicted(results.rows["+ bf16"]) == pytest.approx(2, rel=0.05)
    assert results.predicted(results.rows["+ bf16 more"]) is None  # in it already
    assert results.predicted(results.rows["other.py"]) is None  # who knows what else it does


def test_losses_stand_beside_by_the_numbers_of_their_steps():
    """A watched script counts from 1: the first step of its optimizer only starts the clock."""
    watched = [line | {"step": line["step"] + 1} if line["kind"] == "step" else line for line in run("b", [1.0] * 2)]
    results = results_of(run("a", [1.0] * 2), watched)
    assert results.last_common_step() == 5
    assert [results.loss_at(row, 5) for row in results.table_rows] == [4.5, 4.6]


def test_the_share_of_the_peak_is_by_the_models_shape():
    """The model takes 6 (12 * 2 * 3**2 + 5 * 3) + 12 * 2 * 3 * 7 = 1890 FLOP for a token, at T 7, and
    1962 at T 8."""
    shape = {"vocab_size": 5, "n_layer": 2, "n_head": 1, "n_embd": 3, "seq_len": 7}
    a_gpt, no_gpt = run("a GPT", [1.0] * 2, shape=shape), run("no GPT", [1.0] * 2, shape=None)
    several = run("several ranks", [1.0] * 2, shape=shape, world_size=2)
    longer = run("a longer sequence", [1.0] * 2, shape=shape | {"seq_len": 8})
    results = results_of(a_gpt, no_gpt, several, longer, probed(float32=1e7, bfloat16=1e8))
    shares = [results.peak_share(row) for row in results.table_rows]
    assert shares == [pytest.approx(1890 * 1000 / 1e8), None, None, pytest.approx(1962 * 1000 / 1e8)]


# predictions

# One layer, one head, one channel, one token, one word: 12 L C^2 + V C = 13 weights in matmuls, with T C 14, 56 bytes.
# At these rates a FLOP or a byte takes a good part of a second.
ONE = {"vocab_size": 1, "n_layer": 1, "n_head": 1, "n_embd": 1, "seq_len": 1}
RATES = {"float32": 1, "tf32": 3, "bfloat16": 2, "float16": 4, "copy": 10}


def run_of_one(name, **settings):
    """Return a run of the model ONE in float32, not compiled, in one micro-batch."""
    about = {"shape": ONE, "batch_size": 1, "amp_dtype": "float32", "compile": False, "accum": 1} | settings
    return run(name, [1.0], **about)


def predicted(results, name):
    """Return what is predicted for a row against the one above."""
    return results.predicted(results.rows[name])


def test_a_prediction_is_the_ratio_of_the_sums_of_all_parts():
    """78 FLOP with weights, 12 of attention; 68 bytes of scores, 24 of logits, 132 residual, 80 gelu, 116 projections,
    and 20 * 56 of AdamW."""
    environment = CPU | {"tf32": True}
    runs = [run_of_one("s01", environment=environment), run_of_one("s02", environment=environment)]
    results = results_of(*runs, probed(**RATES))
    assert predicted(results, "s02") == pytest.approx((90 + 154) / (30 + 154))


def test_a_prediction_is_by_all_stages_between_two_rows():
    """Flash attention: 7 FLOP in place of 12, no scores, 60 bytes of projections. Clipping moves 3 numbers for each
    weight, AdamW 20, or 7 in one kernel."""
    results = results_of(*[run_of_one(name) for name in ("s06", "s09", "s10", "s07")], probed(**RATES))
    flops, bytes_but_the_update = 78 + 7, 24 + 132 + 80 + 60
    s06, s07, s10 = (flops + (bytes_but_the_update + numbers * 56) / 10 for numbers in (20, 23, 10))
    assert predicted(results, "s09") == pytest.approx(s06 / s07)
    assert predicted(results, "s10") == pytest.approx(s07 / s10)
    assert predicted(results, "s07") == pytest.approx(s10 / s07)


def test_rows_of_one_stage_are_predicted_by_their_own_flags():
    """In 16 bits: 34 bytes of scores, 36 logits, 180 residual, 40 gelu, 58 projections, 156 casts. float16 is unscaled
    in 2 passes over the gradient."""
    runs = [run_of_one("s03 a"), run_of_one("s03 b", amp_dtype="float16"), run_of_one("s03 c", amp_dtype="bfloat16")]
    rows = [row(name, script="s03_bf16", above=above) for name, above in (("s03 a", None), ("s03 b", "s03 a"))]
    rows += [row("s03 c", script="s03_bf16", above="s03 a"), row("probe")]
    results = results_of(*runs, probed(**RATES), rows=rows)
    assert predicted(results, "s03 b") == pytest.approx(244 / (90 / 4 + 50.4 + 22 * 5.6))
    assert predicted(results, "s03 c") == pytest.approx(244 / (90 / 2 + 50.4 + 20 * 5.6))


@pytest.mark.parametrize("names", ["s05 s06", "s05 s07", "s07 s05", "mine s02", "s01 mine", "plain s01"])
def test_what_flops_and_bytes_do_not_tell_is_not_predicted(names):
    above, name = names.split()
    assert predicted(results_of(run_of_one(above), run_of_one(name), probed(**RATES)), name) is None


def test_without_a_rate_and_between_one_process_and_several_nothing_is_predicted():
    assert predicted(results_of(run_of_one("s09"), run_of_one("s10"), probed(bfloat16=1)), "s10") is None
    rows = [*rows_of_names(["s12", "probe"]), row("two s12", script="s12_ddp", above="s12")]
    runs = [run_of_one("s12", accum=2), run_of_one("two s12", accum=2, world_size=2), probed(**RATES)]
    assert predicted(results_of(*runs, rows=rows), "two s12") is None


def test_rates_are_medians_over_the_counted_steps_of_all_rounds():
    rounds = [probed(1, number, float32=rate, copy=rate / 10) for number, rate in enumerate((1e12, 9e12, 2e12))]
    rates = results_of(run("s01", [1.0]), *rounds).rates()
    assert (rates.matmul, rates.copy) == ({"float32": 2e12}, 2e11)


# losses


def test_losses_are_shown_at_the_last_step_that_all_rows_took():
    baseline = [run("s01", [1.0] * 5), run("s01", [1.0], number=1)]
    results = results_of(*baseline, run("s02", [1.0] * 3), run("s03", [], end=failure("boom")))
    assert results.last_common_step() == WARMUP + 2
    assert [results.loss_at(row, 7) for row in results.table_rows] == [5 - 0.7, None, None]
    assert results.loss_at(results.reference, None) is None
