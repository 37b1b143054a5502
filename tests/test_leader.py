"""A worker takes a step when asked, and says why it failed. Session leads several in turn, Trainings side by side."""

from harness import leader, machine, results
from harness.leader import Failure, Row, Session, Trainings, Worker, error_message
from harness.results import WARMUP

import json
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT
from fixtures.fake_stage import HANGING, MEMORY, all_have_ended

FAKE_STAGE = ROOT / "tests" / "fixtures" / "fake_stage.py"
FLAGS = ["--batch-size", "4", "--steps", "20"]
KILLED = "killed by the system, most likely out of memory: try a smaller --batch-size"

# what torchrun 2.13 prints to stderr, with most of its own traceback and the ends of long lines left out
START = """
*****************************************
Setting OMP_NUM_THREADS environment variable for each process to be 1 in default
*****************************************
"""
REPORT = """\
W1122 01:49:14.077000 11452 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 11483
E1122 01:49:14.079000 11452 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
stages/s12_ddp.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 11483)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 11483
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  error_file: <N/A>
  traceback : HOW RANK 1 ENDED
============================================================
"""
REPORT = REPORT.replace("ChildFailedError:", "ChildFailedError: ")  # a blank that editors like to take away
AFTER_AN_EXIT = REPORT.replace("HOW RANK 1 ENDED", "To enable traceback see: https://pytorch.org/docs")
AFTER_SIGKILL = REPORT.replace("HOW RANK 1 ENDED", "Signal 9 (SIGKILL) received by PID 11484")
AFTER_SIGSEGV = REPORT.replace("HOW RANK 1 ENDED", "Signal 11 (SIGSEGV) received by PID 11484")
TRACEBACK = """\
Traceback (most recent call last):
  File "stages/s12_ddp.py", line 70, in <module>
    loss.backward()
RuntimeError: boom
"""


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path, monkeypatch):
    """A test leaves none of the processes that it started."""
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setenv("FAKE_LOCK", str(lock))
    monkeypatch.setattr(leader, "PAUSE", 0)
    yield
    assert all_have_ended(lock)


def fake_row(name, ranks=0, flags=(), **plan):
    """A row at which a fake stage is at work, and does as planned."""
    env = {"FAKE_ROW": name, "FAKE_PLANS": json.dumps({name: plan})}
    return Row(name, FAKE_STAGE, ranks=ranks, flags=flags, env=env)


@pytest.fixture
def start():
    """Starts the Worker of a row, and stops it after the test. It gains `record`, the lines that it left."""
    workers = []

    def start(row, kind=Worker, timeout=60, memory_budget=None):
        record = []
        worker = kind(row, FLAGS, timeout, record.append, memory_budget)
        worker.record = record
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.stop()


class WithoutTorchrun(Worker):
    """A Worker of several ranks that starts rank 0 alone, at once."""

    def _command(self, flags):
        return [sys.executable, str(self.row.script), *flags]


def take_step(worker):
    """Ask for a step and wait for it; whether it came."""
    worker.ask()
    return worker.took_step()


def take_steps(worker, count):
    """Ask for so many steps, which must come."""
    for _ in range(count):
        assert take_step(worker)


def close(worker):
    """Ask for the summary, and wait until the process has ended."""
    worker.close()
    assert not worker.took_step()


def kinds(worker):
    """The kinds of the lines that a worker left."""
    return [entry["kind"] for entry in worker.record]


def test_a_worker_takes_a_step_for_each_ask(start):
    worker = start(fake_row("s02_tf32"))
    take_steps(worker, 1)
    assert [entry.get("step") for entry in worker.record] == [None, 0]
    take_steps(worker, 2)
    assert [entry.get("step") for entry in worker.record] == [None, 0, 1, 2]
    assert worker.lines.empty()


def test_a_worker_that_is_closed_ends_with_its_summary(start):
    worker = start(fake_row("s02_tf32"))
    take_steps(worker, 2)
    close(worker)
    assert worker.failure is None
    assert kinds(worker) == ["header", "step", "step", "summary"]  # and nothing that a library printed


def test_a_worker_tells_the_memory_and_the_speed_of_its_last_step(start):
    worker = start(fake_row("s02_tf32", dt=0.5))
    take_steps(worker, 1)
    assert worker.memory == MEMORY
    assert worker.speed == 2000


def test_the_flags_of_a_row_stand_after_those_of_all(start):
    worker = start(fake_row("s02_tf32", flags=("--batch-size", "8")))
    take_steps(worker, 1)
    header = worker.record[0]
    assert header["settings"]["batch_size"] == 8


def test_the_variables_of_a_row_take_the_place_of_the_benchs(start, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    row = fake_row("s02_tf32")
    row.env["OMP_NUM_THREADS"] = "3"
    worker = start(row)
    take_steps(worker, 1)
    header = worker.record[0]
    assert header["environment"]["threads"] == 3


def test_a_stage_finds_the_harness_beside_itself_where_the_user_has_set_a_safe_path(start, monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    worker = start(fake_row("s02_tf32", behavior="crash by a safe path", at="start"))
    assert take_step(worker)


@pytest.mark.parametrize(
    "behavior, reason, message",
    [
        ("crash", results.CRASHED, "exit status 1: RuntimeError: boom"),
        ("refuse", results.BAD_INPUT, "no, thanks"),
        ("leave", results.CRASHED, "ended before its last step"),
        ("leave with status 3", results.CRASHED, "exit status 3"),
        ("be killed", results.KILLED, KILLED),
        ("be killed within a line", results.KILLED, KILLED),
        ("be interrupted within a line", results.CRASHED, "exit status 130: interrupted"),
        ("run out of memory", results.OUT_OF_MEMORY, "out of memory at batch size 4: try --batch-size 2"),
        ("be for another device", results.NOT_FOR_THIS_DEVICE, "not for cpu"),
    ],
)
def test_a_worker_that_ends_too_early_tells_why(start, behavior, reason, message):
    worker = start(fake_row("s02_tf32", behavior=behavior, at=1))
    take_steps(worker, 1)
    assert not take_step(worker)
    assert worker.failure == Failure(reason, message)


def test_a_worker_that_does_not_start_tells_why(start):
    worker = start(fake_row("s02_tf32", behavior="crash", at="start"))
    assert not take_step(worker)
    assert worker.failure == Failure(results.CRASHED, "exit status 1: RuntimeError: boom")


def test_a_worker_that_fails_after_its_last_step_tells_why(start):
    worker = start(fake_row("s02_tf32", behavior="crash", at="end"))
    take_steps(worker, 2)
    close(worker)
    assert worker.failure == Failure(results.CRASHED, "exit status 1: RuntimeError: boom")


@pytest.mark.parametrize("behavior", ["hang", "hang, deaf to SIGTERM"])
def test_a_worker_that_gives_no_answer_is_stopped_with_its_children(start, monkeypatch, behavior):
    monkeypatch.setattr(leader, "PATIENCE", 0.3)
    worker = start(fake_row("s02_tf32", behavior=behavior, at=1))
    take_steps(worker, 1)
    worker.timeout = 0.3
    assert not take_step(worker)
    assert worker.failure.reason == results.NO_ANSWER
    assert "raise --timeout" in worker.failure.message
    began = time.monotonic()
    worker.stop()
    assert time.monotonic() - began < HANGING / 2
    assert kinds(worker) == ["header", "step", "error"]


def test_a_worker_that_closes_its_output_and_does_not_end_has_failed(start, monkeypatch):
    monkeypatch.setattr(leader, "PATIENCE", 0.3)
    worker = start(fake_row("s02_tf32", behavior="hang with closed output", at=1))
    take_steps(worker, 1)
    assert not take_step(worker)
    assert worker.failure == Failure(results.CRASHED, "closed its output, and did not end")


def test_a_worker_that_holds_more_than_the_budget_is_out_of_memory(start):
    worker = start(fake_row("s02_tf32", behavior="hang with much memory", at=1), memory_budget=1.5e8)
    take_steps(worker, 1)
    assert not take_step(worker)
    assert worker.failure == Failure(results.OUT_OF_MEMORY, "out of memory: more than the budget of 0.1 GB")


def test_a_process_out_of_reach_that_holds_the_output_stops_nobody(start, monkeypatch, tmp_path):
    monkeypatch.setattr(leader, "PATIENCE", 0.3)
    worker = start(fake_row("s02_tf32", behavior="leave a child that holds the output", at=1))
    take_steps(worker, 1)
    worker.timeout = 0.3
    assert not take_step(worker)
    began = time.monotonic()
    worker.stop()
    assert time.monotonic() - began < HANGING / 2
    (tmp_path / "release").touch()


def test_a_failure_is_a_line_of_the_record(start):
    worker = start(fake_row("s02_tf32", behavior="refuse", at=0))
    assert not take_step(worker)
    worker.stop()
    assert worker.record[-1] == {"kind": "error", "reason": results.BAD_INPUT, "error": "no, thanks"}


@pytest.mark.parametrize(
    "text, message",
    [
        pytest.param("", "", id="nothing"),
        pytest.param("a warning\nKilled\n", "Killed", id="no error"),
        pytest.param("error: no such file\na warning\n", "no such file", id="our line"),
        pytest.param("s05_flash.py: error: --steps 0: no\n", "--steps 0: no", id="argparse's line"),
        pytest.param("error: " + "x" * 1000, "x" * 200, id="a long line"),
        pytest.param(TRACEBACK, "RuntimeError: boom", id="Python"),
        pytest.param("[rank1]: RuntimeError: boom\n", "RuntimeError: boom", id="Python on a rank"),
        pytest.param(f"{START}error: no disk\n{AFTER_AN_EXIT}", "no disk", id="our line, torchrun"),
        pytest.param(f"{START}{TRACEBACK}{AFTER_AN_EXIT}", "RuntimeError: boom", id="Python, torchrun"),
        pytest.param(f"{START}{AFTER_SIGKILL}", KILLED, id="killed, torchrun"),
        pytest.param(f"{START}{AFTER_SIGSEGV}", "ended by SIGSEGV", id="crashed, torchrun"),
    ],
)
def test_a_process_is_quoted_and_not_the_torchrun_around_it(text, message):
    assert error_message(text) == message


def test_the_memory_of_a_worker_is_that_of_all_its_ranks(start):
    worker = start(fake_row("2 ranks", ranks=2), WithoutTorchrun)
    take_steps(worker, 1)
    assert worker.memory == 2 * MEMORY


def test_rank_0_that_lost_another_rank_leaves_the_word_to_that_rank(start):
    said = START + TRACEBACK
    row = fake_row("2 ranks", ranks=2, behavior="lose another rank", at=1, stderr=said)
    worker = start(row, WithoutTorchrun)
    take_steps(worker, 1)
    assert not take_step(worker)
    assert worker.failure == Failure(results.ANOTHER_RANK_ENDED, "another rank has ended: RuntimeError: boom")


def test_rank_0_that_torchrun_interrupts_leaves_the_word_to_the_rank_that_was_killed(start):
    row = fake_row("2 ranks", ranks=2, behavior="be interrupted", at=1, stderr=START + AFTER_SIGKILL)
    worker = start(row, WithoutTorchrun)
    take_steps(worker, 1)
    assert not take_step(worker)
    assert worker.failure == Failure(results.ANOTHER_RANK_ENDED, f"another rank has ended: {KILLED}")


def test_torchrun_starts_the_ranks_and_tells_how_one_of_them_was_killed(start):
    worker = start(fake_row("2 ranks", ranks=2, behavior="be killed", at="start", rank=1), timeout=100)
    while take_step(worker):
        pass
    assert worker.failure.message.endswith(KILLED)


def test_a_single_step_is_the_line_of_a_process_that_has_ended(tmp_path):
    row = fake_row("probe", dt=0.25)
    step, failure = leader.single_step(row, ["--steps", "1"], timeout=30)
    assert failure is None
    assert (step["kind"], step["step"], step["dt"]) == ("step", 0, 0.25)
    assert all_have_ended(tmp_path / "lock", patience=0)


def test_a_single_step_that_fails_tells_why():
    row = fake_row("probe", behavior="crash", at=0)
    step, failure = leader.single_step(row, ["--steps", "1"], timeout=30)
    assert step is None
    assert failure == leader.Failure("crashed", "exit status 1: RuntimeError: boom")


def test_an_interrupted_single_step_leaves_no_process(tmp_path, monkeypatch):
    def be_interrupted(worker):
        worker.lines.get(timeout=30)  # the header: it is at work
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "took_step", be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        leader.single_step(fake_row("probe", behavior="hang", at=0), ["--steps", "1"], timeout=30)
    assert all_have_ended(tmp_path / "lock", patience=0)


@pytest.fixture
def records(tmp_path, monkeypatch):
    """The path of a results file without a line. How much memory this machine has free does not matter."""
    monkeypatch.setattr(machine, "free_memory", lambda: 10**15)
    return tmp_path / "x.jsonl"


def lines_of(records, kind="step", name=None):
    """The lines of one kind in a results file, of all rows or of one."""
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind and name in (None, line["name"])]


def lead(records, rows, steps, **options):
    """Lead a session of these rows through the warm-up and so many counted steps; the names that failed."""
    return Session(records, 3, FLAGS, timeout=60, **options).lead(rows, steps)


def test_a_session_takes_the_warm_up_and_then_as_many_steps_as_asked_for(records):
    assert lead(records, [fake_row("a"), fake_row("b")], steps=3) == set()
    for name in ("a", "b"):
        assert [line["step"] for line in lines_of(records, name=name)] == list(range(WARMUP + 3))
        assert len(lines_of(records, "header", name)) == 1
        assert len(lines_of(records, "summary", name)) == 1


def test_every_line_names_its_session_and_its_row(records):
    lead(records, [fake_row("a"), fake_row("b", behavior="crash", at=2)], steps=1)
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert {(line["session"], line["name"]) for line in lines} == {(3, "a"), (3, "b")}


def test_counted_steps_go_there_and_back_so_that_a_drift_hits_all_alike(records):
    lead(records, [fake_row("a"), fake_row("b"), fake_row("c")], steps=3)
    counted = [line["name"] for line in lines_of(records) if line["step"] >= WARMUP]
    assert counted == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]


@pytest.mark.parametrize(
    "moment, steps",
    [("start", 0), (0, 0), (2, 2), (WARMUP + 1, WARMUP + 1), ("end", WARMUP + 3)],
)
def test_a_failure_costs_its_own_row_alone(records, moment, steps):
    rows = [fake_row("a"), fake_row("b", behavior="crash", at=moment), fake_row("c")]
    assert lead(records, rows, steps=3) == {"b"}
    assert len(lines_of(records, name="b")) == steps
    (error,) = lines_of(records, "error")
    assert (error["name"], error["reason"]) == ("b", results.CRASHED)
    assert error["error"] == "exit status 1: RuntimeError: boom"
    for name in ("a", "c"):
        assert len(lines_of(records, name=name)) == WARMUP + 3
        assert len(lines_of(records, "summary", name)) == 1


def test_a_session_in_which_all_fail_comes_to_its_end(records):
    rows = [fake_row("a", behavior="crash", at=0), fake_row("b", behavior="crash", at=0)]
    assert lead(records, rows, steps=3) == {"a", "b"}


def test_a_session_tells_where_it_is(records, capsys):
    lead(records, [fake_row("s01_baseline"), fake_row("s02_tf32", dt=0.05)], steps=2, sessions_after=4)
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == [
        "[1/2, then 4 more] s01_baseline: start and warm-up",
        "[2/2, then 4 more] s02_tf32: start and warm-up",
    ]
    assert told[-1].startswith("step 2/2, ")
    assert told[-1].endswith(" s left | tok/sec s01 10,000, s02 20,000")


def test_a_session_tells_at_once_which_row_failed_and_why(records, capsys):
    lead(records, [fake_row("a", behavior="refuse", at=2)], steps=1)
    assert "a failed: no, thanks\n" in capsys.readouterr().err


def test_an_interrupted_session_ends_its_workers(records, monkeypatch):
    def interrupt(line, brief=False):
        if line.startswith("step 1/"):
            raise KeyboardInterrupt

    monkeypatch.setattr(leader, "say", interrupt)
    session = Session(records, 3, FLAGS, timeout=60)
    with pytest.raises(KeyboardInterrupt):
        session.lead([fake_row("a"), fake_row("b")], steps=3)
    # 130 by the first signal, -15 where the second one, of stop(), met a process on its way out
    assert {worker.process.returncode for worker in session.live} <= {130, -signal.SIGTERM}
    assert len(lines_of(records)) == 2 * (WARMUP + 1)
    assert lines_of(records, "error") == []


@pytest.mark.parametrize(
    "free, held_by_live_ones, room",
    [
        pytest.param(10**15, [], 1, id="the first one starts alone"),
        pytest.param(2, [], 1, id="the first one starts, whatever it will hold"),
        pytest.param(7, [2], 2, id="7 free are room for two at 1.5 times 2"),
        pytest.param(5, [2], 1, id="5 free are room for one"),
        pytest.param(2, [2], 0, id="2 free are room for none"),
        pytest.param(5, [9, 2, 0], 1, id="the last one counts, and no probe"),
    ],
)
def test_room_is_kept_for_half_as_much_again_as_the_last_worker_holds(
    records, monkeypatch, free, held_by_live_ones, room
):
    monkeypatch.setattr(machine, "free_memory", lambda: free)
    session = Session(records, 0, FLAGS, timeout=60)
    session.live = [SimpleNamespace(memory=held) for held in held_by_live_ones]
    assert session.room() == room


def test_what_memory_has_no_room_for_does_not_start(records, monkeypatch):
    monkeypatch.setattr(Session, "room", room_for_two)
    assert lead(records, [fake_row("a"), fake_row("b"), fake_row("c")], steps=1) == set()
    assert {line["name"] for line in lines_of(records)} == {"a", "b"}


def room_for_two(session):
    """Takes the place of Session.room() on a machine that holds two workers."""
    return 2 - len(session.live)


# Trainings


def train(path, runs, at_once=2, steps=6):
    """Lead runs, (session, Row) each, through so many steps; the results.Run of each by (session, name)."""
    Trainings(path, FLAGS, 60, steps, at_once).lead(runs)
    return results.runs_by_row(results.read(path))


def test_of_a_training_the_header_the_summary_and_the_curve_are_kept(tmp_path):
    """The loss of step i is 5 - i / 10, and the first of the six steps has no point."""
    path = tmp_path / "x.jsonl"
    runs = train(path, [(3, fake_row("s02_tf32", flags=("--eval", "--seed", "7")))])
    run = runs[3, "s02_tf32"]
    assert [line["kind"] for line in results.read(path)] == ["header", "summary"]
    assert run.header["settings"]["seed"] == 7
    assert run.summary["eval"] == 0.007
    assert run.summary["curve"] == pytest.approx([4.9, 4.8, 4.7, 4.6, 4.5])


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_no_more_trainings_run_at_once_than_are_asked_for(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(machine, "free_memory", lambda: 10**15)
    live = []
    start = Trainings.start

    def counting(trainings, session, row):
        start(trainings, session, row)
        live.append(len(trainings.live))

    monkeypatch.setattr(Trainings, "start", counting)
    runs = train(tmp_path / "x.jsonl", [(seed, fake_row("s02_tf32")) for seed in range(4)], at_once)
    assert max(live) == at_once
    assert all(run.summary for run in runs.values())
    assert len(runs) == 4


def test_before_a_training_has_shown_its_memory_there_are_two_of_them(tmp_path):
    trainings = Trainings(tmp_path / "x.jsonl", FLAGS, 60, 6, at_once=8)
    trainings.live = ["one"]
    assert trainings.has_room()
    trainings.live = ["one", "two"]
    assert not trainings.has_room()


@pytest.mark.parametrize("free, has_room", [(3.6e9, True), (3.4e9, False)])
def test_a_training_starts_where_there_is_memory_for_it_and_for_what_the_others_still_take(
    tmp_path, monkeypatch, free, has_room
):
    """One needs 1.5 times the 1 GB that a run held; two that hold nothing yet take 1 GB each."""
    monkeypatch.setattr(machine, "free_memory", lambda: free)
    trainings = Trainings(tmp_path / "x.jsonl", FLAGS, 60, 6, at_once=8)
    trainings.most_memory = 1e9
    trainings.live = [SimpleNamespace(worker=SimpleNamespace(memory=0)) for _ in range(2)]
    assert trainings.has_room() == has_room


def test_one_training_runs_however_little_memory_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 0)
    trainings = Trainings(tmp_path / "x.jsonl", FLAGS, 60, 6, at_once=2)
    trainings.most_memory = 1e9
    assert trainings.has_room()


def test_a_training_that_fails_costs_no_other(tmp_path):
    good, bad = fake_row("s02_tf32"), fake_row("s03_bf16", behavior="crash", at=3)
    runs = train(tmp_path / "x.jsonl", [(0, bad), (0, good), (1, good)])
    assert runs[0, "s03_bf16"].error["error"] == "exit status 1: RuntimeError: boom"
    assert runs[0, "s02_tf32"].summary
    assert runs[1, "s02_tf32"].summary


def test_the_summary_of_a_training_with_too_few_steps_is_not_kept(tmp_path):
    """A script of a user's own may end when it likes: here after 20 steps, of 25."""
    run = train(tmp_path / "x.jsonl", [(0, fake_row("s02_tf32"))], steps=25)[0, "s02_tf32"]
    assert run.summary is None
    assert run.error["error"] == "ended before its last step"


def test_trainings_tell_which_runs_are_at_work_and_the_time_left(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(leader, "say", lambda line, brief=False: said.append(line))
    monkeypatch.setattr(leader.time, "monotonic", lambda: 100.0)
    trainings = Trainings(tmp_path / "x.jsonl", FLAGS, 60, 6, at_once=2)
    trainings.runs, trainings.runs_ended, trainings.steps_taken, trainings.began = 4, 1, 12, 40.0
    row = Row("s02_tf32 lr 6e-4", FAKE_STAGE)
    trainings.live = [
        SimpleNamespace(row=row, session=0, losses=[5.0] * 4),
        SimpleNamespace(row=row, session=1, losses=[5.0] * 6),
    ]
    trainings.report()
    (line,) = said
    assert line.startswith("[1/4 runs, 60 s left] s02_tf32 lr 6e-4 (run 1) step 4/6, ")
    assert line.endswith("s02_tf32 lr 6e-4 (run 2) held-out loss")


def test_on_a_terminal_only_a_brief_line_is_cut(capsys, monkeypatch):
    """A brief line is replaced by the next one, which takes a single line. The others name commands and remedies."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    leader.say("step 1/20, 300 s left | tok/sec s01 500", brief=True)
    leader.say("interrupted; continue with: python bench.py --resume x")
    cut, whole = capsys.readouterr().err.split("\r\033[K")[1:]
    assert cut == "step 1/20, 300 s le"
    assert whole == "interrupted; continue with: python bench.py --resume x\n"
