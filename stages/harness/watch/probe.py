"""One step of the script under PyTorch's profiler, which tells the operations that it is made of."""

import contextlib
import ctypes
import gc

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

# A step of some 20,000 operations is profiled no further: their list takes memory and time that are not the script's.
# They are counted by the nodes of its graph, each of which is some ten operations with its backward.
MOST_NODES = 2_000


class Probe:
    """The profile of one step.

    events: of torch.profiler, or None without a profile. unseen: why there is none, in words.
    """

    def __init__(self, clock, is_whole):
        """clock: a StepClock, whose kinds the profile names. is_whole: whether a long step is profiled to its end."""
        self.clock = clock
        self.is_whole = is_whole
        self.profiler = None
        self.events = None
        self.unseen = "the script ended before"
        self.script_profiles = False
        self.is_making_ours = False  # while we make a profiler, which saw_profiler() hears of, too
        self.first_node = 0  # of the profiled step

    def saw_profiler(self, *args, **kwargs):
        """Leave the profiler to the script, which makes one of its own: two at work empty one another."""
        if not self.is_making_ours:
            self.script_profiles = True
            self.give_up("the script profiles itself")

    def start(self, device):
        """Begin to profile, where nothing speaks against it."""
        if self.script_profiles or torch.autograd._profiler_enabled():
            self.unseen = "the script profiles itself"
            return
        if "backward" in self.clock.kinds:  # which ends a profile that began inside of it
            self.unseen = "its optimizer steps inside of backward()"
            return
        activities = [ProfilerActivity.CPU]
        if device.type != "cpu":
            activities = torch.profiler.supported_activities()
        self.is_making_ours = True
        self.profiler = torch.profiler.profile(activities=activities, acc_events=True, record_shapes=True)
        self.is_making_ours = False
        self.profiler.start()
        self.first_node = torch._C._autograd._get_sequence_nr()
        self.clock.is_profiled = True
        self.clock.name_in_profile()

    def stop_early(self):
        """Stop where the profiled step has too many operations."""
        if self.profiler and not self.is_whole:
            nodes = torch._C._autograd._get_sequence_nr() - self.first_node
            if nodes > MOST_NODES:
                self.stop()

    def stop(self):
        """End the profile, where one is open, and keep what it saw."""
        if self.profiler:
            profiler, self.profiler = self.profiler, None  # first, since Ctrl-C may end the seconds that this takes
            self.clock.is_profiled = False
            self.clock.name_in_profile()
            profiler.stop()
            self.events = profiler.events()

    def give_up(self, reason="the script started a process"):
        """End the profile without a result. A process that the script forks would wait for threads of the profiler."""
        if self.profiler:
            self.stop()
            self.forget()
            self.unseen = reason

    def forget(self):
        """Give the memory of the profile back, which is none of the script's."""
        self.events = None
        gc.collect()  # operations and those that they call refer to one another
        with contextlib.suppress(OSError, AttributeError):  # not with every C library
            ctypes.CDLL(None).malloc_trim(0)


def busy_ms(events):
    """Return in how many milliseconds at least one kernel ran on a card."""
    spans = []
    for event in events:
        if event.device_type != DeviceType.CPU and not event.is_user_annotation:
            spans.append((event.time_range.start, event.time_range.end))
    busy = until = 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e3
