"""Runs the stages in processes of their own and writes a table of what each is worth on this machine.

    python bench.py                    all stages
    python bench.py s05 s11            these
    python bench.py s11 my/train.py    a stage and a script of your own
    python bench.py amp                float32, float16 with loss scaling and bfloat16, side by side
    python bench.py limit s05 s11      the largest batch that fits
    python bench.py scale              s12 on 1, 2, ... processes

Every other flag goes to all stages: python stages/s01_baseline.py --help lists them. The table goes to results/NAME.md,
each step to results/NAME.jsonl as it is measured. On a CPU all processes are alive at once and take one step each in
turn. On an accelerator they run one after the other, until each has 20 counted steps and six seconds of them, in three
rounds.
"""

import fcntl
import json
import os
import re
import shlex
import sys
import textwrap
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "stages"))

from harness import ladder, machine, own_modules, page
from harness.flags import Parser, parse, positive
from harness.modes import CPU_MEMORY, MODES, PEAK, PLAIN
from harness.record import COUNTED_STEPS, WARMUP, code_hash
from harness.results import Results
from harness.schedule import ENOUGH, MOST_COUNTED_STEPS, Bench
from harness.workers import say

from data import TokenLoader, load_tokens, refuse, whole_file


def new_parser():
    """Return the parser of the flags that are the bench's own."""
    parser = Parser(__doc__, usage="bench.py [amp | limit | scale] [STAGE ...] [flags]")
    add = parser.add_argument
    add("--rounds", type=positive, metavar="N", help="times that every process starts afresh (3; 1 on a CPU)")
    on_cpu, most = WARMUP + COUNTED_STEPS, WARMUP + MOST_COUNTED_STEPS
    steps_help = f"of a process, {WARMUP} of them warm-up ({on_cpu} on a CPU, at most {most} on a GPU)"
    add("--steps", type=positive, metavar="N", help=steps_help)
    add("--ranks", type=positive, metavar="N", help="for scale: up to so many processes (all devices; 2 on a CPU)")
    add("--memory-budget", type=float, metavar="GB", help="for limit on a CPU: what a run may hold (half of the free)")
    add("--out", metavar="NAME", help="of the files in results/ (date, time and mode)")
    add("--resume", metavar="NAME", help="continue a bench that was interrupted, with the flags that it had")
    add("--render", metavar="NAME", help="draw results/NAME.md again, and run nothing")
    return parser


def parse_command(argv):
    """Return the command line as a namespace. Exits with one line and status 2 where it is wrong.

    It gains mode (of MODES), scripts (the paths of what runs, in the table's order), plain (whether the row of that
    name runs), stage (the flags of the stages as they parse them), stage_flags (the list that they get) and on_cpu
    (where all processes are alive at once).
    """
    mode = MODES["ladder"]
    words = list(argv)
    if words and words[0] in MODES:
        mode = MODES[words.pop(0)]
    args, others = new_parser().parse_known_args(words)
    args.mode = mode
    for name in (args.out, args.resume, args.render):
        if name is not None and not re.fullmatch(r"\w[\w.+-]*", name):
            refuse(f"{name!r} is no name for a file in results/: pass letters, digits, '.', '-' and '_'")
    for flag, name in (("--resume", args.resume), ("--render", args.render)):
        if name is not None and list(argv) not in ([flag, name], [f"{flag}={name}"]):
            refuse(f"{flag} takes the flags that {name} began with: leave all others out")
    names, args.stage_flags = names_and_flags(others)
    args.stage = parse(__doc__, args.stage_flags)
    args.on_cpu = args.stage.device.type == "cpu"
    check_flags(args)
    args.plain = mode.name == "ladder" and args.on_cpu and (not names or PLAIN in names)
    if PLAIN in names and not args.plain:
        refuse(f"{PLAIN} is a row of the ladder on a CPU: leave it out")
    args.scripts = scripts_of(args, [name for name in names if name != PLAIN], run_all=not names)
    mode.check(args)
    args.rounds = args.rounds or mode.rounds(args.on_cpu)
    most = COUNTED_STEPS if args.on_cpu else MOST_COUNTED_STEPS
    args.steps = args.steps or WARMUP + most
    if args.steps <= WARMUP:
        refuse(f"--steps {args.steps}: the first {WARMUP} steps are warm-up, pass more")
    args.stage_flags = ["--steps", str(args.steps), *args.stage_flags]
    return args


def names_and_flags(words):
    """Return (the stages and scripts that words name, the flags of the stages that are left).

    After the first flag, which may have a value, only a stage's name, `plain` or a .py file counts as a name.
    """
    names, flags = [], []
    for word in words:
        is_name = word == PLAIN or ladder.stage_of(word) or word.endswith(".py")
        if is_name or (not flags and not word.startswith("-")):
            names.append(word)
        else:
            flags.append(word)
    return names, flags


def check_flags(args):
    """Exit with one line where a flag would be ignored."""
    for name in ("record", "save", "eval", "profile", "worker"):
        if getattr(args.stage, name):
            refuse(f"--{name} is for a single stage: python stages/s05_flash.py --{name}")
    for mode in MODES.values():
        if mode.own_flag and mode is not args.mode and getattr(args, mode.own_flag) is not None:
            refuse(f"--{mode.own_flag.replace('_', '-')} is for {mode.name}: leave it out")
    given = {word.split("=")[0] for word in args.stage_flags}
    if args.mode.sets_flag in given:
        refuse(f"{args.mode.name} sets {args.mode.sets_flag} for each of its rows: leave it out")


def scripts_of(args, words, run_all):
    """Return the paths of the stages and scripts that words name: stages in order, and the others below."""
    stages = args.mode.stages(args) if run_all else []
    others = []
    for word in words:
        path = Path(word)
        is_elsewhere = path.suffix == ".py" and path.resolve().parent != ladder.FOLDER and path.is_file()
        stage = None if is_elsewhere else ladder.stage_of(word)
        if stage:
            stages.append(stage)
        elif path.is_file():
            others.append(path.resolve())
        elif word in MODES:
            refuse(f"{word} is a mode: put it first, as in python bench.py {word}")
        else:
            refuse(f"{word} is no stage and no file: pass s01 to {ladder.STAGES[-1].short}, or the path of a script")
    names = [path.stem for path in others] + ladder.NAMES + [stage.short for stage in ladder.STAGES]
    for path in others:
        if names.count(path.stem) > 1 or path.stem in (PLAIN, PEAK):
            refuse(f"{path.name} can't name a row, which another one has: rename it")
        hash_of(path)
    in_order = [stage for stage in ladder.STAGES if stage in stages]
    return [ladder.path_of(stage.name) for stage in in_order] + others


def hash_of(path):
    """Return code_hash() of a file. Exits with one line where it is no Python."""
    try:
        return code_hash(path)
    except (SyntaxError, ValueError) as error:  # ValueError: not UTF-8
        refuse(f"{path} can't be read as Python: {error}")


def own_line(args, rows, reference, argv):
    """Return the bench's own line in the records, a dict: see record.py."""
    corpus = corpus_of(args)
    budgets = [row.memory_budget for row in rows if row.memory_budget]
    return {
        "kind": "bench",
        "mode": args.mode.name,
        "pair_by": "turn" if args.on_cpu else "round",
        "reference": reference,
        "warmup": WARMUP,
        "steps": args.steps,
        "rounds": args.rounds,
        "enough": None if args.on_cpu else [ENOUGH.steps, ENOUGH.seconds],
        "memory_budget": budgets[0] if budgets else None,
        "rows": [row.about() for row in rows],
        "corpus": [corpus.name, corpus.tokenizer],
        "environment": machine.environment(args.stage.device),
        "code": sources([row.script for row in rows]),
        "command": shlex.join(["python", "bench.py", *argv]),
    }


def corpus_of(args):
    """Return the Corpus that all rows train on: downloaded and tokenized here, once for all processes.

    Exits with one line where it is too short for a sequence.
    """
    corpus = load_tokens(args.stage.data)
    TokenLoader(corpus, args.stage.batch_size, args.stage.seq_len)  # refuses a text that is too short
    if corpus.tokenizer == "bytes":
        os.environ["LADDER_OFFLINE"] = "1"  # else each process would wait for a download
    return corpus


def sources(scripts):
    """Return {file: code_hash()} of all code that decides what is measured. The page only draws."""
    paths = {*ROOT.glob("*.py"), *(ladder.FOLDER / "harness").glob("*.py"), *scripts}
    for script in scripts:
        paths |= set(own_modules(script.parent).values())
    hashes = {}
    for path in sorted(paths):
        if path != Path(page.__file__):
            hashes[str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)] = hash_of(path)
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
    """Return (rows, Results, path) of a new bench, whose own line is in its records."""
    path = records_path(args.out or f"{datetime.now():%Y-%m-%d-%H%M%S}-{args.mode.name}")
    for taken in (path, path.with_suffix(".md")):
        if taken.exists():
            refuse(f"results/{taken.name} is there already: pass another --out, or --resume {path.stem}")
    rows, reference = args.mode.rows(args)
    line = own_line(args, rows, reference, argv)
    path.parent.mkdir(exist_ok=True)
    file = locked(path, "x")
    print(json.dumps(line), file=file, flush=True)
    return rows, Results(line, file), path


def resume(name):
    """Return (args, rows, Results, path) of a bench that was interrupted. Exits where what runs has changed."""
    path = existing(name)
    file = locked(path, "a")
    results = Results.load(path)
    before = results.bench
    argv = shlex.split(before["command"])[2:]
    args = parse_command(argv)
    if before["memory_budget"]:
        args.memory_budget = before["memory_budget"] / 1e9
    rows, reference = args.mode.rows(args)
    now = own_line(args, rows, reference, argv)
    refuse_changes(name, before["code"], now["code"])
    refuse_changes(name, before["environment"], now["environment"])
    refuse_changes(name, before, now)
    whole_lines = path.read_bytes().rfind(b"\n") + 1
    os.truncate(path, whole_lines)  # without what a kill left of the last line
    results.file = file
    return args, rows, results, path


def refuse_changes(name, before, now):
    """Exit with one line where two dicts differ."""
    for key in before.keys() | now.keys():
        was, is_now = before.get(key), now.get(key)
        if was != is_now:
            refuse(f"--resume {name}: {key} was {was} and is {is_now}; start a new bench")


def show(results, path):
    """Write the page, print the short table, and return the exit status: 0 where every row is complete."""
    mode = MODES[results.bench["mode"]]
    with whole_file(path.with_suffix(".md")) as unfinished:
        unfinished.write_text(mode.page(results), encoding="utf-8")
    print(page.aligned(mode.short_rows(results)), flush=True)
    undecided = page.undecided_line(results)
    if undecided:
        print(textwrap.fill(undecided, page.TERMINAL), flush=True)
    say(f"written to results/{path.stem}.md, the records to results/{path.name}")
    return 0 if mode.is_complete(results) else 1


def main(argv):
    """Run, continue or draw what was asked, and return the exit status."""
    for name in CPU_MEMORY:
        os.environ.pop(name, None)  # a user may have set them, and `plain` is without
    args = parse_command(argv)
    if args.render:
        path = existing(args.render)
        return show(Results.load(path), path)
    if args.resume:
        args, rows, results, path = resume(args.resume)
    else:
        rows, results, path = start(args, argv)
    bench = Bench(rows, results, args.stage_flags, show=lambda: show(results, path))
    again = f"continue with: python bench.py --resume {path.stem}"
    try:
        args.mode.run(bench, args.on_cpu)
    except KeyboardInterrupt:
        say(f"interrupted; {again}")
        show(results, path)
        return 130
    except OSError as error:  # the disk is full
        refuse(f"results/{path.name}: {error}; mend it, and {again}")
    return show(results, path)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the first process
        sys.exit(130)
    except OSError as error:  # the disk is full, or read-only
        refuse(str(error))
