"""Which thread and which process a hook is called in, and which threads run the user's own code."""

import os
import re
import sys
import sysconfig
import threading

import torch

from . import pytorch

IN_CHILD = threading.Event()  # set in processes that the script forks
os.register_at_fork(after_in_child=IN_CHILD.set)
MAIN_THREAD = threading.main_thread().ident
# Where code lies that is not the user's: Python's own, ours and PyTorch's; and what was installed.
FOLDERS = (sysconfig.get_path("stdlib"), os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__))
NO_FILE = "<"  # how the path of code begins that lies in no file, as "<string>"
LIBRARIES = (NO_FILE, *(os.path.join(folder, "") for folder in FOLDERS))  # torch/, and not torchvision/
INSTALLED = re.compile("(site|dist)-packages")

end_process = os._exit  # the hooks replace it for the script


def is_elsewhere():
    """Return whether the caller is a thread or a process that the script started, and not a thread of autograd."""
    if IN_CHILD.is_set():
        return True
    if threading.get_ident() == MAIN_THREAD:
        return False
    return not isinstance(threading.current_thread(), pytorch.ThreadOfOthers)


def count_threads_of_script():
    """Return how many threads run code of the user's own, besides the main one.

    Those that run a library's code alone are left out: one may draw a progress bar.
    """
    count = 0
    for ident, frame in pytorch.frames_of_threads().items():
        while frame and is_of_a_library(frame):
            frame = frame.f_back
        if frame and ident != MAIN_THREAD:
            count += 1
    return count


def is_of_a_library(frame):
    """Return whether a frame is not in the user's own code, to which a script belongs wherever it lies."""
    return lies_in_a_library(frame.f_globals, frame.f_code.co_filename)


def lies_in_a_library(scope, path):
    """Return whether the code of a module is not the user's own. scope: its names. path: of its file."""
    if scope is sys.modules["__main__"].__dict__:
        return False
    is_of_torch = str(scope.get("__name__")).startswith("torch.")  # also what torch.compile made, in a cache
    return is_of_torch or path.startswith(LIBRARIES) or INSTALLED.search(path) is not None
