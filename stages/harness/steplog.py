"""The clock of a stage, and what it does at its end."""

import math
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import ladder, machine, ranks, rates
from .arithmetic import shape_of
from .common import refuse
from .flags import settings_of
from .log import finite_or_none
from .stepprofile import StepProfile, predicted_ms
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
        self.log = args.log
        self.device = args.device
        self.model = unwrapped(model)
        self.is_compiled = any(isinstance(part, torch._dynamo.OptimizedModule) for part in model.modules())
        self.corpus = loader.corpus
        self.tokens_per_step = tokens_per_step
        self.t0 = None  # when the step began, where one has
        self.profiler = None  # of the last step, with --profile
        takes_held_out_loss = args.eval and ranks.is_rank_0()
        # read at once, since at the end a refusal would come too late
        self.held_out = held_out_ids(self.corpus) if takes_held_out_loss else None
        about = {
            "stage": args.script.stem,
            "settings": settings_of(args) | {"corpus": self.corpus.name},
            "shape": shape_of(self.model, args.seq_len),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "unit": "tok",
            "fallbacks": args.fallbacks,
        }
        self.log.begin(args.title, self.device, tokens_per_step, about)

    def start(self):
        """Start the clock of a step. Where the bench leads, wait for it first, and end here where it wants no more."""
        if not self.log.wait_for_request():
            self.end()
            if dist.is_initialized():
                dist.destroy_process_group()
            sys.exit()
        if self.args.profile and len(self.log.steps) + 1 == self.args.steps:
            self.profiler = torch.profiler.profile(acc_events=True)  # without acc_events torch 2.11 warns
            self.profiler.start()
        machine.synchronize(self.device)
        self.t0 = time.perf_counter()

    def step(self, loss, **figures):
        """End a step. Exits with one line where its loss is not finite, or nothing was compiled that should be.

        loss: a scalar tensor or a number, in nats per token. figures: what to show beside it, such as lr, as numbers or
        scalar tensors.
        """
        if self.t0 is None:
            refuse("log.step() without log.start(): call that at the top of the loop")
        queued = time.perf_counter() - self.t0
        machine.synchronize(self.device)
        dt = time.perf_counter() - self.t0
        self.t0 = None
        unprinted = {} if self.device.type == "cpu" else {"queued": queued}
        if self.profiler:
            self.profiler.stop()
            unprinted["profiled"] = True
        step = len(self.log.steps)
        if step == 0 and self.is_compiled and machine.compiled_graphs() == 0:
            self.fail("torch.compile has compiled nothing, so this would be measured as without it: pass --no-compile")
        loss = as_float(loss)
        figures = {name: as_float(value) for name, value in figures.items()}
        self.log.step(loss, dt, self.tokens_per_step, figures, **unprinted)
        if not math.isfinite(loss):
            self.fail(f"the loss is {loss} at step {step}: try a smaller --lr, another --seed or --amp-dtype")

    def finish(self):
        """End the run: save the weights with --save, then write and print the summary.

        Exits with one line where the weights can't be written, for example where the disk is full. The summary comes
        all the same.
        """
        self.log.wait_for_request()  # a process that exits would slow down a step of another row
        path = self.args.save
        try:
            if path and ranks.is_rank_0():
                save(self.model, path, in_bytes=self.corpus.source == "docs")
                self.log.say(f"saved to {path}")
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            self.fail(f"--save {path} was not written: {reason}; look whether its disk is full")
        finally:
            self.end()

    def fail(self, message):
        """Write a line of the record that says why the run ends, and exit with it."""
        self.log.write_error(message)
        refuse(message)

    def end(self):
        """Write and print the summary, where a step was taken. Then let torch.distributed release its last tensors.

        A thread of gloo that does so while the interpreter ends aborts the whole process (PyTorch's pull request 179291
        describes it). Nothing tells when the threads are done.
        """
        if self.log.steps:
            self.log.finish(*self.summary())
        if dist.is_initialized():
            time.sleep(0.5)

    def summary(self):
        """Return the summary of the record, a dict, and lines to print below the figures of the run.

        It has the held-out loss with --eval, and the parts of the last step with --profile.
        """
        args = self.args
        shape = self.log.header["shape"]
        summary, lines = {"sdpa": None}, []
        if shape:
            shape_of_q = (args.batch_size, shape["n_head"], args.seq_len, shape["n_embd"] // shape["n_head"])
            summary["sdpa"] = machine.sdpa_kernel(shape_of_q, args.amp_dtype, self.device)
        if self.held_out is not None:
            loss = held_out_loss(self.model, self.held_out)
            summary["eval"] = finite_or_none(loss)
            lines.append(f"held-out loss {loss:.4f}")
        if self.profiler:
            profile = StepProfile(self.profiler.events(), self.device, 1e3 * self.log.steps[-1]["dt"])
            measured = rates.measure(self.device, args.amp_dtype)
            summary |= {"rates": measured, "parts": profile.parts}
            predicted = {}
            if args.stage and shape:  # nothing is predicted of another script
                work = ladder.effect_of(args.stage, self.log.header | summary).work
                predicted = predicted_ms(work, measured)
            lines += profile.lines(predicted)
        return summary, lines


def unwrapped(model):
    """Return the module inside of torch.compile and DistributedDataParallel, in whatever order they are around it."""
    for part in model.modules():  # the outermost first
        if not isinstance(part, DistributedDataParallel) and not hasattr(part, "_orig_mod"):
            return part


def as_float(value):
    """Return a scalar tensor or a number as a float."""
    return value.item() if torch.is_tensor(value) else float(value)
