"""What a step trains on: its micro-batches, and how many tokens or samples each has."""

import contextlib
import inspect
import math
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Names of arguments that have integers, but no ids which the model reads: "mask", "token_type_ids"
HAS_NO_IDS = re.compile("label|target|mask|position|type|^y$|(^|_)pos(_|$)", re.IGNORECASE)
CONNECTS_NODES = re.compile("(^|_)(edge|adj)", re.IGNORECASE)  # the same in graphs, whose nodes are no samples
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

    def add_call(self, module, weight, inputs, batch):
        """Keep what a module reads: a Batch, whose first tensor is `inputs`. weight: its first parameter.

        All that a module reads until the next backward counts, also in several calls. Of calls of several modules the
        largest counts: a head after an encoder sees the same batch.
        """
        if self.was_used:
            self.batches, self.losses, self.was_used = [], [], False
        last = self.call
        if last is None or last.module is not module or last.is_training != module.training:
            call = Call(module, module.training, weight._version, inputs, batch, batch.count)
            if last is None or call.priority > last.priority:
                self.call = call
        elif last.inputs is not inputs:  # the same module reads another part of the batch
            last.inputs = inputs
            last.count += batch.count
            if batch.count > last.batch.count:
                last.batch = batch

    def add_backward(self, loss):
        """Close a micro-batch, and keep its loss, if it is new. loss: what backward() gets, a tensor or several."""
        call = self.call
        if call and self.batches and call.is_again(self.batches[-1]):  # as SAM and LBFGS do: its loss is not kept
            self.call = None
            return
        self.close()
        module = call.module if call else None
        for each in loss if isinstance(loss, (list, tuple)) else [loss]:
            if torch.is_tensor(each) and each.numel() == 1:
                if self.unscaled_loss is not None:
                    each, self.unscaled_loss = self.unscaled_loss, None
                is_share = each.grad_fn is not None and each.grad_fn.name() in SHARES
                # on a card a copy, which does not wait for it, and into which no CUDA graph writes
                value = each.item() if each.is_cpu else each.detach().float().clone()
                self.losses.append(Loss(value, module, is_share))

    def close(self):
        """Take the calls since the last backward, if there were any, for a micro-batch."""
        if self.call:
            self.call.inputs = None  # memory that is the script's
            self.batches.append(self.call)
            self.call = None

    @property
    def are_shares(self):
        """Whether each loss is a share of one for the whole step, as in accumulation."""
        return all(loss.is_share for loss in self.losses)

    @property
    def loss(self):
        """The loss of the step, a float, or None if it has none, or one that is not finite, which JSON does not know.

        It is that of its only backward, or the sum of shares of one model's batch. Of several losses that are no shares
        nobody knows whether their sum or their mean is what the script means.
        """
        if not self.losses:
            return None
        if len(self.losses) > 1:
            modules = {id(loss.module) for loss in self.losses}
            if len(modules) > 1 or not self.are_shares:
                return None
        total = float(sum(loss.value for loss in self.losses))
        return total if math.isfinite(total) else None

    @property
    def unit(self):
        """What can be counted surely: "tok", "sample" if there are no tokens, or "step"."""
        units = {call.batch.unit for call in self.batches}
        if "tok" in units:
            return "tok"
        return "sample" if units == {"sample"} else "step"

    def count_of(self, unit):
        """Return how many tokens or samples these are. unit: "tok" or "sample", as of the first reported step."""
        return sum(call.count for call in self.batches if call.batch.unit == unit)


class Batch(NamedTuple):
    """How much a call of a module reads.

    unit: "tok", "sample" or, if neither is sure, "step". batch_size: the rows of its texts, or of all that it gets.
    seq_len: of its text, or None. count: of all its tokens or samples.
    """

    unit: str = "step"
    batch_size: int | None = None
    seq_len: int | None = None
    count: int = 0


@dataclass
class Call:
    """The calls of a module with gradients up to a backward.

    is_training: whether the module is in training mode. version: of its first weight, which SAM's changes of it raise.
    A fused update does not. inputs: the first tensor of the last call. batch: the largest Batch. count: of all.
    """

    module: nn.Module
    is_training: bool
    version: int
    inputs: torch.Tensor
    batch: Batch
    count: int

    @property
    def priority(self):
        """What decides which of several calls is the micro-batch: those not in training may be a validation."""
        return self.is_training, self.batch.unit == "tok", self.count

    def is_again(self, before):
        """Return whether it reads the batch of the call before, under changed weights, as in SAM and LBFGS."""
        return self.module is before.module and self.version != before.version


class Signature:
    """What a module takes, by which the ids of a text are told from its other arguments.

    weight: its first parameter. names: of its arguments by position. has_embedding: whether a part of it is one.
    has_vocabulary: whether a layer has as many outputs as the embedding has rows. Without such a layer ids in one
    dimension are users or products. shapes, batch: the names, shapes and dtypes of its last call, and its Batch.
    """

    def __init__(self, module, weight):
        parts = list(module.modules())
        self.weight = weight
        self.names = names_of_arguments(parts)
        self.has_embedding = any(isinstance(part, nn.Embedding) for part in parts)
        self.has_vocabulary = vocabulary_of(parts) is not None
        self.shapes = self.batch = None

    def read(self, args, kwargs):
        """Return the first tensor and the Batch of a call with these arguments; None for both without a tensor."""
        tensors = named_tensors(enumerate(args))
        if kwargs:
            tensors += named_tensors(kwargs.items())
        if not tensors:
            return None, None
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
        if shapes != self.shapes:  # else all is as in the last call: a module may be called a thousand times in a step
            self.shapes = shapes
            self.batch = self.batch_of([(self.name_of(name), tensor) for name, tensor in tensors])
        return tensors[0][1], self.batch

    def name_of(self, name):
        """Return the name of an argument that was passed by name, or by position."""
        if isinstance(name, int):
            return self.names[name] if name < len(self.names) else ""  # of a *args
        return str(name)

    def is_text(self, name, tensor):
        """Return whether an argument has the ids of a text, by its name, dtype and dimensions."""
        is_read = self.has_embedding if tensor.dim() == 2 else self.has_vocabulary and tensor.dim() == 1
        if not is_read or not is_whole(tensor):
            return False
        return not HAS_NO_IDS.search(name) and not CONNECTS_NODES.search(name)

    def batch_of(self, tensors):
        """Return the Batch of named tensors."""
        texts = [tensor for name, tensor in tensors if self.is_text(name, tensor)]
        if texts:
            largest = max(texts, key=torch.Tensor.numel)
            batch_size = largest.shape[0] if largest.dim() == 2 else 1
            return Batch("tok", batch_size, largest.shape[-1], sum(text.numel() for text in texts))
        rows = {tensor.shape[0] for _, tensor in tensors if tensor.dim()}
        has_samples = any(tensor.is_floating_point() and tensor.dim() > 1 for _, tensor in tensors)
        is_graph = any(CONNECTS_NODES.search(name) or tensor.is_sparse for name, tensor in tensors)
        if len(rows) == 1 and has_samples and not is_graph:
            [batch_size] = rows
            return Batch("sample", batch_size, None, batch_size)
        return Batch()


SIGNATURES = weakref.WeakKeyDictionary()  # {module: its Signature}, since a module may have a thousand parts


def signature_of(module):
    """Return the Signature of a module. None without parameters, and with those on meta, where nothing is computed."""
    signature = SIGNATURES.get(module)
    if signature is None:
        weight = next(module.parameters(), None)
        if weight is None or weight.is_meta:  # to_empty() replaces the latter
            return None
        signature = SIGNATURES[module] = Signature(module, weight)
    return signature


def names_of_arguments(parts):
    """Return the names of a module's arguments by position, a list. parts: it, and all modules in it.

    Of a wrapper that takes any arguments they are those of what it wraps.
    """
    for part in parts:
        parameters = {}
        with contextlib.suppress(ValueError):  # what TorchScript has traced has no names
            parameters = inspect.signature(part.forward).parameters
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, parameter in parameters.items() if parameter.kind in by_position]
        if names:
            return names
    return []


def unwrapped(model):
    """Return the module inside of torch.compile and DistributedDataParallel, in whatever order they are around it."""
    for part in model.modules():  # the outermost first
        if not isinstance(part, DistributedDataParallel) and not hasattr(part, "_orig_mod"):
            return part


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
        if isinstance(value, torch.Tensor):
            tensors.append((name, value))
        elif isinstance(value, Mapping):
            tensors += named_tensors(value.items())
        elif isinstance(value, (list, tuple)):
            tensors += named_tensors((name, each) for each in value)
    return tensors
