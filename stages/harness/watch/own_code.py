"""Which of the script's own lines take the time that no call of PyTorch takes, by a thread that looks now and then."""

import random
import threading
import time
from collections import Counter

from . import pytorch
from .events import OWN_KINDS, seconds_of_lines
from .threads import MAIN_THREAD, is_of_a_library
from .timeline import MOST

LOOK_EVERY = 0.01  # seconds between two looks, on average
LONG_STRETCH = 0.25  # seconds: own code that runs for longer is looked at in any step
WORTH_A_LOOK = 0.1  # of a step: own code and losses that take more of it are looked at in the next one


class OwnCode:
    """Finds which lines of the script take the time of its own code and of losses, by a thread that looks now and then.

    lines: {kind: {the line that ran, "/my/train.py:228": seconds}}.
    """

    def __init__(self, timeline):
        self.timeline = timeline
        self.takes_long = threading.Event()  # each look disturbs a little, and in a bench it slows short steps
        self.takes_long.set()  # before the first step
        self.looks = []  # [(time, line)] of this step
        self.forget()

    def forget(self):
        """Forget which lines took the time so far."""
        self.lines = {kind: Counter() for kind in OWN_KINDS}
        self.unseen = 0.0  # seconds after the last look

    def look_now_and_then(self):
        """Look at the line that runs, if it is the script's own. This is a thread, as long as the process.

        The looks are irregular, so that they do not meet the same line of a regular loop each time.
        """
        own_random = random.Random()  # the script's own is seeded
        while True:
            takes_long = self.takes_long.wait(LONG_STRETCH)
            if takes_long:
                time.sleep(LOOK_EVERY * own_random.uniform(0.5, 1.5))
            with pytorch.lock_of_compiler():  # no thread may walk the frames of torch.compile while it works
                now = time.perf_counter()
                if self.is_look_wanted(now, takes_long):
                    self.looks.append((now, place_in_script()))

    def is_look_wanted(self, now, takes_long):
        """Return whether own code runs that took long in the last step, or has been running for long."""
        marks = self.timeline.marks  # empty for a moment, when a step begins
        runs_long = takes_long or (marks and now - marks[-1][2] > LONG_STRETCH)
        return runs_long and self.timeline.kind == "rest" and self.timeline.is_running and len(self.looks) < MOST

    def read_looks(self, spans):
        """Add the looks so far to the lines. spans: of the time since this was called last."""
        looks, self.looks = self.looks, []
        if looks:
            lines, self.unseen = seconds_of_lines(spans, looks, self.unseen)
            for kind in OWN_KINDS:
                self.lines[kind].update(lines[kind])
        else:
            self.unseen += sum(ended - began for kind, began, ended in spans if kind in OWN_KINDS)

    def decide_on_looks(self, spent):
        """Decide whether to look in the next step. spent: {kind: seconds} of this one."""
        own_seconds = sum(spent[kind] for kind in OWN_KINDS)
        if own_seconds <= WORTH_A_LOOK * sum(spent.values()):
            self.takes_long.clear()
        elif not self.takes_long.is_set():
            self.takes_long.set()


def place_in_script():
    """Return the line of the script's own code that the main thread is in, as "/my/train.py:228". None in an import."""
    frame = pytorch.frames_of_threads()[MAIN_THREAD]
    while is_of_a_library(frame) and frame.f_back:  # the outermost has none, and one that has returned meanwhile
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return None
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
