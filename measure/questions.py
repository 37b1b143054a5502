"""The bench's questions: which contenders each compares, how it runs them, and what the answer looks like."""

import re

import torch

from data import InputError
from measure import table
from measure.figures import RATE, Results
from measure.processes import Contender, Process, free_memory
from stages import machine
from stages.record import WARMUP, read_record

QUESTIONS = {  # and the stages each asks where none is named
    "amp": ["s03_bf16"],
    "limit": ["s05_flash", "s11_accum"],
    "scale": ["s12_ddp"],
}
VARIES = {  # what a question is about may differ between its records
    "amp": ["amp_dtype"],
    "limit": ["batch_size", "steps"],
    "scale": ["world_size", "threads"],
}
PROBE_STEPS = 2  # the second step holds AdamW's moments and the activations at once, the most a run ever does


def contenders(args):
    """The rows of a bench. Raises InputError for a question put to a stage that can't answer it."""
    if args.question == "amp":
        if len(args.stages) > 1 or int(args.stages[0][1:3]) < 3:
            raise InputError("amp compares dtypes in one stage from s03 on: pass one, such as s10")
        if "amp_dtype" in args.given:
            raise InputError("amp runs every dtype: leave --amp-dtype out")
        script = f"stages/{args.stages[0]}.py"
        return [Contender(dtype, script, ["--amp-dtype", dtype]) for dtype in ("float32", "float16", "bfloat16")]
    if args.question == "scale":
        if args.stages != ["s12_ddp"]:
            raise InputError("scale is about s12, the one stage that knows several processes")
        most, cores = ranks(args), machine.cores()
        env = {} if args.device.type != "cpu" else {"OMP_NUM_THREADS": str(max(1, cores // most))}
        if args.accum % most:
            args.accum = most * max(1, round(args.accum / most))
        return [on_ranks(n, "stages/s12_ddp.py", f"{n} rank" + "s" * (n > 1), env) for n in sizes(most)]
    return [Contender(stage, f"stages/{stage}.py") for stage in args.stages]


def ranks(args):
    """The largest number of processes that scale asks for."""
    cpu = args.device.type == "cpu"
    there = machine.cores() if cpu else getattr(torch, args.device.type).device_count()
    most = args.ranks or (min(2, there) if cpu else there)
    if most > there:
        raise InputError(f"--ranks {most}: this machine has {there} {'cores' if cpu else 'devices'}")
    return most


def sizes(most):
    """1, 2, 4, ... and `most` itself."""
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})


def on_ranks(n, script, name, env):
    """A contender of n processes on this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    return Contender(name, script, launcher=launcher, env=env, ranks=n)


def extras(args, rows):
    """What runs between the rows and is none: the products that give the limit, or the all-reduce of scale."""
    if args.question == "scale":
        return [on_ranks(c.ranks, "measure/allreduce.py", f"allreduce {c.name}", c.env) for c in rows if c.ranks > 1]
    return [Contender(RATE, "measure/rate.py")]


def body(results, stages=None):
    """The answer as markdown: what is printed, written to results/NAME.md and put into a README.

    stages: the way from the page to the stages' folder, for links to them; None for a terminal.
    """
    if results.settings["question"] == "limit":
        return f"{limit_table(results)}\n\n{table.under_the_table(results)}\n"
    answer = {"amp": recommendation, "scale": scaling}.get(results.settings["question"])
    said = f"\n\n{answer(results)}" if answer else ""
    return f"{table.table(results, stages)}{said}\n\n{table.under_the_table(results)}\n\n{table.charts(results)}"


def page(results):
    """The whole of results/NAME.md."""
    title = {
        "ladder": "The ladder",
        "amp": "float32, float16 and bfloat16",
        "limit": "The largest batch that fits",
        "scale": "One process and several",
    }[results.settings["question"]]
    return f"# {title} on {results.settings['environment']['device_name']}\n\n{body(results, '../stages/')}"


def complete(results):
    """Whether every row got to its end without a failure."""
    if results.settings["question"] == "limit":
        return all(any(results.summary(n) for _, n in results.records if n.startswith(f"{s} B")) for s in results.names)
    ends = [results.end(name) for name in results.names]
    return all(end and "error" not in end for end in ends)


def recommendation(results):
    """What the 16-bit types are worth here, in words, by their measured speed-up over float32."""
    lines = []
    for name in results.names[1:]:
        ratio = results.speedup(name, "float32")
        if not ratio:
            lines.append(f"- {name}: no figures")
            continue
        grades = ((1.5, "excellent: switch it on"), (1.2, "significant: switch it on"), (1.05, "modest"))
        grade = next((words for least, words in grades if ratio.value > least), None)
        grade = grade or ("negligible" if ratio.value >= 0.95 else "slower: leave it off")
        saved = 1 - results.summary(name)["memory"] / results.summary("float32")["memory"]
        memory = f"{100 * abs(saved):.0f} % {'less' if saved >= 0 else 'more'} memory"
        if abs(ratio.value - 1) <= max(results.noise() or 0, ratio.spread):
            grade += "; but this is inside the noise of the run: more --batches would tell"
        lines.append(f"- {name}: {ratio} times float32's speed, {memory}: {grade}.")
    return "\n".join(lines)


def scaling(results):
    """Efficiency, and how much of a step the gradients' all-reduce takes, of each number of processes."""
    one, lines = results.names[0], []
    for name in results.names[1:]:
        ratio, header = results.speedup(name, one), results.header(name)
        if not ratio:
            lines.append(f"- {name}: no figures")
            continue
        n = header["world_size"]
        line = f"- {name}: {ratio} times the speed of one process, efficiency {100 * ratio.value / n:.0f} %"
        reduce = results.steps(f"allreduce {name}")
        if reduce:
            seconds = sorted(step["dt"] for step in reduce)[len(reduce) // 2]
            part = 100 * seconds / (results.summary(name)["dt_ms"] / 1e3)
            line += (
                f"; an all-reduce of its {reduce[0]['bytes'] / 1e6:.0f} MB of gradients by itself takes "
                f"{1e3 * seconds:.1f} ms, {part:.1f} % of a step (DDP hides some of it behind the backward)"
            )
        lines.append(line + ".")
    header = results.header(one)
    if header and header["environment"]["device"] == "cpu":
        threads = header["environment"]["threads"]
        lines.append(f"- Threads of a process: {threads} in every row, so that n processes have n times one's cores.")
    return "\n".join(lines)


def limit_table(results):
    """The largest batch of each stage that fits, its figures, and what stopped the next."""
    lines = ["| stage | largest batch | tok/sec | memory GB | stopped by |", "|:--|--:|--:|--:|:--|"]
    for stage in results.names:
        names = sorted((n for _, n in results.records), key=lambda n: not n.endswith(" probe"))  # the last one counts
        tried = {int(m[1]): n for n in names if (m := re.fullmatch(rf"{stage} B(\d+)( probe)?", n))}
        fits = [b for b, n in tried.items() if results.end(n) and "error" not in results.end(n)]
        fails = {b: results.end(n)["error"] for b, n in tried.items() if results.end(n) and "error" in results.end(n)}
        stopped = f"B {min(fails)}: {fails[min(fails)]}".replace("|", "/") if fails else "nothing yet: not finished"
        summary = results.summary(f"{stage} B{max(fits)}") if fits else None
        if summary:
            speed, memory = f"{summary['tok_per_sec']:,.0f}", table.memory(summary)
            lines.append(f"| {stage} | {max(fits)} | {speed} | {memory} | {stopped} |")
        else:
            lines.append(f"| {stage} | {max(fits, default='none')} | – | – | {stopped} |")
    return "\n".join(lines)


def find_limit(args, stage, parts, flags, say):
    """Double the batch until it no longer fits, bisect, and run the largest that does; a fresh process for each."""
    budget = None
    if args.device.type == "cpu":
        free = free_memory()
        budget = args.memory_budget * 1e9 if args.memory_budget else free and free / 2

    def fits(batch, steps, name):
        record = parts / f"0-{stage} B{batch}{name}.jsonl"
        before = read_record(record)[2] if record.exists() else None
        if before in (None, {"error": "interrupted"}):
            record.unlink(missing_ok=True)
            process = Process(
                Contender(f"{stage} B{batch}", f"stages/{stage}.py"),
                [*flags, "--batch-size", str(batch), "--steps", str(steps)],
                record,
                budget,
            )
            try:
                done = all(process.go(args.timeout) for _ in range(steps))
                if done:
                    process.finish(60)
            finally:
                process.stop()
            process.leave_reason()
        _, done, end = Results.read(parts).records[0, f"{stage} B{batch}{name}"]
        good = end is not None and "error" not in end
        say(f"{stage} B {batch}: " + ("fits" if good else (end or {}).get("error", "did not finish")))
        return good

    low, high = 0, 1
    while fits(high, PROBE_STEPS, " probe"):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle, PROBE_STEPS, " probe") else (low, middle)
    while low and not fits(low, WARMUP + 3, ""):
        low -= 1  # a longer run holds a little more
