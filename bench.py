"""Runs the stages in processes of their own and writes a table of what each is worth on this machine.

    python bench.py                    all twelve
    python bench.py s05 s11            these, by number or name
    python bench.py amp                float32, float16 with loss scaling and bfloat16, side by side
    python bench.py limit s05 s11      the largest batch that fits
    python bench.py scale              s12 on 1, 2, ... processes

Every flag of a stage can be given and goes to all of them. The table goes to stdout and to results/NAME.md, the records
to results/NAME.jsonl. On a CPU all processes live at once and take one step each in turn; on a GPU they run one after
the other, and the whole is done again in rounds.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import data
from data import InputError, write_whole
from measure import questions, table
from measure.figures import TWIN, Results
from measure.processes import Session, free_memory
from stages import harness, machine
from stages.record import read_record

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
STAGES = sorted(path.stem for path in (ROOT / "stages").glob("s[0-9][0-9]_*.py"))


def parse(argv):
    """The command line, checked, every default filled in for the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("what", nargs="*", metavar="STAGE", help="stages, or one of the questions amp, limit and scale (all stages)")
    add("--rounds", type=int, metavar="N", help="times that every process is started afresh (3; 1 on a CPU)")
    add("--out", metavar="NAME", help="of the files in results/ (the date and the device)")
    add("--resume", metavar="NAME", help="go on with a bench that was interrupted")
    add("--render", metavar="NAME", help="draw results/NAME.md again from its records, and run nothing")
    add("--readme", action="store_true", help="put the table between README.md's markers, too")
    add("--timeout", type=float, default=600, metavar="S", help="stop a stage with no step for so long (%(default)s s)")
    add("--batches", type=int, metavar="N", help="for amp: the same as --steps")
    add(
        "--memory-budget",
        type=float,
        metavar="GB",
        help="for limit on a CPU: what a run may hold (half of what is free)",
    )
    add("--ranks", type=int, metavar="N", help="for scale: up to so many processes (all devices; 2 on a CPU)")
    harness.add_flags(parser)
    args = parser.parse_args(argv)
    try:
        if args.record or args.save or args.lockstep:
            raise InputError("--record, --save and --lockstep are for a single stage: python stages/s01_baseline.py")
        args.given = [f for f in ("amp_dtype", "compile") if getattr(args, f) is not None]
        args.steps = args.steps if args.batches is None else args.batches
        args.stage = ""
        harness.resolve(args)
        cpu = args.device.type == "cpu"
        args.rounds = args.rounds if args.rounds is not None else 1 if cpu else 3
        for flag in ("rounds", "timeout", "memory_budget", "ranks"):
            if getattr(args, flag) is not None and getattr(args, flag) <= 0:
                raise InputError(f"--{flag.replace('_', '-')} must be more than 0, got {getattr(args, flag)}")
        for name in (args.out, args.resume, args.render):
            if name is not None and not re.fullmatch(r"[\w][\w.+-]*", name):
                raise InputError(f"{name!r} is no name for a file in results/: pass letters, digits, '.', '-' and '_'")
        args.question = args.what.pop(0) if args.what and args.what[0] in questions.QUESTIONS else "ladder"
        args.stages = [stage_named(word) for word in args.what] or questions.QUESTIONS.get(args.question, STAGES)
        args.stages = sorted(set(args.stages))
    except InputError as error:
        parser.error(str(error))
    return args


def stage_named(word):
    """The stage that s05, 5, 05 or s05_flash names. Raises InputError."""
    match = re.fullmatch(r"s?(\d{1,2})", word)
    found = [s for s in STAGES if s == word or (match and int(s[1:3]) == int(match[1]))]
    if not found:
        raise InputError(f"{word} is no stage: pass s01 to s12, or one of {', '.join(questions.QUESTIONS)}")
    return found[0]


def stage_flags(args):
    """The flags that every process gets: those given, and the defaults made explicit."""
    flags = ["--device", str(args.device)]
    for name in ("batch_size", "seq_len", "size", "seed", "accum"):
        flags += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if args.data:
        flags += ["--data", str(Path(args.data).resolve())]
    if "amp_dtype" in args.given:
        flags += ["--amp-dtype", str(args.amp_dtype).removeprefix("torch.")]
    if "compile" in args.given:
        flags += ["--compile" if args.compile else "--no-compile"]
    return flags


def say(line, brief=False):
    """Tell on stderr where the bench is; a brief line takes the place of the last where that is a terminal."""
    if sys.stderr.isatty():
        end = "" if brief else "\n"
        line = line[: shutil.get_terminal_size().columns - 1]  # what wraps can't be overwritten
        print(f"\r\033[K{line}", end=end, file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


def settings_of(args, contenders):
    """The bench's own line in the results: what makes two benches the same."""
    cpu = args.device.type == "cpu"
    return dict(
        kind="bench",
        question=args.question,
        names=[c.name for c in contenders],
        lockstep=cpu,
        rounds=args.rounds,
        steps=args.steps,
        flags=stage_flags(args),
        varies=questions.VARIES.get(args.question, []),
        what={c.name: " ".join(c.flags) for c in contenders if c.flags},
        command=shlex.join(["python", "bench.py", *sys.argv[1:]]),
        environment=machine.environment(args.device),
    )


def free_name(args):
    """results/NAME for a new bench, never one that is there."""
    wanted = args.out
    if wanted is None:
        device = re.sub(r"\W+", "-", re.sub(r"\(\w+\)", "", machine.device_name(args.device))).strip("-").lower()
        wanted = f"{date.today()}-{device}" + ("" if args.question == "ladder" else f"-{args.question}")
    names = [wanted] if args.out else [wanted] + [f"{wanted}-{i}" for i in range(2, 1000)]
    for name in names:
        if not any((RESULTS / f"{name}{end}").exists() for end in (".md", ".jsonl", ".parts")):
            return name
    raise InputError(
        f"results/{wanted} is there already: pass another --out, or --resume {wanted}, or --render {wanted}"
    )


def resumed(name, settings):
    """The folder of an interrupted bench, if it was made with the same settings on the same machine."""
    parts = RESULTS / f"{name}.parts"
    if not (parts / "bench.json").exists():
        raise InputError(f"results/{name} has nothing to resume: it is complete, or was never begun")
    before = json.loads((parts / "bench.json").read_text())
    old, new = ({**s, **s["environment"]} for s in (before, settings))
    for key in sorted(new.keys() - {"command", "environment"}):
        if old.get(key) != new[key]:
            raise InputError(f"--resume {name}: {key} was {old.get(key)} and is {new[key]}; start a new bench")
    return parts


def run(args, rows, parts):
    """Take every row through its rounds, leaving a record each in `parts`; goes on from the records that are there."""
    if args.question == "limit":
        for row in rows:
            questions.find_limit(args, row.name, parts, stage_flags(args), say)
        return
    twin = rows[len(rows) // 2]
    extras = questions.extras(args, rows)
    everyone = [rows[0], *extras, *rows[1:]]
    everyone.insert(everyone.index(twin) + 1, replace(twin, name=twin.name + TWIN))  # apart by what neighbours are
    failed, before = set(), None
    while True:
        results = Results.read(parts)
        wanted = args.steps * args.rounds if results.lockstep else args.rounds
        missing = {c.name: wanted - rounds_done(results, c.name) for c in everyone if c not in extras}
        todo = [c for c in everyone if missing.get(c.name, 0) > 0 and c.name not in failed]
        if not todo:
            return
        if before == (todo, sum(missing[c.name] for c in todo)):
            say("no memory for a second process beside the first: try a smaller --batch-size")
            return
        before = todo, sum(missing[c.name] for c in todo)
        steps = min(args.steps, max(missing.values())) if results.lockstep else args.steps
        # what all others are compared with is in every session; extras that have figures leave the room to others
        always = [c for c in (rows[0], *(c for c in extras if not results.steps(c.name))) if c.name not in failed]
        todo = [*always, *(c for c in todo if c not in always)]
        todo += [c for c in extras if c not in todo and c.name not in failed]
        number = 1 + max((session for session, _ in results.records), default=-1)
        names = [row.name for row in rows]
        session = Session(parts, number, stage_flags(args), steps, args.timeout, say, names)
        if results.lockstep:
            session.in_lockstep(todo, lambda n, live=session.live: room_for(n, live))
        else:
            session.one_by_one(todo)
        failed |= session.failures.keys()


def rounds_done(results, name):
    """How many rounds a contender has behind it; one less than it took where the last of them was interrupted."""
    done = len(results.seconds_per_token(name))
    end = results.end(name)
    return done - 1 if done and (end is None or "error" in end) else done


def room_for(n, live):
    """Whether memory allows n more processes: for each, one and a half times what one of these has held at most."""
    free = free_memory()
    steps = [step for process in live if process.steps for step in read_record(process.record)[1]]
    return free is None or free > n * 1.5 * max((step.get("memory") or 0 for step in steps), default=0)


def show(args, name, results):
    """Print the table, write the files, and say how the bench ended: the exit status."""
    mixed = results.mixed()
    if mixed:
        raise InputError(f"results/{name} mixes runs that can't be compared: {mixed}")
    print(questions.body(results))
    write_whole(RESULTS / f"{name}.jsonl", results.text().encode())
    write_whole(RESULTS / f"{name}.md", questions.page(results).encode())
    print(f"written to results/{name}.md and results/{name}.jsonl", file=sys.stderr)
    if args.readme:
        readme = ROOT / "README.md"
        text = table.between_markers(readme.read_bytes().decode(), questions.body(results, "stages/"))
        write_whole(readme, text.encode())
    return 0 if questions.complete(results) else 1


def main():
    args = parse(sys.argv[1:])
    try:
        if args.readme:  # markers that are not there are told before all else
            table.between_markers((ROOT / "README.md").read_bytes().decode(), "")
        if args.render:
            places = [RESULTS / f"{args.render}.parts", RESULTS / f"{args.render}.jsonl"]
            place = next((place for place in places if place.exists()), None)
            if place is None:
                raise InputError(f"results/{args.render}.jsonl is not there: pass the NAME of a bench that ran")
            try:
                results = Results.read(place)
            except (ValueError, LookupError, TypeError) as error:
                raise InputError(f"{place} is no record of a bench ({error})") from None
            return show(args, args.render, results)
        return bench(args)
    except KeyboardInterrupt:  # before the first process, or after the last
        print("bench.py: interrupted", file=sys.stderr)
        return 130
    except InputError as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"bench.py: error: {where}{error.strerror or error}", file=sys.stderr)
        return 2


def bench(args):
    """Run what was asked; the exit status."""
    contenders = questions.contenders(args)
    settings = settings_of(args, contenders)
    name = args.resume or free_name(args)
    parts = resumed(name, settings) if args.resume else RESULTS / f"{name}.parts"
    tokens = data.load_tokens(args.data)  # fetched and tokenized once, for all processes
    data.TokenLoader(tokens, args.batch_size, args.seq_len)
    if data.offline:
        os.environ["LADDER_OFFLINE"] = "1"
    if not args.resume:
        parts.mkdir(parents=True)
        write_whole(parts / "bench.json", json.dumps(settings).encode())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(args, contenders, parts)
    except KeyboardInterrupt:
        say("interrupted")
        show(args, name, Results.read(parts))
        print(f"go on with: python bench.py --resume {name} {shlex.join(sys.argv[1:])}", file=sys.stderr)
        return 130
    status = show(args, name, Results.read(parts))
    shutil.rmtree(parts)
    return status


if __name__ == "__main__":
    sys.exit(main())
