"""The pieces of markdown that pages are made of: tables, links, and figures as cells."""

from . import ladder
from .results import PLAIN

NOTHING = "–"  # a cell without a figure
TEXTS = ("stage", "change", "what you type", "note", "stopped by")  # columns that are aligned to the left
STAGES = "../stages/"  # the way from a page in results/


def table(rows):
    """Return a markdown table of rows, dicts {column: cell} with the same keys."""
    columns = list(rows[0])
    rules = [":--" if column in TEXTS else "--:" for column in columns]
    lines = [columns, rules, *(list(row.values()) for row in rows)]
    drawn = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return drawn.replace(" ± ", "\u00a0±\u00a0")  # a figure stays on one line


def short(name):
    """Return s05 for s05_flash. The names of other rows stay."""
    stage = ladder.find(name)
    return stage.short if stage else name


def link(name, folder, text=None):
    """Return a row's name, or a text for it, with a link to its stage. folder: the way from the page to the stages."""
    stage = ladder.NAMES[0] if name == PLAIN else name
    if ladder.find(stage) is None:
        return text or name
    return f"[{text or name}]({folder}{stage}.py)"


def milliseconds(value):
    """Return a time with three digits."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"


def gigabytes(memory):
    """Return a number of bytes in GB; where nothing could measure it, the text says so."""
    return f"{memory / 1e9:.2f}" if memory else "no meter"


def comparison(results, name, base, digits):
    """Return the cell that compares a row with another, to so many digits after the point."""
    compared = results.compare(name, base)
    if compared is None:
        return NOTHING
    value, spread = compared
    if spread is None:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} ± {spread:.{digits}f}"


def escaped(parts):
    """Return the texts of a note as one cell, without those that are empty."""
    return "; ".join(part for part in parts if part).replace("|", "\\|")
