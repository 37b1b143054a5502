"""Where the hooks append what happens in a step, and what has to wait for a card."""

import time

import torch

from .. import meters

MOST = 100_000  # marks, notes or looks that are kept: 20 MB


class Timeline:
    """The marks and notes of the step so far, see events.py. kind: what the time counts as now.

    cards: all devices but the CPU, which have queues of their own. waits: whether they must be ready before another
    kind begins; else kernels are only queued. is_running: False between two steps.
    """

    def __init__(self, profiler, add_up_lists):
        """profiler: a StepProfiler, in which each kind gets a name. add_up_lists: reads lists that are long."""
        self.profiler = profiler
        self.add_up_lists = add_up_lists
        self.cards = []
        self.kind = "rest"
        self.waits = self.is_running = False
        self.marks, self.notes = [], []

    def begin_step(self, waits):
        """Begin a step after the cards are ready. waits: whether each kind waits for them, too."""
        self.wait_for_cards()
        self.waits = waits
        self.is_running = True
        self.marks, self.notes = [], []
        self.mark(self.kind)

    def end_step(self):
        """End a step after the cards are ready. What follows, up to the next one, is left out."""
        self.wait_for_cards()
        self.mark(self.kind)
        self.is_running = False

    def mark(self, kind, entered=None):
        """Count the time from now on as another kind.

        entered: when the hook that calls this began, if its time is to be left off the clock. But a card has worked on
        its queue meanwhile, so there it stays on the clock.
        """
        self.kind = kind
        if not self.is_running:
            return
        if self.waits and not is_captured():
            self.wait_for_cards()
        left = time.perf_counter()
        is_on_clock = entered is None or self.cards
        if is_on_clock:
            entered = left
        if self.profiler.is_open:
            self.profiler.kind_begins(kind)  # which may take seconds
            left = time.perf_counter()
        self.marks.append((kind, entered, left))
        if len(self.marks) > MOST:
            self.add_up_lists()

    def note(self, name, value=None):
        """Note what was seen."""
        if not self.is_running:
            return
        self.notes.append((name, value))
        if len(self.notes) > MOST:
            self.add_up_lists()

    def take(self):
        """Return the marks and the notes so far. The last mark stays, since from there the time counts on."""
        marks, notes = self.marks, self.notes
        self.marks, self.notes = marks[-1:], []
        return marks, notes

    def wait_for_cards(self):
        """Wait until all cards have done what was queued."""
        for card in self.cards:
            meters.synchronize(card)


def is_captured():
    """Return whether operations are only noted, for a CUDA graph. Nothing may wait for the card then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
