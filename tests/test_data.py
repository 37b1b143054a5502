"""Text to tokens to batches: what is read, what is refused, what a broken network or cache leaves behind."""

import contextlib
import hashlib
import http.client
import os
import runpy
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tiktoken
import torch

import data
from data import VOCAB, InputError, TokenLoader, load_tokens

TEXT = "First Citizen:\r\n\n\tBefore we proceed,   hear the na\u00efve \u2026 \U0001f642 <|endoftext|>\n" * 20
CONTENT = TEXT.encode()
SHA256 = hashlib.sha256(CONTENT).hexdigest()

# A vocabulary of three merges, written as GPT-2's is: \u0120 stands for the space.
MERGES = "#version: 0.2\nh e\n\u0120 t\n\u0120t he\n".encode()

VOCABULARY = Path(os.environ.get("TIKTOKEN_CACHE_DIR", "none"))  # GPT-2's own, for those who have it


@pytest.fixture(autouse=True)
def fresh_machine(monkeypatch, tmp_path):
    """A machine without a network, on which nothing is cached and no test before this one left anything."""
    monkeypatch.setattr(data, "offline", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    data.tokenizer.cache_clear()


@pytest.fixture
def text_file(tmp_path):
    """TEXT in a file."""
    path = tmp_path / "text.txt"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def merges_file(tmp_path, monkeypatch):
    """The three merges in place of GPT-2's 50,000, in tiktoken's default cache."""
    monkeypatch.setattr(data, "VOCAB_SHA256", hashlib.sha256(MERGES).hexdigest())
    path = tmp_path / "data-gym-cache" / hashlib.sha1(data.VOCAB_URL.encode()).hexdigest()
    path.parent.mkdir()
    path.write_bytes(MERGES)
    return path


def ring(length):
    """Tokens 0, 1, 2, ...: each is its own position."""
    return np.arange(length, dtype=np.uint16).view(data.Tokens)


def message_of_input_error(function, *arguments):
    """The message of the InputError that this call must raise. It must be one printable line."""
    with pytest.raises(InputError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert message.isprintable()
    return message


def must_not_be_called(*arguments):
    raise AssertionError("this must not be called")


def is_memory_mapped(array):
    """Whether the numbers of an array, which may be a view of a view, lie in a mapped file."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return isinstance(array, np.memmap)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("spare", [1, 2, 7, 50])
def test_ranks_in_turn_read_the_ring_of_tokens_in_order(world_size, spare):
    batch_size, seq_len = 2, 3
    length = world_size * batch_size * seq_len + spare
    loaders = [TokenLoader(ring(length), batch_size, seq_len, rank, world_size) for rank in range(world_size)]
    inputs = []
    targets = []
    for _ in range(40):
        for loader in loaders:
            x, y = loader.next_batch()
            inputs += x.flatten().tolist()
            targets += y.flatten().tolist()
    assert inputs == [position % length for position in range(40 * world_size * 6)]
    assert targets == [position % length for position in range(1, 40 * world_size * 6 + 1)]


def test_a_batch_is_two_contiguous_int64_tensors():
    for tensor in TokenLoader(ring(100), 2, 3).next_batch():
        assert tensor.dtype == torch.int64
        assert tensor.shape == (2, 3)
        assert tensor.is_contiguous()


@pytest.mark.parametrize("world_size, need", [(1, 5), (4, 17)])
def test_a_corpus_needs_a_sequence_for_every_rank_and_one_token(world_size, need):
    last_rank = world_size - 1
    x, y = TokenLoader(ring(need), 2, 4, last_rank, world_size).next_batch()
    first = last_rank * 8  # of the batch of 2 sequences of 4, which goes on at the start of the ring
    assert x.flatten().tolist() == [position % need for position in range(first, first + 8)]
    assert y.flatten().tolist() == [position % need for position in range(first + 1, first + 9)]
    message = message_of_input_error(TokenLoader, ring(need - 1), 2, 4, last_rank, world_size)
    sequences = "1 sequence of 4 needs" if world_size == 1 else "4 sequences of 4 need"
    assert f"has {need - 1} tokens to train on, and {sequences} {need}: " in message
    assert message.endswith("pass a longer text, or a smaller --seq-len")


def test_a_batch_may_be_larger_than_the_corpus():
    loader = TokenLoader(ring(10), 7, 3)
    inputs = []
    for _ in range(4):
        x, _ = loader.next_batch()
        inputs += x.flatten().tolist()
    assert inputs == [position % 10 for position in range(4 * 7 * 3)]


@pytest.mark.parametrize("in_use", [True, False])
def test_batches_are_pinned_only_when_cuda_is_in_use(monkeypatch, in_use):
    pin_memory = Mock(return_value=torch.arange(9))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    TokenLoader(ring(9), 2, 4).next_batch()
    assert pin_memory.called == in_use


@pytest.mark.parametrize(
    "name, content, problem",
    [
        ("corpus", b"text", "not a regular .txt or .bin file"),
        ("corpus.parquet", b"text", "not a regular .txt or .bin file"),
        ("empty.txt", b"", "empty"),
        ("empty.bin", b"", "empty"),
        ("latin1.txt", b"caf\xe9 au lait", "position 3"),
        ("odd.bin", b"\x01\x00\x02", "multiple"),
        ("past.bin", b"\x05\x00\x51\xc4", "id 50257 is past GPT-2's last, 50256"),
    ],
)
def test_a_bad_file_is_refused_by_name_with_the_problem_and_the_remedy(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    message = message_of_input_error(load_tokens, tmp_path / name)
    assert message.startswith(f"data file {tmp_path / name}: ")
    assert problem in message
    assert message.endswith("; pass a .txt in UTF-8 or a .bin of GPT-2's uint16 ids")


@pytest.mark.parametrize("name", ["missing.txt", "missing.bin"])
def test_a_missing_file_is_called_missing(tmp_path, name):
    message = message_of_input_error(load_tokens, tmp_path / name)
    assert message.startswith(f"data file {tmp_path / name}: No such file or directory; pass a .txt")


@pytest.mark.parametrize("name", ["pipe.txt", "pipe.bin"])
def test_a_pipe_is_refused_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert "not a regular .txt or .bin file" in message_of_input_error(load_tokens, tmp_path / name)


def test_a_folder_is_refused(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    assert "not a regular .txt or .bin file" in message_of_input_error(load_tokens, tmp_path / "folder.txt")


def test_the_last_tenth_is_held_out(tmp_path):
    path = tmp_path / "ids.bin"
    np.arange(1005, dtype=np.uint16).tofile(path)
    assert load_tokens(path).tolist() == list(range(904))  # 904.5, rounded down
    assert load_tokens(path, "train").tolist() == list(range(904))
    assert load_tokens(path, "val").tolist() == list(range(904, 1005))
    assert load_tokens(path, "all").tolist() == list(range(1005))
    with pytest.raises(ValueError, match='must be "train", "val" or "all", got \'test\''):
        load_tokens(path, "test")


def test_a_bin_is_mapped_and_keeps_its_names(tmp_path):
    np.array([0, VOCAB - 1], dtype=np.uint16).tofile(tmp_path / "ids.bin")
    tokens = load_tokens(str(tmp_path / "ids.bin"), "all")
    assert tokens.tolist() == [0, VOCAB - 1]
    assert tokens.dtype == np.uint16
    assert is_memory_mapped(tokens)
    assert (tokens.corpus, tokens.tokenizer) == ("ids.bin", "gpt2")
    assert (tokens[1:].corpus, tokens[1:].tokenizer) == ("ids.bin", "gpt2")


NAMES = [
    pytest.param("Größe 1 | <b>.txt", "Größe 1 | <b>.txt", id="printable"),
    pytest.param("su\udcff.txt", r"su\udcff.txt", id="not UTF-8"),
    pytest.param("two\nlines.txt", r"two\nlines.txt", id="line break"),
    pytest.param("\x1b[31mred.txt", r"\x1b[31mred.txt", id="escape sequence"),
    pytest.param("\u202etxt.exe.txt", r"\u202etxt.exe.txt", id="right to left"),
]


@pytest.mark.parametrize("name, corpus", NAMES)
def test_the_name_of_a_corpus_is_printable(tmp_path, name, corpus):
    try:
        (tmp_path / name).write_bytes(CONTENT)
    except OSError:
        pytest.skip("this file system takes no such name")
    assert load_tokens(tmp_path / name).corpus == corpus


@pytest.mark.parametrize("name, corpus", NAMES)
def test_the_name_in_a_message_is_printable(monkeypatch, tmp_path, name, corpus):
    monkeypatch.chdir(tmp_path)
    assert message_of_input_error(load_tokens, name).startswith(f"data file {corpus}: ")


@pytest.mark.parametrize("name", ["gpt2", "gpt2-bytes"])
def test_a_text_is_tokenized_once(text_file, merges_file, monkeypatch, name):
    if name == "gpt2-bytes":
        merges_file.unlink()
    first = load_tokens(text_file, "all")
    assert data.tokenizer().decode(first) == TEXT

    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary", must_not_be_called)
    second = load_tokens(text_file, "all")
    assert second.tolist() == first.tolist()
    assert is_memory_mapped(second)
    for tokens in (first, second):
        assert (tokens.corpus, tokens.tokenizer) == ("text.txt", name)


def test_cached_tokens_of_gpt2_need_no_vocabulary_and_no_tiktoken(text_file, merges_file, monkeypatch):
    first = load_tokens(text_file)
    merges_file.unlink()
    data.tokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert load_tokens(text_file).tolist() == first.tolist()


def test_tokens_are_cached_by_the_content_of_a_text_not_by_its_name(text_file, monkeypatch):
    first = load_tokens(text_file, "all")
    text_file.write_text("another content under the same name")
    assert data.tokenizer().decode(load_tokens(text_file, "all")) == "another content under the same name"

    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary", must_not_be_called)
    copy = text_file.with_name("copy.txt")
    copy.write_bytes(CONTENT)
    tokens = load_tokens(copy, "all")
    assert tokens.tolist() == first.tolist()
    assert tokens.corpus == "copy.txt"


def test_a_damaged_token_file_is_not_read_but_replaced(text_file):
    expected = load_tokens(text_file, "all").tolist()
    [cached] = data.cache_dir().iterdir()
    sound = cached.read_bytes()
    digest, ids = sound[:32], sound[32:]
    empty = b""
    cut = sound[:-20]
    no_digest = ids
    wrong_ids = digest + bytes(len(ids))
    zeros = bytes(len(sound))
    for damaged in (empty, cut, no_digest, wrong_ids, zeros):
        cached.write_bytes(damaged)
        assert load_tokens(text_file, "all").tolist() == expected
        assert cached.read_bytes() == sound


def test_a_cache_that_can_be_neither_read_nor_written_is_done_without(text_file, merges_file, monkeypatch):
    no_folder = str(text_file)  # not even root can read or make a folder in a file
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", no_folder)
    monkeypatch.setenv("XDG_CACHE_HOME", no_folder)
    tokens = load_tokens(text_file, "all")
    assert tokens.tokenizer == "gpt2"
    assert data.tokenizer().decode(tokens) == TEXT


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path, text_file):
    path = tmp_path / "new" / "file"
    data.write_whole(path, b"one")
    assert path.read_bytes() == b"one"

    data.write_whole(path, b"t", np.frombuffer(b"wo", dtype=np.uint8))
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode == text_file.stat().st_mode  # what the umask leaves, as for any file

    with pytest.raises(TypeError):
        data.write_whole(path, b"three", None)
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "platform, environment, folder",
    [
        ("linux", {}, "home/.cache/gpt2-speed-ladder"),
        ("darwin", {}, "home/Library/Caches/gpt2-speed-ladder"),
        ("darwin", {"XDG_CACHE_HOME": "xdg"}, "xdg/gpt2-speed-ladder"),
    ],
)
def test_the_cache_is_where_each_platform_keeps_its_caches(monkeypatch, platform, environment, folder):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    monkeypatch.setenv("XDG_CACHE_HOME", environment.get("XDG_CACHE_HOME", ""))
    assert data.cache_dir() == Path(folder)


def test_the_cache_of_a_user_without_a_home_is_where_temporary_files_are(monkeypatch, tmp_path):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.cache_dir() == tmp_path / ".cache" / "gpt2-speed-ladder"


def test_the_ids_of_bytes_are_in_gpt2s_order():
    # as OpenAI's encoder.py lists them: "!" to "~", then two ranges of Latin-1, then what is left
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    encoding = data.byte_tokenizer()
    ids = [encoding.encode_single_token(bytes([byte])) for byte in printable + others]
    assert ids == list(range(256))
    assert encoding.encode_ordinary("\n ") == [198, 220]  # as in GPT-2's encoder.json
    assert encoding.decode(encoding.encode_ordinary(TEXT)) == TEXT


def test_merges_are_used(text_file, merges_file, monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", must_not_be_called)  # its own download has no timeout
    [t] = data.byte_tokenizer().encode_ordinary("t")
    assert data.tokenizer().name == "gpt2"
    assert data.tokenizer().encode_ordinary("the the") == [t, 256, 258]
    assert data.tokenizer().decode([VOCAB - 1]) == "<|endoftext|>"
    assert load_tokens(text_file).max() < VOCAB - 1  # in a text it is text like any other


def test_merges_with_another_hash_are_not_used(merges_file):
    merges_file.write_bytes(MERGES[:-5])
    assert data.tokenizer().name == "gpt2-bytes"


@pytest.mark.parametrize("variable", ["TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"])
def test_the_tokenizer_equals_tiktokens_gpt2(monkeypatch, variable):
    for url in (data.VOCAB_URL, data.VOCAB_URL.replace("vocab.bpe", "encoder.json")):
        if not (VOCABULARY / hashlib.sha1(url.encode()).hexdigest()).is_file():  # tiktoken would download it
            pytest.skip("GPT-2's vocabulary is not here: name a folder that has it in TIKTOKEN_CACHE_DIR")
    monkeypatch.setenv(variable, str(VOCABULARY))
    expected = tiktoken.get_encoding("gpt2")
    encoding = data.tokenizer()
    for attribute in ("name", "n_vocab", "_mergeable_ranks", "_special_tokens", "_pat_str"):
        assert getattr(encoding, attribute) == getattr(expected, attribute)
    assert encoding.n_vocab == VOCAB
    assert encoding.encode_ordinary("Hello, world") == [15496, 11, 995]


@pytest.mark.parametrize("function", [load_tokens, data.tokenizer, data.byte_tokenizer])
def test_without_tiktoken_the_remedy_is_named(monkeypatch, function):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert "run make setup, or pip install tiktoken" in message_of_input_error(function)


def offline_in_a_new_process():
    """Whether data.py, read anew under this environment, begins offline."""
    return runpy.run_path(data.__file__)["offline"]


@pytest.mark.parametrize("value", ["", "0"])
def test_an_empty_ladder_offline_or_0_allows_downloads(monkeypatch, value):
    monkeypatch.setenv("LADDER_OFFLINE", value)
    assert offline_in_a_new_process() is False


@pytest.mark.parametrize("value", ["1", "yes"])
def test_any_other_ladder_offline_forbids_downloads(monkeypatch, value):
    monkeypatch.setenv("LADDER_OFFLINE", value)
    assert offline_in_a_new_process() is True


def test_without_ladder_offline_downloads_are_allowed(monkeypatch):
    monkeypatch.delenv("LADDER_OFFLINE", raising=False)
    assert offline_in_a_new_process() is False


def test_offline_the_corpus_is_pythons_and_the_tokens_are_bytes(monkeypatch, capsys):
    monkeypatch.setattr(data, "download", must_not_be_called)
    tokens = load_tokens()
    assert tokens.corpus == f"Python {sys.version_info[0]}.{sys.version_info[1]} language reference"
    assert tokens.tokenizer == data.tokenizer().name == "gpt2-bytes"
    assert tokens.max() < 256
    assert len(tokens) > 300_000
    assert "assert_stmt" in data.tokenizer().decode(tokens[:5000])
    assert capsys.readouterr().err == ""  # nothing failed, as nothing was tried


def test_a_python_without_the_reference_asks_for_a_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert "pass a text with --data FILE.txt" in message_of_input_error(load_tokens)


OK = b"HTTP/1.0 200 OK\r\n\r\n"
OK_WITH_LENGTH = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(CONTENT)
OK_IN_CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SILENCE = None


def serve(*pieces):
    """Start a server that answers one request with these pieces, one every 20 ms. Returns its address.

    After a piece that is SILENCE it sends nothing more, and hangs up only after five seconds.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listener:
            connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):  # the client may hang up
            connection.recv(65536)
            for piece in pieces:
                if piece is SILENCE:
                    connection.settimeout(5)
                    connection.recv(1)
                    break
                connection.sendall(piece)
                time.sleep(0.02)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/"


def test_a_download_is_returned_and_kept(tmp_path):
    path = tmp_path / "new" / "file"
    assert data.download(serve(OK, CONTENT[:100], CONTENT[100:]), SHA256, path) == CONTENT
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    "pieces, message",
    [
        pytest.param([OK, CONTENT.replace(b"hear", b"fear")], "sha256 other than", id="other content"),
        pytest.param([OK_WITH_LENGTH, CONTENT[:100]], "sha256 other than", id="cut"),
        pytest.param([OK_IN_CHUNKS, b"ff\r\n", CONTENT[:100]], "IncompleteRead", id="cut in a chunk"),
        pytest.param([b"220 this is \xff no web server\r\n\r\n"], "no web server", id="not HTTP"),
        pytest.param([b"HTTP/1.0 404 Not Found\r\n\r\n"], "Not Found", id="not found"),
    ],
)
def test_a_broken_download_is_an_error_and_leaves_the_file_alone(tmp_path, pieces, message):
    path = tmp_path / "file"
    path.write_bytes(b"from before")
    with pytest.raises((OSError, http.client.HTTPException), match=message):
        data.download(serve(*pieces), SHA256, path)
    assert path.read_bytes() == b"from before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_server_that_falls_silent_is_not_waited_for(tmp_path):
    url = serve(OK_WITH_LENGTH, CONTENT[:100], SILENCE)
    with pytest.raises(TimeoutError, match="timed out"):
        data.download(url, SHA256, tmp_path / "file", timeout=0.3)


def test_a_server_that_drips_is_not_waited_for(tmp_path):
    drops = [b"x"] * 1000  # 20 seconds of them, and no pause as long as the timeout
    with pytest.raises(TimeoutError, match="took more than 0 s"):
        data.download(serve(OK, *drops), SHA256, tmp_path / "file", limit=0.3)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError("no route to host"), id="network"),
        pytest.param(http.client.BadStatusLine("this is \xff\n no web server"), id="server"),
    ],
)
def test_after_a_failed_download_no_other_is_tried_and_the_run_goes_on(monkeypatch, capsys, error):
    download = Mock(side_effect=error)
    monkeypatch.setattr(data, "download", download)
    monkeypatch.setattr(data, "offline", False)
    tokens = load_tokens()
    assert "language reference" in tokens.corpus
    assert tokens.tokenizer == "gpt2-bytes"
    download.assert_called_once()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("no download (")
    assert line.endswith("): continuing with what is on this machine")
    assert line.isascii()  # a terminal under LC_ALL=C takes nothing else


def test_a_proxy_that_is_no_address_counts_as_no_network(monkeypatch):
    monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers the proxies of the first request
    monkeypatch.setenv("http_proxy", "http:/proxy:3128")
    monkeypatch.setattr(data, "SHAKESPEARE_URL", "http://example.invalid/")
    monkeypatch.setattr(data, "offline", False)
    assert "language reference" in load_tokens().corpus
    assert data.offline


def test_the_corpus_and_the_vocabulary_are_downloaded_once(monkeypatch):
    monkeypatch.setattr(data, "SHAKESPEARE_URL", serve(OK, CONTENT))
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", SHA256)
    monkeypatch.setattr(data, "VOCAB_URL", serve(OK, MERGES))
    monkeypatch.setattr(data, "VOCAB_SHA256", hashlib.sha256(MERGES).hexdigest())
    monkeypatch.setattr(data, "offline", False)
    first = load_tokens(None, "all")
    assert (first.corpus, first.tokenizer) == ("Tiny Shakespeare", "gpt2")
    assert data.tokenizer().decode(first) == TEXT
    [vocabulary] = (data.cache_dir() / "tiktoken").iterdir()
    assert vocabulary.read_bytes() == MERGES

    data.tokenizer.cache_clear()
    monkeypatch.setattr(data, "download", must_not_be_called)
    assert load_tokens(None, "all").tolist() == first.tolist()
    assert data.tokenizer().name == "gpt2"


def test_a_download_that_cannot_be_kept_is_used(monkeypatch, text_file, merges_file):
    monkeypatch.setattr(data, "SHAKESPEARE_URL", serve(OK, CONTENT))
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", SHA256)
    monkeypatch.setattr(data, "offline", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(text_file))  # not even root can make a folder in a file
    tokens = load_tokens(None, "all")
    assert tokens.corpus == "Tiny Shakespeare"
    assert data.tokenizer().decode(tokens) == TEXT


def test_tiny_shakespeare_in_a_users_file_is_known_by_its_content(monkeypatch, text_file):
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", SHA256)
    assert load_tokens(text_file).corpus == "Tiny Shakespeare"
