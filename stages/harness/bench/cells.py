"""What is said of a row of the table, in the terminal and on a page: its cells, and its note."""

import re

from ..figures import LONG, LONG_WAIT, UNITS, digits, waiting_share
from ..ladder import ADDED, has_and_lacks, remarks_on, words_in_vain, words_on_techniques
from .ratios import NOT_SHOWN_TO_DIFFER
from .rows import runs_the_same, shortened

NOTHING = "–"  # a cell without a figure
MOST_OF_A_REASON = 300  # characters of a cell that says why a row failed
LONG_WARMUP = 10  # seconds more than as many later steps take: a longer warm-up is told


# Figures


def number_cell(value, form, scale=1):
    """Return the cell of a number, which may be None."""
    return NOTHING if value is None else form.format(scale * value)


def speed_cell(outcome):
    """Return the cell of a row's tokens per second, with its unit if it counts something else."""
    if outcome.tok_per_sec is None:
        return NOTHING
    cell = digits(outcome.tok_per_sec)
    return cell if outcome.seen.unit == "tok" else f"{cell} {UNITS[outcome.seen.unit]}"


def ratio_cell(ratio, verdict=None):
    """Return a Ratio with its ±, as "1.35 ± 0.63"; in parentheses if the Verdict on it shows no difference."""
    if ratio is None:
        return NOTHING
    cell = f"{ratio.value:.2f}"
    if ratio.spread is not None:
        cell += f" ± {ratio.spread:.2f}"
    return in_parentheses(cell, verdict)


def in_parentheses(text, verdict):
    """Return a text, in parentheses if the Verdict on its ratio shows no difference."""
    return f"({text})" if verdict in NOT_SHOWN_TO_DIFFER else text


# Text that somebody else wrote


def in_one_line(text):
    """Return a text with spaces in place of line breaks and other control characters."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", text)


def code(text):
    """Return a text in backticks, which markdown then leaves as it is."""
    without_backticks = in_one_line(text).replace("`", "'")
    return f"`{without_backticks}`"


def quoted(title):
    """Return a title or a reason for a page, in backticks if it has special characters of markdown."""
    is_plain = re.fullmatch(r"[\w+./=…,:;()' -]*", title) and escaped(title) == title
    return title if is_plain else code(title)


def escaped(text):
    """Return a text for a page, with markdown's special characters escaped. A _ between letters or digits is none."""
    return re.sub(r"[\\`*<>\[\]]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", in_one_line(text))


# Notes


def note_cell(outcome, bench):
    """Return the cell with what a row's technique does on this machine, and why the row failed or is not complete."""
    parts = remarks(outcome)
    ended = [run for run in outcome.runs if run.summary]
    if len(ended) < bench["rounds"] and not outcome.error:
        parts.append(f"{len(ended)} of {bench['rounds']} rounds, {len(outcome.counted)} counted steps")
    if outcome.words:
        parts.append(outcome.words)
    idle = outcome.seen.idle_share(outcome.dt_ms) if outcome.dt_ms else None
    if idle and idle > LONG:
        parts.append(f"the card waits for Python or for data for {100 * idle:.0f} % of a step")
    if outcome.change.is_same_computation:
        parts.append(f"same computation as {outcome.base.row.title}")
    if outcome.dt_ms and not bench["turns"]:  # before turns two rows warm up at once, and share the machine
        parts += words_on_warmup(outcome)
    return escaped("; ".join(parts))


def words_on_warmup(outcome):
    """Return how long the warm-up of a row took, if that is much longer than for as many later steps, a list."""
    run = outcome.runs[0]
    seconds = sum(step.dt for step in run.steps[: run.warmup])
    if seconds - run.warmup * outcome.dt_ms / 1000 > LONG_WARMUP:
        return [f"{seconds:.0f} s of warm-up"]
    return []


def remarks(outcome):
    """Return what both the terminal and the page say of a row, a list of words.

    They say why it failed, with which other row it is compared, and what a script has and lacks.
    """
    words = [failure(outcome)] if outcome.error else words_on_base(outcome)
    early = [len(run.steps) for run in outcome.runs if run.ended_early]
    if early:
        words.append(f"ended by itself after {min(early)} steps")
    if outcome.diverged:
        words.append("its loss is not finite")
    if outcome.seen:
        words += remarks_on_script(outcome)
    return words


def words_on_base(outcome):
    """Return with which row a row is compared if that is not the row above, or why it is not compared, a list."""
    base, ratio = outcome.base, outcome.ratio
    if ratio and not outcome.is_with_row_above:
        return [f"compared with {base.row.title}, and not with the row above"]
    if base and base.speeds and outcome.speeds and not ratio:
        reason = "which trains another model, or counts something else"
        if outcome.seen.unit == base.seen.unit == "step" and outcome.size == base.size:
            reason = "since its steps may be of another size"
        return [f"not compared with {base.row.title}, {reason}"]
    return []


def remarks_on_script(outcome):
    """Return what is said of a script, a list of words: what it has of the ladder, lacks, and waits for.

    What it has and lacks is left out for a stage, and for a row that runs the same script as its base. That a technique
    was added to it and took no effect is always said.
    """
    seen, change, base = outcome.seen, outcome.change, outcome.base
    words = []
    for name in change.in_vain:
        words.append(f"it already has {name}" if ADDED[name].is_in(seen) else words_in_vain(name, seen))
    is_known = base and base.seen and runs_the_same(outcome.row, base.row)
    if not (outcome.row.stage or is_known):
        words_on_has, words_on_lacks = words_on_techniques(*has_and_lacks(seen))
        words += [f"has {words_on_has}", f"lacks {words_on_lacks}", *remarks_on(seen)]
    if outcome.counted and waiting_share(outcome.counted) > LONG_WAIT:
        words.append(f"it waits for a DataLoader for {100 * waiting_share(outcome.counted):.0f} % of its time")
    return words


def failure(outcome):
    """Return why a row failed, in one line."""
    error = outcome.error
    if error["name"] != outcome.row.name:
        return shortened(f"not started, since {error['name']} failed", MOST_OF_A_REASON)
    message = error["message"]
    if "ModuleNotFoundError" in message:
        message += ": start the bench with the Python that runs the script (make climb PY=python)"
    if not error["out_of_memory"]:
        message = f"failed: {message}"
    return shortened(in_one_line(message), MOST_OF_A_REASON)
