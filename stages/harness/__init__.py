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
from pathlib import Path

for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"):
    os.environ.pop(name, None)  # NVIDIA's containers set them, and TF32 would be on in s01
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler of torch 2.13 prints of its own starts

ROOT = Path(__file__).resolve().parents[2]


def own_modules(folder):
    """Return {name: path} of the data and model that lie in the folder of a script of the reader's own."""
    paths = {}
    for name in ("data", "model"):
        for path in (folder / f"{name}.py", folder / name / "__init__.py"):
            if path.is_file() and folder != ROOT:
                paths[name] = path
    return paths


@contextlib.contextmanager
def modules_of_the_ladder():
    """Inside, `data` and `model` are the ladder's modules. Afterwards they still are, for a stage to import.

    Where the script has own_modules() of these names, the names are the script's afterwards, and the ladder's modules
    are the harness's alone.
    """
    own = own_modules(Path(sys.argv[0]).resolve().parent)
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
