"""README, the lessons and the results show what the stages and the records say, and their commands run."""

from harness import ladder, page, readme
from harness.results import Results

import difflib
import os
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, STAGES, python

README = (ROOT / "README.md").read_text("utf-8")
LESSONS = (ROOT / "stages" / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "stages").glob("*.md")), *sorted((ROOT / "results").glob("*.md"))]
RECORDS = sorted((ROOT / "results").glob("*.jsonl"))


def test_every_record_draws_the_page_that_is_committed_beside_it():
    assert RECORDS
    for record in RECORDS:
        drawn = page.page(Results(record))
        assert drawn == record.with_suffix(".md").read_text("utf-8"), f"python bench.py --render {record.stem}"


def test_readme_shows_the_table_of_the_h100():
    part = readme.readme_part(Results(ROOT / "results" / "h100.jsonl"), "h100")
    assert readme.with_part(README, part) == README, "python bench.py --render h100 --readme"


def changed_lines(above, stage):
    """The lines below the docstrings that `diff -w` removes and adds between two stages, with - and + before them."""
    texts = []
    for path in (STAGES[above], STAGES[stage]):
        _, code = ladder.docstring_and_code(path)
        texts.append(code.splitlines())
    old, new = ([" ".join(line.split()) for line in text] for text in texts)
    changed = []
    for kind, first, last, first_new, last_new in difflib.SequenceMatcher(None, old, new).get_opcodes():
        if kind != "equal":
            changed += ["-" + line for line in texts[0][first:last] if line.strip()]
            changed += ["+" + line for line in texts[1][first_new:last_new] if line.strip()]
    return [line for line in changed if not re.fullmatch(r"[-+](import \w+|from .*)", line)]


def diff_block(text, begin):
    """The lines of the first diff block below a text, without imports and blank lines."""
    block = re.search(r"```diff\n(.*?)```", text[text.index(begin) :], re.DOTALL)[1]
    lines = [line for line in block.splitlines() if line[:1] in ("-", "+") and line[1:].strip()]
    return [line for line in lines if not re.fullmatch(r"[-+](import \w+|from .*)", line)]


@pytest.mark.parametrize("stage", [*STAGES][1:])
def test_the_diff_in_a_lesson_is_that_of_the_stages(stage):
    above = f"s{int(stage[1:]) - 1:02d}"
    assert sorted(diff_block(LESSONS, f"\n## {stage} · ")) == sorted(changed_lines(above, stage))


def test_the_diff_in_readme_is_that_of_flash_attention():
    assert diff_block(README, "brings flash attention into s05") == changed_lines("s04", "s05")


def anchors_of(text):
    """The anchors that GitHub gives the headings of a page."""
    anchors = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", heading.lower())
        anchors.add(kept.replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_inside_the_repository_leads_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        linked = path if not file else path.parent / file
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors_of(linked.read_text("utf-8")), target


def commands(path):
    """The commands that a page shows in its code blocks without a language, one a line, without comments.

    Blocks of another language need a file that the reader writes.
    """
    found = []
    language = None  # of the block that this line is in
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("```"):
            language = line.removeprefix("```") if language is None else None
        elif language == "" and re.match(r"(make|python|torchrun|OMP_NUM_THREADS=\S+ python) ", line):
            found.append(line.split("  #")[0].strip())
    return found


ALL_COMMANDS = sorted({command for path in PAGES for command in commands(path)})
FAST = ("--device", "cpu", "--size", "tiny", "--seq-len", "32", "--steps", "5", "--no-compile")


def test_the_pages_have_commands_of_each_kind():
    kinds = {" ".join(command.split()[:2]).split("_")[0] for command in ALL_COMMANDS}
    assert {"make setup", "make bench", "python bench.py", "python stages/s05", "python stages/sample.py"} <= kinds


@pytest.mark.parametrize("command", [command for command in ALL_COMMANDS if re.match(r"python stages/s\d\d_", command)])
def test_the_command_of_a_stage_runs(command, tmp_path):
    """With a model, a length and steps that take a second."""
    words = [word for word in shlex.split(command)[1:] if not word.startswith(("sXX", "..."))]
    script, *flags = words
    run = python(ROOT / script, *flags, *FAST, "--batch-size", "1", "--accum", "2", folder=tmp_path)
    assert run.status == 0, run.err
    assert "median dt" in run.out


@pytest.mark.parametrize("command", [command for command in ALL_COMMANDS if command.startswith("python bench.py")])
def test_the_command_of_a_bench_is_understood(command):
    """It is parsed, which finds every stage and flag that is not there; a path of the reader's own is left out."""
    words = [word for word in shlex.split(command)[2:] if not (word.endswith(".py") and not (ROOT / word).exists())]
    code = "import bench, sys; bench.parse_command(sys.argv[1:])"
    run = python("-c", code, *words, "--device", "cpu")
    assert run.status == 0, run.err


@pytest.mark.parametrize("command", [command for command in ALL_COMMANDS if command.startswith("make ")])
def test_the_target_of_a_make_command_is_there(command):
    done = subprocess.run(
        [*shlex.split(command.split(" && ")[0]), "--dry-run", f"PY={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr


def test_make_diff_shows_the_diff_of_two_stages():
    done = subprocess.run(["make", "-s", "diff", "N=4"], cwd=ROOT, capture_output=True, text=True)
    if "git" in done.stderr:
        pytest.skip("git is not installed")
    assert "+    model = torch.compile(model)" in done.stdout
    assert subprocess.run(["make", "-s", "diff"], cwd=ROOT, capture_output=True).returncode == 2
