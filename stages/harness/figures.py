"""The figures of some steps, the same for what watch.py prints and for the tables of the bench."""

import statistics

import numpy as np

UNITS = {"tok": "tokens", "sample": "samples", "step": "steps"}  # in which a step is counted
WARMUP = 4  # steps left out of the figures: compilation, autotuning, memory touched for the first time
COUNTED_STEPS = 20  # that watch.py takes of a script
UNEVEN = 1.2  # with a mean of dt above 1.2 medians, no step is typical
LONG = 0.2  # of the time: a part of a step that takes more is reported
LONG_WAIT = 0.1  # the same for a DataLoader and for an evaluation, which take nothing in many scripts


def figures_of(counted):
    """Return the figures of some steps as a dict.

    counted: the step lines of a record, one or more, without the warm-up. The dict has the median of dt and its
    quartiles (ms), the mean of dt (ms), tokens per second, and memory (bytes, 0 without a meter).
    """
    dts = [step["dt"] for step in counted]
    first_quartile, median, third_quartile = np.percentile(dts, [25, 50, 75])
    return {
        "dt_ms": 1e3 * median,
        "dt_q1_ms": 1e3 * first_quartile,
        "dt_q3_ms": 1e3 * third_quartile,
        "dt_mean_ms": 1e3 * statistics.mean(dts),
        "tok_per_sec": tokens_per_second(counted),
        "memory": max(step["memory"] or 0 for step in counted),
    }


def tokens_per_second(counted):
    """Return the tokens per second of some steps, by the median time that a token took in them.

    Steps without tokens are left out. It is 0 if no step has any.
    """
    seconds_of_a_token = [step["dt"] / step["tokens"] for step in counted if step["tokens"]]
    return 1 / statistics.median(seconds_of_a_token) if seconds_of_a_token else 0.0


def speed_of_all(steps):
    """Return the tokens per second of some steps together: all tokens over all seconds."""
    return sum(step["tokens"] for step in steps) / sum(step["dt"] for step in steps)


def waiting_share(steps):
    """Return the share of their time for which some steps waited for a DataLoader."""
    return sum(step["spent"]["data"] for step in steps) / sum(step["dt"] for step in steps)


def seconds_of_warmup(steps, warmup):
    """Return the seconds that the first steps of a run took, which compile and touch memory for the first time."""
    return sum(step["dt"] for step in steps[:warmup])
