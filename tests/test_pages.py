"""README, the lessons and the results show what the stages and the records say, and their commands run."""

from harness import page
from harness.modes import CPU_MEMORY, MODES
from harness.results import Results

import difflib
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, STAGES, run_script

import bench

README = (ROOT / "README.md").read_text("utf-8")
LESSONS = (ROOT / "stages" / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "stages").glob("*.md")), *sorted((ROOT / "results").glob("*.md"))]


def mode_of(record):
    """The mode of a bench by the first line of its record."""
    with record.open(encoding="utf-8") as lines:
        return json.loads(lines.readline())["mode"]


# the record of a mode that is gone is kept as data alone
RECORDS = [record for record in sorted((ROOT / "results").glob("*.jsonl")) if mode_of(record) in MODES]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_record_draws_the_page_that_is_committed_beside_it(record):
    drawn = MODES[mode_of(record)].page(Results.load(record))
    assert drawn == record.with_suffix(".md").read_text("utf-8"), f"python bench.py --render {record.stem}"


def test_readme_shows_the_table_of_the_h100():
    results = Results.load(ROOT / "results" / "h100.jsonl")
    table = page.markdown(MODES["ladder"].short_rows(results, "stages/"))
    assert table in README, table


def changed_lines(before, stage):
    """The lines below the docstrings that `diff -w` removes and adds between two stages, with - and + before them."""
    texts = [STAGES[name].read_text("utf-8").split('"""')[2].splitlines() for name in (before, stage)]
    old, new = ([" ".join(line.split()) for line in text] for text in texts)
    changed = []
    for kind, first, last, first_new, last_new in difflib.SequenceMatcher(None, old, new).get_opcodes():
        if kind != "equal":
            changed += ["-" + line for line in texts[0][first:last]]
            changed += ["+" + line for line in texts[1][first_new:last_new]]
    return without_imports(changed)


def diff_block(text, begin):
    """The lines that the first diff block below a text removes and adds."""
    block = re.search(r"```diff\n(.*?)```", text[text.index(begin) :], re.DOTALL)[1]
    return without_imports([line for line in block.splitlines() if line[:1] in ("-", "+")])


def without_imports(lines):
    """The lines of a diff without imports and blank lines."""
    return [line for line in lines if line[1:].strip() and not re.fullmatch(r"[-+](import \w+|from .*)", line)]


@pytest.mark.parametrize("stage", [*STAGES][1:])
def test_the_diff_in_a_lesson_is_that_of_the_stages(stage):
    before = f"s{int(stage[1:]) - 1:02d}"
    assert sorted(diff_block(LESSONS, f"\n## {stage} · ")) == sorted(changed_lines(before, stage))


def test_the_diff_in_readme_is_that_of_flash_attention():
    assert diff_block(README, "brings flash attention into s05") == changed_lines("s04", "s05")


@pytest.mark.parametrize("mode", MODES)
def test_readme_tells_of_every_mode(mode):
    command = "make bench" if mode == "ladder" else f"make {mode}"
    assert re.search(rf"^{command}\b", README, re.MULTILINE)


def test_the_page_on_memory_sets_the_variables_that_the_bench_sets():
    page_on_memory = (ROOT / "stages" / "memory.md").read_text("utf-8")
    assert " ".join(f"{name}={value}" for name, value in CPU_MEMORY.items()) in page_on_memory


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


# The commands


def commands(path):
    """The commands that a page shows in its code blocks without a language, one a line, without comments.

    Blocks of another language need a file that the reader writes.
    """
    found = []
    language = None  # of the block that this line is in
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("```"):
            language = line.removeprefix("```") if language is None else None
        elif language == "" and re.match(r"(make|python) ", line):
            found.append(line.split("  #")[0].strip())
    return found


def commands_of(program):
    """All commands of the pages that begin with this pattern, each once."""
    return sorted({command for path in PAGES for command in commands(path) if re.match(program, command)})


@pytest.mark.parametrize("command", commands_of(r"python stages/s\d\d_"))
def test_the_command_of_a_stage_runs(command, tmp_path):
    """With a model, a length and steps that take a second."""
    script, *flags = shlex.split(command)[1:]
    small = ("--device", "cpu", "--size", "tiny", "--seq-len", "32", "--steps", "5", "--no-compile")
    run = run_script(ROOT / script, *flags, *small, "--batch-size", "1", "--accum", "2", folder=tmp_path)
    assert run.status == 0, run.err
    assert "\nmedian " in run.out


@pytest.mark.parametrize("command", commands_of(r"python bench\.py "))
def test_the_command_of_a_bench_is_understood(command):
    """Every stage and flag is there; a path of the reader's own is left out."""
    words = [word for word in shlex.split(command)[2:] if not (word.endswith(".py") and not (ROOT / word).exists())]
    bench.parse_command([*words, "--device", "cpu"])


def make(*words):
    """What `make WORDS` does, started in the repository."""
    return subprocess.run(["make", "-s", *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("command", commands_of("make "))
def test_the_target_of_a_make_command_is_there(command):
    _, *words = shlex.split(command.split(" && ")[0])
    done = make(*words, "--dry-run", f"PY={sys.executable}")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("number, before, stage", [("5", "s04_compile", "s05_flash"), ("08", "s07_clip", "s08_cosine")])
def test_make_diff_shows_what_a_stage_changes_in_the_code_of_the_one_before(number, before, stage):
    done = make("diff", f"N={number}")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert f"--- a/{before}.py" in lines
    assert f"+++ b/{stage}.py" in lines
    changed = [line for line in lines if line.startswith(("-", "+")) and not line.startswith(("---", "+++"))]
    assert sorted(without_imports(changed)) == sorted(changed_lines(before[:3], stage[:3]))


@pytest.mark.parametrize("words", [["N=1"], [f"N={len(STAGES) + 1}"], ["N=x"], []])
def test_make_diff_of_no_stage_says_what_to_pass(words):
    done = make("diff", *words)
    assert done.returncode != 0
    error, _ = done.stderr.splitlines()  # make adds a line of its own
    assert error == "error: pass the number of a stage from 2 on, as in make diff N=5"
