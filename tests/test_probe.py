"""What the machine can do: rates by a clock whose answers are known, and the probe as the bench starts it."""

from harness import probe, rates

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import python, run_script

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY = ("--device", "cpu", "--amp-dtype", "float32", "--size", "tiny", "--seq-len", "32")


@pytest.fixture
def clock(monkeypatch):
    """Takes the place of rates.seconds_of(): whatever is timed took `seconds`. Notes how many calls were timed."""
    clock = SimpleNamespace(seconds=0.1, repeats=[], is_running=False)

    def seconds_of(repeats, device, work, *arguments, **options):
        clock.repeats.append(repeats)
        clock.is_running = True
        for _ in range(repeats):
            work(*arguments, **options)
        clock.is_running = False
        return clock.seconds

    monkeypatch.setattr(rates, "seconds_of", seconds_of)
    return clock


def test_the_peak_is_the_flops_over_the_seconds(clock):
    """One matmul takes 0.1 s, so that 0.25 s have room for 2, and 1 + 2 are timed. Each is 2 * 10**3 FLOPs."""
    assert rates.matmul_peak(CPU, torch.float32, 10, seconds=0.25) == pytest.approx(3 * 2000 / 0.1)
    assert clock.repeats == [1, 3]


def test_a_copys_bytes_are_read_and_written(clock):
    """3 copies of 1000 float32 numbers: 3 * 2 * 4000 bytes."""
    assert rates.copy_bandwidth(CPU, 1000, copies=3) == pytest.approx(24_000 / 0.1)
    assert clock.repeats == [3]


def test_the_device_is_synchronized_before_each_reading_of_the_clock(monkeypatch):
    events, times = [], iter([10.0, 10.75])

    def perf_counter():
        events.append("clock")
        return next(times)

    monkeypatch.setattr(torch.mps, "synchronize", lambda: events.append("synchronize"))
    monkeypatch.setattr(rates.time, "perf_counter", perf_counter)
    assert rates.seconds_of(2, torch.device("mps"), events.append, "work") == 0.75
    assert events == ["synchronize", "clock", "work", "work", "synchronize", "clock"]


@pytest.fixture
def device(monkeypatch):
    """A device with 80 GB, TF32 or not: 1 TFLOP/s in float32, 2 in TF32, 4 in bfloat16. Notes what is asked of it."""
    device = SimpleNamespace(memory=80 * 10**9, tf32=True, matmuls=[], copied=0)

    def matmul_peak(_, dtype, n, seconds):
        precision = torch.get_float32_matmul_precision()
        device.matmuls.append((dtype, n))
        if dtype == torch.bfloat16:
            return 4e12
        return 2e12 if precision == "high" else 1e12

    def copy_bandwidth(_, length, copies):
        device.copied = 2 * 4 * length
        return 2e10

    monkeypatch.setattr(rates, "matmul_peak", matmul_peak)
    monkeypatch.setattr(rates, "copy_bandwidth", copy_bandwidth)
    monkeypatch.setattr(rates.machine, "total_memory", lambda _: device.memory)
    monkeypatch.setattr(rates.machine, "has_tf32", lambda _: device.tf32)
    yield device
    torch.set_float32_matmul_precision("highest")


def test_a_cpu_multiplies_in_float32_and_in_16_bits(device):
    device.tf32 = False
    measured = rates.measure(CPU, torch.bfloat16)
    assert measured == {"size": 2048, "peak": {"float32": 1e12, "bfloat16": 4e12}, "copy": 2e10}
    assert device.matmuls == [(torch.float32, 2048), (torch.bfloat16, 2048)]
    assert rates.measure(CPU, torch.float32)["peak"] == {"float32": 1e12}


def test_a_card_multiplies_larger_matrices_and_in_tf32_too(device):
    measured = rates.measure(CUDA, torch.bfloat16)
    assert measured["peak"] == {"float32": 1e12, "tf32": 2e12, "bfloat16": 4e12}
    assert {n for _, n in device.matmuls} == {measured["size"]} == {8192}
    assert device.copied == 8 * 2**28


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("tf32", [True, False], ids=["with TF32", "without"])
def test_the_precision_of_float32_matmuls_is_afterwards_as_it_was(device, precision, tf32):
    """It is "high" in a stage that ends with --profile, whose float32 is not to be measured in TF32."""
    device.tf32 = tf32
    torch.set_float32_matmul_precision(precision)
    assert rates.measure(CUDA, torch.bfloat16)["peak"]["float32"] == 1e12
    assert torch.get_float32_matmul_precision() == precision


def test_a_small_card_copies_within_a_quarter_of_its_memory(device):
    device.memory = 4 * 10**9
    rates.measure(CUDA, torch.bfloat16)
    assert device.copied == 10**9


def test_the_probe_measures_once_for_each_line_of_its_stdin():
    run = python(probe.__file__, *TINY, "--worker", "--steps", "3", stdin="\n\n")
    first, second, last = [json.loads(line) for line in run.out.splitlines()]
    assert (first["kind"], first["step"], second["kind"], second["step"]) == ("step", 0, "step", 1)
    assert second.keys() == {"kind", "step", "size", "peak", "copy"}
    assert second["peak"]["float32"] > 0
    assert second["copy"] > 0
    assert last == {"kind": "summary"}


def test_ranks_start_each_all_reduce_together(monkeypatch):
    events = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", events.append)
    monkeypatch.setattr(dist, "barrier", lambda: events.append("barrier"))
    monkeypatch.setattr(dist, "all_reduce", lambda gradient: events.append("all-reduce"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: events.append("leave"))
    assert run_script(probe.__file__, *TINY, "--steps", "2").status == 0
    assert events == ["gloo", "barrier", "all-reduce", "barrier", "all-reduce", "leave"]


def test_ranks_of_torchrun_time_an_all_reduce_of_one_gradient():
    """float32 numbers: 12 L C^2 for the blocks, and C for each of 50,257 tokens and 32 positions."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    run = python(*torchrun, probe.__file__, *TINY, "--worker", "--steps", "2", "--accum", "2", stdin="\n\n\n")
    first, second, last = [json.loads(line) for line in run.out.splitlines()]
    assert (first["step"], second["step"]) == (0, 1)
    assert first["bytes"] == 4 * (12 * 2 * 64**2 + (50257 + 32) * 64)
    assert second["dt"] > 0
    assert last == {"kind": "summary"}
