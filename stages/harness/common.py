"""What all modules of the harness share: the root, refusals, lines of progress, whole files.

It imports nothing of ours.
"""

import contextlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # where data.py, model.py and stages/ are


def refuse(message):
    """End the program with one line on stderr and exit status 2, for a mistake that the user can correct."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def say(line, file=None, remark=None):
    """Print a line at once. Where that fails, as behind `| head` or on a full disk, it and all later lines go nowhere.

    file: where to print, instead of sys.stdout. remark: told on stderr where it fails, with the reason behind it.
    """
    file = file or sys.stdout
    try:
        print(line, file=file, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        if remark:
            tell(f"{remark}: {error.strerror}")


def tell(line):
    """Print a line of progress on stderr."""
    say(line, sys.stderr)


@contextlib.contextmanager
def whole_file(path):
    """Give a temporary path to write to. At the end that file replaces `path`, as a whole or not at all.

    Raises OSError, for example where the disk is full.
    """
    path = Path(os.path.realpath(path))  # where it is a link, the file behind the link is replaced
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
