"""The clock of a watched step: what its time goes to, and which of the script's own lines take what is left."""

import contextlib
import os
import re
import sys
import sysconfig
import threading
import time
from collections import Counter

import torch

from .. import machine

# What a step spends its time on: a DataLoader, a forward with gradients, the loss behind it, a backward, an optimizer,
# a forward without gradients, and what is left, the script's own code.
KINDS = ("data", "forward", "loss", "backward", "update", "evaluation", "rest")
TORCH = os.path.dirname(torch.__file__)
# Where code lies that is not the reader's: Python's own, ours, and what has no file; and what was installed.
LIBRARIES = (sysconfig.get_path("stdlib"), os.path.dirname(os.path.dirname(__file__)), "<")
INSTALLED = re.compile("(site|dist)-packages")


class StepClock:
    """Measures on what a step spends its time.

    spent: {kind: seconds} of the open step. own_seconds: of the script's own code and of losses, in all steps.
    own_lines: the same by the place that place_of() returns. waits_for: the devices that must be ready before another
    kind begins; none where kernels are only queued. is_profiled: whether a profile is open, in which each kind gets a
    name.
    """

    def __init__(self):
        self.kinds = ["rest"]  # those that are open, each inside of the one before
        self.is_behind_forward = False
        self.own_seconds = self.looked_at = 0.0  # looked_at: how many of own_seconds the lines stand for
        self.own_lines = Counter()
        self.waits_for = ()
        self.is_profiled = False
        self.range = None  # of the profile
        self.begin_step()

    @property
    def kind(self):
        """What the time counts as. The loss is only known as one when backward() follows, and is "rest" till then."""
        return self.kinds[-1]

    def begin_step(self):
        """Begin a step."""
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.since = time.perf_counter()

    def begin(self, kind):
        """Count the time from now on as another kind, until that ends."""
        self.count("loss" if kind == "backward" and self.is_behind_forward else self.kind)
        self.kinds.append(kind)
        self.is_behind_forward = False
        self.name_in_profile()

    def end(self, kind):
        """Count the time from now on as what was open before a kind began."""
        self.count(self.kind)
        self.kinds.remove(kind)
        self.is_behind_forward = kind == "forward"
        self.name_in_profile()

    @contextlib.contextmanager
    def during(self, kind):
        """Count the time of a block as another kind. Inside of a block of the same kind it is a part of that."""
        if kind in self.kinds:
            yield
            return
        self.begin(kind)
        try:
            yield
        finally:
            self.end(kind)

    def count(self, kind):
        """Count the time since the last call as this kind."""
        if self.waits_for and not is_captured():
            for device in self.waits_for:
                machine.synchronize(device)
        now = time.perf_counter()
        self.spent[kind] += now - self.since
        if self.kind == "rest":
            self.own_seconds += now - self.since
        self.since = now

    def look(self):
        """Note the line that runs, where the script is in its own code. Another thread calls this now and then.

        A look stands for all the time in own code since the look before, because a line that holds the interpreter's
        lock, as sorting or json do, is only seen when it lets go.
        """
        if self.kind == "rest":
            seconds = self.own_seconds + time.perf_counter() - self.since
            self.own_lines[place_of(frame_of_script())] += seconds - self.looked_at
            self.looked_at = seconds

    def name_in_profile(self):
        """Name the open kind in the profile. PyTorch's own range of a step ends after its hooks, and so too late."""
        if self.range:
            self.range.__exit__(None, None, None)
            self.range = None
        if self.is_profiled:
            name = "Optimizer.step#watched" if self.kind == "update" else f"python ({self.kind})"
            self.range = torch.profiler.record_function(name)
            self.range.__enter__()


def is_captured():
    """Tell whether operations are only noted, for a CUDA graph. Nothing may wait for the card then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def frame_of_script():
    """Return the innermost frame of the main thread."""
    return sys._current_frames()[threading.main_thread().ident]


def place_of(frame):
    """Return the place in the script's own code that a frame belongs to, and the function of a library that it is in.

    As ("/my/train.py:228", "trainer.py:2712 _save_checkpoint"). The second is the innermost that is not PyTorch's, or
    "" where there is none.
    """
    function = ""
    while frame.f_back and is_of_a_library(frame):
        code = frame.f_code
        if not function and INSTALLED.search(code.co_filename) and not code.co_filename.startswith(TORCH):
            function = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} {code.co_name}"
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}", function


def is_of_a_library(frame):
    """Tell whether a frame is not in the reader's own code."""
    path = frame.f_code.co_filename
    return path.startswith((TORCH, *LIBRARIES)) or INSTALLED.search(path) is not None


def count_threads_of_script():
    """Return how many threads run code of the reader's own, beside the main one. A library's may only show a bar."""
    count = 0
    for ident, frame in sys._current_frames().items():
        while frame and is_of_a_library(frame):
            frame = frame.f_back
        if frame and ident != threading.main_thread().ident:
            count += 1
    return count
