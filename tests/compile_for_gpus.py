"""Compiles the graphs of s04 to s11 for NVIDIA GPUs that are not there. Run by hand, some minutes a target:

    pip install --no-deps --target FOLDER triton==3.7.1    (which torch 2.13.0's CUDA build asks for)
    python tests/compile_for_gpus.py --triton FOLDER [--targets sm_80 sm_90] [--stages s04 s05] [--layers 2]

It runs the text of each stage on fake tensors of such a card (see fake_card.py): gpt2's width at B 16, T 1024,
in float16 for sm_75 and in bfloat16 for the others. torch.compile traces the model, inductor generates the
kernels of forward and backward, and Triton's own ptxas makes machine code of them. Nothing runs, so it tells
nothing about speed or right numbers. A graph that equals one of an earlier stage is not compiled again. The
model has two layers: the first and the last, and what lies between them; ten more would repeat their kernels.

It prints a row for each stage and target:

    kernels     Triton kernels of the forward and the backward; matmuls and flash attention are none, since
                libraries hold them
    built for   the targets that stand in the kernels' PTX
    fused       how many attentions inductor replaced by a fused one of its own
    row         the numbers from one row of the logits to the next in memory
    to time     matmuls that inductor would time on the card with padded columns and without (pad_mm); here
                they stay as they are

Needs g++, Linux, and PyTorch's CPU build.
"""

import fake_card
from harness import ladder

import argparse
import copy
import os
import re
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import torch

from model import SIZES, VOCAB

STAGES = [stage.short for stage in ladder.STAGES if ladder.is_used("compile", stage.name)]
STAGES.remove("s12")  # DistributedDataParallel needs tensors with memory
# target: a card of it, and what inductor's heuristics ask about it: how many multiprocessors, how many threads each of
# them holds, and how many bytes of shared memory a block may have
CARDS = {
    "sm_75": ("T4", 40, 1024, 65536),
    "sm_80": ("A100", 108, 2048, 166912),
    "sm_90": ("H100", 132, 2048, 232448),
    "sm_120": ("RTX 5090", 170, 1536, 101376),
}
COLUMNS = ("target", "dtype", "stage", "kernels", "built for", "fused", "row", "to time", "s", "error")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", metavar="FOLDER", help="where Triton was installed, unless Python finds it")
    parser.add_argument("--targets", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.triton:
        sys.path.append(args.triton)
    try:
        import triton
    except ImportError as error:
        parser.error(f"Triton is missing ({error}): pass --triton FOLDER, see --help")
    if args.here:
        compile_stages(args.targets[0], args.stages, args.layers)
        return
    print(f"torch {torch.__version__}, Triton {triton.__version__}, {args.layers} layers\n")
    print("|", " | ".join(COLUMNS), "|")
    print("| :-- | :-- | :-- |" + " --: |" * 6 + " :-- |", flush=True)
    for target in args.targets:  # a process each: torch and Triton look at their card once
        command = [sys.executable, __file__, "--here", "--layers", str(args.layers), "--targets", target]
        command += ["--triton", args.triton or "", "--stages", *args.stages]
        with tempfile.TemporaryDirectory() as folder:  # no kernel of an earlier run
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            subprocess.run(command, env=os.environ | caches)


def compile_stages(target, stages, layers):
    """Compile the stages' graphs for a target in this process, and print a row for each."""
    dtype = torch.float16 if target == "sm_75" else torch.bfloat16
    fake_card.pretend(fake_card.EFFICIENT if target == "sm_75" else fake_card.FLASH)
    pretend_triton_card(target)
    without_loss_scaling()
    SIZES["gpt2"]["n_layer"] = layers
    compilation = Compilation(target, str(dtype).removeprefix("torch."))
    for stage in ladder.STAGES:
        if stage.short in stages:
            compilation.begin(stage.short)
            try:
                fake_card.run_stage(stage.name, fake_card.settings(16, dtype, compiled=True), NoLog)
            except Exception as error:
                compilation.errors.append(first_line(error))
            compilation.print_row()


class NoLog:
    """Takes the place of StepLog."""

    def __init__(self, args, model, loader, tokens_per_step):
        pass

    def step(self, loss, **figures):
        pass

    def finish(self, model):
        pass


class Compilation:
    """Takes the place of torch.compile's backend, and notes what it compiles for the stage that is running."""

    def __init__(self, target, dtype):
        self.target, self.dtype = target, dtype
        self.stage_of_graph = {}  # {text of a graph: the first stage that had it}
        compile_by_default = torch.compile
        torch.compile = lambda model: compile_by_default(model, backend=self.compile_model)
        note_kernels(self)
        note_matmuls_to_time(self)

    def begin(self, stage):
        """Begin the row of a stage."""
        self.stage = stage
        self.began = time.monotonic()
        self.same_as = []  # for each graph, the stage that had it before, or None
        self.kernels = []  # for each graph that was compiled, how many
        self.built_for = set()
        self.rows = set()
        self.to_time = 0
        self.errors = []
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    def compile_model(self, model, inputs):
        """inductor's own entry, which traces forward and backward, changes them, and hands over each graph."""
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(model, inputs, inner_compile=self.compile_graph)

    def compile_graph(self, graph, inputs, **options):
        """Compile a graph, unless an earlier stage had it. Returns a function that runs it on fake tensors."""
        from torch._inductor.compile_fx import compile_fx_inner

        text = text_of(graph)
        same_as = self.stage_of_graph.setdefault(text, self.stage)
        self.same_as.append(same_as if same_as != self.stage else None)
        unchanged = copy.deepcopy(graph)  # compiling changes it
        if same_as == self.stage:
            self.kernels.append(0)
            compile_fx_inner(graph, inputs, **options)

        def run(inputs):
            return unchanged(*inputs)

        run._boxed_call = True  # it takes its inputs in one list
        return run

    def print_row(self):
        """Print the row of the stage."""
        kernels = " + ".join(str(count) for count in self.kernels)
        if self.same_as and None not in self.same_as:
            kernels = f"the graphs of {', '.join(sorted(set(self.same_as)))}"
        fused = torch._dynamo.utils.counters["inductor"]["fuse_attention"]
        cells = [self.target, self.dtype, self.stage, kernels, ", ".join(sorted(self.built_for)), str(fused)]
        cells += [", ".join(sorted(self.rows)), str(self.to_time), f"{time.monotonic() - self.began:.0f}"]
        cells.append("; ".join(self.errors) or "none")
        print("|", " | ".join(cells), "|", flush=True)


def text_of(graph):
    """A graph's code with the dtype, the shape and the strides of its inputs. Equal texts are equal programs."""
    inputs = []
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            value = (value.dtype, tuple(value.shape), value.stride())
        inputs.append(value)
    return f"{inputs}\n{graph.code}"


def first_line(error):
    """An exception as a line for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".replace("|", "/")


def note_kernels(compilation):
    """Note each Triton kernel with its target, the errors of its variants, and the rows of the logits."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    compile_kernel = AsyncCompile.triton
    compile_variant = CachingAutotuner._precompile_config
    generate = GraphLowering.codegen

    def noting_kernel(self, name, source, *args, **kwargs):
        kernel = compile_kernel(self, name, source, *args, **kwargs)
        compilation.kernels[-1] += 1
        for result in kernel.compile_results:
            compilation.built_for.add(re.search(r"\.target (\w+)", result.kernel.asm["ptx"])[1])
        return kernel

    def noting_errors(self, config):
        try:
            return compile_variant(self, config)
        except Exception as error:  # inductor goes on with the other variants
            compilation.errors.append(first_line(error))
            raise

    def noting_rows(self):
        wrapper, kernels = generate(self)
        logits = rf"empty_strided_cuda\(\(\d+, (?:{VOCAB}|50304)\), \((\d+), 1\)"
        compilation.rows |= set(re.findall(logits, wrapper.value))
        return wrapper, kernels

    AsyncCompile.triton = noting_kernel
    CachingAutotuner._precompile_config = noting_errors
    GraphLowering.codegen = noting_rows


def note_matmuls_to_time(compilation):
    """Count the matmuls for which pad_mm would ask the card whether padding pays, and pad none."""
    from torch._inductor.fx_passes import pad_mm

    def leave_as_it_is(match, left, right, operation, input=None):
        compilation.to_time += 1
        return False

    pad_mm._should_pad = leave_as_it_is


def without_loss_scaling():
    """Switch every GradScaler off: it asks for the value of a number, and no fake tensor has one."""
    scaler = torch.amp.GradScaler
    torch.amp.GradScaler = lambda device, enabled: scaler(device, enabled=False)


class FakeDriver:
    """What Triton asks its driver: for which target to compile."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return fake_card.CARD


def pretend_triton_card(target):
    """Let inductor and Triton in this process take a card of this target as theirs, and start no kernel."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.runtime.driver import driver

    name, multiprocessors, threads, shared_memory = CARDS[target]
    capability = int(target.removeprefix("sm_"))
    card = SimpleNamespace(
        name=name,
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=multiprocessors,
        max_threads_per_multi_processor=threads,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=shared_memory,
        warp_size=32,
        total_memory=16 * 2**30,
        gcnArchName="",
    )
    driver.set_active(FakeDriver(capability))
    triton_helpers.set_driver_to_gpu = lambda: None
    for interface in (CudaInterface, CudaInterface.Worker):
        interface.get_device_properties = staticmethod(lambda device=None: card)
        interface.current_device = staticmethod(lambda: 0)
    CudaInterface.get_compute_capability = staticmethod(lambda device=None: capability)
    CudaInterface.is_available = staticmethod(lambda: True)
    CudaInterface.device_count = staticmethod(lambda: 1)
    CudaInterface.is_triton_capable = staticmethod(lambda device=None: True)
    CudaInterface.raise_if_triton_unavailable = staticmethod(lambda device=None: None)
    CudaInterface.is_bf16_supported = staticmethod(lambda including_emulation=False: capability >= 80)
    torch.cuda.get_device_properties = lambda device=None: card
    torch.cuda.get_device_capability = lambda device=None: (card.major, card.minor)
    torch.cuda.current_device = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.version.cuda = "13.0"  # of torch 2.13.0's CUDA build
    CachingAutotuner._make_launchers = lambda self: None  # which load a kernel onto the card
    CachingAutotuner._dynamic_scale_rblock = lambda self: None  # which look at the loaded kernel
    config.use_static_triton_launcher = False
    config.compile_threads = 1  # a worker would ask for a card of its own
    config.fx_graph_cache = False
    keep_constants_on_cpu()


def keep_constants_on_cpu():
    """Let inductor's constant folding, which computes with tensors of one number, do that on the CPU."""
    library = torch.library.Library("aten", "IMPL")

    def full(size, value, dtype=None, layout=None, device=None, pin_memory=None):
        return torch.full(size, value, dtype=dtype)

    def scalar_tensor(value, dtype=None, layout=None, device=None, pin_memory=None):
        return torch.scalar_tensor(value, dtype=dtype)

    library.impl("full", full, "CUDA")
    library.impl("scalar_tensor", scalar_tensor, "CUDA")
    keep_constants_on_cpu.library = library  # what is registered goes with it


if __name__ == "__main__":
    main()
