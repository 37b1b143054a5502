"""What this machine is: which device a run takes, what the device does natively, and how much it holds."""

import contextlib
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path

import torch

from data import InputError

NO_CARD = "this machine has no NVIDIA card, or its driver is not installed"
COMPILERS = ["g++", "clang++", "gcc", "clang"]
LARGEST_NUMBER = 65535  # that torchrun's variables can hold: the last port, and more ranks than a run has


def find_device(name=None):
    """Return the device that a run asked for by name, or the best one of this machine when it named none.

    name: "cuda", "cuda:N", "mps" or "cpu". "cuda" without a number is the card that LOCAL_RANK numbers, so
    that each process of torchrun takes its own. Raises InputError for a device that is not there or can't be
    used; the message lists those that can.
    """
    if not name:
        return best_device()
    match = re.fullmatch(r"(cuda|mps|cpu)(?::(\d+))?", name)
    kind = match[1] if match else None
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "mps" and torch.backends.mps.is_available():
        return torch.device("mps")
    # CUDA is asked last: the question opens a context on the card, which other devices have no use for.
    problem = cuda_problem()
    if kind == "cuda" and problem is None:
        return cuda_device(match[2])
    reason = problem if kind == "cuda" else "this machine has no such device"
    names = ", ".join(usable_devices(with_cuda=problem is None))
    raise InputError(f"--device {name}: {reason}; pass one of {names}")


def best_device():
    """Return the fastest device of this machine; print a line when it has a card that can't be used."""
    problem = cuda_problem()
    best = usable_devices(with_cuda=problem is None)[0]
    if problem is not None and problem != NO_CARD:
        print(f"cuda: {problem}; using {best}", file=sys.stderr)
    if best == "cuda":
        return cuda_device()
    return torch.device(best)


def usable_devices(with_cuda):
    """Return the names of this machine's devices, the fastest first. with_cuda: whether CUDA works here."""
    names = []
    if with_cuda:
        names.append("cuda")
    if torch.backends.mps.is_available():
        names.append("mps")
    names.append("cpu")
    return names


def cuda_device(number=None):
    """Return the CUDA device of this number, a text, or of LOCAL_RANK. Raises InputError if it's missing."""
    count = torch.cuda.device_count()
    if number is None:
        index = environment_number("LOCAL_RANK", 0)
        if index >= count:
            problem = f"LOCAL_RANK is {index}, and this machine has {count} CUDA devices"
            raise InputError(f"{problem}: start a process for each of them, --nproc_per_node={count}")
    else:
        index = int(number)
        if index >= count:
            raise InputError(f"--device cuda:{index} is not there: pass one of cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def cuda_problem():
    """Return why CUDA can't be used here, with the remedy, or None when it can."""
    with warnings.catch_warnings(action="ignore"):  # of what is said below in one line
        works = torch.cuda.is_available()
    if works:
        return kernels_problem(torch.cuda.get_device_capability())
    if not has_nvidia_card():
        return NO_CARD
    if not torch.version.cuda:
        return "this torch is a CPU build: install PyTorch's CUDA build, and pass PY=python3 to make"
    reason = cuda_error()
    return f"{reason}: {cuda_remedy(reason)}"


def has_nvidia_card():
    """Tell whether this machine has a card with NVIDIA's driver, by the driver's file or by nvidia-smi."""
    return bool(read_text("/proc/driver/nvidia/version") or command_output(["nvidia-smi", "-L"]))


def cuda_error():
    """Return the first line of what torch raises when it starts CUDA, without its advice; CUDA must not work."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).split("\n")[0]
        return first_line.split(" Please ")[0].removesuffix(".")
    return "torch finds no CUDA device"


def cuda_remedy(reason):
    """Return what can be done where torch doesn't start CUDA for this reason."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if "No CUDA GPUs" in reason and visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r} and hides the card, unset it"
    if "Error 802" in reason:
        return "start NVIDIA's fabric manager (systemctl start nvidia-fabricmanager)"
    if "too old" in reason:
        return "update the driver, or install a torch for CUDA 12.6"
    if "no NVIDIA driver" in reason:
        return "install the driver, or start the container with --gpus all"
    return "restart the machine, or update the driver"


def refuse_unusable_card():
    """Raise InputError where this machine has a card that can't be used: a bench would measure the CPU instead."""
    problem = cuda_problem()
    if problem is not None and problem != NO_CARD:
        raise InputError(f"the card can't be used: {problem}; or pass --device cpu to measure the CPU")


def kernels_problem(capability):
    """Return why this torch can't compute on a card, with the remedy, or None when it can or nothing tells.

    capability: the card's compute capability, (major, minor). A kernel, sm_NN, runs on cards of its own major
    version whose minor version is its own or a later one. PTX, compute_NN, is compiled for the card when it
    is first used, and runs on its own capability and every later one.
    """
    built_for = []
    for name in torch.cuda.get_arch_list():
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name)  # sm_75, sm_90a, sm_120, compute_120
        if not match:
            continue
        built = (int(match[2]), int(match[3]))
        is_ptx = match[1] == "compute"
        if built <= capability and (is_ptx or built[0] == capability[0]):
            return None
        built_for.append(built)
    if not built_for:
        return None  # ROCm's names are others
    age = "a newer" if capability > max(built_for) else "an older"
    major, minor = capability
    return f"this torch has no kernels for compute capability {major}.{minor}: install one for {age} CUDA"


def environment_number(name, default):
    """Return the whole number in an environment variable that torchrun sets, or the default when it is unset.

    Raises InputError when the variable holds anything else, or more than LARGEST_NUMBER.
    """
    value = os.environ.get(name)
    if value is None:
        return default
    remedy = "unset it, or start the run with torchrun"
    if not value.isdecimal():
        raise InputError(f"the environment variable {name} is {value!r}: {remedy}")
    number = int(value)
    if number > LARGEST_NUMBER:
        raise InputError(f"the environment variable {name} is {number}, beyond {LARGEST_NUMBER}: {remedy}")
    return number


def is_rank_0():
    """Tell whether this is the one process of a run that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def world_size():
    """Return how many processes torchrun started for this run; 1 without torchrun.

    Raises InputError when WORLD_SIZE is no number.
    """
    return environment_number("WORLD_SIZE", 1)


def local_world_size():
    """Return how many processes of this run are on this machine; 1 without torchrun.

    Raises InputError when LOCAL_WORLD_SIZE is no number.
    """
    return environment_number("LOCAL_WORLD_SIZE", 1)


def native_amp_dtype(device):
    """Return the 16-bit dtype that a device multiplies in hardware, bfloat16 first; float32 if none."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        if torch.cuda.get_device_capability(device) >= (7, 0):
            return torch.float16
        return torch.float32
    if device.type == "mps":
        if torch.backends.mps.is_macos_or_newer(14, 0):
            return torch.bfloat16
        return torch.float16
    if cpu_has_bfloat16():
        return torch.bfloat16
    return torch.float32


def cpu_has_bfloat16():
    """Tell whether this CPU multiplies bfloat16 in hardware."""
    if platform.machine() == "x86_64":
        return torch.cpu._is_avx512_bf16_supported()  # CPUs with AMX have AVX512-BF16 too
    if " bf16" in read_text("/proc/cpuinfo"):  # Arm under Linux
        return True
    return command_output(["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]) == "1"  # Arm under macOS


def compile_problem(device, amp_dtype=torch.float32):
    """Return why torch.compile can't work on a device, with the remedy, or None when it should.

    amp_dtype: autocast's. This looks at what is installed and compiles nothing.
    """
    if device.type == "mps":
        if torch.__version__ < "2.13":  # a TorchVersion: it compares number by number
            reason = "torch.compile on MPS computes wrong numbers before torch 2.13 (pytorch issue 191976)"
            return f"{reason}: update torch"
        return None
    if device.type == "cpu" and (" " in torch.__file__ or " " in tempfile.gettempdir()):
        reason = "it can't build where PyTorch or the folder for temporary files has a blank in its path"
        return f"{reason}: move them"
    if device.type == "cpu" and not has_compiler():
        return "no C++ compiler found: install g++ (Linux) or Xcode's command line tools (macOS)"
    if device.type == "cuda":
        problem = triton_problem(device, amp_dtype)
        if problem:
            return problem
    return headers_problem()


def has_compiler():
    """Tell whether a compiler that torch.compile could call for the CPU is on the PATH."""
    names = [os.environ.get("CXX"), os.environ.get("CC"), *COMPILERS]
    return any(name and shutil.which(name) for name in names)


def headers_problem():
    """Return why the compiler can't build a module that Python loads, with the remedy, or None where it can."""
    if sys.platform == "darwin":
        return None  # a Python of macOS has its headers, though not always in the folder that sysconfig names
    headers = sysconfig.get_path("include", scheme="posix_prefix")  # the default is another one in Debian
    if not Path(headers, "Python.h").exists():
        return f"Python.h is not in {headers}: install python3-dev"
    return None


def triton_problem(device, amp_dtype):
    """Return why Triton, which torch.compile needs for CUDA, can't work here, with the remedy, or None."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 7:
        return f"Triton needs a GPU of compute capability 7.0 or more, this one has {major}.{minor}"
    if major < 8 and amp_dtype == torch.bfloat16:  # torch would only warn, and run the model as it is
        reason = f"torch.compile skips bfloat16 on a card of compute capability {major}.{minor}"
        return f"{reason}: pass --amp-dtype float16"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed: pip install triton"
    compiler = os.environ.get("CC")
    if compiler and not shutil.which(compiler):
        return f"Triton finds no C compiler: CC is {compiler!r}, unset it"
    if not (compiler or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler: install gcc"
    return None


def is_wsl():
    """Tell whether this is Linux inside Windows, whose kernel is Microsoft's."""
    return "microsoft" in platform.release().lower()


def has_tf32(device):
    """Tell whether a device multiplies float32 matrices in TF32 where that is allowed."""
    return device.type == "cuda" and torch.cuda.is_tf32_supported()


def environment(device):
    """Return what two records must share to be compared, hardware and versions, as a flat dict for JSON."""
    cuda = device.type == "cuda"
    return dict(
        device=device.type,
        device_name=device_name(device),
        threads=torch.get_num_threads(),
        cores=cores(),
        tf32=has_tf32(device),
        native_dtype=str(native_amp_dtype(device)).removeprefix("torch."),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda if cuda else None,
        cudnn=torch.backends.cudnn.version() if cuda else None,
        driver=driver_version() if cuda else None,
        hip=torch.version.hip if cuda else None,
    )


def device_name(device):
    """Return the hardware's own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    match = re.search(r"model name\s*: (.*)", read_text("/proc/cpuinfo"))
    if match:
        return match[1].strip()
    name = command_output(["sysctl", "-n", "machdep.cpu.brand_string"])
    return name or platform.processor() or platform.machine()


def driver_version():
    """Return the version of NVIDIA's driver as a text, "570.86.10", or None when nothing tells."""
    # The file comes first, since nvidia-smi can take longer than command_output waits.
    report = read_text("/proc/driver/nvidia/version")
    if not report:
        report = command_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    match = re.search(r"\b\d{3}\.\d[\d.]*", report)
    return match[0] if match else None


def card_state(device):
    """Return the clock, the power, the temperature and the power limit of a CUDA card at this moment, a dict.

    sm_clock: MHz of its multiprocessors. power, power_limit: watts. temperature: degrees Celsius. A figure is
    None where nvidia-smi does not tell it.
    """
    query = "clocks.sm,power.draw,temperature.gpu,power.limit"
    answer = ""
    # nvidia-smi numbers the cards in another order than torch, and knows nothing of CUDA_VISIBLE_DEVICES
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is not None:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", f"GPU-{uuid}"]
        answer = command_output(command)
    figures = [figure_or_none(text) for text in answer.split(",")]
    if len(figures) != 4:
        figures = [None] * 4
    sm_clock, power, temperature, power_limit = figures
    return dict(sm_clock=sm_clock, power=power, temperature=temperature, power_limit=power_limit)


def figure_or_none(text):
    """Return the number that a text holds, or None for any other text, such as "[N/A]"."""
    text = text.strip()
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def cores():
    """Return how many CPU cores this process may use. Linux tells, and so does a container of its own limit."""
    count = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    match = re.match(r"(\d+) (\d+)", read_text("/sys/fs/cgroup/cpu.max"))  # "max 100000" where there is no limit
    if match:
        quota, period = int(match[1]), int(match[2])  # microseconds on all cores together, in each period
        count = max(1, min(count, quota // period))
    return count


def total_memory(device):
    """Return an accelerator's memory in bytes: all of a card's, or what macOS advises a process to use."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return torch.cuda.get_device_properties(device).total_memory


def free_share(device):
    """Return the share of a card's memory that is free, from 0 to 1. This opens a context on the card."""
    free, total = torch.cuda.mem_get_info(device)
    return free / total


def peak_memory(device):
    """Return (bytes, name of the meter): the most that this process held since reset_peak_memory().

    CUDA counts what tensors held, a CPU what the whole process had in memory. MPS keeps no peak, so it tells
    what its driver holds now.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "peak allocated"
    if device.type == "mps":
        return torch.mps.driver_allocated_memory(), "driver, sampled"
    peak = proc_bytes("/proc/self/status", "VmHWM")
    if peak is not None:
        return peak, "peak RSS"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":
        peak *= 1024  # macOS counts bytes, all others kilobytes
    return peak, "peak RSS with start-up"


def reset_peak_memory(device):
    """Let peak_memory() start again at what is held now, where the meter allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if device.type == "cpu":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux sets VmHWM to VmRSS, see proc(5)


def resident_memory(pid):
    """Return the bytes that a process holds in memory now; 0 if it has ended, or the system doesn't tell."""
    resident = proc_bytes(f"/proc/{pid}/status", "VmRSS")
    if resident is not None:
        return resident
    kilobytes = command_output(["ps", "-o", "rss=", "-p", str(pid)])
    return 1024 * int(kilobytes or 0)


def free_memory():
    """Return the bytes that can be taken without swapping.

    Linux tells, and so does a container of its own limit. On another system it is half of all there is.
    """
    free = proc_bytes("/proc/meminfo", "MemAvailable")
    if free is not None:
        limit = read_text("/sys/fs/cgroup/memory.max").strip()
        if limit.isdecimal():  # "max" where there is no limit
            used = int(read_text("/sys/fs/cgroup/memory.current"))
            free = min(free, int(limit) - used)
        return free
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def proc_bytes(path, name):
    """Return the bytes in the line "NAME: 123 kB" of a file under /proc, or None when it has no such line."""
    match = re.search(rf"{name}:\s+(\d+)", read_text(path))
    return 1024 * int(match[1]) if match else None


def read_text(path):
    """Return the text of a file, or "" when this system has no such file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def command_output(command):
    """Return what a command prints, stripped, or "" if it fails, takes more than 10 s or isn't installed."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
