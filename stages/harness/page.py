"""From figures to markdown: tables, the lines under them, and a chart."""

import math
import statistics

from data import refuse

from . import ladder
from .arithmetic import flops_per_token
from .records import WARMUP
from .results import ALL_REDUCE, PLAIN

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"  # README.md's table stands between them
NOTHING = "–"  # a cell without a figure
TEXTS = ("stage", "change", "what you type", "note", "stopped by")  # columns that are aligned to the left
STAGES = "../stages/"  # from a page in results/
# the least speed-up over float32 that earns a 16-bit type each recommendation, the best one first
GRADES = ((1.5, "excellent: switch it on"), (1.2, "significant: switch it on"), (1.05, "modest"), (0.95, "negligible"))


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


def speed_cells(results, name):
    """Return {column: cell} of a row's speed and memory; dashes where it left no counted step."""
    summary = results.summary(name)
    if summary is None:
        return {"tok/sec": NOTHING, "dt ms [IQR]": NOTHING, "memory GB": NOTHING}
    quartiles = f"{milliseconds(summary['dt_q1_ms'])}–{milliseconds(summary['dt_q3_ms'])}"
    memory = gigabytes(summary["memory"])
    if summary["reserved"]:
        memory += f" ({gigabytes(summary['reserved'])} reserved)"
    return {
        "tok/sec": f"{summary['tok_per_sec']:,.0f}",
        "dt ms [IQR]": f"{milliseconds(summary['dt_ms'])} [{quartiles}]",
        "memory GB": memory,
    }


def prediction(results, name):
    """Return the cell of the column "predicted": "unknown" where FLOPs and bytes do not tell, as of s06."""
    ratio = results.predicted(name)
    if ratio is not None:
        return f"{ratio:.3f}"
    if ladder.find(name) and name != results.first_row and not results.is_predictable(name):
        return "unknown"
    return NOTHING


def cells(results, name):
    """Return {column: cell} of a row of the full table."""
    row = {"stage": link(name, STAGES), "change": results.rows[name]["change"]}
    row |= speed_cells(results, name)
    if results.mode in ("ladder", "scale"):
        row["predicted"] = prediction(results, name)
    row["vs previous"] = comparison(results, name, results.row_above(name), 3)  # neighbors differ by little
    row[f"vs {short(results.first_row)}"] = comparison(results, name, results.first_row, 2)
    if results.rates:
        share = results.peak_share(name)
        row["% of peak"] = f"{100 * share:.1f}" if share else NOTHING
    step = results.last_common_step()
    if step is not None:
        loss = results.loss_at(name, step)
        row[f"loss, step {step}"] = f"{loss:.2f}" if loss else NOTHING
    row["note"] = note(results, name)
    return row


def note(results, name):
    """Return what this machine makes of a row, whether a difference was seen, and what is wrong with it."""
    parts = []
    error = results.error(name)
    if error:
        parts.append(f"failed: {error}")
    elif not results.is_finished(name):
        parts.append("not finished")
    parts.append(results.note(name))
    if results.mode == "amp":
        parts.append(recommendation(results, name))
    if results.mode == "scale":
        parts.append(efficiency(results, name))
    parts.append(results.verdict(name))
    summary = results.summary(name)
    if summary and summary["warmup_s"] > 10:
        parts.append(f"{summary['warmup_s']:.0f} s of warm-up")
    if results.is_stale(name):
        parts.append("stale: the stage has changed since")
    return "; ".join(part for part in parts if part).replace("|", "\\|")


def recommendation(results, name):
    """Return what a 16-bit type is worth, by its measured speed-up over float32."""
    compared = results.compare(name, results.first_row)
    if compared is None:
        return ""
    words = grade(compared[0])
    ours, theirs = results.summary(name)["memory"], results.summary(results.first_row)["memory"]
    if ours and theirs:
        direction = "less" if ours <= theirs else "more"
        words += f", {100 * abs(1 - ours / theirs):.0f} % {direction} memory"
    compiled = results.run_facts(name)["fallbacks"].get("compile")
    if compiled:
        words += f", not compiled: {compiled}"
    return words


def grade(speedup):
    """Return the first of GRADES that a speed-up earns."""
    for least, words in GRADES:
        if speedup > least:
            return words
    return "slower: leave it off"


def efficiency(results, name):
    """Return what several processes reach of so many times one's speed, and what their all-reduce takes."""
    compared = results.compare(name, results.first_row)
    if compared is None:
        return ""
    words = f"efficiency {100 * compared[0] / results.run_facts(name)['settings']['world_size']:.0f} %"
    steps = results.counted_steps(ALL_REDUCE + name)
    if steps:
        ms = 1e3 * results.all_reduce_seconds(name)
        share = 100 * ms / results.summary(name)["dt_ms"]
        words += f", an all-reduce of {steps[0]['bytes'] / 1e6:.0f} MB alone takes {ms:.1f} ms, {share:.1f} % of a step"
    return words


def loss_table(results):
    """Return the held-out losses of stages by learning rate, each stage's best in bold, and against the stage above."""
    by_stage = {}
    for row in results.rows.values():
        by_stage.setdefault(row["stage"], []).append(row)
    rows = []
    best_above = None
    for stage, rated in by_stage.items():
        best = best_row(results, rated)
        row = {"stage": link(stage, STAGES)}
        notes = []
        for rate in rated:
            row[f"lr {rate['lr']}"] = loss_cell(results, rate["name"], is_best=rate is best)
            errors = [run.error for run in results.runs_of(rate["name"]) if run.error]  # of any seed
            if errors:
                notes.append(f"lr {rate['lr']} failed: {errors[0]}")
        row["best vs previous"] = NOTHING
        if best and best_above:
            row["best vs previous"] = comparison(results, best["name"], best_above["name"], 4)
            notes.append(verdict_on_loss(results.compare(best["name"], best_above["name"])))
        if best in (rated[0], rated[-1]) and len(rated) > 2:
            notes.append("best at the end of the rates: try more")
        if results.is_stale(rated[0]["name"]):
            notes.append("stale: the stage has changed since")
        row["note"] = "; ".join(note for note in notes if note).replace("|", "\\|")
        rows.append(row)
        best_above = best
    return table(rows)


def best_row(results, rated):
    """Return the row, of a stage at several rates, with the lowest mean loss over the seeds that all of them have.

    A row of which a seed failed, as where its loss became infinite, is none to recommend. None where no row is left.
    """
    losses = {}
    for row in rated:
        failed = any(run.error for run in results.runs_of(row["name"]))
        if results.samples(row["name"]) and not failed:
            losses[row["name"]] = results.samples(row["name"])
    best, lowest = None, math.inf
    for row in rated:
        if row["name"] not in losses:
            continue
        seeds = set(losses[row["name"]])
        for others in losses.values():
            seeds &= others.keys()
        if not seeds:
            return None
        mean = statistics.mean(losses[row["name"]][seed] for seed in seeds)
        if mean < lowest:
            best, lowest = row, mean
    return best


def loss_cell(results, name, is_best):
    """Return the mean held-out loss of a row, in bold where it is its stage's best, with its seeds where some lack."""
    losses = results.samples(name).values()
    if not losses:
        return NOTHING
    text = f"{statistics.mean(losses):.4f}"
    if is_best:
        text = f"**{text}**"
    if len(losses) < results.bench["rounds"]:
        text += f" ({len(losses)})"
    return text


def verdict_on_loss(difference):
    """Return a difference of two losses, (value, spread), in a word or two; "" for that of a single seed."""
    if difference is None or difference[1] is None:
        return ""
    value, spread = difference
    if abs(value) <= spread:
        return "no difference"
    return "higher" if value > 0 else "lower"


def limit_cells(results, name):
    """Return {column: cell} of a stage in the mode `limit`: its largest batch, and what stopped the next."""
    fits, fails = results.largest_batch(name), results.smallest_batch_that_failed(name)
    row = {"stage": link(name, STAGES), "largest batch": str(fits or "none"), "tok/sec": NOTHING, "memory GB": NOTHING}
    if fits:
        steps = results.runs[fits, name].steps
        last = steps[-1]
        row["tok/sec"] = f"{last['tokens'] / last['dt']:,.0f}"
        row["memory GB"] = gigabytes(last["memory"])
    row["stopped by"] = "not finished"
    if fails:
        error = results.runs[fails, name].error.replace("|", "\\|")
        row["stopped by"] = f"B {fails}: {error}"
    return row


def conditions(results):
    """Return what stands under a table, as a markdown list."""
    facts = results.any_facts()
    if facts is None:
        return "- No stage got as far as its first step."
    env, settings = facts["environment"], facts["settings"]
    versions = [f"torch {env['torch']}", f"Python {env['python']}"]
    if env["cuda"]:
        versions.append(f"CUDA {env['cuda']}, driver {env['driver']}")
    machine = [f"**{env['device_name']}**", f"{env['cores']} cores", f"{env['threads']} threads", env["system"]]
    lines = [f"{', '.join([*machine, *versions])}, {facts['started'][:10]}."]
    shape = f"{settings['size']}, B {settings['batch_size']}, T {settings['seq_len']}"
    text = f"{settings['corpus']} in tokens of {settings['tokenizer']}"
    lines.append(f"{shape}, seed {settings['seed']}, {text}. {method(results)}")
    if results.mode in ("ladder", "amp", "scale"):
        lines.append(noise_line(results))
    if results.rates:
        lines.append(peak_line(results, facts))
    lines.append(f"Again: `{results.bench['command']}` at commit {facts['commit'] or 'unknown'}.")
    return "\n".join(f"- {line}" for line in lines)


def method(results):
    """Return how the runs were led, and what a ratio and its ± are."""
    rounds = results.bench["rounds"]
    if results.mode == "loss":
        steps = results.bench["steps"]
        return (
            f"The loss on the held-out tenth of the text after {steps} steps, the mean over seeds ({rounds}). A "
            "difference is the mean within the seeds, its ± the 95 % interval by Student's t."
        )
    if results.mode == "limit":
        return "A fresh process for each batch."
    if results.pair_by == "step":
        interval = "the 95 % interval of that median, exact if the turns are independent"
        if (results.bench["steps"] - WARMUP) * rounds < 6:
            interval = "their range, since they are so few"
        return (
            f"All processes are alive at once and take one step each in turn: {results.bench['steps']} steps, of which "
            f"four are warm-up. A ratio is the median of the ratios of these turns, its ± {interval}."
        )
    how = f"One after the other, each in a fresh process: {results.bench['steps']} steps, of which four are warm-up"
    if results.bench["enough"]:
        steps, seconds = results.bench["enough"]
        how = f"{how}. A row ended once it had {steps} counted steps and {seconds:g} s of them"
    if rounds == 1:
        return f"{how}. With one round a ratio has no ±."
    return f"{how}: {rounds} rounds, there and back. A ratio is the median over the rounds, its ± their range."


def noise_line(results):
    """Return how far runs of one computation came out apart, and what is called a difference."""
    failed = [f"{name} failed: {results.error(name)}" for name in results.bench["controls"] if results.error(name)]
    if results.noise is None:
        reason = "; ".join(failed) or "no two runs of one computation have ended"
        return f"Noise: unknown, since {reason}. Nothing is called faster or slower."
    pairs = failed
    for (name, base), (ratio, _) in results.controls.items():
        pairs.append(f"{name} / {short(base)} {ratio:.3f}")
    noise = f"{100 * results.noise:.1f} %"
    meaning = f"A difference below the worst of these, {noise}, or below its own ±,"
    if results.has_one_round:
        meaning = f"By their scatter a ratio is known to {noise}, and a smaller difference"
    return f'Noise, from runs of one computation: {", ".join(pairs)}. {meaning} is called "no difference".'


def peak_line(results, facts):
    """Return what the columns "% of peak" and "predicted" divide by."""
    peaks = [f"{rate / 1e12:.2f} TFLOP/s in {dtype}" for dtype, rate in sorted(results.rates.matmul.items())]
    line = f"Peak: {', '.join(peaks)}, sustained by large matmuls."
    line += f" A large copy moves {results.rates.copy / 1e9:,.1f} GB/s."
    if facts["shape"]:
        flops = flops_per_token(facts["shape"], facts["settings"]["seq_len"])
        line += f" A token takes {flops / 1e6:.0f} MFLOP."
    if results.mode == "ladder":
        line += (
            " Predicted: the row above as it was measured, less what the technique saves by "
            "[arithmetic](../stages/arithmetic.md) at these rates."
        )
    return line


def chart(results):
    """Return a bar of tokens per second for each row as a mermaid chart, which GitHub draws; "" without any."""
    names, speeds = [], []
    for name in results.rows:
        summary = results.summary(name)
        if summary:
            names.append(f'"{short(name)}"')
            speeds.append(summary["tok_per_sec"] / 1e3)
    if not speeds or results.mode in ("loss", "limit"):
        return ""
    bars = ", ".join(f"{speed:.2f}" for speed in speeds)
    lines = [
        "```mermaid",
        "xychart-beta",
        '    title "thousands of tokens per second"',
        f"    x-axis [{', '.join(names)}]",
        f"    y-axis 0 --> {1.1 * max(speeds):.2f}",
        f"    bar [{bars}]",
        "```",
    ]
    return "\n".join(lines)


def page(results):
    """Return the whole of results/NAME.md."""
    if results.mode == "loss":
        drawn = loss_table(results)
    elif results.mode == "limit":
        drawn = table([limit_cells(results, name) for name in results.rows])
    else:
        drawn = table([cells(results, name) for name in results.rows])
    what = "The ladder" if results.mode == "ladder" else f"bench.py {results.mode}"
    title = f"# {what} on {results.bench['environment']['device_name']}"
    parts = [title, drawn, conditions(results), chart(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def readme_cells(results, name, above):
    """Return {column: cell} of a row in README.md's table. above: the row that it is compared with."""
    stage = ladder.find(name)
    summary = results.summary(name)
    row = {"stage": link(name, "stages/", short(name))}
    row["what you type"] = stage.line if stage else results.rows[name]["change"]
    row["tok/sec"] = f"{summary['tok_per_sec']:,.0f}" if summary else NOTHING
    for column, base in (("x above", above), (f"x {short(results.first_row)}", results.first_row)):
        compared = results.compare(name, base)
        row[column] = f"{compared[0]:.2f}" if compared else NOTHING
    row["memory GB"] = gigabytes(summary["memory"]) if summary else NOTHING
    return row


def readme_table(results):
    """Return README.md's table. The stages for the loss share a row, with the figures of the last one."""
    rows = []
    above = results.first_row
    for names in readme_groups(results):
        row = readme_cells(results, names[-1], above)
        if len(names) > 1:
            row["stage"] = ", ".join(link(name, "stages/", short(name)) for name in names)
            row["what you type"] = "for the loss: " + ", ".join(ladder.find(name).line for name in names)
        rows.append(row)
        above = names[-1]
    return table(rows)


def readme_groups(results):
    """Return the rows of README.md's table: a list of names for each, one, or several neighbors for the loss."""
    groups = []
    for name in results.rows:
        if name == PLAIN:
            continue
        stage = ladder.find(name)
        above = ladder.find(groups[-1][-1]) if groups else None
        if stage and above and stage.for_the_loss and above.for_the_loss:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def readme_part(results, name):
    """Return README.md's part between its markers: the table, what it was measured on, and the chart."""
    if results.mode != "ladder":
        refuse(f"README.md shows the ladder, and {name} is of {results.mode}: leave --readme out")
    facts = results.any_facts()
    if facts is None:
        refuse(f"{name} has no step yet: leave --readme out")
    env, settings = facts["environment"], facts["settings"]
    shape = f"{settings['size']}, B {settings['batch_size']}, T {settings['seq_len']}"
    where = f"{env['device_name']}, torch {env['torch']}, {shape}, {facts['started'][:10]}"
    caption = f"{where}. [All columns, the noise and the predictions](results/{name}.md)."
    return "\n\n".join([readme_table(results), caption, chart(results)])


def with_part(readme, part):
    """Return README.md's text with a part between its two markers. Exits with one line where these are not there."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        refuse(f"README.md must hold {BEGIN} and, below it, {END}: put each there once")
    return f"{before}{BEGIN}\n{part.strip()}\n{END}{after}"
