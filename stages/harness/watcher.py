"""Watches a training script from outside: PyTorch tells of its forwards, its backwards and the steps of its optimizer.

A step of the optimizer ends a step, and begins the next one. So data, forward, backward, update and whatever else the
loop does are on the clock. The script is not changed, and what it uses is not guessed from its text.
"""

import contextlib
import functools
import multiprocessing
import os
import sys
import sysconfig
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import ladder, machine, rates
from .added import Added
from .figures import LONG_WAIT, waiting_share
from .report import Report
from .stepprofile import StepProfile
from .techniques import find_techniques, gpt_shape, parameters_of, work_of

end_process = os._exit  # watch.py replaces os._exit for the script
SILENCE = 60  # seconds without a step that are told, and each time that they have passed again


class MicroBatches:
    """What was seen since the last step ended.

    count: of micro-batches. tokens: in all of them. samples: the rows of their first tensors, for what has no tokens.
    batch_size, seq_len: of the last one; seq_len is None without tokens. loss: the sum of what backward() was called
    on, a tensor, or None. first_forward: when a module was called first, by the clock, or None. autocast: the dtype of
    the last autocast, as "bfloat16", or None.
    """

    def __init__(self):
        self.count = 0
        self.tokens = 0
        self.samples = 0
        self.batch_size = None
        self.seq_len = None
        self.loss = None
        self.first_forward = None
        self.autocast = None
        self.is_open = False  # whether a forward was seen since the last backward

    def add_forward(self, tensors):
        """Count what the outermost module was called with. tensors: one or more.

        The first module of a micro-batch gets its tokens, or samples. A later one is counted where its own first
        tensor is ids: one that begins with floats stands behind another module, as a head behind an encoder.
        """
        ids = [tensor for tensor in tensors if are_ids(tensor)]
        is_first = not self.is_open
        self.is_open = True
        if is_first:
            self.count += 1
        if ids and (is_first or are_ids(tensors[0])):
            self.tokens += ids[0].numel()
            self.batch_size, self.seq_len = ids[0].shape
        elif is_first:
            rows = tensors[0].shape[0] if tensors[0].dim() else 1
            self.samples += rows
            if self.seq_len is None:
                self.batch_size = rows

    @property
    def unit(self):
        """What can be counted: "tok", "sample" where there are no tokens, or "step" where nothing was seen."""
        if self.tokens:
            return "tok"
        return "sample" if self.samples else "step"

    def count_of(self, unit):
        """Return how many tokens, samples or steps these are. unit: as above, of the first step that was seen."""
        if unit == "tok":
            return self.tokens
        return self.samples if unit == "sample" else 1

    def add_loss(self, loss):
        """Add what backward() is called on, and close the micro-batch."""
        self.is_open = False
        if torch.is_tensor(loss) and loss.numel() == 1:
            total = 0.0 if self.loss is None else self.loss
            self.loss = total + loss.detach().float()  # a new tensor: a CUDA graph may write into its own again


class Watcher:
    """Times the steps of a script that runs in this process, and reports them. Rank 0 alone prints.

    args: what watch.py was given: steps (None for all), profile, seed, script and title; and record, a Record.
    """

    def __init__(self, args, out):
        """out: a file for the lines, which stays open where the script closes its stdout."""
        self.args = args
        self.out = out
        self.pid = os.getpid()
        self.was_launched = "WORLD_SIZE" in os.environ  # by torchrun: a script may set it later
        self.began = time.perf_counter()
        self.optimizer = None  # the first that takes a step; where there are more, they share its step
        self.optimizer_steps = 0
        self.device = None
        self.report = None
        self.seen = MicroBatches()
        self.models = {}  # {id: module} of all that were called in training
        self.added = Added(args.added)
        self.forwards = 0  # of outermost modules, also in evaluation
        self.backwards = 0
        self.waits_for_bench = False
        self.in_backward = False
        self.unscaled_loss = None  # what a GradScaler multiplied, until backward() is called
        self.script_profiles = False
        self.profiler = None  # while a step is profiled
        # made before watch_pytorch() looks who makes one
        self.profiler_of_techniques = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
        )
        self.profiler_of_parts = torch.profiler.profile(acc_events=True)
        self.techniques = None
        self.profile = None
        self.t0 = None

    # what PyTorch tells

    def saw_forward(self, module, args, kwargs):
        """Note a call of the outermost module, and add to it what is to be added."""
        self.forwards += 1
        if self.seen.first_forward is None:
            self.seen.first_forward = time.perf_counter()
        # in a backward, activation checkpointing calls modules again
        if not module.training or not torch.is_grad_enabled() or self.in_backward:
            return
        tensors = tensors_in([*args, *kwargs.values()])
        if not tensors or next(module.parameters(), None) is None:  # a loss has no parameters
            return
        self.models[id(module)] = module
        self.seen.add_forward(tensors)
        self.added.before_forward(module)

    def saw_backward(self, tensors):
        """Note what backward() is called on."""
        self.backwards += 1
        self.added.before_backward()
        loss = tensors
        if not torch.is_tensor(tensors) and len(tensors) == 1:
            loss = tensors[0]
        if self.unscaled_loss is not None:
            loss, self.unscaled_loss = self.unscaled_loss, None
        self.seen.add_loss(loss)

    def saw_optimizer_step(self, optimizer):
        """Note a step of an optimizer, also one that a GradScaler skipped. The first optimizer's ends the step."""
        if os.getpid() != self.pid:  # a child that the script forked
            return
        if self.optimizer is None:
            self.optimizer = optimizer
            self.device = parameters_of([], optimizer)[0].device
        if optimizer is self.optimizer:
            self.optimizer_steps += 1
            self.end_step()

    # a step

    def end_step(self):
        """End a step: stop the clock, report, and start the clock again. The first call only starts it.

        Where the bench leads, wait for its request before the clock starts.
        """
        self.added.before_backward()  # where a script calls no backward()
        machine.synchronize(self.device)
        now = time.perf_counter()
        flush(sys.stdout)  # so that the script's own lines stand before ours
        if self.report is None:
            self.begin_report(now)
        else:
            self.report_step(now - self.t0)
        self.waits_for_bench = True
        is_asked_for_more = self.args.record.wait_for_request()
        self.waits_for_bench = False
        if not is_asked_for_more or len(self.report.steps) == self.args.steps:
            self.finish()
            self.leave(0)
        self.seen = MicroBatches()
        self.start_profiler()
        machine.synchronize(self.device)
        self.t0 = time.perf_counter()

    def begin_report(self, now):
        """Print what is trained, as the first step has shown it. Exits where the script started ranks of its own."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks > 1 and not self.was_launched:
            remedy = f"torchrun --standalone --nproc_per_node={ranks} stages/watch.py {self.args.title}"
            line = f"{self.args.title} starts {ranks} ranks by itself: start them by {remedy}"
            print(f"error: {line}", file=sys.stderr)
            self.args.record.write_error(line)
            self.leave(2)
        seen = self.seen
        models = list(self.models.values())
        shape = gpt_shape(models, seen.seq_len) if seen.seq_len else None
        settings = {
            "steps": self.args.steps,
            "batch_size": seen.batch_size,
            "seq_len": seen.seq_len,
            "seed": self.args.seed,
            "accum": seen.count * ranks,
            "world_size": ranks,
        }
        facts = {
            "title": self.args.title,
            "script": self.args.script,
            "device": self.device,
            "shape": shape,
            "parameters": sum(p.numel() for p in parameters_of(models, self.optimizer)),
            "batch_size": seen.batch_size,
            "seq_len": seen.seq_len,
            "tokens": seen.count_of(seen.unit) * ranks,
            "first_step": 1,
            "unit": seen.unit,
            "corpus": None,
            "settings": settings,
            "fallbacks": {},
        }
        prints = machine.is_rank_0() and not self.args.record.is_led
        self.report = Report(self.args.record, facts, prints, self.out)
        self.report.say(f"step    0 ended {now - self.began:.1f} s after the start, and the clock starts here")

    def report_step(self, dt):
        """Report a step that took dt seconds."""
        seen = self.seen
        events = self.stop_profiler(1e3 * dt) if self.profiler else None
        if self.techniques is None:
            self.keep_techniques(events)
        facts = self.report.facts
        tokens = seen.count_of(facts["unit"]) * facts["settings"]["world_size"]
        wait = None
        if seen.first_forward is not None:
            wait = seen.first_forward - self.t0
        loss = None if seen.loss is None else seen.loss.item()
        self.report.add_step(loss, dt, tokens, {}, wait=wait)

    # the profiler, for a step that shows the techniques, and for the parts of the last step

    def start_profiler(self):
        """Profile the next step where it is the first one, or with --profile the last one.

        Not where the script profiles itself, or a profiler is at work: two empty one another.
        """
        is_first = not self.report.steps
        is_last = len(self.report.steps) + 1 == self.args.steps
        if self.script_profiles or torch.autograd._profiler_enabled():
            return
        if self.args.profile and is_last:
            self.profiler = self.profiler_of_parts
        elif is_first:
            self.profiler = self.profiler_of_techniques
        else:
            return
        self.profiler.start()

    def stop_profiler(self, step_ms):
        """Return what the profiler saw, a list of events, or None where the script began to profile in this step."""
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        self.report.profiled_steps.append(self.report.facts["first_step"] + len(self.report.steps))
        if self.script_profiles:
            return None
        events = profiler.events()
        if profiler is self.profiler_of_parts:
            self.profile = StepProfile(events, self.device, step_ms)
        return events

    def keep_techniques(self, events):
        """Find out what the step used, and write that to the record at once. events: of the profiler, or None."""
        models = list(self.models.values())
        autocast = self.seen.autocast
        if autocast is None and torch.is_autocast_enabled(self.device.type):  # entered once, around the loop
            autocast = machine.dtype_name(torch.get_autocast_dtype(self.device.type))
        self.techniques = find_techniques(models, self.optimizer, self.device, autocast, events)
        self.techniques["loaders"] = len(multiprocessing.active_children()) + count_threads_of_script()
        self.args.record.write("techniques", **self.techniques)

    # the end

    def finish(self):
        """Write and print the summary, and what the script has, lacks and waits for. Nothing without a timed step."""
        if self.report is None or not self.report.steps:
            return
        counted, _ = self.report.counted_steps()
        summary = {"sdpa": self.techniques["sdpa"], "wait": waiting_share(counted)}
        lines = []
        if self.profile:
            lines = self.profile_lines(summary)
        self.report.end(summary, lines)
        for line in self.answer(summary["wait"]):
            self.report.say(line)

    def profile_lines(self, summary):
        """Return the lines of --profile, and add its figures to the summary."""
        facts, techniques = self.report.facts, self.techniques
        work = None
        dtype = techniques["autocast"] or techniques["weights"]
        if facts["shape"]:
            accum = facts["settings"]["accum"] // facts["settings"]["world_size"]
            work = work_of(techniques, facts["shape"], facts["batch_size"], accum, self.device.type == "cuda")
        summary["rates"] = rates.measure_beside_a_model(self.device, getattr(torch, dtype))
        summary["parts"] = self.profile.parts
        return self.profile.lines(work, summary["rates"])

    def answer(self, share):
        """Return lines that say what the script has of the ladder, what it lacks, and what it waits for.

        share: what figures.waiting_share() returned.
        """
        has, lacks, remarks = ladder.has_and_lacks(self.techniques)
        for name in self.args.added:
            if not ladder.uses(self.techniques, name):
                remarks.append(ladder.words_on_missing(self.techniques, name))
        lines = [f"has     {names_of(has) or 'nothing of the ladder'}"]
        if self.techniques["profiled"]:
            lines.append(f"lacks   {names_of(lacks) or 'nothing of the ladder that this machine could use'}")
        else:
            lines.append("lacks   unknown, since the script profiles itself: two profilers empty one another")
        lines += [f"        {remark}" for remark in remarks]
        if share is None:
            return [*lines, "waits   unknown, since no forward of a module was seen"]
        waits = f"waits   {100 * share:.0f} % of a step passes before its first forward"
        if share > LONG_WAIT:
            waits += ": this is mostly the wait for data"
        return [*lines, waits]

    def leave(self, status):
        """End the process at once: threads of the script, its children and its `finally` may hang."""
        flush(sys.stdout)
        flush(sys.stderr)
        for child in multiprocessing.active_children():
            child.terminate()
        end_process(status)


def names_of(stages):
    """Return the names of what some Stages bring, and where they are in the ladder, in words."""
    return ", ".join(f"{stage.technique} ({stage.short})" for stage in stages)


def are_ids(tensor):
    """Tell whether a tensor is a batch of tokens: whole numbers in two dimensions."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return is_whole and tensor.dim() == 2


def tensors_in(values):
    """Return the tensors in a list of values, also those inside of lists, tuples and dicts."""
    tensors = []
    for value in values:
        if torch.is_tensor(value):
            tensors.append(value)
        elif isinstance(value, dict):
            tensors += tensors_in(value.values())
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
    return tensors


def flush(stream):
    """Flush a stream of the script, which may be closed by now or be something else."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        stream.flush()


def tell_of_silence(watcher):
    """Tell now and then where a script is that shows no step: compiling, evaluating, or in a loop without an end.

    This runs in a thread of its own, as long as the process.
    """
    main_thread = threading.main_thread().ident
    while True:
        t0 = watcher.t0
        time.sleep(SILENCE)
        if watcher.t0 != t0 or watcher.waits_for_bench:
            continue
        seconds = time.perf_counter() - (t0 or watcher.began)
        where = line_of_script(sys._current_frames()[main_thread])
        message = f"no step in {seconds:.0f} s: it is at {where}, after {watcher.forwards} forwards "
        message += f"and {watcher.backwards} backwards"
        watcher.args.record.tell(message)


def line_of_script(frame):
    """Return the place in the reader's own code, "train.py:228", from which a frame was called."""
    while frame.f_back and is_of_a_library(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_of_a_library(frame):
    """Tell whether a frame is not in the reader's own code."""
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), os.path.dirname(__file__), "<")
    return frame.f_code.co_filename.startswith(libraries)


def count_threads_of_script():
    """Return how many threads run code of the reader's own, beside the main one. A library's may only show a bar."""
    count = 0
    for ident, frame in sys._current_frames().items():
        while frame and is_of_a_library(frame):
            frame = frame.f_back
        if frame and ident != threading.main_thread().ident:
            count += 1
    return count


def watch_pytorch(watcher):
    """Let PyTorch tell the watcher of each forward, backward and step, until the process ends."""
    threading.Thread(target=tell_of_silence, args=[watcher], daemon=True).start()
    call_module = nn.Module.__call__

    def watched_call(module, *args, **kwargs):
        if torch.compiler.is_compiling():
            return call_module(module, *args, **kwargs)
        nn.Module.__call__ = call_module  # only the outermost module is looked at
        try:
            watcher.saw_forward(module, args, kwargs)
            return call_module(module, *args, **kwargs)
        finally:
            nn.Module.__call__ = watched_call

    nn.Module.__call__ = watched_call
    watch_backward(watcher)
    watch_scaler(watcher)
    watch_autocast(watcher)
    watch_profilers(watcher)
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: watcher.saw_optimizer_step(optimizer))


def watch_backward(watcher):
    """Tell of each backward(). One inside of another, as of activation checkpointing, is a part of that."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def watched_backward(tensors, *args, **kwargs):
        if watcher.in_backward:
            return backward(tensors, *args, **kwargs)
        watcher.saw_backward(tensors)
        watcher.in_backward = True
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            watcher.in_backward = False

    torch.autograd.backward = watched_backward


def watch_scaler(watcher):
    """Tell of the loss before a GradScaler multiplies it, and of a step that it skips, for which no hook is called."""
    scale, step = torch.amp.GradScaler.scale, torch.amp.GradScaler.step

    @functools.wraps(scale)
    def watched_scale(scaler, outputs):
        if torch.is_tensor(outputs):
            watcher.unscaled_loss = outputs
        return scale(scaler, outputs)

    @functools.wraps(step)
    def watched_step(scaler, optimizer, *args, **kwargs):
        steps_before = watcher.optimizer_steps
        returned = step(scaler, optimizer, *args, **kwargs)
        is_the_one = watcher.optimizer is None or watcher.optimizer is optimizer
        if is_the_one and watcher.optimizer_steps == steps_before:
            watcher.saw_optimizer_step(optimizer)
        return returned

    torch.amp.GradScaler.scale = watched_scale
    torch.amp.GradScaler.step = watched_step


def watch_autocast(watcher):
    """Tell of the dtype of each autocast that is entered."""
    enter = torch.autocast.__enter__

    @functools.wraps(enter)
    def watched_enter(context):
        if context._enabled:
            watcher.seen.autocast = machine.dtype_name(context.fast_dtype)
        return enter(context)

    torch.autocast.__enter__ = watched_enter


def watch_profilers(watcher):
    """Tell whether the script makes a profiler of its own."""
    make = torch.profiler.profile.__init__

    @functools.wraps(make)
    def watched_make(profiler, *args, **kwargs):
        watcher.script_profiles = True
        make(profiler, *args, **kwargs)

    torch.profiler.profile.__init__ = watched_make
