"""What must happen before torch loads, and the two names that a stage imports: parse_args and StepLog."""

import os
import sys
from pathlib import Path

from . import memory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # where data and model are, from any folder

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints to stderr
memory.ask_for_huge_pages()

# some containers set these to 1, and torch and cuBLAS would then take TF32 in s01, too
overrides = []
for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"):
    if name in os.environ:
        overrides.append(f"{name}={os.environ.pop(name)}")
if overrides and os.environ.get("RANK", "0") == "0":
    reason = "since each stage itself says where TF32 is used"
    print(f"unset {' and '.join(overrides)}, {reason}", file=sys.stderr)

if hasattr(sys.stdout, "reconfigure"):  # not where stdout is closed, and not in a notebook
    sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows a question mark


def __getattr__(name):
    """Import what a stage asks for. It is not imported above, because a page is drawn without torch."""
    if name == "parse_args":
        from .flags import parse_args

        return parse_args
    if name == "StepLog":
        from .log import StepLog

        return StepLog
    raise AttributeError(f"module {__name__} has no attribute {name}")
