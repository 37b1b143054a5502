"""Every stage, end to end, in a process of its own: what a technique may change in the numbers, and what not."""

import argparse
import ast
import math

import pytest
import torch
from conftest import FLOAT32, SMALL, STAGES, definitions, figures, step_lines

from model import GPT, SIZES, VOCAB, GPTConfig
from stages.record import summarize

BFLOAT16 = (*SMALL, "--amp-dtype", "bfloat16")
FLOAT16 = (*SMALL, "--amp-dtype", "float16")
COMPILED = (*FLOAT32, "--compile")  # the last word counts
BIG_BATCH = (*FLOAT32, "--batch-size", "8")
PADDING = math.log(1 + 47 / VOCAB)


RUNS = [("s05", COMPILED, ())]  # the slowest first
RUNS += [(stage, FLOAT32, ()) for stage in STAGES]
RUNS += [
    ("s10", BIG_BATCH, ()),
    ("s03", BFLOAT16, ()),
    ("s05", BFLOAT16, ()),
    ("s03", FLOAT16, ()),
    ("s11", FLOAT16, ()),
]


def is_close(run, other, tolerance, name="loss"):
    assert run.status == other.status == 0, run.err + other.err
    assert figures(run, name) == pytest.approx(figures(other, name), abs=tolerance, rel=0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_from_any_folder_and_its_record_is_whole(stages, stage):
    run = stages(stage, *FLOAT32)
    assert run.status == 0 and run.err == ""
    doc = ast.get_docstring(ast.parse(STAGES[stage].read_text()))
    assert run.header["stage"] == STAGES[stage].stem
    assert run.header["title"] == run.out.splitlines()[0] == doc.splitlines()[0]
    number = int(stage[1:])
    assert run.header["parameters"] == 3_318_592 + (47 * 64 if number >= 6 else 0)
    assert figures(run, "step") == [0, 1, 2, 3] and len(step_lines(run)) == 4
    assert all(math.isfinite(loss) for loss in figures(run, "loss"))
    assert figures(run, "loss")[-1] < figures(run, "loss")[0]  # it learns
    logged = {"norm"} & set(run.steps[0]) | {"lr"} & set(run.steps[0])
    assert logged == {name for name, since in (("norm", 7), ("lr", 8)) if number >= since}
    tokens = 2 * 32 * (4 if number >= 11 else 1)
    assert figures(run, "tokens") == [tokens] * 4
    assert run.end == summarize(run.steps) | dict(sdpa="flash" if number >= 5 else None)


@pytest.mark.parametrize("stage", ["s02", "s03", "s04", "s05"])
def test_tf32_autocast_compile_and_flash_leave_the_losses_of_float32_as_they_are(stages, stage):
    is_close(stages(stage, *FLOAT32), stages("s01", *FLOAT32), 1e-4)


@pytest.mark.parametrize("stage", ["s03", "s05"])
def test_in_bfloat16_the_losses_differ_by_what_8_bits_of_mantissa_lose(stages, stage):
    run, exact = stages(stage, *BFLOAT16), stages("s01", *FLOAT32)
    is_close(run, exact, 0.02)  # logits of size 1 are rounded by up to 1/256
    assert figures(run, "loss") != figures(exact, "loss")  # autocast was on


def test_s06_adds_only_the_padding_to_the_softmax(stages):
    plain, padded = stages("s05", *FLOAT32), stages("s06", *FLOAT32)
    more = [b - a for a, b in zip(figures(plain, "loss"), figures(padded, "loss"), strict=True)]
    assert more[0] == pytest.approx(PADDING, rel=0.2)
    assert all(0 < m < 2 * PADDING for m in more)


def test_float16_with_a_live_scaler_trains_as_float32_does(stages):
    """With the loss scaled by 65,536: the optimizer must see the true gradients."""
    is_close(stages("s03", *FLOAT16), stages("s03", *FLOAT32), 0.01)


def test_float16_gradients_are_unscaled_before_their_norm_is_clipped(stages):
    run, exact = stages("s11", *FLOAT16), stages("s11", *FLOAT32)
    is_close(run, exact, 0.01)
    assert figures(run, "norm") == pytest.approx(figures(exact, "norm"), rel=0.02)
    assert figures(run, "loss") != figures(exact, "loss")


def test_s10_fused_is_the_optimizer_of_s09(stages):
    is_close(stages("s10", *FLOAT32), stages("s09", *FLOAT32), 1e-4)
    is_close(stages("s10", *FLOAT32), stages("s09", *FLOAT32), 1e-4, "norm")


def test_s11s_micro_batches_are_one_big_batch(stages):
    accumulated, big = stages("s11", *FLOAT32), stages("s10", *BIG_BATCH)
    assert figures(accumulated, "tokens") == figures(big, "tokens")
    for name in ("loss", "norm", "lr"):
        is_close(accumulated, big, 1e-4, name)


def test_s12_alone_is_s11(stages):
    for name in ("loss", "norm", "lr"):
        is_close(stages("s12", *FLOAT32), stages("s11", *FLOAT32), 1e-4, name)


def test_torch_compile_changes_no_loss(stages):
    run = stages("s05", *COMPILED)
    assert run.header["compile"] is True
    is_close(run, stages("s05", *FLOAT32), 1e-4)
    assert run.steps[0]["dt"] > 3 * run.steps[3]["dt"]  # it did compile, in the warm-up


# --- pieces of the stages' texts


def lr_of(stage, steps):
    """get_lr of a stage, and its warmup_steps, for a run of so many steps."""
    names = ("max_lr", "min_lr", "warmup_steps", "get_lr")
    pieces = definitions(stage, *names, args=argparse.Namespace(steps=steps), math=math)
    assert (pieces["max_lr"], pieces["min_lr"]) == (6e-4, 6e-5)
    return pieces["get_lr"], pieces["warmup_steps"]


@pytest.mark.parametrize("stage", ["s08", "s09", "s10", "s11", "s12"])
@pytest.mark.parametrize("steps", [20, 50, 1000])
def test_the_learning_rate_is_that_of_torchs_warmup_and_cosine_schedulers(stage, steps):
    get_lr, warmup_steps = lr_of(stage, steps)
    assert warmup_steps == steps // 10
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=6e-4)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup_steps, 1.0, warmup_steps - 1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup_steps, eta_min=6e-5)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [warmup_steps])
    for step in range(steps):
        assert get_lr(step) == pytest.approx(schedule.get_last_lr()[0], rel=1e-6), step
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("steps", [10, 50, 1000])
def test_the_learning_rate_is_hugging_faces_with_the_warmup_counted_from_one(steps):
    transformers = pytest.importorskip("transformers")
    get_lr, warmup_steps = lr_of("s08", steps)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=6e-4)
    schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, warmup_steps, steps, min_lr=6e-5, num_cycles=0.5
    )
    (factor,) = schedule.lr_lambdas
    for step in range(steps):
        assert get_lr(step) == pytest.approx(6e-4 * factor(step + 1 if step < warmup_steps else step)), step


@pytest.mark.parametrize("steps", [1, 2, 3, 9, 10, 11])
def test_the_shortest_runs_have_a_learning_rate_too(steps):
    get_lr, warmup_steps = lr_of("s08", steps)
    rates = [get_lr(step) for step in range(steps)]
    assert warmup_steps == 1 and rates[0] == 6e-4
    assert all(6e-5 < rate <= 6e-4 for rate in rates) and rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("stage", ["s09", "s10", "s11", "s12"])
def test_only_matrices_of_gpt2_are_decayed(stage, monkeypatch):
    monkeypatch.setattr(GPT, "to_empty", lambda self, device: self)  # stays on the meta device: shapes, no memory
    model = GPT(GPTConfig(vocab_size=VOCAB, block_size=1024, **SIZES["gpt2"]), None)
    decayed, others = definitions(stage, "groups", model=model)["groups"]
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert (len(decayed["params"]), sum(p.numel() for p in decayed["params"])) == (50, 124_318_464)
    assert (len(others["params"]), sum(p.numel() for p in others["params"])) == (98, 121_344)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for group in (decayed, others) for p in group["params"]} == set(names.values())
    assert all(names[id(p)].endswith(".bias") or ".ln_" in names[id(p)] for p in others["params"])
