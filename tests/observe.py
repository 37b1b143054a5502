"""Observes what a training script asks of torch: the calls of each step, its batches, and the norms of its gradients.

The loss does not tell whether a technique is at work, since most must leave it as it was.
"""

import contextlib
import functools
import time

import pytest
import torch
import torch.distributed as dist
from fixtures.fake_card import FakeCard
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from data import TokenLoader
from model import GPT

PART = 1 / 64  # seconds that a batch, a forward, a backward and an update take each


class Compiled(torch.nn.Module):
    """Stands in for what torch.compile returns: it has the model as `_orig_mod`, too, and compiles nothing."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model

    def forward(self, *inputs):
        return self._orig_mod(*inputs)


class Observed:
    """What a script asked of torch."""

    def __init__(self, patch):
        self.patch = patch
        self.calls = []  # since the end of the last step
        self.steps = []  # the calls of each, in words and in order; the first one begins with the script
        self.batches = []  # (x, y) of each forward
        self.matmul_precision = None  # of float32, at the last forward
        self.rates = []  # of the groups, at each step of the optimizer
        self.norms = []  # of all gradients, at each step of the optimizer
        self.groups = []  # their settings at the last step, and as "tensors" how many each holds
        self.card = FakeCard()  # on whose clock each part of a step takes PART
        # filled in by whoever observes
        self.run = None  # the Ended of the script
        self.scales_loss = None  # whether its GradScaler is on

    def note_calls_of(self, owner, name, noting):
        """Call noting(*arguments) before each call of owner.name, which does and returns what it ever did."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def noted(*args, **kwargs):
            noting(*args, **kwargs)
            return original(*args, **kwargs)

        self.patch.setattr(owner, name, noted)

    def note_steps(self):
        """Let the calls of a step end when it waits for the device. What it prints then is a part of the next one."""

        def noted(device=None):
            self.steps.append(self.calls)
            self.calls = []
            self.card.synchronize()

        for device in (torch.cpu, torch.cuda):
            self.note_calls_of(device, "synchronize", noted)

    def note_batch(self, loader, device):
        """Let a batch take its time."""
        self.card.now += PART  # the CPU makes it

    def note_zero_grad(self, optimizer, set_to_none=True):
        self.calls.append("zero_grad" if set_to_none else "zero_grad that keeps the gradients")

    def note_attention(self, query, key, value, **options):
        self.calls.append(f"attention with {options}")

    def note_backward(self, loss):
        in_autocast = torch.is_autocast_enabled(loss.device.type)
        self.calls.append("backward in autocast" if in_autocast else "backward")
        self.card.queue(PART)

    def note_forward(self, module, *inputs):
        """Note the forward of a model, with the dtype of autocast if that is on for the model's device."""
        if isinstance(module, Compiled):
            self.calls.append("compiled")
        if isinstance(module, GPT):
            device = inputs[0].device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
            self.calls.append(f"forward in {dtype}".replace("torch.", ""))
            self.batches.append(inputs)
            self.card.queue(PART)
            self.matmul_precision = torch.get_float32_matmul_precision()

    def note_optimizer_step(self, optimizer):
        self.calls.append("optimizer.step")
        self.card.queue(PART)
        self.rates.append([group["lr"] for group in optimizer.param_groups])
        self.groups, gradients = [], []
        for group in optimizer.param_groups:
            self.groups.append(group | {"params": None, "tensors": len(group["params"])})
            gradients += [p.grad for p in group["params"]]
        self.norms.append(torch.nn.utils.get_total_norm(gradients).item())

    def compile(self, model, **options):
        """What torch.compile is in the meantime."""
        self.calls.append(f"compile {type(model).__name__} with {options}")
        return Compiled(model)

    def note_averages(self):
        """Note what ranks average. Of gradients DDP calls dist.all_reduce() in this hook alone."""
        init_ddp = DistributedDataParallel.__init__

        def init_ddp_with_hook(model, *args, **kwargs):
            init_ddp(model, *args, **kwargs)
            model.register_comm_hook(None, allreduce_hook)

        self.patch.setattr(DistributedDataParallel, "__init__", init_ddp_with_hook)
        self.note_calls_of(dist, "all_reduce", self.note_all_reduce)

    def note_all_reduce(self, tensor, *args, **options):
        self.calls.append(f"all-reduce of {tensor.nbytes} bytes")


@contextlib.contextmanager
def observing():
    """Give an Observed that notes every call until the block ends."""
    with pytest.MonkeyPatch.context() as patch:
        seen = Observed(patch)
        patch.setattr(torch, "compile", seen.compile)
        patch.setattr(time, "perf_counter", seen.card.clock)
        seen.note_steps()
        seen.note_calls_of(TokenLoader, "next_batch", seen.note_batch)
        seen.note_calls_of(torch.nn.Module, "__call__", seen.note_forward)
        seen.note_calls_of(torch.optim.AdamW, "step", seen.note_optimizer_step)
        seen.note_calls_of(torch.optim.Optimizer, "zero_grad", seen.note_zero_grad)
        seen.note_calls_of(F, "scaled_dot_product_attention", seen.note_attention)
        seen.note_calls_of(torch.Tensor, "backward", seen.note_backward)
        seen.note_averages()
        yield seen
