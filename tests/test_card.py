"""The state of a card: what the driver answers, and what is told of it."""

from harness import card

import ctypes
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

CUDA = torch.device("cuda", 1)
# A driver that knows one card. Its power is N/A, as on a laptop.
DRIVER = r"""
#include <string.h>
static int the_card;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = &the_card;
    return strcmp(uuid, "GPU-12-34") ? 6 : 0;
}
int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *mhz) {
    *mhz = 1425;
    return handle != &the_card || kind != 1;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { return 3; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) { *celsius = 87; return sensor; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) { *reasons = 0x24; return 0; }
"""


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """The library above in place of NVIDIA's, and the card's UUID, which a test may change."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libdriver.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(library))
    properties = SimpleNamespace(uuid="12-34")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    card.nvml_of.cache_clear()
    yield properties
    card.nvml_of.cache_clear()


def test_the_driver_tells_the_clock_and_the_temperature_and_no_power_of_a_laptop(driver):
    assert card.card_state(CUDA) == {"mhz": 1425, "celsius": 87, "reasons": 0x24}
    assert card.card_state(torch.device("cpu")) == {}


def test_a_card_that_the_driver_does_not_know_has_no_state(driver):
    driver.uuid = "a slice of a card"
    assert card.card_state(CUDA) == {}


def test_a_machine_without_nvml_has_no_state(monkeypatch):
    def load(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    card.nvml_of.cache_clear()
    assert card.card_state(CUDA) == {}


def steps(*clocks, reasons=4, queued=0.01):
    """The step lines of a round in which the card had these clocks, at each second step."""
    lines = []
    for mhz in clocks:
        state = {"mhz": mhz, "celsius": 87, "reasons": reasons}
        lines += [{"dt": 0.1, "queued": queued, "card": state}, {"dt": 0.1, "queued": queued}]
    return lines


WAITS = "a step is queued only near its end: the card waits for Python, or Python for a number of the card"


@pytest.mark.parametrize(
    "rounds, words",
    [
        ([], []),
        ([[{"dt": 0.1}]], []),
        ([steps(1980, 1500, 1980), steps(1930)], []),  # a slower moment is no slower round
        ([steps(1980), steps(1900)], ["the card's clock differs between rounds: 1900 to 1980 MHz"]),
        ([steps(1980), steps(1980, reasons=0x20)], ["slowed by heat: 1980 MHz at 87 °C"]),
        ([steps(1980, reasons=0x44)], ["slowed by heat: 1980 MHz at 87 °C"]),
        ([steps(1980, queued=0.095)], [WAITS]),
    ],
)
def test_a_clock_that_differs_heat_and_a_card_that_waits_are_told(rounds, words):
    assert card.words_on_card(rounds) == words
