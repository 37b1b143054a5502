"""What the tests share: a clean environment, runs of stages in processes of their own, pieces of a stage's source."""

import ast
import contextlib
import os
import signal
import subprocess
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "stages"), str(ROOT)]  # as for a stage, from whatever folder pytest was started in

os.environ["LADDER_OFFLINE"] = "1"  # before data is imported here, and for every child: no test downloads anything
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)  # these tests are one process, whatever started them

from harness import report

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for a shell's background job, whose children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # tensors are small here, and stages run beside the tests

STAGES = {path.stem[:3]: path for path in sorted((ROOT / "stages").glob("s[0-9][0-9]_*.py"))}

# the smallest run that has a step after the warm-up
SMALL = ("--size", "tiny", "--device", "cpu", "--seq-len", "32", "--batch-size", "2", "--accum", "4", "--steps", "5")
SMALL += ("--no-compile",)
FLOAT32 = (*SMALL, "--amp-dtype", "float32")

Ran = namedtuple("Ran", "status out err header steps end")


def figures(run, name):
    """The figure of this name at each step of a run."""
    return [step[name] for step in run.steps]


def definitions(stage, *names, **given):
    """What a stage's own source binds these names to, as a dict; `given` are the names which that source uses."""
    scope = dict(given)
    for statement in ast.parse(STAGES[stage].read_text()).body:
        bound = {getattr(statement, "name", None)}
        if isinstance(statement, ast.Assign):
            bound = {node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        if bound & set(names):
            exec(compile(ast.Module([statement], []), str(STAGES[stage]), "exec"), scope)
    return {name: scope[name] for name in names}


@contextlib.contextmanager
def process(command, cwd, env, **more):
    """A child in a process group of its own, of which nothing is left afterwards."""
    more = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | more
    child = subprocess.Popen([str(word) for word in command], cwd=cwd, env=env, start_new_session=True, **more)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


class Stages:
    """Runs stages on the byte-level offline corpus, two at a time, each set of flags once in a session."""

    def __init__(self, folder):
        self.folder, self.pool, self.runs = folder, ThreadPoolExecutor(2), {}
        # its own temporary folder and no TIKTOKEN_CACHE_DIR: nothing of this machine's caches is found, so that
        # every machine runs the same tokens
        self.env = {k: v for k, v in os.environ.items() if k not in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR")}
        self.env |= dict(XDG_CACHE_HOME=str(folder / "cache"), TMPDIR=str(folder), OMP_NUM_THREADS="1")

    def start(self, stage, *flags, launch=()):
        """Queue `python [launch] stages/STAGE.py FLAGS`, from another folder than the repository's."""
        key = (stage, flags, tuple(launch))
        if key not in self.runs:
            self.runs[key] = self.pool.submit(self.now, stage, *flags, launch=launch)
        return self.runs[key]

    def __call__(self, stage, *flags, launch=()):
        """The Ran of a stage, once it is over."""
        return self.start(stage, *flags, launch=launch).result()

    def now(self, stage, *flags, launch=(), **env):
        """A Ran that is not shared."""
        record = self.folder / f"{stage}-{os.urandom(4).hex()}.jsonl"
        command = [sys.executable, *launch, STAGES[stage], *flags, "--record", record]
        with process(command, self.folder, self.env | env) as child:
            out, err = child.communicate(timeout=240)
        return Ran(child.returncode, out, err, *report.run_of(report.read(record) if record.exists() else []))


@pytest.fixture(scope="session")
def stages(tmp_path_factory, request):
    """The one Stages of a session. What test modules list as RUNS is started now, to be ready when it is asked for."""
    runs = Stages(tmp_path_factory.mktemp("stages"))
    for module in dict.fromkeys(item.module for item in request.session.items):
        for stage, flags, launch in getattr(module, "RUNS", ()):
            runs.start(stage, *flags, launch=launch)
    yield runs
    runs.pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache folder, not there yet, in place of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
