"""The probe's figures, from timers whose answers are known: FLOP/s, bytes per second, an all-reduce."""

from harness import memory, probe

import json
import mmap
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 50257, "n_layer": 2, "n_head": 2, "n_embd": 64}


@pytest.fixture
def timer(monkeypatch):
    """Takes the place of seconds_of(): what it times took `answer` seconds. Notes how many calls it timed."""
    timer = SimpleNamespace(answer=0.1, repeats=[], running=False)

    def seconds_of(repeats, device, work, *arguments, **options):
        timer.repeats.append(repeats)
        timer.running = True
        for _ in range(repeats):
            work(*arguments, **options)
        timer.running = False
        return timer.answer

    monkeypatch.setattr(probe, "seconds_of", seconds_of)
    return timer


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
    peak = probe.matmul_peak(CPU, torch.float32, 10, seconds=0.25)
    assert peak == pytest.approx(3 * 2000 / 0.1)
    assert timer.repeats == [1, 3]


def test_a_matmul_longer_than_the_time_is_timed_once(timer):
    timer.answer = 5.0
    assert probe.matmul_peak(CPU, torch.float32, 10, seconds=0.25) == pytest.approx(2000 / 5)
    assert timer.repeats == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matmul_peak_multiplies_two_random_matrices_of_the_dtype(matmuls, dtype):
    probe.matmul_peak(CPU, dtype, 10, seconds=0.05)
    a, b, product = matmuls[-1].a, matmuls[-1].b, matmuls[-1].out
    assert a.shape == b.shape == product.shape == (10, 10)
    assert a.dtype == b.dtype == product.dtype == dtype
    assert a.unique().numel() > 10
    assert not torch.equal(a, b)


def test_all_matmuls_write_to_one_output(matmuls):
    """On an H100 the products of half a second would hold 46 GB."""
    probe.matmul_peak(CPU, torch.float32, 10, seconds=1.0)
    outputs = {matmul.out.data_ptr() for matmul in matmuls}
    assert len(matmuls) > 10
    assert len(outputs) == 1


def test_the_first_matmul_is_not_on_the_clock(matmuls):
    probe.matmul_peak(CPU, torch.float32, 10, seconds=0.05)
    assert [matmul.timed for matmul in matmuls] == [False, True, True]


def test_copy_bandwidth_counts_bytes_read_and_written(timer):
    # 3 copies of 1000 float32 numbers, each read and written: 3 * 2 * 4000 bytes.
    assert probe.copy_bandwidth(CPU, 1000, copies=3) == pytest.approx(24_000 / 0.1)
    assert timer.repeats == [3]


def test_the_first_copy_is_not_on_the_clock(copies):
    probe.copy_bandwidth(CPU, 1000, copies=4)
    assert [copy.timed for copy in copies] == [False, True, True, True, True]


def test_all_copies_read_one_tensor_and_write_another(copies):
    probe.copy_bandwidth(CPU, 1000, copies=4)
    (source,) = {copy.source.data_ptr() for copy in copies}
    (target,) = {copy.target.data_ptr() for copy in copies}
    assert source != target
    assert copies[0].source.nbytes == copies[0].target.nbytes == 4000


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_each_fresh_page_is_touched_once(timer):
    nbytes = 1000 * mmap.PAGESIZE
    before = memory.page_faults()
    assert probe.clearing_rate(nbytes, mmap.MADV_NOHUGEPAGE) == pytest.approx(nbytes / 0.1)
    assert 1000 <= memory.page_faults() - before < 1500
    assert timer.repeats == [1]


def test_the_device_is_synchronized_before_each_reading_of_the_clock(monkeypatch):
    events = []
    clock = iter([10.0, 10.75])

    def perf_counter():
        events.append("clock")
        return next(clock)

    monkeypatch.setattr(torch.mps, "synchronize", lambda: events.append("synchronize"))
    monkeypatch.setattr(probe.time, "perf_counter", perf_counter)
    seconds = probe.seconds_of(2, torch.device("mps"), events.append, "work")
    assert seconds == 0.75
    assert events == ["synchronize", "clock", "work", "work", "synchronize", "clock"]


def test_ranks_start_an_all_reduce_together(timer, monkeypatch):
    events = []
    gradient = torch.zeros(3)
    monkeypatch.setattr(dist, "barrier", lambda: events.append("barrier"))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: events.append(tensor))
    assert probe.all_reduce_seconds(gradient) == 0.1
    assert events == ["barrier", gradient]
    assert timer.repeats == [1]


@pytest.fixture
def rates(monkeypatch):
    """Takes the place of what measures a device. Notes what it is asked for."""
    rates = SimpleNamespace(peak={torch.float32: 1e11, torch.bfloat16: 4e11}, copy=2e10, asked=[], copied=[])
    clearing_rates = {mmap.MADV_NOHUGEPAGE: 2e9, mmap.MADV_HUGEPAGE: 8e9}

    def matmul_peak(device, dtype, n, seconds):
        rates.asked.append((device.type, n, seconds))
        return rates.peak[dtype]

    def copy_bandwidth(device, length, copies):
        rates.copied.append((device.type, length, copies))
        return rates.copy

    monkeypatch.setattr(probe, "matmul_peak", matmul_peak)
    monkeypatch.setattr(probe, "copy_bandwidth", copy_bandwidth)
    monkeypatch.setattr(probe, "clearing_rate", lambda nbytes, advice: clearing_rates[advice])
    return rates


def test_rates_of_a_cpu(rates):
    assert probe.device_rates(CPU, torch.bfloat16) == {
        "size": 2048,
        "peak": {"float32": 1e11, "bfloat16": 4e11},
        "copy": 2e10,
        "clear": {"4 kB": 2e9, "2 MB": 8e9},
    }
    assert rates.asked == [("cpu", 2048, 0.2), ("cpu", 2048, 0.2)]
    assert rates.copied == [("cpu", 2**25, 4)]


def test_an_accelerator_multiplies_larger_matrices_for_longer(rates, monkeypatch):
    monkeypatch.setattr(probe.machine, "total_memory", lambda device: 80 * 10**9)
    assert probe.device_rates(torch.device("cuda"), torch.bfloat16)["size"] == 8192
    assert rates.asked == [("cuda", 8192, 0.5), ("cuda", 8192, 0.5)]


def test_an_accelerator_makes_more_copies_of_a_tensor_that_no_cache_holds(rates, monkeypatch):
    monkeypatch.setattr(probe.machine, "total_memory", lambda device: 80 * 10**9)
    probe.device_rates(torch.device("cuda"), torch.bfloat16)
    assert rates.copied == [("cuda", 2**28, 40)]


def test_a_small_card_copies_within_a_quarter_of_its_memory(rates, monkeypatch):
    monkeypatch.setattr(probe.machine, "total_memory", lambda device: 4 * 10**9)
    probe.device_rates(torch.device("cuda"), torch.bfloat16)
    ((_, length, _),) = rates.copied
    source_and_target = 2 * 4 * length
    assert source_and_target == 10**9


def test_float32_is_measured_once_where_there_is_no_other_type(rates):
    assert probe.device_rates(CPU, torch.float32)["peak"] == {"float32": 1e11}
    assert len(rates.asked) == 1


@pytest.fixture
def bench(monkeypatch, rates):
    """Takes the place of the bench: it wants `wanted` steps of 5, and keeps the lines of the record."""
    bench = SimpleNamespace(wanted=5, asked=0, lines=[])

    class Record:
        def __init__(self, args):
            assert args.steps == 5

        def next_step_wanted(self):
            bench.asked += 1
            return bench.asked <= bench.wanted

        def write(self, kind, **entry):
            bench.lines.append(json.loads(json.dumps({"kind": kind, **entry}, allow_nan=False)))

    args = SimpleNamespace(steps=5, device=CPU, amp_dtype=torch.bfloat16, shape=SHAPE, seq_len=32)
    monkeypatch.setattr(probe, "parse_args", lambda doc: args)
    monkeypatch.setattr(probe, "Record", Record)
    return bench


def test_the_probe_measures_when_the_bench_asks(bench):
    bench.wanted = 2
    probe.main()
    clear = {"4 kB": 2e9, "2 MB": 8e9}
    rates = {"size": 2048, "peak": {"float32": 1e11, "bfloat16": 4e11}, "copy": 2e10, "clear": clear}
    assert bench.lines == [{"kind": "step", "step": 0, **rates}, {"kind": "step", "step": 1, **rates}]


def test_the_probe_waits_with_its_exit_for_the_bench(bench):
    probe.main()
    assert [line["step"] for line in bench.lines] == [0, 1, 2, 3, 4]
    assert bench.asked == 5 + 1


def test_float32_is_measured_without_tf32(bench):
    torch.set_float32_matmul_precision("high")
    probe.main()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture
def group(monkeypatch):
    """Takes the place of torch.distributed's group of 2 ranks, and notes what it does."""
    events = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", lambda backend: events.append(f"join {backend}"))
    monkeypatch.setattr(dist, "barrier", lambda: events.append("barrier"))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: events.append(f"all-reduce {tensor.nbytes}"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: events.append("leave"))
    return events


def test_several_ranks_reduce_one_gradient_of_the_model(bench, group, timer):
    bench.wanted = 1
    probe.main()
    # float32: 12 L C^2 for the blocks, C for each of 50,257 tokens and 32 positions
    nbytes = 4 * (12 * 2 * 64**2 + (50257 + 32) * 64)
    assert bench.lines == [{"kind": "step", "step": 0, "dt": 0.1, "bytes": nbytes}]
    assert group == ["join gloo", "barrier", f"all-reduce {nbytes}", "leave"]


def test_the_probe_is_a_worker_that_takes_a_step_for_each_line_of_its_stdin(stages, tmp_path):
    flags = ["--worker", "--steps", "3", "--device", "cpu", "--amp-dtype", "float32"]
    run = stages.run_script(probe.__file__, flags, tmp_path, stdin="\n")
    assert run.status == 0, run.err
    line = json.loads(run.out)
    assert line.keys() == {"kind", "step", "size", "peak", "copy", "clear"}
    assert line["peak"]["float32"] > 0
    assert line["copy"] > 0
