"""What a watched run leaves: its record, and a summary in words.

A record is a text file with one JSON object in each line, which `watch.py --record FILE` writes: what was seen, a line
for each step, and a summary. An example of each, wrapped:

    {"kind": "seen", "unit": "tok", "batch_size": 1, "seq_len": 1024, "compile": false, ...}
    {"kind": "step", "step": 1, "loss": 10.94, "dt": 0.465, "tokens": 1024, "graphs": 0,
     "spent": {"data": 0.0, "forward": 0.2, ...}, "memory": 1870000000, "meter": "peak RSS"}
    {"kind": "summary", "shares": {"data": 0.0, "forward": 0.43, ...}}

The fields of "seen" are those of seen.Seen, and of "step" those of figures.Step. The line "seen" is written at the
second step, and again at the end, since a script may begin to clip late: the last one counts.
On a card the last step is profiled, and leaves no line "step". A figure that is not known is null.
A loss that is not finite is "nan" or "inf", since JSON has no such number. A run that failed also has a line "error",
with its message and traceback.
"""

import json
import os
import statistics
import sys
import time

import numpy as np
import torch

from .. import machine, meters, ranks
from ..arithmetic import flops_per_token
from ..common import refuse, say
from ..figures import UNITS, are_uneven, most_memory, tokens_per_second, words_on_speed
from ..seen import words_on_model
from .leave import leave

SECONDS_BETWEEN = 0.5  # two readings of the memory, which are on no step's clock, but would make a run take longer
FIRST_TO_WAIT = 2  # the number of the first step in which each kind of time may wait for the card


class Log:
    """The log of a run. Rank 0 prints, and each rank writes a record if --record asks for one.

    steps: the Steps of the record so far. The Run sets device, on which the steps run, when an optimizer takes its
    first step, and seen, a Seen, at the second step.
    """

    def __init__(self, record_path, warmup, is_row=False, out=None, err=None):
        """Open the file of --record, a new one. Rank 1 writes FILE.1, since it trains on other text.

        warmup: how many steps are not counted. is_row: whether a bench reads the record. out, err: where to print.
        Exits with one line if the file is there already or can't be written.
        """
        self.out, self.err = out or sys.stdout, err or sys.stderr
        self.is_row = is_row
        self.warmup = warmup
        self.is_rank_0 = ranks.is_rank_0()
        self.record_path = None
        self.device = None
        self.seen = None
        self.last_memory = None  # (bytes, meter) when it was last read
        self.steps = []
        self.next_reading = 0.0  # when memory may be read again
        if record_path:
            self.record_path = record_path if self.is_rank_0 else f"{record_path}.{os.environ['RANK']}"
            try:
                open(self.record_path, "x").close()
            except OSError as error:
                refuse(f"--record {self.record_path}: {error.strerror}; pass the path of a new file")

    # a run, from its first line to its last

    def begin(self, title, tokens):
        """Print what runs. title: the first line. tokens: of a whole step, of all ranks."""
        model = words_on_model(self.seen)
        if self.seen.unit != "step":
            model += f" | {tokens:,} {UNITS[self.seen.unit]} per step"
        hardware = machine.device_name(self.device)
        if self.device.type == "cpu":
            hardware += f", threads {torch.get_num_threads()}"
        slow = machine.variables_set(machine.CHANGE_SPEED)
        if slow:
            hardware += f", with {', '.join(slow)} in the environment"
        self.say(title, model, hardware)

    def add_step(self, step, may_be_last):
        """Record a Step, which lacks its number and what the meters show.

        may_be_last: whether no other step may follow. Then memory is read once more, so that the peak of all is there.
        """
        now = time.monotonic()
        step.step = len(self.steps)
        is_first_counted = step.step == self.warmup  # before it the peak of memory was reset
        if now >= self.next_reading or is_first_counted or may_be_last:
            self.next_reading = now + SECONDS_BETWEEN
            self.last_memory = meters.peak_memory(self.device)
        step.memory, step.meter = self.last_memory
        self.steps.append(step)
        line = {"kind": "step", **vars(step)}
        if step.diverged:
            line["loss"] = str(step.loss)
        self.write(line)
        if len(self.steps) == self.warmup:
            meters.reset_peak_memory(self.device)

    def read_last_meters(self):
        """Read the meters again for the last step, which was not known to be the last when it was recorded."""
        if len(self.steps) == self.warmup:  # they were read, and then reset
            return
        last = self.steps[-1]
        last.memory, last.meter = meters.peak_memory(self.device)

    def finish(self, shares):
        """Write the summary, and print the figures of the counted steps. shares: {kind: share of the time}."""
        self.write({"kind": "summary", "shares": shares})
        self.say(*self.lines_of_figures())

    def counted_steps(self):
        """Return the steps after the warm-up."""
        return self.steps[self.warmup :]

    def reported_steps(self):
        """Return the counted steps, or the last one alone if none was counted."""
        return self.counted_steps() or self.steps[-1:]

    def waits_in(self, number):
        """Return whether each kind of time waits for the card in the step of this number, which is not counted."""
        return FIRST_TO_WAIT <= number < self.warmup and self.device.type != "cpu"

    def waiting_steps(self):
        """Return the steps in which each kind of time waited for the card."""
        return [step for step in self.steps if self.waits_in(step.step)]

    # in words

    def lines_of_figures(self):
        """Return lines with the figures of the counted steps, or else of the last one."""
        steps = self.reported_steps()
        which = f"over {len(steps)} steps after {self.warmup} of warm-up"
        if not self.counted_steps():
            which = "of the last step alone, since none was counted"
        dts = [1e3 * step.dt for step in steps]
        first_quartile, median, third_quartile = np.percentile(dts, [25, 50, 75])
        lines = [f"median {median:.2f} ms, quartiles {first_quartile:.2f} and {third_quartile:.2f}, {which}"]
        uneven = are_uneven(steps)
        if uneven:
            lines.append(f"mean {statistics.mean(dts):.2f} ms: some steps take far longer, so the speed is by the mean")
        return [*lines, self.line_of_speed(steps, uneven)]

    def line_of_speed(self, steps, uneven):
        """Return a line with the speed of some steps, their memory, and how long the warm-up was."""
        speed = tokens_per_second(steps, uneven)
        words = [words_on_speed(speed, self.seen.unit)]
        if self.seen.shape:
            words.append(f"{flops_per_token(self.seen.shape) * speed / 1e12:.3g} TFLOP/s")
        memory, meter = most_memory(steps), steps[-1].meter
        words.append(f"memory {memory / 1e9:.2f} GB ({meter})" if memory else meter)
        seconds_of_warmup = sum(step.dt for step in self.steps[: self.warmup])
        words.append(f"warm-up {seconds_of_warmup:.1f} s")
        return " | ".join(words)

    # where it goes

    def say(self, *lines):
        """Print lines, on rank 0."""
        if self.is_rank_0:
            for line in lines:
                say(line, self.out)

    def notice(self, message):
        """Print a remark on stderr, on rank 0."""
        if self.is_rank_0:
            say(message, self.err)

    def write_seen(self):
        """Write what was seen of the script so far. The last such line of a record counts."""
        self.write({"kind": "seen", **vars(self.seen)})

    def write_error(self, message, traceback=""):
        """Write why the run failed."""
        self.write({"kind": "error", "message": message, "traceback": traceback})

    def write(self, entry):
        """Write a line of the record. If that fails, the training goes on, which is worth more, but a row ends.

        The file is not kept open: a script may close all files, and then its own would have the number of this one.
        """
        if self.record_path:
            try:
                with open(self.record_path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
            except OSError as error:
                self.notice(f"--record {self.record_path} ends here: {error.strerror}")
                self.record_path = None
                if self.is_row:
                    leave(1)
