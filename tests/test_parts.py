"""The parts of a profiled step: which operation belongs to which, and what each should take."""

from harness import parts
from harness.arithmetic import Rates

import pytest
from fixtures.records import CPU, GPT2, header

RATES = Rates({"float32": 1e11, "bfloat16": 1e11}, copy=1e10)


@pytest.mark.parametrize(
    "operation, part",
    [
        ("aten::mm", "matmuls"),
        ("aten::addmm", "matmuls"),
        ("mkl::_mkl_linear", "matmuls"),
        ("aten::bmm", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::_flash_attention_forward", "attention"),
        ("aten::_softmax_backward_data", "softmax and mask"),
        ("aten::masked_fill_", "softmax and mask"),
        ("aten::native_layer_norm_backward", "pointwise"),
        ("aten::gelu", "pointwise"),
        ("aten::_log_softmax", "loss"),
        ("aten::nll_loss_backward", "loss"),
        ("aten::something_new", parts.REST),
    ],
)
def test_an_operation_counts_with_its_own_time(operation, part):
    assert parts.measured({operation: (30.0, 40.0, 2)}, step_ms=100) == sums(part, 30.0, rest=70.0)


@pytest.mark.parametrize("operation", ["Optimizer.step#AdamW.step", "aten::_foreach_norm", "aten::_foreach_mul_"])
def test_the_optimizer_and_clipping_count_with_all_that_they_call(operation):
    assert parts.measured({operation: (1.0, 40.0, 2)}, step_ms=100) == {"optimizer": 40.0, parts.REST: 60.0}


def test_what_the_optimizer_called_counts_once():
    profile = {"Optimizer.step#AdamW.step": (1.0, 40.0, 1), "optimizer: aten::_foreach_mul_": (30.0, 30.0, 2)}
    assert parts.measured(profile, step_ms=100) == {"optimizer": 40.0, parts.REST: 60.0}


def test_a_record_that_does_not_mark_what_adamw_called_leaves_the_doubtful_operations_to_the_rest():
    unmarked = {"Optimizer.step#AdamW.step": (1.0, 40.0, 1), "aten::div": (10.0, 10.0, 60)}
    marked = unmarked | {"optimizer: aten::div": (5.0, 5.0, 52)}
    assert parts.measured(unmarked, step_ms=100) == {"optimizer": 40.0, parts.REST: 60.0}
    assert parts.measured(marked, step_ms=100)["softmax and mask"] == 10.0


@pytest.mark.parametrize("kernel", ["## Call CompiledFxGraph fgg3hb ##", "triton_red_fused__log_softmax_0"])
def test_a_fused_kernel_takes_three_parts_with_it(kernel):
    profile = {kernel: (30.0, 40.0, 2), "aten::copy_": (5.0, 5.0, 3), "optimizer: aten::div": (1.0, 1.0, 1)}
    assert parts.measured(profile, step_ms=100) == {parts.FUSED: 35.0, parts.REST: 65.0}


def sums(part, ms, rest):
    """{part: ms} with the rest, to which the part may belong itself."""
    if part == parts.REST:
        return {parts.REST: ms + rest}
    return {part: ms, parts.REST: rest}


def run_of(stage, **settings):
    """The header of a run of a stage of gpt2 at B 1, T 1024 in float32."""
    return header(stage, CPU, GPT2, batch_size=1, seq_len=1024, amp_dtype="float32", **settings)


def test_parts_stand_beside_what_they_should_take():
    profile = {"aten::mm": (9000.0, 9000.0, 1), "aten::_log_softmax": (200.0, 200.0, 1)}
    lines = parts.table(run_of("s01_baseline", compile=False), profile, 10_000.0, RATES)
    (_, matmuls_ms, matmuls_predicted), (_, loss_ms, loss_predicted), rest, step = lines
    assert (matmuls_ms, loss_ms) == (9000.0, 200.0)
    assert matmuls_predicted == pytest.approx(7590, rel=0.001)  # 1024 x 741.2 MFLOP at 0.1 TFLOP/s
    assert loss_predicted == pytest.approx(123.5, rel=0.001)  # 6 passes over 51.46 M logits of 4 bytes at 10 GB/s
    assert rest == (parts.REST, 800.0, None)
    assert step[:2] == ("the step", 10_000.0)


def test_fused_kernels_should_take_what_softmax_pointwise_and_loss_take():
    header_of_s04 = run_of("s04_compile", compile=True)
    profile = {"## Call CompiledFxGraph x ##": (500.0, 500.0, 2)}
    predicted = parts.predicted(header_of_s04, RATES)
    (part, _, fused), *_ = parts.table(header_of_s04, profile, 1000.0, RATES)
    assert part == parts.FUSED
    assert fused == pytest.approx(predicted["softmax and mask"] + predicted["pointwise"] + predicted["loss"])


def test_a_step_of_two_micro_batches_should_take_twice_the_matmuls():
    one = parts.predicted(run_of("s11_accum", compile=True, accum=1), RATES)["matmuls"]
    two = parts.predicted(run_of("s11_accum", compile=True, accum=2), RATES)["matmuls"]
    assert two == 2 * one


def test_a_script_that_is_no_stage_has_its_times_alone():
    lines = parts.table(run_of("mine"), {"aten::mm": (30.0, 40.0, 2)}, 100.0, RATES)
    assert lines == [("matmuls", 30.0, None), (parts.REST, 70.0, None), ("the step", 100.0, None)]


def test_a_type_whose_rate_is_not_known_has_no_prediction():
    header_of_s03 = header("s03_bf16", CPU, GPT2, amp_dtype="float16")
    assert parts.predicted(header_of_s03, RATES) == {}
