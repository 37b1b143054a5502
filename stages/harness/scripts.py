"""A training script of the reader's own: where it runs, what it has of the ladder, and what it has to compute.

What a script has is a dict of techniques, which watch/techniques.py finds and describes.
"""

import os
import re
from pathlib import Path

from . import ladder
from .arithmetic import ADAMW, FUSED_ADAMW, Work
from .common import ROOT

# What is typed in a framework, which has no line of its own for it
IN_FRAMEWORK = {
    "lightning": {
        "s02_tf32": '`torch.set_float32_matmul_precision("high")`',
        "s03_bf16": '`Trainer(precision="bf16-mixed")`',
        "s04_compile": "`Trainer.fit(torch.compile(model))`",
    },
    "transformers": {
        "s02_tf32": "`--tf32 True`",
        "s03_bf16": "`--bf16 True`",
        "s04_compile": "`--torch_compile True`",
        "s05_flash": '`from_pretrained(..., attn_implementation="sdpa")`',
        "s10_fused": "`--optim adamw_torch_fused`",
    },
    "accelerate": {
        "s03_bf16": '`Accelerator(mixed_precision="bf16")`',
        "s04_compile": '`Accelerator(dynamo_backend="inductor")`',
    },
}
# Techniques that a step is not slower without, and their keys in the dict of techniques
FOR_THE_LOSS = {"s07_clip": "clips", "s08_cosine": "schedules", "s09_decay": "groups"}
SMALL_VOCABULARY = 1024  # below it the last matmul is too small for its tiles to matter


def logs_by_itself(script):
    """Tell whether a script is a stage or a copy of one: it imports harness, and has none of its own beside it."""
    if not os.path.isfile(script):  # Path.is_file() raises for a long word
        return False
    path = Path(script)
    folder = path.resolve().parent
    if folder != ROOT / "stages" and (folder / "harness").exists():
        return False
    text = path.read_text("utf-8", "replace")
    return re.search(r"^(from|import) harness\b", text, re.MULTILINE) is not None


def folder_of(script):
    """Return the folder in which a script runs: the one that the reader is in, or its own where it lies outside of it.

    nanoGPT's train.py, for one, reads files of its own folder by their names alone.
    """
    here, home = Path.cwd(), Path(script).resolve().parent
    return here if home.is_relative_to(here) else home


def words_on_techniques(techniques):
    """Return (what a watched script has of the ladder, what it lacks, remarks), two texts and a list of texts.

    techniques: what find_techniques() returned.
    """
    has, lacks, remarks = has_and_lacks(techniques)
    words_on_has = names_of(has) or "nothing of the ladder"
    words_on_lacks = names_of(lacks) or "nothing of the ladder that this machine could use"
    if not techniques["profiled"]:
        remarks.append(f"its operations were not looked at, attention among them: {techniques['unseen']}")
    return words_on_has, words_on_lacks, remarks


def names_of(stages):
    """Return the techniques of some Stages and where they are in the ladder, in words."""
    return ", ".join(f"{stage.technique} ({stage.short})" for stage in stages)


def has_and_lacks(techniques):
    """Return (has, lacks, remarks) of a watched script: two lists of Stages, and one of words.

    techniques: what find_techniques() returned. What would do nothing on this machine, or can't be told, is in neither
    list; a remark says why where that is not plain.
    """
    machine = techniques["machine"]
    has_float32 = techniques["weights"] == "float32"
    has, lacks, remarks = [], [], []
    for stage in ladder.STAGES:
        match stage.name:
            case "s02_tf32":
                used, useful = techniques["tf32"], machine["tf32"] and has_float32
                used = used and useful
            case "s03_bf16":
                used, useful = techniques["autocast"], machine["amp_dtype"] != "float32" and has_float32
                if techniques["emulated"]:
                    remarks.append(f"this device has no units for {techniques['autocast']}, and is slow in it")
                if used and not techniques["enters_autocast"]:
                    remarks.append(f"it computes in {techniques['autocast']} without autocast, as by a policy of FSDP")
                if not has_float32:
                    used = False
                    remarks.append(f"its weights are {techniques['weights']}, so that autocast has nothing to do")
            case "s04_compile":
                used, useful = techniques["compile"], machine["compile"]
            case "s05_flash":
                used, useful = flash_attention_of(techniques, remarks)
            case "s06_vocab":
                rows = techniques["vocabulary"] or 0
                useful = rows >= SMALL_VOCABULARY
                used = useful and rows % 64 == 0
            case "s07_clip" | "s08_cosine" | "s09_decay":
                used, useful = techniques[FOR_THE_LOSS[stage.name]], False
            case "s10_fused":
                used, useful = techniques["fused"], techniques["fused"] is not None
            case "s11_accum":
                used, useful = techniques["accum"] > 1, False
            case _:
                continue
        if used:
            has.append(stage)
        elif useful:
            lacks.append(stage)
    return has, lacks, remarks


def flash_attention_of(techniques, remarks):
    """Return (whether a script has flash attention, whether it lacks it). A remark says why it can't be told."""
    kernel = techniques["sdpa"]
    if kernel not in (None, "math"):
        return True, True
    if kernel == "math" and techniques["drops"]:
        remarks.append("its attention has dropout, for which scaled_dot_product_attention has no flash kernel here")
    if kernel is None and techniques["compile"] and techniques["drops"]:
        remarks.append("flash attention can't be told: dropout in a compiled attention leaves no kernel to be seen")
        return False, False
    return False, techniques["attention"]


def what_to_type(techniques, stage):
    """Return what adds the technique of a Stage to a watched script, in markdown: a line, or a framework's flag."""
    flag = IN_FRAMEWORK.get(techniques["framework"], {}).get(stage.name)
    if flag:
        return flag
    if stage.name == "s10_fused":
        return f"`{techniques['optimizer']}(..., fused=True)`"
    return stage.line


def uses(techniques, name):
    """Tell whether a watched script used what "+NAME" adds from outside. techniques: as find_techniques() returns."""
    match name:
        case "bf16":
            return techniques["autocast"] is not None and techniques["weights"] == "float32"
        case "fused":
            return techniques["fused"] is True
        case _:
            return techniques[name]


def with_added(techniques, names):
    """Return the techniques of a script to which "+NAME" was added for each of some names."""
    added = {}
    for name in names:
        if name == "bf16":
            added["autocast"] = "bfloat16"
        else:
            added[name] = True
    return techniques | added


def words_on_missing(techniques, name):
    """Return why "+NAME" is not seen in a script to which it was added."""
    reason = techniques["failed"].get(name) or why_not_seen(techniques, name)
    return f"+{name} could not be added: {reason}"


def why_not_seen(techniques, name):
    """Return why a technique that did not fail is not seen in a script to which it was added."""
    if name == "tf32":
        return "the script turns it off"
    if name == "bf16" and techniques["weights"] != "float32":
        return f"its weights are {techniques['weights']}, which autocast leaves as they are"
    if name == "bf16":
        return "no forward of a module was seen in training"
    if name == "compile":
        return "no module ran compiled"
    if techniques["fused"] is None:
        return f"its optimizer {techniques['optimizer']} has none"
    return "the script asks for another update"


def work_of(techniques, shape, batch_size, micro_batches, on_cuda):
    """Return the Work of a watched GPT's micro-batch, from what its step used."""
    amp_dtype = techniques["autocast"] or techniques["weights"]
    matmul_dtype = amp_dtype
    if amp_dtype == "float32" and techniques["tf32"] and techniques["machine"]["tf32"]:
        matmul_dtype = "tf32"
    return Work(
        shape,
        batch_size,
        matmul_dtype=matmul_dtype,
        amp_dtype=amp_dtype,
        on_cuda=on_cuda,
        compiled=techniques["compile"],
        flash=techniques["sdpa"] not in (None, "math"),
        update=FUSED_ADAMW if techniques["fused"] else ADAMW,
        accum=micro_batches,
    )
