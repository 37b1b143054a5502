"""Runs the stages in processes of their own and writes a table of what each is worth on this machine.

    python bench.py                    all stages
    python bench.py s05 s11            these, by number or name
    python bench.py amp                float32, float16 with loss scaling and bfloat16, side by side
    python bench.py limit s05 s11      the largest batch that fits
    python bench.py scale              s12 on 1, 2, ... processes
    python bench.py loss               held-out loss of s06 to s08 after the same tokens, at three learning rates
    python bench.py loss s09 --lr 3e-4 6e-4      the same of s09, at these rates
    python bench.py memory s10         with and without what the harness does for memory on a CPU

Every flag of a stage can be given and goes to all of them. A script of your own in stages/ can be a row, too: pass
its path, such as stages/mine.py. The table goes to stdout and to results/NAME.md, each step to results/NAME.jsonl as it
is measured. On a CPU all processes are alive at once and take one step each in turn; on a GPU they run one after the
other, in several rounds, each with enough steps to count three seconds. The row `plain`, the first on a CPU, is s01 in
a process whose memory the harness leaves alone. The mode loss, which times nothing, trains on a CPU as many runs side
by side as there are cores.
"""

import argparse
import ctypes.util
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "stages"))

from harness import arithmetic, ladder, machine, memory, page
from harness.flags import Parser, add_flags, learning_rate, positive, resolve
from harness.leader import Row, Session, Trainings, say, silence, single_step
from harness.log import let_signals_interrupt
from harness.results import (
    ALL_REDUCE,
    CONTROL,
    LEARNING_RATE,
    MODES,
    PEAK,
    WARMUP,
    Results,
    ResultsError,
    name_at_rate,
    rate_text,
)

import torch

import data
from data import InputError, write_whole

PROBE = "harness/probe"
FILE_NAME = r"[\w][\w.+-]*"  # what --out, --resume and --render may name in results/
SCRIPT_NAME = r"[\w-]{1,50}"  # of a user's script in stages/, without ".py"
LOSS_RATES = (1.5e-4, 6e-4, 2.4e-3)  # of the mode `loss`, where none is given
PASSES = 2  # over the corpus, in the mode `loss`: more would compare how stages overfit
LIMIT_STEPS = 3  # counted steps of the longer run that decides what fits

COUNTED_STEPS = 20  # of a process, by default
# A card's clock needs seconds to settle, so that on an accelerator the counted steps of a process fill this time.
COUNTED_SECONDS = 3
SPEED_MODES = ("ladder", "amp", "scale")  # of those that an accelerator has
# A small model has FLOPs for microseconds, and its steps take milliseconds to launch their kernels.
MOST_COUNTED_STEPS = 1000
PROBE_STEPS = 20  # counted ones of a probe that runs by itself: each already lasts as long as a clock needs

# what glibc and PyTorch read from outside, in place of the harness's two settings
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
# The row `plain`: neither the harness's settings nor these variables. A user may have set them, and the bench, which
# imports the harness, has set the last one itself.
PLAIN = {"LADDER_PLAIN": "1"} | dict.fromkeys([*KEEP_FREED_MEMORY, *HUGE_PAGES])
# The rows of the mode `memory` have no variable but their own: None leaves out what a user has set.
NO_VARIABLES = dict.fromkeys(memory.VARIABLES)
HARNESS_SETTINGS = NO_VARIABLES  # the harness then makes its two settings, as in every stage
NO_SETTINGS = NO_VARIABLES | {"LADDER_PLAIN": "1"}
# other allocators that PyTorch's launcher for CPUs preloads (torch/backends/xeon/run_cpu.py): the libraries that may
# hold them, and the variables it sets for them
ALLOCATORS = {
    "tcmalloc": (["tcmalloc", "tcmalloc_minimal"], {}),
    "jemalloc": (["jemalloc"], {"MALLOC_CONF": "oversize_threshold:1,background_thread:true,metadata_thp:auto"}),
}


def new_parser():
    """The parser of the bench's flags and of those that go to the stages."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add(
        "what",
        nargs="*",
        metavar="STAGE",
        help="stages, or one of the modes amp, limit, scale, loss, memory (all stages)",
    )
    add("--rounds", type=positive, metavar="N", help="times that every process starts afresh (5; 1 on a CPU)")
    add("--out", metavar="NAME", help="of the files in results/ (date, time and mode)")
    add(
        "--resume",
        metavar="NAME",
        help="continue a bench that was interrupted, with the flags it had; rates of --lr are added to its own",
    )
    add("--render", metavar="NAME", help="draw results/NAME.md again from its records, and run nothing")
    add("--readme", action="store_true", help="put the table between README.md's markers, too")
    add("--timeout", type=positive, default=600, metavar="S", help="seconds that a step may take (%(default)s)")
    add("--memory-budget", type=float, metavar="GB", help="for limit on a CPU: what a run may hold (half of the free)")
    add("--seeds", type=positive, metavar="N", help="for loss: runs of each stage at each rate (5; 2 on a CPU)")
    add("--ranks", type=positive, metavar="N", help="for scale: up to so many processes (all devices; 2 on a CPU)")
    rates = " ".join(rate_text(rate) for rate in LOSS_RATES)
    add(
        "--lr",
        type=learning_rate,
        nargs="+",
        metavar="RATE",
        help=f"learning rate, the highest one where it decays; several for loss ({rate_text(LEARNING_RATE)}; {rates})",
    )
    add_flags(parser, rate=False)
    return parser


def parse(argv):
    """The command line, a namespace, checked and with every default filled in for the device.

    It gains mode, stages (names), plain (whether the row of that name runs), interleaved (whether all processes are
    alive at once), given (names of the flags that were given) and argv. A wrong flag ends the process with one line and
    exit status 2.
    """
    parser = new_parser()
    args = parser.parse_args(argv)
    args.argv = argv
    args.mode = "ladder"
    if args.what and args.what[0] in MODES:
        args.mode = args.what.pop(0)
    try:
        check_names(args)
        args.plain = args.mode == "ladder" and ladder.PLAIN in args.what
        no_stage_named = not args.what
        if args.plain:
            args.what = [word for word in args.what if word != ladder.PLAIN]
        args.stages = stages_named(args.what)
        if no_stage_named:
            args.stages = ladder.of_mode(args.mode) or ladder.names()
        args.given = {name for name, value in vars(args).items() if value is not None}
        if args.device is None and not args.render:
            machine.refuse_unusable_card()
        resolve(args)
        args.interleaved = args.device.type == "cpu"
        if no_stage_named and args.mode == "ladder":
            args.plain = args.interleaved
        fill_in_defaults(args)
        check_mode(args)
    except InputError as error:
        parser.error(str(error))
    return args


def parse_resume(argv):
    """(name, --timeout in seconds or None, rates to add) of a command line with --resume, which takes no other flag."""
    parser = Parser(allow_abbrev=False)
    parser.add_argument("--resume", required=True)
    parser.add_argument("--timeout", type=positive)
    parser.add_argument("--lr", type=learning_rate, nargs="+", default=[])
    args, others = parser.parse_known_args(argv)
    if others:
        remedy = "pass no other than --timeout, and --lr for rates to add"
        parser.error(f"--resume {args.resume} continues with the flags of before: {remedy}")
    if not re.fullmatch(FILE_NAME, args.resume):
        parser.error(wrong_name(args.resume))
    return args.resume, args.timeout, args.lr


def stages_named(words):
    """The names of the stages that these words stand for, in ladder order, and below them those of a user's scripts.

    A stage is s05, 5, 05, s05_flash or stages/s05_flash.py, a user's script the path of a file in stages/. Raises
    InputError.
    """
    names = []
    for word in words:
        name = stage_of_word(word) or own_script(word)
        if name not in names:
            names.append(name)
    stages = [name for name in ladder.names() if name in names]
    own_scripts = [name for name in names if name not in stages]
    return stages + own_scripts


def stage_of_word(word):
    """The name of the stage that a word stands for, or None."""
    for stage in ladder.STAGES:
        number = int(stage.short[1:])
        if word in (stage.name, stage.short, f"s{number}", f"{number:02d}", f"{number}"):
            return stage.name
    return None


def own_script(word):
    """The name, without ".py", of the script in stages/ that a word is the path of. Raises InputError."""
    path = Path(word)
    if path.suffix != ".py" or not path.is_file():
        last = ladder.STAGES[-1].short
        raise InputError(
            f"{word} is no stage: pass s01 to {last}, the path of a script in stages/, or one of {', '.join(MODES)}"
        )
    if path.resolve().parent != ROOT / "stages":
        raise InputError(f"{word} is not in stages/, where a script finds the harness: copy it there")
    name = path.stem
    if not re.fullmatch(SCRIPT_NAME, name) or name in (PEAK, ladder.PLAIN):
        raise InputError(f"{word} can't name a row: call it by other letters, digits, '-' and '_'")
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{word} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from None
    return name


def wrong_name(name):
    """What is said of a name that --out, --resume or --render can't take."""
    return f"{name!r} is no name for a file in results/: pass letters, digits, '.', '-' and '_'"


def check_names(args):
    """Raise InputError where a flag is not for the bench, or names no file in results/."""
    if args.record or args.save or args.worker or args.eval or args.profile:
        raise InputError("--record, --save, --eval and --profile are for a single stage: stages/s05_flash.py")
    for name in (args.out, args.render):
        if name is not None and not re.fullmatch(FILE_NAME, name):
            raise InputError(wrong_name(name))
    if args.readme and args.mode != "ladder":
        raise InputError(f"README.md shows the ladder: leave --readme or {args.mode} out")


def fill_in_defaults(args):
    """Fill in what a bench has other defaults for than a stage.

    On an accelerator the steps of most modes stay None until the bench begins: see default_steps().
    """
    defaults = {"steps": WARMUP + COUNTED_STEPS, "rounds": 1 if args.interleaved else 5, "lr": [LEARNING_RATE]}
    if args.mode in SPEED_MODES and not args.interleaved:
        defaults["steps"] = None
    if args.mode == "loss":
        if "rounds" in args.given:
            raise InputError("loss trains each stage once for each seed: pass --seeds instead of --rounds")
        defaults = {"steps": None, "seeds": 5, "accum": 1, "lr": list(LOSS_RATES)}
        if args.interleaved:  # on a CPU, what two cores do in 20 minutes
            defaults |= {"steps": 80, "seeds": 2, "batch_size": 2, "seq_len": 256}
    for name, value in defaults.items():
        if name not in args.given:
            setattr(args, name, value)
    args.lr.sort()  # the order of the table's columns
    if args.mode == "loss":
        args.rounds = args.seeds


def check_mode(args):
    """Raise InputError where the flags can't answer the mode's question."""
    if args.steps is not None and args.steps <= WARMUP:
        raise InputError(f"--steps {args.steps}: the first {WARMUP} steps are warm-up, pass more")
    if args.memory_budget is not None and not args.memory_budget > 0:
        raise InputError(f"--memory-budget {args.memory_budget} holds nothing: pass more")
    if args.mode == "amp":
        if len(args.stages) > 1 or not ladder.is_used("amp_dtype", args.stages[0]):
            first = ladder.first_with("amp_dtype").short
            raise InputError(f"amp compares dtypes in one stage from {first} on: pass one, such as s10")
        if "amp_dtype" in args.given:
            raise InputError("amp runs every dtype: leave --amp-dtype out")
    if memory.is_plain():
        raise InputError("LADDER_PLAIN is set, and the bench has a row for that: unset it")
    if (args.plain or args.mode == "memory") and not args.interleaved:
        what = ladder.PLAIN if args.plain else "memory"
        raise InputError(f"{what} is about the memory of a CPU, and this is {args.device.type}: pass --device cpu")
    if args.mode == "memory" and len(args.stages) > 1:
        raise InputError("memory compares settings in one stage: pass one, such as s10")
    if args.mode == "scale" and args.stages != ladder.of_mode("scale"):
        raise InputError("scale compares numbers of processes in s12, which alone knows several: name no other stage")
    if len(args.lr) > 1:
        if args.mode != "loss":
            raise InputError("--lr takes several rates in the mode loss alone: pass one")
        if len({rate_text(rate) for rate in args.lr}) < len(args.lr):
            rates = " ".join(rate_text(rate) for rate in args.lr)
            raise InputError(f"--lr {rates} names a rate twice: name each once")
    if args.mode == "loss" and args.accum > 1:
        raise InputError("loss compares stages after the same tokens, which --accum multiplies: leave it out")


def rows_of(args):
    """(rows, probes) of a bench, two lists of Rows.

    Raises InputError for ranks that this machine lacks, and for an --accum that does not divide over them. In the mode
    `scale` the default of args.accum is raised to a number that does.
    """
    if args.mode == "amp":
        script = script_of(args.stages[0])
        dtypes = ("float32", "float16", "bfloat16")
        return [Row(dtype, script, flags=("--amp-dtype", dtype)) for dtype in dtypes], [Row(PEAK, script_of(PROBE))]
    if args.mode == "scale":
        return rows_of_scale(args)
    if args.mode == "memory":
        return rows_of_memory(args), [Row(PEAK, script_of(PROBE))]
    if args.mode == "loss":
        return rows_of_loss(args), []
    rows = [Row(name, script_of(name), ladder.change(name)) for name in args.stages]
    if args.plain:
        first = ladder.names()[0]
        rows.insert(0, Row(ladder.PLAIN, script_of(first), ladder.PLAIN_CHANGE, env=PLAIN))
    if args.mode == "ladder":
        return rows, [Row(PEAK, script_of(PROBE))]
    return rows, []


def rows_of_loss(args):
    """The Rows of the mode `loss`: each stage, at each rate where there are several.

    On a CPU the runs share the cores, a thread each where there are as many runs as cores.
    """
    env = {}
    if args.interleaved:
        runs = len(args.stages) * len(args.lr) * args.seeds
        env["OMP_NUM_THREADS"] = str(max(1, machine.cores() // runs))
    rows = []
    for stage in args.stages:
        for rate in args.lr:
            name = stage if len(args.lr) == 1 else name_at_rate(stage, rate)
            flags = ("--lr", repr(rate), "--eval")
            rows.append(Row(name, script_of(stage), ladder.change(stage), flags, env=env))
    return rows


def script_of(name):
    """The path of a script in stages/."""
    return ROOT / "stages" / f"{name}.py"


def rows_of_memory(args):
    """The Rows of the mode `memory`: one stage under several memory settings."""
    script = script_of(args.stages[0])
    rows = [
        Row(ladder.PLAIN, script, "as without the harness", env=NO_SETTINGS),
        Row("freed memory kept", script, "by mallopt", env=HARNESS_SETTINGS | {"THP_MEM_ALLOC_ENABLE": "0"}),
        Row("huge pages", script, "by THP_MEM_ALLOC_ENABLE=1", env=NO_SETTINGS | HUGE_PAGES),
        Row("both", script, "what the harness does", env=HARNESS_SETTINGS),
        Row("both from outside", script, "three variables", env=NO_SETTINGS | KEEP_FREED_MEMORY | HUGE_PAGES),
    ]
    for name, (libraries, variables) in ALLOCATORS.items():
        found = [ctypes.util.find_library(library) for library in libraries]
        paths = [path for path in found if path]
        if paths:
            env = NO_SETTINGS | {"LD_PRELOAD": paths[0]} | variables
            rows.append(Row(name, script, f"LD_PRELOAD={paths[0]}", env=env))
        else:
            say(f"{name} is not installed, so it has no row")
    return rows


def rows_of_scale(args):
    """(rows, probes) of the mode `scale`: s12 on 1, 2, 4, ... processes and on all, and an all-reduce for each.

    The same number of micro-batches, --accum, is divided over the processes of each row, so it must suit them all.
    """
    if args.interleaved:
        devices, kind = machine.cores(), "cores"
        most = args.ranks or min(2, devices)
    else:
        devices, kind = torch.get_device_module(args.device).device_count(), "devices"
        most = args.ranks or devices
    if most > devices:
        raise InputError(f"--ranks {most}: this machine has {devices} {kind}, so pass at most {devices}")
    sizes = world_sizes(most)
    multiple = math.lcm(*sizes)
    if args.accum % multiple:
        if "accum" in args.given:
            raise InputError(f"--accum {args.accum} does not divide over {sizes} ranks: pass a multiple of {multiple}")
        args.accum = multiple * max(1, round(args.accum / multiple))
    env = {}
    if args.interleaved:
        env["OMP_NUM_THREADS"] = str(max(1, devices // most))  # as many for a single rank, which is compared with
    rows, probes = [], []
    for size in sizes:
        name = "1 rank" if size == 1 else f"{size} ranks"
        rows.append(Row(name, script_of(args.stages[0]), ranks=size, env=env))
        if size > 1:
            probes.append(Row(ALL_REDUCE + name, script_of(PROBE), ranks=size, env=env))
    return rows, probes


def world_sizes(most):
    """1, 2, 4, ... and the most."""
    sizes = []
    size = 1
    while size < most:
        sizes.append(size)
        size *= 2
    return [*sizes, most]


def shared_flags(args):
    """The flags that every process gets: those given, and the defaults made explicit."""
    device = str(args.device)
    if args.mode == "scale":
        device = args.device.type  # each rank takes a device of its own
    flags = ["--device", device, "--steps", str(args.steps)]
    for name in ("batch_size", "seq_len", "size", "seed", "accum"):
        flags += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if args.mode != "loss":  # where each row has a rate of its own
        flags += ["--lr", repr(args.lr[0])]
    if args.data:
        flags += ["--data", str(Path(args.data).resolve())]
    if "amp_dtype" in args.given:
        flags += ["--amp-dtype", str(args.amp_dtype).removeprefix("torch.")]
    if "compile" in args.given:
        flags.append("--compile" if args.compile else "--no-compile")
    return flags


def default_steps(args, tokens):
    """How many steps each process takes, where that depends on the corpus or on the device's speed."""
    if args.mode == "loss":
        return steps_of_loss(args, tokens)
    return WARMUP + counted_steps_of_speed(args)


def counted_steps_of_speed(args):
    """How many counted steps each process takes on an accelerator, by the matmul peak that it is asked for now.

    A process of its own measures the peak and ends: the bench may open no context on a card, which other processes
    could then be locked out of. All rows get the same number, since some set a schedule by it.
    """
    flags = ["--device", str(args.device), "--steps", "1"]  # without --amp-dtype: its own 16-bit type is the fastest
    probe, failure = single_step(Row(PEAK, script_of(PROBE)), flags, args.timeout)
    if failure:
        say(f"{WARMUP + COUNTED_STEPS} steps: the device's matmul peak can't be measured: {failure.message}")
        return COUNTED_STEPS
    rate = max(probe["peak"].values())
    seconds = least_step_seconds(args, rate)
    counted = max(COUNTED_STEPS, math.ceil(COUNTED_SECONDS / seconds))
    counted = min(counted, MOST_COUNTED_STEPS)
    say(
        f"{WARMUP + counted} steps: at the device's matmul peak, {rate / 1e12:.1f} TFLOP/s, a step takes "
        f"{1e3 * seconds:.1f} ms or more, and the {counted} after the warm-up {counted * seconds:.1f} s or more"
    )
    return counted


def least_step_seconds(args, rate):
    """The seconds that a step takes at least: the FLOPs of one micro-batch at so many FLOP/s, a rate of matmuls.

    Attention is counted in full, of which a flash kernel leaves out half, 7 % of a step of gpt2. No step comes as near
    to the peak of matmuls as that.
    """
    tokens = args.batch_size * args.seq_len
    return tokens * arithmetic.flops_per_token(args.shape, args.seq_len) / rate


def steps_of_loss(args, tokens):
    """How many steps a run of the mode `loss` takes by default: 600, and at most two passes over the corpus."""
    return max(WARMUP + 1, min(600, PASSES * len(tokens) // (args.batch_size * args.seq_len)))


def memory_budget(args):
    """The bytes that a run of the mode `limit` may hold; None in other modes, and on a GPU, which has its own limit."""
    if args.mode != "limit" or not args.interleaved:
        return None
    if args.memory_budget is not None:
        return 1e9 * args.memory_budget
    return machine.free_memory() / 2


def first_line(args, rows, tokens):
    """The bench's own line in the records: all that must be the same where it continues."""
    line = {
        "kind": "bench",
        "mode": args.mode,
        "change": {row.name: row.change for row in rows},
        "interleaved": args.interleaved,
        "warmup": WARMUP,
        "steps": args.steps,
        "rounds": args.rounds,
        "flags": shared_flags(args),
        "corpus": tokens.corpus,
        "tokenizer": tokens.tokenizer,
        "corpus_tokens": len(tokens),
        "ids": hashlib.sha256(tokens).hexdigest(),
        "sources": sources(args),
        "environment": machine.environment(args.device),
        "memory_budget": memory_budget(args),
        "command": shlex.join(["python", "bench.py", *args.argv]),
    }
    if args.mode == "loss":
        line["rates"] = args.lr
    return line


def sources(args):
    """{file or stage: sha256} of all code that decides what runs and what is measured. page.py only draws."""
    stages = list(args.stages)
    if args.plain:
        stages.append(ladder.names()[0])
    paths = [ROOT / "bench.py", ROOT / "model.py", ROOT / "data.py"]
    for path in sorted((ROOT / "stages" / "harness").glob("*.py")):
        if path.name != "page.py":
            paths.append(path)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    return hashes | {stage: ladder.code_sha256(stage) for stage in stages}


class Bench:
    """A bench that runs: its flags, its rows and probes (lists of Rows), and the path of its records."""

    def __init__(self, args, path, rows, probes):
        self.args = args
        self.path = path
        self.rows = rows
        self.probes = probes
        self.counted_steps = args.steps - WARMUP

    def results(self):
        """What the records hold by now."""
        return Results(self.path)

    def lead(self, number, rows, steps, sessions_after=0, budget=None):
        """Lead one session of rows through so many counted steps; the names of those that failed."""
        flags = shared_flags(self.args)
        session = Session(self.path, number, flags, self.args.timeout, budget, sessions_after)
        return session.lead(rows, steps)

    def run(self):
        """Measure what is not in the records yet."""
        if self.args.mode == "limit":
            self.find_limits()
        elif self.args.mode == "loss":
            self.compare_losses()
        else:
            self.compare_speeds()

    def compare_speeds(self):
        """Lead sessions until every row has its counted steps; those that are in the records count.

        The A/A control, a second run of the row in the middle, is a row among the others.
        """
        middle = len(self.rows) // 2
        control = replace(self.rows[middle], name=self.rows[middle].name + CONTROL)
        everyone = list(self.rows)
        everyone.insert(middle + 1, control)
        failed = set()
        needed_before = None
        while True:
            results = self.results()
            able = [row for row in everyone if row.name not in failed]
            needed = {row.name: self.steps_needed(results, row.name) for row in able}
            if needed_before is None:  # what failed at its very end, before a --resume, is measured again
                for row in able:
                    if results.error(row.name):
                        needed[row.name] = self.counted_steps
            waiting = [row for row in able if needed[row.name] > 0]
            if not waiting:
                return
            if needed == needed_before:
                say("no memory for another process beside the first ones: try a smaller --batch-size")
                return
            needed_before = needed
            steps = min(self.counted_steps, max(needed.values()))
            failed |= self.lead_round(results, self.with_neighbors(results, able, waiting), failed, steps)

    def steps_needed(self, results, name):
        """How many counted steps a row lacks."""
        return max(0, results.counted_wanted - len(results.counted_steps(name)))

    def with_neighbors(self, results, able, waiting):
        """The waiting rows, the bases, and each row that the table compares with a waiting one, in the table's order.

        A ratio needs rounds that both rows have. So a row that is measured later takes the row above, the row below and
        its control along.
        """
        compared = [(row.name, results.row_above(row.name)) for row in self.rows]
        compared += [(row.name, row.name + CONTROL) for row in self.rows]
        late = {row.name for row in waiting}
        wanted = late | set(results.bases())
        for pair in compared:
            if late & set(pair):
                wanted |= set(pair)
        return [row for row in able if row.name in wanted]

    def lead_round(self, results, rows, failed, steps):
        """Lead the rows and the probes once, in one session or one by one; the names of those that failed."""
        number = 1 + max((session for session, _ in results.runs), default=-1)
        probes = [probe for probe in self.probes if probe.name not in failed]
        if self.args.interleaved:  # the first one warms up alone, and shows what one holds
            return self.lead(number, rows[:1] + probes + rows[1:], steps)
        order = list(rows)
        if number % 2:
            order.reverse()  # there and back, so that a drift hits the first and the last alike
        order = probes + order  # the probes warm the card up
        now_failed = set()
        for i, row in enumerate(order):
            steps_of_row = min(steps, PROBE_STEPS) if row in probes else steps
            now_failed |= self.lead(number, [row], steps_of_row, sessions_after=len(order) - i - 1)
        return now_failed

    def compare_losses(self):
        """Train every row once for each seed, in a fresh process; runs that have a held-out loss are not repeated.

        All rows of the first seed come first, so that the records of an interrupted bench can be compared.
        """
        runs = self.results().runs
        waiting = []
        for seed in range(self.args.seeds):
            for row in self.rows:
                run = runs.get((seed, row.name))
                if run is None or run.error or run.summary is None:
                    flags = (*row.flags, "--seed", str(self.args.seed + seed))
                    waiting.append((seed, replace(row, flags=flags)))
        at_once = machine.cores() if self.args.interleaved else 1
        Trainings(self.path, shared_flags(self.args), self.args.timeout, self.args.steps, at_once).lead(waiting)

    def find_limits(self):
        """Double the batch of each row until it no longer fits, and bisect: a fresh process for each batch."""
        for row in self.rows:
            fits, too_large = 0, 1
            while self.fits(row, too_large):
                fits, too_large = too_large, 2 * too_large
            while too_large - fits > 1:
                middle = (fits + too_large) // 2
                if self.fits(row, middle):
                    fits = middle
                else:
                    too_large = middle
            longer = min(LIMIT_STEPS, self.counted_steps)
            while fits and not self.fits(row, fits, steps=longer):
                fits -= 1  # a longer run holds a little more

    def fits(self, row, batch_size, steps=0):
        """Whether a row runs with this batch size, by the records or by a run of the warm-up and so many steps."""
        tried = replace(row, name=f"{row.name} B{batch_size}", flags=("--batch-size", str(batch_size)))
        session = 1 if steps else 0
        run = self.results().runs.get((session, tried.name))
        if run is None or not run.ended:
            self.lead(session, [tried], steps, budget=self.results().bench["memory_budget"])
            run = self.results().runs[session, tried.name]
        say(f"{tried.name}: {run.error['error'] if run.error else 'fits'}")
        return run.error is None


def records_path(name):
    """Where a bench of this name keeps its records."""
    return ROOT / "results" / f"{name}.jsonl"


def locked(path, mode):
    """The records' file, opened and held against a second bench until this process ends. Raises InputError."""
    file = open(path, mode)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise InputError(f"results/{path.name} is being written by another bench: wait for it, or stop it") from None
    return file


def start_new(args):
    """(Bench, its locked file) with its own line in new records. Raises InputError where the name is taken."""
    path = records_path(args.out or f"{datetime.now():%Y-%m-%d-%H%M%S}-{args.mode}")
    refuse_taken(path)
    tokens = corpus_of(args)
    rows, probes = rows_of(args)
    if args.steps is None:
        args.steps = default_steps(args, tokens)
    line = json.dumps(first_line(args, rows, tokens)) + "\n"
    path.parent.mkdir(exist_ok=True)
    try:
        lock = locked(path, "xb")
    except FileExistsError:  # by a bench that was started at the same time
        refuse_taken(path)
        raise
    try:
        lock.write(line.encode())
        lock.flush()
    except OSError:
        path.unlink()
        raise
    return Bench(args, path, rows, probes), lock


def refuse_taken(path):
    """Raise InputError where the records or the page of this name are there."""
    for taken in (path, path.with_suffix(".md")):
        if taken.exists():
            other = f"--resume {path.stem} or --render {path.stem}"
            raise InputError(f"results/{taken.name} is there already: pass another --out, {other}")


def corpus_of(args):
    """The tokens to train on, downloaded and tokenized once, for all processes. Raises InputError if they are few."""
    tokens = data.load_tokens(args.data)
    data.TokenLoader(tokens, args.batch_size, args.seq_len)
    if data.offline:
        os.environ["LADDER_OFFLINE"] = "1"
    return tokens


def continue_old(name, timeout, more_rates):
    """(Bench, its locked file) of one that was interrupted. Raises InputError where anything that runs has changed.

    timeout: seconds in place of those of before, or None. more_rates: learning rates that the bench had not.
    """
    path = existing(name)
    lock = locked(path, "r+b")
    before = Results(path).bench
    argv = shlex.split(before["command"])[2:]
    old, now = as_before(argv, before, path)
    refuse_changes(name, before, now)
    drop_unfinished_line(path)
    if more_rates:
        old, now = as_before(with_rates(name, before, argv, more_rates), before, path)
        replace_first_line(path, now)
        lock.close()
        lock = locked(path, "r+b")  # the file is another one now
    if timeout is not None:
        old.args.timeout = timeout
    return old, lock


def as_before(argv, before, path):
    """(Bench, its own line) of a command line whose runs are added to the records at a path.

    before: the line that these begin with.
    """
    args = parse(argv)
    tokens = corpus_of(args)
    if args.steps is None:
        args.steps = before["steps"]  # by the corpus, or by the peak of then
    rows, probes = rows_of(args)
    line = first_line(args, rows, tokens)
    if args.memory_budget is None:
        line["memory_budget"] = before.get("memory_budget")  # half of what was free then
    return Bench(args, path, rows, probes), line


def with_rates(name, before, argv, more_rates):
    """A bench's command line with more rates after its --lr. Raises InputError where it had fewer than two."""
    rates = before.get("rates", [])
    if len(rates) < 2:
        raise InputError(f"--resume {name}: rates can be added to a bench of several rates alone: start a new bench")
    more = [rate_text(rate) for rate in more_rates]
    if "--lr" not in argv:  # it had those of the default
        return [*argv, "--lr", *(rate_text(rate) for rate in rates), *more]
    place = argv.index("--lr") + 1
    return argv[:place] + more + argv[place:]


def replace_first_line(path, line):
    """Put another line, a dict, in the place of the bench's own in its records."""
    _, others = path.read_bytes().split(b"\n", 1)
    write_whole(path, json.dumps(line).encode() + b"\n" + others)


def refuse_changes(name, before, now):
    """Raise InputError that names the first difference between the bench's line of before and that of now."""
    old = {**before, **before.get("sources", {}), **before["environment"]}
    new = {**now, **now["sources"], **now["environment"]}
    for key in sorted(new.keys() - {"sources", "environment"}):
        if old.get(key) != new[key]:
            raise InputError(f"--resume {name}: {key} was {old.get(key)} and is {new[key]}; start a new bench")


def drop_unfinished_line(path):
    """Cut off what a kill left of the records' last line, in place, since the file is locked."""
    text = path.read_bytes()
    if not text.endswith(b"\n"):
        os.truncate(path, text.rfind(b"\n") + 1)


def existing(name):
    """The path of a bench's records. Raises InputError where there are none of this name."""
    path = records_path(name)
    if not path.exists():
        raise InputError(f"results/{path.name} is not there: pass the NAME of a bench that ran")
    return path


def show(path, readme):
    """Write the page and README's part, print the page, and return the exit status: 0 where every row is complete."""
    results = Results(path)
    drawn = page.page(results)
    write_whole(path.with_suffix(".md"), drawn.encode())
    if readme:
        part = page.readme_part(results, path.stem)
        write_whole(ROOT / "README.md", page.between_markers(read_readme(), part).encode())
    say(f"written to results/{path.stem}.md, the records to results/{path.name}")
    try:
        print(drawn, flush=True)
    except OSError as error:  # the page is safe in its file
        say(f"the page can't be printed: {error.strerror}")
        silence(sys.stdout)
    return 0 if results.is_complete() else 1


def read_readme():
    """README.md's text with its line ends as they are. Raises InputError where it is not UTF-8."""
    try:
        return (ROOT / "README.md").read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"README.md is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from None


def bench(argv):
    """Run, continue or draw what was asked; the exit status."""
    if any(word == "--resume" or word.startswith("--resume=") for word in argv):
        running, lock = continue_old(*parse_resume(argv))
    else:
        args = parse(argv)
        if args.readme:  # markers that are missing are reported before anything runs
            page.between_markers(read_readme(), "")
        if args.render:
            return show(existing(args.render), args.readme)
        running, lock = start_new(args)
    let_signals_interrupt()
    with lock:
        try:
            running.run()
        except KeyboardInterrupt:
            say(f"interrupted; continue with: python bench.py --resume {running.path.stem}")
            show(running.path, readme=False)
            return 130
        except OSError:  # a full disk, or a limit of this shell
            say(f"stopped; when this is mended, continue with: python bench.py --resume {running.path.stem}")
            raise
        return show(running.path, running.args.readme)  # as it was asked for before an interrupt


def main():
    """The command line. What a user got wrong is one line and exit status 2, Ctrl-C one line and 130."""
    try:
        return bench(sys.argv[1:])
    except (InputError, ResultsError) as error:
        message = str(error)
    except OSError as error:
        message = error.strerror or str(error)
        if error.filename:
            message = f"{error.filename}: {message}"
    except KeyboardInterrupt:  # before the first process, or after the last
        print("bench.py: interrupted", file=sys.stderr)
        return 130
    print(f"bench.py: error: {page.one_line(message)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
