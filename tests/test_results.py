"""The lines of a record: what they have is what log.py documents."""

from harness import log, machine
from harness.bench.results import Results
from harness.bench.rows import row_of

import json
from pathlib import Path

import torch
from conftest import FLOAT32, led_by_the_bench
from fixtures.records import TECHNIQUES, header, results_of, row, summary

import bench


def documented_lines():
    """Return the lines that the end of log.py shows as examples."""
    source = Path(log.__file__).read_text("utf-8").splitlines()
    text = " ".join(line.removeprefix("#").strip() for line in source if line.startswith("#     "))
    lines = []
    while text:
        line, length = json.JSONDecoder().raw_decode(text)
        lines.append(line)
        text = text[length:].strip()
    return lines


def test_a_row_writes_the_documented_keys_and_so_do_these_tests():
    head, step, last, *_ = documented_lines()
    ran = led_by_the_bench(row_of("s10"), FLOAT32, steps=2)
    for written in (ran.header, header("s01")):
        assert written.keys() - {"name", "round"} == head.keys()
        for part in ("settings", "shape", "environment"):
            assert written[part].keys() == head[part].keys()
    assert ran.of_kind("step")[0].keys() - {"name", "round"} == step.keys()
    assert ran.summary.keys() - {"name", "round"} == summary().keys() == last.keys()
    assert ran.of_kind("techniques")[0].keys() - {"name", "round", "kind"} == TECHNIQUES.keys()


def test_a_bench_writes_the_documented_keys_and_so_do_these_tests(monkeypatch):
    monkeypatch.setattr(machine, "find_device", lambda name: torch.device("cpu"))
    args = bench.parse_command(["s01", "--seed", "5"])
    args.text = "Tiny Shakespeare"
    own = documented_lines()[3]
    for written in (bench.new_bench(args, [], in_turn=True), results_of(rows=[row("s01")]).bench):
        assert written.keys() == own.keys()
        assert written["rows"][0].keys() == own["rows"][0].keys()


def test_a_full_disk_ends_the_record_and_not_the_bench(capsys):
    results = Results(results_of(rows=[row("s01")]).bench, open("/dev/full", "w"))  # noqa: SIM115
    results.add({"kind": "start", "name": "s01", "round": 0})
    assert list(results.runs) == [("s01", 0)]
    assert capsys.readouterr().err == "the record ends here: No space left on device\n"
