"""The tables of other people's cards: that the page shows them, and that they are computed rightly."""

from harness import ladder
from harness.arithmetic import Rates, seconds_per_token

import measured
import pytest
from conftest import ROOT

PAGE = (ROOT / "stages" / "measured.md").read_text("utf-8")


@pytest.mark.parametrize("name, table", measured.tables().items())
def test_the_page_shows_the_tables_of_its_script(name, table):
    assert f"\n\n{table}\n\n" in PAGE, f"{name}: draw it anew with python stages/measured.py"


@pytest.mark.parametrize("ladder_of_somebody", measured.LADDERS, ids=lambda ladder: ladder.author)
def test_a_file_is_named_at_its_commit(ladder_of_somebody):
    pinned = [part for part in ladder_of_somebody.source.split("/") if len(part) == 40]
    assert len(pinned) == 1 or ladder_of_somebody.author == "the lecture"


def test_a_technique_changes_the_work_as_its_stage_does():
    """The work of each stage of the ladder in bfloat16 on a card of the Ampere generation or later."""
    techniques = ["float32", "TF32", "bf16", "compile", "flash attention", "vocabulary"]
    techniques += ["clipping", "schedule", "decay", "fused AdamW", "32 micro-batches"]
    matmuls = measured.Matmuls(10.0, 20.0, 40.0)
    steps = [measured.Step((technique,), 1) for technique in techniques]
    somebody = measured.Ladder(measured.Card("a card", matmuls, 1000), "somebody", "", None, 8, steps)
    settings = {"amp_dtype": "bfloat16", "compile": True, "batch_size": 8, "accum": 32, "world_size": 1}
    environment = {"device": "cuda", "tf32": True}
    run = {"shape": measured.GPT2, "settings": settings, "environment": environment, "sdpa": "flash"}
    rates = Rates({"float32": 10e12, "tf32": 20e12, "bfloat16": 40e12}, copy=1e12)
    for index, stage in enumerate(ladder.NAMES[:-1]):  # nobody measured s12 alone
        work = ladder.work_of(stage, run)
        expected = 1e3 * work.tokens * seconds_per_token(work, rates)
        assert somebody.predicted_ms(index, matmuls) == pytest.approx(expected), stage


def test_a_figure_of_its_author_stays_and_another_is_derived_with_a_star():
    rows = measured.ladder_table(measured.LADDERS[1]).splitlines()
    assert rows[2].startswith("| float32 | 14,100 | 726* | – |")  # 10,240 tokens over 14,100 per second
    assert rows[3].startswith("| TF32 | 19,600 | 522* | 1.39 |")
    assert "| float32 | 26,000 | 315 | – |" in measured.ladder_table(measured.LADDERS[0])


def test_without_tf32_the_flag_changes_nothing():
    card = measured.Card("T4", measured.Matmuls(8.1, None, 65.0), 320)
    steps = [measured.Step(("float32",), 1), measured.Step(("TF32",), 1), measured.Step(("float16",), 1)]
    somebody = measured.Ladder(card, "somebody", "", None, 4, steps, amp_dtype="float16")
    before, flag, after = (somebody.predicted_ms(index, card.datasheet) for index in range(3))
    assert before == flag
    assert before / after == pytest.approx(2.15, abs=0.005)  # 663.5 over 308.6 ms


def test_the_comparison_counts_what_came_out_within_15_percent_of_the_sum(monkeypatch):
    """Compilation as predicted, 20 % better, and 20 % worse in a step that is not compared."""
    card = measured.Card("a card", measured.Matmuls(10.0, 20.0, 40.0), 1000)
    ladders = []
    for better, not_compared in ((1.0, False), (1.2, False), (0.8, True)):
        steps = [measured.Step(("float32",), 1000.0), measured.Step(("compile",), 1.0, not_compared=not_compared)]
        ladder_of_somebody = measured.Ladder(card, "somebody", "", None, 8, steps)
        ratio = ladder_of_somebody.predicted_ms(0, card.datasheet) / ladder_of_somebody.predicted_ms(1, card.datasheet)
        assert ratio > 1  # a fused step takes less time
        steps[1] = steps[1]._replace(ms=1000 / (ratio * better))
        ladders.append(ladder_of_somebody)
    monkeypatch.setattr(measured, "LADDERS", ladders)
    monkeypatch.setattr(measured, "COMPARED", ("compile",))
    assert "| compile | +0 to +20 % | 1 of 2 | – | 0 of 0 |" in measured.accuracy_table()
