"""What watch.py says of a script at the end: what it has of the ladder and lacks, and where its time goes."""

import linecache
import math
import os
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import machine, scripts
from ..figures import LONG_WAIT, WARMUP
from .timeline import KINDS

LONG_EVALUATION = 0.1  # of the time: what takes longer is told
LONG_OWN_CODE = 0.2
LONG_IDLE = 0.2
SLOW_LINE = 0.1  # of the time in the script's own code
SHORT_OWN_CODE = 0.005  # seconds a step, below which own code is not told
FEWEST_LOOKS = 20  # at own code, below which its lines are not told
SHORT_COMPUTATION = 0.005  # seconds a step in forward, backward and update, for which one thread is enough
MUCH_PADDING = 0.2
MANY_READS = 3
FEWEST_GRAPHS = 2  # compiled after the warm-up
SLOWER = 1.2  # the fastest step of the last third of them against that of the first
FEWEST_STEPS = 12  # of which thirds are compared


@dataclass
class Habits:
    """What the script was seen to do, beside its steps.

    autocast: the dtype of the last autocast that was entered with gradients on, as "bfloat16", or None.
    """

    forwards: int = 0
    backwards: int = 0
    autocast: str | None = None
    output_dtype: torch.dtype | None = None
    clips: bool = False
    repeats_forward: bool = False
    detects_anomalies: bool = False
    sums_of_gradients: int = 0  # over ranks, in the first two steps
    loader_processes: set = field(default_factory=set)  # how many each DataLoader has
    starts_of_loaders: Counter = field(default_factory=Counter)  # by id, of those with processes
    texts: list = field(default_factory=list)  # which share of each attention_mask is text, tensors
    graphs: int = 0  # compiled up to the end of the warm-up

    def saw_autocast(self, context):
        """Note an autocast that is entered, also one of ours."""
        if context._enabled and torch.is_grad_enabled():
            self.autocast = machine.dtype_name(context.fast_dtype)

    def saw_autocast_of_compiler(self, device_type, dtype, enabled, *others):
        """Note an autocast that torch.compile meets. It is entered while that traces, and never again."""
        if enabled and dtype:
            self.autocast = machine.dtype_name(dtype)

    def saw_output(self, output):
        """Note the dtype of what a module returns."""
        values = output.values() if isinstance(output, dict) else output
        for value in [values] if torch.is_tensor(values) else values or ():
            if torch.is_tensor(value) and value.is_floating_point():
                self.output_dtype = value.dtype
                return

    def saw_arguments(self, arguments):
        """Note how much of a batch is padding."""
        mask = arguments.get("attention_mask")
        if torch.is_tensor(mask) and mask.dim() == 2:
            self.texts.append((mask != 0).float().mean())

    def saw_backward(self, models):
        """Note what a backward() does besides."""
        self.detects_anomalies = self.detects_anomalies or torch.is_anomaly_enabled()
        for model in models:
            if isinstance(model, DistributedDataParallel):
                self.sums_of_gradients += model.require_backward_grad_sync

    def saw_clipping(self, parameters, max_norm, *others, **options):
        """Note that gradients are clipped, and not only measured."""
        self.clips = self.clips or max_norm < math.inf

    def saw_loader(self, iterator):
        """Note how many processes a DataLoader has."""
        self.loader_processes.add(iterator._num_workers)


def compiled_graphs():
    """Return how many graphs torch.compile has made so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def shares_of(watcher):
    """Return {kind: share of the time} of the counted steps.

    On a card kernels are only queued, so it is that of the steps of the warm-up in which each kind waited for the card.
    """
    steps = watcher.log.counted_steps() or watcher.log.steps[-1:]
    if watcher.device.type != "cpu":
        steps = watcher.log.steps[1:WARMUP] or steps
    return mean_shares(steps, watcher.techniques)


def mean_shares(steps, techniques):
    """Return {kind: share of the time} of some steps. What follows the loss is not "loss" but "rest"."""
    total = sum(step["dt"] for step in steps)
    shares = {kind: sum(step["spent"][kind] for step in steps) / total for kind in KINDS}
    behind_loss = shares["loss"] * (1 - techniques["loss_share"])
    return shares | {"loss": shares["loss"] - behind_loss, "rest": shares["rest"] + behind_loss}


def answer(watcher, shares):
    """Return lines that say what the script has of the ladder, what it lacks, and where its time goes.

    shares: what shares_of() returned.
    """
    techniques = watcher.techniques
    has, lacks, remarks = scripts.words_on_techniques(techniques)
    for name in watcher.args.added:
        if not scripts.uses(techniques, name):
            remarks.append(scripts.words_on_missing(techniques, name))
    lines = [f"has     {has}", f"lacks   {lacks}"]
    lines += [f"        {remark}" for remark in remarks]
    parts = [f"{kind} {100 * share:.0f} %" for kind, share in shares.items() if share >= 0.005]
    lines.append(f"time    {', '.join(parts)}")
    if watcher.device.type != "cpu":
        lines.append("        of uncounted steps in which each part waited for the card")
    return lines + [f"slow    {words}" for words in causes(watcher, shares)]


def causes(watcher, shares):
    """Return what slows the script down, besides techniques of the ladder, a list of words."""
    habits, techniques, device = watcher.habits, watcher.techniques, watcher.device
    counted = watcher.log.counted_steps() or watcher.log.steps[-1:]
    dts = [step["dt"] for step in counted]
    idle = 0.0
    if device.type != "cpu":
        shares = mean_shares(counted, techniques)
        if techniques["busy_ms"] is not None:  # what the script does behind a queue of kernels costs nothing
            idle = max(0.0, 1 - techniques["busy_ms"] / (1e3 * statistics.median(dts)))
            shares = {kind: min(share, idle) for kind, share in shares.items()}
    data, own_code, evaluation = shares["data"], shares["rest"], shares["evaluation"]
    computation = (shares["forward"] + shares["backward"] + shares["update"]) * statistics.mean(dts)
    for_python = idle - data - own_code - evaluation
    processes = f"has {max(habits.loader_processes, default=0)} processes"
    if 0 in habits.loader_processes:
        processes = "loads in this process: num_workers is 0"
    starts = habits.starts_of_loaders
    anew = max(starts.values(), default=0) > 1 or len(starts) > 2
    padding = 1 - statistics.mean(text.item() for text in habits.texts) if habits.texts else 0.0
    reads = techniques["reads"] or 0
    graphs = compiled_graphs() - habits.graphs
    first, middle, last = fastest_of_thirds(dts)
    threads, cores = torch.get_num_threads(), machine.cores()
    on_cpu = device.type == "cpu"
    has_card = on_cpu and (torch.accelerator.is_available() or machine.why_no_card() is not None)
    variables = machine.variables_set(machine.SLOW)
    few = on_cpu and watcher.ranks == 1 and threads < cores and computation > SHORT_COMPUTATION
    sums = habits.sums_of_gradients if watcher.ranks > 1 else 0
    accum = watcher.log.header["settings"]["accum"] // watcher.ranks
    table = [
        (data > LONG_WAIT, f"{percent(data)} waits for a DataLoader, which {processes}"),
        (data > LONG_WAIT and anew, f"its processes were started {starts.total()} times: persistent_workers=True"),
        (evaluation > LONG_EVALUATION, f"{percent(evaluation)} is forwards without gradients, as in an evaluation"),
        *words_on_own_code(watcher.own_code, own_code, shares["loss"], statistics.mean(dts)),
        (for_python > LONG_IDLE, f"{percent(for_python)} the card waits for Python: compile, or a larger batch"),
        (reads >= MANY_READS, f"{reads} numbers a step are read from the card, as by .item(), and each waits for it"),
        (graphs >= FEWEST_GRAPHS, f"{graphs} graphs were compiled after the warm-up: few shapes, or mark_dynamic"),
        (habits.repeats_forward, "forwards run again in the backward: activation checkpointing saves memory for time"),
        (habits.detects_anomalies, "anomaly detection is on: torch.autograd.set_detect_anomaly(False)"),
        (padding > MUCH_PADDING, f"{percent(padding)} of its tokens are padding, by its attention_mask"),
        (
            sums > 2 and accum > 1,
            f"ranks add up gradients in each of {accum} micro-batches: no_sync() in all but one",
        ),
        (
            first and last > middle > first and last > SLOWER * first,
            f"steps get slower: from {1e3 * first:.1f} to {1e3 * last:.1f} ms",
        ),
        (bool(variables), f"{', '.join(variables)} in the environment"),
        (has_card, "it trains on the CPU, and a card is here"),
        (few, f"{threads} of {cores} cores work: more may help, by OMP_NUM_THREADS or torch.set_num_threads()"),
    ]
    return [words for is_seen, words in table if is_seen]


def words_on_own_code(own_code, share, share_of_loss, dt):
    """Return pairs for the table of causes: the script's own code, and its lines that take the most.

    own_code: an OwnCode, of which looks may also have met the loss. share: of own code. dt: seconds of a step.
    """
    is_long = share > LONG_OWN_CODE and share * dt > SHORT_OWN_CODE
    words = [(is_long, f"{percent(share)} is the script's own code, neither forward, backward nor update")]
    total = own_code.seconds.total()
    for (place, function), seconds in own_code.seconds.most_common(3):
        line = f"    {percent((share + share_of_loss) * seconds / total)} {place_and_text(place)}"
        if function:
            line += f", in {function}"
        words.append((is_long and own_code.looks >= FEWEST_LOOKS and seconds > SLOW_LINE * total, line))
    return words


def fastest_of_thirds(dts):
    """Return the shortest step of each third, which other programs disturb the least; zeros where steps are few."""
    third = len(dts) // 3
    if len(dts) < FEWEST_STEPS:
        return 0.0, 0.0, 0.0
    return min(dts[:third]), min(dts[third:-third]), min(dts[-third:])


def percent(share):
    """Return "31 %"."""
    return f"{100 * share:.0f} %"


def place_and_text(place):
    """Return a place, "train.py:228", with the text of its line."""
    path, number = place.rsplit(":", 1)
    return f"{os.path.basename(path)}:{number}  {linecache.getline(path, int(number)).strip()}"


def end_bars():
    """End the line of a progress bar, so that ours begins on its own."""
    tqdm = sys.modules.get("tqdm.std")
    if tqdm and len(getattr(tqdm.tqdm, "_instances", ())):
        print(file=sys.stderr)
