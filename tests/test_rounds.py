"""Rows run to their end, take no turns where memory is short, and one that fails says why."""

from harness.bench import rounds, row_process
from harness.bench.cells import remarks
from harness.bench.rows import THIS_PYTHON
from harness.bench.table import table_of
from harness.steps import WARMUP

import itertools
import json
import os
import re
import signal
import time
from unittest import mock

import pytest
from fixtures.records import results_of, row

pytestmark = pytest.mark.usefixtures("fakes")
TWO_RANKS = (*THIS_PYTHON["torchrun"], "--standalone", "--nproc_per_node=2")


def planned(plan, launcher=(), script="s01_baseline"):
    """Return a Row whose fake does as planned. plan: see fake_watch.py. launcher: words before the script."""
    env = ["env", "FAKE_ROW=a", f"FAKE_PLANS={json.dumps({'a': plan})}"]
    return row("a", script=script, launcher=[*env, *launcher])


def outcome_of(launcher=(), steps=WARMUP + 2, **plan):
    """Return the Outcome of one round of a row whose fake does as planned. steps: the most that it may take."""
    results = results_of(rows=[planned(plan, launcher)], steps=steps)
    rounds.run_one_after_the_other(0, results)
    return table_of(results).outcomes["a"]


def test_a_launcher_may_be_a_shell_script_without_its_first_line(tmp_path):
    launcher = tmp_path / "launch"
    launcher.write_text('exec "$@"')
    launcher.chmod(0o755)
    assert outcome_of([str(launcher)]).error is None


@pytest.mark.parametrize("dt, counted", [(0.125, 48), (1, 7), (0.01, 60)])
def test_a_row_counts_7_steps_and_six_seconds_and_60_steps_at_most(dt, counted):
    outcome = outcome_of(steps=WARMUP + 60, dt=dt)
    assert (len(outcome.counted), outcome.error) == (counted, None)


def test_a_script_that_ends_early_has_the_turns_that_it_took():
    """Four of its steps make a turn. Its first two steps are much slower, and do not count for that."""
    plan = {"dt": 0.005, "first_dt": 3.0, "do": "end", "at": WARMUP + 6}
    results = results_of(rows=[planned(plan, script="a.py")], turns=3)
    rounds.take_turns(0, results)
    assert [len(steps) for steps in results.runs["a", 0].turns.values()] == [4, 2]
    assert remarks(table_of(results).outcomes["a"])[0] == "ended by itself after 10 steps"


def test_the_clock_of_a_bench_begins_again_when_its_rows_do_and_the_numbers_of_processes_go_on():
    results = results_of(rows=[row("s01")])
    results.began -= 1000
    results.add({"kind": "start", "name": "s01", "round": 0})
    results.add({"kind": "apart", "reason": "memory is short"})
    assert time.monotonic() - results.began < 1000
    assert results.processes == 1


def test_the_time_left_is_that_of_the_processes_to_come_at_the_pace_so_far(monkeypatch, capsys):
    results = results_of(rows=[row("a"), row("b")])  # in three rounds
    results.add({"kind": "start", "name": "a", "round": 0})
    results.began = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: 1120.0)
    rounds.report(0, "a has ended", results)
    assert "; about 10 min left" in capsys.readouterr().err  # five processes of 120 s


@pytest.mark.parametrize(
    "do, message, out_of_memory",
    [
        ("crash", "RuntimeError: boom", False),
        ("end", "ended after 1 steps, and the first 4 are warm-up", False),
        ("refuse", "exit status 1; last printed: error: no, thanks", False),
        ("be killed", "killed by SIGKILL, most likely because memory was short", True),
        ("segfault", "killed by signal 11, Segmentation fault", False),
        ("run out of memory", "out of memory", True),
    ],
)
def test_a_row_that_fails_says_what_happened_to_it(do, message, out_of_memory):
    outcome = outcome_of(do=do, at=1)
    assert (outcome.error["message"], outcome.error["out_of_memory"]) == (message, out_of_memory)
    assert len(outcome.runs[0].steps) == 1


def test_a_row_that_hangs_is_gone_with_its_children(monkeypatch):
    """It and its child are deaf to SIGTERM. The fixture `fakes` holds that none is left."""
    monkeypatch.setattr(row_process, "PATIENCE", 2)
    assert outcome_of(do="hang", at=1).error["message"] == "no step within 2 s, so it was stopped"


def test_a_second_ctrl_c_leaves_no_row():
    process = mock.Mock(wait=mock.Mock(side_effect=[KeyboardInterrupt, None]))
    with mock.patch.object(os, "killpg") as kill, pytest.raises(KeyboardInterrupt):
        row_process.end_group(process)
    assert [call.args[1] for call in kill.call_args_list] == [signal.SIGTERM, signal.SIGKILL]


def test_a_pause_of_the_machine_fails_no_row(monkeypatch):
    """At each look at the clock a day has gone by."""
    monkeypatch.setattr(time, "monotonic", itertools.count(step=86400).__next__)
    assert outcome_of(dt=1).error is None


def test_the_rank_that_failed_first_is_quoted_and_a_loss_is_the_mean_of_all_ranks():
    assert outcome_of(TWO_RANKS, do="crash", at=1, rank=1).error["message"] == "rank 1: RuntimeError: boom"
    killed = outcome_of(TWO_RANKS, do="be killed", at=1, rank=1)
    assert killed.error["message"].startswith("rank 1: killed by SIGKILL")
    outcome = outcome_of(TWO_RANKS)
    assert outcome.seen.world_size == 2
    assert outcome.loss == pytest.approx((4.6 + 5.6) / 2)


@pytest.mark.parametrize(
    "free, reason, started",
    [
        (1, "memory can't hold all 3 processes at once", [1]),
        (50e6, None, [1, 1, 1]),  # a row takes 20 MB, and each that starts needs 30
        (70e6, None, [1, 2]),
    ],
)
def test_rows_start_two_at_once_or_one_or_take_no_turns_as_memory_allows(monkeypatch, free, reason, started):
    monkeypatch.setattr(rounds.meters, "free_memory", lambda: free)
    lines = []
    results = results_of(rows=[row("s01"), row("s02"), row("s03")], turns=3)
    monkeypatch.setattr(results, "write", lambda line: lines.append(line["kind"]))
    assert rounds.take_turns(0, results) == reason
    before_a_step = re.findall("(?:start )+", " ".join(kind for kind in lines if kind in ("start", "step")))
    assert [starts.count("start") for starts in before_a_step] == started
