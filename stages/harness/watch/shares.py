"""Which share of the time each kind takes, and how a share and a line of a script are told."""

import linecache
from collections import Counter

from .events import KINDS


def shares_of(log):
    """Return {kind: share of the time} of the counted steps.

    On a card kernels are only queued, so it is that of the steps of the warm-up in which each kind waited for the card;
    None without such a step.
    """
    steps = log.reported_steps() if log.device.type == "cpu" else log.waiting_steps()
    return mean_shares(steps) if steps else None


def mean_shares(steps):
    """Return {kind: share of the time} of some steps. Own code before backward() moves from the loss to the rest."""
    spent = seconds_of(steps)
    beyond = seconds_beyond_loss(spent)
    spent["rest"] += beyond
    spent["loss"] -= beyond
    return {kind: seconds / spent.total() for kind, seconds in spent.items()}


def seconds_of(steps):
    """Return {kind: seconds} of some steps, a Counter."""
    return Counter({kind: sum(step.spent[kind] for step in steps) for kind in KINDS})


def seconds_beyond_loss(spent):
    """Return how much of the loss is the script's own code before backward(). spent: {kind: seconds}.

    A loss takes no longer than the backward, which goes through it, too.
    """
    return max(0.0, spent["loss"] - spent["backward"])


def line_at(place):
    """Return the text of the line at a place, as "train.py:228"."""
    path, number = place.rsplit(":", 1)
    return linecache.getline(path, int(number)).strip()


def percent(share):
    """Return "31 %"."""
    return f"{100 * share:.0f} %"
