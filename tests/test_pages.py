"""The pages show stages and records as they are, and their commands run. REDRAW=1 draws what is stale."""

from harness import report

import ast
import difflib
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL, STAGES, process

from data import write_whole

README, LESSONS = ROOT / "README.md", ROOT / "stages" / "README.md"
RECORDS = sorted(path for path in (ROOT / "results").glob("*.jsonl") if path.name[:2] != "20")  # see .gitignore


def is_drawn(path, text):
    """Hold that a page is `text`, or write it."""
    if os.environ.get("REDRAW"):
        write_whole(path, text.encode())
    assert path.read_bytes().decode() == text, f"{path} is stale: REDRAW=1 python -m pytest tests/test_pages.py"


def between(page, name, content):
    """The page with `content` between <!-- name --> and <!-- end -->."""
    before, begin, after = page.partition(f"<!-- {name} -->\n")
    assert begin and "<!-- end -->" in after, f"stages/README.md needs <!-- {name} --> and <!-- end -->"
    return f"{before}{begin}{content}\n<!-- end -->{after.partition('<!-- end -->')[2]}"


def code_diff(*sources):
    """What differs in the code of two sources, with a line around it. A line that only moved right does not."""
    old, new = (source.splitlines()[ast.parse(source).body[0].end_lineno :] for source in sources)
    matcher = difflib.SequenceMatcher(None, *([line.strip() for line in lines] for lines in (old, new)), autojunk=False)
    lines = []
    for group in matcher.get_grouped_opcodes(1):
        lines.append("@@")
        for kind, i1, i2, j1, j2 in group:
            lines += ["-" + line for line in old[i1:i2] if kind != "equal"]
            lines += [(" " if kind == "equal" else "+") + line for line in new[j1:j2]]
    return "\n".join(line.rstrip() for line in lines[1:])


MISREAD = """| mistake | what it says | what the records say |
| :-- | :-- | :-- |
| compilation in the average: all {n} steps of s04 | {mean:,.0f} ms per step | {ms:,.0f} after {s:.0f} s of warm-up |
| CUDA's memory meter, where there is no GPU: s04 | 0.00 GB | {memory:.2f} GB ({meter}) |
| one step of each, instead of many: s05 over s04 | anything from {low:.2f} to {high:.2f} times as fast | {flash} |
| dt compared where a step holds more tokens: s11 over s10 | {dts:.2f} times as fast | {accum}, by tok/sec |
| two runs at different times: two steps of {pair} | {spread:.2f} times as fast | {again}, as an A/A pair |"""


def misread(results):
    """What a bench's records say when they are read wrongly, beside what they say."""
    s04, s05, s10, s11 = (STAGES[stage].stem for stage in ("s04", "s05", "s10", "s11"))
    ((_, pair), again), *_ = results.pairs().items()
    one, dts = results.summary(s04), [step["dt"] for step in results.of(s04)[0].steps]
    ours, theirs, steps = (results.samples(name) for name in (s05, s04, pair))
    ratios = sorted(theirs[key] / ours[key] for key in ours.keys() & theirs.keys())
    found = dict(n=len(dts), mean=1e3 * statistics.mean(dts), ms=one["dt_ms"], s=one["warmup_s"], meter=one["meter"])
    found |= dict(memory=one["memory"] / 1e9, low=ratios[0], high=ratios[-1], flash=results.compare(s05, s04).text())
    found |= dict(dts=results.summary(s10)["dt_ms"] / results.summary(s11)["dt_ms"], again=again.text())
    found |= dict(pair=report.short(pair), spread=max(steps.values()) / min(steps.values()))
    return MISREAD.format(accum=results.compare(s11, s10).text(), **found)


# what torch.profiler calls the operations of each row of the profile; the optimizer's are those inside its own
SPENT = {
    "matmuls": r"aten::(mm|addmm|bmm|baddbmm)|.*mkl.*linear.*",
    "softmax, loss and mask": r"aten::(_(log_)?softmax(_backward_data)?|nll_loss.*|masked_fill_?|triu|where)",
    "GELU and LayerNorm": r"aten::(gelu|native_layer_norm)(_backward)?",
    "casts and copies": r"aten::(copy_|_to_copy|clone|contiguous)",
    "fused kernels": r"## Call CompiledFxGraph .*",
    "attention kernel": r"aten::_scaled_dot_product.*",
    "optimizer": r"Optimizer\.step#.*",
}


def profile(stage):
    """{row: ms} of the last step of a stage, by results/profile."""
    run = report.run_of(report.read(ROOT / f"results/profile/{stage}.jsonl"))
    found, step = dict.fromkeys(SPENT, 0.0), 1e3 * run.steps[-1]["dt"]
    for key, (own, total, _) in run.end["profile"].items():
        for row in [row for row, names in SPENT.items() if re.fullmatch(names, key)]:
            found[row] += total if row == "optimizer" else own
    return found | {"everything else": step - sum(found.values()), "the step": step}


def quoted(bench):
    """What the figures of the pages call: figures of the bench that README shows, and of the records beside it."""

    def stem(n):
        return STAGES[f"s{n:02d}"].stem

    def of(name):
        return report.Results(ROOT / f"results/{name}.jsonl")

    def steps(name):
        return report.run_of(report.read(ROOT / f"results/exercises/{name}.jsonl")).steps

    def dt(n):
        return bench.summary(stem(n))["dt_ms"]

    def against(n, base=0, results=bench):
        return results.compare(stem(n), stem(base or n - 1)).text()

    def loss(which, n):
        change = (results := of(f"loss-{which}")).compare(stem(n), results.above(stem(n)))
        return f"{change.value:+.4f} ± {change.spread:.4f} ({report.note(results, stem(n)).removesuffix('; stale')})"

    peak = bench.steps(report.PEAK)
    dtypes = (32, "float32"), (16, "bfloat16")  # ms: what the 111 GFLOP of a step of micro take at the peak
    ms = {bits: 111e12 / statistics.median(step["peak"][dtype] for step in peak) for bits, dtype in dtypes}
    copy = statistics.median(step["copy"] for step in peak)
    limits = report.limit_table(of("xeon-2-cores-limit")).splitlines()[2:]
    return dict(
        P32=f"{111 / ms[32]:.3f}",
        P16=f"{111 / ms[16]:.3f}",
        BW=f"{copy / 1e9:.1f}",
        matmuls=lambda bits, gflop=111: f"{ms[bits] * gflop / 111:.0f}",
        moving=lambda megabytes: f"{1e9 * megabytes / copy:.0f}",
        without_float32=f"{dt(2) - ms[32] + ms[16]:.0f}",
        dt=lambda n: f"{dt(n):.0f}",
        gb=lambda n: f"{bench.summary(stem(n))['memory'] / 1e9:.2f}",
        vs=against,
        xeon=lambda n: against(n, results=of("xeon-2-cores")),
        says=lambda n: report.note(bench, stem(n)).removesuffix("; stale").split("; ")[-1],
        warmup=lambda n, name=None: f"{(of(name) if name else bench).summary(stem(n))['warmup_s']:.0f}",
        saved=lambda n: f"{dt(n - 1) - dt(n):.0f}",
        speed=lambda name, row: f"{of(name).summary(row)['tok_per_sec']:,.0f}",
        amp=lambda name: of("xeon-2-cores-amp").compare(name, "float32").text(),
        scale=lambda: of("xeon-2-cores-scale").compare("2 ranks", "1 rank").text(),
        efficiency=lambda more: f"{50 * of(f'xeon-2-cores-scale{more}').compare('2 ranks', '1 rank').value:.0f} %",
        limit=lambda: ", ".join(f"{row.split(' | ')[1]} in {row[2:5]}" for row in limits),
        loss=loss,
        spent=lambda n, *rows: f"{sum(profile(f's{n:02d}')[row] for row in rows):.0f}",
        last=lambda name, key="loss", part=1: f"{steps(name)[-1][key] / part:.4f}",
        mean=lambda name: f"{statistics.mean(step['loss'] for step in steps(name)[-100:]):.2f}",
    )


def bad_batch():
    """Loss and norm around the two steps of random ids, with clipping and without."""
    runs = [report.run_of(report.read(ROOT / f"results/exercises/bad-batch-{name}.jsonl")) for name in ("1.0", "1e9")]
    rows = [
        [str(i), *(f"{run.steps[i][key]:.2f}" for run in runs for key in ("loss", "norm"))]
        for i in (*range(38, 46), 79)
    ]
    return report.markdown("rrrrr", ["step", "loss, clipped at 1", "norm", "loss, not clipped", "norm"], rows)


def quoting(page, bench):
    """The page with each figure, <!-- = expression -->figure<!-- . -->, as the records have it."""
    names = quoted(bench)
    block = re.search(r"^ {0,3}<!-- = .*", page, re.MULTILINE)
    assert not block, f"a line that begins with a comment is a block of HTML, and ends the paragraph: {block[0]}"

    def figure(match):
        return f"{match[1]}{eval(match[2], names)}<!-- . -->"

    return re.sub(r"(<!-- = (.*?) -->).*?<!-- \. -->", figure, page)


def linked():
    """(name, Results) of the bench that README shows."""
    block = README.read_bytes().decode().partition(report.BEGIN)[2].partition(report.END)[0]
    link = re.search(r"\(results/([\w.+-]+)\.md\)", block)
    assert link, "the table of README.md has no link to its record: draw it by bench.py --render NAME --readme"
    return link[1], report.Results(ROOT / "results" / f"{link[1]}.jsonl")


def test_lessons_show_the_diffs_and_the_records():
    page, sources = LESSONS.read_bytes().decode(), [path.read_text("utf-8") for path in STAGES.values()]
    for stage, *two in zip([*STAGES][1:], sources, sources[1:], strict=False):
        page = between(page, f"diff {stage}", f"```diff\n{code_diff(*two)}\n```")
    columns = {stage: profile(stage) for stage in ("s01", "s03", "s04", "s05", "s09", "s10", "s11")}
    rows = [[row, *(f"{of[row]:.0f}" for of in columns.values())] for row in columns["s01"]]
    page = between(page, "profile", report.markdown("l" + "r" * len(columns), ["ms", *columns], rows))
    page = between(between(page, "bad batch", bad_batch()), "misread", misread(linked()[1]))
    is_drawn(LESSONS, quoting(page, linked()[1]))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_a_lesson_a_diff_and_a_row(stage):
    name, lessons = STAGES[stage].stem, LESSONS.read_text("utf-8")
    lesson = re.search(rf"^## .*\b{stage} · {name[4:]}\b", lessons, re.MULTILINE)
    diff = stage == "s01" or f"<!-- diff {stage} -->" in lessons
    row = f"\n| [{name}](stages/{name}.py) |" in README.read_text("utf-8")
    assert lesson and diff and row, f"{stage} has a lesson: {bool(lesson)}, a diff: {diff}, a row: {row}"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_renders_to_its_page(path):
    is_drawn(path.with_suffix(".md"), report.page(report.Results(path)))


def test_readme_shows_the_record_that_it_links_to():
    name, results = linked()
    text = report.between_markers(README.read_bytes().decode(), report.narrow(results, name))
    is_drawn(README, quoting(text, results))


# what a test can't do: install or fetch things, load OpenAI's weights, use a second machine or another project
ELSEWHERE = ("pip install", "git clone", "cd ", "python model.py --weights gpt2 ", "torchrun --nnodes=2", "NGPU=8 ")
RUNNER = """import os, runpy, shlex, subprocess, sys
for line in sys.stdin.read().splitlines():
    status = 0
    if line.startswith("python ") and ".py " in line:  # here, since torch takes long to import
        sys.argv = shlex.split(line)[1:]
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
    else:
        status = subprocess.call(line.replace("python -c", shlex.quote(sys.executable) + " -c"), shell=True)
    print(f"STATUS {status} {line}", flush=True)
"""


def commands(page):
    """The commands of a page, from its blocks and its text, on the smallest model: the last of two flags counts."""
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
    lines = [line for language, block in fenced.findall(page) if not language for line in block.splitlines()]
    lines += re.findall(r"`!?((?:python|make|torchrun)\s[^`]*)`", fenced.sub("", page))
    for line in lines:
        line = " ".join(re.sub(r"\s+# .*| && .*", "", line).split())
        line = re.sub(r"^torchrun .*(?=stages/)", "python ", line)  # that it starts several is tested elsewhere
        more = {"python stages/": shlex.join(SMALL), "python model.py": "--device cpu", "python bench": "--help"}
        more |= {"make": "-n PY=python3 > make.out", "": ""}
        line += " " + next(words for start, words in more.items() if line.startswith(start))
        if line.strip() and not line.startswith(ELSEWHERE):
            yield line.strip() + " --tokens 2" * ("--prompt" in line)


@pytest.mark.parametrize("page", [README, LESSONS], ids=["README.md", "stages/README.md"])
def test_commands_of_a_page_run(stages, page, tmp_path):
    for folder in ("stages", "results"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "mine.py"))
    for path in [*ROOT.glob("*.py"), ROOT / "Makefile", README]:
        shutil.copy(path, tmp_path)
    missing = [name for name in ("make", "diff", "sed") if not shutil.which(name)]
    missing += ["python stages/mine.py"] * ("sed" in missing)  # which sed writes
    lines = [line for line in commands(page.read_text("utf-8")) if not line.startswith(tuple(missing))]
    with process([sys.executable, "-c", RUNNER], tmp_path, stages.env, stdin=subprocess.PIPE) as child:
        out, err = child.communicate("\n".join(lines), timeout=400)
    ended = [line.split(" ", 2)[1:] for line in out.splitlines() if line.startswith("STATUS ")]
    # diff ends with 1 where two files differ, as they must
    assert lines and ended == [[str(int(line.startswith("diff "))), line] for line in lines], err
