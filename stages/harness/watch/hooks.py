"""Lets PyTorch call the watcher at each forward, backward and step.

Functions of PyTorch are replaced by ones that call the watcher first. torch.compile does not look into them: the hooks
of optimizers are kept from it, and the others are skipped while it traces. What other threads and processes of the
script do is ignored.

What the watcher does at a forward, a backward, an update and a batch is not on the clock of a CPU, and what it does
elsewhere takes a microsecond. But all of it makes the script take longer, so it is short: a script may call a small
module a thousand times in a step.
"""

import _thread
import functools
import os
import sys
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from . import pytorch
from .threads import is_elsewhere
from .watcher import kind_of_loading


def watch_pytorch(watcher):
    """Let PyTorch call the watcher at what the script does, until the process ends."""
    run, timeline, guard = watcher.run, watcher.timeline, watcher.run.guard
    if not run.args.gate:  # a bench prints no lines of a script, and the looks would slow its short steps
        look_now_and_then = guard.around(run.own_code.look_now_and_then, "its own code")
        _thread.start_new_thread(look_now_and_then, ())  # threading would list it: a script may join all
    os.register_at_fork(before=run.profiler.give_up)
    mark = guard.around(timeline.mark, "its time")
    watch_modules(timeline, guard.around(watcher.saw_forward, "its modules"), mark)
    for owner, name, hook, what in hooks_of(watcher):
        call_first(owner, name, guard.around(hook, what), timeline, mark)
    # torch.compile would look into these, and skips the others while it traces
    begin = guard.around(watcher.saw_optimizer_begin, "its steps", is_vital=True)
    end = guard.around(watcher.saw_optimizer_end, "its steps", is_vital=True)
    register_optimizer_step_pre_hook(pytorch.keep_from_compiler(begin))
    register_optimizer_step_post_hook(pytorch.keep_from_compiler(end))


def hooks_of(watcher):
    """Return [(owner, name of its function, what is called first, what is not seen if that fails)]."""
    saw_profiler = watcher.run.profiler.saw_profiler
    return [
        (DataLoader, "__iter__", kind_of_loading, "its DataLoaders"),
        (pytorch.DataLoaderIterator, "__next__", watcher.saw_batch, "its DataLoaders"),
        (torch.autograd, "backward", watcher.saw_backward, "its losses"),
        (torch.autograd, "grad", watcher.saw_grad, "its losses"),
        (torch.amp.GradScaler, "scale", watcher.saw_scale, "its GradScaler"),
        (torch.amp.GradScaler, "step", watcher.saw_scaler_step, "its GradScaler"),
        (torch.amp.GradScaler, "update", watcher.saw_scaler_update, "its GradScaler"),
        (torch.autocast, "__enter__", watcher.saw_autocast, "its autocast"),
        (*pytorch.CLIPPING, watcher.saw_clipping, "its clipping"),
        (torch.nn.utils, "clip_grads_with_norm_", watcher.saw_clipping, "its clipping"),
        (torch.nn.utils, "clip_grad_value_", watcher.saw_clipping_by_value, "its clipping"),
        (torch.nn.utils.clip_grad, "clip_grad_value_", watcher.saw_clipping_by_value, "its clipping"),
        (torch.profiler.profile, "start", saw_profiler, "its profiler"),
        (torch.autograd.profiler.profile, "__enter__", saw_profiler, "its profiler"),
        (torch.multiprocessing, "spawn", watcher.refuse_spawn, "its ranks"),
        (torch.multiprocessing, "start_processes", watcher.refuse_spawn, "its ranks"),
        (os, "_exit", watcher.saw_exit, "its end"),
        (os, "execv", watcher.saw_exec, "its end"),
        (os, "execve", watcher.saw_exec, "its end"),
    ]


def call_first(owner, name, hook, timeline, mark):
    """Let a function of PyTorch call a hook first, with its own arguments.

    What the hook returns is what the time of the function counts as. If it returns None, that is as before. Both the
    hook and mark, the timeline's, are guarded.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted_call(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling() or is_elsewhere():  # the former is True where torch.compile reads this
            return original(*args, **kwargs)
        entered = time.perf_counter()
        kind = hook(*args, **kwargs)
        if kind is None or torch.compiler.is_compiling():  # the latter also in torch.export, whose graph gets no clock
            return original(*args, **kwargs)
        before = timeline.kind
        mark(kind, entered)
        try:
            return original(*args, **kwargs)
        finally:
            mark(before)

    pytorch.keep_in_torchscript(noted_call, original)
    setattr(owner, name, noted_call)


def watch_modules(timeline, saw_forward, mark):
    """Let each call of an outermost module call saw_forward() first, as call_first() does for a function."""
    call_module = torch.nn.Module.__call__
    is_inside = False

    def watched_call(module, /, *args, **kwargs):
        nonlocal is_inside
        if is_inside or torch.compiler.is_compiling() or torch.jit.is_tracing() or is_elsewhere():
            return call_module(module, *args, **kwargs)
        entered = time.perf_counter()
        kind = saw_forward(module, args, kwargs)
        if kind is None:
            return call_module(module, *args, **kwargs)
        before = timeline.kind
        mark(kind, entered)
        is_inside = True
        try:
            return call_module(module, *args, **kwargs)
        finally:
            is_inside = False
            mark(before)

    torch.nn.Module.__call__ = watched_call
    sys.setrecursionlimit(sys.getrecursionlimit() * 4 // 3)  # a call has four frames in place of three
    # All models would share its code, and of one code torch.compile makes eight graphs at most. That is why it does
    # itself what call_first() does, too.
    pytorch.skip_in_compiler(watched_call)
