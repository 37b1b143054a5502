"""A row is a command: what is started for a word of the command line, and what is refused."""

from harness import ladder
from harness.bench.rows import CPU_MEMORY, WITHOUT_CPU_MEMORY, row_of, rows_of

import sys

import pytest
import torch
from conftest import ROOT, STAGE_FILES, error_of

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
SHORTS = [stage.short for stage in ladder.STAGES]


@pytest.fixture(autouse=True)
def own_scripts(tmp_path, monkeypatch):
    """A folder to be in, with a script, and a copy of a stage in another folder."""
    (tmp_path / "mine.py").touch()
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "s12_ddp.py").touch()
    monkeypatch.chdir(tmp_path)


def names(rows):
    """The names of Rows."""
    return [row.name for row in rows]


@pytest.mark.parametrize(
    "word, name, title, script, launcher, flags",
    [
        ("s05", "s05", "s05", "s05_flash", "", ""),
        ("s05_flash", "s05", "s05", "s05_flash", "", ""),
        ("s11 --batch-size 16", "s11 --batch-size 16", "s11", "s11_accum", "", "--batch-size 16"),
        ("mine.py", "mine.py", "mine", "mine.py", "", ""),
        ("my/s12_ddp.py --accum 8", "my/s12_ddp.py --accum 8", "s12_ddp", "my/s12_ddp.py", "", "--accum 8"),
        ("torchrun --x 2 s12", "torchrun --x 2 s12", "s12", "s12_ddp", "torchrun --x 2", ""),
        ("env A=b mine.py", "env A=b mine.py", "mine", "mine.py", "env A=b", ""),
    ],
)
def test_a_word_is_a_launcher_a_script_and_flags(word, name, title, script, launcher, flags):
    row = row_of(word)
    assert (row.name, row.title, row.script) == (name, title, script)
    assert (row.launcher, row.flags) == (tuple(launcher.split()), tuple(flags.split()))


def test_a_command_runs_this_python_on_the_shared_flags_and_then_its_own(tmp_path):
    command = row_of("env A=b s11 --accum 8").command(["--steps", "9"])
    assert command == ["env", "A=b", sys.executable, str(STAGE_FILES["s11"]), "--steps", "9", "--accum", "8"]
    command = row_of("env A=b torchrun --nproc_per_node=2 mine.py").command([])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    assert command == ["env", "A=b", *torchrun, str(tmp_path / "mine.py")]
    assert row_of("python3 -u mine.py").command([]) == [sys.executable, "-u", str(tmp_path / "mine.py")]
    assert row_of("nice python_2 s01").command([])[:3] == ["nice", "python_2", sys.executable]
    assert row_of("env A=/python B=y.py s01").command([])[:4] == ["env", "A=/python", "B=y.py", sys.executable]
    (tmp_path / "lr=3.py").touch()
    assert row_of("lr=3.py").script == "lr=3.py"
    (tmp_path / "a=b").mkdir()
    (tmp_path / "a=b" / "python").touch(mode=0o755)
    assert row_of(f"{tmp_path}/a=b/python s01").command([])[:2] == [f"{tmp_path}/a=b/python", str(STAGE_FILES["s01"])]
    (tmp_path / "python3.99").touch(mode=0o755)  # another Python stays what it is
    named = row_of(f"{tmp_path}/python3.99 mine.py").command([])
    assert named == [f"{tmp_path}/python3.99", str(tmp_path / "mine.py")]


@pytest.mark.parametrize(
    "word, reason",
    [
        ("--x", "'--x' names no stage"),
        ("gone.py --lr 1", "there is no gone.py"),
        ("nothing-of-this-name -n 2 s12", "there is no nothing-of-this-name"),
    ],
)
def test_a_word_that_can_not_run_is_one_line(capsys, word, reason):
    assert reason in error_of(capsys, row_of, word)


@pytest.mark.parametrize("name", ["model.py", "data.py", "model/__init__.py"])
def test_a_script_beside_a_namesake_of_the_ladders_modules_is_one_line(capsys, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert "rename it" in error_of(capsys, row_of, "mine.py")
    row_of("s05")


def test_rows_stand_in_the_order_of_the_command_line_each_compared_with_the_one_above():
    all_rows, reference = rows_of(["s11", "mine.py", "s05"], CPU)
    assert reference == "s11"
    assert names(all_rows) == ["probe", "s11", "mine.py", "s05", "s05 again"]
    assert [row.above for row in all_rows] == [None, None, "s11", "mine.py", None]
    assert all_rows[-1].control_of == "s05"
    assert all_rows[0].path == ROOT / "stages" / "harness" / "bench" / "probe.py"


def test_the_control_is_in_the_middle_of_the_stages_or_of_all_where_there_are_none():
    words = ["mine.py", "my/s12_ddp.py", "s01", "s02", "s03"]
    assert "s02 again" in names(rows_of(words, CUDA)[0])
    assert "my/s12_ddp.py again" in names(rows_of(words[:2], CUDA)[0])


def test_two_rows_of_one_name_are_one_line(capsys):
    assert "two rows are 's05'" in error_of(capsys, rows_of, ["s05", "s11", "s05_flash"], CPU)


def test_plain_goes_without_each_of_the_memory_variables():
    assert CPU_MEMORY == {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "THP_MEM_ALLOC_ENABLE": "1"}
    assert [*CPU_MEMORY] == [*WITHOUT_CPU_MEMORY[2::2]]


def test_without_words_the_ladder_runs_on_a_cpu_with_plain_above_it():
    all_rows, reference = rows_of([], CPU)
    table = [row for row in all_rows if not row.is_probe and not row.control_of]
    assert names(table) == ["plain", *SHORTS]
    assert reference == table[1].name == table[2].above
    assert table[0].command([]) == [*WITHOUT_CPU_MEMORY, sys.executable, str(STAGE_FILES["s01"])]
    assert table[1].command([]) == [sys.executable, str(STAGE_FILES["s01"])]


def test_without_words_the_ladder_runs_on_a_card_and_on_apples_chip_without_several_ranks():
    table = [name for name in names(rows_of([], CUDA)[0]) if name in SHORTS]
    assert table == SHORTS
    table = [name for name in names(rows_of([], MPS)[0]) if name in SHORTS]
    assert table == [stage.short for stage in ladder.STAGES if not stage.takes_ranks]
