"""From the records of a bench to figures, and from figures to markdown. Starts nothing and writes nothing."""

import json
import math
import statistics
from collections import namedtuple
from pathlib import Path

from data import InputError
from model import flops_per_token

from . import code_sha256, summarize

AGAIN = " again"  # ends the name of the second run of the A/A pair
PEAK = "peak"  # the name of the run that times matmuls, see probe.py
NOT_FOR = "not for "  # begins the message of a stage that this device cannot run, which is no failure
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, two-sided, for 2, 3, ... 10 samples
COLORS = dict(blue="#3b7dd8", orange="#e0883b", green="#3fa36b", purple="#b25bc9", red="#d14b4b", gray="#8a8a8a")


class Estimate(namedtuple("Estimate", "value spread")):
    """A median or a mean of some samples, and the half width of its 95 % interval, None where there is none."""

    @classmethod
    def median(cls, samples):
        """The interval between the k-th samples from either end, k the largest with which it holds the median in 95 %.

        That is exact for any distribution, by the binomial one. Below six samples no k does: then it is the range.
        """
        ordered, n = sorted(samples), len(samples)
        outside = [2 * sum(math.comb(n, i) for i in range(k)) / 2**n for k in range(1, n // 2 + 1)]
        k = max((k for k, missed in enumerate(outside, 1) if missed <= 0.05), default=1)
        median = statistics.median(ordered)
        return cls(median, max(ordered[-k] - median, median - ordered[k - 1]) if n > 1 else None)

    @classmethod
    def mean(cls, samples):
        """The interval by Student's t, for samples as few as seeds are."""
        n = len(samples)
        half = T95[min(n, 10) - 2] * statistics.stdev(samples) / n**0.5 if n > 1 else None
        return cls(statistics.mean(samples), half)

    def text(self, digits=2):
        return f"{self.value:.{digits}f}" + ("" if self.spread is None else f" ± {self.spread:.{digits}f}")


Run = namedtuple("Run", "header steps end")  # what one process left; end is its summary or its error


def run_of(lines):
    """The Run of the lines of a record, each a dict; header is None and end is {} where it did not get there."""
    run = Run(None, [], {})
    for line in lines:
        if line["kind"] == "header":
            run = Run(line, [], {})  # a run that was started again replaces the one before
        elif line["kind"] == "step":
            run.steps.append(line)
        elif "error" not in run.end:
            run = run._replace(end=line)
    return run


def read(path):
    """The lines of a record, but a last one that was cut off; headers with "flops". InputError names a damaged line."""
    lines = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
        try:
            entry = json.loads(line, parse_constant=int)  # int, since NaN is none: a ValueError
            if entry["kind"] == "header":
                entry["flops"] = flops_per_token(entry["settings"]["size"], entry["settings"]["seq_len"])
            others = [entry.get(key) or 0 for key in ("session", "memory", "loss", "norm", "lr", "eval")]
            if not all(entry[key] > 0 for key in ("dt", "tokens") if key in entry) or min(others) < 0:
                raise ValueError
            lines.append(entry)
        except (ValueError, LookupError, TypeError):
            raise InputError(f"{path}: line {number} is damaged: put the file back as it was, or remove it") from None
    return lines


class Results:
    """All records of one bench: its own line, `bench`, and `runs`, {(session, name): Run}."""

    def __init__(self, path):
        """From results/NAME.jsonl. Raises OSError, and InputError where it holds no records of one bench."""
        lines, runs = read(path), {}
        try:
            self.bench, *lines = lines
            self.mode, self.rows, self.warmup = self.bench["mode"], list(self.bench["change"]), self.bench["warmup"]
            self.wanted = (self.bench["steps"] - self.warmup) * self.bench["rounds"]  # counted steps per row
            _ = self.bench["command"], self.bench["interleaved"], self.bench["environment"]
            for line in lines:
                runs.setdefault((line["session"], line["name"]), []).append(line)
        except (ValueError, LookupError, TypeError):
            raise InputError(f"{path} is no record of a bench: pass the NAME of one that ran") from None
        self.runs = {key: run_of(of) for key, of in sorted(runs.items())}

    def of(self, name):
        """The Runs of a row, in the order of the sessions."""
        return [run for (_, n), run in self.runs.items() if n == name]

    def header(self, name=None):
        """The first header of a row, or of all rows; None where no run got that far."""
        return next((run.header for (_, n), run in self.runs.items() if run.header and name in (None, n)), None)

    def end(self, name):
        """How the last run of a row ended: its summary, or a dict with "error"; {} where it did not."""
        return next((run.end for run in reversed(self.of(name))), {})

    def steps(self, name):
        """Every counted step of a row, its sessions pooled."""
        return [step for run in self.of(name) for step in run.steps[self.warmup :]]

    def summary(self, name):
        """summarize() of all counted steps of a row, or None where it has none."""
        if not (steps := self.steps(name)):
            return None
        warmup_s = sum(step["dt"] for step in self.of(name)[0].steps[: self.warmup])
        reserved = max(run.end.get("reserved", 0) for run in self.of(name))
        return summarize(steps, warmup=0) | dict(warmup_s=warmup_s, reserved=reserved)

    def samples(self, name):
        """{round: seconds per token, of the probe per FLOP; in the mode `loss` the held-out loss at a run's end}."""
        rounds = {}  # a step of interleaved runs, else a session, which is a seed in the mode `loss`
        for session, run in ((session, run) for (session, n), run in self.runs.items() if n == name):
            steps = run.steps[self.warmup :]
            values = [1 / max(s["peak"].values()) if "peak" in s else s["dt"] / s["tokens"] for s in steps]
            if self.mode == "loss":
                values = [run.end["eval"]] if "eval" in run.end else []
            elif values and not self.bench["interleaved"]:
                values = [statistics.median(values)]
            rounds |= {(session, i): value for i, value in enumerate(values)}
        return rounds

    def compare(self, name, base):
        """A row's speed over that of `base`, paired by round, or its loss minus that of `base`; None without any."""
        ours, theirs = self.samples(name), self.samples(base)
        shared = sorted(ours.keys() & theirs.keys())
        if not shared or name == base:
            return None
        if self.mode == "loss":
            return Estimate.mean([ours[key] - theirs[key] for key in shared])
        return Estimate.median([theirs[key] / ours[key] for key in shared])

    def above(self, name):
        """The row above; for the first row itself."""
        return self.rows[max(0, self.rows.index(name) - 1)]

    def same(self, name):
        """Whether a row is one computation with the row above: its technique is for the loss, or a no-op here."""
        header, follows = self.header(name), dict(s02="s01", s03="s02", s08="s07", s09="s08")
        if self.mode != "ladder" or not header or follows.get(short(name)) != short(self.above(name)):
            return False
        no_op = dict(s02=not header["environment"]["tf32"], s03=header["settings"]["amp_dtype"] == "float32")
        return no_op.get(short(name), True)

    def pairs(self):
        """{(name, name): Estimate} of the runs of one computation: the A/A pair, and rows that equal the one above."""
        names = [(name + AGAIN, name) for name in self.rows]
        names += [(name, self.above(name)) for name in self.rows if self.same(name)]
        return {pair: ratio for pair in names if (ratio := self.compare(*pair))}

    def noise(self):
        """How far two runs of one computation came out apart at worst, or None. A row's own interval comes on top."""
        return max((abs(ratio.value - 1) for ratio in self.pairs().values()), default=None)

    def share(self, name):
        """The part of the machine's matmul peak that a row turned into training, the median of the rounds, or None."""
        ratio, header = self.compare(name, PEAK), self.header(name)
        return ratio.value * header["flops"] / header["settings"]["world_size"] if ratio and header else None

    def complete(self):
        """Whether every row got to its end without an error."""
        if self.mode == "limit":
            return all(any(n.startswith(f"{stage} B") and self.steps(n) for _, n in self.runs) for stage in self.rows)
        return all(not why or why.startswith(NOT_FOR) for why in map(self.missing, self.rows))

    def missing(self, name):
        """Why a row is not complete: its error, or "not finished" or "not run"; "" where it is."""
        if error := self.end(name).get("error"):
            return "failed: " * (not error.startswith(("out of memory", NOT_FOR))) + error
        unfinished = "not finished" if self.header(name) else "not run"
        return unfinished if len(self.steps(name)) < self.wanted else ""


def markdown(sides, head, rows):
    """A markdown table; sides has an l or an r for each column."""
    line = [":--" if side == "l" else "--:" for side in sides]
    drawn = "\n".join("| " + " | ".join(cells) + " |" for cells in (head, line, *rows))
    return drawn.replace(" ± ", "\u00a0±\u00a0")  # a figure stays on one line


def table(results, link):
    """(sides, head, rows) of a page's table, in ladder order; link: the way from the page to the stages' folder."""
    reached = [max(len(run.steps) for run in results.of(name)) for name in results.rows if results.steps(name)]
    step, rows, first = min(reached, default=results.bench["steps"]) - 1, [], results.rows[0]
    for name in results.rows:
        linked = f"[{name}]({link}{name}.py)" if results.mode in ("ladder", "loss") else name
        row = {"stage": linked, "change": results.bench["change"][name]} | figures(results, name)
        for column, base in {"vs previous": results.above(name), f"vs {short(first)}": first}.items():
            ratio = results.compare(name, base)
            row[column] = ratio.text(4 if results.mode == "loss" else 2) if ratio else "–"
        if results.mode != "loss":
            share = results.share(name)
            row["% of peak"] = f"{100 * share:.1f}" if share else "–"
            losses = [run.steps[step]["loss"] for run in results.of(name) if len(run.steps) > step]
            row[f"loss, step {step}"] = next((f"{loss:.4f}" for loss in losses if loss), "–")
        rows.append(row | {"note": note(results, name)})
    return "ll" + "r" * (len(row) - 2) + "l", list(rows[0]), [list(row.values()) for row in rows]


def figures(results, name):
    """{column: cell} of what a row measured, its speed or its held-out loss; dashes where it left no figure."""
    if results.mode == "loss":
        losses = results.samples(name).values()
        return {"held-out loss (seeds)": f"{statistics.mean(losses):.4f} ({len(losses)})" if losses else "–"}
    if (summary := results.summary(name)) is None:
        return dict.fromkeys(("tok/sec", "dt ms [IQR]", "memory GB"), "–")
    times = (summary[key] for key in ("dt_ms", "dt_q1_ms", "dt_q3_ms"))
    dt = [f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" for ms in times]  # three digits
    memory = f"{summary['memory'] / 1e9:.2f}" if summary["memory"] else "no meter"
    memory += f" ({summary['reserved'] / 1e9:.2f} reserved)" if summary["reserved"] else ""  # by a GPU's allocator
    return {"tok/sec": f"{summary['tok_per_sec']:,.0f}", "dt ms [IQR]": "{} [{}–{}]".format(*dt), "memory GB": memory}


def short(name):
    """s05 for s05_flash."""
    return name.split("_")[0]


def note(results, name):
    """What this hardware makes of a row, as the run recorded it, and whether a difference was seen."""
    header, mode, parts = results.header(name), results.mode, [results.missing(name)]
    # a technique is compared with the row above, a mode's answer with the first row
    ratio = results.compare(name, results.above(name) if mode in ("ladder", "loss") else results.rows[0])
    if header and (mode == "ladder" or ratio and mode != "loss"):
        parts.append(dict(ladder=technique, amp=recommendation, scale=efficiency)[mode](results, name, header, ratio))
    # seeds are a noise that each interval of a loss holds; a speed's interval knows nothing of other processes
    noise, same, *words = (
        (ratio and ratio.spread, 0, "lower", "higher") if mode == "loss" else (results.noise(), 1, "slower", "faster")
    )
    if ratio and noise is not None:
        seen = abs(ratio.value - same) > max(noise, ratio.spread or 0) and not results.same(name)
        parts.append(words[ratio.value > same] if seen else "no difference")
    if header and header["code"] != code_sha256(header["stage"]):
        parts.append("stale")
    return "; ".join(part for part in parts if part).replace("|", "/")


def technique(results, name, header, ratio):
    """Whether the technique of a stage is at work here, or why not."""
    settings, why, summary = header["settings"], header["fallbacks"], results.summary(name)
    kernel = next((run.end["sdpa"] for run in results.of(name) if run.end.get("sdpa")), None)
    amp, compiles = settings["amp_dtype"], f"active: {summary['warmup_s']:.0f} s of warm-up" if summary else ""
    no_amp, eager = why.get("amp_dtype", "float32 was asked for"), why.get("compile", "--no-compile was given")
    says = dict.fromkeys(("s07", "s08", "s09"), "for the loss, not the speed") | dict(
        s02="active" if header["environment"]["tf32"] else "no-op: this device has no TF32 units",
        s03=f"no-op: {no_amp}" if amp == "float32" else f"active: {amp}" + ", loss scaled" * (amp == "float16"),
        s04=compiles if settings["compile"] else f"fallback to eager: {eager}",
        s05=f"active: the {kernel} kernel ran" if kernel else "",
        s11=f"{settings['accum']} micro-batches per step",
        s12="one process: what DDP itself costs" if settings["world_size"] == 1 else "",
    )
    return says.get(short(name), "")


def recommendation(results, name, header, ratio):
    """What a 16-bit type is worth here, by its measured speed-up over float32."""
    grades = {1.5: "excellent: switch it on", 1.2: "significant: switch it on", 1.05: "modest", 0.95: "negligible"}
    grade = next((words for least, words in grades.items() if ratio.value > least), "slower: leave it off")
    ours, theirs = (results.summary(row)["memory"] for row in (name, results.rows[0]))
    if not ours or not theirs:
        return grade
    return f"{grade}; {100 * abs(1 - ours / theirs):.0f} % {'less' if ours <= theirs else 'more'} memory"


def efficiency(results, name, header, ratio):
    """What several processes reach of so many times one's speed, and how much of a step their all-reduce takes."""
    words = f"efficiency {100 * ratio.value / header['settings']['world_size']:.0f} %"
    if reduce := results.steps(f"all-reduce {name}"):
        ms = 1e3 * sorted(step["dt"] for step in reduce)[len(reduce) // 2]
        words += f"; an all-reduce of its {reduce[0]['bytes'] / 1e6:.0f} MB of gradients by itself takes {ms:.1f} ms, "
        words += f"{100 * ms / results.summary(name)['dt_ms']:.1f} % of a step (DDP hides some behind the backward)"
    return words


def limit_table(results):
    """The largest batch of each stage that fits, its figures, and what stopped the next."""
    rows = []
    for stage in results.rows:
        tried = {int(n.partition(" B")[2]): results.end(n) for _, n in results.runs if n.startswith(f"{stage} B")}
        fits = max((batch for batch, end in tried.items() if end and "error" not in end), default=None)
        fails = min((batch for batch, end in tried.items() if "error" in end), default=None)
        found = figures(results, f"{stage} B{fits}")
        stopped = f"B {fails}: {tried[fails]['error']}".replace("|", "/") if fails else "nothing yet: not finished"
        rows.append([stage, str(fits or "none"), found["tok/sec"], found["memory GB"], stopped])
    return markdown("lrrrl", ["stage", "largest batch", "tok/sec", "memory GB", "stopped by"], rows)


def conditions(results):
    """What stands under a table: hardware, settings, noise, peak, and the command, as a markdown list."""
    if (header := results.header()) is None:
        return "No stage got as far as its first step."
    env, settings, mode = header["environment"], header["settings"], results.mode
    threads = f", threads {env['threads']}, cores {env['cores']}" if env["device"] == "cpu" else ""
    versions = [f"{of} {env[of.lower()]}" for of in ("torch", "Python", "CUDA", "cuDNN", "driver") if env[of.lower()]]
    lines = [f"**{env['device_name']}**{threads}, {env['system']}, {', '.join(versions)}, {header['started'][:10]}."]
    size, B, T, steps = settings["size"], settings["batch_size"], settings["seq_len"], results.bench["steps"]
    sessions = len({session for session, _ in results.runs})
    if mode == "limit":
        how = "B is the first batch size tried; each gets a fresh process."
    elif mode == "loss":
        how = f"{steps} steps on the same {steps * B * T:,} tokens, then the loss on the whole held-out tenth, in nats "
        how += "per token. A difference is the mean over the seeds, its ± the 95 % interval of the mean by Student's t."
    elif results.bench["interleaved"]:
        how = f"Interleaved (rounds: {results.wanted}, sessions: {sessions}): all processes of a session are alive at "
        how += "once and take one step each in turn."
    else:
        how = f"Fresh processes (rounds: {sessions}), each by the median of its counted steps."
    seeds = sorted({run.header["settings"]["seed"] for run in results.runs.values() if run.header})
    corpus = f"{settings['corpus']} in {settings['tokenizer']} tokens"
    lines.append(f"{size}, B {B}, T {T}, seed {', '.join(map(str, seeds))}, {corpus}. {how}")
    if mode not in ("limit", "loss"):
        lines.append("A ratio is the median of the ratios within a round. Its ± is the exact 95 % interval of that ")
        lines[-1] += "median, with fewer than six rounds their range; it covers this run."
        lines.append("Noise: no A/A pair finished, so no difference is called one.")
    if pairs := results.pairs().items():
        apart = [f"{a} / {short(b)} {ratio.text(3)} ({len(results.samples(a))})" for (a, b), ratio in pairs]
        lines[-1] = f"Noise, from runs of one computation (rounds): {', '.join(apart)}. A difference of less than the "
        lines[-1] += f'worst, {100 * results.noise():.1f} %, or than its own ±, is called "no difference".'
    if peak := results.steps(PEAK):
        peaks = {dtype: statistics.median(step["peak"][dtype] for step in peak) for dtype in sorted(peak[0]["peak"])}
        shown = ", ".join(f"{value / 1e12:.2f} TFLOP/s in {dtype}" for dtype, value in peaks.items())
        lines.append(f"Peak: {shown}, reached by matmuls of size {peak[0]['size']} (rounds: {len(peak)}). ")
        lines[-1] += "The column is the share of the larger, taken within a round. A token takes "
        lines[-1] += f"{header['flops'] / 1e6:.0f} MFLOP (6 (12 L C² + V C) + 12 L C T, attention counted in full)."
        if "copy" in peak[0]:
            rate = statistics.median(step["copy"] for step in peak) / 1e9
            lines.append(f"Memory bandwidth: copying a large tensor moves {rate:.1f} GB/s, reads and writes counted.")
    if mode != "loss":
        meters = {step["meter"] for run in results.runs.values() for step in run.steps if "meter" in step}
        lines.append(f"Memory: {' and '.join(sorted(meters))}, of the steps after the warm-up.")
    if any(note(results, name).endswith("stale") for name in results.rows):
        lines.append("Stale: the stage's code has changed since it was measured.")
    commit = f"commit {(header['commit'] or 'none')[:12]}{' with changes' if header['dirty'] else ''}"
    lines.append(f"Again: `{results.bench['command']}` at {commit}.")
    return "\n".join(f"- {line}" for line in lines)


def chart(results):
    """A mermaid chart: a bar of tokens per second for each row, or in the mode `loss` a line for each of up to six."""
    lines, plots = [], {}
    if results.mode == "loss":  # the mean over the seeds, from the second twentieth of the steps on
        every = max(1, results.bench["steps"] // 20)
        starts = range(every, results.bench["steps"] - every + 1, every)
        for name, color in zip(results.rows, COLORS, strict=False):
            if runs := [run.steps for run in results.of(name) if "eval" in run.end]:
                points = [statistics.mean(s["loss"] for steps in runs for s in steps[i : i + every]) for i in starts]
                plots[f"{short(name)} {color}"] = f"line [{', '.join(f'{point:.3f}' for point in points)}]"
        x = f'"step ({", ".join(plots)})" {starts[0] + every / 2:.0f} --> {starts[-1] + every / 2:.0f}'
        lines = ['title "training loss, mean over the seeds"', f"x-axis {x}"]
    elif bars := {f'"{short(name)}"': s["tok_per_sec"] / 1e3 for name in results.rows if (s := results.summary(name))}:
        plots["bars"] = f"bar [{', '.join(f'{value:.2f}' for value in bars.values())}]"
        lines = ['title "thousands of tokens per second"', f"x-axis [{', '.join(bars)}]"]
        lines.append(f"y-axis 0 --> {1.1 * max(bars.values()):.2f}")
    colors = {"backgroundColor": "transparent", "plotColorPalette": ", ".join(COLORS.values())}
    room = {"yAxis": {"labelPadding": 12}}  # else a phone cuts off the first digit
    style = json.dumps({"themeVariables": {"xyChart": colors}, "xyChart": room})
    start = f"```mermaid\n%%{{init: {style}}}%%\nxychart-beta"
    return "\n    ".join([start, *lines, *plots.values()]) + "\n```" if plots else ""


def page(results):
    """The whole of results/NAME.md."""
    what = "The ladder" if results.mode == "ladder" else f"make {results.mode}"
    rows = limit_table(results) if results.mode == "limit" else markdown(*table(results, "../stages/"))
    parts = [f"# {what} on {results.bench['environment']['device_name']}", rows, conditions(results), chart(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def narrow(results, name):
    """README.md's part between its markers: the columns that fit on a screen, the notes, a link to results/NAME.md."""
    (_, head, rows), notes = table(results, "stages/"), {}
    for stage, row in zip(results.rows, rows, strict=True):
        notes.setdefault(row[-1].removesuffix("stale").removesuffix("; "), []).append(short(stage))
    words = "; ".join(f"{', '.join(of)}: {text}" for text, of in notes.items() if text not in ("", "faster"))
    words += ". Measured with an earlier version of the stages" * any(row[-1].endswith("stale") for row in rows)
    head, *rows = ([cell.split(" [")[0] for cell in line[:7]] for line in (head, *rows))
    under = "\n".join(conditions(results).splitlines()[:2])
    under += f"\n- Notes: {words}. [All columns, the noise and the peak](results/{name}.md)."
    return f"{chart(results)}\n\n{markdown('llrrrrr', head, rows)}\n\n{under}"


def between_markers(text, content):
    """text with content between its two markers. Raises InputError where they are not there in order, once each."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end or text.count(BEGIN) + text.count(END) > 2:
        raise InputError(f"README.md must hold {BEGIN} and, below it, {END}: put each there once")
    return f"{before}{BEGIN}\n{content.strip()}\n{END}{after}"
