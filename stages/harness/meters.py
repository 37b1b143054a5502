"""What is measured of this machine while it trains, and what a record says of the machine."""

import contextlib
import os
import platform
import re
from pathlib import Path

import torch

from . import machine


def synchronize(device):
    """Wait until a device has done all that it was asked to do. It need not be the current one."""
    if device.type == "mps":  # there is only one
        torch.mps.synchronize()
    else:
        torch.get_device_module(device).synchronize(device)


# Memory


def free_memory():
    """Return the bytes of memory that can be taken without swapping; 0 if the system has no such meter.

    The limits of the cgroups around this process count, too, for example those of a container or of a cluster's job.
    """
    free = proc_bytes("/proc/meminfo", "MemAvailable") or 0
    for folder in machine.cgroup_folders():
        limit = machine.read_text(folder / "memory.max").strip()
        taken = re.search(r"^anon (\d+)", machine.read_text(folder / "memory.stat"), re.MULTILINE)  # no cached files
        if taken and limit.isdecimal():  # "max" without a limit
            free = min(free, int(limit) - int(taken[1]))
    return free


def peak_memory(device):
    """Return (bytes, name of the meter): the most that this process held since reset_peak_memory().

    On CUDA it is what tensors held, on a CPU what the whole process had in memory. MPS keeps no peak, so there it is
    what the driver holds now. Without a meter, bytes is None.
    """
    if device.type == "mps":
        return torch.mps.driver_allocated_memory(), "driver, sampled"
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "peak allocated"
    peak = proc_bytes("/proc/self/status", "VmHWM")
    return peak, "no meter" if peak is None else "peak RSS"


def reset_peak_memory(device):
    """Let peak_memory() start again at what is held now, if the meter allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if device.type == "cpu":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux sets VmHWM to VmRSS, see proc(5)


def proc_bytes(path, name):
    """Return the bytes in the line "NAME: 123 kB" of a file under /proc, or None if it has no such line."""
    match = re.search(rf"{name}:\s+(\d+)", machine.read_text(path))
    return 1024 * int(match[1]) if match else None


# What a record says of the machine


def environment(device):
    """Return the hardware, the versions, and what in the environment changes the speed, a dict for JSON."""
    cuda = device.type == "cuda"
    driver = ""
    if cuda:
        driver = machine.command_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return {
        "device": device.type,
        "device_name": machine.device_name(device),
        "threads": torch.get_num_threads(),
        "cores": machine.cores(),
        "load": os.getloadavg()[0] / os.cpu_count(),  # of the whole machine
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "driver": driver.split("\n")[0] or None,
        "slow": machine.variables_set(machine.CHANGE_SPEED),
    }


def commit(folder):
    """Return the commit of a checkout, with a "+" if tracked files differ from it; "" if the folder is no checkout."""
    if not Path(folder, ".git").exists():  # git would look for a repository around the folder
        return ""
    describe = ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    without = [f"-u{name}" for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")]  # they name another repository
    return machine.command_output(["env", *without, "git", "-C", str(folder), *describe])
