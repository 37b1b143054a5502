"""The diffs between neighbouring stages are what a reader learns from: their size and their form are held here."""

import ast
import difflib
import subprocess
import sys

import pytest
from conftest import ROOT, STAGES

# changed lines of code against the stage before: added, removed
BUDGET = dict(
    s02=(1, 0),
    s03=(6, 3),
    s04=(2, 0),
    s05=(2, 8),
    s06=(1, 1),
    s07=(4, 3),
    s08=(14, 2),
    s09=(6, 1),
    s10=(1, 1),
    s11=(10, 6),
    s12=(22, 4),
)
NAMES = ["baseline", "tf32", "bf16", "compile", "flash", "vocab", "clip", "cosine", "decay", "fused", "accum", "ddp"]


def code(stage):
    """A stage's lines of code, without docstring, comments, blank lines and indentation."""
    text = STAGES[stage].read_text()
    lines = text.splitlines()[ast.parse(text).body[0].end_lineno :]
    lines = [line.split("  #")[0].strip() for line in lines]
    return [line for line in lines if line and not line.startswith("#")]


def test_there_are_twelve_stages_in_order():
    assert [path.stem for path in STAGES.values()] == [f"s{i:02d}_{name}" for i, name in enumerate(NAMES, 1)]


@pytest.mark.parametrize("stage", BUDGET)
def test_a_stage_adds_its_technique_and_little_else(stage):
    before = f"s{int(stage[1:]) - 1:02d}"
    diff = [line for line in difflib.ndiff(code(before), code(stage)) if line[0] in "+-"]
    added, removed = (sum(line[0] == sign for line in diff) for sign in "+-")
    assert 0 < added <= BUDGET[stage][0] and removed <= BUDGET[stage][1], "\n".join(diff)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_fits_on_a_screen_or_two(stage):
    assert len(STAGES[stage].read_text().splitlines()) <= 110


@pytest.mark.parametrize("stage", STAGES)
def test_a_docstring_is_a_title_and_two_to_six_lines(stage):
    lines = ast.get_docstring(ast.parse(STAGES[stage].read_text())).splitlines()
    number, name = int(stage[1:]), STAGES[stage].stem.split("_")[1]
    assert lines[0].startswith(f"Stage {number} · {name}: ") and lines[0].endswith(".")
    assert lines[1] == ""
    assert max(map(len, lines)) <= 120
    text = [line for line in lines[2:] if line and not line.startswith("    ")]  # indented: a command
    assert 2 <= len(text) <= 6
    commands = [line for line in lines[2:] if line.startswith("    ")]
    assert len(commands) == (1 if stage == "s12" else 0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_a_complete_script_that_patches_nothing(stage):
    tree = ast.parse(STAGES[stage].read_text())
    modules, imported = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        else:
            continue
        imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    assert modules <= {"harness", "math", "os", "data", "model"} | {m for m in modules if m.split(".")[0] == "torch"}
    assert {"harness", "data", "model", "torch"} <= modules
    assert isinstance(tree.body[1], ast.ImportFrom) and tree.body[1].module == "harness"

    # settings, data, model, optimizer and loop stand in the text itself, in no class and no main()
    functions = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert functions <= {"attention", "get_lr"}
    assigned = {ast.unparse(target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
    assert {"loader", "model", "optimizer", "log"} <= assigned
    assert sum(isinstance(node, ast.For) for node in tree.body) == 1

    # nothing that was imported is changed, by assignment or by name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            root = node
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            assert not (isinstance(root, ast.Name) and root.id in imported), ast.unparse(node)
        if isinstance(node, ast.Name):
            assert node.id not in {"setattr", "delattr", "exec", "eval", "globals", "hasattr"}, ast.unparse(node)
    assert "patch" not in STAGES[stage].read_text().lower()


@pytest.mark.parametrize("command", [("check",), ("format", "--check", "--diff")], ids=" ".join)
def test_ruff_has_nothing_to_say(command):
    pytest.importorskip("ruff")
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
