"""The pages show stages and records as they are, their links lead somewhere, and their commands run."""

from harness import ladder, page
from harness.results import MODES, ResultsError

import os
import re
import shlex
import shutil
import subprocess
import sys

import pages
import pytest
from conftest import ROOT, SMALL, STAGES
from pages import LESSONS, README, RESULTS, read_page

import bench
from model import GPT, SIZES, GPTConfig

NOTES = RESULTS / "NOTES.md"
STALE = "stale: python tests/pages.py draws it again"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHORT = (*SMALL, "--batch-size", "1", "--seq-len", "16")  # the last of two flags counts

# commands that no test can run as they stand, by how they begin, and why
ELSEWHERE = {
    "git clone ": "needs a network",
    "pip install ": "needs a network",
    "python stages/sample.py --weights gpt2 ": "needs OpenAI's weights",
    "torchrun --nnodes=2 ": "needs two of them at once, which test_stages.py starts",
    "TORCH_LOGS=output_code ": "needs a C++ compiler",
    "python tests/pages.py": "is tested here by itself",
}


def readme_results():
    """The harness's Results of the bench that README.md shows."""
    return pages.record(pages.shown_in_readme(read_page(README)))


@pytest.mark.parametrize("path", pages.records(), ids=lambda path: path.stem)
def test_a_record_renders_to_its_page(path):
    assert read_page(path.with_suffix(".md")) == page.page(pages.record(path.stem)), STALE


def test_readme_shows_the_record_that_it_links_to():
    text = read_page(README)
    assert text == pages.readme(text), STALE


def test_the_lessons_show_the_stages_and_the_records():
    text = read_page(LESSONS)
    assert text == pages.lessons(text), STALE


@pytest.mark.parametrize("path", [README, LESSONS], ids=["README.md", "stages/README.md"])
def test_a_page_has_no_comment_within_a_sentence(path):
    assert re.findall(r"<!-- =.*", read_page(path)) == []


TWO_BLOCKS = "Above.\n\n<!-- one -->\nold\n<!-- end -->\n\nBetween.\n\n<!-- two -->\n<!-- end -->\n\nBelow.\n"


def test_a_block_stands_between_its_two_comments():
    text = pages.with_blocks(TWO_BLOCKS, "x.md", [("two", "| 2 |\n| 3 |"), ("one", "1")])
    one = "<!-- one -->\n1\n<!-- end -->"
    two = "<!-- two -->\n| 2 |\n| 3 |\n<!-- end -->"
    assert text == f"Above.\n\n{one}\n\nBetween.\n\n{two}\n\nBelow.\n"


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("<!-- two -->\n", "", "x.md must hold <!-- two --> and, below it, <!-- end -->"),
        ("<!-- two -->", "<!-- tow -->", "x.md must hold <!-- two -->"),
        ("Between.", "<!-- three -->\n<!-- end -->", "x.md holds <!-- three -->, which nothing draws"),
        ("Between.", "<!-- one -->\n<!-- end -->", "x.md holds <!-- one --> more than once"),
        ("old\n<!-- end -->", "old", "x.md must hold <!-- end --> between <!-- one --> and <!-- two -->"),
        ("<!-- end -->\n\nBelow.", "", "x.md must hold <!-- end --> below <!-- two -->"),
        ("Between.", "<!-- end -->", "x.md holds <!-- end --> where no block has begun"),
    ],
    ids=[
        "a missing one",
        "a misspelled one",
        "an unknown one",
        "one twice",
        "no end",
        "no last end",
        "an end too many",
    ],
)
def test_comments_that_are_not_those_of_the_blocks_are_refused(old, new, message):
    assert old in TWO_BLOCKS
    with pytest.raises(ResultsError, match=message):
        pages.with_blocks(TWO_BLOCKS.replace(old, new), "x.md", [("one", "1"), ("two", "2")])


def test_readmes_table_has_comments_of_its_own():
    text = f"{page.BEGIN}\ntable\n{page.END}\n{TWO_BLOCKS}"
    drawn = pages.with_blocks(text, "README.md", [("one", "1"), ("two", "2")])
    assert drawn.startswith(f"{page.BEGIN}\ntable\n{page.END}\n")


@pytest.mark.parametrize(
    "path, draw_page",
    [(README, pages.readme), (LESSONS, pages.lessons)],
    ids=["README.md", "stages/README.md"],
)
def test_a_page_holds_no_block_that_nothing_draws(path, draw_page):
    text = read_page(path) + "\n<!-- of no table -->\n<!-- end -->\n"
    with pytest.raises(ResultsError, match="README.md holds <!-- of no table -->, which nothing draws"):
        draw_page(text)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A copy of the repository of which every page is drawn."""
    folder = tmp_path_factory.mktemp("drawn")
    for name in ("stages", "results"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    for name in ("pages.py", "blocks.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests")
    shutil.copy(README, folder)
    assert draw(folder).returncode == 0
    return folder


@pytest.fixture
def stale(drawn, tmp_path):
    """Such a copy with a wrong digit in a lesson, one in README.md's table, and a page that is missing."""
    folder = tmp_path / "stale"
    shutil.copytree(drawn, folder)
    lessons, readme = folder / "stages" / "README.md", folder / "README.md"
    lessons.write_bytes(re.sub(rb"(\| EPYC with bf16, micro \| )\d", rb"\g<1>0", lessons.read_bytes()))
    readme.write_bytes(re.sub(rb"(\| float32, explicit attention \| )\d", rb"\g<1>0", readme.read_bytes()))
    (folder / "results" / "zen3-scale.md").unlink()
    return folder


def draw(folder, *flags):
    """`python tests/pages.py` in a folder, as it has ended, by a Python that has no torch."""
    without_torch = folder / "without_torch"
    without_torch.mkdir(exist_ok=True)
    (without_torch / "torch.py").write_text("raise ImportError('a page is drawn without torch')")
    env = {**os.environ, "PYTHONPATH": str(without_torch)}
    command = [sys.executable, "tests/pages.py", *flags]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def contents(folder):
    """{path: bytes} of every page below a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.md")}


def test_check_names_the_pages_that_are_stale_and_writes_nothing(stale):
    before = contents(stale)
    check = draw(stale, "--check")
    assert check.returncode == 1
    named = [line.split(" is stale: ")[0] for line in check.stdout.splitlines()]
    assert named == ["results/zen3-scale.md", "README.md", "stages/README.md"]
    assert contents(stale) == before


def test_the_pages_that_are_stale_are_drawn_again(drawn, stale):
    ended = draw(stale)
    assert ended.returncode == 0
    assert "results/zen3-scale.md is drawn again" in ended.stdout
    assert contents(stale) == contents(drawn)


def test_check_finds_nothing_where_all_is_drawn(drawn):
    check = draw(drawn, "--check")
    assert (check.returncode, check.stdout) == (0, "")


@pytest.mark.parametrize("name", sorted({path.stem for path in STAGES.values()} | set(ladder.names())))
def test_a_stage_has_a_file_a_row_in_the_ladder_and_a_lesson(name):
    lessons = read_page(LESSONS)
    short, technique = name.split("_", 1)
    heading, marker = f"\n## {short} · {technique}\n", f"\n<!-- diff {short} -->\n"
    missing = []
    if not (ROOT / "stages" / f"{name}.py").exists():
        missing.append(f"stages/{name}.py")
    if ladder.find(name) is None:
        missing.append(f"{name} in STAGES of stages/harness/ladder.py")
    if heading not in lessons:
        missing.append(f"{heading.strip()} in stages/README.md")
    if short != "s01" and marker not in lessons:
        missing.append(f"{marker.strip()} in stages/README.md")
    assert not missing, f"{name} lacks {', '.join(missing)}"


def test_readmes_table_has_the_stages_from_the_first_one_on():
    rows = re.findall(r"^\| \[(\w+)\]\(stages/(\w+)\.py\) \|", read_page(README), re.MULTILINE)
    if readme_results().bench["interleaved"]:
        assert rows.pop(0) == (ladder.PLAIN, ladder.names()[0])
    assert rows
    stages = ladder.names()[: len(rows)]  # the last ones may be too new to be measured
    assert rows == [(page.short(stage), stage) for stage in stages]


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_of_the_bench_has_a_line_in_readme_and_a_target(mode):
    target = "bench" if mode == "ladder" else mode
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(rf"^make {target} +# \w", read_page(README), re.MULTILINE)
    assert re.search(rf"^([a-z]+ )*{target}( [a-z]+)*: ", makefile, re.MULTILINE)
    assert f"@echo 'make {target} " in makefile


def anchors(path):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", read_page(path)), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def leads_somewhere(path, target):
    """Whether a link of a page is to another site, or to a file and in it a heading that exist."""
    if target.startswith("https://"):
        return True
    name, _, anchor = target.partition("#")
    linked = path.parent / name if name else path
    if not linked.exists():
        return False
    return not anchor or anchor in anchors(linked)


@pytest.mark.parametrize("path", [README, LESSONS, NOTES], ids=["README.md", "stages/README.md", "NOTES.md"])
def test_a_link_leads_to_a_file_or_a_heading_that_exists(path):
    targets = re.findall(r"\]\(([^)\s]+)\)", read_page(path))
    assert targets
    assert [target for target in targets if not leads_somewhere(path, target)] == []


@pytest.mark.parametrize("path", [README, LESSONS, NOTES], ids=["README.md", "stages/README.md", "NOTES.md"])
def test_a_script_that_a_page_names_exists(path):
    names = set(re.findall(r"(?:stages|tests)/(?:harness/)?\w+\.py", read_page(path)))
    names -= {"stages/mine.py", "stages/s13_NAME.py"}  # which the reader writes
    names -= set(re.findall(r" > (stages/\w+\.py)$", read_page(path), re.MULTILINE))  # or a command of the page
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []


def test_s09_says_how_many_parameters_decay(monkeypatch):
    monkeypatch.setattr(GPT, "to_empty", lambda self, device: self)  # stays on the meta device
    model = GPT(GPTConfig(vocab_size=50304, block_size=1024, **SIZES["gpt2"]), attention=None)
    decayed = [p.numel() for p in model.parameters() if p.dim() >= 2]
    left_alone = [p.numel() for p in model.parameters() if p.dim() < 2]
    docstring, _ = ladder.docstring_and_code("s09_decay")
    words = " ".join(docstring.split())
    assert f"{len(decayed)} tensors with {sum(decayed):,} parameters decayed" in words
    assert f"{len(left_alone)} with {sum(left_alone):,} left alone" in words


def make(folder, *words):
    """`make` with these words in a folder, as it has ended; the test is skipped where there is no make."""
    if not shutil.which("make"):
        pytest.skip("needs make")
    command = ["make", "PY=python3", *words]
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}  # whose colors and pagers are the user's own
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize(
    "words, old, new",
    [
        (["N=5"], "s04_compile", "s05_flash"),
        (["N=12"], "s11_accum", "s12_ddp"),
        (["A=s01", "B=s12"], "s01_baseline", "s12_ddp"),
    ],
    ids=["N=5", "N=12", "A=s01 B=s12"],
)
def test_make_diff_shows_a_stage_against_the_one_before_or_any_two(words, old, new):
    shown = make(ROOT, "diff", *words).stdout.splitlines()
    assert shown[0] == f"diff --git a/stages/{old}.py b/stages/{new}.py"


def test_make_with_an_empty_py_takes_its_own_python():
    shown = make(ROOT, "PY=", "--dry-run", "bench", "ARGS=s01").stdout.splitlines()
    assert shown[-1] == ".venv/bin/python bench.py s01"


def test_make_diff_without_a_stage_says_what_to_pass():
    ended = make(ROOT, "diff", "N=1")
    assert ended.returncode == 2
    assert "pass N=2 or a later stage, or A=s01 B=s12" in ended.stderr


def without_comment(line):
    """A line of a block as one command: without its comment, and without what comes after an &&."""
    command = re.sub(r"\s+# .*| && .*", "", line)
    return " ".join(command.split())


def commands_of(path):
    """The commands of a page, a list of lists: those of a block belong together, one in the text is alone."""
    text = read_page(path)
    groups = []
    for language, block in FENCE.findall(text):
        if not language:
            groups.append([without_comment(line) for line in block.splitlines()])
    for span in re.findall(r"`!?((?:\w+=\w+\s)?(?:python|make|torchrun)\s[^`]*)`", FENCE.sub("", text)):
        groups.append([without_comment(span)])
    return groups


def commands_that_run():
    """The commands of all pages that a test can run, in their groups, each group once."""
    groups = []
    for path in (README, LESSONS):
        for group in commands_of(path):
            able = [command for command in group if not command.startswith(tuple(ELSEWHERE))]
            if able and able not in groups:
                groups.append(able)
    return groups


def check_bench(flags):
    """Let the bench take its flags apart, on a CPU, and start nothing. A wrong one is a SystemExit.

    A script that the commands made in stages/ is there for it, since the bench is that of the current folder.
    """
    if "--resume" in flags:
        bench.parse_resume(flags)
    else:
        bench.parse([*flags, "--device", "cpu"])


def run_make(folder, words):
    """Let make say what it would run, and the bench what it thinks of that."""
    ended = make(folder, "-n", *words)
    assert ended.returncode == 0, ended.stderr
    for line in ended.stdout.splitlines():
        if line.startswith("python3 bench.py"):
            check_bench(shlex.split(line)[2:])


def script_and_flags(folder, words):
    """The path of the script that a command starts, and its flags, with those that keep the run short."""
    if words[1] == "-c":
        typed = folder / "typed.py"
        typed.write_text(words[2])
        return typed, []
    (script,) = [word for word in words if word.endswith(".py")]
    flags = words[words.index(script) + 1 :]
    if script != "stages/sample.py":
        return folder / script, [*flags, *SHORT]
    flags += ["--device", "cpu"]
    if "--prompt" in flags:
        flags += ["--tokens", "2"]
    else:
        text = folder / "short.txt"
        text.write_text(1000 * "To be ")
        flags += ["--data", text]
    return folder / script, flags


def run_python(stages, folder, words, env):
    """Run the script of a command in a fork; torchrun's as one process, since other tests start several."""
    script, flags = script_and_flags(folder, words)
    ended = stages.run_script(script, flags, folder, **env)
    assert ended.status == 0, ended.err


def run_shell(folder, command):
    """Run a command of another program. diff ends with 1 where two files differ, as here they must."""
    program = command.split()[0]
    if not shutil.which(program):
        pytest.skip(f"needs {program}")
    ended = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=60)
    assert ended.returncode == (1 if program == "diff" else 0), ended.stderr


@pytest.mark.parametrize("commands", commands_that_run(), ids=lambda commands: commands[0])
def test_the_commands_of_a_page_run(stages, tmp_path, monkeypatch, commands):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "stages", tmp_path / "stages", ignore=shutil.ignore_patterns("harness", "mine.py"))
    shutil.copy(ROOT / "Makefile", tmp_path)
    for command in commands:
        words, env = shlex.split(command), {}
        while "=" in words[0]:  # NAME=VALUE before the program
            name, value = words.pop(0).split("=")
            env[name] = value
        if words[0] == "make":
            run_make(tmp_path, words[1:])
        elif words[:2] == ["python", "bench.py"]:
            check_bench(words[2:])
        elif words[0] in ("python", "torchrun"):
            run_python(stages, tmp_path, words, env)
        else:
            run_shell(tmp_path, command)
