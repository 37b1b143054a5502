"""The ladder's table against the stages' sources and lessons, and what a machine makes of a stage."""

from harness import ladder

import ast
import difflib
import itertools
import re

import pytest
from conftest import ROOT, STAGE_FILES
from fixtures.records import A100, GPT2, header

FILES = [path.stem for path in STAGE_FILES.values()]
NAMES = [stage.name for stage in ladder.STAGES]
# How many lines of code each stage adds to the one before, and how many it removes. A diff is what its reader learns.
BUDGETS = {
    "s02": (1, 0),
    "s03": (5, 2),
    "s04": (2, 0),
    "s05": (1, 7),
    "s06": (1, 1),
    "s07": (4, 2),
    "s08": (13, 2),
    "s09": (5, 1),
    "s10": (1, 1),
    "s11": (7, 3),
    "s12": (12, 3),
}


# The table against the files and the lessons


@pytest.mark.parametrize("name", FILES)
def test_every_stage_has_its_row_its_title_its_lesson_and_its_budget(name):
    assert name in NAMES, f"STAGES of stages/harness/ladder.py has no row of {name}"
    title = f'"""Stage {int(name[1:3])} · {name[4:]}: '
    assert STAGE_FILES[name[:3]].read_text("utf-8").startswith(title), f"stages/{name}.py does not begin with {title}"
    heading = "## " + name.replace("_", " · ")
    lessons = (ROOT / "stages" / "README.md").read_text("utf-8").splitlines()
    assert heading in lessons, f"stages/README.md has no lesson {heading!r}"
    has_budget = name[:3] in BUDGETS or name == FILES[0]
    assert has_budget, f"BUDGETS of tests/test_ladder.py does not say how many lines {name} adds and removes"


def test_the_table_has_the_files_in_their_order():
    assert NAMES == FILES


def test_the_stages_that_start_a_process_group_take_ranks():
    for stage in ladder.STAGES:
        assert stage.takes_ranks == ("init_process_group" in stage.path.read_text("utf-8")), stage.name


def code_lines(stage):
    """A stage's lines of code: no docstring, no blank line, no comment, no indentation."""
    text = STAGE_FILES[stage].read_text("utf-8")
    docstring = ast.parse(text).body[0]
    lines = [line.split("  #")[0].strip() for line in text.splitlines()[docstring.end_lineno :]]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("stage", BUDGETS)
def test_a_diff_has_exactly_the_lines_of_its_budget(stage):
    stage_before = [*STAGE_FILES][[*STAGE_FILES].index(stage) - 1]
    diff = list(difflib.ndiff(code_lines(stage_before), code_lines(stage)))
    added = [line for line in diff if line.startswith("+ ")]
    removed = [line for line in diff if line.startswith("- ")]
    assert (len(added), len(removed)) == BUDGETS[stage], "\n".join(added + removed)


@pytest.mark.parametrize("stage", STAGE_FILES)
def test_a_stage_asks_for_the_device_of_its_flags_and_names_none(stage):
    """On a CPU alone, autocast("cpu") is as good as autocast(device.type); on a card it would do nothing."""
    asked = "\n".join(line for line in code_lines(stage) if "init_process_group" not in line)
    assert not re.search(r"""["'](cpu|cuda|mps)""", asked)
    for device in re.findall(r"(?:autocast|GradScaler)\(([^,]*)", asked):
        assert device == "device.type"


# What a technique does on a machine


def run_of(tf32, amp_dtype, compile, sdpa, accum=4, world_size=1, fallbacks=None, device="cuda", cuda="13.0"):
    """What effect_of() is told of a run of gpt2."""
    settings = dict(amp_dtype=amp_dtype, compile=compile, accum=accum, world_size=world_size)
    environment = dict(device=device, tf32=tf32, cuda=cuda)
    run = header("s12_ddp", environment=A100 | environment, shape=GPT2, fallbacks=fallbacks, batch_size=16, **settings)
    return run | {"sdpa": sdpa}


NO_16_BITS = "this cpu has no 16-bit arithmetic, so float32 stays"
LEFT_OUT = {"amp_dtype": NO_16_BITS, "compile": "left out, no C++ compiler found"}
MACHINES = {
    "H100": run_of(True, "bfloat16", True, "cudnn"),
    "T4": run_of(False, "float16", True, "efficient"),
    "RX 7900": run_of(False, "bfloat16", True, "math", cuda=None),
    "old card": run_of(False, "float32", False, "math"),
    "laptop": run_of(False, "float32", False, "flash", accum=1, fallbacks=LEFT_OUT, device="cpu"),
}


@pytest.mark.parametrize(
    "machine, short, same_computation, words",
    [
        ("H100", "s05", False, "active: the cudnn kernel"),
        ("H100", "s08", True, "for the loss, not for speed"),
        ("T4", "s02", True, "this device has no TF32 units"),
        ("RX 7900", "s02", False, "this device has no TF32 units"),  # its library may take another kernel all the same
        ("T4", "s03", False, "active: float16, loss scaled"),
        ("old card", "s04", True, "left out by --no-compile"),
        ("old card", "s05", False, "no kernel for it here: PyTorch falls back on matmuls"),
        ("laptop", "s03", True, NO_16_BITS),
        ("laptop", "s11", True, "one micro-batch per step"),
    ],
)
def test_what_a_machine_makes_of_a_technique(machine, short, same_computation, words):
    effect = ladder.effect_of(ladder.stage_of(short), MACHINES[machine])
    assert (effect.same_computation, effect.words) == (same_computation, words)


def test_two_ranks_share_the_micro_batches_and_a_missing_kernel_leaves_the_matmuls():
    two = ladder.effect_of(ladder.stage_of("s12"), run_of(True, "bfloat16", True, "flash", accum=4, world_size=2))
    assert (two.work.accum, two.words) == (2, "")
    assert not ladder.effect_of(ladder.stage_of("s05"), MACHINES["old card"]).work.flash


def test_each_stage_changes_the_work_or_does_the_same_computation_or_is_called_unpredictable():
    run = MACHINES["H100"]
    for before, each in itertools.pairwise(ladder.STAGES):
        effect = ladder.effect_of(each, run)
        is_told = effect.same_computation or effect.work != ladder.effect_of(before, run).work
        message = f"effect_of() in ladder.py has no case for {each.name}: give it one, or say unpredictable=True"
        assert is_told != each.unpredictable, message
