"""Weights in, text out: Hugging Face's GPT-2 as the oracle, both ways, and what a user can get wrong."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import FLOAT32, ROOT, process
from torch.nn import functional as F

import data
import sample
import weights
from data import InputError
from model import GPT, GPTConfig

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

SHAPE = dict(vocab_size=300, n_layer=3, n_head=4, n_embd=48)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """A second one only waits, on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(net):
    """The net with no number left at 0 or 1, and positions that keep greedy text from repeating itself."""
    torch.manual_seed(0)
    for name, p in net.named_parameters():
        torch.nn.init.normal_(p, std=1.0 if "wpe" in name else 0.2)
    return net.eval()


def theirs():
    config = transformers.GPT2Config(**SHAPE, n_positions=24, bos_token_id=0, eos_token_id=None)
    return drawn(transformers.GPT2LMHeadModel(config))


def ours(**settings):
    return drawn(GPT(GPTConfig(**{**SHAPE, "block_size": 24, **settings}), sample.attention))


@torch.no_grad()
def assert_alike(mine, hf):
    idx = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(mine(idx)[0], hf(idx).logits, atol=1e-4, rtol=0)
    greedy = hf.generate(idx[:, :4], attention_mask=torch.ones(2, 4), max_new_tokens=20, do_sample=False)
    assert mine.generate(idx[:, :4], 20, temperature=0).tolist() == greedy.tolist()
    assert len(set(greedy[0].tolist())) > 5  # not the one token over and over


def cli(capsys, *flags):
    """(status, stdout, stderr) of the command line, in this process."""
    status = 0
    try:
        sample.main([str(flag) for flag in flags])
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


def edit(directory, **settings):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint that speaks in bytes, not to be changed."""
    directory = tmp_path_factory.mktemp("saved") / "it"
    ours().save_pretrained(directory, tokenizer="gpt2-bytes")
    return directory


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "50KB"}], ids=["one file", "shards"])
def test_loads_what_transformers_saved(tmp_path, shards):
    hf = theirs()
    hf.save_pretrained(tmp_path, **shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == bool(shards)
    assert_alike(GPT.from_pretrained(str(tmp_path), sample.attention), hf)


def test_loads_what_openai_published_by_name_from_the_hubs_cache(tmp_path, monkeypatch):
    """Bare names, a mask in every layer, lm_head written out, and 16 bits, as such files may have."""
    hub = pytest.importorskip("huggingface_hub")
    hf = theirs().half()
    home = tmp_path / "models--openai-community--gpt2-xl"
    snapshot = home / "snapshots" / "0" / "config.json"
    snapshot.parent.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0")
    snapshot.write_text(json.dumps(dict(model_type="gpt2", n_positions=24, n_ctx=24, **SHAPE)))
    tensors = {name.removeprefix("transformer."): p.data for name, p in hf.named_parameters()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24).tril() for i in range(3)}
    tensors |= {"lm_head.weight": tensors["wte.weight"].clone()}
    safetensors.save_file(tensors, snapshot.parent / "model.safetensors")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(data, "offline", True)
    mine = GPT.from_pretrained("gpt2-xl", sample.attention)
    assert {p.dtype for p in mine.parameters()} == {torch.float32}
    assert_alike(mine, hf.float())


def test_transformers_loads_what_was_saved_here(saved):
    hf, info = transformers.GPT2LMHeadModel.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values())
    assert_alike(ours(), hf.eval())
    again, tokenizer = weights.load(str(saved), sample.attention)
    assert tokenizer == "gpt2-bytes"
    for (name, a), (_, b) in zip(ours().named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_float32_is_written_whatever_the_model_holds(tmp_path):
    ours().bfloat16().save_pretrained(tmp_path / "it")
    tensors = safetensors.load_file(tmp_path / "it" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.float32} and "lm_head.weight" not in tensors
    assert os.stat(tmp_path / "it" / "config.json").st_mode == os.stat(tmp_path / "it" / "model.safetensors").st_mode


def test_save_replaces_its_own_and_an_empty_directory_alone(saved, tmp_path):
    net = ours()
    (tmp_path / "empty").mkdir()
    net.save_pretrained(tmp_path / "empty")
    shutil.copytree(saved, tmp_path / "earlier")
    (tmp_path / "link").symlink_to(tmp_path / "earlier")
    net.save_pretrained(tmp_path / "link", tokenizer="gpt2")  # through the link
    assert json.loads((tmp_path / "earlier" / "config.json").read_text())["tokenizer"] == "gpt2"
    net.save_pretrained(tmp_path / "a" / "b" / "new")

    theirs().save_pretrained(tmp_path / "hf")
    shutil.copytree(saved, tmp_path / "more")
    (tmp_path / "more" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("hf", "more", "file", "file/below", "x" * 300):
        with pytest.raises(InputError, match=f"--save .*{name}"):
            net.save_pretrained(tmp_path / name)
    assert (tmp_path / "more" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"empty", "earlier", "link", "a", "hf", "more", "file"}


@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("error", [OSError(28, "no space"), KeyboardInterrupt()], ids=["full", "interrupted"])
@pytest.mark.parametrize("where", ["file", "rename"])
def test_a_write_that_is_cut_leaves_what_was_there(saved, tmp_path, monkeypatch, earlier, error, where):
    def cut_file(tensors, path, metadata):
        path.write_bytes(b"half of it")
        raise error

    rename = type(tmp_path).rename

    def cut_rename(path, target):
        if path.name == "new":
            raise error
        return rename(path, target)

    if earlier:
        shutil.copytree(saved, tmp_path / "it")
    with monkeypatch.context() as patch, pytest.raises((InputError, KeyboardInterrupt)):
        if where == "file":
            patch.setattr(safetensors, "save_file", cut_file)
        else:
            patch.setattr(type(tmp_path), "rename", cut_rename)
        ours(n_layer=1).save_pretrained(tmp_path / "it")
    assert [p.name for p in tmp_path.iterdir()] == ["it"] * earlier
    if earlier:
        assert GPT.from_pretrained(tmp_path / "it", sample.attention).config.n_layer == 3


def assert_one_line(status, out, err, words):
    assert (status, out) == (2, ""), err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert words in err


@pytest.mark.parametrize("name", ["gpt3", "", "x" * 300])
def test_a_name_that_is_none_is_one_line(capsys, name):
    assert_one_line(*cli(capsys, "--weights", name), f"no weights at {name}")


def truncated(d):
    os.truncate(d / "model.safetensors", 1000)


def cut_in_half(d):
    os.truncate(d / "model.safetensors", (d / "model.safetensors").stat().st_size // 2)


def empty(d):
    os.truncate(d / "model.safetensors", 0)


def rubbish(d):
    (d / "model.safetensors").write_bytes(os.urandom(5000))


def no_file(d):
    (d / "model.safetensors").unlink()


def no_config(d):
    (d / "config.json").unlink()


def no_directory(d):
    shutil.rmtree(d)


def torn_config(d):
    (d / "config.json").write_text('{"model_type": "gp')


def no_object(d):
    (d / "config.json").write_text("[]")


def binary_config(d):
    (d / "config.json").write_bytes(b"\xff\x00")


def missing_shard(d):
    (d / "model.safetensors").rename(d / "model-00001-of-00002.safetensors")
    files = {"transformer.wte.weight": "model-00001-of-00002.safetensors", "lm_head.weight": "model-00002-of-00002"}
    (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def no_index(d):
    no_file(d)
    (d / "model.safetensors.index.json").write_text("[]")


def tensors(**changes):
    """Damage done to the tensors by name: a function of the old one, which returns the new one or None."""

    def damage(d):
        old = safetensors.load_file(d / "model.safetensors")
        for key, change in changes.items():
            key = key.replace("__", ".")
            new = change(old.pop(key, None))
            if new is not None:
                old[key] = new.clone(memory_format=torch.contiguous_format)
        safetensors.save_file(old, d / "model.safetensors")

    return damage


def settings(**changes):
    return lambda d: edit(d, **changes)


def wrapped(d):
    old = safetensors.load_file(d / "model.safetensors")
    safetensors.save_file({f"_orig_mod.{key}": t for key, t in old.items()}, d / "model.safetensors")


def another(d):
    safetensors.save_file({"model.embed.weight": torch.zeros(3, 3)}, d / "model.safetensors")


DAMAGE = {
    "truncated": (truncated, "truncated or corrupt"),
    "cut in half": (cut_in_half, "truncated or corrupt"),
    "empty": (empty, "truncated or corrupt"),
    "rubbish": (rubbish, "truncated or corrupt"),
    "no file": (no_file, "no model.safetensors"),
    "no config": (no_config, "config.json"),
    "no directory": (no_directory, "no weights at"),
    "torn config": (torn_config, "JSON"),
    "no object": (no_object, "JSON"),
    "binary config": (binary_config, "JSON"),
    "missing shard": (missing_shard, "has no model-00002-of-00002"),
    "no index": (no_index, "truncated or corrupt"),
    "llama": (settings(model_type="llama"), "model_type llama"),
    "relu": (settings(activation_function="relu"), "activation_function relu"),
    "epsilon": (settings(layer_norm_epsilon=1e-6), "layer_norm_epsilon"),
    "untied": (settings(tie_word_embeddings=False), "tie_word_embeddings"),
    "wider MLP": (settings(n_inner=100), "n_inner"),
    "heads": (settings(n_head=5), "n_embd 48 is not divisible by n_head 5"),
    "text for a number": (settings(n_layer="3"), "whole number"),
    "null for a number": (settings(n_embd=None), "whole number"),
    "layers": (settings(n_layer=4), "n_layer 4"),
    "a billion layers": (settings(n_layer=10**9), "n_layer 1000000000"),
    "vocabulary": (settings(vocab_size=10**12), "vocab_size"),
    "positions": (settings(n_positions=1024), "block_size 1024"),
    "tokenizer": (settings(tokenizer="llama"), "tokens of llama"),
    "its vocabulary": (settings(tokenizer="gpt2"), "gpt2"),
    "wrong shape": (tensors(transformer__ln_f__bias=lambda t: t[:-1]), "ln_f.bias has shape (47,)"),
    "not transposed": (tensors(transformer__h__0__mlp__c_fc__weight=lambda t: t.T), "(192, 48)"),
    "not finite": (tensors(transformer__ln_f__bias=lambda t: t * math.nan), "not finite"),
    "a key less": (tensors(transformer__ln_f__bias=lambda t: None), "lacks ln_f.bias and has nothing"),
    "a key more": (tensors(transformer__extra=lambda t: torch.zeros(1)), "lacks nothing and has extra"),
    "another head": (tensors(lm_head__weight=lambda t: torch.zeros(300, 48)), "lm_head.weight"),
    "flat": (tensors(transformer__wpe__weight=lambda t: torch.tensor(1.0)), "no GPT-2"),
    "wrapped": (wrapped, "no GPT-2"),
    "another model": (another, "no GPT-2: its tensors are model.embed.weight"),
}


@pytest.mark.parametrize("damage, words", DAMAGE.values(), ids=DAMAGE)
def test_a_bad_checkpoint_is_one_line(saved, tmp_path, capsys, damage, words):
    shutil.copytree(saved, tmp_path / "it")
    damage(tmp_path / "it")
    assert_one_line(*cli(capsys, "--weights", tmp_path / "it", "--tokens", 1), words)


@pytest.mark.parametrize(
    "flags",
    [
        ["--tokens", "0"],
        ["--tokens", "-1"],
        ["--tokens", "x"],
        ["--samples", "0"],
        ["--top-k", "0"],
        ["--temperature", "-0.1"],
        ["--temperature", "nan"],
        ["--temperature", "inf"],
        ["--seed", "-1"],
        ["--seed", str(2**63)],
        ["--prompt", ""],
        ["--prompt", "a", "--eval"],
        ["--prom", "a"],
        ["--unknown"],
    ],
)
def test_a_bad_flag_is_argparses_error(capsys, flags):
    status, out, err = cli(capsys, *flags)
    assert (status, out) == (2, "") and err.splitlines()[-1].startswith("model.py: error: "), err


@pytest.mark.parametrize("device", ["banana", "meta", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there_is_one_line(capsys, device):
    assert_one_line(*cli(capsys, "--device", device), f"--device {device}")


def test_a_missing_package_is_asked_for(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert_one_line(*cli(capsys, "--weights", "gpt2"), "pip install huggingface_hub")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert_one_line(*cli(capsys, "--weights", saved), "pip install safetensors")
    with pytest.raises(InputError, match="pip install safetensors"):
        ours().save_pretrained(tmp_path / "it")
    assert not (tmp_path / "it").exists()


def test_the_package_is_not_needed_without_weights(tmp_path):
    """The stages import model.py, and neither package is among the requirements."""
    code = "import sys, model, sample; print({'safetensors', 'huggingface_hub', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_the_seed_decides_the_text(saved, capsys):
    flags = ("--weights", saved, "--prompt", "so", "--tokens", 30, "--device", "cpu")
    status, one, err = cli(capsys, *flags, "--seed", 1)
    assert status == 0 and one.startswith("so") and "tokens a second" in err
    assert cli(capsys, *flags, "--seed", 1)[1] == one
    assert cli(capsys, *flags, "--seed", 0, "--samples", 2)[1].endswith(f"\n---\n{one}")
    greedy = cli(capsys, *flags, "--seed", 1, "--temperature", 0)[1]
    assert cli(capsys, *flags, "--seed", 2, "--temperature", 0)[1] == greedy != one
    assert cli(capsys, *flags, "--seed", 2, "--temperature", 1e-300)[1] == greedy
    assert cli(capsys, *flags, "--seed", 2, "--top-k", 1)[1] == greedy


def test_a_long_prompt_is_cropped_and_says_so(saved, capsys):
    status, out, err = cli(capsys, "--weights", saved, "--prompt", "a" * 20 + "b" * 20, "--tokens", 1)
    assert status == 0 and "has 40 tokens: the model reads the last 24" in err
    assert out.startswith("aaaa" + "b" * 20)


def test_a_random_model_babbles(capsys):
    status, out, err = cli(capsys, "--prompt", "so", "--tokens", 2)
    assert status == 0 and out.startswith("so") and "2 tokens in" in err


class Scripted(torch.nn.Module):
    """Says given ids, whatever it is asked, but would rather say padding."""

    def __init__(self, ids):
        super().__init__()
        self.ids, self.config = iter(ids), GPTConfig(vocab_size=300, block_size=8, n_layer=1, n_head=1, n_embd=1)
        self.transformer = torch.nn.ModuleDict({"wte": torch.nn.Embedding(1, 1)})

    def forward(self, idx):
        logits = torch.zeros(*idx.shape, 300)
        logits[..., 256:] = 100.0  # ids that the encoding has no bytes for
        logits[..., next(self.ids)] = 50.0
        return logits, None

    generate = GPT.generate


def test_characters_come_out_whole():
    encoding = sample._find_encoding("gpt2-bytes")
    text = "é€🙂é"
    ids = [encoding.encode_single_token(bytes([b])) for b in text.encode()]
    assert encoding.encode_ordinary(text) == ids
    pieces = list(sample.stream(Scripted(ids), encoding, [0], len(ids), temperature=0))
    assert pieces == ["", "é", "", "", "€", "", "", "", "🙂", "", "é"]
    assert "".join(sample.stream(Scripted(ids[:4]), encoding, [0], 4, temperature=0)) == "é\ufffd"
    assert "".join(sample.stream(Scripted(ids[:2]), encoding, [0], 2, temperature=1.0)) == "é"  # drawn, not padding


@pytest.mark.parametrize("length", [2, 24, 25, 26, 60])
def test_evaluate_predicts_every_token_once(length):
    net, T = ours(), 24
    ids = torch.randint(300, (length,), generator=torch.Generator().manual_seed(2))
    losses = []
    with torch.no_grad():
        for i in range(1, length):
            logits = net(ids[None, (i - 1) // T * T : i])[0][0, -1]
            losses.append(F.cross_entropy(logits, ids[i]).item())
    assert sample.evaluate(net, ids.numpy().astype("uint16")) == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_eval_needs_the_tokens_that_the_model_reads(saved, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("a")
    (tmp_path / "ids.bin").write_bytes(bytes(2000))
    for name, words in {"short.txt": "", "none.txt": "none.txt", "ids.bin": "tokens of gpt2-bytes"}.items():
        assert_one_line(*cli(capsys, "--weights", saved, "--eval", "--data", tmp_path / name), words)


@pytest.fixture(scope="module")
def trained(stages, tmp_path_factory):
    """Directory and Run of two stages, both at once."""
    home = tmp_path_factory.mktemp("trained")
    runs = {stage: stages.start(stage, *FLOAT32, "--save", home / stage) for stage in ("s01", "s12")}
    return {stage: (home / stage, run.result()) for stage, run in runs.items()}


@pytest.mark.parametrize("stage, vocab_size", [("s01", 50257), ("s12", 50304)])
def test_what_a_stage_saved_is_loaded_by_transformers(trained, stage, vocab_size):
    directory, run = trained[stage]
    assert run.status == 0 and f"saved to {directory}" in run.out, run.err
    assert {p.name for p in directory.iterdir()} == weights.FILES
    assert all(key.startswith("transformer.") for key in safetensors.load_file(directory / "model.safetensors"))
    assert json.loads((directory / "config.json").read_text())["tokenizer"] == run.header["tokenizer"] == "gpt2-bytes"

    hf, info = transformers.GPT2LMHeadModel.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()) and hf.config.vocab_size == vocab_size
    mine = GPT.from_pretrained(directory, sample.attention)
    idx = torch.randint(vocab_size, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(mine(idx)[0], hf.eval()(idx).logits, atol=1e-4, rtol=0)


def test_eval_by_the_command_itself(trained, stages, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be. " * 200)
    command = [sys.executable, ROOT / "model.py", "--weights", trained["s12"][0], "--eval", "--data", text]
    with process(command, tmp_path, stages.env) as child:
        out, err = child.communicate(timeout=120)
    assert (child.returncode, err) == (0, "")
    assert out.startswith("text.txt, last tenth, 420 tokens of gpt2-bytes\nloss ") and "perplexity" in out


def test_an_interrupted_stage_keeps_its_weights(stages, tmp_path):
    command = stages.command("s05", *FLOAT32, "--steps", 100000, "--save", tmp_path / "it")
    with process(command, tmp_path, stages.env) as child:
        assert any(line.startswith("step    1") for line in child.stdout)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
    assert child.returncode == 130 and "error: interrupted" in err and "Traceback" not in err
    assert "saved to" in out and [p.name for p in tmp_path.iterdir()] == ["it"]
    fresh = GPT.from_pretrained(tmp_path / "it", sample.attention)
    assert fresh.transformer.h[0].mlp.c_fc.bias.abs().max() > 0  # it was trained


def test_the_command_ends_without_a_traceback(saved, tmp_path):
    command = [sys.executable, ROOT / "model.py", "--weights", saved, "--tokens", 100000, "--device", "cpu"]
    with process(command, tmp_path, os.environ) as child:
        assert child.stdout.read(50)  # as it is made, not at the end
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and err.endswith("interrupted\n") and "Traceback" not in err and out.endswith("\n")
