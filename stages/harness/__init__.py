"""What a stage imports: its flags. Importing it makes data and model importable.

A stage loads flags, and what these need. harness/watch/ is what only watch.py imports, and harness/bench/ what only
bench.py imports. Both import from here, and never from each other.
"""

import sys

from .common import ROOT

sys.path.insert(0, str(ROOT))

from .flags import parse_args

__all__ = ["ROOT", "parse_args"]
