"""The rows of a bench. A row is a command: a stage or a script, the flags behind it, and what launches it in front."""

import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from data import refuse

from . import ladder, refuse_namesakes

# On a CPU, glibc returns the pages of a freed tensor, and Linux clears those of the next one. With these variables,
# glibc keeps them, as PyTorch does on a GPU, and the pages are larger: see stages/memory.md. `plain` is s01 without.
CPU_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "THP_MEM_ALLOC_ENABLE": "1"}


@dataclass(frozen=True)
class Row:
    """What is started for a row of the table, for a second run of one, or for the probe.

    name: the command as it was typed, which no two rows share. title: the row's in the short table. script: the name of
    a stage, "probe", or the path of another script. launcher, flags: what stands before and behind it in the command.
    base: the name of the row above, with which it is compared. control_of: the name of the row that it is a second run
    of.
    """

    name: str
    title: str
    script: str
    launcher: tuple = ()
    flags: tuple = ()
    base: str | None = None
    control_of: str | None = None
    is_probe: bool = False

    @property
    def stage(self):
        """The ladder.Stage that it runs, or None for another script."""
        for stage in ladder.STAGES:
            if stage.name == self.script:
                return stage
        return None

    @property
    def path(self):
        """The path of its script."""
        if self.is_probe:
            return ladder.FOLDER / "harness" / "probe.py"
        return self.stage.path if self.stage else Path(self.script).resolve()

    def command(self, flags):
        """Return the command line as a list. flags: those of all rows, which stand before its own."""
        launcher = list(self.launcher)
        if "torchrun" in launcher:  # which starts Python by itself
            place = launcher.index("torchrun")
            launcher[place : place + 1] = [sys.executable, "-m", "torch.distributed.run"]
        else:
            launcher.append(sys.executable)
        return [*launcher, str(self.path), *flags, *self.flags]


def row_of(word):
    """Return the Row of a word of the command line: s05, my/train.py, or a command in quotes.

    Exits with one line where it has no script, or the script can't run.
    """
    parts = shlex.split(word)
    scripts = [part for part in parts if ladder.stage_of(part) or part.endswith(".py")]
    if not scripts:
        last = ladder.STAGES[-1].short
        refuse(f"{word!r} names no stage and no script: pass s01 to {last}, a .py file, or one of them in a command")
    script = scripts[0]
    stage = ladder.stage_of(script)
    place = parts.index(script)
    launcher, flags = parts[:place], parts[place + 1 :]
    if launcher and launcher[-1] in ("python", "python3"):  # it is the bench that says which Python
        launcher.pop()
    if launcher and launcher[0] != "torchrun" and shutil.which(launcher[0]) is None:
        refuse(f"{word!r}: there is no program {launcher[0]}, which is to launch it")
    if stage:
        name = stage.short if len(parts) == 1 else word
        return Row(name, stage.short, stage.name, tuple(launcher), tuple(flags))
    path = Path(script)
    if not path.is_file():
        refuse(f"{word!r}: {script} is no file")
    refuse_namesakes(path.resolve().parent)
    return Row(word, path.stem, script, tuple(launcher), tuple(flags))


def rows_of(words, device):
    """Return all that is started, the probe first, and the name of the row that all others are compared with.

    words: a row each; without any the ladder runs, on a CPU with `plain` above it.
    """
    if words:
        rows = [row_of(word) for word in words]
    else:
        stages = [stage for stage in ladder.STAGES if device.type != "mps" or not stage.takes_ranks]
        rows = [row_of(stage.short) for stage in stages]
    reference = rows[0].name
    if not words and device.type == "cpu":
        rows.insert(0, plain(rows[0]))
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            refuse(f"two rows are {name!r}: leave one out, since the bench runs a row a second time by itself")
    above = [None, *names[:-1]]
    rows = [replace(row, base=base) for row, base in zip(rows, above, strict=True)]
    return [Row("probe", "probe", "probe", is_probe=True), *with_control(rows)], reference


def plain(row):
    """Return the Row that runs a row without CPU_MEMORY, which the bench sets for all rows of a CPU."""
    launcher = ["env"]
    for variable in CPU_MEMORY:
        launcher += ["-u", variable]
    return replace(row, name="plain", title="plain", launcher=tuple(launcher))


def with_control(rows):
    """Return the rows, and behind the one in the middle a second run of it: the A/A control.

    It is the one in the middle of the stages where there are any, since a script of the reader's own may fail.
    """
    candidates = [row for row in rows if row.stage] or rows
    row = candidates[len(candidates) // 2]
    control = replace(row, name=f"{row.name} again", base=None, control_of=row.name)
    together = list(rows)
    together.insert(rows.index(row) + 1, control)
    return together
