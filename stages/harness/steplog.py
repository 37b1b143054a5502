"""The clock of a stage, and what it does at its end."""

import math
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import load_tokens

from . import ladder, machine, rates
from .arithmetic import shape_of
from .common import refuse
from .flags import settings_of
from .log import finite_or_none, header_of
from .stepprofile import StepProfile
from .weights import held_out_ids, held_out_loss, save


class StepLog:
    """Times whole steps, prints a line for each and writes the record. Rank 0 alone prints.

    A step is on the clock from start() to step(), and the device is synchronized at both ends. Where the bench leads
    the run, start() waits for its request, and so does finish() after the last step.
    """

    def __init__(self, args, model, loader, *, tokens_per_step):
        """Begin the record.

        args: what parse_args() returned. model: a GPT, as it is or inside of torch.compile or DistributedDataParallel.
        loader: a TokenLoader, whose text is named in the record. tokens_per_step: of all ranks and micro-batches.
        """
        self.args = args
        self.device = args.device
        self.log = args.log
        self.model = unwrapped(model)
        self.is_compiled = any(isinstance(part, torch._dynamo.OptimizedModule) for part in model.modules())
        self.corpus = loader.corpus
        self.tokens_per_step = tokens_per_step
        self.t0 = None  # when the step began, where one has
        self.profiler = None
        self.profile = None
        self.held_out = None  # ids, where the loss on them is asked for
        if args.eval and machine.is_rank_0():  # loaded at once, since at its end a refusal would come too late
            self.held_out = held_out_ids(load_tokens(self.corpus.source, split="val"), self.model.config)
        shape = shape_of(self.model, args.seq_len)
        parameters = sum(p.numel() for p in self.model.parameters())
        settings = settings_of(args) | {"corpus": self.corpus.name}
        header = header_of(args.script.stem, self.device, settings, shape, parameters, args.fallbacks)
        self.log.begin(args.title, header, self.device, tokens_per_step)

    def start(self):
        """Start the clock of a step. Where the bench leads, wait for it first, and end here where it wants no more."""
        if not self.log.wait_for_request():
            self.write_summary()
            settle()
            if dist.is_initialized():
                dist.destroy_process_group()
            sys.exit()
        if self.args.profile and len(self.log.steps) + 1 == self.args.steps:
            self.profiler = torch.profiler.profile(acc_events=True)  # without acc_events torch 2.11 warns
            self.profiler.start()
        machine.synchronize(self.device)
        self.t0 = time.perf_counter()

    def step(self, loss, **figures):
        """End a step. Exits with one line where its loss is not finite.

        loss: a scalar tensor or a number, in nats per token. figures: what to show beside it, such as lr, as numbers or
        scalar tensors.
        """
        if self.t0 is None:
            refuse("log.step() without log.start(): call that at the top of the loop")
        queued = time.perf_counter() - self.t0
        machine.synchronize(self.device)
        dt = time.perf_counter() - self.t0
        self.t0 = None
        step = len(self.log.steps)
        if self.profiler:
            self.profiler.stop()
            self.profile = StepProfile(self.profiler.events(), self.device, 1e3 * dt)
            self.profiler = None
            self.log.profiled_step = step
        if step == 0 and self.is_compiled and not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
            refuse("torch.compile has compiled nothing, so this would be measured as it is without: pass --no-compile")
        loss = number(loss)
        figures = {name: number(value) for name, value in figures.items()}
        unprinted = {} if self.device.type == "cpu" else {"queued": queued}
        self.log.step(loss, dt, self.tokens_per_step, figures, **unprinted)
        if not math.isfinite(loss):
            refuse(f"the loss is {loss} at step {step}: try a smaller --lr, another --seed or --amp-dtype")

    def finish(self):
        """End the run: save the weights with --save, then write and print the summary.

        The summary has the held-out loss with --eval, and the parts of the last step with --profile.
        """
        self.log.wait_for_request()  # a process that exits would slow down a step of another row
        try:
            if self.args.save and machine.is_rank_0():
                self.save_weights()
        finally:
            self.write_summary()
            settle()

    def save_weights(self):
        """Save the weights. Exits with one line where that fails, for example where the disk is full."""
        path = Path(self.args.save)
        try:
            save(self.model, path, self.corpus.in_bytes)
        except (OSError, RuntimeError) as error:
            free = shutil.disk_usage(path.resolve().parent).free / 1e9
            reason = " ".join(str(error).split())[:200]
            refuse(f"--save {path} was not written, with {free:.2f} GB free on its disk: {reason}")
        self.log.say(f"saved to {path}")

    def write_summary(self):
        """Write the summary of the record and print the summary of the run, where a step was taken."""
        if not self.log.steps:
            return
        summary, lines = {"sdpa": None}, []
        shape = self.log.header["shape"]
        if shape:
            shape_of_q = (self.args.batch_size, shape["n_head"], self.args.seq_len, shape["n_embd"] // shape["n_head"])
            summary["sdpa"] = machine.sdpa_kernel(shape_of_q, self.args.amp_dtype, self.device)
        if self.held_out is not None:
            summary["eval"] = finite_or_none(held_out_loss(self.model, self.held_out))
        if self.profile:
            summary["rates"] = rates.measure(self.device, self.args.amp_dtype)
            summary["parts"] = self.profile.parts
            work = None  # nothing is predicted of a script that is no stage
            if self.args.stage:
                work = ladder.effect_of(self.args.stage, self.log.header | summary).work
            lines = self.profile.lines(work, summary["rates"])
        self.log.finish(summary, lines)


def unwrapped(model):
    """Return the module inside of torch.compile and DistributedDataParallel, in whatever order they are around it."""
    for part in model.modules():  # the outermost first
        if not isinstance(part, DistributedDataParallel) and not hasattr(part, "_orig_mod"):
            return part


def settle():
    """Give the threads of torch.distributed half a second to release their last tensors.

    A thread of gloo that does so while the interpreter ends aborts the whole process (PyTorch's pull request 179291
    describes it). Nothing tells when the threads are done.
    """
    if dist.is_initialized():
        time.sleep(0.5)


def number(value):
    """Return a scalar tensor or a number as a float."""
    return value.item() if torch.is_tensor(value) else float(value)
