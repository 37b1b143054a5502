"""The picture of a bench: bars whose colors are verdicts, and curves of the loss over the seconds of training."""

from harness.bench.picture import WIDTH, draw

from xml.etree import ElementTree

import pytest
from fixtures.records import failure, row, run, table_from
from test_page import ladder_cpu

SVG = "{http://www.w3.org/2000/svg}"


def elements(table, tag):
    """Return the elements of one kind in the picture of a bench."""
    return ElementTree.fromstring(draw(table, "a name")).findall(SVG + tag)


def texts(table):
    """Return all that is written in the picture of a bench."""
    return [element.text for element in elements(table, "text")]


def bars(table):
    """Return (class, length) of each bar, without the legend."""
    rectangles = [element for element in elements(table, "rect") if element.get("width") != "13"]
    return [(element.get("class"), float(element.get("width"))) for element in rectangles]


def test_a_bar_is_as_long_as_the_speed_and_its_color_is_the_verdict():
    """s05 and s06 are alike, s07 varies, and s02 should be s01."""
    runs = [run("s01", [1.0] * 2), run("s01 again", [1.0] * 2), run("s02", [0.5] * 2), run("s05", [0.25] * 2)]
    table = table_from(*runs, run("s06", [0.25] * 2), run("s07", [0.25, 0.35]))
    classes = [name for name, _ in bars(table)]
    lengths = [length for _, length in bars(table)]
    assert classes == ["bar", "unexpected", "faster", "same", "unclear"]
    assert [length / lengths[0] for length in lengths[:4]] == pytest.approx([1, 2, 4, 4], rel=0.01)
    assert {"no verdict", "faster", "no difference", "can't be told", "unexpected"} <= set(texts(table))


def test_a_whisker_is_the_spread_of_the_ratio_and_ends_inside_of_the_picture():
    """3 ± 1, at the end of a bar: a third of its length to each side."""
    table = table_from(run("a", [1.0, 1.0]), run("a again", [1.0, 1.0]), run("b", [0.25, 0.5]))
    length = bars(table)[1][1]
    whisker = [element for element in elements(table, "line") if element.get("class") == "whisker"][1]
    x1, x2 = float(whisker.get("x1")), float(whisker.get("x2"))
    assert x2 - x1 == pytest.approx(2 / 3 * length, abs=0.3)
    assert x2 < WIDTH - 60  # its speed stands behind it


def test_failed_rows_and_other_units_have_words_in_place_of_a_bar():
    table = ladder_cpu()
    words = texts(table)
    assert "out of memory" in words
    assert "failed: RuntimeError: boom | with a bar" in words
    assert "3,846 samples" in words
    assert len(bars(table)) == 11  # without s04 and s08, which failed, s09, which never came to a step, and samples


def test_what_a_script_printed_in_color_is_no_broken_picture():
    table = table_from(run("a", [], end=failure("\x1b[31mred\x1b[0m & <b>")))
    assert "failed: [31mred [0m & <b>" in texts(table)


def test_curves_go_from_the_first_step_by_seconds_and_have_names_of_their_own():
    """make amp: two of the three rows differ at the end of a long command only."""
    rows = [row(f"s03 --amp-dtype {dtype}", script="s03_bf16") for dtype in ("float32", "bfloat16", "float16")]
    table = table_from(*[run(each.name, [1.0] * 3) for each in rows], rows=rows)
    curves = elements(table, "polyline")
    assert [len(curve.get("points").split()) for curve in curves] == [7, 7, 7]
    names = [text for text in texts(table) if text.startswith("…")]
    assert len(names) == len(set(names)) == 3
    assert {"1 s", "3 s"} <= set(texts(table))


def test_of_many_rows_the_first_the_fastest_and_the_largest_gains_have_curves():
    dts = [1.0, 0.9, 0.45, 0.44, 0.22, 0.21, 0.1, 0.09, 0.045, 0.044, 0.2]
    table = table_from(*[run(f"r{number}", [dt] * 2) for number, dt in enumerate(dts)])
    named = [text for text in texts(table) if text.startswith("r")][len(dts) :]
    assert named == ["r0", "r1", "r2", "r4", "r6", "r8", "r9"]


def test_a_bench_without_a_step_has_a_picture():
    assert "s01" in texts(table_from(rows=[row("s01")]))
