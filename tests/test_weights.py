"""Weights on disk, those that Hugging Face's package reads, and their loss on held-out text."""

from harness import weights
from harness.weights import from_pretrained, held_out_loss, load, save

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import error_of
from test_model import SDPA, SMALL, random_ids, small
from torch.nn import functional as F

from model import GPTConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_from_pretrained_computes_in_float32_what_hugging_face_saved(tmp_path, dtype):
    transformers = pytest.importorskip("transformers")
    shape = SMALL | dict(n_positions=SMALL["block_size"], bos_token_id=None, eos_token_id=None)
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    for p in reference.parameters():
        torch.nn.init.normal_(p, std=0.2)
    reference.to(dtype).save_pretrained(tmp_path)
    model = from_pretrained(str(tmp_path), SDPA)
    assert model.config == GPTConfig(**SMALL)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    x = random_ids(2, 24)
    torch.testing.assert_close(model(x), reference.float()(x).logits, rtol=0, atol=1e-4)


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
    model, ids = small(), random_ids(1, 60)[0].numpy().astype(np.uint16)
    seen = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].numel()))
    held_out_loss(model, ids)
    assert sum(seen) == 29  # the last of the 30 has no token after it


@pytest.mark.parametrize("length", [0, 1])
def test_a_text_with_nothing_to_predict_is_refused(capsys, length):
    line = error_of(capsys, held_out_loss, small(), np.zeros(length, np.uint16))
    assert f"the held-out text has {length} tokens, and needs 2" in line


def test_an_id_past_the_vocabulary_is_refused(capsys):
    ids = np.array([1] * 30 + [50257], np.uint16)
    assert "id 50257 is past GPT-2's last" in error_of(capsys, held_out_loss, small(), ids)


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


def test_a_save_that_fails_leaves_the_weights_that_were_there(saved, monkeypatch):
    def write_half(checkpoint, path):
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")  # a full disk

    before = saved.read_bytes()
    monkeypatch.setattr(torch, "save", write_half)
    with pytest.raises(RuntimeError):
        save(small(), saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


class Trap:
    """What a pickle can hold: a call that is made when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_any_file_that_is_no_checkpoint_is_one_line_and_none_of_its_code_runs(saved, capsys, tmp_path):
    whole = saved.read_bytes()
    trap = pickle.dumps(Trap(tmp_path / "sprung"), protocol=2)
    for content in (b"", b"First Citizen:\n", b"\x80\x02}q\x00.", whole[: len(whole) // 2], trap):
        saved.write_bytes(content)
        assert f"{saved} is no file that --save wrote: " in error_of(capsys, load, saved, SDPA)
    saved.write_bytes(whole)
    incomplete = torch.load(saved)
    del incomplete["weights"]["transformer.ln_f.bias"]
    for checkpoint in (torch.ones(3), [1, 2], {"transformer.wte.weight": torch.ones(3)}, incomplete):
        torch.save(checkpoint, saved)
        assert f"{saved} is no file that --save wrote: " in error_of(capsys, load, saved, SDPA)
    assert not (tmp_path / "sprung").exists()
