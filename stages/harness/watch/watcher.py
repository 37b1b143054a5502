"""Watches a training script from outside: PyTorch tells of its forwards, its backwards and the steps of its optimizer.

A step of the optimizer ends a step, and begins the next one. So data, forward, backward, update and whatever else the
loop does are on the clock. The script is not changed, and what it uses is not guessed from its text.
"""

import contextlib
import functools
import linecache
import multiprocessing
import os
import sys
import sysconfig
import threading
import time
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .. import machine, rates, scripts
from ..figures import LONG_WAIT
from ..log import header_of
from ..stepprofile import StepProfile
from .added import Added
from .techniques import find_techniques, gpt_shape, parameters_of

end_process = os._exit  # watch.py replaces os._exit for the script
HARNESS = os.path.dirname(os.path.dirname(__file__))
LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), HARNESS, "<")
SAMPLING = 0.01  # seconds between two looks at the line that runs
SILENCE = 60  # seconds without a step that are told, and each time that they have passed again
LONG_EVALUATION = 0.1  # of the time: what takes longer is told so
LONG_OWN_CODE = 0.2
SLOW_LINE = 0.1  # of the time in the script's own code: a line that takes longer is told
# What a step spends its time on: a DataLoader, a forward in training, what follows it up to backward(), a backward, an
# optimizer, a forward without gradients, and what is left, the script's own code.
KINDS = ("data", "forward", "loss", "backward", "update", "evaluation", "rest")


class StepClock:
    """Measures on what a step spends its time. spent: {kind: seconds}. since: when the open kind began."""

    def __init__(self):
        self.kind = "rest"
        self.begin()

    def begin(self):
        """Begin a step."""
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.since = time.perf_counter()

    def switch(self, kind):
        """Count the time from now on as another kind. Return what the kind was before."""
        now = time.perf_counter()
        self.spent[self.kind] += now - self.since
        before = self.kind
        self.kind, self.since = kind, now
        return before


class MicroBatches:
    """What was seen since the last step ended.

    count: of micro-batches. tokens: in all of them. samples: the rows of their first tensors, for what has no tokens.
    batch_size, seq_len: of the last one; seq_len is None without tokens. loss: the sum of what backward() was called
    on, a tensor, or None. autocast: the dtype of the last autocast, as "bfloat16", or None.
    """

    def __init__(self):
        self.count = 0
        self.tokens = 0
        self.samples = 0
        self.tokens_now = 0  # of the open micro-batch
        self.samples_now = 0
        self.batch_size = None
        self.seq_len = None
        self.loss = None
        self.autocast = None
        self.is_open = False  # whether a forward was seen since the last backward

    def add_forward(self, tensors, reads_ids):
        """Count what a module was called with in training. reads_ids: whether it has an embedding.

        Several calls may belong to one micro-batch: a head behind an encoder, or an actor that sees one state. The one
        with the most tokens, or samples, tells.
        """
        if not self.is_open:
            self.is_open = True
            self.count += 1
            self.tokens_now = self.samples_now = 0
        ids = [tensor for tensor in tensors if are_ids(tensor)]
        if ids and reads_ids:
            if ids[0].numel() > self.tokens_now:
                self.tokens += ids[0].numel() - self.tokens_now
                self.tokens_now = ids[0].numel()
                self.batch_size, self.seq_len = ids[0].shape
        else:
            rows = tensors[0].shape[0] if tensors[0].dim() else 1
            if rows > self.samples_now:
                self.samples += rows - self.samples_now
                self.samples_now = rows
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

    args: what watch.py was given: steps (None for all), profile, seed, script and title; and log, a Log.
    """

    def __init__(self, args):
        self.args = args
        self.log = args.log
        self.pid = os.getpid()
        self.was_launched = "WORLD_SIZE" in os.environ  # by torchrun: a script may set it later
        self.began = time.perf_counter()
        self.optimizer = None  # the first that takes a step; where there are more, they share its step
        self.optimizer_steps = 0
        self.device = None
        self.seen = MicroBatches()
        self.clock = StepClock()
        self.steps_of_others = set()  # ids of other optimizers that stepped since the last step ended
        self.in_update = False
        self.loader_processes = set()  # how many each DataLoader has
        self.reads_ids = {}  # {id of a module: whether it has an embedding}
        self.output_dtype = None  # of the last forward
        self.lines_of_own_code = Counter()  # {"/my/train.py:87": how often it was seen to run}
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
            activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True, record_shapes=True
        )
        self.profiler_of_parts = torch.profiler.profile(acc_events=True)
        self.techniques = None
        self.profile = None
        self.t0 = None

    # what PyTorch tells

    def saw_forward(self, module, args, kwargs):
        """Note a call of an outermost module that has parameters, and add to it what is to be added."""
        self.forwards += 1
        if self.in_backward:  # activation checkpointing calls modules again
            return
        if not torch.is_grad_enabled():
            self.clock.switch("evaluation")
            return
        self.clock.switch("forward")
        tensors = tensors_in([*args, *kwargs.values()])
        if not tensors:
            return
        self.models[id(module)] = module
        if not (self.in_update and self.seen.count):  # a closure evaluates the same batch again
            if id(module) not in self.reads_ids:
                self.reads_ids[id(module)] = any(isinstance(part, nn.Embedding) for part in module.modules())
            self.seen.add_forward(tensors, self.reads_ids[id(module)])
        self.added.before_forward(module)

    def saw_output(self, output):
        """Note that an outermost module has returned."""
        if self.in_backward:
            return
        if self.clock.kind == "forward":
            self.clock.switch("loss")
            for tensor in tensors_in([output]):
                if tensor.is_floating_point():
                    self.output_dtype = tensor.dtype
                    break
        else:
            self.clock.switch("rest")

    def saw_backward(self, tensors):
        """Note what backward() is called on."""
        self.backwards += 1
        self.added.before_backward()
        loss = tensors
        if not torch.is_tensor(tensors) and len(tensors) == 1:
            loss = tensors[0]
        if self.unscaled_loss is not None:
            loss, self.unscaled_loss = self.unscaled_loss, None
        if not (self.in_update and self.seen.loss is not None):
            self.seen.add_loss(loss)

    def saw_optimizer_begin(self, optimizer):
        """Note that an optimizer begins its step."""
        self.clock.switch("update")
        self.in_update = True

    def saw_optimizer_step(self, optimizer):
        """Note a step of an optimizer, also one that a GradScaler skipped.

        The first optimizer's ends the step. Where another one steps twice before it, that takes its place.
        """
        if os.getpid() != self.pid:  # a child that the script forked
            return
        self.in_update = False
        self.clock.switch("backward" if self.in_backward else "rest")
        if self.optimizer is None or id(optimizer) in self.steps_of_others:
            self.optimizer = optimizer
            self.device = parameters_of([], optimizer)[0].device
        if optimizer is self.optimizer:
            self.steps_of_others.clear()
            self.optimizer_steps += 1
            self.end_step()
        else:
            self.steps_of_others.add(id(optimizer))

    # a step

    def end_step(self):
        """End a step: stop the clock, report, and start the clock again. The first call only starts it.

        Where the bench leads, wait for its request before the clock starts.
        """
        self.added.before_backward()  # where a script calls no backward()
        machine.synchronize(self.device)
        self.clock.switch(self.clock.kind)
        now = time.perf_counter()
        flush(sys.stdout)  # so that the script's own lines stand before ours
        if self.log.header is None:
            self.begin_report(now)
        else:
            self.report_step(now - self.t0)
        self.waits_for_bench = True
        is_asked_for_more = self.log.wait_for_request()
        self.waits_for_bench = False
        if not is_asked_for_more or len(self.log.steps) == self.args.steps:
            self.finish()
            self.leave(0)
        self.seen = MicroBatches()
        self.start_profiler()
        machine.synchronize(self.device)
        self.clock.begin()
        self.t0 = self.clock.since

    def begin_report(self, now):
        """Print what is trained, as the first step has shown it. Exits where the script started ranks of its own."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks > 1 and not self.was_launched:
            remedy = f"torchrun --standalone --nproc_per_node={ranks} stages/watch.py {self.args.title}"
            line = f"{self.args.title} starts {ranks} ranks by itself: start them by {remedy}"
            print(f"error: {line}", file=sys.stderr)
            self.log.write_error(line)
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
        parameters = sum(p.numel() for p in parameters_of(models, self.optimizer))
        header = header_of(self.args.script, self.device, settings, shape, parameters, {}, seen.unit)
        self.log.begin(self.args.title, header, self.device, seen.count_of(seen.unit) * ranks, first_step=1)
        self.log.say(f"step    0 ended {now - self.began:.1f} s after the start, and the clock starts here")

    def report_step(self, dt):
        """Report a step that took dt seconds."""
        seen = self.seen
        events = self.stop_profiler(1e3 * dt) if self.profiler else None
        if self.techniques is None:
            self.keep_techniques(events)
        header = self.log.header
        tokens = seen.count_of(header["unit"]) * header["settings"]["world_size"]
        spent = {kind: round(seconds, 6) for kind, seconds in self.clock.spent.items()}
        loss = None if seen.loss is None else seen.loss.item()
        self.log.step(loss, dt, tokens, {}, spent=spent)

    # the profiler, for a step that shows the techniques, and for the parts of the last step

    def start_profiler(self):
        """Profile the next step where it is the first one, or with --profile the last one.

        Not where the script profiles itself, or a profiler is at work: two empty one another.
        """
        is_first = not self.log.steps
        is_last = len(self.log.steps) + 1 == self.args.steps
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
        self.log.profiled_step = 1 + len(self.log.steps)
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
        if autocast is None and self.output_dtype in (torch.bfloat16, torch.float16):  # entered in a compiled model
            autocast = machine.dtype_name(self.output_dtype)
        self.techniques = find_techniques(models, self.optimizer, self.device, autocast, events)
        self.techniques["loaders"] = len(multiprocessing.active_children()) + count_threads_of_script()
        self.log.write("techniques", **self.techniques)

    # the end

    def finish(self):
        """Write and print the summary, and what the script has, lacks and is slow by. Nothing without a timed step."""
        if not self.log.steps:
            return
        counted = self.log.counted_steps() or self.log.steps[-1:]
        shares = shares_of(counted)
        summary = {"sdpa": self.techniques["sdpa"], "shares": shares}
        lines = []
        if self.profile:
            lines = self.profile_lines(summary)
        self.log.finish(summary, lines)
        for line in self.answer(shares):
            self.log.say(line)

    def profile_lines(self, summary):
        """Return the lines of --profile, and add its figures to the summary."""
        header, techniques = self.log.header, self.techniques
        settings = header["settings"]
        work = None
        dtype = techniques["autocast"] or techniques["weights"]
        if header["shape"]:
            accum = settings["accum"] // settings["world_size"]
            on_cuda = self.device.type == "cuda"
            work = scripts.work_of(techniques, header["shape"], settings["batch_size"], accum, on_cuda)
        summary["rates"] = rates.measure(self.device, getattr(torch, dtype))
        summary["parts"] = self.profile.parts
        return self.profile.lines(work, summary["rates"])

    def answer(self, shares):
        """Return lines that say what the script has of the ladder, what it lacks, and where its time goes.

        shares: what shares_of() returned.
        """
        has, lacks, remarks = scripts.words_on_techniques(self.techniques)
        for name in self.args.added:
            if not scripts.uses(self.techniques, name):
                remarks.append(scripts.words_on_missing(self.techniques, name))
        lines = [f"has     {has}", f"lacks   {lacks}"]
        lines += [f"        {remark}" for remark in remarks]
        parts = [f"{kind} {100 * share:.0f} %" for kind, share in shares.items() if share >= 0.005]
        lines.append(f"time    {', '.join(parts)}")
        lines += [f"slow    {words}" for words in self.causes(shares)]
        return lines

    def causes(self, shares):
        """Return what slows the script down, besides techniques of the ladder, a list of words."""
        causes = []
        if shares["data"] > LONG_WAIT:
            loads = f"has {max(self.loader_processes)} processes"
            if 0 in self.loader_processes:
                loads = "loads in this process: num_workers is 0"
            causes.append(f"{100 * shares['data']:.0f} % waits for a DataLoader, which {loads}")
        own_code = shares["rest"] + shares["loss"]
        if own_code > LONG_OWN_CODE:
            causes.append(f"{100 * own_code:.0f} % is the script's own code, neither forward, backward nor update")
            looks = self.lines_of_own_code.total()
            for place, count in self.lines_of_own_code.most_common(3):
                if count > SLOW_LINE * looks:
                    causes.append(f"    {100 * own_code * count / looks:.0f} % {place_and_text(place)}")
        if shares["evaluation"] > LONG_EVALUATION:
            causes.append(f"{100 * shares['evaluation']:.0f} % is forwards without gradients, as in an evaluation")
        if torch.is_anomaly_enabled():
            causes.append("anomaly detection is on: torch.autograd.set_detect_anomaly(False)")
        if self.device.type == "cpu":
            threads, cores = torch.get_num_threads(), machine.cores()
            if torch.accelerator.is_available():
                causes.append("it trains on the CPU, and a card is here")
            if threads < cores:
                causes.append(f"{threads} of {cores} cores work: OMP_NUM_THREADS or torch.set_num_threads()")
        return causes

    def leave(self, status):
        """End the process at once: threads of the script, its children and its `finally` may hang."""
        flush(sys.stdout)
        flush(sys.stderr)
        for child in multiprocessing.active_children():
            child.terminate()
        end_process(status)


def place_and_text(place):
    """Return a place, "train.py:228", with the text of its line."""
    path, number = place.rsplit(":", 1)
    return f"{os.path.basename(path)}:{number}  {linecache.getline(path, int(number)).strip()}"


def shares_of(steps):
    """Return {kind: share of the time} of some steps."""
    total = sum(step["dt"] for step in steps)
    return {kind: sum(step["spent"][kind] for step in steps) / total for kind in KINDS}


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
        watcher.log.notice(message)


def sample_own_code(watcher):
    """Note now and then which line of the script runs, while that is neither forward, backward nor update."""
    main_thread = threading.main_thread().ident
    while True:
        time.sleep(SAMPLING)
        if watcher.clock.kind in ("rest", "loss") and watcher.t0 and not watcher.waits_for_bench:
            watcher.lines_of_own_code[line_of_script(sys._current_frames()[main_thread])] += 1


def line_of_script(frame):
    """Return the place in the reader's own code, "train.py:228", from which a frame was called."""
    while frame.f_back and is_of_a_library(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_of_a_library(frame):
    """Tell whether a frame is not in the reader's own code."""
    return frame.f_code.co_filename.startswith(LIBRARIES)


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
    threading.Thread(target=sample_own_code, args=[watcher], daemon=True).start()
    call_module = nn.Module.__call__

    def watched_call(module, *args, **kwargs):
        if torch.compiler.is_compiling() or next(module.parameters(), None) is None:  # a loss, or a transform of data
            return call_module(module, *args, **kwargs)
        nn.Module.__call__ = call_module  # only the outermost module is looked at
        try:
            watcher.saw_forward(module, args, kwargs)
            output = call_module(module, *args, **kwargs)
        finally:
            nn.Module.__call__ = watched_call
        watcher.saw_output(output)
        return output

    nn.Module.__call__ = watched_call
    watch_backward(watcher)
    watch_scaler(watcher)
    watch_autocast(watcher)
    watch_profilers(watcher)
    watch_loaders(watcher)

    @torch.compiler.disable
    def begins(optimizer, args, kwargs):
        watcher.saw_optimizer_begin(optimizer)

    @torch.compiler.disable
    def ends(optimizer, args, kwargs):
        watcher.saw_optimizer_step(optimizer)

    register_optimizer_step_pre_hook(begins)
    register_optimizer_step_post_hook(ends)


def watch_loaders(watcher):
    """Tell of the time that the script waits for a DataLoader."""
    get_next = _BaseDataLoaderIter.__next__

    @functools.wraps(get_next)
    def watched_next(loader):
        before = watcher.clock.switch("data")
        watcher.loader_processes.add(loader._num_workers)
        try:
            return get_next(loader)
        finally:
            watcher.clock.switch(before)

    _BaseDataLoaderIter.__next__ = watched_next


def watch_backward(watcher):
    """Tell of each backward(). One inside of another, as of activation checkpointing, is a part of that."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def watched_backward(tensors, *args, **kwargs):
        if watcher.in_backward:
            return backward(tensors, *args, **kwargs)
        watcher.saw_backward(tensors)
        watcher.in_backward = True
        watcher.clock.switch("backward")
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            watcher.in_backward = False
            watcher.clock.switch("update" if watcher.in_update else "rest")

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
