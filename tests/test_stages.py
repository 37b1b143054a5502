"""Every stage, end to end: its technique is there, does to the loss what it should, and a run ends well."""

from harness import ladder, machine, results

import argparse
import hashlib
import json
import math
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import FLOAT32, SMALL, STAGES, TWO_RANKS, definitions, process
from torch.nn import functional as F

from data import byte_tokenizer
from model import GPT, VOCAB, GPTConfig

CPU = torch.device("cpu")
NO_COMPILER = machine.compile_problem(CPU)

# 16-bit types are slow on a CPU that has no units for them, so these runs have three short steps
SHORT = (*SMALL, "--seq-len", "8", "--batch-size", "1", "--accum", "2", "--steps", "3")
SHORT += ("--lr", "1e-3")  # not the default, so that a stage which ignores it is seen
SHORT_FLOAT32 = (*SHORT, "--amp-dtype", "float32")
SHORT_BFLOAT16 = (*SHORT, "--amp-dtype", "bfloat16")
TWO_STEPS_FLOAT32 = (*SHORT_FLOAT32, "--steps", "2")
# a third step in float16 would overflow at the scale that the GradScaler begins with, and be left out
TWO_STEPS_FLOAT16 = (*SHORT, "--amp-dtype", "float16", "--steps", "2")
COMPILED = (*FLOAT32, "--compile")  # the last of two flags counts
ONE_BATCH = (*FLOAT32, "--batch-size", "8")  # as many sequences as four micro-batches of two

WATCH = {"watch": True}
TRACE = {"backend": "eager"}  # torch.compile traces, and Python runs what it traced
# no pool of workers, each of which would import torch, and no vector code: that takes two thirds of the time
COMPILE = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}


def stages_from(first):
    """The stages from this one on, as in "s07"."""
    return [stage for stage in STAGES if stage >= first]


FOR_SPEED = [row.short for row in ladder.STAGES[1:] if not row.for_the_loss]
BEFORE = dict(zip([*STAGES][1:], STAGES, strict=False))  # the stage before each

RUNS = [] if NO_COMPILER else [("s05", COMPILED, COMPILE)]  # the slowest first
RUNS += [(stage, (*SHORT_FLOAT32, "--compile"), TRACE) for stage in stages_from("s04")]
RUNS += [(stage, FLOAT32) for stage in STAGES]
RUNS += [(stage, SHORT_BFLOAT16, WATCH) for stage in STAGES]
RUNS += [("s03", TWO_STEPS_FLOAT16), ("s11", TWO_STEPS_FLOAT16), ("s10", ONE_BATCH)]
RUNS += [("s03", TWO_STEPS_FLOAT32), ("s11", TWO_STEPS_FLOAT32)]
RUNS += [("s03", SHORT_FLOAT32), ("s05", SHORT_FLOAT32)]


def assert_same_training(run, other, tolerance=1e-4):
    """Hold that two runs trained alike: losses at most `tolerance` nats apart, and equal norms and rates."""
    assert run.status == 0, run.err
    assert other.status == 0, other.err
    assert run.figures("loss") == pytest.approx(other.figures("loss"), abs=tolerance, rel=0)
    for name in ("norm", "lr", "tokens"):
        if name in run.run.steps[0] and name in other.run.steps[0]:
            assert run.figures(name) == pytest.approx(other.figures(name), rel=2 * tolerance), name


def free_port():
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def two_ranks_of_s12(stages, *flags, nodes=1):
    """The Endeds of both ranks of s12, in forks with what torchrun writes into their environment.

    nodes: 1 for two ranks on one machine, 2 for a rank on each of two.
    """
    port = str(free_port())

    def run_rank(rank):
        return stages.fork(
            "s12",
            *flags,
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK=str(rank) if nodes == 1 else "0",
            LOCAL_WORLD_SIZE="2" if nodes == 1 else "1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run_rank, [0, 1]))


# How a run starts and ends. In processes of their own, and first, since the shared runs go on meanwhile.


@pytest.mark.parametrize(
    "redirection, beginning",
    [("| head -n 1", "Stage 5 ? flash: "), (">&-", "")],
    ids=["its reader has had enough", "it is closed"],
)
def test_a_lost_stdout_ends_no_run(stages, tmp_path, redirection, beginning):
    """Not of a link to a stage either, nor where the terminal's encoding has no dot for the title."""
    link = tmp_path / "link.py"
    link.symlink_to(STAGES["s05"])
    script = f'{{ "$@" --save w --record r.jsonl; echo $? >status; }} {redirection}'
    command = [sys.executable, link, *FLOAT32]
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with process(["sh", "-c", script, "sh", *command], tmp_path, stages.env | ascii_locale) as shell:
        out, err = shell.communicate(timeout=240)
    assert err == ""
    assert out[:17] == beginning
    assert (tmp_path / "status").read_text() == "0\n"
    lines = results.read(tmp_path / "r.jsonl")
    assert [line["kind"] for line in lines] == ["header", "step", "step", "step", "step", "step", "summary"]
    assert lines[0]["stage"] == "s05_flash"
    assert GPT.from_pretrained(tmp_path / "w", None).config.n_embd == 64


def wait_for_steps(record, count, child):
    """Wait until the record of a running stage has so many steps."""
    until = time.monotonic() + 120
    while not record.exists() or len(results.read(record)) < 1 + count:
        assert child.poll() is None, "the stage has ended"
        assert time.monotonic() < until, "the stage takes no more steps"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "stage, signal_number, nohup",
    [("s05", signal.SIGINT, False), ("s12", signal.SIGTERM, True)],
    ids=["s05 Ctrl-C", "s12 nohup and kill"],
)
def test_a_signal_ends_a_run_with_its_weights_saved(stages, tmp_path, stage, signal_number, nohup):
    record, weights = tmp_path / "r.jsonl", tmp_path / "w"
    command = [sys.executable, STAGES[stage], *FLOAT32, "--steps", "100000"]
    command += ["--record", record, "--save", weights]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)  # a child inherits it
    with process(command, tmp_path, stages.env) as child:
        signal.signal(signal.SIGHUP, before)
        wait_for_steps(record, 1, child)
        if nohup:
            child.send_signal(signal.SIGHUP)
            wait_for_steps(record, len(results.read(record)) + 5, child)  # it goes on
        child.send_signal(signal_number)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err.splitlines()[-1] == "error: interrupted", err  # the second step's profiler may warn before it
    assert "Traceback" not in err
    assert results.read(record)[-1] == {"kind": "error", "reason": "interrupted", "error": "interrupted"}
    assert out.endswith(f"saved to {weights}\n")
    assert GPT.from_pretrained(weights, None).config.n_embd == 64


def test_two_ranks_of_torchrun_that_the_bench_leads_take_a_step_for_each_line(stages):
    command = [sys.executable, *TWO_RANKS, STAGES["s12"], *FLOAT32, "--worker"]
    with process(command, stages.folder, stages.env, stdin=subprocess.PIPE) as child:
        out, err = child.communicate("\n" * 3, timeout=240)
    assert child.returncode == 0, err
    assert err == "", err  # in full, since pytest cuts a comparison short: gloo's threads once aborted it
    header, *steps, summary = [json.loads(line) for line in out.splitlines()]
    assert [header["kind"], summary["kind"]] == ["header", "summary"]
    losses = [step["loss"] for step in steps]
    assert losses == pytest.approx(stages("s11", *FLOAT32).figures("loss")[:3], abs=1e-4)


@pytest.mark.parametrize(
    "lines, written",
    [(0, ["header"]), (1, ["header", "step", "summary"]), (2, ["header", "step", "step", "summary"])],
)
def test_a_stage_that_the_bench_leads_takes_a_step_for_each_line(stages, lines, written):
    run = stages.fork("s05", *FLOAT32, "--worker", stdin="\n" * lines)
    assert (run.status, run.err) == (0, "")
    assert [json.loads(line)["kind"] for line in run.out.splitlines()] == written


def test_a_corpus_that_is_too_short_is_one_line(stages, tmp_path):
    (tmp_path / "a.txt").write_text("To be, or not to be")
    # s12, since torch.distributed hooks exceptions too
    run = stages.fork("s12", *FLOAT32, "--data", "a.txt", folder=tmp_path)
    assert (run.status, run.out, run.run.header) == (2, "", None)
    assert run.err.startswith("error: a.txt has 17 tokens")
    assert run.err.count("\n") == 1


# What every run leaves


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_and_its_record_is_whole(stages, stage):
    run = stages(stage, *FLOAT32)
    _, docstring, code = STAGES[stage].read_text("utf-8").split('"""')
    header, steps, summary = run.run.header, run.run.steps, run.run.summary
    assert (run.status, run.err) == (0, "")
    assert header["stage"] == STAGES[stage].stem
    assert header["title"] == docstring.splitlines()[0] == run.out.splitlines()[0]
    assert header["code"] == hashlib.sha256(code.strip().encode()).hexdigest()
    assert header["settings"]["tokenizer"] == "gpt2-bytes"
    assert run.figures("step") == [0, 1, 2, 3, 4]
    assert run.figures("tokens") == [64 * 4 if stage >= "s11" else 64] * 5
    assert run.figures("loss")[-1] < run.figures("loss")[0] < 1.1 * math.log(VOCAB)
    last = steps[4]  # the one step after the warm-up
    assert (summary["counted"], summary["loss"], summary["meter"]) == (1, last["loss"], last["meter"])
    assert summary["dt_ms"] == 1e3 * last["dt"]
    assert summary["tok_per_sec"] == last["tokens"] / last["dt"]
    assert summary["warmup_s"] == sum(run.figures("dt")[:4])
    assert summary["sdpa"] == ("flash" if stage >= "s05" else None)
    assert run.out.splitlines()[-1].startswith(f"median dt {1e3 * last['dt']:.2f}ms ")


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_logs_its_column_and_those_of_the_stages_before(stages, stage):
    columns = {row.column for row in ladder.STAGES if row.column and row.short <= stage}
    for step in stages(stage, *FLOAT32).run.steps:
        assert set(step) == {"kind", "step", "loss", "dt", "tokens", "memory", "meter", "page_faults"} | columns


def held_out_loss(model, text):
    """The mean loss of a text's last tenth in windows of 32 tokens, in nats per token."""
    ids = torch.tensor(byte_tokenizer().encode_ordinary(text))
    held_out = ids[len(ids) * 9 // 10 :]
    losses = []
    for start in range(0, len(held_out) - 1, 32):
        window = held_out[start : start + 33]
        logits = model(window[None, :-1])[0]
        losses.append(F.cross_entropy(logits, window[1:], reduction="none"))
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("stage, ranks", [("s01", 1), ("s12", 2)])
def test_eval_is_the_held_out_loss_of_the_weights_that_are_saved(stages, tmp_path, stage, ranks):
    text = "To be, or not to be, that is the question: " * 50
    (tmp_path / "a.txt").write_text(text)
    flags = (*FLOAT32, "--data", tmp_path / "a.txt", "--eval", "--save", tmp_path / "w")
    run = stages.fork(stage, *flags) if ranks == 1 else two_ranks_of_s12(stages, *flags)[0]
    assert run.status == 0, run.err
    attention = definitions("s05", "attention", F=F)["attention"]
    with torch.no_grad():
        loss = held_out_loss(GPT.from_pretrained(tmp_path / "w", attention), text)
    assert run.run.summary["eval"] == pytest.approx(loss, rel=1e-5)
    assert f"held-out loss {loss:.4f}\n" in run.out


def test_profile_lists_the_operations_of_the_last_step(stages):
    run = stages.fork("s10", *FLOAT32, "--profile")
    profile = run.run.summary["profile"]
    own_ms, total_ms, calls = profile["aten::mm"]
    # the head's forward, and two gradients of each of nine matrices; the other forwards are aten::addmm
    assert calls == 1 + 2 * 9
    assert 0 < own_ms <= total_ms < 1e3 * run.run.steps[-1]["dt"]
    assert f"{own_ms:9.2f} ms in {calls:4d} x aten::mm\n" in run.out
    optimizer_ms, kernel_ms = profile["Optimizer.step#AdamW.step"][1], profile["aten::_fused_adamw_"][1]
    assert optimizer_ms >= kernel_ms > 0


# Each technique is there, in the stage that adds it and in all later ones


def calls_of_a_step(stage):
    """What one step asks of torch, in order, in bfloat16 and with two micro-batches from s11 on."""
    forward_and_backward = ["forward in bfloat16", "scaler.scale", "backward"]
    clip = ["scaler.unscale_", "clip at 1.0"]
    update = ["scaler.step", "optimizer.step", "scaler.update"]
    if stage < "s03":
        return ["zero_grad", "forward", "backward", "optimizer.step"]
    if stage < "s07":
        return ["zero_grad", *forward_and_backward, *update]
    if stage < "s11":
        return ["zero_grad", *forward_and_backward, *clip, *update]
    if stage < "s12":
        return ["zero_grad", *forward_and_backward, *forward_and_backward, *clip, *update]
    # what DDP does with the gradients is decided before the forward
    first = ["do not average", *forward_and_backward]
    last = ["average", *forward_and_backward]
    return ["zero_grad", *first, *last, *clip, *update]


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_asks_torch_for_these_calls_in_this_order(stages, stage):
    run = stages(stage, *SHORT_BFLOAT16, **WATCH)
    assert run.status == 0, run.err
    assert run.facts["calls"] == 3 * calls_of_a_step(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_matmuls_may_round_to_tf32_from_s02_on(stages, stage):
    facts = stages(stage, *SHORT_BFLOAT16, **WATCH).facts
    assert facts["matmul_precision"] == ("high" if stage >= "s02" else "highest")


@pytest.mark.parametrize("stage", stages_from("s03"))
@pytest.mark.parametrize(
    "dtype, live",
    [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True)],
)
def test_the_loss_is_scaled_for_float16_alone(stage, dtype, live):
    args = argparse.Namespace(amp_dtype=dtype)
    scaler = definitions(stage, "scaler", torch=torch, device=CPU, args=args)["scaler"]
    assert scaler.is_enabled() == live


@pytest.mark.parametrize("stage", stages_from("s04"))
def test_torch_compile_makes_one_graph_of_the_model(stages, stage):
    run = stages(stage, *SHORT_FLOAT32, "--compile", **TRACE)
    assert run.status == 0, run.err
    assert (run.graphs, run.breaks) == (1, {})  # over three steps: none is compiled again


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
def test_the_compiled_model_trains_as_the_eager_one(stages):
    compiled = stages("s05", *COMPILED, **COMPILE)
    assert_same_training(compiled, stages("s05", *FLOAT32))
    assert compiled.run.header["settings"]["compile"] is True


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
def test_the_vocabulary_is_padded_from_s06_on(stages, stage):
    padding = 47 * 64 if stage >= "s06" else 0  # 50304 - 50257 rows
    assert stages(stage, *FLOAT32).run.header["parameters"] == 3_318_592 + padding


@pytest.mark.parametrize("stage", STAGES)
def test_adamw_has_gpt_3s_betas_from_s07_on(stages, stage):
    for group in stages(stage, *SHORT_BFLOAT16, **WATCH).facts["groups"]:
        assert group["betas"] == ([0.9, 0.95] if stage >= "s07" else [0.9, 0.999])
        assert group["eps"] == 1e-8


@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizer_steps_at_the_rate_of_the_flag_and_from_s08_on_at_the_schedules(stages, stage):
    run = stages(stage, *SHORT_BFLOAT16, **WATCH)
    rates = [1e-3, 1e-3, 1e-3]
    if stage >= "s08":
        rates = [1e-3, 1e-3, 5.5e-4]  # one step of warmup, the cosine's first, and its middle
        assert run.figures("lr") == pytest.approx(rates)
    groups = 2 if stage >= "s09" else 1
    assert run.facts["rates"] == [pytest.approx([rate] * groups) for rate in rates]


@pytest.mark.parametrize("stage", stages_from("s08"))
@pytest.mark.parametrize("steps", [1, 2, 9, 10, 11, 20, 50, 1000])
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


@pytest.mark.parametrize("stage", stages_from("s08"))
def test_the_schedule_falls_from_the_rate_of_the_flag_to_its_tenth(stage):
    args = argparse.Namespace(steps=50, lr=2e-3)
    get_lr = definitions(stage, "max_lr", "min_lr", "warmup_steps", "get_lr", args=args, math=math)["get_lr"]
    assert max(get_lr(step) for step in range(50)) == 2e-3
    assert get_lr(50) == pytest.approx(2e-4)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_decay_all_alike_and_from_s09_on_the_matrices_alone(stages, stage):
    groups = stages(stage, *SHORT_BFLOAT16, **WATCH).facts["groups"]
    held = [(group["weight_decay"], group["tensors"], group["parameters"]) for group in groups]
    if stage < "s06":
        assert held == [(0.1, 28, 3_317_056)]
    elif stage < "s09":
        assert held == [(0.1, 28, 3_320_064)]  # with the padding
    else:
        assert held == [(0.1, 10, 3_318_272), (0.0, 18, 1_792)]


@pytest.mark.parametrize("stage", stages_from("s09"))
def test_of_gpt2_50_tensors_decay_and_98_do_not(stage, monkeypatch):
    monkeypatch.setattr(GPT, "to_empty", lambda self, device: self)  # stays on meta, which has shapes alone
    model = GPT(GPTConfig(), None)
    decayed, others = definitions(stage, "groups", model=model)["groups"]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) == 50
    assert len(others["params"]) == 98
    assert sum(p.numel() for p in decayed["params"]) == 124_318_464
    assert sum(p.numel() for p in others["params"]) == 121_344
    names = {id(p): name for name, p in model.named_parameters()}
    for p in others["params"]:
        assert ".ln_" in names[id(p)] or names[id(p)].endswith(".bias")


@pytest.mark.parametrize("stage", STAGES)
def test_adamw_is_fused_from_s10_on(stages, stage):
    for group in stages(stage, *SHORT_BFLOAT16, **WATCH).facts["groups"]:
        assert group["fused"] is (True if stage >= "s10" else None)


# What each technique does to the loss


@pytest.mark.parametrize("stage", [stage for stage in FOR_SPEED if stage not in ("s06", "s11")])
def test_a_technique_for_speed_leaves_the_loss_of_the_stage_before(stages, stage):
    assert_same_training(stages(stage, *FLOAT32), stages(BEFORE[stage], *FLOAT32))


def test_the_padding_of_the_vocabulary_adds_a_thousandth_to_the_loss(stages):
    padded, unpadded = stages("s06", *FLOAT32), stages("s05", *FLOAT32)
    assert_same_training(padded, unpadded, tolerance=2 * math.log(1 + 47 / VOCAB))
    assert padded.figures("loss")[0] > unpadded.figures("loss")[0]


@pytest.mark.parametrize("stage", ["s03", "s05"])
def test_bfloat16_rounds_the_loss_and_no_more(stages, stage):
    rounded, exact = stages(stage, *SHORT_BFLOAT16, **WATCH), stages(stage, *SHORT_FLOAT32)
    assert_same_training(rounded, exact, tolerance=0.02)  # logits of size 1 are rounded by up to 1/256
    assert rounded.figures("loss") != exact.figures("loss")


@pytest.mark.parametrize("stage", ["s03", "s11"])
def test_float16_trains_on_gradients_without_their_scale(stages, stage):
    rounded, exact = stages(stage, *TWO_STEPS_FLOAT16), stages(stage, *TWO_STEPS_FLOAT32)
    assert_same_training(rounded, exact, tolerance=0.01)  # and s11's norm is that of the true gradients
    assert rounded.figures("loss") != exact.figures("loss")


def test_micro_batches_train_as_one_batch_of_their_size(stages):
    assert_same_training(stages("s11", *FLOAT32), stages("s10", *ONE_BATCH))


@pytest.mark.parametrize("nodes", [1, 2])
def test_two_ranks_train_as_one_process_that_takes_every_micro_batch(stages, nodes):
    first, second = two_ranks_of_s12(stages, *FLOAT32, nodes=nodes)
    assert_same_training(first, stages("s11", *FLOAT32))
    assert first.run.header["settings"]["world_size"] == 2
    assert len(first.out.splitlines()) == 3 + 5
    # on two nodes each has the LOCAL_RANK 0, but only one of them is rank 0, which talks
    assert (second.status, second.out, second.run.header) == (0, "", None), second.err


EIGHT_RANKS = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
# three micro-batches for each of eight ranks
ON_EIGHT_RANKS = (*SHORT_FLOAT32, "--accum", "24")
# tiny at T 8: the two embeddings, two layers and the last LayerNorm
GRADIENT_BYTES = 4 * (50_304 * 64 + 8 * 64 + 2 * 49_984 + 128)
LOSS_BYTES = 4
SET_FLAG = "model.require_backward_grad_sync = micro == args.accum // world_size - 1"
FORWARD = "            loss = model(x, y)\n"


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


def test_eight_ranks_average_all_gradients_once_a_step_with_the_last_micro_batch(stages):
    run = stages.fork("s12", *ON_EIGHT_RANKS, watch=True, ranks=8, **EIGHT_RANKS)
    assert run.status == 0, run.err
    assert run.run.header["settings"]["world_size"] == 8
    assert run.figures("tokens") == [24 * 8] * 3
    assert all_reduces(run.facts["calls"]) == 3 * [[(3, GRADIENT_BYTES), (3, LOSS_BYTES)]]


@pytest.mark.parametrize(
    "edits, averaged",
    [
        ([(SET_FLAG, "pass"), (FORWARD, FORWARD + f"        {SET_FLAG}\n")], [1]),
        ([("micro == args.accum // world_size - 1", "micro == 0")], [1]),
        ([(SET_FLAG, "pass")], [1, 2, 3]),
    ],
    ids=["set after the forward", "with the first micro-batch", "never set"],
)
def test_a_slip_in_when_gradients_are_averaged_shows_on_eight_ranks(stages, tmp_path, edits, averaged):
    """Where a rank has one micro-batch, all of these slips train as s12 does."""
    text = STAGES["s12"].read_text("utf-8")
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    script = tmp_path / "s12_ddp.py"
    script.write_text(text, "utf-8")
    run = stages.run_script(script, ON_EIGHT_RANKS, tmp_path, watch=True, ranks=8, **EIGHT_RANKS)
    assert run.status == 0, run.err
    gradients = [(micro_batch, GRADIENT_BYTES) for micro_batch in averaged]
    assert all_reduces(run.facts["calls"]) == 3 * [[*gradients, (3, LOSS_BYTES)]]


def test_two_runs_of_s12_at_once_do_not_meet(stages):
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(stages.fork, "s12", *FLOAT32) for _ in range(2)]
    for run in runs:
        assert_same_training(run.result(), stages("s11", *FLOAT32))
        assert run.result().run.header["settings"]["world_size"] == 1


def test_s12_trains_on_the_cpu_of_a_machine_with_a_gpu(stages):
    run = stages.fork("s12", *FLOAT32, accelerator="cuda")
    assert_same_training(run, stages("s11", *FLOAT32))
