"""What the harness finds out about a machine: devices, units, compilers, memory, the commit."""

from harness import machine, meters, ranks

import mmap
import os
import shutil
import subprocess
import sys
import sysconfig
from unittest import mock

import pytest
import torch
from conftest import error_of

CPU = torch.device("cpu")
MPS = torch.device("mps")
CUDA_0 = torch.device("cuda", 0)
CUDA_1 = torch.device("cuda", 1)


@pytest.fixture
def system(monkeypatch):
    """The text of the system's files by their path, and what a command prints by its name: none until a test says."""
    texts = {}
    monkeypatch.setattr(machine, "read_text", lambda path: texts.get(path, ""))
    monkeypatch.setattr(machine, "command_output", lambda command: texts.get(command[0], ""))
    return texts


@pytest.fixture
def cuda(monkeypatch):
    """Two NVIDIA cards that can do everything."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize("name, device", [(None, CUDA_1), ("cuda", CUDA_1), ("cuda:0", CUDA_0), ("cpu", CPU)])
def test_a_process_takes_the_device_that_is_named_or_the_card_of_its_rank(cuda, monkeypatch, name, device):
    monkeypatch.setenv("LOCAL_RANK", "1")  # the second process of a node
    assert machine.find_device(name) == device


@pytest.mark.parametrize("has_mps, device", [(True, MPS), (False, CPU)])
def test_without_a_card_it_takes_mps_or_the_cpu(monkeypatch, has_mps, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    assert machine.find_device() == device


@pytest.mark.parametrize("name, missing", [(None, "cuda:2"), ("cuda:x", "cuda:x"), ("xpu", "xpu")])
def test_a_device_that_is_not_here_is_refused(cuda, system, monkeypatch, capsys, name, missing):
    monkeypatch.setenv("LOCAL_RANK", "2")
    line = f"error: --device {missing} is not here: pass cuda:0 or cuda:1 or cpu"
    assert error_of(capsys, machine.find_device, name) == line


def test_a_card_that_pytorch_can_not_start_is_told_in_the_first_sentence_of_its_own_words(system, monkeypatch, capsys):
    reason = "The NVIDIA driver is too old (found version 12020)"
    init = mock.Mock(side_effect=RuntimeError(f"{reason}. Please update your driver."))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert machine.why_no_card() is None  # no card is here
    system["nvidia-smi"] = "GPU 0: NVIDIA H100 (UUID: GPU-1)"
    assert machine.why_no_card() == reason
    assert error_of(capsys, machine.find_device, "cuda") == f"error: --device cuda:0 is not here: {reason}"


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
    ranks.drop_left_over_ranks()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & os.environ.keys()


def test_the_first_process_of_another_node_is_not_rank_0():
    assert ranks.is_rank_0()
    os.environ |= {"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": "0"}
    assert not ranks.is_rank_0()


@pytest.mark.parametrize(
    "capability, units", [((8, 0), {"float16", "bfloat16", "tf32"}), ((7, 5), {"float16"}), ((6, 1), set())]
)
def test_what_a_card_of_nvidia_multiplies_natively_is_decided_by_its_generation(monkeypatch, capability, units):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert machine.units_of(CUDA_0) == units


@pytest.mark.parametrize(
    "avx512_bf16, cpuinfo, amx_fp16, units",
    [
        (True, "", False, {"bfloat16"}),
        (False, "Features: asimd bf16 i8mm", False, {"bfloat16"}),  # Arm
        (True, "", True, {"bfloat16", "float16", "tf32"}),
        (False, "flags: avx512f", False, set()),
    ],
)
def test_a_cpu_may_have_units(system, monkeypatch, avx512_bf16, cpuinfo, amx_fp16, units):
    system["/proc/cpuinfo"] = cpuinfo
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_fp16": amx_fp16}, raising=False)
    assert machine.units_of(CPU) == units
    assert machine.units_of(torch.device("xpu")) == set()  # a watched script's device, of which nothing is known


NATIVE = [({"float16", "bfloat16"}, torch.bfloat16), ({"float16"}, torch.float16), (set(), torch.float32)]


@pytest.mark.parametrize("units, dtype", NATIVE)
def test_bfloat16_is_preferred_and_float32_taken_where_no_unit_is_there(monkeypatch, units, dtype):
    monkeypatch.setattr(machine, "units_of", lambda device: units)
    assert machine.native_amp_dtype(CPU) == dtype


def test_torch_compile_needs_headers_and_a_compiler_which_may_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # a folder of programs
    monkeypatch.setenv("CXX", "icpx")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    monkeypatch.setattr(torch, "__file__", "/torch/__init__.py")  # which has no blank
    assert machine.compile_problem(MPS) is None  # Metal's own is used
    assert machine.compile_problem(CPU) == "Python.h is missing: install python3-dev"
    (tmp_path / "Python.h").touch()
    assert "no C++ compiler icpx found: install g++" in machine.compile_problem(CPU)
    (tmp_path / "icpx").touch(mode=0o755)
    assert machine.compile_problem(CPU) is None
    monkeypatch.setattr(torch, "__file__", "/home/me/a clone/torch/__init__.py")
    assert "the path of PyTorch has a blank (/home/me/a clone/torch)" in machine.compile_problem(CPU)


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


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_says_whether_tracked_files_differ(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@b.c"]
    (tmp_path / "model.py").write_text("one\n")
    for words in ("init", "add model.py", "commit --no-verify --message first"):
        subprocess.run([*git, *words.split()], check=True, capture_output=True)
    name = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout[:12]
    (tmp_path / "notes.txt").write_text("git does not track it\n")
    assert meters.commit(tmp_path) == name
    (tmp_path / "model.py").write_text("two\n")
    assert meters.commit(tmp_path) == name + "+"
