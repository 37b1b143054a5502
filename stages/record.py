"""The record of a run, a line of JSON each: what a stage writes and the bench reads, and the figures both show."""

import hashlib
import json
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARMUP = 3  # steps left out of the figures: compilation, autotuning, first allocations


def text_sha256(stage):
    """The sha256 of a stage's text, by which a record is known to be of this text; None for a script that is none."""
    file = ROOT / "stages" / f"{stage}.py"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None


def read_record(path):
    """parse_record() of a file. Raises OSError."""
    return parse_record(Path(path).read_text(errors="replace").splitlines())


def parse_record(lines):
    """(header, steps, end) of a record: a dict, a list of dicts, a dict.

    header and end are None where the run did not get there; end is the summary, or has an "error" instead. A line
    that was cut off is left out.
    """
    header, steps, end = None, [], None
    for line in lines:
        try:
            entry = json.loads(line)
            kind = entry.pop("kind")
        except (ValueError, AttributeError, KeyError, TypeError):
            continue
        if kind == "header":
            header = entry
        elif kind == "step":
            steps.append(entry)
        else:
            end = entry
    return header, steps, end


def summarize(steps, warmup=WARMUP):
    """The figures of a run, the same for the line that a stage prints and the row that a table shows.

    steps: at least one of the record's step objects. Returns dt and its quartiles in ms, tok_per_sec, the memory
    peak in bytes with its meter, the last loss, the number of steps counted and the seconds of those before them.
    Where the run was no longer than its warm-up, the last step stands for all, and counted is 0.
    """
    counted = steps[warmup:] or steps[-1:]
    dts = [s["dt"] for s in counted]
    q1, median, q3 = statistics.quantiles(dts, n=4, method="inclusive") if len(dts) > 1 else dts * 3
    return dict(
        dt_ms=1e3 * median,
        dt_q1_ms=1e3 * q1,
        dt_q3_ms=1e3 * q3,
        tok_per_sec=counted[0]["tokens"] / median,
        memory=max((s["memory"] for s in counted if s["memory"]), default=None),
        meter=counted[0]["meter"],
        loss=steps[-1]["loss"],
        counted=max(0, len(steps) - warmup),
        warmup_s=sum(s["dt"] for s in steps[:warmup]),
    )


def summary_line(figures):
    """One line for the figures of summarize()."""
    memory = f"{figures['memory'] / 1e9:.2f} GB ({figures['meter']})" if figures["memory"] else figures["meter"]
    steps = f"{figures['counted']} steps" if figures["counted"] else "the last step alone, warm-up included"
    return (
        f"median dt {figures['dt_ms']:.2f}ms [{figures['dt_q1_ms']:.2f}, {figures['dt_q3_ms']:.2f}] over {steps} | "
        f"tok/sec {figures['tok_per_sec']:,.0f} | memory {memory} | warm-up {figures['warmup_s']:.1f}s"
    )
