"""A card without one: what is told of its state, and how the bench treats it."""

from harness import card, machine
from harness.bench import rounds

import pytest
from conftest import error_of
from fixtures.records import failure, results_of, row

import bench


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
        ([steps(1980, 1500, 1980), steps(1930)], []),  # a slower moment is no slower round
        ([steps(1980), steps(1900)], ["the card's clock differs between rounds: 1900 to 1980 MHz"]),
        ([steps(1980), steps(1980, reasons=0x20)], ["slowed by heat: 1980 MHz at 87 °C"]),
        ([steps(1980, queued=0.095)], [WAITS]),
    ],
)
def test_a_clock_that_differs_heat_and_a_card_that_waits_are_told(rounds, words):
    assert card.words_on_card(rounds) == words


def test_the_bench_lets_a_child_ask_for_free_memory_and_leads_scripts_to_its_card(a_card, monkeypatch):
    """Who asks opens a context: it would take half a GB from each row, and all of a card in exclusive mode."""
    monkeypatch.setattr(machine, "free_memory_of_card", lambda device: pytest.fail("this opens a context"))
    args = bench.parse_command(["s01", "s05", "--device", "cuda:1"])
    assert args.flags == ["--device", "cuda:1", "--batch-size", "16"]
    args.text = None
    assert bench.new_bench(args, [])["variables"] == {"CUDA_VISIBLE_DEVICES": "1"}


NO_KERNEL = failure("AcceleratorError: CUDA error: no kernel image is available for execution on the device")
BUSY = failure("AcceleratorError: HIP error: the operation cannot be performed in the present state")
FULL = failure("AcceleratorError: CUDA error: out of memory", out_of_memory=True)


@pytest.mark.parametrize("error, remedy", [(NO_KERNEL, "install a PyTorch"), (BUSY, "another process")])
def test_a_card_on_which_the_probe_can_run_nothing_ends_the_bench_with_the_remedy(capsys, monkeypatch, error, remedy):
    monkeypatch.setattr(rounds, "run", lambda *call: error)
    line = error_of(capsys, rounds.probe, results_of(rows=[row("s01")]))
    assert f"nothing runs on this card, so the bench ends here: {remedy}" in line


@pytest.mark.parametrize("error", [failure("ValueError: a mistake"), FULL])
def test_a_probe_that_fails_otherwise_leaves_the_rows_their_turn(monkeypatch, error):
    monkeypatch.setattr(rounds, "run", lambda *call: error)
    rounds.probe(results_of(rows=[row("s01")]))
