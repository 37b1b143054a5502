"""Text to tokens to batches. Downloads once, caches, and falls back to text that every Python carries.

What is read, downloaded or cached is checked first; what a user got wrong is an InputError, whose message is one line.
"""

import contextlib
import functools
import hashlib
import http.client
import os
import platform
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import torch

from model import VOCAB

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# GPT-2's merges and ids, as tiktoken asks for them; tiktoken keeps a file under the sha1 of its address
VOCAB_SHA256 = {
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe": (
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    ),
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json": (
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
    ),
}


class InputError(ValueError):
    """Something the user can mend. The message names the value and the remedy, in one line."""


class Tokens(np.ndarray):
    """A 1-D uint16 array that knows the names of its corpus and of its tokenizer."""

    corpus = tokenizer = "unknown"

    def __array_finalize__(self, source):
        self.corpus = getattr(source, "corpus", "unknown")
        self.tokenizer = getattr(source, "tokenizer", "unknown")


def cache_dir():
    """Where this user's downloads and token files are kept; the folder may not exist yet."""
    home = Path.home()
    platform_dir = {
        "darwin": home / "Library" / "Caches",
        "win32": Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")),
    }.get(sys.platform, home / ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or platform_dir) / "gpt2-speed-ladder"


def write_whole(path, content):
    """Write bytes so that path holds all of them or is left as it was. Raises OSError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(content)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sha256(content):
    return hashlib.sha256(content).hexdigest()


def download(url, sha256, path, timeout=10.0, limit=120.0):
    """Fetch url into path and return its bytes; path appears whole and checked, or not at all.

    timeout: seconds without an answer, limit: seconds in all. Raises OSError when the network fails or the content
    has another sha256.
    """
    deadline = time.monotonic() + limit
    content = bytearray()
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            while chunk := response.read1(1 << 16):
                content += chunk
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{url} took more than {limit:.0f} s")
    except http.client.HTTPException as error:  # cut within a chunk, or no HTTP at all
        raise OSError(f"{url}: {error!r}") from None
    if _sha256(content) != sha256:
        raise OSError(f"{url} sent {len(content):,} bytes with a sha256 other than {sha256[:12]}…; nothing was kept")
    with contextlib.suppress(OSError):  # a cache that can't be written costs a download the next time, no more
        write_whole(path, content)
    return bytes(content)


offline = bool(os.environ.get("LADDER_OFFLINE"))  # set by hand, or by the first download that fails


def _fetch(url, sha256, path):
    """The bytes from path, or from url, or None. The first failure is told in one line and ends all tries."""
    if path.is_file():
        content = path.read_bytes()
        if _sha256(content) == sha256:
            return content
    global offline
    if offline:
        return None
    try:
        return download(url, sha256, path)
    except OSError as error:
        offline = True
        print(f"no download ({error}): going on with what this machine has", file=sys.stderr)
        return None


@functools.cache
def tokenizer():
    """The tiktoken Encoding in use: GPT-2's BPE or, where its vocabulary can't be had, its bytes alone.

    The vocabulary is fetched here rather than by tiktoken, whose own download has no timeout.
    """
    own = cache_dir() / "tiktoken"
    names = {url: hashlib.sha1(url.encode()).hexdigest() for url in VOCAB_SHA256}
    places = [os.environ.get("TIKTOKEN_CACHE_DIR"), os.environ.get("DATA_GYM_CACHE_DIR")]
    places += [os.path.join(tempfile.gettempdir(), "data-gym-cache"), own]
    for place in filter(None, places):
        files = {Path(place, name): VOCAB_SHA256[url] for url, name in names.items()}
        if all(path.is_file() and _sha256(path.read_bytes()) == sha256 for path, sha256 in files.items()):
            return _gpt2_from(place)
    fetched = all(_fetch(url, VOCAB_SHA256[url], own / name) for url, name in names.items())
    if fetched and all((own / name).is_file() for name in names.values()):
        return _gpt2_from(own)

    return byte_tokenizer()


def byte_tokenizer():
    """A tiktoken Encoding "gpt2-bytes" of 256 ids, those that GPT-2's vocabulary gives to single bytes."""
    import tiktoken

    # GPT-2 numbers the printable ones first
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    order = printable + [b for b in range(256) if b not in printable]
    ranks = {bytes([b]): i for i, b in enumerate(order)}
    return tiktoken.Encoding("gpt2-bytes", pat_str=r"\s+|\S+", mergeable_ranks=ranks, special_tokens={})


def _gpt2_from(place):
    """tiktoken's gpt2 encoding, from vocabulary files in `place` that have been checked."""
    import tiktoken  # here, since most runs find their tokens cached and need none of it

    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(place)
    try:
        return tiktoken.get_encoding("gpt2")
    finally:
        os.environ.pop("TIKTOKEN_CACHE_DIR")
        if before is not None:
            os.environ["TIKTOKEN_CACHE_DIR"] = before


def _default_text():
    """Tiny Shakespeare, or the language reference that comes with Python, and its name."""
    text = _fetch(SHAKESPEARE_URL, SHAKESPEARE_SHA256, cache_dir() / "tinyshakespeare.txt")
    if text is not None:
        return text, "Tiny Shakespeare"
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError("no network, and this Python has no pydoc_data: pass a text with --data FILE.txt") from None
    name = "Python {}.{} language reference".format(*platform.python_version_tuple())
    return "\n".join(topics[key] for key in sorted(topics)).encode(), name


def _tokens_of(text, corpus):
    """Tokens of a UTF-8 text, cached by its content."""
    stem = cache_dir() / f"tokens-{_sha256(text)[:16]}"
    ids, name = _cached_ids(f"{stem}-gpt2.bin"), "gpt2"
    if ids is None:
        name = tokenizer().name
        ids = _cached_ids(f"{stem}-{name}.bin")
    if ids is None:
        ids = np.array(tokenizer().encode_ordinary(text.decode()), dtype=np.uint16)
        with contextlib.suppress(OSError):
            write_whole(f"{stem}-{name}.bin", ids.tobytes())
            ids = np.memmap(f"{stem}-{name}.bin", dtype=np.uint16, mode="r")
    return _named(ids, corpus, name)


def _cached_ids(path):
    try:
        ids = np.memmap(path, dtype=np.uint16, mode="r")
    except (OSError, ValueError):  # not there, or empty
        return None
    return ids if ids.max() < VOCAB else None


def _named(ids, corpus, tokenizer_name):
    tokens = ids.view(Tokens)
    tokens.corpus, tokens.tokenizer = corpus, tokenizer_name
    return tokens


def load_tokens(source=None, split="train"):
    """The tokens of a corpus: a 1-D uint16 array with the attributes `corpus` and `tokenizer`.

    source: None for Tiny Shakespeare, downloaded and cached (with no network Python's language reference, announced
    on stderr); a .txt in UTF-8, tokenized and cached by content; a .bin of uint16 ids of GPT-2's tokenizer, mapped
    from disk. split: "train" for the first nine tenths, "val" for the last, on which no stage trains, or "all".
    Raises InputError for a file that is missing, empty, not text, or holds ids past the vocabulary.
    """
    tokens = _tokens_of(*_default_text()) if source is None else _load_file(Path(source))
    cut = len(tokens) * 9 // 10
    return {"train": tokens[:cut], "val": tokens[cut:], "all": tokens}[split]


def _load_file(path):
    if path.suffix not in (".txt", ".bin"):
        raise InputError(f"data file {path}: pass a .txt in UTF-8 or a .bin of uint16 ids")
    try:
        if path.stat().st_size == 0:
            raise InputError(f"data file {path} is empty: pass one with text in it")
        if path.suffix == ".txt":
            text = path.read_bytes()
            text.decode()
            return _tokens_of(text, "Tiny Shakespeare" if _sha256(text) == SHAKESPEARE_SHA256 else path.name)
        if path.stat().st_size % 2:
            raise InputError(f"data file {path} has an odd number of bytes: a .bin holds uint16 ids, two bytes each")
        ids = np.memmap(path, dtype=np.uint16, mode="r")
    except OSError as error:
        raise InputError(f"data file {path}: {error.strerror or error}; check the path") from None
    except UnicodeDecodeError as error:
        raise InputError(f"data file {path} is not UTF-8 text (byte {error.start:,}): convert it to UTF-8") from None
    if ids.max() >= VOCAB:
        raise InputError(f"data file {path} holds id {ids.max()}: GPT-2's ids end at {VOCAB - 1}; tokenize it again")
    return _named(ids, path.name, "gpt2")


class TokenLoader:
    """Batches in the order of the corpus, which is a ring: after its last token comes its first.

    At every step the ranks take neighbouring slices of batch_size * seq_len tokens, so that no two read the same
    ones and world_size ranks together read what one would in world_size steps.
    Raises InputError where the corpus is too short for one batch on every rank.
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
        """x and y, int64 (batch_size, seq_len), y one token ahead of x; in pinned memory where there is CUDA."""
        window = np.arange(self.position, self.position + self.size + 1)
        ids = torch.from_numpy(self.tokens.take(window, mode="wrap").astype(np.int64))
        self.position = (self.position + self.world_size * self.size) % len(self.tokens)
        if torch.cuda.is_available():
            ids = ids.pin_memory()  # so that the copy to the GPU need not wait for the CPU
        return ids[:-1].view(self.shape), ids[1:].view(self.shape)
