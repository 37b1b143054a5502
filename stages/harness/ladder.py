"""The ladder: a class for each stage, which says what is known of its technique.

Stage has the questions that watch.py and the bench ask about a technique: whether a script has it or lacks it, what its
user types, what it does on this machine. Three things are elsewhere: how it is seen in a script (watch/techniques.py
and watch/operations.py), how it is added from outside (watch/added.py), and what it computes (Seen.work).
"""

import math
from pathlib import Path

from .common import ROOT

UNSEEN = "the script profiles itself, starts a process in its step, steps inside of backward(), or took too few steps"


class Stage:
    """A stage and the technique that it adds. The answers here are those of a class below that has none of its own.

    seen: the Seen of a script. machine: an object with the fields of machine.abilities_of(), for example a Seen.
    """

    name: str  # of its file, without ".py"
    line: str  # what its user types, in markdown
    technique = None  # its name in a sentence; s01 has none
    in_frameworks = {}  # {framework: what its user types there}
    for_the_loss = False  # the others leave the training as it was, up to rounding (s11 with --accum 1)
    unpredictable = False  # whether its gain does not follow from FLOPs and bytes
    added_as = None  # "bf16" if "+bf16 train.py" adds it to a script from outside
    left_out_by = None  # the flag with which no stage has it
    takes_ranks = False  # whether torchrun may start several processes of it

    @property
    def short(self):
        """s05 for s05_flash."""
        return self.name.split("_")[0]

    @property
    def path(self):
        """The path of its file."""
        return ROOT / "stages" / f"{self.name}.py"

    # in a script

    def is_in(self, seen):
        """Return whether a script has it."""
        return False

    def would_help(self, seen):
        """Return whether a script lacks it. What does nothing on this machine, or could not be seen, is not lacking."""
        return False

    def line_for(self, seen):
        """Return the line for a script that lacks it, with the script's own names."""
        return self.line

    def what_to_type(self, seen):
        """Return what adds it to a script, in markdown: a line, or a framework's flag."""
        return self.in_frameworks.get(seen.framework) or self.line_for(seen)

    def caveat(self, seen):
        """Return what it changes besides the speed, in words that follow what_to_type(), or ""."""
        return ""

    def remarks(self, seen):
        """Return, or yield, texts: why it does nothing in a script, and what to mind."""
        return ()

    def why_in_vain(self, seen):
        """Return why it is not seen in a script to which it was added from outside."""
        return "the script chooses otherwise, its parameters have no such kernel, or it changes nothing here"

    # on this machine

    def note(self, seen):
        """Return what it does in a stage on this machine, or "" if nothing is to be said."""
        return self.why_useless(seen) or ("for the loss, not for speed" if self.for_the_loss else "")

    def why_useless(self, machine):
        """Return why no script gains from it on this machine if it is added from outside, or None."""
        return None

    def is_slow(self, peak):
        """Return whether it slows this machine down. peak: {dtype: FLOP/s of a large matmul}."""
        return False


class Baseline(Stage):
    name = "s01_baseline"
    line = "nothing yet: float32"


class TF32(Stage):
    name, technique = "s02_tf32", "TF32"
    line = '`set_float32_matmul_precision("high")`'
    in_frameworks = {"transformers": "`--tf32 True`"}
    added_as = "tf32"

    def has_use(self, seen):
        """Return whether the device could multiply the weights in TF32."""
        return seen.can_tf32 and seen.weights == "float32"

    def is_in(self, seen):
        return seen.tf32 and self.has_use(seen)

    def would_help(self, seen):
        return not seen.tf32 and self.has_use(seen)

    def why_in_vain(self, seen):
        return self.why_useless(seen) or super().why_in_vain(seen)

    def why_useless(self, machine):
        return None if machine.can_tf32 else "this device has no TF32 units"


class BF16(Stage):
    name, technique = "s03_bf16", "autocast"
    line = "`with torch.autocast(...):`"
    in_frameworks = {
        "lightning": '`Trainer(precision="bf16-mixed")`',
        "fabric": '`Fabric(precision="bf16-mixed")`',
        "transformers": "`--bf16 True`",
        "accelerate": '`Accelerator(mixed_precision="bf16")`',
    }
    float16_in_frameworks = {
        "lightning": '`Trainer(precision="16-mixed")`',
        "fabric": '`Fabric(precision="16-mixed")`',
        "transformers": "`--fp16 True`",
        "accelerate": '`Accelerator(mixed_precision="fp16")`',
    }
    added_as = "bf16"
    left_out_by = "--amp-dtype float32"

    def has_use(self, seen):
        """Return whether autocast would change anything."""
        return seen.weights == "float32" and seen.multiplies

    def is_in(self, seen):
        return seen.autocast is not None and self.has_use(seen)

    def would_help(self, seen):
        return seen.autocast is None and self.has_use(seen) and seen.amp_dtype != "float32"

    def what_to_type(self, seen):
        words = self.float16_in_frameworks if seen.amp_dtype == "float16" else self.in_frameworks
        return words.get(seen.framework) or self.line_for(seen)

    def line_for(self, seen):
        dtype = seen.autocast or seen.amp_dtype
        line = f'`with torch.autocast("{seen.device}", torch.{dtype}):`'
        if dtype == "float16":
            line += " and a `GradScaler`"
        if seen.autocast == "float16":  # +fp16 has added it
            line += ", without which these losses are not those of a training"
        return line

    def remarks(self, seen):
        if seen.weights != "float32":
            yield f"its weights are {seen.weights}, so autocast has nothing to do"
        elif seen.autocast and not seen.enters_autocast:
            yield f"it computes in {seen.autocast} without autocast, by casts of its own or a policy of FSDP"
        if seen.emulated:
            yield f"this device has no units for {seen.autocast}, and is slow in it"
        if seen.device == "cpu" and self.would_help(seen):
            yield "on some CPUs 16 bits are slower than float32: measure with +bf16 in a bench"

    def note(self, seen):
        if seen.autocast:
            return f"in {seen.autocast}"
        if seen.amp_dtype == "float32":
            return "this device has no 16-bit units, so float32 stays"
        return "float32 was asked for"

    def why_in_vain(self, seen):
        return super().why_in_vain(seen) if seen.multiplies else "its step has no matmul"

    def why_useless(self, machine):
        return None if machine.amp_dtype != "float32" else "this device has no 16-bit units"

    def is_slow(self, peak):
        measured = [peak[dtype] for dtype in ("bfloat16", "float16") if dtype in peak]
        return bool(measured) and max(measured) < peak["float32"]


class Compile(Stage):
    name, technique = "s04_compile", "compile"
    line = "`model = torch.compile(model)`"
    in_frameworks = {
        "fabric": "`model = torch.compile(model)` before `fabric.setup()`",
        "transformers": "`--torch_compile True`",
        "accelerate": '`Accelerator(dynamo_backend="inductor")`',
        "skorch": "`compile=True` of the net",
    }
    added_as = "compile"
    left_out_by = "--no-compile"

    def is_in(self, seen):
        return seen.compile

    def would_help(self, seen):
        return not seen.compile and seen.compile_problem is None

    def line_for(self, seen):
        name, unnamed = seen.model_name, "the module that you call"
        if seen.can_compile_in_place:
            return f"`{name}.compile()`" if name else f"`compile()` of {unnamed}"
        return f"`{name} = torch.compile({name})`" if name else f"`torch.compile()` around {unnamed}"

    def caveat(self, seen):
        keeps_names = seen.can_compile_in_place or seen.framework in self.in_frameworks
        return "" if keeps_names else "; the names in its checkpoints then have _orig_mod."

    def note(self, seen):
        if seen.compile:
            return ""
        return f"not compiled: {seen.compile_problem}" if seen.compile_problem else "nothing was compiled"

    def why_useless(self, machine):
        return machine.compile_problem


class Flash(Stage):
    name, technique = "s05_flash", "flash attention"
    line = "`F.scaled_dot_product_attention(...)`"
    in_frameworks = {"transformers": '`from_pretrained(..., attn_implementation="sdpa")`'}

    def is_in(self, seen):
        return seen.has_flash_attention

    def would_help(self, seen):
        return seen.attention and seen.sdpa is None

    def remarks(self, seen):
        no_kernel = "its attention takes no flash kernel"
        if seen.sdpa == "math" and seen.device != "cpu":
            yield f"{no_kernel}: compute in 16 bits, and use is_causal=True in place of a mask"
        elif seen.sdpa == "math" and seen.attention_drops:
            yield f"{no_kernel}: set its dropout to 0 on a CPU, or train on a card, which has one"
        elif seen.sdpa == "math":
            yield "attention ran as matmuls, since PyTorch has no flash kernel for it here"
        elif seen.device == "cpu" and seen.compile and self.would_help(seen):  # compiled code may hide s05
            yield "s05 may be in it with dropout: then set the dropout to 0, which a flash kernel on a CPU needs"

    def note(self, seen):
        if seen.sdpa == "math":
            return "no kernel for it here: PyTorch falls back on matmuls"
        return f"the {seen.sdpa} kernel" if seen.sdpa else ""


class Vocab(Stage):
    name, technique = "s06_vocab", "padded vocabulary"
    line = "`vocab_size=50304`, a multiple of 128"
    in_frameworks = {"transformers": "`model.resize_token_embeddings(pad_to_multiple_of=128)`"}
    unpredictable = True
    smallest = 1024  # with fewer columns the last matmul is too small for its tiles to matter
    tile = 64  # columns that a kernel computes at once; for some they are 128, so s06 pads to a multiple of 128

    def is_large(self, seen):
        """Return whether the vocabulary is known, and large enough to matter."""
        return (seen.vocabulary or 0) >= self.smallest

    def is_in(self, seen):
        return self.is_large(seen) and seen.vocabulary % self.tile == 0

    def would_help(self, seen):
        return self.is_large(seen) and seen.vocabulary % self.tile != 0

    def line_for(self, seen):
        size = math.ceil(seen.vocabulary / self.tile) * self.tile
        multiple = self.tile if size % (2 * self.tile) else 2 * self.tile
        return f"`vocab_size={size}`, a multiple of {multiple}"


class Clip(Stage):
    name, technique = "s07_clip", "clipping"
    line = "`clip_grad_norm_(...)`, for the loss"
    for_the_loss = True

    def is_in(self, seen):
        return seen.clips is not None

    def remarks(self, seen):
        if seen.clips == "value":
            yield "it clips by value, clip_grad_value_(), and s07 by the norm of all gradients"


class Cosine(Stage):
    name, technique = "s08_cosine", "learning-rate schedule"
    line = "`lr = get_lr(step)`, for the loss"
    for_the_loss = True

    def is_in(self, seen):
        return seen.schedules


class Decay(Stage):
    name, technique = "s09_decay", "weight decay in groups"
    line = '`"weight_decay": 0.0`, for the loss'
    for_the_loss = True

    def is_in(self, seen):
        return seen.groups


class Fused(Stage):
    name, technique = "s10_fused", "fused optimizer"
    line = "`AdamW(..., fused=True)`"
    in_frameworks = {"transformers": "`--optim adamw_torch_fused`", "skorch": "`optimizer__fused=True` of the net"}
    added_as = "fused"

    def is_in(self, seen):
        return seen.fused is True

    def would_help(self, seen):
        return seen.fused is False

    def line_for(self, seen):
        return f"`{seen.optimizer}(..., fused=True)`"

    def remarks(self, seen):
        if seen.framework == "lightning" and seen.clips and self.would_help(seen):
            yield "in bf16-mixed fused=True fails with gradient_clip_val: clip in on_before_optimizer_step()"

    def why_in_vain(self, seen):
        if seen.fused is None:
            return f"PyTorch has no fused kernel for {seen.optimizer}"
        return super().why_in_vain(seen)


class Accum(Stage):
    name, technique = "s11_accum", "accumulation"
    line = "`for micro in range(args.accum):`"

    def is_in(self, seen):
        return seen.accum > 1

    def note(self, seen):
        return f"micro-batches per step: {seen.accum * seen.world_size}"


class DDP(Stage):
    name, technique = "s12_ddp", "DDP"
    line = "`DistributedDataParallel(model)`"
    takes_ranks = True

    def is_in(self, seen):
        return seen.ddp

    def note(self, seen):
        return "one process, so DDP only costs time" if seen.world_size == 1 else ""


STAGES = (Baseline(), TF32(), BF16(), Compile(), Flash(), Vocab(), Clip(), Cosine(), Decay(), Fused(), Accum(), DDP())
ADDED = {stage.added_as: stage for stage in STAGES if stage.added_as}
ADDED["fp16"] = ADDED["bf16"]  # the same in float16, for its speed alone


# Where a stage stands


def stage_of(word):
    """Return the Stage that a word names: s05, s05_flash, or the path of its file. None for any other word or file."""
    path = Path(word).resolve()
    for stage in STAGES:
        if word in (stage.name, stage.short) or path == stage.path:
            return stage
    return None


def is_beside_the_stages(script):
    """Return whether a script is a file in stages/, and so is taken for one that takes the flags of a stage."""
    return script.endswith(".py") and Path(script).resolve().parent == ROOT / "stages"


def between(above, stage):
    """Return the Stages after `above`, up to and including `stage`; none if `stage` comes first."""
    return STAGES[STAGES.index(above) + 1 : STAGES.index(stage) + 1]


# What a script has and lacks


def has_and_lacks(seen):
    """Return (has, lacks) of a script, two lists of Stages. seen: a Seen.

    A technique that would do nothing on this machine, or that could not be seen, is in neither list. One that makes no
    step faster, as clipping, may be in the first list, and never in the second.
    """
    has = [stage for stage in STAGES if stage.is_in(seen)]
    lacks = [stage for stage in STAGES if stage.would_help(seen)]
    return has, lacks


def words_on_techniques(has, lacks):
    """Return what a script has of the ladder and what it lacks, two texts. has, lacks: lists of Stages."""
    return names_of(has) or "none of the techniques", names_of(lacks) or "none that this machine could use"


def remarks_on(seen):
    """Return why techniques do nothing in a script, and what is not known of it, a list of texts."""
    remarks = [remark for stage in STAGES for remark in stage.remarks(seen)]
    if not seen.profiled:
        remarks.append(f"its operations were not seen, attention among them: {UNSEEN}")
    return remarks


def names_of(stages):
    """Return the techniques of some Stages in words, each with its stage, as "TF32 (s02), autocast (s03)"."""
    return ", ".join(f"{stage.technique} ({stage.short})" for stage in stages)


def words_in_vain(name, seen):
    """Return why what was added to a script from outside is not seen in it. name: a key of ADDED."""
    return f"+{name} had no effect: {ADDED[name].why_in_vain(seen)}"
