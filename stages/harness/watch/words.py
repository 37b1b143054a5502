"""What watch.py says of a script at the end: what it has of the ladder and lacks, and where its time goes."""

import linecache
import os
import statistics
import sys

import torch

from .. import machine, scripts
from ..figures import LONG_WAIT, WARMUP
from .timeline import KINDS

LONG_EVALUATION = 0.1  # of the time: what takes longer is told
LONG_OWN_CODE = 0.2
LONG_IDLE = 0.2
SLOW_LINE = 0.1  # of the time in the script's own code
SHORT_OWN_CODE = 0.005  # seconds a step, below which own code is not told
SELDOM_SEEN = 0.05  # seconds in own code, below which too few looks met it to tell its lines
SHORT_COMPUTATION = 0.005  # seconds a step in forward, backward and update, for which one thread is enough
MUCH_PADDING = 0.2
MANY_READS = 3
SLOWER = 1.5  # times as long in the last third of the steps as in the first
SLOWER_BY = 0.001  # seconds a step, below which that may be noise
FEWEST_STEPS = 12  # that tell it
RISING = 0.9  # the correlation of ranks, of how late a step is and how long it takes
FEWEST_GRAPHS = 2  # compiled after the warm-up
MOST_LOADERS = 2  # with processes: one to train and one to evaluate


def shares_of(watcher):
    """Return {kind: share of the time} of the counted steps.

    On a card kernels are only queued, so it is that of the steps of the warm-up in which each kind waited for the card.
    """
    steps = usual_steps(watcher.log)
    if watcher.device.type != "cpu":
        steps = watcher.log.steps[1:WARMUP] or steps
    return mean_shares(steps)


def usual_steps(log):
    """Return the counted steps, without those in which torch.compile made a graph, where these are the fewer."""
    steps = log.counted_steps() or log.steps[-1:]
    without_graphs = [step for step in steps if not step["graphs"]]
    return without_graphs if len(without_graphs) > len(steps) / 2 else steps


def mean_shares(steps):
    """Return {kind: share of the time} of some steps.

    A loss takes no longer than the backward, which goes through it, too. What is above that is the script's own code
    between the loss and backward().
    """
    total = sum(step["dt"] for step in steps)
    shares = {kind: sum(step["spent"][kind] for step in steps) / total for kind in KINDS}
    loss = min(shares["loss"], shares["backward"])
    return shares | {"loss": loss, "rest": shares["rest"] + shares["loss"] - loss}


def answer(watcher, shares):
    """Return lines that say where the script's time goes, what slows it, and what it has of the ladder and lacks.

    shares: what shares_of() returned.
    """
    techniques = watcher.techniques
    has, lacks, remarks = scripts.words_on_techniques(techniques)
    for name in watcher.args.added:
        if not scripts.uses(techniques, name):
            remarks.append(scripts.words_on_missing(techniques, name))
    parts = [f"{kind} {100 * share:.0f} %" for kind, share in shares.items() if share >= 0.005]
    lines = [f"time    {', '.join(parts)}"]
    if watcher.device.type != "cpu":
        lines.append("        of uncounted steps in which each part waited for the card")
    lines += [f"slow    {words}" for words in causes(watcher)]
    lines += [f"has     {has}", f"lacks   {lacks}"]
    _, lacking = scripts.has_and_lacks(techniques)
    for stage in lacking:
        typed = scripts.what_to_type(techniques, stage).replace("`", "")
        lines.append(f"        {stage.short} {typed}")
    return lines + [f"        {remark}" for remark in remarks]


def causes(watcher):
    """Return what slows the script down, besides techniques of the ladder, a list of words."""
    habits, techniques = watcher.habits, watcher.techniques
    steps = usual_steps(watcher.log)
    dt = statistics.mean(step["dt"] for step in steps)
    words = []
    shares = mean_shares(steps)
    shares |= {"own": shares["rest"] + shares["loss"]}  # a line that makes a loss is not told from others
    if "busy_ms" in techniques:
        median_ms = 1e3 * statistics.median(step["dt"] for step in steps)
        shares = shares_of_idle(shares, 1 - techniques["busy_ms"] / median_ms)
    if shares["data"] > LONG_WAIT:
        words += words_on_loaders(habits, shares["data"], len(watcher.log.steps))
    if shares["evaluation"] > LONG_EVALUATION:
        evaluation = percent(shares["evaluation"])
        words.append(f"{evaluation} is forwards without gradients and their batches, as in an evaluation")
    if shares["own"] > LONG_OWN_CODE and shares["own"] * dt > SHORT_OWN_CODE:
        words += words_on_own_code(watcher.clock, shares["own"])
    if shares.get("idle", 0.0) > LONG_IDLE:
        words.append(f"{percent(shares['idle'])} the card waits for Python: compile, or a larger batch")
    reads = techniques.get("reads", 0)
    if reads >= MANY_READS:
        words.append(f"{reads} numbers a step are read from the card, as by .item(), and each waits for it")
    words += words_on_growth([step["dt"] for step in steps])
    graphs = sum(step["graphs"] for step in watcher.log.counted_steps())
    if graphs >= FEWEST_GRAPHS:
        words.append(f"{graphs} graphs were compiled after the warm-up: few shapes, or mark_dynamic")
    if habits.repeats_forward:
        words.append("forwards run again in the backward: activation checkpointing saves memory for time")
    if habits.detects_anomalies:
        words.append("anomaly detection is on: torch.autograd.set_detect_anomaly(False)")
    padding = 1 - statistics.mean(text.item() for text in habits.texts) if habits.texts else 0.0
    if padding > MUCH_PADDING:
        words.append(f"{percent(padding)} of its tokens are padding, by its attention_mask")
    if habits.sums_of_gradients > 2 and techniques["accum"] > 1:
        words.append(f"ranks add up gradients in each of {techniques['accum']} micro-batches: no_sync() in all but one")
    variables = machine.variables_set(machine.SLOW + machine.TURN_COMPILE_OFF)
    if variables:
        words.append(f"{', '.join(variables)} in the environment")
    if watcher.device.type == "cpu" and (torch.accelerator.is_available() or machine.why_no_card()):
        words.append("it trains on the CPU, and a card is here")
    threads, cores = torch.get_num_threads(), machine.cores()
    computation = dt * (shares["forward"] + shares["backward"] + shares["update"])
    is_alone_on_cpu = watcher.device.type == "cpu" and watcher.ranks == 1
    if is_alone_on_cpu and threads < cores and computation > SHORT_COMPUTATION:
        words.append(f"{threads} of {cores} cores work: more may help, by OMP_NUM_THREADS or torch.set_num_threads()")
    return words


def shares_of_idle(shares, idle):
    """Return the shares as far as a card was idle, since behind a queue of kernels the script costs nothing.

    idle: the share of the time in which no kernel ran. In the result it is what Python's own work on operations took.
    """
    shares = {kind: min(share, max(idle, 0.0)) for kind, share in shares.items()}
    return shares | {"idle": idle - shares["data"] - shares["own"] - shares["evaluation"]}


def words_on_loaders(habits, share, steps):
    """Return words on DataLoaders, which take this share of the time of so many steps.

    They are on those loaders from which most batches came.
    """
    if not habits.batches_by_workers:
        return []
    processes = max(habits.batches_by_workers, key=habits.batches_by_workers.get)
    passes = [count for (num_workers, _), count in habits.passes.items() if num_workers == processes]
    words = [f"{percent(share)} waits for a DataLoader, whose num_workers is {processes}"]
    if processes == 0:
        words[0] += ": DataLoader(..., num_workers=2) may load ahead"
    if not passes:  # a loader with an __iter__ of its own
        return words
    if processes == 0 and sum(passes) >= steps:
        words.append("a pass over it begins in each step, as by next(iter(loader)): keep one iterator")
    elif processes > 0 and (max(passes) > 1 or len(passes) > MOST_LOADERS):
        words.append(f"its processes were started {sum(passes)} times: persistent_workers=True")
    return words


def words_on_own_code(clock, share):
    """Return words on the script's own code, which takes this share of the time, and its lines that take the most."""
    words = [f"{percent(share)} is the script's own code, neither forward, backward nor update"]
    total = clock.own_lines.total()
    if total < SELDOM_SEEN:
        return words
    for place, seconds in clock.own_lines.most_common(3):
        if seconds > SLOW_LINE * total:
            line = f"    {percent(share * seconds / total)} {place_and_text(place)}"
            function = clock.function_at(place)
            words.append(f"{line}, in {function}" if function else line)
    return words


def words_on_growth(dts):
    """Return words on steps that take longer and longer, a list. dts: their seconds.

    Where another program begins in the middle, the steps before and behind that are in no order.
    """
    if len(dts) < FEWEST_STEPS:
        return []
    from_the_fastest = sorted(range(len(dts)), key=dts.__getitem__)
    is_in_order = statistics.correlation(from_the_fastest, range(len(dts))) > RISING
    third = len(dts) // 3
    first, last = statistics.median(dts[:third]), statistics.median(dts[-third:])
    if is_in_order and last > SLOWER * first and last - first > SLOWER_BY:
        return [f"its steps get slower, from {1e3 * first:.0f} ms to {1e3 * last:.0f} ms"]
    return []


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
