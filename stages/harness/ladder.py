"""The twelve stages in one table, a line each: what the code knows about a stage beside its text.

Below the table stands what the machine of a run makes of a technique, and how the technique changes the work of a step.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from .arithmetic import ADAMW, BUCKETS, CLIPPING, FUSED_ADAMW, UNSCALING, Work

FOLDER = Path(__file__).resolve().parents[1]  # stages/


@dataclass(frozen=True)
class Stage:
    """One line of the ladder.

    name: of its file, without ".py". change: the title of its docstring. line: what its reader types. predictable:
    whether FLOPs and bytes tell what it is worth, by its lines in work_of(). for_the_loss: whether it is to change the
    loss, which all others must leave as it was. brings: the flag that this stage and all later ones heed. takes_ranks:
    whether torchrun may start several processes of it.
    """

    name: str
    change: str
    line: str
    predictable: bool = False
    for_the_loss: bool = False
    brings: str | None = None
    takes_ranks: bool = False

    @property
    def short(self):
        """s05 for s05_flash."""
        return self.name.split("_")[0]


STAGES = (
    Stage("s01_baseline", "float32, explicit attention", "float32, explicit attention", predictable=True),
    Stage("s02_tf32", "TF32 for float32 matmuls", '`torch.set_float32_matmul_precision("high")`', predictable=True),
    Stage("s03_bf16", "autocast to 16 bits", "`with torch.autocast(...):`", predictable=True, brings="amp_dtype"),
    Stage("s04_compile", "torch.compile", "`model = torch.compile(model)`", predictable=True, brings="compile"),
    Stage("s05_flash", "flash attention, no T x T matrix", "`F.scaled_dot_product_attention(...)`", predictable=True),
    Stage("s06_vocab", "vocabulary padded to 50304", "`vocab_size=50304`, a multiple of 128"),
    Stage("s07_clip", "GPT-3's betas, gradient clipping", "clipping", predictable=True, for_the_loss=True),
    Stage("s08_cosine", "warmup and cosine decay", "warmup and cosine decay", predictable=True, for_the_loss=True),
    Stage("s09_decay", "weight decay on matrices only", "decay of matrices only", predictable=True, for_the_loss=True),
    Stage("s10_fused", "fused AdamW", "`AdamW(..., fused=True)`", predictable=True),
    Stage("s11_accum", "gradient accumulation", "`for micro in range(args.accum):`", predictable=True),
    Stage("s12_ddp", "DistributedDataParallel", "`DistributedDataParallel(model)`", predictable=True, takes_ranks=True),
)
NAMES = [stage.name for stage in STAGES]


def effect(name, run):
    """Return (same_steps, words): what the machine of a run makes of a stage's technique.

    same_steps: whether the stage takes the very steps of the stage before, so that the two are runs of one computation.
    words: for the table. run: the header of the run's record, with "sdpa" of its summary.
    """
    settings = run["settings"]
    match name:
        case "s02_tf32":
            if not run["environment"]["tf32"]:
                return True, "this device has no TF32 units"
            return False, "active"
        case "s03_bf16":
            dtype = settings["amp_dtype"]
            if dtype == "float32":
                return True, run["fallbacks"].get("amp_dtype", "float32 was asked for")
            if dtype == "float16":
                return False, "active: float16, loss scaled"
            return False, f"active: {dtype}"
        case "s04_compile":
            if not settings["compile"]:
                return True, run["fallbacks"].get("compile", "left out by --no-compile")
            return False, "active"
        case "s05_flash":
            if run["sdpa"] is None:  # the run did not get to its summary
                return False, ""
            if run["sdpa"] == "math":
                return False, "no kernel for it here: PyTorch falls back on matmuls"
            return False, f"active: the {run['sdpa']} kernel"
        case "s07_clip":
            return False, "for the loss"
        case "s08_cosine" | "s09_decay":  # another rate, and the same tensors in two groups
            return True, "for the loss"
        case "s11_accum":
            if settings["accum"] == 1:
                return True, "one micro-batch per step"
            return False, f"{settings['accum']} micro-batches per step"
        case "s12_ddp":
            if settings["world_size"] == 1:
                return False, "one process: what DDP itself costs"
    return False, ""


def work_of(name, run):
    """Return the Work of a micro-batch of a stage on the machine of a run, or None for what is no stage.

    run: as of effect(). A stage without lines here does the work of the stage before.
    """
    if name not in NAMES or run["shape"] is None:
        return None
    work = Work(run["shape"], run["settings"]["batch_size"], on_cuda=run["environment"]["device"] == "cuda")
    for stage in NAMES[: NAMES.index(name) + 1]:
        work = with_stage(work, stage, run)
    return work


def with_stage(work, name, run):
    """Return the Work of a micro-batch with what a stage adds to it. run: as of effect()."""
    settings = run["settings"]
    dtype = settings["amp_dtype"]
    match name:
        case "s02_tf32":
            if run["environment"]["tf32"]:
                return replace(work, matmul_dtype="tf32")
        case "s03_bf16":
            if dtype == "float16":
                work = replace(work, update=work.update + UNSCALING)
            if dtype != "float32":
                return replace(work, matmul_dtype=dtype, amp_dtype=dtype)
        case "s04_compile":
            return replace(work, compiled=settings["compile"])
        case "s05_flash":
            return replace(work, flash=run["sdpa"] != "math")
        case "s07_clip":
            return replace(work, update=work.update + CLIPPING)
        case "s10_fused":
            return replace(work, update=work.update - ADAMW + FUSED_ADAMW)
        case "s11_accum":
            return replace(work, accum=max(1, settings["accum"] // settings["world_size"]))
        case "s12_ddp":
            return replace(work, update=work.update + BUCKETS)
    return work


def find(name):
    """Return the Stage of this full name, or None for a script of the reader's own."""
    for stage in STAGES:
        if stage.name == name:
            return stage
    return None


def stage_of(word):
    """Return the Stage that a word stands for: s05, s05_flash or its file; None for any other word."""
    path = Path(word)
    if path.suffix not in ("", ".py") or (path.parent != Path(".") and not path.is_file()):
        return None
    for stage in STAGES:
        if path.stem in (stage.name, stage.short):
            return stage
    return None


def between(above, name):
    """Return the Stages below one and down to another, in order: those that a step from one to the other adds."""
    return STAGES[NAMES.index(above) + 1 : NAMES.index(name) + 1]


def heeds(name, flag):
    """Tell whether a stage heeds a flag that one of the stages brings. A script of the reader's own may heed any."""
    if name not in NAMES:
        return True
    return any(stage.brings == flag for stage in STAGES[: NAMES.index(name) + 1])


def path_of(name):
    """Return the path of a stage's file."""
    return FOLDER / f"{name}.py"
