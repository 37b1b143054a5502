"""The table of a bench: what is shown of it, computed once from what was measured. Others put it into words.

An Outcome is what the Runs of one row measured. Its Comparison sets it beside the row above: what it changes, and how
much faster it is. How far rows of one computation come out apart is known when all are compared, and gives verdicts.
"""

from dataclasses import dataclass, field

from ..arithmetic import Work, flops_per_token, seconds_per_token
from ..figures import figures_of, seconds_of_warmup, speed_of_all, tokens_per_second, waits_for_data
from ..scripts import words_on_stage, work_of
from . import ratios
from .change import Change, change_of
from .ratios import Ratio, Scatter, Verdict
from .results import first_known
from .rows import Row

LONG_STEPS = 2  # with a mean step above two medians, long steps such as rollouts take most of the time


@dataclass
class Comparison:
    """A row beside its base: the row above, or the one that a second run repeats. The first row has none."""

    base: "Outcome | None"
    change: Change
    predicted: float | None  # what the ratio should be
    ratio: Ratio | None = None  # of their speeds
    is_contradicted: bool = False  # whether it should be the same computation, and its speed says that it is not
    verdict: Verdict | None = None  # on the ratio


@dataclass(eq=False)  # two rows with the same figures are two
class Outcome:
    """What was measured of a row. What is not known, or does not apply, is None."""

    row: Row
    runs: list  # its Runs, the first round first
    counted: list  # the steps of all runs, without their warm-up
    error: dict | None  # the line of its first run that failed
    techniques: dict | None  # what its script was seen to use
    facts: dict | None = None  # the first header
    unit: str | None = None  # what it counts: "tok", "sample" or "step"
    model: tuple | None = None  # what two rows have in common that have a ratio
    ranks: int = 1  # processes that train together
    is_on_other_device: bool = False  # than the bench, as on the CPU in a bench of a card
    work: Work | None = None  # of a GPT's micro-batch
    words: str = ""  # what the technique of its stage does here
    times: dict = field(default_factory=dict)  # {round: seconds of a token}
    dt_ms: float | None = None  # of the median step
    tok_per_sec: float | None = None
    memory: int | None = None  # bytes
    warmup_s: float | None = None  # of its first run, which may compile
    peak_share: float | None = None  # of the machine's fastest matmuls, from 0 to 1
    comparison: Comparison | None = None

    @property
    def losses(self):
        """{step: training loss} of its first run."""
        steps = self.runs[0].steps if self.runs else []
        return {step["step"]: step["loss"] for step in steps if step["loss"] is not None}


@dataclass
class Table:
    """What is shown of a bench."""

    bench: dict  # the first line of its record
    rates: dict | None  # that the probe measured
    outcomes: dict = field(default_factory=dict)  # {name: Outcome} of all rows and of the control
    shown: list = field(default_factory=list)  # Outcomes without that of the control
    facts: dict | None = None  # of the first row that has some
    unit: str | None = None  # what this row counts
    loss_step: int | None = None  # the last step that all rows took of which losses are known
    pairs: list = field(default_factory=list)  # Outcomes that compute the same as their base
    scatter: Scatter | None = None  # of the ratios of all rows to their bases
    noise: float | None = None  # how far the pairs came out apart


def table_of(results):
    """Return the Table of the Results of a bench."""
    table = Table(results.bench, results.rates)
    for row in results.rows.values():
        outcome = outcome_of(row, results)
        outcome.peak_share = peak_share(outcome, table.rates)
        base = table.outcomes.get(row.control_of or row.above)
        change = change_of(outcome, base)
        outcome.comparison = Comparison(base, change, predicted_ratio(outcome, base, change, table.rates))
        table.outcomes[row.name] = outcome
    outcomes = table.outcomes.values()
    table.scatter = ratios.scatter_of([logs_of(outcome, outcome.comparison.base) for outcome in outcomes])
    for outcome in outcomes:
        outcome.comparison.ratio = compare(outcome, outcome.comparison.base, table)
        if outcome.comparison.ratio and outcome.comparison.change.is_same_computation:
            table.pairs.append(outcome)
    table.shown = [outcome for outcome in table.outcomes.values() if not outcome.row.control_of]
    table.facts = first_known([outcome.facts for outcome in table.shown])
    table.unit = table.facts["unit"] if table.facts else "tok"
    last_steps = [max(outcome.losses) for outcome in table.shown if outcome.counted and outcome.losses]
    table.loss_step = min(last_steps, default=None)
    mark_contradicted(table.pairs)
    agreeing = [outcome.comparison for outcome in table.pairs if not outcome.comparison.is_contradicted]
    table.noise = ratios.noise_of_pairs([comparison.ratio for comparison in agreeing])
    for outcome in table.shown:
        outcome.comparison.verdict = verdict_on(outcome.comparison, table.noise)
    return table


# A row by itself


def outcome_of(row, results):
    """Return the Outcome of a row, without its peak_share and its Comparison."""
    runs = results.runs_of(row.name)
    counted = [step for run in runs for step in run.counted]
    outcome = Outcome(row, runs, counted, results.error(row), first_known([run.techniques for run in runs]))
    header = first_known([run.header for run in runs])
    if header:
        add_facts(outcome, header, results.bench)
    if counted:
        add_figures(outcome, results.bench)
    return outcome


def add_facts(outcome, facts, bench):
    """Fill in what a row's header and techniques tell. facts: the header."""
    settings, shape = facts["settings"], facts["shape"]
    outcome.facts = facts
    outcome.unit = facts["unit"]
    # the parameters of a GPT are more where its vocabulary is padded, or its sequences are longer
    size = (shape["n_layer"], shape["n_head"], shape["n_embd"]) if shape else facts["parameters"]
    outcome.model = (outcome.unit, size)
    outcome.ranks = settings["world_size"]
    device = facts["environment"]["device"]
    outcome.is_on_other_device = device != bench["environment"]["device"]
    if outcome.techniques and outcome.row.stage:
        outcome.words = words_on_stage(outcome.row.stage, outcome.techniques, facts)
    if outcome.techniques and not outcome.is_on_other_device:
        outcome.work = work_of(outcome.techniques, facts)


def add_figures(outcome, bench):
    """Fill in what the counted steps of a row tell."""
    figures = figures_of(outcome.counted)
    loads_ahead = outcome.techniques is not None and outcome.techniques["loaders"] > 0
    has_long_steps = figures["dt_mean_ms"] > LONG_STEPS * figures["dt_ms"]
    waits_for_batches = loads_ahead and waits_for_data(outcome.counted)  # some come at once, and some late
    no_step_is_typical = outcome.row.stage is None and (has_long_steps or waits_for_batches)
    speed_of = speed_of_all if no_step_is_typical else tokens_per_second
    outcome.tok_per_sec = speed_of(outcome.counted) or None  # 0: no step has tokens
    ended = [run for run in outcome.runs if run.summary and run.counted]
    speeds = {run.round: speed_of(run.counted) for run in ended}
    outcome.times = {number: 1 / speed for number, speed in speeds.items() if speed}
    outcome.dt_ms = figures["dt_ms"]
    outcome.memory = figures["memory"] or None  # 0: without a meter
    outcome.warmup_s = seconds_of_warmup(outcome.runs[0].steps, bench["warmup"])


def peak_share(outcome, rates):
    """Return the share of the machine's fastest matmuls that a row turned into training, from 0 to 1.

    None for a model that is no GPT or does not count tokens, for a script on another device, and for several ranks,
    because the probe measures what one process can do. rates: of the probe, or None.
    """
    shape = outcome.facts["shape"] if outcome.unit == "tok" else None
    if not (rates and shape and outcome.tok_per_sec) or outcome.is_on_other_device or outcome.ranks > 1:
        return None
    return outcome.tok_per_sec * flops_per_token(shape) / max(rates["peak"].values())


# Beside another row


def compare(outcome, base, table):
    """Return the Ratio of the speeds of two rows, or None where they have none. base: an Outcome, or None."""
    return ratios.ratio_of(logs_of(outcome, base), table.scatter)


def logs_of(outcome, base):
    """Return the logarithm of the ratio of two rows in each round that both ended, a list. base: an Outcome, or None.

    It is empty where one of them failed. Two models are not compared, nor are tokens with samples of another kind, or
    with steps.
    """
    if base is None or base is outcome or base.model != outcome.model or base.error or outcome.error:
        return []
    return ratios.logs_of_rounds(outcome.times, base.times)


def predicted_ratio(outcome, base, change, rates):
    """Return how many times as fast as its base a row should be, or None where nothing can be said.

    It is the predicted time of the base, divided by that of this row. A time is the sum of all parts: FLOPs and bytes,
    divided by the rates that the probe measured.
    """
    if not (rates and base and outcome.work and base.work and outcome.ranks == base.ranks):
        return None
    if any(stage.unpredictable for stage in change.stages):
        return None
    if not change.stages and (outcome.row.script != base.row.script or outcome.work == base.work):
        return None  # more differs than two Works tell, or no FLOP and no byte does, as between s01 and `plain`
    before, after = seconds_per_token(base.work, rates), seconds_per_token(outcome.work, rates)
    return before / after if before and after else None  # None: a rate is not known


# Noise and verdicts


def mark_contradicted(pairs):
    """Mark the pairs that are only said to be one computation, and whose ratios say otherwise. pairs: Outcomes.

    They are judged by the noise of second runs alone, or by 5 % where these differ by less.
    """
    second_runs = [outcome.comparison.ratio for outcome in pairs if outcome.row.control_of]
    noise_of_second_runs = max(ratios.ALIKE, ratios.noise_of_pairs(second_runs) or 0)
    for outcome in pairs:  # no second run is contradicted, since each is a part of this noise
        verdict = ratios.judge(outcome.comparison.ratio, noise_of_second_runs)
        outcome.comparison.is_contradicted = verdict not in ratios.NOT_SHOWN_TO_DIFFER


def verdict_on(comparison, noise):
    """Return the Verdict on a row; None where it has no ratio, and where the noise is not known."""
    if comparison.ratio is None or noise is None:
        return None
    if comparison.is_contradicted or comparison.base.comparison.is_contradicted:
        return Verdict.UNCLEAR
    if comparison.change.is_same_computation:
        return Verdict.SAME
    return ratios.judge(comparison.ratio, noise)
