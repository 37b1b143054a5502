"""What each stage should bring on this machine, by arithmetic, before it is measured."""

from .. import ladder, machine
from ..arithmetic import ADAMW, BUCKETS, CLIPPING, FUSED_ADAMW, UNSCALING, Work, shape_of_size
from ..flags import parse
from .change import change_of
from .page import aligned
from .rows import starts_python
from .table import Outcome, predicted_ratio
from .words import number_cell


def words_on_forecast(results):
    """Return what each stage should bring, in words.

    results: of a bench whose probe has ended. A row whose launcher starts a Python is not foretold, because
    that may start several processes, as torchrun does.
    """
    rates = results.rates
    outcomes = {}
    lines = [["row", "should be x above", "what you type"]]
    for row in results.table_rows:
        outcome = outcomes[row.name] = Outcome(row, [], [], None, None)
        if row.stage and not starts_python(row.launcher):
            args = parse(None, [*results.bench["flags"], *row.flags])
            outcome.work = work_of_stage(row.stage, args, results.bench["environment"]["tf32"], rates["sdpa"])
        base = outcomes.get(row.above)
        change = change_of(outcome, base)
        predicted = predicted_ratio(outcome, base, change, rates)
        lines.append([row.title, number_cell(predicted, "{:.2f}"), change.typed])
    if not any(outcome.work for outcome in outcomes.values()):
        return "Of these rows nothing can be predicted."
    before = "What each row should bring here, by arithmetic:"
    return f"{before}\n{aligned(lines)}\nA dash: it has no row above, or can't be predicted."


def work_of_stage(stage, args, has_tf32, sdpa):
    """Return the Work of a Stage's micro-batch, with the techniques of all stages before it.

    args: its flags. has_tf32: whether the device has units for it. sdpa: the kernel of attention that it chooses.
    """
    so_far = {each.short for each in ladder.STAGES[: ladder.STAGES.index(stage) + 1]}
    matmul_dtype = "float32"
    if "s02" in so_far and has_tf32:
        matmul_dtype = "tf32"
    if "s03" in so_far and machine.dtype_name(args.amp_dtype) != "float32":
        matmul_dtype = machine.dtype_name(args.amp_dtype)
    update = FUSED_ADAMW if "s10" in so_far else ADAMW
    if "s07" in so_far:
        update += CLIPPING
    if "s12" in so_far:
        update += BUCKETS
    if matmul_dtype == "float16":
        update += UNSCALING
    return Work(
        shape_of_size(args.size, args.seq_len),
        args.batch_size,
        matmul_dtype,
        on_cuda=args.device.type == "cuda",
        compiled="s04" in so_far and args.compile,
        flash="s05" in so_far and sdpa != "math",
        update=update,
        accum=args.accum if "s11" in so_far else 1,
    )
