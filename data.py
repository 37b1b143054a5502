"""Text to tokens to batches.

Tiny Shakespeare is downloaded once and tokenized once, with GPT-2's tokenizer from tiktoken. Without a network the
tokens are the bytes of Python's own documentation, and a line says so.
"""

import contextlib
import hashlib
import http.client
import io
import os
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

VOCAB = 50257  # ids of GPT-2's tokenizer: 256 bytes, 50,000 merges and <|endoftext|>
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
HELD_OUT_AT_MOST = 2**20  # tokens, since a held-out loss needs no billion of them


def refuse(message):
    """End the program with one line on stderr and exit status 2, for a mistake that its user can mend."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def whole_file(path):
    """Give a path to write to, and rename it to `path` at the end, so that a file is replaced as a whole or not at all.

    Missing folders are made. Raises OSError, for example where the disk is full.
    """
    path = Path(os.path.realpath(path))  # of a link, what it points to is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@dataclass
class Corpus:
    """Token ids, a 1-D array of uint16, with the name of the text and of its tokenizer, "gpt2" or "bytes"."""

    name: str
    tokenizer: str
    ids: np.ndarray


def load_tokens(source=None, split="train"):
    """Return the Corpus of a text.

    source: None for Tiny Shakespeare; or the path of a .txt in UTF-8, or of a .bin of GPT-2's ids as uint16, which
    stays on disk. split: "train" for the first nine tenths, "val" for the last, on which no stage trains (its first
    million tokens, where it is longer), or "all". Exits with one line for a file that is missing, empty or not UTF-8.
    """
    corpus = default_corpus() if source is None else corpus_of_file(Path(source))
    cut = len(corpus.ids) * 9 // 10
    if split == "train":
        ids = corpus.ids[:cut]
    elif split == "val":
        ids = corpus.ids[cut : cut + HELD_OUT_AT_MOST]
    else:
        ids = corpus.ids
    return Corpus(corpus.name, corpus.tokenizer, ids)


def default_corpus():
    """Return Tiny Shakespeare or, where it can't be had, the bytes of Python's documentation."""
    try:
        text = shakespeare()
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a proxy that is no address
        say_offline(error, "training on the bytes of Python's documentation instead")
        return pythons_documentation()
    ids, tokenizer = encode(text)
    return Corpus("Tiny Shakespeare", tokenizer, ids)


def shakespeare():
    """Return the bytes of Tiny Shakespeare, from the cache or downloaded. Raises OSError where neither is possible."""
    path = cache_dir() / "tinyshakespeare.txt"
    if path.exists():
        text = path.read_bytes()
        if hashlib.sha256(text).hexdigest() == SHAKESPEARE_SHA256:
            return text
    if is_offline():
        raise OSError("LADDER_OFFLINE is set")
    with urllib.request.urlopen(SHAKESPEARE_URL, timeout=10) as response:
        text = response.read()
    if hashlib.sha256(text).hexdigest() != SHAKESPEARE_SHA256:
        raise OSError(f"{SHAKESPEARE_URL} sent another text")
    keep_in_cache(path, text)
    return text


def pythons_documentation():
    """Return the Corpus of the language reference that comes with Python, byte by byte."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        refuse("no network, and this Python has no pydoc_data: pass a text with --data FILE.txt")
    text = "\n".join(topics[topic] for topic in sorted(topics)).encode()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Corpus(f"Python {version} language reference", "bytes", bytes_as_ids(text))


def corpus_of_file(path):
    """Return the Corpus in a user's .txt or .bin. Exits with one line where it is no such file."""
    remedy = "pass a .txt in UTF-8, or a .bin of GPT-2's ids as uint16"
    try:
        if path.suffix not in (".txt", ".bin") or not path.is_file():
            refuse(f"--data {path}: there is no such .txt or .bin file; {remedy}")
        if path.suffix == ".bin":
            ids, tokenizer = np.memmap(path, dtype=np.uint16, mode="r"), "gpt2"
        else:
            text = path.read_bytes()
            text.decode()
            if not text:
                raise ValueError("it is empty")
            ids, tokenizer = encode(text)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a .bin that is empty or of an odd length
        refuse(f"--data {path}: {error}; {remedy}")
    return Corpus(path.name, tokenizer, ids)


def encode(text):
    """Return (ids, name of the tokenizer) of a text in UTF-8: in GPT-2's tokens or, without its vocabulary, in bytes.

    GPT-2's tokens are kept in the cache under the hash of the text.
    """
    path = cache_dir() / f"{hashlib.sha256(text).hexdigest()}.gpt2.npy"
    try:
        return np.load(path, mmap_mode="r"), "gpt2"
    except Exception:
        pass  # it is not there, or damaged, for which numpy raises what the bytes happen to mean
    encoding = gpt2_encoding()
    if encoding is None:
        return bytes_as_ids(text), "bytes"
    ids = np.array(encoding.encode_ordinary(text.decode()), dtype=np.uint16)
    file = io.BytesIO()
    np.save(file, ids)
    keep_in_cache(path, file.getvalue())
    return ids, "gpt2"


def gpt2_encoding():
    """Return tiktoken's Encoding of GPT-2, or None where its vocabulary can't be had, or LADDER_OFFLINE is set."""
    try:
        import tiktoken  # here, because a text that is in the cache needs no tokenizer
    except ImportError:
        refuse("tiktoken is not installed: run make setup, or pip install tiktoken")
    if is_offline():
        return None
    # tiktoken waits as long as a silent proxy does, and says nothing
    print("loading GPT-2's vocabulary, or downloading it: LADDER_OFFLINE=1 goes without", file=sys.stderr)
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:
        say_offline(error, "each byte of the text is a token instead")
        return None


def check_ids(ids, name):
    """Exit with one line where an id of the text of this name is past the vocabulary."""
    if ids.max() >= VOCAB:
        refuse(f"{name}: id {ids.max()} is past GPT-2's last, {VOCAB - 1}: pass GPT-2's ids as uint16")


def bytes_as_ids(text):
    """Return the bytes of a text as ids."""
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


def is_offline():
    """Tell whether the user forbids downloads, by LADDER_OFFLINE=1."""
    return os.environ.get("LADDER_OFFLINE", "") not in ("", "0")


def say_offline(error, consequence):
    """Say on stderr why nothing was downloaded, and what is done instead."""
    print(f"no download ({str(error)[:200]}): {consequence}", file=sys.stderr)


def cache_dir():
    """Return the folder, a Path, of downloads and tokens. It may not exist yet."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "gpt2-speed-ladder"


def keep_in_cache(path, content):
    """Write bytes to a file of the cache. Where that fails, the next run downloads or tokenizes again, and no more."""
    with contextlib.suppress(OSError), whole_file(path) as unfinished:
        unfinished.write_bytes(content)


class TokenLoader:
    """Batches in the order of the corpus, which is a ring: after its last token comes its first.

    In every step each rank takes the next batch_size * seq_len tokens after those of the rank before it, so that
    world_size ranks read in one step what a single process reads in world_size steps. Exits with one line where the
    corpus is too short for one sequence on every rank.
    """

    def __init__(self, corpus, batch_size, seq_len, rank=0, world_size=1):
        self.corpus = corpus
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.world_size = world_size
        self.tokens_per_batch = batch_size * seq_len
        self.position = rank * self.tokens_per_batch
        needed = world_size * seq_len + 1  # one more, for the last target
        if len(corpus.ids) < needed:
            refuse(
                f"{corpus.name} has {len(corpus.ids):,} tokens to train on, and {world_size} x {seq_len} + 1 = "
                f"{needed:,} are needed: pass a longer text, or a smaller --seq-len"
            )

    def next_batch(self):
        """Return x and y, int64 tensors (batch_size, seq_len), where y holds the token after each one of x.

        They lie in pinned memory where CUDA is in use, so that the copy to the GPU need not wait for the CPU. Exits
        with one line for an id past the vocabulary.
        """
        positions = self.position + np.arange(self.tokens_per_batch + 1)
        ids = self.corpus.ids[positions % len(self.corpus.ids)]
        check_ids(ids, self.corpus.name)  # here, since a look through the whole file would read it into memory
        ids = torch.from_numpy(ids.astype(np.int64))
        self.position += self.world_size * self.tokens_per_batch
        # not is_available(): pinning opens a CUDA context, for which a CPU run has no use
        if torch.cuda.is_initialized():
            ids = ids.pin_memory()
        x = ids[:-1].view(self.batch_size, self.seq_len)
        y = ids[1:].view(self.batch_size, self.seq_len)
        return x, y
