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
import threading
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from .counting import signature_of
from .threads import is_elsewhere


def watch_pytorch(watcher):
    """Let PyTorch call the watcher at what the script does, until the process ends."""
    timeline, profiler = watcher.timeline, watcher.run.profiler
    threading.Thread(target=watcher.run.own_code.look_now_and_then, daemon=True).start()
    os.register_at_fork(before=profiler.give_up)
    watch_modules(watcher)
    for owner, name, note in (
        (dataloader.DataLoader, "__iter__", watcher.saw_loader),
        (dataloader._BaseDataLoaderIter, "__next__", watcher.saw_batch),
        (torch.autograd, "backward", watcher.saw_backward),
        (torch.autograd, "grad", lambda *args, **kwargs: "backward"),
        (torch.amp.GradScaler, "scale", watcher.saw_scale),
        (torch.amp.GradScaler, "step", watcher.saw_scaler_step),
        (torch.amp.GradScaler, "update", watcher.saw_scaler_update),
        (torch.autocast, "__enter__", watcher.saw_autocast),
        (torch.amp.autocast_mode, "_enter_autocast", watcher.note_autocast),  # while torch.compile traces
        (torch.profiler.profile, "start", profiler.saw_profiler),
        (torch.multiprocessing, "spawn", watcher.run.refuse_spawn),
        (torch.nn.utils.clip_grad, "_clip_grads_with_norm_", watcher.saw_clipping),  # by clip_grad_norm_()
    ):
        call_first(owner, name, note, timeline)
    register_optimizer_step_pre_hook(watcher.saw_optimizer_begin)
    register_optimizer_step_post_hook(watcher.saw_optimizer_end)


def call_first(owner, name, note, timeline):
    """Let a function of PyTorch call `note` first, with its own arguments.

    What `note` returns is what the time of the function counts as. If it returns None, that is as before.
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
        before = timeline.kind
        timeline.mark(kind, entered)
        try:
            return original(*args, **kwargs)
        finally:
            timeline.mark(before)

    setattr(owner, name, noted_call)


def watch_modules(watcher):
    """Let each call of an outermost module that has parameters call the watcher first.

    Losses and transforms have none. What a DataLoader calls to make a batch is left out, too.
    """
    call_module = torch.nn.Module.__call__
    timeline = watcher.timeline
    is_inside = False

    def watched_call(module, *args, **kwargs):
        nonlocal is_inside
        if is_inside or torch.compiler.is_compiling() or torch.jit.is_tracing() or is_elsewhere():
            return call_module(module, *args, **kwargs)
        entered = time.perf_counter()
        signature = signature_of(module)
        before = timeline.kind
        if signature is None or before == "data":
            return call_module(module, *args, **kwargs)
        timeline.mark(watcher.saw_forward(module, signature, args, kwargs), entered)
        is_inside = True
        try:
            return call_module(module, *args, **kwargs)
        finally:
            is_inside = False
            timeline.mark(before)

    torch.nn.Module.__call__ = watched_call
    # torch.compile has to skip watched_call() itself, and to compile what that calls. All models would share its code,
    # and of one code torch.compile makes eight graphs at most.
    compiler = torch._C._dynamo.eval_frame  # torch._dynamo would be imported, and take a second
    skip, default = compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT
    strategy = compiler._FrameExecStrategy(skip, default)  # what is done with its frame, and with those that it calls
    compiler.set_code_exec_strategy(watched_call.__code__, strategy)
