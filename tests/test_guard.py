"""A script that is watched trains as it does alone, whatever our own code does."""

import json

import pytest
from conftest import run_script
from fixtures.loops import Loop, watch_in_a_fork

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
        ("hooks.signature_of", "its modules"),
        ("watcher.Watcher.saw_forward", "its modules"),
        ("counting.Signature.read", "its modules"),
        ("watcher.Watcher.saw_loader", "its DataLoaders"),
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
        ("run.seen_at_the_end", "its figures"),
    ],
)
def test_a_note_that_fails_is_told_once_and_the_script_goes_on(tmp_path, losses, place, what):
    ended = watch_in_a_fork(tmp_path, TRAIN, "--steps", "99", status=3, change=FAIL.format(place=place))
    assert json.loads((tmp_path / "losses.json").read_text()) == losses
    told = [line for line in ended.err.splitlines() if "lost sight" in line]
    assert told == [f"watch.py has lost sight of {what}, and the script goes on: ZeroDivisionError: ours"]


PLAIN = "learn(model(x).square().mean())"


@pytest.mark.parametrize(
    "setting, step, counted",
    [
        ("class Net(nn.Linear):\n    def parameters(self):\n        return [self.weight]\nmodel = Net(3, 1)", PLAIN, 4),
        ("model = nn.Sequential(nn.Linear(3, 1))\nmodel.modules = ['a', 'b']", PLAIN, 4),
        ("model = nn.Linear(3, 1)\nfrozen = torch.optim.SGD([{'params': []}])", f"{PLAIN}\nfrozen.step()", 4),
        (
            "model = nn.Linear(3, 1)\nwith torch.inference_mode():\n    frozen = nn.Linear(3, 3).requires_grad_(False)",
            "learn(model(frozen(x)).mean())",
            4,
        ),
        (
            "class Net(nn.Linear):\n    def forward(self, batch):\n        return super().forward(batch['x'])\n"
            "model = Net(3, 1)\nbatch = {}\nbatch['itself'] = batch",
            "batch['x'] = x\nlearn(model(batch).mean())",
            4,
        ),
        (
            "model = nn.Linear(3, 1)",
            "y = model(torch.nested.nested_tensor([x, x]))\nlearn(torch.nested.to_padded_tensor(y, 0.0).sum())",
            1,
        ),
    ],
)
@pytest.mark.parametrize("words", [(), ("+bf16", "+compile")])
def test_what_trains_alone_is_watched(tmp_path, setting, step, counted, words):
    ended = watch_in_a_fork(tmp_path, Loop(step, setting, steps=1).text, "--steps", "9", *words)
    assert "lost sight" not in ended.err
    assert ended.figures("tokens") == 5 * [counted]
