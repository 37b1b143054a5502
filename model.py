"""GPT-2, as plain as it gets. No stage changes this file, and no technique hides in it.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). The one thing a caller hands in is
the attention function, because one stage of the ladder is about it. Parameter names are those of Hugging Face's
GPT-2, so that checkpoints pass both ways.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT = 1024  # positions GPT-2 was trained with
VOCAB = 50257  # ids of GPT-2's tokenizer: 256 bytes, 50,000 merges, <|endoftext|>

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
    """Shape of a GPT-2; the defaults are the 124M model. Raises ValueError where the numbers do not fit together."""

    vocab_size: int = VOCAB
    block_size: int = CONTEXT
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")


class SelfAttention(nn.Module):
    def __init__(self, config, attention):
        super().__init__()
        self.n_head = config.n_head
        self.attention = attention
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = self.attention(q, k, v)  # (B, n_head, T, head_dim), each token looking back only
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        # tanh, because GPT-2 was trained with this approximation of GELU
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config, attention):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = SelfAttention(config, attention)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 with random weights drawn from torch's global generator.

    `attention(q, k, v)` maps three (B, n_head, T, head_dim) tensors to one of the same shape and must be causal.
    """

    def __init__(self, config, attention):
        super().__init__()
        self.config = config
        with torch.device("meta"):  # shapes alone, so that every weight is drawn once, below
            self.transformer = nn.ModuleDict(
                dict(
                    wte=nn.Embedding(config.vocab_size, config.n_embd),
                    wpe=nn.Embedding(config.block_size, config.n_embd),
                    h=nn.ModuleList(Block(config, attention) for _ in range(config.n_layer)),
                    ln_f=nn.LayerNorm(config.n_embd),
                )
            )
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.to_empty(device="cpu")
        self.lm_head.weight = self.transformer.wte.weight  # one matrix in both places (Press & Wolf, arXiv:1608.05859)
        # backwards, so that wte comes last: padding the vocabulary then leaves a seed's other weights as they were
        for name, p in reversed(list(self.named_parameters())):
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 1:
                nn.init.ones_(p)  # LayerNorm's gain
            else:
                # 2 * n_layer projections add up in the residual stream: scaled, its variance does not grow with depth
                scale = (2 * config.n_layer) ** -0.5 if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(p, mean=0.0, std=0.02 * scale)

    @classmethod
    def from_pretrained(cls, name, attention):
        """A GPT with trained weights, float32 on the CPU: OpenAI's by name ("gpt2" to "gpt2-xl"), or a directory's.

        The files are Hugging Face's: config.json and model.safetensors. Raises data.InputError where they are missing,
        damaged or of another architecture.
        """
        from weights import load  # here, because weights imports this file, and a stage has no need of it

        return load(name, attention)[0]

    def save_pretrained(self, directory, tokenizer="gpt2"):
        """Write the weights, float32, so that from_pretrained and transformers' GPT2LMHeadModel read them.

        tokenizer: the name of the one whose ids the model was trained on. The directory appears whole or not at all.
        Raises data.InputError where it can't be written or holds something else.
        """
        from weights import save

        save(self, directory, tokenizer)

    def forward(self, idx, targets=None):
        """Next-token logits, and the loss where targets are given.

        idx, targets: int64 (B, T), T at most block_size. Returns logits (B, T, vocab_size), in the autocast dtype if
        there is one, and the mean cross-entropy in nats as a float32 scalar, or None without targets.
        Raises ValueError for another shape or a longer sequence.
        """
        if idx.dim() != 2 or (targets is not None and targets.shape != idx.shape):
            shapes = f"idx {tuple(idx.shape)}" + ("" if targets is None else f", targets {tuple(targets.shape)}")
            raise ValueError(f"idx and targets must both be (B, T), got {shapes}")
        T = idx.shape[1]
        if self.config.block_size < T:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size {self.config.block_size}")
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(T, device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        # float32, because a sum over 50,257 exponentials is no place for 8 bits of mantissa
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.reshape(-1))
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, vocab_size=VOCAB):
        """Continue idx, int64 (B, T), by max_new_tokens; returns (B, T + max_new_tokens).

        Temperature 0 is greedy; top_k keeps the k likeliest ids. Ids from vocab_size on are padding, which no
        tokenizer decodes, and are never drawn. Past block_size the model sees the last block_size tokens.
        Raises ValueError for a temperature below 0 or a top_k below 1.
        """
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature must be 0 or more and top_k 1 or more, got {temperature} and {top_k}")
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size :])[0][:, -1, :vocab_size].float()
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


if __name__ == "__main__":  # python model.py --prompt "To be": the command line is in sample.py, which says why
    from sample import main

    main()
