"""Weights on disk, and their loss on held-out text."""

from harness.weights import held_out_loss, load

from unittest import mock

import numpy as np
import pytest
import torch
from conftest import error_of
from test_model import SDPA, SMALL_SHAPE, random_ids, small
from torch.nn import functional as F

# The held-out loss


@pytest.mark.parametrize("length", [2, 24, 25, 26, 60])
def test_the_held_out_loss_predicts_every_token_once_and_keeps_no_graph(length):
    model = small()
    ids = random_ids(1, length)[0]
    T = SMALL_SHAPE["block_size"]
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


class Trap:
    """What a pickle can hold: a call that is made when it is read."""

    def __reduce__(self):
        return pytest.fail, ("its code has run",)


NOT_FINITE = {"config": SMALL_SHAPE, "weights": {"lm_head.weight": torch.tensor([torch.nan])}}
CONTENTS = [Trap(), torch.ones(3), {"config": SMALL_SHAPE, "weights": {}}, b"", b"First Citizen:\n", NOT_FINITE]


@pytest.mark.parametrize("content", CONTENTS, ids=["code", "a tensor", "incomplete", "nothing", "a text", "NaN"])
def test_what_is_no_checkpoint_is_one_line_and_none_of_its_code_runs(tmp_path, capsys, content):
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert "w.pt can't be loaded as a GPT-2 (" in error_of(capsys, load, path, SDPA)
