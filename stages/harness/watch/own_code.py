"""Which of the script's own lines take the time that no call of PyTorch takes, by a thread that looks now and then."""

import random
import time
from collections import Counter

from . import pytorch
from .events import OWN_KINDS, seconds_of_lines
from .threads import MAIN_THREAD, is_of_a_library
from .timeline import MOST

LOOK_EVERY = 0.01  # seconds between two looks, on average


class OwnCode:
    """What the looks have met.

    lines: {kind: {the line that ran, "/my/train.py:228": seconds}}.
    """

    def __init__(self, timeline):
        self.timeline = timeline
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
            time.sleep(LOOK_EVERY * own_random.uniform(0.5, 1.5))
            with pytorch.lock_of_compiler():  # no thread may walk the frames of torch.compile while it works
                if self.timeline.is_running and self.timeline.kind == "rest" and len(self.looks) < MOST:
                    place = place_in_script()
                    self.looks.append((time.perf_counter(), place))

    def read_looks(self, spans):
        """Add the looks so far to the lines. spans: of the time since this was called last."""
        looks, self.looks = self.looks, []
        lines, self.unseen = seconds_of_lines(spans, looks, self.unseen)
        for kind, line, seconds in lines:
            self.lines[kind][line] += seconds


def place_in_script():
    """Return the line of the script's own code that the main thread is in, as "/my/train.py:228". None in an import."""
    frame = pytorch.frames_of_threads()[MAIN_THREAD]
    while is_of_a_library(frame) and frame.f_back:  # the outermost has no caller, nor has one that has just returned
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return None
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
