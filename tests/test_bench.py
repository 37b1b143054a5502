"""The bench: its command line, what it measures in which order, and what is left when it or a row fails."""

from harness import ladder, machine
from harness.bench import rounds, rows
from harness.bench.results import Results
from harness.figures import WARMUP

import json
import re
import signal
import sys
import tempfile

import pytest
import torch
from conftest import ROOT, Ended, lines_of, python

import bench

FAKE_WATCH = ROOT / "tests" / "fixtures" / "fake_watch.py"
EVERYONE = ["s01", "s02", "s02 again", "s03"]
STEPS = WARMUP + 2
# a bench of the fakes in a process of its own
BENCH = """
import sys
from pathlib import Path
import bench
from harness import ladder
from harness.bench import rounds, rows
bench.ROOT = ladder.ROOT = rows.ROOT = rounds.ROOT = Path({folder!r})
sys.exit(bench.main(sys.argv[1:]))
"""


class Repository:
    """A folder with stages that are fakes, for which the bench runs in this process."""

    def __init__(self, folder, monkeypatch, capsys):
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.records = folder / "results" / "x.jsonl"
        self.page = folder / "results" / "x.md"
        self.flags = ["--device", "cpu", "--data", str(folder / "ids.bin")]

    def plan(self, **plans):
        """Say what the fakes do, by the names of their rows; those without a plan do nothing amiss."""
        self.monkeypatch.setenv("FAKE_PLANS", json.dumps(plans))

    def command(self, *words, status=0):
        """Return the Ended of `python bench.py WORDS`. status: how it must end."""
        self.capsys.readouterr()
        try:
            ended_with = bench.main(list(words))
        except SystemExit as end:
            ended_with = end.code
        ended = Ended(ended_with, *self.capsys.readouterr())
        assert ended.status == status, ended.err
        return ended

    def run(self, *rows, flags=(), status=0):
        """Return the Ended of a bench named x, of three fakes where no rows are given. status: how it must end."""
        rows = rows or ("s01", "s02", "s03")
        return self.command(*rows, *self.flags, *flags, f"--steps={STEPS}", "--out=x", status=status)

    def lines(self, kind):
        """Return the lines of one kind in the record."""
        return [line for line in lines_of(self.records) if line["kind"] == kind]

    def steps_taken(self):
        """Return {row: [steps that each of its processes took]}."""
        results = Results.load(self.records)
        return {row.name: [len(run.steps) for run in results.runs_of(row.name)] for row in results.rows.values()}


@pytest.fixture
def repo(fakes, tmp_path, monkeypatch, capsys):
    """A Repository, in a folder with a blank in its name."""
    folder = tmp_path / "a folder"
    (folder / "stages" / "harness" / "bench").mkdir(parents=True)
    (folder / "results").mkdir()
    for stage in ladder.STAGES:
        (folder / "stages" / f"{stage.name}.py").touch()
    (folder / "stages" / "watch.py").symlink_to(FAKE_WATCH)
    (folder / "stages" / "harness" / "bench" / "probe.py").symlink_to(FAKE_WATCH)
    (folder / "ids.bin").write_bytes(bytes(20_000))

    def run_named_row(row, results, round_number, run_row=rounds.run_row):
        """Run a row whose fake knows of which row and round it is."""
        monkeypatch.setenv("FAKE_ROW", row.name)
        monkeypatch.setenv("FAKE_ROUND", str(round_number))
        run_row(row, results, round_number)

    for room in (bench, ladder, rows, rounds):
        monkeypatch.setattr(room, "ROOT", folder)
    monkeypatch.setattr(rounds, "run_row", run_named_row)
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("cpu"))
    return Repository(folder, monkeypatch, capsys)


# The command line


@pytest.mark.parametrize(
    "words, message",
    [
        (["s01", "--steps", "4"], "--steps 4: the first 4 steps are warm-up"),
        (["s01", "s05 --save w.pt"], "--save is for a stage that you start by hand"),
        (["--seq-len", "64", "s01"], "s01 is no flag of a stage: pass rows first"),
        (["s01", "s05 --hidden 128"], "--hidden is no flag of a stage"),
        (["mine.py", "--batch-size", "4"], "--batch-size is for stages, and no row is one"),
        (["s01", "--data", "short.bin"], "90 tokens"),
        (["s01", "--data=ids.bin", "--out=old"], "results/old.jsonl: File exists; pass another --out"),
        (["--render", "old.md"], "results/old.jsonl is no record of this .* rows took their steps in turn"),
        (["s01", "--data=ids.bin", "--out=page"], "results/page.md is there already"),
        (["--render", "gone"], "results/gone.jsonl: No such file or directory; pass the NAME of a bench that ran"),
        (["--render", "old", "--out", "x"], "--render runs nothing: pass no rows and no other flags"),
        (["--out", "../x"], "'../x': pass a name"),
        (["s01 'a"], "No closing quotation"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(repo, monkeypatch, words, message):
    monkeypatch.chdir(repo.folder)
    (repo.folder / "mine.py").touch()
    (repo.folder / "short.bin").write_bytes(bytes(200))
    (repo.folder / "results" / "old.jsonl").write_text('{"kind": "bench", "in_turn": true}\n')
    (repo.folder / "results" / "page.md").touch()
    ended = repo.command(*words, status=2)
    assert ended.out == ""
    assert re.fullmatch(f"error: .*{message}.*\n", ended.err)
    assert sorted(path.name for path in repo.records.parent.iterdir()) == ["old.jsonl", "page.md"]


def test_a_value_of_a_flag_may_be_called_as_a_row_is(repo):
    args = bench.parse_command(["s01", "--data", "s01"])
    assert ([row.name for row in args.rows], args.flags) == (["s01", "s01 again"], ["--data", "s01"])


# Rounds


def test_all_rows_run_in_three_rounds_there_and_back_on_the_flags_of_all(repo):
    repo.plan(s03={"dt": 0.0625})
    ended = repo.run(flags=("--seed=7", "--no-compile"))
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS] * 3)
    started = [line["name"] for line in repo.lines("start")]
    assert started == EVERYONE + EVERYONE[::-1] + EVERYONE
    assert ended.out.count("tok/sec") == 3  # the short table after each round
    assert ended.err.count("s03 has ended: 16,000 tok/sec, 2.00 x s02; round ") == 3
    assert "; round 3 of 3, about 0 s left in all" in ended.err
    assert re.search(r"^s03 +16,000 +2\.00 ± 0\.00 +2\.00 +0\.02 ", ended.out, re.MULTILINE)
    assert repo.page.read_text().startswith(f"# x: a bench on {machine.device_name(torch.device('cpu'))}\n")
    for header in repo.lines("header"):
        assert {*repo.flags, "--seed=7", "--no-compile"} <= set(header["argv"])


def test_without_flags_a_row_counts_six_seconds_in_each_of_three_rounds(repo):
    repo.command("s01", *repo.flags)
    [repo.records] = repo.records.parent.glob("*.jsonl")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}\.jsonl", repo.records.name)
    assert repo.steps_taken() == dict.fromkeys(["s01", "s01 again"], [WARMUP + 48] * 3)
    [line] = repo.lines("bench")
    assert (line["warmup"], line["steps"], line["seconds"], line["rounds"]) == (WARMUP, WARMUP + 160, 6, 3)


def test_rows_try_no_download_that_the_bench_could_not_do(repo):
    repo.flags = ["--device", "cpu"]  # and no test has a network
    ended = repo.run("s01")
    assert "taking Python's documentation instead" in ended.err
    for header in repo.lines("header"):
        assert " --data docs" in " ".join(header["argv"])


@pytest.mark.parametrize(
    "row, do, at, status",
    [("s01", "crash", 0, 1), ("s03", "crash", 5, 1), ("s03", "be killed", 5, 0), ("probe", "crash", "start", 0)],
)
def test_a_failure_costs_its_own_row_and_exit_status_1_where_memory_was_not_short(repo, row, do, at, status):
    repo.plan(**{row: {"do": do, "at": at}})
    ended = repo.run(status=status, flags=("--rounds=1",))
    assert f"{row} failed: " in ended.err
    steps = dict.fromkeys(EVERYONE, [STEPS])
    assert repo.steps_taken() == (steps if row == "probe" else steps | {row: [at]})


def test_a_card_has_no_plain_row(a_card):
    args = bench.parse_command([])
    args.text = None
    line = bench.new_bench(args, ["--seed", "5"])
    assert line["command"] == "python bench.py --seed 5"
    assert "plain" not in [row["name"] for row in line["rows"]]


def test_ctrl_c_in_the_second_round_shows_what_was_measured(repo):
    repo.plan(**{"s02 again": {"do": "interrupt the bench", "at": 5, "round": 1}})
    ended = repo.run(status=130)
    assert repo.steps_taken() == {"s01": [6], "s02": [6], "s02 again": [6, 5], "s03": [6, 6]}
    assert ended.out.count("tok/sec") == 2
    assert "| 1 of 3 rounds" in repo.page.read_text() and "| 2 of 3 rounds" in repo.page.read_text()


# Ends that nobody planned, and --render


def test_ctrl_c_before_the_first_step_leaves_a_page_all_the_same(repo):
    repo.plan(probe={"do": "interrupt the bench", "at": "start"})
    repo.run(status=130)
    assert "No row got as far as its first step." in repo.page.read_text()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_bench_that_is_ended_leaves_no_process_and_a_record_that_can_be_drawn(repo, how):
    repo.plan(s03={"do": "interrupt the bench", "at": WARMUP, "signal": how})
    script = BENCH.format(folder=str(repo.folder))
    with tempfile.TemporaryDirectory() as folder:  # where a kill leaves records of rows
        done = python("-c", script, "s01", "s02", "s03", *repo.flags, f"--steps={STEPS}", "--out=x", TMPDIR=folder)
    assert repo.page.exists() == (how == signal.SIGTERM)
    if how == signal.SIGKILL:
        with repo.records.open("a") as record:
            record.write('{"kind": "step", "rou')  # as a kill in the middle of a line leaves it
    else:
        assert done.status == 128 + how
    assert re.search(r"^s01 .* 8,000 ", repo.command("--render", "x").out, re.MULTILINE)


# Scripts of the reader's own, in real processes

OWN_SCRIPT = """
import torch
from model import net  # from a file of its own, as the ladder has one

optimizer = torch.optim.AdamW(net.parameters())
print('{"kind": "summary"}', flush=True)  # as anyone may print
for step in range(50):
    net(torch.rand(4, 16)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def own_folder(repo, tmp_path, monkeypatch):
    """The folder that the bench runs in, for scripts."""
    monkeypatch.setattr(rows, "ROOT", ROOT)
    monkeypatch.chdir(tmp_path)
    repo.flags = ["--device", "cpu"]
    return tmp_path


def test_scripts_of_ones_own_are_rows_as_they_are_and_take_a_technique_from_outside(repo, own_folder):
    (own_folder / "train.py").write_text(OWN_SCRIPT)
    (own_folder / "model.py").write_text("import torch\nnet = torch.nn.Linear(16, 16)\n")
    repo.run("train.py", "+fused train.py", flags=("--seed=4", "--rounds=1"))
    assert repo.steps_taken() == dict.fromkeys(["train.py", "train.py again", "+fused train.py"], [STEPS])
    assert [line["fused"] for line in repo.lines("techniques")] == [False, False, True]
    settings = repo.lines("header")[0]["settings"]
    assert (settings["batch_size"], settings["seed"]) == (4, 4)


def test_a_climb_in_a_python_without_the_scripts_modules_ends_with_its_first_row(repo, own_folder):
    (own_folder / "train.py").write_text("import lightning_or_so")
    ended = repo.command("--climb", "train.py", "--device=cpu", "--out=x", status=2)
    last_line = ended.err.splitlines()[-1]
    assert "failed before its first step: ModuleNotFoundError: No module named 'lightning_or_so'" in last_line
    assert f"in {sys.executable}; pass " in last_line and "PY=python" in last_line
    assert [line["name"] for line in repo.lines("start")] == ["plain"]
