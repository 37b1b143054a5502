"""A run of a watched script: what is done when a step has ended, from the first step to the last, and at the end."""

import contextlib
import multiprocessing
import os
import sys
import weakref
from collections import Counter
from dataclasses import asdict, replace
from typing import NamedTuple

import torch

from .. import meters
from . import events, gate
from .findings import shares_of, words_on_profile, words_on_script
from .own_code import OwnCode
from .profiler import MOST_NODES, StepProfiler
from .techniques import find_techniques, seen_in
from .threads import count_threads_of_script
from .timeline import Timeline

SWITCH_INTERVAL = 1e-4  # seconds after which Python lets a waiting thread run, here the one that looks; usually 5 ms


class Step(NamedTuple):
    """A step that has ended. entry: its line of the record, without its number, its tokens and what the meters show."""

    notes: list
    micro_batches: list
    entry: dict


class Run:
    """Times the steps of a script, and reports them. Rank 0 alone prints.

    args: the flags of watch.py. log: a Log.
    """

    def __init__(self, args, log):
        self.args = args
        self.log = log
        self.was_launched = "WORLD_SIZE" in os.environ  # by torchrun: a script may set it later
        self.profiler = StepProfiler()
        self.timeline = Timeline(self.profiler)
        self.optimizers = weakref.WeakKeyDictionary()  # {each one that has stepped: its first learning rate}
        self.steps_taken = 0  # with the profiled one
        self.is_over = False  # no other step is wanted, and the script ends when it begins one
        self.graphs_before = 0  # how many torch.compile had made when the step began
        # from the first step on:
        self.world_size = 1  # how many processes train together
        self.profiles_last = False  # whether the last step is profiled
        self.limit = None  # how many steps are recorded, if there is no gate
        # what slows the script down, see findings.py
        self.own_code = OwnCode(self.timeline)
        self.loaders = Counter()  # {num_workers of a DataLoader: how many batches it was asked for}
        self.repeats_forward = False
        self.dt_of_profiled = None  # seconds
        self.steps = self.follow_steps()
        next(self.steps)

    # a step

    def begin_step(self):
        """Start the clock of a step."""
        self.timeline.begin_step(waits=self.log.waits_in(len(self.log.steps)))

    def end_step(self):
        """Stop the clock of a step, report it, and begin another one if it is wanted."""
        self.timeline.end_step()
        self.steps_taken += 1
        try:
            self.steps.send(self.read_step(self.timeline))
        except StopIteration:
            self.is_over = True

    def read_step(self, timeline):
        """Return the Step that a Timeline holds."""
        marks = timeline.marks if self.steps_taken > 1 else events.from_first_forward(timeline.marks)
        spans = events.spans_of(marks)
        spent = events.seconds_of_kinds(spans)
        dt = sum(spent.values())
        micro_batches = events.micro_batches_of(timeline.notes)
        graphs = meters.compiled_graphs()
        entry = {"kind": "step", "loss": events.loss_of(micro_batches), "dt": dt, "spent": spent}
        entry["graphs"] = graphs - self.graphs_before
        self.graphs_before = graphs
        self.own_code.read_looks(spans, spent)
        return Step(timeline.notes, micro_batches, entry)

    def follow_steps(self):
        """Report the steps from the first to the last: each `yield` waits for the end of a step, and returns it.

        What profiles a card slows all steps that follow, so there the last step is profiled, and not recorded.
        """
        yield from self.follow_first_steps()
        while self.is_another_wanted():
            self.begin_step()
            self.record((yield))
        if self.log.steps and self.profiles_last and self.profiler.start(self.log.device, self.timeline.kind):
            self.begin_step()
            self.dt_of_profiled = (yield).entry["dt"]
            self.keep_profile()

    def follow_first_steps(self):
        """Report the first two steps: the second one shows what is trained. On a CPU it is profiled.

        This ends with them, since they hold modules, which the script may delete.
        """
        first = yield
        self.prepare()
        if not self.is_another_wanted():
            return
        if self.log.device.type == "cpu":
            self.profiler.start(self.log.device, self.timeline.kind, MOST_NODES)
        self.begin_step()
        second = yield
        self.begin_report(first, second)
        self.record(first)
        self.record(second)

    def prepare(self):
        """Decide whether the last step is profiled, and let the thread that looks at the script's lines run in time.

        Exits if the script started ranks by itself.
        """
        self.profiles_last = self.args.profile or (self.log.device.type != "cpu" and self.args.steps > 2)
        self.limit = self.args.steps - 1 if self.profiles_last else self.args.steps
        if torch.distributed.is_initialized():
            self.world_size = torch.distributed.get_world_size()
        if count_threads_of_script() == 0:  # these would take turns more often than without us
            sys.setswitchinterval(SWITCH_INTERVAL)
        if self.world_size > 1 and not self.was_launched:
            remedy = f"torchrun --standalone --nproc_per_node={self.world_size} stages/watch.py {self.args.title}"
            self.reject(f"{self.args.title} starts {self.world_size} ranks by itself: start them with {remedy}")

    def is_another_wanted(self):
        """Return whether another step is to be recorded. A bench, if there is one, decides, and lets it wait."""
        steps = len(self.log.steps)
        if self.args.gate:
            return gate.wait(*self.args.gate, steps)
        return steps < self.limit

    def begin_report(self, first, second):
        """Print what is trained, and note what it uses, as the first two Steps have shown it."""
        notes = first.notes + second.notes
        self.loaders.update(events.values_of(notes, "batch"))
        self.repeats_forward = len(events.values_of(notes, "repeat")) > 0
        self.log.seen = find_techniques(notes, second.micro_batches, self.optimizers, self.log.device, self.world_size)
        flush_stdout()  # so that the script's own lines stand before ours
        self.log.begin(self.args.title, self.tokens_of(second))
        if self.log.seen.unit == "step":
            self.log.say("steps are counted, since it is unclear what its tokens or samples are")
        if events.take_turns(first.notes) or events.take_turns(second.notes):
            self.log.say("optimizers train in turn: the first one's step ends a step, and batch and loss are its own")
        self.keep_profile()
        self.profiler.forget()

    def keep_profile(self):
        """Add to what was seen what the profiled step has shown, if there was one, and write it to the record."""
        self.profiler.stop()
        if self.profiler.events is not None:
            self.log.seen = replace(self.log.seen, **seen_in(self.profiler.events, self.log.seen, self.log.device))
        self.log.write({"kind": "seen", **asdict(self.log.seen)})

    def record(self, step):
        """Let the log record a Step."""
        steps = len(self.log.steps) + 1
        may_be_last = steps == self.limit
        if self.args.gate:
            may_be_last = not gate.allows(self.args.gate[0], steps)
        step.entry["tokens"] = self.tokens_of(step)
        self.log.step(step.entry, may_be_last)
        if steps == self.log.warmup:
            self.own_code.forget()  # what it did once is not reported

    def tokens_of(self, step):
        """Return the tokens or samples of a Step, of all ranks. A step of which neither is known counts as 1."""
        if self.log.seen.unit == "step":
            return 1
        return events.count_of(step.micro_batches, self.log.seen.unit) * self.world_size

    # the end

    def finish(self):
        """Write and print the summary, and what the script has and lacks. Nothing without a timed step."""
        flush_stdout()
        if not self.log.steps:
            return
        if not (self.is_over or self.profiler.profile):  # the script has ended before the last step that was wanted
            self.log.steps[-1].update(self.log.read_meters())
        shares = shares_of(self.log)
        self.log.finish(shares)
        self.log.say(*words_on_script(self, shares))
        self.log.say(*words_on_profile(self))

    def end_script_if_over(self):
        """End a script that begins a step that is not wanted. What it does after its last step has run by then."""
        if self.is_over:
            self.finish()
            self.log.notice(f"{self.args.title} was stopped after {self.steps_taken} steps, when it began another")
            self.leave(0)

    def reject(self, line):
        """End the process with one line and exit status 2. The script could catch the SystemExit of common.refuse()."""
        print(f"error: {line}", file=sys.stderr)
        self.leave(2)

    def refuse_spawn(self, *args, **kwargs):
        """Refuse a script whose ranks run in processes that multiprocessing starts, where nobody watches them."""
        remedy = "call its function directly, with the RANK and WORLD_SIZE of torchrun, or 0 and 1"
        self.reject(f"{self.args.title} starts ranks by torch.multiprocessing.spawn, which can't be watched: {remedy}")

    def leave(self, status):
        """End the process at once: threads of the script, its children and its `finally` may hang."""
        flush_stdout()
        for child in multiprocessing.active_children():
            child.terminate()
        os._exit(status)


def flush_stdout():
    """Flush the script's own stdout, which may be closed by now or be something else."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
