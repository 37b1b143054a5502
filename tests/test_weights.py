"""Weights on disk, those that Hugging Face's package reads, and their loss on held-out text."""

from harness.weights import held_out_loss, load

import sys
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import error_of
from test_model import SDPA, SMALL, hugging_faces, random_ids, small
from torch.nn import functional as F


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


# On disk


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])  # compiled, and by several ranks
def test_what_was_saved_is_loaded_on_the_cpu(tmp_path, monkeypatch, prefix):
    model, x = small(), random_ids(2, 24)
    weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    torch.save({"config": vars(model.config), "weights": weights}, tmp_path / "saved.pt")
    monkeypatch.setattr(torch, "load", mock.Mock(wraps=torch.load))
    loaded = load(tmp_path / "saved.pt", SDPA)
    assert torch.load.call_args.kwargs["map_location"] == "cpu"  # also what a card saved
    assert torch.equal(loaded(x), model(x))


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
    for name, p in model.named_parameters():
        if name.endswith(".bias") and not biases:
            torch.nn.init.zeros_(p)
    checkpoint = nanogpts_checkpoint(model, biases, prefix)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert torch.equal(load(tmp_path / "ckpt.pt", SDPA)(x), model(x))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("setting, value", [("use_rmsnorm", True), ("n_layer", 2)])
def test_a_checkpoint_of_another_model_than_it_says_or_than_gpt_2_is_refused(tmp_path, capsys, setting, value):
    checkpoint = nanogpts_checkpoint(small(), True, "")
    checkpoint["model_args"][setting] = value
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert "holds no weights of a GPT-2 (" in error_of(capsys, load, tmp_path / "ckpt.pt", SDPA)


class Trap:
    """What a pickle can hold: a call that is made when it is read."""

    def __reduce__(self):
        return pytest.fail, ("its code has run",)


CONTENTS = [Trap(), torch.ones(3), {"config": SMALL, "weights": {}}, b"", b"First Citizen:\n"]


@pytest.mark.parametrize("content", CONTENTS, ids=["code", "a tensor", "incomplete", "nothing", "a text"])
def test_what_is_no_checkpoint_is_one_line_and_none_of_its_code_runs(tmp_path, capsys, content):
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert "w.pt holds no weights of a GPT-2 (" in error_of(capsys, load, path, SDPA)
