"""The table of a bench in words: on a page and in its picture."""

from harness.bench import cells, page, picture
from harness.bench.failure import error_line

import os
from pathlib import Path

import pytest
from fixtures.records import probed, run, table_from

FIXTURES = Path(__file__).parent / "fixtures"


def cpu_run(name, speed, factors=(1, 1, 1, 1, 1), **about):
    """Return a run without a compiler. speed: over that of s01. factors: of its steps' times, beyond the load's."""
    dts = []
    for load, factor in zip((1.0, 1.1, 0.9, 1.0, 1.2), factors, strict=False):
        dts.append(round(load / speed * factor, 9))
    return run(name, dts, shows={"problem": "no C++ compiler found: install g++ (Linux)"}, **about)


def ladder_cpu():
    """Return the table of a bench on a CPU with a row of every kind."""
    return table_from(
        cpu_run("plain", 0.8, (1, 1.01, 1, 0.99, 1)),
        cpu_run("s01", 1),
        cpu_run("s03", 2, memory=1.25),
        cpu_run("s04", 1, (), end=error_line("out of memory", out_of_memory=True)),
        cpu_run("s05", 3, memory=0.5),
        cpu_run("s06", 2.4),
        cpu_run("s07", 2.42),  # 1.008 times as fast, and the A/A pair is 1.04 apart
        cpu_run("s07 again", 2.42 * 1.04),
        cpu_run("s08", 2.4, (1, 1, 1), end=error_line("RuntimeError: <boom> |\nwith a bar")),
        cpu_run("s10", 3, (1, 1, 1, 1), end=None, memory=None),
        cpu_run("s11", 1.5, tokens=2000),  # twice the tokens in 1 / 1.5 of the time
        cpu_run("s12", 1.5 * 1.03, tokens=2000),
        cpu_run("my/script.py", 5, shape=None, parameters=10_700_000, tf32=True),
        cpu_run("waits.py", 4, unit="sample", wait=0.2, fused=None, loaders=2),
        rates=probed(float32=5e11, bfloat16=1e12, copy=2.5e10),
    )


@pytest.mark.parametrize("name, drawn", [("ladder_cpu.md", page.page), ("ladder_cpu.svg", picture.svg)])
def test_a_page_and_its_picture_are_byte_for_byte_what_they_were(name, drawn):
    """After a wanted change: REDRAW=1 python -m pytest tests/test_page.py, and look at the difference."""
    text = drawn(ladder_cpu(), "ladder_cpu")
    if os.environ.get("REDRAW"):
        (FIXTURES / name).write_text(text, encoding="utf-8")
    assert text == (FIXTURES / name).read_text(encoding="utf-8")


def test_a_script_above_the_stages_has_a_text_of_its_own():
    assert "Tiny Shakespeare" not in page.what_ran(table_from(run("my/train.py", [1.0]), run("s05", [1.0])))


@pytest.mark.parametrize("text, shown", [("_a_b__c_", r"\_a_b\_\_c\_"), ("<a>*[b]`", r"\<a\>\*\[b\]\`")])
def test_special_characters_of_markdown_are_escaped_and_an_underscore_inside_of_a_word_is_none(text, shown):
    assert cells.escaped(text) == shown
