"""The bench: from records to figures, from figures to the table, and its command line."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from conftest import ROOT, definitions
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import bench
from data import InputError
from measure import questions, table
from measure.figures import Results, flops_per_token, ratio_of
from model import GPT, SIZES, GPTConfig
from stages.record import WARMUP

FIXTURES = Path(__file__).resolve().parent / "fixtures"
TEXT = "0" * 64  # stands for the sha256 of a stage's text of today
GB = 1_000_000_000

CPU = dict(
    device="cpu",
    device_name="A CPU",
    threads=2,
    cores=2,
    capability=None,
    system="Linux x86_64",
    python="3.12.0",
    torch="2.9.0",
    cuda=None,
    cudnn=None,
    driver=None,
)
T4 = CPU | dict(device="cuda", device_name="Tesla T4", capability=7, cuda="12.8", cudnn=91002, driver="570.1")


def header_of(stage, environment=CPU, **changes):
    """What a stage writes before its first step."""
    return (
        dict(
            stage=stage,
            title=stage,
            steps=8,
            batch_size=4,
            seq_len=256,
            size="mini",
            device=environment["device"],
            seed=1337,
            data=None,
            amp_dtype="bfloat16",
            compile=True,
            accum=2,
            fallbacks={},
            world_size=1,
            tokens_per_step=1000,
            parameters=30_000_000,
            corpus="Tiny Shakespeare",
            tokenizer="gpt2",
            environment=environment,
            commit="0123456789abcdef",
            dirty=False,
            text_sha256=TEXT,
            started="2026-01-02T03:04:05+00:00",
        )
        | changes
    )


def record_of(stage, dts, error=None, finished=True, tokens=1000, memory=1.5 * GB, meter="peak RSS", end=(), **changes):
    """(header, steps, end) of a run whose steps after the warm-up took `dts`, and those before it 2 s each."""
    steps = [
        dict(step=i, loss=5 - i / 10, dt=dt, tokens=tokens, memory=memory and int(memory), meter=meter)
        for i, dt in enumerate([2.0] * WARMUP * bool(dts) + dts)
    ]
    last = dict(error=error) if error else dict(sdpa=None) | dict(end) if finished else None
    return header_of(stage, **changes), steps, last


def rate_of(n=1, **rates):
    """The record of the machine's own rates, in GFLOP/s."""
    steps = [dict(step=i, size=2048, rates={k: v * 1e9 for k, v in rates.items()}) for i in range(WARMUP + n)]
    return None, steps, None


def results_of(records, question="ladder", lockstep=True, rounds=1, names=None, environment=CPU, **settings):
    """Results of {(session, name): record}; without `names`, those of the records are the rows."""
    if names is None:
        names = [n for n in dict.fromkeys(n for _, n in records) if not n.endswith(" again") and n != "rate"]
    settings = dict(
        kind="bench",
        question=question,
        names=names,
        lockstep=lockstep,
        rounds=rounds,
        steps=5,
        flags=[],
        varies=questions.VARIES.get(question, []),
        what={},
        command="python bench.py",
        environment=environment,
    ) | dict(settings)
    return Results(settings, records)


Ran = namedtuple("Ran", "status out err")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The bench's own folder, with no results in it yet."""
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    return tmp_path


@pytest.fixture
def command(home, monkeypatch, capsys):
    """command(word, ...) -> how bench.py ended and what it said, in this process, which has loaded torch already."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, words)])
        capsys.readouterr()
        try:
            status = bench.main()
        except SystemExit as end:
            status = end.code
        return Ran(status, *capsys.readouterr())

    yield command
    for number, handler in handlers.items():
        signal.signal(number, handler)


def refused(ran, *parts):
    """Whether a bench ended with exit status 2 and one line that says all of these."""
    told = [line for line in ran.err.splitlines() if "error:" in line]
    assert len(told) == 1 and "Traceback" not in ran.err, ran.err
    assert all(part in told[0] for part in parts), told[0]
    return ran.status == 2


# figures


def test_a_ratio_is_the_median_and_its_interval_is_that_of_a_notch():
    # quartiles of 1, 2, 3, 4, 5 are 2 and 4: 1.57 * 2 / sqrt(5) = 1.4042
    ratio = ratio_of([3.0, 1.0, 5.0, 2.0, 4.0])
    assert (ratio.value, ratio.spread) == (3.0, pytest.approx(1.40425, abs=1e-5))
    assert str(ratio) == "3.00 ± 1.40"


@pytest.mark.parametrize("samples, value, spread", [([2.0], 2.0, 0.0), ([1.0, 3.0], 2.0, 1.57 / 2**0.5)])
def test_a_ratio_of_one_round_has_no_interval_and_of_two_a_wide_one(samples, value, spread):
    ratio = ratio_of(samples)
    assert (ratio.value, ratio.spread) == (value, pytest.approx(spread))


def test_in_lockstep_a_speed_up_is_the_median_of_the_ratios_of_steps():
    # a neighbour makes both slow in the third round: medians of either alone would give 1.0 / 0.6
    results = results_of(
        {(0, "a"): record_of("a", [1.0, 1.0, 8.0, 1.2]), (0, "b"): record_of("b", [0.5, 0.5, 4.0, 0.6])}
    )
    assert (results.speedup("b", "a").value, results.speedup("b", "a").spread) == (2.0, 0.0)
    assert results.speedup("a", "b").value == 0.5


def test_in_lockstep_a_step_that_one_of_two_did_not_take_is_no_round():
    results = results_of({(0, "a"): record_of("a", [1.0, 1.0, 9.0]), (0, "b"): record_of("b", [0.5, 0.25])})
    assert results.speedup("b", "a").value == 3.0  # the median of 2 and 4


def test_a_speed_up_counts_tokens_and_not_steps():
    results = results_of({(0, "a"): record_of("a", [1.0]), (0, "b"): record_of("b", [1.0], tokens=2000)})
    assert results.speedup("b", "a").value == 2.0


def test_in_rounds_a_speed_up_is_the_median_of_the_ratios_of_sessions():
    # the second session ran at half the clock rate; pooled steps would blur what is the same within each
    a = [[1.0, 1.0, 1.5], [2.0, 2.0, 9.0], [1.0, 1.0, 1.0]]
    b = [[0.5, 0.5, 0.5], [1.0, 1.0, 1.0], [0.25, 0.25, 9.0]]
    records = {(i, n): record_of(n, dts) for n, rows in (("a", a), ("b", b)) for i, dts in enumerate(rows)}
    results = results_of(records, lockstep=False, rounds=3)
    assert results.seconds_per_token("a") == {(0, 0): 0.001, (1, 0): 0.002, (2, 0): 0.001}
    assert results.speedup("b", "a").value == 2.0  # of 2, 2 and 4
    assert results.speedup("b", "a").spread == pytest.approx(1.57 * 1 / 3**0.5)


def test_two_that_never_shared_a_session_are_compared_by_way_of_the_first():
    records = {
        (0, "a"): record_of("a", [1.0, 1.0]),
        (0, "b"): record_of("b", [0.5, 0.25]),  # 3 ± 1.57 / sqrt(2) times a
        (1, "a"): record_of("a", [4.0, 4.0]),
        (1, "c"): record_of("c", [1.0, 1.0]),  # 4 ± 0 times a
    }
    ratio = results_of(records).speedup("b", "c")
    assert ratio.value == 0.75
    assert ratio.spread == pytest.approx(0.75 * (1.57 / 2**0.5) / 3)


def test_there_is_no_speed_up_without_figures_of_both():
    records = {(0, "a"): record_of("a", [1.0]), (0, "b"): record_of("b", []), (1, "c"): record_of("c", [1.0])}
    results = results_of(records)
    assert [results.speedup(*pair) for pair in ("ba", "ab", "ca", "cb")] == [None] * 4


def test_the_noise_is_how_far_the_twin_came_out_apart():
    records = {(0, "a"): record_of("a", [1.0, 1.0]), (0, "a again"): record_of("a", [1.0 / 0.97, 1.0 / 0.97])}
    results = results_of(records)
    assert results.twin() == "a" and results.noise() == pytest.approx(0.03)


def test_the_twins_spread_is_noise_too():
    records = {(0, "a"): record_of("a", [1.0, 1.0]), (0, "a again"): record_of("a", [1.0 / 0.99, 1.0 / 1.01])}
    assert results_of(records).noise() == pytest.approx(1.57 * 0.01 / 2**0.5)


def test_without_a_twin_nothing_is_known_of_the_noise():
    assert results_of({(0, "a"): record_of("a", [1.0])}).noise() is None


@pytest.mark.parametrize("size, T", [("tiny", 64), ("mini", 64), ("tiny", 24)])
def test_the_formula_for_flops_is_what_torch_counts_in_s01s_model(size, T):
    attention = definitions("s01", "attention", torch=torch, math=__import__("math"), F=F)["attention"]
    model = GPT(GPTConfig(block_size=T, **SIZES[size]), attention)
    x = torch.zeros(1, T, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(x, x)[1].backward()
    assert counter.get_total_flops() == T * flops_per_token(size, T)


def test_a_rate_is_the_median_of_the_steps_after_the_warm_up_and_the_share_is_of_the_best():
    steps = [dict(step=i, size=64, rates=dict(float32=1e9 * r)) for i, r in enumerate([9, 9, 9, 1, 2, 3])]
    steps[-1]["rates"]["bfloat16"] = 4e9
    results = results_of({(0, "s01_baseline"): record_of("s01_baseline", [1.0]), (0, "rate"): (None, steps, None)})
    assert results.rates() == dict(float32=2e9, bfloat16=4e9)
    # mini at T 256: 6 (12 * 6 * 384**2 + 50257 * 384) + 12 * 6 * 384 * 256 = 186,571,008; 1000 tokens a second
    assert flops_per_token("mini", 256) == 186_571_008
    assert results.share("s01_baseline") == pytest.approx(186_571_008 * 1000 / 4e9)


def test_several_processes_have_several_times_the_limit():
    records = {(0, "2 ranks"): record_of("s12_ddp", [1.0], world_size=2), (0, "rate"): rate_of(float32=1)}
    assert results_of(records).share("2 ranks") == pytest.approx(186_571_008 * 1000 / 2e9)


def test_losses_are_those_of_the_last_step_that_all_have_reached():
    records = {
        (0, "a"): record_of("a", [1.0, 1.0, 1.0]),
        (0, "b"): record_of("b", [1.0], error="killed"),
        (1, "b"): record_of("b", [1.0, 1.0]),
        (0, "c"): record_of("c", [], error="never began"),
    }
    results = results_of(records)
    assert results.last_common_step() == WARMUP + 1
    assert results.loss("b", WARMUP + 1) == 4.6


def test_results_as_text_are_read_back_as_they_were(tmp_path):
    for name in ("ladder_cpu", "ladder_t4"):
        results = LADDERS[name]()
        (tmp_path / name).write_text(results.text())
        back = Results.read(tmp_path / name)
        assert (back.settings, back.records) == (results.settings, results.records)
        assert back.text() == results.text()


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(seed=1), "seed is 1337 for a and 1 for b"),
        (dict(size="tiny"), "size is mini for a and tiny for b"),
        (dict(environment=CPU | dict(torch="2.8.0")), "torch is 2.9.0 for a and 2.8.0 for b"),
        (dict(environment=CPU | dict(threads=1)), "threads is 2 for a and 1 for b"),
        (dict(corpus="mine.txt"), "corpus is Tiny Shakespeare for a and mine.txt for b"),
    ],
)
def test_records_that_cannot_be_compared_are_told(change, told):
    records = {(0, "a"): record_of("a", [1.0]), (0, "b"): record_of("b", [1.0], **change)}
    assert results_of(records).mixed() == told


def test_what_a_question_is_about_may_differ():
    records = {(0, n): record_of("s03_bf16", [1.0], amp_dtype=n) for n in ("float32", "bfloat16")}
    assert results_of(records, question="amp").mixed() is None
    assert results_of(records).mixed() == "amp_dtype is bfloat16 for bfloat16 and float32 for float32"


# the table


def ladder_cpu():
    """A bench on a CPU with one row of every kind. Seconds a step are those of s01 divided by the speed-up."""
    base = [1.0, 1.1, 0.9, 1.0, 1.2]

    def at(speed, wiggle=(1, 1, 1, 1, 1)):
        return [round(b / speed * w, 9) for b, w in zip(base, wiggle, strict=True)]

    no_compiler = dict(compile=False, fallbacks=dict(compile="left out, no C++ compiler found: install g++ (Linux)"))
    oom, boom = "out of memory at batch size 4: try --batch-size 2", "RuntimeError: boom | with a bar"
    records = {
        "s01_baseline": record_of("s01_baseline", at(1)),
        "s02_tf32": record_of("s02_tf32", at(1, (1, 1, 1.01, 0.99, 1))),
        "s03_bf16": record_of("s03_bf16", at(2), memory=1.25 * GB),
        "s04_compile": record_of("s04_compile", [], error=oom),
        "s05_flash": record_of("s05_flash", at(3), end=dict(sdpa="flash"), memory=0.5 * GB, text_sha256="1" * 64),
        "s06_vocab": record_of("s06_vocab", at(2.4)),
        "s07_clip": record_of("s07_clip", at(2.42)),
        "s08_cosine": record_of("s08_cosine", at(2.4)[:3], error=boom),
        "s10_fused": record_of("s10_fused", at(3)[:4], finished=False, memory=None, meter="no meter"),
        "s11_accum": record_of("s11_accum", at(1.5), tokens=2000),
        "s12_ddp": record_of("s12_ddp", at(1.5), tokens=2000),
        "s07_clip again": record_of("s07_clip", at(2.42 * 1.02)),
        "rate": rate_of(5, float32=500, bfloat16=1000),
    }
    for header, _, _ in records.values():
        if header:
            header.update(no_compiler)
    return results_of({(0, n): r for n, r in records.items()}, names=list(bench.STAGES))


def ladder_t4():
    """Two rounds on a GPU with neither bfloat16 nor TF32; the second at half the speed."""
    gpu = dict(environment=T4, amp_dtype="float16", meter="peak allocated", size="gpt2", seq_len=1024)

    def pair(stage, dt, memory, reserved, **changes):
        end = dict(reserved=int(reserved * GB)) | changes.pop("end", {})
        return [record_of(stage, [dt * slow] * 3, memory=memory * GB, end=end, **gpu, **changes) for slow in (1, 2)]

    rows = {
        "s01_baseline": pair("s01_baseline", 1.0, 12.5, 14),
        "s02_tf32": pair("s02_tf32", 1.0, 12.5, 14),
        "s03_bf16": pair("s03_bf16", 0.4, 10, 11.5),
        "s04_compile": pair("s04_compile", 0.2, 8, 9),
        "s05_flash": pair("s05_flash", 0.16, 6, 7, end=dict(sdpa="efficient")),
        "s04_compile again": pair("s04_compile", 0.2, 8, 9),
    }
    records = {(i, n): r for n, two in rows.items() for i, r in enumerate(two)}
    records |= {(i, "rate"): rate_of(float32=4000, float16=20000) for i in range(2)}
    return results_of(records, lockstep=False, rounds=2, environment=T4)


LADDERS = dict(ladder_cpu=ladder_cpu, ladder_t4=ladder_t4)


@pytest.fixture
def texts_as_recorded(monkeypatch):
    """The stages' texts are what they were when the fixtures' records were made."""
    monkeypatch.setattr(table, "text_sha256", lambda stage: TEXT)


@pytest.mark.parametrize("name", LADDERS)
def test_the_page_of_a_results_file_is_byte_for_byte_what_it_was(name, texts_as_recorded):
    """After a change that is wanted: REDRAW=1 python -m pytest tests/test_bench.py, and read the difference."""
    results, page = FIXTURES / f"{name}.jsonl", FIXTURES / f"{name}.md"
    if os.environ.get("REDRAW"):
        results.write_bytes(LADDERS[name]().text().encode())
        page.write_bytes(questions.page(Results.read(results)).encode())
    assert results.read_bytes().decode() == LADDERS[name]().text()
    assert questions.page(Results.read(results)) == page.read_bytes().decode()


def cells_of(results):
    """{name: {column: cell}} of a table."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.table(results).splitlines()]
    head, _, *rows = lines
    assert all(len(row) == len(head) for row in rows)
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_every_figure_of_the_table_is_that_of_the_sums_done_by_hand(texts_as_recorded):
    rows = cells_of(ladder_cpu())
    assert list(rows) == bench.STAGES
    columns = ["tok/sec", "dt ms [IQR]", "memory GB", "× before", "× s01", "% of limit", "loss, step 5"]
    expected = {
        # the median of 1, 1.1, 0.9, 1, 1.2 is 1; 186.6 MFLOP * 1000 tokens a second of 1000 GFLOP/s are 18.7 %
        "s01_baseline": ["1,000", "1000 [1000, 1100]", "1.50", "–", "–", "18.7", "4.5000"],
        # the ratios are 1, 1, 1 / 1.01, 1 / 0.99 and 1
        "s02_tf32": ["1,000", "1000 [990, 1100]", "1.50", "1.00 ± 0.00", "1.00 ± 0.00", "18.7", "4.5000"],
        "s03_bf16": ["2,000", "500 [500, 550]", "1.25", "2.00 ± 0.00", "2.00 ± 0.00", "37.3", "4.5000"],
        "s04_compile": ["–"] * 7,
        "s05_flash": ["3,000", "333 [333, 367]", "0.50", "–", "3.00 ± 0.00", "56.0", "4.5000"],
        "s06_vocab": ["2,400", "417 [417, 458]", "1.50", "0.80 ± 0.00", "2.40 ± 0.00", "44.8", "4.5000"],
        "s09_decay": ["–"] * 7,
        "s10_fused": ["3,000", "333 [325, 342]", "no meter", "–", "3.00 ± 0.00", "56.0", "4.5000"],
        # twice the tokens in 1 / 1.5 of the time: 3 times the speed
        "s11_accum": ["3,000", "667 [667, 733]", "1.50", "1.00 ± 0.00", "3.00 ± 0.00", "56.0", "4.5000"],
    }
    for name, cells in expected.items():
        assert [rows[name][c] for c in columns] == cells, name


def test_every_kind_of_note_is_told(texts_as_recorded):
    notes = {name: row["note"] for name, row in cells_of(ladder_cpu()).items()}
    fallback = "fallback to eager: left out, no C++ compiler found: install g++ (Linux)"
    assert notes == {
        "s01_baseline": "",
        "s02_tf32": "no-op: no TF32 units in a CPU; no difference",
        "s03_bf16": "active: bfloat16; faster",
        "s04_compile": f"out of memory at batch size 4: try --batch-size 2; {fallback}",
        "s05_flash": "active: the flash kernel ran; stale: the text has changed since",
        "s06_vocab": "slower",
        # 1.008 times as fast, and the twins were 1.02 apart
        "s07_clip": "for the loss, not the speed; no difference",
        "s08_cosine": "failed: RuntimeError: boom / with a bar; for the loss, not the speed; no difference",
        "s09_decay": "not run",
        "s10_fused": "not finished",
        "s11_accum": "2 micro-batches a step; no difference",
        "s12_ddp": "one process: what DDP itself costs; no difference",
    }


def test_a_gpu_without_16_bit_brain_floats_is_told_what_it_took_instead(texts_as_recorded):
    rows = cells_of(ladder_t4())
    assert {name: row["note"] for name, row in rows.items()} == {
        "s01_baseline": "",
        "s02_tf32": "no-op: no TF32 units in this GPU; no difference",
        "s03_bf16": "active: float16, loss scaled; faster",
        "s04_compile": "active: 6 s of warm-up; faster",
        "s05_flash": "active: the efficient kernel ran; faster",
    }
    assert rows["s01_baseline"]["memory GB"] == "12.50 (14.00 reserved)"
    # pooled steps are 0.4 s and 0.8 s, three of each; within a round the ratio is 2.5
    assert [rows["s03_bf16"][c] for c in ("dt ms [IQR]", "× s01")] == ["600 [400, 800]", "2.50 ± 0.00"]


def note_of(name, environment=CPU, **changes):
    return table.note(results_of({(0, name): record_of(name, [1.0], environment=environment, **changes)}), name)


@pytest.mark.parametrize(
    "name, changes, said",
    [
        ("s02_tf32", dict(environment=T4 | dict(capability=8)), "active"),
        ("s02_tf32", dict(environment=CPU | dict(device="mps")), "no-op: no TF32 units in a MPS"),
        ("s03_bf16", dict(amp_dtype="float32"), "no-op: float32 was asked for"),
        ("s03_bf16", dict(amp_dtype="float32", fallbacks=dict(amp_dtype="none here")), "no-op: none here"),
        ("s04_compile", dict(compile=False), "fallback to eager: --no-compile was given"),
        ("s06_vocab", dict(error="killed by the system"), "failed: killed by the system"),
        ("s06_vocab", dict(text_sha256="old"), "stale: the text has changed since"),
        ("s12_ddp", dict(world_size=2), ""),
    ],
)
def test_the_note_says_what_the_machine_makes_of_it(texts_as_recorded, name, changes, said):
    assert note_of(name, **changes) == said


def test_a_record_is_stale_only_where_the_text_is_another():
    from stages.record import text_sha256

    assert note_of("s06_vocab", text_sha256=text_sha256("s06_vocab")) == ""


@pytest.mark.parametrize("memory", [None, 0])
def test_memory_that_nothing_measured_is_no_number(memory):
    results = results_of({(0, "s01_baseline"): record_of("s01_baseline", [1.0], memory=memory, meter="no meter")})
    assert cells_of(results)["s01_baseline"]["memory GB"] == "no meter"


def test_without_a_twin_no_difference_is_called_one():
    results = results_of({(0, "a"): record_of("s01_baseline", [1.0]), (0, "b"): record_of("s06_vocab", [0.5])})
    assert cells_of(results)["b"]["note"].startswith("stale")  # and neither faster nor slower
    assert "Noise: no pair" in questions.body(results)


def test_rounds_in_lockstep_are_those_of_all_sessions():
    results = results_of({(i, "a"): record_of("a", [1.0]) for i in range(3)}, rounds=3)
    assert table.how(results).startswith("15 rounds in lockstep in 3 sessions: ")


def test_a_difference_within_its_own_interval_is_none():
    same = [1.0, 1.0, 1.0, 1.0]
    records = {(0, "a"): record_of("s01_baseline", same), (0, "a again"): record_of("s01_baseline", same)}
    records[0, "b"] = record_of("s06_vocab", [0.5, 2.0, 0.6, 1.0])
    assert "no difference" in cells_of(results_of(records))["b"]["note"]


def test_nothing_that_ran_is_a_page_all_the_same():
    results = results_of({}, names=["s01_baseline", "s02_tf32"])
    assert "No stage got as far as its first step." in questions.page(results)
    assert [row["note"] for row in cells_of(results).values()] == ["not run"] * 2


def test_the_chart_has_a_bar_for_every_row_that_has_figures(texts_as_recorded):
    results = ladder_cpu()
    chart = table.charts(results).split("```")[1]
    names, bars = (line.split("[")[1].rstrip("]").split(", ") for line in chart.splitlines() if "[" in line)
    shown = {row.split("_")[0]: cells["tok/sec"] for row, cells in cells_of(results).items() if cells["tok/sec"] != "–"}
    assert dict(zip(names, bars, strict=True)) == {name: cell.replace(",", "") for name, cell in shown.items()}
    assert names == sorted(names)


def test_a_loss_that_is_no_number_is_left_out_of_the_curves():
    records = {(0, name): record_of(name, [1.0, 1.0]) for name in ("s07_clip", "s08_cosine")}
    records[0, "s07_clip"][1][-1]["loss"] = math.nan
    curves = table.charts(results_of(records)).split("```")[3]
    assert "nan" not in curves and "x-axis [0, 1, 2, 3]" in curves


def test_the_losses_of_s07_and_s08_stand_side_by_side(texts_as_recorded):
    curves = table.charts(ladder_cpu()).split("```")[3]
    axis, bars, line = (row.split("[")[1].rstrip("]").split(", ") for row in curves.splitlines() if "[" in row)
    assert axis == ["0", "1", "2", "3", "4", "5"]  # as far as the shorter of the two
    assert bars == line == ["5.000", "4.900", "4.800", "4.700", "4.600", "4.500"]


# README


def test_what_is_outside_the_markers_stays(texts_as_recorded):
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    assert table.between_markers(text, "\nnew\n\n") == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"


BROKEN = {
    "none": "nothing here",
    "no end": table.BEGIN,
    "two": f"{table.BEGIN} {table.BEGIN} {table.END}",
    "two ends": f"{table.BEGIN} {table.END} {table.END}",
    "swapped": f"{table.END} {table.BEGIN}",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_markers_that_do_not_occur_once_each_are_refused_and_the_file_stays(command, home, text):
    with pytest.raises(InputError):
        table.between_markers(text, "new")
    (home / "README.md").write_text(text)
    shutil.copy(FIXTURES / "ladder_cpu.jsonl", home / "results" / "x.jsonl")
    assert refused(command("--render", "x", "--readme"), "README.md")
    assert (home / "README.md").read_text() == text
    assert refused(command("--readme", "--out", "y"), "README.md")  # before anything runs
    assert not (home / "results" / "y.parts").exists()


def test_a_readme_is_written_between_its_markers_alone(command, home):
    before, after = "# Titel – mit Umlauten äöü\r\n\r\n", "\r\n\tend, with no newline after it"
    (home / "README.md").write_bytes(f"{before}{table.BEGIN}old{table.END}{after}".encode())
    shutil.copy(FIXTURES / "ladder_cpu.jsonl", home / "results" / "x.jsonl")
    assert command("--render", "x", "--readme").status == 1  # rows of this fixture failed
    text = (home / "README.md").read_bytes().decode()
    assert text.startswith(before + table.BEGIN) and text.endswith(table.END + after)
    assert "[s01_baseline](stages/s01_baseline.py)" in text and "old" not in text


# amp, limit, scale


@pytest.mark.parametrize(
    "speed, words",
    [
        (1.51, "excellent: switch it on"),
        (1.5, "significant: switch it on"),
        (1.21, "significant: switch it on"),
        (1.2, "modest"),
        (1.06, "modest"),
        (1.05, "negligible"),
        (0.95, "negligible"),
        (0.94, "slower: leave it off"),
    ],
)
def test_the_recommendation_is_by_the_measured_speed_up(speed, words):
    records = {
        (0, "float32"): record_of("s03_bf16", [speed, speed], memory=2 * GB),
        (0, "bfloat16"): record_of("s03_bf16", [1.0, 1.0], memory=1.5 * GB),
    }
    said = questions.recommendation(results_of(records, question="amp"))
    assert said == f"- bfloat16: {speed:.2f} ± 0.00 times float32's speed, 25 % less memory: {words}."


def test_a_recommendation_inside_the_noise_says_so_and_more_memory_is_more():
    records = {
        (0, "float32"): record_of("s03_bf16", [1.1, 1.1]),
        (0, "float16"): record_of("s03_bf16", [1.0, 1.0], memory=3 * GB),
        (0, "bfloat16"): record_of("s03_bf16", [], error="boom"),
        (0, "float16 again"): record_of("s03_bf16", [0.8, 0.8]),  # as fast as 1.25 of the other
    }
    said = questions.recommendation(results_of(records, question="amp")).splitlines()
    assert said == [
        "- float16: 1.10 ± 0.00 times float32's speed, 100 % more memory: modest; but this is inside the noise of the "
        "run: more --batches would tell.",
        "- bfloat16: no figures",
    ]


def test_scaling_is_told_by_its_efficiency_and_the_share_of_the_all_reduce():
    reduce = [dict(step=i, dt=0.05, bytes=120_000_000, tokens=1) for i in range(WARMUP + 3)]
    records = {
        (0, "1 rank"): record_of("s12_ddp", [1.0] * 3),
        (0, "2 ranks"): record_of("s12_ddp", [0.625] * 3, world_size=2),
        (0, "4 ranks"): record_of("s12_ddp", [], error="boom", world_size=4),
        (0, "allreduce 2 ranks"): (None, reduce, None),
    }
    names = ["1 rank", "2 ranks", "4 ranks"]
    said = questions.scaling(results_of(records, question="scale", names=names)).splitlines()
    assert said == [
        "- 2 ranks: 1.60 ± 0.00 times the speed of one process, efficiency 80 %; an all-reduce of its 120 MB of "
        "gradients by itself takes 50.0 ms, 8.0 % of a step (DDP hides some of it behind the backward).",
        "- 4 ranks: no figures",
        "- Threads of a process: 2 in every row, so that n processes have n times one's cores.",
    ]


def limit_results():
    """B 5 fits; B 6 does, too, but not in the longer run that gives the figures."""
    no = "out of memory: more than the budget of 1.0 GB"
    tried = {1: None, 2: None, 4: None, 8: no, 6: None, 7: no}
    records = {(0, f"s05_flash B{b} probe"): record_of("s05_flash", [], error=e) for b, e in tried.items()}
    records |= {(0, "s05_flash B6"): record_of("s05_flash", [], error=no)}
    records |= {(0, "s05_flash B5"): record_of("s05_flash", [0.5, 0.5, 0.5])}
    return results_of(records, question="limit", names=["s05_flash"])


@pytest.mark.parametrize("read_back", [False, True])
def test_the_limit_is_the_largest_batch_whose_long_run_fits(tmp_path, read_back):
    results = limit_results()
    if read_back:
        (tmp_path / "x.jsonl").write_text(results.text())
        results = Results.read(tmp_path / "x.jsonl")
    row = questions.limit_table(results).splitlines()[2]
    assert row == "| s05_flash | 5 | 2,000 | 1.50 | B 6: out of memory: more than the budget of 1.0 GB |"
    assert questions.complete(results)


def test_a_limit_below_one_sequence_is_told_as_none():
    records = {(0, "s05_flash B1 probe"): record_of("s05_flash", [], error="out of memory")}
    results = results_of(records, question="limit", names=["s05_flash", "s11_accum"])
    assert questions.limit_table(results).splitlines()[2:] == [
        "| s05_flash | none | – | – | B 1: out of memory |",
        "| s11_accum | none | – | – | nothing yet: not finished |",
    ]
    assert not questions.complete(results)


def test_the_numbers_of_processes_are_powers_of_two_and_the_most():
    assert [questions.sizes(n) for n in (1, 2, 3, 4, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]


# the command line


@pytest.mark.parametrize(
    "words, parts",
    [
        (["s13"], ["s13 is no stage"]),
        (["0"], ["0 is no stage"]),
        (["s5x"], ["s5x is no stage"]),
        (["s05", "amp"], ["amp is no stage"]),
        (["--out", "../x"], ["'../x'"]),
        (["--out", ""], ["''"]),
        (["--resume", "a/b"], ["'a/b'"]),
        (["--render", ".x"], ["'.x'"]),
        (["--record", "x.jsonl"], ["--record"]),
        (["--save", "x"], ["--save"]),
        (["--lockstep"], ["--lockstep"]),
        (["--rounds", "0"], ["--rounds", "got 0"]),
        (["--timeout", "0"], ["--timeout", "got 0"]),
        (["--memory-budget", "-1"], ["--memory-budget", "got -1"]),
        (["--ranks", "0"], ["--ranks", "got 0"]),
        (["--steps", "0"], ["--steps", "got 0"]),
        (["--batches", "0", "amp"], ["--steps", "got 0"]),
        (["--rounds", "many"], ["--rounds"]),
        (["--round", "2"], ["--round"]),
        (["amp", "--amp-dtype", "float16"], ["leave --amp-dtype out"]),
        (["amp", "s02"], ["from s03 on"]),
        (["amp", "s03", "s05"], ["one stage"]),
        (["scale", "s05"], ["s12"]),
        (["scale", "--ranks", "9999"], ["--ranks 9999"]),
        (["--resume", "gone"], ["results/gone has nothing to resume"]),
        (["--render", "gone"], ["results/gone.jsonl is not there"]),
        (["--out", "old"], ["results/old is there already", "--resume old", "--render old"]),
        (["--data", "gone.txt"], ["gone.txt"]),
        (["--seq-len", "2000"], ["--seq-len 2000"]),
        (["--readme"], ["README.md"]),
    ],
)
def test_what_the_user_got_wrong_is_one_line_and_exit_status_2(command, home, words, parts):
    if not {"--data", "--seq-len", "--readme"} & set(words):
        (home / "ids.bin").write_bytes(bytes(20_000))
        words = [*words, "--data", home / "ids.bin"]
    (home / "results" / "old.md").touch()
    assert refused(command("--device", "cpu", *words), *parts)
    assert [path.name for path in (home / "results").iterdir()] == ["old.md"]


@pytest.mark.parametrize("content", ["", "\n", "rubbish", "[]", "{}", '{"names": []}', "\x00\xff"])
def test_a_results_file_that_is_none_is_one_line_and_exit_status_2(command, home, content):
    (home / "results" / "x.jsonl").write_bytes(content.encode("latin-1"))
    assert refused(command("--render", "x"), "x.jsonl")


@pytest.mark.parametrize("word", ["s05", "5", "05", "s5", "s05_flash"])
def test_a_stage_has_several_names(word):
    assert bench.parse([word]).stages == ["s05_flash"]


def test_stages_are_taken_once_each_and_in_ladder_order():
    assert bench.parse(["11", "s01", "s11_accum"]).stages == ["s01_baseline", "s11_accum"]
    assert bench.parse([]).stages == bench.STAGES
    assert bench.parse(["amp"]).stages == ["s03_bf16"]
    assert bench.parse(["limit", "4"]).stages == ["s04_compile"]


def test_a_name_of_our_own_making_is_never_one_that_is_there(home):
    args = bench.parse(["s01", "--device", "cpu"])
    first = bench.free_name(args)
    (home / "results" / f"{first}.md").touch()
    (home / "results" / f"{first}-2.parts").mkdir()
    assert bench.free_name(args) == f"{first}-3"


def test_records_of_different_settings_in_one_file_are_refused(command, home):
    results = ladder_cpu()
    results.records[0, "s06_vocab"][0]["seq_len"] = 128
    (home / "results" / "x.jsonl").write_text(results.text())
    assert refused(command("--render", "x"), "seq_len is 256 for", "128 for s06_vocab")
    assert not (home / "results" / "x.md").exists()


# a whole bench


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    """(folder, Ran) of a real bench of three small stages, in a copy of the repository."""
    folder = tmp_path_factory.mktemp("ladder") / "copy"
    ignore = shutil.ignore_patterns(".*", "__pycache__", "results", "tests")
    shutil.copytree(ROOT, folder, ignore=ignore)
    rate = folder / "measure" / "rate.py"
    assert rate.read_text().count("2048") == 1
    rate.write_text(rate.read_text().replace("2048", "256"))  # half a minute of products otherwise
    (folder / "README.md").write_bytes(f"above\r\n{table.BEGIN}\n{table.END}\nbelow".encode())
    return folder, real(folder, "s01", "5", "s07", *SMALL, "--out", "small")


SMALL = ("--size", "tiny", "--device", "cpu", "--seq-len", "64", "--batch-size", "2", "--no-compile", "--steps", "5")


def real(folder, *words):
    """Run bench.py in a process of its own."""
    env = os.environ | dict(LADDER_OFFLINE="1", XDG_CACHE_HOME=str(folder.parent / "cache"), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, folder / "bench.py", *words], capture_output=True, text=True, env=env, timeout=200
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def test_a_bench_prints_its_table_and_leaves_it_with_its_records(ladder):
    folder, ran = ladder
    assert ran.status == 0, ran.err
    assert sorted(path.name for path in (folder / "results").iterdir()) == ["small.jsonl", "small.md"]
    results = Results.read(folder / "results" / "small.jsonl")
    assert {name for _, name in results.records} == {"s01_baseline", "s05_flash", "s07_clip", "s05_flash again", "rate"}
    assert all(len(steps) == WARMUP + 5 for _, steps, _ in results.records.values())
    assert ran.out.strip() == questions.body(results).strip()
    assert (folder / "results" / "small.md").read_text() == questions.page(results)
    rows = cells_of(results)
    assert list(rows) == ["s01_baseline", "s05_flash", "s07_clip"]
    assert "active: the flash kernel ran" in rows["s05_flash"]["note"]
    assert all(float(row["memory GB"]) > 0.05 and "–" not in row["tok/sec"] for row in rows.values())
    assert "round 5/5" in ran.err and "s left" in ran.err and "tok/sec" in ran.err


def test_rendering_draws_the_same_bytes_and_runs_nothing(ladder):
    folder, ran = ladder
    page, records = ((folder / "results" / f"small.{end}").read_bytes() for end in ("md", "jsonl"))
    (folder / "results" / "small.md").unlink()
    again = real(folder, "--render", "small", "--readme")
    assert (again.status, again.out) == (0, ran.out)
    assert "warm-up" not in again.err and "round" not in again.err
    assert (folder / "results" / "small.md").read_bytes() == page
    assert (folder / "results" / "small.jsonl").read_bytes() == records
    readme = (folder / "README.md").read_bytes().decode()
    assert readme.startswith(f"above\r\n{table.BEGIN}\n|") and readme.endswith(f"{table.END}\nbelow")


def test_the_page_names_no_folder_of_this_machine(ladder):
    folder, ran = ladder
    assert str(folder) not in ran.out and str(Path.home()) + "/" not in ran.out
    first = json.loads((folder / "results" / "small.jsonl").read_text().splitlines()[0])
    assert first["command"].startswith("python bench.py s01 5 s07 --size tiny")
