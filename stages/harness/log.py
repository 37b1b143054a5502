"""The clock of a stage, the line that it prints for each step, and its record.

records.py describes the lines of a record.
"""

import datetime
import math
import re
import sys
import time

import torch
import torch.distributed as dist

from data import load_tokens, refuse
from model import GPT, evaluate, save

from . import ladder, machine, parts, rates
from .records import WARMUP, Record, settle, summarize

PROFILE_LINES = 20  # how many operations --profile shows
# how PyTorch, cuBLAS and NCCL say that memory is short, where they raise a plain RuntimeError
OUT_OF_MEMORY = r"out of memory|can't allocate|ALLOC_FAILED"


class StepLog:
    """Times whole steps, prints a line for each and writes the record. Rank 0 alone prints.

    A step lasts from the end of the one before to its own end, with the device synchronized at both, so that nothing
    in the loop escapes the clock; the log's own work in between is not counted.
    """

    def __init__(self, args, model, loader=None, tokens_per_step=1):
        """Start the clock of the first step.

        model: any nn.Module; what is told of a GPT is left out for another. loader: the TokenLoader, for the names of
        its corpus and tokenizer, or None.
        """
        self.args = args
        self.device = args.device
        self.tokens_per_step = tokens_per_step
        self.corpus = getattr(loader, "corpus", None)
        without_ddp = getattr(model, "module", model)
        self.model = getattr(without_ddp, "_orig_mod", without_ddp)  # where torch.compile keeps the model
        self.prints = machine.is_rank_0() and not args.worker
        self.steps = []
        self.profiler = None
        self.profile = None
        has_gpt = self.corpus is not None and isinstance(self.model, GPT)
        if (args.eval or args.save) and machine.is_rank_0() and not has_gpt:
            refuse("--eval and --save need a GPT and its loader, and this script has none")
        self.record = Record(args)
        self.held_out = None
        if args.eval and machine.is_rank_0():
            self.held_out = load_tokens(args.data, split="val").ids
        sys.excepthook = self.explain
        self.say_what_runs()
        self.header = self.make_header()
        self.record.write("header", **self.header)
        self.begin_step()

    def say_what_runs(self):
        """Print the title, and what is trained on what."""
        args = self.args
        where = machine.device_name(self.device)
        if self.device.type == "cpu":
            where += f", threads {torch.get_num_threads()}"
        parts_of_line = [
            f"{args.size}, {self.parameters():,} parameters",
            f"B {args.batch_size}, T {args.seq_len}, {self.tokens_per_step:,} tokens per step",
            where,
        ]
        if self.corpus:
            parts_of_line.insert(2, f"{self.corpus.name}, {self.corpus.tokenizer}")
        self.say(args.title)
        self.say(" | ".join(parts_of_line))

    def parameters(self):
        """Return how many parameters the model has."""
        return sum(p.numel() for p in self.model.parameters())

    def make_header(self):
        """Return what a record begins with, a dict."""
        args = self.args
        settings = {}
        for name in ("steps", "batch_size", "seq_len", "size", "seed", "lr", "data", "compile", "accum"):
            settings[name] = getattr(args, name)
        settings["world_size"] = machine.world_size()
        settings["amp_dtype"] = str(args.amp_dtype).removeprefix("torch.")
        settings["corpus"] = self.corpus.name if self.corpus else None
        settings["tokenizer"] = self.corpus.tokenizer if self.corpus else None
        return {
            "stage": args.script.stem,
            "title": args.title,
            "code": ladder.code_sha256(args.script),
            "commit": machine.commit(ladder.FOLDER.parent),
            "settings": settings,
            "shape": args.shape if isinstance(self.model, GPT) else None,
            "parameters": self.parameters(),
            "environment": machine.environment(self.device),
            "fallbacks": args.fallbacks,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def begin_step(self):
        """Start the clock of the next step. A worker waits until the bench asks for it, and ends where it does not."""
        if not self.record.next_step_wanted():
            self.leave()
        if self.args.profile and len(self.steps) + 1 == self.args.steps:
            self.profiler = torch.profiler.profile(acc_events=True)  # without acc_events torch 2.11 warns
            self.profiler.start()
        self.synchronize()
        self.began = time.perf_counter()

    def leave(self):
        """End the process of a worker before its last step: the rest of the script does not run."""
        self.write_summary()
        settle()
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.exit()

    def synchronize(self):
        """Wait until the device has done all that it was asked to do."""
        torch.get_device_module(self.device).synchronize()

    def step(self, loss, **figures):
        """End a step. Exits with one line where its loss is not finite.

        loss: a scalar tensor, in nats per token. figures: what to show beside it, such as lr, as numbers or scalar
        tensors.
        """
        self.synchronize()
        dt = time.perf_counter() - self.began
        if self.profiler:
            self.profiler.stop()
            self.profile = parts.Profile(self.profiler.events(), self.device, 1e3 * dt)
            self.profiler = None
        step = len(self.steps)
        loss = loss.item()
        figures = {name: float(value) for name, value in figures.items()}
        memory, meter = machine.peak_memory(self.device)
        entry = {"step": step, "loss": number_or_none(loss)}
        for name, value in figures.items():
            entry[name] = number_or_none(value)
        entry |= {"dt": dt, "tokens": self.tokens_per_step, "memory": memory, "meter": meter}
        self.steps.append(entry)
        self.record.write("step", **entry)
        self.say_step(step, loss, figures, dt)
        if not math.isfinite(loss):
            refuse(f"the loss is {loss} at step {step}: try a smaller --lr, another --seed or --amp-dtype")
        if len(self.steps) == WARMUP:
            machine.reset_peak_memory(self.device)
        if len(self.steps) < self.args.steps:
            self.begin_step()

    def say_step(self, step, loss, figures, dt):
        """Print the line of a step."""
        words = [f"step {step:4d}", f"loss {loss:.4f}"]
        for name, value in figures.items():
            words.append(f"lr {value:.4e}" if name == "lr" else f"{name} {value:.4f}")
        words.append(f"dt {1e3 * dt:.2f}ms")
        words.append(f"tok/sec {self.tokens_per_step / dt:,.0f}")
        self.say(" | ".join(words))

    def finish(self, model):
        """End the run: the weights where --save asks for them, and the summary, with what --eval and --profile ask for.

        model: the one that the log has from its start, named here so that a stage shows what is saved.
        """
        self.record.wait_for_end()
        if self.args.save and self.prints:
            save(self.model, self.corpus.tokenizer, self.args.save)
            self.say(f"saved to {self.args.save}")
        self.write_summary()
        settle()

    def write_summary(self):
        """Write the summary of the record and print the summary of the run."""
        if not self.steps:
            return
        summary = {"sdpa": None}
        if (self.record.file or self.profile) and isinstance(self.model, GPT):
            config = self.model.config
            shape = (self.args.batch_size, config.n_head, self.args.seq_len, config.n_embd // config.n_head)
            summary["sdpa"] = machine.sdpa_kernel(shape, self.args.amp_dtype, self.device)
        if self.device.type == "cuda":
            summary["reserved"] = torch.cuda.max_memory_reserved(self.device)
        if self.held_out is not None:
            summary["eval"] = evaluate(self.model, self.held_out)
        if self.profile:
            if self.device.type != "cpu":
                torch.accelerator.empty_cache()  # the copy needs room
            summary["rates"] = rates.measure(self.device, self.args.amp_dtype)
            summary["parts"] = self.profile.parts
        self.record.write("summary", **summary)
        self.say_summary(summary)

    def say_summary(self, summary):
        """Print the line of the whole run, and where the time of its last step went with --profile."""
        figures = summarize(self.steps)
        steps = f"{figures['counted']} steps after {WARMUP} of warm-up"
        if figures["counted"] == 0:
            steps = "the last step alone, warm-up included"
        words = [
            f"median dt {figures['dt_ms']:.2f}ms [{figures['dt_q1_ms']:.2f}, {figures['dt_q3_ms']:.2f}] over {steps}",
            f"tok/sec {figures['tok_per_sec']:,.0f}",
            f"memory {figures['memory'] / 1e9:.2f} GB ({self.steps[-1]['meter']})",
            f"warm-up {figures['warmup_s']:.1f}s",
        ]
        if "eval" in summary:
            words.append(f"held-out loss {summary['eval']:.4f}")
        self.say(" | ".join(words))
        if self.profile:
            for line in self.profile.lines(self.header | summary, PROFILE_LINES):
                self.say(line)

    def explain(self, kind, error, trace):
        """Say in one line how to mend a batch that is too large. Of any other error Python reports all, as ever."""
        batch_size = self.args.batch_size
        if not isinstance(error, MemoryError) and not re.search(OUT_OF_MEMORY, str(error)):
            sys.__excepthook__(kind, error, trace)
            return
        remedy = f"--batch-size {batch_size // 2}" if batch_size > 1 else "a smaller --seq-len or --size"
        print(f"error: out of memory at batch size {batch_size}: try {remedy}", file=sys.stderr, flush=True)

    def say(self, line):
        """Print a line of progress."""
        if self.prints:
            print(line, flush=True)


def number_or_none(value):
    """Return a figure as JSON takes it, which has no infinity; a norm is infinite where float16 overflows."""
    return value if math.isfinite(value) else None
