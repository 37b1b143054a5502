"""A bench as a picture: a bar for the speed of each row and, below, the training loss over the seconds of training."""

import math
from xml.etree import ElementTree

from .page import failure, speed_cell
from .results import unit_of
from .verdict import Verdict, verdict_on

WIDTH = 640  # all lengths are in pixels
LETTER = 7  # about
LINE = 20  # from one row to the next
BAR = 13
FIGURES = 100  # right of the longest bar
PLOT_HEIGHT = 220
MOST_LETTERS = 24  # of a row's label
MOST_CURVES = 7
MOST_POINTS = 250  # of a curve
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.heading { font-weight: 600 }
.axis { stroke: #8c959f }
.grid { stroke: #8c959f; opacity: 0.25 }
.whisker { stroke: #24292f }
.told { fill: #0969da }
.same { fill: #9aa4ae }
.unclear { fill: url(#hatched) }
.hatch { stroke: #0969da; stroke-width: 3 }
.curve { fill: none; stroke-width: 1.6 }
.c0 { stroke: #8c959f } .c1 { stroke: #bf8700 } .c2 { stroke: #cf222e } .c3 { stroke: #1a7f37 }
.c4 { stroke: #8250df } .c5 { stroke: #bf3989 } .c6 { stroke: #0969da }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .whisker { stroke: #e6edf3 }
  .told { fill: #388bfd }
  .same { fill: #6e7681 }
  .hatch { stroke: #388bfd }
  .c1 { stroke: #d29922 } .c2 { stroke: #f85149 } .c3 { stroke: #3fb950 } .c4 { stroke: #a371f7 }
  .c5 { stroke: #f778ba } .c6 { stroke: #58a6ff }
}
"""
CLASSES = {Verdict.SAME: "same", Verdict.UNCLEAR: "unclear", Verdict.UNEXPECTED: "unclear"}  # all others: "told"
LEGEND = {"told": "faster or slower", "same": "no difference", "unclear": "can't be told"}


def draw(results, name):
    """Return the text of results/NAME.svg."""
    svg = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
    add(svg, "style", STYLE)
    hatched = add(add(svg, "defs"), "pattern", id="hatched", width=6, height=6, patternUnits="userSpaceOnUse")
    hatched.set("patternTransform", "rotate(45)")
    add(hatched, "line", x1=0, y1=0, x2=0, y2=6, class_="hatch")
    heading = f"{name}: {results.bench['environment']['device_name']}"
    add(svg, "title", heading)
    add(svg, "text", shortened(heading, 80), x=12, y=20, class_="heading")
    longest_label = max(len(shortened(row.label)) for row in results.table_rows)
    left = 20 + LETTER * max(4, longest_label)  # of the bars and of the curves
    bottom = draw_bars(svg, results, left, 48)
    curves = choose_curves(results)
    if curves:
        bottom = draw_curves(svg, curves, left, bottom + 34)
    svg.set("viewBox", f"0 0 {WIDTH} {bottom}")
    svg.set("width", str(WIDTH))
    svg.set("height", str(bottom))
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def add(parent, tag, text=None, **attributes):
    """Return a new element below another one. class_ is its class; numbers are rounded to a tenth of a pixel."""
    element = ElementTree.SubElement(parent, tag)
    element.text = text
    for name, value in attributes.items():
        if isinstance(value, float):
            value = round(value, 1)
        element.set(name.rstrip("_").replace("_", "-"), str(value))
    return element


def shortened(label, most=MOST_LETTERS):
    """Return a label of at most so many letters, without its middle: rows of one script differ at their ends."""
    if len(label) <= most:
        return label
    half = (most - 1) // 2
    return f"{label[:half]}…{label[-half:]}"


# The bars


def draw_bars(svg, results, left, top):
    """Draw the heading, a bar for each row, and what their colors mean. Return where the picture goes on."""
    rows = results.table_rows
    facts = results.first_facts()
    unit = unit_of(facts) if facts else "tok"
    speeds = {}
    for row in rows:
        if results.facts(row) and unit_of(results.facts(row)) == unit:
            speeds[row.name] = results.figure(row, "tok_per_sec")
    fastest = max((speed for speed in speeds.values() if speed), default=None)
    longest = WIDTH - left - FIGURES
    units = {"tok": "tokens", "sample": "samples", "step": "steps"}
    add(svg, "text", f"{units[unit]} per second", x=left, y=top, class_="heading")
    classes = []
    y = top + 12
    for row in rows:
        add(svg, "text", shortened(row.label), x=left - 8, y=y + 11, text_anchor="end")
        speed = speeds.get(row.name)
        end = 0.0
        if speed:
            verdict = verdict_on(results, row)
            classes.append(CLASSES.get(verdict, "told"))
            end = longest * speed / fastest
            add(svg, "rect", x=left, y=y, width=end, height=BAR, class_=classes[-1])
            end = max(end, draw_whisker(svg, results, row, left, end, y))
        error = results.error(row)
        words = speed_cell(results, row)
        if error:
            words = failure(error)
        add(svg, "text", shortened(words, 60 if error else MOST_LETTERS), x=left + end + 6, y=y + 11)
        y += LINE
    if set(classes) != {"told"}:
        y = draw_legend(svg, classes, left, y + 6)
    return y


def draw_whisker(svg, results, row, left, length, y):
    """Draw the ± of a row's ratio to the row above, at the end of its bar. Return how far it reaches, 0 without one."""
    ratio = results.compare(row, results.above(row))
    if ratio is None or not ratio.spread:
        return 0.0
    half = min(length * ratio.spread / ratio.value, WIDTH - left - FIGURES + 10 - length)
    middle = y + BAR / 2
    add(svg, "line", x1=left + length - half, y1=middle, x2=left + length + half, y2=middle, class_="whisker")
    return length + half


def draw_legend(svg, classes, left, y):
    """Say what the colors of the bars mean, as far as they occur. Return where the picture goes on."""
    x = left
    for name, words in LEGEND.items():
        if name in classes:
            add(svg, "rect", x=x, y=y, width=BAR, height=BAR, class_=name)
            add(svg, "text", words, x=x + BAR + 5, y=y + 11)
            x += 36 + LETTER * len(words)
    return y + LINE


# The curves


def choose_curves(results):
    """Return [(Row, [(seconds, loss)])] of at most MOST_CURVES rows.

    These are the first row, the fastest one, and those that gained most over the row above.
    """
    curves = {}
    for row in results.table_rows:
        points = points_of(results, row)
        if len(points) > 1:
            curves[row] = points
    rows = list(curves)
    if len(rows) <= MOST_CURVES:
        return list(curves.items())
    fastest = max(rows, key=lambda row: results.figure(row, "tok_per_sec") or 0)
    others = [row for row in rows[1:] if row is not fastest]
    others.sort(key=lambda row: gain(results, row), reverse=True)
    chosen = [rows[0], fastest, *others[: MOST_CURVES - 2]]
    return [(row, points) for row, points in curves.items() if row in chosen]


def gain(results, row):
    """Return how many times as fast as the row above a row is; 0 where that is not known."""
    ratio = results.compare(row, results.above(row))
    return ratio.value if ratio else 0.0


def points_of(results, row):
    """Return the loss of each step of a row's first run, and the seconds that all steps up to it took."""
    points = []
    seconds = 0.0
    for run in results.runs_of(row)[:1]:
        for step in run.steps:
            seconds += step["dt"]
            if step["loss"] is not None:
                points.append((seconds, step["loss"]))
    return points


def draw_curves(svg, curves, left, top):
    """Draw the loss of some rows over the seconds of their steps, which are logarithmic. Return the bottom."""
    heading = "training loss, over the seconds of all steps, warm-up included"
    add(svg, "text", heading, x=left, y=top, class_="heading")
    width = WIDTH - left - 76  # beside the names of the curves
    top += 14
    bottom = top + PLOT_HEIGHT
    all_seconds = [seconds for _, points in curves for seconds, _ in points]
    losses = [loss for _, points in curves for _, loss in points]
    first, last = math.log(min(all_seconds)), math.log(max(all_seconds))
    lowest, highest = min(losses), max(losses)

    def x_of(seconds):
        return left + width * (math.log(seconds) - first) / ((last - first) or 1)

    def y_of(loss):
        return bottom - PLOT_HEIGHT * (loss - lowest) / ((highest - lowest) or 1)

    for loss in round_numbers(lowest, highest):
        add(svg, "line", x1=left, y1=y_of(loss), x2=left + width, y2=y_of(loss), class_="grid")
        add(svg, "text", f"{loss:g}", x=left - 8, y=y_of(loss) + 4, text_anchor="end")
    add(svg, "line", x1=left, y1=bottom, x2=left + width, y2=bottom, class_="axis")
    for power in range(-4, 7):
        for seconds in (10.0**power, 3 * 10.0**power):
            if first <= math.log(seconds) <= last:
                add(svg, "line", x1=x_of(seconds), y1=bottom, x2=x_of(seconds), y2=bottom + 4, class_="axis")
                add(svg, "text", f"{seconds:g} s", x=x_of(seconds), y=bottom + 18, text_anchor="middle")
    for place, (row, points) in enumerate(curves):
        kept = points[:: 1 + len(points) // MOST_POINTS]
        path = " ".join(f"{x_of(seconds):.1f},{y_of(loss):.1f}" for seconds, loss in kept)
        add(svg, "polyline", points=path, class_=f"curve c{place}")
        y = top + 8 + LINE * place
        x = left + width + 8
        add(svg, "line", x1=x, y1=y, x2=x + 14, y2=y, class_=f"curve c{place}")
        add(svg, "text", shortened(row.label, 6), x=x + 18, y=y + 4)
    return bottom + 28


def round_numbers(lowest, highest):
    """Return about five round numbers between two numbers."""
    if lowest == highest:
        return [lowest]
    step = 10.0 ** math.floor(math.log10((highest - lowest) / 2))
    while (highest - lowest) / step > 6:
        step *= 2
    return [step * number for number in range(math.ceil(lowest / step), math.floor(highest / step) + 1)]
