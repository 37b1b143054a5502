"""Text from a GPT-2, or its loss on held-out text.

python stages/sample.py --weights mine.pt --prompt "To be"    continue a text, with what --save wrote
python stages/sample.py --weights mine.pt --eval              measure the loss on the corpus's last tenth
python stages/sample.py --weights gpt2 --prompt "To be"       OpenAI's weights (pip install transformers)
"""

from harness import machine  # first: it makes data and model importable from here
from harness.flags import Parser, positive, seed

import math

import torch
from torch.nn import functional as F

from data import VOCAB, gpt2_encoding, load_tokens, refuse
from model import GPT, evaluate, load

PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # by OpenAI


def attention(q, k, v):  # (B, n_head, T, head_dim) each
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


parser = Parser(__doc__)
add = parser.add_argument
add("--weights", metavar="W", required=True, help=f"a file that --save wrote, or one of {', '.join(PUBLISHED)}")
add("--prompt", metavar="TEXT", default="\n", help="what to continue (a new line)")
add("--eval", action="store_true", help="print the loss on the corpus's last tenth instead")
add("--tokens", type=positive, default=100, metavar="N", help="tokens to generate (%(default)s)")
add("--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest (%(default)s)")
add("--top-k", type=positive, default=200, metavar="K", help="draw from the K likeliest tokens (%(default)s)")
add("--seed", type=seed, default=1337, metavar="S", help="the same seed gives the same text (%(default)s)")
add("--device", metavar="D", help="cuda, cuda:1, mps or cpu (the best one there is)")
add("--data", metavar="FILE", help="for --eval: the .txt or .bin that was trained on (Tiny Shakespeare)")
args = parser.parse_args()
if not 0 <= args.temperature < math.inf:
    refuse(f"--temperature {args.temperature}: pass 0 or more")
if not args.prompt:
    refuse("--prompt is empty: pass a text")

if args.weights in PUBLISHED:
    model, tokenizer = GPT.from_pretrained(args.weights, attention), "gpt2"
else:
    model, tokenizer = load(args.weights, attention)
model.to(machine.find_device(args.device))
torch.manual_seed(args.seed)

if args.eval:
    corpus = load_tokens(args.data, split="val")
    if corpus.tokenizer != tokenizer:
        remedy = "go online, without LADDER_OFFLINE, or pass a .bin of GPT-2's ids"
        if tokenizer == "bytes":
            remedy = "set LADDER_OFFLINE=1, and pass a .txt"
        refuse(f"the model reads tokens of {tokenizer}, and this text is in {corpus.tokenizer}: {remedy}")
    loss = evaluate(model, corpus.ids)
    print(f"{corpus.name}, last tenth, {len(corpus.ids):,} tokens of {tokenizer}")
    print(f"loss {loss:.4f} nats/token | perplexity {math.exp(loss):,.2f}")
elif tokenizer == "bytes":
    idx = torch.tensor([list(args.prompt.encode())], device=model.lm_head.weight.device)
    idx = model.generate(idx, args.tokens, args.temperature, args.top_k, vocab_size=256)
    print(bytes(idx[0].tolist()).decode(errors="replace"))
else:
    encoding = gpt2_encoding()
    if encoding is None:
        refuse(f"{args.weights} needs GPT-2's vocabulary, which is not here: go online once, without LADDER_OFFLINE")
    idx = torch.tensor([encoding.encode_ordinary(args.prompt)], device=model.lm_head.weight.device)
    idx = model.generate(idx, args.tokens, args.temperature, args.top_k, vocab_size=VOCAB)
    print(encoding.decode(idx[0].tolist()))
