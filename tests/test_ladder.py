"""The ladder's table against the stages' sources and lessons, the form of a stage, and what a machine makes of it."""

from harness import ladder

import ast
import difflib
import hashlib
import math
import re
import subprocess
import sys

import pytest
from conftest import ROOT, STAGES

FILES = [path.stem for path in STAGES.values()]


def tree_of(stage):
    """The syntax tree of a stage's source."""
    return ast.parse(STAGES[stage].read_text("utf-8"))


# The table against the files and the lessons


@pytest.mark.parametrize("name", FILES)
def test_a_stage_has_a_row(name):
    assert name in ladder.NAMES, f"stages/{name}.py has no row in STAGES of stages/harness/ladder.py"


@pytest.mark.parametrize("name", ladder.NAMES)
def test_a_row_has_a_stage(name):
    assert name in FILES, f"{name} in STAGES of stages/harness/ladder.py has no file stages/{name}.py"


def test_the_rows_are_in_the_order_of_the_files():
    assert sorted(ladder.NAMES) == ladder.NAMES


@pytest.mark.parametrize("name", FILES)
def test_a_stage_has_a_lesson(name):
    heading = "## " + name.replace("_", " · ")
    lessons = (ROOT / "stages" / "README.md").read_text("utf-8").splitlines()
    assert heading in lessons, f"stages/README.md has no lesson {heading!r} for stages/{name}.py"


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


@pytest.mark.parametrize("stage", STAGES)
def test_a_docstring_begins_with_the_number_name_and_change_of_its_stage(stage):
    number = [*STAGES].index(stage) + 1
    short_name = STAGES[stage].stem[4:]
    title, blank, *text = ast.get_docstring(tree_of(stage)).splitlines()
    assert stage == f"s{number:02d}"
    assert re.fullmatch(rf"Stage {number} · {short_name}: \S.*\S\.", title)
    assert blank == ""
    assert text


def test_s06_says_by_how_much_padding_raises_the_first_loss():
    [figure] = re.findall(r"log\(1 \+ 47/50257\) = (\S+) ", ast.get_docstring(tree_of("s06")))
    assert figure == f"{math.log(50304 / 50257):.4f}"


# The form of a stage


def imports_in(tree):
    """The import statements anywhere in a source, inside functions too."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def names_assigned_at_the_top(tree):
    """The names that a script assigns outside of its functions and loops."""
    names = set()
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_a_script_that_reads_from_top_to_bottom(stage):
    tree = tree_of(stage)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert len(STAGES[stage].read_text("utf-8").splitlines()) <= 110  # two screens
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert "attention" in functions
    assert "main" not in functions
    assert {"args", "loader", "config", "model", "optimizer", "log"} <= names_assigned_at_the_top(tree)
    assert len([statement for statement in tree.body if isinstance(statement, ast.For)]) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_torch_and_the_files_that_all_stages_share(stage):
    tree = tree_of(stage)
    packages = set()
    for node in imports_in(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
        packages |= {module.split(".")[0] for module in modules}
    assert {"harness", "data", "model", "torch"} <= packages
    assert packages <= {"harness", "data", "model", "torch"} | sys.stdlib_module_names
    assert tree.body[1].module == "harness"  # below the docstring: it makes data and model importable


def first_name(node):
    """The name that an expression begins with, "torch" of torch.backends.cudnn; None for a call's result."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_changes_nothing_that_it_imports(stage):
    tree = tree_of(stage)
    imported = set()
    for node in imports_in(tree):
        imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            assert first_name(node) not in imported, ast.unparse(node)
        if isinstance(node, ast.Name):
            assert node.id not in {"setattr", "delattr", "vars", "globals", "exec", "eval"}


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
        ("H100", "s06", ""),
        ("H100", "s07", "for the loss"),
        ("H100", "s08", "no-op: it is for the loss"),
        ("H100", "s09", "no-op: it is for the loss"),
        ("H100", "s10", ""),
        ("H100", "s11", "4 micro-batches per step"),
        ("H100", "s12", "one process: what DDP itself costs"),
        ("two H100s", "s12", ""),
        ("T4", "s02", "no-op: this device has no TF32 units"),
        ("T4", "s03", "active: float16, loss scaled"),
        ("T4", "s05", "active: the efficient kernel"),
        ("laptop without a compiler", "s02", "no-op: this device has no TF32 units"),
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


def test_the_table_knows_which_stages_are_for_the_loss_take_ranks_or_defy_prediction():
    assert [stage.short for stage in ladder.STAGES if stage.for_the_loss] == ["s07", "s08", "s09"]
    assert [stage.short for stage in ladder.STAGES if stage.takes_ranks] == ["s12"]
    assert [stage.short for stage in ladder.STAGES if not stage.is_predictable] == ["s06"]


@pytest.mark.parametrize(
    "mode, stages",
    [("amp", ["s03"]), ("limit", ["s05", "s11"]), ("scale", ["s12"]), ("loss", ["s06", "s07", "s08"])],
)
def test_a_mode_of_the_bench_has_stages_of_its_own(mode, stages):
    assert [stage.short for stage in ladder.STAGES if mode in stage.modes] == stages


# Finding a stage


@pytest.mark.parametrize("word", ["s05", "5", "05", "s05_flash", "s05_flash.py", "stages/s05_flash.py"])
def test_a_stage_is_found_by_what_a_reader_may_call_it(word):
    assert ladder.stage_of(word).name == "s05_flash"


@pytest.mark.parametrize("word", ["s5", "0", "13", "flash", "mine.py", ""])
def test_any_other_word_is_no_stage(word):
    assert ladder.stage_of(word) is None


def test_a_stage_is_found_by_its_whole_name_alone():
    assert ladder.find("s05_flash").short == "s05"
    assert ladder.find("s05") is None


def test_between_two_stages_are_those_that_the_step_adds():
    assert [stage.short for stage in ladder.between("s03_bf16", "s06_vocab")] == ["s04", "s05", "s06"]
    assert ladder.between("s06_vocab", "s03_bf16") == ()


# A script's title and its code


@pytest.mark.parametrize(
    "stage, change",
    [
        ("s01", "float32, explicit attention"),
        ("s05", "flash attention, no T x T matrix"),
        ("s12", "DistributedDataParallel"),
    ],
)
def test_a_title_tells_what_a_stage_changes(stage, change):
    assert ladder.change(STAGES[stage]) == change


@pytest.mark.parametrize(
    "text, words",
    [
        ('"""Clipping alone, beta2 as in s06."""\n', "Clipping alone, beta2 as in s06"),
        ('"""Stage 7 · clip: GPT-3\'s betas, gradient clipping.\n\nMore."""\n', "mine.py"),  # a copy of s07
        ("import torch\n", "mine.py"),
    ],
)
def test_a_script_of_ones_own_is_called_by_its_title_or_its_file(tmp_path, text, words):
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    assert ladder.change(tmp_path / "mine.py") == words


def test_a_hash_is_of_the_code_below_the_docstring(tmp_path):
    x_is_1 = hashlib.sha256(b"x = 1").hexdigest()
    script = tmp_path / "script.py"
    for text in ('"""One."""\n\nx = 1\n', '"""Another.\n\nTwo lines more.\n"""\n\nx = 1\n', "x = 1\n"):
        script.write_text(text)
        assert ladder.code_sha256(script) == x_is_1
    for text in ('"""One."""\n\nx = 2\n', 'x = 1\n\n\ndef f():\n    """Do nothing."""\n'):
        script.write_text(text)
        assert ladder.code_sha256(script) != x_is_1


def test_no_docstring_is_taken_from_a_function_further_down(tmp_path):
    (tmp_path / "bare.py").write_text('x = 1\n\n\ndef f():\n    """Do nothing."""\n')
    docstring, code = ladder.docstring_and_code(tmp_path / "bare.py")
    assert docstring == ""
    assert code.startswith("x = 1")


# All sources


@pytest.mark.parametrize("command", [("check",), ("format", "--check", "--diff")], ids=" ".join)
def test_ruff_has_no_complaint(command):
    pytest.importorskip("ruff")
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
