"""What the harness does for a process's memory on a CPU, that LADDER_PLAIN leaves it out, and what it is for."""

from harness import leader, memory

import ctypes
import ctypes.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from blocks import LARGE_TENSORS
from conftest import ROOT, definitions
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import bench
from model import GPT, VOCAB, GPTConfig

THP = "THP_MEM_ALLOC_ENABLE"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    """No variable is set that decides how a process gets its memory."""
    for name in memory.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def mallopt(monkeypatch):
    """Takes the place of glibc's mallopt(): its calls, a list of (parameter, value)."""
    calls = []
    glibc = SimpleNamespace(mallopt=lambda parameter, value: calls.append((parameter, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: glibc)
    return calls


def test_glibc_keeps_what_is_freed(mallopt):
    memory.keep_freed()
    assert mallopt == [(-4, 0), (-1, -1)]  # M_MMAP_MAX and M_TRIM_THRESHOLD, by malloc.h


def test_a_system_without_glibc_goes_on(monkeypatch):
    def no_such_library(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_such_library)
    memory.keep_freed()


def test_large_tensors_get_huge_pages_unless_the_user_set_it(monkeypatch):
    memory.ask_for_huge_pages()
    assert os.environ[THP] == "1"
    monkeypatch.setenv(THP, "0")
    memory.ask_for_huge_pages()
    assert os.environ[THP] == "0"


def test_ladder_plain_leaves_both_out(monkeypatch, mallopt):
    monkeypatch.setenv("LADDER_PLAIN", "1")
    memory.ask_for_huge_pages()
    memory.keep_freed()
    assert THP not in os.environ
    assert mallopt == []


@pytest.mark.parametrize("value", ["", "0"])
def test_an_empty_ladder_plain_or_0_leaves_nothing_out(monkeypatch, mallopt, value):
    monkeypatch.setenv("LADDER_PLAIN", value)
    memory.ask_for_huge_pages()
    memory.keep_freed()
    assert os.environ[THP] == "1"
    assert len(mallopt) == 2


def test_the_variables_that_are_set_are_told(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2")
    monkeypatch.setenv(THP, "0")
    assert memory.variables() == {THP: "0", "LD_PRELOAD": "libjemalloc.so.2"}


def test_touching_fresh_pages_counts_as_page_faults():
    script = """
import mmap, sys
from harness import memory
fresh = mmap.mmap(-1, 1000 * mmap.PAGESIZE)
before = memory.page_faults()
for page in range(1000):
    fresh[page * mmap.PAGESIZE] = 1
print(memory.page_faults() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "stages", capture_output=True, text=True)
    assert 900 <= int(done.stdout) <= 1100, done.stderr


# a training script in short: what a stage does with the harness, then tensors of 64 MB that come and go
SCRIPT = """
import json
from harness import memory, parse_args
import torch
args = parse_args("A script.")
for step in range(3):
    before = memory.page_faults()
    torch.ones(2**24)
    faults = memory.page_faults() - before
tensor = torch.ones(2**24)
with open("/proc/self/smaps") as smaps:
    huge = sum(line.startswith("VmFlags:") and " hg" in line for line in smaps)
print(json.dumps([faults, huge > 0]))
"""
PAGES = 2**26 // os.sysconf("SC_PAGE_SIZE")  # of such a tensor, at 4 kB a page


def run_with(row):
    """(page faults of the third tensor, whether any memory is in huge pages) in the process of a row of the bench."""
    env = leader.environment_of(row)
    command = [sys.executable, "-c", SCRIPT, "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT / "stages", env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def needs_huge_pages_on_request():
    """Skip a test where Linux offers no huge pages, or gives them to every process, as some distributions do."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[always]" in enabled.read_text():
        pytest.skip("needs a system that gives huge pages to those that ask for them")


def test_the_row_plain_keeps_no_freed_memory_and_asks_for_no_huge_pages():
    needs_huge_pages_on_request()
    plain, s01 = rows("plain", "s01")
    assert run_with(plain) == [pytest.approx(PAGES, rel=0.1), False]
    faults, has_huge_pages = run_with(s01)
    assert faults < PAGES / 10
    assert has_huge_pages


def rows(*words):
    """The Rows of a bench on a CPU, without its probes."""
    return bench.rows_of(bench.parse([*words, "--device", "cpu"]))[0]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("plain", {"LADDER_PLAIN": "1"}),
        ("freed memory kept", {THP: "0"}),
        ("huge pages", {"LADDER_PLAIN": "1", THP: "1"}),
        ("both", {}),
        (
            "both from outside",
            {"LADDER_PLAIN": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", THP: "1"},
        ),
    ],
)
def test_a_row_of_the_mode_memory_has_its_variables_whatever_is_set(monkeypatch, name, expected):
    for variable in memory.VARIABLES:
        monkeypatch.setenv(variable, "what a user set")
    monkeypatch.delenv("LADDER_PLAIN")
    (row,) = [row for row in rows("memory", "s10") if row.name == name]
    env = leader.environment_of(row)
    assert {variable: env[variable] for variable in memory.VARIABLES if variable in env} == expected
    assert row.script.name == "s10_fused.py"


def test_the_row_plain_keeps_the_allocator_that_a_user_preloads(monkeypatch):
    for variable in memory.VARIABLES:
        monkeypatch.setenv(variable, "what a user set")
    monkeypatch.delenv("LADDER_PLAIN")
    env = leader.environment_of(rows("plain")[0])
    kept = {variable: env[variable] for variable in memory.VARIABLES if variable in env}
    assert kept == {"LADDER_PLAIN": "1", "LD_PRELOAD": "what a user set", "MALLOC_CONF": "what a user set"}


def test_an_allocator_that_is_installed_has_a_row(monkeypatch):
    monkeypatch.setattr(ctypes.util, "find_library", {"tcmalloc_minimal": "libtcmalloc_minimal.so.4"}.get)
    *_, last = rows("memory")
    assert (last.name, last.env["LD_PRELOAD"], last.env["LADDER_PLAIN"]) == (
        "tcmalloc",
        "libtcmalloc_minimal.so.4",
        "1",
    )


class LargeTensors(TorchDispatchMode):
    """Counts the tensors of some sizes that operations allocate while it is active."""

    def __init__(self, *sizes):
        super().__init__()
        self.counts = dict.fromkeys(sizes, 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.add.Tensor:
            return result  # of the embedding's two gradients: autograd adds them in place where no mode looks on
        for tensor in tensors_in(result):
            is_new = tensor.untyped_storage().data_ptr() not in known
            if is_new and tensor.numel() in self.counts:
                self.counts[tensor.numel()] += 1
        return result


def tensors_in(tree):
    """The tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("stage, weights", [("s01", 4), ("s10", 2)])
def test_the_lessons_count_of_large_tensors_is_that_of_a_step(stage, weights):
    T, C = 16, 32
    torch.manual_seed(0)
    attention = definitions(stage, "attention", torch=torch, math=math, F=F)["attention"]
    model = GPT(GPTConfig(block_size=T, n_layer=1, n_head=1, n_embd=C), attention)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True if stage == "s10" else None)
    x = torch.zeros(1, T, dtype=torch.long)
    for _ in range(2):  # AdamW's moments stay from the first step on
        with LargeTensors(VOCAB * T, VOCAB * C) as large:
            optimizer.zero_grad()
            model(x, x).backward()
            optimizer.step()
    assert large.counts[VOCAB * C] == weights == LARGE_TENSORS[stage][1]
    assert large.counts[VOCAB * T] == 4 == LARGE_TENSORS["s01"][0]  # before torch.compile fuses two of them
