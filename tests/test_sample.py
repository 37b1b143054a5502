"""python stages/sample.py: text from what a stage saved, its held-out loss, and what a user can get wrong."""

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
    """A function that saves a model for which all ids are equally likely, or some likelier than others."""

    def save_flat(vocab_size, tokenizer, likelier=()):
        """Return the path. likelier: ids, each of them likelier than the one before."""
        model = GPT(GPTConfig(vocab_size=vocab_size, block_size=24, n_layer=1, n_head=1, n_embd=4), attention)
        torch.nn.init.ones_(model.transformer.ln_f.bias)
        torch.nn.init.zeros_(model.transformer.wte.weight)  # so that all logits are 0
        with torch.no_grad():
            for rank, likely in enumerate(likelier, start=1):
                model.transformer.wte.weight[likely] = 20.0 * rank
        save(model, tokenizer, tmp_path / "flat.pt")
        return tmp_path / "flat.pt"

    return save_flat


@pytest.fixture
def text_file(tmp_path):
    """A text of 600 bytes."""
    (tmp_path / "text.txt").write_text("to be " * 100)
    return tmp_path / "text.txt"


def test_a_text_begins_with_the_prompt_and_the_seed_decides_how_it_goes_on(weights):
    flags = ("--weights", weights, "--prompt", "Größe", "--tokens", 30)
    first, again, other = sample(*flags), sample(*flags), sample(*flags, "--seed", 1)
    assert (first.status, first.err) == (0, "")
    assert first.out.startswith("Größe")
    assert first.out == again.out != other.out


def test_a_model_of_bytes_writes_as_many_bytes_as_asked_for_and_no_padding(save_flat):
    weights = save_flat(300, "bytes", likelier=[ord("b"), 299])
    assert sample("--weights", weights, "--prompt", "a", "--tokens", 30, "--temperature", 0).out == f"a{30 * 'b'}\n"


def test_temperature_0_and_top_k_1_take_the_likeliest_token(weights):
    drawn = sample("--weights", weights, "--tokens", 30).out
    greedy = sample("--weights", weights, "--tokens", 30, "--temperature", 0).out
    top_1 = sample("--weights", weights, "--tokens", 30, "--top-k", 1).out
    assert greedy == top_1 != drawn


def test_a_prompt_may_be_longer_than_the_context(weights):
    out = sample("--weights", weights, "--prompt", "a" * 50, "--tokens", 3).out  # the stage trained on 32 tokens
    assert out.startswith("a" * 50)


def test_eval_of_a_model_that_knows_nothing_is_a_guess_among_all_tokens(save_flat, text_file):
    out = sample("--weights", save_flat(300, "bytes"), "--eval", "--data", text_file).out
    # ln 300 = 5.7038, and e to that power is 300
    assert out == "text.txt, last tenth, 60 tokens of bytes\nloss 5.7038 nats/token | perplexity 300.00\n"


def test_a_model_of_gpt2s_tokens_writes_its_words_and_no_padding(save_flat, monkeypatch):
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256}  # in place of GPT-2's vocabulary
    tokenizer = tiktoken.Encoding("small", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": tokenizer}.get)
    monkeypatch.delenv("LADDER_OFFLINE")
    weights = save_flat(50304, "gpt2", likelier=[256, 50300])  # "th", and padding
    drawn = sample("--weights", weights, "--prompt", "To be", "--tokens", 3, "--temperature", 0)
    assert drawn.out == "To beththth\n"


def test_gpt2s_tokens_are_refused_where_its_vocabulary_is_missing(save_flat):
    assert "needs GPT-2's vocabulary, which is not here: go online once" in error_of(
        "--weights", save_flat(300, "gpt2")
    )


def test_eval_refuses_a_text_of_another_tokenizer(weights, tmp_path):
    (tmp_path / "ids.bin").write_bytes(bytes(2000))
    line = error_of("--weights", weights, "--eval", "--data", tmp_path / "ids.bin")
    assert "the model reads tokens of bytes, and this text is in gpt2: pass another --data" in line


def test_eval_refuses_a_text_without_a_last_tenth(weights, tmp_path):
    (tmp_path / "short.txt").write_text("a")
    assert "pass a longer text" in error_of("--weights", weights, "--eval", "--data", tmp_path / "short.txt")


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--prompt a", "--weights"),
        ("--weights typo", "typo: No such file or directory; pass a file that --save wrote"),
        ("--weights typo --tokens 0", "--tokens: '0' is not a whole number of 1 or more"),
        ("--weights typo --top-k 0", "--top-k: '0' is not a whole number of 1 or more"),
        ("--weights typo --temperature -1", "--temperature -1.0: pass 0 or more"),
        ("--weights typo --prompt=", "--prompt is empty: pass a text"),
        ("--weights typo --prom a", "--prom"),
    ],
)
def test_a_wrong_flag_is_one_line(flags, words):
    assert words in error_of(*flags.split())
