"""From figures to what a reader sees: the table, what stands under it, and its place in a README."""

import math

from data import InputError
from measure.figures import RATE, TWIN, flops_per_token
from stages.record import text_sha256

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
WHAT = {
    "s01_baseline": "float32, attention written out",
    "s02_tf32": "TF32 for float32 products",
    "s03_bf16": "autocast to 16 bits",
    "s04_compile": "torch.compile",
    "s05_flash": "flash attention",
    "s06_vocab": "vocabulary padded to 50304",
    "s07_clip": "betas, gradient clipping",
    "s08_cosine": "warmup, cosine decay",
    "s09_decay": "decay for matrices only",
    "s10_fused": "fused AdamW",
    "s11_accum": "gradient accumulation",
    "s12_ddp": "DistributedDataParallel",
}
COLOURS = '%%{init: {"themeVariables": {"xyChart": {"plotColorPalette": "#3b7dd8, #d9822b"}}}}%%'
FOR_THE_LOSS = ("s07_clip", "s08_cosine", "s09_decay")


def table(results, stages=None):
    """The markdown table, one row a contender in ladder order; stages: the folder that its rows link to, if any."""
    head = [
        "stage",
        "what changed",
        "tok/sec",
        "dt ms [IQR]",
        "memory GB",
        "× before",
        f"× {results.names[0].split('_')[0]}",
        "% of limit",
    ]
    step = results.last_common_step()
    head += [f"loss, step {step}" if step is not None else "loss", "note"]
    rows = [head, [":--", ":--", *["--:"] * 7, ":--"]]
    for name in results.names:
        cells = row(results, name, step)
        if stages and name in WHAT:
            cells[0] = f"[{name}]({stages}{name}.py)"
        if stages:
            # a page may break before the quartiles, and not within a figure
            cells[2:-1] = [cell.replace(" ", "\u00a0").replace("\u00a0[", " [") for cell in cells[2:-1]]
        rows.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def row(results, name, step):
    """The cells of one contender; dashes where a run left no figure."""
    summary = results.summary(name)
    cells = [name, WHAT.get(name, results.settings.get("what", {}).get(name, ""))]
    if summary is None:
        return [*cells, *["–"] * 7, note(results, name)]
    share = results.share(name)
    return [
        *cells,
        f"{summary['tok_per_sec']:,.0f}",
        f"{digits(summary['dt_ms'])} [{digits(summary['dt_q1_ms'])}, {digits(summary['dt_q3_ms'])}]",
        memory(summary),
        str(versus(results, name, before(results, name)) or "–"),
        str(versus(results, name, results.names[0]) or "–"),
        f"{100 * share:.1f}" if share else "–",
        f"{results.loss(name, step):.4f}",
        note(results, name),
    ]


def digits(ms):
    """Milliseconds with the digits that mean something: none behind the point from 100 on."""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def memory(summary):
    """The peak in GB, and on a GPU what the allocator had reserved for it."""
    if not summary["memory"]:
        return "no meter"
    reserved = f" ({summary['reserved'] / 1e9:.2f} reserved)" if summary["reserved"] else ""
    return f"{summary['memory'] / 1e9:.2f}{reserved}"


def before(results, name):
    """The contender in the row above, or None."""
    position = results.names.index(name)
    return results.names[position - 1] if position else None


def versus(results, name, base):
    """The speed-up over another row, or None for a row against itself or where one of the two has no figures."""
    return results.speedup(name, base) if base and base != name else None


def note(results, name):
    """What this hardware makes of the technique, from what the run recorded, and whether it was to be seen."""
    parts = [technique(results, name), verdict(results, name)]
    end, header = results.end(name), results.header(name)
    if end and "error" in end:
        parts.insert(0, end["error"] if end["error"].startswith("out of memory") else f"failed: {end['error']}")
    elif end is None:
        parts.insert(0, "not run" if header is None else "not finished")
    if header and header["stage"].startswith("s") and header["text_sha256"] != text_sha256(header["stage"]):
        parts.append("stale: the text has changed since")
    return "; ".join(part for part in parts if part).replace("|", "/")


def technique(results, name):
    """Whether the technique of a stage is at work here, or why not."""
    header, end = results.header(name), results.end(name) or {}
    if not header or results.settings["question"] != "ladder":
        return ""
    device, fallbacks = header["environment"]["device"], header["fallbacks"]
    if name == "s02_tf32":
        if device == "cuda" and (header["environment"]["capability"] or 0) >= 8:
            return "active"
        return "no-op: no TF32 units in " + ("this GPU" if device == "cuda" else f"a {device.upper()}")
    if name == "s03_bf16":
        if header["amp_dtype"] == "float32":
            return f"no-op: {fallbacks.get('amp_dtype', 'float32 was asked for')}"
        return "active: " + header["amp_dtype"] + (", loss scaled" if header["amp_dtype"] == "float16" else "")
    if name == "s04_compile":
        if not header["compile"]:
            return f"fallback to eager: {fallbacks.get('compile', '--no-compile was given')}"
        return f"active: {results.summary(name)['warmup_s']:.0f} s of warm-up" if results.summary(name) else ""
    if name == "s05_flash" and end.get("sdpa"):
        return f"active: the {end['sdpa']} kernel ran"
    if name in FOR_THE_LOSS:
        return "for the loss, not the speed"
    if name == "s11_accum":
        return f"{header['accum']} micro-batches a step"
    if name == "s12_ddp" and header["world_size"] == 1:
        return "one process: what DDP itself costs"
    return ""


def verdict(results, name):
    """In words, whether the row differs from the one above by more than this run's noise."""
    ratio, noise = versus(results, name, before(results, name)), results.noise()
    if ratio is None or noise is None:
        return ""
    apart = ratio.value - 1
    if abs(apart) <= max(noise, ratio.spread):
        return "no difference"
    return "faster" if apart > 0 else "slower"


def under_the_table(results):
    """The environment, the limit, the noise and the command, as markdown."""
    header = results.any_header()
    if header is None:
        return "No stage got as far as its first step."
    env, lines = header["environment"], []
    versions = [f"torch {env['torch']}", f"Python {env['python']}"]
    versions += [f"CUDA {env['cuda']}, cuDNN {env['cudnn']}, driver {env['driver']}"] if env["cuda"] else []
    threads = f", {env['threads']} threads on {env['cores']} cores" if env["device"] == "cpu" else ""
    lines.append(
        f"**{env['device_name']}**{threads}, {env['system']}, {', '.join(versions)}, {header['started'][:10]}."
    )
    corpus = f"T {header['seq_len']}, seed {header['seed']}, {header['corpus']} in {header['tokenizer']} tokens."
    if results.settings["question"] == "limit":
        lines.append(f"{header['size']}, {corpus} A fresh process for every batch size.")
    else:
        lines.append(f"{header['size']}, B {header['batch_size']}, {corpus} {how(results)}")
        lines.append(noise_line(results))
    rates = results.rates()
    if rates:
        shown = ", ".join(f"{v / 1e12:.2f} TFLOP/s in {k}" for k, v in sorted(rates.items()))
        flops = flops_per_token(header["size"], header["seq_len"])
        n = next(iter(results.steps(RATE)))["size"]
        lines.append(
            f"Limit: a product of {n} x {n} matrices, timed between the steps of this run, reached {shown}; the column "
            f"is the share of the larger. A token takes {flops / 1e6:.0f} MFLOP (6 (12 L C² + V C) + 12 L C T, "
            "attention counted in full)."
        )
    meters = {step["meter"] for _, steps, _ in results.records.values() for step in steps if "meter" in step}
    lines.append(f"Memory: {' and '.join(sorted(meters))}, of the steps after the warm-up." if meters else "")
    commit = header["commit"] or "none"
    again = (
        f"Again: `{results.settings['command']}` at commit {commit[:12]}{' with changes' if header['dirty'] else ''}."
    )
    lines.append(again)
    return "\n".join(f"- {line}" for line in lines if line)


def how(results):
    """In words, how the steps were taken and what a ratio is."""
    sessions = 1 + max((session for session, _ in results.records), default=0)
    steps = results.settings["steps"]
    if results.lockstep:
        steps *= results.settings["rounds"]
        many = f" in {sessions} sessions" if sessions > 1 else ""
        return (
            f"{steps} rounds in lockstep{many}: all processes live at once, warm up two at a time, and take a step "
            "each in turn. × is the median of the ratios within a round, ± its 95 % interval."
        )
    return (
        f"{sessions} rounds of fresh processes, {steps} steps each. × is the median over the rounds of the ratio of "
        "the medians within a round, ± its 95 % interval."
    )


def noise_line(results):
    """The noise of the run, from the pair of identical processes."""
    twin, noise = results.twin(), results.noise()
    if noise is None:
        return "Noise: no pair of identical processes finished, so no difference is called one."
    apart = versus(results, twin + TWIN, twin)
    return (
        f"Noise: {twin} ran twice, and one copy was {apart.value:.3f} ± {apart.spread:.3f} times as fast as the other; "
        f'a step from row to row of less than {100 * noise:.1f} %, or than its own ±, is called "no difference".'
    )


def charts(results):
    """mermaid charts: tokens a second of every stage, and the loss of s07 beside s08's."""
    shown = [(n, results.summary(n)) for n in results.names if results.summary(n)]
    if not shown:
        return ""
    names = ", ".join(n.split("_")[0] if results.settings["question"] == "ladder" else f'"{n}"' for n, _ in shown)
    bars = ", ".join(f"{s['tok_per_sec']:.0f}" for _, s in shown)
    top = 1.1 * max(s["tok_per_sec"] for _, s in shown)
    text = (
        f'```mermaid\n{COLOURS}\nxychart-beta\n    title "tokens a second"\n    x-axis [{names}]\n'
        f"    y-axis 0 --> {top:.0f}\n    bar [{bars}]\n```\n"
    )
    pair = [n for n in ("s07_clip", "s08_cosine") if results.steps(n)]
    if len(pair) == 2:
        longest = [max((record[1] for record in results.of(n)), key=len) for n in pair]
        curves = [[f"{s['loss']:.3f}" for s in steps if math.isfinite(s["loss"])] for steps in longest]
        curves = [curve[: min(map(len, curves))] for curve in curves]
        steps = ", ".join(str(i) for i in range(len(curves[0])))
        text += (
            "\nLoss by step, constant learning rate (s07, blue) against warmup and cosine decay (s08, orange):\n\n"
            f"```mermaid\n{COLOURS}\nxychart-beta\n    x-axis [{steps}]\n"
            f"    line [{', '.join(curves[0])}]\n    line [{', '.join(curves[1])}]\n```\n"
        )
    return text


def between_markers(text, content):
    """text with content between its two markers. Raises InputError where a marker does not occur exactly once."""
    for marker in (BEGIN, END):
        if text.count(marker) != 1:
            raise InputError(f"README.md must hold {marker} exactly once, and has it {text.count(marker)} times")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if end < start:
        raise InputError(f"README.md has {END} before {BEGIN}: swap them")
    return f"{text[:start]}\n{content.strip()}\n{text[end:]}"
