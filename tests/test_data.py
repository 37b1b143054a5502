"""Text to tokens to batches: what is read, what is refused, what a broken network or cache leaves behind."""

import contextlib
import hashlib
import os
import re
import runpy
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tiktoken
import torch

import data
from data import VOCAB, InputError, TokenLoader, load_tokens

TEXT = "First Citizen:\r\n\n\tBefore we proceed,   hear the na\u00efve \u2026 \U0001f642 <|endoftext|>\n" * 20
PAGE, SHA256 = TEXT.encode(), hashlib.sha256(TEXT.encode()).hexdigest()
MERGES = "#version: 0.2\nh e\n\u0120 t\n\u0120t he\n".encode()  # a vocabulary of 3 merges; \u0120 is the space
VOCABULARY = Path(os.environ.get("TIKTOKEN_CACHE_DIR", "none"))  # GPT-2's own, for those who have it
RING = np.arange(100, dtype=np.uint16).view(data.Tokens)
NEVER = Mock(side_effect=AssertionError("this must not be called"))

BAD = [
    ("No such file", {"missing.txt": None, "missing.bin": None}),
    ("not a regular .txt or .bin file", {"folder.txt": Path.mkdir, "corpus": b"text", "corpus.parquet": b"text"}),
    ("not a regular .txt or .bin file", {"pipe.txt": os.mkfifo, "pipe.bin": os.mkfifo}),
    ("empty", {"empty.txt": b"", "empty.bin": b""}),
    ("position 3", {"latin1.txt": b"caf\xe9 au lait"}),
    ("multiple", {"odd.bin": b"\x01\x00\x02"}),
    ("50257 is past GPT-2's last, 50256", {"past.bin": np.array([5, VOCAB, 7], dtype=np.uint16).tobytes()}),
]

OK = b"HTTP/1.0 200 OK\r\n\r\n"
HEAD = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(PAGE)
BROKEN = {
    "other content": [OK, PAGE.replace(b"hear", b"fear")],
    "cut": [HEAD, PAGE[:100]],
    "cut chunk": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n", PAGE[:100]],
    "not HTTP": [b"220 this is \xff no web server\r\n\r\n"],
    "not found": [b"HTTP/1.0 404 Not Found\r\n\r\n"],
    "stalled": [HEAD, PAGE[:100], *[b""] * 1000],
    "dripping": [HEAD, *(bytes([b]) for b in PAGE)],
}


@pytest.fixture(autouse=True)
def text_file(monkeypatch, tmp_path):
    """TEXT in a file; no network, no vocabulary, and nothing kept from the test before."""
    monkeypatch.setattr(data, "offline", True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    data.tokenizer.cache_clear()
    (path := tmp_path / "text.txt").write_bytes(PAGE)
    return path


@pytest.fixture
def merges_file(tmp_path, monkeypatch):
    """The three merges in place of GPT-2's, in tiktoken's default cache."""
    monkeypatch.setattr(data, "VOCAB_SHA256", hashlib.sha256(MERGES).hexdigest())
    path = tmp_path / "data-gym-cache" / hashlib.sha1(data.VOCAB_URL.encode()).hexdigest()
    data.write_whole(path, MERGES)
    return path


def one_line_error(*parts):
    """Expects an InputError whose message is one line that holds the parts."""
    return pytest.raises(InputError, match=r"\A" + "".join(f"(?=.*{re.escape(str(part))})" for part in parts) + r".*\Z")


def serve(*pieces):
    """The address of a server that answers one request with these pieces, one every 20 ms."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listener.accept()[0] as connection, contextlib.suppress(OSError):  # the client may hang up
            connection.recv(65536)
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.02)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("spare", [1, 2, 7, 50])
def test_ranks_in_turn_read_the_ring_of_tokens_in_order(world_size, spare):
    B, T = 2, 3
    length = world_size * B * T + spare
    ranks = [TokenLoader(RING[:length], B, T, rank, world_size) for rank in range(world_size)]
    batches = [loader.next_batch() for _ in range(40) for loader in ranks]
    for tensor in sum(batches, ()):
        assert tensor.dtype == torch.int64 and tensor.shape == (B, T) and tensor.is_contiguous()
    xs, ys = (torch.cat(tensors).flatten().tolist() for tensors in zip(*batches, strict=True))
    assert xs == [i % length for i in range(len(xs))]
    assert ys == [(i + 1) % length for i in range(len(xs))]


@pytest.mark.parametrize("world_size, need", [(1, 9), (4, 33)])
def test_a_corpus_needs_a_batch_for_every_rank_and_one_token(world_size, need):
    for rank in range(world_size):
        TokenLoader(RING[:need], 2, 4, rank, world_size).next_batch()
        with one_line_error(f"{need - 1} tokens", f"{world_size} x 2", f"need {need}", "--batch-size", "--seq-len"):
            TokenLoader(RING[: need - 1], 2, 4, rank, world_size)


@pytest.mark.parametrize("in_use", [True, False])
def test_batches_are_pinned_only_when_cuda_is_in_use(monkeypatch, in_use):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory := Mock(return_value=torch.arange(9)))
    TokenLoader(RING[:9], 2, 4).next_batch()
    assert pin_memory.called == in_use


@pytest.mark.parametrize("problem, files", BAD)
def test_a_bad_data_file_is_one_line_with_name_and_remedy(tmp_path, problem, files):
    for name, content in files.items():
        if callable(content):
            content(tmp_path / name)
        elif content is not None:
            (tmp_path / name).write_bytes(content)
        with one_line_error(tmp_path / name, problem, "pass a .txt in UTF-8 or a .bin of GPT-2's uint16 ids"):
            load_tokens(tmp_path / name)


def test_a_bin_is_memory_mapped_and_its_last_tenth_held_out(tmp_path):
    np.arange(VOCAB - 1005, VOCAB, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    train, val, both = (load_tokens(str(tmp_path / "ids.bin"), split) for split in ("train", "val", "all"))
    assert both.tolist() == list(range(VOCAB - 1005, VOCAB))
    assert load_tokens(tmp_path / "ids.bin").tolist() == train.tolist() == both[:904].tolist()
    assert val.tolist() == both[904:].tolist()
    for tokens in (train, val, both):
        assert isinstance(tokens.base, np.memmap) and tokens.ndim == 1 and tokens.dtype == np.uint16
        assert (tokens[:3].corpus, tokens[:3].tokenizer) == ("ids.bin", "gpt2")


@pytest.mark.parametrize("name", ["gpt2", "gpt2-bytes"])
def test_a_text_is_tokenized_once_and_cached_by_content(text_file, merges_file, monkeypatch, name):
    if name == "gpt2-bytes":
        merges_file.unlink()
    first = load_tokens(text_file, "all")
    assert (first.corpus, first.tokenizer) == ("text.txt", name) and data.tokenizer().decode(first) == TEXT
    text_file.write_text("another content under the same name")
    assert data.tokenizer().decode(load_tokens(text_file, "all")) == "another content under the same name"
    copy = text_file.with_name("copy.txt")  # the same content under another name
    copy.write_bytes(PAGE)
    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary", NEVER)
    merges_file.unlink(missing_ok=True)  # cached tokens of gpt2 need no vocabulary
    data.tokenizer.cache_clear()
    again = load_tokens(copy, "all")
    assert again.tolist() == first.tolist() and isinstance(again.base, np.memmap)
    assert (again.corpus, again.tokenizer) == ("copy.txt", name)


def test_a_damaged_token_cache_is_not_read_but_replaced(text_file):
    expected = load_tokens(text_file, "all").tolist()
    [cached] = data.cache_dir().iterdir()
    content = cached.read_bytes()
    (cached.parent / f"tokens-{SHA256[:16]}-gpt2.bin").write_bytes(bytes(80))  # the format without a hash
    for damaged in (b"", content[:-20], bytes(len(content)), content[:32] + bytes(len(content) - 32), content[32:]):
        cached.write_bytes(damaged)
        assert load_tokens(text_file, "all").tolist() == expected and cached.read_bytes() == content


def test_a_cache_closed_to_this_user_is_passed_over(merges_file, monkeypatch):
    denied = Mock(side_effect=PermissionError(13, "Permission denied"))  # faked, since root may read everything
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "closed")
    monkeypatch.setattr(Path, "is_file", lambda path: path == merges_file or denied())
    monkeypatch.setattr(np, "memmap", denied)
    tokens = load_tokens()
    assert tokens.tokenizer == "gpt2" and "language reference" in tokens.corpus


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path, text_file):
    path = tmp_path / "new" / "file"
    data.write_whole(path, b"one")
    data.write_whole(path, b"t", np.frombuffer(b"wo", dtype=np.uint8))
    assert path.stat().st_mode == text_file.stat().st_mode  # what the umask leaves
    with pytest.raises(TypeError):
        data.write_whole(path, b"three", None)
    assert path.read_bytes() == b"two" and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("value, offline", [("1", True), ("", False)])
def test_offline_the_corpus_is_pythons_and_the_tokens_bytes(monkeypatch, capsys, value, offline):
    monkeypatch.setenv("LADDER_OFFLINE", value)
    assert runpy.run_path(data.__file__)["offline"] is offline
    monkeypatch.setattr(data, "download", NEVER)
    tokens = load_tokens()
    assert tokens.corpus == f"Python {sys.version_info[0]}.{sys.version_info[1]} language reference"
    assert tokens.tokenizer == data.tokenizer().name == "gpt2-bytes"
    assert "assert_stmt" in data.tokenizer().decode(tokens[:5000])
    assert tokens.max() < 256 and len(tokens) > 300_000 and load_tokens().tolist() == tokens.tolist()
    assert capsys.readouterr().err == ""  # nothing failed, as nothing was tried


def test_byte_ids_are_those_of_hugging_faces_gpt2():
    order = [bytes([b]) for b in pytest.importorskip("transformers.convert_slow_tokenizer").bytes_to_unicode()]
    assert [data.byte_tokenizer().encode_single_token(b) for b in order] == list(range(256))
    ids = data.byte_tokenizer().encode_ordinary(text := TEXT + "".join(map(chr, range(256))))
    assert b"".join(order[i] for i in ids).decode() == text == data.byte_tokenizer().decode(ids)


@pytest.mark.parametrize("variable", ["TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"])
def test_the_tokenizer_equals_tiktokens_gpt2(monkeypatch, variable):
    for url in (data.VOCAB_URL, data.VOCAB_URL.replace("vocab.bpe", "encoder.json")):  # tiktoken would download them
        if not (VOCABULARY / hashlib.sha1(url.encode()).hexdigest()).is_file():
            pytest.skip("GPT-2's vocabulary is not on this machine: name a folder that has it in TIKTOKEN_CACHE_DIR")
    monkeypatch.setenv(variable, str(VOCABULARY))
    expected, mine = tiktoken.get_encoding("gpt2"), data.tokenizer()
    for attribute in ("name", "n_vocab", "_mergeable_ranks", "_special_tokens", "_pat_str"):
        assert getattr(mine, attribute) == getattr(expected, attribute)
    assert mine.n_vocab == VOCAB and mine.encode_ordinary("Hello, world") == [15496, 11, 995]


def test_merges_are_used_only_if_their_hash_is_right(text_file, merges_file, monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", NEVER)  # its own download has no timeout
    [t] = data.byte_tokenizer().encode_ordinary("t")
    assert data.tokenizer().encode_ordinary("the the") == [t, 256, 258]
    assert data.tokenizer().decode([VOCAB - 1]) == "<|endoftext|>"
    assert load_tokens(text_file).max() < VOCAB - 1  # in a text it is text
    merges_file.write_bytes(MERGES[:-5])
    data.tokenizer.cache_clear()
    assert data.tokenizer().name == "gpt2-bytes"


def test_without_tiktoken_the_remedy_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    for function in (load_tokens, data.tokenizer, data.byte_tokenizer):
        with one_line_error("pip install tiktoken", "make setup"):
            function()


@pytest.mark.parametrize("pieces", BROKEN.values(), ids=BROKEN)
def test_a_broken_download_changes_nothing_and_is_one_line(monkeypatch, capsys, pieces):
    path = data.cache_dir() / "tinyshakespeare.txt"
    data.write_whole(path, b"from before")
    monkeypatch.setattr(data, "offline", False)
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", SHA256)
    monkeypatch.setattr(data, "SHAKESPEARE_URL", serve(*pieces))
    monkeypatch.setattr(data.download, "__defaults__", (0.3, 0.3))  # timeout and limit, in seconds
    began = time.monotonic()
    assert "language reference" in load_tokens().corpus and time.monotonic() - began < 5
    assert load_tokens().tokenizer == "gpt2-bytes"  # and nothing more is tried
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and err.startswith("no download (") and err.isascii()  # LC_ALL=C takes no other
    assert path.read_bytes() == b"from before" and len(list(data.cache_dir().iterdir())) == 2


@pytest.mark.parametrize("kept", [True, False])
def test_downloads_are_used_and_kept_if_they_can_be(text_file, merges_file, monkeypatch, kept):
    monkeypatch.setattr(data, "offline", False)
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", SHA256)
    monkeypatch.setattr(data, "SHAKESPEARE_URL", serve(OK, PAGE))
    monkeypatch.setattr(data, "VOCAB_URL", serve(OK, MERGES))
    if not kept:
        monkeypatch.setenv("XDG_CACHE_HOME", str(text_file))  # not even root can make a folder in a file
    for _ in range(1 + kept):
        data.tokenizer.cache_clear()
        tokens = load_tokens(None, "all")
        assert (tokens.corpus, tokens.tokenizer, data.tokenizer().decode(tokens)) == ("Tiny Shakespeare", "gpt2", TEXT)
        monkeypatch.setattr(data, "download", NEVER)
    assert load_tokens(text_file).corpus == "Tiny Shakespeare"  # known by its content
