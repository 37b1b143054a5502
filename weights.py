"""A GPT-2 on disk, in Hugging Face's files: what GPT.from_pretrained reads and GPT.save_pretrained writes.

The seam with model.py: that file says what GPT-2 computes, this one how its weights are kept. Loading and saving need
safetensors, and GPT-2 by name needs huggingface_hub: neither is among the requirements, so each is imported where it
is used. What a user got wrong is an InputError, whose message is one line.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch

import data
from data import InputError
from model import GPT, SIZES, VOCAB, GPTConfig

NAMES = [name for name in SIZES if name.startswith("gpt2")]  # what OpenAI published
FILES = {"config.json", "model.safetensors"}  # what save() writes


def load(name, attention):
    """A GPT with a checkpoint's weights, float32 on the CPU, and the name of the tokenizer that it was trained with.

    name: "gpt2", "gpt2-medium", "gpt2-large" or "gpt2-xl" through the hub's cache, or a directory, in one file or in
    shards, from save(), transformers' GPT2LMHeadModel or OpenAI. Returns (GPT, "gpt2" or "gpt2-bytes").
    Raises InputError for what is missing, truncated, of another shape, not finite, or of another architecture.
    """
    directory = _find(name)
    config, tokenizer = _read_config(directory)
    tensors = _read_tensors(directory)
    wte, wpe = tensors.get("wte.weight"), tensors.get("wpe.weight")
    if wte is None or wpe is None or (wte.dim(), wpe.dim()) != (2, 2):
        raise InputError(f"{directory} is no GPT-2: its tensors are {_some(tensors)}")
    # before the model is built, since a config could ask for more than the machine has
    n_layer = sum(key.endswith(".ln_1.weight") for key in tensors)
    found = dict(vocab_size=len(wte), block_size=len(wpe), n_layer=n_layer, n_embd=wte.shape[1])
    for key, value in found.items():
        if getattr(config, key) != value:
            raise InputError(f"{directory}: config.json tells of {key} {getattr(config, key)}, the tensors of {value}")
    if not torch.equal(tensors.pop("lm_head.weight", wte), wte):
        raise InputError(f"{directory}: lm_head.weight differs from wte.weight, and here they are one matrix")

    model = GPT(config, attention)
    parameters = {key.removeprefix("transformer."): p for key, p in model.named_parameters()}
    if parameters.keys() != tensors.keys():
        lacks, more = parameters.keys() - tensors.keys(), tensors.keys() - parameters.keys()
        raise InputError(f"{directory} is no GPT-2: it lacks {_some(lacks)} and has {_some(more)}")
    for key, p in parameters.items():
        tensor = tensors[key].T if _is_conv1d(key) else tensors[key]
        if tensor.shape != p.shape:
            raise InputError(f"{directory}: {key} has shape {tuple(tensors[key].shape)}, which config.json contradicts")
        p.data.copy_(tensor)
        if not p.isfinite().all():
            raise InputError(f"{directory}: {key} holds values that are not finite; take another copy")
    return model, tokenizer


def save(model, directory, tokenizer="gpt2"):
    """Write a GPT as transformers' GPT2LMHeadModel.from_pretrained(directory) reads it, float32, whole or not at all.

    tokenizer: the name of the one its tokens came from, kept in config.json. The directory may be new, empty, or an
    earlier one of ours, which is replaced once the new one is complete.
    Raises InputError where it holds anything else or can't be written, or where safetensors is missing.
    """
    check_save(directory)
    safetensors = _need("safetensors.torch")
    tensors = {}
    for key, p in model.named_parameters():  # names the tied matrix once, as wte
        p = p.detach().to("cpu", torch.float32)
        tensors[key] = (p.T if _is_conv1d(key) else p).contiguous()
    config = dict(
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        vocab_size=model.config.vocab_size,
        n_positions=model.config.block_size,
        n_embd=model.config.n_embd,
        n_layer=model.config.n_layer,
        n_head=model.config.n_head,
        activation_function="gelu_new",  # the tanh approximation
        layer_norm_epsilon=1e-5,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=VOCAB - 1 if tokenizer == "gpt2" else None,  # <|endoftext|>
        eos_token_id=VOCAB - 1 if tokenizer == "gpt2" else None,
        tokenizer=tokenizer,
    )
    target, temporary = Path(os.path.realpath(directory)), None  # through a link, so as to replace what it points to
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        new, old = temporary / "new", temporary / "old"
        new.mkdir()
        (new / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        safetensors.torch.save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
        shutil.copymode(new / "config.json", new / "model.safetensors")  # safetensors lets only the owner read
        try:
            if target.exists():
                target.rename(old)  # a directory can't be renamed onto one that holds files
            new.rename(target)
        except BaseException:
            if old.exists() and not target.exists():
                old.rename(target)
            raise
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"--save {directory} can't be written: {_first_line(error)}") from None
    finally:
        if temporary and (target.exists() or not (temporary / "old").exists()):
            shutil.rmtree(temporary, ignore_errors=True)


def check_save(directory):
    """Raise InputError where save() would fail, in time for the caller to mend it before a long run."""
    _need("safetensors.torch")
    target = Path(os.path.realpath(directory))
    if os.path.exists(target) and not _is_ours(target):
        raise InputError(f"--save {directory} is there and holds something else than saved weights: name a new one")
    parent = next(path for path in target.parents if os.path.exists(path))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"--save {directory} can't be written: {parent} is not a directory that you may write to")


def _is_ours(directory):
    """Whether a path is an empty directory or one that save() wrote and nobody added to."""
    try:
        files = {path.name for path in directory.iterdir()}
        return not files or (files == FILES and "tokenizer" in json.loads((directory / "config.json").read_text()))
    except (OSError, ValueError, TypeError):
        return False


def _find(name):
    """The directory of a checkpoint; by name, the hub's cache, filled where there is a network."""
    if os.path.isdir(name):  # unlike Path's, it takes a name that is too long
        return Path(name)
    if name not in NAMES:
        raise InputError(f"no weights at {name}: pass a directory that --save wrote, or one of {', '.join(NAMES)}")
    hub = _need("huggingface_hub")
    try:
        return Path(
            hub.snapshot_download(f"openai-community/{name}", allow_patterns=FILES, local_files_only=data.offline)
        )
    except Exception as error:  # whatever a network library raises
        raise InputError(f"{name} is not in the hub's cache and can't be fetched: {_first_line(error)}") from None


def _read_config(directory):
    """(GPTConfig, tokenizer's name) from config.json. What model.py can't compute is refused, not ignored."""
    path = directory / "config.json"
    try:
        settings = json.loads(path.read_text())
        kind = settings.get("model_type")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; pass a directory that --save or transformers wrote") from None
    except (ValueError, AttributeError):
        raise InputError(f"{path} is not the JSON of a model: take another copy") from None
    if kind != "gpt2":
        raise InputError(f"{path} is of model_type {kind}: only gpt2 can be loaded")
    names = {"n_positions": "block_size"} | {key: key for key in ("vocab_size", "n_layer", "n_head", "n_embd")}
    shape = {ours: settings.get(theirs, getattr(GPTConfig, ours)) for theirs, ours in names.items()}
    for key, value in shape.items():
        if type(value) is not int:
            raise InputError(f"{path}: {key} must be a whole number, got {value!r}")
    computed = dict(  # the first is what is meant where the file says nothing
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        layer_norm_epsilon=(1e-5,),
        n_inner=(None, 4 * shape["n_embd"]),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
        tie_word_embeddings=(True,),
    )
    for key, values in computed.items():
        if settings.get(key, values[0]) not in values:
            raise InputError(f"{path} has {key} {settings[key]}: here it is always {values[0]}")
    try:
        return GPTConfig(**shape), settings.get("tokenizer", "gpt2")
    except ValueError as error:
        raise InputError(f"{path}: {_first_line(error)}") from None


def _read_tensors(directory):
    """Every tensor of a checkpoint by its name without "transformer.", mapped from disk."""
    safetensors = _need("safetensors.torch")
    files, index = ["model.safetensors"], directory / "model.safetensors.index.json"
    tensors = {}
    try:
        if index.exists() and not (directory / files[0]).exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        for file in files:
            tensors |= safetensors.torch.load_file(directory / file)
    except FileNotFoundError:
        raise InputError(f"{directory} has no {file}: pass a directory that --save or transformers wrote") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise InputError(f"{directory}: the weights are truncated or corrupt ({_first_line(error)})") from None
    # OpenAI's own files have no "transformer.", and keep each layer's causal mask
    tensors = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    return {key: tensor for key, tensor in tensors.items() if not key.endswith((".attn.bias", ".attn.masked_bias"))}


def _is_conv1d(key):
    """OpenAI wrote its linear layers as convolutions of width 1, whose weights are (inputs, outputs)."""
    return key.endswith(".weight") and ".c_" in key


def _need(module):
    """The package that a module belongs to, with the module imported."""
    try:
        return __import__(module)
    except ImportError:
        package = module.split(".")[0]
        raise InputError(f"{package} is not installed, and these weights need it: pip install {package}") from None


def _first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _some(keys):
    keys = sorted(keys)
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "") or "nothing"
