"""What an accelerator was like while it trained: whether it waited and, on NVIDIA's, its clock and heat."""

import ctypes
import functools
import statistics

import torch

HEAT = 0x20 | 0x40  # of the bits in "reasons": the driver slows the card down because of heat, or the card itself does
CLOCKS_DIFFER = 1.03  # a clock that is 3 % faster in one round than in another is told
LAUNCH_BOUND = 0.9  # the card is said to wait where a step is queued only after a larger share of its time


def card_state(device):
    """Return what the driver tells of a card at this moment, or None where it does not.

    It is a dict: mhz, the clock of its processors; celsius; and reasons, bits that say why the clock is not higher.
    """
    found = nvml_of(device) if device.type == "cuda" else None
    if found is None:
        return None
    nvml, handle = found
    # of 8 bytes that are 0: some functions write the lower 4 alone
    mhz, celsius, reasons = ctypes.c_ulonglong(), ctypes.c_ulonglong(), ctypes.c_ulonglong()
    errors = [  # 0 where a function succeeds
        nvml.nvmlDeviceGetClockInfo(handle, 1, ctypes.byref(mhz)),
        nvml.nvmlDeviceGetTemperature(handle, 0, ctypes.byref(celsius)),
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons)),
    ]
    return None if any(errors) else {"mhz": mhz.value, "celsius": celsius.value, "reasons": reasons.value}


@functools.cache
def nvml_of(device):
    """Return NVML, the library of NVIDIA's driver, and its handle of a card; None without it. It opens no context."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    except (OSError, AttributeError):  # no driver of NVIDIA, or no uuid
        return None
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
        return None
    return nvml, handle


def words_on_card(rounds):
    """Return what is worth telling of the card under a row, a list of words.

    rounds: for each round, the step lines of a record that are counted. Some have "card", which is a card_state().
    "queued" is the seconds until all of a step was queued.
    """
    words, clocks, hot = [], [], []
    for steps in rounds:
        states = [step["card"] for step in steps if step.get("card")]
        hot += [state for state in states if state["reasons"] & HEAT]
        if states:
            clocks.append(statistics.median(state["mhz"] for state in states))
    if clocks and max(clocks) > CLOCKS_DIFFER * min(clocks):
        words.append(f"the card's clock differs between rounds: {min(clocks):.0f} to {max(clocks):.0f} MHz")
    if hot:
        words.append(f"slowed by heat: {hot[-1]['mhz']} MHz at {hot[-1]['celsius']} °C")
    shares = [step["queued"] / step["dt"] for step in sum(rounds, []) if "queued" in step]
    if shares and statistics.median(shares) > LAUNCH_BOUND:
        words.append("a step is queued only near its end: the card waits for Python, or Python for its numbers")
    return words
