"""Runs a PyTorch training script unchanged, times its steps, and lists which techniques it has and lacks.

    python stages/watch.py ../nanoGPT/train.py --batch_size=8
    python stages/watch.py --steps 30 ../nanoGPT/train.py --batch_size=8
    python stages/watch.py +bf16 +compile ../nanoGPT/train.py --batch_size=8
    python stages/watch.py -m scripts.base_train --depth=4
    torchrun --standalone --nproc_per_node=2 stages/watch.py train.py

Flags before the script are watch.py's own, and those after it are the script's. Nothing in the script changes. PyTorch
calls watch.py after each step of an optimizer: there a step ends, and the next one begins. Of several optimizers the
first one to step ends the steps, and if each has a loss of its own, as in a GAN, loss and batch are those of the first.

+tf32, +bf16, +compile and +fused add a technique from outside. +fp16 is autocast in float16 without a GradScaler: it
shows the speed, and its losses are not those of a training and may be NaN. The script reads its stdin as always; in a
bench that is empty.
"""

import os
import sys

if sys.flags.safe_path:  # PYTHONSAFEPATH: Python leaves out this folder
    sys.path.insert(0, os.path.dirname(__file__))
from harness import ROOT, ladder, ranks  # first: it makes data and model importable from here
from harness.common import refuse, set_up_output
from harness.flags import Parser, positive, seed
from harness.steps import STEPS_OF_SCRIPT, WARMUP
from harness.watch import hooks, pytorch
from harness.watch.guard import in_a_line
from harness.watch.log import Log
from harness.watch.run import Run
from harness.watch.threads import is_elsewhere
from harness.watch.watcher import Watcher

import argparse
import builtins
import random
import shlex
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


def main(argv):
    if "get_ipython" in vars(builtins):  # this ends the process, which would be the notebook's
        refuse("watch.py needs a process of its own: type !python stages/watch.py ... in place of %run")
    set_up_output()
    ranks.check_ranks()
    args = parse_command(argv)
    script = script_of(args)
    # copies, which stay open if the script closes its own, under numbers that none of its files gets
    copies = [os.dup2(number, 200 + number, inheritable=False) for number in (1, 2)]
    out, err = (os.fdopen(number, "w", encoding="utf-8", errors="replace") for number in copies)
    log = Log(args.record_path, args.warmup, bool(args.gate), out, err)
    run = Run(script, args, log)
    limit = "" if args.gate else f" for {args.steps} steps"
    log.say(f"watching {script.title} in {script.folder}{limit}")
    log.say(f"it is seeded with {args.seed}, and each step waits for the device")
    hooks.watch_pytorch(Watcher(run))
    rename_our_modules()
    become_process_of_script(script, args.seed)
    status, reason = run_script(script, run)
    if not is_elsewhere():
        status = report_end(run, status, reason)
    run.guard.around(run.profiler.stop, "its profile")()  # which must not be at work when Python ends
    sys.exit(status)


# The command line


def parse_command(argv):
    """Return watch.py's flags as a namespace. Its `command` is the list of the script and the script's own flags."""
    parser = Parser(__doc__, usage="watch.py [flags] [+TECHNIQUE ...] SCRIPT.py | -m MODULE [its own flags]")
    parser.prefix_chars = "-+"
    add = parser.add_argument
    steps_help = "stop it after N steps, when it begins another: at least 2 (%(default)s)"
    add("--steps", type=positive, default=STEPS_OF_SCRIPT, metavar="N", help=steps_help)
    warmup_help = "how many of these are not counted: at least 2 (%(default)s)"
    add("--warmup", type=positive, default=WARMUP, metavar="N", help=warmup_help)
    add("--seed", type=seed, default=1337, metavar="S", help="seed for random, numpy and torch (%(default)s)")
    add("--record", dest="record_path", metavar="FILE", help="write every step as a line of JSON to this new file")
    add("--gate", nargs=2, help=argparse.SUPPRESS)  # of the bench: a file and a process, see gate.py
    for name, stage in ladder.ADDED.items():
        line = stage.line.replace("`", "")
        add(f"+{name}", dest="added", action="append_const", const=name, default=[], help=f"add {line}")
    add("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    add("command", nargs=argparse.PARSER, metavar="SCRIPT.py", help="or a module; the rest is for the script")
    args = parser.parse_args(argv)
    args.steps = max(args.steps, 2)
    args.warmup = max(args.warmup, 2)  # on a CPU the second one is profiled
    if args.record_path:
        args.record_path = os.path.abspath(args.record_path)  # the script runs in another folder
    return args


@dataclass
class Script:
    """What is watched.

    path: of its file, or the name of a module. argv: its own flags. title: the script as it was typed. folder: where it
    runs. climb: the command that measures what it lacks, or None. saves: whether it is a stage that writes its weights
    at the end.
    """

    path: str
    argv: list
    is_module: bool
    title: str
    folder: Path
    climb: str | None
    saves: bool


def script_of(args):
    """Return the Script of a command line. Exits with one line and status 2 if it can't be watched."""
    path, *argv = args.command
    if not args.is_module:
        check_script(path)
    title = f"-m {path}" if args.is_module else path
    climb = climb_of(args)
    folder = folder_of(path)
    if folder != Path.cwd():
        path = str(folder / Path(path).name)
    saves = ladder.is_beside_the_stages(path) and any(word.split("=")[0] == "--save" for word in argv)
    return Script(path, argv, args.is_module, title, folder, climb, saves)


def climb_of(args):
    """Return the command that measures what a script lacks.

    None for a stage, in a bench, and if torchrun has started it, or something is added to it.
    """
    if args.added or args.gate or ranks.world_size() > 1 or ladder.is_beside_the_stages(args.command[0]):
        return None
    command = ["-m", *args.command] if args.is_module else args.command
    return shlex.join(["python", os.path.relpath(ROOT / "bench.py"), "--climb", shlex.join(command)])


def check_script(script):
    """Exit with one line and status 2 if a file is missing or is no Python script."""
    path = Path(script)
    if not path.is_file():
        refuse(f"there is no script {script}: pass the path of a .py file")
    if path.suffix == ".ipynb":
        refuse(f"{script} is a notebook: jupyter nbconvert --to script {script} makes a .py file of it")
    if path.suffix != ".py":
        try:
            compile(path.read_bytes(), script, "exec")
        except (SyntaxError, ValueError):  # the latter for a null byte
            refuse(f"{script} is no Python script: pass the path of a .py file")


def folder_of(script):
    """Return the folder in which a script runs: the current one, as under python.

    If that is within this repository and the script is not, it is the script's own, where its data may be.
    """
    here, home = Path.cwd(), Path(script).parent.resolve()  # of a link to a script, where the link lies
    if here.is_relative_to(ROOT) and not home.is_relative_to(ROOT):
        return home
    return here


def rename_our_modules():
    """Leave the names of our modules to the script's own. torch.compile imports ours by the new names."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("harness", "data", "model"):
            module = sys.modules.pop(name)
            module.__name__ = f"speed_ladder.{name}"
            sys.modules[module.__name__] = module


# The script


def become_process_of_script(script, random_seed):
    """Give this process the script's folders and flags, and the seed of all that draws random numbers."""
    os.chdir(script.folder)
    sys.path.remove(str(ROOT))
    sys.path[0] = os.getcwd() if script.is_module else str(Path(script.path).resolve().parent)
    sys.argv = [script.path, *script.argv]
    random.seed(random_seed)
    np.random.seed(random_seed)
    torch.manual_seed(random_seed)


def run_script(script, run):
    """Run the script to its end. Return (exit status, how it ended in words)."""
    try:
        execute(script, run)
    except SystemExit as end:
        is_a_number = isinstance(end.code, (int, type(None)))
        if not is_a_number and (is_elsewhere() or not run.log.is_rank_0):  # else the notice has it
            print(end.code, file=sys.stderr)
        if status_of(end):
            return status_of(end), f"ended by sys.exit({end.code!r})"
    except KeyboardInterrupt:
        return 130, "was interrupted"
    except BaseException as error:
        return report_failure(error, run), f"failed by {type(error).__name__}"
    return 0, "ended"


def status_of(end):
    """Return the exit status of a SystemExit, as Python has it."""
    if end.code is None:
        return 0
    return end.code if isinstance(end.code, int) else 1


def report_failure(error, run):
    """Record and print the exception that ended the script. Return the exit status, which its own hook may choose."""
    while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next  # the script's own begins behind execute()
    if not is_elsewhere():
        text = "".join(traceback.format_exception(error))
        run.log.write_error(in_a_line(error), text)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as end:
        return status_of(end)
    except Exception:  # the script's own hook fails, or is None
        sys.__excepthook__(type(error), error, error.__traceback__)
    return 1


class NoModule(Exception):
    """There is no module of this name. What a module raises by itself is another exception."""


def execute(script, run):
    """Execute the script as the module __main__. Raises what it raises.

    runpy.run_path() would leave __mp_main__ as watch.py. A process that a DataLoader spawns looks there for classes of
    the script.
    """
    spec = None
    if script.is_module:
        try:
            _, spec, code = pytorch.module_details(script.path, NoModule)
        except NoModule as error:
            run.reject(f"{script.title}: {error}: -m looks for it from {os.getcwd()} on")  # this ends the process
        sys.argv[0] = spec.origin
    else:
        code = compile(Path(script.path).read_bytes(), os.path.abspath(script.path), "exec")
    main_module = types.ModuleType("__main__")
    main_module.__file__ = os.path.abspath(sys.argv[0])  # as Python has it, for scripts that change their folder
    main_module.__spec__ = spec
    main_module.__builtins__ = builtins
    main_module.__cached__ = spec.cached if spec else None
    main_module.__package__ = spec.parent if spec else None
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main_module
    exec(code, main_module.__dict__)


def report_end(run, status, reason):
    """Print the figures and how the script ended. Return the exit status, which is 2 if nothing was timed.

    A script that failed keeps its own.
    """
    run.finish()
    run.log.notice(f"{run.script.title} {words_on_end(run, status, reason)}")
    is_untimed = not (run.log.steps or run.guard.lost)
    return 2 if status == 0 and is_untimed else status


def words_on_end(run, status, reason):
    """Return how a script ended, and why nothing was timed."""
    if "its steps" in run.guard.lost:
        return reason
    if run.steps_taken == 0:
        words = f"{reason}, and no optimizer of torch.optim, or of a subclass, stepped in the main thread"
        if status:
            return words
        if run.calls_backward():
            return f"{words}. One of another kind, as Keras and fastai have, can't be watched"
        return f"{words}. Several ranks must be started by torchrun"
    if run.steps_taken == 1:
        return f"{reason} after one step, and only a second one shows what is trained"
    return f"{reason} after {run.steps_taken} steps"


if __name__ == "__main__":
    main(sys.argv[1:])
