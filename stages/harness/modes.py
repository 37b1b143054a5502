"""The rows of each mode of the bench, and how they are led: in turn, in rounds, seed by seed, batch by batch."""

import functools
import json
import math
import time
from dataclasses import replace

import torch

from data import refuse

from . import ladder, machine
from .flags import rate_text
from .leader import Enough, Row, lead, say
from .records import COUNTED_STEPS, WARMUP
from .results import ALL_REDUCE, PEAK, PLAIN, Results

PROBE = ladder.FOLDER / "harness" / "probe.py"
# On a CPU, glibc returns the pages of a freed tensor, and Linux clears those of the next one. With these variables,
# glibc keeps them, as PyTorch does on a GPU, and the pages are larger: see stages/memory.md. `plain` is s01 without.
CPU_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "THP_MEM_ALLOC_ENABLE": "1"}

# An accelerator's clock needs seconds to settle. Steps of all rows are planned by one number, since some set a schedule
# by it, but a row takes no more of them once it has enough.
MOST_COUNTED_STEPS = 160
ENOUGH = Enough(COUNTED_STEPS, seconds=6.0)
LIMIT_STEPS = 3  # counted steps that decide whether a batch fits


def rows_of(args):
    """Return (rows, probes) of a bench, two lists of Rows."""
    env = CPU_MEMORY if args.on_cpu else {}
    rows = [Row(path.stem, path, ladder.change(path), env=env) for path in args.scripts]
    if args.mode == "amp":
        return rows_of_amp(rows[0]), [Row(PEAK, PROBE, env=env)]
    if args.mode == "scale":
        return rows_of_scale(args, rows[0])
    if args.mode == "loss":
        return rows_of_loss(args, rows), []
    if args.mode == "limit":
        return rows, []
    if args.plain:
        first = ladder.path_of(ladder.NAMES[0])
        rows.insert(0, Row(PLAIN, first, f"s01 without {', '.join(CPU_MEMORY)}"))
    return rows, [Row(PEAK, PROBE, env=env)]


def rows_of_amp(row):
    """Return the Rows of the mode `amp`: a stage in three dtypes."""
    dtypes = ("float32", "float16", "bfloat16")
    return [replace(row, name=dtype, flags=("--amp-dtype", dtype)) for dtype in dtypes]


def rows_of_loss(args, rows):
    """Return the Rows of the mode `loss`: each stage at each rate. On a CPU, runs at the same time share the cores."""
    env = {}
    if args.on_cpu:
        env = {"OMP_NUM_THREADS": str(max(1, machine.cores() // (len(rows) * len(args.lr))))}
    rated = []
    for row in rows:
        for rate in args.lr:
            name = f"{row.name} lr {rate_text(rate)}"
            rated.append(replace(row, name=name, flags=("--lr", rate_text(rate), "--eval"), env=row.env | env))
    return rated


def rows_of_scale(args, row):
    """Return (rows, probes) of the mode `scale`: a stage on 1, 2, 4, ... processes, and an all-reduce for each.

    All divide the same micro-batches.
    """
    if args.on_cpu:
        devices = machine.cores()
        most = args.ranks or min(2, devices)
    else:
        devices = torch.get_device_module(args.stage.device).device_count()
        most = args.ranks or devices
    if most > devices:
        refuse(f"--ranks {most}: this machine has {devices} for them, pass at most that")
    sizes = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    accum = math.lcm(args.stage.accum, *sizes)
    env = row.env
    if args.on_cpu:  # as many threads for a single rank, which is compared with
        env = row.env | {"OMP_NUM_THREADS": str(max(1, devices // most))}
    rows, probes = [], []
    for size in sizes:
        name = "1 rank" if size == 1 else f"{size} ranks"
        rows.append(replace(row, name=name, ranks=size, flags=("--accum", str(accum)), env=env))
        if size > 1:
            probes.append(replace(rows[-1], name=ALL_REDUCE + name, script=PROBE))
    return rows, probes


class Bench:
    """A bench that runs: its flags, its rows, probes and A/A control, and the path of its records."""

    def __init__(self, args, path):
        self.args = args
        self.path = path
        self.rows, self.probes = rows_of(args)
        self.base_of_control = self.control = None
        if args.mode in ("ladder", "amp", "scale"):
            self.base_of_control = self.rows[len(self.rows) // 2]
            self.control = replace(self.base_of_control, name=f"{self.base_of_control.name} again")
        self.counted_steps = args.steps - WARMUP

    def run(self):
        """Measure what is not in the records yet."""
        if self.args.mode == "limit":
            for row in self.rows:
                self.find_limit(row)
        elif self.args.mode == "loss":
            self.compare_losses()
        elif self.args.on_cpu:
            self.compare_in_turn()
        else:
            self.compare_in_rounds()

    def lead_session(self, session, rows, steps, **options):
        """Lead one session of rows, and return how many of them started; what they write goes to the records."""
        return lead(rows, self.args.stage_flags, functools.partial(self.keep, session), steps, **options)

    def keep(self, session, name, entry):
        """Append a worker's line to the records."""
        if self.args.mode == "loss" and entry["kind"] == "step":
            return  # hundreds of steps, of which the page shows nothing
        line = {"kind": entry["kind"], "session": session, "name": name} | entry
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def everyone(self):
        """Return all rows, and behind the one in the middle its control."""
        rows = list(self.rows)
        rows.insert(rows.index(self.base_of_control) + 1, self.control)
        return rows

    def compare_in_turn(self):
        """Lead sessions of as many rows as memory holds, until every row has its counted steps.

        A row that failed before a --resume is measured again, and one that fails now is not.
        """
        failed = set()
        missing_before = None
        while True:
            results = Results(self.path)
            able = [row for row in self.everyone() if row.name not in failed]
            waiting = [row for row in able if not results.is_finished(row.name)]
            missing = [self.steps_missing(results, row) for row in waiting]
            if not waiting or missing == missing_before:  # no step was added: there is no memory for those that wait
                return
            missing_before = missing
            session = 1 + max((session for session, _ in results.runs), default=-1)
            wanted = self.with_neighbors(waiting)
            rows = [row for row in able if row.name in wanted]
            # the probe comes fourth: where memory is short, s01 and a row above leave room for one that waits
            order = rows[:3] + self.probes + rows[3:]
            self.lead_session(session, order, min(self.counted_steps, max(missing)))
            results = Results(self.path)
            failed |= {row.name for row in rows if results.error(row.name)}

    def steps_missing(self, results, row):
        """Return how many counted steps a row lacks."""
        return self.counted_steps * self.args.rounds - len(results.counted_steps(row.name))

    def with_neighbors(self, waiting):
        """Return the names of the waiting rows and of those that the table compares with them.

        A ratio needs steps of both in one session: of s01, of the row above and the one below, of the control.
        """
        first = Results(self.path).first_row
        late = {row.name for row in waiting}
        pairs = [(above.name, below.name) for above, below in zip(self.rows, self.rows[1:], strict=False)]
        pairs.append((self.base_of_control.name, self.control.name))
        wanted = late | {first}
        for pair in pairs:
            if late & set(pair):
                wanted |= set(pair)
        return wanted

    def compare_in_rounds(self):
        """Lead every row in a fresh process, one after the other, there and back in several rounds.

        The probe comes first, and warms the card up.
        """
        seconds = {}  # that each row took in its last round
        for session in range(self.args.rounds):
            order = self.everyone()
            if session % 2:
                order.reverse()  # so that a drift hits the first and the last alike
            order = self.probes + order
            for i, row in enumerate(order):
                if Results(self.path).has_ended(session, row.name):
                    continue
                rows_left = order[i:] + (self.args.rounds - session - 1) * order
                place = f"round {session + 1} of {self.args.rounds}, row {i + 1} of {len(order)}"
                say(f"{place}{time_left(rows_left, seconds)}")
                began = time.monotonic()
                enough = Enough(COUNTED_STEPS) if row in self.probes else ENOUGH
                self.lead_session(session, [row], self.counted_steps, enough=enough)
                seconds[row.name] = time.monotonic() - began

    def compare_losses(self):
        """Train every row once for each seed; on a CPU as many at a time as there are cores.

        All rows of the first seed come first, so that the records of an interrupted bench can be compared.
        """
        at_once = machine.cores() if self.args.on_cpu else 1
        results = Results(self.path)
        for seed in range(self.args.rounds):
            waiting = []
            for row in self.rows:
                if not results.has_ended(seed, row.name):
                    waiting.append(replace(row, flags=(*row.flags, "--seed", str(self.args.stage.seed + seed))))
            while waiting:
                say(f"seed {seed + 1} of {self.args.rounds}: {len(waiting)} runs to come")
                started = self.lead_session(seed, waiting[:at_once], self.counted_steps, together=True)
                waiting = waiting[started:]

    def find_limit(self, row):
        """Double the batch of a row until it no longer fits, and bisect: a fresh process for each batch."""
        fits, too_large = 0, 1
        while self.fits(row, too_large):
            fits, too_large = too_large, 2 * too_large
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            if self.fits(row, middle):
                fits = middle
            else:
                too_large = middle

    def fits(self, row, batch_size):
        """Return whether a row runs with this batch size, by the records or by a run of a few steps."""
        budget = None
        if self.args.on_cpu:  # a card is its own limit
            budget = int(1e9 * self.args.memory_budget)
        tried = replace(row, flags=("--batch-size", str(batch_size)), memory_budget=budget)
        run = Results(self.path).runs.get((batch_size, row.name))
        if run is None or not (run.summary or run.error):  # not yet, or interrupted
            self.lead_session(batch_size, [tried], min(LIMIT_STEPS, self.counted_steps))
        fits = Results(self.path).has_ended(batch_size, row.name)
        say(f"{row.name}: a batch of {batch_size} {'fits' if fits else 'does not fit'}")
        return fits


def time_left(rows, seconds):
    """Return words on how long some rows will take, "" before the first has ended. seconds: {name: of a past round}."""
    if not seconds:
        return ""
    mean = sum(seconds.values()) / len(seconds)
    left = sum(seconds.get(row.name, mean) for row in rows)
    return f", about {left:.0f} s left"
