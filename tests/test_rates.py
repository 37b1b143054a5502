"""The rates: each part against a clock that is known, and the probe as the bench starts it."""

from harness import machine, rates
from harness.bench import probe

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ROOT, python

CPU = torch.device("cpu")


def test_a_rate_is_what_was_done_over_the_seconds_that_it_took_without_the_first_call(monkeypatch):
    """Each call takes 10 ms: 2 * 64**3 FLOPs, or 4 bytes read and 4 written for each of 1000 numbers."""
    done = []
    monkeypatch.setattr(torch, "matmul", lambda a, b, out: done.append("matmul"))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda target, source: done.append("copy"))

    def seconds_of(repeats, *call, **options):
        done.append(repeats)
        return 0.01 * repeats

    monkeypatch.setattr(rates, "seconds_of", seconds_of)
    assert rates.matmul_peak(CPU, torch.float32, 64, seconds=0.5) == pytest.approx(2 * 64**3 / 0.01)
    assert rates.copy_bandwidth(CPU, 1000, copies=7) == pytest.approx(8 * 1000 / 0.01)
    assert done == ["matmul", 1, 51, "copy", 7]  # one matmul on the clock tells how many fill half a second


def test_the_clock_of_a_rate_waits_for_the_card_at_both_ends(card):
    card.queue(7)  # of what ran before
    assert rates.seconds_of(3, torch.device("cuda"), card.queue, 2) == 6


def test_float32_is_measured_without_tf32_also_after_a_measurement_of_tf32(monkeypatch):
    precisions, measured = ["high"], []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    monkeypatch.setattr(machine, "units_of", lambda device: {"tf32", "bfloat16"})
    monkeypatch.setattr(rates, "copy_bandwidth", lambda *arguments: 1.0)
    monkeypatch.setattr(rates, "matmul_peak", lambda device, dtype, *others: measured.append((dtype, precisions[-1])))
    assert rates.measure_rates(CPU, torch.bfloat16)["peak"].keys() == {"float32", "tf32", "bfloat16"}
    assert measured[:2] == [(torch.float32, "highest"), (torch.float32, "high")]


def test_the_probe_takes_the_median_of_its_measurements_without_the_cold_one(monkeypatch):
    cold, *warm = [{"peak": {"float32": 10 * rate}, "copy": rate} for rate in (9.0, 1.0, 4.0, 2.0)]
    monkeypatch.setattr(probe, "measure_rates", mock.Mock(side_effect=[cold, *warm]))
    assert probe.rates_of(SimpleNamespace(device=CPU, amp_dtype=None)) == {"peak": {"float32": 20.0}, "copy": 2.0}


def test_the_probe_says_what_the_bench_needs_and_how_fast_the_machine_is():
    script = ROOT / "stages" / "harness" / "bench" / "probe.py"
    flags = ("--device", "cpu", "--amp-dtype", "float32", "--data", "docs")
    about = json.loads(python(script, "--has-stages", *flags, MKL_VERBOSE="1").out)  # MKL prints by itself then
    assert (about["environment"]["device"], about["text"]) == ("cpu", "Python's documentation (one token per byte)")
    assert about["flags"] == ["--device", "cpu", "--batch-size", "1"]
    assert about["rates"]["peak"].keys() <= {"float32", "tf32"}
    assert min(about["rates"]["peak"]["float32"], about["rates"]["copy"]) > 0


def test_a_download_that_fails_is_tried_once_for_all_rows_and_notes_are_for_stages(monkeypatch, capsys):
    monkeypatch.setattr(probe, "rates_of", lambda args: {})
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    probe.main(["--device", "cpu"])
    printed = capsys.readouterr()
    assert (json.loads(printed.out)["flags"], printed.err) == (["--device", "cpu"], "")
    probe.main(["--has-stages", "--device", "cpu"])  # and no test has a network
    printed = capsys.readouterr()
    assert json.loads(printed.out)["flags"][-2:] == ["--data", "docs"]
    assert "MKL_CBWR=COMPATIBLE in the environment may change the speed" in printed.err
