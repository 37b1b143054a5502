"""The ladder's table against the stages' sources and lessons, and what a machine makes of a stage."""

from harness import ladder

import ast
import difflib
import math
import re

import pytest
from conftest import ROOT, STAGES

FILES = [path.stem for path in STAGES.values()]
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
    "s12": (15, 3),
}


# The table against the files and the lessons


def test_every_stage_has_its_file_its_row_its_title_its_lesson_and_its_budget():
    lessons = (ROOT / "stages" / "README.md").read_text("utf-8").splitlines()
    missing = []
    for name in sorted({*FILES, *ladder.NAMES}):
        if name not in FILES:
            missing.append(f"the file stages/{name}.py")
        elif name not in ladder.NAMES:
            missing.append(f"the row of {name} in STAGES of stages/harness/ladder.py")
        else:
            title = f'"""Stage {int(name[1:3])} · {name[4:]}: {ladder.find(name).change}.\n'
            if not ladder.path_of(name).read_text("utf-8").startswith(title):
                missing.append(f"the title {title!r} of stages/{name}.py")
        heading = "## " + name.replace("_", " · ")
        if heading not in lessons:
            missing.append(f"the lesson {heading!r} in stages/README.md")
        if name[:3] not in BUDGETS and name != FILES[0]:
            missing.append(f"the lines that {name} adds and removes, in BUDGETS of tests/test_ladder.py")
    assert not missing
    assert ladder.NAMES == FILES  # in this order


def code_lines(stage):
    """A stage's lines of code: no docstring, no blank line, no comment, no indentation."""
    text = STAGES[stage].read_text("utf-8")
    docstring = ast.parse(text).body[0]
    lines = [line.split("  #")[0].strip() for line in text.splitlines()[docstring.end_lineno :]]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("stage", BUDGETS)
def test_a_diff_has_exactly_the_lines_of_its_budget(stage):
    stage_before = [*STAGES][[*STAGES].index(stage) - 1]
    diff = list(difflib.ndiff(code_lines(stage_before), code_lines(stage)))
    added = [line for line in diff if line.startswith("+ ")]
    removed = [line for line in diff if line.startswith("- ")]
    assert (len(added), len(removed)) == BUDGETS[stage], "\n".join(added + removed)


def test_the_docstring_of_s06_says_how_the_padding_divides_and_what_it_adds_to_the_loss():
    docstring = STAGES["s06"].read_text("utf-8").split('"""')[1]
    [(size, tile, tiles)] = re.findall(r"(\d+) is (\d+) x (\d+)", docstring)
    assert int(size) == int(tile) * int(tiles) == 50304
    [figure] = re.findall(r"log\(1 \+ 47/50257\) = (\S+) ", docstring)
    assert figure == f"{math.log(50304 / 50257):.4f}"


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_asks_for_the_device_of_its_flags_and_names_none(stage):
    """On a CPU alone, autocast("cpu") is as good as autocast(device.type); on a card it would do nothing."""
    asked = "\n".join(line for line in code_lines(stage) if "init_process_group" not in line)
    assert not re.search(r"""["'](cpu|cuda|mps)""", asked)
    for device in re.findall(r"(?:autocast|GradScaler)\(([^,]*)", asked):
        assert device == "device.type"


# What a technique does on a machine


def run_of(tf32, amp_dtype, compile, sdpa, accum=4, world_size=1, fallbacks=None, device="cuda"):
    """What effect() and work_of() are told of a run of gpt2."""
    settings = dict(amp_dtype=amp_dtype, compile=compile, accum=accum, world_size=world_size, batch_size=16)
    shape = dict(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768)
    environment = dict(tf32=tf32, device=device)
    return dict(environment=environment, settings=settings, shape=shape, fallbacks=fallbacks or {}, sdpa=sdpa)


NO_16_BITS = "this cpu has no 16-bit arithmetic, so float32 stays"
LEFT_OUT = {"amp_dtype": NO_16_BITS, "compile": "left out, no C++ compiler found"}
MACHINES = {
    "H100": run_of(True, "bfloat16", True, "cudnn"),
    "two H100s": run_of(True, "bfloat16", True, "cudnn", world_size=2),
    "T4": run_of(False, "float16", True, "efficient"),
    "old card": run_of(False, "float32", False, "math"),
    "laptop": run_of(False, "float32", False, "flash", accum=1, fallbacks=LEFT_OUT, device="cpu"),
    "CPU with TF32": run_of(True, "bfloat16", True, "flash", device="cpu"),
    "stopped early": run_of(True, "bfloat16", True, None),
}


@pytest.mark.parametrize(
    "machine, name, same_steps, words",
    [
        ("H100", "s03_bf16", False, "active: bfloat16"),
        ("H100", "s04_compile", False, "active"),
        ("H100", "s05_flash", False, "active: the cudnn kernel"),
        ("H100", "s07_clip", False, "for the loss"),
        ("H100", "s08_cosine", True, "for the loss"),
        ("H100", "s09_decay", True, "for the loss"),
        ("H100", "s10_fused", False, ""),
        ("H100", "s11_accum", False, "4 micro-batches per step"),
        ("H100", "s12_ddp", False, "one process: what DDP itself costs"),
        ("two H100s", "s12_ddp", False, ""),
        ("T4", "s02_tf32", True, "this device has no TF32 units"),
        ("T4", "s03_bf16", False, "active: float16, loss scaled"),
        ("old card", "s03_bf16", True, "float32 was asked for"),
        ("old card", "s04_compile", True, "left out by --no-compile"),
        ("old card", "s05_flash", False, "no kernel for it here: PyTorch falls back on matmuls"),
        ("laptop", "s03_bf16", True, NO_16_BITS),
        ("laptop", "s04_compile", True, "left out, no C++ compiler found"),
        ("laptop", "s11_accum", True, "one micro-batch per step"),
        ("CPU with TF32", "s02_tf32", False, "active"),
        ("stopped early", "s05_flash", False, ""),
    ],
)
def test_what_a_machine_makes_of_a_technique(machine, name, same_steps, words):
    assert ladder.effect(name, MACHINES[machine]) == (same_steps, words)


def test_a_stage_that_work_of_does_not_know_is_not_predicted():
    run = MACHINES["H100"]
    for before, stage in zip(ladder.STAGES, ladder.STAGES[1:], strict=False):
        has_lines = ladder.work_of(stage.name, run) != ladder.work_of(before.name, run)
        takes_the_same_steps, _ = ladder.effect(stage.name, run)
        assert stage.predictable == (has_lines or takes_the_same_steps), stage.name
    assert not ladder.Stage("s13_new", "its change", "its line").predictable


def test_a_script_of_ones_own_and_a_model_that_is_no_gpt_have_no_work():
    assert ladder.work_of("mine", MACHINES["H100"]) is None
    assert ladder.work_of("s05_flash", MACHINES["H100"] | {"shape": None}) is None


# Finding a stage


@pytest.mark.parametrize("word", ["s05", "s05_flash", "s05_flash.py", "stages/s05_flash.py"])
def test_a_stage_is_found_by_what_a_reader_may_call_it(word):
    assert ladder.stage_of(word).name == "s05_flash"


@pytest.mark.parametrize("word", ["s5", "5", "s99", "flash", "mine.py", "s05.txt", ""])
def test_any_other_word_is_no_stage(word):
    assert ladder.stage_of(word) is None


def test_a_flag_is_heeded_from_the_stage_on_that_brings_it_and_by_any_other_script():
    assert not ladder.heeds("s03_bf16", "compile")
    assert ladder.heeds("s04_compile", "compile")
    assert ladder.heeds("s12_ddp", "compile")
    assert ladder.heeds("mine", "compile")
