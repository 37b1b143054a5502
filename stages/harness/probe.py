"""Measures what the machine itself can do, as a run of the bench among those of the stages.

A single process times large matmuls, in float32, in TF32 and in autocast's dtype: the peak that the table compares
every stage with. It times a copy as well, for all that waits on memory: the table's predictions divide by these rates.
Several processes under torchrun time the all-reduce of one gradient instead, for mode scale.
"""

import mmap
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # stages/, where the package harness is

from harness import machine, rates
from harness.arithmetic import weight_bytes
from harness.flags import parse_args
from harness.log import Record

import torch
import torch.distributed as dist

FRESH_BYTES = 2**28  # that the system clears, in pages of either size


def main():
    """Take a step whenever the bench asks for one, and write what it measured to the record."""
    args = parse_args(__doc__)
    device = args.device
    record = Record(args)
    several = machine.world_size() > 1
    if several:
        dist.init_process_group("nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo")
        gradient = torch.zeros(weight_bytes(args.shape, args.seq_len) // 4, device=device)
    for step in range(args.steps):
        if not record.next_step_wanted():
            break
        if several:
            record.write("step", step=step, dt=all_reduce_seconds(gradient), bytes=gradient.nbytes)
        else:
            record.write("step", step=step, **device_rates(device, args.amp_dtype))
    record.next_step_wanted()  # leaving takes time too, and other runs may still be on the clock
    if several:
        dist.destroy_process_group()


def device_rates(device, amp_dtype):
    """Return what one step measures on a device, as a dict: rates.measure(), and how fast memory is handed out.

    clear: on a CPU under Linux the bytes per second that the system clears for a process that asks for memory, a
    dict by the size of a page.
    """
    measured = rates.measure(device, amp_dtype)
    if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        measured["clear"] = {
            "4 kB": clearing_rate(FRESH_BYTES, mmap.MADV_NOHUGEPAGE),
            "2 MB": clearing_rate(FRESH_BYTES, mmap.MADV_HUGEPAGE),
        }
    return measured


def clearing_rate(nbytes, advice):
    """Return the bytes per second at which the system clears fresh memory. advice: for madvise(2), on its pages."""
    with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(advice)
        a_byte_in_each_page = torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE]
        seconds = rates.seconds_of(1, a_byte_in_each_page.device, a_byte_in_each_page.fill_, 1)
        del a_byte_in_each_page  # else the mapping can't be closed
    return nbytes / seconds


def all_reduce_seconds(gradient):
    """Return the seconds of one all-reduce of a tensor, which all ranks start together."""
    dist.barrier()
    return rates.seconds_of(1, gradient.device, dist.all_reduce, gradient)


if __name__ == "__main__":
    main()
