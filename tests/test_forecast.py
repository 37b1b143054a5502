"""What each row should bring, before it is measured."""

from harness.bench.forecast import words_on_forecast
from harness.bench.results import Results
from harness.bench.rows import PROBE
from harness.figures import WARMUP

import re
from dataclasses import replace

import pytest
from conftest import ROOT


def test_what_is_foretold_of_the_h100_is_what_its_page_predicts(a_card):
    """The column of results/h100.md, but for the rates, which are those of the probe's warm-up."""
    results = Results.load(ROOT / "results" / "h100.jsonl")
    probe = results.runs[PROBE, 0]
    warmup_steps = [step | {"sdpa": "cudnn"} for step in probe.steps[:WARMUP]]
    begun = Results(results.bench)
    begun.runs[PROBE, 0] = replace(probe, steps=warmup_steps, summary=None)
    predicted = dict(re.findall(r"^(s\d\d) +(\S+)", words_on_forecast(begun), re.MULTILINE))
    assert predicted.pop("s01") == predicted.pop("s06") == "–"
    on_its_page = [2.522, 1.223, 2.439, 1.507, 0.985, 1, 1, 1.071, 1.030, 0.994]
    assert [float(ratio) for ratio in predicted.values()] == pytest.approx(on_its_page, rel=0.02)
