"""The picture of a bench: bars whose colors are verdicts, and two curves of the loss over the seconds of training."""

from harness.bench.picture import COLORS, WIDTH, draw

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
    """Return (color, length) of each bar, without the legend."""
    rectangles = [element for element in elements(table, "rect") if element.get("width") != "13.0"]
    return [(element.get("fill"), float(element.get("width"))) for element in rectangles]


def test_a_bar_is_as_long_as_the_speed_and_its_color_is_the_verdict():
    """s05 and s06 are alike, s07 varies, and s02 should be s01."""
    runs = [run("s01", [1.0] * 2), run("s01 again", [1.0] * 2), run("s02", [0.5] * 2), run("s05", [0.25] * 2)]
    table = table_from(*runs, run("s06", [0.25] * 2), run("s07", [0.25, 0.35]))
    meanings = ["no verdict", "unexpected", "faster", "no difference", "can't be told"]
    assert [color for color, _ in bars(table)] == [COLORS[meaning] for meaning in meanings]
    lengths = [length for _, length in bars(table)]
    assert [length / lengths[0] for length in lengths[:4]] == pytest.approx([1, 2, 4, 4], rel=0.01)
    assert set(meanings) <= set(texts(table))


def test_a_whisker_is_the_spread_of_the_ratio_and_ends_inside_of_the_picture():
    """3 ± 1, at the end of a bar: a third of its length to each side."""
    table = table_from(run("a", [1.0, 1.0]), run("a again", [1.0, 1.0]), run("b", [0.25, 0.5]))
    _, length = bars(table)[1]
    [whisker] = [element for element in elements(table, "line") if element.get("class") == "whisker"]
    x1, x2 = float(whisker.get("x1")), float(whisker.get("x2"))
    assert x2 - x1 == pytest.approx(2 / 3 * length, abs=0.3)
    assert x2 < WIDTH - 60  # its speed stands behind it


def test_failed_rows_and_other_units_have_words_in_place_of_a_bar():
    table = ladder_cpu()
    assert {"out of memory", "failed: RuntimeError: boom | with a bar", "3,846 samples"} <= set(texts(table))
    assert len(bars(table)) == 11  # without s04 and s08, which failed, s09, which never came to a step, and samples


def test_what_a_script_printed_in_color_is_no_broken_picture():
    table = table_from(run("a", [], end=failure("\x1b[31mred\x1b[0m & <b>")))
    assert "failed: [31mred [0m & <b>" in texts(table)


def test_the_curves_are_those_of_the_first_row_and_of_the_fastest_from_the_first_step():
    table = table_from(run("a", [1.0] * 3), run("b", [0.1] * 3), run("c", [0.5] * 3))
    assert [len(curve.get("points").split()) for curve in elements(table, "polyline")] == [7, 7]
    assert texts(table)[-2:] == ["a", "b"]


def test_a_bench_without_a_step_has_a_picture():
    assert "s01" in texts(table_from(rows=[row("s01")]))
