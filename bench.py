"""Runs stages and scripts, each in a process of its own, and writes a table of how much faster each is on this machine.

    python bench.py                                                    the twelve stages
    python bench.py s10 "my/train.py --batch_size=8"                   one stage, and a script of your own
    python bench.py my/train.py "+bf16 my/train.py"                    your script, without and with autocast
    python bench.py --climb "my/train.py --batch_size=8"               your script, with one more technique in each row
    python bench.py "s11 --batch-size 16" "s11 --batch-size 64"        one stage with other flags
    python bench.py s12 "torchrun --standalone --nproc_per_node=2 s12" one process and two

A row is a command: a stage or a script, its flags after it, and a launcher, if it has one, before it. The script is the
first word that names a stage or ends in .py, or the module after -m. So write a flag of a launcher as --log-dir=s05,
and not as --log-dir s05. +tf32, +bf16, +fp16, +compile and +fused add a technique to a script from outside. +fp16 adds
no GradScaler, so it is for the speed alone. A script runs in the current folder. If that is in this repository and the
script is not, the script runs in its own folder. If it writes files, put {row} into their names, for example
--out=out-{row}: it becomes a different number in each process.

Flags after the rows go to all stages: python stages/s01_baseline.py --help lists them. --seed seeds scripts, too. A
script chooses its device by itself, so --device cpu hides all cards from it, and --device cuda:1 all other cards.
Each row is compared with the row above and with the first. Table and verdict go to results/NAME.md, a picture to
results/NAME.svg, and each step, as it is measured, to results/NAME.jsonl.

Rows run in three rounds of fresh processes. On a CPU all rows of a round are alive at once, and start two at a time.
After 4 steps of warm-up each, they take 7 turns, in reverse order every other time. A turn is one step, or several
steps if they are short. Rows run one after the other on a card, if memory can't hold all of them, or if one loads its
data in workers. Then each runs until it has counted 7 steps or more that took six seconds, or has taken --steps.
"""

import argparse
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "stages"))

from harness import ROOT, meters, ranks
from harness.bench import rounds
from harness.bench.results import Results
from harness.bench.rows import CPU_MEMORY, all_rows, check_row, row_of, rows_of_climb, rows_of_ladder
from harness.common import AFFINITY, refuse, set_up_output, tell
from harness.flags import Parser, positive, seed
from harness.steps import STEPS_OF_ROW, STEPS_OF_ROW_ON_CPU, TURNS, WARMUP, WARMUP_OF_PLAIN


def main(argv):
    """Measure, or draw what was measured. Return the exit status.

    It is 1 if a row failed for any reason but memory, 128 + N if signal N ended the bench, and 0 otherwise.
    """
    set_up_output()
    if AFFINITY:
        os.sched_setaffinity(0, AFFINITY)  # all rows inherit it, and importing torch may have changed it
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, signal.SIGINT)  # Windows has no SIGHUP
        if signal.getsignal(number) != signal.SIG_IGN:  # it is ignored under nohup
            signal.signal(number, interrupt)
    try:
        task = parse_command(argv)
        if task.options.render:
            render(task.options.render)
            return 0
        return exit_status(run(task, argv))
    except KeyboardInterrupt as interrupted:
        return 128 + interrupted.args[0]


def interrupt(signal_number, frame):
    """End the bench, as Ctrl-C does."""
    raise KeyboardInterrupt(signal_number)


# The command line


@dataclass
class Task:
    """What the command line asks for."""

    options: argparse.Namespace  # the bench's own flags; climb is a Row, or None
    rows: list  # Rows of the commands
    stage_flags: list  # what stands after the rows; it is not parsed yet
    has_stages: bool  # whether any row takes these flags


def parse_command(argv):
    """Return the Task of a command line. Exits with one line and status 2 if it is wrong."""
    parser = new_parser()
    options, words = parser.parse_known_args(argv)
    if options.render and (words or options != parser.parse_args([f"--render={options.render}"])):
        refuse("--render draws the page of a bench that ran, and takes nothing else")
    if options.steps and options.steps <= WARMUP + 1:
        refuse(f"--steps {options.steps}: {WARMUP} are warm-up, and one may be profiled: pass {WARMUP + 2} or more")
    rows = [row_of(command) for command in itertools.takewhile(is_row, words)]
    flags = words[len(rows) :]
    own_rows = [*rows, options.climb] if options.climb else rows
    for row in own_rows:
        check_row(row)
    has_stages = not own_rows or any(row.takes_flags for row in own_rows)  # without rows the ladder runs
    if not has_stages:
        refuse_flags_of_stages(flags)
    return Task(options, rows, flags, has_stages)


def new_parser():
    """Return the parser of the bench's own flags."""
    parser = Parser(__doc__, usage='bench.py [STAGE | SCRIPT.py | "COMMAND"] ... [flags]')
    add = parser.add_argument
    add("--rounds", type=positive, metavar="N", help=f"how many times each row is started ({rounds.ROUNDS})")
    steps_help = f"most steps of a row in a round ({STEPS_OF_ROW}; {STEPS_OF_ROW_ON_CPU} on a CPU, more if short)"
    add("--steps", type=positive, metavar="N", help=steps_help)
    add("--seed", type=seed, default=1337, metavar="S", help="seed of all rows (%(default)s)")
    add("--out", type=record_name, metavar="NAME", help="name of the files in results/ (date and time)")
    add("--climb", type=row_of, metavar="COMMAND", help="rows that each add a technique to a script of your own")
    add("--render", type=record_name, metavar="NAME", help="draw results/NAME.md again, and run nothing")
    return parser


def record_name(text):
    """Return NAME for NAME, NAME.jsonl or NAME.md. Raises argparse.ArgumentTypeError if it is no name of a bench."""
    name = text.removesuffix(".jsonl").removesuffix(".md")
    if name.strip(".") == "" or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r}: pass a name, since all pages are in results/")
    return name


def is_row(word):
    """Return whether a word of the command line is a row, and not a flag."""
    return not word.startswith("-") or word.startswith("-m ")


def refuse_flags_of_stages(flags):
    """Exit with one line if flags for stages were passed, though no row is a stage."""
    for flag in flags:
        if flag.startswith("--") and flag.split("=")[0] != "--device":
            refuse(f"no row takes {flag}, since none is a stage: put a script and its own flags into quotes")


# A run


def run(task, argv):
    """Run a new bench, and return its Results. If it is interrupted, show what was measured so far."""
    if os.name == "nt":
        refuse("on Windows the bench runs only in WSL2")
    ranks.check_ranks()
    ranks.drop_ranks_if_alone()
    if ranks.world_size() > 1:
        refuse("start bench.py once: torchrun belongs before a row, in its quotes")
    name = task.options.out or datetime.now().strftime("%Y-%m-%d-%H%M%S")
    path = ROOT / "results" / f"{name}.jsonl"
    check_out(path)
    bench = new_bench(task, probe(task), argv)
    check_out(path)  # once more, since another bench may have begun
    with open(path, "x", encoding="utf-8") as file:
        command = shlex.join(["python", "bench.py", "--render", path.stem])
        tell(f"all steps go to results/{path.name}; if the bench is killed, {command} makes the page")
        results = Results(bench, file)
        if "{row}" not in bench["command"] and not all(row.takes_flags for row in results.rows.values()):
            tell("if your script writes files, put {row} into their names, for example --out=out-{row}")
        try:
            rounds.measure(results, path)
        except KeyboardInterrupt:
            tell("interrupted; what was measured:")
            rounds.show(results, path)
            raise
    return results


def check_out(path):
    """Exit with one line if a file of a bench can't be written, or if its record or its page is already there."""
    try:
        path.parent.mkdir(exist_ok=True)
        for file in (path, path.with_suffix(".md"), path.with_suffix(f".svg.{os.getpid()}.unfinished")):
            file.touch(exist_ok=False)
            file.unlink()  # it is written later
    except OSError as error:
        refuse(f"results/{path.stem}: {error.strerror}: pass another --out, or make results/ writable")


def probe(task):
    """Return what the probe found out about the machine, a dict: see probe.py. If it fails, the bench ends, too."""
    command = [sys.executable, str(ROOT / "stages" / "harness" / "bench" / "probe.py")]
    if task.has_stages:
        command.append("--has-stages")
    command += ["--seed", str(task.options.seed), *task.stage_flags]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    if ended.returncode < 0:
        refuse(f"the probe of the machine was killed by signal {-ended.returncode}")
    if ended.returncode:
        raise SystemExit(ended.returncode)
    return json.loads(ended.stdout)


def new_bench(task, probed, argv):
    """Return the first line of a bench's record, a dict: see results.py. probed: what the probe wrote."""
    device = probed["environment"]["device"]
    rows = task.rows
    if task.options.climb:
        rows = rows_of_climb(task.options.climb, probed) + rows
    elif not rows:
        rows = rows_of_ladder(device, probed["rates"]["peak"])
    limits = limits_of_rows(task.options.steps, device)
    flags_of_bench = ["--steps", str(limits["steps"]), "--seed", str(task.options.seed)]
    return {
        "kind": "bench",
        "rows": [asdict(row) for row in all_rows(rows)],
        "rounds": task.options.rounds or rounds.ROUNDS,
        **limits,
        "seed": task.options.seed,
        "flags": [*flags_of_bench, *task.stage_flags, *probed["flags"]],
        "variables": variables_of(device, probed["card"]),
        "started": datetime.now().isoformat(timespec="seconds"),
        "environment": probed["environment"],
        "rates": probed["rates"],
        "text": probed["text"],
        "commit": meters.commit(ROOT),
        "command": shlex.join(["python", "bench.py", *argv]),
    }


def limits_of_rows(steps, device):
    """Return how many steps a row takes in a round, as part of the first line of a record, a dict: see results.py.

    steps: of --steps; None takes the numbers of steps.py.
    """
    if device == "cpu":
        steps = steps or STEPS_OF_ROW_ON_CPU
        warmup_of_plain = max(WARMUP, min(WARMUP_OF_PLAIN, steps - TURNS))
        turns = steps - warmup_of_plain
    else:
        steps = steps or STEPS_OF_ROW
        warmup_of_plain = WARMUP
        turns = 0
    last = min(steps - 1, WARMUP + TURNS) - 1  # every row takes this step: on a card one later step may be profiled
    return {"warmup": WARMUP, "warmup_of_plain": warmup_of_plain, "steps": steps, "turns": turns, "loss_step": last}


def variables_of(device, card):
    """Return the environment variables of all rows, a dict. They hide cards, since a script chooses its own device.

    On a CPU all cards are hidden, and the memory variables are set. On a card all other cards are hidden. If it is the
    first one, none is, since a script takes the first card anyway. device: "cpu", "cuda" or "mps". card: its number.
    """
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""} | CPU_MEMORY
    if not card:  # None, or the first one
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[card] if visible else str(card)}


def exit_status(results):
    """Return 1 if a row failed for another reason than memory, else 0."""
    errors = [results.error(row) for row in results.rows.values()]
    return 1 if any(error and not error["out_of_memory"] for error in errors) else 0


def render(name):
    """Draw a page again. Exits with one line if its record can't be drawn."""
    path = ROOT / "results" / f"{name}.jsonl"
    try:
        rounds.draw(Results.load(path), path)
    except FileNotFoundError as error:
        refuse(f"results/{path.name}: {error.strerror}; pass the NAME of a bench that ran")
    except OSError as error:
        refuse(f"results/{name}: {error.strerror}")
    except Exception as error:  # of any kind, since an older record may lack anything
        refuse(f"results/{path.name} is not a record of this version of the bench ({type(error).__name__}: {error})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
