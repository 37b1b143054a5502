"""The flags: which are refused and how, and what they are by default on each kind of machine."""

from harness import flags, machine, parse_args

import sys

import pytest
import torch
from conftest import FLOAT32, STAGES, python

from data import VOCAB

CPU = torch.device("cpu")
MPS = torch.device("mps")
CUDA = torch.device("cuda", 0)
DOC = "Stage 5 · flash: a title.\n\nA text.\n"


@pytest.fixture(autouse=True)
def machine_of(monkeypatch):
    """machine_of(device, dtype=..., problem=..., memory=...): parse on such a machine; until then on a good CPU."""
    cards = []
    monkeypatch.setattr(torch.cuda, "set_device", cards.append)

    def machine_of(device, dtype=torch.bfloat16, problem=None, memory=80e9):
        monkeypatch.setattr(machine, "find_device", lambda name: device)
        monkeypatch.setattr(machine, "native_amp_dtype", lambda device: dtype)
        monkeypatch.setattr(machine, "compile_problem", lambda device: problem)
        monkeypatch.setattr(machine, "total_memory", lambda device: memory)
        return cards

    machine_of(CPU)
    return machine_of


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """parse(flag, ..., stage="s05"): what parse_args returns to this stage, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def parse(*words, stage="s05", doc=DOC):
        monkeypatch.setattr(sys, "argv", [str(STAGES[stage]), *words])
        return parse_args(doc)

    return parse


@pytest.fixture
def refusal(parse, capsys):
    """refusal(flag, ..., stage="s05"): the one line on stderr with which exit status 2 is explained."""

    def refusal(*words, stage="s05"):
        with pytest.raises(SystemExit) as ending:
            parse(*words, stage=stage)
        out, err = capsys.readouterr()
        assert (ending.value.code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return refusal


@pytest.mark.parametrize(
    "words, named",
    [
        ("--steps 0", "--steps: '0' is not a whole number of 1 or more"),
        ("--accum 1.5", "--accum: '1.5' is not a whole number of 1 or more"),
        ("--lr 0", "--lr: '0' is not a number above 0"),
        ("--lr nan", "--lr: 'nan' is not a number above 0"),
        ("--lr fast", "--lr: 'fast' is not a number above 0"),
        ("--seq-len 1025", "pass 1024 or less"),
        ("--seed -1", "--seed -1"),
        ("--seed 9223372036854775808", "--seed 9223372036854775808"),
        ("--size gpt5", "gpt2-medium"),
        ("--data", "--data: expected one argument"),
        ("--flash", "unrecognized arguments: --flash"),
        ("--step 3", "unrecognized arguments: --step 3"),  # no flag may be shortened
        ("--record no/r", "--record no/r: there is no such folder"),
        ("--record mine", "--record mine is there already"),
        ("--save no/w", "--save no/w: there is no such folder"),
        ("--save .", "--save . is a folder"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(refusal, tmp_path, words, named):
    (tmp_path / "mine").write_text("keep")
    assert named in refusal(*words.split())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine").read_text() == "keep"


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage < "s12"])
def test_a_stage_without_ddp_takes_one_process(refusal, monkeypatch, stage):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "is for one process, and torchrun started 2: run s12_ddp" in refusal(stage=stage)


def test_the_micro_batches_must_divide_over_the_ranks(refusal, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--accum 3 does not divide over 2 ranks" in refusal("--accum", "3", stage="s12")


def test_mps_can_not_run_s12(refusal, machine_of):
    machine_of(MPS)
    assert refusal(stage="s12").endswith("pass --device cpu\n")


def test_the_defaults_of_a_cpu(parse):
    args = parse()
    assert args.device == CPU
    assert (args.size, args.batch_size, args.seq_len, args.steps) == ("micro", 1, 1024, 24)
    assert (args.accum, args.seed, args.lr) == (2, 1337, 6e-4)
    assert args.shape == {"vocab_size": VOCAB, "n_layer": 4, "n_head": 4, "n_embd": 256}
    assert (args.amp_dtype, args.compile, args.fallbacks) == (torch.bfloat16, True, {})
    assert args.title == "Stage 5 · flash: a title."


@pytest.mark.parametrize("device, memory, batch_size", [(CUDA, 80e9, 16), (MPS, 12e9, 4)])
def test_the_defaults_of_an_accelerator(parse, machine_of, device, memory, batch_size):
    cards = machine_of(device, memory=memory)
    args = parse()
    assert args.device == device
    assert (args.size, args.batch_size, args.seq_len, args.steps, args.accum) == ("gpt2", batch_size, 1024, 50, 4)
    assert cards == ([CUDA] if device == CUDA else [])  # so that each rank's work goes to its own card


def test_what_is_given_wins(parse, machine_of, capsys):
    machine_of(CPU, dtype=torch.float32, problem="no compiler")
    numbers = ["--steps", "5", "--batch-size", "3", "--seq-len", "32", "--accum", "6", "--seed", "7", "--lr", "1e-3"]
    args = parse(*numbers, "--size", "tiny", "--amp-dtype", "float16", "--compile")
    assert (args.steps, args.batch_size, args.seq_len, args.accum, args.seed, args.lr) == (5, 3, 32, 6, 7, 1e-3)
    assert (args.size, args.shape["n_embd"], args.amp_dtype, args.compile) == ("tiny", 64, torch.float16, True)
    assert (args.fallbacks, capsys.readouterr().err) == ({}, "")


@pytest.mark.parametrize("gigabytes, batch_size", [(40, 16), (32, 8), (24, 8), (16, 4), (8, 2), (4, 1)])
def test_the_batch_is_what_fits_a_card(gigabytes, batch_size):
    assert flags.fitting_batch_size(gigabytes * 10**9) == batch_size


@pytest.mark.parametrize("device, ranks, accum", [(CPU, 2, 2), (CPU, 3, 3), (CUDA, 2, 4), (CUDA, 3, 3), (CUDA, 8, 8)])
def test_every_rank_has_a_micro_batch_by_default(parse, machine_of, monkeypatch, device, ranks, accum):
    machine_of(device)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert parse(stage="s12").accum == accum


@pytest.mark.parametrize(
    "stage, rank, told",
    [
        ("s03", "0", ["amp_dtype"]),
        ("s04", "0", ["amp_dtype", "compile"]),
        ("s12", "1", []),
    ],
)
def test_a_fallback_is_a_line_in_the_stages_that_use_the_flag(
    parse, machine_of, monkeypatch, capsys, stage, rank, told
):
    monkeypatch.setenv("RANK", rank)
    machine_of(CPU, dtype=torch.float32, problem="no C++ compiler found: install g++")
    args = parse(stage=stage)
    assert (args.amp_dtype, args.compile) == (torch.float32, False)
    reasons = {
        "amp_dtype": "this cpu has no 16-bit arithmetic, so float32 stays",
        "compile": "left out, no C++ compiler found: install g++",
    }
    assert args.fallbacks == reasons  # the record has both, whatever the stage
    assert capsys.readouterr().err.splitlines() == [f"{flag}: {reasons[flag]}" for flag in told]


def test_without_docstrings_the_title_is_the_name(parse):
    assert parse(doc=None).title == "s05_flash"  # python -OO


def test_s01_has_no_tf32_where_nvidias_containers_allow_it():
    words = [str(STAGES["s01"]), *FLOAT32, "--steps", "1"]
    script = f"import sys, runpy; sys.argv = {words}; runpy.run_path(sys.argv[0])\n"
    script += "import os, torch; print(torch.get_float32_matmul_precision(), os.environ.get('NVIDIA_TF32_OVERRIDE'))"
    container = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "NVIDIA_TF32_OVERRIDE": "1"}
    run = python("-c", script, PYTHONPATH=str(STAGES["s01"].parent), **container)
    assert run.out.splitlines()[-1:] == ["highest None"], run.err
