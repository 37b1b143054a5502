"""What machine this is: its devices, what they do natively, what they hold, and how a record names all that."""

import contextlib
import ctypes
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from data import InputError
from model import s01_bytes

NO_CARD = "this machine has no NVIDIA card, or its driver is not installed"


def find_device(name=None):
    """The torch.device by this name, or the best one of this machine. Raises InputError where it is not there."""
    # asking after CUDA opens a context on the card, which a CPU run has no use for
    problem = cuda_problem() if not name or name.startswith("cuda") else NO_CARD
    there = ["cuda"] * (problem is None) + ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    match = re.fullmatch(r"(cuda|mps|cpu)(?::(\d+))?", name or there[0])
    if not match or match[1] not in there:
        why = problem if match and match[1] == "cuda" else "this machine has none"
        raise InputError(f"--device {name}: {why}; pass one of {', '.join(there)}")
    if not name and problem not in (None, NO_CARD):
        print(f"cuda: {problem}; using {there[0]}", file=sys.stderr)
    if match[1] != "cuda":
        return torch.device(match[1])
    # each rank of torchrun takes its own device, unless one was named by number
    index, count = int(match[2] or environment_number("LOCAL_RANK", 0)), torch.cuda.device_count()
    if index >= count:
        raise InputError(f"--device cuda:{index} is not there: this machine has cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def cuda_problem():
    """Why CUDA can't be used here, with the remedy, or None where it can."""
    if torch.cuda.is_available():
        (major, minor), archs = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
        kernels = [int(arch[3:5]) for arch in archs if re.match(r"sm_\d\d\D?$", arch)]  # sm_90a, and not sm_100
        if kernels and major < 10 and not any(k // 10 == major and k % 10 <= minor for k in kernels):
            return f"this torch has no kernels for compute capability {major}.{minor}: install one for an older CUDA"
        return None
    if not command_output(["nvidia-smi", "-L"]):
        return NO_CARD
    if not torch.version.cuda:
        return "this torch is a CPU build: install PyTorch's CUDA build, and pass PY=python3 to make"
    return f"the driver is too old for CUDA {torch.version.cuda}: update it, or install a torch for an older CUDA"


def environment_number(name, default):
    """The number in an environment variable that torchrun sets. Raises InputError where it holds something else."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise InputError(f"the environment variable {name} is {value!r}: unset it, or start the run with torchrun")
    return int(value)


def fitting_batch_size(device):
    """The largest power of two, at most 16, that s01 fits into an accelerator's memory at gpt2 and T 1024."""
    total = torch.mps.recommended_max_memory() if device.type == "mps" else torch.cuda.mem_get_info(device)[1]
    return next((b for b in (16, 8, 4, 2) if s01_bytes(b) <= 0.9 * total), 1)  # a tenth stays free for libraries


def native_amp_dtype(device):
    """The 16-bit type that this device multiplies in hardware, bfloat16 before float16; float32 if neither."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        return torch.float16 if torch.cuda.get_device_capability(device) >= (7, 0) else torch.float32
    if device.type == "mps":
        return torch.bfloat16 if torch.backends.mps.is_macos_or_newer(14, 0) else torch.float16
    if platform.machine().lower() in ("x86_64", "amd64"):
        native = torch.cpu._is_avx512_bf16_supported()  # AMX CPUs have it too
    else:  # Linux answers the first, macOS the second
        native = " bf16" in _read("/proc/cpuinfo")
        native = native or command_output(["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]) == "1"
    return torch.bfloat16 if native else torch.float32


def compile_problem(device):
    """Why torch.compile can't work here, with the remedy, or None. A look at the machine, not a trial."""
    if device.type == "mps" and torch.__version__ < "2.13":
        return "torch.compile on MPS computes wrong numbers before torch 2.13 (pytorch issue 191976): update torch"
    if device.type == "cpu" and " " in f"{torch.__file__}{tempfile.gettempdir()}":
        return "it can't build where PyTorch or the folder for temporary files has a blank in its path: move them"
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
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if match := re.search(r"model name\s*: (.*)", _read("/proc/cpuinfo")):
        return match[1].strip()
    return command_output(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.processor() or platform.machine()


def _read(path):
    """The text of a file; nothing where this system has no such file."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


def keep_freed_memory():
    """Let glibc keep what is freed for the next tensor, as PyTorch's own allocator does on a GPU. See mallopt(3)."""
    # else the system clears the pages of each activation again: up to a third of a step, and its most variable part
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block of its own for a large tensor
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink


def environment(device):
    """What two records must share to be compared: hardware, versions and what is native, as a flat dict for JSON."""
    cuda = device.type == "cuda"
    # from a file where there is one, since nvidia-smi may time out
    driver = _read("/proc/driver/nvidia/version") or command_output(["nvidia-smi", "-q"]) if cuda else ""
    return dict(
        device=device.type,
        device_name=device_name(device),
        threads=torch.get_num_threads(),
        cores=cores(),
        tf32=cuda and torch.cuda.is_tf32_supported(),
        native_dtype=str(native_amp_dtype(device)).removeprefix("torch."),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda if cuda else None,
        cudnn=torch.backends.cudnn.version() if cuda else None,
        driver=next(iter(re.findall(r"\b\d{3}\.\d[\d.]*", driver)), None),
    )


def command_output(command):
    """What a command prints, stripped; nothing where it fails or is not there."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    return ""


def peak_memory(device):
    """(bytes, name of the meter): the most this process held since reset_peak_memory(); None where nothing tells.

    CUDA: what tensors held. MPS has no peak, so what the driver holds now. CPU: the resident set.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "peak allocated"
    if device.type == "mps":
        return torch.mps.driver_allocated_memory(), "driver, sampled"
    if peak := re.search(r"VmHWM:\s+(\d+)", _read("/proc/self/status")):
        return 1024 * int(peak[1]), "peak RSS"
    with contextlib.suppress(ImportError):  # Windows has no such module
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024), "peak RSS with start-up"
    return None, "no meter"


def reset_peak_memory(device):
    """Let the peak start again at what is held now, where the meter allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: sets VmHWM to the resident set of now


def resident_memory(pid):
    """Bytes that a process holds in memory now; 0 where this system does not tell."""
    held = re.search(r"VmRSS:\s+(\d+)", _read(f"/proc/{pid}/status"))
    return 1024 * int(held[1] if held else command_output(["ps", "-o", "rss=", "-p", str(pid)]) or 0)


def free_memory():
    """Bytes that can be taken without swapping, as far as this system tells; None where it does not."""
    if free := re.search(r"MemAvailable:\s+(\d+)", _read("/proc/meminfo")):
        # a container may have less than its machine
        limit, used = (_read(f"/sys/fs/cgroup/memory.{x}").strip() for x in ("max", "current"))
        return min(1024 * int(free[1]), int(limit) - int(used) if limit.isdecimal() else math.inf)
    with contextlib.suppress(OSError, AttributeError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None
