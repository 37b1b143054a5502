"""The page: from the figures of a bench to tables, sentences and a chart."""

from harness import page
from harness.modes import MODES

import os
import re
from pathlib import Path

import pytest
from fixtures.records import A100, CPU, GPT2, failure, probed, results_of, row, run, summary

FIXTURES = Path(__file__).parent / "fixtures"
S01, S02, S03, S04 = "s01_baseline", "s02_tf32", "s03_bf16", "s04_compile"
S05, S06, S07 = "s05_flash", "s06_vocab", "s07_clip"


# the smallest of all models: on CUDA, s01 takes 90 FLOP and 1552 bytes for a token of it
ONE = {"vocab_size": 1, "block_size": 1, "n_layer": 1, "n_head": 1, "n_embd": 1}
RATES = {"float32": 1e6, "tf32": 3e6, "bfloat16": 6e6, "copy": 1e7}


def page_of(results):
    """Return the page of a bench, its no-break spaces as they are typed."""
    return MODES[results.bench["mode"]].page(results).replace("\u00a0", " ")


def cells(results, name):
    """Return {column: cell} of a row in the full table."""
    names = [row.name for row in results.table_rows]
    return MODES[results.bench["mode"]].full_rows(results)[names.index(name)]


# whole pages


def cpu_run(name, speed, factors=(1, 1, 1, 1, 1), **about):
    """Return a run without a compiler. speed: over that of s01. factors: of its steps' times, beyond the load's."""
    dts = []
    for load, factor in zip((1.0, 1.1, 0.9, 1.0, 1.2), factors, strict=False):
        dts.append(round(load / speed * factor, 9))
    missing = {"compile": "left out, no C++ compiler found: install g++ (Linux)"}
    return run(name, dts, compile=False, fallbacks=missing, **about)


def ladder_cpu():
    """Return a bench on a CPU with a row of every kind."""
    return results_of(
        cpu_run("plain", 0.8, (1, 1.01, 1, 0.99, 1), stage=S01),
        cpu_run(S01, 1),
        cpu_run(S02, 1, (1, 1, 1.01, 0.99, 1)),
        cpu_run(S03, 2, memory=1.25),
        cpu_run(S04, 1, (), end=failure("out of memory at batch size 4: try --batch-size 2")),
        cpu_run(S05, 3, memory=0.5, code="1" * 64),
        cpu_run(S06, 2.4),
        cpu_run(S07, 2.42),  # 1.008 times as fast, and the A/A pair is 1.02 apart
        cpu_run(f"{S07} again", 2.42 * 1.02),
        cpu_run("s08_cosine", 2.4, (1, 1, 1), end=failure("RuntimeError: boom | with a bar")),
        cpu_run("s09_decay", 1, (), end=None),
        cpu_run("s10_fused", 3, (1, 1, 1, 1), end=None, memory=None),
        cpu_run("s11_accum", 1.5, tokens=2000, warmup_dt=4),  # twice the tokens in 1 / 1.5 of the time
        cpu_run("s12_ddp", 1.5, tokens=2000),
        probed(5, float32=5e11, bfloat16=1e12, copy=2.5e10),
    )


def ladder_gpu():
    """Return a bench of three rounds on a GPU."""
    speeds = {S01: 1, S02: 2.1, S03: 2.3, S04: 6.5, S05: 9.5, S06: 9.8, S07: 9.7, f"{S07} again": 9.74}
    speeds |= {"s08_cosine": 9.71, "s09_decay": 9.65, "s10_fused": 10.3, "s11_accum": 2.7, "s12_ddp": 2.5}
    about = {"environment": A100, "shape": GPT2, "size": "gpt2", "batch_size": 16, "seq_len": 1024, "accum": 4}
    runs = []
    for session in range(3):
        runs.append(probed(session=session, float32=1.9e13, tf32=1.3e14, bfloat16=2.6e14, copy=1.7e12))
        for i, (name, speed) in enumerate(speeds.items()):
            dts = [round((factor + session * (i % 4) / 1e3) / speed, 9) for factor in (1.0, 0.99, 1.02)]
            tokens = 65536 if name in ("s11_accum", "s12_ddp") else 16384
            end = summary(sdpa="cudnn", reserved=(40 - 2 * i) * 10**9)
            figures = {"tokens": tokens, "memory": 30 - 2 * i, "warmup_dt": 11.5 if name == S04 else 1}
            runs.append(run(name, dts, session, end=end, **figures, **about))
    return results_of(*runs, pair_by="round", rounds=3, enough=[20, 6.0], environment=A100)


@pytest.mark.parametrize("drawn", [ladder_cpu, ladder_gpu])
def test_a_page_is_byte_for_byte_what_it_was(drawn):
    """After a wanted change: REDRAW=1 python -m pytest tests/test_page.py, and read the difference."""
    text = MODES["ladder"].page(drawn())
    path = FIXTURES / f"{drawn.__name__}.md"
    if os.environ.get("REDRAW"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("mode", MODES)
def test_a_bench_of_which_nothing_ran_is_a_page_all_the_same(mode):
    drawn = MODES[mode].page(results_of(mode=mode, rows=[row(S01), row(S02, base=S01)]))
    assert "No stage got as far as its first step." in drawn


# the tables of the ladder


def test_each_figure_of_a_row_stands_in_its_column():
    """The ratios are 1.6, 2.5 and 2 to s02, and 4, 5 and 5 to s01. A token should take 30 + 155.2 ms in s02, and in s03
    15 FLOP and 1670 bytes."""
    times = {S01: (1.0, 1.0, 1.0), S02: (0.4, 0.5, 0.4), f"{S02} again": (0.4, 0.5, 0.4), S03: (0.25, 0.2, 0.2)}
    about = {"shape": ONE, "environment": A100, "batch_size": 1, "compile": False, "warmup_dt": 3}
    runs = []
    for session in range(3):
        runs.append(probed(session=session, **RATES))
        for i, (name, dts) in enumerate(times.items()):
            end = summary(reserved=(40 + i) * 10**9)
            runs.append(run(name, [dts[session]], session, end=end, memory=30 + i, **about))
    drawn = page_of(results_of(*runs, pair_by="round", rounds=3, environment=A100))
    assert "| stage | what you type | tok/sec | x above | x s01 | GB |" in drawn
    assert "| [s01](../stages/s01_baseline.py) | float32, explicit attention | 1,000 | – | – | 30.00 |" in drawn
    assert "| [s03](../stages/s03_bf16.py) | `with torch.autocast(...):` | 5,000 | 2.00 | 5.00 | 33.00 |" in drawn
    columns = "tok/sec | dt ms [IQR] | memory GB | predicted | vs previous | vs s01 | % of peak | loss, step 4 | note |"
    figures = "5,000 | 200 [200–225] | 33.00 (43.00 reserved) | 1.018 | 2.000 ± 0.500 | 5.00 ± 1.00 | 7.5 | 4.60 |"
    words = "active: bfloat16; faster; 12 s of warm-up |"
    assert f"| stage | change | {columns}" in drawn
    assert f"| [s03_bf16](../stages/s03_bf16.py) | what s03_bf16 does | {figures} {words}" in drawn
    assert 'x-axis ["s01", "s02", "s03"]' in drawn
    assert "bar [1.00, 2.50, 5.00]" in drawn


def test_a_prediction_is_unknown_where_arithmetic_does_not_tell():
    runs = [run("plain", [1.0], stage=S01), *[run(name, [1.0]) for name in (S01, S05, S06, "mine")]]
    results = results_of(*runs, probed(float32=1))
    assert [cells(results, name)["predicted"] for name in ("plain", S01, S06, "mine")] == ["–", "–", "unknown", "–"]


def test_a_note_tells_which_code_has_changed_since():
    runs = [run("plain", [1.0], stage=S01, code="1" * 64), run(S06, [1.0], model_code="1" * 64)]
    results = results_of(*runs, run(S07, [1.0]), run("mine", [1.0], code="1" * 64))
    assert cells(results, "plain")["note"] == "stale: the stage has changed since"
    assert cells(results, S06)["note"] == "stale: model.py has changed since"
    assert cells(results, S07)["note"] == "for the loss"
    assert cells(results, "mine")["note"] == ""  # nobody can tell


def test_a_note_reports_a_row_that_should_take_the_same_steps_and_does_not():
    results = results_of(run(S01, [1.0] * 2), run(f"{S01} again", [1.01] * 2), run(S02, [0.5] * 2))
    assert "same computation as the row above; and yet differs by more than noise" in cells(results, S02)["note"]


def test_a_note_has_the_verdict_on_the_row_above():
    times = {S01: 1.0, f"{S01} again": 1.0, S05: 0.25, S06: 0.5}
    assert cells(results_of(*[run(name, [dt] * 2) for name, dt in times.items()]), S06)["note"] == "slower"


@pytest.mark.parametrize("end, note", [(None, "2 of 3 rounds"), (failure("boom"), "failed: boom")])
def test_a_note_tells_that_a_round_has_not_ended_or_failed(end, note):
    rounds = [run(S01, [1.0]), run(S01, [1.0], session=1), run(S01, [1.0], session=2, end=end)]
    assert cells(results_of(*rounds, pair_by="round", rounds=3), S01)["note"] == note


def test_a_row_that_is_no_stage_stands_in_both_tables_by_its_own_words():
    drawn = page_of(results_of(run("plain", [1.0], stage=S01), run("mine", [0.5], shape=None)))
    assert drawn.count("| [plain](../stages/s01_baseline.py) | what plain does | 1,000 |") == 2
    assert drawn.count("| mine | what mine does | 2,000 |") == 2


def test_a_table_for_a_terminal_has_80_columns_and_its_widest_one_is_cut():
    rows = [{"stage": "s01", "change": 90 * "x", "tok/sec": "1"}, {"stage": "s12", "change": "y", "tok/sec": "1,000"}]
    _, first, second = page.aligned(rows).splitlines()
    assert first == f"s01    {63 * 'x'}…        1"
    assert second == f"s12    y{67 * ' '}1,000"
    short = MODES["ladder"].short_rows(results_of(run(S02, [1.0])))
    assert short[0]["what you type"] == 'torch.set_float32_matmul_precision("high")'


def test_a_terminal_is_told_which_rows_can_not_be_told_from_the_row_above():
    times = {S01: 1.0, f"{S01} again": 1.01, S05: 0.25, S06: 0.251}
    results = results_of(*[run(name, [dt] * 2) for name, dt in times.items()])
    assert page.undecided_line(results) == "can't be told apart: s06 from s05"
    once = results_of(*[run(name, [dt]) for name, dt in times.items()], pair_by="round")
    assert page.undecided_line(once) == ""  # a single round has no verdicts


# the lines under a table


def test_a_page_says_why_nothing_is_called_faster():
    runs = [run(S01, [1.0]), run(f"{S01} again", [1.0], end=failure("boom"))]
    assert "one computation: s01_baseline again failed: boom. That is too little" in page_of(results_of(*runs))
    once = results_of(run(S01, [1.0]), run(f"{S01} again", [0.5]), pair_by="round")
    assert "one computation: s01_baseline again / s01 2.000. That is too little" in page_of(once)


@pytest.mark.parametrize("environment, dt, warnings", [(A100, 0.8, ["3.3"]), (A100, 0.7, []), (CPU, 0.8, [])])
def test_a_page_warns_where_a_gpu_takes_more_than_3_times_the_sum_of_s01(environment, dt, warnings):
    """1000 tokens should take 90 + 155.2 ms."""
    baseline = run(S01, [dt], shape=ONE, batch_size=1, environment=environment)
    drawn = page_of(results_of(baseline, probed(**RATES)))
    assert re.findall("took (.*) times the sum of its parts", drawn) == warnings


# the other modes


GRADES = [
    (1.51, 1.5, "excellent: switch it on, 25 % less memory; faster"),
    (1.49, 2.0, "significant: switch it on, 0 % less memory; faster"),
    (1.19, 4.0, "modest, 100 % more memory; faster"),
    (1.06, None, "negligible; no difference"),  # two runs of float32 are 8 % apart
    (0.90, 2.0, "slower: leave it off, 0 % less memory; slower"),
]


@pytest.mark.parametrize("speedup, memory, note", GRADES)
def test_amp_recommends_a_dtype_by_its_speed_and_tells_its_memory(speedup, memory, note):
    rows = [row("float32", S03), row("float32 again", S03), row("bfloat16", S03, base="float32")]
    runs = [run(name, [dt] * 2, stage=S03, memory=2) for name, dt in (("float32", 1.08), ("float32 again", 1.0))]
    runs.append(run("bfloat16", [1.08 / speedup] * 2, stage=S03, memory=memory))
    assert cells(results_of(*runs, rows=rows, mode="amp"), "bfloat16")["note"] == note


def test_scale_tells_what_ranks_reach_of_so_many_times_one_rank():
    names = {"1 process": 0, "1 rank": 1, "2 ranks": 2}
    rows = [row(name, "s12_ddp", base="1 process", ranks=ranks) for name, ranks in names.items()]
    runs = [run(name, [dt], stage="s12_ddp") for name, dt in zip(names, (1.0, 2.0, 1.25), strict=True)]
    drawn = page_of(results_of(*runs, rows=rows, mode="scale"))
    assert "| what | tok/sec | x 1 process | GB each | note |" in drawn
    assert "| 1 rank | 500 | 0.50 | 1.50 |  |" in drawn
    assert "| 2 ranks | 800 | 0.80 | 1.50 | efficiency 80 % of 2 times one rank |" in drawn


def test_limit_shows_the_largest_batch_and_what_stopped_the_next():
    fits = [(S05, 1), (S05, 2), (S05, 4), (S05, 5), (S07, 8)]
    runs = [run(name, [1.0, 0.5], batch=batch, tokens=1000 * batch, memory=batch) for name, batch in fits]
    for name, batch in ((S05, 8), (S05, 6), (S06, 1), (S07, 16)):
        runs.append(run(name, [], batch=batch, end=failure("out of memory | of 1 GB", out_of_memory=True)))
    runs.append(run(S07, [0.5], batch=12, end=None))  # interrupted
    runs.append(run(S01, [], batch=1, end=failure("boom")))
    drawn = page_of(results_of(*runs, mode="limit", memory_budget=2_500_000_000))
    assert "A process may hold 2.5 GB." in drawn
    assert "| [s05](../stages/s05_flash.py) | 5 | 6,667 | 5.00 | B 6: out of memory \\| of 1 GB |" in drawn
    assert "| [s06](../stages/s06_vocab.py) | none | – | – | B 1: out of memory \\| of 1 GB |" in drawn
    assert "| [s07](../stages/s07_clip.py) | 8 | 10,667 | 8.00 | not finished |" in drawn
    assert "| [s01](../stages/s01_baseline.py) | none | – | – | failed: boom |" in drawn
