"""The rates: each part against a clock that is known, and the probe as the bench starts it."""

from harness import machine, meters, rates
from harness.bench import probe

from functools import partial

import pytest
import torch
from conftest import ROOT, lines_of, python

CPU, CARD = torch.device("cpu"), torch.device("cuda")


def test_a_rate_is_what_was_done_over_the_seconds_that_it_took_without_the_first_call(monkeypatch):
    """Each call takes 10 ms: 2 * 64**3 FLOPs, or 4 bytes read and 4 written for each of 1000 numbers."""
    done = []
    monkeypatch.setattr(torch, "matmul", lambda a, b, out: done.append("matmul"))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda target, source: done.append("copy"))
    monkeypatch.setattr(rates, "seconds_of", lambda repeats, *call, **options: done.append(repeats) or 0.01 * repeats)
    assert rates.matmul_peak(CPU, torch.float32, 64, seconds=0.5) == pytest.approx(2 * 64**3 / 0.01)
    assert rates.copy_bandwidth(CPU, 1000, copies=7) == pytest.approx(8 * 1000 / 0.01)
    assert done == ["matmul", 1, 51, "copy", 7]  # one matmul on the clock tells how many fill half a second


def test_each_kind_of_device_is_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    for name in ("cuda:1", "mps", "cpu"):
        meters.synchronize(torch.device(name))
    assert waited == [torch.device("cuda:1"), "mps"]  # a script on cuda:1 may not have made that the current card


@pytest.mark.parametrize(
    "device, units, amp_dtype, names",
    [
        (CPU, {"bfloat16"}, torch.bfloat16, ["float32", "bfloat16"]),
        (CPU, {"bfloat16"}, torch.float16, ["float32"]),  # it would emulate the type, and take a minute
        (CARD, {"bfloat16", "float16", "tf32"}, torch.float16, ["float32", "tf32", "float16"]),
    ],
)
def test_what_a_device_has_units_for_is_measured_and_float32_without_tf32(monkeypatch, device, units, amp_dtype, names):
    precisions = []

    def matmul_peak(device, dtype, n, seconds):
        precisions.append(torch.get_float32_matmul_precision())

    monkeypatch.setattr(rates, "matmul_peak", matmul_peak)
    monkeypatch.setattr(rates, "copy_bandwidth", lambda device, length, copies: length)
    monkeypatch.setattr(machine, "units_of", lambda device: units)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(machine, "free_memory_of_card", lambda device: 4 * 10**9)
    torch.set_float32_matmul_precision("high")  # as in a stage that ends with --profile
    measured = rates.measure(device, amp_dtype)
    torch.set_float32_matmul_precision("highest")
    assert list(measured["peak"]) == names
    assert precisions[0] == "highest"
    if device == CARD:
        assert precisions[1] == "high"
        assert measured["copy"] == 125_000_000  # numbers of 4 bytes there twice, a quarter of the card


def test_a_clock_waits_for_the_device_before_and_after(monkeypatch):
    queued = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: queued.append("wait"))
    rates.seconds_of(2, CARD, partial(queued.append, "work"))
    assert queued == ["wait", "work", "work", "wait"]


def test_the_probe_says_what_the_bench_needs_and_how_fast_the_machine_is(tmp_path):
    probe = ROOT / "stages" / "harness" / "bench" / "probe.py"
    flags = ("--device", "cpu", "--amp-dtype", "float32", "--data", "docs")
    ended = python(probe, tmp_path / "record", "stages", *flags)
    about, line = lines_of(tmp_path / "record")
    assert ended.status == 0
    assert (about["environment"]["device"], about["text"]) == ("cpu", "Python's documentation, a token a byte")
    assert about["flags"] == ["--device", "cpu", "--batch-size", "1"]
    assert line["peak"].keys() <= {"float32", "tf32"}
    assert min(line["peak"]["float32"], line["copy"]) > 0


def test_a_download_that_fails_is_tried_once_for_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "rates_of", lambda args: {})
    probe.main(str(tmp_path / "record"), "stages", "--device", "cpu")  # and no test has a network
    assert lines_of(tmp_path / "record")[0]["flags"][-2:] == ["--data", "docs"]
