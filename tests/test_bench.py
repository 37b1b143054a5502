"""The bench: its command line, what it measures in which order, and what is left when it or a row fails."""

from harness import ladder, machine
from harness.bench import rows, turns, workers
from harness.bench.results import Results
from harness.bench.table import table_of
from harness.figures import WARMUP

import contextlib
import errno
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Ended
from fixtures.fake_stage import all_have_ended

import bench

FAKE_STAGE = ROOT / "tests" / "fixtures" / "fake_stage.py"
EVERYONE = ["probe", "s01", "s02", "s02 again", "s03"]
COUNTED = 2
STEPS = WARMUP + COUNTED
# a bench of the fakes in a process of its own
BENCH = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}, {root!r} + "/stages"]
from harness import ladder
from harness.bench import rows
import bench
bench.ROOT = ladder.ROOT = rows.ROOT = Path({folder!r})
sys.exit(bench.main(sys.argv[1:]))
"""


class Repository:
    """A folder with stages that are fakes, for which the bench runs in this process.

    at_once: how many processes the machine's memory holds. live: those that are alive now. most_alive: the most so far.
    """

    def __init__(self, folder, monkeypatch, capsys):
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.records = folder / "results" / "x.jsonl"
        self.page = folder / "results" / "x.md"
        self.flags = ["--device", "cpu", "--data", str(folder / "ids.bin")]
        self.at_once = 100
        self.live = []
        self.most_alive = 0

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
        """Return the Ended of a bench named x, of three fakes where no words name something else."""
        names, flags = [word for word in words if word[:2] != "--"], [word for word in words if word[:2] == "--"]
        names = names or ["s01", "s02", "s03"]
        return self.command(*names, *flags, *self.flags, f"--steps={steps}", "--out=x")

    def lines(self, kind):
        """Return the lines of one kind in the record."""
        lines = [json.loads(line) for line in self.records.read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def steps_taken(self):
        """Return {row: [steps that each of its processes took]}."""
        results = Results.load(self.records)
        return {row.name: [len(run.steps) for run in results.runs_of(row)] for row in results.rows.values()}


@pytest.fixture
def repo(tmp_path, monkeypatch, capsys):
    """A Repository, in a folder with a blank in its name. A test leaves none of its processes."""
    folder = tmp_path / "a folder"
    (folder / "stages" / "harness" / "bench").mkdir(parents=True)
    for stage in ladder.STAGES:
        (folder / "stages" / f"{stage.name}.py").symlink_to(FAKE_STAGE)
    (folder / "stages" / "harness" / "bench" / "probe.py").symlink_to(FAKE_STAGE)
    (folder / "ids.bin").write_bytes(bytes(20_000))
    lock = tmp_path / "lock"
    lock.touch()
    repo = Repository(folder, monkeypatch, capsys)

    class NamedWorker(workers.Worker):
        """A worker whose fake knows of which row and round it is."""

        def __init__(self, row, results, number, folder):
            repo.live.append(row.name)
            repo.most_alive = max(repo.most_alive, len(repo.live))
            monkeypatch.setenv("FAKE_ROW", row.name)
            monkeypatch.setenv("FAKE_ROUND", str(number))
            super().__init__(row, results, number, folder)

        def close(self):
            super().close()
            if self.row.name in repo.live:
                repo.live.remove(self.row.name)

    monkeypatch.setenv("FAKE_LOCK", str(lock))
    for room in (bench, ladder, rows):
        monkeypatch.setattr(room, "ROOT", folder)
    monkeypatch.setattr(turns, "Worker", NamedWorker)
    monkeypatch.setattr(workers, "PATIENCE", 60)
    monkeypatch.setattr(turns, "PAUSE", 0)
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(machine, "free_memory", lambda: 10**15 if len(repo.live) < repo.at_once else 0)
    yield repo
    assert all_have_ended(lock)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a card, as far as the bench looks at it."""
    environment = machine.environment(torch.device("cpu")) | {"device": "cuda"}
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(machine, "free_memory_by_a_child", lambda device: 80e9)
    monkeypatch.setattr(machine, "native_amp_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(machine, "compile_problem", lambda device: None)
    monkeypatch.setattr(machine, "environment", lambda device: environment)


# The command line


@pytest.mark.parametrize(
    "words, message",
    [
        (["s99"], "'s99' names no stage"),
        (["s01", "--steps", "4"], "--steps 4: the first 4 steps are warm-up"),
        (["s01", "--steps=9", "s05"], "rows come before flags: put 's05' first"),
        (["s01", "--profile"], "--profile are for a stage that you start by hand"),
        (["s01", "s05 --save w.pt"], "--save, --eval and --profile are for a stage that you start by hand"),
        (["s01", "s05 --steps 9"], "put --steps behind all rows, outside of the quotes"),
        (["s01", "s05 --device cpu"], "put --device behind all rows"),
        (["s01", "--out", "a/b"], "'a/b': pass a name"),
        (["--render", "results/old"], "'results/old': pass a name"),
        (["--render", ""], "'': pass a name"),
        (["--render", "old", "--rounds", "2"], "--render runs nothing"),
        (["s01", "--render", "old"], "--render runs nothing"),
        (["--render", "old", "--seed", "5"], "--render runs nothing"),
        (["--render", "old", "--climb", "mine.py"], "--render runs nothing"),
        (["s01", "--climb", "mine.py"], "--climb makes the rows itself: leave out 's01'"),
        (["--climb", "gone.py"], "there is no gone.py"),
        (["mine.py", "--hidden", "128"], "--hidden is no flag of a stage: put a script and its own flags into quotes"),
        (["mine.py", "--batch-size", "4"], "--batch-size is for stages, and no row is one"),
        (["s01", "s05 'x"], "No closing quotation"),
        (["s01", "--data", "short.bin"], "90 tokens"),
        (["s01", "--out", "old"], "results/old is there already"),
        (["s01", "--out", "page"], "results/page is there already"),
        (["s01", "--seed", "1" * 30], "is not a whole number from 0 to"),
        (["--render", "old", "--out", "new"], "--render runs nothing"),
        (["--render", "old"], "results/old.jsonl is no record of this version of the bench"),
        (["--render", "edited.md"], "results/edited.jsonl is no record of this version of the bench"),
        (
            ["--render", "gone.jsonl"],
            "results/gone.jsonl: No such file or directory; pass the NAME of a bench that ran",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(repo, monkeypatch, words, message):
    monkeypatch.chdir(repo.folder)
    (repo.folder / "results").mkdir()
    files = {
        "mine.py": b"",
        "short.bin": bytes(200),
        "results/old.jsonl": b'{"kind": "bench", "rows": ["s01"]}\n{}\n',
        "results/edited.jsonl": b'{"kind": "bench", "rows": []}\n',
        "results/page.md": b"",
    }
    for name, content in files.items():
        (repo.folder / name).write_bytes(content)
    ended = repo.command(*words)
    assert (ended.status, ended.out) == (2, "")
    assert re.fullmatch(f"error: .*{message}.*\n", ended.err)
    assert sorted(path.name for path in repo.records.parent.iterdir()) == ["edited.jsonl", "old.jsonl", "page.md"]


# On a CPU


def test_on_a_cpu_all_are_alive_at_once_and_a_table_is_drawn(repo):
    repo.plan(s03={"dt": 0.0625})
    ended = repo.run("s01", "s02", "s03", "--seed=7", "--no-compile")
    assert ended.status == 0
    assert repo.most_alive == len(EVERYONE)
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS])
    assert re.search(r"^s03 +16,000 +2\.00 +2\.00 +0\.02 ", ended.out, re.MULTILINE)
    assert repo.page.read_text().startswith(f"# x: a bench on {machine.device_name(torch.device('cpu'))}\n")
    for header in repo.lines("header"):
        assert {*repo.flags, "--seed=7", "--no-compile"} <= set(header["argv"])
        assert header["variables"]["MALLOC_MMAP_MAX_"] == "0"
        assert header["settings"]["corpus"] == str(repo.folder / "ids.bin")  # the one that was asked for


def test_without_flags_a_cpu_counts_20_steps_in_one_round_and_tells_how_far_it_is(repo):
    ended = repo.command("s01", *repo.flags)
    [repo.records] = repo.records.parent.glob("*.jsonl")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}\.jsonl", repo.records.name)
    assert repo.steps_taken() == dict.fromkeys(["probe", "s01", "s01 again"], [24])
    [line] = repo.lines("bench")
    assert (line["warmup"], line["steps"], line["rounds"], line["in_turn"]) == (4, 24, 1, True)
    assert re.search(r"turn 5 of 20, about \d+ s left in this round\nrow .*\ns01 .* 8,000 ", ended.err)


def test_a_cpu_takes_as_many_rounds_as_it_is_asked_for(repo):
    assert repo.run("--rounds=2").status == 0
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS, STEPS])


def test_a_row_that_loads_ahead_takes_its_steps_at_once_in_three_rounds_there_and_back(repo):
    repo.plan(s01={"wait": 0.1}, s02={"wait": 0.1})
    ended = repo.run()
    assert ended.status == 0
    assert repo.steps_taken() == {"probe": [STEPS], "s01": 3 * [STEPS], "s02": 3 * [STEPS]} | {
        "s02 again": [STEPS],
        "s03": [STEPS],
    }
    started = [(line["name"], line["round"]) for line in repo.lines("start")]
    assert started[len(EVERYONE) :] == [("s02", 1), ("s01", 1), ("s01", 2), ("s02", 2)]


def test_a_first_row_that_fails_before_its_first_step_ends_a_bench_of_one_script(repo):
    repo.plan(s01={"do": "crash", "at": 0})
    ended = repo.run("s01", "s01 --lr=1")
    assert ended.status == 2
    assert (
        "error: s01_baseline failed before its first step: exit status 1; last printed: RuntimeError: boom" in ended.err
    )
    assert [line["name"] for line in repo.lines("start")] == ["probe", "s01"]
    repo.records.unlink()
    assert repo.run("s01", "s02").status == 1  # another script may do better


def test_rows_try_no_download_that_the_bench_could_not_do(repo):
    repo.flags = ["--device", "cpu"]  # and no test has a network
    ended = repo.run("s01")
    assert "taking Python's documentation instead" in ended.err
    assert {line["settings"]["corpus"] for line in repo.lines("header")} == {"docs"}


@pytest.mark.parametrize("row, do, status", [("s03", "crash", 1), ("s03", "be killed", 0), ("probe", "crash", 0)])
def test_a_failure_costs_its_own_row_and_exit_status_1_where_memory_was_not_short(repo, row, do, status):
    repo.plan(**{row: {"do": do, "at": 5}})
    ended = repo.run()
    assert ended.status == status
    assert f"{row} failed: " in ended.err
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS]) | {row: [5]}


def test_rows_that_memory_does_not_hold_at_once_run_one_after_the_other_in_three_rounds(repo):
    repo.at_once = 3
    ended = repo.run()
    assert ended.status == 0
    assert "memory holds 3 of 5 processes at once, so they run one after the other" in ended.err
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS] * 3)
    [line] = repo.lines("bench")
    assert line["in_turn"] is False
    assert {header["variables"]["MALLOC_MMAP_MAX_"] for header in repo.lines("header")} == {"0"}


# On a card


def test_on_a_card_one_runs_after_the_other_in_three_rounds_there_and_back(repo, gpu):
    ended = repo.run()
    assert ended.status == 0
    assert repo.most_alive == 1
    back = ["probe", "s03", "s02 again", "s02", "s01"]
    assert [line["name"] for line in repo.lines("start")] == EVERYONE + back + EVERYONE
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS] * 3)
    assert ended.out.count("what you type") == 3  # the short table after each round
    assert "s03: 8,000 tok/sec, 1.00 x s02; 5 of 15 runs, about " in ended.err
    assert "; 15 of 15 runs, about 0 s left\n" in ended.err
    assert not any(header["variables"]["MALLOC_MMAP_MAX_"] for header in repo.lines("header"))


def test_a_card_has_its_own_limit_of_steps_and_no_plain_row(gpu, monkeypatch):
    monkeypatch.setattr(machine, "commit", lambda folder: folder.name)
    line = bench.new_bench(bench.parse_command([]), ["--seed", "5"], in_turn=False)
    assert (line["environment"]["device"], line["steps"], line["rounds"]) == ("cuda", WARMUP + 160, 3)
    assert (line["commit"], line["command"]) == (bench.ROOT.name, "python bench.py --seed 5")
    assert "plain" not in [row["name"] for row in line["rows"]]


def test_a_failure_in_a_later_round_is_exit_status_1_too(repo, gpu):
    repo.plan(s02={"do": "crash", "at": 5, "round": 1})
    assert repo.run("s01", "s02", "--rounds=2").status == 1


def test_ctrl_c_in_the_second_round_shows_what_was_measured(repo, gpu):
    repo.plan(**{"s02 again": {"do": "interrupt the bench", "at": 5, "round": 1}})
    ended = repo.run()
    assert ended.status == 130
    assert repo.steps_taken() == {"probe": [6, 6], "s01": [6], "s02": [6], "s02 again": [6, 5], "s03": [6, 6]}
    assert ended.out.count("what you type") == 2
    assert "| 1 of 3 rounds" in repo.page.read_text() and "| 2 of 3 rounds" in repo.page.read_text()


# Ends that nobody planned, and --render


def test_ctrl_c_before_the_first_step_leaves_a_page_all_the_same(repo):
    repo.plan(probe={"do": "interrupt the bench", "at": 0})
    assert repo.run().status == 130
    assert "No row got as far as its first step." in repo.page.read_text()


@contextlib.contextmanager
def hangup_does(action):
    """Let SIGHUP have this action, whatever nohup says of these tests."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_bench_that_is_ended_in_a_turn_leaves_no_process_and_a_record_that_can_be_drawn(repo, how):
    repo.plan(s03={"do": "interrupt the bench", "at": WARMUP, "signal": how})
    script = BENCH.format(root=str(ROOT), folder=str(repo.folder))
    words = ["s01", "s02", "s03", *repo.flags, f"--steps={STEPS}", "--out=x"]
    with hangup_does(signal.SIG_DFL):
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True)
    if how == signal.SIGKILL:
        assert done.returncode == -how
        with repo.records.open("a") as record:
            record.write('{"kind": "step", "rou')  # as a kill in the middle of a line leaves it
    else:
        assert done.returncode == 128 + how
        assert repo.page.exists()
    ended = repo.command("--render", "x")
    assert ended.status == 0
    assert re.search(r"^s01 .* 8,000 ", ended.out, re.MULTILINE)


def test_a_bench_under_nohup_goes_on_after_its_terminal_has_gone(repo, monkeypatch):
    repo.plan(s03={"do": "interrupt the bench", "at": WARMUP, "signal": signal.SIGHUP, "round": 0})
    monkeypatch.setattr(workers, "PATIENCE", 1)  # the fake that sends it takes no more steps
    with hangup_does(signal.SIG_IGN):
        assert repo.run().status == 1
    assert repo.steps_taken()["s02"] == [STEPS]


@pytest.mark.parametrize("name, problem", [("y", "File exists"), (300 * "a", "File name too long")])
def test_a_record_that_cannot_be_written_is_one_line_before_anything_starts(repo, name, problem):
    if name == "y":
        (repo.folder / "results").write_text("a file")
    ended = repo.command("s01", *repo.flags, "--out", name)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == f"error: results/{name}.jsonl: {problem}; pass another --out, or mend the folder\n"


def test_without_a_temporary_folder_a_line_says_which_variable_to_set(repo, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full_disk)
    ended = repo.run()
    assert ended.status == 2
    assert ended.err.endswith("No space left on device; set TMPDIR to one that can be written\n")


def full_disk(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_the_record_and_the_page_and_no_figure(repo, monkeypatch):
    class Full:
        """A file on a full disk."""

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        write = full_disk

    monkeypatch.setattr(bench, "open_new", lambda path: path.parent.mkdir() or Full())
    monkeypatch.setattr(Path, "write_text", full_disk)
    ended = repo.run()
    assert ended.status == 0
    assert ended.err.count("the record ends here: No space left on device") == 1
    assert "results/x.md was not written: No space left on device" in ended.err
    assert re.search(r"^s03 .* 8,000 ", ended.out, re.MULTILINE)


@pytest.mark.parametrize(
    "variables, told",
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 in the environment, without RANK"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "start bench.py once"),
    ],
)
def test_a_bench_that_torchrun_starts_or_seems_to_is_one_line(repo, monkeypatch, variables, told):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ended = repo.run()
    assert (ended.status, ended.out) == (2, "") and told in ended.err


def test_render_draws_the_page_again_and_measures_nothing(repo):
    ended = repo.run()
    records, drawn = repo.records.read_bytes(), repo.page.read_text()
    repo.page.unlink()
    again = repo.command("--render", "x")
    assert (again.status, again.out) == (0, ended.out)
    assert repo.page.read_text() == drawn
    assert repo.records.read_bytes() == records


# Scripts of the reader's own, in real processes

# It has a model.py of its own, and a flag that is called as one of ours.
OWN_SCRIPT = """
import argparse, os, sys, time
import torch
from torch.nn import functional as F
from model import net

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--lr", type=float)
args = parser.parse_args()
optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr or 0.1)
ids = torch.arange(128).view(4, 32)
print('{"kind": "summary"}', flush=True)  # as anyone may print
for step in range(args.steps):
    # here
    loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NET = "import torch\nnet = torch.nn.Sequential(torch.nn.Embedding(200, 16), torch.nn.Linear(16, 200))\n"


@pytest.fixture
def own_scripts(repo, tmp_path, monkeypatch):
    """own_scripts(name="what it does in each step"): scripts in the folder that the bench runs in."""
    (repo.folder / "stages" / "watch.py").symlink_to(ROOT / "stages" / "watch.py")
    monkeypatch.chdir(tmp_path)
    repo.flags = ["--device", "cpu"]
    (tmp_path / "model.py").write_text(NET)

    def write(**lines):
        for name, line in lines.items():
            (tmp_path / f"{name}.py").write_text(OWN_SCRIPT.replace("# here", line or "pass"))

    return write


def test_scripts_of_ones_own_are_rows_as_they_are_and_one_that_fails_says_what_happened_to_it(repo, own_scripts):
    own_scripts(good=None, no_memory="if step == 1: raise torch.OutOfMemoryError('CUDA out of memory')")
    ended = repo.run("good.py --steps 50 --lr 1", "no_memory.py", "--seed=4", steps=WARMUP + 2)
    assert ended.status == 0
    good, no_memory = table_of(Results.load(repo.records)).rows
    assert no_memory.error["message"] == "OutOfMemoryError: CUDA out of memory"
    assert no_memory.error["out_of_memory"] and "in <module>" in no_memory.error["traceback"]
    assert len(good.counted) == 2
    [header] = [line for line in repo.lines("header") if line["name"] == good.row.name]
    assert (header["settings"]["batch_size"], header["settings"]["seed"]) == (4, 4)
    assert "good: has nothing of the ladder; lacks " in ended.out


def test_a_climb_in_a_python_without_the_scripts_modules_ends_with_its_first_row(repo, tmp_path, own_scripts):
    own_scripts()
    (tmp_path / "train.py").write_text("import lightning_or_so\n")
    ended = repo.command("--climb", "train.py", "--device=cpu", "--out=x")
    assert ended.status == 2
    last_line = ended.err.splitlines()[-1]
    assert "failed before its first step: ModuleNotFoundError: No module named 'lightning_or_so'" in last_line
    assert f"in {sys.executable}; pass " in last_line and "PY=python" in last_line
    assert [line["name"] for line in repo.lines("start")] == ["probe", "plain"]


def test_a_climb_adds_to_a_script_what_it_lacks_and_measures_each(repo, own_scripts, monkeypatch):
    monkeypatch.setattr(machine, "native_amp_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(machine, "compile_problem", lambda device: "no compiler")
    own_scripts(train=None)
    ended = repo.command("--climb", "train.py --lr 0.01", "--device=cpu", f"--steps={WARMUP + 2}", "--out=x")
    assert ended.status == 0, ended.err
    assert "+compile is left out: no compiler" in ended.err
    table = table_of(Results.load(repo.records))
    assert [outcome.row.title for outcome in table.rows] == ["plain", "train", "+ bf16", "+ fused"]
    assert table.reference.row.title == "plain"
    used = [outcome.techniques for outcome in table.rows]
    assert [(each["autocast"], each["fused"]) for each in used] == [
        (None, False),
        (None, False),
        ("bfloat16", False),
        ("bfloat16", True),
    ]
    losses = [outcome.loss for outcome in table.rows]
    assert losses[1] == losses[0]
    assert losses[2] == pytest.approx(losses[0], rel=0.02) and losses[2] != losses[0]
    assert losses[3] == pytest.approx(losses[2], rel=1e-3)
    assert re.search(r"^\+ fused .* AdamW\(\.\.\., fused=True\)$", ended.out, re.MULTILINE)
