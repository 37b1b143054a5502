"""A bench as a picture: a bar for the speed of each row and, below, the training loss over the seconds of training."""

import math
from xml.etree import ElementTree

from .words import failure, speed_cell

WIDTH = 640  # all lengths are in pixels
LETTER = 7  # about
LINE = 20  # from one row to the next
BAR = 13
FIGURES = 90  # right of the longest bar and its whisker, for its speed
NAMES = 118  # right of the curves
PLOT_HEIGHT = 220
MOST_LETTERS = 24  # of a row's label
MOST_LETTERS_OF_A_CURVE = 12
MOST_LETTERS_OF_A_FAILURE = 60
MOST_CURVES = 7
MOST_POINTS = 250  # of a curve
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.heading { font-weight: 600 }
.axis { stroke: #8c959f }
.grid { stroke: #8c959f; opacity: 0.25 }
.whisker { stroke: #24292f }
.bar { fill: #0969da }
.faster { fill: #1a7f37 }
.slower { fill: #cf222e }
.same { fill: #9aa4ae }
.unclear { fill: url(#hatched) }
.unexpected { fill: #bc4c00 }
.hatch { stroke: #9aa4ae; stroke-width: 3 }
.curve { fill: none; stroke-width: 1.6 }
.c0 { stroke: #8c959f } .c1 { stroke: #bf8700 } .c2 { stroke: #cf222e } .c3 { stroke: #1a7f37 }
.c4 { stroke: #8250df } .c5 { stroke: #bf3989 } .c6 { stroke: #0969da }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .whisker { stroke: #e6edf3 }
  .bar { fill: #388bfd }
  .faster { fill: #2ea043 }
  .slower { fill: #f85149 }
  .same { fill: #6e7681 }
  .hatch { stroke: #6e7681 }
  .unexpected { fill: #db6d28 }
  .c1 { stroke: #d29922 } .c2 { stroke: #f85149 } .c3 { stroke: #3fb950 } .c4 { stroke: #a371f7 }
  .c5 { stroke: #f778ba } .c6 { stroke: #58a6ff }
}
"""
LEGEND = {
    "bar": "no verdict",
    "faster": "faster",
    "slower": "slower",
    "same": "no difference",
    "unclear": "can't be told",
    "unexpected": "unexpected",
}


def draw(table, name):
    """Return the text of results/NAME.svg."""
    svg = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
    add(svg, "style", STYLE)
    hatched = add(add(svg, "defs"), "pattern", id="hatched", width=6, height=6, patternUnits="userSpaceOnUse")
    hatched.set("patternTransform", "rotate(45)")
    add(hatched, "line", x1=0, y1=0, x2=0, y2=6, class_="hatch")
    heading = f"{name}: {table.bench['environment']['device_name']}"
    add(svg, "title", heading)
    add(svg, "text", shortened(heading, 80), x=12, y=20, class_="heading")
    unit = table.facts["unit"] if table.facts else "tok"  # of the first row that ran: others have no bars
    longest_label = max(len(shortened(outcome.row.label)) for outcome in table.rows)
    left = 20 + LETTER * max(4, longest_label)  # of the bars and of the curves
    bottom = draw_bars(svg, table.rows, unit, left, 48)
    curves = choose_curves(table.rows, unit)
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
    """Return a label of at most `most` letters, without its middle: rows of one script differ at their ends."""
    if len(label) <= most:
        return label
    half = (most - 1) // 2
    return f"{label[:half]}…{label[-half:]}"


# The bars


def draw_bars(svg, rows, unit, left, top):
    """Draw the heading, a bar for each row, and what their colors mean. Return where the picture goes on."""
    with_bars = [outcome for outcome in rows if has_a_bar(outcome, unit)]
    farthest = max((outcome.tok_per_sec * (1 + half_of_whisker(outcome)) for outcome in with_bars), default=1)
    scale = (WIDTH - left - FIGURES) / farthest
    units = {"tok": "tokens", "sample": "samples", "step": "steps"}
    add(svg, "text", f"{units[unit]} per second", x=left, y=top, class_="heading")
    y = top + 12
    for outcome in rows:
        add(svg, "text", shortened(outcome.row.label), x=left - 8, y=y + 11, text_anchor="end")
        words, end = speed_cell(outcome), left
        if outcome.error:
            words = shortened(failure(outcome.error), MOST_LETTERS_OF_A_FAILURE)
        if has_a_bar(outcome, unit):
            length = scale * outcome.tok_per_sec
            half = length * half_of_whisker(outcome)
            add(svg, "rect", x=left, y=y, width=length, height=BAR, class_=class_of(outcome))
            middle = y + BAR / 2
            add(svg, "line", x1=left + length - half, y1=middle, x2=left + length + half, y2=middle, class_="whisker")
            end = left + length + half
        add(svg, "text", words, x=end + 6, y=y + 11)
        y += LINE
    classes = {class_of(outcome) for outcome in with_bars}
    if classes - {"bar"}:
        y = draw_legend(svg, classes, left, y + 6)
    return y


def has_a_bar(outcome, unit):
    """Tell whether a row has a speed in this unit, and did not fail."""
    return outcome.error is None and outcome.tok_per_sec is not None and outcome.unit == unit


def half_of_whisker(outcome):
    """Return the ± of a row's ratio to the row above, as a share of that ratio, and at most 1; 0 without one."""
    ratio = outcome.ratio
    return min(1.0, ratio.spread / ratio.value) if ratio and ratio.spread else 0.0


def class_of(outcome):
    """Return the class of a bar, whose color shows the verdict on its row: a name in LEGEND."""
    return outcome.verdict.name.lower() if outcome.verdict else "bar"


def draw_legend(svg, classes, left, y):
    """Say what the colors of the bars mean, as far as they occur. Return where the picture goes on."""
    x = left
    for name, words in LEGEND.items():
        if name in classes:
            if x + 24 + LETTER * len(words) > WIDTH:
                x, y = left, y + LINE
            add(svg, "rect", x=x, y=y, width=BAR, height=BAR, class_=name)
            add(svg, "text", words, x=x + BAR + 5, y=y + 11)
            x += 24 + LETTER * len(words)
    return y + LINE


# The curves


def choose_curves(rows, unit):
    """Return the Outcomes of at most MOST_CURVES rows.

    These are the first row, the fastest one, and those that gained most over the row above.
    """
    with_curves = [outcome for outcome in rows if len(outcome.curve) > 1]
    if len(with_curves) <= MOST_CURVES:
        return with_curves
    first, *others = with_curves
    with_bars = [outcome for outcome in with_curves if has_a_bar(outcome, unit)]
    fastest = max(with_bars, key=lambda outcome: outcome.tok_per_sec, default=first)
    others.sort(key=lambda outcome: outcome.ratio.value if outcome.ratio else 0.0, reverse=True)
    chosen = {first.row, fastest.row}
    for outcome in others:
        if len(chosen) < MOST_CURVES:
            chosen.add(outcome.row)
    return [outcome for outcome in with_curves if outcome.row in chosen]


def draw_curves(svg, rows, left, top):
    """Draw the loss of some rows over the seconds of their steps, which are logarithmic. Return the bottom."""
    heading = "training loss, over the seconds of all steps, warm-up included"
    add(svg, "text", heading, x=left, y=top, class_="heading")
    width = WIDTH - left - NAMES
    top += 14
    bottom = top + PLOT_HEIGHT
    all_seconds, losses = [], []
    for outcome in rows:
        all_seconds += [seconds for seconds, _ in outcome.curve]
        losses += [loss for _, loss in outcome.curve]
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
    for seconds in ticks_of_seconds(min(all_seconds), max(all_seconds)):
        add(svg, "line", x1=x_of(seconds), y1=bottom, x2=x_of(seconds), y2=bottom + 4, class_="axis")
        add(svg, "text", f"{seconds:g} s", x=x_of(seconds), y=bottom + 18, text_anchor="middle")
    for number, outcome in enumerate(rows):
        kept = outcome.curve[:: math.ceil(len(outcome.curve) / MOST_POINTS)]
        if kept[-1] != outcome.curve[-1]:
            kept.append(outcome.curve[-1])
        path = " ".join(f"{x_of(seconds):.1f},{y_of(loss):.1f}" for seconds, loss in kept)
        add(svg, "polyline", points=path, class_=f"curve c{number}")
        y = top + 8 + LINE * number
        x = left + width + 8
        add(svg, "line", x1=x, y1=y, x2=x + 14, y2=y, class_=f"curve c{number}")
        add(svg, "text", name_of_curve(outcome.row.label), x=x + 18, y=y + 4)
    return bottom + 28


def name_of_curve(label):
    """Return the end of a label that is too long: rows of one script differ there."""
    return label if len(label) <= MOST_LETTERS_OF_A_CURVE else f"…{label[1 - MOST_LETTERS_OF_A_CURVE :]}"


def ticks_of_seconds(first, last):
    """Return round seconds between two: 1, 3, 10, 30 and so on, and closer ones where these are fewer than two."""
    ticks = []
    for power in range(-4, 7):
        ticks += [seconds for seconds in (10.0**power, 3 * 10.0**power) if first <= seconds <= last]
    return ticks if len(ticks) > 1 else round_numbers(first, last)


def round_numbers(lowest, highest):
    """Return about five round numbers between two numbers."""
    if lowest == highest:
        return [lowest]
    step = 10.0 ** math.floor(math.log10((highest - lowest) / 2))
    while (highest - lowest) / step > 6:
        step *= 2
    return [step * number for number in range(math.ceil(lowest / step), math.floor(highest / step) + 1)]
