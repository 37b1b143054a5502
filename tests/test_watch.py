"""watch.py on small scripts: what it counts, what it says of them, and how they end.

Most are forks of one process. What only a process from its first line shows has one of its own.
"""

from harness.bench.rows import row_of
from harness.figures import Step
from harness.steps import WARMUP
from harness.watch.shares import mean_shares

import json
import os
import re
import statistics

import pytest
import torch
from conftest import ROOT, WATCH, lines_of, python, run_by_the_bench, run_script
from fixtures.forks import run_in_a_fork, watch_in_a_fork
from fixtures.loops import LEARN, LOOPS, WORDS, Loop

# Four sequences of 8 tokens in each of 2 micro-batches. It keeps its own sum of losses.
START, PAUSE = "own = []", "time.sleep(0.1)"  # lines that a test replaces
TRAIN = Loop(
    f"""{PAUSE}
loss_sum = 0.0
for micro in range(2):
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) / 2
    loss.backward()
    loss_sum += loss.item()
optimizer.step()
optimizer.zero_grad()
own.append(loss_sum)
json.dump(own, open("own.json", "w"))""",
    f"""{START}
ids = torch.arange(36).view(4, 9) % 50
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))""",
    steps=3,
).text


def test_a_loop_is_timed_as_it_times_itself_and_stopped_when_it_begins_another_step(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    run_script("train.py", folder=tmp_path)
    alone = json.loads((tmp_path / "own.json").read_text())
    ended = watch_in_a_fork(tmp_path, TRAIN, "--steps", "5", "--warmup", "2")
    *_, seen = ended.of_kind("seen")
    assert (seen["batch_size"], seen["seq_len"], seen["accum"], seen["world_size"]) == (4, 8, 2, 1)
    assert ended.figures("tokens") == [64] * 5
    assert ended.figures("loss") == pytest.approx(alone[:5], abs=1e-6)  # a sum of shares
    own = json.loads((tmp_path / "own.json").read_text())
    assert len(own) == 5  # what it does after its fifth step has run, and no other step
    for step in ended.of_kind("step")[1:]:
        assert step["spent"]["rest"] >= 0.1  # the pause is on the clock
        assert sum(step["spent"].values()) == pytest.approx(step["dt"], abs=1e-5)
    assert sum(ended.summary["shares"].values()) == pytest.approx(1, abs=1e-3)  # what follows the last step is no part
    assert ended.err.splitlines()[-1] == "train.py was stopped after 5 steps, when it began another"
    assert "over 3 steps after 2 of warm-up" in ended.out
    assert re.search(r"^slow        \d+ % train.py:\d+  time.sleep\(0.1\)$", ended.out, re.MULTILINE)


AT_HOME = """
import multiprocessing, os, random, subprocess, sys
import numpy
import torch
import data, model, harness

class Item:
    pass

def same(item):
    return item

if __name__ == "__main__":
    assert (data.OWN, model.OWN, harness.OWN) == (1, 2, 3)
    assert sys.argv == ["train.py", "--steps", "9", "-m", "x"], sys.argv
    assert sys.stdin.read() == ""
    assert sys.path[0] == os.getcwd(), sys.path
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert type(pool.map(same, [Item()])[0]) is Item
    drawn = [random.random(), numpy.random.rand(), torch.rand(1)]  # before anything else drew a number
    random.seed(7), numpy.random.seed(7), torch.manual_seed(7)
    assert drawn == [random.random(), numpy.random.rand(), torch.rand(1)]
    print("at home")
"""


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_a_script_is_at_home(tmp_path, safe_path):
    for number, name in enumerate(("data", "model", "harness"), 1):
        (tmp_path / f"{name}.py").write_text(f"OWN = {number}\n")
    (tmp_path / "train.py").write_text(AT_HOME)
    words = (WATCH, "--seed", "7", "train.py", "--steps", "9", "-m", "x")
    ended = python(*words, folder=tmp_path, PYTHONSAFEPATH=safe_path)
    assert "at home\n" in ended.out, ended.err
    assert ended.status == 2
    [line] = ended.err.splitlines()
    assert line.startswith("train.py ended, and no optimizer of torch.optim, or of a")


def test_an_optimizer_of_another_kind_is_told_and_in_a_long_run_before_its_end(tmp_path):
    text = "import torch\nw = torch.ones(2, requires_grad=True)\nfor step in range({}):\n    w.sum().backward()"
    short, long = (watch_in_a_fork(tmp_path, text.format(steps), status=2).err for steps in (99, 100))
    assert short.endswith(". One of another kind, as Keras and fastai have, can't be watched\n")
    assert "100 backwards, and no" in long and "100 backwards, and no" not in short


def test_it_needs_no_tokenizer(tmp_path):
    """It runs in the environment of the script, which may have none."""
    (tmp_path / "tiktoken.py").write_text("raise ImportError")
    (tmp_path / "train.py").write_text("print('it ran')")
    assert "it ran\n" in python(WATCH, "train.py", folder=tmp_path, PYTHONPATH=str(tmp_path)).out


def test_a_module_of_a_package_is_run_by_m(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "settings.py").write_text("STEPS = 7\n")
    (tmp_path / "pack" / "train.py").write_text("from .settings import STEPS\nassert STEPS == 7\n" + TRAIN)
    ended = python(WATCH, "--steps", "2", "-m", "pack.train", "--own", "1", folder=tmp_path)
    assert ended.status == 0, ended.err
    assert "of the last step alone, since none was counted" in ended.out


def test_a_module_that_is_missing_is_told_from_one_that_fails(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise ImportError('pip install more')")
    assert "-m gone: No module named gone: -m looks for it from" in run_in_a_fork(tmp_path, "-m", "gone").err
    assert "failed by ImportError, and no optimizer" in run_in_a_fork(tmp_path, "-m", "pack.train").err


@pytest.mark.parametrize("by_the_bench", [False, True])
def test_the_peak_of_memory_is_that_of_all_steps(tmp_path, by_the_bench):
    """Steps are shorter than the time between two readings."""
    text = Loop(f"if step == 11:\n    torch.ones(100_000_000)\n{LEARN}", steps=12).text
    if by_the_bench:
        (tmp_path / "train.py").write_text(text)
        ended = run_by_the_bench(row_of(str(tmp_path / "train.py")), [], 12)
    else:
        ended = watch_in_a_fork(tmp_path, text, "--steps", "12")
    memory = ended.figures("memory")
    assert memory[-1] - memory[4] > 3e8


@pytest.mark.parametrize(
    "line, new_line, status, told, is_timed",
    [
        (START, "raise KeyError('early')", 1, "train.py failed by KeyError, and no optimizer", False),
        (PAUSE, "1 / (4 - step)", 1, "failed by ZeroDivisionError after 4 steps", True),
        (PAUSE, "sys.exit('enough') if step == 4 else 0", 1, "ended by sys.exit('enough') after 4 steps", True),
        (PAUSE, "sys.exit() if step == 1 else 0", 2, "ended after one step, and only a second one shows", False),
        (PAUSE, "sys.stdout.close() if step == 1 else 0", 0, "train.py ended after 7 steps", True),
    ],
)
def test_how_a_script_ends_is_one_line_and_what_was_timed_is_told(tmp_path, line, new_line, status, told, is_timed):
    ended = watch_in_a_fork(tmp_path, TRAIN.replace(line, new_line), "--steps", "9", status=status)
    assert told in ended.err.splitlines()[-1]
    assert ("median" in ended.out) == is_timed
    assert "run.py" not in ended.err
    if "failed" in told:
        assert ended.of_kind("error")[0]["traceback"] in ended.err


RANKS = """import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)"""
TWICE = """with model.no_sync():
    model(x).sum().backward()
learn(model(x).sum())"""


def test_all_ranks_of_torchrun_are_counted(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    (tmp_path / "train.py").write_text(Loop(TWICE, RANKS).text)
    ended = python(*launcher, WATCH, "--steps", "3", "--record", "r.jsonl", "train.py", folder=tmp_path)
    assert ended.status == 0, ended.err
    ended.lines = lines_of(tmp_path / "r.jsonl")
    assert ended.figures("tokens") == [16] * 3
    assert ended.out.count("samples/sec | memory") == 1


ALONE = """import os
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", WORLD_SIZE="1", RANK="0")
"""
PRETENDS = "\ndist.get_world_size = lambda: 2"


@pytest.mark.parametrize(
    "text, told",
    [
        (
            Loop(TWICE, ALONE + RANKS + PRETENDS).text,
            "torchrun --standalone --nproc_per_node=2 stages/watch.py train.py",
        ),
        ("import torch\ntorch.multiprocessing.spawn(fn=print)", "starts ranks by torch.multiprocessing.spawn"),
        ("import torch", "Several ranks must be started by torchrun"),
    ],
)
def test_ranks_that_a_script_starts_by_itself_are_refused(tmp_path, text, told):
    assert told in watch_in_a_fork(tmp_path, text, status=2).err.splitlines()[-1]


# What it says of a script

GPT2 = """from transformers import GPT2Config, GPT2LMHeadModel
ids = torch.zeros(2, 16, dtype=torch.int64)
model = GPT2LMHeadModel(GPT2Config(vocab_size=2048, n_positions=16, n_embd=64, n_layer=2, n_head=2, attn_pdrop=0.0))
model.transformer = torch.compile(model.transformer, backend='eager')
optimizer = torch.optim.AdamW(model.parameters(), fused=True)"""
IN_BFLOAT16 = """with torch.autocast("cpu", torch.bfloat16):
    loss = model(ids, labels=ids).loss
learn(loss)"""


def test_a_gpt_of_transformers_has_its_techniques_and_its_shape(tmp_path):
    """By hand: 12 L C^2 + V C are 229,376 weights; positions, biases and LayerNorms are the others of 232,000."""
    ended = watch_in_a_fork(tmp_path, Loop(IN_BFLOAT16, GPT2).text, "--steps", "6")
    *_, seen = ended.of_kind("seen")
    expected = {"profiled": True, "autocast": "bfloat16", "compile": True, "sdpa": "flash", "fused": True}
    expected |= {"vocabulary": 2048, "optimizer": "AdamW", "weights": "float32"}
    assert {name: seen[name] for name in expected} == expected
    assert seen["shape"] == {"vocab_size": 2048, "n_layer": 2, "n_head": 2, "n_embd": 64, "seq_len": 16}
    assert "TFLOP/s" in ended.out
    assert "has     autocast (s03), compile (s04), flash attention (s05), padded vocabulary (s06), " in ended.out
    assert "\n        s04 model" not in ended.out  # what to type is told of what it lacks


def test_frozen_weights_are_not_counted_as_trained(tmp_path):
    frozen = "model.transformer.h.requires_grad_(False)\nmodel.transformer.wte.requires_grad_(False)\noptimizer ="
    text = Loop(IN_BFLOAT16, GPT2.replace("optimizer =", frozen)).text
    ended = watch_in_a_fork(tmp_path, text, "--steps", "6")
    assert ended.of_kind("seen")[0]["shape"] is None
    assert "tok/sec" in ended.out and "TFLOP/s" not in ended.out


LOADERS = """
import multiprocessing, threading
multiprocessing.get_context('fork').Process(target=time.sleep, args=[20], daemon=True).start()
threading.Thread(target=lambda: time.sleep(20), daemon=True).start()
threading.Thread(target=time.sleep, args=[20], daemon=True).start()  # as a progress bar has one
"""


def test_what_may_load_data_is_counted(tmp_path):
    ended = watch_in_a_fork(tmp_path, TRAIN.replace(START, START + LOADERS), "--steps", "2")
    assert ended.of_kind("seen")[0]["loaders"] == 2


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_what_is_counted_and_told_of_a_loop(tmp_path, loop):
    """Each loop is told its own causes, and none of the others. Its loss is the one that it prints."""
    if loop.name == "casts by hand" and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 does not show the dtypes of operations")
    ended = watch_in_a_fork(tmp_path, loop.text, "--steps", str(loop.steps))
    assert "Traceback" not in ended.err, ended.err
    assert len(ended.of_kind("step")) == loop.steps
    check_count(loop, ended)
    check_time(loop, ended)
    check_words(loop, ended)
    own = [float(number) for number in re.findall(r"^own (.*)$", ended.out, re.MULTILINE)]
    if own:  # the losses that it prints
        assert ended.figures("loss")[: len(own)] == pytest.approx(own[: loop.steps])


def check_count(loop, ended):
    if loop.counted:
        unit, count = loop.counted
        assert ended.of_kind("seen")[0]["unit"] == unit
        assert ended.figures("tokens") == [count] * loop.steps


def check_time(loop, ended):
    counted = [Step.of_line(line) for line in ended.of_kind("step")[WARMUP:]]
    if loop.time:
        assert ended.summary["shares"] == pytest.approx(mean_shares(counted))
    for kind, least in loop.time.items():  # in the median step: on a busy machine one may take long elsewhere
        assert statistics.median(mean_shares([step])[kind] for step in counted) > least


def check_words(loop, ended):
    slow = "\n".join(line for line in ended.out.splitlines() if line.startswith("slow"))
    told = {cause for cause, words in WORDS.items() if words in slow}
    assert set(loop.causes) <= told <= {*loop.causes, "own code"}, ended.out  # on a busy machine any line may take long
    for words in loop.says:
        assert words in ended.out
    for words in loop.never_says:
        assert words not in ended.out


@pytest.mark.parametrize(
    "step, has",
    [
        (f"optimizer.param_groups[0]['lr'] *= 1 if step < 6 else 0.9\n{LEARN}", "learning-rate schedule (s08)"),
        (f"optimizer.param_groups[0]['lr'] = 0.2 if step == 5 else 0.1\n{LEARN}", "learning-rate schedule (s08)"),
        (f"if step > 5:\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n{LEARN}", "clipping (s07)"),
        (f"if step > 5:\n    torch.autocast('cpu').__enter__()\n{LEARN}", "autocast (s03)"),
        ("if step > 5:\n    (model(x).sum() / 2).backward()\nlearn(model(x).sum() / 2)", "accumulation (s11)"),
    ],
)
def test_what_a_script_begins_late_it_has(tmp_path, step, has):
    ended = watch_in_a_fork(tmp_path, Loop(step).text, "--steps", "9")
    assert has in ended.out
    early, late = ended.of_kind("seen")[0], ended.of_kind("seen")[-1]
    assert early != late


SMALL_FILES = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))"


def test_a_row_whose_record_can_not_be_written_ends(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "gate").write_bytes(bytes(99))
    words = ("--record", "r.jsonl", "--gate", "gate", os.getpid(), "train.py")
    ended = run_in_a_fork(tmp_path, *words, change=SMALL_FILES)
    assert ended.status == 1 and re.search(r"--record .*r.jsonl ends here: File too large\n$", ended.err)


A_FOLD = """if step % 3 == 0:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    models.append(weakref.ref(model))
learn(model(x).sum())
print("alive:", sum(ref() is not None for ref in models))"""


def test_what_a_script_deletes_is_not_held(tmp_path):
    text = Loop(A_FOLD, "import weakref\nmodels = []").text
    assert watch_in_a_fork(tmp_path, text).out.splitlines().count("alive: 1") == 13


GRADIENT = """y = model(x)
y.register_hook(take_a_second)
[model.weight.grad] = torch.autograd.grad(y.sum(), [model.weight])
optimizer.step()"""


def test_autograd_grad_is_a_backward(tmp_path):
    stand_still = "import time\ntime.seconds = 0.0\ntime.perf_counter = lambda: time.seconds"
    text = Loop(GRADIENT, "def take_a_second(gradient):\n    time.seconds += 1").text
    ended = watch_in_a_fork(tmp_path, text, "--steps", "5", change=stand_still)
    assert [step["spent"]["backward"] for step in ended.of_kind("step")] == [1] * 5


BEFORE_WATCH = f"""import runpy, sys, torch
sys.path.insert(0, {str(WATCH.parent)!r})
sys.argv, sys.asked = ["", "+bf16", "train.py"], []
for owner, name in ((torch._C._autograd, "_supported_activities"), (torch.accelerator, "is_available"),
                    (torch.cuda, "is_available"), (torch.cuda, "device_count")):
    setattr(owner, name, lambda *words, name=name: sys.asked.append(name))
runpy.run_path({str(WATCH)!r}, run_name="__main__")"""


def test_nothing_asks_a_card_anything_nor_imports_dynamo_before_the_first_line(tmp_path):
    """Later on CUDA_VISIBLE_DEVICES would have no effect any more."""
    (tmp_path / "train.py").write_text("import sys\nprint(sys.asked, 'torch._dynamo' in sys.modules)\n")
    assert "\n[] False\n" in python("-c", BEFORE_WATCH, folder=tmp_path).out


# Where it runs, and where it is


WHERE = "import os, sys\nprint(os.getcwd(), os.path.exists(__file__), sys.argv)\n"


def test_a_script_runs_where_the_reader_is(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "train.py").write_text(WHERE)
    assert f"{here} True ['../there/train.py', 'x']" in run_in_a_fork(here, "../there/train.py", "x").out


def test_from_within_the_ladder_a_script_runs_in_its_own_folder(tmp_path):
    """Its output would be in the way here."""
    (tmp_path / "train.py").write_text(WHERE)
    words = (WATCH, tmp_path / "train.py")
    assert f"{tmp_path} True ['{tmp_path}/train.py']" in python(*words, folder=ROOT).out
