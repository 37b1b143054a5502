"""What watch.py says of a script at the end: which techniques it has and lacks, and where its time goes."""

import os

from ..figures import LONG_WAIT
from ..ladder import ADDED, has_and_lacks, remarks_on, words_in_vain, words_on_techniques
from .causes import causes
from .shares import line_at, percent

SHORT_START, LONG_START = 0.01, 10  # seconds before the first step: forwards that take less, lines that take more
SMALLEST_SHARE = 0.005  # of the time: a share that is less would be shown as 0 %
FIX_FIRST = 1 / 3  # of the time: data or own code that takes more comes before all techniques
INDENT = " " * 8  # under the word that begins a group of lines
MANY_STEPS = 700  # of a script that begins with a rollout: two of PPO in Stable-Baselines3 have 640 updates


def words_on_script(run, shares):
    """Return lines that say where the script's time goes, what slows it, and which techniques it has and lacks.

    shares: of shares_of().
    """
    seen = run.log.seen
    lines = []
    if shares:
        lines += words_on_time(run.log, shares)
    lines += [f"{INDENT}{words}" for words in words_on_start(run)]
    slow_words = causes(run)
    lines += [f"slow    {words}" for words in slow_words]
    has, lacks = has_and_lacks(seen)
    has_words, lacks_words = words_on_techniques(has, lacks)
    lines += [f"has     {has_words}", f"lacks   {lacks_words}"]
    if shares and lacks and slow_words:
        lines += words_on_order(shares)
    for stage in lacks:
        typed = stage.what_to_type(seen).replace("`", "")
        lines.append(f"{INDENT}{stage.short} {typed}{stage.caveat(seen)}")
    lines += [f"{INDENT}{remark}" for remark in all_remarks(seen, has, run.args.added)]
    if run.script.climb and any(stage.added_as for stage in lacks):
        lines.append(f"{INDENT}to measure what it lacks: {run.script.climb}")
    return lines


def words_on_order(shares):
    """Return a line that says to fix data or own code first, a list; an empty one if these take little."""
    if max(shares["data"], shares["rest"]) <= FIX_FIRST:
        return []
    computation = sum(shares[kind] for kind in ("forward", "loss", "backward", "update"))
    return [f"{INDENT}together at most {percent(computation)} of the time, so fix what is slow first"]


def words_on_time(log, shares):
    """Return lines on the shares of the time."""
    parts = [f"{kind} {percent(share)}" for kind, share in shares.items() if share >= SMALLEST_SHARE]
    lines = [f"time    {', '.join(parts)}"]
    if log.waiting_steps():
        lines.append(f"{INDENT}measured in steps of the warm-up, which wait for the card after each part")
    return lines


def all_remarks(seen, has, added):
    """Return what to mind, a list of texts: of the techniques, and of what was added in vain. added: names of ADDED."""
    remarks = remarks_on(seen)
    remarks += [words_in_vain(name, seen) for name in added if ADDED[name] not in has]
    if "fp16" in added and "bf16" not in added:
        remarks.append("+fp16 has no GradScaler: it shows the speed, and its losses are not those of a training")
    return remarks


def words_on_start(run):
    """Return lines on what took long before the first step, and is not in the shares of the steps."""
    seconds_of_steps = sum(step.dt for step in run.log.steps)
    words = []
    rollouts = run.spent_before["evaluation"]
    if rollouts > max(LONG_WAIT * seconds_of_steps, SHORT_START):
        forwards = f"before the first step forwards without gradients took {rollouts:.2g} s"
        if run.args.steps < MANY_STEPS:
            forwards += f": --steps {MANY_STEPS} would see whether these come again"
        words.append(forwards)
    for place, seconds in run.lines_before.items():
        if place and seconds > max(seconds_of_steps, LONG_START):  # no place: an import, which is done once
            took = f"before the first step a line took {seconds:.0f} s, longer than all these steps"
            words.append(f"{took}: {os.path.basename(place)}  {line_at(place)}")
    return words
