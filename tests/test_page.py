"""The page: from the figures of a bench to tables, sentences and charts."""

from harness import page
from harness.results import CONTROL, ResultsError, name_at_rate

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from fixtures.records import (
    CPU,
    GPT2,
    T4,
    bench_line,
    failure,
    peak_step,
    probe_lines,
    results_of,
    results_of_text,
    run_lines,
    summary,
    text_of_lines,
    text_of_record,
)

import bench

FIXTURES = Path(__file__).parent / "fixtures"


def without_no_break_spaces(text):
    """Text with the spaces around a ± as they are typed."""
    return text.replace("\u00a0", " ")


def cell(results, name, column):
    """A cell of the full table."""
    return without_no_break_spaces(page.cells(results, name, "")[column])


# whole pages


def cpu_run(name, speed, wiggle=(1, 1, 1, 1, 1), **about):
    """The lines of a run without a compiler. speed: over that of s01; wiggle: factors of its steps' times."""
    dts = []
    for load, factor in zip((1.0, 1.1, 0.9, 1.0, 1.2), wiggle, strict=False):
        dts.append(round(load / speed * factor, 9))
    missing = {"compile": "left out, no C++ compiler found: install g++ (Linux)"}
    return run_lines(name, dts, compile=False, fallbacks=missing, **about)


def ladder_cpu():
    """A bench on a CPU with a row of every kind."""
    out_of_memory = failure("out of memory at batch size 4: try --batch-size 2", "out-of-memory")
    rates = peak_step(float32=5e11, bfloat16=1e12, copy=2.5e10)
    return results_of(
        cpu_run("s01_baseline", 1),
        cpu_run("s02_tf32", 1, (1, 1, 1.01, 0.99, 1)),
        cpu_run("s03_bf16", 2, memory=1.25),
        cpu_run("s04_compile", 1, (), end=out_of_memory),
        cpu_run("s05_flash", 3, end=summary(sdpa="flash"), memory=0.5, code="1" * 64),
        cpu_run("s06_vocab", 2.4),
        cpu_run("s07_clip", 2.42),  # 1.008 times as fast, and the A/A pair is 1.02 apart
        cpu_run("s07_clip" + CONTROL, 2.42 * 1.02),
        cpu_run("s08_cosine", 2.4, (1, 1, 1), end=failure("RuntimeError: boom | with a bar")),
        cpu_run("s10_fused", 3, (1, 1, 1, 1), end=None, memory=None, meter="no meter"),
        cpu_run("s11_accum", 1.5, tokens=2000),  # twice the tokens in 1 / 1.5 of the time: 3 times the speed
        cpu_run("s12_ddp", 1.5, tokens=2000),
        probe_lines([rates] * 5),
        rows=[path.stem for path in sorted((ROOT / "stages").glob("s[0-9][0-9]_*.py"))],
    )


def ladder_t4():
    """Two rounds on a GPU without bfloat16 and TF32, the second at half the speed, which no ratio shows."""
    gpu = {"environment": T4, "amp_dtype": "float16", "meter": "peak allocated"}
    gpu |= {"shape": GPT2, "size": "gpt2", "seq_len": 1024}
    rows = [
        ("s01_baseline", 1.0, 12.5),
        ("s02_tf32", 1.0, 12.5),
        ("s03_bf16", 0.4, 10),
        ("s04_compile", 0.2, 8),
        ("s04_compile" + CONTROL, 0.2, 8),
        ("s05_flash", 0.16, 6),
    ]
    runs = [probe_lines([peak_step(float32=4e12, float16=2e13)])]
    for name, dt, memory in rows:
        end = summary(reserved=int(memory * 1.125e9), sdpa="efficient")
        for session, load in enumerate((1, 2)):
            dts = [dt * load] * 3
            runs.append(run_lines(name, dts, session, end, memory=memory, **gpu))
    return results_of(*runs, interleaved=False, rounds=2, environment=T4)


@pytest.mark.parametrize("ladder", [ladder_cpu, ladder_t4])
def test_page_is_byte_for_byte_what_it_was(ladder):
    """After a wanted change: REDRAW=1 python -m pytest tests/test_page.py, and read the difference."""
    drawn = page.page(ladder()).encode()
    path = FIXTURES / f"{ladder.__name__}.md"
    if os.environ.get("REDRAW"):
        path.write_bytes(drawn)
    assert drawn.decode() == path.read_bytes().decode()


def test_a_page_is_drawn_without_torch():
    code = """
import sys
sys.path.insert(0, "stages")
from harness import page, results
assert page.page(results.Results("results/epyc-2-cores.jsonl")).startswith("# The ladder on")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_nothing_that_ran_is_a_page_all_the_same():
    results = results_of(rows=["s01_baseline", "s02_tf32"])
    drawn = page.page(results)
    assert "No stage got as far as its first step." in drawn
    assert drawn.count("not run") == 2
    assert "mermaid" not in drawn
    assert "No stage got as far as its first step." in page.readme_part(results, "x")


def test_render_draws_page_and_readme_and_leaves_the_records(tmp_path, monkeypatch, capsys):
    record = text_of_record(run_lines("s01_baseline", [1.0]), run_lines("s02_tf32", [1.0]))
    path, readme = tmp_path / "x.jsonl", tmp_path / "README.md"
    path.write_text(record)
    above, below = f"# Ä\r\n{page.BEGIN}", f"{page.END}\r\n\tend, with no newline after it"
    readme.write_bytes(f"{above}old{below}".encode())
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert bench.show(path, readme=True) == 0
    drawn = path.with_suffix(".md").read_text()
    assert capsys.readouterr().out == drawn + "\n"
    assert "| 1,000 |" in drawn
    text = readme.read_bytes().decode()
    assert text.startswith(above)
    assert text.endswith(below)
    assert "(stages/s02_tf32.py)" in text
    assert path.read_text() == record


def test_damaged_records_get_no_page_and_stay(tmp_path):
    path = tmp_path / "x.jsonl"
    record = text_of_record(run_lines("s01_baseline", [1.0])).replace('"loss": 5.0', '"loss": NaN')
    path.write_text(record)
    with pytest.raises(ResultsError, match="x.jsonl: line 3 is damaged .NaN"):
        bench.show(path, readme=False)
    assert path.read_text() == record
    assert not path.with_suffix(".md").exists()


# the table


def test_neighbors_are_compared_to_three_decimals_and_with_s01_to_two():
    """Two decimals, 0.99 ± 0.01 in both rows, would hide why one is slower and one is not."""
    results = results_of(
        run_lines("s10_fused", [1.0, 1.0]),
        run_lines("s10_fused" + CONTROL, [1.0, 1.0]),
        run_lines("s11_accum", [1 / 0.9842, 1 / 0.9958]),
        run_lines("s12_ddp", [1 / 0.9842 / 0.986, 1 / 0.9958 / 1.0]),
    )
    assert cell(results, "s11_accum", "vs previous") == "0.990 ± 0.006"
    assert cell(results, "s11_accum", "note").endswith("slower")
    assert cell(results, "s12_ddp", "vs previous") == "0.993 ± 0.007"
    assert cell(results, "s12_ddp", "note").endswith("no difference")
    assert cell(results, "s12_ddp", "vs s10") == "0.98 ± 0.01"
    readme = without_no_break_spaces(page.readme_table(results))
    assert "| 0.990 ± 0.006 | slower | 0.99 ± 0.01 |" in readme


def test_losses_are_compared_to_four_decimals():
    runs = [run_lines("a", [1.0], session=i, end=summary(eval=6.0)) for i in range(3)]
    runs += [run_lines("b", [1.0], session=i, end=summary(eval=5.9 + i / 100)) for i in range(3)]
    results = results_of(*runs, mode="loss", interleaved=False)
    assert cell(results, "b", "vs previous") == "-0.0900 ± 0.0248"
    assert cell(results, "b", "vs a") == "-0.0900 ± 0.0248"


@pytest.mark.parametrize(
    "ms, text",
    [(1234.6, "1235"), (100, "100"), (12.34, "12.3"), (1.234, "1.23")],
)
def test_times_have_three_digits(ms, text):
    assert page.milliseconds(ms) == text


@pytest.mark.parametrize(
    "name, about, note",
    [
        ("s02_tf32", {"environment": T4 | {"tf32": True}}, "active"),
        ("s02_tf32", {"environment": CPU | {"device": "mps"}}, "no-op: this device has no TF32 units"),
        ("s03_bf16", {"amp_dtype": "float32"}, "no-op: float32 was asked for"),
        ("s03_bf16", {"amp_dtype": "float32", "fallbacks": {"amp_dtype": "none here"}}, "no-op: none here"),
        ("s04_compile", {"compile": False}, "fallback to eager: --no-compile was given"),
        ("s04_compile", {"code": "1" * 64}, "active: 8 s of warm-up; stale"),
        ("s06_vocab", {"code": "1" * 64}, "stale"),
        ("s12_ddp", {"world_size": 2}, ""),
    ],
)
def test_note_is_what_the_machine_makes_of_a_technique(name, about, note):
    assert page.note(results_of(run_lines(name, [1.0], **about)), name) == note


@pytest.mark.parametrize(
    "speedup, grade",
    [
        (1.51, "excellent: switch it on"),
        (1.5, "significant: switch it on"),
        (1.2, "modest"),
        (1.05, "negligible"),
        (0.95, "slower: leave it off"),
    ],
)
def test_amp_recommends_a_dtype_by_its_speed_over_float32(speedup, grade):
    results = results_of(run_lines("float32", [speedup]), run_lines("bfloat16", [1.0]), mode="amp")
    assert page.recommendation(results, "bfloat16") == f"{grade}; 0 % less memory"


@pytest.mark.parametrize(
    "memory, words",
    [(1.5, "; 25 % less memory"), (4, "; 100 % more memory"), (None, "")],
)
def test_amp_says_how_much_memory_a_dtype_takes(memory, words):
    runs = [run_lines("float32", [1.0], memory=2), run_lines("bfloat16", [1.0], memory=memory)]
    assert page.recommendation(results_of(*runs, mode="amp"), "bfloat16") == f"negligible{words}"


@pytest.mark.parametrize(
    "stage, fallbacks, words",
    [
        ("s10_fused", {"compile": "a T4 compiles no bfloat16"}, "; fallback to eager: a T4 compiles no bfloat16"),
        ("s10_fused", {}, ""),
        ("s03_bf16", {"compile": "a T4 compiles no bfloat16"}, ""),  # which compiles nothing anyway
    ],
)
def test_amp_says_which_dtype_was_not_compiled(stage, fallbacks, words):
    run = run_lines("bfloat16", [1.0], compile=not fallbacks, fallbacks=fallbacks)
    run[0]["stage"] = stage
    results = results_of(run_lines("float32", [1.0]), run, mode="amp")
    assert page.answer(results, "bfloat16") == f"negligible; 0 % less memory{words}"


def test_scale_shows_the_efficiency_and_the_median_all_reduce():
    """The all-reduce takes 10, 40 or 90 ms: their mean would be 46.7."""
    seconds = [0.01, 0.04, 0.09]
    results = results_of(
        run_lines("1 rank", [1.0] * 3),
        run_lines("2 ranks", [0.625] * 3, world_size=2),
        run_lines("4 ranks", [], end=failure("boom"), world_size=4),
        probe_lines([{"dt": dt, "bytes": 120_000_000} for dt in seconds], name="all-reduce 2 ranks"),
        mode="scale",
    )
    assert page.note(results, "1 rank") == ""
    assert page.note(results, "2 ranks") == (
        "efficiency 80 %; an all-reduce of its 120 MB of gradients by itself takes 40.0 ms, 6.4 % of a step "
        "(DDP hides some behind the backward)"
    )
    assert page.note(results, "4 ranks") == "failed: boom"


def test_limit_shows_the_largest_batch_whose_longer_run_fits():
    """B 6 fitted for the steps of the warm-up and no longer; B 5 did."""
    message = "out of memory: more than the budget of 1.0 GB"
    no = failure(message, "out-of-memory")
    runs = [run_lines(f"s05_flash B{batch}", []) for batch in (1, 2, 4, 5, 6)]
    runs += [run_lines(f"s05_flash B{batch}", [], end=no) for batch in (7, 8)]
    runs.append(run_lines("s05_flash B6", [], session=1, end=no))
    runs.append(run_lines("s05_flash B5", [0.5] * 3, session=1))
    runs.append(run_lines("s06_vocab B1", [], end=no))
    results = results_of(*runs, mode="limit", rows=["s05_flash", "s06_vocab", "s07_clip"])
    assert page.limit_table(results).splitlines()[2:] == [
        f"| s05_flash | 5 | 2,000 | 1.50 | B 6: {message} |",
        f"| s06_vocab | none | – | – | B 1: {message} |",
        "| s07_clip | none | – | – | nothing yet: not finished |",
    ]


def test_limit_says_that_it_is_stale():
    fresh = results_of(run_lines("s05_flash B1", [1.0]), mode="limit", rows=["s05_flash"])
    stale = results_of(run_lines("s05_flash B1", [1.0], code="1" * 64), mode="limit", rows=["s05_flash"])
    assert "Stale" not in page.page(fresh)
    assert "- Stale: the stage's code has changed since it was measured." in page.page(stale)


# what stands under the table


def lines_under_the_table(*runs, **about):
    return page.conditions(results_of(*runs, **about)).splitlines()


def test_a_page_says_what_a_ratio_is():
    (line,) = [line for line in lines_under_the_table(run_lines("a", [1.0])) if "A ratio is" in line]
    assert "median of the ratios within the rounds" in line
    assert "not the ratio of the two medians, so that two rows of equal tok/sec may differ" in line
    assert "Its ± is the wider half of an interval: of the exact 95 % interval of that median" in line


def test_rows_of_equal_speed_may_have_a_ratio():
    results = results_of(run_lines("a", [1.0, 2.0, 3.0]), run_lines("b", [0.5, 2.0, 2.0]))
    assert cell(results, "a", "tok/sec") == cell(results, "b", "tok/sec") == "500"
    assert cell(results, "b", "vs previous") == "1.500 ± 0.500"


@pytest.mark.parametrize(
    "again, pair, worst",
    [
        ([1 / 0.97] * 2, "a again / a 0.970 ± 0.000 (2)", "3.1 %"),
        ([1 / 0.7], "a again / a 0.700 (1)", "42.9 %"),
        ([0.7], "a again / a 1.429 (1)", "42.9 %"),
    ],
)
def test_a_page_shows_each_control_and_the_worst(again, pair, worst):
    lines = lines_under_the_table(run_lines("a", [1.0] * 2), run_lines("a" + CONTROL, again))
    (line,) = [without_no_break_spaces(line) for line in lines if "Noise" in line]
    assert pair in line
    assert f"less than the worst, {worst}, or than its own ±" in line
    assert "In the noise, a ratio below 1 counts as its inverse." in line


def test_a_page_says_that_it_has_no_control():
    lines = lines_under_the_table(run_lines("a", [1.0]))
    assert "- Noise: no A/A pair finished, so no difference is called one." in lines


def test_a_page_shows_the_median_rates_of_the_probe():
    """Squares, whose mean would be 14 / 3."""
    rates = [peak_step(float32=rate * 1e12, copy=rate * 1e9) for rate in (1, 4, 9)]
    text = "\n".join(lines_under_the_table(run_lines("a", [1.0] * 3), probe_lines(rates)))
    assert "Peak: 4.00 TFLOP/s in float32, reached by matmuls of size 2048 (rounds: 3)." in text
    assert "copying a large tensor moves 4.0 GB/s" in text
    assert "A token takes 187 MFLOP" in text


def peak_of(device_name, **rates):
    """The line on the peak of a page on a device whose probe found these FLOP/s."""
    environment = T4 | {"device_name": device_name}
    run = run_lines("a", [1.0], environment=environment)
    lines = lines_under_the_table(run, probe_lines([peak_step(**rates)]), environment=environment)
    (line,) = [line for line in lines if line.startswith("- Peak: ")]
    return line


@pytest.mark.parametrize(
    "name, rates, words",
    [
        ("NVIDIA H200", {"bfloat16": 7.4175e14}, "989 TFLOP/s in 16 bits for this card, without sparsity: .* 75 %"),
        ("NVIDIA A100-SXM4-80GB", {"bfloat16": 2.652e14, "float32": 1.9e13}, "312 TFLOP/s .* 85 %"),
        ("Tesla T4", {"float16": 2.6e13, "float32": 8e12}, "65 TFLOP/s .* 40 %"),
    ],
)
def test_the_peak_of_a_known_card_stands_beside_its_datasheet(name, rates, words):
    assert re.search(f"This peak is measured. NVIDIA specifies {words} of that.$", peak_of(name, **rates))


@pytest.mark.parametrize(
    "name, rates",
    [
        ("NVIDIA GeForce RTX 4090", {"bfloat16": 1e14}),  # none was read
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", {"bfloat16": 1e14}),  # a seventh of a card
        ("AMD EPYC", {"bfloat16": 1e12}),
        ("Tesla T4", {"float32": 8e12}),  # the datasheet's figure is of 16 bits
    ],
)
def test_what_has_no_known_datasheet_has_its_measured_peak_alone(name, rates):
    line = peak_of(name, **rates)
    assert "NVIDIA specifies" not in line
    assert line.endswith("attention counted in full).")


def test_a_page_shows_the_median_rates_of_clearing_pages():
    rates = [peak_step(float32=1e12, copy=1e9, clear={"4 kB": rate * 1e9, "2 MB": rate * 2e9}) for rate in (1, 4, 9)]
    text = "\n".join(lines_under_the_table(run_lines("a", [1.0] * 3), probe_lines(rates)))
    assert "hands it out at 4.00 GB/s in pages of 4 kB and at 8.00 GB/s in pages of 2 MB." in text


def test_memory_shows_the_page_faults_of_each_setting():
    runs = [run_lines("plain", [2.0] * 3, faults=[99_000] * 3), run_lines("both", [1.0] * 3, faults=[12] * 3)]
    runs.append(run_lines("tcmalloc", [1.0] * 3, faults=[0, 1, 1]))
    results = results_of(*runs, mode="memory")
    assert cell(results, "plain", "note") == "99,000 page faults in a step"
    assert cell(results, "both", "note").startswith("12 page faults in a step")
    assert cell(results, "tcmalloc", "note").startswith("1 page fault in a step")
    assert cell(results, "both", "vs plain") == "2.00 ± 0.00"


def test_a_round_of_the_probe_on_a_gpu_is_a_process_of_many_steps():
    rates = [peak_step(float32=1e12), peak_step(float32=1e12)]
    runs = [run_lines("a", [1.0]), probe_lines(rates), probe_lines(rates, session=1), probe_lines(rates, session=2)]
    (line,) = [line for line in lines_under_the_table(*runs, rounds=3, interleaved=False) if "Peak:" in line]
    assert "(rounds: 3)" in line


def test_a_title_of_the_record_heads_its_page():
    results = results_of(run_lines("a", [1.0]), mode="memory", title="A | B")
    assert page.page(results).startswith("# A \\| B on ")


def test_a_page_says_how_its_rows_were_run():
    runs = [run_lines("a", [1.0] * 3), run_lines("a", [1.0] * 3, session=1)]
    turns = "Interleaved (rounds: 6, sessions: 2): all processes of a session are alive at once"
    assert turns in "\n".join(lines_under_the_table(*runs, rounds=2))
    fresh = "Fresh processes (rounds: 2), each by the median of its counted steps."
    assert fresh in "\n".join(lines_under_the_table(*runs, rounds=2, interleaved=False))


def test_a_page_says_how_long_the_shortest_process_counted():
    """A second of counted steps is too short for the clock of a GPU to settle, and a reader should see it."""
    runs = [run_lines("a", [1.0] * 3), run_lines("b", [0.5, 0.25, 0.5]), run_lines("c", [])]
    shortest = "the median of its counted steps. In every process these took 1.2 s or more."
    assert shortest in "\n".join(lines_under_the_table(*runs, interleaved=False))
    assert "In every process" not in "\n".join(lines_under_the_table(run_lines("a", []), interleaved=False))


def card(power, sm_clock=1980.0):
    """What nvidia-smi tells of a card before and after its counted steps: 50 W more at the end."""
    start = {"sm_clock": sm_clock, "power": power, "temperature": 40.0, "power_limit": None}
    return {"start": start, "end": start | {"power": power + 50, "temperature": 61.4}}


def test_a_page_tells_the_state_of_the_card_over_all_runs():
    runs = [
        run_lines("a", [1.0], end=summary(card=card(power=300.0))),
        run_lines("a", [1.0], session=1, end=summary(card=card(power=200.0, sm_clock=1410.0))),
        run_lines("b", [1.0], end=None),
    ]
    lines = lines_under_the_table(*runs, interleaved=False)
    figures = "SM clock 1,410–1,980 MHz, power 200–350 W, temperature 40–61 °C"
    assert f"- Card: {figures}, before the first and after the last counted step of all runs." in lines


def test_a_page_on_a_card_that_tells_nothing_has_no_such_line():
    silent = dict.fromkeys(("sm_clock", "power", "temperature", "power_limit"))
    end = summary(card={"start": silent, "end": silent})
    for run in (run_lines("a", [1.0], end=end), run_lines("a", [1.0])):
        assert not [line for line in lines_under_the_table(run) if line.startswith("- Card")]


def test_a_page_of_losses_names_the_passes_over_the_corpus():
    """20 steps of 4 sequences of 256 tokens are 20,480."""
    run = run_lines("a", [1.0] * 16, end=summary(eval=6.0))
    text = "\n".join(lines_under_the_table(run, mode="loss", interleaved=False, corpus_tokens=8192))
    assert "20 steps on the same 20,480 tokens (2.5 passes over the corpus)" in text
    text = "\n".join(lines_under_the_table(run, mode="loss", interleaved=False))
    assert "20 steps on the same 20,480 tokens, then" in text


def test_the_last_line_is_how_to_run_the_bench_again():
    run = run_lines("a", [1.0])
    command = "python bench.py s05 --steps 9"
    last = lines_under_the_table(run, command=command)[-1]
    assert last == "- Again: `python bench.py s05 --steps 9` at commit 0123456789ab."
    run[0]["dirty"] = True
    last = lines_under_the_table(run, command=command)[-1]
    assert last == "- Again: `python bench.py s05 --steps 9` at commit 0123456789ab with changes."
    run[0] |= {"dirty": False, "commit": None}
    last = lines_under_the_table(run, command=command)[-1]
    assert last == "- Again: `python bench.py s05 --steps 9` at commit none."


# charts


CURVE = [5.0, 4.5, 4.0]


def losses(name, session=0, curve=CURVE, held_out=6.0):
    """The lines of a run that was evaluated: a header, and a summary with its training curve."""
    return run_lines(name, [], session=session, end=summary(eval=held_out, curve=curve))


def test_a_line_of_the_loss_chart_is_the_mean_of_the_curves_over_the_seeds():
    second = losses("a", session=1, curve=[6.0, 5.5, 4.25])
    chart = page.chart(results_of(losses("a"), second, mode="loss", interleaved=False, steps=40))
    assert 'x-axis "step (a blue)" 3 --> 39' in chart  # the middles of steps 2 and 3, and of the last two
    assert "line [5.500, 5.000, 4.125]" in chart


def test_lines_of_the_loss_chart_have_the_colors_of_its_legend():
    """mermaid gives the first color to the first line: a row that did not finish takes none."""
    unfinished = run_lines("b", [1.0], end=failure("boom"))
    chart = page.chart(results_of(losses("a"), unfinished, losses("c"), mode="loss", interleaved=False))
    assert '"step (a blue, c orange)"' in chart
    assert chart.count("line [") == 2
    assert '"plotColorPalette": "#3b7dd8, #e0883b, ' in chart  # blue and orange


def test_the_loss_chart_has_as_many_lines_as_colors():
    runs = [run_lines("a", [], end=failure("boom")), *[losses(name) for name in "bcdefghi"]]
    chart = page.chart(results_of(*runs, mode="loss", interleaved=False))
    assert '"step (b blue, c orange, d green, e purple, f red, g gray)"' in chart
    assert chart.count("line [") == 6


def test_a_row_that_no_run_finished_has_no_line():
    unfinished = run_lines("a", [], end=None)
    assert '"step (c blue)"' in page.chart(results_of(unfinished, losses("c"), mode="loss", interleaved=False))
    assert page.chart(results_of(unfinished, mode="loss", interleaved=False)) == ""


# several learning rates


def run_at(stage, rate, seed, held_out, curve=CURVE):
    """The lines of a stage's run at a rate."""
    return losses(name_at_rate(stage, rate), session=seed, held_out=held_out, curve=curve)


# the held-out losses of two seeds; s07's best, at 6e-4, is 0.1 and 0.3 above s06's, at 3e-4
LOSSES = {
    ("s06_vocab", 1.5e-4): (5.8, 5.8),
    ("s06_vocab", 3e-4): (5.2, 5.3),
    ("s06_vocab", 6e-4): (5.5, 5.3),
    ("s07_clip", 1.5e-4): (5.9, 5.8),
    ("s07_clip", 3e-4): (5.7, 5.7),
    ("s07_clip", 6e-4): (5.3, 5.6),
}


def results_at_rates(losses=LOSSES, more=(), **bench):
    """The Results of a bench of s06 and s07 at three rates. losses: {(stage, rate): one for each seed}."""
    runs = list(more)
    for (stage, rate), of_seeds in losses.items():
        for seed, held_out in enumerate(of_seeds):
            runs.append(run_at(stage, rate, seed, held_out))
    rows = [name_at_rate(stage, rate) for stage, rate in LOSSES]
    given = {"mode": "loss", "rates": [1.5e-4, 3e-4, 6e-4], "rounds": 2, "rows": rows, "steps": 40}
    return results_of(*runs, **given | bench)


def test_losses_at_several_rates_are_a_table_of_stages_by_rates():
    rows = without_no_break_spaces(page.rates_table(results_at_rates(), "../stages/")).splitlines()
    assert rows[0] == "| stage | lr 1.5e-4 | lr 3e-4 | lr 6e-4 | note |"
    assert rows[2] == "| [s06_vocab](../stages/s06_vocab.py) | 5.8000 | **5.2500** | 5.4000 |  |"
    assert len(rows) == 4


def test_the_stages_of_a_table_of_rates_are_linked_from_where_it_stands():
    rows = page.rates_table(results_at_rates(), "").splitlines()
    assert rows[2].startswith("| [s06_vocab](s06_vocab.py) | ")


def test_a_script_of_ones_own_has_no_link_in_a_table_of_rates():
    losses = {("mine", 1.5e-4): (5.4,), ("mine", 3e-4): (5.2,), ("mine", 6e-4): (5.3,)}
    results = results_at_rates(losses, rows=["mine lr 1.5e-4", "mine lr 3e-4", "mine lr 6e-4"], rounds=1)
    assert page.rates_table(results, "../stages/").splitlines()[2:] == ["| mine | 5.4000 | **5.2000** | 5.3000 |"]


def test_a_best_rate_at_the_edge_is_marked():
    results = results_at_rates()
    assert page.note_on_rates(results, "s06_vocab") == ""
    assert page.note_on_rates(results, "s07_clip") == "best at the highest rate tried: try a higher one"
    falling = {("s06_vocab", 1.5e-4): (5.0,), ("s06_vocab", 3e-4): (6.0,)}
    assert (
        page.note_on_rates(results_at_rates(falling), "s06_vocab") == "best at the lowest rate tried: try a lower one"
    )


def test_each_stages_best_is_compared_with_the_best_of_the_stage_above():
    """The differences are 0.1 and 0.3: their mean is 0.2, its ± 12.71 times 0.1."""
    rows = without_no_break_spaces(page.best_table(results_at_rates())).splitlines()
    head = "| stage | change | best rate | held-out loss (seeds) | vs previous | vs s06 | note |"
    assert rows[0] == head
    assert rows[2].endswith("| 3e-4 | 5.2500 (2) | – | – |  |")
    assert rows[3].endswith("| 6e-4 | 5.4500 (2) | 0.2000 ± 1.2710 | 0.2000 ± 1.2710 | no difference |")


def test_a_best_that_is_higher_for_each_seed_alike_is_called_higher():
    losses = LOSSES | {("s07_clip", 6e-4): (5.4, 5.5)}
    last_row = page.best_table(results_at_rates(losses)).splitlines()[-1]
    assert last_row.endswith("| higher |")


def test_the_chart_over_rates_has_a_line_for_each_stage():
    chart = page.rates_chart(results_at_rates())
    assert 'x-axis "learning rate (s06 blue, s07 orange)" ["1.5e-4", "3e-4", "6e-4"]' in chart
    assert 'y-axis "held-out loss" 5.2 --> 5.9' in chart
    assert "line [5.800, 5.250, 5.400]" in chart
    assert "line [5.850, 5.700, 5.450]" in chart


def test_the_chart_over_rates_leaves_out_a_rate_that_a_stage_lacks():
    chart = page.rates_chart(results_at_rates(LOSSES | {("s07_clip", 1.5e-4): ()}))
    assert '["3e-4", "6e-4"]' in chart
    assert "line [5.250, 5.400]" in chart
    one_left = {("s06_vocab", 3e-4): (5.2,), ("s06_vocab", 6e-4): (5.2,), ("s07_clip", 3e-4): (5.2,)}
    assert page.rates_chart(results_at_rates(one_left)) == ""


def test_the_curves_of_a_bench_of_several_rates_are_those_at_the_best_ones():
    best = run_at("s06_vocab", 3e-4, 0, 5.0, curve=[3.0, 2.0, 1.0])
    other = run_at("s06_vocab", 6e-4, 0, 6.0)
    chart = page.chart(results_at_rates({}, more=[best, other]))
    assert '"step (s06 at 3e-4 blue)"' in chart
    assert "line [3.000, 2.000, 1.000]" in chart
    assert chart.count("line [") == 1


def test_an_unfinished_bench_of_several_rates_is_drawn():
    """The second seed of s06 has begun, at its lowest rate; s07 has one run, which failed."""
    begun = run_lines("s06_vocab lr 3e-4", [], session=1, end=None)
    failed = run_lines("s07_clip lr 6e-4", [], end=failure("the loss is nan at step 3", "loss-not-finite"))
    some = {("s06_vocab", 1.5e-4): (5.8, 5.9), ("s06_vocab", 3e-4): (5.2,)}
    text = without_no_break_spaces(page.page(results_at_rates(some, more=[begun, failed])))
    assert "| 5.8500 | **5.2000** (1) | – |  |" in text
    assert "| – | – | failed | lr 6e-4 failed: the loss is nan at step 3 |" in text
    assert "Not finished: 3 of 12 runs have a held-out loss." in text


def test_a_bench_of_several_rates_that_has_only_begun_is_drawn():
    begun = run_lines("s06_vocab lr 3e-4", [], end=None)
    text = page.page(results_at_rates({}, more=[begun]))
    assert "Not finished: 0 of 12 runs" in text
    assert "mermaid" not in text
    assert "No stage got as far as its first step." in page.page(results_at_rates({}))


def test_a_script_of_ones_own_has_no_link():
    results = results_of(losses("s06_vocab"), losses("mine"), mode="loss", steps=40)
    assert cell(results, "s06_vocab", "stage") == "[s06_vocab](s06_vocab.py)"
    assert cell(results, "mine", "stage") == "mine"


def test_scripts_of_ones_own_keep_their_whole_name_in_a_legend():
    results = results_of(losses("s07_clip"), losses("s07_clip_alone"), mode="loss", steps=40)
    assert '"step (s07 blue, s07_clip_alone orange)"' in page.chart(results)


def test_a_rate_other_than_the_default_stands_in_the_settings():
    run = run_lines("s05_flash", [1.0], lr=1.2e-3)
    assert "seed 1337, lr 1.2e-3, " in "\n".join(lines_under_the_table(run))
    run = run_lines("s05_flash", [1.0])
    assert "lr" not in "\n".join(lines_under_the_table(run))
    del run[0]["settings"]["lr"]  # as in older records
    assert "lr" not in "\n".join(lines_under_the_table(run))


def test_the_speed_chart_has_a_bar_for_each_row_with_a_counted_step():
    runs = [run_lines("s01_baseline", [1.0]), run_lines("s02_tf32", []), run_lines("s03_bf16", [0.25])]
    chart = page.chart(results_of(*runs))
    assert 'x-axis ["s01", "s03"]' in chart
    assert "bar [1.00, 4.00]" in chart
    assert "y-axis 0 --> 4.40" in chart


# README's part


def test_readme_gets_the_narrow_table():
    rows = without_no_break_spaces(page.readme_table(ladder_cpu())).splitlines()
    assert rows[0] == "| stage | change | tok/sec | vs previous | verdict | vs s01 | memory GB |"
    s03 = "| [s03](stages/s03_bf16.py) | bf16 | 2,000 | 2.000 ± 0.020 | faster | 2.00 ± 0.00 | 1.25 |"
    assert rows[4] == s03
    assert rows[5] == "| [s04](stages/s04_compile.py) | compile | – | – | failed | – | – |"
    assert rows[11].startswith(
        "| [s10](stages/s10_fused.py) | fused | 3,000 | – | not finished | 3.00 ± 0.00 | no meter |"
    )


def test_readme_leaves_out_what_a_gpu_reserved():
    assert "| 667 | – | – | – | 12.50 |" in page.readme_table(ladder_t4())


def test_the_verdict_of_readme_is_a_word_or_two():
    """s01 is the first row, s05 stands below a row that failed, and s09 was never started."""
    rows = page.readme_table(ladder_cpu()).splitlines()[2:]
    verdicts = [row.split(" | ")[4] for row in rows]
    assert verdicts == [
        "–",
        "no-op here",
        "faster",
        "failed",
        "–",
        "slower",
        "for the loss",
        "failed",
        "not run",
        "not finished",
        "no difference",
        "no difference",
    ]


def test_readme_says_where_a_device_cant_run_a_stage():
    refused = run_lines("s12_ddp", [], end=failure("not for mps", "not-for-this-device"))
    table = page.readme_table(results_of(run_lines("s11_accum", [1.0]), refused))
    assert table.endswith("| – | – | not on this device | – | – |")


def test_the_first_row_of_readme_is_compared_with_nothing():
    """Not even s08, which is for the loss, has a verdict there."""
    table = page.readme_table(results_of(run_lines("s08_cosine", [1.0]), run_lines("s09_decay", [1.0])))
    rows = table.splitlines()[2:]
    assert " | – | – | – | " in rows[0]
    assert " | 1.000 | for the loss | 1.00 | " in rows[1]


def test_readme_has_no_verdict_without_a_control():
    table = page.readme_table(results_of(run_lines("s05_flash", [1.0]), run_lines("s06_vocab", [0.5])))
    assert "| 2.000 | – | 2.00 |" in table.splitlines()[-1]


TOGETHER = "All techniques for one device together (s11) are"
# the speeds are 1, 0.5 and 2 in both rounds, but that of `plain` in the first one, 0.4
LADDER_WITH_PLAIN = (
    run_lines("plain", [2.5, 2.0]),
    run_lines("s01_baseline", [1.0, 1.0]),
    run_lines("s11_accum", [0.5, 0.5]),
)


def test_readmes_headline_is_s11_over_s01_and_over_plain():
    headline = page.readme_headline(results_of(*LADDER_WITH_PLAIN))
    assert headline == f"{TOGETHER} 2.00 ± 0.00 times as fast as s01, and 4.50 ± 0.50 times as fast as `plain`."


@pytest.mark.parametrize(
    "names, headline",
    [
        (
            ["s01_baseline", "s11_accum"],
            f"{TOGETHER} 2.00 ± 0.00 times as fast as s01.",
        ),
        (
            ["plain", "s11_accum"],
            f"{TOGETHER} 4.50 ± 0.50 times as fast as `plain`.",
        ),
        (["plain", "s01_baseline"], ""),
        (["s11_accum"], ""),
    ],
)
def test_readmes_headline_has_only_what_was_measured(names, headline):
    runs = [run for run in LADDER_WITH_PLAIN if run[0]["name"] in names]
    assert page.readme_headline(results_of(*runs)) == headline


def test_readmes_part_is_a_table_a_list_and_a_chart():
    table, facts, chart = page.readme_part(results_of(*LADDER_WITH_PLAIN), "x").split("\n\n")
    assert table.startswith("| stage | ")
    lines = facts.splitlines()
    assert lines[0].startswith(f"- {TOGETHER} 2.00")
    assert lines[1].startswith("- **A CPU**, threads 2, ")
    assert lines[2].startswith("- mini, B 4, T 256, ")
    assert lines[3:] == ["- [All columns, the noise and the peak](results/x.md)."]
    assert chart.startswith("```mermaid\n")


def test_readme_says_that_a_row_is_stale_before_the_link_to_the_page():
    """The code of s05 was another one when it was measured."""
    lines = page.readme_part(ladder_cpu(), "x").splitlines()
    link = "[All columns, the noise and the peak](results/x.md)."
    assert f"- Measured with an earlier version of the stages. {link}" in lines


def test_readme_shows_no_other_mode_than_the_ladder():
    with pytest.raises(ResultsError, match="leave --readme out"):
        page.readme_part(results_of(losses("a"), mode="loss"), "x")


def test_text_goes_between_markers():
    before = f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n"
    assert page.between_markers(before, "\nnew\n\n") == before.replace("old", "new")


@pytest.mark.parametrize("text", ["none", "BEGIN", "END", "BEGIN BEGIN END", "BEGIN END END", "END BEGIN"])
def test_markers_that_do_not_occur_once_each_are_refused(text):
    text = text.replace("BEGIN", page.BEGIN).replace("END", page.END)
    with pytest.raises(ResultsError, match="README.md"):
        page.between_markers(text, "new")


# records that are hostile or damaged

HOSTILE = "a|b\n\n# c\r<img src=x onerror=alert(1)> ![d](http://e) `f` *g* \\ & \x1b[2J\u202e\ud800"
TEXT_KEYS_OF_ENVIRONMENT = ("device_name", "system", "torch", "python", "cuda", "driver")


def hostile_results(mode="ladder"):
    """The Results of a bench in whose record every text is hostile."""
    environment = CPU | dict.fromkeys(TEXT_KEYS_OF_ENVIRONMENT, HOSTILE)
    texts = {"size": HOSTILE, "corpus": HOSTILE, "tokenizer": HOSTILE, "amp_dtype": HOSTILE}
    fallbacks = {"amp_dtype": HOSTILE, "compile": HOSTILE}
    about = {"environment": environment, "fallbacks": fallbacks, "meter": HOSTILE, **texts}
    runs = [run_lines("s01_baseline", [1.0], **about)]
    runs += [run_lines("s04_compile", [1.0], compile=False, **about)]
    runs += [run_lines("s05_flash", [1.0], end=summary(sdpa=HOSTILE), **about)]
    runs += [run_lines("s06_vocab", [1.0], end=failure(HOSTILE), **about)]
    runs += [run_lines("s06_vocab B1", [1.0], end=failure(HOSTILE, "out-of-memory"), **about)]
    for run in runs:
        run[0] |= {"commit": HOSTILE, "started": HOSTILE, "title": HOSTILE}
    rows = ["s01_baseline", "s04_compile", "s05_flash", "s06_vocab"]
    change = dict.fromkeys(rows, HOSTILE)
    return results_of(*runs, mode=mode, rows=rows, change=change, command=HOSTILE, environment=environment)


@pytest.mark.parametrize("mode", ["ladder", "limit", "amp", "scale", "loss"])
def test_text_of_a_record_is_shown_as_it_is_and_never_obeyed(mode):
    results = hostile_results(mode)
    drawn = page.page(results)
    before, again, command = drawn.rpartition("- Again: ")
    assert again
    assert command.split("\n")[0].count("`") == 2  # a code span shows what it holds
    assert_is_tame(before + command.split("`")[2])


def test_text_of_a_record_reaches_readme_escaped():
    assert_is_tame(page.readme_part(hostile_results(), "x"))


def assert_is_tame(drawn):
    """See that markdown holds nothing of HOSTILE but its characters."""
    assert drawn.replace("\n", "").replace("\u00a0", "").isprintable()  # so that it can be encoded, too
    for obeyed in ("<img", "![d]", " `f`", " *g*", "a|b", "\n# c", " \\ "):
        assert obeyed not in drawn


def test_escaped_text_is_markdown_for_the_same_text():
    hostile = "a|b\n<img> & ![c](d) `e` *f* \\"
    assert page.escape(hostile) == "a\\|b &lt;img> &amp; !\\[c\\](d) \\`e\\` \\*f\\* \\\\"
    harmless = "torch.compile, GPT-3's betas (x86_64) 10 % – ×"
    assert page.escape(harmless) == harmless
    assert page.code_span("a `b`\n\x1b") == "`a 'b'  `"


def small_benches():
    """Lines of a bench of each mode, lists of dicts, with few steps."""
    ladder = [
        run_lines("s01_baseline", [1.0], end=summary(reserved=5, card=card(power=300.0), compile_cache="hit")),
        run_lines("s02_tf32", [], end=failure("boom")),
        run_lines("s03_bf16", [1.0]),
        probe_lines([peak_step(float32=1e9, copy=1e9)]),
    ]
    two_ranks = run_lines("2 ranks", [1.0], world_size=2)
    all_reduce = probe_lines([{"dt": 0.1, "bytes": 100}], name="all-reduce 2 ranks")
    scale = [run_lines("1 rank", [1.0]), two_ranks, all_reduce]
    out_of_memory = failure("boom", "out-of-memory")
    limit = [run_lines("s05_flash B1", [1.0]), run_lines("s05_flash B2", [], end=out_of_memory)]
    loss = [run_lines(name, [1.0], end=summary(eval=6.0)) for name in ("s06_vocab", "s07_clip")]
    for mode, runs in {"ladder": ladder, "scale": scale, "limit": limit, "loss": loss}.items():
        rows = ["s05_flash"] if mode == "limit" else None
        lines = [bench_line(runs, mode=mode, rows=rows, corpus_tokens=5)]
        for run in runs:
            lines += run
        yield lines


def keys_of(entry):
    """Paths of keys to all that a line holds, tuples."""
    for key, value in entry.items():
        yield (key,)
        if isinstance(value, dict):
            for path in keys_of(value):
                yield (key, *path)


def edited(line, path, value):
    """A copy of a line with another value under a path of keys, or without the key for DELETED."""
    line = json.loads(json.dumps(line))
    entry = line
    for key in path[:-1]:
        entry = entry[key]
    if value is DELETED:
        del entry[path[-1]]
    else:
        entry[path[-1]] = value
    return line


DELETED = object()
VALUES = [None, "", "x", [], {}, -1, True, float("inf")]


def edited_records(value):
    """Texts of records in each of which one key has another value, in the last line with such keys."""
    done = set()
    for lines in small_benches():
        numbers = {(line["kind"], *line): number for number, line in enumerate(lines)}
        for keys, number in numbers.items():
            if keys in done:
                continue
            done.add(keys)
            for path in keys_of(lines[number]):
                line = edited(lines[number], path, value)
                text = text_of_lines(lines[:number] + [line] + lines[number + 1 :])
                yield text.replace("Infinity", "1e400")  # which json reads as infinite, too


@pytest.mark.parametrize("value", [pytest.param(DELETED, id="deleted"), *VALUES])
def test_an_edited_record_is_drawn_or_refused_in_a_line(value):
    for text in edited_records(value):
        draw_or_refuse(text)


def draw_or_refuse(text):
    """Draw a record, or see that it is refused by one line. Any other error is a fault."""
    try:
        results = results_of_text(text)
    except ResultsError as error:
        assert str(error).isprintable()
        return
    assert not re.search(r"\b(nan|inf)\b", page.page(results))
    if results.mode == "ladder":
        page.readme_part(results, "x")
    results.is_complete()
