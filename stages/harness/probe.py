"""Measures what the machine itself can do, as a run of the bench among those of the stages.

A single process times large matmuls and a copy: the peak that the table compares every stage with, and the rates that
its predictions divide by. Several processes under torchrun time the all-reduce of one gradient instead, for mode scale.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # stages/, where the package harness is

from harness import machine, parse_args, rates
from harness.arithmetic import weight_bytes
from harness.records import Record, settle

import torch
import torch.distributed as dist


def main():
    """Measure once whenever the bench asks for a step, and write the figures to the record."""
    args = parse_args(__doc__)
    device = args.device
    record = Record(args)
    several = machine.world_size() > 1
    if several:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        gradient = torch.zeros(weight_bytes(args.shape, args.seq_len) // 4, device=device)
    step = 0
    while step < args.steps and record.next_step_wanted():
        if several:
            dist.barrier()  # all ranks start together
            dt = rates.seconds_of(1, device, dist.all_reduce, gradient)
            record.write("step", step=step, dt=dt, bytes=gradient.nbytes)
        else:
            record.write("step", step=step, **rates.measure(device, args.amp_dtype))
        step += 1
    if step == args.steps:
        record.wait_for_end()
    record.write("summary")
    if several:
        settle()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
