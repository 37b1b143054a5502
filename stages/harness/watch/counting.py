"""What a call of a module reads, and a backward: how many tokens or samples, and the loss."""

import contextlib
import dataclasses
import inspect
import re
import weakref
from collections.abc import Mapping
from itertools import permutations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import pytorch
from .events import Batch
from .timeline import is_captured

# Names of arguments that have integers, but no ids which the model reads
NAMES_WITHOUT_IDS = (
    "mask(?!ed)|position|type|segment|is_next",  # attention_mask, position_ids, token_type_ids, and not masked_ids
    "length|seqlen|offset|batch_sizes|sorted_indices",  # cu_seqlens; the last two are in packed sequences
    "(^|_)pos(_|$)",  # pos, pos_ids, and not positives
    "(label|target)(?!.*_in)",  # lm_labels, and not target_in, which a decoder reads
    r"gold|(^|_)(y|tags?|outs?|outputs?)(\.|$)",  # tgt_out
)
HAS_NO_IDS = re.compile("|".join(NAMES_WITHOUT_IDS), re.IGNORECASE)
CONNECTS_NODES = re.compile("(^|_)(edge|adj)", re.IGNORECASE)  # the same in graphs, whose nodes are no samples
IDS = (torch.int64, torch.int32)  # the dtypes that nn.Embedding takes
FABRIC = ("lightning.fabric", "lightning_fabric")  # Lightning's package for loops of one's own


class Signature:
    """What a module takes, by which the ids of a text are told from its other arguments.

    weight: its first parameter that is trained, or the first. names: of its arguments by position. embeddings: how many
    it has. has_vocabulary: whether a layer has as many outputs as the embedding has rows. Without such a layer ids in
    one dimension are users or products. is_time_major: whether a layer reads (T, B) in place of (B, T), as nn.LSTM does
    by default. labels: the names of texts that are labels or masks of others, or None before a call had two texts.

    Of its last call: shapes, [(name, shape, dtype)] of its tensors; batch, its Batch; and place, where its largest text
    stands among the tensors.
    """

    def __init__(self, module, weight):
        parts = modules_of(module)
        self.weight = weight
        self.names = names_of_arguments(parts)
        self.embeddings = sum(isinstance(part, nn.Embedding) for part in parts)
        self.has_vocabulary = vocabulary_of(parts) is not None
        self.is_time_major = any(getattr(part, "batch_first", None) is False for part in parts)
        self.labels = None
        # of the last call
        self.shapes = self.batch = None
        self.place = 0

    def read(self, args, kwargs):
        """Return what a call with these arguments reads, as (tensor, Batch, whether a tensor has a history).

        tensor: its largest text or first tensor, by which its input is known again; None without one.
        """
        names = [*self.names, *range(len(self.names), len(args))]  # the last ones are of a *args
        tensors = named_tensors([*zip(names, args, strict=False), *kwargs.items()])
        if not tensors:
            return None, Batch(), False
        is_computed = any(tensor.grad_fn is not None for _, tensor in tensors)
        if any(tensor.is_nested or pytorch.hides_a_dimension(tensor) for _, tensor in tensors):  # its shape is not all
            return tensors[0][1], Batch(), is_computed
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
        if shapes != self.shapes:  # else all is as in the last call: a module may be called a thousand times in a step
            self.batch, self.place = self.batch_of(tensors)
            self.shapes = shapes
        return tensors[self.place][1], self.batch, is_computed

    def is_text(self, name, tensor):
        """Return whether an argument has the ids of a text, by its name, dtype and dimensions."""
        if tensor.dtype not in IDS or HAS_NO_IDS.search(name) or CONNECTS_NODES.search(name):
            return False
        if tensor.dim() == 2 and tensor.numel():
            is_table = self.embeddings % tensor.shape[1] == 0  # as many embeddings for each of its columns
            return self.has_vocabulary or not is_table
        return tensor.dim() == 1 and self.has_vocabulary

    def batch_of(self, tensors):
        """Return the Batch of named tensors, and the place of the largest text; 0 without one."""
        named_texts = [(name, tensor) for name, tensor in tensors if self.is_text(name, tensor)]
        if self.labels is None and len(named_texts) > 1 and not is_captured():  # once, since it waits for a card
            self.labels = names_of_labels(named_texts)
        texts = [tensor for name, tensor in named_texts if name not in (self.labels or ())]
        texts = [text for text in texts if text.dim() == 2] or texts  # beside (B, T) what has (B,) are lengths
        if not texts:
            return self.batch_of_samples(tensors), 0
        largest = max(texts, key=torch.Tensor.numel)
        is_largest = [tensor is largest for _, tensor in tensors]
        batch_size, seq_len = largest.shape if largest.dim() == 2 else (1, len(largest))
        if self.is_time_major:  # then nobody knows which is which
            batch_size = seq_len = None
        return Batch("tok", batch_size, seq_len, sum(text.numel() for text in texts)), is_largest.index(True)

    def batch_of_samples(self, tensors):
        """Return the Batch of named tensors without a text: samples if all agree in their first dimension, or a step.

        A table of series, (T, B, C), is a step.
        """
        rows = {tensor.shape[0] for _, tensor in tensors if tensor.dim()}
        floats = [tensor for _, tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1]
        is_graph = any(CONNECTS_NODES.search(name) or tensor.layout != torch.strided for name, tensor in tensors)
        may_be_series = self.is_time_major and any(tensor.dim() < 4 for tensor in floats)
        if len(rows) == 1 and floats and not (is_graph or may_be_series):
            [batch_size] = rows
            return Batch("sample", batch_size, None, batch_size)
        return Batch()


SIGNATURES = weakref.WeakKeyDictionary()  # {module: its Signature}, since a module may have a thousand parts


def signature_of(module):
    """Return the Signature of a module. None without parameters, and with those on meta, where nothing is computed."""
    signature = SIGNATURES.get(module)
    if signature is None:
        parameters = parameters_in(modules_of(module))
        if not parameters or parameters[0].is_meta:  # to_empty() replaces the latter
            return None
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        signature = SIGNATURES[module] = Signature(module, (trained or parameters)[0])
    return signature


def parameters_in(modules):
    """Return the parameters of these modules themselves, a list. Keras makes new ones if its own method is called."""
    return [p for module in modules for _, p in nn.Module.named_parameters(module, recurse=False)]


def modules_of(module):
    """Return {a module, and each one in it: its name there}. A script's own class may have a `modules` of its own."""
    names = {module: ""}
    parents = [module]
    for parent in parents:  # which grows
        for name, part in nn.Module.named_children(parent):
            if part not in names:
                names[part] = f"{names[parent]}.{name}"
                parents.append(part)
    return names


def names_of_arguments(parts):
    """Return the names of a module's arguments by position, a list. parts: of modules_of().

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
    """Return the module inside of torch.compile, DistributedDataParallel and Fabric, in whatever order these are."""
    for part in modules_of(model):  # the outermost first
        is_of_fabric = type(part).__module__.startswith(FABRIC)
        if not (is_of_fabric or isinstance(part, DistributedDataParallel) or pytorch.is_around_module(part)):
            return part


def vocabulary_of(modules):
    """Return the rows of the largest embedding, where a layer has as many outputs, or None."""
    rows = max((module.num_embeddings for module in modules if isinstance(module, nn.Embedding)), default=None)
    widths = [module.out_features for module in modules if isinstance(module, nn.Linear)]
    return rows if rows in widths else None


def names_of_labels(texts):
    """Return the names of texts that no model reads, by their values: labels and masks of another one.

    A label is the other text, shifted by one place, or has numbers below 0, which are not predicted. A mask has no
    number above 1. texts: pairs of a name and a tensor.
    """
    labels = set()
    for (_, text), (name, label) in permutations(texts, 2):
        if text.shape != label.shape or text.device != label.device or text.shape[-1] < 2 or torch.equal(text, label):
            continue
        is_shifted = torch.equal(text[..., 1:], label[..., :-1])
        is_mask = label.max() <= 1 < text.max()
        if is_shifted or is_mask or label.min() < 0:
            labels.add(name)
    return labels


def named_tensors(pairs, around=()):
    """Return [(name, tensor)] of pairs of a name and a value, also of those inside of lists, dicts and the like.

    around: the ids of what they are in, since one may contain itself.
    """
    tensors = []
    for name, value in pairs:
        if isinstance(value, torch.Tensor):
            tensors.append((str(name), value))
        elif id(value) not in around:
            tensors += named_tensors(parts_of(name, value), (*around, id(value)))
    return tensors


def parts_of(name, value):
    """Return [(name, value)] of what is in a list, a tuple, a dict or a dataclass; nothing for anything else."""
    if isinstance(value, Mapping):
        return value.items()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return zip(value._fields, value, strict=True)
    if isinstance(value, (list, tuple)):
        return [(f"{name}.{number}", each) for number, each in enumerate(value)]
    return []


def losses_of(tensors):
    """Return [(value, share)] of what backward() gets, a tensor or several. share: see share_of()."""
    losses = []
    if is_captured():
        return losses
    if not isinstance(tensors, (list, tuple)):
        tensors = [tensors]
    for tensor in tensors:
        if torch.is_tensor(tensor) and tensor.numel() == 1 and not tensor.is_complex():
            # on a card a copy, which does not wait for it, and into which no CUDA graph writes
            value = tensor.item() if tensor.is_cpu else tensor.detach().float().clone()
            losses.append((value, share_of(tensor.grad_fn)))
    return losses


def share_of(node):
    """Return (factor, loss) of a loss that was scaled by a number last, as accumulation does, else None.

    factor: 0.25 for `loss / 4`, or None if it lies on a card. loss: the operation that made it. node: its grad_fn.
    """
    if node is None or node.name() not in ("DivBackward0", "MulBackward0"):
        return None
    operands = [pytorch.saved_by(node, "other"), pytorch.saved_by(node, "self")]
    constants = [operand for operand in operands if operand is not None and not operand.requires_grad]
    operations = [each.name() for each, _ in node.next_functions if each]
    if len(constants) != 1 or len(operations) != 1:  # the product of two losses
        return None
    factor = constants[0].item() if constants[0].is_cpu else None
    if factor and node.name() == "DivBackward0":
        factor = 1 / factor
    return factor, operations[0]
