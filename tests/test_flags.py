"""The flags: which are refused and how, what they are by default, and what happens before torch loads."""

import harness
from harness import flags, ladder, log, machine, memory

import io
import json
import os
import runpy
import signal
import socket
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import STAGES, process

CPU = torch.device("cpu")
MPS = torch.device("mps")
CUDA = torch.device("cuda", 0)

DOC = "Stage 5 · flash: a title.\n\nA text.\n"
ONE_PROCESS = [stage for stage in ladder.names() if stage != "s12_ddp"]


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch):
    """Put back what parse_args changes in its process."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # else Python 3.14 names pytest in errors
    monkeypatch.setattr(log.StepLog, "current", None)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """A machine as these attributes say; until a test changes them a CPU with bfloat16 and a compiler."""
    fake = SimpleNamespace(native=torch.bfloat16, problem=None, memory=80e9, cores=6, threads=1, wsl=False)
    fake.problem_of_dtype = {}
    fake.free_share = 1.0

    def compile_problem(device, amp_dtype):
        return fake.problem or fake.problem_of_dtype.get(amp_dtype)

    monkeypatch.setattr(machine, "native_amp_dtype", lambda device: fake.native)
    monkeypatch.setattr(machine, "compile_problem", compile_problem)
    monkeypatch.setattr(machine, "total_memory", lambda device: fake.memory)
    monkeypatch.setattr(machine, "cores", lambda: fake.cores)
    monkeypatch.setattr(machine, "is_wsl", lambda: fake.wsl)
    monkeypatch.setattr(machine, "free_share", lambda device: fake.free_share)
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch, "get_num_threads", lambda: fake.threads)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    return fake


@pytest.fixture
def best_device(monkeypatch):
    """best_device(device) makes it the one that a run without --device takes."""

    def best_device(device):
        monkeypatch.setattr(machine, "find_device", lambda name: device)

    best_device(CPU)
    return best_device


@pytest.fixture(autouse=True)
def changes(monkeypatch):
    """What was changed in this process, a list of (what, value). Nothing really is."""
    changes = []

    def note(what):
        return lambda *values: changes.append((what, *values))

    monkeypatch.setattr(memory, "keep_freed", note("memory is kept"))
    monkeypatch.setattr(torch, "set_num_threads", note("threads"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", note("device"))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", note("fraction of memory"))
    return changes


@pytest.fixture
def torchrun(monkeypatch):
    """torchrun(rank, ranks) sets the environment that torchrun gives to a rank of a run on one machine."""

    def torchrun(rank, ranks):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")

    return torchrun


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """parse(flag, ..., stage="s05_flash"): what parse_args returns to this stage, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def parse(*words, stage="s05_flash"):
        monkeypatch.setattr(sys, "argv", [f"stages/{stage}.py"])
        return flags.parse_args(DOC, [str(word) for word in words])

    return parse


@pytest.fixture
def refusal(parse, capsys):
    """refusal(flag, ..., stage="s05_flash"): the one line with which exit status 2 is explained."""

    def refusal(*words, stage="s05_flash"):
        with pytest.raises(SystemExit) as ending:
            parse(*words, stage=stage)
        out, err = capsys.readouterr()
        assert ending.value.code == 2
        assert out == ""
        (line,) = err.splitlines()
        return line

    return refusal


@pytest.mark.parametrize("flag", ["--steps", "--batch-size", "--seq-len", "--accum"])
@pytest.mark.parametrize("value", ["0", "-3", "1.5", "many", ""])
def test_a_count_is_a_whole_number_of_1_or_more(refusal, flag, value):
    line = refusal("--device", "cpu", flag, value)
    assert line == f"s05_flash.py: error: argument {flag}: {value!r} is not a whole number of 1 or more"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "fast", ""])
def test_a_learning_rate_is_a_finite_number_above_0(refusal, value):
    line = refusal("--device", "cpu", "--lr", value)
    assert line == f"s05_flash.py: error: argument --lr: {value!r} is not a number above 0, such as 6e-4"


def test_the_learning_rate_is_6e_4_where_none_is_given(parse):
    assert parse("--device", "cpu").lr == 6e-4
    assert parse("--device", "cpu", "--lr", "1.2e-3").lr == 1.2e-3


@pytest.mark.parametrize(
    "words, message",
    [
        ("--seq-len 1025", "--seq-len 1025 is beyond GPT-2's block_size: pass 1024 or less"),
        ("--seed -1", "--seed must be from 0 to 2**63 - 1, got -1"),
        ("--seed 9223372036854775808", "--seed must be from 0 to 2**63 - 1, got 9223372036854775808"),
        ("--seed x", "argument --seed: invalid int value: 'x'"),
        ("--device tpu", "--device tpu: this machine has no such device; pass one of cpu"),
        ("--device cuda:x", "--device cuda:x: this machine has no such device; pass one of cpu"),
        ("--data", "argument --data: expected one argument"),
        ("--flash", "unrecognized arguments: --flash"),
        ("--step 3", "unrecognized arguments: --step 3"),  # no flag may be shortened
        ("text.txt", "unrecognized arguments: text.txt"),
        ("--record no/r", "--record no/r: No such file or directory; name a new file of yours"),
        ("--record ids.bin", "--record ids.bin: File exists; name a new file of yours"),
        ("--record .", "--record .: File exists; name a new file of yours"),
        ("--save w --record w/r", "--record w/r is inside --save w: name a file somewhere else"),
        ("--save w --record w", "--record w is inside --save w: name a file somewhere else"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(refusal, tmp_path, words, message):
    (tmp_path / "ids.bin").write_bytes(bytes(2000))
    assert refusal("--device", "cpu", *words.split()) == f"s05_flash.py: error: {message}"
    assert os.listdir(tmp_path) == ["ids.bin"]
    assert (tmp_path / "ids.bin").read_bytes() == bytes(2000)


@pytest.mark.parametrize(
    "flag, value, choice",
    [
        ("--size", "gpt5", "gpt2-medium"),
        ("--amp-dtype", "int8", "bfloat16"),
    ],
)
def test_a_wrong_choice_lists_the_right_ones(refusal, flag, value, choice):
    line = refusal("--device", "cpu", flag, value)
    assert line.startswith(f"s05_flash.py: error: argument {flag}: invalid choice: '{value}'")
    assert choice in line


def test_save_into_a_folder_of_other_files_is_refused(refusal, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    line = refusal("--device", "cpu", "--save", tmp_path)
    assert line.startswith(f"s05_flash.py: error: --save {tmp_path} can't be written: it holds 'notes.txt'")
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_the_disk_must_have_room_for_the_weights(parse, monkeypatch):
    asked = []
    monkeypatch.setattr(flags, "check_save", lambda directory, nbytes: asked.append((directory, nbytes)))
    parse("--device", "cpu", "--size", "tiny", "--seq-len", "32", "--save", "w")
    assert asked == [("w", 4 * (2 * 12 * 64 * 64 + (50257 + 32) * 64))]


def test_a_good_record_is_not_created_yet(parse, tmp_path):
    parse("--device", "cpu", "--record", "r.jsonl", "--save", "w")
    assert os.listdir(tmp_path) == []


def test_the_other_ranks_leave_the_record_to_rank_0(parse, torchrun, tmp_path):
    (tmp_path / "r.jsonl").write_text("what rank 0 has begun")
    torchrun(1, 2)
    assert parse("--device", "cpu", "--record", "r.jsonl", stage="s12_ddp").record == "r.jsonl"


@pytest.mark.parametrize("stage", ONE_PROCESS)
def test_a_stage_without_ddp_takes_one_process(refusal, torchrun, stage):
    torchrun(0, 2)
    line = refusal("--device", "cpu", stage=stage)
    assert line == f"{stage}.py: error: {stage} is for one process, and torchrun started 2: run s12_ddp"


@pytest.mark.parametrize("script", ["s12_ddp", "probe"])
def test_s12_and_a_script_that_is_no_stage_take_several(parse, torchrun, script):
    torchrun(0, 2)
    assert parse("--device", "cpu", stage=script).accum == 2


def test_accum_divides_over_the_ranks(refusal, torchrun):
    torchrun(0, 2)
    line = refusal("--device", "cpu", "--accum", "3", stage="s12_ddp")
    assert line == "s12_ddp.py: error: --accum 3 does not divide over 2 ranks: pass a multiple of 2"


@pytest.mark.parametrize(
    "environment, problem",
    [
        ({"RANK": "1"}, "of RANK and WORLD_SIZE only RANK is set: unset it"),
        ({"RANK": "0"}, "of RANK and WORLD_SIZE only RANK is set: unset it"),
        ({"WORLD_SIZE": "2"}, "of RANK and WORLD_SIZE only WORLD_SIZE is set: unset it"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2: unset both"),
        ({"RANK": "0", "WORLD_SIZE": "abc"}, "the environment variable WORLD_SIZE is 'abc': unset it"),
        ({"MASTER_PORT": "abc"}, "the environment variable MASTER_PORT is 'abc': unset it"),
        ({"MASTER_PORT": "99999"}, "the environment variable MASTER_PORT is 99999, beyond 65535: unset it"),
    ],
    ids=str,
)
def test_torchruns_environment_by_halves_is_refused(refusal, monkeypatch, environment, problem):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    line = refusal("--device", "cpu", stage="s12_ddp")
    assert line == f"s12_ddp.py: error: {problem}, or start the run with torchrun"


def test_an_address_that_nobody_has_is_refused_before_torch_tries_it(refusal, torchrun, monkeypatch):
    def resolve(host, port):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    torchrun(0, 1)
    monkeypatch.setenv("MASTER_ADDR", "no.such.host")
    line = refusal("--device", "cpu", stage="s12_ddp")
    assert line.startswith("s12_ddp.py: error: MASTER_ADDR is 'no.such.host' (")
    assert line.endswith("Name or service not known): name the first node's address")


def test_an_address_that_is_no_name_is_refused(refusal, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "a..b")
    line = refusal("--device", "cpu", stage="s12_ddp")
    assert line.startswith("s12_ddp.py: error: MASTER_ADDR is 'a..b' (")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_rank_that_waits_for_the_others_ends_by_a_signal(stages, name):
    # torch waits in C++, where no handler of Python's can run
    with socket.create_server(("127.0.0.1", 0)) as first_rank:  # it takes the call, and never answers
        first_rank.settimeout(60)
        environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment["MASTER_PORT"] = str(first_rank.getsockname()[1])
        command = [sys.executable, STAGES["s12"], "--device", "cpu", "--size", "tiny"]
        with process(command, stages.folder, stages.env | environment) as child:
            first_rank.accept()
            child.send_signal(getattr(signal, name))
            child.communicate(timeout=20)
    assert child.returncode == -getattr(signal, name)


def test_a_signal_that_is_ignored_stays_so(parse, torchrun):
    torchrun(0, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background job
    parse("--device", "cpu", stage="s12_ddp")
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_mps_can_not_run_s12(refusal, best_device):
    best_device(MPS)
    line = refusal(stage="s12_ddp")
    assert line.startswith("s12_ddp.py: error: not for mps: ")
    assert line.endswith(": pass --device cpu")


@pytest.mark.parametrize(
    "device, words, reason, message",
    [
        (MPS, [], "not-for-this-device", "not for mps: s12 averages gradients by gloo or nccl, which can't"),
        (CPU, ["--seq-len", "1025"], "bad-input", "--seq-len 1025 is beyond GPT-2's block_size"),
    ],
)
def test_the_bench_is_told_why_a_worker_refuses(parse, best_device, capsys, device, words, reason, message):
    best_device(device)
    with pytest.raises(SystemExit):
        parse("--worker", *words, stage="s12_ddp")
    out, err = capsys.readouterr()
    entry = json.loads(out)
    assert entry["kind"] == "error"
    assert entry["reason"] == reason
    assert entry["error"].startswith(message)
    assert err == f"s12_ddp.py: error: {entry['error']}\n"


def test_the_defaults_of_a_cpu(parse, best_device):
    args = parse()
    assert args.device == CPU
    assert args.size == "micro"
    assert args.shape == {"vocab_size": 50257, "n_layer": 4, "n_head": 4, "n_embd": 256}
    assert args.batch_size == 1
    assert args.seq_len == 1024
    assert args.steps == 24
    assert args.accum == 2
    assert args.seed == 1337
    assert args.amp_dtype == torch.bfloat16
    assert args.compile is True
    assert args.fallbacks == {}


@pytest.mark.parametrize("device, memory, batch_size", [(CUDA, 80e9, 16), (MPS, 12e9, 4)])
def test_the_defaults_of_an_accelerator(parse, best_device, fake, device, memory, batch_size):
    best_device(device)
    fake.memory = memory
    args = parse()
    assert args.device == device
    assert args.size == "gpt2"
    assert args.shape == {"vocab_size": 50257, "n_layer": 12, "n_head": 12, "n_embd": 768}
    assert args.batch_size == batch_size
    assert args.seq_len == 1024
    assert args.steps == 50
    assert args.accum == 4


@pytest.mark.parametrize(
    "gigabytes, batch_size", [(80, 16), (40, 16), (32, 8), (24, 8), (16, 4), (12, 4), (8, 2), (6, 2), (4, 1)]
)
def test_the_batch_is_what_fits_a_card(gigabytes, batch_size):
    assert flags.fitting_batch_size(gigabytes * 10**9) == batch_size


def test_what_is_given_wins(parse, fake):
    fake.problem = "no compiler"
    numbers = ["--steps", "5", "--batch-size", "3", "--seq-len", "32", "--accum", "6", "--seed", "7"]
    choices = ["--device", "cpu", "--size", "tiny", "--amp-dtype", "float16", "--compile"]
    args = parse(*numbers, *choices)
    assert (args.steps, args.batch_size, args.seq_len, args.accum, args.seed) == (5, 3, 32, 6, 7)
    assert (args.size, args.shape["n_embd"]) == ("tiny", 64)
    assert args.amp_dtype == torch.float16
    assert args.compile is True
    assert args.fallbacks == {}


@pytest.mark.parametrize(
    "device, ranks, accum",
    [
        (CPU, 1, 2),
        (CPU, 2, 2),
        (CPU, 3, 3),
        (CPU, 8, 8),
        (CUDA, 1, 4),
        (CUDA, 2, 4),
        (CUDA, 3, 3),
        (CUDA, 8, 8),
    ],
)
def test_every_rank_has_a_micro_batch_by_default(parse, best_device, torchrun, device, ranks, accum):
    best_device(device)
    torchrun(0, ranks)
    assert parse(stage="s12_ddp").accum == accum


@pytest.mark.parametrize(
    "stage, lines",
    [
        ("s01_baseline", []),
        ("s02_tf32", []),
        ("s03_bf16", ["amp_dtype"]),
        ("s04_compile", ["amp_dtype", "compile"]),
        ("s05_flash", ["amp_dtype", "compile"]),
        ("s12_ddp", ["amp_dtype", "compile"]),
        ("my_copy_of_s05", []),
    ],
)
def test_a_fallback_is_a_line_from_the_stage_of_its_flag_on(parse, best_device, fake, capsys, stage, lines):
    fake.native = torch.float32
    fake.problem = "no C++ compiler found: install g++"
    args = parse(stage=stage)
    assert args.amp_dtype == torch.float32
    assert args.compile is False
    why = {
        "amp_dtype": "this cpu has no 16-bit arithmetic, so float32 stays",
        "compile": "left out, no C++ compiler found: install g++",
    }
    assert args.fallbacks == why  # the record has both, whatever the stage
    assert capsys.readouterr().err.splitlines() == [f"{flag}: {why[flag]}" for flag in lines]


@pytest.mark.parametrize("amp_dtype, compiled", [("bfloat16", False), ("float16", True)])
def test_compile_falls_back_where_it_can_not_take_the_dtype_that_was_asked_for(
    parse, best_device, fake, capsys, amp_dtype, compiled
):
    best_device(CUDA)
    fake.native = torch.float16
    fake.problem_of_dtype = {torch.bfloat16: "a T4 has no bfloat16"}
    args = parse("--amp-dtype", amp_dtype, stage="s10_fused")
    assert args.compile is compiled
    if compiled:
        assert args.fallbacks == {}
    else:
        assert args.fallbacks == {"compile": "left out, a T4 has no bfloat16"}
        assert capsys.readouterr().err == "compile: left out, a T4 has no bfloat16\n"


def test_what_the_user_asked_for_is_no_fallback(parse, best_device, fake, capsys):
    fake.native = torch.float32
    fake.problem = "no C++ compiler found: install g++"
    args = parse("--no-compile", "--amp-dtype", "float32")
    assert args.fallbacks == {}
    assert capsys.readouterr().err == ""


def test_rank_0_alone_tells_of_a_fallback(parse, best_device, fake, torchrun, capsys):
    fake.problem = "no C++ compiler found: install g++"
    torchrun(1, 2)
    assert parse(stage="s12_ddp").fallbacks.keys() == {"compile"}
    assert capsys.readouterr().err == ""


def new_args():
    """The flags as the bench has them before it calls resolve(): none was given."""
    parser = flags.Parser()
    flags.add_flags(parser)
    return parser.parse_args([])


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_resolve_changes_nothing_in_the_process(best_device, fake, torchrun, changes, device):
    best_device(device)
    fake.wsl = True
    torchrun(0, 2)
    environment = dict(os.environ)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    hook = sys.excepthook
    args = new_args()
    flags.resolve(args)
    assert args.device == device
    assert changes == []
    assert dict(os.environ) == environment
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    assert sys.excepthook is hook


def test_a_stage_on_a_cpu_keeps_freed_memory_and_its_threads(parse, best_device, changes):
    parse()
    assert changes == [("memory is kept",)]


def test_a_stage_on_a_card_takes_that_card(parse, best_device, changes):
    best_device(CUDA)
    parse()
    assert changes == [("device", 0)]


def test_under_wsl_a_stage_leaves_the_system_memory_alone(parse, best_device, fake, changes):
    best_device(CUDA)
    fake.wsl = True
    fake.free_share = 0.5  # the rest is what other programs hold, such as Windows itself
    parse()
    assert changes == [("device", 0), ("fraction of memory", 0.475, CUDA)]


@pytest.mark.parametrize("ranks, threads", [(2, 3), (3, 2), (4, 1), (8, 1)])
def test_ranks_share_the_cores_of_a_cpu(parse, best_device, torchrun, changes, ranks, threads):
    torchrun(0, ranks)  # which gives each one thread
    parse(stage="s12_ddp")
    assert changes == [("memory is kept",), ("threads", threads)]


@pytest.mark.parametrize("torch_threads, ranks", [(7, 1), (64, 1), (64, 2)])
def test_torch_takes_no_more_threads_than_a_container_has_cores(
    parse, best_device, fake, torchrun, changes, torch_threads, ranks
):
    fake.threads = torch_threads  # as many as the machine has cores, since torch knows of no quota
    torchrun(0, ranks)
    parse(stage="s12_ddp")
    assert changes == [("memory is kept",), ("threads", 6 // ranks)]


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_torch_compiles_with_no_more_workers_than_a_container_has_cores(parse, best_device, fake, device):
    best_device(device)
    fake.cores = 3
    parse()
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "3"


def test_torch_compiles_with_32_workers_at_most(parse, best_device, fake):
    fake.cores = 128
    parse()
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "32"  # torch's own limit


def test_compile_workers_that_the_user_chose_stay(parse, best_device, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    parse()
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "1"


def test_more_threads_than_cores_stay_where_the_user_chose_them(parse, best_device, fake, changes, monkeypatch):
    fake.threads = 8
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    parse()
    assert changes == [("memory is kept",)]


def test_threads_that_the_user_chose_stay(parse, best_device, fake, torchrun, changes):
    fake.threads = 2
    torchrun(0, 2)
    parse(stage="s12_ddp")
    assert changes == [("memory is kept",)]


def test_a_worker_on_several_ranks_keeps_the_threads_that_the_bench_gave_it(
    parse, best_device, fake, torchrun, changes, monkeypatch
):
    """In `scale` every row has the same number of threads for each rank, so that only the ranks differ."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fake.threads = 1
    torchrun(0, 2)
    parse("--worker", stage="s12_ddp")
    assert changes == [("memory is kept",)]


def test_an_error_of_a_stage_ends_it_by_the_logs_rules(parse, best_device, capfd):
    parse()
    with pytest.raises(SystemExit) as ending:
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert ending.value.code == 130
    assert capfd.readouterr().err == "error: interrupted\n"


def test_the_title_is_the_first_line_of_the_docstring(parse, best_device):
    args = parse(stage="s05_flash")
    assert args.title == "Stage 5 · flash: a title."
    assert args.stage == "s05_flash"


def test_without_docstrings_the_title_is_the_name(best_device, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["stages/s05_flash.py"])
    assert flags.parse_args(None, []).title == "s05_flash"  # python -OO


def test_the_help_says_from_which_stage_on_a_flag_has_an_effect(parse, capsys):
    with pytest.raises(SystemExit) as ending:
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert ending.value.code == 0
    assert "of autocast, from s03 on" in text
    assert "torch.compile, from s04 on" in text
    assert "micro-batches per step of all ranks, from s11 on" in text
    assert "--worker" not in text  # the bench's business


@pytest.fixture
def import_again(monkeypatch):
    """import_again(stdout): run the text of harness/__init__.py where sys.stdout is this."""

    def import_again(stdout):
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "stdout", stdout)
        runpy.run_path(harness.__file__, run_name="harness.again")  # of the package, so that it can import from it

    return import_again


def test_a_terminal_without_utf_8_shows_a_question_mark(import_again):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    import_again(stdout)
    stdout.write("Stage 5 · flash")
    stdout.flush()
    assert stdout.buffer.getvalue() == b"Stage 5 ? flash"


@pytest.mark.parametrize("stdout", [None, io.StringIO()], ids=["closed", "of a notebook"])
def test_a_stdout_that_is_no_terminal_is_left_as_it_is(import_again, stdout):
    import_again(stdout)
    assert sys.stdout is stdout


def test_data_and_model_are_importable_from_any_folder(import_again, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [])
    import_again(sys.stdout)
    assert sys.path == [str(STAGES["s01"].parents[1])]


def test_what_the_user_set_in_the_environment_counts(import_again, monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    import_again(sys.stdout)
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"
    assert os.environ["KINETO_LOG_LEVEL"] == "99"


@pytest.fixture
def tf32_everywhere(monkeypatch):
    """The environment of a container that lets every float32 matmul run in TF32."""
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")


def test_no_environment_decides_on_tf32_in_place_of_a_stage(import_again, tf32_everywhere, capsys):
    import_again(sys.stdout)
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" not in os.environ
    assert "NVIDIA_TF32_OVERRIDE" not in os.environ
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 and NVIDIA_TF32_OVERRIDE=1, since each stage itself says "
        "where TF32 is used"
    )
    import_again(sys.stdout)
    assert capsys.readouterr().err == ""


def test_rank_0_alone_tells_that_the_environment_does_not_decide_on_tf32(
    import_again, tf32_everywhere, monkeypatch, capsys
):
    monkeypatch.setenv("RANK", "1")
    import_again(sys.stdout)
    assert "NVIDIA_TF32_OVERRIDE" not in os.environ
    assert capsys.readouterr().err == ""


def test_harness_hands_on_two_names():
    assert harness.parse_args is flags.parse_args
    assert harness.StepLog is log.StepLog
    with pytest.raises(AttributeError, match="no attribute parse"):
        harness.parse  # noqa: B018
