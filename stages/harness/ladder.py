"""The twelve stages in one table, a line each: what the harness knows about a stage, besides its file.

Below the table, effect_of() says what each technique does on the machine of a run, in a case for each stage.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from .arithmetic import ADAMW, BUCKETS, CLIPPING, FUSED_ADAMW, UNSCALING, Work
from .common import ROOT


@dataclass(frozen=True)
class Stage:
    """One line of the ladder.

    name: of its file, without ".py". line: what its reader types, in markdown. technique: its name in a sentence, or
    None for s01, which has none. update: how many numbers more the update reads or writes for each parameter.
    unpredictable: True where its gain does not follow from FLOPs and bytes. for_the_loss: whether it may change the
    loss; all others leave it as it was up to rounding, accumulation with --accum 1. added_as: "bf16" where
    "+bf16 train.py" adds the technique to a script from outside. takes_ranks: whether torchrun may start several
    processes of it.
    """

    name: str
    line: str
    technique: str | None = None
    update: int = 0
    unpredictable: bool = False
    for_the_loss: bool = False
    added_as: str | None = None
    takes_ranks: bool = False

    @property
    def short(self):
        """s05 for s05_flash."""
        return self.name.split("_")[0]

    @property
    def path(self):
        """The path of its file."""
        return ROOT / "stages" / f"{self.name}.py"


STAGES = (
    Stage("s01_baseline", "nothing yet: float32"),
    Stage("s02_tf32", '`set_float32_matmul_precision("high")`', "TF32", added_as="tf32"),
    Stage("s03_bf16", "`with torch.autocast(...):`", "autocast", added_as="bf16"),
    Stage("s04_compile", "`model = torch.compile(model)`", "compile", added_as="compile"),
    Stage("s05_flash", "`F.scaled_dot_product_attention(...)`", "flash attention"),
    Stage("s06_vocab", "`vocab_size=50304`, a multiple of 128", "a padded vocabulary", unpredictable=True),
    Stage("s07_clip", "`clip_grad_norm_(...)`, for the loss", "clipping", CLIPPING, for_the_loss=True),
    Stage("s08_cosine", "`lr = get_lr(step)`, for the loss", "learning-rate schedule", for_the_loss=True),
    Stage("s09_decay", '`"weight_decay": 0.0`, for the loss', "weight decay", for_the_loss=True),
    Stage("s10_fused", "`AdamW(..., fused=True)`", "a fused update", FUSED_ADAMW - ADAMW, added_as="fused"),
    Stage("s11_accum", "`for micro in range(args.accum):`", "accumulation"),
    Stage("s12_ddp", "`DistributedDataParallel(model)`", "DDP", BUCKETS, takes_ranks=True),
)


ADDED = {stage.added_as: stage for stage in STAGES if stage.added_as}


@dataclass(frozen=True)
class Effect:
    """What a technique does on the machine of a run.

    work: the Work of a micro-batch with it. words: for the column "note". same_computation: whether a step takes as
    long as one of the stage before, because it computes the same. The learning rate and the groups of tensors may
    differ.
    """

    work: Work
    words: str = ""
    same_computation: bool = False


def effect_of(stage, facts):
    """Return the Effect of a stage. Its work includes all stages before it.

    A stage that has no case below changes no more than `update`. facts: the header of a run's record and, as "sdpa",
    the attention kernel that its summary names, or None.
    """
    settings, environment, fallbacks = facts["settings"], facts["environment"], facts["fallbacks"]
    if stage == STAGES[0]:
        return Effect(Work(facts["shape"], settings["batch_size"], on_cuda=environment["device"] == "cuda"))
    stage_before = STAGES[STAGES.index(stage) - 1]
    work = effect_of(stage_before, facts).work
    work = replace(work, update=work.update + stage.update)
    match stage.name:
        case "s02_tf32" if environment["tf32"]:
            return Effect(replace(work, matmul_dtype="tf32"), "active")
        case "s02_tf32":
            on_amd = environment["device"] == "cuda" and not environment["cuda"]
            # ROCm's libraries may choose another kernel then, so nothing is claimed of an AMD card
            return Effect(work, "this device has no TF32 units", same_computation=not on_amd)
        case "s03_bf16" if settings["amp_dtype"] == "float32":
            return Effect(work, fallbacks.get("amp_dtype", "float32 was asked for"), same_computation=True)
        case "s03_bf16":
            dtype = settings["amp_dtype"]
            work = replace(work, matmul_dtype=dtype)
            if dtype == "float16":
                return Effect(replace(work, update=work.update + UNSCALING), "active: float16, loss scaled")
            return Effect(work, f"active: {dtype}")
        case "s04_compile" if settings["compile"]:
            return Effect(replace(work, compiled=True), "active")
        case "s04_compile":
            return Effect(work, fallbacks.get("compile", "left out by --no-compile"), same_computation=True)
        case "s05_flash" if facts["sdpa"] == "math":
            return Effect(work, "no kernel for it here: PyTorch falls back on matmuls")
        case "s05_flash":
            words = f"active: the {facts['sdpa']} kernel" if facts["sdpa"] else ""
            return Effect(replace(work, flash=True), words)
        case "s11_accum" if settings["accum"] == 1:
            return Effect(work, "one micro-batch per step", same_computation=True)
        case "s11_accum":
            micro_batches = settings["accum"] // settings["world_size"]  # of this rank; the note has those of all
            return Effect(replace(work, accum=micro_batches), f"{settings['accum']} micro-batches per step")
        case "s12_ddp" if settings["world_size"] == 1:
            return Effect(work, "one process: what DDP itself costs")
    if stage.for_the_loss:
        return Effect(work, "for the loss, not for speed", same_computation=stage.update == 0)
    return Effect(work)


def stage_of(word):
    """Return the Stage that a word names: s05, s05_flash, or the path of its file. None for any other word or file."""
    path = Path(word).resolve()
    for stage in STAGES:
        if word in (stage.name, stage.short) or path == stage.path:
            return stage
    return None


def between(above, stage):
    """Return the Stages after `above`, up to and with `stage`; none where `stage` comes first."""
    return STAGES[STAGES.index(above) + 1 : STAGES.index(stage) + 1]


def words_on_stages(stages):
    """Return the short names of Stages in words: "s02 to s04" where they are neighbors, and otherwise "s02, s04"."""
    first, last = stages[0], stages[-1]
    if len(stages) > 1 and tuple(stages) == (first, *between(first, last)):
        return f"{first.short} to {last.short}"
    return ", ".join(stage.short for stage in stages)
