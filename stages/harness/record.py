"""The lines that a run leaves: their format, how a run writes them, and the figures of some steps.

The format of a record
======================

A record is a text file with one JSON object in each line. `--record FILE` of a stage writes the lines of one run: a
header, a line for each step, and a summary. An example of each, the long ones wrapped:

    {"kind": "header", "stage": "s10_fused", "commit": "569c6896ba9f",
     "code": "4ca2d2a6b5ad0c2a91e2f3a9370c324952541c28742fdee7a8391c06ca0ad7a7", "model_code": "9f2c...",
     "settings": {"steps": 24, "batch_size": 1, "seq_len": 1024, "size": "micro", "seed": 1337, "lr": 0.0006,
                  "data": null, "compile": false, "accum": 2, "world_size": 1, "amp_dtype": "bfloat16",
                  "corpus": "Tiny Shakespeare", "tokenizer": "gpt2"},
     "shape": {"vocab_size": 50257, "block_size": 1024, "n_layer": 4, "n_head": 4, "n_embd": 256},
     "environment": {"device": "cpu", "device_name": "AMD EPYC", "threads": 2, "cores": 2, "tf32": false,
                     "native_dtype": "bfloat16", "system": "Linux x86_64", "python": "3.11.7",
                     "torch": "2.13.0+cpu", "cuda": null, "driver": null},
     "fallbacks": {"compile": "left out, no C++ compiler found"}, "started": "2026-11-21T02:13:12+00:00"}
    {"kind": "step", "norm": 7.12, "lr": 3e-05, "step": 0, "loss": 10.94, "dt": 0.465, "tokens": 1024,
     "memory": 1870000000, "meter": "peak RSS"}
    {"kind": "summary", "sdpa": "flash", "eval": 6.12}

dt is in seconds, memory in bytes, a loss in nats per token. A figure that is not finite is null. "shape" is the
model's, without the padding of s06, and null for a model that is no GPT. "code" and "model_code" are code_hash() of the
script and of model.py. "commit" has a + behind it where files differ from it. "sdpa" is the kernel that
F.scaled_dot_product_attention chooses there. Other keys of a summary: "eval", the held-out loss, with --eval;
"reserved", bytes, on CUDA; "rates" and "parts" with --profile.

results/NAME.jsonl holds all runs of one bench. Its first line is the bench's own:

    {"kind": "bench", "mode": "ladder", "pair_by": "turn", "reference": "s01_baseline", "warmup": 4, "steps": 24,
     "rounds": 1, "enough": null, "memory_budget": null,
     "rows": [{"name": "s01_baseline", "stage": "s01_baseline", "change": "float32, explicit attention",
               "base": null, "control_of": null, "is_probe": false, "ranks": 0},
              {"name": "peak", "stage": "probe", "change": "", "base": null, "control_of": null, "is_probe": true,
               "ranks": 0}],
     "corpus": ["Tiny Shakespeare", "gpt2"], "environment": {}, "code": {"bench.py": "9f2c..."},
     "command": "python bench.py s01"}

"rows" are all that is started: the rows of the table in its order, a second run of one of them, which "control_of"
names, and the probe. "base" is the row that a row is compared with, and "reference" the one that all are. "ranks" is
the number of processes of torchrun, 0 without it. "pair_by" says which samples of two rows make a ratio: those of a
"turn", where all processes are alive at once and take one step each in turn, or of a "round" of fresh processes.
"warmup" steps are not counted. "enough" is [steps, seconds], both of which a row had counted before it took no more, or
null where each took all its steps. "memory_budget", in bytes, is what a run of the mode `limit` may hold on a CPU.

Every other line has two keys more: "name", of the row, and "session", the number of the group of processes that ran
together. A process begins with a line of its own, and one that fails leaves its reason. "batch_size" is null but in the
mode `limit`. The lines of the probe are steps, with FLOP/s by dtype and bytes per second:

    {"kind": "start", "session": 0, "name": "peak", "batch_size": null}
    {"kind": "step", "session": 0, "name": "peak", "step": 0, "dt": 1.6, "peak": {"float32": 1.8e11},
     "copy": 3.5e10}
    {"kind": "error", "session": 0, "name": "peak", "error": "out of memory at batch size 4", "out_of_memory": true}
"""

import ast
import hashlib
import io
import json
import statistics
import sys
import tokenize
from pathlib import Path

import torch
import torch.distributed as dist

from . import machine

WARMUP = 4  # steps left out of the figures: compilation, autotuning, memory touched for the first time
HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
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

    def wait_for_ask(self):
        """As a worker, wait until the bench asks for a step or for the end. Return whether to take another step.

        All ranks get the answer that rank 0 reads. A run that is no worker always takes another step.
        """
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


def figures_of(steps, warmup=WARMUP):
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


def code_of(text):
    """Return the code of a Python source without docstrings, comments and blank lines. Raises SyntaxError."""
    lines = text.split("\n")  # as Python counts them, unlike splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    lines = [line.encode() for line in lines]  # ast counts columns in bytes
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, HAVE_DOCSTRINGS) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            before = lines[docstring.lineno - 1][: docstring.col_offset]
            after = lines[docstring.end_lineno - 1][docstring.end_col_offset :]
            for number in range(docstring.lineno, docstring.end_lineno + 1):
                lines[number - 1] = b""
            lines[docstring.lineno - 1] = before + after
    return "\n".join(line.decode().rstrip() for line in lines if line.strip())


def code_hash(path):
    """Return the sha256 of a file's code, by which a record names what ran: a changed comment is no other code."""
    code = code_of(Path(path).read_text(encoding="utf-8"))
    return hashlib.sha256(code.encode()).hexdigest()
