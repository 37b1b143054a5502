"""Watches a training script from outside: PyTorch calls it at forwards, backwards and the steps of the optimizer.

A step of the optimizer ends a step, and begins the next one. So data, forward, backward, update and whatever else the
loop does are on the clock. The script is not changed, and what it uses is not guessed from its text.

A Watcher notes what it sees in a Timeline, and decides which optimizer ends a step. All else is read from the notes of
a step when it has ended: see events.py, and run.py for what is done with it.
"""

import os
import time
import weakref
from collections import Counter

import torch

from .. import machine
from . import pytorch
from .added import Added
from .counting import signature_of
from .events import Call, has_note
from .losses import losses_of
from .modules import parameters_of
from .threads import is_elsewhere
from .timeline import is_captured

MANY_BACKWARDS = 100  # before any step of an optimizer
MOST_WITHOUT_MAIN = 10  # steps of another optimizer, after which the main one is taken to train no more


class Watcher:
    """Notes what a script does in this process, for a Run."""

    def __init__(self, run):
        self.run = run
        self.timeline = run.timeline
        self.added = Added(run.args.added)
        self.has_called = False  # whether the script has called a module with gradients
        self.backwards_before_first_step = 0
        self.main_ref = lambda: None  # a weak reference to the optimizer that ends a step: a script may delete it
        self.others = Counter()  # {a weak reference to another one: how often it stepped since the last step ended}

    # What PyTorch calls. Most return what the time of a call counts as, a kind, or None if it counts as before.

    def saw_forward(self, module, args, kwargs):
        """Note a call of an outermost module, and add to it what is to be added. Return its kind.

        That is "forward", "evaluation", "backward" for activation checkpointing, or None: losses and transforms have no
        parameters, and what a DataLoader calls to make a batch is a part of that.
        """
        signature = signature_of(module)
        if signature is None or self.timeline.kind == "data":
            return None
        if self.timeline.kind == "backward":
            self.timeline.note("repeat")
            return "backward"
        if not torch.is_grad_enabled():
            return "evaluation"  # which may also follow the last step
        self.run.end_script_if_over()
        self.begin_with_first_call()
        device_type = signature.weight.device.type
        self.added.before_forward(module, device_type)
        self.note_call(module, signature, args, kwargs)
        if torch.is_autocast_enabled(device_type):
            self.note_autocast(torch.get_autocast_dtype(device_type))
        return "forward"

    def note_call(self, module, signature, args, kwargs):
        """Note what a module reads in a call."""
        tensor, batch, is_computed = signature.read(args, kwargs)
        if tensor is None:  # it gets for example a graph
            self.timeline.note("model", module)
            return
        # a reference to the tensor itself would keep it until the step ends, and it is the script's
        tensor_ref = weakref.ref(tensor)
        version = pytorch.version_of(signature.weight)
        if tensor.requires_grad:  # it may be what is trained, as a picture is in style transfer
            version += pytorch.version_of(tensor)
        call = Call(module, module.training, version, tensor_ref, batch, is_computed)
        self.timeline.note("call", call)

    def note_autocast(self, dtype):
        """Note the torch.dtype of an autocast."""
        self.timeline.note("autocast", machine.dtype_name(dtype))

    def begin_with_first_call(self):
        """Begin the first step with the first call, unless a compiled function has called the model so far."""
        if not self.has_called and self.run.steps_taken == 0:
            self.run.begin_first_step()
        self.has_called = True

    def saw_autocast(self, autocast):
        """Note an autocast that is entered in a forward, or before any. After one it may be for the loss alone."""
        is_after_forward = self.timeline.kind != "forward" and has_note(self.timeline.notes, "call")
        if torch.is_grad_enabled() and pytorch.autocast_is_enabled(autocast) and not is_after_forward:
            self.note_autocast(autocast.fast_dtype)

    def saw_clipping(self, parameters, max_norm, *others, **options):
        """Note that gradients are clipped, and not only measured, as by a norm of infinity."""
        if float(max_norm) < float("inf"):
            self.timeline.note("clipping", "norm")

    def saw_clipping_by_value(self, *others, **options):
        """Note that each gradient is clipped by itself."""
        self.timeline.note("clipping", "value")

    def saw_batch(self, iterator):
        """Note how many processes a DataLoader has that is asked for a batch. Return its kind."""
        kind = kind_of_loading()
        if kind == "data":
            self.timeline.note("batch", pytorch.workers_of(iterator))
        return kind

    def saw_backward(self, tensors, *args, **kwargs):
        """Note what backward() is called on. One inside of another, as of checkpointing, is a part of that."""
        if self.timeline.kind == "backward":
            return "backward"
        self.run.end_script_if_over()
        self.added.autocast.close()
        self.timeline.note("loss", losses_of(tensors))
        if self.run.steps_taken == 0:
            self.count_backward()
        return "backward"

    def count_backward(self):
        """Count a backward before the first step, and say so if there are very many."""
        self.backwards_before_first_step += 1
        if self.backwards_before_first_step == MANY_BACKWARDS:
            words = "one of another kind can't be watched, and such a script is not stopped"
            self.run.log.notice(f"{MANY_BACKWARDS} backwards, and no optimizer of torch.optim has stepped: {words}")

    def saw_grad(self, *args, **kwargs):
        """Return the kind of torch.autograd.grad(), which may be a part of a loss."""
        return "backward"

    def saw_scale(self, scaler, outputs):
        """Note the loss before a GradScaler multiplies it."""
        self.timeline.note("scaled", losses_of(outputs))

    def saw_scaler_step(self, scaler, optimizer, *args, **kwargs):
        """Note that a GradScaler is asked to step an optimizer, which it skips if gradients are not finite."""
        if optimizer is self.main_ref():
            self.timeline.note("due")

    def saw_scaler_update(self, scaler, *args, **kwargs):
        """End a step whose optimizer a GradScaler has skipped. It is a step without an update.

        Until an optimizer has stepped, it is not known which one ends a step, so what is skipped belongs to the step
        after it.
        """
        if has_note(self.timeline.notes, "due"):
            self.end_step()

    def saw_optimizer_begin(self, optimizer, *call):
        """Note that an optimizer begins its step."""
        entered = time.perf_counter()
        if is_elsewhere() or not self.is_watched(optimizer):
            return
        if optimizer is self.main_ref():  # another one still belongs to the last step
            self.run.end_script_if_over()
        self.run.optimizers[optimizer].add(learning_rates_of(optimizer))
        self.timeline.mark("update", entered)

    def is_watched(self, optimizer):
        """Return whether an optimizer is watched, from its first step with parameters on.

        Before, its groups may be empty, or its parameters have no shape, or be on meta.
        """
        if optimizer in self.run.optimizers:
            return True
        devices = [p.device for p in parameters_of(optimizers=[optimizer])]
        if not devices:
            return False
        self.run.optimizers[optimizer] = set()
        self.run.add_devices(devices)
        self.added.before_first_update(optimizer)
        return True

    def saw_optimizer_end(self, optimizer, *call):
        """Note a step of an optimizer.

        The first optimizer ends all steps of the script, as long as it goes on stepping. If it was deleted, or another
        one has stepped ten times without it, the other one ends the steps from then on.
        """
        if is_elsewhere() or optimizer not in self.run.optimizers:
            return
        is_in_backward = pytorch.backward_that_runs() != -1  # a hook in one may step an optimizer
        self.timeline.mark("backward" if is_in_backward else "rest")
        main, optimizer_ref = self.main_ref(), weakref.ref(optimizer)
        if is_captured():
            self.run.log.notice("its step is captured as a CUDA graph, and its replays can't be seen")
        elif main is optimizer or main is None:
            self.main_ref = optimizer_ref
            self.end_step()
        else:
            self.timeline.note("other")
            self.count_step_of_other(optimizer_ref)

    def count_step_of_other(self, optimizer_ref):
        """Count a step of an optimizer that ends no step. After many of them it is the main one."""
        self.others[optimizer_ref] += 1
        if self.others[optimizer_ref] == MOST_WITHOUT_MAIN:
            self.main_ref = optimizer_ref
            self.others.clear()
            self.run.add_up_lists()  # for what the script does in general
            self.run.begin_step()  # anew, since what ran so far was ten steps

    def saw_exit(self, status):
        """Report a script that ends by os._exit(), which then ends it. It may also do so after its end, by atexit."""
        if self.run.has_finished:
            return
        self.run.finish()
        self.run.log.notice(f"{self.run.script.title} ended by os._exit({status}) after {self.run.steps_taken} steps")

    def saw_exec(self, path, *args, **options):
        """Say that the script becomes another program, which is not watched. In a bench the row fails."""
        if not os.access(path, os.X_OK):  # os.execlp() tries all folders of PATH
            return
        path = os.fsdecode(path)
        self.run.log.notice(f"{self.run.script.title} becomes {path} by os.exec, and what that does is not watched")
        self.run.finish()
        if self.run.args.gate:
            self.run.guard.end_row(f"it becomes {path} by os.exec, and what that does can't be watched")

    def refuse_spawn(self, *args, **kwargs):
        """Refuse a script whose ranks run in processes that multiprocessing starts, where nobody watches them."""
        problem = "starts ranks by torch.multiprocessing.spawn, which can't be watched"
        remedy = "call its function directly, with the RANK and WORLD_SIZE of torchrun, or 0 and 1"
        self.run.reject(f"{self.run.script.title} {problem}: {remedy}")

    def end_step(self):
        """End a step, and begin the next one, if one is wanted."""
        self.others.clear()
        self.added.autocast.close()  # if the script calls no backward()
        self.run.end_step()


def kind_of_loading(*args):
    """Return what the time of a DataLoader counts as: an evaluation loads batches of its own."""
    return "data" if torch.is_grad_enabled() else "evaluation"


def learning_rates_of(optimizer):
    """Return what shows that a learning rate changes: those of all groups, a tuple.

    To read one from a card would wait for it, so there it is the version of its tensor.
    """
    rates = []
    for group in optimizer.param_groups:
        lr = group.get("lr")
        if torch.is_tensor(lr):
            lr = lr.item() if lr.is_cpu else pytorch.version_of(lr)
        rates.append(lr)
    return tuple(rates)
