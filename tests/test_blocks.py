"""The tables of README.md and of the lessons hold what the records say, computed here by hand."""

from harness.results import name_at_rate

import json
import re
import statistics

import blocks
import pytest
from blocks import EPYC, RESULTS, ZEN3
from fixtures.records import probe_lines, results_of, run_lines, summary
from pages import LESSONS, read_page


def lines_of(name):
    """The lines of results/NAME.jsonl, dicts."""
    text = (RESULTS / f"{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def counted_steps(name, row):
    """The steps of a row of results/NAME.jsonl after its four of warm-up, dicts. The record has one session."""
    steps = [line for line in lines_of(name) if line["kind"] == "step" and line["name"] == row]
    return steps[4:]


def times_as_fast(name, row, base):
    """The median ratio of two rows of results/NAME.jsonl with its ±, by hand.

    Of 20 ratios the sixth smallest and the sixth largest enclose the median in 95 % of cases.
    """
    ratios = []
    for step, step_of_base in zip(counted_steps(name, row), counted_steps(name, base), strict=True):
        ratios.append(step_of_base["dt"] / step["dt"])
    assert len(ratios) == 20
    ratios.sort()
    median = statistics.median(ratios)
    spread = max(median - ratios[5], ratios[-6] - median)
    return f"{median:.2f} ± {spread:.2f}"


def cells_of(line):
    """The cells of a line of a markdown table, with the spaces around a ± as they are typed."""
    return line.replace("\u00a0", " ").removeprefix("| ").removesuffix(" |").split(" | ")


def head_of(table):
    """The head of a markdown table, a list of cells."""
    return cells_of(table.splitlines()[0])


def rows_of(table):
    """The rows of a markdown table without its head, lists of cells."""
    return [cells_of(line) for line in table.splitlines()[2:]]


# the machines


def test_the_table_of_machines_begins_with_the_a100_of_the_datasheet():
    first_row = rows_of(blocks.machines_table())[0]
    assert first_row[:6] == ["A100", "gpt2, B 16, T 1024", "19.5", "156", "312", "2,039"]
    assert first_row[6].endswith("steps: the lecture")


@pytest.mark.parametrize(
    "name, row, dtypes",
    [(EPYC, 1, ["float32", None, "bfloat16"]), (ZEN3, 2, ["float32", None, None])],
    ids=[EPYC, ZEN3],
)
def test_the_rates_of_a_cpu_are_the_medians_of_its_record(name, row, dtypes):
    steps = counted_steps(name, "peak")
    cells = []
    for dtype in dtypes:
        if dtype is None:
            cells.append("–")
        else:
            teraflops = statistics.median(step["peak"][dtype] for step in steps) / 1e12
            cells.append(f"{teraflops:.3f}")
    gigabytes = statistics.median(step["copy"] for step in steps) / 1e9
    shown = rows_of(blocks.machines_table())[row]
    assert shown[1:] == ["micro, B 1, T 1024", *cells, f"{gigabytes:.1f}", f"[record](../results/{name}.md)"]


@pytest.mark.parametrize(
    "value, text",
    [(2039, "2,039"), (156, "156"), (35.4, "35.4"), (9.876, "9.88"), (0.41, "0.410")],
)
def test_a_rate_has_three_digits_or_more(value, text):
    assert blocks.three_digits(value) == text


# the gap between a prediction and a measurement


def test_a_gap_has_a_row_for_each_machine_and_stage():
    table, sentence, gap = blocks.worth("s04_compile", "s03_bf16").split("\n\n")
    assert head_of(table)[-2:] == ["predicted", "measured"]
    assert sentence.startswith("The parts of one profiled step, in ms, and in brackets what was predicted. ")
    steps = ["EPYC with bf16, s03", "EPYC with bf16, s04", "EPYC, Zen 3, s01", "EPYC, Zen 3, s04"]
    assert head_of(gap) == ["ms", *steps]


def first_column(table):
    """The first cell of each row."""
    return [row[0] for row in rows_of(table)]


def column(table, i):
    """{first cell of a row: its cell i}."""
    return {row[0]: row[i] for row in rows_of(table)}


def test_a_gap_has_a_row_for_each_part_that_one_of_its_steps_has():
    before_fusion = ["matmuls", "attention", "softmax and mask", "pointwise", "loss"]
    after_fusion = ["matmuls", "attention", "fused kernels"]
    always = ["optimizer", "the rest", "the step"]
    assert first_column(blocks.gap_table(blocks.GAPS["s03"])) == [*before_fusion, *always]
    assert first_column(blocks.gap_table(blocks.GAPS["s05"])) == [*after_fusion, *always]


def test_a_gap_shows_the_ms_of_a_profiled_step():
    """s04 on Zen 3 has no part of its own for what its kernels fuse."""
    (parts,) = [line["parts"] for line in lines_of("profile/zen3-s04") if line["kind"] == "summary"]
    shown = column(blocks.gap_table(blocks.GAPS["s04"]), 4)
    fused_ms = parts["fused kernels"] + parts.get("pointwise", 0) + parts.get("loss", 0)
    fused_ms += parts.get("softmax and mask", 0)
    assert shown["matmuls"].split(" ")[0] == f"{parts['matmuls']:,.0f}"
    assert shown["fused kernels"].split(" ")[0] == f"{fused_ms:,.0f}"
    assert shown["the step"].split(" ")[0] == f"{sum(parts.values()):,.0f}"
    assert shown["loss"] == "–"


def test_a_gap_shows_what_was_predicted_in_brackets():
    """s01's matmuls with weights take 6 FLOPs for each weight and token: 12 C² in a layer, and V C."""
    tokens, n_layer, width, vocab_size = 1024, 4, 256, 50257
    flops = 6 * tokens * (12 * n_layer * width**2 + vocab_size * width)
    rate = statistics.median(step["peak"]["float32"] for step in counted_steps(ZEN3, "peak"))
    shown = column(blocks.gap_table(blocks.GAPS["s04"]), 3)
    assert shown["matmuls"].endswith(f" ({1e3 * flops / rate:.0f})")


def test_a_stage_that_a_record_does_not_have_yet_has_a_row_without_figures():
    cells = blocks.cpu_cells(blocks.record(ZEN3), "s13_next", "s12_ddp")
    assert cells == ["–", "–", "–", "–"]


@pytest.mark.parametrize("name, above", [("s02_tf32", "s01_baseline"), ("s06_vocab", "s05_flash")])
def test_a_stage_whose_gap_no_profile_explains_has_one_table(name, above):
    assert blocks.worth(name, above) == blocks.worth_table(name, above)


# memory


def test_what_keeping_freed_memory_saves_is_the_median_of_the_differences_within_rounds():
    """Of 20 differences the sixth smallest and the sixth largest enclose the median in 95 % of cases."""
    plain = counted_steps("zen3-memory-s01", "plain")
    kept = counted_steps("zen3-memory-s01", "freed memory kept")
    saved = sorted(1e3 * (step["dt"] - step_kept["dt"]) for step, step_kept in zip(plain, kept, strict=True))
    median = statistics.median(saved)
    spread = max(median - saved[5], saved[-6] - median)
    assert rows_of(blocks.clearing_table())[0][-1] == f"{median:.0f} ± {spread:.0f}"


# held-out losses


# the losses of two seeds at two rates; at its best one, 6e-4, s07 is 0.1 and 0.3 above s06, at 3e-4
LOSSES = {
    ("s06_vocab", 3e-4): (5.2, 5.3),
    ("s06_vocab", 6e-4): (5.5, 5.3),
    ("s07_clip", 3e-4): (5.7, 5.7),
    ("s07_clip", 6e-4): (5.3, 5.6),
}


def bench_of_losses(losses, batch_size, stages=("s06_vocab", "s07_clip")):
    """The Results of a bench of two rates at T 256. losses: {(stage, rate): one for each seed}."""
    runs = []
    for (stage, rate), of_seeds in losses.items():
        for seed, held_out in enumerate(of_seeds):
            name = name_at_rate(stage, rate)
            end = summary(eval=held_out)
            runs.append(run_lines(name, [], seed, end, batch_size=batch_size, seq_len=256))
    rows = []
    for stage in stages:
        rows += [name_at_rate(stage, 3e-4), name_at_rate(stage, 6e-4)]
    return results_of(*runs, mode="loss", rates=[3e-4, 6e-4], rounds=2, rows=rows, steps=40)


@pytest.fixture
def loss_table(monkeypatch):
    """loss_table() of these Results of benches, from the fewest tokens a step to the most."""

    def draw(name, above, *benches):
        names = [str(number) for number in range(len(benches))]
        monkeypatch.setattr(blocks, "LOSS_BENCHES", names)
        monkeypatch.setattr(blocks, "record", lambda name: benches[int(name)])
        return blocks.loss_table(name, above)

    return draw


def test_a_stages_best_loss_stands_beside_the_best_of_the_one_above(loss_table):
    """The differences are 0.1 and 0.3: their mean is 0.2, its ± 12.71 times 0.1. In the second bench both are 0.2."""
    steady = LOSSES | {("s07_clip", 6e-4): (5.4, 5.5)}
    table = loss_table("s07_clip", "s06_vocab", bench_of_losses(LOSSES, 2), bench_of_losses(steady, 32))
    assert head_of(table) == [
        "tokens a step",
        "best rate of s06",
        "held-out loss (seeds)",
        "best rate of s07",
        "held-out loss (seeds)",
        "difference",
    ]
    assert rows_of(table) == [
        ["512", "3e-4", "5.2500 (2)", "6e-4", "5.4500 (2)", "0.2000 ± 1.2710 (no difference)"],
        ["8,192", "3e-4", "5.2500 (2)", "6e-4", "5.4500 (2)", "0.2000 ± 0.0000 (higher)"],
    ]


def test_a_bench_without_a_stage_has_no_row_in_its_table_of_losses(loss_table):
    of_both = bench_of_losses(LOSSES, 2)
    of_s06 = bench_of_losses({("s06_vocab", 3e-4): (5.2,), ("s06_vocab", 6e-4): (5.3,)}, 32, stages=("s06_vocab",))
    rows = rows_of(loss_table("s07_clip", "s06_vocab", of_both, of_s06))
    assert [row[0] for row in rows] == ["512"]


def test_the_difference_of_a_single_seed_has_no_verdict(loss_table):
    one_seed = {key: of_seeds[:1] for key, of_seeds in LOSSES.items()}
    (row,) = rows_of(loss_table("s07_clip", "s06_vocab", bench_of_losses(one_seed, 2)))
    assert row == ["512", "3e-4", "5.2000 (1)", "6e-4", "5.3000 (1)", "0.1000"]


def test_a_bench_that_has_only_begun_has_dashes_for_losses(loss_table):
    begun = {("s06_vocab", 3e-4): (5.2,)}
    (row,) = rows_of(loss_table("s07_clip", "s06_vocab", bench_of_losses(begun, 2)))
    assert row == ["512", "–", "–", "–", "–", "–"]


@pytest.mark.parametrize(
    "block, name",
    [("loss rates", "zen3-loss-rates"), ("loss batch", "zen3-loss-batch")],
)
def test_the_lessons_show_the_held_out_losses_of_a_record(block, name):
    _, _, below = read_page(LESSONS).partition(f"<!-- {block} -->\n")
    table, _, _ = below.partition("<!-- end -->")
    losses = {}
    for line in lines_of(name):
        if line["kind"] == "summary" and "eval" in line:
            losses.setdefault(line["name"], []).append(line["eval"])
    assert losses
    for of_seeds in losses.values():
        assert f"{statistics.mean(of_seeds):.4f}" in table


def held_out_losses(name, row):
    """{session: held-out loss} of a row of results/NAME.jsonl; a session is a seed."""
    return {
        line["session"]: line["eval"] for line in lines_of(name) if line["kind"] == "summary" and line["name"] == row
    }


def mean_and_range(name, row):
    """The held-out losses of a row of results/NAME.jsonl: their mean, the lowest and the highest. It has three."""
    losses = held_out_losses(name, row).values()
    assert len(losses) == 3
    return f"{sum(losses) / 3:.3f} ({min(losses):.3f} to {max(losses):.3f})"


def test_the_halves_of_s07_stand_beside_s06_and_s07():
    table = blocks.halves_table()
    s06, clipping_alone, _, s07, long_beta = rows_of(table)
    assert head_of(table) == ["", "lr 1.2e-3", "lr 2.4e-3", "lr 4.8e-3"]
    assert s06[2] == mean_and_range("zen3-loss-rates", "s06_vocab lr 2.4e-3")
    assert s07[3] == mean_and_range("zen3-loss-rates", "s07_clip lr 4.8e-3")
    assert clipping_alone[1] == mean_and_range("zen3-loss-halves", "clipping_alone lr 1.2e-3")
    assert long_beta[3] == mean_and_range("zen3-loss-halves", "long_beta lr 4.8e-3")


def test_a_half_of_s07_is_worth_the_mean_of_the_differences_within_seeds():
    """Student's t is 4.303 for three seeds."""
    changed = held_out_losses("zen3-loss-halves", "clipping_alone lr 2.4e-3")
    base = held_out_losses("zen3-loss-rates", "s06_vocab lr 2.4e-3")
    differences = [changed[seed] - base[seed] for seed in range(3)]
    mean, spread = sum(differences) / 3, 4.303 * statistics.stdev(differences) / 3**0.5
    table = blocks.differences_table()
    assert head_of(table) == ["what changes", "lr 1.2e-3", "lr 2.4e-3", "lr 4.8e-3"]
    shown_mean, shown_spread = rows_of(table)[0][2].split(" ± ")
    assert shown_mean == f"{mean:+.3f}"
    assert float(shown_spread) == pytest.approx(spread, abs=0.001)


# several ranks


def test_two_ranks_stand_beside_one():
    """Half a step of a rank and the all-reduce of 40 ms are 0.54 s, where a step took 1 s before."""
    all_reduces = [{"dt": seconds, "bytes": 120_000_000} for seconds in (0.01, 0.04, 0.09)]
    bench = results_of(
        run_lines("1 rank", [1.0] * 3),
        run_lines("2 ranks", [0.625] * 3, world_size=2),
        probe_lines(all_reduces, name="all-reduce 2 ranks"),
        mode="scale",
    )
    table = blocks.scale_table(bench)
    columns = ["", "tok/sec", "times one rank, predicted", "measured", "efficiency in %", "all-reduce ms"]
    assert head_of(table) == columns
    assert rows_of(table) == [
        ["1 rank", "1,000", "–", "–", "–", "–"],
        ["2 ranks", "1,600", "1.85", "1.60 ± 0.00", "80", "40.0"],
    ]


# exercises


def test_the_division_shows_the_last_steps_of_both_runs():
    rows = []
    for label, name in (("divided", "exercises/divided"), ("not divided", "exercises/undivided")):
        last_step = [line for line in lines_of(name) if line["kind"] == "step"][-1]
        rows.append([label, f"{last_step['loss']:.4f}", f"{last_step['norm']:.4f}"])
    table = blocks.division_table()
    assert head_of(table) == ["", "loss at the last step", "norm at the last step"]
    assert rows_of(table) == rows


def test_float16_shows_the_share_of_zeros_that_the_runs_logged_in_place_of_the_norm():
    scaled = [line for line in lines_of("exercises/float16-scaled") if line["kind"] == "step"]
    unscaled = [line for line in lines_of("exercises/float16-unscaled") if line["kind"] == "step"]
    last = [f"{round(100 * step['norm'])} %" for step in (scaled[3], unscaled[3])]
    losses = [f"{step['loss']:.4f}" for step in (scaled[3], unscaled[3])]
    rows = rows_of(blocks.float16_table())
    assert len(rows) == 4
    assert rows[3] == ["3", *last, *losses]
    assert last[0] == "0 %"


# what to do first


def test_what_to_do_first_on_a_cpu_is_worth_what_the_records_say():
    memory_s01 = times_as_fast("zen3-memory-s01", "both from outside", "plain")
    memory_s10 = times_as_fast("zen3-memory-s10", "both from outside", "plain")
    nanogpt = times_as_fast("zen3-gpt2-nanogpt", "nanoGPT with the variables", "nanoGPT")
    autocast = times_as_fast(EPYC, "s03_bf16", "s02_tf32")
    compiled = times_as_fast(EPYC, "s04_compile", "s03_bf16")
    vocab_with_16_bits = times_as_fast(EPYC, "s06_vocab", "s05_flash")
    fused = times_as_fast(EPYC, "s10_fused", "s09_decay")
    vocab = times_as_fast(ZEN3, "s06_vocab", "s05_flash")
    rows = rows_of(blocks.first_table())
    assert rows[0][2:] == [
        f"{memory_s01} (s01), {memory_s10} (s10), {nanogpt} (nanoGPT)",
        "[s01](results/zen3-memory-s01.md), [s10](results/zen3-memory-s10.md), [nanoGPT](results/zen3-gpt2-nanogpt.md)",
    ]
    times = f"{autocast}, then {compiled}, {vocab_with_16_bits}, {fused}"
    assert rows[1][2:] == [times, "[EPYC with bf16](results/epyc-2-cores.md), compiled from s04 on"]
    assert rows[2][2:] == [vocab, "[EPYC, Zen 3](results/zen3-float32.md), only after compilation and flash attention"]


@pytest.mark.parametrize("bench, row, left_out", [(EPYC, 1, set()), (ZEN3, 2, {"s05"})])
def test_what_to_do_first_on_a_cpu_is_what_its_bench_calls_faster(bench, row, left_out):
    """README says why s05 is left out on Zen 3. s01 is faster than plain by memory, which has a row of its own."""
    faster = set()
    for line in read_page(RESULTS / f"{bench}.md").splitlines():
        if line.startswith("| [s") and "faster" in cells_of(line)[-1].split("; "):
            faster.add(line[3:6])
    named = set(re.findall(r"\((s\d\d)\)", rows_of(blocks.first_table())[row][1]))
    assert named == faster - {"s01"} - left_out


def times_of_others(technique, without=None):
    """The column "times" of the lessons' rows of a technique on GPUs, in rising order.

    without: a word that a row must not have, or None.
    """
    times = []
    for row in re.findall(rf"^\| {technique} \|.*", read_page(LESSONS), re.MULTILINE):
        cells = cells_of(row)
        is_left = without is not None and without in row
        if len(cells) == 6 and not is_left:
            times.append(cells[4].strip("*"))
    return sorted(times, key=float)


def test_what_to_do_first_on_a_gpu_is_what_others_measured():
    """Compiling in float32 was slower for one of them; here autocast comes before."""
    tf32, autocast = times_of_others("TF32"), times_of_others("bf16 autocast")
    compiled, flash = times_of_others("compile", without="float32"), times_of_others("flash attention")
    one_card, several = rows_of(blocks.first_table())[3:]
    after_tf32 = f"{autocast[0]}, {compiled[0]} to {compiled[-1]} (after autocast), {flash[0]} to {flash[-1]}"
    ranges = f"{tf32[0]} to {tf32[-1]}, then {after_tf32}"
    assert one_card[2] == ranges
    assert times_of_others("DDP, one card to four") == [several[2].removesuffix(" on four")]
