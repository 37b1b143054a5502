"""Text from a GPT-2, or its loss and perplexity on held-out text: what a checkpoint is worth.

python stages/sample.py --weights runs/mine --prompt "To be"    continue a text, with what --save wrote
python stages/sample.py --weights runs/mine --eval              measure the loss on the corpus's last tenth
python stages/sample.py --weights gpt2 --prompt "To be"         OpenAI's weights (pip install huggingface_hub)
"""

from harness import machine  # first: it makes data and model importable from here
from harness.flags import Parser

import argparse
import codecs
import math
import os
import sys
import time

import torch
from torch.nn import functional as F

from data import InputError, byte_tokenizer, load_tokens, printable, tokenizer
from model import GPT, NAMES, SIZES, GPTConfig, evaluate

LEAST = {"tokens": 1, "temperature": 0, "top_k": 1, "samples": 1, "seed": 0}  # the least value of each flag


def attention(q, k, v):  # (B, n_head, T, head_dim) each
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def parse(argv=None):
    """The parser and the flags it found; a wrong flag ends the program with one line and exit status 2."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--prompt", metavar="TEXT", help="what to continue (a new line)")
    task.add_argument("--eval", action="store_true", help="print the loss on the corpus's last tenth")
    add = parser.add_argument
    add("--weights", metavar="W", help=f"{', '.join(NAMES)} or what --save wrote (an untrained micro)")
    add("--tokens", type=int, default=100, metavar="N", help="tokens to generate (%(default)s)")
    add("--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest (%(default)s)")
    add("--top-k", type=int, default=200, metavar="K", help="draw from the K likeliest tokens (%(default)s)")
    add("--samples", type=int, default=1, metavar="N", help="texts, with seeds S, S + 1, ... (%(default)s)")
    add("--seed", type=int, default=1337, metavar="S", help="the same seed gives the same text (%(default)s)")
    add("--device", metavar="D", help="cuda, cuda:1, mps or cpu (the best one there is)")
    add("--data", metavar="FILE", help="for --eval: the .txt or .bin that was trained on (Tiny Shakespeare)")
    args = parser.parse_args(argv)
    for name, least in LEAST.items():
        value = getattr(args, name)
        if not least <= value < 2**63:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} must be at least {least} and below 2**63, got {value}")
    return parser, args


def load(weights, seed):
    """The GPT of --weights, on the CPU, and the tiktoken Encoding of its tokens. Raises InputError.

    weights: what GPT.from_pretrained takes, or None for an untrained micro, drawn with this seed.
    """
    if weights is None:
        torch.manual_seed(seed)
        model = GPT(GPTConfig(**SIZES["micro"]), attention)
        model.tokenizer = tokenizer().name
    else:
        model = GPT.from_pretrained(weights, attention)
    if model.tokenizer == "gpt2-bytes":
        encoding = byte_tokenizer()
    elif model.tokenizer == "gpt2":
        encoding = tokenizer()
        if encoding.name != "gpt2":
            raise InputError(f"{weights} needs the tokenizer gpt2, which is not here yet: go online once")
    else:
        name = printable(model.tokenizer)
        raise InputError(f"{weights} needs the tokenizer {name}, and gpt2 and gpt2-bytes are all there are")
    if encoding.n_vocab > model.config.vocab_size:
        sizes = f"{encoding.n_vocab:,} ids, and {weights} has {model.config.vocab_size:,}"
        raise InputError(f"the tokenizer {encoding.name} has {sizes}: pass another checkpoint")
    return model, encoding


def print_loss(model, source):
    """Print a model's loss and perplexity on the last tenth of a corpus. source: as for load_tokens."""
    tokens = load_tokens(source, split="val")
    if tokens.tokenizer != model.tokenizer:
        names = f"the model reads tokens of {model.tokenizer}, the text has {tokens.tokenizer}'s"
        raise InputError(f"{names}: train it again")
    loss = evaluate(model, tokens)
    print(f"{tokens.corpus}, last tenth, {len(tokens):,} tokens of {model.tokenizer}")
    print(f"loss {loss:.4f} nats/token | perplexity {perplexity(loss):,.2f}", flush=True)


def perplexity(loss):
    """e to the power of a loss in nats: so many equally likely tokens would be as hard to guess."""
    try:
        return math.exp(loss)
    except OverflowError:  # beyond 709 nats
        return math.inf


def print_texts(model, encoding, args):
    """Print as many texts as --samples asks for, each as it is generated, and the speed on stderr."""
    ids = encoding.encode_ordinary(args.prompt or "\n")
    T = model.config.block_size
    if len(ids) > T:
        print(f"the prompt has {len(ids):,} tokens, of which the model reads the last {T:,}", file=sys.stderr)
    began = time.perf_counter()
    for sample in range(args.samples):
        torch.manual_seed(args.seed + sample)
        if sample > 0:
            print("---")
        print(encoding.decode(ids), end="", flush=True)
        for piece in stream(model, encoding, ids, args.tokens, args.temperature, args.top_k):
            print(piece, end="", flush=True)
        print(flush=True)
    seconds = time.perf_counter() - began
    count = args.samples * args.tokens
    print(f"{count} tokens in {seconds:.2f} s, {count / seconds:,.1f} tokens per second", file=sys.stderr)


def stream(model, encoding, ids, tokens, temperature=1.0, top_k=None):
    """Yield the text of as many new tokens, a str each, drawn from torch's global generator.

    ids: a list of at least one id. A character of UTF-8 comes out whole, with the token that completes it,
    and what is no UTF-8 as U+FFFD. Ids that the encoding has no bytes for are never drawn.
    """
    utf8_decoder = codecs.getincrementaldecoder("utf-8")
    decoder = utf8_decoder(errors="replace")
    idx = torch.tensor([ids], device=model.transformer.wte.weight.device)
    for i in range(tokens):
        idx = model.generate(idx, 1, temperature, top_k, vocab_size=encoding.n_vocab)
        content = encoding.decode_single_token_bytes(idx[0, -1].item())
        yield decoder.decode(content, final=i + 1 == tokens)


def main(argv=None):
    """The command line. What a user got wrong is one line and exit status 2, Ctrl-C one line and 130."""
    parser, args = parse(argv)
    try:
        device = machine.find_device(args.device)
        model, encoding = load(args.weights, args.seed)
        model.to(device)
        if args.eval:
            print_loss(model, args.data)
        else:
            print_texts(model, encoding, args)
    except InputError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "\ninterrupted\n")
    except BrokenPipeError:  # stdout's reader, such as `head`, has had enough
        discard_stdout()
        parser.exit(1)
    except OSError as error:  # the disk is full
        discard_stdout()
        parser.exit(1, f"error: {error}\n")


def discard_stdout():
    """Send what is buffered for stdout nowhere, since Python would try once more to write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
