"""Watches a training script from outside: PyTorch calls it at forwards, backwards and the steps of the optimizer.

A step of the optimizer ends a step, and begins the next one. So data, forward, backward, update and whatever else the
loop does are on the clock. The script is not changed, and what it uses is not guessed from its text.
"""

import contextlib
import multiprocessing
import os
import sys
import weakref
from dataclasses import asdict, replace

import torch

from .. import meters
from . import gate
from .added import Added
from .counting import MicroBatches, call_of
from .findings import answer, shares_of, words_on_profile
from .profiler import StepProfiler
from .techniques import Habits, find_techniques, parameters_of, seen_in
from .timeline import StepClock, count_threads_of_script, is_captured, is_elsewhere

MOST_WITHOUT = 10  # steps of another optimizer, after which the first one is taken for one that trains no more
SWITCH_INTERVAL = 1e-4  # seconds after which Python lets the thread look that waits for it; Python's own are 5 ms


class Watcher:
    """Times the steps of a script that runs in this process, and reports them. Rank 0 alone prints.

    args: the flags of watch.py. log: a Log.
    """

    def __init__(self, args, log):
        self.args = args
        self.log = log
        self.was_launched = "WORLD_SIZE" in os.environ  # by torchrun: a script may set it later
        self.clock = StepClock()
        self.profiler = StepProfiler(self.clock)
        self.added = Added(args.added)
        self.habits = Habits()
        self.micro_batches = MicroBatches()  # since the last step ended
        self.models = {}  # {id: module} of all that were called in training, up to the first report
        self.devices = []  # of all parameters that optimizers have
        # References to optimizers are weak, since a script may delete them.
        self.main_ref = lambda: None  # to the one that ends a step
        self.others = weakref.WeakKeyDictionary()  # {another one: how often it stepped since the last step ended}
        self.optimizers_take_turns = False  # as in a GAN
        self.is_update_due = False  # by a GradScaler, which may skip it
        self.first_step = None  # what record() takes, kept until the second one has shown what is trained
        self.is_in_last_step = False  # which is profiled, on a card or with --profile, and leaves no line
        self.last_dt = None  # seconds of that step
        self.is_over = False  # no other step is wanted, and the script ends when it begins one
        self.graphs_before = 0  # how many torch.compile had made when the step began
        self.world_size = 1  # how many processes train together, from the first step on
        self.seen = None  # a Seen, from the first report on

    # what PyTorch calls

    def saw_forward(self, module, reader, args, kwargs):
        """Note a call of an outermost module, and add to it what is to be added. reader: its Reader.

        Return what its time counts as: "forward", "evaluation", or "backward" for activation checkpointing. After the
        first report only what it reads is noted, in a few microseconds.
        """
        if "backward" in self.clock.kinds:
            self.habits.repeats_forward = True
            return "backward"
        if not torch.is_grad_enabled():
            return "evaluation"
        if reader.weight.is_meta:  # where nothing is computed, for example to count FLOPs
            return "forward"
        if self.is_over:
            self.end_script()
        self.log.show_line()
        if self.first_step is None and not self.models:
            self.clock.begin_step()  # the first one, without the start of the script
        if self.added.names:
            self.added.before_forward(module)
        if self.micro_batches.add_again(module, args):
            return "forward"
        call = call_of(module, reader, args, kwargs)
        if call is None:
            return "forward"
        self.micro_batches.add_call(call)
        if self.seen is None:
            self.models[id(module)] = module
            self.profiler.stop_early()
            device_type = reader.weight.device.type
            if torch.is_autocast_enabled(device_type):
                self.habits.saw_autocast(device_type, torch.get_autocast_dtype(device_type), True)
        return "forward"

    def saw_autocast(self, autocast):
        """Note an autocast that is entered in a forward, or before any. After one it may be for the loss alone."""
        is_for_model = "forward" in self.clock.kinds or not self.models
        if is_for_model and torch.is_grad_enabled():
            self.habits.saw_autocast(autocast.device, autocast.fast_dtype, autocast._enabled)

    def saw_backward(self, tensors, *args, **kwargs):
        """Note what backward() is called on. One inside of another, as of checkpointing, is a part of that."""
        if "backward" in self.clock.kinds:
            return
        if self.is_over:
            self.end_script()
        self.added.autocast.close()
        if self.seen is None:
            self.profiler.stop_early()
        if not is_captured():
            self.micro_batches.add_backward(tensors)

    def saw_scale(self, scaler, outputs):
        """Note the loss before a GradScaler multiplies it."""
        if torch.is_tensor(outputs):
            self.micro_batches.unscaled_loss = outputs

    def saw_scaler_step(self, scaler, optimizer, *args, **kwargs):
        """Note that a GradScaler is asked to step an optimizer, which it skips if gradients are not finite."""
        if optimizer is self.main_ref():
            self.is_update_due = True

    def saw_scaler_update(self, scaler, *args, **kwargs):
        """End a step whose optimizer a GradScaler has skipped. It is a step without an update."""
        if self.is_update_due:
            self.end_step()

    # torch.compiler.disable would import all of torch.compile, and take a second, before the script's first line
    @torch._disable_dynamo
    def saw_optimizer_begin(self, optimizer, *call):
        """Note that an optimizer begins its step, which may be inside of another one's, as Lookahead has it."""
        if is_elsewhere():
            return
        if self.is_over:
            self.end_script()
        if optimizer not in self.habits.optimizers:
            lr = optimizer.param_groups[0].get("lr")
            self.habits.optimizers[optimizer] = lr.detach().clone() if torch.is_tensor(lr) else lr
            devices = [p.device for p in parameters_of([], optimizer)]
            self.devices = list(dict.fromkeys(self.devices + devices))
            self.added.before_first_update(optimizer)
        self.clock.begin("update")

    @torch._disable_dynamo
    def saw_optimizer_end(self, optimizer, *call):
        """Note a step of an optimizer.

        The first optimizer ends all steps of the script, as long as it goes on stepping. If it was deleted, or another
        one has stepped ten times without it, the other one ends the steps from then on.
        """
        if is_elsewhere():
            return
        self.clock.end("update")
        if is_captured():
            self.log.notice("its step is captured as a CUDA graph, whose replays show nothing")
        elif self.main_ref() in (None, optimizer):
            self.main_ref = weakref.ref(optimizer)
            self.others.clear()
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
            self.micro_batches = MicroBatches()
            self.clock.begin_step(self.devices)  # anew, so that no step of ten is reported

    # a step

    @property
    def device(self):
        """The device of the first optimizer's first parameter."""
        return self.devices[0]

    def end_step(self):
        """End a step: stop the clock, report, and start the clock again. The first step began with a forward."""
        self.is_update_due = False
        self.added.autocast.close()  # if the script calls no backward()
        dt = self.clock.end_step(self.devices)
        self.log.hide_line()
        if not self.micro_batches.batches:
            self.micro_batches.close()  # if the script calls no backward()
        graphs = meters.compiled_graphs()
        on_clock = {"spent": dict(self.clock.spent), "graphs": graphs - self.graphs_before}
        self.graphs_before = graphs
        step = (self.micro_batches, dt, on_clock)
        if self.first_step is None:
            self.first_step = step
            self.after_first_step()
        elif self.seen is None:
            self.begin_report()
            self.record(*self.first_step)
            self.record(*step)
        elif self.is_in_last_step:
            self.last_dt = dt
            self.keep_profile()
            self.is_over = True
        else:
            self.record(*step)
        if not self.is_over:
            self.begin_next_step()

    def record(self, micro_batches, dt, on_clock):
        """Let the log record a step. dt: its seconds. on_clock: more figures, a dict."""
        self.log.step(micro_batches.loss, dt, self.tokens_of(micro_batches), on_clock)

    def tokens_of(self, micro_batches):
        """Return the tokens or samples of a step, of all ranks. A step of which neither is known counts as 1."""
        if self.seen.unit == "step":
            return 1
        return micro_batches.count_of(self.seen.unit) * self.world_size

    def after_first_step(self):
        """Let looks at the script's lines come in time. Exits if the script started ranks by itself."""
        self.clock.forget_own_code()
        if torch.distributed.is_initialized():
            self.world_size = torch.distributed.get_world_size()
        if count_threads_of_script() == 0:  # these would take turns more often than without us
            sys.setswitchinterval(SWITCH_INTERVAL)
        if self.world_size > 1 and not self.was_launched:
            remedy = f"torchrun --standalone --nproc_per_node={self.world_size} stages/watch.py {self.args.title}"
            self.refuse(f"{self.args.title} starts {self.world_size} ranks by itself: start them by {remedy}")

    def begin_next_step(self):
        """Start the clock of the next step. If no other one is wanted, the script ends when it begins one.

        On a CPU the second step is profiled. On a card, or with --profile, so is one more step after all others, since
        what profiles a card slows all steps that follow.
        """
        steps = len(self.log.steps)
        on_card = self.device.type != "cpu"
        profiles_at_the_end = on_card or self.args.profile
        if self.args.gate:
            is_wanted = gate.wait(*self.args.gate, steps)
        else:
            is_wanted = steps < (self.args.steps - 1 if profiles_at_the_end else self.args.steps)
        if is_wanted and steps == 0 and not on_card:
            self.profiler.start(self.device)
        if not is_wanted and profiles_at_the_end:
            self.profiler.start(self.device)
            self.is_in_last_step = self.profiler.is_open  # False if the script profiles itself
        if not is_wanted and not self.is_in_last_step:
            self.is_over = True
            return
        if steps == self.log.warmup:
            self.clock.forget_own_code()  # what it did once is not reported
        self.micro_batches = MicroBatches()
        self.clock.begin_step(self.devices, waits_between=on_card and 2 <= steps < self.log.warmup)

    def begin_report(self):
        """Print what is trained, and note what it uses, as the second step has shown it."""
        self.seen = find_techniques(self)
        tokens = self.tokens_of(self.micro_batches)
        flush_stdout()  # so that the script's own lines stand before ours
        self.log.begin(self.args.title, self.device, self.seen, tokens)
        if self.seen.unit == "step":
            self.log.say("steps are counted, since neither ids of a text nor a batch of samples was surely seen")
        if self.optimizers_take_turns:
            self.log.say("optimizers train in turn: a step ends with the first one's, and has its batch and its loss")
        self.models = {}
        self.keep_profile()
        self.profiler.forget()

    def keep_profile(self):
        """Add to what was seen what the profiled step has shown, if there was one, and write it to the record."""
        self.profiler.stop()
        if self.profiler.events is not None:
            self.seen = replace(self.seen, **seen_in(self.profiler, self.seen, self.device))
        self.log.write("seen", **asdict(self.seen))

    # the end

    def finish(self):
        """Write and print the summary, and what the script has, lacks and is slow by. Nothing without a timed step."""
        flush_stdout()
        if not self.log.steps:
            return
        self.clock.is_running = False  # no look at the script's lines may come between
        shares = shares_of(self)
        self.log.finish(shares)
        self.log.say(*answer(self, shares))
        self.log.say(*words_on_profile(self))

    def end_script(self):
        """End the script, which begins a step that is not wanted. What it does after its last step has run by then."""
        self.finish()
        self.log.notice(f"{self.args.title} was stopped after {len(self.log.steps)} steps, when it began another")
        self.leave(0)

    def refuse(self, line):
        """End the process with one line and exit status 2. The script could catch the SystemExit of common.refuse()."""
        print(f"error: {line}", file=sys.stderr)
        self.leave(2)

    def refuse_spawn(self, *args, **kwargs):
        """Refuse a script whose ranks run in processes that multiprocessing starts, where nobody watches them."""
        remedy = "let it call its function itself, with the RANK and WORLD_SIZE of torchrun, or 0 and 1"
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
