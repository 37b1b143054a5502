"""Stage 3 · bf16: autocast to 16 bits.

Autocast gives matmuls 16-bit copies of their inputs. Weights, optimizer and loss stay in float32. Such a matmul moves
half the bytes, and runs faster on bfloat16 units. NVIDIA cards from the RTX 30 series and the A100 on, CPUs with AMX
and some with AVX512-BF16 have them. A T4, an M1 and an M2 have units for float16 only, and use them.
There small gradients would become zero, so the GradScaler multiplies the loss by a large number before the backward,
and divides the gradients by it before the update. In bfloat16 it only passes calls on. Without units for either type
autocast stays off, and this stage equals the one before.
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
