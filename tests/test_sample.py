"""python stages/sample.py: text from what a stage saved, its held-out loss, and what a user can get wrong."""

import sys

import pytest
import tiktoken
import torch
from conftest import FLOAT32, ROOT, definitions, run_script

from model import GPT, GPTConfig, save

attention = definitions("s05", "attention", F=torch.nn.functional)["attention"]


def sample(*flags):
    """The Ended of a command line, on the CPU."""
    return run_script(ROOT / "stages" / "sample.py", "--device", "cpu", *flags)


def error_of(*flags):
    """The line with which this command line must end, with nothing on stdout."""
    ended = sample(*flags)
    assert (ended.status, ended.out) == (2, "")
    [line] = ended.err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def weights(stages, tmp_path_factory):
    """What s06 saved, a model with padding that reads bytes."""
    path = tmp_path_factory.getbasetemp() / "s06.pt"
    ended = stages("s06", *FLOAT32, "--save", path)
    assert ended.status == 0, ended.err
    return path


@pytest.fixture
def save_flat(tmp_path):
    """A function that saves a model which draws all ids alike, but a few of them more often."""

    def save_flat(vocab_size, tokenizer, logits=()):
        """Return the path. logits: (id, logit) pairs; all other logits are 0, whatever the text before."""
        model = GPT(GPTConfig(vocab_size=vocab_size, block_size=24, n_layer=1, n_head=1, n_embd=4), attention)
        torch.nn.init.ones_(model.transformer.ln_f.bias)
        torch.nn.init.zeros_(model.transformer.ln_f.weight)
        torch.nn.init.zeros_(model.transformer.wte.weight)
        with torch.no_grad():
            for token, logit in logits:
                model.transformer.wte.weight[token] = logit / 4  # the four numbers of ln_f are 1
        save(model, tokenizer, tmp_path / "flat.pt")
        return tmp_path / "flat.pt"

    return save_flat


@pytest.fixture
def vocabulary(monkeypatch):
    """Bytes and one merge, "th", in place of GPT-2's vocabulary."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256}
    tokenizer = tiktoken.Encoding("small", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": tokenizer}.get)
    monkeypatch.delenv("LADDER_OFFLINE")


def test_a_text_begins_with_the_prompt_and_the_seed_decides_how_it_goes_on(weights):
    flags = ("--weights", weights, "--prompt", "Größe" * 10, "--tokens", 30)  # more than the 32 tokens of its training
    first, again, other = sample(*flags), sample(*flags), sample(*flags, "--seed", 1)
    assert (first.status, first.err) == (0, "")
    assert first.out.startswith("Größe" * 10)
    assert first.out == again.out != other.out


@pytest.mark.parametrize("flags", [("--temperature", 0), ("--top-k", 1)], ids=str)
def test_temperature_0_and_top_k_1_take_the_likeliest_byte_and_no_padding(save_flat, flags):
    weights = save_flat(300, "bytes", logits=[(ord("b"), 1.0), (299, 2.0)])
    assert sample("--weights", weights, "--prompt", "a", "--tokens", 30, *flags).out == f"a{30 * 'b'}\n"


@pytest.mark.parametrize("flags", [("--temperature", 0), ("--top-k", 1)], ids=str)
def test_temperature_and_top_k_hold_for_gpt2s_tokens_too(save_flat, vocabulary, flags):
    weights = save_flat(50304, "gpt2", logits=[(256, 1.0), (50300, 2.0)])  # "th", and padding
    assert sample("--weights", weights, "--prompt", "To be", "--tokens", 3, *flags).out == "To beththth\n"


def test_the_default_temperature_is_four_fifths(save_flat):
    # b is drawn e^(6 / 0.8) = 1808 times as often as each other byte: by 1808 / (1808 + 255) in 88 of 100 tokens, and
    # at a temperature of 1 in 61
    out = sample("--weights", save_flat(256, "bytes", logits=[(ord("b"), 6.0)]), "--tokens", 500).out
    assert 0.8 < out.count("b") / 500 < 0.95


def test_eval_of_a_model_that_knows_nothing_is_a_guess_among_all_tokens(save_flat, tmp_path):
    (tmp_path / "text.txt").write_text("to be " * 100)
    out = sample("--weights", save_flat(300, "bytes"), "--eval", "--data", tmp_path / "text.txt").out
    # ln 300 = 5.7038, and e to that power is 300
    assert out == "text.txt, last tenth, 60 tokens of bytes\nloss 5.7038 nats/token | perplexity 300.00\n"


def test_gpt2s_tokens_are_refused_where_its_vocabulary_is_missing(save_flat):
    line = error_of("--weights", save_flat(300, "gpt2"))
    assert "needs GPT-2's vocabulary, which is not here: go online once" in line


def test_eval_refuses_a_text_of_another_tokenizer(weights, tmp_path):
    (tmp_path / "ids.bin").write_bytes(bytes(2000))
    line = error_of("--weights", weights, "--eval", "--data", tmp_path / "ids.bin")
    assert "the model reads tokens of bytes, and this text is in gpt2: " in line


def test_eval_refuses_a_text_without_a_last_tenth(weights, tmp_path):
    (tmp_path / "short.txt").write_text("a")
    assert "pass a longer text" in error_of("--weights", weights, "--eval", "--data", tmp_path / "short.txt")


def test_openais_weights_are_asked_of_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in error_of("--weights", "gpt2-medium")


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--prompt a", "--weights"),
        ("--weights typo", "typo is no file that --save wrote: [Errno 2] No such file"),
        ("--weights typo --tokens 0", "--tokens: '0' is not a whole number of 1 or more"),
        ("--weights typo --seed 18446744073709551616", "is not a whole number from 0 to 2**63 - 1"),
        ("--weights typo --temperature -1", "--temperature -1.0: pass 0 or more"),
        ("--weights typo --prompt=", "--prompt is empty: pass a text"),
        ("--weights typo --prom a", "--prom"),
    ],
)
def test_a_wrong_flag_is_one_line(flags, words):
    assert words in error_of(*flags.split())
