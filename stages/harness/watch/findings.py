"""What watch.py says of a script at the end: what it has of the ladder and lacks, and where its time goes."""

import linecache
import os
import statistics
from collections import Counter

import torch

from .. import machine, rates
from ..figures import LONG, LONG_WAIT
from ..seen import IN_FRAMEWORK, has_and_lacks, uses, what_to_type, words_on_missing, words_on_techniques
from .stepprofile import StepProfile, predicted_ms
from .timeline import KINDS

SHORT = 0.005  # seconds a step: what takes less is not worth a word
SLOW_LINE = 0.1  # of the time in the script's own code, or in the loss
SELDOM_SEEN = 0.05  # seconds in own code, below which too few looks met it to say anything
FIRST = 1 / 3  # of the time: data or own code that takes more comes before all techniques
SLOW_UPDATE = 0.4  # of the time
MANY_GROUPS = 10  # of an optimizer, with the same settings
MANY = 3  # numbers read from a card in a step, or graphs compiled after the warm-up


def answer(watcher, shares):
    """Return lines that say where the script's time goes, what slows it, and what it has of the ladder and lacks.

    shares: what shares_of() returned.
    """
    seen = watcher.seen
    parts = [f"{kind} {percent(share)}" for kind, share in shares.items() if share >= 0.005]
    lines = [f"time    {', '.join(parts)}"]
    if watcher.device.type != "cpu" and watcher.log.waiting_steps():
        lines.append("        of uncounted steps in which each part waited for the card")
    slow = causes(watcher)
    lines += [f"slow    {words}" for words in slow]
    has, lacks, remarks = words_on_techniques(seen)
    _, lacking = has_and_lacks(seen)
    if lacking and slow and max(shares["data"], shares["rest"]) > FIRST:
        computation = sum(shares[kind] for kind in ("forward", "loss", "backward", "update"))
        lacks += f": together at most {percent(computation)} of the time, so see to what is slow first"
    lines += [f"has     {has}", f"lacks   {lacks}"]
    for stage in lacking:
        typed = what_to_type(seen, stage).replace("`", "")
        has_its_own_words = (seen.framework, stage.name) in IN_FRAMEWORK
        if stage.name == "s04_compile" and not (has_its_own_words or seen.can_compile_in_place):
            typed += "; the names in its checkpoints then have _orig_mod."
        lines.append(f"        {stage.short} {typed}")
    for name in watcher.args.added:
        if not uses(seen, name):
            remarks.append(words_on_missing(seen, name))
    return lines + [f"        {remark}" for remark in remarks]


def words_on_profile(watcher):
    """Return lines on the parts of the profiled last step, beside what they should take; none without --profile."""
    if not (watcher.args.profile and watcher.profiler.events):
        return []
    predicted = {}
    work = watcher.seen.work
    if work:
        dtype = getattr(torch, watcher.seen.autocast or watcher.seen.weights)
        predicted = predicted_ms(work, rates.measure(watcher.device, dtype))
    return StepProfile(watcher.profiler.events, watcher.device, 1e3 * watcher.last_dt).lines(predicted)


def percent(share):
    """Return "31 %"."""
    return f"{100 * share:.0f} %"


# The shares of the time


def shares_of(watcher):
    """Return {kind: share of the time} of the counted steps.

    On a card kernels are only queued, so it is that of the steps of the warm-up in which each kind waited for the card.
    """
    steps = watcher.log.reported_steps()
    if watcher.device.type != "cpu":
        steps = watcher.log.waiting_steps() or steps
    return mean_shares(steps)


def mean_shares(steps):
    """Return {kind: share of the time} of some steps.

    A loss takes no longer than the backward, which goes through it, too. What is above that is the script's own code
    between the loss and backward().
    """
    total = sum(step["dt"] for step in steps)
    shares = {}
    for kind in KINDS:
        shares[kind] = sum(step["spent"][kind] for step in steps) / total
    if takes_longer_than_backward(steps):
        shares["rest"] += shares["loss"] - shares["backward"]
        shares["loss"] = shares["backward"]
    return shares


def takes_longer_than_backward(steps):
    """Return whether what stands between the forward and backward() takes longer than the backward."""
    return sum(step["spent"]["loss"] - step["spent"]["backward"] for step in steps) > 0


# What slows a script down


def causes(watcher):
    """Return what slows the script down, besides techniques of the ladder, a list of words."""
    steps = watcher.log.reported_steps()
    dts = [step["dt"] for step in steps]
    shares = mean_shares(steps)
    # A card's queue of kernels hides what the script does meanwhile. What that costs is the time in which the card is
    # idle. Without a profile nothing is known of it.
    idle = 1.0
    if watcher.device.type != "cpu":
        idle = watcher.seen.idle_share(1e3 * statistics.median(dts)) or 0.0
    data, evaluation, own, loss = (min(shares[kind], idle) for kind in ("data", "evaluation", "rest", "loss"))
    words = []
    if data > LONG_WAIT and watcher.habits.batches:
        words.append(words_on_loader(watcher.habits.batches, data))
    if evaluation > LONG_WAIT and not watcher.habits.repeats_forward:  # checkpointing has such forwards, too
        purposes = "an evaluation, a rollout, or a second model"
        words.append(f"{percent(evaluation)} is forwards without gradients, as of {purposes}, and their batches")
    if own > LONG and own * statistics.mean(dts) > SHORT:
        lines = watcher.clock.lines["rest"]
        if takes_longer_than_backward(steps):
            lines = lines + watcher.clock.lines["loss"]
        words += words_on_lines(lines, own, "is the script's own code, neither forward, loss, backward nor update")
    if watcher.device.type == "cpu" and loss > max(LONG, shares["forward"]):
        words += words_on_lines(watcher.clock.lines["loss"], loss, "is the loss, from the forward to backward()")
    if watcher.device.type == "cpu" and shares["update"] > SLOW_UPDATE:
        words += words_on_update(watcher.habits.optimizers)
    waits = idle - data - evaluation - own
    if watcher.device.type != "cpu" and waits > LONG:
        words.append(f"{percent(waits)} the card waits for Python: compile, or a larger batch")
    return words + words_on_habits(watcher)


def words_on_loader(batches, share):
    """Return words on the DataLoader from which most batches came, where loaders take this share of the time.

    batches: {num_workers of a DataLoader: how many batches came from it}.
    """
    processes = max(batches, key=batches.get)
    words = f"{percent(share)} waits for a DataLoader, whose num_workers is {processes}"
    if processes == 0:
        return f"{words}: DataLoader(..., num_workers=2, persistent_workers=True) may load ahead"
    if processes >= machine.cores():
        return f"{words}: less work in __getitem__ helps, as by tokenizing once"
    remedy = f"more of them, of {machine.cores()} cores, kept by persistent_workers=True"
    return f"{words}: {remedy}, or less work in __getitem__, as by tokenizing once"


def words_on_lines(lines, share, what):
    """Return words on a part of the script, and on its lines that take the most.

    lines: {a line, "train.py:228": its seconds}. share: of the time that this part takes.
    """
    total = lines.total()
    if total < SELDOM_SEEN:
        return []
    words = [f"{percent(share)} {what}"]
    for place, seconds in lines.most_common(3):
        if seconds > SLOW_LINE * total:
            path, number = place.rsplit(":", 1)
            text = linecache.getline(path, int(number)).strip()
            words.append(f"    {percent(share * seconds / total)} {os.path.basename(path)}:{number}  {text}")
    return words


def words_on_update(optimizers):
    """Return words on optimizers that have many groups of parameters with the same settings, a list."""
    words = []
    for optimizer in optimizers:
        settings = Counter()
        for group in optimizer.param_groups:
            settings[repr({name: group[name] for name in group if name != "params"})] += 1
        count = max(settings.values())
        if count > MANY_GROUPS:
            words.append(f"{count} parameter groups have the same settings: one group makes the update faster")
    return words


def words_on_habits(watcher):
    """Return words on what else slows a script down, a list."""
    habits, reads = watcher.habits, watcher.seen.reads
    graphs = sum(step["graphs"] for step in watcher.log.counted_steps())
    words = []
    if reads >= MANY:
        words.append(f"{reads} numbers a step are read from the card, as by .item(), and each waits for it")
    if graphs >= MANY:
        words.append(f"{graphs} graphs were compiled after the warm-up: pad to few shapes, or mark_dynamic()")
    if habits.repeats_forward:
        words.append("forwards run again in the backward: activation checkpointing saves memory for time")
    if watcher.device.type == "cpu" and (torch.accelerator.is_available() or machine.why_no_card()):
        words.append("it trains on the CPU, and a card is here")
    return words
