"""A run of a watched script: what is done when a step has ended, from the first step to the last, and at the end."""

import os
import shlex
import sys
import weakref
from dataclasses import replace

import torch

from ..common import say
from ..figures import Step
from . import events, gate, pytorch
from .findings import words_on_script
from .guard import Guard
from .leave import flush_stdout, leave
from .operations import fields_of_profile
from .own_code import OwnCode
from .profiler import StepProfiler
from .shares import shares_of
from .techniques import find_techniques, seen_at_the_end
from .threads import count_threads_of_script
from .timeline import Timeline

SWITCH_INTERVAL = 1e-4  # seconds after which Python lets a waiting thread run, here the one that looks; usually 5 ms


class StepSoFar:
    """The sums of a step that has not ended, by the marks and notes that were read.

    spent: {kind: seconds}. micro_batches: its MicroBatches. graphs_before: how many graphs torch.compile had made when
    it began.
    """

    def __init__(self):
        self.spent = dict.fromkeys(events.KINDS, 0.0)
        self.micro_batches = []
        self.graphs_before = pytorch.compiled_graphs()

    def timed(self):
        """Return its Step, which lacks its tokens, its number and what the meters show."""
        graphs = pytorch.compiled_graphs() - self.graphs_before
        return Step(events.loss_of(self.micro_batches), sum(self.spent.values()), self.spent, graphs)


class Run:
    """Times the steps of a script, and reports them. Rank 0 alone prints.

    After the first step it is prepared, and after the second one reported and recorded, with the first. Later steps are
    recorded up to the limit, or as the bench allows. On a card one more is profiled. Then it is over: the script ends
    when it begins another step, and the summary is written.

    script: a Script. args: the flags of watch.py. log: a Log.
    """

    def __init__(self, script, args, log):
        self.script = script
        self.args = args
        self.log = log
        self.guard = Guard(log)
        self.was_launched = "WORLD_SIZE" in os.environ  # by torchrun: a script may set it later
        self.profiler = StepProfiler()
        self.timeline = Timeline(self.profiler, self.add_up_lists)
        self.own_code = OwnCode(self.timeline)
        self.optimizers = weakref.WeakKeyDictionary()  # {each one that has stepped: its learning rates so far, a set}
        self.habits = events.Habits()
        self.steps_taken = 0  # with the profiled one
        self.first_step = None  # (a Step, its MicroBatches), which waits for the report
        self.profiles_this_step = False  # the last one, which is not recorded
        self.is_over = False  # no other step is wanted, and the script ends when it begins one
        self.has_finished = False  # the summary is written
        self.world_size = 1  # how many processes train together, known after the first step
        # before the first step
        self.spent_before = dict.fromkeys(events.KINDS, 0.0)  # {kind: seconds}
        self.lines_before = {}  # {line: seconds} of own code
        self.begin_step()

    # a step

    def add_devices(self, devices):
        """Add the devices of an optimizer's parameters, a list. The log has the first of them all."""
        if self.log.device is None:
            self.log.device = devices[0]
        for device in devices:
            if device.type != "cpu" and device not in self.timeline.cards:
                self.timeline.cards.append(device)

    def begin_step(self):
        """Start the clock of a step."""
        self.step = StepSoFar()
        self.timeline.begin_step(waits=self.log.waits_in(len(self.log.steps)))

    def end_step(self):
        """Stop the clock of a step, keep it, and begin another one if it is wanted."""
        self.timeline.end_step()
        self.profiler.stop()  # before the loss is read, which would count as a copy of the script's
        self.add_up_lists()
        self.steps_taken += 1
        self.habits.accum = max(self.habits.accum, events.accumulated(self.step.micro_batches))
        if self.profiles_this_step:
            self.is_over = True
            self.add_profile()
        else:
            self.keep(self.step.timed(), self.step.micro_batches)
            self.begin_next_step()

    def keep(self, step, micro_batches):
        """Hold the first Step back until the second one shows what is trained, and record all others."""
        if step.dt <= 0:
            raise ValueError("its steps take no time, as if the script had replaced time.perf_counter()")
        if self.steps_taken == 1:
            self.first_step = step, micro_batches
            self.prepare()
            return
        if self.steps_taken == 2:
            self.begin_report()
            self.record(*self.first_step)
            self.first_step = None  # it holds a module, which the script may delete
        self.record(step, micro_batches)

    def add_up_lists(self):
        """Add to the sums of the step what its marks and notes say so far, and let go of them.

        This happens at the end of a step, and in a step of very many calls before, since these would fill the memory.
        """
        marks, notes = self.timeline.take()
        spans = events.spans_of(marks)
        for kind, began, ended in spans:
            self.step.spent[kind] += ended - began
        self.own_code.read_looks(spans)
        self.step.micro_batches += events.micro_batches_of(notes)
        self.habits.add(notes)

    def begin_first_step(self):
        """Begin the first step anew, with its first forward: what came before is no step."""
        self.timeline.mark(self.timeline.kind)
        self.add_up_lists()
        self.spent_before, self.lines_before = self.step.spent, self.own_code.lines["rest"]
        self.own_code.forget()
        self.begin_step()

    def begin_next_step(self):
        """Begin the next step if one is wanted: one that is recorded, or the last one, which is profiled.

        What profiles a card slows all steps that follow, so there the last step is profiled, and on a CPU the second.
        """
        device, kind = self.log.device, self.timeline.kind
        if not self.wait_for_decision():
            may_profile = self.profiles_last and bool(self.log.steps)
            self.profiles_this_step = may_profile and self.profiler.start(device, kind)
            self.is_over = not self.profiles_this_step
        elif self.steps_taken == 1 and device.type == "cpu":
            self.profiler.start(device, kind)
        if not self.is_over:
            self.begin_step()

    def prepare(self):
        """Get ready for the other steps, when the first one has ended. Ranks that nobody watches are refused."""
        self.habits.models.clear()  # a library may call a model when it builds it: what is trained is called again
        if not self.args.gate and count_threads_of_script() == 0:  # else threads would take turns more often
            sys.setswitchinterval(SWITCH_INTERVAL)
        self.reject_own_ranks()

    def reject_own_ranks(self):
        """Exit if the script started ranks by itself, where nobody watches the others."""
        if torch.distributed.is_initialized():
            self.world_size = torch.distributed.get_world_size()
        if self.world_size > 1 and not self.was_launched:
            launcher = f"torchrun --standalone --nproc_per_node={self.world_size} stages/watch.py"
            remedy = f"{launcher} {self.script.title} {shlex.join(self.script.argv)}".rstrip()
            self.reject(f"{self.script.title} starts {self.world_size} ranks by itself: start them with {remedy}")

    @property
    def profiles_last(self):
        """Whether the last step is profiled, and not recorded."""
        return self.log.device.type != "cpu" and self.args.steps > 2

    @property
    def limit(self):
        """How many steps are recorded, if there is no gate."""
        return self.args.steps - 1 if self.profiles_last else self.args.steps

    def wait_for_decision(self):
        """Return whether another step is to be recorded. A bench, if there is one, decides, and may let it wait."""
        steps = len(self.log.steps)
        if self.args.gate:
            return gate.wait_for_step(*self.args.gate, steps)
        return steps < self.limit

    def begin_report(self):
        """Print what is trained, as the first two steps have shown it."""
        self.log.seen = find_techniques(self)
        flush_stdout()  # so that the script's own lines stand before ours
        self.log.begin(self.script.title, self.tokens_of(self.step.micro_batches))
        if self.log.seen.unit == "step":
            self.log.say("steps are counted, since it is unclear what its tokens or samples are")
        self.add_profile()
        self.log.write_seen()
        self.profiler.forget()

    def add_profile(self):
        """Add to what was seen what the profiled step has shown, if there was one. The steps go on if that fails."""
        if self.profiler.events is not None:
            read = self.guard.around(fields_of_profile, "its operations")
            fields = read(self.profiler.events, self.log.seen, self.log.device) or {}
            self.log.seen = replace(self.log.seen, **fields)

    def record(self, step, micro_batches):
        """Let the log record a Step, which lacks its tokens."""
        steps = len(self.log.steps) + 1
        step.tokens = self.tokens_of(micro_batches)
        self.log.add_step(step, self.may_be_last(steps))
        if steps == self.log.warmup:
            self.own_code.forget()  # what it did once is not reported

    def may_be_last(self, steps):
        """Return whether no step may follow after so many, as far as is known now."""
        if self.args.gate:
            return not gate.allows(self.args.gate[0], steps)
        return steps == self.limit

    def tokens_of(self, micro_batches):
        """Return the tokens or samples of a step, of all ranks. A step of which neither is known counts as 1."""
        if self.log.seen.unit == "step":
            return 1
        return events.count_of(micro_batches, self.log.seen.unit) * self.world_size

    # the end

    def calls_backward(self):
        """Return whether the script has called backward() since the last step."""
        self.add_up_lists()
        return self.step.spent["backward"] > 0

    def finish(self):
        """Finish the run. If that fails, the script ends as it would."""
        self.guard.around(self.write_summary, "its figures")()

    def write_summary(self):
        """Write and print the summary, and what the script has and lacks. Nothing without a timed step."""
        flush_stdout()
        if not self.log.steps or self.has_finished:
            return
        self.has_finished = True
        if not (self.is_over or self.profiler.is_open):  # the script has ended before the last step that was wanted
            self.log.read_last_meters()
        self.log.seen = seen_at_the_end(self)
        self.log.write_seen()
        shares = shares_of(self.log)
        self.log.finish(shares)
        self.log.say(*words_on_script(self, shares))

    def end_script_if_over(self):
        """End a script that begins a step that is not wanted. What it does after its last step has run by then."""
        if self.is_over:
            self.finish()
            words = f"was stopped after {self.steps_taken} steps, when it began another"
            if self.script.saves:
                words += ", and before its --save: raise --steps"
            self.log.notice(f"{self.script.title} {words}")
            leave(0)

    def reject(self, line):
        """End the process with one line and exit status 2. The script could catch the SystemExit of common.refuse()."""
        say(f"error: {line}", self.log.err)
        leave(2)
