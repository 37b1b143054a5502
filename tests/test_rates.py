"""The probe, as the bench starts it."""

from harness.bench import probe

import json

from conftest import ROOT, python


def test_the_probe_says_what_the_bench_needs_and_how_fast_the_machine_is():
    probe = ROOT / "stages" / "harness" / "bench" / "probe.py"
    flags = ("--device", "cpu", "--amp-dtype", "float32", "--data", "docs")
    about = json.loads(python(probe, "--has-stages", *flags).out)
    assert (about["environment"]["device"], about["text"]) == ("cpu", "Python's documentation, a token a byte")
    assert about["flags"] == ["--device", "cpu", "--batch-size", "1"]
    assert about["rates"]["peak"].keys() <= {"float32", "tf32"}
    assert min(about["rates"]["peak"]["float32"], about["rates"]["copy"]) > 0


def test_a_download_that_fails_is_tried_once_for_all_rows_and_notes_are_for_stages(monkeypatch, capsys):
    monkeypatch.setattr(probe, "rates_of", lambda args: {})
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    probe.main(["--device", "cpu"])
    printed = capsys.readouterr()
    assert (json.loads(printed.out)["flags"], printed.err) == (["--device", "cpu"], "")
    probe.main(["--has-stages", "--device", "cpu"])  # and no test has a network
    printed = capsys.readouterr()
    assert json.loads(printed.out)["flags"][-2:] == ["--data", "docs"]
    assert "MKL_CBWR=COMPATIBLE in the environment changes the speed" in printed.err
