"""How long the ranks take to add up one gradient, with nothing to hide it behind: what scale sets beside s12's step.

Led by the bench like a stage, under torchrun.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from model import GPT, SIZES, GPTConfig
from stages.harness import parse_args

BUCKET = 25 * 2**20  # bytes: DDP's default


def main():
    args = parse_args(__doc__)
    dist.init_process_group()
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50304, block_size=args.seq_len, **SIZES[args.size]), None)
    total = 4 * sum(p.numel() for p in model.parameters())
    buckets = [torch.zeros(BUCKET // 4, device=args.device) for _ in range(-(-total // BUCKET))]
    record = open(args.record, "x") if dist.get_rank() == 0 else None  # noqa: SIM115
    for step in range(args.steps):
        if record and args.lockstep and not sys.stdin.readline():
            return
        dist.barrier()
        if args.device.type != "cpu":
            torch.accelerator.synchronize()
        began = time.perf_counter()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        if args.device.type != "cpu":
            torch.accelerator.synchronize()
        dt = time.perf_counter() - began
        if record:
            print(json.dumps(dict(kind="step", step=step, dt=dt, bytes=total, tokens=1)), file=record, flush=True)
            print(f"step {step} | {1e3 * dt:.1f} ms", flush=True)
    if record and args.lockstep:
        sys.stdin.readline()  # as StepLog.finish does: leaving takes time, and others may still be on the clock
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
