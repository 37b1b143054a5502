"""Which techniques of the ladder a watched step used, by PyTorch's flags and operations, never by a script's text."""

import re

import torch
from torch import nn

from .. import machine
from ..arithmetic import matmul_weights, shape_of
from ..stepprofile import names_with_callers
from .added import is_compiled

MATMUL = r"aten::(mm|addmm|bmm|baddbmm|convolution|_convolution|mkldnn_convolution)|.*mkl.*linear.*"
CLOSE = 0.05  # how far the weights of a GPT may be from those that its config tells


def find_techniques(models, optimizer, device, autocast, events):
    """Return what a step used, a dict for JSON.

    models: the modules that were called. optimizer: the one whose steps are counted. autocast: the dtype of the step's
    autocast, as "bfloat16", or None. events: those of torch.profiler for one step, or None where none was profiled:
    "profiled" is then False, and the rest is what flags alone tell.

    tf32: whether float32 matmuls may use it. weights: the dtype of most weights. compile: whether compiled code
    multiplied matrices outside of the optimizer. sdpa: the kernel that scaled_dot_product_attention chose, or None.
    attention: whether any attention was seen. drops: whether dropout was inside of attention, or may have been.
    vocabulary: the rows of the largest embedding, or None. logits: among how many the loss chooses, or None; there
    where a step was profiled. fused: whether one kernel did the update, or None for an optimizer that can't. optimizer:
    its class. emulated: whether a CPU has no units for autocast's dtype. parameters: how many there are. machine: what
    this machine could use, {tf32, amp_dtype, compile}.
    """
    modules = [module for model in models for module in model.modules()]
    parameters = parameters_of(models, optimizer)
    vocabularies = [module.num_embeddings for module in modules if isinstance(module, nn.Embedding)]
    techniques = {
        "profiled": events is not None,
        "tf32": allows_tf32(),
        "weights": machine.dtype_name(dtype_of_most(parameters)),
        "compile": any(is_compiled(module) for module in modules),
        "sdpa": None,
        "attention": False,
        "drops": any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules),
        "vocabulary": max(vocabularies, default=None),
        "fused": fused_flag(optimizer),
        "optimizer": type(optimizer).__name__,
        "autocast": autocast,
        "emulated": autocast is not None and machine.emulates(device, getattr(torch, autocast)),
        "parameters": sum(p.numel() for p in parameters),
        "machine": {
            "tf32": machine.has_tf32(device),
            "amp_dtype": machine.dtype_name(machine.native_amp_dtype(device)),
            "compile": machine.compile_problem(device) is None,
        },
    }
    if events is not None:
        techniques |= seen_in(events, techniques)
    return techniques


def parameters_of(models, optimizer):
    """Return the parameters of all models and of an optimizer, each once.

    Those of the optimizer are all that is known where a compiled function calls the model.
    """
    parameters = {}
    for model in models:
        parameters |= {id(p): p for p in model.parameters()}
    for group in optimizer.param_groups:
        parameters |= {id(p): p for p in group["params"]}
    return list(parameters.values())


def seen_in(events, flags):
    """Return what the operations of a step tell. events: of torch.profiler. flags: what the flags told, a dict."""
    operations = [names_with_callers(event) for event in events]
    names = {names[0] for names in operations}
    kernels = {match[1] for name in names if (match := re.search(machine.SDPA_KERNEL, name))}
    compiled = any(is_compiled_matmul(each) for each in operations)  # a compiled loss has none
    attends, logits = False, None
    for event in events:
        shape = event.input_shapes[0] if event.input_shapes else []
        if event.name == "aten::_softmax" and len(shape) > 2:
            attends = attends or shape[-1] == shape[-2]
        if event.name == "aten::_log_softmax" and shape:
            logits = max(logits or 0, shape[-1])
    if logits is None and compiled:  # a compiler leaves no log_softmax to be seen
        logits = flags["vocabulary"]
    seen = {
        "compile": compiled,
        "sdpa": min(kernels, default=None),  # "efficient" before "math", which a mask or dropout may choose in a part
        "attention": bool(kernels) or attends,
        "logits": logits,
    }
    if kernels:
        seen["drops"] = any("bernoulli" in each[0] and "scaled_dot_product" in " ".join(each) for each in operations)
    if flags["fused"] is not None:
        seen["fused"] = flags["fused"] or any("aten::_fused_" in name for name in names)
    return seen


def is_compiled_matmul(names):
    """Tell whether an operation is a matmul in compiled code, by its name and those of its callers.

    Those of an optimizer, as Muon has them, are left out: a compiled update is no compiled model.
    """
    if not re.fullmatch(MATMUL, names[0]) or any("Optimizer.step#" in name for name in names):
        return False
    return any("Torch-Compiled Region" in name or "CompiledFxGraph" in name for name in names)


def allows_tf32():
    """Tell whether float32 matmuls may use TF32.

    torch.get_float32_matmul_precision() raises where a script set the newer flags, so these are asked.
    """
    return "tf32" in (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)


def dtype_of_most(parameters):
    """Return the dtype that most weights have."""
    counts = {}
    for p in parameters:
        counts[p.dtype] = counts.get(p.dtype, 0) + p.numel()
    return max(counts, key=counts.get, default=torch.float32)


def fused_flag(optimizer):
    """Return whether an optimizer was asked for a fused kernel, or None where it has no such setting."""
    group = optimizer.param_groups[0]
    return bool(group["fused"]) if "fused" in group else None


def gpt_shape(models, seq_len):
    """Return the shape of a watched GPT, as arithmetic.shape_of() does, or None where no model is one.

    A config alone is not believed: the matrices must add up to those of a GPT-2 of these numbers, within 5 %. So a
    mixture of experts, or a Llama with much larger layers, has no shape.
    """
    for model in models:
        for module in model.modules():
            shape = shape_of(module, seq_len)
            if shape and abs(matrix_weights(model) / matmul_weights(shape) - 1) < CLOSE:
                return shape
    return None


def matrix_weights(model):
    """Return how many weights the matrices of a model have. An embedding counts where it is also the last matrix."""
    matrices = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for p in module.parameters(recurse=False):
            if p.dim() == 2:
                matrices[id(p)] = p.numel()
    return sum(matrices.values())
