"""What a stage imports: its flags and its clock."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where data and model are
for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"):
    os.environ.pop(name, None)  # NVIDIA's containers set them, and TF32 would be on in s01

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler of torch 2.13 prints of its own starts

from .flags import parse_args
from .log import StepLog

__all__ = ["StepLog", "parse_args"]
