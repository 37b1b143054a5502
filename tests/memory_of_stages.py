"""Prints how much memory a step of each stage needs on a GPU, counted without one. Run by hand, some minutes:

    python tests/memory_of_stages.py [s03 s11 ...]

The text of each stage runs on fake tensors (see fake_card.py): gpt2 at T 1024, bfloat16 from s03 on, nothing
compiled, two steps, the second of which is counted by torch's MemTracker. It counts what tensors hold, as
torch.cuda.max_memory_allocated() does; the CUDA context, the libraries' workspaces and the gaps between
blocks come on top. Needs g++.

Memory grows by the same bytes for each sequence of a batch, so two batch sizes tell all others: the second table
says for some cards which batch flags.py chooses by default, and what the stage needs there that needs most.
"""

import fake_card
from harness import flags, ladder

import sys

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

BATCH_SIZES = (4, 16)
CARDS = (8, 12, 16, 24, 80)  # GB


class Meter:
    """Takes the place of StepLog, and counts the memory of the second step. peak: in bytes."""

    tracker = None
    peak = 0

    def __init__(self, args, model, loader, tokens_per_step):
        self.model = model

    def step(self, loss, **figures):
        if Meter.tracker is None:  # AdamW's moments are there from now on
            Meter.tracker = MemTracker()
            Meter.tracker.track_external(self.model, optimizer_of_stage())
            Meter.tracker.__enter__()

    def finish(self, model):
        Meter.tracker.__exit__(None, None, None)
        Meter.peak = Meter.tracker.get_tracker_snapshot("peak")[fake_card.CARD]["Total"]
        Meter.tracker = None


def optimizer_of_stage():
    """The optimizer of the stage that is running: a global of the frame that called log.step()."""
    return sys._getframe(2).f_globals["optimizer"]


class Loader(fake_card.FakeLoader):
    """Tells the tracker, which takes one forward at a time, that another micro-batch begins."""

    def next_batch(self):
        if Meter.tracker is not None:
            Meter.tracker.reset_mod_stats()
        return super().next_batch()


def peak_of(name, batch_size):
    """The bytes that the tensors of a stage hold at most in a step."""
    args = fake_card.settings(batch_size, torch.bfloat16, compiled=False, steps=2, accum=2)
    fake_card.run_stage(name, args, Meter, Loader)
    return Meter.peak


def init_fake_process_group(backend):
    """Take the place of init_process_group: a group of one rank that sends nothing."""
    initialize(backend="fake", rank=0, world_size=1, store=FakeStore())


def with_buckets(model):
    """Take the place of DistributedDataParallel, whose C++ needs tensors with memory.

    Beside the gradients it holds buckets, which are as large as all of them.
    """
    gradients = sum(p.numel() for p in model.parameters())
    model.register_buffer("buckets", torch.empty(gradients, device=fake_card.CARD))
    return model


initialize = dist.init_process_group


def print_row(*cells):
    print("|", " | ".join(cells), "|", flush=True)


def print_stages(stages):
    """Print a row for each stage, and return {its name: (fixed bytes, bytes of a sequence)}."""
    small, large = BATCH_SIZES
    lines = {}
    print_row("stage", f"B {small}, GB", f"B {large}, GB", "GB a sequence", "GB besides")
    print_row(":--", "--:", "--:", "--:", "--:")
    for stage in stages:
        least, most = peak_of(stage.name, small), peak_of(stage.name, large)
        per_sequence = (most - least) / (large - small)
        fixed = least - small * per_sequence
        lines[stage.name] = (fixed, per_sequence)
        print_row(stage.name, *(f"{nbytes / 1e9:.2f}" for nbytes in (least, most, per_sequence, fixed)))
    return lines


def print_cards(lines):
    """Print for each card the default batch, and the stage that needs most there. lines: of print_stages()."""
    print_row("card, GB", "default B", "needs most", "GB", "of the card")
    print_row("--:", "--:", ":--", "--:", "--:")
    for gigabytes in CARDS:
        batch_size = flags.fitting_batch_size(gigabytes * 10**9)
        needs = {name: (fixed + batch_size * each) / 1e9 for name, (fixed, each) in lines.items()}
        name = max(needs, key=needs.get)
        share = needs[name] / gigabytes
        print_row(str(gigabytes), str(batch_size), name, f"{needs[name]:.2f}", f"{share:.0%}")


def main():
    fake_card.pretend()
    dist.init_process_group = init_fake_process_group
    torch.nn.parallel.DistributedDataParallel = with_buckets
    wanted = sys.argv[1:]
    stages = [stage for stage in ladder.STAGES if not wanted or stage.short in wanted]
    lines = print_stages(stages)
    print()
    print_cards(lines)


if __name__ == "__main__":
    main()
