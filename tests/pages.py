"""Draws those parts of the pages that are taken from the stages and from the records.

    python tests/pages.py            draw every page that is stale, and name it
    python tests/pages.py --check    write nothing; name every page that is stale, with exit status 1

The pages are results/NAME.md for each results/NAME.jsonl, README.md and stages/README.md. In the last two,
what is drawn stands between two comments: a diff or a table between <!-- NAME --> and <!-- end -->, and a
figure in a sentence between <!-- = WORDS --> and <!-- . -->, where the words are those of results_figure() or
run_figure(). Imports no torch, so that it takes a second.
"""

import argparse
import difflib
import functools
import os
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "stages"))

from harness import arithmetic, ladder, page, parts
from harness.results import PEAK, Results, ResultsError, read, run_of

README = ROOT / "README.md"
LESSONS = ROOT / "stages" / "README.md"
RESULTS = ROOT / "results"

LESSONS_BENCH = "epyc-2-cores"  # the record of the lessons' figures of a CPU, where they name no other
MEMORY_BENCH = "zen3-memory"  # begins the names of the records of the mode `memory` that the lessons show
# what a step of micro at T 1024 allocates in tensors of over 32 MB, which glibc always gives back: how many as large
# as the logits in float32, and how many as large as the embedding's weight
LARGE_TENSORS = {
    "s01": (4, 4),  # logits, log_softmax and their gradients; two gradients, and two temporaries of AdamW
    "s04": (1, 4),  # log_softmax is fused, and the gradient of the logits overwrites them
    "s10": (1, 2),  # fused AdamW has no temporaries
}
# The stages that were profiled, by the machine that begins the names of their records in results/profile; and the bench
# of that machine, whose rates are medians over its rounds.
PROFILED = {
    "": ("s01", "s03", "s04", "s05", "s09", "s10", "s11"),
    "zen3-": ("s01", "s04", "s05", "s06", "s09", "s10", "s11", "s12"),
}
BENCH_OF_PROFILE = {"": LESSONS_BENCH, "zen3-": "zen3-float32"}
# the records whose measurements stand beside the lessons' predictions, with what the table calls their machines
CPU_BENCHES = {"epyc-2-cores": "EPYC with bf16", "zen3-float32": "EPYC, Zen 3"}
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


def between(text, name, content):
    """stages/README.md's text with the content between <!-- name --> and <!-- end -->.

    Raises ResultsError where one of the two is missing.
    """
    before, begin, after_begin = text.partition(f"<!-- {name} -->\n")
    _, end, after = after_begin.partition("<!-- end -->")
    if not begin or not end:
        both = f"<!-- {name} --> and, below it, <!-- end -->"
        raise ResultsError(f"stages/README.md must hold {both}: put them there")
    return f"{before}{begin}{content}\n{end}{after}"


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


@functools.cache
def profile(stage, machine=""):
    """{part: (ms measured, ms predicted or None)} of a stage's last step, by results/profile. machine: of PROFILED."""
    run = run_of(read(RESULTS / "profile" / f"{machine}{stage}.jsonl"))
    rates = record(BENCH_OF_PROFILE[machine]).machine_rates()
    measured = run.summary.get("parts") or parts_of_an_old_record(run)
    lines = parts.table(run.header, measured, rates)
    return {part: (measured_ms, predicted_ms) for part, measured_ms, predicted_ms in lines}


def parts_of_an_old_record(run):
    """{part: ms} of a record that does not tell who called an operation.

    What AdamW and the model both call is left to the rest.
    """
    measured = {}
    for operation, (own_ms, total_ms, _) in run.summary["profile"].items():
        part = parts.part_of([operation])
        if operation in ("aten::div", "aten::add_", "aten::copy_", "aten::fill_"):
            part = parts.REST
        # the optimizer's time is with all that it calls
        measured[part] = measured.get(part, 0.0) + (total_ms if part == parts.OPTIMIZER else own_ms)
    step_ms = 1e3 * run.steps[-1]["dt"]
    return measured | {parts.REST: step_ms - sum(ms for part, ms in measured.items() if part != parts.REST)}


def profile_table(machine):
    """Where the time of a step goes, in ms, with what arithmetic says: a column for each stage that was profiled.

    machine: a key of PROFILED.
    """
    stages = PROFILED[machine]
    rows = []
    for part in (*parts.PATTERNS, parts.REST, "the step"):
        row = [part]
        for stage in stages:
            measured, predicted = profile(stage, machine).get(part, (None, None))
            cell = page.NOTHING if measured is None else f"{measured:,.0f}"
            if predicted is not None:
                cell += f" ({predicted:,.0f})"
            row.append(cell)
        rows.append(row)
    return page.markdown("l" + "r" * len(stages), ["ms", *stages], rows)


def words_of_numbers(kinds):
    """What a row of the table of passes says of the numbers that an operation reads or writes: "2 wide"."""
    words = []
    for kind in dict.fromkeys(kinds):
        count = kinds.count(kind)
        words.append(kind if count == 1 else f"{count} {kind}")
    return ", ".join(words) or page.NOTHING


def passes_table():
    """Every operation between two matmuls, with the numbers that it reads and writes for each one of its tensor."""
    rows = []
    for tensor, _, eager, _ in PASSES:
        for operation in eager:
            name = f"{operation.name} *" if operation.is_cast else operation.name
            rows.append([tensor, name, words_of_numbers(operation.reads), words_of_numbers(operation.writes)])
    return page.markdown("llll", ["tensor", "operation", "reads", "writes"], rows)


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
        saved = bench.summary(ladder.PLAIN)["dt_ms"] - bench.summary("freed memory kept")["dt_ms"]
        rows.append(
            [
                stage,
                f"{nbytes / 1e9:.2f}",
                f"{nbytes / 4096:,.0f}",
                f"{bench.page_faults(ladder.PLAIN):,.0f}",
                f"{rate / 1e9:.2f}",
                f"{1e3 * nbytes / rate:.0f}",
                f"{saved:.0f}",
            ]
        )
    head = ["", "GB in large tensors", "pages", "page faults measured", "GB/s cleared", "predicted ms", "measured ms"]
    return page.markdown("lrrrrrr", head, rows)


def misread_table(bench):
    """What a bench's records say when they are read wrongly, beside what they say."""
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


def peak(results, dtype):
    """The FLOP/s that the large matmuls of the probe reach in a dtype, such as "float32"."""
    return results.matmul_rates()[dtype]


def bandwidth(results):
    """The bytes/s that a copy of a large tensor moves, reads and writes counted."""
    return results.machine_rates().copy


def step_ms(results, stage):
    """The ms of a stage's step, the median."""
    return results.summary(row_named(results, stage))["dt_ms"]


def saved_ms(results, stage, base):
    """The ms by which a stage's step is shorter than that of another."""
    return step_ms(results, base) - step_ms(results, stage)


def memory_gb(results, stage):
    """The most memory that a stage held, in GB."""
    return results.summary(row_named(results, stage))["memory"] / 1e9


def warmup_s(results, stage):
    """The seconds that a stage's warm-up took, compilation included."""
    return results.summary(row_named(results, stage))["warmup_s"]


def ratio(results, stage, base):
    """How many times as fast a stage is as another, such as "1.82 ± 0.06"."""
    return results.compare(row_named(results, stage), row_named(results, base)).text()


def tokens_per_second(results, name):
    """The tokens per second of a row, such as "s12" or "2 ranks"."""
    return results.summary(row_named(results, name))["tok_per_sec"]


def efficiency_percent(results):
    """What two processes reach of twice the speed of one, in percent."""
    return 100 * results.compare("2 ranks", "1 rank").value / 2


def largest_batches(results):
    """The largest batch of each stage that fits, such as "1 in s01, 2 in s03"."""
    parts = []
    for stage in results.rows:
        fitting = []
        for batch, name in results.batches(stage).items():
            last_run = results.runs_of(name)[-1]
            if last_run.summary and not last_run.error:
                fitting.append(batch)
        parts.append(f"{max(fitting)} in {page.short(stage)}")
    return ", ".join(parts)


def loss_change(results, stage):
    """The held-out loss of a stage against that of the row above, such as "-0.0777 ± 0.0569 (lower)"."""
    name = row_named(results, stage)
    difference = results.compare(name, results.row_above(name))
    return f"{difference.value:+.4f} ± {difference.spread:.4f} ({results.verdict(name)})"


def last_figure(name, key):
    """A figure of the last step of an exercise's run: "loss" or "norm"."""
    return exercise(name)[-1][key]


def mean_loss(name):
    """The mean training loss of the last 100 steps of an exercise's run."""
    return statistics.mean(step["loss"] for step in exercise(name)[-100:])


def results_figure(words, results):
    """The text of a figure of a bench, by its words, a list; None where no figure of a bench is called so."""
    match words:
        case ["peak", dtype]:
            return f"{peak(results, dtype) / 1e12:.3f}"
        case ["bandwidth"]:
            return f"{bandwidth(results) / 1e9:.1f}"
        case ["saved", stage, base]:
            return f"{saved_ms(results, stage, base):.0f}"
        case ["memory", stage]:
            return f"{memory_gb(results, stage):.2f}"
        case ["warm-up", stage]:
            return f"{warmup_s(results, stage):.0f}"
        case ["speed", *name]:
            return f"{tokens_per_second(results, ' '.join(name)):,.0f}"
        case ["ratio", stage, base]:
            return ratio(results, stage, base)
        case ["two", "ranks"]:
            return ratio(results, "2 ranks", "1 rank")
        case ["efficiency"]:
            return f"{efficiency_percent(results):.0f} %"
        case ["largest", "batches"]:
            return largest_batches(results)
        case ["loss", stage]:
            return loss_change(results, stage)
    return None


def run_figure(words, name):
    """The text of a figure of a single run, by its words, a list; None where no figure of a run is called so.

    name: of the run in results/exercises; "" for a figure of results/profile, whose words name the stage.
    """
    match words:
        case ["profile", stage, *part]:
            measured, _ = profile(stage)[" ".join(part)]
            return f"{measured:.0f}"
        case ["zen3", "lost", *part]:
            before, _ = profile("s04", "zen3-")[" ".join(part)]
            after, _ = profile("s05", "zen3-")[" ".join(part)]
            return f"{before - after:.0f}"
        case ["zen3", stage, *part]:
            measured, _ = profile(stage, "zen3-")[" ".join(part)]
            return f"{measured:.0f}"
        case ["last", key]:
            return f"{last_figure(name, key):.4f}"
        case ["quarter", key]:
            return f"{last_figure(name, key) / 4:.4f}"
        case ["mean", "loss"]:
            return f"{mean_loss(name):.2f}"
    return None


def figure(words, bench):
    """The figure that the words of a comment stand for, as text. Raises ResultsError where none is called so.

    bench: the Results that the page is about. words: "ms s04" is a figure of that bench, "ms s04 of NAME" one
    of results/NAME.jsonl, and "last loss of NAME" one of results/exercises/NAME.jsonl.
    """
    what, _, name = words.partition(" of ")
    text = run_figure(what.split(), name)
    if text is None:
        text = results_figure(what.split(), record(name) if name else bench)
    if text is None:
        raise ResultsError(f"no figure is called {words!r}: take one of run_figure() and results_figure()")
    return text


def with_figures(text, bench):
    """A page's text with every figure of its sentences as the records have it. Raises ResultsError."""
    block = re.search(r"^ {0,3}<!-- = .*", text, re.MULTILINE)
    if block:
        raise ResultsError(f"a line that begins with a comment ends its paragraph: {block[0]}")

    def drawn(match):
        return f"<!-- = {match[1]} -->{figure(match[1], bench)}<!-- . -->"

    return re.sub(r"<!-- = (.*?) -->.*?<!-- \. -->", drawn, text)


def shown_in_readme(text):
    """The name of the record that README.md's text links to below its table.

    Raises ResultsError where there is no such link.
    """
    _, _, after_begin = text.partition(page.BEGIN)
    part, _, _ = after_begin.partition(page.END)
    link = re.search(r"\(results/([\w.+-]+)\.md\)", part)
    if link is None:
        remedy = "python bench.py --render NAME --readme"
        raise ResultsError(f"README.md's table has no link to its record: {remedy}")
    return link[1]


def readme(text):
    """README.md's text with its table and its figures drawn again."""
    name = shown_in_readme(text)
    text = page.between_markers(text, page.readme_part(record(name), name))
    return with_figures(text, record(name))


def lessons(text):
    """stages/README.md's text with its diffs, tables and figures drawn again."""
    bench = record(LESSONS_BENCH)
    names = ladder.names()
    for old_stage, new_stage in zip(names, names[1:], strict=False):
        text = between(text, f"diff {page.short(new_stage)}", diff(old_stage, new_stage))
        text = between(text, f"worth {page.short(new_stage)}", worth_table(new_stage, old_stage))
    text = between(text, "memory", memory_table())
    text = between(text, "clearing", clearing_table())
    text = between(text, "passes", passes_table())
    text = between(text, "bytes", bytes_table())
    text = between(text, "s01", s01_table())
    text = between(text, "profile", profile_table(""))
    text = between(text, "profile zen3", profile_table("zen3-"))
    text = between(text, "bad batch", bad_batch_table())
    text = between(text, "misread", misread_table(bench))
    return with_figures(text, bench)


def records():
    """The paths of the records that git keeps: a bench that was given no name has its date for one."""
    return [path for path in sorted(RESULTS.glob("*.jsonl")) if not path.name.startswith("20")]


def read_page(path):
    """A page's text with its line ends as they are; "" where there is no such page yet."""
    if not path.exists():
        return ""
    return path.read_bytes().decode()


def all_pages():
    """Yield the path of each page, and the text that it should have."""
    for path in records():
        yield path.with_suffix(".md"), page.page(record(path.stem))
    text = read_page(README)
    yield README, readme(text)
    yield LESSONS, lessons(read_page(LESSONS))


def replace(path, text):
    """Write a page at once: whatever stops this process, the old page is there or the new one."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(text.encode())
    os.replace(temporary, path)


def main():
    """The command line; its exit status. A record or a page that can't be used is one line and status 2."""
    parser = argparse.ArgumentParser(description="Draw every page that is stale.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if one is stale")
    args = parser.parse_args()
    status = 0
    try:
        for path, text in all_pages():
            if read_page(path) == text:
                continue
            name = path.relative_to(ROOT)
            if args.check:
                print(f"{name} is stale: python tests/pages.py draws it again")
                status = 1
            else:
                replace(path, text)
                print(f"{name} is drawn again")
    except (ResultsError, OSError) as error:
        print(f"pages.py: error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
