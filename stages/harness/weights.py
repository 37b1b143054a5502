"""Weights of a GPT: to a file and back, those that OpenAI published, and their loss on held-out text."""

import os
import re
import sys
from dataclasses import asdict

import numpy as np
import torch

from data import VOCAB, refuse, refuse_unknown_ids, whole_file
from model import GPT, SIZES, GPTConfig

PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # by OpenAI
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module")  # which torch.compile, DDP and FSDP put into names
PLACES = ("weights", "model", "state_dict", "model_state_dict")  # where a checkpoint may have its weights
# what the config of a GPT-2 of transformers says where it computes as ours does, but for the kind of GELU
COMPUTES = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "layer_norm_epsilon": 1e-5}
GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu")
# OpenAI stored these weights as (inputs, outputs), and nn.Linear has (outputs, inputs).
CONV1D_SUFFIXES = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
HELD_OUT_AT_MOST = 2**20  # tokens, since a held-out loss needs no billion of them


def save(model, path, in_bytes=False):
    """Write a GPT's weights to a file, with its shape. Raises OSError or RuntimeError where the disk is full.

    in_bytes: whether each byte of its text was a token.
    """
    with whole_file(path) as unfinished:
        checkpoint = {"config": asdict(model.config), "weights": model.state_dict(), "in_bytes": in_bytes}
        torch.save(checkpoint, unfinished)


def load(path, attention):
    """Return the GPT of a file or folder, in float32 on the CPU. Its attribute in_bytes is what save() was told.

    path: a file that save() wrote, nanoGPT's ckpt.pt, a state_dict, or a folder that transformers wrote. nanoGPT's GELU
    is exact, and ours is GPT-2's approximation, so that logits differ by about a thousandth. Exits with one line where
    it is none of these.
    """
    if os.path.isdir(path):
        return from_pretrained(path, attention)
    checkpoint = read_file(path)
    config, weights = split_checkpoint(checkpoint, path)
    model = gpt_of(config, weights, path, attention)
    model.in_bytes = checkpoint.get("in_bytes", False)
    return model


def from_pretrained(name, attention):
    """Return a GPT with OpenAI's weights, in float32 on the CPU, as the package transformers reads them.

    name: one of PUBLISHED, or a folder that transformers wrote. Exits with one line where it can't be read.
    """
    model = gpt_of(*read_transformers(name), name, attention)
    model.in_bytes = False
    return model


def gpt_of(config, weights, path, attention):
    """Return a GPT with a state_dict. Exits with one line where that does not fit, or is not finite."""
    if config.n_embd % config.n_head:
        refuse_weights(path, f"its {config.n_embd} channels do not divide over {config.n_head} heads")
    model = GPT(config, attention)
    weights = converted(weights, model)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        refuse_weights(path, error)
    if not all(p.isfinite().all() for p in model.parameters()):
        refuse(f"{path} holds weights that are not finite: its training has diverged")
    if not torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"]):
        refuse_weights(path, "its lm_head is another matrix than its wte")
    return model


def refuse_weights(path, reason):
    """Exit with one line that says why there are no weights of a GPT-2, and what may be passed."""
    reason = " ".join(str(reason).split())[:200]
    remedy = "pass a file of --save, nanoGPT's ckpt.pt, a state_dict of GPT-2's names, or a folder of transformers"
    refuse(f"{path} holds no weights of a GPT-2 ({reason}): {remedy}")


def read_file(path):
    """Return the dict in a file of torch.save. None of its code runs. Exits with one line where it is another file."""
    if str(path).endswith(".safetensors"):
        refuse(f"{path}: pass the folder that it lies in, with its config.json")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds for a file that is no checkpoint
        reason = str(error) or type(error).__name__
        if "Unsupported global" in reason:
            reason = "it holds Python objects, which might run code: save model.state_dict() alone"
        elif "Weights only load failed" in reason:
            reason = "it is no file of torch.save"
        refuse_weights(path, reason)
    if not isinstance(checkpoint, dict):
        refuse_weights(path, f"it is a {type(checkpoint).__name__}")
    return checkpoint


def split_checkpoint(checkpoint, path):
    """Return (GPTConfig, state_dict) of what a file holds. The names of the state_dict begin as in a GPT.

    Where the file does not say how many heads there are, these are GPT-2's, and a line says so. Exits with one line
    where it is no GPT-2.
    """
    state_dict = checkpoint
    for place in PLACES:
        if isinstance(checkpoint.get(place), dict):
            state_dict = checkpoint[place]
            break
    weights = {}
    for name, tensor in state_dict.items():
        name = ".".join(part for part in str(name).split(".") if part not in WRAPPERS)
        if not name.startswith(("transformer.", "lm_head.")):
            name = f"transformer.{name}"
        weights[name] = tensor
    try:
        vocab_size, n_embd = weights["transformer.wte.weight"].shape
        block_size = weights["transformer.wpe.weight"].shape[0]
    except (KeyError, ValueError, AttributeError):
        refuse_weights(path, "it has no embeddings of tokens and positions, wte and wpe")
    n_layer = len([name for name in weights if re.fullmatch(r"transformer\.h\.\d+\.ln_1\.weight", name)])
    n_head = heads_of(checkpoint)
    if n_head is None:
        n_head = usual_heads(n_layer, n_embd)
        print(f"{path} does not say how many heads there are: taking {n_head}", file=sys.stderr)
    return GPTConfig(vocab_size, block_size, n_layer, n_head, n_embd), weights


def heads_of(checkpoint):
    """Return n_head as a checkpoint says it, beside its weights, or None."""
    for place in ("config", "model_args"):
        about = checkpoint.get(place)
        if isinstance(about, dict) and isinstance(about.get("n_head"), int) and about["n_head"] > 0:
            return about["n_head"]
    return None


def usual_heads(n_layer, n_embd):
    """Return how many heads a GPT-2 of this shape has: those of the size that it is, and else one for 64 channels."""
    for size in SIZES.values():
        if (size["n_layer"], size["n_embd"]) == (n_layer, n_embd):
            return size["n_head"]
    return max(1, n_embd // 64)


def converted(weights, model):
    """Return a state_dict as a GPT has it: its lm_head, all biases, and matrices as nn.Linear has them.

    nanoGPT with bias=False computes as if all biases were 0. Its buffers of masks are left out.
    """
    ours = model.state_dict()
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith((".attn.bias", ".masked_bias"))}
    weights.setdefault("lm_head.weight", weights["transformer.wte.weight"])
    if not any(name.endswith(".bias") for name in weights):
        weights |= {name: torch.zeros_like(tensor) for name, tensor in ours.items() if name.endswith(".bias")}
    C = model.config.n_embd
    if weights.get("transformer.h.0.attn.c_attn.weight", torch.empty(0)).shape == (C, 3 * C):
        for name in weights:
            if name.endswith(CONV1D_SUFFIXES):
                weights[name] = weights[name].t()
    return weights


def read_transformers(name):
    """Return (GPTConfig, state_dict) of weights that the package transformers reads.

    name: one of PUBLISHED, or a folder that transformers wrote. Exits with one line where it can't be read.
    """
    try:
        from transformers import AutoConfig, GPT2LMHeadModel

        config = AutoConfig.from_pretrained(name)
        if config.model_type != "gpt2":
            refuse_weights(name, f"it is a model of type {config.model_type}")
        reader, loaded = GPT2LMHeadModel.from_pretrained(name, output_loading_info=True)
    except ImportError:
        refuse(f"{name}: these weights are read by the package transformers: pip install transformers")
    except Exception as error:  # no such weights, no network, or what safetensors and pickle raise for a broken file
        refuse_weights(name, error)
    if loaded["missing_keys"]:
        refuse_weights(name, f"it lacks {', '.join(sorted(loaded['missing_keys'])[:3])}")
    for field, value in COMPUTES.items():
        if getattr(config, field) != value:
            refuse_weights(name, f"its {field} is {getattr(config, field)}, and GPT-2's {value}")
    if config.activation_function not in GELUS:
        refuse_weights(name, f"its activation is {config.activation_function}, and GPT-2's GELU")
    weights = reader.state_dict()
    shape = (config.vocab_size, config.n_positions, config.n_layer, config.n_head, config.n_embd)
    return GPTConfig(*shape), weights


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
        refuse_unknown_ids(window, "the held-out text", min(VOCAB, model.config.vocab_size))
        window = torch.from_numpy(window.astype(np.int64)).to(device)
        x, y = window[None, :-1], window[None, 1:]
        total += model(x, y).item() * y.numel()
    return total / targets
