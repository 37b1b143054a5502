"""The generated blocks of README.md and of stages/README.md: diffs of stages, and tables of what the records say.

pages.py puts each between its two comments. Every function here returns the markdown of one block, or a piece of
one. Imports no torch. Who imports it has put stages/ on the import path.
"""

from harness import arithmetic, ladder, page, parts
from harness.results import (
    PEAK,
    Results,
    ResultsError,
    mean_estimate,
    median_estimate,
    name_at_rate,
    rate_text,
    read,
    run_of,
    stage_and_rate,
)

import difflib
import functools
import statistics
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"

# the records of the two CPUs whose measurements stand beside the predictions, and what the tables call them
EPYC, ZEN3 = "epyc-2-cores", "zen3-float32"
CPU_BENCHES = {EPYC: "EPYC with bf16", ZEN3: "EPYC, Zen 3"}
MEMORY_BENCH = "zen3-memory"  # begins the names of the records of the mode `memory`
NANOGPT_BENCH = "zen3-gpt2-nanogpt"
# the records of the held-out losses at several rates, from the fewest tokens a step to the most
LOSS_BENCHES = ("zen3-loss-rates", "zen3-loss-batch")
# s06, s07, and the scripts of one's own that have a half of what s07 changes, or another beta
HALVES = ("s06_vocab", "clipping_alone", "beta_alone", "s07_clip", "long_beta")
# what each of two runs with one difference shows: the words of the table, the run that has it, and the other one
DIFFERENCES = (
    ("clipping, where the second beta is 0.999", "clipping_alone", "s06_vocab"),
    ("clipping, where it is 0.95", "s07_clip", "beta_alone"),
    ("0.95 in place of 0.999, without clipping", "beta_alone", "s06_vocab"),
    ("0.95 in place of 0.999, with clipping", "s07_clip", "clipping_alone"),
    ("0.99995 in place of 0.999, with clipping", "long_beta", "clipping_alone"),
)
# the record of s06 and s07, and that of the scripts, on the same batches
RATES_BENCH = "zen3-loss-rates"
HALVES_BENCH = "zen3-loss-halves"
# what a step of micro at T 1024 allocates in tensors of over 32 MB, which glibc always gives back: how many as large
# as the logits in float32, and how many as large as the embedding's weight
LARGE_TENSORS = {
    "s01": (4, 4),  # logits, log_softmax and their gradients; two gradients, and two temporaries of AdamW
    "s04": (1, 4),  # log_softmax is fused, and the gradient of the logits overwrites them
    "s10": (1, 2),  # fused AdamW has no temporaries
}
# The stages that were profiled on a machine, by the record of its bench, whose rates are medians over its rounds; and
# what begins the names of the machine's records in results/profile.
PROFILED = {
    EPYC: ("s01", "s03", "s04", "s05", "s09", "s10", "s11"),
    ZEN3: ("s01", "s04", "s05", "s06", "s09", "s10", "s11", "s12"),
}
PROFILE_PREFIX = {EPYC: "", ZEN3: "zen3-"}
PARTS = (*parts.PATTERNS, parts.REST, "the step")  # of a profiled step, in the order in which they are shown
# The profiles that explain the gap between what a stage should be worth and what it was: (record of the bench, stage).
# There is none of s02, and on Zen 3, where s03 is s01, none of s03.
GAPS = {
    "s03": ((EPYC, "s01"), (EPYC, "s03")),
    "s04": ((EPYC, "s03"), (EPYC, "s04"), (ZEN3, "s01"), (ZEN3, "s04")),
    "s05": ((EPYC, "s04"), (EPYC, "s05"), (ZEN3, "s04"), (ZEN3, "s05")),
    "s10": ((EPYC, "s09"), (EPYC, "s10"), (ZEN3, "s09"), (ZEN3, "s10")),
}
# An A100 with 80 GB by NVIDIA's datasheet, and the steps of gpt2 at B 16, T 1024 that the lecture shows on one, in ms.
# It has no figure for s07 to s09, s11 and s12, and fuses AdamW right after it has padded the vocabulary.
A100 = arithmetic.Rates({"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12}, copy=2.039e12)
ON_A100 = ladder.Facts(
    environment={"tf32": True, "device": "cuda"},
    settings={"amp_dtype": "bfloat16", "compile": True, "accum": 4, "world_size": 1, "batch_size": 16, "seq_len": 1024},
    fallbacks={},
)
GPT2 = {"vocab_size": 50257, "n_layer": 12, "n_head": 12, "n_embd": 768}
LECTURE_MS = {"s01": 1000, "s02": 333, "s03": 300, "s04": 130, "s05": 96, "s06": 93, "s10": 90}
# What the operations between two matmuls go over. Each line has the tensor, how many numbers it has, what PyTorch
# does with it one by one, and what a compiler leaves of that.
PASSES = (
    ("scores", "L B n_head T²", arithmetic.EAGER_SCORES, arithmetic.FUSED_SCORES),
    ("logits", "B T V", arithmetic.EAGER_LOGITS, arithmetic.FUSED_LOGITS),
    ("residual stream", "(2 L + 1) B T C", arithmetic.EAGER_RESIDUAL, arithmetic.FUSED_RESIDUAL),
    ("GELU's input", "4 L B T C", arithmetic.GELU, arithmetic.GELU),
    ("weights, by autocast", "12 L C² + V C", arithmetic.WEIGHT_CASTS, arithmetic.WEIGHT_CASTS),
)
MISREAD = """\
| mistake | what it says | what the records say |
| :-- | :-- | :-- |
| compilation in the average: all {steps} steps of s04 | {mean} ms per step | {ms} after {s} s of warm-up |
| CUDA's memory meter, where there is no GPU: s04 | 0.00 GB | {memory} GB ({meter}) |
| one step of each, instead of many: s05 over s04 | anything from {low} to {high} times as fast | {flash} |
| dt compared where a step holds more tokens: s11 over s10 | {by_dt} times as fast | {accum}, by tok/sec |
| two runs at different times: two steps of {twice} | {scatter} times as fast | {control}, as an A/A pair |"""


@functools.cache
def record(name):
    """The Results of results/NAME.jsonl."""
    return Results(RESULTS / f"{name}.jsonl")


def row_named(results, short):
    """The whole name of a row, such as s04_compile for s04. Raises ResultsError where there is none."""
    for name in results.rows:
        if page.short(name) == short:
            return name
    raise ResultsError(f"a figure is of the row {short!r}, and its record has {', '.join(results.rows)}")


def step_ms(results, stage):
    """The ms of a stage's step, the median."""
    return results.summary(row_named(results, stage))["dt_ms"]


def memory_gb(results, stage):
    """The most memory that a stage held, in GB."""
    return results.summary(row_named(results, stage))["memory"] / 1e9


def warmup_s(results, stage):
    """The seconds that a stage's warm-up took, compilation included."""
    return results.summary(row_named(results, stage))["warmup_s"]


def ratio(results, stage, base):
    """How many times as fast a stage is as another, such as "1.82 ± 0.06"."""
    return results.compare(row_named(results, stage), row_named(results, base)).text()


def diff(old_stage, new_stage):
    """The lines of code that differ between two stages, a block of markdown.

    One line around each place is shown too. A line that only moved to the right does not count as different.
    """
    _, old_code = ladder.docstring_and_code(old_stage)
    _, new_code = ladder.docstring_and_code(new_stage)
    old, new = old_code.splitlines(), new_code.splitlines()
    old_words = [line.strip() for line in old]
    new_words = [line.strip() for line in new]
    matcher = difflib.SequenceMatcher(None, old_words, new_words, autojunk=False)
    lines = []
    for place in matcher.get_grouped_opcodes(1):
        lines.append("@@" if lines else "```diff")
        for kind, old_start, old_end, new_start, new_end in place:
            if kind == "equal":
                lines += [f" {line}" for line in new[new_start:new_end]]
            else:
                lines += [f"-{line}" for line in old[old_start:old_end]]
                lines += [f"+{line}" for line in new[new_start:new_end]]
    lines.append("```")
    return "\n".join(line.rstrip() for line in lines)


def three_digits(value):
    """A figure with three digits, or more where it is a larger number."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    if value >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}"


def rate_cells(rates):
    """The cells of a machine's arithmetic.Rates: TFLOP/s in each dtype, and GB/s of a copy."""
    row = []
    for dtype in ("float32", "tf32", "bfloat16"):
        rate = rates.matmul.get(dtype)
        row.append(page.NOTHING if rate is None else three_digits(rate / 1e12))
    return [*row, three_digits(rates.copy / 1e9)]


def batch_words(size, settings):
    """What a machine trained, by the settings of a run: "micro, B 1, T 1024"."""
    return f"{size}, B {settings['batch_size']}, T {settings['seq_len']}"


def machines_table():
    """The machines beside which the predictions stand: what they train, and how fast they multiply and copy."""
    a100_batch = batch_words("gpt2", ON_A100.settings)
    rows = [["A100", a100_batch, *rate_cells(A100), "rates: the datasheet; steps: the lecture"]]
    for name, machine in CPU_BENCHES.items():
        settings = record(name).any_header()["settings"]
        batch = batch_words(settings["size"], settings)
        rows.append([machine, batch, *rate_cells(record(name).machine_rates()), f"[record](../results/{name}.md)"])
    head = ["", "model", "float32 TFLOP/s", "TF32 TFLOP/s", "bfloat16 TFLOP/s", "a copy's GB/s", "measured in"]
    return page.markdown("llrrrrl", head, rows)


@functools.cache
def profile(bench, stage):
    """{part: (ms measured, ms predicted or None)} of a stage's last step, by results/profile. bench: of PROFILED."""
    run = run_of(read(RESULTS / "profile" / f"{PROFILE_PREFIX[bench]}{stage}.jsonl"))
    measured = run.summary.get("parts") or parts_of_an_old_record(run)
    lines = parts.table(run.header, measured, record(bench).machine_rates(), run.summary["sdpa"])
    return {part: (measured_ms, predicted_ms) for part, measured_ms, predicted_ms in lines}


def parts_of_an_old_record(run):
    """{part: ms} of a record that does not tell who called an operation.

    What several parts of the model call is left to the rest. The optimizer's time is with all that it calls.
    """
    measured = {}
    for operation, (own_ms, total_ms, _) in run.summary["profile"].items():
        part = parts.part_of([operation])
        if part == parts.REST or operation in ("aten::div", "aten::add_", "aten::copy_", "aten::fill_"):
            continue
        ms = total_ms if part == parts.OPTIMIZER else own_ms
        measured[part] = measured.get(part, 0.0) + ms
    step_ms = 1e3 * run.steps[-1]["dt"]
    return measured | {parts.REST: step_ms - sum(measured.values())}


def profile_cell(bench, stage, part):
    """The ms that a part of a profiled step took, and in brackets what was predicted: "105 (22)"."""
    measured, predicted = profile(bench, stage).get(part, (None, None))
    cell = page.NOTHING if measured is None else f"{measured:,.0f}"
    if predicted is not None:
        cell += f" ({predicted:,.0f})"
    return cell


def profile_table(bench):
    """Where the time of a step goes, in ms, with what arithmetic says: a column for each stage that was profiled.

    bench: a key of PROFILED.
    """
    stages = PROFILED[bench]
    rows = []
    for part in PARTS:
        rows.append([part, *(profile_cell(bench, stage, part) for stage in stages)])
    return page.markdown("l" + "r" * len(stages), ["ms", *stages], rows)


def gap_table(profiles):
    """The parts of some profiled steps, a column for each step. profiles: a list of (bench, stage), as in GAPS."""
    rows = []
    for part in PARTS:
        cells = [profile_cell(bench, stage, part) for bench, stage in profiles]
        if any(cell != page.NOTHING for cell in cells):
            rows.append([part, *cells])
    steps = [f"{CPU_BENCHES[bench]}, {stage}" for bench, stage in profiles]
    return page.markdown("l" + "r" * len(steps), ["ms", *steps], rows)


def words_of_numbers(kinds):
    """What a row of the table of passes says of the numbers that an operation reads or writes: "2 wide"."""
    words = []
    for kind in dict.fromkeys(kinds):
        count = kinds.count(kind)
        words.append(kind if count == 1 else f"{count} {kind}")
    return ", ".join(words) or page.NOTHING


def passes_tables():
    """What the operations between two matmuls read and write for each number of their tensor: single, and fused."""
    single_rows, fused_rows = [], []
    for tensor, _, eager, fused in PASSES:
        single_rows += rows_of_passes(tensor, eager)
        if fused != eager:
            fused_rows += rows_of_passes(tensor, fused)
    single = page.markdown("llll", ["tensor", "operation", "reads", "writes"], single_rows)
    fused = page.markdown("llll", ["tensor", "fused kernel", "reads", "writes"], fused_rows)
    return f"{single}\n\nA compiler leaves these kernels of them:\n\n{fused}"


def rows_of_passes(tensor, operations):
    """A row for each operation that goes over a tensor, with what it reads and writes."""
    rows = []
    for operation in operations:
        name = f"{operation.name} *" if operation.is_cast else operation.name
        rows.append([tensor, name, words_of_numbers(operation.reads), words_of_numbers(operation.writes)])
    return rows


def bytes_table():
    """The bytes that a step moves for each number of a tensor: one operation after the other, and fused."""
    works = [
        arithmetic.Work(GPT2, 1, 1024),
        arithmetic.Work(GPT2, 1, 1024, amp_dtype="bfloat16"),
        arithmetic.Work(GPT2, 1, 1024, amp_dtype="bfloat16", softmax_is_wide=True),
    ]
    rows = []
    for tensor, count, eager, fused in PASSES:
        row = [tensor, count]
        for work in works:
            row.append(f"{arithmetic.bytes_of(eager, work)} → {arithmetic.bytes_of(fused, work)}")
        rows.append(row)
    head = ["tensor", "numbers", "float32", "bf16 on a CPU", "bf16 on CUDA"]
    return page.markdown("llrrr", head, rows)


def a100_seconds(stage):
    """The seconds that a stage's micro-batch should take on an A100."""
    return arithmetic.seconds(ladder.work_of(stage, ON_A100, GPT2), A100)


def cpu_parts(bench, stage):
    """{part: seconds} of a stage's micro-batch on the machine of a bench."""
    work = ladder.work_of(stage, bench.facts(stage), bench.header(stage)["shape"])
    return arithmetic.seconds_of_parts(work, bench.machine_rates())


def s01_table():
    """What the parts of s01's step should take, in ms, and what it took."""
    s01 = ladder.names()[0]
    parts_on_a100 = arithmetic.seconds_of_parts(ladder.work_of(s01, ON_A100, GPT2), A100)
    machines = [("A100", parts_on_a100, LECTURE_MS["s01"])]
    for name, machine in CPU_BENCHES.items():
        bench = record(name)
        machines.append((machine, cpu_parts(bench, s01), bench.summary(s01)["dt_ms"]))
    rows = []
    for machine, seconds, measured_ms in machines:
        predicted_ms = [1e3 * value for value in seconds.values()]
        rows.append([machine, *(f"{ms:,.0f}" for ms in [*predicted_ms, sum(predicted_ms), measured_ms])])
    head = ["ms", *machines[0][1], "all predicted", "measured"]
    return page.markdown("lrrrrrrrr", head, rows)


def a100_cells(name, above):
    """The cells of an A100 in a stage's table: the step before, the saving, predicted, measured."""
    short = page.short(name)
    before_ms = [ms for stage, ms in LECTURE_MS.items() if stage < short][-1]
    saved_ms = 1e3 * (a100_seconds(above) - a100_seconds(name))
    saved, predicted = f"{saved_ms:.1f}", f"{before_ms / (before_ms - saved_ms):.2f}"
    if not ladder.find(name).is_predictable:
        saved, predicted = "unknown", "unknown"
    measured = page.NOTHING
    if short in LECTURE_MS:
        measured = f"{before_ms / LECTURE_MS[short]:.2f} ({LECTURE_MS[short]} ms)"
    return [f"{before_ms:,}", saved, predicted, measured]


def cpu_cells(bench, name, above):
    """The cells of a bench on a CPU in a stage's table: the step before, the saving, predicted, measured."""
    if name not in bench.rows:  # the stage is younger than the record
        return 4 * [page.NOTHING]
    before_ms = 1e3 * bench.seconds_per_micro_batch(above)
    saving = bench.predicted_saving(name)
    saved = "unknown" if saving is None else f"{1e3 * saving:.1f}"
    measured = f"{bench.compare(name, above).text(3)} ({bench.verdict(name)})"
    return [f"{before_ms:,.0f}", saved, page.prediction(bench, name), measured]


def worth_table(name, above):
    """What a stage should be worth and what it was, in times as fast as the one before, on each machine."""
    rows = [["A100, gpt2", *a100_cells(name, above)]]
    for record_name, machine in CPU_BENCHES.items():
        rows.append([f"{machine}, micro", *cpu_cells(record(record_name), name, above)])
    head = ["", "ms of a micro-batch before", "ms it should save", "predicted", "measured"]
    return page.markdown("lrrrr", head, rows)


def worth(name, above):
    """worth_table(), and below it the parts of the profiled steps that explain the gap, where there are any."""
    table = worth_table(name, above)
    profiles = GAPS.get(page.short(name))
    if profiles is None:
        return table
    words = (
        "The parts of one profiled step, in ms, and in brackets what was predicted. On the EPYC with bf16, the\n"
        "division of the scores, the additions to the residual stream and most casts count with the rest, although\n"
        "their prediction stands in the row to which they belong:"
    )
    return "\n\n".join([table, words, gap_table(profiles)])


def loss_table(name, above):
    """A stage's held-out loss at its best rate against that of the stage above at its own, by tokens a step.

    A bench that did not train both of them has no row.
    """
    rows = []
    for record_name in LOSS_BENCHES:
        bench = record(record_name)
        if name in bench.stages() and above in bench.stages():
            rows.append(loss_row(bench, name, above))
    before, after = page.short(above), page.short(name)
    losses = ["held-out loss (seeds)", f"best rate of {after}", "held-out loss (seeds)"]
    head = ["tokens a step", f"best rate of {before}", *losses, "difference"]
    return page.markdown("rrrrrr", head, rows)


def loss_row(bench, name, above):
    """The cells of a bench of several rates in a stage's table of losses."""
    settings = bench.any_header()["settings"]
    tokens = f"{settings['batch_size'] * settings['seq_len']:,}"
    best_rows = bench.best_rows()
    if name not in best_rows or above not in best_rows:  # one of them has no loss yet
        return [tokens] + 5 * [page.NOTHING]
    best, best_above = best_rows[name], best_rows[above]
    _, rate = stage_and_rate(best)
    _, rate_above = stage_and_rate(best_above)
    loss, loss_above = page.loss_cell(bench, best), page.loss_cell(bench, best_above)
    cell = page.comparison(bench, best, best_above, 4)
    difference = bench.compare(best, best_above)
    verdict = bench.verdict_on_loss(difference) if difference else ""
    if verdict:
        cell += f" ({verdict})"
    return [tokens, rate_above, loss_above, rate, loss, cell]


def halves_table():
    """The held-out losses of s06, of s07 and of its halves by learning rate: the mean over the seeds, and the range."""
    rates = record(HALVES_BENCH).rates
    rows = []
    for stage in HALVES:
        cells = []
        for rate in rates:
            losses = losses_of_seeds(stage, rate)
            cells.append(f"{statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})")
        rows.append([page.stage_link(stage, ""), *cells])
    return page.markdown("lrrr", ["", *(f"lr {rate_text(rate)}" for rate in rates)], rows)


def differences_table():
    """What each half of s07 does to the held-out loss, by learning rate: the mean over the seeds with its ±."""
    rates = record(HALVES_BENCH).rates
    rows = []
    for words, changed, base in DIFFERENCES:
        cells = []
        for rate in rates:
            pairs = zip(losses_of_seeds(changed, rate), losses_of_seeds(base, rate), strict=True)
            difference = mean_estimate([loss - loss_of_base for loss, loss_of_base in pairs])
            cells.append(f"{difference.value:+.3f} ± {difference.spread:.3f}")
        rows.append([words, *cells])
    return page.markdown("lrrr", ["what changes", *(f"lr {rate_text(rate)}" for rate in rates)], rows)


def losses_of_seeds(stage, rate):
    """The held-out losses of one of HALVES at a rate, a list in the order of the seeds."""
    bench = record(RATES_BENCH) if ladder.find(stage) else record(HALVES_BENCH)
    samples = bench.samples(name_at_rate(stage, rate))
    return [samples[seed] for seed in sorted(samples)]


def scale_table(bench):
    """What one and two ranks reach, and how long their all-reduce takes by itself. bench: of the mode `scale`."""
    one_rank, two_ranks = "1 rank", "2 ranks"
    row_of_one = [one_rank, page.speed_cells(bench, one_rank)["tok/sec"]] + 4 * [page.NOTHING]
    row_of_two = [
        two_ranks,
        page.speed_cells(bench, two_ranks)["tok/sec"],
        f"{bench.predicted(two_ranks):.2f}",
        ratio(bench, two_ranks, one_rank),
        f"{100 * bench.efficiency(two_ranks):.0f}",
        f"{1e3 * bench.all_reduce_seconds(two_ranks):.1f}",
    ]
    head = ["", "tok/sec", "times one rank, predicted", "measured", "efficiency in %", "all-reduce ms"]
    return page.markdown("lrrrrr", head, [row_of_one, row_of_two])


def first_table():
    """What to do first in a script of one's own, by what it trains on. The links are from README.md.

    The figures of GPUs are the smallest and the largest of the lessons' table of what others measured; those of
    torch.compile leave out a run in float32.
    """
    memory_s01 = ratio(memory_bench("s01"), "both from outside", ladder.PLAIN)
    memory_s10 = ratio(memory_bench("s10"), "both from outside", ladder.PLAIN)
    nanogpt = ratio(record(NANOGPT_BENCH), "nanoGPT with the variables", "nanoGPT")
    memory_links = f"[s01](results/{MEMORY_BENCH}-s01.md), [s10](results/{MEMORY_BENCH}-s10.md), "
    memory_links += f"[nanoGPT](results/{NANOGPT_BENCH}.md)"
    autocast, compiled = ratio(record(EPYC), "s03", "s02"), ratio(record(EPYC), "s04", "s03")
    vocab_with_16_bits, fused = ratio(record(EPYC), "s06", "s05"), ratio(record(EPYC), "s10", "s09")
    vocab = ratio(record(ZEN3), "s06", "s05")
    gpu = "TF32 (s02), then bf16 autocast (s03), torch.compile (s04), flash attention (s05)"
    times_on_gpus = "1.2 to 3.0, then 1.1, 1.2 to 2.3 (after autocast), 1.3 to 1.7"
    gpu_link = "[others](stages/README.md#what-others-measured-on-gpus)"
    rows = [
        [
            "a CPU, on Linux with glibc",
            "the [three memory variables](stages/README.md#before-s01--memory), no change of code",
            f"{memory_s01} (s01), {memory_s10} (s10), {nanogpt} (nanoGPT)",
            memory_links,
        ],
        [
            "a CPU with bf16 units",
            "bf16 autocast (s03), then torch.compile (s04), a padded vocabulary (s06), fused AdamW (s10)",
            f"{autocast}, then {compiled}, {vocab_with_16_bits}, {fused}",
            f"[{CPU_BENCHES[EPYC]}](results/{EPYC}.md), compiled from s04 on",
        ],
        [
            "a CPU without them",
            "a padded vocabulary (s06)",
            vocab,
            f"[{CPU_BENCHES[ZEN3]}](results/{ZEN3}.md), only after compilation and flash attention",
        ],
        ["an NVIDIA GPU, Ampere or newer", gpu, times_on_gpus, gpu_link],
        ["several GPUs", "DistributedDataParallel (s12)", "2.95 on four", gpu_link],
    ]
    return page.markdown("llll", ["I train on", "first", "times as fast", "measured"], rows)


@functools.cache
def exercise(name):
    """The step lines, a list of dicts, of a run that results/exercises keeps."""
    return run_of(read(RESULTS / "exercises" / f"{name}.jsonl")).steps


def bad_batch_table():
    """Loss and norm around two steps of random ids, 40 and 41: clipped at a norm of 1, and at one of 1e9."""
    clipped_steps, unclipped_steps = exercise("bad-batch-1.0"), exercise("bad-batch-1e9")
    rows = []
    for i in (*range(38, 46), 79):
        clipped, unclipped = clipped_steps[i], unclipped_steps[i]
        figures = (clipped["loss"], clipped["norm"], unclipped["loss"], unclipped["norm"])
        rows.append([str(i), *(f"{figure:.2f}" for figure in figures)])
    head = ["step", "loss, clipped at 1", "norm", "loss, not clipped", "norm"]
    return page.markdown("rrrrr", head, rows)


def division_table():
    """Loss and norm of the last step of accumulation, with the division by the number of micro-batches and without."""
    rows = []
    for label, name in (("divided", "divided"), ("not divided", "undivided")):
        last_step = exercise(name)[-1]
        rows.append([label, f"{last_step['loss']:.4f}", f"{last_step['norm']:.4f}"])
    return page.markdown("lrr", ["", "loss at the last step", "norm at the last step"], rows)


def float16_table():
    """The share of zeros in the gradient of the logits' matrix in float16, by step, with the scaler and without.

    The two runs logged this share in place of the norm.
    """
    rows = []
    for scaled, unscaled in zip(exercise("float16-scaled"), exercise("float16-unscaled"), strict=True):
        shares = [f"{100 * step['norm']:.0f} %" for step in (scaled, unscaled)]
        rows.append([str(scaled["step"]), *shares, f"{scaled['loss']:.4f}", f"{unscaled['loss']:.4f}"])
    head = ["step", "zeros, with the scaler", "without", "loss, with the scaler", "without"]
    return page.markdown("rrrrr", head, rows)


def memory_bench(stage):
    """The Results of the mode `memory` of a stage, such as "s04"."""
    return record(f"{MEMORY_BENCH}-{stage}")


def memory_table():
    """What each way to get memory is worth, by stage, with the memory and the page faults of s01."""
    first = memory_bench("s01")
    rows = []
    for name in first.rows:
        ratios = []
        for stage in LARGE_TENSORS:
            bench = memory_bench(stage)
            estimate = bench.compare(name, ladder.PLAIN)
            ratios.append(estimate.text() if estimate else "1")
        memory = page.gigabytes(first.summary(name)["memory"])
        rows.append([name, *ratios, memory, f"{first.page_faults(name):,.0f}"])
    stages = list(LARGE_TENSORS)
    return page.markdown("lrrrrr", ["", *stages, f"{stages[0]}, GB", f"{stages[0]}, page faults in a step"], rows)


def large_bytes(stage, shape, seq_len):
    """The bytes of the large tensors that a step of a stage allocates, by LARGE_TENSORS; B is 1."""
    logits, weights = LARGE_TENSORS[stage]
    vocab_size = shape["vocab_size"]
    return 4 * vocab_size * (logits * seq_len + weights * shape["n_embd"])


def clearing_table():
    """What the system's clearing of pages should cost a step of the row `plain`, and what keeping them saves."""
    rows = []
    for stage in LARGE_TENSORS:
        bench = memory_bench(stage)
        header = bench.any_header()
        nbytes = large_bytes(stage, header["shape"], header["settings"]["seq_len"])
        rate = statistics.median(step["clear"]["4 kB"] for step in bench.counted_steps(PEAK))
        plain, kept = bench.samples(ladder.PLAIN), bench.samples("freed memory kept")
        tokens = header["tokens_per_step"]
        saved_ms = median_estimate([1e3 * tokens * (plain[step] - kept[step]) for step in plain])
        rows.append(
            [
                stage,
                f"{nbytes / 1e9:.2f}",
                f"{nbytes / 4096:,.0f}",
                f"{bench.page_faults(ladder.PLAIN):,.0f}",
                f"{rate / 1e9:.2f}",
                f"{1e3 * nbytes / rate:.0f}",
                saved_ms.text(digits=0),
            ]
        )
    head = ["", "GB in large tensors", "pages", "page faults measured", "GB/s cleared", "predicted ms", "measured ms"]
    return page.markdown("lrrrrrr", head, rows)


def misread_table():
    """What the records of a bench say when they are read wrongly, beside what they say."""
    bench = record(EPYC)
    s04, s05 = row_named(bench, "s04"), row_named(bench, "s05")
    dts = [step["dt"] for step in bench.runs_of(s04)[0].steps]
    times_s04, times_s05 = bench.samples(s04), bench.samples(s05)
    ratios = [times_s04[key] / times_s05[key] for key in times_s04.keys() & times_s05.keys()]
    control, twice = list(bench.controls())[0]
    times_twice = bench.samples(twice).values()
    return MISREAD.format(
        steps=len(dts),
        mean=f"{1e3 * statistics.mean(dts):,.0f}",
        ms=f"{step_ms(bench, 's04'):,.0f}",
        s=f"{warmup_s(bench, 's04'):.0f}",
        memory=f"{memory_gb(bench, 's04'):.2f}",
        meter=bench.summary(s04)["meter"],
        low=f"{min(ratios):.2f}",
        high=f"{max(ratios):.2f}",
        flash=ratio(bench, "s05", "s04"),
        by_dt=f"{step_ms(bench, 's10') / step_ms(bench, 's11'):.2f}",
        accum=ratio(bench, "s11", "s10"),
        twice=page.short(twice),
        scatter=f"{max(times_twice) / min(times_twice):.2f}",
        control=bench.compare(control, twice).text(),
    )
