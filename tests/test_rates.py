"""How fast a device multiplies and copies, from timers whose answers are known: FLOP/s and bytes per second."""

from harness import rates

from types import SimpleNamespace

import pytest
import torch

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.fixture
def matmuls(monkeypatch, timer):
    """Each matmul that PyTorch carries out in a test: matrices a and b, its output, whether it was timed."""
    matmuls = []
    matmul = torch.matmul

    def noted_matmul(a, b, out):
        matmuls.append(SimpleNamespace(a=a, b=b, out=out, timed=timer.running))
        return matmul(a, b, out=out)

    monkeypatch.setattr(torch, "matmul", noted_matmul)
    return matmuls


@pytest.fixture
def copies(monkeypatch, timer):
    """Each copy that PyTorch carries out in a test: its target, its source, whether it was timed."""
    copies = []
    copy = torch.Tensor.copy_

    def noted_copy(target, source):
        copies.append(SimpleNamespace(target=target, source=source, timed=timer.running))
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", noted_copy)
    return copies


def test_matmul_peak_is_the_flops_over_the_seconds(timer):
    # One matmul takes 0.1 s, so 0.25 s have room for 2, and 1 + 2 are timed. Each is 2 * 10**3 FLOPs.
    peak = rates.matmul_peak(CPU, torch.float32, 10, seconds=0.25)
    assert peak == pytest.approx(3 * 2000 / 0.1)
    assert timer.repeats == [1, 3]


def test_a_matmul_longer_than_the_time_is_timed_once(timer):
    timer.answer = 5.0
    assert rates.matmul_peak(CPU, torch.float32, 10, seconds=0.25) == pytest.approx(2000 / 5)
    assert timer.repeats == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matmul_peak_multiplies_two_random_matrices_of_the_dtype(matmuls, dtype):
    rates.matmul_peak(CPU, dtype, 10, seconds=0.05)
    a, b, product = matmuls[-1].a, matmuls[-1].b, matmuls[-1].out
    assert a.shape == b.shape == product.shape == (10, 10)
    assert a.dtype == b.dtype == product.dtype == dtype
    assert a.unique().numel() > 10
    assert not torch.equal(a, b)


def test_all_matmuls_write_to_one_output(matmuls):
    """On an H100 the products of half a second would hold 46 GB."""
    rates.matmul_peak(CPU, torch.float32, 10, seconds=1.0)
    outputs = {matmul.out.data_ptr() for matmul in matmuls}
    assert len(matmuls) > 10
    assert len(outputs) == 1


def test_the_first_matmul_is_not_on_the_clock(matmuls):
    rates.matmul_peak(CPU, torch.float32, 10, seconds=0.05)
    assert [matmul.timed for matmul in matmuls] == [False, True, True]


def test_copy_bandwidth_counts_bytes_read_and_written(timer):
    # 3 copies of 1000 float32 numbers, each read and written: 3 * 2 * 4000 bytes.
    assert rates.copy_bandwidth(CPU, 1000, copies=3) == pytest.approx(24_000 / 0.1)
    assert timer.repeats == [3]


def test_the_first_copy_is_not_on_the_clock(copies):
    rates.copy_bandwidth(CPU, 1000, copies=4)
    assert [copy.timed for copy in copies] == [False, True, True, True, True]


def test_all_copies_read_one_tensor_and_write_another(copies):
    rates.copy_bandwidth(CPU, 1000, copies=4)
    (source,) = {copy.source.data_ptr() for copy in copies}
    (target,) = {copy.target.data_ptr() for copy in copies}
    assert source != target
    assert copies[0].source.nbytes == copies[0].target.nbytes == 4000


def test_the_device_is_synchronized_before_each_reading_of_the_clock(monkeypatch):
    events = []
    clock = iter([10.0, 10.75])

    def perf_counter():
        events.append("clock")
        return next(clock)

    monkeypatch.setattr(torch.mps, "synchronize", lambda: events.append("synchronize"))
    monkeypatch.setattr(rates.time, "perf_counter", perf_counter)
    seconds = rates.seconds_of(2, torch.device("mps"), events.append, "work")
    assert seconds == 0.75
    assert events == ["synchronize", "clock", "work", "work", "synchronize", "clock"]


@pytest.fixture
def device(monkeypatch):
    """A device of 80 GB with TF32 units. Notes what it is asked for, and in which precision float32 is multiplied."""
    device = SimpleNamespace(memory=80 * 10**9, has_tf32=True, matmuls=[], copies=[])

    def matmul_peak(device_asked, dtype, n, seconds):
        precision = torch.get_float32_matmul_precision()
        device.matmuls.append((dtype, precision, n, seconds))
        if dtype == torch.bfloat16:
            return 4e11
        return 2e11 if precision == "high" else 1e11

    def copy_bandwidth(device_asked, length, copies):
        device.copies.append((length, copies))
        return 2e10

    monkeypatch.setattr(rates, "matmul_peak", matmul_peak)
    monkeypatch.setattr(rates, "copy_bandwidth", copy_bandwidth)
    monkeypatch.setattr(rates.machine, "total_memory", lambda device_asked: device.memory)
    monkeypatch.setattr(rates.machine, "has_tf32", lambda device_asked: device.has_tf32)
    return device


def test_a_cpu_multiplies_in_float32_and_in_16_bits(device):
    device.has_tf32 = False
    measured = rates.measure(CPU, torch.bfloat16)
    assert measured == {"size": 2048, "peak": {"float32": 1e11, "bfloat16": 4e11}, "copy": 2e10}
    assert device.matmuls == [(torch.float32, "highest", 2048, 0.2), (torch.bfloat16, "highest", 2048, 0.2)]
    assert device.copies == [(2**25, 4)]


def test_float32_is_measured_once_where_there_is_no_other_type(device):
    device.has_tf32 = False
    assert rates.measure(CPU, torch.float32)["peak"] == {"float32": 1e11}
    assert len(device.matmuls) == 1


def test_an_accelerator_multiplies_larger_matrices_for_longer_and_in_tf32_too(device):
    measured = rates.measure(CUDA, torch.bfloat16)
    assert measured["size"] == 8192
    assert measured["peak"] == {"float32": 1e11, "tf32": 2e11, "bfloat16": 4e11}
    assert [(n, seconds) for _, _, n, seconds in device.matmuls] == 3 * [(8192, 0.5)]


def test_the_precision_of_float32_matmuls_is_afterwards_as_it_was(device):
    device.has_tf32 = False
    torch.set_float32_matmul_precision("high")  # as in a stage that --profile ends
    rates.measure(CUDA, torch.bfloat16)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    assert precision == "high"
    assert device.matmuls[0][:2] == (torch.float32, "highest")


def test_an_accelerator_makes_more_copies_of_a_tensor_that_no_cache_holds(device):
    rates.measure(CUDA, torch.bfloat16)
    assert device.copies == [(2**28, 40)]


def test_a_small_card_copies_within_a_quarter_of_its_memory(device):
    device.memory = 4 * 10**9
    rates.measure(CUDA, torch.bfloat16)
    ((length, _),) = device.copies
    source_and_target = 2 * 4 * length
    assert source_and_target == 10**9
