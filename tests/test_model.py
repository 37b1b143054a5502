"""GPT-2 against Hugging Face's, attention against attention, and the arithmetic that the stages rely on."""

import math

import pytest
import torch
from conftest import definitions
from torch.nn import functional as F

from model import GPT, SIZES, VOCAB, GPTConfig

SMALL = dict(vocab_size=211, block_size=24, n_layer=3, n_head=4, n_embd=48)
PADDED = 50304


def attention_of(stage):
    return definitions(stage, "attention", math=math, torch=torch, F=F)["attention"]


ATTENTION = {"written out": attention_of("s01"), "SDPA": attention_of("s05")}


def sequences(B, T, vocab_size=SMALL["vocab_size"], seed=3):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def batch(B, T, vocab_size=SMALL["vocab_size"]):
    """x and y, y one token ahead."""
    tokens = sequences(B, T + 1, vocab_size)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.fixture(params=ATTENTION)
def model(request):
    """A small GPT whose biases and gains are random too and whose weights are large enough for errors to show."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SMALL), ATTENTION[request.param])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn_like(p))
    return model


def hugging_face(model):
    """Hugging Face's GPT-2 with the weights of a GPT, and the names of the matrices that it stores transposed."""
    transformers = pytest.importorskip("transformers")
    config = model.config
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.block_size,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_embd=config.n_embd,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    transposed = {
        f"{name}.weight"
        for name, module in reference.named_modules()
        if isinstance(module, transformers.pytorch_utils.Conv1D)
    }
    weights = {name: w.T if name in transposed else w for name, w in model.state_dict().items()}
    reference.load_state_dict(weights, strict=True)
    return reference, transposed


def test_logits_loss_and_every_gradient_are_those_of_hugging_face(model):
    reference, transposed = hugging_face(model)
    x, y = batch(3, SMALL["block_size"])
    logits, loss = model(x, y)
    expected = reference(x).logits
    expected_loss = F.cross_entropy(expected.flatten(0, 1), y.flatten())
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-5)

    loss.backward()
    expected_loss.backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 0, name
        expected = gradients[name].T if name in transposed else gradients[name]
        torch.testing.assert_close(p.grad, expected, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_greedy_generation_is_hugging_faces_token_for_token(model):
    reference, _ = hugging_face(model)
    prompt = sequences(4, 4)
    new = SMALL["block_size"] - 4
    expected = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    tokens = model.generate(prompt, new, temperature=0)
    assert tokens.tolist() == expected.tolist()
    assert len(set(tokens[:, 4:].flatten().tolist())) > 4  # no model that says one word


def test_the_embedding_and_the_head_are_one_matrix_with_one_gradient(model):
    wte, head = model.transformer.wte.weight, model.lm_head.weight
    assert wte is head and wte.data_ptr() == head.data_ptr()
    names = [name for name, _ in model.named_parameters()]
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names
    assert {"transformer.wte.weight", "lm_head.weight"} <= set(model.state_dict())

    # the gradient is the sum of what comes through the lookup and through the head
    x = sequences(1, 8)
    model(x, x)[1].backward()
    both = wte.grad.clone()
    hidden = model.transformer.wte(x).detach().requires_grad_()
    body = hidden + model.transformer.wpe(torch.arange(8))
    for block in model.transformer.h:
        body = block(body)
    weight = wte.detach().clone().requires_grad_()
    F.cross_entropy((model.transformer.ln_f(body) @ weight.T).flatten(0, 1), x.flatten()).backward()
    expected = weight.grad.index_add(0, x.flatten(), hidden.grad.flatten(0, 1))
    torch.testing.assert_close(both, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n_layer", [2, 8])
def test_weights_are_drawn_with_the_stds_of_gpt2(n_layer):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=1000, block_size=128, n_layer=n_layer, n_head=4, n_embd=128)
    projections = 0
    for name, p in GPT(config, None).named_parameters():
        if name.endswith(".bias"):
            assert p.count_nonzero() == 0, name
        elif ".ln_" in name:
            assert (p == 1).all(), name
        else:
            residual = name.endswith("c_proj.weight")
            projections += residual
            std = 0.02 / math.sqrt(2 * n_layer) if residual else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < 0.05 * std, name
    assert projections == 2 * n_layer  # attention's and the MLP's, in every block


@pytest.mark.parametrize(
    "size, parameters",
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_each_size_has_the_parameters_of_openais_model(size, parameters, monkeypatch):
    monkeypatch.setattr(GPT, "to_empty", lambda self, device: self)  # stays on the meta device: shapes, no memory
    model = GPT(GPTConfig(**SIZES[size]), None)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("shape", [(2, 3, 17, 8), (1, 2, 1, 16), (2, 12, 64, 64)], ids=str)
@pytest.mark.parametrize("stage", ["s01", "s02", "s03", "s04"])
def test_attention_written_out_is_sdpa_forward_and_backward(stage, shape):
    torch.manual_seed(2)
    q, k, v, upstream = torch.randn(4, *shape)
    results = []
    for attention in (attention_of(stage), ATTENTION["SDPA"]):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        y = attention(*inputs)
        assert y.shape == q.shape
        y.backward(upstream)
        results.append([y, *(t.grad for t in inputs)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_a_later_token_changes_no_earlier_logits(model):
    x = sequences(2, 16)
    other = x.clone()
    other[:, 9:] = (other[:, 9:] + 1) % SMALL["vocab_size"]
    before, after = model(x)[0], model(other)[0]
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=-1).min() > 1e-3


def tiny(vocab_size):
    torch.manual_seed(1337)
    return GPT(GPTConfig(vocab_size=vocab_size, block_size=16, **SIZES["tiny"]), ATTENTION["SDPA"])


def test_a_seed_gives_the_padded_model_the_same_weights_but_for_47_rows_more():
    plain, padded = tiny(VOCAB).state_dict(), tiny(PADDED).state_dict()
    assert plain.keys() == padded.keys()
    for name, w in plain.items():
        wider = padded[name]
        if name in ("transformer.wte.weight", "lm_head.weight"):
            assert len(wider) - len(w) == 47
            wider = wider[: len(w)]
        assert torch.equal(w, wider), name


def test_padding_the_vocabulary_changes_no_real_logit_and_adds_the_padding_to_the_softmax_alone():
    plain, padded = tiny(VOCAB), tiny(PADDED)
    with torch.no_grad():
        for p, w in zip(padded.parameters(), plain.parameters(), strict=True):
            p[: len(w)] = w
    x, y = batch(2, 16, VOCAB)
    with torch.no_grad():
        (logits, loss), (wide, wide_loss) = plain(x, y), padded(x, y)
        assert wide.shape[-1] == PADDED
        assert torch.equal(wide[..., :VOCAB], logits)
        assert torch.equal(F.cross_entropy(wide[..., :VOCAB].flatten(0, 1), y.flatten()), loss)

        (logits, loss), (wide, wide_loss) = plain.double()(x, y), padded.double()(x, y)
        more = (wide.logsumexp(-1) - wide[..., :VOCAB].logsumexp(-1)).mean()  # in float64
        assert 0.5 * math.log(1 + 47 / VOCAB) < more < 2 * math.log(1 + 47 / VOCAB)
        exact = F.cross_entropy(wide.flatten(0, 1), y.flatten()) - F.cross_entropy(logits.flatten(0, 1), y.flatten())
        torch.testing.assert_close(exact, more, rtol=0, atol=1e-12)
        # the model's own loss is float32, whatever the weights are
        torch.testing.assert_close((wide_loss - loss).double(), more, rtol=0, atol=5e-6)


def test_targets_may_be_a_slice_of_a_longer_batch(model):
    tokens = sequences(2, 17)
    x, y = batch(2, 16)
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:])[1], model(x, y)[1])


def test_the_loss_is_float32_under_autocast():
    model, x = tiny(VOCAB), sequences(2, 16, VOCAB)
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(x, x)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float().flatten(0, 1), x.flatten()))


@pytest.mark.parametrize("temperature, top_k", [(0, None), (1.0, None), (2.0, 50)])
def test_generate_never_yields_an_id_of_the_padding(model, temperature, top_k):
    real = 200
    with torch.no_grad():  # the padding would win every time
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[real:] = 1.0
    prompt = sequences(8, 2, real)
    free = model.generate(prompt, 4, temperature, top_k)
    assert free[:, 2:].min() >= real
    held = model.generate(prompt, 4, temperature, top_k, vocab_size=real)
    assert held.shape == (8, 6) and held.max() < real
    assert torch.equal(held[:, :2], prompt)


def test_generate_keeps_to_gpt2s_vocabulary_by_default():
    model = tiny(PADDED)
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[VOCAB:] = 1.0
    assert model.generate(sequences(2, 2, VOCAB), 4, temperature=0).max() < VOCAB


def test_temperature_0_takes_the_likeliest_token_and_so_does_top_k_1(model):
    prompt = sequences(4, 5)
    greedy = prompt
    for _ in range(6):
        greedy = torch.cat((greedy, model(greedy)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(model.generate(prompt, 6, temperature=0), greedy)
    assert torch.equal(model.generate(prompt, 6, temperature=1.7, top_k=1), greedy)
    assert torch.equal(model.generate(prompt, 6, temperature=1e-42), greedy)  # a division that overflows float32


@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (0.5, None), (1.0, 3)])
def test_sampling_follows_the_softmax_at_its_temperature_over_the_top_k(temperature, top_k):
    torch.manual_seed(5)
    model = GPT(GPTConfig(vocab_size=8, block_size=4, n_layer=1, n_head=1, n_embd=8), ATTENTION["SDPA"])
    torch.nn.init.normal_(model.transformer.wte.weight, std=0.5)
    prompt = torch.zeros(20_000, 2, dtype=torch.int64)
    logits = model(prompt[:1])[0][0, -1].detach() / temperature
    if top_k:
        logits[logits.argsort(descending=True)[top_k:]] = -math.inf
    drawn = model.generate(prompt, 1, temperature, top_k)[:, -1]
    shares = drawn.bincount(minlength=8) / len(drawn)
    torch.testing.assert_close(shares, F.softmax(logits, -1), rtol=0, atol=0.02)
    assert not shares[logits == -math.inf].any()


def test_generate_goes_on_past_block_size_with_the_last_tokens(model):
    block_size = SMALL["block_size"]
    tokens = model.generate(sequences(2, block_size - 1), 4, temperature=0)
    assert tokens.shape == (2, block_size + 3)
    last = model(tokens[:, -block_size - 1 : -1])[0][:, -1].argmax(-1)
    assert torch.equal(tokens[:, -1], last)


@pytest.mark.parametrize(
    "config, numbers",
    [
        (dict(n_embd=50, n_head=4), ["n_embd 50", "n_head 4"]),
        (dict(n_layer=0), ["n_layer", "1", "0"]),
        (dict(vocab_size=-3), ["vocab_size", "1", "-3"]),
    ],
)
def test_a_shape_that_does_not_fit_together_is_refused_with_its_numbers(config, numbers):
    with pytest.raises(ValueError) as error:
        GPTConfig(**config)
    assert all(number in str(error.value) for number in numbers)


@pytest.mark.parametrize(
    "x, y, numbers",
    [
        ((1, 25), None, ["25", "24"]),
        ((1, 25), (1, 25), ["25", "24"]),
        ((7,), None, ["(7,)", "(B, T)"]),
        ((2, 3, 4), None, ["(2, 3, 4)", "(B, T)"]),
        ((2, 5), (2, 6), ["(2, 5)", "(2, 6)"]),
        ((2, 6), (12,), ["(2, 6)", "(12,)"]),
    ],
)
def test_a_wrong_input_is_refused_with_both_numbers(model, x, y, numbers):
    with pytest.raises(ValueError) as error:
        model(torch.zeros(x, dtype=torch.int64), None if y is None else torch.zeros(y, dtype=torch.int64))
    assert all(number in str(error.value) for number in numbers)


@pytest.mark.parametrize("temperature, top_k, number", [(-0.5, None, "-0.5"), (1.0, 0, "0"), (1.0, -2, "-2")])
def test_generate_refuses_what_is_no_temperature_and_no_top_k(model, temperature, top_k, number):
    with pytest.raises(ValueError, match=number):
        model.generate(sequences(1, 2), 1, temperature, top_k)
