"""Workers take a step each when they are asked, in turn, and one that fails says why and costs its own row alone."""

from harness import machine, workers
from harness.record import WARMUP
from harness.results import Results
from harness.workers import Enough, Row, error_message, lead

import io
import json
import time

import pytest
from conftest import ROOT
from fixtures.fake_stage import LONG, MEMORY, all_have_ended

FAKE_STAGE = ROOT / "tests" / "fixtures" / "fake_stage.py"
PAUSE = workers.PAUSE  # the real one: without it these tests are faster
FLAGS = ["--batch-size", "4", "--steps", "20"]
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
def no_fake_is_left(tmp_path, monkeypatch):
    """See that no fake outlives its test, make no pauses, and have memory for all."""
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setenv("FAKE_LOCK", str(lock))
    monkeypatch.setattr(workers, "PAUSE", 0)
    monkeypatch.setattr(machine, "free_memory", lambda: 10**15)
    yield
    assert all_have_ended(lock)


def fake_row(name, ranks=0, flags=(), env=None, **plan):
    """A Row at which a fake stage is at work, and does as planned."""
    env = {"FAKE_ROW": name, "FAKE_PLANS": json.dumps({name: plan})} | (env or {})
    return Row(name, FAKE_STAGE, ranks=ranks, flags=flags, env=env)


def results_of(rows):
    """The Results of a bench of these rows, which trains on ids.bin, before any of them has started."""
    bench = {"rows": [row.about() for row in rows], "warmup": WARMUP, "corpus": ["ids.bin", "gpt2"]}
    return Results(bench, file=io.StringIO())


def led(*rows, steps=2, **options):
    """{name: Run} of these rows, led through the warm-up and so many counted steps; None of one that did not start."""
    results = results_of(rows)
    lead(rows, FLAGS, results, 0, steps, **options)
    return {name: row.run(0) for name, row in results.rows.items()}


def test_rows_step_in_turn_there_and_back():
    rows = [fake_row("a"), fake_row("b"), fake_row("c")]
    results = results_of(rows)
    assert lead(rows, FLAGS, results, 0, steps=3) == 3
    lines = [json.loads(line) for line in results.file.getvalue().splitlines()]
    counted = [line["name"] for line in lines if line["kind"] == "step" and line["step"] >= WARMUP]
    assert "".join(counted) == "abccbaabc"


def test_a_pause_is_between_the_steps_of_two_workers_not_of_one(monkeypatch):
    monkeypatch.setattr(workers, "PAUSE", PAUSE)
    ends = []
    rows = [fake_row("a"), fake_row("b", do="crash", at=WARMUP + 5)]
    led(*rows, steps=10, tell=lambda turn, seconds: ends.append(seconds))
    turns = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    assert min(turns[:4]) > 2 * 0.01  # two pauses in each
    assert min(turns[5:]) < 0.01


def test_a_row_that_has_enough_takes_no_more_steps():
    """Three steps of 0.5 s are the first to take 1.2 s; steps of 0.1 s go on."""
    runs = led(fake_row("a", dt=0.5), fake_row("b", dt=0.1), steps=6, enough=Enough(steps=2, seconds=1.2))
    assert [len(runs["a"].steps), len(runs["b"].steps)] == [WARMUP + 3, WARMUP + 6]
    assert runs["a"].has_ended
    assert len(led(fake_row("c", dt=0.5), steps=6, enough=Enough(steps=4, seconds=0))["c"].steps) == WARMUP + 4


def test_the_flags_and_the_variables_of_a_row_overrule_the_shared_ones(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run = led(fake_row("a", flags=("--batch-size", "8"), env={"OMP_NUM_THREADS": "3"}))["a"]
    assert run.header["settings"]["batch_size"] == 8
    assert run.steps[0]["variables"]["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("moment", ["start", 0, WARMUP + 1, "end"])
def test_a_failure_costs_its_own_row_alone(moment):
    runs = led(fake_row("a"), fake_row("b", do="crash", at=moment), fake_row("c"))
    assert runs["b"].error == "RuntimeError: boom"
    for name in ("a", "c"):
        assert runs[name].has_ended
        assert [step["step"] for step in runs[name].steps] == list(range(WARMUP + 2))


@pytest.mark.parametrize(
    "plan, message, out_of_memory",
    [
        ({"do": "refuse", "at": 1}, "no, thanks", False),
        ({"do": "leave", "at": 1}, "ended without log.finish(), or before its last step", False),
        ({"do": "leave with status 3", "at": 1}, "exit status 3", False),
        ({"do": "be killed", "at": 1}, KILLED, True),
        ({"largest_batch": 3}, "out of memory at batch size 4: try --batch-size 2", True),
    ],
)
def test_a_row_that_fails_says_why_in_its_record_and_on_stderr(capsys, plan, message, out_of_memory):
    run = led(fake_row("a", **plan))["a"]
    assert (run.error, run.out_of_memory) == (message, out_of_memory)
    assert f"a failed: {message}\n" in capsys.readouterr().err


def test_a_script_with_too_few_steps_has_failed_though_it_wrote_a_summary():
    assert led(fake_row("a"), steps=20)["a"].error == "ended before its last step"  # --steps 20 are 16 counted ones


def test_a_stage_that_trains_on_another_text_than_the_bench_fails(monkeypatch):
    rows = [fake_row("a", flags=("--data", "other.bin")), fake_row("b", flags=("--data", "ids.bin"))]
    runs = led(*rows)
    assert runs["a"].has_ended and runs["b"].has_ended  # scripts of the reader's own may train on what they like
    monkeypatch.setattr(workers, "NAMES", [FAKE_STAGE.stem])
    runs = led(*rows)
    assert "trains on another text than the bench" in runs["a"].error
    assert runs["b"].has_ended


@pytest.mark.parametrize("words", ["PyTorch 2", "2", '{"seed": 1}'])
def test_what_a_script_prints_before_parse_args_is_no_line_of_its_record(words):
    run = led(fake_row("a", do="print", at="start", words=words))["a"]
    assert run.has_ended
    assert run.header["settings"]["seed"] == 1337


def test_a_worker_that_gives_no_answer_is_stopped_with_its_children(monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 1)
    monkeypatch.setattr(workers, "PATIENCE_AT_THE_END", 0.2)
    start = time.time()
    runs = led(fake_row("a", do="hang", at=1), fake_row("b"))
    assert time.time() - start < LONG / 2
    assert runs["a"].error == "no answer in 1 s: stopped"
    assert runs["b"].has_ended


@pytest.mark.parametrize("end", ["crash", "hang"])
def test_a_bad_end_after_the_summary_costs_nothing(monkeypatch, end):
    monkeypatch.setattr(workers, "PATIENCE_AT_THE_END", 0.2)
    assert led(fake_row("a", do=end, at="after"))["a"].has_ended


@pytest.mark.parametrize(
    "stderr, message",
    [
        ("a warning\n", "exit status 1"),
        ("error: first\nerror: last\na warning\n", "last"),
        ("s05_flash.py: error: --steps 0: no\n", "--steps 0: no"),
        ("torch.OutOfMemoryError: CUDA\n", "torch.OutOfMemoryError: CUDA"),
        ("  what():  std::bad_alloc\nAborted\n", "what():  std::bad_alloc"),
        ("error: " + "x" * 1000, "x" * 1000),
        (f"{TRACEBACK}{TORCHRUN}", "RuntimeError: boom"),
        (f"[rank1]: RuntimeError: boom\n{TORCHRUN}", "RuntimeError: boom"),
    ],
)
def test_a_process_is_quoted_by_its_last_error(stderr, message):
    assert error_message(stderr, status=1) == message


@pytest.mark.parametrize("free, started", [(1.4, 1), (1.6, 3)])
def test_what_memory_has_no_room_for_does_not_start(monkeypatch, capsys, free, started):
    monkeypatch.setattr(machine, "free_memory", lambda: free * MEMORY)
    rows = [fake_row("a"), fake_row("b"), fake_row("c")]
    assert lead(rows, FLAGS, results_of(rows), 0, steps=1) == started
    assert ("b and those below it have to wait" in capsys.readouterr().err) == (started == 1)


def test_the_memory_of_ranks_adds_up_and_one_that_fails_is_quoted(monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 2.9 * MEMORY)
    bad = fake_row("bad", ranks=2, do="crash", at="start", rank=1)
    runs = led(bad, fake_row("good", ranks=2), fake_row("late"))
    assert runs["bad"].error == "RuntimeError: boom"
    assert runs["good"].has_ended
    assert runs["good"].header["settings"]["world_size"] == 2
    assert runs["late"] is None  # 1.5 times the memory of two ranks is more than 2.9 times that of one
