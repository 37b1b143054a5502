"""The clock of a stage, and what it does at its end."""

import math
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import load_tokens, refuse

from . import ladder, machine, rates
from .arithmetic import shape_of
from .report import Report, finite_or_none
from .stepprofile import StepProfile
from .weights import held_out_loss, save


class StepLog:
    """Times whole steps, prints a line for each and writes the record. Rank 0 alone prints.

    A step is on the clock from start() to step(), and the device is synchronized at both ends. Where the bench leads
    the run, start() waits for its request, and so does finish() after the last step. A run ends in leave() where the
    bench wants no more.
    """

    def __init__(self, args, model, loader, *, tokens_per_step):
        """Begin the record.

        args: what parse_args() returned. model: a GPT, as it is or inside of torch.compile or DistributedDataParallel.
        loader: a TokenLoader, whose text is named in the record. tokens_per_step: of all ranks and micro-batches.
        """
        self.args = args
        self.device = args.device
        self.record = args.record
        self.model = unwrapped(model)
        self.corpus = loader.corpus
        self.tokens_per_step = tokens_per_step
        self.t0 = None  # when the step began, where one has
        self.profiler = None
        self.profile = None
        self.report = Report(args.record, self.facts(), prints=machine.is_rank_0() and not args.record.is_led)

    @property
    def steps(self):
        """The step lines of the record so far."""
        return self.report.steps

    def facts(self):
        """Return what is known before the first step, as Report wants it."""
        args = self.args
        settings = {}
        for name in ("steps", "batch_size", "seq_len", "size", "seed", "lr", "data", "compile", "accum"):
            settings[name] = getattr(args, name)
        settings["world_size"] = machine.world_size()
        settings["amp_dtype"] = machine.dtype_name(args.amp_dtype)
        settings["corpus"] = self.corpus.name
        return {
            "title": args.title,
            "script": args.script.stem,
            "device": self.device,
            "shape": shape_of(self.model, args.seq_len),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "batch_size": args.batch_size,
            "seq_len": args.seq_len,
            "tokens": self.tokens_per_step,
            "first_step": 0,
            "unit": "tok",
            "corpus": self.corpus.name,
            "settings": settings,
            "fallbacks": args.fallbacks,
        }

    def start(self):
        """Start the clock of a step. Where the bench leads, wait for it first, and end here where it wants no more."""
        if not self.record.wait_for_request():
            self.leave()
        if self.args.profile and len(self.steps) + 1 == self.args.steps:
            self.profiler = torch.profiler.profile(acc_events=True)  # without acc_events torch 2.11 warns
            self.profiler.start()
        machine.synchronize(self.device)
        self.t0 = time.perf_counter()

    def leave(self):
        """End the process before its last step: the rest of the stage does not run."""
        self.write_summary()
        settle()
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.exit()

    def step(self, loss, **figures):
        """End a step. Exits with one line where its loss is not finite.

        loss: a scalar tensor or a number, in nats per token. figures: what to show beside it, such as lr, as numbers or
        scalar tensors.
        """
        if self.t0 is None:
            refuse("log.step() without log.start(): call that at the top of the loop")
        machine.synchronize(self.device)
        dt = time.perf_counter() - self.t0
        self.t0 = None
        step = len(self.steps)
        if self.profiler:
            self.profiler.stop()
            self.profile = StepProfile(self.profiler.events(), self.device, 1e3 * dt)
            self.profiler = None
            self.report.profiled_steps.append(step)
        loss = number(loss)
        figures = {name: number(value) for name, value in figures.items()}
        self.report.add_step(loss, dt, self.tokens_per_step, figures)
        if not math.isfinite(loss):
            refuse(f"the loss is {loss} at step {step}: try a smaller --lr, another --seed or --amp-dtype")

    def finish(self):
        """End the run: save the weights with --save, then write and print the summary.

        The summary has the held-out loss with --eval, and the parts of the last step with --profile. Exits with one
        line where the weights could not be saved.
        """
        self.record.wait_for_request()  # a process that exits would slow down a step of another row
        problem = None
        if self.args.save and machine.is_rank_0():
            problem = self.save_weights()
        self.write_summary()
        settle()
        if problem:
            refuse(problem)

    def save_weights(self):
        """Save the weights. Return None, or where the disk is full, what to say about it."""
        path = Path(self.args.save)
        try:
            save(self.model, path, self.corpus.in_bytes)
        except (OSError, RuntimeError) as error:
            free = shutil.disk_usage(path.resolve().parent).free / 1e9
            reason = " ".join(str(error).split())[:200]
            return f"--save {path} was not written, with {free:.2f} GB free on its disk: {reason}"
        self.report.say(f"saved to {path}")
        return None

    def write_summary(self):
        """Write the summary of the record and print the summary of the run."""
        if self.steps:
            summary = self.make_summary()
            self.report.end(summary, self.profile_lines(summary))

    def make_summary(self):
        """Return what a record ends with, a dict."""
        summary = {"sdpa": None}
        shape = self.report.facts["shape"]
        if self.device.type == "cuda":
            summary["reserved"] = torch.cuda.max_memory_reserved(self.device)
        if shape and (self.record.is_kept or self.profile):
            head_dim = shape["n_embd"] // shape["n_head"]
            shape_of_q = (self.args.batch_size, shape["n_head"], self.args.seq_len, head_dim)
            summary["sdpa"] = machine.sdpa_kernel(shape_of_q, self.args.amp_dtype, self.device)
        if self.args.eval and machine.is_rank_0():
            loss = held_out_loss(self.model, load_tokens(self.corpus.source, split="val").ids)
            summary["eval"] = finite_or_none(loss)
        if self.profile:
            summary["rates"] = rates.measure_beside_a_model(self.device, self.args.amp_dtype)
            summary["parts"] = self.profile.parts
        return summary

    def profile_lines(self, summary):
        """Return the lines of --profile, without it none. summary: what make_summary() returned."""
        if self.profile is None:
            return []
        work = None
        if self.args.stage:
            work = ladder.effect_of(self.args.stage, self.report.header | summary).work
        return self.profile.lines(work, summary["rates"])


def unwrapped(model):
    """Return the module inside of torch.compile and DistributedDataParallel, in whatever order they are around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):  # where torch.compile keeps it
            model = model._orig_mod
        else:
            return model


def settle():
    """Give the threads of torch.distributed time to release their last tensors, before the process group is destroyed.

    To release one, a thread needs the interpreter. If that is ending by then, gloo's thread aborts the whole process
    (PyTorch's pull request 179291 describes it). Nothing tells when the threads are done.
    """
    if dist.is_initialized():
        time.sleep(0.5)


def number(value):
    """Return a scalar tensor or a number as a float."""
    return value.item() if torch.is_tensor(value) else float(value)
