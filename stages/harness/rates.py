"""Measures how fast a device multiplies matrices and copies memory, the rates that arithmetic.py divides by."""

import time

import torch

from . import machine

CPU_COPY_LENGTH = 2**25  # float32 numbers: 134 MB, more than most caches of a CPU hold
CPU_COPIES = 4
CARD_COPY_LENGTH = 2**28  # 1.07 GB, more than any card's cache holds
CARD_COPIES = 40  # since a fast card takes half a millisecond for one


def measure(device, amp_dtype):
    """Return the rates of a device as a dict.

    peak: FLOP/s of large matmuls in float32, in TF32 where the device has it, and in amp_dtype, a dict by the dtype's
    name. size: n of these (n, n) matmuls. copy: bytes per second, read and written, of a copy. The precision of float32
    matmuls is afterwards as it was.
    """
    if device.type == "cpu":
        size, seconds = 2048, 0.2
        copy_length, copies = CPU_COPY_LENGTH, CPU_COPIES
    else:
        size, seconds = 8192, 0.5
        a_quarter = machine.total_memory(device) // 4
        copy_length, copies = min(CARD_COPY_LENGTH, a_quarter // 8), CARD_COPIES  # a number has 4 bytes, there twice
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32: s01 has none
    peak = {"float32": matmul_peak(device, torch.float32, size, seconds)}
    if machine.has_tf32(device):
        torch.set_float32_matmul_precision("high")
        peak["tf32"] = matmul_peak(device, torch.float32, size, seconds)
    torch.set_float32_matmul_precision(precision)
    if amp_dtype != torch.float32:
        name = str(amp_dtype).removeprefix("torch.")
        peak[name] = matmul_peak(device, amp_dtype, size, seconds)
    return {"size": size, "peak": peak, "copy": copy_bandwidth(device, copy_length, copies)}


def matmul_peak(device, dtype, n, seconds):
    """Return the FLOP/s of (n, n) matmuls, one after the other for so many seconds.

    They are sustained, because training is: a hot GPU does not keep up the best of a few short bursts.
    """
    a = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.randn(n, n, device=device, dtype=dtype)
    product = torch.empty(n, n, device=device, dtype=dtype)  # one for all, so that the clock sees no allocation
    torch.matmul(a, b, out=product)  # before the clock: the first one loads the library and chooses a kernel
    once = seconds_of(1, device, torch.matmul, a, b, out=product)
    repeats = 1 + int(seconds / once)
    flops = repeats * 2 * n**3  # n * n sums of n products: n multiplications and n additions each
    return flops / seconds_of(repeats, device, torch.matmul, a, b, out=product)


def copy_bandwidth(device, length, copies):
    """Return the bytes per second of so many copies of a float32 tensor; each number is read and written."""
    source = torch.ones(length, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # before the clock: the first one also gets the target's pages from the system
    copied = copies * (source.nbytes + target.nbytes)
    return copied / seconds_of(copies, device, target.copy_, source)


def seconds_of(repeats, device, work, *arguments, **options):
    """Return the seconds that so many calls of work() take, the device synchronized before and after."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work(*arguments, **options)
    synchronize()
    return time.perf_counter() - start
