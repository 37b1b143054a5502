"""A training script of the reader's own: where it runs, and whether it is a copy of a stage."""

import os
import re
from pathlib import Path

from .ladder import FOLDER


def logs_by_itself(script):
    """Tell whether a script is a stage or a copy of one: it imports harness, and has none of its own beside it."""
    if not os.path.isfile(script):  # Path.is_file() raises for a long word
        return False
    path = Path(script)
    folder = path.resolve().parent
    if folder != FOLDER and (folder / "harness").exists():
        return False
    text = path.read_text("utf-8", "replace")
    return re.search(r"^(from|import) harness\b", text, re.MULTILINE) is not None


def folder_of(script):
    """Return the folder in which a script runs: the one that the reader is in, or its own where it lies outside of it.

    nanoGPT's train.py, for one, reads files of its own folder by their names alone.
    """
    here, home = Path.cwd(), Path(script).resolve().parent
    return here if home.is_relative_to(here) else home
