"""Workers take a step each when they are asked, in turn, and one that fails says why and costs its own row alone."""

from harness import ladder, machine
from harness.bench import turns, workers
from harness.bench.workers import Worker
from harness.figures import WARMUP
from harness.leader import STEP

import io
import json
import signal
import time

import pytest
from conftest import ROOT
from fixtures.fake_stage import LONG, MEMORY
from fixtures.records import results_of, row

FAKE_STAGE = ROOT / "tests" / "fixtures" / "fake_stage.py"

TWO_RANKS = ("torchrun", "--standalone", "--nproc_per_node=2")


@pytest.fixture(autouse=True)
def fake_of_s01(fakes, tmp_path, monkeypatch):
    """A fake in place of s01."""
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "s01_baseline.py").symlink_to(FAKE_STAGE)
    monkeypatch.setattr(ladder, "ROOT", tmp_path)


def fake_row(name, launcher=(), **plan):
    """A Row at which a fake of s01 is at work, and does as planned."""
    env = ["env", f"FAKE_ROW={name}", f"FAKE_PLANS={json.dumps({name: plan})}"]
    return row(name, script="s01_baseline", launcher=[*env, *launcher])


def results_to_fill(*rows, steps=WARMUP + 2, file=None, **others):
    """The Results of a bench of these rows, with no line so far. others: of its first line."""
    results = results_of(rows=[row("probe"), *rows], steps=steps, flags=["--steps", "200"], **others)
    results.file = file
    return results


def in_turn(*rows):
    """{name: Run} of these rows, which took six steps in turn."""
    results = results_to_fill(*rows)
    assert turns.take_round(rows, 0, results)
    return {name: run for (name, _), run in results.runs.items()}


def test_rows_step_in_turn_there_and_back_and_a_script_that_loads_its_data_ahead_takes_all_its_steps_at_once():
    """Its loader would get ahead while the others take their steps."""
    rows = [fake_row("a"), fake_row("b", techniques={"loaders": 1}), fake_row("c")]
    results = results_to_fill(*rows, steps=WARMUP + 3, file=io.StringIO())
    assert turns.take_round(rows, 0, results)
    lines = [json.loads(line) for line in results.file.getvalue().splitlines()]
    order = "".join(line["name"] for line in lines if line["kind"] == "step")
    assert order == "aaaa" + "bbbbbbb" + "cccc" + "accaac"


@pytest.mark.parametrize("dt, counted", [(0.125, 48), (1, 20), (0.01, 60)])
def test_a_row_alone_counts_20_steps_and_six_seconds_and_60_steps_at_most(dt, counted):
    results = results_to_fill(fake_row("a", dt=dt), steps=WARMUP + 60, in_turn=False)
    turns.take_round([results.rows["a"]], 0, results)
    run = results.runs["a", 0]
    assert len(run.counted) == counted
    assert run.summary


# A row that fails


@pytest.mark.parametrize(
    "do, message, out_of_memory",
    [
        ("crash", "exit status 1; last printed: RuntimeError: boom", False),
        ("leave with status 0", "ended after 1 of 6 steps", False),
        ("leave a child", "exit status 3", False),  # which holds all that the row had open
        ("be killed", "killed by SIGKILL", True),
        ("segfault", "killed by SIGSEGV", False),
    ],
)
def test_a_row_that_fails_says_what_happened_to_it(do, message, out_of_memory):
    error = in_turn(fake_row("a", do=do, at=1))["a"].error
    assert (error["message"], error["out_of_memory"]) == (message, out_of_memory)


@pytest.mark.parametrize("moment", ["start", "end"])
def test_a_row_that_cannot_be_started_or_fails_at_its_start_or_end_costs_no_other_row_a_step(tmp_path, moment):
    gone = row("b", script="s01_baseline", launcher=[str(tmp_path / "gone")])
    runs = in_turn(fake_row("a"), gone, fake_row("c", do="crash", at=moment))
    assert runs["b"].error["message"].startswith("it can't be started: [Errno 2] No such file or directory")
    assert 'raise RuntimeError("boom")' in runs["c"].error["traceback"]
    assert runs["a"].summary
    assert [step["step"] for step in runs["a"].steps] == [*range(WARMUP + 2)]


def test_what_a_row_prints_is_no_line_of_its_record_and_only_its_end_is_kept():
    run = in_turn(fake_row("a", do="print", at=1, words='{"kind": "summary"}'))["a"]
    assert run.summary["sdpa"] == "flash"
    error = in_turn(fake_row("b", do="print megabytes and fail", at=1, words="last words"))["b"].error
    assert error["message"] == "exit status 3; last printed: last words"
    assert len(error["traceback"]) < 30_000


def test_a_row_that_hangs_is_gone_with_its_children_before_the_others_take_their_steps(monkeypatch):
    """It and its child are deaf to SIGTERM."""
    monkeypatch.setattr(workers, "PATIENCE", 1)
    results = results_to_fill(fake_row("a", do="hang", at=1))
    worker = Worker(results.rows["a"], results, 0)
    worker.take_steps(2)
    assert worker.run.error["message"] == "no step in 1 s: stopped"
    assert worker.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("end", ["crash", "hang"])
def test_a_bad_end_after_the_summary_costs_nothing(monkeypatch, end):
    monkeypatch.setattr(workers, "PATIENCE_AT_THE_END", 0.2)
    run = in_turn(fake_row("a", do=end, at="after"))["a"]
    assert run.summary and not run.error


def test_rows_that_memory_does_not_hold_at_once_are_not_led_in_turn(monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 1.6 * MEMORY)
    in_turn(fake_row("a"), fake_row("b"))  # half as much again as the one above is free
    for larger in (fake_row("b", memory=2 * MEMORY), fake_row("b", TWO_RANKS)):
        rows = [fake_row("a"), larger, fake_row("c")]
        results = results_to_fill(*rows)
        assert not turns.take_round(rows, 0, results)
        assert turns.take_round(rows, 1, results)  # what was measured in round 0 must not be lost


# Ranks, and the end of the bench


def test_the_rank_that_failed_first_is_quoted():
    bad = [fake_row(do, TWO_RANKS, do=do, at=1, rank=1) for do in ("refuse", "be killed")]
    runs = in_turn(*bad, fake_row("good", TWO_RANKS))
    assert runs["refuse"].error["message"] == "rank 1: exit status 1; last printed: error: no, thanks"
    assert runs["be killed"].error["message"] == "rank 1: killed by SIGKILL"
    assert runs["be killed"].error["out_of_memory"]
    assert runs["good"].summary
    assert runs["good"].header["settings"]["world_size"] == 2


def test_ranks_end_with_their_bench_whatever_they_do():
    """The system ends the connections of a bench that was killed. A fixture sees that ranks and children are gone."""
    results = results_to_fill(fake_row("a", TWO_RANKS, do="hang", at=1))
    worker = Worker(results.rows["a"], results, 0)
    worker.take_steps(1)
    for rank in worker.ranks:
        rank.send_bytes(STEP)
    time.sleep(0.5)
    for rank in worker.ranks:
        rank.close()
    assert worker.process.wait(LONG) != 0
    worker.close()
