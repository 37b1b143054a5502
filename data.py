"""Text to tokens to batches. Downloads once, caches, and without a network uses text that comes with Python."""

import contextlib
import functools
import hashlib
import http.client
import os
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import torch

VOCAB = 50257  # ids of GPT-2's tokenizer: 256 bytes, 50,000 merges, <|endoftext|>
VOCAB_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
VOCAB_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# GPT-2's first 256 ids are the bytes, printable ones first. Its file writes the others as the characters from 256 on.
PRINTABLE = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
BYTE_OF = {chr(b): bytes([b]) for b in PRINTABLE} | {chr(256 + i): bytes([b]) for i, b in enumerate(OTHERS)}

offline = bool(os.environ.get("LADDER_OFFLINE"))  # set by the user, or by the first download that fails


class InputError(ValueError):
    """An error that the user can fix. Its message is one line that names the value and the remedy."""


class Tokens(np.ndarray):
    """A 1-D uint16 array of token ids with the names of its `corpus` and its `tokenizer`, which slices keep."""

    def __array_finalize__(self, source):
        self.corpus = getattr(source, "corpus", "unknown")
        self.tokenizer = getattr(source, "tokenizer", "unknown")


def cache_dir():
    """The folder (a Path) of this user's downloads and token files. It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")  # the second is set on Windows
    return Path(base or Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache"), "gpt2-speed-ladder")


UNFINISHED = ".unfinished-"


def write_whole(path, *chunks):
    """Write bytes-like chunks one after another: path holds all of them or stays as it was. Raises OSError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # beside path, as a rename can't cross disks; what a kill leaves of it is known by its name
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED) as folder:
        temporary = Path(folder, path.name)
        with open(temporary, "wb") as f:
            f.writelines(chunks)
        os.replace(temporary, path)


def download(url, sha256, path, timeout=10.0, limit=120.0):
    """Fetch url into path and return its bytes. path appears complete and checked, or not at all.

    sha256: hex digest of the content; timeout: seconds without an answer; limit: seconds in all.
    Raises OSError when the network fails or the content has another digest, HTTPException when the server misbehaves.
    """
    deadline = time.monotonic() + limit
    content = bytearray()
    with urllib.request.urlopen(url, timeout=timeout) as response:
        while chunk := response.read1(1 << 16):
            content += chunk
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} took more than {limit:.0f} s")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise OSError(f"{url} sent {len(content):,} bytes with a sha256 other than {sha256[:12]}")
    with contextlib.suppress(OSError):  # a cache that can't be written costs another download next time, no more
        write_whole(path, content)
    return bytes(content)


def _fetch(url, sha256, *places):
    """The bytes with this sha256 from the first place that holds them, or from url into the last place, or None."""
    global offline
    for place in places:
        with contextlib.suppress(OSError):  # another user's folder may be closed to us
            if place.is_file() and hashlib.sha256(content := place.read_bytes()).hexdigest() == sha256:
                return content
    if not offline:
        try:
            return download(url, sha256, places[-1])
        except (OSError, http.client.HTTPException) as error:
            offline = True  # a second try would wait for its timeout too
            print(f"no download ({error!a}): continuing with what is on this machine", file=sys.stderr)
    return None


def byte_tokenizer():
    """A tiktoken Encoding "gpt2-bytes": GPT-2's ids of the 256 bytes, no merges. Raises InputError without tiktoken."""
    try:
        import tiktoken  # here, because a run whose tokens are cached does not need it
    except ImportError as error:
        raise InputError(f"can't import tiktoken ({error}): run make setup, or pip install tiktoken") from None
    ranks = {byte: i for i, byte in enumerate(BYTE_OF.values())}
    return tiktoken.Encoding("gpt2-bytes", pat_str=r"\s+|\S+", mergeable_ranks=ranks, special_tokens={})


@functools.cache
def tokenizer():
    """The tiktoken Encoding in use: "gpt2" or, where its vocabulary can't be had, byte_tokenizer()'s.

    Equal to tiktoken.get_encoding("gpt2"), whose own download has no timeout. Raises InputError without tiktoken.
    """
    fallback = byte_tokenizer()  # first, to report a missing tiktoken before any download
    folders = [os.environ.get("TIKTOKEN_CACHE_DIR"), os.environ.get("DATA_GYM_CACHE_DIR")]
    folders += [Path(tempfile.gettempdir(), "data-gym-cache"), cache_dir() / "tiktoken"]
    name = hashlib.sha1(VOCAB_URL.encode()).hexdigest()  # as tiktoken names the file in its cache
    vocab = _fetch(VOCAB_URL, VOCAB_SHA256, *(Path(folder, name) for folder in folders if folder))
    if vocab is None:
        return fallback
    import tiktoken

    merges = [b"".join(BYTE_OF[c] for c in line if c != " ") for line in vocab.decode().splitlines()[1:]]
    ranks = {token: i for i, token in enumerate([*BYTE_OF.values(), *merges])}
    regex = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    return tiktoken.Encoding("gpt2", pat_str=regex, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": VOCAB - 1})


def load_tokens(source=None, split="train"):
    """The Tokens of a corpus: a 1-D uint16 array.

    source: None for Tiny Shakespeare, downloaded and cached (with no network Python's language reference, reported on
    stderr); a .txt in UTF-8, tokenized and cached by content; a .bin of uint16 ids of GPT-2's tokenizer, mapped
    from disk. split: "train" for the first nine tenths, "val" for the last, on which no stage trains, or "all".
    Raises InputError for a bad file (missing, a pipe, empty, not UTF-8, ids past the vocabulary) or without tiktoken.
    """
    ids, corpus, name = _tokenize(*_default_text()) if source is None else _load_file(Path(source))
    cut = len(ids) * 9 // 10
    tokens = {"train": ids[:cut], "val": ids[cut:], "all": ids}[split].view(Tokens)
    tokens.corpus, tokens.tokenizer = corpus, name
    return tokens


def _default_text():
    if text := _fetch(SHAKESPEARE_URL, SHAKESPEARE_SHA256, cache_dir() / "tinyshakespeare.txt"):
        return text, "Tiny Shakespeare"
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError("no network, and this Python has no pydoc_data: pass a text with --data FILE.txt") from None
    text = "\n".join(topics[key] for key in sorted(topics))
    return text.encode(), "Python {}.{} language reference".format(*sys.version_info)


def _load_file(path):
    try:
        path.stat()
        if path.suffix not in (".txt", ".bin") or not path.is_file():  # opening a pipe would wait for its writer
            raise ValueError("not a regular .txt or .bin file")
        if path.suffix == ".bin":
            ids = np.memmap(path, dtype=np.uint16, mode="r")  # ValueError for a file that is empty, or odd in length
            if ids.max() >= VOCAB:
                raise ValueError(f"id {ids.max()} is past GPT-2's last, {VOCAB - 1}")
            return ids, path.name, "gpt2"
        text = path.read_bytes()
        if not text.decode():
            raise ValueError("empty")
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise InputError(f"data file {path}: {problem}; pass a .txt in UTF-8 or a .bin of GPT-2's uint16 ids") from None
    is_shakespeare = hashlib.sha256(text).hexdigest() == SHAKESPEARE_SHA256
    return _tokenize(text, "Tiny Shakespeare" if is_shakespeare else path.name)


def _tokenize(text, corpus):
    """The ids of UTF-8 bytes, from the cache if they are in it, the name of the corpus and that of the tokenizer."""
    stem = cache_dir() / f"tokens-{hashlib.sha256(text).hexdigest()[:16]}"
    ids, name = _cached_ids(f"{stem}.gpt2"), "gpt2"
    if ids is None:
        name = tokenizer().name
        ids = _cached_ids(f"{stem}.{name}")
    if ids is None:
        ids = np.array(tokenizer().encode_ordinary(text.decode()), dtype=np.uint16)
        with contextlib.suppress(OSError):
            write_whole(f"{stem}.{name}", hashlib.sha256(ids).digest(), ids)
    return ids, corpus, name


def _cached_ids(path):
    """Ids, memory-mapped, from a file of their sha256 (32 bytes) and themselves; None if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is empty
        content = np.memmap(path, mode="r")
        if hashlib.sha256(content[32:]).digest() == content[:32].tobytes():
            return content[32:].view(np.uint16)
    return None


class TokenLoader:
    """Batches in the order of the corpus, which is a ring: after its last token comes its first.

    At every step the ranks take neighboring slices of batch_size * seq_len tokens, so that world_size ranks together
    read what one would in world_size steps. Raises InputError if the corpus is too short for one batch on every rank.
    """

    def __init__(self, tokens, batch_size, seq_len, rank=0, world_size=1):
        self.tokens, self.shape = tokens, (batch_size, seq_len)
        self.rank, self.world_size = rank, world_size
        self.size = batch_size * seq_len
        self.position = rank * self.size
        need = world_size * self.size + 1
        if len(tokens) < need:
            raise InputError(
                f"{tokens.corpus} has {len(tokens):,} tokens to train on, and {world_size} x {batch_size} sequences of "
                f"{seq_len} need {need:,}: pass a longer text, or a smaller --batch-size or --seq-len"
            )

    def next_batch(self):
        """x and y, int64 (batch_size, seq_len), y one token ahead of x; in pinned memory where CUDA is in use."""
        window = np.arange(self.position, self.position + self.size + 1)
        ids = torch.from_numpy(self.tokens.take(window, mode="wrap").astype(np.int64))
        self.position = (self.position + self.world_size * self.size) % len(self.tokens)
        if torch.cuda.is_initialized():  # not is_available(): pinning opens a CUDA context, even for a CPU run
            ids = ids.pin_memory()  # so that the copy to the GPU need not wait for the CPU
        return ids[:-1].view(self.shape), ids[1:].view(self.shape)
