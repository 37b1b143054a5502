"""What was measured: the lines of a bench, kept as they come, and the ratios, noise and verdicts that follow from them.

record.py describes the lines. A Results lives as long as its bench: the schedule asks it what is missing, and the page
draws it.
"""

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from data import refuse

from . import ladder
from .arithmetic import Rates, flops_per_token, seconds_per_token
from .intervals import distance, median_and_spread
from .record import figures_of

NO_DIFFERENCE = "no difference"  # a verdict
# Two rows of one computation that differ by more than this, and by more than so many times the A/A control, are
# reported and left out of the noise.
SUSPICIOUS_DIFFERENCE = 0.05
SUSPICIOUS_MULTIPLE = 3


@dataclass
class Run:
    """What one process left in a record; None for what it did not get to."""

    session: int
    batch_size: int | None = None
    header: dict | None = None
    steps: list = field(default_factory=list)
    summary: dict | None = None
    error: str | None = None
    out_of_memory: bool = False

    @property
    def has_ended(self):
        """Whether it came to its summary, without an error."""
        return self.summary is not None and self.error is None


class Ratio(NamedTuple):
    """How many times as fast one row is as another.

    value: the median of the ratios of samples that pair up. spread: half the width of its interval, None for a single
    sample.
    """

    value: float
    spread: float | None

    @property
    def is_within_spread(self):
        """Whether it is no further from 1 than its spread."""
        return self.spread is not None and abs(self.value - 1) <= self.spread


@dataclass(eq=False)
class Measured:
    """A row of a bench, and what was measured of it.

    warmup: how many steps of each run are not counted. runs: in the order in which they began. The other fields are
    those of "rows" in the bench's own line, with the rows themselves in place of their names.
    """

    name: str
    stage: str
    change: str
    base: "Measured | None"
    control_of: "Measured | None"
    is_probe: bool
    ranks: int
    warmup: int
    runs: list = field(default_factory=list)

    def add(self, line):
        """Take in a line of this row."""
        kind = line["kind"]
        if kind == "start":
            same_process = (line["session"], line["batch_size"])  # started again, it replaces the run that was there
            self.runs = [run for run in self.runs if (run.session, run.batch_size) != same_process]
            self.runs.append(Run(*same_process))
        elif kind == "step":
            self.runs[-1].steps.append(line)
        elif kind == "error":
            self.runs[-1].error = line["error"]
            self.runs[-1].out_of_memory = line["out_of_memory"]
        elif kind == "header":
            self.runs[-1].header = line
        elif kind == "summary":
            self.runs[-1].summary = line

    def run(self, session, batch_size=None):
        """Return the Run in a session of the bench, or None."""
        for run in self.runs:
            if (run.session, run.batch_size) == (session, batch_size):
                return run
        return None

    @property
    def largest_batch(self):
        """The largest batch size that fitted, for the mode `limit`, or None."""
        return max((run.batch_size for run in self.runs if run.has_ended), default=None)

    @property
    def smallest_too_large(self):
        """The smallest batch size for which memory was short, for the mode `limit`, or None."""
        return min((run.batch_size for run in self.runs if run.out_of_memory), default=None)

    @property
    def limit_is_found(self):
        """Whether the smallest batch size that does not fit comes right after the largest that does, if any does."""
        return self.smallest_too_large is not None and self.smallest_too_large == (self.largest_batch or 0) + 1

    @property
    def stage_of_ladder(self):
        """The ladder.Stage that it is a run of, or None."""
        return ladder.find(self.stage)

    @property
    def short(self):
        """s05 for the row s05_flash. The names of other rows stay."""
        if self.stage_of_ladder and self.name == self.stage:
            return self.stage_of_ladder.short
        return self.name

    @property
    def facts(self):
        """The first header, with "sdpa" of a summary; None where no run got that far."""
        headers = [run.header for run in self.runs if run.header]
        if not headers:
            return None
        kernels = [run.summary["sdpa"] for run in self.runs if run.summary and run.summary["sdpa"]]
        return headers[0] | {"sdpa": kernels[0] if kernels else None}

    @property
    def counted_steps(self):
        """Every step after the warm-up, of all runs."""
        counted = []
        for run in self.runs:
            counted += run.steps[self.warmup :]
        return counted

    @property
    def figures(self):
        """figures_of() the counted steps, with the most bytes "reserved", 0 on a CPU; None without any."""
        if not self.counted_steps:
            return None
        figures = figures_of(self.counted_steps, warmup=0)
        warm = [run for run in self.runs if len(run.steps) > self.warmup]
        figures["warmup_s"] = sum(step["dt"] for step in warm[0].steps[: self.warmup])
        figures["reserved"] = max((run.summary or {}).get("reserved", 0) for run in self.runs)
        return figures


@dataclass(frozen=True)
class Control:
    """Two rows of one computation, and how far apart they came out."""

    row: Measured
    base: Measured
    ratio: Ratio

    @property
    def is_second_run(self):
        """Whether it is a second run of one row, and not of a row that takes the same steps."""
        return self.row.control_of is not None


class Results:
    """All that is known of one bench.

    bench: its own line. rows: {name: Measured} of all that it starts. file: where add() also writes each line.
    """

    def __init__(self, bench, file=None):
        self.bench = bench
        self.file = file
        self.rows = {}
        for about in bench["rows"]:  # a row stands below the one that it is compared with
            base, control_of = self.rows.get(about["base"]), self.rows.get(about["control_of"])
            about = about | {"base": base, "control_of": control_of, "warmup": bench["warmup"]}
            self.rows[about["name"]] = Measured(**about)

    @classmethod
    def load(cls, path):
        """Return the Results in results/NAME.jsonl. Exits with one line where it is no record of a bench.

        A last line that a kill cut off is left out.
        """
        try:
            complete_lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
            bench, *lines = [json.loads(line) for line in complete_lines]
            results = cls(bench)
            for line in lines:
                results.rows[line["name"]].add(line)
        except (OSError, ValueError, LookupError, TypeError) as error:
            refuse(f"{path} is no record of a bench of this version ({error!r}): pass the NAME of one that ran")
        return results

    def add(self, session, name, entry):
        """Keep a line that a row of a session left, and write it to the file."""
        line = entry | {"session": session, "name": name}
        print(json.dumps(line), file=self.file, flush=True)
        self.rows[name].add(line)

    @property
    def pairs_turns(self):
        """Whether a ratio is of samples of one turn, and not of one round."""
        return self.bench["pair_by"] == "turn"

    @property
    def table_rows(self):
        """The Measured rows of the table, in its order."""
        return [row for row in self.rows.values() if not row.is_probe and row.control_of is None]

    @property
    def control_rows(self):
        """The Measured second runs of a row."""
        return [row for row in self.rows.values() if row.control_of]

    @property
    def probe(self):
        """The Measured probe, or None where the bench has none."""
        for row in self.rows.values():
            if row.is_probe:
                return row
        return None

    @property
    def reference(self):
        """The Measured row that all others are compared with."""
        return self.rows[self.bench["reference"]]

    def any_facts(self):
        """Return the facts of the first row that has any, or None."""
        for row in self.table_rows:
            if row.facts:
                return row.facts
        return None

    # what is missing

    def error(self, row):
        """Return why a run of a row failed, or None.

        Where rows take turns only the last run counts, and none where another has ended and no step is missing.
        """
        runs = row.runs
        if self.pairs_turns:
            runs = row.runs[-1:]
            if self.steps_missing(row) == 0 and any(run.has_ended for run in row.runs):
                return None
        for run in runs:
            if run.error:
                return run.error
        return None

    def steps_missing(self, row):
        """Return how many counted steps a row lacks that takes them in turn with others."""
        wanted = (self.bench["steps"] - self.bench["warmup"]) * self.bench["rounds"]
        return max(0, wanted - len(row.counted_steps))

    def is_finished(self, row):
        """Tell whether a row has all its runs or counted steps, and the last run did not fail."""
        if self.error(row):
            return False
        if self.pairs_turns:
            return self.steps_missing(row) == 0
        return all(self.has_ended(session, row) for session in range(self.bench["rounds"]))

    def has_ended(self, session, row):
        """Tell whether a row's run in a session came to its summary, without an error."""
        run = row.run(session)
        return run is not None and run.has_ended

    # ratios

    def samples(self, row):
        """Return {what pairs it: seconds per token} of a row, or per FLOP of the probe, at its highest rate.

        A turn pairs the steps of one number in one session, a round the medians of its whole runs.
        """
        samples = {}
        for run in row.runs:
            steps = run.steps[row.warmup :]
            if row.is_probe:
                times = [1 / max(step["peak"].values()) for step in steps]
            else:
                times = [step["dt"] / step["tokens"] for step in steps]
            if self.pairs_turns:
                for number, time in enumerate(times):
                    samples[run.session, number] = time
            elif times and run.has_ended:  # a round that was cut off says little
                samples[run.session] = statistics.median(times)
        return samples

    def compare(self, row, base):
        """Return the Ratio of the speeds of a row and another, or None where no samples pair up."""
        if base is None or row is base:
            return None
        ours, theirs = self.samples(row), self.samples(base)
        ratios = [theirs[key] / ours[key] for key in sorted(ours.keys() & theirs.keys())]
        return Ratio(*median_and_spread(ratios)) if ratios else None

    # noise and verdicts

    def effect(self, row):
        """Return (same_steps, words) of what the machine makes of a row's technique: see ladder.effect().

        Where the row above is not the stage before, its steps are others.
        """
        base, stage = row.base, row.stage_of_ladder
        if base is None or stage is None or row.facts is None or row.stage == base.stage:
            return False, ""
        same_steps, words = ladder.effect(row.stage, row.facts)
        if base.stage_of_ladder is None or ladder.between(base.stage, row.stage) != (stage,):
            same_steps = False
        return same_steps, words

    @property
    def controls(self):
        """The Controls whose rows ended well: second runs, and rows that take the same steps as the one above."""
        pairs = [(row, row.control_of) for row in self.control_rows]
        pairs += [(row, row.base) for row in self.table_rows if self.effect(row)[0]]
        controls = []
        for row, base in pairs:
            compared = self.compare(row, base)
            if compared and not self.error(row) and not self.error(base):
                controls.append(Control(row, base, compared))
        return controls

    @property
    def suspicious(self):
        """The rows that should take the same steps as the row above, and differ by far more than noise."""
        controls = self.controls
        of_second_runs = [distance(control.ratio.value) for control in controls if control.is_second_run]
        if not of_second_runs:
            return []
        least = max(SUSPICIOUS_DIFFERENCE, SUSPICIOUS_MULTIPLE * max(of_second_runs))
        rows = []
        for control in controls:
            is_far = distance(control.ratio.value) > least and not control.ratio.is_within_spread
            if is_far and not control.is_second_run:
                rows.append(control.row)
        return rows

    @property
    def noise(self):
        """How far from 1 a ratio may be by chance, as a distance(): how far the worst pair of one computation came out.

        None without such a pair, and where each row ran in a single round: too few to tell.
        """
        suspicious = self.suspicious
        distances = []
        for control in self.controls:
            if control.ratio.spread is not None and control.row not in suspicious:
                distances.append(distance(control.ratio.value))
        return max(distances, default=None)

    def verdict(self, row, base):
        """Return a row against another in a word or two, "" where nothing can be said.

        It is "no difference" where the ratio is within its spread or within the noise, else "faster" or "slower".
        """
        compared = self.compare(row, base)
        if compared is None or self.noise is None:
            return ""
        if compared.is_within_spread or distance(compared.value) <= self.noise:
            return NO_DIFFERENCE
        return "faster" if compared.value > 1 else "slower"

    # predictions

    @property
    def rates(self):
        """The Rates that the probe measured, medians over its counted steps; None where it left none."""
        steps = self.probe.counted_steps if self.probe else []
        if not steps:
            return None
        peak = {}
        for dtype in steps[0]["peak"]:
            peak[dtype] = statistics.median(step["peak"][dtype] for step in steps)
        return Rates(peak, statistics.median(step["copy"] for step in steps))

    def is_predictable(self, row):
        """Tell whether FLOPs and bytes say what a row is worth against the row above."""
        base = row.base
        if base is None or row.stage_of_ladder is None or base.stage_of_ladder is None:
            return False
        return all(stage.predictable for stage in ladder.between(base.stage, row.stage))

    def predicted(self, row):
        """Return how many times as fast as the row above a row should be, or None where nothing can be said.

        It is the time of all parts of the row above, divided by that of all parts of this one: FLOPs and bytes over the
        rates of the probe.
        """
        base = row.base
        if self.rates is None or not self.is_predictable(row) or row.facts is None or base.facts is None:
            return None
        before, after = ladder.work_of(base.stage, base.facts), ladder.work_of(row.stage, row.facts)
        if before is None or after is None or (row.stage == base.stage and before == after):
            return None  # no GPT; or what differs is no FLOP and no byte, as between s01 and `plain`
        seconds_before, seconds_after = seconds_per_token(before, self.rates), seconds_per_token(after, self.rates)
        if seconds_before is None or seconds_after is None:
            return None
        return seconds_before / seconds_after

    def peak_share(self, row):
        """Return the share of the machine's fastest matmuls that a row turned into training, from 0 to 1.

        A model that is no GPT has none, which is None.
        """
        if self.probe is None or row.facts is None or row.facts["shape"] is None:
            return None
        compared = self.compare(row, self.probe)
        return compared.value * flops_per_token(row.facts["shape"]) if compared else None

    # losses

    def last_common_step(self):
        """Return the number of the last step that every row with counted steps got to; None without such rows."""
        reached = []
        for row in self.table_rows:
            if row.counted_steps:
                reached.append(max(len(run.steps) for run in row.runs))
        return min(reached) - 1 if reached else None

    def loss_at(self, row, step):
        """Return the training loss of a row at a step, or None where no run got there."""
        for run in row.runs:
            if len(run.steps) > step:
                return run.steps[step]["loss"]
        return None
