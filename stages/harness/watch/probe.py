"""One step of the script under PyTorch's profiler, which tells the operations that it is made of."""

import contextlib
import ctypes
import gc

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

# A step of more operations is profiled as far as these reach: their list takes memory and time that are not the
# script's. They are counted by the nodes of its graph, each of which is some ten operations with its backward.
MOST_OPERATIONS = 20_000
MOST_NODES = MOST_OPERATIONS // 10


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
        self.first_node = 0  # of the profiled step

    def saw_profiler(self, *args, **kwargs):
        """Note that the script makes a profiler of its own: two at work empty one another."""
        self.script_profiles = True

    def stop_early(self):
        """Stop where the profiled step has too many operations."""
        if self.profiler and not self.is_whole:
            nodes = torch._C._autograd._get_sequence_nr() - self.first_node
            if nodes > MOST_NODES:
                self.stop()

    def start(self, device, in_backward):
        """Begin to profile, where nothing speaks against it. in_backward: whether autograd calls this."""
        if self.script_profiles or torch.autograd._profiler_enabled():
            self.unseen = "the script profiles itself"
            return
        if in_backward:  # which ends a profile that began inside of it
            self.unseen = "its optimizer steps inside of backward()"
            return
        activities = [ProfilerActivity.CPU]
        if device.type != "cpu":
            activities = torch.profiler.supported_activities()
        self.profiler = torch.profiler.profile(activities=activities, acc_events=True, record_shapes=True)
        self.script_profiles = False  # this one was ours
        self.profiler.start()
        self.first_node = torch._C._autograd._get_sequence_nr()
        self.clock.open_range()

    def stop(self):
        """End the profile, where one is open, and keep what it saw."""
        if self.profiler:
            self.clock.close_range()
            self.profiler.stop()
            if self.script_profiles:
                self.unseen = "the script profiles itself"
            else:
                self.events = self.profiler.events()
            self.profiler = None

    def give_up(self):
        """End the profile without a result. A process that the script forks would wait for threads of the profiler."""
        if self.profiler:
            self.stop()
            self.forget()
            self.unseen = "the script starts processes in each step"

    def forget(self):
        """Give the memory of the profile back, which is none of the script's."""
        self.events = None
        gc.collect()  # operations and those that they call refer to one another
        with contextlib.suppress(OSError, AttributeError):  # not with every C library
            ctypes.CDLL(None).malloc_trim(0)


def kernels_and_busy_ms(events):
    """Return how many kernels ran on a card, and in how many milliseconds at least one did."""
    spans = []
    for event in events:
        if event.device_type != DeviceType.CPU and not event.is_user_annotation:
            spans.append((event.time_range.start, event.time_range.end))
    busy = until = 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return len(spans), busy / 1e3


def share_of_loss(events, range_of_loss):
    """Return which share of the time between a forward and backward() passes until the loss is made.

    The loss is the last operation that backward() goes through. What comes behind it is an environment, the next batch
    or whatever else the script does. range_of_loss: what the profile calls that time.
    """
    nodes = {event.sequence_nr for event in events if event.scope == 1 and event.sequence_nr >= 0}  # 1: a backward's
    made = {}  # {node: when the operation ran that made it}; later ones of other tensors have the next node's number
    for event in events:
        if event.scope == 0 and event.sequence_nr in nodes and not event.name.startswith("autograd::"):
            made[event.sequence_nr] = event.time_range
    total = loss = 0.0
    for event in events:
        if event.name == range_of_loss:
            span = event.time_range
            ends = [time.end for time in made.values() if span.start <= time.start <= span.end]
            total += span.end - span.start
            loss += max(ends, default=span.start) - span.start
    return loss / total if total else 1.0
