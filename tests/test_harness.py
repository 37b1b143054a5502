"""Flags, the clock, the record, and how a run ends."""

import contextlib
import json
import math
import mmap
import os
import re
import signal
import sys
import time
import types

import numpy as np
import pytest
import torch
from conftest import FLOAT32, SMALL, process, step_lines

from data import InputError, TokenLoader, load_tokens
from stages import harness, machine, record
from stages.record import WARMUP, read_record, summarize, summary_line

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def parse(monkeypatch):
    """parse(flag, ...) -> what a stage gets from parse_args, and no trace of it afterwards."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(harness.StepLog, "current", None)
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()

    def parse(*flags, stage="s05_flash", env=()):
        for name, value in dict(env).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [f"stages/{stage}.py"])
        return harness.parse_args("Stage 0 · test: a title.\n\nA text.", [str(flag) for flag in flags])

    yield parse
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)


def end_of(run):
    """The exit status with which a script ends whose text is `run`."""
    try:
        run()
    except SystemExit as end:
        return end.code
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:
            return end.code
        return 1
    return 0


def is_one_error_line(text, *parts):
    lines = [line for line in text.splitlines() if "error:" in line]
    assert len(lines) == 1 and text.splitlines()[-1] == lines[0], text
    assert "Traceback" not in text
    for part in parts:
        assert str(part) in lines[0]


# --- flags


@pytest.mark.parametrize(
    "flags, parts",
    [
        *[([flag, value], [flag, value]) for flag in ("--steps", "--batch-size", "--accum") for value in ("0", "-3")],
        (["--seq-len", "0"], ["--seq-len", "0"]),
        (["--seq-len", "-1"], ["--seq-len", "-1"]),
        (["--seq-len", "1025"], ["--seq-len", "1025", "1024"]),
        (["--steps", "many"], ["--steps", "many"]),
        (["--steps", "1.5"], ["--steps", "1.5"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--seed", str(2**63)], ["--seed", 2**63]),
        (["--size", "gpt5"], ["--size", "gpt5", "gpt2-medium"]),
        (["--device", "tpu"], ["--device", "tpu", "cpu"]),
        (["--device", "cuda:x"], ["--device", "cuda:x"]),
        (["--amp-dtype", "int8"], ["--amp-dtype", "int8", "bfloat16"]),
        (["--step", "3"], ["--step"]),  # no abbreviations: --s may mean another thing tomorrow
        (["--batch", "3"], ["--batch"]),
        (["--flash"], ["--flash"]),
        (["text.txt"], ["text.txt"]),
        (["--data"], ["--data"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_a_bad_flag_is_one_line_that_names_it_and_exit_status_2(parse, capfd, flags, parts):
    with pytest.raises(SystemExit) as end:
        parse("--device", "cpu", *flags)
    assert end.value.code == 2
    said = capfd.readouterr()
    is_one_error_line(said.err, *parts)
    assert said.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_on_a_machine_without_it_is_refused(parse, capfd):
    for name in ("cuda", "cuda:1"):
        with pytest.raises(SystemExit) as end:
            parse("--device", name)
        assert end.value.code == 2
        is_one_error_line(capfd.readouterr().err, f"--device {name}", "cpu")


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(parse, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit) as end:
        parse("--device", "cuda:2")
    assert end.value.code == 2
    is_one_error_line(capfd.readouterr().err, "cuda:2", "cuda:0 to cuda:1")


def test_a_record_in_a_missing_folder_is_refused(parse, capfd, tmp_path):
    path = tmp_path / "missing" / "record.jsonl"
    with pytest.raises(SystemExit) as end:
        parse("--device", "cpu", "--record", path)
    assert end.value.code == 2
    is_one_error_line(capfd.readouterr().err, "--record", path)


def test_a_record_that_is_there_already_is_refused_and_left_as_it_is(parse, capfd, tmp_path):
    path = tmp_path / "record.jsonl"
    path.write_text("measured yesterday\n")
    for flag in (path, tmp_path):  # a folder is no file either
        with pytest.raises(SystemExit) as end:
            parse("--device", "cpu", "--record", flag)
        assert end.value.code == 2
        is_one_error_line(capfd.readouterr().err, "--record", flag)
    assert path.read_text() == "measured yesterday\n"


def test_flags_alone_leave_no_record(parse, tmp_path):
    assert parse("--device", "cpu", "--record", tmp_path / "new.jsonl").record == str(tmp_path / "new.jsonl")
    assert list(tmp_path.iterdir()) == []


TWO_RANKS = dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")


def test_micro_batches_that_do_not_divide_over_the_ranks_are_refused(parse, capfd):
    with pytest.raises(SystemExit) as end:
        parse("--device", "cpu", "--accum", "3", stage="s12_ddp", env=TWO_RANKS)
    assert end.value.code == 2
    is_one_error_line(capfd.readouterr().err, "--accum 3", "2 ranks")
    assert parse("--device", "cpu", "--accum", "6", stage="s12_ddp", env=TWO_RANKS).accum == 6


@pytest.mark.parametrize("ranks, accum", [(1, 2), (2, 2), (3, 3), (8, 8)])
def test_the_default_number_of_micro_batches_suits_the_ranks(parse, ranks, accum):
    args = parse("--device", "cpu", stage="s12_ddp", env=dict(WORLD_SIZE=str(ranks), RANK="0"))
    assert args.accum == accum


@pytest.mark.parametrize("stage", ["s01_baseline", "s11_accum"])
def test_a_stage_for_one_process_is_refused_under_torchrun(parse, capfd, stage):
    with pytest.raises(SystemExit) as end:
        parse("--device", "cpu", stage=stage, env=TWO_RANKS)
    assert end.value.code == 2
    is_one_error_line(capfd.readouterr().err, stage, "2", "s12_ddp")


def test_ranks_share_the_cores_where_torchrun_left_them_one_thread(parse, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 6)
    torch.set_num_threads(1)
    parse("--device", "cpu", stage="s12_ddp", env=TWO_RANKS)
    assert torch.get_num_threads() == 3


def test_a_cpu_trains_mini_by_default(parse):
    args = parse("--device", "cpu")
    assert (args.size, args.seq_len, args.batch_size, args.steps, args.accum) == ("micro", 1024, 1, 20, 2)
    assert args.device == CPU and args.seed == 1337 and args.data is None and args.record is None
    assert args.amp_dtype == machine.native_amp_dtype(CPU)
    assert args.compile == (machine.compile_problem(CPU) is None)
    assert (args.stage, args.title) == ("s05_flash", "Stage 0 · test: a title.")


def test_a_gpu_trains_gpt2_by_default(parse, monkeypatch):
    monkeypatch.setattr(machine, "find_device", lambda name: GPU)
    monkeypatch.setattr(machine, "fitting_batch_size", lambda device: 16)
    monkeypatch.setattr(machine, "native_amp_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(machine, "compile_problem", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    args = parse()
    assert (args.size, args.seq_len, args.batch_size, args.steps, args.accum) == ("gpt2", 1024, 16, 50, 4)
    assert args.amp_dtype == torch.bfloat16 and args.compile is True and args.fallbacks == {}


def test_flags_that_are_given_stand(parse):
    args = parse(*FLOAT32, "--accum", "6", "--seed", "7", "--data", "a.txt")
    assert (args.size, args.seq_len, args.batch_size, args.steps, args.accum) == ("tiny", 32, 2, 4, 6)
    assert args.amp_dtype == torch.float32 and args.compile is False and args.seed == 7 and args.data == "a.txt"
    assert args.fallbacks == {}  # by wish, not for want
    for name, dtype in harness.DTYPES.items():
        assert parse("--device", "cpu", "--amp-dtype", name).amp_dtype == dtype
    assert parse("--device", "cpu", "--compile").compile is True


def test_what_the_machine_lacks_is_told_from_the_stage_on_that_it_touches(parse, monkeypatch, capfd):
    monkeypatch.setattr(machine, "native_amp_dtype", lambda device: torch.float32)
    monkeypatch.setattr(machine, "compile_problem", lambda device: "no compiler found: install one")
    lines = {}
    for stage in ("s01_baseline", "s02_tf32", "s03_bf16", "s04_compile", "s12_ddp"):
        args = parse("--device", "cpu", stage=stage)
        assert args.amp_dtype == torch.float32 and args.compile is False
        assert set(args.fallbacks) == {"amp_dtype", "compile"}
        lines[stage[:3]] = capfd.readouterr().err.splitlines()
    assert {stage: len(told) for stage, told in lines.items()} == {"s01": 0, "s02": 0, "s03": 1, "s04": 2, "s12": 2}
    assert "float32" in lines["s04"][0] and "install one" in lines["s04"][1]


def test_the_help_names_every_flag_and_the_stage_from_which_it_has_an_effect(parse, capfd):
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    text = capfd.readouterr().out
    flags = "steps batch-size seq-len size device seed data amp-dtype compile no-compile accum record save"
    assert all(f"--{flag}" in text for flag in flags.split())
    assert all(f"from {stage} on" in text for stage in ("s03", "s04", "s11"))


@pytest.mark.parametrize(
    "content, parts",
    [
        (None, ["No such file"]),
        (b"", ["empty"]),
        (b"\xff\xfe\x00rubbish", ["UTF-8"]),
        (b"too short", ["tokens to train on", "65", "--batch-size"]),
    ],
    ids=["missing", "empty", "rubbish", "too short"],
)
def test_a_corpus_that_cannot_be_used_is_one_line_and_exit_status_2(parse, capfd, tmp_path, content, parts):
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content)

    def stage():
        args = parse(*SMALL, "--data", path)
        TokenLoader(load_tokens(args.data), args.batch_size, args.seq_len)

    assert end_of(stage) == 2
    is_one_error_line(capfd.readouterr().err, path.name, *parts)


# --- the machine


def test_a_16_bit_type_is_taken_only_where_the_hardware_multiplies_it(monkeypatch):
    def cuda(bf16, capability):
        # the question must be put without emulation, to which a T4 says yes
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        return machine.native_amp_dtype(GPU)

    assert cuda(True, (9, 0)) == torch.bfloat16
    assert cuda(False, (7, 5)) == torch.float16
    assert cuda(False, (7, 0)) == torch.float16
    assert cuda(False, (6, 1)) == torch.float32

    def mps(macos_14):
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *version: macos_14)
        return machine.native_amp_dtype(torch.device("mps"))

    assert mps(True) == torch.bfloat16
    assert mps(False) == torch.float16
    assert machine.native_amp_dtype(torch.device("xpu")) == torch.bfloat16

    def cpu(kind, system="linux", avx512_bf16=False, cpuinfo="", sysctl=""):
        monkeypatch.setattr(machine.platform, "machine", lambda: kind)
        monkeypatch.setattr(machine.sys, "platform", system)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
        monkeypatch.setattr(machine, "_cpuinfo", lambda: cpuinfo)
        monkeypatch.setattr(machine, "command_output", lambda command: sysctl)
        return machine.native_amp_dtype(CPU)

    assert cpu("x86_64", avx512_bf16=True) == torch.bfloat16
    assert cpu("AMD64", system="win32", avx512_bf16=True) == torch.bfloat16
    assert cpu("x86_64") == torch.float32
    assert cpu("aarch64", cpuinfo="Features: fp asimd bf16 i8mm") == torch.bfloat16
    assert cpu("aarch64", cpuinfo="Features: fp asimd") == torch.float32
    assert cpu("arm64", system="darwin", sysctl="1") == torch.bfloat16
    assert cpu("arm64", system="darwin", sysctl="0") == torch.float32


def test_compiling_is_a_problem_only_where_the_compiler_is_missing_and_the_remedy_is_told(monkeypatch):
    there = set()
    monkeypatch.setattr(machine.shutil, "which", lambda name: name if name in there else None)
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert "install" in machine.compile_problem(CPU)
    for compiler in ("g++", "clang++", "gcc", "clang", "cl"):
        there = {compiler}
        assert machine.compile_problem(CPU) is None
    there = {"icpx"}
    assert "install" in machine.compile_problem(CPU)
    monkeypatch.setenv("CXX", "icpx")
    assert machine.compile_problem(CPU) is None

    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (6, 1))
    assert "6.1" in machine.compile_problem(GPU) and "7.0" in machine.compile_problem(GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert machine.compile_problem(GPU) is None
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it raises ImportError
    assert "install triton" in machine.compile_problem(GPU)
    there = set()
    assert "no C++ compiler" in machine.compile_problem(GPU)


@pytest.mark.parametrize("gigabytes, batch_size", [(80, 16), (40, 8), (24, 4), (16, 4), (12, 2), (8, 1), (4, 1)])
def test_the_default_batch_size_fits_the_gpus_memory(monkeypatch, gigabytes, batch_size):
    properties = types.SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert machine.fitting_batch_size(GPU) == batch_size


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lets a process reset its peak")
def test_the_memory_peak_begins_again_after_a_reset():
    machine.reset_peak_memory(CPU)
    before, meter = machine.peak_memory(CPU)
    block = mmap.mmap(-1, 200_000_000)  # from the system itself, whatever malloc may keep
    block.write(bytes(200_000_000))
    after, _ = machine.peak_memory(CPU)
    block.close()
    assert meter == "peak RSS" and after - before > 150e6
    assert machine.peak_memory(CPU)[0] > after - 10e6  # the peak stays when the memory goes
    machine.reset_peak_memory(CPU)
    assert machine.peak_memory(CPU)[0] < after - 150e6


# --- figures


def steps_of(dts, memory=None, losses=None):
    memory, losses = memory or [10] * len(dts), losses or [1.0] * len(dts)
    return [
        dict(step=i, loss=loss, dt=dt, tokens=600, memory=m, meter="peak RSS")
        for i, (dt, m, loss) in enumerate(zip(dts, memory, losses, strict=True))
    ]


def test_the_figures_of_a_run_are_those_of_the_steps_after_the_warm_up():
    assert WARMUP == 3
    figures = summarize(
        steps_of([9, 2, 1, 0.5, 0.1, 0.4, 0.2, 0.3], [99, 98, 97, 5, 7, 6, 5, 4], [8, 7, 6, 5, 4, 3, 2, 1.5])
    )
    assert figures == dict(
        dt_ms=pytest.approx(300),
        dt_q1_ms=pytest.approx(200),
        dt_q3_ms=pytest.approx(400),
        tok_per_sec=pytest.approx(2000),
        memory=7,
        meter="peak RSS",
        loss=1.5,
        counted=5,
        warmup_s=pytest.approx(12),
    )


@pytest.mark.parametrize("dts, dt", [([4.0], 4.0), ([4.0, 0.5], 0.5), ([4.0, 3.0, 0.2], 0.2)])
def test_a_run_no_longer_than_its_warm_up_is_its_last_step(dts, dt):
    figures = summarize(steps_of(dts))
    assert figures["dt_ms"] == figures["dt_q1_ms"] == figures["dt_q3_ms"] == pytest.approx(1e3 * dt)
    assert figures["tok_per_sec"] == pytest.approx(600 / dt)
    assert figures["counted"] == 0 and figures["warmup_s"] == pytest.approx(sum(dts))
    assert "warm-up included" in summary_line(figures)


def test_figures_of_one_step_after_the_warm_up_and_of_no_memory_meter():
    figures = summarize(steps_of([1, 1, 1, 0.25]))
    assert figures["dt_ms"] == figures["dt_q1_ms"] == figures["dt_q3_ms"] == 250 and figures["counted"] == 1
    steps = [step | dict(memory=None, meter="no meter") for step in steps_of([1, 2])]
    assert summarize(steps)["memory"] is None
    assert "no meter" in summary_line(summarize(steps))


def test_the_summary_line_says_what_the_figures_say():
    line = summary_line(summarize(steps_of([9, 2, 1, 0.1, 0.2, 0.3], [1_250_000_000] * 6)))
    assert line == (
        "median dt 200.00ms [150.00, 250.00] over 3 steps | tok/sec 3,000 | memory 1.25 GB (peak RSS) | warm-up 12.0s"
    )


# --- the record


def test_a_record_is_read_though_its_last_line_was_cut(tmp_path):
    path = tmp_path / "record.jsonl"
    lines = [dict(kind="header", stage="s01_baseline"), *(dict(kind="step", step=i, loss=float(i)) for i in range(3))]
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    steps = [dict(step=i, loss=float(i)) for i in range(3)]
    path.write_text(whole)
    assert read_record(path) == (dict(stage="s01_baseline"), steps, None)
    last = json.dumps(lines[-1])
    for cut in range(1, len(last)):  # wherever the machine went down
        path.write_text(whole[: -cut - 1])
        assert read_record(path) == (dict(stage="s01_baseline"), steps[:2], None)
    path.write_bytes(whole.encode() + b'{"kind": "summary", "meter": "\xe2\x80')  # in the middle of a character
    assert read_record(path) == (dict(stage="s01_baseline"), steps, None)
    path.write_text(whole + '{"kind": "summary", "loss": 2.0}\n')
    assert read_record(path) == (dict(stage="s01_baseline"), steps, dict(loss=2.0))
    path.write_text(whole + '{"kind": "error", "error": "interrupted"}\n')
    assert read_record(path)[2] == dict(error="interrupted")


@pytest.mark.parametrize("text", ["", "\n\n", "rubbish\n", "[1, 2]\n", "3\n", '{"no": "kind"}\n', "null\n"])
def test_a_record_of_rubbish_is_a_run_that_did_not_begin(tmp_path, text):
    (tmp_path / "record.jsonl").write_text(text)
    assert read_record(tmp_path / "record.jsonl") == (None, [], None)


def test_a_record_that_is_missing_is_an_oserror(tmp_path):
    with pytest.raises(OSError):
        read_record(tmp_path / "missing.jsonl")


# --- the clock and the log


@pytest.fixture
def log(parse, monkeypatch, tmp_path):
    """log(flag, ...) -> a StepLog over a model of 6 parameters, with a clock that stands still until it is moved."""
    clock = types.SimpleNamespace(now=100.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(harness, "time", clock)
    corpus = tmp_path / "ids.bin"
    np.arange(1000, dtype=np.uint16).tofile(corpus)

    def make(*flags, rank=0, env=()):
        args = parse(*SMALL, *flags, env=env)
        loader = TokenLoader(load_tokens(corpus), 2, 32, rank, world_size=2 if rank else 1)
        log = harness.StepLog(args, torch.nn.Linear(2, 2), loader, tokens_per_step=64)
        log.clock = clock
        return log

    yield make
    current = harness.StepLog.current
    if current and current.record:
        current.record.close()


def test_a_step_lasts_from_the_end_of_the_one_before_and_the_logs_own_work_is_not_counted(log, monkeypatch, tmp_path):
    path = tmp_path / "record.jsonl"
    log = log("--record", path)
    write, reset, memory = log._write, machine.reset_peak_memory, machine.peak_memory

    def slowly(function):
        def slow(*args, **kwargs):
            log.clock.now += 50  # a slow disk
            return function(*args, **kwargs)

        return slow

    monkeypatch.setattr(log, "_write", slowly(write))
    monkeypatch.setattr(machine, "reset_peak_memory", slowly(reset))
    monkeypatch.setattr(machine, "peak_memory", slowly(memory))
    for dt in (4.0, 2.0, 1.0, 0.5):
        log.clock.now += dt
        log.step(torch.tensor(1.0))
    log.finish(None)
    header, steps, end = read_record(path)
    assert [step["dt"] for step in steps] == [4.0, 2.0, 1.0, 0.5]
    assert end["dt_ms"] == 500 and end["warmup_s"] == 7.0


def test_the_device_is_waited_for_before_either_reading_of_the_clock(log, monkeypatch):
    log = log()
    calls = []
    monkeypatch.setattr(log, "device", torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: calls.append("wait"))
    monkeypatch.setattr(log.clock, "perf_counter", lambda: calls.append("read") or 1.0 * len(calls))
    monkeypatch.setattr(machine, "peak_memory", lambda device: (1, "a meter"))
    log.step(torch.tensor(1.0))
    assert calls == ["wait", "read", "wait", "read"]


def test_a_step_is_a_line_and_the_run_ends_with_its_summary(log, capfd):
    log = log()
    first = capfd.readouterr().out.splitlines()
    assert first[0] == "Stage 0 · test: a title." and "6 parameters" in first[1] and "ids.bin, gpt2" in first[1]
    for _ in range(4):
        log.clock.now += 0.0625
        log.step(torch.tensor(5.97412), norm=torch.tensor(1.23454), lr=3e-4)
    log.finish(None)
    lines = capfd.readouterr().out.splitlines()
    assert lines[3] == "step    3 | loss 5.9741 | norm 1.2345 | lr 3.0000e-04 | dt 62.50ms | tok/sec 1,024"
    assert lines[4:] == [summary_line(summarize(log.steps))]
    assert len(lines) == 5


def test_rank_0_alone_prints_and_writes(log, capfd, tmp_path):
    log = log("--record", tmp_path / "record.jsonl", rank=1, env=dict(RANK="1"))
    for _ in range(4):
        log.clock.now += 1
        log.step(torch.tensor(1.0), norm=1.0)
    log.finish(None)
    said = capfd.readouterr()
    assert said.out == said.err == "" and not (tmp_path / "record.jsonl").exists()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_with_one_line_and_exit_status_1(log, capfd, tmp_path, loss):
    path = tmp_path / "record.jsonl"
    log = log("--record", path)

    def stage():
        for step_loss in (1.0, loss):
            log.clock.now += 1
            log.step(torch.tensor(step_loss))

    assert end_of(stage) == 1
    is_one_error_line(capfd.readouterr().err, str(loss), "step 1", "--seed", "--amp-dtype")
    header, steps, end = read_record(path)
    assert header and len(steps) == 2 and steps[0]["loss"] == 1.0
    assert list(end) == ["error"] and str(loss) in end["error"]


def test_a_record_on_a_full_disk_ends_the_run_with_one_line(log, capfd, tmp_path):
    log = log("--record", tmp_path / "record.jsonl")

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        flush = close = lambda self: None

    log.record.close()
    log.record = Full()

    def stage():
        log.clock.now += 1
        log.step(torch.tensor(1.0))

    assert end_of(stage) == 2
    is_one_error_line(capfd.readouterr().err, "record.jsonl", "No space left")


@pytest.mark.parametrize(
    "error, remedy",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "--batch-size 1"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            "--batch-size 1",
        ),
        (MemoryError(), "--batch-size 1"),
        (KeyboardInterrupt(), "interrupted"),
        (InputError("--data x is wrong: pass another"), "pass another"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_what_the_user_can_mend_is_one_line_with_the_remedy(log, capfd, tmp_path, error, remedy):
    log("--record", tmp_path / "record.jsonl")

    def stage():
        raise error

    status = {KeyboardInterrupt: 130, InputError: 2}.get(type(error), 1)
    assert end_of(stage) == status
    is_one_error_line(capfd.readouterr().err, remedy)
    assert remedy in read_record(tmp_path / "record.jsonl")[2]["error"]


def test_out_of_memory_at_batch_size_1_names_what_is_left_to_make_smaller(log, capfd):
    log("--batch-size", "1")

    def stage():
        raise MemoryError

    assert end_of(stage) == 1
    is_one_error_line(capfd.readouterr().err, "--seq-len", "--size")


def test_a_compiler_that_fails_names_the_way_without_it(log, capfd):
    from torch._inductor.exc import InductorError

    log()

    def stage():
        raise InductorError(RuntimeError("cc1plus: fatal error: Python.h: No such file"), None)

    assert end_of(stage) == 1
    is_one_error_line(capfd.readouterr().err, "--no-compile")


def test_a_bug_keeps_its_traceback_and_is_named_in_the_record(log, capfd, tmp_path):
    log("--record", tmp_path / "record.jsonl")

    def stage():
        raise KeyError("weights")

    assert end_of(stage) == 1
    assert "Traceback" in capfd.readouterr().err
    assert read_record(tmp_path / "record.jsonl")[2] == dict(error="KeyError: 'weights'")


# --- a real run


def test_the_record_of_a_run_has_its_header_its_steps_and_its_summary(stages):
    run = stages("s11", *FLOAT32)
    assert run.status == 0 and run.err == ""
    flags = ["steps", "batch_size", "seq_len", "size", "device", "seed", "data", "amp_dtype", "compile", "accum"]
    known = "stage title world_size parameters corpus tokenizer fallbacks commit dirty text_sha256 started environment"
    assert set(flags + known.split()) <= set(run.header)
    expected = dict(stage="s11_accum", size="tiny", steps=4, batch_size=2, seq_len=32, device="cpu", seed=1337)
    expected |= dict(data=None, amp_dtype="float32", compile=False, accum=4, world_size=1, parameters=3_321_600)
    expected |= dict(tokens_per_step=256, tokenizer="gpt2-bytes", text_sha256=record.text_sha256("s11_accum"))
    assert {key: run.header[key] for key in expected} == expected
    assert run.header["title"].startswith("Stage 11 · accum") and "language reference" in run.header["corpus"]
    environment = ["device_name", "threads", "python", "torch", "cuda", "cudnn", "driver", "cores", "system"]
    assert set(environment) <= set(run.header["environment"])
    assert run.header["environment"]["torch"] == torch.__version__

    assert [step["step"] for step in run.steps] == [0, 1, 2, 3]
    for step in run.steps:
        assert set(step) == {"step", "loss", "norm", "lr", "dt", "tokens", "memory", "meter"}
        assert step["dt"] > 0 and step["tokens"] == 256
    assert run.end == summarize(run.steps) | dict(sdpa=run.end["sdpa"])
    assert run.out.splitlines()[-1] == summary_line(run.end)
    assert len(step_lines(run)) == 4


def test_a_corpus_that_is_too_short_ends_a_real_run_before_anything_is_built(stages, tmp_path):
    (tmp_path / "short.txt").write_text("To be, or not to be")
    # s12, because torch.distributed puts a hook of its own over the harness's
    run = stages.now("s12", *SMALL, "--data", str(tmp_path / "short.txt"))
    assert run.status == 2 and run.out == "" and run.header is None
    assert len(run.err.splitlines()) == 1
    is_one_error_line(run.err, "short.txt", "17 tokens", "65", "--batch-size")


def test_an_interrupted_run_keeps_its_steps_and_says_so(stages, tmp_path):
    """Ctrl-C and a batch system's SIGTERM alike."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored: a child inherits that
    try:
        with contextlib.ExitStack() as stack:
            children = {}
            for number, stage in ((signal.SIGINT, "s05"), (signal.SIGTERM, "s12")):
                path = tmp_path / f"{number.name}.jsonl"
                command = stages.command(stage, *FLOAT32, "--steps", "100000", "--record", path)
                children[number] = (stack.enter_context(process(command, tmp_path, stages.env)), path)
            for number, (child, path) in children.items():
                until = time.monotonic() + 60
                while not path.exists() or len(read_record(path)[1]) < 5:
                    assert time.monotonic() < until and child.poll() is None
                    time.sleep(0.05)
                os.kill(child.pid, number)
            for child, path in children.values():
                out, err = child.communicate(timeout=30)
                assert child.returncode == 130
                assert len(err.splitlines()) == 1
                is_one_error_line(err, "interrupted")
                header, steps, end = read_record(path)
                assert header["steps"] == 100_000 and end == dict(error="interrupted")
                assert [step["step"] for step in steps] == list(range(len(steps))) and len(steps) >= 5
                shown = [float(loss) for loss in re.findall(r"^step .*? \| loss ([\d.]+)", out, re.M)]
                assert shown == [round(step["loss"], 4) for step in steps[: len(shown)]]
                assert len(steps) - len(shown) in (0, 1)  # it may stop between the record and the screen
    finally:
        signal.signal(signal.SIGINT, handler)
