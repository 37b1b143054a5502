"""Text to tokens to batches: what is read, what is refused, and what a missing network leaves."""

import hashlib
import http.client
import os
import sys
import urllib.request

import numpy as np
import pytest
import tiktoken
import torch
from conftest import error_of

import data
from data import VOCAB, Corpus, TokenLoader, load_tokens, whole_file

TEXT = "First Citizen:\r\n\tBefore we proceed,   hear the na\u00efve \u2026 \U0001f642 <|endoftext|>\n" * 20
LOADING = "loading GPT-2's vocabulary, or downloading it: LADDER_OFFLINE=1 goes without"


@pytest.fixture
def text_file(tmp_path):
    """TEXT in a file."""
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


@pytest.fixture
def online(monkeypatch, text_file):
    """Downloads are allowed, and TEXT in its file is what the address of Tiny Shakespeare answers with."""
    monkeypatch.delenv("LADDER_OFFLINE")
    monkeypatch.setattr(data, "SHAKESPEARE_URL", text_file.as_uri())
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", hashlib.sha256(TEXT.encode()).hexdigest())


@pytest.fixture
def merges(monkeypatch):
    """A tokenizer of 256 bytes, one merge, "th", and the id 257 for <|endoftext|>, in place of GPT-2's."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256}
    special = {"<|endoftext|>": 257}
    tokenizer = tiktoken.Encoding("small", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": tokenizer}.get)
    return tokenizer


def ring(length):
    """A corpus of the tokens 0, 1, 2, ...: each is its own position."""
    return Corpus("ring", "gpt2", np.arange(length, dtype=np.uint16))


# Batches


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("length", [10, 18, 19, 61])  # 10 tokens are less than one batch of three ranks
def test_ranks_in_turn_read_the_ring_of_tokens_in_order(world_size, length):
    loaders = [TokenLoader(ring(length), 2, 3, rank, world_size) for rank in range(world_size)]
    inputs, targets = [], []
    for _ in range(20):
        for loader in loaders:
            x, y = loader.next_batch()
            assert x.shape == y.shape == (2, 3)
            assert x.dtype == y.dtype == torch.int64
            inputs += x.flatten().tolist()
            targets += y.flatten().tolist()
    assert inputs == [position % length for position in range(20 * world_size * 6)]
    assert targets == [position % length for position in range(1, 20 * world_size * 6 + 1)]


@pytest.mark.parametrize("world_size, needed", [(1, 5), (4, 17)])
def test_a_corpus_needs_a_sequence_for_every_rank_and_one_token(capsys, world_size, needed):
    TokenLoader(ring(needed), 2, 4, 0, world_size)
    line = error_of(capsys, TokenLoader, ring(needed - 1), 2, 4, 0, world_size)
    assert f"ring has {needed - 1} tokens to train on" in line
    assert f"= {needed} are needed: pass a longer text, or a smaller --seq-len" in line


@pytest.mark.parametrize("in_use, first", [(True, 1000), (False, 0)])
def test_a_batch_lies_in_pinned_memory_only_where_cuda_is_in_use(monkeypatch, in_use, first):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda ids: ids + 1000)  # by which the pinned copy is known
    x, y = TokenLoader(ring(9), 1, 4).next_batch()
    assert x.tolist() == [list(range(first, first + 4))]
    assert y.tolist() == [list(range(first + 1, first + 5))]


# A user's file


def test_the_last_tenth_is_held_out(tmp_path):
    np.arange(1005, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    assert load_tokens(tmp_path / "ids.bin").ids.tolist() == list(range(904))  # 904.5, rounded down
    assert load_tokens(tmp_path / "ids.bin", "val").ids.tolist() == list(range(904, 1005))
    assert load_tokens(tmp_path / "ids.bin", "all").ids.tolist() == list(range(1005))


def test_a_large_bin_stays_on_disk_and_a_million_of_its_tokens_are_held_out(tmp_path):
    with (tmp_path / "ids.bin").open("wb") as file:
        file.truncate(10**10)  # sparse: no disk holds as much
    corpus = load_tokens(str(tmp_path / "ids.bin"))
    assert (corpus.name, corpus.tokenizer) == ("ids.bin", "gpt2")
    assert isinstance(corpus.ids, np.memmap)
    assert len(corpus.ids) == 4_500_000_000
    assert len(load_tokens(tmp_path / "ids.bin", "val").ids) == 2**20


def test_an_id_past_the_vocabulary_is_refused_when_it_is_drawn(capsys, tmp_path):
    np.array([0] * 8 + [VOCAB - 1] + [VOCAB] * 2, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    loader = TokenLoader(load_tokens(tmp_path / "ids.bin", "all"), 1, 4)
    loader.next_batch()
    loader.next_batch()  # its last target is the last id of the vocabulary
    line = error_of(capsys, loader.next_batch)
    assert line == "error: ids.bin: id 50257 is past GPT-2's last, 50256: pass GPT-2's ids as uint16"


def test_offline_each_byte_of_a_text_is_a_token(text_file, merges):
    corpus = load_tokens(text_file, "all")
    assert (corpus.name, corpus.tokenizer) == ("text.txt", "bytes")
    assert corpus.ids.dtype == np.uint16
    assert bytes(corpus.ids.tolist()) == TEXT.encode()


def test_a_text_is_tokenized_once_and_known_by_its_content(text_file, online, merges, capsys):
    first = load_tokens(text_file, "all")
    assert first.tokenizer == "gpt2"
    assert merges.decode(first.ids) == TEXT
    assert first.ids.max() == 256  # in a text, <|endoftext|> is text like any other
    assert capsys.readouterr().err == f"{LOADING}\n"  # since tiktoken says nothing, however long it waits

    copy = text_file.with_name("copy.txt")
    copy.write_bytes(TEXT.encode())
    again = load_tokens(copy, "all")
    assert (again.name, again.tokenizer, again.ids.tolist()) == ("copy.txt", "gpt2", first.ids.tolist())
    assert capsys.readouterr().err == ""  # the tokenizer was not asked for

    text_file.write_bytes(TEXT.replace("hear", "fear").encode())  # as long, under the same name
    assert merges.decode(load_tokens(text_file, "all").ids) == TEXT.replace("hear", "fear")


def test_damaged_tokens_in_the_cache_are_made_again(text_file, online, merges):
    load_tokens(text_file)
    [cached] = data.cache_dir().iterdir()
    whole = cached.read_bytes()
    one_byte_of_the_header = whole.replace(b"}", b" ", 1)
    for damaged in (b"", whole[: len(whole) // 2], np.random.default_rng(0).bytes(999), one_byte_of_the_header):
        cached.write_bytes(damaged)
        assert merges.decode(load_tokens(text_file, "all").ids) == TEXT
        assert cached.read_bytes() == whole


@pytest.mark.parametrize(
    "name, content, problem",
    [
        ("missing.txt", None, "there is no such .txt or .bin file"),
        ("corpus.parquet", b"text", "there is no such .txt or .bin file"),
        ("empty.txt", b"", "it is empty"),
        ("empty.bin", b"", "empty"),
        ("latin1.txt", b"caf\xe9 au lait", "can't decode byte 0xe9 in position 3"),
        ("odd.bin", b"\x01\x00\x02", "multiple"),
    ],
)
def test_a_bad_file_is_refused_with_the_problem_and_the_remedy(capsys, tmp_path, name, content, problem):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    line = error_of(capsys, load_tokens, tmp_path / name)
    assert line.startswith(f"error: --data {tmp_path / name}: ")
    assert problem in line
    assert line.endswith("; pass a .txt in UTF-8, or a .bin of GPT-2's ids as uint16")


def test_a_pipe_which_would_be_waited_for_is_refused(capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe.bin")
    assert "there is no such .txt or .bin file" in error_of(capsys, load_tokens, tmp_path / "pipe.bin")


def test_without_tiktoken_the_remedy_is_named(capsys, text_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert "run make setup, or pip install tiktoken" in error_of(capsys, load_tokens, text_file)


# Downloads


def test_a_download_is_kept_whole_and_needed_once(online, merges, monkeypatch):
    first = load_tokens(split="all")
    assert (first.name, first.tokenizer) == ("Tiny Shakespeare", "gpt2")
    assert merges.decode(first.ids) == TEXT
    monkeypatch.setattr(data, "SHAKESPEARE_URL", "file:///gone")
    assert load_tokens(split="all").ids.tolist() == first.ids.tolist()


def test_a_damaged_copy_in_the_cache_is_downloaded_again(online, merges):
    path = data.cache_dir() / "tinyshakespeare.txt"
    path.parent.mkdir(parents=True)
    path.write_bytes(TEXT.encode()[:100])
    assert merges.decode(load_tokens(split="all").ids) == TEXT
    assert path.read_bytes() == TEXT.encode()


def test_a_cache_that_cannot_be_written_is_done_without(online, merges, monkeypatch, text_file):
    monkeypatch.setenv("XDG_CACHE_HOME", str(text_file))  # not even root can make a folder in a file
    assert merges.decode(load_tokens(split="all").ids) == TEXT


def assert_pythons_documentation(corpus):
    assert corpus.name == f"Python {sys.version_info.major}.{sys.version_info.minor} language reference"
    assert corpus.tokenizer == "bytes"
    assert "assert_stmt" in bytes(corpus.ids[:5000].tolist()).decode()


def test_another_text_than_tiny_shakespeare_is_neither_used_nor_kept(online, text_file, capsys):
    text_file.write_text("<html>Log in to this hotel's network")
    assert_pythons_documentation(load_tokens())
    [line] = capsys.readouterr().err.splitlines()
    assert "sent another text" in line
    assert not data.cache_dir().exists()


@pytest.mark.parametrize(
    "error", [OSError("no route"), http.client.IncompleteRead(b"First"), ValueError("proxy URL with no authority")]
)
def test_without_a_network_a_run_goes_on_with_pythons_documentation_and_says_so(online, monkeypatch, capsys, error):
    def urlopen(url, timeout):
        assert timeout <= 30  # a silent server is not waited for
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    assert_pythons_documentation(load_tokens())
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"no download ({error}): training on the bytes of Python's documentation instead"


@pytest.mark.parametrize("error", [OSError("no route to host"), ValueError("Hash mismatch for vocab.bpe")])
def test_without_gpt2s_vocabulary_a_run_goes_on_with_bytes_and_says_so(online, monkeypatch, capsys, error):
    def get_encoding(name):
        raise error

    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    corpus = load_tokens()
    assert (corpus.name, corpus.tokenizer) == ("Tiny Shakespeare", "bytes")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [LOADING, f"no download ({error}): each byte of the text is a token instead"]


@pytest.mark.parametrize("word, tokenizer", [("1", "bytes"), ("0", "gpt2"), ("", "gpt2")])
def test_ladder_offline_forbids_downloads(online, merges, monkeypatch, word, tokenizer):
    monkeypatch.setenv("LADDER_OFFLINE", word)
    corpus = load_tokens()
    assert corpus.tokenizer == tokenizer
    if word == "1":
        assert_pythons_documentation(corpus)


# Files


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file"
    with whole_file(path) as unfinished:
        unfinished.write_text("one")
    with path.open() as reader:
        with whole_file(path) as unfinished:
            unfinished.write_text("two")
        assert reader.read() == "one"  # whoever reads the old file meanwhile reads it to its end
    with pytest.raises(KeyboardInterrupt), whole_file(path) as unfinished:
        unfinished.write_text("thr")
        raise KeyboardInterrupt
    assert path.read_text() == "two"
    assert list(path.parent.iterdir()) == [path]


def test_of_a_link_the_file_that_it_points_to_is_replaced(tmp_path):
    (tmp_path / "link").symlink_to("file")
    with whole_file(tmp_path / "link") as unfinished:
        unfinished.write_text("one")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "one"
