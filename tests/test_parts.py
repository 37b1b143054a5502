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
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("## Call CompiledFxGraph fgg3hb ##", "fused kernels"),
        ("triton_red_fused__log_softmax_0", "fused kernels"),
        ("aten::something_new", "the rest"),
    ],
)
def test_an_operation_has_a_part(operation, part):
    assert parts.part_of([operation, "CompiledFunction"]) == part


@pytest.mark.parametrize(
    "names, part",
    [
        (["aten::fill_", "aten::zero_", "aten::nll_loss_backward"], "loss"),
        (["aten::copy_", "aten::clone", "aten::masked_fill"], "softmax and mask"),
        (["aten::copy_", "aten::_to_copy", "aten::to"], "pointwise"),
        (["aten::div", "Optimizer.step#AdamW.step"], "optimizer"),
        (["aten::mul_", "aten::_foreach_mul_"], "optimizer"),
        (["aten::add_", "torch::autograd::AccumulateGrad", "autograd::engine::evaluate_function"], "optimizer"),
        (["aten::mul", "torch.distributed.ddp.reducer::mul_out"], "optimizer"),
        (["aten::mm", "## Call CompiledFxGraph fgg3hb ##", "CompiledFunction"], "matmuls"),
        (["aten::empty", "## Call CompiledFxGraph fgg3hb ##"], "fused kernels"),
    ],
    ids=str,
)
def test_the_outermost_caller_that_has_a_part_decides(names, part):
    assert parts.part_of(names) == part


def test_fused_kernels_take_three_parts_with_them():
    times = {"the rest": 1.0, "loss": 2.0, "pointwise": 3.0, "fused kernels": 30.0, "matmuls": 90.0}
    assert parts.merged(times) == {"matmuls": 90.0, "fused kernels": 35.0, "the rest": 1.0}


def test_parts_that_took_no_time_are_left_out():
    assert parts.merged({"the rest": 1.0, "loss": 2.0, "matmuls": 90.0}) == {
        "matmuls": 90.0,
        "loss": 2.0,
        "the rest": 1.0,
    }


def run_of(stage, **settings):
    """The header of a run of a stage of gpt2 at B 1, T 1024 in float32."""
    return header(stage, CPU, GPT2, batch_size=1, seq_len=1024, amp_dtype="float32", **settings)


def test_parts_stand_beside_what_they_should_take():
    measured = {"matmuls": 9000.0, "loss": 200.0, parts.REST: 800.0}
    lines = parts.table(run_of("s01_baseline", compile=False), measured, RATES)
    (_, matmuls_ms, matmuls_predicted), (_, loss_ms, loss_predicted), rest, step = lines
    assert (matmuls_ms, loss_ms) == (9000.0, 200.0)
    assert matmuls_predicted == pytest.approx(7590, rel=0.001)  # 1024 x 741.2 MFLOP at 0.1 TFLOP/s
    assert loss_predicted == pytest.approx(123.5, rel=0.001)  # 6 passes over 51.46 M logits of 4 bytes at 10 GB/s
    assert rest == (parts.REST, 800.0, None)
    assert step[:2] == ("the step", 10_000.0)


def test_fused_kernels_should_take_what_softmax_pointwise_and_loss_take():
    header_of_s04 = run_of("s04_compile", compile=True)
    predicted = parts.predicted(header_of_s04, RATES)
    (part, _, fused), *_ = parts.table(header_of_s04, {parts.FUSED: 500.0, parts.REST: 500.0}, RATES)
    assert part == parts.FUSED
    assert fused == pytest.approx(predicted["softmax and mask"] + predicted["pointwise"] + predicted["loss"])


def test_a_step_of_two_micro_batches_should_take_twice_the_matmuls():
    one = parts.predicted(run_of("s11_accum", compile=True, accum=1), RATES)["matmuls"]
    two = parts.predicted(run_of("s11_accum", compile=True, accum=2), RATES)["matmuls"]
    assert two == 2 * one


def test_a_script_that_is_no_stage_has_its_times_alone():
    lines = parts.table(run_of("mine"), {"matmuls": 30.0, parts.REST: 70.0}, RATES)
    assert lines == [("matmuls", 30.0, None), (parts.REST, 70.0, None), ("the step", 100.0, None)]


def test_attention_that_fell_back_on_its_matmuls_should_take_the_time_of_explicit_attention():
    header_of_s05 = run_of("s05_flash", compile=False)
    explicit = parts.predicted(run_of("s01_baseline", compile=False), RATES)["attention"]
    assert parts.predicted(header_of_s05, RATES, sdpa="math")["attention"] == explicit
    assert parts.predicted(header_of_s05, RATES, sdpa="flash")["attention"] < explicit


def test_a_type_whose_rate_is_not_known_has_no_prediction():
    header_of_s03 = header("s03_bf16", CPU, GPT2, amp_dtype="float16")
    assert parts.predicted(header_of_s03, RATES) == {}
