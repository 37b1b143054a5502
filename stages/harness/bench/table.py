"""The table of a bench: what is shown of it, computed once from what was measured. Others put it into words.

A Run holds lines of the record, and an Outcome what follows from the Runs of a row. A Table has the Outcomes of all
rows, and what is said of the bench as a whole.
"""

import statistics
from dataclasses import dataclass, field
from enum import Enum

from .. import ladder
from ..arithmetic import Rates, flops_per_token, seconds_per_token
from ..card import words_on_card
from ..figures import figures_of, seconds_of_warmup, waiting_share, waits_for_data
from ..scripts import uses, work_of
from . import ratios
from .ratios import ALIKE, Noise, Ratio, Verdict, distance, judge
from .rows import runs_the_same

LONG_WARMUP = 10  # seconds that are worth a word
VERY_LONG = 10  # times the median step: no noise of a machine, but what a script does in some steps, as a rollout


class Reason(Enum):
    """Why it can't be told what a row brings, other than by its ±."""

    WRONG_CLAIM = "should be as fast as the row above, so one of the two was disturbed: --rounds 3 may tell"
    BELOW_WRONG_CLAIM = "the row above may have been disturbed"
    TOO_FEW = "fewer than three steps or rounds"


class Outcome:
    """What is shown of a row, computed from its runs. What is not known, or does not apply, is None.

    facts: the first header, with the keys "sdpa" and "techniques" that became known later; None where no run got that
    far. times: {round: seconds of a token in each counted step, or in the median one where rows take no turns}. means:
    {round: [seconds of a token in all steps together]}. by_all_steps: whether these tell the speed of a watched script,
    which waits for data or has a few very long steps.
    """

    # beside other rows: table_of() fills these in
    loss: float | None = None  # at the Table's loss_step
    ratio: Ratio | None = None  # to the base
    ratio_to_reference: Ratio | None = None
    predicted: float | None = None  # what the ratio should be
    peak_share: float | None = None  # of the machine's fastest matmuls, from 0 to 1
    is_another_model: bool = False  # than the base's
    is_same_computation: bool = False  # as the base's
    is_contradicted: bool = False  # whether it should be the same computation, and its speed says that it is not
    verdict: Verdict | None = None  # on the ratio
    reason: Reason | None = None  # why that can't be told
    steps_to_pay: float | None = None  # after which a gain has made up for a long warm-up

    def __init__(self, row, base, runs, bench):
        """Compute what a row shows by itself.

        base: the Outcome that it is compared with, of the row above, or of the row that a control repeats. runs: its
        Runs. bench: the first line of the record.
        """
        self.row = row
        self.base = base
        self.error = first_known([run.error for run in runs])  # the line of the first run that failed
        self.rounds = len([run for run in runs if run.summary])  # in which it came to its end
        self.curve = curve_of(runs)
        self.add_steps(runs, bench)
        self.add_facts(runs, bench)
        self.skipped = stages_crossed(self)  # below its base's, down to its own, that do something here
        self.added, self.in_effect = techniques_added(self)

    def add_steps(self, runs, bench):
        """Set what the counted steps tell."""
        self.counted, self.times, self.means = [], {}, {}
        time_of_step = ratios.seconds_per_flop if self.row.is_probe else ratios.seconds_per_token
        for run in runs:
            self.counted += run.counted
            times = [time_of_step(step) for step in run.counted]
            known = [time for time in times if time is not None]
            if bench["in_turn"]:
                self.times[run.round] = times
            elif known and run.summary:  # a round that was cut off says little
                self.times[run.round] = [statistics.median(known)]
            if run.summary and not self.row.is_probe:
                self.means[run.round] = [ratios.mean_seconds_per_token(run.counted)]
        self.steps = len(self.counted)
        self.words_on_card = words_on_card([run.counted for run in runs])
        self.waiting_share = waiting_share(self.counted)  # of its time, for a DataLoader
        self.warmup_s = self.tok_per_sec = self.memory = self.dt_ms = self.dt_mean_ms = None
        self.by_all_steps = False
        if not self.counted or self.row.is_probe:
            return
        figures = figures_of(self.counted)
        self.dt_ms, self.dt_mean_ms = figures["dt_ms"], figures["dt_mean_ms"]
        self.tok_per_sec, self.memory = figures["tok_per_sec"] or None, figures["memory"] or None  # 0: not measured
        self.warmup_s = seconds_of_warmup(first_known([run.steps for run in runs if run.counted]), bench["warmup"])
        if self.row.is_watched:
            self.by_all_steps = waits_for_data(self.counted) or is_mostly_long_steps(self.counted)
        seconds = ratios.mean_seconds_per_token(self.counted)
        if self.by_all_steps and seconds:
            self.tok_per_sec = 1 / seconds

    def add_facts(self, runs, bench):
        """Set what the headers tell, and the techniques of a script."""
        self.facts = facts_of(runs)
        self.unit = self.parameters = self.techniques = self.effect = self.ran_on = None
        self.ranks = 1  # which torchrun started
        if self.facts:
            self.unit = self.facts.get("unit")  # "tok", "sample" or "step"; a forecast's header has none
            self.parameters = self.facts.get("parameters")
            self.techniques = self.facts["techniques"]
            self.ranks = self.facts["settings"]["world_size"]
            if self.row.stage:
                self.effect = ladder.effect_of(self.row.stage, self.facts)
            if self.facts["environment"]["device"] != bench["environment"]["device"]:
                self.ran_on = self.facts["environment"]["device"]  # "cpu" in a bench of a card
        self.is_out_of_turn = bench["in_turn"] and any(run.may_wait_for_data for run in runs)

    @property
    def adds_nothing(self):
        """Whether it should add techniques to its base, and none of them took effect."""
        return bool(self.added) and not self.in_effect

    @property
    def work(self):
        """The Work of a micro-batch, or None where it is not known."""
        if self.effect:
            return self.effect.work
        if self.techniques is None or self.facts["shape"] is None:
            return None
        settings = self.facts["settings"]
        micro_batches = settings["accum"] // settings["world_size"]
        on_cuda = self.facts["environment"]["device"] == "cuda"
        return work_of(self.techniques, self.facts["shape"], settings["batch_size"], micro_batches, on_cuda)

    @property
    def model(self):
        """What makes a model another one: a GPT's layers, heads and width; another one's number of parameters."""
        shape = self.facts and self.facts["shape"]
        return (shape["n_layer"], shape["n_head"], shape["n_embd"]) if shape else self.parameters


@dataclass
class Table:
    """What is shown of a bench.

    bench: the first line of its record. facts: of the first row that has some. probe: the Outcome of the probe. rates:
    the Rates that it measured. loss_step: the last step that all rows took. outcomes: {name: Outcome} of all rows, and
    of the control. pairs: the Outcomes of rows that compute the same as their base, controls first. noise: the Noise of
    these. last: the Outcome of the last row of one process that trains the first row's model. together: its Ratio to
    the first.
    """

    bench: dict
    facts: dict | None = None
    rates: Rates | None = None
    loss_step: int | None = None
    outcomes: dict = field(default_factory=dict)
    pairs: list = field(default_factory=list)
    probe: Outcome | None = None
    noise: Noise | None = None
    last: Outcome | None = None
    together: Ratio | None = None

    @property
    def rows(self):
        """The Outcomes of the rows, in their order."""
        return [outcome for outcome in self.outcomes.values() if not outcome.row.control_of]

    @property
    def unit(self):
        """What the first row counts that ran: "tok", "sample" or "step"."""
        return self.facts["unit"] if self.facts else "tok"

    @property
    def reference(self):
        """The Outcome of the row that all others are compared with."""
        return self.outcomes[self.bench["reference"]]


def table_of(results):
    """Return the Table of the Results of a bench."""
    table = Table(results.bench)
    for row in results.rows.values():
        base = table.outcomes.get(row.control_of or row.above)
        outcome = Outcome(row, base, results.runs_of(row), results.bench)
        if row.is_probe:
            table.probe = outcome
        else:
            table.outcomes[row.name] = outcome
    table.facts = first_known([outcome.facts for outcome in table.rows])
    table.rates = rates_of(table.probe)
    table.loss_step = last_common_step(table.rows)
    for outcome in table.outcomes.values():
        compare_with_others(outcome, table)
    find_noise(table)
    for outcome in table.rows:
        add_verdict(outcome, table)
    add_together(table)
    return table


def first_known(values):
    """Return the first value that is not None, or None."""
    known = [value for value in values if value is not None]
    return known[0] if known else None


# what is known of a row by itself


def is_mostly_long_steps(counted):
    """Tell whether very long steps took most of the time, of which the median step says nothing."""
    dts = [step["dt"] for step in counted]
    long_dts = [dt for dt in dts if dt > VERY_LONG * statistics.median(dts)]
    return sum(long_dts) > sum(dts) / 2


def facts_of(runs):
    """Return what the header of a row says, with the kernel of its attention and the techniques of a script."""
    header = first_known([run.header for run in runs])
    if header is None:
        return None
    summary = first_known([run.summary for run in runs])
    techniques = first_known([run.techniques for run in runs])
    kernel = summary["sdpa"] if summary else None
    return header | {"sdpa": kernel, "techniques": techniques}


def rates_of(probe):
    """Return the Rates that the probe measured, medians over its counted steps; None where it left none."""
    if probe is None or not probe.counted:
        return None
    steps = probe.counted
    peak = {}
    for dtype in steps[0]["peak"]:
        peak[dtype] = statistics.median(step["peak"][dtype] for step in steps)
    return Rates(peak, statistics.median(step["copy"] for step in steps))


def last_common_step(rows):
    """Return the number of the last step to which all rows with counted steps got; None without such rows."""
    return min([outcome.curve[-1][0] for outcome in rows if outcome.counted and outcome.curve], default=None)


def curve_of(runs):
    """Return (step, tokens, loss) of each step of a row's first run, where tokens are all up to that step."""
    points = []
    tokens = 0
    for step in runs[0].steps if runs else []:
        tokens += step.get("tokens", 0)  # the probe has none
        if step.get("loss") is not None:
            points.append((step["step"], tokens, step["loss"]))
    return points


# beside other rows


def stages_crossed(outcome):
    """Return the Stages below that of the base, down to the row's own, without those that do nothing here."""
    stage, base = outcome.row.stage, outcome.base
    if stage is None or base is None or base.row.stage is None:
        return []
    crossed = []
    for each in ladder.between(base.row.stage, stage):
        if not outcome.facts or each.for_the_loss or not ladder.effect_of(each, outcome.facts).same_computation:
            crossed.append(each)
    return crossed


def techniques_added(outcome):
    """Return (the names of the techniques that a row adds to its base, those that took effect), two lists."""
    base = outcome.base
    if base is None or not runs_the_same(outcome.row, base.row):
        return [], []
    added = [name for name in outcome.row.added if name not in base.row.added]
    if outcome.techniques is None or base.techniques is None:
        return added, added  # as far as is known
    in_effect = [name for name in added if uses(outcome.techniques, name) and not uses(base.techniques, name)]
    return added, in_effect


def compare_with_others(outcome, table):
    """Fill in what a row shows beside its base, the reference and the probe."""
    for step, _, loss in outcome.curve:
        if step == table.loss_step:
            outcome.loss = loss
    outcome.ratio = compare(outcome, outcome.base)
    outcome.ratio_to_reference = compare(outcome, table.reference)
    outcome.is_another_model = outcome.ratio is not None and outcome.model != outcome.base.model
    outcome.is_same_computation = outcome.adds_nothing or is_same_computation(outcome)
    if not outcome.ran_on:
        outcome.predicted = predict(outcome, table.rates)
        outcome.peak_share = peak_share(outcome, table.probe)


def compare(outcome, base):
    """Return the Ratio of the speeds of two rows, or None where no samples pair up.

    Tokens are not compared with samples of another kind, or with steps.
    """
    if base is None or base is outcome or base.unit != outcome.unit:
        return None
    took_no_turns = outcome.is_out_of_turn or base.is_out_of_turn
    if took_no_turns or outcome.by_all_steps or base.by_all_steps:
        return ratios.ratio_of_rounds(outcome.means, base.means)
    return ratios.ratio_of_rounds(outcome.times, base.times)


def is_same_computation(outcome):
    """Tell whether a row computes the same as its base: as a second run, or because its stage changes nothing here."""
    row, base = outcome.row, outcome.base
    if row.control_of:
        return True
    if base is None or base.row.stage is None or outcome.effect is None:
        return False
    is_next_stage = ladder.between(base.row.stage, row.stage) == (row.stage,)
    has_same_command = row.launcher == base.row.launcher and row.flags == base.row.flags
    return is_next_stage and has_same_command and outcome.effect.same_computation


def predict(outcome, rates):
    """Return how many times as fast as its base a row should be, or None where nothing can be said.

    It is the predicted time of the base, divided by that of this row. A time is the sum of all parts: FLOPs and bytes,
    divided by the rates that the probe measured.
    """
    base = outcome.base
    if base is None or rates is None or outcome.ranks != base.ranks:
        return None
    work, work_of_base = outcome.work, base.work
    if work is None or work_of_base is None:
        return None
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
    return before / after if before and after else None


def peak_share(outcome, probe):
    """Return the share of the machine's fastest matmuls that a row turned into training, from 0 to 1.

    None for a model that is no GPT, for a script whose speed is that of all its steps, and for several ranks, because
    the probe measures what one process can do.
    """
    shape = outcome.facts and outcome.facts["shape"]
    if probe is None or not shape or outcome.ranks > 1 or outcome.by_all_steps:
        return None
    # seconds per FLOP over seconds per token
    tokens_per_flop = ratios.ratio_of_rounds(outcome.times, probe.times)
    return tokens_per_flop.value * flops_per_token(shape) if tokens_per_flop else None


# noise and verdicts


def find_noise(table):
    """Fill in the pairs of one computation, which of them contradict our claim that they are, and the noise.

    A claim is contradicted where its ratio is further from 1 than second runs alone and its ± explain, and than 5 %.
    Such a pair is left out of the noise.
    """
    pairs = []
    for outcome in table.outcomes.values():
        if outcome.is_same_computation and outcome.ratio and not outcome.error and not outcome.base.error:
            pairs.append(outcome)
    repeats = [outcome for outcome in pairs if outcome.row.control_of]
    claims = [outcome for outcome in pairs if not outcome.row.control_of]
    table.pairs = repeats + claims
    sizes = [distance(outcome.ratio.value) for outcome in repeats]
    allowed = Noise(max([ALIKE, *sizes]), len(repeats))
    for outcome in claims:
        outcome.is_contradicted = judge(outcome.ratio, allowed) in (Verdict.FASTER, Verdict.SLOWER)
    table.noise = ratios.noise_of_pairs([outcome.ratio for outcome in table.pairs if not outcome.is_contradicted])


def add_verdict(outcome, table):
    """Fill in the verdict on a row, and what follows from that.

    There is none where the row and its base can't be compared, where one of them failed, where they train different
    models, where the row should add something and does not, and where the noise is not known.
    """
    if outcome.ratio is None or outcome.error or outcome.base.error or outcome.is_another_model:
        return
    if outcome.adds_nothing or table.noise is None:
        return
    if outcome.is_contradicted:
        outcome.reason = Reason.WRONG_CLAIM
    elif outcome.base.is_contradicted:
        outcome.reason = Reason.BELOW_WRONG_CLAIM
    elif outcome.ratio.spread is None:
        outcome.reason = Reason.TOO_FEW
    if outcome.reason:
        outcome.verdict = Verdict.UNCLEAR
    elif outcome.is_same_computation:
        outcome.verdict = Verdict.SAME
    else:
        outcome.verdict = judge(outcome.ratio, table.noise)
    longer = outcome.warmup_s - outcome.base.warmup_s
    if outcome.verdict is Verdict.FASTER and longer > LONG_WARMUP:
        seconds_saved = outcome.dt_ms / 1000 * (outcome.ratio.value - 1)  # in each step
        outcome.steps_to_pay = longer / seconds_saved


def add_together(table):
    """Fill in what all rows bring together: the last row of one process that trains the first row's model."""
    first, *others = table.rows
    for outcome in others:
        ratio = compare(outcome, first)
        if ratio and outcome.ranks == 1 and outcome.model == first.model and not outcome.error:
            table.last, table.together = outcome, ratio
