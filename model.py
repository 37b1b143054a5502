"""GPT-2 as plain as it gets.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). No stage changes this file, and
no technique hides in it. The caller passes in the attention function, because one stage is about it.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from data import VOCAB

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
    """Shape of a GPT-2; the defaults are the 124M model. n_head divides n_embd."""

    vocab_size: int = VOCAB
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


class Block(nn.Module):
    """Attention, then an MLP. Each reads x, (B, T, n_embd), through a LayerNorm, and adds its output to x."""

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
        with torch.device("meta"):  # no memory and no random numbers yet: _draw_weights() draws each weight once
            wte = nn.Embedding(config.vocab_size, config.n_embd)
            wpe = nn.Embedding(config.block_size, config.n_embd)
            h = nn.Sequential(*[Block(config, attention) for _ in range(config.n_layer)])
            ln_f = nn.LayerNorm(config.n_embd)
            self.transformer = nn.ModuleDict(dict(wte=wte, wpe=wpe, h=h, ln_f=ln_f))
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.to_empty(device="cpu")
        # one matrix in both places (Press & Wolf, arXiv:1608.05859)
        self.lm_head.weight = self.transformer.wte.weight
        self._draw_weights()

    def _draw_weights(self):
        """Draw every weight with nanoGPT's standard deviations; gains begin at 1 and biases at 0."""
        # in reverse, so that wte is drawn last: then s06, which pads it, has all other weights of the same seed
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
        in float32. Raises ValueError for a longer sequence.
        """
        T = idx.shape[1]
        if self.config.block_size < T:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size {self.config.block_size}")
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(T, device=idx.device))
        logits = self.lm_head(self.transformer.ln_f(self.transformer.h(x)))
        if targets is None:
            return logits
        # We return the loss alone. With (logits, loss) a compiled backward would read a zero gradient of the logits'
        # size in each step (PyTorch issue 131794). And a caller who names the logits keeps them until the next forward.
        # In float32: a sum over 50,257 exponentials needs more than 8 bits of mantissa.
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.reshape(-1))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Continue idx, int64 (B, T), by max_new_tokens; returns (B, T + max_new_tokens).

        Temperature 0 takes the likeliest id; top_k keeps the ids that are at least as likely as the k-th. The model
        sees the last block_size tokens.
        """
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size :])[:, -1, :VOCAB].float()  # s06's padding is never drawn
            if temperature == 0:
                new = logits.argmax(dim=-1, keepdim=True)
            else:
                logits = logits / temperature
                if top_k is not None:
                    kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                    logits = logits.masked_fill(logits < kth, -math.inf)
                new = torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)
            idx = torch.cat((idx, new), dim=1)
        return idx
