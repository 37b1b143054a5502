"""The table of the mode `loss`: held-out losses of stages by learning rate."""

import math
import statistics

from .markdown import NOTHING, STAGES, comparison, escaped, link, table


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
        row["note"] = escaped(notes)
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
