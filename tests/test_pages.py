"""README, the lessons and the results show what the stages and the records say, and their commands run."""

from harness import machine
from harness.bench import page, picture
from harness.bench.results import Results
from harness.bench.table import compare, table_of

import difflib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, STAGE_FILES, run_script

import bench

README = (ROOT / "README.md").read_text("utf-8")
LESSONS = (ROOT / "stages" / "README.md").read_text("utf-8")
DRAWN_BY_HAND = "zen3-loss-rates"  # kept as data, with a page that was written by hand


def committed(pattern):
    """The files of the repository that match a pattern, without those that its reader's own benches left."""
    tracked = machine.command_output(["git", "-C", str(ROOT), "ls-files"]).splitlines()
    paths = sorted(ROOT.glob(pattern))
    if not tracked:  # without git, or without its folder
        return paths
    return [path for path in paths if str(path.relative_to(ROOT)) in tracked]


PAGES = [path for pattern in ("README.md", "stages/*.md", "results/*.md") for path in committed(pattern)]
RECORDS = [path for path in committed("results/*.jsonl") if path.stem != DRAWN_BY_HAND]


def committed_table(name):
    """The Table of a committed record."""
    return table_of(Results.load(ROOT / "results" / f"{name}.jsonl"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_record_draws_the_page_and_the_picture_that_are_committed_beside_it(record):
    table = committed_table(record.stem)
    remedy = f"python bench.py --render {record.stem}"
    assert page.page(table, record.stem) == record.with_suffix(".md").read_text("utf-8"), remedy
    assert picture.draw(table, record.stem) == record.with_suffix(".svg").read_text("utf-8"), remedy


def test_readme_shows_the_table_of_the_h100_and_its_ends_in_the_first_line():
    table = committed_table("h100")
    drawn = page.markdown(page.short_table(table, "stages/"))
    assert drawn in README, drawn
    speeds = [outcome.tok_per_sec for outcome in table.shown]
    assert f"**From {speeds[0]:,.0f} to {max(speeds):,.0f} tokens per second on one H100.**" in README


def test_readme_says_how_nanogpts_script_climbs_and_with_which_command():
    table = committed_table("zen4-nanogpt")
    ratios = [f"{outcome.comparison.ratio.value:.2f}" for outcome in table.shown[1:]]
    sentence = "memory variables {}, autocast {}, compile {}, fused AdamW {}".format(*ratios)
    assert sentence in " ".join(README.split())
    assert f"{compare(table.shown[-1], table.shown[0]).value:.1f} times as fast]" in README
    [climb] = re.findall(r'^make climb SCRIPT="(.*)"$', README, re.MULTILINE)
    assert shlex.quote(climb) in table.bench["command"]


ALSO = {"memory variables": "s01", "vocabulary": "s06", "fused AdamW": "s10", "accumulation": "s11"}


@pytest.mark.parametrize(
    "reader, record",
    [("an H100", "h100"), ("a Xeon with AMX", "xeon-amx"), ("a CPU without 16-bit units", "zen3-float32")],
)
def test_what_to_do_first_says_what_our_records_say(reader, record):
    table = committed_table(record)
    ratios = {line[0]: re.sub(" ± [0-9.]+", "", line[2]) for line in page.short_table(table)}
    line = re.search(rf"^\| \[?{reader}.*", README, re.MULTILINE)[0]
    cells = line.strip("| ").split(" | ")
    assert cells[1:5] == [ratios["s02"], ratios["s03"], ratios["s04"], ratios["s05"]]
    for technique, stage in ALSO.items():
        if technique in cells[5]:
            assert f"{technique} {ratios[stage]}" in re.sub(r"[\[\]]|\(stages[^)]*\)", "", cells[5])
    assert cells[6] == f"{compare(table.outcomes['s11'], table.shown[0]).value:.1f}"


def changed_lines(before, stage):
    """The lines below the docstrings that `diff -w` removes and adds between two stages, with - and + before them."""
    texts = [STAGE_FILES[name].read_text("utf-8").split('"""')[2].splitlines() for name in (before, stage)]
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


@pytest.mark.parametrize("stage", [*STAGE_FILES][1:])
def test_the_diff_in_a_lesson_is_that_of_the_stages(stage):
    before = f"s{int(stage[1:]) - 1:02d}"
    assert sorted(diff_block(LESSONS, f"\n## {stage} · ")) == sorted(changed_lines(before, stage))


def test_the_diff_in_readme_is_that_of_flash_attention():
    assert diff_block(README, "`make diff N=5`") == changed_lines("s04", "s05")


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


# Commands


def commands(path):
    """The commands of a page: the lines of its blocks and what stands between backticks, without comments."""
    text = path.read_text("utf-8")
    blocks = re.findall(r"^```(?:sh|text)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line.split("  #")[0].split(" | ")[0].strip() for line in lines + quoted]


def commands_of(pattern):
    """All commands of the pages that begin with this pattern, each once."""
    of_today = [path for path in PAGES if path.stem != DRAWN_BY_HAND]
    return sorted({command for path in of_today for command in commands(path) if re.match(pattern, command)})


@pytest.mark.parametrize("command", commands_of(r"python stages/s\d\d_"))
def test_the_command_of_a_stage_runs(command, tmp_path):
    """With a model, a length and steps that take a second."""
    script, *flags = shlex.split(command.replace("$FLAGS", ""))[1:]
    small = ("--device", "cpu", "--size", "tiny", "--seq-len", "32", "--steps", "5", "--no-compile")
    (tmp_path / "ids.bin").write_bytes(bytes(2000))  # --eval takes its time on a long text
    data = ("--data", tmp_path / "ids.bin")
    run = run_script(ROOT / script, *flags, *small, *data, "--batch-size", "1", "--accum", "2", folder=tmp_path)
    assert run.status == 0, run.err
    assert "\nmedian " in run.out


@pytest.mark.parametrize("command", commands_of(r"python bench\.py "))
def test_the_command_of_a_bench_is_understood(command, monkeypatch, tmp_path):
    """Every stage and flag is there, and so is a script of the reader's own."""
    words = shlex.split(command)[2:]
    for part in shlex.split(" ".join(words)):
        if part.endswith(".py"):
            (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / part).touch()
    monkeypatch.chdir(tmp_path)
    flags = [] if "--render" in words else ["--device", "cpu"]
    bench.parse_command([*words, *flags])


def make(*words):
    """What `make WORDS` does, started in the repository."""
    return subprocess.run(["make", "-s", *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("command", commands_of("make [a-z]+"))
def test_the_target_of_a_make_command_is_there(command):
    _, *words = shlex.split(command.split(" && ")[0])
    done = make(*words, "--dry-run", f"PY={sys.executable}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["bench", "amp", "limit", "scale"])
def test_a_target_of_make_starts_a_bench_with_what_it_is_given(target):
    done = make(target, "--dry-run", "PY=python3", "ARGS=--steps 9 --device cpu")
    python, script, *words = shlex.split(done.stdout.splitlines()[-1])
    assert (python, script) == ("python3", "bench.py")
    assert bench.parse_command(words).steps == 9


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a card is here")
def test_make_limit_starts_nothing_on_a_cpu():
    done = make("limit", f"PY={sys.executable}", "ARGS=--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("make limit is for a card")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_make_diff_shows_what_a_stage_changes():
    """The lines that change below the docstrings, and the new docstring once."""
    shown = make("diff", "N=05").stdout
    changed = [line for line in shown.splitlines() if line[:1] in ("-", "+") and line[:3] not in ("---", "+++")]
    assert sorted(without_imports(changed)) == sorted(changed_lines("s04", "s05"))
    assert shown.startswith('"""Stage 5 · flash: ')
    assert shown.count("Stage 5") == 1
