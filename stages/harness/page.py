"""From figures to markdown: tables, the lines under them, and a chart."""

from . import ladder
from .arithmetic import flops_per_token
from .loss_page import loss_table
from .markdown import NOTHING, STAGES, comparison, escaped, gigabytes, link, milliseconds, short, table
from .records import WARMUP
from .results import ALL_REDUCE

# blue bars that can be seen on light and dark
CHART_COLORS = (
    '%%{init: {"themeVariables": {"xyChart": {"backgroundColor": "transparent", "plotColorPalette": "#3b7dd8"}}}}%%'
)
# the least speed-up over float32 that earns a 16-bit type each recommendation, the best one first
GRADES = ((1.5, "excellent: switch it on"), (1.2, "significant: switch it on"), (1.05, "modest"), (0.95, "negligible"))


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
    row = {"stage": link(name, STAGES), "change": escaped([results.rows[name]["change"]])}
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
    return escaped(parts)


def recommendation(results, name):
    """Return what a 16-bit type is worth, by its measured speed-up over float32."""
    compared = results.compare(name, results.first_row)
    if compared is None:
        return ""
    words = grade(compared[0])
    if results.verdict(name) == "no difference":
        words = "negligible"
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
    if results.limit_is_found(name):
        row["stopped by"] = escaped([f"B {fails}: {results.runs[fails, name].error}"])
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
    shape = f"{settings['size']}, T {settings['seq_len']}"
    if results.mode != "limit":
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
            f"{WARMUP} are warm-up. A ratio is the median of the ratios of these turns, its ± {interval}."
        )
    how = f"One after the other, each in a fresh process: {results.bench['steps']} steps, of which {WARMUP} are warm-up"
    if results.bench["enough"]:
        steps, seconds = results.bench["enough"]
        how = f"{how}; a row ended early once it had {steps} counted steps and {seconds:g} s of them"
    if rounds == 1:
        return f"{how}. With one round a ratio has no ±."
    spread = "their range" if rounds < 6 else "the 95 % interval of that median"
    return f"{how}: {rounds} rounds, there and back. A ratio is the median over the rounds, its ± {spread}."


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
        CHART_COLORS,
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
