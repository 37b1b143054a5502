"""Stage 2 · tf32: TF32 for float32 matmuls.

A matmul may round its float32 inputs to TF32, which has float32's range and ten bits of mantissa. It still sums in
float32. Large matmuls in TF32 were measured six to eight times as fast as in float32 on an A100 or H100, and 1.6 times
as fast on an RTX 4090. Weights and all other operations stay in float32. A card older than the RTX 30 series and the
A100, a Mac or a CPU without AMX-FP16 has no units for TF32: it computes in float32 as before, and gains nothing.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))  # as Python does unless PYTHONSAFEPATH is set
from harness import parse_args  # first: it makes data and model importable from here

import math
import time

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
    # every score of T x T is written to memory, masked there, normalized there, and read back
    T, head_dim = q.shape[-2:]
    scores = q @ k.transpose(-2, -1) / math.sqrt(head_dim)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(future, -math.inf)
    weights = F.softmax(scores, dim=-1)
    return weights @ v


config = GPTConfig(vocab_size=50257, block_size=T, **SIZES[args.size])
model = GPT(config, attention).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)

tokens = B * T
for step in range(args.steps):
    t0 = time.perf_counter()
    x, y = loader.next_batch(device)
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    torch.get_device_module(device).synchronize()  # a card has only queued the work so far
    dt = time.perf_counter() - t0
    print(f"step {step:4d} loss {loss:.4f} {dt:.4f} s {tokens / dt:,.0f} tok/sec")
if args.save:
    torch.save({"config": vars(config), "weights": model.state_dict()}, args.save)
