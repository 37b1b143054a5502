"""The bench: its command line, what it measures in which order, and what is left when it or a row fails."""

from harness import ladder
from harness.bench import rows
from harness.bench.results import Results
from harness.steps import WARMUP

import json
import os
import re
import signal
from collections import Counter

import pytest
from conftest import FAKE_WATCH, ROOT, Ended, lines_of, python
from fixtures.records import A100, CPU, RATES

import bench

EVERYONE = ["s01", "s02", "s02 again", "s03"]
STEPS = WARMUP + 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# what the probe prints on a CPU that has no 16-bit units
PROBED = {"environment": CPU, "card": None, "rates": RATES, "text": "a text", "flags": ["--device", "cpu"]}
PROBED |= {"abilities": {"can_tf32": False, "amp_dtype": "float32", "compile_problem": None}}


class Repository:
    """A folder whose stages are fakes. The bench runs on it in this process."""

    def __init__(self, folder, capsys):
        self.capsys = capsys
        self.records = folder / "results" / "x.jsonl"
        self.page = folder / "results" / "x.md"
        self.flags = ["--device", "cpu", "--data", "ids.bin"]

    def plan(self, **plans):
        """Say what the fakes do, by the names of their rows: see fake_watch.py."""
        os.environ["FAKE_PLANS"] = json.dumps(plans)

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
        """Return the Ended of a bench named x, of three fakes if no rows are given. status: how it must end."""
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
def repo(fakes, monkeypatch, capsys):
    """Return a Repository with the stages, a script mine.py and a fake of the probe. The test runs in its folder."""
    for path in [*(stage.path for stage in ladder.STAGES), fakes / "mine.py"]:
        path.touch()
    (fakes / "stages" / "harness" / "bench").mkdir(parents=True)
    (fakes / "stages" / "harness" / "bench" / "probe.py").symlink_to(FAKE_WATCH)
    monkeypatch.chdir(fakes)
    command = rows.Row.command
    starts = Counter()

    def command_of_named_row(row, *arguments):
        """Return the command of a row, and tell its fake by the environment which row and which round it is."""
        os.environ |= {"FAKE_ROW": row.name, "FAKE_ROUND": str(starts[row.name])}
        starts[row.name] += 1
        return command(row, *arguments)

    os.environ["FAKE_PROBE"] = json.dumps(PROBED)
    monkeypatch.setattr(bench, "ROOT", fakes)
    monkeypatch.setattr(rows.Row, "command", command_of_named_row)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield Repository(fakes, capsys)
    for number, handler in handlers.items():  # which bench.main() has replaced
        signal.signal(number, handler)


# The command line


@pytest.mark.parametrize(
    "words, message",
    [
        (["s01", "--steps", "5"], "--steps 5: 4 are warm-up"),
        (["mine.py", "--batch-size", "4"], "no row takes --batch-size, since none is a stage"),
        (["s01", "--out=old"], "results/old: File exists: pass another --out"),
        (["--render", "old.md"], "results/old.jsonl is not a record of this version of the bench"),
        (["--render", "gone"], "results/gone.jsonl: No such file or directory; pass the NAME of a bench that ran"),
        (["--out", "a/b"], "'a/b': pass a name"),
        (["--out", ".."], "'..': pass a name"),
        (["s01 'a"], "No closing quotation"),
        (["s01", "--render", "old"], "--render draws the page of a bench that ran, and takes nothing else"),
        (["--render=old", "--out=x"], "--render draws the page of a bench that ran, and takes nothing else"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(repo, words, message):
    repo.records.parent.mkdir()
    (repo.records.parent / "old.jsonl").write_text('{"kind": "bench", "in_turn": true}\n')
    ended = repo.command(*words, status=2)
    assert ended.out == ""
    assert re.fullmatch(f"error: .*{message}.*\n", ended.err)
    assert sorted(path.name for path in repo.records.parent.iterdir()) == ["old.jsonl"]


def test_a_probe_that_ends_with_a_line_or_by_a_signal_ends_the_bench(repo):
    repo.plan(probe={"do": "refuse", "at": "start"})
    assert repo.run(status=1).err == ""  # the probe itself says why
    repo.plan(probe={"do": "be killed", "at": "start"})
    assert repo.run(status=2).err == "error: the probe of the machine was killed by signal 9\n"
    assert not repo.records.exists()


def test_a_value_of_a_flag_may_be_called_as_a_row_is():
    assert bench.parse_command(["--climb", "s01", "--batch-size", "4"]).has_stages
    task = bench.parse_command(["s01", "--data", "s01"])
    assert ([row.name for row in task.rows], task.stage_flags) == (["s01"], ["--data", "s01"])


# Rounds


def test_rows_take_turns_in_three_rounds_there_and_back_on_the_flags_of_all(repo):
    """In a round, the turns go there and back, too."""
    repo.plan(s03={"dt": 0.0625})
    ended = repo.run(flags=("--seed=7", "--no-compile"))
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS] * 3)
    started = [line["name"] for line in repo.lines("start")]
    assert started == EVERYONE + EVERYONE[::-1] + EVERYONE
    turns = [line["name"] for line in repo.lines("step") if line["round"] == 1 and line["turn"] is not None]
    assert turns == EVERYONE[::-1] + EVERYONE
    assert ended.out.count("tok/sec") == 3  # the short table after each round
    assert ended.err.count("s03 has warmed up: 16,000 tok/sec") == 3
    assert ended.err.count(f"the {STEPS - WARMUP} turns are over") == 3
    assert re.search(r"^s03 +16,000 +2\.00 ± 0\.00 +2\.00 +0\.02 ", ended.out, re.MULTILINE)
    assert repo.page.read_text().startswith("# x: a bench on A CPU\n")
    for seen in repo.lines("seen"):
        assert {*repo.flags, "--seed", "7", "--no-compile"} <= set(seen["argv"])


def test_rows_of_a_cpu_keep_their_memory_see_no_card_and_do_not_spin_while_they_wait(repo):
    os.environ |= {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "9", "KMP_BLOCKTIME": "9", "OF_THE_READER": "9"}
    os.environ["MALLOC_MMAP_MAX_"] = "9"  # a row has the bench's own
    repo.run("s01", flags=("--rounds=1",))
    expected = rows.CPU_MEMORY | {"CUDA_VISIBLE_DEVICES": "", "OF_THE_READER": "9"}
    for seen in repo.lines("seen"):
        assert expected.items() <= seen["environment"].items()
        assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & seen["environment"].keys()


def test_rows_that_can_take_no_turns_run_one_after_the_other(repo):
    """s02 loads its data ahead."""
    repo.plan(s02={"loaders": 1})
    ended = repo.run()
    assert ended.err.count("rows run one after the other") == 1
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS] * 3)
    assert "since the workers of s02 load its data ahead" in repo.page.read_text()
    assert ended.err.count("s03 has ended") == 3


def test_without_flags_a_stage_has_4_steps_of_warm_up_and_takes_7_turns(repo):
    repo.command("s01", *repo.flags)
    [repo.records] = repo.records.parent.glob("*.jsonl")
    assert repo.steps_taken() == dict.fromkeys(["s01", "s01 again"], [11] * 3)
    [line] = repo.lines("bench")
    figures = ("warmup", "warmup_of_plain", "steps", "turns", "rounds", "loss_step")
    assert [line[name] for name in figures] == [4, 20, 27, 7, 3, 10]


@pytest.mark.parametrize(
    "row, do, at, status",
    [
        ("s01", "crash", 0, 1),  # between what it saw and its first step
        ("s03", "crash", 5, 1),
        ("s03", "be killed", 5, 0),
    ],
)
def test_a_failure_costs_its_own_row_and_exit_status_1_if_memory_was_not_short(repo, row, do, at, status):
    repo.plan(**{row: {"do": do, "at": at}})
    ended = repo.run(status=status, flags=("--rounds=1",))
    assert f"{row} failed: " in ended.err
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS]) | {row: [at]}


def test_a_script_that_ends_before_its_first_step_fails_once(repo):
    repo.flags = []
    repo.plan(plain={"do": "refuse", "at": "start"})
    ended = repo.run("--climb=mine.py", status=1)
    assert [line["name"] for line in repo.lines("start")] == ["plain"]
    assert ended.err.count("failed: exit status 1") == ended.out.count("failed: exit status 1") == 1
    assert "mine.py: not started, since plain failed" in ended.out
    assert "all rows have failed, so the bench ends here" in ended.err and "turns are over" not in ended.err


def test_an_error_of_ours_costs_a_page_alone_and_is_shown_whole(repo, monkeypatch):
    monkeypatch.setattr(bench.rounds.page, "page", lambda table, name: 1 / 0)
    ended = repo.run("s01", flags=("--rounds=1",))
    assert "Traceback" in ended.err
    assert "ZeroDivisionError: division by zero\n\nresults/x.md was not written" in ended.err
    assert not repo.page.with_suffix(".svg").exists()  # which would belong to another page


def test_rows_may_use_all_cores_though_openmp_binds_the_bench_to_one():
    """Importing torch binds it, and main() undoes that before it reads the command line."""
    code = "import os; before = os.sched_getaffinity(0); import bench; from harness import machine; "
    code += "bench.parse_command = lambda argv: exit(before != os.sched_getaffinity(0)); "
    code += "print(machine.AFFINITY == before); bench.main([])"
    ended = python("-c", code, OMP_PROC_BIND="true")
    assert (ended.status, ended.out) == (0, "True\n"), ended.err


def test_a_card_hides_the_others_from_scripts():
    task = bench.parse_command(["--device", "cuda:1"])
    line = bench.new_bench(task, PROBED | {"environment": A100, "card": 1}, ["--seed", "5"])
    assert (line["command"], line["flags"][-1]) == ("python bench.py --seed 5", "cpu")
    assert (line["turns"], line["warmup"], line["steps"], line["loss_step"]) == (0, 4, 164, 10)
    assert line["variables"] == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize("how", SIGNALS)
def test_ctrl_c_in_the_second_round_shows_what_was_measured(repo, how):
    repo.plan(**{"s02 again": {"do": "interrupt the bench", "at": 5, "round": 1, "signal": how}})
    signal.signal(how, signal.SIG_DFL)  # nohup ignores SIGHUP, and a shell's background job SIGINT
    ended = repo.run(status=128 + how)
    assert [steps[0] for steps in repo.steps_taken().values()] == [6] * 4
    assert ended.out.count("tok/sec") == 2
    assert "| 1 of 3 rounds" in repo.page.read_text()


# Ends that nobody planned, and --render


def test_a_record_whose_last_line_was_cut_off_by_a_kill_can_be_drawn(repo):
    repo.run(flags=("--rounds=1",))
    with repo.records.open("a") as record:
        record.write('{"kind": "step", "rou')
    assert re.search(r"^s01 .* 8,000 ", repo.command("--render", "x").out, re.MULTILINE)


# Scripts of the reader's own, in real processes

OWN_SCRIPT = """
import torch
from model import net  # from a file of its own, as the ladder has one

optimizer = torch.optim.AdamW(net.parameters())
print('{"kind": "summary"}', flush=True)  # as anyone may print
for step in range(9999):
    net(torch.rand(4, 16)).square().mean().backward()
    optimizer.step()
"""


def test_scripts_of_ones_own_are_rows_as_they_are_and_take_a_technique_from_outside(repo, tmp_path, monkeypatch):
    """The name of this one is no UTF-8."""
    script = os.fsdecode(b"tr\xe9.py")
    (tmp_path / script).write_text(OWN_SCRIPT)
    (tmp_path / "model.py").write_text("import torch\nnet = torch.nn.Linear(16, 16)\n")
    monkeypatch.setattr(rows, "ROOT", ROOT)
    monkeypatch.chdir(tmp_path)
    repo.flags = ["--device", "cpu"]
    repo.run(script, f"+fused {script} --x={script}", flags=("--seed=4", "--rounds=1"))
    assert list(repo.steps_taken()) == [script, f"{script} again", f"+fused {script} --x={script}"]
    assert min(min(steps) for steps in repo.steps_taken().values()) > STEPS  # a turn has many, since they are short
    seen = {line["name"]: (line["fused"], line["batch_size"]) for line in repo.lines("seen")}
    assert list(seen.values()) == [(False, 4), (False, 4), (True, 4)]
    assert repo.lines("bench")[0]["seed"] == 4
    assert r"`+fused tr\udce9.py --x=tr\udce9.py`" in repo.page.read_text("utf-8")
