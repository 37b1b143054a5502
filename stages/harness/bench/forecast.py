"""What each row should bring on this machine, by arithmetic, before it is measured."""

from dataclasses import replace

from .. import ladder, machine, ranks
from ..arithmetic import PADDED_VOCAB, VOCAB, shape_of_size
from ..flags import parse
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
        if row.stage and not starts_python(row.launcher):
            args = parse(None, [*results.bench["flags"], *row.flags])
            techniques = techniques_of(row.stage, args, probe.steps[-1]["sdpa"])
            header = header_of(args, techniques["accum"], results.bench["environment"])
            forecast.runs[row.name, 0] = Run(0, 0, header, techniques=techniques, summary={})
    return table_of(forecast)


def header_of(args, accum, environment):
    """Return the header that a stage is going to write, as far as predictions need it."""
    settings = {"batch_size": args.batch_size, "accum": accum, "world_size": ranks.world_size()}
    shape = shape_of_size(args.size, args.seq_len)
    return {"settings": settings, "shape": shape, "unit": "tok", "environment": environment}


def techniques_of(stage, args, sdpa):
    """Return the techniques that a Stage is going to show, as far as predictions need them.

    sdpa: the kernel that scaled_dot_product_attention chooses here.
    """
    so_far = {each.short for each in ladder.STAGES[: ladder.STAGES.index(stage) + 1]}
    amp_dtype = machine.dtype_name(args.amp_dtype)
    return {
        "weights": "float32",
        "tf32": "s02" in so_far,
        "autocast": amp_dtype if "s03" in so_far and amp_dtype != "float32" else None,
        "compile": "s04" in so_far and args.compile,
        "sdpa": sdpa if "s05" in so_far else None,
        "attention": True,
        "vocabulary": PADDED_VOCAB if "s06" in so_far else VOCAB,
        "clips": "s07" in so_far,
        "schedules": "s08" in so_far,
        "groups": "s09" in so_far,
        "fused": "s10" in so_far,
        "accum": args.accum if "s11" in so_far else 1,
        "ddp": "s12" in so_far,
        "loaders": 0,
        "machine": machine.techniques_of(args.device),
    }
