"""Weights of a GPT: to a file and back, those that OpenAI published, and their loss on held-out text."""

from dataclasses import asdict, fields

import numpy as np
import torch

from data import VOCAB, TextError, check_ids
from model import GPT, GPTConfig

from .common import refuse, whole_file

PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # by OpenAI
# OpenAI stored these weights as (inputs, outputs), and nn.Linear has (outputs, inputs).
CONV1D_SUFFIXES = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
CLOSE = 0.01  # how far logits may be from those of transformers, which round otherwise
HELD_OUT_AT_MOST = 2**20  # tokens, since a held-out loss needs no billion of them


def save(model, path, in_bytes=False):
    """Write a GPT's weights to a file, with its shape. Raises OSError or RuntimeError where the disk is full.

    in_bytes: whether each byte of its text was a token.
    """
    with whole_file(path) as unfinished:
        checkpoint = {"config": asdict(model.config), "weights": model.state_dict(), "in_bytes": in_bytes}
        torch.save(checkpoint, unfinished)


def load(path, attention):
    """Return the GPT of a file that save() wrote, or of nanoGPT's ckpt.pt, in float32 on the CPU.

    Its attribute in_bytes is what save() was told. Exits with one line where it is no such file.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        is_nanogpts = "model_args" in checkpoint
        about = checkpoint["model_args" if is_nanogpts else "config"]
        model = GPT(GPTConfig(**{field.name: about[field.name] for field in fields(GPTConfig)}), attention)
        weights = checkpoint["model" if is_nanogpts else "weights"]
        weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in weights.items()}
        for name, p in model.named_parameters():
            if name.endswith(".bias") and not about.get("bias", True):  # nanoGPT computes as if all were 0
                weights[name] = torch.zeros_like(p)
        model.load_state_dict({name: p for name, p in weights.items() if not name.endswith(".attn.bias")})
    except Exception as error:  # torch.load raises many kinds for a file that is no checkpoint
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        refuse(f"{path} holds no weights of a GPT-2 ({reason}): pass a file of --save, or nanoGPT's ckpt.pt")
    if not all(p.isfinite().all() for p in model.parameters()):
        refuse(f"{path} holds weights that are not finite: its training has diverged")
    model.in_bytes = checkpoint.get("in_bytes", False)
    return model


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
    model.in_bytes = False
    return model


@torch.no_grad()
def held_out_loss(model, ids):
    """Return the mean loss, in nats per token, over the first million tokens of a held-out text, a float.

    ids: a 1-D integer array, which may be larger than memory. Each id but the first is predicted once. The text is cut
    into windows of block_size, so the first target of a window is predicted from one id, and its last from block_size
    ids. The model computes in the dtype of its weights, without autocast. Raises TextError below 2 ids, and for an id
    past the vocabulary.
    """
    ids = ids[:HELD_OUT_AT_MOST]
    if len(ids) < 2:
        raise TextError(f"the held-out text has {len(ids)} tokens, and needs 2: pass a longer text")
    device, T = model.transformer.wte.weight.device, model.config.block_size
    targets = len(ids) - 1
    total = 0.0
    for start in range(0, targets, T):
        window = ids[start : start + T + 1]
        check_ids(window, "the held-out text", min(VOCAB, model.config.vocab_size))
        window = torch.from_numpy(window.astype(np.int64)).to(device)
        x, y = window[None, :-1], window[None, 1:]
        total += model(x, y).item() * y.numel()
    return total / targets
