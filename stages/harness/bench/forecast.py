"""What each row should bring on this machine, by arithmetic, before it is measured."""

from dataclasses import replace

from .. import machine
from ..arithmetic import shape_of_size
from ..flags import parse
from .results import Results
from .rows import PROBE, starts_python
from .table import table_of


def forecast_of(results):
    """Return the Table of a bench before it is measured, which has predictions alone.

    It is that of a record with a header for each stage, and no steps. results: of a bench whose probe has taken its
    warm-up. The probe's first step is left out, and so is a row whose launcher starts a Python, because that may start
    several processes, as torchrun does.
    """
    forecast = Results(results.bench | {"warmup": 1})
    probe = results.runs[PROBE, 0]
    forecast.runs[PROBE, 0] = replace(probe, warmup=1)
    kernel = probe.steps[-1]["sdpa"]
    for row in results.table_rows:
        if row.is_of_the_ladder and not starts_python(row.launcher):
            about = {"name": row.name, "round": 0}
            forecast.add(about | {"kind": "start"})
            forecast.add(about | header_of(row, results.bench))
            forecast.add(about | {"kind": "summary", "sdpa": kernel})
    return table_of(forecast)


def header_of(row, bench):
    """Return the header that a stage is going to write, as far as predictions need it."""
    args = parse(None, [*bench["flags"], *row.flags])
    return {
        "kind": "header",
        "settings": {
            "batch_size": args.batch_size,
            "compile": args.compile,
            "accum": args.accum,
            "world_size": 1,
            "amp_dtype": machine.dtype_name(args.amp_dtype),
        },
        "shape": shape_of_size(args.size, args.seq_len),
        "environment": bench["environment"],
        "fallbacks": args.fallbacks,
    }
