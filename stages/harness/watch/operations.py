"""Which techniques of the ladder a step used, by the operations that PyTorch's profiler saw in it."""

import math
import re
from collections import Counter
from typing import NamedTuple

from .profiler import busy_ms, range_of
from .techniques import autocast_of

# How PyTorch names the operation that starts a kernel, as in aten::_scaled_dot_product_flash_attention.
SDPA_KERNEL = r"_scaled_dot_product_(?:attention_)?(flash|cudnn|efficient|math)"
MATH_KERNEL = "aten::_scaled_dot_product_attention_math"
# How PyTorch and MKL name matmuls.
MATMUL = r"aten::(mm|addmm|bmm|baddbmm|convolution|_convolution|mkldnn_convolution)|.*mkl.*linear.*"
# Parts of the names of what autocast may compute in 16 bits.
NAMES_IN_16_BITS = (
    "mm(?!a|ing)",  # addmm, and not lgamma or hamming
    "mv(?!l)",  # addmv, and not mvlgamma
    "conv(?!ert)",
    "(?<!i)linear(?!1d)",  # and not bilinear and the like, which interpolate
    "matmul|rnn|lstm|gru|attention|attn",
    "GraphLaunch",  # a graph of CUDA does not show what it has in it
)
IN_16_BITS = re.compile("|".join(NAMES_IN_16_BITS))
DTYPES = {"c10::BFloat16": "bfloat16", "c10::Half": "float16"}  # as the profiler names them


class Operation(NamedTuple):
    """An operation of a profiled step. names: its own, and those of its callers, the outermost last."""

    event: object
    names: list

    @property
    def name(self):
        """Its own name."""
        return self.names[0]

    @property
    def factors(self):
        """The shapes of the two matrices that a matmul multiplies; a nested tensor has none."""
        first = 1 if self.name in ("aten::addmm", "aten::baddbmm") else 0  # what these add to comes before
        return self.event.input_shapes[first : first + 2]


def fields_of_profile(profiled, seen, device):
    """Return what the operations of a step show, as fields that replace those of a Seen, a dict.

    profiled: what torch.profiler saw.
    """
    operations = operations_of_training(profiled)
    matmuls = [operation for operation in operations if is_matmul(operation)]
    in_forward = [operation for operation in matmuls if range_of("forward") in operation.names]
    kernel = kernel_of_attention(operations)
    multiplies_compiled = multiplies_in_compiled_code(matmuls, in_forward, seen.compile)
    fields = {
        "profiled": True,
        "compile": multiplies_compiled,
        "sdpa": kernel,
        "attention": kernel is not None or attends_by_hand(operations),
        "attention_drops": attention_drops(operations),
    }
    if not seen.compile:  # kernels of torch.compile may multiply under any name
        fields["multiplies"] = any(IN_16_BITS.search(operation.name) for operation in operations)
    dtype = dtype_of_most(matmuls)
    if dtype and seen.weights == "float32" and seen.autocast is None:  # the script casts by itself
        fields |= autocast_of(dtype, device)
    if seen.unit == "tok" and not multiplies_compiled:  # a compiler has other names for the last matmul
        fields["vocabulary"] = columns_of_last(in_forward)
    if device.type != "cpu":
        fields |= fields_of_card(profiled)
    return fields


def operations_of_training(profiled):
    """Return the Operations of a step. What runs in an evaluation, as a teacher does, is not what is trained."""
    operations = [Operation(event, names_with_callers(event)) for event in profiled]
    return [operation for operation in operations if range_of("evaluation") not in operation.names]


def multiplies_in_compiled_code(matmuls, in_forward, has_marks):
    """Return whether compiled code multiplies in a step. in_forward: those matmuls that are in a forward.

    Without a matmul all of it is in CUDA graphs or in kernels of Triton, and only the marks tell that torch.compile
    leaves on modules. has_marks: whether there are any.
    """
    if not matmuls:
        return has_marks
    return any(is_in_compiled_code(operation) for operation in in_forward or matmuls)


def fields_of_card(profiled):
    """Return what a card did in a step, as fields of a Seen, a dict."""
    reads = [event for event in profiled if "DtoH" in event.name or "DeviceToHost" in event.name]
    busy = busy_ms(profiled) or None  # 0: the profiler saw no kernel, as on WSL2
    return {"busy_ms": busy, "reads": len(reads)}


def attention_drops(operations):
    """Return whether scaled_dot_product_attention has dropout, and no kernel for it."""
    return any(operation.name == "aten::bernoulli_" and MATH_KERNEL in operation.names for operation in operations)


def dtype_of_most(matmuls):
    """Return the 16-bit dtype that most matmuls of a step get, as "bfloat16", or None. Torch 2.11 does not show it."""
    dtypes = Counter()
    for operation in matmuls:
        input_dtypes = getattr(operation.event, "input_dtypes", None)
        if input_dtypes:
            dtypes[DTYPES.get(input_dtypes[0])] += 1
    return dtypes.most_common(1)[0][0] if dtypes else None


def columns_of_last(matmuls):
    """Return the columns of the last matmul of matrices, or None. A language model chooses an id by them."""
    columns = None
    for operation in matmuls:
        if operation.name in ("aten::mm", "aten::addmm") and all(operation.factors):
            columns = operation.factors[1][1]
    return columns


def is_matmul(operation):
    """Return whether an Operation is a matmul outside of an optimizer.

    Some optimizers multiply matrices, as Muon does, and a compiled update is no compiled model.
    """
    is_in_update = any("Optimizer.step#" in name for name in operation.names)
    return re.fullmatch(MATMUL, operation.name) is not None and not is_in_update


def kernel_of_attention(operations):
    """Return the kernel that scaled_dot_product_attention chose, or None without one. A part may be left to "math"."""
    kernel = None
    for operation in operations:
        match = re.search(SDPA_KERNEL, operation.name)
        if match and kernel in (None, "math"):
            kernel = match[1]
    return kernel


def attends_by_hand(operations):
    """Return whether a forward has attention in single operations, in which a softmax stands between two matmuls.

    Shapes tell what goes where: a batched matmul makes scores, a softmax makes weights of them, and a batched matmul
    takes these. operations: in the order in which they began.
    """
    scores, weights = set(), set()  # shapes
    for operation in operations:
        if any(caller.startswith("autograd::engine") for caller in operation.names):
            continue  # the backward of a matmul multiplies the same shapes
        if operation.name in ("aten::bmm", "aten::baddbmm") and all(operation.factors):
            left, right = operation.factors
            if tuple(left) in weights:
                return True
            product = (left[0], left[1], right[2])
            scores.add(product)
            if is_in_compiled_code(operation):  # which has a softmax of its own, that is not seen
                weights.add(product)
        elif operation.name == "aten::_softmax" and len(operation.event.input_shapes[0]) > 2:
            *batch, rows, columns = operation.event.input_shapes[0]
            shape = (math.prod(batch), rows, columns)
            if shape in scores:
                weights.add(shape)
    return False


def names_with_callers(event):
    """Return the name of a profiled operation and those of its callers, the outermost last."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names


def is_in_compiled_code(operation):
    """Return whether torch.compile made an Operation."""
    return any("Torch-Compiled Region" in name or "CompiledFxGraph" in name for name in operation.names)
