"""One step of the script under PyTorch's profiler, which lists the operations that it is made of."""

import contextlib
import ctypes
import gc
import os

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from . import pytorch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler of torch 2.13 prints a line at each start
# On a CPU a profile ends after so many nodes of the graph for the backward: when another micro-batch begins, or in one.
# To list the operations of 1,000 nodes takes 3 seconds.
ENOUGH_NODES, MOST_NODES = 1_000, 5_000


def range_of(kind):
    """Return what a kind of time is called in a profile. PyTorch calls updates so, too: Optimizer.step#AdamW.step."""
    return "Optimizer.step#python" if kind == "update" else f"python ({kind})"


class StepProfiler:
    """The profile of one step. profile: of torch, or None while none is open. events: what it saw, or None."""

    def __init__(self):
        self.profile = None
        self.range = contextlib.ExitStack()  # of the kind of time that runs
        self.first_node = 0  # of the graph for the backward, by its number
        self.is_limited = False
        self.events = None
        self.script_profiles = False

    def saw_profiler(self, profile):
        """Leave the profiler to the script, which starts one of its own: two at work empty one another."""
        if profile is not self.profile:
            self.script_profiles = True
            self.give_up()

    def start(self, device, kind):
        """Begin to profile, and return whether it did. kind: what runs.

        It does not if the script profiles, or if a backward() is open, which would end the profile with it. A card is
        profiled for a whole step, since that shows how long it is idle.
        """
        if self.script_profiles or pytorch.is_profiled() or kind == "backward":
            return False
        activities = [ProfilerActivity.CPU]
        if device.type != "cpu":
            activities = torch.profiler.supported_activities()
        self.profile = torch.profiler.profile(activities=activities, acc_events=True, record_shapes=True)
        self.profile.start()
        self.first_node = pytorch.nodes_made()
        self.is_limited = device.type == "cpu"
        return True

    @property
    def is_open(self):
        """Whether a step is being profiled."""
        return self.profile is not None

    def kind_begins(self, kind):
        """Name what runs from now on in the profile, or end the profile if it has seen enough.

        PyTorch's own range of a step ends after its hooks, and so too late.
        """
        self.range.close()
        if self.is_limited and self.has_enough(kind):
            self.stop()
            return
        self.range.enter_context(torch.profiler.record_function(range_of(kind)))

    def has_enough(self, kind):
        """Return whether a profile of a CPU has seen enough before this kind begins."""
        nodes = pytorch.nodes_made() - self.first_node
        return nodes > MOST_NODES or (nodes > ENOUGH_NODES and kind == "forward")

    def stop(self):
        """End the profile, if one is open, and keep what it saw."""
        if self.profile:
            profile, self.profile = self.profile, None  # now, since Ctrl-C may end stop()
            self.range.close()
            profile.stop()
            self.events = profile.events()

    def give_up(self):
        """End the profile without a result. A process that the script forks would wait for threads of the profiler."""
        if self.profile:
            self.stop()
            self.forget()

    def forget(self):
        """Give back the memory of the profile, which the script did not ask for."""
        self.events = None
        gc.collect()  # operations and those that they call refer to one another
        with contextlib.suppress(OSError, AttributeError):  # not with every C library
            ctypes.CDLL(None).malloc_trim(0)


def busy_ms(events):
    """Return in how many milliseconds at least one kernel ran on a card."""
    kernels = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    busy = until = 0.0
    for span in sorted((kernel.time_range for kernel in kernels), key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return busy / 1e3
