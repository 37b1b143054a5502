"""What a step trains on: its micro-batches, and how many tokens or samples each has."""

import inspect
import itertools
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

NO_TEXT = re.compile("label|target|mask|edge|adj")  # arguments of whole numbers that are not what is read
PADDING = 128  # a last layer may have so many rows more than there are tokens, but no more than a 16th of these


@dataclass
class Call:
    """A call of a module with gradients.

    is_training: whether the module is in training mode. tokens: 0 where it reads no text. batch_size, seq_len: of its
    text; without one they are the rows of its first tensor, and None. inputs: its first tensor. module: what is called.
    version: of its first weight, which SAM's changes of it raise. A fused update does not.
    """

    is_training: bool
    tokens: int
    batch_size: int
    seq_len: int | None
    inputs: torch.Tensor
    module: nn.Module
    version: int

    @property
    def priority(self):
        """What decides which of several calls is the micro-batch: those not in training may be a validation."""
        return self.is_training, self.tokens, self.batch_size


class MicroBatches:
    """What was seen since the last step ended.

    batches: a Call for each micro-batch. losses: what backward() was called on, tensors of one number. in_turn: whether
    several optimizers train in turn, as in a GAN. Then the largest batch counts, and not all of them.
    """

    def __init__(self, in_turn=False):
        self.in_turn = in_turn
        self.batches = []
        self.losses = []
        self.unscaled_losses = []  # what a GradScaler multiplied, until backward() is called on each
        self.call = None  # the one that counts, of those since the last backward
        self.backwards_of_closure = 0
        self.is_called_again = False  # whether a module was, before one backward

    def add_call(self, call):
        """Keep the largest call since the last backward: a head behind an encoder sees the same batch."""
        if self.call is not None and call.module is self.call.module:
            self.is_called_again = True
        if self.call is None or call.priority > self.call.priority:
            self.call = call

    def add_backward(self, loss, in_closure):
        """Close a micro-batch. loss: what backward() gets. in_closure: whether an optimizer's closure calls it.

        The first backward of a closure counts, since LBFGS evaluates one batch again and again.
        """
        losses = loss if isinstance(loss, (list, tuple)) else [loss]
        self.backwards_of_closure += in_closure
        its_losses_count = self.close()
        if self.unscaled_losses:
            losses = [self.unscaled_losses.pop(0)]
        for each in losses:
            if its_losses_count and torch.is_tensor(each) and each.numel() == 1:
                self.losses.append(each.detach().float().clone())  # a CUDA graph may write into its own again

    def close(self):
        """Take the calls since the last backward for a micro-batch, if it is new. Return whether its loss counts."""
        call, self.call = self.call, None
        if self.backwards_of_closure > 1:
            return False
        if call is None:
            return True
        if self.batches and not self.in_turn:
            last = self.batches[-1]
            # SAM: the same batch under changed weights
            if call.module is last.module and call.version != last.version:
                return False
            # another model on the same batch, with a loss of its own
            if call.module is not last.module and call.inputs is last.inputs:
                return True
            last.inputs = None  # memory that is the script's
        self.batches.append(call)
        return True

    @property
    def accum(self):
        """How many micro-batches make a step."""
        return 1 if self.in_turn else len(self.batches)

    @property
    def unit(self):
        """What can be counted: "tok", "sample" where there are no tokens, or "step" where nothing was seen."""
        if not self.batches:
            return "step"
        return "tok" if any(call.tokens for call in self.batches) else "sample"

    def count_of(self, unit):
        """Return how many tokens, samples or steps these are. unit: as above, of the first step that was reported."""
        if unit == "step":
            return 1
        counts = [call.tokens if unit == "tok" else call.batch_size for call in self.batches]
        return max(counts, default=0) if self.in_turn else sum(counts)


def call_of(module, args, kwargs):
    """Return (the Call of a module with these arguments, these as named_tensors() returns them).

    The Call is None where there are no tensors.
    """
    facts = FACTS.get(module)
    if facts is None:
        facts = FACTS[module] = facts_of(module)
    names, reads_ids, predicts_ids, weight = facts
    pairs = itertools.zip_longest(names[: len(args)], args, fillvalue="")
    tensors = [*named_tensors(pairs), *named_tensors(kwargs.items())]
    if not tensors:
        return None, tensors
    texts = []
    for name, tensor in tensors:
        is_text = reads_ids if tensor.dim() == 2 else predicts_ids and tensor.dim() == 1
        if is_text and is_whole(tensor) and not NO_TEXT.search(name):
            texts.append(tensor)
    first = tensors[0][1]
    rows = first.shape[0] if first.dim() else 1
    call = Call(module.training, 0, rows, None, first, module, weight._version)
    if texts:
        text = max(texts, key=torch.Tensor.numel)
        call.tokens = text.numel()
        call.batch_size, call.seq_len = text.shape if text.dim() == 2 else (1, len(text))
    return call, tensors


FACTS = weakref.WeakKeyDictionary()  # what facts_of() returned, by module


def facts_of(module):
    """Return (names of a module's arguments, whether it has an embedding, or a last layer for its ids, first weight).

    Without such a layer, ids in one dimension are users or products, and with it they are a text.
    """
    rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    widths = [part.out_features for part in module.modules() if isinstance(part, nn.Linear)]
    padded = [range(number, number + 1 + min(PADDING, number // 16)) for number in rows]
    predicts_ids = any(width in allowed for width in widths for allowed in padded)
    names = list(inspect.signature(module.forward).parameters)
    return names, bool(rows), predicts_ids, next(module.parameters())


def named_tensors(pairs):
    """Return [(name, tensor)] of pairs of a name and a value, also of those inside of lists, tuples and dicts."""
    tensors = []
    for name, value in pairs:
        if torch.is_tensor(value):
            tensors.append((str(name).lower(), value))
        elif isinstance(value, Mapping):
            tensors += named_tensors(value.items())
        elif isinstance(value, (list, tuple)):
            tensors += named_tensors((name, each) for each in value)
    return tensors


def is_whole(tensor):
    """Tell whether a tensor holds whole numbers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
