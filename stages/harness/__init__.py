"""What a stage imports: its flags and its clock. Importing it makes data and model importable.

These are the modules of the harness. A module imports only from lines above its own.

arithmetic, intervals     what is known without a run: FLOPs and bytes; 95 % intervals
ladder, machine           the twelve stages, a line each; what a device is and can do
record, rates, weights    the lines that a run leaves; how fast a machine is; weights on disk
flags, stepprofile        parse_args; what --profile shows
steplog                   the clock of a stage
rows                      what the bench starts: each row is a command
results                   what the bench measured, and what follows from it
workers, page             the processes of the bench; its tables
probe                     a script that the bench starts beside its rows: it measures how fast the machine is
"""

import os
import sys
from pathlib import Path

os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)  # NVIDIA's containers set it, and s01 would have TF32
os.environ.pop("NVIDIA_TF32_OVERRIDE", None)  # it turns TF32 on or off in all stages
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler of torch 2.13 prints a line at each start

ROOT = Path(__file__).resolve().parents[2]  # where data.py and model.py are


def refuse_namesakes(folder):
    """Exit with one line where a folder has a data or model of its own, which its script would not get."""
    if folder == ROOT:
        return
    for name in ("data", "model"):
        for path in (folder / f"{name}.py", folder / name / "__init__.py"):
            if path.exists():
                print(f"error: {path} has the name of the ladder's {name}.py: rename it, as my_{name}", file=sys.stderr)
                sys.exit(2)  # refuse() is in data, which can't be imported yet


refuse_namesakes(Path(sys.argv[0]).resolve().parent)
sys.path.insert(0, str(ROOT))

from .flags import parse_args
from .steplog import StepLog

__all__ = ["StepLog", "parse_args"]
