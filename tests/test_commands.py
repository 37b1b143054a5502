"""The commands of README.md and of the lessons run, in the order of the page, on the smallest model."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL

# what a test can't do: install packages, load OpenAI's weights, use a second machine or another project
ELSEWHERE = ("pip install", "python model.py --weights gpt2 ", "torchrun --nnodes=2", "NGPU=8 ")
RUNNER = """
import os, runpy, shlex, subprocess, sys
for line in sys.stdin.read().splitlines():
    if line.startswith("python "):  # here, since torch takes long to import
        sys.argv, run = shlex.split(line)[1:], runpy.run_path
        if sys.argv[0] == "-m":
            sys.argv, run = sys.argv[1:], runpy.run_module
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        status = 0
        try:
            run(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        del sys.path[0]
        sys.modules.pop("harness", None)
    else:
        status = subprocess.call(line, shell=True)
    print(f"STATUS {status} {line}", flush=True)
"""


def commands(page):
    """The command lines of a page, from its code blocks and its text, without their comments."""
    text = (ROOT / page).read_text()
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced.findall(text) if not language]
    lines = [re.sub(r"\s+# .*", "", line) for block in blocks for line in block.splitlines()]
    prose = fenced.sub("", text)
    lines += [re.sub(r"\s+", " ", line) for line in re.findall(r"`!?((?:python|make|torchrun) [^`]*)`", prose)]
    return [line for line in lines if line and not line.startswith(ELSEWHERE)]


def runnable(line):
    """The same command made small: the last of two equal flags counts."""
    words = shlex.split(line)
    if words[0] == "torchrun":  # that it starts several is tested elsewhere
        words = ["python", *words[[word.endswith(".py") for word in words].index(True) :]]
    if words[0] == "make":
        return shlex.join([*line.partition(" && ")[0].split(), "-n", "PY=python3"]) + " > make.out"
    if words[0] != "python":
        return line.partition(" && ")[0]
    if words[1].startswith("stages/"):
        return shlex.join([*words, *SMALL])
    if words[1] == "model.py":
        return shlex.join([*words, "--device", "cpu", *(["--tokens", "2"] if "--prompt" in words else [])])
    return shlex.join([*words, *([] if words[1] == "-m" else ["--help"])])


@pytest.mark.parametrize("page", ["README.md", "stages/README.md"])
def test_the_commands_of_a_page_run(page, tmp_path):
    for name in ("stages", "measure", "results"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "mine.py", "*.parts")
        )
    for path in [*ROOT.glob("*.py"), ROOT / "Makefile", ROOT / "README.md"]:
        shutil.copy(path, tmp_path)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        environment.pop(name, None)
    lines = [runnable(line) for line in commands(page)]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input="\n".join(lines),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    ended = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("STATUS ")]
    assert [line for _, line in ended] == lines and len(lines) > 5, done.stderr
    # diff says 1 where two files differ, as they must
    wrong = [line for status, line in ended if status != ("1" if line.startswith("diff ") else "0")]
    assert not wrong, done.stderr
