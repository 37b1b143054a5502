"""Weights of a GPT, of --save or OpenAI's, and their held-out loss."""

import re

import numpy as np
import torch

from data import TextError, check_ids
from model import GPT, GPTConfig

from .common import refuse

PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # by OpenAI
# OpenAI stored these weights as (inputs, outputs), and nn.Linear has (outputs, inputs).
CONV1D_SUFFIXES = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
HELD_OUT_AT_MOST = 2**20  # tokens, since a held-out loss needs no billion of them


def load(path, attention):
    """Return a GPT with weights from a file or from OpenAI, in float32 on the CPU.

    path: a file that --save wrote, or one of PUBLISHED. Exits with one line if it is neither, or if it is no GPT-2.
    """
    try:
        if path in PUBLISHED:
            from transformers import GPT2LMHeadModel

            return gpt_like(GPT2LMHeadModel.from_pretrained(path), attention)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        # torch.compile and DDP put a prefix before the names
        weights = {re.sub(r"^(module\.|_orig_mod\.)*", "", name): p for name, p in checkpoint["weights"].items()}
        return gpt_of(GPTConfig(**checkpoint["config"]), weights, attention)
    except ModuleNotFoundError:
        refuse(f"{path}: these weights are read by the package transformers: pip install transformers")
    except Exception as error:  # also: no network, a broken file, or another model under GPT-2's name
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        refuse(f"{path} can't be loaded as a GPT-2 ({reason}): pass a file of --save, or {' or '.join(PUBLISHED)}")


def gpt_of(config, weights, attention):
    """Return the GPT of a GPTConfig and its tensors. Raises an exception if they do not belong together."""
    if config.n_embd % config.n_head:
        raise ValueError(f"{config.n_head} heads do not divide {config.n_embd} channels")
    if not all(p.isfinite().all() for p in weights.values()):
        raise ValueError("some of its weights are not finite, as after a loss that diverged")
    if not torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"]):
        raise ValueError("its output head differs from its embedding, and GPT-2 has one matrix for both")
    model = GPT(config, attention)
    model.load_state_dict(weights)
    return model


def gpt_like(reference, attention):
    """Return a GPT with the weights of a GPT2LMHeadModel of transformers, in float32."""
    weights = reference.float().state_dict()
    for key in weights:
        if key.endswith(CONV1D_SUFFIXES):
            weights[key] = weights[key].t()
    config = reference.config
    shape = (config.vocab_size, config.n_positions, config.n_layer, config.n_head, config.n_embd)
    return gpt_of(GPTConfig(*shape), weights, attention)


def held_out_ids(corpus):
    """Return the first million held-out tokens of a Corpus, a 1-D integer array.

    Raises TextError if there are fewer than 2 of them, or if one is no id of GPT-2's vocabulary.
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
