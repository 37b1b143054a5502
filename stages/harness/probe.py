"""Measures what the machine itself can do, as a run of the bench among those of the stages.

A single process times large matmuls, in float32 and in autocast's dtype: the peak that the table compares
every stage with. It times a copy as well, for all that waits on memory. Several processes under torchrun time
the all-reduce of one gradient instead, for mode scale.
"""

import mmap
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # stages/, where the package harness is

from harness import machine
from harness.flags import parse_args
from harness.ladder import weight_bytes
from harness.log import Record

import torch
import torch.distributed as dist

CPU_COPY_LENGTH = 2**25  # float32 numbers: 134 MB, more than most caches of a CPU hold
CPU_COPIES = 4
CARD_COPY_LENGTH = 2**28  # 1.07 GB, more than any card's cache holds
CARD_COPIES = 40  # since a fast card takes half a millisecond for one
FRESH_BYTES = 2**28  # that the system clears, in pages of either size


def main():
    """Take a step whenever the bench asks for one, and write what it measured to the record."""
    args = parse_args(__doc__)
    device = args.device
    record = Record(args)
    torch.set_float32_matmul_precision("highest")  # no TF32: s01 has none
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
    """Return what one step measures on a device, as a dict.

    size: n of the (n, n) matmuls. peak: their FLOP/s in float32 and in amp_dtype, a dict by the dtype's name.
    copy: bytes per second, read and written, of a copy. clear: on a CPU under Linux the bytes per second that
    the system clears for a process that asks for memory, a dict by the size of a page.
    """
    if device.type == "cpu":
        size, seconds = 2048, 0.2
        copy_length, copies = CPU_COPY_LENGTH, CPU_COPIES
    else:
        size, seconds = 8192, 0.5
        copy_length, copies = card_copy_length(machine.total_memory(device)), CARD_COPIES
    peak = {"float32": matmul_peak(device, torch.float32, size, seconds)}
    if amp_dtype != torch.float32:
        name = str(amp_dtype).removeprefix("torch.")
        peak[name] = matmul_peak(device, amp_dtype, size, seconds)
    rates = dict(size=size, peak=peak, copy=copy_bandwidth(device, copy_length, copies))
    if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        rates["clear"] = {
            "4 kB": clearing_rate(FRESH_BYTES, mmap.MADV_NOHUGEPAGE),
            "2 MB": clearing_rate(FRESH_BYTES, mmap.MADV_HUGEPAGE),
        }
    return rates


def matmul_peak(device, dtype, n, seconds):
    """Return the FLOP/s of (n, n) matmuls, one after the other for so many seconds.

    They are sustained, because training is: a hot GPU does not keep up the best of a few short bursts.
    """
    a = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.randn(n, n, device=device, dtype=dtype)
    # One output for all matmuls, so that no memory is allocated while the clock runs.
    product = torch.empty(n, n, device=device, dtype=dtype)
    torch.matmul(a, b, out=product)  # before the clock: the first one loads the library and chooses a kernel
    once = seconds_of(1, device, torch.matmul, a, b, out=product)
    repeats = 1 + int(seconds / once)
    flops = repeats * 2 * n**3  # n * n sums of n products: n multiplications and n additions each
    return flops / seconds_of(repeats, device, torch.matmul, a, b, out=product)


def card_copy_length(total_memory):
    """Return how many float32 numbers a card copies; both tensors take a quarter of its bytes at most."""
    bytes_of_a_number = 4 + 4  # in the source and in the target
    return min(CARD_COPY_LENGTH, total_memory // 4 // bytes_of_a_number)


def copy_bandwidth(device, length, copies):
    """Return the bytes per second of so many copies of a tensor; each float32 number is read and written.

    length: how many numbers the tensor has.
    """
    source = torch.ones(length, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # before the clock: the first one also gets the target's pages from the system
    copied = copies * (source.nbytes + target.nbytes)
    return copied / seconds_of(copies, device, target.copy_, source)


def clearing_rate(nbytes, advice):
    """Return the bytes per second at which the system clears fresh memory. advice: for madvise(2), on its pages."""
    with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(advice)
        a_byte_in_each_page = torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE]
        seconds = seconds_of(1, a_byte_in_each_page.device, a_byte_in_each_page.fill_, 1)
        del a_byte_in_each_page  # else the mapping can't be closed
    return nbytes / seconds


def all_reduce_seconds(gradient):
    """Return the seconds of one all-reduce of a tensor, which all ranks start together."""
    dist.barrier()
    return seconds_of(1, gradient.device, dist.all_reduce, gradient)


def seconds_of(repeats, device, work, *arguments, **options):
    """Return the seconds that so many calls of work() take, the device synchronized before and after."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work(*arguments, **options)
    synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
