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

from harness import ROOT, ladder, machine  # first: it makes data and model importable from here
from harness.common import refuse, say
from harness.figures import COUNTED_STEPS, WARMUP
from harness.flags import Parser, positive, seed
from harness.log import Log
from harness.scripts import folder_of, logs_by_itself
from harness.watch import hooks
from harness.watch.watcher import STEPS_ON_A_CARD, Watcher, end_process

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

DEFAULT_STEPS = f"{WARMUP + COUNTED_STEPS}, on a GPU {STEPS_ON_A_CARD}"
ENDED = "ended"


def parse_command(argv):
    """Return watch.py's own flags as a namespace, with script, is_module and script_argv, its own flags.

    It also has added, the techniques to add; folder, where the script runs; and title, the script as it was typed.
    Exits with one line and status 2 where there is no script, or it can't be watched.
    """
    own, script, is_module, script_argv = split_command(argv)
    if script is None:
        refuse_what_is_no_script(own)
    parser = Parser(__doc__, usage="watch.py [flags] [+TECHNIQUE ...] SCRIPT.py | -m MODULE [its own flags]")
    add = parser.add_argument
    steps_help = f"stop it after so many timed steps, the first {WARMUP} of them warm-up; all lets it end"
    add("--steps", type=steps_or_all, metavar="N", help=f"{steps_help} ({DEFAULT_STEPS})")
    add("--seed", type=seed, default=1337, metavar="S", help="of random, numpy and torch (%(default)s)")
    add("--profile", action="store_true", help="take one more step at the end, and show where its time went")
    add("--record", dest="record_path", metavar="FILE", help="write every step as a line of JSON to this new file")
    args = parser.parse_args([word for word in own if not word.startswith("+")])
    if args.steps == "all" and args.profile:
        refuse("--profile shows the step behind the last one, and --steps all has none: pass a number")
    args.added = [word[1:] for word in own if word.startswith("+")]
    for name in args.added:
        if name not in ladder.ADDED:
            refuse(f"+{name} is no technique that can be added from outside: --help lists them")
    args.script, args.is_module, args.script_argv = script, is_module, script_argv
    args.title = f"-m {script}" if is_module else script
    args.folder = Path.cwd() if is_module else folder_of(script)
    if not is_module and not Path(script).is_file():
        refuse(f"there is no script {script}")
    if not is_module and logs_by_itself(script):
        refuse(f"{script} logs its steps by itself: start it by python {script}")
    if args.folder != Path.cwd():
        args.script = str(Path(script).resolve())
    return args


def split_command(argv):
    """Return (own flags, script or module or None, whether it is a module, the script's own flags)."""
    for place, word in enumerate(argv):
        if word == "-m" and place + 1 < len(argv):
            return argv[:place], argv[place + 1], True, argv[place + 2 :]
        if word.endswith(".py") and (place == 0 or argv[place - 1] != "--record"):
            return argv[:place], word, False, argv[place + 1 :]
    return argv, None, False, []


def refuse_what_is_no_script(words):
    """Exit with one line, where a command has no script among its words."""
    for word in words:
        stage = ladder.stage_of(word)
        if stage:
            refuse(f"{word} is a stage, and logs its steps by itself: python stages/{stage.name}.py")
        if word.endswith(".ipynb"):
            refuse(f"{word} is a notebook: jupyter nbconvert --to script {word} makes a script of it")
    if not {"-h", "--help"} & set(words):
        refuse("pass a script: python stages/watch.py train.py, with its flags behind it, or -m and a module")


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
    path, spec, package = args.script, None, None
    if args.is_module:
        try:
            _, spec, code = runpy._get_module_details(args.script)  # as python -m and pdb do
        except ImportError as error:
            print(f"error: -m {args.script}: {error}: -m looks for it from {os.getcwd()} on", file=sys.stderr)
            end_process(2)
        path, package = spec.origin, spec.parent
        sys.argv[0] = path
    else:
        code = compile(Path(path).read_bytes(), path, "exec")
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__file__=path, __spec__=spec, __package__=package, __builtins__=builtins)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main_module
    exec(code, main_module.__dict__)


def watch(args, watcher):
    """Run the script under the watcher, and tell how it ended. Return the exit status, 2 without a timed step."""

    def exit_at_once(status):
        """What os._exit is for the script: in this process it first tells what was timed."""
        if os.getpid() == watcher.pid:
            tell_end(watcher, f"called os._exit({status})")
            watcher.leave(status)
        end_process(status)

    os._exit = exit_at_once
    status, reason, last_words = 0, ENDED, ""
    try:
        run(args)
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):  # Python prints anything else, and exits with 1
            status, last_words = 1, str(end.code)
            print(last_words, file=sys.stderr)
        if status:
            reason = f"ended with exit status {status}"
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
    tell_end(watcher, reason, last_words)
    if status == 0 and not watcher.log.steps:
        return 2
    return status


def tell_end(watcher, reason, last_words=""):
    """Print the summary of the steps that a script took, and how it ended where more steps were asked for."""
    args, steps = watcher.args, len(watcher.log.steps)
    if os.getpid() != watcher.pid:  # a child that the script forked
        return
    if reason == ENDED and args.steps == "all" and steps:
        watcher.finish()
        return
    if watcher.optimizer is None:
        line = f"{reason}, and no step of a torch optimizer was seen in this process"
        if reason == ENDED and not args.log.is_led:
            line += ". Ranks that it starts itself must take RANK and WORLD_SIZE from torchrun: see --help"
    else:
        asked = "" if args.steps == "all" else f" of {args.steps}"
        line = f"{reason} after {steps}{asked} timed steps"
    if args.log.is_led:
        args.log.write_error(line, last_words)
    else:
        watcher.finish()
        print(f"{args.title} {line}", file=sys.stderr)


def main(argv):
    machine.check_ranks()
    args = parse_command(argv)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")  # open where the script closes its stdout
    args.log = Log(args.record_path, out=out)
    watcher = Watcher(args)
    if machine.is_rank_0() and not args.log.is_led:
        say(f"watching {args.title} in {args.folder} for {args.steps or DEFAULT_STEPS} steps")
        say(f"this seeds it with {args.seed}, and waits for the device after each step")
    hooks.watch_pytorch(watcher)
    leave_home_to(args)
    status = watch(args, watcher)
    watcher.probe.stop()  # which must not be at work when Python ends
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
