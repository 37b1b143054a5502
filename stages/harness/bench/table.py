"""The table of a bench: what is shown of it, computed once from what was measured. Others put it into words.

An Outcome is what the Runs of one row measured. Its Comparison sets it beside its base: what it changes, and how much
faster it is.
"""

import statistics
from dataclasses import dataclass, field

from ..arithmetic import Work, flops_per_token, seconds_per_token
from ..figures import UNEVEN, figures_of, speed_of_all, tokens_per_second
from ..seen import Seen, words_on_stage
from . import ratios
from .change import Change, change_of
from .ratios import NOT_SHOWN_TO_DIFFER, Ratio, Verdict
from .results import first_known
from .rows import Row, runs_the_same


@dataclass
class Comparison:
    """A row beside its base, which is None for the first row."""

    base: "Outcome | None"
    change: Change
    predicted: float | None  # what the ratio should be
    ratio: Ratio | None = None  # of their speeds
    ratio_to_first: Ratio | None = None  # of the speeds of the row and of the first one
    verdict: Verdict | None = None  # on the ratio
    is_with_row_above: bool = True  # whether the base stands right above it in the table


@dataclass(eq=False)  # two rows with the same figures are two
class Outcome:
    """What was measured of a row. What is not known, or does not apply, is None."""

    row: Row
    runs: list  # its Runs, the first round first
    error: dict | None  # the line of its first run that failed
    seen: Seen | None
    work: Work | None = None  # of a GPT's micro-batch
    words: str = ""  # what the technique of its stage does here, or which other device a script chose
    times: dict = field(default_factory=dict)  # {round: seconds of a token in each turn, or in the whole round}
    dt_ms: float | None = None  # of the median step
    tok_per_sec: float | None = None
    memory: int | None = None  # bytes
    loss: float | None = None  # of its first run, at the step that every row has to take, the mean of its ranks
    peak_share: float | None = None  # of the machine's fastest matmuls, from 0 to 1
    comparison: Comparison | None = None

    @property
    def counted(self):
        """The steps of all runs, without their warm-up."""
        return [step for run in self.runs for step in run.counted]

    @property
    def unit(self):
        """What it counts: "tok", "sample" or "step"; None if it is not known."""
        return self.seen.unit if self.seen else None

    @property
    def model(self):
        """What two rows have in common that have a ratio; None if it is not known."""
        if self.seen is None:
            return None
        shape = self.seen.shape
        # the parameters of a GPT are more if its vocabulary is padded, or its sequences are longer
        size = (shape["n_layer"], shape["n_head"], shape["n_embd"]) if shape else self.seen.parameters
        return self.unit, size


@dataclass
class Table:
    """What is shown of a bench."""

    bench: dict  # the first line of its record
    outcomes: dict = field(default_factory=dict)  # {name: Outcome} of all rows and of the control
    shown: list = field(default_factory=list)  # Outcomes without that of the control
    first: Outcome | None = None  # the first one that got as far as a step
    pairs: list = field(default_factory=list)  # Outcomes that compute the same as their base
    disturbance: float = 0.0  # how far from 1 the control came out, if chance can't explain that


def table_of(results):
    """Return the Table of the Results of a bench."""
    table = Table(results.bench)
    above = None
    for row in results.rows.values():
        outcome = outcome_of(row, results)
        base = table.outcomes.get(row.base)
        change = change_of(outcome, base)
        predicted = predicted_ratio(outcome, base, change, results.bench["rates"])
        outcome.comparison = Comparison(base, change, predicted, is_with_row_above=base is above)
        table.outcomes[row.name] = outcome
        if not row.control_of:
            table.shown.append(outcome)
            above = outcome
    add_ratios(table)
    table.first = first_known([outcome if outcome.seen else None for outcome in table.shown])
    for outcome in table.shown:
        outcome.comparison.verdict = verdict_on(outcome.comparison, table.disturbance)
    return table


# A row by itself


def outcome_of(row, results):
    """Return the Outcome of a row, without its Comparison."""
    runs, bench = results.runs_of(row.name), results.bench
    seen = first_known([run.seen for run in runs])
    outcome = Outcome(row, runs, results.error(row), seen)
    if seen and seen.device != bench["environment"]["device"]:
        outcome.words = f"ran on the {seen.device}: pass --device {seen.device}"
    elif seen:
        outcome.work = seen.work
        outcome.words = words_on_stage(row.stage, seen) if row.stage else ""
    if outcome.counted:
        add_figures(outcome, bench)
    return outcome


def add_figures(outcome, bench):
    """Fill in the figures of a row, from its counted steps."""
    figures = figures_of(outcome.counted)
    # of a script a few steps may be long, such as rollouts, or those that wait for a batch
    is_uneven = outcome.row.stage is None and figures["dt_mean_ms"] > UNEVEN * figures["dt_ms"]
    speed_of = speed_of_all if is_uneven else tokens_per_second
    outcome.tok_per_sec = speed_of(outcome.counted) or None  # 0: no step has tokens
    for run in outcome.runs:
        if run.summary and run.counted:  # it ended, and not in its warm-up
            speeds = [speed_of(steps) for steps in turns_of(run, bench)]
            if all(speeds):  # else a turn has no tokens
                outcome.times[run.round] = [1 / speed for speed in speeds]
    outcome.dt_ms = figures["dt_ms"]
    outcome.memory = figures["memory"] or None  # 0: without a meter
    steps_of_all_ranks = outcome.runs[0].steps + outcome.runs[0].steps_of_other_ranks
    losses = [step["loss"] for step in steps_of_all_ranks if step["step"] == bench["loss_step"]]
    if losses and None not in losses:
        outcome.loss = statistics.mean(losses)
    outcome.peak_share = peak_share(outcome, bench["rates"])


def turns_of(run, bench):
    """Return the counted steps of a Run by its turns, a list of lists: one list if its row took no turns."""
    if not bench["turns"]:
        return [run.counted]
    size = max(1, len(run.counted) // bench["turns"])  # a turn of short steps has several
    return [run.counted[i : i + size] for i in range(0, size * bench["turns"], size) if run.counted[i : i + size]]


def peak_share(outcome, rates):
    """Return the share of the machine's fastest matmuls that a row turned into training, from 0 to 1.

    None for a model that is not a GPT or does not count tokens, for a script on another device, and for several ranks,
    because the probe measures what one process can do. rates: of the probe.
    """
    is_known = outcome.work and outcome.unit == "tok" and outcome.tok_per_sec
    if not is_known or outcome.seen.world_size > 1:
        return None
    return outcome.tok_per_sec * flops_per_token(outcome.seen.shape) / max(rates["peak"].values())


# Beside another row


def add_ratios(table):
    """Fill in the ratios of all rows, and what those of equal rows say of the noise.

    The ± of a ratio rests on the scatter of all rows.
    """
    outcomes = table.outcomes.values()
    scatter = ratios.scatter_of([logs_of(outcome, outcome.comparison.base) for outcome in outcomes])
    for outcome in outcomes:
        comparison = outcome.comparison
        comparison.ratio = ratios.ratio_of(logs_of(outcome, comparison.base), scatter)
        comparison.ratio_to_first = ratios.ratio_of(logs_of(outcome, table.shown[0]), scatter)
        if comparison.ratio and comparison.change.is_same_computation:
            table.pairs.append(outcome)
            if outcome.row.control_of and ratios.judge(comparison.ratio) not in NOT_SHOWN_TO_DIFFER:
                table.disturbance = ratios.distance(comparison.ratio.value)


def logs_of(outcome, base):
    """Return the logarithm of the ratio of two rows in each round that both ended, a list. base: an Outcome, or None.

    It is empty if one of them failed. Two models are not compared, nor are tokens with samples of another kind. Steps
    are compared only if both rows run the same script with the same flags, since with another batch a step is of
    another size.
    """
    if base is None or base is outcome or base.error or outcome.error or outcome.model != base.model:
        return []
    if outcome.unit == "step" and not runs_the_same(outcome.row, base.row):
        return []
    return ratios.logs_of_rounds(outcome.times, base.times)


def predicted_ratio(outcome, base, change, rates):
    """Return how many times as fast as its base a row should be, or None if nothing can be said.

    It is the predicted time of the base, divided by that of this row. A time is the sum of all parts: FLOPs and bytes,
    divided by the rates that the probe measured.
    """
    if not (base and outcome.work and base.work and outcome.seen.world_size == base.seen.world_size):
        return None
    if any(stage.unpredictable for stage in change.stages):
        return None
    if not change.stages and (outcome.row.script != base.row.script or outcome.work == base.work):
        return None  # more differs than two Works know of, or no FLOP and no byte does, as between s01 and `plain`
    before, after = seconds_per_token(base.work, rates), seconds_per_token(outcome.work, rates)
    return before / after if before and after else None  # None: a rate is not known


# Verdicts


def verdict_on(comparison, disturbance):
    """Return the Verdict on a row; None if it has no ratio, and below three rounds.

    A row that should be as fast as its base is never called faster or slower. If it comes out so, it was disturbed.
    """
    ratio = comparison.ratio
    if ratio is None or ratio.spread is None:
        return None
    verdict = ratios.judge(ratio, disturbance)
    if not comparison.change.is_same_computation:
        return verdict
    if verdict in NOT_SHOWN_TO_DIFFER or ratios.distance(ratio.value) <= ratios.ALIKE:
        return Verdict.SAME
    return Verdict.UNCLEAR
