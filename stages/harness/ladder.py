"""The twelve stages in one table.

Whatever the code and the tests know about one stage beside its text stands in its row of STAGES: adding a stage
means adding its file, its row and its lesson. Imports no torch, because a table is drawn without it.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import arithmetic
from .arithmetic import Work

FOLDER = Path(__file__).resolve().parents[1]  # stages/
FOR_THE_LOSS = "for the loss, not the speed"
# The row above s01 on a CPU. It is no stage: it runs s01's text, in a process whose memory nobody has prepared.
PLAIN = "plain"
PLAIN_CHANGE = "s01 without the harness's memory settings"


@dataclass(frozen=True)
class Facts:
    """What the record of a run tells about its machine, for the functions below to judge a technique by.

    environment, settings, fallbacks: as in the record's header. warmup_s: seconds of the warm-up, or None where
    no step was counted. sdpa: the attention kernel that ran, such as "flash", or None. compile_cache: whether
    torch.compile found its graphs in its cache, "hit" or "miss", or None where nothing tells.
    """

    environment: dict
    settings: dict
    fallbacks: dict
    warmup_s: float | None = None
    sdpa: str | None = None
    compile_cache: str | None = None


@dataclass(frozen=True)
class Effect:
    """What a technique does on one machine: the table's words, and whether a step is that of the stage before."""

    note: str = ""
    no_op: bool = False


def no_words(facts):
    """The technique works on every machine, and there is nothing to say about it."""
    return Effect()


def loss_at_a_cost(facts):
    """The technique is for the loss, and a step does more work for it."""
    return Effect(FOR_THE_LOSS)


def loss_at_no_cost(facts):
    """The technique is for the loss, and a step does the same work as before.

    s08 sets another learning rate, s09 gives the same tensors to the optimizer in two groups.
    """
    return Effect(FOR_THE_LOSS, no_op=True)


def tf32(facts):
    """Without TF32 units the matmuls stay in float32, which is the program of the stage before."""
    if facts.environment["tf32"]:
        return Effect("active")
    return Effect("no-op: this device has no TF32 units", no_op=True)


def autocast(facts):
    """In float32, autocast and the loss scaling are off, which leaves the program of the stage before."""
    dtype = facts.settings["amp_dtype"]
    if dtype == "float32":
        reason = facts.fallbacks.get("amp_dtype", "float32 was asked for")
        return Effect(f"no-op: {reason}", no_op=True)
    if dtype == "float16":
        return Effect("active: float16, loss scaled")
    return Effect(f"active: {dtype}")


def compilation(facts):
    """Where nothing is compiled, the model runs operation by operation, as in the stage before."""
    if not facts.settings["compile"]:
        reason = facts.fallbacks.get("compile", "--no-compile was given")
        return Effect(f"fallback to eager: {reason}", no_op=True)
    if facts.warmup_s is None:
        return Effect()
    words = f"active: {facts.warmup_s:.0f} s of warm-up"
    if facts.compile_cache == "hit":
        words += ", found in the cache"
    return Effect(words)


def attention_kernel(facts):
    """PyTorch chooses the kernel, and not each one is a flash kernel."""
    if facts.sdpa is None:
        return Effect()
    return Effect(f"active: the {facts.sdpa} kernel ran")


def accumulation(facts):
    """A step is several micro-batches long, so that dt can't be compared with that of the stage before.

    A single one makes it the step of the stage before.
    """
    if facts.settings["accum"] == 1:
        return Effect("no-op: one micro-batch per step", no_op=True)
    return Effect(f"{facts.settings['accum']} micro-batches per step")


def ddp(facts):
    """A single process averages its gradients with nobody, and pays for the buckets all the same."""
    if facts.settings["world_size"] == 1:
        return Effect("one process: what DDP itself costs")
    return Effect()


def same_work(work, facts):
    """The technique changes nothing that FLOPs or bytes tell of."""
    return work


def work_in_tf32(work, facts):
    """The matmuls run on TF32 units, where there are any."""
    if facts.environment["tf32"]:
        return replace(work, matmul_dtype="tf32")
    return work


def work_in_autocast(work, facts):
    """The matmuls and what lies between them are in 16 bits, which takes casts."""
    dtype = facts.settings["amp_dtype"]
    if dtype == "float32":
        return work
    on_cuda = facts.environment["device"] == "cuda"
    return replace(work, matmul_dtype=dtype, amp_dtype=dtype, softmax_is_wide=on_cuda)


def compiled_work(work, facts):
    """What lies between two matmuls is fused, where anything is compiled."""
    return replace(work, is_compiled=facts.settings["compile"])


def flash_work(work, facts):
    """No score goes to memory, and none in the future is computed, unless PyTorch fell back on its matmuls."""
    return replace(work, is_flash=facts.sdpa != "math")


def clipped_work(work, facts):
    """The gradients are read for their norm, and scaled."""
    return replace(work, clips=True)


def fused_update(work, facts):
    """AdamW reads and writes each of its numbers once."""
    return replace(work, update_passes=arithmetic.UPDATE_IN_ONE_KERNEL)


def work_with_accumulation(work, facts):
    """One update for several micro-batches, whose gradients are added up. The ranks divide the micro-batches."""
    return replace(work, accum=max(1, facts.settings["accum"] // facts.settings["world_size"]))


def work_with_buckets(work, facts):
    """Each gradient is copied into a bucket, and back."""
    return replace(work, has_buckets=True)


@dataclass(frozen=True)
class Stage:
    """One row of the ladder.

    name: of its file, without ".py".
    budget: how many lines of code its diff adds to the stage before, and how many it removes, exactly.
    effect: maps the Facts of a run to the Effect of the technique on that machine.
    work: maps the Work of a micro-batch of the stage before, and the Facts of a run, to that of this stage.
    is_predictable: whether FLOPs and bytes tell what the technique is worth.
    for_the_loss: whether the technique is to change the loss; all others must leave it as it was.
    flag: the stages' flag that has an effect from here on.
    column: the figure beside the loss that the log shows from here on.
    modes: the modes of bench.py that run this stage where no other is named.
    takes_ranks: whether torchrun may start several processes of it.
    not_for: {device type: why that device can't run it}.
    """

    name: str
    budget: tuple[int, int] = (0, 0)
    effect: Callable[[Facts], Effect] = no_words
    work: Callable[[Work, Facts], Work] = same_work
    is_predictable: bool = True
    for_the_loss: bool = False
    flag: str | None = None
    column: str | None = None
    modes: tuple[str, ...] = ()
    takes_ranks: bool = False
    not_for: dict[str, str] = field(default_factory=dict)

    @property
    def short(self):
        """s05 for s05_flash."""
        return self.name.split("_")[0]


NO_GLOO_FOR_MPS = "not for mps: s12 averages gradients by gloo or nccl, which can't: pass --device cpu"

STAGES = (
    Stage("s01_baseline", modes=("memory",)),
    Stage("s02_tf32", (1, 0), tf32, work_in_tf32),
    Stage("s03_bf16", (5, 2), autocast, work_in_autocast, flag="amp_dtype", modes=("amp",)),
    Stage("s04_compile", (2, 0), compilation, compiled_work, flag="compile"),
    Stage("s05_flash", (1, 7), attention_kernel, flash_work, modes=("limit",)),
    Stage("s06_vocab", (1, 1), is_predictable=False, modes=("loss",)),
    Stage("s07_clip", (4, 2), loss_at_a_cost, clipped_work, for_the_loss=True, column="norm", modes=("loss",)),
    Stage("s08_cosine", (13, 2), loss_at_no_cost, for_the_loss=True, column="lr", modes=("loss",)),
    Stage("s09_decay", (5, 1), loss_at_no_cost, for_the_loss=True),
    Stage("s10_fused", (1, 1), work=fused_update),
    Stage("s11_accum", (7, 3), accumulation, work_with_accumulation, flag="accum", modes=("limit",)),
    Stage(
        "s12_ddp",
        (15, 3),
        ddp,
        work_with_buckets,
        modes=("scale",),
        takes_ranks=True,
        not_for={"mps": NO_GLOO_FOR_MPS},
    ),
)


def names():
    """The names of all stages, in ladder order."""
    return [stage.name for stage in STAGES]


def find(name):
    """The Stage of this name, or None for another script, such as a copy that a learner changes."""
    for stage in STAGES:
        if stage.name == name:
            return stage
    return None


def of_mode(mode):
    """The names of the stages that a mode of the bench runs where none is named."""
    return [stage.name for stage in STAGES if mode in stage.modes]


def follows(name, other):
    """Whether a stage stands directly above another in the ladder; False for names of no stage."""
    order = names()
    if name not in order or other not in order:
        return False
    return order.index(name) == order.index(other) + 1


def first_with(flag):
    """The first Stage in which a flag has an effect."""
    for stage in STAGES:
        if stage.flag == flag:
            return stage
    raise LookupError(f"no stage has the flag {flag}")


def is_used(flag, name):
    """Whether a flag has an effect in the stage of this name; False for a script that is no stage."""
    order = names()
    return name in order and order.index(name) >= order.index(first_with(flag).name)


def is_below(name, base):
    """Whether a stage stands below another one in the ladder, at any distance; False for names of no stage."""
    order = names()
    return name in order and base in order and order.index(name) > order.index(base)


def is_predictable_against(name, base):
    """Whether FLOPs and bytes tell what a stage is worth against one that stands above it; never against others."""
    if not is_below(name, base):
        return False
    order = names()
    techniques = STAGES[order.index(base) + 1 : order.index(name) + 1]
    return all(stage.is_predictable for stage in techniques)


def work_of(name, facts, shape):
    """The Work of a micro-batch of a stage on the machine of a run, or None for a script that is no stage.

    facts: of the run, whose settings have batch_size and seq_len. shape: the model's, a dict.
    """
    if name not in names():
        return None
    work = Work(shape, facts.settings["batch_size"], facts.settings["seq_len"])
    for stage in STAGES:
        work = stage.work(work, facts)
        if stage.name == name:
            break
    return work


def exists(name):
    """Whether there is a script of this name in stages/: a user's own may be gone, or on another machine."""
    return (FOLDER / f"{name}.py").exists()


def docstring_and_code(name):
    """The docstring of a script in stages/ and the code below it; two empty texts if there is no such file."""
    path = FOLDER / f"{name}.py"
    if not path.exists():
        return "", ""
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith('"""'):  # a reader's own script may have no docstring
        return "", text.strip()
    _, docstring, code = text.split('"""', 2)
    return docstring, code.strip()


def title(name):
    """The first line of a stage's docstring, such as "Stage 5 · flash: flash attention, no T x T matrix."."""
    docstring, _ = docstring_and_code(name)
    return docstring.split("\n")[0]


def change(name):
    """What a stage changes, by its title: "flash attention, no T x T matrix".

    For a user's script it is the whole title, or the name of the file where the title is that of a stage.
    """
    words = title(name)
    if find(name) is None:
        if not words or words in [title(stage) for stage in names()]:
            return f"{name}.py"
    else:
        _, words = words.split(": ", 1)
    return words.removesuffix(".")


def code_sha256(name):
    """The sha256 of a stage's code below its docstring, by which a record names what ran."""
    _, code = docstring_and_code(name)
    return hashlib.sha256(code.encode()).hexdigest()
