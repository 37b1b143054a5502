"""What a stage imports: its flags and its clock.

The rooms of the harness, from the bottom up. A module imports only what stands before it.

arithmetic, ladder, intervals    what is known without a run: FLOPs and bytes, the twelve stages, 95 % intervals
machine, record, probe           what a device can do; the lines that a run leaves; the rates of a machine, measured
stepprofile, weights             what --profile shows; weights on disk and their held-out loss
flags, steplog                   what a stage uses: parse_args and StepLog
rows, results, workers, page     what the bench uses: commands, what was measured, processes, tables
"""

import os
import sys
from pathlib import Path

for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"):
    os.environ.pop(name, None)  # NVIDIA's containers set them, and TF32 would be on in s01
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler of torch 2.13 prints of its own starts

ROOT = Path(__file__).resolve().parents[2]  # where data.py and model.py are


def refuse_namesakes(folder):
    """Exit with one line where a folder, that of a script, has a data or model of its own: the ladder's is meant."""
    for name in ("data", "model"):
        for path in (folder / f"{name}.py", folder / name / "__init__.py"):
            if path.exists() and folder != ROOT:
                print(f"error: {path} has the name of the ladder's {name}.py: rename it, as my_{name}", file=sys.stderr)
                sys.exit(2)


refuse_namesakes(Path(sys.argv[0]).resolve().parent)
sys.path.append(str(ROOT))

from .flags import parse_args
from .steplog import StepLog

__all__ = ["StepLog", "parse_args"]
