"""What a stage imports: its flags and its clock.

The rooms of the harness, from the bottom up. A module imports only what stands before it.

arithmetic, ladder, intervals   what is known without a run: FLOPs and bytes, the twelve stages, 95 % intervals
machine, record, rates          what a device can do; the lines that a run leaves; the rates of a machine, measured
stepprofile, flags, steplog     what a stage uses: --profile, parse_args and StepLog
results, workers, schedule      what the bench runs: what was measured, processes, who of them steps when
page, modes                     what the bench says: tables and pages; the ladder, amp, limit and scale
probe                           a script, which measures the rates as a run of the bench
"""

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"):
    os.environ.pop(name, None)  # NVIDIA's containers set them, and TF32 would be on in s01
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler of torch 2.13 prints of its own starts

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def modules_of_the_ladder():
    """Inside, `data` and `model` are the ladder's modules. Afterwards they still are, for a stage to import.

    A script of the reader's own may have a data.py or a model.py beside it. Then that name is the script's own
    afterwards, and the ladder's module is the harness's alone.
    """
    folder = Path(sys.argv[0]).resolve().parent
    own = []
    for name in ("data", "model"):
        spec = PathFinder.find_spec(name, [str(folder)])
        if folder != ROOT and spec and spec.origin:  # a folder of that name without code has no origin
            own.append(name)
    imported = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    sys.path.insert(0, str(ROOT))
    yield
    sys.path.remove(str(ROOT))
    for name in own:
        del sys.modules[name]  # the harness has it, and nobody else gets it
    sys.modules.update(imported)


with modules_of_the_ladder():
    from .flags import parse_args
    from .steplog import StepLog

__all__ = ["StepLog", "parse_args"]
