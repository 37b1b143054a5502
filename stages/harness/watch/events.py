"""What is told of a step is read from two lists, to which the hooks append what happens. Nothing here needs torch.

A mark is (kind, entered, left): from here on the time counts as another kind. The first mark is at the beginning of the
step, and the last one at its end. entered, left: when the hook began and ended, in seconds. What is between is its own
time, and is not the script's.

A note is (name, value), what was seen:

    call      a Call: a module is called with gradients
    loss      [(value, is_share)]: the losses that backward() is called on, each a float or a tensor of one number.
              is_share: whether it was scaled last, as in accumulation
    scaled    the same: what a GradScaler multiplies
    due       None: a GradScaler is asked for the update that ends a step, and may skip it
    other     None: an optimizer has stepped that ends no step
    repeat    None: a forward runs again in a backward, as activation checkpointing has it
    autocast  "bfloat16": its dtype, in a forward or before one
    clipping  None: gradients are clipped
    batch     the num_workers of a DataLoader that is asked for a batch to train on
"""

import math
from bisect import bisect_left
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

# What a step spends its time on: a DataLoader, a forward with gradients, the loss after it, a backward, an optimizer,
# a forward without gradients and the DataLoader that brings its batches, and what is left, the script's own code.
KINDS = ("data", "forward", "loss", "backward", "update", "evaluation", "rest")
OWN_KINDS = ("rest", "loss")  # of code in which the lines of the script are looked at


class Batch(NamedTuple):
    """How much a call of a module reads.

    unit: "tok", "sample" or, if neither is sure, "step". batch_size: the rows of its texts, or of all that it gets.
    seq_len: of its text, or None. count: of all its tokens or samples.
    """

    unit: str = "step"
    batch_size: int | None = None
    seq_len: int | None = None
    count: int = 0


class Call(NamedTuple):
    """A call of a module.

    is_training: whether the module is in training mode. version: of its first weight, which SAM's changes of it raise.
    A fused update does not. inputs: a weak reference to its first tensor, which is the same object for the same tensor.
    """

    module: object
    is_training: bool
    version: int
    inputs: object
    batch: Batch

    @property
    def priority(self):
        """What decides which of several calls is the micro-batch: those not in training may be a validation."""
        return self.is_training, self.batch.unit == "tok", self.batch.count


class MicroBatch(NamedTuple):
    """What is read up to a backward. call: the largest, or None if none was seen. count: of all calls of its module."""

    call: Call | None
    count: int
    losses: list


def values_of(notes, name):
    """Return the values of all notes of a name, a list."""
    return [value for each, value in notes if each == name]


# What its time goes to


def spans_of(marks):
    """Return [(kind, began, ended)], what a step spends its time on: a loss between a forward and a backward."""
    spans = []
    before = None
    for (kind, _, began), (after, ended, _) in pairwise(marks):
        is_loss = before == "forward" and after == "backward"
        spans.append(("loss" if is_loss else kind, began, ended))
        before = kind
    return spans


def seconds_of_kinds(spans):
    """Return {kind: seconds} of a step."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for kind, began, ended in spans:
        seconds[kind] += ended - began
    return seconds


def seconds_of_lines(spans, looks, unseen):
    """Return ({kind: {line: seconds}}, the seconds after the last look) of the script's own code in a step.

    looks: [(time, line)], in order. A look stands for all the time in own code since the look before, because a line
    that holds the interpreter's lock, as sorting or json do, is only seen when it lets go. unseen: the seconds after
    the last look of the step before.
    """
    lines = {kind: Counter() for kind in OWN_KINDS}
    for kind, began, ended in spans:
        if kind not in OWN_KINDS:
            continue
        for looked, line in looks[bisect_left(looks, (began,)) : bisect_left(looks, (ended,))]:
            lines[kind][line] += unseen + looked - began
            unseen, began = 0.0, looked
        unseen += ended - began
    return lines, unseen


def from_first_forward(marks):
    """Return the marks of the first step, which begins with its first forward, and not with the start of the script."""
    kinds = [kind for kind, *_ in marks]
    return marks[kinds.index("forward") :] if "forward" in kinds else marks


# What it trains on


def micro_batches_of(notes):
    """Return the MicroBatches of a step.

    One that reads again what the one before it has read, under changed weights, as SAM and LBFGS do, is left out. What
    follows the step of another optimizer replaces what that one has trained on, as in a GAN.
    """
    micro_batches, calls, scaled = [], [], []
    was_used = False
    for name, value in notes:
        if name == "call":
            if was_used:
                micro_batches, was_used = [], False
            calls.append(value)
        elif name == "scaled":
            scaled = value
        elif name == "loss":
            micro_batch = micro_batch_of(calls, scaled or value)
            if not (micro_batches and is_again(micro_batch.call, micro_batches[-1].call)):
                micro_batches.append(micro_batch)
            calls, scaled = [], []
        elif name == "other":
            was_used = has_calls(micro_batches)
    if calls and not has_calls(micro_batches):  # the script calls no backward()
        micro_batches.append(micro_batch_of(calls, []))
    return micro_batches


def micro_batch_of(calls, losses):
    """Return the MicroBatch of calls up to a backward.

    All that a module reads counts, also in several calls. Of several modules the one with the largest call counts: a
    head after an encoder sees the same batch.
    """
    if not calls:
        return MicroBatch(None, 0, losses)
    largest = max(calls, key=lambda call: call.priority)
    counts = {}  # by what is read: a second call may read the same
    for call in calls:
        if call.module is largest.module and call.is_training == largest.is_training:
            counts[id(call.inputs)] = call.batch.count
    return MicroBatch(largest, sum(counts.values()), losses)


def is_again(call, before):
    """Return whether a call reads the batch of the call before, under changed weights."""
    return call and before and call.module is before.module and call.version != before.version


def has_calls(micro_batches):
    """Return whether it is known of one of them what it reads."""
    return any(micro_batch.call for micro_batch in micro_batches)


def are_shares(micro_batches):
    """Return whether each loss is a share of one for the whole step, as in accumulation."""
    return all(is_share for micro_batch in micro_batches for _, is_share in micro_batch.losses)


def loss_of(micro_batches):
    """Return the loss of a step, a float, or None if it has none, or one that is not finite, which JSON does not know.

    It is that of its only backward, or the sum of shares of one model's batch. Of several losses that are no shares
    nobody knows whether their sum or their mean is what the script means.
    """
    values = [value for micro_batch in micro_batches for value, _ in micro_batch.losses]
    modules = {id(each.call.module) if each.call else None for each in micro_batches}
    if len(values) > 1 and (len(modules) > 1 or not are_shares(micro_batches)):
        return None
    total = float(sum(values))
    return total if values and math.isfinite(total) else None


def unit_of(micro_batches):
    """Return what can be counted surely: "tok", "sample" if there are no tokens, or "step"."""
    units = {micro_batch.call.batch.unit for micro_batch in micro_batches if micro_batch.call}
    if "tok" in units:
        return "tok"
    return "sample" if units == {"sample"} else "step"


def count_of(micro_batches, unit):
    """Return how many tokens or samples these are. unit: "tok" or "sample", as of the first reported step."""
    return sum(each.count for each in micro_batches if each.call and each.call.batch.unit == unit)


def largest_batch(micro_batches):
    """Return the largest Batch of a step."""
    calls = [micro_batch.call for micro_batch in micro_batches if micro_batch.call]
    return max(calls, key=lambda call: call.priority).batch if calls else Batch()


def take_turns(notes):
    """Return whether another optimizer steps between a backward and the end of the step, as in a GAN."""
    names = [name for name, _ in notes]
    return "loss" in names and "other" in names[names.index("loss") :]
