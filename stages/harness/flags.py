"""The flags of the stages and of the bench: what they are, their checks, and a device's defaults."""

import argparse
import functools
import math
import os
import socket
import sys
from pathlib import Path

import torch

from data import VOCAB, InputError
from model import CONTEXT, SIZES, check_save

from . import arithmetic, ladder, log, machine, memory
from .results import BAD_INPUT, LEARNING_RATE, NOT_FOR_THIS_DEVICE, rate_text

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class NotForThisDevice(InputError):
    """The device can't run the stage, which is no failure in a bench."""


class Parser(argparse.ArgumentParser):
    """argparse with one line for a wrong flag, and no usage before it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def positive(text):
    """The whole number of 1 or more that a flag takes. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def learning_rate(text):
    """The finite number above 0 that --lr takes. Raises argparse.ArgumentTypeError."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not math.isfinite(rate) or rate <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, such as {rate_text(LEARNING_RATE)}")
    return rate


def add_flags(parser, rate=True):
    """Add the flags that all stages take, so that the bench can pass one set to all of them.

    rate: whether --lr is among them; the bench has one of its own, which takes several rates.
    """
    amp_from = ladder.first_with("amp_dtype").short
    compile_from = ladder.first_with("compile").short
    accum_from = ladder.first_with("accum").short
    add = parser.add_argument
    add("--steps", type=positive, metavar="N", help="optimizer steps, four of them warm-up (50; 24 on a CPU)")
    add(
        "--batch-size",
        type=positive,
        metavar="B",
        help="sequences in a micro-batch (16 or what fits; 1 on a CPU)",
    )
    add("--seq-len", type=positive, metavar="T", help=f"tokens in a sequence, at most {CONTEXT} (that many)")
    add("--size", choices=SIZES, help="model (gpt2; micro on a CPU)")
    add("--device", metavar="D", help="cuda, cuda:1, mps or cpu (the best one there is)")
    add("--seed", type=int, default=1337, metavar="S", help="of the weights (%(default)s)")
    if rate:
        rate_help = f"learning rate, the highest one where it decays ({rate_text(LEARNING_RATE)})"
        add("--lr", type=learning_rate, default=LEARNING_RATE, metavar="RATE", help=rate_help)
    add("--data", metavar="FILE", help="a .txt in UTF-8, or a .bin of uint16 ids (Tiny Shakespeare)")
    add(
        "--amp-dtype",
        choices=DTYPES,
        help=f"of autocast, from {amp_from} on (what the device does natively)",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help=f"torch.compile, from {compile_from} on (where it can)",
    )
    add(
        "--accum",
        type=positive,
        metavar="N",
        help=f"micro-batches per step of all ranks, from {accum_from} on (4; 2 on a CPU)",
    )
    add("--eval", action="store_true", help="at the end, take the loss on the held-out tenth of the corpus")
    add(
        "--profile",
        action="store_true",
        help="at the end, show where the last step's time went, and where it should have gone",
    )
    add("--record", metavar="FILE", help="write every step as a line of JSON to this new file")
    add("--save", metavar="DIRECTORY", help="write the weights there at the end, in Hugging Face's layout")
    add("--worker", action="store_true", help=argparse.SUPPRESS)  # what the bench starts: see log.Record


def parse_args(doc, argv=None):
    """The flags of a stage, every default resolved for the device; a bad value ends the run with status 2.

    doc: the stage's docstring, whose first line is its title. Returns a namespace of all flags, in which
    device is a torch.device and amp_dtype a torch.dtype, with what resolve() adds to it.
    """
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_flags(parser)
    args = parser.parse_args(argv)
    args.stage = Path(sys.argv[0]).resolve().stem
    args.title = (doc or args.stage).strip().splitlines()[0]  # python -OO has no docstrings
    sys.excepthook = functools.partial(log.end_run, args)
    if "RANK" in os.environ or "MASTER_ADDR" in os.environ:
        log.let_ctrl_c_kill()  # until StepLog starts
    try:
        resolve(args, ladder.find(args.stage))
        prepare_process(args)
    except InputError as error:
        if args.worker:
            reason = NOT_FOR_THIS_DEVICE if isinstance(error, NotForThisDevice) else BAD_INPUT
            log.Record(args).write("error", reason=reason, error=str(error))
        parser.error(str(error))
    for flag, reason in args.fallbacks.items():
        if ladder.is_used(flag, args.stage) and machine.is_rank_0():
            print(f"{flag}: {reason}", file=sys.stderr)
    return args


def resolve(args, stage=None):
    """Check the flags, and fill in the defaults that suit the device. Nothing but args is changed.

    args: a namespace of the flags; those that were not given are None. It gains `shape`, the model's as a
    dict, and `fallbacks`, {flag: why this machine can't do what its default would be}. stage: the
    ladder.Stage that runs, or None for the bench and for a script that is no stage. Raises InputError.
    """
    world_size = check_ranks()
    args.device = machine.find_device(args.device)
    check_stage(stage, args.device, world_size)
    given = {name for name, value in vars(args).items() if value is not None}
    native = machine.native_amp_dtype(args.device)
    args.amp_dtype = DTYPES[args.amp_dtype] if "amp_dtype" in given else native
    problem = machine.compile_problem(args.device, args.amp_dtype)
    defaults = defaults_of(args.device, world_size) | {"compile": problem is None}
    for name, value in defaults.items():
        if name not in given:
            setattr(args, name, value)
    args.shape = {"vocab_size": VOCAB, **SIZES[args.size]}
    args.fallbacks = {}
    if "amp_dtype" not in given and native == torch.float32:
        args.fallbacks["amp_dtype"] = f"this {args.device.type} has no 16-bit arithmetic, so float32 stays"
    if "compile" not in given and problem:
        args.fallbacks["compile"] = f"left out, {problem}"
    check_numbers(args, world_size)
    if args.save is not None:  # refused now rather than when the work is done
        check_save(args.save, nbytes=arithmetic.weight_bytes(args.shape, args.seq_len))
    if args.record is not None and machine.is_rank_0():
        check_record(args.record, args.save)


def check_ranks():
    """The number of processes that torchrun started. Raises InputError where its environment is not whole."""
    rank = machine.environment_number("RANK", 0)
    world_size = machine.world_size()
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        set_one = "RANK" if "RANK" in os.environ else "WORLD_SIZE"
        raise InputError(f"of RANK and WORLD_SIZE only {set_one} is set: unset it, or start the run with torchrun")
    if rank >= world_size:
        problem = f"RANK is {rank} and WORLD_SIZE is {world_size}"
        raise InputError(f"{problem}: unset both, or start the run with torchrun")
    machine.environment_number("MASTER_PORT", 0)  # for its error alone: torch.distributed reads the port itself
    address = os.environ.get("MASTER_ADDR")
    if address is not None:
        try:  # torch would try again for half an hour
            socket.getaddrinfo(address, None)
        except (OSError, UnicodeError) as error:  # the second for what can't be a name, such as "a..b"
            raise InputError(f"MASTER_ADDR is {address!r} ({error}): name the first node's address") from None
    return world_size


def check_stage(stage, device, world_size):
    """Raise InputError where a stage can't run on this device, or on so many ranks."""
    if stage is None:
        return
    if device.type in stage.not_for:
        raise NotForThisDevice(stage.not_for[device.type])
    if world_size > 1 and not stage.takes_ranks:
        raise InputError(f"{stage.name} is for one process, and torchrun started {world_size}: run s12_ddp")


def defaults_of(device, world_size):
    """{flag: default} of what the device decides. An accelerator trains GPT-2, a CPU a model that it can."""
    if device.type == "cpu":
        accum = 2
        defaults = {"size": "micro", "batch_size": 1, "steps": 24}
    else:
        accum = 4
        batch_size = fitting_batch_size(machine.total_memory(device))
        defaults = {"size": "gpt2", "batch_size": batch_size, "steps": 50}
    micro_batches_of_a_rank = max(1, accum // world_size)
    return defaults | {"seq_len": CONTEXT, "accum": world_size * micro_batches_of_a_rank}


def fitting_batch_size(total_memory):
    """The largest power of two, at most 16, that s01 fits into so many bytes at gpt2 and T 1024.

    From two sequences on, s03 needs 3 to 6 % more than s01, since it keeps weights and attention in two dtypes, and
    no other stage more than s01: tests/memory_of_stages.py counts it, and results/NOTES.md has its table.
    """
    for batch_size in (16, 8, 4, 2):
        if arithmetic.s01_bytes(batch_size) <= 0.9 * total_memory:  # a tenth stays free for libraries
            return batch_size
    return 1


def check_numbers(args, world_size):
    """Raise InputError where a number is out of its range."""
    if not 0 <= args.seed < 2**63:
        raise InputError(f"--seed must be from 0 to 2**63 - 1, got {args.seed}")
    if args.seq_len > CONTEXT:
        raise InputError(f"--seq-len {args.seq_len} is beyond GPT-2's block_size: pass {CONTEXT} or less")
    if args.accum % world_size:
        remedy = f"pass a multiple of {world_size}"
        raise InputError(f"--accum {args.accum} does not divide over {world_size} ranks: {remedy}")


def check_record(record, save):
    """Raise InputError where --record can't be a new file, or lies in the directory of --save."""
    if save is not None and Path(record).resolve().is_relative_to(Path(save).resolve()):
        raise InputError(f"--record {record} is inside --save {save}: name a file somewhere else")
    try:
        open(record, "x").close()
        os.unlink(record)
    except OSError as error:
        raise InputError(f"--record {record}: {error.strerror}; name a new file of yours") from None


def prepare_process(args):
    """Give this process its device, its memory, its threads and its compile workers; not in the bench itself."""
    if args.device.type == "cuda":
        torch.accelerator.set_device_index(args.device.index)
        if machine.is_wsl():  # the driver would take system memory for what does not fit, and crawl
            fraction = 0.95 * machine.free_share(args.device)
            torch.cuda.set_per_process_memory_fraction(fraction, args.device)
    # torch.compile would start a worker for every core of the machine, 32 at most, though a container has fewer
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, machine.cores())))
    if args.device.type == "cpu":
        memory.keep_freed()
        set_threads(args.worker)


def set_threads(is_worker):
    """Let torch use this process's share of the cores, unless the user or the bench chose another number of threads."""
    threads, cores, ranks_here = torch.get_num_threads(), machine.cores(), machine.local_world_size()
    # torchrun gives each of several ranks one thread, however many cores there are; a worker's number is the bench's
    too_few = ranks_here > 1 and threads == 1 and not is_worker
    # torch counts the cores of the machine, though a container has fewer
    too_many = threads > cores and "OMP_NUM_THREADS" not in os.environ
    if too_few or too_many:
        torch.set_num_threads(max(1, cores // ranks_here))
