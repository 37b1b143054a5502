"""What the machine itself can do, measured by the bench as a run among the stages' own.

One process times large matmuls, in float32 and in autocast's dtype: the peak that the table compares each stage with.
It times copies as well, for what waits on memory. Under torchrun it times one gradient's all-reduce alone, for scale.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Record, machine, parse_args

import torch
import torch.distributed as dist

from model import weight_bytes


def timed(work, device):
    """Seconds that work() takes, the device synchronized before and after."""
    torch.get_device_module(device).synchronize()
    began = time.perf_counter()
    work()
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - began


def matmul_peak(device, dtype, n):
    """FLOP/s of matmuls of two random (n, n) matrices, one after the other for half a second (0.2 s on a CPU).

    Sustained, because that is what training gets: the best of a few short bursts is more than a hot GPU keeps up.
    """
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    first = min(timed(lambda: a @ b, device) for _ in range(2))
    repeats = 1 + int((0.2 if device.type == "cpu" else 0.5) / first)
    return repeats * 2 * n**3 / timed(lambda: [a @ b for _ in range(repeats)], device)


args = parse_args(__doc__)
device, record = args.device, Record(args)
if machine.environment_number("WORLD_SIZE", 1) > 1:
    dist.init_process_group("nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo")
    gradient = torch.zeros(weight_bytes(args.size, args.seq_len) // 4, device=device)
else:
    a, b = (torch.ones(2**25, device=device) for _ in range(2))  # 134 MB each, more than most caches hold
n = 2048 if device.type == "cpu" else 8192
dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, args.amp_dtype)}
torch.backends.cuda.matmul.allow_tf32 = False
for step in range(args.steps):
    if not record.wait():
        break
    if dist.is_initialized():
        dist.barrier()
        found = dict(dt=timed(lambda: dist.all_reduce(gradient), device), bytes=gradient.nbytes)
    else:
        found = dict(size=n, peak={name: matmul_peak(device, dtype, n) for name, dtype in dtypes.items()})
        # bytes per second, read and written: the peak of all that is no matmul
        found |= dict(copy=8 * b.nbytes / timed(lambda: [a.copy_(b) for _ in range(4)], device))
    record.write("step", step=step, **found)
record.wait()  # leaving takes time too, and others may still be on the clock
if dist.is_initialized():
    dist.destroy_process_group()
