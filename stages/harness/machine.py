"""What this machine is: its device, what that can do natively, and what changes its speed."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from .common import AFFINITY, refuse

# Variables of the environment that change what is measured. A stage names them, and so does each page of results.
CHANGE_SPEED = (
    "CUDA_LAUNCH_BLOCKING",  # makes each kernel wait
    "PYTORCH_NO_CUDA_MEMORY_CACHING",  # gives memory back at once
    "CUDA_INJECTION64_PATH",  # follows each kernel, as nsys does
    "ATEN_CPU_CAPABILITY",  # leaves units of a CPU unused
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",  # the same in MKL, which multiplies in float32
    "MKL_CBWR",
    "OMP_THREAD_LIMIT",  # gives fewer threads than PyTorch asks for; with one thread its bfloat16 is wrong
    "OMP_DYNAMIC",
    "PYTHONMALLOC",  # checks each allocation
    "ONEDNN_VERBOSE",  # prints a line for each matmul
    "MKL_VERBOSE",
    "NVIDIA_TF32_OVERRIDE",  # turns TF32 on, or forbids it
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",  # multiplies in bfloat16, as guides for Arm advise
    "DNNL_DEFAULT_FPMATH_MODE",
    "TORCH_COMPILE_DISABLE",  # compiles nothing
    "TORCHDYNAMO_DISABLE",
    "TORCH_COMPILE_OVERRIDE_BACKENDS",  # replaces Inductor
    "TORCHDYNAMO_SUPPRESS_ERRORS",  # hides that a part could not be compiled
)


# The device


def find_device(name):
    """Return the torch.device of this name. For None it is the best one there is: a card, mps, or the CPU.

    Under torchrun each rank takes a card of its own if the name has no number. Exits with one line if this machine has
    no such device.
    """
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0  # an old driver counts cards, too
    devices = [f"cuda:{number}" for number in range(cards)]
    if torch.backends.mps.is_available():
        devices.append("mps")
    devices.append("cpu")
    if name == "cuda" or (name is None and cards):
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    name = name or devices[0]
    if name not in devices:
        reason = why_no_card() or f"pass {' or '.join(devices)}"
        refuse(f"there is no device {name} here: {reason}")
    return torch.device(name)


def why_no_card():
    """Return why PyTorch can't use this machine's card, or None if it can, there is none, or the user has hidden it."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden or not command_output(["nvidia-smi", "--list-gpus"]):
        return None
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # a build without CUDA, or an old driver
        return str(error).split(". ")[0]
    return None


def device_name(device):
    """Return the hardware's own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type not in ("cpu", "mps"):  # a watched script may use a device of another type
        return device.type
    match = re.search(r"model name\s*: (.*)", read_text("/proc/cpuinfo"))
    if match:
        return match[1].strip()
    return command_output(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.machine()


def free_memory_of_card(device):
    """Return the free bytes of a card, or of what macOS advises a process to use."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return torch.cuda.mem_get_info(device)[0]


def memory_of_smallest_card():
    """Return the bytes of the smallest card that the ranks of this node may use, the same number on each of them."""
    return min(torch.cuda.get_device_properties(card).total_memory for card in range(torch.cuda.device_count()))


# What it can do


def units_of(device):
    """Return what a device multiplies in hardware besides float32, a set with any of "bfloat16", "float16", "tf32"."""
    if device.type == "cpu":
        return units_of_cpu()
    if device.type == "mps":
        emulates_bfloat16 = device_name(device).startswith(("Apple M1", "Apple M2"))
        return {"float16"} if emulates_bfloat16 else {"float16", "bfloat16"}
    if device.type != "cuda":
        return set()
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 0):  # Ampere
        return {"float16", "bfloat16", "tf32"}
    return {"float16"} if capability >= (7, 0) else set()


def units_of_cpu():
    """Return what this CPU multiplies in hardware, as units_of() does."""
    units = set()
    # torch 2.11 knows the units of Intel and AMD, and Linux lists those of Arm
    if torch.cpu._is_avx512_bf16_supported() or " bf16" in read_text("/proc/cpuinfo"):
        units.add("bfloat16")
    # on a CPU, PyTorch multiplies in TF32 with the units for float16; torch 2.11 does not list them
    if hasattr(torch.cpu, "get_capabilities") and torch.cpu.get_capabilities().get("amx_fp16"):
        units |= {"float16", "tf32"}
    return units


def native_amp_dtype(device):
    """Return the 16-bit dtype that a device multiplies in hardware, bfloat16 first; float32 if none."""
    units = units_of(device)
    if "bfloat16" in units:
        return torch.bfloat16
    return torch.float16 if "float16" in units else torch.float32


def dtype_name(dtype):
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def compile_problem(device):
    """Return what torch.compile lacks on a device, with the remedy, or None if nothing is missing."""
    if device.type == "mps":  # Metal has a compiler of its own
        return None
    headers = sysconfig.get_path("include", scheme="posix_prefix")  # Debian's default scheme has no Python.h
    if sys.platform == "linux" and not Path(headers, "Python.h").exists():
        return "Python.h is missing: install python3-dev"
    if device.type == "cuda":
        return triton_problem(device)
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # PyTorch tries no other
    if shutil.which(compiler) is None:
        remedy = "unset CXX" if "CXX" in os.environ else "install g++ (Linux) or Xcode's command line tools (macOS)"
        return f"PyTorch finds no C++ compiler {compiler}: {remedy}"  # "ccache g++" is not found, either
    if " " in torch.__file__:  # PyTorch's command for the linker does not quote its own path
        return f"PyTorch's path has a space ({Path(torch.__file__).parent}): move it"
    return None


def triton_problem(device):
    """Return what Triton, which compiles for a card, lacks, or None."""
    if torch.cuda.get_device_capability(device) < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or more"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if "CC" in os.environ and shutil.which(os.environ["CC"]) is None:
        return f"Triton finds no C compiler {os.environ['CC']}: unset CC"
    if "CC" not in os.environ and not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler: install gcc"
    return None


def abilities_of(device):
    """Return what techniques find on a device, as fields of a Seen, a dict."""
    return {
        "can_tf32": "tf32" in units_of(device),
        "amp_dtype": dtype_name(native_amp_dtype(device)),
        "compile_problem": compile_problem(device),
    }


# What this process may use of it


def cores():
    """Return how many CPU cores this process may use, by its affinity and the quotas of the cgroups around it."""
    count = len(AFFINITY) if AFFINITY else os.cpu_count()
    for folder in cgroup_folders():
        quota, _, period = read_text(folder / "cpu.max").partition(" ")  # microseconds of CPU time in a period
        if quota.isdecimal():  # "max" without a quota
            count = min(count, max(1, int(quota) // int(period)))
    return count


def cgroup_folders():
    """Return the folder of this process's cgroup, and all folders above it. A limit in any of them counts.

    With cgroups Linux limits what a container or a cluster's job may use. Only version 2 of them is read.
    """
    path = re.search(r"^0::/(.*)", read_text("/proc/self/cgroup"), re.MULTILINE)
    if path is None:
        return []
    folder = Path("/sys/fs/cgroup", path[1])
    return [folder, *folder.parents]


# Files, variables and commands that may be missing


def variables_set(names):
    """Return "NAME=value" for those of these variables that are in the environment, and not empty."""
    return [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]


def read_text(path):
    """Return the text of a file in UTF-8, or "" if it is not there or may not be read."""
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def command_output(command):
    """Return what a command prints, stripped, or "" if it fails, takes more than 10 s or isn't installed."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
