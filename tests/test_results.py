"""A real row writes the lines that these tests and the pages use. A record is of one bench."""

from harness.bench.results import Results
from harness.bench.rows import row_of

import pytest
from conftest import FLOAT32, ROOT, error_of, run_by_the_bench
from fixtures.records import ENDED, SEEN, run


def test_a_row_writes_what_the_records_of_these_tests_have():
    ran = run_by_the_bench(row_of("s10 --lr 1e30"), FLOAT32, steps=3)
    assert ran.summary.keys() == ENDED.keys() | {"name", "round", "turn"}
    assert SEEN.keys() <= ran.of_kind("seen")[0].keys()
    steps_of_tests = [line for line in run("s10", [1.0]) if line["kind"] == "step"]
    assert steps_of_tests[0].keys() <= ran.of_kind("step")[0].keys()
    assert ran.figures("loss")[-1] == "nan"


@pytest.mark.parametrize("first", [0, 1])
def test_a_record_to_which_another_one_was_appended_is_refused(tmp_path, capsys, first):
    """With its first line, or without it."""
    lines = (ROOT / "results" / "xeon-scale.jsonl").read_text("utf-8").splitlines(keepends=True)
    record = tmp_path / "x.jsonl"
    record.write_text("".join(lines + lines[first:]))
    assert f"a second record begins in line {len(lines) + 1}" in error_of(capsys, Results.load, record)
