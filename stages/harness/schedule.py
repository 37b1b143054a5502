"""Who steps when: all rows in turn, one after the other in rounds, or batch by batch."""

import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from .record import COUNTED_STEPS, WARMUP
from .results import Results
from .workers import Enough, Row, lead, say

# An accelerator's clock needs seconds to settle. Steps of all rows are planned by one number, since some set a schedule
# by it, but a row takes no more of them once it has enough.
MOST_COUNTED_STEPS = 160
ENOUGH = Enough(COUNTED_STEPS, seconds=6.0)
LIMIT_STEPS = 3  # counted steps that decide whether a batch fits
TELL_EVERY = 5  # turns
# Rows start in order for as long as there is memory: the reference, a row above and a row that waits come first.
PLACE_OF_THE_PROBE = 3


@dataclass
class Bench:
    """A bench that runs. flags: what all rows share. show: called where the page has something new to show."""

    rows: list[Row]
    results: Results
    flags: list[str]
    show: Callable

    @property
    def counted_steps(self):
        """How many steps a process counts."""
        return self.results.bench["steps"] - WARMUP

    @property
    def rounds(self):
        """How many times every process starts afresh."""
        return self.results.bench["rounds"]

    def lead(self, session, rows, steps, **options):
        """Lead a session of rows, and return how many of them started."""
        return lead(rows, self.flags, self.results, session, steps, **options)

    def measured(self, row):
        """Return the Measured of a Row."""
        return self.results.rows[row.name]


# In turn


def in_turn(bench):
    """Lead sessions of as many rows as memory holds, one step each in turn, until every row has its counted steps.

    A row that failed before a --resume is measured again, and one that fails now is not.
    """
    results = bench.results
    failed = set()
    while True:
        able = [row for row in bench.rows if row.name not in failed]
        waiting = [row for row in able if not results.is_finished(bench.measured(row))]
        if not waiting:
            return
        wanted = names_with_partners(bench, waiting)
        rows = [row for row in able if row.name in wanted and not row.is_probe]
        for row in able:
            if row.is_probe:
                rows.insert(PLACE_OF_THE_PROBE, row)
        missing = max(results.steps_missing(bench.measured(row)) for row in waiting)
        steps = min(missing, bench.counted_steps)
        count = bench.lead(next_session(results), rows, steps, tell=teller_of_turns(results, steps))
        started = rows[:count]
        failed |= {row.name for row in started if results.error(bench.measured(row))}
        if not any(row in waiting for row in started):
            say("there is no memory for the rows that wait: close other programs, and --resume")
            return


def next_session(results):
    """Return the number of a session that no run has."""
    latest = -1
    for row in results.rows.values():
        for run in row.runs:
            latest = max(latest, run.session)
    return latest + 1


def names_with_partners(bench, waiting):
    """Return the names of the rows that wait, and of those that the tables compare with them.

    A ratio needs steps of both rows in one session. All rows are compared with the reference.
    """
    late = {row.name for row in waiting}
    reference = bench.results.bench["reference"]
    if reference in late:
        return {row.name for row in bench.rows}
    names = late | {reference}
    for row in bench.rows:
        for partner in (row.base, row.control_of):
            if partner and late & {row.name, partner}:
                names |= {row.name, partner}
    return names


def teller_of_turns(results, steps):
    """Return a function that tells how far the turns are, what time is left, and how fast the rows are so far."""

    def tell(turn, seconds):
        if turn % TELL_EVERY == 0 and turn < steps:
            left = seconds / turn * (steps - turn)
            say(f"turn {turn} of {steps}, about {left:.0f} s left; tokens per second so far:")
            say(textwrap.fill(speeds(results), 80))

    return tell


def speeds(results):
    """Return the tokens per second of each row so far, in one line."""
    words = []
    for row in results.table_rows:
        if row.figures:
            words.append(f"{row.short}\u00a0{row.figures['tok_per_sec']:,.0f}")  # a name stays with its figure
    return " ".join(words)


# In rounds


def in_rounds(bench):
    """Lead every row in a fresh process, one after the other, there and back in several rounds.

    The probe comes first, and warms the card up.
    """
    seconds = {}  # that each row took in its last round
    for session in range(bench.rounds):
        order = rows_of_round(bench.rows, session)
        for i, row in enumerate(order):
            measured = bench.measured(row)
            if bench.results.has_ended(session, measured):
                continue
            rows_left = [row for row in order[i:] if not bench.results.has_ended(session, bench.measured(row))]
            rows_left += (bench.rounds - session - 1) * order
            place = f"round {session + 1} of {bench.rounds}, row {i + 1} of {len(order)}"
            say(f"{place}{time_left(rows_left, seconds)}")
            began = time.monotonic()
            bench.lead(session, [row], bench.counted_steps, enough=ENOUGH)
            seconds[row.name] = time.monotonic() - began
            if not row.is_probe and measured.figures:
                say(speed_of(bench.results, measured))
        if session + 1 < bench.rounds:
            bench.show()
            if session == 0:
                say(f"rounds 2 to {bench.rounds} give each ratio its ± and a verdict; Ctrl-C keeps what is there")


def rows_of_round(rows, session):
    """Return the rows in the order of a round: the probe, then all others, every other time from the last to the first.

    So a drift hits the first row and the last alike.
    """
    probes = [row for row in rows if row.is_probe]
    others = [row for row in rows if not row.is_probe]
    if session % 2:
        others.reverse()
    return probes + others


def time_left(rows, seconds):
    """Return words on how long some rows will take, "" before the first has ended. seconds: {name: of a past round}."""
    if not seconds:
        return ""
    mean = sum(seconds.values()) / len(seconds)
    left = sum(seconds.get(row.name, mean) for row in rows)
    return f", about {left / 60:.0f} min left"


def speed_of(results, row):
    """Return the tokens per second of a row, and its ratio to the row above where there is one."""
    line = f"{row.name}: {row.figures['tok_per_sec']:,.0f} tok/sec"
    compared = results.compare(row, row.base)
    if compared:
        line += f", {compared.value:.2f} x {row.base.short}"
    return line


# Batch by batch


def find_limit(bench, row):
    """Double the batch of a row until memory is short, and bisect: a fresh process of a few steps for each batch.

    Another failure than that of memory ends it, since it tells nothing of what fits.
    """
    measured = bench.measured(row)
    steps = min(LIMIT_STEPS, bench.counted_steps)
    while not measured.limit_is_found and heeds_batch_size(measured):
        fits, too_large = measured.largest_batch or 0, measured.smallest_too_large
        batch_size = max(1, 2 * fits) if too_large is None else (fits + too_large) // 2
        tried = replace(row, flags=("--batch-size", str(batch_size)), batch_size=batch_size)
        bench.lead(0, [tried], steps)
        run = measured.run(0, batch_size)
        if run.has_ended:
            say(f"{row.name}: a batch of {batch_size} fits")
        elif run.out_of_memory:
            say(f"{row.name}: a batch of {batch_size} does not fit")
        else:
            return


def heeds_batch_size(measured):
    """Tell whether a step takes more tokens with a larger batch, as far as runs show it. Say so where it does not."""
    one, two = measured.run(0, 1), measured.run(0, 2)
    if one is None or two is None or not two.steps or one.steps[-1]["tokens"] < two.steps[-1]["tokens"]:
        return True
    say(f"{measured.name} takes as many tokens in a step whatever --batch-size says: it has no limit to be found")
    return False
