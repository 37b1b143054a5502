"""Techniques that are added to a script from outside: they are in force where they should be."""

from harness.watch.added import Added

import json

import pytest
import torch
from conftest import can_compile
from fixtures.forks import watch_in_a_fork
from fixtures.loops import Loop

SETTING = """ids = torch.arange(36).view(4, 9) % 50
model, held = [nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)) for part in range(2)]
optimizer = torch.optim.AdamW(p for p in model.parameters())  # a generator
"""
STEP = """with torch.no_grad():
    evaluated = held.eval()(ids)  # an evaluation is no training
hidden = model(ids[:, :-1])
scores = hidden @ torch.ones(50, 50)  # outside of the model
loss = F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())
loss.backward()
after = torch.ones(2, 2) @ torch.ones(2, 2)
optimizer.step()
made = {"evaluated": evaluated, "hidden": hidden, "scores": scores, "loss": loss, "after": after}
made["weight"] = next(model.parameters())
dtypes = {name: str(tensor.dtype) for name, tensor in made.items()}
fused, precision = optimizer.param_groups[0].get("fused"), torch.get_float32_matmul_precision()
print(json.dumps(dtypes | {"fused": fused, "precision": precision}))"""


def watch(tmp_path, *words, change=""):
    """The Ended of watch.py with these words."""
    return watch_in_a_fork(tmp_path, Loop(STEP, SETTING + change).text, *words, "--steps", "99")


def printed_last(ended):
    """What the script printed of its last step, a dict."""
    return json.loads([line for line in ended.out.splitlines() if line.startswith("{")][-1])


@pytest.mark.parametrize("name, dtype", [("+bf16", "bfloat16"), ("+fp16", "float16")])
def test_autocast_is_in_force_from_the_first_forward_until_backward_and_not_in_evaluation(tmp_path, name, dtype):
    ended = watch(tmp_path, name)
    printed = printed_last(ended)
    assert [printed[name] for name in ("hidden", "scores")] == 2 * [f"torch.{dtype}"]
    assert [printed[name] for name in ("evaluated", "loss", "after", "weight")] == 4 * ["torch.float32"]
    [seen, *_] = ended.of_kind("seen")
    assert seen["autocast"] == dtype and seen["fused"] is False
    assert ("losses are not those of a training" in ended.out) == (dtype == "float16")


def test_tf32_and_fused_are_set_where_the_script_chose_nothing(tmp_path):
    ended = watch(tmp_path, "+tf32", "+fused")
    printed = printed_last(ended)
    assert printed["fused"] is True and printed["precision"] == "high"
    [seen, *_] = ended.of_kind("seen")
    assert seen["tf32"] and seen["fused"]
    assert "+fused had no effect" not in ended.out


DDP = """torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(model)"""


@can_compile
def test_compile_compiles_the_module_that_is_trained_inside_of_ddp(tmp_path):
    ended = watch(tmp_path, "+compile", change=DDP)
    assert ended.of_kind("seen")[0]["compile"] and "had no effect" not in ended.out
    assert sum(ended.figures("graphs")) == 1


CHOOSES_OTHERWISE = "the script chooses otherwise, its parameters have no such kernel, or it changes nothing here"


@pytest.mark.parametrize(
    "optimizer, reason",
    [
        ("RMSprop(model.parameters())", "PyTorch has no fused kernel for RMSprop"),
        ("AdamW(model.parameters(), fused=False)", CHOOSES_OTHERWISE),
        ("SGD(model.parameters())\nmodel[0].sparse = True", "PyTorch has no fused kernel for sparse gradients"),
    ],
)
def test_what_can_not_be_added_says_so(tmp_path, optimizer, reason):
    change = f"optimizer = torch.optim.{optimizer}\ntorch.set_float32_matmul_precision('highest')"
    ended = watch(tmp_path, "+fused", "+tf32", change=change)
    assert f"+fused had no effect: {reason}\n" in ended.out
    has_units = ended.of_kind("seen")[0]["can_tf32"]
    reason_of_tf32 = CHOOSES_OTHERWISE if has_units else "this device has no TF32 units"
    assert f"+tf32 had no effect: {reason_of_tf32}\n" in ended.out


def test_an_update_is_not_fused_where_a_checkpoint_has_its_steps_on_another_device():
    """A fused kernel of a card would read the memory of the CPU."""
    for step, fused in ((torch.ones(()), None), (torch.ones((), device="meta"), True)):
        parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
        optimizer = torch.optim.AdamW([parameter])
        optimizer.state[parameter]["step"] = step
        Added(["fused"]).before_first_update(optimizer)
        assert optimizer.param_groups[0]["fused"] is fused
