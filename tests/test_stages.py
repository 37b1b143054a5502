"""Every stage, end to end, in processes of its own: what a technique does to the numbers, and how a run ends."""

from harness import machine, report, summarize

import argparse
import hashlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import FLOAT32, SMALL, STAGES, definitions, figures, process
from torch.nn import functional as F

from data import byte_tokenizer
from model import GPT, VOCAB, GPTConfig, evaluate, load

CPU = torch.device("cpu")
AGENT = ("-m", "torch.distributed.run")
TWO_RANKS = (*AGENT, "--standalone", "--nproc_per_node=2")
# python -c AROUND stages/...: something before the stage, and something after
AROUND = "import os, runpy, sys, torch._dynamo as d; del sys.argv[0]; sys.path.insert(0, os.path.dirname(sys.argv[0]))"
AROUND += "; {}; runpy.run_path(sys.argv[0], run_name='__main__'); {}"
ONE_GRAPH = "print(d.utils.counters['stats']['unique_graphs'], 'graph', dict(d.utils.counters['graph_break']))"
ONE_GRAPH = ("-c", AROUND.format("d.config.error_on_recompile = True", ONE_GRAPH))
GPU_TOO = ("-c", AROUND.format("d.torch._C._get_accelerator = lambda: d.torch.device('cuda')", ""))
BFLOAT16, FLOAT16 = ((*SMALL, "--amp-dtype", dtype) for dtype in ("bfloat16", "float16"))
SAME = {  # two runs, and how far their losses may be apart
    "compile": (("s05", (*FLOAT32, "--compile"), ONE_GRAPH), ("s05", FLOAT32), 1e-4),  # the last of two flags counts
    **{name: ((name, FLOAT32, ()), ("s01", FLOAT32), 1e-4) for name in ("s02", "s03", "s04", "s05")},
    "bfloat16": (("s03", BFLOAT16, ()), ("s01", FLOAT32), 0.02),  # logits of size 1 are rounded by up to 1/256
    "bfloat16 flash": (("s05", BFLOAT16, ()), ("s01", FLOAT32), 0.02),
    "float16": (("s03", FLOAT16, ()), ("s03", FLOAT32), 0.01),  # the optimizer sees gradients without the scale
    "float16 clip": (("s11", FLOAT16, ()), ("s11", FLOAT32), 0.01),  # and so does the clipping
    "vocab": (("s06", FLOAT32, ()), ("s05", FLOAT32), 2 * math.log(1 + 47 / VOCAB)),  # the padding in the softmax
    "fused": (("s10", FLOAT32, ()), ("s09", FLOAT32), 1e-4),
    "accum": (("s11", FLOAT32, ()), ("s10", (*FLOAT32, "--batch-size", "8")), 1e-4),
    "ddp alone": (("s12", FLOAT32, GPU_TOO), ("s11", FLOAT32), 1e-4),
    "ddp": (("s12", FLOAT32, TWO_RANKS), ("s11", FLOAT32), 1e-4),
}
NO_COMPILER = machine.compile_problem(CPU)
RUNS = [run for name, (run, _, _) in SAME.items() if name != "compile" or not NO_COMPILER]  # the slowest first
RUNS += [(*run, ()) for _, run, _ in SAME.values()] + [(stage, FLOAT32, ()) for stage in STAGES]


def is_close(run, other, tolerance):
    assert run.status == other.status == 0, run.err + other.err
    assert figures(run, "loss") == pytest.approx(figures(other, "loss"), abs=tolerance, rel=0)
    for name in {"norm", "lr", "tokens"} & {*run.steps[0]} & {*other.steps[0]}:
        assert figures(run, name) == pytest.approx(figures(other, name), rel=2 * tolerance), name


@pytest.mark.parametrize("name", SAME)
def test_techniques_for_speed_leave_the_loss(stages, name):
    if name == "compile" and NO_COMPILER:
        pytest.skip(NO_COMPILER)
    (stage, flags, launch), (other, other_flags), tolerance = SAME[name]
    run, other = stages(stage, *flags, launch=launch), stages(other, *other_flags)
    is_close(run, other, tolerance)
    if tolerance > 1e-4:
        assert figures(run, "loss") != figures(other, "loss")  # autocast, or the padding, is at work
    if name == "compile":
        assert run.out.endswith("\n1 graph {}\n")
    if name == "ddp":  # rank 0 alone prints
        assert len(run.out.splitlines()) == 3 + len(run.steps) and run.header["settings"]["world_size"] == 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_and_its_record_is_whole(stages, stage):
    run, source = stages(stage, *FLOAT32), STAGES[stage].read_text("utf-8")
    _, doc, code = source.split('"""')
    assert (run.status, run.err, run.header["stage"]) == (0, "", STAGES[stage].stem)
    assert run.header["title"] == run.out.splitlines()[0] == doc.splitlines()[0]
    assert run.header["code"] == hashlib.sha256(code.strip().encode()).hexdigest()
    assert run.header["environment"] == machine.environment(CPU) | dict(threads=1)
    assert run.header["settings"]["tokenizer"] == "gpt2-bytes"
    assert run.header["parameters"] == 3_318_592 + (47 * 64 if stage >= "s06" else 0)
    logged = {name for name, first in (("norm", "s07"), ("lr", "s08")) if stage >= first}
    columns = {"kind", "step", "loss", "dt", "tokens", "memory", "meter"} | logged
    assert all(set(step) == columns for step in run.steps) and figures(run, "step") == [0, 1, 2, 3, 4]
    assert figures(run, "tokens") == [64 * (4 if stage >= "s11" else 1)] * 5
    assert all(map(math.isfinite, figures(run, "loss"))) and run.steps[-1]["loss"] < run.steps[0]["loss"]
    assert run.end == dict(kind="summary", **summarize(run.steps), sdpa="flash" if stage >= "s05" else None)
    last = run.out.splitlines()[-1]
    assert last.startswith(f"median dt {run.end['dt_ms']:.2f}ms") and "over 1 step |" in last


@pytest.mark.parametrize("stage, flags, launch", [("s01", FLOAT32, ()), ("s12", SMALL, TWO_RANKS)])
def test_eval_is_the_held_out_loss_of_the_weights(stages, tmp_path, stage, flags, launch):
    (path := tmp_path / "a.txt").write_text(text := "To be, or not to be, that is the question: " * 50)
    run = stages.now(stage, *flags, "--data", path, "--eval", "--save", tmp_path / "w", launch=launch)
    attention = definitions(stage, "attention", math=math, torch=torch, F=F)["attention"]
    ids = np.array(byte_tokenizer().encode_ordinary(text))
    loss = evaluate(load(str(tmp_path / "w"), attention)[0], ids[len(ids) * 9 // 10 :])
    assert run.end["eval"] == pytest.approx(loss, rel=1e-5) and f"held-out loss {loss:.4f}\n" in run.out


def test_profile_lists_the_operations_of_the_last_step(stages):
    run = stages.now("s10", *FLOAT32, "--profile")
    own, total, calls = run.end["profile"]["aten::mm"]
    # the head's forward, and two gradients of each of nine matrices; those with a bias are aten::addmm in the forward
    assert calls == 1 + 2 * 9 and 0 < own <= total < 1e3 * run.steps[-1]["dt"]
    assert run.end["profile"]["Optimizer.step#AdamW.step"][1] >= run.end["profile"]["aten::_fused_adamw_"][1] > 0
    assert f"{own:9.2f} ms in {calls:4d} x aten::mm\n" in run.out


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage >= "s08"])
@pytest.mark.parametrize("steps", [1, 2, 9, 10, 11, 20, 50, 1000])
def test_learning_rate_equals_torchs_warmup_and_cosine(stage, steps):
    given = dict(args=argparse.Namespace(steps=steps), math=math)
    get_lr = definitions(stage, "max_lr", "min_lr", "warmup_steps", "get_lr", **given)["get_lr"]
    optimizer, warmup_steps = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=6e-4), max(1, steps // 10)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup_steps, 1.0, warmup_steps - 1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warmup_steps), eta_min=6e-5)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [warmup_steps])
    for step in range(steps):
        assert get_lr(step) == pytest.approx(schedule.get_last_lr()[0], rel=1e-6), step
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage >= "s09"])
def test_weight_decay_is_on_matrices_only(stage, monkeypatch):
    monkeypatch.setattr(GPT, "to_empty", lambda self, device: self)  # stays on the meta device: shapes, no memory
    model = GPT(GPTConfig(), None)
    groups = definitions(stage, "groups", model=model)["groups"]
    sizes = {group["weight_decay"]: [p.numel() for p in group["params"]] for group in groups}
    assert {decay: (len(n), sum(n)) for decay, n in sizes.items()} == {0.1: (50, 124_318_464), 0.0: (98, 121_344)}
    names = {id(p): name for name, p in model.named_parameters()}
    assert {id(p) for group in groups for p in group["params"]} == names.keys()
    assert all(".ln_" in names[id(p)] or names[id(p)].endswith("bias") for p in groups[1]["params"])


@pytest.mark.parametrize("nodes", [1, 2])
def test_two_runs_at_once_are_two_nodes_or_apart(stages, nodes):
    with socket.socket() as probe:  # a free port for the rendezvous
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    node = (*AGENT, "--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}")
    launches = [(), ()] if nodes == 1 else [(*node, f"--node_rank={rank}") for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        runs = [*pool.map(lambda launch: stages.now("s12", *FLOAT32, launch=launch), launches)]
    if nodes == 2:  # each has a rank with LOCAL_RANK 0, but only one of them is rank 0
        silent = runs.pop()
        assert (silent.status, silent.out, silent.header) == (0, "", None)
    for run in runs:
        is_close(run, stages("s11", *FLOAT32), 1e-4)
        assert run.header["settings"]["world_size"] == nodes


def test_a_corpus_that_is_too_short_is_one_line(stages):
    (stages.folder / "a.txt").write_text("To be, or not to be")
    run = stages.now("s12", *FLOAT32, "--data", "a.txt")  # torch.distributed hooks exceptions, too
    assert (run.status, run.out, run.header, run.err.count("\n")) == (2, "", None, 1)
    assert run.err.startswith("error: a.txt has 17 tokens")


@pytest.mark.parametrize("stage, lines, launch", [("s05", 0, ()), ("s05", 1, ()), ("s12", 3, TWO_RANKS)])
def test_a_led_stage_takes_a_step_for_each_line(stages, stage, lines, launch):
    command = [sys.executable, *launch, STAGES[stage], *FLOAT32, "--led"]
    with process(command, stages.folder, stages.env, stdin=subprocess.PIPE) as child:
        out, err = child.communicate("\n" * lines, timeout=240)
    assert (child.returncode, err) == (0, "")
    written = [json.loads(line)["kind"] for line in out.splitlines()]
    assert written == ["header"] + ["step"] * lines + ["summary"] * (lines > 0)


ODD = ["run | :", "run >&-", "LC_ALL=C PYTHONUTF8=0 run", "PYTHONOPTIMIZE=2 run"]  # the last is python -OO
ODD += ["run >/dev/full"] * os.path.exists("/dev/full")


@pytest.mark.parametrize("how", ODD)
def test_lost_stdout_ascii_and_links_end_no_run(stages, tmp_path, how):
    (tmp_path / "link.py").symlink_to(STAGES["s05"])
    script = f'run() {{ "$0" link.py {" ".join(FLOAT32)} --save w --record r.jsonl; echo $? >status; }}; {how}'
    with process(["sh", "-c", script, sys.executable], tmp_path, stages.env) as child:
        assert child.communicate(timeout=240)[1] == ""
    header, *lines = report.read(tmp_path / "r.jsonl")
    assert ((tmp_path / "status").read_text(), header["stage"], len(lines)) == ("0\n", "s05_flash", 6)
    assert load(str(tmp_path / "w"), None)


@pytest.mark.parametrize("name, stage, nohup", [("SIGINT", "s05", 0), ("SIGHUP", "s01", 0), ("SIGTERM", "s12", 1)])
def test_a_signal_ends_a_run_with_its_weights_saved(stages, tmp_path, name, stage, nohup):
    def reaches(step):
        until = time.monotonic() + 120
        while not record.exists() or len(report.read(record)) <= step:
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.02)

    record, weights = tmp_path / "r.jsonl", tmp_path / "w"
    command = [sys.executable, STAGES[stage], *FLOAT32, "--steps", "100000", "--record", record, "--save", weights]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)  # a child inherits that
    with process(command, tmp_path, stages.env) as child:
        signal.signal(signal.SIGHUP, before)
        reaches(1)  # the second step is profiled
        if nohup:
            os.kill(child.pid, signal.SIGHUP)
            reaches(len(report.read(record)) + 5)
        os.kill(child.pid, getattr(signal, name))
        out, err = child.communicate(timeout=60)
    assert (child.returncode, report.read(record)[-1]["error"]) == (130, "interrupted")
    assert err.splitlines()[-1] == "error: interrupted" and "Traceback" not in err  # the profiler may warn before it
    assert out.endswith(f"saved to {weights}\n") and load(str(weights), None)
