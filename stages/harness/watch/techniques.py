"""Which techniques of the ladder a watched step used, by PyTorch's flags and operations, never by a script's text."""

import inspect
import math
import multiprocessing
import re
import sys
import traceback
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from .. import machine
from ..arithmetic import matmul_weights, shape_of
from ..seen import Seen
from . import events, pytorch
from .added import can_compile_in_place, has_kernel
from .counting import FABRIC, modules_of, parameters_in, unwrapped, vocabulary_of
from .profiler import busy_ms
from .threads import count_threads_of_script, is_of_a_library, is_of_library_module

# How PyTorch names the operation that starts a kernel, as in aten::_scaled_dot_product_flash_attention.
SDPA_KERNEL = r"_scaled_dot_product_(?:attention_)?(flash|cudnn|efficient|math)"
MATH_KERNEL = "aten::_scaled_dot_product_attention_math"
MATMUL = r"aten::(mm|addmm|bmm|baddbmm|convolution|_convolution|mkldnn_convolution)|.*mkl.*linear.*"
# All that autocast may compute in 16 bits; what a graph of CUDA has in it is not seen
IN_16_BITS = r".*(mm|mv|conv|linear|matmul|rnn|lstm|gru|attention|attn|GraphLaunch)"
CLOSE = 0.05  # how far the weights of a GPT may be from those of its config
FRAMEWORKS = ("transformers", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "skorch")
DTYPES = {"c10::BFloat16": "bfloat16", "c10::Half": "float16"}  # as the profiler names them


def find_techniques(run):
    """Return the Seen of a script by PyTorch's flags and calls in its first two steps.

    The operations of a step show more: see fields_of_profile(). What begins later is added by seen_at_the_end().
    """
    habits, device = run.habits, run.log.device
    models = list(habits.models.values())
    unit = events.unit_of(run.micro_batches)
    batch = events.largest_batch(run.micro_batches)
    return Seen(
        unit=unit,
        batch_size=batch.batch_size,
        seq_len=batch.seq_len,
        world_size=run.world_size,
        loaders=len(multiprocessing.active_children()) + count_threads_of_script(),
        tf32=uses_tf32(),
        enters_autocast=habits.autocast is not None,
        accum=habits.accum,
        clips=habits.clips,
        framework=framework_of(inspect.currentframe()),
        device=device.type,
        **machine.abilities_of(device),
        **model_of(models, run.optimizers, unit, batch.seq_len),
        **autocast_of(habits.autocast, device),
        **kernels_of(run.optimizers),
        **settings_of(run.optimizers),
    )


def seen_at_the_end(run):
    """Return the Seen of the whole run: what begins late, as a schedule or clipping may, is in it, too."""
    seen, habits = run.log.seen, run.habits
    fields = {"accum": habits.accum, "clips": habits.clips, "tf32": uses_tf32()}
    if habits.autocast and not seen.enters_autocast:
        fields |= {"enters_autocast": True, **autocast_of(habits.autocast, run.log.device)}
    if run.optimizers:  # the script may have deleted them
        fields |= settings_of(run.optimizers)
    return replace(seen, **fields)


def autocast_of(dtype, device):
    """Return in which 16-bit dtype a script computes, as fields of a Seen, a dict. dtype: its name, or None."""
    return {"autocast": dtype, "emulated": dtype is not None and dtype not in machine.units_of(device)}


def uses_tf32():
    """Return whether matmuls in float32 may use TF32. torch.get_float32_matmul_precision() raises for newer flags."""
    return "tf32" in (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)


def model_of(models, optimizers, unit, seq_len):
    """Return what is trained, as fields of a Seen, a dict. unit, seq_len: of the same Seen."""
    modules = [module for model in models for module in modules_of(model)]
    parameters = parameters_of(models, *optimizers)
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    largest = max(models, key=lambda model: sum(p.numel() for p in parameters_of([model])), default=None)
    shape = None
    if seq_len and trained > count / 2:  # arithmetic's FLOPs are those of training all
        shape = gpt_shape(models, seq_len)
    return {
        "parameters": count,
        "shape": shape,
        "weights": machine.dtype_name(max(parameters, key=torch.Tensor.numel).dtype),
        "compile": any(pytorch.is_compiled(module) for module in modules),
        "ddp": any(isinstance(module, DistributedDataParallel) for module in modules),
        "vocabulary": vocabulary_of(modules) if unit == "tok" else None,
        "model_name": name_in_script(largest, inspect.currentframe()) if largest is not None else "",
        "can_compile_in_place": largest is not None and can_compile_in_place(unwrapped(largest)),
    }


def kernels_of(optimizers):
    """Return whether optimizers are fused, or could be, as fields of a Seen, a dict. Their gradients must be there."""
    missing = {optimizer: what_has_no_kernel(optimizer) for optimizer in optimizers}
    fusible = [optimizer for optimizer in optimizers if missing[optimizer] is None]
    if not fusible:
        return {"fused": None, "optimizer": list(missing.values())[0]}
    unfused = [optimizer for optimizer in fusible if not optimizer.param_groups[0]["fused"]]
    advised = unfused[0] if unfused else fusible[0]
    return {"fused": not unfused, "optimizer": type(advised).__name__}


def settings_of(optimizers):
    """Return how optimizers are set, as fields of a Seen, a dict. optimizers: {one: its learning rates so far}."""
    schedules = decays_by_groups = False
    for optimizer, learning_rates in optimizers.items():
        first_group, *groups = optimizer.param_groups
        if len(learning_rates) > 1 or "initial_lr" in first_group:  # PyTorch's own schedules set the latter
            schedules = True
        if any(group.get("weight_decay") != first_group.get("weight_decay") for group in groups):
            decays_by_groups = True
    return {"schedules": schedules, "groups": decays_by_groups}


def what_has_no_kernel(optimizer):
    """Return what PyTorch has no fused kernel for, "RMSprop" or "sparse gradients"; None if an optimizer has one."""
    if "fused" not in optimizer.param_groups[0]:
        return type(optimizer).__name__
    for parameter in parameters_of([], optimizer):
        if not has_kernel(parameter):
            return "sparse gradients" if parameter.is_floating_point() else "complex weights"
    return None


def parameters_of(models, *optimizers):
    """Return the parameters of all models and of optimizers, each once.

    Those of an optimizer are all that is known where a compiled function calls the model.
    """
    parameters = []
    for model in models:
        parameters += parameters_in(model)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
    # those that wait for a first batch to have a shape, or for weights to be loaded, are not there yet
    return [p for p in dict.fromkeys(parameters) if not (is_lazy(p) or p.is_meta)]


def framework_of(frame):
    """Return the outermost package of FRAMEWORKS, or "fabric", that called the optimizer in whose step a frame is.

    None without one.
    """
    framework = None
    for caller, _ in traceback.walk_stack(frame):
        module = caller.f_globals.get("__name__", "")
        package = module.split(".")[0]
        if module.startswith(FABRIC):
            framework = "fabric"
        elif package in FRAMEWORKS:
            framework = package.removeprefix("pytorch_")
    return framework


def name_in_script(module, frame):
    """Return the name under which the user's own code holds a module, "net" or "self.policy"; "" without one.

    frame: the innermost one.
    """
    owners = owners_on_stack(frame)
    for name, owner in owners:
        if owner is module:
            return name
    for name, owner in owners:
        parts = owner.named_modules() if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {}).items()
        for part_name, part in list(parts):
            if part is module:
                return f"{name}.{part_name}"
    return ""


def owners_on_stack(frame):
    """Return [(name, object)] of all that the user's own code holds, that of the innermost frame first.

    What a library calls it is nothing that the user could type. But "self" is, if it is of a class of the user's, as in
    Lightning.
    """
    owners = []
    for caller, _ in traceback.walk_stack(frame):
        if is_of_a_library(caller):
            owner = caller.f_locals.get("self")
            if isinstance(owner, nn.Module) and is_class_of_user(type(owner)):
                owners.append(("self", owner))
        else:
            owners += [*caller.f_locals.items(), *caller.f_globals.items()]
        if caller.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
            caller.f_locals.clear()  # of a function it is a copy, which would hold what the script deletes
    return owners


def is_class_of_user(owner_class):
    """Return whether a class is in the user's own code. One of a module that has no file is not."""
    module = sys.modules.get(owner_class.__module__)
    path = getattr(module, "__file__", None)
    return path is not None and not is_of_library_module(vars(module), path)


class Operation(NamedTuple):
    """An operation of a profiled step. names: its own, and those of its callers, the outermost last."""

    event: object
    names: list

    @property
    def name(self):
        """Its own name."""
        return self.names[0]


def fields_of_profile(profiled, seen, device):
    """Return what the operations of a step show, as fields that replace those of a Seen, a dict.

    What runs in an evaluation, as a teacher does, is not what is trained. profiled: what torch.profiler saw.
    """
    operations = [Operation(event, names_with_callers(event)) for event in profiled]
    operations = [operation for operation in operations if "python (evaluation)" not in operation.names]
    matmuls = [operation for operation in operations if is_matmul(operation)]
    in_forward = [operation for operation in matmuls if "python (forward)" in operation.names]
    kernel = kernel_of_attention(operations)
    fields = {"profiled": True, "sdpa": kernel, "compile": seen.compile}
    fields["attention"] = kernel is not None or attends_by_hand(operations)
    fields["attention_drops"] = any(
        operation.name == "aten::bernoulli_" and MATH_KERNEL in operation.names for operation in operations
    )
    if not seen.compile:  # compiled code may multiply in kernels that have no such names
        fields["multiplies"] = any(re.match(IN_16_BITS, operation.name) for operation in operations)
    if matmuls:  # else all of it is in CUDA graphs, or in kernels of Triton
        fields["compile"] = any(is_in_compiled_code(operation) for operation in in_forward or matmuls)
    dtype = dtype_of_most(matmuls)
    if dtype and seen.weights == "float32" and seen.autocast is None:
        fields |= autocast_of(dtype, device)
    if seen.unit == "tok" and not fields["compile"]:  # a compiler has other names for the last matmul
        fields["vocabulary"] = columns_of_last(in_forward)
    if device.type != "cpu":
        fields["busy_ms"] = busy_ms(profiled) or None  # 0: the profiler saw no kernel, as on WSL2
        fields["reads"] = sum("DtoH" in event.name or "DeviceToHost" in event.name for event in profiled)
    return fields


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
        shapes = operation.event.input_shapes
        if operation.name in ("aten::mm", "aten::addmm") and all(shapes[:2]):
            right = shapes[2 if operation.name == "aten::addmm" else 1]
            columns = right[1]
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
        name, shapes = operation.name, operation.event.input_shapes
        if any(caller.startswith("autograd::engine") for caller in operation.names):
            continue  # the backward of a matmul multiplies the same shapes
        if name == "aten::baddbmm":
            shapes = shapes[1:]  # without what it adds to
        if name in ("aten::bmm", "aten::baddbmm") and all(shapes[:2]):  # a nested tensor has no shape
            left, right = shapes[:2]
            if tuple(left) in weights:
                return True
            product = (left[0], left[1], right[2])
            scores.add(product)
            if is_in_compiled_code(operation):  # which has a softmax of its own, that is not seen
                weights.add(product)
        elif name == "aten::_softmax" and len(shapes[0]) > 2:
            *batch, rows, columns = shapes[0]
            weights.update(scores & {(math.prod(batch), rows, columns)})
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


def gpt_shape(models, seq_len):
    """Return the shape of a watched GPT, as arithmetic.shape_of() does, or None where no model is one.

    A config alone is not believed: the matrices must add up to those of a GPT-2 of these numbers, within 5 %. So a
    mixture of experts, or a Llama with much larger layers, has no shape.
    """
    for model in models:
        for module in modules_of(model):
            shape = shape_of(module, seq_len)
            if shape and abs(matrix_weights(model) / matmul_weights(shape) - 1) < CLOSE:
                return shape
    return None


def matrix_weights(model):
    """Return how many weights the matrices of a model have. An embedding counts where it is also the last matrix."""
    others = [module for module in modules_of(model) if not isinstance(module, nn.Embedding)]
    matrices = {p for module in others for p in parameters_in(module, recurse=False) if p.dim() == 2}
    return sum(p.numel() for p in matrices)
