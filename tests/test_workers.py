"""Workers take a step each when they are asked, in turn, and one that fails says why and costs its own row alone."""

from harness import ladder, machine
from harness.bench import workers
from harness.bench.reaper import Reaper
from harness.bench.results import Results
from harness.bench.rows import CPU_MEMORY, WITHOUT_CPU_MEMORY
from harness.bench.workers import NotEnoughMemory, lead, stop
from harness.figures import WARMUP

import contextlib
import json
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import ROOT
from fixtures.fake_stage import LONG, MEMORY, all_have_ended
from fixtures.records import row

FAKE_STAGE = ROOT / "tests" / "fixtures" / "fake_stage.py"
ALL_STEPS = [*range(WARMUP + 2)]
PATIENCE = workers.PATIENCE  # before a test shortens it


@pytest.fixture(autouse=True)
def no_fake_is_left(tmp_path, monkeypatch):
    """See that no fake outlives its test, make no pauses, have little patience, and memory for all."""
    lock = tmp_path / "lock"
    lock.touch()
    shutil.copy(FAKE_STAGE, tmp_path / "s01_baseline.py")
    monkeypatch.setattr(ladder, "FOLDER", tmp_path)
    monkeypatch.setenv("FAKE_LOCK", str(lock))
    monkeypatch.setattr(workers, "PAUSE", 0)
    monkeypatch.setattr(workers, "PATIENCE", 60)
    monkeypatch.setattr(machine, "free_memory", lambda: 10**15)
    yield
    assert all_have_ended(lock)


def fake_row(name, launcher=(), flags=(), **plan):
    """A Row at which a fake of s01 is at work, and does as planned."""
    env = ("env", f"FAKE_ROW={name}", f"FAKE_PLANS={json.dumps({name: plan})}")
    return row(name, script="s01_baseline", launcher=(*env, *launcher), flags=flags)


def results_to_fill(*rows, steps, in_turn=True):
    """The Results of a bench of these rows, with no line so far."""
    bench = {"rows": [asdict(row) for row in rows], "warmup": WARMUP, "steps": steps, "in_turn": in_turn}
    bench |= {"flags": ["--batch-size", "4", "--steps", "200"], "variables": CPU_MEMORY}
    bench |= {"flags_of_scripts": [], "variables_of_scripts": {}}
    return Results(bench)


def led(*rows, steps=WARMUP + 2, in_turn=True, tell_turn=None):
    """{name: Run} of these rows, led for so many steps."""
    results = results_to_fill(*rows, steps=steps, in_turn=in_turn)
    with contextlib.closing(Reaper()) as reaper:
        lead(rows, results, 0, reaper, tell_turn)
    return {name: run for (name, _), run in results.runs.items()}


def steps_of(run):
    """The numbers of the steps that a Run took."""
    return [step["step"] for step in run.steps]


def test_rows_step_in_turn_there_and_back(monkeypatch):
    order = []
    step = workers.Worker.step
    monkeypatch.setattr(workers.Worker, "step", lambda worker: order.append(worker.row.name) or step(worker))
    runs = led(fake_row("a"), fake_row("b"), fake_row("c"), steps=WARMUP + 3)
    assert "".join(order) == "aaaabbbbcccc" + "abccbaabc"
    assert all(run.summary for run in runs.values())


def test_a_rows_own_flags_reach_it_and_no_other():
    runs = led(fake_row("a", flags=("--batch-size", "8")), fake_row("b"))
    assert [run.header["settings"]["batch_size"] for run in runs.values()] == [8, 4]


def test_the_memory_variables_reach_all_rows_but_plain(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "9")  # the reader's own is not that of the bench
    runs = led(fake_row("a"), fake_row("plain", WITHOUT_CPU_MEMORY))
    assert [run.header["variables"]["MALLOC_MMAP_MAX_"] for run in runs.values()] == ["0", None]


def test_a_step_may_take_as_long_as_a_compilation():
    """The first one of s04 takes 46 s on an H100, and ten times as long on a slow machine."""
    assert PATIENCE > 460


def test_a_pause_is_between_the_steps_of_two_workers_not_of_one(monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(workers, "PAUSE", 0.0123)
    led(fake_row("a"), fake_row("b", do="crash", at=WARMUP + 3), steps=WARMUP + 10)
    assert pauses.count(0.0123) == 8  # two in each turn until b crashes in the fourth


def test_a_row_alone_counts_20_steps_and_six_seconds_of_them_and_rows_in_turn_count_all():
    """48 steps of 0.125 s are the first to take 6 s, and 20 of 1 s take 20."""
    for dt, counted in ((0.125, 48), (1, 20), (0.01, 60)):
        run = led(fake_row("a", dt=dt), steps=WARMUP + 60, in_turn=False)["a"]
        assert len(run.counted) == counted
        assert run.summary
    assert len(led(fake_row("a", dt=1), steps=WARMUP + 30)["a"].counted) == 30


@pytest.mark.parametrize("moment", ["start", 0, WARMUP + 1, "end"])
def test_a_failure_costs_its_own_row_alone(moment):
    runs = led(fake_row("a"), fake_row("b", do="crash", at=moment), fake_row("c"))
    assert runs["b"].error["message"] == "exit status 1; it last said: RuntimeError: boom"
    assert 'raise RuntimeError("boom")' in runs["b"].error["traceback"]
    for name in ("a", "c"):
        assert runs[name].summary
        assert steps_of(runs[name]) == ALL_STEPS


@pytest.mark.parametrize(
    "do, message, out_of_memory",
    [
        ("leave with status 3", "exit status 3", False),
        ("leave with status 0", "ended after 1 of 6 steps", False),
        ("be killed", "killed by SIGKILL, most likely since memory was short", True),
        ("segfault", "killed by SIGSEGV", False),
        ("refuse", "exit status 1; it last said: error: no, thanks", False),
    ],
)
def test_a_row_that_fails_says_what_happened_to_it_in_its_record_and_on_stderr(capsys, do, message, out_of_memory):
    error = led(fake_row("a", do=do, at=1))["a"].error
    assert (error["message"], error["out_of_memory"]) == (message, out_of_memory)
    assert message in capsys.readouterr().err


def test_what_a_row_prints_is_no_line_of_its_record_and_only_its_end_is_kept():
    run = led(fake_row("a", do="print", at=1, words='{"kind": "summary"}'))["a"]
    assert run.summary["sdpa"] == "flash"
    error = led(fake_row("a", do="print megabytes and fail", at=1, words="last words"))["a"].error
    assert error["message"] == "exit status 3; it last said: last words"
    assert len(error["traceback"]) < 30_000


def test_a_process_that_ends_is_noticed_though_a_child_of_it_holds_all_that_it_had_open(monkeypatch):
    monkeypatch.setattr(workers, "POLL", 0.1)
    start = time.time()
    assert led(fake_row("a", do="leave a child", at=1))["a"].error["message"] == "exit status 3"
    assert time.time() - start < LONG / 2


@pytest.fixture
def reaper():
    """A Reaper."""
    with contextlib.closing(Reaper()) as reaper:
        yield reaper


def is_stopped(worker):
    """Whether a process is stopped, or is so within half a second."""
    for _ in range(50):
        state = Path(f"/proc/{worker.process.pid}/stat").read_text().split(")")[1].split()[0]
        if state == "T":
            return True
        time.sleep(0.01)
    return False


def test_a_row_that_takes_turns_is_stopped_between_its_steps_and_one_alone_is_not(reaper):
    for in_turn in (True, False):
        results = results_to_fill(fake_row("a"), steps=WARMUP + 2, in_turn=in_turn)
        worker = workers.Worker(results.rows["a"], results, 0, reaper)
        worker.take_steps(2)
        assert is_stopped(worker) == in_turn
        worker.take_steps(1)
        assert is_stopped(worker) == in_turn
        assert steps_of(worker.run) == [0, 1, 2]
        stop([worker])


def test_a_script_that_waits_for_its_data_takes_its_steps_without_turns(monkeypatch):
    order = []
    step = workers.Worker.step
    monkeypatch.setattr(workers.Worker, "step", lambda worker: order.append(worker.row.name) or step(worker))
    led(fake_row("a"), fake_row("b", wait=0.1), fake_row("c", wait=0.01), steps=WARMUP + 3)
    assert "".join(order) == "aaaabbbbcccc" + "bbb" + "accaac"


def test_a_worker_is_told_to_end_before_it_is_killed(monkeypatch, reaper):
    """torchrun needs that, to end its ranks."""
    monkeypatch.setattr(workers, "PATIENCE_AT_THE_END", 0.5)
    dawdler = fake_row("a", do="dawdle", at="start")
    worker = workers.Worker(dawdler, results_to_fill(dawdler, steps=WARMUP), 0, reaper)
    stop([worker])
    assert worker.process.returncode == -signal.SIGTERM


def test_a_worker_that_gives_no_answer_is_stopped_with_its_children(monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 1)
    monkeypatch.setattr(workers, "POLL", 0.1)
    monkeypatch.setattr(workers, "PATIENCE_AT_THE_END", 0.2)
    start = time.time()
    runs = led(fake_row("a", do="hang", at=1), fake_row("b"))
    assert time.time() - start < LONG / 2
    assert runs["a"].error["message"] == "no step in 1 s: stopped"
    assert runs["b"].summary


def test_a_worker_that_gives_no_answer_is_told_to_end_before_the_others_go_on(monkeypatch, reaper):
    monkeypatch.setattr(workers, "PATIENCE", 1)
    results = results_to_fill(fake_row("a", do="dawdle", at=0), steps=WARMUP + 2)
    worker = workers.Worker(results.rows["a"], results, 0, reaper)
    worker.take_steps(1)
    assert worker.process.wait(LONG / 2) == -signal.SIGTERM
    stop([worker])


def test_what_a_row_says_after_it_was_told_to_end_is_no_failure(monkeypatch, reaper):
    """Scripts that keep a checkpoint catch SIGTERM, and end with a status of their own."""
    monkeypatch.setattr(workers, "PATIENCE_AT_THE_END", 0.5)
    results = results_to_fill(fake_row("a", do="say at SIGTERM that it failed", at=1), steps=WARMUP + 2)
    worker = workers.Worker(results.rows["a"], results, 0, reaper)
    worker.take_steps(2)
    stop([worker])
    assert steps_of(worker.run) == [0, 1]
    assert not worker.run.error


def test_a_row_that_fails_is_gone_before_the_others_take_their_steps(monkeypatch, reaper):
    monkeypatch.setattr(workers, "PATIENCE", 1)
    monkeypatch.setattr(workers, "PATIENCE_AT_THE_END", 0.2)
    results = results_to_fill(fake_row("a", do="hang", at=0), steps=WARMUP + 2)
    worker = workers.Worker(results.rows["a"], results, 0, reaper)
    worker.take_steps(1)  # it is deaf to SIGTERM
    assert worker.process.returncode == -signal.SIGKILL
    stop([worker])


def test_a_bench_whose_reaper_was_killed_still_stops_its_workers(reaper):
    results = results_to_fill(fake_row("a"), fake_row("b"), steps=WARMUP + 2)
    started = [workers.Worker(row, results, 0, reaper) for row in results.rows.values()]
    reaper.process.kill()
    reaper.process.wait()
    stop(started)
    assert all(worker.process.returncode is not None for worker in started)


@pytest.mark.parametrize("end", ["crash", "hang"])
def test_a_bad_end_after_the_summary_costs_nothing(monkeypatch, end):
    monkeypatch.setattr(workers, "PATIENCE_AT_THE_END", 0.2)
    run = led(fake_row("a", do=end, at="after"))["a"]
    assert run.summary and not run.error


def test_rows_that_memory_does_not_hold_at_once_are_not_led(monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 1.6 * MEMORY)
    led(fake_row("a"), fake_row("b"))  # half as much again as the one above is free
    with pytest.raises(NotEnoughMemory, match="memory holds 2 of 3 processes"):
        led(fake_row("a"), fake_row("b", memory=2 * MEMORY), fake_row("c"))


def test_memory_is_looked_at_in_the_first_round_alone(monkeypatch, reaper):
    monkeypatch.setattr(machine, "free_memory", lambda: 0)
    rows = [fake_row("a"), fake_row("b")]
    results = results_to_fill(*rows, steps=WARMUP + 2)
    lead(rows, results, 1, reaper)  # what was measured in round 0 must not be lost
    assert steps_of(results.runs["b", 1]) == ALL_STEPS


TWO_RANKS = ("torchrun", "--standalone", "--nproc_per_node=2")


def test_ranks_are_started_by_torchrun_and_the_one_that_failed_first_is_quoted():
    bad = [fake_row(do, TWO_RANKS, do=do, at=1, rank=1) for do in ("refuse", "be killed")]
    runs = led(*bad, fake_row("good", TWO_RANKS))
    assert runs["refuse"].error["message"] == "exit status 1; it last said: error: no, thanks"
    assert runs["be killed"].error["message"] == "killed by SIGKILL, most likely since memory was short"
    assert runs["be killed"].error["out_of_memory"]
    assert runs["good"].summary
    assert runs["good"].header["settings"]["world_size"] == 2
    assert runs["good"].memory == 2 * MEMORY


@pytest.mark.parametrize("launcher", [(), TWO_RANKS])
def test_the_reaper_ends_what_a_bench_leaves_also_ranks_that_are_stopped(launcher):
    """What it would do after kill -9 of the bench: test_bench.py does that."""
    reaper = Reaper()
    results = results_to_fill(fake_row("a", launcher), steps=WARMUP + 2)
    worker = workers.Worker(results.rows["a"], results, 0, reaper)
    worker.take_steps(1)
    reaper.close()
    assert worker.process.wait(LONG) != 0
    assert not Path(reaper.folder).exists()
    # the fixture sees that the ranks are gone, too
