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
sys.path[:0] = [str(ROOT / "stages"), str(ROOT)]  # as for a stage, from whatever folder pytest was started in

OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_MAKE = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "PY", "ARGS")
for name in OF_TORCHRUN + OF_MAKE:
    os.environ.pop(name, None)  # these tests are one process, whatever started them
os.environ["OMP_NUM_THREADS"] = "1"  # the models are tiny, and make test starts two processes
os.environ["GIT_CONFIG_GLOBAL"] = os.devnull  # a user's own git may color diffs and sign tags

from harness import machine, meters
from harness.bench import row_process
from harness.bench.results import Results
from harness.bench.row_process import STEPS_OF_A_START, RowProcess
from harness.steps import WARMUP

import tiktoken
import torch
import torch.distributed as dist
from fixtures.fake_card import FakeCard
from fixtures.fake_watch import all_have_ended
from torch.nn import functional as F

WATCH = ROOT / "stages" / "watch.py"
FAKE_WATCH = ROOT / "tests" / "fixtures" / "fake_watch.py"
STAGE_FILES = {path.stem[:3]: path for path in sorted((ROOT / "stages").glob("s[0-9][0-9]_*.py"))}

can_compile = pytest.mark.skipif(
    machine.compile_problem(torch.device("cpu")) is not None, reason="torch.compile can't run here"
)

# the smallest run that has a step after the warm-up, on a text that needs no network
SMALL = ("--size", "tiny", "--device", "cpu", "--seq-len", "24", "--batch-size", "2", "--accum", "4", "--data", "docs")
SMALL = (*SMALL, "--steps", str(WARMUP + 1))
FLOAT32 = (*SMALL, "--no-compile", "--amp-dtype", "float32")


@dataclass
class Ended:
    """A script that has run: its exit status, what it printed, the lines of its record, and what it bound to names."""

    status: int
    out: str
    err: str
    lines: list = field(default_factory=list)
    scope: dict = field(default_factory=dict)

    def of_kind(self, kind):
        """The lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def summary(self):
        return self.of_kind("summary")[0]

    def figures(self, name):
        """The figure of this name at each step."""
        return [step[name] for step in self.of_kind("step")]


def run_script(script, *flags, folder=None):
    """The Ended of `python SCRIPT FLAGS`, run in this process, whose arguments, variables and folder are put back."""
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
    """The Ended of a stage, "s05", run in a folder, with the steps that it printed as lines."""
    ended = run_script(STAGE_FILES[stage], *flags, folder=folder)
    assert ended.status == 0, ended.err
    ended.lines = steps_in(ended.out)
    return ended


def steps_in(out):
    """The steps that a stage printed, as lines of a record; dt in seconds, and speed in tokens per second."""
    steps = []
    for line in re.findall(r"^step (.*)$", out, re.MULTILINE):
        number, *words, dt, _, speed, _ = line.split()
        step = {"kind": "step", "step": int(number), "dt": float(dt), "speed": float(speed.replace(",", ""))}
        figures = zip(words[::2], words[1::2], strict=True)
        steps.append(step | {name: float(value) for name, value in figures})
    return steps


def lines_of(record):
    """The lines of a record, as dicts; none if there is no record."""
    if not record.exists():
        return []
    return [json.loads(line) for line in record.read_text("utf-8").splitlines()]


def definitions(stage, *names, **given):
    """What a stage's own source binds these names to, as a dict. given: values for the names that it uses, as F=F."""
    scope = dict(given)
    for statement in ast.parse(STAGE_FILES[stage].read_text("utf-8")).body:
        bound = set()
        if isinstance(statement, ast.FunctionDef):
            bound = {statement.name}
        elif isinstance(statement, ast.Assign):
            bound = {node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        if bound & set(names):
            exec(compile(ast.Module([statement], []), str(STAGE_FILES[stage]), "exec"), scope)
    return {name: scope[name] for name in names}


def attention_of(stage):
    """The function `attention` in a stage's own source."""
    return definitions(stage, "attention", math=math, torch=torch, F=F)["attention"]


def error_of(capsys, function, *arguments):
    """The line with which this call must end the program."""
    with pytest.raises(SystemExit) as ended:
        function(*arguments)
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith("error: ")
    return line


def python(*words, folder=ROOT, **env):
    """The Ended of a process `python WORDS` of its own, in a folder; env: variables beside those of this process."""
    command = [sys.executable, *(str(word) for word in words)]
    env = os.environ | env
    done = subprocess.run(command, cwd=folder, env=env, input="", capture_output=True, text=True, timeout=300)
    return Ended(done.returncode, done.stdout, done.stderr)


def run_by_the_bench(row, flags, steps):
    """The Ended of the process of a Row, by the lines that the bench keeps."""
    bench = {"kind": "bench", "rows": [asdict(row)], "warmup": WARMUP, "seed": 1337, "turns": 0}
    bench |= {"flags": ["--steps", "24", *flags], "variables": {}}
    record = io.StringIO()
    results = Results(bench, record)
    with contextlib.closing(RowProcess(row, results, 0)) as process:
        process.take(steps - STEPS_OF_A_START)
        process.let_end()
        process.wait()
    lines = [json.loads(line) for line in record.getvalue().splitlines()][2:]
    return Ended(0, "", "", lines)


@pytest.fixture(scope="session")
def stages(tmp_path_factory):
    """A function that returns the Ended of a stage; each set of flags runs once."""
    folder = tmp_path_factory.mktemp("stages")
    runs = {}

    def run_once(stage, *flags):
        if (stage, flags) not in runs:
            runs[stage, flags] = run_stage(stage, *flags, folder=folder)
            runs[stage, flags].scope.clear()  # it holds the model
        return runs[stage, flags]

    return run_once


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Let every download fail."""

    def fail(*args, **options):
        raise OSError("no network in a test")

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    monkeypatch.setattr(tiktoken, "get_encoding", fail)


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Fakes in place of stages, with little patience. None outlives its test."""
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setenv("FAKE_LOCK", str(lock))
    monkeypatch.setattr(row_process, "PATIENCE", 60)
    monkeypatch.setattr(row_process, "PATIENCE_AT_THE_END", 0.5)
    yield
    assert all_have_ended(lock)


@pytest.fixture
def card(monkeypatch):
    """A FakeCard, and its clock in place of the machine's."""
    card = FakeCard()
    monkeypatch.setattr(time, "perf_counter", card.clock)
    monkeypatch.setattr(meters, "synchronize", card.synchronize)
    return card


@pytest.fixture(autouse=True)
def own_environment(tmp_path_factory):
    """An environment that ends with the test. Its cache folder, not there yet, is in place of the user's."""
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(tmp_path_factory.mktemp("cache") / "cache")):
        yield
