"""The table of a bench in a terminal, and on a page. A table is a list of columns.

The short table stands in the terminal, first on the page, and in README for the H100. What is true of every page, such
as what a ratio and its ± are, stands in results/README.md.
"""

import math
import re
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from ..arithmetic import flops_per_token, shape_name
from . import words
from .answer import answer
from .words import PATH_TO_STAGES, number_cell

TERMINAL_WIDTH = 80  # columns
NARROWEST = 14  # columns of the last cell, however much stands before it
NO_NOISE = (
    "Nothing is called faster or slower, because it is not known how far apart runs of one computation come out: that "
    "takes a row that ran twice without failing, and three rounds, or three counted steps in turn."
)


class Column(NamedTuple):
    """A column of a table. cell: returns the cell of an Outcome, in markdown. is_text: whether cells are words."""

    title: str
    cell: Callable
    is_text: bool = False


# The tables


def short_columns(table):
    """Return the columns of the short table, as a terminal shows it. Only the last one may be long."""
    title = table.reference.row.title
    return [
        Column("row", lambda outcome: outcome.row.title, is_text=True),
        Column("tok/sec", words.speed_cell),
        Column("x above", words.ratio_cell),
        Column(f"x {title if len(title) < 8 else 'the first'}", words.ratio_to_reference_cell),
        Column("GB", lambda outcome: number_cell(outcome.memory, "{:.2f}", scale=1e-9)),
        Column("what you type", words.typed_cell, is_text=True),
    ]


def columns_of_page(table, folder=PATH_TO_STAGES):
    """Return the columns of the short table on a page. folder: the path from the page to the stages."""
    linked = Column("row", lambda outcome: words.linked_cell(outcome, folder), is_text=True)
    return [linked, *short_columns(table)[1:]]


def full_columns(table):
    """Return the columns of the second table on a page, which adds to the short one."""
    title_of_loss = "loss" if table.loss_step is None else f"loss, step {table.loss_step}"
    return [
        Column("row", words.title_cell, is_text=True),
        Column("predicted", lambda outcome: number_cell(outcome.predicted, "{:.2f}")),
        Column("dt ms", lambda outcome: number_cell(outcome.dt_ms, "{:.1f}")),
        Column("% of peak", lambda outcome: number_cell(outcome.peak_share, "{:.1f}", scale=100)),
        Column(title_of_loss, lambda outcome: number_cell(outcome.loss, "{:.2f}")),
        Column("note", lambda outcome: escaped(words.note_cell(outcome, table.bench)), is_text=True),
    ]


def escaped(text):
    """Return a text whose signs markdown leaves as they are."""
    return re.sub(r"([\\`*_<>\[\]])", r"\\\1", text)


def markdown(columns, rows):
    """Return a table in markdown. rows: Outcomes."""
    lines = [[column.title for column in columns], [":--" if column.is_text else "--:" for column in columns]]
    for outcome in rows:
        lines.append([column.cell(outcome).replace("|", "\\|") for column in columns])
    drawn = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return drawn.replace(" ± ", "\u00a0±\u00a0")  # a figure stays on one line


def aligned(columns, rows):
    """Return a table as lines for a terminal. The last column is one of words, which wrap."""
    padded_columns = []
    for column in columns[:-1]:
        cells = [column.title] + [column.cell(outcome).replace("`", "") for outcome in rows]
        width = max(len(cell) for cell in cells)
        padded_columns.append([cell.ljust(width) if column.is_text else cell.rjust(width) for cell in cells])
    last = [columns[-1].title] + [columns[-1].cell(outcome).replace("`", "") for outcome in rows]
    lines = []
    for *cells, words_of_row in zip(*padded_columns, last, strict=True):
        start = "".join(cell + "  " for cell in cells)
        width = max(TERMINAL_WIDTH, len(start) + NARROWEST)
        lines.append(wrapped(start + words_of_row, len(start), width))
    return "\n".join(lines)


def wrapped(text, indent, width=TERMINAL_WIDTH):
    """Return a text in lines of a terminal, from the second one on so many columns to the right."""
    return textwrap.fill(text, width, subsequent_indent=indent * " ", break_long_words=False, break_on_hyphens=False)


# Below the tables


def long_commands(table):
    """Return (title, command) of the rows whose commands are too long for the table, a list."""
    return [(outcome.row.title, outcome.row.name) for outcome in table.rows if words.has_command_below(outcome)]


def how_to_read(table):
    """Return how to read the ratios of the table, a list of sentences."""
    with_ratios = [outcome for outcome in table.rows if outcome.ratio]
    lines = []
    if with_ratios and table.noise is None:
        lines.append(NO_NOISE)
    elif any(words.is_in_brackets(outcome) for outcome in with_ratios):
        apart = f"By chance alone, runs of one computation come out {100 * table.noise.size:.1f} % apart here."
        lines.append(f"In brackets: not shown to differ. {apart}")
    if with_ratios and table.bench["in_turn"]:
        lines.append("Where two speeds say otherwise, trust x above: it compares within each turn.")
    return lines


# The terminal


def terminal(table):
    """Return what the terminal shows while rows take turns: the short table, what scripts have, and what failed."""
    lines = [aligned(short_columns(table), table.rows)]
    for outcome in table.rows:
        parts = words.words_on_base(outcome) + words.words_on_script(outcome)
        if outcome.error:
            parts.append(words.failure(outcome.error))
        if parts:
            lines.append(wrapped(f"{outcome.row.title}: {'; '.join(parts)}", 2))
    return "\n".join(lines)


def terminal_at_the_end(table):
    """Return the last words of a bench: what terminal() shows, how to read it, and the answer."""
    lines = [terminal(table)]
    lines += [wrapped(f"{title}: {command}", 2) for title, command in long_commands(table)]
    lines += [wrapped(line, 0) for line in how_to_read(table)]
    answers = answer(table)
    if answers:
        lines.append("")
    width = max((len(heading) for heading, _ in answers), default=0) + 2
    for heading, text in answers:
        lines.append(wrapped(heading.ljust(width) + text.replace("`", ""), width))
    return "\n".join(lines)


def expectations(forecast):
    """Return what the terminal shows before anything is measured, or None where nothing is predicted.

    forecast: the Table that forecast_of() returned.
    """
    foretold = [outcome for outcome in forecast.rows if outcome.predicted]
    if not foretold:
        return None
    row, *_, typed = short_columns(forecast)
    columns = [row, Column("should be x above", lambda outcome: number_cell(outcome.predicted, "{:.2f}")), typed]
    together = math.prod(outcome.predicted for outcome in foretold)
    base = foretold[0].base.row.title
    lines = ["What each row should bring here, by arithmetic (Ctrl-C, if that is all you want):"]
    lines.append(aligned(columns, forecast.rows))
    lines.append(f"All together {together:.1f} x {base}; what has a dash can't be predicted.")
    return "\n".join(lines)


# The page


def page(table, name):
    """Return the whole of results/NAME.md, whose title tells it from all others."""
    first = table.rows[0].row
    what = "a bench"
    if first.is_watched and all(outcome.row.script == first.script for outcome in table.rows):
        what = first.script
    below = how_to_read(table)
    below += [f"{words.code(title)} is {words.code(command)}." for title, command in long_commands(table)]
    parts = [
        f"# {name}: {what} on {table.bench['environment']['device_name']}",
        f"![The speed of each row, and the training loss by {words.UNITS[table.unit]}]({name}.svg)",
        markdown(columns_of_page(table), table.rows),
        "\n".join(below),
        "\n".join(f"- **{heading}**: {text}" for heading, text in answer(table)),
        markdown(full_columns(table), table.rows),
        "\n".join(f"- {line}" for line in conditions(table)),
        "[How to read this page](README.md)",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def conditions(table):
    """Return the lines under the tables: machine, settings, how the rows were led, noise, rates, command."""
    bench = table.bench
    again = f"Again: `{bench['command']}` at commit {bench['commit'] or 'unknown'}."
    if table.facts is None:
        return [machine_line(table), "No row got as far as its first step.", again]
    return [machine_line(table), what_ran(table), how_rows_ran(table), noise_line(table), rates_line(table), again]


def machine_line(table):
    """Return the machine and its software."""
    env = table.bench["environment"]
    parts = [f"**{env['device_name']}**", f"{env['cores']} cores", f"{env['threads']} threads", env["system"]]
    parts += [f"torch {env['torch']}", f"Python {env['python']}"]
    if env["cuda"]:
        parts.append(f"CUDA {env['cuda']}, driver {env['driver'] or 'unknown'}")
    line = f"{', '.join(parts)}."
    if table.facts and "environment" in table.facts["fallbacks"]:
        line += f" All is {table.facts['fallbacks']['environment']}."
    return line


def what_ran(table):
    """Return the model, the batch, the text, the seed and the date of the first row that ran."""
    shape, settings = table.facts["shape"], table.facts["settings"]
    model = "No GPT"
    if shape:
        model = f"{shape_name(shape)}, {flops_per_token(shape) / 1e6:.0f} MFLOP a token"
    parts = [model]
    if settings["batch_size"]:
        parts.append(f"B {settings['batch_size']}")
    if settings["seq_len"]:
        parts.append(f"T {settings['seq_len']}")
    if settings.get("corpus"):  # which nobody knows of a script
        parts.append(settings["corpus"])
    return f"The first row: {', '.join(parts)}, seed {settings['seed']}, {table.facts['started'][:10]}."


def how_rows_ran(table):
    """Return how the rows were led, and how far they came where the bench ended early."""
    bench = table.bench
    how = "One after the other, each in a fresh process"
    if bench["in_turn"]:
        how = "In turn, all processes alive at once"
    rounds = f"{bench['rounds']} round{'s' if bench['rounds'] > 1 else ''}"
    line = f"{how}: at most {bench['steps']} steps, of which {bench['warmup']} are warm-up, in {rounds}."
    unfinished = [outcome for outcome in table.rows if outcome.rounds < bench["rounds"] and not outcome.error]
    if unfinished:
        steps = [outcome.steps for outcome in unfinished]
        line += f" It ended early: {len(unfinished)} rows had counted {min(steps)} to {max(steps)} steps."
    return line


def noise_line(table):
    """Return how much runs of one computation differed, and what that makes of the noise."""
    parts = []
    for outcome in table.pairs:
        left_out = ", which is left out" if outcome.is_contradicted else ""
        pair = f"{words.title_cell(outcome)} / {words.title_cell(outcome.base)}"
        parts.append(f"{pair} {outcome.ratio.value:.3f}{left_out}")
    line = f"Runs of one computation: {', '.join(parts) or 'none'}."
    return f"{line} The noise is {100 * table.noise.size:.1f} %." if table.noise else line


def rates_line(table):
    """Return what the columns "% of peak" and "predicted" divide by."""
    if table.rates is None:
        return "No peak and no predictions, since the probe left no rates."
    peaks = [f"{rate / 1e12:.2f} TFLOP/s in {dtype}" for dtype, rate in sorted(table.rates.matmul.items())]
    copy = f"{table.rates.copy / 1e9:,.1f} GB/s"
    return f"The probe: large matmuls sustain {', '.join(peaks)}, and a large copy moves {copy}."
