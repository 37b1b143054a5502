"""What a run says of itself: the lines that it prints, and those of its record, which record.py describes."""

import datetime
import math

import torch

from . import machine
from .arithmetic import flops_per_token, shape_name
from .figures import UNEVEN, WARMUP, figures_of, seconds_of_warmup
from .ladder import FOLDER
from .terminal import say


class Report:
    """Prints a line for each step on rank 0, and writes the record.

    facts: what is known of a run before its first step, a dict. title: the first line that is printed. script: its
    name in the record. device: a torch.device. shape: of a GPT, as shape_of() returns it, or None. parameters: how many
    the model has. batch_size, seq_len: of a micro-batch; seq_len is None for what is no text. tokens: of a whole step.
    first_step: the number of the first step. unit: what is counted as a token, "tok" or "sample" or "step". corpus: the
    name of the text, or None. settings, fallbacks: see record.py.
    """

    def __init__(self, record, facts, prints, out=None):
        """Print the title, and write the header.

        record: a Record. prints: whether to print. out: where to, instead of sys.stdout.
        """
        self.record = record
        self.out = out
        self.facts = facts
        self.prints = prints
        self.steps = []
        self.profiled_steps = []  # their numbers: the profiler made them slower
        self.say_what_runs()
        self.header = self.make_header()
        record.write("header", **self.header)

    def say_what_runs(self):
        """Print the title, what is trained, and on which device and text."""
        facts = self.facts
        what = f"{facts['parameters']:,} parameters"
        if facts["shape"]:
            what = f"{shape_name(facts['shape'])}, {what}"
        batch = []
        if facts["seq_len"]:
            batch = [f"B {facts['batch_size']}, T {facts['seq_len']}, {facts['tokens']:,} tokens per step"]
        elif facts["unit"] == "sample":
            batch = [f"B {facts['batch_size']}, {facts['tokens']:,} samples per step"]
        device = machine.device_name(facts["device"])
        if facts["device"].type == "cpu":
            device += f", threads {torch.get_num_threads()}"
        where = [device]
        if facts["corpus"]:
            where.append(facts["corpus"])
        self.say(facts["title"])
        self.say(" | ".join([what, *batch]))
        self.say(" | ".join(where))

    def make_header(self):
        """Return what a record begins with, a dict."""
        facts = self.facts
        return {
            "stage": facts["script"],
            "commit": machine.commit(FOLDER.parent),
            "settings": facts["settings"],
            "shape": facts["shape"],
            "parameters": facts["parameters"],
            "unit": facts["unit"],
            "environment": machine.environment(facts["device"]),
            "fallbacks": facts["fallbacks"],
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def add_step(self, loss, dt, tokens, figures, **unprinted):
        """Record a step and print its line.

        loss: a float, or None where it is not known. dt: seconds. figures: what the script logs beside it, {name:
        float}, of which none replaces one of ours. unprinted: more figures, for the record alone.
        """
        memory, meter = machine.peak_memory(self.facts["device"])
        entry = {
            **{name: finite_or_none(value) for name, value in figures.items()},
            **unprinted,
            "step": self.facts["first_step"] + len(self.steps),
            "loss": finite_or_none(loss),
            "dt": dt,
            "tokens": tokens,
            "memory": memory,
            "meter": meter,
        }
        self.steps.append(entry)
        self.record.write("step", **entry)
        self.say_step(entry["step"], loss, dt, tokens, figures)
        if len(self.steps) == WARMUP:
            machine.reset_peak_memory(self.facts["device"])

    def say_step(self, step, loss, dt, tokens, figures):
        """Print the line of a step."""
        words = [f"step {step:4d}"]
        if loss is not None:
            words.append(f"loss {loss:.4f}")
        for name, value in figures.items():
            words.append(f"lr {value:.2e}" if name == "lr" else f"{name} {value:.4f}")
        words.append(f"{1e3 * dt:.2f}ms")
        self.say(" | ".join(words + self.words_on_speed(tokens / dt)))

    def words_on_speed(self, tokens_per_second):
        """Return a speed in words: tokens per second and, for a GPT, the FLOP/s that they need."""
        words = [f"{tokens_per_second:,.0f} {self.facts['unit']}/sec"]
        if self.facts["unit"] == "step":
            words = [f"{tokens_per_second:.2f} steps/sec"]
        if self.facts["shape"]:
            words.append(f"{flops_per_token(self.facts['shape']) * tokens_per_second / 1e12:.3g} TFLOP/s")
        return words

    def end(self, summary, profile_lines=()):
        """Write the summary of the record, and print the lines of the whole run.

        summary: a dict for the record. profile_lines: where the time of a step went, with --profile.
        """
        self.record.write("summary", **summary)
        counted, which = self.counted_steps()
        figures = figures_of(counted)
        self.say(f"median {figures['dt_ms']:.2f}ms [{figures['dt_q1_ms']:.2f}, {figures['dt_q3_ms']:.2f}] over {which}")
        if figures["dt_mean_ms"] > UNEVEN * figures["dt_ms"]:
            seconds = sum(step["dt"] for step in counted)
            speed = self.words_on_speed(sum(step["tokens"] for step in counted) / seconds)[0]
            self.say(f"mean {figures['dt_mean_ms']:.2f}ms, {speed}: some steps take far longer than the median")
        meter = self.steps[-1]["meter"]
        words = self.words_on_speed(figures["tok_per_sec"])
        words.append(f"memory {figures['memory'] / 1e9:.2f} GB ({meter})" if figures["memory"] else meter)
        words.append(f"warm-up {seconds_of_warmup(self.steps):.1f}s")
        self.say(" | ".join(words))
        if "eval" in summary:
            loss = math.nan if summary["eval"] is None else summary["eval"]
            self.say(f"held-out loss {loss:.4f}")
        for line in profile_lines:
            self.say(line)

    def counted_steps(self):
        """Return (steps, words on which these are): those after the warm-up, without profiled ones where others are."""
        without_profiled = [step for step in self.steps if step["step"] not in self.profiled_steps]
        counted = [step for step in without_profiled if step["step"] >= self.facts["first_step"] + WARMUP]
        if counted:
            return counted, f"{len(counted)} steps after {WARMUP} of warm-up"
        last = (without_profiled or self.steps)[-1]
        return [last], f"step {last['step']} alone, since no other was counted"

    def say(self, line):
        """Print a line of progress."""
        if self.prints:
            say(line, self.out)


def finite_or_none(value):
    """Return a figure, or None where it is not finite: JSON has no infinity, and a norm has where float16 overflows."""
    return value if value is not None and math.isfinite(value) else None
