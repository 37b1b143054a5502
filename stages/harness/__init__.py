"""What a stage imports: its flags and its clock. Importing it makes data and model importable.

What runs beside a training loop is here. harness/watch/ is what only watch.py imports, and harness/bench/ what only
bench.py imports. Both import from here, and never the other way.
"""

import os
import sys
from pathlib import Path

from .common import ROOT

sys.path.insert(0, str(ROOT))

is_for_other_scripts = Path(sys.argv[0]).resolve() in (ROOT / "bench.py", ROOT / "stages" / "watch.py")
if not is_for_other_scripts:  # whose environment is left as it is
    # For a stage TF32 is off until s02 turns it on. NVIDIA's containers set the first one, some users the second, and
    # guides for Arm let float32 matmuls run in bfloat16 by the last one.
    for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE"):
        os.environ.pop(name, None)
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler of torch 2.13 prints a line at each start

from .flags import parse_args
from .steplog import StepLog

for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):  # else there is none, or a test has put another object there
        stream.reconfigure(errors="replace")  # ? for a sign that a terminal in ASCII or Latin-1 does not have

__all__ = ["ROOT", "StepLog", "parse_args"]
