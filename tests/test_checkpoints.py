"""Weights on disk and the command line: Hugging Face as the oracle, both ways, and what a user can get wrong."""

import json
import os
import signal
import sys

import pytest
import torch
from conftest import FLOAT32, ROOT, STAGES, definitions, process

from data import InputError, byte_tokenizer, load_tokens
from model import FILES, GPT, GPTConfig, check_save, evaluate, load, main

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
attention = definitions("s05", "attention", F=torch.nn.functional)["attention"]
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def ours(**changes):
    torch.manual_seed(0)
    shape = dict(vocab_size=300, block_size=24, n_layer=3, n_head=4, n_embd=48) | changes
    net = GPT(GPTConfig(**shape), attention)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.2)  # biases and gains too, and large enough for errors to show
    return net


def assert_alike(mine, hf):
    idx = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(mine(idx), hf.eval()(idx).logits, atol=1e-4, rtol=0)
    assert {p.dtype for p in mine.parameters()} == {torch.float32}


@pytest.fixture
def saved(tmp_path):
    ours().save_pretrained(tmp_path / "it", tokenizer="gpt2-bytes")
    return tmp_path / "it"


@pytest.fixture
def hf(saved):
    hf, info = transformers.GPT2LMHeadModel.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values())
    return hf


def assert_one_line(capsys, words, *flags):
    with pytest.raises(SystemExit) as end:
        main([str(flag) for flag in flags])
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1) and "error: " in err and words in err, err


def test_checkpoints_pass_both_ways_with_transformers(saved, hf, tmp_path):
    assert_alike(ours(), hf)
    again, tokenizer = load(saved, attention)
    assert tokenizer == "gpt2-bytes" and again.config == ours().config
    assert (saved / WEIGHTS).read_bytes()[0] % 8 == 0  # the header's length, which aligns the numbers
    assert all(torch.equal(a, b) for a, b in zip(ours().parameters(), again.parameters(), strict=True))
    for name, size in (("one file", "1GB"), ("shards", "50KB")):
        hf.save_pretrained(tmp_path / name, max_shard_size=size)
        assert (len(list((tmp_path / name).glob("*.safetensors"))) > 1) == (name == "shards")
        assert_alike(GPT.from_pretrained(str(tmp_path / name), attention), hf)
    ours().bfloat16().save_pretrained(saved)
    assert {t.dtype for t in safetensors.load_file(saved / WEIGHTS).values()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_loads_what_openai_published_from_the_hubs_cache(hf, tmp_path, monkeypatch, dtype):
    hub, home = pytest.importorskip("huggingface_hub"), tmp_path / "models--openai-community--gpt2-xl"
    hf.config.save_pretrained(home / "snapshots" / "0")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0")
    tensors = {key.removeprefix("transformer."): t.clone() for key, t in hf.to(dtype).state_dict().items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24, dtype=torch.uint8).tril() for i in range(3)}
    safetensors.save_file(tensors, home / "snapshots" / "0" / WEIGHTS)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert_alike(GPT.from_pretrained("gpt2-xl", attention), hf.float())


def test_save_replaces_nothing_but_its_own(saved, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(saved)
    (tmp_path / "new").symlink_to(tmp_path / "a" / "b")  # which is not there yet
    for name in ("empty", "link", "new"):
        ours(n_head=6).save_pretrained(tmp_path / name)
    assert load(saved, attention)[0].config == load(tmp_path / "a" / "b", attention)[0].config == ours(n_head=6).config
    (tmp_path / "theirs").mkdir()
    for mine in ("empty/notes.txt", "theirs/config.json", "file"):
        (tmp_path / mine).write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("empty", "theirs", "file", "file/below", "x" * 300, "/proc/nobody/may/write"):
        with pytest.raises(InputError, match=f"--save .*{name} can't be written"):
            ours().save_pretrained(tmp_path / name)
    with pytest.raises(InputError, match=r"the weights take 1000000000\.00 GB, and \d+\.\d\d GB are free"):
        check_save(tmp_path / "b" / "new", nbytes=10**18)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("error", [OSError(28, "no space"), KeyboardInterrupt()], ids=["full", "interrupted"])
def test_a_save_that_fails_leaves_what_was_there(saved, monkeypatch, error):
    def fail(*paths):
        there.extend({*os.listdir(saved)} - FILES)
        raise error

    there = []
    with monkeypatch.context() as patch, pytest.raises((InputError, KeyboardInterrupt)):
        patch.setattr(os, "replace", fail)
        ours(n_layer=1).save_pretrained(saved)
    assert {path.name for path in saved.iterdir()} == FILES and load(saved, attention)[0].config.n_layer == 3
    (saved / there[0]).mkdir()  # what a kill would have left
    ours(n_layer=1).save_pretrained(saved)
    assert load(saved, attention)[0].config.n_layer == 1


DAMAGE = {  # a file and its bytes, or changes to config.json, a header's entry or a tensor
    "empty": (WEIGHTS, b"", "empty"),
    "a length beyond the file": (WEIGHTS, b"\xff" * 5000, WEIGHTS),
    "integers": (WEIGHTS, dict(dtype="I32"), "'I32'"),
    "another size": (WEIGHTS, dict(shape=[2, 2]), "[2, 2]"),
    "offsets beyond the file": (WEIGHTS, dict(data_offsets=[24, 48]), "[24, 48]"),
    "another model": (WEIGHTS, {}, "no GPT-2"),
    "a shard elsewhere": (f"{WEIGHTS}.index.json", b'{"weight_map": {"a": "../shard"}}', "outside of the directory"),
    "a FIFO": (CONFIG, None, "config.json: there is no such file"),
    "nested JSON": (CONFIG, b"[" * 100_000, "config.json: maximum recursion"),
    "llama": (CONFIG, dict(model_type="llama"), "model_type 'llama'"),
    "a billion layers": (CONFIG, dict(n_layer=10**9), "n_layer 1000000000"),
    "heads": (CONFIG, dict(n_head=5), "n_embd 48 is not divisible by n_head 5"),
    "another tokenizer": (CONFIG, dict(tokenizer="llama"), "llama"),
    "not transposed": ("transformer.h.0.mlp.c_fc.weight", lambda t: t.T, "torch.Size([48, 192])"),
    "not finite": ("transformer.ln_f.bias", lambda t: t / 0, "not finite"),
    "another head": ("lm_head.weight", lambda t: torch.zeros(300, 48), "lm_head.weight"),
}


@pytest.mark.parametrize("name, change, words", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_one_line(saved, capsys, name, change, words):
    if callable(change):
        tensors = safetensors.load_file(saved / WEIGHTS)
        name, change = WEIGHTS, safetensors.save(tensors | {name: change(tensors.get(name)).contiguous()})
    elif isinstance(change, dict) and name == CONFIG:
        change = json.dumps(json.loads((saved / CONFIG).read_text()) | change).encode()
    elif isinstance(change, dict):
        header = json.dumps({"wte.weight": dict(dtype="F32", shape=[2, 3], data_offsets=[0, 24]) | change}).encode()
        change = len(header).to_bytes(8, "little") + header + bytes(24)
    (saved / (CONFIG if name == CONFIG else WEIGHTS)).unlink()
    os.mkfifo(saved / name) if change is None else (saved / name).write_bytes(change)
    assert_one_line(capsys, words, "--weights", saved, "--tokens", 1)


FLAGS = "--tokens 0|--tokens x|--samples 0|--top-k 0|--temperature inf|--seed -1|--prom a|--device no|--eval --prompt a"


@pytest.mark.parametrize("flags", FLAGS.split("|"))
def test_a_wrong_flag_is_one_line(capsys, flags):
    assert_one_line(capsys, flags.split()[0], *flags.split())


def test_eval_needs_the_models_tokens_and_no_other_package(saved, tmp_path, capsys, monkeypatch):
    for package in ("huggingface_hub", "safetensors", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    assert_one_line(capsys, "pip install huggingface_hub", "--eval", "--weights", "gpt2")
    monkeypatch.setattr("data.tokenizer", byte_tokenizer)
    flags = ["--weights", str(saved), "--eval", "--data"]
    (tmp_path / "long.txt").write_text("to be " * 100)
    loss = evaluate(ours(), load_tokens(tmp_path / "long.txt", split="val"))
    main([*flags, str(tmp_path / "long.txt")])
    assert f"long.txt, last tenth, 60 tokens of gpt2-bytes\nloss {loss:.4f} nats/token" in capsys.readouterr().out
    (tmp_path / "short.txt").write_text("a")
    assert_one_line(capsys, "pass a longer text", *flags, tmp_path / "short.txt")
    (tmp_path / "ids.bin").write_bytes(bytes(2000))
    assert_one_line(capsys, "tokens of gpt2-bytes", *flags, tmp_path / "ids.bin")


def test_the_seed_decides_the_text(saved, capsys):
    def text(*flags):
        main(["--weights", str(saved), "--prompt", "a" * 30, "--tokens", "30", "--device", "cpu", *flags])
        out, err = capsys.readouterr()
        assert out.startswith("a" * 30) and "of which the model reads the last 24" in err and "tokens in" in err
        return out[30:]

    one = text("--seed", "1")
    assert text("--seed", "0", "--samples", "2").endswith(f"\n---\n{'a' * 30}{one}")
    assert text("--temperature", "0") == text("--top-k", "1") != one


@pytest.mark.parametrize("steps, status", [(5, 0), (100000, 130)], ids=["complete", "interrupted"])
def test_a_stages_weights_load_everywhere(stages, tmp_path, steps, status):
    command = [sys.executable, STAGES["s06"], *FLOAT32, "--steps", steps, "--save", "it"]
    with process(command, tmp_path, stages.env) as child:
        assert any(line.startswith("step    4") for line in child.stdout)
        child.send_signal(signal.SIGINT if status else 0)  # 0 is no signal
        out, err = child.communicate(timeout=120)
    assert child.returncode == status and "saved to it" in out and "Traceback" not in err, err
    mine = GPT.from_pretrained(tmp_path / "it", attention)
    assert mine.transformer.h[0].mlp.c_fc.bias.abs().max() > 0  # it was trained
    assert_alike(mine, transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "it"))


@pytest.mark.parametrize("stop, end", [("interrupt", (130, "\ninterrupted\n")), ("close", (1, ""))])
def test_the_command_ends_without_a_traceback(tmp_path, stop, end):
    command = [sys.executable, ROOT / "model.py", "--prompt", "é", "--tokens", 100000, "--device", "cpu"]
    with process(command, tmp_path, os.environ | dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")) as child:
        assert "?" in child.stdout.read(9)  # text comes as it is generated, with "?" for what can't be encoded
        child.send_signal(signal.SIGINT) if stop == "interrupt" else child.stdout.close()
        assert (child.wait(timeout=60), child.stderr.read()) == end
