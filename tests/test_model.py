"""GPT-2 against Hugging Face's, its sizes and weights, and what it generates."""

from harness.weights import CONV1D_SUFFIXES, gpt_like

import math

import pytest
import torch
from conftest import STAGE_FILES, attention_of
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data import VOCAB
from model import GPT, SIZES, GPTConfig

SMALL_SHAPE = dict(vocab_size=211, block_size=24, n_layer=3, n_head=4, n_embd=48)
SDPA = attention_of("s05")


def random_ids(B, T):
    return torch.randint(SMALL_SHAPE["vocab_size"], (B, T), generator=torch.Generator().manual_seed(3))


def small():
    """Return a small GPT. Its biases and gains are random, too, and its weights so large that errors show."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SMALL_SHAPE), SDPA)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn_like(p))
    return model


# Against Hugging Face's GPT-2


@pytest.mark.parametrize("stage", ["s01", "s05"])
def test_logits_loss_and_gradients_are_those_of_hugging_faces_gpt_2(stage):
    transformers = pytest.importorskip("transformers")
    shape = SMALL_SHAPE | dict(n_positions=SMALL_SHAPE["block_size"], bos_token_id=None, eos_token_id=None)
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    for p in reference.parameters():
        torch.nn.init.normal_(p, std=0.2)
    model = gpt_like(reference.bfloat16(), attention_of(stage))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.double()
    reference.double()
    ids = random_ids(3, 25)
    x, y = ids[:, :-1], ids[:, 1:]  # y is not contiguous
    expected_logits = reference(x).logits
    torch.testing.assert_close(model(x), expected_logits, rtol=0, atol=1e-9)

    loss, expected_loss = model(x, y), F.cross_entropy(expected_logits.flatten(0, 1), y.flatten())
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=0)
    loss.backward()
    expected_loss.backward()
    expected = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        grad = expected[name].grad.t() if name.endswith(CONV1D_SUFFIXES) else expected[name].grad
        assert grad.abs().max() > 1e-4, name
        torch.testing.assert_close({name: p.grad}, {name: grad}, rtol=0, atol=1e-6)


# Weights and sizes


@pytest.mark.parametrize("n_layer", [2, 8])
def test_weights_are_drawn_with_the_stds_of_gpt2(n_layer):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=1000, block_size=128, n_layer=n_layer, n_head=4, n_embd=128)
    for name, p in GPT(config, None).named_parameters():
        std = 0.02
        if name.endswith("c_proj.weight"):  # attention's and the MLP's, which write to the residual stream
            std = 0.02 / math.sqrt(2 * n_layer)
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif p.dim() == 1:
            assert (p == 1).all(), name
        else:
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < 0.05 * std, name


@pytest.mark.parametrize(
    "size, n_head, parameters",
    [
        ("gpt2", 12, 124_439_808),  # OpenAI's
        ("gpt2-xl", 25, 1_557_611_200),
        ("micro", 4, 16_287_488),  # 4 (12 256^2 + 13 x 256) + (50257 + 1024) 256 + 2 x 256
    ],
)
def test_a_size_has_its_heads_and_parameters(size, n_head, parameters, monkeypatch):
    monkeypatch.setattr(GPT, "to_empty", lambda self, device: self)  # stays on the meta device
    model = GPT(GPTConfig(**SIZES[size]), None)
    assert model.config.n_head == n_head
    assert sum(p.numel() for p in model.parameters()) == parameters


# The loss


class OneDevice(TorchDispatchMode):
    """Refuses tensors of two devices in one operation, as a card does. Some that meta tensors stand for do not."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        assert len({tensor.device for tensor in tensors}) <= 1, operation
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", STAGE_FILES)
def test_all_tensors_are_on_the_device_of_the_model(stage):
    """Meta tensors stand for a card's."""
    model = GPT(GPTConfig(**SMALL_SHAPE), attention_of(stage)).to("meta")
    ids = random_ids(2, 24).to("meta")
    with OneDevice():
        model(ids, ids).backward()
    assert {p.grad.device.type for p in model.parameters()} == {"meta"}


def test_the_loss_is_in_float32_whatever_the_logits_are():
    model, x = small().bfloat16(), random_ids(2, 16)
    logits, loss = model(x), model(x, x)
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(loss, F.cross_entropy(logits.float().flatten(0, 1), x.flatten()))


# Generation


@pytest.mark.parametrize("temperature, top_k", [(0.5, None), (2.0, 3), (2.0, 1), (1.0, 100)])
def test_sampling_follows_the_softmax_over_the_top_k(temperature, top_k):
    torch.manual_seed(5)
    model = GPT(GPTConfig(vocab_size=8, block_size=4, n_layer=1, n_head=1, n_embd=8), SDPA)
    torch.nn.init.normal_(model.transformer.wte.weight, std=0.5)
    prompt = torch.tensor([[5, 1, 6, 2, 3, 4]]).repeat(20_000, 1)  # past block_size: the model sees the last tokens
    logits = model(prompt[:1, -4:])[0, -1].detach() / temperature
    unlikely = logits.argsort(descending=True)[top_k or 8 :]
    logits[unlikely] = -math.inf
    counts = model.generate(prompt, 1, temperature, top_k)[:, -1].bincount(minlength=8)
    torch.testing.assert_close(counts / len(prompt), F.softmax(logits, -1), rtol=0, atol=0.02)
    assert counts[unlikely].sum() == 0


def test_padding_is_never_drawn_and_no_graph_is_kept():
    model = GPT(GPTConfig(vocab_size=50304, block_size=16, **SIZES["tiny"]), SDPA)
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = 1.0
        model.transformer.wte.weight[:, 0] = 0.0
        model.transformer.wte.weight[VOCAB:, 0] = 100.0  # the likeliest by far
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append(logits))
    ids = model.generate(random_ids(1, 4), 5, temperature=0)
    assert seen[0][0, -1].argmax() >= VOCAB > ids.max()
    assert not any(logits.requires_grad for logits in seen)  # else a long text would hold all activations
