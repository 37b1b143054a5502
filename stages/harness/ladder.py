"""The twelve stages in one table, a line each: what the harness knows about a stage, besides its file."""

from dataclasses import dataclass
from pathlib import Path

from .common import ROOT


@dataclass(frozen=True)
class Stage:
    """One line of the ladder.

    name: of its file, without ".py". line: what its user types, in markdown. technique: its name in a sentence, or None
    for s01, which has none. unpredictable: True if its gain does not follow from FLOPs and bytes. for_the_loss: whether
    it is there for the loss; the others leave the training as it was up to rounding (s11 with --accum 1). added_as:
    "bf16" if "+bf16 train.py" adds the technique to a script from outside. left_out_by: the flag with which no stage
    has it. takes_ranks: whether torchrun may start several processes of it.
    """

    name: str
    line: str
    technique: str | None = None
    unpredictable: bool = False
    for_the_loss: bool = False
    added_as: str | None = None
    left_out_by: str | None = None
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
    Stage("s03_bf16", "`with torch.autocast(...):`", "autocast", added_as="bf16", left_out_by="--amp-dtype float32"),
    Stage("s04_compile", "`model = torch.compile(model)`", "compile", added_as="compile", left_out_by="--no-compile"),
    Stage("s05_flash", "`F.scaled_dot_product_attention(...)`", "flash attention"),
    Stage("s06_vocab", "`vocab_size=50304`, a multiple of 128", "padded vocabulary", unpredictable=True),
    Stage("s07_clip", "`clip_grad_norm_(...)`, for the loss", "clipping", for_the_loss=True),
    Stage("s08_cosine", "`lr = get_lr(step)`, for the loss", "learning-rate schedule", for_the_loss=True),
    Stage("s09_decay", '`"weight_decay": 0.0`, for the loss', "weight decay in groups", for_the_loss=True),
    Stage("s10_fused", "`AdamW(..., fused=True)`", "fused optimizer", added_as="fused"),
    Stage("s11_accum", "`for micro in range(args.accum):`", "accumulation"),
    Stage("s12_ddp", "`DistributedDataParallel(model)`", "DDP", takes_ranks=True),
)


ADDED = {stage.added_as: stage for stage in STAGES if stage.added_as}


def stage_of(word):
    """Return the Stage that a word names: s05, s05_flash, or the path of its file. None for any other word or file."""
    path = Path(word).resolve()
    for stage in STAGES:
        if word in (stage.name, stage.short) or path == stage.path:
            return stage
    return None


def between(above, stage):
    """Return the Stages after `above`, up to and including `stage`; none if `stage` comes first."""
    return STAGES[STAGES.index(above) + 1 : STAGES.index(stage) + 1]
