"""What each row should bring on this machine, by arithmetic, before it is measured."""

from dataclasses import replace

from ..arithmetic import shape_of_size
from ..flags import parse, settings_of
from . import page
from .results import Results, Run
from .rows import PROBE, starts_python
from .table import table_of


def words_on_forecast(results):
    """Return what each stage should bring, in words, or None where nothing can be said.

    results: of a bench whose probe has taken its warm-up.
    """
    return None if results.runs[PROBE, 0].error else page.expectations(forecast_of(results))


def forecast_of(results):
    """Return the Table of a bench before it is measured, which has predictions of stages alone.

    A row whose launcher starts a Python is not foretold, because that may start several processes, as torchrun does.
    """
    probe = results.runs[PROBE, 0]
    forecast = Results(results.bench)
    forecast.runs[PROBE, 0] = replace(probe, warmup=1)  # its first step loads libraries
    for row in results.table_rows:
        if not row.is_watched and not starts_python(row.launcher):
            header = header_of_stage(row, results.bench)
            forecast.runs[row.name, 0] = Run(0, 0, header, summary={"sdpa": probe.steps[-1]["sdpa"]})
    return table_of(forecast)


def header_of_stage(row, bench):
    """Return the header that a stage is going to write, as far as predictions need it."""
    args = parse(None, ["--device", bench["environment"]["device"], *bench["flags"], *row.flags])
    return {
        "settings": settings_of(args),
        "shape": shape_of_size(args.size, args.seq_len),
        "unit": "tok",
        "environment": bench["environment"],
        "fallbacks": args.fallbacks,
    }
