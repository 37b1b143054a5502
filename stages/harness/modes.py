"""The questions that the bench answers, an object each: the worth of each technique, dtypes, batches, processes."""

import math
import sys
from dataclasses import replace

import torch

from data import refuse

from . import ladder, machine, page, schedule
from .record import figures_of
from .results import NO_DIFFERENCE
from .workers import Row

PROBE = ladder.FOLDER / "harness" / "probe.py"
PLAIN = "plain"  # the row of s01 without the variables that the bench sets on a CPU
PEAK = "peak"  # the row of the probe
ONE_RANK = "1 rank"  # the row that the efficiency of several is measured by
# On a CPU, glibc returns the pages of a freed tensor, and Linux clears those of the next one. With these variables,
# glibc keeps them, as PyTorch does on a GPU, and the pages are larger: see stages/memory.md. `plain` is s01 without.
CPU_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "THP_MEM_ALLOC_ENABLE": "1"}
# the speed-up over float32 above which a 16-bit type earns each recommendation, the best one first
GRADES = ((1.5, "excellent: switch it on"), (1.2, "significant: switch it on"), (1.05, "modest"), (0.95, "negligible"))


class Mode:
    """What the modes share: rows that are compared with one another, in turn on a CPU and in rounds elsewhere.

    name: its word on the command line. title: of its page. own_flag: the flag of bench.py, as argparse names it, that
    this mode alone takes. sets_flag: the flag of the stages that its rows set themselves.
    """

    own_flag = None
    sets_flag = None

    def check(self, args):
        """Exit with one line where the command line can't answer the question."""

    def rounds(self, on_cpu):
        """Return how many times each process starts afresh by default: one round on a GPU would have no ±."""
        return 1 if on_cpu else 3

    def run(self, bench, on_cpu):
        """Measure what is missing."""
        if on_cpu:
            schedule.in_turn(bench)
        else:
            schedule.in_rounds(bench)

    def is_complete(self, results):
        """Tell whether every row has all that was asked for."""
        return all(results.is_finished(row) for row in results.table_rows + results.control_rows)

    def note(self, results, row):
        """Return the mode's own words on a row."""
        return ""

    def method(self, results):
        """Return a sentence on how the runs were led."""
        bench = results.bench
        steps = f"{bench['steps']} steps, of which {bench['warmup']} are warm-up"
        if results.pairs_turns:
            return f"All processes are alive at once and take one step each in turn: {steps}."
        how = f"One after the other, each in a fresh process: {steps}"
        if bench["enough"]:
            enough_steps, seconds = bench["enough"]
            how += f"; a row ends once it has {enough_steps} counted steps and {seconds:g} s of them"
        rounds = "1 round" if bench["rounds"] == 1 else f"{bench['rounds']} rounds, there and back"
        return f"{how}. {rounds}."

    def page(self, results):
        """Return the whole of results/NAME.md."""
        short = page.markdown(self.short_rows(results, page.STAGES))
        full = page.markdown(self.full_rows(results))
        return page.page(results, self.title, [short, page.chart(results), full], self.method(results))


class Ladder(Mode):
    """What each stage is worth, beside the one above it."""

    name = "ladder"
    title = "The ladder"

    def stages(self, args):
        """Return the Stages that run where the command line names none."""
        if args.stage.device.type == "mps":  # gloo and nccl do not know it
            return [stage for stage in ladder.STAGES if not stage.takes_ranks]
        return list(ladder.STAGES)

    def rows(self, args):
        """Return (rows, name of the row that all are compared with). The rows are Rows, the probe first."""
        rows = []
        if args.plain:
            rows.append(Row(PLAIN, ladder.path_of(ladder.NAMES[0]), f"s01 without {', '.join(CPU_MEMORY)}"))
        for path in args.scripts:
            base = rows[-1].name if rows else None
            rows.append(Row(path.stem, path, change_of(path), base=base, env=memory_variables(args)))
        reference = rows[1] if args.plain and len(rows) > 1 else rows[0]
        return [probe(args), *with_control(rows)], reference.name

    def short_rows(self, results, folder=None):
        """Return the short table. folder: the way to the stages, for links; None for a terminal."""
        return page.short_rows(results, folder)

    def full_rows(self, results):
        """Return the full table."""
        return page.full_rows(results, self.note, vs_previous=True)


class Variants(Mode):
    """Variants of one stage, all compared with the first."""

    def stage_that_runs(self, args):
        """Return the name of the script. Exits with one line where there are several."""
        if len(args.scripts) > 1:
            refuse(f"{self.name} compares variants of one stage: pass one")
        return args.scripts[0].stem

    def short_rows(self, results, folder=None):
        return page.short_rows_of_variants(results, self.note)

    def full_rows(self, results):
        return page.full_rows(results, self.note, vs_previous=False)


class Amp(Variants):
    """One stage in float32, in bfloat16 and in float16 with loss scaling."""

    name = "amp"
    title = "float32, bfloat16 and float16"
    sets_flag = "--amp-dtype"

    def stages(self, args):
        return [ladder.find("s03_bf16")]

    def check(self, args):
        stage = self.stage_that_runs(args)
        if not ladder.heeds(stage, "amp_dtype"):
            refuse(f"amp compares the dtypes of autocast, and {stage} has none: pass s03 or a later stage")

    def rows(self, args):
        path = args.scripts[0]
        rows = []
        # with_control() runs the middle one twice: not float16, which most CPUs emulate
        for dtype in ("float32", "bfloat16", "float16"):
            base = rows[0].name if rows else None
            flags = ("--amp-dtype", dtype)
            rows.append(Row(dtype, path, " ".join(flags), base=base, flags=flags, env=memory_variables(args)))
        return [probe(args), *with_control(rows)], rows[0].name

    def note(self, results, row):
        """Return what a 16-bit type is worth, by its measured speed-up over float32."""
        compared = results.compare(row, results.reference)
        if compared is None:
            return ""
        words = grade(compared.value)
        if results.verdict(row, results.reference) == NO_DIFFERENCE:
            words = "negligible"
        ours, theirs = row.figures["memory"], results.reference.figures["memory"]
        if ours and theirs:
            direction = "less" if ours <= theirs else "more"
            words += f", {100 * abs(1 - ours / theirs):.0f} % {direction} memory"
        return words


class Scale(Variants):
    """The stage for several processes on 1, 2, 4, ... of them, which divide the same micro-batches."""

    name = "scale"
    title = "One process and several"
    own_flag = "ranks"

    def stages(self, args):
        return [stage for stage in ladder.STAGES if stage.takes_ranks]

    def check(self, args):
        stage = ladder.find(self.stage_that_runs(args))
        if stage and not stage.takes_ranks:
            refuse(f"{stage.name} is for one process: pass s12, or none")
        if args.stage.device.type == "mps":
            refuse("gloo and nccl do not know mps: pass --device cpu")
        if args.ranks and args.ranks > devices_of(args):
            refuse(f"--ranks {args.ranks}: this machine has {devices_of(args)} for them, pass at most that")

    def rows(self, args):
        """Return (rows, name of the reference). On a CPU it is a process with all the cores that the ranks share."""
        path = args.scripts[0]
        most = args.ranks or devices_of(args)
        if args.on_cpu and args.ranks is None:
            most = min(2, most)
        sizes = sizes_up_to(most)
        flags = ("--accum", str(math.lcm(args.stage.accum, *sizes)))
        first = Row("1 process", path, "all cores", flags=flags, env=memory_variables(args))
        rows = [first] if args.on_cpu else []
        for size in sizes:
            name = ONE_RANK if size == 1 else f"{size} ranks"
            base = rows[0].name if rows else None
            row = Row(name, path, base=base, ranks=size, flags=flags, env=memory_variables(args))
            if args.on_cpu:  # as many threads for a single rank as for each of several
                cores = max(1, devices_of(args) // most)
                env = row.env | {"OMP_NUM_THREADS": str(cores)}
                row = replace(row, change=f"cores for each: {cores}", env=env)
            rows.append(row)
        return with_control(rows), rows[0].name

    def note(self, results, row):
        """Return what several ranks reach of so many times the speed of one."""
        if row.ranks < 2:
            return ""
        compared = results.compare(row, results.rows[ONE_RANK])
        if compared is None:
            return ""
        return f"efficiency {100 * compared.value / row.ranks:.0f} % of {row.ranks} times one rank"


class Limit(Mode):
    """The largest batch that fits."""

    name = "limit"
    title = "The largest batch"
    own_flag = "memory_budget"
    sets_flag = "--batch-size"

    def stages(self, args):
        return [ladder.find("s05_flash"), ladder.find("s11_accum")]

    def check(self, args):
        if args.rounds:
            refuse("limit tries each batch once: leave --rounds out")
        if args.on_cpu and not sys.platform.startswith("linux"):
            refuse("limit needs an accelerator, or Linux, which can limit a process")
        if args.memory_budget is not None and not args.on_cpu:
            refuse("--memory-budget is for a CPU: a card is its own limit")
        if args.memory_budget is not None and not 0 < args.memory_budget < 1e5:
            refuse(f"--memory-budget {args.memory_budget:g}: pass a number of GB above 0")

    def rounds(self, on_cpu):
        return 1

    def rows(self, args):
        budget = None
        if args.on_cpu:
            gigabytes = args.memory_budget or machine.free_memory() / 2e9
            budget = round(1e9 * gigabytes)
        rows = [Row(path.stem, path, change_of(path), memory_budget=budget) for path in args.scripts]
        return rows, rows[0].name

    def run(self, bench, on_cpu):
        for row in bench.rows:
            schedule.find_limit(bench, row)

    def is_complete(self, results):
        return all(row.limit_is_found for row in results.table_rows)

    def short_rows(self, results, folder=None):
        rows = []
        for row in results.table_rows:
            cells = {"stage": page.linked(row, folder, row.short), "largest batch": str(row.largest_batch or "none")}
            cells |= {"tok/sec": page.NOTHING, "GB": page.NOTHING, "stopped by": what_stopped(row)}
            if row.largest_batch:
                figures = figures_of(row.run(0, row.largest_batch).steps, row.warmup)
                cells["tok/sec"] = f"{figures['tok_per_sec']:,.0f}"
                cells["GB"] = page.gigabytes(figures["memory"])
            rows.append(cells)
        return rows

    def method(self, results):
        budget = results.bench["memory_budget"]
        limit = f" A process may hold {budget / 1e9:.1f} GB." if budget else ""
        return f"A fresh process for each batch, so B is that of the first.{limit}"

    def page(self, results):
        table = page.markdown(self.short_rows(results, page.STAGES))
        return page.page(results, self.title, [table], self.method(results))


MODES = {mode.name: mode for mode in (Ladder(), Amp(), Limit(), Scale())}


def change_of(path):
    """Return the words for a row: what a stage changes, or the name of a script of the reader's own."""
    stage = ladder.find(path.stem)
    return stage.change if stage else path.name


def memory_variables(args):
    """Return the variables of the environment that the bench sets for its rows."""
    return CPU_MEMORY if args.on_cpu else {}


def probe(args):
    """Return the Row of the probe."""
    return Row(PEAK, PROBE, is_probe=True, env=memory_variables(args))


def with_control(rows):
    """Return the rows, and behind the one in the middle a second run of it: the A/A control."""
    middle = len(rows) // 2
    row = rows[middle]
    control = replace(row, name=f"{row.name} again", base=None, control_of=row.name)
    together = list(rows)
    together.insert(middle + 1, control)
    return together


def grade(speedup):
    """Return the first of GRADES that a speed-up earns."""
    for least, words in GRADES:
        if speedup > least:
            return words
    return "slower: leave it off"


def devices_of(args):
    """Return how many ranks the machine has room for: one for each card, or for each core of a CPU."""
    if args.on_cpu:
        return machine.cores()
    return torch.get_device_module(args.stage.device).device_count()


def sizes_up_to(most):
    """Return 1, 2, 4, ... and the most."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size *= 2
    return [*sizes, most]


def what_stopped(row):
    """Return why a row's largest batch is the largest, or why none is known."""
    if row.limit_is_found:
        return f"B {row.smallest_too_large}: {row.run(0, row.smallest_too_large).error}"
    for run in row.runs:
        if run.error and not run.out_of_memory:
            return f"failed: {run.error}"
    return "not finished"
