"""What the tests share: a clean environment, runs of stages, and pieces of a stage's source."""

import ast
import contextlib
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "stages"), str(ROOT)]  # a stage finds its modules there

VARIABLES_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VARIABLES_OF_MAKE = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "PY", "ARGS")
for name in VARIABLES_OF_TORCHRUN + VARIABLES_OF_MAKE:
    os.environ.pop(name, None)  # whatever started the tests, a stage in one of them is a single process
os.environ["OMP_NUM_THREADS"] = "1"  # the models are tiny, and make test starts two processes
os.environ["GIT_CONFIG_GLOBAL"] = os.devnull  # the user's own settings may color what git prints

from harness import ladder, machine, meters
from harness.bench import row_process, rows
from harness.bench.results import Results
from harness.bench.row_process import STEPS_OF_A_START, RowProcess
from harness.steps import WARMUP

import tiktoken
import torch
import torch.distributed as dist
from fixtures.fake_card import FakeCard
from fixtures.fake_watch import all_have_ended
from fixtures.records import SEEN
from torch.nn import functional as F

WATCH = ROOT / "stages" / "watch.py"
FAKE_WATCH = ROOT / "tests" / "fixtures" / "fake_watch.py"
STAGE_FILES = {path.stem[:3]: path for path in sorted((ROOT / "stages").glob("s[0-9][0-9]_*.py"))}

can_compile = pytest.mark.skipif(
    machine.compile_problem(torch.device("cpu")) is not None, reason="torch.compile can't run here"
)

# the smallest run that has a step after the warm-up, on a text that needs no network
SMALL = ("--size", "tiny", "--device", "cpu", "--seq-len", "24", "--batch-size", "2", "--accum", "4", "--data", "docs")
SMALL += ("--steps", str(WARMUP + 1))
FLOAT32 = (*SMALL, "--no-compile", "--amp-dtype", "float32")


@dataclass
class Ended:
    """A script that has ended.

    status: of its exit. out, err: what it printed. lines: of its record, dicts. scope: its variables by their names.
    """

    status: int
    out: str
    err: str
    lines: list = field(default_factory=list)
    scope: dict = field(default_factory=dict)

    def of_kind(self, kind):
        """Return the lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def summary(self):
        """The last line of a run that ended well."""
        return self.of_kind("summary")[0]

    def figures(self, name):
        """Return the figure of this name at each step, a list."""
        return [step[name] for step in self.of_kind("step")]


def run_script(script, *flags, folder=None):
    """Run `python SCRIPT FLAGS` in this process, and return its Ended. folder: where it runs; None stays where we are.

    Its changes to sys.argv, to the environment and to the current folder end with it.
    """
    out, err = io.StringIO(), io.StringIO()
    status, scope = 0, {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [str(script), *(str(flag) for flag in flags)]))
        stack.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(contextlib.chdir(folder or os.getcwd()))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            scope = runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        except Exception:
            status = 1
            try:
                sys.excepthook(*sys.exc_info())
            except SystemExit as end:
                status = end.code
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            torch.set_float32_matmul_precision("highest")
    return Ended(status, out.getvalue(), err.getvalue(), scope=scope)


def run_stage(stage, *flags, folder):
    """Run a stage, as "s05", in a folder, and return its Ended. Its lines are the steps that it printed."""
    ended = run_script(STAGE_FILES[stage], *flags, folder=folder)
    assert ended.status == 0, ended.err
    ended.lines = steps_in(ended.out)
    return ended


def steps_in(out):
    """Return the steps that a stage printed, as lines of a record. dt: seconds. speed: tokens per second."""
    steps = []
    for line in re.findall(r"^step (.*)$", out, re.MULTILINE):
        number, *names_and_values, dt, _, speed, _ = line.split()  # the units are left out
        step = {"kind": "step", "step": int(number), "dt": float(dt), "speed": float(speed.replace(",", ""))}
        figures = zip(names_and_values[::2], names_and_values[1::2], strict=True)
        steps.append(step | {name: float(value) for name, value in figures})
    return steps


def lines_of(record):
    """Return the lines of a record, dicts; none if there is no record."""
    if not record.exists():
        return []
    return [json.loads(line) for line in record.read_text("utf-8").splitlines()]


def definitions(stage, *names, **scope):
    """Return {name: what the source of a stage binds it to}. The rest of the stage does not run.

    scope: values of the names that these definitions use, as F=F.
    """
    for statement in ast.parse(STAGE_FILES[stage].read_text("utf-8")).body:
        bound = set()  # the names that this statement binds
        if isinstance(statement, ast.FunctionDef):
            bound = {statement.name}
        elif isinstance(statement, ast.Assign):
            bound = {node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        if bound & set(names):
            exec(compile(ast.Module([statement], []), str(STAGE_FILES[stage]), "exec"), scope)
    return {name: scope[name] for name in names}


def attention_of(stage):
    """Return the function `attention` of a stage."""
    return definitions(stage, "attention", math=math, torch=torch, F=F)["attention"]


def error_of(capsys, function, *arguments):
    """Return the line of an error with which this call must end the program."""
    with pytest.raises(SystemExit) as ended:
        function(*arguments)
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith("error: ")
    return line


def python(*words, folder=ROOT, **env):
    """Run `python WORDS` as a process of its own, and return its Ended. env: variables beside those of this process."""
    command = [sys.executable, *(str(word) for word in words)]
    env = os.environ | env
    done = subprocess.run(command, cwd=folder, env=env, input="", capture_output=True, text=True, timeout=300)
    return Ended(done.returncode, done.stdout, done.stderr)


def run_by_the_bench(row, flags, steps):
    """Run a process of a Row, as the bench does, and return an Ended with the lines that the bench keeps of it.

    flags: for stages. steps: how many it may take.
    """
    bench = {"kind": "bench", "rows": [asdict(row)], "warmup": WARMUP, "seed": 1337, "turns": 0}
    bench |= {"flags": ["--steps", "24", *flags], "variables": {}}
    record = io.StringIO()
    results = Results(bench, record)
    with contextlib.closing(RowProcess(row, results, 0)) as process:
        process.take(steps - STEPS_OF_A_START)
        process.let_end()
        process.wait()
    _, _, *lines = [json.loads(line) for line in record.getvalue().splitlines()]  # not those of the bench and the start
    return Ended(0, "", "", lines)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Let all downloads fail: a test has no network."""

    def fail(*args, **options):
        raise OSError("no network in a test")

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    monkeypatch.setattr(tiktoken, "get_encoding", fail)


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Let the bench run a fake in place of watch.py, with little patience. Return the folder that is its repository.

    No fake may outlive the test.
    """
    folder = tmp_path / "a folder"  # with a blank in its name
    (folder / "stages").mkdir(parents=True)
    (folder / "stages" / "watch.py").symlink_to(FAKE_WATCH)
    for module in (ladder, rows):
        monkeypatch.setattr(module, "ROOT", folder)
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setenv("FAKE_LOCK", str(lock))
    monkeypatch.setenv("FAKE_SEEN", json.dumps(SEEN))
    monkeypatch.setattr(row_process, "PATIENCE", 60)
    monkeypatch.setattr(row_process, "PATIENCE_AT_THE_END", 0.5)
    yield folder
    assert all_have_ended(lock)


@pytest.fixture
def card(monkeypatch):
    """Return a FakeCard whose clock is in place of the machine's."""
    card = FakeCard()
    monkeypatch.setattr(time, "perf_counter", card.clock)
    monkeypatch.setattr(meters, "synchronize", card.synchronize)
    return card


@pytest.fixture(autouse=True)
def own_environment(tmp_path_factory):
    """Undo what a test does to the environment. Its cache is a folder that is not there yet, and not the user's."""
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(tmp_path_factory.mktemp("cache") / "cache")):
        yield
