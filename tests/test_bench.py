"""The bench: its command line, what it measures in which order, and what is left when it, a stage or a disk fails."""

from harness import ladder, leader, machine, modes, readme
from harness.records import WARMUP, read
from harness.results import Results

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, Ended
from fixtures.fake_stage import all_have_ended

import bench

S01, S02, S03 = "s01_baseline", "s02_tf32", "s03_bf16"
AGAIN = f"{S02} again"
EVERYONE = [S01, S02, AGAIN, "peak", S03]  # in the order in which they start on a CPU
COUNTED = 2
STEPS = WARMUP + COUNTED
WHILE_STARTING, AT_THE_FIRST_STEP, AT_THE_LAST_STEP = f"{S02}: start", "step 1/2", "step 2/2"
MEMORY_VARIABLES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "THP_MEM_ALLOC_ENABLE": "1"}

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone limits a process")


class Repository:
    """A copy of this repository in which s01, s02, s03 and the probe are fakes, and whose bench runs in this process.

    at_once: how many processes the machine's memory holds. live: those that are alive now.
    """

    def __init__(self, folder, monkeypatch, capsys):
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.results_folder = folder / "results"
        self.records = folder / "results" / "x.jsonl"
        self.page = folder / "results" / "x.md"
        self.readme = folder / "README.md"
        self.corpus = folder / "ids.bin"
        self.flags = ["--device", "cpu", "--data", str(self.corpus), "--batch-size", "4", "--seq-len", "64"]
        self.acts = {}
        self.at_once = 100
        self.live = []

    def plan(self, **plans):
        """What the fakes do, by the names of their rows; those without a plan do nothing amiss."""
        self.monkeypatch.setenv("FAKE_PLANS", json.dumps(plans))

    def when(self, part, act):
        """Call act() once, as soon as the bench reports a line with this part."""
        self.acts[part] = act

    def say(self, line):
        """Takes the place of leader.say()."""
        print(line, file=sys.stderr)
        for part in list(self.acts):
            if part in line:
                self.acts.pop(part)()

    def command(self, *words):
        """`python bench.py WORDS`."""
        self.capsys.readouterr()
        try:
            status = bench.main(list(words))
        except SystemExit as end:
            status = end.code
        printed = self.capsys.readouterr()
        return Ended(status, printed.out, printed.err)

    def run(self, *words, steps=STEPS):
        """A bench named x, of the three fakes where no words name something else."""
        return self.command(*(words or (S01, S02, S03)), *self.flags, "--steps", str(steps), "--out", "x")

    def resume(self):
        return self.command("--resume", "x")

    def results(self):
        return Results(self.records)

    def lines(self, kind):
        return [line for line in read(self.records) if line["kind"] == kind]

    def steps_taken(self):
        """{row: [steps that each of its processes took]}."""
        taken = {}
        for (_, name), run in self.results().runs.items():
            taken.setdefault(name, []).append(len(run.steps))
        return taken

    def counted_steps(self):
        """{row: counted steps of all its processes}."""
        return {name: len(self.results().counted_steps(name)) for name in EVERYONE}


@pytest.fixture
def repo(tmp_path, monkeypatch, capsys):
    """A Repository, in a folder with a blank in its name. A test leaves none of its processes."""
    folder = tmp_path / "a copy"
    shutil.copytree(ROOT / "stages", folder / "stages", ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    for name in ("bench.py", "data.py", "model.py"):
        shutil.copy(ROOT / name, folder)
    for script in (S01, S02, S03, "harness/probe"):
        shutil.copy(ROOT / "tests" / "fixtures" / "fake_stage.py", folder / "stages" / f"{script}.py")
    (folder / "README.md").write_text(f"{readme.BEGIN}\n{readme.END}\n")
    (folder / "ids.bin").write_bytes(bytes(20_000))
    (folder / "results").mkdir()
    repo = Repository(folder, monkeypatch, capsys)

    class NamedWorker(leader.Worker):
        """A worker whose fake knows of which row it is."""

        def __init__(self, row, flags, keep):
            repo.live.append(row.name)
            super().__init__(replace(row, env={"FAKE_ROW": row.name, **row.env}), flags, keep)

        def stop(self):
            repo.live.remove(self.row.name)
            super().stop()

    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setenv("FAKE_LOCK", str(lock))
    for name in MEMORY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(leader, "PATIENCE", 60)
    monkeypatch.setattr(bench, "ROOT", folder)
    monkeypatch.setattr(modes, "PROBE", folder / "stages" / "harness" / "probe.py")
    monkeypatch.setattr(bench, "say", repo.say)
    monkeypatch.setattr(modes, "say", repo.say)
    monkeypatch.setattr(ladder, "FOLDER", folder / "stages")
    monkeypatch.setattr(leader, "FOLDER", folder / "stages")
    monkeypatch.setattr(leader, "Worker", NamedWorker)
    monkeypatch.setattr(leader, "say", repo.say)
    monkeypatch.setattr(leader, "PAUSE", 0)
    monkeypatch.setattr(leader, "REPORT_EVERY", -1)  # after each step
    monkeypatch.setattr(machine, "free_memory", lambda: 10**15 if len(repo.live) < repo.at_once else 0)
    yield repo
    assert all_have_ended(lock)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with four GPUs, as far as the bench looks at it."""
    environment = machine.environment(torch.device("cpu")) | {"device": "cuda", "device_name": "A GPU"}
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(machine, "total_memory", lambda device: 80e9)
    monkeypatch.setattr(machine, "native_amp_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(machine, "compile_problem", lambda device: None)
    monkeypatch.setattr(machine, "environment", lambda device: environment)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def interrupt():
    """What Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


def parse(*words):
    return bench.parse_command(["--device", "cpu", *words])


# The command line


def start_nothing(running):
    """Takes the place of Bench.run()."""
    raise AssertionError("the bench starts its first process")


@pytest.mark.parametrize(
    "words, message",
    [
        ("s99", "s99 is no stage"),
        ("s02 amp", "amp is no stage"),
        ("gone.py", "gone.py is no stage"),
        ("--no-such-flag", "--no-such-flag"),
        ("--seq-len 2000", "--seq-len 2000"),
        ("--rounds 0", "--rounds"),
        ("--steps 4", "--steps 4: the first 4 steps are warm-up"),
        ("--data gone.txt", "--data gone.txt"),
        ("--data short.bin", "90 tokens"),
        ("--out ../x", "'../x' is no name"),
        ("--out old", "results/old.jsonl is there already: pass another --out, or --resume old"),
        ("--out page", "results/page.md is there already"),
        ("--render gone", "results/gone.jsonl is not there"),
        ("--resume gone", "results/gone.jsonl is not there"),
        ("--render old", "old.jsonl is no record of a bench"),
        ("--record x.jsonl", "--record is for a single stage"),
        ("--save x", "--save is for a single stage"),
        ("--profile", "--profile is for a single stage"),
        ("--readme", "README.md must hold"),
        ("amp --readme", "leave --readme or amp out"),
        ("amp s03 s05", "pass one"),
        ("limit --memory-budget nan", "--memory-budget nan"),
        ("scale --ranks 9", "--ranks 9: this machine has 4"),
        ("--lr 3e-4 6e-4", "several rates in the mode loss alone"),
        ("loss --lr 6e-4 0", "'0' is not a number above 0"),
        ("loss --lr 6e-4 0.0006", "--lr names a rate twice"),
        ("amp s02", "amp compares the dtypes of autocast, and s02_tf32 has none"),
        ("scale s02", "s02_tf32 is for one process"),
        ("--seeds 3", "--seeds is for the mode loss"),
        ("loss --ranks 2", "--ranks is for the mode scale"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(repo, monkeypatch, words, message):
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.setattr(bench.Bench, "run", start_nothing)
    monkeypatch.chdir(repo.folder)
    (repo.folder / "short.bin").write_bytes(bytes(200))
    repo.readme.write_text("mine")
    old = [repo.results_folder / "old.jsonl", repo.results_folder / "page.md"]
    for path in old:
        path.write_text("{}\n")
    ended = repo.command("--device", "cpu", "--data", str(repo.corpus), *words.split())
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert message in ended.err
    assert sorted(repo.results_folder.iterdir()) == old
    assert repo.readme.read_text() == "mine"


@pytest.mark.parametrize("name", ["peak.py", "plain.py", f"{S02}.py"])
def test_a_script_whose_name_another_row_has_is_refused(repo, name):
    script = repo.folder / name
    script.touch()
    ended = repo.run(str(script))
    assert ended.status == 2
    assert f"{name} can't name a row, which another one has: rename it" in ended.err


def test_help_names_the_flags_that_the_bench_takes_and_no_others(repo):
    own = {"--rounds", "--steps", "--lr", "--seeds", "--ranks", "--memory-budget", "--out", "--resume", "--render"}
    assert set(re.findall(r"--[a-z-]+", repo.command("--help").out)) == own | {"--readme", "--help"}


def test_stages_are_rows_in_the_order_of_the_ladder_wherever_they_stand_among_the_flags():
    args = parse("s11", "--size", "tiny", "s01", "--no-compile", "s11", "--accum", "4")
    assert [path.stem for path in args.scripts] == ["s01_baseline", "s11_accum"]
    assert (args.stage.size, args.stage.compile, args.stage.accum) == ("tiny", False, 4)


def rows_of(*words):
    """The names of the rows of a bench."""
    rows, _ = modes.rows_of(parse(*words))
    return [row.name for row in rows]


def test_each_mode_has_stages_of_its_own():
    assert rows_of() == ["plain", *ladder.NAMES]
    assert rows_of("amp") == ["float32", "float16", "bfloat16"]
    assert {path.stem for path in parse("amp").scripts} == {"s03_bf16"}
    assert rows_of("loss", "--lr", "6e-4") == [f"{name} lr 6e-4" for name in ("s06_vocab", "s07_clip", "s08_cosine")]


def test_the_row_plain_is_among_the_stages_of_a_cpu_alone(monkeypatch):
    assert rows_of("plain", "s05") == ["plain", "s05_flash"]
    assert rows_of("s01", "s05") == ["s01_baseline", "s05_flash"]


def test_on_a_gpu_there_is_no_row_plain(gpu):
    assert rows_of() == ladder.NAMES
    assert rows_of("limit") == ["s05_flash", "s11_accum"]


def test_loss_trains_for_as_long_as_the_device_allows_unless_flags_say_otherwise(gpu):
    args = parse("loss")
    assert (args.steps, args.rounds, args.lr) == (600, 5, [1.5e-4, 6e-4, 2.4e-3])
    assert (args.stage.batch_size, args.stage.seq_len, args.stage.accum) == (2, 256, 1)
    args = parse("loss", "--steps", "30", "--seeds", "3", "--batch-size", "8", "--lr", "2e-3", "1e-3")
    assert (args.steps, args.rounds, args.lr, args.stage.batch_size) == (30, 3, [1e-3, 2e-3], 8)


def test_loss_on_a_cpu_is_shorter_and_its_runs_share_the_cores(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 8)
    args = parse("loss", "s06", "s07", "--lr", "6e-4")
    assert (args.steps, args.rounds) == (80, 2)
    rows, _ = modes.rows_of(args)
    assert {row.env["OMP_NUM_THREADS"] for row in rows} == {"4"}


@pytest.mark.parametrize("ranks, sizes, accum", [(1, [1], 4), (3, [1, 2, 3], 12), (4, [1, 2, 4], 4)])
def test_scale_divides_the_same_micro_batches_over_all_its_ranks(gpu, ranks, sizes, accum):
    rows, probes = modes.rows_of(parse("scale", "--ranks", str(ranks)))
    assert [row.script.stem for row in rows] == ["s12_ddp"] * len(sizes)
    assert [row.ranks for row in rows] == sizes
    assert [row.ranks for row in probes] == sizes[1:]
    assert {row.flags for row in rows + probes} == {("--accum", str(accum))}


def test_scale_on_a_cpu_gives_each_rank_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 6)
    rows, probes = modes.rows_of(parse("scale", "--ranks", "3"))
    assert [row.name for row in probes] == ["all-reduce of 2 ranks", "all-reduce of 3 ranks"]
    assert {row.env["OMP_NUM_THREADS"] for row in rows + probes} == {"2"}


# The ladder on a CPU


def test_on_a_cpu_all_are_alive_at_once_and_take_a_step_in_turn_there_and_back(repo):
    repo.plan(**{S03: {"dt": 0.0625}})
    ended = repo.run()
    assert ended.status == 0
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS])
    counted = [line["name"] for line in repo.lines("step") if line["step"] >= WARMUP]
    assert counted == EVERYONE + EVERYONE[::-1]
    assert repo.results().compare(S03, S01)[0] == 2
    assert repo.results().controls.keys() == {(AGAIN, S02)}
    assert ended.out == repo.page.read_text() + "\n"


def test_without_flags_a_cpu_takes_one_round_of_20_counted_steps_and_names_it_by_time_and_mode(repo):
    assert repo.command("s01", *repo.flags).status == 0
    (records,) = repo.results_folder.glob("*.jsonl")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}-ladder\.jsonl", records.name)
    assert [len(run.steps) for run in Results(records).runs.values()] == [24, 24, 24]


def test_several_rounds_on_a_cpu_are_sessions_of_fresh_processes(repo):
    assert repo.run("s01", "s02", "--rounds", "2").status == 0
    assert repo.steps_taken() == dict.fromkeys([S01, "peak", S02, AGAIN], [STEPS, STEPS])


def test_the_memory_variables_are_set_for_all_rows_but_plain(repo):
    assert repo.run("plain", "s01", "s02").status == 0
    variables = {}
    for header in repo.lines("header"):
        variables[header["name"]] = {name: header["variables"][name] for name in MEMORY_VARIABLES}
    assert variables.pop("plain") == dict.fromkeys(MEMORY_VARIABLES)
    assert variables == dict.fromkeys([S01, f"{S01} again", S02], MEMORY_VARIABLES)
    assert [line["stage"] for line in repo.lines("header") if line["name"] == "plain"] == [S01]
    assert f"s01 without {', '.join(MEMORY_VARIABLES)}" in repo.page.read_text()


def test_flags_of_the_stages_go_to_all_rows(repo):
    flags = "--seed 7 --lr 1.2e-3 --accum 6 --amp-dtype float16 --no-compile"
    repo.run(S01, S02, S03, *flags.split())
    given = {"batch_size": 4, "seq_len": 64, "seed": 7, "lr": 1.2e-3, "accum": 6}
    given |= {"amp_dtype": "float16", "compile": False, "data": str(repo.corpus), "steps": STEPS}
    headers = repo.lines("header")
    assert [header["name"] for header in headers] == [S01, S02, AGAIN, S03]
    for header in headers:
        assert given.items() <= header["settings"].items()


def test_a_failure_costs_its_own_row_and_exit_status_1(repo):
    repo.plan(**{S03: {"do": "crash", "at": 5}})
    ended = repo.run()
    assert ended.status == 1
    assert ended.out.count("RuntimeError: boom") == 1
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS]) | {S03: [5]}


@pytest.mark.parametrize("at", [1, STEPS - 1])
def test_a_control_that_fails_costs_no_row_but_the_page_knows_no_noise_until_a_resume(repo, at):
    repo.plan(**{AGAIN: {"do": "crash", "at": at}})
    ended = repo.run()
    assert ended.status == 1
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS]) | {AGAIN: [at]}
    assert f"Noise: unknown, since {AGAIN} failed: RuntimeError: boom" in ended.out
    repo.plan()
    ended = repo.resume()
    assert ended.status == 0
    assert "Noise: unknown" not in ended.out


def test_a_probe_that_fails_costs_no_row(repo):
    repo.plan(peak={"do": "crash", "at": 1})
    assert repo.run().status == 0
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS]) | {"peak": [1]}


@pytest.mark.parametrize("at_once", [4, 5])
def test_rows_that_memory_does_not_hold_at_once_share_a_session_with_what_they_are_compared_with(repo, at_once):
    repo.at_once = at_once
    assert repo.run().status == 0
    assert len(repo.steps_taken()[S01]) == 6 - at_once
    for pair in [(S02, S01), (S03, S02), (S03, S01), (AGAIN, S02), (S03, "peak")]:
        assert len(set(repo.results().samples(pair[0])) & set(repo.results().samples(pair[1]))) >= COUNTED


def test_where_memory_holds_too_few_for_a_comparison_the_bench_ends_and_says_so(repo):
    repo.at_once = 2
    ended = repo.run()
    assert ended.status == 1
    assert "there is no memory for another process" in ended.err


# The ladder on a GPU


def test_on_a_gpu_one_runs_after_the_other_the_probe_first_and_each_round_the_other_way(repo, gpu):
    repo.at_once = 1
    assert repo.run(S01, S02, S03, "--rounds", "2").status == 0
    order = list(dict.fromkeys((line["session"], line["name"]) for line in repo.lines("step")))
    assert order[:5] == [(0, "peak"), (0, S01), (0, S02), (0, AGAIN), (0, S03)]
    assert order[5:] == [(1, "peak"), (1, S03), (1, AGAIN), (1, S02), (1, S01)]
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS, STEPS])
    assert repo.lines("header")[0]["variables"]["MALLOC_MMAP_MAX_"] is None


def test_on_a_gpu_a_row_counts_20_steps_and_six_seconds_of_them_at_most_160(repo, gpu):
    repo.plan(**{S01: {"dt": 1}, S02: {"dt": 0.125}, AGAIN: {"dt": 0.125}, S03: {"dt": 0.01}})
    assert repo.command(S01, S02, S03, *repo.flags, "--out", "x").status == 0
    assert repo.counted_steps() == {"peak": 20, S01: 20, S02: 48, AGAIN: 48, S03: 160}
    assert {header["settings"]["steps"] for header in repo.lines("header")} == {164}  # a schedule is planned by it


def test_on_a_gpu_a_failure_costs_its_own_runs_and_a_resume_repeats_them_alone(repo, gpu):
    repo.plan(**{S03: {"do": "crash", "at": 5}})
    assert repo.run(S01, S02, S03, "--rounds", "2").status == 1
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS, STEPS]) | {S03: [5, 5]}
    before = repo.records.read_bytes()
    repo.plan()
    assert repo.resume().status == 0
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS, STEPS])
    assert {line["name"] for line in read(repo.records)[before.count(b"\n") :]} == {S03}


@pytest.mark.parametrize("row", ["row 1 of 5", "row 3 of 5"])
def test_on_a_gpu_an_interrupted_run_is_repeated_by_a_resume(repo, gpu, row):
    repo.when(row, lambda: repo.when(AT_THE_FIRST_STEP, interrupt))
    assert repo.run().status == 130
    assert repo.resume().status == 0
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS])


# Ends that nobody planned, and --resume


@pytest.mark.parametrize("moment", [WHILE_STARTING, AT_THE_FIRST_STEP, AT_THE_LAST_STEP])
def test_ctrl_c_leaves_a_record_that_a_resume_completes_to_the_very_step(repo, moment):
    repo.when(moment, interrupt)
    ended = repo.run()
    assert ended.status == 130
    assert "continue with: python bench.py --resume x\n" in ended.err
    assert ended.out == repo.page.read_text() + "\n"
    before = repo.records.read_bytes()
    ended = repo.resume()
    assert ended.status == 0
    assert "not finished" not in ended.out
    assert repo.records.read_bytes().startswith(before)
    assert repo.counted_steps() == dict.fromkeys(EVERYONE, COUNTED)


def test_a_killed_bench_leaves_no_process_and_a_record_that_a_resume_completes(repo):
    command = [sys.executable, "bench.py", S01, S02, S03, *repo.flags, "--steps", str(STEPS), "--out", "x"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # as many threads as this process has, which resumes
    with subprocess.Popen(command, cwd=repo.folder, env=env, stderr=subprocess.PIPE, text=True) as child:
        for line in child.stderr:
            if line.startswith(f"{S03}: start"):
                break
        child.kill()
    assert all_have_ended(repo.folder.parent / "lock")
    before = repo.records.read_bytes()
    repo.records.write_bytes(before + b'{"kind": "step", "sess')  # as a kill in the middle of a line leaves it
    assert repo.command("--render", "x").status == 1
    assert repo.resume().status == 0
    assert repo.records.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    counted = repo.counted_steps()
    assert min(counted.values()) == COUNTED
    assert max(counted.values()) <= COUNTED + 1  # the kill may have come in the middle of a turn


def test_a_full_disk_is_one_line_and_the_bench_continues(repo):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (repo.records.stat().st_size + 50, limits[1]))

    repo.when(AT_THE_FIRST_STEP, fill_the_disk)
    try:
        ended = repo.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.status == 2
    last_line = ended.err.splitlines()[-1]
    assert last_line.startswith("error: results/x.jsonl: ")
    assert last_line.endswith("continue with: python bench.py --resume x")
    assert len(repo.records.read_bytes().split(b"\n")[-1]) == 50
    assert repo.resume().status == 0
    assert repo.counted_steps() == dict.fromkeys(EVERYONE, COUNTED)


def test_a_row_that_failed_is_measured_again_with_what_it_is_compared_with(repo):
    repo.plan(**{S02: {"do": "crash", "at": 1}})
    assert repo.run().status == 1
    assert repo.results().compare(S03, S02) is None
    repo.plan()
    assert repo.resume().status == 0
    for pair in [(S02, S01), (S03, S02), (AGAIN, S02)]:
        assert repo.results().compare(*pair) is not None


def test_a_row_that_failed_after_its_last_step_is_measured_again(repo):
    repo.plan(**{S02: {"do": "crash", "at": "end"}})
    assert repo.run().status == 1
    repo.plan()
    assert repo.resume().status == 0
    assert repo.results().error(S02) is None


def test_a_resume_of_what_is_complete_measures_nothing(repo):
    repo.run()
    before = repo.records.read_bytes()
    assert repo.resume().status == 0
    assert repo.records.read_bytes() == before


@pytest.fixture
def interrupted(repo):
    """A Repository whose bench was interrupted at its first counted step."""
    repo.when(AT_THE_FIRST_STEP, interrupt)
    assert repo.run().status == 130
    return repo


def assert_resume_is_refused(repo, key):
    """--resume refuses in one line, because of this key, and touches nothing."""
    before = repo.records.read_bytes()
    ended = repo.resume()
    assert ended.status == 2
    assert f"error: --resume x: {key} was " in ended.err
    assert ended.err.count("\n") == 1
    assert repo.records.read_bytes() == before


@pytest.mark.parametrize(
    "file", ["bench.py", "data.py", "model.py", f"stages/{S02}.py", "stages/harness/log.py", "stages/harness/probe.py"]
)
def test_resume_refuses_other_code(interrupted, file):
    path = interrupted.folder / file
    path.write_text(path.read_text() + "pass\n")
    assert_resume_is_refused(interrupted, file if S02 in file else path.name)


def test_resume_refuses_another_machine(interrupted, monkeypatch):
    environment = machine.environment(torch.device("cpu")) | {"torch": "1.0"}
    monkeypatch.setattr(machine, "environment", lambda device: environment)
    assert_resume_is_refused(interrupted, "torch")


def test_resume_refuses_another_corpus(interrupted, monkeypatch):
    load_tokens = bench.load_tokens
    monkeypatch.setattr(bench, "load_tokens", lambda source: replace(load_tokens(source), tokenizer="bytes"))
    assert_resume_is_refused(interrupted, "corpus")


def test_a_bench_that_runs_can_not_be_resumed_beside_it(repo):
    others = []
    repo.when(AT_THE_FIRST_STEP, lambda: others.append(repo.resume()))
    assert repo.run().status == 0
    assert others[0].status == 2
    assert "results/x.jsonl is being written by another bench" in others[0].err
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS])


# The page


def test_render_draws_the_page_again_and_runs_nothing(repo):
    ended = repo.run()
    records = repo.records.read_bytes()
    repo.page.unlink()
    drawn = repo.command("--render", "x")
    assert (drawn.status, drawn.out) == (0, ended.out)
    assert repo.page.read_text() + "\n" == ended.out
    assert repo.records.read_bytes() == records


def test_readme_gets_its_table_when_the_bench_is_complete(repo):
    repo.readme.write_text(f"before\n{readme.BEGIN}\n{readme.END}\nafter\n")
    repo.when(AT_THE_FIRST_STEP, interrupt)
    before = repo.readme.read_text()
    assert repo.run(S01, S02, S03, "--readme").status == 130
    assert repo.readme.read_text() == before
    assert repo.resume().status == 0
    after = repo.readme.read_text()
    assert after.startswith("before\n") and after.endswith("after\n")
    assert f"(stages/{S03}.py)" in after


# The modes


def test_amp_runs_one_stage_in_three_dtypes(repo):
    with open(repo.folder / "stages" / f"{S03}.py", "a") as fake:
        fake.write("# reads args.amp_dtype\n")  # by which the bench knows that it has dtypes to compare
    assert repo.run("amp", "s03").status == 0
    dtypes = {line["name"]: (line["stage"], line["settings"]["amp_dtype"]) for line in repo.lines("header")}
    assert dtypes.pop("float16 again") == (S03, "float16")
    assert dtypes == {name: (S03, name) for name in ("float32", "float16", "bfloat16")}


def batches_tried(repo):
    """The batch sizes of the mode `limit`, in the order in which they were tried."""
    return [line["settings"]["batch_size"] for line in repo.lines("header")]


@needs_linux
@pytest.mark.parametrize("steps, taken", [(WARMUP + 1, WARMUP + 1), (24, WARMUP + 3)])
def test_limit_doubles_the_batch_and_bisects_by_runs_of_a_few_steps(repo, steps, taken):
    repo.plan(**{S02: {"largest_batch": 11}})
    ended = repo.run("limit", "s02", steps=steps)
    assert ended.status == 0
    assert batches_tried(repo) == [1, 2, 4, 8, 16, 12, 10, 11]
    assert repo.results().largest_batch(S02) == 11
    assert len(repo.results().runs[11, S02].steps) == taken
    assert "B 12: out of memory at batch size 12" in ended.out


@needs_linux
def test_limit_of_what_never_fits_is_exit_status_1(repo):
    repo.plan(**{S02: {"largest_batch": 0}})
    assert repo.run("limit", "s02").status == 1
    assert batches_tried(repo) == [1]


@needs_linux
def test_limit_that_was_interrupted_tries_that_batch_again_and_no_other_twice(repo):
    repo.plan(**{S02: {"largest_batch": 11}})
    repo.when("a batch of 12 does not fit", lambda: repo.when(AT_THE_FIRST_STEP, interrupt))
    assert repo.run("limit", "s02").status == 130
    assert repo.resume().status == 0
    assert batches_tried(repo) == [1, 2, 4, 8, 16, 12, 10, 10, 11]
    assert repo.results().largest_batch(S02) == 11


@needs_linux
@pytest.mark.parametrize(
    "budget, status, stopped_by", [("0.1", 1, "B 1: no room for 200 MB"), ("0.4", 0, "B 2: out of memory")]
)
def test_the_memory_budget_of_limit_holds_a_process_on_a_cpu(repo, budget, status, stopped_by):
    repo.plan(**{S02: {"do": "take 200 MB", "at": 1, "largest_batch": 1}})
    ended = repo.run("limit", "s02", "--memory-budget", budget)
    assert ended.status == status
    assert stopped_by in ended.out


def test_loss_trains_each_stage_at_each_rate_with_each_seed_once_and_a_resume_repeats_none(repo):
    repo.when("seed 2 of 2", interrupt)
    words = ("loss", "s01", "s02", "--lr", "6e-4", "3e-4", "--seeds", "2", "--seed", "7")
    assert repo.run(*words).status == 130
    assert len(repo.lines("summary")) == 4  # all of the first seed
    before = repo.records.read_bytes()
    assert repo.resume().status == 0
    assert repo.records.read_bytes().startswith(before)
    runs = []
    for header in repo.lines("header"):
        runs.append((header["session"], header["stage"], header["settings"]["lr"], header["settings"]["seed"]))
    expected = [(seed, stage, rate, 7 + seed) for seed in (0, 1) for stage in (S01, S02) for rate in (3e-4, 6e-4)]
    assert sorted(runs) == expected
    assert [line["eval"] for line in repo.lines("summary")] == [0.007] * 4 + [0.008] * 4
    assert repo.lines("step") == []  # hundreds of them, of which the page shows nothing


def test_loss_that_continues_trains_what_has_no_held_out_loss(repo):
    repo.plan(**{f"{S02} lr 6e-4": {"do": "crash", "at": "end"}})
    words = ("loss", "s01", "s02", "--lr", "6e-4", "--seeds", "2")
    assert repo.run(*words).status == 1
    before = repo.records.read_bytes()
    repo.plan()
    assert repo.resume().status == 0
    again = read(repo.records)[before.count(b"\n") :]
    assert {line["name"] for line in again} == {f"{S02} lr 6e-4"}
    assert len(again) == 4  # a header and a summary of each seed


@pytest.mark.parametrize("at_once", [1, 2])
def test_on_a_cpu_as_many_losses_are_taken_at_a_time_as_there_are_cores(repo, monkeypatch, at_once):
    monkeypatch.setattr(machine, "cores", lambda: at_once)
    alive = []
    repo.when("2 runs to come", lambda: repo.when(AT_THE_FIRST_STEP, lambda: alive.append(len(repo.live))))
    assert repo.run("loss", "s01", "s02", "--lr", "6e-4", "--seeds", "1").status == 0
    assert alive == [at_once]


# A script of the reader's own, and the real ones

OWN_SCRIPT = '''"""A line, and no GPT."""

from harness import StepLog, parse_args

import torch

args = parse_args(__doc__)
print('{"kind": "error"}')  # as anyone may print
model = torch.nn.Linear(1, 1)
log = StepLog(args, model)
for step in range(args.steps):
    log.step(model(torch.ones(1)).sum())
log.finish(model)
'''


def test_a_script_from_any_folder_is_a_row_below_the_real_stages(repo, tmp_path, monkeypatch):
    shutil.copy(ROOT / "stages" / "harness" / "probe.py", repo.folder / "stages" / "harness" / "probe.py")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.py").write_text(OWN_SCRIPT)
    monkeypatch.chdir(tmp_path / "elsewhere")
    ended = repo.run("mine.py", "s05", "--size", "tiny", "--no-compile", "--amp-dtype", "float32", steps=WARMUP + 1)
    assert ended.status == 0
    assert list(repo.results().rows) == ["s05_flash", "mine"]
    rows = ["s05_flash", "peak", "mine", "mine again"]
    assert repo.steps_taken() == dict.fromkeys(rows, [WARMUP + 1])
    assert "| mine | A line, and no GPT |" in ended.out
    assert repo.results().peak_share("s05_flash") > 0
