"""The clock of a stage, the line that it prints for each step, and its record.

record.py describes the lines of a record.
"""

import datetime
import math
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import TokenLoader, load_tokens, refuse
from model import GPT

from . import ladder, machine, rates
from .arithmetic import flops_per_token, shape_name, shape_of
from .record import WARMUP, figures_of, seconds_of_warmup
from .stepprofile import StepProfile
from .weights import held_out_loss, save


class StepLog:
    """Times whole steps, prints a line for each and writes the record. Rank 0 alone prints.

    The clock of a step starts where the step before ended, and the device is synchronized at both ends. So all of the
    loop is on the clock, and only the log's own work is off it. A worker waits in finish() after its last step, or
    ends in leave() where the bench wants no more.
    """

    def __init__(self, args, model, loader=None, *, tokens_per_step):
        """Begin the record and the clock of the first step.

        args: what parse_args() returned. model: any nn.Module; a GPT has a config, by which its FLOPs are counted.
        loader: a TokenLoader, whose text is named in the record; another loader, or None, names no text.
        tokens_per_step: of all ranks and micro-batches. Exits with one line where the script has a StepLog already, and
        where --eval or --save is given and the model or the loader is not the ladder's.
        """
        if args.log:
            refuse("the script has two StepLogs: let one log take all steps")
        args.log = self
        self.args = args
        self.device = args.device
        self.record = args.record
        self.model = unwrapped(model)
        self.shape = shape_of(self.model, args.seq_len)
        self.corpus = loader.corpus if isinstance(loader, TokenLoader) else None
        self.tokens_per_step = tokens_per_step
        self.prints = machine.is_rank_0() and not args.worker
        self.steps = []
        self.profiler = None
        self.profile = None
        if (args.eval or args.save) and not (self.corpus and isinstance(self.model, GPT)):
            refuse("--eval and --save need the ladder's GPT and its loader, and this script does not have both")
        self.say_what_runs()
        self.header = self.make_header()
        self.record.write("header", **self.header)
        self.wait_for_bench()
        self.begin_step()

    def say_what_runs(self):
        """Print the title, what is trained, and on which device and text."""
        args = self.args
        parameters = sum(p.numel() for p in self.model.parameters())
        if self.shape is None:
            what = [f"{parameters:,} parameters"]
        else:
            what = [
                f"{shape_name(self.shape)}, {parameters:,} parameters",
                f"B {args.batch_size}, T {args.seq_len}, {self.tokens_per_step:,} tokens per step",
            ]
        device = machine.device_name(self.device)
        if self.device.type == "cpu":
            device += f", threads {torch.get_num_threads()}"
        where = [device]
        if self.corpus:
            where.append(self.corpus.name)
        self.say(args.title)
        self.say(" | ".join(what))
        self.say(" | ".join(where))

    def make_header(self):
        """Return what a record begins with, a dict."""
        args = self.args
        settings = {}
        for name in ("steps", "batch_size", "seq_len", "size", "seed", "lr", "data", "compile", "accum"):
            settings[name] = getattr(args, name)
        settings["world_size"] = machine.world_size()
        settings["amp_dtype"] = machine.dtype_name(args.amp_dtype)
        settings["corpus"] = self.corpus.name if self.corpus else None
        return {
            "stage": args.script.stem,
            "commit": machine.commit(ladder.FOLDER.parent),
            "settings": settings,
            "shape": self.shape,
            "environment": machine.environment(self.device),
            "fallbacks": args.fallbacks,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def wait_for_bench(self):
        """As a worker, wait until the bench asks for a step. Where it wants no more, end the process here."""
        if not self.record.wait_for_request():
            self.leave()

    def begin_step(self):
        """Start the clock of the next step."""
        is_last = len(self.steps) + 1 == self.args.steps
        if self.args.profile and is_last:
            self.profiler = torch.profiler.profile(acc_events=True)  # without acc_events torch 2.11 warns
            self.profiler.start()
        machine.synchronize(self.device)
        self.began = time.perf_counter()

    def leave(self):
        """End the process of a worker before its last step: the rest of the script does not run."""
        self.write_summary()
        settle()
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.exit()

    def step(self, loss, **figures):
        """End a step. Exits with one line where its loss is not finite, or the script takes more steps than --steps.

        loss: a scalar tensor or a number, in nats per token. figures: what to show beside it, such as lr, as numbers or
        scalar tensors.
        """
        step = len(self.steps)
        if step == self.args.steps:
            refuse(f"the loop goes on after --steps {step}: let it run over range(args.steps)")
        machine.synchronize(self.device)
        dt = time.perf_counter() - self.began
        if self.profiler:
            self.profiler.stop()
            self.profile = StepProfile(self.profiler.events(), self.device, 1e3 * dt)
            self.profiler = None
        loss = number(loss)
        figures = {name: number(value) for name, value in figures.items()}
        memory, meter = machine.peak_memory(self.device)
        entry = {  # the script's figures first, so that none of them replaces one of ours
            **{name: finite_or_none(value) for name, value in figures.items()},
            "step": step,
            "loss": finite_or_none(loss),
            "dt": dt,
            "tokens": self.tokens_per_step,
            "memory": memory,
            "meter": meter,
        }
        self.steps.append(entry)
        self.record.write("step", **entry)
        self.say_step(step, loss, figures, dt)
        if not math.isfinite(loss):
            refuse(f"the loss is {loss} at step {step}: try a smaller --lr, another --seed or --amp-dtype")
        if len(self.steps) == WARMUP:
            machine.reset_peak_memory(self.device)
        if len(self.steps) < self.args.steps:
            self.wait_for_bench()
            self.begin_step()

    def say_step(self, step, loss, figures, dt):
        """Print the line of a step."""
        tokens_per_second = self.tokens_per_step / dt
        words = [f"step {step:4d}", f"loss {loss:.4f}"]
        for name, value in figures.items():
            words.append(f"lr {value:.2e}" if name == "lr" else f"{name} {value:.4f}")
        words.append(f"{1e3 * dt:.2f}ms")
        words.append(f"{tokens_per_second:,.0f} tok/sec")
        self.say(" | ".join(words + self.words_on_flops(tokens_per_second)))

    def words_on_flops(self, tokens_per_second):
        """Return a list with one text, the FLOP/s of a speed, or an empty list for a model that is no GPT."""
        if self.shape is None:
            return []
        return [f"{flops_per_token(self.shape) * tokens_per_second / 1e12:.3g} TFLOP/s"]

    def finish(self):
        """End the run: save the weights with --save, then write and print the summary.

        The summary has the held-out loss with --eval, and the parts of the last step with --profile. Exits with one
        line where the bench leads the run and is owed more steps.
        """
        taken, asked = len(self.steps), self.args.steps
        if self.args.worker and taken < asked:
            refuse(f"the loop ended after {taken} of {asked} steps: let it run over range(args.steps)")
        # As a worker, wait for the end: a process that exits would slow down a step of another worker.
        self.record.wait_for_request()
        if self.args.save and machine.is_rank_0():
            save(self.model, self.args.save)
            self.say(f"saved to {self.args.save}")
        self.write_summary()
        settle()

    def write_summary(self):
        """Write the summary of the record and print the summary of the run."""
        if self.steps:
            summary = self.make_summary()
            self.record.write("summary", **summary)
            self.say_summary(summary)

    def make_summary(self):
        """Return what a record ends with, a dict."""
        summary = {"sdpa": None}
        if self.device.type == "cuda":
            summary["reserved"] = torch.cuda.max_memory_reserved(self.device)
        kernel_is_wanted = self.record.file is not None or self.profile is not None
        if kernel_is_wanted and self.shape:
            head_dim = self.shape["n_embd"] // self.shape["n_head"]
            shape_of_q = (self.args.batch_size, self.shape["n_head"], self.args.seq_len, head_dim)
            summary["sdpa"] = machine.sdpa_kernel(shape_of_q, self.args.amp_dtype, self.device)
        if self.args.eval and machine.is_rank_0():
            loss = held_out_loss(self.model, load_tokens(self.corpus.source, split="val").ids)
            summary["eval"] = finite_or_none(loss)
        if self.profile:
            if self.device.type != "cpu":
                torch.accelerator.empty_cache()  # rates.measure() makes large tensors
            summary["rates"] = rates.measure(self.device, self.args.amp_dtype)
            summary["parts"] = self.profile.parts
        return summary

    def say_summary(self, summary):
        """Print the lines of the whole run, and where the time of its last step went with --profile."""
        counted = self.steps[WARMUP:]
        if self.profile:
            counted = counted[:-1]  # the profiler made the last step slower
        which = f"{len(counted)} steps after {WARMUP} of warm-up"
        if not counted:
            counted = self.steps[-1:]
            which = "the last step alone, since --steps leaves no other"
        figures = figures_of(counted)
        self.say(f"median {figures['dt_ms']:.2f}ms [{figures['dt_q1_ms']:.2f}, {figures['dt_q3_ms']:.2f}] over {which}")
        meter = self.steps[-1]["meter"]
        words = [f"{figures['tok_per_sec']:,.0f} tok/sec", *self.words_on_flops(figures["tok_per_sec"])]
        words.append(f"memory {figures['memory'] / 1e9:.2f} GB ({meter})" if figures["memory"] else meter)
        words.append(f"warm-up {seconds_of_warmup(self.steps):.1f}s")
        self.say(" | ".join(words))
        if "eval" in summary:
            loss = math.nan if summary["eval"] is None else summary["eval"]
            self.say(f"held-out loss {loss:.4f}")
        if self.profile:
            for line in self.profile.lines(self.args.stage, self.header | summary):
                self.say(line)

    def say(self, line):
        """Print a line of progress."""
        if self.prints:
            print(line, flush=True)


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


def finite_or_none(value):
    """Return a figure, or None where it is not finite: JSON has no infinity, and a norm has where float16 overflows."""
    return value if math.isfinite(value) else None
