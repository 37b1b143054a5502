"""A bench as a picture: a bar for the speed of each row."""

from html import escape

from ..figures import UNITS
from .cells import failure, in_one_line, in_parentheses, speed_cell
from .rows import shortened

WIDTH = 640  # all lengths are in pixels
LETTER = 8.4  # of a wide font, as DejaVu Sans
LINE = 20  # from one row to the next
TOP = 60  # of the first bar
BAR = 13
BASELINE = 11  # of a text: how far it is below the top of its bar
MOST_LETTERS = 28  # left of a bar
MOST_LETTERS_OF_A_BASE = 12
MOST_LETTERS_OF_A_FAILURE = 44
HEAD = """<style>
text { font: 13px system-ui, sans-serif; fill: #24292f }
rect { fill: #0969da }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }
</style>"""


def svg(table, name):
    """Return the text of results/NAME.svg."""
    title = f"{name}: {table.bench['environment']['device_name']}"
    unit = table.first_that_ran.seen.unit if table.first_that_ran else "tok"
    what = f"{UNITS[unit]} per second, and how many times the row above"
    bottom = TOP + LINE * len(table.shown) + 6
    size = f'viewBox="0 0 {WIDTH} {bottom}" width="{WIDTH}" height="{bottom}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>'
    heading = [text(8, 8, shortened(title, int(WIDTH / LETTER))), text(8, 8 + LINE, what)]
    return "\n".join([opening, HEAD, *heading, *bars(table.shown, unit), "</svg>"]) + "\n"


def bars(outcomes, unit):
    """Return elements of SVG, a list, with a label, a bar and words for each row. unit: what the first row counts.

    A bar is as long as the speed. A row that failed, or counts something else, has no bar.
    """
    drawn = [outcome for outcome in outcomes if outcome.tok_per_sec and not outcome.error and outcome.seen.unit == unit]
    labels = [shortened(outcome.change.label, MOST_LETTERS) for outcome in outcomes]
    start_of_bars = 16 + LETTER * max(len(label) for label in labels)
    end_of_bars = WIDTH - 8 - LETTER * max((len(words_beside(outcome)) for outcome in drawn), default=0)
    scale = (end_of_bars - start_of_bars) / max((outcome.tok_per_sec for outcome in drawn), default=1)
    y = TOP
    parts = []
    for outcome, label in zip(outcomes, labels, strict=True):
        parts.append(text(start_of_bars - 8, y, label, anchor="end"))
        end = start_of_bars
        if outcome in drawn:
            end += scale * outcome.tok_per_sec
            parts.append(f'<rect x="{start_of_bars:.1f}" y="{y}" width="{end - start_of_bars:.1f}" height="{BAR}"/>')
        parts.append(text(end + 6, y, words_beside(outcome)))
        y += LINE
    return parts


def words_beside(outcome):
    """Return the speed of a row and its ratio to its base, in parentheses as in the table, or why it failed."""
    if outcome.error:
        return shortened(failure(outcome), MOST_LETTERS_OF_A_FAILURE)
    if outcome.ratio is None:
        return speed_cell(outcome)
    words = in_parentheses(f"x {outcome.ratio.value:.2f}", outcome.verdict)
    if not outcome.is_with_row_above:
        words += f" vs {shortened(outcome.base.row.title, MOST_LETTERS_OF_A_BASE)}"
    return f"{speed_cell(outcome)}\u00a0\u00a0 {words}"  # an SVG would fold spaces


def text(x, y, words, anchor="start"):
    """Return words as an element of SVG, on the line of a bar whose top is at y."""
    return f'<text x="{x:.1f}" y="{y + BASELINE:.1f}" text-anchor="{anchor}">{escape(in_one_line(words))}</text>'
