"""The log of a stage: its clock, its lines, its record, what it tells the bench, and how a run ends."""

from harness import log, results
from harness.log import Record, StepLog, compile_cache, end_run, git_state  # before a fixture replaces one
from harness.machine import environment

import datetime
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError
from torch.autograd import DeviceType
from torch.nn import functional as F

from data import InputError

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
TOKENS_PER_STEP = 72_000
LOADER = SimpleNamespace(tokens=SimpleNamespace(corpus="ids.bin", tokenizer="gpt2"), world_size=1)
LOSS = torch.tensor(5.0)


class Clock:
    """Stands in for the module time, and for a device that works on its own. Tests let time pass."""

    def __init__(self):
        self.now = 100.0
        self.queued = 0.0  # seconds of work that the device was asked for and has not done yet

    def perf_counter(self):
        return self.now

    def synchronize(self):
        self.now += self.queued
        self.queued = 0.0


class Meter:
    """Stands in for machine's peak of memory, in bytes. Reading it is work for the process and the device."""

    def __init__(self, clock):
        self.clock = clock
        self.held = 1e9
        self.peak = self.held

    def use(self, nbytes):
        """Hold so many bytes for a moment."""
        self.peak = max(self.peak, nbytes)

    def peak_memory(self, device):
        self.clock.now += 70
        self.clock.queued += 30
        return self.peak, "peak RSS"

    def reset_peak_memory(self, device):
        self.clock.now += 70
        self.peak = self.held


class Model(torch.nn.Linear):
    """A model of 6 parameters that notes where its weights were written."""

    def __init__(self):
        super().__init__(2, 2)
        self.saved = []

    def save_pretrained(self, directory, tokenizer):
        self.saved.append((directory, tokenizer))


class SlowFile(io.StringIO):
    """A file, or a terminal, to which every write takes 50 seconds of a clock."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def write(self, text):
        self.clock.now += 50
        return super().write(text)


class FullDisk:
    """A file to which nothing can be written."""

    name = "r.jsonl"

    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch):
    """Put back what a StepLog changes in its process."""
    monkeypatch.setattr(StepLog, "current", None)
    handlers = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, handlers, strict=True):
        signal.signal(number, handler)
    if StepLog.current and StepLog.current.profiler:
        StepLog.current.profiler.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def exits_at_once(monkeypatch):
    """The statuses with which os._exit was called. It ends nothing."""
    statuses = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    monkeypatch.setattr(torch.cpu, "synchronize", clock.synchronize)
    monkeypatch.setattr(log.memory, "page_faults", lambda: int(clock.now))  # one in each second
    return clock


@pytest.fixture(autouse=True)
def meter(monkeypatch, clock):
    meter = Meter(clock)
    monkeypatch.setattr(log.machine, "peak_memory", meter.peak_memory)
    monkeypatch.setattr(log.machine, "reset_peak_memory", meter.reset_peak_memory)
    return meter


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    """What a header says about the machine and the code is the same everywhere."""
    monkeypatch.setattr(log.machine, "device_name", lambda device: "A CPU")
    monkeypatch.setattr(log.machine, "environment", lambda device: {"device": device.type, "tf32": False})
    rates = {"size": 2048, "peak": {"float32": 1e11, "bfloat16": 1e11}, "copy": 1e10}
    monkeypatch.setattr(log.rates, "measure", lambda device, amp_dtype: rates)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(log.memory, "variables", lambda: {"THP_MEM_ALLOC_ENABLE": "1"})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(log, "git_state", lambda folder: ("631ea59", True))
    monkeypatch.setattr(log.ladder, "code_sha256", lambda stage: f"the hash of {stage}")
    monkeypatch.setattr(log, "compile_cache", lambda: None)


def new_args(**changes):
    """The flags of a stage as parse_args returns them, but for these changes."""
    args = SimpleNamespace(
        stage="s05_flash",
        title="Stage 5 · flash: a title.",
        device=CPU,
        steps=7,
        batch_size=4,
        seq_len=32,
        size="tiny",
        seed=1337,
        lr=3e-4,
        data=None,
        amp_dtype=torch.bfloat16,
        compile=False,
        accum=2,
        eval=False,
        profile=False,
        record=None,
        save=None,
        worker=False,
        shape={"vocab_size": 50257, "n_layer": 2, "n_head": 2, "n_embd": 64},
        fallbacks={"compile": "left out, no compiler"},
    )
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def new_log(model=None, **changes):
    """A StepLog of a run of 7 steps on a CPU, but for these changes of its flags."""
    return StepLog(new_args(**changes), model or Model(), LOADER, tokens_per_step=TOKENS_PER_STEP)


def take_steps(steplog, clock, count):
    """Take steps of 1, 4, 9, ... seconds, whose mean is not their median, with losses of 5.5, 5.0, ..."""
    for step in range(count):
        clock.now += (step + 1) ** 2
        steplog.step(torch.tensor(5.5 - 0.5 * step), norm=1.23456, lr=torch.tensor(3e-4))


def lines_of(record):
    """The lines of a record, as dicts."""
    return [json.loads(line) for line in Path(record).read_text(encoding="utf-8").splitlines()]


def test_a_step_lasts_from_the_end_of_the_one_before_to_its_own(clock):
    steplog = new_log(steps=3)
    take_steps(steplog, clock, 3)
    assert [step["dt"] for step in steplog.steps] == [1, 4, 9]


def test_a_step_includes_what_the_device_was_asked_for_in_it_and_nothing_else(clock):
    clock.queued = 8  # the weights are on their way to the device
    steplog = new_log(steps=2)
    clock.now += 2
    clock.queued = 3
    steplog.step(LOSS)  # the meter leaves work to the device
    clock.now += 4
    steplog.step(LOSS)
    assert [step["dt"] for step in steplog.steps] == [5, 4]


def test_the_logs_own_work_is_not_counted(clock, monkeypatch):
    monkeypatch.setattr(sys, "stdout", SlowFile(clock))
    steplog = new_log()
    steplog.record.file = SlowFile(clock)
    take_steps(steplog, clock, 7)
    assert [step["dt"] for step in steplog.steps] == [1, 4, 9, 16, 25, 36, 49]


def test_the_device_that_is_waited_for_is_that_of_the_run(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    log.synchronize(torch.device("mps"))
    assert waited == ["mps"]


def test_the_lines_of_a_run(clock, meter, capsys):
    steplog = new_log()
    for step in range(7):
        clock.now += (step + 1) ** 2
        meter.use(1.25e9)
        steplog.step(torch.tensor(5.97412 - step), norm=1.23456, lr=torch.tensor(3e-4))
    steplog.finish(None)
    assert capsys.readouterr().out == (
        "Stage 5 · flash: a title.\n"
        "tiny, 6 parameters | B 4, T 32, 72,000 tokens per step | ids.bin, gpt2 | A CPU, threads 3\n"
        "step    0 | loss 5.9741 | norm 1.2346 | lr 3.0000e-04 | dt 1000.00ms | tok/sec 72,000\n"
        "step    1 | loss 4.9741 | norm 1.2346 | lr 3.0000e-04 | dt 4000.00ms | tok/sec 18,000\n"
        "step    2 | loss 3.9741 | norm 1.2346 | lr 3.0000e-04 | dt 9000.00ms | tok/sec 8,000\n"
        "step    3 | loss 2.9741 | norm 1.2346 | lr 3.0000e-04 | dt 16000.00ms | tok/sec 4,500\n"
        "step    4 | loss 1.9741 | norm 1.2346 | lr 3.0000e-04 | dt 25000.00ms | tok/sec 2,880\n"
        "step    5 | loss 0.9741 | norm 1.2346 | lr 3.0000e-04 | dt 36000.00ms | tok/sec 2,000\n"
        "step    6 | loss -0.0259 | norm 1.2346 | lr 3.0000e-04 | dt 49000.00ms | tok/sec 1,469\n"
        "median dt 36000.00ms [30500.00, 42500.00] over 3 steps | tok/sec 2,000"
        " | memory 1.25 GB (peak RSS) | warm-up 30.0s\n"
    )


def test_a_stage_that_logs_no_figures_has_shorter_lines(clock, capsys):
    steplog = new_log()
    capsys.readouterr()
    clock.now += 0.125
    steplog.step(LOSS)
    assert capsys.readouterr().out == "step    0 | loss 5.0000 | dt 125.00ms | tok/sec 576,000\n"


@pytest.mark.parametrize(
    "steps, line",
    [
        (
            1,
            "median dt 1000.00ms [1000.00, 1000.00] over the last step alone, warm-up included"
            " | tok/sec 72,000 | memory 2.00 GB (peak RSS) | warm-up 1.0s",
        ),
        (
            4,
            "median dt 16000.00ms [16000.00, 16000.00] over the last step alone, warm-up included"
            " | tok/sec 4,500 | memory 2.00 GB (peak RSS) | warm-up 30.0s",
        ),
        (
            5,
            "median dt 25000.00ms [25000.00, 25000.00] over 1 step"
            " | tok/sec 2,880 | memory 1.00 GB (peak RSS) | warm-up 30.0s",
        ),
    ],
)
def test_the_summary_of_a_short_run_is_its_last_step(clock, meter, capsys, steps, line):
    steplog = new_log(steps=steps)
    meter.use(2e9)
    take_steps(steplog, clock, steps)
    steplog.finish(None)
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_memory_is_the_peak_of_the_steps_after_the_warm_up(clock, meter, tmp_path):
    steplog = new_log(record=tmp_path / "r.jsonl")
    for nbytes in (9e9, 9e9, 9e9, 9e9, 1e9, 1.25e9, 1e9):
        meter.use(nbytes)
        clock.now += 1
        steplog.step(LOSS)
    steplog.finish(None)
    _, *steps, summary = lines_of(tmp_path / "r.jsonl")
    assert [step["memory"] for step in steps] == [9e9, 9e9, 9e9, 9e9, 1e9, 1.25e9, 1.25e9]
    assert summary["memory"] == 1.25e9


def test_the_header_of_a_record(tmp_path):
    new_log(record=tmp_path / "r.jsonl")
    (header,) = lines_of(tmp_path / "r.jsonl")
    started = datetime.datetime.fromisoformat(header.pop("started"))
    assert started.utcoffset() == datetime.timedelta(0)
    assert header == {
        "kind": "header",
        "stage": "s05_flash",
        "title": "Stage 5 · flash: a title.",
        "code": "the hash of s05_flash",
        "commit": "631ea59",
        "dirty": True,
        "settings": {
            "steps": 7,
            "batch_size": 4,
            "seq_len": 32,
            "size": "tiny",
            "seed": 1337,
            "lr": 3e-4,
            "data": None,
            "compile": False,
            "accum": 2,
            "world_size": 1,
            "amp_dtype": "bfloat16",
            "corpus": "ids.bin",
            "tokenizer": "gpt2",
            "memory_variables": {"THP_MEM_ALLOC_ENABLE": "1"},
        },
        "shape": {"vocab_size": 50257, "n_layer": 2, "n_head": 2, "n_embd": 64},
        "parameters": 6,
        "tokens_per_step": 72_000,
        "environment": {"device": "cpu", "tf32": False},
        "fallbacks": {"compile": "left out, no compiler"},
    }


def test_the_steps_and_the_summary_of_a_record(clock, tmp_path):
    steplog = new_log(record=tmp_path / "r.jsonl")
    take_steps(steplog, clock, 7)
    steplog.finish(None)
    _, *steps, summary = lines_of(tmp_path / "r.jsonl")
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4, 5, 6]
    assert steps[5] == {
        "kind": "step",
        "step": 5,
        "loss": 3.0,
        "norm": 1.23456,
        "lr": pytest.approx(3e-4),
        "dt": 36.0,
        "tokens": 72_000,
        "memory": 1e9,
        "meter": "peak RSS",
        "page_faults": 36,
    }
    assert summary == {
        "kind": "summary",
        "dt_ms": 36_000.0,
        "dt_q1_ms": 30_500.0,
        "dt_q3_ms": 42_500.0,
        "tok_per_sec": 2_000.0,
        "memory": 1e9,
        "meter": "peak RSS",
        "loss": 2.5,
        "counted": 3,
        "warmup_s": 30.0,
        "sdpa": None,
        "compile_cache": None,
    }


def test_results_reads_the_record_of_this_machine(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(log.machine, "environment", environment)
    steplog = new_log(record=tmp_path / "r.jsonl", steps=2)
    take_steps(steplog, clock, 2)
    steplog.finish(None)
    run = results.run_of(results.read(tmp_path / "r.jsonl"))
    assert run.header["stage"] == "s05_flash"
    assert len(run.steps) == 2
    assert run.ended


def test_an_infinite_figure_is_shown_and_is_null_in_the_record(clock, tmp_path, capsys):
    steplog = new_log(record=tmp_path / "r.jsonl")
    clock.now += 1
    steplog.step(LOSS, norm=torch.tensor(math.inf))  # as where float16 overflows
    assert " | norm inf | " in capsys.readouterr().out
    assert lines_of(tmp_path / "r.jsonl")[-1]["norm"] is None


def test_every_line_of_a_record_is_on_disk_at_once(clock, tmp_path):
    steplog = new_log(record=tmp_path / "r.jsonl")
    for count in (1, 2, 3):
        take_steps(steplog, clock, 1)
        assert len(lines_of(tmp_path / "r.jsonl")) == 1 + count


def test_the_other_ranks_print_and_record_nothing(monkeypatch, clock, tmp_path, capsys):
    monkeypatch.setenv("RANK", "1")
    model = Model()
    steplog = new_log(model, record=tmp_path / "r.jsonl", save=tmp_path / "w", steps=1)
    take_steps(steplog, clock, 1)
    steplog.finish(None)
    assert capsys.readouterr().out == ""
    assert model.saved == []
    assert os.listdir(tmp_path) == []


def test_save_writes_the_weights_at_the_end(clock, capsys):
    model = Model()
    steplog = new_log(model, save="w", steps=1)
    take_steps(steplog, clock, 1)
    assert model.saved == []
    steplog.finish(None)
    assert model.saved == [("w", "gpt2")]
    assert capsys.readouterr().out.endswith("saved to w\n")


class Wrapper(torch.nn.Module):
    """A module around another, which it keeps under a name of its own."""

    def __init__(self, name, model):
        super().__init__()
        setattr(self, name, model)


def test_the_model_is_taken_out_of_ddp_and_torch_compile():
    model = Model()
    compiled = Wrapper("_orig_mod", model)
    assert new_log(compiled).model is model
    assert new_log(Wrapper("module", model)).model is model
    assert new_log(Wrapper("module", compiled)).model is model


def test_eval_takes_the_held_out_loss(clock, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(log, "load_tokens", lambda source, split: (source, split))
    evaluated = []

    def evaluate(model, tokens):
        evaluated.append((model, tokens))
        return 5.25

    monkeypatch.setattr(log, "evaluate", evaluate)
    model = Model()
    steplog = new_log(model, eval=True, data="a.txt", record=tmp_path / "r.jsonl", steps=1)
    take_steps(steplog, clock, 1)
    assert evaluated == []
    steplog.finish(None)
    assert evaluated == [(model, ("a.txt", "val"))]
    assert lines_of(tmp_path / "r.jsonl")[-1]["eval"] == 5.25
    assert capsys.readouterr().out.endswith(" | warm-up 1.0s | held-out loss 5.2500\n")


def test_rank_0_alone_takes_the_held_out_loss(clock, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(log, "load_tokens", lambda source, split: pytest.fail("rank 1 loads it, too"))
    steplog = new_log(eval=True, steps=1)
    take_steps(steplog, clock, 1)
    steplog.finish(None)


class Bench:
    """A worker's stdin and stdout. Every line that it asks for takes the bench 50 seconds."""

    def __init__(self, clock, lines):
        self.clock = clock
        self.lines_left = lines
        self.stdout = io.StringIO()
        self.written_before = []  # what the worker had written each time that it asked

    def readline(self):
        self.clock.now += 50
        self.written_before.append(self.kinds())
        if self.lines_left == 0:
            return ""
        self.lines_left -= 1
        return "\n"

    def lines(self):
        return [json.loads(line) for line in self.stdout.getvalue().splitlines()]

    def kinds(self):
        return [line["kind"] for line in self.lines()]


@pytest.fixture
def new_bench(monkeypatch, clock):
    """new_bench(lines): a Bench in the place of stdin and stdout, which asks for so many steps."""

    def new_bench(lines):
        bench = Bench(clock, lines)
        monkeypatch.setattr(sys, "stdin", bench)
        monkeypatch.setattr(sys, "stdout", bench.stdout)
        return bench

    return new_bench


def test_a_worker_takes_a_step_for_each_line(clock, new_bench):
    bench = new_bench(lines=2)
    steplog = new_log(worker=True, steps=2)
    take_steps(steplog, clock, 2)
    steplog.finish(None)
    assert bench.kinds() == ["header", "step", "step", "summary"]
    _, first, second, _ = bench.lines()
    assert (first["dt"], second["dt"]) == (1, 4)  # the waiting does not count
    # and the summary waits until stdin is closed
    assert bench.written_before == [["header"], ["header", "step"], ["header", "step", "step"]]


def test_a_worker_that_is_to_stop_early_ends_with_its_summary(clock, new_bench):
    bench = new_bench(lines=1)
    steplog = new_log(worker=True, steps=24)
    with pytest.raises(SystemExit) as ending:
        take_steps(steplog, clock, 24)
    assert ending.value.code is None
    assert bench.kinds() == ["header", "step", "summary"]


def test_a_worker_that_is_asked_for_nothing_has_no_summary(new_bench):
    bench = new_bench(lines=0)
    with pytest.raises(SystemExit) as ending:
        new_log(worker=True)
    assert ending.value.code is None
    assert bench.kinds() == ["header"]


def test_a_worker_saves_nothing(clock, new_bench):
    new_bench(lines=1)
    model = Model()
    steplog = new_log(model, worker=True, save="w", steps=1)
    take_steps(steplog, clock, 1)
    steplog.finish(None)
    assert model.saved == []


def test_a_run_without_the_bench_asks_nobody(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert Record(new_args()).next_step_wanted()


@pytest.fixture
def group(monkeypatch):
    """A group of torch.distributed: `word` is what rank 0 sends to the others, `sent` what this rank sent."""
    group = SimpleNamespace(word=None, sent=[], left=False)

    def broadcast(answer, source):
        assert source == 0
        group.sent.append(answer.item())
        if group.word is not None:
            answer.fill_(group.word)

    def destroy_process_group():
        group.left = True

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(dist, "destroy_process_group", destroy_process_group)
    return group


@pytest.mark.parametrize("lines, word", [(1, 1), (0, 0)])
def test_rank_0_tells_the_other_ranks_what_the_bench_wants(new_bench, group, lines, word):
    new_bench(lines)
    assert Record(new_args(worker=True)).next_step_wanted() == bool(word)
    assert group.sent == [word]


@pytest.mark.parametrize("word", [1, 0])
def test_another_rank_does_as_rank_0_says(monkeypatch, group, word):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "stdin", None)  # only rank 0 has the bench at the other end
    group.word = word
    assert Record(new_args(worker=True)).next_step_wanted() == bool(word)


def test_a_worker_that_stops_leaves_its_group(new_bench, group):
    new_bench(lines=0)
    with pytest.raises(SystemExit):
        new_log(worker=True)
    assert group.left  # else the group's threads could abort the exit


def test_profile_lists_the_operations_of_the_last_step(clock, tmp_path, capsys):
    matrix = torch.ones(8, 8)
    steplog = new_log(profile=True, steps=2, record=tmp_path / "r.jsonl")
    matrix.exp()
    clock.now += 1
    steplog.step(LOSS)
    for _ in range(3):
        matrix @ matrix
    clock.now += 1
    steplog.step(LOSS)
    steplog.finish(None)
    profile = lines_of(tmp_path / "r.jsonl")[-1]["profile"]
    own_ms, total_ms, calls = profile["aten::mm"]
    assert calls == 3
    assert 0 < own_ms <= total_ms
    assert "aten::exp" not in profile
    times = [own_ms for own_ms, _, _ in profile.values()]
    assert times == sorted(times, reverse=True)
    assert f"{own_ms:9.2f} ms in    3 x aten::mm\n" in capsys.readouterr().out


def test_profile_counts_what_adamw_calls_with_the_optimizer(clock, tmp_path):
    parameter = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([parameter])
    steplog = new_log(profile=True, steps=1, record=tmp_path / "r.jsonl")
    parameter.grad = torch.ones(8)
    optimizer.step()
    clock.now += 1
    steplog.step(LOSS)
    steplog.finish(None)
    summary = lines_of(tmp_path / "r.jsonl")[-1]
    assert summary["profile"]["aten::div"][0] > 0
    assert summary["parts"]["optimizer"] > summary["profile"]["aten::div"][0]
    assert "softmax and mask" not in summary["parts"]
    assert sum(summary["parts"].values()) == pytest.approx(1000)


def test_profile_ends_with_the_parts_of_the_step_beside_what_arithmetic_says(clock, tmp_path, capsys):
    matrix = torch.ones(8, 8)
    steplog = new_log(stage="s01_baseline", profile=True, steps=1, record=tmp_path / "r.jsonl")
    matrix @ matrix
    clock.now += 1.5
    steplog.step(LOSS)
    steplog.finish(None)
    lines = capsys.readouterr().out.splitlines()
    summary = lines_of(tmp_path / "r.jsonl")[-1]
    matmuls_ms = summary["parts"]["matmuls"]
    assert summary["rates"] == {"size": 2048, "peak": {"float32": 1e11, "bfloat16": 1e11}, "copy": 1e10}
    assert lines[-4] == " measured predicted"
    # 4 x 32 tokens x 6 x (12 x 2 x 64^2 + 50257 x 64) = 2.546 GFLOP at 0.1 TFLOP/s
    assert lines[-3] == f"{matmuls_ms:9.2f}     25.46 matmuls"
    assert lines[-2].endswith("the rest")
    assert lines[-1].startswith("  1500.00")
    assert lines[-1].endswith("the step")


def test_without_profile_none_is_recorded(clock, tmp_path):
    steplog = new_log(steps=1, record=tmp_path / "r.jsonl")
    take_steps(steplog, clock, 1)
    steplog.finish(None)
    assert "profile" not in lines_of(tmp_path / "r.jsonl")[-1]


class FakeProfiler:
    """Stands in for torch.profiler.profile on a card: events with times of the CPU and the device, in us.

    As there, the time of a kernel is told twice: with the operation that started it, and with the kernel itself.
    """

    def __init__(self, activities, acc_events):
        pass

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        pass

    def events(self):
        slow_on_cpu = SimpleNamespace(
            name="aten::add",
            cpu_parent=None,
            device_type=DeviceType.CPU,
            self_cpu_time_total=9_000,
            cpu_time_total=9_000,
            self_device_time_total=1_000,
            device_time_total=1_500,
        )
        kernel = SimpleNamespace(
            name="sm90_xmma_gemm_f32f32",
            cpu_parent=None,
            device_type=DeviceType.CUDA,
            self_cpu_time_total=0,
            cpu_time_total=0,
            self_device_time_total=4_000,
            device_time_total=4_000,
        )
        slow_on_card = SimpleNamespace(
            name="aten::mm",
            cpu_parent=None,
            device_type=DeviceType.CPU,
            self_cpu_time_total=10,
            cpu_time_total=10,
            self_device_time_total=2_000,
            device_time_total=3_000,
        )
        return [slow_on_cpu, kernel, slow_on_card, slow_on_card]


def test_on_a_card_its_own_times_and_its_reserved_memory_count(clock, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2_000_000)
    monkeypatch.setattr(torch.profiler, "profile", FakeProfiler)
    steplog = new_log(device=CUDA, profile=True, steps=1, record=tmp_path / "r.jsonl")
    clock.now += 1
    steplog.step(LOSS)
    steplog.finish(None)
    summary = lines_of(tmp_path / "r.jsonl")[-1]
    assert summary["reserved"] == 2_000_000
    assert summary["profile"] == {"aten::mm": [4, 6, 2], "aten::add": [1, 1.5, 1]}
    assert "     4.00 ms in    2 x aten::mm\n     1.00 ms in    1 x aten::add\n" in capsys.readouterr().out


@pytest.fixture
def card(monkeypatch, clock):
    """A card whose clock is read in 70 seconds, and that is one degree warmer each time. Notes who is asked."""
    card = SimpleNamespace(asked=[])

    def card_state(device):
        card.asked.append(device)
        clock.now += 70
        return {"temperature": 40 + len(card.asked)}

    monkeypatch.setattr(log.machine, "card_state", card_state)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2_000_000)
    monkeypatch.setattr(torch.profiler, "profile", FakeProfiler)
    return card


def test_the_state_of_a_card_is_noted_around_the_counted_steps_and_outside_of_their_clocks(clock, card, tmp_path):
    asked_before = []
    steplog = new_log(device=CUDA, record=tmp_path / "r.jsonl")
    for _ in range(7):
        asked_before.append(len(card.asked))
        clock.now += 4
        steplog.step(LOSS)
    steplog.finish(None)
    assert asked_before == [0, 0, 0, 0, 1, 1, 1]
    assert card.asked == [CUDA, CUDA]
    _, *steps, summary = lines_of(tmp_path / "r.jsonl")
    assert [step["dt"] for step in steps] == [4] * 7
    assert summary["card"] == {"start": {"temperature": 41}, "end": {"temperature": 42}}


def test_a_worker_notes_the_end_of_its_steps_before_it_waits_for_the_bench(clock, card, new_bench):
    bench = new_bench(lines=5)
    asked_before = []
    readline = bench.readline

    def noted_readline():
        asked_before.append(len(card.asked))
        return readline()

    bench.readline = noted_readline
    steplog = new_log(device=CUDA, worker=True, steps=5)
    take_steps(steplog, clock, 5)
    steplog.finish(None)
    assert asked_before == [0, 0, 0, 0, 1, 2]


def test_no_card_is_asked_where_nobody_reads_it(clock, card, monkeypatch, tmp_path):
    for changes in ({"device": CUDA}, {"record": tmp_path / "cpu.jsonl"}):
        steplog = new_log(**changes)
        take_steps(steplog, clock, 7)
        steplog.finish(None)
    monkeypatch.setenv("RANK", "1")
    steplog = new_log(device=CUDA, record=tmp_path / "rank_1.jsonl")
    take_steps(steplog, clock, 7)
    steplog.finish(None)
    assert card.asked == []
    assert "card" not in lines_of(tmp_path / "cpu.jsonl")[-1]


def test_a_run_without_a_counted_step_has_no_card(clock, card, tmp_path):
    steplog = new_log(device=CUDA, steps=3, record=tmp_path / "r.jsonl")
    take_steps(steplog, clock, 3)
    steplog.finish(None)
    assert "card" not in lines_of(tmp_path / "r.jsonl")[-1]


@pytest.mark.parametrize(
    "counted, word",
    [
        ({}, None),
        ({"fxgraph_cache_hit": 2}, "hit"),
        ({"fxgraph_cache_miss": 2}, "miss"),
        ({"fxgraph_cache_hit": 1, "fxgraph_cache_miss": 1}, "miss"),  # one of the two was compiled
    ],
)
def test_inductor_counts_whether_its_cache_had_the_graphs(monkeypatch, counted, word):
    monkeypatch.setitem(torch._dynamo.utils.counters, "inductor", Counter(counted))
    assert compile_cache() == word


def test_without_torch_compile_there_is_no_word_of_its_cache(monkeypatch):
    monkeypatch.setitem(torch._dynamo.utils.counters, "inductor", Counter(fxgraph_cache_hit=2))
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert compile_cache() is None


def test_the_record_says_whether_the_graphs_were_in_the_cache(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(log, "compile_cache", lambda: "hit")
    steplog = new_log(steps=1, record=tmp_path / "r.jsonl")
    take_steps(steplog, clock, 1)
    steplog.finish(None)
    assert lines_of(tmp_path / "r.jsonl")[-1]["compile_cache"] == "hit"


def test_the_record_names_the_attention_kernel_that_ran(clock, tmp_path):
    q = torch.ones(1, 1, 8, 8)
    steplog = new_log(steps=5, record=tmp_path / "r.jsonl")
    for _ in range(5):
        clock.now += 1
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        steplog.step(LOSS)
    steplog.finish(None)
    assert lines_of(tmp_path / "r.jsonl")[-1]["sdpa"] == "flash"


@pytest.mark.parametrize(
    "operation, kernel",
    [
        ("aten::_scaled_dot_product_flash_attention", "flash"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "flash"),
        ("aten::_scaled_dot_product_cudnn_attention", "cudnn"),
        ("aten::_scaled_dot_product_efficient_attention", "efficient"),
        ("aten::_scaled_dot_product_attention_math", "math"),
        ("aten::_scaled_dot_product_attention_math_for_mps", "math"),
        ("aten::softmax", None),
    ],
)
def test_the_kernel_is_told_by_the_operation_that_called_it(clock, tmp_path, operation, kernel):
    steplog = new_log(steps=1, record=tmp_path / "r.jsonl")
    take_steps(steplog, clock, 1)
    steplog.profile = {"aten::scaled_dot_product_attention": (1.0, 1.0, 4), operation: (1.0, 1.0, 4)}
    steplog.finish(None)
    assert lines_of(tmp_path / "r.jsonl")[-1]["sdpa"] == kernel


def test_no_step_that_counts_is_slowed_by_the_profiler(clock, tmp_path):
    profiled = []
    steplog = new_log(record=tmp_path / "r.jsonl")
    for _ in range(7):
        profiled.append(steplog.profiler is not None)
        clock.now += 1
        steplog.step(LOSS)
    assert profiled == [False, True, False, False, False, False, False]


@pytest.mark.parametrize("steps, recorded", [(4, True), (7, False)])
def test_no_step_is_profiled_where_all_count_or_nobody_reads_it(clock, tmp_path, steps, recorded):
    steplog = new_log(steps=steps, record=tmp_path / "r.jsonl" if recorded else None)
    take_steps(steplog, clock, 1)
    assert steplog.profiler is None


def end(args, error):
    """End a run by an exception, as sys.excepthook of the stage does. Returns the exit status."""
    with pytest.raises(SystemExit) as ending:
        end_run(args, type(error), error, None)
    return ending.value.code


def inductor(graph, inputs):
    """Stands for the backend of torch.compile, which is known by its name."""


INTERRUPTED = KeyboardInterrupt()
WRONG_INPUT = InputError("a.txt is empty: name another\nmore")
NOT_FINITE = log.LossNotFinite("the loss is nan at step 3: try another --seed")
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
NO_HEADER = InductorError(RuntimeError("no Python.h"), None)
NO_COMPILER = BackendCompilerFailed(inductor, ValueError("no g++"), None)
RANK_LEFT = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4021")
RANK_KILLED = RuntimeError("Read error [127.0.0.1]:4021: Connection reset by peer")
COMPILE_FAILED = "torch.compile failed ({}): fix the compiler, or pass --no-compile"


@pytest.mark.parametrize(
    "error, reason, status, message",
    [
        (INTERRUPTED, "interrupted", 130, "interrupted"),
        (WRONG_INPUT, "bad-input", 2, "a.txt is empty: name another"),
        (NOT_FINITE, "loss-not-finite", 1, "the loss is nan at step 3: try another --seed"),
        (NO_MEMORY, "out-of-memory", 1, "out of memory at batch size 4: try --batch-size 2"),
        (NO_HEADER, "compile-failed", 1, COMPILE_FAILED.format("RuntimeError: no Python.h")),
        (NO_COMPILER, "compile-failed", 1, COMPILE_FAILED.format("ValueError: no g++")),
        (RANK_LEFT, "another-rank-ended", 1, "another rank has ended: its own message says why"),
        (RANK_KILLED, "another-rank-ended", 1, "another rank has ended: its own message says why"),
    ],
    ids=["ctrl-c", "input", "nan", "memory", "no header", "no compiler", "rank left", "rank killed"],
)
def test_an_error_is_one_line_and_a_line_of_the_record(tmp_path, capfd, error, reason, status, message):
    steplog = new_log(record=tmp_path / "r.jsonl")
    assert end(steplog.args, error) == status
    assert capfd.readouterr().err == f"error: {message}\n"
    assert lines_of(tmp_path / "r.jsonl")[-1] == {"kind": "error", "reason": reason, "error": message}


@pytest.mark.parametrize("error", [INTERRUPTED, RANK_LEFT, RANK_KILLED], ids=repr)
def test_a_run_that_is_cut_short_saves_its_weights(clock, capfd, error):
    model = Model()
    steplog = new_log(model, save="w")
    take_steps(steplog, clock, 1)
    end(steplog.args, error)
    assert model.saved == [("w", "gpt2")]
    assert capfd.readouterr().out.endswith("saved to w\n")


@pytest.mark.parametrize("error", [WRONG_INPUT, NOT_FINITE, NO_MEMORY, NO_HEADER, NO_COMPILER], ids=repr)
def test_a_run_that_fails_saves_no_weights(clock, error):
    model = Model()
    steplog = new_log(model, save="w")
    take_steps(steplog, clock, 1)
    end(steplog.args, error)
    assert model.saved == []


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL error\nCuda failure 2 'out of memory'"),
        BackendCompilerFailed(inductor, torch.OutOfMemoryError("CUDA out of memory"), None),
    ],
    ids=["Python", "CUDA", "CPU", "cuBLAS", "NCCL", "in the compiler"],
)
@pytest.mark.parametrize(
    "batch_size, remedy",
    [(16, "--batch-size 8"), (3, "--batch-size 1"), (1, "a smaller --seq-len or --size")],
)
def test_out_of_memory_names_a_remedy(error, batch_size, remedy):
    ending = log.ending_of(error, batch_size)
    assert ending.reason == "out-of-memory"
    assert ending.message == f"out of memory at batch size {batch_size}: try {remedy}"


def test_an_unexpected_error_keeps_pythons_traceback(clock, tmp_path, capfd):
    model = Model()
    steplog = new_log(model, record=tmp_path / "r.jsonl", save="w")
    take_steps(steplog, clock, 1)
    try:
        {}["weights"]
    except KeyError as error:
        end_run(steplog.args, KeyError, error, error.__traceback__)  # Python then ends with status 1
    err = capfd.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("KeyError: 'weights'\n")
    assert lines_of(tmp_path / "r.jsonl")[-1] == {
        "kind": "error",
        "reason": "crashed",
        "error": "KeyError: 'weights'",
    }
    assert model.saved == []


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run(clock, tmp_path, capfd, loss):
    model = Model()
    steplog = new_log(model, record=tmp_path / "r.jsonl", save="w")
    take_steps(steplog, clock, 1)
    clock.now += 1
    with pytest.raises(log.LossNotFinite) as raised:
        steplog.step(torch.tensor(loss))
    assert end(steplog.args, raised.value) == 1
    message = f"the loss is {loss} at step 1: try another --seed or --amp-dtype"
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == f"step    1 | loss {loss:.4f} | dt 1000.00ms | tok/sec 72,000"
    assert err == f"error: {message}\n"
    _, _, step, error = lines_of(tmp_path / "r.jsonl")
    assert step["loss"] is None
    assert error == {"kind": "error", "reason": "loss-not-finite", "error": message}
    assert model.saved == []


def test_an_interrupt_before_the_first_step_saves_nothing(capfd):
    model = Model()
    steplog = new_log(model, save="w")
    assert end(steplog.args, KeyboardInterrupt()) == 130
    assert model.saved == []


def test_weights_that_can_not_be_saved_add_to_the_message(clock, monkeypatch, capfd):
    def full(directory, tokenizer):
        raise InputError("--save w can't be written: No space left on device; pass another directory")

    model = Model()
    monkeypatch.setattr(model, "save_pretrained", full)
    steplog = new_log(model, save="w")
    take_steps(steplog, clock, 1)
    assert end(steplog.args, KeyboardInterrupt()) == 130
    assert capfd.readouterr().err == (
        "error: interrupted; --save w can't be written: No space left on device; pass another directory\n"
    )


def test_ctrl_c_while_the_held_out_text_loads_is_one_line(monkeypatch, tmp_path, capfd):
    def interrupt(source, split):
        raise KeyboardInterrupt

    monkeypatch.setattr(log, "load_tokens", interrupt)
    args = new_args(eval=True, record=tmp_path / "r.jsonl")
    with pytest.raises(KeyboardInterrupt) as interrupted:
        StepLog(args, Model(), LOADER, tokens_per_step=TOKENS_PER_STEP)
    assert end(args, interrupted.value) == 130
    assert capfd.readouterr().err == "error: interrupted\n"
    assert lines_of(tmp_path / "r.jsonl") == [
        {"kind": "error", "reason": "interrupted", "error": "interrupted"},
    ]


def test_an_error_before_the_log_is_one_line(capfd):
    assert end(new_args(batch_size=None), InputError("a.txt is empty")) == 2
    assert capfd.readouterr() == ("", "error: a.txt is empty\n")


def test_the_bench_hears_of_an_error_before_the_log(capfd):
    assert end(new_args(worker=True), MemoryError()) == 1
    out, err = capfd.readouterr()
    message = "out of memory at batch size 4: try --batch-size 2"
    assert json.loads(out) == {"kind": "error", "reason": "out-of-memory", "error": message}
    assert err == f"error: {message}\n"


def test_an_error_ends_a_run_at_once_while_the_profiler_works(clock, tmp_path, exits_at_once):
    steplog = new_log(record=tmp_path / "r.jsonl")
    take_steps(steplog, clock, 1)  # the second one is profiled
    end(steplog.args, KeyboardInterrupt())
    assert exits_at_once == [130]  # torch would crash in an orderly exit


def test_an_error_ends_other_steps_in_order(clock, tmp_path, exits_at_once):
    steplog = new_log(record=tmp_path / "r.jsonl")
    take_steps(steplog, clock, 2)
    assert end(steplog.args, KeyboardInterrupt()) == 130
    assert exits_at_once == []


def test_a_record_on_a_full_disk_ends_the_run(tmp_path, capfd):
    steplog = new_log(record=tmp_path / "r.jsonl")
    steplog.record.file = FullDisk()
    with pytest.raises(InputError) as raised:
        steplog.step(LOSS)
    assert end(steplog.args, raised.value) == 2
    problem = "--record r.jsonl can't be written: No space left on device"
    assert capfd.readouterr().err == f"error: {problem}; name a file on another disk\n"


def test_a_worker_whose_bench_is_gone_says_so():
    record = Record(new_args(worker=True))
    record.file = FullDisk()
    with pytest.raises(InputError, match="a step can't be sent to the bench: .*; start the bench again"):
        record.write("step", step=0)


def test_a_reader_of_stdout_that_is_gone_costs_no_run(clock, monkeypatch, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        steplog = new_log(record=tmp_path / "r.jsonl", steps=1)
        take_steps(steplog, clock, 1)
        steplog.finish(None)
    assert [line["kind"] for line in lines_of(tmp_path / "r.jsonl")] == ["header", "step", "summary"]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_a_run_as_ctrl_c_does(number):
    signal.signal(number, signal.SIG_DFL)
    new_log()
    assert signal.getsignal(number) is signal.default_int_handler


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_that_is_ignored_stays_so(number):
    signal.signal(number, signal.SIG_IGN)  # by nohup, or for a shell's background job
    new_log()
    assert signal.getsignal(number) == signal.SIG_IGN


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_state_of_a_repository(monkeypatch, tmp_path):
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)  # a hook that runs these tests sets them
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)

    def git(*words):
        identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "model.py").write_text("one\n")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.jsonl").write_text("an old record\n")
    git("add", "model.py", "results")
    git("commit", "--message", "first")
    commit = git("rev-parse", "HEAD")
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "results.md").write_text("a page\n")  # git does not track it
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "results" / "x.jsonl").unlink()  # a new record takes its place
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "model.py").write_text("two\n")
    assert git_state(tmp_path) == (commit, True)
    unpacked = tmp_path / "unpacked"  # as from a zip: the repository around it knows nothing of it
    unpacked.mkdir()
    (unpacked / "model.py").write_text("one\n")
    assert git_state(unpacked) == (None, False)


def test_git_state_is_what_git_says(monkeypatch):
    def command_output(command):
        if "rev-parse" in command:
            return "631ea59"
        return " M model.py"

    monkeypatch.setattr(log.machine, "command_output", command_output)
    assert git_state("/a/folder") == ("631ea59", True)


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setattr(log.machine, "command_output", lambda command: "")
    assert git_state("/a/folder") == (None, False)
