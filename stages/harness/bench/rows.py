"""The rows of a bench. A row is a command: a stage or a script, the flags after it, and what launches it before it."""

import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from .. import ladder
from ..common import ROOT, refuse, tell

LONGEST_TITLE = 32  # characters
# On a CPU, glibc gives the pages of a freed tensor back to Linux, which clears new ones for the next tensor. With these
# variables glibc keeps them, as PyTorch does on a GPU, and the pages are larger: see stages/memory.md.
CPU_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "THP_MEM_ALLOC_ENABLE": "1"}
# With these, OpenMP's threads spin while they wait. Rows that wait for their turns would slow down the others by that.
SPINNING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# What the first word of a row becomes if it is one of these programs.
PYTHON = [sys.executable]
THIS_PYTHON = {"python": PYTHON, "python3": PYTHON, "torchrun": [*PYTHON, "-m", "torch.distributed.run"]}
# Programs and modules that start a Python for the script after them, for example python3.12 and torch.distributed.run.
LAUNCHERS = re.compile(r"python(\d(\.\d+)?)?|torchrun|(accelerate|deepspeed|torch\.distributed)(\..*)?")


@dataclass(frozen=True)
class Row:
    """What the bench starts once in each round: a row of the table, or the control, which runs a row once more.

    name: the command as it was typed, or what the bench calls a row of its own, as `plain`. No two rows share a name.
    title: what all tables and messages call it. script: the name of a stage, the path of another script, or the name of
    a module. launcher, flags: the words before and after the script in the command. added: the techniques that are
    added to a script from outside, for example "bf16". keeps_memory: whether it has the variables of CPU_MEMORY, in a
    bench that sets them. base: the name of the row that it is compared with. control_of: in the control, the name of
    the row that it repeats, which is its base.
    """

    name: str
    title: str
    script: str
    launcher: list = field(default_factory=list)
    flags: list = field(default_factory=list)
    added: list = field(default_factory=list)
    keeps_memory: bool = True
    base: str | None = None
    control_of: str | None = None

    @property
    def stage(self):
        """The ladder.Stage that it runs, or None for another script."""
        return ladder.stage_of(self.script)

    @property
    def takes_flags(self):
        """Whether it takes the flags that stand after all rows, as stages and scripts beside them do."""
        return self.stage is not None or ladder.is_beside_the_stages(self.script)

    def warmup(self, bench):
        """Return how many of its first steps are not counted. bench: the first line of a record.

        They are more in `plain`, which gets faster for longer than any other row.
        """
        return bench["warmup"] if self.keeps_memory else bench["warmup_of_plain"]

    def command(self, bench, process_number, folder):
        """Return the command line of a process as a list, with watch.py before the script.

        bench: the first line of a record. process_number: what {row} becomes, another one in each process, since two
        may not write one file. folder: where this process writes its record, and finds the gate that allows its steps.
        """
        watch = [str(ROOT / "stages" / "watch.py"), "--record", str(folder / "record")]
        watch += ["--seed", str(bench["seed"]), "--warmup", str(self.warmup(bench))]
        watch += ["--gate", str(folder / "gate"), str(os.getpid())]
        watch += [f"+{name}" for name in self.added]
        path = str(self.stage.path) if self.stage else self.script
        script = [path] if path.endswith(".py") else ["-m", path]
        launcher = numbered(with_python(self.launcher), process_number)
        shared_flags = bench["flags"] if self.takes_flags else []
        own_flags = numbered(self.flags, process_number)
        return [*launcher, *watch, *script, *shared_flags, *own_flags]

    def variables(self, bench):
        """Return the environment of its process: ours and the bench's variables, without those that disturb it."""
        variables = os.environ | bench["variables"]
        left_out = list(SPINNING) if bench["turns"] else []
        if not self.keeps_memory:
            left_out += list(CPU_MEMORY)
        for name in left_out:
            variables.pop(name, None)
        return variables


def with_python(launcher):
    """Return the words before the script of a row, with a Python that runs it.

    As the first word, python, python3 and torchrun become this Python. After another word they stay as typed, since
    `conda run -n A python` is the Python of A. If the launcher starts no Python, as env for example, this Python stands
    after it.
    """
    words = list(launcher)
    if words and words[0] in THIS_PYTHON:
        words[:1] = THIS_PYTHON[words[0]]
    if not any(LAUNCHERS.fullmatch(Path(word).name) for word in launcher if "=" not in word):
        words.append(sys.executable)
    return words


def numbered(words, process_number):
    """Return words in which {row} is replaced by the number of a process."""
    return [word.replace("{row}", str(process_number)) for word in words]


def runs_the_same(row, other):
    """Return whether two Rows run one script with the same flags and launcher."""
    return (row.launcher, row.script, row.flags) == (other.launcher, other.script, other.flags)


def does_as_much(row, other):
    """Return whether a Row runs the same as another one, with all techniques that are added to it, and maybe more."""
    return runs_the_same(row, other) and set(other.added) <= set(row.added)


# From a command to a row


def row_of(command):
    """Return the Row that an argument of the command line describes: s05, my/train.py, or a command in quotes.

    Its title is "s05", or the name of its file, as "train.py". Exits with one line if it has no script.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:  # a quote without its end
        refuse(f"{command!r}: {error}")
    place = place_of_script(words, command)
    before, script, flags = words[:place], words[place], words[place + 1 :]
    techniques = [f"+{name}" for name in ladder.ADDED]
    added = [word.removeprefix("+") for word in before if word in techniques]
    launcher = [word for word in before if word not in techniques]
    stage = ladder.stage_of(script)
    if stage:
        script, title = stage.name, stage.short
    elif script == "-m":
        script = flags.pop(0)
        title = script.split(".")[-1]
    else:
        title = Path(script).name
    return Row(command, title, script, launcher, flags, added)


def place_of_script(words, command):
    """Return the place of the script among the words of a command: the first stage, .py file or -m of a module.

    A word with = in it is no script, so that a launcher's flag may have a value that looks like one: --flag=value. A -m
    counts only before the name of a module that is no launcher, as torch.distributed.run is: the -m of numactl has a
    number after it. Exits with one line if there is no script.
    """
    for place, (word, next_word) in enumerate(pairwise([*words, ""])):
        if ladder.stage_of(word):
            return place
        if word.endswith(".py") and "=" not in word:
            return place
        if word == "-m" and next_word[:1].isidentifier() and not LAUNCHERS.fullmatch(next_word):
            return place
    refuse(f"{command!r} names no stage and no script: pass a stage as s01, a .py file, or a command in quotes")


# The rows of a bench


def rows_of_ladder(device, peak):
    """Return the Rows of all stages that run on a device, "cuda", "mps" or "cpu".

    If the device is slow in 16 bits, all stages from s03 on are slow. Then there is one more row, with what the page
    recommends for such a device: s10 in float32. peak: {dtype: FLOP/s}, of the probe.
    """
    rows = [row_of(stage.short) for stage in ladder.STAGES if device != "mps" or not stage.takes_ranks]
    if ladder.ADDED["bf16"].is_slow(peak):
        rows.append(replace(row_of("s10 --amp-dtype float32"), base="s10"))
    return with_plain(rows, device)


def rows_of_climb(script, probed):
    """Return the Rows in which a script climbs the ladder: each adds a technique to those of the row above.

    script: its Row. probed: what the probe wrote. A technique that does nothing here is left out, with a line that says
    why. One that is slow here comes last, so that it makes no other row slow.
    """
    machine, peak = SimpleNamespace(**probed["abilities"]), probed["rates"]["peak"]
    rows = with_plain([script], probed["environment"]["device"])
    has_already = [ladder.ADDED[name] for name in script.added]
    stages = [stage for stage in ladder.STAGES if stage.added_as and stage not in has_already]
    for stage in sorted(stages, key=lambda stage: stage.is_slow(peak)):
        name = stage.added_as
        if name == "bf16" and machine.amp_dtype == "float16":
            name = "fp16"
        useless = stage.why_useless(machine)
        if useless:
            tell(f"+{name} is left out: {useless}")
        else:
            rows.append(replace(script, name=f"+ {name}", title=f"+ {name}", added=[*rows[-1].added, name]))
    return rows


def with_plain(rows, device):
    """Return Rows, on a CPU with `plain` above them: the first row, run without the memory variables."""
    if device != "cpu":
        return rows
    return [replace(rows[0], name="plain", title="plain", keeps_memory=False), *rows]


def all_rows(rows):
    """Return all Rows that the bench starts: those of the table, and the control.

    Each row gets its base. Rows whose titles are the same get their commands as titles. The control is a second run of
    the row in the middle. Exits with one line if two rows have the same name.
    """
    short_titles = [row.title for row in rows]
    in_order = []
    for row in rows:
        title = row.title
        if short_titles.count(title) > 1:
            title = shortened(row.name, LONGEST_TITLE)
        if title in [above.title for above in in_order]:  # they differ in the middle
            title = row.name
        in_order.append(replace(row, title=title, base=row.base or base_of(row, in_order)))
    middle = (len(in_order) - 1) // 2  # of two rows the first, since the second may not fit into memory
    in_order.insert(middle + 1, second_run(in_order[middle]))
    refuse_equal_names(in_order)
    return in_order


def refuse_equal_names(rows):
    """Exit with one line if two rows have the same name."""
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            refuse(f"two rows are {name!r}: leave one out, since the bench repeats a row anyway, as a control")


def base_of(row, rows_above):
    """Return the name of the row that a row is compared with, or None for the first.

    It is the row above. But a row that adds techniques to a script is compared with the nearest row above in which this
    script has none of them, or some of them.
    """
    for above in reversed(rows_above):
        if row.added and does_as_much(row, above):
            return above.name
    return rows_above[-1].name if rows_above else None


def check_row(row):
    """Exit with one line if a row can't run, or would not run as the others do."""
    if row.launcher and row.launcher[0] not in THIS_PYTHON and shutil.which(row.launcher[0]) is None:
        refuse(f"{row.name!r}: there is no {row.launcher[0]}")
    if row.script.endswith(".py") and not Path(row.script).is_file():
        refuse(f"there is no script {row.script}")
    for word in row.flags:
        if row.takes_flags and word.split("=")[0] in ("--steps", "--device"):
            refuse(f"{row.name!r}: put {word} after all rows, outside of the quotes, since it is the same for all")


def shortened(label, most):
    """Return a label of at most `most` characters, without its middle: rows of one script differ at their ends."""
    if len(label) <= most:
        return label
    half = (most - 1) // 2
    return f"{label[:half]}…{label[-half:]}"


def second_run(row):
    """Return the Row of the A/A control, which runs a row once more, right after it."""
    return replace(row, name=f"{row.name} again", title=f"{row.title} again", base=row.name, control_of=row.name)
