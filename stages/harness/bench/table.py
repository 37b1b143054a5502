"""The table of a bench: what is shown of it, computed once from what was measured.

An Outcome is what the Runs of one row measured, and how it differs from its base: what it changes, and how much faster
it is. cells.py, answer.py and page.py put that into words.
"""

import statistics
from dataclasses import dataclass, field
from itertools import pairwise

from ..arithmetic import Work, flops_per_token, seconds_per_token
from ..figures import are_uneven, most_memory, tokens_per_second
from ..seen import Seen
from . import ratios
from .change import Change, change_of
from .ratios import Ratio, Verdict
from .rows import Row, runs_the_same


@dataclass(eq=False)  # two rows with the same figures are two
class Outcome:
    """What was measured of a row. What is not known, or does not apply, is None."""

    row: Row
    runs: list  # its Runs, the first round first
    error: dict | None  # the line of its first run that failed
    seen: Seen | None
    work: Work | None = None  # of a GPT's micro-batch
    words: str = ""  # what the technique of its stage does here, or that a script chose another device
    # {round: tokens per second in each turn, or in the whole round}; empty if the row failed or diverged
    speeds: dict = field(default_factory=dict)
    dt_ms: float | None = None  # of the median step
    tok_per_sec: float | None = None
    memory: int | None = None  # bytes
    loss: float | None = None  # of its first run, at the step that every row has to take, the mean of its ranks
    peak_share: float | None = None  # of the machine's fastest matmuls, from 0 to 1
    # how it differs from its base, which is filled in once all rows have their figures
    base: "Outcome | None" = None  # of the row that its row is compared with
    change: Change | None = None
    predicted: float | None = None  # what the ratio should be
    ratio: Ratio | None = None  # of the speeds of the row and of its base
    ratio_to_first: Ratio | None = None  # of the speeds of the row and of the first one
    verdict: Verdict | None = None  # on the ratio
    is_with_row_above: bool = True  # whether the base stands right above it in the table

    @property
    def counted(self):
        """The steps of all runs, without their warm-up."""
        return [step for run in self.runs for step in run.counted]

    @property
    def diverged(self):
        """Whether the loss of a step was not finite, so that its speed says nothing of a technique.

        +fp16 scales no loss, and is there for its speed alone.
        """
        if "fp16" in self.row.added:
            return False
        return any(step.diverged for run in self.runs for step in run.steps)

    @property
    def size(self):
        """The size of its model. Rows whose sizes differ have no ratio."""
        shape = self.seen.shape
        # of a GPT not the parameters: they are more with a padded vocabulary, or with longer sequences
        return (shape["n_layer"], shape["n_head"], shape["n_embd"]) if shape else self.seen.parameters


@dataclass
class Table:
    """What is shown of a bench."""

    bench: dict  # the first line of its record
    outcomes: dict  # {name: Outcome} of all rows and of the control
    shown: list  # Outcomes without that of the control
    disturbance: float  # how far from 1 the control came out, if chance can't explain that

    @property
    def first_that_ran(self):
        """The Outcome of the first row that got as far as its second step, or None."""
        for outcome in self.shown:
            if outcome.seen:
                return outcome
        return None


def table_of(results):
    """Return the Table of the Results of a bench."""
    bench = results.bench
    outcomes = {row.name: outcome_of(row, results) for row in results.rows.values()}
    # If the steps of one script are uneven, all scripts have their speeds by the mean, since a mean divided by a median
    # is no ratio. Steps of a stage are never uneven: a long one was disturbed.
    scripts = [outcome for outcome in outcomes.values() if outcome.row.stage is None]
    scripts_are_uneven = any(are_uneven(script.counted) for script in scripts if script.counted)
    for outcome in outcomes.values():
        outcome.base = outcomes.get(outcome.row.base)
        uneven = scripts_are_uneven and outcome in scripts
        if outcome.counted:
            add_figures(outcome, bench, uneven)
    shown = [outcome for outcome in outcomes.values() if not outcome.row.control_of]
    logs = {name: logs_of(outcome, outcome.base) for name, outcome in outcomes.items()}
    scatter = ratios.scatter_of(logs.values())
    for name, outcome in outcomes.items():
        outcome.change = change_of(outcome)
        outcome.predicted = predicted_ratio(outcome, bench["rates"])
        outcome.ratio = ratios.ratio_of(logs[name], scatter)
        outcome.ratio_to_first = ratios.ratio_of(logs_of(outcome, shown[0]), scatter)
    for above, outcome in pairwise(shown):
        outcome.is_with_row_above = outcome.base is above
    disturbance = disturbance_of(outcomes)
    for outcome in outcomes.values():
        outcome.verdict = ratios.judge(outcome.ratio, disturbance, outcome.change.is_same_computation)
    return Table(bench, outcomes, shown, disturbance)


# A row by itself


def outcome_of(row, results):
    """Return the Outcome of a row, still without its figures and without its base."""
    runs = results.runs_of(row.name)
    seen_of_runs = [run.seen for run in runs if run.seen]
    seen = seen_of_runs[0] if seen_of_runs else None
    outcome = Outcome(row, runs, results.error(row), seen)
    if seen and seen.device != results.bench["environment"]["device"]:
        outcome.words = f"ran on the {seen.device}: pass --device {seen.device}"
    elif seen:
        outcome.work = seen.work
        outcome.words = row.stage.note(seen) if row.stage else ""
    return outcome


def add_figures(outcome, bench, uneven):
    """Add to an Outcome what its counted steps show. uneven: see figures.py."""
    counted = outcome.counted
    outcome.tok_per_sec = tokens_per_second(counted, uneven) or None  # 0: no step has tokens
    if not (outcome.error or outcome.diverged):
        outcome.speeds = speeds_of_rounds(outcome.runs, uneven)
    outcome.dt_ms = 1e3 * statistics.median(step.dt for step in counted)
    outcome.memory = most_memory(counted) or None  # 0: without a meter
    outcome.loss = loss_of(outcome.runs[0], bench["loss_step"])
    outcome.peak_share = peak_share(outcome, bench["rates"])


def speeds_of_rounds(runs, uneven):
    """Return {round: the tokens per second in each turn, or in the whole round if the row took no turns}.

    A run that did not end, ended in its warm-up, or had a turn without tokens is left out. uneven: see figures.py.
    """
    speeds = {}
    for run in runs:
        speeds_of_run = [tokens_per_second(steps, uneven) for steps in run.turns.values()]
        if run.summary and speeds_of_run and all(speeds_of_run):
            speeds[run.round] = speeds_of_run
    return speeds


def loss_of(run, step):
    """Return the loss of a Run at the step of this number, the mean of all ranks; None if it is not known."""
    losses = [each.loss for each in run.steps + run.steps_of_other_ranks if each.step == step]
    return statistics.mean(losses) if losses and None not in losses else None


def peak_share(outcome, rates):
    """Return the FLOP/s of a row as a share of the machine's fastest matmuls, from 0 to 1.

    None for a model that is not a GPT, for a script that does not count tokens or is on another device, and for several
    ranks, because the probe measures what one process can do. rates: of the probe.
    """
    is_known = outcome.work and outcome.seen.unit == "tok" and outcome.tok_per_sec
    if not is_known or outcome.seen.world_size > 1:
        return None
    return outcome.tok_per_sec * flops_per_token(outcome.seen.shape) / max(rates["peak"].values())


# Beside another row


def disturbance_of(outcomes):
    """Return how far from 1 the control came out; 0 if chance can explain that. outcomes: {name: Outcome}."""
    for outcome in outcomes.values():
        if outcome.row.control_of and ratios.judge(outcome.ratio) in (Verdict.FASTER, Verdict.SLOWER):
            return ratios.distance(outcome.ratio.value)
    return 0.0


def logs_of(outcome, base):
    """Return the logarithm of the ratio of two rows in each round that both ended, a list. base: an Outcome, or None.

    It is empty if one of them has no speeds, if they train different models, or if they count different things, as
    tokens and samples. It is also empty if they count steps, and do not run the same script with the same flags: with
    another batch a step is of another size.
    """
    if base is None or base is outcome or not (base.speeds and outcome.speeds):
        return []
    if (outcome.seen.unit, outcome.size) != (base.seen.unit, base.size):
        return []
    if outcome.seen.unit == "step" and not runs_the_same(outcome.row, base.row):
        return []
    return ratios.logs_of_rounds(outcome.speeds, base.speeds)


def predicted_ratio(outcome, rates):
    """Return how many times as fast as its base a row should be, or None if nothing can be said.

    It is the predicted time of the base, divided by that of this row. A time is the sum of all parts: FLOPs and bytes,
    divided by the rates that the probe measured.
    """
    base, change = outcome.base, outcome.change
    if not (base and outcome.work and base.work and outcome.seen.world_size == base.seen.world_size):
        return None
    if any(stage.unpredictable for stage in change.stages):
        return None
    if not change.stages and (outcome.row.script != base.row.script or outcome.work == base.work):
        return None  # the Works do not hold all that differs, or are equal, as those of s01 and `plain`
    before, after = seconds_per_token(base.work, rates), seconds_per_token(outcome.work, rates)
    return before / after if before and after else None  # None: a rate is not known
