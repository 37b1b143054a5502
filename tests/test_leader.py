"""Workers take a step each when they are asked, several in turn or all at once, and one that fails says why."""

from harness import leader, machine
from harness.leader import Row, error_message, lead
from harness.records import WARMUP

import json

import pytest
from conftest import ROOT
from fixtures.fake_stage import MEMORY, all_have_ended

FAKE_STAGE = ROOT / "tests" / "fixtures" / "fake_stage.py"
PAUSE = leader.PAUSE  # the real one: without it these tests are faster
FLAGS = ["--batch-size", "4", "--steps", "20"]
OUT_OF_MEMORY = "out of memory at batch size 4: try --batch-size 2"
KILLED = "killed by the system, most likely out of memory: try a smaller --batch-size"

TRACEBACK = """\
Traceback (most recent call last):
  File "stages/s12_ddp.py", line 70, in <module>
    loss.backward()
RuntimeError: boom
"""
# what torchrun 2.13 prints below, with most of its own traceback and the ends of long lines left out
TORCHRUN = """\
E1122 01:49:14.079000 11452 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
stages/s12_ddp.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 11484)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs
============================================================
"""


@pytest.fixture(autouse=True)
def lock(tmp_path, monkeypatch):
    """The lock of the fakes, none of which may be left after a test. How much memory is free does not matter."""
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setenv("FAKE_LOCK", str(lock))
    monkeypatch.setattr(leader, "PAUSE", 0)
    monkeypatch.setattr(machine, "free_memory", lambda: 10**15)
    yield lock
    (tmp_path / "release").touch()
    assert all_have_ended(lock)


def fake_row(name, ranks=0, **plan):
    """A Row at which a fake stage is at work, and does as planned."""
    env = {"FAKE_ROW": name, "FAKE_PLANS": json.dumps({name: plan})}
    return Row(name, FAKE_STAGE, ranks=ranks, env=env)


class Records:
    """The lines that workers left, as (name, line), in the order in which they came."""

    def __init__(self):
        self.lines = []

    def keep(self, name, entry):
        self.lines.append((name, entry))

    def of_kind(self, kind):
        return [(name, entry) for name, entry in self.lines if entry["kind"] == kind]

    def steps(self, row):
        """The numbers of the steps of a row."""
        return [entry["step"] for name, entry in self.of_kind("step") if name == row]

    def errors(self):
        return {name: entry["error"] for name, entry in self.of_kind("error")}

    def ended(self):
        """The rows that left a summary."""
        return {name for name, _ in self.of_kind("summary")}


def led(*rows, steps=2, **options):
    """The Records of these rows, led through the warm-up and so many counted steps."""
    records = Records()
    lead(rows, FLAGS, records.keep, steps, **options)
    return records


def test_between_the_steps_of_two_workers_is_a_pause(monkeypatch):
    monkeypatch.setattr(leader, "PAUSE", PAUSE)
    records = led(fake_row("a"), fake_row("b"), fake_row("c"), steps=2)
    counted = [entry for _, entry in records.of_kind("step") if entry["step"] >= WARMUP]
    pauses = [after["asked"] - before["answered"] for before, after in zip(counted, counted[1:], strict=False)]
    assert min(pauses) > 0.01


def test_together_all_take_a_step_at_the_same_time():
    a = fake_row("a", do="meet", at=WARMUP, **{"with": "b"})
    b = fake_row("b", do="meet", at=WARMUP, **{"with": "a"})
    records = led(a, b, steps=2, together=True)
    assert records.ended() == {"a", "b"}
    assert records.steps("a") == records.steps("b") == list(range(WARMUP + 2))


def test_the_variables_of_a_row_overrule_those_of_the_bench(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    row = fake_row("a")
    row.env["OMP_NUM_THREADS"] = "3"
    ((_, header),) = led(row).of_kind("header")
    assert header["variables"]["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("moment", ["start", 0, WARMUP + 1, "end"])
def test_a_failure_costs_its_own_row_alone(moment):
    records = led(fake_row("a"), fake_row("b", do="crash", at=moment), fake_row("c"))
    assert records.errors() == {"b": "RuntimeError: boom"}
    assert records.ended() == {"a", "c"}
    assert records.steps("a") == records.steps("c") == list(range(WARMUP + 2))


@pytest.mark.parametrize(
    "plan, message",
    [
        ({"do": "refuse", "at": 1}, "no, thanks"),
        ({"do": "leave", "at": 1}, "ended before its last step"),
        ({"do": "leave with status 3", "at": 1}, "exit status 3"),
        ({"do": "be killed", "at": 1}, KILLED),
        ({"largest_batch": 3}, OUT_OF_MEMORY),
    ],
)
def test_a_row_that_fails_says_why_in_its_record_and_on_stderr(capsys, plan, message):
    assert led(fake_row("a", **plan)).errors() == {"a": message}
    assert f"a failed: {message}\n" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["PyTorch 2", "2", '{"seed": 1}'])
def test_what_a_script_prints_before_it_parses_its_flags_is_no_line_of_its_record(words):
    records = led(fake_row("a", do="print", at="start", words=words))
    assert records.ended() == {"a"}
    assert not records.errors()


def test_a_script_that_takes_too_few_steps_has_failed_though_it_wrote_a_summary():
    records = led(fake_row("a"), steps=20)  # --steps 20 are 16 counted ones
    assert records.errors() == {"a": "ended before its last step"}


def test_a_worker_that_gives_no_answer_is_stopped_with_its_children(monkeypatch):
    monkeypatch.setattr(leader, "PATIENCE", 1)
    monkeypatch.setattr(leader, "PATIENCE_AT_THE_END", 0.2)
    records = led(fake_row("a", do="hang", at=1), fake_row("b"))
    assert records.errors() == {"a": "no answer in 1 s: stopped"}
    assert records.ended() == {"b"}


@pytest.mark.parametrize("end", ["crash", "leave with status 3", "be killed", "hang"])
def test_a_bad_end_after_the_summary_costs_nothing(monkeypatch, end):
    monkeypatch.setattr(leader, "PATIENCE_AT_THE_END", 0.2)
    records = led(fake_row("a", do=end, at="after"))
    assert records.ended() == {"a"}
    assert not records.errors()


def test_a_child_that_holds_the_pipe_of_the_record_keeps_nobody_waiting(lock):
    records = led(fake_row("a", do="leave a child", at=1))
    assert not all_have_ended(lock, patience=0)  # the child lives on
    assert records.ended() == {"a"}
    assert not records.errors()


@pytest.mark.parametrize(
    "stderr, message",
    [
        pytest.param("a warning\n", "exit status 1", id="no error"),
        pytest.param("error: no such file\na warning\n", "no such file", id="our line"),
        pytest.param("s05_flash.py: error: --steps 0: no\n", "--steps 0: no", id="the line of argparse"),
        pytest.param("torch.OutOfMemoryError: CUDA\n", "torch.OutOfMemoryError: CUDA", id="an error of a module"),
        pytest.param("error: first\nerror: last\n", "last", id="two lines"),
        pytest.param("error: " + "x" * 1000, "x" * 200, id="a long line"),
        pytest.param(f"{TRACEBACK}{TORCHRUN}", "RuntimeError: boom", id="a rank, and torchrun around it"),
        pytest.param(f"[rank1]: RuntimeError: boom\n{TORCHRUN}", "RuntimeError: boom", id="a marked rank"),
        pytest.param(f"error: no disk\n{TORCHRUN}", "no disk", id="our line, and torchrun around it"),
    ],
)
def test_a_process_is_quoted_by_its_last_error(stderr, message):
    assert error_message(stderr, status=1) == message


def test_what_memory_has_no_room_for_does_not_start(monkeypatch, capsys):
    monkeypatch.setattr(machine, "free_memory", lambda: 1.4 * MEMORY)
    records = led(fake_row("a"), fake_row("b"), fake_row("c"))
    assert records.ended() == {"a"}
    assert "b and those below it have to wait" in capsys.readouterr().err
    monkeypatch.setattr(machine, "free_memory", lambda: 1.6 * MEMORY)
    assert led(fake_row("a"), fake_row("b"), fake_row("c")).ended() == {"a", "b", "c"}


def test_torchrun_starts_the_ranks_whose_memory_adds_up_and_one_that_fails_is_quoted(monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 2.9 * MEMORY)
    bad = fake_row("bad", ranks=2, do="crash", at="start", rank=1)
    good = fake_row("good", ranks=2)
    records = led(bad, good, fake_row("late"))
    assert records.errors() == {"bad": "RuntimeError: boom"}
    (name, header) = records.of_kind("header")[-1]
    assert (name, header["settings"]["world_size"]) == ("good", 2)
    assert records.ended() == {"good"}  # 1.5 times the memory of two ranks are more than 2.9 times that of one
