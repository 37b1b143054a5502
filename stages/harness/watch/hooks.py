"""Lets PyTorch tell the watcher of each forward, backward and step. Nothing here asks a card anything.

Functions of PyTorch are replaced by ones that call the watcher first. torch.compile does not look into them: the hooks
of optimizers are kept from it, and the others are skipped where it works.
"""

import contextlib
import functools
import os
import threading
import time
import weakref

import torch
from torch import nn
from torch.amp import autocast_mode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .added import is_compiled
from .timeline import frame_of_script, place_of

LOOK_EVERY = 0.01  # seconds between two looks at the line that runs
SILENCE = 60  # seconds without a step that are told


def watch_pytorch(watcher):
    """Let PyTorch tell the watcher of what the script does, until the process ends."""
    for work in (tell_of_silence, look_at_own_code):
        threading.Thread(target=work, args=[watcher], daemon=True).start()
    os.register_at_fork(before=watcher.probe.give_up)
    watch_modules(watcher)
    habits, during = watcher.habits, watcher.clock.during
    call_first(DataLoader, "__iter__", habits.saw_loader, lambda: during("data"))
    call_first(_BaseDataLoaderIter, "__next__", habits.saw_batch, habits.during_wait)
    call_first(_BaseDataLoaderIter, "__next__", lambda batches: None, lambda: during("data"))
    call_first(torch.autograd, "backward", watcher.saw_backward, lambda: during("backward"))
    call_first(torch.amp.GradScaler, "scale", watcher.saw_scale)
    call_first(torch.autocast, "__enter__", watcher.saw_autocast)
    call_first(autocast_mode, "_enter_autocast", habits.saw_autocast)  # which runs outside of its traces
    call_first(torch.profiler.profile, "__init__", watcher.probe.saw_profiler)
    call_first(torch.multiprocessing, "spawn", watcher.refuse_spawn)
    call_first(torch.distributed, "init_process_group", watcher.saw_process_group)
    call_first(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", habits.saw_clipping)  # clip_grad_norm_() calls it
    call_first(torch.nn.utils, "clip_grads_with_norm_", habits.saw_clipping)
    # torch.compiler.disable would import all of torch.compile, and take a second, before the script's first line
    begins = torch._disable_dynamo(lambda optimizer, args, kwargs: watcher.saw_optimizer_begin(optimizer))
    ends = torch._disable_dynamo(lambda optimizer, args, kwargs: watcher.saw_optimizer_step(optimizer))
    register_optimizer_step_pre_hook(begins)
    register_optimizer_step_post_hook(ends)


def call_first(owner, name, note, block=contextlib.nullcontext):
    """Let a function of PyTorch call `note` with its own arguments first, and then run in a `with block()`."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def noted_call(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            return call(*args, **kwargs)
        note(*args, **kwargs)
        with block():
            return call(*args, **kwargs)

    setattr(owner, name, noted_call)


def watch_modules(watcher):
    """Tell of each call of an outermost module that has parameters. Others are a loss, or a transform of data.

    Where a part of it is compiled, torch.compile finds PyTorch's own call. Others keep ours, since each change of a
    method costs all classes below it a tenth of a millisecond.
    """
    call_module = nn.Module.__call__
    compiled = weakref.WeakKeyDictionary()  # {module: whether a part of it is}
    is_inside = False

    def watched_call(module, *args, **kwargs):
        nonlocal is_inside
        if torch.compiler.is_compiling() or is_inside or next(module.parameters(), None) is None:
            return call_module(module, *args, **kwargs)
        is_inside = True
        try:
            kind = watcher.saw_forward(module, args, kwargs)
            if module not in compiled:
                compiled[module] = any(is_compiled(part) for part in module.modules())
            if compiled[module]:
                nn.Module.__call__ = call_module
            with watcher.clock.during(kind):
                output = call_module(module, *args, **kwargs)
        finally:
            is_inside = False
            if compiled.get(module):
                nn.Module.__call__ = watched_call
        if kind == "forward" and watcher.techniques is None:
            watcher.habits.saw_output(output)
        return output

    nn.Module.__call__ = watched_call


def look_at_own_code(watcher):
    """Look now and then at the line that runs. This is a thread, as long as the process."""
    while True:
        time.sleep(LOOK_EVERY)
        if watcher.t0 and not watcher.is_between_steps:
            watcher.clock.look()


def tell_of_silence(watcher):
    """Tell now and then where a script is that shows no step. This is a thread, as long as the process."""
    while True:
        t0 = watcher.t0
        time.sleep(SILENCE)
        if watcher.t0 == t0 and not watcher.is_between_steps:
            place, _ = place_of(frame_of_script())
            watcher.log.notice(f"no step in the last {SILENCE} s: it is at {place}")
