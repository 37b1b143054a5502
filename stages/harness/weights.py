"""Weights of a GPT: to a file and back, those that OpenAI published, and their loss on held-out text."""

import os
from dataclasses import asdict, fields

import numpy as np
import torch

from data import VOCAB, TextError, check_ids
from model import GPT, GPTConfig

from .common import refuse, whole_file

PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # by OpenAI
# OpenAI stored these weights as (inputs, outputs), and nn.Linear has (outputs, inputs).
CONV1D_SUFFIXES = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
SETTINGS = {"vocab_size", "block_size", "n_layer", "n_head", "n_embd", "bias", "dropout"}  # of nanoGPT's GPT-2
CLOSE = 0.01  # how far logits may be from those of transformers, which round otherwise
HELD_OUT_AT_MOST = 2**20  # tokens, since a held-out loss needs no billion of them


def save(model, path, in_bytes=False):
    """Write a GPT's weights to a file, with its shape. Raises OSError or RuntimeError where the disk is full.

    in_bytes: whether each byte of its text was a token.
    """
    with whole_file(path) as unfinished:
        checkpoint = {"config": asdict(model.config), "weights": model.state_dict(), "in_bytes": in_bytes}
        torch.save(checkpoint, unfinished)


def is_saved(path):
    """Tell whether a path is a file that holds what save() wrote."""
    if not os.path.isfile(path):  # a terminal would be waited for
        return False
    try:
        return {"config", "weights"} <= torch.load(path, map_location="cpu", weights_only=True, mmap=True).keys()
    except Exception:  # torch.load raises many kinds for a file that is no checkpoint
        return False


def load(path, attention):
    """Return (GPT, whether each byte of its text was a token) of what save() wrote, or of nanoGPT's ckpt.pt.

    The GPT is in float32 on the CPU. Exits with one line where the file is neither, or a model that computes otherwise.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        is_nanogpts = "model_args" in checkpoint
        # and not nanoGPT's "config", the command line of its last run: a resumed model has the shape of its first one
        about = checkpoint["model_args" if is_nanogpts else "config"]
        unknown = sorted({name for name in about if about[name]} - SETTINGS)
        if unknown:  # a fork of nanoGPT may compute otherwise with the same weights
            raise ValueError(f"GPT-2 has no setting {unknown[0]}")
        model = GPT(GPTConfig(**{field.name: about[field.name] for field in fields(GPTConfig)}), attention)
        weights = checkpoint["model" if is_nanogpts else "weights"]
        weights = {name.removeprefix("_orig_mod."): p for name, p in weights.items()}
        weights = {name: p for name, p in weights.items() if not name.endswith(".attn.bias")}  # masks, and no weights
        if is_nanogpts and not about["bias"]:  # it leaves out biases that would be 0
            weights |= {name: torch.zeros_like(p) for name, p in model.named_parameters() if name.endswith(".bias")}
        model.load_state_dict(weights)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        refuse(f"{path} holds no weights of a GPT-2 ({reason}): pass a file of --save, or nanoGPT's ckpt.pt")
    if not all(p.isfinite().all() for p in model.parameters()):
        refuse(f"{path} holds weights that are not finite: its training has diverged")
    return model, checkpoint.get("in_bytes", False)


def from_pretrained(name, attention):
    """Return a GPT with OpenAI's weights, in float32 on the CPU, as the package transformers reads them.

    name: one of PUBLISHED, or a folder that transformers wrote. Exits with one line where it can't be read, or where
    its logits are others than ours.
    """
    try:
        from transformers import GPT2LMHeadModel

        reference = GPT2LMHeadModel.from_pretrained(name).float().eval()
        about = reference.config
        shape = (about.vocab_size, about.n_positions, about.n_layer, about.n_head, about.n_embd)
        model = GPT(GPTConfig(*shape), attention)
        weights = reference.state_dict()
        for key in weights:
            if key.endswith(CONV1D_SUFFIXES):
                weights[key] = weights[key].t()
        model.load_state_dict(weights)
        ids = torch.arange(min(16, about.n_positions))[None] % about.vocab_size
        with torch.no_grad():
            if not torch.allclose(model(ids), reference(ids).logits, rtol=0, atol=CLOSE):
                raise ValueError("it computes other logits than GPT-2")
    except ImportError:
        refuse(f"{name}: these weights are read by the package transformers: pip install transformers")
    except Exception as error:  # no such weights, no network, a broken file, or another model under GPT-2's name
        refuse(f"{name} holds no weights of a GPT-2: {' '.join(str(error).split())[:200]}")
    return model


def held_out_ids(corpus, config):
    """Return the first million tokens of a held-out text, a 1-D integer array.

    corpus: what load_tokens() returned. config: of the GPT that is to predict them. Raises TextError below 2 ids, and
    for an id past the vocabulary.
    """
    ids = corpus.ids[:HELD_OUT_AT_MOST]
    if len(ids) < 2:
        raise TextError(f"the held-out text has {len(ids)} tokens, and needs 2: pass a longer text")
    check_ids(ids, "the held-out text", min(VOCAB, config.vocab_size))
    return ids


@torch.no_grad()
def held_out_loss(model, ids):
    """Return the mean loss of a GPT, in nats per token, over what held_out_ids() returned, a float.

    Each id but the first is predicted once. The text is cut into windows of block_size, so the first target of a window
    is predicted from one id, and its last from block_size ids. The model computes in the dtype of its weights, without
    autocast.
    """
    device, T = model.transformer.wte.weight.device, model.config.block_size
    targets = len(ids) - 1
    total = 0.0
    for start in range(0, targets, T):
        window = torch.from_numpy(ids[start : start + T + 1].astype(np.int64)).to(device)
        x, y = window[None, :-1], window[None, 1:]
        total += model(x, y).item() * y.numel()
    return total / targets
