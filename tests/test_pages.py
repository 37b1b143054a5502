"""README, the lessons and the results show what the stages and the records say, and their commands are understood."""

from harness import ladder, machine
from harness.arithmetic import ADAMW, CLIPPING, FUSED_ADAMW, PADDED_VOCAB, UNSCALING, Work, seconds_per_token
from harness.bench import page, picture
from harness.bench.results import Results
from harness.bench.table import table_of
from harness.figures import tokens_per_second
from harness.flags import parse

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from conftest import ROOT, STAGE_FILES

import bench
from model import SIZES

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
README = (ROOT / "README.md").read_text("utf-8")
LESSONS = (ROOT / "stages" / "README.md").read_text("utf-8")


def can_be_drawn(record):
    """Whether a record is of this version of the bench: its first line has the rates of the machine."""
    return '"rates"' in record.read_text("utf-8").splitlines()[0]


# without what a reader's own benches left
listed = machine.command_output(["git", "-C", str(ROOT), "ls-files"])
COMMITTED = [ROOT / path for path in listed.splitlines()]
PAGES = [path for path in COMMITTED if path.suffix == ".md" and "fixtures" not in path.parts]
RECORDS = [path for path in COMMITTED if path.match("results/*.jsonl") and can_be_drawn(path)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_record_draws_the_page_and_the_picture_that_are_committed_beside_it(record):
    table = table_of(Results.load(record))
    remedy = f"python bench.py --render {record.stem}"
    assert page.page(table, record.stem) == record.with_suffix(".md").read_text("utf-8"), remedy
    assert picture.svg(table, record.stem) == record.with_suffix(".svg").read_text("utf-8"), remedy


def lines_of_tables(path):
    """{first cell: the other cells} of the lines of all tables of a page, without links, emphasis and any ±."""
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", path.read_text("utf-8"))
    text = re.sub(r"\s±\s[0-9.]+", "", text).replace("*", "")
    lines = {}
    for line in re.findall(r"^\| (.+) \|$", text, re.MULTILINE):
        first, *others = line.split(" | ")
        lines.setdefault(first, others)  # of a row in two tables of a page it is the first
    return lines


def test_readme_shows_the_table_of_the_h100_and_its_ends_in_the_first_lines():
    table = table_of(Results.load(ROOT / "results" / "h100.jsonl"))
    drawn = page.markdown(page.short_table(table, "stages/"))
    assert drawn in README, drawn
    s01, s10, s11 = [f"{table.outcomes[name].tok_per_sec:,.0f}" for name in ("s01", "s10", "s11")]
    first_lines = " ".join(README.split())
    assert f"from {s01} tokens per second, in uncompiled float32 with explicit attention, to {s10}" in first_lines
    assert f"with four batches in a step to {s11}." in first_lines


def test_readme_shows_how_nanogpts_script_climbs_and_with_which_command():
    measured = (ROOT / "results" / "xeon-nanogpt.md").read_text("utf-8")
    [rows] = re.findall(r"^\| plain .*?\n\n", README, re.MULTILINE | re.DOTALL)
    [script] = re.findall(r'^make climb SCRIPT="(.*)" PY=python$', README, re.MULTILINE)
    assert rows in measured
    assert script in measured


@pytest.mark.parametrize(
    "reader, record",
    [
        ("an H100", "h100"),
        ("a Xeon with AMX", "xeon-amx"),
        ("a Xeon whose bfloat16 is slow", "xeon-bf16"),
    ],
)
def test_what_to_do_first_says_what_our_records_say(reader, record):
    lines = lines_of_tables(ROOT / "results" / f"{record}.md")
    first = lines.get("plain", lines["s01"])
    speeds = [float(cells[0].replace(",", "")) for cells in (lines["s11"], first)]
    expected = [lines[stage][1] for stage in ("s01", "s02", "s03", "s04", "s05", "s10")]
    expected.append(f"{speeds[0] / speeds[1]:.1f}")
    if record == "xeon-amx":
        expected[0], expected[-1] = "1.45", "3.9"  # by its last ten turns: see memory.md
    shown = lines_of_tables(ROOT / "README.md")[reader][:7]
    assert [*shown[:6], shown[6].split(",")[0]] == expected


def rates_of(float32, tf32, sixteen_bits, copy):
    """The rates of a datasheet: TFLOP/s of matmuls and GB/s of a copy. tf32: 0 on a card without it."""
    sixteen_bits *= 1e12
    peak = {"float32": float32 * 1e12, "tf32": tf32 * 1e12, "bfloat16": sixteen_bits, "float16": sixteen_bits}
    return {"peak": peak, "copy": copy * 1e9}


# Of each card the last one has what people measured, or what other GeForce cards reach, in float32.
RTX_3060 = [rates_of(12.7, 12.7, 25.5, 360), rates_of(12.7 * 2 / 3, 12.7, 25.5, 360)]
LAPTOP = [rates_of(10.9, 10.9, 21.8, 336), rates_of(13.1, 13.1, 26.2, 336), rates_of(7.8, 13.1, 26.2, 336)]
T4 = [rates_of(8.1, 0, 65, 320), rates_of(4.2, 0, 41.9, 320)]


def predicted_cells(all_rates, batch_size, has_flash, has_bf16, has_tf32):
    """What a GPT-2 gains step by step: the cells of a row from TF32 to "in all". It begins in float32 or in bf16."""
    shape = {"vocab_size": 50257, "seq_len": 1024, **SIZES["gpt2"]}
    update = ADAMW + CLIPPING if has_flash else ADAMW  # such a script mostly clips, too
    steps = [Work(shape, batch_size, on_cuda=True, flash=has_flash, update=update)]
    if has_tf32:
        steps.append(replace(steps[-1], matmul_dtype="tf32"))
        steps.append(replace(steps[-1], matmul_dtype="bfloat16"))
    else:
        steps.append(replace(steps[-1], matmul_dtype="float16", update=update + UNSCALING))
    steps.append(replace(steps[-1], compiled=True))
    if not has_flash:
        steps.append(replace(steps[-1], flash=True))
    last_but_one = steps[-1]
    if not has_flash:  # s06 and s07 have no column
        padded = {**shape, "vocab_size": PADDED_VOCAB}
        last_but_one = replace(last_but_one, shape=padded, update=last_but_one.update + CLIPPING)
    fused = replace(last_but_one, update=last_but_one.update - ADAMW + FUSED_ADAMW)
    if has_bf16:
        steps = steps[2:]
    pairs = [*pairwise(steps), (last_but_one, fused), (steps[0], fused)]
    cells = ["little", "in it"] if has_bf16 else []
    for before, after in pairs:
        ratios = [seconds_per_token(before, rates) / seconds_per_token(after, rates) for rates in all_rates]
        low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
        cells.append(low if low == high else f"{low} to {high}")
    if not has_tf32:
        cells.insert(0, "none")
        cells[1] += ", in float16"
    if has_flash:
        cells.insert(3, "in it")
    return cells


@pytest.mark.parametrize(
    "row, all_rates, batch_size",
    [
        ("an RTX 3060 of 12 GB", RTX_3060, 4),
        ("an RTX 3060 of 12 GB, flash attention in the script already", RTX_3060, 4),
        ("an RTX 3060 of 12 GB, flash attention and bf16 in the script already", RTX_3060, 4),
        ("an RTX 3060 Laptop of 6 GB", LAPTOP, 1),
        ("a T4", T4, 4),
        ("a T4, flash attention in the script already", T4, 4),
    ],
)
def test_the_pages_predict_by_arithmetic(row, all_rates, batch_size):
    has_tf32 = row[:4] != "a T4"
    cells = predicted_cells(all_rates, batch_size, "flash" in row, "bf16" in row, has_tf32)
    assert lines_of_tables(ROOT / "stages" / "measured.md")[row][:6] == cells
    assert lines_of_tables(ROOT / "README.md").get(row, cells)[:6] == cells  # not all are there


def test_readme_names_figures_that_stand_in_no_table():
    readme = " ".join(README.split())
    with_16_sequences = predicted_cells(RTX_3060, 16, has_flash=True, has_bf16=True, has_tf32=True)
    assert f"[{with_16_sequences[-1]} to 1.25](stages/measured.md#predictions)" in readme
    h100 = table_of(Results.load(ROOT / "results" / "h100.jsonl")).outcomes
    assert f"{h100['s10'].tok_per_sec / h100['s01'].tok_per_sec:.1f} up to s10" in readme
    mean_speeds = [tokens_per_second(h100[name].counted, uneven=True) for name in ("s11", "s01")]
    assert f"({mean_speeds[0] / mean_speeds[1]:.2f} in all by the [mean]" in readme
    xeon = table_of(Results.load(ROOT / "results" / "xeon-bf16.jsonl")).outcomes
    assert f"but {xeon['s02'].comparison.ratio_to_first.value:.2f} before bf16" in readme


def make(*words):
    """What `make WORDS` does, started in the repository."""
    return subprocess.run(["make", "-s", *words], cwd=ROOT, capture_output=True, text=True)


def changed_lines(diff):
    """The lines that a diff removes and adds, with - and + before them, without imports and blank lines."""
    lines = re.findall(r"^[-+](?![-+]).*\S", diff, re.MULTILINE)
    return [line for line in lines if not re.match(r".(import \w+|from .*)$", line)]


def diff_block(text, begin):
    """The first diff block of a text below this line."""
    return re.search(r"```diff\n(.*?)```", text[text.index(begin) :], re.DOTALL)[1]


@pytest.mark.parametrize("stage", [*STAGE_FILES][1:])
def test_the_diff_in_a_lesson_is_that_of_the_stages(stage):
    shown = make("diff", f"N={int(stage[1:])}").stdout
    assert sorted(changed_lines(diff_block(LESSONS, f"\n## {stage} · "))) == sorted(changed_lines(shown))


def test_make_diff_shows_the_docstring_of_flash_attention_and_the_diff_that_readme_has():
    shown = make("diff", "N=05").stdout
    assert changed_lines(shown) == changed_lines(diff_block(README, "`make diff N=5`"))
    assert shown.startswith('"""Stage 5 · flash: ')


@pytest.mark.parametrize("stage", ladder.STAGES[1:], ids=lambda stage: stage.short)
def test_a_stage_is_named_in_the_places_of_adding_md(stage):
    """Those that test_ladder.py does not hold."""
    assert "is_in" in vars(type(stage)), f"stages/harness/ladder.py does not say by what {stage.name} is seen"
    assert f"](#{stage.name.replace('_', '--')})" in LESSONS
    assert f"\n| {stage.short} | " in (ROOT / "stages" / "adding.md").read_text("utf-8")


def anchors_of(text):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text.lower(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_inside_the_repository_leads_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        linked = path if not file else path.parent / file
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors_of(linked.read_text("utf-8")), target


def commands_of(beginning):
    """The commands that begin so, between backticks or in a block of a page, without comments, each once."""
    commands = set()
    for path in PAGES:
        found = re.findall(rf"(?:^|`|\$ )({beginning}[^`\n]*)", path.read_text("utf-8"), re.MULTILINE)
        commands.update(re.split(r"  +#| \| ", command)[0].strip() for command in found)
    return sorted(commands)


@pytest.mark.parametrize("command", commands_of(r"python stages/s\d\d_"))
def test_the_command_of_a_stage_is_understood(command):
    script, *words = shlex.split(command.replace("$FLAGS", ""))[1:]
    assert (ROOT / script).is_file()
    parse("", [*words, "--device", "cpu"])


@pytest.mark.parametrize("command", commands_of(r"python bench\.py (?!--render)"))
def test_the_command_of_a_bench_is_understood(command, monkeypatch):
    """Every stage and flag is there. A script of the reader's own need not be."""
    monkeypatch.setattr(bench, "check", lambda row: None)
    args = bench.parse_command(shlex.split(command)[2:])
    parse("", [*args.flags, "--device", "cpu"])


@pytest.mark.parametrize("command", commands_of("make [a-z]+"))
def test_the_target_of_a_make_command_is_there(command):
    _, *words = shlex.split(command.split(" && ")[0])
    done = make(*words, "--dry-run", f"PY={sys.executable}")
    assert done.returncode == 0, done.stderr
