"""What a step trains on: its micro-batches, and how many tokens or samples each has."""

import inspect
import itertools
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NO_TEXT = re.compile("label|target|mask|(^|_)edge|(^|_)adj")  # names of arguments that have integers, but no text
MOST_BEHIND_SCALE = 3  # operations between backward() and a loss that a GradScaler multiplied, as a division


class MicroBatches:
    """What was seen since the last step ended.

    batches: a Call for each micro-batch. losses: what backward() was called on, tensors of one number. in_turn: whether
    several optimizers train in turn, as in a GAN. Then the largest batch counts, and not all of them.
    """

    def __init__(self, in_turn=False):
        self.in_turn = in_turn
        self.batches = []
        self.losses = []
        self.unscaled_losses = []  # what a GradScaler multiplied
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
        """Close a micro-batch, and keep its loss. loss: what backward() gets, a tensor or several.

        in_closure: whether an optimizer's closure calls backward(). Its first one counts, since LBFGS evaluates one
        batch again and again.
        """
        if in_closure:
            self.backwards_of_closure += 1
        is_new = self.close()
        losses = loss if isinstance(loss, (list, tuple)) else [loss]
        for each in losses:
            if is_new and torch.is_tensor(each) and each.numel() == 1:
                # a copy, since a CUDA graph may write into its own again
                self.losses.append(self.unscaled(each).detach().float().clone())

    def unscaled(self, loss):
        """Return the loss that a GradScaler multiplied to get this one. Where none did, it is this one."""
        operation = loss.grad_fn
        for _ in range(MOST_BEHIND_SCALE):
            for unscaled in self.unscaled_losses:
                if operation is not None and unscaled.grad_fn is operation:
                    return unscaled
            if operation is None or not operation.next_functions:
                break
            operation, _ = operation.next_functions[0]
        return loss

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


@dataclass
class Call:
    """A call of a module with gradients.

    is_training: whether the module is in training mode. version: of its first weight, which SAM's changes of it raise.
    A fused update does not. inputs: the first tensor that it gets. batch_size: the rows of that, or of its text.
    tokens, seq_len: of this text, 0 and None without one.
    """

    module: nn.Module
    is_training: bool
    version: int
    inputs: torch.Tensor
    batch_size: int
    tokens: int = 0
    seq_len: int | None = None

    @property
    def priority(self):
        """What decides which of several calls is the micro-batch: those not in training may be a validation."""
        return self.is_training, self.tokens, self.batch_size


class Reader(NamedTuple):
    """What decides which arguments of a module are its text.

    names: of its arguments by position. reads_ids: whether it has an embedding. chooses_ids: whether a layer has as
    many outputs as the embedding has rows. Without such a layer ids in one dimension are users or products.
    """

    names: list
    reads_ids: bool
    chooses_ids: bool

    def reads(self, name, tensor):
        """Tell whether an argument has the ids of a text, by its name, dtype and dimensions."""
        is_text = self.reads_ids if tensor.dim() == 2 else self.chooses_ids and tensor.dim() == 1
        return is_text and is_whole(tensor) and not NO_TEXT.search(name)


READERS = weakref.WeakKeyDictionary()  # {module: its Reader}, since a module may have a thousand parts


def reader_of(module):
    """Return the Reader of a module. Without names is what TorchScript has traced."""
    reader = READERS.get(module)
    if reader is None:
        try:
            names = list(inspect.signature(unwrapped(module).forward).parameters)
        except ValueError:
            names = []
        modules = list(module.modules())
        reads_ids = any(isinstance(part, nn.Embedding) for part in modules)
        reader = READERS[module] = Reader(names, reads_ids, vocabulary_of(modules) is not None)
    return reader


def unwrapped(model):
    """Return the module inside of torch.compile and DistributedDataParallel, in whatever order they are around it."""
    for part in model.modules():  # the outermost first
        if not isinstance(part, DistributedDataParallel) and not hasattr(part, "_orig_mod"):
            return part


def call_of(module, args, kwargs):
    """Return the Call of a module with these arguments, or None if they have no tensors."""
    reader = reader_of(module)
    by_position = itertools.zip_longest(reader.names[: len(args)], args, fillvalue="")  # "" behind a *args
    tensors = named_tensors([*by_position, *kwargs.items()])
    if not tensors:
        return None
    _, first = tensors[0]
    rows = first.size(0) if first.dim() else 1
    call = Call(module, module.training, next(module.parameters())._version, first, rows)
    texts = [tensor for name, tensor in tensors if reader.reads(name, tensor)]
    if texts:
        text = max(texts, key=torch.Tensor.numel)
        call.batch_size = text.shape[0] if text.dim() == 2 else 1
        call.tokens, call.seq_len = text.numel(), text.shape[-1]
    return call


def vocabulary_of(modules):
    """Return the rows of the largest embedding, where a layer has as many outputs, or None."""
    rows = max((module.num_embeddings for module in modules if isinstance(module, nn.Embedding)), default=None)
    widths = [module.out_features for module in modules if isinstance(module, nn.Linear)]
    return rows if rows in widths else None


def is_whole(tensor):
    """Tell whether a tensor holds whole numbers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


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
