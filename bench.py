"""Runs the stages in processes of their own and writes a table of what each is worth on this machine.

    python bench.py                    all stages
    python bench.py s05 s11            these, by number or name
    python bench.py amp                float32, float16 with loss scaling and bfloat16, side by side
    python bench.py limit s05 s11      the largest batch that fits
    python bench.py scale              s12 on 1, 2, ... processes
    python bench.py loss               held-out loss of s06 to s09 after the same tokens, on several seeds

Every flag of a stage can be given and goes to all of them. The table goes to stdout and to results/NAME.md, each step
to results/NAME.jsonl as it is measured. On a CPU all processes are alive at once and take one step each in turn; on a
GPU they run one after the other, in several rounds.
"""

import argparse
import contextlib
import hashlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "stages"))

from harness import WARMUP, Parser, add_flags, code_sha256, end_as_by_ctrl_c, machine, positive, report, resolve, source

import torch

import data
from data import InputError, write_whole

RESULTS = ROOT / "results"
STAGES = sorted(path.stem for path in (ROOT / "stages").glob("s[0-9][0-9]_*.py"))
MODES = dict(ladder=STAGES, amp=["s03_bf16"], limit=["s05_flash", "s11_accum"], scale=["s12_ddp"], loss=STAGES[5:9])
# what `loss` trains where no flag says otherwise; on a CPU, the shortest run that showed differences in minutes
LOSS = dict(cpu=dict(seq_len=256, batch_size=2, steps=200, accum=1), gpu=dict(steps=600, accum=1))
PROBE = "stages/harness/probe.py"
PATIENCE = 5  # seconds in which a process ends that was told to, or that has closed its output


def parse(argv):
    """The command line, checked, every default filled in for the device."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("what", nargs="*", metavar="STAGE", help="stages, or one of the modes amp, limit, scale, loss (all stages)")
    add("--rounds", type=positive, metavar="N", help="times that every process starts afresh (5; 1 on a CPU)")
    add("--out", metavar="NAME", help="of the files in results/ (date, time and mode)")
    add("--resume", metavar="NAME", help="continue a bench that was interrupted, with the flags it had")
    add("--render", metavar="NAME", help="draw results/NAME.md again from its records, and run nothing")
    add("--readme", action="store_true", help="put the table between README.md's markers, too")
    add("--timeout", type=positive, default=600, metavar="S", help="seconds that a step may take (%(default)s)")
    add("--memory-budget", type=float, metavar="GB", help="for limit on a CPU: what a run may hold (half of the free)")
    add("--seeds", type=positive, default=5, metavar="N", help="for loss: runs of each stage (%(default)s)")
    add("--ranks", type=positive, metavar="N", help="for scale: up to so many processes (all devices; 2 on a CPU)")
    add_flags(parser)
    args = parser.parse_args(argv)
    try:
        if args.resume and argv not in (["--resume", args.resume], [f"--resume={args.resume}"]):
            raise InputError(f"--resume {args.resume} continues with the flags of before: pass no other")
        if args.record or args.save or args.led or args.eval or args.profile:
            raise InputError("--record, --save, --eval and --profile are for a single stage: stages/s05_flash.py")
        args.mode = args.what.pop(0) if args.what and args.what[0] in MODES else "ladder"
        args.given, args.argv = [name for name, value in vars(args).items() if value is not None], argv
        resolve(args)
        args.interleaved = args.device.type == "cpu"
        defaults = dict(steps=24, rounds=1 if args.interleaved else 5)
        if args.mode == "loss":
            defaults = LOSS["cpu" if args.interleaved else "gpu"] | dict(rounds=args.seeds)
        vars(args).update({name: value for name, value in defaults.items() if name not in args.given})
        if args.steps <= WARMUP:
            raise InputError(f"--steps {args.steps}: the first {WARMUP} steps are warm-up, pass more")
        for name in (args.out, args.resume, args.render):
            if name is not None and not re.fullmatch(r"[\w][\w.+-]*", name):
                raise InputError(f"{name!r} is no name for a file in results/: pass letters, digits, '.', '-' and '_'")
        if args.memory_budget is not None and not args.memory_budget > 0:
            raise InputError(f"--memory-budget {args.memory_budget} holds nothing: pass more")
        if args.readme and args.mode != "ladder":
            raise InputError(f"README.md shows the ladder: leave --readme or {args.mode} out")
        args.stages = sorted({stage_named(word) for word in args.what}) or MODES[args.mode]
    except InputError as error:
        parser.error(str(error))
    return args


def stage_named(word):
    """The stage that s05, 5, 05 or s05_flash names. Raises InputError."""
    for stage in STAGES:
        if word == stage or re.fullmatch(rf"s?{int(stage[1:3])}|s?{stage[1:3]}", word):
            return stage
    raise InputError(f"{word} is no stage: pass s01 to {STAGES[-1][:3]}, or one of {', '.join(MODES)}")


# a row of the table, or a probe: a script, with the flags it gets beyond those that all share; ranks: processes under
# torchrun, 0 without it; env: what it adds to the environment
Row = namedtuple("Row", "name script change flags ranks env", defaults=("", (), 0, {}))


def rows_of(args):
    """(rows, probes) of a bench, each a Row. Raises InputError for a mode that a stage can't answer."""
    peak, scripts = Row(report.PEAK, PROBE), [f"stages/{stage}.py" for stage in args.stages]
    if args.mode == "amp":
        if len(args.stages) > 1 or int(args.stages[0][1:3]) < 3:
            raise InputError("amp compares dtypes in one stage from s03 on: pass one, such as s10")
        if "amp_dtype" in args.given:
            raise InputError("amp runs every dtype: leave --amp-dtype out")
        dtypes = ("float32", "float16", "bfloat16")
        return [Row(dtype, scripts[0], "", ["--amp-dtype", dtype]) for dtype in dtypes], [peak]
    if args.mode == "scale":
        if args.stages != ["s12_ddp"]:
            raise InputError("scale is about s12, the one stage that knows several processes")
        there = machine.cores() if args.interleaved else getattr(torch, args.device.type).device_count()
        most = args.ranks or (min(2, there) if args.interleaved else there)
        if most > there:
            raise InputError(f"--ranks {most}: this machine has {there} {'cores' if args.interleaved else 'devices'}")
        if args.accum % most:
            args.accum = most * max(1, round(args.accum / most))
        env = {"OMP_NUM_THREADS": str(max(1, there // most))} if args.interleaved else {}
        sizes = sorted({2**i for i in range(most.bit_length())} | {most})  # 1, 2, 4, ... and all
        rows = [Row(f"{n} rank{'s' * (n > 1)}", scripts[0], ranks=n, env=env) for n in sizes]
        return rows, [row._replace(name=f"all-reduce {row.name}", script=PROBE) for row in rows if row.ranks > 1]
    if args.mode == "loss" and args.accum > 1:
        raise InputError("loss compares stages after the same tokens, which --accum multiplies: leave it out")
    titles = [source(stage)[0].partition("\n")[0].partition(": ")[2].rstrip(".") for stage in args.stages]
    return [Row(*row) for row in zip(args.stages, scripts, titles, strict=True)], [peak] * (args.mode == "ladder")


def stage_flags(args):
    """The flags that every process gets: those given, and the defaults made explicit."""
    device = args.device.type if args.mode == "scale" else str(args.device)  # each rank takes a device of its own
    flags = ["--device", device, "--steps", str(args.steps)]
    for name in ("batch_size", "seq_len", "size", "seed", "accum"):
        flags += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    flags += ["--data", str(Path(args.data).resolve())] if args.data else []
    flags += ["--amp-dtype", str(args.amp_dtype).removeprefix("torch.")] if "amp_dtype" in args.given else []
    return flags + (["--compile" if args.compile else "--no-compile"] if "compile" in args.given else [])


def say(line, brief=False):
    """Report on stderr where the bench is; a brief line replaces the last where that is a terminal."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed terminal costs no record
        if sys.stderr.isatty():
            line = line[: shutil.get_terminal_size().columns - 1]  # what wraps can't be overwritten
            print(f"\r\033[K{line}", end="" if brief else "\n", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


class Process:
    """A row at work. It takes a step for each ask() and ends by itself when this process dies."""

    def __init__(self, row, args, write, budget=None):
        """write(entry): keeps a line of its record. budget: bytes of memory that it may hold, or None."""
        self.row, self.timeout, self.write, self.budget = row, args.timeout, write, budget
        self.failure, self.speed, self.held = None, 0, 0
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={row.ranks}"] if row.ranks else []
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(ROOT / row.script), *stage_flags(args), *row.flags, "--led"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C reaches the bench alone, which then stops its children in order
            env=os.environ | {"PYTHONSAFEPATH": ""} | row.env,  # a stage finds the harness beside itself
        )
        self.lines = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith(b'{"kind":') and line.endswith(b"}\n"):  # else a library printed it, or it was cut off
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def ask(self):
        """Ask for one step, and do not wait for it."""
        self.deadline = time.monotonic() + self.timeout
        with contextlib.suppress(OSError):  # the process is gone: poll() finds out why
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    def close(self):
        """Ask for the summary."""
        self.deadline = time.monotonic() + self.timeout  # it may take the held-out loss first
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def poll(self):
        """Wait until the step has ended, or the process has. Whether it was the step; if not, see failure."""
        while self.failure is None:
            try:
                entry = self.lines.get(timeout=0.05)
            except queue.Empty:
                if time.monotonic() > self.deadline:
                    self.failure = f"no answer in {self.timeout:.0f} s: stopped; raise --timeout if it is only slow"
                elif self.budget and machine.resident_memory(self.process.pid) > self.budget:
                    self.failure = f"out of memory: more than the budget of {self.budget / 1e9:.1f} GB"
                continue
            if entry is None or entry["kind"] == "error":
                self.failure = entry["error"] if entry else self._why_it_ended()
                return False
            self.write(entry)
            if entry["kind"] == "step":
                self.held = max(self.held, (entry.get("memory") or 0) * max(1, self.row.ranks))
                self.speed = entry.get("tokens", 0) / entry.get("dt", 1)
                return True
        return False

    def _why_it_ended(self):
        """What a process died of that has closed its output, or None where it ended as it should."""
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return "closed its output, and did not end"
        self.errors.seek(0)
        last = "".join(self.errors.read().decode(errors="replace").strip().splitlines()[-1:])[:200]
        if code == -9:  # SIGKILL
            return "killed by the system, most likely out of memory: try a smaller --batch-size"
        if code == 2 and "error: " in last:  # refused by its own checks
            return last.partition("error: ")[2]
        ended = "ended before its last step" * (not self.process.stdin.closed)
        return f"exit status {code}: {last}".rstrip(": ") if code else ended or None

    def stop(self):
        """End the process and all that it started, at once where it does not end by itself."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # torchrun's workers are in sessions of their own: it alone reaches them, and gives them 30 s
            self.process.wait(PATIENCE + 35 * bool(self.row.ranks))
        self.signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        self.process.wait()
        if self.failure:
            self.write(dict(kind="error", error=self.failure))
        self.reader.join(PATIENCE)
        for pipe in (self.process.stdin, self.errors, *[self.process.stdout] * (not self.reader.is_alive())):
            with contextlib.suppress(OSError):
                pipe.close()

    def signal(self, number):
        """Send a signal to the process and to all that it started."""
        with contextlib.suppress(OSError):  # it leads a group of its own, but on Windows
            os.killpg(self.process.pid, number) if hasattr(os, "killpg") else self.process.send_signal(number)


class Session:
    """Fresh processes of some rows, led through warm-up and counted steps, one step each in turn."""

    def __init__(self, args, path, number, budget=None, ahead=0):
        """number: by which its records name it; ahead: how many sessions of as many steps come after it."""
        self.args, self.path, self.number, self.budget, self.ahead = args, path, number, budget, ahead
        self.live, self.failed = [], set()

    def start(self, row):
        """A Process of a row, whose record goes to the results file."""

        def write(entry):
            line = dict(kind=entry["kind"], session=self.number, name=row.name) | entry
            with open(self.path, "a", encoding="utf-8") as f:
                f.write(json.dumps(line) + "\n")

        self.live.append(Process(row, self.args, write, self.budget))
        return self.live[-1]

    def room(self):
        """How many processes to start next: one at first, then two, each with 1.5 times as much as the last."""
        free, held = machine.free_memory(), 1.5 * next((of.held for of in reversed(self.live) if of.held), 0)
        return min(2 if self.live else 1, int(free // held) if free is not None and held else 2)

    def lead(self, rows, steps):
        """Take as many of the rows as memory holds through warm-up and so many counted steps; the names that failed."""
        rest = list(rows)
        try:
            while rest and (n := self.room()):
                some = [self.start(row) for row in rest[:n]]  # two at once, since compilation keeps one core busy
                del rest[:n]
                names = ", ".join(process.row.name for process in some)
                place = f"{len(rows) - len(rest)}/{len(rows)}" + f", then {self.ahead} more" * (self.ahead > 0)
                say(f"[{place}] {names}: start and warm-up", brief=True)
                for _ in range(WARMUP):
                    self.step([process for process in some if not process.failure])
            began = time.monotonic()
            for step in range(1, steps + 1):
                # there and back, so that a drift of the machine's speed hits the first and the last alike
                for process in self.live[:] if step % 2 else self.live[::-1]:
                    time.sleep(0.02 * (len(self.live) > 1))  # the last one's threads may still spin, waiting for work
                    self.step([process])
                left = (time.monotonic() - began) / step * (steps - step + steps * self.ahead)
                speeds = [f"{report.short(p.row.name)} {p.speed:,.0f}" for p in self.live if p.speed]
                say(f"step {step}/{steps}, {left:.0f} s left | tok/sec {', '.join(speeds)}", brief=True)
            self.step(self.live[:], Process.close)  # all together, since each takes its time to leave
        finally:
            for process in self.live:
                process.signal(signal.SIGTERM)  # likewise
            for process in self.live:
                process.stop()
        return self.failed

    def step(self, processes, ask=Process.ask):
        """Ask processes for a step at once, wait for all of them, and drop those that failed."""
        for process in processes:
            ask(process)
        for process in processes:
            process.poll()
        for process in filter(lambda process: process.failure, processes):
            say(f"{process.row.name} failed: {process.failure}")
            self.failed.add(process.row.name)
            self.live.remove(process)
            process.stop()


def run(args, path, rows, probes):
    """Lead sessions until every row has its counted steps; those that are in the results file count."""
    failed, before, pair = set(), None, len(rows) // 2
    everyone = [*rows[: pair + 1], rows[pair]._replace(name=rows[pair].name + report.AGAIN), *rows[pair + 1 :]]
    while True:
        results = report.Results(path)
        alive = [row for row in everyone if row.name not in failed]
        need = {row.name: max(0, results.wanted - len(results.steps(row.name))) for row in alive}
        need |= {n: args.steps - WARMUP for n in need if before is None and "error" in results.end(n)}
        rest = [row for row in alive if need[row.name]]
        if need == before:
            say("no memory for another process beside the first ones: try a smaller --batch-size")
        if not rest or need == before:
            return
        before = need
        # a row is compared with the first one and the one above: both are in its session, and so are the probes
        above = [row for row in alive[: alive.index(rest[0])] if row in rows]
        first, *others = [*above[:1], *above[1:][-1:], *rest]
        probing = [row for row in probes if row.name not in failed]
        steps = min(args.steps - WARMUP, max(need.values()))
        session = 1 + max((number for number, _ in results.runs), default=-1)
        if args.interleaved:  # the first one warms up alone, and shows what one holds
            groups = [[first, *probing, *others]]
        else:  # the probes warm the card up; there and back, so that a drift hits the first and the last alike
            groups = [[row] for row in probing + [first, *others][:: 1 if session % 2 == 0 else -1]]
        for i, group in enumerate(groups):
            failed |= Session(args, path, session, ahead=len(groups) - i - 1).lead(group, steps)


def compare_losses(args, path, rows, probes):
    """Train every row once for each seed, in a fresh process; those that came to their end are not run again."""
    ended = {key for key, run in report.Results(path).runs.items() if "eval" in run.end}
    todo = [(i, row) for i in range(args.seeds) for row in rows if (i, row.name) not in ended]
    for n, (i, row) in enumerate(todo, 1):
        row = row._replace(flags=["--seed", str(args.seed + i), "--eval"])
        Session(args, path, i, ahead=len(todo) - n).lead([row], args.steps - WARMUP)


def find_limit(args, path, rows, probes):
    """Double the batch of each row until it no longer fits, and bisect: a fresh process for each batch."""
    half = (machine.free_memory() or 0) / 2e9
    budget = 1e9 * (args.memory_budget or half) if args.interleaved else None

    def fits(row, batch, steps=0):
        tried = row._replace(name=f"{row.name} B{batch}", flags=["--batch-size", str(batch)])
        key = (int(steps > 0), tried.name)
        runs = report.Results(path).runs
        if key not in runs or not runs[key].end:
            Session(args, path, key[0], budget).lead([tried], steps)
        error = report.Results(path).runs[key].end.get("error")
        say(f"{tried.name}: {error or 'fits'}")
        return not error

    for row in rows:
        low, high = 0, 1
        while fits(row, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(row, middle) else (low, middle)
        while low and not fits(row, low, steps=3):
            low -= 1  # a longer run holds a little more


def first_line(args, rows):
    """The bench's own line in the records: all that must be the same where it continues."""
    tokens = data.load_tokens(args.data)  # downloaded and tokenized once, for all processes
    data.TokenLoader(tokens, args.batch_size, args.seq_len)
    if data.offline:
        os.environ["LADDER_OFFLINE"] = "1"
    sources = [ROOT / "model.py", ROOT / "data.py", *(ROOT / "stages" / "harness").glob("[!r]*.py")]
    sources = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sources}
    return dict(
        kind="bench",
        mode=args.mode,
        change={row.name: row.change for row in rows},
        interleaved=args.interleaved,
        **dict(warmup=WARMUP, steps=args.steps, rounds=args.rounds),
        flags=stage_flags(args),
        **dict(corpus=tokens.corpus, tokenizer=tokens.tokenizer, ids=hashlib.sha256(tokens).hexdigest()),
        sources=sources | {stage: code_sha256(stage) for stage in args.stages},
        environment=machine.environment(args.device),
        command=shlex.join(["python", "bench.py", *args.argv]),
    )


def resumed(path):
    """(args, rows, probes) of a bench that was interrupted. Raises InputError where anything that runs has changed."""
    before = report.Results(path).bench
    args = parse(shlex.split(before["command"])[2:])
    rows, probes = rows_of(args)
    old, new = ({**line, **line["sources"], **line["environment"]} for line in (before, first_line(args, rows)))
    for key in sorted(new.keys() - {"sources", "environment"}):
        if old.get(key) != new[key]:
            raise InputError(f"--resume {path.stem}: {key} was {old.get(key)} and is {new[key]}; start a new bench")
    text = path.read_bytes()
    if not text.endswith(b"\n"):
        write_whole(path, text[: text.rfind(b"\n") + 1])  # without the line that was cut off
    return args, rows, probes


def show(path, readme):
    """Write the page and README's part, print the page, and return how the bench ended: the exit status."""
    page = report.page(results := report.Results(path))
    write_whole(path.with_suffix(".md"), page.encode())
    if readme:
        text = (ROOT / "README.md").read_bytes().decode()
        write_whole(ROOT / "README.md", report.between_markers(text, report.narrow(results, path.stem)).encode())
    say(f"written to results/{path.stem}.md, the records to results/{path.name}")
    print(page, flush=True)
    return 0 if results.complete() else 1


def bench(args):
    """Run, continue or draw what was asked; the exit status."""
    known = args.render or args.resume
    if args.readme:  # markers that are missing are reported before anything runs
        report.between_markers((ROOT / "README.md").read_bytes().decode(), "")
    path = RESULTS / f"{known or args.out or f'{datetime.now():%Y-%m-%d-%H%M%S}-{args.mode}'}.jsonl"
    there = next((place for place in (path, path.with_suffix(".md")) if place.exists()), None)
    if known and there != path:
        raise InputError(f"results/{path.name} is not there: pass the NAME of a bench that ran")
    if there and not known:
        other = f"--resume {path.stem} or --render {path.stem}"
        raise InputError(f"results/{there.name} is there already: pass another --out, {other}")
    if args.render:
        return show(path, args.readme)
    if args.resume:
        args, rows, probes = resumed(path)
    else:
        rows, probes = rows_of(args)
        write_whole(path, (json.dumps(first_line(args, rows)) + "\n").encode())
    end_as_by_ctrl_c()
    try:
        dict(limit=find_limit, loss=compare_losses).get(args.mode, run)(args, path, rows, probes)
    except KeyboardInterrupt:
        say(f"interrupted; continue with: python bench.py --resume {path.stem}")
        show(path, readme=False)
        return 130
    return show(path, args.readme)  # as it was asked for before an interrupt


def main():
    args = parse(sys.argv[1:])
    try:
        return bench(args)
    except (InputError, OSError) as error:
        where = "" if isinstance(error, InputError) else f"{error.filename or 'the disk'}: "
        print(f"bench.py: error: {where}{getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the first process, or after the last
        print("bench.py: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
