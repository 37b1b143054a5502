"""What a row changes beside the row above: the code that its reader types, and whether both compute the same."""

from dataclasses import dataclass, field

from .. import ladder
from ..scripts import has_and_lacks, uses, what_to_type
from .rows import CPU_MEMORY, runs_the_same
from .words import NOTHING, command_cell


@dataclass
class Change:
    """What a row changes beside its base, the row above or the one that a second run repeats.

    title: the row's title, and what it adds where that does not say it. typed: the cell with what its reader types, in
    markdown. code: the lines of code to which it owes its gain. stages: those whose techniques it adds, also where they
    do nothing here. in_vain: the techniques, as "bf16", that were added to a script and do nothing there.
    is_same_computation: whether both should be as fast.
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
    has_same_script = above is not None and runs_the_same(row, above)
    if row.control_of:
        return Change(row.title, "", is_same_computation=True)
    if not row.keeps_memory:
        return Change(row.title, "without the memory variables")
    if has_same_script and not above.keeps_memory:
        variables = " ".join(f"{name}={value}" for name, value in CPU_MEMORY.items())
        code = [f"`{variables}` in front of `python`"]
        return Change(f"{row.title} with memory variables", "three variables of the environment", code)
    if has_same_script and row.added != above.added:
        return change_from_outside(outcome, base)
    if row.stage:
        return change_of_stage(outcome, base)
    return Change(row.title, command_cell(row))


def change_of_stage(outcome, base):
    """Return the Change of a stage. The first row adds its own alone, a row below an earlier stage all in between, too.

    base: an Outcome, or None.
    """
    row, above = outcome.row, base.row if base else None
    stages = []
    if above is None:
        stages = [row.stage]
    elif above.stage:
        stages = list(ladder.between(above.stage, row.stage))
    has = has_and_lacks(outcome.techniques)[0] if outcome.techniques else stages
    added = [stage for stage in stages if stage in has or stage.for_the_loss or not stage.technique]
    has_same_flags = above is None or row.flags == above.flags
    code = []
    if has_same_flags:  # else nobody knows which of the two it is
        code = [stage.line for stage in added if not stage.for_the_loss]
    adds_its_line = bool(stages) and has_same_flags and not row.launcher and not row.flags
    title, typed = title_and_typed(row, added, adds_its_line)
    has_same_command = above is not None and has_same_flags and row.launcher == above.launcher
    is_same_computation = has_same_command and bool(stages) and computes_the_same(outcome, base, stages)
    return Change(title, typed, code, stages, is_same_computation=is_same_computation)


def computes_the_same(outcome, base, stages):
    """Tell whether a stage should be as fast as its base, since the Stages between them change nothing that takes time.

    An attention that falls back on matmuls is another one than s04's. And ROCm's libraries may choose another kernel by
    the flag of TF32, also where the card has no units for it, so nothing is claimed of an AMD card.
    """
    if outcome.work is None or outcome.work != base.work or any(stage.unpredictable for stage in stages):
        return False
    environment, ours, theirs = outcome.facts["environment"], outcome.techniques, base.techniques
    on_amd = environment["device"] == "cuda" and not environment["cuda"]
    return ours["sdpa"] == theirs["sdpa"] and not (on_amd and ours["tf32"] != theirs["tf32"])


def title_and_typed(row, added, adds_its_line):
    """Return the title of a row with what it adds, and the cell with what its reader types.

    Stages between the row above and this one are named first, because the ratio includes their gains. added: Stages
    that do something here. adds_its_line: whether its own stage, and no flag or launcher, is what the row adds last.
    """
    title, typed = row.title, command_cell(row)
    if adds_its_line:
        typed = row.stage.line
        if row.stage.technique:
            title = f"{row.title} {row.stage.technique}"
    skipped = [stage for stage in added if stage is not row.stage]
    if skipped:
        title = f"{row.title} with {ladder.words_on_stages(skipped)}"
        typed = f"{ladder.words_on_stages(skipped)}, {typed}"
    return title, typed


def change_from_outside(outcome, base):
    """Return the Change of a script to which techniques are added that the row above goes without.

    One is in vain where the script had it before, or does not have it now.
    """
    row, techniques = outcome.row, outcome.techniques
    names = [name for name in row.added if name not in base.row.added]
    goes_without = [name for name in base.row.added if name not in row.added]
    stages = [ladder.ADDED[name] for name in names]
    in_vain = []
    if techniques and base.techniques:
        in_vain = [name for name in names if uses(base.techniques, name) or not uses(techniques, name)]
    code = []
    for stage in stages:
        if stage.added_as not in in_vain:
            code.append(what_to_type(techniques, stage) if techniques else stage.line)
    typed = command_cell(row)
    if names:
        typed = ", ".join(code) if code else NOTHING
    is_same_computation = bool(names) and in_vain == names and not goes_without
    return Change(row.title, typed, code, stages, in_vain, is_same_computation)
