"""GPT-2 as plain as it gets, its checkpoints in Hugging Face's layout, and `python model.py --prompt "To be"`.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). No stage changes this file, and no
technique hides in it. The caller passes in the attention function, because one stage of the ladder is about it.
"""

import codecs
import functools
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
from data import UNFINISHED, VOCAB, InputError, byte_tokenizer, load_tokens, tokenizer, write_whole

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


def flops_per_token(size, seq_len):
    """FLOPs of one token's training step, forward and backward: 6 (12 L C^2 + V C) + 12 L C T.

    Two for each multiply-add of every matrix, once forward and twice backward, and attention counted in full although
    half of it is masked: the convention of PaLM (arXiv:2204.02311, appendix B). L layers of width C, a vocabulary
    V of 50257 (padding is no work that GPT-2 asks for), T tokens in a sequence.
    """
    L, C = SIZES[size]["n_layer"], SIZES[size]["n_embd"]
    return 6 * (12 * L * C**2 + VOCAB * C) + 12 * L * C * seq_len


def weight_bytes(size, block_size):
    """Bytes of a GPT's weights in float32, as many as of its gradient. Biases and LayerNorms, 0.1 %, are left out."""
    L, C = SIZES[size]["n_layer"], SIZES[size]["n_embd"]
    return 4 * (12 * L * C**2 + (VOCAB + block_size) * C)


def s01_bytes(batch_size):
    """The most that s01's tensors hold at gpt2 and T 1024: weights with AdamW's moments, and so much per sequence."""
    # in float32, 16 T C numbers and a T x T softmax per head in each of 12 layers, and three copies of the logits
    return 1.5e9 + 1.83e9 * batch_size


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT-2; the defaults are the 124M model. Raises ValueError where the numbers do not fit together."""

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
    def __init__(self, config, attention):
        super().__init__()
        C, self.n_head, self.attention = config.n_embd, config.n_head, attention
        self.ln_1 = nn.LayerNorm(C)
        self.attn = nn.ModuleDict(dict(c_attn=nn.Linear(C, 3 * C), c_proj=nn.Linear(C, C)))
        self.ln_2 = nn.LayerNorm(C)
        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(C, 4 * C), c_proj=nn.Linear(4 * C, C)))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.attn.c_attn(self.ln_1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = self.attention(q, k, v)  # (B, n_head, T, head_dim), each token looking back only
        x = x + self.attn.c_proj(y.transpose(1, 2).reshape(B, T, C))
        # tanh, because GPT-2 was trained with this approximation of GELU
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 with random weights drawn from torch's global generator.

    `attention(q, k, v)` maps three (B, n_head, T, head_dim) tensors to one of the same shape and must be causal.
    """

    def __init__(self, config, attention):
        super().__init__()
        self.config = config
        with torch.device("meta"):  # shapes alone, so that every weight is drawn once, below
            self.transformer = nn.ModuleDict()
            self.transformer.wte = nn.Embedding(config.vocab_size, config.n_embd)
            self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)
            self.transformer.h = nn.Sequential(*(Block(config, attention) for _ in range(config.n_layer)))
            self.transformer.ln_f = nn.LayerNorm(config.n_embd)
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.to_empty(device="cpu")
        self.lm_head.weight = self.transformer.wte.weight  # one matrix in both places (Press & Wolf, arXiv:1608.05859)
        # backwards, so that wte comes last: padding the vocabulary then leaves a seed's other weights as they were
        for name, p in reversed(list(self.named_parameters())):
            if p.dim() == 1:
                nn.init.constant_(p, 0.0 if name.endswith("bias") else 1.0)  # 1: LayerNorm's gain
            else:
                # 2 * n_layer projections add up in the residual stream: scaled, its variance does not grow with depth
                scale = (2 * config.n_layer) ** -0.5 if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(p, mean=0.0, std=0.02 * scale)

    def forward(self, idx, targets=None):
        """Next-token logits (B, T, vocab_size), in the autocast dtype if there is one; with targets, the loss alone.

        idx, targets: int64 (B, T), T at most block_size. The loss is the mean cross-entropy in nats, a float32 scalar.
        Raises ValueError for another shape or a longer sequence.
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
        # Not (logits, loss): a compiled backward would read a zero gradient of the logits' size at every step (PyTorch
        # issue 131794), and the caller's name for the logits would keep them in memory through the next forward.
        # float32, because a sum over 50,257 exponentials is no place for 8 bits of mantissa
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.reshape(-1))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, vocab_size=VOCAB):
        """Continue idx, int64 (B, T), by max_new_tokens; returns (B, T + max_new_tokens).

        Temperature 0 is greedy; top_k keeps the k likeliest ids; ids from vocab_size on are padding, never drawn. The
        model sees the last block_size tokens. Raises ValueError for a temperature below 0 or a top_k below 1.
        """
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature must be 0 or more and top_k 1 or more, got {temperature} and {top_k}")
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
        """The GPT of load(name, attention), without its tokenizer's name. Raises InputError."""
        return load(name, attention)[0]

    def save_pretrained(self, directory, tokenizer="gpt2"):
        """Write config.json and model.safetensors, float32, for load() and transformers' GPT2LMHeadModel to read.

        directory: new, empty, or written by an earlier call, whose two files are replaced, each as a whole. tokenizer:
        the name of the one whose ids the model was trained on. Raises InputError where the files can't be written.
        """
        header, weights, end = {"__metadata__": {"format": "pt"}}, [], 0
        for key, p in self.named_parameters():  # names the tied matrix once, as wte
            p = (p.T if key.endswith(CONV1D) else p).detach().to("cpu", torch.float32).contiguous()
            header[key] = dict(dtype="F32", shape=list(p.shape), data_offsets=[end, end + p.nbytes])
            weights.append(p.numpy())
            end += p.nbytes
        header = json.dumps(header).encode()
        header += b" " * (-len(header) % 8)  # aligns the numbers after it
        config = COMPUTED | vars(self.config) | dict(n_positions=self.config.block_size, tokenizer=tokenizer)
        config |= dict(architectures=["GPT2LMHeadModel"], embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
        config |= dict.fromkeys(("bos_token_id", "eos_token_id"), VOCAB - 1 if tokenizer == "gpt2" else None)
        check_save(directory, end)
        home = Path(os.path.realpath(directory))
        try:  # config.json last: without it, what an interrupted first save leaves is no checkpoint
            write_whole(home / "model.safetensors", len(header).to_bytes(8, "little"), header, *weights)
            write_whole(home / "config.json", json.dumps(config, indent=2).encode())
        except OSError as error:
            raise InputError(f"--save {directory} can't be written: {error}") from None


NAMES = [name for name in SIZES if name.startswith("gpt2")]  # what OpenAI published
FILES = {"config.json", "model.safetensors"}  # what save_pretrained writes
# OpenAI wrote these layers as convolutions of width 1, whose weights are (inputs, outputs): nn.Linear's transposed
CONV1D = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
# what a GPT always does, in config.json's words: gelu_new is the tanh approximation, n_inner None is 4 * n_embd
COMPUTED = dict(model_type="gpt2", activation_function="gelu_new", n_inner=None, layer_norm_epsilon=1e-5)
COMPUTED |= dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, tie_word_embeddings=True)


def check_save(directory, nbytes=0):
    """Before a long run: raise InputError where save_pretrained(directory) would fail, or nbytes are not free."""
    home = Path(os.path.realpath(directory))  # through a link, to what it points to
    try:
        found = {name for name in os.listdir(home) if not name.startswith(UNFINISHED)} if home.exists() else set()
        if found and (found - FILES or "tokenizer" not in _read(home / "config.json")):
            raise ValueError("it holds something other than saved weights")
        home = next(path for path in (home, *home.parents) if path.exists())
        tempfile.TemporaryFile(dir=home).close()
        if (free := shutil.disk_usage(home).free) < nbytes:
            raise ValueError(f"the weights take {nbytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"--save {directory} can't be written: {error}; pass another directory") from None


def _read(path):
    """A .json file's object, or a .safetensors file's {name: tensor} in the layout of GPT's state_dict."""
    if not path.is_file():  # a FIFO would wait for its writer for ever
        raise FileNotFoundError("there is no such file")
    raw, tensors = np.memmap(path, np.uint8, mode="c"), {}
    if path.suffix == ".json":
        return {**json.loads(raw.tobytes())}
    # 8 bytes with the length of the header, the header in JSON, the numbers: https://huggingface.co/docs/safetensors
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    dtypes = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
    for key, entry in json.loads(raw[8:start].tobytes()).items():
        if key == "__metadata__" or key.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        dtype, shape, (first, last) = dtypes.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
        size, end = math.prod(shape), len(raw) - start
        if dtype is None or not 0 <= first < last <= end or last - first != size * dtype.itemsize:
            raise ValueError(f"{key} is truncated, corrupt or none of {', '.join(dtypes)}: {entry} of {end:,} bytes")
        tensor = torch.frombuffer(raw, dtype=dtype, count=size, offset=start + first).view(shape)
        name = key if key.startswith(("transformer.", "lm_head.")) else f"transformer.{key}"  # OpenAI's own
        tensors[name] = tensor.t() if key.endswith(CONV1D) else tensor
    return tensors


def load(name, attention):
    """(GPT, its tokenizer's name) from a checkpoint, float32 on the CPU; the name is "gpt2" or "gpt2-bytes".

    name: "gpt2", "gpt2-medium", "gpt2-large" or "gpt2-xl" from the hub's cache, or a directory that save_pretrained,
    transformers or OpenAI wrote. Raises InputError for what is missing, damaged, or of another architecture.
    """
    path = directory = Path(name)
    try:
        if name in NAMES and not directory.is_dir():
            from huggingface_hub import snapshot_download as fetch  # required by these names alone

            directory = Path(fetch(f"openai-community/{name}", allow_patterns=FILES, local_files_only=data.offline))
        path = directory / "config.json"
        settings = _read(path)
        path, files, tensors = directory / "model.safetensors.index.json", ["model.safetensors"], {}
        if path.exists() and not (directory / "model.safetensors").exists():
            files = set(_read(path)["weight_map"].values())
        for file in files:
            if os.path.basename(file) != file:
                raise ValueError(f"the shard {file} is outside of the directory")
            path = directory / file
            tensors |= _read(path)
        path = directory
        wte, wpe = (tensors.get(f"transformer.{key}.weight") for key in ("wte", "wpe"))
        if wte is None or wpe is None:
            raise ValueError(f"no GPT-2, its tensors are {', '.join(sorted(tensors))}")
        # the shape comes from the tensors, since config.json could ask for more than the machine has
        n_layer = sum(key.endswith(".ln_1.weight") for key in tensors)
        config = GPTConfig(len(wte), len(wpe), n_layer, settings.get("n_head", 12), wte.shape[1])
        same = dict(activation_function="gelu_pytorch_tanh", n_inner=4 * config.n_embd)
        for key, value in (COMPUTED | vars(config) | dict(n_positions=config.block_size)).items():
            if settings.get(key, value) not in (value, same.get(key, value)):
                raise ValueError(f"config.json has {key} {settings[key]!r}, and only {value!r} can be loaded")
        if not torch.equal(tensors.setdefault("lm_head.weight", wte), wte):
            raise ValueError("lm_head.weight differs from wte.weight, and here they are one matrix")
        model = GPT(config, attention)
        model.load_state_dict(tensors)
        if odd := [key for key, p in model.named_parameters() if not p.isfinite().all()]:
            raise ValueError(f"{odd[0]} holds values that are not finite")
        return model, settings.get("tokenizer", "gpt2")
    except Exception as error:  # whatever a damaged file or the hub's library raises
        why = " ".join(str(error).split())[:300]
        raise InputError(f"{path}: {why}; pass another checkpoint (gpt2 needs pip install huggingface_hub)") from None


def stream(model, encoding, ids, tokens, temperature=1.0, top_k=None):
    """Yield the text of as many new tokens, a str each, drawn from torch's global generator.

    ids: a list of at least one id. A character of UTF-8 comes out whole, with the token that completes it, and what
    is no UTF-8 as U+FFFD. Ids that the encoding has no bytes for are never drawn.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    idx = torch.tensor([ids], device=model.transformer.wte.weight.device)
    for i in range(tokens):
        idx = model.generate(idx, 1, temperature, top_k, vocab_size=encoding.n_vocab)
        yield decoder.decode(encoding.decode_single_token_bytes(idx[0, -1].item()), final=i == tokens - 1)


@torch.no_grad()
def evaluate(model, tokens):
    """Mean loss in nats/token over a 1-D array of ids, each but the first predicted once.

    Windows of block_size lie end to end, the last one shorter, so that an id sees from 1 to block_size before it. A
    padded vocabulary's spare ids take part in the softmax, as they do in training. Raises InputError below 2 ids.
    """
    if len(tokens) < 2:
        raise InputError(f"the held-out text has {len(tokens)} tokens, and needs 2: pass a longer text")
    ids = torch.from_numpy(tokens.astype(np.int64)).to(model.transformer.wte.weight.device)
    total, seen, T = 0.0, 0, model.config.block_size
    for x, y in zip(ids[:-1].split(T), ids[1:].split(T), strict=True):
        total += model(x[None], y[None]).item() * len(x)
        seen += len(x)
        if sys.stderr.isatty():  # it takes minutes on a CPU; the next line covers this one
            print(f"{seen:,} of {len(ids):,} tokens", end="\r", file=sys.stderr, flush=True)
    return total / seen


def main(argv=None):
    """The command line. What a user got wrong is one line and exit status 2, Ctrl-C one line and 130."""
    sys.path.insert(0, str(Path(__file__).resolve().parent / "stages"))
    from harness import Parser, machine  # here, because the harness imports this file

    parser = Parser(description="Generate text with GPT-2, or measure its loss on held-out text.", allow_abbrev=False)
    add, either = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    either("--prompt", metavar="TEXT", help="what to continue (a new line)")
    either("--eval", action="store_true", help="print loss and perplexity on the corpus's last tenth")
    add("--weights", metavar="W", help=f"{', '.join(NAMES)}, or a directory that --save wrote (an untrained micro)")
    add("--tokens", type=int, default=100, metavar="N", help="tokens to generate (%(default)s)")
    add("--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (%(default)s)")
    add("--top-k", type=int, default=200, metavar="K", help="draw from the K likeliest tokens (%(default)s)")
    add("--samples", type=int, default=1, metavar="N", help="texts, with seeds S, S + 1, ... (%(default)s)")
    add("--seed", type=int, default=1337, metavar="S", help="the same seed gives the same text (%(default)s)")
    add("--device", metavar="D", help="cuda, cuda:1, mps or cpu (the best one there is)")
    add("--data", metavar="FILE", help="for --eval: the .txt or .bin that was trained on (Tiny Shakespeare)")
    args = parser.parse_args(argv)
    for name, least in dict(tokens=1, temperature=0, top_k=1, samples=1, seed=0).items():
        if not least <= vars(args)[name] < 2**63:
            parser.error(f"--{name.replace('_', '-')} must be at least {least} and below 2**63, got {vars(args)[name]}")
    try:
        device = machine.find_device(args.device)
        attention = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        torch.manual_seed(args.seed)
        if args.weights is None:
            model, name = GPT(GPTConfig(**SIZES["micro"]), attention), tokenizer().name
        else:
            model, name = load(args.weights, attention)
        encoding = byte_tokenizer() if name == "gpt2-bytes" else tokenizer()
        if encoding.name != name or encoding.n_vocab > model.config.vocab_size:
            raise InputError(f"tokenizer {encoding.name} does not fit {args.weights}, which needs {name}: go online")
        model.to(device)
        if args.eval:
            tokens = load_tokens(args.data, split="val")
            if tokens.tokenizer != name:
                raise InputError(f"the model reads tokens of {name}, the text has {tokens.tokenizer}'s: train it again")
            loss = evaluate(model, tokens)
            print(f"{tokens.corpus}, last tenth, {len(tokens):,} tokens of {name}")
            print(f"loss {loss:.4f} nats/token | perplexity {math.exp(min(loss, 700)):,.2f}", flush=True)
            return
        ids, T = encoding.encode_ordinary(args.prompt or "\n"), model.config.block_size
        if len(ids) > T:
            print(f"the prompt has {len(ids):,} tokens, of which the model reads the last {T:,}", file=sys.stderr)
        began = time.perf_counter()
        for sample in range(args.samples):
            torch.manual_seed(args.seed + sample)
            print("---\n" * (sample > 0) + encoding.decode(ids), end="", flush=True)
            for piece in stream(model, encoding, ids, args.tokens, args.temperature, args.top_k):
                print(piece, end="", flush=True)
            print(flush=True)
        seconds, count = time.perf_counter() - began, args.samples * args.tokens
        print(f"{count} tokens in {seconds:.2f} s, {count / seconds:,.1f} tokens per second", file=sys.stderr)
    except InputError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "\ninterrupted\n")
    except OSError as error:  # stdout is full, or its reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        parser.exit(1, "" if isinstance(error, BrokenPipeError) else f"error: {error}\n")


if __name__ == "__main__":
    main()
