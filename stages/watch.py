"""Runs any training script as it is, times each step of its optimizer, and says what it has of the ladder and lacks.

    python stages/watch.py ../nanoGPT/train.py --batch_size=8
    python stages/watch.py --steps 30 --profile ../nanoGPT/train.py --batch_size=8
    python stages/watch.py +bf16 +compile ../nanoGPT/train.py --batch_size=8
    python stages/watch.py -m scripts.base_train --depth=4
    torchrun --standalone --nproc_per_node=2 stages/watch.py train.py

Flags before the script are watch.py's own, and those behind it are the script's. Nothing in the script changes. PyTorch
calls watch.py after each step of an optimizer: there a step ends, and the next one begins. +tf32, +bf16, +compile and
+fused add a technique from outside.
"""

from harness import ROOT, ladder, ranks  # first: it makes data and model importable from here
from harness.common import refuse, say
from harness.figures import COUNTED_STEPS, WARMUP
from harness.flags import Parser, positive
from harness.log import Log
from harness.scripts import folder_of, logs_by_itself
from harness.watch import hooks
from harness.watch.watcher import Watcher

import builtins
import os
import random
import runpy
import sys
import traceback
import types
from pathlib import Path

import numpy as np
import torch

DEFAULT_STEPS = WARMUP + COUNTED_STEPS


def parse_command(argv):
    """Return watch.py's own flags as a namespace, with script, is_module and script_argv, its own flags.

    It also has added, the techniques to add; folder, where the script runs; and title, the script as it was typed.
    Exits with one line and status 2 where there is no script, or it can't be watched.
    """
    own, command, is_module = split_command(argv)
    parser = Parser(__doc__, usage="watch.py [flags] [+TECHNIQUE ...] SCRIPT.py | -m MODULE [its own flags]")
    add = parser.add_argument
    steps_help = f"stop it after so many timed steps, the first {WARMUP} of them warm-up; all lets it end"
    add("--steps", type=steps_or_all, default=DEFAULT_STEPS, metavar="N", help=f"{steps_help} (%(default)s)")
    add("--seed", type=int, default=1337, metavar="S", help="of random, numpy and torch (%(default)s)")
    add("--profile", action="store_true", help="take one more step at the end, and show where its time went")
    add("--record", dest="record_path", metavar="FILE", help="write every step as a line of JSON to this new file")
    args = parser.parse_args([word for word in own if not word.startswith("+")])
    if not command:
        refuse("pass a script: python stages/watch.py train.py, with its flags behind it, or -m and a module")
    args.script, *args.script_argv = command
    args.is_module = is_module
    args.added = [word[1:] for word in own if word.startswith("+")]
    for name in args.added:
        if name not in ladder.ADDED:
            refuse(f"+{name} is no technique that can be added from outside: --help lists them")
    if args.steps == "all" and args.profile:
        refuse("--profile shows the step behind the last one, and --steps all has none: pass a number")
    if is_module:
        args.title, args.folder = f"-m {args.script}", Path.cwd()
        return args
    if not Path(args.script).is_file():
        refuse(f"there is no script {args.script}")
    if logs_by_itself(args.script):
        refuse(f"{args.script} logs its steps by itself: start it by python {args.script}")
    args.title, args.folder = args.script, folder_of(args.script)
    if args.folder != Path.cwd():
        args.script = str(Path(args.script).resolve())
    return args


def split_command(argv):
    """Return (own flags, script or module with its own flags, whether it is a module)."""
    for place, word in enumerate(argv):
        if word == "-m":
            return argv[:place], argv[place + 1 :], True
        if word.endswith(".py"):
            return argv[:place], argv[place:], False
    return argv, [], False


def steps_or_all(text):
    """Return the number in a text, or "all"."""
    return text if text == "all" else positive(text)


def leave_home_to(args):
    """Make this process the script's own: its folders, its flags, an empty stdin, none of our modules."""
    os.chdir(args.folder)
    for name in list(sys.modules):
        if name.split(".")[0] in ("harness", "data", "model"):
            module = sys.modules.pop(name)
            # torch.compile imports the module of a function by its name where it meets one, as those of the watcher
            module.__name__ = f"speed_ladder.{name}"
            sys.modules[module.__name__] = module
    sys.path.remove(str(ROOT))
    sys.path[0] = os.getcwd() if args.is_module else str(Path(args.script).resolve().parent)
    sys.argv = [args.script, *args.script_argv]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)


def run(args):
    """Run the script to its end, as the module __main__. Raises what it raises.

    runpy would do the same, but a loader that starts processes also finds the script's classes in __mp_main__, which
    multiprocessing set to watch.py.
    """
    spec = None
    if args.is_module:
        try:
            _, spec, code = runpy._get_module_details(args.script)  # as python -m and pdb do
        except ImportError as error:
            if error.name is not None:  # the module is there, and imports something that is not
                raise
            args.log.write_error(f"-m {args.script}: {error}")
            print(f"error: -m {args.script}: {error}: -m looks for it from {os.getcwd()} on", file=sys.stderr)
            os._exit(2)
        sys.argv[0] = spec.origin
    else:
        code = compile(Path(args.script).read_bytes(), args.script, "exec")
    main_module = types.ModuleType("__main__")
    main_module.__file__, main_module.__spec__, main_module.__builtins__ = sys.argv[0], spec, builtins
    main_module.__package__ = spec.parent if spec else None
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main_module
    exec(code, main_module.__dict__)


def watch(args, watcher):
    """Run the script under the watcher, and tell how it ended. Return the exit status, 2 without a timed step."""
    status, reason = 0, "ended"
    try:
        run(args)
    except SystemExit as end:
        if end.code:
            status = end.code if isinstance(end.code, int) else 1  # as Python has it
            reason = f"ended by sys.exit({end.code!r})"
    except KeyboardInterrupt:
        status, reason = 130, "was interrupted"
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next.tb_next  # without watch() and run()
        text = "".join(traceback.format_exception(error))
        print(text, end="", file=sys.stderr)
        args.log.write_error(f"{type(error).__name__}: {error}", text)
        if args.log.is_led:
            return 1
        status, reason = 1, f"failed by {type(error).__name__}"
    if os.getpid() != watcher.pid:  # a child that the script forked
        return status
    steps = len(watcher.log.steps)
    if args.steps == "all" and steps and not status:
        watcher.finish()
        return 0
    asked = "" if args.steps == "all" else f" of {args.steps}"
    line = f"{reason} after {steps}{asked} timed steps"
    if watcher.t0 is None:
        line = f"{reason}, and no step of a torch optimizer was seen in the main thread of this process"
        if watcher.seen.losses:
            line += ". It calls backward(): only optimizers of torch.optim, and their subclasses, tell of their steps"
        elif not status:
            line += ". Ranks that it starts itself must take RANK and WORLD_SIZE from torchrun: see --help"
    if args.log.is_led:
        args.log.write_error(line)
    else:
        watcher.finish()
        print(f"{args.title} {line}", file=sys.stderr)
    if status == 0 and steps == 0:
        return 2
    return status


def main(argv):
    ranks.check_ranks()
    args = parse_command(argv)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")  # open where the script closes its stdout
    args.log = Log(args.record_path, out=out)
    watcher = Watcher(args)
    if ranks.is_rank_0() and not args.log.is_led:
        say(f"watching {args.title} in {args.folder} for {args.steps} steps")
        say(f"this seeds it with {args.seed}, and waits for the device after each step")
    hooks.watch_pytorch(watcher)
    leave_home_to(args)
    status = watch(args, watcher)
    watcher.probe.stop()  # which must not be at work when Python ends
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
