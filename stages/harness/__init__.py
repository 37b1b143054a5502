"""What a stage imports: its flags and its clock. Importing it makes data and model importable.

What runs beside a training loop is here, and in harness/bench/ what only bench.py imports. Modules of the bench import
from here, and never the other way.
"""

import os
import sys
from pathlib import Path

if Path(sys.argv[0]).name not in ("watch.py", "bench.py"):  # a script that is watched keeps its environment
    os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)  # NVIDIA's containers set it, and s01 would have TF32
    os.environ.pop("NVIDIA_TF32_OVERRIDE", None)  # it turns TF32 on or off in all stages
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if os.environ.get(name) == "":  # an empty variable is none
            del os.environ[name]
    if "WORLD_SIZE" not in os.environ:  # what a cluster has left over of the others is for no process that is alone
        os.environ.pop("MASTER_ADDR", None)
        os.environ.pop("MASTER_PORT", None)
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler of torch 2.13 prints a line at each start

ROOT = Path(__file__).resolve().parents[2]  # where data.py and model.py are
sys.path.insert(0, str(ROOT))

from .flags import parse_args
from .steplog import StepLog
from .terminal import replace_missing_signs

replace_missing_signs()

__all__ = ["StepLog", "parse_args"]
