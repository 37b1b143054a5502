"""What was measured, kept as it comes, and the ratios and predictions that follow from it."""

import json
import math
import statistics
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

from data import refuse

from .. import ladder
from ..arithmetic import Rates, flops_per_token, seconds_per_token
from ..figures import figures_of, seconds_of_warmup, waits_for_data
from ..techniques import work_of
from .rows import Row


@dataclass
class Run:
    """The lines of its record that one process wrote so far. warmup: how many steps are not counted."""

    warmup: int
    header: dict | None = None
    steps: list = field(default_factory=list)
    techniques: dict | None = None
    summary: dict | None = None
    error: dict | None = None

    @property
    def counted(self):
        """The steps after the warm-up."""
        return self.steps[self.warmup :]

    @property
    def may_wait_for_data(self):
        """Whether a watched script has processes that load its data, or spent much of its warm-up without a forward."""
        has_loaders = self.techniques is not None and self.techniques["loaders"] > 0
        return has_loaders or waits_for_data(self.steps[: self.warmup])

    @property
    def memory(self):
        """The most bytes that it held up to its last step, times its ranks; 0 without a meter, and for the probe."""
        if not self.steps or not self.header:
            return 0
        return (self.steps[-1]["memory"] or 0) * self.header["settings"]["world_size"]


class Ratio(NamedTuple):
    """How many times as fast one row is as another.

    spread: from value to the farther end of its 95 % interval; None for a single sample.
    """

    value: float
    spread: float | None


class Results:
    """All that is known of one bench.

    bench: the first line of its record. rows: {name: Row} of all that it starts. runs: {(name, round): Run}. file:
    where the first line goes at once, and each later one by add(); or None.
    """

    def __init__(self, bench, file=None):
        self.bench = bench
        self.file = file
        self.rows = {}
        for fields in bench["rows"]:
            words = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
            self.rows[fields["name"]] = Row(**fields | words)
        self.runs = {}
        self.write_line(bench)

    @classmethod
    def load(cls, path):
        """Return the Results of a record. A last line that a kill cut off is left out.

        Exits with one line where it is no record of a bench.
        """
        try:
            complete_lines = path.read_text(encoding="utf-8").split("\n")[:-1]
            bench, *lines = [json.loads(line) for line in complete_lines]
            results = cls(bench)
            for line in lines:
                results.add(line)
        except (OSError, ValueError, KeyError, TypeError) as error:
            refuse(f"{path} is no record of a bench of this version ({error!r}): pass the NAME of one that ran")
        return results

    def write_line(self, line):
        """Write a line to the file, where there is one."""
        if self.file:
            try:
                print(json.dumps(line), file=self.file, flush=True)
            except OSError as error:  # what is measured goes on, in memory
                print(f"the record ends here: {error.strerror}", file=sys.stderr)
                self.file = None

    def add(self, line):
        """Keep a line of a row, and write it."""
        self.write_line(line)
        key = line["name"], line["round"]
        match line["kind"]:
            case "start":
                self.runs[key] = Run(self.bench["warmup"])
            case "header":
                self.runs[key].header = line
            case "step":
                self.runs[key].steps.append(line)
            case "techniques":
                self.runs[key].techniques = line
            case "summary":
                self.runs[key].summary = line
            case "error":
                self.runs[key].error = line

    @property
    def table_rows(self):
        """The Rows of the table, in its order."""
        return [row for row in self.rows.values() if not row.is_probe and not row.control_of]

    @property
    def probe(self):
        """The Row of the probe, or None in a record that was made without one."""
        for row in self.rows.values():
            if row.is_probe:
                return row
        return None

    @property
    def reference(self):
        """The Row that all others are compared with."""
        return self.rows[self.bench["reference"]]

    # a row

    def runs_of(self, row):
        """Return the Runs of a row, the first round first."""
        return [run for (name, _), run in self.runs.items() if name == row.name]

    def above(self, row):
        """Return the Row above a row, or None."""
        return self.rows.get(row.above)

    def error(self, row):
        """Return the line of the first run of a row that failed, or None."""
        for run in self.runs_of(row):
            if run.error:
                return run.error
        return None

    def rounds_ended(self, row):
        """Return in how many rounds a row came to its end."""
        return len([run for run in self.runs_of(row) if run.summary])

    def counted(self, row):
        """Return the counted steps of all runs of a row."""
        counted = []
        for run in self.runs_of(row):
            counted += run.counted
        return counted

    def figures(self, row):
        """Return what figures_of() says of a row's counted steps, or None without any.

        "warmup_s" is that of its first run, which may compile. "reserved" is the most of its runs, 0 on a CPU.
        """
        counted = self.counted(row)
        if not counted:
            return None
        runs = self.runs_of(row)
        first = [run for run in runs if run.counted][0]
        figures = figures_of(counted)
        figures["warmup_s"] = seconds_of_warmup(first.steps, first.warmup)
        figures["reserved"] = max((run.summary or {}).get("reserved", 0) for run in runs)
        return figures

    def figure(self, row, name):
        """Return one of the figures of a row, or None where it has none, or 0, which was not measured."""
        figures = self.figures(row)
        if figures is None or figures[name] == 0:
            return None
        return figures[name]

    def first_facts(self):
        """Return the facts of the first row of the table that has some, or None."""
        for row in self.table_rows:
            facts = self.facts(row)
            if facts:
                return facts
        return None

    def facts(self, row):
        """Return a row's first header, with the key "sdpa" of its first summary; None where no run got that far.

        It also has the key "techniques" of a watched script, which is None for a stage.
        """
        headers = [run.header for run in self.runs_of(row) if run.header]
        if not headers:
            return None
        kernels = [run.summary["sdpa"] for run in self.runs_of(row) if run.summary]
        techniques = [run.techniques for run in self.runs_of(row) if run.techniques]
        return headers[0] | {
            "sdpa": kernels[0] if kernels else None,
            "techniques": techniques[0] if techniques else None,
        }

    def ranks(self, row):
        """Return how many processes torchrun started for a row; 1 without torchrun, and where no run got that far."""
        facts = self.facts(row)
        return facts["settings"]["world_size"] if facts else 1

    def effect(self, row):
        """Return the ladder.Effect of the stage that a row runs, or None for another script."""
        facts = self.facts(row)
        if row.stage is None or facts is None:
            return None
        return ladder.effect_of(row.stage, facts)

    def stages_crossed(self, row):
        """Return the Stages below that of the row above, down to the row's own, without those that do nothing here."""
        above, facts = self.above(row), self.facts(row)
        if row.stage is None or above is None or above.stage is None:
            return []
        crossed = []
        for stage in ladder.between(above.stage, row.stage):
            if facts is None or stage.for_the_loss or not ladder.effect_of(stage, facts).same_computation:
                crossed.append(stage)
        return crossed

    def work(self, row):
        """Return the Work of a micro-batch of a row, or None where it is not known."""
        effect, facts = self.effect(row), self.facts(row)
        if effect:
            return effect.work
        if facts is None or facts["techniques"] is None or facts["shape"] is None:
            return None
        settings = facts["settings"]
        micro_batches = settings["accum"] // settings["world_size"]
        on_cuda = facts["environment"]["device"] == "cuda"
        return work_of(facts["techniques"], facts["shape"], settings["batch_size"], micro_batches, on_cuda)

    def waits_for_data(self, row):
        """Tell whether a script spends much of its steps before their first forwards."""
        return waits_for_data(self.counted(row))

    def trains_another_model(self, row, base):
        """Tell whether two rows train models of different shapes."""
        return model_of(self.facts(row)) != model_of(self.facts(base))

    # ratios

    def samples(self, row):
        """Return the times of a row that can be compared with those of another, a dict {key: seconds per token}.

        Two rows are compared where their keys agree. Where rows take turns, the key is (round, turn), and the time that
        of a step. Otherwise the key is the round, and the time the median of its steps.

        The times of the probe are seconds per FLOP, of a matmul in its fastest dtype. A row's ratio to the probe is
        then the number of tokens that it trains in the time of a FLOP.
        """
        samples = {}
        for (name, round_number), run in self.runs.items():
            if name != row.name:
                continue
            times = times_of_probe(run) if row.is_probe else times_of_tokens(run)
            if self.bench["in_turn"]:
                samples |= {(round_number, turn): time for turn, time in times.items()}
            elif times and run.summary:  # a round that was cut off says little
                samples[round_number] = statistics.median(times.values())
        return samples

    def compare(self, row, base):
        """Return the Ratio of the speeds of a row and another, or None where no samples pair up.

        Tokens are not compared with samples of another kind, or with steps. Where one of the two waits for its data,
        the ratio is that of all steps together.
        """
        if base is None or base is row:
            return None
        ours, theirs = self.facts(row), self.facts(base)
        if ours and theirs and unit_of(ours) != unit_of(theirs):
            return None
        if not base.is_probe and (self.waits_for_data(row) or self.waits_for_data(base)):
            return ratio_of_all_steps(self.counted(row), self.counted(base))
        samples, samples_of_base = self.samples(row), self.samples(base)
        ratios = [samples_of_base[key] / samples[key] for key in samples if key in samples_of_base]
        return Ratio(*median_and_spread(ratios)) if ratios else None

    # predictions

    def rates(self):
        """Return the Rates that the probe measured, medians over its counted steps; None where it left none."""
        steps = self.counted(self.probe) if self.probe else []
        if not steps:
            return None
        peak = {}
        for dtype in steps[0]["peak"]:
            peak[dtype] = statistics.median(step["peak"][dtype] for step in steps)
        return Rates(peak, statistics.median(step["copy"] for step in steps))

    def predicted(self, row):
        """Return how many times as fast as the row above a row should be, or None where nothing can be said.

        It is the predicted time of the row above, divided by that of this row. A time is the sum of all parts: FLOPs
        and bytes, divided by the rates that the probe measured.
        """
        above, rates = self.above(row), self.rates()
        if above is None or rates is None:
            return None
        ours, theirs = self.work(row), self.work(above)
        if ours is None or theirs is None or self.ranks(row) != self.ranks(above):
            return None
        if row.stage is above.stage and ours == theirs:
            return None  # what differs is no FLOP and no byte, as between s01 and `plain`
        if row.stage and above.stage:
            # the stages between the two, whichever comes first: one of these tuples is empty
            crossed = ladder.between(above.stage, row.stage) + ladder.between(row.stage, above.stage)
            if any(stage.unpredictable for stage in crossed):
                return None
        elif row.script != above.script:
            return None  # more differs than their techniques tell
        before, after = seconds_per_token(theirs, rates), seconds_per_token(ours, rates)
        if before is None or after is None:
            return None
        return before / after

    def peak_share(self, row):
        """Return the share of the machine's fastest matmuls that a row turned into training, from 0 to 1.

        None for a model that is no GPT, for a script that waits for its data, and for several ranks, because the probe
        measures what one process can do.
        """
        facts = self.facts(row)
        if self.probe is None or facts is None or facts["shape"] is None or self.ranks(row) > 1:
            return None
        if self.waits_for_data(row):
            return None
        tokens_per_flop = self.compare(row, self.probe)  # seconds per FLOP over seconds per token: see samples()
        return tokens_per_flop.value * flops_per_token(facts["shape"]) if tokens_per_flop else None

    # losses

    def last_common_step(self):
        """Return the number of the last step to which all rows with counted steps got; None without such rows."""
        reached = []
        for row in self.table_rows:
            if self.counted(row):
                reached.append(max(run.steps[-1]["step"] for run in self.runs_of(row) if run.steps))
        return min(reached, default=None)

    def loss_at(self, row, step):
        """Return the training loss of a row at a step, or None where no run got there. step: a number, or None."""
        for run in self.runs_of(row):
            for line in run.steps:
                if line["step"] == step:
                    return line["loss"]
        return None


def unit_of(facts):
    """Return what a row counts: "tok", or "sample" or "step" in a script that has no tokens."""
    return facts.get("unit", "tok")


def model_of(facts):
    """Return what makes a model another one: a GPT's layers, heads and width; another one's number of parameters."""
    shape = facts["shape"]
    if shape is None:
        return facts["parameters"]
    return shape["n_layer"], shape["n_head"], shape["n_embd"]


# samples, medians and their intervals


def times_of_tokens(run):
    """Return the seconds that a token took in each counted step of a row's run, {turn: seconds}.

    A script may take a step without tokens, which is left out.
    """
    return {turn: step["dt"] / step["tokens"] for turn, step in enumerate(run.counted) if step["tokens"]}


def times_of_probe(run):
    """Return the seconds of a FLOP in each counted step of the probe, of a matmul in its fastest dtype, by turn."""
    return {turn: 1 / max(step["peak"].values()) for turn, step in enumerate(run.counted)}


def ratio_of_all_steps(steps, steps_of_base):
    """Return the Ratio of the speeds of two rows, each of all its steps together; None where one has no tokens.

    The spread is the distance to the farther one of the ratios of their first and of their second halves.
    """
    ratio = ratio_of_speeds(steps, steps_of_base)
    if ratio is None:
        return None
    middle, middle_of_base = len(steps) // 2, len(steps_of_base) // 2
    halves = [
        ratio_of_speeds(steps[:middle], steps_of_base[:middle_of_base]),
        ratio_of_speeds(steps[middle:], steps_of_base[middle_of_base:]),
    ]
    if None in halves:
        return Ratio(ratio, None)
    return Ratio(ratio, max(abs(half - ratio) for half in halves))


def ratio_of_speeds(steps, steps_of_base):
    """Return how many times as fast some steps are as others, all tokens over all seconds; None without tokens."""
    tokens, tokens_of_base = [sum(step["tokens"] for step in each) for each in (steps, steps_of_base)]
    if not (tokens and tokens_of_base):
        return None
    seconds, seconds_of_base = [sum(step["dt"] for step in each) for each in (steps, steps_of_base)]
    return tokens / seconds * seconds_of_base / tokens_of_base


def order_statistic(n):
    """Return the largest k for which the k-th smallest and k-th largest of n samples enclose the median.

    They do with a probability of 95 % or more, for independent samples of any distribution: each sample is below the
    median with probability 1/2, so how many are below it follows the binomial distribution (Conover, Practical
    Nonparametric Statistics). Below six samples there is no such k, and 1 is returned, for the smallest and the largest
    sample.
    """
    largest = 1
    missed = 0.0  # the probability that the median lies outside the range from the k-th smallest to the k-th largest
    for k in range(1, n // 2 + 1):
        missed += 2 * math.comb(n, k - 1) / 2**n
        if missed <= 0.05:
            largest = k
    return largest


def median_and_spread(samples):
    """Return the median of samples and its spread: the distance to the farther end of its 95 % interval.

    Below six samples their whole range stands for the interval. The spread of a single sample is None.
    """
    ordered = sorted(samples)
    median = statistics.median(ordered)
    if len(ordered) == 1:
        return median, None
    k = order_statistic(len(ordered))
    return median, max(ordered[-k] - median, median - ordered[k - 1])
