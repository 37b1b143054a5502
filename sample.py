"""GPT-2 speaks: python model.py --prompt "To be" [--weights gpt2|DIRECTORY], and --eval for its held-out loss.

Without --weights it is a random `micro`, to show what training has to start from. The command line belongs to model.py
and lives here, since it is about tokens, terminals and flags, and model.py is to hold the model alone.
"""

import argparse
import codecs
import math
import os
import sys
import time

import numpy as np
import torch
from torch.nn import functional as F

import weights
from data import InputError, byte_tokenizer, load_tokens, tokenizer
from model import GPT, SIZES, GPTConfig
from stages.machine import find_device


def attention(q, k, v):  # (B, n_head, T, head_dim) each
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def main(argv=None):
    """The command line of `python model.py`. A bad value, file or device ends it in one line, with exit status 2."""
    sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a letter shows a question mark
    args = _parse(argv)
    try:
        _run(args)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _parse(argv):
    parser = argparse.ArgumentParser(
        prog="model.py",
        description="Let GPT-2 go on with a text, or measure it on text that it was not trained on.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--prompt", default="\n", metavar="TEXT", help="what to go on with (a new line)")
    task.add_argument("--eval", action="store_true", help="print loss and perplexity on the corpus's last tenth")
    add("--weights", metavar="W", help=f"{', '.join(weights.NAMES)}, or what --save wrote (random weights)")
    add("--tokens", type=int, default=100, metavar="N", help="tokens to add (%(default)s)")
    add("--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (%(default)s)")
    add("--top-k", type=int, default=200, metavar="K", help="draw from the K likeliest tokens (%(default)s)")
    add("--samples", type=int, default=1, metavar="N", help="texts, with seeds S, S + 1, ... (%(default)s)")
    add("--seed", type=int, default=1337, metavar="S", help="the same one, the same text (%(default)s)")
    add("--device", metavar="D", help="cuda, cuda:1, xpu, mps or cpu (the best one there is)")
    add("--data", metavar="FILE", help="for --eval: the .txt or .bin that was trained on (Tiny Shakespeare)")
    args = parser.parse_args(argv)
    for name in ("tokens", "top_k", "samples"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not 0 <= args.temperature < math.inf:
        parser.error(f"--temperature must be 0 or more, and finite, got {args.temperature}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed must be from 0 to 2**63 - 1, got {args.seed}")
    if not args.prompt:
        parser.error("--prompt is empty: pass a text, if only a blank")
    return args


def _run(args):
    device = find_device(args.device)
    if args.weights is None:
        torch.manual_seed(args.seed)
        model, encoding = GPT(GPTConfig(**SIZES["micro"]), attention), tokenizer()
    else:
        model, name = weights.load(args.weights, attention)
        encoding = _find_encoding(name)
        if encoding.n_vocab > model.config.vocab_size:
            raise InputError(f"{args.weights} has {model.config.vocab_size:,} ids, and {name} {encoding.n_vocab:,}")
    model.to(device)
    if args.eval:
        tokens = load_tokens(args.data, split="val")
        if tokens.tokenizer != encoding.name:
            here = f"{tokens.corpus} comes in those of {tokens.tokenizer} here"
            raise InputError(f"the model reads tokens of {encoding.name}, and {here}: train again with these")
        loss = evaluate(model, tokens)
        print(f"{tokens.corpus}, last tenth, {len(tokens):,} tokens of {tokens.tokenizer}")
        print(f"loss {loss:.4f} nats/token | perplexity {math.exp(min(loss, 700)):,.2f}")
    else:
        _speak(model, encoding, args)


def _speak(model, encoding, args):
    ids, block_size = encoding.encode_ordinary(args.prompt), model.config.block_size
    if len(ids) > block_size:
        print(f"the prompt has {len(ids):,} tokens: the model reads the last {block_size:,} of them", file=sys.stderr)
        ids = ids[-block_size:]
    began, told = time.perf_counter(), 0
    try:
        for sample in range(args.samples):
            if sample:
                print("---")
            torch.manual_seed(args.seed + sample)
            print(encoding.decode(ids), end="", flush=True)
            try:
                for piece in stream(model, encoding, ids, args.tokens, args.temperature, args.top_k):
                    print(piece, end="", flush=True)
                    told += 1
            finally:
                print(flush=True)  # an interrupted line ends too
    finally:
        seconds = time.perf_counter() - began
        print(f"{told} tokens in {seconds:.2f} s, {told / seconds:,.1f} tokens a second", file=sys.stderr)


def stream(model, encoding, ids, tokens, temperature=1.0, top_k=None):
    """Yield the text of as many new tokens, a str each, drawn from torch's global generator.

    ids: a list of at least one id. A token can end within a UTF-8 character, which comes out with the token that
    completes it; what is no UTF-8 comes out as U+FFFD. Ids that the encoding has no bytes for are never drawn.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    idx = torch.tensor([ids], device=model.transformer.wte.weight.device)
    for i in range(tokens):
        idx = model.generate(idx, 1, temperature, top_k, vocab_size=encoding.n_vocab)
        yield decoder.decode(encoding.decode_single_token_bytes(idx[0, -1].item()), final=i == tokens - 1)


@torch.no_grad()
def evaluate(model, tokens):
    """Mean loss in nats/token over all of a 1-D array of ids but the first, each predicted once.

    Windows of block_size lie end to end, the last one shorter, so that an id sees from 1 to block_size before it. A
    padded vocabulary's spare ids take part in the softmax, as they do in training.
    Raises InputError for fewer than 2 ids, or ids that the model has not.
    """
    if len(tokens) < 2 or tokens.max() >= model.config.vocab_size:
        raise InputError(
            f"the held-out text has {len(tokens):,} ids, the largest {tokens.max(initial=0):,}: it takes 2 or more, "
            f"and all below the model's vocabulary of {model.config.vocab_size:,}"
        )
    ids = torch.from_numpy(tokens.astype(np.int64)).to(model.transformer.wte.weight.device)
    total, T = 0.0, model.config.block_size
    for start in range(0, len(ids) - 1, T):
        window = ids[start : start + T + 1]
        loss = model(window[None, :-1], window[None, 1:])[1]
        total += loss.item() * (len(window) - 1)
        if sys.stderr.isatty():  # it takes minutes on a CPU
            done = start + len(window) == len(ids)
            print(f"\r{start + len(window):,} of {len(ids):,} tokens", end="\n" * done, file=sys.stderr, flush=True)
    return total / (len(ids) - 1)


def _find_encoding(name):
    """The tiktoken Encoding by the name that a checkpoint tells."""
    encoding = tokenizer()
    if encoding.name == name:
        return encoding
    if name == "gpt2-bytes":
        return byte_tokenizer()
    raise InputError(
        f"the weights read tokens of {name}, and this machine has {encoding.name}: fetch it with a network"
    )


if __name__ == "__main__":
    main()
