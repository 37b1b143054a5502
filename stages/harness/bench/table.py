"""The table of a bench: what is shown of it, computed once from what was measured. Others put it into words.

A Run holds lines of the record. Measured is a row's runs together, and Outcome what follows from them. A Table has an
Outcome for each row, and what is said of the bench as a whole.
"""

import statistics
from dataclasses import dataclass, field

from .. import ladder
from ..arithmetic import Rates, flops_per_token, seconds_per_token
from ..figures import figures_of, seconds_of_warmup, waiting_share, waits_for_data
from ..scripts import work_of
from . import ratios
from .ratios import ALIKE, Ratio, Verdict, distance, judge
from .rows import Row

LONG_WARMUP = 10  # seconds that are worth a word


class Measured:
    """The runs of a row together.

    counted: the steps after the warm-up of each run. facts: the first header, with the keys "sdpa" and "techniques"
    that became known later; None where no run got that far. effect: the ladder.Effect of the row's stage, or None for
    another script. work: the Work of a micro-batch, or None where it is not known.
    """

    def __init__(self, row, runs, in_turn):
        self.row = row
        self.runs = runs
        self.counted = []
        for run in runs:
            self.counted += run.counted
        time_of_step = ratios.seconds_per_flop if row.is_probe else ratios.seconds_per_token
        self.samples = ratios.samples_of(runs, in_turn, time_of_step)
        self.waits = not row.is_probe and waits_for_data(self.counted)
        self.facts = facts_of(runs)
        self.effect = None
        if row.stage and self.facts:
            self.effect = ladder.effect_of(row.stage, self.facts)
        self.work = work_of_row(self)

    @property
    def ranks(self):
        """How many processes torchrun started; 1 without torchrun, and where no run got that far."""
        return self.facts["settings"]["world_size"] if self.facts else 1


@dataclass
class Outcome:
    """What is shown of a row. What is not known, or does not apply, is None."""

    row: Row
    base: "Outcome | None"  # what it is compared with: the row above, and for a control the row that it repeats

    # by itself
    error: dict | None = None  # the line of the first run that failed
    rounds: int = 0  # in which it came to its end
    steps: int = 0  # that were counted
    unit: str | None = None  # what it counts: "tok", "sample" or "step"
    parameters: int | None = None
    tok_per_sec: float | None = None
    memory: int | None = None
    dt_ms: float | None = None  # the median
    dt_mean_ms: float | None = None
    warmup_s: float | None = None  # of the first run, which may compile
    loss: float | None = None  # at the Table's loss_step
    curve: list = field(default_factory=list)  # (seconds, loss) of each step of the first run

    # its techniques
    effect: ladder.Effect | None = None  # of its stage
    skipped: list = field(default_factory=list)  # Stages below its base's, down to its own, that do something here
    techniques: dict | None = None  # of a watched script
    is_out_of_turn: bool = False  # whether a script took its steps without turns
    waiting_share: float | None = None  # of its time, for data, where that is much

    # beside other rows
    ratio: Ratio | None = None  # to the base
    ratio_to_reference: Ratio | None = None
    ratio_to_first: Ratio | None = None  # to the first row, where both train one model
    predicted: float | None = None  # what the ratio should be
    peak_share: float | None = None  # of the machine's fastest matmuls, from 0 to 1
    is_another_model: bool = False  # than the base's
    is_same_computation: bool = False  # as the base's
    verdict: Verdict | None = None  # on the ratio
    steps_to_pay: float | None = None  # after which a gain has made up for a long warm-up


@dataclass
class Table:
    """What is shown of a bench.

    bench: the first line of its record. facts: of the first row that has some. rates: the Rates that the probe
    measured. loss_step: the last step that all rows took. outcomes: {name: Outcome} of all rows, and of the control.
    pairs: the Outcomes of rows that compute the same as their base, controls first. noise: how far from 1 a ratio may
    be by chance, as a distance(). fastest: the Outcome that is most times as fast as the first row.
    """

    bench: dict
    facts: dict | None = None
    rates: Rates | None = None
    loss_step: int | None = None
    outcomes: dict = field(default_factory=dict)
    pairs: list = field(default_factory=list)
    noise: float | None = None
    fastest: Outcome | None = None

    @property
    def rows(self):
        """The Outcomes of the rows, in their order."""
        return [outcome for outcome in self.outcomes.values() if not outcome.row.control_of]

    @property
    def reference(self):
        """The Outcome of the row that all others are compared with."""
        return self.outcomes[self.bench["reference"]]


def table_of(results):
    """Return the Table of the Results of a bench."""
    table = Table(results.bench)
    measured, probe = {}, None
    for row in results.rows.values():
        ours = Measured(row, results.runs_of(row), table.bench["in_turn"])
        if row.is_probe:
            probe = ours
        else:
            measured[row.name] = ours
    shown = [measured[row.name] for row in results.table_rows]
    table.facts = first_known([ours.facts for ours in shown])
    table.rates = rates_of(probe)
    table.loss_step = last_common_step(shown)
    for ours in measured.values():
        base = measured.get(ours.row.control_of or ours.row.above)
        outcome = Outcome(ours.row, table.outcomes[base.row.name] if base else None, **figures_of_row(ours))
        add_facts(outcome, ours, table)
        outcome.skipped = stages_crossed(ours, base)
        outcome.ratio = compare(ours, base)
        outcome.ratio_to_reference = compare(ours, measured[table.bench["reference"]])
        if model_of(ours) == model_of(shown[0]):
            outcome.ratio_to_first = compare(ours, shown[0])
        outcome.is_another_model = outcome.ratio is not None and model_of(ours) != model_of(base)
        outcome.is_same_computation = is_same_computation(ours, base)
        outcome.predicted = predict(ours, base, table.rates)
        outcome.peak_share = peak_share(ours, probe)
        table.outcomes[ours.row.name] = outcome
    find_noise(table)
    for outcome in table.rows:
        add_verdict(outcome, table)
    table.fastest = fastest_of(table)
    return table


def first_known(values):
    """Return the first value that is not None, or None."""
    known = [value for value in values if value is not None]
    return known[0] if known else None


# what is known of a row by itself


def facts_of(runs):
    """Return what the header of a row says, with the kernel of its attention and the techniques of a script."""
    header = first_known([run.header for run in runs])
    if header is None:
        return None
    summary = first_known([run.summary for run in runs])
    techniques = first_known([run.techniques for run in runs])
    kernel = summary["sdpa"] if summary else None
    older = {"unit": "tok", "parameters": None}  # what the headers of older records lack
    return older | header | {"sdpa": kernel, "techniques": techniques}


def work_of_row(ours):
    """Return the Work of a micro-batch of a row, or None where it is not known."""
    facts = ours.facts
    if ours.effect:
        return ours.effect.work
    if facts is None or facts["techniques"] is None or facts["shape"] is None:
        return None
    settings = facts["settings"]
    micro_batches = settings["accum"] // settings["world_size"]
    on_cuda = facts["environment"]["device"] == "cuda"
    return work_of(facts["techniques"], facts["shape"], settings["batch_size"], micro_batches, on_cuda)


def model_of(ours):
    """Return what makes a model another one: a GPT's layers, heads and width; another one's number of parameters."""
    if ours.facts is None:
        return None
    shape = ours.facts["shape"]
    if shape is None:
        return ours.facts["parameters"]
    return shape["n_layer"], shape["n_head"], shape["n_embd"]


def rates_of(probe):
    """Return the Rates that the probe measured, medians over its counted steps; None where it left none."""
    if probe is None or not probe.counted:
        return None
    steps = probe.counted
    peak = {}
    for dtype in steps[0]["peak"]:
        peak[dtype] = statistics.median(step["peak"][dtype] for step in steps)
    return Rates(peak, statistics.median(step["copy"] for step in steps))


def last_common_step(shown):
    """Return the number of the last step to which all rows with counted steps got; None without such rows."""
    reached = []
    for ours in shown:
        if ours.counted:
            reached.append(max(run.steps[-1]["step"] for run in ours.runs if run.steps))
    return min(reached, default=None)


def loss_at(runs, step):
    """Return the training loss of a row at a step, or None where no run got there. step: a number, or None."""
    for run in runs:
        for line in run.steps:
            if line["step"] == step:
                return line["loss"]
    return None


def curve_of(runs):
    """Return the loss of each step of a row's first run, and the seconds that all steps up to it took."""
    points = []
    seconds = 0.0
    for run in runs[:1]:
        for step in run.steps:
            seconds += step["dt"]
            if step["loss"] is not None:
                points.append((seconds, step["loss"]))
    return points


# the outcome of a row


def figures_of_row(ours):
    """Return the figures of a row's counted steps, a dict; empty without any. What is 0 was not measured."""
    if not ours.counted:
        return {}
    figures = figures_of(ours.counted)
    first = [run for run in ours.runs if run.counted][0]
    warmup_s = seconds_of_warmup(first.steps, first.warmup)
    kept = {name: figures[name] or None for name in ("tok_per_sec", "memory", "dt_ms", "dt_mean_ms")}
    return kept | {"warmup_s": warmup_s}


def add_facts(outcome, ours, table):
    """Fill in how far a row came, its losses, and what it is."""
    outcome.error = first_known([run.error for run in ours.runs])
    outcome.rounds = len([run for run in ours.runs if run.summary])
    outcome.steps = len(ours.counted)
    outcome.loss = loss_at(ours.runs, table.loss_step)
    outcome.curve = curve_of(ours.runs)
    outcome.effect = ours.effect
    if ours.facts:
        outcome.unit = ours.facts["unit"]
        outcome.parameters = ours.facts["parameters"]
        outcome.techniques = ours.facts["techniques"]
    if outcome.techniques and table.bench["in_turn"]:
        outcome.is_out_of_turn = any(run.may_wait_for_data for run in ours.runs)
    if outcome.techniques and ours.waits:
        outcome.waiting_share = waiting_share(ours.counted)


def stages_crossed(ours, base):
    """Return the Stages below that of the base, down to the row's own, without those that do nothing here."""
    if ours.row.stage is None or base is None or base.row.stage is None:
        return []
    crossed = []
    for stage in ladder.between(base.row.stage, ours.row.stage):
        if ours.facts is None or stage.for_the_loss or not ladder.effect_of(stage, ours.facts).same_computation:
            crossed.append(stage)
    return crossed


def compare(ours, base):
    """Return the Ratio of the speeds of two rows, or None where no samples pair up.

    Tokens are not compared with samples of another kind, or with steps. Where one of the two waits for its data, the
    ratio is that of all steps together.
    """
    if base is None or base is ours:
        return None
    if ours.facts and base.facts and ours.facts["unit"] != base.facts["unit"]:
        return None
    if ours.waits or base.waits:
        return ratios.ratio_of_all_steps(ours.counted, base.counted)
    return ratios.ratio_of_samples(ours.samples, base.samples)


def is_same_computation(ours, base):
    """Tell whether a row computes the same as its base: as a second run, or because its stage changes nothing here."""
    row = ours.row
    if row.control_of:
        return True
    if base is None or base.row.stage is None or ours.effect is None:
        return False
    is_next_stage = ladder.between(base.row.stage, row.stage) == (row.stage,)
    has_same_command = row.launcher == base.row.launcher and row.flags == base.row.flags
    return is_next_stage and has_same_command and ours.effect.same_computation


def predict(ours, base, rates):
    """Return how many times as fast as its base a row should be, or None where nothing can be said.

    It is the predicted time of the base, divided by that of this row. A time is the sum of all parts: FLOPs and bytes,
    divided by the rates that the probe measured.
    """
    if base is None or rates is None or ours.work is None or base.work is None or ours.ranks != base.ranks:
        return None
    stage, stage_of_base = ours.row.stage, base.row.stage
    if stage is stage_of_base and ours.work == base.work:
        return None  # what differs is no FLOP and no byte, as between s01 and `plain`
    if stage and stage_of_base:
        # the stages between the two, whichever comes first: one of these tuples is empty
        crossed = ladder.between(stage_of_base, stage) + ladder.between(stage, stage_of_base)
        if any(each.unpredictable for each in crossed):
            return None
    elif ours.row.script != base.row.script:
        return None  # more differs than their techniques tell
    before, after = seconds_per_token(base.work, rates), seconds_per_token(ours.work, rates)
    if before is None or after is None:
        return None
    return before / after


def peak_share(ours, probe):
    """Return the share of the machine's fastest matmuls that a row turned into training, from 0 to 1.

    None for a model that is no GPT, for a script that waits for its data, and for several ranks, because the probe
    measures what one process can do.
    """
    if probe is None or ours.facts is None or ours.facts["shape"] is None or ours.ranks > 1 or ours.waits:
        return None
    tokens_per_flop = ratios.ratio_of_samples(ours.samples, probe.samples)  # seconds per FLOP over seconds per token
    return tokens_per_flop.value * flops_per_token(ours.facts["shape"]) if tokens_per_flop else None


# noise and verdicts


def find_noise(table):
    """Fill in the pairs of one computation, the noise, and the verdict UNEXPECTED.

    The noise is the distance() of the worst pair. A pair that contradicts our claim that two rows compute the same is
    left out: its ratio is further from 1 than the sum of its ± and the noise, which here is that of second runs alone,
    and at least 5 %. The noise is None without a pair, and where every pair has a single sample, as after one round on
    a card.
    """
    pairs = []
    for outcome in table.outcomes.values():
        if outcome.is_same_computation and outcome.ratio and not outcome.error and not outcome.base.error:
            pairs.append(outcome)
    repeats = [outcome for outcome in pairs if outcome.row.control_of]
    claims = [outcome for outcome in pairs if not outcome.row.control_of]
    table.pairs = repeats + claims
    noise_of_repeats = max([ALIKE] + [distance(outcome.ratio.value) for outcome in repeats])
    for outcome in claims:
        if judge(outcome.ratio, noise_of_repeats) in (Verdict.FASTER, Verdict.SLOWER):
            outcome.verdict = Verdict.UNEXPECTED
    distances = []
    for outcome in table.pairs:
        if outcome.ratio.spread is not None and outcome.verdict is not Verdict.UNEXPECTED:
            distances.append(distance(outcome.ratio.value))
    table.noise = max(distances, default=None)


def add_verdict(outcome, table):
    """Fill in the verdict on a row, and what follows from that.

    There is none where the row and its base can't be compared, where one of them failed, where they train different
    models, and where the noise is not known.
    """
    if outcome.ratio is None or outcome.error or outcome.base.error or outcome.is_another_model:
        return
    if table.noise is None or outcome.verdict is Verdict.UNEXPECTED:
        return
    outcome.verdict = judge(outcome.ratio, table.noise)
    if outcome.is_same_computation and outcome.ratio.spread is not None:
        outcome.verdict = Verdict.SAME
    longer = outcome.warmup_s - outcome.base.warmup_s
    if outcome.verdict is Verdict.FASTER and longer > LONG_WARMUP:
        seconds_saved = outcome.dt_ms / 1000 * (outcome.ratio.value - 1)  # in each step
        outcome.steps_to_pay = longer / seconds_saved


def fastest_of(table):
    """Return the Outcome that is most times as fast as the first row, or None where none is faster."""
    first, *others = table.rows
    if table.noise is None or first.error:
        return None
    faster = []
    for outcome in others:
        ratio = outcome.ratio_to_first
        if ratio and not outcome.error and judge(ratio, table.noise) is Verdict.FASTER:
            faster.append(outcome)
    return max(faster, key=lambda outcome: outcome.ratio_to_first.value, default=None)
