"""Holds a row back between two steps, until the bench that has started it lets it take the next one.

The bench appends a byte to a file for each step that it allows, so the size of the file is their number. It removes the
file when it wants no more steps.
"""

import os
import time

from .. import machine, ranks
from .threads import end_process

OFTEN, SELDOM = 0.002, 0.05  # seconds between two looks, in the first second and later


def allows(path, steps):
    """Return whether the bench allows a step after the first `steps` by now."""
    try:
        return os.path.getsize(path) > steps
    except OSError:  # it wants no more
        return False


def wait_for_step(path, bench_pid, steps):
    """Wait until the bench allows a step after the first `steps`. Return False if it wants no more.

    Ends this process if the bench is gone.
    """
    began = time.monotonic()
    bench_pid = int(bench_pid)
    while os.path.exists(path):
        if allows(path, steps):
            return True
        if is_gone(bench_pid):
            end_process(1)
        # of several ranks the last one to see its step keeps the others waiting in theirs
        looks_often = ranks.world_size() > 1 or time.monotonic() - began < 1
        time.sleep(OFTEN if looks_often else SELDOM)
    return False


def is_gone(pid):
    """Return whether there is no process of this number, or only what is left of one until its parent asks for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "\nState:\tZ" in machine.read_text(f"/proc/{pid}/status")  # a zombie, under Linux
