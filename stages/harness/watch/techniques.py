"""Which techniques of the ladder a watched script uses, by PyTorch's flags and calls, never by a script's text."""

import inspect
import multiprocessing
from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import machine
from ..arithmetic import matmul_weights, shape_of
from ..seen import Seen
from . import events, pytorch
from .added import can_compile_in_place, has_fused_kernel
from .modules import matrix_weights, modules_of, parameters_of, size_of, unwrapped, vocabulary_of
from .naming import framework_of, name_in_script
from .threads import count_threads_of_script

CLOSE = 0.05  # how far the weights of a GPT may be from those of its config


def find_techniques(run):
    """Return the Seen of a script by PyTorch's flags and calls in its first two steps.

    The operations of a step show more: see operations.py. What begins later is added by seen_at_the_end().
    """
    habits, device = run.habits, run.log.device
    models = list(habits.models.values())
    unit = events.unit_of(run.step.micro_batches)
    batch = events.largest_batch(run.step.micro_batches)
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
    parameters = parameters_of(models, optimizers)
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    largest = max(models, key=size_of, default=None)
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
    fusible = [optimizer for optimizer in optimizers if what_has_no_kernel(optimizer) is None]
    if not fusible:
        return {"fused": None, "optimizer": what_has_no_kernel(next(iter(optimizers)))}
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
    """Return what PyTorch has no fused kernel for, or None if an optimizer has one.

    "RMSprop", for example, or "sparse gradients", or "complex weights".
    """
    first_group = optimizer.param_groups[0]
    if "fused" not in first_group or not takes_fused(type(optimizer)):
        return type(optimizer).__name__
    for choice in ("foreach", "differentiable"):
        if first_group.get(choice):
            return f"{choice}=True"
    for parameter in parameters_of(optimizers=[optimizer]):
        if not has_fused_kernel(parameter):
            return "sparse gradients" if parameter.is_floating_point() else "complex weights"
    return None


def takes_fused(optimizer_class):
    """Return whether an optimizer can be made with fused=True: a script's own subclass may not take it."""
    parameters = inspect.signature(optimizer_class).parameters.values()
    return any(each.name == "fused" or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


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
