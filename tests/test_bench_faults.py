"""Nothing lost: what the bench keeps and says when it, its stages or its machine fail.

Stages that compute nothing stand in for the real ones, see fixtures/fake_stage.py; the bench is the real one.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from test_bench import FIXTURES, Ran, cells_of, command, header_of, home, refused  # noqa: F401

import bench
from measure import processes, questions
from measure.figures import Results
from measure.processes import Contender, Process, Session
from stages import machine, record
from stages.record import WARMUP, read_record

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for orphans in /proc")

STAGES = ["s01_baseline", "s02_tf32", "s03_bf16"]
EVERYONE = sorted([*STAGES, "s02_tf32 again", "rate"])
STEPS = 4


class Fakes:
    """A copy of the bench whose stages are fakes."""

    def __init__(self, folder):
        self.folder, self.mark = folder, f"BENCH_TEST_MARK={folder}"
        for name in ("bench.py", "data.py", "model.py", "weights.py"):
            shutil.copy(ROOT / name, folder)
        for name in ("measure", "stages"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("s[0-9]*", "__pycache__"))
        for script in (*(f"stages/{stage}.py" for stage in STAGES), "measure/rate.py"):
            shutil.copy(FIXTURES / "fake_stage.py", folder / script)
        (folder / "ids.bin").write_bytes(bytes(20_000))
        environment = machine.environment(bench.parse(["--device", "cpu"]).device)
        self.header = header_of("", environment=environment)
        self.plan()

    def plan(self, **fakes):
        """Tell each fake what to do, by its name; no name is a fake that does nothing amiss."""
        (self.folder / "fakes.json").write_text(json.dumps(dict(header=self.header, **fakes)))

    def flags(self, steps=STEPS):
        return ["--device", "cpu", "--data", str(self.folder / "ids.bin"), "--batch-size", "4", "--steps", str(steps)]

    def living(self):
        """The processes that are of this copy, by the mark in their environment."""
        living = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (place / "environ").read_bytes():
                    living.append(int(place.name))
        return [pid for pid in living if pid != os.getpid()]

    def records(self, name):
        """{contender: (header, steps, end)} of the first session."""
        return {n: r for (s, n), r in self.results(name).records.items() if s == 0}

    def results(self, name):
        parts = self.folder / "results" / f"{name}.parts"
        return Results.read(parts if parts.exists() else self.folder / "results" / f"{name}.jsonl")


@pytest.fixture
def fakes(home, monkeypatch):  # noqa: F811
    fakes = Fakes(home)
    monkeypatch.setattr(processes, "ROOT", home)
    monkeypatch.setattr(record, "ROOT", home)
    monkeypatch.setattr(bench, "STAGES", STAGES)
    monkeypatch.setenv(*fakes.mark.split("="))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as many threads as this process has: the environments are the same
    yield fakes
    for pid in fakes.living():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def run(fakes, command):  # noqa: F811
    """run(word, ..., out=NAME) -> how a bench of the fakes ended, in this process."""
    return lambda *words, steps=STEPS, out="x": command(*words, *fakes.flags(steps), "--out", out)


@contextlib.contextmanager
def running(fakes, *words, out="x", steps=12):
    """A bench in a process of its own, interrupted at the end of the block if it has not ended."""
    command = [sys.executable, fakes.folder / "bench.py", *words, *fakes.flags(steps), "--out", out]  # noqa: F811
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(happens, seconds=20):
    """Wait for something to happen."""
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def in_the_middle(fakes, name="x", rounds=2):
    """Whether the last contender has so many rounds behind it."""
    with contextlib.suppress(OSError, LookupError, ValueError):
        return len(fakes.records(name)["s03_bf16"][1]) >= WARMUP + rounds
    return False


# one stage fails


def test_without_a_fault_there_is_a_table_and_nothing_else(fakes, run):
    fakes.plan(s03_bf16=dict(dt=0.05))
    ran = run()
    assert ran.status == 0, ran.err
    assert sorted(path.name for path in (fakes.folder / "results").iterdir()) == ["x.jsonl", "x.md"]
    assert sorted(fakes.records("x")) == EVERYONE
    assert cells_of(fakes.results("x"))["s03_bf16"]["× s01"] == "2.00 ± 0.00"
    assert not fakes.living()


KILLED = "killed by the system, most likely out of memory: try a smaller --batch-size"


@pytest.mark.parametrize(
    "fault, steps, said",
    [
        (dict(does="die", at=5), 5, f"failed: {KILLED}"),
        (dict(does="cut", at=4), 4, f"failed: {KILLED}"),
        (dict(does="boom", at=5), 5, "failed: exit status 1: RuntimeError: boom"),
        (dict(does="boom", at=1), 1, "failed: exit status 1: RuntimeError: boom"),
        (dict(does="boom", at=0), 0, "failed: exit status 1: RuntimeError: boom"),
        (dict(does="refuse", at=0), 0, "failed: exit status 2: error: this will not do"),
        (dict(does="boom", at="end"), WARMUP + STEPS, "failed: exit status 1: RuntimeError: boom"),
        (dict(most=2), 0, "out of memory at batch size 4: try --batch-size 2"),
        (dict(does="fill", at=4), 4, "failed: exit status 1: error: the record can't be written: File too large"),
    ],
    ids=lambda value: value.get("does", "most") + str(value.get("at", "")) if isinstance(value, dict) else "",
)
def test_a_stage_that_fails_costs_its_own_row_and_exit_status_1(fakes, run, fault, steps, said):
    fakes.plan(s02_tf32=fault)
    ran = run()
    assert ran.status == 1
    records = fakes.records("x")
    assert {n: len(r[1]) for n, r in records.items()} == dict.fromkeys(EVERYONE, WARMUP + STEPS) | dict(s02_tf32=steps)
    assert {n for n, r in records.items() if "error" in r[2]} == {"s02_tf32"}
    rows = cells_of(fakes.results("x"))
    assert rows["s02_tf32"]["note"].startswith(said)
    assert (rows["s02_tf32"]["tok/sec"] == "–") == (steps <= WARMUP)
    assert said in ran.out
    assert not fakes.living()


@pytest.mark.parametrize("at", [0, 5, "end"])
def test_the_first_stage_may_fail_like_any_other(fakes, run, at):
    fakes.plan(s01_baseline=dict(does="boom", at=at))
    ran = run()
    assert ran.status == 1
    records = fakes.records("x")
    assert all(len(records[n][1]) == WARMUP + STEPS for n in EVERYONE if n != "s01_baseline")
    assert cells_of(fakes.results("x"))["s01_baseline"]["note"].startswith("failed: exit status 1: RuntimeError: boom")


def test_a_rate_that_fails_costs_its_column(fakes, run):
    fakes.plan(rate=dict(does="boom", at=0))
    assert run().status == 0
    assert {row["% of limit"] for row in cells_of(fakes.results("x")).values()} == {"–"}


def test_when_all_fail_the_table_says_so(fakes, run):
    fakes.plan(**dict.fromkeys([*STAGES, "s02_tf32 again", "rate"], dict(does="boom", at=0)))
    assert run().status == 1
    assert [row["note"].startswith("failed") for row in cells_of(fakes.results("x")).values()] == [True] * 3


def test_in_rounds_a_stage_that_fails_costs_its_own_row(fakes, run, monkeypatch):
    monkeypatch.setattr(
        bench, "settings_of", lambda *a, of=bench.settings_of: of(*a) | dict(lockstep=False)
    )  # what a GPU would do
    fakes.plan(s02_tf32=dict(does="die", at=5))
    assert run("--rounds", "2").status == 1
    taken = {key: len(r[1]) for key, r in fakes.results("x").records.items()}
    whole = {(session, name): WARMUP + STEPS for session in (0, 1) for name in EVERYONE if name != "s02_tf32"}
    assert taken == whole | {(0, "s02_tf32"): 5}


# a stage that hangs


@pytest.mark.parametrize(
    "does, said",
    [
        ("hang", "no step in 1 s: stopped; raise --timeout if it is only slow"),
        ("deaf", "no step in 1 s: stopped; raise --timeout if it is only slow"),
        ("silent", "closed its output, and did not end"),
    ],
)
def test_a_stage_that_hangs_is_stopped_with_all_that_it_started(fakes, run, monkeypatch, does, said):
    monkeypatch.setattr(processes, "PATIENCE", 0.5)  # seconds that a process has to end
    fakes.plan(s02_tf32=dict(does=does, at=5))
    ran = run("--timeout", "1")
    assert ran.status == 1
    records = fakes.records("x")
    assert {n: len(r[1]) for n, r in records.items()} == dict.fromkeys(EVERYONE, WARMUP + STEPS) | dict(s02_tf32=5)
    assert records["s02_tf32"][2] == dict(error=said)
    assert cells_of(fakes.results("x"))["s02_tf32"]["note"].startswith(f"failed: {said}")
    assert not fakes.living()


def process_of(fakes, stage="s02_tf32", **more):
    flags = ["--batch-size", "4", "--steps", "5"]
    return Process(Contender(stage, f"stages/{stage}.py"), flags, fakes.folder / f"0-{stage}.jsonl", **more)


def test_a_process_takes_no_step_without_being_told_to(fakes):
    process = process_of(fakes)
    try:
        assert process.go(10) and process.go(10)
        time.sleep(0.2)
        assert len(read_record(process.record)[1]) == 2
        assert (process.steps, process.speed, process.failure) == (2, "1", None)
    finally:
        process.stop()
    assert read_record(process.record)[2] == dict(error="interrupted")
    assert not fakes.living()


def test_a_process_past_its_memory_budget_is_stopped(fakes):
    fakes.plan(s02_tf32=dict(does="grow", at=1))
    process = process_of(fakes, budget=200_000_000)
    try:
        assert process.go(20) and not process.go(20)
    finally:
        process.stop()
    process.leave_reason()
    said = "out of memory: more than the budget of 0.2 GB"
    assert process.failure == said and read_record(process.record)[2] == dict(error=said)
    assert not fakes.living()


def test_an_interrupted_session_stops_what_it_started(fakes):
    """Ctrl-C may come at any time: here when the second one is warm."""

    def say(line, brief=False):
        if "s02_tf32" in line and "warm after" in line:
            raise KeyboardInterrupt

    contenders = [Contender(stage, f"stages/{stage}.py") for stage in STAGES]
    session = Session(fakes.folder, 0, ["--batch-size", "4"], 5, 10, say)
    with pytest.raises(KeyboardInterrupt):
        session.in_lockstep(contenders, lambda n: True)
    assert len(list(fakes.folder.glob("0-*.jsonl"))) >= 2
    assert not fakes.living()


# the bench itself is stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_keeps_its_records_and_can_go_on(fakes, command, number):  # noqa: F811
    fakes.plan(s02_tf32=dict(sleep=0.1))
    with running(fakes) as process:
        until(lambda: in_the_middle(fakes))
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "go on with: python bench.py --resume x" in err
    assert not fakes.living()
    kept = fakes.results("x")
    assert {name for _, name in kept.records} == set(EVERYONE)
    assert all(kept.steps(name) for name in EVERYONE)
    assert out.strip() == questions.body(kept).strip()
    assert (fakes.folder / "results" / "x.md").exists()

    fakes.plan()
    assert refused(command("--resume", "x", *fakes.flags(11)), "steps was 12 and is 11")
    assert refused(command("--resume", "x", "--seq-len", "32", *fakes.flags(12)), "flags was", "'32'")
    ran = command("--resume", "x", *fakes.flags(12))
    assert ran.status == 0, ran.err
    results = fakes.results("x")
    assert all(12 <= len(results.seconds_per_token(name)) <= 14 for name in EVERYONE if name != "rate")
    assert all(results.records[key][1] == steps for key, (_, steps, _) in kept.records.items())
    assert [row["note"] for row in cells_of(results).values()] == [
        "",
        "no-op: no TF32 units in a CPU; no difference",
        "active: bfloat16; no difference",
    ]
    assert not (fakes.folder / "results" / "x.parts").exists()


def test_a_killed_bench_leaves_its_records_and_no_process(fakes, command):  # noqa: F811
    fakes.plan(s02_tf32=dict(sleep=0.1))
    with running(fakes, steps=10) as process:
        until(lambda: in_the_middle(fakes))
        process.kill()
        process.wait()
    until(lambda: not fakes.living(), 5)
    kept = fakes.results("x")
    assert all(kept.steps(name) for name in EVERYONE)
    drawn = command("--render", "x")
    assert (drawn.status, "s03_bf16 | autocast to 16 bits | 10,000" in drawn.out) == (1, True)

    fakes.plan()
    parts = fakes.folder / "results" / "x.parts"
    settings = json.loads((parts / "bench.json").read_text())
    other = settings | dict(environment=settings["environment"] | dict(torch="1.0"))
    (parts / "bench.json").write_text(json.dumps(other))
    assert refused(command("--resume", "x", *fakes.flags(10)), "torch was 1.0 and is ")
    (parts / "bench.json").write_text(json.dumps(settings))
    ran = command("--resume", "x", *fakes.flags(10))
    assert ran.status == 0, ran.err
    assert all(len(fakes.results("x").seconds_per_token(name)) >= 10 for name in EVERYONE if name != "rate")


def test_an_interrupt_after_the_last_step_leaves_nothing_marked_as_failed(fakes, run, command, monkeypatch):  # noqa: F811
    def interrupted(process, timeout):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Process, "finish", interrupted)
        assert run().status == 130
    assert all(len(steps) == WARMUP + STEPS for _, steps, _ in fakes.records("x").values())
    ran = command("--resume", "x", *fakes.flags())
    assert ran.status == 0, ran.out


def test_what_failed_is_tried_again_when_the_bench_goes_on(fakes, run, command, monkeypatch):  # noqa: F811
    fakes.plan(s03_bf16=dict(does="boom", at=5))
    with monkeypatch.context() as patched:
        patched.setattr(bench, "show", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert refused(run(), "No space left on device")
    fakes.plan()
    assert command("--resume", "x", *fakes.flags()).status == 0
    assert not (fakes.folder / "results" / "x.parts").exists()


def test_results_that_do_not_fit_on_the_disk_leave_the_records_and_what_was_there(fakes, command):  # noqa: F811
    """The results file is larger than each record: a limit between the two stops it alone."""
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)); "
    limit += "sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[1:]; sys.argv[0] += '/bench.py'; "
    limit += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", limit, fakes.folder, *fakes.flags(), "--out", "x"], capture_output=True, text=True
    )
    ran = Ran(done.returncode, done.stdout, done.stderr)
    assert refused(ran, "File too large")
    assert "s03_bf16 | autocast to 16 bits | 10,000" in ran.out  # the table is told all the same
    assert [path.name for path in (fakes.folder / "results").iterdir()] == ["x.parts"]
    assert command("--render", "x").out == ran.out


# old records


def test_old_records_never_stand_in_for_a_run_that_failed(fakes, run, command):  # noqa: F811
    assert run().status == 0
    before = (fakes.folder / "results" / "x.jsonl").read_bytes()
    fakes.plan(s02_tf32=dict(does="boom", at=0))
    assert refused(run(), "results/x is there already", "--render x")
    assert refused(command("--resume", "x", *fakes.flags()), "results/x has nothing to resume")
    assert (fakes.folder / "results" / "x.jsonl").read_bytes() == before
    assert run(out="y").status == 1
    assert cells_of(fakes.results("y"))["s02_tf32"]["tok/sec"] == "–"


def test_a_record_that_was_cut_is_read_without_its_last_line(fakes, run, command):  # noqa: F811
    assert run().status == 0
    place = fakes.folder / "results" / "x.jsonl"
    text = place.read_text()
    place.write_text(text[: text.rindex('"memory"')])  # into the last record's last step
    assert command("--render", "x").status == 1
    assert len(fakes.records("x")["s03_bf16"][1]) == WARMUP + STEPS - 1
    assert cells_of(fakes.results("x"))["s03_bf16"]["note"].startswith("not finished")


def test_a_stage_whose_text_changed_since_is_marked_stale(fakes, run, command):  # noqa: F811
    assert run().status == 0
    with open(fakes.folder / "stages" / "s03_bf16.py", "a") as stage:
        stage.write("# changed\n")
    assert "stale" in command("--render", "x").out
    assert ["stale" in row["note"] for row in cells_of(fakes.results("x")).values()] == [False, False, True]


# memory


def allow(monkeypatch, at_once):
    """Memory for so many processes at once."""
    monkeypatch.setattr(bench, "room_for", lambda n, live: len(live) + n <= at_once)


def test_where_memory_holds_two_at_once_all_are_measured_beside_the_first(fakes, run, monkeypatch):
    allow(monkeypatch, 2)
    fakes.plan(s01_baseline=dict(dt=0.2), s03_bf16=dict(dt=0.05))
    ran = run()
    assert ran.status == 0, ran.err
    results = fakes.results("x")
    sessions = {}
    for session, name in results.records:
        sessions.setdefault(session, []).append(name)
    assert len(sessions) == 4 and all(len(names) == 2 and "s01_baseline" in names for names in sessions.values())
    assert {len(results.seconds_per_token(name)) for name in EVERYONE if name not in ("rate", "s01_baseline")} == {
        STEPS
    }
    rows = cells_of(results)
    assert (rows["s03_bf16"]["× s01"], rows["s03_bf16"]["× before"]) == ("4.00 ± 0.00", "2.00 ± 0.00")
    assert "rounds in lockstep in 4 sessions" in ran.out and "reached 0.00 TFLOP/s in float32" in ran.out


def test_where_memory_holds_one_alone_the_bench_says_so_and_ends(fakes, run, monkeypatch):
    allow(monkeypatch, 1)
    ran = run()
    assert ran.status == 1 and "no memory for a second process" in ran.err
    assert [row["note"] for row in cells_of(fakes.results("x")).values()] == ["", "not run", "not run"]


@pytest.mark.parametrize("free, rooms", [(None, (1, 2)), (5e9, (1, 2)), (3e9, (1,)), (2.25e9, ())])
def test_there_is_room_for_half_as_much_again_as_the_first_holds(fakes, monkeypatch, free, rooms):
    monkeypatch.setattr(bench, "free_memory", lambda: free)
    process = process_of(fakes)
    try:
        assert process.go(10)
        assert tuple(n for n in (1, 2) if bench.room_for(n, [process])) == rooms
    finally:
        process.stop()


# the limit


def limit_of(fakes, run, **fake):
    fakes.plan(s02_tf32=fake)
    ran = run("limit", "s02", "--memory-budget", "0.2")
    tried = [name.removeprefix("s02_tf32 B") for _, name in fakes.results("x").records]
    return ran, [line for line in ran.out.splitlines() if line.startswith("| s02")][0], tried


def test_the_limit_is_found_exactly_by_doubling_and_bisection(fakes, run):
    ran, row, tried = limit_of(fakes, run, most=11)
    assert ran.status == 0, ran.err
    assert row.startswith("| s02_tf32 | 11 | 10,000 | 1.50 | B 12: out of memory at batch size 12")
    assert sorted(tried) == sorted([*(f"{b} probe" for b in (1, 2, 4, 8, 16, 12, 10, 11)), "11"])


def test_a_limit_of_nothing_is_told(fakes, run):
    ran, row, tried = limit_of(fakes, run, most=0)
    assert (ran.status, tried) == (1, ["1 probe"])
    assert row.startswith("| s02_tf32 | none | – | – | B 1: out of memory")


def test_the_memory_budget_ends_the_doubling(fakes, run):
    ran, row, tried = limit_of(fakes, run, does="grow", at=1)
    assert (ran.status, tried) == (1, ["1 probe"])
    assert row.endswith("| none | – | – | B 1: out of memory: more than the budget of 0.2 GB |")
    assert not fakes.living()


def test_a_probe_that_was_interrupted_says_nothing_of_the_limit(fakes, run, command, monkeypatch):  # noqa: F811
    """It runs again when the bench goes on, and those that ended do not."""
    fakes.plan(s02_tf32=dict(most=11))
    led = []

    def go(process, timeout, of=Process.go):
        if process.name not in led[-1:]:
            led.append(process.name)
        if len(led) == 4:
            led.append("interrupt")
            raise KeyboardInterrupt
        return of(process, timeout)

    monkeypatch.setattr(Process, "go", go)
    assert run("limit", "s02").status == 130
    ran = command("limit", "s02", "--resume", "x", *fakes.flags())
    assert ran.status == 0 and "| s02_tf32 | 11 |" in ran.out
    batches = [1, 2, 4, 8, "interrupt", 8, 16, 12, 10, 11]  # and 11 once more, for its figures
    assert [name.removeprefix("s02_tf32 B") for name in led] == [str(b) for b in batches]
    assert not fakes.living()
