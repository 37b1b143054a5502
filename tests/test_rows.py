"""A row is a command: what is started for a word of the command line, and what is refused."""

from harness import ladder
from harness.bench.rows import CPU_MEMORY, all_rows, check_row, row_of, rows_of_climb, rows_of_ladder

import os
import sys
from pathlib import Path

import pytest
from conftest import ROOT, STAGE_FILES, error_of

SHORTS = [stage.short for stage in ladder.STAGES]


@pytest.fixture(autouse=True)
def own_scripts(tmp_path, monkeypatch):
    """Let a test run in a folder that has a script of its own, and two scripts of one name in other folders."""
    for name in ("mine.py", "my/train.py", "mine/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


def names(rows):
    """Return the names of Rows."""
    return [row.name for row in rows]


def rows_of(*words):
    """Return all Rows of a bench of these words."""
    for word in words:
        check_row(row_of(word))
    return all_rows([row_of(word) for word in words])


@pytest.mark.parametrize(
    "word, launcher, script, flags",
    [
        ("s11 --data s05", "", "s11_accum", "--data s05"),
        ("mine.py --steps 8 --device cpu config/a.py", "", "mine.py", "--steps 8 --device cpu config/a.py"),
        ("python -m torch.distributed.run -n 2 mine.py", "python -m torch.distributed.run -n 2", "mine.py", ""),
        ("-m _pythonic.train --lr 1", "", "_pythonic.train", "--lr 1"),
        ("numactl -m 0 python mine.py", "numactl -m 0 python", "mine.py", ""),
        ("accelerate launch --config_file=c.py mine.py -m", "accelerate launch --config_file=c.py", "mine.py", "-m"),
        ("torchrun --log-dir=s05 --standalone s12", "torchrun --log-dir=s05 --standalone", "s12_ddp", ""),
    ],
)
def test_a_word_is_a_launcher_a_script_and_flags(word, launcher, script, flags):
    row = row_of(word)
    assert (row.launcher, row.script, row.flags) == (launcher.split(), script, flags.split())


FOLDER = Path("/folder")
BENCH = {"warmup": 4, "seed": 5, "flags": ["--steps", "9", "--lr", "1"]}
WATCH_PY = [str(ROOT / "stages" / "watch.py"), "--record", "/folder/record", "--seed", "5", "--warmup", "4"]
WATCH_PY += ["--gate", "/folder/gate", str(os.getpid())]


@pytest.mark.parametrize(
    "word, watched",
    [
        ("s11 --accum 8", [str(STAGE_FILES["s11"]), *BENCH["flags"], "--accum", "8"]),
        (f"{ROOT}/stages/mine.py --accum 8", [f"{ROOT}/stages/mine.py", *BENCH["flags"], "--accum", "8"]),
        ("-m my.train --lr 2", ["-m", "my.train", "--lr", "2"]),
        ("+bf16 +fused mine.py", ["+bf16", "+fused", "mine.py"]),
    ],
)
def test_a_stage_runs_on_the_shared_flags_and_then_its_own_and_a_script_on_its_own_alone(word, watched):
    assert row_of(word).command(BENCH, 0, FOLDER) == [sys.executable, *WATCH_PY, *watched]


@pytest.mark.parametrize(
    "launcher, started",
    [
        ("torchrun -n 2", [sys.executable, "-m", "torch.distributed.run", "-n", "2"]),
        ("conda run -n A python", ["conda", "run", "-n", "A", "python"]),  # the Python of A
        ("python3 -u", [sys.executable, "-u"]),
        ("conda run -n python310", ["conda", "run", "-n", "python310", sys.executable]),  # the name of an environment
        ("env A=/python B=y.py", ["env", "A=/python", "B=y.py", sys.executable]),
        ("/usr/bin/python3.99", ["/usr/bin/python3.99"]),  # another Python stays what it is
    ],
)
def test_this_python_runs_a_command_that_names_no_other(launcher, started):
    assert row_of(f"{launcher} mine.py").command(BENCH, 0, FOLDER) == [*started, *WATCH_PY, "mine.py"]


def test_plain_has_no_memory_variables_and_without_turns_a_row_may_spin():
    os.environ |= {"OMP_WAIT_POLICY": "active", "MALLOC_MMAP_MAX_": "9"}
    plain, s01, *_ = rows_of_ladder("cpu", {})
    bench = {"turns": 0, "variables": CPU_MEMORY}
    assert not CPU_MEMORY.keys() & plain.variables(bench).keys()
    assert s01.variables(bench) == os.environ | CPU_MEMORY


@pytest.mark.parametrize(
    "word, reason",
    [
        ("python -m torch.distributed.run", "names no stage and no script"),
        ("gone.py --lr 1", "there is no script gone.py"),
        ("nothing-of-this-name -n 2 s12", "there is no nothing-of-this-name"),
        ("s05 --steps 9", "put --steps after all rows"),
        ("s11 again", "two rows are 's11 again'"),  # as the control is called
    ],
)
def test_rows_that_can_not_run_are_one_line(capsys, word, reason):
    assert reason in error_of(capsys, lambda: rows_of("s05", "s11", word))


@pytest.mark.parametrize(
    "words, bases",
    [
        (["s11", "mine.py", "s05"], ["s11", "mine.py"]),
        # the nearest row of the same script and flags that has no other techniques
        (["mine.py", "+bf16 mine.py", "+fused mine.py"], ["mine.py", "mine.py"]),
        (["+fused mine.py", "+bf16 +fused mine.py"], ["+fused mine.py"]),
        (["mine.py --a=1", "+bf16 mine.py --a=2"], ["mine.py --a=1"]),
    ],
)
def test_a_row_is_compared_with_the_one_above_and_a_technique_with_its_script(words, bases):
    assert [row.base for row in rows_of(*words) if not row.control_of] == [None, *bases]


def test_the_control_repeats_the_row_in_the_middle_or_the_first_of_two():
    assert names(rows_of("s01", "mine.py", "s02")) == ["s01", "mine.py", "mine.py again", "s02"]
    assert names(rows_of("s01", "mine.py")) == ["s01", "s01 again", "mine.py"]


def test_a_number_in_place_of_row_keeps_the_files_of_two_processes_apart():
    """It stands in the flags and in the launcher, and not in the name of the script."""
    command = row_of("env A=r{row} a{row}.py --out=o/{row}/x").command(BENCH, 5, FOLDER)
    assert (command[:2], command[-2:]) == (["env", "A=r5"], ["a{row}.py", "--out=o/5/x"])


LONG = "mine.py 0123456789ab"


@pytest.mark.parametrize(
    "words, titles",
    [
        (["s11 --accum 4", "s11 --accum 8", "s05 --lr 1"], ["s11 --accum 4", "s11 --accum 8", "s05"]),
        (["my/train.py", "mine/train.py", "mine.py"], ["my/train.py", "mine/train.py", "mine.py"]),
        (["mine.py", f"mine.py {'x' * 31}"], ["mine.py", "mine.py xxxxxxx…xxxxxxxxxxxxxxx"]),
        ([f"{LONG} 1 {LONG}", f"{LONG} 2 {LONG}"], ["mine.py 0123456…py 0123456789ab", f"{LONG} 2 {LONG}"]),
    ],
)
def test_a_title_is_the_script_or_the_command_if_two_rows_have_the_same_script(words, titles):
    assert [row.title for row in rows_of(*words) if not row.control_of] == titles


def test_the_ladder_has_all_stages_and_on_a_cpu_plain_above_them():
    plain, *_ = table = rows_of_ladder("cpu", {"float32": 1, "bfloat16": 2})
    assert (names(table), plain.keeps_memory) == (["plain", *SHORTS], False)
    assert names(rows_of_ladder("cuda", {})) == SHORTS
    assert names(rows_of_ladder("mps", {})) == SHORTS[:-1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_where_16_bits_are_slow_the_ladder_ends_with_s10_in_float32(dtype):
    *_, s12, last = all_rows(rows_of_ladder("cpu", {"float32": 2, dtype: 1}))
    assert (s12.name, last.title, last.base) == ("s12", "s10 --amp-dtype float32", "s10")


@pytest.mark.parametrize(
    "command, device, can_tf32, amp_dtype, bfloat16, compile_problem, climbed",
    [
        ("mine.py", "cuda", True, "bfloat16", 9, "no compiler", "mine.py, tf32, tf32 bf16, tf32 bf16 fused"),
        ("+bf16 mine.py", "cuda", False, "bfloat16", 9, None, "+bf16 mine.py, bf16 compile, bf16 compile fused"),
        ("mine.py", "cpu", False, "float32", None, "no compiler", "plain, mine.py, fused"),
        ("mine.py", "mps", False, "float16", None, None, "mine.py, fp16, fp16 compile, fp16 compile fused"),
        ("mine.py", "cpu", False, "bfloat16", 1, None, "plain, mine.py, compile, compile fused, compile fused bf16"),
    ],
)
def test_a_climb_adds_a_technique_in_each_row_that_does_something_here_and_a_slow_one_last(
    command, device, can_tf32, amp_dtype, bfloat16, compile_problem, climbed
):
    abilities = {"can_tf32": can_tf32, "amp_dtype": amp_dtype, "compile_problem": compile_problem}
    probed = {"environment": {"device": device}, "abilities": abilities}
    probed["rates"] = {"peak": {"float32": 2} | ({"bfloat16": bfloat16} if bfloat16 else {})}
    rows = rows_of_climb(row_of(command), probed)
    added = [" ".join(row.added) if row.name.startswith("+ ") else row.name for row in rows]
    assert ", ".join(added) == climbed
