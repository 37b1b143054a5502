"""What a reader is told to type: it works where it is typed, and it is what + adds."""

from harness import ladder, machine
from harness.seen import Seen
from harness.watch.causes import words_on_loader
from harness.watch.naming import framework_of, name_in_script
from harness.watch.techniques import what_has_no_kernel
from harness.watch.watcher import learning_rates_of

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL, WATCH, can_compile, lines_of, python
from fixtures.forks import run_in_a_fork, watch_in_a_fork
from fixtures.loops import LEARN, Loop
from fixtures.records import SEEN
from torch import nn

CPU = torch.device("cpu")


@can_compile
@pytest.mark.parametrize(
    "model, advice",
    [
        ("model = Net(3, 3)", "model.compile()"),
        ("model = nn.Sequential(Net(3, 3), Net(3, 3))", "model = torch.compile(model)"),
        ("model = nn.TransformerEncoderLayer(8, 2, 8)\nx = torch.ones(8, 8)", "model = torch.compile(model)"),
    ],
)
def test_the_advice_to_compile_compiles(tmp_path, model, advice):
    """.compile() of PyTorch's own classes would compile nothing, without a word."""
    plain, with_advice = (Loop(LEARN, f"{model}\n{line}").text for line in ("", advice))
    out = watch_in_a_fork(tmp_path, plain).out
    assert re.search(rf"s04 {re.escape(advice)}(; the names .*)?\n", out)
    typed = watch_in_a_fork(tmp_path, with_advice)
    assert sum(typed.figures("graphs")) >= 1 and "has     compile (s04)" in typed.out
    assert watch_in_a_fork(tmp_path, plain, "+compile").figures("graphs") == typed.figures("graphs")


def frames(*modules):
    """The innermost of some frames in these modules."""
    frame = None
    for module in reversed(modules):
        frame = SimpleNamespace(f_globals={"__name__": module}, f_locals={}, f_lineno=1, f_back=frame)
        frame.f_code = SimpleNamespace(co_filename="library.py", co_flags=0)
    return frame


def test_a_framework_has_its_own_words():
    assert framework_of(sys._getframe()) is None
    assert framework_of(frames("torch.optim.adamw", "accelerate.optimizer", "transformers.trainer")) == "transformers"
    assert framework_of(frames("lightning.fabric.wrappers", "lightning.pytorch.trainer.call")) == "lightning"
    assert framework_of(frames("lightning.fabric.wrappers", "__main__")) == "fabric"


class Agent:
    """A class of the user's own, which holds what it trains."""

    def __init__(self):
        self.policy = nn.Sequential(nn.Linear(3, 3))

    def name_of_policy(self):
        return name_in_script(self.policy, sys._getframe())


def names_in_a_function(agent):
    """Return the names of three modules. An `assert` here would call locals(), in pytest's own words for a failure."""
    net = nn.Linear(3, 3)
    frame = frames("torch.optim.adamw")
    frame.f_locals["self"], frame.f_back = agent, sys._getframe()
    return [name_in_script(module, frame) for module in (net, agent.policy, nn.Linear(3, 3))]


def test_a_module_is_called_what_the_users_own_code_calls_it():
    agent = Agent()
    assert agent.name_of_policy() == "self.policy"
    assert names_in_a_function(agent) == ["net", "agent.policy", ""]


class Lazy:
    """A global of this file that raises if it is asked for anything, as settings of Django that nobody has set."""

    @property
    def __dict__(self):
        raise RuntimeError("not set yet")

    __class__ = __dict__


LAZY = Lazy()


def keep_locals(lr):
    config = locals()
    name_in_script(nn.Linear(3, 3), sys._getframe())
    return config


def test_what_a_function_keeps_of_its_locals_is_not_touched():
    assert keep_locals(lr=0.1) == {"lr": 0.1}


class Lit(nn.Module):
    """Of the user's own, as a LightningModule."""


def test_in_a_method_of_a_library_self_is_the_users_own_module():
    lit = Lit()
    lit.net, lit.parts = nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 3)])
    frame = frames("torch.optim.adamw")
    frame.f_locals["self"], frame.f_back = lit, None
    assert [name_in_script(part, frame) for part in (lit.net, lit.parts[0])] == ["self.net", "self.parts[0]"]
    frame.f_locals["self"] = nn.Sequential(lit.net)  # which the library has made
    assert name_in_script(lit.net, frame) == ""


IN_FLOAT16 = '`with torch.autocast("cuda", torch.float16):` and a `GradScaler`'
ON_A_T4 = {"device": "cuda", "amp_dtype": "float16"}
IN_A_ROW = f"{IN_FLOAT16}, without which these losses are not those of a training"  # of a climb


@pytest.mark.parametrize(
    "stage, fields, typed",
    [
        ("s10", {"optimizer": "Adam"}, "`Adam(..., fused=True)`"),
        ("s06", {"vocabulary": 5000}, "`vocab_size=5056`, a multiple of 64"),
        ("s04", {"model_name": "self.net", "can_compile_in_place": True}, "`self.net.compile()`"),
        ("s04", {"model_name": "", "can_compile_in_place": True}, "`compile()` of the module that you call"),
        ("s03", {}, '`with torch.autocast("cpu", torch.bfloat16):`'),
        ("s03", {"framework": "fabric"}, '`Fabric(precision="bf16-mixed")`'),
        ("s03", ON_A_T4, IN_FLOAT16),
        ("s03", ON_A_T4 | {"framework": "transformers"}, "`--fp16 True`"),
        ("s03", ON_A_T4 | {"autocast": "float16"}, IN_A_ROW),
    ],
)
def test_what_to_type_has_the_scripts_own_names(stage, fields, typed):
    assert ladder.stage_of(stage).what_to_type(Seen(**SEEN | fields)) == typed


class Own(torch.optim.SGD):
    """A script's own, which can't be made with fused=True."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)


def test_fused_is_advised_where_it_can_be_typed():
    parameters = [nn.Parameter(torch.ones(2))]
    optimizers = torch.optim.Adam(parameters), torch.optim.Adam(parameters, foreach=True), Own(parameters)
    assert [what_has_no_kernel(optimizer) for optimizer in optimizers] == [None, "foreach=True", "Own"]


def test_a_rate_of_any_group_is_a_schedule():
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=torch.tensor(0.5))
    before = learning_rates_of(optimizer)
    optimizer.param_groups[1]["lr"] = torch.tensor(0.25)
    assert (before, learning_rates_of(optimizer)) == ((0.5, 0.5), (0.5, 0.25))


def test_autocast_is_neither_had_nor_lacking_in_a_step_without_a_matmul():
    for autocast in (None, "bfloat16"):
        seen = Seen(**SEEN | {"autocast": autocast}, multiplies=False)
        assert not any(ladder.ADDED["bf16"] in stages for stages in ladder.has_and_lacks(seen))


def test_who_waits_for_a_loader_is_told_how_many_workers_help(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 4)
    remedies = [words_on_loader({workers: 9}, 0.5)[0].split(": ")[1] for workers in (0, 4, 8)]
    less = "do less in __getitem__"
    more = "take up to 4 workers, with persistent_workers=True"
    assert remedies == [f"{more}, or {less}", less, f"take no more workers than the 4 cores, or {less}"]


@pytest.mark.parametrize("stage", ladder.STAGES, ids=lambda stage: stage.short)
def test_a_stage_has_exactly_the_techniques_up_to_its_own(tmp_path, stage):
    """As far as a CPU can do them. Compiled are s04 and s12 alone, to save time."""
    is_compiled = stage.short in ("s04", "s12")
    if is_compiled and machine.compile_problem(CPU):
        pytest.skip("torch.compile can't run here")
    flags = SMALL if is_compiled else (*SMALL, "--no-compile")
    can_not = ["s02"]  # TF32
    if machine.native_amp_dtype(CPU) == torch.float32:
        can_not.append("s03")
    if not is_compiled:
        can_not.append("s04")
    words = ("--steps", "6", "--record", "r.jsonl", stage.path, *flags)
    ended = python(WATCH, *words, folder=tmp_path) if is_compiled else run_in_a_fork(tmp_path, *words)
    assert ended.status == 0, ended.err
    ended.lines = lines_of(tmp_path / "r.jsonl")
    has, _ = ladder.has_and_lacks(Seen.of_line(ended.of_kind("seen")[-1]))
    assert {each.short for each in has} == names_up_to(stage) - set(can_not)


def names_up_to(stage):
    """The short names of the stages that have a technique, up to this one."""
    return {each.short for each in ladder.STAGES[1 : ladder.STAGES.index(stage) + 1]}
