"""The ladder's table against the stages' sources and lessons, the form of a stage, and what a machine makes of it."""

from harness import ladder

import ast
import difflib
import hashlib
import math
import re
import sys

import pytest
from conftest import ROOT, STAGES

FILES = [path.stem for path in STAGES.values()]


def tree_of(stage):
    """The syntax tree of a stage's source."""
    return ast.parse(STAGES[stage].read_text("utf-8"))


# The table against the files and the lessons


def test_every_stage_has_its_file_its_row_and_its_lesson():
    lessons = (ROOT / "stages" / "README.md").read_text("utf-8").splitlines()
    missing = []
    for name in sorted({*FILES, *ladder.NAMES}):
        if name not in ladder.NAMES:
            missing.append(f"the row of {name} in STAGES of stages/harness/ladder.py")
        if name not in FILES:
            missing.append(f"the file stages/{name}.py")
        elif not ladder.path_of(name).read_text("utf-8").startswith(f'"""Stage {int(name[1:3])} · {name[4:]}: '):
            missing.append(f"the number and name of {name} in its docstring")
        heading = "## " + name.replace("_", " · ")
        if heading not in lessons:
            missing.append(f"the lesson {heading!r} in stages/README.md")
    assert not missing
    assert ladder.NAMES == FILES  # in this order


def code_lines(stage):
    """A stage's lines of code: no docstring, no blank line, no comment, no indentation."""
    docstring = tree_of(stage).body[0]
    lines = []
    for line in STAGES[stage].read_text("utf-8").splitlines()[docstring.end_lineno :]:
        code = line.split("  #")[0].strip()
        if code and not code.startswith("#"):
            lines.append(code)
    return lines


@pytest.mark.parametrize("stage", [*STAGES][1:])
def test_a_diff_has_exactly_the_lines_of_its_budget(stage):
    stage_before = [*STAGES][[*STAGES].index(stage) - 1]
    diff = list(difflib.ndiff(code_lines(stage_before), code_lines(stage)))
    added = [line for line in diff if line.startswith("+ ")]
    removed = [line for line in diff if line.startswith("- ")]
    assert (len(added), len(removed)) == ladder.stage_of(stage).budget, "\n".join(added + removed)


def test_s06_says_by_how_much_padding_raises_the_first_loss():
    [figure] = re.findall(r"log\(1 \+ 47/50257\) = (\S+) ", ast.get_docstring(tree_of("s06")))
    assert figure == f"{math.log(50304 / 50257):.4f}"


# The form of a stage


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_a_script_that_reads_from_top_to_bottom(stage):
    tree = tree_of(stage)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert len(STAGES[stage].read_text("utf-8").splitlines()) <= 110  # two screens
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert "attention" in functions
    assert "main" not in functions
    assert len([statement for statement in tree.body if isinstance(statement, ast.For)]) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_torch_and_the_files_that_all_stages_share(stage):
    tree = tree_of(stage)
    packages = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            packages.add(node.module.split(".")[0])
    assert {"harness", "data", "model", "torch"} <= packages
    assert packages <= {"harness", "data", "model", "torch"} | sys.stdlib_module_names
    assert tree.body[1].module == "harness"  # below the docstring: it makes data and model importable


# What a technique does on a machine


def run_of(tf32, amp_dtype, compile, accum=4, world_size=1, fallbacks=None, sdpa=None):
    """What a note is told of a run."""
    settings = {"amp_dtype": amp_dtype, "compile": compile, "accum": accum, "world_size": world_size}
    return {"environment": {"tf32": tf32}, "settings": settings, "fallbacks": fallbacks or {}, "sdpa": sdpa}


NO_16_BITS = "this cpu has no 16-bit arithmetic, so float32 stays"
MACHINES = {
    "H100": run_of(tf32=True, amp_dtype="bfloat16", compile=True, sdpa="cudnn"),
    "two H100s": run_of(tf32=True, amp_dtype="bfloat16", compile=True, world_size=2, sdpa="cudnn"),
    "T4": run_of(tf32=False, amp_dtype="float16", compile=True, sdpa="efficient"),
    "laptop without a compiler": run_of(
        tf32=False,
        amp_dtype="float32",
        compile=False,
        accum=1,
        fallbacks={"amp_dtype": NO_16_BITS, "compile": "left out, no C++ compiler found"},
        sdpa="flash",
    ),
    "both left out by flags": run_of(tf32=True, amp_dtype="float32", compile=False, sdpa="flash"),
}


@pytest.mark.parametrize(
    "machine, stage, note",
    [
        ("H100", "s01", ""),
        ("H100", "s02", "active"),
        ("H100", "s03", "active: bfloat16"),
        ("H100", "s04", "active"),
        ("H100", "s05", "active: the cudnn kernel"),
        ("H100", "s07", "for the loss"),
        ("H100", "s08", "no-op: it is for the loss"),
        ("H100", "s11", "4 micro-batches per step"),
        ("H100", "s12", "one process: what DDP itself costs"),
        ("two H100s", "s12", ""),
        ("T4", "s02", "no-op: this device has no TF32 units"),
        ("T4", "s03", "active: float16, loss scaled"),
        ("laptop without a compiler", "s03", f"no-op: {NO_16_BITS}"),
        ("laptop without a compiler", "s04", "no-op: not compiled, left out, no C++ compiler found"),
        ("laptop without a compiler", "s11", "no-op: one micro-batch per step"),
        ("both left out by flags", "s03", "no-op: float32 was asked for"),
        ("both left out by flags", "s04", "no-op: not compiled, --no-compile was given"),
    ],
)
def test_the_note_says_what_a_machine_makes_of_a_technique(machine, stage, note):
    assert ladder.stage_of(stage).note(MACHINES[machine]) == note


@pytest.mark.parametrize(
    "machine, no_op_stages",
    [
        ("H100", ["s08", "s09"]),  # they do the same work as the stage before, with other numbers
        ("T4", ["s02", "s08", "s09"]),
        ("laptop without a compiler", ["s02", "s03", "s04", "s08", "s09", "s11"]),
        ("both left out by flags", ["s03", "s04", "s08", "s09"]),
    ],
)
def test_these_stages_take_the_same_steps_as_the_stage_before(machine, no_op_stages):
    notes = {stage.short: stage.note(MACHINES[machine]) for stage in ladder.STAGES}
    assert [short for short, note in notes.items() if note.startswith("no-op")] == no_op_stages


# Finding a stage


@pytest.mark.parametrize("word", ["s05", "s05_flash", "s05_flash.py", "stages/s05_flash.py"])
def test_a_stage_is_found_by_what_a_reader_may_call_it(word):
    assert ladder.stage_of(word).name == "s05_flash"


@pytest.mark.parametrize("word", ["s5", "5", "s99", "flash", "mine.py", ""])
def test_any_other_word_is_no_stage(word):
    assert ladder.stage_of(word) is None


# A script's title and its code


@pytest.mark.parametrize(
    "text, words",
    [
        ('"""Clipping alone, beta2 as in s06."""\n', "Clipping alone, beta2 as in s06"),
        ('"""Stage 7 · clip: GPT-3\'s betas, gradient clipping.\n\nMore."""\n', "mine.py"),  # a copy of s07
        ("import torch\n", "mine.py"),
    ],
)
def test_a_script_of_ones_own_is_called_by_its_title_or_its_file_and_a_stage_by_its_change(tmp_path, text, words):
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    assert ladder.change(tmp_path / "mine.py") == words
    assert ladder.change(STAGES["s05"]) == "flash attention, no T x T matrix"


def test_a_hash_is_of_the_code_below_the_docstring(tmp_path):
    x_is_1 = hashlib.sha256(b"x = 1").hexdigest()
    script = tmp_path / "script.py"
    for text in ('"""One."""\n\nx = 1\n', '"""Another.\n\nTwo lines more.\n"""\n\nx = 1\n', "x = 1\n"):
        script.write_text(text)
        assert ladder.code_sha256(script) == x_is_1
    for text in ('"""One."""\n\nx = 2\n', 'x = 1\n\n\ndef f():\n    """Do nothing."""\n'):
        script.write_text(text)
        assert ladder.code_sha256(script) != x_is_1
