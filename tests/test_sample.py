"""python stages/sample.py: text from a checkpoint, its held-out loss, and what a user can get wrong."""

import math
import os
import sys

import pytest
import sample
import torch
from conftest import ROOT, definitions, process

from data import VOCAB, byte_tokenizer
from model import GPT, SIZES, GPTConfig

attention = definitions("s05", "attention", F=torch.nn.functional)["attention"]


def make_gpt(vocab_size=300, n_embd=48):
    """An untrained GPT that reads 24 tokens at most."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=vocab_size, block_size=24, n_layer=1, n_head=4, n_embd=n_embd), attention)


@pytest.fixture
def saved(tmp_path):
    """The directory of a checkpoint that reads the 256 bytes and 44 ids of padding."""
    make_gpt().save_pretrained(tmp_path / "saved", tokenizer="gpt2-bytes")
    return tmp_path / "saved"


@pytest.fixture
def only_bytes(monkeypatch):
    """A machine that has no vocabulary of GPT-2 and can't download it."""
    monkeypatch.setattr("data.tokenizer", byte_tokenizer)
    monkeypatch.setattr(sample, "tokenizer", byte_tokenizer)


def run(capsys, *flags):
    """What a command line prints on stdout and stderr, on the CPU."""
    sample.main(["--device", "cpu", *[str(flag) for flag in flags]])
    return capsys.readouterr()


def assert_one_line(capsys, words, *flags):
    """The command ends with exit status 2, nothing on stdout, and on stderr one line that has the words."""
    with pytest.raises(SystemExit) as ended:
        sample.main([str(flag) for flag in flags])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert "error: " in err
    assert words in err
    assert err.endswith("\n") and err[:-1].isprintable()


def test_a_text_begins_with_the_prompt_and_has_as_many_tokens_as_asked_for(saved, capsys):
    out, err = run(capsys, "--weights", saved, "--prompt", "To be", "--tokens", 7)
    assert out.startswith("To be")
    assert "7 tokens in" in err
    assert "of which the model reads" not in err


def test_the_seed_decides_the_text(saved, capsys):
    def text(seed):
        return run(capsys, "--weights", saved, "--tokens", 30, "--seed", seed).out

    assert text(1) == text(1)
    assert text(1) != text(0)


def test_samples_have_seeds_that_follow_each_other(saved, capsys):
    zero = run(capsys, "--weights", saved, "--tokens", 30, "--seed", 0).out
    one = run(capsys, "--weights", saved, "--tokens", 30, "--seed", 1).out
    both = run(capsys, "--weights", saved, "--tokens", 30, "--seed", 0, "--samples", 2)
    assert both.out == f"{zero}---\n{one}"
    assert "60 tokens in" in both.err


def test_temperature_0_and_top_k_1_take_the_likeliest_token(saved, capsys):
    drawn = run(capsys, "--weights", saved, "--tokens", 30).out
    greedy = run(capsys, "--weights", saved, "--tokens", 30, "--temperature", 0).out
    top_1 = run(capsys, "--weights", saved, "--tokens", 30, "--top-k", 1).out
    assert greedy == top_1
    assert greedy != drawn


def test_a_prompt_longer_than_the_context_is_continued_with_a_warning(saved, capsys):
    out, err = run(capsys, "--weights", saved, "--prompt", "a" * 30, "--tokens", 3)
    assert out.startswith("a" * 30)
    assert "the prompt has 30 tokens, of which the model reads the last 24" in err


def test_without_weights_an_untrained_micro_writes(only_bytes, capsys, monkeypatch):
    monkeypatch.setitem(sample.SIZES, "micro", SIZES["tiny"])  # as small as it gets
    assert "3 tokens in" in run(capsys, "--tokens", 3).err


class Script:
    """Stands in for a GPT that generates the given ids, one after another, whatever it reads."""

    def __init__(self, ids, vocab_size):
        self.ids = iter(ids)
        self.vocab_size = vocab_size
        self.transformer = torch.nn.ModuleDict(dict(wte=torch.nn.Embedding(1, 1)))

    def generate(self, idx, max_new_tokens, temperature, top_k, vocab_size):
        assert max_new_tokens == 1
        assert vocab_size == self.vocab_size
        return torch.cat((idx, torch.tensor([[next(self.ids)]])), dim=1)


def test_stream_yields_whole_characters_and_draws_no_id_without_bytes():
    encoding = byte_tokenizer()
    ids = encoding.encode_ordinary("é€🙂é")
    pieces = list(sample.stream(Script(ids, vocab_size=256), encoding, [0], len(ids)))
    assert pieces == ["", "é", "", "", "€", "", "", "", "🙂", "", "é"]


def test_stream_ends_a_character_that_is_not_complete():
    encoding = byte_tokenizer()
    ids = encoding.encode_ordinary("é€")
    pieces = list(sample.stream(Script(ids, vocab_size=256), encoding, [0], 4))
    assert pieces == ["", "é", "", "\ufffd"]


def test_eval_of_a_model_that_knows_nothing_is_a_guess_among_all_tokens(tmp_path, capsys, only_bytes):
    gpt = make_gpt()
    torch.nn.init.zeros_(gpt.transformer.wte.weight)  # so that all of its 300 logits are 0
    gpt.save_pretrained(tmp_path / "flat", tokenizer="gpt2-bytes")
    (tmp_path / "text.txt").write_text("to be " * 100)
    out = run(capsys, "--weights", tmp_path / "flat", "--eval", "--data", tmp_path / "text.txt").out
    # ln 300 = 5.7038, and e to that power is 300
    expected = "text.txt, last tenth, 60 tokens of gpt2-bytes\nloss 5.7038 nats/token | perplexity 300.00\n"
    assert out == expected


def test_perplexity_is_e_to_the_power_of_the_loss():
    assert sample.perplexity(0.0) == 1
    assert sample.perplexity(3.0) == pytest.approx(20.085537)
    assert sample.perplexity(1000.0) == math.inf  # beyond what a float holds


def test_eval_needs_only_what_requirements_name(saved, tmp_path, capsys, only_bytes, monkeypatch):
    for package in ("huggingface_hub", "safetensors", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "text.txt").write_text("to be " * 100)
    assert "perplexity" in run(capsys, "--weights", saved, "--eval", "--data", tmp_path / "text.txt").out


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--tokens 0", "--tokens must be at least 1 and below 2**63, got 0"),
        ("--tokens x", "--tokens"),
        ("--samples 0", "--samples must be at least 1"),
        ("--top-k 0", "--top-k must be at least 1"),
        ("--temperature -1", "--temperature must be at least 0"),
        ("--temperature inf", "--temperature must be at least 0 and below 2**63, got inf"),
        ("--temperature nan", "--temperature must be at least 0 and below 2**63, got nan"),
        ("--seed -1", "--seed must be at least 0"),
        ("--prom a", "--prom"),
        ("--device no", "--device no"),
        ("--eval --prompt a", "--prompt"),
        ("--weights typo", "typo/config.json: there is no such file"),
    ],
)
def test_a_wrong_flag_is_one_line(capsys, flags, words):
    assert_one_line(capsys, words, *flags.split())


def test_eval_refuses_a_text_of_another_tokenizer(saved, tmp_path, capsys):
    (tmp_path / "ids.bin").write_bytes(bytes(2000))
    words = "the model reads tokens of gpt2-bytes, the text has gpt2's"
    assert_one_line(capsys, words, "--weights", saved, "--eval", "--data", tmp_path / "ids.bin")


def test_eval_refuses_a_text_without_a_last_tenth(saved, tmp_path, capsys, only_bytes):
    (tmp_path / "short.txt").write_text("a")
    flags = ["--weights", saved, "--eval", "--data", tmp_path / "short.txt"]
    assert_one_line(capsys, "pass a longer text", *flags)


def test_an_unknown_tokenizer_is_refused_and_printed_without_its_escape_sequence(tmp_path, capsys):
    make_gpt().save_pretrained(tmp_path, tokenizer="llama\x1b[31m")
    assert_one_line(capsys, r"needs the tokenizer llama\x1b[31m, and", "--weights", tmp_path)


def test_gpt2s_tokens_are_refused_where_its_vocabulary_is_missing(tmp_path, capsys, only_bytes):
    make_gpt(VOCAB, n_embd=4).save_pretrained(tmp_path, tokenizer="gpt2")
    assert_one_line(capsys, "needs the tokenizer gpt2", "--weights", tmp_path)


def test_a_vocabulary_smaller_than_its_tokenizers_is_refused(tmp_path, capsys):
    make_gpt(vocab_size=255).save_pretrained(tmp_path, tokenizer="gpt2-bytes")
    assert_one_line(capsys, f"has 256 ids, and {tmp_path} has 255", "--weights", tmp_path)


def test_ctrl_c_ends_with_one_line(saved, capsys, monkeypatch):
    def interrupted(*arguments):
        yield "half a"
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "stream", interrupted)
    with pytest.raises(SystemExit) as ended:
        run(capsys, "--weights", saved, "--prompt", "a text: ")
    assert ended.value.code == 130
    assert capsys.readouterr() == ("a text: half a", "\ninterrupted\n")


def test_a_full_disk_ends_with_one_line(saved, capsys, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sample, "stream", full)
    monkeypatch.setattr(sample, "discard_stdout", lambda: None)  # stdout is pytest's here
    with pytest.raises(SystemExit) as ended:
        run(capsys, "--weights", saved)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"


def test_a_reader_that_has_had_enough_ends_the_command_in_silence(saved, tmp_path):
    """Text comes as it is generated, in any folder, with "?" for what the terminal's encoding can't show."""
    flags = ["--weights", saved, "--prompt", "é", "--tokens", 100000, "--device", "cpu"]
    command = [sys.executable, ROOT / "stages" / "sample.py", *flags]
    ascii_terminal = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    buffered = {"PYTHONUNBUFFERED": ""}
    with process(command, tmp_path, os.environ | ascii_terminal | buffered) as child:
        assert child.stdout.read(9).startswith("?")
        child.stdout.close()
        assert (child.wait(timeout=60), child.stderr.read()) == (1, "")
