"""Stage 2 · tf32: let float32 matrix products round their inputs to 19 bits.

TF32 keeps float32's range and ten bits of mantissa, and sums in float32: what a tensor core wants to eat. The weights
stay float32 and nothing else in the text changes. On an A100 or newer the products run up to eight times faster.
Elsewhere there is no such unit: a T4, a Mac or a CPU computes in float32 as before, and gains nothing.
"""

from harness import StepLog, parse_args  # first: it makes data and model importable from here

import math

import torch
from torch.nn import functional as F

from data import TokenLoader, load_tokens
from model import GPT, SIZES, GPTConfig

args = parse_args(__doc__)
device = args.device
torch.manual_seed(args.seed)
torch.set_float32_matmul_precision("high")

B, T = args.batch_size, args.seq_len
loader = TokenLoader(load_tokens(args.data), B, T)


def attention(q, k, v):  # (B, n_head, T, head_dim) each
    # every score of T x T is written to memory, masked there, normalised there, and read back
    T, head_dim = q.shape[-2:]
    scores = q @ k.transpose(-2, -1) / math.sqrt(head_dim)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(future, -math.inf)
    weights = F.softmax(scores, dim=-1)
    return weights @ v


config = GPTConfig(vocab_size=50257, block_size=T, **SIZES[args.size])
model = GPT(config, attention).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)

log = StepLog(args, model, loader, tokens_per_step=B * T)
for step in range(args.steps):
    x, y = loader.next_batch()
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    optimizer.zero_grad()
    logits, loss = model(x, y)
    loss.backward()
    optimizer.step()
    log.step(loss)
log.finish(model)
