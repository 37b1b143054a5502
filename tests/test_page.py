"""The page: from the figures of a bench to tables, sentences and a chart."""

from harness import ladder, loss_page, page, readme

import os
from pathlib import Path

import pytest
from conftest import error_of
from fixtures.records import A100, GPT2, failure, peak, probe_lines, results_of, run_lines, summary

FIXTURES = Path(__file__).parent / "fixtures"


def cell(results, name, column):
    """Return a cell of the full table, its no-break spaces as they are typed."""
    return page.cells(results, name)[column].replace("\u00a0", " ")


def rows_of(table):
    """Return the lines of a markdown table below its head, their no-break spaces as they are typed."""
    return table.replace("\u00a0", " ").splitlines()[2:]


# whole pages


def cpu_run(name, speed, factors=(1, 1, 1, 1, 1), **about):
    """Return a run without a compiler. speed: over that of s01. factors: of its steps' times, beyond the load's."""
    dts = []
    for load, factor in zip((1.0, 1.1, 0.9, 1.0, 1.2), factors, strict=False):
        dts.append(round(load / speed * factor, 9))
    missing = {"compile": "left out, no C++ compiler found: install g++ (Linux)"}
    return run_lines(name, dts, compile=False, fallbacks=missing, **about)


def ladder_cpu():
    """Return a bench on a CPU with a row of every kind."""
    return results_of(
        cpu_run("plain", 0.8, (1, 1.01, 1, 0.99, 1), stage="s01_baseline"),
        cpu_run("s01_baseline", 1),
        cpu_run("s02_tf32", 1, (1, 1, 1.01, 0.99, 1)),
        cpu_run("s03_bf16", 2, memory=1.25),
        cpu_run("s04_compile", 1, (), end=failure("out of memory at batch size 4: try --batch-size 2")),
        cpu_run("s05_flash", 3, memory=0.5, code="1" * 64),
        cpu_run("s06_vocab", 2.4),
        cpu_run("s07_clip", 2.42),  # 1.008 times as fast, and the A/A pair is 1.02 apart
        cpu_run("s07_clip again", 2.42 * 1.02),
        cpu_run("s08_cosine", 2.4, (1, 1, 1), end=failure("RuntimeError: boom | with a bar")),
        cpu_run("s10_fused", 3, (1, 1, 1, 1), end=None, memory=None),
        cpu_run("s11_accum", 1.5, tokens=2000, warmup_dt=4),  # twice the tokens in 1 / 1.5 of the time
        cpu_run("s12_ddp", 1.5, tokens=2000),
        probe_lines([peak(float32=5e11, bfloat16=1e12, copy=2.5e10)] * 5),
        rows=["plain", *ladder.NAMES[:12]],
    )


def ladder_gpu():
    """Return a bench of one round on a GPU."""
    speeds = {"s01_baseline": 1, "s02_tf32": 2.1, "s03_bf16": 2.3, "s04_compile": 6.5, "s05_flash": 9.5}
    speeds |= {"s06_vocab": 9.8, "s07_clip": 9.7, "s07_clip again": 9.74, "s08_cosine": 9.71, "s09_decay": 9.65}
    speeds |= {"s10_fused": 10.3, "s11_accum": 2.7, "s12_ddp": 2.5}
    runs = [probe_lines([peak(float32=1.9e13, tf32=1.3e14, bfloat16=2.6e14, copy=1.7e12)])]
    about = {"environment": A100, "shape": GPT2, "size": "gpt2", "batch_size": 16, "seq_len": 1024, "accum": 4}
    for name, speed in speeds.items():
        tokens = 65536 if name in ("s11_accum", "s12_ddp") else 16384
        dts = [round(factor / speed, 9) for factor in (1.0, 0.99, 1.02)]
        end = summary(sdpa="cudnn", reserved=int(33e9))
        warmup_dt = 11.5 if name == "s04_compile" else 1
        runs.append(run_lines(name, dts, end=end, tokens=tokens, memory=30, warmup_dt=warmup_dt, **about))
    return results_of(*runs, pair_by="session", environment=A100)


@pytest.mark.parametrize("drawn", [ladder_cpu, ladder_gpu])
def test_a_page_is_byte_for_byte_what_it_was(drawn):
    """After a wanted change: REDRAW=1 python -m pytest tests/test_page.py, and read the difference."""
    results = drawn()
    text = f"{page.page(results)}\n# Its part of README.md\n\n{readme.readme_part(results, 'x')}\n"
    path = FIXTURES / f"{drawn.__name__}.md"
    if os.environ.get("REDRAW"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_a_bench_of_which_nothing_ran_is_a_page_all_the_same():
    drawn = page.page(results_of(rows=["s01_baseline", "s02_tf32"]))
    assert "No stage got as far as its first step." in drawn
    assert drawn.count("not finished") == 2


# the table


def test_a_script_of_ones_own_has_its_row_without_a_link():
    results = results_of(run_lines("s05_flash", [1.0]), run_lines("mine", [0.5], shape=None))
    assert cell(results, "s05_flash", "stage") == "[s05_flash](../stages/s05_flash.py)"
    assert cell(results, "mine", "stage") == "mine"
    assert cell(results, "mine", "vs s05") == "2.00"


def test_amp_recommends_a_dtype_by_its_speed_over_float32():
    grades = {1.51: "excellent: switch it on", 1.5: "significant: switch it on", 1.2: "modest", 1.05: "negligible"}
    for speedup, grade in (grades | {0.95: "slower: leave it off"}).items():
        results = results_of(run_lines("float32", [speedup]), run_lines("bfloat16", [1.0]), mode="amp")
        assert cell(results, "bfloat16", "note") == f"{grade}, 0 % less memory"


@pytest.mark.parametrize("memory, words", [(1.5, ", 25 % less memory"), (4, ", 100 % more memory"), (None, "")])
def test_amp_says_how_much_memory_a_dtype_takes(memory, words):
    runs = [run_lines("float32", [1.0], memory=2), run_lines("bfloat16", [1.0], memory=memory)]
    assert cell(results_of(*runs, mode="amp"), "bfloat16", "note") == f"negligible{words}"


def test_amp_says_which_dtype_was_not_compiled():
    missing = {"compile": "a T4 compiles no bfloat16"}
    runs = [run_lines("float32", [1.0]), run_lines("bfloat16", [1.0], fallbacks=missing)]
    note = cell(results_of(*runs, mode="amp"), "bfloat16", "note")
    assert note == "negligible, 0 % less memory, not compiled: a T4 compiles no bfloat16"


def test_scale_shows_the_efficiency_and_the_median_all_reduce():
    """The all-reduce takes 10, 40 or 90 ms: their mean would be 46.7."""
    results = results_of(
        run_lines("1 rank", [1.0] * 3, stage="s12_ddp"),
        run_lines("2 ranks", [0.625] * 3, stage="s12_ddp", world_size=2),
        run_lines("4 ranks", None, stage="s12_ddp", end=failure("boom"), world_size=4),
        probe_lines([{"dt": dt, "bytes": 120_000_000} for dt in (0.01, 0.04, 0.09)], "all-reduce of 2 ranks"),
        mode="scale",
    )
    assert cell(results, "1 rank", "note") == ""
    assert cell(results, "2 ranks", "predicted") == f"{1 / (0.5 + 0.04):.3f}"
    efficiency = "efficiency 80 %, an all-reduce of 120 MB alone takes 40.0 ms, 6.4 % of a step"
    assert cell(results, "2 ranks", "note") == efficiency
    assert cell(results, "4 ranks", "note") == "failed: boom"


def test_limit_shows_the_largest_batch_and_what_stopped_the_next():
    out_of_memory = failure("out of memory | of 1 GB")
    runs = [run_lines("s05_flash", [0.5], session=batch) for batch in (1, 2, 4, 5)]
    runs += [run_lines("s05_flash", None, session=batch, end=out_of_memory) for batch in (8, 6)]
    runs.append(run_lines("s05_flash", [0.5], session=7, end=None))  # interrupted
    runs.append(run_lines("s06_vocab", None, session=1, end=out_of_memory))
    rows = ["s05_flash", "s06_vocab", "s11_accum"]
    drawn = page.page(results_of(*runs, mode="limit", pair_by="session", rows=rows))
    flash, vocab, accum = [line.split(" | ", 1)[1] for line in drawn.splitlines() if line.startswith("| [s")]
    assert flash == "5 | 2,000 | 1.50 | B 6: out of memory \\| of 1 GB |"
    assert vocab == "none | – | – | B 1: out of memory \\| of 1 GB |"
    assert accum == "none | – | – | not finished |"


# held-out losses


def results_of_losses(losses, more=(), **bench):
    """Return the Results of the mode `loss`. losses: {stage: {rate: the losses of the seeds, in order}}."""
    runs, rows = list(more), []
    for stage, at_rates in losses.items():
        for rate, of_seeds in at_rates.items():
            rows.append(f"{stage} lr {rate}")
            for seed, loss in enumerate(of_seeds):
                runs.append(run_lines(rows[-1], None, session=seed, end=summary(eval=loss)))
    return results_of(*runs, mode="loss", pair_by="seed", rows=rows, **{"rounds": 2} | bench)


# s07's best is 0.1 and 0.3 above s06's: a mean of 0.2, and an interval of 12.71 * 0.1
S06 = {"1.5e-4": (5.8, 5.8), "6e-4": (5.2, 5.3), "2.4e-3": (5.5, 5.3)}
S07 = {"1.5e-4": (5.9, 5.8), "6e-4": (5.7, 5.7), "2.4e-3": (5.3, 5.6)}


def test_losses_are_a_table_of_stages_by_rates_with_the_best_in_bold_and_compared():
    results = results_of_losses({"s06_vocab": S06, "s07_clip": S07})
    head = loss_page.loss_table(results).splitlines()[0]
    assert head == "| stage | lr 1.5e-4 | lr 6e-4 | lr 2.4e-3 | best vs previous | note |"
    assert rows_of(loss_page.loss_table(results)) == [
        "| [s06_vocab](../stages/s06_vocab.py) | 5.8000 | **5.2500** | 5.4000 | – |  |",
        "| [s07_clip](../stages/s07_clip.py) | 5.8500 | 5.7000 | **5.4500** | 0.2000 ± 1.2710 | "
        "no difference; best at the end of the rates: try more |",
    ]


@pytest.mark.parametrize(
    "losses, verdict",
    [((5.4, 5.5), "higher"), ((5.0, 5.1), "lower"), ((5.1, 5.5), "no difference"), ((5.4,), "")],
)
def test_a_loss_is_higher_or_lower_beyond_its_interval(losses, verdict):
    results = results_of_losses({"s06_vocab": {"6e-4": (5.2, 5.3)}, "s07_clip": {"6e-4": losses}})
    assert rows_of(loss_page.loss_table(results))[1].endswith(f"| {verdict} |")


def test_rates_are_compared_over_the_seeds_that_all_of_them_have():
    """At 6e-4 the first seed is worse, and the mean is lower for the second seed alone."""
    results = results_of_losses({"s06_vocab": {"3e-4": (5.5,), "6e-4": (5.6, 4.0)}})
    assert "| **5.5000** (1) | 4.8000 | – |" in loss_page.loss_table(results)


def test_a_rate_at_which_a_seed_diverged_is_none_to_recommend():
    diverged = run_lines("s06_vocab lr 6e-4", None, session=2, end=failure("the loss is nan at step 3"))
    losses = {"s06_vocab": {"3e-4": (6.0, 6.0, 6.0), "6e-4": (5.0, 5.0)}}
    (row,) = rows_of(loss_page.loss_table(results_of_losses(losses, more=[diverged], rounds=3)))
    assert "| **6.0000** | 5.0000 (2) | – | lr 6e-4 failed: the loss is nan at step 3 |" in row


def test_a_stage_without_a_loss_leaves_the_one_below_without_a_comparison():
    losses = {"s06_vocab": {"6e-4": (5.2, 5.3)}, "s07_clip": {"6e-4": ()}, "s08_cosine": {"6e-4": (5.0, 5.1)}}
    cells = [row.split(" | ", 1)[1] for row in rows_of(loss_page.loss_table(results_of_losses(losses)))]
    assert cells == ["**5.2500** | – |  |", "– | – |  |", "**5.0500** | – |  |"]


def test_a_loss_of_other_code_is_stale():
    run = run_lines("s06_vocab lr 6e-4", None, code="1" * 64)
    (row,) = rows_of(loss_page.loss_table(results_of(run, mode="loss", pair_by="seed")))
    assert row.endswith("| stale: the stage has changed since |")


# under the table, and README's part


def test_a_page_tells_the_conditions_of_a_bench_of_several_rounds():
    names = ("s01_baseline", "s01_baseline again")
    runs = [run_lines(name, [1.0], session, environment=A100) for name in names for session in (0, 1)]
    drawn = page.page(results_of(*runs, pair_by="session", rounds=2))
    assert "a row ended early once it had 20 counted steps and 6 s of them: 2 rounds, there and back." in drawn
    assert "its ± their range." in drawn


@pytest.mark.parametrize("turns, spread", [(5, "their range"), (6, "the 95 % interval")])
def test_a_page_tells_what_the_spread_of_so_many_turns_is(turns, spread):
    assert f"its ± {spread}" in page.page(results_of(run_lines("s01_baseline", [1.0] * turns)))


def test_a_page_says_why_nothing_is_called_faster():
    runs = [run_lines("s01_baseline", [1.0]), run_lines("s02_tf32", [0.5], environment=A100)]
    assert "- Noise: unknown, since no two runs" in page.page(results_of(*runs))
    failed = run_lines("s01_baseline again", [1.0], end=failure("boom"))
    assert "- Noise: unknown, since s01_baseline again failed: boom." in page.page(results_of(*runs, failed))


def test_readme_shows_a_ladder_with_a_step_and_no_other_mode(capsys):
    losses = results_of_losses({"s06_vocab": S06})
    assert "x is of loss: leave --readme out" in error_of(capsys, readme.readme_part, losses, "x")
    nothing = results_of(rows=["s01_baseline"])
    assert "x has no step of a stage yet" in error_of(capsys, readme.readme_part, nothing, "x")


def test_a_part_takes_the_place_of_the_one_between_readmes_markers():
    text = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    assert readme.with_part(text, "\nnew\n\n") == text.replace("old", "new")


@pytest.mark.parametrize("text", ["none", readme.BEGIN, readme.END, f"{readme.END} {readme.BEGIN}"])
def test_a_readme_without_its_markers_is_refused(text, capsys):
    assert "README.md must hold" in error_of(capsys, readme.with_part, text, "new")
