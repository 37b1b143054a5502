"""Watches what a training script asks of torch: the calls of each step, and where each copy goes.

The loss does not tell whether a technique is at work, since most must leave it as it was.
"""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from model import GPT


class Compiled(torch.nn.Module):
    """Stands for what torch.compile returns: a module that has the model under the same name, and compiles nothing."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model

    def forward(self, *inputs):
        return self._orig_mod(*inputs)


class Watch:
    """What a script asked of torch.

    calls: in words, in order. devices: what each .to() of the model and of a batch was given. rates: of each group of
    the optimizer at each of its steps. matmul_precision: of float32, at the last forward.
    """

    def __init__(self, patch):
        self.patch = patch
        self.calls = []
        self.devices = []
        self.rates = []
        self.matmul_precision = None

    def note(self, words):
        """Note a call, and the dtype of autocast where it is made inside of one."""
        if torch.is_autocast_enabled("cpu"):
            dtype = str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
            words = f"{words} in {dtype}"
        self.calls.append(words)

    def note_calls_of(self, owner, name, noting):
        """Call noting(*arguments) before each call of owner.name, which does and returns what it ever did."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def noted(*args, **kwargs):
            noting(*args, **kwargs)
            return original(*args, **kwargs)

        self.patch.setattr(owner, name, noted)

    def note_words_at(self, owner, name, words):
        """Note these words at each call of owner.name."""
        self.note_calls_of(owner, name, lambda *args, **kwargs: self.note(words))

    def note_zero_grad(self, optimizer, set_to_none=True):
        self.note("zero_grad" if set_to_none else "zero_grad that keeps the gradients")

    def note_clipping(self):
        """Note what is clipped, in which norm and to what."""
        clip = torch.nn.utils.clip_grad_norm_

        def noted(parameters, max_norm, norm_type=2.0, **options):
            parameters = list(parameters)  # a generator can be read once
            self.note(f"clip the {norm_type:g}-norm of {len(parameters)} gradients to {max_norm:g}")
            return clip(parameters, max_norm, norm_type, **options)

        self.patch.setattr(torch.nn.utils, "clip_grad_norm_", noted)

    def note_model_to(self, model, device):
        self.devices.append(device)
        self.note("model to its device")

    def note_batch_to(self, tensor, *args, non_blocking=False, **kwargs):
        if tensor.dtype == torch.int64 and tensor.dim() == 2:
            self.devices.append(args[0])
            self.note("copy without waiting" if non_blocking else "copy")

    def note_forward(self, module, inputs):
        """Note the forward of a model; of DDP, whether it is to average the gradients, which it reads now."""
        if isinstance(module, DistributedDataParallel):
            self.note("average" if module.require_backward_grad_sync else "do not average")
        if isinstance(module, Compiled):
            self.note("compiled")
        if isinstance(module, GPT):
            self.note("forward")
            self.matmul_precision = torch.get_float32_matmul_precision()

    def note_optimizer_step(self, optimizer, args, kwargs):
        self.note("optimizer.step")
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def compile(self, model):
        """What torch.compile is in the meantime."""
        self.note(f"compile {type(model).__name__}")
        return Compiled(model)

    def pretend_ranks(self, world_size):
        """Let this process be rank 0 of so many. What is sent to the others, which are not there, is noted."""
        init_process_group, init_ddp = dist.init_process_group, DistributedDataParallel.__init__

        def init_fake_group(backend):
            init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())

        def init_ddp_with_hook(model, *args, **kwargs):
            init_ddp(model, *args, **kwargs)
            model.register_comm_hook(None, self.average_bucket)

        self.patch.setenv("RANK", "0")
        self.patch.setenv("WORLD_SIZE", str(world_size))
        self.patch.setattr(dist, "init_process_group", init_fake_group)
        self.patch.setattr(DistributedDataParallel, "__init__", init_ddp_with_hook)
        self.note_calls_of(dist, "all_reduce", self.note_all_reduce)

    def note_all_reduce(self, tensor):
        self.calls.append(f"all-reduce of {tensor.nbytes} bytes")

    def average_bucket(self, state, bucket):
        """What DDP calls in place of the all-reduce of a bucket of gradients; a future of their average."""
        self.note_all_reduce(bucket.buffer())
        average = torch.futures.Future()
        average.set_result(bucket.buffer())
        return average


@contextlib.contextmanager
def watching(ranks=None):
    """Give a Watch that notes every call until the block ends. ranks: how many to pretend, or None for none."""
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        patch.setattr(torch, "compile", watch.compile)
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)  # as the batches are beside a card
        watch.note_calls_of(torch.nn.Module, "to", watch.note_model_to)
        watch.note_calls_of(torch.Tensor, "to", watch.note_batch_to)
        watch.note_calls_of(torch.optim.Optimizer, "zero_grad", watch.note_zero_grad)
        watch.note_words_at(torch.Tensor, "backward", "backward")
        for name in ("scale", "unscale_", "step", "update"):
            watch.note_words_at(torch.amp.GradScaler, name, f"scaler.{name}")
        watch.note_clipping()
        if ranks:
            watch.pretend_ranks(ranks)
        hooks = [
            register_module_forward_pre_hook(watch.note_forward),
            register_optimizer_step_pre_hook(watch.note_optimizer_step),
        ]
        try:
            yield watch
        finally:
            for hook in hooks:
                hook.remove()
