"""What is said of a card's state."""

from harness import card
from harness.figures import Step

import pytest


def steps(*clocks, reasons=4):
    """The Steps of a round in which the card had these clocks, at each second step."""
    in_round = []
    for mhz in clocks:
        state = {"mhz": mhz, "celsius": 87, "reasons": reasons}
        in_round += [Step(None, 0.1, {}, card=state), Step(None, 0.1, {})]
    return in_round


@pytest.mark.parametrize(
    "rounds, words",
    [
        ([steps(1980, 1500, 1980), steps(1930)], []),  # a slower moment is no slower round
        ([steps(1980), steps(1900)], ["the card's clock differs between rounds: 1900 to 1980 MHz"]),
        ([steps(1980), steps(1980, reasons=0x20)], ["slowed by heat: 1980 MHz at 87 °C"]),
    ],
)
def test_a_clock_that_differs_and_heat_are_reported(rounds, words):
    assert card.words_on_card(rounds) == words
