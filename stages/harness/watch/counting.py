"""What a step trains on: its micro-batches, and how many tokens or samples each has."""

import contextlib
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

GRAPH = re.compile("(^|_)(edge|adj)")  # names of arguments that connect nodes, which are no samples
# Names of arguments that have integers, but no ids which the model reads: "mask", "token_type_ids", "edge_index"
NO_IDS = re.compile(f"label|target|mask|position|type|^y$|{GRAPH.pattern}|(^|_)pos(_|$)")
SHARES = ("DivBackward0", "MulBackward0")  # the last operation of a loss that is one micro-batch's share of the whole


class Loss(NamedTuple):
    """A loss that backward() was called on. module: that of its micro-batch. is_share: whether it was scaled last."""

    value: float | torch.Tensor
    module: nn.Module | None
    is_share: bool


class MicroBatches:
    """What was seen since the last step ended.

    batches: a Call for each micro-batch. losses: a Loss for each. was_used: whether another optimizer has stepped on
    them than the one that ends a step, as in a GAN. Then what follows replaces them.
    """

    def __init__(self):
        self.batches = []
        self.losses = []
        self.was_used = False
        self.unscaled_loss = None  # what a GradScaler multiplied last
        self.call = None  # the one that counts, of those since the last backward

    def add_call(self, call):
        """Keep what was read since the last backward.

        All that a module reads counts, also in several calls. Of calls of several modules the largest counts: a head
        after an encoder sees the same batch.
        """
        if self.was_used:
            self.batches, self.losses, self.was_used = [], [], False
        last = self.call
        if last is None:
            self.call = call
            return
        if call.module is last.module and call.is_training == last.is_training and call.inputs is not last.inputs:
            call.count += last.count
        if call.priority > last.priority:
            self.call = call

    def add_again(self, module, args):
        """Count a module that gets an input of the size of its last one, which is quick. Return whether it does."""
        last = self.call
        if last is None or last.module is not module or module.training != last.is_training:
            return False
        if not args or not torch.is_tensor(args[0]) or args[0].shape != last.inputs.shape:
            return False
        if args[0] is not last.inputs:
            last.count += last.own_count
            last.inputs = args[0]
        return True

    def add_backward(self, loss):
        """Close a micro-batch, and keep its loss if it is new. loss: what backward() gets, a tensor or several."""
        module = self.call.module if self.call else None
        if not self.close():
            return
        for each in loss if isinstance(loss, (list, tuple)) else [loss]:
            if torch.is_tensor(each) and each.numel() == 1:
                if self.unscaled_loss is not None:
                    each, self.unscaled_loss = self.unscaled_loss, None
                is_share = each.grad_fn is not None and each.grad_fn.name() in SHARES
                # on a card a copy, which does not wait for it, and into which no CUDA graph writes
                value = each.item() if each.device.type == "cpu" else each.detach().float().clone()
                self.losses.append(Loss(value, module, is_share))

    def close(self):
        """Take the calls since the last backward for a micro-batch. Return False if its batch was there already.

        SAM and LBFGS evaluate a batch again under changed weights.
        """
        call, self.call = self.call, None
        if call is None:
            return True
        call.inputs = None  # memory that is the script's
        last = self.batches[-1] if self.batches else call
        if call.module is last.module and call.version != last.version:
            return False
        self.batches.append(call)
        return True

    @property
    def are_shares(self):
        """Whether each loss is a share of one for the whole step, as in accumulation."""
        return all(loss.is_share for loss in self.losses)

    @property
    def loss(self):
        """The loss of the step, a float, or None if it has none.

        It is that of its only backward, or the sum of shares of one model's batch. Of several losses that are no shares
        nobody knows whether their sum or their mean is what the script means.
        """
        modules = {id(loss.module) for loss in self.losses}
        if len(self.losses) > 1 and (len(modules) > 1 or not self.are_shares):
            return None
        if not self.losses:
            return None
        return float(sum(loss.value for loss in self.losses))

    @property
    def unit(self):
        """What can be counted surely: "tok", "sample" if there are no tokens, or "step"."""
        if any(call.unit == "tok" for call in self.batches):
            return "tok"
        if self.batches and all(call.unit == "sample" for call in self.batches):
            return "sample"
        return "step"

    def count_of(self, unit):
        """Return how many tokens or samples these are. unit: "tok" or "sample", as of the first reported step."""
        return sum(call.count for call in self.batches if call.unit == unit)


@dataclass
class Call:
    """A call of a module with gradients.

    is_training: whether the module is in training mode. version: of its first weight, which SAM's changes of it raise.
    A fused update does not. inputs: the first tensor of its last call. unit: "tok", "sample" or, if neither is sure,
    "step". batch_size: the rows of its texts, or of all that it gets. seq_len: of its text, or None. count: of all its
    tokens or samples, and of those that the module got before since the last backward. own_count: without the latter.
    """

    module: nn.Module
    is_training: bool
    version: int
    inputs: torch.Tensor
    unit: str = "step"
    batch_size: int | None = None
    seq_len: int | None = None
    count: int = 0
    own_count: int = 0

    @property
    def priority(self):
        """What decides which of several calls is the micro-batch: those not in training may be a validation."""
        return self.is_training, self.unit == "tok", self.count


class Reader(NamedTuple):
    """What is known of a module, and decides which of its arguments have ids of a text.

    weight: its first parameter. names: of its arguments by position. reads_ids: whether it has an embedding.
    chooses_ids: whether a layer has as many outputs as the embedding has rows. Without such a layer ids in one
    dimension are users or products.
    """

    weight: nn.Parameter
    names: list
    reads_ids: bool
    chooses_ids: bool

    def reads(self, name, tensor):
        """Return whether an argument has the ids of a text, by its name, dtype and dimensions."""
        is_text = self.reads_ids if tensor.dim() == 2 else self.chooses_ids and tensor.dim() == 1
        return is_text and is_whole(tensor) and not NO_IDS.search(name)


READERS = weakref.WeakKeyDictionary()  # {module: its Reader}, since a module may have a thousand parts


def reader_of(module):
    """Return the Reader of a module, or None if it has no parameters. TorchScript's modules have no names."""
    reader = READERS.get(module)
    if reader is None:
        weight = next(module.parameters(), None)
        if weight is None:
            return None
        modules = list(module.modules())
        names = names_of_arguments(modules)
        reads_ids = any(isinstance(part, nn.Embedding) for part in modules)
        reader = READERS[module] = Reader(weight, names, reads_ids, vocabulary_of(modules) is not None)
    return reader


def names_of_arguments(modules):
    """Return the names of a module's arguments, a list. modules: it, and all its parts.

    Of a wrapper that takes any arguments they are those of what it wraps. TorchScript's modules have none.
    """
    names = []
    for module in modules:
        with contextlib.suppress(ValueError):
            names = list(inspect.signature(module.forward).parameters)
        if names not in (["args", "kwargs"], ["inputs", "kwargs"]):
            break
    return names


def unwrapped(model):
    """Return the module inside of torch.compile and DistributedDataParallel, in whatever order they are around it."""
    for part in model.modules():  # the outermost first
        if not isinstance(part, DistributedDataParallel) and not hasattr(part, "_orig_mod"):
            return part


def call_of(module, reader, args, kwargs):
    """Return the Call of a module with these arguments, or None if they have no tensors."""
    by_position = itertools.zip_longest(reader.names[: len(args)], args, fillvalue="")  # "" after a *args
    tensors = named_tensors([*by_position, *kwargs.items()])
    if not tensors:
        return None
    call = Call(module, module.training, reader.weight._version, tensors[0][1])
    texts = [tensor for name, tensor in tensors if reader.reads(name, tensor)]
    if texts:
        text = max(texts, key=torch.Tensor.numel)
        call.batch_size = text.shape[0] if text.dim() == 2 else 1
        call.seq_len = text.shape[-1]
        call.unit, call.count = "tok", sum(text.numel() for text in texts)
    else:
        rows = {tensor.shape[0] for _, tensor in tensors if tensor.dim()}
        has_samples = any(tensor.is_floating_point() and tensor.dim() > 1 for _, tensor in tensors)
        is_graph = any(GRAPH.search(name) or tensor.is_sparse for name, tensor in tensors)
        if len(rows) == 1 and has_samples and not is_graph:
            call.batch_size = rows.pop()
            call.unit, call.count = "sample", call.batch_size
    call.own_count = call.count
    return call


def vocabulary_of(modules):
    """Return the rows of the largest embedding, where a layer has as many outputs, or None."""
    rows = max((module.num_embeddings for module in modules if isinstance(module, nn.Embedding)), default=None)
    widths = [module.out_features for module in modules if isinstance(module, nn.Linear)]
    return rows if rows in widths else None


def is_whole(tensor):
    """Return whether a tensor holds whole numbers."""
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
