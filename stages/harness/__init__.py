"""What a stage imports: its flags. Importing it makes data and model importable.

A stage loads flags, and what these need. harness/watch/ is what only watch.py imports, and harness/bench/ what only
bench.py imports. Both import from here, and never from each other.
"""

import importlib.util
import sys

from .common import ROOT, refuse

sys.path.insert(0, str(ROOT))
for package in ("torch", "numpy"):
    if importlib.util.find_spec(package) is None:
        remedy = "type make setup && . .venv/bin/activate, or activate your script's environment"
        refuse(f"this Python has no {package}: {remedy}")

from .flags import parse_args

__all__ = ["ROOT", "parse_args"]
