"""Runs the stages in processes of their own and writes a table of what each is worth on this machine.

    python bench.py                    all stages
    python bench.py s05 s11            these
    python bench.py s11 my/train.py    a stage and a script of your own
    python bench.py amp                float32, float16 with loss scaling and bfloat16, side by side
    python bench.py limit s05 s11      the largest batch that fits
    python bench.py scale              s12 on 1, 2, ... processes
    python bench.py loss s08 s09 --lr 3e-4 6e-4      the held-out loss after the same tokens, at these rates

Every other flag goes to all stages: python stages/s01_baseline.py --help lists them. The table goes to results/NAME.md,
each step to results/NAME.jsonl as it is measured. In the ladder on a CPU all processes are alive at once and take one
step each in turn. On an accelerator they run one after the other, until each has 20 counted steps and six seconds of
them.
"""

import argparse
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import sys
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "stages"))

from harness import flags, ladder, machine, page, readme
from harness.flags import LEARNING_RATE, Parser, learning_rate, parse, positive, rate_text
from harness.leader import say
from harness.modes import CPU_MEMORY, ENOUGH, MOST_COUNTED_STEPS, Bench
from harness.records import COUNTED_STEPS, WARMUP
from harness.results import PEAK, PLAIN, Results

from data import TokenLoader, load_tokens, refuse, whole_file

MODES = ("amp", "limit", "scale", "loss")
# The mode `loss`: one pass over Tiny Shakespeare in 600 steps; a CPU has no time for that.
LOSS_RATES = (1.5e-4, 6e-4, 2.4e-3)
LOSS_FLAGS = ("--batch-size", "2", "--seq-len", "256", "--accum", "1")


def new_parser():
    """Return the parser of the flags that are the bench's own."""
    usage = "bench.py [amp | limit | scale | loss] [STAGE ...] [flags]"
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(usage=usage, description=__doc__, formatter_class=formatter, allow_abbrev=False)
    add = parser.add_argument
    add("--rounds", type=positive, metavar="N", help="times that every process starts afresh (1)")
    on_cpu, most = WARMUP + COUNTED_STEPS, WARMUP + MOST_COUNTED_STEPS
    steps_help = f"of a process, {WARMUP} of them warm-up ({on_cpu} on a CPU, at most {most} on a GPU; loss: 80, 600)"
    add("--steps", type=positive, metavar="N", help=steps_help)
    rates = " ".join(rate_text(rate) for rate in LOSS_RATES)
    lr_help = f"learning rate ({rate_text(LEARNING_RATE)}); several for loss ({rates})"
    add("--lr", type=learning_rate, nargs="+", metavar="RATE", help=lr_help)
    add("--seeds", type=positive, metavar="N", help="for loss: runs of each stage at each rate (5; 2 on a CPU)")
    add("--ranks", type=positive, metavar="N", help="for scale: up to so many processes (all devices; 2 on a CPU)")
    add("--memory-budget", type=float, metavar="GB", help="for limit on a CPU: what a run may hold (half of the free)")
    add("--out", metavar="NAME", help="of the files in results/ (date, time and mode)")
    add("--resume", metavar="NAME", help="continue a bench that was interrupted, with the flags that it had")
    add("--render", metavar="NAME", help="draw results/NAME.md again, and run nothing")
    add("--readme", action="store_true", help="put the table between README.md's markers, too")
    return parser


def parse_command(argv):
    """Return the command line as a namespace. Exits with one line and status 2 where it is wrong.

    It gains mode, scripts (the paths of what runs, in the table's order), plain (whether the row of that name runs),
    stage (the flags of the stages as they parse them), stage_flags (the list that they get) and on_cpu (where all
    processes are alive at once).
    """
    args, others = new_parser().parse_known_args(argv)
    _, unknown = flags.new_parser(__doc__).parse_known_args(others)
    args.what = [word for word in unknown if not word.startswith("-")]  # no flag of the stages, nor the value of one
    stage_flags = list(others)
    for word in args.what:
        stage_flags.remove(word)
    args.mode = "ladder"
    if args.what and args.what[0] in MODES:
        args.mode = args.what.pop(0)
    for name in (args.out, args.resume, args.render):
        if name is not None and not re.fullmatch(r"\w[\w.+-]*", name):
            refuse(f"{name!r} is no name for a file in results/: pass letters, digits, '.', '-' and '_'")
    if args.mode == "loss":
        stage_flags = [*LOSS_FLAGS, *stage_flags]  # of two flags the last one counts
    args.stage = parse(__doc__, stage_flags)
    for name in ("record", "save", "eval", "profile", "worker"):
        if getattr(args.stage, name):
            refuse(f"--{name} is for a single stage: python stages/s05_flash.py --{name}")
    args.on_cpu = args.stage.device.type == "cpu"
    args.plain = args.mode == "ladder" and args.on_cpu and (not args.what or PLAIN in args.what)
    args.scripts = scripts_of(args)
    fill_in_defaults(args)
    check(args)
    if len(args.lr) == 1:
        stage_flags = [*stage_flags, "--lr", rate_text(args.lr[0])]
    args.stage_flags = ["--steps", str(args.steps), *stage_flags]
    return args


def scripts_of(args):
    """Return the paths of the stages and scripts that a command line names: stages in order, and the others below."""
    if PLAIN in args.what and not args.plain:
        refuse(f"{PLAIN} is a row of the ladder on a CPU: leave it out")
    words = [word for word in args.what if word != PLAIN]
    stages, others = [], []
    for word in words:
        path = Path(word)
        is_elsewhere = path.suffix == ".py" and path.resolve().parent != ladder.FOLDER
        stage = None if is_elsewhere else ladder.stage_of(word)
        if stage:
            stages.append(stage)
        elif path.suffix == ".py" and path.is_file():
            others.append(path.resolve())
        else:
            last = ladder.STAGES[-1].short
            refuse(f"{word} is no stage: pass s01 to {last}, the path of a script, or first one of {', '.join(MODES)}")
    if not args.what:
        stages = [stage for stage in ladder.STAGES if args.mode == "ladder" or args.mode in stage.modes]
        if args.mode == "ladder" and args.stage.device.type == "mps":
            stages = [stage for stage in stages if not stage.takes_ranks]  # gloo and nccl do not know mps
    names = [path.stem for path in others] + ladder.NAMES
    for path in others:
        if names.count(path.stem) > 1 or path.stem in (PLAIN, PEAK):
            refuse(f"{path.name} can't name a row, which another one has: rename it")
    in_order = [stage for stage in ladder.STAGES if stage in stages]
    return [ladder.path_of(stage.name) for stage in in_order] + others


def fill_in_defaults(args):
    """Fill in the flags that were not given, by the mode and the device."""
    if args.mode == "loss" and args.rounds:
        refuse("loss trains each stage once for each seed: pass --seeds instead of --rounds")
    if args.mode == "limit" and args.rounds:
        refuse("limit tries each batch once: leave --rounds out")
    if args.mode == "loss":
        args.steps = args.steps or (80 if args.on_cpu else 600)
        args.rounds = args.seeds or (2 if args.on_cpu else 5)
        args.lr = sorted(args.lr or LOSS_RATES)
    else:
        args.rounds = args.rounds or 1
        most = COUNTED_STEPS if args.on_cpu else MOST_COUNTED_STEPS
        args.steps = args.steps or WARMUP + most
        args.lr = args.lr or [LEARNING_RATE]
    if args.mode == "limit" and args.on_cpu and args.memory_budget is None:
        args.memory_budget = machine.free_memory() / 2 / 1e9


def check(args):
    """Exit with one line where the flags can't answer the mode's question."""
    if args.steps <= WARMUP:
        refuse(f"--steps {args.steps}: the first {WARMUP} steps are warm-up, pass more")
    if args.readme and args.mode != "ladder":
        refuse(f"README.md shows the ladder: leave --readme or {args.mode} out")
    if len(args.lr) > 1 and args.mode != "loss":
        refuse("--lr takes several rates in the mode loss alone: pass one")
    if len({rate_text(rate) for rate in args.lr}) < len(args.lr):
        refuse("--lr names a rate twice: name each once")
    if args.mode in ("amp", "scale") and len(args.scripts) > 1:
        refuse(f"{args.mode} compares variants of one stage: pass one")
    if args.mode == "amp" and "args.amp_dtype" not in args.scripts[0].read_text(encoding="utf-8"):
        refuse(f"amp compares the dtypes of autocast, and {args.scripts[0].stem} has none: pass a later stage")
    if args.mode == "scale" and ladder.find(args.scripts[0].stem) and not ladder.find(args.scripts[0].stem).takes_ranks:
        refuse(f"{args.scripts[0].stem} is for one process: pass the last stage, or none")
    for flag, value, mode in (
        ("--seeds", args.seeds, "loss"),
        ("--ranks", args.ranks, "scale"),
        ("--memory-budget", args.memory_budget, "limit"),
    ):
        if value is not None and args.mode != mode:
            refuse(f"{flag} is for the mode {mode}: leave it out")
    if args.memory_budget is not None and not args.on_cpu:
        refuse("--memory-budget is for a CPU: a card is its own limit")
    if args.mode == "limit" and args.on_cpu and not sys.platform.startswith("linux"):
        refuse("limit needs an accelerator, or Linux, which can limit a process")
    if args.memory_budget is not None and not 0 < args.memory_budget < math.inf:
        refuse(f"--memory-budget {args.memory_budget:g}: pass a number of GB above 0")


def own_line(bench, argv):
    """Return the bench's own line in the records, a dict: see records.py."""
    args = bench.args
    corpus = corpus_of(args)
    pair_by = "step" if args.on_cpu else "session"
    if args.mode == "loss":
        pair_by = "seed"
    rows = []
    for row in bench.rows:
        rows.append({"name": row.name, "stage": row.script.stem, "change": row.change})
        if args.mode == "loss":
            rows[-1]["lr"] = row.name.split()[-1]
    return {
        "kind": "bench",
        "mode": args.mode,
        "pair_by": pair_by,
        "steps": args.steps,
        "rounds": args.rounds,
        "rows": rows,
        "controls": {bench.control.name: bench.base_of_control.name} if bench.control else {},
        "enough": None if args.on_cpu else [ENOUGH.steps, ENOUGH.seconds],
        "memory_budget": args.memory_budget,
        "corpus": [corpus.name, corpus.tokenizer],
        "environment": machine.environment(args.stage.device),
        "code": sources([row.script for row in bench.rows]),
        "command": shlex.join(["python", "bench.py", *argv]),
    }


def corpus_of(args):
    """Return the Corpus that all rows train on: downloaded and tokenized here, once for all processes.

    Exits with one line where it is too short for a batch.
    """
    corpus = load_tokens(args.stage.data)
    TokenLoader(corpus, args.stage.batch_size, args.stage.seq_len)
    if corpus.tokenizer == "bytes":
        os.environ["LADDER_OFFLINE"] = "1"  # else each process would wait for a download
    return corpus


def sources(scripts):
    """Return {file: sha256} of all code that decides what is measured. The pages only draw."""
    paths = [*ROOT.glob("*.py"), *(ladder.FOLDER / "harness").glob("*.py")]
    hashes = {}
    for path in sorted(paths):
        if path.name not in ("page.py", "loss_page.py", "markdown.py", "readme.py"):
            hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    for path in scripts:
        hashes[str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)] = ladder.code_sha256(path)
    return hashes


def records_path(name):
    """Return where a bench of this name keeps its records."""
    return ROOT / "results" / f"{name}.jsonl"


def existing(name):
    """Return the path of a bench's records. Exits with one line where there are none of this name."""
    path = records_path(name)
    if not path.exists():
        refuse(f"results/{path.name} is not there: pass the NAME of a bench that ran")
    return path


def locked(path, mode):
    """Return the records' file, open and held against a second bench until this process ends."""
    try:
        file = open(path, mode, encoding="utf-8")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileExistsError, BlockingIOError):
        refuse(f"results/{path.name} is being written by another bench: wait for it, or stop it")
    return file


def start(args, argv):
    """Return (Bench, its locked file) with its own line in new records."""
    path = records_path(args.out or f"{datetime.now():%Y-%m-%d-%H%M%S}-{args.mode}")
    for taken in (path, path.with_suffix(".md")):
        if taken.exists():
            refuse(f"results/{taken.name} is there already: pass another --out, or --resume {path.stem}")
    bench = Bench(args, path)
    line = own_line(bench, argv)
    path.parent.mkdir(exist_ok=True)
    file = locked(path, "x")
    print(json.dumps(line), file=file, flush=True)
    return bench, file


def resume(name):
    """Return (Bench, its locked file) of one that was interrupted. Exits where anything that runs has changed."""
    path = existing(name)
    file = locked(path, "r+")
    before = Results(path).bench
    argv = shlex.split(before["command"])[2:]
    args = parse_command(argv)
    args.memory_budget = before["memory_budget"]
    bench = Bench(args, path)
    now = own_line(bench, argv)
    compared = [(before["code"], now["code"]), (before["environment"], now["environment"]), (before, now)]
    for then, new in compared:
        for key in new:
            if then.get(key) != new[key]:
                refuse(f"--resume {name}: {key} was {then.get(key)} and is {new[key]}; start a new bench")
    text = path.read_bytes()
    os.truncate(path, text.rfind(b"\n") + 1)  # what a kill left of the last line
    return bench, file


def show(path, with_readme):
    """Write and print the page, write README's part, and return the exit status: 0 where every row is complete."""
    results = Results(path)
    drawn = page.page(results)
    with whole_file(path.with_suffix(".md")) as unfinished:
        unfinished.write_text(drawn, encoding="utf-8")
    if with_readme:
        text = readme.with_part(read_readme(), readme.readme_part(results, path.stem))
        with whole_file(ROOT / "README.md") as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    print(drawn)
    say(f"written to results/{path.stem}.md, the records to results/{path.name}")
    if results.mode == "limit":
        found = [results.largest_batch(name) and results.limit_is_found(name) for name in results.rows]
        return 0 if all(found) else 1
    everyone = list(results.rows) + list(results.bench["controls"])
    return 0 if all(results.is_finished(name) for name in everyone) else 1


def read_readme():
    """Return README.md's text."""
    return (ROOT / "README.md").read_text(encoding="utf-8")


def main(argv):
    """Run, continue or draw what was asked, and return the exit status."""
    for name in CPU_MEMORY:
        os.environ.pop(name, None)  # a user may have set them, and `plain` is without
    args = parse_command(argv)
    if args.readme:
        readme.with_part(read_readme(), "")  # exits where the markers are missing, before anything runs
    if args.render:
        return show(existing(args.render), args.readme)
    if args.resume:
        bench, file = resume(args.resume)
    else:
        bench, file = start(args, argv)
    with file:
        try:
            bench.run()
        except KeyboardInterrupt:
            say(f"interrupted; continue with: python bench.py --resume {bench.path.stem}")
            show(bench.path, False)
            return 130
        except OSError as error:  # the disk is full
            name = bench.path.stem
            refuse(f"results/{name}.jsonl: {error}; mend it, and continue with: python bench.py --resume {name}")
        return show(bench.path, args.readme or bench.args.readme)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except OSError as error:  # the disk is full, or read-only
        refuse(str(error))
