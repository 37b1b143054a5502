"""Sorts the operations of a profiled step into parts, and predicts the time of each. Imports no torch."""

import re

from . import arithmetic, ladder

IN_OPTIMIZER = "optimizer: "  # begins the name of an operation that AdamW's step called: see log.py
FUSED = "fused kernels"
REST = "the rest"
# What torch.profiler calls the operations of each part, as patterns of whole names. In a compiled stage one fused
# kernel may do the work of three parts, which are then one.
PATTERNS = {
    "matmuls": r"aten::(mm|addmm|linear)|.*mkl.*linear.*",
    "attention": r"aten::(bmm|baddbmm|_scaled_dot_product.*|_(flash|efficient|cudnn)_attention.*)",
    FUSED: r"## Call CompiledFxGraph .*|triton_.*",
    "softmax and mask": r"aten::(_softmax|_softmax_backward_data|masked_fill_?|triu|where|div)",
    "pointwise": r"aten::((gelu|native_layer_norm)(_backward)?|copy_|fill_|add_?|cat|sum|embedding.*|index_select)",
    "loss": r"aten::(_log_softmax|_log_softmax_backward_data|nll_loss.*)",
}
# these two count with all that they call, and so does AdamW's step
CLIPPING = r"aten::_foreach_(norm|mul_)"
OPTIMIZER_STEP = r"Optimizer\.step#.*"
CALLED_BY_ADAMW_TOO = r"aten::(div|add_|copy_)"
MERGED_BY_FUSION = ("softmax and mask", "pointwise", "loss")


def measured(profile, step_ms):
    """{part: ms} of a step that was profiled, in the order in which they are shown; parts without time are left out.

    profile: {operation: (ms of its own, ms with what it called, calls)} of a record. step_ms: the whole step, in ms.
    Older records do not mark what AdamW called; there, operations that others call too are left to the rest.
    """
    times = dict.fromkeys([*PATTERNS, "optimizer"], 0.0)
    is_marked = any(operation.startswith(IN_OPTIMIZER) for operation in profile)
    for operation, (own_ms, total_ms, _) in profile.items():
        if not is_marked and re.fullmatch(CALLED_BY_ADAMW_TOO, operation):
            continue
        if re.fullmatch(OPTIMIZER_STEP, operation) or re.fullmatch(CLIPPING, operation):
            times["optimizer"] += total_ms
            continue
        for part, pattern in PATTERNS.items():
            if re.fullmatch(pattern, operation):
                times[part] += own_ms
                break
    if times[FUSED]:  # what the compiler left alone, such as a cast of a weight
        for part in MERGED_BY_FUSION:
            times[FUSED] += times.pop(part)
    times = {part: ms for part, ms in times.items() if ms}
    return times | {REST: step_ms - sum(times.values())}


def predicted(header, rates):
    """{part: ms} that a step should take by its FLOPs and bytes, as arithmetic.seconds(); {} where nothing can be said.

    header: of the run's record. rates: the arithmetic.Rates of its machine.
    """
    facts = ladder.Facts(header["environment"], header["settings"], header["fallbacks"])
    work = ladder.work_of(header["stage"], facts, header["shape"])
    if work is None or not arithmetic.is_known(work, rates):
        return {}
    seconds = arithmetic.seconds(work, rates)
    return {part: 1e3 * work.accum * value for part, value in seconds.items()}


def table(header, profile, step_ms, rates):
    """[(part, ms measured, ms predicted)] of a profiled step; None where nothing is predicted.

    The last two are the rest, which no arithmetic predicts, and the whole step. header, rates: as of predicted().
    profile, step_ms: as of measured().
    """
    measured_ms = measured(profile, step_ms)
    predicted_ms = predicted(header, rates)
    if predicted_ms and FUSED in measured_ms:
        predicted_ms[FUSED] = sum(predicted_ms.pop(part) for part in MERGED_BY_FUSION)
    lines = [(part, ms, predicted_ms.get(part)) for part, ms in measured_ms.items()]
    total = sum(predicted_ms.values()) if predicted_ms else None
    return [*lines, ("the step", step_ms, total)]
