"""Which batch fits into the memory of a card."""

from data import VOCAB
from model import SIZES

CONTEXT = 0.5e9  # bytes of a card that the driver takes for a process
RESERVED = 1.1  # bytes that a card reserves for each that its tensors hold; an H100 reserved 1.03 to 1.07


def largest_batch(size, seq_len, free):
    """Return (B, the bytes that it takes): the largest power of two up to 16 with which all stages fit, at least 1.

    size: of the model, one of SIZES. seq_len: tokens in a sequence. free: bytes.
    """
    for batch_size in (16, 8, 4, 2, 1):
        needed = CONTEXT + RESERVED * memory_needed(size, seq_len, batch_size)
        if needed <= free:
            break
    return batch_size, needed


def memory_needed(size, seq_len, batch_size):
    """Return the bytes that the stage which needs most holds at most.

    Weights and AdamW's two moments stay. When the backward begins, a layer of s01 keeps the scores after their softmax
    and 17 numbers for each channel of a token, and the logits are there three times. Gradients of weights come while
    the rest is freed. s03 keeps the scores in 32 bits, as its softmax computes them, and in 16 bits for the matmul that
    follows, 36 bytes for each channel of a token, and the weights in 16 bits, too. For a large model and few tokens the
    update takes most: weights, gradients, two moments, and a temporary of their size.
    """
    L, H, C, T = SIZES[size]["n_layer"], SIZES[size]["n_head"], SIZES[size]["n_embd"], seq_len
    tokens = batch_size * T
    scores, channels, logits = L * H * T * tokens, L * C * tokens, VOCAB * tokens  # how many there are
    weights = 4 * (12 * L * C**2 + VOCAB * C + T * C)
    s01 = 3 * weights + 4 * scores + 68 * channels + 12 * logits
    s03 = 3.5 * weights + 6 * scores + 36 * channels + 12 * logits
    update = 5 * weights
    return max(s01, s03, update)
