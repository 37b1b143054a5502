"""The lines that a run leaves: their format, and how a run writes them.

The format of a record
======================

A record is a text file with one JSON object in each line. `--record FILE` of a stage writes the lines of one run: a
header, a line for each step, and a summary. An example of each, the header wrapped:

    {"kind": "header", "stage": "s10_fused", "commit": "569c6896ba9f",
     "settings": {"steps": 24, "batch_size": 1, "seq_len": 1024, "size": "micro", "seed": 1337, "lr": 0.0006,
                  "data": null, "compile": false, "accum": 2, "world_size": 1, "amp_dtype": "bfloat16",
                  "corpus": "Tiny Shakespeare"},
     "shape": {"vocab_size": 50257, "n_layer": 4, "n_head": 4, "n_embd": 256, "seq_len": 1024},
     "environment": {"device": "cpu", "device_name": "AMD EPYC", "threads": 2, "cores": 2, "tf32": false,
                     "system": "Linux x86_64", "python": "3.11.7",
                     "torch": "2.13.0+cpu", "cuda": null, "driver": null},
     "fallbacks": {"compile": "left out, Python.h is missing: install python3-dev"},
     "started": "2026-11-21T02:13:12+00:00"}
    {"kind": "step", "norm": 7.12, "lr": 0.0003, "step": 0, "loss": 10.94, "dt": 0.465, "tokens": 1024,
     "memory": 1870000000, "meter": "peak RSS"}
    {"kind": "summary", "sdpa": "flash", "eval": 6.12}

dt is in seconds, memory in bytes and of one rank, a loss in nats per token. A figure that is not finite is null.
"shape" is null for a model that is no GPT. Its vocabulary is without the padding of s06, and its seq_len is that of the
flag. "commit" has a + behind it where files differ from it. "sdpa" is the kernel that F.scaled_dot_product_attention
chooses for this shape and dtype on this device. Other keys of a summary: "eval", the held-out loss, with --eval;
"reserved", bytes, on CUDA; "rates" and "parts" with --profile.

results/NAME.jsonl holds all runs of one bench. Its first line is the bench's own:

    {"kind": "bench", "in_turn": true, "reference": "s01", "warmup": 4, "steps": 24, "rounds": 1,
     "rows": [{"name": "probe", "title": "probe", "script": "probe", "launcher": [], "flags": [], "above": null,
               "control_of": null},
              {"name": "s01", "title": "s01", "script": "s01_baseline", "launcher": [], "flags": [], "above": null,
               "control_of": null}],
     "flags": ["--steps", "24", "--seed", "5"], "variables": {"MALLOC_MMAP_MAX_": "0"}, "environment": {},
     "commit": "569c6896ba9f", "command": "python bench.py s01 --seed 5"}

"rows" are all that is started: see rows.Row. "reference" is the name of the row that all are compared with. With
"in_turn" all processes were alive at once, and a ratio compares two steps of one turn. Without it a ratio compares two
medians of one round. "warmup" steps are not counted. "flags", and "variables" of the environment, are those of all
rows.

Every other line has two keys more: "name", of the row, and "round", which counts from 0. A process begins with the line
"start". The steps of the probe have FLOP/s by dtype and bytes per second. In a bench every failure leaves an "error".
A stage that was started by hand leaves one for an exception.

    {"kind": "start", "round": 0, "name": "probe"}
    {"kind": "step", "round": 0, "name": "probe", "step": 0, "dt": 1.6, "peak": {"float32": 1.8e11}, "copy": 3.5e10}
    {"kind": "error", "round": 0, "name": "probe", "message": "RuntimeError: no kernel", "traceback": "...",
     "out_of_memory": false}

A script that watch.py watches leaves a line more, before its second step. techniques.find_techniques() explains it:

    {"kind": "techniques", "profiled": true, "tf32": true, "weights": "float32", "compile": false, "sdpa": "flash",
     "attention": true, "drops": false, "vocabulary": 50304, "fused": false, "optimizer": "AdamW", "autocast": null,
     "emulated": false, "parameters": 7242880, "machine": {"tf32": false, "amp_dtype": "bfloat16", "compile": true}}

Its settings are those that can be seen, its first step is number 1, and each step has "wait", the seconds before its
first forward. "tokens" are samples where the script has none. The "wait" of its summary is their share of the time.
"""

import json
import os
import re
import sys
import traceback

import torch
import torch.distributed as dist

from data import refuse

from . import machine

# How Python, PyTorch, cuBLAS and NCCL say that memory is short, where they raise a plain error. The last one is
# oneDNN's. With "a primitive descriptor" it says that it has no kernel, so the pattern leaves that out.
OUT_OF_MEMORY = (
    r"out of memory|[Cc]an(no|')t allocate|ALLOC_FAILED|MemoryError|bad_alloc|Thread creation failed"
    r"|could not create a primitive(?! descriptor)"
)


class Record:
    """The lines of JSON that a run leaves: in the file of --record or, where the bench leads the run, in a pipe.

    The bench leads a worker: it takes a step for each line on its stdin, and ends with its summary when that closes.
    """

    def __init__(self, args):
        """Open the file of --record, a new one; as a worker, take over stdout.

        args: the flags of a stage. Exits with one line where the file is there already or can't be written.
        """
        self.args = args
        self.file = None
        if args.worker:
            self.file = take_stdout()
        elif args.record_path and machine.is_rank_0():
            try:
                self.file = open(args.record_path, "x", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                refuse(f"--record {args.record_path}: {error.strerror}; pass the path of a new file")

    def write(self, kind, /, **entry):
        """Write a line, on rank 0 only."""
        if machine.is_rank_0():
            self.write_from_any_rank({**entry, "kind": kind})  # ours wins, where a script logs a figure "kind"

    def write_from_any_rank(self, line):
        """Write a line, on whatever rank: an exception may come on one alone."""
        if self.file:
            print(json.dumps(line), file=self.file, flush=True)

    def wait_for_request(self):
        """As a worker, wait until the bench asks for a step or for the end. Return whether to take another step.

        All ranks get the answer that rank 0 reads. A run that is no worker always takes another step.
        """
        if not self.args.worker:
            return True
        wanted = False
        if machine.is_rank_0():
            wanted = bool(sys.stdin.readline())
        if dist.is_initialized():
            answer = torch.tensor([wanted], device=self.args.device, dtype=torch.int32)
            dist.broadcast(answer, 0)
            wanted = bool(answer.item())
        return wanted

    def tell_failure(self, error_type, error, trace):
        """Report an exception as Python does, and keep it in the record. Where memory was short, print what to try.

        This is sys.excepthook once parse_args() has returned. In a worker every rank keeps its exception.
        """
        # `| head` has closed stdout: end quietly. A worker's reader is the bench, and its end is a failure.
        if isinstance(error, BrokenPipeError) and not self.args.worker:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python reports it once more when it ends
            return
        sys.__excepthook__(error_type, error, trace)
        text = "".join(traceback.format_exception(error_type, error, trace))
        is_short = self.write_error(f"{error_type.__name__}: {error}", text)
        if is_short:
            batch_size = self.args.batch_size
            remedy = f"--batch-size {batch_size // 2}" if batch_size > 1 else "a smaller --seq-len or --size"
            print(f"memory is short at batch size {batch_size}: try {remedy}", file=sys.stderr)

    def write_error(self, message, text):
        """Write the line of a failure, from any rank. Return whether memory was short. text: the traceback."""
        is_short = re.search(OUT_OF_MEMORY, message) is not None
        self.write_from_any_rank({"kind": "error", "message": message, "traceback": text, "out_of_memory": is_short})
        return is_short


def take_stdout():
    """Return the process's stdout as a file for its record, and let what the script prints go to stderr.

    The file begins with a line feed, since the script may have printed half a line before. The descriptors 1 and 2 are
    changed and not sys.stdout, since the script may have replaced that.
    """
    file = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(file=file, flush=True)
    return file
