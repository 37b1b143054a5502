"""The lines of a record: their format, how a run writes them and a page reads them, and the figures of some steps.

The format of a record
======================

A record is a text file with one JSON object in each line. `--record FILE` of a stage writes the lines of one run: a
header, a line for each step, and a summary. An example of each, the long ones wrapped:

    {"kind": "header", "stage": "s10_fused", "title": "Stage 10 · fused: fused AdamW.",
     "code": "4ca2d2a6b5ad0c2a91e2f3a9370c324952541c28742fdee7a8391c06ca0ad7a7", "commit": "569c6896ba9f",
     "settings": {"steps": 24, "batch_size": 1, "seq_len": 1024, "size": "micro", "seed": 1337, "lr": 0.0006,
                  "data": null, "compile": false, "accum": 2, "world_size": 1, "amp_dtype": "bfloat16",
                  "corpus": "Tiny Shakespeare", "tokenizer": "gpt2"},
     "shape": {"vocab_size": 50257, "n_layer": 4, "n_head": 4, "n_embd": 256}, "parameters": 16299520,
     "environment": {"device": "cpu", "device_name": "AMD EPYC", "threads": 2, "cores": 2, "tf32": false,
                     "native_dtype": "bfloat16", "system": "Linux x86_64", "python": "3.11.7",
                     "torch": "2.13.0+cpu", "cuda": null, "driver": null},
     "fallbacks": {"compile": "left out, no C++ compiler found"}, "started": "2026-11-21T02:13:12+00:00"}
    {"kind": "step", "step": 0, "loss": 10.94, "norm": 7.12, "lr": 3e-05, "dt": 0.465, "tokens": 1024,
     "memory": 1870000000, "meter": "peak RSS"}
    {"kind": "summary", "sdpa": "flash", "eval": 6.12}

dt is in seconds, memory in bytes, a loss in nats per token. A figure that is not finite is null. "shape" is null for a
script that trains no GPT. The steps are numbered from 0, and the first four are warm-up. "commit" has a + behind it
where files differ from it. "sdpa" is the kernel that F.scaled_dot_product_attention chooses there. Other keys of a
summary: "eval", the held-out loss, with --eval; "reserved", bytes, on CUDA; "rates" and "parts" with --profile.

results/NAME.jsonl holds all runs of one bench. Its first line is the bench's own:

    {"kind": "bench", "mode": "ladder", "pair_by": "step", "steps": 24, "rounds": 1,
     "rows": [{"name": "s01_baseline", "stage": "s01_baseline", "change": "float32, explicit attention"}, ...],
     "controls": {"s01_baseline again": "s01_baseline"}, "enough": null, "memory_budget": null,
     "corpus": ["Tiny Shakespeare", "gpt2"],
     "environment": {...}, "code": {"bench.py": "9f2c...", ...}, "command": "python bench.py s01 s02"}

"rows" are those of the table, in its order. A row of the mode `loss` has "lr", too. "controls" names each second run of
a row. "pair_by" says what pairs the samples of two rows: "step" where all processes are alive at once and take one step
each in turn; "session" where each row has a fresh process in each of several rounds; "seed" in the mode `loss`.
"enough" is [steps, seconds], both of which a row had counted before it took no more, or null where each took all its
steps. "memory_budget", in GB, is what a run of the mode `limit` may hold on a CPU.

Every other line has two keys more: "name", of the row, and "session", the number of the group of processes that ran
together; in the mode `loss` that of the seed, in the mode `limit` the batch size. A process that failed leaves a line
{"kind": "error", "error": "out of memory at batch size 4: try --batch-size 2"}. The lines of the probe are steps, with
figures of their own: FLOP/s by dtype, bytes per second, seconds and bytes:

    {"kind": "step", "session": 0, "name": "peak", "step": 0, "size": 2048,
     "peak": {"float32": 1.8e11, "bfloat16": 6.1e11}, "copy": 3.5e10}
    {"kind": "step", "session": 0, "name": "all-reduce of 2 ranks", "step": 0, "bytes": 65000000, "dt": 0.05}
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from data import refuse

from . import machine

WARMUP = 4  # steps left out of the figures: compilation, autotuning, memory touched for the first time
COUNTED_STEPS = 20  # steps that a row of the bench needs in a round, and that a stage takes on a CPU


class Record:
    """The lines of JSON that a run leaves: in the file of --record or, where the run is the bench's worker, in a pipe.

    The bench leads a worker: it takes a step for each line on its stdin, and ends with its summary when that closes.
    """

    def __init__(self, args):
        self.is_worker = args.worker
        self.device = args.device
        self.file = None
        if machine.is_rank_0():
            if args.worker:
                self.file = args.record_to
            elif args.record:
                self.file = open(args.record, "x", encoding="utf-8")  # noqa: SIM115

    def write(self, kind, **entry):
        """Add a line."""
        if self.file:
            print(json.dumps({"kind": kind, **entry}), file=self.file, flush=True)

    def next_step_wanted(self):
        """Return whether to take another step: always, or as the bench tells a worker, on all of its ranks alike."""
        if not self.is_worker:
            return True
        wanted = False
        if machine.is_rank_0():
            wanted = bool(sys.stdin.readline())
        if dist.is_initialized():
            answer = torch.tensor([wanted], device=self.device, dtype=torch.int32)
            dist.broadcast(answer, 0)
            wanted = bool(answer.item())
        return wanted

    def wait_for_end(self):
        """As a worker, wait until the bench asks for no more: leaving takes time, and others may be on the clock."""
        self.next_step_wanted()


def settle():
    """Before a run leaves torch.distributed's group: give the group's threads time to drop the last tensors they hold.

    To drop one, a thread needs the interpreter. If that is ending by then, gloo's thread aborts the whole process
    (PyTorch's pull request 179291 describes it). Nothing tells when the threads are done.
    """
    if dist.is_initialized():
        time.sleep(0.5)


@dataclass
class Run:
    """What one process left in a record; None for what it did not get to."""

    header: dict | None = None
    steps: list = field(default_factory=list)
    summary: dict | None = None
    error: str | None = None


def read(path):
    """Return the lines of a record, dicts, without a last one that a kill cut off.

    Exits with one line that names the file and the line where one is no JSON.
    """
    try:
        complete_lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"{path} can't be read: {error}")
    lines = []
    for number, line in enumerate(complete_lines, 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            refuse(f"{path}, line {number}: {error}; put the file back as it was")
    return lines


def runs_of_lines(path, lines):
    """Return {(session, name): Run} of the lines of a bench below its own. Exits where a step is missing."""
    runs = {}
    for line in lines:
        key = line["session"], line["name"]
        run = runs.setdefault(key, Run())
        if line["kind"] == "header":
            runs[key] = Run(header=line)  # a run that was started again replaces the one before
        elif line["kind"] == "step":
            if line["step"] == 0 and run.header is None:
                run = runs[key] = Run()  # the probe has no header, and its first step stands for it
            if line["step"] != len(run.steps):
                refuse(f"{path}: {line['name']} has step {line['step']} where step {len(run.steps)} is due")
            run.steps.append(line)
        elif line["kind"] == "summary":
            run.summary = line
        elif line["kind"] == "error":
            run.error = line["error"]
    return runs


def summarize(steps, warmup=WARMUP):
    """Return the figures of some steps, the same for the line that a stage prints and the row that a table shows.

    steps: the step lines of a record, one or more. The dict has the median of dt and its quartiles (ms), tokens per
    second, memory (bytes, 0 without a meter), how many steps were counted, and the seconds of the warm-up. Where no
    step came after the warm-up, `counted` is 0 and the last step stands for all.
    """
    after_warmup = steps[warmup:]
    counted = after_warmup if after_warmup else steps[-1:]
    dts = [step["dt"] for step in counted]
    first_quartile = median = third_quartile = dts[0]
    if len(dts) > 1:
        first_quartile, median, third_quartile = statistics.quantiles(dts, n=4, method="inclusive")
    return {
        "dt_ms": 1e3 * median,
        "dt_q1_ms": 1e3 * first_quartile,
        "dt_q3_ms": 1e3 * third_quartile,
        "tok_per_sec": counted[0]["tokens"] / median,
        "memory": max(step["memory"] or 0 for step in counted),
        "counted": len(after_warmup),
        "warmup_s": sum(step["dt"] for step in steps[:warmup]),
    }
