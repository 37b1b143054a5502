"""The arithmetic of a training step: its FLOPs, its passes over memory, and the seconds that they should take.

FLOPs are divided by the rate of a large matmul, bytes by the rate of a large copy. Nothing is fitted, so the same
functions work with the rates of a datasheet and with those that the bench's probe measured. BYTES_ON_CUDA has three
corrections, which profiles of an H100 showed. stages/arithmetic.md explains the counts.
"""

from dataclasses import dataclass

from data import VOCAB
from model import SIZES

PADDED_VOCAB = 50304  # of s06: GPT-2's ids and padding
AUTOCAST_DTYPES = ("bfloat16", "float16")  # those in which autocast multiplies


# The bytes that all operations but matmuls read and write for each number of a tensor: in float32 (one operation after
# the other, fused by a compiler), and then the same two under autocast. stages/arithmetic.md adds them up.
BYTES = {
    "scores": ((68, 20), (34, 10)),
    "logits": ((24, 12), (36, 6)),
    "residual": ((44, 36), (60, 28)),
    "gelu": ((20, 20), (10, 10)),
    "projections": ((116, 60), (58, 30)),
    "casts": ((0, 0), (12, 12)),
}
# On CUDA the backward of a softmax makes three passes more, autocast computes the softmax in float32, and a compiler
# leaves the cast of LayerNorm's gradient as a kernel of its own.
BYTES_ON_CUDA = BYTES | {"scores": ((80, 20), (80, 10)), "residual": ((44, 36), (60, 32))}

# How many numbers an update reads or writes for each parameter.
ADAMW = 20  # in single operations: 2 decay the weight, 3 + 5 update the moments, 6 make the divisor, 4 the weight
FUSED_ADAMW = 7  # reads weight, gradient and two moments, writes all but the gradient
CLIPPING = 3  # reads each gradient for the norm, reads it again, writes it scaled
UNSCALING = 2  # float16 alone: reads each gradient, and writes it without the loss's factor
ADDING_A_GRADIENT = 3  # reads the sum so far and the new gradient, writes the sum
BUCKETS = 4  # reads and writes each gradient on its way into a bucket, and on its way back

# FLOPs of attention's matmuls, in units of L B T^2 C. Explicit attention has two in the forward and four in the
# backward, of 2 FLOPs each. Flash attention computes the scores again in the backward, which makes seven, and leaves
# out the half of the scores that lies in the future.
EXPLICIT_ATTENTION_FLOPS = 12
FLASH_ATTENTION_FLOPS = 7


@dataclass(frozen=True)
class Work:
    """What one micro-batch of one process has to do, forward, backward and its share of the update.

    The defaults are those of s01. shape: a dict with n_layer, n_head, n_embd, vocab_size and seq_len. batch_size: B of
    the micro-batch. matmul_dtype: "float32", "tf32" or, under autocast, "bfloat16" or "float16". on_cuda: whether
    CUDA's kernels run. compiled: by torch.compile. flash: whether attention is one kernel. update: numbers that an
    update reads and writes for each parameter. accum: micro-batches of this process for each update.
    """

    shape: dict
    batch_size: int
    matmul_dtype: str = "float32"
    on_cuda: bool = False
    compiled: bool = False
    flash: bool = False
    update: int = ADAMW
    accum: int = 1

    @property
    def tokens(self):
        """The tokens of the micro-batch."""
        return self.batch_size * self.shape["seq_len"]


# Seconds


def seconds_per_token(work, rates):
    """Return the seconds per token that all parts of a micro-batch take, or None if a rate is not known.

    A prediction is the ratio of two of these sums.
    """
    if work.matmul_dtype not in rates["peak"]:
        return None
    return sum(seconds_of_parts(work, rates).values()) / work.tokens


def seconds_of_parts(work, rates):
    """Return {part of a micro-batch: seconds} that its FLOPs and its bytes take.

    rates: of a machine, a dict as measure_rates() returns it: "peak" is {dtype: FLOP/s}, and "copy" bytes per second.
    "matmuls" are those with weights. "attention" is the matmuls of explicit attention, or the flash kernel. "softmax
    and mask" is all else that explicit attention does.
    """
    moved = bytes_moved(work)
    pointwise = moved["residual"] + moved["gelu"] + moved["projections"] + moved["casts"]
    return {
        "matmuls": work.tokens * 6 * matmul_weights(work.shape) / rates["peak"][work.matmul_dtype],
        "attention": attention_seconds(work, rates),
        "softmax and mask": moved["scores"] / rates["copy"],
        "pointwise": pointwise / rates["copy"],
        "loss": moved["logits"] / rates["copy"],
        "optimizer": update_bytes(work) / rates["copy"],
    }


def attention_seconds(work, rates):
    """Return the seconds of attention's matmuls.

    Explicit attention takes the longer of two times: that of its FLOPs, and that of moving the scores. With head_dim 64
    there are 128 FLOPs for each number of the scores that is moved, which is little for a GPU.
    """
    unit = work.shape["n_layer"] * work.tokens * work.shape["seq_len"] * work.shape["n_embd"]
    rate = rates["peak"][work.matmul_dtype]
    if work.flash:
        return FLASH_ATTENTION_FLOPS * unit / rate
    bytes_of_score = 2 if work.matmul_dtype in AUTOCAST_DTYPES else 4
    moved = 6 * bytes_of_score * numbers_in(work)["scores"]  # two of its six matmuls write the scores, four read them
    return max(EXPLICIT_ATTENTION_FLOPS * unit / rate, moved / rates["copy"])


# Bytes


def bytes_moved(work):
    """Return {tensor: bytes that a micro-batch reads and writes for it}, without matmuls."""
    return {tensor: numbers * bytes_per_number(tensor, work) for tensor, numbers in numbers_in(work).items()}


def numbers_in(work):
    """Return {tensor: how many numbers a micro-batch has in it, over all layers}."""
    L, H, C = work.shape["n_layer"], work.shape["n_head"], work.shape["n_embd"]
    return {
        "scores": L * H * work.tokens * work.shape["seq_len"],
        "logits": work.tokens * work.shape["vocab_size"],
        "residual": (2 * L + 1) * work.tokens * C,  # two in each layer, and the last LayerNorm with the embeddings
        "gelu": 4 * L * work.tokens * C,
        "projections": L * work.tokens * C,  # copies of q, k, v and y, the gradient of the three, bias gradients
        "casts": matmul_weights(work.shape),
    }


def bytes_per_number(tensor, work):
    """Return the bytes that a micro-batch reads and writes for each number of a tensor of BYTES."""
    if work.flash and tensor == "scores":  # they stay inside the kernel
        return 0
    in_float32, under_autocast = BYTES_ON_CUDA[tensor] if work.on_cuda else BYTES[tensor]
    one_by_one, fused = under_autocast if work.matmul_dtype in AUTOCAST_DTYPES else in_float32
    needs_no_copies = work.flash and tensor == "projections"  # the kernel reads q, k and v in place
    return fused if work.compiled or needs_no_copies else one_by_one


def update_bytes(work):
    """Return the bytes of a micro-batch's share of the update: AdamW, clipping, DDP's buckets and the like.

    Biases and LayerNorms, 0.1 % of the weights, are left out.
    """
    weights = matmul_weights(work.shape) + work.shape["seq_len"] * work.shape["n_embd"]  # with those of the positions
    added = ADDING_A_GRADIENT * (work.accum - 1)  # the first micro-batch adds to nothing
    return 4 * weights * (work.update + added) / work.accum


# FLOPs and shapes


def flops_per_token(shape):
    """Return the FLOPs of one token's training step, forward and backward: 6 (12 L C^2 + V C) + 12 L C T.

    shape: a dict with n_layer (L), n_embd (C), seq_len (T) and vocab_size (V, unpadded: GPT-2 asks for no work on
    padding). Two FLOPs for each multiply-add of every matrix, once forward and twice backward, and attention counted in
    full although half of it is masked: the convention of PaLM (arXiv:2204.02311, appendix B).
    """
    L, C, T = shape["n_layer"], shape["n_embd"], shape["seq_len"]
    return 6 * matmul_weights(shape) + EXPLICIT_ATTENTION_FLOPS * L * C * T


def matmul_weights(shape):
    """Return how many weights a GPT's matmuls have: 12 L C^2 + V C."""
    L, C, V = shape["n_layer"], shape["n_embd"], shape["vocab_size"]
    return 12 * L * C**2 + V * C


def shape_of(model, seq_len):
    """Return the shape of a GPT by its config, for sequences of seq_len tokens; None if the config lacks GPT-2's names.

    It is a dict with vocab_size, n_layer, n_head, n_embd and seq_len. A vocabulary of 50304 counts as GPT-2's, since
    s06 pads GPT-2's to that.
    """
    config = getattr(model, "config", None)
    shape = {name: getattr(config, name, None) for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
    if not all(isinstance(number, int) for number in shape.values()):
        return None
    if shape["vocab_size"] == PADDED_VOCAB:
        shape["vocab_size"] = VOCAB
    return shape | {"seq_len": seq_len}


def shape_name(shape):
    """Return the name of a shape in SIZES, as "gpt2"; for any other shape its layers, heads and channels in words."""
    for name, size in SIZES.items():
        if all(shape[key] == number for key, number in size.items()):
            return name
    return f"{shape['n_layer']} layers of {shape['n_head']} heads, {shape['n_embd']} wide"
