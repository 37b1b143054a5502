"""Stage 7 · clip: GPT-3's betas, gradient clipping.

For the loss, not for speed: clipping passes over the gradients twice more. If the norm of all gradients together is
above 1, it scales them down to a norm of 1, so that one bad batch can't throw the weights far off. With beta2 = 0.95
AdamW's estimate of the gradients' size follows them sooner (Brown et al., arXiv:2005.14165, appendix B). Clipping needs
the true gradients, so float16's loss scale is taken out first.
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


config = GPTConfig(vocab_size=50304, block_size=T, **SIZES[args.size])
model = GPT(config, attention).to(device)
if args.compile:
    model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
scaler = torch.amp.GradScaler(device.type, enabled=args.amp_dtype == torch.float16)

tokens = B * T
for step in range(args.steps):
    t0 = time.perf_counter()
    x, y = loader.next_batch(device)
    optimizer.zero_grad()
    with torch.autocast(device.type, args.amp_dtype, enabled=args.amp_dtype != torch.float32):
        loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    torch.get_device_module(device).synchronize()  # a card has only queued the work so far
    dt = time.perf_counter() - t0
    print(f"step {step:4d} loss {loss:.4f} norm {norm:.4f} {dt:.4f} s {tokens / dt:,.0f} tok/sec")
if args.save:
    torch.save({"config": vars(config), "weights": model.state_dict()}, args.save)
