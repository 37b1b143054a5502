"""Adds techniques of the ladder to a script from outside, each where the script does not use it by itself."""

import contextlib
import weakref

import torch

from . import pytorch
from .modules import modules_of, unwrapped


class Added:
    """The techniques that are added to a script. names: "tf32", "bf16", "compile" and "fused", or some of them.

    "fp16" is for the speed alone: it scales no loss.
    """

    def __init__(self, names):
        self.names = names
        self.dtype = None
        if "bf16" in names:
            self.dtype = torch.bfloat16
        elif "fp16" in names:
            self.dtype = torch.float16
        self.autocast = contextlib.ExitStack()  # of ours, from a forward on until backward() closes it
        self.looked_at = weakref.WeakSet()  # modules: to look for compiled parts in all of one takes a millisecond
        if "tf32" in names:
            torch.set_float32_matmul_precision("high")

    def before_forward(self, module, device_type):
        """Compile the outermost module, and enter autocast. What follows up to backward() is in it, the loss, too.

        Around the module alone, autocast would leave a loss outside of the model with logits in 16 bits.
        """
        if "compile" in self.names and module not in self.looked_at:
            self.looked_at.add(module)
            if not any(pytorch.is_compiled(part) for part in modules_of(module)):
                pytorch.let_compiler_fail()
                compile_in_place(module)
        if self.dtype and not torch.is_autocast_enabled(device_type):
            self.autocast.enter_context(torch.autocast(device_type, self.dtype))

    def before_first_update(self, optimizer):
        """Choose the fused kernel of an optimizer that has one, where the script chooses none.

        A GradScaler leaves unscaling to an optimizer that was made with fused=True. This one was not, so the scaler
        unscales before the step, as Lightning needs it to clip.
        """
        if "fused" not in self.names:
            return
        for group in optimizer.param_groups:
            is_unset = "fused" in group and group["fused"] is None  # without it there is no such kernel
            chose_another = group.get("foreach") or group.get("differentiable")
            if is_unset and not chose_another and all(can_be_fused(p, optimizer) for p in group["params"]):
                group["fused"] = True


def can_be_fused(parameter, optimizer):
    """Return whether a fused kernel can update a parameter, by its gradient, its dtype and the device of its state."""
    step = optimizer.state.get(parameter, {}).get("step")  # of a checkpoint
    return has_fused_kernel(parameter) and (step is None or step.device == parameter.device)


def has_fused_kernel(parameter):
    """Return whether a fused kernel can take a parameter: of real numbers, without a sparse gradient.

    One that is not trained needs none.
    """
    if not parameter.requires_grad:
        return True
    return parameter.is_floating_point() and not (parameter.grad is not None and parameter.grad.is_sparse)


def compile_in_place(module):
    """Let calls of a module run compiled, as module.compile() does. For DDP, the module inside is compiled."""
    module = unwrapped(module)
    if is_of_pytorch(module):
        pytorch.compile_around(module)
    else:
        torch.nn.Module.compile(module)  # a script's class may have a compile() of another meaning, as Keras has


def can_compile_in_place(module):
    """Return whether MODULE.compile() compiles a module: it is no class of PyTorch's, and has no other compile()."""
    method = getattr(module, "compile", None)
    return getattr(method, "__func__", None) is torch.nn.Module.compile and not is_of_pytorch(module)


def is_of_pytorch(module):
    """Return whether the forward of a module is PyTorch's own code, which module.compile() leaves uncompiled."""
    return isinstance(module, torch.jit.ScriptModule) or str(type(module).forward.__module__).startswith("torch.")
