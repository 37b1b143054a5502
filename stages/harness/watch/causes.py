"""What slows a watched script down, besides techniques of the ladder that it lacks."""

import os
import statistics
from collections import Counter

import torch

from .. import machine
from ..figures import LONG, LONG_WAIT
from .shares import line_at, mean_shares, percent, seconds_beyond_loss, seconds_of

SHORT_OWN_CODE = 0.005  # seconds a step: what takes less is not worth a word
SLOW_LINE = 0.1  # of the time in the script's own code, or in the loss
SELDOM_SEEN = 0.05  # seconds in own code, below which too few looks met it to say anything
SLOW_UPDATE = 0.4  # of the time
MANY_GROUPS = 10  # of an optimizer, with the same settings
MANY = 3  # copies from a card in a step, or graphs compiled after the warm-up


def causes(run):
    """Return what slows the script down, besides techniques of the ladder, a list of words."""
    steps = run.log.reported_steps()
    shares = mean_shares(steps)
    if run.log.device.type == "cpu":
        return words_on_waits(run, steps, shares) + words_on_cpu(run, shares) + words_on_habits(run)
    return words_on_idle_card(run, steps, shares) + words_on_habits(run)


def words_on_idle_card(run, steps, shares):
    """Return words on what leaves a card idle, a list. Its queue of kernels hides all else that the script does.

    shares: {kind: share of the time}.
    """
    median_ms = 1e3 * statistics.median(step.dt for step in steps)
    idle = run.log.seen.idle_share(median_ms) or 0.0  # 0: no profile
    idle_shares, unexplained = within_idle_time(shares, idle)
    words = words_on_waits(run, steps, idle_shares)
    if unexplained > LONG:
        words.append(f"{percent(unexplained)} is the card waiting for Python: compile, or take a larger batch")
    return words


def within_idle_time(shares, idle):
    """Return (shares, what is left of idle). Data, evaluation and own code take no more than a card is idle."""
    shares = dict(shares)
    for kind in ("data", "evaluation", "rest"):
        shares[kind] = min(shares[kind], idle)
        idle -= shares[kind]
    return shares, idle


def words_on_waits(run, steps, shares):
    """Return words on data, evaluation and own code that take long, a list. shares: {kind: share of the time}."""
    words = []
    if shares["data"] > LONG_WAIT and run.habits.loaders:
        words += words_on_loader(run.habits.loaders, shares["data"])
    if shares["evaluation"] > LONG_WAIT and not run.habits.repeats_forward:  # checkpointing has such forwards, too
        purposes = "an evaluation, a rollout, or a second model"
        share = percent(shares["evaluation"])
        words.append(f"{share} goes to forwards without gradients ({purposes}) and their batches")
    own = shares["rest"]
    if own > LONG and own * statistics.mean(step.dt for step in steps) > SHORT_OWN_CODE:
        lines = run.own_code.lines["rest"]
        if seconds_beyond_loss(seconds_of(steps)):  # which are a part of this share
            lines = lines + run.own_code.lines["loss"]
        words += words_on_lines(lines, own, "is the script's own code, neither forward, loss, backward nor update")
    return words


def words_on_cpu(run, shares):
    """Return words on a loss and an update that take long on a CPU, a list. A card only queues them."""
    words = []
    loss = shares["loss"]
    if loss > max(LONG, shares["forward"]):
        words += words_on_lines(run.own_code.lines["loss"], loss, "is the loss, from the forward to backward()")
    if shares["update"] > SLOW_UPDATE:
        words += words_on_update(run.optimizers)
    return words


def words_on_loader(batches, share):
    """Return words on the DataLoader from which most batches came, a list. share: of the time that all loaders take.

    batches: {num_workers of a DataLoader: how many batches came from it}.
    """
    workers, cores = max(batches, key=batches.get), machine.cores()
    remedy = "do less in __getitem__"
    if workers < cores:
        remedy = f"take up to {cores} workers, with persistent_workers=True, or {remedy}"
    elif workers > cores:
        remedy = f"take no more workers than the {cores} cores, or {remedy}"
    return [f"{percent(share)} is waiting for a DataLoader with num_workers={workers}: {remedy}"]


def words_on_lines(lines, share, what):
    """Return words on a part of the script, and on its lines that take the most.

    lines: {a line, "train.py:228": its seconds}. share: of the time that this part takes.
    """
    total = lines.total()
    if total < SELDOM_SEEN:
        return []
    words = [f"{percent(share)} {what}"]
    for place, seconds in lines.most_common(3):
        if place and seconds > SLOW_LINE * total:
            words.append(f"    {percent(share * seconds / total)} {os.path.basename(place)}  {line_at(place)}")
    return words


def words_on_update(optimizers):
    """Return words on optimizers that have many groups of parameters with the same settings, a list."""
    words = []
    for optimizer in optimizers:
        settings = Counter()
        for group in optimizer.param_groups:
            settings[repr({name: group[name] for name in group if name not in ("params", "param_names")})] += 1
        count = max(settings.values())
        if count > MANY_GROUPS:
            words.append(f"{count} parameter groups have the same settings: one group makes the update faster")
    return words


def words_on_habits(run):
    """Return words on what else slows a script down, a list."""
    reads = run.log.seen.reads
    graphs = sum(step.graphs for step in run.log.counted_steps())
    words = []
    if reads >= MANY:
        words.append(f"a step copies from the card {reads} times, as .item() does, and waits for it each time")
    if graphs >= MANY:
        remedy = "TORCH_LOGS=recompiles says why; for texts of many lengths pad to few, or mark_dynamic()"
        words.append(f"{graphs} graphs were compiled after the warm-up: {remedy}")
    if run.habits.repeats_forward:
        words.append("forwards run again in the backward: activation checkpointing trades time for memory")
    if run.log.device.type == "cpu" and (torch.accelerator.is_available() or machine.why_no_card()):
        words.append("it trains on the CPU, though this machine has a card")
    return words
