"""What was measured: the lines of a bench's record, kept as they come."""

import json
from dataclasses import dataclass, field

from ..common import say
from .rows import Row


def first_known(values):
    """Return the first value that is not None, or None."""
    known = [value for value in values if value is not None]
    return known[0] if known else None


def lines_of(path):
    """Return the lines of a record, dicts. A last one that a kill cut off is left out."""
    complete_lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in complete_lines if line]


@dataclass
class Run:
    """The lines of its record that one process wrote so far. warmup: how many steps are not counted."""

    round: int
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


class Results:
    """All that was measured in one bench.

    bench: the first line of its record. rows: {name: Row} of all that it starts. rates: the line of the probe, or None.
    runs: {(name, round): Run}. file: where each line goes at once, or None.
    """

    def __init__(self, bench, file=None):
        self.file = file
        self.bench = bench
        self.rows = {fields["name"]: Row(**fields) for fields in bench["rows"]}
        self.rates = None
        self.runs = {}
        self.write(bench)

    @classmethod
    def load(cls, path):
        """Return the Results of a record. A last line that a kill cut off is left out.

        Raises OSError where it can't be read, and many other exceptions where it is no record of a bench.
        """
        bench, *lines = lines_of(path)
        if bench.get("in_turn"):
            raise ValueError("its rows took their steps in turn")
        results = cls(bench)
        for line in lines:
            results.add(line)
        return results

    def add(self, line):
        """Keep a line, and write it."""
        self.write(line)
        key = line.get("name"), line.get("round")
        match line["kind"]:
            case "rates":
                self.rates = line
            case "start":
                self.runs[key] = Run(line["round"], self.bench["warmup"])
            case "apart":  # all begins again
                self.bench = self.bench | {"turns": 0, "reason": line["reason"]}
                self.runs = {}
            case "step":
                self.runs[key].steps.append(line)
            case "header" | "techniques" | "summary" | "error" as field_name:  # a later one replaces the first
                setattr(self.runs[key], field_name, line)

    def write(self, line):
        """Write a line. Where the disk is full, what is measured goes on in memory."""
        if self.file:
            say(json.dumps(line), self.file, "the record ends here")

    @property
    def table_rows(self):
        """The Rows of the table, in its order."""
        return [row for row in self.rows.values() if not row.control_of]

    def runs_of(self, name):
        """Return the Runs of the row of this name, the first round first."""
        return [run for (name_of_row, _), run in self.runs.items() if name_of_row == name]

    def error(self, row):
        """Return the line of the first run of a row that failed, or None."""
        return first_known([run.error for run in self.runs_of(row.name)])
