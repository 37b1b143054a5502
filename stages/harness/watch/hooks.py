"""Lets PyTorch call the watcher at each forward, backward and step, which after the warm-up waits for no card.

Functions of PyTorch are replaced by ones that call the watcher first. torch.compile does not look into them: the hooks
of optimizers are kept from it, and the others are skipped while it traces. What other threads and processes of the
script do is ignored.

What the watcher does at a forward, a backward, an update and a batch is not on the clock of a CPU, and what it does
elsewhere takes a microsecond. But all of it makes the script take longer, so it is short: a script may call a small
module a thousand times in a step.
"""

import functools
import os
import random
import threading
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from .counting import signature_of
from .timeline import is_elsewhere

LOOK_EVERY = 0.01  # seconds between two looks at the line that runs, on average


def watch_pytorch(watcher):
    """Let PyTorch call the watcher at what the script does, until the process ends."""
    clock, profiler = watcher.clock, watcher.profiler
    threading.Thread(target=look_at_own_code, args=[clock], daemon=True).start()
    os.register_at_fork(before=profiler.give_up)
    watch_modules(watcher)
    call_first(dataloader.DataLoader, "__iter__", watcher.saw_loader, clock)
    call_first(dataloader._BaseDataLoaderIter, "__next__", watcher.saw_batch, clock)
    call_first(torch.autograd, "backward", watcher.saw_backward, clock)
    call_first(torch.autograd, "grad", lambda *args, **kwargs: "backward", clock)
    call_first(torch.amp.GradScaler, "scale", watcher.saw_scale, clock)
    call_first(torch.amp.GradScaler, "step", watcher.saw_scaler_step, clock)
    call_first(torch.amp.GradScaler, "update", watcher.saw_scaler_update, clock)
    call_first(torch.autocast, "__enter__", watcher.saw_autocast, clock)
    call_first(torch.amp.autocast_mode, "_enter_autocast", watcher.note_autocast, clock)  # while torch.compile traces
    call_first(torch.profiler.profile, "start", profiler.saw_profiler, clock)
    call_first(torch.multiprocessing, "spawn", watcher.refuse_spawn, clock)
    call_first(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", watcher.saw_clipping, clock)  # by clip_grad_norm_()
    register_optimizer_step_pre_hook(watcher.saw_optimizer_begin)
    register_optimizer_step_post_hook(watcher.saw_optimizer_end)


def call_first(owner, name, note, clock):
    """Let a function of PyTorch call `note` first, with its own arguments.

    What `note` returns is what the time of the function counts as on this clock, a StepClock. If it returns None, the
    time counts as what was open before.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted_call(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling() or is_elsewhere():  # the former is True where torch.compile reads this
            return original(*args, **kwargs)
        entered = time.perf_counter()
        kind = note(*args, **kwargs)
        # is_compiling() is also True while torch.export, for example, runs this: the clock would get into its graph
        if kind is None or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        clock.begin(kind, entered)
        try:
            return original(*args, **kwargs)
        finally:
            clock.end(kind)

    setattr(owner, name, noted_call)


def watch_modules(watcher):
    """Let each call of an outermost module that has parameters call the watcher first.

    Losses and transforms have none. What a DataLoader calls to make a batch is left out, too.
    """
    call_module = torch.nn.Module.__call__
    clock = watcher.clock
    is_inside = False

    def watched_call(module, *args, **kwargs):
        nonlocal is_inside
        if is_inside or torch.compiler.is_compiling() or torch.jit.is_tracing() or is_elsewhere():
            return call_module(module, *args, **kwargs)
        entered = time.perf_counter()
        signature = signature_of(module)
        if signature is None or clock.kinds[-1] == "data":
            return call_module(module, *args, **kwargs)
        kind = watcher.saw_forward(module, signature, args, kwargs)
        clock.begin(kind, entered)
        is_inside = True
        try:
            return call_module(module, *args, **kwargs)
        finally:
            is_inside = False
            clock.end(kind)

    torch.nn.Module.__call__ = watched_call
    # torch.compile has to skip watched_call() itself, and to compile what that calls. All models would share its code,
    # and of one code torch.compile makes eight graphs at most.
    compiler = torch._C._dynamo.eval_frame  # torch._dynamo would be imported, and take a second
    skip, default = compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT
    strategy = compiler._FrameExecStrategy(skip, default)  # what is done with its frame, and with those that it calls
    compiler.set_code_exec_strategy(watched_call.__code__, strategy)


def look_at_own_code(clock):
    """Look now and then at the line that runs. This is a thread, as long as the process.

    The looks are irregular, so that they do not meet the same line of a regular loop each time.
    """
    own_random = random.Random()  # the script's own is seeded
    while True:
        clock.own_code_runs.wait()  # looks at other times would take the interpreter from a forward
        time.sleep(LOOK_EVERY * own_random.uniform(0.5, 1.5))
        clock.look()
