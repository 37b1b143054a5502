"""The log of a stage: its clock, its lines, its record, what it tells the bench, and how a run fails."""

from harness import log as log_module
from harness import machine, parse_args, rates
from harness.steplog import StepLog
from harness.weights import load, save

import errno
import math
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FLOAT32, SMALL, STAGE_FILES, error_of, lines_of, run_stage
from torch._dynamo.exc import Unsupported

from data import VOCAB, Corpus, TextError, TokenLoader, load_tokens
from model import GPT, GPTConfig

CARD_STATE = {"mhz": 1935, "celsius": 62, "reasons": 4}
GB = 10**9
LOADER = TokenLoader(Corpus("ids.bin", np.zeros(99, np.uint16), np.zeros(9, np.uint16)), batch_size=3, seq_len=5)


class Card:
    """A card with its memory, and the clock, all fake. Queued work takes its time in synchronize()."""

    def __init__(self):
        self.now = 100.0
        self.queued = 0.0  # seconds of work that it has not done yet
        self.peak = GB

    def perf_counter(self):
        return self.now

    def set_device(self, device):
        assert device.type == "cuda"

    def synchronize(self, device):
        self.now += self.queued
        self.queued = 0.0

    def max_memory_allocated(self, device):
        self.now += 70  # reading it is work for the process and the card
        self.queued += 30
        return self.peak

    def reset_peak_memory_stats(self, device):
        self.now += 70
        self.peak = GB


@pytest.fixture
def card(a_card, monkeypatch):
    """The Card that the log sees."""
    card = Card()
    monkeypatch.setattr(time, "perf_counter", card.perf_counter)
    for name in ("set_device", "synchronize", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(card, name))
    monkeypatch.setattr(machine, "sdpa_kernel", lambda q, dtype, device: "flash")
    monkeypatch.setattr(log_module, "card_state", lambda device: CARD_STATE)
    return card


@pytest.fixture
def new_log(monkeypatch, card):
    """new_log("--steps", "7"): a StepLog of s11 with these flags, led by a Bench where there is one."""

    def new_log(*flags, loader=LOADER, bench=None):
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which parse_args changes
        monkeypatch.setattr(sys, "argv", [STAGE_FILES["s11"], *FLOAT32, "--steps", "7", *(str(flag) for flag in flags)])
        args = parse_args("Stage 11 · accum: a title.\n\nA text.")
        args.log.leader, args.log.is_led = bench, bench is not None
        return StepLog(args, small_gpt(), loader, tokens_per_step=72_000_000)

    return new_log


def small_gpt():
    """A GPT of another shape than any --size, and of another block_size than the T of --seq-len, which is 24."""
    return GPT(GPTConfig(VOCAB, block_size=48, n_layer=1, n_head=2, n_embd=128), None)


def take_step(log, card, seconds=1, loss=5.0, **figures):
    """Take a step that keeps Python busy all the time."""
    log.start()
    card.now += seconds
    log.step(torch.tensor(loss), **figures)


def take_steps(log, card, count):
    """Take steps of 1, 4, 9, ... seconds, whose mean is not their median, with losses of 5.5, 5.0, ..."""
    for step in range(count):
        take_step(log, card, (step + 1) ** 2, 5.5 - 0.5 * step, norm=1.23456, lr=torch.tensor(3e-4))


# The clock and the memory


def test_a_step_is_what_the_device_was_asked_for_in_it_without_the_logs_own_work(new_log, card):
    card.queued = 8  # the weights are on their way to the card
    log = new_log()
    for _ in range(6):
        log.start()
        card.now += 2
        card.queued += 3
        log.step(5.0)  # it reads the memory, and resets it after the warm-up, which takes time as well
    assert [(step["dt"], step["queued"]) for step in log.log.steps] == [(5, 2)] * 6


def test_the_memory_of_a_card_is_the_peak_of_the_steps_after_the_warm_up(new_log, card, tmp_path):
    log = new_log("--record", tmp_path / "r.jsonl")
    for peak in (9, 9, 9, 9, 1, 1.5, 1):
        card.peak = max(card.peak, peak * GB)
        take_step(log, card)
    log.finish()
    _, *steps, _ = lines_of(tmp_path / "r.jsonl")
    assert [step["memory"] / GB for step in steps] == [9, 9, 9, 9, 1, 1.5, 1.5]


# What a run prints and records


def test_the_lines_of_a_run(new_log, card, monkeypatch, capsys):
    """By hand: 6 (12 L C^2 + V C) + 12 L C T are 39.81 MFLOP a token at T 24, at 72, 1.47 and 2 million a second."""
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    log = new_log()
    take_steps(log, card, 6)
    take_step(log, card, 49, 2.5)  # without figures
    log.finish()
    _, what, _, fallback, first_step, *_, last_step, median, speed, _ = capsys.readouterr().out.splitlines()
    model = "1 layers of 2 heads, 128 wide, 6,637,568 parameters"
    assert what == f"{model} | B 2, T 24, 72,000,000 tokens per step"
    assert fallback == "environment: slower, by CUDA_LAUNCH_BLOCKING"
    figures = "loss 5.5000 | norm 1.2346 | lr 3.00e-04 | 1000.00ms | 72,000,000 tok/sec"
    assert first_step == f"step    0 | {figures} | 2.87e+03 TFLOP/s"
    assert last_step == "step    6 | loss 2.5000 | 49000.00ms | 1,469,388 tok/sec | 58.5 TFLOP/s"
    assert median == "median 36000.00ms [30500.00, 42500.00] over 3 steps after 4 of warm-up"
    assert speed == "2,000,000 tok/sec | 79.6 TFLOP/s | memory 1.00 GB (peak allocated) | warm-up 30.0s"


def test_the_profiler_starts_before_the_clock_and_its_step_is_not_counted(new_log, card, monkeypatch, capsys):
    def take_time():
        card.now += 50

    profiler = SimpleNamespace(start=take_time, stop=take_time, events=list)
    monkeypatch.setattr(torch.profiler, "profile", lambda **options: profiler)
    monkeypatch.setattr(rates, "measure", lambda *args: {"peak": {}, "copy": 1})
    log = new_log("--steps", 7, "--profile")
    take_steps(log, card, 7)
    log.finish()
    assert log.log.steps[-1]["dt"] == 49
    assert "median 30500.00ms" in capsys.readouterr().out  # of steps of 25 and 36 s


def test_a_step_is_on_disk_at_once_and_figures_replace_none_of_the_logs_own(new_log, card, tmp_path):
    log = new_log("--record", tmp_path / "r.jsonl")
    take_step(log, card, norm=torch.tensor(math.inf), lr=torch.tensor(0.5), step=99, dt=99, memory=99, kind=99)
    own = {"step": 0, "loss": 5, "dt": 1, "tokens": 72_000_000, "memory": GB, "meter": "peak allocated", "queued": 1}
    own["card"] = CARD_STATE
    assert lines_of(tmp_path / "r.jsonl")[1] == {"kind": "step", "norm": None, "lr": 0.5} | own


# How a run fails


@pytest.mark.parametrize("stance, status", [("default", 0), ("force_eager", 2)])
def test_a_compiled_stage_of_which_nothing_was_compiled_is_no_measurement(monkeypatch, stance, status, tmp_path):
    """So it goes where a card has no bfloat16, or where errors of the compiler are suppressed."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # it needs no C++ compiler
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # as in a process of its own
    with torch.compiler.set_stance(stance):
        run = run_stage("s04", *SMALL, "--amp-dtype", "float32", "--compile", folder=tmp_path, status=status)
    remedy = "torch.compile has compiled nothing, so this would be measured as without it: pass --no-compile"
    assert (remedy in run.err) == (status == 2)


def test_a_bad_held_out_text_is_told_before_the_first_step(new_log, tmp_path):
    np.array([*range(99), 60_000], np.uint16).tofile(tmp_path / "bad.bin")
    with pytest.raises(TextError, match="the held-out text: it has ids from 90 to 60000"):
        new_log("--eval", loader=TokenLoader(load_tokens(str(tmp_path / "bad.bin")), 3, 5))


def test_an_interrupted_run_tells_what_its_steps_took(new_log, card, capsys, tmp_path):
    log = new_log("--record", tmp_path / "r.jsonl")
    take_steps(log, card, 6)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().out.count("median 30500.00ms") == 1  # of steps of 25 and 36 s
    assert lines_of(tmp_path / "r.jsonl")[-1] == {"kind": "summary", "sdpa": None}


def test_a_loss_that_is_not_finite_ends_the_run_and_saves_no_weights(new_log, card, capsys, tmp_path):
    log = new_log("--record", tmp_path / "r.jsonl", "--save", tmp_path / "w.pt")
    assert "the loss is nan at step 0: try a smaller --lr" in error_of(capsys, take_step, log, card, 1, math.nan)
    *_, step, error = lines_of(tmp_path / "r.jsonl")
    assert step["loss"] is None and error["message"].startswith("the loss is nan")
    assert not (tmp_path / "w.pt").exists()


@pytest.mark.parametrize(
    "error, batch_size, advice",
    [
        (MemoryError(), 3, "memory is short at batch size 3: try --batch-size 1"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), 16, "memory is short at batch size 16: try --batch-size 8"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 4, "memory is short at batch size 4: try --batch-size 2"),
        (RuntimeError("could not create a primitive"), 1, "memory is short at batch size 1: try a smaller --seq-len"),
        (Unsupported("a graph break"), 2, "torch.compile failed: --no-compile goes without it"),
    ],
)
def test_below_a_failure_is_what_to_try_where_that_is_known(new_log, capsys, tmp_path, error, batch_size, advice):
    new_log("--batch-size", batch_size, "--record", tmp_path / "r.jsonl")
    sys.excepthook(type(error), error, None)
    last_printed = capsys.readouterr().err.splitlines()[-1]
    line = lines_of(tmp_path / "r.jsonl")[-1]
    assert last_printed.startswith(advice)
    assert line["message"] == f"{last_printed} ({type(error).__name__}: {error})"  # a bench shows this line alone
    assert line["out_of_memory"] == ("memory" in advice)


def test_a_failure_of_another_kind_is_told_as_python_does_and_kept_whole(new_log, capsys, tmp_path):
    new_log("--record", tmp_path / "r.jsonl")
    try:
        raise RuntimeError("could not create a primitive descriptor")  # which has to do with kernels, not with memory
    except RuntimeError:
        sys.excepthook(*sys.exc_info())
    report = capsys.readouterr().err
    message = "RuntimeError: could not create a primitive descriptor"
    assert report.startswith("Traceback (most recent call last):\n") and report.endswith(f"{message}\n")
    error = {"kind": "error", "message": message, "traceback": report, "out_of_memory": False}
    assert lines_of(tmp_path / "r.jsonl")[-1] == error


def test_a_reader_who_leaves_and_a_terminal_in_ascii_cost_a_run_nothing(monkeypatch, tmp_path):
    """Its title has a sign that ASCII lacks, and all steps are recorded after `head` has closed the pipe."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # Python keeps what it could not print to its end
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    words = [sys.executable, STAGE_FILES["s11"], *FLOAT32, "--steps", "9", "--record", tmp_path / "r.jsonl"]
    run = subprocess.run(["sh", "-c", '"$0" "$@" | head -2', *words], capture_output=True, text=True, timeout=100)
    assert run.stderr == ""
    assert run.stdout.startswith("Stage 11 ? accum")
    assert [line["kind"] for line in lines_of(tmp_path / "r.jsonl")] == ["header", *["step"] * 9, "summary"]


def test_a_full_disk_at_save_costs_neither_the_summary_nor_earlier_weights(new_log, card, monkeypatch, tmp_path):
    def write_half(checkpoint, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    weights = tmp_path / "w.pt"
    save(small_gpt(), weights)
    log = new_log("--save", weights, "--record", tmp_path / "r.jsonl")
    take_steps(log, card, 5)
    monkeypatch.setattr(torch, "save", write_half)
    with pytest.raises(SystemExit, match="2"):
        log.finish()
    assert lines_of(tmp_path / "r.jsonl")[-1]["kind"] == "summary"
    load(weights, None)


def test_a_full_disk_ends_the_record_and_not_the_training(new_log, card, monkeypatch, capsys, tmp_path):
    log = new_log("--record", tmp_path / "r.jsonl")
    log.log.file = open("/dev/full", "w")  # noqa: SIM115
    take_steps(log, card, 2)
    printed = capsys.readouterr()
    assert printed.err == "--record /dev/full ends here: No space left on device\n"
    assert "step    1 |" in printed.out


# A run that the bench leads


class Bench:
    """The bench, as a run sees it. Each request takes 50 seconds. lines: what the run wrote, and where it waited."""

    def __init__(self, card):
        self.card = card
        self.lines = []
        self.send = self.lines.append

    def wait_for_request(self):
        self.card.now += 50
        self.lines.append({"kind": "waits"})
        return True


def test_a_led_run_takes_a_step_for_each_request_and_waits_at_the_end(new_log, card, capsys):
    bench = Bench(card)
    log = new_log("--steps", "2", bench=bench)
    take_steps(log, card, 2)
    log.finish()
    assert [step["dt"] for step in log.log.steps] == [1, 4]  # the waiting does not count
    kinds = [line["kind"] for line in bench.lines]
    assert kinds == ["header", "waits", "step", "waits", "step", "waits", "summary"]
    assert capsys.readouterr().out == ""


def test_a_led_run_that_fails_says_so_from_whatever_rank(new_log, card):
    bench = Bench(card)
    new_log(bench=bench).log.is_rank_0 = False
    sys.excepthook(KeyError, KeyError("wte"), None)
    assert bench.lines[-1]["message"] == "KeyError: 'wte'"
