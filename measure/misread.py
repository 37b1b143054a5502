"""What a bench's records say when they are read wrongly, beside what they say.

Run it as python -m measure.misread [NAME], for results/NAME.jsonl.
"""

import statistics
import sys
from pathlib import Path

import torch

from measure.figures import TWIN, Results
from stages.record import WARMUP

ROOT = Path(__file__).resolve().parent.parent
NAME = "xeon-2-cores"  # the records that the lessons quote


def misreadings(results):
    """[(mistake, what it makes of these records, what they say)], where the stages it is about have run."""
    names = {name.split("_")[0]: name for name in results.names if results.steps(name)}
    found = []
    if "s04" in names:
        name = names["s04"]
        _, steps, _ = results.of(name)[0]
        mean = statistics.mean(step["dt"] for step in steps)
        found.append(
            (
                f"compilation in the average: the mean of all {len(steps)} steps of s04",
                f"{1e3 * mean:,.0f} ms a step",
                f"{1e3 * statistics.median(step['dt'] for step in steps[WARMUP:]):,.0f} ms, after "
                f"{sum(step['dt'] for step in steps[:WARMUP]):.0f} s of warm-up",
            )
        )
        if steps[-1]["meter"].startswith("peak RSS"):
            found.append(
                (
                    "CUDA's memory meter, where there is no GPU: s04",
                    f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB",
                    f"{results.summary(name)['memory'] / 1e9:.2f} GB ({steps[-1]['meter']})",
                )
            )
    if {"s04", "s05"} <= names.keys():
        ours, theirs = (results.seconds_per_token(names[s]) for s in ("s05", "s04"))
        single = [theirs[key] / ours[key] for key in sorted(ours.keys() & theirs.keys())]
        if len(single) > 1:
            found.append(
                (
                    "one step of each, instead of many: s05 over s04",
                    f"anything from {min(single):.2f} to {max(single):.2f} times as fast",
                    str(results.speedup(names["s05"], names["s04"])),
                )
            )
    if {"s10", "s11"} <= names.keys():
        dt = {s: results.summary(names[s])["dt_ms"] for s in ("s10", "s11")}
        found.append(
            (
                "dt compared where a step holds more tokens: s11 over s10",
                f"{dt['s10'] / dt['s11']:.2f} times as fast",
                f"{results.speedup(names['s11'], names['s10'])}, by tok/sec",
            )
        )
    twin = results.twin()
    if twin:
        by_step = results.seconds_per_token(twin)
        fast, slow = min(by_step.values()), max(by_step.values())
        found.append(
            (
                f"two runs at different times: the fastest and the slowest step of {twin.split('_')[0]} itself",
                f"{slow / fast:.2f} times as fast",
                f"{results.speedup(twin + TWIN, twin)}, as two copies that ran together",
            )
        )
    return found


def as_table(found):
    """The misreadings as markdown."""
    rows = [("mistake", "what it says", "what the records say"), (":--", ":--", ":--"), *found]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else NAME
    path = ROOT / "results" / f"{name}.jsonl"
    if not path.exists():
        print(f"misread: error: {path} is not there: pass the NAME of a bench that ran", file=sys.stderr)
        return 2
    print(as_table(misreadings(Results.read(path))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
