"""The rows of a bench. A row is a command: a stage or a script, the flags behind it, and what launches it in front."""

import re
import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from data import refuse

from .. import ladder, refuse_namesakes

PROBE = "probe"
LONGEST_TITLE = 16  # letters
# On a CPU, glibc gives the pages of a freed tensor back to Linux, which clears new ones for the next tensor. With these
# variables glibc keeps them, as PyTorch does on a GPU, and the pages are larger: see stages/memory.md.
CPU_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "THP_MEM_ALLOC_ENABLE": "1"}
# The launcher of the row `plain`, which goes without these variables.
WITHOUT_CPU_MEMORY = ("env", "-u", "MALLOC_MMAP_MAX_", "-u", "MALLOC_TRIM_THRESHOLD_", "-u", "THP_MEM_ALLOC_ENABLE")


@dataclass(frozen=True)
class Row:
    """A process of the bench: a row of the table, the second run of one, or the probe.

    name: the command as it was typed, or a stage's short name; no two rows share one. title: what the first column of
    the short table shows. script: the name of a stage, "probe", or the path of another script. launcher, flags: what
    stands before and behind it in the command. above: the name of the row above. control_of: in a second run, the name
    of the row that it repeats.
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
            return ladder.FOLDER / "harness" / "bench" / "probe.py"
        return self.stage.path if self.stage else Path(self.script).resolve()

    def command(self, flags):
        """Return the command line as a list. flags: those of all rows, which stand before its own.

        In a launcher, python, python3 and torchrun become this Python. A path, or a name such as python3.13, stays as
        typed. Where the launcher names no Python at all, as env, this Python stands between it and the script.
        """
        words = []
        for word in self.launcher:
            if word in ("python", "python3"):
                words.append(sys.executable)
            elif word == "torchrun":
                words += [sys.executable, "-m", "torch.distributed.run"]
            else:
                words.append(word)
        programs = [Path(word).name for word in self.launcher if not sets_a_variable(word)]
        if not any(re.fullmatch(r"python[\d.]*|torchrun", program) for program in programs):
            words.append(sys.executable)
        return [*words, str(self.path), *flags, *self.flags]


def sets_a_variable(word):
    """Tell whether a word is a variable and its value, as A=b behind env. The path of a file is none."""
    return re.match(r"\w+=", word) is not None and not Path(word).is_file()


def row_of(command):
    """Return the Row that an argument of the command line describes: s05, my/train.py, or a command in quotes.

    Exits with one line where it has no script, or can't run.
    """
    try:
        parts = shlex.split(command)
    except ValueError as error:  # a quote without its end
        refuse(f"{command!r}: {error}")
    words = [part for part in parts if not sets_a_variable(part)]
    scripts = [word for word in words if ladder.stage_of(word) or word.endswith(".py")]
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
            refuse(f"{command!r}: put {word} behind all rows, outside of the quotes, since it is the same for all")
    program = row.command([])[0]
    if shutil.which(program) is None:
        refuse(f"{command!r}: there is no {program}")
    if not row.path.is_file():
        refuse(f"{command!r}: there is no {script}")
    return row


def rows_of(commands, device):
    """Return (rows, reference). rows: all that the bench starts, the probe first. reference: a name, see record.py.

    commands: one for each row. Without any the rows are the stages, on a CPU with `plain` above them.
    """
    if commands:
        rows = [row_of(command) for command in commands]
    else:
        stages = [stage for stage in ladder.STAGES if device.type != "mps" or not stage.takes_ranks]
        rows = [row_of(stage.short) for stage in stages]
    reference = rows[0].name  # s01 even where `plain` comes above it
    if not commands and device.type == "cpu":
        rows.insert(0, replace(rows[0], name="plain", title="plain", launcher=WITHOUT_CPU_MEMORY))
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            refuse(f"two rows are {name!r}: leave one out, since the bench runs a row a second time by itself")
    for place in range(1, len(rows)):
        rows[place] = replace(rows[place], above=names[place - 1])
    probe = Row(name=PROBE, title=PROBE, script=PROBE)
    return [probe, *with_control(rows)], reference


def with_control(rows):
    """Return the rows with one more, the A/A control: a second run of the row in the middle, right behind it.

    It repeats a script of the reader's own only where there is no stage, since such a script may fail.
    """
    candidates = [row for row in rows if row.stage] or rows
    row = candidates[len(candidates) // 2]
    together = list(rows)
    together.insert(rows.index(row) + 1, replace(row, name=f"{row.name} again", above=None, control_of=row.name))
    return together
