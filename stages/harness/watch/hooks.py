"""Lets PyTorch call the watcher at each forward, backward and step. Nothing here asks a card anything.

Functions of PyTorch are replaced by ones that call the watcher first. torch.compile does not look into them: the hooks
of optimizers are kept from it, and the others are skipped while it traces. What other threads and processes of the
script do is ignored.
"""

import functools
import os
import random
import threading
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from .counting import reader_of
from .timeline import is_elsewhere

LOOK_EVERY = 0.01  # seconds between two looks at the line that runs, on average


def watch_pytorch(watcher):
    """Let PyTorch call the watcher at what the script does, until the process ends."""
    threading.Thread(target=look_at_own_code, args=[watcher], daemon=True).start()
    os.register_at_fork(before=watcher.profiler.give_up)
    watch_modules(watcher)
    habits, clock = watcher.habits, watcher.clock
    call_first(dataloader.DataLoader, "__iter__", None, clock, "data")
    call_first(dataloader._BaseDataLoaderIter, "__next__", habits.saw_batch, clock, "data")
    call_first(torch.autograd, "backward", watcher.saw_backward, clock, "backward")
    call_first(torch.autograd, "grad", None, clock, "backward")
    call_first(torch.amp.GradScaler, "scale", watcher.saw_scale)
    call_first(torch.amp.GradScaler, "step", watcher.saw_scaler_step)
    call_first(torch.amp.GradScaler, "update", watcher.saw_scaler_update)
    call_first(torch.autocast, "__enter__", watcher.saw_autocast)
    call_first(torch.amp.autocast_mode, "_enter_autocast", habits.saw_autocast)  # which runs outside of its traces
    call_first(torch.profiler.profile, "start", watcher.profiler.saw_profiler)
    call_first(torch.multiprocessing, "spawn", watcher.refuse_spawn)
    call_first(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", habits.saw_clipping)  # clip_grad_norm_() calls it
    register_optimizer_step_pre_hook(watcher.saw_optimizer_begin)
    register_optimizer_step_post_hook(watcher.saw_optimizer_end)


def call_first(owner, name, note, clock=None, kind=None):
    """Let a function of PyTorch call `note`, where that is not None, with its own arguments first.

    kind: what its time counts as on this clock, a StepClock, or None where it counts as what was open before.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted_call(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling() or is_elsewhere():
            return original(*args, **kwargs)
        if note:
            note(*args, **kwargs)
        # while torch.export, for example, traces, our clock would get into its graph
        if kind is None or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        counted_as = kind
        if kind == "data" and not torch.is_grad_enabled():
            counted_as = "evaluation"  # which loads batches of its own
        clock.begin(counted_as)
        try:
            return original(*args, **kwargs)
        finally:
            clock.end(counted_as)

    setattr(owner, name, noted_call)


def watch_modules(watcher):
    """Let each call of an outermost module that has parameters call the watcher first.

    Losses and transforms have none. What a DataLoader calls to make a batch is left out, too.

    torch.compile has to skip watched_call() itself, and to compile what that calls. All models would share its
    code, and of one code torch.compile makes eight graphs at most.

    A script may call small modules a thousand times in a step. So what this does is short, and not on the clock.
    """
    call_module = torch.nn.Module.__call__
    clock = watcher.clock
    is_inside = False

    def watched_call(module, *args, **kwargs):
        nonlocal is_inside
        if is_inside or torch.compiler.is_compiling() or torch.jit.is_tracing() or is_elsewhere():
            return call_module(module, *args, **kwargs)
        began = time.perf_counter()
        reader = reader_of(module)
        if reader is None or clock.kinds[-1] == "data":
            return call_module(module, *args, **kwargs)
        is_inside = True
        try:
            kind = watcher.saw_forward(module, reader, args, kwargs)
            clock.leave_out(began)
            clock.begin(kind)
            try:
                return call_module(module, *args, **kwargs)
            finally:
                clock.end(kind)
        finally:
            is_inside = False

    torch.nn.Module.__call__ = watched_call
    compiler = torch._C._dynamo.eval_frame  # torch._dynamo would be imported, and take a second
    # what is done with a frame, and with those that it calls
    strategy = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT)
    compiler.set_code_exec_strategy(watched_call.__code__, strategy)


def look_at_own_code(watcher):
    """Look now and then at the line that runs. This is a thread, as long as the process.

    The looks are irregular, so that they do not meet the same line of a regular loop each time.
    """
    own_random = random.Random()  # the script's own is seeded
    while True:
        watcher.clock.own_code_runs.wait()  # looks at other times would take the interpreter from a forward
        time.sleep(LOOK_EVERY * own_random.uniform(0.5, 1.5))
        watcher.clock.look()
