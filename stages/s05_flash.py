"""Stage 5 · flash: flash attention, no T x T matrix.

Flash attention (Dao et al., arXiv:2205.14135) walks over keys and values in blocks that fit into on-chip memory. It
keeps a running softmax, never writes the T x T scores to memory, and computes them again in the backward. The result is
the same up to rounding. Far fewer bytes move, memory grows with T and not with T squared, and a causal kernel skips
blocks that lie in the future. PyTorch chooses the kernel: flash, cuDNN, memory-efficient, or plain matmuls if none of
these works. At a short T there is little to save.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))  # as Python does unless PYTHONSAFEPATH is set
from harness import parse_args  # first: it makes data and model importable from here

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
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


config = GPTConfig(vocab_size=50257, block_size=T, **SIZES[args.size])
model = GPT(config, attention).to(device)
if args.compile:
    model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
scaler = torch.amp.GradScaler(device.type, enabled=args.amp_dtype == torch.float16)

tokens = B * T
for step in range(args.steps):
    t0 = time.perf_counter()
    x, y = loader.next_batch(device)
    optimizer.zero_grad()
    with torch.autocast(device.type, args.amp_dtype, enabled=args.amp_dtype != torch.float32):
        loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.get_device_module(device).synchronize()  # a card has only queued the work so far
    dt = time.perf_counter() - t0
    print(f"step {step:4d} loss {loss:.4f} {dt:.4f} s {tokens / dt:,.0f} tok/sec")
if args.save:
    torch.save({"config": vars(config), "weights": model.state_dict()}, args.save)
