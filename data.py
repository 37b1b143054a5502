"""Text to tokens to batches.

Tiny Shakespeare and GPT-2's vocabulary are downloaded once, and each text is tokenized once: both are cached.
Without a network the text is one that comes with Python, and the tokens are its bytes.
"""

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

VOCAB = 50257  # ids of GPT-2's tokenizer: 256 bytes, 50,000 merges and <|endoftext|>
VOCAB_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
VOCAB_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# How GPT-2 cuts a text into pieces before it merges bytes: contractions, words, numbers, punctuation, space.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# Begins the name of a folder in which write_whole is at work. A process that is killed leaves its folder.
UNFINISHED = ".unfinished-"

# Whether downloads are forbidden: LADDER_OFFLINE is set to anything but "" and "0", or a download has failed.
offline = os.environ.get("LADDER_OFFLINE", "") not in ("", "0")


class InputError(ValueError):
    """An error that the user can fix. Its message is one line that names the value and the remedy."""


class Tokens(np.ndarray):
    """A 1-D uint16 array of token ids that names its `corpus` and its `tokenizer`. Slices keep the names."""

    def __array_finalize__(self, source):
        self.corpus = getattr(source, "corpus", "unknown")
        self.tokenizer = getattr(source, "tokenizer", "unknown")


def printable(value):
    r"""Return the text of a value with every character spelled out that can't be printed on one line.

    These are line breaks (\n), control characters (\x1b) and the bytes of a file's name that are not UTF-8 (\udcff):
    a name can't forge a line, steer a terminal, or fail to be written.
    """
    characters = []
    for character in str(value):
        if character.isprintable():
            characters.append(character)
        else:
            characters.append(ascii(character).strip("'"))
    return "".join(characters)


def cache_dir():
    """Return the folder (a Path) of this user's downloads and token files. It may not exist yet."""
    custom = os.environ.get("XDG_CACHE_HOME")
    if custom:
        caches = Path(custom)
    elif sys.platform == "darwin":
        caches = _home() / "Library" / "Caches"
    else:
        caches = _home() / ".cache"
    return caches / "gpt2-speed-ladder"


def _home():
    """Return the user's home folder, or that for temporary files if there is none, as in some containers."""
    try:
        return Path.home()
    except RuntimeError:  # HOME is not set, and the system does not know the user
        return Path(tempfile.gettempdir())


def write_whole(path, *chunks):
    """Write bytes-like chunks, one after another, into a file that appears whole or stays as it was.

    Missing folders are made. Raises OSError, for example when the disk is full.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written in a folder beside the file's place, because a rename can't go from one disk to another.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED) as folder:
        unfinished = Path(folder, path.name)
        with open(unfinished, "wb") as file:
            file.writelines(chunks)
        os.replace(unfinished, path)


def download(url, sha256, path, timeout=10.0, limit=120.0):
    """Return the bytes at a URL and keep them in a file, which stays as it was unless all of them arrive.

    sha256: the hex digest that the bytes must have. timeout: seconds to wait for the server's next bytes.
    limit: seconds for the whole download. Raises OSError when the network fails or the digest is another,
    HTTPException when the server misbehaves, and ValueError when the environment names no valid proxy.
    """
    deadline = time.monotonic() + limit
    content = bytearray()
    with urllib.request.urlopen(url, timeout=timeout) as response:
        while chunk := response.read1(65536):
            content += chunk
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} took more than {limit:.0f} s")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise OSError(f"{url} sent {len(content):,} bytes with a sha256 other than {sha256[:12]}")
    with contextlib.suppress(OSError):  # without a cache the next run downloads again, no more
        write_whole(path, content)
    return bytes(content)


def _fetch(url, sha256, paths):
    """Return the bytes with this sha256 from the first of the paths that holds them, or else from the URL.

    A download is kept in the last path. After one that fails, which is reported on stderr, no other is tried.
    Returns None if the bytes can't be had.
    """
    global offline
    for path in paths:
        content = _read_checked(path, sha256)
        if content is not None:
            return content
    if offline:
        return None
    try:
        return download(url, sha256, paths[-1])
    except (OSError, ValueError, http.client.HTTPException) as error:
        offline = True  # the next one would wait for its timeout too
        print(f"no download ({error!a}): continuing with what is on this machine", file=sys.stderr)
        return None


def _read_checked(path, sha256):
    """Return the bytes of a file, or None if it can't be read or its content has another sha256."""
    try:
        content = path.read_bytes()
    except OSError:  # it is missing, or another user's folder is closed to us
        return None
    if hashlib.sha256(content).hexdigest() != sha256:
        return None
    return content


def _bytes_by_character():
    """Return {character: byte} in the order of the ids 0 to 255, as GPT-2's vocabulary file writes the bytes.

    The printable bytes come first and are written as themselves, the others as the characters from 256 on.
    """
    printable_bytes = []
    other_bytes = []
    for byte in range(256):
        character = chr(byte)
        if character.isprintable() and character != " ":
            printable_bytes.append(byte)
        else:
            other_bytes.append(byte)

    table = {}
    for byte in printable_bytes:
        table[chr(byte)] = bytes([byte])
    for index, byte in enumerate(other_bytes):
        table[chr(256 + index)] = bytes([byte])
    return table


def _encoding(name, pattern, vocabulary, special_tokens):
    """Return a tiktoken Encoding in which token i stands for the i-th bytes of the vocabulary.

    Raises InputError without tiktoken.
    """
    try:
        import tiktoken  # not at the top, since a run whose tokens are cached does without it
    except ImportError as error:
        remedy = "run make setup, or pip install tiktoken"
        raise InputError(f"can't import tiktoken ({error}): {remedy}") from None
    ranks = {token: index for index, token in enumerate(vocabulary)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens)


def byte_tokenizer():
    """Return the tiktoken Encoding "gpt2-bytes", which has GPT-2's ids of the 256 bytes and merges none.

    Raises InputError without tiktoken.
    """
    return _encoding("gpt2-bytes", r"\s+|\S+", _bytes_by_character().values(), {})


@functools.cache
def tokenizer():
    """Return the tiktoken Encoding in use: "gpt2", or "gpt2-bytes" where GPT-2's vocabulary can't be had.

    "gpt2" equals tiktoken.get_encoding("gpt2"), whose own download has no timeout.
    Raises InputError without tiktoken.
    """
    fallback = byte_tokenizer()  # made first, so that a missing tiktoken is reported before any download
    content = _fetch(VOCAB_URL, VOCAB_SHA256, _vocabulary_paths())
    if content is None:
        return fallback
    bytes_by_character = _bytes_by_character()
    vocabulary = list(bytes_by_character.values())
    for merge in content.decode().splitlines()[1:]:  # the first line is the format's version
        left_and_right = merge.replace(" ", "")
        vocabulary.append(b"".join(bytes_by_character[character] for character in left_and_right))
    return _encoding("gpt2", GPT2_PATTERN, vocabulary, {"<|endoftext|>": VOCAB - 1})


def _vocabulary_paths():
    """Return the paths at which GPT-2's vocabulary may be: in tiktoken's own caches, and last in ours."""
    file_name = hashlib.sha1(VOCAB_URL.encode()).hexdigest()  # as tiktoken names it
    folders = []
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if os.environ.get(variable):
            folders.append(Path(os.environ[variable]))
    folders.append(Path(tempfile.gettempdir(), "data-gym-cache"))
    folders.append(cache_dir() / "tiktoken")
    return [folder / file_name for folder in folders]


def load_tokens(source=None, split="train"):
    """Return the Tokens of a corpus: a 1-D uint16 array.

    source: None for Tiny Shakespeare, downloaded and cached (without a network, Python's language reference);
    a .txt in UTF-8, tokenized and cached by its content; or a .bin of uint16 ids of GPT-2's tokenizer, mapped
    from disk.
    split: "train" for the first nine tenths, "val" for the last, on which no stage trains, or "all".
    Raises InputError without tiktoken, and for a file that is missing, a pipe, empty, not UTF-8, or has ids
    past the vocabulary.
    """
    if source is None:
        text, corpus = _default_text()
        tokens = _tokenize(text, corpus)
    else:
        tokens = _load_file(Path(source))
    cut = len(tokens) * 9 // 10
    if split == "train":
        return tokens[:cut]
    if split == "val":
        return tokens[cut:]
    if split == "all":
        return tokens
    raise ValueError(f'split must be "train", "val" or "all", got {split!r}')


def _default_text():
    """Return a text (UTF-8 bytes) and its name.

    They are Tiny Shakespeare's or, where that can't be had, those of the language reference in this Python.
    Raises InputError if there is neither.
    """
    text = _fetch(SHAKESPEARE_URL, SHAKESPEARE_SHA256, [cache_dir() / "tinyshakespeare.txt"])
    if text is not None:
        return text, "Tiny Shakespeare"
    try:
        from pydoc_data.topics import topics
    except ImportError:
        problem = "no network, and this Python has no pydoc_data"
        raise InputError(f"{problem}: pass a text with --data FILE.txt") from None
    text = "\n".join(topics[topic] for topic in sorted(topics))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return text.encode(), f"Python {version} language reference"


def _load_file(path):
    """Return the Tokens of a user's .txt or .bin. Raises InputError."""
    try:
        path.stat()  # so that a missing file is called missing
        # A pipe is refused, because to open it would be to wait for its writer.
        if path.suffix not in (".txt", ".bin") or not path.is_file():
            raise ValueError("not a regular .txt or .bin file")
        if path.suffix == ".bin":
            ids = _map_ids(path)
        else:
            text = _read_text(path)
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        remedy = "pass a .txt in UTF-8 or a .bin of GPT-2's uint16 ids"
        raise InputError(f"data file {printable(path)}: {problem}; {remedy}") from None

    corpus = printable(path.name)  # it goes to terminals, records and pages
    if path.suffix == ".bin":
        return _named(ids, corpus, "gpt2")
    if hashlib.sha256(text).hexdigest() == SHAKESPEARE_SHA256:
        corpus = "Tiny Shakespeare"
    return _tokenize(text, corpus)


def _map_ids(path):
    """Return the ids of a .bin, memory-mapped.

    Raises ValueError if the file is empty or odd in length, or has an id past GPT-2's last.
    """
    ids = np.memmap(path, dtype=np.uint16, mode="r")
    largest = ids.max()
    if largest >= VOCAB:
        raise ValueError(f"id {largest} is past GPT-2's last, {VOCAB - 1}")
    return ids


def _read_text(path):
    """Return the bytes of a .txt. Raises ValueError if it is empty or not UTF-8."""
    text = path.read_bytes()
    if not text:
        raise ValueError("empty")
    text.decode()  # raises UnicodeDecodeError, a ValueError that names the position
    return text


def _tokenize(text, corpus):
    """Return the Tokens of a text (UTF-8 bytes): those in the cache or, the first time, the tokenizer's."""
    name = f"tokens-{hashlib.sha256(text).hexdigest()[:16]}"
    ids = _cached_ids(cache_dir() / f"{name}.gpt2")
    if ids is not None:
        return _named(ids, corpus, "gpt2")  # neither tiktoken nor the vocabulary was needed

    encoding = tokenizer()
    path = cache_dir() / f"{name}.{encoding.name}"
    ids = _cached_ids(path)
    if ids is None:
        ids = np.array(encoding.encode_ordinary(text.decode()), dtype=np.uint16)
        with contextlib.suppress(OSError):  # without a cache the next run tokenizes again, no more
            write_whole(path, hashlib.sha256(ids).digest(), ids)
    return _named(ids, corpus, encoding.name)


def _cached_ids(path):
    """Return the ids of a token file, memory-mapped, or None if it is missing, damaged or can't be read.

    A token file is the sha256 of the ids (32 bytes), then the ids (uint16).
    """
    try:
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError):  # ValueError: the file is empty
        return None
    digest = content[:32].tobytes()
    ids = content[32:]
    if hashlib.sha256(ids).digest() != digest:
        return None
    return ids.view(np.uint16)


def _named(ids, corpus, tokenizer_name):
    """Return ids as Tokens that know their corpus and their tokenizer."""
    tokens = ids.view(Tokens)
    tokens.corpus = corpus
    tokens.tokenizer = tokenizer_name
    return tokens


class TokenLoader:
    """Batches in the order of the corpus, which is a ring: after its last token comes its first.

    In every step each rank takes the next batch_size * seq_len tokens after those of the rank before it, so
    that world_size ranks read in one step what a single process reads in world_size steps. A step that takes
    more tokens than the corpus has reads some of them twice.
    Raises InputError if the corpus is too short for one sequence on every rank.
    """

    def __init__(self, tokens, batch_size, seq_len, rank=0, world_size=1):
        self.tokens = tokens
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.world_size = world_size
        self.tokens_per_batch = batch_size * seq_len
        self.position = rank * self.tokens_per_batch
        needed = world_size * seq_len + 1  # one more, for the last target
        if len(tokens) < needed:
            sequences = f"1 sequence of {seq_len} needs"
            if world_size > 1:
                sequences = f"{world_size} sequences of {seq_len} need"
            raise InputError(
                f"{tokens.corpus} has {len(tokens):,} tokens to train on, and {sequences} {needed:,}: "
                "pass a longer text, or a smaller --seq-len"
            )

    def next_batch(self):
        """Return x and y, int64 tensors (batch_size, seq_len), where y holds the token after each one of x.

        They lie in pinned memory where CUDA is in use, so that the copy to the GPU need not wait for the CPU.
        """
        positions = self.position + np.arange(self.tokens_per_batch + 1)
        ids = self.tokens[positions % len(self.tokens)]
        ids = torch.from_numpy(ids.astype(np.int64))
        self.position += self.world_size * self.tokens_per_batch
        # not is_available(): pinning opens a CUDA context, for which a CPU run has no use
        if torch.cuda.is_initialized():
            ids = ids.pin_memory()
        x = ids[:-1].view(self.batch_size, self.seq_len)
        y = ids[1:].view(self.batch_size, self.seq_len)
        return x, y
