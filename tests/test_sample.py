"""python stages/sample.py: text from what a stage saved."""

import math

import numpy as np
import pytest
import torch
from conftest import FLOAT32, ROOT, run_script, run_stage

from data import VOCAB
from model import GPT, GPTConfig

SAMPLE = ROOT / "stages" / "sample.py"


def test_a_text_begins_with_the_prompt_and_the_seed_decides_how_it_goes_on(tmp_path):
    """The weights, with padding, were trained on Python's documentation, a token a byte, which needs no vocabulary."""
    run_stage("s06", *FLOAT32, "--save", tmp_path / "w.pt", folder=tmp_path)
    flags = ("--device", "cpu", "--weights", tmp_path / "w.pt", "--prompt", "Größe" * 10, "--tokens", 30)
    first, again = run_script(SAMPLE, *flags), run_script(SAMPLE, *flags)
    assert first.status == 0
    assert first.out.startswith("Größe" * 10)  # more than the 24 tokens of its training
    assert first.out == again.out
    assert first.out != run_script(SAMPLE, *flags, "--seed", 2).out
    assert first.err == "no GPT-2 vocabulary (OSError): connect to a network once; using single bytes\n"
    assert run_script(SAMPLE, *flags, "--temperature", 0).out == run_script(SAMPLE, *flags, "--top-k", 1).out


@pytest.fixture
def of_one_letter(tmp_path):
    """Return the path of weights for which "a", the id 64, is always e**3 times as likely as any other id."""
    model = GPT(GPTConfig(VOCAB, 8, 1, 1, 4), None)
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias[0] = 1.0
        model.transformer.wte.weight[:, 0] = 0.0
        model.transformer.wte.weight[64, 0] = 3.0
    save_as_a_stage(model, tmp_path / "w.pt")
    return tmp_path / "w.pt"


def test_as_many_tokens_are_generated_as_the_flag_says(of_one_letter):
    flags = ("--device", "cpu", "--weights", of_one_letter, "--prompt", "b", "--temperature", 0)
    assert run_script(SAMPLE, *flags, "--tokens", 7).out == "baaaaaaa\n"


def test_the_loss_is_that_of_the_last_tenth_of_the_text(of_one_letter, tmp_path):
    np.save(tmp_path / "ids.npy", np.repeat([65, 64], [180, 20]))
    flags = ("--device", "cpu", "--weights", of_one_letter, "--data", tmp_path / "ids.npy")
    assert run_script(SAMPLE, *flags, "--eval").out == f"held-out loss {math.log(VOCAB - 1 + math.exp(3)) - 3:.4f}\n"


def save_as_a_stage(model, path):
    """Write the weights of a GPT as a stage does."""
    torch.save({"config": vars(model.config), "weights": model.state_dict()}, path)


@pytest.mark.parametrize("vocab_size", [211, 50432])  # of characters, and GPT-NeoX
def test_a_vocabulary_of_another_tokenizer_is_one_line(tmp_path, vocab_size):
    save_as_a_stage(GPT(GPTConfig(vocab_size, 8, 1, 1, 4), None), tmp_path / "w.pt")
    ended = run_script(SAMPLE, "--device", "cpu", "--weights", tmp_path / "w.pt")
    assert (ended.status, ended.out) == (2, "")
    assert f"has {vocab_size} ids, and only GPT-2's vocabulary" in ended.err
