"""The arithmetic of a training step: its FLOPs, its passes over memory, and the seconds that they should take.

FLOPs are divided by the rate of a large matmul, bytes by the rate of a large copy. Nothing is fitted, and
no constant comes from a measurement, so that the same functions speak of an A100 by its datasheet and of
the reader's machine by the bench's probe. stages/README.md explains each count. Imports no torch.
"""

from dataclasses import dataclass

# A large tensor's numbers are narrow (in autocast's dtype), wide (in float32), or in the dtype in which
# autocast computes a softmax: float32 on CUDA, that of its input on a CPU.
NARROW, WIDE, SOFTMAX = "narrow", "wide", "softmax"
WIDE_BYTES = 4
NARROW_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Operation:
    """What one kernel reads and writes for each number of a large tensor. The FLOPs of a matmul are counted elsewhere.

    reads, writes: NARROW, WIDE or SOFTMAX for each. is_cast: it changes the dtype and nothing else, so that
    it does not run where both are the same.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    is_cast: bool = False


# What PyTorch runs one by one, and below each what a compiler leaves of it: a fused kernel reads each
# tensor that comes in once and writes each one that goes out once. The forward comes first, then the
# backward.
EAGER_SCORES = (
    Operation("divide by the root of head_dim", (NARROW,), (NARROW,)),
    Operation("mask: copy, and fill the copy", (NARROW, NARROW), (NARROW, NARROW)),
    Operation("cast for the softmax", (NARROW,), (SOFTMAX,), is_cast=True),
    Operation("softmax", (SOFTMAX,), (SOFTMAX,)),
    Operation("cast back", (SOFTMAX,), (NARROW,), is_cast=True),
    Operation("backward of the cast back", (NARROW,), (SOFTMAX,), is_cast=True),
    Operation("backward of the softmax", (SOFTMAX, SOFTMAX), (SOFTMAX,)),
    Operation("backward of the cast for the softmax", (SOFTMAX,), (NARROW,), is_cast=True),
    Operation("backward of the mask: copy, and fill the copy", (NARROW, NARROW), (NARROW, NARROW)),
    Operation("backward of the division", (NARROW,), (NARROW,)),
)
FUSED_SCORES = (
    Operation("divide, mask, softmax", (NARROW,), (NARROW,)),
    Operation("backward of all three", (NARROW, NARROW), (NARROW,)),
)
# In the forward one matmul writes the scores and one reads them. In the backward one writes their gradient and three
# read the weights or that gradient.
MATMULS_OF_SCORES = (
    Operation("q k^T", (), (NARROW,)),
    Operation("weights v", (NARROW,), ()),
    Operation("backward, gradient of v", (NARROW,), ()),
    Operation("backward, gradient of the weights", (), (NARROW,)),
    Operation("backward, gradient of q", (NARROW,), ()),
    Operation("backward, gradient of k", (NARROW,), ()),
)
EAGER_LOGITS = (
    Operation("cast to float32", (NARROW,), (WIDE,), is_cast=True),
    Operation("log_softmax", (WIDE,), (WIDE,)),
    Operation("backward of nll_loss", (), (WIDE,)),
    Operation("backward of log_softmax", (WIDE, WIDE), (WIDE,)),
    Operation("backward of the cast", (WIDE,), (NARROW,), is_cast=True),
)
FUSED_LOGITS = (
    Operation("loss", (NARROW,), ()),
    Operation("backward of the loss", (NARROW,), (NARROW,)),
)
EAGER_RESIDUAL = (
    Operation("add to the residual stream", (WIDE, NARROW), (WIDE,)),
    Operation("LayerNorm", (WIDE,), (WIDE,)),
    Operation("cast for the matmul", (WIDE,), (NARROW,), is_cast=True),
    Operation("backward of the cast", (NARROW,), (WIDE,), is_cast=True),
    Operation("backward of LayerNorm", (WIDE, WIDE), (WIDE,)),
    Operation("backward of the addition", (WIDE, WIDE), (WIDE,)),
    Operation("backward, cast for the matmul", (WIDE,), (NARROW,), is_cast=True),
)
FUSED_RESIDUAL = (
    Operation("add, LayerNorm, cast", (WIDE, NARROW), (WIDE, NARROW)),
    Operation("backward of all three", (NARROW, WIDE, WIDE), (WIDE, NARROW)),
)
GELU = (  # alone between two matmuls, so that there is nothing to fuse it with
    Operation("GELU", (NARROW,), (NARROW,)),
    Operation("backward of GELU", (NARROW, NARROW), (NARROW,)),
)
WEIGHT_CASTS = (  # autocast casts each weight for its matmul, and the weight's gradient back
    Operation("cast a weight", (WIDE,), (NARROW,), is_cast=True),
    Operation("backward, cast its gradient", (NARROW,), (WIDE,), is_cast=True),
)

# How many numbers of a parameter an update reads or writes. In single operations: 2 to decay the weight, 3
# for the first moment, 2 and 3 for the second, 2 for its root, 2 for its correction, 2 for eps, 4 for the
# weight.
UPDATE_IN_SINGLE_OPERATIONS = 2 + 3 + 2 + 3 + 2 + 2 + 2 + 4
UPDATE_IN_ONE_KERNEL = 4 + 3  # reads weight, gradient and two moments, writes all but the gradient
CLIPPING = 3  # reads each gradient for the norm, reads it again, writes it scaled
ADDING_A_GRADIENT = 3  # reads the sum so far and the new gradient, writes the sum
UNSCALING = 2  # float16 alone: reads each gradient, and writes it without the loss's factor
BUCKETS = 4  # reads and writes each gradient on its way into a bucket, and on its way back

# Attention's matmuls take so many times L B T^2 C FLOPs. Explicit attention has two matmuls in the forward
# and four in the backward, of 2 FLOPs each. Flash attention computes the scores again in the backward,
# which makes seven matmuls, and leaves out the half of the scores that lies in the future.
EXPLICIT_ATTENTION_FLOPS = 12
FLASH_ATTENTION_FLOPS = 7


@dataclass(frozen=True)
class Work:
    """What one micro-batch of one process has to do, forward, backward and its share of the update.

    shape: a dict with n_layer, n_head, n_embd and vocab_size. batch_size, seq_len: B and T of the
    micro-batch. matmul_dtype: "float32", "tf32", "bfloat16" or "float16". amp_dtype: of autocast, "float32"
    where it is off. softmax_is_wide: whether autocast computes a softmax in float32. is_compiled: the
    operations between matmuls are fused. is_flash: attention is one kernel. clips: the gradients' norm is
    bounded. update_passes: numbers of a parameter that AdamW reads or writes. accum: micro-batches for each
    update. has_buckets: DDP copies the gradients.
    """

    shape: dict
    batch_size: int
    seq_len: int
    matmul_dtype: str = "float32"
    amp_dtype: str = "float32"
    softmax_is_wide: bool = False
    is_compiled: bool = False
    is_flash: bool = False
    clips: bool = False
    update_passes: int = UPDATE_IN_SINGLE_OPERATIONS
    accum: int = 1
    has_buckets: bool = False


@dataclass(frozen=True)
class Rates:
    """How fast a machine is. matmul: {dtype: FLOP/s} of a large matmul. copy: bytes/s, read and written."""

    matmul: dict
    copy: float


def flops_per_token(shape, seq_len):
    """FLOPs of one token's training step, forward and backward: 6 (12 L C^2 + V C) + 12 L C T.

    shape: a dict with n_layer (L), n_embd (C) and vocab_size (V, unpadded: GPT-2 asks for no work on
    padding). seq_len: T. Two FLOPs for each multiply-add of every matrix, once forward and twice backward,
    and attention counted in full although half of it is masked: the convention of PaLM (arXiv:2204.02311,
    appendix B).
    """
    L, C = shape["n_layer"], shape["n_embd"]
    return weight_flops_per_token(shape) + EXPLICIT_ATTENTION_FLOPS * L * C * seq_len


def weight_flops_per_token(shape):
    """FLOPs of one token in the matmuls with weights: 6 (12 L C^2 + V C)."""
    L, C, V = shape["n_layer"], shape["n_embd"], shape["vocab_size"]
    return 6 * (12 * L * C**2 + V * C)


def weight_bytes(shape, block_size):
    """Bytes of a GPT's weights in float32, or of its gradient. Biases and LayerNorms, 0.1 %, are left out."""
    L, C, V = shape["n_layer"], shape["n_embd"], shape["vocab_size"]
    return WIDE_BYTES * (12 * L * C**2 + (V + block_size) * C)


def s01_bytes(batch_size):
    """The most bytes that the tensors of s01 hold at gpt2 and T 1024.

    1.5 GB are the weights with AdamW's moments. A sequence takes 1.83 GB, in float32: 16 T C numbers and a
    T x T softmax per head in each of 12 layers, and three copies of the logits.
    """
    return 1.5e9 + 1.83e9 * batch_size


def bytes_of_number(kind, work):
    """The bytes of a NARROW, WIDE or SOFTMAX number."""
    if kind == WIDE or (kind == SOFTMAX and work.softmax_is_wide):
        return WIDE_BYTES
    return NARROW_BYTES[work.amp_dtype]


def bytes_of_operation(operation, work):
    """The bytes that an operation reads and writes for each number of its tensor."""
    read = sum(bytes_of_number(kind, work) for kind in operation.reads)
    written = sum(bytes_of_number(kind, work) for kind in operation.writes)
    if operation.is_cast and read == written:
        return 0
    return read + written


def bytes_of(operations, work):
    """The bytes that several operations read and write for each number of their tensor."""
    return sum(bytes_of_operation(operation, work) for operation in operations)


def has_rate_for(work, rates):
    """Whether the rates tell how fast a micro-batch's matmuls are."""
    return work.matmul_dtype in rates.matmul and work.amp_dtype in NARROW_BYTES


def seconds_of_parts(work, rates):
    """{part of a micro-batch: seconds} that its FLOPs and its bytes take at the rates of a machine.

    The parts are those in which --profile shows where the time went. "matmuls" are those with weights.
    "attention" is the matmuls of explicit attention, or the flash kernel. "softmax and mask" is all else
    that explicit attention does.
    """
    parts = {
        "matmuls": weight_flops(work) / rates.matmul[work.matmul_dtype],
        "attention": attention_seconds(work, rates),
        "softmax and mask": 0.0,
        "pointwise": pointwise_bytes(work) / rates.copy,
        "loss": loss_bytes(work) / rates.copy,
        "optimizer": optimizer_bytes(work) / rates.copy,
    }
    if not work.is_flash:
        operations = FUSED_SCORES if work.is_compiled else EAGER_SCORES
        parts["softmax and mask"] = scores(work) * bytes_of(operations, work) / rates.copy
    return parts


def seconds(work, rates):
    """The seconds that all parts of a micro-batch take."""
    return sum(seconds_of_parts(work, rates).values())


def weight_flops(work):
    """FLOPs of a micro-batch in the matmuls with weights."""
    return work.batch_size * work.seq_len * weight_flops_per_token(work.shape)


def attention_seconds(work, rates):
    """Seconds of attention's matmuls.

    Those of explicit attention take what is longer, their FLOPs or moving the scores: with head_dim 64 each
    number of the scores is moved for 128 FLOPs, which is little for a GPU.
    """
    L, C = work.shape["n_layer"], work.shape["n_embd"]
    flops_per_count = L * work.batch_size * work.seq_len**2 * C
    rate = rates.matmul[work.matmul_dtype]
    if work.is_flash:
        return FLASH_ATTENTION_FLOPS * flops_per_count / rate
    moving = scores(work) * bytes_of(MATMULS_OF_SCORES, work) / rates.copy
    return max(EXPLICIT_ATTENTION_FLOPS * flops_per_count / rate, moving)


def scores(work):
    """How many attention scores a micro-batch has, in all layers: L B n_head T^2."""
    return work.shape["n_layer"] * work.batch_size * work.shape["n_head"] * work.seq_len**2


def pointwise_bytes(work):
    """Bytes that GELU, LayerNorm, the residual stream and autocast's copies of the weights move."""
    L, C, V = work.shape["n_layer"], work.shape["n_embd"], work.shape["vocab_size"]
    tokens = work.batch_size * work.seq_len
    hidden = L * tokens * 4 * C
    residual = (2 * L + 1) * tokens * C  # two in each layer, and the last LayerNorm with the sum of the embeddings
    weights = 12 * L * C**2 + V * C  # of matmuls
    operations = FUSED_RESIDUAL if work.is_compiled else EAGER_RESIDUAL
    moved = hidden * bytes_of(GELU, work)
    moved += residual * bytes_of(operations, work)
    moved += weights * bytes_of(WEIGHT_CASTS, work)
    return moved


def loss_bytes(work):
    """Bytes that the loss moves: it reads and writes tensors as large as the logits."""
    logits = work.batch_size * work.seq_len * work.shape["vocab_size"]
    operations = FUSED_LOGITS if work.is_compiled else EAGER_LOGITS
    return logits * bytes_of(operations, work)


def optimizer_bytes(work):
    """Bytes that a micro-batch's share of the update moves: AdamW, clipping, DDP's buckets and the like."""
    once_in_a_step = work.update_passes
    if work.clips:
        once_in_a_step += CLIPPING
    if work.amp_dtype == "float16":
        once_in_a_step += UNSCALING
    if work.has_buckets:
        once_in_a_step += BUCKETS
    added = ADDING_A_GRADIENT * (work.accum - 1)  # the first micro-batch adds to nothing
    return weight_bytes(work.shape, work.seq_len) * (once_in_a_step + added) / work.accum
