"""Every stage, end to end: its technique is there, does to the loss what it should, and a run ends well."""

import harness
from harness import machine

import argparse
import functools
import hashlib
import json
import math
import os
import time

import pytest
import torch
import torch.distributed as dist
from conftest import FLOAT32, SMALL, STAGES, definitions, python, run_script, run_stage
from torch.nn import functional as F
from watch import watching

from data import VOCAB, load_tokens
from model import GPT, GPTConfig, load

CPU = torch.device("cpu")
NO_COMPILER = machine.compile_problem(CPU)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")

# 16-bit types are slow on a CPU that has no units for them, so these runs have three short steps
SHORT = (*SMALL, "--no-compile", "--seq-len", "8", "--batch-size", "1", "--accum", "2", "--steps", "3")
SHORT += ("--lr", "1e-3")  # not the default, so that a stage which ignores it is seen
SHORT_FLOAT32 = (*SHORT, "--amp-dtype", "float32")
SHORT_BFLOAT16 = (*SHORT, "--amp-dtype", "bfloat16")
# more steps in float16, or fewer tokens, would overflow at the scale that the GradScaler begins with
TWO_STEPS_FLOAT32 = (*FLOAT32, "--steps", "2")
TWO_STEPS_FLOAT16 = (*TWO_STEPS_FLOAT32, "--amp-dtype", "float16")  # the last of two flags counts
ONE_BATCH = (*FLOAT32, "--batch-size", "8")  # as many sequences as four micro-batches of two
BEFORE = dict(zip([*STAGES][1:], STAGES, strict=False))  # the stage before each


def stages_from(first):
    """The stages from this one on, as in "s07"."""
    return [stage for stage in STAGES if stage >= first]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A function that returns the Watch of a stage that runs three steps in bfloat16, with these facts beside it.

    run: its Ended. groups: the settings of the optimizer's groups. is_on_device: whether all went to args.device.
    """
    folder = tmp_path_factory.mktemp("watched")

    @functools.cache
    def watch_stage(stage):
        with watching() as watch:
            watch.run = run_stage(stage, *SHORT_BFLOAT16, "--compile", folder=folder)
        assert watch.run.status == 0, watch.run.err
        watch.groups = [facts_of_group(group) for group in watch.run.scope["optimizer"].param_groups]
        watch.is_on_device = all(device is watch.run.scope["args"].device for device in watch.devices)
        watch.tokens = len(watch.run.scope["loader"].corpus.ids)
        watch.keeps_a_graph = stage >= "s11" and watch.run.scope["loss_sum"].requires_grad
        watch.run.scope.clear()  # it holds the model
        return watch

    return watch_stage


def facts_of_group(group):
    """The settings of one group of the optimizer, and the number of its tensors and of their parameters."""
    settings = {name: group[name] for name in ("betas", "eps", "weight_decay", "fused")}
    sizes = [parameter.numel() for parameter in group["params"]]
    return settings | {"tensors": len(sizes), "parameters": sum(sizes)}


def assert_same_training(run, other, tolerance=1e-4):
    """Hold that two runs trained alike: losses at most `tolerance` nats apart, and equal norms and rates."""
    assert run.status == 0, run.err
    assert other.status == 0, other.err
    assert run.figures("loss") == pytest.approx(other.figures("loss"), abs=tolerance, rel=0)
    for name in ("norm", "lr", "tokens"):
        if name in run.of_kind("step")[0] and name in other.of_kind("step")[0]:
            assert run.figures(name) == pytest.approx(other.figures(name), rel=2 * tolerance), name


# What every run leaves


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_and_its_record_is_whole(stages, stage):
    run = stages(stage, *FLOAT32)
    assert run.status == 0, run.err
    _, docstring, code = STAGES[stage].read_text("utf-8").split('"""')
    assert [line["kind"] for line in run.lines] == ["header", *["step"] * 5, "summary"]
    assert run.header["stage"] == STAGES[stage].stem
    assert run.header["title"] == docstring.splitlines()[0] == run.out.splitlines()[0]
    assert run.header["code"] == hashlib.sha256(code.strip().encode()).hexdigest()
    assert run.header["settings"]["tokenizer"] == "bytes"
    assert run.header["parameters"] == 3_318_592 + (47 * 64 if stage >= "s06" else 0)  # rows 50257 to 50304
    assert run.figures("tokens") == [64 * 4 if stage >= "s11" else 64] * 5
    assert run.figures("loss")[-1] < run.figures("loss")[0] < 1.1 * math.log(VOCAB)
    figures = {"norm"} if stage >= "s07" else set()
    if stage >= "s08":
        figures.add("lr")
    for step in run.of_kind("step"):
        assert set(step) == {"kind", "step", "loss", "dt", "tokens", "memory", "meter"} | figures
    last = run.of_kind("step")[-1]  # the one step after the warm-up
    assert run.out.splitlines()[-1].startswith(f"median dt {1e3 * last['dt']:.2f}ms ")


@pytest.mark.parametrize("stage", STAGES)
def test_another_seed_draws_other_weights(stages, stage, tmp_path):
    other = run_stage(stage, *FLOAT32, "--seed", "7", "--steps", "1", folder=tmp_path)
    assert abs(other.figures("loss")[0] - stages(stage, *FLOAT32).figures("loss")[0]) > 1e-4


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_on_the_first_nine_tenths_of_the_corpus(watched, stage):
    assert watched(stage).tokens == len(load_tokens(None, "all").ids) * 9 // 10


TEXT = "To be, or not to be, that is the question: " * 50


def held_out_loss(model, text):
    """The mean loss of a text's last tenth in windows of 32 bytes, in nats per byte."""
    ids = torch.tensor(list(text.encode()))
    held_out = ids[len(ids) * 9 // 10 :]
    losses = []
    with torch.no_grad():
        for start in range(0, len(held_out) - 1, 32):
            window = held_out[start : start + 33]
            logits = model(window[None, :-1])[0]
            losses.append(F.cross_entropy(logits, window[1:], reduction="none"))
    return torch.cat(losses).mean().item()


def assert_eval_is_of_the_saved_weights(run, path):
    """Hold that a run on TEXT with --eval and --save tells the held-out loss of what lies at the path."""
    attention = definitions("s05", "attention", F=F)["attention"]
    model, tokenizer = load(path, attention)
    loss = held_out_loss(model, TEXT)
    assert tokenizer == "bytes"
    assert run.summary["eval"] == pytest.approx(loss, rel=1e-5)
    assert f"held-out loss {loss:.4f}\n" in run.out
    assert f"saved to {path}\n" in run.out


def test_eval_is_the_held_out_loss_of_the_weights_that_are_saved(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    run = run_stage("s01", *FLOAT32, "--data", "a.txt", "--eval", "--save", tmp_path / "w", folder=tmp_path)
    assert_eval_is_of_the_saved_weights(run, tmp_path / "w")


# Each technique is there, in the stage that adds it and in all later ones


def calls_of_a_run(stage):
    """What three steps ask of torch, in order, in bfloat16 and with two micro-batches from s11 on."""
    batch = ["copy without waiting", "copy without waiting"]  # x and y
    start = ["model to its device"]
    forward, backward = ["forward"], ["backward"]
    clip, step = [], ["optimizer.step"]
    if stage >= "s03":
        forward = ["forward in bfloat16"]
        backward = ["scaler.scale", "backward"]
        step = ["scaler.step", "optimizer.step", "scaler.update"]
    if stage >= "s04":
        start.append("compile GPT")
        forward = ["compiled in bfloat16", *forward]
    if stage >= "s07":
        clip = ["scaler.unscale_", "clip the 2-norm of 28 gradients to 1"]
    if stage < "s11":
        return start + 3 * [*batch, "zero_grad", *forward, *backward, *clip, *step]
    first, last = [*batch, *forward, *backward], [*batch, *forward, *backward]
    if stage >= "s12":  # what DDP does with the gradients is decided before its forward
        first.insert(2, "do not average in bfloat16")
        last.insert(2, "average in bfloat16")
    return start + 3 * ["zero_grad", *first, *last, *clip, *step]


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_asks_torch_for_these_calls_in_this_order(watched, stage):
    assert watched(stage).calls == calls_of_a_run(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_the_model_and_every_batch_go_to_the_device_of_the_run(watched, stage):
    assert watched(stage).is_on_device


@pytest.mark.parametrize("stage", STAGES)
def test_matmuls_may_round_to_tf32_from_s02_on(watched, stage):
    assert watched(stage).matmul_precision == ("high" if stage >= "s02" else "highest")


@pytest.mark.parametrize("stage", stages_from("s03"))
@pytest.mark.parametrize(
    "dtype, scale",
    [(torch.float32, 1), (torch.bfloat16, 1), (torch.float16, 65536)],
)
def test_the_loss_is_scaled_for_float16_alone(stage, dtype, scale):
    args = argparse.Namespace(amp_dtype=dtype)
    scaler = definitions(stage, "scaler", torch=torch, device=CPU, args=args)["scaler"]
    assert scaler.is_enabled() == (scale > 1)
    assert scaler.get_scale() == scale


@pytest.mark.parametrize("stage", ["s04", "s05", "s12"])
def test_torch_compile_makes_one_graph_of_the_model_whose_weights_keep_their_names(monkeypatch, tmp_path, stage):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    run = run_stage(stage, *SHORT_FLOAT32, "--compile", "--save", tmp_path / "w", folder=tmp_path)
    assert run.status == 0, run.err
    assert counters["stats"]["unique_graphs"] == 1  # over three steps: none is compiled again
    assert not counters["graph_break"]
    model, _ = load(tmp_path / "w", None)
    assert model.config.n_embd == 64


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
def test_the_compiled_model_trains_as_the_eager_one(stages, tmp_path):
    # no pool of workers, each of which would import torch, and no vector code: that takes two thirds of the time
    quick = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    compiled = python(STAGES["s05"], *FLOAT32, "--compile", "--record", tmp_path / "r.jsonl", **quick)
    assert compiled.status == 0, compiled.err
    compiled.lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert compiled.header["settings"]["compile"] is True
    assert_same_training(compiled, stages("s05", *FLOAT32))


@pytest.mark.parametrize("stage", STAGES)
def test_attention_is_the_softmax_of_scaled_scores_over_the_past(stage):
    attention = definitions(stage, "attention", torch=torch, math=math, F=F)["attention"]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 6, 4)  # each (B, n_head, T, head_dim)
    expected = torch.empty(2, 3, 6, 4)
    for t in range(6):
        keys, values = k[:, :, : t + 1], v[:, :, : t + 1]  # of the token itself and those before it
        scores = (keys * q[:, :, t : t + 1]).sum(-1) / math.sqrt(4)
        expected[:, :, t] = (F.softmax(scores, dim=-1)[..., None] * values).sum(-2)
    torch.testing.assert_close(attention(q, k, v), expected)


@pytest.mark.parametrize("stage", STAGES)
def test_the_record_names_the_attention_kernel_of_this_machine(stages, stage):
    assert stages(stage, *FLOAT32).summary == {"kind": "summary", "sdpa": "flash"}


@pytest.mark.parametrize("stage", STAGES)
def test_adamw_has_gpt_3s_betas_from_s07_on_and_is_fused_from_s10_on(watched, stage):
    for group in watched(stage).groups:
        assert group["betas"] == ((0.9, 0.95) if stage >= "s07" else (0.9, 0.999))
        assert group["eps"] == 1e-8
        assert group["fused"] is (True if stage >= "s10" else None)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_decay_all_alike_and_from_s09_on_the_matrices_alone(watched, stage):
    groups = watched(stage).groups
    decays = [(group["weight_decay"], group["tensors"], group["parameters"]) for group in groups]
    if stage < "s06":
        assert decays == [(0.1, 28, 3_317_056)]
    elif stage < "s09":
        assert decays == [(0.1, 28, 3_320_064)]  # with the padding
    else:
        assert decays == [(0.1, 10, 3_318_272), (0.0, 18, 1_792)]


def test_of_gpt2_50_tensors_decay_and_98_do_not(monkeypatch):
    monkeypatch.setattr(GPT, "to_empty", lambda self, device: self)  # stays on meta, which has shapes alone
    model = GPT(GPTConfig(vocab_size=50304), None)
    decayed, others = definitions("s09", "groups", model=model)["groups"]
    assert len(decayed["params"]) == 50
    assert len(others["params"]) == 98
    assert sum(p.numel() for p in decayed["params"]) == 124_354_560  # as its docstring says
    assert sum(p.numel() for p in others["params"]) == 121_344


@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizer_steps_at_the_rate_of_the_flag_and_from_s08_on_at_the_schedules(watched, stage):
    watch = watched(stage)
    rates = [1e-3, 1e-3, 1e-3]
    if stage >= "s08":
        rates = [1e-3, 1e-3, 5.5e-4]  # one step of warmup, the cosine's first, and its middle
        assert watch.run.figures("lr") == pytest.approx(rates)
    groups = 2 if stage >= "s09" else 1
    assert watch.rates == [pytest.approx([rate] * groups) for rate in rates]


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


@pytest.mark.parametrize("stage", stages_from("s11"))
def test_the_sum_of_the_losses_keeps_no_graph(watched, stage):
    assert not watched(stage).keeps_a_graph


# What each technique does to the loss


@pytest.mark.parametrize("stage", ["s02", "s03", "s04", "s05", "s10", "s12"])
def test_a_technique_for_speed_leaves_the_loss_of_the_stage_before(stages, stage):
    assert_same_training(stages(stage, *FLOAT32), stages(BEFORE[stage], *FLOAT32))


def test_the_padding_of_the_vocabulary_adds_a_thousandth_to_the_loss(stages):
    padded, unpadded = stages("s06", *FLOAT32), stages("s05", *FLOAT32)
    assert_same_training(padded, unpadded, tolerance=2 * math.log(1 + 47 / VOCAB))
    assert padded.figures("loss")[0] > unpadded.figures("loss")[0]


@pytest.mark.parametrize("stage", ["s03", "s05"])
def test_bfloat16_rounds_the_loss_and_no_more(watched, stages, stage):
    rounded, exact = watched(stage).run, stages(stage, *SHORT_FLOAT32)
    assert_same_training(rounded, exact, tolerance=0.02)  # logits of size 1 are rounded by up to 1/256
    assert rounded.figures("loss") != exact.figures("loss")


@pytest.mark.parametrize("stage", ["s03", "s11"])
def test_float16_trains_on_gradients_without_their_scale(stages, stage):
    rounded, exact = stages(stage, *TWO_STEPS_FLOAT16), stages(stage, *TWO_STEPS_FLOAT32)
    assert_same_training(rounded, exact, tolerance=0.01)  # and s11's norm is that of the true gradients
    assert rounded.figures("loss") != exact.figures("loss")


def test_micro_batches_train_as_one_batch_of_their_size(stages):
    assert_same_training(stages("s11", *FLOAT32), stages("s10", *ONE_BATCH))


# Several ranks


def test_two_ranks_train_as_one_process_that_takes_every_micro_batch(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    flags = (*FLOAT32, "--data", tmp_path / "a.txt")
    files = ("--eval", "--record", tmp_path / "r.jsonl", "--save", tmp_path / "w")
    both = python(*TORCHRUN, STAGES["s12"], *flags, *files)
    assert both.status == 0, both.err
    both.lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert_same_training(both, run_stage("s11", *flags, folder=tmp_path))
    assert both.header["settings"]["world_size"] == 2
    assert len(both.out.splitlines()) == 2 + 5 + 2  # rank 1 prints nothing
    assert_eval_is_of_the_saved_weights(both, tmp_path / "w")


def test_two_ranks_that_the_bench_leads_take_a_step_for_each_line_and_end_well(stages):
    both = python(*TORCHRUN, STAGES["s12"], *FLOAT32, "--worker", stdin="\n\n\n")
    assert both.status == 0, both.err  # gloo's threads once aborted it
    both.lines = [json.loads(line) for line in both.out.splitlines()]
    assert [line["kind"] for line in both.lines] == ["header", "step", "step", "step", "summary"]
    assert both.figures("loss") == pytest.approx(stages("s11", *FLOAT32).figures("loss")[:3], abs=1e-4)


# tiny at T 8: the two embeddings, two layers and the last LayerNorm
GRADIENT_BYTES = 4 * (50_304 * 64 + 8 * 64 + 2 * 49_984 + 128)
LOSS_BYTES = 4


def all_reduces(calls):
    """Of each step its all-reduces, in order: (the number of the micro-batch, from 1, and the bytes)."""
    steps = []
    for call in calls:
        if call == "zero_grad":
            steps.append([])
            micro_batch = 0
        elif call == "forward":
            micro_batch += 1
        elif call.startswith("all-reduce of "):
            steps[-1].append((micro_batch, int(call.split()[2])))
    return steps


def test_eight_ranks_average_all_gradients_once_a_step_with_the_last_micro_batch(tmp_path):
    with watching(ranks=8) as watch:
        run = run_stage("s12", *SHORT_FLOAT32, "--accum", "24", folder=tmp_path)
    assert run.status == 0, run.err
    assert run.header["settings"]["world_size"] == 8
    assert run.figures("tokens") == [24 * 8] * 3
    assert all_reduces(watch.calls) == 3 * [[(3, GRADIENT_BYTES), (3, LOSS_BYTES)]]
    assert not run.scope["model"].find_unused_parameters  # looking for them costs a walk through the graph


@pytest.mark.parametrize("device, backend", [("cuda", "nccl"), ("cpu", "gloo")])
def test_ranks_on_cards_talk_by_nccl_and_others_by_gloo_on_any_free_port(monkeypatch, device, backend):
    asked = []

    def init_process_group(backend):
        asked.append((backend, os.environ["MASTER_PORT"]))
        raise SystemExit

    args = argparse.Namespace(device=torch.device(device))
    monkeypatch.setattr(harness, "parse_args", lambda doc: args)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    run_script(STAGES["s12"])
    assert asked == [(backend, "0")]


def test_a_run_gives_the_threads_of_its_process_group_time_before_it_leaves_the_group(monkeypatch, tmp_path):
    """Without it the race that aborts a process at its end is too rare for a test."""
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    assert run_stage("s12", *FLOAT32, folder=tmp_path).status == 0
    assert max(waits) >= 0.2
