"""The table of a bench: what is shown of it, computed once from what was measured. Others put it into words.

An Outcome is what the Runs of one row measured. Its Comparison sets it beside the row above: what it changes, and how
much faster it is. How far rows of one computation come out apart is known when all are compared, and gives verdicts.
"""

import statistics
from dataclasses import dataclass, field

from ..arithmetic import Work, flops_per_token, seconds_per_token
from ..figures import figures_of, seconds_of_warmup, speed_of_all, waits_for_data
from ..scripts import words_on_stage, work_of
from . import ratios
from .change import Change, change_of
from .ratios import Noise, Ratio, Verdict
from .results import first_known
from .rows import PROBE, Row

LONG_STEPS = 2  # with a mean step above two medians, long steps such as rollouts take most of the time


@dataclass
class Comparison:
    """A row beside its base: the row above, or the one that a second run repeats. The first row has none."""

    base: "Outcome | None"
    change: Change
    ratio: Ratio | None  # of their speeds
    predicted: float | None  # what the ratio should be
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
    is_out_of_turn: bool = False  # whether it took its steps at once, in a bench that takes turns
    has_turns: bool = False  # whether its steps can be compared with those of another row in the same turns
    times: dict = field(default_factory=dict)  # {round: seconds of a token in each step, or in all steps together}
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
    noise: Noise | None = None  # of these


def table_of(results):
    """Return the Table of the Results of a bench."""
    probe_runs = results.runs_of(PROBE)
    probe_times = times_of(probe_runs, results.bench, lambda step: 1 / max(step["peak"].values()))
    table = Table(results.bench, rates_of(probe_runs))
    for row in results.rows.values():
        if not row.is_probe:
            outcome = outcome_of(row, results)
            outcome.peak_share = peak_share(outcome, probe_times)
            base = table.outcomes.get(row.control_of or row.above)
            change, ratio = change_of(outcome, base), compare(outcome, base)
            outcome.comparison = Comparison(base, change, ratio, predicted_ratio(outcome, base, change, table.rates))
            table.outcomes[row.name] = outcome
            if ratio and change.is_same_computation:
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


def rates_of(probe_runs):
    """Return the rates that the probe measured, medians over its counted steps; None where it has none."""
    steps = [step for run in probe_runs for step in run.counted]
    if not steps:
        return None
    peak = {dtype: statistics.median(step["peak"][dtype] for step in steps) for dtype in steps[0]["peak"]}
    return {"peak": peak, "copy": statistics.median(step["copy"] for step in steps)}


def times_of(runs, bench, time_of):
    """Return {round: the times of its counted steps}. time_of: returns the seconds of a token or a FLOP, or None."""
    return {run.round: [time_of(step) for step in run.counted] for run in usable_runs(runs, bench)}


def usable_runs(runs, bench):
    """Return the Runs of a row that can be compared: of one that takes no turns those that came to their end."""
    takes_turns = bench["in_turn"] and not any(run.loads_ahead for run in runs)
    return [run for run in runs if takes_turns or run.summary]


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
    loads_ahead = any(run.loads_ahead for run in outcome.runs)
    has_long_steps = figures["dt_mean_ms"] > LONG_STEPS * figures["dt_ms"]
    waits_for_batches = loads_ahead and waits_for_data(outcome.counted)  # some come at once, and some late
    no_step_is_typical = outcome.row.stage is None and (has_long_steps or waits_for_batches)
    outcome.is_out_of_turn = bench["in_turn"] and loads_ahead
    outcome.has_turns = bench["in_turn"] and not (loads_ahead or no_step_is_typical)
    if no_step_is_typical:
        speed = speed_of_all(outcome.counted)
        usable = [run for run in usable_runs(outcome.runs, bench) if run.counted]
        outcome.times = {run.round: [ratios.seconds_of_a_token(run.counted)] for run in usable}
    else:
        speed = figures["tok_per_sec"]
        outcome.times = times_of(outcome.runs, bench, lambda step: ratios.seconds_of_a_token([step]))
    outcome.dt_ms = figures["dt_ms"]
    outcome.tok_per_sec = speed or None  # 0: no step has tokens
    outcome.memory = figures["memory"] or None  # 0: without a meter
    outcome.warmup_s = seconds_of_warmup(outcome.runs[0].steps, bench["warmup"])


def peak_share(outcome, probe_times):
    """Return the share of the machine's fastest matmuls that a row turned into training, from 0 to 1.

    None for a model that is no GPT or does not count tokens, for a script on another device, and for several ranks,
    because the probe measures what one process can do. probe_times: seconds of a FLOP, by times_of().
    """
    shape = outcome.facts["shape"] if outcome.unit == "tok" else None
    if not shape or outcome.is_on_other_device or outcome.ranks > 1:
        return None
    # seconds per FLOP over seconds per token
    tokens_per_flop = ratios.ratio_of_rounds(outcome.times, probe_times, outcome.has_turns)
    return tokens_per_flop.value * flops_per_token(shape) if tokens_per_flop else None


# Beside another row


def compare(outcome, base):
    """Return the Ratio of the speeds of two rows, or None where no samples pair up, and where one of them failed.

    Two models are not compared, nor are tokens with samples of another kind, or with steps. base: an Outcome, or None.
    """
    if base is None or base is outcome:
        return None
    if base.model != outcome.model or base.error or outcome.error:
        return None
    return ratios.ratio_of_rounds(outcome.times, base.times, outcome.has_turns and base.has_turns)


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
    distances = [ratios.distance(outcome.comparison.ratio.value) for outcome in pairs if outcome.row.control_of]
    noise_of_second_runs = Noise(max([ratios.ALIKE, *distances]), len(distances))
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
