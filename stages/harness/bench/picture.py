"""A bench as a picture: a bar for the speed of each row and, below, the training loss by tokens."""

from html import escape

from .ratios import Verdict
from .rows import gains_cpu_memory
from .words import UNITS, failure, is_in_brackets, speed_cell

WIDTH = 640  # all lengths are in pixels
LETTER = 8.4  # of a wide font, as DejaVu Sans
LINE = 20  # from one row to the next
TOP = 40  # of the first bar
BAR = 13
FIGURES = 150  # right of the bars and curves, for words
MOST_LETTERS = 26  # left of a bar
MOST_LETTERS_OF_A_FAILURE = 44
PLOT_LEFT = 48
PLOT_HEIGHT = 160
FEWEST_NATS = 1  # of the axis of the loss, so that a loss that hardly falls is seen to do so
# The curves of the first row, of the last, and of two more.
STROKES = ('stroke-width="1.2"', 'stroke-width="2.5"', 'stroke-dasharray="7 3"', 'stroke-dasharray="2 3"')
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
</style>
<defs><pattern id="hatched" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<path d="M0 0V6" stroke="#8c959f" stroke-width="6"/></pattern></defs>"""


def draw(table, name):
    """Return the text of results/NAME.svg."""
    left = 16 + LETTER * max(len(label_of(outcome)) for outcome in table.rows)  # of the bars
    ended_well = [outcome for outcome in table.rows if outcome.tok_per_sec and not outcome.error]
    with_bars = [outcome for outcome in ended_well if outcome.unit == table.unit]
    farthest = max((outcome.tok_per_sec + half_of_whisker(outcome) for outcome in with_bars), default=1)
    scale = (WIDTH - left - FIGURES) / farthest
    device = table.bench["environment"]["device_name"]
    title = f"{name}: {device}, {UNITS[table.unit]}/s, x above (± as a line)"
    parts = [text(8, 8, shortened(title, int(WIDTH / LETTER)))]
    for number, outcome in enumerate(table.rows):
        y = TOP + LINE * number
        parts.append(text(left - 8, y, label_of(outcome), anchor="end"))
        end = left
        if outcome in with_bars:
            length, half = scale * outcome.tok_per_sec, scale * half_of_whisker(outcome)
            end = left + length + half
            parts.append(rectangle(left, y, length, COLORS[outcome.verdict]))
            if half:
                parts.append(line(end - 2 * half, y + BAR / 2, end, y + BAR / 2))
        parts.append(text(end + 6, y, words_beside(outcome)))
    bottom = TOP + LINE * len(table.rows) + 6
    parts += legend(with_bars, bottom)
    bottom += LINE
    with_curves = [outcome for outcome in table.rows if len(outcome.curve) > 1 and outcome.unit == table.unit]
    if any(outcome.curve[-1][1] for outcome in with_curves):
        parts += curves(with_curves, UNITS[table.unit], bottom + LINE)
        bottom += PLOT_HEIGHT + 3 * LINE
    size = f'viewBox="0 0 {WIDTH} {bottom}" width="{WIDTH}" height="{bottom}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>'
    return "\n".join([opening, HEAD, *parts, "</svg>"]) + "\n"


def label_of(outcome):
    """Return what stands left of a bar: the row's title, and its technique where the title does not say it."""
    row = outcome.row
    if outcome.base and gains_cpu_memory(row, outcome.base.row):
        return f"{row.title} memory variables"
    if row.stage and row.stage.technique and row.title == row.stage.short:
        return f"{row.title} {row.stage.technique}"
    return shortened(row.title, MOST_LETTERS)


def words_beside(outcome):
    """Return the speed of a row and its ratio to the row above, in brackets as in the table, or why it failed."""
    if outcome.error:
        return shortened(failure(outcome.error), MOST_LETTERS_OF_A_FAILURE)
    if outcome.ratio is None:
        return speed_cell(outcome)
    factor = f"x {outcome.ratio.value:.2f}"
    if is_in_brackets(outcome):
        factor = f"({factor})"
    return f"{speed_cell(outcome)}\u00a0\u00a0 {factor}"  # an SVG would fold blanks


def half_of_whisker(outcome):
    """Return how far a row's speed may be off, by the ± of its ratio to the row above; 0 without one."""
    ratio = outcome.ratio
    if ratio is None or ratio.spread is None:
        return 0
    return outcome.tok_per_sec * min(1, ratio.spread / ratio.value)


def legend(rows, y):
    """Return elements of SVG that say what the colors of the bars mean, as far as they occur."""
    parts = []
    x = 8
    for verdict in dict.fromkeys(outcome.verdict for outcome in rows):
        words = verdict.value if verdict else "no verdict"
        parts += [rectangle(x, y, BAR, COLORS[verdict]), text(x + BAR + 5, y, words)]
        x += 34 + LETTER * len(words)
    return parts


def curves(rows, unit, top):
    """Return elements of SVG with the training loss by tokens: of the first row, the last, and others that stand apart.

    unit: what the tokens are, "tokens" or "samples".
    """
    most = max(outcome.curve[-1][1] for outcome in rows)
    losses = []
    for outcome in rows:
        losses += [loss for _, _, loss in outcome.curve]
    highest = max(losses)
    lowest = min(*losses, highest - FEWEST_NATS)
    right, bottom = WIDTH - FIGURES, top + PLOT_HEIGHT
    x_scale, y_scale = (right - PLOT_LEFT) / most, PLOT_HEIGHT / (highest - lowest)
    parts = [
        line(PLOT_LEFT, top, PLOT_LEFT, bottom),
        line(PLOT_LEFT, bottom, right, bottom),
        text(PLOT_LEFT - 6, top - 6, f"{highest:.1f}", anchor="end"),
        text(PLOT_LEFT - 6, bottom - 6, f"{lowest:.1f}", anchor="end"),
        text(PLOT_LEFT, bottom + 6, "0"),
        text(right, bottom + 6, f"{most:,.0f} {unit}", anchor="end"),
        text(right, top - 6, "training loss", anchor="end"),
    ]
    ends = []
    for outcome in [rows[0], *reversed(rows[1:])]:
        points = []
        for _, tokens, loss in outcome.curve:
            points.append((PLOT_LEFT + x_scale * tokens, bottom - y_scale * (loss - lowest)))
        x, y = points[-1]
        y = min(y, bottom - LINE / 2)  # its title stands on the axis
        # the titles of the first row and the last may have to move apart, and a third curve must not touch them
        near = [end_y for end_x, end_y in ends if abs(end_y - y) < LINE and abs(end_x - x) < FIGURES]
        if len(ends) == len(STROKES) or (len(ends) > 1 and near):
            continue
        if near:
            y = near[0] - LINE
        coordinates = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{coordinates}" {STROKES[len(ends)]}/>')
        parts.append(text(x + 6, y - 6, shortened(outcome.row.title, int(FIGURES / LETTER))))
        ends.append((x, y))
    return parts


def text(x, y, words, anchor="start"):
    """Return words as an element of SVG, on the line of a bar whose top is at y."""
    return f'<text x="{x:.1f}" y="{y + 11:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def rectangle(x, y, width, color):
    """Return a bar as an element of SVG."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" style="fill: {color}"/>'


def line(x1, y1, x2, y2):
    """Return a line as an element of SVG."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def shortened(label, most):
    """Return a label of at most `most` letters, without its middle: rows of one script differ at their ends."""
    if len(label) <= most:
        return label
    half = (most - 1) // 2
    return f"{label[:half]}…{label[-half:]}"
