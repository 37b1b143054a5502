"""Holds a row back between two steps, until the bench that has started it lets it take the next one.

The bench appends a byte to a file for each step that it allows, so the size of the file is their number. It removes the
file when it wants no more steps. To replace it would need, on Windows, readers that never hold it open.
"""

import os
import time

OFTEN, SELDOM = 0.002, 0.05  # seconds between two looks, in the first second and later


def wait(path, bench, steps):
    """Wait until more than so many steps are allowed. Return False if the bench wants no more.

    Ends the process if the bench, a process, is gone.
    """
    began = time.monotonic()
    while True:
        try:
            if os.path.getsize(path) > steps:
                return True
        except OSError:
            return False
        if is_gone(bench):
            os._exit(1)
        time.sleep(OFTEN if time.monotonic() - began < 1 else SELDOM)


def is_gone(process):
    """Return whether there is no process of this number. On Windows, where a signal would end it, nobody knows."""
    if os.name != "nt":
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
    return False
