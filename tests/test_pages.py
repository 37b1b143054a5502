"""The pages have the numbers of the records and the diffs of the stages, and their links and commands work."""

from harness import ladder, machine
from harness.arithmetic import ADAMW, CLIPPING, FUSED_ADAMW, PADDED_VOCAB, UNSCALING, Work, seconds_per_token
from harness.bench import page, picture
from harness.bench.results import Results
from harness.bench.table import table_of
from harness.flags import parse

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from conftest import ROOT, STAGE_FILES

import bench
from model import SIZES

README = (ROOT / "README.md").read_text("utf-8")
LESSONS = (ROOT / "stages" / "README.md").read_text("utf-8")
# git lists what is committed, so what a reader's own benches left is not tested
COMMITTED = [ROOT / path for path in machine.command_output(["git", "-C", str(ROOT), "ls-files"]).splitlines()]
pytestmark = pytest.mark.skipif(not COMMITTED, reason="git lists no files here")
PAGES = [path for path in COMMITTED if path.suffix == ".md" and "fixtures" not in path.parts]
OLD_RECORDS = ("xeon-amx", "epyc-bf16", "loss-at-five-rates")  # which today's bench can't draw
RECORDS = [path for path in COMMITTED if path.match("results/*.jsonl") and path.stem not in OLD_RECORDS]


# Numbers


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_record_draws_the_page_and_the_picture_that_are_committed_beside_it(record):
    table = table_of(Results.load(record))
    remedy = f"python bench.py --render {record.stem}"
    assert page.page(table, record.stem) == record.with_suffix(".md").read_text("utf-8"), remedy
    assert picture.svg(table, record.stem) == record.with_suffix(".svg").read_text("utf-8"), remedy


def rows_of_tables(path):
    """Return {first cell: {title of a column: cell}} of all tables of a page, without links, emphasis and any ±.

    Of a row that is in two tables it is the first one.
    """
    text = re.sub(r"\[([^]]+)\][(\[][^])]+[)\]]", r"\1", (ROOT / path).read_text("utf-8"))
    text = re.sub(r"\s±\s[0-9.]+", "", text).replace("*", "")
    rows = {}
    for table in re.findall(r"(?:^\|.+\|\n)+", text, re.MULTILINE):
        titles, _, *lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()]
        for cells in lines:
            rows.setdefault(cells[0], dict(zip(titles, cells, strict=True)))
    return rows


def test_readme_has_the_table_of_the_h100_and_three_of_its_speeds_before_the_first_heading():
    table = table_of(Results.load(ROOT / "results" / "h100.jsonl"))
    assert page.markdown(page.short_table(table, "stages/")) in README
    for name in ("s01", "s10", "s11"):
        assert f" {table.outcomes[name].tok_per_sec:,.0f}" in README[: README.index("## ")]


def test_readme_says_how_nanogpts_script_climbs():
    measured = (ROOT / "results" / "xeon-nanogpt.md").read_text("utf-8").replace("\u00a0", " ")
    ratios = re.findall(r"^\| .*? (\(?\d\.\d\d ± \d\.\d\d)", measured, re.MULTILINE)
    assert len(ratios) == 4
    for ratio in ratios:
        assert ratio.strip("(") in README


MEASURED, BY_CARD = rows_of_tables("stages/measured.md"), rows_of_tables("README.md")


@pytest.mark.parametrize("row, record", [("H100, ours", "h100"), ("Xeon slow in bfloat16, ours", "xeon-bf16")])
def test_readme_says_what_our_records_say(row, record):
    rows = rows_of_tables(f"results/{record}.md")
    ratios = [rows[stage]["x row above"] for stage in ("s02", "s03", "s04", "s05", "s10")]
    _, *cells = BY_CARD[row].values()  # without the name of the row
    assert cells == [*ratios, rows["s11"]["x first row"]]


@pytest.mark.parametrize("row", [row for row in BY_CARD if row in MEASURED])
def test_readme_says_of_other_cards_what_measured_md_says(row):
    for column in ("TF32", "16 bits", "compile", "flash attention", "all together"):
        column_of_measured = "bf16" if column == "16 bits" else column
        measured = MEASURED[row][column_of_measured].split(" / ")[0]
        assert BY_CARD[row][column] == (measured or "–")


def rates_of(float32, tf32, sixteen_bits, copy):
    """Return the rates of a datasheet: TFLOP/s of matmuls and GB/s of a copy. tf32: 0 on a card without it."""
    peak = {"float32": float32, "tf32": tf32, "bfloat16": sixteen_bits, "float16": sixteen_bits}
    return {"peak": {dtype: rate * 1e12 for dtype, rate in peak.items()}, "copy": copy * 1e9}


# Of each card the last one has what people measured, or what other GeForce cards reach, in float32.
RTX_3060 = [rates_of(12.7, 12.7, 25.5, 360), rates_of(12.7 * 2 / 3, 12.7, 25.5, 360)]
LAPTOP = [rates_of(10.9, 10.9, 21.8, 336), rates_of(13.1, 13.1, 26.2, 336), rates_of(7.8, 13.1, 26.2, 336)]
T4 = [rates_of(8.1, 0, 65, 320), rates_of(4.2, 0, 41.9, 320)]
CARDS = {"an RTX 3060 of 12 GB": RTX_3060, "an RTX 3060 Laptop": LAPTOP, "a T4": T4}


def works_of(row, batch_size, has_tf32):
    """Return (works, before, fused): the Works that a row of the predictions compares.

    works: the script at first, and with each technique up to flash attention. before, fused: with all techniques but
    fused AdamW, and with fused AdamW.
    """
    shape = {"vocab_size": 50257, "seq_len": 1024, **SIZES["gpt2"]}
    has_flash = "flash" in row
    update = ADAMW + CLIPPING if has_flash else ADAMW  # such a script mostly clips, too
    dtypes = ["float32", "tf32", "bfloat16"] if has_tf32 else ["float32", "float16"]
    if "bf16" in row:
        dtypes = ["bfloat16"]  # in which the script begins
    works = []
    for dtype in dtypes:
        unscaling = UNSCALING if dtype == "float16" else 0
        works.append(Work(shape, batch_size, dtype, on_cuda=True, flash=has_flash, update=update + unscaling))
    works.append(replace(works[-1], compiled=True))
    before = works[-1]
    if not has_flash:
        works.append(replace(works[-1], flash=True))
        shape = {**shape, "vocab_size": PADDED_VOCAB}  # s06 and s07 have no column
        before = replace(works[-1], shape=shape, update=works[-1].update + CLIPPING)
    fused = replace(before, update=before.update - ADAMW + FUSED_ADAMW)
    return works, before, fused


@pytest.mark.parametrize("row", [row for row in MEASURED if row.startswith(tuple(CARDS))])
def test_measured_md_predicts_by_arithmetic(row):
    """What a GPT-2 gains step by step, and in all. It begins in float32 or in bf16."""
    [all_rates] = [CARDS[card] for card in CARDS if row.startswith(card)]
    batch_size = int(MEASURED[row]["sequences (B)"])
    works, before, fused = works_of(row, batch_size, has_tf32=all_rates[0]["peak"]["tf32"] > 0)
    figures = []
    for slow, fast in [*pairwise(works), (before, fused), (works[0], fused)]:
        ratios = [f"{seconds_per_token(slow, rates) / seconds_per_token(fast, rates):.2f}" for rates in all_rates]
        figures += sorted({min(ratios), max(ratios)})
    assert re.findall(r"\d\.\d\d", " ".join(MEASURED[row].values())) == figures


# Diffs and names


def make(*words):
    """Run `make WORDS` in the repository, and return what subprocess.run() does."""
    return subprocess.run(["make", "-s", *words], cwd=ROOT, capture_output=True, text=True)


def test_make_climb_without_a_script_says_so_before_it_installs_anything():
    assert make("climb", "SCRIPT=").stderr.startswith('make climb needs SCRIPT="../train.py"')


def changed_lines(diff):
    """Return the lines that a diff removes and adds, with - and + before them. Imports and blank lines are left out."""
    lines = re.findall(r"^[-+](?![-+]).*\S", diff, re.MULTILINE)
    return sorted(line for line in lines if not re.match(r".(import \w+|from .*)$", line))


@pytest.mark.parametrize("stage", ladder.STAGES[1:], ids=lambda stage: stage.short)
def test_a_lesson_has_the_diff_that_make_shows_and_a_stage_its_places(stage):
    """stages/adding.md lists the places. test_ladder.py holds the others."""
    shown = make("diff", f"N={int(stage.short[1:])}").stdout
    assert shown.startswith(STAGE_FILES[stage.short].read_text("utf-8").splitlines()[0])
    lesson = LESSONS.split(f"\n## {stage.short} · ")[1]
    texts = [lesson]
    if stage.short == "s05":
        texts.append(README)
    for text in texts:
        assert changed_lines(re.search(r"```diff\n(.*?)```", text, re.DOTALL)[1]) == changed_lines(shown)
    assert "is_in" in vars(type(stage)), f"stages/harness/ladder.py does not say by what {stage.name} is seen"
    assert f"](#{stage.name.replace('_', '--')})" in LESSONS
    assert f"\n| {stage.short} | " in (ROOT / "stages" / "frameworks.md").read_text("utf-8")


# Links and commands


def anchors_of(text):
    """Return the anchors that GitHub gives the headings of a page."""
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


def commands():
    """Return the commands for stages, bench and make on all pages, between backticks or in a block."""
    beginning = r"python stages/s\d\d_|python bench\.py (?!--render)|make [a-z]+"
    found = set()
    for path in PAGES:
        for command in re.findall(rf"(?:^|`|\$ )((?:{beginning})[^`\n]*)", path.read_text("utf-8"), re.MULTILINE):
            found.add(re.split(r"  +#| \| | && ", command)[0].strip())
    return sorted(found)


@pytest.mark.parametrize("command", commands())
def test_a_command_is_understood(command, monkeypatch):
    """Each stage, flag and target in it is there. A script of the reader's own need not be."""
    program, script, *words = shlex.split(command.replace("$FLAGS", ""))
    if program == "make":
        done = make(script, *words, "--dry-run", f"PY={sys.executable}")
        assert done.returncode == 0, done.stderr
        return
    if script == "bench.py":
        monkeypatch.setattr(bench, "check_row", lambda row: None)
        words = bench.parse_command(words).stage_flags
    assert (ROOT / script).is_file()
    parse("", [*words, "--device", "cpu"])
