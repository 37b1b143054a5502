"""What --profile shows: where the time of a step went, in parts, beside what arithmetic predicts for each."""

from harness.arithmetic import Work
from harness.watch.stepprofile import StepProfile, part_of, predicted_ms

import re
from types import SimpleNamespace

import pytest
import torch
from conftest import FLOAT32, STAGE_FILES, WATCH, python
from fixtures.records import GPT2
from torch.autograd import DeviceType

RATES = {"peak": {"float32": 1e11}, "copy": 1e10}


def test_profile_shows_the_last_step_in_parts_beside_their_predictions():
    run = python(WATCH, "--steps", "5", "--profile", STAGE_FILES["s01"], *FLOAT32)
    assert " for 5 steps\n" in run.out and " after 5 steps" in run.err
    for part in ("matmuls", "attention", "softmax and mask", "pointwise", "loss", "optimizer", "other"):
        assert re.search(rf"\d +(\d+\.\d\d)? *{part}\n", run.out), part
    # in one step's backward two for each of 8 linear layers, and for the last matrix three in all
    assert re.search(r"\d ms in +19 x aten::mm\n", run.out)


@pytest.mark.parametrize(
    "operation, part",
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::fill_ < aten::zero_ < aten::nll_loss_backward", "loss"),
        ("aten::copy_ < aten::clone < aten::masked_fill", "softmax and mask"),
        ("aten::div < Optimizer.step#AdamW.step", "optimizer"),
        ("aten::add_ < torch::autograd::AccumulateGrad < autograd::engine::evaluate_function", "optimizer"),
        ("aten::mm < ## Call CompiledFxGraph fgg3hb ## < CompiledFunction", "matmuls"),
        ("aten::empty < ## Call CompiledFxGraph fgg3hb ##", "fused kernels"),
    ],
)
def test_the_outermost_caller_that_has_a_part_decides(operation, part):
    assert part_of(operation.split(" < ")) == part


def event(name, cpu_us=0, device_us=0, device_type=DeviceType.CPU):
    """An event of torch.profiler."""
    times = dict(self_cpu_time_total=cpu_us, self_device_time_total=device_us)
    return SimpleNamespace(name=name, cpu_parent=None, device_type=device_type, is_user_annotation=False, **times)


KERNEL = event("sm90_gemm", device_us=4_000, device_type=DeviceType.CUDA)


def test_on_a_card_its_own_time_of_each_operation_counts_once():
    add, mm = event("aten::add", 9_000, 1_000), event("aten::mm", 10, 2_000)
    profile = StepProfile([add, KERNEL, mm, mm], torch.device("cuda"), step_ms=6.0)
    assert profile.ms == {"aten::add": 1.0, "aten::mm": 4.0}
    assert profile.calls == {"aten::add": 1, "aten::mm": 2}
    assert profile.parts == {"pointwise": 1.0, "matmuls": 4.0, "other": 1.0}


def test_fused_kernels_take_the_parts_that_a_compiler_merges():
    operations = {"aten::mm": 90_000, "triton_red": 30_000, "aten::gelu": 3_000, "aten::nll_loss_forward": 2_000}
    events = [event(name, cpu_us) for name, cpu_us in operations.items()]
    predicted = {"matmuls": 80.0, "softmax and mask": 15.0, "pointwise": 11.0, "loss": 4.5}
    assert StepProfile(events, torch.device("cpu"), step_ms=126.0).lines(predicted)[-4:] == [
        "   126.00    110.50 the step",
        "    90.00     80.00 matmuls",
        "    35.00     30.50 fused kernels",
        "     1.00           other",
    ]


@pytest.mark.parametrize("accum, ms", [(1, 7589.81), (2, 15179.62)])
def test_a_step_should_take_the_time_of_all_its_micro_batches(accum, ms):
    """By hand: 1024 tokens x 741,192,192 FLOP at 0.1 TFLOP/s, and twice that."""
    assert predicted_ms(Work(GPT2, 1, accum=accum), RATES)["matmuls"] == pytest.approx(ms)
