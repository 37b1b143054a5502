"""What a row changes beside its base: what its reader types, and whether both compute the same."""

from dataclasses import dataclass, field

from .. import ladder
from ..seen import has_and_lacks, what_to_type
from .cells import NOTHING, code, in_one_line
from .rows import CPU_MEMORY, runs_the_same, shortened

MOST_OF_A_COMMAND = 40  # letters of a cell; the page has the whole command of the bench


@dataclass
class Change:
    """What a row changes beside its base, the row that it is compared with.

    title: the row's title, and what it adds if that does not say it. typed: the cell with what its reader types, in
    markdown. stages: those whose techniques it claims to add, even if they do nothing here. in_vain: the techniques,
    for example "bf16", that were added to a script and do nothing there. is_same_computation: whether both should be
    equally fast.
    """

    title: str
    typed: str
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
        settings = " ".join(code(f"{name}={value}") for name, value in CPU_MEMORY.items())
        return Change(f"{row.title} with memory variables", f"{settings} in front of `python`")
    claimed = claims_of(row, above)
    added = [stage for stage in claimed if stage in techniques_of(outcome) and stage not in techniques_of(base)]
    change = Change(row.title, code(shortened(row.name, MOST_OF_A_COMMAND)), stages=claimed)
    change.is_same_computation = computes_the_same(outcome, base, claimed, added)
    if claimed and row.added:
        typed = [in_one_line(what_to_type(outcome.seen, stage)) for stage in added]
        change.typed = ", ".join(typed) or NOTHING
        change.in_vain = [stage.added_as for stage in claimed if stage.added_as in row.added and stage not in added]
    elif claimed:
        change.title, change.typed = title_and_typed(row, added)
    return change


def claims_of(row, above):
    """Return the Stages by whose techniques a row's command differs from that of its base, a list.

    A stage that is compared with an earlier one claims all in between, too. Nothing is claimed if another script, other
    flags or another launcher may be what makes a row faster.
    """
    if above is None:
        is_a_stage_alone = row.stage and not (row.flags or row.launcher or row.added)
        return [row.stage] if is_a_stage_alone else []
    if (row.flags, row.launcher) != (above.flags, above.launcher) or set(above.added) - set(row.added):
        return []
    claimed = [ladder.ADDED[name] for name in row.added if name not in above.added]
    if row.stage and above.stage:
        return [*ladder.between(above.stage, row.stage), *claimed]
    return claimed if row.script == above.script else []


def techniques_of(outcome):
    """Return the Stages whose techniques are seen in a row. None are if it never ran, or if there is no row."""
    if outcome is None or outcome.seen is None:
        return []
    return has_and_lacks(outcome.seen)[0]


def computes_the_same(outcome, base, claimed, added):
    """Return whether a row should be as fast as its base, since what it adds changes nothing that takes time.

    Not if scaled_dot_product_attention took another kernel: even its matmuls are not those of explicit attention.
    """
    if base is None or not claimed or any(stage.unpredictable for stage in claimed):
        return False
    if outcome.seen is None or base.seen is None or outcome.seen.sdpa != base.seen.sdpa:
        return False
    return not added or (outcome.work is not None and outcome.work == base.work)


def title_and_typed(row, added):
    """Return the title of a stage's row with what it adds, and the cell with what its reader types.

    Stages between the base and this one are named first, because the ratio includes their gains. added: Stages that do
    something here.
    """
    title, typed = row.title, row.stage.line
    if row.stage.technique:
        title = f"{row.title} {row.stage.technique}"
    skipped = ", ".join(stage.short for stage in added if stage is not row.stage)
    if skipped:
        title = f"{row.title} with {skipped}"
        typed = f"{skipped}, {typed}"
    return title, typed
