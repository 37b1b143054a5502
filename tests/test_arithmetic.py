"""The arithmetic of a step against what torch counts: FLOPs, passes over memory, and sums made by hand."""

from harness import arithmetic, ladder
from harness.arithmetic import Rates, Work

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import definitions
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from model import GPT, GPTConfig

# a small model of which no two kinds of tensors have as many numbers
B, T = 2, 80
L, N_HEAD, C = 2, 4, 64
V = 5003
SHAPE = {"vocab_size": V, "n_layer": L, "n_head": N_HEAD, "n_embd": C}
GPT2 = {"vocab_size": 50257, "n_layer": 12, "n_head": 12, "n_embd": 768}
A100 = Rates({"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12}, copy=2.039e12)  # its datasheet
ON_A100 = ladder.Facts(
    environment={"tf32": True, "device": "cuda"},
    settings={"amp_dtype": "bfloat16", "compile": True, "accum": 4, "world_size": 1, "batch_size": 16, "seq_len": 1024},
    fallbacks={},
)
VIEWS = ("aten::_unsafe_view", "aten::detach", "aten::alias")
ONLY_WRITES = ("aten::fill_", "aten::zero_", "aten::copy_", "aten::nll_loss_backward")


class Traffic(TorchDispatchMode):
    """Adds up the bytes that each operation reads and writes: moved[operation, numbers of its largest tensor]."""

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
        largest = max((tensor.numel() for tensor in [*read.values(), *written.values()]), default=0)
        for tensor in [*read.values(), *written.values()]:
            self.moved[name, largest] += tensor.nbytes
        return result

    def of(self, numbers, *names):
        """The bytes that these operations moved, where their largest tensor has so many numbers."""
        return sum(self.moved[f"aten::{name}", numbers] for name in names)


def tensors_in(arguments):
    """{id: tensor} of all tensors in arguments or results; an operation reads one only once."""
    return {id(leaf): leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def eager(request):
    """(Work, Traffic) of a step of the eager stages on a CPU, without the optimizer: s01's model, and s03's."""
    dtype = request.param
    attention = definitions("s01", "attention", torch=torch, math=math, F=F)["attention"]
    model = GPT(GPTConfig(vocab_size=V, block_size=T, n_layer=L, n_head=N_HEAD, n_embd=C), attention)
    x = torch.zeros(B, T, dtype=torch.long)
    with Traffic() as traffic:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(x, x)
        loss.backward()
    return Work(SHAPE, B, T, matmul_dtype=dtype, amp_dtype=dtype), traffic


def test_passes_over_the_scores_are_those_that_torch_makes(eager):
    work, traffic = eager
    one_layer = B * N_HEAD * T * T
    moved = traffic.of(one_layer, "div", "_softmax", "_softmax_backward_data", "_to_copy")
    moved += 2 * traffic.of(one_layer, "masked_fill")  # once for each of the two operations that it consists of
    counted = L * one_layer * arithmetic.bytes_of(arithmetic.EAGER_SCORES, work)
    assert arithmetic.scores(work) == L * one_layer
    assert moved == pytest.approx(counted, rel=0.1)


def test_a_mask_copies_its_input_and_fills_the_copy():
    scores = torch.zeros(8, 8)
    future = torch.ones(8, 8, dtype=torch.bool)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        scores.masked_fill(future, -math.inf)
    names = [event.name for event in profiler.events()]
    assert names.count("aten::copy_") == 1
    assert names.count("aten::masked_fill_") == 1


def test_passes_over_the_logits_are_those_that_torch_makes(eager):
    work, traffic = eager
    names = ("_log_softmax", "_log_softmax_backward_data", "nll_loss_backward", "_to_copy")
    assert traffic.of(B * T * V, *names) == pytest.approx(arithmetic.loss_bytes(work), rel=0.1)


def test_passes_between_the_matmuls_are_those_that_torch_makes(eager):
    work, traffic = eager
    counted = traffic.of(B * T * C, "add", "native_layer_norm", "native_layer_norm_backward", "_to_copy")
    counted += traffic.of(B * T * 4 * C, "gelu", "gelu_backward")
    for weight in (V * C, 3 * C * C, C * C, 4 * C * C):  # the embedding, c_attn, attention's c_proj, the MLP's two
        counted += traffic.of(weight, "_to_copy")
    assert counted == pytest.approx(arithmetic.pointwise_bytes(work), rel=0.1)


def traffic_of(act):
    """The numbers of four bytes that act() reads and writes."""
    with Traffic() as traffic:
        act()
    return sum(traffic.moved.values()) / 4


@pytest.fixture
def trained():
    """A parameter of 10,000 numbers, with a gradient."""
    parameter = torch.nn.Parameter(torch.ones(10_000))
    parameter.grad = torch.ones(10_000)
    return parameter


@pytest.mark.parametrize("fused, passes", [(False, 20), (True, 7)])
def test_passes_of_adamw_are_those_that_torch_makes(trained, fused, passes):
    optimizer = torch.optim.AdamW([trained], fused=fused, weight_decay=0.1)
    optimizer.step()  # the moments are there from the second step on
    traffic = traffic_of(optimizer.step)
    if fused:  # the kernel writes three of the four tensors that it gets, and returns none
        traffic += 3 * trained.numel()
    assert traffic / trained.numel() == pytest.approx(passes, rel=0.01)
    assert passes == (arithmetic.UPDATE_IN_ONE_KERNEL if fused else arithmetic.UPDATE_IN_SINGLE_OPERATIONS)


def test_clipping_passes_over_the_gradients_three_times(trained):
    traffic = traffic_of(lambda: torch.nn.utils.clip_grad_norm_([trained], 1.0))
    traffic += trained.numel()  # _foreach_mul_ writes the gradients in place, and returns none
    assert traffic / trained.numel() == pytest.approx(arithmetic.CLIPPING, rel=0.01)


def test_a_second_micro_batch_adds_its_gradients_in_three_passes(trained):
    one_gradient = torch.ones(10_000)
    with Traffic() as traffic:
        trained.backward(one_gradient)
    assert traffic.of(10_000, "add_") / 4 / 10_000 == arithmetic.ADDING_A_GRADIENT


def test_flash_attention_has_seven_matmuls_of_half_the_scores():
    """torch counts two in the forward and five in the backward, each with the scores that lie in the future."""
    shape = (B, N_HEAD, T, C // N_HEAD)
    with_the_future = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    assert with_the_future / 2 == arithmetic.FLASH_ATTENTION_FLOPS * B * T**2 * C


# sums made by hand, for an A100 at gpt2, B 16, T 1024


def ms_on_a100(stage, part):
    """The ms that a part of a stage should take on an A100."""
    work = ladder.work_of(stage, ON_A100, GPT2)
    return 1e3 * arithmetic.seconds_of_parts(work, A100)[part]


@pytest.mark.parametrize(
    "stage, part, ms",
    [
        ("s01_baseline", "matmuls", 622.8),  # 16,384 tokens x 741.2 MFLOP / 19.5 TFLOP/s
        ("s02_tf32", "matmuls", 77.8),  # / 156
        ("s03_bf16", "matmuls", 38.9),  # / 312
        ("s01_baseline", "attention", 95.1),  # 12 x 12 layers x 16 x 1024^2 x 768 FLOP / 19.5 TFLOP/s
        ("s03_bf16", "attention", 14.2),  # moving 6 x 4.83 GB takes longer than 1.86 TFLOP / 312 TFLOP/s
        ("s05_flash", "attention", 3.47),  # 7/12 of 1.86 TFLOP / 312 TFLOP/s
        ("s01_baseline", "softmax and mask", 80.6),  # 17 passes over 2.416 G scores of 4 bytes
        ("s03_bf16", "softmax and mask", 80.6),  # 68 bytes for each of them
        ("s04_compile", "softmax and mask", 11.8),  # 10 bytes
        ("s05_flash", "softmax and mask", 0.0),
        ("s01_baseline", "loss", 9.69),  # 6 passes over 823.4 M logits of 4 bytes
        ("s03_bf16", "loss", 14.54),  # 36 bytes for each of them
        ("s04_compile", "loss", 2.42),  # 6 bytes
        ("s01_baseline", "optimizer", 4.88),  # 20 numbers for each of 124.3 million parameters
        ("s07_clip", "optimizer", 5.61),  # 23
        ("s10_fused", "optimizer", 2.44),  # 10
        ("s11_accum", "optimizer", 1.16),  # (10 + 3 x 3) / 4
        ("s12_ddp", "optimizer", 1.40),  # (14 + 3 x 3) / 4
    ],
)
def test_a_part_takes_what_the_sum_by_hand_says(stage, part, ms):
    assert ms_on_a100(stage, part) == pytest.approx(ms, rel=0.005)


def test_each_technique_changes_the_parts_that_it_is_about():
    changed = {}
    before = None
    for stage in ladder.STAGES:
        parts = arithmetic.seconds_of_parts(ladder.work_of(stage.name, ON_A100, GPT2), A100)
        if before:
            changed[stage.short] = {part for part in parts if parts[part] != before[part]}
        before = parts
    assert changed == {
        "s02": {"matmuls", "attention"},
        "s03": {"matmuls", "attention", "pointwise", "loss"},  # a score takes 68 bytes on CUDA, as in float32
        "s04": {"softmax and mask", "pointwise", "loss"},
        "s05": {"attention", "softmax and mask"},
        "s06": set(),
        "s07": {"optimizer"},
        "s08": set(),
        "s09": set(),
        "s10": {"optimizer"},
        "s11": {"optimizer"},
        "s12": {"optimizer"},
    }


def test_a_cpu_without_16_bits_and_without_a_compiler_has_no_use_for_three_stages():
    settings = ON_A100.settings | {"amp_dtype": "float32", "compile": False}
    facts = replace(ON_A100, environment={"tf32": False, "device": "cpu"}, settings=settings)
    s01 = ladder.work_of("s01_baseline", facts, GPT2)
    for stage in ("s02_tf32", "s03_bf16", "s04_compile"):
        assert ladder.work_of(stage, facts, GPT2) == s01


def test_a_cpu_computes_the_softmax_in_16_bits_and_cuda_in_float32():
    on_cpu = replace(ON_A100, environment={"tf32": False, "device": "cpu"})
    scores_on_cpu = arithmetic.bytes_of(arithmetic.EAGER_SCORES, ladder.work_of("s03_bf16", on_cpu, GPT2))
    scores_on_cuda = arithmetic.bytes_of(arithmetic.EAGER_SCORES, ladder.work_of("s03_bf16", ON_A100, GPT2))
    assert scores_on_cpu == 17 * 2
    assert scores_on_cuda == 16 * 2 + 9 * 4


def test_float16_unscales_its_gradients():
    work = Work(SHAPE, B, T, amp_dtype="float16")
    assert arithmetic.optimizer_bytes(work) == arithmetic.weight_bytes(SHAPE, T) * (20 + 2)


def test_ranks_divide_the_micro_batches():
    facts = replace(ON_A100, settings=ON_A100.settings | {"world_size": 2})
    assert ladder.work_of("s12_ddp", facts, GPT2).accum == 2


def test_a_script_that_is_no_stage_has_no_work():
    assert ladder.work_of("mine", ON_A100, GPT2) is None


@pytest.mark.parametrize(
    "name, base, known",
    [
        ("s05_flash", "s04_compile", True),
        ("s05_flash", "s01_baseline", True),
        ("s06_vocab", "s05_flash", False),  # what a padded matmul gains, only a trial tells
        ("s07_clip", "s05_flash", False),
        ("s07_clip", "s06_vocab", True),
        ("s05_flash", "s05_flash", False),
        ("s01_baseline", ladder.PLAIN, False),
        ("mine", "s01_baseline", False),
    ],
)
def test_stages_with_s06_between_them_are_not_predictable(name, base, known):
    assert ladder.is_predictable_against(name, base) is known
