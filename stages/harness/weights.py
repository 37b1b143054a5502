"""Weights of a GPT: those of --save, of nanoGPT and of transformers, and their loss on held-out text."""

import os
import re

import numpy as np
import torch

from data import TextError, check_ids
from model import GPT, GPTConfig

from .common import refuse

PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # by OpenAI
# OpenAI stored these weights as (inputs, outputs), and nn.Linear has (outputs, inputs).
CONV1D_SUFFIXES = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
CLOSE = 0.01  # how far logits may be from those of transformers, which round otherwise
HELD_OUT_AT_MOST = 2**20  # tokens, since a held-out loss needs no billion of them


def load(path, attention):
    """Return a GPT, in float32 on the CPU.

    path: what --save wrote, nanoGPT's ckpt.pt, a folder that transformers wrote, or one of PUBLISHED. Exits with one
    line where it is none of these, or a model that computes otherwise.
    """
    try:
        if path in PUBLISHED or os.path.isdir(path):
            return from_transformers(path, attention)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if "model_args" in checkpoint:
            return from_nanogpt(checkpoint, attention)
        model = GPT(GPTConfig(**checkpoint["config"]), attention)
        weights = checkpoint["weights"]  # the names of a compiled model begin otherwise, as do those inside of DDP
        model.load_state_dict({re.sub(r"^(module\.|_orig_mod\.)*", "", name): weights[name] for name in weights})
        return model
    except ImportError:
        refuse(f"{path}: these weights are read by the package transformers: pip install transformers")
    except Exception as error:  # also: no network, a broken file, or another model under GPT-2's name
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        refuse(f"{path} holds no weights of a GPT-2 ({reason}): pass a file of --save, or nanoGPT's ckpt.pt")


def from_nanogpt(checkpoint, attention):
    """Return the GPT of a checkpoint of nanoGPT.

    Raises TypeError for a setting that nanoGPT does not have: a fork may compute otherwise with the same weights.
    """
    settings = checkpoint["model_args"]  # and not "config": a resumed model has the shape of its first run
    shape = {name: settings[name] for name in settings if name not in ("bias", "dropout")}
    model = GPT(GPTConfig(**shape), attention)
    weights = {name: p for name, p in model.named_parameters() if name.endswith(".bias")}  # 0, where nanoGPT has none
    for name, tensor in checkpoint["model"].items():
        if not name.endswith(".attn.bias"):  # masks, and no weights
            weights[name.removeprefix("_orig_mod.")] = tensor
    model.load_state_dict(weights)
    return model


def from_transformers(name, attention):
    """Return the GPT that the package transformers reads under a name, or in a folder.

    Raises ImportError without that package, and another exception where it reads none or its logits are not ours.
    """
    from transformers import GPT2LMHeadModel

    reference = GPT2LMHeadModel.from_pretrained(name).float().eval()
    config = reference.config
    shape = (config.vocab_size, config.n_positions, config.n_layer, config.n_head, config.n_embd)
    model = GPT(GPTConfig(*shape), attention)
    weights = reference.state_dict()
    for key in weights:
        if key.endswith(CONV1D_SUFFIXES):
            weights[key] = weights[key].t()
    model.load_state_dict(weights)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        if not torch.allclose(model(ids), reference(ids).logits, rtol=0, atol=CLOSE):
            raise ValueError("it computes other logits than GPT-2")
    return model


def held_out_ids(corpus):
    """Return the first million held-out tokens of a Corpus, a 1-D integer array.

    Raises TextError below 2 ids, and for an id past GPT-2's vocabulary.
    """
    ids = corpus.held_out[:HELD_OUT_AT_MOST]
    if len(ids) < 2:
        raise TextError(f"the held-out text has {len(ids)} tokens, and needs 2: pass a longer text")
    check_ids(ids, "the held-out text")
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
