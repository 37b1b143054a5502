"""GPT-2 against Hugging Face's, attention against attention, what a run leaves on disk, and what is refused."""

import io
import math
import pickle
import re
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


# Against Hugging Face


def untrained_hugging_face():
    """Hugging Face's GPT-2 of the SMALL shape, and the names of the matrices that it stores transposed."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        **SMALL,
        n_positions=SMALL["block_size"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    reference = transformers.GPT2LMHeadModel(config)
    transposed = set()
    for name, layer in reference.named_modules():
        if isinstance(layer, transformers.pytorch_utils.Conv1D):
            transposed.add(f"{name}.weight")
    return reference, transposed


def hugging_face(model):
    """Hugging Face's GPT-2 with a GPT's weights, and the names of the matrices that it stores transposed."""
    reference, transposed = untrained_hugging_face()
    weights = {name: w.T if name in transposed else w for name, w in model.state_dict().items()}
    reference.load_state_dict(weights)
    return reference, transposed


def test_logits_loss_and_gradients_equal_hugging_faces(model):
    reference, transposed = hugging_face(model)
    ids = random_ids(3, 25)
    x, y = ids[:, :-1], ids[:, 1:]  # y is not contiguous
    expected_logits = reference(x).logits
    expected_loss = F.cross_entropy(expected_logits.flatten(0, 1), y.flatten())

    loss = model(x, y)
    torch.testing.assert_close(model(x), expected_logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-5)

    loss.backward()
    expected_loss.backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        if name in transposed:
            gradient = gradient.T
        torch.testing.assert_close({name: gradient}, {name: expected[name]}, rtol=0, atol=1e-5)


def test_logits_of_untrained_weights_equal_hugging_faces():
    """Activations are so small there that the eps of each LayerNorm shows."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SMALL), SDPA)
    reference, _ = hugging_face(model)
    x = random_ids(3, 24)
    torch.testing.assert_close(model(x), reference(x).logits, rtol=0, atol=1e-5)


def test_greedy_generation_equals_hugging_faces(model):
    reference, _ = hugging_face(model)
    prompt = random_ids(4, 4)
    expected = reference.generate(
        prompt, attention_mask=torch.ones(4, 4), max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    tokens = model.generate(prompt, 20, temperature=0)
    assert tokens.tolist() == expected.tolist()
    assert len(tokens[:, 4:].unique()) > 4  # not one token over and over


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_from_pretrained_computes_in_float32_what_hugging_face_saved(tmp_path, dtype):
    reference, _ = untrained_hugging_face()
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
    assert "of gpt2 are read by transformers: pip install transformers" in error_of(
        capsys, GPT.from_pretrained, "gpt2", SDPA
    )


def test_from_pretrained_refuses_a_folder_without_weights(capsys, tmp_path):
    pytest.importorskip("transformers")
    assert f"{tmp_path} can't be loaded" in error_of(capsys, GPT.from_pretrained, str(tmp_path), SDPA)


# Attention, weights and sizes


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


def test_a_width_that_does_not_divide_over_the_heads_is_refused():
    with pytest.raises(ValueError, match="n_embd 50 is not divisible by n_head 4"):
        GPTConfig(n_embd=50, n_head=4)


# Padding


def test_padding_the_vocabulary_leaves_a_seeds_other_weights_as_they_were():
    plain = tiny(VOCAB).state_dict()
    padded = tiny(PADDED).state_dict()
    assert plain.keys() == padded.keys()
    for name, w in plain.items():
        assert torch.equal(w, padded[name][: len(w)]), name
    grown = {name for name, w in plain.items() if padded[name].shape != w.shape}
    assert grown == {"transformer.wte.weight", "lm_head.weight"}


@pytest.mark.parametrize("temperature, top_k", [(0, None), (1.0, None), (2.0, 50)])
def test_generate_never_yields_an_id_of_the_padding(temperature, top_k):
    model, prompt = tiny(PADDED), random_ids(4, 2, VOCAB)
    with torch.no_grad():  # the padding would win every time
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[VOCAB:] = 1.0
    unlimited = model.generate(prompt, 4, temperature, top_k, vocab_size=PADDED)
    assert unlimited[:, 2:].min() >= VOCAB
    tokens = model.generate(prompt, 4, temperature, top_k)
    assert tokens.shape == (4, 6)
    assert tokens.max() < VOCAB
    assert torch.equal(tokens[:, :2], prompt)


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


@pytest.mark.parametrize("shape, targets_shape", [((2, 5), (2, 6)), ((2, 6), (12,))], ids=str)
def test_targets_of_another_shape_than_the_ids_are_refused(shape, targets_shape):
    idx = torch.zeros(shape, dtype=torch.int64)
    targets = torch.zeros(targets_shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=re.escape(f"must both be (B, T), got [{shape}, {targets_shape}]")):
        tiny(VOCAB)(idx, targets)


def test_a_sequence_longer_than_block_size_is_refused():
    with pytest.raises(ValueError, match="17 tokens is longer than block_size 16"):
        tiny(VOCAB)(random_ids(1, 17, VOCAB))


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


def test_neither_evaluate_nor_generate_keeps_a_graph_for_a_backward():
    keeps_graph = []

    def attention(q, k, v):
        keeps_graph.append(q.requires_grad)
        return v

    model = small(attention)
    evaluate(model, np.zeros(10, np.uint16))
    model.generate(random_ids(1, 4), 2)
    assert keeps_graph == [False] * 9  # three layers, in one window and for two tokens


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
    assert f"--save {saved} can't be written: PytorchStreamWriter failed" in line
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_save_below_a_file_is_one_line(saved, capsys):
    assert "can't be written" in error_of(capsys, save, small(), "bytes", saved / "below")


class Trap:
    """What a pickle can hold: a call that is made when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def torch_file(checkpoint):
    """The bytes of what torch.save() writes."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return file.getvalue()


def test_a_file_that_holds_no_weights_of_a_gpt_is_one_line_and_none_of_its_code_runs(saved, capsys, tmp_path):
    whole = saved.read_bytes()
    other_shape, not_finite = torch.load(saved), torch.load(saved)
    other_shape["weights"]["transformer.ln_f.bias"] = torch.zeros(50)
    not_finite["weights"]["transformer.h.1.mlp.c_fc.weight"][3, 4] = math.nan
    refused = {
        b"": "holds no",
        b"First Citizen:\n": "holds no",
        b"\x80\x02}q\x00.": "holds no",
        whole[: len(whole) // 2]: "holds no weights: pass a file that --save wrote",
        pickle.dumps(Trap(tmp_path / "sprung"), protocol=2): "holds no weights",
        torch_file({"transformer.wte.weight": torch.ones(3)}): "holds no GPT that --save wrote",
        torch_file([1, 2]): "holds no GPT that --save wrote",
        torch_file(other_shape): "size mismatch for transformer.ln_f.bias",
        torch_file(not_finite): "transformer.h.1.mlp.c_fc.weight holds values that are not finite: train it again",
    }
    for content, words in refused.items():
        saved.write_bytes(content)
        line = error_of(capsys, load, saved, SDPA)
        assert str(saved) in line
        assert words in line
    assert not (tmp_path / "sprung").exists()
