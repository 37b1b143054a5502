"""Holds a row back between two steps, until the bench that has started it lets it take the next one.

The bench appends a byte to a file for each step that it allows, so the size of this file is their number. A file that
was replaced would need readers that never hold it open, on Windows.
"""

import os
import time

OFTEN, SELDOM = 0.002, 0.05  # seconds between two looks, in the first second and later


def wait(path, bench, steps):
    """Wait until a step more than so many is allowed. Return False where the bench, a process, is gone."""
    began = time.monotonic()
    while True:
        try:
            if os.path.getsize(path) > steps:
                return True
        except OSError:  # the bench has removed its folder
            return False
        if is_gone(bench):
            return False
        time.sleep(OFTEN if time.monotonic() - began < 1 else SELDOM)


def is_gone(process):
    """Tell whether there is no process of this number. On Windows, where a signal would end it, only the file tells."""
    if os.name != "nt":
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # it is another user's, as behind sudo
            pass
    return False
