"""What a stage imports: its flags. Importing it makes data and model importable.

What runs beside a training script is here. harness/watch/ is what only watch.py imports, and harness/bench/ what only
bench.py imports. Both import from here, and never the other way.
"""

import os
import sys

from .common import ROOT

sys.path.insert(0, str(ROOT))
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler of torch 2.13 prints a line at each start

from .flags import parse_args

for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):  # else there is none, or a test has put another object there
        stream.reconfigure(errors="replace")  # ? for a sign that a terminal in ASCII or Latin-1 does not have

__all__ = ["ROOT", "parse_args"]
