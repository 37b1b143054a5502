"""What the harness finds out about a machine: devices, units, launchers, cores, memory."""

from harness import machine, meters, ranks

import mmap
import os

import pytest
import torch
from conftest import ROOT, error_of

CPU = torch.device("cpu")
CUDA_0 = torch.device("cuda", 0)
CUDA_1 = torch.device("cuda", 1)


@pytest.fixture
def system(monkeypatch):
    """Return {path of a file of the system, or name of a command: its text}. All are empty until a test fills them."""
    texts = {}
    monkeypatch.setattr(machine, "read_text", lambda path: texts.get(str(path), ""))
    monkeypatch.setattr(machine, "command_output", lambda command: texts.get(command[0], ""))
    return texts


@pytest.fixture
def cuda(monkeypatch):
    """Give this machine two NVIDIA cards that can do everything."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize("name, device", [(None, CUDA_1), ("cuda", CUDA_1), ("cuda:0", CUDA_0), ("cpu", CPU)])
def test_a_process_takes_the_device_that_is_named_or_the_card_of_its_rank(cuda, monkeypatch, name, device):
    monkeypatch.setenv("LOCAL_RANK", "1")  # the second process of a node
    assert machine.find_device(name) == device


@pytest.mark.parametrize("name, missing", [(None, "cuda:2"), ("cuda:x", "cuda:x"), ("xpu", "xpu")])
def test_a_device_that_is_not_here_is_refused(cuda, system, monkeypatch, capsys, name, missing):
    monkeypatch.setenv("LOCAL_RANK", "2")
    line = f"error: there is no device {missing} here: pass cuda:0 or cuda:1 or cpu"
    assert error_of(capsys, machine.find_device, name) == line


@pytest.mark.parametrize("setting", ["WORLD_SIZE=abc", "WORLD_SIZE=0", "LOCAL_RANK=x", "SLURM_STEP_NUM_TASKS=2(x3)"])
def test_a_variable_of_a_launcher_that_is_no_number_is_one_line(capsys, setting):
    name, os.environ[name] = setting.split("=")
    assert error_of(capsys, ranks.check_ranks).startswith(f"error: {name} is ")


TORCHRUNS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_one_of_several_processes_needs_all_variables_of_torchrun(capsys):
    os.environ |= TORCHRUNS | {"MASTER_PORT": ""}
    line = error_of(capsys, ranks.check_ranks)
    assert line == "error: WORLD_SIZE is 2 in the environment, without MASTER_PORT: unset it, or use torchrun"


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_tasks_that_do_not_know_of_one_another_are_refused(capsys, name):
    os.environ[name] = "4"
    assert "each task would train alone: let one task start torchrun" in error_of(capsys, ranks.check_ranks)
    os.environ |= TORCHRUNS
    ranks.check_ranks()


@pytest.mark.parametrize("world_size", ["", "1"])
def test_what_a_cluster_has_left_over_is_dropped_where_a_process_is_alone(world_size):
    os.environ |= {"RANK": "1", "WORLD_SIZE": world_size, "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    ranks.check_ranks()
    ranks.drop_ranks_if_alone()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & os.environ.keys()


@pytest.mark.parametrize(
    "capability, units", [((8, 0), {"float16", "bfloat16", "tf32"}), ((7, 5), {"float16"}), ((6, 1), set())]
)
def test_what_a_card_of_nvidia_multiplies_natively_is_decided_by_its_generation(monkeypatch, capability, units):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert machine.units_of(CUDA_0) == units


# What this process may use


LIMITS = {"cpu.max": "150000 100000\n", "memory.max": "3000\n", "memory.stat": "anon 1000\nfile 7\n"}
NO_LIMITS = {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.stat": "anon 1000\nfile 7\n"}


@pytest.mark.parametrize(
    "own, above, cores, free",
    [
        (LIMITS, NO_LIMITS, 1, 2000),  # 1.5 cores are one whole one, and of 3,000 bytes 1,000 are taken
        (NO_LIMITS, LIMITS, 1, 2000),
        (NO_LIMITS, {}, 8, 10240),
    ],
)
def test_cores_and_memory_are_what_the_cgroups_around_this_process_allow(system, monkeypatch, own, above, cores, free):
    monkeypatch.setattr(machine, "AFFINITY", range(8))
    system["/proc/meminfo"] = "MemAvailable:   10 kB\n"
    system["/proc/self/cgroup"] = "1:pids:/\n0::/job/step\n"
    for folder, files in (("job/step", own), ("job", above)):
        for name, text in files.items():
            system[f"/sys/fs/cgroup/{folder}/{name}"] = text
    assert machine.cores() == cores
    assert meters.free_memory() == free


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout")
def test_the_commit_is_that_of_this_checkout_whatever_repository_the_environment_names(monkeypatch, tmp_path):
    commit = meters.commit(ROOT)
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert meters.commit(ROOT) == commit != ""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak that can be reset")
def test_a_reset_starts_the_peak_of_a_cpu_again():
    meters.reset_peak_memory(CPU)
    before, meter = meters.peak_memory(CPU)
    with mmap.mmap(-1, 100_000_000) as block:  # from the system itself, whatever malloc may keep
        block.write(bytes(100_000_000))
    during, _ = meters.peak_memory(CPU)
    meters.reset_peak_memory(CPU)
    after, _ = meters.peak_memory(CPU)
    assert meter == "peak RSS"
    assert during > before + 90e6
    assert after < during - 90e6


def test_a_compiler_that_pytorch_can_not_start_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "ccache g++")  # PyTorch takes it for the name of one file
    monkeypatch.setattr(machine.Path, "exists", lambda path: True)  # Python.h
    assert machine.compile_problem(CPU) == "PyTorch finds no C++ compiler ccache g++: unset CXX"


def test_triton_takes_the_compiler_of_cc_and_no_other(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: name if name == "clang" else None)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.delenv("CC", raising=False)
    assert machine.triton_problem(torch.device("cuda")) is None
    monkeypatch.setenv("CC", "ccache gcc")
    assert machine.triton_problem(torch.device("cuda")) == "Triton finds no C compiler ccache gcc: unset CC"
