"""The ladder's table against the stages' sources, their form, all imports, and the sums against torch."""

from harness import arithmetic, ladder

import ast
import difflib
import hashlib
import math
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, STAGES, definitions
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, SIZES, VOCAB, GPTConfig

NAMES = [path.stem for path in STAGES.values()]


def tree_of(path):
    """The syntax tree of a source file."""
    return ast.parse(path.read_text("utf-8"))


# The table against the files


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_has_a_row(name):
    assert name in ladder.names(), f"stages/{name}.py has no row in STAGES of stages/harness/ladder.py"


@pytest.mark.parametrize("name", ladder.names())
def test_a_row_has_a_stage(name):
    assert name in NAMES, f"{name} in STAGES of stages/harness/ladder.py has no file stages/{name}.py"


def test_the_rows_are_in_the_order_of_the_files():
    assert ladder.names() == sorted(ladder.names())


def code_lines(stage):
    """A stage's lines of code: no docstring, no blank line, no comment, no indentation."""
    source = STAGES[stage].read_text("utf-8")
    docstring = ast.parse(source).body[0]
    lines = []
    for line in source.splitlines()[docstring.end_lineno :]:
        code = line.split("  #")[0].strip()
        if code and not code.startswith("#"):
            lines.append(code)
    return lines


@pytest.mark.parametrize("stage", [*STAGES][1:])
def test_a_diff_has_exactly_the_lines_of_its_budget(stage):
    stage_before = [*STAGES][[*STAGES].index(stage) - 1]
    diff = list(difflib.ndiff(code_lines(stage_before), code_lines(stage)))
    added = [line for line in diff if line.startswith("+ ")]
    removed = [line for line in diff if line.startswith("- ")]
    row = ladder.find(STAGES[stage].stem)
    assert (len(added), len(removed)) == row.budget, "\n".join(added + removed)


@pytest.mark.parametrize("stage", STAGES)
def test_a_docstring_is_a_title_and_two_to_six_lines(stage):
    number = [*STAGES].index(stage) + 1
    short_name = STAGES[stage].stem[4:]
    title, blank, *text = ast.get_docstring(tree_of(STAGES[stage])).splitlines()
    assert stage == f"s{number:02d}"
    assert re.fullmatch(rf"Stage {number} · {short_name}: \S.*\S\.", title)
    assert blank == ""
    prose = [line for line in text if line and not line.startswith("    ")]  # a command is indented
    assert 2 <= len(prose) <= 6


@pytest.mark.parametrize(
    "name, change",
    [
        ("s01_baseline", "float32, explicit attention"),
        ("s05_flash", "flash attention, no T x T matrix"),
        ("s07_clip", "GPT-3's betas, gradient clipping"),
        ("s12_ddp", "DistributedDataParallel"),
    ],
)
def test_a_title_tells_what_a_stage_changes(name, change):
    assert ladder.change(name) == change


# The form of a stage


def imports_in(tree):
    """The import statements anywhere in a source, inside functions too."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def names_assigned_at_the_top(tree):
    """The names that a script assigns outside of its functions and loops."""
    names = set()
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_a_script_that_reads_from_top_to_bottom(stage):
    tree = tree_of(STAGES[stage])
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert len(STAGES[stage].read_text("utf-8").splitlines()) <= 110  # two screens
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert "attention" in functions
    assert "main" not in functions
    assert {"args", "loader", "config", "model", "optimizer", "log"} <= names_assigned_at_the_top(tree)
    assert len([statement for statement in tree.body if isinstance(statement, ast.For)]) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_torch_and_the_files_that_all_stages_share(stage):
    tree = tree_of(STAGES[stage])
    packages = set()
    for node in imports_in(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
        packages |= {module.split(".")[0] for module in modules}
    assert {"harness", "data", "model", "torch"} <= packages
    assert packages <= {"harness", "data", "model", "torch"} | sys.stdlib_module_names
    assert tree.body[1].module == "harness"  # below the docstring: it makes data and model importable


def first_name(node):
    """The name that an expression begins with, "torch" of torch.backends.cudnn; None for a call's result."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_changes_nothing_that_it_imports(stage):
    tree = tree_of(STAGES[stage])
    imported = set()
    for node in imports_in(tree):
        imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            assert first_name(node) not in imported, ast.unparse(node)
        if isinstance(node, ast.Name):
            assert node.id not in {"setattr", "delattr", "vars", "globals", "exec", "eval"}


# What a technique does on a machine


def facts(tf32, amp_dtype, compile, accum=4, world_size=1, fallbacks=None, warmup_s=None, sdpa=None, cache=None):
    """The Facts of a run."""
    settings = {"amp_dtype": amp_dtype, "compile": compile, "accum": accum, "world_size": world_size}
    return ladder.Facts({"tf32": tf32}, settings, fallbacks or {}, warmup_s, sdpa, cache)


NO_16_BITS = "this cpu has no 16-bit arithmetic, so float32 stays"
MACHINES = {
    "H100": facts(tf32=True, amp_dtype="bfloat16", compile=True, warmup_s=40.4, sdpa="cudnn"),
    "H100 that has compiled it before": facts(tf32=True, amp_dtype="bfloat16", compile=True, warmup_s=9.1, cache="hit"),
    "H100 that compiles it first": facts(tf32=True, amp_dtype="bfloat16", compile=True, warmup_s=40.4, cache="miss"),
    "two H100s": facts(tf32=True, amp_dtype="bfloat16", compile=True, world_size=2),
    "T4": facts(tf32=False, amp_dtype="float16", compile=True, warmup_s=61.5, sdpa="efficient"),
    "laptop without a compiler": facts(
        tf32=False,
        amp_dtype="float32",
        compile=False,
        accum=2,
        fallbacks={"amp_dtype": NO_16_BITS, "compile": "left out, no C++ compiler found"},
        warmup_s=3.0,
        sdpa="flash",
    ),
    "both left out by flags": facts(tf32=True, amp_dtype="float32", compile=False, warmup_s=3.0),
    "run that took no step": facts(tf32=True, amp_dtype="bfloat16", compile=True),
}


@pytest.mark.parametrize(
    "machine, stage, note",
    [
        ("H100", "s01", ""),
        ("H100", "s02", "active"),
        ("H100", "s03", "active: bfloat16"),
        ("H100", "s04", "active: 40 s of warm-up"),
        ("H100 that has compiled it before", "s04", "active: 9 s of warm-up, found in the cache"),
        ("H100 that compiles it first", "s04", "active: 40 s of warm-up"),
        ("H100", "s05", "active: the cudnn kernel ran"),
        ("H100", "s06", ""),
        ("H100", "s07", "for the loss, not the speed"),
        ("H100", "s08", "for the loss, not the speed"),
        ("H100", "s09", "for the loss, not the speed"),
        ("H100", "s10", ""),
        ("H100", "s11", "4 micro-batches per step"),
        ("H100", "s12", "one process: what DDP itself costs"),
        ("two H100s", "s12", ""),
        ("T4", "s02", "no-op: this device has no TF32 units"),
        ("T4", "s03", "active: float16, loss scaled"),
        ("T4", "s05", "active: the efficient kernel ran"),
        ("laptop without a compiler", "s02", "no-op: this device has no TF32 units"),
        ("laptop without a compiler", "s03", f"no-op: {NO_16_BITS}"),
        ("laptop without a compiler", "s04", "fallback to eager: left out, no C++ compiler found"),
        ("laptop without a compiler", "s11", "2 micro-batches per step"),
        ("both left out by flags", "s03", "no-op: float32 was asked for"),
        ("both left out by flags", "s04", "fallback to eager: --no-compile was given"),
        ("run that took no step", "s04", ""),
        ("run that took no step", "s05", ""),
    ],
)
def test_the_note_says_what_a_machine_makes_of_a_technique(machine, stage, note):
    row = ladder.find(STAGES[stage].stem)
    assert row.effect(MACHINES[machine]).note == note


@pytest.mark.parametrize(
    "machine, no_op_stages",
    [
        ("H100", ["s08", "s09"]),  # they do the same work as the stage before, with other numbers
        ("T4", ["s02", "s08", "s09"]),
        ("laptop without a compiler", ["s02", "s03", "s04", "s08", "s09"]),
        ("both left out by flags", ["s03", "s04", "s08", "s09"]),
    ],
)
def test_these_stages_are_one_computation_with_the_stage_before(machine, no_op_stages):
    no_ops = [row.short for row in ladder.STAGES if row.effect(MACHINES[machine]).no_op]
    assert no_ops == no_op_stages


def test_a_single_micro_batch_makes_s11_the_program_of_s10():
    alone = facts(tf32=True, amp_dtype="bfloat16", compile=True, accum=1)
    assert ladder.find("s11_accum").effect(alone) == ladder.Effect("no-op: one micro-batch per step", no_op=True)


def test_three_stages_are_for_the_loss_and_not_for_speed():
    assert [row.short for row in ladder.STAGES if row.for_the_loss] == ["s07", "s08", "s09"]


# a reader's own script


@pytest.mark.parametrize(
    "text, words",
    [
        ('"""Clipping alone, beta2 as in s06."""\n', "Clipping alone, beta2 as in s06"),
        ('"""Stage 7 · clip: GPT-3\'s betas, gradient clipping.\n\nMore."""\n', "mine.py"),  # a copy of s07
        ('"""\nA docstring that begins below."""\n', "mine.py"),
        ("import torch\n", "mine.py"),
    ],
)
def test_a_script_of_ones_own_is_called_by_its_title_or_its_file(monkeypatch, tmp_path, text, words):
    for stage in STAGES.values():
        shutil.copy(stage, tmp_path)
    monkeypatch.setattr(ladder, "FOLDER", tmp_path)
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    assert ladder.change("mine") == words


# What the bench and the flags ask of the table


@pytest.mark.parametrize(
    "mode, names",
    [
        ("amp", ["s03_bf16"]),
        ("limit", ["s05_flash", "s11_accum"]),
        ("scale", ["s12_ddp"]),
        ("loss", ["s06_vocab", "s07_clip", "s08_cosine"]),
        ("ladder", []),  # where none is named, the bench takes all
    ],
)
def test_a_mode_has_stages_of_its_own(mode, names):
    assert ladder.of_mode(mode) == names


@pytest.mark.parametrize(
    "flag, first",
    [("amp_dtype", "s03_bf16"), ("compile", "s04_compile"), ("accum", "s11_accum")],
)
def test_a_flag_is_used_from_its_stage_on(flag, first):
    used = [name for name in ladder.names() if ladder.is_used(flag, name)]
    assert used == [name for name in ladder.names() if name >= first]
    assert ladder.first_with(flag).name == first
    assert not ladder.is_used(flag, "mine")  # a script of the reader's own


def test_a_flag_that_no_stage_has_is_an_error():
    with pytest.raises(LookupError, match="flash"):
        ladder.first_with("flash")


def test_one_stage_follows_another_directly():
    assert ladder.follows("s02_tf32", "s01_baseline")
    assert not ladder.follows("s03_bf16", "s01_baseline")
    assert not ladder.follows("s01_baseline", "s02_tf32")
    assert not ladder.follows("s01_baseline", "mine")
    assert not ladder.follows("mine", "s12_ddp")


def test_s12_alone_takes_ranks_and_is_not_for_mps():
    assert [row.short for row in ladder.STAGES if row.takes_ranks] == ["s12"]
    assert [row.short for row in ladder.STAGES if "mps" in row.not_for] == ["s12"]
    assert ladder.find("mine") is None


def test_a_hash_is_of_the_code_below_the_docstring(monkeypatch, tmp_path):
    monkeypatch.setattr(ladder, "FOLDER", tmp_path)
    (tmp_path / "one.py").write_text('"""One."""\n\nx = 1\n')
    (tmp_path / "longer.py").write_text('"""Another.\n\nTwo lines more.\n"""\n\nx = 1\n')
    (tmp_path / "bare.py").write_text("x = 1\n")
    (tmp_path / "bare_above_a_function.py").write_text('x = 1\n\n\ndef f():\n    """Do nothing."""\n')
    (tmp_path / "changed.py").write_text('"""One."""\n\nx = 2\n')
    x_is_1 = hashlib.sha256(b"x = 1").hexdigest()
    assert ladder.code_sha256("one") == x_is_1
    assert ladder.code_sha256("longer") == x_is_1
    assert ladder.code_sha256("bare") == x_is_1
    assert ladder.code_sha256("changed") != x_is_1
    assert ladder.docstring_and_code("longer") == ("Another.\n\nTwo lines more.\n", "x = 1")
    assert ladder.docstring_and_code("bare_above_a_function")[0] == ""
    assert ladder.docstring_and_code("bare_above_a_function")[1].startswith("x = 1")
    assert ladder.docstring_and_code("gone") == ("", "")


# The sums


@pytest.mark.parametrize("size, seq_len", [("tiny", 64), ("mini", 64), ("tiny", 24)])
def test_flops_per_token_are_what_torch_counts_in_s01s_model(size, seq_len):
    attention = definitions("s01", "attention", torch=torch, math=math, F=F)["attention"]
    x = torch.zeros(1, seq_len, dtype=torch.long)
    model = GPT(GPTConfig(block_size=seq_len, **SIZES[size]), attention)
    with FlopCounterMode(display=False) as counter:
        model(x, x).backward()
    shape = {"vocab_size": VOCAB, **SIZES[size]}
    assert counter.get_total_flops() == seq_len * arithmetic.flops_per_token(shape, seq_len)


@pytest.fixture
def on_meta(monkeypatch):
    """Let a GPT stay on the meta device, which has shapes, but no memory and no arithmetic."""
    monkeypatch.setattr(GPT, "to_empty", lambda self, device: self)


@pytest.mark.parametrize("size", ["gpt2", "gpt2-xl", "micro"])
def test_weight_bytes_are_those_of_the_parameters(on_meta, size):
    parameters = sum(p.numel() for p in GPT(GPTConfig(block_size=512, **SIZES[size]), None).parameters())
    shape = {"vocab_size": VOCAB, **SIZES[size]}
    assert arithmetic.weight_bytes(shape, 512) == pytest.approx(4 * parameters, rel=0.002)


@pytest.mark.parametrize("batch_size", [2, 16])
def test_s01_bytes_are_what_the_tensors_of_s01_hold(on_meta, batch_size):
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker").MemTracker()
    attention = definitions("s01", "attention", torch=torch, math=math, F=F)["attention"]
    model = GPT(GPTConfig(), attention)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # AdamW's moments are there from now on
    optimizer.zero_grad()
    x = torch.zeros(batch_size, 1024, dtype=torch.long, device="meta")
    tracker.track_external(model, optimizer)
    with tracker:
        model(x, x).backward()
        optimizer.step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("meta")]["Total"]
    assert arithmetic.s01_bytes(batch_size) == pytest.approx(peak, rel=0.05)


# All sources

# a module may import only from the lines above its own, so that nothing goes in a circle
LAYERS = [
    ["data"],
    ["model"],
    ["harness.arithmetic", "harness.machine", "harness.memory"],
    ["harness.ladder", "harness.rates"],
    ["harness.parts", "harness.results"],
    ["harness.log", "harness.page", "harness.leader"],
    ["harness.flags"],
    ["harness"],  # hands on two names
    ["harness.probe", "sample", *NAMES],
    ["bench"],
]
MODULES = {path.stem: path for path in [*ROOT.glob("*.py"), *(ROOT / "stages").glob("*.py")]}
MODULES |= {f"harness.{path.stem}": path for path in (ROOT / "stages" / "harness").glob("*.py")}
MODULES["harness"] = MODULES.pop("harness.__init__")


def layer_of(name):
    """The index of a module's line in LAYERS."""
    for index, names in enumerate(LAYERS):
        if name in names:
            return index
    raise LookupError(f"{name} has no line in LAYERS of tests/test_ladder.py")


def modules_imported_by(name):
    """The modules of this repository that one of them imports, inside its functions too."""
    imported = set()
    for node in imports_in(tree_of(MODULES[name])):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
            continue
        package = node.module
        if node.level == 1:  # from . import x, from .x import y
            package = f"harness.{node.module}" if node.module else "harness"
        for alias in node.names:
            submodule = f"{package}.{alias.name}"
            imported.add(submodule if submodule in MODULES else package)
    return imported & MODULES.keys()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name):
    layer = layer_of(name)
    for imported in modules_imported_by(name):
        assert layer_of(imported) < layer, f"{name} imports {imported}"


def test_a_page_is_drawn_without_torch():
    script = "import sys; from harness import ladder, page, results; print('torch' in sys.modules)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT / "stages", capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("command", [("check",), ("format", "--check", "--diff")], ids=" ".join)
def test_ruff_has_no_complaint(command):
    pytest.importorskip("ruff")
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
