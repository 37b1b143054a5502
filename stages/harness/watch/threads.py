"""Which thread a hook is called in, which run the user's own code, and the one that looks at the script's lines."""

import contextlib
import os
import random
import re
import sys
import sysconfig
import threading
import time

import torch

LOOK_EVERY = 0.01  # seconds between two looks at the line that runs, on average
IN_CHILD = threading.Event()  # set in processes that the script forks
os.register_at_fork(after_in_child=IN_CHILD.set)
MAIN_THREAD = threading.main_thread().ident
TORCH = os.path.join(os.path.dirname(torch.__file__), "")  # and not torchvision
NO_FILE = "<"  # how the path of code begins that lies in no file, as "<string>"
# Where code lies that is not the user's: Python's own, ours and PyTorch's; and what was installed.
LIBRARIES = (sysconfig.get_path("stdlib"), os.path.dirname(os.path.dirname(__file__)), TORCH, NO_FILE)
INSTALLED = re.compile("(site|dist)-packages")


def is_elsewhere():
    """Return whether the caller is a thread or a process that the script started, and not a thread of autograd."""
    if IN_CHILD.is_set():
        return True
    if threading.get_ident() == MAIN_THREAD:
        return False
    return not isinstance(threading.current_thread(), threading._DummyThread)


def count_threads_of_script():
    """Return how many threads run code of the user's own, besides the main one.

    Those that run a library's code alone are left out: one may draw a progress bar.
    """
    count = 0
    for ident, frame in sys._current_frames().items():
        while frame and is_of_a_library(frame):
            frame = frame.f_back
        if frame and ident != MAIN_THREAD:
            count += 1
    return count


def look_at_lines(timeline):
    """Look now and then at the line that runs, while the script's own code matters. This is a thread without an end.

    The looks are irregular, so that they do not meet the same line of a regular loop each time.
    """
    own_random = random.Random()  # the script's own is seeded
    while True:
        timeline.looks_at_lines.wait()
        time.sleep(LOOK_EVERY * own_random.uniform(0.5, 1.5))
        with lock_of_compiler():  # which may take seconds
            if timeline.kind == "rest" and timeline.is_running:
                timeline.looks.append((time.perf_counter(), place_in_script()))


def lock_of_compiler():
    """Return the lock that torch.compile holds while it works, since no other thread may walk its frames then."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")  # which the first optimizer imports
    return getattr(dynamo, "compile_lock", contextlib.nullcontext())


def place_in_script():
    """Return the line of the script's own code that the main thread is in, as "/my/train.py:228"."""
    frame = sys._current_frames()[MAIN_THREAD]
    while is_of_a_library(frame) and frame.f_back:  # the outermost has none, and one that has returned meanwhile
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_of_a_library(frame):
    """Return whether a frame is not in the user's own code, to which a script belongs wherever it lies."""
    path = frame.f_code.co_filename
    if frame.f_globals is sys.modules["__main__"].__dict__:
        return False
    is_of_torch = str(frame.f_globals.get("__name__")).startswith("torch.")  # also what torch.compile made, in a cache
    return is_of_torch or path.startswith(LIBRARIES) or INSTALLED.search(path) is not None
