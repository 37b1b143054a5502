"""The picture of a bench: bars whose colors are verdicts, and curves of the loss by tokens."""

from harness.bench.picture import COLORS, WIDTH, draw
from harness.bench.ratios import Verdict

import re
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
    return [(element.get("style").split("fill: ")[1], float(element.get("width"))) for element in rectangles]


def test_a_bar_is_as_long_as_the_speed_its_color_is_the_verdict_and_its_factor_stands_beside_it():
    """s06 and s07 are alike, and s08 varies."""
    runs = [run("s01", [1.0] * 3), run("s01 again", [1.0] * 3), run("s05", [0.25] * 3), run("s06", [0.25] * 3)]
    table = table_from(*runs, run("s07", [0.25, 0.3, 0.35]), run("s12", [1.0] * 3))
    meanings = [None, Verdict.FASTER, Verdict.SAME, Verdict.UNCLEAR, Verdict.SLOWER]
    assert [color for color, _ in bars(table)] == [COLORS[meaning] for meaning in meanings]
    lengths = [length for _, length in bars(table)]
    assert [length / lengths[0] for length in lengths[:3]] == pytest.approx([1, 4, 4], rel=0.01)
    assert {"s05 with s03 to s04", "s06 a padded vocabulary"} <= set(texts(table))
    assert {"4,000\u00a0\u00a0 x 4.00", "4,000\u00a0\u00a0 (x 1.00)"} <= set(texts(table))
    assert {"no verdict", "worth it", "no difference", "can't be told"} <= set(texts(table))


def brightness(color):
    """Return the relative luminance of a color, as "#ffffff", by WCAG's formula."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_colors_of_the_verdicts_differ_in_gray_print():
    """Each is at least 1.5 times as bright as the next darker one, with 0.05 for the light that paper reflects."""
    levels = sorted(brightness(color) + 0.05 for color in COLORS.values() if color.startswith("#"))
    assert all(brighter > 1.5 * darker for darker, brighter in zip(levels, levels[1:], strict=False))


def test_a_whisker_is_the_spread_of_the_ratio_and_ends_inside_of_the_picture():
    """4, 3 and 2: 3 ± 2.48, at the end of a bar."""
    table = table_from(run("a", [1.0] * 3), run("a again", [1.0] * 3), run("b", [1 / 4, 1 / 3, 1 / 2]))
    _, length = bars(table)[1]
    whisker = elements(table, "line")[0]
    x1, x2 = float(whisker.get("x1")), float(whisker.get("x2"))
    assert x2 - x1 == pytest.approx(2 * 2.484 / 3 * length, abs=0.5)
    assert x2 < WIDTH - 60  # its speed stands behind it


def test_failed_rows_and_other_units_have_words_in_place_of_a_bar():
    table = ladder_cpu()
    assert {"out of memory", "failed: RuntimeError: boom | with a bar", "3,846 samples"} <= set(texts(table))
    assert len(bars(table)) == 11  # without s04 and s08, which failed, s09, which never came to a step, and samples


def test_what_a_script_printed_in_color_is_no_broken_picture():
    table = table_from(run("a", [], end=failure("\x1b[31mred\x1b[0m & <b>")))
    assert "failed: [31mred [0m & <b>" in texts(table)


def curves(table):
    """Return {title: points} of the curves of a picture, whose titles are its last texts."""
    lines = elements(table, "polyline")
    points = [re.findall(r"([\d.]+),([\d.]+)", line.get("points")) for line in lines]
    return dict(zip(texts(table)[-len(lines) :], points, strict=True))


def test_the_curves_are_those_of_the_first_row_and_the_last():
    """c takes twice the tokens in a step."""
    drawn = curves(table_from(run("a", [1.0] * 3), run("b", [0.5] * 3), run("c", [0.5] * 3, tokens=2000)))
    assert [*drawn] == ["a", "c"]
    assert len(drawn["a"]) == 7
    assert float(drawn["c"][-1][0]) - 48 == pytest.approx(2 * (float(drawn["a"][-1][0]) - 48), abs=0.2)


def test_a_loss_that_hardly_falls_looks_so():
    """It falls by 0.6, and the axis has at least one nat on 160 pixels."""
    points = curves(table_from(run("a", [1.0] * 3)))["a"]
    assert float(points[-1][1]) - float(points[0][1]) == pytest.approx(0.6 * 160, abs=0.2)


def test_a_bench_without_a_step_has_a_picture():
    assert "s01" in texts(table_from(rows=[row("s01")]))
