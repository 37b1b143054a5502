"""Runs stages and scripts side by side, each in a process of its own, and writes a table of what each is worth here.

    python bench.py                                                    the twelve stages
    python bench.py s10 "my/train.py --batch_size=8"                   one of them, and a script of your own, as it is
    python bench.py my/train.py "+bf16 my/train.py"                    your script, and what autocast would bring it
    python bench.py --climb "my/train.py --batch_size=8"               your script, and a technique more in each row
    python bench.py "s11 --batch-size 16" "s11 --batch-size 64"        one stage with other flags
    python bench.py s12 "torchrun --standalone --nproc_per_node=2 s12" one process and two

A row is a command: a stage or a script, the flags behind it, and what launches it in front. The script is the first
word that is a stage, ends in .py, or is the -m of a module, so write --log-dir=s05 and not --log-dir s05 in front of
it. +tf32, +bf16, +compile and +fused add a technique to a script from outside. A script runs in the folder that you are
in, and in its own where it lies elsewhere. Where it writes files, put {row} into a flag: each row has another number.

Flags behind the rows go to all stages: python stages/s01_baseline.py --help lists them. --steps and --seed also go to
scripts. A script chooses its own device, so --device cpu hides all cards, and --device cuda:1 all but that one.
Each row is compared with the one above and with the first. Table and verdict go to results/NAME.md, a picture to
results/NAME.svg, and each step, as it is measured, to results/NAME.jsonl. --predict only says, in half a minute, what
each stage should bring here.

Rows run in three rounds of fresh processes. On a CPU all are alive at once in a round, and take 7 counted steps, one
each in turn, there and back. On a card, and where memory does not hold all or one loads its data ahead, each runs to
its end: it stops when it has counted 7 steps or more that took six seconds together, and at the latest after 160.
"""

import itertools
import shlex
import signal
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "stages"))

from harness import ROOT, ladder, machine, ranks
from harness.bench.results import Results
from harness.bench.rounds import ENOUGH_SECONDS, MOST_COUNTED_STEPS, ROUNDS, measure, probe, show
from harness.bench.rows import CPU_MEMORY, all_rows, row_of, rows_of_climb, rows_of_ladder
from harness.common import refuse, tell
from harness.figures import ENOUGH_STEPS, WARMUP
from harness.flags import Parser, new_parser, parse, positive

from data import TextError, TokenLoader, load_tokens

FLAGS_FOR_SCRIPTS = ("--seed", "--device")  # of a stage, which mean something for a script, too
ORDER = "pass rows first, a script with its own flags in quotes, and then the flags of all stages"


def main(argv):
    """Measure, or draw what was measured. Return the exit status.

    It is 1 where a row failed for another reason than memory, and 128 and the number of a signal that ended the bench.
    """
    ranks.check_ranks()
    ranks.drop_left_over_ranks()
    if ranks.world_size() > 1:
        refuse("start bench.py once: torchrun belongs in front of a row, in its quotes")
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        args = parse_command(argv)
        if args.render is not None:
            render(args.render)
            return 0
        args.text = name_of_text(args)
        args.flags += ["--device", args.shared.device.type]  # of the cards all but one are hidden
        for name in ("device", "environment"):  # told here, since no row's note tells them
            if name in args.shared.fallbacks:
                tell(f"{name}: {args.shared.fallbacks[name]}")
        if args.predict:
            probe(Results(new_bench(args, argv)))
            return 0
        return exit_status(run(args, argv))
    except KeyboardInterrupt as interrupted:
        return 128 + interrupted.args[0]


def interrupt(signal_number, frame):
    """End the bench, as Ctrl-C does."""
    raise KeyboardInterrupt(signal_number)


# The command line


def parse_command(argv):
    """Return the command line as a namespace. Exits with one line and status 2 where it is wrong.

    Without --render it has more than the bench's own flags: `rows`, all that is started; `reference`, the name of the
    row that all are compared with; `stages`, the rows that take the flags of stages; `flags`, the words that all of
    these get; and `shared`, what a stage makes of the flags as they were typed.
    """
    args, words = new_parser_of_bench().parse_known_args(argv)
    for name in (args.out, args.render):
        if name is not None and (not name or "/" in name):
            refuse(f"{name!r}: pass a name, since all pages are in results/")
    if args.render is not None:
        if any((words, args.rounds, args.steps, args.out, args.climb, args.predict)):
            refuse("--render runs nothing: pass no rows and no other flags")
        return args
    if args.steps and args.steps <= WARMUP:
        refuse(f"--steps {args.steps}: the first {WARMUP} steps are warm-up, pass more")
    commands = list(itertools.takewhile(is_row, words))
    args.flags = words[len(commands) :]
    args.shared = parse_flags(args.flags)
    rows = [row_of(command) for command in commands]
    if args.climb is not None:
        rows = rows_of_climb(args.climb, args.shared.device) + rows
    if rows:
        args.reference = rows[0].name
    else:
        rows = rows_of_ladder(args.shared.device)
        args.reference = ladder.STAGES[0].short  # `plain`, which is above it on a CPU, is none of the twelve
    args.rows = all_rows(rows)
    args.stages = [row for row in rows if row.takes_flags]
    if args.stages:
        args.flags += flags_of_batch(args)
    else:
        refuse_flags_of_stages(args.flags)
    return args


def new_parser_of_bench():
    """Return the parser of the bench's own flags."""
    parser = Parser(__doc__, usage='bench.py [STAGE | SCRIPT.py | "COMMAND"] ... [flags]')
    add = parser.add_argument
    add("--rounds", type=positive, metavar="N", help=f"how often every row is started ({ROUNDS})")
    add("--steps", type=positive, metavar="N", help=f"most steps of a row in a round, {WARMUP} of them warm-up")
    add("--out", metavar="NAME", help="name of the files in results/ (date and time)")
    add("--climb", metavar="COMMAND", help="rows that add a technique each to a script of your own")
    add("--predict", action="store_true", help="only say what each stage should bring here")
    add("--render", metavar="NAME", help="draw results/NAME.md again, and run nothing")
    return parser


def is_row(word):
    """Tell whether a word of the command line is a row, and no flag."""
    return not word.startswith("-") or word.startswith("-m ")


def parse_flags(flags):
    """Return flags as a stage parses them. Exits with one line where one is wrong, or of no use in a bench."""
    _, unknown = new_parser(None).parse_known_args(flags)
    if unknown:
        refuse(f"{unknown[0]} is no flag of a stage: {ORDER}")
    args = parse(None, flags, machine.free_memory_by_a_child)
    if args.save:
        refuse("--save is for a stage that you start by hand")
    return args


def flags_of_batch(args):
    """Return the flag by which all stages take the batch that fits the one that needs most of a card.

    There is none where a batch was asked for, and on a CPU. Exits with one line where the flags of a row are wrong.
    """
    own_flags = {tuple(row.flags) for row in args.stages}
    parsed = [parse_flags([*args.flags, *flags]) for flags in own_flags]
    chosen = [flags for flags in parsed if "batch_size" in flags.fallbacks]
    if not chosen:
        return []
    smallest = min(chosen, key=lambda flags: flags.batch_size)
    tell(f"batch_size: {smallest.fallbacks['batch_size']}")
    return ["--batch-size", str(smallest.batch_size)]


def refuse_flags_of_stages(flags):
    """Exit with one line where flags for stages were passed, though no row is a stage."""
    for flag in flags:
        if flag.startswith("--") and flag.split("=")[0] not in FLAGS_FOR_SCRIPTS:
            refuse(f"{flag} is for stages, and no row is one: {ORDER}")


def name_of_text(args):
    """Load the text once, before any stage starts, and return its name. Where its download failed, add a flag.

    It is None without a stage. Exits with one line where the text is too short for a sequence, or can't be read.
    """
    if not args.stages:
        return None
    try:
        corpus = load_tokens(args.shared.data)
        TokenLoader(corpus, 1, args.shared.seq_len)
    except TextError as error:
        refuse(error)
    if corpus.source != args.shared.data:
        args.flags += ["--data", corpus.source]
    return corpus.name


# A run


def run(args, argv):
    """Run a new bench, and return its Results. Where it is interrupted, show what was measured so far."""
    name = args.out or datetime.now().strftime("%Y-%m-%d-%H%M%S")
    path = ROOT / "results" / f"{name}.jsonl"
    with open_new(path) as file:
        if not all(row.takes_flags for row in args.rows):
            tell("where a script writes files, put {row} into a flag: each row has another number")
        tell(f"all steps go to results/{path.name}; after a kill `python bench.py --render {path.stem}` draws them")
        results = Results(new_bench(args, argv), file)
        try:
            measure(results, path)
        except KeyboardInterrupt:
            tell("interrupted; what was measured:")
            show(results, path)
            raise
    return results


def new_bench(args, argv):
    """Return the line of a record that begins a bench, a dict: see log.py."""
    device = args.shared.device
    steps = args.steps or WARMUP + MOST_COUNTED_STEPS
    return {
        "kind": "bench",
        "reference": args.reference,
        "warmup": WARMUP,
        "steps": steps,
        "seconds": ENOUGH_SECONDS,
        "rounds": args.rounds or ROUNDS,
        "turns": min(ENOUGH_STEPS, steps - WARMUP) if device.type == "cpu" else 0,
        "rows": [asdict(row) for row in args.rows],
        "seed": args.shared.seed,
        "flags": ["--steps", str(steps), *args.flags],
        "variables": machine.variables_of(device) | (CPU_MEMORY if device.type == "cpu" else {}),
        "text": args.text,
        "environment": machine.environment(device),
        "commit": machine.commit(ROOT),
        "command": shlex.join(["python", "bench.py", *argv]),
    }


def open_new(path):
    """Return the file of a new record. Exits with one line where it or its page is there, or it can't be written."""
    try:
        if path.with_suffix(".md").exists():
            refuse(f"results/{path.stem}.md is there already: pass another --out")
        return open(path, "x", encoding="utf-8")
    except OSError as error:
        refuse(f"results/{path.name}: {error.strerror}; pass another --out, or mend the folder")


def exit_status(results):
    """Return 1 where a row of the table failed for another reason than memory, else 0."""
    errors = [results.error(row) for row in results.table_rows]
    return 1 if any(error and not error["out_of_memory"] for error in errors) else 0


def render(name):
    """Draw a page again. Exits with one line where its record can't be drawn."""
    path = ROOT / "results" / f"{name.removesuffix('.jsonl').removesuffix('.md')}.jsonl"
    try:
        show(Results.load(path), path)
    except OSError as error:
        refuse(f"results/{path.name}: {error.strerror}; pass the NAME of a bench that ran")
    except Exception as error:  # what an older record lacks may be missed anywhere
        refuse(f"results/{path.name} is no record of this version of the bench ({type(error).__name__}: {error})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
