"""From figures to text: the short table, for a terminal and for a page, the full table, the lines under it, the chart.

A table is a list of rows, each a dict {column: cell} with the same columns. What is true of every page, such as what a
ratio and its ± are, stands in results/README.md.
"""

from . import ladder
from .arithmetic import flops_per_token, seconds_per_token, shape_name
from .record import code_hash
from .results import NO_DIFFERENCE

NOTHING = "–"  # a cell without a figure
TEXTS = ("stage", "change", "what you type", "what", "note", "stopped by")  # columns that are aligned to the left
STAGES = "../stages/"  # the way from a page in results/
TERMINAL = 80  # columns
LONG_WARMUP = 10  # seconds that are worth a note
NOT_ENOUGH_MEMORY = 3  # a step that takes this many times its predicted seconds is probably paging
STARTS_OF_KERNELS_MS = 20  # a shorter step of s01 may wait for the CPU, which starts its kernels
# blue bars that can be seen on light and dark
CHART_COLORS = (
    '%%{init: {"themeVariables": {"xyChart": {"backgroundColor": "transparent", "plotColorPalette": "#3b7dd8"}}}}%%'
)


# Pieces


def markdown(rows, texts=TEXTS):
    """Return a table in markdown. texts: the columns that are aligned to the left."""
    columns = list(rows[0])
    rules = [":--" if column in texts else "--:" for column in columns]
    lines = [columns, rules, *(list(row.values()) for row in rows)]
    drawn = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)
    return drawn.replace(" ± ", "\u00a0±\u00a0")  # a figure stays on one line


def aligned(rows):
    """Return a table as lines for a terminal. Where it is too wide, its widest column is cut."""
    rows = [{column: column for column in rows[0]}, *rows]
    widths = {column: max(len(row[column]) for row in rows) for column in rows[0]}
    texts = [column for column in widths if column in TEXTS]
    too_wide = sum(widths.values()) + len(widths) + len(texts) - 1 - TERMINAL
    if too_wide > 0:
        widest = max(widths, key=widths.get)
        widths[widest] = max(1, widths[widest] - too_wide)
    lines = []
    for row in rows:
        line = ""
        for column, width in widths.items():
            cell = row[column] if len(row[column]) <= width else row[column][: width - 1] + "…"
            line += cell.ljust(width) + "  " if column in TEXTS else cell.rjust(width) + " "
        lines.append(line.rstrip())
    return "\n".join(lines)


def linked(row, folder, text):
    """Return a text for a row with a link to its stage. folder: the way to the stages, or None for no link."""
    if folder is None or row.stage_of_ladder is None:
        return text
    return f"[{text}]({folder}{row.stage}.py)"


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


def comparison(results, row, base, digits):
    """Return the cell that compares a row with another, to so many digits after the point."""
    compared = results.compare(row, base)
    if compared is None:
        return NOTHING
    if compared.spread is None:
        return f"{compared.value:.{digits}f}"
    return f"{compared.value:.{digits}f} ± {compared.spread:.{digits}f}"


def ratio_alone(results, row, base):
    """Return the cell of a ratio in the short table, without its ±."""
    compared = results.compare(row, base)
    return f"{compared.value:.2f}" if compared else NOTHING


def speed_and_memory(row):
    """Return the cells (tokens per second, GB) of a row in the short table."""
    if row.figures is None:
        return NOTHING, NOTHING
    return f"{row.figures['tok_per_sec']:,.0f}", gigabytes(row.figures["memory"])


# The short table of the ladder


def short_rows(results, folder=None):
    """Return the short table of the ladder. folder: the way to the stages, for links; None for a terminal."""
    rows = []
    reference = results.reference
    for row in results.table_rows:
        speed, memory = speed_and_memory(row)
        rows.append(
            {
                "stage": linked(row, folder, row.short),
                "what you type": typed(row, in_markdown=folder is not None),
                "tok/sec": speed,
                "x above": ratio_alone(results, row, row.base),
                f"x {reference.short}": ratio_alone(results, row, reference),
                "GB": memory,
            }
        )
    return rows


def typed(row, in_markdown):
    """Return what the reader of a row types."""
    is_stage = row.stage_of_ladder is not None and row.name == row.stage
    text = row.stage_of_ladder.line if is_stage else row.change
    if is_stage and row.stage_of_ladder.for_the_loss:
        text = f"for the loss: {text}"
    return text if in_markdown else text.replace("`", "")


def short_rows_of_variants(results, note_of_mode):
    """Return the short table of variants of one stage, which are all compared with the first."""
    rows = []
    for row in results.table_rows:
        speed, memory = speed_and_memory(row)
        ratio = ratio_alone(results, row, results.reference)
        cells = {"what": row.name, "tok/sec": speed, f"x {results.reference.short}": ratio, "GB each": memory}
        rows.append(cells | {"note": note_of_mode(results, row)})
    return rows


# The full table


def full_rows(results, note_of_mode, vs_previous):
    """Return the full table.

    note_of_mode(results, row): words of the mode for the column "note". vs_previous: whether a row is compared with the
    one above, as in the ladder, beside the reference.
    """
    rows = []
    reference = results.reference
    step = results.last_common_step()
    for row in results.table_rows:
        cells = {"stage": linked(row, STAGES, row.name), "change": row.change, **speed_cells(row)}
        if results.rates:
            cells["predicted"] = prediction(results, row)
        if vs_previous:
            cells["vs previous"] = comparison(results, row, row.base, 3)  # neighbors differ by little
        cells[f"vs {reference.short}"] = comparison(results, row, reference, 2)
        if results.rates:
            share = results.peak_share(row)
            cells["% of peak"] = f"{100 * share:.1f}" if share else NOTHING
        if step is not None:
            loss = results.loss_at(row, step)
            cells[f"loss, step {step}"] = f"{loss:.2f}" if loss else NOTHING
        cells["note"] = note(results, row, note_of_mode)
        rows.append(cells)
    return rows


def speed_cells(row):
    """Return {column: cell} of a row's speed and memory; dashes where it left no counted step."""
    figures = row.figures
    if figures is None:
        return {"tok/sec": NOTHING, "dt ms [IQR]": NOTHING, "memory GB": NOTHING}
    quartiles = f"{milliseconds(figures['dt_q1_ms'])}–{milliseconds(figures['dt_q3_ms'])}"
    memory = gigabytes(figures["memory"])
    if figures["reserved"]:
        memory += f" ({gigabytes(figures['reserved'])} reserved)"
    return {
        "tok/sec": f"{figures['tok_per_sec']:,.0f}",
        "dt ms [IQR]": f"{milliseconds(figures['dt_ms'])} [{quartiles}]",
        "memory GB": memory,
    }


def prediction(results, row):
    """Return the cell of the column "predicted": "unknown" for a stage whose worth FLOPs and bytes do not tell."""
    ratio = results.predicted(row)
    if ratio is not None:
        return f"{ratio:.3f}"
    if row.stage_of_ladder and row.base and not results.is_predictable(row):
        return "unknown"
    return NOTHING


def note(results, row, note_of_mode):
    """Return what this machine makes of a row, whether a difference was seen, and what is wrong with it."""
    parts = []
    error = results.error(row)
    if error:
        parts.append(f"failed: {error}")
    elif not results.is_finished(row):
        parts.append(how_far(results, row))
    same_steps, words = results.effect(row)
    parts.append(words)
    if same_steps:
        parts.append("same computation as the row above")
    if row in results.suspicious:
        parts.append("and yet differs by more than noise: look into it")
    parts.append(note_of_mode(results, row))
    parts.append(results.verdict(row, row.base))
    if row.figures and row.figures["warmup_s"] > LONG_WARMUP:
        parts.append(f"{row.figures['warmup_s']:.0f} s of warm-up")
    parts.append(staleness(row))
    return "; ".join(part for part in parts if part)


def how_far(results, row):
    """Return words on a row that is not finished."""
    if results.pairs_turns:
        return "not finished"
    ended = [run for run in row.runs if run.has_ended]
    return f"{len(ended)} of {results.bench['rounds']} rounds"


def staleness(row):
    """Return which code of the ladder has changed since a row was measured, or ""."""
    if row.stage_of_ladder is None or row.facts is None:
        return ""
    if row.facts["code"] != code_hash(ladder.path_of(row.stage)):
        return "stale: the stage has changed since"
    model_code = row.facts["model_code"]
    if model_code and model_code != code_hash(ladder.FOLDER.parent / "model.py"):
        return "stale: model.py has changed since"
    return ""


# The lines under a table


def conditions(results, method):
    """Return what stands under a table, as a markdown list. method: a sentence on how the runs were led."""
    facts = results.any_facts()
    if facts is None:
        return "- No stage got as far as its first step."
    env, settings = facts["environment"], facts["settings"]
    versions = [f"torch {env['torch']}", f"Python {env['python']}"]
    if env["cuda"]:
        versions.append(f"CUDA {env['cuda']}, driver {env['driver']}")
    machine = [f"**{env['device_name']}**", f"{env['cores']} cores", f"{env['threads']} threads", env["system"]]
    lines = [f"{', '.join([*machine, *versions])}, {facts['started'][:10]}."]
    lines.append(f"{what_ran(facts)}, seed {settings['seed']}. {method}")
    lines += [noise_line(results), peak_line(results, facts), paging_line(results)]
    lines.append(f"Again: `{results.bench['command']}` at commit {facts['commit'] or 'unknown'}.")
    return "\n".join(f"- {line}" for line in lines if line)


def what_ran(facts):
    """Return the shape of the model and of a batch, and the text, of a run."""
    settings, shape = facts["settings"], facts["shape"]
    parts = []
    if shape:
        parts += [shape_name(shape), f"B {settings['batch_size']}", f"T {shape['block_size']}"]
    if settings["corpus"]:
        parts.append(f"{settings['corpus']} in tokens of {settings['tokenizer']}")
    return ", ".join(parts) or "no GPT and no corpus"


def noise_line(results):
    """Return how far runs of one computation came out apart, and what is called a difference."""
    if not results.control_rows:
        return ""
    pairs = []
    for row in results.control_rows:
        if results.error(row):
            pairs.append(f"{row.name} failed: {results.error(row)}")
    for control in results.controls:
        pairs.append(f"{control.row.short} / {control.base.short} {control.ratio.value:.3f}")
    told = ", ".join(pairs) or "none has ended"
    if results.noise is None:
        return f"Runs of one computation: {told}. That is too little to call anything faster or slower."
    noise = f"{100 * results.noise:.1f} %"
    rule = f'A difference of up to {noise}, or of up to its own ±, is called "no difference".'
    return f"Noise, from runs of one computation: {told}. {rule}"


def undecided_line(results):
    """Return which rows can't be told from those they are compared with; "" where all can, or no noise is known."""
    if results.noise is None:
        return ""
    pairs = []
    for row in results.table_rows:
        if results.verdict(row, row.base) == NO_DIFFERENCE:
            pairs.append(f"{row.short} from {row.base.short}")
    return f"can't be told apart: {', '.join(pairs)}" if pairs else ""


def peak_line(results, facts):
    """Return what the columns "% of peak" and "predicted" divide by."""
    if results.rates is None:
        if results.probe and results.error(results.probe):
            return f"No peak and no predictions, since the probe failed: {results.error(results.probe)}."
        return ""
    peaks = [f"{rate / 1e12:.2f} TFLOP/s in {dtype}" for dtype, rate in sorted(results.rates.matmul.items())]
    line = f"Peak: {', '.join(peaks)}, sustained by large matmuls."
    line += f" A large copy moves {results.rates.copy / 1e9:,.1f} GB/s."
    if facts["shape"]:
        line += f" A token takes {flops_per_token(facts['shape']) / 1e6:.0f} MFLOP."
    return line


def paging_line(results):
    """Return a warning where a GPU took so long for s01 that its batch may not fit into the card's memory, or ""."""
    for row in results.table_rows:
        if row.stage != ladder.NAMES[0] or row.figures is None or results.rates is None:
            continue
        work = ladder.work_of(row.stage, row.facts)
        predicted = 1e3 * row.counted_steps[0]["tokens"] * seconds_per_token(work, results.rates)
        times = row.figures["dt_ms"] / predicted
        is_on_card = row.facts["environment"]["device"] == "cuda"
        if is_on_card and times > NOT_ENOUGH_MEMORY and predicted > STARTS_OF_KERNELS_MS:
            return (
                f"{row.short} took {times:.1f} times the sum of its parts. A batch that does not fit the card's memory "
                "does that under Windows, also in WSL: it pages to system memory, and every ratio is then of paging. "
                "Try half the --batch-size."
            )
    return ""


# The chart and the page


def chart(results):
    """Return a bar of tokens per second for each row as a mermaid chart, which GitHub draws; "" without any."""
    names, speeds = [], []
    for row in results.table_rows:
        if row.figures:
            names.append(f'"{row.short}"')
            speeds.append(row.figures["tok_per_sec"] / 1e3)
    if not speeds:
        return ""
    bars = ", ".join(f"{speed:.2f}" for speed in speeds)
    lines = [
        "```mermaid",
        CHART_COLORS,
        "xychart-beta",
        '    title "thousands of tokens per second"',
        f"    x-axis [{', '.join(names)}]",
        f"    y-axis 0 --> {1.1 * max(speeds):.2f}",
        f"    bar [{bars}]",
        "```",
    ]
    return "\n".join(lines)


def page(results, title, tables, method):
    """Return the whole of results/NAME.md. tables: texts. method: a sentence on how the runs were led."""
    heading = f"# {title} on {results.bench['environment']['device_name']}"
    parts = [heading, *tables, conditions(results, method), "[How to read this page](README.md)"]
    return "\n\n".join(part for part in parts if part) + "\n"
