"""What the tests share: a clean environment, runs of stages, and pieces of a stage's source."""

import ast
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "stages"), str(ROOT)]  # as for a stage, from whatever folder pytest was started in

os.environ["LADDER_OFFLINE"] = "1"  # before data is imported here, and for every child: no test downloads anything
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)  # these tests are one process, whatever started them
for name in ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "PY", "ARGS"):
    os.environ.pop(name, None)  # what make test was given is not for the make commands of the tests

from harness import results

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for a shell's background job, whose children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

STAGES = {path.stem[:3]: path for path in sorted((ROOT / "stages").glob("s[0-9][0-9]_*.py"))}

# the smallest run that has a step after the warm-up
SMALL = ("--size", "tiny", "--device", "cpu", "--seq-len", "32", "--batch-size", "2", "--accum", "4", "--steps", "5")
SMALL += ("--no-compile",)
FLOAT32 = (*SMALL, "--amp-dtype", "float32")

TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


@dataclass
class Ended:
    """A stage that has run: its exit status, what it printed, and the results.Run of its record."""

    status: int
    out: str
    err: str
    run: results.Run = field(default_factory=results.Run)
    graphs: int = 0  # that torch.compile traced, where a backend was asked for
    breaks: dict = field(default_factory=dict)
    facts: dict = field(default_factory=dict)  # see Watch.facts() in watch.py, where the run was watched

    def figures(self, name):
        """The figure of this name at each step."""
        return [step[name] for step in self.run.steps]


def definitions(stage, *names, **given):
    """What a stage's own source binds these names to, as a dict; `given` are the names which that source uses."""
    scope = dict(given)
    for statement in ast.parse(STAGES[stage].read_text("utf-8")).body:
        if names_bound_by(statement) & set(names):
            exec(compile(ast.Module([statement], []), str(STAGES[stage]), "exec"), scope)
    return {name: scope[name] for name in names}


def names_bound_by(statement):
    """The names that an assignment or a function definition binds."""
    if isinstance(statement, ast.FunctionDef):
        return {statement.name}
    bound = set()
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            bound |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
    return bound


@contextlib.contextmanager
def process(command, cwd, env, stdin=subprocess.DEVNULL):
    """A child in a process group of its own, of which nothing is left afterwards. Its output is text in pipes."""
    child = subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


class Stages:
    """Runs stages on the byte-level offline corpus, two at a time.

    A run in a fork of a server that has imported torch takes a fifth of the time of a fresh process. Fresh ones are for
    the tests in which the process is the point: signals, torchrun, a closed stdout.
    """

    def __init__(self, folder):
        self.folder = folder
        self.pool = ThreadPoolExecutor(2)
        self.idle_servers = queue.SimpleQueue()
        self.servers = []
        self.starting = threading.Lock()
        self.shared = {}
        # its own temporary folder and no TIKTOKEN_CACHE_DIR: nothing of this machine's caches is used, so that every
        # machine runs the same tokens
        self.env = dict(os.environ)
        for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            self.env.pop(name, None)
        self.env |= {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}

    def start(self, stage, flags, options=()):
        """Queue a run that tests share, in a fork; its Future. options: those of fork(), such as {"watch": True}."""
        options = dict(options)
        key = (stage, flags, tuple(options.items()))
        if key not in self.shared:
            self.shared[key] = self.pool.submit(self.fork, stage, *flags, **options)
        return self.shared[key]

    def __call__(self, stage, *flags, **options):
        """The Ended of a run that tests share, each set of flags once in a session."""
        return self.start(stage, flags, options).result()

    def fork(self, stage, *flags, folder=None, **options):
        """The Ended of a run of one's own, in a fork. options: those of run_script()."""
        record = self.new_file("record")
        ended = self.run_script(STAGES[stage], [*flags, "--record", record], folder or self.folder, **options)
        ended.run = self.run_in(record)
        return ended

    def run_script(
        self, script, flags, folder, backend=None, accelerator=None, watch=False, ranks=None, stdin="", **env
    ):
        """The Ended of `python SCRIPT FLAGS` in a folder, in a fork; without its record.

        backend: of torch.compile, such as "eager". accelerator: what torch is to find here, such as "cuda".
        watch: whether to note what the stage asks of torch, as Ended.facts. ranks: of how many it is to be rank 0, all
        others being pretended. stdin: the text that stands there.
        """
        out, err = self.new_file("out"), self.new_file("err")
        typed = self.new_file("in")
        typed.write_text(stdin)
        request = {
            "script": str(script),
            "flags": [str(flag) for flag in flags],
            "folder": str(folder),
            "env": self.env | env,
            "stdin": str(typed),
            "out": str(out),
            "err": str(err),
            "backend": backend,
            "accelerator": accelerator,
            "watch": watch,
            "ranks": ranks,
        }
        answer = self.ask_server(request)
        return Ended(out=out.read_text(), err=err.read_text(), **answer)

    def fresh(self, stage, *flags, launch=(), folder=None, **env):
        """The Ended of a run in a process of its own, `python [launch] stages/STAGE.py FLAGS`."""
        record = self.new_file("record")
        command = [sys.executable, *launch, STAGES[stage], *flags, "--record", record]
        with process(command, folder or self.folder, self.env | env) as child:
            out, err = child.communicate(timeout=600)
        return Ended(child.returncode, out, err, self.run_in(record))

    def new_file(self, kind):
        """The path of a file that is not there yet."""
        return self.folder / f"{kind}-{os.urandom(8).hex()}"

    def run_in(self, record):
        """The results.Run of a record; an empty one where there is no such file."""
        if not record.exists():
            return results.Run()
        return results.run_of(results.read(record))

    def ask_server(self, request):
        """A server's answer to a request."""
        server = self.idle_server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline())
        self.idle_servers.put(server)
        return answer

    def idle_server(self):
        """A fork server that has nothing to do. Two are started; whoever comes third waits for one of them."""
        with self.starting:
            if self.idle_servers.empty() and len(self.servers) < 2:
                command = [sys.executable, str(ROOT / "tests" / "fork_server.py")]
                server = subprocess.Popen(
                    command,
                    env=self.env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
                self.servers.append(server)
                return server
        return self.idle_servers.get()

    def close(self):
        """End the servers and what they run."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for server in self.servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.communicate()


@pytest.fixture(scope="session")
def stages(tmp_path_factory):
    """The one Stages of a process of pytest."""
    stages = Stages(tmp_path_factory.mktemp("stages"))
    yield stages
    stages.close()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Compute on one thread: tensors are small here, and stages run beside the tests."""
    import torch  # here, since the process of pytest that only hands tests to others needs none

    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def shared_runs(stages, request):
    """Start what a test module lists as RUNS with its first test, to be ready when another asks for it."""
    for run in getattr(request.module, "RUNS", ()):  # (stage, flags), or with options for fork()
        stages.start(*run)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache folder, not there yet, in place of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def timer(monkeypatch):
    """Takes the place of rates.seconds_of(): what it times took `answer` seconds. Notes how many calls it timed."""
    from harness import rates  # not above: it imports torch, and most tests do without

    timer = SimpleNamespace(answer=0.1, repeats=[], running=False)

    def seconds_of(repeats, device, work, *arguments, **options):
        timer.repeats.append(repeats)
        timer.running = True
        for _ in range(repeats):
            work(*arguments, **options)
        timer.running = False
        return timer.answer

    monkeypatch.setattr(rates, "seconds_of", seconds_of)
    return timer
