"""From records to figures: medians, ratios within a round, and how far each can be trusted. No I/O but reading."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from model import SIZES, VOCAB
from stages.record import WARMUP, parse_record, summarize

TWIN = " again"  # ends the name of the second copy of a contender, by which the noise is measured
RATE = "rate"  # the contender that multiplies matrices, see measure/rate.py
MAY_DIFFER = (
    "stage",
    "title",
    "steps",  # a session that goes on where one was interrupted takes what is left of them
    "parameters",
    "tokens_per_step",
    "commit",
    "dirty",
    "text_sha256",
    "started",
    "fallbacks",
)


def flops_per_token(size, seq_len):
    """FLOPs of one token's training step, forward and backward: 6 (12 L C^2 + V C) + 12 L C T.

    Two for each multiply-add of every matrix, once forward and twice backward, and attention counted in full although
    half of it is masked: the convention of PaLM (arXiv:2204.02311, appendix B). L layers of width C, a vocabulary
    V of 50257 (padding is no work that GPT-2 asks for), T tokens in a sequence.
    """
    L, C = SIZES[size]["n_layer"], SIZES[size]["n_embd"]
    return 6 * (12 * L * C**2 + VOCAB * C) + 12 * L * C * seq_len


@dataclass
class Ratio:
    """A speed-up, and the half width of its median's 95 % interval (McGill's notch: 1.57 IQR / sqrt(n))."""

    value: float
    spread: float

    def __str__(self):
        return f"{self.value:.2f} ± {self.spread:.2f}"


def ratio_of(samples):
    """The Ratio of a list of ratios, one a round."""
    if len(samples) < 2:
        return Ratio(samples[0], 0.0)
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Ratio(median, 1.57 * (q3 - q1) / len(samples) ** 0.5)


class Results:
    """All records of one bench, by session and contender."""

    def __init__(self, settings, records):
        """settings: the bench's own line. records: {(session, name): (header, steps, end)}."""
        self.settings, self.records = settings, records
        self.names = settings["names"]
        self.lockstep = settings["lockstep"]

    @classmethod
    def read(cls, path):
        """From a results file, or from the folder of a bench that has not finished. Raises OSError, ValueError."""
        path = Path(path)
        if path.is_dir():
            settings = json.loads((path / "bench.json").read_text())
            parts = {}
            for file in sorted(path.glob("*.jsonl")):
                session, name = file.stem.split("-", 1)
                parts[int(session), name] = file.read_text(errors="replace").splitlines()
        else:
            first, *lines = path.read_text().splitlines()
            settings, parts, into = json.loads(first), {}, []
            for line in lines:
                if '"kind": "record"' in line[:20]:
                    entry = json.loads(line)
                    into = parts[entry["session"], entry["name"]] = []
                else:
                    into.append(line)
        return cls(settings, {key: parse_record(lines) for key, lines in parts.items()})

    def text(self):
        """The whole as the lines of one results file; read() takes it back."""
        lines = [json.dumps(self.settings)]
        for (session, name), (header, steps, end) in sorted(self.records.items()):
            lines.append(json.dumps(dict(kind="record", session=session, name=name)))
            lines += [json.dumps(dict(kind="header", **header))] if header else []
            lines += [json.dumps(dict(kind="step", **step)) for step in steps]
            lines += [json.dumps(dict(kind="error" if "error" in end else "summary", **end))] if end else []
        return "\n".join(lines) + "\n"

    def of(self, name):
        """The records of a contender, in the order of the sessions."""
        return [record for (_, n), record in sorted(self.records.items()) if n == name]

    def header(self, name):
        """The first header a contender wrote, or None."""
        return next((header for header, _, _ in self.of(name) if header), None)

    def any_header(self):
        """The first header of all, or None."""
        return next((header for _, (header, _, _) in sorted(self.records.items()) if header), None)

    def end(self, name):
        """How the last session ended for a contender: a summary, a dict with "error", or None."""
        ends = [end for _, _, end in self.of(name)]
        return ends[-1] if ends else None

    def steps(self, name):
        """Every counted step of a contender, its sessions pooled."""
        return [step for _, steps, _ in self.of(name) for step in steps[WARMUP:]]

    def summary(self, name):
        """summarize() of all counted steps of a contender, or None where it has none."""
        steps = self.steps(name)
        if not steps:
            return None
        warmups = [sum(s["dt"] for s in steps[:WARMUP]) for _, steps, _ in self.of(name)]
        reserved = max((end.get("reserved", 0) for _, _, end in self.of(name) if end), default=0)
        return summarize(steps, warmup=0) | dict(warmup_s=warmups[0], reserved=reserved)

    def seconds_per_token(self, name):
        """{round: seconds}. A round is a step in lockstep, else a session; within one, contenders can be compared."""
        rounds = {}
        for (session, n), (_, steps, _) in self.records.items():
            if n == name and steps[WARMUP:]:
                values = [s["dt"] / s["tokens"] for s in steps[WARMUP:]]
                if self.lockstep:
                    rounds |= {(session, i): value for i, value in enumerate(values)}
                else:
                    rounds[session, 0] = statistics.median(values)
        return rounds

    def speedup(self, name, base):
        """How many times as many tokens a second as `base`: the median of the ratios within rounds, or None.

        Contenders that never ran in the same session are compared by way of the first, which is in all of them.
        """
        ours, theirs = self.seconds_per_token(name), self.seconds_per_token(base)
        shared = sorted(ours.keys() & theirs.keys())
        if shared:
            return ratio_of([theirs[key] / ours[key] for key in shared])
        anchor = self.names[0]
        if anchor in (name, base) or not ours or not theirs:
            return None
        up, down = self.speedup(name, anchor), self.speedup(base, anchor)
        if not up or not down:
            return None
        value = up.value / down.value
        return Ratio(value, value * ((up.spread / up.value) ** 2 + (down.spread / down.value) ** 2) ** 0.5)

    def twin(self):
        """The name of the contender that ran twice, or None."""
        return next((name for name in self.names if self.seconds_per_token(name + TWIN)), None)

    def noise(self):
        """How far two copies of the same program came out apart in this very run, their spread included, or None."""
        name = self.twin()
        apart = name and self.speedup(name + TWIN, name)
        return abs(apart.value - 1) + apart.spread if apart else None

    def rates(self):
        """{dtype: FLOP/s}: the median of the products timed between the steps."""
        rates = {}
        for step in self.steps(RATE):
            for dtype, value in step["rates"].items():
                rates.setdefault(dtype, []).append(value)
        return {dtype: statistics.median(values) for dtype, values in rates.items()}

    def share(self, name):
        """The part of the machine's best matrix rate that a contender turned into training, or None."""
        rates, summary, header = self.rates(), self.summary(name), self.header(name)
        if not rates or not summary or not header:
            return None
        flops = flops_per_token(header["size"], header["seq_len"]) * summary["tok_per_sec"]
        return flops / (max(rates.values()) * header["world_size"])

    def last_common_step(self):
        """The number of the last step that every contender with a loss has reached, or None."""
        reached = [max(len(steps) for _, steps, _ in self.of(n)) - 1 for n in self.names if self.steps(n)]
        return min(reached, default=None)

    def loss(self, name, step):
        """The loss of a contender at a step, in its first session that got there."""
        return next(steps[step]["loss"] for _, steps, _ in self.of(name) if len(steps) > step)

    def mixed(self):
        """What differs between records that must be alike, as one line, or None."""
        varies = set(self.settings.get("varies", []))
        first = None
        for (_, name), (header, _, _) in sorted(self.records.items()):
            if not header:
                continue
            flat = {k: v for k, v in header.items() if k not in MAY_DIFFER} | header["environment"]
            flat = {k: v for k, v in flat.items() if k not in varies and k != "environment"}
            first = first or (name, flat)
            for key, value in flat.items():
                if value != first[1].get(key):
                    return f"{key} is {first[1].get(key)} for {first[0]} and {value} for {name}"
        return None
