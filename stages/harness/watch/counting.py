"""What a call of a module reads, and a backward: how many tokens or samples, and the loss."""

import contextlib
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
    "mask(?!ed)|position|type",  # attention_mask, position_ids, token_type_ids, and not masked_ids
    "(^|_)pos(_|$)",  # pos, pos_ids, and not positives
    "(label|target)(?!.*_in)",  # lm_labels, and not target_in, which a decoder reads
    "gold|(^|_)(y|tags?|outs?|outputs?)$",  # tgt_out
)
HAS_NO_IDS = re.compile("|".join(NAMES_WITHOUT_IDS), re.IGNORECASE)
CONNECTS_NODES = re.compile("(^|_)(edge|adj)", re.IGNORECASE)  # the same in graphs, whose nodes are no samples
FABRIC = ("lightning.fabric", "lightning_fabric")  # Lightning's package for loops of one's own


class Signature:
    """What a module takes, by which the ids of a text are told from its other arguments.

    weight: its first parameter. names: of its arguments by position. embeddings: how many it has.
    has_vocabulary: whether a layer has as many outputs as the embedding has rows. Without such a layer ids in one
    dimension are users or products. labels: the names of texts that are another one's labels, or None before a call had
    two texts.

    Of its last call: shapes, [(name, shape, dtype)] of its tensors; batch, its Batch; and place, where its largest text
    stands among the tensors.
    """

    def __init__(self, module, weight):
        parts = modules_of(module)
        self.weight = weight
        self.names = names_of_arguments(parts)
        self.embeddings = sum(isinstance(part, nn.Embedding) for part in parts)
        self.has_vocabulary = vocabulary_of(parts) is not None
        self.labels = None
        # of the last call
        self.shapes = self.batch = None
        self.place = 0

    def read(self, args, kwargs):
        """Return what a call with these arguments reads, as (tensor, Batch, whether a tensor has a history).

        tensor: its largest text or first tensor, by which its input is known again; None without one.
        """
        tensors = named_tensors(enumerate(args))
        if kwargs:
            tensors += named_tensors(kwargs.items())
        if not tensors:
            return None, Batch(), False
        is_computed = any(tensor.grad_fn is not None for _, tensor in tensors)
        if any(tensor.is_nested or pytorch.hides_a_dimension(tensor) for _, tensor in tensors):  # its shape is not all
            return tensors[0][1], Batch(), is_computed
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
        if shapes != self.shapes:  # else all is as in the last call: a module may be called a thousand times in a step
            self.batch, self.place = self.batch_of([(self.name_of(name), tensor) for name, tensor in tensors])
            self.shapes = shapes
        return tensors[self.place][1], self.batch, is_computed

    def name_of(self, name):
        """Return the name of an argument that was passed by name, or by position."""
        if isinstance(name, int):
            return self.names[name] if name < len(self.names) else ""  # of a *args
        return str(name)

    def is_text(self, name, tensor):
        """Return whether an argument has the ids of a text, by its name, dtype and dimensions."""
        if not is_whole(tensor) or HAS_NO_IDS.search(name) or CONNECTS_NODES.search(name):
            return False
        if tensor.dim() == 1:
            return self.has_vocabulary
        if tensor.dim() == 2:  # a table has an embedding for each of its columns
            return self.has_vocabulary or self.embeddings not in (0, tensor.shape[1])
        return False

    def batch_of(self, tensors):
        """Return the Batch of named tensors, and the place of the largest text; 0 without one."""
        named_texts = [(name, tensor) for name, tensor in tensors if self.is_text(name, tensor)]
        if self.labels is None and len(named_texts) > 1 and not is_captured():  # once, since it waits for a card
            self.labels = names_of_labels(named_texts)
        texts = [tensor for name, tensor in named_texts if name not in (self.labels or ())]
        if texts:
            largest = max(texts, key=torch.Tensor.numel)
            is_largest = [tensor is largest for _, tensor in tensors]
            batch_size = largest.shape[0] if largest.dim() == 2 else 1
            count = sum(text.numel() for text in texts)
            return Batch("tok", batch_size, largest.shape[-1], count), is_largest.index(True)
        return batch_of_samples(tensors), 0


def batch_of_samples(tensors):
    """Return the Batch of named tensors without a text: samples if all agree in their first dimension, else a step."""
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
        weight = next(parameters_in(module), None)
        if weight is None or weight.is_meta:  # to_empty() replaces the latter
            return None
        signature = SIGNATURES[module] = Signature(module, weight)
    return signature


def parameters_in(module, recurse=True):
    """Yield the parameters of a module. Keras makes new ones if its own named_parameters() is called."""
    for _, parameter in nn.Module.named_parameters(module, recurse=recurse):
        yield parameter


def modules_of(module):
    """Return a module and all modules in it, a list. A script's own class may have a `modules` of another meaning."""
    return list(nn.Module.modules(module))


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
    """Return the names of texts that are another one, shifted by one place: a model learns to predict these.

    texts: pairs of a name and a tensor.
    """
    labels = set()
    for (_, text), (name, label) in permutations(texts, 2):
        is_alike = text.shape == label.shape and text.device == label.device and not torch.equal(text, label)
        if is_alike and text.shape[-1] > 1 and torch.equal(text[..., 1:], label[..., :-1]):
            labels.add(name)
    return labels


def is_whole(tensor):
    """Return whether a tensor holds whole numbers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def named_tensors(pairs, around=()):
    """Return [(name, tensor)] of pairs of a name and a value, also of those inside of lists, tuples and dicts.

    around: the ids of these, since one may contain itself.
    """
    tensors = []
    for name, value in pairs:
        if isinstance(value, torch.Tensor):
            tensors.append((name, value))
        elif id(value) in around:
            continue
        elif isinstance(value, Mapping):
            tensors += named_tensors(value.items(), (*around, id(value)))
        elif isinstance(value, (list, tuple)):
            tensors += named_tensors(((name, each) for each in value), (*around, id(value)))
    return tensors


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
