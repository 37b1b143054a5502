"""What a row changes compared with its base: what its user types, and whether both compute the same."""

from dataclasses import dataclass, field

from .. import ladder
from .cells import NOTHING, code, in_one_line
from .rows import CPU_MEMORY, runs_the_same, shortened

MOST_OF_A_COMMAND = 40  # characters of a cell; the page has the whole command of the bench


@dataclass
class Change:
    """What a row changes compared with its base.

    label: what the answer and the picture call it: the title of the row, and what it adds if that does not say it.
    typed: the cell with what its user types, in markdown. stages: those whose techniques its command adds, even if
    they do nothing here. in_vain: the names of what was added to a script from outside, and does nothing there.
    is_same_computation: whether both should be equally fast, since they compute the same.
    """

    label: str
    typed: str
    stages: list = field(default_factory=list)
    in_vain: list = field(default_factory=list)
    is_same_computation: bool = False


def change_of(outcome):
    """Return the Change of the row of an Outcome, compared with its base."""
    row, base = outcome.row, outcome.base
    base_row = base.row if base else None
    if row.control_of:
        return Change(row.title, "", is_same_computation=True)
    if not row.keeps_memory:  # `plain`
        return Change(row.title, "without the memory variables")
    is_below_plain = base_row is not None and not base_row.keeps_memory and runs_the_same(row, base_row)
    if is_below_plain:
        settings = " ".join(code(f"{name}={value}") for name, value in CPU_MEMORY.items())
        return Change(f"{row.title} with memory variables", f"{settings} in front of `python`")
    stages = stages_added(row, base_row)
    if not stages:  # another script, or other flags
        return Change(row.title, code(shortened(row.name, MOST_OF_A_COMMAND)))
    effective = [stage for stage in stages if is_seen_in(outcome, stage) and not is_seen_in(base, stage)]
    is_same = computes_the_same(outcome, stages, effective)
    if row.added:
        return change_of_script(outcome, stages, effective, is_same)
    return change_of_stage(row, stages, effective, is_same)


def change_of_script(outcome, stages, effective, is_same):
    """Return the Change of a row that adds techniques to a script from outside."""
    added = [name for name in outcome.row.added if name not in outcome.base.row.added]
    in_vain = [name for name in added if ladder.ADDED[name] not in effective]
    typed = ", ".join(in_one_line(stage.what_to_type(outcome.seen)) for stage in effective)
    return Change(outcome.row.title, typed or NOTHING, stages, in_vain, is_same)


def change_of_stage(row, stages, effective, is_same):
    """Return the Change of a row that runs a stage.

    Between its stage and that of its base may be others. They are named first, since the ratio includes their gains.
    """
    label, typed = row.title, row.stage.line
    if row.stage.technique:
        label = f"{row.title} {row.stage.technique}"
    between = ", ".join(stage.short for stage in effective if stage is not row.stage)
    if between:
        label = f"{row.title} with {between}"
        typed = f"{between}, {typed}"
    return Change(label, typed, stages, is_same_computation=is_same)


def stages_added(row, base_row):
    """Return the Stages whose techniques the command of a row adds to that of its base, a list.

    A stage that is compared with an earlier one also adds all stages in between. The list is empty if the rows differ
    in anything else that may change the speed: the script, the flags or the launcher. base_row: None for the first row.
    """
    if base_row is None:
        is_a_stage_alone = row.stage and not (row.flags or row.launcher or row.added)
        return [row.stage] if is_a_stage_alone else []
    runs_alike = (row.flags, row.launcher) == (base_row.flags, base_row.launcher)
    keeps_what_base_adds = set(base_row.added) <= set(row.added)
    if not (runs_alike and keeps_what_base_adds):
        return []
    added = [ladder.ADDED[name] for name in row.added if name not in base_row.added]
    if row.stage and base_row.stage:
        return [*ladder.between(base_row.stage, row.stage), *added]
    return added if row.script == base_row.script else []


def is_seen_in(outcome, stage):
    """Return whether the technique of a Stage is seen in a row. outcome: None if there is no row."""
    return outcome is not None and outcome.seen is not None and stage.is_in(outcome.seen)


def computes_the_same(outcome, stages, effective):
    """Return whether a row should be as fast as its base, since what it adds changes nothing that takes time.

    With another kernel of scaled_dot_product_attention it need not be as fast: even the kernel "math" has other matmuls
    than explicit attention. stages: those that it adds. effective: those of them that do something here.
    """
    base = outcome.base
    if base is None or base.seen is None or outcome.seen is None:
        return False
    if any(stage.unpredictable for stage in stages):
        return False
    if outcome.seen.sdpa != base.seen.sdpa:
        return False
    if not effective:
        return True
    return outcome.work is not None and outcome.work == base.work
