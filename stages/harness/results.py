"""From the lines of a record to runs, samples, ratios and verdicts.

Starts nothing, writes nothing, imports no torch.

The format of a record
======================

A record is a text file with one JSON object in each line. `--record FILE` of a stage writes the lines of one
run: a header, a line for each step, and a summary or an error. A run without a summary and without an error
did not finish. Here is an example of each kind. The long ones are wrapped here; in a record each is a single
line.

    {"kind": "header", "stage": "s10_fused", "title": "Stage 10 · fused: fused AdamW.",
     "code": "4ca2d2a6b5ad0c2a91e2f3a9370c324952541c28742fdee7a8391c06ca0ad7a7",
     "commit": "569c6896ba9f02081652514135fcf8a37681b9b6", "dirty": false,
     "settings": {"steps": 24, "batch_size": 1, "seq_len": 1024, "size": "micro", "seed": 1337, "lr": 0.0006,
                  "data": null, "compile": false, "accum": 2, "world_size": 1, "amp_dtype": "bfloat16",
                  "corpus": "Tiny Shakespeare", "tokenizer": "gpt2",
                  "memory_variables": {"THP_MEM_ALLOC_ENABLE": "1"}},
     "shape": {"vocab_size": 50304, "n_layer": 4, "n_head": 4, "n_embd": 256}, "parameters": 16299520,
     "tokens_per_step": 1024,
     "environment": {"device": "cpu", "device_name": "AMD EPYC", "threads": 2, "cores": 2, "tf32": false,
                     "native_dtype": "bfloat16", "system": "Linux x86_64", "python": "3.11.7",
                     "torch": "2.13.0+cpu", "cuda": null, "cudnn": null, "driver": null, "hip": null},
     "fallbacks": {"compile": "left out, no C++ compiler found"}, "started": "2026-11-21T02:13:12+00:00"}
    {"kind": "step", "step": 0, "loss": 10.94, "norm": 7.12, "lr": 3e-05, "dt": 0.465, "tokens": 1024,
     "memory": 1870000000, "meter": "peak RSS", "page_faults": 212}
    {"kind": "summary", "dt_ms": 465.1, "dt_q1_ms": 460.2, "dt_q3_ms": 471.9, "tok_per_sec": 2201.7,
     "memory": 1870000000, "meter": "peak RSS", "loss": 6.01, "counted": 20, "warmup_s": 5.6, "eval": 6.12,
     "sdpa": "flash", "compile_cache": null}
    {"kind": "error", "reason": "out-of-memory", "error": "out of memory at batch size 4: try --batch-size 2"}

dt is in seconds, memory in bytes, a loss in nats per token. A figure that is not finite is null, and so is
one that this machine can't measure. A step has "norm" and "lr" only where its stage logs them; "page_faults" is
how many pages it got from the system. "lr" in the settings is the learning rate, the highest one where it decays;
older records lack it, and ran at 6e-4. The steps of a run are numbered from 0 without a gap. A header starts its
run afresh: what the same run wrote before it no longer counts. A reason is one of REASONS.

A summary has the figures of summarize(), "sdpa", the attention kernel that ran, or null, and with --eval
"eval", the held-out loss. With --profile there are three keys more: "profile", {operation: [ms of its own, ms with
what it called, calls]}, the longest first; "parts", {part of the step: ms}; and "rates", what rates.measure() returns.
"compile_cache" is "hit" where torch.compile found every graph in its cache, "miss" where it did not, and null where it
compiled none. On CUDA there are two keys more: "reserved", the bytes that PyTorch took from the driver, and after a
warm-up "card", what nvidia-smi told of the card before the first counted step, as "start", and after the last one, as
"end". Each of the two has "sm_clock" in MHz, "power" and "power_limit" in watts, and "temperature" in degrees Celsius.
Older records lack "compile_cache" and "card".

In the mode `loss` of the bench a run has no step lines, since of six hundred steps a page shows nothing but a curve.
Its summary has one key more, "curve", a list of the training loss in nats per token: each point is the mean over a
twentieth of the steps, and the first twentieth has no point. With fewer than forty steps each point is one step.

results/NAME.jsonl holds all runs of one bench. Its first line is the bench's own:

    {"kind": "bench", "mode": "ladder",
     "change": {"s01_baseline": "float32, explicit attention", "s02_tf32": "TF32 for float32 matmuls"},
     "interleaved": true, "warmup": 4, "steps": 24, "rounds": 1, "corpus_tokens": 304222,
     "environment": {"device": "cpu", "device_name": "AMD EPYC", "threads": 2, "cores": 2, "tf32": false,
                     "native_dtype": "bfloat16", "system": "Linux x86_64", "python": "3.11.7",
                     "torch": "2.13.0+cpu", "cuda": null, "cudnn": null, "driver": null, "hip": null},
     "command": "python bench.py s01 s02"}

"change" names the rows in the table's order, with the words of the table. "warmup" and "steps" are of each
run (the probe may take fewer), and "rounds" says how often every process starts afresh. "title" heads the page
in place of the mode; bench.py never writes it, and other programs measured beside the stages have one. In the
mode `loss` "rates" are the learning rates, from the lowest to the highest; where there are several, a row is a
stage at one of them, and has a name such as "s06_vocab lr 6e-4". Older records lack "rates". What bench.py
writes beside these keys is for --resume, which compares it; the mode `limit` also reads "memory_budget", the bytes
that a run may hold. Every other line has two keys more, "session" (the number of the group of processes that ran
together; in the mode `loss` that of the seed) and "name" (of the row). The probe's lines are steps too, with figures
of their own, in bytes, seconds, FLOP/s by dtype, and bytes/s:

    {"kind": "step", "session": 0, "name": "peak", "step": 0, "size": 2048,
     "peak": {"float32": 1.8e11, "bfloat16": 6.1e11}, "copy": 3.5e10, "clear": {"4 kB": 2.1e9, "2 MB": 7.9e9}}
    {"kind": "step", "session": 0, "name": "all-reduce 2 ranks", "step": 0, "bytes": 65000000, "dt": 0.05}
"""

import json
import math
import re
import shlex
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from . import arithmetic, ladder

WARMUP = 4  # steps left out of the figures: compilation, autotuning, memory touched for the first time
LEARNING_RATE = 6e-4  # of a run that was given none
CONTROL = " again"  # ends the name of the A/A control, a second run of one row
PEAK = "peak"  # the name of the run that times matmuls, see probe.py
ALL_REDUCE = "all-reduce "  # begins the name of the run that times an all-reduce, before that of its row
MODES = ("ladder", "amp", "limit", "scale", "loss", "memory")

# the reasons of an error line; a message is for people, and nothing is decided by its wording
OUT_OF_MEMORY = "out-of-memory"
NOT_FOR_THIS_DEVICE = "not-for-this-device"  # the device can't run the stage, which is no failure
BAD_INPUT = "bad-input"  # what the user can fix: a flag, a file, a disk
INTERRUPTED = "interrupted"
LOSS_NOT_FINITE = "loss-not-finite"
COMPILE_FAILED = "compile-failed"
ANOTHER_RANK_ENDED = "another-rank-ended"
NO_ANSWER = "no-answer"  # no step came within the bench's --timeout
KILLED = "killed"
CRASHED = "crashed"  # all else
REASONS = (OUT_OF_MEMORY, NOT_FOR_THIS_DEVICE, BAD_INPUT, INTERRUPTED, LOSS_NOT_FINITE, COMPILE_FAILED)
REASONS += (ANOTHER_RANK_ENDED, NO_ANSWER, KILLED, CRASHED)


class ResultsError(ValueError):
    """A record or a page that can't be used. Its message is one line that names the file and the remedy."""


# a number beyond these was never measured, and sums with it would overflow
LARGEST = 1e40
SMALLEST = 1e-12  # of figures that must be above 0

# what a line must hold for a page to be drawn: for each key the types of its value, or the keys of an object
TEXT = (str,)
TEXT_OR_NONE = (str, type(None))
FLAG = (bool,)
WHOLE = (int,)
NUMBER = (int, float)
NUMBER_OR_NONE = (int, float, type(None))
OBJECT = (dict,)
LIST = (list,)
ENVIRONMENT = {
    "device": TEXT,
    "device_name": TEXT,
    "system": TEXT,
    "torch": TEXT,
    "python": TEXT,
    "cuda": TEXT_OR_NONE,
    "cudnn": NUMBER_OR_NONE,
    "driver": TEXT_OR_NONE,
    "threads": WHOLE,
    "cores": WHOLE,
    "tf32": FLAG,
}
SETTINGS = {
    "size": TEXT,
    "batch_size": WHOLE,
    "seq_len": WHOLE,
    "seed": WHOLE,
    "accum": WHOLE,
    "world_size": WHOLE,
    "compile": FLAG,
    "amp_dtype": TEXT,
    "corpus": TEXT,
    "tokenizer": TEXT,
}
HEADER = {
    "stage": TEXT,
    "code": TEXT,
    "commit": TEXT_OR_NONE,
    "dirty": FLAG,
    "started": TEXT,
    "settings": SETTINGS,
    "shape": {"vocab_size": WHOLE, "n_layer": WHOLE, "n_head": WHOLE, "n_embd": WHOLE},
    "environment": ENVIRONMENT,
    "fallbacks": OBJECT,
}
BENCH = {
    "mode": TEXT,
    "change": OBJECT,
    "interleaved": FLAG,
    "warmup": WHOLE,
    "steps": WHOLE,
    "rounds": WHOLE,
    "command": TEXT,
    "environment": ENVIRONMENT,
}
TRAINING_STEP = {
    "loss": NUMBER_OR_NONE,
    "dt": NUMBER,
    "tokens": WHOLE,
    "memory": NUMBER_OR_NONE,
    "meter": TEXT,
}
PEAK_STEP = {"size": WHOLE, "peak": OBJECT}
CLEARING_RATES = {"4 kB": NUMBER, "2 MB": NUMBER}
ALL_REDUCE_STEP = {"dt": NUMBER, "bytes": WHOLE}
SUMMARY = {"sdpa": TEXT_OR_NONE}
CARD_STATE = {
    "sm_clock": NUMBER_OR_NONE,
    "power": NUMBER_OR_NONE,
    "temperature": NUMBER_OR_NONE,
    "power_limit": NUMBER_OR_NONE,
}
CARD = {"start": CARD_STATE, "end": CARD_STATE}
ERROR = {"reason": TEXT, "error": TEXT}


def rate_text(rate):
    """A learning rate as names, tables and charts show it, such as 6e-4 or 1.2e-3."""
    digits, exponent = f"{rate:e}".split("e")
    digits = digits.rstrip("0").rstrip(".")
    return f"{digits}e{int(exponent)}"


def name_at_rate(stage, rate):
    """The name of a stage's row at one of several learning rates, such as "s06_vocab lr 6e-4"."""
    return f"{stage} lr {rate_text(rate)}"


def stage_and_rate(name):
    """("s06_vocab", "6e-4") of the name of a row at a rate; the whole name and "" of another row."""
    stage, _, rate = name.rpartition(" lr ")
    if not stage:
        return name, ""
    return stage, rate


def check_value(key, value, types):
    """Raise ValueError unless a value has one of these types, or these fields, and is no absurd number."""
    if isinstance(types, dict):
        check_value(key, value, OBJECT)
        check_fields(value, types)
        return
    if type(value) not in types:
        raise ValueError(f"{key!r} is {value!r}")
    if type(value) in NUMBER and abs(value) > LARGEST:
        raise ValueError(f"{key!r} is too large")


def check_fields(entry, fields):
    """Raise ValueError unless an object has these keys, each with a value of its types; others are fine."""
    for key, types in fields.items():
        if key not in entry:
            raise ValueError(f"{key!r} is missing")
        check_value(key, entry[key], types)


def check_positive(entry, *keys):
    """Raise ValueError unless the numbers of these keys are above 0."""
    for key in keys:
        if entry[key] < SMALLEST:
            raise ValueError(f"{key!r} is {entry[key]}")


def check_not_negative(entry, *keys):
    """Raise ValueError where a number of these keys is below 0. None is welcome."""
    for key in keys:
        if entry[key] is not None and entry[key] < 0:
            raise ValueError(f"{key!r} is {entry[key]}")


def check_name(name):
    """Raise ValueError unless this can name a row, such as s05_flash, 2 ranks or s05_flash B4, or a dtype."""
    if not re.fullmatch(r"[\w .-]{1,100}", name):
        raise ValueError(f"{name!r} is no name")


def check_bench(entry):
    """Raise ValueError where the bench's own line could not be drawn."""
    check_fields(entry, BENCH)
    if entry["mode"] not in MODES:
        raise ValueError(f"'mode' is {entry['mode']!r}")
    if not entry["change"]:
        raise ValueError("'change' is empty")
    for name, change in entry["change"].items():
        check_name(name)
        if probe_of_name(name):
            raise ValueError(f"{name!r} is no row")
        check_value(name, change, TEXT)
    check_positive(entry, "warmup", "rounds")
    if entry["steps"] <= entry["warmup"]:
        raise ValueError(f"'steps' is {entry['steps']}")
    shlex.split(entry["command"])  # as --resume does; a ValueError where a quotation mark is missing
    if "title" in entry:
        check_value("title", entry["title"], TEXT)
    if "sources" in entry:
        check_value("sources", entry["sources"], OBJECT)
    if "rates" in entry:  # not in older records
        check_rates_of_bench(entry)
    if "corpus_tokens" in entry:  # not in the oldest records
        check_value("corpus_tokens", entry["corpus_tokens"], WHOLE)
        check_positive(entry, "corpus_tokens")


def check_rates_of_bench(entry):
    """Raise ValueError unless a bench's learning rates are numbers above 0, and several have a row for each stage."""
    rates = entry["rates"]
    check_value("rates", rates, LIST)
    for rate in rates:
        check_value("rates", rate, NUMBER)
        check_positive({"rates": rate}, "rates")
    if len(rates) > 1:
        wanted = set()
        for name in entry["change"]:
            stage, _ = stage_and_rate(name)
            wanted |= {name_at_rate(stage, rate) for rate in rates}
        if wanted != entry["change"].keys():
            raise ValueError("'change' has not each stage at each of the 'rates'")


def check_header(entry):
    """Raise ValueError where a run's header could not be drawn."""
    check_fields(entry, HEADER)
    check_positive(entry["settings"], "batch_size", "seq_len", "accum", "world_size")
    if "lr" in entry["settings"]:  # not in older records
        check_value("lr", entry["settings"]["lr"], NUMBER)
        check_positive(entry["settings"], "lr")
    check_positive(entry["shape"], "vocab_size", "n_layer", "n_head", "n_embd")
    if not re.fullmatch(r"[^/\\]{1,100}", entry["stage"]):  # the name of a file in stages/, without ".py"
        raise ValueError(f"'stage' is {entry['stage']!r}")
    for name, reason in entry["fallbacks"].items():
        check_value(name, reason, TEXT)


def check_step(entry):
    """Raise ValueError where a step's line could not be drawn."""
    check_fields(entry, {"step": WHOLE})
    probe = probe_of_step(entry)
    if probe == PEAK:
        check_peak_step(entry)
    elif probe == ALL_REDUCE:
        check_fields(entry, ALL_REDUCE_STEP)
        check_positive(entry, "dt", "bytes")
    else:
        check_fields(entry, TRAINING_STEP)
        check_positive(entry, "dt", "tokens")
        check_not_negative(entry, "loss", "memory")
        if "page_faults" in entry:
            check_value("page_faults", entry["page_faults"], WHOLE)


def check_peak_step(entry):
    """Raise ValueError where what the probe measured could not be drawn."""
    check_fields(entry, PEAK_STEP)
    rates = entry["peak"]
    if not rates:
        raise ValueError("'peak' is empty")
    for dtype in rates:
        check_name(dtype)
        check_value(dtype, rates[dtype], NUMBER)
        check_positive(rates, dtype)
    if "copy" in entry:
        check_value("copy", entry["copy"], NUMBER)
        check_positive(entry, "copy")
    if "clear" in entry:  # on Linux alone
        check_fields(entry, {"clear": CLEARING_RATES})
        check_positive(entry["clear"], *CLEARING_RATES)


def check_summary(entry):
    """Raise ValueError where a run's summary could not be drawn."""
    check_fields(entry, SUMMARY)
    for key in ("eval", "reserved"):
        if key in entry:
            check_value(key, entry[key], NUMBER)
            check_not_negative(entry, key)
    if "card" in entry:
        check_value("card", entry["card"], CARD)
    if "curve" in entry:
        check_value("curve", entry["curve"], LIST)
        for loss in entry["curve"]:
            check_value("curve", loss, NUMBER)
            check_not_negative({"curve": loss}, "curve")
    compile_cache = entry.get("compile_cache")
    if compile_cache not in ("hit", "miss", None):
        raise ValueError(f"'compile_cache' is {compile_cache!r}")


def check_error(entry):
    """Raise ValueError where the line of a run that failed could not be drawn."""
    check_fields(entry, ERROR)
    if entry["reason"] not in REASONS:
        raise ValueError(f"'reason' is {entry['reason']!r}")


def check_line(entry):
    """Raise ValueError where a line of a record lacks what a page needs, or holds what can't be measured."""
    check_value("the line", entry, OBJECT)
    kind = entry.get("kind")
    if kind == "bench":
        check_bench(entry)
    elif kind == "header":
        check_header(entry)
    elif kind == "step":
        check_step(entry)
    elif kind == "summary":
        check_summary(entry)
    elif kind == "error":
        check_error(entry)
    else:
        raise ValueError(f"'kind' is {kind!r}")


def probe_of_name(name):
    """PEAK or ALL_REDUCE for the name of a run of the probe, None for that of a row of the table."""
    if name == PEAK:
        return PEAK
    if name.startswith(ALL_REDUCE):
        return ALL_REDUCE
    return None


def probe_of_step(step):
    """PEAK or ALL_REDUCE for a step of the probe, by what it measured, None for a step of training."""
    if "peak" in step:
        return PEAK
    if "bytes" in step:
        return ALL_REDUCE
    return None


def check_place(entry):
    """Raise ValueError unless a bench's line has a session and a row, and a step the figures of its row."""
    check_fields(entry, {"session": WHOLE, "name": TEXT})
    check_not_negative(entry, "session")
    check_name(entry["name"])
    if entry["kind"] == "step" and probe_of_step(entry) != probe_of_name(entry["name"]):
        raise ValueError(f"a step of {entry['name']!r} has the figures of another kind of run")


def check_rates(steps):
    """Raise ValueError unless the probe measured the same things in all of its steps."""
    for step in steps:
        if step.keys() != steps[0].keys() or step["peak"].keys() != steps[0]["peak"].keys():
            raise ValueError(f"step {step['step']} of the probe has other rates than those before")


def refuse_constant(name):
    """Raise ValueError for NaN and Infinity, which are numbers to Python's json and none to the standard."""
    raise ValueError(f"{name} is no number of JSON")


def damaged(path, place, error):
    """The ResultsError of a record with this ValueError at a place, such as "line 3"."""
    why = " ".join(str(error).split())[:100]
    return ResultsError(f"{path}: {place} is damaged ({why}): put the file back as it was, or remove it")


def read(path):
    """The lines of a record, a list of dicts. A last line that was cut off in the writing is left out.

    Raises OSError, and ResultsError that names a line which is damaged.
    """
    lines = []
    complete_lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    for number, line in enumerate(complete_lines, 1):
        try:
            entry = json.loads(line, parse_constant=refuse_constant)
            check_line(entry)
        except (ValueError, RecursionError) as error:
            raise damaged(path, f"line {number}", error) from None
        lines.append(entry)
    return lines


@dataclass
class Run:
    """What one process left in a record; None for what it did not get to."""

    header: dict | None = None
    steps: list = field(default_factory=list)
    summary: dict | None = None
    error: dict | None = None

    @property
    def ended(self):
        """Whether the process came to an end, good or bad, that stands in the record."""
        return self.summary is not None or self.error is not None


def run_of(lines):
    """The Run of one process from its lines, dicts. Raises ValueError where another step is due."""
    run = Run()
    for line in lines:
        if line["kind"] == "header":
            run = Run(header=line)  # a run that was started again replaces the one before
        elif line["kind"] == "step":
            if line["step"] != len(run.steps):
                raise ValueError(f"step {line['step']} stands where step {len(run.steps)} is due")
            run.steps.append(line)
        elif line["kind"] == "summary":
            run.summary = line
        else:
            run.error = line
    return run


def curve_of_first(runs):
    """The first training curve of some Runs, a list of losses; an empty one where none has a curve."""
    for run in runs:
        if run.summary and "curve" in run.summary:
            return run.summary["curve"]
    return []


def check_curves(runs):
    """Raise ValueError unless all training curves of these Runs have as many points."""
    points = len(curve_of_first(runs))
    for run in runs:
        if run.summary and "curve" in run.summary and len(run.summary["curve"]) != points:
            raise ValueError("the training curves have different numbers of points")


def runs_by_row(lines):
    """{(session, name): Run}, sorted, from the lines of a bench without the first. Raises ValueError."""
    lines_of_run = {}
    for line in lines:
        if line["kind"] == "bench":
            raise ValueError("a second bench begins")
        check_place(line)
        lines_of_run.setdefault((line["session"], line["name"]), []).append(line)
    return {key: run_of(lines_of_run[key]) for key in sorted(lines_of_run)}


def summarize(steps, warmup=WARMUP):
    """The figures of a run, the same for the line that a stage prints and the row that a table shows.

    steps: the step lines of a record, one or more. Returns a dict with the median of dt and its quartiles
    (ms), tokens per second, memory (bytes, or None), the memory's meter, the last loss, how many steps were
    counted, and the seconds of the warm-up. Where no step came after the warm-up, `counted` is 0 and the last
    step stands for all.
    """
    after_warmup = steps[warmup:]
    counted = after_warmup if after_warmup else steps[-1:]
    dts = [step["dt"] for step in counted]
    if len(dts) > 1:
        first_quartile, median, third_quartile = statistics.quantiles(dts, n=4, method="inclusive")
    else:
        first_quartile = median = third_quartile = dts[0]
    memories = [step["memory"] for step in counted if step["memory"]]
    return {
        "dt_ms": 1e3 * median,
        "dt_q1_ms": 1e3 * first_quartile,
        "dt_q3_ms": 1e3 * third_quartile,
        "tok_per_sec": counted[0]["tokens"] / median,
        "memory": max(memories, default=None),
        "meter": counted[0]["meter"],
        "loss": steps[-1]["loss"],
        "counted": len(after_warmup),
        "warmup_s": sum(step["dt"] for step in steps[:warmup]),
    }


def curve_steps(steps):
    """(first steps, length) of the points of a training curve: each is the mean over a twentieth of the steps.

    The first twentieth is left out: the loss falls so far in it that nothing else would be seen.
    """
    length = max(1, steps // 20)
    return range(length, steps - length + 1, length), length


def training_curve(losses):
    """The training curve of a run from the losses of all its steps, a list of means: see curve_steps()."""
    first_steps, length = curve_steps(len(losses))
    return [statistics.mean(losses[first : first + length]) for first in first_steps]


@dataclass(frozen=True)
class Estimate:
    """A median or a mean of some samples, with its 95 % interval.

    value: in the samples' unit. spread: how far the interval reaches to its wider side, in the same unit;
    None for a single sample, which has no interval.
    """

    value: float
    spread: float | None

    def text(self, digits=2):
        """The figure for a page, such as "1.82 ± 0.06"."""
        if self.spread is None:
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} ± {self.spread:.{digits}f}"


def order_statistic(n):
    """k, such that the k-th smallest and k-th largest of n samples enclose the median in 95 % of cases.

    That is exact for any distribution: a sample is below the median with probability 1/2, so how many are
    below it follows the binomial distribution (Conover, Practical Nonparametric Statistics). The largest such
    k is taken. Below six samples there is none, and 1 stands for the whole range.
    """
    largest = 1
    missed = 0.0  # how often the median lies outside of the k-th samples
    for k in range(1, n // 2 + 1):
        missed += 2 * math.comb(n, k - 1) / 2**n
        if missed <= 0.05:
            largest = k
    return largest


def median_estimate(samples):
    """The median of samples with its exact interval; below six samples with their range."""
    ordered = sorted(samples)
    median = statistics.median(ordered)
    if len(ordered) == 1:
        return Estimate(median, None)
    k = order_statistic(len(ordered))
    low, high = ordered[k - 1], ordered[-k]
    return Estimate(median, max(high - median, median - low))


# Student's t for a two-sided interval of 95 %, for 2, 3, ... 31 samples
STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
STUDENT_T += (2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04)


def mean_estimate(samples):
    """The mean of samples with its interval by Student's t, which is up to 4 % too wide for more than 31."""
    n = len(samples)
    mean = statistics.mean(samples)
    if n == 1:
        return Estimate(mean, None)
    t = STUDENT_T[min(n, 31) - 2]
    return Estimate(mean, t * statistics.stdev(samples) / math.sqrt(n))


def distance(ratio):
    """How far a ratio of two speeds is from 1, the same for its inverse: 0.25 for 1.25 and for 0.8."""
    return max(ratio, 1 / ratio) - 1


class Results:
    """All records of one bench.

    bench: its own line. mode, rows (names in the table's order), warmup: of that line. rates: the learning rates of
    a bench that compares several, else an empty list. counted_wanted: how many counted steps a row needs. runs:
    {(session, name): Run}, sorted.
    """

    def __init__(self, path):
        """Read results/NAME.jsonl. Raises OSError, and ResultsError for what is no record of one bench."""
        lines = read(path)
        if not lines or lines[0]["kind"] != "bench":
            raise ResultsError(f"{path} is no record of a bench: pass the NAME of one that ran")
        self.bench = lines[0]
        self.mode = self.bench["mode"]
        self.rows = list(self.bench["change"])
        self.warmup = self.bench["warmup"]
        self.rates = self.bench.get("rates", [])
        if self.mode != "loss" or len(self.rates) == 1:
            self.rates = []
        self.counted_wanted = (self.bench["steps"] - self.warmup) * self.bench["rounds"]
        try:
            self.runs = runs_by_row(lines[1:])
            check_rates(self.counted_steps(PEAK))
            check_curves(self.runs.values())
        except ValueError as error:
            raise damaged(path, "a run", error) from None

    def runs_of(self, name):
        """The Runs of a row, in the order of the sessions."""
        return [run for (_, row), run in self.runs.items() if row == name]

    def header(self, name):
        """The first header of a row, or None where no run of it got that far."""
        for run in self.runs_of(name):
            if run.header:
                return run.header
        return None

    def any_header(self):
        """The first header of all, or None where no run got that far."""
        for run in self.runs.values():
            if run.header:
                return run.header
        return None

    def error(self, name):
        """The error line that the last run of a row ended with, or None."""
        runs = self.runs_of(name)
        if not runs:
            return None
        return runs[-1].error

    def errors(self, name):
        """The error lines of all runs of a row."""
        return [run.error for run in self.runs_of(name) if run.error]

    def counted_steps(self, name):
        """Every step of a row after the warm-up, of all its sessions."""
        counted = []
        for run in self.runs_of(name):
            counted += run.steps[self.warmup :]
        return counted

    def summary(self, name):
        """summarize() of a row's counted steps, with "reserved" (bytes, 0 on a CPU); None without any."""
        steps = self.counted_steps(name)
        if not steps:
            return None
        runs = self.runs_of(name)
        figures = summarize(steps, warmup=0)
        figures["warmup_s"] = sum(step["dt"] for step in runs[0].steps[: self.warmup])
        figures["reserved"] = max((run.summary or {}).get("reserved", 0) for run in runs)
        return figures

    def samples(self, name):
        """{round: what is compared}: seconds per token, of the probe per FLOP, in the mode `loss` losses.

        A round is a step where the processes take steps in turn, else a session, which in the mode `loss` is
        that of a seed.
        """
        samples = {}
        for (session, row), run in self.runs.items():
            if row != name:
                continue
            if self.mode == "loss":
                if run.summary and "eval" in run.summary:
                    samples[session, 0] = run.summary["eval"]
                continue
            times = [time_per_unit(step) for step in run.steps[self.warmup :]]
            if self.bench["interleaved"]:
                samples |= {(session, i): time for i, time in enumerate(times)}
            elif times:
                samples[session, 0] = statistics.median(times)
        return samples

    def compare(self, name, base):
        """The Estimate of a row against another, from the rounds of both; None where they share none.

        It is the median of the ratios of their speeds, above 1 where the row is the faster one; in the mode
        `loss` the mean of the differences of their losses, below 0 where the row's loss is the lower one.
        """
        ours, theirs = self.samples(name), self.samples(base)
        rounds = sorted(ours.keys() & theirs.keys())
        if not rounds or name == base:
            return None
        if self.mode == "loss":
            return mean_estimate([ours[key] - theirs[key] for key in rounds])
        return median_estimate([theirs[key] / ours[key] for key in rounds])

    def bases(self):
        """The rows that every row is compared with: the first one, and after `plain` s01's too, which is the second."""
        if self.mode == "ladder" and self.rows[0] == ladder.PLAIN:
            return self.rows[:2]
        return self.rows[:1]

    def row_above(self, name):
        """The name of the row above; for the first row its own."""
        return self.rows[max(0, self.rows.index(name) - 1)]

    def effect(self, name):
        """The ladder.Effect of a stage's technique on this machine; None for no stage and before it ran."""
        stage, facts = ladder.find(name), self.facts(name)
        if stage is None or facts is None:
            return None
        return stage.effect(facts)

    def facts(self, name):
        """The ladder.Facts of a row, or None before it ran."""
        header = self.header(name)
        if header is None:
            return None
        summary = self.summary(name)
        return ladder.Facts(
            environment=header["environment"],
            settings=header["settings"],
            fallbacks=header["fallbacks"],
            warmup_s=summary["warmup_s"] if summary else None,
            sdpa=self.sdpa(name),
            compile_cache=self.compile_cache(name),
        )

    def machine_rates(self):
        """The arithmetic.Rates that the probe measured, medians over its counted steps; None where it left none."""
        steps = self.counted_steps(PEAK)
        if not steps or "copy" not in steps[0]:  # the oldest records have no copy
            return None
        return arithmetic.Rates(self.matmul_rates(), statistics.median(step["copy"] for step in steps))

    def matmul_rates(self):
        """{dtype: FLOP/s} of the probe's large matmuls, medians over its counted steps, of which there must be one."""
        steps = self.counted_steps(PEAK)
        rates = {}
        for dtype in steps[0]["peak"]:
            rates[dtype] = statistics.median(step["peak"][dtype] for step in steps)
        return rates

    def all_reduce_seconds(self, name):
        """The median seconds of an all-reduce on a row's ranks by itself, or None where none was timed."""
        dts = [step["dt"] for step in self.counted_steps(ALL_REDUCE + name)]
        return statistics.median(dts) if dts else None

    def seconds_per_micro_batch(self, name):
        """The median seconds that a row takes for one micro-batch of one rank, or None before it ran."""
        summary, header = self.summary(name), self.header(name)
        if summary is None:
            return None
        settings = header["settings"]
        tokens = settings["batch_size"] * settings["seq_len"] * settings["world_size"]
        return tokens / summary["tok_per_sec"]

    def predicted_saving(self, name):
        """The seconds of a micro-batch that a stage should save against the row above; below 0 where it costs some.

        The FLOPs and bytes of both stages are divided by the rates that the probe measured in the same rounds. None
        where arithmetic can't tell: without those rates, for a row that is no stage or stands below none, and for
        stages whose worth FLOPs and bytes do not show.
        """
        above, rates, facts = self.row_above(name), self.machine_rates(), self.facts(name)
        if rates is None or facts is None or not ladder.is_predictable_against(name, above):
            return None
        shape = self.header(name)["shape"]
        before, after = ladder.work_of(above, facts, shape), ladder.work_of(name, facts, shape)
        if not arithmetic.has_rate_for(before, rates) or not arithmetic.has_rate_for(after, rates):
            return None
        return arithmetic.seconds(before, rates) - arithmetic.seconds(after, rates)

    def predicted(self, name):
        """How many times as fast as the row above a row should be, or None where nothing can be said.

        Of the time of the row above, as it was measured, the predicted saving is taken away. In the mode `scale` the
        ranks divide the first row's step among them, and wait for the all-reduce that the probe measured.
        """
        if self.mode == "scale":
            return self._predicted_of_ranks(name)
        before, saved = self.seconds_per_micro_batch(self.row_above(name)), self.predicted_saving(name)
        if before is None or saved is None:
            return None
        if saved >= before:  # more than there is to save: these rates are not those of this step
            return None
        return before / (before - saved)

    def _predicted_of_ranks(self, name):
        """How many times as fast as the row above so many ranks should be; None for the first row."""
        above = self.row_above(name)
        before, now = self._predicted_step_of_ranks(above), self._predicted_step_of_ranks(name)
        if name == above or before is None or now is None:
            return None
        return before / now

    def _predicted_step_of_ranks(self, name):
        """Seconds that a step should take on a row's ranks: the first row's by their number, and an all-reduce."""
        first_row, header = self.summary(self.rows[0]), self.header(name)
        if first_row is None or header is None:
            return None
        seconds = 1e-3 * first_row["dt_ms"] / header["settings"]["world_size"]
        if header["settings"]["world_size"] == 1:
            return seconds
        all_reduce = self.all_reduce_seconds(name)
        if all_reduce is None:
            return None
        return seconds + all_reduce

    def efficiency(self, name):
        """What the ranks of a row reach of so many times the speed of the first row, from 0 to 1, or None."""
        speedup, header = self.compare(name, self.rows[0]), self.header(name)
        if speedup is None or header is None:
            return None
        return speedup.value / header["settings"]["world_size"]

    def sdpa(self, name):
        """The attention kernel that ran in a row, such as "flash", or None."""
        for run in self.runs_of(name):
            if run.summary and run.summary.get("sdpa"):
                return run.summary["sdpa"]
        return None

    def compile_cache(self, name):
        """Whether torch.compile found the graphs of a row's first run in its cache: "hit", "miss" or None."""
        runs = self.runs_of(name)  # the warm-up that a table shows is the first one, too
        if not runs or runs[0].summary is None:
            return None
        return runs[0].summary.get("compile_cache")

    def is_program_of_row_above(self, name):
        """Whether a row took the steps of the row above, since its technique does nothing to a step here."""
        if self.mode != "ladder" or not ladder.follows(name, self.row_above(name)):
            return False
        effect = self.effect(name)
        return effect is not None and effect.no_op

    def controls(self):
        """{(name, name): Estimate} for runs of one program: the A/A control, and rows like the row above."""
        pairs = [(name + CONTROL, name) for name in self.rows]
        pairs += [(name, self.row_above(name)) for name in self.rows if self.is_program_of_row_above(name)]
        ratios = {}
        for name, base in pairs:
            ratio = self.compare(name, base)
            if ratio:
                ratios[name, base] = ratio
        return ratios

    def noise(self):
        """How far two runs of one program came out apart at worst, as a distance(); None without such a pair.

        The interval of a ratio holds the scatter between rounds. This holds what lasts for a whole process,
        such as where its memory lies.
        """
        distances = [distance(ratio.value) for ratio in self.controls().values()]
        return max(distances, default=None)

    def verdict(self, name):
        """A row against the row above in a word or two, "" where nothing can be said.

        "faster" or "slower", in the mode `loss` "lower" or "higher", and "no difference" where the ratio is
        within its interval or within the noise. A row that took the very steps of the row above is within the
        noise, since the noise is the worst of such pairs. The modes `amp`, `scale` and `memory` compare with
        the first row.
        """
        if self.mode == "limit":
            return ""
        base = self.row_above(name) if self.mode in ("ladder", "loss") else self.rows[0]
        estimate = self.compare(name, base)
        if estimate is None:
            return ""
        if self.mode == "loss":
            return self.verdict_on_loss(estimate)
        noise = self.noise()
        if noise is None:
            return ""
        if distance(estimate.value) <= noise:
            return "no difference"
        if estimate.spread is not None and abs(estimate.value - 1) <= estimate.spread:
            return "no difference"
        return "faster" if estimate.value > 1 else "slower"

    def verdict_on_loss(self, difference):
        """The Estimate of a difference of two losses in a word or two, "" for that of a single seed."""
        if difference.spread is None:
            return ""
        if abs(difference.value) <= difference.spread:
            return "no difference"
        return "higher" if difference.value > 0 else "lower"

    def stages(self):
        """The stages of a bench of several rates, in the table's order."""
        stages = []
        for name in self.rows:
            stage, _ = stage_and_rate(name)
            if stage not in stages:
                stages.append(stage)
        return stages

    def best_rate(self, stage):
        """The learning rate at which a stage has the lowest mean held-out loss; None where no run has a loss.

        The mean is over the seeds that all rates have, so that an unfinished bench compares like with like. A rate at
        which the loss of one seed was not finite is none to recommend, and is left out.
        """
        losses = {}
        shared_seeds = {(session, 0) for session, _ in self.runs}  # as samples() names them
        for rate in self.rates:
            name = name_at_rate(stage, rate)
            samples = self.samples(name)
            diverged = any(error["reason"] == LOSS_NOT_FINITE for error in self.errors(name))
            if diverged or not samples:
                continue
            losses[rate] = samples
            shared_seeds &= samples.keys()
        if not losses or not shared_seeds:
            return None
        means = {}
        for rate, samples in losses.items():
            means[rate] = statistics.mean(samples[seed] for seed in shared_seeds)
        return min(means, key=means.get)

    def best_rows(self):
        """{stage: name of its row at its best rate} of the stages that have one, in the table's order."""
        names = {}
        for stage in self.stages():
            rate = self.best_rate(stage)
            if rate is not None:
                names[stage] = name_at_rate(stage, rate)
        return names

    def page_faults(self, name):
        """How many pages a row gets from the system in a step, the median; None where no record tells."""
        faults = [step["page_faults"] for step in self.counted_steps(name) if "page_faults" in step]
        return statistics.median(faults) if faults else None

    def peak_share(self, name):
        """The share of the machine's matmul peak that a row turned into training, from 0 to 1, or None.

        The median over the rounds; with several ranks the share of one.
        """
        ratio, header = self.compare(name, PEAK), self.header(name)
        if ratio is None or header is None:
            return None
        flops = arithmetic.flops_per_token(header["shape"], header["settings"]["seq_len"])
        return ratio.value * flops / header["settings"]["world_size"]

    def problem(self, name):
        """Why a row is not complete: its error, or "not finished" or "not run"; "" where it is complete."""
        error = self.error(name)
        if error:
            if error["reason"] in (OUT_OF_MEMORY, NOT_FOR_THIS_DEVICE):
                return error["error"]
            return f"failed: {error['error']}"
        if self.mode == "loss":
            if len(self.samples(name)) == self.bench["rounds"]:
                return ""
        elif len(self.counted_steps(name)) >= self.counted_wanted:
            return ""
        if self.header(name):
            return "not finished"
        return "not run"

    def is_complete(self):
        """Whether every row got to its end without an error, or is one that this device can't run."""
        for name in self.rows:
            if self.mode == "limit":
                if not any(self.counted_steps(run_name) for run_name in self.batches(name).values()):
                    return False
            elif self.problem(name):
                error = self.error(name)
                if error is None or error["reason"] != NOT_FOR_THIS_DEVICE:
                    return False
        return True

    def batches(self, stage):
        """{batch size: name of its run} of what the mode `limit` tried with a stage."""
        names = {}
        for _, name in self.runs:
            tried, _, batch = name.partition(" B")
            if tried == stage and batch.isdecimal():
                names[int(batch)] = name
        return names

    def largest_batch(self, stage):
        """The largest batch size of a stage whose last run in the mode `limit` fitted, or None."""
        names = self.batches(stage)
        fitting = []
        for batch in names:
            last_run = self.runs_of(names[batch])[-1]
            if last_run.summary and not last_run.error:
                fitting.append(batch)
        return max(fitting, default=None)

    def smallest_batch_that_failed(self, stage):
        """The smallest batch size of a stage whose last run in the mode `limit` ended in an error, or None."""
        names = self.batches(stage)
        failed = [batch for batch in names if self.error(names[batch])]
        return min(failed, default=None)

    def is_stale(self, name):
        """Whether the stage's code has changed since a row was measured. Of a script that is gone nobody can tell."""
        names = self.batches(name).values() if self.mode == "limit" else [name]
        for row in names:
            header = self.header(row)
            if header and ladder.exists(header["stage"]) and header["code"] != ladder.code_sha256(header["stage"]):
                return True
        return False

    def last_common_step(self):
        """The number of the last step that every row with counted steps got to."""
        reached = [self.bench["steps"]]
        for name in self.rows:
            if self.counted_steps(name):
                reached.append(max(len(run.steps) for run in self.runs_of(name)))
        return min(reached) - 1

    def loss_at(self, name, step):
        """The training loss of a row at a step, or None where no run got there."""
        for run in self.runs_of(name):
            if len(run.steps) > step and run.steps[step]["loss"]:
                return run.steps[step]["loss"]
        return None


def time_per_unit(step):
    """Seconds per token of a training step, or seconds per FLOP of the probe's step, at its highest rate."""
    if "peak" in step:
        return 1 / max(step["peak"].values())
    return step["dt"] / step["tokens"]
