"""A step, and the figures of several steps. What watch.py prints and the tables of the bench both use them."""

import math
import statistics
from dataclasses import dataclass

UNITS = {"tok": "tokens", "sample": "samples", "step": "steps"}  # in which a step is counted
PER_SECOND = {"tok": "tok/sec", "sample": "samples/sec", "step": "steps/sec"}
UNEVEN = 1.2  # with a mean of dt above 1.2 medians, no step is typical
LONG = 0.2  # of the time: a part of a step that takes more is reported
LONG_WAIT = 0.1  # the same for waiting for a DataLoader and for an evaluation, which in many scripts take no time


@dataclass
class Step:
    """A step: a line "step" of a record. All but its tokens are of one rank."""

    loss: float | None  # what backward() was called on
    dt: float  # seconds
    spent: dict  # {each of events.KINDS: seconds}
    graphs: int = 0  # how many torch.compile made in it
    tokens: int = 0  # or samples or steps: what the unit of a Seen says
    step: int = 0  # its number
    memory: int | None = None  # bytes
    meter: str | None = None  # of this memory

    @classmethod
    def of_line(cls, line):
        """Return the Step of a line of a record."""
        step = cls(**{name: line[name] for name in cls.__dataclass_fields__ if name in line})
        if step.loss is not None:
            step.loss = float(step.loss)  # in a record it may be "nan" or "inf"
        return step

    @property
    def diverged(self):
        """Whether its loss is not finite."""
        return self.loss is not None and not math.isfinite(self.loss)


def are_uneven(steps):
    """Return whether no step is typical, because some take far longer: those with a rollout, or that wait for data."""
    dts = [step.dt for step in steps]
    return statistics.mean(dts) > UNEVEN * statistics.median(dts)


def tokens_per_second(steps, uneven):
    """Return the tokens per second of some steps; 0 if no step has any.

    It is by the median time of a token, and leaves out steps without tokens. If steps are uneven, it is all tokens
    divided by all seconds.
    """
    if uneven:
        return sum(step.tokens for step in steps) / sum(step.dt for step in steps)
    seconds_of_a_token = [step.dt / step.tokens for step in steps if step.tokens]
    return 1 / statistics.median(seconds_of_a_token) if seconds_of_a_token else 0.0


def digits(speed):
    """Return a speed as a whole number, or below 10 with two digits: "12,346", "9.9", "0.21"."""
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:#.2g}".rstrip(".")


def words_on_speed(speed, unit):
    """Return a speed with its unit, a key of PER_SECOND."""
    number = f"{speed:.2f}" if unit == "step" and speed >= 1 else digits(speed)
    return f"{number} {PER_SECOND[unit]}"


def most_memory(steps):
    """Return the most bytes that were held in some steps; 0 without a meter."""
    return max(step.memory or 0 for step in steps)


def waiting_share(steps):
    """Return the share of their time for which some steps waited for a DataLoader."""
    return sum(step.spent["data"] for step in steps) / sum(step.dt for step in steps)
