"""Which techniques of the ladder a watched step used, by PyTorch's flags and operations, never by a script's text."""

import math
import multiprocessing
import re
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import machine
from ..arithmetic import matmul_weights, shape_of
from ..stepprofile import names_with_callers
from .added import is_compiled
from .counting import named_tensors
from .probe import kernels_and_busy_ms
from .timeline import count_threads_of_script

MATMUL = r"aten::(mm|addmm|bmm|baddbmm|convolution|_convolution|mkldnn_convolution)|.*mkl.*linear.*"
CLOSE = 0.05  # how far the weights of a GPT may be from those that its config tells
FRAMEWORKS = ("transformers", "lightning", "pytorch_lightning", "accelerate")  # the outer one first
HALVES = (torch.bfloat16, torch.float16)


@dataclass
class Habits:
    """What the script was seen to do, beside its steps.

    autocast: the dtype of the last autocast that was entered with gradients on, as "bfloat16", or None.
    """

    autocast: str | None = None
    first_lr: float = 0.0  # of the optimizer
    output_dtype: torch.dtype | None = None
    clips: bool = False
    repeats_forward: bool = False
    detects_anomalies: bool = False
    sums_of_gradients: int = 0  # over ranks, in the first two steps
    loader_processes: set = field(default_factory=set)  # how many each DataLoader has
    starts_of_loaders: Counter = field(default_factory=Counter)  # by id, of those with processes
    texts: list = field(default_factory=list)  # which share of each attention_mask is text, tensors
    graphs: int = 0  # compiled up to the end of the warm-up

    def saw_autocast(self, context):
        """Note an autocast that is entered, also one of ours."""
        if context._enabled and torch.is_grad_enabled():
            self.autocast = machine.dtype_name(context.fast_dtype)

    def saw_autocast_of_compiler(self, device_type, dtype, enabled, *others):
        """Note an autocast that torch.compile meets. It is entered while that traces, and never again."""
        if enabled and dtype:
            self.autocast = machine.dtype_name(dtype)

    def saw_output(self, output):
        """Note the dtype of what a module returns."""
        dtypes = [tensor.dtype for _, tensor in named_tensors([("", output)]) if tensor.is_floating_point()]
        if dtypes:
            self.output_dtype = dtypes[0]

    def saw_arguments(self, arguments):
        """Note how much of a batch is padding."""
        mask = arguments.get("attention_mask")
        if torch.is_tensor(mask) and mask.dim() == 2:
            self.texts.append((mask != 0).float().mean())

    def saw_backward(self, models):
        """Note what a backward() does besides."""
        self.detects_anomalies = self.detects_anomalies or torch.is_anomaly_enabled()
        for model in models:
            if isinstance(model, DistributedDataParallel):
                self.sums_of_gradients += model.require_backward_grad_sync

    def saw_clipping(self, parameters, max_norm, *others, **options):
        """Note that gradients are clipped, and not only measured."""
        self.clips = self.clips or max_norm < math.inf

    def saw_loader(self, loader):
        """Note how many processes a DataLoader has, and whether it starts them now."""
        self.loader_processes.add(loader.num_workers)
        is_running = loader.persistent_workers and loader._iterator
        if loader.num_workers > 0 and not is_running:
            self.starts_of_loaders[id(loader)] += 1


def compiled_graphs():
    """Return how many graphs torch.compile has made so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def find_techniques(watcher):
    """Return what PyTorch's flags tell of a step, a dict for JSON. What only operations tell is None, or not there.

    profiled: whether operations were seen. unseen: else the reason. tf32: whether float32 matmuls may use it.
    weights: the dtype of the largest one. compile: whether compiled code multiplies matrices outside of the optimizer.
    sdpa: the kernel that scaled_dot_product_attention chose, or None. attention: whether any was seen. drops: whether
    dropout was inside of attention, or may have been. vocabulary: among how many the loss chooses, else the rows of the
    last layer, or None. fused: whether one kernel does the update, or None for an optimizer that can't. optimizer: its
    class. autocast: the dtype in which it computes above weights in float32, as "bfloat16", or None. enters_autocast:
    whether that is by autocast, and not by a policy of FSDP, for one. emulated: whether a CPU has no units for it.
    clips, schedules, groups: whether it clips gradients, changes its learning rate, and has groups of unlike weight
    decay. accum: micro-batches of a rank. kernels, busy_ms, reads: how many kernels a step runs on a card, how long
    that is busy, and how many numbers are read from it. failed: {name of an added technique: why it was left out
    again}. framework: the package that calls the optimizer, or None. loaders: how many processes and threads it has
    started. machine: what this one could use, {tf32, amp_dtype, compile}.
    """
    models = list(watcher.models.values())
    modules = [module for model in models for module in model.modules()]
    optimizer, device, habits = watcher.optimizer, watcher.device, watcher.habits
    weights = max(parameters_of(models, optimizer), key=torch.Tensor.numel).dtype
    autocast = habits.autocast
    if autocast is None and torch.is_autocast_enabled(device.type):  # entered once, around the loop
        autocast = machine.dtype_name(torch.get_autocast_dtype(device.type))
    is_entered = autocast is not None
    if autocast is None and habits.output_dtype in HALVES and weights == torch.float32:
        autocast = machine.dtype_name(habits.output_dtype)
    groups = optimizer.param_groups
    units = machine.units_of(device)
    return {
        "profiled": False,
        "tf32": allows_tf32(),
        "weights": machine.dtype_name(weights),
        "compile": any(is_compiled(module) for module in modules),
        "sdpa": None,
        "attention": False,
        "drops": any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules),
        "vocabulary": rows_of_last_layer(modules),
        "fused": bool(groups[0]["fused"]) if "fused" in groups[0] else None,
        "optimizer": type(optimizer).__name__,
        "autocast": autocast,
        "enters_autocast": is_entered,
        "emulated": autocast is not None and autocast not in units,
        "clips": habits.clips,
        "schedules": float(groups[0]["lr"]) != habits.first_lr or "initial_lr" in groups[0],
        "groups": len({group.get("weight_decay") for group in groups}) > 1,
        "accum": watcher.seen.accum,
        "failed": watcher.added.failed,
        "framework": framework_of(sys._getframe()),
        "loaders": len(multiprocessing.active_children()) + count_threads_of_script(),
        "machine": {
            "tf32": "tf32" in units,
            "amp_dtype": machine.dtype_name(machine.native_amp_dtype(device)),
            "compile": machine.compile_problem(device) is None,
        },
    }


def parameters_of(models, optimizer):
    """Return the parameters of all models and of an optimizer, each once.

    Those of the optimizer are all that is known where a compiled function calls the model.
    """
    parameters = []
    for model in models:
        parameters += model.parameters()
    for group in optimizer.param_groups:
        parameters += group["params"]
    return list(dict.fromkeys(parameters))


def seen_in(events, flags, device):
    """Return what the operations of a step tell. events: of torch.profiler. flags: what the flags told, a dict."""
    operations = [names_with_callers(event) for event in events]
    names = {names[0] for names in operations}
    matches = [re.search(machine.SDPA_KERNEL, name) for name in names]
    kernels = {match[1] for match in matches if match}
    has_matmul = any(is_matmul(each) for each in operations)
    attends, logits = False, None
    for event in events:
        shape = event.input_shapes[0] if event.input_shapes else []
        if event.name == "aten::_softmax" and len(shape) > 2:
            attends = attends or shape[-1] == shape[-2]
        if event.name == "aten::_log_softmax" and shape:
            logits = max(logits or 0, shape[-1])
    seen = {
        "profiled": True,
        "sdpa": min(kernels, default=None),  # "efficient" before "math", which a mask or dropout may choose in a part
        "attention": bool(kernels) or attends,
    }
    if has_matmul:  # else all of it is in CUDA graphs, or in kernels of Triton
        seen["compile"] = any(is_matmul(each) and is_in_compiled_code(each) for each in operations)
    if logits or not flags["compile"]:  # a compiler leaves no log_softmax to be seen
        seen["vocabulary"] = logits
    if kernels:
        seen["drops"] = any("bernoulli" in each[0] and "scaled_dot_product" in " ".join(each) for each in operations)
    if device.type != "cpu":
        seen["kernels"], seen["busy_ms"] = kernels_and_busy_ms(events)
        seen["reads"] = sum("DtoH" in name or "DeviceToHost" in name for name, *callers in operations)
    return seen


def is_matmul(names):
    """Tell whether an operation is a matmul outside of an optimizer, by its name and those of its callers.

    Some optimizers multiply matrices, as Muon does, and a compiled update is no compiled model.
    """
    return re.fullmatch(MATMUL, names[0]) is not None and not any("Optimizer.step#" in name for name in names)


def is_in_compiled_code(names):
    """Tell whether torch.compile made an operation, by its name and those of its callers."""
    return any("Torch-Compiled Region" in name or "CompiledFxGraph" in name for name in names)


def framework_of(frame):
    """Return which package of FRAMEWORKS called the optimizer that this frame is in, or None."""
    modules = [caller.f_globals.get("__name__", "") for caller, _ in traceback.walk_stack(frame)]
    packages = {module.split(".")[0] for module in modules}
    for name in FRAMEWORKS:
        if name in packages:
            return name.removeprefix("pytorch_")
    return None


def rows_of_last_layer(modules):
    """Return the rows of the matrix that an embedding shares, else of the last one, or None where there is none."""
    embeddings = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    layers = [module for module in modules if isinstance(module, nn.Linear)]
    tied = [layer for layer in layers if id(layer.weight) in embeddings]
    last = (tied or layers)[-1:]
    return last[0].out_features if last else None


def allows_tf32():
    """Tell whether float32 matmuls may use TF32.

    torch.get_float32_matmul_precision() raises where a script set the newer flags, so these are asked.
    """
    return "tf32" in (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)


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
    others = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    matrices = {p for module in others for p in module.parameters(recurse=False) if p.dim() == 2}
    return sum(p.numel() for p in matrices)
