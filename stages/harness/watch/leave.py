"""Ends the process of a script that has not ended by itself, and leaves nothing half done."""

import contextlib
import gc
import io
import multiprocessing
import subprocess
import sys
import threading

from . import pytorch
from .threads import end_process

PATIENCE = 5  # seconds that all of it may take


def leave(status):
    """End the process. What the script has open is flushed, its children end, and what it gave to atexit runs.

    No `finally:` runs, since it may write a checkpoint of 24 steps over a good one.
    """
    timer = threading.Timer(PATIENCE, end_process, [status])
    timer.daemon = True
    timer.start()
    flush_stdout()
    for file in objects_of(io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    for child in multiprocessing.active_children():
        child.terminate()
    pytorch.run_atexit()
    for child in objects_of(subprocess.Popen):
        if child.poll() is None:
            child.terminate()
    end_process(status)


def objects_of(*classes):
    """Return all objects of some classes, and of subclasses of them, that this process holds."""
    return [each for each in gc.get_objects() if issubclass(type(each), classes)]


def flush_stdout():
    """Flush the script's own stdout, which may be closed by now or be something else."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
