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

from .. import meters

# What a step spends its time on: a DataLoader, a forward with gradients, the loss after it, a backward, an optimizer,
# a forward without gradients and the DataLoader that brings its batches, and what is left, the script's own code.
KINDS = ("data", "forward", "loss", "backward", "update", "evaluation", "rest")
WORTH_A_LOOK = 0.1  # of a step: own code and losses that take more of it are looked at
IN_CHILD = threading.Event()  # set in processes that the script forks
os.register_at_fork(after_in_child=IN_CHILD.set)
MAIN_THREAD = threading.main_thread().ident
TORCH = os.path.join(os.path.dirname(torch.__file__), "")  # and not torchvision
NO_FILE = "<"  # how the path of code begins that lies in no file, as "<string>"
# Where code lies that is not the user's: Python's own, ours and PyTorch's; and what was installed.
LIBRARIES = (sysconfig.get_path("stdlib"), os.path.dirname(os.path.dirname(__file__)), TORCH, NO_FILE)
INSTALLED = re.compile("(site|dist)-packages")


class StepClock:
    """Measures on what a step spends its time.

    cards: all devices but the CPU, which have queues of their own. waits: whether they must be ready before another
    kind begins; else kernels are only queued. began: when the step did. spent: {kind: seconds} of it. is_running: False
    between two steps. own_seconds: of all time so far in the script's own code and in losses. lines: {kind: {the
    script's line that ran, "train.py:228": seconds}} of the same. is_profiled: whether a profile is open, in which each
    kind gets a name.
    """

    def __init__(self):
        # those that are open, each inside of the one before; a loss is "rest" until backward() shows that it was one
        self.kinds = ["rest"]
        self.cards = []
        self.own_code_runs = threading.Event()  # set when the script comes to its own code, on the clock
        self.looks_at_lines = False  # whether own code took long in the step before: each look disturbs a little
        self.is_after_forward = False
        self.is_profiled = False
        self.range = contextlib.ExitStack()  # of the profile
        self.forget_own_code()
        self.begin_step()

    def begin_step(self, waits=False):
        """Begin a step. The cards must be ready. waits: whether each kind waits for them, too."""
        self.waits = waits
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.began = self.since = time.perf_counter()
        self.is_running = True
        if self.looks_at_lines and not self.own_code_runs.is_set():
            self.own_code_runs.set()

    def end_step(self):
        """End a step, once the cards are ready. Return its seconds."""
        self.wait_for_cards()
        self.count(self.kinds[-1])
        self.is_running = False
        dt = self.since - self.began
        self.looks_at_lines = self.spent["rest"] + self.spent["loss"] > WORTH_A_LOOK * dt
        return dt

    def begin(self, kind, entered):
        """Count the time from now on as another kind, until that ends.

        entered: when the hook that calls this began. Its time is the watcher's own, and left off the clock. But a card
        has worked on its queue meanwhile, so there it stays on the clock.
        """
        is_loss = kind == "backward" and self.is_after_forward
        self.count("loss" if is_loss else self.kinds[-1], entered)
        if kind == "update" and kind in self.kinds:  # it had no end, since it failed, or this one is inside of it
            self.kinds.remove(kind)
        self.kinds.append(kind)
        self.is_after_forward = False
        if self.is_profiled:
            self.name_in_profile()

    def end(self, kind):
        """Count the time from now on as what was open before a kind began."""
        self.count(self.kinds[-1])
        if kind in self.kinds:
            while self.kinds.pop() != kind:  # an update inside of it that failed, and so had no end
                pass
        self.is_after_forward = kind == "forward"
        if self.looks_at_lines and self.kinds[-1] == "rest" and not self.own_code_runs.is_set():
            self.own_code_runs.set()
        if self.is_profiled:
            self.name_in_profile()

    def count(self, kind, entered=None):
        """Count the time since the last call as this kind, without the time since a hook was entered."""
        if self.waits and not is_captured():
            self.wait_for_cards()
        now = time.perf_counter()
        if entered and not self.cards:
            seconds_of_hook = now - max(entered, self.since)  # the step may have begun in the hook
            self.began += seconds_of_hook
            self.since += seconds_of_hook
        elapsed = now - self.since
        self.since = now
        if self.is_running:
            self.spent[kind] += elapsed
        if self.kinds[-1] == "rest":  # which a loss is, too
            self.own_seconds += elapsed
        if self.looks:
            looks, self.looks = self.looks, []
            for place, seconds in looks:
                self.lines[kind][place] += seconds

    def wait_for_cards(self):
        """Wait until all cards have done what was queued."""
        for card in self.cards:
            meters.synchronize(card)

    def forget_own_code(self):
        """Forget which lines took the time so far."""
        self.own_seconds = self.looked_at = 0.0
        self.lines = {kind: Counter() for kind in KINDS}
        self.looks = []  # since the last count(), which says what kind of time they were

    def look(self):
        """Note the line that runs, if the script is in its own code. Another thread calls this now and then.

        A look stands for all the time in own code since the look before, because a line that holds the interpreter's
        lock, as sorting or json do, is only seen when it lets go.
        """
        with lock_of_compiler():  # which may take seconds
            self.own_code_runs.clear()  # before the check: else a set() of the main thread would be lost
            if not self.is_running or self.kinds[-1] != "rest":
                return
            self.own_code_runs.set()  # so that the next look follows
            own_seconds = self.own_seconds + time.perf_counter() - self.since
            self.looks.append((place_in_script(), own_seconds - self.looked_at))
            self.looked_at = own_seconds

    def name_in_profile(self):
        """Name the open kind in the profile. PyTorch's own range of a step ends after its hooks, and so too late."""
        self.range.close()
        kind = self.kinds[-1]
        name = "Optimizer.step#python" if kind == "update" else f"python ({kind})"
        self.range.enter_context(torch.profiler.record_function(name))


def is_captured():
    """Return whether operations are only noted, for a CUDA graph. Nothing may wait for the card then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


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
