"""What a card alone can show: its kernels, its dtypes, its meter of memory and its rates."""

from harness import ladder, rates
from harness.bench.rows import row_of
from harness.seen import Seen

import pytest
import torch
from conftest import STAGE_FILES, run_by_the_bench, run_stage
from observe import observing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")

SMALL = ("--size", "tiny", "--seq-len", "64", "--batch-size", "2", "--accum", "2", "--steps", "3", "--data", "docs")
ON_CPU = (*SMALL, "--device", "cpu", "--amp-dtype", "float32", "--no-compile")
ON_CUDA = (*SMALL, "--device", "cuda")


@pytest.mark.parametrize("stage", STAGE_FILES)
def test_a_stage_trains_on_a_card_as_on_a_cpu(stage, tmp_path):
    with observing() as seen:
        run = run_stage(stage, *ON_CUDA, folder=tmp_path)
    dtype = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
    assert f"forward in {dtype if stage >= 's03' else 'float32'}" in seen.steps[0]
    on_cpu = run_stage(stage, *ON_CPU, folder=tmp_path)
    assert run.figures("loss") == pytest.approx(on_cpu.figures("loss"), abs=0.05)


@pytest.mark.parametrize("stage", STAGE_FILES)
def test_what_is_seen_of_a_stage_on_a_card_is_the_ladder_up_to_it(stage):
    run = run_by_the_bench(row_of(stage), ON_CUDA, steps=9)
    seen = Seen.of_line(run.of_kind("seen")[-1])
    has, _ = ladder.has_and_lacks(seen)
    assert seen.profiled
    assert (seen.sdpa in ("flash", "cudnn", "efficient")) == (stage >= "s05")
    assert {each.short for each in has} <= {each.short for each in ladder.STAGES if each.short <= stage}
    assert run.figures("meter") == 8 * ["peak allocated"]  # the last step is profiled, and leaves no line
    assert max(run.figures("memory")) > 4 * 4 * 3_320_640  # weights, gradients, two moments


def test_a_compiled_stage_trains_on_a_card_as_an_eager_one(tmp_path):
    compiled = run_stage("s12", *ON_CUDA, "--compile", folder=tmp_path)
    eager = run_stage("s12", *ON_CUDA, "--no-compile", folder=tmp_path)
    assert compiled.figures("loss") == pytest.approx(eager.figures("loss"), abs=0.02)


def test_a_card_multiplies_faster_in_16_bits_and_in_tf32_where_it_has_it():
    measured = rates.measure_rates(torch.device("cuda"), torch.float16)
    if torch.cuda.get_device_capability() >= (8, 0):
        assert measured["peak"]["tf32"] > measured["peak"]["float32"]
    assert measured["peak"]["float16"] > measured["peak"]["float32"]
    assert measured["copy"] > 1e10
