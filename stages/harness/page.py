"""From figures to markdown tables and charts. Starts nothing, writes nothing, imports no torch."""

import json
import math
import statistics

from . import arithmetic, ladder
from .results import (
    ALL_REDUCE,
    LEARNING_RATE,
    NOT_FOR_THIS_DEVICE,
    PEAK,
    ResultsError,
    curve_steps,
    name_at_rate,
    rate_text,
    stage_and_rate,
)

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"  # README.md's table stands between them
NOTHING = "–"  # a cell without a figure
LAST_ON_ONE_DEVICE = "s11_accum"  # README.md's headline is of it: s12 adds nothing before there is a second device
# what markdown, and GitHub's HTML in it, would take for more than a character
SPECIAL = {
    "&": "&amp;",
    "<": "&lt;",
    "|": "\\|",
    "[": "\\[",
    "]": "\\]",
    "*": "\\*",
    "`": "\\`",
    "\\": "\\\\",
}
# the colors of a chart's lines, in the order in which they are drawn
COLORS = {
    "blue": "#3b7dd8",
    "orange": "#e0883b",
    "green": "#3fa36b",
    "purple": "#b25bc9",
    "red": "#d14b4b",
    "gray": "#8a8a8a",
}
# TFLOP/s of matmuls in 16 bits with sums in float32, without sparsity, by the name that the driver gives a card: from
# NVIDIA's datasheets of the A100, the H100 SXM, the H200 and the T4
DATASHEETS = {
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
    "Tesla T4": 65,
}
# what nvidia-smi tells of a card, by its key in a record, with its unit
CARD_FIGURES = {
    "sm_clock": ("SM clock", "MHz"),
    "power": ("power", "W"),
    "temperature": ("temperature", "°C"),
    "power_limit": ("power limit", "W"),
}
# the least speed-up over float32 that earns a 16-bit type each recommendation
GRADES = {
    1.5: "excellent: switch it on",
    1.2: "significant: switch it on",
    1.05: "modest",
    0.95: "negligible",
}


def one_line(text):
    """Text of a record in one line, without what a terminal would obey and what has no place in UTF-8."""
    return "".join(character if character.isprintable() else " " for character in text)


def escape(text):
    """Text of a record as markdown that shows it as it is, in one cell, and never as HTML or as a link."""
    return one_line(text).translate(str.maketrans(SPECIAL))


def code_span(text):
    """Text of a record between backticks, which markdown shows as it is."""
    without_backticks = one_line(text).replace("`", "'")
    return f"`{without_backticks}`"


def short(name):
    """s05 for s05_flash; the names of other rows and of a user's scripts stay."""
    stage = ladder.find(name)
    if stage is None:
        return name
    return stage.short


def markdown(alignment, head, rows):
    """A markdown table, a str. alignment: an l or an r for each column; head and rows: lists of cells."""
    rules = {"l": ":--", "r": "--:"}
    lines = [head, [rules[side] for side in alignment], *rows]
    drawn = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return drawn.replace(" ± ", "\u00a0±\u00a0")  # a figure stays on one line


def milliseconds(value):
    """A time with three digits."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"


def gigabytes(memory):
    """A number of bytes in GB. memory: None where nothing could measure it, and the text says so."""
    if not memory:
        return "no meter"
    return f"{memory / 1e9:.2f}"


def speed_cells(results, name):
    """{column: cell} of a row's speed and memory; dashes where it left no counted step."""
    summary = results.summary(name)
    if summary is None:
        return {"tok/sec": NOTHING, "dt ms [IQR]": NOTHING, "memory GB": NOTHING}
    median = milliseconds(summary["dt_ms"])
    quartiles = f"{milliseconds(summary['dt_q1_ms'])}–{milliseconds(summary['dt_q3_ms'])}"
    memory = gigabytes(summary["memory"])
    if summary["reserved"]:
        memory += f" ({gigabytes(summary['reserved'])} reserved)"
    return {
        "tok/sec": f"{summary['tok_per_sec']:,.0f}",
        "dt ms [IQR]": f"{median} [{quartiles}]",
        "memory GB": memory,
    }


def loss_cell(results, name):
    """The held-out loss of a row, the mean over its seeds, and how many these are: "5.2500 (2)"."""
    losses = results.samples(name).values()
    if not losses:
        return NOTHING
    return f"{statistics.mean(losses):.4f} ({len(losses)})"


def comparison(results, name, base, digits):
    """The cell that compares a row with another, to so many digits after the point."""
    estimate = results.compare(name, base)
    if estimate is None:
        return NOTHING
    return estimate.text(digits)


def stage_link(name, link, text=None):
    """The name of a row, or a text for it, with a link to its stage.

    A user's script, which may be on one machine only, has no link. link: the way from the page to the stages' folder.
    """
    text = text or name
    stage = ladder.names()[0] if name == ladder.PLAIN else name
    if ladder.find(stage) is None:
        return text
    return f"[{text}]({link}{stage}.py)"


def cells(results, name, link):
    """{column: cell} of a row. link: the way from the page to the folder of the stages."""
    row = {"stage": name, "change": escape(results.bench["change"][name])}
    if results.mode in ("ladder", "loss"):  # in other modes a row is no stage
        row["stage"] = stage_link(name, link)
    if results.mode == "loss":
        row["held-out loss (seeds)"] = loss_cell(results, name)
        digits_of_previous, digits_of_first = 4, 4
    else:
        row |= speed_cells(results, name)
        digits_of_previous, digits_of_first = 3, 2  # neighbors differ by little
    if has_predictions(results):
        row["predicted"] = prediction(results, name)
    row["vs previous"] = comparison(results, name, results.row_above(name), digits_of_previous)
    for base in results.bases():
        row[f"vs {short(base)}"] = comparison(results, name, base, digits_of_first)
    if results.mode != "loss":
        share = results.peak_share(name)
        row["% of peak"] = f"{100 * share:.1f}" if share else NOTHING
        step = results.last_common_step()
        loss = results.loss_at(name, step)
        row[f"loss, step {step}"] = f"{loss:.4f}" if loss else NOTHING
    row["note"] = note(results, name)
    return row


def has_predictions(results):
    """Whether a page has the column "predicted": in the modes that have one, where the probe measured the rates."""
    if results.mode == "scale":
        return True
    return results.mode == "ladder" and results.machine_rates() is not None


def prediction(results, name):
    """How many times as fast as the row above a row should be; "unknown" where s06 lies between the two."""
    ratio = results.predicted(name)
    if ratio is not None:
        return f"{ratio:.3f}"
    above = results.row_above(name)
    if ladder.is_below(name, above) and not ladder.is_predictable_against(name, above):
        return "unknown"
    return NOTHING


def full_table(results):
    """The table of results/NAME.md, in ladder order, with all columns."""
    rows = [cells(results, name, "../stages/") for name in results.rows]
    head = list(rows[0])
    texts = ("stage", "change", "note")
    alignment = ["l" if column in texts else "r" for column in head]
    return markdown(alignment, head, [list(row.values()) for row in rows])


def rates_table(results, link):
    """The held-out losses of a bench of several rates: a row for each stage, a column for each rate, and any notes.

    link: the way from the page to the folder of the stages.
    """
    head = ["stage", *(f"lr {rate_text(rate)}" for rate in results.rates)]
    align = "l" + "r" * len(results.rates)
    notes = {stage: note_on_rates(results, stage) for stage in results.stages()}
    has_notes = any(notes.values())
    if has_notes:
        head.append("note")
        align += "l"
    rows = []
    for stage in results.stages():
        row = [stage_link(stage, link)]
        for rate in results.rates:
            row.append(rate_cell(results, stage, rate))
        if has_notes:
            row.append(notes[stage])
        rows.append(row)
    return markdown(align, head, rows)


def rate_cell(results, stage, rate):
    """The held-out loss of a stage at a rate, the mean over its seeds: bold at its best rate.

    The number of seeds stands behind it where some are still to come, or have failed.
    """
    name = name_at_rate(stage, rate)
    losses = results.samples(name).values()
    if not losses:
        return "failed" if results.errors(name) else NOTHING
    text = f"{statistics.mean(losses):.4f}"
    if rate == results.best_rate(stage):
        text = f"**{text}**"
    if len(losses) < results.bench["rounds"]:
        text += f" ({len(losses)})"
    return text


def note_on_rates(results, stage):
    """Whether a stage's best rate is the lowest or highest that was tried, and what failed."""
    parts = []
    best = results.best_rate(stage)
    if best == results.rates[0]:
        parts.append("best at the lowest rate tried: try a lower one")
    elif best == results.rates[-1]:
        parts.append("best at the highest rate tried: try a higher one")
    names = [name_at_rate(stage, rate) for rate in results.rates]
    for name in names:
        errors = results.errors(name)
        if errors:
            _, rate = stage_and_rate(name)
            parts.append(f"lr {rate} failed: {errors[0]['error']}")
    if any(results.is_stale(name) for name in names):
        parts.append("stale")
    return escape("; ".join(parts))


def best_table(results):
    """Each stage at its best rate against the stages above at theirs; "" where no run has a loss yet."""
    names = results.best_rows()
    if not names:
        return ""
    first_stage = list(names)[0]
    head = ["stage", "change", "best rate", "held-out loss (seeds)", "vs previous", f"vs {short(first_stage)}", "note"]
    rows = []
    above = None
    for stage, name in names.items():
        _, rate = stage_and_rate(name)
        verdict = ""
        vs_previous = vs_first = NOTHING
        if above:
            vs_previous = comparison(results, name, above, 4)
            vs_first = comparison(results, name, names[first_stage], 4)
            difference = results.compare(name, above)
            verdict = results.verdict_on_loss(difference) if difference else ""
        change = escape(results.bench["change"][name])
        loss = loss_cell(results, name)
        rows.append([stage_link(stage, "../stages/"), change, rate, loss, vs_previous, vs_first, verdict])
        above = name
    return markdown("llrrrrl", head, rows)


def limit_table(results):
    """The largest batch of each stage that fits, its figures, and what stopped the next."""
    rows = [limit_cells(results, stage) for stage in results.rows]
    return markdown("lrrrl", ["stage", "largest batch", "tok/sec", "memory GB", "stopped by"], rows)


def limit_cells(results, stage):
    """The cells of a stage's row in the table of the mode `limit`."""
    names = results.batches(stage)
    fits, fails = results.largest_batch(stage), results.smallest_batch_that_failed(stage)
    largest, speed, memory = "none", NOTHING, NOTHING
    if fits is not None:
        figures = speed_cells(results, names[fits])
        largest, speed, memory = str(fits), figures["tok/sec"], figures["memory GB"]
    stopped_by = "nothing yet: not finished"
    if fails is not None:
        error = results.error(names[fails])
        stopped_by = f"B {fails}: {escape(error['error'])}"
    return [stage, largest, speed, memory, stopped_by]


def note(results, name):
    """What this machine makes of a row, whether a difference was seen, and whether the row is stale."""
    parts = [results.problem(name), answer(results, name), results.verdict(name)]
    if results.is_stale(name):
        parts.append("stale")
    return "; ".join(escape(part) for part in parts if part)


def answer(results, name):
    """What a row says of its technique; in the modes `amp` and `scale` of its type or its processes."""
    if results.mode == "ladder":
        effect = results.effect(name)
        return effect.note if effect else ""
    if results.mode == "amp":
        parts = [recommendation(results, name), reason_not_compiled(results, name)]
        return "; ".join(part for part in parts if part)
    if results.mode == "scale":
        return efficiency(results, name)
    if results.mode == "memory":
        return pages_of_a_step(results, name)
    return ""


def pages_of_a_step(results, name):
    """How many pages the system clears for a step of a row."""
    faults = results.page_faults(name)
    if faults is None:
        return ""
    if round(faults) == 1:
        return "1 page fault in a step"
    return f"{faults:,.0f} page faults in a step"


def recommendation(results, name):
    """What a 16-bit type is worth here, by its measured speed-up over float32."""
    speedup = results.compare(name, results.rows[0])
    if speedup is None:
        return ""
    words = "slower: leave it off"
    for least, grade in sorted(GRADES.items()):
        if speedup.value > least:
            words = grade
    ours, theirs = results.summary(name)["memory"], results.summary(results.rows[0])["memory"]
    if not ours or not theirs:
        return words
    direction = "less" if ours <= theirs else "more"
    return f"{words}; {100 * abs(1 - ours / theirs):.0f} % {direction} memory"


def reason_not_compiled(results, name):
    """Why a type ran without torch.compile in a stage that has it, since other types may have run with it."""
    header = results.header(name)
    if header is None or not ladder.is_used("compile", header["stage"]):
        return ""
    if "compile" not in header["fallbacks"]:
        return ""
    return f"fallback to eager: {header['fallbacks']['compile']}"


def efficiency(results, name):
    """What several processes reach of so many times one's speed, and what their all-reduce takes."""
    share_of_ideal = results.efficiency(name)
    if share_of_ideal is None:
        return ""
    words = f"efficiency {100 * share_of_ideal:.0f} %"
    steps = results.counted_steps(ALL_REDUCE + name)
    if not steps:
        return words
    ms = 1e3 * results.all_reduce_seconds(name)
    share = 100 * ms / results.summary(name)["dt_ms"]
    megabytes = steps[0]["bytes"] / 1e6
    return (
        f"{words}; an all-reduce of its {megabytes:.0f} MB of gradients by itself takes {ms:.1f} ms, "
        f"{share:.1f} % of a step (DDP hides some behind the backward)"
    )


def hardware(header):
    """The machine and its versions, in a line."""
    env = header["environment"]
    parts = [f"**{escape(env['device_name'])}**"]
    if env["device"] == "cpu":
        parts.append(f"threads {env['threads']}, cores {env['cores']}")
    parts.append(escape(env["system"]))
    for label in ("torch", "Python", "CUDA", "cuDNN", "driver"):
        version = env[label.lower()]
        if version:
            parts.append(f"{label} {escape(str(version))}")
    parts.append(escape(header["started"][:10]))
    return ", ".join(parts) + "."


def method(results):
    """How a row's figures came about, in a sentence or two."""
    settings = results.any_header()["settings"]
    sessions = len({session for session, _ in results.runs})
    steps = results.bench["steps"]
    if results.mode == "limit":
        return "B is the first batch size tried; each gets a fresh process."
    if results.mode == "loss":
        tokens = steps * settings["batch_size"] * settings["seq_len"]
        passes = ""
        if "corpus_tokens" in results.bench:  # not in the oldest records
            passes = f" ({tokens / results.bench['corpus_tokens']:.1f} passes over the corpus)"
        return (
            f"{steps} steps on the same {tokens:,} tokens{passes}, then the loss on the whole held-out "
            "tenth, in nats per token. A difference is the mean over the seeds that both have, its ± the 95 % interval "
            "of the mean by Student's t."
        )
    if results.bench["interleaved"]:
        return (
            f"Interleaved (rounds: {results.counted_wanted}, sessions: {sessions}): all processes of a "
            "session are alive at once and take one step each in turn."
        )
    words = f"Fresh processes (rounds: {sessions}), each by the median of its counted steps."
    seconds = least_counted_seconds(results)
    if seconds is not None:
        words += f" In every process these took {seconds:.1f} s or more."
    return words


def least_counted_seconds(results):
    """The least time that the counted steps of a process took together, in seconds; None where no step was counted."""
    seconds = []
    for name in results.rows:
        for run in results.runs_of(name):
            counted = [step["dt"] for step in run.steps[results.warmup :]]
            if counted:
                seconds.append(sum(counted))
    return min(seconds, default=None)


def setup(results):
    """Model, batch, seeds and corpus of a bench, and its method, in a line."""
    settings = results.any_header()["settings"]
    seeds = set()
    for run in results.runs.values():
        if run.header:
            seeds.add(run.header["settings"]["seed"])
    shape = f"{escape(settings['size'])}, B {settings['batch_size']}, T {settings['seq_len']}"
    seed = f"seed {', '.join(str(seed) for seed in sorted(seeds))}"
    rate = settings.get("lr", LEARNING_RATE)
    if not results.rates and rate != LEARNING_RATE:
        seed += f", lr {rate_text(rate)}"
    corpus = f"{escape(settings['corpus'])} in {escape(settings['tokenizer'])} tokens"
    return f"{shape}, {seed}, {corpus}. {method(results)}"


def what_a_ratio_is():
    """The line that defines a ratio and its interval."""
    return (
        "A ratio is the median of the ratios within the rounds. It is not the ratio of the two medians, so "
        "that two rows of equal tok/sec may differ in it. Its ± is the wider half of an interval: of the "
        "exact 95 % interval of that median, with fewer than six rounds of their whole range. It covers "
        "this run alone."
    )


def what_predicted_is(results):
    """The line that explains the column "predicted"."""
    if results.mode == "scale":
        return (
            "Predicted: the step of a single rank divided by the number of ranks, and the all-reduce after it, against "
            "the row above."
        )
    rates = results.machine_rates()
    units = [f"{name} {rate / 1e12:.3f} TFLOP/s" for name, rate in rates.matmul.items()]
    return (
        "Predicted: the micro-batch of the row above as it was measured, less what the technique saves by arithmetic: "
        f"FLOPs at the rate of the matmuls ({', '.join(units)}) and bytes at that of the copy "
        f"({rates.copy / 1e9:.1f} GB/s). [The lessons](../stages/README.md#before-s01--the-arithmetic) count both. "
        'What a padded vocabulary gains (s06), only a trial tells: it is "unknown".'
    )


def noise_line(results):
    """How far the runs of one program came out apart, pair by pair, and what follows for the verdicts."""
    controls = results.controls()
    if not controls:
        return "Noise: no A/A pair finished, so no difference is called one."
    shown = []
    for (name, base), ratio in controls.items():
        shown.append(f"{name} / {short(base)} {ratio.text(3)} ({len(results.samples(name))})")
    return (
        f"Noise, from runs of one computation (rounds): {', '.join(shown)}. A difference of less than the "
        f'worst, {100 * results.noise():.1f} %, or than its own ±, is called "no difference". '
        "In the noise, a ratio below 1 counts as its inverse."
    )


def peak_line(results):
    """What the column "% of peak" is a share of."""
    steps = results.counted_steps(PEAK)
    rates = []
    for dtype, rate in sorted(results.matmul_rates().items()):
        rates.append(f"{rate / 1e12:.2f} TFLOP/s in {dtype}")
    header = results.any_header()
    flops = arithmetic.flops_per_token(header["shape"], header["settings"]["seq_len"])
    return (
        f"Peak: {', '.join(rates)}, reached by matmuls of size {steps[0]['size']} "
        f"(rounds: {len(results.samples(PEAK))}). "
        f"The column is the share of the highest rate, taken within a round. A token takes {flops / 1e6:.0f} MFLOP "
        "(6 (12 L C² + V C) + 12 L C T, attention counted in full)."
        f"{datasheet_sentence(results)}"
    )


def datasheet_sentence(results):
    """What NVIDIA specifies for a card and what share of it the matmuls reached; "" for a card that is not known."""
    specified = DATASHEETS.get(results.any_header()["environment"]["device_name"])
    rates = [rate for dtype, rate in results.matmul_rates().items() if dtype in ("bfloat16", "float16")]
    if specified is None or not rates:
        return ""
    share = max(rates) / (1e12 * specified)
    return (
        f" This peak is measured. NVIDIA specifies {specified:g} TFLOP/s in 16 bits for this card, without sparsity: "
        f"the matmuls reached {100 * share:.0f} % of that."
    )


def bandwidth_line(results):
    """How fast a large tensor is copied."""
    rate = results.machine_rates().copy
    return f"Memory bandwidth: copying a large tensor moves {rate / 1e9:.1f} GB/s, reads and writes counted."


def clearing_line(results):
    """How fast the system clears the pages that a process asks for."""
    rates = []
    for size in ("4 kB", "2 MB"):
        rate = statistics.median(step["clear"][size] for step in results.counted_steps(PEAK))
        rates.append(f"{rate / 1e9:.2f} GB/s in pages of {size}")
    return f"Fresh memory: the system clears it and hands it out at {' and at '.join(rates)}."


def memory_line(results):
    """Where the memory's figures are from."""
    meters = set()
    for run in results.runs.values():
        for step in run.steps:
            if "meter" in step:
                meters.add(step["meter"])
    return f"Memory: {escape(' and '.join(sorted(meters)))}, of the steps after the warm-up."


def card_line(results):
    """How fast, how hot and at what power a card worked, over all runs; "" where no record tells."""
    states = []
    for run in results.runs.values():
        card = run.summary.get("card") if run.summary else None
        if card:
            states += [card["start"], card["end"]]
    parts = []
    for key, (label, unit) in CARD_FIGURES.items():
        figures = [state[key] for state in states if state[key] is not None]
        if figures:
            parts.append(f"{label} {span(figures)} {unit}")
    if not parts:
        return ""
    return f"Card: {', '.join(parts)}, before the first and after the last counted step of all runs."


def span(figures):
    """The smallest and the largest of some figures, rounded; a single number where they are the same."""
    smallest, largest = f"{min(figures):,.0f}", f"{max(figures):,.0f}"
    if smallest == largest:
        return smallest
    return f"{smallest}–{largest}"


def command_line(results):
    """How to run the same bench again."""
    header = results.any_header()
    commit = escape((header["commit"] or "none")[:12])
    if header["dirty"]:
        commit += " with changes"
    return f"Again: {code_span(results.bench['command'])} at commit {commit}."


def machine_and_setup(results):
    """What ran and on what, a list of two lines."""
    header = results.any_header()
    if header is None:
        return ["No stage got as far as its first step."]
    return [hardware(header), setup(results)]


def markdown_list(lines):
    """Lines as a list of markdown."""
    return "\n".join(f"- {line}" for line in lines)


def conditions(results):
    """What stands under a table, as a markdown list: hardware, settings, noise, peak, and the command."""
    lines = machine_and_setup(results)
    if results.any_header() is None:
        return markdown_list(lines)
    is_of_speed = results.mode not in ("limit", "loss")
    if is_of_speed:
        lines.append(what_a_ratio_is())
        if has_predictions(results):
            lines.append(what_predicted_is(results))
        lines.append(noise_line(results))
    peak = results.counted_steps(PEAK)
    if peak:
        lines.append(peak_line(results))
        if "copy" in peak[0]:
            lines.append(bandwidth_line(results))
        if "clear" in peak[0]:
            lines.append(clearing_line(results))
    lines.append(card_line(results))
    if results.mode != "loss":
        lines.append(memory_line(results))
    if results.rates:
        lines.append(rates_line(results))
    if any(results.is_stale(name) for name in results.rows):
        lines.append("Stale: the stage's code has changed since it was measured.")
    lines.append(command_line(results))
    return markdown_list(line for line in lines if line)


def rates_line(results):
    """What the best rate of a stage is, and how many runs are still to come."""
    line = (
        "A stage's best rate, in bold, is the one with the lowest mean over the seeds that all rates have. Where it is "
        "the lowest or the highest rate tried, the best one may lie outside."
    )
    wanted = len(results.rows) * results.bench["rounds"]
    finished = sum(len(results.samples(name)) for name in results.rows)
    if finished < wanted:
        line += f" Not finished: {finished} of {wanted} runs have a held-out loss."
    return line


def mermaid(lines):
    """A mermaid chart of these lines, a block of markdown that GitHub draws, readable on light and dark."""
    colors = {"backgroundColor": "transparent", "plotColorPalette": ", ".join(COLORS.values())}
    room = {"yAxis": {"labelPadding": 12}}  # else a phone cuts off the first digit
    style = json.dumps({"themeVariables": {"xyChart": colors}, "xyChart": room})
    start = f"```mermaid\n%%{{init: {style}}}%%\nxychart-beta"
    return "\n    ".join([start, *lines]) + "\n```"


def speed_chart(results):
    """A bar of tokens per second for each row; "" where no row has a counted step."""
    names, speeds = [], []
    for name in results.rows:
        summary = results.summary(name)
        if summary:
            names.append(f'"{short(name)}"')
            speeds.append(summary["tok_per_sec"] / 1e3)
    if not speeds:
        return ""
    bars = ", ".join(f"{speed:.2f}" for speed in speeds)
    return mermaid(
        [
            'title "thousands of tokens per second"',
            f"x-axis [{', '.join(names)}]",
            f"y-axis 0 --> {1.1 * max(speeds):.2f}",
            f"bar [{bars}]",
        ]
    )


def mean_curve(results, name):
    """The training curve of a row, the mean over its seeds; an empty list where no run of it finished."""
    curves = [run.summary["curve"] for run in results.runs_of(name) if run.summary and "curve" in run.summary]
    return [statistics.mean(losses) for losses in zip(*curves, strict=True)]


def legend_and_lines(points_of_label):
    """(legend, lines of mermaid) of up to six lines of a chart. points_of_label: {label: losses, may be none}."""
    color_names = list(COLORS)
    legend, lines = [], []
    for label, points in points_of_label.items():
        if points and len(lines) < len(COLORS):
            legend.append(f"{label} {color_names[len(lines)]}")
            figures = ", ".join(f"{point:.3f}" for point in points)
            lines.append(f"line [{figures}]")
    return ", ".join(legend), lines


def loss_chart(results):
    """A line of the training loss for each of up to six rows that finished; "" where none did.

    Where there are several rates, a row is a stage at its best one.
    """
    first_steps, length = curve_steps(results.bench["steps"])
    title = "training loss, mean over the seeds"
    curves = {}
    if results.rates:
        title = "training loss at each one's best rate, mean over the seeds"
        for stage, name in results.best_rows().items():
            _, rate = stage_and_rate(name)
            curves[f"{short(stage)} at {rate}"] = mean_curve(results, name)
    else:
        for name in results.rows:
            curves[short(name)] = mean_curve(results, name)
    legend, lines = legend_and_lines(curves)
    if not lines:
        return ""
    first, last = first_steps[0] + length / 2, first_steps[-1] + length / 2
    axis = f'x-axis "step ({legend})" {first:.0f} --> {last:.0f}'
    return mermaid([f'title "{title}"', axis, *lines])


def rates_chart(results):
    """A line of the held-out loss over the learning rate for each of up to six stages; "" with fewer than two rates.

    Mermaid has no gap in a line: it shows the rates at which all of its stages have a loss.
    """
    stages = list(results.best_rows())
    rates = []
    for rate in results.rates:
        if all(results.samples(name_at_rate(stage, rate)) for stage in stages):
            rates.append(rate)
    if not stages or len(rates) < 2:
        return ""
    means, all_means = {}, []
    for stage in stages:
        names = [name_at_rate(stage, rate) for rate in rates]
        means[short(stage)] = [statistics.mean(results.samples(name).values()) for name in names]
        all_means += means[short(stage)]
    legend, lines = legend_and_lines(means)
    bottom = math.floor(10 * min(all_means)) / 10
    top = math.floor(10 * max(all_means)) / 10 + 0.1
    ticks = ", ".join(f'"{rate_text(rate)}"' for rate in rates)
    return mermaid(
        [
            'title "held-out loss over the learning rate, mean over the seeds"',
            f'x-axis "learning rate ({legend})" [{ticks}]',
            f'y-axis "held-out loss" {bottom:.1f} --> {top:.1f}',
            *lines,
        ]
    )


def chart(results):
    """The chart of a page; "" where there is nothing to draw."""
    if results.mode == "loss":
        return loss_chart(results)
    return speed_chart(results)


def page(results):
    """The whole of results/NAME.md."""
    what = "The ladder" if results.mode == "ladder" else f"make {results.mode}"
    if "title" in results.bench:
        what = escape(results.bench["title"])
    device = escape(results.bench["environment"]["device_name"])
    title = f"# {what} on {device}"
    if results.rates:
        parts = [
            title,
            "Held-out loss at each learning rate:",
            rates_table(results, "../stages/"),
            rates_chart(results),
        ]
        best = best_table(results)
        if best:
            parts += ["Each stage at its best rate, against those above at theirs:", best, chart(results)]
        parts.append(conditions(results))
    else:
        rows = limit_table(results) if results.mode == "limit" else full_table(results)
        parts = [title, rows, conditions(results), chart(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def readme_verdict(results, name):
    """What README.md says of a row in a word or two; the full page has its whole note."""
    problem, error = results.problem(name), results.error(name)
    if error and error["reason"] == NOT_FOR_THIS_DEVICE:
        return "not on this device"
    if error:
        return "failed"
    if problem:  # "not run" or "not finished"
        return problem
    if name == results.rows[0]:
        return NOTHING
    stage, effect = ladder.find(name), results.effect(name)
    if stage and stage.for_the_loss:
        return "for the loss"
    if effect and effect.no_op:
        return "no-op here"
    return results.verdict(name) or NOTHING


def readme_cells(results, name):
    """{column: cell} of a row in README.md, which is narrow: short names, no quartiles, no reserved memory."""
    row = cells(results, name, "stages/")
    summary = results.summary(name)
    vs_first = f"vs {short(results.bases()[-1])}"
    return {
        "stage": stage_link(name, "stages/", short(name)),
        "change": row["change"],
        "tok/sec": row["tok/sec"],
        "vs previous": row["vs previous"],
        "verdict": readme_verdict(results, name),
        vs_first: row[vs_first],
        "memory GB": gigabytes(summary["memory"]) if summary else NOTHING,
    }


def readme_table(results):
    """README.md's table, in ladder order."""
    rows = [readme_cells(results, name) for name in results.rows]
    return markdown("llrrlrr", list(rows[0]), [list(row.values()) for row in rows])


def readme_headline(results):
    """How many times as fast as s01 and as `plain` all techniques for one device are; "" where neither is known."""
    s01 = ladder.names()[0]
    vs_s01 = results.compare(LAST_ON_ONE_DEVICE, s01)
    vs_plain = results.compare(LAST_ON_ONE_DEVICE, ladder.PLAIN)
    parts = []
    if vs_s01:
        parts.append(f"{vs_s01.text()} times as fast as {short(s01)}")
    if vs_plain:
        parts.append(f"{vs_plain.text()} times as fast as `{ladder.PLAIN}`")
    if not parts:
        return ""
    return f"All techniques for one device together ({short(LAST_ON_ONE_DEVICE)}) are {', and '.join(parts)}."


def readme_part(results, name):
    """README.md's part between its markers: the narrow table, the headline with a link to results/NAME.md, the chart.

    Raises ResultsError for the records of another mode than the ladder.
    """
    if results.mode != "ladder":
        raise ResultsError(f"README.md shows the ladder, and {name} is of {results.mode}: leave --readme out")
    link = f"[All columns, the noise and the peak](results/{name}.md)."
    if any(results.is_stale(row) for row in results.rows):
        link = f"Measured with an earlier version of the stages. {link}"
    lines = [readme_headline(results), *machine_and_setup(results), link]
    parts = [readme_table(results), markdown_list(line for line in lines if line), chart(results)]
    return "\n\n".join(part for part in parts if part)


def between_markers(text, content):
    """README.md's text with the content between its two markers.

    Raises ResultsError unless each of them stands there once, and in order.
    """
    before, begin, after_begin = text.partition(BEGIN)
    _, end, after = after_begin.partition(END)
    if not begin or not end or text.count(BEGIN) > 1 or text.count(END) > 1:
        raise ResultsError(f"README.md must hold {BEGIN} and, below it, {END}: put each there once")
    return f"{before}{BEGIN}\n{content.strip()}\n{END}{after}"
