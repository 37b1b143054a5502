"""What was measured: the lines of a bench's record, kept as they come.

results/NAME.jsonl holds all runs of a bench, a JSON object in each line. The first line is the bench's own:

    {"kind": "bench", "rows": [{"name": "s01", "script": "s01_baseline", ...}], "rounds": 3,
     "warmup": 4, "warmup_of_plain": 20, "steps": 27, "turns": 7, "loss_step": 10, "seed": 5,
     "flags": ["--steps", "27"], "variables": {"MALLOC_MMAP_MAX_": "0"}, "started": "2026-11-21T02:13:12",
     "environment": {...}, "rates": {"peak": {"float32": 1.8e11}, "copy": 3.5e10},
     "text": "Tiny Shakespeare", "commit": "569c6896ba9f", "command": "python bench.py s01 --seed 5"}

"rows" are all that is started: see rows.Row. A process takes at most "steps", and the first "warmup" of them
("warmup_of_plain" in the row `plain`) are not counted. "turns" is how many turns a row takes in a round; 0 if one row
runs after the other. "loss_step" is the step whose loss is shown; every row takes it. "flags" are for all stages, and
"variables" are environment variables for all rows. A "remark" in markdown may be added by hand, and stands first on the
page.

A line {"kind": "apart", "reason": ...} says that the bench began again without turns, and why. Every other line belongs
to a process, and has three keys more: the "name" of its row, its "round" and its "turn". Both count from 0, and "turn"
is null before the first turn. A process begins with a line "start". The lines of its record follow, which
harness/watch/log.py describes. Of ranks other than 0 there are only the steps, as lines "step of another rank". A line
"early end" says that the script ended before it had taken all steps that were wanted.
"""

import json
import time
from dataclasses import dataclass, field

from ..common import refuse, say
from ..figures import Step
from ..seen import Seen
from .rows import Row, does_as_much


@dataclass
class Run:
    """What one process has written so far. warmup: how many of its first steps are not counted."""

    round: int
    warmup: int
    seen: Seen | None = None
    steps: list = field(default_factory=list)  # Steps
    turns: dict = field(default_factory=dict)  # {turn: the counted Steps in it}; one entry if the row took no turns
    steps_of_other_ranks: list = field(default_factory=list)
    summary: dict | None = None
    error: dict | None = None
    ended_early: bool = False  # whether it has a line "early end"

    @property
    def counted(self):
        """The steps after the warm-up."""
        return self.steps[self.warmup :]


class Results:
    """All that was measured in one bench.

    bench: the first line of its record. rows: {name: Row} of all that it starts. runs: {(name, round): Run}. began:
    when the first of these runs began, by time.monotonic(). file: where each line is written at once, or None.
    """

    def __init__(self, bench, file=None):
        self.file = file
        self.bench = bench
        self.began = time.monotonic()
        self.rows = {fields["name"]: Row(**fields) for fields in bench["rows"]}
        self.runs = {}
        self.processes = 0  # how many were started
        self.write(bench)

    @classmethod
    def load(cls, path):
        """Return the Results of a record. A last line that a kill cut off is left out.

        Raises OSError if it can't be read, and many other exceptions if it is not the record of a bench. Exits with one
        line if another record, or a part of one, was appended to it.
        """
        complete_lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        bench, *lines = [json.loads(line) for line in complete_lines]
        results = cls(bench)
        for number, line in enumerate(lines, start=2):
            is_known = line["kind"] == "start" and (line["name"], line["round"]) in results.runs
            if line["kind"] == "bench" or is_known:
                refuse(f"results/{path.name}: a second record begins in line {number}: keep one of them")
            results.add(line)
        return results

    def add(self, line):
        """Keep a line, and write it."""
        self.write(line)
        key = line.get("name"), line.get("round")
        match line["kind"]:
            case "start":
                self.processes += 1
                self.runs[key] = Run(line["round"], self.rows[line["name"]].warmup(self.bench))
            case "apart":  # all begins again
                self.bench = self.bench | {"turns": 0, "reason": line["reason"]}
                self.runs = {}
                self.began = time.monotonic()
            case "step":
                run, step = self.runs[key], Step.of_line(line)
                run.steps.append(step)
                if len(run.steps) > run.warmup:
                    run.turns.setdefault(line["turn"], []).append(step)
            case "step of another rank":
                self.runs[key].steps_of_other_ranks.append(Step.of_line(line))
            case "seen":  # a later one replaces the first
                self.runs[key].seen = Seen.of_line(line)
            case "summary":
                self.runs[key].summary = line
            case "error":
                self.runs[key].error = line
            case "early end":
                self.runs[key].ended_early = True

    def write(self, line):
        """Write a line. If the disk is full, what is measured goes on in memory."""
        if self.file:
            say(json.dumps(line), self.file, "the record ends here")

    def runs_of(self, name):
        """Return the Runs of the row of this name, the first round first."""
        return [run for (name_of_row, _), run in self.runs.items() if name_of_row == name]

    def error(self, row):
        """Return the line "error" of the first run of a row that failed, or why the row is not started, or None."""
        errors = [run.error for run in self.runs_of(row.name) if run.error]
        return errors[0] if errors else self.error_at_the_start(row)

    def error_at_the_start(self, row):
        """Return why a row that never ran is not started: the line "error" of a row that failed before its first step.

        None if the row ran, or if there is no such other row. The other one runs the same script, and adds no technique
        that the row does not add, so the row would fail, too. It might not if memory was short.
        """
        if self.runs_of(row.name):
            return None
        for other in self.rows.values():
            if does_as_much(row, other):
                for run in self.runs_of(other.name):
                    if run.error and not run.steps and not run.error["out_of_memory"]:
                        return run.error
        return None
