"""One step of the script under PyTorch's profiler, which lists the operations that it is made of."""

import contextlib
import ctypes
import gc
import os

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler of torch 2.13 prints a line at each start
MOST_NODES = 5_000  # of the graph for the backward: above, to list a step's operations takes seconds and GBs


class StepProfiler:
    """The profile of one step. profiler: of torch, or None while none is at work. events: what it saw, or None."""

    def __init__(self, clock):
        """clock: a StepClock, whose kinds the profile names."""
        self.clock = clock
        self.profiler = None
        self.first_node = 0  # of the graph for the backward, by its number
        self.events = None
        self.script_profiles = False

    def saw_profiler(self, profiler):
        """Leave the profiler to the script, which starts one of its own: two at work empty one another."""
        if profiler is not self.profiler:
            self.script_profiles = True
            self.give_up()

    def start(self, device):
        """Begin to profile, and return whether it did.

        It does not if the script profiles, or if a backward() is open, which would end the profile with it.
        """
        if self.script_profiles or torch.autograd._profiler_enabled() or "backward" in self.clock.kinds:
            return False
        activities = [ProfilerActivity.CPU]
        if device.type != "cpu":
            activities = torch.profiler.supported_activities()
        self.profiler = torch.profiler.profile(activities=activities, acc_events=True, record_shapes=True)
        self.profiler.start()
        self.first_node = torch._C._autograd._get_sequence_nr()
        self.clock.is_profiled = True
        self.clock.name_in_profile()
        return True

    def stop(self):
        """End the profile, where one is open, and keep what it saw."""
        if self.profiler:
            profiler, self.profiler = self.profiler, None  # now, since Ctrl-C may end stop()
            self.clock.is_profiled = False
            self.clock.range.close()
            profiler.stop()
            self.events = profiler.events()

    def stop_if_large(self):
        """End the profile, and keep what it saw, if the forwards of the step have very many operations."""
        if self.profiler and torch._C._autograd._get_sequence_nr() - self.first_node > MOST_NODES:
            self.stop()

    def give_up(self):
        """End the profile without a result. A process that the script forks would wait for threads of the profiler."""
        if self.profiler:
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
