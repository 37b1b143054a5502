"""What each row should bring on this machine, by arithmetic, before it is measured."""

from dataclasses import replace

from ..arithmetic import shape_of_size
from ..flags import settings_of
from .results import Results, Run
from .rows import PROBE, starts_python
from .table import table_of


def forecast_of(results, stage_args):
    """Return the Table of a bench before it is measured, which has predictions of stages alone.

    results: of a bench whose probe has taken its warm-up. stage_args: {name of a row: the flags of its stage}. A row
    whose launcher starts a Python is not foretold, because that may start several processes, as torchrun does.
    """
    probe = results.runs[PROBE, 0]
    forecast = Results(results.bench)
    forecast.runs[PROBE, 0] = replace(probe, warmup=1)  # its first step is left out
    for row in results.table_rows:
        if row.is_of_the_ladder and not starts_python(row.launcher):
            header = header_of_stage(stage_args[row.name], results.bench)
            forecast.runs[row.name, 0] = Run(0, 0, header, summary={"sdpa": probe.steps[-1]["sdpa"]})
    return table_of(forecast)


def header_of_stage(args, bench):
    """Return the header that a stage is going to write, as far as predictions need it."""
    return {
        "settings": settings_of(args),
        "shape": shape_of_size(args.size, args.seq_len),
        "unit": "tok",
        "environment": bench["environment"],
        "fallbacks": args.fallbacks,
    }
