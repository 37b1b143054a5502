"""What the harness finds out about a machine, held on fakes: devices, units, compilers, memory."""

from harness import machine
from harness.machine import command_output, read_text  # before a fixture replaces them

import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from data import InputError

CPU = torch.device("cpu")
MPS = torch.device("mps")
CUDA_0 = torch.device("cuda", 0)
CUDA_1 = torch.device("cuda", 1)

# what torch.cuda.init() says where a card can't be used
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
NOT_READY = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
    "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized"
)
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver"
NO_GPUS = "No CUDA GPUs are available"


@pytest.fixture(autouse=True)
def commands(monkeypatch):
    """What a command prints, by its first word; none is installed until a test says so."""
    outputs = {}
    monkeypatch.setattr(machine, "command_output", lambda command: outputs.get(command[0], ""))
    return outputs


@pytest.fixture(autouse=True)
def files(monkeypatch):
    """The system's files, their text by their path; there are none until a test says so."""
    texts = {}
    monkeypatch.setattr(machine, "read_text", lambda path: texts.get(path, ""))
    return texts


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch):
    """torch.cuda as these attributes say: cards that can do everything, but none until a test says so."""
    cuda = SimpleNamespace(cards=0, capability=(9, 0), has_bfloat16=True, kernels=["sm_75", "sm_90a"])
    cuda.error = RuntimeError(TOO_OLD)

    def is_bf16_supported(including_emulation=True):
        return including_emulation or cuda.has_bfloat16  # an emulated bfloat16 is there on every card

    def init():
        if cuda.error:
            raise cuda.error

    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda.cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda.cards)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: cuda.capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: cuda.kernels)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return cuda


@pytest.fixture(autouse=True)
def fake_mps(monkeypatch):
    """macOS's GPU as these attributes say; there is none until a test says so."""
    mps = SimpleNamespace(available=False, macos=14)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps.available)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: mps.macos >= major)
    return mps


@pytest.fixture(autouse=True)
def fake_cpu(monkeypatch):
    """A CPU as these attributes say: an x86 without bfloat16 units, until a test says otherwise."""
    cpu = SimpleNamespace(architecture="x86_64", avx512_bf16=False)
    monkeypatch.setattr(platform, "machine", lambda: cpu.architecture)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: cpu.avx512_bf16)
    return cpu


@pytest.fixture
def cuda_is_not_asked(monkeypatch):
    """Any question to CUDA fails the test."""

    def fail():
        pytest.fail("CUDA was asked, which opens a context on the card")

    monkeypatch.setattr(torch.cuda, "is_available", fail)


def test_the_best_device_is_cuda_then_mps_then_the_cpu(fake_cuda, fake_mps):
    assert machine.find_device() == CPU
    fake_mps.available = True
    assert machine.find_device() == MPS
    fake_cuda.cards = 1
    assert machine.find_device() == CUDA_0


@pytest.mark.parametrize("name, device", [("cpu", CPU), ("mps", MPS)])
def test_a_device_without_cuda_is_found_without_asking_cuda(cuda_is_not_asked, fake_mps, name, device):
    fake_mps.available = True
    assert machine.find_device(name) == device


@pytest.mark.parametrize("name", [None, "cuda"])
def test_each_process_of_torchrun_takes_its_own_card(fake_cuda, monkeypatch, name):
    fake_cuda.cards = 2
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert machine.find_device(name) == CUDA_1


def test_a_card_named_by_number_is_taken_by_every_process(fake_cuda, monkeypatch):
    fake_cuda.cards = 2
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert machine.find_device("cuda:0") == CUDA_0


def test_a_card_beyond_the_last_one_is_refused(fake_cuda):
    fake_cuda.cards = 2
    with pytest.raises(InputError, match="--device cuda:2 is not there: pass one of cuda:0 to cuda:1"):
        machine.find_device("cuda:2")


@pytest.mark.parametrize("name", [None, "cuda"])
def test_more_processes_of_torchrun_than_cards_are_refused(fake_cuda, monkeypatch, name):
    fake_cuda.cards = 2
    monkeypatch.setenv("LOCAL_RANK", "2")
    problem = "LOCAL_RANK is 2, and this machine has 2 CUDA devices: start a process for each of them"
    with pytest.raises(InputError, match=f"{problem}, --nproc_per_node=2"):
        machine.find_device(name)


@pytest.mark.parametrize("name", ["gpu", "tpu", "cuda:x", "cuda0", "cpu "])
@pytest.mark.parametrize(
    "cards, has_mps, devices",
    [
        (0, False, "cpu"),
        (0, True, "mps, cpu"),
        (1, False, "cuda, cpu"),
    ],
)
def test_no_device_of_that_name_lists_those_that_work(fake_cuda, fake_mps, name, cards, has_mps, devices):
    fake_cuda.cards = cards
    fake_mps.available = has_mps
    with pytest.raises(InputError) as refusal:
        machine.find_device(name)
    assert str(refusal.value) == f"--device {name}: this machine has no such device; pass one of {devices}"


def test_mps_is_refused_where_there_is_none(fake_cuda):
    fake_cuda.cards = 1
    with pytest.raises(InputError, match="--device mps: this machine has no such device; .* cuda, cpu$"):
        machine.find_device("mps")


def test_cuda_is_refused_with_the_reason_and_the_devices_that_work(fake_mps):
    fake_mps.available = True
    with pytest.raises(InputError, match="--device cuda:0: .* has no NVIDIA card, .*; pass one of mps, cpu$"):
        machine.find_device("cuda:0")


def test_without_a_card_nothing_is_printed(capsys):
    assert machine.cuda_problem() == "this machine has no NVIDIA card, or its driver is not installed"
    assert machine.find_device() == CPU
    assert capsys.readouterr().err == ""


def test_a_card_that_is_left_out_is_named_on_stderr(commands, capsys):
    commands["nvidia-smi"] = "GPU 0: H100"
    assert machine.find_device() == CPU
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cuda: The NVIDIA driver on your system is too old (found version 12040): ")
    assert line.endswith("; using cpu")


def test_a_card_that_was_not_asked_for_is_not_named(commands, capsys):
    commands["nvidia-smi"] = "GPU 0: H100"
    assert machine.find_device("cpu") == CPU
    assert capsys.readouterr().err == ""


def test_a_card_under_a_torch_for_cpus_asks_for_another_torch(commands, monkeypatch):
    commands["nvidia-smi"] = "GPU 0: H100"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "this torch is a CPU build: install PyTorch's CUDA build" in machine.cuda_problem()


@pytest.mark.parametrize(
    "error, problem",
    [
        (
            RuntimeError(TOO_OLD),
            "The NVIDIA driver on your system is too old (found version 12040): "
            "update the driver, or install a torch for CUDA 12.6",
        ),
        (
            RuntimeError(NOT_READY + "\nand a second line"),
            f"{NOT_READY}: start NVIDIA's fabric manager (systemctl start nvidia-fabricmanager)",
        ),
        (
            RuntimeError(NO_DRIVER),
            "Found no NVIDIA driver on your system: install the driver, or start the container with --gpus all",
        ),
        (AssertionError("libcudart is broken"), "libcudart is broken: restart the machine, or update the driver"),
        (RuntimeError(NO_GPUS), f"{NO_GPUS}: restart the machine, or update the driver"),
        (None, "torch finds no CUDA device: restart the machine, or update the driver"),
    ],
    ids=["old driver", "fabric manager", "no driver", "another error", "no card", "no error"],
)
def test_a_card_that_torch_can_not_use_is_explained_in_torchs_words(fake_cuda, commands, error, problem):
    commands["nvidia-smi"] = "GPU 0: H100"
    fake_cuda.error = error
    assert machine.cuda_problem() == problem


@pytest.mark.parametrize("value", ["", "-1", "7"])
def test_a_card_that_the_environment_hides_is_no_matter_of_the_driver(fake_cuda, commands, monkeypatch, value):
    commands["nvidia-smi"] = "GPU 0: H100"
    fake_cuda.error = RuntimeError(NO_GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert machine.cuda_problem() == f"{NO_GPUS}: CUDA_VISIBLE_DEVICES is {value!r} and hides the card, unset it"


def test_without_nvidia_smi_the_drivers_file_tells_of_a_card(fake_cuda, files):
    files["/proc/driver/nvidia/version"] = "NVRM version: 570.86.10  Release"
    fake_cuda.error = RuntimeError(NO_DRIVER)
    assert machine.cuda_problem().startswith("Found no NVIDIA driver on your system: ")


def test_torchs_own_warning_of_what_is_said_here_is_not_shown(commands, monkeypatch, recwarn):
    def is_available():
        warnings.warn(f"CUDA initialization: {TOO_OLD}", stacklevel=2)
        return False

    commands["nvidia-smi"] = "GPU 0: H100"
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert "too old" in machine.cuda_problem()
    assert len(recwarn) == 0


@pytest.mark.parametrize("cards", [0, 1])
def test_what_measures_speed_goes_on_without_a_card_or_with_one_that_works(fake_cuda, cards):
    fake_cuda.cards = cards
    machine.refuse_unusable_card()


def test_what_measures_speed_does_not_take_a_cpu_for_a_card(commands):
    commands["nvidia-smi"] = "GPU 0: H100"
    with pytest.raises(InputError) as refusal:
        machine.refuse_unusable_card()
    assert str(refusal.value) == (
        "the card can't be used: The NVIDIA driver on your system is too old (found version 12040): "
        "update the driver, or install a torch for CUDA 12.6; or pass --device cpu to measure the CPU"
    )


@pytest.mark.parametrize(
    "capability, kernels, works",
    [
        ((7, 5), ["sm_75", "sm_90a"], True),
        ((9, 0), ["sm_75", "sm_90a"], True),
        ((8, 6), ["sm_80"], True),  # a later card of the same major version runs the kernel
        ((8, 0), ["sm_86"], False),  # an earlier one does not
        ((8, 6), ["sm_75", "sm_90"], False),  # nor does one of another major version
        ((6, 1), ["sm_75", "sm_90a", "sm_100"], False),
        ((10, 0), ["sm_90", "sm_100a"], True),
        ((10, 3), ["sm_90", "sm_100f"], True),
        ((12, 0), ["sm_90", "sm_100", "sm_120"], True),
        ((12, 0), ["sm_90", "compute_90"], True),  # PTX runs on every later card
        ((8, 0), ["sm_75", "compute_90"], False),  # and on no earlier one
        ((9, 0), ["gfx90a"], True),  # AMD's cards are not judged
    ],
)
def test_a_card_needs_a_torch_with_kernels_for_it(fake_cuda, capability, kernels, works):
    fake_cuda.cards = 1
    fake_cuda.capability = capability
    fake_cuda.kernels = kernels
    if works:
        assert machine.cuda_problem() is None
    else:
        reason = f"this torch has no kernels for compute capability {capability[0]}.{capability[1]}: "
        assert machine.cuda_problem() == f"{reason}install one for an older CUDA"


@pytest.mark.parametrize("capability, name", [((10, 0), "10.0"), ((12, 0), "12.0")])
def test_a_card_that_is_newer_than_all_kernels_needs_a_newer_torch(fake_cuda, capability, name):
    fake_cuda.cards = 1
    fake_cuda.capability = capability
    fake_cuda.kernels = ["sm_75", "sm_90a"]
    reason = f"this torch has no kernels for compute capability {name}"
    assert machine.cuda_problem() == f"{reason}: install one for a newer CUDA"


def test_a_number_of_torchrun_has_a_default(monkeypatch):
    assert machine.environment_number("MASTER_PORT", 7) == 7
    monkeypatch.setenv("MASTER_PORT", "65535")
    assert machine.environment_number("MASTER_PORT", 7) == 65535


@pytest.mark.parametrize("value", ["abc", "", "-1", "1.5", "65536", "99999"])
def test_what_is_no_number_of_torchrun_is_refused_by_name_and_value(monkeypatch, value):
    monkeypatch.setenv("MASTER_PORT", value)
    remedy = "unset it, or start the run with torchrun"
    with pytest.raises(InputError, match=f"the environment variable MASTER_PORT is '?{value}.*: {remedy}$"):
        machine.environment_number("MASTER_PORT", 0)


def test_without_torchrun_a_run_is_one_process():
    assert machine.is_rank_0()
    assert machine.world_size() == 1
    assert machine.local_world_size() == 1


def test_torchrun_tells_how_many_processes_there_are_and_which_is_this(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert not machine.is_rank_0()
    assert machine.world_size() == 8
    assert machine.local_world_size() == 4
    monkeypatch.setenv("RANK", "0")
    assert machine.is_rank_0()


@pytest.mark.parametrize(
    "capability, has_bfloat16, dtype",
    [
        ((8, 0), True, torch.bfloat16),
        ((7, 5), False, torch.float16),
        ((7, 0), False, torch.float16),
        ((6, 1), False, torch.float32),
    ],
)
def test_native_dtype_of_a_card_is_not_one_that_it_emulates(fake_cuda, capability, has_bfloat16, dtype):
    fake_cuda.capability = capability
    fake_cuda.has_bfloat16 = has_bfloat16
    assert machine.native_amp_dtype(CUDA_0) == dtype


@pytest.mark.parametrize("macos, dtype", [(13, torch.float16), (14, torch.bfloat16), (15, torch.bfloat16)])
def test_native_dtype_of_mps_depends_on_macos(fake_mps, macos, dtype):
    fake_mps.macos = macos
    assert machine.native_amp_dtype(MPS) == dtype


def test_native_dtype_of_an_intel_or_amd_cpu_is_what_torch_says(fake_cpu, files):
    fake_cpu.architecture = "x86_64"
    files["/proc/cpuinfo"] = "flags: avx512f bf16"
    assert machine.native_amp_dtype(CPU) == torch.float32
    fake_cpu.avx512_bf16 = True
    assert machine.native_amp_dtype(CPU) == torch.bfloat16


@pytest.mark.parametrize(
    "cpuinfo, sysctl, dtype",
    [
        ("Features: asimd bf16 i8mm", "", torch.bfloat16),
        ("Features: asimd i8mm", "", torch.float32),
        ("", "1", torch.bfloat16),
        ("", "0", torch.float32),
    ],
    ids=["Linux, with", "Linux, without", "macOS, with", "macOS, without"],
)
def test_native_dtype_of_an_arm_cpu_is_the_systems_word(fake_cpu, files, commands, cpuinfo, sysctl, dtype):
    fake_cpu.architecture = "aarch64"
    fake_cpu.avx512_bf16 = True  # not asked
    files["/proc/cpuinfo"] = cpuinfo
    commands["sysctl"] = sysctl
    assert machine.native_amp_dtype(CPU) == dtype


@pytest.fixture
def compilers(monkeypatch):
    """The names of the compilers on the PATH: g++ and gcc, until a test says otherwise. Python.h is there."""
    names = {"g++", "gcc"}
    monkeypatch.setattr(shutil, "which", lambda name: name if name in names else None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    return names


@pytest.fixture
def paths(monkeypatch):
    """paths(torch, temporary): say where PyTorch and temporary files are."""

    def paths(torch_file="/lib/torch/__init__.py", temporary="/tmp"):
        monkeypatch.setattr(torch, "__file__", torch_file)
        monkeypatch.setattr(tempfile, "tempdir", temporary)

    paths()
    return paths


@pytest.fixture
def triton(monkeypatch):
    """Triton is installed."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())


@pytest.mark.parametrize("name", ["g++", "clang++", "gcc", "clang"])
def test_any_known_compiler_will_do(compilers, paths, name):
    compilers.clear()
    compilers.add(name)
    assert machine.compile_problem(CPU) is None


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_a_compiler_that_the_environment_names_will_do(compilers, paths, monkeypatch, variable):
    compilers.clear()
    compilers.add("icpx")
    assert "install g++" in machine.compile_problem(CPU)
    monkeypatch.setenv(variable, "icpx")
    assert machine.compile_problem(CPU) is None


def test_without_a_compiler_nothing_compiles(compilers, paths, triton):
    compilers.clear()
    assert machine.compile_problem(CPU).startswith("no C++ compiler found: install g++")
    assert machine.compile_problem(CUDA_0) == "Triton finds no C compiler: install gcc"


@pytest.mark.parametrize(
    "names, works",
    [({"gcc"}, True), ({"clang"}, True), ({"g++"}, False), ({"clang++"}, False)],
    ids=["gcc", "clang", "g++", "clang++"],
)
def test_triton_needs_a_compiler_of_c(compilers, paths, triton, names, works):
    compilers.clear()
    compilers.update(names)
    problem = machine.compile_problem(CUDA_0)
    if works:
        assert problem is None
    else:
        assert problem == "Triton finds no C compiler: install gcc"


def test_triton_takes_the_compiler_that_cc_names_and_no_other(compilers, paths, triton, monkeypatch):
    monkeypatch.setenv("CC", "icx")
    assert machine.compile_problem(CUDA_0) == "Triton finds no C compiler: CC is 'icx', unset it"
    compilers.add("icx")
    assert machine.compile_problem(CUDA_0) is None


@pytest.mark.parametrize("device", [CPU, CUDA_0], ids=str)
def test_without_pythons_headers_nothing_compiles(compilers, paths, triton, monkeypatch, device):
    headers = Path(sysconfig.get_path("include", scheme="posix_prefix"))
    monkeypatch.setattr(Path, "exists", lambda path: path != headers / "Python.h")
    monkeypatch.setattr(sys, "platform", "linux")
    assert machine.compile_problem(device) == f"Python.h is not in {headers}: install python3-dev"
    monkeypatch.setattr(sys, "platform", "darwin")  # macOS's own Python keeps it somewhere else
    assert machine.compile_problem(device) is None


@pytest.mark.parametrize(
    "capability, amp_dtype, works",
    [
        ((7, 5), torch.bfloat16, False),
        ((7, 5), torch.float16, True),
        ((7, 5), torch.float32, True),
        ((8, 0), torch.bfloat16, True),
    ],
)
def test_torch_compiles_bfloat16_only_for_a_card_that_has_it(
    fake_cuda, compilers, paths, triton, capability, amp_dtype, works
):
    fake_cuda.capability = capability
    problem = machine.compile_problem(CUDA_0, amp_dtype)
    if works:
        assert problem is None
    else:
        reason = "torch.compile skips bfloat16 on a card of compute capability 7.5"
        assert problem == f"{reason}: pass --amp-dtype float16"


def test_a_blank_in_a_path_stops_the_cpu_build_alone(compilers, paths, triton):
    paths(torch_file="/my torch/__init__.py")
    assert "has a blank in its path" in machine.compile_problem(CPU)
    assert machine.compile_problem(CUDA_0) is None
    paths(temporary="/my files")
    assert "has a blank in its path" in machine.compile_problem(CPU)
    assert machine.compile_problem(CUDA_0) is None


@pytest.mark.parametrize("version, works", [("2.9.1", False), ("2.12.0", False), ("2.13.0", True)])
def test_mps_computes_wrong_numbers_before_torch_2_13(compilers, monkeypatch, version, works):
    compilers.clear()  # Metal's own is used
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    problem = machine.compile_problem(MPS)
    if works:
        assert problem is None
    else:
        assert "computes wrong numbers" in problem and problem.endswith(": update torch")


def test_cuda_needs_triton(compilers, paths, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # the import of None fails
    assert "pip install triton" in machine.compile_problem(CUDA_0)


@pytest.mark.parametrize("capability, works", [((6, 1), False), ((7, 0), True)])
def test_triton_needs_a_card_of_capability_7(fake_cuda, compilers, paths, triton, capability, works):
    fake_cuda.capability = capability
    problem = machine.compile_problem(CUDA_0)
    if works:
        assert problem is None
    else:
        assert problem == "Triton needs a GPU of compute capability 7.0 or more, this one has 6.1"


def test_the_environment_of_a_cpu_is_a_flat_dict_for_json(fake_cpu, files, monkeypatch):
    files["/proc/cpuinfo"] = "processor\t: 0\nmodel name\t: A CPU @ 2 GHz \n"
    fake_cpu.avx512_bf16 = True
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.1")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cpu"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    assert json.loads(json.dumps(machine.environment(CPU))) == {
        "device": "cpu",
        "device_name": "A CPU @ 2 GHz",
        "threads": 3,
        "cores": 4,
        "tf32": False,
        "native_dtype": "bfloat16",
        "system": "Linux x86_64",
        "python": "3.12.1",
        "torch": "2.13.0+cpu",
        "cuda": None,
        "cudnn": None,
        "driver": None,
        "hip": None,
    }


def test_the_environment_of_a_card_has_its_libraries_and_its_driver(files, monkeypatch):
    files["/proc/driver/nvidia/version"] = "NVRM version: 570.86.10  Release"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    environment = machine.environment(CUDA_0)
    assert environment["device"] == "cuda"
    assert environment["device_name"] == "H100"
    assert environment["tf32"] is True
    assert environment["cuda"] == "13.0"
    assert environment["cudnn"] == 91002
    assert environment["driver"] == "570.86.10"
    assert environment["hip"] is None


def test_the_environment_of_a_card_of_amd_has_the_version_of_hip(fake_cuda, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.2.26015")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    environment = machine.environment(CUDA_0)
    assert environment["hip"] == "7.2.26015"
    assert environment["cuda"] is None


def test_nothing_that_the_bench_asks_of_a_card_opens_a_context(fake_cuda, compilers, paths, triton, monkeypatch):
    def fail(*arguments):
        pytest.fail("this opens a context, and a card in exclusive mode refuses every child of the bench")

    for name in ("mem_get_info", "set_device", "synchronize", "current_stream", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, fail)
    for name in ("empty", "zeros", "ones", "tensor"):
        monkeypatch.setattr(torch, name, fail)
    properties = SimpleNamespace(total_memory=80_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    fake_cuda.cards = 1
    machine.refuse_unusable_card()
    assert machine.find_device() == CUDA_0
    assert machine.total_memory(CUDA_0) == 80_000
    assert machine.native_amp_dtype(CUDA_0) == torch.bfloat16
    assert machine.compile_problem(CUDA_0, torch.bfloat16) is None
    assert machine.environment(CUDA_0)["device_name"] == "H100"


@pytest.mark.parametrize(
    "file, nvidia_smi, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Wed", "", "570.86.10"),
        ("NVRM version: 570.86.10  Release", "550.54", "570.86.10"),
        ("", "570.86.10", "570.86.10"),
        ("", "570.86.10\n570.86.10", "570.86.10"),  # a line for each card
        ("", "", None),
    ],
)
def test_the_driver_is_known_though_nvidia_smi_may_time_out(files, commands, file, nvidia_smi, version):
    files["/proc/driver/nvidia/version"] = file
    commands["nvidia-smi"] = nvidia_smi
    assert machine.driver_version() == version


def test_nvidia_smi_is_asked_for_the_driver_alone(monkeypatch):
    asked = []

    def answer(command):
        asked.append(command)
        return "570.86.10"

    monkeypatch.setattr(machine, "command_output", answer)
    machine.driver_version()
    # not -q, which asks every card for all that it knows, and takes seconds under WSL
    assert asked == [["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]]


@pytest.fixture
def card_with_uuid(monkeypatch):
    """A card whose UUID torch knows, in the form in which torch tells it."""
    properties = SimpleNamespace(uuid="ffc79498-8ff3-c2dc-3b0d-fafd804516ae")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


@pytest.mark.parametrize(
    "answer, figures",
    [
        ("1980, 310.52, 45, 700.00", [1980.0, 310.52, 45.0, 700.0]),
        ("1980, [N/A], 45, [Not Supported]", [1980.0, None, 45.0, None]),
        ("[N/A], nan, inf, -", [None] * 4),
        ("No devices were found", [None] * 4),
        ("", [None] * 4),  # no nvidia-smi, or one that takes too long
    ],
)
def test_the_state_of_a_card_is_what_nvidia_smi_tells(card_with_uuid, commands, answer, figures):
    commands["nvidia-smi"] = answer
    state = machine.card_state(CUDA_1)
    assert list(state) == ["sm_clock", "power", "temperature", "power_limit"]
    assert list(state.values()) == figures


def test_nvidia_smi_is_asked_for_the_card_of_the_run_by_its_uuid(card_with_uuid, monkeypatch):
    """Its numbers are others than torch's, above all under CUDA_VISIBLE_DEVICES."""
    asked = []

    def answer(command):
        asked.append(command)
        return "1980, 310.52, 45, 700.00"

    monkeypatch.setattr(machine, "command_output", answer)
    machine.card_state(CUDA_1)
    (command,) = asked
    assert command == [
        "nvidia-smi",
        "--query-gpu=clocks.sm,power.draw,temperature.gpu,power.limit",
        "--format=csv,noheader,nounits",
        "-i",
        "GPU-ffc79498-8ff3-c2dc-3b0d-fafd804516ae",
    ]


def test_the_state_of_a_card_without_a_uuid_is_not_that_of_another(card_with_uuid, commands):
    del card_with_uuid.uuid
    commands["nvidia-smi"] = "1980, 310.52, 45, 700.00"
    assert set(machine.card_state(CUDA_1).values()) == {None}


@pytest.mark.parametrize(
    "sysctl, processor, name", [("Apple M4", "arm", "Apple M4"), ("", "arm", "arm"), ("", "", "aarch64")]
)
def test_a_cpu_that_linux_does_not_name_is_named_by_the_next_best(
    fake_cpu, commands, monkeypatch, sysctl, processor, name
):
    fake_cpu.architecture = "aarch64"
    commands["sysctl"] = sysctl
    monkeypatch.setattr(platform, "processor", lambda: processor)
    assert machine.device_name(CPU) == name


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5}, raising=False)
    assert machine.cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS has none
    assert machine.cores() == 8


@pytest.mark.parametrize(
    "quota, cores",
    [
        ("max 100000\n", 4),
        ("200000 100000\n", 2),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("800000 100000\n", 4),
        ("20000 10000\n", 2),
        ("", 4),
    ],
    ids=["no limit", "2 cores", "2.5 cores", "half a core", "more than there are", "another period", "no container"],
)
def test_cores_heed_a_containers_limit(files, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    files["/sys/fs/cgroup/cpu.max"] = quota
    assert machine.cores() == cores


def test_the_free_share_of_a_card_is_what_its_driver_tells(monkeypatch):
    memory = {CUDA_0: (1_000, 4_000), CUDA_1: (4_000, 4_000)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory[device])
    assert machine.free_share(CUDA_0) == 0.25
    assert machine.free_share(CUDA_1) == 1


@pytest.mark.parametrize(
    "release, wsl",
    [
        ("5.15.167.4-microsoft-standard-WSL2", True),
        ("4.4.0-19041-Microsoft", True),
        ("6.8.0-45-generic", False),
    ],
)
def test_linux_inside_windows_is_known_by_its_kernel(monkeypatch, release, wsl):
    monkeypatch.setattr(platform, "release", lambda: release)
    assert machine.is_wsl() == wsl


def test_the_total_of_an_accelerator(monkeypatch):
    cards = {CUDA_0: SimpleNamespace(total_memory=80_000), CUDA_1: SimpleNamespace(total_memory=24_000)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards[device])
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 16_000)
    assert machine.total_memory(CUDA_1) == 24_000
    assert machine.total_memory(MPS) == 16_000


def test_the_peak_of_a_card_is_what_its_tensors_held(monkeypatch):
    peaks = {CUDA_0: 1_000, CUDA_1: 2_000}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[device])
    assert machine.peak_memory(CUDA_1) == (2_000, "peak allocated")


def test_mps_keeps_no_peak_so_its_driver_is_asked(monkeypatch):
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3_000)
    assert machine.peak_memory(MPS) == (3_000, "driver, sampled")


def test_the_peak_of_a_cpu_is_the_resident_set_that_linux_tells(files):
    files["/proc/self/status"] = "VmPeak:\t  9000 kB\nVmHWM:\t    4000 kB\nVmRSS:\t    3000 kB\n"
    assert machine.peak_memory(CPU) == (4_096_000, "peak RSS")


@pytest.mark.parametrize("system, peak", [("darwin", 5_000), ("freebsd", 5_120_000)])
def test_elsewhere_the_peak_of_a_cpu_has_the_start_up_in_it(monkeypatch, system, peak):
    usage = SimpleNamespace(ru_maxrss=5_000)
    monkeypatch.setattr(machine.resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(sys, "platform", system)
    assert machine.peak_memory(CPU) == (peak, "peak RSS with start-up")


def test_a_reset_starts_the_peak_of_a_card_again(monkeypatch):
    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    machine.reset_peak_memory(CUDA_1)
    assert reset == [CUDA_1]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak that can be reset")
def test_a_reset_starts_the_peak_of_a_cpu_again(monkeypatch):
    monkeypatch.setattr(machine, "read_text", lambda path: Path(path).read_text())  # the real meter
    machine.reset_peak_memory(CPU)
    before, _ = machine.peak_memory(CPU)
    with mmap.mmap(-1, 100_000_000) as block:  # from the system itself, whatever malloc may keep
        block.write(bytes(100_000_000))
    during, _ = machine.peak_memory(CPU)
    machine.reset_peak_memory(CPU)
    after, _ = machine.peak_memory(CPU)
    assert during > before + 90e6
    assert after < during - 90e6


def test_a_reset_that_the_system_has_not_is_left_out(monkeypatch):
    def no_such_file(path, text):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "write_text", no_such_file)
    machine.reset_peak_memory(CPU)
    machine.reset_peak_memory(MPS)


def test_resident_memory_of_a_process_is_told_by_linux_or_by_ps(files, commands):
    assert machine.resident_memory(42) == 0
    commands["ps"] = "2000"
    assert machine.resident_memory(42) == 2_048_000
    files["/proc/42/status"] = "VmHWM:\t    4000 kB\nVmRSS:\t    3000 kB\n"
    assert machine.resident_memory(42) == 3_072_000


@pytest.mark.parametrize(
    "limit, used, free",
    [
        ("max\n", "100000\n", 8_192_000),
        ("", "", 8_192_000),
        ("1000000\n", "400000\n", 600_000),
        ("900000000\n", "400000\n", 8_192_000),
    ],
    ids=["no limit", "no container", "a limit below what is free", "a limit beyond what is free"],
)
def test_free_memory_heeds_a_containers_limit(files, limit, used, free):
    files["/proc/meminfo"] = "MemTotal:       16000 kB\nMemFree:  100 kB\nMemAvailable:    8000 kB\n"
    files["/sys/fs/cgroup/memory.max"] = limit
    files["/sys/fs/cgroup/memory.current"] = used
    assert machine.free_memory() == free


def test_where_linux_does_not_tell_half_the_memory_counts_as_free(monkeypatch):
    sizes = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__, raising=False)
    assert machine.free_memory() == 2_048_000


def test_the_text_of_a_file_that_is_not_there_is_empty(tmp_path):
    (tmp_path / "there").write_text("a line\n")
    assert read_text(tmp_path / "there") == "a line\n"
    assert read_text(tmp_path / "not there") == ""


def test_what_a_command_prints_is_stripped():
    assert command_output([sys.executable, "-c", "print('  two words  ')"]) == "two words"


def test_a_command_that_fails_has_no_output():
    assert command_output([sys.executable, "-c", "print('half of it'); raise SystemExit(1)"]) == ""


def test_a_command_that_is_not_installed_has_no_output():
    assert command_output(["a-command-that-is-not-installed"]) == ""


def test_a_command_that_hangs_has_no_output(monkeypatch):
    def hang(command, timeout, **options):
        assert timeout == 10
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert command_output(["nvidia-smi", "-q"]) == ""
