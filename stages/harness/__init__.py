"""What every stage needs and none is about: the flags, the clock, the record, and how a run ends."""

import argparse
import contextlib
import datetime
import hashlib
import json
import math
import os
import re
import signal
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # where data and model are, from any folder
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints to stderr; set before torch loads
# large tensors in pages of 2 MB where Linux offers them: a CPU step is faster, and varies less between processes
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
if sys.stdout:
    sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows a question mark

import torch
import torch.distributed as dist

from data import InputError, load_tokens
from model import CONTEXT, SIZES, check_save, evaluate, weight_bytes

from . import machine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WARMUP = 4  # steps left out of the figures: compilation, autotuning, memory touched for the first time


class Parser(argparse.ArgumentParser):
    """argparse with one line for a wrong flag, and no usage before it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def end_as_by_ctrl_c():
    """Let a batch system's SIGTERM and a closed terminal's SIGHUP end a run as Ctrl-C does, unless nohup ignores it."""
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def parse_args(doc, argv=None):
    """The flags of a stage, every default resolved for the device; a bad value ends the run with exit status 2.

    doc: the stage's docstring, whose first line is its title. Returns a namespace of all flags, with device a
    torch.device, amp_dtype a torch.dtype, and fallbacks, {"amp_dtype" or "compile": why the machine can't do it}.
    """
    sys.excepthook = _excepthook
    end_as_by_ctrl_c()
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_flags(parser)
    args = parser.parse_args(argv)
    args.stage = Path(sys.argv[0]).resolve().stem
    args.title = (doc or args.stage).strip().splitlines()[0]  # python -OO has no docstrings
    number = int(args.stage[1:3]) if re.match(r"s\d\d_", args.stage) else 0
    try:
        resolve(args, number)
    except InputError as error:
        parser.error(str(error))
    for flag, since in (("amp_dtype", 3), ("compile", 4)):
        if flag in args.fallbacks and number >= since and is_rank_0():
            print(f"{flag}: {args.fallbacks[flag]}", file=sys.stderr)
    return args


def positive(text):
    """The whole number of 1 or more that a flag takes. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def is_rank_0():
    """Whether this is the one process of several that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def add_flags(parser):
    """The flags that all stages take, so that the bench can pass one set to all of them."""
    add = parser.add_argument
    add("--steps", type=positive, metavar="N", help="optimizer steps, four of them warm-up (50; 24 on a CPU)")
    add("--batch-size", type=positive, metavar="B", help="sequences in a micro-batch (16 or what fits; 1 on a CPU)")
    add("--seq-len", type=positive, metavar="T", help=f"tokens in a sequence, at most {CONTEXT} (that many)")
    add("--size", choices=SIZES, help="model (gpt2; micro on a CPU)")
    add("--device", metavar="D", help="cuda, cuda:1, mps or cpu (the best one there is)")
    add("--seed", type=int, default=1337, metavar="S", help="of the weights (%(default)s)")
    add("--data", metavar="FILE", help="a .txt in UTF-8, or a .bin of uint16 ids (Tiny Shakespeare)")
    add("--amp-dtype", choices=DTYPES, help="of autocast, from s03 on (what the device does natively)")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile, from s04 on (where it can)")
    add("--accum", type=positive, metavar="N", help="micro-batches per step of all ranks, from s11 on (4; 2 on a CPU)")
    add("--eval", action="store_true", help="at the end, take the loss on the held-out last tenth of the corpus")
    add("--profile", action="store_true", help="at the end, list the operations that took most of the last step")
    add("--record", metavar="FILE", help="write every step as a line of JSON to this new file")
    add("--save", metavar="DIRECTORY", help="write the weights there at the end, in Hugging Face's layout")
    add("--led", action="store_true", help=argparse.SUPPRESS)  # by the bench, over stdin and stdout: see Record


def resolve(args, number=0):
    """Check the flags and fill in the device's defaults, in place. number: a stage's, else 0. Raises InputError."""
    rank, world_size = machine.environment_number("RANK", 0), machine.environment_number("WORLD_SIZE", 1)
    machine.environment_number("MASTER_PORT", 0)
    if rank >= world_size or ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        raise InputError(f"RANK is {rank} and WORLD_SIZE is {world_size}: unset both, or start the run with torchrun")
    device = args.device = machine.find_device(args.device)
    cpu = device.type == "cpu"
    if device.type == "cuda":
        torch.accelerator.set_device_index(device.index)
        if sys.platform == "win32":  # its driver would take system memory for what does not fit, and crawl
            torch.cuda.set_per_process_memory_fraction(0.95, device)
    defaults = dict(size="micro", batch_size=1, steps=24, accum=2) if cpu else dict(size="gpt2", steps=50, accum=4)
    problem = machine.compile_problem(device)
    defaults |= dict(seq_len=CONTEXT, accum=world_size * max(1, defaults["accum"] // world_size), compile=not problem)
    given = {name: value for name, value in vars(args).items() if value is not None}
    vars(args).update(defaults | given)
    args.batch_size = args.batch_size or machine.fitting_batch_size(device)
    if not 0 <= args.seed < 2**63:
        raise InputError(f"--seed must be from 0 to 2**63 - 1, got {args.seed}")
    if args.seq_len > CONTEXT:
        raise InputError(f"--seq-len {args.seq_len} is beyond GPT-2's block_size: pass {CONTEXT} or less")
    if args.accum % world_size:
        raise InputError(f"--accum {args.accum} does not divide over {world_size} ranks: pass a multiple of it")
    if device.type == "mps" and number >= 12:
        raise InputError("not for mps: s12 averages gradients by gloo or nccl, which can't: pass --device cpu")
    if world_size > 1 and 0 < number < 12:
        raise InputError(f"{args.stage} is for one process, and torchrun started {world_size}: run s12_ddp")

    args.fallbacks, native = {}, machine.native_amp_dtype(device)
    if "amp_dtype" not in given and native == torch.float32:
        args.fallbacks["amp_dtype"] = f"this {device.type} has no 16-bit arithmetic, so float32 stays"
    args.amp_dtype = DTYPES.get(args.amp_dtype, native)
    if "compile" not in given and problem:
        args.fallbacks["compile"] = f"left out, {problem}"
    if cpu:
        machine.keep_freed_memory()
    ranks_here = machine.environment_number("LOCAL_WORLD_SIZE", 1)
    if cpu and ranks_here > 1 and torch.get_num_threads() == 1:
        # torchrun gives each of several ranks one thread, however many cores there are
        torch.set_num_threads(max(1, machine.cores() // ranks_here))
    if args.save is not None:  # refused now rather than when the work is done
        check_save(args.save, nbytes=weight_bytes(args.size, args.seq_len))
        if args.record is not None and Path(args.record).resolve().is_relative_to(Path(args.save).resolve()):
            raise InputError(f"--record {args.record} is inside --save {args.save}: name a file somewhere else")
    if args.record is not None and is_rank_0():
        try:
            open(args.record, "x").close()
            os.unlink(args.record)
        except OSError as error:
            raise InputError(f"--record {args.record}: {error.strerror}; name a new file of yours") from None


def source(stage):
    """(docstring, code below it) of a stage; ("", "") for any other script."""
    path = ROOT / "stages" / f"{stage}.py"
    text = path.read_text(encoding="utf-8") if path.exists() else '""""""'
    _, doc, code = text.split('"""', 2)
    return doc, code.strip()


def code_sha256(stage):
    """The sha256 of a stage's code below its docstring, by which a record names it."""
    return hashlib.sha256(source(stage)[1].encode()).hexdigest()


def summarize(steps, warmup=WARMUP):
    """The figures of a run, the same for the line that a stage prints and the row that a table shows.

    steps: a record's step lines, one or more. dt is in ms, memory in bytes; without a step after the warm-up, counted
    is 0, and the last step is all there is.
    """
    counted = steps[warmup:] or steps[-1:]
    dts = [s["dt"] for s in counted]
    q1, median, q3 = statistics.quantiles(dts, n=4, method="inclusive") if len(dts) > 1 else dts * 3
    return dict(
        dt_ms=1e3 * median,
        dt_q1_ms=1e3 * q1,
        dt_q3_ms=1e3 * q3,
        tok_per_sec=counted[0]["tokens"] / median,
        memory=max((s["memory"] for s in counted if s["memory"]), default=None),
        meter=counted[0]["meter"],
        loss=steps[-1]["loss"],
        counted=max(0, len(steps) - warmup),
        warmup_s=sum(s["dt"] for s in steps[:warmup]),
    )


class Record:
    """The lines of JSON that a run leaves: in --record FILE, or on stdout where the bench leads it.

    A run that is led takes a step for each line on its stdin, and ends with its summary when that closes.
    """

    def __init__(self, args):
        self.led, self.device, self.file = args.led, args.device, None
        if is_rank_0() and (args.led or args.record):
            self.file = sys.stdout if args.led else open(args.record, "x")  # noqa: SIM115

    def write(self, kind, **entry):
        """Add a line. Raises InputError where it can't be written."""
        if self.file:
            try:
                print(json.dumps(dict(kind=kind, **entry), allow_nan=False), file=self.file, flush=True)
            except OSError as error:
                raise InputError(f"--record {self.file.name} can't be written: {error.strerror}") from None

    def wait(self):
        """Whether there is to be another step: always, or the bench's word for all ranks alike."""
        if not self.led:
            return True
        go = torch.tensor([bool(sys.stdin.readline()) if is_rank_0() else True], device=self.device, dtype=torch.int32)
        if dist.is_available() and dist.is_initialized():
            dist.broadcast(go, 0)
        return bool(go.item())


class StepLog:
    """Times whole steps, prints a line for each and writes the record. Rank 0 alone prints.

    A step lasts from the end of the one before to its own end, with the device synchronized at both, so that nothing
    in the loop escapes the clock; the log's own work in between is not counted.
    """

    current = None  # the log of this process, for _excepthook

    def __init__(self, args, model, loader, tokens_per_step):
        StepLog.current = self
        self.args, self.device, self.tokens_per_step = args, args.device, tokens_per_step
        model = getattr(model, "module", model)  # out of DDP's wrapper
        self.model = getattr(model, "_orig_mod", model)  # and out of torch.compile's
        self.held_out = load_tokens(args.data, split="val") if args.eval and is_rank_0() else None
        self.prints, self.tokenizer = is_rank_0() and not args.led, loader.tokens.tokenizer
        self.record, self.steps, self.profiler, self.profile = Record(args), [], None, {}
        parameters = sum(p.numel() for p in model.parameters())
        what = f"{args.size}, {parameters:,} parameters | B {args.batch_size}, T {args.seq_len}"
        what += f", {tokens_per_step:,} tokens per step | {loader.tokens.corpus}, {self.tokenizer}"
        where = machine.device_name(self.device)
        where += f", threads {torch.get_num_threads()}" if self.device.type == "cpu" else ""
        self.say(f"{args.title}\n{what} | {where}")
        if self.record.file:
            self.record.write("header", **self._header(parameters, loader))
        self._start()

    def _header(self, parameters, loader):
        args, git = self.args, lambda *words: machine.command_output(["git", "-C", str(ROOT), *words])
        flags = ("steps", "batch_size", "seq_len", "size", "seed", "data", "compile", "accum")
        settings = {flag: getattr(args, flag) for flag in flags} | dict(world_size=loader.world_size)
        settings |= dict(amp_dtype=str(args.amp_dtype).removeprefix("torch."))
        settings |= dict(corpus=loader.tokens.corpus, tokenizer=self.tokenizer)
        header = dict(stage=args.stage, title=args.title, code=code_sha256(args.stage))
        header |= dict(commit=git("rev-parse", "HEAD") or None, dirty=bool(git("status", "--porcelain", "-uno")))
        header |= dict(settings=settings, parameters=parameters, tokens_per_step=self.tokens_per_step)
        header |= dict(environment=machine.environment(self.device), fallbacks=args.fallbacks)
        return header | dict(started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    def _start(self):
        if not self.record.wait():  # the bench has enough
            if self.steps:
                self.finish(self.model)
            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()  # else its threads may abort the exit
            sys.exit()
        number = len(self.steps)
        last = self.args.profile and number + 1 == self.args.steps
        # the second step is of the warm-up too: its profile tells which attention kernel really ran
        if last or (number == 1 and self.record.file and self.args.steps > WARMUP):
            activities = None if last else [torch.profiler.ProfilerActivity.CPU]
            self.profiler = torch.profiler.profile(activities=activities, acc_events=True)  # else torch 2.11 warns
            self.profiler.__enter__()
        torch.get_device_module(self.device).synchronize()
        self.began = time.perf_counter()

    def step(self, loss, **figures):
        """End a step, and the run where its loss, a scalar tensor, is not finite. figures: to show beside it, as lr."""
        torch.get_device_module(self.device).synchronize()
        dt = time.perf_counter() - self.began
        number, loss = len(self.steps), loss.item()
        if self.profiler:
            self.profiler.__exit__(None, None, None)
            events, self.profiler = self.profiler.key_averages(), None
            clock = "device_time_total" if self.device.type == "cuda" else "cpu_time_total"
            times = [(getattr(e, f"self_{clock}") / 1e3, getattr(e, clock) / 1e3, e.count, e.key) for e in events]
            # {operation: (ms of its own, ms with its parts, calls)}
            self.profile = {key: (own, total, n) for own, total, n, key in sorted(times, reverse=True)}
        figures = {name: float(value) for name, value in figures.items()}
        # JSON has no infinity, which a norm is where float16 overflows
        entry = {k: v if math.isfinite(v) else None for k, v in dict(step=number, loss=loss, **figures).items()}
        memory, meter = machine.peak_memory(self.device)
        self.steps.append(entry | dict(dt=dt, tokens=self.tokens_per_step, memory=memory, meter=meter))
        self.record.write("step", **self.steps[-1])
        shown = "".join(f" | {k} {v:.4e}" if k == "lr" else f" | {k} {v:.4f}" for k, v in figures.items())
        speed = f"dt {1e3 * dt:.2f}ms | tok/sec {self.tokens_per_step / dt:,.0f}"
        self.say(f"step {number:4d} | loss {loss:.4f}{shown} | {speed}")
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {number}: try another --seed or --amp-dtype")
        if number + 1 == WARMUP:
            machine.reset_peak_memory(self.device)
        if number + 1 < self.args.steps:
            self._start()

    def finish(self, model):
        """End the run: the summary line, the record's summary, and the weights where --save asked for them."""
        self.record.wait()  # leaving takes time too, and others that the bench leads may still be on the clock
        figures = summarize(self.steps)
        if self.device.type == "cuda":
            figures["reserved"] = torch.cuda.max_memory_reserved(self.device)
        if self.held_out is not None:
            figures["eval"] = evaluate(self.model, self.held_out)
        profile = dict(profile=self.profile) if self.args.profile else {}
        # SDPA's kernel by the operation that called it; none where attention is explicit
        sdpa = re.search("_scaled_dot_product_(?:attention_)?(flash|cudnn|efficient|math)", " ".join(self.profile))
        self.record.write("summary", **figures, **profile, sdpa=sdpa and sdpa[1])
        n, memory = figures["counted"], figures["meter"]
        memory = f"{figures['memory'] / 1e9:.2f} GB ({memory})" if figures["memory"] else memory
        steps = f"{n} step{'s' * (n > 1)}" if n else "the last step alone, warm-up included"
        line = "median dt {dt_ms:.2f}ms [{dt_q1_ms:.2f}, {dt_q3_ms:.2f}] over {over} | tok/sec {tok_per_sec:,.0f} | "
        line += "memory {held} | warm-up {warmup_s:.1f}s" + " | held-out loss {eval:.4f}" * ("eval" in figures)
        self.say(line.format(**figures, over=steps, held=memory))
        for key, (own, _, n) in list(profile.get("profile", {}).items())[:20]:
            self.say(f"{own:9.2f} ms in {n:4d} x {key}")
        self.save()

    def save(self):
        """Write the weights where --save asked for them."""
        if self.prints and self.args.save is not None:
            self.model.save_pretrained(self.args.save, tokenizer=self.tokenizer)
            self.say(f"saved to {self.args.save}")

    def say(self, line):
        """Print a line of progress. A reader that is gone or a disk that is full costs the line and not the run."""
        if self.prints:
            try:
                print(line, flush=True)
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is buffered, too


def _excepthook(kind, error, trace):
    """One line and no traceback for what the user can fix; Python's own report for all else."""
    log = StepLog.current
    text, status, B = str(error).strip(), 1, log.args.batch_size if log else 1
    message = re.sub(r"^backend='\w+' raised:\s+", "", text).split("\n")[0][:300]
    if issubclass(kind, KeyboardInterrupt):
        message, status = "interrupted", 130
    elif issubclass(kind, InputError):
        status = 2
    elif issubclass(kind, MemoryError) or re.search("out of memory|can't allocate|ALLOC_FAILED", text):
        remedy = f"--batch-size {B // 2}" if B > 1 else "a smaller --seq-len or --size"
        message = f"out of memory at batch size {B}: try {remedy}"
    elif kind.__module__.startswith(("torch._inductor", "torch._dynamo")):
        message = f"torch.compile failed ({message}): fix the compiler, or pass --no-compile"
    elif re.search("(closed|reset) by peer", text):
        message = "another rank has ended: its own message says why"
    elif not issubclass(kind, FloatingPointError):
        message = None
    if log:
        with contextlib.suppress(InputError):
            log.record.write("error", error=message or f"{kind.__name__}: {text[:300]}")
        if str(message).startswith(("interrupted", "another rank")) and log.steps:
            try:
                log.save()
            except InputError as failed:
                message = f"{message}; {failed}"
    if message is None:
        return sys.__excepthook__(kind, error, trace)
    # __stderr__, since torch.distributed wraps this hook and holds back what it writes to stderr
    print(f"error: {message}", file=sys.__stderr__, flush=True)
    if log and log.profiler:  # torch crashes at exit where its profiler still runs
        os._exit(status)
    sys.exit(status)
