"""The arithmetic of a step against what torch counts: FLOPs, passes over memory, and sums made by hand."""

from harness import arithmetic, fit, ladder
from harness.arithmetic import Work
from harness.seen import Seen

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, attention_of
from fixtures.records import A100, GPT2, SEEN, shown_by
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, SIZES, VOCAB, GPTConfig

PAGE = (ROOT / "stages" / "arithmetic.md").read_text("utf-8")
# a small model of which no two kinds of tensors have as many numbers
B, T = 2, 80
L, N_HEAD, C = 2, 4, 64
V = 5003
SHAPE = {"vocab_size": V, "n_layer": L, "n_head": N_HEAD, "n_embd": C, "seq_len": T}
DATASHEET_OF_A100 = {"peak": {"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12}, "copy": 2.039e12}
VIEWS = ("aten::_unsafe_view", "aten::detach", "aten::alias")
ONLY_WRITES = ("aten::fill_", "aten::zero_", "aten::copy_", "aten::nll_loss_backward")


# FLOPs and weights


@pytest.mark.parametrize("size, seq_len", [("tiny", 64), ("mini", 64), ("tiny", 24)])
def test_flops_per_token_are_what_torch_counts_in_s01s_model(size, seq_len):
    x = torch.zeros(1, seq_len, dtype=torch.long)
    model = GPT(GPTConfig(block_size=seq_len, **SIZES[size]), attention_of("s01"))
    with FlopCounterMode(display=False) as counter:
        model(x, x).backward()
    shape = {"vocab_size": VOCAB, "seq_len": seq_len, **SIZES[size]}
    assert counter.get_total_flops() == seq_len * arithmetic.flops_per_token(shape)


# Memory


# GB that the tensors of s01 and of s03 hold at most, counted with FakeTensorMode over two steps and their updates
HELD = [("gpt2", 16, 1024, 30.82, 31.64), ("gpt2", 1, 1024, 3.34, 3.62), ("gpt2", 4, 2048, 21.04, 23.99)]
HELD += [("gpt2", 1, 4096, 16.30, 20.31), ("gpt2-large", 1, 256, 15.46, 15.46)]


@pytest.mark.parametrize("size, batch_size, seq_len, s01, s03", HELD)
def test_the_memory_needed_is_what_the_larger_of_s01_and_s03_holds(size, batch_size, seq_len, s01, s03):
    assert fit.memory_needed(size, seq_len, batch_size) / 1e9 == pytest.approx(max(s01, s03), rel=0.011)


# Passes over memory of the eager stages


class Traffic(TorchDispatchMode):
    """Adds up the bytes that operations read and write. moved: {(operation, numbers in its largest tensor): bytes}."""

    def __init__(self):
        super().__init__()
        self.moved = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        name = operation.name().split(".")[0]
        if operation.is_view or name in VIEWS:
            return result
        read = {} if name in ONLY_WRITES else tensors_in((args, kwargs))
        written = tensors_in(result)
        tensors = [*read.values(), *written.values()]
        largest = max((tensor.numel() for tensor in tensors), default=0)
        for tensor in tensors:
            self.moved[name, largest] += tensor.nbytes
        return result

    def of(self, numbers, *names):
        """Return the bytes that the operations of these names moved when their largest tensor had so many numbers."""
        return sum(self.moved[f"aten::{name}", numbers] for name in names)


def tensors_in(arguments):
    """Return {id: tensor} of all tensors in arguments or results. An operation reads each of them once."""
    return {id(leaf): leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_over_each_tensor_are_those_that_torch_makes(dtype):
    """In a step of s01's model, and of s03's, on a CPU and without the optimizer."""
    model = GPT(GPTConfig(V, T, L, N_HEAD, C), attention_of("s01"))
    x = torch.zeros(B, T, dtype=torch.long)
    with Traffic() as traffic:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(x, x)
        loss.backward()
    moved = arithmetic.bytes_moved(Work(SHAPE, B, matmul_dtype=dtype))

    scores = B * N_HEAD * T * T  # of a layer
    softmax_and_mask = traffic.of(scores, "div", "_softmax", "_softmax_backward_data", "_to_copy")
    softmax_and_mask += 2 * traffic.of(scores, "masked_fill")  # it copies its input, and fills the copy
    assert softmax_and_mask == pytest.approx(moved["scores"], rel=0.02)

    loss = traffic.of(B * T * V, "_log_softmax", "_log_softmax_backward_data", "nll_loss_backward", "_to_copy")
    assert loss == pytest.approx(moved["logits"], rel=0.02)

    residual = traffic.of(B * T * C, "add", "native_layer_norm", "native_layer_norm_backward", "_to_copy")
    residual += 12 * B * T * C  # the last LayerNorm's gradient is added to nothing: one in 2 L + 1, and counted
    assert residual == pytest.approx(moved["residual"], rel=0.02)

    assert traffic.of(B * T * 4 * C, "gelu", "gelu_backward") == moved["gelu"]

    projections = traffic.of(B * T * C, "clone", "sum") + traffic.of(B * T * 3 * C, "cat", "sum")
    projections += traffic.of(B * T * 4 * C, "sum")
    projections -= 4 * B * T * C  # the gradient of the positions, a sum over the batch, is not counted
    assert projections == pytest.approx(moved["projections"], rel=0.03)

    casts = sum(traffic.of(weight, "_to_copy") for weight in (V * C, 3 * C * C, C * C, 4 * C * C))
    assert casts == moved["casts"]


# Passes of the update


def numbers_moved(act):
    """Return how many numbers of four bytes a call of act() reads and writes."""
    with Traffic() as traffic:
        act()
    return sum(traffic.moved.values()) / 4


@pytest.fixture
def trained():
    """Return a parameter of 10,000 numbers that has a gradient."""
    parameter = torch.nn.Parameter(torch.ones(10_000))
    parameter.grad = torch.ones(10_000)
    return parameter


@pytest.mark.parametrize("fused, unseen, passes", [(False, 0, arithmetic.ADAMW), (True, 3, arithmetic.FUSED_ADAMW)])
def test_passes_of_adamw_are_those_that_torch_makes(trained, fused, unseen, passes):
    """unseen: fused AdamW writes three of its four tensors in place, and returns none of them."""
    optimizer = torch.optim.AdamW([trained], fused=fused, weight_decay=0.1)
    optimizer.step()  # the moments are there from the second step on
    assert numbers_moved(optimizer.step) / trained.numel() + unseen == pytest.approx(passes, rel=0.01)


def test_clipping_passes_over_the_gradients_three_times(trained):
    moved = numbers_moved(lambda: torch.nn.utils.clip_grad_norm_([trained], 1.0))
    moved += trained.numel()  # _foreach_mul_ writes the gradients in place, and returns none
    assert moved / trained.numel() == pytest.approx(arithmetic.CLIPPING, rel=0.01)


# The counts of the page


@pytest.mark.parametrize(
    "tensor, row",
    [
        ("scores", "scores"),
        ("logits", "logits"),
        ("residual", "residual stream"),
        ("gelu", "GELU's input"),
        ("projections", "q, k, v and the projections"),
        ("casts", "weights, which are cast"),
    ],
)
def test_the_page_has_the_bytes_of_each_tensor(tensor, row):
    [line] = re.findall(rf"^\| {row} \| .*→.*", PAGE, re.MULTILINE)
    for cell, dtype in zip(line.split(" | ")[2:], ("float32", "bfloat16"), strict=True):
        counts = re.findall(r"(\d+) → (\d+)", cell)
        for (one_by_one, fused), on_cuda in ((counts[0], False), (counts[-1], True)):
            work = Work(SHAPE, B, matmul_dtype=dtype, on_cuda=on_cuda)
            assert arithmetic.bytes_per_number(tensor, work) == int(one_by_one)
            assert arithmetic.bytes_per_number(tensor, replace(work, compiled=True)) == int(fused)


# Sums made by hand, for an A100 at gpt2, B 16, T 1024


@pytest.mark.parametrize(
    "stage, part, ms",
    [
        ("s01", "matmuls", 622.8),  # 16,384 tokens x 741.2 MFLOP / 19.5 TFLOP/s
        ("s03", "matmuls", 38.9),  # / 312
        ("s01", "attention", 95.1),  # 12 x 12 layers x 16 x 1024^2 x 768 FLOP / 19.5 TFLOP/s
        ("s03", "attention", 14.2),  # moving 6 x 4.83 GB takes longer than 1.86 TFLOP / 312 TFLOP/s
        ("s05", "attention", 3.47),  # 7/12 of 1.86 TFLOP / 312 TFLOP/s
        ("s01", "softmax and mask", 94.8),  # 20 passes over 2.416 G scores of 4 bytes
        # 25 of 12.58 M x 32, 12 of 50.3 M x 10, 12 of 12.58 M x 30, 123.5 M weights x 12 bytes
        ("s04", "pointwise", 10.85),
        ("s04", "loss", 2.42),  # 6 bytes for each of 823.4 M logits
        ("s07", "optimizer", 5.61),  # 23 numbers for each of 124.3 million parameters
        ("s10", "optimizer", 2.44),  # 10
        ("s11", "optimizer", 1.16),  # (10 + 3 x 3) / 4
        ("s12", "optimizer", 1.40),  # (14 + 3 x 3) / 4
    ],
)
def test_a_part_takes_what_the_sum_by_hand_says(stage, part, ms):
    fields = SEEN | shown_by(ladder.stage_of(stage), environment=A100, accum=4) | {"shape": GPT2, "batch_size": 16}
    parts = arithmetic.seconds_of_parts(Seen(**fields).work, DATASHEET_OF_A100)
    assert 1e3 * parts[part] == pytest.approx(ms, rel=0.005)
