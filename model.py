"""GPT-2 as plain as it gets, and its checkpoints in Hugging Face's layout.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). No stage changes this file, and
no technique hides in it. The caller passes in the attention function, because one stage is about it.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import data
from data import UNFINISHED, VOCAB, InputError, printable, write_whole

CONTEXT = 1024  # positions GPT-2 was trained with
SIZES = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124M
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 355M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558M
    "mini": dict(n_layer=6, n_head=6, n_embd=384),  # 30M, what a CPU trains in a coffee break
    "micro": dict(n_layer=4, n_head=4, n_embd=256),  # 16M, what a CPU measures in minutes
    "tiny": dict(n_layer=2, n_head=2, n_embd=64),  # 3M, for tests
}


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT-2; the defaults are the 124M model. Raises ValueError where the numbers do not fit."""

    vocab_size: int = VOCAB
    block_size: int = CONTEXT
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768

    def __post_init__(self):
        for name, value in vars(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")


class Block(nn.Module):
    """Attention and an MLP, each added to what comes in, (B, T, n_embd), after a LayerNorm of its own."""

    def __init__(self, config, attention):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.attention = attention
        self.ln_1 = nn.LayerNorm(C)
        self.attn = nn.ModuleDict(dict(c_attn=nn.Linear(C, 3 * C), c_proj=nn.Linear(C, C)))
        self.ln_2 = nn.LayerNorm(C)
        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(C, 4 * C), c_proj=nn.Linear(4 * C, C)))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.attn.c_attn(self.ln_1(x)).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = self.attention(q, k, v)  # (B, n_head, T, head_dim), each token looking back only
        x = x + self.attn.c_proj(y.transpose(1, 2).reshape(B, T, C))
        # tanh, because GPT-2 was trained with this approximation of GELU
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 with random weights drawn from torch's global generator.

    `attention(q, k, v)` maps three (B, n_head, T, head_dim) tensors to one of their shape and must be causal.
    `tokenizer` is the name of the tokenizer whose ids the model reads: "gpt2", or what its checkpoint says.
    """

    def __init__(self, config, attention):
        super().__init__()
        self.config = config
        self.tokenizer = "gpt2"
        with torch.device("meta"):  # shapes alone, so that every weight is drawn once, below
            self.transformer = nn.ModuleDict()
            self.transformer.wte = nn.Embedding(config.vocab_size, config.n_embd)
            self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)
            self.transformer.h = nn.Sequential(*(Block(config, attention) for _ in range(config.n_layer)))
            self.transformer.ln_f = nn.LayerNorm(config.n_embd)
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.to_empty(device="cpu")
        # one matrix in both places (Press & Wolf, arXiv:1608.05859)
        self.lm_head.weight = self.transformer.wte.weight
        self._draw_weights()

    def _draw_weights(self):
        """Draw every weight with GPT-2's standard deviations; gains begin at 1 and biases at 0."""
        # backwards, so that wte comes last: padding the vocabulary leaves a seed's other weights as they were
        for name, p in reversed(list(self.named_parameters())):
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 1:  # LayerNorm's gain
                nn.init.ones_(p)
            elif name.endswith("c_proj.weight"):
                # 2 * n_layer projections add up in the residual stream: its variance must not grow with depth
                nn.init.normal_(p, mean=0.0, std=0.02 * (2 * self.config.n_layer) ** -0.5)
            else:
                nn.init.normal_(p, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        """Logits (B, T, vocab_size) of each next token, in autocast's dtype; with targets, the loss alone.

        idx, targets: int64 (B, T), T at most block_size. The loss is the mean cross-entropy in nats, a scalar
        in float32. Raises ValueError for another shape or a longer sequence.
        """
        if idx.dim() != 2 or (targets is not None and targets.shape != idx.shape):
            shapes = [tuple(t.shape) for t in (idx, targets) if t is not None]
            raise ValueError(f"idx and targets must both be (B, T), got {shapes}")
        T = idx.shape[1]
        if self.config.block_size < T:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size {self.config.block_size}")
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(T, device=idx.device))
        logits = self.lm_head(self.transformer.ln_f(self.transformer.h(x)))
        if targets is None:
            return logits
        # Not (logits, loss): a compiled backward would read a zero gradient of the logits' size at every step
        # (PyTorch issue 131794), and the caller's name for the logits would keep them until the next forward.
        # float32, because a sum over 50,257 exponentials is no place for 8 bits of mantissa
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.reshape(-1))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, vocab_size=VOCAB):
        """Continue idx, int64 (B, T), by max_new_tokens; returns (B, T + max_new_tokens).

        Temperature 0 takes the likeliest id; top_k keeps the k likeliest; ids from vocab_size on are padding,
        which is never drawn. The model sees the last block_size tokens. Raises ValueError for a temperature
        below 0 or a top_k below 1.
        """
        if temperature < 0 or (top_k is not None and top_k < 1):
            given = f"{temperature} and {top_k}"
            raise ValueError(f"temperature must be 0 or more and top_k 1 or more, got {given}")
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size :])[:, -1, :vocab_size].float()
            if temperature == 0:
                new = logits.argmax(dim=-1, keepdim=True)
            else:
                logits = logits / max(temperature, 1e-6)  # less would overflow float32
                if top_k is not None:
                    kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                    logits = logits.masked_fill(logits < kth, -math.inf)
                new = torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)
            idx = torch.cat((idx, new), dim=1)
        return idx

    @classmethod
    def from_pretrained(cls, name, attention):
        """A GPT, in float32 on the CPU, with the weights of a checkpoint and the name of its tokenizer.

        name: a directory that save_pretrained, transformers or OpenAI wrote, or else "gpt2", "gpt2-medium",
        "gpt2-large" or "gpt2-xl" for OpenAI's weights, downloaded once into the Hugging Face hub's cache.
        Raises InputError for what is missing, damaged, or not what a GPT computes.
        """
        directory = _find_checkpoint(name)
        settings = _load_json(directory / "config.json")
        tensors = _load_tensors(directory)
        with _one_line_errors(directory):
            config = _infer_config(tensors, settings)
            _check_settings(settings, config)
            _tie_head(tensors)
            model = cls(config, attention)
            model.load_state_dict(tensors)
            _check_finite(model)
        model.tokenizer = settings.get("tokenizer", "gpt2")
        return model

    def save_pretrained(self, directory, tokenizer=None):
        """Write config.json and model.safetensors, float32, for from_pretrained and transformers to read.

        directory: new, empty, or written by an earlier call, whose two files are replaced, each as a whole.
        tokenizer: the name of the one whose ids the model reads, self.tokenizer by default. Raises InputError
        where the files can't be written.
        """
        header, arrays = _to_safetensors(self)
        settings = _to_settings(self.config, tokenizer or self.tokenizer)
        check_save(directory, nbytes=sum(array.nbytes for array in arrays))
        home = Path(os.path.realpath(directory))
        try:  # config.json last: without it, what an interrupted first save leaves is no checkpoint
            write_whole(home / "model.safetensors", header, *arrays)
            write_whole(home / "config.json", json.dumps(settings, indent=2).encode())
        except OSError as error:
            raise InputError(f"--save {directory} can't be written: {error}; pass another directory") from None


@torch.no_grad()
def evaluate(model, tokens):
    """Mean loss in nats/token over held-out text, a float: each id but the first is predicted once.

    tokens: a 1-D integer array of ids, which may be larger than memory: a window at a time is copied from it.
    Windows of block_size lie end to end, the last one shorter: an id sees from 1 to block_size ids before it.
    The model computes in the dtype of its weights, without autocast, and the spare ids of a padded vocabulary
    take part in the softmax, as they do in training. Where stderr is a terminal, the progress is shown there.
    Raises InputError below 2 ids.
    """
    if len(tokens) < 2:
        raise InputError(f"the held-out text has {len(tokens)} tokens, and needs 2: pass a longer text")
    device = model.transformer.wte.weight.device
    T = model.config.block_size
    targets = len(tokens) - 1
    total = 0.0
    shown = time.monotonic()
    for start in range(0, targets, T):
        ids = torch.from_numpy(tokens[start : start + T + 1].astype(np.int64)).to(device)
        x, y = ids[None, :-1], ids[None, 1:]
        total += model(x, y).item() * y.numel()
        # it can take hours; twice a second is enough to watch, and the caller's next line covers this one
        if sys.stderr.isatty() and time.monotonic() - shown > 0.5:
            print(f"{start + y.numel():,} of {targets:,} tokens", end="\r", file=sys.stderr, flush=True)
            shown = time.monotonic()
    return total / targets


# Checkpoints: config.json and model.safetensors, in the layout of transformers' GPT2LMHeadModel

NAMES = [name for name in SIZES if name.startswith("gpt2")]  # what OpenAI published
FILES = ["config.json", "model.safetensors"]  # what save_pretrained writes
SAVED_BY = "gpt2-speed-ladder"  # stands in both files, so that --save replaces nothing that it did not write
METADATA = {"format": "pt", "saved_by": SAVED_BY}  # of model.safetensors; transformers asks for the format
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# OpenAI wrote these layers as convolutions of width 1, with weights (inputs, outputs): nn.Linear's transposed
CONV1D = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
MASKS = (".attn.bias", ".attn.masked_bias")  # OpenAI's files hold attention's causal mask, which is no weight
# What a GPT always does, in config.json's words: gelu_new is the tanh approximation, n_inner None 4 * n_embd
COMPUTED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def check_save(directory, nbytes=0):
    """Before a long run: raise InputError if save_pretrained(directory) would fail or nbytes are not free."""
    home = Path(os.path.realpath(directory))  # through a link, to what it points to
    try:
        if home.exists():
            _check_replaceable(home)
        while not home.exists():
            home = home.parent  # the nearest folder that is there already
        tempfile.TemporaryFile(dir=home).close()
        free = shutil.disk_usage(home).free
        if free < nbytes:
            raise ValueError(f"the weights take {nbytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free")
    except (OSError, ValueError) as error:
        raise InputError(f"--save {directory} can't be written: {error}; pass another directory") from None


def _check_replaceable(home):
    """Raise ValueError where a directory holds what --save did not write, OSError where it can't be read."""
    for name in sorted(os.listdir(home)):
        if name.startswith(UNFINISHED):  # what a kill left of an earlier save
            continue
        if name not in FILES or not _is_marked(home / name):
            raise ValueError(f"it holds {name!r}, which --save did not write")


def _is_marked(path):
    """Whether a config.json or model.safetensors says that save_pretrained wrote it."""
    try:
        if path.name == "config.json":
            return _parse_json(_map_file(path)).get("saved_by") == SAVED_BY
        header, _ = _split_safetensors(_map_file(path))
        return header.get("__metadata__") == METADATA
    except (OSError, ValueError, RecursionError):  # whatever it is, save_pretrained wrote no such file
        return False


def _to_settings(config, tokenizer):
    """What config.json holds, as a dict: a GPT's shape, what it computes, and the name of its tokenizer."""
    end_of_text = VOCAB - 1 if tokenizer == "gpt2" else None
    return COMPUTED | {
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "architectures": ["GPT2LMHeadModel"],
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "tokenizer": tokenizer,
        "saved_by": SAVED_BY,
    }


def _to_safetensors(model):
    """The bytes with which a model's .safetensors file begins, and the float32 arrays that follow, in order.

    8 bytes with the header's length, the header in JSON, the numbers: https://huggingface.co/docs/safetensors
    """
    header = {"__metadata__": METADATA}
    arrays = []
    first = 0
    for name, p in model.named_parameters():  # names the tied matrix once, as wte
        weight = p.detach().to("cpu", torch.float32)
        if name.endswith(CONV1D):
            weight = weight.T
        array = weight.contiguous().numpy()
        last = first + array.nbytes
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [first, last]}
        arrays.append(array)
        first = last
    text = json.dumps(header).encode()
    text = text.ljust(8 * math.ceil(len(text) / 8))  # blanks, to align the numbers after it
    return len(text).to_bytes(8, "little") + text, arrays


def _find_checkpoint(name):
    """The directory (a Path) of a checkpoint: name itself, or that of OpenAI's weights in the hub's cache."""
    if name not in NAMES or Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download  # here, because these names alone need the package
    except ImportError as error:
        why = f"{name} comes from the Hugging Face hub ({error})"
        raise InputError(f"{why}: pip install huggingface_hub") from None
    with _one_line_errors(name):
        repository = f"openai-community/{name}"
        return Path(snapshot_download(repository, allow_patterns=FILES, local_files_only=data.offline))


@contextlib.contextmanager
def _one_line_errors(path):
    """Turn whatever a damaged file raises in a block into an InputError of one line that begins with path."""
    try:
        yield
    except Exception as error:  # the json module, numpy, torch and the hub's library have many
        why = " ".join(str(error).split())[:300]
        if not isinstance(error, (OSError, ValueError)):
            why = f"{type(error).__name__}: {why}"  # a KeyError's text is the key alone
        remedy = f"pass another checkpoint, a directory that --save wrote or one of {', '.join(NAMES)}"
        raise InputError(f"{printable(path)}: {printable(why)}; {remedy}") from None


def _load_json(path):
    """The dict in a .json file. Raises InputError."""
    with _one_line_errors(path):
        return _parse_json(_map_file(path))


def _load_tensors(directory):
    """{name: tensor} of all .safetensors files of a checkpoint. Raises InputError."""
    tensors = {}
    for path in _weight_files(directory):
        with _one_line_errors(path):
            for name, tensor in _read_safetensors(path):
                if name in tensors:
                    raise ValueError(f"{name} is there twice")
                tensors[name] = tensor
    return tensors


def _weight_files(directory):
    """The paths of model.safetensors or, where there is none, of the shards that its index names."""
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").exists() or not index.exists():
        return [directory / "model.safetensors"]
    settings = _load_json(index)
    with _one_line_errors(index):
        shards = sorted(set(settings["weight_map"].values()))
        for shard in shards:
            if os.path.basename(shard) != shard:
                raise ValueError(f"the shard {shard} is outside of the directory")
    return [directory / shard for shard in shards]


def _map_file(path):
    """The bytes of a file as a 1-D uint8 array, read from disk when used. Raises OSError or ValueError."""
    if not path.is_file():  # a FIFO would wait for its writer for ever
        raise FileNotFoundError("there is no such file")
    return np.memmap(path, np.uint8, mode="c")


def _parse_json(content):
    """The dict that a uint8 array holds as JSON. Raises ValueError or RecursionError for anything else."""
    settings = json.loads(content.tobytes(), object_pairs_hook=_unique_keys)
    if not isinstance(settings, dict):
        raise ValueError("it holds no JSON object")
    return settings


def _unique_keys(pairs):
    """The dict of (key, value) pairs. Raises ValueError for a key that is there twice: one would be lost."""
    entries = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"the key {key} is there twice")
        entries[key] = value
    return entries


def _read_safetensors(path):
    """Yield (name, tensor) for each weight in a .safetensors file, with the names and shapes of a GPT's."""
    header, numbers = _split_safetensors(_map_file(path))
    header.pop("__metadata__", None)
    _check_offsets(header, len(numbers))
    for key, entry in header.items():
        if key.endswith(MASKS):
            continue
        tensor = _to_tensor(key, entry, numbers)
        if key.endswith(CONV1D):
            tensor = tensor.t()
        name = key
        if not key.startswith(("transformer.", "lm_head.")):  # as in OpenAI's own files
            name = f"transformer.{key}"
        yield name, tensor


def _split_safetensors(content):
    """The header of a .safetensors file as a dict, and the array of bytes behind it. Raises ValueError."""
    length = int.from_bytes(content[:8].tobytes(), "little")
    end = 8 + length
    if end > len(content):
        raise ValueError(f"its header of {length:,} bytes is longer than the file")
    return _parse_json(content[8:end]), content[end:]


def _check_offsets(header, nbytes):
    """Raise ValueError unless the tensors lie end to end, from the first byte to the last of nbytes.

    The format demands it: tensors that shared bytes, or left some unused, would load with wrong numbers.
    """
    end = 0
    for key in sorted(header, key=lambda key: header[key]["data_offsets"]):
        first, last = header[key]["data_offsets"]
        if first != end:
            raise ValueError(f"{key} begins at byte {first}, and the tensor before it ends at byte {end}")
        end = last
    if end != nbytes:
        raise ValueError(f"its tensors end at byte {end}, and the file has {nbytes} for them: it is damaged")


def _to_tensor(key, entry, numbers):
    """The tensor of one entry of a header, which shares the memory of the file. Raises ValueError."""
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{key} is {entry['dtype']}, and only {', '.join(DTYPES)} can be loaded")
    dtype = DTYPES[entry["dtype"]]
    first, last = entry["data_offsets"]
    count = math.prod(entry["shape"])
    if last - first != count * dtype.itemsize:
        kind = f"{entry['dtype']} of shape {entry['shape']}"
        raise ValueError(f"{key} has {last - first} bytes, which are no {kind}")
    return torch.frombuffer(numbers, dtype=dtype, count=count, offset=first).view(entry["shape"])


def _infer_config(tensors, settings):
    """The GPTConfig by a checkpoint's tensors: config.json could ask for more than the machine has."""
    wte = tensors.get("transformer.wte.weight")
    wpe = tensors.get("transformer.wpe.weight")
    if wte is None or wpe is None:
        raise ValueError(f"no GPT-2, its tensors are {', '.join(sorted(tensors))}")
    layers = [name for name in tensors if name.endswith(".ln_1.weight")]
    n_head = settings.get("n_head", 12)  # which no tensor's shape tells
    return GPTConfig(len(wte), len(wpe), len(layers), n_head, wte.shape[1])


def _check_settings(settings, config):
    """Raise ValueError where config.json asks for what a GPT does not compute, or for another shape."""
    expected = COMPUTED | vars(config) | {"n_positions": config.block_size}
    for key, value in expected.items():
        allowed = [value]
        if key == "activation_function":
            allowed.append("gelu_pytorch_tanh")  # another name of the same function
        if key == "n_inner":
            allowed.append(4 * config.n_embd)
        if settings.get(key, value) not in allowed:
            raise ValueError(f"config.json has {key} {settings[key]!r}, and only {value!r} can be loaded")


def _tie_head(tensors):
    """Give lm_head the embedding's matrix, as in a GPT. Raises ValueError where a checkpoint has another."""
    wte = tensors["transformer.wte.weight"]
    head = tensors.setdefault("lm_head.weight", wte)
    if not torch.equal(head, wte):
        raise ValueError("lm_head.weight differs from wte.weight, and here they are one matrix")


def _check_finite(model):
    """Raise ValueError where a weight is infinite or no number."""
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            raise ValueError(f"{name} holds values that are not finite")
