"""Text to tokens to batches.

The text is a file of the reader's own or Tiny Shakespeare, which is downloaded once. If that can't be had, it is
Python's own documentation, and each of its bytes is a token: GPT-2 has one for every byte.
"""

import hashlib
import os
import sys
import urllib.request
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch

VOCAB = 50257  # ids of GPT-2's tokenizer: 256 bytes, 50,000 merges and <|endoftext|>
HEADER_OF_BIN = np.array([20240520, 1], np.int32).tobytes()  # the first 8 bytes of a .bin of llm.c
IDS_OF_HEADER = 512  # its header has 1,024 bytes, as many as 512 ids of uint16
FIRST_OF_TEXT = ord("\t")  # the lowest byte of a text in UTF-8
REMEDY = "pass one file: a text in UTF-8, or GPT-2's ids as a .npy or as a .bin of uint16"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class TextError(Exception):
    """A text that can't be trained on. The message says why, and what to pass instead."""


class TokenLoader:
    """Batches in the order of the corpus, which is a ring: after its last token comes its first.

    With every micro-batch each rank takes the batch_size * seq_len tokens after those of the rank before it, so that
    world_size ranks read at once what a single process reads in world_size micro-batches. Raises TextError if the
    corpus is too short for one sequence on every rank.
    """

    def __init__(self, corpus, batch_size, seq_len, rank=0, world_size=1):
        self.corpus = corpus
        self.batch_size = batch_size
        self.world_size = world_size
        self.tokens_per_batch = batch_size * seq_len
        self.position = rank * self.tokens_per_batch
        needed = world_size * seq_len + 1  # one more, for the last target
        if len(corpus.ids) < needed:
            problem = f"{corpus.name} has {len(corpus.ids):,} tokens to train on, and {needed:,} are needed"
            raise TextError(f"{problem}: pass a longer text, or a smaller --seq-len")

    def next_batch(self, device):
        """Return x and y on the device, int64 (batch_size, seq_len). y holds the token after each token of x.

        Raises TextError for an id past the vocabulary.
        """
        positions = self.position + np.arange(self.tokens_per_batch + 1)
        ids = self.corpus.ids[positions % len(self.corpus.ids)]
        check_ids(ids, self.corpus.name)  # for each batch, since the whole file may be larger than memory
        self.position += self.world_size * self.tokens_per_batch
        ids = torch.from_numpy(ids.astype(np.int64))
        on_cuda = device.type == "cuda"
        if on_cuda:
            ids = ids.pin_memory()  # else the copies would wait for the GPU
        x = ids[:-1].view(self.batch_size, -1).to(device, non_blocking=on_cuda)
        y = ids[1:].view(self.batch_size, -1).to(device, non_blocking=on_cuda)
        return x, y


def check_ids(ids, name):
    """Raise TextError if an id is not one of GPT-2's. name: that of the text."""
    if ids.min() < 0 or ids.max() >= VOCAB:
        raise TextError(f"{name}: it has ids from {ids.min()} to {ids.max()}, and GPT-2's are from 0 to {VOCAB - 1}")


ID_SUFFIXES = (".npy", ".bin")  # of files that hold ids and no text
# A text as tokens. name: for people. ids: the tokens to train on, a 1-D array of integers. held_out: more of them, on
# which no stage trains. source: what load_tokens() took, or "docs" if Tiny Shakespeare can't be had.
Corpus = namedtuple("Corpus", ("name", "ids", "held_out", "source"))


def load_tokens(source=None):
    """Return the Corpus of a text.

    source: the path of a file, None for Tiny Shakespeare, or "docs" for Python's documentation, which also takes the
    place of a Tiny Shakespeare that can't be had. Raises TextError if a file can't be read.
    """
    if source is None or Path(source).suffix.lower() not in ID_SUFFIXES:
        import_tiktoken()  # now, with one line if it is missing
    if source is None:
        try:
            return corpus_of("Tiny Shakespeare", tiny_shakespeare(), source)
        except Exception as error:  # of many kinds: no network, a proxy's page, no vocabulary, a full disk
            print(f"no Tiny Shakespeare ({str(error)[:200]}): taking Python's documentation instead", file=sys.stderr)
    if source in (None, "docs"):
        return corpus_of("Python's documentation (one token per byte)", pythons_documentation(), "docs")
    return corpus_of(Path(source).name, ids_of_file(Path(source)), source)


def corpus_of(name, ids, source):
    """Return the Corpus of a text, the last tenth of whose ids is held out."""
    cut = len(ids) * 9 // 10
    return Corpus(name, ids[:cut], ids[cut:], source)


# GPT-2's tokens


def ids_of_text(content):
    """Return the ids of a text, a 1-D array of uint16. content: its bytes in UTF-8.

    Raises TextError if GPT-2's vocabulary can't be had, and ValueError if it is no text in UTF-8.
    """
    below_text = sum(content.count(byte) for byte in range(FIRST_OF_TEXT))
    if below_text > len(content) / 4:  # in UTF-16 about half of all bytes are 0
        raise ValueError("it is no text in UTF-8, and may be one in UTF-16")
    return np.array(gpt2_encoding().encode_ordinary(content.decode("utf-8-sig")), dtype=np.uint16)


def import_tiktoken():
    """Return tiktoken. Not every Python that runs this has it: for ids in a file, and in watch.py, it is not needed."""
    try:
        import tiktoken
    except ImportError:
        raise TextError("this Python has no tiktoken: type pip install tiktoken") from None
    return tiktoken


def gpt2_encoding():
    """Return tiktoken's Encoding of GPT-2. Raises TextError if its vocabulary can't be had."""
    tiktoken = import_tiktoken()
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # no network, or a vocabulary of another hash
        raise TextError(f"no GPT-2 vocabulary ({type(error).__name__}): connect to a network once") from None


def single_bytes():
    """Return an Encoding of GPT-2's first 256 ids: first the bytes that can be printed, then the others."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    ids = {bytes([byte]): token_id for token_id, byte in enumerate(printable + others)}
    return import_tiktoken().Encoding("GPT-2's single bytes", pat_str="(?s).", mergeable_ranks=ids, special_tokens={})


# The text of those who bring none


def tiny_shakespeare():
    """Return the ids of Tiny Shakespeare, which is downloaded once. Raises an exception if it can't be."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpt2-speed-ladder/tinyshakespeare.bin")
    if not path.exists():
        print("downloading Tiny Shakespeare and GPT-2's vocabulary, 3 MB; --data docs goes without", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = urllib.request.urlopen(SHAKESPEARE_URL, timeout=10).read()
        if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
            raise OSError(f"{SHAKESPEARE_URL} sent another text")
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        try:
            ids_of_text(content).tofile(unfinished)
            unfinished.replace(path)  # so that another run never reads half of it
        finally:
            unfinished.unlink(missing_ok=True)
    return np.memmap(path, dtype=np.uint16, mode="r")


def pythons_documentation():
    """Return the ids of the language reference that comes with Python, one for each byte."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[topic] for topic in sorted(topics))
    return np.array(single_bytes().encode_ordinary(text), dtype=np.uint16)


# A reader's own file


def ids_of_file(path):
    """Return the ids in a user's file, a 1-D array of integers. Raises TextError if it holds none.

    A .npy is an array of ids, a .bin GPT-2's ids as uint16, with llm.c's header or without. Both stay on disk. Any
    other file is a text in UTF-8.
    """
    kind = path.suffix.lower()
    try:
        if kind == ".npy":
            ids = np.load(path, mmap_mode="r")
        elif kind == ".bin":
            ids = ids_of_bin(path)
        else:
            ids = ids_of_text(path.read_bytes())
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError("it is not a row of ids")
    except Exception as error:  # of many kinds, if the head of a .npy is broken
        reason = getattr(error, "strerror", None) or error  # the text of an OSError names the path, too
        raise TextError(f"--data {path}: {reason}; {REMEDY}") from None
    return ids


def ids_of_bin(path):
    """Return the ids in a .bin, without the header that llm.c writes. Raises ValueError if it is a text."""
    start = np.fromfile(path, np.uint8, 4096).tobytes()
    if start and min(start) >= FIRST_OF_TEXT:  # the ids of frequent tokens have lower bytes
        raise ValueError("it is a text, or a pointer of Git LFS")
    ids = np.memmap(path, dtype=np.uint16, mode="r")
    if start.startswith(HEADER_OF_BIN):
        ids = ids[IDS_OF_HEADER:]
    return ids
