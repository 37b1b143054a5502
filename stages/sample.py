"""Text from a GPT-2, or its loss on a held-out text.

python stages/sample.py --weights mine.pt --prompt "To be"    continue a text, with the weights of --save
python stages/sample.py --weights gpt2 --prompt "To be"       OpenAI's weights (pip install transformers)
python stages/sample.py --weights mine.pt --eval              the loss on held-out text, its last tenth
"""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))  # as Python does unless PYTHONSAFEPATH is set
from harness import machine, ranks  # first: it makes data and model importable from here
from harness.arithmetic import PADDED_VOCAB
from harness.common import refuse, set_up_output, tell
from harness.flags import Parser, end_in_a_line, non_negative, positive, seed
from harness.weights import PUBLISHED, held_out_ids, held_out_loss, load

import codecs

import torch
from torch.nn import functional as F

from data import VOCAB, TextError, gpt2_encoding, load_tokens, single_bytes


def attention(q, k, v):  # (B, n_head, T, head_dim) each
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


set_up_output()
parser = Parser(__doc__)
add = parser.add_argument
add("--weights", metavar="W", required=True, help=f"a file that --save wrote, or {', '.join(PUBLISHED)}")
add("--prompt", metavar="TEXT", default="\n", help="the text to continue (a line break)")
add("--tokens", type=positive, default=100, metavar="N", help="tokens to generate (%(default)s)")
add("--temperature", type=non_negative, default=0.8, metavar="T", help="0 takes the likeliest (%(default)s)")
add("--top-k", type=positive, default=200, metavar="K", help="draw from the K likeliest tokens (%(default)s)")
add("--seed", type=seed, default=1337, metavar="S", help="the same seed gives the same text (%(default)s)")
add("--eval", action="store_true", help="print the loss on held-out text instead")
add("--data", metavar="PATH", help="the text, as for a stage; its end is held out (Tiny Shakespeare)")
add("--device", metavar="D", help="cuda, cuda:1, mps or cpu (the best one there is)")
args = parser.parse_args()
sys.excepthook = lambda *failure: end_in_a_line(None, *failure)

ranks.drop_ranks_if_alone()
device = machine.find_device(args.device)
model = load(args.weights, attention).to(device)
if not VOCAB <= model.config.vocab_size <= PADDED_VOCAB:
    refuse(f"{args.weights} has {model.config.vocab_size} ids, and only GPT-2's vocabulary is known here")
torch.manual_seed(args.seed)  # after the model, which drew random weights first


def print_text():
    """Continue the prompt, and print each token at once."""
    try:
        encoding = gpt2_encoding()
    except TextError as error:
        encoding = single_bytes()
        tell(f"{error}; using single bytes")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # the bytes of a letter may be several tokens
    prompt = encoding.encode_ordinary(args.prompt or "\n")
    print(encoding.decode(prompt), end="", flush=True)
    ids = torch.tensor([prompt], device=device)
    for _ in range(args.tokens):
        ids = model.generate(ids, 1, args.temperature, args.top_k)
        token = ids[0, -1].item()
        if token < encoding.n_vocab:  # a model trained on single bytes may draw a larger id
            print(decoder.decode(encoding.decode_single_token_bytes(token)), end="", flush=True)
    print(decoder.decode(b"", final=True))


if args.eval:
    ids = held_out_ids(load_tokens(args.data))
    print(f"held-out loss {held_out_loss(model, ids):.4f}")
else:
    print_text()
