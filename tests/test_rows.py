"""A row is a command: what is started for a word of the command line, and what is refused."""

from harness import ladder
from harness.bench.rows import CPU_MEMORY, all_rows, check, row_of, rows_of_climb, rows_of_ladder

import os
import sys
from pathlib import Path

import pytest
from conftest import ROOT, STAGE_FILES, error_of

SHORTS = [stage.short for stage in ladder.STAGES]


@pytest.fixture(autouse=True)
def own_scripts(tmp_path, monkeypatch):
    """A folder to be in, with scripts in it and in two folders."""
    for name in ("mine.py", "my/train.py", "my/s12_ddp.py", "my/s12.py", "mine/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


def names(rows):
    """The names of Rows."""
    return [row.name for row in rows]


def rows_of(*words):
    """All Rows of a bench of these words."""
    rows = [row_of(word) for word in words]
    for row in rows:
        check(row)
    return all_rows(rows)


@pytest.mark.parametrize(
    "word, launcher, script, flags",
    [
        ("s11 --data s05", "", "s11_accum", "--data s05"),
        ("mine.py --steps 8 --device cpu config/a.py", "", "mine.py", "--steps 8 --device cpu config/a.py"),
        ("my/s12_ddp.py --accum 8", "", "my/s12_ddp.py", "--accum 8"),
        ("python -u -m my.train --depth=4", "python -u", "my.train", "--depth=4"),
        ("python -m torch.distributed.run -n 2 mine.py", "python -m torch.distributed.run -n 2", "mine.py", ""),
        ("-m pythonic.train --lr 1", "", "pythonic.train", "--lr 1"),
        ("numactl -N 0 -m 0 python mine.py", "numactl -N 0 -m 0 python", "mine.py", ""),
        ("accelerate launch --config_file=c.py mine.py -m", "accelerate launch --config_file=c.py", "mine.py", "-m"),
        ("torchrun --log-dir=s05 --standalone s12", "torchrun --log-dir=s05 --standalone", "s12_ddp", ""),
        ("A=b mine.py", "env A=b", "mine.py", ""),
    ],
)
def test_a_word_is_a_launcher_a_script_and_flags(word, launcher, script, flags):
    row = row_of(word)
    assert (row.launcher, row.script, row.flags) == (launcher.split(), script, flags.split())


FOLDER = Path("/folder")
BENCH = {"steps": 9, "warmup": 4, "turns": 0, "seconds": 6, "seed": 5, "flags": ["--steps", "9", "--lr", "1"]}


def command_of(row, *others):
    """The command of a Row in a bench of it and others."""
    return row.command(BENCH | {"rows": [{"name": each.name} for each in (row, *others)]}, 0, FOLDER)


WATCH = [str(ROOT / "stages" / "watch.py"), "--record", "/folder/record", "--seed", "5", "--warmup", "4"]
WATCH += ["--steps", "9", "--seconds", "6"]


def test_a_stage_runs_on_the_shared_flags_and_then_its_own_and_so_does_a_script_beside_it():
    command = command_of(row_of("env A=b s11 --accum 8"))
    assert command == ["env", "A=b", sys.executable, *WATCH, str(STAGE_FILES["s11"]), *BENCH["flags"], "--accum", "8"]
    beside = f"{ROOT}/stages/mine.py"
    assert command_of(row_of(f"{beside} --accum 8"))[1:] == [*WATCH, beside, *BENCH["flags"], "--accum", "8"]
    assert command_of(row_of("+fused s09"))[1:] == [*WATCH, "+fused", str(STAGE_FILES["s09"]), *BENCH["flags"]]


def test_a_script_is_watched_with_its_own_flags_alone(tmp_path):
    assert command_of(row_of("own.py"))[1:] == [*WATCH, "own.py"]
    assert command_of(row_of("-m my.train --lr 2")) == [sys.executable, *WATCH, "-m", "my.train", "--lr", "2"]
    assert command_of(row_of("+bf16 +fused mine.py")) == [sys.executable, *WATCH, "+bf16", "+fused", "mine.py"]


def test_this_python_runs_a_command_that_names_no_other(tmp_path):
    command = command_of(row_of("env A=b torchrun --nproc_per_node=2 mine.py"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    assert command == ["env", "A=b", *torchrun, *WATCH, "mine.py"]
    assert command_of(row_of("python3 -u s01"))[:3] == [sys.executable, "-u", WATCH[0]]
    assert command_of(row_of("env A=/python B=y.py s01"))[:4] == ["env", "A=/python", "B=y.py", sys.executable]
    (tmp_path / "python3.99").touch(mode=0o755)  # another Python stays what it is
    named = command_of(row_of(f"{tmp_path}/python3.99 mine.py"))
    assert named == [f"{tmp_path}/python3.99", *WATCH, "mine.py"]


def test_a_scripts_environment_is_its_own_but_for_what_is_the_same_for_all(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "9")  # the reader's own is not that of the bench
    bench = {"variables": CPU_MEMORY | {"CUDA_VISIBLE_DEVICES": ""}}
    for name in ("mine.py", "s05"):
        assert row_of(name).environment(bench) == os.environ | bench["variables"]
    plain, *_ = rows_of_ladder("cpu")
    assert not CPU_MEMORY.keys() & plain.environment(bench).keys()


@pytest.mark.parametrize(
    "word, reason",
    [
        ("python -m torch.distributed.run", "names no stage and no script"),
        ("gone.py --lr 1", "there is no gone.py"),
        ("nothing-of-this-name -n 2 s12", "there is no nothing-of-this-name"),
        ("+flash mine.py", "there is no +flash"),
        ("s05 --steps 9", "put --steps after all rows"),
        ("s05", "two rows are 's05'"),
        ("s11 again", "two rows are 's11 again'"),
    ],
)
def test_rows_that_can_not_run_are_one_line(capsys, word, reason):
    assert reason in error_of(capsys, lambda: rows_of("s05", "s11", word))


def test_rows_stand_in_the_order_of_the_command_line_each_compared_with_the_one_above():
    together = rows_of("s11", "mine.py", "s05", "s06")
    assert names(together) == ["s11", "mine.py", "s05", "s05 again", "s06"]
    assert [row.base for row in together] == [None, "s11", "mine.py", "s05", "s05"]


def test_a_row_with_techniques_is_compared_with_the_nearest_row_of_its_script_without_others():
    bases = {
        row.name: row.base for row in rows_of("mine.py", "+bf16 mine.py", "+fused mine.py", "+bf16 +fused mine.py")
    }
    assert bases["+fused mine.py"] == "mine.py"
    assert bases["+bf16 +fused mine.py"] == "+fused mine.py"
    apart = rows_of("mine.py --a=1", "+bf16 mine.py --a=2")
    assert apart[-1].base == "mine.py --a=1"  # of other flags there is no row


def test_the_control_is_in_the_middle_of_the_stages_or_of_all_where_there_are_none_and_of_two_the_first():
    words = ["mine.py", "my/train.py", "s01", "s02", "s03"]
    for count, repeated in ((5, "s02"), (2, "mine.py")):
        assert [row.control_of for row in rows_of(*words[:count]) if row.control_of] == [repeated]


def test_a_number_of_the_row_keeps_the_files_of_two_rows_apart_when_they_start():
    """The control's, too; as they were typed the two rows have the same flags."""
    first, again, second = together = rows_of("mine.py --out=o/{row}/x", "env A=r{row} mine.py --out=o/{row}/x")
    bench = BENCH | {"rows": [{"name": row.name} for row in together]}
    started = [(row, number) for number in range(2) for row in (first, again, second)]
    folders = [row.command(bench, number, FOLDER)[-1] for row, number in started]
    assert folders == [f"--out=o/{count}/x" for count in range(6)]
    assert second.command(bench, 1, FOLDER)[:2] == ["env", "A=r5"]
    assert second.flags == first.flags


@pytest.mark.parametrize(
    "words, titles",
    [
        (["s11 --batch-size 16", "s11 --batch-size 64 --lr 1"], ["s11 --batch-size 16", "s11 --batch-size 64 --lr 1"]),
        (["torchrun --x=1 s12", "torchrun --x=2 s12"], ["--x=1 s12", "--x=2 s12"]),
        (["mine.py --a=1", "+bf16 mine.py --a=1"], ["mine", "mine +bf16"]),
        (["my/train.py", "mine/train.py", "mine.py"], ["my/train", "mine/train", "mine"]),
        (["s12", "my/s12.py"], ["s12", "my/s12"]),
        (["s05 --a 1 --b 2", "s05 --b 2 --a 1"], ["s05 #1", "s05 #2"]),
        (["mine.py", f"mine.py --text={'x' * 30}"], ["mine", "mine --text=xxx…xxxxxxxxxxxxxxx"]),
    ],
)
def test_a_title_is_the_script_and_what_tells_its_rows_apart(words, titles):
    assert [row.title for row in rows_of(*words) if not row.control_of] == titles


def test_the_ladder_has_all_stages_and_on_a_cpu_plain_above_them():
    table = rows_of_ladder("cpu")
    assert names(table) == ["plain", *SHORTS]
    assert command_of(table[0]) == command_of(table[1])
    assert (table[0].keeps_memory, table[1].keeps_memory) == (False, True)
    assert names(rows_of_ladder("cuda")) == SHORTS
    assert names(rows_of_ladder("mps")) == [stage.short for stage in ladder.STAGES if not stage.takes_ranks]


def climb(command, device, units, compile_problem=None):
    """[(name, techniques)] of the rows of a climb on a machine of that kind."""
    machine = {"environment": {"device": device}, "units": units, "compile_problem": compile_problem}
    return [(row.name, " ".join(row.added)) for row in rows_of_climb(row_of(command), machine)]


def test_a_climb_adds_a_technique_in_each_row_but_those_that_the_script_has():
    *_, third, last = climb("mine.py --lr 1", "cuda", {"tf32", "bfloat16"})
    assert third == ("+ compile", "tf32 bf16 compile")
    assert last == ("+ fused", "tf32 bf16 compile fused")
    climbed = climb("+bf16 mine.py", "cuda", {"bfloat16"})
    assert climbed == [("+bf16 mine.py", "bf16"), ("+ compile", "bf16 compile"), ("+ fused", "bf16 compile fused")]


def test_a_climb_leaves_out_what_does_nothing_here_and_says_why(capsys):
    climbed = climb("mine.py", "cpu", set(), "no compiler")
    assert climbed == [("plain", ""), ("mine.py", ""), ("+ fused", "fused")]
    assert "+compile is left out: no compiler\n" in capsys.readouterr().err
