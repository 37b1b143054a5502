"""Weights on disk, those that Hugging Face's package reads, and their loss on held-out text."""

from harness import weights
from harness.weights import held_out_ids, held_out_loss, is_saved, load, save

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import error_of
from test_model import SDPA, SMALL, random_ids, small
from torch.nn import functional as F

from data import Corpus, TextError
from model import GPTConfig


def hugging_faces(dtype, **shape):
    """Return a GPT-2 of the package transformers with random weights, in float32 after a round by way of a dtype."""
    transformers = pytest.importorskip("transformers")
    shape = SMALL | shape | dict(n_positions=SMALL["block_size"], bos_token_id=None, eos_token_id=None)
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    for p in reference.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return reference.to(dtype)


def test_a_folder_of_transformers_computes_in_float32_what_hugging_face_saved(tmp_path):
    reference = hugging_faces(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    model, in_bytes = load(tmp_path, SDPA)
    assert not in_bytes
    assert model.config == GPTConfig(**SMALL)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    x = random_ids(2, 24)
    torch.testing.assert_close(model(x), reference.float()(x).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("field, value", [("activation_function", "relu"), ("tie_word_embeddings", False)])
def test_a_gpt_2_that_computes_otherwise_is_refused(tmp_path, capfd, field, value):
    hugging_faces(torch.float32, **{field: value}).save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        load(tmp_path, SDPA)
    assert "holds no weights of a GPT-2 (it computes other logits than GPT-2)" in capfd.readouterr().err


def test_without_transformers_a_line_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert error_of(capsys, load, "gpt2", SDPA).endswith("pip install transformers")


# The held-out loss


@pytest.mark.parametrize("length", [2, 24, 25, 26, 60])
def test_the_held_out_loss_predicts_every_token_once_and_keeps_no_graph(length):
    model = small()
    ids = random_ids(1, length)[0]
    T = SMALL["block_size"]
    losses = []
    for i in range(1, length):
        window = ids[(i - 1) // T * T : i]
        with torch.no_grad():
            logits = model(window[None])[0, -1]
        losses.append(F.cross_entropy(logits, ids[i]).item())
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append(logits.requires_grad))
    assert held_out_loss(model, ids.numpy().astype(np.uint16)) == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert not any(seen)  # else the end of a run would need more memory than its steps


def test_the_held_out_loss_is_that_of_the_first_million_tokens(monkeypatch):
    assert weights.HELD_OUT_AT_MOST == 2**20
    monkeypatch.setattr(weights, "HELD_OUT_AT_MOST", 30)
    ids = random_ids(1, 60)[0].numpy().astype(np.uint16)
    assert held_out_ids(Corpus("", None, ids)).tolist() == ids[:30].tolist()


@pytest.mark.parametrize(
    "ids, problem",
    [
        ([5], "the held-out text has 1 tokens, and needs 2"),
        ([1] * 30 + [50257], "ids from 1 to 50257, and GPT-2's are from 0 to 50256"),
    ],
)
def test_a_held_out_text_that_cannot_be_predicted_is_refused(ids, problem):
    with pytest.raises(TextError, match=problem):
        held_out_ids(Corpus("", None, np.array(ids, np.uint16)))


# On disk


@pytest.fixture
def saved(tmp_path):
    """The path of a file that save() wrote."""
    save(small(), tmp_path / "saved.pt")
    return tmp_path / "saved.pt"


def test_weights_that_a_card_saved_are_loaded_on_the_cpu(saved, monkeypatch):
    torch_load, places = torch.load, []
    monkeypatch.setattr(torch, "load", lambda path, **kw: places.append(kw["map_location"]) or torch_load(path, **kw))
    load(saved, SDPA)
    assert places == ["cpu"]


def test_what_was_saved_is_loaded_and_knows_whether_its_tokens_were_bytes(tmp_path):
    model, x = small(), random_ids(2, 24)
    for in_bytes in (False, True):
        save(model, tmp_path / "saved.pt", in_bytes)
        loaded, was_in_bytes = load(tmp_path / "saved.pt", SDPA)
        assert was_in_bytes == in_bytes
        assert torch.equal(loaded(x), model(x))
        assert is_saved(tmp_path / "saved.pt")


def nanogpts_checkpoint(model, biases, prefix):
    """What nanoGPT's train.py writes of a model: prefixes, a buffer of masks, and no biases where they are off."""
    weights = {}
    for name, tensor in model.state_dict().items():
        if biases or not name.endswith(".bias"):
            weights[prefix + name] = tensor
    weights[prefix + "transformer.h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    about = dict(n_layer=3, n_head=4, n_embd=48, block_size=24, bias=biases, vocab_size=211, dropout=0.0)
    command_line = {"dataset": "owt", "n_head": 12}  # of a resumed run, which takes its shape from the checkpoint
    return {"model": weights, "optimizer": {}, "model_args": about, "iter_num": 5, "config": command_line}


@pytest.mark.parametrize("biases, prefix", [(True, ""), (True, "_orig_mod."), (False, "_orig_mod.")])
def test_nanogpts_checkpoint_gives_its_logits(tmp_path, capsys, biases, prefix):
    model, x = small(), random_ids(2, 24)
    if not biases:
        for name, p in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.zeros_(p)
    checkpoint = nanogpts_checkpoint(model, biases, prefix)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    loaded, in_bytes = load(tmp_path / "ckpt.pt", SDPA)
    assert torch.equal(loaded(x), model(x)) and not in_bytes
    assert capsys.readouterr().err == ""
    assert not is_saved(tmp_path / "ckpt.pt")  # --save replaces none


@pytest.mark.parametrize("setting, value", [("use_rmsnorm", True), ("n_head", None), ("n_layer", 2), ("n_embd", 96)])
def test_a_checkpoint_of_another_model_than_it_says_or_than_gpt_2_is_refused(tmp_path, capsys, setting, value):
    checkpoint = nanogpts_checkpoint(small(), True, "")
    checkpoint["model_args"][setting] = value
    if value is None:
        del checkpoint["model_args"][setting]
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert "holds no weights of a GPT-2 (" in error_of(capsys, load, tmp_path / "ckpt.pt", SDPA)


def test_weights_that_are_not_finite_are_told_so(tmp_path, capsys):
    model = small()
    torch.nn.init.constant_(model.transformer.ln_f.bias, float("nan"))
    save(model, tmp_path / "nan.pt")
    assert "weights that are not finite" in error_of(capsys, load, tmp_path / "nan.pt", SDPA)


class Trap:
    """What a pickle can hold: a call that is made when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_any_file_that_is_no_checkpoint_is_one_line_and_none_of_its_code_runs(saved, capsys, tmp_path):
    incomplete = torch.load(saved)
    del incomplete["weights"]["transformer.ln_f.weight"]
    trap = pickle.dumps(Trap(tmp_path / "sprung"), protocol=2)
    for content in (b"", b"First Citizen:\n", saved.read_bytes()[:9000], trap, torch.ones(3), incomplete):
        if isinstance(content, bytes):
            saved.write_bytes(content)
        else:
            torch.save(content, saved)
        assert f"{saved} holds no weights of a GPT-2 (" in error_of(capsys, load, saved, SDPA)
    assert not (tmp_path / "sprung").exists()
