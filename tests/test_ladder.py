"""The ladder's table against the stages' sources and the Makefile."""

from harness import ladder

import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, STAGE_FILES, python

FILES = [path.stem for path in STAGE_FILES.values()]
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
    "s12": (14, 4),
}


@pytest.mark.parametrize("name", FILES)
def test_every_stage_has_its_title(name):
    title = f'"""Stage {int(name[1:3])} · {name[4:]}: '
    assert STAGE_FILES[name[:3]].read_text("utf-8").startswith(title), f"stages/{name}.py does not begin with {title}"


def test_every_stage_has_its_class_in_this_order_and_its_budget():
    assert [stage.name for stage in ladder.STAGES] == FILES
    assert [*BUDGETS] == [*STAGE_FILES][1:]


def test_the_stages_that_start_a_process_group_take_ranks():
    for stage in ladder.STAGES:
        assert stage.takes_ranks == ("init_process_group" in stage.path.read_text("utf-8")), stage.name


def code_lines(stage):
    """Return a stage's lines of code, without docstring, blank lines, comments and indentation."""
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


def test_a_stage_loads_at_most_1000_lines_of_ours(tmp_path):
    """They are those of all its modules, with docstrings: all that its reader would have to read."""
    stage = str(STAGE_FILES["s01"])
    script = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')\n"
    script += "print(*(getattr(module, '__file__', None) for module in sys.modules.values()), sep='\\n')"
    flags = ("--size", "tiny", "--steps", "1", "--seq-len", "24", "--data", "docs", "--device", "cpu")
    ended = python("-c", script, stage, *flags, folder=tmp_path, PYTHONPATH=str(ROOT / "stages"))
    assert ended.status == 0, ended.err
    files = {path for path in ended.out.splitlines() if path.startswith(f"{ROOT}/") and "/.venv/" not in path}
    lines = {path: len(Path(path).read_text("utf-8").splitlines()) for path in (*files, stage)}
    assert 500 < sum(lines.values()) <= 1000, lines


@pytest.mark.parametrize("target", ["bench", "climb", "amp", "limit", "scale", "test"])
def test_make_passes_args_on(target):
    words = ["make", "-s", target, "--dry-run", f"PY={sys.executable}", "ARGS=--seed 7"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith(" --seed 7\n")


@pytest.mark.parametrize("stage", STAGE_FILES)
def test_a_stage_asks_for_the_device_of_its_flags_and_names_none(stage):
    """On a CPU alone, autocast("cpu") is as good as autocast(device.type); on a card it would do nothing."""
    asked = "\n".join(line for line in code_lines(stage) if "init_process_group" not in line)
    assert not re.search(r"""["'](cpu|cuda|mps)""", asked)
    for device in re.findall(r"(?:autocast|GradScaler)\(([^,]*)", asked):
        assert device == "device.type"
