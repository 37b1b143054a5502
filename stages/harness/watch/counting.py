"""What a call of a module reads: how many tokens or samples."""

import contextlib
import dataclasses
import inspect
import re
import weakref
from collections.abc import Mapping
from itertools import permutations
from typing import NamedTuple

import torch
from torch import nn

from . import pytorch
from .events import Batch
from .modules import modules_of, parameters_in, vocabulary_of
from .timeline import is_captured

# Names of arguments that have integers, but no ids which the model reads
NAMES_WITHOUT_IDS = (
    "mask(?!ed)|position|type|segment|is_next",  # attention_mask, position_ids, token_type_ids, and not masked_ids
    "length|seqlen|offset|batch_sizes|sorted_indices",  # cu_seqlens; the last two are in packed sequences
    "(^|[_.])pos(_|$)",  # pos, pos_ids, and not positives
    "(label|target)(?!.*_in)",  # lm_labels, and not target_in, which a decoder reads
    r"gold|(^|[_.])(y|tags?|outs?|outputs?)(\.|$)",  # tgt_out
)
HAS_NO_IDS = re.compile("|".join(NAMES_WITHOUT_IDS), re.IGNORECASE)
CONNECTS_NODES = re.compile("(^|[_.])(edge|adj)", re.IGNORECASE)  # of a graph, whose rows are nodes and no samples
IDS = (torch.int64, torch.int32)  # the dtypes that nn.Embedding takes


class Reading(NamedTuple):
    """What a call of a module reads.

    tensor: its largest text or first tensor, by which its input is known again; None without one. is_computed: whether
    one of its tensors has a history.
    """

    tensor: torch.Tensor | None
    batch: Batch
    is_computed: bool


class Signature:
    """What a module takes, by which the ids of a text are told from its other arguments.

    weight: its first parameter that is trained, or the first. names: of its arguments by position. embeddings: how many
    it has. has_vocabulary: whether a layer has as many outputs as the embedding has rows. is_time_major: whether a
    layer reads (T, B) in place of (B, T), as nn.LSTM does by default. labels: the names of texts that are labels or
    masks of others, or None before a call had two texts.

    last_shapes: [(name, shape, dtype)] of the tensors in its last call. last_place: where its largest text stood among
    them. last_batch: its Batch.
    """

    def __init__(self, module, weight):
        parts = modules_of(module)
        self.weight = weight
        self.names = names_of_arguments(parts)
        self.embeddings = sum(isinstance(part, nn.Embedding) for part in parts)
        self.has_vocabulary = vocabulary_of(parts) is not None
        self.is_time_major = any(getattr(part, "batch_first", None) is False for part in parts)
        self.labels = None
        self.last_shapes = self.last_place = self.last_batch = None

    def read(self, args, kwargs):
        """Return the Reading of a call with these arguments."""
        names = [*self.names, *range(len(self.names), len(args))]  # the last ones are of a *args
        tensors = named_tensors([*zip(names, args, strict=False), *kwargs.items()])
        if not tensors:
            return Reading(None, Batch(), is_computed=False)
        is_computed = any(tensor.grad_fn is not None for _, tensor in tensors)
        if any(tensor.is_nested or pytorch.hides_a_dimension(tensor) for _, tensor in tensors):  # its shape is not all
            return Reading(tensors[0][1], Batch(), is_computed)
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
        if shapes != self.last_shapes:  # else all is as it was: a module may be called a thousand times in a step
            self.last_place, self.last_batch = self.largest_text_and_batch(tensors)
            self.last_shapes = shapes
        return Reading(tensors[self.last_place][1], self.last_batch, is_computed)

    def largest_text_and_batch(self, tensors):
        """Return where the largest text stands among named tensors, 0 without one, and their Batch."""
        texts = self.texts_among(tensors)
        if not texts:
            return 0, self.batch_of_samples(tensors)
        place = max(texts, key=lambda each: texts[each].numel())
        shape = texts[place].shape
        count = sum(text.numel() for text in texts.values())
        if self.is_time_major:  # then nobody knows which dimension is which
            return place, Batch("tok", count=count)
        if len(shape) == 1:
            return place, Batch("tok", 1, shape[0], count)
        return place, Batch("tok", *shape, count)

    def texts_among(self, tensors):
        """Return {place among named tensors: tensor} of the texts that a model reads."""
        named_texts = {place: named for place, named in enumerate(tensors) if self.is_text(*named)}
        if self.labels is None and len(named_texts) > 1 and not is_captured():  # once, since it waits for a card
            self.labels = names_of_labels(named_texts.values())
        texts = {place: text for place, (name, text) in named_texts.items() if name not in (self.labels or ())}
        matrices = {place: text for place, text in texts.items() if text.dim() == 2}
        return matrices or texts  # beside (B, T) what has (B,) are lengths

    def is_text(self, name, tensor):
        """Return whether an argument has the ids of a text, by its name, dtype and dimensions."""
        if tensor.dtype not in IDS or HAS_NO_IDS.search(name) or CONNECTS_NODES.search(name):
            return False
        if tensor.dim() == 1:
            return self.has_vocabulary  # without such a layer these are users or products
        if tensor.dim() != 2 or tensor.numel() == 0:
            return False
        is_table = self.embeddings % tensor.shape[1] == 0  # of categories: as many embeddings for each column
        return self.has_vocabulary or (self.embeddings > 0 and not is_table)

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


def names_of_labels(texts):
    """Return the names of texts that no model reads, a set: labels and masks of another one.

    texts: pairs of a name and a tensor.
    """
    return {name for (_, text), (name, other) in permutations(texts, 2) if is_label_or_mask(other, text)}


def is_label_or_mask(ids, text):
    """Return whether ids are a label or a mask of a text, by the values of both.

    A label is the text, shifted by one place, or has numbers below 0, which are not predicted. A mask has no number
    above 1.
    """
    if ids.shape != text.shape or ids.device != text.device or ids.shape[-1] < 2 or torch.equal(ids, text):
        return False
    is_shifted = torch.equal(text[..., 1:], ids[..., :-1])
    is_mask = ids.max() <= 1 < text.max()
    return bool(is_shifted or is_mask or ids.min() < 0)


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
        parts = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        parts = zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    else:
        parts = []
    return [(f"{name}.{key}", part) for key, part in parts]
