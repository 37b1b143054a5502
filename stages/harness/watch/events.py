"""Reads what happened in a step from two lists, to which the hooks append it. Nothing here needs torch.

A mark is (kind, entered, left): from here on the time counts as another kind. The first mark is at the beginning of the
step, and the last one at its end. entered, left: when the hook that made it began and ended, in seconds. The time
between is the hook's, and not the script's.

A note is (name, value), what was seen:

    call      a Call: a module is called with gradients
    loss      [(value, share)]: the losses that backward() is called on, each a float or a tensor of one number.
              share: (factor, operation) if it was scaled last, as in accumulation, else None; see losses.share_of()
    scaled    the same: what a GradScaler multiplies
    due       None: a GradScaler is asked for the update that ends a step, and may skip it
    other     None: an optimizer has stepped that ends no step
    repeat    None: a forward runs again in a backward, as activation checkpointing has it
    autocast  "bfloat16": its dtype, in a forward or before one
    clipping  "norm" or "value": what gradients are clipped by
    batch     the num_workers of a DataLoader that is asked for a batch to train on
    model     a module that is called with gradients, but without a tensor
"""

import math
import weakref
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

    is_training: whether the module is in training mode. version: of its first weight, which is higher after SAM has
    changed that, and the same after a fused update. tensor_ref: a weak reference to its largest text or first tensor,
    the same object for the same tensor. is_computed: whether it gets what the script has computed with gradients, as a
    step of an ODE solver does.
    """

    module: object
    is_training: bool
    version: int
    tensor_ref: object
    batch: Batch
    is_computed: bool = False

    @property
    def priority(self):
        """What decides which of several calls is the micro-batch: those not in training may be a validation."""
        unit = ("step", "sample", "tok").index(self.batch.unit)
        return self.is_training, unit, not self.is_computed, self.batch.count


class MicroBatch(NamedTuple):
    """What is read up to a backward. call: the largest, or None if none was seen. count: of all calls of its module."""

    call: Call | None
    count: int
    losses: list


def has_note(notes, name):
    """Return whether there is a note of a name."""
    return any(each == name for each, _ in notes)


# What its time goes to


def spans_of(marks):
    """Return [(kind, began, ended)], what a step spends its time on: a loss between a forward and a backward."""
    spans = []
    kind_before = None
    for (kind, _, began), (next_kind, ended, _) in pairwise(marks):
        is_loss = kind_before == "forward" and next_kind == "backward"
        ended = max(began, ended)  # a hook that begins a step was entered before it
        spans.append(("loss" if is_loss else kind, began, ended))
        kind_before = kind
    return spans


def seconds_of_lines(spans, looks, unseen):
    """Return ([(kind, line, seconds)], the seconds after the last look) of the script's own code in a step.

    looks: [(time, line)], in order. A look stands for all the time in own code since the look before, because a line
    that holds the interpreter's lock, for example in sorted(), is only seen when it lets go. unseen: the seconds of own
    code after the last look of the step before.
    """
    lines = []
    for kind, began, ended in spans:
        if kind not in OWN_KINDS:
            continue
        last_look = began
        for looked, line in looks[bisect_left(looks, (began,)) : bisect_left(looks, (ended,))]:
            lines.append((kind, line, unseen + looked - last_look))
            unseen, last_look = 0.0, looked
        unseen += ended - last_look
    return lines, unseen


# What it trains on


def micro_batches_of(notes):
    """Return the MicroBatches of a step.

    SAM and LBFGS read a batch again under changed weights: that is no micro-batch more. In a GAN, what follows the step
    of another optimizer replaces what that one has trained on.
    """
    micro_batches, calls, scaled = [], [], []
    are_of_other = False  # whether another optimizer has trained on them
    for name, value in notes:
        if name == "call":
            if are_of_other:
                micro_batches, are_of_other = [], False
            calls.append(value)
        elif name == "scaled":
            scaled += value
        elif name == "loss":
            micro_batch = micro_batch_of(calls, unscaled(value, scaled))
            if not (micro_batches and repeats(micro_batch, micro_batches[-1])):
                micro_batches.append(micro_batch)
            calls, scaled = [], []
        elif name == "other":
            are_of_other = has_calls(micro_batches)  # without a call nobody knows whose they are
    if calls and not has_calls(micro_batches):  # the script calls no backward()
        micro_batches.append(micro_batch_of(calls, []))
    return micro_batches


def unscaled(losses, scaled):
    """Return the losses of a backward as they were before a GradScaler multiplied them. scaled: what it was given.

    They are not known if it was given several, since their sum may be the loss.
    """
    if not scaled:
        return losses
    return scaled if len(scaled) == len(losses) else []


def micro_batch_of(calls, losses):
    """Return the MicroBatch of calls up to a backward.

    All that a module reads in its calls counts. Of several modules the one with the largest call counts, since a head
    after an encoder gets the same batch.
    """
    if not calls:
        return MicroBatch(None, 0, losses)
    largest = max(calls, key=lambda call: call.priority)
    counts = {id(largest.tensor_ref): largest.batch.count}  # by what is read: a second call may read the same
    for call in calls:
        if reads_more(call, largest):
            counts[id(call.tensor_ref)] = call.batch.count
    return MicroBatch(largest, sum(counts.values()), losses)


def reads_more(call, largest):
    """Return whether a call adds to what the largest one of its micro-batch reads.

    A call on what was computed from its samples does not. But a decoder reads a text beside what an encoder computed.
    """
    if call.is_training != largest.is_training or call.batch.unit != largest.batch.unit:
        return False
    is_text = call.batch.unit == "tok"
    if call.module is largest.module:
        return is_text or not call.is_computed
    return is_text and call.is_computed


def repeats(micro_batch, before):
    """Return whether a micro-batch reads the batch of the one before again, under changed weights.

    A forward may change them, too, as that of nn.Embedding(max_norm=1) does. Then the losses are shares of one, and
    each has a batch of its own.
    """
    call, call_before = micro_batch.call, before.call
    if call is None or call_before is None or call.module is not call_before.module:
        return False
    if call.version == call_before.version:
        return False
    reads_the_same = call.tensor_ref is call_before.tensor_ref
    return reads_the_same or not are_shares([before, micro_batch])


def has_calls(micro_batches):
    """Return whether it is known of one of them what it reads."""
    return any(micro_batch.call for micro_batch in micro_batches)


def are_shares(micro_batches):
    """Return whether each loss is a share of one loss for the whole step, as in accumulation.

    Then one operation and one model made all of them. Their factors are equal, as 1/4 for each of four; or each has a
    batch of its own, and the factors sum to 1. Factors that lie on a card are not read, and count as equal.
    """
    shares = [share for micro_batch in micro_batches for _, share in micro_batch.losses]
    if not shares or None in shares:
        return False
    factors = [factor for factor, _ in shares]
    operations = {operation for _, operation in shares}
    if len(operations) > 1 or len(called_modules(micro_batches)) > 1:
        return False
    are_equal = len(set(factors)) == 1
    sum_to_1 = None not in factors and math.isclose(sum(factors), 1)
    tensors = {id(each.call.tensor_ref) for each in micro_batches if each.call}
    have_own_batches = len(tensors) == len(micro_batches)
    return are_equal or (have_own_batches and sum_to_1)


def called_modules(micro_batches):
    """Return the ids of the modules that were called, a set; of an unknown one None."""
    return {id(each.call.module) if each.call else None for each in micro_batches}


def accumulated(micro_batches):
    """Return how many micro-batches a step accumulates the gradients of; 1 if their losses are no shares of one."""
    if not are_shares(micro_batches):
        return 1
    return max(1, sum(each.call is not None for each in micro_batches))


def loss_of(micro_batches):
    """Return the loss of a step, a float, or None if it has none.

    It is that of its only backward, or the sum of shares. Of several losses that are no shares, nobody knows whether
    the script means their sum or their mean.
    """
    values = [value for micro_batch in micro_batches for value, _ in micro_batch.losses]
    if len(values) > 1 and not are_shares(micro_batches):
        return None
    return sum(float(value) for value in values) if values else None


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


# What it does in general


class Habits:
    """What a script was seen to do in any step so far.

    models: {id: module} of those that were called in training. accum: the most micro-batches whose gradients a step
    accumulates. autocast: the dtype of the last one in a forward, or None. clips: by what, "norm" or "value", or None.
    loaders: {num_workers of a DataLoader: how many batches it was asked for}. repeats_forward: whether a forward runs
    again in a backward.
    """

    def __init__(self):
        self.models = weakref.WeakValueDictionary()  # a script may delete them
        self.loaders = Counter()
        self.accum = 1
        self.autocast = self.clips = None
        self.repeats_forward = False

    def add(self, notes):
        """Add what the notes of a step say."""
        for name, value in notes:
            if name == "call":
                self.models[id(value.module)] = value.module
            elif name == "model":
                self.models[id(value)] = value
            elif name == "autocast":
                self.autocast = value
            elif name == "clipping":
                self.clips = value
            elif name == "repeat":
                self.repeats_forward = True
            elif name == "batch":
                self.loaders[value] += 1
