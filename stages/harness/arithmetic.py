"""The arithmetic of a training step: its FLOPs, its passes over memory, and the seconds that they should take.

FLOPs are divided by the rate of a large matmul, bytes by the rate of a large copy. Nothing is fitted, so the same
functions work with the rates of a datasheet and with those that the bench's probe measured. But BYTES_ON_CUDA adds
kernels that were missing until profiles of an H100 showed them. stages/arithmetic.md explains the counts.
"""

from dataclasses import dataclass
from typing import NamedTuple

from data import VOCAB
from model import SIZES

PADDED_VOCAB = 50304  # the rows of s06's logits, of which those past VOCAB are padding


class Bytes(NamedTuple):
    """The bytes that all operations but matmuls read and write for each number of a large tensor.

    one_by_one: by one operation after the other, as PyTorch runs them. fused: by a compiler's kernels.
    """

    one_by_one: int
    fused: int


# How to read a sum, by the residual stream. "add, LayerNorm; LayerNorm, add" are its operations: those of the forward
# before the semicolon, those of the backward behind it. Each has a term of one_by_one, in this order.
# - In float32 a term counts the numbers that are read and written: an addition reads two and writes one, which is 3.
#   The sum is multiplied by the 4 bytes of a number.
# - "16 bits" is autocast, which keeps the loss and the residual stream in float32. Where types mix, a term counts
#   bytes: an addition that reads 4 and 2 bytes and writes 4 is a 10.
# - fused has two terms: the forward's kernel and the backward's.
BYTES = {
    "float32": {
        # divide, mask, softmax; softmax, mask, divide. A mask copies the scores, 2, and then fills the copy, 2.
        "scores": Bytes(one_by_one=4 * (2 + 4 + 2 + 3 + 4 + 2), fused=4 * (2 + 3)),
        # log_softmax; nll_loss, log_softmax
        "logits": Bytes(one_by_one=4 * (2 + 1 + 3), fused=4 * (1 + 2)),
        # add, LayerNorm; LayerNorm, add
        "residual": Bytes(one_by_one=4 * (3 + 2 + 3 + 3), fused=4 * (4 + 5)),
        # gelu; gelu, with nothing beside it that it could be fused with
        "gelu": Bytes(one_by_one=4 * (2 + 3), fused=4 * (2 + 3)),
        # Four copies of q, k, v and y; three copies, joining three gradients, reading 9 for the gradients of biases.
        # Fused, there are no copies.
        "projections": Bytes(one_by_one=4 * (8 + 6 + 6 + 9), fused=4 * (6 + 9)),
        "casts": Bytes(one_by_one=0, fused=0),
    },
    "16 bits": {
        "scores": Bytes(one_by_one=2 * (2 + 4 + 2 + 3 + 4 + 2), fused=2 * (2 + 3)),
        # cast, log_softmax; nll_loss, log_softmax, cast
        "logits": Bytes(one_by_one=6 + 8 + 4 + 12 + 6, fused=2 + 4),
        # add, LayerNorm, cast; cast, LayerNorm, add, cast
        "residual": Bytes(one_by_one=10 + 8 + 6 + 6 + 12 + 12 + 6, fused=12 + 16),
        "gelu": Bytes(one_by_one=2 * (2 + 3), fused=2 * (2 + 3)),
        "projections": Bytes(one_by_one=2 * (8 + 6 + 6 + 9), fused=2 * (6 + 9)),
        # of each weight to 16 bits, and of its gradient back
        "casts": Bytes(one_by_one=6 + 6, fused=6 + 6),
    },
}
# On CUDA three things differ. The backward of a softmax first multiplies the gradient by the output, which is three
# numbers more. Under autocast the softmax is computed in float32, so that scores are cast there and back. And a
# compiler leaves the cast of LayerNorm's gradient to 16 bits as a kernel of its own.
BYTES_ON_CUDA = {precision: dict(table) for precision, table in BYTES.items()}
# divide, mask, softmax; multiply, softmax, mask, divide
BYTES_ON_CUDA["float32"]["scores"] = Bytes(one_by_one=4 * (2 + 4 + 2 + 3 + 3 + 4 + 2), fused=4 * (2 + 3))
# divide, mask, cast, softmax, cast; cast, multiply, softmax, cast, mask, divide
SCORES_UNDER_AUTOCAST = 4 + 8 + 6 + 8 + 6 + 6 + 12 + 12 + 6 + 8 + 4
BYTES_ON_CUDA["16 bits"]["scores"] = Bytes(one_by_one=SCORES_UNDER_AUTOCAST, fused=2 * (2 + 3))
# as in BYTES, and 4 more: the cast, as a kernel of its own, reads the float32 gradient again
BYTES_ON_CUDA["16 bits"]["residual"] = Bytes(one_by_one=10 + 8 + 6 + 6 + 12 + 12 + 6, fused=12 + 16 + 4)

# Explicit attention's six matmuls write two tensors of the size of the scores and read four.
PASSES_OF_MATMULS_OVER_SCORES = 6

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
    the micro-batch. matmul_dtype: "float32", "tf32", "bfloat16" or "float16". amp_dtype: of autocast, "float32" where
    it is off. on_cuda: whether CUDA's kernels run. compiled: by torch.compile. flash: whether attention is one kernel.
    update: numbers that an update reads and writes for each parameter. accum: micro-batches of this process for each
    update.
    """

    shape: dict
    batch_size: int
    matmul_dtype: str = "float32"
    amp_dtype: str = "float32"
    on_cuda: bool = False
    compiled: bool = False
    flash: bool = False
    update: int = ADAMW
    accum: int = 1

    @property
    def seq_len(self):
        """T, the tokens of a sequence."""
        return self.shape["seq_len"]

    @property
    def tokens(self):
        """The tokens of the micro-batch."""
        return self.batch_size * self.seq_len


@dataclass(frozen=True)
class Rates:
    """How fast a machine is. matmul: {dtype: FLOP/s} of a large matmul. copy: bytes/s, read and written."""

    matmul: dict
    copy: float


def shape_of(model, seq_len):
    """Return the shape of a GPT by its config, at sequences of seq_len tokens; None for a model without such a config.

    It is a dict with vocab_size, n_layer, n_head, n_embd and seq_len. A vocabulary of 50304 counts as GPT-2's, which
    s06 pads to that.
    """
    config = getattr(model, "config", None)
    shape = {}
    for name in ("vocab_size", "n_layer", "n_head", "n_embd"):
        if not hasattr(config, name):
            return None
        shape[name] = getattr(config, name)
    if shape["vocab_size"] == PADDED_VOCAB:
        shape["vocab_size"] = VOCAB
    shape["seq_len"] = seq_len
    return shape


def shape_name(shape):
    """Return "gpt2" for the shape of that size, and the numbers of layers, heads and channels for any other."""
    for name, size in SIZES.items():
        if all(shape[key] == number for key, number in size.items()):
            return name
    return f"{shape['n_layer']} layers of {shape['n_head']} heads, {shape['n_embd']} wide"


def flops_per_token(shape):
    """Return the FLOPs of one token's training step, forward and backward: 6 (12 L C^2 + V C) + 12 L C T.

    shape: a dict with n_layer (L), n_embd (C), seq_len (T) and vocab_size (V, unpadded: GPT-2 asks for no work on
    padding). Two FLOPs for each multiply-add of every matrix, once forward and twice backward, and attention counted in
    full although half of it is masked: the convention of PaLM (arXiv:2204.02311, appendix B).
    """
    L, C, T = shape["n_layer"], shape["n_embd"], shape["seq_len"]
    return weight_flops_per_token(shape) + EXPLICIT_ATTENTION_FLOPS * L * C * T


def weight_flops_per_token(shape):
    """Return the FLOPs of one token in the matmuls with weights: 6 (12 L C^2 + V C)."""
    return 6 * matmul_weights(shape)


def matmul_weights(shape):
    """Return how many weights a GPT's matmuls have: 12 L C^2 + V C."""
    L, C, V = shape["n_layer"], shape["n_embd"], shape["vocab_size"]
    return 12 * L * C**2 + V * C


def weight_bytes(shape):
    """Return the bytes of a GPT's float32 weights, without biases and LayerNorms (0.1 %); its gradient has as many.

    The positions have an embedding for each token of a sequence, as in the stages.
    """
    return 4 * (matmul_weights(shape) + shape["seq_len"] * shape["n_embd"])


def bytes_per_number(tensor, work):
    """Return the bytes that a micro-batch reads and writes for each number of a tensor, one of those in BYTES."""
    table = BYTES_ON_CUDA if work.on_cuda else BYTES
    precision = "float32" if work.amp_dtype == "float32" else "16 bits"
    moved = table[precision][tensor]
    if tensor == "projections" and work.flash:  # the kernel reads q, k and v in place: no copies, compiled or not
        return moved.fused
    return moved.fused if work.compiled else moved.one_by_one


def numbers_in(tensor, work):
    """Return how many numbers a micro-batch has in a tensor, one of those in BYTES, over all layers."""
    L, C = work.shape["n_layer"], work.shape["n_embd"]
    tokens = work.tokens
    match tensor:
        case "scores":
            return L * work.shape["n_head"] * tokens * work.seq_len
        case "logits":
            return tokens * work.shape["vocab_size"]
        case "residual":  # two in each layer, and the last LayerNorm with the sum of the embeddings
            return (2 * L + 1) * tokens * C
        case "gelu":
            return L * tokens * 4 * C
        case "projections":  # copies of q, k, v and y, the gradient of the three in one, sums for bias gradients
            return L * tokens * C
        case "casts":
            return matmul_weights(work.shape)


def bytes_moved(tensor, work):
    """Return the bytes that a micro-batch reads and writes for a whole tensor, one of those in BYTES."""
    return numbers_in(tensor, work) * bytes_per_number(tensor, work)


def attention_seconds(work, rates):
    """Return the seconds of attention's matmuls.

    Explicit attention takes the longer of two times: that of its FLOPs, and that of moving the scores. With head_dim 64
    there are 128 FLOPs for each number of the scores that is moved, which is little for a GPU.
    """
    L, C = work.shape["n_layer"], work.shape["n_embd"]
    unit = L * work.batch_size * work.seq_len**2 * C
    rate = rates.matmul[work.matmul_dtype]
    if work.flash:
        return FLASH_ATTENTION_FLOPS * unit / rate
    bytes_of_score = 4 if work.amp_dtype == "float32" else 2
    moved = PASSES_OF_MATMULS_OVER_SCORES * bytes_of_score * numbers_in("scores", work)
    return max(EXPLICIT_ATTENTION_FLOPS * unit / rate, moved / rates.copy)


def update_bytes(work):
    """Return the bytes of a micro-batch's share of the update: AdamW, clipping, DDP's buckets and the like."""
    added = ADDING_A_GRADIENT * (work.accum - 1)  # the first micro-batch adds to nothing
    return weight_bytes(work.shape) * (work.update + added) / work.accum


def seconds_of_parts(work, rates):
    """Return {part of a micro-batch: seconds} that its FLOPs and its bytes take at the Rates of a machine.

    --profile measures the same parts. "matmuls" are those with weights. "attention" is the matmuls of explicit
    attention, or the flash kernel. "softmax and mask" is all else that explicit attention does.
    """
    flops = work.tokens * weight_flops_per_token(work.shape)
    pointwise = sum(bytes_moved(tensor, work) for tensor in ("residual", "gelu", "projections", "casts"))
    softmax_and_mask = 0 if work.flash else bytes_moved("scores", work)
    return {
        "matmuls": flops / rates.matmul[work.matmul_dtype],
        "attention": attention_seconds(work, rates),
        "softmax and mask": softmax_and_mask / rates.copy,
        "pointwise": pointwise / rates.copy,
        "loss": bytes_moved("logits", work) / rates.copy,
        "optimizer": update_bytes(work) / rates.copy,
    }


def seconds_per_token(work, rates):
    """Return the seconds per token that all parts of a micro-batch take, or None where a rate is not known.

    A prediction is the ratio of two of these sums.
    """
    if work.matmul_dtype not in rates.matmul:
        return None
    return sum(seconds_of_parts(work, rates).values()) / work.tokens
