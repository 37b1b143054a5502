"""The table of a bench in a terminal, and on a page.

What is drawn is a list of lines, and a line a list of cells in markdown. The first cell and the last are words, and all
others figures. The short table stands in the terminal, first on the page, and in README for the H100. What is true of
every page, for example what a ratio and its ± are, stands in results/README.md.
"""

import os
import re
import textwrap
import urllib.parse

from ..seen import words_on_model
from .answer import answer
from .cells import code, escaped, note_cell, number_cell, quoted, ratio_cell, remarks, speed_cell
from .ratios import FEWEST_ROUNDS, NOT_SHOWN_TO_DIFFER

TERMINAL_WIDTH = 80  # columns
NARROWEST = 14  # columns of the last cell, however much stands before it
WIDTH_OF_A_HEADING = 15  # columns; the longest heading of the answer is "no difference"


# The tables


def short_table(table, path_to_stages=None):
    """Yield the lines of the short table. path_to_stages: from a page, which links the rows to the stages."""
    yield ["row", "tok/sec", "x row above", "x first row", "GB", "what you type"]
    for outcome in table.shown:
        title = quoted(outcome.row.title)
        if path_to_stages and outcome.row.stage:
            title = f"[{title}]({path_to_stages}{outcome.row.stage.name}.py)"
        yield [
            title,
            speed_cell(outcome),
            ratio_cell(outcome.ratio, outcome.verdict),
            number_cell(outcome.ratio_to_first.value if outcome.ratio_to_first else None, "{:.2f}"),
            number_cell(outcome.memory, "{:.2f}", scale=1e-9),
            outcome.change.typed,
        ]


def full_table(table):
    """Yield the lines of the second table of a page, which adds to the short one."""
    yield ["row", "predicted", "dt ms", "% of peak", f"loss, step {table.bench['loss_step']}", "note"]
    for outcome in table.shown:
        yield [
            quoted(outcome.row.title),
            number_cell(outcome.predicted, "{:.2f}"),
            number_cell(outcome.dt_ms, "{:.1f}"),
            number_cell(outcome.peak_share, "{:.1f}", scale=100),
            number_cell(outcome.loss, "{:.2f}"),
            note_cell(outcome, table.bench),
        ]


def markdown(lines):
    """Return a table in markdown."""
    titles, *others = lines
    alignment = [":--", *["--:"] * (len(titles) - 2), ":--"]
    drawn = ""
    for cells in [titles, alignment, *others]:
        drawn += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    return drawn.strip().replace(" ± ", "\u00a0±\u00a0")  # a figure stays on one line


def aligned(lines):
    """Return a table for a terminal. In the last column words wrap."""
    lines = [[title.replace("`", ""), *others] for title, *others in lines]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    drawn = []
    for title, *figures, end in lines:
        start = title.ljust(widths[0]) + "  "
        for cell, width in zip(figures, widths[1:-1], strict=True):
            start += cell.rjust(width) + "  "
        drawn.append(beside(start, end))
    return "\n".join(drawn)


def beside(start, text):
    """Return a start, and to the right of it a text that wraps at the terminal's width.

    Code loses its backticks, and stays on one line, so that it can be copied.
    """
    text = re.sub("`(.*?)`", lambda match: match[1].replace(" ", "\u00a0"), text)
    text = text.replace("+ ", "+\u00a0")  # so does "+ bf16"
    width = max(TERMINAL_WIDTH - len(start), NARROWEST)
    lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
    return start + ("\n" + " " * len(start)).join(lines).replace("\u00a0", " ")


def how_to_read(table):
    """Return how to read the ratios of the table, a list of sentences."""
    lines = []
    ratios = [outcome.ratio for outcome in table.shown if outcome.ratio]
    if ratios and all(ratio.spread is None for ratio in ratios):
        lines.append("With fewer than three rounds there is no ±, and no row is called faster or slower.")
    elif any(outcome.verdict in NOT_SHOWN_TO_DIFFER for outcome in table.shown):
        lines.append("In parentheses: not shown to differ from 1.")
    if ratios and (table.bench["turns"] or table.bench["rounds"] > 1):
        lines.append("Believe the ratio of two rows, which is not quite the quotient of their speeds.")
    if table.disturbance:
        words = f"The bench was disturbed: of two runs of the same code one was {100 * table.disturbance:.1f} % faster."
        lines.append(f"{words} Believe no ratio that is nearer to 1.")
    return lines


# The terminal


def terminal(table):
    """Return what the terminal shows after each round.

    It is the short table, what scripts have and why rows failed, how to read it, and the answer.
    """
    lines = [aligned(short_table(table))]
    for outcome in table.shown:
        parts = remarks(outcome)
        if parts:
            lines.append(beside(f"{outcome.row.title}: ", "; ".join(parts)))
    lines += [beside("", line) for line in how_to_read(table)]
    if table.bench["rounds"] < FEWEST_ROUNDS and table.first_that_ran:
        lines.append(beside("", noise_line(table)))
    answers = answer(table)
    if answers:
        lines.append("")
    for heading, text in answers:
        lines.append(beside(heading.ljust(WIDTH_OF_A_HEADING), text))
    return "\n".join(lines)


# The page


def page(table, name):
    """Return the whole of results/NAME.md."""
    address_of_picture = urllib.parse.quote(os.fsencode(f"{name}.svg"))
    parts = [
        f"# {escaped(name)}: a bench on {escaped(table.bench['environment']['device_name'])}",
        table.bench.get("remark", ""),
        f"![The speed of each row]({address_of_picture})",
        markdown(short_table(table, path_to_stages="../stages/")),
        "\n\n".join(how_to_read(table)),
        "\n".join(f"- **{heading}**: {text}" for heading, text in answer(table)),
        markdown(full_table(table)),
        "\n".join(f"- {line}" for line in conditions(table)),
        "[How to read this page](README.md)",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def conditions(table):
    """Return the lines under the tables: machine, settings, how the rows ran, noise, rates, command."""
    bench = table.bench
    return [
        escaped(machine_line(bench["environment"])),
        escaped(what_ran(table)),
        escaped(how_it_ran(bench)),
        noise_line(table),
        escaped(rates_line(bench["rates"])),
        f"To run it again: {code(bench['command'])} at commit {escaped(bench['commit'] or 'unknown')}.",
    ]


def how_it_ran(bench):
    """Return how the rows ran: in turns or one after the other. bench: the first line of a record."""
    rounds = f"Rounds of fresh processes: {bench['rounds']}. In each"
    if bench["turns"]:
        return f"{rounds}, the rows took at least {bench['warmup']} steps of warm-up, and then {bench['turns']} turns."
    since = f", since {bench['reason']}" if "reason" in bench else ""
    steps = f"at most {bench['steps']} steps, of which at least {bench['warmup']} were warm-up"
    return f"{rounds}, the rows ran one after the other{since}: {steps}."


def machine_line(env):
    """Return the machine and its software."""
    line = f"{env['device_name']}, {env['cores']} cores, {env['threads']} threads, {env['system']}, "
    line += f"torch {env['torch']}, Python {env['python']}"
    if env["cuda"]:
        line += f", CUDA {env['cuda']}, driver {env['driver'] or 'unknown'}"
    if env["slow"]:
        line += f", with {', '.join(env['slow'])} in the environment"
    return f"{line}."


def what_ran(table):
    """Return the model, the batch, the text, the seed and the date of the first row that ran."""
    first = table.first_that_ran
    if first is None:
        return "No row got as far as its second step, which shows what is trained."
    line = f"The first row that ran trains {words_on_model(first.seen)}"
    if first.row.takes_flags:  # else it has a text of its own
        line += f", on {table.bench['text']}"
    return f"{line}, seed {table.bench['seed']}, {table.bench['started'][:10]}."


def noise_line(table):
    """Return how many times as fast one row was as the other, of each two that should be equally fast."""
    pairs = []
    for outcome in table.outcomes.values():
        if outcome.ratio and outcome.change.is_same_computation:
            words = f"was {outcome.ratio.value:.3f} times as fast as"
            pairs.append(f"{quoted(outcome.row.title)} {words} {quoted(outcome.base.row.title)}")
    return f"Rows that should be equally fast: {', '.join(pairs) or 'none was measured'}."


def rates_line(rates):
    """Return the rates that the columns "% of peak" and "predicted" divide by. rates: of the probe."""
    peaks = [f"{rate / 1e12:.2f} TFLOP/s in {dtype}" for dtype, rate in sorted(rates["peak"].items())]
    copied = rates["copy"] / 1e9
    return f"Before the rows, large matmuls sustained {', '.join(peaks)}, and a large copy moved {copied:,.1f} GB/s."
