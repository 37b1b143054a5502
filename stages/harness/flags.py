"""The flags of the stages, and the defaults that suit a device."""

import argparse
import math
import os
import sys
from pathlib import Path

import torch

from model import SIZES

from . import ladder, machine
from .arithmetic import memory_of_s01, shape_of_size
from .common import refuse
from .figures import COUNTED_STEPS, WARMUP
from .log import Log

MOST_SEQUENCES = 16  # of the default batch
CONTEXT = 0.5e9  # bytes of a card that the driver takes for a process
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Defaults that do not work everywhere, as a line of the terminal names them.
SHOWN_AS = {
    "environment": "environment",
    "amp_dtype": "--amp-dtype, from s03 on",
    "compile": "--compile, from s04 on",
}


class Parser(argparse.ArgumentParser):
    """argparse with one line for a wrong flag, and no usage before it."""

    def __init__(self, doc, usage=None):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=doc, usage=usage, formatter_class=formatter, allow_abbrev=False)

    def error(self, message):
        refuse(f"{message}; --help lists the flags")


def positive(text):
    """Return the number in a text. Raises argparse.ArgumentTypeError where it is not a whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def seed(text):
    """Return the number in a text. Raises argparse.ArgumentTypeError where it is not from 0 to the last of numpy's."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


def learning_rate(text):
    """Return the number in a text. Raises argparse.ArgumentTypeError where it is not above 0, or infinite."""
    rate = float(text)
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return rate


def parse_args(doc):
    """Return the flags of a stage as a namespace, and open its log, which keeps an exception from here on.

    doc: the docstring of the stage, whose first line is its title, or None. The namespace has every default resolved
    for the device: device is a torch.device, amp_dtype a torch.dtype. It also has script, the path; stage, a
    ladder.Stage or None; title; and log. Exits with one line and status 2 for a wrong flag.
    """
    machine.check_ranks()
    machine.become_a_world_of_one()
    args = parse(doc, sys.argv[1:])
    args.script = Path(sys.argv[0]).resolve()
    args.stage = ladder.stage_of(str(args.script))
    args.title = (doc or args.script.stem).strip().splitlines()[0]
    check(args)
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    args.log = Log(args.record_path, args.batch_size)
    sys.excepthook = args.log.tell_failure
    for name, reason in args.fallbacks.items():
        args.log.notice(f"{SHOWN_AS[name]}: {reason}")
    if args.why_this_batch:
        args.log.notice(args.why_this_batch)
    return args


def parse(doc, argv):
    """Return the flags in argv as a namespace, every default resolved for the device.

    doc: what --help begins with. The namespace also has `fallbacks`, {flag: why its usual default does not work on this
    machine}; and `why_this_batch`, a sentence where the batch was chosen by the memory of a card, else None. Exits with
    one line and status 2 for a wrong flag.
    """
    args = new_parser(doc).parse_args(argv)
    args.device = machine.find_device(args.device)
    fill_in_defaults(args)
    return args


def settings_of(args):
    """Return what parse() returned as the settings of a record's header, a dict."""
    names = ("steps", "batch_size", "seq_len", "size", "seed", "lr", "data", "compile", "accum")
    settings = {name: getattr(args, name) for name in names}
    settings["world_size"] = machine.world_size()
    settings["amp_dtype"] = machine.dtype_name(args.amp_dtype)
    return settings


def new_parser(doc):
    """Return the parser of the flags. All stages take the same, so that the bench can pass one list to all of them."""
    parser = Parser(doc)
    add = parser.add_argument
    steps_help = f"optimizer steps, the first {WARMUP} of them warm-up (50; {WARMUP + COUNTED_STEPS} on a CPU)"
    add("--steps", type=positive, metavar="N", help=steps_help)
    add("--batch-size", type=positive, metavar="B", help="sequences in a micro-batch (16 or what fits; 1 on a CPU)")
    add("--seq-len", type=positive, default=1024, metavar="T", help="tokens in a sequence (%(default)s)")
    add("--size", choices=SIZES, help="model (gpt2; micro on a CPU)")
    add("--device", metavar="D", help="cuda, cuda:1, mps or cpu (the best one there is)")
    add("--seed", type=seed, default=1337, metavar="S", help="of the weights (%(default)s)")
    rate_help = "learning rate, the highest one where it decays (%(default)s)"
    add("--lr", type=learning_rate, default=6e-4, metavar="RATE", help=rate_help)
    data_help = (
        "a text in UTF-8; GPT-2's ids as a .npy, or as a .bin of uint16 (np.array(ids, np.uint16).tofile(FILE)); "
    )
    data_help += 'a folder of these; or "docs", Python\'s documentation (Tiny Shakespeare)'
    add("--data", metavar="FILE", help=data_help)
    add("--amp-dtype", choices=DTYPES, help="of autocast, from s03 on (what the device does natively)")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile, from s04 on (where it can)")
    accum_help = "micro-batches per step of all ranks, from s11 on (4; 2 on a CPU; at least one for each rank)"
    add("--accum", type=positive, metavar="N", help=accum_help)
    add("--eval", action="store_true", help="at the end, take the loss on held-out text, the corpus's last tenth")
    profile_help = "at the end, show where the last step's time went, and where it should have gone"
    add("--profile", action="store_true", help=profile_help)
    add("--record", dest="record_path", metavar="FILE", help="write every step as a line of JSON to this new file")
    add("--save", metavar="FILE", help="write the weights there at the end")
    return parser


def fill_in_defaults(args):
    """Fill in the flags that were not given. An accelerator trains GPT-2, a CPU a model that it can train."""
    on_cpu = args.device.type == "cpu"
    args.fallbacks = {}
    args.why_this_batch = None
    if args.size is None:
        args.size = "micro" if on_cpu else "gpt2"
    if args.batch_size is None:
        args.batch_size = 1
        if not on_cpu:
            fit_batch(args, machine.free_memory_of_card(args.device))
    if args.steps is None:
        args.steps = WARMUP + COUNTED_STEPS if on_cpu else 50
    if args.accum is None:
        ranks = machine.world_size()
        micro_batches = 2 if on_cpu else 4
        args.accum = ranks * max(1, micro_batches // ranks)  # all ranks as many, and at least one
    if args.amp_dtype is not None:
        args.amp_dtype = DTYPES[args.amp_dtype]
    else:
        args.amp_dtype = machine.native_amp_dtype(args.device)
        if args.amp_dtype == torch.float32:
            args.fallbacks["amp_dtype"] = f"this {args.device.type} has no 16-bit arithmetic, so float32 stays"
    if args.compile is None:
        problem = machine.compile_problem(args.device)
        args.compile = problem is None
        if problem:
            args.fallbacks["compile"] = f"left out, {problem}"
    elif args.compile:  # what was asked for comes before what is in the environment
        for name in machine.COMPILE_IS_OFF:
            os.environ.pop(name, None)
    slow = machine.what_slows_down()
    if slow:
        args.fallbacks["environment"] = f"slower, by {slow}"


def fit_batch(args, free):
    """Set args.batch_size to a power of two, at most 16, with which s01 fits into the free bytes of a card.

    It is 1 where none fits. args.why_this_batch then says what was counted.
    """
    shape = shape_of_size(args.size, args.seq_len)
    args.batch_size = MOST_SEQUENCES
    while args.batch_size > 1 and memory_taken(shape, args.batch_size) > free:
        args.batch_size //= 2
    needed = memory_taken(shape, args.batch_size)
    args.why_this_batch = f"B {args.batch_size}: s01 takes {needed / 1e9:.1f} of {free / 1e9:.1f} GB that are free"
    if needed > free:
        args.why_this_batch += ", and does not fit: from s05 on it may"


def memory_taken(shape, batch_size):
    """Return the bytes that a process of s01 takes of a card.

    PyTorch reserves more than its tensors hold, and s03 holds more than s01: on an H100 7 and 3 %.
    """
    return CONTEXT + 1.1 * memory_of_s01(shape, batch_size)


def check(args):
    """Exit with one line where the flags do not fit the ranks, the stage or the disk."""
    ranks, stage = machine.world_size(), args.stage
    if args.accum % ranks:
        refuse(f"--accum {args.accum} does not divide over {ranks} ranks: pass a multiple of {ranks}")
    if stage and ranks > 1 and not stage.takes_ranks:
        others = [other.name for other in ladder.STAGES if other.takes_ranks]
        refuse(f"{stage.name} is for one process, and torchrun started {ranks}: run {' or '.join(others)}")
    if stage and stage.takes_ranks and args.device.type == "mps":
        refuse(f"{stage.name} averages gradients by gloo or nccl, which do not know mps: pass --device cpu")
    if args.save:  # looked at here, since at its end a training would be lost
        path = Path(args.save)
        if path.exists() and not path.is_file():
            refuse(f"--save {path} is no file: name one")
        if not path.resolve().parent.is_dir() or not os.access(path.resolve().parent, os.W_OK):
            refuse(f"--save {path}: its folder is not there, or you may not write to it")
