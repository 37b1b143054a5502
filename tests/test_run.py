"""A run without a script: its clock, its meters and its profile, and what it says of where the time goes."""

from harness import meters
from harness.figures import Step
from harness.seen import Seen
from harness.steps import WARMUP
from harness.watch import gate, pytorch, timeline
from harness.watch.causes import causes
from harness.watch.events import KINDS, Batch, Call, Habits, count_of
from harness.watch.log import Log
from harness.watch.operations import IN_16_BITS
from harness.watch.profiler import StepProfiler, busy_ms
from harness.watch.run import Run
from harness.watch.timeline import Timeline

import os
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fixtures.records import SEEN
from torch.autograd import DeviceType


def test_a_step_is_over_when_the_cards_are(card, monkeypatch):
    timed = []
    monkeypatch.setattr(Run, "record", lambda run, step, micro_batches: timed.append(step.dt))
    run = Run(None, SimpleNamespace(gate=None, steps=9), Log(None, WARMUP))
    run.timeline.cards = [torch.device("cuda")]
    run.log.device = torch.device("cpu")
    run.steps_taken = 2
    for seconds in (5, 3):
        card.queue(100)  # between two steps
        run.begin_step()
        card.queue(seconds)
        run.end_step()
    assert timed == [5, 3]


def test_the_peak_of_memory_is_read_anew_after_the_warm_up(monkeypatch):
    peaks = [9]
    monkeypatch.setattr(meters, "peak_memory", lambda device: (peaks[-1], "a meter"))
    monkeypatch.setattr(meters, "reset_peak_memory", lambda device: peaks.append(1))
    log = Log(None, warmup=2)
    log.device = torch.device("cpu")
    for _ in range(4):
        log.add_step(Step(None, 0.1, {}), may_be_last=False)
        log.read_last_meters()  # as if the script had ended
    assert [step.memory for step in log.steps] == [9, 9, 1, 1]


def test_on_a_card_the_last_steps_of_the_warm_up_wait_after_each_part():
    log = Log(None, warmup=4)
    log.device = torch.device("cuda")
    assert [number for number in range(9) if log.waits_in(number)] == [2, 3]


def test_a_row_ends_if_its_bench_is_gone_also_if_nobody_has_asked_for_that(monkeypatch, tmp_path):
    monkeypatch.setattr(gate, "end_process", mock.Mock(side_effect=SystemExit))
    monkeypatch.setattr(time, "sleep", mock.Mock(side_effect=TimeoutError))  # it waits on
    path = tmp_path / "gate"
    path.touch()
    with subprocess.Popen([sys.executable, "-c", ""]) as bench:
        os.waitid(os.P_PID, bench.pid, os.WEXITED | os.WNOWAIT)  # which leaves a zombie
        with pytest.raises(SystemExit):
            gate.wait_for_step(path, bench.pid, 0)
    with pytest.raises(SystemExit):
        gate.wait_for_step(path, bench.pid, 0)
    with pytest.raises(TimeoutError):
        gate.wait_for_step(path, os.getpid(), 0)


def test_a_step_of_very_many_calls_is_read_before_its_end(monkeypatch):
    """The optimizer of a script may never step."""
    monkeypatch.setattr(timeline, "MOST", 50)
    log = SimpleNamespace(steps=[], waits_in=lambda number: False)
    run = Run(None, SimpleNamespace(gate=None), log)
    model = torch.nn.Linear(1, 1)
    began = run.timeline.marks[0][2]
    batch = Batch("sample", 4, None, 4)
    for number in range(500):
        run.timeline.mark("forward")
        run.timeline.note("call", Call(model, True, 0, str(number), batch))
        run.timeline.mark("rest")
        assert len(run.timeline.marks) <= 51 and len(run.timeline.notes) <= 51
    run.timeline.end_step()
    run.add_up_lists()
    assert count_of(run.step.micro_batches, "sample") == 2000
    assert sum(run.step.spent.values()) == pytest.approx(run.timeline.marks[-1][1] - began)


def test_what_a_hook_does_is_on_the_clock_of_a_card_alone():
    timeline = Timeline(StepProfiler(), add_up_lists=None)
    timeline.begin_step(waits=False)
    timeline.mark("forward", entered=1.0)
    kind, entered, left = timeline.marks[-1]
    assert (kind, entered) == ("forward", 1.0) and left > 1.0
    timeline.cards = [torch.device("cuda")]
    timeline.mark("rest", entered=1.0)
    kind, entered, left = timeline.marks[-1]
    assert (kind, entered) == ("rest", left)


def test_what_the_profiler_does_is_not_on_the_clock(card):
    profiler = SimpleNamespace(is_open=True, kind_begins=lambda kind: card.synchronize())
    timeline = Timeline(profiler, add_up_lists=None)
    timeline.begin_step(waits=False)
    card.queue(9)  # seconds in which the profiler lists what it saw
    timeline.mark("rest")
    assert timeline.marks[-1] == ("rest", 0.0, 9.0)


def test_a_profile_on_a_cpu_ends_before_another_micro_batch_if_it_has_seen_enough(monkeypatch):
    monkeypatch.setattr(pytorch, "nodes_made", mock.Mock(side_effect=[0, 900, 1100, 1100]))
    profile = StepProfiler()
    profile.start(torch.device("cpu"), "rest")
    is_open = []
    for kind in ("forward", "backward", "forward"):
        profile.kind_begins(kind)
        is_open.append(profile.is_open)
    assert is_open == [True, True, False]


def test_a_card_is_busy_while_at_least_one_kernel_runs():
    def event(kind, start, end):
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(device_type=kind, time_range=span, is_user_annotation=False)

    events = [event(DeviceType.CUDA, 0, 1000), event(DeviceType.CUDA, 500, 2000), event(DeviceType.CUDA, 4000, 5000)]
    assert busy_ms([*events, event(DeviceType.CPU, 0, 9000)]) == 3.0


def test_what_autocast_may_compute_in_16_bits_is_known_by_its_name():
    in_16_bits = ["aten::addmm", "aten::mv", "aten::convolution", "aten::linear", "aten::lstm"]
    others = ["aten::lgamma", "aten::mvlgamma", "aten::upsample_bilinear2d", "aten::upsample_linear1d", "aten::mul"]
    assert [name for name in in_16_bits + others if IN_16_BITS.search(name)] == in_16_bits


# What takes the time


def run_that_spent(device, **spent):
    """What causes() needs of a Run whose steps take 0.1 s each. spent: seconds of a step."""
    steps = 9 * [Step(None, 0.1, dict.fromkeys(KINDS, 0.0) | spent)]
    log = SimpleNamespace(reported_steps=lambda: steps, counted_steps=lambda: steps)
    log.device, log.seen = torch.device(device), Seen.of_line(SEEN)
    own_code = SimpleNamespace(lines={"rest": Counter({"train.py:3": 0.9}), "loss": Counter({"train.py:7": 0.9})})
    return SimpleNamespace(log=log, own_code=own_code, habits=Habits(), optimizers=[])


def test_on_a_card_what_a_running_queue_hides_is_no_cause():
    """Without a profile nobody knows how long the card waited."""
    run = run_that_spent("cuda", rest=0.09, forward=0.01)
    assert causes(run) == []
    run.log.seen.busy_ms = 20.0
    assert causes(run)[0] == "80 % is the script's own code, neither forward, loss, backward nor update"


def test_a_card_that_is_idle_is_so_for_one_reason():
    run = run_that_spent("cuda", data=0.05, rest=0.04, forward=0.01)
    run.habits.loaders, run.log.seen.busy_ms = {0: 9}, 60.0
    [words] = causes(run)
    assert words.startswith("40 % is waiting for a DataLoader")


@pytest.mark.parametrize(
    "spent, told",
    [
        ({"data": 0.012}, ["12 % is waiting for a DataLoader with num_workers=2"]),
        ({"data": 0.008, "evaluation": 0.008}, []),
        ({"evaluation": 0.012}, ["12 % goes to forwards without gradients"]),
        ({"loss": 0.04, "backward": 0.05}, ["40 % is the loss", "    40 % train.py:7"]),
        ({"loss": 0.02, "backward": 0.05}, []),  # less than the forward
    ],
)
def test_what_takes_much_of_the_time_on_a_cpu_is_told(spent, told):
    run = run_that_spent("cpu", forward=0.1 - sum(spent.values()), **spent)
    run.habits.loaders = {0: 1, 2: 9}  # batches of loaders by their workers
    shares = [words for words in causes(run) if "%" in words]  # without one on a card that this machine may have
    assert [words[: len(begin)] for words, begin in zip(shares, told, strict=True)] == told


def test_groups_with_equal_settings_are_told_if_there_are_many():
    run = run_that_spent("cpu", forward=0.05, update=0.05)
    words = "11 parameter groups have the same settings: one group makes the update faster"
    for count, is_told in ((10, False), (11, True)):
        run.optimizers = [torch.optim.AdamW([{"params": [torch.zeros(3)]} for _ in range(count)])]
        assert (words in causes(run)) == is_told
