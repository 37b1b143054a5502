"""The bench: its command line, what it measures in which order, and what is left when it or a row fails."""

from harness import ladder, machine
from harness.bench import workers
from harness.bench.results import Results
from harness.figures import WARMUP

import json
import re
import shutil
import subprocess
import sys

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
import bench
bench.ROOT = Path({folder!r})
ladder.FOLDER = bench.ROOT / "stages"
bench.main(sys.argv[1:])
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
        shutil.copy(FAKE_STAGE, folder / "stages" / f"{stage.name}.py")
    shutil.copy(FAKE_STAGE, folder / "stages" / "harness" / "bench" / "probe.py")
    (folder / "ids.bin").write_bytes(bytes(20_000))
    lock = tmp_path / "lock"
    lock.touch()
    repo = Repository(folder, monkeypatch, capsys)

    class NamedWorker(workers.Worker):
        """A worker whose fake knows of which row and round it is."""

        def __init__(self, row, results, number):
            repo.live.append(row.name)
            repo.most_alive = max(repo.most_alive, len(repo.live))
            monkeypatch.setenv("FAKE_ROW", row.name)
            monkeypatch.setenv("FAKE_ROUND", str(number))
            super().__init__(row, results, number)

        def stop(self):
            repo.live.remove(self.row.name)
            super().stop()

    monkeypatch.setenv("FAKE_LOCK", str(lock))
    monkeypatch.setattr(bench, "ROOT", folder)
    monkeypatch.setattr(ladder, "FOLDER", folder / "stages")
    monkeypatch.setattr(workers, "Worker", NamedWorker)
    monkeypatch.setattr(workers, "PATIENCE", 60)
    monkeypatch.setattr(workers, "PAUSE", 0)
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(machine, "free_memory", lambda: 10**15 if len(repo.live) < repo.at_once else 0)
    yield repo
    assert all_have_ended(lock)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a card, as far as the bench looks at it."""
    environment = machine.environment(torch.device("cpu")) | {"device": "cuda"}
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(machine, "total_memory", lambda device: 80e9)
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
        (["s01", "s05 'x"], "No closing quotation"),
        (["s01", "--data", "short.bin"], "90 tokens"),
        (["s01", "--out", "old"], "results/old is there already"),
        (["s01", "--out", "page"], "results/page is there already"),
        (["--render", "old"], "old.jsonl is no record of a bench of this version"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(repo, monkeypatch, words, message):
    monkeypatch.chdir(repo.folder)
    (repo.folder / "results").mkdir()
    files = {
        "short.bin": bytes(200),
        "results/old.jsonl": b'{"kind": "bench", "rows": []}\n{}\n',
        "results/page.md": b"",
    }
    for name, content in files.items():
        (repo.folder / name).write_bytes(content)
    ended = repo.command(*words)
    assert (ended.status, ended.out) == (2, "")
    assert re.fullmatch(f"error: .*{message}.*\n", ended.err)
    assert sorted(path.name for path in repo.records.parent.iterdir()) == ["old.jsonl", "page.md"]


# On a CPU


def test_on_a_cpu_all_are_alive_at_once_and_a_table_is_drawn(repo):
    repo.plan(s03={"dt": 0.0625})
    ended = repo.run("s01", "s02", "s03", "--seed=7", "--no-compile")
    assert ended.status == 0
    assert repo.most_alive == len(EVERYONE)
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS])
    assert re.search(r"^s03 .* 16,000 +2\.00 ± 0\.00 +2\.00 +0\.02$", ended.out, re.MULTILINE)
    assert repo.page.read_text().startswith(f"# A bench on {machine.device_name(torch.device('cpu'))}\n")
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
    assert re.search(r"2 of 3 are warm, about \d+ s left in this round\n", ended.err)
    assert re.search(r"turn 5 of 20, about \d+ s left in this round\nrow .*\ns01 .* 8,000 ", ended.err)


def test_a_cpu_takes_as_many_rounds_as_it_is_asked_for(repo):
    assert repo.run("--rounds=2").status == 0
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS, STEPS])


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
    assert "memory holds 3 of 5 processes at once, so they run one after the other, in 3 rounds" in ended.err
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
    repo.plan(s03={"do": "crash", "at": 5, "round": 1})
    assert repo.run("--rounds=2").status == 1


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


def test_a_killed_bench_leaves_no_process_and_a_record_that_can_be_drawn(repo):
    repo.plan(s03={"do": "kill the bench", "at": WARMUP})
    script = BENCH.format(root=str(ROOT), folder=str(repo.folder))
    words = ["s01", "s02", "s03", *repo.flags, f"--steps={STEPS}", "--out=x"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True)
    assert done.returncode == -9
    with repo.records.open("a") as record:
        record.write('{"kind": "step", "rou')  # as a kill in the middle of a line leaves it
    ended = repo.command("--render", "x")
    assert ended.status == 0
    assert re.search(r"^s01 .* 8,000 ", ended.out, re.MULTILINE)


def test_render_draws_the_page_again_and_measures_nothing(repo):
    ended = repo.run()
    records, drawn = repo.records.read_bytes(), repo.page.read_text()
    repo.page.unlink()
    again = repo.command("--render", "x")
    assert (again.status, again.out) == (0, ended.out)
    assert repo.page.read_text() == drawn
    assert repo.records.read_bytes() == records


# Scripts of the reader's own, in real processes

OWN_SCRIPT = """
print("half a line ", end="")
from harness import StepLog, parse_args
import torch

args = parse_args("My own.")
print('{"kind": "summary"}', flush=True)  # as anyone may print
net = torch.nn.Linear(1, 1)
log = StepLog(args, net, tokens_per_step=128)
for step in range(args.steps):
    log.start()
    loss = net(torch.ones(1)).sum()
    log.step(loss, step=9, peak=0.5, round=7)  # names that the record has, too
log.finish()
"""
# put in place of "log = ": a config as nanoGPT's, which has another block_size
GPT = "net.config = type('Config', (), dict(vocab_size=300, block_size=999, n_layer=1, n_head=1, n_embd=32))\nlog = "
LOGGER = "class Logger:\n    write = flush = lambda *words: None\nimport sys\nsys.stdout = Logger()\n"


def test_scripts_of_ones_own_are_rows_and_one_that_is_wrong_says_why(repo, tmp_path, monkeypatch):
    scripts = {
        "few": OWN_SCRIPT.replace("range(args.steps)", "range(args.steps - 1)"),
        "many": OWN_SCRIPT.replace("range(args.steps)", "range(args.steps + 1)"),
        "two_logs": OWN_SCRIPT.replace("log = ", "first_log = StepLog(args, net, tokens_per_step=1)\nlog = "),
        "no_start": OWN_SCRIPT.replace("    log.start()\n", ""),
        "no_tokens": OWN_SCRIPT.replace("tokens_per_step=128", "tokens_per_step=0"),
        "no_finish": OWN_SCRIPT.replace("log.finish()", ""),
        "third_step": OWN_SCRIPT.replace("    loss = ", "    loss = 1 / (2 - step) * "),
        "no_memory": OWN_SCRIPT.replace("net = ", "raise torch.OutOfMemoryError('CUDA out of memory')\nnet = "),
        "syntax": "x = (1,",
        "a_gpt": OWN_SCRIPT.replace("log = ", GPT),
        "no_stdout": LOGGER + OWN_SCRIPT.replace("log.step(loss", "log.step(loss.item()"),
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(ladder, "FOLDER", ROOT / "stages")  # where the harness is
    monkeypatch.chdir(tmp_path)
    flags = ("--size=tiny", "--no-compile", "--amp-dtype=float32", "--seq-len=64")
    ended = repo.run("s05", *(f"{name}.py" for name in scripts), *flags, steps=WARMUP + 1)
    assert ended.status == 1
    results = Results.load(repo.records)
    errors = {row.title: results.error(row) for row in results.table_rows}
    assert {title: error["message"] for title, error in errors.items() if error} == {
        "few": "error: the loop ended after 4 of 5 steps: let it run over range(args.steps)",
        "many": "error: the loop goes on after --steps 5: let it run over range(args.steps)",
        "two_logs": "error: the script has two StepLogs: let one log take all steps",
        "no_start": "error: log.step() without log.start(): call that at the top of the loop",
        "no_tokens": "error: tokens_per_step is 0: pass 1 or more",
        "no_finish": "ended without log.finish()",
        "third_step": "ZeroDivisionError: division by zero",
        "no_memory": "OutOfMemoryError: CUDA out of memory",
        "syntax": "SyntaxError: '(' was never closed",
    }
    assert [title for title, error in errors.items() if error and error["out_of_memory"]] == ["no_memory"]
    assert "loss = 1 / (2 - step)" in errors["third_step"]["traceback"]
    assert "loss = 1 / (2 - step)" in ended.err
    a_gpt, no_stdout = results.rows["a_gpt.py"], results.rows["no_stdout.py"]
    assert results.compare(a_gpt, results.rows["s05"]) is not None
    assert results.compare(no_stdout, a_gpt) is None  # its tokens are another thing
    assert re.search(r"^no_stdout +no_stdout.py .* – +– ", ended.out, re.MULTILINE)
