"""What the machine can do: the rates of a machine whose speed is known, and the probe as the bench starts it."""

from harness import machine, rates

import json
import time
from collections import Counter

import pytest
import torch
from conftest import ROOT, python, run_script
from torch.overrides import TorchFunctionMode

PROBE = ROOT / "stages" / "harness" / "probe.py"
CPU, CARD = torch.device("cpu"), torch.device("cuda")
PEAK = {"float32": 1e14, "tf32": 2e14, "bfloat16": 4e14}  # of each machine below
COPY = 2e12


class Machine(TorchFunctionMode):
    """A machine with these rates, and its clock. It computes nothing: its tensors have shapes alone.

    A card does what it was asked for once it is waited for. What a machine does for the first time takes 5 s longer.
    times: how often it did a thing. seconds: how long that took without those 5 s.
    """

    def __init__(self):
        super().__init__()
        self.now = 100.0
        self.queued = 0.0
        self.times = Counter()
        self.seconds = Counter()

    def perf_counter(self):
        return self.now

    def synchronize(self):
        self.now += self.queued
        self.queued = 0.0

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        if "device" in options:
            self.device = options["device"]
            options = options | {"device": "meta"}
        if function is torch.matmul:
            matrix = arguments[0]
            dtype = machine.dtype_name(matrix.dtype)
            if dtype == "float32" and self.device == CARD and torch.get_float32_matmul_precision() == "high":
                dtype = "tf32"
            self.work(f"{dtype} {len(matrix)}", 2 * len(matrix) ** 3 / PEAK[dtype])
        if function is torch.Tensor.copy_:
            source = arguments[1]
            self.work(f"copy of {source.nbytes}", 2 * source.nbytes / COPY)
        return function(*arguments, **options)

    def work(self, what, seconds):
        """Take the time of something."""
        self.queued += seconds if what in self.times else seconds + 5
        self.times[what] += 1
        self.seconds[what] += seconds
        if self.device == CPU:
            self.synchronize()


@pytest.fixture
def fake(monkeypatch):
    """A Machine, whose card has TF32 and 80 GB."""
    fake = Machine()
    monkeypatch.setattr(time, "perf_counter", fake.perf_counter)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(machine, "has_tf32", lambda device: device.type == "cuda")
    monkeypatch.setattr(machine, "total_memory", lambda device: 80 * 10**9)
    with fake:
        yield fake
    torch.set_float32_matmul_precision("highest")


def test_a_cpu_multiplies_in_float32_and_in_16_bits(fake):
    measured = rates.measure(CPU, torch.bfloat16)
    assert measured["peak"] == pytest.approx({"float32": 1e14, "bfloat16": 4e14})
    assert measured["copy"] == pytest.approx(COPY)
    assert fake.seconds["float32 2048"] > 0.2
    assert fake.times[f"copy of {4 * 2**25}"] > 4  # more bytes than a cache holds


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_card_multiplies_in_tf32_too_and_leaves_the_precision_as_it_was(fake, precision):
    """It is "high" in a stage that ends with --profile, whose float32 is not to be measured in TF32."""
    torch.set_float32_matmul_precision(precision)
    measured = rates.measure(CARD, torch.bfloat16)
    assert measured["peak"] == pytest.approx(PEAK)
    assert measured["copy"] == pytest.approx(COPY)
    assert torch.get_float32_matmul_precision() == precision


def test_a_card_is_measured_for_long_and_on_more_than_its_caches_hold(fake):
    rates.measure(CARD, torch.bfloat16)
    for dtype in PEAK:
        assert fake.seconds[f"{dtype} 8192"] > 0.5
    assert fake.times[f"copy of {4 * 2**28}"] > 20


def test_a_small_card_copies_within_a_quarter_of_its_memory(fake, monkeypatch):
    monkeypatch.setattr(machine, "total_memory", lambda device: 4 * 10**9)
    rates.measure(CARD, torch.bfloat16)
    assert "copy of 500000000" in fake.times  # and another 500 MB to copy it to


def test_the_probe_measures_in_the_dtype_of_amp_dtype(fake, tmp_path):
    flags = ("--device", "cpu", "--amp-dtype", "bfloat16", "--steps", "1", "--record", tmp_path / "r.jsonl")
    run_script(PROBE, *flags)
    step, summary = (tmp_path / "r.jsonl").read_text().splitlines()
    assert json.loads(step)["peak"].keys() == {"float32", "bfloat16"}
    assert json.loads(summary) == {"kind": "summary"}


def test_the_probe_measures_once_for_each_line_of_its_stdin():
    flags = ("--device", "cpu", "--amp-dtype", "float32", "--worker", "--steps", "3")
    run = python(PROBE, *flags, stdin="\n\n", PYTHONPATH=str(ROOT / "stages"))
    first, second, summary = [json.loads(line) for line in run.out.splitlines()[1:]]
    assert [first["step"], second["step"], summary["kind"]] == [0, 1, "summary"]
    assert second["peak"]["float32"] > 0
    assert second["copy"] > 0
    assert second["dt"] > 0
