"""Sorts the operations of a profiled step into parts, and predicts the time of each. Imports no torch."""

import re

from . import arithmetic, ladder

FUSED = "fused kernels"
OPTIMIZER = "optimizer"
REST = "the rest"
# What torch.profiler calls the operations of each part, as patterns of whole names. The optimizer's part
# has clipping, the sums of gradients and DDP's buckets, too.
PATTERNS = {
    "matmuls": r"aten::(mm|addmm|linear)|.*mkl.*linear.*",
    "attention": r"aten::(bmm|baddbmm|_scaled_dot_product.*|_(flash|efficient|cudnn)_attention.*)",
    FUSED: r"## Call CompiledFxGraph .*|triton_.*",
    "softmax and mask": r"aten::(_softmax|_softmax_backward_data|masked_fill_?|triu|where|div)",
    "pointwise": r"aten::((gelu|native_layer_norm)(_backward)?|copy_|fill_|add_?|cat|sum|embedding.*|index_select)",
    "loss": r"aten::(_log_softmax|_log_softmax_backward_data|nll_loss.*)",
    OPTIMIZER: r"Optimizer\.step#.*|aten::_foreach_(norm|mul_)|.*::AccumulateGrad|torch\.distributed\.ddp.*",
}
# one fused kernel may do the work of several parts, which are one then
MERGED_BY_FUSION = ("softmax and mask", "pointwise", "loss")


def part_of(names):
    """The part that an operation belongs to.

    names: its own name and those of its callers, the outermost last. The outermost one that has a part
    decides, since what fills a gradient inside of the loss is the loss's. A fused graph calls matmuls, so
    it comes last.
    """
    found = REST
    for name in names:
        for part, pattern in PATTERNS.items():
            if re.fullmatch(pattern, name) and (part != FUSED or found == REST):
                found = part
    return found


def merged(times):
    """{part: ms} in the order in which parts are shown, those that fused kernels do together added up."""
    ordered = {part: times[part] for part in [*PATTERNS, REST] if part in times}
    if FUSED in ordered:
        for part in MERGED_BY_FUSION:
            ordered[FUSED] += ordered.pop(part, 0.0)
    return ordered


def predicted(header, rates, sdpa=None):
    """{part: ms} that a step should take by its FLOPs and bytes; {} where nothing can be said.

    header: of the run's record. rates: the arithmetic.Rates of its machine. sdpa: the attention kernel that ran, of
    the run's summary.
    """
    facts = ladder.Facts(header["environment"], header["settings"], header["fallbacks"], sdpa=sdpa)
    work = ladder.work_of(header["stage"], facts, header["shape"])
    if work is None or not arithmetic.has_rate_for(work, rates):
        return {}
    seconds = arithmetic.seconds_of_parts(work, rates)
    return {part: 1e3 * work.accum * value for part, value in seconds.items()}


def table(header, measured, rates, sdpa=None):
    """[(part, ms measured, ms predicted)] of a profiled step; None where nothing is predicted.

    The last two are the rest, which no arithmetic predicts, and the whole step. header, rates, sdpa: as of
    predicted(). measured: {part: ms} of the run's summary.
    """
    measured_ms, predicted_ms = merged(measured), predicted(header, rates, sdpa)
    if predicted_ms and FUSED in measured_ms:
        predicted_ms[FUSED] = sum(predicted_ms.pop(part) for part in MERGED_BY_FUSION)
    lines = [(part, ms, predicted_ms.get(part)) for part, ms in measured_ms.items()]
    total = sum(predicted_ms.values()) if predicted_ms else None
    return [*lines, ("the step", sum(measured.values()), total)]
