"""The clock and the heat of an NVIDIA card during some steps, in words."""

import statistics

HEAT = 0x20 | 0x40  # of the bits in "reasons": the driver slows the card down because of heat, or the card itself does
CLOCKS_DIFFER = 1.03  # a clock that is 3 % faster in one round than in another is reported


def words_on_card(rounds):
    """Return what is worth saying about the clock and the heat of a card, a list of words.

    rounds: for each round, the Steps that are counted.
    """
    words, clocks, hot = [], [], []
    for steps in rounds:
        states = [step.card for step in steps if step.card]
        hot += [state for state in states if state["reasons"] & HEAT]
        if states:
            clocks.append(statistics.median(state["mhz"] for state in states))
    if clocks and max(clocks) > CLOCKS_DIFFER * min(clocks):
        words.append(f"the card's clock differs between rounds: {min(clocks):.0f} to {max(clocks):.0f} MHz")
    if hot:
        words.append(f"slowed by heat: {hot[-1]['mhz']} MHz at {hot[-1]['celsius']} °C")
    return words
