"""The rows of a bench. A row is a command: a stage or a script, the flags behind it, and what launches it in front."""

import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from data import refuse

from . import ladder, refuse_namesakes

PROBE = "probe"
LONGEST_TITLE = 16  # letters
# On a CPU, glibc gives the pages of a freed tensor back to Linux, which clears new ones for the next tensor. With these
# variables glibc keeps them, as PyTorch does on a GPU, and the pages are larger: see stages/memory.md.
CPU_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "THP_MEM_ALLOC_ENABLE": "1"}
# The launcher of a row that goes without them.
WITHOUT_CPU_MEMORY = ("env", "-u", "MALLOC_MMAP_MAX_", "-u", "MALLOC_TRIM_THRESHOLD_", "-u", "THP_MEM_ALLOC_ENABLE")


@dataclass(frozen=True)
class Row:
    """A process of the bench: a row of the table, the second run of one, or the probe.

    name: the command as it was typed, which no two rows share. title: in the first column of the short table. script:
    the name of a stage, "probe", or the path of another script. launcher, flags: what stands before and behind it in
    the command. above: the name of the row above. control_of: the name of the row that it is a second run of.
    """

    name: str
    title: str
    script: str
    launcher: tuple = ()
    flags: tuple = ()
    above: str | None = None
    control_of: str | None = None

    @property
    def stage(self):
        """The ladder.Stage that it runs, or None for another script."""
        for stage in ladder.STAGES:
            if stage.name == self.script:
                return stage
        return None

    @property
    def is_probe(self):
        """Whether it measures the machine."""
        return self.script == PROBE

    @property
    def path(self):
        """The path of its script."""
        if self.is_probe:
            return ladder.FOLDER / "harness" / "probe.py"
        return self.stage.path if self.stage else Path(self.script).resolve()

    def command(self, flags):
        """Return the command line as a list. flags: those of all rows, which stand before its own."""
        words = []
        for word in self.launcher:
            if word == "torchrun":
                words += [sys.executable, "-m", "torch.distributed.run"]
            elif word.startswith("python"):
                words.append(sys.executable)
            else:
                words.append(word)
        if sys.executable not in words:
            words.append(sys.executable)
        return [*words, str(self.path), *flags, *self.flags]


def row_of(command):
    """Return the Row of a word of the command line: s05, my/train.py, or a command in quotes.

    Exits with one line where it has no script, or can't run.
    """
    parts = shlex.split(command)
    scripts = [part for part in parts if ladder.stage_of(part) or part.endswith(".py")]
    if not scripts:
        last = ladder.STAGES[-1].short
        refuse(f"{command!r} names no stage and no script: pass s01 to {last}, a .py file, or one of them in a command")
    script = scripts[0]
    place = parts.index(script)
    launcher, flags = tuple(parts[:place]), tuple(parts[place + 1 :])
    stage = ladder.stage_of(script)
    if stage:
        name = stage.short if len(parts) == 1 else command
        row = Row(name, stage.short, stage.name, launcher, flags)
    else:
        row = Row(command, Path(script).stem[:LONGEST_TITLE], script, launcher, flags)
        refuse_namesakes(row.path.parent)
    for word in flags:
        if word.startswith(("--steps", "--device")):
            refuse(f"{command!r}: put {word} outside of the quotes, since it is the same for all rows")
    program = row.command([])[0]
    if not row.path.is_file() or shutil.which(program) is None:
        refuse(f"{command!r}: there is no {script if shutil.which(program) else program}")
    return row


def rows_of(commands, device):
    """Return all that is started, the probe first, and the name of the row that all others are compared with.

    commands: one for each row; without any the ladder runs, on a CPU with `plain` above it.
    """
    if commands:
        rows = [row_of(command) for command in commands]
    else:
        stages = [stage for stage in ladder.STAGES if device.type != "mps" or not stage.takes_ranks]
        rows = [row_of(stage.short) for stage in stages]
    reference = rows[0].name
    if not commands and device.type == "cpu":
        rows.insert(0, replace(rows[0], name="plain", title="plain", launcher=WITHOUT_CPU_MEMORY))
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            refuse(f"two rows are {name!r}: leave one out, since the bench runs a row a second time by itself")
    rows = [replace(row, above=above) for row, above in zip(rows, [None, *names[:-1]], strict=True)]
    return [Row(PROBE, PROBE, PROBE), *with_control(rows)], reference


def with_control(rows):
    """Return the rows, and behind the one in the middle a second run of it: the A/A control.

    It is the one in the middle of the stages where there are any, since a script of the reader's own may fail.
    """
    candidates = [row for row in rows if row.stage] or rows
    row = candidates[len(candidates) // 2]
    together = list(rows)
    together.insert(rows.index(row) + 1, replace(row, name=f"{row.name} again", above=None, control_of=row.name))
    return together
