"""The flags: which are refused and how, and what they are by default on each kind of machine."""

from harness import machine, meters, parse_args
from harness.bench import page

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, STAGE_FILES, error_of, python

CPU = torch.device("cpu")
MPS = torch.device("mps")
CUDA = torch.device("cuda", 0)


def start_ranks(world_size, rank=0):
    """Set what torchrun sets in one of its processes."""
    os.environ |= {"WORLD_SIZE": str(world_size), "RANK": str(rank), "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """Return a function that calls parse_args() with flags, for a stage in an empty folder.

    The machine is a CPU that can do everything, or it has this device, its native 16-bit dtype, a problem with
    compiling, and this memory.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which parse_args changes
    current_devices = []
    monkeypatch.setattr(torch.cuda, "set_device", current_devices.append)
    cards = [SimpleNamespace(total_memory=memory) for memory in (25.3e9, 12.6e9, 25.3e9)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))

    def parse(*flags, stage="s05", device=CPU, dtype=torch.bfloat16, problem=None, memory=80e9, doc="A title"):
        monkeypatch.setattr(machine, "find_device", lambda name: device)
        monkeypatch.setattr(machine, "native_amp_dtype", lambda device: dtype)
        monkeypatch.setattr(machine, "compile_problem", lambda device: problem)
        monkeypatch.setattr(machine, "why_no_card", lambda: None)
        monkeypatch.setattr(machine, "free_memory_of_card", lambda device: memory)
        monkeypatch.setattr(machine, "device_name", lambda device: "a machine")
        monkeypatch.setattr(sys, "argv", [str(STAGE_FILES[stage]), *flags])
        args = parse_args(doc)
        assert current_devices == ([CUDA] if device == CUDA else [])  # else all ranks would work on the first card
        return args

    return parse


@pytest.mark.parametrize("path, problem", [("mine.py", "File exists"), ("gone/w.pt", "No such file or directory")])
def test_a_save_that_would_fail_or_replace_a_file_is_refused_at_once(parse, capsys, tmp_path, path, problem):
    (tmp_path / "mine.py").write_text("keep")
    line = f"error: --save {path}: {problem}: pass the name of a new file in a folder that you can write to"
    assert error_of(capsys, parse, "--save", path) == line
    assert (tmp_path / "mine.py").read_text() == "keep"


@pytest.mark.parametrize(
    "stage, accum, remedy",
    [
        ("s12", "3", "pass a multiple of 2"),
        ("s11", "4", "s11_accum is for one process, and torchrun started 2: start it with python"),
    ],
)
def test_flags_that_do_not_fit_the_ranks_are_refused(parse, capsys, stage, accum, remedy):
    start_ranks(2)
    assert remedy in error_of(capsys, lambda: parse("--accum", accum, stage=stage))


def test_the_defaults_of_a_cpu(parse):
    args = parse()
    assert (args.device, args.size, args.batch_size, args.seq_len, args.steps) == (CPU, "micro", 1, 1024, 24)
    assert (args.accum, args.seed, args.lr, args.amp_dtype, args.compile) == (2, 1337, 6e-4, torch.bfloat16, True)
    assert args.notes == []
    assert os.environ["MASTER_PORT"] == "0"  # for s12 any free one


# free bytes of cards of 80, 24, 16, 8 and 6 GB, and of Macs: README has these in a table
CARDS = [("", CUDA, 80e9, 16), ("", CUDA, 24e9, 8), ("", CUDA, 15e9, 4), ("", CUDA, 7.5e9, 2), ("", CUDA, 5.38e9, 1)]
CARDS += [("", MPS, 12e9, 4), ("--seq-len 4096", CUDA, 80e9, 2)]  # with a batch of 4 s03 would hold 75.4 GB
CARDS += [("--size gpt2-xl --seq-len 256", CUDA, 36e9, 4)]  # the update alone holds 31.1 GB


@pytest.mark.parametrize("flags, device, memory, batch_size", CARDS)
def test_the_batch_of_an_accelerator_is_what_fits_into_its_memory(parse, flags, device, memory, batch_size):
    assert parse(*flags.split(), device=device, memory=memory).batch_size == batch_size


@pytest.mark.parametrize("memory, note", [(5.38e9, "batch size 1, since the"), (3e9, "batch size 1, though the")])
def test_a_note_says_whether_the_batch_fits(parse, memory, note):
    assert parse(device=CUDA, memory=memory).notes[0].startswith(note)


def test_the_defaults_of_an_accelerator(parse):
    args = parse(device=CUDA)
    assert (args.device, args.size, args.seq_len, args.steps, args.accum) == (CUDA, "gpt2", 1024, 50, 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_on_cards_of_different_size_take_one_batch(parse, rank):
    start_ranks(2, rank)
    free = 24e9 if rank == 0 else 12e9
    assert parse(stage="s12", device=CUDA, memory=free).batch_size == 4


@pytest.mark.parametrize("device, ranks, accum", [(CPU, 3, 3), (CUDA, 2, 4)])
def test_every_rank_has_a_micro_batch_by_default(parse, device, ranks, accum):
    start_ranks(ranks)
    assert parse(stage="s12", device=device).accum == accum


def test_what_the_machine_lacks_is_left_out_with_the_reason(parse):
    args = parse(dtype=torch.float32, problem="no C++ compiler found: install g++")
    assert (args.amp_dtype, args.compile) == (torch.float32, False)
    assert args.notes == [
        "this device has no 16-bit units, so float32 stays",
        "nothing is compiled: no C++ compiler found: install g++",
    ]


def test_a_variable_that_changes_what_is_measured_is_named_by_a_stage_and_on_a_page(parse, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert parse().notes == ["NVIDIA_TF32_OVERRIDE=1 in the environment may change the speed"]
    assert "with NVIDIA_TF32_OVERRIDE=1 in the environment" in page.machine_line(meters.environment(CPU))


def test_without_docstrings_a_stage_is_called_by_its_file(parse, capsys):
    """python -OO drops them."""
    parse(doc=None)
    assert capsys.readouterr().out.startswith("s05_flash\n")


def test_more_threads_than_cores_are_said(parse, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 0)
    assert parse().notes == ["1 threads on 0 usable cores: set OMP_NUM_THREADS=0"]


# Ends without a traceback


def test_a_text_that_can_not_be_read_is_one_line():
    ended = python(STAGE_FILES["s01"], "--size", "tiny", "--device", "cpu", "--data", "gone.txt")
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith("error: --data gone.txt: ")


@pytest.mark.parametrize(
    "error, status, line",
    [("KeyboardInterrupt", 130, "interrupted, so w.pt was not written\n"), ("BrokenPipeError", 141, "")],
)
def test_ctrl_c_and_a_closed_pipe_end_a_stage_with_a_line_or_none(tmp_path, error, status, line):
    script = f"import harness; harness.parse_args('doc'); open('w.pt', 'w').write('half'); raise {error}"
    words = ("--size", "tiny", "--device", "cpu", "--save", "w.pt")
    ended = python("-c", script, *words, folder=tmp_path, PYTHONPATH=str(STAGE_FILES["s01"].parent))
    assert (ended.status, ended.err) == (status, line)
    assert not (tmp_path / "w.pt").exists()  # as torch.save() leaves it on a full disk


def test_lines_appear_at_once_in_a_file_or_a_pipe():
    """A kill loses nothing that was printed."""
    script = "import harness, os; harness.parse_args('doc'); print('step 0'); os.kill(os.getpid(), 9)"
    ended = python("-c", script, "--device", "cpu", PYTHONPATH=str(STAGE_FILES["s01"].parent))
    assert ended.out.endswith("\nstep 0\n")


@pytest.mark.parametrize("script", ["bench.py", "stages/s01_baseline.py", "stages/watch.py"])
def test_a_python_without_torch_is_one_line(script):
    """Without its site-packages, by -S, a Python has none."""
    ended = subprocess.run([sys.executable, "-S", ROOT / script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch("error: this Python has no torch: .*\n", ended.stderr)
