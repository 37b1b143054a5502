"""The bench: its command line, and what it keeps and reports when it, its stages or its machine fail."""

import harness
from harness import WARMUP, machine, report

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FLOAT32, ROOT, process
from fixtures.records import header

import bench

STAGES = S01, S02, S03 = ["s01_baseline", "s02_tf32", "s03_bf16"]
PAIR, PEAK, STEPS = S02 + report.AGAIN, report.PEAK, WARMUP + 4
EVERYONE = [S01, PEAK, S02, PAIR, S03]  # in the order of their start


class Fakes:
    """A copy of the repository whose stages are fakes, and its bench, run in this process, which has loaded torch."""

    def __init__(self, folder, patch, capsys):
        self.folder, self.patch, self.capsys = folder, patch, capsys
        self.records, self.page = folder / "results/x.jsonl", folder / "results/x.md"
        other = (".*", "__*__", "s[0-9]*", "*.md", "*.jsonl", "tests", "exercises", "profile")
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*other))
        for name in (*STAGES, "harness/probe"):
            shutil.copy(ROOT / "tests/fixtures/fake_stage.py", folder / f"stages/{name}.py")
        (folder / "ids.bin").write_bytes(bytes(20_000))
        self.flags = ["--device", "cpu", "--data", str(folder / "ids.bin"), "--batch-size", "4", "--steps", str(STEPS)]
        self.stops = {}  # {part of a line of progress: what to call when it is said, once}

        def say(line, brief=False, of=bench.say):
            of(line, brief)
            for part in [part for part in self.stops if part in line]:
                self.stops.pop(part)()

        patch.setattr(bench, "say", say)
        patch.setattr(harness, "ROOT", folder)
        patch.setattr(bench, "ROOT", folder)
        patch.setattr(bench, "RESULTS", folder / "results")
        patch.setattr(bench, "STAGES", STAGES)
        patch.setitem(bench.MODES, "ladder", STAGES)
        patch.setattr(bench, "Row", type("Row", (bench.Row,), {"env": property(lambda row: {"ROW": row.name})}))
        patch.setattr(machine, "free_memory", lambda: None)  # how much is free here does not matter
        patch.setenv("OMP_NUM_THREADS", "1")  # as many as this process has, so that the environments are the same
        self.plan()

    def plan(self, **fakes):
        """What each fake does, by its row's name, which is in its environment; without a name it does nothing amiss."""
        self.patch.setenv("FAKES", json.dumps(dict(header=header("", code=harness.code_sha256(S01)), **fakes)))

    def command(self, *words):
        self.patch.setattr(sys, "argv", ["bench.py", *words])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            sys.exit(bench.main())
        return SimpleNamespace(status=end.value.code, **self.capsys.readouterr()._asdict())

    def run(self, *words):
        return self.command(*words, *self.flags, "--out", "x")

    def results(self):
        return report.Results(self.records)

    def taken(self):
        """{row: how many steps each of its runs took}."""
        runs = self.results().runs.items()
        return {name: [len(run.steps) for (_, n), run in runs if n == name] for (_, name), _ in runs}

    def living(self):
        mark, living = os.environ["XDG_CACHE_HOME"].encode(), []  # each test has its own
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                living += [place] * (mark in (place / "environ").read_bytes())
        return living


@pytest.fixture
def fakes(tmp_path, monkeypatch, capsys):
    """Fakes in a folder with a blank in its name, of which no process is left afterwards."""
    # a signal that the bench misses is printed, and ends no test
    handlers = {n: signal.signal(n, print) for n in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}}
    yield (fakes := Fakes(tmp_path / "a copy", monkeypatch, capsys))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    deadline = time.monotonic() + 5
    while living := fakes.living():
        assert time.monotonic() < deadline, living
        time.sleep(0.02)


WRONG = {word: f"{word.split()[-1]} is no stage" for word in ("s13", "0", "s5x", "s02 amp")}
WRONG |= {"--out ../x": "'../x'", "--out=": "''", "--resume a/b": "'a/b'", "--render .x": "'.x'"}
WRONG |= {f"--{flag} {n}": flag for flag in ("rounds", "steps", "timeout", "memory-budget", "ranks") for n in (0, "x")}
WRONG |= {"--steps 4": "first 4 steps are warm-up", "--seq-len 2000": "--seq-len 2000", "--data gone.txt": "gone.txt"}
WRONG |= {"--record x.jsonl": "--record", "--save x": "--save", "--readme": "README.md", "amp --readme": "--readme"}
WRONG |= dict.fromkeys(("--led", "--eval", "--profile"), "single stage") | {"loss --accum 2": "leave it out"}
WRONG |= {"limit --memory-budget nan": "--memory-budget nan"}
WRONG |= {"amp --amp-dtype float16": "leave --amp-dtype out", "amp s02": "from s03 on", "amp s02 s03": "pass one"}
WRONG |= {"scale s02": "s12", "scale --ranks 9999": "--ranks 9999", "--resume=old s01": "pass no other"}
WRONG |= {f"--{flag} gone": "results/gone.jsonl is not there" for flag in ("resume", "render")}
WRONG |= {"--out old": "old.jsonl is there already: pass another --out, --resume old", "--out page": "page.md is there"}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_command_line_is_one_line_and_exit_status_2(fakes, words):
    mine = [fakes.folder / name for name in ("README.md", "results/old.jsonl", "results/page.md")]
    for path in mine:
        path.write_text("mine")
    more = [] if "--resume" in words else fakes.flags[: 2 if "--data" in words else None]
    ended = fakes.command(*more, *words.split())
    assert ended.status == 2 and ended.err.count("\n") == 1 and WRONG[words] in ended.err and not ended.out
    assert {path.read_text() for path in mine} == {"mine"} and len(list(fakes.page.parent.iterdir())) == 2


def test_stages_have_several_names_and_run_in_ladder_order():
    assert {bench.stage_named(word) for word in ("s05", "5", "05", "s5", "s05_flash")} == {"s05_flash"}
    parsed = [bench.parse(["--device", "cpu", *word.split()]).stages for word in ("11 s01 s11", "amp", "limit 4", "")]
    assert parsed == [["s01_baseline", "s11_accum"], ["s03_bf16"], ["s04_compile"], bench.STAGES]


@pytest.mark.parametrize("devices, sizes", [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (6, [1, 2, 4, 6])])
def test_scale_starts_powers_of_two_on_devices_of_a_type(monkeypatch, devices, sizes):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    args = bench.parse(["scale", "--device", "cpu"])
    args.device, args.interleaved = torch.device("cuda", 0), False
    rows, probes = bench.rows_of(args)
    assert [row.ranks for row in rows] == sizes and [row.ranks for row in probes] == sizes[1:]
    assert bench.stage_flags(args)[:2] == ["--device", "cuda"] and args.accum % devices == 0


@pytest.mark.parametrize("lacks", [[], [(os, "killpg"), (signal, "SIGKILL"), (signal, "SIGHUP")]], ids=["", "windows"])
def test_bench_takes_a_step_of_each_row_in_turn_there_and_back(fakes, monkeypatch, lacks):
    for module, name in lacks:
        monkeypatch.delattr(module, name)
    fakes.plan(s03_bf16=dict(dt=0.05))
    ended = fakes.run()
    assert ended.status == 0 and ended.out == report.page(fakes.results()) + "\n" == fakes.page.read_text() + "\n"
    assert (
        "| 2.00\u00a0±\u00a00.00 | 2.00\u00a0±\u00a00.00 |" in ended.out
        and "4/4, 0 s left | tok/sec s01 10,000" in ended.err
    )
    steps = [line["name"] for line in report.read(fakes.records) if line["kind"] == "step" and line["step"] >= WARMUP]
    assert steps == [*EVERYONE, *EVERYONE[::-1]] * 2


HANG = "import time; time.sleep(600)"  # the child of a deaf one ignores SIGTERM, too
DOES = dict(boom="raise RuntimeError('boom')", refuse="print('error: no, thanks', file=sys.stderr); sys.exit(2)")
DOES |= dict(die="os.kill(os.getpid(), 9)", cut="print('{\"kind\": \"st', end='', flush=True); os.kill(os.getpid(), 9)")
DOES |= dict(leave="sys.exit()", grow=f"held = b'x' * 400_000_000; {HANG}", silent=f"os.close(1); {HANG}")
DOES["deaf"] = f"signal.signal(15, signal.SIG_IGN); subprocess.Popen([sys.executable, '-c', '{HANG}']); {HANG}"
BOOM, KILLED = "exit status 1: RuntimeError: boom", "killed by the system, most likely out of memory: try a smaller"
FAULTS = [([name], "boom", at, BOOM) for name in (S01, PAIR, PEAK) for at in (0, 5, "end")]
FAULTS += [([S02], "boom", 1, BOOM), (EVERYONE, "boom", 0, BOOM), ([S02], "refuse", 0, "no, thanks")]
FAULTS += [([S02], "die", 5, KILLED), ([S02], "cut", 5, KILLED), ([S02], "silent", 5, "closed its output, and did not")]
FAULTS += [([S02], "leave", 5, "ended before its last step")]
FAULTS += [([S02], "deaf", 5, "no answer in 3 s: stopped; raise --timeout"), ([S02], "hold", 0, "out of memory at ")]


@pytest.mark.parametrize("names, does, at, error", FAULTS)
def test_failing_run_costs_its_own_row_and_exit_status_1(fakes, monkeypatch, names, does, at, error):
    hangs = does in ("deaf", "silent")
    monkeypatch.setattr(bench, "PATIENCE", 1 if hangs else 5)
    fakes.plan(**dict.fromkeys(names, dict(does=DOES.get(does), at=at, most=2 if does == "hold" else 4)))
    ended, failed = fakes.run(*["--timeout", "3"] * hangs), len({*names} & {*STAGES})
    assert ended.status == min(1, failed) and ended.out.count(error) == failed
    assert fakes.taken() == dict.fromkeys(EVERYONE, [STEPS]) | dict.fromkeys(names, [STEPS if at == "end" else at])
    assert all(fakes.results().end(name)["error"].startswith(error) for name in names)
    fakes.plan()
    if at == "end" and names != [PEAK]:  # a row that failed after its last step is a row that failed
        assert fakes.command("--resume", "x").status == 0 and "error" not in fakes.results().end(names[0])


def test_process_out_of_reach_that_holds_the_pipe_stops_no_bench(fakes, monkeypatch):
    """As a rank does whose torchrun was killed: it has a session of its own."""
    monkeypatch.setattr(bench, "PATIENCE", 1)
    orphan = f"import os, time\nwhile not os.path.exists({str(fakes.folder / 'end')!r}): time.sleep(0.01)"
    start = f"subprocess.Popen([sys.executable, '-c', {orphan!r}], start_new_session=True); sys.exit(1)"
    fakes.plan(s02_tf32=dict(does=start, at=5))
    assert fakes.run("--timeout", "2").status == 1 and len(fakes.living()) == 1
    (fakes.folder / "end").touch()


def test_gpu_runs_one_at_a_time_there_and_back_and_resumes(fakes, monkeypatch):
    gpu = dict(interleaved=False)
    monkeypatch.setattr(bench, "parse", lambda argv, of=bench.parse: SimpleNamespace(**vars(of(argv)) | gpu))
    fakes.plan(s03_bf16=dict(does=DOES["die"], at=5))
    assert fakes.run("--rounds", "2").status == 1
    order = dict.fromkeys((line["session"], line["name"]) for line in report.read(fakes.records)[1:])
    assert [*order] == [(0, n) for n in (PEAK, S01, S02, PAIR, S03)] + [(1, n) for n in (PEAK, PAIR, S02, S01)]
    assert fakes.taken() == dict.fromkeys(EVERYONE, [STEPS] * 2) | {S03: [5]}
    fakes.plan()
    assert fakes.command("--resume", "x").status == 0 and fakes.taken()[S03][0] == 5


@pytest.mark.parametrize("name, closed", [(name, closed) for name in ("stdout", "stderr") for closed in (False, True)])
def test_closed_stdout_or_stderr_loses_nothing(fakes, monkeypatch, name, closed):
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, name, None if closed else stream)
        fakes.run()
    assert fakes.taken() == dict.fromkeys(EVERYONE, [STEPS]) and fakes.page.read_text() == report.page(fakes.results())


@pytest.mark.parametrize("free, held, room", [(None, 2, 2), (7, 2, 2), (5, 2, 1), (2, 2, 0), (2, None, 1)])
def test_there_is_room_for_half_as_much_again_as_the_last_one_holds(monkeypatch, free, held, room):
    monkeypatch.setattr(machine, "free_memory", lambda: free)
    live = [SimpleNamespace(held=of) for of in (9, held, 0)] * (held is not None)  # the last one is a probe
    assert bench.Session.room(SimpleNamespace(live=live)) == room


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 5])
def test_rows_share_a_session_with_the_one_above(fakes, monkeypatch, at_once):
    def room(session):
        assert session.number < 9, "it never ends"
        return min(2 if session.live else 1, at_once - len(session.live))

    monkeypatch.setattr(bench.Session, "room", room)
    ended, few = fakes.run(), at_once < 4  # s01, the peak, the row above and the row
    assert ended.status == few and ("no memory for another process" in ended.err) == few
    assert few or all(fakes.results().compare(*pair) for pair in [(S02, S01), (S03, S02), (S03, S01), (PAIR, S02)])


@pytest.mark.parametrize("fault", ["full disk", "SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("when", ["[3/5]", "step 2/4", "step 4/4"])
def test_stopped_bench_keeps_its_records_and_continues(fakes, fault, when):
    def stop():
        if fault == "full disk":
            raise OSError(28, "No space left on device")
        signal.raise_signal(getattr(signal, fault, signal.SIGINT))  # Windows has no SIGHUP

    fakes.stops[when] = stop
    ended, before = fakes.run(), fakes.records.read_bytes()
    status, words = (2, "No space left on device\n") if fault == "full disk" else (130, "python bench.py --resume x\n")
    assert ended.status == status and words in ended.err
    assert ended.out == ("" if status == 2 else fakes.page.read_text() + "\n")
    ended = fakes.command("--resume", "x")
    assert ended.status == 0 and "not finished" not in ended.out and fakes.records.read_bytes().startswith(before)
    assert {len(fakes.results().steps(name)) for name in EVERYONE} == {4}


def test_readme_gets_its_table_when_the_bench_is_complete(fakes):
    (readme := fakes.folder / "README.md").write_text(before := f"{report.BEGIN}\n{report.END}\n")
    fakes.stops["step 2/4"] = lambda: signal.raise_signal(signal.SIGINT)
    assert fakes.run("--readme").status == 130 and readme.read_text() == before
    assert fakes.command("--resume", "x").status == 0 and "(stages/s03_bf16.py)" in readme.read_text()


def test_killed_bench_leaves_its_records_and_no_process(fakes):
    fakes.plan(s02_tf32=dict(sleep=0.1))
    with process([sys.executable, "bench.py", *fakes.flags, "--out", "x"], fakes.folder, os.environ) as child:
        assert any(line.startswith("step 1/4") for line in child.stderr)
        child.kill()
    fakes.records.write_bytes((before := fakes.records.read_bytes()) + b'{"kind": "step", "sess')  # a line cut off
    assert fakes.command("--render", "x").status == 1 and fakes.records.read_bytes().endswith(b'"sess')
    assert fakes.command("--resume", "x").status == 0 and fakes.records.read_bytes().startswith(before)
    assert all(len(fakes.results().steps(name)) >= 4 for name in EVERYONE)


@pytest.mark.parametrize("key", ["s02", "model", "data", "machine", "probe", "torch", "corpus", "ids", "flags"])
def test_resume_refuses_what_changed_and_touches_nothing(fakes, key):
    line = bench.first_line(args := bench.parse(fakes.flags), bench.rows_of(args)[0])
    for place in (line, line["environment"]):
        place |= {key: "another"} if key in place else {}
    for path in fakes.folder.rglob(f"{key}*.py"):
        path.write_text(path.read_text() + "pass\n")
    fakes.records.write_text(content := json.dumps(line) + '\n{"kind": "st')
    ended = fakes.command("--resume", "x")
    assert ended.status == 2 and ended.err.count("\n") == 1 and f"x: {key}" in ended.err
    assert fakes.records.read_text() == content and not fakes.page.exists()


LIMITS = [(dict(most=11), "11 | 10,000 | 0.02 | B 12: out of memory at batch size 12", [1, 2, 4, 8, 10, 11, 12, 16])]
LIMITS += [(dict(most=0), "none | – | – | B 1: out of memory at batch size 1", [1])]
LIMITS += [(dict(does=DOES["grow"], at=1), "none | – | – | B 1: out of memory: more than the budget of 0.2 GB |", [1])]


@pytest.mark.parametrize("fault, row, batches", LIMITS)
def test_limit_is_found_by_doubling_and_bisection(fakes, monkeypatch, fault, row, batches):
    fakes.plan(s02_tf32=fault)
    fakes.stops[f"B{batches[-1]}: start"] = lambda: signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(machine, "free_memory", lambda: 4e8)  # half of it is the budget
    assert fakes.run("limit", "s02", "--timeout", "20").status == 130
    ended = fakes.command("--resume", "x")
    assert ended.status == (len(batches) == 1) and f"| s02_tf32 | {row}" in ended.out
    assert sorted(int(name.split(" B")[1]) for name in fakes.taken()) == batches
    assert "B8: start" not in ended.err  # what was tried before is not tried again


def test_loss_trains_every_stage_once_per_seed_and_resumes(fakes):
    fakes.stops["[1/1, then 2 more] s02"] = lambda: signal.raise_signal(signal.SIGINT)
    assert fakes.run("loss", "s01", "s02", "--seeds", "2", "--seed", "7").status == 130
    before = fakes.records.read_bytes()
    fakes.plan(s02_tf32=dict(does=DOES["boom"], at="end"))
    assert fakes.command("--resume", "x").status == 1
    fakes.plan()
    ended = fakes.command("--resume", "x")
    assert ended.status == 0 and fakes.records.read_bytes().startswith(before)
    assert {key: run.end["eval"] for key, run in fakes.results().runs.items()} == {
        (i, name): (7 + i) / 1000 for i in (0, 1) for name in (S01, S02)
    }
    assert fakes.taken() == dict.fromkeys((S01, S02), [STEPS] * 2) and "0.0000\u00a0±\u00a00.0000" in ended.out


def test_real_bench_of_two_stages_and_the_probes(fakes, monkeypatch):
    monkeypatch.setattr(bench, "STAGES", names := ["s01_baseline", "s05_flash"])
    for name in (*names, "harness/probe"):
        code = (ROOT / f"stages/{name}.py").read_text().replace("n = 2048", "n = 64").replace("2**25", "2**6")
        (fakes.folder / f"stages/{name}.py").write_text(code)
    ended = fakes.run("1", "5", *FLOAT32)
    assert ended.status == 0 and fakes.taken() == dict.fromkeys([*names, PEAK, names[1] + report.AGAIN], [STEPS])
    assert "active: the flash kernel ran" in ended.out and "of size 64" in ended.out and "stale" not in ended.out
    for ranks, figure in ((0, "peak"), (2, "bytes")):
        row, args, lines = bench.Row(PEAK, bench.PROBE, ranks=ranks), bench.parse([*FLOAT32, "--timeout", "60"]), []
        run = bench.Process(row, args, lines.append)
        run.ask()
        time.sleep(0.3 * run.poll())
        assert run.lines.empty() and [figure in line for line in lines] == [True]  # it waits to be asked again
        run.stop()
