"""The bench: its command line, what it measures in which order, and what is left when it, a stage or a disk fails."""

from harness import ladder, machine, modes, page, workers
from harness.record import WARMUP
from harness.results import Results

import fcntl
import json
import re
import resource
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, Ended, python
from fixtures.fake_stage import all_have_ended

import bench

FAKE_STAGE = ROOT / "tests" / "fixtures" / "fake_stage.py"
S01, S02, S03 = "s01_baseline", "s02_tf32", "s03_bf16"
AGAIN = f"{S02} again"
EVERYONE = ["peak", S01, S02, AGAIN, S03]  # in the order in which a GPU starts them
COUNTED = 2
STEPS = WARMUP + COUNTED
MEMORY_VARIABLES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "THP_MEM_ALLOC_ENABLE": "1"}

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone limits a process")


class Repository:
    """A copy of this repository in which s01, s02, s03 and the probe are fakes, and whose bench runs in this process.

    at_once: how many processes the machine's memory holds. live: those that are alive now. most_alive: the most so
    far. started: how many there were.
    """

    def __init__(self, folder, monkeypatch, capsys):
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.lock = folder.parent / "lock"
        self.records = folder / "results" / "x.jsonl"
        self.page = folder / "results" / "x.md"
        self.flags = ["--device", "cpu", "--data", str(folder / "ids.bin")]
        self.at_once = 100
        self.live = []
        self.most_alive = 0
        self.started = 0

    def plan(self, **plans):
        """Say what the fakes do, by the names of their rows; those without a plan do nothing amiss."""
        self.monkeypatch.setenv("FAKE_PLANS", json.dumps(plans))

    def command(self, *words):
        """Return the Ended of `python bench.py WORDS`."""
        self.capsys.readouterr()
        try:
            status = bench.main(list(words))
        except SystemExit as end:
            status = end.code
        return Ended(status, *self.capsys.readouterr())

    def run(self, *words, steps=STEPS):
        """Return the Ended of a bench named x, of the three fakes where no words name something else."""
        return self.command(*(words or (S01, S02, S03)), *self.flags, "--steps", str(steps), "--out", "x")

    def resume(self):
        """Return the Ended of a resume in which no fake does anything amiss."""
        self.plan()
        return self.command("--resume", "x")

    def rows(self):
        """Return {name: Measured} of what is in the record."""
        return Results.load(self.records).rows

    def lines(self, kind):
        """Return the lines of one kind in the record."""
        lines = [json.loads(line) for line in self.records.read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def steps_taken(self):
        """Return {row: [steps that each of its processes took]}."""
        return {name: [len(run.steps) for run in row.runs] for name, row in self.rows().items()}

    def counted_steps(self):
        """Return {row: counted steps of all its processes}."""
        return {name: len(row.counted_steps) for name, row in self.rows().items()}


@pytest.fixture
def repo(tmp_path, monkeypatch, capsys):
    """A Repository, in a folder with a blank in its name. A test leaves none of its processes."""
    folder = tmp_path / "a copy"
    shutil.copytree(ROOT / "stages", folder / "stages", ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    for name in ("bench.py", "data.py", "model.py"):
        shutil.copy(ROOT / name, folder)
    for script in (S01, S02, S03, "harness/probe"):
        shutil.copy(FAKE_STAGE, folder / "stages" / f"{script}.py")
    (folder / "ids.bin").write_bytes(bytes(20_000))
    (folder / "results").mkdir()
    repo = Repository(folder, monkeypatch, capsys)
    repo.lock.touch()

    class NamedWorker(workers.Worker):
        """A worker whose fake knows of which row and session it is."""

        def __init__(self, row, flags, results, session):
            repo.started += 1
            assert repo.started < 50, "the bench does not end"
            repo.live.append(row.name)
            repo.most_alive = max(repo.most_alive, len(repo.live))
            env = {"FAKE_ROW": row.name, "FAKE_SESSION": str(session), **row.env}
            super().__init__(replace(row, env=env), flags, results, session)

        def stop(self):
            repo.live.remove(self.row.name)
            super().stop()

    monkeypatch.setenv("FAKE_LOCK", str(repo.lock))
    monkeypatch.setattr(bench, "ROOT", folder)
    monkeypatch.setattr(ladder, "FOLDER", folder / "stages")
    monkeypatch.setattr(page, "__file__", str(folder / "stages" / "harness" / "page.py"))
    monkeypatch.setattr(modes, "PROBE", folder / "stages" / "harness" / "probe.py")
    monkeypatch.setattr(workers, "Worker", NamedWorker)
    monkeypatch.setattr(workers, "PATIENCE", 60)
    monkeypatch.setattr(workers, "PAUSE", 0)
    monkeypatch.setattr(machine, "free_memory", lambda: 10**15 if len(repo.live) < repo.at_once else 0)
    yield repo
    assert all_have_ended(repo.lock)


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """A machine without an accelerator."""
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("cpu"))


@pytest.fixture
def gpu(monkeypatch):
    """A machine with four GPUs, as far as the bench looks at it."""
    environment = machine.environment(torch.device("cpu")) | {"device": "cuda"}
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(machine, "total_memory", lambda device: 80e9)
    monkeypatch.setattr(machine, "native_amp_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(machine, "compile_problem", lambda device: None)
    monkeypatch.setattr(machine, "environment", lambda device: environment)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def rows_of(*words):
    """Return {name: Row} of all that a bench starts."""
    args = bench.parse_command(words)
    rows, _ = args.mode.rows(args)
    return {row.name: row for row in rows}


# The command line


@pytest.mark.parametrize(
    "words, message",
    [
        ("s99", "s99 is no stage"),
        ("s02_tf32.py", "s02_tf32.py can't name a row, which another one has: rename it"),
        ("latin.py", "latin.py can't be read as Python"),
        ("syntax.py", "syntax.py can't be read as Python"),
        ("--profile", "--profile is for a single stage"),
        ("--steps 4", "--steps 4: the first 4 steps are warm-up"),
        ("--data short.bin", "90 tokens"),
        ("--out ../x", "'../x' is no name"),
        ("--out old", "results/old.jsonl is there already: pass another --out, or --resume old"),
        ("--out page", "results/page.md is there already"),
        ("--render old", "old.jsonl is no record of a bench"),
        ("--resume gone", "results/gone.jsonl is not there"),
        ("--resume old --steps 9", "leave all others out"),
        ("--resume=old s01", "leave all others out"),
        ("--ranks 2", "--ranks is for scale"),
        ("amp s02", "amp compares the dtypes of autocast, and s02_tf32 has none"),
        ("amp --amp-dtype=float16", "amp sets --amp-dtype for each of its rows"),
        ("scale s02", "s02_tf32 is for one process"),
        ("scale --ranks 9", "--ranks 9: this machine has 4"),
        ("limit --batch-size 2", "limit sets --batch-size for each of its rows"),
        ("limit --rounds 2", "leave --rounds out"),
        pytest.param("limit --memory-budget 8000000000", "pass a number of GB", marks=needs_linux),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(repo, monkeypatch, words, message):
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.chdir(repo.folder)
    files = {"short.bin": bytes(200), "latin.py": b"# \xe9", "syntax.py": b"def", "s02_tf32.py": b""}
    files |= {"results/old.jsonl": b"{}\n", "results/page.md": b""}
    for name, content in files.items():
        (repo.folder / name).write_bytes(content)
    ended = repo.command(*words.split())
    assert (ended.status, ended.out) == (2, "")
    assert re.fullmatch(f"error: .*{message}.*\n", ended.err)
    assert sorted(path.name for path in repo.records.parent.iterdir()) == ["old.jsonl", "page.md"]


def test_stages_are_rows_in_the_order_of_the_ladder_wherever_they_stand():
    args = bench.parse_command(["s11", "--size", "tiny", "s01", "--no-compile", "s11", "--accum", "4"])
    assert [path.stem for path in args.scripts] == ["s01_baseline", "s11_accum"]
    assert (args.stage.size, args.stage.compile, args.stage.accum) == ("tiny", False, 4)


def test_without_names_each_mode_has_stages_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert list(rows_of()) == ["peak", "plain", *ladder.NAMES[:6], "s06_vocab again", *ladder.NAMES[6:]]
    assert list(rows_of("limit")) == ["s05_flash", "s11_accum"]
    assert {row.script.stem for row in rows_of("scale").values()} == {"s12_ddp"}


def test_amp_runs_one_stage_in_three_dtypes():
    rows = rows_of("amp")
    assert list(rows) == ["peak", "float32", "bfloat16", "bfloat16 again", "float16"]
    for dtype in ("float32", "float16", "bfloat16"):
        assert (rows[dtype].script.stem, rows[dtype].flags) == ("s03_bf16", ("--amp-dtype", dtype))


def test_a_gpu_has_no_row_plain_and_no_memory_variables(gpu):
    rows = rows_of()
    assert "plain" not in rows
    assert not any(row.env for row in rows.values())


def test_on_apples_chip_the_ladder_ends_above_the_stage_of_several_processes(gpu, monkeypatch):
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("mps"))
    assert [path.stem for path in bench.parse_command([]).scripts] == ladder.NAMES[:-1]


@pytest.mark.parametrize("words", [("s01", "s02"), ("amp",), ("scale",)])
def test_every_row_and_the_probe_of_a_cpu_get_the_memory_variables(words):
    for row in rows_of(*words).values():
        assert MEMORY_VARIABLES.items() <= row.env.items()


@pytest.mark.parametrize("ranks, sizes, accum", [(1, [1], "4"), (3, [1, 2, 3], "12"), (4, [1, 2, 4], "4")])
def test_scale_divides_the_same_micro_batches_over_all_its_ranks(gpu, ranks, sizes, accum):
    rows = rows_of("scale", "--ranks", str(ranks), "--accum", "4").values()
    assert [row.ranks for row in rows if not row.control_of] == sizes
    assert {row.flags for row in rows} == {("--accum", accum)}


def test_scale_on_a_cpu_has_a_process_with_all_cores_and_ranks_that_share_them(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 6)
    rows = rows_of("scale", "--ranks", "3")
    del rows["2 ranks again"]
    threads = {name: (row.ranks, row.env.get("OMP_NUM_THREADS")) for name, row in rows.items()}
    assert threads == {"1 process": (0, None), "1 rank": (1, "2"), "2 ranks": (2, "2"), "3 ranks": (3, "2")}


@needs_linux
def test_limit_lets_a_process_hold_half_of_the_free_memory_or_its_budget(monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 8e9)
    assert rows_of("limit")["s05_flash"].memory_budget == 4e9
    assert rows_of("limit", "--memory-budget", "1.5")["s05_flash"].memory_budget == 1.5e9


# The ladder on a CPU


def test_on_a_cpu_all_are_alive_at_once_and_step_in_turn_there_and_back(repo):
    repo.plan(**{S03: {"dt": 0.0625}})
    ended = repo.run(S01, S02, S03, "--seed", "7", "--no-compile")
    assert ended.status == 0
    assert repo.most_alive == len(EVERYONE)
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS])
    counted = [line["name"] for line in repo.lines("step") if line["step"] >= WARMUP]
    assert sorted(counted[:5]) == sorted(EVERYONE)
    assert counted[5:] == counted[4::-1]
    assert re.search(r"^s03 .* 16,000 +2\.00 +2\.00 +0\.02$", ended.out, re.MULTILINE)
    for header in repo.lines("header"):
        assert {*repo.flags, "--seed", "7", "--no-compile"} <= set(header["argv"])


def test_without_flags_a_cpu_counts_20_steps_in_one_round(repo):
    ended = repo.command("s01", *repo.flags)
    [repo.records] = repo.records.parent.glob("*.jsonl")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}-ladder\.jsonl", repo.records.name)
    assert repo.steps_taken() == dict.fromkeys(["peak", S01, f"{S01} again"], [24])
    [line] = repo.lines("bench")
    assert (line["warmup"], line["steps"], line["rounds"], line["enough"], line["pair_by"]) == (4, 24, 1, None, "turn")
    assert re.search(r"turn 5 of 20, about \d+ s left; tokens per second so far:\ns01\s8,000\n", ended.err)


def test_plain_runs_without_the_memory_variables_even_where_the_user_has_them(repo, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "7")
    repo.run("plain", "s01")
    seen = {line["name"]: line["variables"]["MALLOC_MMAP_MAX_"] for line in repo.lines("step")}
    assert seen == {"peak": "0", "plain": None, S01: "0", f"{S01} again": "0"}
    assert repo.lines("bench")[0]["reference"] == S01


def train_on_bytes(monkeypatch):
    """Let the bench train on bytes, as without a network, while the headers of the fakes tell of GPT-2's tokens."""
    load_tokens = bench.load_tokens
    monkeypatch.setattr(bench, "load_tokens", lambda source: replace(load_tokens(source), tokenizer="bytes"))


def test_rows_try_no_download_that_the_bench_could_not_do_and_fail_with_another_text(repo, monkeypatch):
    monkeypatch.delenv("LADDER_OFFLINE")
    train_on_bytes(monkeypatch)
    ended = repo.run()
    assert {line["variables"]["LADDER_OFFLINE"] for line in repo.lines("step")} == {"1"}
    assert f"{S03} failed: trains on another text than the bench" in ended.err
    assert ended.status == 1


@pytest.mark.parametrize("row, status", [(S03, 1), (AGAIN, 1), ("peak", 0)])
def test_a_failure_costs_its_own_row_alone_and_a_row_costs_exit_status_1(repo, row, status):
    repo.plan(**{row: {"do": "crash", "at": 5}})
    ended = repo.run()
    assert ended.status == status
    assert f"{row} failed: RuntimeError: boom" in ended.err
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS]) | {row: [5]}


@pytest.mark.parametrize("at_once, second", [(4, {"peak", S01, S02, S03}), (3, {S01, S02, S03})])
def test_rows_that_memory_does_not_hold_at_once_share_a_session_with_their_partners(repo, at_once, second):
    repo.at_once = at_once
    assert repo.run().status == 0
    assert {name for name, row in repo.rows().items() if row.run(1)} == second
    assert repo.counted_steps()[S03] == COUNTED


def test_where_memory_holds_too_few_for_a_comparison_the_bench_ends_and_says_so(repo):
    repo.at_once = 2
    ended = repo.run()
    assert ended.status == 1
    assert "there is no memory for another process" in ended.err


# The ladder on a GPU


def test_on_a_gpu_one_runs_after_the_other_in_three_rounds_there_and_back(repo, gpu):
    ended = repo.run()
    assert ended.status == 0
    assert repo.most_alive == 1
    back = ["peak", S03, AGAIN, S02, S01]
    assert [line["name"] for line in repo.lines("start")] == EVERYONE + back + EVERYONE
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS, STEPS, STEPS])
    assert ended.out.count("what you type") == 3  # the short table after each round


def test_on_a_gpu_a_row_counts_20_steps_and_six_seconds_of_them_at_most_160(repo, gpu):
    repo.plan(**{S01: {"dt": 1}, S02: {"dt": 0.125}, AGAIN: {"dt": 0.125}, S03: {"dt": 0.01}})
    assert repo.command(S01, S02, S03, *repo.flags, "--rounds", "1", "--out", "x").status == 0
    assert repo.counted_steps() == {"peak": 48, S01: 20, S02: 48, AGAIN: 48, S03: 160}
    for header in repo.lines("header"):  # a schedule is planned by it
        assert header["argv"][:2] == ["--steps", "164"]
    [line] = repo.lines("bench")
    assert (line["enough"], line["pair_by"]) == ([20, 6.0], "round")


def test_on_a_gpu_a_failure_costs_its_own_runs_and_a_resume_repeats_them_alone(repo, gpu):
    repo.plan(**{S03: {"do": "crash", "at": 5}})
    assert repo.run(S01, S02, S03, "--rounds", "2").status == 1
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS, STEPS]) | {S03: [5, 5]}
    assert repo.resume().status == 0
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS, STEPS])
    assert [line["name"] for line in repo.lines("start")[10:]] == [S03, S03]


def test_on_a_gpu_ctrl_c_in_the_second_round_keeps_both(repo, gpu):
    repo.plan(**{AGAIN: {"do": "interrupt the bench", "at": 5, "session": 1}})
    ended = repo.run()
    assert ended.status == 130
    assert repo.steps_taken() == {"peak": [6, 6], S01: [6], S02: [6], AGAIN: [6, 5], S03: [6, 6]}
    assert ended.out.count("what you type") == 2
    assert repo.resume().status == 0
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS, STEPS, STEPS])


# Ends that nobody planned, and --resume


@pytest.mark.parametrize("row, at", [(S02, "start"), (S03, WARMUP + 1)])  # before the first turn, and after it
def test_ctrl_c_leaves_a_record_that_a_resume_completes_to_the_very_step(repo, row, at):
    repo.plan(**{row: {"do": "interrupt the bench", "at": at}})
    ended = repo.run()
    assert ended.status == 130
    assert "interrupted; continue with: python bench.py --resume x\n" in ended.err
    assert "not finished" in repo.page.read_text()
    before = repo.records.read_bytes()
    assert repo.resume().status == 0
    assert repo.records.read_bytes().startswith(before)
    assert repo.counted_steps() == dict.fromkeys(EVERYONE, COUNTED)


def test_a_killed_bench_leaves_no_process_and_a_record_that_a_resume_completes(repo):
    repo.plan(**{S03: {"do": "kill the bench", "at": WARMUP}})
    python("bench.py", S01, S02, S03, *repo.flags, "--steps", STEPS, "--out", "x", folder=repo.folder)
    assert all_have_ended(repo.lock)
    before = repo.records.read_bytes()
    repo.records.write_bytes(before + b'{"kind": "step", "sess')  # as a kill in the middle of a line leaves it
    assert repo.resume().status == 0
    assert repo.records.read_bytes().startswith(before)
    counted = repo.counted_steps().values()  # all take the turn again that was cut off
    assert (min(counted), max(counted)) == (COUNTED, COUNTED + 1)


def test_a_full_disk_is_one_line_and_the_bench_continues(repo):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        ended = repo.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.status == 2
    assert re.fullmatch(r"error: results/x.jsonl: .*; mend it, and continue .* --resume x", ended.err.splitlines()[-1])
    assert repo.records.stat().st_size == 10_000
    assert repo.resume().status == 0
    assert min(repo.counted_steps().values()) == COUNTED


@pytest.mark.parametrize("at", [1, "end"])
def test_a_row_that_failed_is_measured_again_with_what_it_is_compared_with(repo, at):
    repo.plan(**{S02: {"do": "crash", "at": at}})
    assert repo.run().status == 1
    assert repo.resume().status == 0
    assert [name for name, row in repo.rows().items() if row.runs[-1].session == 1] == EVERYONE


def test_where_the_reference_failed_all_rows_are_measured_again_with_it(repo):
    repo.plan(**{S01: {"do": "crash", "at": 1}})
    assert repo.run().status == 1
    assert repo.resume().status == 0
    results = Results.load(repo.records)
    assert results.compare(results.rows[S03], results.rows[S01]) is not None


@pytest.mark.parametrize("flag", ["--resume", "--render"])
def test_what_is_complete_is_drawn_again_and_not_measured(repo, flag):
    ended = repo.run()
    records, drawn = repo.records.read_bytes(), repo.page.read_text()
    repo.page.unlink()
    again = repo.command(flag, "x")
    assert (again.status, again.out) == (0, ended.out)
    assert repo.page.read_text() == drawn
    assert repo.records.read_bytes() == records


@pytest.fixture
def interrupted(repo):
    """A Repository whose bench, of s02 and a script of the reader's own, was interrupted at its first counted step."""
    (repo.folder / "own").mkdir()
    for name in ("model.py", "data.py"):
        (repo.folder / "own" / name).touch()
    script = shutil.copy(FAKE_STAGE, repo.folder / "own" / "mine.py")
    repo.plan(peak={"do": "interrupt the bench", "at": WARMUP})
    assert repo.run(S02, str(script)).status == 130
    return repo


def assert_resume_is_refused(repo, reason):
    """Assert that --resume refuses in one line and touches nothing."""
    before = repo.records.read_bytes()
    ended = repo.resume()
    assert ended.status == 2
    assert re.fullmatch(f"error: {reason}.*\n", ended.err)
    assert repo.records.read_bytes() == before


@pytest.mark.parametrize(
    "file", ["bench.py", f"stages/{S02}.py", "stages/harness/steplog.py", "own/model.py", "own/data.py"]
)
def test_resume_refuses_other_code(interrupted, file):
    with open(interrupted.folder / file, "a") as code:
        code.write("pass\n")
    assert_resume_is_refused(interrupted, f"--resume x: {file} was ")


def test_a_comment_and_the_page_are_no_other_code(interrupted):
    for file, line in ((f"{S02}.py", "# a comment\n"), ("harness/page.py", "pass\n")):
        with open(interrupted.folder / "stages" / file, "a") as code:
            code.write(line)
    assert interrupted.resume().status == 0


def test_resume_refuses_another_machine(interrupted, monkeypatch):
    environment = machine.environment(torch.device("cpu")) | {"torch": "1.0"}
    monkeypatch.setattr(machine, "environment", lambda device: environment)
    assert_resume_is_refused(interrupted, "--resume x: torch was ")


def test_resume_refuses_another_corpus(interrupted, monkeypatch):
    train_on_bytes(monkeypatch)
    assert_resume_is_refused(interrupted, "--resume x: corpus was ")


def test_a_bench_that_runs_can_not_be_resumed_beside_it(interrupted):
    with open(interrupted.records, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the bench that runs holds it
        assert_resume_is_refused(interrupted, "results/x.jsonl is being written by another bench")


# The largest batch


def batches_tried(repo):
    """Return the batch sizes of the mode `limit`, in the order in which they were tried."""
    return [line["batch_size"] for line in repo.lines("start")]


@needs_linux
def test_limit_doubles_the_batch_and_bisects_by_runs_of_three_counted_steps(repo):
    repo.plan(**{S02: {"largest_batch": 11}})
    ended = repo.run("limit", "s02", steps=24)
    assert ended.status == 0
    assert batches_tried(repo) == [1, 2, 4, 8, 16, 12, 10, 11]
    assert len(repo.rows()[S02].run(0, 11).steps) == WARMUP + 3
    assert re.search(r"^s02 +11 +22,000 +0\.06 +B 12: out of memory at batch size 12", ended.out, re.MULTILINE)


@needs_linux
@pytest.mark.parametrize(
    "tried, plan", [([1, 2, 4], {"do": "crash", "at": 1, "batch_size": 4}), ([1, 2], {"tokens": 1000})]
)
def test_limit_ends_a_row_that_fails_otherwise_or_takes_no_notice_of_the_batch(repo, tried, plan):
    repo.plan(**{S02: plan})
    assert repo.run("limit", "s02").status == 1
    assert batches_tried(repo) == tried


@needs_linux
def test_limit_that_was_interrupted_tries_that_batch_again_and_no_other_twice(repo):
    repo.plan(**{S02: {"largest_batch": 11, "do": "interrupt the bench", "at": 5, "batch_size": 10}})
    assert repo.run("limit", "s02").status == 130
    repo.plan(**{S02: {"largest_batch": 11}})
    repo.at_once = 0  # less memory is free now, and the budget stays
    assert repo.command("--resume", "x").status == 0
    assert batches_tried(repo) == [1, 2, 4, 8, 16, 12, 10, 10, 11]


@needs_linux
@pytest.mark.parametrize("budget, largest, stopped_by", [("0.1", "none", "at 200 MB"), ("0.4", "1", "at batch size 2")])
def test_the_memory_budget_of_limit_holds_a_process_on_a_cpu(repo, budget, largest, stopped_by):
    repo.plan(**{S02: {"do": "take 200 MB", "at": 1, "largest_batch": 1}})
    ended = repo.run("limit", "s02", "--memory-budget", budget)
    assert re.search(rf"^s02 +{largest} .* out of memory {stopped_by}", ended.out, re.MULTILINE)


# Scripts of the reader's own, in real processes

OWN_SCRIPT = """
print("half a line ", end="")
import model
from harness import StepLog, parse_args
import data
import torch

args = parse_args("My own.")
print('{"kind": "summary"}', flush=True)  # as anyone may print
net = torch.nn.Linear(1, 1)
net.config = model.CONFIG
log = StepLog(args, net, tokens_per_step=data.TOKENS)
for step in range(args.steps):
    log.step(net(torch.ones(1)).sum(), step=9, peak=0.5, session=7)
log.finish(net)
"""


def test_scripts_from_any_folder_are_rows_and_one_that_is_wrong_says_why(repo, tmp_path, monkeypatch):
    scripts = {
        "few": OWN_SCRIPT.replace("range(args.steps)", "range(args.steps - 1)"),
        "many": OWN_SCRIPT.replace("range(args.steps)", "range(args.steps + 1)"),
        "own_gpt": OWN_SCRIPT,
        "no_gpt": OWN_SCRIPT.replace("net.config = model.CONFIG", ""),
        "two_logs": OWN_SCRIPT.replace("log = ", "first_log = StepLog(args, net)\nlog = "),
        "no_finish": OWN_SCRIPT.replace("log.finish(net)", ""),
    }
    shape = {"vocab_size": 300, "block_size": 64, "n_layer": 1, "n_head": 1, "n_embd": 32}
    config = f"from types import SimpleNamespace\nCONFIG = SimpleNamespace(**{shape})"
    for name, text in {**scripts, "data": "TOKENS = 128", "model": config}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    flags = ("--size", "tiny", "--no-compile", "--amp-dtype", "float32")
    repo.run(*(f"{name}.py" for name in scripts), "s05", *flags, steps=WARMUP + 1)
    results = Results.load(repo.records)
    assert [row.name for row in results.table_rows] == ["s05_flash", *scripts]
    assert {row.name: results.error(row) for row in results.rows.values() if results.error(row)} == {
        "few": "the loop ended after 4 of 5 steps: let it run over range(args.steps)",
        "many": "the loop goes on after --steps 5: let it run over range(args.steps)",
        "two_logs": "the script has two StepLogs: let one log take all steps",
        "no_finish": "ended without log.finish(), or before its last step",
    }
    assert results.rows["own_gpt"].facts["shape"] == shape
    [own] = results.rows["own_gpt"].counted_steps
    flops = 6 * (12 * 1 * 32**2 + 300 * 32) + 12 * 1 * 32 * 64  # of a token
    assert results.peak_share(results.rows["own_gpt"]) == pytest.approx(128 / own["dt"] * flops / 1e9)
    assert results.peak_share(results.rows["no_gpt"]) is None
