"""From figures to text. A table is a list of columns, and a column is a title and a function of a row.

The short table stands in the terminal, first on the page, and in README for the H100. What is true of every page, such
as what a ratio and its ± are, stands in results/README.md.
"""

import math
import shlex
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from .. import ladder
from ..arithmetic import flops_per_token, shape_name
from ..figures import UNEVEN, waiting_share
from .results import unit_of
from .rows import gains_cpu_memory, goes_without_cpu_memory, runs_the_same
from .verdict import (
    IN_BRACKETS,
    LONG_WARMUP,
    Verdict,
    is_contradicted,
    noise_among,
    noise_of,
    pairs_of_one_computation,
    repeats_the_row_above,
    verdict_lines,
    verdict_on,
    words_on_ratio,
)

NOTHING = "–"  # a cell without a figure
PATH_TO_STAGES = "../stages/"  # from a page in results/
TERMINAL_WIDTH = 80  # columns
NARROWEST = 8  # columns that "what you type" has, rather than that a line has no more than 80
NO_NOISE = (
    "Nothing is called faster or slower, because the noise is not known yet. To know it takes a row that ran twice "
    "without failing, and two rounds on a GPU or two counted steps on a CPU."
)
MOST_OF_A_REASON = 300  # letters of a cell that says why a row failed


class Column(NamedTuple):
    """A column of a table. cell: returns the text of a Row's cell, in markdown. is_text: whether cells are words."""

    title: str
    cell: Callable
    is_text: bool = False


# The tables


def short_columns(results):
    """Return the columns of the short table, as a terminal shows it."""
    reference = results.reference
    return [
        Column("row", lambda row: row.title, is_text=True),
        Column("what you type", lambda row: typed_cell(results, row), is_text=True),
        Column("tok/sec", lambda row: speed_cell(results, row)),
        Column("x above", lambda row: ratio_cell(results, row, 2)),
        Column(f"x {reference.title}", lambda row: ratio_alone_cell(results, row, reference)),
        Column("GB", lambda row: number_cell(results.figure(row, "memory"), "{:.2f}", scale=1e-9)),
    ]


def columns_of_page(results, folder=PATH_TO_STAGES):
    """Return the columns of the short table on a page. folder: the path from the page to the stages."""
    return [Column("row", lambda row: linked_cell(row, folder), is_text=True), *short_columns(results)[1:]]


def full_columns(results):
    """Return the columns of the second table on a page, which adds to the short one."""
    last = results.last_common_step()
    title_of_loss = "loss" if last is None else f"loss, step {last}"
    return [
        Column("row", lambda row: row.label, is_text=True),
        Column("predicted", lambda row: number_cell(results.predicted(row), "{:.3f}")),
        Column("x above", lambda row: ratio_cell(results, row, 3)),  # neighbors differ by little
        Column("dt ms [IQR]", lambda row: step_time_cell(results, row)),
        Column("% of peak", lambda row: number_cell(results.peak_share(row), "{:.1f}", scale=100)),
        Column(title_of_loss, lambda row: number_cell(results.loss_at(row, last), "{:.2f}")),
        Column("note", lambda row: note_cell(results, row), is_text=True),
    ]


def markdown(columns, rows):
    """Return a table in markdown."""
    lines = [[column.title for column in columns], [":--" if column.is_text else "--:" for column in columns]]
    for row in rows:
        lines.append([column.cell(row).replace("|", "\\|") for column in columns])
    drawn = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return drawn.replace(" ± ", "\u00a0±\u00a0")  # a figure stays on one line


def aligned(columns, rows):
    """Return a table as lines for a terminal. The second column wraps where a line would be too long."""
    table = [[column.title for column in columns]]
    for row in rows:
        table.append([column.cell(row).replace("`", "") for column in columns])
    widths = [max(len(cells[i]) for cells in table) for i in range(len(columns))]
    gaps = 2 * (len(columns) - 1)
    width_of_others = sum(widths) - widths[1] + gaps
    widths[1] = min(widths[1], max(NARROWEST, TERMINAL_WIDTH - width_of_others))
    lines = []
    for cells in table:
        first, *rest = textwrap.wrap(cells[1], widths[1], break_on_hyphens=False)
        cells[1] = first
        words = []
        for column, cell, width in zip(columns, cells, widths, strict=True):
            words.append(cell.ljust(width) if column.is_text else cell.rjust(width))
        lines.append("  ".join(words).rstrip())
        for line in rest:
            lines.append(" " * (widths[0] + 2) + line)
    return "\n".join(lines)


def terminal(results):
    """Return what the terminal shows while rows take turns: the short table, what scripts have, and what failed."""
    lines = [aligned(short_columns(results), results.table_rows)]
    for row in results.table_rows:
        error = results.error(row)
        words = words_on_models(results, row) + words_on_script(results, row, name_of_technique)
        if error:
            words.append(failure(error))
        if words:
            lines.append(textwrap.fill(f"{row.label}: {'; '.join(words)}", TERMINAL_WIDTH))
    return "\n".join(lines)


def terminal_at_the_end(results):
    """Return the last words of a bench: what terminal() shows, what brackets mean, and the verdict."""
    noise = noise_of(results)
    words = NO_NOISE
    if noise is not None:
        words = f"In brackets: what a noise of {100 * noise:.1f} % and the ratio's own ± may explain together."
    lines = [terminal(results), textwrap.fill(words, TERMINAL_WIDTH)]
    verdict = answer(results)
    if verdict:
        lines.append("")
    width = max((len(heading) for heading, _ in verdict), default=0) + 2
    for heading, words in verdict:
        line = heading.ljust(width) + words.replace("`", "")
        lines.append(textwrap.fill(line, TERMINAL_WIDTH, subsequent_indent=width * " "))
    return "\n".join(lines)


def answer(results):
    """Return the verdict as a list of (heading, words), and last what to type for the gains that it found."""
    typed = []
    for row in results.table_rows:
        if verdict_on(results, row) is not Verdict.FASTER:
            continue
        if gains_cpu_memory(row, results.above(row)):
            typed.append("three variables in front of python, see stages/memory.md")
        elif row.added or (row.stage and not row.launcher and not row.flags):
            typed.append(typed_cell(results, row))
    lines = verdict_lines(results)
    if typed:
        lines.append(("what to type", " | ".join(typed)))
    return lines


def expectations(forecast):
    """Return what the terminal shows before anything is measured, or None where nothing is predicted.

    forecast: what forecast_of() returned.
    """
    predicted = {row: forecast.predicted(row) for row in forecast.table_rows}
    known = {row: ratio for row, ratio in predicted.items() if ratio}
    if not known:
        return None
    columns = [
        *short_columns(forecast)[:2],
        Column("should be x above", lambda row: number_cell(predicted[row], "{:.2f}")),
    ]
    above_all = forecast.above([*known][0])
    lines = ["What each row should bring here, by arithmetic (Ctrl-C, if that is all you want):"]
    lines.append(aligned(columns, list(predicted)))
    lines.append(
        f"All together {math.prod(known.values()):.1f} x {above_all.label}; what has a dash can't be predicted."
    )
    return "\n".join(lines)


# Cells


def number_cell(value, form, scale=1):
    """Return the cell of a number, which may be None."""
    return NOTHING if value is None else form.format(scale * value)


def words_on_speed(results, row):
    """Return the speed of a row with its unit, as "1,000 tok/sec", or None where it has none."""
    speed = results.figure(row, "tok_per_sec")
    if speed is None:
        return None
    unit = unit_of(results.facts(row))
    return f"{speed:,.0f} tok/sec" if unit == "tok" else f"{speed:,.0f} {unit}s/sec"


def speed_cell(results, row):
    """Return the cell of a row's tokens per second; its unit stands beside it where it counts something else."""
    speed = results.figure(row, "tok_per_sec")
    if speed is None:
        return NOTHING
    unit = unit_of(results.facts(row))
    return f"{speed:,.0f}" if unit == "tok" else f"{speed:,.0f} {unit}s"


def ratio_alone_cell(results, row, base):
    """Return the cell that compares a row with another, without a ±."""
    compared = results.compare(row, base)
    return NOTHING if compared is None else f"{compared.value:.2f}"


def ratio_cell(results, row, digits):
    """Return the cell that compares a row with the one above, to so many digits; in brackets where none is shown."""
    compared = results.compare(row, results.above(row))
    if compared is None:
        return NOTHING
    cell = words_on_ratio(compared, digits)
    return f"({cell})" if verdict_on(results, row) in IN_BRACKETS else cell


def linked_cell(row, folder):
    """Return a row's title, with a link to its stage."""
    return f"[{row.title}]({folder}{row.stage.name}.py)" if row.stage else row.title


def typed_cell(results, row):
    """Return what the reader of a row types: the stage's line, or the launcher and flags of the row's own command.

    Where a row skips stages, these are named first, because the ratio includes their gains.
    """
    above = results.above(row)
    skipped = results.stages_crossed(row)
    if row.added and runs_the_same(row, above):
        text = ladder.ADDED[row.added[-1]].line
    elif goes_without_cpu_memory(row):
        text = "without the memory variables"
    elif row.is_watched and gains_cpu_memory(row, above):
        text = "with the memory variables"
    elif row.is_watched:
        words = [f"+{name}" for name in row.added]
        script = row.script.split() if row.is_module else [row.script]
        text = f"`{shlex.join([*words, *row.launcher, *script, *row.flags])}`"
    elif row.launcher or row.flags:
        text = f"`{shlex.join([*row.launcher, *row.flags])}`"
    elif row.stage:
        text = row.stage.line
        skipped = [stage for stage in skipped if stage is not row.stage]  # its line is shown
    else:
        text = f"`{row.script}`"
    if not skipped:
        return text
    return f"{ladder.words_on_stages(skipped)}, {text}"


def step_time_cell(results, row):
    """Return the cell of the median time of a step and its quartiles, in milliseconds."""
    figures = results.figures(row)
    if figures is None:
        return NOTHING
    return f"{figures['dt_ms']:.1f} [{figures['dt_q1_ms']:.1f}–{figures['dt_q3_ms']:.1f}]"


def note_cell(results, row):
    """Return what the technique of a row does on this machine, and why the row failed or is not complete."""
    parts = []
    error, ended, rounds = results.error(row), results.rounds_ended(row), results.bench["rounds"]
    if error:
        parts.append(failure(error))
    elif ended < rounds and results.bench["in_turn"]:
        parts.append(f"{len(results.counted(row))} of {planned_steps(results.bench)} steps")
    elif ended < rounds:
        parts.append(f"{ended} of {rounds} rounds")
    parts += words_on_models(results, row)
    effect = results.effect(row)
    if effect:
        parts.append(effect.words)
    parts += words_on_script(results, row, linked_technique)
    if repeats_the_row_above(results, row):
        parts.append("same computation as the row above")
    warmup = results.figure(row, "warmup_s")
    if warmup and warmup > LONG_WARMUP:
        parts.append(f"{warmup:.0f} s of warm-up")
    reserved = results.figure(row, "reserved")
    if reserved:
        parts.append(f"{reserved / 1e9:.2f} GB reserved")
    return "; ".join(part for part in parts if part)


def words_on_models(results, row):
    """Return what is said where a row trains another model than the row above, a list of words."""
    above = results.above(row)
    if results.compare(row, above) is None or not results.trains_another_model(row, above):
        return []
    ours, theirs = [words_on_size(results.facts(each)["parameters"]) for each in (row, above)]
    return [f"another model: {ours} parameters beside {theirs}"]


def words_on_size(parameters):
    """Return a number of parameters in words: "10.7M", and a small one in full."""
    return f"{parameters / 1e6:.1f}M" if parameters >= 1e6 else f"{parameters:,}"


def words_on_script(results, row, name):
    """Return what is said of a watched script, a list of words: what it has of the ladder, lacks, and waits for.

    For a row that adds a technique to the row above, it is what became of that. name: returns what to call the
    technique of a Stage.
    """
    facts, above = results.facts(row), results.above(row)
    if facts is None or facts["techniques"] is None:
        return []
    techniques = facts["techniques"]
    words = []
    if runs_the_same(row, above):
        words += words_on_added(results, row, above)
    else:
        has, lacks, remarks = ladder.has_and_lacks(techniques)
        words.append(f"has {', '.join(name(stage) for stage in has) or 'nothing of the ladder'}")
        if techniques["profiled"]:
            words.append(f"lacks {', '.join(name(stage) for stage in lacks) or 'nothing of it'}")
        words += remarks
    if results.bench["in_turn"] and any(run.may_wait_for_data for run in results.runs_of(row)):
        words.append("took its steps without turns, since what loads its data would get ahead")
    if results.waits_for_data(row):
        share = waiting_share(results.counted(row))
        words.append(f"{100 * share:.0f} % of a step waits for data, so its speed is that of all steps together")
    figures = results.figures(row)
    if figures and figures["dt_mean_ms"] > UNEVEN * figures["dt_ms"]:
        words.append(f"uneven: the mean of a step is {figures['dt_mean_ms']:.0f} ms, its median {figures['dt_ms']:.0f}")
    return words


def words_on_added(results, row, above):
    """Return what became of the techniques that a row adds to the row above, a list of words."""
    techniques, facts_above = results.facts(row)["techniques"], results.facts(above)
    words = []
    for name in row.added:
        if name in above.added:
            continue
        if not ladder.uses(techniques, name):
            words.append(ladder.words_on_missing(techniques, name))
        elif facts_above and facts_above["techniques"] and ladder.uses(facts_above["techniques"], name):
            words.append(f"{name} is in it already")
    return words


def name_of_technique(stage):
    """Return what a terminal calls the technique of a Stage."""
    return stage.technique


def linked_technique(stage):
    """Return what a page calls the technique of a Stage, with a link to its lesson."""
    return f"[{stage.technique}]({PATH_TO_STAGES}{stage.lesson})"


def failure(error):
    """Return why a row failed, by the error line of its record, in one line."""
    if error["out_of_memory"]:
        return "out of memory"
    message = "".join(letter if letter.isprintable() else " " for letter in error["message"])
    return textwrap.shorten(f"failed: {message}", MOST_OF_A_REASON, placeholder=" ...")


# The page


def page(results, name):
    """Return the whole of results/NAME.md, whose title tells it from all others."""
    rows = results.table_rows
    what = "a bench"
    if rows[0].is_watched and all(row.script == rows[0].script for row in rows):
        what = rows[0].script
    parts = [
        f"# {name}: {what} on {results.bench['environment']['device_name']}",
        f"![The speed of each row, and the loss over the seconds of training]({name}.svg)",
        markdown(columns_of_page(results), rows),
        "\n".join(f"- **{heading}**: {words}" for heading, words in answer(results)),
        markdown(full_columns(results), rows),
        "\n".join(f"- {line}" for line in conditions(results)),
        "[How to read this page](README.md)",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def conditions(results):
    """Return the lines under the tables: machine, settings, how the rows were led, noise, rates, command."""
    bench, env = results.bench, results.bench["environment"]
    words = [f"**{env['device_name']}**", f"{env['cores']} cores", f"{env['threads']} threads", env["system"]]
    words += [f"torch {env['torch']}", f"Python {env['python']}"]
    if env["cuda"]:
        words.append(f"CUDA {env['cuda']}, driver {env['driver'] or 'unknown'}")
    machine = f"{', '.join(words)}."
    facts = results.first_facts()
    if facts and "environment" in facts["fallbacks"]:
        machine += f" All is {facts['fallbacks']['environment']}."
    again = f"Again: `{bench['command']}` at commit {bench['commit'] or 'unknown'}."
    if results.first_facts() is None:
        return [machine, "No row got as far as its first step.", again]
    return [machine, what_ran(results), how_rows_ran(results), noise_line(results), rates_line(results), again]


def what_ran(results):
    """Return the model, the batch, the text, the seed and the date of the first row that ran."""
    facts = results.first_facts()
    settings = facts["settings"]
    model = "No GPT"
    if facts["shape"]:
        model = f"{shape_name(facts['shape'])}, {flops_per_token(facts['shape']) / 1e6:.0f} MFLOP a token"
    words = [model]
    if settings["batch_size"]:
        words.append(f"B {settings['batch_size']}")
    if settings["seq_len"]:
        words.append(f"T {settings['seq_len']}")
    if settings.get("corpus"):  # which nobody knows of a script
        words.append(settings["corpus"])
    line = f"{', '.join(words)}, seed {settings['seed']}, {facts['started'][:10]}."
    rows = results.table_rows
    if any(row.is_watched and row.script != rows[0].script for row in rows):
        line += " This is of the first row. Other scripts may differ."
    elif any(row.flags != rows[0].flags for row in rows):
        line += " This is of the first row. Rows with flags of their own may differ."
    return line


def planned_steps(bench):
    """Return how many steps of a row were to be counted, in all rounds."""
    return bench["rounds"] * (bench["steps"] - bench["warmup"])


def how_rows_ran(results):
    """Return how the rows were led."""
    bench = results.bench
    steps, warmup = bench["steps"], bench["warmup"]
    rounds = "1 round" if bench["rounds"] == 1 else f"{bench['rounds']} rounds, there and back"
    if bench["in_turn"]:
        words = f"All processes were alive at once. After {warmup} steps of warm-up each, they took"
        planned = planned_steps(bench)
        taken = max(len(results.counted(row)) for row in results.table_rows)
        if taken < planned:
            return f"{words} {taken} of {planned} in turn, no more."
        return f"{words} {steps - warmup} in turn. {rounds}."
    most = f"at most {steps} steps, of which {warmup} are warm-up"
    return f"One after the other, each in a fresh process: {most}. {rounds}."


def noise_line(results):
    """Return how much runs of one computation differed, and what stands in brackets."""
    pairs = pairs_of_one_computation(results)
    words = []
    for pair in pairs:
        left_out = ", which is left out" if is_contradicted(pair, pairs) else ""
        words.append(f"{pair.row.label} / {pair.base.label} {pair.ratio.value:.3f}{left_out}")
    line = f"Runs of one computation: {', '.join(words) or 'none'}."
    noise = noise_among(pairs)
    if noise is None:
        return f"{line} {NO_NOISE}"
    return (
        f"{line} The noise is {100 * noise:.1f} %. What it and a ratio's own ± may explain together stands in brackets."
    )


def rates_line(results):
    """Return what the columns "% of peak" and "predicted" divide by."""
    rates = results.rates()
    if rates is None:
        return "No peak and no predictions, since the probe left no rates."
    peaks = [f"{rate / 1e12:.2f} TFLOP/s in {dtype}" for dtype, rate in sorted(rates.matmul.items())]
    return f"The probe: large matmuls sustain {', '.join(peaks)}, and a large copy moves {rates.copy / 1e9:,.1f} GB/s."
