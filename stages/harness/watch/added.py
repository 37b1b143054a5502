"""Adds techniques of the ladder to a script from outside, each where the script does not use it by itself."""

import contextlib
import functools
import inspect

import torch
from torch.nn.parallel import DistributedDataParallel


class Added:
    """The techniques that are added to a script.

    names: "tf32", "bf16", "compile" and "fused", or some of them. failed: {name: why it was left out again}.
    """

    def __init__(self, names):
        self.names = names
        self.failed = {}
        self.autocast = None  # while one of ours is entered
        if "tf32" in names:
            torch.set_float32_matmul_precision("high")
        if "fused" in names:
            for optimizer in vars(torch.optim).values():
                if inspect.isclass(optimizer) and "fused" in inspect.signature(optimizer.__init__).parameters:
                    optimizer.__init__ = with_fused_kernel(optimizer.__init__)

    def before_forward(self, module):
        """Compile the outermost module, and enter autocast. What follows up to backward() is in it, the loss, too.

        Around the module alone, autocast would leave a loss outside of the model with logits in 16 bits.
        """
        if "compile" in self.names and not any(is_compiled(part) for part in module.modules()):
            torch._dynamo.config.suppress_errors = True  # what can't be compiled runs as it is
            compile_in_place(module)
        if "bf16" in self.names:
            device_type = next(module.parameters()).device.type
            if not torch.is_autocast_enabled(device_type):
                self.autocast = torch.autocast(device_type, torch.bfloat16)
                self.autocast.__enter__()

    def leave_autocast(self):
        """Leave the autocast that before_forward() entered."""
        if self.autocast:
            self.autocast.__exit__(None, None, None)
            self.autocast = None

    def before_update(self, optimizer):
        """Go on without a fused kernel where gradients are sparse, since it fails with these."""
        if not getattr(optimizer, "is_fused_by_watch", False):
            return
        optimizer.is_fused_by_watch = False  # the first step tells
        for group in optimizer.param_groups:
            if any(p.grad is not None and p.grad.is_sparse for p in group["params"]):
                group["fused"] = None
                self.failed["fused"] = "PyTorch has no fused kernel for sparse gradients"


def with_fused_kernel(make):
    """Return the __init__ of an optimizer, with fused=True where the script chooses no kernel and PyTorch has that."""

    @functools.wraps(make)
    def make_fused(optimizer, params, *args, **kwargs):
        params = list(params)  # it may be a generator, and is needed twice
        if kwargs.get("fused") is None:
            with contextlib.suppress(RuntimeError):  # no fused kernel for these parameters, or beside foreach=True
                make(optimizer, params, *args, **kwargs | {"fused": True})
                optimizer.is_fused_by_watch = True
                # Let a GradScaler unscale gradients before the step, as without fused. Lightning clips no others.
                optimizer._step_supports_amp_scaling = False
                return
        make(optimizer, params, *args, **kwargs)

    return make_fused


def compile_in_place(module):
    """Let calls of a module run compiled, as module.compile() does. Of DDP it is what that wraps."""
    if isinstance(module, DistributedDataParallel):
        module = module.module
    if not type(module).__module__.startswith("torch.nn.modules"):
        module.compile()
        return
    # torch.compile looks at no function in PyTorch's own files, as of an nn.Sequential, but at what one of ours calls
    call = module._call_impl

    def call_module(*args, **kwargs):
        return call(*args, **kwargs)

    module._compiled_call_impl = torch.compile(call_module)


def is_compiled(module):
    """Tell whether torch.compile() or module.compile() was called on a module."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
