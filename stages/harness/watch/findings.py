"""What watch.py says of a script at the end: which techniques it has and lacks, and where its time goes."""

import linecache
import os
import statistics
from collections import Counter

import torch

from .. import machine
from ..figures import LONG, LONG_WAIT
from ..ladder import ADDED, has_and_lacks, remarks_on, words_in_vain, words_on_techniques
from .events import KINDS

SHORT_OWN_CODE = 0.005  # seconds a step: what takes less is not worth a word
SHORT_START, LONG_START = 0.01, 10  # seconds before the first step: forwards that take less, lines that take more
SMALLEST_SHARE = 0.005  # of the time: a share that is less would be shown as 0 %
SLOW_LINE = 0.1  # of the time in the script's own code, or in the loss
SELDOM_SEEN = 0.05  # seconds in own code, below which too few looks met it to say anything
FIX_FIRST = 1 / 3  # of the time: data or own code that takes more comes before all techniques
SLOW_UPDATE = 0.4  # of the time
MANY_GROUPS = 10  # of an optimizer, with the same settings
MANY_STEPS = 700  # two rollouts of PPO in Stable-Baselines3, which makes 320 updates of each by default
MANY = 3  # copies from a card in a step, or graphs compiled after the warm-up


def words_on_script(run, shares):
    """Return lines that say where the script's time goes, what slows it, and which techniques it has and lacks.

    shares: what shares_of() returned.
    """
    seen = run.log.seen
    parts = [f"{kind} {percent(share)}" for kind, share in shares.items() if share >= SMALLEST_SHARE]
    waits = bool(run.log.waiting_steps())
    knows_shares = waits or run.log.device.type == "cpu"  # with --warmup 2 no step waits for a card
    lines = []
    if knows_shares:
        lines.append(f"time    {', '.join(parts)}")
    if waits:
        lines.append("        measured in steps of the warm-up, which wait for the card after each part")
    lines += [f"        {words}" for words in words_on_start(run)]
    slow = causes(run)
    lines += [f"slow    {words}" for words in slow]
    has, lacks = has_and_lacks(seen)
    words_on_has, words_on_lacks = words_on_techniques(has, lacks)
    lines += [f"has     {words_on_has}", f"lacks   {words_on_lacks}"]
    if knows_shares and lacks and slow and max(shares["data"], shares["rest"]) > FIX_FIRST:
        computation = sum(shares[kind] for kind in ("forward", "loss", "backward", "update"))
        lines.append(f"        together at most {percent(computation)} of the time, so fix what is slow first")
    for stage in lacks:
        typed = stage.what_to_type(seen).replace("`", "")
        lines.append(f"        {stage.short} {typed}{stage.caveat(seen)}")
    remarks = remarks_on(seen)
    remarks += [words_in_vain(name, seen) for name in run.args.added if ADDED[name] not in has]
    if "fp16" in run.args.added:
        remarks.append("+fp16 has no GradScaler: it shows the speed, and its losses are not those of a training")
    lines += [f"        {remark}" for remark in remarks]
    if run.script.climb and any(stage.added_as for stage in lacks):
        lines.append(f"        to measure what it lacks: {run.script.climb}")
    return lines


def words_on_start(run):
    """Return lines on what took long before the first step, and is not in the shares of the steps."""
    seconds_of_steps = sum(step.dt for step in run.log.steps)
    words = []
    rollouts = run.spent_before["evaluation"]
    if rollouts > max(LONG_WAIT * seconds_of_steps, SHORT_START):
        forwards = f"before the first step forwards without gradients took {rollouts:.2g} s"
        words.append(f"{forwards}: --steps {MANY_STEPS} would see whether these come again")
    for place, seconds in run.lines_before.items():
        if place and seconds > max(seconds_of_steps, LONG_START):  # else imports, which are done once
            took = f"before the first step a line took {seconds:.0f} s, longer than all these steps"
            words.append(f"{took}: {os.path.basename(place)}  {line_at(place)}")
    return words


def line_at(place):
    """Return the text of a line, "train.py:228"."""
    path, number = place.rsplit(":", 1)
    return linecache.getline(path, int(number)).strip()


def percent(share):
    """Return "31 %"."""
    return f"{100 * share:.0f} %"


# The shares of the time


def shares_of(log):
    """Return {kind: share of the time} of the counted steps.

    On a card kernels are only queued, so it is that of the steps of the warm-up in which each kind waited for the card.
    """
    return mean_shares(log.waiting_steps() or log.reported_steps())


def mean_shares(steps):
    """Return {kind: share of the time} of some steps. Own code before backward() is no part of the loss."""
    spent = seconds_of(steps)
    beyond = seconds_beyond_loss(spent)
    spent["rest"] += beyond
    spent["loss"] -= beyond
    return {kind: seconds / spent.total() for kind, seconds in spent.items()}


def seconds_of(steps):
    """Return {kind: seconds} of some steps, a Counter."""
    return Counter({kind: sum(step.spent[kind] for step in steps) for kind in KINDS})


def seconds_beyond_loss(spent):
    """Return how much of the loss is the script's own code before backward(). spent: {kind: seconds}.

    A loss takes no longer than the backward, which goes through it, too.
    """
    return max(0.0, spent["loss"] - spent["backward"])


# What slows a script down


def causes(run):
    """Return what slows the script down, besides techniques of the ladder, a list of words."""
    steps = run.log.reported_steps()
    shares = mean_shares(steps)
    if run.log.device.type == "cpu":
        return words_on_waits(run, steps, shares) + words_on_cpu(run, shares) + words_on_habits(run)
    # A card's queue of kernels hides what the script does meanwhile: that costs only the time in which the card is
    # idle. Without a profile nothing is known of it.
    idle = run.log.seen.idle_share(1e3 * statistics.median(step.dt for step in steps)) or 0.0
    for kind in ("data", "evaluation", "rest"):
        shares[kind] = min(shares[kind], idle)
        idle -= shares[kind]
    words = words_on_waits(run, steps, shares)
    if idle > LONG:
        words.append(f"{percent(idle)} is the card waiting for Python: compile, or take a larger batch")
    return words + words_on_habits(run)


def words_on_waits(run, steps, shares):
    """Return words on data, evaluation and own code that take long, a list. shares: {kind: share of the time}."""
    words = []
    if shares["data"] > LONG_WAIT and run.habits.loaders:
        words.append(words_on_loader(run.habits.loaders, shares["data"]))
    if shares["evaluation"] > LONG_WAIT and not run.habits.repeats_forward:  # checkpointing has such forwards, too
        purposes = "an evaluation, a rollout, or a second model"
        share = percent(shares["evaluation"])
        words.append(f"{share} goes to forwards without gradients ({purposes}) and their batches")
    own = shares["rest"]
    if own > LONG and own * statistics.mean(step.dt for step in steps) > SHORT_OWN_CODE:
        lines = run.own_code.lines["rest"]
        if seconds_beyond_loss(seconds_of(steps)):
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
    """Return words on the DataLoader from which most batches came, where loaders take this share of the time.

    batches: {num_workers of a DataLoader: how many batches came from it}.
    """
    workers, cores = max(batches, key=batches.get), machine.cores()
    remedy = "do less in __getitem__"
    if workers < cores:
        remedy = f"take up to {cores} workers, with persistent_workers=True, or {remedy}"
    elif workers > cores:
        remedy = f"take no more workers than the {cores} cores, or {remedy}"
    return f"{percent(share)} is waiting for a DataLoader with num_workers={workers}: {remedy}"


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
            settings[repr({name: group[name] for name in group if name != "params"})] += 1
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
