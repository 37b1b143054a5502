"""Printing to a terminal that may lack a sign, and to a reader that may have left."""

import contextlib
import os
import sys


def replace_missing_signs():
    """Let stdout and stderr print ? for a sign that a terminal in ASCII or Latin-1 does not have."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # there is none, or a test has put another object there
            stream.reconfigure(errors="replace")


def say(line, file=None):
    """Print a line at once. Where nobody reads any more, as behind `| head`, this and all later lines go nowhere.

    file: where to print, instead of sys.stdout.
    """
    file = file or sys.stdout
    try:
        print(line, file=file, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
