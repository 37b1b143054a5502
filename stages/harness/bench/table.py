"""The table of a bench: what is shown of it, computed once from what was measured. Others put it into words.

A Run holds lines of the record, and an Outcome what follows from the Runs of a row. A Table has the Outcomes of all
rows, and what is said of the bench as a whole.
"""

import statistics
from dataclasses import dataclass, field

from .. import ladder
from ..arithmetic import flops_per_token, seconds_per_token
from ..card import words_on_card
from ..figures import figures_of, seconds_of_warmup, speed_of_all, waits_for_data
from ..scripts import uses, work_of
from .ratios import ALIKE, Noise, Ratio, Verdict, distance, judge, noise_of_pairs, ratio_of_rounds, seconds_of_a_token
from .results import first_known
from .rows import Row, runs_the_same

LONG_STEPS = 2  # with a mean step above two medians, long steps such as rollouts take most of the time


@dataclass(eq=False)  # two rows with the same figures are two
class Outcome:
    """What is shown of a row. What is not known, or does not apply, is None."""

    row: Row
    base: "Outcome | None"  # the row above, or the one that a control repeats

    # by itself: outcome_of() fills these in
    error: dict | None = None  # the line of its first run that failed
    losses: dict = field(default_factory=dict)  # {step: loss} of its first run
    curve: list = field(default_factory=list)  # (tokens up to a step, loss) of the same steps
    facts: dict | None = None  # the first header, with the kernel of attention as "sdpa"
    unit: str | None = None  # what it counts: "tok", "sample" or "step"
    model: tuple | None = None  # what two rows have in common that have a ratio
    ranks: int = 1  # that torchrun started
    ran_on: str | None = None  # "cpu" in a bench of a card
    effect: ladder.Effect | None = None  # of its stage, or of what a watched GPT uses
    techniques: dict | None = None  # of a watched script
    added: list = field(default_factory=list)  # the Stages whose techniques it has, and its base has not
    added_in_vain: list = field(default_factory=list)  # the names of those that took no effect, as "bf16"
    gains_memory: bool = False  # whether it has the variables of memory, and its base goes without them
    is_same_computation: bool = False  # as the base's
    counted: list = field(default_factory=list)  # the steps of all runs, without their warm-up
    times: dict = field(default_factory=dict)  # {round: seconds of a token in each step, or in the median step alone}
    means: dict = field(default_factory=dict)  # {round that came to its end: [seconds of a token in all its steps]}
    dt_ms: float | None = None  # of the median step
    tok_per_sec: float | None = None
    memory: int | None = None  # bytes
    warmup_s: float | None = None
    by_all_steps: bool = False  # whether a script's speed is that of all its steps, since no step is typical
    is_out_of_turn: bool = False  # whether it took its steps at once, in a bench that takes turns
    remarks_on_card: list = field(default_factory=list)  # in words

    # beside other rows: table_of() fills these in
    ratio: Ratio | None = None  # to the base
    x_reference: float | None = None  # how many times as fast as the Table's reference
    predicted: float | None = None  # what the ratio should be
    peak_share: float | None = None  # of the machine's fastest matmuls, from 0 to 1
    is_contradicted: bool = False  # whether it should be the same computation, and its speed says that it is not
    verdict: Verdict | None = None  # on the ratio

    @property
    def adds_its_stage(self):
        """Whether it shows what its own stage adds: it is the first row, or below one of an earlier stage."""
        stage = self.row.stage
        if self.base is None or stage is None:
            return stage is not None
        stage_of_base = self.base.row.stage
        return stage_of_base is not None and stage in ladder.between(stage_of_base, stage)

    @property
    def adds_nothing(self):
        """Whether it should add techniques to its base, and none of them took effect."""
        return bool(self.added_in_vain) and not self.added


@dataclass
class Table:
    """What is shown of a bench."""

    bench: dict  # the first line of its record
    outcomes: dict = field(default_factory=dict)  # {name: Outcome} of all rows, and of the control
    rows: list = field(default_factory=list)  # Outcomes without that of the control
    reference: Outcome | None = None  # of the row that all others are compared with
    facts: dict | None = None  # of the first row that has some
    unit: str | None = None  # what this row counts
    probe_times: dict = field(default_factory=dict)  # {round: seconds of a FLOP in each step, or in the median step}
    rates: dict | None = None  # that the probe measured
    loss_step: int | None = None  # the last step that all rows took
    pairs: list = field(default_factory=list)  # Outcomes that compute the same as their base
    noise: Noise | None = None  # of these
    last: Outcome | None = None  # of the last row of one process that trains the first row's model
    together: Ratio | None = None  # of that to the first row


def table_of(results):
    """Return the Table of the Results of a bench."""
    table = Table(results.bench)
    for row in results.rows.values():
        runs = results.runs_of(row)
        if row.is_probe:
            add_rates(table, runs)
        else:
            base = table.outcomes.get(row.control_of or row.above)
            table.outcomes[row.name] = outcome_of(row, base, runs, results.bench)
    table.rows = [outcome for outcome in table.outcomes.values() if not outcome.row.control_of]
    table.reference = table.outcomes[results.bench["reference"]]
    table.facts = first_known([outcome.facts for outcome in table.rows])
    table.unit = table.facts["unit"] if table.facts else "tok"
    with_losses = [outcome for outcome in table.rows if outcome.counted and outcome.losses]
    table.loss_step = min([max(outcome.losses) for outcome in with_losses], default=None)
    for outcome in table.outcomes.values():
        outcome.ratio = compare(outcome, outcome.base)
        ratio_to_reference = compare(outcome, table.reference)
        if ratio_to_reference:
            outcome.x_reference = ratio_to_reference.value
        outcome.predicted = predicted_ratio(outcome, table.rates)
        outcome.peak_share = peak_share(outcome, table.probe_times)
    find_noise(table)
    for outcome in table.rows:
        add_verdict(outcome, table)
    add_together(table)
    return table


def add_rates(table, runs):
    """Fill in what the probe measured: its times, and its rates as medians over the counted steps."""
    table.probe_times = times_of(runs, table.bench, lambda step: 1 / max(step["peak"].values()))
    steps = [step for run in runs for step in run.counted]
    if steps:
        peak = {dtype: statistics.median(step["peak"][dtype] for step in steps) for dtype in steps[0]["peak"]}
        table.rates = {"peak": peak, "copy": statistics.median(step["copy"] for step in steps)}


def times_of(runs, bench, time_of):
    """Return {round: the times of its counted steps} where rows take turns, else {round: [their median]}.

    time_of: returns the seconds of a token or a FLOP in a step, or None.
    """
    times = {}
    for run in runs:
        in_each_step = [time_of(step) for step in run.counted]
        known = [time for time in in_each_step if time is not None]
        if bench["in_turn"]:
            times[run.round] = in_each_step
        elif known and run.summary:  # a round that was cut off says little
            times[run.round] = [statistics.median(known)]
    return times


# what is known of a row by itself


def outcome_of(row, base, runs, bench):
    """Return the Outcome of a row by itself. base: the Outcome that it is compared with, or None. runs: its Runs."""
    outcome = Outcome(row, base)
    outcome.error = first_known([run.error for run in runs])
    outcome.techniques = first_known([run.techniques for run in runs])
    header = first_known([run.header for run in runs])
    summary = first_known([run.summary for run in runs])
    if header:
        add_facts(outcome, header | {"sdpa": summary and summary["sdpa"]}, bench)
    add_techniques(outcome)
    if runs:
        add_losses(outcome, runs[0])
    add_figures(outcome, runs, bench)
    return outcome


def add_facts(outcome, facts, bench):
    """Fill in what a row's header and techniques tell. facts: the header with "sdpa", the kernel of attention."""
    settings, shape = facts["settings"], facts["shape"]
    outcome.facts = facts
    outcome.unit = facts["unit"]
    # the parameters of a GPT are more where its vocabulary is padded, or its sequences are longer
    size = (shape["n_layer"], shape["n_head"], shape["n_embd"]) if shape else facts["parameters"]
    outcome.model = (outcome.unit, size)
    outcome.ranks = settings["world_size"]
    device = facts["environment"]["device"]
    if device != bench["environment"]["device"]:
        outcome.ran_on = device
    if outcome.row.stage:
        outcome.effect = ladder.effect_of(outcome.row.stage, facts)
    elif outcome.techniques and shape and not outcome.ran_on:
        micro_batches = settings["accum"] // settings["world_size"]
        work = work_of(outcome.techniques, shape, settings["batch_size"], micro_batches, device == "cuda")
        outcome.effect = ladder.Effect(work)


def add_techniques(outcome):
    """Fill in which techniques a row has, and its base has not, and whether both compute the same."""
    row, base = outcome.row, outcome.base
    if base is None:
        return
    outcome.gains_memory = runs_the_same(row, base.row) and row.keeps_memory and not base.row.keeps_memory
    if row.control_of:
        outcome.is_same_computation = True
    elif row.stage and base.row.stage and outcome.facts:
        add_stages(outcome)
    elif runs_the_same(row, base.row):
        add_from_outside(outcome)


def add_stages(outcome):
    """Fill in the stages after that of the base, as far as they do something here, up to a row's own."""
    row, base_row = outcome.row, outcome.base.row
    stages = ladder.between(base_row.stage, row.stage)
    changing = [stage for stage in stages if not ladder.effect_of(stage, outcome.facts).same_computation]
    outcome.added = [stage for stage in stages if stage.for_the_loss or stage in changing]
    if stages and not changing and (row.launcher, row.flags) == (base_row.launcher, base_row.flags):
        outcome.is_same_computation = True


def add_from_outside(outcome):
    """Fill in what was added to a script, and what of it in vain: the script had it before, or does not have it now."""
    before, now = outcome.base.techniques, outcome.techniques
    for name in outcome.row.added:
        if name in outcome.base.row.added:
            continue
        if before and now and (uses(before, name) or not uses(now, name)):
            outcome.added_in_vain.append(name)
        else:
            outcome.added.append(ladder.ADDED[name])
    outcome.is_same_computation = outcome.adds_nothing


def add_losses(outcome, run):
    """Fill in the losses of a run, by step and by tokens."""
    tokens = 0
    for step in run.steps:
        tokens += step["tokens"]
        if step["loss"] is not None:
            outcome.losses[step["step"]] = step["loss"]
            outcome.curve.append((tokens, step["loss"]))


def add_figures(outcome, runs, bench):
    """Fill in what the counted steps of a row tell."""
    outcome.times = times_of(runs, bench, lambda step: seconds_of_a_token([step]))
    loads_ahead = any(run.loads_ahead for run in runs)
    outcome.is_out_of_turn = bench["in_turn"] and loads_ahead
    outcome.remarks_on_card = words_on_card([run.counted for run in runs])
    for run in runs:
        outcome.counted += run.counted
        if run.summary:
            outcome.means[run.round] = [seconds_of_a_token(run.counted)]
    if not outcome.counted:
        return
    figures = figures_of(outcome.counted)
    has_long_steps = figures["dt_mean_ms"] > LONG_STEPS * figures["dt_ms"]
    waits_for_batches = loads_ahead and waits_for_data(outcome.counted)  # some come at once, and some late
    outcome.by_all_steps = outcome.row.is_watched and (has_long_steps or waits_for_batches)
    speed = speed_of_all(outcome.counted) if outcome.by_all_steps else figures["tok_per_sec"]
    outcome.tok_per_sec = speed or None  # 0: no step has tokens
    outcome.dt_ms = figures["dt_ms"]
    outcome.memory = figures["memory"] or None  # 0: without a meter
    outcome.warmup_s = seconds_of_warmup(first_known([run.steps for run in runs if run.counted]), bench["warmup"])


# beside other rows


def compare(outcome, base):
    """Return the Ratio of the speeds of two rows, or None where no samples pair up, and where one of them failed.

    Two models are not compared, nor are tokens with samples of another kind, or with steps. Where one of the two took
    its steps at once, or has long ones among them, its rounds are compared as wholes.
    """
    if base is None or base is outcome or base.model != outcome.model or base.error or outcome.error:
        return None
    if any(each.is_out_of_turn or each.by_all_steps for each in (outcome, base)):
        return ratio_of_rounds(outcome.means, base.means)
    return ratio_of_rounds(outcome.times, base.times)


def predicted_ratio(outcome, rates):
    """Return how many times as fast as its base a row should be, or None where nothing can be said.

    It is the predicted time of the base, divided by that of this row. A time is the sum of all parts: FLOPs and bytes,
    divided by the rates that the probe measured.
    """
    base = outcome.base
    if not (rates and base and outcome.effect and base.effect and outcome.ranks == base.ranks):
        return None
    work, work_of_base = outcome.effect.work, base.effect.work
    stage, stage_of_base = outcome.row.stage, base.row.stage
    if stage is stage_of_base and work == work_of_base:
        return None  # what differs is no FLOP and no byte, as between s01 and `plain`
    if stage and stage_of_base:
        # the stages between the two, whichever comes first: one of these tuples is empty
        crossed = ladder.between(stage_of_base, stage) + ladder.between(stage, stage_of_base)
        if any(each.unpredictable for each in crossed):
            return None
    elif outcome.row.script != base.row.script:
        return None  # more differs than their techniques tell
    before, after = seconds_per_token(work_of_base, rates), seconds_per_token(work, rates)
    if before is None or after is None:  # a rate is not known
        return None
    return before / after


def peak_share(outcome, probe_times):
    """Return the share of the machine's fastest matmuls that a row turned into training, from 0 to 1.

    None for a model that is no GPT, for a script whose speed is that of all its steps, for one on another device, and
    for several ranks, because the probe measures what one process can do.
    """
    shape = outcome.facts and outcome.facts["shape"]
    if not shape or outcome.ran_on or outcome.ranks > 1 or outcome.by_all_steps:
        return None
    # seconds per FLOP over seconds per token
    tokens_per_flop = ratio_of_rounds(outcome.times, probe_times)
    return tokens_per_flop.value * flops_per_token(shape) if tokens_per_flop else None


# noise and verdicts


def find_noise(table):
    """Fill in the pairs of one computation, and the noise that they show.

    A pair that is only said to be one computation, and whose ratio says otherwise, is contradicted and left out of the
    noise. Its ratio is judged by the noise of second runs alone, or by 5 % where these differ by less.
    """
    table.pairs = [each for each in table.outcomes.values() if each.is_same_computation and each.ratio]
    second_runs = [outcome for outcome in table.pairs if outcome.row.control_of]
    largest = max([distance(outcome.ratio.value) for outcome in second_runs], default=0)
    noise_of_second_runs = Noise(max(largest, ALIKE), len(second_runs))
    for outcome in table.pairs:
        if not outcome.row.control_of:
            verdict = judge(outcome.ratio, noise_of_second_runs)
            outcome.is_contradicted = verdict in (Verdict.FASTER, Verdict.SLOWER)
    table.noise = noise_of_pairs([outcome.ratio for outcome in table.pairs if not outcome.is_contradicted])


def add_verdict(outcome, table):
    """Fill in the verdict on a row.

    There is none without a ratio, where the row should add something and does not, and where the noise is not known.
    """
    if outcome.ratio is None or outcome.adds_nothing or table.noise is None:
        return
    if outcome.is_contradicted or outcome.base.is_contradicted:
        outcome.verdict = Verdict.UNCLEAR
    elif outcome.is_same_computation:
        outcome.verdict = Verdict.SAME
    else:
        outcome.verdict = judge(outcome.ratio, table.noise)


def add_together(table):
    """Fill in what all rows bring together: the last row of one process, beside the first row, which may be `plain`."""
    first, *others = table.rows
    for outcome in others:
        ratio = compare(outcome, first)
        if ratio and outcome.ranks == 1:
            table.last, table.together = outcome, ratio
