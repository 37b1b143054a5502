"""GPT-2 against Hugging Face's, attention against attention, and the arithmetic that the stages rely on."""

import itertools
import math
import re
import sys

import numpy as np
import pytest
import torch
from conftest import definitions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F

import model as model_module
from data import VOCAB, InputError
from model import GPT, SIZES, GPTConfig, evaluate

SMALL = dict(vocab_size=211, block_size=24, n_layer=3, n_head=4, n_embd=48)
PADDED = 50304  # the vocabulary of s06 and later
EXPLICIT = ["s01", "s02", "s03", "s04"]  # stages that write attention out


def attention_of(stage):
    """The function `attention` in a stage's own source."""
    return definitions(stage, "attention", math=math, torch=torch, F=F)["attention"]


SDPA = attention_of("s05")


def random_ids(B, T, vocab_size=SMALL["vocab_size"]):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(3))


def tiny(vocab_size):
    torch.manual_seed(1337)
    return GPT(GPTConfig(vocab_size=vocab_size, block_size=16, **SIZES["tiny"]), SDPA)


@pytest.fixture(params=["s01", "s05"])
def model(request):
    """A small GPT with random biases and gains too, and weights that are large enough for errors to show."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SMALL), attention_of(request.param))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn_like(p))
    return model


def hugging_face(model):
    """Hugging Face's GPT-2 with a GPT's weights, and the names of the matrices that it stores transposed."""
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
    "size, parameters",
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_sizes_have_the_parameters_of_openais_models(size, parameters, monkeypatch):
    monkeypatch.setattr(GPT, "to_empty", lambda self, device: self)  # stays on the meta device
    model = GPT(GPTConfig(**SIZES[size]), None)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_a_seed_gives_the_padded_model_the_same_weights():
    plain = tiny(VOCAB).state_dict()
    padded = tiny(PADDED).state_dict()
    assert plain.keys() == padded.keys()
    for name, w in plain.items():
        assert torch.equal(w, padded[name][: len(w)]), name
    grown = {name for name, w in plain.items() if padded[name].shape != w.shape}
    assert grown == {"transformer.wte.weight", "lm_head.weight"}


def test_a_seed_gives_the_same_weights_again_and_another_seed_others():
    torch.manual_seed(1)
    first = GPT(GPTConfig(**SMALL), SDPA).transformer.wte.weight
    other = GPT(GPTConfig(**SMALL), SDPA).transformer.wte.weight
    torch.manual_seed(1)
    again = GPT(GPTConfig(**SMALL), SDPA).transformer.wte.weight
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    "wrong, numbers",
    [
        (dict(n_embd=50, n_head=4), ["n_embd 50", "n_head 4"]),
        (dict(n_layer=0), ["n_layer", "0"]),
        (dict(vocab_size=-3), ["vocab_size", "-3"]),
        (dict(n_head="4"), ["n_head", "'4'"]),
    ],
)
def test_a_config_that_does_not_fit_names_its_numbers(wrong, numbers):
    with pytest.raises(ValueError) as error:
        GPTConfig(**wrong)
    for words in numbers:
        assert words in str(error.value)


@pytest.mark.parametrize("shape", [(2, 3, 17, 8), (1, 2, 1, 16), (2, 12, 64, 64)], ids=str)
@pytest.mark.parametrize("stage", EXPLICIT)
def test_explicit_attention_equals_sdpa(stage, shape):
    torch.manual_seed(2)
    q, k, v, upstream = torch.randn(4, *shape)
    inputs = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    attention = attention_of(stage)
    written_out = attention(*inputs)
    fused = SDPA(*inputs)
    torch.testing.assert_close(written_out, fused, rtol=0, atol=1e-5)
    gradients = torch.autograd.grad(written_out, inputs, upstream)
    expected = torch.autograd.grad(fused, inputs, upstream)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-5)


def test_a_later_token_changes_no_earlier_logits(model):
    x = random_ids(2, 16)
    changed = x.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % SMALL["vocab_size"]
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=-1).min() > 1e-3


def test_padding_changes_the_loss_by_the_softmax_alone():
    plain, padded = tiny(VOCAB), tiny(PADDED)
    ids = random_ids(2, 17, VOCAB)
    x, y = ids[:, :-1], ids[:, 1:]
    with torch.no_grad():
        assert torch.equal(padded(x)[..., :VOCAB], plain(x))
        wide = padded(x).double()
        increase = padded(x, y).double() - plain(x, y).double()
    expected = (wide.logsumexp(-1) - wide[..., :VOCAB].logsumexp(-1)).mean()
    torch.testing.assert_close(increase, expected, rtol=0, atol=5e-6)
    uniform = math.log(1 + 47 / VOCAB)  # what 47 more tokens cost where all are equally likely
    assert 0.5 * uniform < expected < 2 * uniform


def test_autocast_gives_bfloat16_logits_and_a_float32_loss():
    model, x = tiny(VOCAB), random_ids(2, 16, VOCAB)
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(x), model(x, x)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss, F.cross_entropy(logits.float().flatten(0, 1), x.flatten()))


def test_weights_in_bfloat16_give_a_float32_loss_too():
    model, x = tiny(VOCAB).bfloat16(), random_ids(2, 16, VOCAB)
    assert model(x, x).dtype == torch.float32


def test_a_compiled_backward_reads_no_gradient_of_the_logits():
    """PyTorch issue 131794: a forward that returns the logits too gets a zero gradient of their size."""
    tangents = []

    def forward_compiler(graph, inputs):
        return make_boxed_func(graph)

    def backward_compiler(graph, inputs):
        for node in graph.graph.find_nodes(op="placeholder"):
            if node.name.startswith("tangents"):
                tangents.append(tuple(node.meta["val"].shape))
        return make_boxed_func(graph)

    model, x = tiny(VOCAB), random_ids(2, 16, VOCAB)
    backend = aot_autograd(fw_compiler=forward_compiler, bw_compiler=backward_compiler)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(x, x).backward()
    assert tangents == [()]  # the loss's
    assert model.lm_head.weight.grad.abs().max() > 0


@pytest.mark.parametrize("shape", [(7,), (2, 3, 4)], ids=str)
def test_ids_of_a_wrong_shape_are_refused_by_its_name(shape):
    model, idx = tiny(VOCAB), torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=re.escape(f"must both be (B, T), got [{shape}]")):
        model(idx)


@pytest.mark.parametrize("shape, targets_shape", [((2, 5), (2, 6)), ((2, 6), (12,))], ids=str)
def test_targets_of_another_shape_than_the_ids_are_refused_by_its_name(shape, targets_shape):
    model = tiny(VOCAB)
    idx = torch.zeros(shape, dtype=torch.int64)
    targets = torch.zeros(targets_shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=re.escape(f"must both be (B, T), got [{shape}, {targets_shape}]")):
        model(idx, targets)


def test_a_sequence_longer_than_block_size_is_refused():
    model, idx = tiny(VOCAB), random_ids(1, 17, VOCAB)
    with pytest.raises(ValueError, match="17 tokens is longer than block_size 16"):
        model(idx)


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


@pytest.mark.parametrize("temperature, top_k", [(0, None), (1.7, 1), (1e-42, None)])
def test_temperature_0_and_top_k_1_take_the_likeliest_token(model, temperature, top_k):
    T = SMALL["block_size"]
    prompt = random_ids(4, T - 2)
    expected = prompt
    for _ in range(6):  # past block_size, where the model sees the last tokens
        likeliest = model(expected[:, -T:])[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat((expected, likeliest), dim=1)
    assert torch.equal(model.generate(prompt, 6, temperature, top_k), expected)


@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (0.5, None), (1.0, 3), (2.0, 7), (1.0, 100)])
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


@pytest.mark.parametrize("temperature, top_k, number", [(-0.5, None, "-0.5"), (1.0, 0, "0"), (1.0, -2, "-2")])
def test_generate_refuses_a_wrong_temperature_or_top_k(temperature, top_k, number):
    model, prompt = tiny(VOCAB), random_ids(1, 2, VOCAB)
    with pytest.raises(ValueError, match=f"got .*{number}"):
        model.generate(prompt, 1, temperature, top_k)


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
def test_evaluate_refuses_a_text_with_nothing_to_predict(length):
    with pytest.raises(InputError, match=f"the held-out text has {length} tokens, and needs 2"):
        evaluate(tiny(VOCAB), np.zeros(length, np.uint16))


class Stopped(Exception):
    """What a CountingModel raises when it has seen enough."""


class CountingModel:
    """Stands in for a GPT of block_size 4 whose loss is 1, and raises Stopped after a number of windows."""

    def __init__(self, windows):
        self.windows = windows
        self.config = GPTConfig(block_size=4)
        self.transformer = torch.nn.ModuleDict(dict(wte=torch.nn.Embedding(1, 1)))

    def __call__(self, x, y):
        if self.windows == 0:
            raise Stopped
        self.windows -= 1
        return torch.tensor(1.0)


def test_evaluate_copies_a_window_at_a_time_of_a_text_larger_than_memory():
    tokens = np.broadcast_to(np.uint16(7), 10**15)  # one number in memory; more than any has as int64
    with pytest.raises(Stopped):
        evaluate(CountingModel(windows=3), tokens)


@pytest.fixture
def clock(monkeypatch):
    """A clock on which ten milliseconds pass between any two looks at it."""
    seconds = itertools.count(step=0.01)
    monkeypatch.setattr(model_module.time, "monotonic", lambda: next(seconds))


def test_evaluate_shows_its_progress_on_a_terminal_a_few_times_a_second(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    evaluate(CountingModel(windows=1000), np.zeros(4001, np.uint16))
    shown = capsys.readouterr().err.split("\r")[:-1]
    assert 10 < len(shown) < 50  # in the ten to twenty seconds of that clock
    assert re.fullmatch(r"[\d,]+ of 4,000 tokens", shown[0])


def test_evaluate_shows_nothing_where_stderr_is_no_terminal(clock, capsys):
    evaluate(CountingModel(windows=1000), np.zeros(4001, np.uint16))
    assert capsys.readouterr().err == ""
