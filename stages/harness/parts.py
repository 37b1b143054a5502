"""Sorts the operations of a profiled step into parts, and predicts the time of each."""

import re

from torch.autograd import DeviceType

from . import ladder
from .arithmetic import Rates, seconds_of_parts

FUSED = "fused kernels"
REST = "the rest"
# What torch.profiler calls the operations of each part, as patterns of whole names. The optimizer's part has clipping,
# the sums of gradients and DDP's buckets, too.
PATTERNS = {
    "matmuls": r"aten::(mm|addmm|linear)|.*mkl.*linear.*",
    "attention": r"aten::(bmm|baddbmm|_scaled_dot_product.*|_(flash|efficient|cudnn)_attention.*)",
    FUSED: r"## Call CompiledFxGraph .*|triton_.*",
    "softmax and mask": r"aten::(_softmax|_softmax_backward_data|masked_fill_?|triu|where|div)",
    "pointwise": r"aten::((gelu|native_layer_norm)(_backward)?|copy_|fill_|add_?|cat|sum|embedding.*|index_select)",
    "loss": r"aten::(_log_softmax|_log_softmax_backward_data|nll_loss.*)",
    "optimizer": r"Optimizer\.step#.*|aten::_foreach_(norm|mul_)|.*::AccumulateGrad|torch\.distributed\.ddp.*",
}
# one fused kernel may do the work of several parts, which are one then
MERGED_BY_FUSION = ("softmax and mask", "pointwise", "loss")


def part_of(names):
    """Return the part that an operation belongs to.

    names: its own name and those of its callers, the outermost last. The outermost one that has a part decides: what
    fills a gradient inside of the loss, (aten::fill_, aten::nll_loss_backward), is the loss's. A compiled graph is an
    exception, since it calls matmuls, which are not its own time.
    """
    matches = []
    for name in names:
        for part, pattern in PATTERNS.items():
            if re.fullmatch(pattern, name):
                matches.append(part)
    named = [part for part in matches if part != FUSED]
    if named:
        return named[-1]
    return FUSED if matches else REST


def names_with_callers(event):
    """Return the name of a profiled operation and those of its callers, the outermost last."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names


class Profile:
    """Where the time of a step went. operations: {name: [ms of its own, calls]}. parts: {part: ms}."""

    def __init__(self, events, device, step_ms):
        """Sort the events of torch.profiler. step_ms: what the whole step took."""
        clock = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
        self.operations = {}
        self.parts = {}
        for event in events:
            if event.device_type != DeviceType.CPU:
                continue  # a kernel, whose time is also that of the operation that started it
            own_ms = getattr(event, clock) / 1e3
            operation = self.operations.setdefault(event.name, [0.0, 0])
            operation[0] += own_ms
            operation[1] += 1
            part = part_of(names_with_callers(event))
            self.parts[part] = self.parts.get(part, 0.0) + own_ms
        # what the named parts leave of the whole step: more than what the profiler saw outside of them
        self.parts[REST] = step_ms - sum(ms for part, ms in self.parts.items() if part != REST)

    def lines(self, run, most):
        """Return lines that show the longest operations, so many at most, and the parts beside their predictions.

        run: the run's header and summary in one dict.
        """
        lines = []
        longest_first = sorted(self.operations.items(), key=lambda item: item[1][0], reverse=True)
        for name, (own_ms, calls) in longest_first[:most]:
            lines.append(f"{own_ms:9.2f} ms in {calls:4d} x {name}")
        lines.append("this step in ms, and what its FLOPs and bytes take at the rates of this machine:")
        lines.append(" measured predicted")
        for part, measured_ms, predicted_ms in measured_and_predicted(run, self.parts):
            shown = "" if predicted_ms is None else f"{predicted_ms:.2f}"
            lines.append(f"{measured_ms:9.2f} {shown:>9} {part}")
        return lines


def measured_and_predicted(run, parts):
    """Return [(part, ms measured, ms predicted)] of a profiled step; None where nothing is predicted.

    run: its header and summary in one dict. parts: {part: ms}. The last two lines are the rest, which no arithmetic
    predicts, and the whole step.
    """
    measured = {part: parts[part] for part in [*PATTERNS, REST] if part in parts}
    predicted = predicted_ms(run)
    if FUSED in measured:
        for part in MERGED_BY_FUSION:
            measured[FUSED] += measured.pop(part, 0.0)
        if predicted:
            predicted[FUSED] = sum(predicted.pop(part) for part in MERGED_BY_FUSION)
    lines = [(part, ms, predicted.get(part)) for part, ms in measured.items()]
    total = sum(predicted.values()) if predicted else None
    return [*lines, ("the step", sum(measured.values()), total)]


def predicted_ms(run):
    """Return {part: ms} that a step should take; {} for a script that is no stage, or a dtype that has no rate."""
    measured = Rates(run["rates"]["peak"], run["rates"]["copy"])
    if not ladder.find(run["stage"]):
        return {}
    work = ladder.work_of(run["stage"], run)
    if work.matmul_dtype not in measured.matmul:
        return {}
    of_micro_batch = seconds_of_parts(work, measured)
    return {part: 1e3 * work.accum * of_micro_batch[part] for part in of_micro_batch}
