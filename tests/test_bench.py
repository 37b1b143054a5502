"""The bench: its command line, what it measures, and what it keeps when it, a stage or the machine fails."""

from harness import ladder, leader, machine, page, results
from harness.leader import Session, Worker, say
from harness.results import CONTROL, PEAK, WARMUP, Results

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import FLOAT32, ROOT, process
from fixtures.fake_stage import all_have_ended

import bench
import data

S01, S02, S03 = "s01_baseline", "s02_tf32", "s03_bf16"
AGAIN = S02 + CONTROL
EVERYONE = [S01, PEAK, S02, AGAIN, S03]  # in the order in which they start
COUNTED = 2
STEPS = WARMUP + COUNTED
CORPUS_IDS = 10_000
TRAINED_IDS = 9000  # the last tenth is held out
# what the bench reports
WHILE_STARTING, AT_THE_FIRST_STEP, AT_THE_LAST_STEP = "[3/5]", "step 1/2", "step 2/2"


@dataclass
class Ended:
    """A bench that has ended: its exit status and what it printed."""

    status: int
    out: str
    err: str


class Repository:
    """A copy of this repository in which s01, s02, s03 and the probe are fakes.

    Its bench runs in this process. timeouts: those that its workers got.
    """

    def __init__(self, folder, monkeypatch, capsys):
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.records = folder / "results" / "x.jsonl"
        self.page = folder / "results" / "x.md"
        self.readme = folder / "README.md"
        self.corpus = folder / "ids.bin"
        self.flags = ["--device", "cpu", "--data", str(self.corpus)]
        self.flags += ["--batch-size", "4", "--steps", str(STEPS)]
        self.acts = {}
        self.timeouts = []

    def plan(self, plans):
        """What the fakes do, by the names of their rows; those without a plan do nothing amiss."""
        self.monkeypatch.setenv("FAKE_PLANS", json.dumps(plans))

    def when(self, part, act):
        """Call act() once, as soon as the bench reports a line with this part."""
        self.acts[part] = act

    def say(self, line, brief=False):
        """Takes the place of leader.say()."""
        say(line, brief)
        for part in list(self.acts):
            if part in line:
                act = self.acts.pop(part)
                act()

    def command(self, *words):
        """`python bench.py WORDS`."""
        self.monkeypatch.setattr(sys, "argv", ["bench.py", *words])
        self.capsys.readouterr()
        try:
            status = bench.main()
        except SystemExit as end:
            status = end.code
        printed = self.capsys.readouterr()
        return Ended(status, printed.out, printed.err)

    def run(self, *words):
        """A bench named x, of the three fakes where the words name nothing else."""
        what = words or (S01, S02, S03)
        return self.command(*self.flags, "--out", "x", *what)

    def results(self):
        return Results(self.records)

    def steps_taken(self):
        """{row: [steps that each of its processes took]}."""
        taken = {}
        for (_, name), run in self.results().runs.items():
            taken.setdefault(name, []).append(len(run.steps))
        return taken

    def counted_steps(self):
        """{row: counted steps of all its processes}."""
        return {name: len(self.results().counted_steps(name)) for name in EVERYONE}

    def order(self):
        """(session, row) of each counted step, in the order in which they were taken."""
        order = []
        for line in results.read(self.records):
            if line["kind"] == "step" and line["step"] >= WARMUP:
                order.append((line["session"], line["name"]))
        return order


def not_heard(signal_number, frame):
    raise AssertionError(f"the bench did not hear signal {signal_number}")


def copy_repository(folder):
    """Copy what a bench needs, with fakes in place of s01, s02, s03 and the probe, and a corpus of zeros."""
    ignored = shutil.ignore_patterns("__pycache__", "*.md")
    shutil.copytree(ROOT / "stages", folder / "stages", ignore=ignored)
    for name in ("bench.py", "data.py", "model.py"):
        shutil.copy(ROOT / name, folder)
    fake = ROOT / "tests" / "fixtures" / "fake_stage.py"
    for script in (S01, S02, S03, "harness/probe"):
        shutil.copy(fake, folder / "stages" / f"{script}.py")
    (folder / "results").mkdir()
    (folder / "README.md").write_text(f"{page.BEGIN}\n{page.END}\n")
    (folder / "ids.bin").write_bytes(bytes(2 * CORPUS_IDS))


@pytest.fixture
def no_process_is_left(tmp_path, monkeypatch):
    """A test leaves none of the fakes that it started, nor their children."""
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setenv("FAKE_LOCK", str(lock))
    yield
    assert all_have_ended(lock)


@pytest.fixture
def signals_are_heard():
    """A signal that the bench does not handle fails the test, and does not end it."""

    def not_heard(signal_number, frame):
        raise AssertionError(f"the bench did not hear signal {signal_number}")

    handlers = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        handlers[number] = signal.signal(number, not_heard)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def repo(tmp_path, monkeypatch, capsys, no_process_is_left, signals_are_heard):
    """A Repository, in a folder with a blank in its name."""
    folder = tmp_path / "a copy"
    copy_repository(folder)
    repo = Repository(folder, monkeypatch, capsys)

    class NamedWorker(Worker):
        """A worker whose fake knows of which row it is."""

        def __init__(self, row, flags, timeout, *others):
            repo.timeouts.append(timeout)
            super().__init__(replace(row, env={"FAKE_ROW": row.name, **row.env}), flags, timeout, *others)

    monkeypatch.setattr(bench, "ROOT", folder)
    monkeypatch.setattr(ladder, "FOLDER", folder / "stages")
    monkeypatch.setattr(leader, "Worker", NamedWorker)
    monkeypatch.setattr(leader, "say", repo.say)
    monkeypatch.setattr(leader, "PAUSE", 0)
    monkeypatch.setattr(machine, "free_memory", lambda: 10**15)  # how much is free here does not matter
    return repo


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, as far as the bench looks at it."""
    environment = machine.environment(torch.device("cpu")) | {"device": "cuda", "device_name": "A GPU"}
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(machine, "cuda_problem", lambda: None)
    monkeypatch.setattr(machine, "total_memory", lambda device: 80e9)
    monkeypatch.setattr(machine, "native_amp_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(machine, "compile_problem", lambda device, amp_dtype: None)
    monkeypatch.setattr(machine, "environment", lambda device: environment)


def start_nothing(running):
    """Takes the place of Bench.run() where a bench is not to get so far."""
    raise AssertionError("the bench starts its first process")


@pytest.mark.parametrize(
    "words, message",
    [
        ("s13", "s13 is no stage"),
        ("0", "0 is no stage"),
        ("s5x", "s5x is no stage"),
        ("s02 amp", "amp is no stage"),
        ("--out ../x", "'../x' is no name"),
        ("--out=", "'' is no name"),
        ("--render .x", "'.x' is no name"),
        ("--rounds 0", "--rounds"),
        ("--rounds x", "--rounds"),
        ("--steps 0", "--steps"),
        ("--steps x", "--steps"),
        ("--steps 4", "--steps 4: the first 4 steps are warm-up"),
        ("--timeout 0", "--timeout"),
        ("--timeout x", "--timeout"),
        ("--memory-budget 0", "--memory-budget 0"),
        ("--memory-budget x", "--memory-budget"),
        ("limit --memory-budget nan", "--memory-budget nan"),
        ("--ranks 0", "--ranks"),
        ("--ranks x", "--ranks"),
        ("--seq-len 2000", "--seq-len 2000"),
        ("--data gone.txt", "gone.txt"),
        ("--record x.jsonl", "--record"),
        ("--save x", "--save"),
        ("--worker", "single stage"),
        ("--eval", "single stage"),
        ("--profile", "single stage"),
        ("amp --readme", "leave --readme or amp out"),
        ("amp --amp-dtype float16", "leave --amp-dtype out"),
        ("amp s02", "from s03 on"),
        ("amp s02 s03", "pass one"),
        ("scale s02", "scale compares numbers of processes in s12, which alone knows several: name no other stage"),
        ("scale --ranks 9999", "--ranks 9999: this machine has 4 cores, so pass at most 4"),
        ("scale --ranks 3 --accum 4", "--accum 4 does not divide over [1, 2, 3] ranks: pass a multiple of 6"),
        ("loss --accum 2", "--accum"),
        ("loss --rounds 10", "pass --seeds instead of --rounds"),
        ("loss --seeds 0", "--seeds"),
        ("loss --lr 0", "'0' is not a number above 0"),
        ("loss --lr 6e-4 nan", "'nan' is not a number above 0"),
        ("loss --lr", "--lr"),
        ("loss --lr 6e-4 0.0006", "--lr 6e-4 6e-4 names a rate twice"),
        ("--lr 3e-4 6e-4", "several rates in the mode loss alone"),
        ("amp --lr 3e-4 6e-4", "several rates in the mode loss alone"),
        ("loss stages/gone.py", "stages/gone.py is no stage"),
        ("loss gone.py", "gone.py is no stage"),
        ("memory s01 s10", "memory compares settings in one stage: pass one"),
        ("memory plain", "plain is no stage"),
        ("--render gone", "results/gone.jsonl is not there"),
        ("--out old", "results/old.jsonl is there already: pass another --out, --resume old or --render old"),
        ("--out page", "results/page.md is there already"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_status_2(repo, monkeypatch, words, message):
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.setattr(bench.Bench, "run", start_nothing)
    old = [repo.folder / "results" / "old.jsonl", repo.folder / "results" / "page.md"]
    for path in old:
        path.write_text("mine")
    ended = repo.command("--data", str(repo.corpus), *words.split(), "--device", "cpu")
    assert ended.status == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert ended.out == ""
    assert [path.read_text() for path in old] == ["mine", "mine"]
    assert sorted((repo.folder / "results").iterdir()) == old


@pytest.mark.parametrize(
    "words, message",
    [
        ("--resume a/b", "'a/b' is no name"),
        ("--resume gone", "results/gone.jsonl is not there"),
        ("--resume=old s01", "pass no other than --timeout"),
        ("--resume old --steps 20", "pass no other than --timeout"),
        ("--resume old --timeout 0", "--timeout"),
        ("--resume", "--resume"),
        ("--resume old", "old.jsonl: line 1 is damaged"),
    ],
)
def test_a_wrong_resume_is_one_line_and_exit_status_2(repo, words, message):
    old = repo.folder / "results" / "old.jsonl"
    old.write_text("mine\n")
    ended = repo.command(*words.split())
    assert ended.status == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert old.read_text() == "mine\n"


def test_readme_without_markers_is_reported_before_anything_runs(repo):
    repo.readme.write_text("mine")
    ended = repo.run("s01", "--readme")
    assert ended.status == 2
    assert "README.md must hold" in ended.err
    assert repo.readme.read_text() == "mine"
    assert not repo.records.exists()


def test_a_readme_that_is_not_utf_8_is_one_line(repo):
    latin_1 = "ä".encode("latin-1")
    repo.readme.write_bytes(latin_1)
    ended = repo.run("s01", "--readme")
    assert ended.status == 2
    assert ended.err.startswith("bench.py: error: README.md is not UTF-8")
    assert ended.err.count("\n") == 1
    assert repo.readme.read_bytes() == latin_1
    assert not repo.records.exists()


def parse(*words):
    return bench.parse(["--device", "cpu", *words])


@pytest.fixture
def unusable_card(monkeypatch):
    """A machine with a card, and a driver that is too old for this torch."""
    problem = "The NVIDIA driver on your system is too old: update the driver"
    monkeypatch.setattr(machine, "cuda_problem", lambda: problem)


def test_a_card_that_can_not_be_used_is_one_line_and_exit_status_2(repo, unusable_card):
    ended = repo.command("s01", "--data", str(repo.corpus), "--out", "x")
    assert ended.status == 2
    reason = "the card can't be used: The NVIDIA driver on your system is too old: update the driver"
    assert ended.err == f"bench.py: error: {reason}; or pass --device cpu to measure the CPU\n"
    assert not repo.records.exists()


def test_the_cpu_is_measured_beside_a_card_where_it_is_named(unusable_card):
    assert parse("s01").device.type == "cpu"


def test_a_page_is_drawn_whatever_the_card(repo, unusable_card):
    assert repo.run("s01", "s02").status == 0
    assert repo.command("--render", "x").status == 0


@pytest.mark.parametrize("word", ["s05", "5", "05", "s5", "s05_flash"])
def test_a_stage_has_several_names(word):
    assert parse(word).stages == ["s05_flash"]


def test_stages_are_in_the_order_of_the_ladder_each_once():
    assert parse("11", "s01", "s11").stages == ["s01_baseline", "s11_accum"]


@pytest.mark.parametrize(
    "mode, first, last, count",
    [
        ("", "s01_baseline", "s12_ddp", 12),
        ("amp", "s03_bf16", "s03_bf16", 1),
        ("limit", "s05_flash", "s11_accum", 2),
        ("scale", "s12_ddp", "s12_ddp", 1),
        ("loss", "s06_vocab", "s08_cosine", 3),
        ("memory", "s01_baseline", "s01_baseline", 1),
    ],
)
def test_a_mode_has_stages_of_its_own(mode, first, last, count):
    stages = parse(*mode.split()).stages
    assert (stages[0], stages[-1], len(stages)) == (first, last, count)


def names_of_rows(*words):
    """The names of the rows of a bench."""
    rows, _ = bench.rows_of(parse(*words))
    return [row.name for row in rows]


def test_on_a_cpu_the_ladder_begins_with_the_row_plain():
    assert names_of_rows() == ["plain", *ladder.names()]
    assert names_of_rows("plain", "s05") == ["plain", "s05_flash"]
    assert names_of_rows("plain") == ["plain"]
    assert names_of_rows("s01", "s05") == ["s01_baseline", "s05_flash"]


def test_on_a_gpu_there_is_no_row_plain(gpu, capsys):
    assert names_of_rows() == ladder.names()
    for words in (["plain"], ["memory"]):
        with pytest.raises(SystemExit):
            parse(*words)
        assert f"{words[0]} is about the memory of a CPU, and this is cuda" in capsys.readouterr().err


def test_a_bench_in_a_process_that_is_plain_itself_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("LADDER_PLAIN", "1")
    with pytest.raises(SystemExit):
        parse("s01")
    assert "LADDER_PLAIN is set, and the bench has a row for that: unset it" in capsys.readouterr().err


def test_the_row_plain_runs_s01_and_every_row_is_compared_with_both(repo, monkeypatch):
    monkeypatch.setattr(Session, "room", lambda session: 5 - len(session.live))
    assert repo.run("plain", "s01", "s02", "s03").status == 0
    results = repo.results()
    assert results.header("plain")["stage"] == S01
    for name in (S02, S03):
        for base in {"plain", S01, results.row_above(name)}:
            assert results.compare(name, base) is not None
    assert "| vs previous | vs plain | vs s01 |" in repo.page.read_text()
    assert f"[plain](../stages/{S01}.py)" in repo.page.read_text()


def test_a_cpu_takes_one_round_in_which_all_take_turns():
    args = parse()
    assert (args.interleaved, args.rounds, args.steps) == (True, 1, 24)


def test_a_gpu_takes_five_rounds_of_one_after_the_other(gpu):
    args = parse()
    assert (args.interleaved, args.rounds) == (False, 5)


def test_loss_on_a_cpu_is_what_two_cores_do_in_20_minutes():
    args = parse("loss")
    assert (args.steps, args.batch_size, args.seq_len, args.accum) == (80, 2, 256, 1)
    assert args.lr == [1.5e-4, 6e-4, 2.4e-3]
    assert args.rounds == 2


def test_on_a_gpu_loss_has_five_seeds(gpu):
    assert parse("loss").rounds == 5


def test_the_seeds_of_loss_are_its_rounds():
    assert parse("loss", "--seeds", "3").rounds == 3


def test_flags_that_are_given_take_the_place_of_a_modes_defaults():
    args = parse("loss", "--steps", "30", "--batch-size", "8", "--seq-len", "64")
    assert (args.steps, args.batch_size, args.seq_len) == (30, 8, 64)


@pytest.mark.parametrize(
    "tokens, steps",
    [
        (301_966, 36),  # Tiny Shakespeare: 600 steps would be 32 passes
        (10**9, 600),
        (1000, WARMUP + 1),
    ],
)
def test_loss_on_a_gpu_takes_600_steps_and_no_more_than_two_passes(gpu, tokens, steps):
    args = parse("loss", "--batch-size", "16", "--seq-len", "1024")
    assert args.steps is None
    assert bench.steps_of_loss(args, range(tokens)) == steps


def test_the_bench_itself_opens_no_context_on_the_gpu(gpu, monkeypatch):
    """It would hold memory that `limit` looks for, and lock its own children out of an exclusive card."""

    def refuse(*arguments):
        raise AssertionError("this opens a context")

    monkeypatch.setattr(machine, "is_wsl", lambda: True)
    monkeypatch.setattr(torch.accelerator, "set_device_index", refuse)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", refuse)
    assert parse("s05").device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    "devices, sizes, accum",
    [
        (1, [1], 4),
        (2, [1, 2], 4),
        (3, [1, 2, 3], 6),
        (4, [1, 2, 4], 4),
        (5, [1, 2, 4, 5], 20),
        (6, [1, 2, 4, 6], 12),
        (7, [1, 2, 4, 7], 28),
        (8, [1, 2, 4, 8], 8),
    ],
)
def test_scale_divides_the_same_micro_batches_over_all_its_ranks(gpu, monkeypatch, devices, sizes, accum):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    args = parse("scale")
    rows, probes = bench.rows_of(args)
    assert [row.ranks for row in rows] == sizes
    assert [row.ranks for row in probes] == sizes[1:]
    assert args.accum == accum
    assert all(accum % size == 0 for size in sizes)
    flags = bench.shared_flags(args)
    assert flags[flags.index("--accum") + 1] == str(accum)
    assert flags[flags.index("--device") + 1] == "cuda"  # each rank takes a card of its own


def test_scale_on_a_cpu_gives_each_rank_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 6)
    rows, probes = bench.rows_of(parse("scale", "--ranks", "3"))
    assert [row.name for row in rows] == ["1 rank", "2 ranks", "3 ranks"]
    assert [row.name for row in probes] == ["all-reduce 2 ranks", "all-reduce 3 ranks"]
    assert {row.env["OMP_NUM_THREADS"] for row in rows + probes} == {"2"}


def test_a_bench_on_a_cpu_takes_a_step_of_each_row_in_turn_there_and_back(repo):
    ended = repo.run()
    assert ended.status == 0
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS])
    rows = [name for _, name in repo.order()]
    assert rows == EVERYONE + EVERYONE[::-1]


def test_a_stage_is_compared_with_the_others_of_its_round(repo):
    repo.plan({S03: {"dt": 0.05}})
    repo.run()
    assert repo.results().compare(S03, S01).value == pytest.approx(2)
    assert repo.results().compare(S02, S01).value == pytest.approx(1)


def test_the_page_is_printed_and_written(repo):
    ended = repo.run()
    assert ended.out == repo.page.read_text() + "\n"
    assert ended.out == page.page(repo.results()) + "\n"
    assert ended.err.endswith("written to results/x.md, the records to results/x.jsonl\n")


def test_render_draws_the_page_again_and_runs_nothing(repo):
    ended = repo.run()
    records = repo.records.read_bytes()
    repo.page.unlink()
    drawn = repo.command("--render", "x")
    assert (drawn.status, drawn.out) == (0, ended.out)
    assert repo.page.read_text() + "\n" == ended.out
    assert repo.records.read_bytes() == records


def test_a_bench_without_a_name_is_named_by_its_time_and_mode(repo):
    repo.command(*repo.flags, "limit", "s01", "--memory-budget", "0.000001")
    (records,) = (repo.folder / "results").glob("*.jsonl")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}-limit.jsonl", records.name)


def test_every_flag_reaches_every_process(repo):
    flags = "--seq-len 64 --size tiny --seed 7 --lr 1.2e-3 --accum 6 --amp-dtype float16 --no-compile"
    repo.run(S01, S02, S03, *flags.split())
    for name in (S01, S02, AGAIN, S03):
        settings = repo.results().header(name)["settings"]
        assert settings["batch_size"] == 4
        assert settings["seq_len"] == 64
        assert settings["size"] == "tiny"
        assert settings["seed"] == 7
        assert settings["lr"] == 1.2e-3
        assert settings["accum"] == 6
        assert settings["amp_dtype"] == "float16"
        assert settings["compile"] is False
        assert settings["data"] == str(repo.corpus)


def test_amp_runs_one_stage_in_three_dtypes(repo):
    assert repo.run("amp", "s03").status == 0
    assert repo.results().rows == ["float32", "float16", "bfloat16"]
    for name in repo.results().rows:
        assert repo.results().header(name)["settings"]["amp_dtype"] == name


def test_a_failure_costs_its_own_row_and_exit_status_1(repo):
    repo.plan({S02: {"behavior": "crash", "at": 5}})
    ended = repo.run()
    assert ended.status == 1
    assert ended.out.count("failed: exit status 1: RuntimeError: boom") == 1
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS]) | {S02: [5]}


def test_where_all_rows_fail_there_is_a_page(repo):
    repo.plan(dict.fromkeys(EVERYONE, {"behavior": "crash", "at": 0}))
    ended = repo.run()
    assert ended.status == 1
    assert ended.out.count("failed: exit status 1: RuntimeError: boom") == 3


@pytest.mark.parametrize("name", [AGAIN, PEAK])
def test_a_control_or_a_probe_that_fails_costs_no_row(repo, name):
    repo.plan({name: {"behavior": "crash", "at": 1}})
    ended = repo.run()
    assert ended.status == 0
    assert "failed" not in ended.out
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS]) | {name: [1]}


def test_a_stage_that_is_for_another_device_is_no_failure(repo):
    repo.plan({S02: {"behavior": "be for another device", "at": 0}})
    ended = repo.run()
    assert ended.status == 0
    assert "not for cpu" in ended.out


def test_a_row_that_failed_after_its_last_step_is_measured_again(repo):
    repo.plan({S02: {"behavior": "crash", "at": "end"}})
    assert repo.run().status == 1
    repo.plan({})
    assert repo.command("--resume", "x").status == 0
    assert repo.steps_taken()[S02] == [STEPS, STEPS]
    assert repo.results().error(S02) is None


def test_on_a_gpu_one_runs_after_the_other_there_and_back(repo, gpu):
    assert repo.run(S01, S02, S03, "--rounds", "2").status == 0
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS, STEPS])
    runs = list(dict.fromkeys(repo.order()))
    assert runs[:5] == [(0, PEAK), (0, S01), (0, S02), (0, AGAIN), (0, S03)]
    assert runs[5:] == [(1, PEAK), (1, S03), (1, AGAIN), (1, S02), (1, S01)]


def test_on_a_gpu_a_failure_is_not_tried_again_before_a_resume(repo, gpu):
    repo.plan({S03: {"behavior": "crash", "at": 5}})
    assert repo.run(S01, S02, S03, "--rounds", "2").status == 1
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS, STEPS]) | {S03: [5]}
    repo.plan({})
    assert repo.command("--resume", "x").status == 0
    assert repo.counted_steps()[S03] >= 2 * COUNTED


def test_a_row_that_is_measured_after_a_resume_takes_along_what_it_is_compared_with(repo):
    """A ratio needs rounds that both rows have: s02's with s01, with s03 below it, and with its control."""
    repo.plan({S02: {"behavior": "crash", "at": 1}})
    assert repo.run().status == 1
    assert repo.results().compare(S03, S02) is None
    repo.plan({})
    assert repo.command("--resume", "x").status == 0
    for pair in [(S02, S01), (S03, S02), (AGAIN, S02)]:
        assert repo.results().compare(*pair) is not None
    assert repo.results().verdict(S03)


@pytest.fixture
def fast_card(repo, gpu, monkeypatch):
    """A Repository on a GPU whose matmuls reach 100 TFLOP/s, of which a bench is asked for no number of steps.

    A step of gpt2 at B 4, T 1024 is 4096 x 854,438,400 = 3.5 TFLOP, and takes 35 ms or more.
    """
    repo.plan({PEAK: {"peak": {"float32": 1e13, "bfloat16": 1e14}}})
    del repo.flags[repo.flags.index("--steps") :]
    return repo


def without_rows(bench):
    """Takes the place of Bench.run() where only the bench's own line matters."""


def measure_nothing(row, flags, timeout):
    """Takes the place of single_step() where a bench is not to ask for the peak."""
    raise AssertionError("the bench measures the peak")


@pytest.mark.parametrize(
    "peak, steps, reason",
    [
        # 3 s / 5.0 ms = 600.04, so 601 steps, and 4 of warm-up
        ({"float32": 5e13, "bfloat16": 7e14}, 605, "700.0 TFLOP/s, a step takes 5.0 ms or more, and the 601 after"),
        # 3 s / 35 ms = 85.7
        ({"float32": 1e13, "float16": 1e14}, 90, "100.0 TFLOP/s, a step takes 35.0 ms or more, and the 86 after"),
        # 3 s / 437 ms = 6.9, and 20 are counted at least
        ({"float32": 8e12}, 24, "8.0 TFLOP/s, a step takes 437.5 ms or more, and the 20 after the warm-up 8.7 s"),
        # 3 s / 0.35 ms = 8572, and 1000 are counted at most
        ({"float32": 1e16}, 1004, "10000.0 TFLOP/s, a step takes 0.3 ms or more, and the 1000 after"),
    ],
    ids=["601 steps", "86 steps", "a slow card", "no more than 1000"],
)
def test_on_a_gpu_the_counted_steps_would_take_three_seconds_at_the_peak(fast_card, monkeypatch, peak, steps, reason):
    repo = fast_card
    repo.plan({PEAK: {"peak": peak}})
    monkeypatch.setattr(bench.Bench, "run", without_rows)
    ended = repo.run(S01)
    (line,) = results.read(repo.records)  # nothing of what was measured is in it
    assert line["steps"] == steps
    assert line["flags"][:4] == ["--device", "cuda:0", "--steps", str(steps)]
    assert ended.err.startswith(f"{steps} steps: at the device's matmul peak, {reason}")


def test_on_a_gpu_every_row_takes_as_many_steps_as_the_peak_tells(fast_card, monkeypatch):
    monkeypatch.setattr(bench, "COUNTED_SECONDS", 0.3)  # 9 steps of 35 ms
    monkeypatch.setattr(bench, "COUNTED_STEPS", 1)
    assert fast_card.run(S01, S02, S03, "--rounds", "1").status == 0
    assert fast_card.steps_taken() == dict.fromkeys(EVERYONE, [WARMUP + 9])


@pytest.mark.parametrize(
    "words, steps",
    [("amp s03", 90), ("scale", 90), ("limit s02", 24), ("loss s02", 5)],
    ids=["amp", "scale", "limit", "loss"],
)
def test_the_modes_that_measure_speed_on_a_gpu_ask_for_the_peak(fast_card, monkeypatch, words, steps):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(bench.Bench, "run", without_rows)
    if steps != 90:
        monkeypatch.setattr(bench, "single_step", measure_nothing)
    fast_card.run(*words.split())
    assert fast_card.results().bench["steps"] == steps


def test_the_peak_is_that_of_the_devices_own_type_on_the_bench_s_device(gpu, monkeypatch):
    """float32 was asked for here, but s02 rounds it to TF32, which is faster than what the probe calls float32."""
    asked = []

    def single_step(row, flags, timeout):
        asked.append((row.name, row.script.name, flags, timeout))
        return {"peak": {"float32": 1e12}}, None

    monkeypatch.setattr(bench, "single_step", single_step)
    bench.counted_steps_of_speed(parse("--amp-dtype", "float32", "--timeout", "30"))
    assert asked == [(PEAK, "probe.py", ["--device", "cuda:0", "--steps", "1"], 30)]


def test_a_number_of_steps_that_is_given_counts(fast_card, monkeypatch):
    monkeypatch.setattr(bench, "single_step", measure_nothing)
    monkeypatch.setattr(bench.Bench, "run", without_rows)
    fast_card.run(S01, "--steps", "30")
    assert fast_card.results().bench["steps"] == 30


def test_a_resumed_bench_keeps_its_steps_and_measures_no_peak(fast_card, monkeypatch):
    monkeypatch.setattr(bench, "COUNTED_SECONDS", 0.3)
    monkeypatch.setattr(bench, "COUNTED_STEPS", 1)
    fast_card.when("step 1/9", interrupt_by("SIGINT"))
    assert fast_card.run(S01, S02, S03, "--rounds", "1").status == 130
    monkeypatch.setattr(bench, "single_step", measure_nothing)
    assert fast_card.command("--resume", "x").status == 0
    assert fast_card.results().bench["steps"] == WARMUP + 9
    for name in (S01, S02, S03):
        assert len(fast_card.results().counted_steps(name)) >= 9


def test_a_peak_that_can_not_be_measured_leaves_24_steps_and_the_rows_tell(fast_card):
    plan = {"behavior": "crash", "at": 0}
    fast_card.plan(dict.fromkeys([PEAK, S01], plan))
    ended = fast_card.run(S01)
    assert ended.status == 1
    boom = "exit status 1: RuntimeError: boom"
    assert ended.err.startswith(f"24 steps: the device's matmul peak can't be measured: {boom}\n")
    assert fast_card.results().bench["steps"] == 24
    assert f"failed: {boom}" in ended.out


def test_a_wrong_number_of_ranks_is_refused_before_the_peak_is_measured(fast_card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(bench, "single_step", measure_nothing)
    ended = fast_card.run("scale", "--ranks", "2")
    assert ended.status == 2
    assert ended.err.startswith("bench.py: error: --ranks 2: this machine has 1 ")


def test_a_bench_on_a_cpu_asks_for_no_peak(repo, monkeypatch):
    monkeypatch.setattr(bench, "single_step", measure_nothing)
    monkeypatch.setattr(bench.Bench, "run", without_rows)
    del repo.flags[repo.flags.index("--steps") :]
    repo.run(S01)
    assert repo.results().bench["steps"] == 24


def test_a_probe_that_runs_by_itself_takes_fewer_steps_than_the_rows(repo, gpu, monkeypatch):
    """Each of its steps takes a second, and on a fast card the rows take hundreds."""
    monkeypatch.setattr(bench, "PROBE_STEPS", 1)
    assert repo.run(S01, S02, S03, "--rounds", "2").status == 0
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS] * 2) | {PEAK: [WARMUP + 1] * 2}
    assert repo.results().peak_share(S01) is not None


@pytest.mark.parametrize("at_once", [4, 5])
def test_rows_that_do_not_fit_at_once_share_a_session_with_the_row_above(repo, monkeypatch, at_once):
    monkeypatch.setattr(Session, "room", lambda session: at_once - len(session.live))
    assert repo.run().status == 0
    for pair in [(S02, S01), (S03, S02), (S03, S01), (AGAIN, S02)]:
        assert repo.results().compare(*pair) is not None


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_where_memory_holds_too_few_for_a_comparison_the_bench_says_so(repo, monkeypatch, at_once):
    """s01, the peak, the row above and the row must fit."""

    def room(session):
        assert session.number < 9, "it never ends"
        return at_once - len(session.live)

    monkeypatch.setattr(Session, "room", room)
    ended = repo.run()
    assert ended.status == 1
    assert "no memory for another process" in ended.err
    assert "try a smaller --batch-size" in ended.err


def broken_pipe():
    """A stream whose reader has gone. Closing it flushes it once more, as Python does when it ends."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_that_is_closed_costs_nothing(repo, monkeypatch, name):
    monkeypatch.setattr(sys, name, None)
    assert repo.run().status == 0
    assert repo.page.read_text() == page.page(repo.results())


def test_a_report_that_nobody_reads_costs_nothing(repo, monkeypatch):
    with broken_pipe() as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert repo.run().status == 0
    assert repo.page.read_text() == page.page(repo.results())


def test_a_page_that_nobody_reads_is_in_its_file(repo, monkeypatch):
    with broken_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        ended = repo.run()
    assert ended.status == 0
    assert "written to results/x.md" in ended.err
    assert ended.err.endswith("the page can't be printed: Broken pipe\n")
    assert repo.page.read_text() == page.page(repo.results())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_page_that_a_full_disk_does_not_take_is_in_its_file(repo, monkeypatch):
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        ended = repo.run()
    assert ended.status == 0
    assert ended.err.endswith("the page can't be printed: No space left on device\n")
    assert repo.page.read_text() == page.page(repo.results())


def interrupt_by(name):
    """What sends this process a signal."""
    return lambda: signal.raise_signal(getattr(signal, name))


@pytest.mark.parametrize(
    "name, moment",
    [
        ("SIGINT", WHILE_STARTING),
        ("SIGINT", AT_THE_FIRST_STEP),
        ("SIGINT", AT_THE_LAST_STEP),
        ("SIGTERM", WHILE_STARTING),
        ("SIGHUP", AT_THE_FIRST_STEP),
    ],
)
def test_an_interrupted_bench_keeps_its_records_and_continues(repo, name, moment):
    repo.when(moment, interrupt_by(name))
    ended = repo.run()
    assert ended.status == 130
    assert "continue with: python bench.py --resume x\n" in ended.err
    assert ended.out == repo.page.read_text() + "\n"
    before = repo.records.read_bytes()
    ended = repo.command("--resume", "x")
    assert ended.status == 0
    assert "not finished" not in ended.out
    assert repo.records.read_bytes().startswith(before)
    assert repo.counted_steps() == dict.fromkeys(EVERYONE, COUNTED)


def test_a_corpus_that_is_too_short_is_refused_before_anything_runs(repo):
    repo.corpus.write_bytes(bytes(200))
    ended = repo.run()
    assert ended.status == 2
    assert ended.err.count("\n") == 1
    assert not repo.records.exists()


def test_no_process_looks_for_a_network_that_the_bench_did_not_find(repo, monkeypatch):
    monkeypatch.delenv("LADDER_OFFLINE")
    monkeypatch.setattr(data, "offline", True)
    repo.run(S01)
    assert os.environ["LADDER_OFFLINE"] == "1"


def test_ctrl_c_before_the_first_process_is_one_line(repo, monkeypatch):
    def load_tokens(source):
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "load_tokens", load_tokens)
    ended = repo.run()
    assert (ended.status, ended.err) == (130, "bench.py: interrupted\n")
    assert not repo.records.exists()


def test_what_is_measured_is_not_measured_again(repo):
    repo.run()
    before = repo.records.read_bytes()
    ended = repo.command("--resume", "x")
    assert ended.status == 0
    assert repo.records.read_bytes() == before


@contextlib.contextmanager
def files_no_larger_than(size):
    """A disk that is full: no file grows beyond so many bytes."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("moment", [WHILE_STARTING, AT_THE_FIRST_STEP])
def test_a_full_disk_cuts_a_line_off_and_the_bench_continues(repo, moment):
    with contextlib.ExitStack() as disk:

        def fill():
            disk.enter_context(files_no_larger_than(repo.records.stat().st_size + 50))

        repo.when(moment, fill)
        ended = repo.run()
    assert ended.status == 2
    remedy = "stopped; when this is mended, continue with: python bench.py --resume x"
    assert ended.err.endswith(f"{remedy}\nbench.py: error: File too large\n")
    before, _, half_a_line = repo.records.read_bytes().rpartition(b"\n")
    assert len(half_a_line) == 50
    assert repo.command("--resume", "x").status == 0
    assert repo.records.read_bytes().startswith(before + b"\n{")
    assert repo.counted_steps() == dict.fromkeys(EVERYONE, COUNTED)


def test_a_disk_that_is_full_from_the_start_leaves_the_name_free(repo):
    with files_no_larger_than(100):
        assert repo.run().status == 2
    assert repo.run().status == 0


def test_a_killed_bench_leaves_its_records_and_no_process(repo):
    repo.plan({S02: {"behavior": "wait for the end", "at": WARMUP + 1}})
    command = [sys.executable, "bench.py", S01, S02, S03, *repo.flags, "--out", "x"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # as many threads as this process has, which resumes
    with process(command, repo.folder, env) as child:
        for line in child.stderr:
            if line.startswith(AT_THE_FIRST_STEP):
                break
        child.kill()
    repo.plan({})
    before = repo.records.read_bytes()
    repo.records.write_bytes(before + b'{"kind": "step", "sess')  # as a kill leaves it
    assert repo.command("--render", "x").status == 1
    assert repo.command("--resume", "x").status == 0
    assert repo.records.read_bytes().startswith(before)
    assert min(repo.counted_steps().values()) >= COUNTED


def test_a_bench_that_runs_can_not_be_resumed_beside_it(repo):
    others = []
    repo.when(AT_THE_FIRST_STEP, lambda: others.append(repo.command("--resume", "x")))
    assert repo.run().status == 0
    (other,) = others
    assert other.status == 2
    assert "results/x.jsonl is being written by another bench" in other.err
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS])


def test_of_two_benches_of_one_name_that_start_together_one_is_refused(repo, monkeypatch):
    others = []
    load_tokens = data.load_tokens

    def load_while_another_starts(source):
        if not others:
            others.append(None)
            others[0] = repo.run()
        return load_tokens(source)

    monkeypatch.setattr(data, "load_tokens", load_while_another_starts)
    refused = repo.run()
    assert refused.status == 2
    assert "results/x.jsonl is there already" in refused.err
    assert others[0].status == 0
    assert repo.steps_taken() == dict.fromkeys(EVERYONE, [STEPS])


def test_resume_takes_another_timeout(repo):
    repo.when(AT_THE_FIRST_STEP, interrupt_by("SIGINT"))
    repo.run(S01, S02, S03, "--timeout", "30")
    assert repo.timeouts == [30] * 5
    assert repo.command("--resume", "x", "--timeout", "1200").status == 0
    assert repo.timeouts[5:] == [1200] * 5


@pytest.fixture
def interrupted(repo):
    """A Repository whose bench was interrupted at its first counted step."""
    repo.when(AT_THE_FIRST_STEP, interrupt_by("SIGINT"))
    assert repo.run().status == 130
    return repo


def assert_resume_is_refused(repo, key):
    """--resume refuses in one line, because of this key, and touches nothing."""
    before = repo.records.read_bytes()
    ended = repo.command("--resume", "x")
    assert ended.status == 2
    assert f"--resume x: {key} was " in ended.err
    assert ended.err.count("\n") == 1
    assert repo.records.read_bytes() == before


@pytest.mark.parametrize(
    "file, key",
    [
        ("stages/s02_tf32.py", "s02_tf32"),
        ("stages/harness/probe.py", "probe.py"),
        ("stages/harness/machine.py", "machine.py"),
        ("model.py", "model.py"),
        ("data.py", "data.py"),
    ],
)
def test_resume_refuses_other_code(interrupted, file, key):
    with open(interrupted.folder / file, "a") as f:
        f.write("pass\n")
    assert_resume_is_refused(interrupted, key)


def test_resume_refuses_another_corpus(interrupted):
    interrupted.corpus.write_bytes(b"\1\0" * 10_000)
    assert_resume_is_refused(interrupted, "ids")


def test_resume_refuses_another_machine(interrupted, monkeypatch):
    environment = machine.environment(torch.device("cpu"))
    monkeypatch.setattr(machine, "environment", lambda device: environment | {"torch": "1.0"})
    assert_resume_is_refused(interrupted, "torch")


def test_resume_takes_another_page(interrupted):
    with open(interrupted.folder / "stages" / "harness" / "page.py", "a") as f:
        f.write("pass\n")
    assert interrupted.command("--resume", "x").status == 0


def test_readme_gets_its_table_when_the_bench_is_complete(repo):
    repo.when(AT_THE_FIRST_STEP, interrupt_by("SIGINT"))
    before = repo.readme.read_text()
    assert repo.run(S01, S02, S03, "--readme").status == 130
    assert repo.readme.read_text() == before
    assert repo.command("--resume", "x").status == 0
    assert "(stages/s03_bf16.py)" in repo.readme.read_text()


def test_a_corpus_whose_name_is_not_utf_8_gets_its_page(repo):
    name = os.fsdecode(b"su\xff.bin")
    try:
        shutil.copy(repo.corpus, repo.folder / name)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    repo.flags[repo.flags.index("--data") + 1] = str(repo.folder / name)
    repo.when(AT_THE_FIRST_STEP, interrupt_by("SIGINT"))
    assert repo.run().status == 130
    assert repo.command("--resume", "x").status == 0
    assert "s03_bf16" in repo.page.read_text(encoding="utf-8")


def batches_tried(repo):
    """The batch sizes of the mode `limit`, in the order in which they were first tried."""
    lines = results.read(repo.records)
    names = [line["name"] for line in lines if line["kind"] == "header"]
    return [int(name.split(" B")[1]) for name in dict.fromkeys(names)]


@pytest.mark.parametrize("steps", [WARMUP + 1, 24])
def test_limit_doubles_the_batch_and_bisects(repo, steps):
    repo.plan({S02: {"largest_batch": 11}})
    ended = repo.run("limit", "s02", "--steps", str(steps))
    assert ended.status == 0
    assert batches_tried(repo) == [1, 2, 4, 8, 16, 12, 10, 11]
    row = "| s02_tf32 | 11 | 10,000 | 0.02 | B 12: out of memory at batch size 12: try --batch-size 6 |"
    assert row in ended.out


def test_limit_takes_a_longer_run_of_what_fits_and_goes_down_where_that_fails(repo):
    too_large = {"behavior": "run out of memory", "at": WARMUP + 1}
    repo.plan({S02: {"largest_batch": 3}, "s02_tf32 B3": too_large})
    ended = repo.run("limit", "s02", "--steps", "20")
    assert ended.status == 0
    assert "| s02_tf32 | 2 |" in ended.out
    longer = repo.results().runs[1, "s02_tf32 B2"]
    assert len(longer.steps) == WARMUP + bench.LIMIT_STEPS


def test_limit_of_what_never_fits_is_none_and_exit_status_1(repo):
    repo.plan({S02: {"largest_batch": 0}})
    ended = repo.run("limit", "s02")
    assert ended.status == 1
    assert batches_tried(repo) == [1]
    assert "| s02_tf32 | none | – | – | B 1: out of memory at batch size 1" in ended.out


def test_limit_that_continues_tries_nothing_twice(repo):
    repo.plan({S02: {"largest_batch": 11}})
    repo.when("s02_tf32 B10: start", interrupt_by("SIGINT"))
    assert repo.run("limit", "s02").status == 130
    before = repo.records.read_bytes()
    ended = repo.command("--resume", "x")
    assert ended.status == 0
    assert "| s02_tf32 | 11 |" in ended.out
    assert repo.records.read_bytes().startswith(before)
    assert "B12: start" not in ended.err
    assert "B10: start" in ended.err


def test_the_memory_budget_of_limit_is_half_of_what_was_free_when_it_began(repo, monkeypatch):
    repo.plan({S02: {"behavior": "hang with much memory", "at": 1}})
    repo.when("B1: start", interrupt_by("SIGINT"))
    monkeypatch.setattr(machine, "free_memory", lambda: 2.4e8)
    assert repo.run("limit", "s02").status == 130
    assert repo.results().bench["memory_budget"] == 1.2e8
    monkeypatch.setattr(machine, "free_memory", lambda: 8e9)
    ended = repo.command("--resume", "x")
    assert ended.status == 1
    assert "| s02_tf32 | none | – | – | B 1: out of memory: more than the budget of 0.1 GB |" in ended.out


def test_the_memory_budget_of_limit_can_be_given(repo):
    repo.plan({S02: {"behavior": "hang with much memory", "at": 1}})
    ended = repo.run("limit", "s02", "--memory-budget", "0.1")
    assert ended.status == 1
    assert "more than the budget of 0.1 GB" in ended.out


def test_on_a_gpu_limit_has_no_budget_since_the_card_is_the_limit(gpu):
    assert bench.memory_budget(parse("limit", "--memory-budget", "3")) is None


def test_loss_trains_every_stage_once_with_each_seed(repo):
    assert repo.run("loss", "s01", "s02", "--lr", "6e-4", "--seeds", "2", "--seed", "7").status == 0
    losses = {key: run.summary["eval"] for key, run in repo.results().runs.items()}
    assert losses == {(0, S01): 0.007, (0, S02): 0.007, (1, S01): 0.008, (1, S02): 0.008}
    assert repo.results().bench["rates"] == [6e-4]


def test_loss_keeps_of_a_run_its_header_and_its_summary_with_its_curve(repo):
    repo.run("loss", "s01", "--lr", "6e-4", "--seeds", "1")
    _, header, summary = results.read(repo.records)
    assert (header["kind"], summary["kind"]) == ("header", "summary")
    assert summary["curve"] == pytest.approx([4.9, 4.8, 4.7, 4.6, 4.5])  # of step i: 5 - i / 10, without the first


def test_loss_trains_every_stage_at_every_rate_and_seed_one_seed_after_the_other(repo):
    ended = repo.run("loss", "s01", "s02", "--lr", "6e-4", "3e-4", "--seeds", "2")
    assert ended.status == 0
    read = repo.results()
    assert read.rows == [f"{S01} lr 3e-4", f"{S01} lr 6e-4", f"{S02} lr 3e-4", f"{S02} lr 6e-4"]
    for (seed, name), run in read.runs.items():
        settings = run.header["settings"]
        assert settings["lr"] == (3e-4 if name.endswith("3e-4") else 6e-4)
        assert settings["seed"] == 1337 + seed
        assert run.summary["eval"] == (1337 + seed) / 1000
    assert len(read.runs) == 8
    headers = [line for line in results.read(repo.records) if line["kind"] == "header"]
    assert [line["session"] for line in headers] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert "| [s01_baseline](../stages/s01_baseline.py) | **1.3375** | 1.3375 |" in ended.out


@pytest.mark.parametrize("cores, threads", [(1, 1), (2, 1), (8, 2)])
def test_the_runs_of_loss_share_the_cores(monkeypatch, cores, threads):
    monkeypatch.setattr(machine, "cores", lambda: cores)
    rows, _ = bench.rows_of(parse("loss", "s06", "s07", "--lr", "6e-4", "--seeds", "2"))
    assert {row.env["OMP_NUM_THREADS"] for row in rows} == {str(threads)}


def test_on_a_gpu_the_runs_of_loss_go_one_by_one(repo, gpu, monkeypatch):
    at_once = []

    def note(path, flags, timeout, steps, runs_at_once):
        at_once.append(runs_at_once)
        return leader.Trainings(path, flags, timeout, steps, runs_at_once)

    monkeypatch.setattr(bench, "Trainings", note)
    monkeypatch.setattr(machine, "cores", lambda: 8)
    assert repo.run("loss", "s01", "--lr", "6e-4").status == 0
    assert at_once == [1]


def test_a_bench_of_several_rates_that_was_interrupted_trains_what_is_left(repo):
    words = ("loss", "s01", "s02", "--lr", "3e-4", "6e-4", "--seeds", "2")
    repo.when("[3/8 runs", interrupt_by("SIGINT"))
    assert repo.run(*words).status == 130
    before = repo.records.read_text()
    finished = before.count('"kind": "summary"')
    assert 3 <= finished < 8
    ended = repo.command("--resume", "x")
    assert ended.status == 0
    after = repo.records.read_text()
    assert after.startswith(before)
    assert after.count('"kind": "summary"') == 8
    assert f"/{8 - finished} runs" in ended.err


def test_rates_can_be_added_to_a_bench_of_several(repo):
    repo.run("loss", "s01", "--lr", "3e-4", "6e-4", "--seeds", "1")
    runs = repo.records.read_text().partition("\n")[2]
    ended = repo.command("--resume", "x", "--lr", "1.2e-3")
    assert ended.status == 0
    assert repo.results().rows == [f"{S01} lr 3e-4", f"{S01} lr 6e-4", f"{S01} lr 1.2e-3"]
    assert repo.records.read_text().partition("\n")[2].startswith(runs)
    assert "--lr 1.2e-3 3e-4 6e-4 --seeds 1" in ended.out
    assert repo.command("--resume", "x").status == 0


def test_rates_can_be_added_to_those_of_the_default(repo):
    repo.run("loss", "s01", "--seeds", "1")
    assert repo.command("--resume", "x", "--lr", "1.2e-3").status == 0
    assert repo.results().rates == [1.5e-4, 6e-4, 1.2e-3, 2.4e-3]


def test_no_rate_is_added_to_a_bench_of_one_nor_twice(repo):
    repo.run("loss", "s01", "--lr", "6e-4", "--seeds", "1")
    ended = repo.command("--resume", "x", "--lr", "3e-4")
    assert ended.status == 2
    assert "rates can be added to a bench of several rates alone" in ended.err
    repo.records.unlink()
    repo.page.unlink()
    repo.run("loss", "s01", "--lr", "6e-4", "3e-4", "--seeds", "1")
    before = repo.records.read_bytes()
    ended = repo.command("--resume", "x", "--lr", "3e-4")
    assert ended.status == 2
    assert "--lr 3e-4 3e-4 6e-4 names a rate twice" in ended.err
    assert repo.records.read_bytes() == before


def own_script(repo, title):
    """Put a script of a reader's own, a fake, into the copy of the repository; its path."""
    script = repo.folder / "stages" / "mine.py"
    fake = (ROOT / "tests" / "fixtures" / "fake_stage.py").read_text().split('"""', 2)[2]
    script.write_text(f'"""{title}"""{fake}')
    return script


@pytest.mark.parametrize("mode", ["loss", ""])
def test_a_script_of_ones_own_can_be_a_row(repo, mode):
    script = own_script(repo, "Clipping alone.")
    ended = repo.run(*mode.split(), str(script), "s02", "--lr", "6e-4")
    assert ended.status == 0
    assert repo.results().rows == [S02, "mine"]  # below the stages
    assert "| mine | Clipping alone |" in ended.out


def test_a_script_elsewhere_than_in_stages_is_refused(repo):
    script = own_script(repo, "Mine.")
    elsewhere = script.rename(repo.folder / "mine.py")
    ended = repo.run("loss", str(elsewhere))
    assert ended.status == 2
    assert "mine.py is not in stages/, where a script finds the harness: copy it there" in ended.err


@pytest.mark.parametrize("name", ["peak.py", "plain.py", "a b.py", "mine.lr.py"])
def test_a_script_whose_name_can_be_no_rows_is_refused(repo, name):
    script = own_script(repo, "Mine.").rename(repo.folder / "stages" / name)
    ended = repo.run("loss", str(script))
    assert ended.status == 2
    assert "can't name a row: call it by other letters, digits, '-' and '_'" in ended.err


def test_a_script_that_is_not_utf_8_is_refused(repo):
    script = repo.folder / "stages" / "mine.py"
    script.write_bytes(b'"""M\xff"""')
    ended = repo.run("loss", str(script))
    assert ended.status == 2
    assert "mine.py is not UTF-8 (invalid start byte at byte 4): save it as UTF-8" in ended.err


def test_a_stage_can_be_named_by_its_path(repo):
    assert bench.stages_named([str(repo.folder / "stages" / f"{S02}.py"), "s01"]) == [S01, S02]


def test_the_page_of_loss_tells_how_often_the_corpus_was_seen(repo):
    ended = repo.run("loss", "s01", "--lr", "6e-4", "--seeds", "1", "--seq-len", "750")
    assert repo.results().bench["corpus_tokens"] == TRAINED_IDS
    assert "6 steps on the same 18,000 tokens (2.0 passes over the corpus)" in ended.out


def test_loss_that_continues_trains_what_has_no_held_out_loss(repo):
    repo.plan({S02: {"behavior": "crash", "at": "end"}})
    repo.when("[1/4 runs", interrupt_by("SIGINT"))
    assert repo.run("loss", "s01", "s02", "--lr", "6e-4", "--seeds", "2").status == 130
    before = repo.records.read_bytes()
    assert repo.command("--resume", "x").status == 1
    repo.plan({})
    ended = repo.command("--resume", "x")
    assert ended.status == 0
    assert repo.records.read_bytes().startswith(before)
    assert "[2/2 runs" in ended.err  # those of s02 alone


def test_a_real_bench_of_a_stage_and_the_probe(repo, monkeypatch):
    shutil.copy(ROOT / "stages" / "harness" / "probe.py", repo.folder / "stages" / "harness" / "probe.py")
    make_the_rates_small(repo.folder / "stages" / "harness" / "rates.py")
    monkeypatch.setattr(Session, "room", lambda session: 3)  # all at once: that takes less time
    ended = repo.command("s05_flash", *FLOAT32, "--data", str(repo.corpus), "--out", "x")
    assert ended.status == 0
    assert repo.steps_taken() == dict.fromkeys(["s05_flash", PEAK, "s05_flash" + CONTROL], [WARMUP + 1])
    assert "active: the flash kernel ran" in ended.out
    assert "of size 64" in ended.out
    assert "stale" not in ended.out


def make_the_rates_small(path):
    """Let a copy of rates.py multiply matrices of 64 x 64 for a moment, and copy little."""
    text = path.read_text()
    for large, small in [("2048, 0.2", "64, 0.01"), ("2**25", "2**10")]:
        assert text.count(large) == 1
        text = text.replace(large, small)
    path.write_text(text)
