"""What the harness finds out about a machine, held on fakes: devices, units, compilers, memory."""

from harness import machine

import mmap
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import error_of

CPU = torch.device("cpu")
MPS = torch.device("mps")
CUDA_0 = torch.device("cuda", 0)
CUDA_1 = torch.device("cuda", 1)


@pytest.fixture
def commands(monkeypatch):
    """What a command prints, by its first word; none is installed until a test says so."""
    outputs = {}
    monkeypatch.setattr(machine, "command_output", lambda command: outputs.get(command[0], ""))
    return outputs


@pytest.fixture
def files(monkeypatch):
    """The system's files, their text by their path; there are none until a test says so."""
    texts = {}
    monkeypatch.setattr(machine, "read_text", lambda path: texts.get(path, ""))
    return texts


@pytest.fixture
def cuda(monkeypatch):
    """Two NVIDIA cards that can do everything, until a test changes these attributes."""
    cuda = SimpleNamespace(cards=2, capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda.cards)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: cuda.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    return cuda


def test_rank_0_is_the_first_of_all_nodes(monkeypatch):
    assert machine.is_rank_0()
    assert machine.world_size() == 1
    monkeypatch.setenv("RANK", "1")  # the first process of the second node
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not machine.is_rank_0()
    assert machine.world_size() == 2


@pytest.mark.parametrize("accelerator, device", [(None, CPU), (MPS, MPS), (torch.device("cuda"), CUDA_0)])
def test_without_a_name_the_best_device_is_taken(cuda, monkeypatch, accelerator, device):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    assert machine.find_device() == device


@pytest.mark.parametrize("name, device", [("cuda", CUDA_1), ("cuda:0", CUDA_0), ("cpu", CPU), ("cpu:0", CPU)])
def test_each_process_of_torchrun_takes_its_own_card_unless_one_is_named(cuda, monkeypatch, name, device):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert machine.find_device(name) == device


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:2", "meta", "mps"])
def test_a_device_that_is_not_here_is_refused(cuda, monkeypatch, capsys, name):
    monkeypatch.setattr(torch.mps, "device_count", lambda: 0)
    assert name in error_of(capsys, machine.find_device, name)


def test_more_processes_of_torchrun_than_cards_are_refused(cuda, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert "torch finds 2 devices of that type" in error_of(capsys, machine.find_device, "cuda")


@pytest.mark.parametrize(
    "capability, dtype, tf32",
    [((8, 0), torch.bfloat16, True), ((7, 5), torch.float16, False), ((6, 1), torch.float32, False)],
)
def test_what_a_card_multiplies_natively_is_decided_by_its_own_generation(cuda, capability, dtype, tf32):
    cuda.capability = capability
    assert machine.native_amp_dtype(CUDA_0) == dtype
    assert machine.has_tf32(CUDA_0) == tf32


def test_one_card_for_all_ranks_is_refused(cuda, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = error_of(capsys, machine.find_device, "cuda:0")
    assert line == "error: --device cuda:0 gives all ranks one device: pass --device cuda"


@pytest.mark.parametrize("has_units, dtype", [(False, torch.float32), (True, torch.bfloat16)])
def test_the_native_dtype_of_an_intel_or_amd_cpu_is_what_torch_says(files, monkeypatch, has_units, dtype):
    files["/proc/cpuinfo"] = "flags: avx512f bf16"
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_units)
    assert machine.native_amp_dtype(CPU) == dtype


@pytest.mark.parametrize(
    "cpuinfo, sysctl, dtype",
    [
        ("Features: asimd bf16 i8mm", "", torch.bfloat16),
        ("Features: asimd i8mm", "", torch.float32),
        ("", "1", torch.bfloat16),
        ("", "0", torch.float32),
    ],
)
def test_the_native_dtype_of_an_arm_cpu_is_the_systems_word(files, commands, monkeypatch, cpuinfo, sysctl, dtype):
    files["/proc/cpuinfo"], commands["sysctl"] = cpuinfo, sysctl
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert machine.native_amp_dtype(CPU) == dtype


@pytest.fixture
def toolchain(cuda, monkeypatch):
    """The programs on the PATH, g++ and gcc until a test says otherwise. Python.h is there, and so is Triton."""
    programs = {"g++", "gcc"}
    monkeypatch.setattr(shutil, "which", lambda name: name if name in programs else None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(torch, "__file__", "/lib/torch/__init__.py")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__spec__="found"))
    return programs


@pytest.mark.parametrize("program", ["g++", "clang++", "icpx"])
def test_torch_compile_works_with_any_known_compiler_or_the_one_that_is_named(toolchain, monkeypatch, program):
    assert machine.compile_problem(CUDA_0) is None
    toolchain.clear()
    assert "install g++" in machine.compile_problem(CPU)
    assert machine.compile_problem(CUDA_0) == "Triton finds no C compiler: install gcc"
    assert machine.compile_problem(MPS) is None  # Metal's own is used
    toolchain.add(program)
    monkeypatch.setenv("CXX", "icpx")
    assert machine.compile_problem(CPU) is None


@pytest.mark.parametrize("device", [CPU, CUDA_0], ids=str)
def test_without_pythons_headers_nothing_compiles(toolchain, monkeypatch, device):
    headers = Path(sysconfig.get_path("include", scheme="posix_prefix"))
    monkeypatch.setattr(Path, "exists", lambda path: path != headers / "Python.h")
    assert machine.compile_problem(device) == f"Python.h is not in {headers}: install python3-dev"
    monkeypatch.setattr(sys, "platform", "darwin")  # macOS's own Python keeps it somewhere else
    assert machine.compile_problem(device) is None


def test_a_blank_in_a_path_stops_the_build_for_a_cpu(toolchain, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/my files")
    assert "has a blank in its path" in machine.compile_problem(CPU)
    assert machine.compile_problem(CUDA_0) is None


def test_a_card_needs_triton_which_needs_capability_7(toolchain, cuda, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # as where it is not installed
    assert "pip install triton" in machine.compile_problem(CUDA_0)
    cuda.capability = (6, 1)
    assert "compute capability 7.0 or more" in machine.compile_problem(CUDA_0)


def test_the_environment_of_a_cpu_and_of_a_card(cuda, files, commands, monkeypatch):
    files["/proc/cpuinfo"] = "processor\t: 0\nmodel name\t: A CPU @ 2 GHz \n"
    commands["nvidia-smi"] = "550.54"
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    of_cpu, of_card = machine.environment(CPU), machine.environment(CUDA_0)
    keys = "device device_name threads cores tf32 native_dtype system python torch cuda driver"
    assert list(of_cpu) == keys.split()
    assert (of_cpu["device_name"], of_cpu["threads"], of_cpu["tf32"]) == ("A CPU @ 2 GHz", 3, False)
    assert (of_cpu["native_dtype"], of_cpu["cuda"], of_cpu["driver"]) == ("float32", None, None)
    assert of_cpu.keys() == of_card.keys()
    assert (of_card["device_name"], of_card["tf32"], of_card["native_dtype"]) == ("H100", True, "bfloat16")
    assert (of_card["cuda"], of_card["driver"]) == ("13.0", "550.54")
    files["/proc/driver/nvidia/version"] = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Wed"
    assert machine.environment(CUDA_0)["driver"] == "570.86.10"  # known though nvidia-smi may hang


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak that can be reset")
def test_a_reset_starts_the_peak_of_a_cpu_again():
    machine.reset_peak_memory(CPU)
    before, meter = machine.peak_memory(CPU)
    with mmap.mmap(-1, 100_000_000) as block:  # from the system itself, whatever malloc may keep
        block.write(bytes(100_000_000))
    during, _ = machine.peak_memory(CPU)
    machine.reset_peak_memory(CPU)
    after, _ = machine.peak_memory(CPU)
    assert meter == "peak RSS"
    assert during > before + 90e6
    assert after < during - 90e6


def test_elsewhere_the_peak_of_a_cpu_has_the_start_up_in_it(files, monkeypatch):
    monkeypatch.setattr(machine.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5_000))
    assert machine.peak_memory(CPU) == (5_000, "peak RSS with start-up")  # macOS counts bytes


@pytest.mark.parametrize(
    "limit, free",
    [("max\n", 8_192_000), ("", 8_192_000), ("1000000\n", 600_000), ("900000000\n", 8_192_000)],
)
def test_free_memory_heeds_a_containers_limit(files, limit, free):
    files["/proc/meminfo"] = "MemTotal:       16000 kB\nMemFree:  100 kB\nMemAvailable:    8000 kB\n"
    files["/sys/fs/cgroup/memory.max"] = limit
    files["/sys/fs/cgroup/memory.current"] = "400000\n"
    assert machine.free_memory() == free


def test_files_that_the_system_can_forget_do_not_count_against_a_containers_limit(files):
    files["/proc/meminfo"] = "MemAvailable:    8000 kB\n"
    files["/sys/fs/cgroup/memory.max"], files["/sys/fs/cgroup/memory.current"] = "1000000\n", "400000\n"
    files["/sys/fs/cgroup/memory.stat"] = "active_file 7000\ninactive_file 300000\n"
    assert machine.free_memory() == 900_000


@pytest.mark.parametrize("limit, cores", [("200000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", 8), ("", 8)])
def test_cores_are_those_of_this_process_within_a_containers_limit(files, monkeypatch, limit, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    files["/sys/fs/cgroup/cpu.max"] = limit
    assert machine.cores() == cores


def test_where_linux_does_not_tell_half_the_memory_counts_as_free(files, monkeypatch):
    sizes = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert machine.free_memory() == 2_048_000


def test_a_command_that_fails_hangs_or_is_not_installed_has_no_output(monkeypatch):
    assert machine.command_output([sys.executable, "-c", "print('  two words  ')"]) == "two words"
    assert machine.command_output([sys.executable, "-c", "print('half of it'); raise SystemExit(1)"]) == ""
    assert machine.command_output(["a-command-that-is-not-installed"]) == ""

    def hang(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert machine.command_output(["nvidia-smi"]) == ""


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_says_whether_tracked_files_outside_of_results_differ(monkeypatch, tmp_path):
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)  # a hook that runs these tests sets them
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)

    def git(*words):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@b.c", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "model.py").write_text("one\n")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.jsonl").write_text("an old record\n")
    git("add", "model.py", "results")
    git("commit", "--message", "first")
    name = git("rev-parse", "HEAD")[:12]
    (tmp_path / "notes.txt").write_text("git does not track it\n")
    (tmp_path / "results" / "x.jsonl").unlink()  # a new record takes its place
    assert machine.commit(tmp_path) == name
    (tmp_path / "model.py").write_text("two\n")
    assert machine.commit(tmp_path) == name + "+"
    unpacked = tmp_path / "unpacked"  # as from a zip: the repository around it knows nothing of it
    unpacked.mkdir()
    (unpacked / "model.py").write_text("one\n")
    assert machine.commit(unpacked) == ""
