"""python stages/sample.py: text from what a stage saved, its held-out loss, and what a user can get wrong."""

from harness.weights import save

import numpy as np
import pytest
import tiktoken
import torch
from conftest import FLOAT32, ROOT, definitions, run_script

from data import single_bytes
from model import GPT, GPTConfig

attention = definitions("s05", "attention", F=torch.nn.functional)["attention"]


def sample(*flags):
    """The Ended of a command line, on the CPU."""
    return run_script(ROOT / "stages" / "sample.py", "--device", "cpu", *flags)


@pytest.fixture
def weights(stages, tmp_path_factory):
    """What s06 saved, a model with padding."""
    path = tmp_path_factory.getbasetemp() / "s06.pt"
    ended = stages("s06", *FLOAT32, "--save", path)
    assert ended.status == 0, ended.err
    return path


@pytest.fixture
def save_flat(tmp_path):
    """A function that saves a model which draws all ids alike, but a few of them more often."""

    def save_flat(vocab_size, logits=()):
        """Return the path. logits: (id, logit) pairs; all other logits are 0, whatever the text before."""
        model = GPT(GPTConfig(vocab_size=vocab_size, block_size=24, n_layer=1, n_head=1, n_embd=4), attention)
        torch.nn.init.ones_(model.transformer.ln_f.bias)
        torch.nn.init.zeros_(model.transformer.ln_f.weight)
        torch.nn.init.zeros_(model.transformer.wte.weight)
        with torch.no_grad():
            for token, logit in logits:
                model.transformer.wte.weight[token] = logit / 4  # the four numbers of ln_f are 1
        save(model, tmp_path / "flat.pt")
        return tmp_path / "flat.pt"

    return save_flat


@pytest.fixture
def vocabulary(monkeypatch):
    """Bytes and one merge, "th", in place of GPT-2's vocabulary."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256}
    tokenizer = tiktoken.Encoding("small", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": tokenizer}.get)


def id_of(letter):
    """The id of a single byte in GPT-2's vocabulary."""
    return single_bytes().encode_single_token(letter)


def test_a_text_begins_with_the_prompt_and_the_seed_decides_how_it_goes_on_without_a_vocabulary(weights):
    flags = ("--weights", weights, "--prompt", "Größe" * 10, "--tokens", 400)  # more than the 24 tokens of its training
    first, again, other = sample(*flags), sample(*flags), sample(*flags, "--seed", 1)
    assert first.status == 0
    assert first.out.startswith("Größe" * 10)
    assert first.out == again.out != other.out
    assert first.err == "no GPT-2 vocabulary (no network in a test): each byte is a token\n"


@pytest.mark.parametrize("flags", [("--temperature", 0), ("--top-k", 1)], ids=str)
def test_temperature_0_and_top_k_1_take_the_likeliest_token(save_flat, vocabulary, flags):
    weights = save_flat(50304, logits=[(256, 1.0), (50300, 2.0)])  # "th", and padding
    assert sample("--weights", weights, "--prompt", "To be", "--tokens", 3, *flags).out == "To beththth\n"


def test_eval_of_a_model_that_knows_nothing_is_a_guess_among_all_tokens(save_flat, tmp_path):
    (np.arange(600) % 256).astype(np.uint16).tofile(tmp_path / "ids.bin")
    out = sample("--weights", save_flat(300), "--eval", "--data", tmp_path / "ids.bin").out
    # ln 300 = 5.7038, and e to that power is 300
    assert out == "ids.bin, last tenth\nloss 5.7038 nats/token | perplexity 300.00\n"


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--prompt a", "--weights"),
        ("--weights typo", "typo is no file that --save wrote: [Errno 2] No such file"),
        ("--weights typo --tokens 0", "--tokens: '0' is not a whole number of 1 or more"),
        ("--weights typo --temperature -1", "--temperature -1.0: pass 0 or more"),
        ("--weights typo --prompt=", "--prompt is empty: pass a text"),
        ("--weights typo --prom a", "--prom"),
    ],
)
def test_a_wrong_flag_is_one_line(flags, words):
    ended = sample(*flags.split())
    assert (ended.status, ended.out) == (2, "")
    [line] = ended.err.splitlines()
    assert line.startswith("error: ") and words in line
