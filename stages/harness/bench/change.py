"""What a row changes beside its base: the code that its reader types, and whether both compute the same."""

from dataclasses import dataclass, field

from .. import ladder
from ..seen import has_and_lacks, what_to_type
from .cells import NOTHING, command_cell, in_one_line
from .rows import CPU_MEMORY, runs_the_same

NO_SINGLE_LINE = ("s11_accum", "s12_ddp")  # would add the technique of these stages


@dataclass
class Change:
    """What a row changes beside its base, the row that it is compared with.

    title: the row's title, and what it adds if that does not say it. typed: the cell with what its reader types, in
    markdown. code: the lines of code to which it owes its gain. stages: those whose techniques it claims to add, even
    if they do nothing here. in_vain: the techniques, for example "bf16", that were added to a script and do nothing
    there. is_same_computation: whether both should be as fast.
    """

    title: str
    typed: str
    code: list = field(default_factory=list)
    stages: list = field(default_factory=list)
    in_vain: list = field(default_factory=list)
    is_same_computation: bool = False


def change_of(outcome, base):
    """Return the Change of a row beside its base. base: an Outcome, or None for the first row."""
    row, above = outcome.row, base.row if base else None
    if row.control_of:
        return Change(row.title, "", is_same_computation=True)
    if not row.keeps_memory:
        return Change(row.title, "without the memory variables")
    if above and not above.keeps_memory and runs_the_same(row, above):
        variables = " ".join(f"{name}={value}" for name, value in CPU_MEMORY.items())
        code = [f"`{variables}` in front of `python`"]
        return Change(f"{row.title} with memory variables", "three variables of the environment", code)
    names, claimed = claims_of(row, above)
    change = Change(row.title, command_cell(row), stages=claimed)
    added = [stage for stage in claimed if stage.for_the_loss or takes_effect(stage, outcome, base)]
    has_same_flags = above is None or row.flags == above.flags
    if has_same_flags:  # else nobody knows whether the flags or the techniques make a row faster
        for_speed = [stage for stage in added if not stage.for_the_loss and stage.name not in NO_SINGLE_LINE]
        change.code = [in_one_line(what_to_type(outcome.seen, stage)) for stage in for_speed]
    if names:
        change.typed = ", ".join(change.code) or NOTHING
        change.in_vain = [name for name in names if ladder.ADDED[name] not in added]
    elif claimed:
        change.title, change.typed = title_and_typed(row, added, has_same_flags)
    if above and claimed and has_same_flags and row.launcher == above.launcher and set(above.added) <= set(row.added):
        change.is_same_computation = computes_the_same(outcome, base, claimed, added)
    return change


def claims_of(row, above):
    """Return (names, Stages) of the techniques by which a row's command differs from that of its base.

    The first stage of a bench claims its own alone. A stage that is compared with an earlier one claims all in between,
    too. names: those that are added from outside, for example "bf16". Two scripts have nothing in common.
    """
    if not row.stage and not (above and runs_the_same(row, above)):
        return [], []
    names = [name for name in row.added if above is None or name not in above.added]
    claimed = [ladder.ADDED[name] for name in names]
    if row.stage and above is None:
        claimed.append(row.stage)
    elif row.stage and above.stage:
        claimed += ladder.between(above.stage, row.stage)
    return names, claimed


def takes_effect(stage, outcome, base):
    """Return whether the technique of a Stage is seen in a row and not in its base; True if the row never ran."""
    if stage.technique is None or outcome.seen is None:
        return True
    is_in_base = base is not None and base.seen is not None and stage in has_and_lacks(base.seen)[0]
    return stage in has_and_lacks(outcome.seen)[0] and not is_in_base


def computes_the_same(outcome, base, claimed, added):
    """Return whether a row should be as fast as its base, since what it adds changes nothing that takes time.

    If attention falls back on matmuls, these are others than s04's.
    """
    ours, theirs = outcome.seen, base.seen
    if ours is None or theirs is None or any(stage.unpredictable for stage in claimed):
        return False
    if ours.sdpa != theirs.sdpa:
        return False
    return not added or (outcome.work is not None and outcome.work == base.work)


def title_and_typed(row, added, has_same_flags):
    """Return the title of a stage's row with what it adds, and the cell with what its reader types.

    Stages between the base and this one are named first, because the ratio includes their gains. added: Stages that do
    something here. has_same_flags: whether the base has the same flags.
    """
    title, typed = row.title, command_cell(row)
    if has_same_flags and not row.launcher and not row.flags:
        typed = row.stage.line
        if row.stage.technique:
            title = f"{row.title} {row.stage.technique}"
    skipped = [stage for stage in added if stage is not row.stage]
    if skipped:
        title = f"{row.title} with {ladder.words_on_stages(skipped)}"
        typed = f"{ladder.words_on_stages(skipped)}, {typed}"
    return title, typed
