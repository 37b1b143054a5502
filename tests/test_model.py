"""GPT-2 against its formulas and against Hugging Face's, what a run leaves on disk, and what is refused."""

import math
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import definitions, error_of
from torch.nn import functional as F

from data import VOCAB
from model import GPT, SIZES, GPTConfig, evaluate, load, save

SMALL = dict(vocab_size=211, block_size=24, n_layer=3, n_head=4, n_embd=48)
PADDED = 50304  # the vocabulary of s06 and later


def attention_of(stage):
    """The function `attention` in a stage's own source."""
    return definitions(stage, "attention", math=math, torch=torch, F=F)["attention"]


SDPA = attention_of("s05")


def random_ids(B, T, vocab_size=SMALL["vocab_size"]):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(3))


def tiny(vocab_size):
    """An untrained model, of the same seed each time."""
    torch.manual_seed(1337)
    return GPT(GPTConfig(vocab_size=vocab_size, block_size=16, **SIZES["tiny"]), SDPA)


def small(attention=SDPA):
    """A small GPT with random biases and gains too, and weights that are large enough for errors to show."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SMALL), attention)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn_like(p))
    return model


@pytest.fixture(params=["s01", "s05"])
def model(request):
    return small(attention_of(request.param))


# Against the formulas, and against Hugging Face


def logits_by_the_formulas(weights, ids):
    """GPT-2's logits (B, T, vocab_size) in plain torch. weights: SMALL's, by their names in a GPT."""

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def layer_norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    T, C, n_head = ids.shape[1], SMALL["n_embd"], SMALL["n_head"]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][:T]
    for layer in range(SMALL["n_layer"]):
        block = f"transformer.h.{layer}"
        q, k, v = linear(layer_norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").split(C, -1)
        heads = []
        for head in range(n_head):
            own = slice(head * C // n_head, (head + 1) * C // n_head)
            scores = q[..., own] @ k[..., own].mT / math.sqrt(C / n_head)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[..., own])
        x = x + linear(torch.cat(heads, -1), f"{block}.attn.c_proj")
        h = linear(layer_norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"{block}.mlp.c_proj")
    return layer_norm(x, "transformer.ln_f") @ weights["transformer.wte.weight"].T


def test_logits_loss_and_gradients_are_those_of_the_formulas(model):
    model.double()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    ids = random_ids(3, 25)
    x, y = ids[:, :-1], ids[:, 1:]  # y is not contiguous
    expected_logits = logits_by_the_formulas(weights, x)
    expected_loss = -expected_logits.log_softmax(-1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(model(x), expected_logits, rtol=0, atol=1e-9)

    loss = model(x, y)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=0)
    loss.backward()
    expected_loss.backward()
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 1e-4, name
        torch.testing.assert_close({name: p.grad}, {name: weights[name].grad}, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_from_pretrained_computes_in_float32_what_hugging_face_saved(tmp_path, dtype):
    transformers = pytest.importorskip("transformers")
    shape = SMALL | dict(n_positions=SMALL["block_size"], bos_token_id=None, eos_token_id=None)
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    for p in reference.parameters():
        torch.nn.init.normal_(p, std=0.2)
    reference.to(dtype).save_pretrained(tmp_path)
    model = GPT.from_pretrained(str(tmp_path), SDPA)
    assert model.config == GPTConfig(**SMALL)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    x = random_ids(2, 24)
    torch.testing.assert_close(model(x), reference.float()(x).logits, rtol=0, atol=1e-4)


def test_from_pretrained_asks_for_the_package_that_it_needs(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    line = error_of(capsys, GPT.from_pretrained, "gpt2", SDPA)
    assert "of gpt2 are read by transformers: pip install transformers" in line


def test_from_pretrained_refuses_a_damaged_folder(capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=100, n_layer=1, n_head=1, n_embd=4)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 1000)
    capsys.readouterr()  # the progress of the writer
    assert f"{tmp_path} can't be loaded: " in error_of(capsys, GPT.from_pretrained, str(tmp_path), SDPA)


# Weights and sizes


@pytest.mark.parametrize("n_layer", [2, 8])
def test_weights_are_drawn_with_the_stds_of_gpt2(n_layer):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=1000, block_size=128, n_layer=n_layer, n_head=4, n_embd=128)
    residual = []
    for name, p in GPT(config, None).named_parameters():
        std = 0.02
        if name.endswith("c_proj.weight"):
            residual.append(name)
            std = 0.02 / math.sqrt(2 * n_layer)
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif p.dim() == 1:
            assert (p == 1).all(), name
        else:
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < 0.05 * std, name
    assert len(residual) == 2 * n_layer  # attention's and the MLP's, in every block


@pytest.mark.parametrize(
    "size, n_head, parameters",
    [
        ("gpt2", 12, 124_439_808),  # OpenAI's four
        ("gpt2-medium", 16, 354_823_168),
        ("gpt2-large", 20, 774_030_080),
        ("gpt2-xl", 25, 1_557_611_200),
        ("mini", 6, 30_339_456),  # 6 (12 384^2 + 13 x 384) + (50257 + 1024) 384 + 2 x 384
        ("micro", 4, 16_287_488),  # 4 (12 256^2 + 13 x 256) + (50257 + 1024) 256 + 2 x 256
        ("tiny", 2, 3_382_080),  # 2 (12 64^2 + 13 x 64) + (50257 + 1024) 64 + 2 x 64
    ],
)
def test_a_size_has_its_heads_and_parameters(size, n_head, parameters, monkeypatch):
    monkeypatch.setattr(GPT, "to_empty", lambda self, device: self)  # stays on the meta device
    model = GPT(GPTConfig(**SIZES[size]), None)
    assert model.config.n_head == n_head
    assert sum(p.numel() for p in model.parameters()) == parameters


# Padding


def test_padding_the_vocabulary_leaves_a_seeds_other_weights_as_they_were():
    plain = tiny(VOCAB).state_dict()
    padded = tiny(PADDED).state_dict()
    assert plain.keys() == padded.keys()
    for name, w in plain.items():
        assert torch.equal(w, padded[name][: len(w)]), name
    grown = {name for name, w in plain.items() if padded[name].shape != w.shape}
    assert grown == {"transformer.wte.weight", "lm_head.weight"}


# The loss, and what the model refuses


def test_with_targets_the_loss_alone_is_returned_and_in_float32():
    model, x = tiny(VOCAB), random_ids(2, 16, VOCAB)
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(x), model(x, x)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss, F.cross_entropy(logits.float().flatten(0, 1), x.flatten()))
    assert model.bfloat16()(x, x).dtype == torch.float32


@pytest.mark.parametrize("idx, targets", [((2, 5), (2, 6)), ((2, 5), (10,)), ((1, 17), (1, 17))], ids=str)
def test_targets_of_another_shape_and_sequences_beyond_block_size_are_refused(idx, targets):
    with pytest.raises(ValueError, match="must both be|longer than block_size 16"):
        tiny(VOCAB)(torch.zeros(idx, dtype=torch.int64), torch.zeros(targets, dtype=torch.int64))


# Generation


@pytest.mark.parametrize("temperature, top_k", [(0, None), (1.7, 1), (1e-42, None)])
def test_temperature_0_and_top_k_1_take_the_likeliest_token(model, temperature, top_k):
    T = SMALL["block_size"]
    prompt = random_ids(4, T - 2)
    expected = prompt
    for _ in range(6):  # past block_size, where the model sees the last tokens
        likeliest = model(expected[:, -T:])[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat((expected, likeliest), dim=1)
    assert torch.equal(model.generate(prompt, 6, temperature, top_k), expected)


@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (0.5, None), (2.0, 3), (1.0, 100)])
def test_sampling_follows_the_softmax_over_the_top_k(temperature, top_k):
    torch.manual_seed(5)
    model = GPT(GPTConfig(vocab_size=8, block_size=4, n_layer=1, n_head=1, n_embd=8), SDPA)
    torch.nn.init.normal_(model.transformer.wte.weight, std=0.5)
    prompt = torch.zeros(20_000, 2, dtype=torch.int64)
    logits = model(prompt[:1])[0, -1].detach() / temperature
    unlikely = []
    if top_k is not None:
        unlikely = logits.argsort(descending=True)[top_k:].tolist()
        logits[unlikely] = -math.inf
    drawn = model.generate(prompt, 1, temperature, top_k)[:, -1]
    counts = drawn.bincount(minlength=8)
    torch.testing.assert_close(counts / len(prompt), F.softmax(logits, -1), rtol=0, atol=0.02)
    assert counts[unlikely].sum() == 0


# The held-out loss


@pytest.mark.parametrize("length", [2, 24, 25, 26, 60])
def test_evaluate_predicts_every_token_once(model, length):
    ids = random_ids(1, length)[0]
    T = SMALL["block_size"]
    losses = []
    for i in range(1, length):
        window = ids[(i - 1) // T * T : i]
        with torch.no_grad():
            logits = model(window[None])[0, -1]
        losses.append(F.cross_entropy(logits, ids[i]).item())
    tokens = ids.numpy().astype(np.uint16)
    assert evaluate(model, tokens) == pytest.approx(sum(losses) / len(losses), abs=1e-5)


@pytest.mark.parametrize("length", [0, 1])
def test_evaluate_refuses_a_text_with_nothing_to_predict(capsys, length):
    line = error_of(capsys, evaluate, small(), np.zeros(length, np.uint16))
    assert f"the held-out text has {length} tokens, and needs 2" in line


def test_evaluate_refuses_an_id_past_the_vocabulary(capsys):
    line = error_of(capsys, evaluate, tiny(PADDED), np.array([0, VOCAB], np.uint16))
    assert "id 50257 is past GPT-2's last, 50256" in line


# Weights on disk


@pytest.fixture
def saved(tmp_path):
    """The path of a file that save() wrote."""
    save(small(), "bytes", tmp_path / "saved.pt")
    return tmp_path / "saved.pt"


def test_a_saved_model_loads_as_it_was(saved):
    model, tokenizer = load(saved, SDPA)
    assert tokenizer == "bytes"
    assert model.config == GPTConfig(**SMALL)
    torch.testing.assert_close(model.state_dict(), small().state_dict(), rtol=0, atol=0)
    assert model.lm_head.weight is model.transformer.wte.weight
    x = random_ids(2, 24)
    assert torch.equal(model(x), small()(x))


def test_a_save_that_fails_is_one_line_and_leaves_the_weights_that_were_there(saved, capsys, monkeypatch):
    def write_half(checkpoint, path):
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/3:\n file write failed")  # a full disk

    before = saved.read_bytes()
    monkeypatch.setattr(torch, "save", write_half)
    line = error_of(capsys, save, small(), "bytes", saved)
    assert f"--save {saved} can't be written, is the disk full? PytorchStreamWriter failed" in line
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


class Trap:
    """What a pickle can hold: a call that is made when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_any_file_that_is_no_checkpoint_is_one_line_and_none_of_its_code_runs(saved, capsys, tmp_path, recwarn):
    whole = saved.read_bytes()
    trap = pickle.dumps(Trap(tmp_path / "sprung"), protocol=2)
    for content in (b"", b"First Citizen:\n", b"\x80\x02}q\x00.", whole[: len(whole) // 2], trap):
        saved.write_bytes(content)
        assert f"{saved} is no file that --save wrote: " in error_of(capsys, load, saved, SDPA)
    for checkpoint in (torch.ones(3), [1, 2], {"transformer.wte.weight": torch.ones(3)}):
        torch.save(checkpoint, saved)
        assert f"{saved} is no file that --save wrote: " in error_of(capsys, load, saved, SDPA)
    assert not (tmp_path / "sprung").exists()
    assert not recwarn.list  # they would be lines on stderr


@pytest.mark.parametrize(
    "part, key, value, reason",
    [
        ("config", "n_head", 5, "n_embd 48 is not divisible by n_head 5"),
        ("config", "n_head", 0, "no file that --save wrote"),
        ("weights", "transformer.h.0.mlp.c_fc.weight", None, "Missing key"),
        ("weights", "transformer.ln_f.bias", torch.zeros(50), "size mismatch for transformer.ln_f.bias"),
        ("weights", "transformer.ln_f.bias", torch.full((48,), math.nan), "values that are not finite: train it again"),
    ],
)
def test_a_checkpoint_with_another_config_or_weight_is_refused(saved, capsys, part, key, value, reason):
    checkpoint = torch.load(saved)
    checkpoint[part][key] = value
    if value is None:
        del checkpoint[part][key]
    torch.save(checkpoint, saved)
    line = error_of(capsys, load, saved, SDPA)
    assert str(saved) in line and reason in line
