"""Every stage, end to end: its technique is there, does to the loss what it should, and a run ends well."""

from harness import ladder
from harness.bench.rows import row_of
from harness.weights import load

import argparse
import functools
import math
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import FLOAT32, SMALL, STAGE_FILES, definitions, python, run_by_the_bench, run_stage, steps_in
from observe import PART, observing

from data import VOCAB

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
IDS = torch.arange(490) ** 2 % 9973

# If a flag stands twice, the last one counts.
ONE_MICRO_BATCH = (*FLOAT32, "--accum", "1")
# 16-bit types are slow on a CPU that has no units for them, so these runs are short.
SHORT = (*SMALL, "--no-compile", "--amp-dtype", "float32", "--seq-len", "8", "--accum", "2", "--steps", "3")
# With more steps or fewer tokens, float16 would overflow at the scale that the GradScaler begins with.
TWO_STEPS = (*FLOAT32, "--steps", "2")
TWO_STEPS_FLOAT16 = (*TWO_STEPS, "--amp-dtype", "float16")

BEFORE = dict(pairwise(reversed(STAGE_FILES)))  # {stage: the one before it}
FOR_THE_LOSS = [stage.short for stage in ladder.STAGES if stage.for_the_loss]
FOR_RANKS = [stage.short for stage in ladder.STAGES if stage.takes_ranks]


def stages_from(first):
    """Return the stages from this one on, as "s07"."""
    return [stage for stage in STAGE_FILES if stage >= first]


def write_ids(path, ids=IDS):
    """Write ids to a .bin, and return its path."""
    ids.numpy().astype(np.uint16).tofile(path)
    return path


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """Return a function that runs a stage with flags, once for all tests, and returns its Ended."""
    folder = tmp_path_factory.mktemp("stages")

    @functools.cache
    def run(stage, *flags):
        ended = run_stage(stage, *flags, folder=folder)
        ended.scope.clear()  # it holds the model
        return ended

    return run


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """Return a function that returns the Observed of a stage, which takes three compiled steps in bfloat16 once."""
    folder = tmp_path_factory.mktemp("observed")
    write_ids(folder / "a.bin", IDS[:40])
    flags = (*SHORT, "--amp-dtype", "bfloat16", "--compile", "--data", "a.bin")
    flags += ("--lr", "2e-3")  # neither the default nor AdamW's own, so that a stage which ignores it is seen

    @functools.cache
    def watch_stage(stage):
        with observing() as seen:
            seen.run = run_stage(stage, *flags, folder=folder)
        seen.scales_loss = stage >= "s03" and seen.run.scope["scaler"].is_enabled()
        seen.run.scope.clear()  # it holds the model
        return seen

    return watch_stage


def assert_same_training(run, other, tolerance=1e-4):
    """Assert that two runs trained alike: losses at most `tolerance` nats apart, and equal norms and rates."""
    assert run.figures("loss") == pytest.approx(other.figures("loss"), abs=tolerance, rel=0)
    for name in ("norm", "lr"):
        if name in run.of_kind("step")[0] and name in other.of_kind("step")[0]:
            assert run.figures(name) == pytest.approx(other.figures(name), rel=2 * tolerance), name


# What a run leaves, and what its flags do


@pytest.mark.parametrize("name", ["s01_baseline", "sample"])  # the diff budgets hold that all stages begin alike
def test_a_script_finds_its_modules_though_python_leaves_out_its_folder(name):
    assert "usage:" in python("-P", f"stages/{name}.py", "--help").out


@pytest.mark.parametrize("stage", STAGE_FILES)
def test_a_stage_prints_its_steps_and_its_loss_falls(run_once, stage):
    run = run_once(stage, *ONE_MICRO_BATCH)
    assert run.figures("step") == [0, 1, 2, 3, 4]
    assert run.figures("loss")[-1] < run.figures("loss")[0] < 1.1 * math.log(VOCAB)


@pytest.mark.parametrize("stage", STAGE_FILES)
def test_the_time_of_a_step_is_that_of_all_its_parts_until_the_card_has_done_them(observed, stage):
    micro_batches = 2 if stage >= "s11" else 1
    dt = (3 * micro_batches + 1) * PART  # batches, forwards, backwards, and one update
    for step in observed(stage).run.lines:
        assert step["dt"] == pytest.approx(dt, abs=1e-4)
        assert step["speed"] == pytest.approx(16 * micro_batches / dt, abs=0.5)  # 2 sequences of 8 tokens in each


@pytest.mark.parametrize("stage", ["s01", "s12"])  # the diff budgets hold that it stands in all
def test_the_seed_draws_the_weights(stage, tmp_path):
    flags = (*FLOAT32, "--steps", "1")
    seven = run_stage(stage, *flags, "--seed", "7", folder=tmp_path).figures("loss")
    assert run_stage(stage, *flags, "--seed", "7", folder=tmp_path).figures("loss") == seven
    assert run_stage(stage, *flags, "--seed", "8", folder=tmp_path).figures("loss") != seven


@pytest.mark.parametrize("stage", STAGE_FILES)
def test_a_stage_learns_each_next_token_of_the_first_nine_tenths_of_its_text(observed, stage):
    ids = IDS[:36]
    batches = observed(stage).batches
    assert len(batches) == (6 if stage >= "s11" else 3)
    for number, (x, y) in enumerate(batches):
        positions = torch.arange(16 * number, 16 * number + 16).view(2, 8)
        assert torch.equal(x, ids[positions % 36])  # after the last token comes the first
        assert torch.equal(y, ids[(positions + 1) % 36])


# Each technique is there, in the stage that adds it and in all later ones


@pytest.mark.parametrize("stage", STAGE_FILES)
def test_matmuls_may_round_to_tf32_from_s02_on(observed, stage):
    assert observed(stage).matmul_precision == ("high" if stage >= "s02" else "highest")


@pytest.mark.parametrize("stage", STAGE_FILES)
def test_a_step_is_in_bfloat16_from_s03_on_and_compiled_from_s04_on_and_clears_the_gradients_once(observed, stage):
    seen = observed(stage)
    assert len(seen.steps) == 3
    for calls in seen.steps:
        assert calls.count("zero_grad") == calls.count("optimizer.step") == 1
        assert calls.index("zero_grad") < calls.index("backward")
        forward = "forward in bfloat16" if stage >= "s03" else "forward in float32"
        assert calls.count(forward) == calls.count("backward") == (2 if stage >= "s11" else 1)
        assert calls.count("compiled") == (calls.count(forward) if stage >= "s04" else 0)
    compiled = [call for call in seen.steps[0] if call.startswith("compile ")]
    assert compiled == (["compile GPT with {}"] if stage >= "s04" else [])
    assert not seen.scales_loss


@pytest.mark.parametrize("stage", stages_from("s05"))
def test_every_layer_takes_the_fused_kernel_without_a_mask_from_s05_on(observed, stage):
    for calls in observed(stage).steps:
        attention = [call for call in calls if call.startswith("attention")]
        assert attention == 2 * calls.count("backward") * ["attention with {'is_causal': True}"]


@pytest.mark.parametrize("stage", ["s04", "s05", "s12"])
def test_torch_compile_makes_one_graph_of_the_model_whose_weights_keep_their_names(monkeypatch, tmp_path, stage):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    run_stage(stage, *SHORT, "--compile", "--save", tmp_path / "w", folder=tmp_path)
    assert counters["stats"]["unique_graphs"] == 1  # over three steps: none is compiled again
    assert not counters["graph_break"]
    assert load(tmp_path / "w", None).config.n_embd == 64


@pytest.mark.parametrize("stage", STAGE_FILES)
def test_adamw_has_gpt_3s_betas_from_s07_on_and_is_fused_from_s10_on(observed, stage):
    for group in observed(stage).groups:
        assert group["betas"] == ((0.9, 0.95) if stage >= "s07" else (0.9, 0.999))
        assert group["eps"] == 1e-8
        assert group["fused"] is (True if stage >= "s10" else None)


@pytest.mark.parametrize("stage", STAGE_FILES)
def test_weights_decay_all_alike_and_from_s09_on_the_matrices_alone(observed, stage):
    decays = [(group["weight_decay"], group["tensors"]) for group in observed(stage).groups]
    assert decays == ([(0.1, 10), (0.0, 18)] if stage >= "s09" else [(0.1, 28)])


@pytest.mark.parametrize("stage", STAGE_FILES)
def test_the_optimizer_steps_at_the_rate_of_the_flag_and_from_s08_on_at_the_schedules(observed, stage):
    seen = observed(stage)
    rates = [2e-3, 2e-3, 2e-3]
    if stage >= "s08":
        rates = [2e-3, 2e-3, 1.1e-3]  # one step of warmup, the cosine's first, and its middle
        assert seen.run.figures("lr") == pytest.approx(rates)
    groups = 2 if stage >= "s09" else 1
    assert seen.rates == [pytest.approx([rate] * groups) for rate in rates]


@pytest.mark.parametrize("stage", stages_from("s08"))
@pytest.mark.parametrize("steps", [1, 2, 11, 50])
def test_the_schedule_equals_torchs_warmup_and_cosine(stage, steps):
    args = argparse.Namespace(steps=steps, lr=1e-3)
    get_lr = definitions(stage, "max_lr", "min_lr", "warmup_steps", "get_lr", args=args, math=math)["get_lr"]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    warmup_steps = max(1, steps // 10)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup_steps, 1.0, warmup_steps - 1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warmup_steps), eta_min=1e-4)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [warmup_steps])
    for step in range(steps):
        assert get_lr(step) == pytest.approx(schedule.get_last_lr()[0], rel=1e-6), step
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("stage", stages_from("s07"))
def test_the_update_takes_gradients_of_norm_1_and_the_log_shows_the_norm_before(observed, stage):
    seen = observed(stage)
    assert seen.norms == pytest.approx([1, 1, 1], rel=1e-3)
    if stage < "s11":  # from there on the first batch is a larger one
        assert seen.run.figures("norm")[0] == pytest.approx(observed("s06").norms[0], rel=1e-3)
    assert min(seen.run.figures("norm")) > 1


# What each technique does to the loss


@pytest.mark.parametrize("stage", [stage for stage in BEFORE if stage not in FOR_THE_LOSS])
def test_a_technique_for_speed_leaves_the_loss_of_the_stage_before(run_once, stage):
    before = BEFORE[stage]
    padding = math.log(50304 / VOCAB) if stage == "s06" else 0  # what it adds to the loss of equal logits
    run, run_before = run_once(stage, *ONE_MICRO_BATCH), run_once(before, *ONE_MICRO_BATCH)
    assert_same_training(run, run_before, tolerance=1e-4 + 2 * padding)
    added = run.figures("loss")[0] - run_before.figures("loss")[0]
    assert added == pytest.approx(padding, abs=1e-5, rel=0.05)


def test_micro_batches_train_as_one_batch_of_their_size(run_once):
    assert_same_training(run_once("s11", *FLOAT32), run_once("s10", *FLOAT32, "--batch-size", "8"))


@pytest.mark.parametrize("stage", stages_from("s03"))
def test_float16_trains_uncompiled_on_gradients_without_their_scale(stage, tmp_path):
    with observing() as rounded:
        run = run_stage(stage, *TWO_STEPS_FLOAT16, folder=tmp_path)
    with observing() as exact:
        assert_same_training(run, run_stage(stage, *TWO_STEPS, folder=tmp_path), tolerance=0.01)
    assert run.scope["scaler"].get_scale() == 65536
    assert rounded.norms == pytest.approx(exact.norms, rel=0.02)
    for seen, dtype in ((rounded, "float16"), (exact, "float32")):
        assert len(seen.norms) == 2
        assert not [call for call in seen.steps[0] if call.startswith("compile ")]
        assert {call for call in seen.steps[0] if call.startswith("forward")} == {f"forward in {dtype}"}


@pytest.mark.parametrize("stage", stages_from("s03"))
def test_a_step_whose_float16_gradients_overflow_is_left_out_and_the_scale_falls(monkeypatch, stage, tmp_path):
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**40))
    run = run_stage(stage, *TWO_STEPS_FLOAT16, "--save", tmp_path / "w", folder=tmp_path)
    assert run.scope["scaler"].get_scale() < 2**40
    assert all(p.isfinite().all() for p in load(tmp_path / "w", None).parameters())


# Several ranks


@pytest.mark.parametrize("stage", FOR_RANKS)
def test_two_ranks_train_as_one_process_and_rank_0_prints_and_saves(stage, tmp_path):
    flags = (*FLOAT32, "--data", write_ids(tmp_path / "a.bin"))
    saving = ("--no-python", "sh", "-c", f'exec "$0" "$@" --save "{tmp_path}/of rank $RANK"', sys.executable)
    both = python(*TORCHRUN, *saving, STAGE_FILES[stage], *flags)
    assert both.status == 0, both.err
    both.lines = steps_in(both.out)
    assert_same_training(both, run_stage("s11", *flags, folder=tmp_path))
    for step in both.lines:
        assert step["speed"] * step["dt"] == pytest.approx(192, rel=0.1)  # the tokens of both
    [saved] = tmp_path.glob("of rank *")
    assert (saved.name, load(saved, None).config.vocab_size) == ("of rank 0", 50304)


@pytest.mark.parametrize("stage", FOR_RANKS)
def test_two_ranks_in_the_bench_end_well_with_the_mean_of_their_losses(run_once, stage):
    both = run_by_the_bench(row_of(f"torchrun --standalone --nproc_per_node=2 {stage}"), FLOAT32, steps=5)
    assert both.summary
    losses = [both.figures("loss"), [line["loss"] for line in both.of_kind("step of another rank")]]
    means = [sum(pair) / 2 for pair in zip(*losses, strict=True)]
    assert means == pytest.approx(run_once("s11", *FLOAT32).figures("loss")[:5], abs=1e-4)


# tiny at T 8: the two embeddings, two layers of 12 C^2 + 13 C = 49,984, and the last LayerNorm
GRADIENT_BYTES = 4 * (50_304 * 64 + 8 * 64 + 2 * 49_984 + 128)
LOSS_BYTES = 4


@pytest.mark.parametrize("stage", FOR_RANKS)
def test_ranks_average_all_gradients_once_a_step_with_the_last_micro_batch(observed, stage):
    averages = [f"all-reduce of {GRADIENT_BYTES} bytes", f"all-reduce of {LOSS_BYTES} bytes"]
    for calls in observed(stage).steps:
        in_order = [call for call in calls if call.startswith(("forward", "all-reduce"))]
        assert in_order == 2 * ["forward in bfloat16"] + averages
