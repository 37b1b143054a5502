"""Text to tokens to batches: what is read, what is refused, what a broken network leaves behind."""

import contextlib
import hashlib
import http.server
import math
import os
import platform
import tempfile
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from data import VOCAB, InputError, TokenLoader, load_tokens

# GPT-2's vocabulary, wherever it is on this machine
VOCABULARY_FILES = [hashlib.sha1(url.encode()).hexdigest() for url in data.VOCAB_SHA256]
VOCABULARY = next(
    (
        Path(place)
        for place in (
            os.environ.get("TIKTOKEN_CACHE_DIR"),
            os.environ.get("DATA_GYM_CACHE_DIR"),
            Path(tempfile.gettempdir(), "data-gym-cache"),
            data.cache_dir() / "tiktoken",
        )
        if place and all(Path(place, name).is_file() for name in VOCABULARY_FILES)
    ),
    None,
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No network, no vocabulary on this machine, and nothing remembered from the test before."""
    monkeypatch.setattr(data, "offline", True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    tokenizer = data.tokenizer  # a test may put another in its place
    tokenizer.cache_clear()
    yield
    tokenizer.cache_clear()


def tokens_of(ids):
    return data._named(np.asarray(ids, dtype=np.uint16), "a test", "gpt2")


def bin_file(path, ids):
    np.asarray(ids, dtype=np.uint16).tofile(path)
    return path


def everything_under(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


# --- batches


def test_y_is_x_one_token_ahead_in_the_order_of_the_corpus():
    loader = TokenLoader(tokens_of(range(100)), batch_size=3, seq_len=4)
    for step in range(2):
        x, y = loader.next_batch()
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (3, 4)
        assert x.is_contiguous() and y.is_contiguous()
        assert x.flatten().tolist() == list(range(12 * step, 12 * step + 12))
        assert torch.equal(y, x + 1)
        assert x.is_pinned() == y.is_pinned() == torch.cuda.is_available()


@pytest.mark.parametrize("length", [13, 14, 24, 25, 29, 101])
def test_every_token_is_a_target_exactly_once_in_an_epoch(length):
    B, T = 3, 4
    loader = TokenLoader(tokens_of(range(length)), B, T)
    epochs = B * T // math.gcd(length, B * T)  # so many end with a whole batch
    xs, ys = zip(*(loader.next_batch() for _ in range(epochs * length // (B * T))), strict=True)
    x, y = torch.cat(xs).flatten(), torch.cat(ys).flatten()
    assert torch.equal(y, (x + 1) % length)  # the ring: after the last token comes the first
    for epoch in y.view(epochs, length):
        assert sorted(epoch.tolist()) == list(range(length))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("spare", [1, 2, 7, 50])
def test_ranks_read_in_one_step_what_one_rank_reads_in_as_many_steps(world_size, spare):
    B, T = 2, 3
    tokens = tokens_of(range(world_size * B * T + spare))
    alone = TokenLoader(tokens, B, T)
    ranks = [TokenLoader(tokens, B, T, rank, world_size) for rank in range(world_size)]
    for _ in range(20):
        seen = set()
        for rank in ranks:
            x, y = rank.next_batch()
            expected_x, expected_y = alone.next_batch()
            assert torch.equal(x, expected_x) and torch.equal(y, expected_y)
            assert seen.isdisjoint(x.flatten().tolist())
            seen |= set(x.flatten().tolist())
        assert len(seen) == world_size * B * T


def test_a_corpus_of_one_batch_and_one_token_is_enough_and_one_token_less_is_not():
    x, y = TokenLoader(tokens_of(range(9)), 2, 4).next_batch()
    assert y.flatten().tolist() == list(range(1, 9))
    with pytest.raises(InputError) as error:
        TokenLoader(tokens_of(range(8)), 2, 4)
    is_one_clear_line(error, "8 tokens", "9", "--batch-size", "--seq-len")


def test_a_corpus_that_is_enough_for_one_rank_may_be_too_short_for_four():
    TokenLoader(tokens_of(range(20)), 2, 4)
    for rank in range(4):
        with pytest.raises(InputError) as error:
            TokenLoader(tokens_of(range(20)), 2, 4, rank, world_size=4)
        is_one_clear_line(error, "20 tokens", "33", "4 x 2", "--batch-size", "--seq-len")


# --- files


def is_one_clear_line(error, *parts):
    message = str(error.value)
    assert len(message.splitlines()) == 1
    for part in parts:
        assert str(part) in message


@pytest.mark.parametrize(
    "name, content, parts",
    [
        ("missing.txt", None, ["No such file", "check the path"]),
        ("missing.bin", None, ["No such file", "check the path"]),
        ("folder.txt", "folder", ["check the path"]),
        ("folder.bin", "folder", ["check the path"]),
        ("folder", "folder", [".txt", ".bin"]),
        ("empty.txt", b"", ["empty"]),
        ("empty.bin", b"", ["empty"]),
        ("latin1.txt", b"caf\xe9 au lait", ["UTF-8", "byte 3", "convert"]),
        ("picture.txt", b"\x89PNG\r\n\x1a\n\x00", ["UTF-8", "byte 0", "convert"]),
        ("odd.bin", b"\x01\x00\x02", ["odd", "uint16"]),
        ("past.bin", np.array([5, 50257, 7], dtype=np.uint16).tobytes(), ["50257", "50256", "tokenize"]),
        ("corpus.parquet", b"text", [".txt", ".bin"]),
        ("corpus", b"text", [".txt", ".bin"]),
    ],
)
def test_a_file_that_is_no_corpus_is_refused_in_one_line_with_its_name_and_the_remedy(tmp_path, name, content, parts):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        load_tokens(path)
    is_one_clear_line(error, path, *parts)
    assert isinstance(error.value, ValueError)


def test_the_last_tenth_of_a_corpus_is_held_out(tmp_path):
    path = bin_file(tmp_path / "ids.bin", range(1005))
    train, val, both = (load_tokens(path, split) for split in ("train", "val", "all"))
    assert load_tokens(path).tolist() == train.tolist() == list(range(904))
    assert val.tolist() == list(range(904, 1005))
    assert both.tolist() == list(range(1005))
    assert train.dtype == val.dtype == both.dtype == np.uint16


def is_memory_mapped(array):
    while array is not None:
        if isinstance(array, np.memmap):
            return True
        array = getattr(array, "base", None)
    return False


def test_a_bin_is_mapped_from_disk_and_knows_its_names(tmp_path):
    tokens = load_tokens(str(bin_file(tmp_path / "ids.bin", [0, 1, VOCAB - 1] * 10)))
    assert is_memory_mapped(tokens) and tokens.ndim == 1
    assert (tokens.corpus, tokens.tokenizer) == ("ids.bin", "gpt2")
    assert (tokens[:3].corpus, tokens[:3].tokenizer) == ("ids.bin", "gpt2")


def test_a_text_is_tokenized_once_and_cached_by_its_content(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time… " * 10)
    first = load_tokens(path, "all")
    assert (first.corpus, first.tokenizer) == ("text.txt", "gpt2-bytes")
    assert data.tokenizer().decode(first.tolist()) == path.read_text()
    kept = everything_under(tmp_path / "cache")
    assert len(kept) == 1 and kept[0].endswith("-gpt2-bytes.bin")

    copy = tmp_path / "copy.txt"  # the same content by another name
    copy.write_bytes(path.read_bytes())
    with monkeypatch.context() as patched:
        patched.setattr(data.tokenizer().__class__, "encode_ordinary", lambda *args: pytest.fail("tokenized again"))
        again = load_tokens(copy, "all")
    assert again.tolist() == first.tolist() and again.corpus == "copy.txt"
    assert is_memory_mapped(again)

    path.write_text("Twice upon a time… " * 10)  # another content by the same name
    assert data.tokenizer().decode(load_tokens(path, "all").tolist()) == path.read_text()
    assert len(everything_under(tmp_path / "cache")) == 2


def test_a_damaged_cache_is_not_believed(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time " * 10)
    expected = load_tokens(path, "all").tolist()
    (cached,) = (tmp_path / "cache").rglob("*.bin")
    for rubbish in (b"", b"\x01", b"\xff\xff" * 4):
        cached.write_bytes(rubbish)
        assert load_tokens(path, "all").tolist() == expected


def test_a_cache_that_cannot_be_written_costs_no_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # also root can't make a folder in here
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time " * 10)
    assert data.tokenizer().decode(load_tokens(path, "all").tolist()) == path.read_text()
    assert len(load_tokens()) > 100_000


def test_a_file_is_written_whole_or_left_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "new" / "file"
    data.write_whole(path, b"one")
    assert path.read_bytes() == b"one"
    data.write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        data.write_whole(path, b"three")
    assert path.read_bytes() == b"two" and everything_under(tmp_path) == ["new/file"]


# --- without a network


def test_offline_the_text_is_pythons_and_the_tokenizer_knows_bytes(capsys):
    tokens = load_tokens()
    version = ".".join(platform.python_version_tuple()[:2])
    assert tokens.corpus == f"Python {version} language reference"
    assert tokens.tokenizer == data.tokenizer().name == "gpt2-bytes"
    assert tokens.max() < 256 and len(tokens) > 300_000
    text = data.tokenizer().decode(tokens[:5000].tolist())
    assert "assert_stmt" in text and "\n" in text
    assert load_tokens().tolist() == tokens.tolist()
    assert capsys.readouterr().err == ""  # offline by wish: nothing failed, so nothing is told


def test_byte_level_ids_are_those_that_gpt2_gives_to_single_bytes():
    gpt2 = pytest.importorskip("transformers.models.gpt2.tokenization_gpt2")
    if hasattr(gpt2, "bytes_to_unicode"):
        order = list(gpt2.bytes_to_unicode())
    else:
        order = list(pytest.importorskip("transformers.convert_slow_tokenizer").bytes_to_unicode())
    assert sorted(order) == list(range(256))
    assert [data.tokenizer().encode_single_token(bytes([b])) for b in order] == list(range(256))


def test_byte_level_text_round_trips():
    text = "To be, or not\tto be:\r\n\n   naïve – 漢字 🙂 <|endoftext|>\x00" + "".join(map(chr, range(256)))
    ids = data.tokenizer().encode_ordinary(text)
    assert len(ids) == len(text.encode())
    assert data.tokenizer().decode(ids) == text


def test_a_failing_download_is_told_in_one_line_and_only_once(tmp_path, monkeypatch, capsys):
    asked = []

    def no_network(url, sha256, path):
        asked.append(url)
        raise OSError("Name or service not known")

    monkeypatch.setattr(data, "offline", False)
    monkeypatch.setattr(data, "download", no_network)
    tokens = load_tokens()
    assert "language reference" in tokens.corpus and tokens.tokenizer == "gpt2-bytes"
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1 and "Name or service not known" in told
    assert len(asked) == 1  # the first failure ends all tries
    load_tokens()
    assert len(asked) == 1 and capsys.readouterr().err == ""


def test_the_environment_can_forbid_every_download(monkeypatch):
    monkeypatch.setattr(data, "download", lambda *args: pytest.fail("a download was tried"))
    assert os.environ["LADDER_OFFLINE"] == "1"  # set in conftest before data was imported
    assert "language reference" in load_tokens().corpus


# --- with a network, on this machine alone


@pytest.fixture
def server(monkeypatch):
    """server(answer) -> the address of a page; `answer(handler)` sends it."""
    running, closing = [], threading.Event()

    def start(answer):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                with contextlib.suppress(OSError):  # the client may hang up
                    answer(self)

            def log_message(self, *args):
                pass

        Handler.closing = closing
        running.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        running[-1].daemon_threads = True
        threading.Thread(target=running[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_port}/page"

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(data, "offline", False)
    yield start
    closing.set()
    for one in running:
        one.shutdown()
        one.server_close()


PAGE = b"Before we proceed any further, hear me speak.\n" * 200
SHA256 = hashlib.sha256(PAGE).hexdigest()


def whole(handler, content=PAGE):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def other(handler):
    whole(handler, PAGE.replace(b"speak", b"sneak"))


def cut(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(PAGE)))
    handler.end_headers()
    handler.wfile.write(PAGE[: len(PAGE) // 2])


def cut_chunked(handler):
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n%s\r\n" % (1000, PAGE[:1000]))
    handler.close_connection = True


def stalled(handler):
    cut(handler)
    handler.wfile.flush()
    handler.closing.wait(20)


def dripping(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(PAGE)))
    handler.end_headers()
    for byte in PAGE:
        handler.wfile.write(bytes([byte]))
        if handler.closing.wait(0.02):
            return


def no_http(handler):
    handler.wfile.write(b"220 this is no web server\r\n\r\n")


def not_found(handler):
    handler.send_error(404)


def test_a_download_is_kept_and_not_asked_for_again(server, tmp_path):
    asked = []

    def answer(handler):
        asked.append(handler.path)
        whole(handler)

    url, path = server(answer), tmp_path / "deep" / "down" / "page.txt"
    assert data._fetch(url, SHA256, path) == PAGE
    assert data._fetch(url, SHA256, path) == PAGE
    assert path.read_bytes() == PAGE and asked == ["/page"]
    assert everything_under(tmp_path) == ["deep/down/page.txt"]
    path.write_bytes(PAGE[:-1])  # damaged since: fetched anew
    assert data._fetch(url, SHA256, path) == PAGE and path.read_bytes() == PAGE and len(asked) == 2


@pytest.mark.parametrize("answer", [other, cut, cut_chunked, stalled, dripping, no_http, not_found])
def test_a_download_that_fails_raises_oserror_and_leaves_nothing_behind(server, tmp_path, answer):
    url, began = server(answer), time.monotonic()
    with pytest.raises(OSError):
        data.download(url, SHA256, tmp_path / "page.txt", timeout=0.3, limit=0.3)
    assert time.monotonic() - began < 5
    assert everything_under(tmp_path) == []


def test_a_failed_download_leaves_the_file_that_is_there(server, tmp_path):
    path = tmp_path / "page.txt"
    path.write_bytes(b"from before")
    with pytest.raises(OSError, match="sha256"):
        data.download(server(other), SHA256, path)
    assert path.read_bytes() == b"from before"


@pytest.mark.parametrize("answer", [other, cut, cut_chunked, no_http, not_found])
def test_a_download_that_fails_midway_costs_one_line_and_the_run_goes_on(server, monkeypatch, tmp_path, capsys, answer):
    monkeypatch.setattr(data, "SHAKESPEARE_URL", server(answer))
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", SHA256)
    tokens = load_tokens()
    assert "language reference" in tokens.corpus
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert all(name.endswith("-gpt2-bytes.bin") for name in everything_under(tmp_path / "cache"))


def test_the_default_corpus_is_downloaded_tokenized_and_kept(server, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(data, "SHAKESPEARE_URL", server(whole))
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", SHA256)
    monkeypatch.setattr(data, "VOCAB_SHA256", {server(not_found): SHA256})
    tokens = load_tokens(None, "all")
    assert tokens.corpus == "Tiny Shakespeare" and tokens.tokenizer == "gpt2-bytes"
    assert data.tokenizer().decode(tokens.tolist()).encode() == PAGE
    assert len(capsys.readouterr().err.splitlines()) == 1  # the vocabulary was not to be had

    monkeypatch.setattr(data, "download", lambda *args: pytest.fail("downloaded again"))
    assert load_tokens(None, "all").corpus == "Tiny Shakespeare"
    (tmp_path / "copy.txt").write_bytes(PAGE)  # the same text by another way has the same name
    assert load_tokens(tmp_path / "copy.txt").corpus == "Tiny Shakespeare"


def test_a_download_that_cannot_be_kept_is_used_all_the_same(server, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(data, "SHAKESPEARE_URL", server(whole))
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", SHA256)
    monkeypatch.setattr(data, "VOCAB_SHA256", {server(not_found): SHA256})
    assert load_tokens().corpus == "Tiny Shakespeare"


def test_tiktoken_is_handed_a_folder_only_where_the_checked_vocabulary_lies(server, monkeypatch, tmp_path):
    """It would download by itself else, and has no timeout."""
    handed = []

    def gpt2_from(place):
        handed.append({path.name for path in Path(place).iterdir()})
        return types.SimpleNamespace(name="gpt2")

    urls = [server(whole), server(whole)]
    names = {hashlib.sha1(url.encode()).hexdigest() for url in urls}
    monkeypatch.setattr(data, "VOCAB_SHA256", dict.fromkeys(urls, SHA256))
    monkeypatch.setattr(data, "_gpt2_from", gpt2_from)
    assert data.tokenizer().name == "gpt2" and handed == [names]  # downloaded
    data.tokenizer.cache_clear()
    monkeypatch.setattr(data, "download", lambda *args: pytest.fail("downloaded again"))
    assert data.tokenizer().name == "gpt2" and handed == [names, names]  # found


def test_a_vocabulary_that_cannot_be_kept_gives_way_to_bytes(server, monkeypatch, tmp_path):
    def full(*args):
        raise OSError("no space left")

    (data.cache_dir() / "tiktoken").mkdir(parents=True)
    monkeypatch.setattr(data, "write_whole", full)
    monkeypatch.setattr(data, "VOCAB_SHA256", {server(whole): SHA256})
    monkeypatch.setattr(data, "_gpt2_from", lambda place: pytest.fail("tiktoken would download by itself"))
    assert data.tokenizer().name == "gpt2-bytes"


# --- with GPT-2's own vocabulary


@pytest.fixture
def gpt2(monkeypatch):
    """GPT-2's encoding, where its files are on this machine."""
    if VOCABULARY is None:
        pytest.skip("GPT-2's vocabulary is not on this machine: name a folder that has it in TIKTOKEN_CACHE_DIR")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(VOCABULARY))
    return data.tokenizer()


def test_gpt2s_vocabulary_is_found_where_the_environment_names_it(gpt2, monkeypatch):
    assert gpt2.name == "gpt2" and gpt2.n_vocab == VOCAB
    assert gpt2.encode_ordinary("Hello, world") == [15496, 11, 995]
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(VOCABULARY)
    monkeypatch.setenv("DATA_GYM_CACHE_DIR", os.environ.pop("TIKTOKEN_CACHE_DIR"))
    data.tokenizer.cache_clear()
    assert data.tokenizer().name == "gpt2"
    assert "TIKTOKEN_CACHE_DIR" not in os.environ


def test_the_byte_level_tokenizer_agrees_with_gpt2s(gpt2, monkeypatch):
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    data.tokenizer.cache_clear()
    bytes_alone = data.tokenizer()
    assert bytes_alone.name == "gpt2-bytes"
    for b in range(256):
        assert bytes_alone.encode_single_token(bytes([b])) == gpt2.encode_single_token(bytes([b]))


def test_gpt2_tokens_are_cached_and_read_without_the_vocabulary(gpt2, monkeypatch, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("First Citizen:\nBefore we proceed any further, hear me speak.\n<|endoftext|>" * 5)
    tokens = load_tokens(path, "all")
    assert tokens.tokenizer == "gpt2" and gpt2.decode(tokens.tolist()) == path.read_text()
    assert tokens.max() < VOCAB - 1  # <|endoftext|> in a text is text
    monkeypatch.setattr(data, "tokenizer", lambda: pytest.fail("the vocabulary was asked for"))
    again = load_tokens(path, "all")
    assert again.tolist() == tokens.tolist() and again.tokenizer == "gpt2"


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_vocabulary_that_is_damaged_is_not_used(gpt2, monkeypatch, tmp_path, damage):
    for name in VOCABULARY_FILES:
        (tmp_path / name).write_bytes((VOCABULARY / name).read_bytes())
    if damage == "missing":
        (tmp_path / VOCABULARY_FILES[0]).unlink()
    else:
        (tmp_path / VOCABULARY_FILES[0]).write_bytes(b"#version: 0.2\n")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    data.tokenizer.cache_clear()
    assert data.tokenizer().name == "gpt2-bytes"
