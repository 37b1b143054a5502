"""What a watched run leaves: its record, a line of JSON for each step, and a summary in words.

The end of this file describes the format of a record.
"""

import datetime
import json
import math
import os
import time

from . import machine, ranks
from .arithmetic import flops_per_token, shape_name
from .card import card_state, words_on_card
from .common import ROOT, refuse, say, tell
from .figures import ENOUGH_STEPS, UNEVEN, WARMUP, figures_of, seconds_of_warmup, speed_of_all, waits_for_data

# Of the steps behind these, the meters are read at most a hundred times a second. They are not on the clock of a step,
# but make a run of steps of 1 ms take a twentieth longer.
FIRST_READINGS = 100
SECONDS_BETWEEN = 0.01


class Log:
    """The log of a run. Rank 0 prints, and each rank writes a record where --record asks for one.

    steps: the step lines of the record so far. header: its first line, or None before begin().
    """

    def __init__(self, record_path, out=None):
        """Open the file of --record, a new one: rank 1 writes FILE.1, since its losses are those of other text.

        out: where to print, instead of sys.stdout. Exits with one line where the file is there already or can't be
        written.
        """
        self.out = out
        self.is_rank_0 = ranks.is_rank_0()
        self.file = None
        self.header = None
        self.device = None  # on which the steps run, from begin() on
        self.meters = {}  # memory, and the state of a card, as they were last read
        self.steps = []
        self.next_reading = 0.0  # when the meters may be read again
        if record_path:
            path = record_path if self.is_rank_0 else f"{record_path}.{os.environ['RANK']}"
            try:
                self.file = open(path, "x", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                refuse(f"--record {path}: {error.strerror}; pass the path of a new file")

    # a run, from its first line to its last

    def begin(self, title, device, tokens, about):
        """Print what runs, and write the header.

        title: the first line. device: on which the steps run. tokens: of a whole step, of all ranks. about: a dict with
        "stage", "settings", "shape", "parameters" and "unit" of the header, which is described below.
        """
        self.device = device
        environment = machine.environment(device)
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.header = about | {"commit": machine.commit(ROOT), "environment": environment, "started": started}
        settings = about["settings"]
        model = f"{about['parameters']:,} parameters"
        if about["shape"]:
            model = f"{shape_name(about['shape'])}, {model}"
        if about["unit"] == "tok":
            model += f" | B {settings['batch_size']}, T {settings['seq_len']}, {tokens:,} tokens per step"
        elif about["unit"] == "sample":
            model += f" | B {settings['batch_size']}, {tokens:,} samples per step"
        hardware = environment["device_name"]
        if device.type == "cpu":
            hardware += f", threads {environment['threads']}"
        self.say(title, model, hardware)
        self.write("header", **self.header)

    def step(self, loss, dt, counts, on_clock):
        """Record a step.

        loss: a float, or None where it is not known. dt: seconds. counts: {unit: how many of these it trained on}.
        on_clock: more figures.
        """
        now = time.monotonic()
        if len(self.steps) < FIRST_READINGS or now >= self.next_reading:
            self.next_reading = now + SECONDS_BETWEEN
            memory, meter = machine.peak_memory(self.device)
            self.meters = {"memory": memory, "meter": meter, "card": card_state(self.device)}
        entry = {
            **on_clock,
            "step": len(self.steps),
            "loss": finite_or_none(loss),
            "dt": dt,
            "tokens": counts[self.header["unit"]],
            **self.meters,
        }
        self.steps.append(entry)
        self.write("step", **entry)
        if len(self.steps) == WARMUP:
            machine.reset_peak_memory(self.device)

    def finish(self, summary):
        """Write the summary of the record, a dict, and print the figures of the whole run."""
        self.write("summary", **summary)
        self.say(*self.lines_of_figures())

    def counted_steps(self):
        """Return the steps after the warm-up."""
        return self.steps[WARMUP:]

    def has_enough(self, seconds):
        """Tell whether ENOUGH_STEPS were counted, which took so many seconds together."""
        counted = self.counted_steps()
        return len(counted) >= ENOUGH_STEPS and sum(step["dt"] for step in counted) >= seconds

    # in words

    def lines_of_figures(self):
        """Return lines with the figures of the counted steps, or else of the last one, and what their card was like."""
        steps = self.counted_steps()
        which = f"over {len(steps)} steps after {WARMUP} of warm-up"
        if not steps:
            steps = self.steps[-1:]
            which = "of the last step alone, since none was counted"
        figures = figures_of(steps)
        quartiles = f"[{figures['dt_q1_ms']:.2f}, {figures['dt_q3_ms']:.2f}]"
        lines = [f"median {figures['dt_ms']:.2f}ms {quartiles} {which}"]
        if figures["dt_mean_ms"] > UNEVEN * figures["dt_ms"]:
            speed = self.words_on_speed(speed_of_all(steps))[0]
            lines.append(f"mean {figures['dt_mean_ms']:.2f}ms, {speed}: some steps take far longer than the median")
        speed = figures["tok_per_sec"]
        if waits_for_data(steps):  # a loader may bring some batches together and none for a while
            speed = speed_of_all(steps)
        words = self.words_on_speed(speed)
        meter = steps[-1]["meter"]
        words.append(f"memory {figures['memory'] / 1e9:.2f} GB ({meter})" if figures["memory"] else meter)
        words.append(f"warm-up {seconds_of_warmup(self.steps):.1f}s")
        return [*lines, " | ".join(words), *words_on_card([steps])]

    def words_on_speed(self, tokens_per_second):
        """Return a speed in words, a list: tokens per second and, for a GPT, the FLOP/s that they need."""
        if self.header["unit"] == "step":
            return [f"{tokens_per_second:.2f} steps/sec"]
        words = [f"{tokens_per_second:,.0f} {self.header['unit']}/sec"]
        if self.header["shape"]:
            words.append(f"{flops_per_token(self.header['shape']) * tokens_per_second / 1e12:.3g} TFLOP/s")
        return words

    # where it goes

    def say(self, *lines):
        """Print lines, on rank 0."""
        if self.is_rank_0:
            for line in lines:
                say(line, self.out)

    def notice(self, message):
        """Tell a remark that belongs in no record on stderr, on rank 0."""
        if self.is_rank_0:
            tell(message)

    def write(self, kind, /, **entry):
        """Write a line of the record."""
        if self.file:  # a training is worth more than its record
            say(json.dumps({"kind": kind, **entry}), self.file, f"--record {self.file.name} ends here")


def finite_or_none(value):
    """Return a figure, or None where it is not finite, since JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


# The format of a record
#
# A record is a text file with one JSON object in each line. `watch.py --record FILE` writes the lines of one run: a
# header, a line for each step, and a summary. An example of each, wrapped. The line "techniques" stands behind the
# header.
#
#     {"kind": "header", "stage": "train.py", "commit": "569c6896ba9f",
#      "settings": {"batch_size": 1, "seq_len": 1024, "seed": 1337, "accum": 2, "world_size": 1},
#      "shape": {"vocab_size": 50257, "n_layer": 4, "n_head": 4, "n_embd": 256, "seq_len": 1024},
#      "parameters": 16299520, "unit": "tok",
#      "environment": {"device": "cpu", "device_name": "AMD EPYC", "threads": 2, "cores": 2, "tf32": false,
#                      "system": "Linux x86_64", "python": "3.11.7",
#                      "torch": "2.13.0+cpu", "cuda": null, "driver": null, "slow": []},
#      "started": "2026-11-21T02:13:12+00:00"}
#     {"kind": "step", "spent": {"data": 0.0, "forward": 0.2, "loss": 0.0, "backward": 0.24, "update": 0.02,
#                                "evaluation": 0.0, "rest": 0.005},
#      "graphs": 0, "step": 1, "loss": 10.94, "dt": 0.465, "tokens": 1024, "memory": 1870000000, "meter": "peak RSS",
#      "card": null}
#     {"kind": "summary", "shares": {"data": 0.0, "forward": 0.43, "loss": 0.0, "backward": 0.52, "update": 0.04,
#                                    "evaluation": 0.0, "rest": 0.01}}
#
# dt is in seconds, memory in bytes and of one rank, a loss in nats per token. A figure that is not finite is null. Step
# 0 began with its first forward, and every other one where the one before it ended. "spent" is the seconds of each of
# timeline.KINDS, and "graphs" how many torch.compile made in the step. On an accelerator a step also has "queued", the
# seconds until all of it was queued. "card" is what NVIDIA's driver told, see card.py: {"mhz": 1935, "celsius": 62,
# "reasons": 4}. Of many short steps some have memory and card of the one before.
#
# "commit" has a + behind it where files differ from it. "settings" are what can be seen. "shape" is null for a model
# that is no GPT. Its vocabulary is without the padding of s06. "unit" is what "tokens" counts: "tok", or "sample" or
# "step" in a script without tokens. techniques.find_techniques() explains the keys of "techniques", and "loaders" is
# how many processes and threads the script has started, most likely to load its data. On a card operations are seen in
# the last step, which leaves no line of its own. Until then "profiled" is false, and a second line "techniques" with
# all keys follows that step and replaces the first. "shares" are the shares of the time, of steps without a new graph
# where these are the most. On a card they are those of steps 2 and 3, in which each kind waits for the card. What a
# loss takes longer than its backward counts as "rest".
#
# results/NAME.jsonl holds all runs of one bench. Its first line is the bench's own:
#
#     {"kind": "bench", "reference": "s01", "warmup": 4, "steps": 164, "seconds": 6.0, "rounds": 3, "turns": 7,
#      "seed": 5,
#      "rows": [{"name": "s01", "title": "s01", "script": "s01_baseline", "launcher": [], "flags": [], "added": [],
#                "keeps_memory": true, "above": null, "control_of": null}],
#      "flags": ["--steps", "164", "--seed", "5"], "variables": {"MALLOC_MMAP_MAX_": "0"}, "environment": {},
#      "text": "Tiny Shakespeare", "commit": "569c6896ba9f", "command": "python bench.py s01 --seed 5"}
#
# "rows" are all that is started: see rows.Row. "reference" is the name of the row that all are compared with. "warmup"
# steps are not counted. In a round each row takes so many "turns"; without, and behind a line "apart", which tells the
# "reason", each runs to its end. "flags" are those of all stages, and "variables" of the environment those of all rows.
# "text" is what the stages train on. The second line is the probe's: FLOP/s by dtype, bytes per second, and the kernel
# of attention.
#
#     {"kind": "rates", "peak": {"float32": 1.8e11}, "copy": 3.5e10, "sdpa": "flash"}
#
# Every other line has two keys more: "name", of the row, and "round", which counts from 0. A process begins with the
# line "start", and ends with the summary of its record, or an "error": its exception, or how it ended.
#
#     {"kind": "start", "round": 0, "name": "s01"}
#     {"kind": "error", "round": 0, "name": "s01", "message": "RuntimeError: no kernel", "traceback": "...",
#      "out_of_memory": false}
