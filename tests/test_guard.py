"""A script that is watched trains and ends as it does alone, whatever our own code does."""

import json
import os
from pathlib import Path

import pytest
from conftest import SMALL, STAGE_FILES, WATCH, python, run_script
from fixtures.forks import run_in_a_fork, watch_in_a_fork
from fixtures.loops import LEARN, Loop

# It calls whatever is noted, and ends by itself.
SETTING = """scaler = torch.amp.GradScaler("cpu")
loader = iter(DataLoader(torch.rand(32, 3), batch_size=4))
losses = []"""
STEP = """x = next(loader)
with torch.autocast("cpu"):
    loss = model(x).square().mean()
with torch.no_grad():
    model(x)
torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), 0.5)
scaler.step(optimizer)
scaler.update()
optimizer.zero_grad()
losses.append(loss.item())
if step == 7:
    json.dump(losses, open("losses.json", "w"))
    sys.exit(3)"""
TRAIN = Loop(STEP, SETTING).text

FAIL = """
import pkgutil
def fail(*args, **kwargs):
    raise ZeroDivisionError("ours")
owner, _, name = "harness.watch.{place}".rpartition(".")
setattr(pkgutil.resolve_name(owner), name, fail)
"""


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Of the script alone."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(TRAIN)
    assert run_script("train.py", folder=folder).status == 3
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.parametrize(
    "place, what",
    [
        ("watcher.Watcher.saw_forward", "its modules"),
        ("watcher.Watcher.saw_batch", "its DataLoaders"),
        ("watcher.Watcher.saw_backward", "its losses"),
        ("watcher.Watcher.saw_scale", "its GradScaler"),
        ("watcher.Watcher.saw_scaler_step", "its GradScaler"),
        ("watcher.Watcher.saw_scaler_update", "its GradScaler"),
        ("watcher.Watcher.saw_autocast", "its autocast"),
        ("watcher.Watcher.saw_clipping", "its clipping"),
        ("watcher.Watcher.saw_optimizer_begin", "its steps"),
        ("watcher.Watcher.saw_optimizer_end", "its steps"),
        ("run.find_techniques", "its steps"),
        ("run.fields_of_profile", "its operations"),
        ("run.seen_at_the_end", "its figures"),
    ],
)
def test_a_note_that_fails_is_told_once_and_the_script_goes_on(tmp_path, losses, place, what):
    ended = watch_in_a_fork(tmp_path, TRAIN, "--steps", "99", status=3, change=FAIL.format(place=place))
    assert json.loads((tmp_path / "losses.json").read_text()) == losses
    assert "no optimizer" not in ended.err
    told = [line for line in ended.err.splitlines() if "lost sight" in line]
    assert told == [f"watch.py has lost sight of {what}, and the script goes on: ZeroDivisionError: ours"]


def test_a_mark_that_fails_is_told_and_the_script_goes_on(tmp_path, losses):
    change = FAIL.format(place="profiler.StepProfiler.kind_begins")
    ended = watch_in_a_fork(tmp_path, TRAIN, "--steps", "99", status=3, change=change)
    assert json.loads((tmp_path / "losses.json").read_text()) == losses
    assert "watch.py has lost sight of its time, and the script goes on: ZeroDivisionError: ours" in ended.err


ONE_STEP = "learn(model(x).square().mean())"
INFERENCE = """with torch.inference_mode():
    frozen = nn.Linear(3, 3).requires_grad_(False)"""
LISTS = """class Net(nn.Linear):
    named_parameters = None
    def parameters(self):
        return [self.weight]
model = Net(3, 1)"""
DICTS = """class Net(nn.Linear):
    def forward(self, batch):
        return super().forward(batch["x"])
model = Net(3, 1)
batch = {"x": x}
batch["itself"] = batch"""
NAMED = """class Named(nn.Linear):
    compile = None
    def forward(self, module):
        return super().forward(module)
model = Named(3, 1)"""
PACKED = """saved = {}
def pack(x):
    saved[len(saved)] = x
    return len(saved) - 1
hooks = torch.autograd.graph.saved_tensors_hooks(pack, saved.pop)"""
SCRIPTED = """@torch.jit.script
def force(loss, x):
    return torch.autograd.grad([loss], [x])[0]
x.requires_grad_()"""
SILENT = """import builtins, threading
builtins.print = lambda *words, **options: None"""
OVERRIDDEN = """model = nn.Sequential(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.modules = model.named_modules = []"""
UNUSED = "model = nn.Sequential(nn.Linear(3, 1))\nmodel.unused = nn.LazyLinear(1)"
ON_META = "extra = nn.Parameter(torch.empty(2, device='meta'))"
ADD = "if step == 0:\n    optimizer.add_param_group({'params': [extra]})"
TRAIN_ALONE = {
    "parameters() that returns a list": Loop(ONE_STEP, LISTS),
    "an attribute called modules": Loop(ONE_STEP, OVERRIDDEN),
    "an optimizer with an empty group": Loop(
        f"{ONE_STEP}\nfrozen.step()", "frozen = torch.optim.SGD([{'params': []}])"
    ),
    "weights of inference mode": Loop("learn(model(frozen(x)).mean())", INFERENCE),
    "an argument that contains itself": Loop("learn(model(batch).mean())", DICTS),
    "a nested tensor": Loop(
        "y = model(torch.nested.nested_tensor([x, x]))\nlearn(torch.nested.to_padded_tensor(y, 0.0).sum())",
        counted=("step", 1),
    ),
    "an argument called module": Loop("learn(model(module=x).sum())", NAMED),
    "hooks on saved tensors": Loop("with hooks:\n    loss = model(x).sum() / torch.tensor(2.0)\nlearn(loss)", PACKED),
    "print() replaced, and all threads joined": Loop(
        f"if step == 0:\n    [thread.join() for thread in threading.enumerate()[1:]]\n{ONE_STEP}", SILENT
    ),
    "a lazy layer that is never called": Loop("learn(model[0](x).sum())", UNUSED),
    "a parameter on meta": Loop(f"{ONE_STEP}\n{ADD}", ON_META),
    "a module of torch.fx": Loop(ONE_STEP, "model = torch.fx.symbolic_trace(model)"),
    "a complex loss": Loop("y = model(x).sum().to(torch.complex64)\ny.backward(torch.ones_like(y))\noptimizer.step()"),
    "a gradient in TorchScript": Loop(f"force(model(x).sum(), x)\n{ONE_STEP}", SCRIPTED),
}


@pytest.mark.parametrize("name", TRAIN_ALONE)
@pytest.mark.parametrize("words", [(), ("+bf16", "+compile")])
def test_what_trains_alone_is_watched(tmp_path, name, words):
    loop = TRAIN_ALONE[name]
    ended = watch_in_a_fork(tmp_path, loop.text, "--steps", "5", *words)
    assert "lost sight" not in ended.err
    assert ended.figures("tokens") == 5 * [loop.counted[1]]


def test_a_clock_that_stands_still_is_told(tmp_path):
    ended = watch_in_a_fork(tmp_path, Loop(ONE_STEP, "time.perf_counter = lambda: 5.0").text)
    assert "lost sight of its steps, and the script goes on: ValueError: its steps take no time" in ended.err


def test_modules_may_lie_as_deep_as_python_allows(tmp_path):
    deep = "for depth in range(235):\n    model = nn.Sequential(model)"
    assert watch_in_a_fork(tmp_path, Loop(ONE_STEP, deep).text, "--steps", "5").figures("tokens") == 5 * [4]


# The end

STOPPED = """
import atexit, multiprocessing, os, subprocess, sys, time
import torch

open("lock", "w").close()
atexit.register(os.remove, "lock")
log = open("log.csv", "w")
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
worker.start()
print("children", server.pid, worker.pid)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(9):
        log.write(f"{step} ")
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
finally:
    open("checkpoint", "w").close()
"""


def test_a_script_that_is_stopped_leaves_nothing_half_done(tmp_path):
    (tmp_path / "train.py").write_text(STOPPED)
    ended = python(WATCH, "--steps", "5", "train.py", folder=tmp_path)
    assert ended.status == 0, ended.err
    assert (tmp_path / "log.csv").read_text() == "0 1 2 3 4 5 "
    assert not (tmp_path / "lock").exists()
    assert not (tmp_path / "checkpoint").exists()
    [children] = [line.split()[1:] for line in ended.out.splitlines() if line.startswith("children")]
    assert not any(is_alive(pid) for pid in children)


CLOSES = f"""if step == 3:
    import os
    os.closerange(3, 256)  # as a daemon does
    own = [open(f"own{{number}}", "w") for number in range(9)]
{ONE_STEP}"""


def test_nothing_of_ours_is_written_into_the_files_of_a_script_that_closes_all(tmp_path):
    ended = watch_in_a_fork(tmp_path, Loop(CLOSES).text, "--steps", "9")
    assert len(ended.of_kind("step")) == 9
    assert [path.read_text() for path in tmp_path.glob("own?")] == 9 * [""]


def test_all_optimizers_take_the_last_step(tmp_path):
    step = "model(x).sum().backward()\noptimizer.step()\nother.step()\nprint('whole')"
    text = Loop(step, "other = torch.optim.SGD(model.parameters(), lr=0.1)").text
    assert watch_in_a_fork(tmp_path, text, "--steps", "5").out.count("whole") == 5


def is_alive(pid):
    """Whether a process runs. One that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "end, status, told",
    [
        ("os._exit(3)", 3, "train.py ended by os._exit(3) after 6 steps"),
        ("os.execv('/bin/sh', ['sh', '-c', 'exit 4'])", 4, "train.py becomes /bin/sh by os.exec, and what that does"),
        ("os.execlp('sh', 'sh', '-c', 'exit 4')", 4, "sh by os.exec, and what that does is not watched"),
    ],
)
def test_a_script_that_leaves_its_process_says_so(tmp_path, end, status, told):
    text = Loop(f"if step == 6:\n    import os\n    {end}\n{LEARN}").text
    ended = watch_in_a_fork(tmp_path, text, status=status)
    assert told in ended.err.splitlines()[-1]
    assert "median" in ended.out


def test_a_forked_child_may_leave_by_exit(tmp_path):
    step = f"import os\nif os.fork() == 0:\n    os._exit(0)\nos.wait()\n{LEARN}"
    ended = watch_in_a_fork(tmp_path, Loop(step).text, "--steps", "5")
    assert ended.err == "train.py was stopped after 5 steps, when it began another\n"


def test_a_row_of_a_bench_that_becomes_another_program_fails(tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    text = "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', ''])\n"
    ended = watch_in_a_fork(tmp_path, text, "--gate", gate, os.getpid(), status=1)
    [error] = ended.of_kind("error")
    assert "by os.exec" in error["message"]


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("lesson.ipynb", b'{"cells": []}', "is a notebook"),
        ("train.pyc", b"\x00\x00", "is no Python script"),
        ("train.sh", b"echo hello there", "is no Python script"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    ended = run_in_a_fork(tmp_path, name)
    assert ended.status == 2
    assert f"error: {name} {told}" in ended.err


def test_in_ipython_it_ends_nothing(tmp_path):
    ended = run_in_a_fork(tmp_path, "train.py", change="import builtins\nbuiltins.get_ipython = print")
    assert ended.status == 2
    assert ended.err.startswith("error: watch.py needs a process of its own: type !python")


def test_a_stage_that_is_stopped_before_its_save_says_so(tmp_path):
    ended = run_in_a_fork(tmp_path, "--steps", "3", STAGE_FILES["s01"], *SMALL, "--save", "w.pt")
    assert ended.err.splitlines()[-1].endswith("when it began another, and before its --save: raise --steps")
