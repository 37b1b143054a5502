"""What was seen of a training script, a stage or another, and what follows: what it has, lacks and computes."""

import math
from dataclasses import dataclass
from pathlib import Path

from . import ladder
from .arithmetic import ADAMW, BUCKETS, CLIPPING, FUSED_ADAMW, UNSCALING, Work, shape_name
from .common import ROOT

# What is typed in a framework, which has no line of its own for it
IN_FRAMEWORK = {
    ("lightning", "s03_bf16"): '`Trainer(precision="bf16-mixed")`',
    ("fabric", "s03_bf16"): '`Fabric(precision="bf16-mixed")`',
    ("fabric", "s04_compile"): "`model = torch.compile(model)` before `fabric.setup()`",
    ("transformers", "s02_tf32"): "`--tf32 True`",
    ("transformers", "s03_bf16"): "`--bf16 True`",
    ("transformers", "s04_compile"): "`--torch_compile True`",
    ("transformers", "s05_flash"): '`from_pretrained(..., attn_implementation="sdpa")`',
    ("transformers", "s06_vocab"): "`model.resize_token_embeddings(pad_to_multiple_of=128)`",
    ("transformers", "s10_fused"): "`--optim adamw_torch_fused`",
    ("accelerate", "s03_bf16"): '`Accelerator(mixed_precision="bf16")`',
    ("accelerate", "s04_compile"): '`Accelerator(dynamo_backend="inductor")`',
}
FUSED_IN_LIGHTNING = "in bf16-mixed fused=True fails with gradient_clip_val: clip in on_before_optimizer_step()"
UNSEEN = "the script profiles itself, starts a process in its step, steps inside of backward(), or took too few steps"
NO_FLASH = "its attention takes no flash kernel"
SMALL_VOCABULARY = 1024  # below it the last matmul is too small for its tiles to matter


@dataclass
class Seen:
    """What watch.py saw of a script: a line of its record, "seen"."""

    unit: str  # in which a step is counted: "tok", "sample" or "step"
    batch_size: int | None  # of the largest batch
    seq_len: int | None
    accum: int  # micro-batches of a rank for each update, if their losses are shares of one; else 1
    world_size: int
    loaders: int  # processes and threads that it started, most likely to load its data
    framework: str | None  # the package that calls the optimizer
    # its model
    parameters: int
    shape: dict | None  # of a GPT: see arithmetic.shape_of()
    weights: str  # the dtype of the largest parameter
    tf32: bool
    autocast: str | None  # the 16-bit dtype above weights in float32
    enters_autocast: bool  # whether it has that dtype by autocast, and not by casts of its own
    emulated: bool  # whether the device has no units for it
    compile: bool  # whether compiled code multiplied
    ddp: bool
    # its updates
    fused: bool | None  # None if no optimizer has such a kernel
    optimizer: str  # one that could be fused, if there is one
    schedules: bool  # whether learning rates change
    groups: bool  # whether weights decay by groups
    clips: bool
    # what it could use
    device: str
    can_tf32: bool  # whether the device has such units
    amp_dtype: str  # the 16-bit dtype that the device multiplies natively, or "float32"
    compile_problem: str | None  # what torch.compile lacks
    model_name: str = "model"  # what it calls the largest module that it calls, for example "self.net"
    can_compile_in_place: bool = False  # by MODEL.compile(), which compiles a class of the script's own
    # what the operations of one step show
    profiled: bool = False  # whether they were seen
    attention: bool = False
    sdpa: str | None = None  # the kernel that scaled_dot_product_attention chose
    attention_drops: bool = False  # whether it has dropout, if that kernel is "math"
    # the columns of the last matmul; in compiled code the rows of the largest embedding, if a layer has as many outputs
    vocabulary: int | None = None
    busy_ms: float | None = None  # for which a card has something to do
    reads: int = 0  # copies from the card to the CPU in a step

    @classmethod
    def of_line(cls, line):
        """Return the Seen of a line of a record."""
        return cls(**{name: value for name, value in line.items() if name in cls.__dataclass_fields__})

    @property
    def has_flash_attention(self):
        """Whether its attention ran as one kernel."""
        return self.sdpa not in (None, "math")

    def idle_share(self, dt_ms):
        """Return for which share of a step of dt_ms a card has nothing to do; None if that is not known."""
        return None if self.busy_ms is None else max(0.0, 1 - self.busy_ms / dt_ms)

    @property
    def work(self):
        """The Work of a GPT's micro-batch; None for a model that is not a GPT."""
        if not self.shape:
            return None
        dtype = self.autocast or self.weights
        in_tf32 = dtype == "float32" and self.tf32 and self.can_tf32
        update = FUSED_ADAMW if self.fused else ADAMW
        if self.clips:
            update += CLIPPING
        if dtype == "float16":
            update += UNSCALING
        if self.ddp:
            update += BUCKETS
        return Work(
            self.shape,
            self.batch_size,
            matmul_dtype="tf32" if in_tf32 else dtype,
            on_cuda=self.device == "cuda",
            compiled=self.compile,
            flash=self.has_flash_attention,
            update=update,
            accum=self.accum,
        )


# What it has of the ladder, and lacks


def has_and_lacks(seen):
    """Return (has, lacks) of a script, two lists of ladder.Stages. seen: a Seen.

    What would do nothing on this machine, and what was not seen, is in neither list. Clipping, for example, makes no
    step faster, so a script may have it, and never lacks it.
    """
    has_float32 = seen.weights == "float32"
    vocabulary = seen.vocabulary or 0
    uses = {
        "s02_tf32": seen.tf32 and seen.can_tf32 and has_float32,
        "s03_bf16": seen.autocast is not None and has_float32,
        "s04_compile": seen.compile,
        "s05_flash": seen.has_flash_attention,
        "s06_vocab": vocabulary >= SMALL_VOCABULARY and vocabulary % 64 == 0,
        "s07_clip": seen.clips,
        "s08_cosine": seen.schedules,
        "s09_decay": seen.groups,
        "s10_fused": seen.fused,
        "s11_accum": seen.accum > 1,
        "s12_ddp": seen.ddp,
    }
    would_help = {
        "s02_tf32": seen.can_tf32 and has_float32,
        "s03_bf16": seen.amp_dtype != "float32" and has_float32,
        "s04_compile": seen.compile_problem is None,
        "s05_flash": seen.attention and seen.sdpa is None,
        "s06_vocab": vocabulary >= SMALL_VOCABULARY,
        "s10_fused": seen.fused is not None,
    }
    has = [stage for stage in ladder.STAGES if uses.get(stage.name)]
    lacks = [stage for stage in ladder.STAGES if would_help.get(stage.name) and stage not in has]
    return has, lacks


def what_to_type(seen, stage):
    """Return what adds the technique of a Stage to a script, in markdown: a line, or a framework's flag."""
    if seen is None:  # it did not run
        return stage.line
    call = (seen.framework, stage.name)
    if call in IN_FRAMEWORK:
        return IN_FRAMEWORK[call]
    name = seen.model_name
    match stage.name:
        case "s04_compile" if seen.can_compile_in_place:
            return f"`{name}.compile()`"
        case "s04_compile":
            return f"`{name} = torch.compile({name})`"
        case "s06_vocab" if seen.vocabulary:
            size = math.ceil(seen.vocabulary / 64) * 64
            multiple = 64 if size % 128 else 128
            return f"`vocab_size={size}`, a multiple of {multiple}"
        case "s10_fused":
            return f"`{seen.optimizer}(..., fused=True)`"
    return stage.line


# In words


def words_on_model(seen):
    """Return what a script trains: its model and its batch, as far as they are known."""
    words = f"{seen.parameters:,} parameters"
    if seen.shape:
        words = f"{shape_name(seen.shape)}, {words}"
    if seen.batch_size:
        words += f", B {seen.batch_size}"
    if seen.seq_len:
        words += f", T {seen.seq_len}"
    return words


def words_on_techniques(seen, has, lacks):
    """Return (what a script has of the ladder, what it lacks, remarks), two texts and a list of texts.

    A remark says why a technique does nothing, or what is not known. has, lacks: as has_and_lacks() returns them.
    """
    remarks = []
    if seen.weights != "float32":
        remarks.append(f"its weights are {seen.weights}, so autocast has nothing to do")
    elif seen.autocast and not seen.enters_autocast:
        remarks.append(f"it computes in {seen.autocast} without autocast, by casts of its own or a policy of FSDP")
    if seen.emulated:
        remarks.append(f"this device has no units for {seen.autocast}, and is slow in it")
    if seen.sdpa == "math":
        if seen.device != "cpu":
            remarks.append(f"{NO_FLASH}: compute in 16 bits, and use is_causal=True in place of a mask")
        elif seen.attention_drops:
            remarks.append(f"{NO_FLASH}: set its dropout to 0 on a CPU, or train on a card, which has one")
        else:
            remarks.append("attention ran as matmuls, since PyTorch has no flash kernel for it here")
    if seen.compile and seen.device == "cpu" and seen.attention and seen.sdpa is None:  # compiled, both look alike
        remarks.append("s05 may be in it with dropout: then set the dropout to 0, which a flash kernel on a CPU needs")
    if seen.framework == "lightning" and seen.clips and ladder.ADDED["fused"] in lacks:
        remarks.append(FUSED_IN_LIGHTNING)
    if seen.device == "cpu" and ladder.ADDED["bf16"] in lacks:
        remarks.append("on some CPUs 16 bits are slower than float32: measure with +bf16 in a bench")
    if not seen.profiled:
        remarks.append(f"its operations were not seen, attention among them: {UNSEEN}")
    words_on_has = names_of(has) or "none of the techniques"
    words_on_lacks = names_of(lacks) or "none that this machine could use"
    return words_on_has, words_on_lacks, remarks


def names_of(stages):
    """Return the techniques of some Stages and where they are in the ladder, in words."""
    return ", ".join(f"{stage.technique} ({stage.short})" for stage in stages)


def words_on_missing(seen, name):
    """Return why "+NAME" is not seen in a script to which it was added."""
    reason = "the script chooses otherwise, its parameters have no such kernel, or it changes nothing here"
    if name == "tf32" and not seen.can_tf32:
        reason = "this device has no TF32 units"
    if name == "fused" and seen.fused is None:
        reason = f"PyTorch has no fused kernel for {seen.optimizer}"
    return f"+{name} had no effect: {reason}"


def words_on_stage(stage, seen):
    """Return what the technique of a Stage does on this machine, in words, or "" if nothing is to be said."""
    match stage.name:
        case "s02_tf32" if not seen.can_tf32:
            return "this device has no TF32 units"
        case "s03_bf16" if seen.autocast:
            return f"in {seen.autocast}"
        case "s03_bf16" if seen.amp_dtype == "float32":
            return "this device has no 16-bit units, so float32 stays"
        case "s03_bf16":
            return "float32 was asked for"
        case "s04_compile" if not seen.compile and seen.compile_problem:
            return f"not compiled: {seen.compile_problem}"
        case "s04_compile" if not seen.compile:
            return "nothing was compiled"
        case "s05_flash" if seen.sdpa == "math":
            return "no kernel for it here: PyTorch falls back on matmuls"
        case "s05_flash" if seen.sdpa:
            return f"the {seen.sdpa} kernel"
        case "s11_accum":
            return f"micro-batches per step: {seen.accum * seen.world_size}"
        case "s12_ddp" if seen.world_size == 1:
            return "one process, so DDP only costs time"
    return "for the loss, not for speed" if stage.for_the_loss else ""


# Where it runs


def is_beside_the_stages(script):
    """Return whether a script is a file in stages/: a stage, or a thirteenth one that takes the same flags."""
    return script.endswith(".py") and Path(script).resolve().parent == ROOT / "stages"
