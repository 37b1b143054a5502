"""How fast this machine multiplies: the ceiling that the table compares each stage with.

Led by the bench like a stage, so that it is measured between the stages' own steps. Each step times the best of a few
large products, in float32 and in the type that autocast takes here.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from stages.harness import parse_args


def multiply_rate(device, dtype, n, repeats=3):
    """FLOP/s of the fastest of some n x n x n products of random matrices, the device synchronised around each."""
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    times = []
    for _ in range(1 + repeats):
        synchronize()
        began = time.perf_counter()
        a @ b
        synchronize()
        times.append(time.perf_counter() - began)
    return 2 * n**3 / min(times[1:])


def main():
    args = parse_args(__doc__)
    n = 2048 if args.device.type == "cpu" else 8192
    torch.backends.cuda.matmul.allow_tf32 = False
    with open(args.record, "x") as record:
        for step in range(args.steps):
            if args.lockstep and not sys.stdin.readline():
                return
            rates = {
                str(dtype).removeprefix("torch."): multiply_rate(args.device, dtype, n)
                for dtype in {torch.float32, args.amp_dtype}
            }
            print(json.dumps(dict(kind="step", step=step, size=n, rates=rates)), file=record, flush=True)
            print(f"step {step} | " + " | ".join(f"{k} {v / 1e9:,.0f} GFLOP/s" for k, v in rates.items()), flush=True)
    if args.lockstep:
        sys.stdin.readline()  # as StepLog.finish does: leaving takes time, and others may still be on the clock


if __name__ == "__main__":
    main()
