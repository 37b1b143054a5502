"""The twelve stages in one table: what the code knows about a stage beside its text.

Adding a stage means adding its file, its row here, and its lesson.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from .arithmetic import ADAMW, BUCKETS, CLIPPING, FUSED_ADAMW, UNSCALING, Work

FOLDER = Path(__file__).resolve().parents[1]  # stages/

# What a technique does on the machine of a run, in the words of the table. A note of no_op() says that the stage takes
# the very steps of the stage before, so that the bench takes the two as runs of one computation. run: the header of the
# run's record, with "sdpa" of its summary.

NO_OP = "no-op: "


def no_op(reason):
    return NO_OP + reason


def is_no_op(note):
    """Tell whether a note says that a stage takes the very steps of the stage before."""
    return note.startswith(NO_OP)


def no_note(run):
    return ""


def note_of_tf32(run):
    if run["environment"]["tf32"]:
        return "active"
    return no_op("this device has no TF32 units")


def note_of_autocast(run):
    dtype = run["settings"]["amp_dtype"]
    if dtype == "float32":
        return no_op(run["fallbacks"].get("amp_dtype", "float32 was asked for"))
    if dtype == "float16":
        return "active: float16, loss scaled"
    return f"active: {dtype}"


def note_of_compilation(run):
    if not run["settings"]["compile"]:
        return no_op("not compiled, " + run["fallbacks"].get("compile", "--no-compile was given"))
    return "active"


def note_of_flash(run):
    if run["sdpa"] is None:  # the run did not get to its summary
        return ""
    return f"active: the {run['sdpa']} kernel"


def note_of_loss(run):
    return "for the loss"


def note_of_loss_alone(run):
    return no_op("it is for the loss")


def note_of_accumulation(run):
    accum = run["settings"]["accum"]
    if accum == 1:
        return no_op("one micro-batch per step")
    return f"{accum} micro-batches per step"


def note_of_ddp(run):
    if run["settings"]["world_size"] == 1:
        return "one process: what DDP itself costs"
    return ""


# The Work of a micro-batch, from that of the stage before. run: as above.


def same_work(work, run):
    return work


def work_in_tf32(work, run):
    if run["environment"]["tf32"]:
        return replace(work, matmul_dtype="tf32")
    return work


def work_in_16_bits(work, run):
    dtype = run["settings"]["amp_dtype"]
    if dtype == "float32":
        return work
    work = replace(work, matmul_dtype=dtype, amp_dtype=dtype)
    if dtype == "float16":
        work = replace(work, update=work.update + UNSCALING)
    return work


def compiled_work(work, run):
    return replace(work, compiled=run["settings"]["compile"])


def flash_work(work, run):
    return replace(work, flash=run["sdpa"] != "math")  # where PyTorch has no such kernel, it falls back on matmuls


def clipped_work(work, run):
    return replace(work, update=work.update + CLIPPING)


def fused_work(work, run):
    return replace(work, update=work.update - ADAMW + FUSED_ADAMW)


def accumulated_work(work, run):
    settings = run["settings"]
    return replace(work, accum=max(1, settings["accum"] // settings["world_size"]))


def work_with_buckets(work, run):
    return replace(work, update=work.update + BUCKETS)


@dataclass(frozen=True)
class Stage:
    """One row of the ladder.

    name: of its file, without ".py". line: what its reader types, for README's table. budget: how many lines of code
    its diff adds to the stage before, and how many it removes, exactly. note, work: see above. is_predictable: whether
    FLOPs and bytes tell what the technique is worth. for_the_loss: whether the technique is to change the loss; all
    others must leave it as it was. modes: the modes of bench.py that run this stage where no other is named.
    takes_ranks: whether torchrun may start several processes of it.
    """

    name: str
    line: str
    budget: tuple[int, int] = (0, 0)
    note: Callable = no_note
    work: Callable = same_work
    is_predictable: bool = True
    for_the_loss: bool = False
    modes: tuple[str, ...] = ()
    takes_ranks: bool = False

    @property
    def short(self):
        """s05 for s05_flash."""
        return self.name.split("_")[0]


STAGES = (
    Stage("s01_baseline", "float32, explicit attention"),
    Stage("s02_tf32", '`torch.set_float32_matmul_precision("high")`', (1, 0), note_of_tf32, work_in_tf32),
    Stage("s03_bf16", "`with torch.autocast(...):`", (5, 2), note_of_autocast, work_in_16_bits, modes=("amp",)),
    Stage("s04_compile", "`model = torch.compile(model)`", (2, 0), note_of_compilation, compiled_work),
    Stage(
        "s05_flash",
        "`F.scaled_dot_product_attention(...)`",
        (1, 7),
        note_of_flash,
        flash_work,
        modes=("limit",),
    ),
    Stage("s06_vocab", "`vocab_size=50304`, a multiple of 128", (1, 1), is_predictable=False, modes=("loss",)),
    Stage(
        "s07_clip",
        "clipping",
        (4, 2),
        note_of_loss,
        clipped_work,
        for_the_loss=True,
        modes=("loss",),
    ),
    Stage(
        "s08_cosine",
        "warmup and cosine decay",
        (13, 2),
        note_of_loss_alone,  # another learning rate makes no other step
        for_the_loss=True,
        modes=("loss",),
    ),
    Stage(
        "s09_decay",
        "decay of matrices only",
        (5, 1),
        note_of_loss_alone,  # the same tensors in two groups
        for_the_loss=True,
    ),
    Stage("s10_fused", "`AdamW(..., fused=True)`", (1, 1), work=fused_work),
    Stage(
        "s11_accum",
        "`for micro in range(args.accum):`",
        (7, 3),
        note_of_accumulation,
        accumulated_work,
        modes=("limit",),
    ),
    Stage(
        "s12_ddp",
        "`DistributedDataParallel(model)`, on one card",
        (15, 3),
        note_of_ddp,
        work_with_buckets,
        modes=("scale",),
        takes_ranks=True,
    ),
)
NAMES = [stage.name for stage in STAGES]


def find(name):
    """Return the Stage of this full name, or None for a script of the reader's own."""
    for stage in STAGES:
        if stage.name == name:
            return stage
    return None


def stage_of(word):
    """Return the Stage that a word stands for: s05, s05_flash or its path; None for any other word."""
    for stage in STAGES:
        if Path(word).stem in (stage.name, stage.short):
            return stage
    return None


def between(above, name):
    """Return the Stages below one and down to another, in order: those that a step from one to the other adds."""
    return STAGES[NAMES.index(above) + 1 : NAMES.index(name) + 1]


def work_of(name, run):
    """Return the Work of a micro-batch of a stage on the machine of a run."""
    settings = run["settings"]
    on_cuda = run["environment"]["device"] == "cuda"
    work = Work(run["shape"], settings["batch_size"], settings["seq_len"], on_cuda=on_cuda)
    for stage in STAGES[: NAMES.index(name) + 1]:
        work = stage.work(work, run)
    return work


def path_of(name):
    """Return the path of a stage's file."""
    return FOLDER / f"{name}.py"


def docstring_and_code(path):
    """Return the docstring of a script, "" where it has none, and the code below it."""
    text = Path(path).read_text(encoding="utf-8")
    if not text.lstrip().startswith('"""'):
        return "", text.strip()
    _, docstring, code = text.split('"""', 2)
    return docstring.strip(), code.strip()


def change(path):
    """Return what a stage changes, by its docstring's title: "flash attention, no T x T matrix".

    For a script of the reader's own it is the whole title, or the name of the file where there is none.
    """
    docstring, _ = docstring_and_code(path)
    title = docstring.split("\n")[0].removesuffix(".")
    if find(Path(path).stem):
        return title.split(": ", 1)[1]
    if not title or title.startswith("Stage "):  # a copy of a stage
        return Path(path).name
    return title


def code_sha256(path):
    """Return the sha256 of a script's code below its docstring, by which a record names what ran."""
    _, code = docstring_and_code(path)
    return hashlib.sha256(code.encode()).hexdigest()
