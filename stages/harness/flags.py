"""The flags of the stages, and the defaults that suit a device."""

import argparse
import contextlib
import math
import os
import sys
from pathlib import Path

import torch

from data import TextError
from model import SIZES

from . import machine, ranks
from .common import refuse, set_up_output
from .fit import largest_batch
from .steps import STEPS, STEPS_ON_CPU

HELP_ON_DATA = """a text in UTF-8; GPT-2's ids as a .npy, or as a .bin of uint16
(np.array(ids, np.uint16).tofile(FILE)); or "docs", Python's documentation (Tiny Shakespeare)"""


def parse_args(doc):
    """Return the flags of a stage as a namespace. Print its title, its sizes and its notes.

    doc: the docstring of the stage, whose first line is its title. Every default is resolved for the device: device is
    a torch.device, amp_dtype a torch.dtype. Exits with one line and status 2 for a wrong flag. Once it has returned, a
    TextError, a closed pipe or Ctrl-C ends the stage without a traceback.
    """
    set_up_output()
    ranks.check_ranks()
    ranks.set_ranks_if_alone()  # so that s12 reads the same under python and under torchrun
    args = parse(doc, sys.argv[1:])
    if ranks.world_size() > 1:
        check_ranks_of_stage(args)
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    if ranks.is_rank_0():
        print(doc.strip().splitlines()[0] if doc else Path(sys.argv[0]).stem)  # python -OO drops it
        print(f"{args.size} on {machine.device_name(args.device)}: B {args.batch_size}, T {args.seq_len}")
        print(f"from s03 on matmuls are in {machine.dtype_name(args.amp_dtype)}")
        for note in args.notes:
            print(note)
    save = args.save if ranks.is_rank_0() else None
    sys.excepthook = lambda *failure: end_in_a_line(save, *failure)
    return args


def end_in_a_line(save, kind, error, trace):
    """End the program without a traceback after a TextError, a closed pipe or Ctrl-C. This is an exception hook.

    save: the path of --save, or None. After any other exception there is a traceback.
    """
    if save and save.exists():  # torch.save() has failed, and left a part of the file
        save.unlink()
    if kind is TextError:
        refuse(error)
    if kind is BrokenPipeError:  # for example after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141)  # the status of a program that SIGPIPE ends
    if kind is KeyboardInterrupt:
        print("interrupted" + (f", so {save} was not written" if save else ""), file=sys.stderr)
        raise SystemExit(130)
    sys.__excepthook__(kind, error, trace)


def parse(doc, argv):
    """Return the flags in argv as a namespace, every default resolved for the device.

    doc: what --help begins with. The namespace also has `notes`, a list of lines for the user: why a default is not
    what it usually is, and what in the environment may change the speed. Exits with one line and status 2 for a wrong
    flag.
    """
    args = new_parser(doc).parse_args(argv)
    args.notes = []
    if args.save and ranks.is_rank_0():
        check_save(args)
    fill_in_device(args)
    fill_in_sizes(args)
    fill_in_techniques(args)
    for setting in machine.variables_set(machine.CHANGE_SPEED):
        args.notes.append(f"{setting} in the environment may change the speed")
    return args


# what can be typed


def new_parser(doc):
    """Return the parser of the flags. All stages take the same, so that the bench can pass one list to all of them."""
    parser = Parser(doc)
    add = parser.add_argument
    add("--steps", type=positive, metavar="N", help=f"optimizer steps ({STEPS}; {STEPS_ON_CPU} on a CPU)")
    add("--batch-size", type=positive, metavar="B", help="sequences in a micro-batch (16 or what fits; 1 on a CPU)")
    add("--seq-len", type=positive, default=1024, metavar="T", help="tokens in a sequence (%(default)s)")
    add("--size", choices=SIZES, help="model (gpt2; micro on a CPU)")
    add("--device", metavar="D", help="cuda, cuda:1, mps or cpu (the best one there is)")
    add("--seed", type=seed, default=1337, metavar="S", help="seed of the weights (%(default)s)")
    add("--lr", type=non_negative, default=6e-4, metavar="RATE", help="highest learning rate (%(default)s)")
    add("--data", metavar="PATH", help=HELP_ON_DATA)
    add("--amp-dtype", choices=("float32", "bfloat16", "float16"), help="for autocast, from s03 on (the device's own)")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile, from s04 on (if possible)")
    add("--accum", type=positive, metavar="N", help="micro-batches a step, over all ranks, from s11 on (4; 2 on a CPU)")
    add("--save", type=Path, metavar="FILE", help="write the weights to this new file at the end")
    return parser


class Parser(argparse.ArgumentParser):
    """argparse with one line for a wrong flag, and no usage before it."""

    def __init__(self, doc, usage=None):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=doc, usage=usage, formatter_class=formatter, allow_abbrev=False)

    def error(self, message):
        where = "--help" if self.description else "python stages/s01_baseline.py --help"  # as in the bench's probe
        refuse(f"{message}; {where} lists the flags")


def positive(text):
    """Return the number in a string. Raises argparse.ArgumentTypeError if it is not a whole number of 1 or more."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")


def seed(text):
    """Return the number in a string. Raises argparse.ArgumentTypeError if numpy can't take it as a seed."""
    if text.isdecimal() and int(text) < 2**32:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")


def non_negative(text):
    """Return the number in a string. Raises argparse.ArgumentTypeError if it is not a finite number of 0 or more."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number of 0 or more")


def fill_in_device(args):
    """Replace the name of the device with the device, the best one if no name was given."""
    name = args.device
    args.device = machine.find_device(name)
    if name is None and args.device.type == "cpu":
        reason = machine.why_no_card()
        if reason:
            args.notes.append(f"this trains on the CPU, since the card can't be used: {reason}")
    threads, cores = torch.get_num_threads(), machine.cores()
    if args.device.type == "cpu" and threads > cores:
        args.notes.append(f"{threads} threads on {cores} usable cores: set OMP_NUM_THREADS={cores}")


def fill_in_sizes(args):
    """Fill in the sizes that were not given: GPT-2's on an accelerator, smaller ones on a CPU."""
    on_cpu = args.device.type == "cpu"
    world_size = ranks.world_size()
    args.size = args.size or ("micro" if on_cpu else "gpt2")
    args.steps = args.steps or (STEPS_ON_CPU if on_cpu else STEPS)
    micro_batches = 2 if on_cpu else 4
    args.accum = args.accum or world_size * max(1, micro_batches // world_size)  # the same number on each rank
    if args.batch_size is None and on_cpu:
        args.batch_size = 1
    if args.batch_size is None:
        fill_in_batch_of_card(args)


def fill_in_batch_of_card(args):
    """Fill in how many sequences fit into the memory of the card, and add a note that says why."""
    if args.device.type == "cuda" and ranks.world_size() > 1:
        free = machine.memory_of_smallest_card()  # all ranks take what fits into it
    else:
        free = machine.free_memory_of_card(args.device)
    args.batch_size, needed = largest_batch(args.size, args.seq_len, free)
    word = "since" if needed <= free else "though"
    why = f"the stage that needs most takes {needed / 1e9:.1f} of {free / 1e9:.1f} GB"
    args.notes.append(f"batch size {args.batch_size}, {word} {why}")


def fill_in_techniques(args):
    """Turn on what the device can do, if no flag says otherwise. Notes say why a technique stays off."""
    native = machine.native_amp_dtype(args.device)
    if args.amp_dtype is None and native == torch.float32:
        args.notes.append("this device has no 16-bit units, so float32 stays")
    args.amp_dtype = getattr(torch, args.amp_dtype) if args.amp_dtype else native
    if args.compile is None:
        problem = machine.compile_problem(args.device)
        args.compile = problem is None
        if problem:
            args.notes.append(f"nothing is compiled: {problem}")


def check_ranks_of_stage(args):
    """Exit with one line if a stage, or its --accum, is not for as many processes as were started."""
    from . import ladder  # here, so that a stage in one process does not load it: see test_ladder.py

    world_size = ranks.world_size()
    stage = ladder.stage_of(sys.argv[0])
    if stage and not stage.takes_ranks:
        refuse(f"{stage.name} is for one process, and torchrun started {world_size}: start it with python")
    if args.accum % world_size:
        refuse(f"--accum {args.accum} can't be split evenly over {world_size} ranks: pass a multiple of {world_size}")


def check_save(args):
    """Exit with one line if --save would fail at the end, or replace a file."""
    try:
        args.save.touch(exist_ok=False)
        args.save.unlink()
    except OSError as error:
        refuse(f"--save {args.save}: {error.strerror}: pass the name of a new file in a folder that you can write to")
