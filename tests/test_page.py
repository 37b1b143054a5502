"""The table of a bench in words: on a page, in its picture, in the terminal, and as an answer."""

from harness.bench import page, picture
from harness.bench.answer import answer

import os
import re
from pathlib import Path

import pytest
from fixtures.records import A100, CPU, failure, probed, row, run, table_from

FIXTURES = Path(__file__).parent / "fixtures"

# the smallest of all models: on CUDA, s01 takes 90 FLOP and 1552 bytes for a token of it
ONE = {"vocab_size": 1, "n_layer": 1, "n_head": 1, "n_embd": 1, "seq_len": 1}
RATES = {"float32": 1e12, "tf32": 3e12, "bfloat16": 6e12, "copy": 1e13}


# whole pages


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
        cpu_run("s04", 1, (), end=failure("out of memory", out_of_memory=True)),
        cpu_run("s05", 3, memory=0.5),
        cpu_run("s06", 2.4),
        cpu_run("s07", 2.42),  # 1.008 times as fast, and the A/A pair is 1.02 apart
        cpu_run("s07 again", 2.42 * 1.02),
        cpu_run("s08", 2.4, (1, 1, 1), end=failure("RuntimeError: <boom> |\nwith a bar")),
        cpu_run("s10", 3, (1, 1, 1, 1), end=None, memory=None),
        cpu_run("s11", 1.5, tokens=2000),  # twice the tokens in 1 / 1.5 of the time
        cpu_run("my/script.py", 5, shape=None, parameters=10_700_000, tf32=True),
        cpu_run("waits.py", 4, unit="sample", wait=0.2, fused=None, loaders=2),
        rates=probed(float32=5e11, bfloat16=1e12, copy=2.5e10),
    )


@pytest.mark.parametrize("name, drawn", [("ladder_cpu.md", page.page), ("ladder_cpu.svg", picture.draw)])
def test_a_page_and_its_picture_are_byte_for_byte_what_they_were(name, drawn):
    """After a wanted change: REDRAW=1 python -m pytest tests/test_page.py, and look at the difference."""
    text = drawn(ladder_cpu(), "ladder_cpu")
    if os.environ.get("REDRAW"):
        (FIXTURES / name).write_text(text, encoding="utf-8")
    assert text == (FIXTURES / name).read_text(encoding="utf-8")


def test_each_figure_of_a_row_stands_in_its_column_and_each_unit_below():
    """The ratios are 1.6, 2.5 and 2 to s02 (an sd of 0.224 in logarithms), and 4, 5 and 5 to s01.

    A token should take 30 + 155.2 ps in s02, and 15 + 167 ps in s03."""
    times = {"s01": (1.0, 1.0, 1.0), "s02": (0.4, 0.5, 0.4), "s02 again": (0.4, 0.5, 0.4), "s03": (0.25, 0.2, 0.2)}
    about = {"shape": ONE, "environment": A100, "batch_size": 1, "shows": {"compile": False}}
    runs = []
    for number in range(3):
        for i, (name, dts) in enumerate(times.items()):
            runs.append(run(name, [dts[number]], number, memory=30 + i, tokens=10**9, **about))
    drawn = page.page(table_from(*runs, rates=probed(**RATES), environment=A100), "x")
    drawn = drawn.replace("\u00a0", " ")
    figures = "5,000,000,000 | 2.00 ± 0.74 | 4.64 | 33.00 | `with torch.autocast(...):`"
    assert f"| [s03](../stages/s03_bf16.py) | {figures} |" in drawn
    assert "| s03 | 1.02 | 200.0 | 7.5 | 4.60 | active: bfloat16 |" in drawn
    assert "6.00 TFLOP/s in bfloat16, 1.00 TFLOP/s in float32, 3.00 TFLOP/s in tf32" in drawn
    assert "a large copy moved 10,000.0 GB/s." in drawn


# cells


@pytest.mark.parametrize(
    "above, row_below, typed",
    [
        ("s01", row("s05", base="s01"), "s02 to s04, `F.scaled_dot_product_attention(...)`"),
        ("s11", row("s05", base="s11"), "`s05`"),
        ("s04", row("s05 --accum 2", script="s05_flash", flags=("--accum", "2"), base="s04"), "`s05 --accum 2`"),
    ],
)
def test_what_you_type_is_a_stages_line_where_it_adds_that_and_names_what_it_skips(above, row_below, typed):
    rows = [row(above), row_below]
    table = table_from(*[run(each.name, [1.0], environment=A100) for each in rows], rows=rows)
    assert table.shown[-1].comparison.change.typed == typed


def test_a_stage_that_does_nothing_here_is_not_among_those_that_a_row_skips_nor_typed():
    """s02 without TF32 units and s04 without a compiler; s07 to s09 are there for the loss."""
    not_compiled = {"shows": {"problem": "no compiler"}}
    dts = {"s01": 1.0, "s01 again": 1.0, "s05": 0.5, "s06": 0.5, "s10": 0.25}
    table = table_from(*[run(name, [dt] * 3, **not_compiled) for name, dt in dts.items()])
    assert table.outcomes["s05"].comparison.change.typed.startswith("s03, ")
    code = [text for heading, text in answer(table) if heading == "what to type"]
    assert code == ["`with torch.autocast(...):`", "`F.scaled_dot_product_attention(...)`", "`AdamW(..., fused=True)`"]


# The answer


def test_the_answer_has_each_kind_of_verdict_the_largest_first():
    """The control is 1 % apart."""
    runs = []
    for number, dt_of_s05 in enumerate((0.16, 0.17, 0.18)):
        dts = {"s01": 0.6, "s02": 0.6, "s03": 0.25, "s03 again": 0.2525, "s04": 1 / 6, "s05": dt_of_s05, "s06": 1 / 6}
        runs += [run(name, [dt], number) for name, dt in (dts | {"s07": 0.2, "s10": 0.1, "s12": 0.125}).items()]
    assert answer(table_from(*runs)) == [
        ("worth it", "s03 autocast 2.40 ± 0.00, s10 with s08 to s09 2.00 ± 0.00, s04 compile 1.50 ± 0.00"),
        (
            "slower",
            "s12 with s11 0.80 ± 0.00 (one process: what DDP itself costs), "
            "s07 clipping 0.83 ± 0.00 (for the loss, not for speed)",
        ),
        ("no difference", "s02 TF32 (this device has no TF32 units)"),
        ("can't tell", "s05 flash attention 0.98 ± 0.07, s06 a padded vocabulary 1.02 ± 0.08"),
        ("to tell more", "twice the rounds, by --rounds 6, make each ± smaller, and take twice as long"),
        ("all together", "s10 is 6.00 ± 0.00 times as fast as s01"),
        ("what to type", "`with torch.autocast(...):`"),
        ("what to type", "`model = torch.compile(model)`"),
        ("what to type", "`AdamW(..., fused=True)`"),
    ]


# What somebody else wrote


def test_a_record_of_somebody_else_puts_no_heading_link_or_html_into_a_page():
    hostile = "x\n\n# heading <b> [link](http://a.b) ` <img src=x>"
    about = dict.fromkeys(("text", "command", "commit", "loss_step"), hostile)
    about["environment"] = CPU | {"device_name": hostile, "torch": hostile}
    failed, slower = run(hostile, [1.0], end=failure(hostile)), run("s04", [2.0], compile_problem=hostile)
    table = table_from(failed, run("s01", [1.0]), slower, **about)
    drawn = page.page(table, "my (first) bench")
    assert drawn.count("\n#") == 0
    outside_of_code = re.sub(r"`[^`\n]*`|\\.", "", drawn)
    links = re.findall(r"\]\((?!../stages)(.*?)\)|<", outside_of_code)
    assert links == ["my%20%28first%29%20bench.svg", "README.md"]
    assert "<b>" not in picture.draw(table, "x")


def test_code_is_on_one_line_in_the_terminal():
    code = f"`A={'1' * 70} python`"
    assert page.beside("type: ", f"{code} or {code}") == f"type: {code}\n      or\n      {code}".replace("`", "")
