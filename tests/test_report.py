"""The report: from the records of a bench to figures, and from figures to the page."""

from harness import report

import math
import os
import random
import statistics
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import definitions
from fixtures.records import CPU, probed, ran, text
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import bench
from data import InputError
from model import GPT, SIZES, GPTConfig

T4 = CPU | dict(device="cuda", device_name="Tesla T4", native_dtype="float16", cuda="12.8", cudnn=91002, driver="570.1")


def results(*runs, **more):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.jsonl")
        path.write_text(text(*runs, **more))
        return report.Results(path)


@pytest.mark.parametrize("n, k", [(2, 1), (5, 1), (6, 1), (8, 1), (9, 2), (20, 6), (30, 10), (71, 27)])
def test_interval_is_that_of_the_order_statistics_of_a_median(n, k):
    """k by the tables of the sign test (Conover, Practical Nonparametric Statistics). From n = 6 on it covers 95 %."""
    samples = [float(i**2) for i in range(n)]
    random.Random(n).shuffle(samples)
    low, median, high = (k - 1) ** 2, statistics.median(samples), (n - k) ** 2
    assert report.Estimate.median(samples) == (median, max(high - median, median - low))
    if n >= 6:
        draws = random.Random(7)
        inside = [report.Estimate.median([draws.expovariate(1) for _ in range(n)]) for _ in range(2000)]
        assert sum(abs(r.value - math.log(2)) <= r.spread for r in inside) >= 0.94 * 2000


def test_one_sample_has_no_interval():
    assert [report.Estimate.median(of).text() for of in ([3.0, 1.0, 5.0, 2.0, 4.0], [1.95])] == ["3.00 ± 2.00", "1.95"]


@pytest.mark.parametrize(
    "interleaved, a, b, value",
    [
        (True, [[1.0, 1.0, 8.0, 1.2]], [[0.5, 0.5, 4.0, 0.6]], 2),  # medians of either alone would give 2.09
        (True, [[1.0, 1.0, 9.0]], [[0.5, 0.25]], 3),  # the median of 2 and 4: two steps were taken by both
        (True, [[1.0], [4.0]], [[], [1.0]], 4),  # from the session that both were in
        (True, [[1.0], []], [[], [0.5]], None),  # they share no session
        (False, [[1.0, 1.0, 1.5], [2.0, 2.0, 9.0], [1.0]], [[0.5], [1.0], [0.25, 0.25, 9.0]], 2),  # of 2, 2 and 4
    ],
)
def test_speedup_is_the_median_ratio_of_the_rounds_of_both(interleaved, a, b, value):
    runs = [ran(name, dts, i) for name, sessions in (("a", a), ("b", b)) for i, dts in enumerate(sessions)]
    ratio = results(*runs, interleaved=interleaved).compare("b", "a")
    assert (ratio and ratio.value) == value


@pytest.mark.parametrize(
    "again, noise, shown, called",
    [
        ([1 / 0.97] * 2, 0.03, "a again / a 0.970 ± 0.000 (2)", "faster"),
        ([1 / 0.99, 1 / 1.01], 0.0, "a again / a 1.000 ± 0.010 (2)", "faster"),
        ([1 / 1.5], 0.5, "a again / a 1.500 (1)", "no difference"),
        ([], None, "Noise: no A/A pair finished", ""),
    ],
)
def test_noise_is_how_far_the_aa_pair_is_apart(again, noise, shown, called):
    pair = ran("a", [1.0, 1.0]), ran("a" + report.AGAIN, again)
    found = results(*pair, ran("b", [0.9, 0.9]), ran("c", [0.5, 2.0]))
    assert found.noise() == (noise if noise is None else pytest.approx(noise, abs=1e-9))
    assert shown in report.conditions(found) and report.note(found, "b") == called
    assert report.note(found, "c") == ("" if noise is None else "no difference")  # 1.12 ± 0.68 times as fast as b


@pytest.mark.parametrize("size, T", [("tiny", 64), ("mini", 64), ("tiny", 24)])
def test_flops_per_token_is_what_torch_counts_in_s01s_model(size, T):
    attention = definitions("s01", "attention", torch=torch, math=math, F=F)["attention"]
    x = torch.zeros(1, T, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        GPT(GPTConfig(block_size=T, **SIZES[size]), attention)(x, x).backward()
    assert counter.get_total_flops() == T * report.flops_per_token(size, T)


def test_share_of_the_peak_is_taken_within_rounds():
    peaks = [dict(peak=dict(bfloat16=n * 1e9, float32=1e9)) for n in (9, 9, 9, 9, 4, 2, 8)]
    peak = [line | found for line, found in zip(probed(n=3), peaks, strict=True)]
    # the machine was loaded in the second round: medians of each alone would give 1 / 4
    found = results(ran("one", [1.0, 2.0, 0.5]), ran("two", [1.0, 2.0, 0.5], world_size=2), peak)
    # mini at T 256: 6 (12 * 6 * 384**2 + 50257 * 384) + 12 * 6 * 384 * 256 = 186,571,008; 1000 tokens per second
    assert found.share("one") == pytest.approx(186_571_008 * 1000 / 4e9) == 2 * found.share("two")
    assert "0.00 TFLOP/s in float32, reached by matmuls of size 2048 (rounds: 3)" in report.conditions(found)


def test_rows_that_are_one_computation_are_aa_pairs_too():
    """A row that can't change the speed is never called faster, and the worst of such pairs is the noise."""
    dts = dict(
        s01_baseline=[1.0] * 6, s02_tf32=[0.8] * 6, s07_clip=[0.5] * 6, s08_cosine=[0.45] * 6, s11_accum=[0.4] * 6
    )
    found = results(*(ran(name, times) for name, times in dts.items()))
    assert {name for name, _ in found.pairs()} == {"s02_tf32", "s08_cosine"}
    assert found.noise() == pytest.approx(0.25) and "faster" not in report.note(found, "s02_tf32")
    assert report.note(found, "s08_cosine").endswith("no difference") and "faster" in report.note(found, "s07_clip")
    gpu = results(*(ran(name, dts[name], environment=CPU | dict(tf32=True)) for name in ("s01_baseline", "s02_tf32")))
    assert not gpu.pairs() and not found.same("s11_accum")


def ladder_cpu():
    """A bench on a CPU with one row of every kind. Seconds per step are those of s01 divided by the speed-up."""

    def run(name, speed, wiggle=(1, 1, 1, 1, 1), **more):
        dts = [round(b / speed * w, 9) for b, w in zip([1.0, 1.1, 0.9, 1.0, 1.2], wiggle, strict=False)]
        missing = dict(compile="left out, no C++ compiler found: install g++ (Linux)")
        return ran(name, dts, compile=False, fallbacks=missing, **more)

    return results(
        run("s01_baseline", 1),
        run("s02_tf32", 1, (1, 1, 1.01, 0.99, 1)),
        run("s03_bf16", 2, memory=1.25),
        run("s04_compile", 1, (), error="out of memory at batch size 4: try --batch-size 2"),
        run("s05_flash", 3, end=dict(sdpa="flash"), memory=0.5, code="1" * 64),
        run("s06_vocab", 2.4),
        run("s07_clip", 2.42),  # 1.008 times as fast, and the A/A pair is 1.02 apart
        run("s07_clip" + report.AGAIN, 2.42 * 1.02),
        run("s08_cosine", 2.4, (1, 1, 1), error="RuntimeError: boom | with a bar"),
        run("s10_fused", 3, (1, 1, 1, 1), end=None, memory=None, meter="no meter"),
        run("s11_accum", 1.5, tokens=2000),  # twice the tokens in 1 / 1.5 of the time: 3 times the speed
        run("s12_ddp", 1.5, tokens=2000),
        probed(n=5, peak=dict(float32=5e11, bfloat16=1e12), copy=2.5e10),
        rows=bench.STAGES,
    )


def ladder_t4():
    """Two rounds on a GPU with neither bfloat16 nor TF32; the second at half the speed, which no ratio shows."""
    runs = [probed(peak=dict(float32=4e12, float16=2e13))]
    gpu = dict(environment=T4, amp_dtype="float16", meter="peak allocated", size="gpt2", seq_len=1024)
    rows = [("s01_baseline", 1.0, 12.5), ("s02_tf32", 1.0, 12.5), ("s03_bf16", 0.4, 10), ("s04_compile", 0.2, 8)]
    for name, dt, memory in [*rows, ("s04_compile" + report.AGAIN, 0.2, 8), ("s05_flash", 0.16, 6)]:
        end = dict(reserved=int(memory * 1.125e9), sdpa="efficient")
        runs += [ran(name, [dt * slow] * 3, slow - 1, memory=memory, end=end, **gpu) for slow in (1, 2)]
    return results(*runs, interleaved=False, rounds=2, steps=7, environment=T4)


@pytest.mark.parametrize("ladder", [ladder_cpu, ladder_t4])
def test_page_is_byte_for_byte_what_it_was(ladder):
    """After a change that is wanted: REDRAW=1 python -m pytest tests/test_report.py, and read the difference."""
    page, path = report.page(ladder()).encode(), Path(__file__).parent / f"fixtures/{ladder.__name__}.md"
    if os.environ.get("REDRAW"):
        path.write_bytes(page)
    assert page.decode() == path.read_bytes().decode()


def test_narrow_table_links_to_the_page_and_groups_the_notes():
    part = report.narrow(ladder_cpu(), "x")
    assert "| [s03_bf16](stages/s03_bf16.py) | bf16 | 2,000 | 500 | 1.25 | 2.00\u00a0±\u00a00.02 |" in part
    assert "; s11: 2 micro-batches per step; no difference; " in part and "](results/x.md)" in part


@pytest.mark.parametrize(
    "name, about, note",
    [
        ("s02_tf32", dict(environment=T4 | dict(tf32=True)), "active"),
        ("s02_tf32", dict(environment=CPU | dict(device="mps")), "no-op: this device has no TF32 units"),
        ("s03_bf16", dict(amp_dtype="float32"), "no-op: float32 was asked for"),
        ("s03_bf16", dict(amp_dtype="float32", fallbacks=dict(amp_dtype="none here")), "no-op: none here"),
        ("s04_compile", dict(compile=False), "fallback to eager: --no-compile was given"),
        ("s12_ddp", dict(world_size=2), ""),
    ],
)
def test_note_is_what_the_machine_makes_of_a_technique(name, about, note):
    assert report.note(results(ran(name, [1.0], **about)), name) == note


GRADES = {1.51: "excellent", 1.5: "significant", 1.2: "modest", 1.05: "negligible", 0.94: "slower"}


@pytest.mark.parametrize("speed", GRADES)
def test_amp_recommends_by_the_speedup_over_float32(speed):
    memory, saved = {1.51: (1.5, "; 25 % less memory"), 1.2: (None, "")}.get(speed, (4, "; 100 % more memory"))
    runs = [ran("float32", [speed, speed], memory=2), ran("bfloat16", [1.0] * 2, memory=memory)]
    runs.append(ran("bfloat16" + report.AGAIN, [1 / 1.1] * 2))
    grade, *rest = report.note(results(*runs, mode="amp"), "bfloat16").partition(";")
    assert grade.startswith(GRADES[speed])
    assert "".join(rest) == f"{saved}; {'faster' if speed > 1.1 else 'no difference'}"


def test_scale_notes_efficiency_and_the_share_of_the_all_reduce():
    runs = [ran("1 rank", [1.0] * 3), ran("2 ranks", [0.625] * 3, world_size=2), ran("4 ranks", [], error="boom")]
    reduce = probed("all-reduce 2 ranks", n=3, dt=0.05, bytes=120_000_000, tokens=1)
    notes = [report.note(results(*runs, reduce, mode="scale"), f"{n} ranks") for n in (4, 2)]
    words = "an all-reduce of its 120 MB of gradients by itself takes 50.0 ms, 8.0 % of a step"
    assert notes == ["failed: boom", f"efficiency 80 %; {words} (DDP hides some behind the backward)"]


def test_limit_is_the_largest_batch_whose_long_run_fits():
    no, rows = "out of memory: more than the budget of 1.0 GB", ["s05_flash", "s06_vocab", "s07_clip"]
    runs = [ran(f"s05_flash B{b}", [], error=no if b > 6 else None) for b in (1, 2, 4, 8, 6, 7, 5)]
    runs += [ran("s05_flash B6", [], 1, error=no), ran("s05_flash B5", [0.5] * 3, 1), ran("s06_vocab B1", [], error=no)]
    assert report.limit_table(results(*runs, mode="limit", rows=rows)).splitlines()[2:] == [
        f"| s05_flash | 5 | 2,000 | 1.50 | B 6: {no} |",
        f"| s06_vocab | none | – | – | B 1: {no} |",
        "| s07_clip | none | – | – | nothing yet: not finished |",
    ]
    assert [results(*runs, mode="limit", rows=rows[:n]).complete() for n in (1, 2)] == [True, False]


def test_loss_is_compared_within_seeds_by_students_interval():
    """The interval by hand: 4.30 * 0.01 / sqrt(3) = 0.0248."""
    ends = dict(s06_vocab=(6.0, 6.3, 6.6), s07_clip=(5.89, 6.2, 6.51), s08_cosine=(5.88, 6.2, 6.52), s09_decay=(6.0,))
    ends = [(name, i, loss) for name, of in ends.items() for i, loss in enumerate(of)]
    runs = [ran(name, [1.0] * 36, i, seed=i, size="micro", end=dict(eval=loss)) for name, i, loss in ends]
    found = results(*runs, ran("s09_decay", [], 1, error="boom", seed=1), mode="loss", rounds=3, interleaved=False)
    page = report.page(found).replace("\u00a0", " ")
    assert "vocab | 6.3000 (3) | – | – |  |" in page and "clip | 6.2000 (3) | -0.1000 ± 0.0248 |" in page
    assert "cosine | 6.2000 (3) | 0.0000 ± 0.0248 | -0.1000 ± 0.0497 | no difference |" in page
    assert "decay | 6.0000 (1) | 0.1200 | 0.0000 | failed: boom |" in page and not found.complete()
    assert [report.note(found, name) for name in ("s06_vocab", "s07_clip")] == ["", "lower"]
    assert "seed 0, 1, 2, " in page and 'x-axis "step (s06 blue, s07 orange, s08 green, s09 purple)" 3 --> 39' in page
    assert "line [4.750, 4.550, " in page


def test_nothing_that_ran_is_a_page_all_the_same():
    page = report.page(results(rows=["s01_baseline", "s02_tf32"]))
    assert "No stage got as far as its first step." in page and page.count("not run") == 2
    one = report.page(results(ran("a", [1.0]), probed(peak=dict(float32=1e9))))
    assert "Interleaved (rounds: 1, sessions: 1): all" in one and "(rounds: 1). The column" in one


@pytest.mark.parametrize("broken", ["none", "{0}", "{0} {0} {1}", "{0} {1} {1}", "{1} {0}"])
def test_text_goes_between_markers_that_occur_once_each(broken):
    before = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    assert report.between_markers(before, "\nnew\n\n") == before.replace("old", "new")
    with pytest.raises(InputError, match="README.md"):
        report.between_markers(broken.format(report.BEGIN, report.END), "new")


GOOD = text(ran("a", [1.0, 1.0]), ran("b", [0.9] * 2), probed(peak=dict(float32=1e9)))
EDITS = [(0, "", content) for content in ("", "\n", "rubbish\n", "[]\n", "{}\n", '{"kind": "bench"}\n', "\x00\xff\n")]
EDITS += [
    (1, '"command"', '"other"'),
    (2, '"mini"', '"huge"'),
    (2, '"session": 0', '"session": "x"'),
    (7, "4.6", "NaN"),
]
EDITS += [(0, "", GOOD + GOOD)]  # two benches in one file
EDITS += [(7, '"dt": 1.0', f'"dt": {dt}') for dt in ("0", '"x"', "null", "NaN", "-1", "[]")]
EDITS += [(7, "1000,", "0,"), (7, "1500000000", '"x"'), (7, "4.6", '"x"'), (7, "1.0}\n", "1"), (7, "1.0}\n", "1.0\n")]


@pytest.mark.parametrize("number, old, new", EDITS, ids=range(len(EDITS)))
def test_damaged_records_are_refused_by_line_and_stay(tmp_path, number, old, new):
    lines = ["", *GOOD.splitlines(keepends=True)] if number else [""]
    lines[number] = lines[number].replace(old, new)
    (path := tmp_path / "x.jsonl").write_text("".join(lines))
    with pytest.raises(InputError, match=f"line {number} " if number > 1 else "x.jsonl"):
        bench.show(path, False)
    assert path.read_text() == "".join(lines) and not path.with_suffix(".md").exists()


@pytest.mark.parametrize("content", [GOOD, GOOD.replace(": ", ":").replace(", ", " ,"), GOOD + GOOD[-90:-9]])
def test_render_draws_the_page_and_readme_and_leaves_the_records(tmp_path, monkeypatch, capsys, content):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    (path := tmp_path / "x.jsonl").write_text(content)
    above, below = f"# Ä\r\n{report.BEGIN}", f"{report.END}\r\n\tend, with no newline after it"
    (tmp_path / "README.md").write_bytes(f"{above}old{below}".encode())
    assert bench.show(path, readme=True) == 0 and path.read_text() == content
    page, readme = path.with_suffix(".md").read_text(), (tmp_path / "README.md").read_bytes().decode()
    assert capsys.readouterr().out == page + "\n" == report.page(report.Results(path)) + "\n" and "| 1,000 |" in page
    assert readme.startswith(above) and readme.endswith(below) and "(stages/b.py)" in readme
