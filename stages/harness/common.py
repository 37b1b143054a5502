"""What all modules of the harness share: the root, refusals, lines on the terminal. It imports nothing of ours."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # where data.py, model.py and stages/ are
# The cores that this process may use; None if the system does not say. They are read before torch is imported, which
# binds the process to one of them if OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY is set.
AFFINITY = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def set_up_output():
    """Let each printed line appear at once, also in a file or a pipe. A kill would lose lines that are buffered."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # without a console it is None, and a test may replace it
            stream.reconfigure(line_buffering=True, errors="replace")  # "?" for what an ASCII terminal can't show


def refuse(message):
    """End the program with one line on stderr and exit status 2, for a mistake that the user can correct."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def say(line, file=None, remark=None):
    """Print a line at once. If that fails, as in `| head` or on a full disk, this line and all later ones are dropped.

    file: where to print, instead of sys.stdout. remark: what to say on stderr if it fails, before the reason.
    """
    file = file or sys.stdout
    try:
        file.write(f"{line}\n")  # a watched script may have replaced print()
        file.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        if remark:
            tell(f"{remark}: {error.strerror}")


def tell(line):
    """Print a line of progress on stderr."""
    say(line, sys.stderr)
