"""Which batch fits into the memory of a card."""

from data import VOCAB
from model import SIZES

CONTEXT = 0.5e9  # bytes of a card that the driver takes for a process
RESERVED = 1.1  # bytes that PyTorch reserves for each byte of a tensor; on an H100 they were 1.03 to 1.07


def largest_batch(size, seq_len, free):
    """Return (B, the bytes that it takes). B is the largest power of two up to 16 with which all stages fit, or 1.

    size: of the model, one of SIZES. seq_len: tokens in a sequence. free: bytes.
    """
    for batch_size in (16, 8, 4, 2, 1):
        needed = CONTEXT + RESERVED * memory_needed(size, seq_len, batch_size)
        if needed <= free:
            break
    return batch_size, needed


def memory_needed(size, seq_len, batch_size):
    """Return the most bytes that tensors take in any stage: in the backward of s01 or s03, or in the update."""
    L, H, C, T = SIZES[size]["n_layer"], SIZES[size]["n_head"], SIZES[size]["n_embd"], seq_len
    tokens = batch_size * T
    scores, channels, logits = L * H * T * tokens, L * C * tokens, VOCAB * tokens  # how many numbers
    weights = 4 * (12 * L * C**2 + VOCAB * C + T * C)  # bytes
    # When the backward begins: weights and AdamW's two moments, in each layer the scores after their softmax and 17
    # numbers for each channel of a token, and three times the logits. Gradients come while these are freed.
    s01 = 3 * weights + 4 * scores + 68 * channels + 12 * logits
    # The weights are also there in 16 bits. Scores are in 32 bits for the softmax, and in 16 for the matmul after it.
    s03 = 3.5 * weights + 6 * scores + 36 * channels + 12 * logits
    # With a large model and few tokens this is the most: weights, gradients, two moments, and a temporary of that size.
    update = 5 * weights
    return max(s01, s03, update)
