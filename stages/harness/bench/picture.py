"""A bench as a picture: a bar for the speed of each row and, below, the loss of the first row and of the fastest."""

from html import escape

from .ratios import Verdict
from .words import failure, speed_cell

WIDTH = 640  # all lengths are in pixels
LETTER = 7  # about
LINE = 20  # from one row to the next
TOP = 40  # of the first bar
BAR = 13
FIGURES = 90  # right of the longest bar and its whisker, for its speed
MOST_LETTERS = 24  # of a row's label
MOST_LETTERS_OF_A_FAILURE = 60
PLOT_HEIGHT = 160
COLORS = {
    "faster": "#1a7f37",
    "slower": "#cf222e",
    "no difference": "#8c959f",
    "can't be told": "url(#hatched)",
    "unexpected": "#bc4c00",
    "no verdict": "#0969da",
}
HEAD = """<style>
text { font: 13px system-ui, sans-serif; fill: #24292f }
.whisker { stroke: #24292f; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .whisker { stroke: #e6edf3 } }
</style>
<defs><pattern id="hatched" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<line y2="6" stroke="#8c959f" stroke-width="6"/></pattern></defs>"""


def draw(table, name):
    """Return the text of results/NAME.svg."""
    left = 20 + LETTER * max(len(shortened(outcome.row.label)) for outcome in table.rows)  # of bars and curves
    unit = table.facts["unit"] if table.facts else "tok"  # of the first row that ran: others have no bars
    ended_well = [outcome for outcome in table.rows if outcome.tok_per_sec and not outcome.error]
    with_bars = [outcome for outcome in ended_well if outcome.unit == unit]
    fastest = max(with_bars, key=lambda outcome: outcome.tok_per_sec, default=None)
    farthest = max((outcome.tok_per_sec + half_of_whisker(outcome) for outcome in with_bars), default=1)
    scale = (WIDTH - left - FIGURES) / farthest
    parts = [text(12, 8, f"{name}: {table.bench['environment']['device_name']}, {unit}/sec")]
    for number, outcome in enumerate(table.rows):
        y = TOP + LINE * number
        parts.append(text(left - 8, y, shortened(outcome.row.label), anchor="end"))
        end = left
        if outcome in with_bars:
            length, half = scale * outcome.tok_per_sec, scale * half_of_whisker(outcome)
            end = left + length + half
            parts.append(rectangle(left, y, length, color_of(outcome)))
            if half:
                parts.append(whisker(end - 2 * half, end, y + BAR / 2))
        words = shortened(failure(outcome.error), MOST_LETTERS_OF_A_FAILURE) if outcome.error else speed_cell(outcome)
        parts.append(text(end + 6, y, words))
    bottom = TOP + LINE * len(table.rows) + 6
    parts += legend(with_bars, left, bottom)
    with_curves = [outcome for outcome in (table.rows[0], fastest) if outcome and len(outcome.curve) > 1]
    if with_curves:
        parts += curves(with_curves, left, bottom + 2 * LINE)
        bottom += PLOT_HEIGHT + 3 * LINE
    size = f'viewBox="0 0 {WIDTH} {bottom + LINE}" width="{WIDTH}" height="{bottom + LINE}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>'
    return "\n".join([opening, HEAD, *parts, "</svg>"]) + "\n"


def half_of_whisker(outcome):
    """Return how far a row's speed may be off, by the ± of its ratio to the row above; 0 without one."""
    ratio = outcome.ratio
    if ratio is None or ratio.spread is None:
        return 0
    return outcome.tok_per_sec * min(1, ratio.spread / ratio.value)


def legend(rows, x, y):
    """Return elements of SVG that say what the colors of the bars mean, as far as they occur."""
    parts = []
    for words in dict.fromkeys(words_on_color(outcome) for outcome in rows):
        parts += [rectangle(x, y, BAR, COLORS[words]), text(x + BAR + 5, y, words)]
        x += 30 + LETTER * len(words)
    return parts


def curves(rows, left, top):
    """Return elements of SVG with the training loss of some rows, over the seconds of all their steps."""
    longest = max(outcome.curve[-1][0] for outcome in rows)
    losses = []
    for outcome in rows:
        losses += [loss for _, loss in outcome.curve]
    lowest, highest = min(losses), max(losses)
    width, bottom = WIDTH - left - FIGURES, top + PLOT_HEIGHT
    parts = [
        text(left - 8, top - 6, f"{highest:.1f}", anchor="end"),
        text(left - 8, bottom - 6, f"{lowest:.1f}", anchor="end"),
        text(left, bottom + 8, f"training loss, over {longest:.0f} s of all steps, warm-up included"),
    ]
    for outcome in rows:
        points = []
        for seconds, loss in outcome.curve:
            x = left + width * seconds / longest
            y = bottom - PLOT_HEIGHT * (loss - lowest) / ((highest - lowest) or 1)
            points.append(f"{x:.1f},{y:.1f}")
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke-width="1.5" stroke="{color_of(outcome)}"/>'
        )
        parts.append(text(x + 6, y - 6, shortened(outcome.row.label, FIGURES // LETTER)))
    return parts


def words_on_color(outcome):
    """Return what the color of a bar means: a key of COLORS."""
    if outcome.verdict is None:
        return "no verdict"
    return "faster" if outcome.verdict is Verdict.FASTER else outcome.verdict.value


def color_of(outcome):
    """Return the color of a row's bar and curve, which shows the verdict on it."""
    return COLORS[words_on_color(outcome)]


def text(x, y, words, anchor="start"):
    """Return words beside a bar at this y, as an element of SVG."""
    return f'<text x="{x:.1f}" y="{y + 11:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def rectangle(x, y, width, color):
    """Return a bar as an element of SVG."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" fill="{color}"/>'


def whisker(begin, end, y):
    """Return a line over the end of a bar, as an element of SVG."""
    return f'<line x1="{begin:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}" class="whisker"/>'


def shortened(label, most=MOST_LETTERS):
    """Return a label of at most `most` letters, without its middle: rows of one script differ at their ends."""
    if len(label) <= most:
        return label
    half = (most - 1) // 2
    return f"{label[:half]}…{label[-half:]}"
