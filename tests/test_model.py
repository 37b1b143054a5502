"""GPT-2 against Hugging Face's, attention against attention, and the arithmetic that the stages rely on."""

import math
import re

import pytest
import torch
from conftest import definitions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F

from data import byte_tokenizer
from model import GPT, SIZES, VOCAB, GPTConfig, evaluate, stream

SMALL = dict(vocab_size=211, block_size=24, n_layer=3, n_head=4, n_embd=48)
PADDED = 50304


EXPLICIT, SDPA = ("s01", "s02", "s03", "s04"), "s05"
ATTENTION = {s: definitions(s, "attention", math=math, torch=torch, F=F)["attention"] for s in (*EXPLICIT, SDPA)}


def sequences(B, T, vocab_size=SMALL["vocab_size"], seed=3):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["s01", SDPA])
def model(request):
    """A small GPT whose biases and gains are random too and whose weights are large enough for errors to show."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SMALL), ATTENTION[request.param])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn_like(p))
    return model


def tiny(vocab_size):
    torch.manual_seed(1337)
    return GPT(GPTConfig(vocab_size=vocab_size, block_size=16, **SIZES["tiny"]), ATTENTION[SDPA])


def hugging_face(model):
    """Hugging Face's GPT-2 with the weights of a GPT, and the names of the matrices that it stores transposed."""
    transformers = pytest.importorskip("transformers")
    off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None)
    config = transformers.GPT2Config(**SMALL, n_positions=24, **off, attn_implementation="eager")
    reference = transformers.GPT2LMHeadModel(config)
    conv1d = transformers.pytorch_utils.Conv1D
    transposed = {f"{name}.weight" for name, layer in reference.named_modules() if isinstance(layer, conv1d)}
    reference.load_state_dict({name: w.T if name in transposed else w for name, w in model.state_dict().items()})
    return reference, transposed


def test_logits_loss_and_gradients_equal_hugging_faces(model):
    reference, transposed = hugging_face(model)
    x, y = sequences(3, 25)[:, :-1], sequences(3, 25)[:, 1:]  # targets that are not contiguous, too
    expected = reference(x).logits
    expected_loss = F.cross_entropy(expected.flatten(0, 1), y.flatten())
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
    loss = model(x, y)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-5)

    loss.backward()
    expected_loss.backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 0, name
        expected = gradients[name].T if name in transposed else gradients[name]
        torch.testing.assert_close(p.grad, expected, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_greedy_generation_equals_hugging_faces(model):
    reference, _ = hugging_face(model)
    prompt, mask = sequences(4, 4), torch.ones(4, 4)
    expected = reference.generate(prompt, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
    tokens = model.generate(prompt, 20, temperature=0)
    assert tokens.tolist() == expected.tolist()
    assert len(set(tokens[:, 4:].flatten().tolist())) > 4  # not one token over and over


@pytest.mark.parametrize("n_layer", [2, 8])
def test_weights_are_drawn_with_the_stds_of_gpt2(n_layer):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=1000, block_size=128, n_layer=n_layer, n_head=4, n_embd=128)
    residual = 0
    for name, p in GPT(config, None).named_parameters():
        if p.dim() == 1:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
            continue
        residual += name.endswith("c_proj.weight")
        std = 0.02 / math.sqrt(2 * n_layer) if name.endswith("c_proj.weight") else 0.02
        assert p.std().item() == pytest.approx(std, rel=0.03), name
        assert abs(p.mean().item()) < 0.05 * std, name
    assert residual == 2 * n_layer  # attention's and the MLP's, in every block


@pytest.mark.parametrize("size, millions", [("gpt2", 124.439808), ("gpt2-xl", 1557.6112)])
def test_sizes_have_the_parameters_of_openais_models(size, millions, monkeypatch):
    monkeypatch.setattr(GPT, "to_empty", lambda self, device: self)  # stays on the meta device: shapes, no memory
    assert sum(p.numel() for p in GPT(GPTConfig(**SIZES[size]), None).parameters()) == round(1e6 * millions)


@pytest.mark.parametrize("shape", [(2, 3, 17, 8), (1, 2, 1, 16), (2, 12, 64, 64)], ids=str)
@pytest.mark.parametrize("stage", EXPLICIT)
def test_explicit_attention_equals_sdpa(stage, shape):
    torch.manual_seed(2)
    *qkv, upstream = torch.randn(4, *shape)
    results = []
    for attention in (ATTENTION[stage], ATTENTION[SDPA]):
        inputs = [t.clone().requires_grad_() for t in qkv]
        y = attention(*inputs)
        results.append([y, *torch.autograd.grad(y, inputs, upstream)])
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


def test_a_later_token_changes_no_earlier_logits(model):
    x = sequences(2, 16)
    other = x.clone()
    other[:, 9:] = (other[:, 9:] + 1) % SMALL["vocab_size"]
    before, after = model(x), model(other)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=-1).min() > 1e-3


def test_a_seed_gives_the_padded_model_the_same_weights():
    plain, padded = tiny(VOCAB).state_dict(), tiny(PADDED).state_dict()
    assert plain.keys() == padded.keys()
    for name, w in plain.items():
        rows = 47 if name in ("transformer.wte.weight", "lm_head.weight") else 0
        assert len(padded[name]) == len(w) + rows and torch.equal(w, padded[name][: len(w)]), name


def test_padding_changes_the_loss_by_the_softmax_alone():
    plain, padded, tokens = tiny(VOCAB), tiny(PADDED), sequences(2, 17, VOCAB)
    x, y = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        assert torch.equal(padded(x)[..., :VOCAB], plain(x))
        wide, more = padded(x).double(), padded(x, y) - plain(x, y)
    expected = (wide.logsumexp(-1) - wide[..., :VOCAB].logsumexp(-1)).mean()
    assert 0.5 * math.log(1 + 47 / VOCAB) < expected < 2 * math.log(1 + 47 / VOCAB)
    torch.testing.assert_close(more.double(), expected, rtol=0, atol=5e-6)


def test_autocast_gives_bfloat16_logits_and_a_float32_loss():
    model, x = tiny(VOCAB), sequences(2, 16, VOCAB)
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(x), model(x, x)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss, F.cross_entropy(logits.float().flatten(0, 1), x.flatten()))
    assert model.bfloat16()(x, x).dtype == torch.float32


def test_a_compiled_backward_reads_no_gradient_of_the_logits():
    """PyTorch issue 131794: a forward that returns the logits too gets a zero gradient of their size."""
    tangents, model, x = [], tiny(VOCAB), sequences(2, 16, VOCAB)

    def record(graph, inputs):
        tangents.extend(node for node in graph.graph.find_nodes(op="placeholder") if node.name.startswith("tangents"))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=record)
    torch.compile(model, backend=backend, fullgraph=True)(x, x).backward()
    assert [tuple(node.meta["val"].shape) for node in tangents] == [()]  # the loss's
    assert model.lm_head.weight.grad.abs().max() > 0


@pytest.mark.parametrize("temperature, top_k", [(0, None), (1.0, None), (2.0, 50)])
def test_generate_never_yields_an_id_of_the_padding(temperature, top_k):
    model, prompt = tiny(PADDED), sequences(4, 2, VOCAB)
    with torch.no_grad():  # the padding would win every time
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[VOCAB:] = 1.0
    assert model.generate(prompt, 4, temperature, top_k, vocab_size=PADDED)[:, 2:].min() >= VOCAB
    tokens = model.generate(prompt, 4, temperature, top_k)
    assert tokens.shape == (4, 6) and tokens.max() < VOCAB and torch.equal(tokens[:, :2], prompt)


def test_temperature_0_and_top_k_1_take_the_likeliest_token(model):
    prompt = greedy = sequences(4, SMALL["block_size"] - 2)
    for _ in range(6):  # past block_size, with the last tokens
        last = model(greedy[:, -SMALL["block_size"] :])[:, -1].argmax(-1, keepdim=True)
        greedy = torch.cat((greedy, last), dim=1)
    assert torch.equal(model.generate(prompt, 6, temperature=0), greedy)
    assert torch.equal(model.generate(prompt, 6, temperature=1.7, top_k=1), greedy)
    assert torch.equal(model.generate(prompt, 6, temperature=1e-42), greedy)  # a division that overflows float32


@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (0.5, None), (1.0, 3)])
def test_sampling_follows_the_softmax_over_the_top_k(temperature, top_k):
    torch.manual_seed(5)
    model = GPT(GPTConfig(vocab_size=8, block_size=4, n_layer=1, n_head=1, n_embd=8), ATTENTION[SDPA])
    torch.nn.init.normal_(model.transformer.wte.weight, std=0.5)
    prompt = torch.zeros(20_000, 2, dtype=torch.int64)
    logits = model(prompt[:1])[0, -1].detach() / temperature
    if top_k:
        logits[logits.argsort(descending=True)[top_k:]] = -math.inf
    shares = model.generate(prompt, 1, temperature, top_k)[:, -1].bincount(minlength=8) / len(prompt)
    torch.testing.assert_close(shares, F.softmax(logits, -1), rtol=0, atol=0.02)
    assert not shares[logits == -math.inf].any()


@pytest.mark.parametrize("length", [2, 24, 25, 26, 60])
def test_evaluate_predicts_every_token_once(model, length):
    ids, T = sequences(1, length)[0], SMALL["block_size"]
    with torch.no_grad():
        windows = [ids[None, (i - 1) // T * T : i] for i in range(1, length)]
        losses = [F.cross_entropy(model(x)[0, -1], y).item() for x, y in zip(windows, ids[1:], strict=True)]
    assert evaluate(model, ids.numpy().astype("uint16")) == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_stream_yields_whole_characters():
    encoding, model, text = byte_tokenizer(), tiny(VOCAB), "é€🙂é"
    ids = encoding.encode_ordinary(text)

    def generate(idx, new, temperature, top_k, vocab_size):
        assert (new, vocab_size) == (1, 256)  # no id that the encoding has no bytes for
        return torch.cat((idx, torch.tensor([ids[idx.shape[1] - 1 :][:1]])), dim=1)

    model.generate = generate
    pieces = ["", "é", "", "", "€", "", "", "", "🙂", "", "é"]
    assert list(stream(model, encoding, [0], len(ids))) == pieces
    assert list(stream(model, encoding, [0], 4)) == [*pieces[:3], "\ufffd"]


@pytest.mark.parametrize("config", [dict(n_embd=50, n_head=4), dict(n_layer=0), dict(vocab_size=-3), dict(n_head="4")])
def test_a_config_that_does_not_fit_names_its_numbers(config):
    with pytest.raises(ValueError) as error:
        GPTConfig(**config)
    assert all(f"{name}" in str(error.value) and f"{value!r}" in str(error.value) for name, value in config.items())


@pytest.mark.parametrize("x, y", [((7,), None), ((2, 3, 4), None), ((2, 5), (2, 6)), ((2, 6), (12,))], ids=str)
def test_a_wrong_shape_is_named(x, y):
    with pytest.raises(ValueError, match=re.escape(f"must both be (B, T), got {[x, y] if y else [x]}")):
        tiny(VOCAB)(*(shape and torch.zeros(shape, dtype=torch.int64) for shape in (x, y)))


def test_a_sequence_longer_than_block_size_is_refused():
    with pytest.raises(ValueError, match="17 tokens is longer than block_size 16"):
        tiny(VOCAB)(sequences(1, 17))


@pytest.mark.parametrize("temperature, top_k, number", [(-0.5, None, "-0.5"), (1.0, 0, "0"), (1.0, -2, "-2")])
def test_generate_refuses_a_wrong_temperature_or_top_k(temperature, top_k, number):
    with pytest.raises(ValueError, match=number):
        tiny(VOCAB).generate(sequences(1, 2), 1, temperature, top_k)
