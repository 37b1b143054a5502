"""The private names of PyTorch and of Python that watch.py needs, each with the public way that is missing.

tests/test_pytorch.py holds that all are there in the installed version. One more is in machine.py, which stages load:
torch.cpu._is_avx512_bf16_supported().
"""

import atexit
import contextlib
import runpy
import sys
import threading

import torch
from torch.utils.data import dataloader

# What is called where nothing public is: a DataLoader's next batch, and the half of clip_grad_norm_() that clips.
# Scripts import that function itself by its name, and so hold the original.
DataLoaderIterator = dataloader._BaseDataLoaderIter
CLIPPING = (torch.nn.utils.clip_grad, "_clip_grads_with_norm_")

# torch.compiler.disable() would import all of torch.compile, and take a second, before the script's first line.
keep_from_compiler = torch._disable_dynamo

backward_that_runs = torch._C._current_graph_task_id  # the number of a backward, or -1 outside of all
nodes_made = torch._C._autograd._get_sequence_nr  # how many operations of forwards have made a node for the backward
is_profiled = torch.autograd._profiler_enabled  # whether any profiler is at work, the script's own, too

ThreadOfOthers = threading._DummyThread  # what Python takes a thread for that it did not start, as those of autograd
frames_of_threads = sys._current_frames  # traceback and inspect know only the thread that asks
run_atexit = atexit._run_exitfuncs  # what the script gave to atexit; public only as the end of the process
module_details = runpy._get_module_details  # (name, spec, code) for `-m`; run_module() runs it at once


def skip_in_compiler(function):
    """Let torch.compile skip a function itself, and compile what it calls. torch.compiler.disable() skips both."""
    compiler = torch._C._dynamo.eval_frame
    skip, default = compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT
    strategy = compiler._FrameExecStrategy(skip, default)  # what is done with its frame, and with those that it calls
    compiler.set_code_exec_strategy(function.__code__, strategy)


def let_compiler_fail():
    """Let what torch.compile can't compile run as it is. Its documentation names this flag, and no public one."""
    torch._dynamo.config.suppress_errors = True


def lock_of_compiler():
    """Return the lock that torch.compile holds while it works. Nothing public says that it works in another thread."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")  # which the first optimizer imports
    return getattr(dynamo, "compile_lock", contextlib.nullcontext())


def compiled_graphs():
    """Return how many graphs torch.compile has made so far in this process, which only its own counters know."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # which the first optimizer imports
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def is_compiled(module):
    """Return whether torch.compile() or module.compile() was called on a module. Each leaves a private mark alone."""
    return is_around_module(module) or module._compiled_call_impl is not None


def is_around_module(module):
    """Return whether a module is what torch.compile() made, around another one. Nothing public tells it."""
    return hasattr(module, "_orig_mod")


def compile_around(module):
    """Compile a module whose forward is PyTorch's own code, for example an nn.Sequential.

    module.compile() would do nothing, since torch.compile skips PyTorch's code, so a function of ours is compiled.
    """
    call = module._call_impl

    def call_module(*args, **kwargs):
        """Call a module of PyTorch's own."""
        return call(*args, **kwargs)

    module._compiled_call_impl = torch.compile(call_module)


def version_of(tensor):
    """Return how often a tensor was changed in place; 0 for one of inference mode, which counts no changes."""
    return 0 if tensor.is_inference() else tensor._version


def hides_a_dimension(tensor):
    """Return whether torch.func.vmap hides a dimension of a tensor. torch.func has no word for it."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):  # grad() inside of vmap() wraps it once more
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def saved_by(node, name):
    """Return what an operation saved for its backward, "self" or "other". PyTorch lists no such names.

    None if it saved nothing, or if a hook would unpack it, which may run a forward again, as in activation
    checkpointing.
    """
    saved = getattr(node, f"_raw_saved_{name}", None)
    return saved.data if saved is not None and saved.unpack_hook is None else None


def keep_in_torchscript(function, original):
    """Let TorchScript take a function for the one that it replaces, as torch.autograd.grad, which it knows by id."""
    builtin = torch.jit._builtins._find_builtin(original)
    if builtin:
        torch.jit._builtins._register_builtin(function, builtin)


def autocast_is_enabled(autocast):
    """Return whether an autocast that is entered does anything: enabled=False is kept in a private attribute alone."""
    return autocast._enabled


def workers_of(iterator):
    """Return the num_workers of a DataLoader, of which its iterator has no public copy."""
    return iterator._num_workers
