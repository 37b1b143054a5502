"""GPT-2 as plain as it gets.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). No stage changes this file, and
no technique hides in it. The caller passes in the attention function, because one stage is about it.
"""

import math
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from data import VOCAB, check_ids, refuse, whole_file

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
# OpenAI wrote these layers as convolutions of width 1, with weights (inputs, outputs): nn.Linear's transposed
CONV1D = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT-2; the defaults are the 124M model. Raises ValueError where the numbers do not fit."""

    vocab_size: int = VOCAB
    block_size: int = CONTEXT
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768

    def __post_init__(self):
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
        """Return a GPT with OpenAI's weights, in float32 on the CPU.

        name: "gpt2", "gpt2-medium", "gpt2-large" or "gpt2-xl", or a folder that transformers wrote. It is the package
        transformers that finds and reads them. Exits with one line where it is missing or can't.
        """
        try:
            from transformers import GPT2LMHeadModel
        except ImportError:
            refuse(f"OpenAI's weights of {name} are read by transformers: pip install transformers")
        try:
            theirs = GPT2LMHeadModel.from_pretrained(name)
        except Exception as error:  # a damaged folder raises whatever its reader does
            refuse(f"{name} can't be loaded: {one_line(error)}")
        c = theirs.config
        model = cls(GPTConfig(c.vocab_size, c.n_positions, c.n_layer, c.n_head, c.n_embd), attention)
        weights = theirs.state_dict()
        with torch.no_grad():
            for key, p in model.named_parameters():
                weight = weights[key]
                if key.endswith(CONV1D):
                    weight = weight.t()
                p.copy_(weight)
        return model


@torch.no_grad()
def evaluate(model, ids):
    """Return the mean loss in nats per token over a held-out text, a float.

    ids: a 1-D integer array, which may be larger than memory. Each id but the first is predicted once, in windows of
    block_size that lie end to end, so that an id sees from 1 to block_size ids before it. The model computes in the
    dtype of its weights, without autocast. Exits with one line below 2 ids.
    """
    if len(ids) < 2:
        refuse(f"the held-out text has {len(ids)} tokens, and needs 2: pass a longer text")
    device = model.transformer.wte.weight.device
    T = model.config.block_size
    targets = len(ids) - 1
    total = 0.0
    for start in range(0, targets, T):
        window = ids[start : start + T + 1].astype(np.int64)
        check_ids(window, "the held-out text")
        window = torch.from_numpy(window).to(device)
        x, y = window[None, :-1], window[None, 1:]
        total += model(x, y).item() * y.numel()
    return total / targets


def save(model, tokenizer, path):
    """Write a GPT's weights to a file, with its shape and the name of the tokenizer whose ids it reads.

    Exits with one line where that is not possible.
    """
    checkpoint = {"config": asdict(model.config), "tokenizer": tokenizer, "weights": model.state_dict()}
    try:
        with whole_file(path) as unfinished:
            torch.save(checkpoint, unfinished)
    except (OSError, RuntimeError) as error:  # torch raises the second where the disk is full
        refuse(f"--save {path} can't be written, is the disk full? {one_line(error)}")


def load(path, attention):
    """Return (GPT on the CPU, name of its tokenizer) of a file that save() wrote.

    Exits with one line where it is no such file, or holds weights that are not finite.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(checkpoint, dict):
            raise TypeError(f"it holds a {type(checkpoint).__name__}")
        model = GPT(GPTConfig(**checkpoint["config"]), attention)
        model.load_state_dict(checkpoint["weights"])
        tokenizer = checkpoint["tokenizer"]
    except Exception as error:  # of another kind of file torch reads what its bytes happen to mean, and raises anything
        refuse(f"{path} is no file that --save wrote: {one_line(error)}")
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            refuse(f"{path}: {name} holds values that are not finite: train it again")
    return model, tokenizer


def one_line(error):
    """Return the beginning of an error's message, in one line."""
    return " ".join(str(error).split())[:200]
