"""From the runs of a bench to samples, ratios, noise and verdicts. Starts nothing, and writes nothing.

records.py describes the lines of a record.
"""

import math
import statistics
from functools import cached_property

from data import refuse

from . import ladder
from .arithmetic import Rates, flops_per_token, seconds
from .intervals import distance, mean_and_spread, median_and_spread, student_t
from .records import WARMUP, read, runs_of_lines, summarize

PEAK = "peak"  # the name of the probe's run
PLAIN = "plain"  # the row of s01 without the variables that the bench sets on a CPU
ALL_REDUCE = "all-reduce of "  # begins the name of the run that times an all-reduce for a row of the mode `scale`


class Results:
    """All records of one bench.

    bench: its own line. mode, pair_by: of that line. rows: {name: its dict in that line}, in the table's order. runs:
    {(session, name): Run}, in the order in which they began.
    """

    def __init__(self, path):
        """Read results/NAME.jsonl. Exits with one line where it is no record of a bench."""
        lines = read(path)
        if not lines or lines[0].get("kind") != "bench":
            refuse(f"{path} is no record of a bench: pass the NAME of one that ran")
        self.bench = lines[0]
        self.mode = self.bench["mode"]
        self.pair_by = self.bench["pair_by"]
        self.rows = {row["name"]: row for row in self.bench["rows"]}
        self.runs = runs_of_lines(path, lines[1:])

    def runs_of(self, name):
        """Return the Runs of a row, in the order in which they began."""
        return [run for (_, row), run in self.runs.items() if row == name]

    def run_facts(self, name):
        """Return the first header of a row, with "sdpa" of its summary; None where no run got that far."""
        facts = None
        for run in self.runs_of(name):
            if run.header and facts is None:
                facts = run.header | {"sdpa": None}
            if run.summary and facts and facts["sdpa"] is None:
                facts["sdpa"] = run.summary.get("sdpa")
        return facts

    def any_facts(self):
        """Return run_facts() of the first row that has any, or None."""
        for name in self.rows:
            facts = self.run_facts(name)
            if facts:
                return facts
        return None

    def error(self, name):
        """Return why a run of a row failed, or None. In turn on a CPU a later session makes up for it."""
        runs = self.runs_of(name)
        if self.pair_by == "step":
            runs = runs[-1:]
        for run in runs:
            if run.error:
                return run.error
        return None

    def counted_steps(self, name):
        """Return every step of a row after the warm-up, of all its runs."""
        counted = []
        for run in self.runs_of(name):
            counted += run.steps[WARMUP:]
        return counted

    def summary(self, name):
        """Return summarize() of a row's counted steps, with "reserved" (bytes, 0 on a CPU); None without any."""
        steps = self.counted_steps(name)
        if not steps:
            return None
        figures = summarize(steps, warmup=0)
        first_run = self.runs_of(name)[0]
        figures["warmup_s"] = sum(step["dt"] for step in first_run.steps[:WARMUP])
        figures["reserved"] = max((run.summary or {}).get("reserved", 0) for run in self.runs_of(name))
        return figures

    def samples(self, name):
        """Return {what pairs it: a sample} of a row: seconds per token, of the probe per FLOP; of `loss` the loss."""
        samples = {}
        for (session, row), run in self.runs.items():
            if row != name:
                continue
            times = [time_per_unit(step) for step in run.steps[WARMUP:]]
            if self.pair_by == "seed":
                if run.summary and "eval" in run.summary:
                    samples[session] = run.summary["eval"]
            elif self.pair_by == "step":
                for number, time in enumerate(times):
                    samples[session, number] = time
            elif times:
                samples[session] = statistics.median(times)
        return samples

    def compare(self, name, base):
        """Return (value, spread) of a row against another, from the samples that pair up; None where none do.

        It is the median of the ratios of their speeds, above 1 where the row is the faster one; in the mode `loss` the
        mean of the differences of their losses, below 0 where the row's loss is the lower one.
        """
        ours, theirs = self.samples(name), self.samples(base)
        pairs = sorted(ours.keys() & theirs.keys())
        if not pairs or name == base:
            return None
        if self.pair_by == "seed":
            return mean_and_spread([ours[key] - theirs[key] for key in pairs])
        return median_and_spread([theirs[key] / ours[key] for key in pairs])

    @cached_property
    def first_row(self):
        """The row that every other is compared with: s01, which on a CPU is the one below `plain`."""
        for name in self.rows:
            if name != PLAIN:
                return name
        return PLAIN

    def row_above(self, name):
        """Return the name of the row above; for the first row its own."""
        names = list(self.rows)
        return names[max(0, names.index(name) - 1)]

    def note(self, name):
        """Return what the machine makes of a stage's technique; "" for what is no stage of the ladder."""
        stage, facts = ladder.find(name), self.run_facts(name)
        if self.mode != "ladder" or stage is None or facts is None:
            return ""
        return stage.note(facts)

    def is_no_op(self, name):
        """Tell whether a row took the very steps of the row above, since its technique does nothing to a step here."""
        above = self.row_above(name)
        if ladder.find(name) is None or ladder.find(above) is None:
            return False
        is_next = [stage.name for stage in ladder.between(above, name)] == [name]
        return is_next and ladder.is_no_op(self.note(name))

    @cached_property
    def controls(self):
        """{(name, name): (ratio, spread)} of runs of one computation: the A/A pair, and stages that do nothing here."""
        pairs = list(self.bench["controls"].items())
        for name in self.rows:
            if self.is_no_op(name):
                pairs.append((name, self.row_above(name)))
        ratios = {}
        for name, base in pairs:
            ratio = self.compare(name, base)
            if ratio and not self.error(name) and not self.error(base):
                ratios[name, base] = ratio
        return ratios

    @property
    def has_one_round(self):
        """Whether each row ran once, so that a ratio has a single sample."""
        return self.pair_by == "session" and self.bench["rounds"] == 1

    @cached_property
    def noise(self):
        """How far from 1 a ratio is taken to be noise, as a distance(); None without two runs of one computation.

        That is how far the worst pair of such runs came out. With one round it is the 95 % interval of a ratio, by the
        scatter of these runs: the worst pair of so few says too little.
        """
        if not self.controls:
            return None
        if not self.has_one_round:
            return max(distance(ratio) for ratio, _ in self.controls.values())
        squares, degrees = 0.0, 0
        for group in self.runs_of_one_computation():
            times = []
            for name in group:
                times += self.samples(name).values()
            mean = statistics.mean(times)
            squares += sum((time / mean - 1) ** 2 for time in times)
            degrees += len(times) - 1
        deviation_of_ratio = math.sqrt(2 * squares / degrees)
        return student_t(degrees) * deviation_of_ratio

    def runs_of_one_computation(self):
        """Return the sets of rows that `controls` ties together."""
        groups = []
        for pair in self.controls:
            apart = [group for group in groups if not group & set(pair)]
            together = set(pair).union(*(group for group in groups if group & set(pair)))
            groups = [*apart, together]
        return groups

    def verdict(self, name):
        """Return a row against the row above in a word or two, "" where nothing can be said.

        It is "no difference" where the ratio is within its spread or within the noise, else "faster" or "slower". The
        modes `amp` and `scale` compare with the first row.
        """
        base = self.row_above(name) if self.mode == "ladder" else self.first_row
        compared = self.compare(name, base)
        if compared is None or self.noise is None:
            return ""
        ratio, spread = compared
        is_within_spread = spread is not None and abs(ratio - 1) <= spread
        if is_within_spread or distance(ratio) <= self.noise:
            return "no difference"
        return "faster" if ratio > 1 else "slower"

    @cached_property
    def rates(self):
        """The Rates that the probe measured, medians over its counted steps; None where it left none."""
        steps = self.counted_steps(PEAK)
        if not steps:
            return None
        peak = {}
        for dtype in steps[0]["peak"]:
            peak[dtype] = statistics.median(step["peak"][dtype] for step in steps)
        return Rates(peak, statistics.median(step["copy"] for step in steps))

    def seconds_per_micro_batch(self, name):
        """Return the median seconds that a row takes for one micro-batch of one rank."""
        settings = self.run_facts(name)["settings"]
        tokens = settings["batch_size"] * settings["seq_len"] * settings["world_size"]
        return tokens / self.summary(name)["tok_per_sec"]

    def is_predictable(self, name):
        """Tell whether FLOPs and bytes say what a row is worth against the row above."""
        above = self.row_above(name)
        if self.mode != "ladder" or ladder.find(name) is None or ladder.find(above) is None:
            return False
        stages = ladder.between(above, name)
        return len(stages) > 0 and all(stage.is_predictable for stage in stages)

    def predicted(self, name):
        """Return how many times as fast as the row above a row should be, or None where nothing can be said.

        Of the time of the row above, as it was measured, what the technique saves is taken away: the FLOPs and bytes of
        both stages, divided by the rates of the probe. In the mode `scale` the ranks divide the first row's step among
        them, and wait for the all-reduce that the probe measured.
        """
        above = self.row_above(name)
        if name == above or self.summary(above) is None or self.summary(name) is None:
            return None
        if self.mode == "scale" and self.summary(self.first_row) is None:
            return None
        if self.mode == "scale":
            return self.predicted_seconds_on_ranks(above) / self.predicted_seconds_on_ranks(name)
        if not self.is_predictable(name) or self.rates is None:
            return None
        facts = self.run_facts(name)
        before, after = ladder.work_of(above, facts), ladder.work_of(name, facts)
        if not {before.matmul_dtype, after.matmul_dtype} <= self.rates.matmul.keys():
            return None
        saved = seconds(before, self.rates) - seconds(after, self.rates)
        measured = self.seconds_per_micro_batch(above)
        if saved >= measured:  # more than there is to save: these rates are not those of this step
            return None
        return measured / (measured - saved)

    def predicted_seconds_on_ranks(self, name):
        """Return the seconds that a step should take on a row's ranks."""
        alone = self.summary(self.first_row)["dt_ms"] / 1e3
        return alone / self.run_facts(name)["settings"]["world_size"] + self.all_reduce_seconds(name)

    def all_reduce_seconds(self, name):
        """Return the median seconds of an all-reduce on a row's ranks by itself; 0 where none was timed."""
        dts = [step["dt"] for step in self.counted_steps(ALL_REDUCE + name)]
        return statistics.median(dts) if dts else 0.0

    def peak_share(self, name):
        """Return the share of the machine's matmul peak that a row turned into training, from 0 to 1, or None.

        With several ranks it is the share of one. A script that trains no GPT has none.
        """
        compared, facts = self.compare(name, PEAK), self.run_facts(name)
        if compared is None or facts["shape"] is None:
            return None
        flops = flops_per_token(facts["shape"], facts["settings"]["seq_len"])
        return compared[0] * flops / facts["settings"]["world_size"]

    def is_stale(self, name):
        """Tell whether a stage's code has changed since a row was measured."""
        facts = self.run_facts(name)
        if facts is None or not ladder.find(facts["stage"]):
            return False
        return facts["code"] != ladder.code_sha256(ladder.path_of(facts["stage"]))

    def is_finished(self, name):
        """Tell whether a row has all its runs or counted steps, and the last run did not fail."""
        if self.error(name):
            return False
        if self.pair_by == "step":
            wanted = (self.bench["steps"] - WARMUP) * self.bench["rounds"]
            return len(self.counted_steps(name)) >= wanted
        return all(self.has_ended(session, name) for session in range(self.bench["rounds"]))

    def has_ended(self, session, name):
        """Tell whether a row's run in a session came to its summary, without an error."""
        run = self.runs.get((session, name))
        return run is not None and run.summary is not None and run.error is None

    def last_common_step(self):
        """Return the number of the last step that every row with counted steps got to; None without such rows."""
        reached = []
        for name in self.rows:
            if self.counted_steps(name):
                reached.append(max(len(run.steps) for run in self.runs_of(name)))
        return min(reached) - 1 if reached else None

    def loss_at(self, name, step):
        """Return the training loss of a row at a step, or None where no run got there."""
        for run in self.runs_of(name):
            if len(run.steps) > step:
                return run.steps[step]["loss"]
        return None

    def largest_batch(self, stage):
        """Return the largest batch size of a stage that fitted in the mode `limit`, or None."""
        fitted = [batch for batch, name in self.runs if name == stage and self.has_ended(batch, stage)]
        return max(fitted, default=None)

    def limit_is_found(self, stage):
        """Tell whether the mode `limit` knows a batch size that fits, and that the next one does not."""
        fits, fails = self.largest_batch(stage), self.smallest_batch_that_failed(stage)
        return fails is not None and fails == (fits or 0) + 1

    def smallest_batch_that_failed(self, stage):
        """Return the smallest batch size of a stage that did not fit in the mode `limit`, or None."""
        failed = [batch for (batch, name), run in self.runs.items() if name == stage and run.error]
        return min(failed, default=None)


def time_per_unit(step):
    """Return the seconds per token of a training step, or per FLOP of the probe's step, at its highest rate."""
    if "peak" in step:
        return 1 / max(step["peak"].values())
    return step["dt"] / step["tokens"]
