"""A training script, a stage or another: where it runs, what it has of the ladder, and what it has to compute.

What a script has is a dict of techniques, which watch/techniques.py finds and describes.
"""

from pathlib import Path

from . import ladder
from .arithmetic import ADAMW, BUCKETS, CLIPPING, FUSED_ADAMW, UNSCALING, Work
from .common import ROOT

# What is typed in a framework, which has no line of its own for it
IN_FRAMEWORK = {
    ("lightning", "s03_bf16"): '`Trainer(precision="bf16-mixed")`',
    ("lightning", "s04_compile"): "`self.blocks = torch.compile(self.blocks)`, a part of the model",
    ("transformers", "s02_tf32"): "`--tf32 True`",
    ("transformers", "s03_bf16"): "`--bf16 True`",
    ("transformers", "s04_compile"): "`--torch_compile True`",
    ("transformers", "s05_flash"): '`from_pretrained(..., attn_implementation="sdpa")`',
    ("transformers", "s10_fused"): "`--optim adamw_torch_fused`",
    ("accelerate", "s03_bf16"): '`Accelerator(mixed_precision="bf16")`',
    ("accelerate", "s04_compile"): '`Accelerator(dynamo_backend="inductor")`',
}
SMALL_VOCABULARY = 1024  # below it the last matmul is too small for its tiles to matter


def is_of_the_ladder(script):
    """Tell whether a script lies beside the stages, as a stage or a thirteenth one, and takes their flags."""
    return script.endswith(".py") and Path(script).resolve().parent == ROOT / "stages"


def folder_of(script):
    """Return the folder in which a script runs: the one that the reader is in, or its own where it lies outside of it.

    nanoGPT's train.py, for one, reads files of its own folder by their names alone. A stage reads none.
    """
    here, home = Path.cwd(), Path(script).resolve().parent
    return here if home.is_relative_to(here) or is_of_the_ladder(script) else home


def words_on_techniques(techniques):
    """Return (what a watched script has of the ladder, what it lacks, remarks), two texts and a list of texts.

    techniques: what find_techniques() returned. A remark says why a technique does nothing, or what is not known.
    """
    has, lacks = has_and_lacks(techniques)
    autocast, weights = techniques["autocast"], techniques["weights"]
    remarks = []
    if weights != "float32":
        remarks.append(f"its weights are {weights}, so that autocast has nothing to do")
    elif autocast and not techniques["enters_autocast"]:
        remarks.append(f"it computes in {autocast} without autocast, as by a policy of FSDP")
    if techniques["emulated"]:
        remarks.append(f"this device has no units for {autocast}, and is slow in it")
    if techniques["sdpa"] == "math":
        remarks.append("its scaled_dot_product_attention takes no flash kernel here, as with dropout on a CPU")
    if not techniques["profiled"]:
        remarks.append(f"its operations were not looked at, attention among them: {techniques['unseen']}")
    words_on_has = names_of(has) or "nothing of the ladder"
    words_on_lacks = names_of(lacks) or "nothing of the ladder that this machine could use"
    return words_on_has, words_on_lacks, remarks


def names_of(stages):
    """Return the techniques of some Stages and where they are in the ladder, in words."""
    return ", ".join(f"{stage.technique} ({stage.short})" for stage in stages)


def has_and_lacks(techniques):
    """Return (has, lacks) of a watched script, two lists of Stages.

    techniques: what find_techniques() returned. What would do nothing on this machine, and what was not seen, is in
    neither list. Clipping, for one, makes no step faster, so a script may have it, and never lacks it.
    """
    machine = techniques["machine"]
    has_float32 = techniques["weights"] == "float32"
    can_use_tf32 = machine["tf32"] and has_float32
    can_use_autocast = machine["amp_dtype"] != "float32" and has_float32
    rows = techniques["vocabulary"] or 0
    has_large_vocabulary = rows >= SMALL_VOCABULARY
    has_slow_attention = techniques["attention"] and techniques["sdpa"] is None
    table = {  # {stage: (whether the script uses its technique, whether it would be faster by it)}
        "s02_tf32": (techniques["tf32"] and can_use_tf32, can_use_tf32),
        "s03_bf16": (techniques["autocast"] is not None and has_float32, can_use_autocast),
        "s04_compile": (techniques["compile"], machine["compile_problem"] is None),
        "s05_flash": (has_flash_attention(techniques), has_slow_attention),
        "s06_vocab": (has_large_vocabulary and rows % 64 == 0, has_large_vocabulary),
        "s07_clip": (techniques["clips"], False),
        "s08_cosine": (techniques["schedules"], False),
        "s09_decay": (techniques["groups"], False),
        "s10_fused": (techniques["fused"], techniques["fused"] is not None),
        "s11_accum": (techniques["accum"] > 1, False),
        "s12_ddp": (techniques["ddp"], False),
    }
    has, lacks = [], []
    for stage in ladder.STAGES:
        is_used, would_help = table.get(stage.name, (False, False))
        if is_used:
            has.append(stage)
        elif would_help:
            lacks.append(stage)
    return has, lacks


def has_flash_attention(techniques):
    """Tell whether a watched script's attention ran as one kernel."""
    return techniques["sdpa"] not in (None, "math")


def what_to_type(techniques, stage):
    """Return what adds the technique of a Stage to a script, in markdown: a line, or a framework's flag."""
    if techniques is None:  # it did not run
        return stage.line
    call = (techniques["framework"], stage.name)
    if call in IN_FRAMEWORK:
        return IN_FRAMEWORK[call]
    if stage.name == "s10_fused":
        return f"`{techniques['optimizer']}(..., fused=True)`"
    return stage.line


def uses(techniques, name):
    """Tell whether a watched script used what "+NAME" adds from outside. techniques: as find_techniques() returns."""
    if name == "tf32":  # the flag alone counts, since ROCm's libraries may choose another kernel by it
        return techniques["tf32"]
    has, _ = has_and_lacks(techniques)
    return ladder.ADDED[name] in has


def words_on_missing(techniques, name):
    """Return why "+NAME" is not seen in a script to which it was added."""
    reason = techniques["failed"].get(name, "the script chooses otherwise, or it changes nothing here")
    return f"+{name} took no effect: {reason}"


def words_on_stage(stage, techniques, header):
    """Return what the technique of a Stage does on this machine, in words, or "" where nothing is to be said.

    techniques, header: of the record of its run.
    """
    machine, settings = techniques["machine"], header["settings"]
    match stage.name:
        case "s02_tf32":
            return "active" if machine["tf32"] else "this device has no TF32 units"
        case "s03_bf16" if techniques["autocast"] == "float16":
            return "active: float16, loss scaled"
        case "s03_bf16" if techniques["autocast"]:
            return f"active: {techniques['autocast']}"
        case "s03_bf16" if machine["amp_dtype"] == "float32":
            return f"this {header['environment']['device']} has no 16-bit arithmetic, so float32 stays"
        case "s03_bf16":
            return "float32 was asked for"
        case "s04_compile" if techniques["compile"]:
            return "active"
        case "s04_compile" if machine["compile_problem"]:
            return f"left out, {machine['compile_problem']}"
        case "s04_compile":
            return "nothing was compiled"
        case "s05_flash" if techniques["sdpa"] == "math":
            return "no kernel for it here: PyTorch falls back on matmuls"
        case "s05_flash" if techniques["sdpa"]:
            return f"active: the {techniques['sdpa']} kernel"
        case "s11_accum" if settings["accum"] == 1:
            return "one micro-batch per step"
        case "s11_accum":
            return f"{settings['accum']} micro-batches per step"
        case "s12_ddp" if settings["world_size"] == 1:
            return "one process: what DDP itself costs"
    return "for the loss, not for speed" if stage.for_the_loss else ""


def work_of(techniques, header):
    """Return the Work of a GPT's micro-batch, from what its step used. None for a model that is no GPT.

    techniques, header: of the record of a run.
    """
    settings = header["settings"]
    if not header["shape"]:
        return None
    amp_dtype = techniques["autocast"] or techniques["weights"]
    in_tf32 = amp_dtype == "float32" and techniques["tf32"] and techniques["machine"]["tf32"]
    update = FUSED_ADAMW if techniques["fused"] else ADAMW
    if techniques["clips"]:
        update += CLIPPING
    if amp_dtype == "float16":
        update += UNSCALING
    if techniques["ddp"]:
        update += BUCKETS
    return Work(
        header["shape"],
        settings["batch_size"],
        matmul_dtype="tf32" if in_tf32 else amp_dtype,
        on_cuda=header["environment"]["device"] == "cuda",
        compiled=techniques["compile"],
        flash=has_flash_attention(techniques),
        update=update,
        accum=settings["accum"] // settings["world_size"],  # of this rank
    )
