"""Stage 12 · ddp: DistributedDataParallel.

    torchrun --standalone --nproc_per_node=2 stages/s12_ddp.py

Each process, a rank, has the whole model, its own slices of the data and, if it trains on cards, a card of its own.
DistributedDataParallel averages the gradients over all ranks, bucket by bucket, while the backward still runs. So all
ranks take the step that one process would take with all micro-batches. Only the last micro-batch of a step needs the
average, and a flag turns it off for the others, as model.no_sync() does. Under plain python there is one rank. It takes
the steps of the stage before, and still copies its gradients into buckets. On an H100 it was 0.92 times as fast.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))  # as Python does unless PYTHONSAFEPATH is set
from harness import parse_args  # first: it makes data and model importable from here

import math
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from data import TokenLoader, load_tokens
from model import GPT, SIZES, GPTConfig

args = parse_args(__doc__)
device = args.device
dist.init_process_group("nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
micro_batches = args.accum // world_size
torch.manual_seed(args.seed)
torch.set_float32_matmul_precision("high")

B, T = args.batch_size, args.seq_len
loader = TokenLoader(load_tokens(args.data), B, T, rank, world_size)


def attention(q, k, v):  # (B, n_head, T, head_dim) each
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


config = GPTConfig(vocab_size=50304, block_size=T, **SIZES[args.size])
model = GPT(config, attention).to(device)
if args.compile:
    model = torch.compile(model)
model = DistributedDataParallel(model)
groups = [
    {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)
scaler = torch.amp.GradScaler(device.type, enabled=args.amp_dtype == torch.float16)

max_lr, min_lr = args.lr, args.lr / 10
warmup_steps = max(1, args.steps // 10)


def get_lr(step):
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (args.steps - warmup_steps)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2


tokens = B * T * args.accum
for step in range(args.steps):
    t0 = time.perf_counter()
    optimizer.zero_grad()
    loss_sum = 0.0
    for micro in range(micro_batches):
        model.require_backward_grad_sync = micro == micro_batches - 1  # DDP reads this in the forward
        x, y = loader.next_batch(device)
        with torch.autocast(device.type, args.amp_dtype, enabled=args.amp_dtype != torch.float32):
            loss = model(x, y)
        loss = loss / micro_batches  # backward() adds gradients up, and we want the mean
        loss_sum += loss.detach()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    dist.all_reduce(loss_sum, dist.ReduceOp.AVG)  # for the log: the mean over ranks
    lr = get_lr(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    scaler.step(optimizer)
    scaler.update()
    torch.get_device_module(device).synchronize()  # a card has only queued the work so far
    dt = time.perf_counter() - t0
    if rank == 0:
        print(f"step {step:4d} loss {loss_sum:.4f} norm {norm:.4f} lr {lr:.2e} {dt:.4f} s {tokens / dt:,.0f} tok/sec")
dist.destroy_process_group()
if args.save and rank == 0:
    torch.save({"config": vars(config), "weights": model.state_dict()}, args.save)
