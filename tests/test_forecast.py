"""What each row should bring, before it is measured."""

from harness import machine
from harness.bench import page
from harness.bench.forecast import forecast_of
from harness.bench.results import Results
from harness.bench.rows import PROBE, row_of
from harness.figures import WARMUP
from harness.flags import parse

from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from fixtures.records import A100, probed, results_of, row


@pytest.fixture
def a_card(monkeypatch):
    """A machine with a card of today."""
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(machine, "free_memory_of_card", lambda device: 80e9)
    monkeypatch.setattr(machine, "native_amp_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(machine, "compile_problem", lambda device: None)


def only_the_warm_up_of_the_probe(results):
    """Return the Results of a bench whose probe has taken its warm-up, and nothing else has happened."""
    begun = Results(results.bench)
    run = results.runs[PROBE, 0]
    steps = [step | {"sdpa": "cudnn"} for step in run.steps[:WARMUP]]
    begun.runs[PROBE, 0] = replace(run, steps=steps, summary=None)
    return begun


def foretold_of(results):
    """Return the Table that is foretold of a bench, whose stages get the flags that all have."""
    stage_args = {row.name: parse(None, results.bench["flags"]) for row in results.rows.values()}
    return forecast_of(results, stage_args)


def test_what_is_foretold_of_the_h100_is_what_its_page_predicts(a_card):
    """The column of results/h100.md, but for the rates, which are those of the probe's warm-up."""
    begun = only_the_warm_up_of_the_probe(Results.load(ROOT / "results" / "h100.jsonl"))
    foretold = [outcome.predicted for outcome in foretold_of(begun).rows]
    assert foretold[0] is foretold[5] is None  # s01, and the vocabulary of s06
    on_its_page = [2.522, 1.223, 2.439, 1.507, 0.985, 1, 1, 1.071, 1.030, 0.994]
    assert [ratio for ratio in foretold if ratio] == pytest.approx(on_its_page, rel=0.02)
    assert list(begun.runs) == [(PROBE, 0)]


def probe_of(copy, **peak):
    """Return the lines of a probe that measured the same in each of its steps."""
    measured = {"sdpa": "flash", "peak": peak, "copy": copy}
    return [line | measured if line["kind"] == "step" else line for line in probed()]


def test_the_terminal_says_what_is_foretold_of_rows_that_are_one_process(a_card):
    rows = [row("probe"), row("s09"), row("s10", above="s09")]
    rows.append(replace(row_of("torchrun s12"), title="s12", above="s10"))
    rates = probe_of(float32=5e13, tf32=3e14, bfloat16=6e14, copy=3e12)
    words = page.expectations(foretold_of(results_of(rates, rows=rows, environment=A100)))
    lines = {line.split()[0]: line.split()[1] for line in words.splitlines()[2:]}
    assert (lines["s09"], lines["s10"], lines["s12"]) == ("–", "1.07", "–")
    assert words.endswith("What has a dash can't be predicted.")


def test_nothing_is_foretold_of_scripts_alone(a_card, tmp_path):
    (tmp_path / "mine.py").touch()
    rows = [row("probe"), row(str(tmp_path / "mine.py"))]
    assert page.expectations(foretold_of(results_of(probe_of(float32=5e13, copy=3e12), rows=rows))) is None
