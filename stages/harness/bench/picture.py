"""A bench as a picture: a bar for the speed of each row and, below, the training loss by tokens."""

from html import escape

from ..figures import UNITS
from .cells import bracketed, failure, speed_cell
from .ratios import Verdict
from .rows import shortened

WIDTH = 640  # all lengths are in pixels
LETTER = 8.4  # of a wide font, as DejaVu Sans
LINE = 20  # from one row to the next
TOP = 40  # of the first bar
BAR = 13
RIGHT_MARGIN = 150  # right of the bars and curves, for words
MOST_LETTERS = 26  # left of a bar
MOST_LETTERS_OF_A_FAILURE = 44
MOST_LETTERS_OF_A_CURVE = 13
PLOT_LEFT = 48
PLOT_HEIGHT = 160
FEWEST_NATS = 1  # of the axis of the loss, so that a loss that hardly falls is seen to do so
# Their brightness differs, for gray print.
COLORS = {
    Verdict.FASTER: "#3fb950",
    Verdict.SLOWER: "#8e1519",
    Verdict.SAME: "#d0d7de",
    Verdict.UNCLEAR: "url(#hatched)",
    None: "#0969da",
}
HEAD = """<style>
text { font: 13px system-ui, sans-serif; fill: #24292f }
line, polyline, rect { stroke: #24292f; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } line, polyline, rect { stroke: #e6edf3 } }
.first { stroke: #8c959f; stroke-width: 4 }
</style>
<defs><pattern id="hatched" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<path d="M0 0V6" stroke="#8c959f" stroke-width="6"/></pattern></defs>"""


def draw(table, name):
    """Return the text of results/NAME.svg."""
    unit = UNITS[table.unit]
    title = f"{name}: {table.bench['environment']['device_name']}, {unit}/s, x above"
    with_bars = [each for each in table.shown if each.tok_per_sec and not each.error and each.unit == table.unit]
    with_curves = [outcome for outcome in with_bars if points_of(outcome)]
    parts = [text(8, 8, shortened(title, int(WIDTH / LETTER))), *bars(table.shown, with_bars)]
    bottom = TOP + LINE * (len(table.shown) + 1) + 6
    if with_curves:
        parts += curves(with_curves[0], with_curves[-1], unit, bottom + LINE)
        bottom += PLOT_HEIGHT + 3 * LINE
    size = f'viewBox="0 0 {WIDTH} {bottom}" width="{WIDTH}" height="{bottom}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>'
    return "\n".join([opening, HEAD, *parts, "</svg>"]) + "\n"


def bars(outcomes, with_bars):
    """Return elements of SVG with a line for each row, and below them what the colors of the bars mean.

    A bar is as long as the speed. A row that failed, or counts something else than the first, has words alone.
    with_bars: the Outcomes of all others.
    """
    labels = [shortened(outcome.comparison.change.title, MOST_LETTERS) for outcome in outcomes]
    left = 16 + LETTER * max(len(label) for label in labels)
    farthest = max((outcome.tok_per_sec + half_of_whisker(outcome) for outcome in with_bars), default=1)
    scale = (WIDTH - left - RIGHT_MARGIN) / farthest
    parts = []
    for number, outcome in enumerate(outcomes):
        y = TOP + LINE * number
        parts.append(text(left - 8, y, labels[number], anchor="end"))
        end = left
        if outcome in with_bars:
            length, half = scale * outcome.tok_per_sec, scale * half_of_whisker(outcome)
            end = left + length + half
            parts.append(rectangle(left, y, length, COLORS[outcome.comparison.verdict]))
            if half:
                parts.append(line(end - 2 * half, y + BAR / 2, end, y + BAR / 2))
        parts.append(text(end + 6, y, words_beside(outcome)))
    return parts + legend([outcome.comparison.verdict for outcome in with_bars], TOP + LINE * len(outcomes) + 6)


def legend(verdicts, y):
    """Return elements of SVG that say what the colors of some Verdicts mean; none where all are None."""
    if not any(verdicts):
        return []
    parts = []
    x = 8
    for verdict in dict.fromkeys(verdicts):  # each once
        words = verdict.value if verdict else "no verdict"
        parts += [rectangle(x, y, BAR, COLORS[verdict]), text(x + BAR + 5, y, words)]
        x += 34 + LETTER * len(words)
    return parts


def words_beside(outcome):
    """Return the speed of a row and its ratio to the row above, in brackets as in the table, or why it failed."""
    ratio = outcome.comparison.ratio
    if outcome.error:
        return shortened(failure(outcome.error), MOST_LETTERS_OF_A_FAILURE)
    if ratio is None:
        return speed_cell(outcome)
    factor = bracketed(f"x {ratio.value:.2f}", outcome.comparison.verdict)
    return f"{speed_cell(outcome)}\u00a0\u00a0 {factor}"  # an SVG would fold blanks


def half_of_whisker(outcome):
    """Return how far a row's speed may be off, by the ± of its ratio to the row above; 0 without one."""
    ratio = outcome.comparison.ratio
    if ratio is None or ratio.spread is None:
        return 0
    return outcome.tok_per_sec * min(1, ratio.spread / ratio.value)


def points_of(outcome):
    """Return the training loss of a row by tokens, [(tokens up to a step, loss of the step)]."""
    points = []
    tokens = 0
    for step in outcome.runs[0].steps:
        tokens += step["tokens"]
        if tokens and step["loss"] is not None:
            points.append((tokens, step["loss"]))
    return points


def curves(first, last, unit, top):
    """Return elements of SVG with the training loss of two Outcomes by tokens. They may be one and the same.

    unit: what the tokens are, "tokens", "samples" or "steps".
    """
    all_points = points_of(first) + points_of(last)
    losses = [loss for _, loss in all_points]
    most = max(tokens for tokens, _ in all_points)
    highest = max(losses)
    lowest = min(*losses, highest - FEWEST_NATS)
    right, bottom = WIDTH - RIGHT_MARGIN, top + PLOT_HEIGHT
    x_scale, y_scale = (right - PLOT_LEFT) / most, PLOT_HEIGHT / (highest - lowest)
    parts = [
        line(PLOT_LEFT, top, PLOT_LEFT, bottom),
        line(PLOT_LEFT, bottom, right, bottom),
        text(PLOT_LEFT - 6, top - 6, f"{highest:.1f}", anchor="end"),
        text(PLOT_LEFT - 6, bottom - 6, f"{lowest:.1f}", anchor="end"),
        text(PLOT_LEFT, bottom + 6, "0"),
        text(right, bottom + 6, f"{most:,.0f} {unit}", anchor="end"),
        text(right + 8, top - 6, "training loss"),
    ]
    for number, (outcome, name) in enumerate({first: "first", last: "last"}.items(), 1):
        y = top + LINE * number
        places = []
        for tokens, loss in points_of(outcome):
            places.append(f"{PLOT_LEFT + x_scale * tokens:.1f},{bottom - y_scale * (loss - lowest):.1f}")
        parts.append(f'<polyline class="{name}" points="{" ".join(places)}"/>')
        parts.append(line(right + 8, y, right + 30, y, name))
        parts.append(text(right + 36, y - 6, shortened(outcome.row.title, MOST_LETTERS_OF_A_CURVE)))
    return parts


def text(x, y, words, anchor="start"):
    """Return words as an element of SVG, on the line of a bar whose top is at y."""
    return f'<text x="{x:.1f}" y="{y + 11:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def rectangle(x, y, width, color):
    """Return a bar as an element of SVG."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" style="fill: {color}"/>'


def line(x1, y1, x2, y2, name=""):
    """Return a line as an element of SVG. name: its class, of which HEAD says how it looks."""
    return f'<line class="{name}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
