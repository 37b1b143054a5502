"""What a stage imports: its flags and its clock.

The modules of the harness. Each imports only from the lines above its own.

arithmetic, intervals           what is known without a run: FLOPs and bytes; 95 % intervals
ladder, machine                 the twelve stages, a line each; what a device is and can do
record, rates, weights          the lines that a run leaves; the rates of a machine, measured; weights on disk
flags, stepprofile              parse_args; what --profile shows
steplog                         the clock of a stage
rows, results, workers, page    what the bench uses: commands, what was measured, processes, tables
probe                           a script, the row of the bench that measures the rates
"""

import os
import sys
from pathlib import Path

for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"):
    os.environ.pop(name, None)  # the first is set in NVIDIA's containers, and with either TF32 would be on in s01
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler of torch 2.13 prints of its own starts

ROOT = Path(__file__).resolve().parents[2]  # where data.py and model.py are


def refuse_namesakes(folder):
    """Exit with one line where the folder of a script has a data or model of its own: these names are the ladder's."""
    for name in ("data", "model"):
        for path in (folder / f"{name}.py", folder / name / "__init__.py"):
            if path.exists() and folder != ROOT:
                print(f"error: {path} has the name of the ladder's {name}.py: rename it, as my_{name}", file=sys.stderr)
                sys.exit(2)


refuse_namesakes(Path(sys.argv[0]).resolve().parent)
sys.path.insert(0, str(ROOT))

from .flags import parse_args
from .steplog import StepLog

__all__ = ["StepLog", "parse_args"]
