"""A card without one: what the driver answers about its state, and how the bench treats it."""

from harness import card, machine
from harness.bench import turns
from harness.bench.results import Run
from harness.figures import WARMUP

import ctypes
from types import SimpleNamespace

import pytest
import torch
from conftest import error_of

import bench

CUDA = torch.device("cuda", 1)


def answering(number):
    """A function of NVML that writes a number where its last argument points to."""

    def answer(*arguments):
        arguments[-1]._obj.value = number
        return 0

    return answer


# It knows one card, a laptop's, which tells no power. What is not 0 is an error.
NVML = SimpleNamespace(
    nvmlInit_v2=lambda: 0,
    nvmlDeviceGetHandleByUUID=lambda uuid, handle: 0 if uuid == b"GPU-12-34" else 6,
    nvmlDeviceGetClockInfo=answering(1425),
    nvmlDeviceGetPowerUsage=lambda handle, milliwatts: 3,
    nvmlDeviceGetTemperature=answering(87),
    nvmlDeviceGetCurrentClocksThrottleReasons=answering(0x24),
)


@pytest.fixture
def driver(monkeypatch):
    """The library above in place of NVIDIA's, and the card's UUID, which a test may change."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: NVML)
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


def test_a_machine_without_nvml_has_no_state(driver, monkeypatch):
    def load(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert card.card_state(CUDA) == {}


def steps(*clocks, reasons=4, queued=0.01):
    """The step lines of a round in which the card had these clocks, at each second step."""
    lines = []
    for mhz in clocks:
        state = {"mhz": mhz, "celsius": 87, "reasons": reasons}
        lines += [{"dt": 0.1, "queued": queued, "card": state}, {"dt": 0.1, "queued": queued}]
    return lines


WAITS = "a step is queued only near its end: the card waits for Python, or Python for its numbers"


@pytest.mark.parametrize(
    "rounds, words",
    [
        ([[{"dt": 0.1}]], []),
        ([steps(1980, 1500, 1980), steps(1930)], []),  # a slower moment is no slower round
        ([steps(1980), steps(1900)], ["the card's clock differs between rounds: 1900 to 1980 MHz"]),
        ([steps(1980), steps(1980, reasons=0x20)], ["slowed by heat: 1980 MHz at 87 °C"]),
        ([steps(1980, queued=0.095)], [WAITS]),
    ],
)
def test_a_clock_that_differs_heat_and_a_card_that_waits_are_told(rounds, words):
    assert card.words_on_card(rounds) == words


def test_the_bench_opens_no_context_on_the_card_and_leads_scripts_to_it(monkeypatch):
    """A context would take half a GB from each row, and all of a card in exclusive mode."""

    def fail(*arguments):
        pytest.fail("this opens a context")

    for name in ("mem_get_info", "set_device", "synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, fail)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(machine, "free_memory_by_a_child", {CUDA: 80e9}.get)
    args = bench.parse_command(["s01", "s05", "--device", "cuda:1"])
    assert args.flags == ["--device", "cuda:1", "--batch-size", "16"]
    assert bench.new_bench(args, [], in_turn=False)["variables_of_scripts"] == {"CUDA_VISIBLE_DEVICES": "1"}


def error(message, out_of_memory=False):
    """The error line of a probe."""
    return {"kind": "error", "message": message, "traceback": "", "out_of_memory": out_of_memory}


@pytest.mark.parametrize(
    "message, remedy",
    [
        ("AcceleratorError: CUDA error: no kernel image is available for execution on the device", "install a PyTorch"),
        ("AcceleratorError: HIP error: the operation cannot be performed in the present state", "another process"),
    ],
)
def test_a_card_on_which_the_probe_can_run_nothing_ends_the_bench_with_the_remedy(capsys, message, remedy):
    line = error_of(capsys, turns.end_where_nothing_runs, Run(0, WARMUP, error=error(message)))
    assert f"nothing runs on this card, so the bench ends here: {remedy}" in line


@pytest.mark.parametrize(
    "line", [None, error("ValueError: a mistake"), error("AcceleratorError: CUDA error: out of memory", True)]
)
def test_a_probe_that_fails_otherwise_leaves_the_rows_their_turn(line):
    turns.end_where_nothing_runs(Run(0, WARMUP, error=line))
