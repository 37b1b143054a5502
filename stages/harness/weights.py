"""Weights of a GPT: to a file and back, those that OpenAI published, and their loss on held-out text."""

from dataclasses import asdict

import numpy as np
import torch

from data import refuse, refuse_unknown_ids, whole_file
from model import GPT, GPTConfig

# OpenAI stored these weights as (inputs, outputs), and nn.Linear has (outputs, inputs).
CONV1D_SUFFIXES = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
HELD_OUT_AT_MOST = 2**20  # tokens, since a held-out loss needs no billion of them


def save(model, path):
    """Write a GPT's weights to a file, with its shape. Raises OSError or RuntimeError where the disk is full."""
    with whole_file(path) as unfinished:
        torch.save({"config": asdict(model.config), "weights": model.state_dict()}, unfinished)


def load(path, attention):
    """Return the GPT of a file that save() wrote, on the CPU. Exits with one line where it is no such file."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        model = GPT(GPTConfig(**checkpoint["config"]), attention)
        model.load_state_dict(checkpoint["weights"])
    except Exception as error:  # torch.load raises many kinds for a file that is no checkpoint
        reason = " ".join(str(error).split())[:200]
        refuse(f"{path} is no file that --save wrote: {reason or type(error).__name__}")
    return model


def from_pretrained(name, attention):
    """Return a GPT with OpenAI's weights, in float32 on the CPU, as the package transformers reads them.

    name: "gpt2", "gpt2-medium", "gpt2-large" or "gpt2-xl", or a folder that transformers wrote. Raises what
    transformers raises.
    """
    from transformers import GPT2LMHeadModel

    theirs = GPT2LMHeadModel.from_pretrained(name)
    config = GPTConfig(
        vocab_size=theirs.config.vocab_size,
        block_size=theirs.config.n_positions,
        n_layer=theirs.config.n_layer,
        n_head=theirs.config.n_head,
        n_embd=theirs.config.n_embd,
    )
    model = GPT(config, attention)
    weights = theirs.state_dict()
    with torch.no_grad():
        for key, p in model.named_parameters():
            weight = weights[key]
            if key.endswith(CONV1D_SUFFIXES):
                weight = weight.t()
            p.copy_(weight)
    return model


@torch.no_grad()
def held_out_loss(model, ids):
    """Return the mean loss, in nats per token, over the first million tokens of a held-out text, a float.

    ids: a 1-D integer array, which may be larger than memory. Each id but the first is predicted once. The text is cut
    into windows of block_size, so the first target of a window is predicted from one id, and its last from block_size
    ids. The model computes in the dtype of its weights, without autocast. Exits with one line below 2 ids, and for an
    id past the vocabulary.
    """
    ids = ids[:HELD_OUT_AT_MOST]
    if len(ids) < 2:
        refuse(f"the held-out text has {len(ids)} tokens, and needs 2: pass a longer text")
    device, T = model.transformer.wte.weight.device, model.config.block_size
    targets = len(ids) - 1
    total = 0.0
    for start in range(0, targets, T):
        window = ids[start : start + T + 1]
        refuse_unknown_ids(window, "the held-out text")
        window = torch.from_numpy(window.astype(np.int64)).to(device)
        x, y = window[None, :-1], window[None, 1:]
        total += model(x, y).item() * y.numel()
    return total / targets
