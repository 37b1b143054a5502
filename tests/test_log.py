"""The log of a stage: its clock, its lines, its record, what it tells the bench, and how a run fails."""

from harness import log, machine, parse_args, parts
from harness.log import StepLog

import datetime
import io
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import FLOAT32, STAGES, python, run_script
from torch.autograd import DeviceType

from data import VOCAB, Corpus
from model import GPT, GPTConfig

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
TOKENS_PER_STEP = 72_000
LOADER = SimpleNamespace(corpus=Corpus("ids.bin", "gpt2", None))
LOSS = torch.tensor(5.0)


class Clock:
    """Stands in for the module time, for a device that works on its own, and for the meter of its memory."""

    def __init__(self):
        self.now = 100.0
        self.queued = 0.0  # seconds of work that the device was asked for and has not done yet
        self.peak = 1e9  # bytes

    def perf_counter(self):
        return self.now

    def synchronize(self):
        self.now += self.queued
        self.queued = 0.0

    def peak_memory(self, device):
        self.now += 70  # reading it is work for the process and the device
        self.queued += 30
        return self.peak, "peak RSS"

    def reset_peak_memory(self, device):
        self.now += 70
        self.peak = 1e9


class Bench(io.StringIO):
    """A worker's stdin, from which each line takes 50 seconds. Notes what the worker had written before."""

    def __init__(self, clock, lines):
        super().__init__("\n" * lines)
        self.clock = clock
        self.written = io.StringIO()
        self.kinds_before = []

    def readline(self):
        self.clock.now += 50
        self.kinds_before.append([line["kind"] for line in self.lines()])
        return super().readline()

    def lines(self):
        return [json.loads(line) for line in self.written.getvalue().splitlines()]


@pytest.fixture
def clock(monkeypatch):
    """A Clock that the log reads, on a machine that is the same everywhere."""
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    monkeypatch.setattr(torch.cpu, "synchronize", clock.synchronize)
    monkeypatch.setattr(machine, "peak_memory", clock.peak_memory)
    monkeypatch.setattr(machine, "reset_peak_memory", clock.reset_peak_memory)
    monkeypatch.setattr(machine, "device_name", lambda device: "A CPU")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    return clock


@pytest.fixture
def new_log(monkeypatch, clock):
    """new_log("--steps", "7"): a StepLog of s05 with these flags; model: instead of one of 6 parameters."""

    def new_log(*flags, model=None, **changes):
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which a StepLog changes
        words = [str(STAGES["s05"]), *FLOAT32, "--steps", "7", *(str(flag) for flag in flags)]
        monkeypatch.setattr(sys, "argv", words)
        args = parse_args("Stage 5 · flash: a title.\n\nA text.")
        for name, value in changes.items():
            setattr(args, name, value)
        return StepLog(args, model or torch.nn.Linear(2, 2), LOADER, TOKENS_PER_STEP)

    return new_log


def tiny_gpt():
    """A GPT of the size tiny at T 32, whose forward nobody calls."""
    return GPT(GPTConfig(VOCAB, 32, 2, 2, 64), None)


def take_steps(steplog, clock, count):
    """Take steps of 1, 4, 9, ... seconds, whose mean is not their median, with losses of 5.5, 5.0, ..."""
    for step in range(count):
        clock.now += (step + 1) ** 2
        steplog.step(torch.tensor(5.5 - 0.5 * step), norm=1.23456, lr=torch.tensor(3e-4))


def lines_of(record):
    """The lines of a record, as dicts."""
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


# The clock, and what it leaves out


def test_a_step_lasts_from_the_end_of_the_one_before_to_its_own_without_the_logs_work(new_log, clock):
    steplog = new_log()
    take_steps(steplog, clock, 7)  # the log reads the meter after each
    assert [step["dt"] for step in steplog.steps] == [1, 4, 9, 16, 25, 36, 49]


def test_a_step_includes_what_the_device_was_asked_for_in_it_and_nothing_else(new_log, clock):
    clock.queued = 8  # the weights are on their way to the device
    steplog = new_log()
    clock.now += 2
    clock.queued = 3
    steplog.step(LOSS)  # the meter leaves work to the device
    clock.now += 4
    steplog.step(LOSS)
    assert [step["dt"] for step in steplog.steps] == [5, 4]


def test_memory_is_the_peak_of_the_steps_after_the_warm_up(new_log, clock):
    steplog = new_log()
    for nbytes in (9e9, 9e9, 9e9, 9e9, 1e9, 1.25e9, 1e9):
        clock.peak = max(clock.peak, nbytes)
        clock.now += 1
        steplog.step(LOSS)
    assert [step["memory"] for step in steplog.steps] == [9e9, 9e9, 9e9, 9e9, 1e9, 1.25e9, 1.25e9]


# What a run prints and records


def test_the_lines_of_a_run(new_log, clock, capsys):
    steplog = new_log()
    take_steps(steplog, clock, 6)
    clock.now += 49
    steplog.step(torch.tensor(2.5))  # one that logs no figures
    steplog.finish(None)
    title, what_runs, first_step, *_, last_step, summary = capsys.readouterr().out.splitlines()
    assert title == "Stage 5 · flash: a title."
    assert what_runs == "tiny, 6 parameters | B 2, T 32, 72,000 tokens per step | ids.bin, gpt2 | A CPU, threads 3"
    assert first_step == "step    0 | loss 5.5000 | norm 1.2346 | lr 3.0000e-04 | dt 1000.00ms | tok/sec 72,000"
    assert last_step == "step    6 | loss 2.5000 | dt 49000.00ms | tok/sec 1,469"
    assert summary == (
        "median dt 36000.00ms [30500.00, 42500.00] over 3 steps after 4 of warm-up"
        " | tok/sec 2,000 | memory 1.00 GB (peak RSS) | warm-up 30.0s"
    )


def test_the_header_of_a_record_says_what_ran_where(new_log, tmp_path):
    new_log("--record", tmp_path / "r.jsonl", model=tiny_gpt())
    (header,) = lines_of(tmp_path / "r.jsonl")
    keys = "kind stage title code commit settings shape parameters environment fallbacks started"
    flags = "steps batch_size seq_len size seed lr data compile accum world_size amp_dtype corpus tokenizer"
    settings = [7, 2, 32, "tiny", 1337, 6e-4, None, False, 4, 1, "float32", "ids.bin", "gpt2"]
    assert list(header) == keys.split()
    assert header["settings"] == dict(zip(flags.split(), settings, strict=True))
    assert header["shape"] == {"vocab_size": VOCAB, "n_layer": 2, "n_head": 2, "n_embd": 64}
    assert header["environment"]["device_name"] == "A CPU"
    assert datetime.datetime.fromisoformat(header["started"]).utcoffset() == datetime.timedelta(0)


def test_each_line_of_a_record_is_on_disk_at_once(new_log, clock, tmp_path):
    steplog = new_log("--record", tmp_path / "r.jsonl")
    for count in (1, 2, 3):
        take_steps(steplog, clock, 1)
        assert len(lines_of(tmp_path / "r.jsonl")) == 1 + count
    keys = "kind step loss norm lr dt tokens memory meter"
    values = ["step", 1, 5.5, 1.23456, pytest.approx(3e-4), 1, 72_000, 1e9, "peak RSS"]
    assert lines_of(tmp_path / "r.jsonl")[2] == dict(zip(keys.split(), values, strict=True))


def test_an_infinite_figure_is_shown_and_is_null_in_the_record(new_log, clock, tmp_path, capsys):
    steplog = new_log("--record", tmp_path / "r.jsonl")
    clock.now += 1
    steplog.step(LOSS, norm=torch.tensor(math.inf))  # as where float16 overflows
    assert " | norm inf | " in capsys.readouterr().out
    assert lines_of(tmp_path / "r.jsonl")[-1]["norm"] is None


def test_the_other_ranks_print_record_and_save_nothing(new_log, monkeypatch, clock, tmp_path, capsys):
    monkeypatch.setenv("RANK", "1")
    flags = ("--steps", "1", "--record", tmp_path / "r.jsonl", "--save", tmp_path / "w", "--eval")
    steplog = new_log(*flags)
    take_steps(steplog, clock, 1)
    steplog.finish(None)
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


# An own script, and how a run fails

OWN_SCRIPT = """
from harness import StepLog, parse_args
import torch
args = parse_args("My own.")
model = torch.nn.Linear(2, 2)
print("a word of the script")
log = StepLog(args, model)
for step in range(args.steps):
    loss = model(torch.ones(2)).sum()
    log.step({loss})
log.finish(model)
"""


@pytest.fixture
def own_script(tmp_path):
    """own_script(loss): the path of a script without a GPT and a loader, which logs this expression."""

    def own_script(loss="loss"):
        path = tmp_path / "mine.py"
        path.write_text(OWN_SCRIPT.format(loss=loss))
        return path

    return own_script


def test_a_script_of_ones_own_needs_no_gpt_and_no_loader_and_what_it_prints_is_no_line_of_its_record(own_script):
    env = {"PYTHONPATH": str(STAGES["s01"].parent)}
    run = python(own_script(), *FLOAT32, "--worker", stdin="\n\n", **env)
    assert run.status == 0, run.err
    header, *steps, summary = [json.loads(line) for line in run.out.splitlines()]
    assert (header["stage"], header["title"], header["shape"], header["parameters"]) == ("mine", "My own.", None, 6)
    assert [step["kind"] for step in steps] == ["step", "step"]
    assert summary == {"kind": "summary", "sdpa": None}
    assert "a word of the script\n" in run.err


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_loss_that_is_not_finite_ends_the_run_with_one_line(own_script, tmp_path, loss):
    script = own_script(f"loss * float('{loss}') if step == 1 else loss.abs()")
    run = run_script(script, *FLOAT32, "--record", tmp_path / "r.jsonl")
    assert run.status == 2
    assert re.fullmatch(r"error: the loss is -?(nan|inf) at step 1: try a smaller --lr, .*\n", run.err)
    assert [line["kind"] for line in lines_of(tmp_path / "r.jsonl")] == ["header", "step", "step"]
    assert lines_of(tmp_path / "r.jsonl")[2]["loss"] is None


@pytest.mark.parametrize("flags", [("--eval",), ("--save", "mine.pt")])
def test_a_script_without_a_gpt_can_not_be_evaluated_or_saved_and_says_so_at_its_start(own_script, tmp_path, flags):
    run = run_script(own_script(), *FLOAT32, *flags, folder=tmp_path)
    assert (run.status, run.out) == (2, "a word of the script\n")
    assert run.err == "error: --eval and --save need a GPT and its loader, and this script has none\n"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["Python", "CUDA", "CPU", "cuBLAS"],
)
@pytest.mark.parametrize("batch_size, remedy", [(3, "--batch-size 1"), (1, "a smaller --seq-len or --size")])
def test_out_of_memory_is_one_line_that_names_a_remedy(new_log, capsys, error, batch_size, remedy):
    new_log("--batch-size", batch_size)
    capsys.readouterr()
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == f"error: out of memory at batch size {batch_size}: try {remedy}\n"


def test_any_other_error_keeps_pythons_traceback(own_script):
    run = run_script(own_script("log.no_such_thing"), *FLOAT32)
    assert run.status == 1
    assert "Traceback (most recent call last):\n" in run.err
    assert "AttributeError: 'StepLog' object has no attribute 'no_such_thing'" in run.err


# A worker, which the bench leads


def test_a_worker_takes_a_step_for_each_line_and_waits_at_the_end(monkeypatch, new_log, clock, capsys):
    bench = Bench(clock, lines=2)
    monkeypatch.setattr(sys, "stdin", bench)
    steplog = new_log("--steps", "2", worker=True, record_to=bench.written)
    take_steps(steplog, clock, 2)
    steplog.finish(None)
    header, first, second, summary = bench.lines()
    assert (header["kind"], summary["kind"]) == ("header", "summary")
    assert (first["dt"], second["dt"]) == (1, 4)  # the waiting does not count
    # the summary, too, waits until stdin is closed: others may be on the clock
    assert bench.kinds_before == [["header"], ["header", "step"], ["header", "step", "step"]]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("lines, kinds", [(0, ["header"]), (1, ["header", "step", "summary"])])
def test_a_worker_that_is_to_stop_early_ends_well(monkeypatch, new_log, clock, lines, kinds):
    bench = Bench(clock, lines)
    monkeypatch.setattr(sys, "stdin", bench)
    with pytest.raises(SystemExit) as ending:
        take_steps(new_log(worker=True, record_to=bench.written), clock, 7)
    assert ending.value.code is None
    assert [line["kind"] for line in bench.lines()] == kinds


# --profile


def test_profile_shows_the_last_step_and_what_arithmetic_predicts(new_log, monkeypatch, clock, tmp_path, capsys):
    rates = {"size": 2048, "peak": {"float32": 1e11}, "copy": 1e10}
    monkeypatch.setattr(log.rates, "measure", lambda device, amp_dtype: rates)
    matrix = torch.ones(8, 8)
    parameter = torch.nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    optimizer = torch.optim.AdamW([parameter])
    steplog = new_log("--profile", "--steps", "2", "--record", tmp_path / "r.jsonl", model=tiny_gpt())
    matrix.exp()
    take_steps(steplog, clock, 1)
    matrix @ matrix @ matrix
    optimizer.step()
    clock.now += 1.5
    steplog.step(LOSS)
    steplog.finish(None)
    out = capsys.readouterr().out
    summary = lines_of(tmp_path / "r.jsonl")[-1]
    measured = summary["parts"]
    assert summary["rates"] == rates
    assert set(measured) == {"matmuls", "optimizer", "the rest"}  # the divisions in AdamW are the optimizer's
    assert sum(measured.values()) == pytest.approx(1500)
    assert " x aten::exp\n" not in out  # it was in the step before
    assert re.search(r"^ +\d+\.\d\d ms in    2 x aten::mm$", out, re.MULTILINE)
    header, matmuls, _, rest, step = out.splitlines()[-5:]
    assert header == " measured predicted"
    # 2 x 32 tokens x 6 x (12 x 2 x 64^2 + 50257 x 64) = 1.273 GFLOP at 0.1 TFLOP/s
    assert matmuls == f"{measured['matmuls']:9.2f}     12.73 matmuls"
    assert rest.endswith("   the rest")  # nothing predicts it
    assert step.startswith("  1500.00 ")


@pytest.mark.parametrize(
    "operation, part",
    [
        ("mkl::_mkl_linear", "matmuls"),
        ("aten::bmm", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::_cudnn_attention_forward", "attention"),
        ("aten::native_layer_norm_backward", "pointwise"),
        ("triton_red_fused__log_softmax_0", "fused kernels"),
        ("aten::something_new", "the rest"),
        ("aten::fill_ < aten::zero_ < aten::nll_loss_backward", "loss"),
        ("aten::copy_ < aten::clone < aten::masked_fill", "softmax and mask"),
        ("aten::div < Optimizer.step#AdamW.step", "optimizer"),
        ("aten::mul_ < aten::_foreach_mul_", "optimizer"),
        ("aten::add_ < torch::autograd::AccumulateGrad < autograd::engine::evaluate_function", "optimizer"),
        ("aten::mul < torch.distributed.ddp.reducer::mul_out", "optimizer"),
        ("aten::mm < ## Call CompiledFxGraph fgg3hb ## < CompiledFunction", "matmuls"),
        ("aten::empty < ## Call CompiledFxGraph fgg3hb ##", "fused kernels"),
    ],
)
def test_the_outermost_caller_that_has_a_part_decides(operation, part):
    assert parts.part_of(operation.split(" < ")) == part


def test_on_a_card_its_own_time_of_each_operation_counts_once():
    add = SimpleNamespace(name="aten::add", self_cpu_time_total=9_000, self_device_time_total=1_000)
    mm = SimpleNamespace(name="aten::mm", self_cpu_time_total=10, self_device_time_total=2_000)
    kernel = SimpleNamespace(name="sm90_gemm", self_cpu_time_total=0, self_device_time_total=4_000)  # of both mm
    for event, device_type in ((add, DeviceType.CPU), (mm, DeviceType.CPU), (kernel, DeviceType.CUDA)):
        event.cpu_parent, event.device_type = None, device_type
    profile = parts.Profile([add, kernel, mm, mm], CUDA, step_ms=6.0)
    assert profile.operations == {"aten::add": [1.0, 1], "aten::mm": [4.0, 2]}
    assert profile.parts == {"pointwise": 1.0, "matmuls": 4.0, "the rest": 1.0}


def run_of(stage, **settings):
    """The facts of a run of gpt2 at B 1, T 1024 in float32, on a machine whose rates are round."""
    defaults = {"batch_size": 1, "seq_len": 1024, "amp_dtype": "float32", "compile": False}
    return {
        "stage": stage,
        "settings": defaults | {"accum": 2, "world_size": 1} | settings,
        "environment": {"device": "cpu", "tf32": False},
        "shape": {"vocab_size": VOCAB, "n_layer": 12, "n_head": 12, "n_embd": 768},
        "rates": {"peak": {"float32": 1e11}, "copy": 1e10},
        "sdpa": "flash",
    }


def test_fused_kernels_take_the_parts_that_a_compiler_merges():
    """By hand at 10 GB/s: 151.0 M scores x 20, 51.46 M logits x 12, 25 tensors of 0.786 M numbers x 36, 12 of 3.146 M
    x 20, and 12 of 0.786 M x 60 bytes."""
    measured = {"the rest": 1.0, "loss": 2.0, "pointwise": 3.0, "fused kernels": 30.0, "matmuls": 90.0}
    lines = parts.measured_and_predicted(run_of("s04_compile", compile=True), measured)
    assert [line[:2] for line in lines] == [
        ("matmuls", 90.0),
        ("fused kernels", 35.0),
        ("the rest", 1.0),
        ("the step", 126.0),
    ]
    assert lines[1][2] == pytest.approx(566.7, rel=1e-3)


@pytest.mark.parametrize("stage, micro_batches", [("s10_fused", 1), ("s11_accum", 2)])
def test_a_step_should_take_the_time_of_all_its_micro_batches(stage, micro_batches):
    (_, _, predicted), *_ = parts.measured_and_predicted(run_of(stage), {"matmuls": 1.0})
    assert predicted == pytest.approx(micro_batches * 7590, rel=0.001)  # 1024 x 741.2 MFLOP at 0.1 TFLOP/s


@pytest.mark.parametrize("run", [run_of("mine"), run_of("s03_bf16", amp_dtype="float16")], ids=["script", "dtype"])
def test_a_script_that_is_no_stage_and_a_dtype_without_a_rate_have_their_times_alone(run):
    assert parts.measured_and_predicted(run, {"matmuls": 30.0, "the rest": 70.0}) == [
        ("matmuls", 30.0, None),
        ("the rest", 70.0, None),
        ("the step", 100.0, None),
    ]


@pytest.mark.parametrize("name", ["flash_attention", "cudnn_attention", "efficient_attention", "attention_math"])
def test_the_kernel_of_attention_is_in_its_operations_name(name):
    operations = f"aten::scaled_dot_product_attention aten::_scaled_dot_product_{name}_for_cpu"
    kernel = re.search(machine.SDPA_KERNEL, operations)[1]
    assert kernel in ("flash", "cudnn", "efficient", "math")
    assert kernel in name
