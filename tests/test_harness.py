"""Flags, the machine, the clock, the record, and how a run ends."""

import harness
from harness import machine, report, summarize

import math
import mmap
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import FLOAT32, STAGES, definitions
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from data import InputError, TokenLoader, load_tokens
from model import GPT, GPTConfig, s01_bytes

CPU, MPS, GPU, GPU1 = (torch.device(name) for name in ("cpu", "mps", "cuda:0", "cuda:1"))
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def play(monkeypatch, capfd, tmp_path):
    """play(flag, ..., script=f): a stage on a CPU that does parse_args, StepLog, f(log) and finish; how that ended."""
    monkeypatch.setattr(sys, "excepthook", None)
    monkeypatch.setattr(harness.StepLog, "current", None)
    monkeypatch.setattr(harness, "time", SimpleNamespace(now=100.0, device=0, perf_counter=lambda: harness.time.now))
    (tmp_path / "ids.bin").write_bytes(bytes(2000))

    def play(*flags, script=None, stage="s05_flash", **env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [f"stages/{stage}.py"])
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # else argparse may name pytest
        args, status = None, 0
        try:
            args = harness.parse_args("Stage 0 · test: a title.\n\nA text.", ["--device", "cpu", *map(str, flags)])
            if script:
                loader = TokenLoader(load_tokens(args.data or tmp_path / "ids.bin"), 2, 32)
                log = harness.StepLog(args, torch.nn.Linear(2, 2), loader, tokens_per_step=64)
                script(log)
                log.finish(None)
        except SystemExit as end:
            status = end.code
        except BaseException:
            try:
                status = sys.excepthook(*sys.exc_info()) or 1
            except SystemExit as end:
                status = end.code
        out, err = capfd.readouterr()
        return SimpleNamespace(status=status, out=out, err=err, args=args)

    return play


def fails(run, status, *parts):
    """Hold that a run ended with this status and one line on stderr, which has these parts."""
    assert run.status == status and run.err.count("\n") == 1 and "error: " in run.err, run
    assert all(part in run.err for part in parts), run.err


WRONG = {f"{flag} {n}": "1 or more" for flag in ("--steps", "--batch-size", "--accum", "--seq-len") for n in (0, -3)}
WRONG |= {"--steps many": "whole number", "--steps 1.5": "whole number", "--seq-len 1025": "pass 1024 or less"}
WRONG |= {"--seed -1": "from 0", f"--seed {2**63}": "2**63", "--size gpt5": "gpt2-medium", "--device tpu": "cpu"}
WRONG |= {"--device cuda:x": "cpu", "--amp-dtype int8": "bfloat16", "--data": "expected one", "--flash": "unrecognized"}
WRONG |= {"--step 3": "unrecognized", "text.txt": "unrecognized", "--data {}/none.txt": "No such file"}
WRONG |= {"--record {}/no/r": "No such file", "--record {}/ids.bin": "exists", "--record {}": "name a new file"}
WRONG |= {"--save {}/w --record {}/w/r": "somewhere else", "--save {}/w --record {}/w": "somewhere else"}
WRONG |= {"--save {}": "another directory"}


@pytest.mark.parametrize("flags, remedy", WRONG.items(), ids=WRONG)
def test_a_wrong_flag_is_one_line_with_the_remedy(play, tmp_path, flags, remedy):
    words = [word.format(tmp_path) for word in flags.split()]
    run = play(*FLOAT32, *words, script=id)
    fails(run, 2, words[-1], remedy, words[0].strip("-"), "" if "none.txt" in flags else "s05_flash.py: error: ")
    assert run.out == "" and os.listdir(tmp_path) == ["ids.bin"] and os.stat(tmp_path / "ids.bin").st_size == 2000


@pytest.mark.parametrize("stage", STAGES)
def test_only_a_stage_with_ddp_takes_several_ranks(play, monkeypatch, stage):
    name, ddp = STAGES[stage].stem, "init_process_group" in STAGES[stage].read_text("utf-8")
    run = play(*FLOAT32, "--accum", "6", stage=name, RANK="0", WORLD_SIZE="2")
    if not ddp:
        return fails(run, 2, name, "torchrun started 2", "run s12_ddp")
    assert run.status == 0
    fails(play("--accum", "3", stage=name), 2, "--accum 3", "2 ranks")
    monkeypatch.setattr(machine, "find_device", lambda name: MPS)
    monkeypatch.setattr(machine, "fitting_batch_size", lambda device: 1)
    fails(play(*FLOAT32, stage=name), 2, "mps", "--device cpu")


HALF = [dict(RANK="1"), dict(WORLD_SIZE="2"), dict(RANK="0", WORLD_SIZE="abc"), dict(MASTER_PORT="abc")]


@pytest.mark.parametrize("env", HALF, ids=str)
def test_half_of_torchruns_environment_is_refused(play, env):
    fails(play(stage="s12_ddp", **env), 2, [*env][-1], "torchrun")


@pytest.mark.parametrize("ranks, accum, threads", [(1, 2, 0), (2, 2, 3), (3, 3, 2), (8, 8, 1)])
def test_default_accum_and_threads_suit_the_ranks(play, monkeypatch, ranks, accum, threads):
    monkeypatch.setattr(machine, "cores", lambda: 6)
    monkeypatch.setattr(torch, "set_num_threads", (found := [0]).append)
    run = play(stage="s12_ddp", RANK="0", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    assert (run.args.accum, found[-1]) == (accum, threads)


def test_defaults_suit_the_device(play, monkeypatch):
    def values(*flags):
        args = play(*flags).args
        return args.size, args.seq_len, args.batch_size, args.steps, args.accum, args.amp_dtype, args.compile

    caps = []
    assert values() == ("micro", 1024, 1, 24, 2, machine.native_amp_dtype(CPU), machine.compile_problem(CPU) is None)
    assert values(*FLOAT32, "--accum", "6") == ("tiny", 32, 2, 5, 6, F32, False)
    gpu = dict(find_device=GPU, fitting_batch_size=16, native_amp_dtype=BF16, compile_problem=None)
    for name, value in gpu.items():
        monkeypatch.setattr(machine, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    assert values() == ("gpt2", 1024, 16, 50, 4, BF16, True)
    # a Windows driver would take system memory for what does not fit
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *of: caps.append(of))
    monkeypatch.setattr(harness, "sys", SimpleNamespace(**vars(sys) | dict(platform="win32")))
    assert play().status == 0 and caps.pop() == (0.95, GPU)


@pytest.mark.parametrize("stage", STAGES)
def test_a_fallback_is_a_line_from_its_stage_on(play, monkeypatch, stage):
    monkeypatch.setattr(machine, "native_amp_dtype", lambda device: F32)
    monkeypatch.setattr(machine, "compile_problem", lambda device: "no compiler: install one")
    run = play(stage=STAGES[stage].stem)
    assert (run.args.amp_dtype, run.args.compile, [*run.args.fallbacks]) == (F32, False, ["amp_dtype", "compile"])
    lines = ["amp_dtype"] * (stage >= "s03") + ["compile"] * (stage >= "s04")
    assert [line.split(":")[0] for line in run.err.splitlines()] == lines
    assert play("--no-compile", "--amp-dtype", "float32").args.fallbacks == {}  # by wish, not for want


DTYPES = [(GPU, dict(bf16=True), BF16), (GPU, dict(capability=(7, 0)), F16), (GPU, dict(capability=(6, 1)), F32)]
DTYPES += [(MPS, dict(macos_14=True), BF16), (MPS, {}, F16), (CPU, dict(cpu="AMD64", avx512=True), BF16)]
DTYPES += [(CPU, dict(cpu="x86_64", avx512=True), BF16), (CPU, dict(cpu="x86_64", cpuinfo=" bf16"), F32)]
DTYPES += [(CPU, dict(cpuinfo="asimd bf16 i8mm"), BF16), (CPU, dict(avx512=True, cpuinfo="asimd"), F32)]
DTYPES += [(CPU, dict(system="darwin", output="1"), BF16), (CPU, dict(system="darwin", output="0"), F32)]
COMPILE = [(CPU, dict(cc=name), None) for name in ("g++", "clang++", "gcc", "clang", "cl")]
COMPILE += [(CPU, dict(cc="icpx"), "install g++"), (CPU, dict(cc="icpx", cxx="icpx"), None), (GPU, {}, "install g++")]
COMPILE += [(CPU, dict(cc="g++", at="/a b"), "blank"), (CPU, dict(cc="g++", temp="/a b"), "blank")]
COMPILE += [(GPU, dict(cc="g++", at="/a b"), None), (GPU, dict(cc="g++", triton=0), "install triton")]
COMPILE += [(GPU, dict(cc="g++", capability=(6, 1)), "has 6.1"), (MPS, {}, None)]
COMPILE += [(MPS, dict(torch=version), "computes wrong numbers") for version in ("2.9.1", "2.12.0")]
DEVICE = [("cuda", {}, "no NVIDIA card"), ("cuda", dict(output="GPU 0"), "driver is too old"), (None, {}, CPU)]
DEVICE += [("cuda:0", dict(output="GPU 0", cuda=None), "a CPU build"), (None, dict(output="GPU 0"), CPU)]
DEVICE += [("cuda", dict(gpus=2, capability=(6, 1)), "capability 6.1"), ("cuda:2", dict(gpus=2), "cuda:0 to cuda:1")]
DEVICE += [("cuda:0", dict(gpus=2), GPU), ("cuda", dict(gpus=2), GPU1), (None, dict(gpus=2), GPU1)]
DEVICE += [("cpu", dict(gpus=2, capability=None), CPU)]  # nothing asks the GPU, which would take memory there
BATCH = [(GPU, dict(memory=size), n) for size, n in {80: 16, 40: 16, 24: 8, 16: 4, 12: 4, 8: 2, 6: 2, 4: 1}.items()]
ANSWERS = dict(native_amp_dtype=DTYPES, compile_problem=COMPILE, find_device=DEVICE, fitting_batch_size=BATCH)
NOTHING = dict(gpus=0, capability=(9, 0), bf16=False, memory=0, macos_14=False, avx512=False, cpu="aarch64", cpuinfo="")
NOTHING |= dict(system="linux", output="", cuda="13.0", cc="", cxx="", triton=1, torch="2.13.0", at="/a", temp="/a")


@pytest.mark.parametrize("ask, argument, about, answer", [(q, *case) for q in ANSWERS for case in ANSWERS[q]], ids=str)
def test_machine_knows_what_the_hardware_can_do(monkeypatch, capfd, ask, argument, about, answer):
    there = SimpleNamespace(**NOTHING | about)
    for target, value in {
        "torch.cuda.is_available": there.gpus > 0,
        "torch.cuda.device_count": there.gpus,
        "torch.cuda.get_device_capability": there.capability,
        "torch.cuda.get_arch_list": ["sm_75", "sm_90a", "sm_100"],
        "torch.cuda.mem_get_info": (0, there.memory * 10**9),
        "torch.backends.mps.is_available": False,
        "torch.backends.mps.is_macos_or_newer": there.macos_14,
        "torch.cpu._is_avx512_bf16_supported": there.avx512,
        "platform.machine": there.cpu,
        "harness.machine._read": there.cpuinfo,
        "harness.machine.command_output": there.output,
    }.items():
        monkeypatch.setattr(target, lambda *_, value=value: value)
    # where the question allows for emulation, even a T4 says yes
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or there.bf16
    )
    monkeypatch.setattr(torch.version, "cuda", there.cuda)
    monkeypatch.setattr(torch, "__file__", there.at)
    monkeypatch.setattr(machine, "tempfile", SimpleNamespace(gettempdir=lambda: there.temp))
    monkeypatch.setattr(torch, "__version__", TorchVersion(there.torch))
    monkeypatch.setattr(machine, "sys", SimpleNamespace(platform=there.system, stderr=sys.stderr))
    monkeypatch.setattr(machine, "os", SimpleNamespace(environ=dict(CXX=there.cxx, LOCAL_RANK="1")))
    monkeypatch.setattr(machine.shutil, "which", lambda name: name == there.cc)
    monkeypatch.setitem(sys.modules, "triton", sys if there.triton else None)  # importing None raises ImportError
    try:
        found = getattr(machine, ask)(argument)
    except InputError as error:
        found = str(error)
    assert answer in found if isinstance(answer, str) else found == answer
    assert bool(capfd.readouterr().err) == (argument is None and "output" in about)  # a GPU that is left out


@pytest.mark.parametrize("file, output", [("NVRM version: 570.86.10  Release", ""), ("", "Driver Version : 570.86.10")])
def test_driver_is_known_though_nvidia_smi_may_time_out(monkeypatch, file, output):
    for name, answer in dict(_read=file, command_output=output, native_amp_dtype=BF16, device_name="H100").items():
        monkeypatch.setattr(machine, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    assert machine.environment(GPU)["driver"] == "570.86.10"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lets a process reset its peak")
def test_peak_memory_starts_again_after_a_reset():
    machine.reset_peak_memory(CPU)
    before, meter = machine.peak_memory(CPU)
    with mmap.mmap(-1, 200_000_000) as block:  # from the system itself, whatever malloc may keep
        block.write(bytes(200_000_000))
    during, _ = machine.peak_memory(CPU)
    machine.reset_peak_memory(CPU)
    assert meter == "peak RSS" and during > before + 150e6 > machine.peak_memory(CPU)[0] + 100e6


@pytest.mark.parametrize("dts", [[0.5], [4, 0.5], [4, 3, 2, 0.5], [4, 3, 2, 1, 0.5]])
def test_summary_of_a_short_run_is_its_last_step(dts):
    found = summarize([dict(loss=dt, dt=dt, tokens=600, memory=None, meter="none") for dt in dts])
    assert found["dt_q1_ms"] == found["dt_ms"] == found["dt_q3_ms"] == 500 and found["tok_per_sec"] == 1200
    assert (found["counted"], found["warmup_s"]) == (len(dts) > 4, sum(dts[:4])) and found["memory"] is None


def test_lines_and_record_have_the_figures_of_the_clock(play, monkeypatch, tmp_path):
    def later(work):
        def slow(*args, **kwargs):
            clock.now, clock.device = clock.now + 50, clock.device + 8
            return work(*args, **kwargs)

        return slow

    def script(log):
        log.device, clock.device = MPS, 0
        for dt in dts:
            clock.now, clock.device = clock.now + dt - 8, clock.device + 8
            log.step(torch.tensor(5.97412), norm=math.inf, lr=3e-4)

    def synchronize():
        clock.now, clock.device = clock.now + clock.device, 0

    clock = harness.time  # a step lasts until the device is done with it, and none of the log's own work counts
    monkeypatch.setattr(torch.mps, "synchronize", synchronize)
    for where, name in ((harness.Record, "write"), (harness.StepLog, "say"), (machine, "reset_peak_memory")):
        monkeypatch.setattr(where, name, later(getattr(where, name)))
    path, dts, memory = tmp_path / "r.jsonl", [14, 13, 12, 13, 8.125, 8.5, 8.25], iter([9e9] * 4 + [1e9, 1.25e9, 1e9])
    monkeypatch.setattr(machine, "peak_memory", lambda device: (next(memory), "a meter"))
    run = play(*FLOAT32, "--steps", "7", "--record", path, script=script)
    header, steps, end = report.run_of(report.read(path))
    settings = dict(steps=7, batch_size=2, seq_len=32, size="tiny", seed=1337, data=None, accum=4, compile=False)
    assert header["settings"] == settings | dict(amp_dtype="float32", world_size=1, corpus="ids.bin", tokenizer="gpt2")
    assert [(step["dt"], step["norm"], step["tokens"]) for step in steps] == [(dt, None, 64) for dt in dts]
    assert end == dict(kind="summary", **summarize(steps), sdpa=None)
    lines = run.out.splitlines()
    assert lines[0] == "Stage 0 · test: a title." and "6 parameters" in lines[1] and "ids.bin, gpt2" in lines[1]
    assert lines[7] == "step    5 | loss 5.9741 | norm inf | lr 3.0000e-04 | dt 8500.00ms | tok/sec 8"
    last = "median dt 8250.00ms [8187.50, 8375.00] over 3 steps | tok/sec 8 | memory 1.25 GB (a meter) | warm-up 52.0s"
    assert (lines[9:], run.err, run.status) == ([last], "", 0)


ENDS = [
    (math.nan, 1, "the loss is nan at step 0: try another --seed"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried"), 1, "--batch-size 1"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), 1, "--batch-size 1"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "a smaller --seq-len or --size"),
    (MemoryError(), 1, "--batch-size 1"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (InputError("pass another"), 2, "pass another"),
    (RuntimeError("NCCL error\nCuda failure 2 'out of memory'"), 1, "--batch-size 1"),
    (InductorError(RuntimeError("no Python.h"), None), 1, "no Python.h): fix the compiler, or pass --no-compile"),
    (BackendCompilerFailed(max, ValueError("no g++"), None), 1, "torch.compile failed (ValueError: no g++): fix"),
    (KeyError("weights"), 1, "KeyError: 'weights'"),
]


@pytest.mark.parametrize("cause, status, message", ENDS, ids=str)
def test_how_a_run_ended_is_on_stderr_and_in_the_record(play, tmp_path, cause, status, message):
    def script(log):
        harness.time.now += 1
        if isinstance(cause, float):
            log.step(torch.tensor(cause))
        raise cause

    batch_size = 2 - message.startswith("a smaller")
    run = play(*FLOAT32, "--batch-size", batch_size, "--record", tmp_path / "r.jsonl", script=script)
    assert run.status == status and message in run.err
    assert message in report.read(tmp_path / "r.jsonl")[-1]["error"]
    assert run.err.startswith("Traceback") if isinstance(cause, KeyError) else run.err.count("\n") == 1


def test_a_record_on_a_full_disk_ends_the_run(play, tmp_path):
    def full(text):
        raise OSError(28, "No space left")

    def script(log):
        log.record.file = SimpleNamespace(name="r.jsonl", write=full)
        log.step(torch.tensor(1.0))

    fails(play(*FLOAT32, "--record", tmp_path / "r.jsonl", script=script), 2, "r.jsonl can't be written: No space left")


def test_default_batch_size_rests_on_what_s01s_tensors_hold(monkeypatch):
    """The peak over two steps of gpt2 on the meta device, which computes and holds nothing."""
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker").MemTracker()
    monkeypatch.setattr(GPT, "to_empty", lambda self, device: self)  # stays on the meta device
    model = GPT(GPTConfig(), definitions("s01", "attention", math=math, torch=torch, F=F)["attention"])
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.zeros(2, 1024, dtype=torch.long, device="meta")
    tracker.track_external(model, optimizer)
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            optimizer.zero_grad()
            model(x, x).backward()
            optimizer.step()
    (held,) = [of["Total"] for device, of in tracker.get_tracker_snapshot("peak").items() if device.type == "meta"]
    assert s01_bytes(2) == pytest.approx(held, rel=0.05)
