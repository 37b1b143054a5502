"""From the runs of a record to the table: figures, ratios, predictions, noise and verdicts."""

from harness import ladder
from harness.bench.answer import answer
from harness.bench.cells import note_cell, remarks
from harness.bench.failure import error_line
from harness.bench.page import terminal
from harness.bench.ratios import Verdict
from harness.figures import Step, tokens_per_second
from harness.steps import WARMUP

import pytest
from fixtures.records import CPU, MINI, probed, row, rows_of_names, run, table_from

# figures


def test_the_speed_of_steps_with_different_tokens_is_that_of_the_median_step():
    """Speeds of 10, 20 and 40 tokens per second."""
    steps = [Step(None, dt, {}, tokens=tokens) for dt, tokens in ((20, 200), (10, 400), (5, 100), (1, 0))]
    assert tokens_per_second(steps, uneven=False) == 20


def test_a_rows_figures_are_those_of_all_its_runs():
    first = run("s01", [4.0, 1.0], memory=2)
    second = run("s01", [9.0, 16.0, 25.0], memory=1, round_number=1, end=None)
    for line in second:
        line["loss"] = 0.5
    s01 = table_from(first, second).outcomes["s01"]
    assert (s01.dt_ms, s01.memory, len(s01.counted)) == (9000, 2_000_000_000, 5)
    assert s01.loss == 5 - WARMUP / 10  # of the first run, at the step that every row takes


# ratios


def test_a_round_of_fresh_processes_gives_one_ratio():
    """The ratios of their medians are 4, 2 and 1, and the last run of s03 was cut off."""
    s01 = [run("s01", dts, i) for i, dts in enumerate([[1.0, 2.0, 3.0], [9.0, 2.0, 1.0], [1.0] * 3, [9.0]])]
    s03 = [run("s03", dts, i) for i, dts in enumerate([[0.5, 4.0, 0.5], [1.0] * 3, [9.0, 1.0, 1.0]])]
    outcome = table_from(*s01, *s03, run("s03", [1.0], 3, end=None)).outcomes["s03"]
    assert outcome.ratio.value == pytest.approx(2)


@pytest.mark.parametrize(
    "other, is_compared",
    [
        ({"unit": "sample"}, False),
        ({"shape": MINI | {"n_embd": 99}}, False),
        ({"shape": MINI | {"vocab_size": 50304, "seq_len": 512}, "parameters": 1}, True),  # a GPT of the same size
    ],
)
def test_two_models_are_not_compared_nor_are_tokens_with_samples(other, is_compared):
    outcome = table_from(run("a", [1.0]), run("b", [0.5], **other)).outcomes["b"]
    assert (outcome.ratio is not None) == is_compared


@pytest.mark.parametrize(
    "dts, wait, loaders",
    [
        ([0.99, 0.01, 0.99, 0.01], 0.4, 1),  # two batches come at once, and none for a while
        ([0.1, 0.1, 0.1, 1.7], 0, 0),  # a rollout in every fourth step
    ],
)
def test_a_script_without_a_typical_step_is_as_fast_as_all_its_steps_together(dts, wait, loaders):
    """All its steps together take twice the time of those of a."""
    outcome = table_from(run("a", [0.25] * 4), run("b", dts, wait=wait, loaders=loaders)).outcomes["b"]
    assert outcome.tok_per_sec == pytest.approx(2000)
    assert outcome.ratio.value == pytest.approx(1 / 2)


# predictions

# One layer, one head, one channel, one token, one word: 12 L C^2 + V C = 13 weights in matmuls, with T C 14, 56 bytes.
# At these rates a FLOP takes up to a second, and a byte a tenth of one.
ONE = {"vocab_size": 1, "n_layer": 1, "n_head": 1, "n_embd": 1, "seq_len": 1}
SLOW = probed(float32=1, tf32=3, bfloat16=2, float16=4, copy=10)


def run_of_one(name, accum=1, **settings):
    """Return a run of the model ONE in float32, not compiled."""
    shows = {"amp_dtype": "float32", "compile": False, "accum": accum}
    return run(name, [1.0], shape=ONE, batch_size=1, shows=shows, **settings)


def test_a_prediction_is_by_all_stages_between_two_rows():
    """Flash attention takes 7 FLOPs in place of 12, moves no scores, and 60 bytes of projections.

    For each weight clipping moves 3 numbers, AdamW 20, and fused AdamW 7.
    """
    table = table_from(*[run_of_one(name) for name in ("s06", "s09", "s10", "s07")], rates=SLOW)
    flops, bytes_but_the_update = 78 + 7, 24 + 132 + 80 + 60
    s06, s07, s10 = (flops + (bytes_but_the_update + numbers * 56) / 10 for numbers in (20, 23, 10))
    predicted = [outcome.predicted for outcome in table.shown]
    assert predicted == [None, pytest.approx(s06 / s07), pytest.approx(s07 / s10), None]


SCRIPT = row("t.py")
SCRIPT_IN_BF16 = row("+bf16", script="t.py", added=("bf16",), base="t.py")


@pytest.mark.parametrize("device, gain", [("cpu", pytest.approx(2, rel=0.05)), ("cuda", None)])
def test_what_a_technique_should_bring_a_script_is_predicted_by_its_work(device, gain):
    """In bfloat16 the matmuls, which are nearly all of a step, should take half the time.

    It ran on the CPU. If the bench was for a card, the rates are those of the card, and nothing is predicted.
    """
    rows = [SCRIPT, SCRIPT_IN_BF16, row("other.py", base="+bf16")]
    runs = [run("t.py", [1.0]), run("+bf16", [1.0], autocast="bfloat16"), run("other.py", [1.0])]
    rates = probed(float32=1e9, bfloat16=2e9, copy=1e15)
    table = table_from(*runs, rows=rows, rates=rates, environment=CPU | {"device": device})
    predicted = [outcome.predicted for outcome in table.shown]
    assert predicted == [None, gain, None]  # who knows what else another script does
    assert (table.shown[1].peak_share is None) == (gain is None)


def test_between_one_process_and_several_nothing_is_predicted():
    rows = [*rows_of_names(["s12"]), row("s12 twice", script="s12_ddp", base="s12")]
    runs = [run_of_one("s12", accum=2), run_of_one("s12 twice", accum=2, world_size=2)]
    assert table_from(*runs, rates=SLOW, rows=rows).outcomes["s12 twice"].predicted is None


# noise and verdicts


def rows_that_change_nothing(table):
    """Return the names of the rows that compute the same as their base."""
    return [name for name, outcome in table.outcomes.items() if outcome.change.is_same_computation]


def test_a_stage_that_does_nothing_here_and_the_control_compute_the_same_as_their_base():
    missing = {"shows": {"problem": "no compiler", "amp_dtype": "float32", "accum": 1}}
    names = [*(stage.short for stage in ladder.STAGES), "s07 again"]
    table = table_from(*[run(name, [1.0], **missing) for name in names])
    assert rows_that_change_nothing(table) == ["s02", "s03", "s04", "s08", "s09", "s11", "s07 again"]


@pytest.mark.parametrize(
    "above, below, is_control",
    [
        (row("s01"), row("s08", base="s01"), False),
        (row("s07"), row("s08", base="s07", flags=("--lr", "1")), False),
        (row("s07"), row("s08", base="s07", launcher=("env", "A=b")), False),
        (row("s07"), row("s09", base="s07"), True),
        (row("a", added=("bf16",)), row("b", script="a", added=("bf16", "fused"), base="a"), True),
        (row("a", added=("bf16",)), row("b", script="a", added=("fused",), base="a"), False),
    ],
)
def test_a_row_is_as_fast_as_its_base_if_nothing_that_it_adds_does_anything_here(above, below, is_control):
    table = table_from(run(above.name, [1.0]), run(below.name, [1.0]), rows=[above, below])
    assert len(rows_that_change_nothing(table)) == is_control


def test_what_is_known_of_a_stage_is_no_reason_for_what_was_added_to_it():
    """s04 alone is left out with --no-compile, and +fused is not."""
    rows = [row("s03"), row("s04", base="s03"), row("+fused", script="s04_compile", added=("fused",), base="s04")]
    runs = [run(name, [dt]) for name, dt in {"s03": 1.0, "s04": 2.0}.items()]
    table = table_from(*runs, run("+fused", [4.0], compile=True, fused=True), rows=rows)
    assert dict(answer(table))["slower"] == (
        "s04 compile 0.50 ± 0.00 (leave it out of all rows with --no-compile), +fused 0.50 ± 0.00"
    )


@pytest.mark.parametrize("dt, verdict", [(1.04, Verdict.SAME), (2.0, Verdict.UNCLEAR)])
def test_a_row_that_should_be_as_fast_as_its_base_is_never_called_slower(dt, verdict):
    """s08 computes what s07 does."""
    table = table_from(run("s07", [1.0]), run("s07 again", [1.0]), run("s08", [dt]))
    assert table.outcomes["s08"].verdict is verdict


def test_steps_are_compared_only_between_rows_of_one_command():
    """They count steps, since their batches are not seen, and a batch may be of any size."""
    rows = [SCRIPT, SCRIPT_IN_BF16, row("t.py --b 2", script="t.py", flags=("--b", "2"), base="+bf16")]
    table = table_from(*[run(each.name, [1.0], unit="step", tokens=1) for each in rows], rows=rows)
    assert [outcome.ratio is not None for outcome in table.shown] == [False, True, False]


def test_a_run_that_ended_in_its_warm_up_has_no_ratio():
    """The steps of this script are uneven, so that its speed is that of all its tokens over all seconds."""
    whole = [run(name, [1.0, 1.0, 9.0], number) for number in (0, 1) for name in ("t.py", "t.py again")]
    table = table_from(*whole, run("t.py", [], 2, end=None))
    assert table.outcomes["t.py"].speeds.keys() == {0, 1}


def test_if_one_script_is_uneven_both_have_their_speed_by_the_mean():
    """The means are 1.3 s and 0.95 s, and the medians 1 s and 0.8 s."""
    runs = run("t.py", [1.0] * 9 + [4.0]), run("u.py", [0.8] * 9 + [2.3])
    ratio = table_from(*runs, rows=[row("t.py"), row("u.py", base="t.py")]).outcomes["u.py"].ratio
    assert ratio.value == pytest.approx(1.3 / 0.95)


def test_a_technique_that_a_script_has_already_changes_no_computation():
    """+compile adds nothing to a script that compiles, +fused nothing to SGD, and +bf16 adds autocast."""
    rows = [row("t.py")]
    added = ()
    for name in ("compile", "fused", "bf16"):
        added += (name,)
        rows.append(row(f"+{name}", script="t.py", added=added, base=rows[-1].name))
    sgd = {"compile": True, "fused": None}
    runs = [run(each.name, [1.0], **sgd) for each in rows[:3]]
    table = table_from(*runs, run("+bf16", [0.5], **sgd, autocast="bfloat16"), rows=rows)
    assert [outcome.change.in_vain for outcome in table.shown] == [[], ["compile"], ["fused"], []]
    assert rows_that_change_nothing(table) == ["+compile", "+fused"]
    assert [heading for heading, _ in answer(table)] == ["worth it", "no difference", "fastest row"]


@pytest.mark.parametrize(
    "seconds, fastest",
    [
        # the control is faster still
        ({"a": 1.0, "a again": 0.7, "b": 0.9, "c": 0.8}, "c: (1.25 ± 0.00) times as fast as a"),
        ({"a": 1.0, "a again": 1.0, "b": 1.4, "c": 1.2}, None),  # the first row is the fastest
        ({"s06": 1.0, "s06 again": 1.0, "s10": 0.6, "s07": 0.5, "s08": 0.49}, "s07: 2.00 ± 0.00 times as fast as s06"),
    ],
)
def test_the_fastest_row_is_the_first_of_those_that_compute_the_same(seconds, fastest):
    """seconds: of the steps of each row."""
    table = table_from(*[run(name, [dt]) for name, dt in seconds.items()])
    assert dict(answer(table)).get("fastest row") == fastest


def test_the_fastest_row_is_of_one_process_and_trains_the_first_rows_model():
    others = [run("d", [0.1], shape=None), run("e", [0.1], world_size=2), run("f", [0.1], end=error_line("boom"))]
    runs = [run(name, [dt]) for name, dt in {"a": 1.0, "a again": 1.0, "b": 0.75, "c": 0.5, "g": 0.6}.items()]
    assert dict(answer(table_from(*runs, *others)))["fastest row"] == "c: 2.00 ± 0.00 times as fast as a"


def test_a_row_whose_loss_is_not_finite_is_called_neither_faster_nor_slower():
    s03 = run("s03", [0.5])
    s03[-2]["loss"] = "nan"
    table = table_from(run("s01", [1.0]), run("s01 again", [1.0]), s03, run("s05", [0.25]))
    assert remarks(table.outcomes["s03"]) == ["its loss is not finite"]
    assert dict(answer(table)) == {"fastest row": "s05: 4.00 ± 0.00 times as fast as s01"}


def test_the_speed_of_fp16_counts_though_its_loss_is_not_finite():
    fp16 = run("train + fp16", [0.5])
    fp16[-2]["loss"] = "nan"
    rows = [row("train"), row("train + fp16", base="train", added=["fp16"])]
    table = table_from(run("train", [1.0]), fp16, rows=rows)
    assert table.outcomes["train + fp16"].ratio.value == 2.0


def test_the_answer_says_that_the_machine_was_busy():
    """By its load, or since the rounds of s03 lie far apart."""
    loaded = table_from(run("s01", [1.0]), run("s03", [0.5]), environment=CPU | {"load": 1.5})
    assert dict(answer(loaded))["busy machine"].startswith(
        "the load was 1.50 times the cores when the bench began: close"
    )
    rounds = []
    for number, dt in enumerate((0.3, 0.6, 0.4)):
        rounds += [run("s01", [1.0], number), run("s03", [dt], number)]
    assert dict(answer(table_from(*rounds)))["busy machine"].startswith("a ± is a quarter of its ratio, or more")


def test_with_one_round_the_terminal_says_how_far_two_runs_of_one_code_differ():
    table = table_from(run("s01", [1.0], 1), run("s01 again", [0.5], 1), run("s03", [0.5], 1), rounds=1)
    assert "s01 again was 2.000 times as fast as s01." in " ".join(terminal(table).split())


def test_a_warm_up_that_takes_much_longer_than_as_many_later_steps_is_told():
    plain = run("plain", [2.0] * 9)
    for line in plain[2:8]:  # its first six steps
        line["dt"] = 5.0
    table = table_from(plain, warmup_of_plain=6)
    assert note_cell(table.outcomes["plain"], table.bench) == "30 s of warm-up"


def test_a_row_whose_base_is_not_right_above_says_so():
    rows = [SCRIPT, row("a.py", base="t.py"), SCRIPT_IN_BF16]
    table = table_from(*[run(each.name, [1.0]) for each in rows], rows=rows)
    assert remarks(table.shown[2])[0].startswith("compared with t.py")


def test_what_a_script_has_and_lacks_is_said_once():
    rows = [row("plain", script="t.py", keeps_memory=False), row("t.py", base="plain")]
    table = table_from(*[run(each.name, [1.0]) for each in rows], rows=rows)
    assert [len(remarks(outcome)) for outcome in table.shown] == [3, 0]
