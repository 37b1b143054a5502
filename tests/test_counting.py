"""What a call of a module reads: tokens or samples, and how many. And by what a loss was scaled."""

from harness.figures import words_on_speed
from harness.watch.counting import Signature, names_of_labels
from harness.watch.events import Batch
from harness.watch.losses import share_of
from harness.watch.modules import unwrapped

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.func import vmap

LONG_TEXT = torch.arange(36).view(4, 9)
TEXT, NEXT = LONG_TEXT[:, :-1], LONG_TEXT[:, 1:]
OTHER = LONG_TEXT.flip(1)
VECTORS = torch.rand(5, 3)
LANGUAGE_MODEL = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
LINEAR = nn.Linear(3, 1)


@dataclass
class Inputs:
    ids: torch.Tensor
    cache: object = field(init=False)  # which nobody has set yet


def batch_of(module, **inputs):
    return Signature(module, next(module.parameters())).read((), inputs).batch


@pytest.mark.parametrize(
    "inputs, count",
    [
        ({"src": OTHER, "trg_input": TEXT, "trg": NEXT}, 36 + 32),
        ({"src": OTHER, "trg": TEXT}, 36 + 32),  # a decoder must read something
        ({"source": OTHER, "target_in": LONG_TEXT, "target_out": OTHER}, 2 * 36),
        ({"src": OTHER, "prev_output_tokens": TEXT, "tgt": NEXT}, 36 + 32),
        ({"encoder_inputs": OTHER, "decoder_inputs": OTHER, "decoder_targets": OTHER}, 2 * 36),
        ({"words": OTHER, "tags": LONG_TEXT}, 36),
        ({"x": TEXT, "after": NEXT}, 32),  # by its values
        ({"anchors": OTHER, "positives": LONG_TEXT}, 2 * 36),
        ({"masked_ids": OTHER, "input_mask": OTHER}, 36),
        ({"x": OTHER, "sizes": torch.full((4,), 9)}, 36),
        ({"x": nn.utils.rnn.pack_padded_sequence(OTHER, [9, 5, 3, 2], batch_first=True)}, 19),
        ({"batch": (OTHER, OTHER.masked_fill(OTHER < 20, -100))}, 36),  # only what is masked is predicted
        ({"x": OTHER, "valid": (OTHER > 5).long()}, 36),
        ({"batch": {"input_ids": TEXT, "attention_mask": TEXT}}, 32),
        ({"inputs": {"ids": OTHER}, "targets": {"ids": LONG_TEXT}}, 36),
        ({"inputs": Inputs(OTHER)}, 36),
    ],
)
def test_labels_are_no_text_that_a_model_reads(inputs, count):
    assert batch_of(LANGUAGE_MODEL, **inputs).count == count


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = LANGUAGE_MODEL

    def forward(self, labels, input_ids):
        """Only its signature is read."""


def test_arguments_by_position_have_their_names_also_in_a_wrapper():
    wrapper = nn.Sequential(Text())
    wrapper.forward = lambda *args, **kwargs: None
    assert Signature(wrapper, LINEAR.weight).read((LONG_TEXT, TEXT), {}).batch.count == 32


def test_one_dimension_is_a_text_of_a_language_model_and_else_no_batch():
    assert batch_of(LANGUAGE_MODEL, x=TEXT[0]) == Batch("tok", 1, 8, 8)
    assert batch_of(LINEAR, x=VECTORS[0]) == Batch()


def test_a_layer_that_may_read_time_first_leaves_open_which_is_the_batch():
    assert batch_of(nn.LSTM(3, 4), input=torch.rand(50, 8, 3)) == Batch()
    assert batch_of(nn.Sequential(LANGUAGE_MODEL, nn.LSTM(3, 4)), input=LONG_TEXT) == Batch("tok", None, None, 36)


def test_bytes_and_sparse_rows_are_neither_text_nor_samples():
    assert batch_of(nn.Sequential(nn.Embedding(5, 4)), x=torch.zeros(4, 9, dtype=torch.uint8)) == Batch()
    assert batch_of(LINEAR, x=torch.eye(3).to_sparse_csr(), y=torch.rand(3, 3)) == Batch()


def test_users_and_items_of_one_column_are_no_labels():
    user, item = torch.tensor([[1], [2]]), torch.tensor([[3], [4]])
    assert names_of_labels([("user", user), ("item", item)]) == set()


def test_a_call_tells_whether_its_input_was_computed():
    signature = Signature(LINEAR, LINEAR.weight)
    trained = torch.rand(5, 3, requires_grad=True)
    readings = [signature.read((x,), {}) for x in (VECTORS, trained, 2 * trained)]
    assert [reading.is_computed for reading in readings] == [False, False, True]


def test_a_share_is_read_from_what_scaled_the_loss_last():
    loss = LINEAR(VECTORS).sum()
    shares = [share_of(each.grad_fn) for each in (loss / 4, 0.5 * loss, loss)]
    assert shares == [(0.25, "SumBackward0"), (0.5, "SumBackward0"), None]


class FabricModule(nn.Module):
    __module__ = "lightning.fabric.wrappers"

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_what_is_compiled_and_named_is_inside_of_the_wrapper_of_fabric():
    """A compiled wrapper ends in a RecursionError."""
    net = nn.Linear(2, 2)
    assert unwrapped(FabricModule(net)) is net


def test_below_vmap_a_step_is_a_step():
    batches = []
    vmap(lambda x: batches.append(batch_of(LINEAR, x=x)) or x)(torch.rand(4, 5, 3))
    assert batches == [Batch()]


def test_a_speed_has_digits_that_say_something():
    speeds = [words_on_speed(speed, "sample") for speed in (0.2105, 9.99, 12_345.6)]
    assert speeds == ["0.21 samples/sec", "10 samples/sec", "12,346 samples/sec"]


class Table(nn.Module):
    """Two columns of categories, each with two embeddings, beside columns of numbers."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(9, 4) for _ in range(4)])

    def forward(self, categories, numbers):
        """Only its signature is read."""


def test_categories_of_a_table_are_no_text():
    batch = batch_of(Table(), categories=torch.zeros(32, 2, dtype=torch.int64), numbers=torch.rand(32, 5))
    assert batch == Batch("sample", 32, None, 32)
