"""The table of a bench in words: on a page, in its picture, and as an answer."""

from harness.bench import page, picture
from harness.bench.answer import answer

import os
from pathlib import Path

import pytest
from fixtures.records import failure, probed, run, table_from

FIXTURES = Path(__file__).parent / "fixtures"

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


# The answer


def test_the_answer_has_each_kind_of_verdict_the_largest_first():
    """The control is 1 % apart."""
    runs = []
    for number, dt_of_s05 in enumerate((0.16, 0.17, 0.18)):
        dts = {"s01": 0.6, "s02": 0.6, "s03": 0.25, "s03 again": 0.2525, "s04": 1 / 6, "s05": dt_of_s05, "s06": 1 / 6}
        runs += [run(name, [dt], number) for name, dt in (dts | {"s07": 0.2, "s10": 0.1, "s12": 0.125}).items()]
    assert answer(table_from(*runs)) == [
        ("worth it", "s03 autocast 2.40 ± 0.00, s10 with s08, s09 2.00 ± 0.00, s04 compile 1.50 ± 0.00"),
        (
            "slower",
            "s12 with s11 0.80 ± 0.00 (one process: what DDP itself costs), "
            "s07 clipping 0.83 ± 0.00 (for the loss, not for speed)",
        ),
        ("no difference", "s02 TF32 (this device has no TF32 units)"),
        ("can't tell", "s05 flash attention 0.98 ± 0.07, s06 a padded vocabulary 1.02 ± 0.08"),
        ("to tell more", "--rounds 6 makes each ± smaller, and takes twice as long"),
        ("all together", "s10 is 6.00 ± 0.00 times as fast as s01"),
    ]
