"""Notes what a training script asks of torch while it runs: the calls of each step, and the optimizer's rates.

The loss alone does not tell whether a technique is at work: most must leave the loss as it was. fork_server.py starts
a Watch before the script and adds its notes, with what the script's own names hold at the end, to its answer.
"""

import functools

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from model import GPT


class Watch:
    """calls: what the script asked of torch, in words. rates: at each optimizer step, the groups' learning rates."""

    def __init__(self):
        self.calls = []
        self.rates = []

    def start(self):
        """From now on, note every call. Nothing that a call does or returns is changed."""
        self.note_calls_of(torch.optim.Optimizer, "zero_grad", words="zero_grad")
        self.note_calls_of(torch.amp.GradScaler, "scale", words="scaler.scale")
        self.note_calls_of(torch.amp.GradScaler, "unscale_", words="scaler.unscale_")
        self.note_calls_of(torch.amp.GradScaler, "step", words="scaler.step")
        self.note_calls_of(torch.amp.GradScaler, "update", words="scaler.update")
        self.note_calls_of(torch.Tensor, "backward", words="backward", with_dtype=True)
        self.note_clipping()
        register_module_forward_pre_hook(self.note_forward)
        register_optimizer_step_pre_hook(self.note_optimizer_step)

    def note_calls_of(self, owner, name, words, with_dtype=False):
        """Note these words whenever a method is called. with_dtype: and autocast's dtype, where autocast is on."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def noting(*args, **kwargs):
            self.calls.append(words + in_autocast() if with_dtype else words)
            return method(*args, **kwargs)

        setattr(owner, name, noting)

    def note_clipping(self):
        """Note the bound whenever the gradients' norm is clipped."""
        clip = torch.nn.utils.clip_grad_norm_

        @functools.wraps(clip)
        def noting(parameters, max_norm, *args, **kwargs):
            self.calls.append(f"clip at {max_norm}")
            return clip(parameters, max_norm, *args, **kwargs)

        torch.nn.utils.clip_grad_norm_ = noting

    def note_forward(self, module, inputs):
        """Note a forward of the whole model, and of DDP around it, which reads its flag then."""
        if isinstance(module, GPT):
            self.calls.append("forward" + in_autocast())
        if isinstance(module, DistributedDataParallel):
            self.calls.append("average" if module.require_backward_grad_sync else "do not average")

    def note_optimizer_step(self, optimizer, args, kwargs):
        """Note a step of the optimizer, and the rates that it takes it at."""
        self.calls.append("optimizer.step")
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def facts(self, scope):
        """The notes as JSON takes them, with what a script's names held when it ended; scope maps name to value."""
        return {
            "calls": self.calls,
            "rates": self.rates,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "groups": [facts_of_group(group) for group in scope["optimizer"].param_groups],
        }


def in_autocast():
    """ " in bfloat16" where autocast is on and takes that dtype; "" where it is off."""
    if not torch.is_autocast_enabled("cpu"):
        return ""
    return " in " + str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")


def facts_of_group(group):
    """The settings of one of the optimizer's groups, the number of its tensors, and how many parameters they hold."""
    settings = {name: group[name] for name in ("betas", "eps", "weight_decay", "fused")}
    sizes = [parameter.numel() for parameter in group["params"]]
    return settings | {"tensors": len(sizes), "parameters": sum(sizes)}
