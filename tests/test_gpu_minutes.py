"""How long `make bench` takes on a GPU: README.md and NOTES.md have the sum that NOTES.md describes."""

from harness import flags, results

import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from pages import LESSONS, README, RESULTS, read_page

import bench
from data import VOCAB
from model import SIZES

NOTES = RESULTS / "NOTES.md"

# a round of the twelve stages that NOTES.md sums up, with the A/A control of s07
ROWS = ("s01", "s02", "s03", "s04", "s05", "s06", "s07", "s07", "s08", "s09", "s10", "s11", "s12")
COMPILED_ROWS = ROWS[3:]
# the lecture's step times of gpt2 at B 16, T 1024 on an A100, in ms; the later stages take as long as s06
LECTURE_MS = {"s01": 1000, "s02": 333, "s03": 300, "s04": 130, "s05": 96}
LATER_MS = 93
ACCUM = 4  # micro-batches in a step of s11 and s12
NEW_GRAPHS = ("s04", "s05", "s06", "s12")  # the model of s07 to s11 is that of s06

ROUNDS = 5
START_S, COMPILE_S, CACHE_S, PROBE_STEP_S = 10, 60, 20, 1.5


@dataclass(frozen=True)
class Card:
    """A card by its datasheet. float32, tf32, half: TFLOP/s. bandwidth: GB/s. memory: bytes. No TF32 units: None."""

    name: str
    memory: float
    float32: float
    tf32: float | None
    half: float
    bandwidth: float


A100 = Card("A100", 80e9, 19.5, 156, 312, 2039)
CARDS = [
    Card("H100", 80e9, 67, 495, 989, 3350),
    Card("RTX 4090", 24e9, 82.6, 82.6, 165.2, 1008),
    Card("RTX 3060", 12e9, 12.7, 12.7, 25.5, 360),
    Card("T4", 15.8e9, 8.1, None, 65, 320),
]


def batch_size(card):
    return flags.fitting_batch_size(card.memory)


def steps(card):
    """Of each process, with matmuls at the datasheet's rate."""
    shape = {"vocab_size": VOCAB, **SIZES["gpt2"]}
    args = SimpleNamespace(batch_size=batch_size(card), seq_len=1024, shape=shape)
    seconds = bench.least_step_seconds(args, 1e12 * card.half)
    return results.WARMUP + max(bench.COUNTED_STEPS, math.ceil(bench.COUNTED_SECONDS / seconds))


def seconds_on_the_a100():
    """{precision: seconds} of a step of every row at B 16 on the lecture's A100."""
    seconds = {"float32": 0.0, "tf32": 0.0, "half": 0.0}
    for row in ROWS:
        ms = LECTURE_MS.get(row, LATER_MS)
        if row in ("s11", "s12"):
            ms *= ACCUM
        precision = "half"
        if row == "s01":
            precision = "float32"
        if row == "s02":
            precision = "tf32"
        seconds[precision] += ms / 1000
    return seconds


def round_seconds(card, with_memory):
    """The seconds of all rows' steps in a round: those of the A100, scaled by the rates of both cards' matmuls.

    with_memory: whether to scale by the bandwidths where that gives more.
    """
    total = 0.0
    for precision, seconds in seconds_on_the_a100().items():
        if precision == "tf32" and card.tf32 is None:
            precision, seconds = "float32", LECTURE_MS["s01"] / 1000
        factor = getattr(A100, precision) / getattr(card, precision)
        if with_memory:
            factor = max(factor, A100.bandwidth / card.bandwidth)
        total += seconds * factor
    return steps(card) * batch_size(card) / 16 * total


def other_seconds(rounds):
    """The seconds in which no row takes a step: starts, compilation, and the probe, which runs once before the rest."""
    processes = rounds * (len(ROWS) + 1) + 1
    new = len(NEW_GRAPHS)
    from_the_cache = rounds * len(COMPILED_ROWS) - new
    probe_steps = rounds * (results.WARMUP + bench.PROBE_STEPS) + 1
    return processes * START_S + new * COMPILE_S + from_the_cache * CACHE_S + probe_steps * PROBE_STEP_S


def minutes(card, rounds):
    """(at least, at most) the minutes of a bench, two whole numbers."""
    fixed = other_seconds(rounds)
    least = fixed + rounds * round_seconds(card, with_memory=False)
    most = fixed + rounds * round_seconds(card, with_memory=True)
    return round(least / 60), round(most / 60)


def span(pair):
    return f"{pair[0]} to {pair[1]}"


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_notes_sum_up_a_card(card):
    seconds = (round(round_seconds(card, with_memory=False)), round(round_seconds(card, with_memory=True)))
    cells = [card.name, str(batch_size(card)), str(steps(card)), span(seconds)]
    cells += [span(minutes(card, ROUNDS)), span(minutes(card, 1))]
    assert f"\n| {' | '.join(cells)} |\n" in read_page(NOTES)


@pytest.mark.parametrize("card", [A100, *CARDS], ids=lambda card: card.name)
def test_notes_name_the_rates_of_a_card(card):
    tf32 = "none" if card.tf32 is None else f"{card.tf32:g}"
    assert f"\n| {card.name} | {card.float32:g} | {tf32} | {card.half:g} | {card.bandwidth:,} | " in read_page(NOTES)


def test_notes_sum_up_the_rest():
    for rounds, cell in ((ROUNDS, "all, five rounds"), (1, "all, one round")):
        assert f"\n| {cell} | | | {other_seconds(rounds):,.0f} |\n" in read_page(NOTES)


def test_the_step_times_are_those_that_the_lessons_quote():
    lessons = read_page(LESSONS)
    times = [f"{ms:,}" for ms in (*LECTURE_MS.values(), LATER_MS)]
    for before, after in zip(times, times[1:], strict=False):
        assert re.search(rf"\| A100 \| 124M, T 1024, B 16, .*\| {before} → {after} ms \|", lessons)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_readme_says_how_long_a_card_takes(card):
    assert re.search(rf"\b{card.name}\b[^,;]*? {span(minutes(card, ROUNDS))}\b", read_page(README))


def test_readme_says_how_long_a_single_round_takes():
    least = min(minutes(card, 1)[0] for card in CARDS)
    most = max(minutes(card, 1)[1] for card in CARDS)
    assert f'`ARGS="--rounds 1"` takes {least} to {most} minutes' in read_page(README)
