"""The stages' sources are what a reader learns from: their diffs, their form and what imports what are held here."""

import ast
import difflib
import re
import subprocess
import sys

import pytest
from conftest import ROOT, STAGES

# lines of code against the stage before: added, removed
BUDGET = dict(s02=(1, 0), s03=(6, 3), s04=(2, 0), s05=(2, 8), s06=(1, 1), s07=(4, 3), s08=(14, 2), s09=(6, 1))
BUDGET |= dict(s10=(1, 1), s11=(10, 6), s12=(22, 4))
BEFORE = dict(zip([*STAGES][1:], STAGES, strict=False))

# a module imports only from lower levels, so that nothing goes in a circle
LEVELS = {"data": 0, "model": 1, "harness.machine": 2, "harness": 3, "harness.report": 4, "harness.probe": 4}
LEVELS |= {"bench": 5} | {path.stem: 4 for path in STAGES.values()}
MODULES = {path.stem: path for path in ROOT.glob("*.py")} | {path.stem: path for path in STAGES.values()}
MODULES |= {f"harness.{path.stem}": path for path in (ROOT / "stages" / "harness").glob("*.py")}
MODULES["harness"] = MODULES.pop("harness.__init__")


def tree_of(path):
    return ast.parse(path.read_text("utf-8"))


def code(stage):
    """A stage's lines of code, without docstring, comments, blank lines and indentation."""
    lines = STAGES[stage].read_text("utf-8").splitlines()[tree_of(STAGES[stage]).body[0].end_lineno :]
    lines = [line.split("  #")[0].strip() for line in lines]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("stage", BEFORE)
def test_a_stage_adds_its_technique_and_little_else(stage):
    assert stage in BUDGET, f"{stage} has no budget"
    diff = [line for line in difflib.ndiff(code(BEFORE[stage]), code(stage)) if line[0] in "+-"]
    added, removed = (sum(line[0] == sign for line in diff) for sign in "+-")
    assert 0 < added <= BUDGET[stage][0] and removed <= BUDGET[stage][1], "\n".join(diff)


@pytest.mark.parametrize("stage", STAGES)
def test_a_docstring_is_a_title_and_two_to_six_lines(stage):
    title, blank, *text = ast.get_docstring(tree_of(STAGES[stage])).splitlines()
    number, name = [*STAGES].index(stage) + 1, STAGES[stage].stem[4:]
    assert stage == f"s{number:02d}" and re.fullmatch(rf"Stage {number} · {name}: .+\.", title) and blank == ""
    commands = [line for line in text if line.startswith("    ")]
    assert 2 <= len([*filter(None, text)]) - len(commands) <= 6 and len(commands) <= (stage >= "s12")
    assert len(STAGES[stage].read_text("utf-8").splitlines()) <= 110  # fits on a screen or two


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_a_complete_script_that_patches_nothing(stage):
    tree = tree_of(STAGES[stage])
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {getattr(node, "module", node.names[0].name) for node in imports}
    assert {"harness", "data", "model", "torch"} <= modules and tree.body[1].module == "harness"
    assert {name.split(".")[0] for name in modules} <= {"harness", "data", "model", "torch", "math", "os"}
    # settings, data, model, optimizer and loop are in the source itself, in no class and no main()
    functions = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assigned = {ast.unparse(target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
    assert functions <= {"attention", "get_lr"} and {"loader", "model", "optimizer", "log"} <= assigned
    assert sum(isinstance(node, ast.For) for node in tree.body) == 1
    # nothing that was imported is changed, by assignment or by name
    imported = {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            assert re.match(r"\w+", ast.unparse(node))[0] not in imported, ast.unparse(node)
        if isinstance(node, ast.Name):
            assert node.id not in {"setattr", "delattr", "exec", "eval", "globals", "hasattr"}
    assert "patch" not in STAGES[stage].read_text("utf-8").lower()


def imports_of(node):
    """The modules of this repository that a source imports, but for those that only its command line needs."""
    found = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            module = "harness" if child.level else child.module
            names = {f"{module}.{alias.name}" for alias in child.names}
            found |= names if names <= {*MODULES} else {module, *names}
        elif getattr(child, "name", "") != "main" and not ast.unparse(child).startswith("if __name__ == "):
            found |= imports_of(child)
    return found & {*MODULES}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    assert name in LEVELS, f"{name} has no level"
    upward = {other for other in imports_of(tree_of(MODULES[name])) if LEVELS[other] >= LEVELS[name]}
    assert not upward, f"{name} imports {upward}"


@pytest.mark.parametrize("command", [("check",), ("format", "--check", "--diff")], ids=" ".join)
def test_ruff_has_no_complaint(command):
    pytest.importorskip("ruff")
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
