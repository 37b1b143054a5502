"""A real row writes the lines that these tests and the pages use."""

from harness.bench.rows import row_of

from conftest import FLOAT32, run_by_the_bench
from fixtures.records import ENDED, SEEN, run


def test_a_row_writes_what_the_records_of_these_tests_have():
    ran = run_by_the_bench(row_of("s10"), FLOAT32, steps=3)
    assert ran.summary.keys() == ENDED.keys() | {"name", "round", "turn"}
    assert SEEN.keys() <= ran.of_kind("seen")[0].keys()
    steps_of_tests = [line for line in run("s10", [1.0]) if line["kind"] == "step"]
    assert steps_of_tests[0].keys() <= ran.of_kind("step")[0].keys()
