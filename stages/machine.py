"""What machine this is: its devices, what they do natively, and how a record names all that."""

import contextlib
import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from data import InputError


def find_device(name=None):
    """The torch.device by this name, or the best one of this machine. Raises InputError where it is not there."""
    there = ["cpu"]
    if torch.backends.mps.is_available():
        there.insert(0, "mps")
    for kind in ("xpu", "cuda"):
        if getattr(torch, kind).is_available():
            there.insert(0, kind)
    match = re.fullmatch(r"(cuda|xpu|mps|cpu)(?::(\d+))?", name or there[0])
    if not match:
        raise InputError(f"--device {name} is unknown: pass one of {', '.join(there)}")
    kind = match[1]
    if kind not in there:
        raise InputError(f"--device {name}: this machine or this torch has none; pass one of {', '.join(there)}")
    if kind in ("cpu", "mps"):
        return torch.device(kind)
    # each rank of torchrun takes its own device, unless one was named by number
    index = int(match[2] or os.environ.get("LOCAL_RANK", "0"))
    count = getattr(torch, kind).device_count()
    if index >= count:
        raise InputError(f"--device {kind}:{index} is not there: this machine has {kind}:0 to {kind}:{count - 1}")
    return torch.device(kind, index)


def fitting_batch_size(device):
    """The largest power of two, at most 16, that s01 fits into an accelerator's memory at gpt2 and T 1024."""
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
    else:
        total = getattr(torch, device.type).get_device_properties(device).total_memory
    # float32 with attention written out: about 2.5 GB of weights and AdamW, 3.3 GB of activations a sequence
    return next((b for b in (16, 8, 4, 2) if 2.5e9 + 3.3e9 * b <= total), 1)


def native_amp_dtype(device):
    """The 16-bit type that this device multiplies in hardware, bfloat16 before float16; float32 if neither."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        return torch.float16 if torch.cuda.get_device_capability(device) >= (7, 0) else torch.float32
    if device.type == "mps":
        return torch.bfloat16 if torch.backends.mps.is_macos_or_newer(14, 0) else torch.float16
    if device.type == "xpu":
        return torch.bfloat16
    if platform.machine().lower() in ("x86_64", "amd64"):
        native = torch.cpu._is_avx512_bf16_supported()  # AMX CPUs have it too
    elif sys.platform == "darwin":
        native = command_output(["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]) == "1"
    else:
        native = " bf16" in _cpuinfo()
    return torch.bfloat16 if native else torch.float32


def compile_problem(device):
    """Why torch.compile can't work here, with the remedy, or None. A look at the machine, not a trial."""
    if device.type in ("cpu", "cuda"):
        names = [os.environ.get("CXX"), os.environ.get("CC"), "g++", "clang++", "gcc", "clang", "cl"]
        if not any(name and shutil.which(name) for name in names):
            return "no C++ compiler found: install g++ (Linux), Xcode's command line tools (macOS) or MSVC (Windows)"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 7:
            return f"Triton needs a GPU of compute capability 7.0 or more, this one has {major}.{minor}"
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton is not installed: pip install triton (Linux) or triton-windows"
    return None


def cores():
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def device_name(device):
    """The hardware's own name."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).get_device_name(device)
    match = re.search(r"model name\s*: (.*)", _cpuinfo())
    if match:
        return match[1].strip()
    return command_output(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.processor() or platform.machine()


def _cpuinfo():
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text()
    return ""


def keep_freed_memory():
    """Let glibc keep what is freed for the next tensor, as PyTorch's own allocator does on a GPU.

    By default it hands every large block back to the system, which then has to clear its pages anew for each
    activation of each step: up to a third of a step on a CPU, and the most variable part. It costs some memory. Does
    nothing with another C library. mallopt(3) documents both parameters.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block of its own for a large tensor
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink


def environment(device):
    """What two records must share to be compared: hardware and versions, as a flat dict for JSON."""
    cuda = device.type == "cuda"
    driver = command_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) if cuda else ""
    return dict(
        device=device.type,
        device_name=device_name(device),
        threads=torch.get_num_threads(),
        cores=cores(),
        capability=torch.cuda.get_device_capability(device)[0] if cuda else None,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda if cuda else None,
        cudnn=torch.backends.cudnn.version() if cuda else None,
        driver=driver.splitlines()[0] if driver else None,
    )


def command_output(command):
    """What a command prints, stripped; nothing where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=Path(__file__).parent)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def peak_memory(device):
    """(bytes, name of the meter): the most this process held since reset_peak_memory(); None where nothing tells.

    CUDA and XPU: what tensors held. MPS has no peak, so what the driver holds now. CPU: the resident set.
    """
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).max_memory_allocated(device), "peak allocated"
    if device.type == "mps":
        return torch.mps.driver_allocated_memory(), "driver, sampled"
    with contextlib.suppress(OSError, TypeError):
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]), "peak RSS"
    try:
        import resource
    except ImportError:  # Windows
        return None, "no meter"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024), "peak RSS with start-up"


def reset_peak_memory(device):
    """Let the peak begin again at what is held now, where the meter allows it."""
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: sets VmHWM to the resident set of now
