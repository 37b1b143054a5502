"""The clock of a stage, the line that it prints for each step, its record, and how its run ends."""

import contextlib
import datetime
import functools
import json
import math
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from data import InputError, load_tokens
from model import evaluate

from . import arithmetic, ladder, machine, memory, parts, rates, results
from .results import WARMUP, summarize

ROOT = Path(__file__).resolve().parents[2]
PROFILE_LINES = 20  # how many operations --profile shows
LONGEST_MESSAGE = 300  # characters of an error's message that are shown and recorded
# how PyTorch, cuBLAS and NCCL say that memory is short, where they raise a plain RuntimeError
OUT_OF_MEMORY = r"out of memory|can't allocate|ALLOC_FAILED"
CLOSED_BY_PEER = r"(closed|reset) by peer"  # how gloo says that another rank has gone
SDPA_KERNEL = r"_scaled_dot_product_(?:attention_)?(flash|cudnn|efficient|math)"


class LossNotFinite(FloatingPointError):
    """The loss of a step is infinite or no number."""


def let_ctrl_c_kill():
    """Let Ctrl-C end the process without Python, whose handler can't run while a rank waits for others."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def let_signals_interrupt():
    """Let Ctrl-C, a batch system's SIGTERM and a closed terminal's SIGHUP all raise KeyboardInterrupt.

    A signal that is ignored stays so: nohup ignores SIGHUP, and a shell SIGINT for its background jobs.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signal_number) != signal.SIG_IGN:
            signal.signal(signal_number, signal.default_int_handler)


def callers(event):
    """The name of a profiled operation and those of its callers, the outermost last."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names


def synchronize(device):
    """Wait until the device has done all that it was asked to do."""
    torch.get_device_module(device).synchronize()


def leave_process_group():
    """Leave torch.distributed's group, if there is one: its threads could abort the exit."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def git_state(folder):
    """(commit, whether tracked files differ from it) of a folder; (None, False) where git tracks no file of it.

    A record in results/ may be removed to make room for a new one, so what differs there does not count.
    """
    git = ["git", "-C", str(folder)]
    if not machine.command_output([*git, "ls-files"]):  # as where a zip was unpacked inside another repository
        return None, False
    commit = machine.command_output([*git, "rev-parse", "HEAD"])
    changes = machine.command_output([*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!results"])
    return commit or None, bool(changes)


def number_or_none(value):
    """A figure as JSON takes it, which has no infinity; a norm is infinite where float16 overflows."""
    return value if math.isfinite(value) else None


def compile_cache():
    """Whether torch.compile found all graphs of this process in its cache: "hit", "miss", or None without any."""
    if "torch._dynamo" not in sys.modules:
        return None
    counters = torch._dynamo.utils.counters["inductor"]
    if counters["fxgraph_cache_miss"] > 0:
        return "miss"
    if counters["fxgraph_cache_hit"] > 0:
        return "hit"
    return None


class Record:
    """The lines of JSON that a run leaves, in the format of results.py.

    They go to the file of --record, or to stdout where the run is a worker. A worker is led by the bench: it
    takes a step for each line on its stdin, and ends with its summary when that closes.
    """

    def __init__(self, args):
        self.is_worker = args.worker
        self.device = args.device
        self.file = None
        if not machine.is_rank_0():
            return
        if args.worker:
            self.file = sys.stdout
        elif args.record:
            self.file = open(args.record, "x", encoding="utf-8")  # noqa: SIM115

    def write(self, kind, **entry):
        """Add a line. Raises InputError where it can't be written."""
        if self.file is None:
            return
        try:
            print(json.dumps({"kind": kind, **entry}, allow_nan=False), file=self.file, flush=True)
        except OSError as error:
            problem = f"--record {self.file.name} can't be written: {error.strerror}; name a file on another disk"
            if self.is_worker:
                problem = f"a step can't be sent to the bench: {error.strerror}; start the bench again"
            raise InputError(problem) from None

    def next_step_wanted(self):
        """Whether to take another step: always, or as the bench tells a worker, on all of its ranks alike."""
        if not self.is_worker:
            return True
        wanted = True
        if machine.is_rank_0():
            wanted = bool(sys.stdin.readline())
        if dist.is_available() and dist.is_initialized():
            answer = torch.tensor([wanted], device=self.device, dtype=torch.int32)
            dist.broadcast(answer, 0)
            wanted = bool(answer.item())
        return wanted


class StepLog:
    """Times whole steps, prints a line for each and writes the record. Rank 0 alone prints.

    A step lasts from the end of the one before to its own end, with the device synchronized at both, so that
    nothing in the loop escapes the clock; the log's own work in between is not counted.
    """

    current = None  # the log of this process, for end_run()

    def __init__(self, args, model, loader, tokens_per_step):
        self.args = args
        self.device = args.device
        self.tokens_per_step = tokens_per_step
        self.corpus = loader.tokens.corpus
        self.tokenizer = loader.tokens.tokenizer
        self.world_size = loader.world_size
        without_ddp = getattr(model, "module", model)
        self.model = getattr(without_ddp, "_orig_mod", without_ddp)  # where torch.compile keeps the model
        self.prints = machine.is_rank_0() and not args.worker
        self.steps = []
        self.profiler = None
        self.profile = {}
        self.parts = {}
        self.held_out = None
        self.card = {}
        self.record = Record(args)
        StepLog.current = self
        let_signals_interrupt()  # not before: see let_ctrl_c_kill()
        if args.eval and machine.is_rank_0():
            self.held_out = load_tokens(args.data, split="val")
        self._say_what_runs()
        if self.record.file:
            self.record.write("header", **self.header)
        self._begin_step()

    def _parameters(self):
        return sum(p.numel() for p in self.model.parameters())

    def _say_what_runs(self):
        args = self.args
        model = f"{args.size}, {self._parameters():,} parameters"
        batch = f"B {args.batch_size}, T {args.seq_len}, {self.tokens_per_step:,} tokens per step"
        where = machine.device_name(self.device)
        if self.device.type == "cpu":
            where += f", threads {torch.get_num_threads()}"
        self.say(args.title)
        self.say(f"{model} | {batch} | {self.corpus}, {self.tokenizer} | {where}")

    @functools.cached_property
    def header(self):
        """What the record begins with, a dict. Made once, since it asks git and the driver."""
        args = self.args
        commit, dirty = git_state(ROOT)
        return {
            "stage": args.stage,
            "title": args.title,
            "code": ladder.code_sha256(args.stage),
            "commit": commit,
            "dirty": dirty,
            "settings": {
                "steps": args.steps,
                "batch_size": args.batch_size,
                "seq_len": args.seq_len,
                "size": args.size,
                "seed": args.seed,
                "lr": args.lr,
                "data": args.data,
                "compile": args.compile,
                "accum": args.accum,
                "world_size": self.world_size,
                "amp_dtype": str(args.amp_dtype).removeprefix("torch."),
                "corpus": self.corpus,
                "tokenizer": self.tokenizer,
                "memory_variables": memory.variables(),
            },
            "shape": args.shape,
            "parameters": self._parameters(),
            "tokens_per_step": self.tokens_per_step,
            "environment": machine.environment(self.device),
            "fallbacks": args.fallbacks,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def _begin_step(self):
        """Start the clock of the next step. A worker waits until the bench asks for it, and ends where it does not."""
        if not self.record.next_step_wanted():
            if self.steps:
                self.finish(self.model)
            leave_process_group()
            sys.exit()
        step = len(self.steps)
        if self.args.profile and step + 1 == self.args.steps:
            self._begin_profile(activities=None)  # all that this machine can profile
        elif step == 1 and self.record.file and self.args.steps > WARMUP:
            # a step of the warm-up, which no figure counts: its profile tells which attention kernel ran
            self._begin_profile(activities=[torch.profiler.ProfilerActivity.CPU])
        synchronize(self.device)
        self.page_faults_before = memory.page_faults()
        self.began = time.perf_counter()

    def _begin_profile(self, activities):
        # without acc_events torch 2.11 warns
        self.profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self.profiler.__enter__()

    def _end_profile(self, step_ms):
        """Keep {operation: (ms of its own, ms with what it called, calls)}, the longest first, and {part: ms}.

        step_ms: what the whole step took.
        """
        self.profiler.__exit__(None, None, None)
        clock = "device_time_total" if self.device.type == "cuda" else "cpu_time_total"
        profile, parts_ms = {}, {}
        for event in self.profiler.events():
            if event.device_type != DeviceType.CPU:
                continue  # a kernel, whose time is also that of the operation that started it
            own_ms, total_ms = getattr(event, f"self_{clock}") / 1e3, getattr(event, clock) / 1e3
            before = profile.get(event.name, (0.0, 0.0, 0))
            profile[event.name] = (before[0] + own_ms, before[1] + total_ms, before[2] + 1)
            part = parts.part_of(callers(event))
            parts_ms[part] = parts_ms.get(part, 0.0) + own_ms
        # what the named parts leave of the whole step: more than what the profiler saw outside of them
        parts_ms[parts.REST] = step_ms - sum(ms for part, ms in parts_ms.items() if part != parts.REST)
        longest_first = sorted(profile.items(), key=lambda item: item[1], reverse=True)
        self.profile, self.parts = dict(longest_first), parts_ms
        self.profiler = None

    def step(self, loss, **figures):
        """End a step. Raises LossNotFinite, which ends the run, where its loss is not finite.

        loss: a scalar tensor, in nats per token. figures: what to show beside it, such as lr, as numbers or
        scalar tensors.
        """
        synchronize(self.device)
        dt = time.perf_counter() - self.began
        page_faults = memory.page_faults() - self.page_faults_before
        if self.profiler:
            self._end_profile(1e3 * dt)
        loss = loss.item()
        figures = {name: float(value) for name, value in figures.items()}
        step = len(self.steps)
        self._record_step(step, loss, figures, dt, page_faults)
        self._say_step(step, loss, figures, dt)
        if not math.isfinite(loss):
            raise LossNotFinite(f"the loss is {loss} at step {step}: try another --seed or --amp-dtype")
        if len(self.steps) == WARMUP:
            machine.reset_peak_memory(self.device)
            self._note_card("start")
        if len(self.steps) < self.args.steps:
            self._begin_step()

    def _note_card(self, moment):
        """Keep the state of a card, for the record. No step is on the clock: nvidia-smi can take a second."""
        if self.device.type == "cuda" and self.record.file:
            self.card[moment] = machine.card_state(self.device)

    def _record_step(self, step, loss, figures, dt, page_faults):
        held, meter = machine.peak_memory(self.device)
        entry = {"step": step, "loss": number_or_none(loss)}
        for name, value in figures.items():
            entry[name] = number_or_none(value)
        entry |= {"dt": dt, "tokens": self.tokens_per_step, "memory": held, "meter": meter}
        entry["page_faults"] = page_faults
        self.steps.append(entry)
        self.record.write("step", **entry)

    def _say_step(self, step, loss, figures, dt):
        words = [f"step {step:4d}", f"loss {loss:.4f}"]
        for name, value in figures.items():
            words.append(f"lr {value:.4e}" if name == "lr" else f"{name} {value:.4f}")
        words.append(f"dt {1e3 * dt:.2f}ms")
        words.append(f"tok/sec {self.tokens_per_step / dt:,.0f}")
        self.say(" | ".join(words))

    def finish(self, model):
        """End the run: the record's summary, the summary line, and the weights where --save asks for them.

        model: the one that the log has from its start, named here so that a stage shows what is saved.
        """
        if self.card:
            self._note_card("end")
        # a worker waits until the bench closes its stdin: leaving takes time, and others may be on the clock
        self.record.next_step_wanted()
        figures = summarize(self.steps)
        if self.device.type == "cuda":
            figures["reserved"] = torch.cuda.max_memory_reserved(self.device)
        if self.card:
            figures["card"] = self.card
        if self.held_out is not None:
            figures["eval"] = evaluate(self.model, self.held_out)
        if self.args.profile:
            figures["profile"] = self.profile
            figures["parts"] = self.parts
            if self.device.type != "cpu":
                torch.accelerator.empty_cache()  # the copy needs room
            figures["rates"] = rates.measure(self.device, self.args.amp_dtype)
        kernel = re.search(SDPA_KERNEL, " ".join(self.profile))  # none where attention is explicit
        figures["sdpa"] = kernel[1] if kernel else None
        figures["compile_cache"] = compile_cache()
        self.record.write("summary", **figures)
        self._say_summary(figures)
        self.save()

    def _say_summary(self, figures):
        quartiles = f"[{figures['dt_q1_ms']:.2f}, {figures['dt_q3_ms']:.2f}]"
        if figures["counted"] == 0:
            steps = "the last step alone, warm-up included"
        elif figures["counted"] == 1:
            steps = "1 step"
        else:
            steps = f"{figures['counted']} steps"
        held = f"{figures['memory'] / 1e9:.2f} GB ({figures['meter']})"
        words = [f"median dt {figures['dt_ms']:.2f}ms {quartiles} over {steps}"]
        words.append(f"tok/sec {figures['tok_per_sec']:,.0f}")
        words.append(f"memory {held}")
        words.append(f"warm-up {figures['warmup_s']:.1f}s")
        if "eval" in figures:
            words.append(f"held-out loss {figures['eval']:.4f}")
        self.say(" | ".join(words))
        if "profile" in figures:
            self._say_profile(figures)

    def _say_profile(self, figures):
        longest = list(figures["profile"].items())[:PROFILE_LINES]
        for name, (own_ms, _, calls) in longest:
            self.say(f"{own_ms:9.2f} ms in {calls:4d} x {name}")
        measured_rates = arithmetic.Rates(figures["rates"]["peak"], figures["rates"]["copy"])
        self.say("this step in ms, and what its FLOPs and bytes take at the rates of this machine:")
        self.say(" measured predicted")
        lines = parts.table(self.header, figures["parts"], measured_rates, figures["sdpa"])
        for part, measured_ms, predicted_ms in lines:
            shown = "" if predicted_ms is None else f"{predicted_ms:.2f}"
            self.say(f"{measured_ms:9.2f} {shown:>9} {part}")

    def save(self):
        """Write the weights where --save asked for them. Raises InputError where they can't be written."""
        if self.prints and self.args.save is not None:
            self.model.save_pretrained(self.args.save, tokenizer=self.tokenizer)
            self.say(f"saved to {self.args.save}")

    def say(self, line):
        """Print a line of progress. A reader that is gone, or a full disk, costs the line and not the run."""
        if not self.prints:
            return
        try:
            print(line, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is buffered, too


@dataclass(frozen=True)
class Ending:
    """How an error ends a run.

    reason: a word of results.REASONS. message: one line for the user, or None for an error that only its
    traceback explains. status: the exit status. saves_weights: whether what was trained so far is good, and
    --save keeps it.
    """

    reason: str
    message: str | None
    status: int = 1
    saves_weights: bool = False


def first_line(error):
    """The first line of an error's message, without the compiler's words before it."""
    text = re.sub(r"^backend='\w+' raised:\s+", "", str(error).strip())
    return text.split("\n")[0][:LONGEST_MESSAGE]


def ending_of(error, batch_size):
    """The Ending of a run that met this exception. batch_size: sequences in a micro-batch."""
    text = str(error)
    if isinstance(error, KeyboardInterrupt):
        return Ending(results.INTERRUPTED, "interrupted", status=130, saves_weights=True)
    if isinstance(error, InputError):
        return Ending(results.BAD_INPUT, first_line(error), status=2)
    if isinstance(error, LossNotFinite):
        return Ending(results.LOSS_NOT_FINITE, first_line(error))
    if isinstance(error, MemoryError) or re.search(OUT_OF_MEMORY, text):
        remedy = f"--batch-size {batch_size // 2}" if batch_size > 1 else "a smaller --seq-len or --size"
        return Ending(results.OUT_OF_MEMORY, f"out of memory at batch size {batch_size}: try {remedy}")
    if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
        message = f"torch.compile failed ({first_line(error)}): fix the compiler, or pass --no-compile"
        return Ending(results.COMPILE_FAILED, message)
    if re.search(CLOSED_BY_PEER, text):
        message = "another rank has ended: its own message says why"
        return Ending(results.ANOTHER_RANK_ENDED, message, saves_weights=True)
    return Ending(results.CRASHED, None)


def end_run(args, kind, error, trace):
    """End the process by one line on stderr for what the user can fix; by Python's own report for all else.

    args: the flags of the run, with which this is sys.excepthook of a stage. The record gets the error, and
    --save the weights where they are good.
    """
    log = StepLog.current
    ending = ending_of(error, args.batch_size or 1)
    message = ending.message
    recorded = message or f"{kind.__name__}: {str(error).strip()[:LONGEST_MESSAGE]}"
    with contextlib.suppress(InputError):  # the error may be that the record can't be written
        if log:
            log.record.write("error", reason=ending.reason, error=recorded)
        elif args.worker:  # the bench is to know it, too
            Record(args).write("error", reason=ending.reason, error=recorded)
    if log and log.steps and ending.saves_weights:
        try:
            log.save()
        except InputError as failed:
            message = f"{message}; {failed}"
    if message is None:
        return sys.__excepthook__(kind, error, trace)
    # __stderr__, since torch.distributed wraps this hook and holds back what it writes to stderr
    print(f"error: {message}", file=sys.__stderr__, flush=True)
    if log and log.profiler:  # torch crashes at exit where its profiler still runs
        os._exit(ending.status)
    sys.exit(ending.status)
