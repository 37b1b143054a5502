"""Text to tokens to batches: what is read, what is refused, and what a missing network leaves."""

import hashlib
import http.client
import io
import os
import sys
import urllib.request
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tiktoken
import torch

import data
from data import VOCAB, Corpus, TextError, TokenLoader, load_tokens, single_bytes

CPU = torch.device("cpu")
TEXT = "First Citizen:\r\n\tBefore we proceed,   hear the na\u00efve \u2026 \U0001f642 <|endoftext|>\n" * 20


@pytest.fixture
def text_file(tmp_path):
    """Return the path of a file with TEXT."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())  # a byte order mark is no token
    return path


@pytest.fixture
def merges(monkeypatch):
    """Put a small tokenizer in place of GPT-2's, and return it: 256 bytes, one merge, "th", and <|endoftext|>."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256}
    special = {"<|endoftext|>": 257}
    tokenizer = tiktoken.Encoding("small", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": tokenizer}.get)
    return tokenizer


@pytest.fixture
def online(monkeypatch, merges):
    """Let the address of Tiny Shakespeare answer with TEXT. Return the Mock in place of urlopen()."""
    urlopen = mock.Mock(side_effect=lambda url, timeout: io.BytesIO(TEXT.encode()))
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", hashlib.sha256(TEXT.encode()).hexdigest())
    return urlopen


def complaint(function, *arguments):
    """Return the message of the TextError that this call must raise."""
    with pytest.raises(TextError) as raised:
        function(*arguments)
    return str(raised.value)


def all_ids(source=None):
    """Return all ids of a text, also those that are held out. source: what load_tokens() takes."""
    corpus = load_tokens(source)
    return np.concatenate([corpus.ids, corpus.held_out])


def ring(length):
    """Return a Corpus of the tokens 0, 1, 2, ...: each one is its own position."""
    return Corpus("ring", np.arange(length, dtype=np.uint16), None, None)


# Batches


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("length", [10, 18, 19, 61])  # 10 tokens are less than one batch of three ranks
def test_ranks_in_turn_read_the_ring_of_tokens_in_order(world_size, length):
    loaders = [TokenLoader(ring(length), 2, 3, rank, world_size) for rank in range(world_size)]
    inputs, targets = [], []
    for _ in range(20):
        for loader in loaders:
            x, y = loader.next_batch(CPU)
            assert x.shape == y.shape == (2, 3)
            assert x.dtype == y.dtype == torch.int64
            inputs += x.flatten().tolist()
            targets += y.flatten().tolist()
    assert inputs == [position % length for position in range(20 * world_size * 6)]
    assert targets == [position % length for position in range(1, 20 * world_size * 6 + 1)]


@pytest.mark.parametrize("world_size, needed", [(1, 5), (4, 17)])
def test_a_corpus_needs_a_sequence_for_every_rank_and_one_token(world_size, needed):
    TokenLoader(ring(needed), 2, 4, 0, world_size)
    line = complaint(TokenLoader, ring(needed - 1), 2, 4, 0, world_size)
    remedy = "pass a longer text, or a smaller --seq-len"
    assert line == f"ring has {needed - 1} tokens to train on, and {needed} are needed: {remedy}"


# A user's file


def test_an_id_past_the_vocabulary_is_refused_when_it_is_drawn():
    ids = np.array([0] * 8 + [VOCAB - 1] + [VOCAB] * 2, dtype=np.uint16)
    loader = TokenLoader(Corpus("ids.bin", ids, None, None), 1, 4)
    loader.next_batch(CPU)
    _, y = loader.next_batch(CPU)
    assert y.max() == VOCAB - 1  # which no signed 16 bits hold
    line = complaint(loader.next_batch, CPU)
    assert line == "ids.bin: it has ids from 0 to 50257, and GPT-2's are from 0 to 50256"


def test_a_text_is_tokenized_as_it_is(text_file, merges):
    ids = all_ids(text_file)
    assert merges.decode(ids) == TEXT
    assert ids.max() == 256  # in a text, <|endoftext|> is text like any other


IDS = np.random.default_rng(1).integers(0, VOCAB, 500)
HEADER_OF_LLM_C = np.array([20240520, 1, 500] + 253 * [0], np.int32).tobytes()
RUSSIAN = "Привет, как дела?\n" * 20


def npy(array):
    """Return the bytes of a file in which numpy has saved an array."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    "name, content, problem",
    [
        ("missing.txt", None, "No such file"),
        ("latin1.txt", b"caf\xe9 au lait", "can't decode byte 0xe9 in position 3"),
        ("a.txt", RUSSIAN.encode("utf-16-le"), "may be one in UTF-16"),
        ("empty.bin", b"", "empty"),
        ("odd.bin", b"\x01\x00\x02", "multiple"),
        ("text.bin", RUSSIAN.encode(), "it is a text, or a pointer of Git LFS"),
        ("cut.npy", b"\x93NUMPY\x01", "EOF"),
        ("table.npy", npy(IDS.reshape(50, 10)), "not a row of ids"),
        ("floats.npy", npy(IDS / 2), "not a row of ids"),
    ],
)
def test_a_bad_file_is_refused_with_the_problem_and_the_remedy(tmp_path, merges, name, content, problem):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    line = complaint(load_tokens, tmp_path / name)
    assert line.startswith(f"--data {tmp_path / name}: ")
    assert problem in line
    assert line.endswith("; pass one file: a text in UTF-8, or GPT-2's ids as a .npy or as a .bin of uint16")


@pytest.mark.parametrize("header", [b"", HEADER_OF_LLM_C])
@pytest.mark.parametrize("ids", [IDS, IDS % 4])  # DNA has few ids
def test_a_bin_of_ids_is_read_with_llm_cs_header_or_without(tmp_path, header, ids):
    (tmp_path / "a.bin").write_bytes(header + ids.astype(np.uint16).tobytes())
    assert all_ids(tmp_path / "a.bin").tolist() == ids.tolist()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64, ">u2"])
def test_an_array_of_numpy_is_read_whatever_its_type(tmp_path, dtype):
    np.save(tmp_path / "a.npy", IDS.astype(dtype))
    x, y = TokenLoader(load_tokens(tmp_path / "a.npy"), 2, 5).next_batch(CPU)
    assert (x.flatten().tolist(), y.flatten().tolist()) == (IDS[:10].tolist(), IDS[1:11].tolist())


# Without the vocabulary


@pytest.mark.parametrize("source", [None, "docs", __file__])
def test_without_tiktoken_only_ids_are_read(monkeypatch, tmp_path, source):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert complaint(load_tokens, source) == "this Python has no tiktoken: type pip install tiktoken"
    np.save(tmp_path / "a.npy", IDS)
    assert all_ids(tmp_path / "a.npy").tolist() == IDS.tolist()


def test_pythons_documentation_is_a_token_a_byte_by_gpt2s_numbers():
    transformers = pytest.importorskip("transformers.convert_slow_tokenizer")
    order = list(transformers.bytes_to_unicode())  # in which GPT-2 numbers the bytes
    text = bytes(order[token] for token in all_ids("docs")).decode()
    assert 'The "assert" statement' in text
    assert [single_bytes().decode_single_token_bytes(token)[0] for token in range(256)] == order


# Downloads


def test_a_download_is_kept_whole_and_needed_once(online, merges, capsys):
    corpus = load_tokens()
    assert (corpus.name, corpus.source) == ("Tiny Shakespeare", None)
    assert capsys.readouterr().err.startswith("downloading Tiny Shakespeare")
    assert merges.decode(all_ids()) == TEXT
    online.assert_called_once_with(data.SHAKESPEARE_URL, timeout=10)  # a silent server is not waited for
    assert capsys.readouterr().err == ""


class FullDisk:
    """Stands in for ids that fill the disk when they are written."""

    def tofile(self, path):
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")


def test_a_download_that_was_half_written_is_not_used(online, merges, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(data, "ids_of_text", lambda content: FullDisk())
        assert load_tokens().source == "docs"
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.unfinished"))
    assert merges.decode(all_ids()) == TEXT


def test_another_text_than_tiny_shakespeare_is_neither_used_nor_kept(online, monkeypatch, capsys):
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", "of another text")  # which the login page of a hotel may be
    for _ in range(2):
        assert load_tokens().source == "docs"
        assert "sent another text" in capsys.readouterr().err


def test_without_a_download_pythons_documentation_takes_its_place(online, capsys):
    online.side_effect = error = http.client.IncompleteRead(b"First")  # which is no OSError
    assert load_tokens().source == "docs"
    assert f"no Tiny Shakespeare ({error}): taking Python's documentation instead\n" in capsys.readouterr().err


def test_without_the_vocabulary_or_a_folder_for_the_cache_it_does_too(online, monkeypatch, text_file):
    monkeypatch.setattr(tiktoken, "get_encoding", mock.Mock(side_effect=OSError("no route")))
    assert load_tokens().source == "docs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(text_file))  # not even root can make a folder in a file
    assert load_tokens().source == "docs"
