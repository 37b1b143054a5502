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


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_each_fresh_page_is_touched_once(timer):
    nbytes = 1000 * mmap.PAGESIZE
    before = memory.page_faults()
    assert probe.clearing_rate(nbytes, mmap.MADV_NOHUGEPAGE) == pytest.approx(nbytes / 0.1)
    assert 1000 <= memory.page_faults() - before < 1500
    assert timer.repeats == [1]


def test_ranks_start_an_all_reduce_together(timer, monkeypatch):
    events = []
    gradient = torch.zeros(3)
    monkeypatch.setattr(dist, "barrier", lambda: events.append("barrier"))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: events.append(tensor))
    assert probe.all_reduce_seconds(gradient) == 0.1
    assert events == ["barrier", gradient]
    assert timer.repeats == [1]


@pytest.fixture
def measured(monkeypatch):
    """What the probe takes from rates.measure(), and how fast it finds that memory is handed out."""
    measured = {"size": 2048, "peak": {"float32": 1e11, "bfloat16": 4e11}, "copy": 2e10}
    clearing_rates = {mmap.MADV_NOHUGEPAGE: 2e9, mmap.MADV_HUGEPAGE: 8e9}
    monkeypatch.setattr(probe.rates, "measure", lambda device, amp_dtype: dict(measured))
    monkeypatch.setattr(probe, "clearing_rate", lambda nbytes, advice: clearing_rates[advice])
    return measured


def test_rates_of_a_cpu_tell_how_fast_memory_is_handed_out(measured):
    assert probe.device_rates(CPU, torch.bfloat16) == measured | {"clear": {"4 kB": 2e9, "2 MB": 8e9}}


def test_rates_of_a_card_are_those_of_its_matmuls_and_its_copy(measured):
    assert probe.device_rates(torch.device("cuda"), torch.bfloat16) == measured


@pytest.fixture
def bench(monkeypatch, measured):
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
