"""Watches a training script from outside: PyTorch calls it at forwards, backwards and the steps of the optimizer.

A step of the optimizer ends a step, and begins the next one. So data, forward, backward, update and whatever else the
loop does are on the clock. The script is not changed, and what it uses is not guessed from its text.
"""

import contextlib
import multiprocessing
import os
import sys
import time
import weakref
from dataclasses import asdict, replace
from enum import IntEnum

import torch

from .. import machine, meters
from . import gate
from .added import Added
from .counting import MicroBatches
from .findings import answer, shares_of, words_on_profile
from .profiler import StepProfiler
from .techniques import Habits, find_techniques, parameters_of, seen_in
from .timeline import StepClock, count_threads_of_script, is_captured, is_elsewhere

MOST_WITHOUT = 10  # steps of another optimizer, after which the first one is taken for one that trains no more
SWITCH_INTERVAL = 1e-4  # seconds after which Python lets a waiting thread run, here the one that looks; usually 5 ms


class Phase(IntEnum):
    """How far a run is: which step it is in."""

    FIRST = 1  # the first one, or what is before it
    SECOND = 2  # the second one, which shows what is trained. Then that is reported, and both steps are recorded
    TIMED = 3  # one that is recorded at its end
    PROFILED = 4  # the last one, on a card or with --profile, which is profiled and not recorded
    OVER = 5  # none: no other step is wanted, and the script ends when it begins one


class Watcher:
    """Times the steps of a script that runs in this process, and reports them. Rank 0 alone prints.

    args: the flags of watch.py. log: a Log.
    """

    def __init__(self, args, log):
        self.args = args
        self.log = log
        self.phase = Phase.FIRST
        self.was_launched = "WORLD_SIZE" in os.environ  # by torchrun: a script may set it later
        self.clock = StepClock()
        self.profiler = StepProfiler(self.clock)
        self.added = Added(args.added)
        self.habits = Habits()
        self.micro_batches = MicroBatches()  # since the last step ended
        self.models = {}  # {id: module} of all that were called in training, up to the report
        self.main_ref = lambda: None  # a weak reference to the optimizer that ends a step: a script may delete it
        self.others = weakref.WeakKeyDictionary()  # {another one: how often it stepped since the last step ended}
        self.optimizers_take_turns = False  # as in a GAN
        self.is_update_due = False  # by a GradScaler, which may skip it
        self.first_step = None  # its entry in the record and its MicroBatches, up to the report
        self.dt_of_profiled = None  # seconds
        self.graphs_before = 0  # how many torch.compile had made when the step began
        self.steps_taken = 0  # with the profiled one
        # from the first step on:
        self.world_size = 1  # how many processes train together
        self.profiles_last = False  # whether the last step is profiled
        self.limit = None  # how many steps are recorded, if there is no gate

    # what PyTorch calls

    def saw_forward(self, module, signature, args, kwargs):
        """Note a call of an outermost module, and add to it what is to be added.

        Return what its time counts as: "forward", "evaluation", or "backward" for activation checkpointing. After the
        report only what it reads is noted.
        """
        if "backward" in self.clock.kinds:
            self.habits.repeats_forward = True
            return "backward"
        if not torch.is_grad_enabled():
            return "evaluation"  # which may also follow the last step
        if self.phase == Phase.OVER:
            self.end_script()
        if self.phase == Phase.FIRST and not self.models:
            self.clock.begin_step()  # the first one, without the start of the script
        if self.added.names:
            self.added.before_forward(module)
        inputs, batch = signature.read(args, kwargs)
        if batch:
            self.micro_batches.add_call(module, signature.weight, inputs, batch)
            if self.phase <= Phase.SECOND:
                self.models[id(module)] = module
                self.profiler.stop_if_large()
                kind = signature.weight.device.type
                self.note_autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        return "forward"

    def saw_autocast(self, autocast):
        """Note an autocast that is entered in a forward, or before any. After one it may be for the loss alone."""
        is_for_model = "forward" in self.clock.kinds or not self.models
        if self.phase <= Phase.SECOND and is_for_model and torch.is_grad_enabled():
            self.note_autocast(autocast.device, autocast.fast_dtype, autocast._enabled)

    def note_autocast(self, device_type, dtype, is_enabled, *others):
        """Note an autocast that is in force in a forward."""
        if is_enabled and dtype:
            self.habits.autocast = machine.dtype_name(dtype)

    def saw_clipping(self, parameters, max_norm, *others, **options):
        """Note that gradients are clipped, and not only measured, as by a norm of infinity."""
        self.habits.clips = self.habits.clips or float(max_norm) < float("inf")

    def saw_loader(self, loader):
        """Return what the time of a DataLoader counts as: an evaluation loads batches of its own."""
        return "data" if torch.is_grad_enabled() else "evaluation"

    def saw_batch(self, iterator):
        """Note how many processes a DataLoader has that is asked for a batch. Return what its time counts as."""
        self.habits.batches[iterator._num_workers] += 1
        return self.saw_loader(iterator)

    def saw_backward(self, tensors, *args, **kwargs):
        """Note what backward() is called on. One inside of another, as of checkpointing, is a part of that.

        Return what its time counts as.
        """
        if "backward" in self.clock.kinds:
            return "backward"
        if self.phase == Phase.OVER:
            self.end_script()
        if self.added.names:
            self.added.autocast.close()
        if self.phase <= Phase.SECOND:
            self.profiler.stop_if_large()
        if not is_captured():
            self.micro_batches.add_backward(tensors)
        return "backward"

    def saw_scale(self, scaler, outputs):
        """Note the loss before a GradScaler multiplies it."""
        if torch.is_tensor(outputs):
            self.micro_batches.unscaled_loss = outputs

    def saw_scaler_step(self, scaler, optimizer, *args, **kwargs):
        """Note that a GradScaler is asked to step an optimizer, which it skips if gradients are not finite."""
        if optimizer is self.main_ref():
            self.is_update_due = True

    def saw_scaler_update(self, scaler, *args, **kwargs):
        """End a step whose optimizer a GradScaler has skipped. It is a step without an update.

        Until an optimizer has stepped, it is not known which one ends a step, so what is skipped belongs to the step
        after it.
        """
        if self.is_update_due:
            self.end_step()

    # torch.compiler.disable would import all of torch.compile, and take a second, before the script's first line
    @torch._disable_dynamo
    def saw_optimizer_begin(self, optimizer, *call):
        """Note that an optimizer begins its step, which may be inside of another one's, as Lookahead has it."""
        if is_elsewhere():
            return
        entered = time.perf_counter()
        if self.phase == Phase.OVER:
            self.end_script()
        if optimizer not in self.habits.optimizers:
            lr = optimizer.param_groups[0].get("lr")
            self.habits.optimizers[optimizer] = lr.detach().clone() if torch.is_tensor(lr) else lr
            devices = [p.device for p in parameters_of([], optimizer)]
            self.log.device = self.log.device or devices[0]
            cards = [device for device in devices if device.type != "cpu"]
            self.clock.cards = list(dict.fromkeys(self.clock.cards + cards))
            self.added.before_first_update(optimizer)
        self.clock.begin("update", entered)

    @torch._disable_dynamo
    def saw_optimizer_end(self, optimizer, *call):
        """Note a step of an optimizer.

        The first optimizer ends all steps of the script, as long as it goes on stepping. If it was deleted, or another
        one has stepped ten times without it, the other one ends the steps from then on.
        """
        if is_elsewhere():
            return
        self.clock.end("update")
        main = self.main_ref()
        if is_captured():
            self.log.notice("its step is captured as a CUDA graph, and its replays can't be seen")
        elif main is optimizer or main is None:
            self.main_ref = weakref.ref(optimizer)
            self.end_step()
        else:
            self.saw_other_step(optimizer)

    def saw_other_step(self, optimizer):
        """Note a step of an optimizer that ends none. What was trained on up to here is its own batch."""
        steps = self.others[optimizer] = self.others.get(optimizer, 0) + 1
        if self.micro_batches.batches:
            self.micro_batches.was_used = self.optimizers_take_turns = True
        if steps == MOST_WITHOUT:
            self.main_ref = weakref.ref(optimizer)
            self.others.clear()
            self.clock.end_step()
            self.begin_step()  # anew, so that no step of ten is reported

    # a step

    def end_step(self):
        """End a step: stop the clock, report, and start the clock again. The first step began with a forward."""
        self.steps_taken += 1
        self.is_update_due = False
        self.others.clear()
        if self.added.names:
            self.added.autocast.close()  # if the script calls no backward()
        dt = self.clock.end_step()
        if not self.micro_batches.batches:
            self.micro_batches.close()  # if the script calls no backward()
        graphs = meters.compiled_graphs()
        entry = {"kind": "step", "loss": self.micro_batches.loss, "dt": dt, "spent": self.clock.spent}
        entry["graphs"] = graphs - self.graphs_before
        self.graphs_before = graphs
        if self.phase == Phase.FIRST:
            self.after_first_step()
            self.first_step = entry, self.micro_batches
            self.phase = Phase.SECOND
        elif self.phase == Phase.SECOND:
            self.begin_report()
            self.record(*self.first_step)
            self.first_step = None
            self.record(entry, self.micro_batches)
            self.phase = Phase.TIMED
        elif self.phase == Phase.TIMED:
            self.record(entry, self.micro_batches)
        elif self.phase == Phase.PROFILED:
            self.dt_of_profiled = dt
            self.keep_profile()
            self.phase = Phase.OVER
            return
        self.begin_next_step()

    def after_first_step(self):
        """Decide whether the last step is profiled, and let the thread that looks at the script's lines run in time.

        Exits if the script started ranks by itself.
        """
        self.clock.forget_own_code()
        # what profiles a card slows all steps that follow, so there it is the last one, and on a CPU the second one
        self.profiles_last = self.args.profile or (self.log.device.type != "cpu" and self.args.steps > 2)
        self.limit = self.args.steps - 1 if self.profiles_last else self.args.steps
        if torch.distributed.is_initialized():
            self.world_size = torch.distributed.get_world_size()
        if count_threads_of_script() == 0:  # these would take turns more often than without us
            sys.setswitchinterval(SWITCH_INTERVAL)
        if self.world_size > 1 and not self.was_launched:
            remedy = f"torchrun --standalone --nproc_per_node={self.world_size} stages/watch.py {self.args.title}"
            self.refuse(f"{self.args.title} starts {self.world_size} ranks by itself: start them with {remedy}")

    def begin_report(self):
        """Print what is trained, and note what it uses, as the second step has shown it."""
        self.log.seen = find_techniques(self)
        flush_stdout()  # so that the script's own lines stand before ours
        self.log.begin(self.args.title, self.tokens_of(self.micro_batches))
        if self.log.seen.unit == "step":
            self.log.say("steps are counted, since it is unclear what its tokens or samples are")
        if self.optimizers_take_turns:
            self.log.say("optimizers train in turn: the first one's step ends a step, and batch and loss are its own")
        self.models = {}
        self.keep_profile()
        self.profiler.forget()

    def keep_profile(self):
        """Add to what was seen what the profiled step has shown, if there was one, and write it to the record."""
        self.profiler.stop()
        if self.profiler.events is not None:
            self.log.seen = replace(self.log.seen, **seen_in(self.profiler.events, self.log.seen, self.log.device))
        self.log.write({"kind": "seen", **asdict(self.log.seen)})

    def record(self, entry, micro_batches):
        """Let the log record a step."""
        steps = len(self.log.steps) + 1
        may_be_last = steps == self.limit
        if self.args.gate:
            may_be_last = not gate.allows(self.args.gate[0], steps)
        entry["tokens"] = self.tokens_of(micro_batches)
        self.log.step(entry, may_be_last)

    def tokens_of(self, micro_batches):
        """Return the tokens or samples of a step, of all ranks. A step of which neither is known counts as 1."""
        if self.log.seen.unit == "step":
            return 1
        return micro_batches.count_of(self.log.seen.unit) * self.world_size

    def begin_next_step(self):
        """Begin the next step: one that is recorded, the last one, which is profiled, or none."""
        steps = len(self.log.steps)
        is_wanted = steps < self.limit
        if self.args.gate:
            is_wanted = gate.wait(*self.args.gate, steps)
        if is_wanted:
            if self.phase == Phase.SECOND and self.log.device.type == "cpu":
                self.profiler.start(self.log.device)
            if steps == self.log.warmup:
                self.clock.forget_own_code()  # what it did once is not reported
            self.begin_step()
            return
        if self.profiles_last and self.phase == Phase.TIMED and self.profiler.start(self.log.device):
            self.phase = Phase.PROFILED
            self.begin_step()
        else:
            self.phase = Phase.OVER

    def begin_step(self):
        """Start the clock of a step."""
        self.micro_batches = MicroBatches()
        self.clock.begin_step(waits=self.log.waits_in(len(self.log.steps)))

    # the end

    def finish(self):
        """Write and print the summary, and what the script has and lacks. Nothing without a timed step."""
        flush_stdout()
        if not self.log.steps:
            return
        self.clock.is_running = False  # no look at the script's lines may come between
        if self.phase == Phase.TIMED:  # the script has ended before the last step that was wanted
            self.log.steps[-1].update(self.log.read_meters())
        shares = shares_of(self.log)
        self.log.finish(shares)
        self.log.say(*answer(self, shares))
        self.log.say(*words_on_profile(self))

    def end_script(self):
        """End the script, which begins a step that is not wanted. What it does after its last step has run by then."""
        self.finish()
        self.log.notice(f"{self.args.title} was stopped after {self.steps_taken} steps, when it began another")
        self.leave(0)

    def refuse(self, line):
        """End the process with one line and exit status 2. The script could catch the SystemExit of common.refuse()."""
        print(f"error: {line}", file=sys.stderr)
        self.leave(2)

    def refuse_spawn(self, *args, **kwargs):
        """Refuse a script whose ranks run in processes that multiprocessing starts, where nobody watches them."""
        remedy = "call its function directly, with the RANK and WORLD_SIZE of torchrun, or 0 and 1"
        self.refuse(f"{self.args.title} starts ranks by torch.multiprocessing.spawn, which can't be watched: {remedy}")

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
