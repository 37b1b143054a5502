"""Weights on disk, those that Hugging Face's package reads, and their loss on held-out text."""

from harness import weights
from harness.weights import from_pretrained, held_out_loss, load, save

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import error_of
from test_model import SDPA, SMALL, random_ids, small
from torch.nn import functional as F

from model import GPT, SIZES, GPTConfig


def hugging_faces(dtype, **shape):
    """Return a GPT-2 of the package transformers with random weights, in float32 after a round by way of a dtype."""
    transformers = pytest.importorskip("transformers")
    shape = SMALL | shape | dict(n_positions=SMALL["block_size"], bos_token_id=None, eos_token_id=None)
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    for p in reference.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return reference.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_folder_of_transformers_computes_in_float32_what_hugging_face_saved(tmp_path, dtype):
    reference = hugging_faces(dtype)
    reference.save_pretrained(tmp_path)
    model = load(str(tmp_path), SDPA)
    assert (model.config, model.in_bytes) == (GPTConfig(**SMALL), False)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    x = random_ids(2, 24)
    torch.testing.assert_close(model(x), reference.float()(x).logits, rtol=0, atol=1e-4)


def test_a_state_dict_of_transformers_has_its_matrices_on_their_sides_and_is_read_all_the_same(tmp_path):
    reference, x = hugging_faces(torch.float32, n_embd=128, n_head=2), random_ids(2, 24)
    expected = reference(x).logits
    for module in (reference, reference.transformer):  # the second has neither "transformer." nor lm_head
        torch.save(module.state_dict(), tmp_path / "bare.pt")
        torch.testing.assert_close(load(tmp_path / "bare.pt", SDPA)(x), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "field, value, told",
    [
        ("activation_function", "relu", "its activation is relu"),
        ("scale_attn_weights", False, "its scale_attn_weights is False"),
        ("layer_norm_epsilon", 1e-2, "its layer_norm_epsilon is 0.01"),
        ("tie_word_embeddings", False, "its lm_head is another matrix than its wte"),
    ],
)
def test_a_gpt_2_that_computes_otherwise_is_refused(tmp_path, capfd, field, value, told):
    hugging_faces(torch.float32, **{field: value}).save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        load(str(tmp_path), SDPA)
    assert told in capfd.readouterr().err


def test_a_folder_that_lacks_weights_or_is_cut_is_refused(tmp_path, capfd):
    safetensors = pytest.importorskip("safetensors.torch")
    hugging_faces(torch.float32).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = safetensors.load_file(path)
    without_a_layer = {name: tensor for name, tensor in weights.items() if ".h.1." not in name}
    safetensors.save_file(without_a_layer, path, metadata={"format": "pt"})
    with pytest.raises(SystemExit):
        load(str(tmp_path), SDPA)
    assert "it lacks transformer.h.1.attn.c_attn.bias" in capfd.readouterr().err
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(SystemExit):
        load(str(tmp_path), SDPA)
    assert "holds no weights of a GPT-2" in capfd.readouterr().err


def test_a_folder_of_another_model_is_refused(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    transformers.GPTNeoConfig(
        hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global"], 2]]
    ).save_pretrained(tmp_path)
    assert "it is a model of type gpt_neo" in error_of(capsys, load, str(tmp_path), SDPA)


def test_without_transformers_a_line_says_how_to_get_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert error_of(capsys, load, str(tmp_path), SDPA).endswith("pip install transformers")
    assert error_of(capsys, from_pretrained, "gpt2", SDPA).endswith("pip install transformers")


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
    ids = np.array([1] * 30 + [211], np.uint16)
    assert "ids from 1 to 211, and the model's are from 0 to 210" in error_of(capsys, held_out_loss, small(), ids)


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


def test_what_was_saved_is_loaded_and_knows_whether_its_tokens_were_bytes(tmp_path):
    model, x = small(), random_ids(2, 24)
    for in_bytes in (False, True):
        save(model, tmp_path / "saved.pt", in_bytes)
        loaded = load(tmp_path / "saved.pt", SDPA)
        assert loaded.in_bytes == in_bytes
        assert torch.equal(loaded(x), model(x))


def nanogpts_checkpoint(model, biases, prefix):
    """What nanoGPT's train.py writes of a model: prefixes, a buffer of masks, and no biases where they are off."""
    weights = {}
    for name, tensor in model.state_dict().items():
        if biases or not name.endswith(".bias"):
            weights[prefix + name] = tensor
    weights[prefix + "transformer.h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    about = dict(n_layer=3, n_head=4, n_embd=48, block_size=24, bias=biases, vocab_size=211, dropout=0.0)
    return {"model": weights, "optimizer": {}, "model_args": about, "iter_num": 5, "config": {"dataset": "owt"}}


@pytest.mark.parametrize(
    "biases, prefix", [(True, ""), (True, "_orig_mod."), (False, "module."), (False, "module._orig_mod.")]
)
def test_nanogpts_checkpoint_and_its_state_dict_give_its_logits(tmp_path, capsys, biases, prefix):
    model, x = small(), random_ids(2, 24)
    if not biases:
        for name, p in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.zeros_(p)
    checkpoint = nanogpts_checkpoint(model, biases, prefix)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert torch.equal(load(tmp_path / "ckpt.pt", SDPA)(x), model(x))
    assert capsys.readouterr().err == ""


def test_a_state_dict_alone_does_not_tell_its_heads_and_a_line_says_what_was_taken(tmp_path, capsys):
    """Those of the size that it has, and otherwise GPT-2's 64 channels for each."""
    tiny = GPT(GPTConfig(block_size=16, **SIZES["tiny"]), SDPA)
    torch.save(tiny.state_dict(), tmp_path / "tiny.pt")
    x = random_ids(2, 16)
    assert torch.equal(load(tmp_path / "tiny.pt", SDPA)(x), tiny(x))
    assert capsys.readouterr().err.endswith("tiny.pt does not say how many heads there are: taking 2\n")
    wide = GPT(GPTConfig(100, 16, n_layer=1, n_head=3, n_embd=192), SDPA)
    torch.save(wide.state_dict(), tmp_path / "wide.pt")
    assert load(tmp_path / "wide.pt", SDPA).config == wide.config


@pytest.mark.parametrize("place", ["model", "state_dict", "model_state_dict"])
def test_wrappers_inside_of_names_are_left_out_and_heads_may_stand_in_a_config(tmp_path, capsys, place):
    model, x = small(), random_ids(2, 24)
    weights = {}
    for name, tensor in model.state_dict().items():
        weights[name.replace(".h.0.", ".h.0._orig_mod.").replace(".h.1.", ".h.1._fsdp_wrapped_module.")] = tensor
    torch.save({place: weights, "config": {"n_head": 4}}, tmp_path / "a.pt")
    assert torch.equal(load(tmp_path / "a.pt", SDPA)(x), model(x))
    assert capsys.readouterr().err == ""


class Config:
    """A class of somebody's script, as build-nanogpt's checkpoints hold one."""


def test_what_cannot_be_read_is_told_in_words(tmp_path, capsys):
    torch.save({"model": small().state_dict(), "config": Config()}, tmp_path / "log.pt")
    assert "save model.state_dict() alone" in error_of(capsys, load, tmp_path / "log.pt", SDPA)
    (tmp_path / "model.safetensors").touch()
    assert "pass the folder that it lies in" in error_of(capsys, load, tmp_path / "model.safetensors", SDPA)
    torch.save({"model": small().state_dict(), "config": {"n_head": 5}}, tmp_path / "odd.pt")
    assert "its 48 channels do not divide over 5 heads" in error_of(capsys, load, tmp_path / "odd.pt", SDPA)
    for checkpoint in ({"model": "gpt2"}, {"weights": [1, 2], "model_args": None}):
        torch.save(checkpoint, tmp_path / "words.pt")
        assert "no embeddings of tokens" in error_of(capsys, load, tmp_path / "words.pt", SDPA)
    torch.save({"conv.weight": torch.ones(3, 3)}, tmp_path / "conv.pt")
    assert "no embeddings of tokens and positions" in error_of(capsys, load, tmp_path / "conv.pt", SDPA)
    for name in ("transformer.ln_f.bias", "transformer.wte.weight"):
        model = small()
        torch.nn.init.constant_(model.get_parameter(name), float("nan"))
        save(model, tmp_path / "nan.pt")
        assert "weights that are not finite" in error_of(capsys, load, tmp_path / "nan.pt", SDPA)


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
        assert f"{saved} holds no weights of a GPT-2 (" in error_of(capsys, load, saved, SDPA)
    saved.write_bytes(whole)
    incomplete = torch.load(saved)
    del incomplete["weights"]["transformer.ln_f.bias"]
    for checkpoint in (torch.ones(3), [1, 2], {"transformer.wte.weight": torch.ones(3)}, incomplete):
        torch.save(checkpoint, saved)
        assert f"{saved} holds no weights of a GPT-2 (" in error_of(capsys, load, saved, SDPA)
    assert not (tmp_path / "sprung").exists()
