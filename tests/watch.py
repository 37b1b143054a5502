"""Notes what a training script asks of torch while it runs: the calls of each step, the optimizer's rates.

The loss does not tell whether a technique is at work, since most must leave it as it was. fork_server.py
starts a Watch before the script, and adds to its answer what was noted, and the optimizer's settings.
"""

import functools

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from model import GPT


class Watch:
    """calls: what the script asked of torch, in words. rates: those of each group at each optimizer step."""

    def __init__(self):
        self.calls = []
        self.rates = []

    def start(self):
        """From now on, note every call. Nothing that a call does or returns is changed."""
        self.note_calls_of(torch.optim.Optimizer, "zero_grad", words="zero_grad")
        self.note_calls_of(torch.Tensor, "backward", words="backward")
        self.note_calls_of(torch.amp.GradScaler, "scale", words="scaler.scale")
        self.note_calls_of(torch.amp.GradScaler, "unscale_", words="scaler.unscale_")
        self.note_calls_of(torch.amp.GradScaler, "step", words="scaler.step")
        self.note_calls_of(torch.amp.GradScaler, "update", words="scaler.update")
        self.note_clipping()
        register_module_forward_pre_hook(self.note_forward)
        register_optimizer_step_pre_hook(self.note_optimizer_step)

    def note(self, words):
        """Note a call, and the dtype of autocast where it is made inside of one."""
        if torch.is_autocast_enabled("cpu"):
            dtype = str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
            words = f"{words} in {dtype}"
        self.calls.append(words)

    def note_calls_of(self, owner, name, words):
        """Note these words whenever a method is called."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def noting(*args, **kwargs):
            self.note(words)
            return method(*args, **kwargs)

        setattr(owner, name, noting)

    def note_clipping(self):
        """Note the bound whenever the gradients' norm is clipped."""
        clip = torch.nn.utils.clip_grad_norm_

        @functools.wraps(clip)
        def noting(parameters, max_norm, *args, **kwargs):
            self.note(f"clip at {max_norm}")
            return clip(parameters, max_norm, *args, **kwargs)

        torch.nn.utils.clip_grad_norm_ = noting

    def note_all_reduces(self):
        """Note every all-reduce, with the bytes that a rank gives. Those of DDP are left out, for pretended ranks."""
        all_reduce, init = dist.all_reduce, DistributedDataParallel.__init__

        @functools.wraps(all_reduce)
        def noting_all_reduce(tensor, *args, **kwargs):
            self.calls.append(f"all-reduce of {tensor.nbytes} bytes")
            return all_reduce(tensor, *args, **kwargs)

        @functools.wraps(init)
        def init_with_hook(model, *args, **kwargs):
            init(model, *args, **kwargs)
            model.register_comm_hook(None, self.note_bucket)

        dist.all_reduce = noting_all_reduce
        DistributedDataParallel.__init__ = init_with_hook

    def note_bucket(self, state, bucket):
        """What DDP calls in place of the all-reduce of a bucket of gradients; a future of their average."""
        self.calls.append(f"all-reduce of {bucket.buffer().nbytes} bytes")
        average = torch.futures.Future()
        average.set_result(bucket.buffer())
        return average

    def note_forward(self, module, inputs):
        """Note a forward of the model; before it, whether DDP is to average the gradients, which it reads now."""
        if isinstance(module, DistributedDataParallel):
            self.calls.append("average" if module.require_backward_grad_sync else "do not average")
        if isinstance(module, GPT):
            self.note("forward")

    def note_optimizer_step(self, optimizer, args, kwargs):
        """Note a step of the optimizer, and the rates at which it is taken."""
        self.note("optimizer.step")
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def facts(self, scope):
        """The notes, and the optimizer's settings, as JSON takes them; scope: {name: value} of the script."""
        return {
            "calls": self.calls,
            "rates": self.rates,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "groups": [facts_of_group(group) for group in scope["optimizer"].param_groups],
        }


def facts_of_group(group):
    """The settings of one group of the optimizer, and the number of its tensors and of their parameters."""
    settings = {name: group[name] for name in ("betas", "eps", "weight_decay", "fused")}
    sizes = [parameter.numel() for parameter in group["params"]]
    return settings | {"tensors": len(sizes), "parameters": sum(sizes)}
