"""What every stage holds in its hand and none is about: the flags, the clock, and how a run ends.

A stage calls parse_args, makes a StepLog, calls its step() once a step and its finish() at the end.
"""

import argparse
import datetime
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the root, where data and model are, from any folder
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler greets on stderr otherwise; set before torch loads
# large tensors in pages of 2 MB where Linux offers them on request: a CPU step is some percent faster, and does not
# depend on which small pages a process happened to get
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

import weights
from data import InputError
from model import CONTEXT, SIZES
from stages import machine
from stages.record import WARMUP, summarize, summary_line, text_sha256

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_args(doc, argv=None):
    """The flags of a stage, every default resolved for the device; a bad value ends the run with exit status 2.

    doc: the stage's docstring, whose first line is its title. Returns a namespace with steps, batch_size, seq_len,
    size, device (torch.device), seed, data, amp_dtype (torch.dtype), compile (bool), accum, record, save, and
    fallbacks, which maps "amp_dtype" or "compile" to why the machine can't do it.
    """
    sys.excepthook = _excepthook
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that both ways to stop a run keep what there is
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    args.stage, args.title = Path(sys.argv[0]).stem, doc.strip().splitlines()[0]
    try:
        resolve(args)
    except InputError as error:
        parser.error(str(error))
    for flag, since in (("amp_dtype", 3), ("compile", 4)):
        if flag in args.fallbacks and _number(args.stage) >= since and os.environ.get("RANK", "0") == "0":
            print(f"{flag}: {args.fallbacks[flag]}", file=sys.stderr)
    return args


def _number(stage):
    """5 for s05_flash; 0 for a script that is no stage."""
    match = re.match(r"s(\d\d)_", stage)
    return int(match[1]) if match else 0


def add_flags(parser):
    """The flags that all twelve stages take, so that the bench can pass one set to all of them."""
    add = parser.add_argument
    add("--steps", type=int, metavar="N", help="optimizer steps (50; 20 on a CPU)")
    add("--batch-size", type=int, metavar="B", help="sequences in a micro-batch (16 or what fits; 1 on a CPU)")
    add("--seq-len", type=int, metavar="T", help=f"tokens in a sequence, at most {CONTEXT} (that many)")
    add("--size", choices=SIZES, help="model (gpt2; micro on a CPU)")
    add("--device", metavar="D", help="cuda, cuda:1, xpu, mps or cpu (the best one there is)")
    add("--seed", type=int, default=1337, metavar="S", help="of the weights (%(default)s)")
    add("--data", metavar="FILE", help="a .txt in UTF-8, or a .bin of uint16 ids (Tiny Shakespeare)")
    add("--amp-dtype", choices=DTYPES, help="of autocast, from s03 on (what the device does natively)")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile, from s04 on (where it can)")
    add("--accum", type=int, metavar="N", help="micro-batches a step, over all ranks, from s11 on (4; 2 on a CPU)")
    add("--record", metavar="FILE", help="write every step as a line of JSON to this new file")
    add("--save", metavar="DIRECTORY", help="write the weights there at the end, as Hugging Face does")
    add("--lockstep", action="store_true", help=argparse.SUPPRESS)  # the bench: wait for a line on stdin each step


def resolve(args):
    """Check the flags and fill in the defaults that suit the device, in place. Raises InputError."""
    device = args.device = machine.find_device(args.device)
    cpu = device.type == "cpu"
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if device.type in ("cuda", "xpu"):
        torch.accelerator.set_device_index(device.index)
    defaults = dict(
        size="micro" if cpu else "gpt2",
        seq_len=CONTEXT,
        batch_size=1 if cpu else machine.fitting_batch_size(device),
        steps=20 if cpu else 50,
        accum=world_size * max(1, (2 if cpu else 4) // world_size),
    )
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("steps", "batch_size", "seq_len", "accum"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not 0 <= args.seed < 2**63:
        raise InputError(f"--seed must be from 0 to 2**63 - 1, got {args.seed}")
    if args.seq_len > CONTEXT:
        raise InputError(f"--seq-len {args.seq_len} is beyond GPT-2's block_size: pass {CONTEXT} or less")
    if args.accum % world_size:
        raise InputError(f"--accum {args.accum} does not divide over {world_size} ranks: pass a multiple of it")
    if device.type == "mps" and _number(args.stage) == 12:
        raise InputError("s12 averages gradients over gloo or nccl, and neither knows mps: pass --device cpu")
    if world_size > 1 and _number(args.stage) in range(1, 12):
        raise InputError(f"{args.stage} is for one process, and torchrun started {world_size}: run s12_ddp")

    args.fallbacks = {}
    native = machine.native_amp_dtype(device)
    if args.amp_dtype is None and native == torch.float32:
        args.fallbacks["amp_dtype"] = f"this {device.type} has no 16-bit arithmetic, so float32 stays"
    args.amp_dtype = DTYPES.get(args.amp_dtype, native)
    if args.compile is None:
        problem = machine.compile_problem(device)
        args.compile = problem is None
        if problem:
            args.fallbacks["compile"] = f"left out, {problem}"
    if cpu:
        machine.keep_freed_memory()
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cpu and ranks_here > 1 and torch.get_num_threads() == 1:
        # torchrun gives each of several ranks one thread, however many cores there are
        torch.set_num_threads(max(1, machine.cores() // ranks_here))
    if args.save:
        weights.check_save(args.save)  # now rather than when the work is done
    if args.record and os.environ.get("RANK", "0") == "0":
        try:
            open(args.record, "x").close()  # now rather than after the model is built
            os.unlink(args.record)
        except FileExistsError:
            raise InputError(f"--record {args.record} is there already: name a new file, or remove it") from None
        except OSError as error:
            raise InputError(f"--record {args.record} can't be written: {error.strerror}") from None


class StepLog:
    """Times whole steps, prints a line for each and writes the record. Rank 0 alone talks.

    A step lasts from the end of the one before to its own end, with the device synchronised at both, so that nothing
    in the loop escapes the clock; the log's own work in between is not counted.
    """

    current = None  # the log of this process, for _excepthook

    def __init__(self, args, model, loader, tokens_per_step):
        StepLog.current = self
        self.args, self.device, self.model, self.tokens_per_step = args, args.device, model, tokens_per_step
        self.talks, self.world_size, self.steps = loader.rank == 0, loader.world_size, []
        self.record = self.profiler = self.sdpa = None
        self.tokenizer = loader.tokens.tokenizer
        parameters = sum(p.numel() for p in model.parameters())
        if self.talks:
            what = f"{args.size}, {parameters:,} parameters | B {args.batch_size}, T {args.seq_len}"
            what += f", {tokens_per_step:,} tokens a step | {loader.tokens.corpus}, {loader.tokens.tokenizer}"
            where = machine.device_name(self.device)
            if self.device.type == "cpu":
                where += f", threads {torch.get_num_threads()}"
            print(f"{args.title}\n{what} | {where}", flush=True)
        if self.talks and args.record:
            self.record = open(args.record, "x")  # noqa: SIM115
            self._write_header(parameters, loader)
        self._start()

    def _write_header(self, parameters, loader):
        flags = {k: v for k, v in vars(self.args).items() if k not in ("lockstep", "record", "save")}
        flags |= {"device": str(self.device), "amp_dtype": str(self.args.amp_dtype).removeprefix("torch.")}
        commit = machine.command_output(["git", "rev-parse", "HEAD"])
        self._write(
            "header",
            **flags,
            world_size=loader.world_size,
            tokens_per_step=self.tokens_per_step,
            parameters=parameters,
            corpus=loader.tokens.corpus,
            tokenizer=self.tokenizer,
            environment=machine.environment(self.device),
            commit=commit or None,
            dirty=bool(machine.command_output(["git", "status", "--porcelain", "-uno", ".."])) if commit else None,
            text_sha256=text_sha256(self.args.stage),
            started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )

    def _write(self, kind, **entry):
        if self.record:
            try:
                print(json.dumps(dict(kind=kind, **entry)), file=self.record, flush=True)
            except OSError as error:
                self.record = None
                raise InputError(f"--record {self.args.record} can't be written: {error.strerror}") from None

    def _start(self):
        if self.args.lockstep and self.talks and not sys.stdin.readline():
            raise KeyboardInterrupt  # the bench is gone
        if self.args.lockstep and self.world_size > 1:
            torch.distributed.barrier()  # so that the other ranks wait for the word, too
        self._synchronize()
        self.began = time.perf_counter()

    def _synchronize(self):
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def step(self, loss, **figures):
        """End a step. loss: scalar tensor; figures: numbers to show beside it, such as norm and lr.

        Ends the run with exit status 1 where the loss is not finite.
        """
        self._synchronize()
        dt = time.perf_counter() - self.began
        number = len(self.steps)
        if self.profiler:
            self.profiler.__exit__(None, None, None)
            self.sdpa, self.profiler = _sdpa_backend(self.profiler), None
        figures = {name: float(value) for name, value in figures.items()}
        memory, meter = machine.peak_memory(self.device)
        entry = dict(step=number, loss=loss.item(), **figures, dt=dt, tokens=self.tokens_per_step)
        self.steps.append(entry | dict(memory=memory, meter=meter))
        self._write("step", **self.steps[-1])
        if self.talks:
            shown = "".join(f" | {k} {v:.4e}" if k == "lr" else f" | {k} {v:.4f}" for k, v in figures.items())
            speed = f"dt {1e3 * dt:.2f}ms | tok/sec {self.tokens_per_step / dt:,.0f}"
            print(f"step {number:4d} | loss {entry['loss']:.4f}{shown} | {speed}", flush=True)
        if not math.isfinite(entry["loss"]):
            raise FloatingPointError(f"the loss is {entry['loss']} at step {number}: try another --seed or --amp-dtype")
        if number + 1 == WARMUP:
            machine.reset_peak_memory(self.device)
        if number == 0 and self.record and self.args.steps > WARMUP:
            # the next step is of the warm-up too: its profile tells which attention kernel really ran
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profiler.__enter__()
        if number + 1 < self.args.steps:
            self._start()

    def finish(self, model):
        """End the run: the summary line, the record's summary, and the weights where --save asked for them."""
        if self.args.lockstep and self.talks:
            sys.stdin.readline()  # leaving takes time, too, and others may still be on the clock
        figures = summarize(self.steps)
        if self.device.type in ("cuda", "xpu"):
            figures["reserved"] = getattr(torch, self.device.type).max_memory_reserved(self.device)
        self._write("summary", **figures, sdpa=self.sdpa)
        if self.talks:
            print(summary_line(figures))
            self._save(model)

    def _save(self, model):
        if self.args.save:
            model = getattr(model, "module", model)  # out of DDP's wrapper
            model = getattr(model, "_orig_mod", model)  # and out of torch.compile's
            model.save_pretrained(self.args.save, tokenizer=self.tokenizer)
            print(f"saved to {self.args.save}")

    def stopped(self, why, keep=False):
        """The run ends before its time: say why in the record, and keep the weights of an interrupted run."""
        self._write("error", error=why)
        if keep and self.talks and self.steps:
            self._save(self.model)


def _sdpa_backend(profiler):
    """The attention kernel that a profiled step called: flash, cudnn, efficient, math, or None where written out."""
    names = {event.key for event in profiler.key_averages()}
    for name in ("flash", "cudnn", "efficient", "overrideable", "math"):
        if any(f"_scaled_dot_product_{name}" in n or f"_scaled_dot_product_attention_{name}" in n for n in names):
            return name
    return None


def _excepthook(kind, error, trace):
    """What the user can mend is one line and no traceback; all else is Python's own report."""
    log = StepLog.current
    said = str(error).strip().split("\n")[0][:300]
    status, keep = 1, False
    if issubclass(kind, KeyboardInterrupt):
        said, status, keep = "interrupted", 130, True
    elif issubclass(kind, InputError):
        status = 2
    elif issubclass(kind, FloatingPointError):
        pass
    elif issubclass(kind, (torch.OutOfMemoryError, MemoryError)) or re.search("out of memory|can't allocate", said):
        B = log.args.batch_size if log else 1
        remedy = f"--batch-size {B // 2}" if B > 1 else "a smaller --seq-len or --size"
        said = f"out of memory at batch size {B}: try {remedy}"
    elif kind.__module__.startswith(("torch._inductor", "torch._dynamo")):
        said = f"torch.compile failed ({said}): mend the compiler, or go on with --no-compile"
    else:
        if log:
            log.stopped(f"{kind.__name__}: {said}")
        sys.__excepthook__(kind, error, trace)
        return
    try:
        if log:
            log.stopped(said, keep)
    except InputError as failed:  # the interrupted run's weights could not be written
        said = f"{said}; {failed}"
    # __stderr__, since torch.distributed wraps this hook and holds back what it writes to stderr
    print(f"error: {said}", file=sys.__stderr__)
    sys.exit(status)
