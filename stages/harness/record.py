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
     "parameters": 16224000, "unit": "tok",
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
flag. "unit" is what "tokens" counts: "tok", or "sample" or "step" in a script without tokens. "commit" has a + behind
it where files differ from it. "sdpa" is the kernel that F.scaled_dot_product_attention chooses for this shape and dtype
on this device. Other keys of a summary: "eval", the held-out loss, with --eval; "reserved", bytes, on CUDA; "rates" and
"parts" with --profile.

results/NAME.jsonl holds all runs of one bench. Its first line is the bench's own:

    {"kind": "bench", "in_turn": true, "reference": "s01", "warmup": 4, "steps": 24, "rounds": 1,
     "rows": [{"name": "probe", "title": "probe", "script": "probe", "launcher": [], "flags": [], "added": [],
               "is_watched": false, "above": null, "control_of": null},
              {"name": "s01", "title": "s01", "script": "s01_baseline", "launcher": [], "flags": [], "added": [],
               "is_watched": false, "above": null, "control_of": null}],
     "flags": ["--steps", "24", "--seed", "5"], "flags_of_scripts": ["--steps", "24", "--seed", "5"],
     "variables": {"MALLOC_MMAP_MAX_": "0"}, "variables_of_scripts": {"CUDA_VISIBLE_DEVICES": ""}, "environment": {},
     "commit": "569c6896ba9f", "command": "python bench.py s01 --seed 5"}

"rows" are all that is started: see rows.Row. "reference" is the name of the row that all are compared with. With
"in_turn" all processes were alive at once, and a ratio compares two steps of one turn. Without it a ratio compares two
medians of one round. "warmup" steps are not counted. "flags" are those of all stages, and "variables" of the
environment those of all rows. The two lists "of_scripts" are for scripts that watch.py watches.

Every other line has two keys more: "name", of the row, and "round", which counts from 0. A process begins with the line
"start". The steps of the probe have FLOP/s by dtype, bytes per second, and "sdpa" as a summary has it. In a bench every
failure leaves an "error".
A stage that was started by hand leaves one for an exception.

    {"kind": "start", "round": 0, "name": "probe"}
    {"kind": "step", "round": 0, "name": "probe", "step": 0, "dt": 1.6, "sdpa": "flash", "peak": {"float32": 1.8e11},
     "copy": 3.5e10}
    {"kind": "error", "round": 0, "name": "probe", "message": "RuntimeError: no kernel", "traceback": "...",
     "out_of_memory": false}

A script that watch.py watches leaves a line more, before its second step. techniques.find_techniques() explains it:

    {"kind": "techniques", "profiled": true, "tf32": true, "weights": "float32", "compile": false, "sdpa": "flash",
     "attention": true, "drops": false, "vocabulary": 50304, "logits": 50304, "fused": false, "optimizer": "AdamW",
     "autocast": null, "emulated": false, "parameters": 7242880, "loaders": 0,
     "machine": {"tf32": false, "amp_dtype": "bfloat16", "compile": true}}

"loaders" are the processes and threads that it has started, most likely to load its data. Its settings are those that
can be seen, its first step is number 1, and each step has "spent", the seconds of each of watcher.KINDS. "shares" of
its summary are the same as shares of the time.

    {"kind": "step", "spent": {"data": 0.03, "forward": 0.2, "loss": 0.01, "backward": 0.4, "update": 0.05,
     "evaluation": 0.0, "rest": 0.02}, "step": 1, "loss": 10.9, "dt": 0.71, "tokens": 1024, "memory": 1870000000,
     "meter": "peak RSS"}
"""

import json
import re
import sys
import traceback

from data import refuse

from . import machine
from .leader import find_leader

# How Python, PyTorch, cuBLAS and NCCL say that memory is short, where they raise a plain error. The last one is
# oneDNN's. With "a primitive descriptor" it says that it has no kernel, so the pattern leaves that out.
OUT_OF_MEMORY = (
    r"out of memory|[Cc]an(no|')t allocate|ALLOC_FAILED|MemoryError|bad_alloc|Thread creation failed"
    r"|could not create a primitive(?! descriptor)"
)


class Record:
    """The lines of JSON that a run leaves: in the file of --record or, where the bench leads the run, sent to that."""

    def __init__(self, args):
        """Find the bench that leads this process, or open the file of --record, a new one.

        args: the flags of a stage or of watch.py. Exits with one line where the file is there already or can't be
        written.
        """
        self.args = args
        self.leader = find_leader()
        self.file = None
        if self.leader is None and args.record_path and machine.is_rank_0():
            try:
                self.file = open(args.record_path, "x", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                refuse(f"--record {args.record_path}: {error.strerror}; pass the path of a new file")

    @property
    def is_led(self):
        """Whether the bench leads this process. It then takes a step for each request, and prints nothing."""
        return self.leader is not None

    @property
    def is_kept(self):
        """Whether anybody gets its lines."""
        return self.is_led or self.file is not None

    def write(self, kind, /, **entry):
        """Write a line, on rank 0 only."""
        if machine.is_rank_0():
            self.write_from_any_rank({**entry, "kind": kind})  # ours wins, where a script logs a figure "kind"

    def write_from_any_rank(self, line):
        """Write a line, on whatever rank: an exception may come on one alone."""
        if self.leader:
            self.leader.tell(line)
        if self.file:
            try:
                print(json.dumps(line), file=self.file, flush=True)
            except OSError as error:  # a training is worth more than its record
                self.file = None
                print(f"--record {self.args.record_path} ends here: {error.strerror}", file=sys.stderr)

    def wait_for_request(self):
        """Where the bench leads, wait until it asks for a step or for the end. Return whether to take another step."""
        return self.leader.wait_for_request() if self.leader else True

    def tell(self, message):
        """Tell, on rank 0, what is no line of a record: to the bench where that leads, and otherwise on stderr."""
        if not machine.is_rank_0():
            return
        if self.leader:
            self.leader.tell({"kind": "notice", "message": message})
        else:
            print(message, file=sys.stderr, flush=True)

    def tell_failure(self, error_type, error, trace):
        """Report an exception as Python does, and keep it in the record. Where memory was short, print what to try.

        This is sys.excepthook once parse_args() has returned. Where the bench leads, every rank keeps its exception.
        """
        sys.__excepthook__(error_type, error, trace)
        text = "".join(traceback.format_exception(error_type, error, trace))
        is_short = self.write_error(f"{error_type.__name__}: {error}", text)
        if is_short:
            batch_size = self.args.batch_size
            remedy = f"--batch-size {batch_size // 2}" if batch_size > 1 else "a smaller --seq-len or --size"
            print(f"memory is short at batch size {batch_size}: try {remedy}", file=sys.stderr)
        if error_type.__module__.startswith(("torch._inductor", "torch._dynamo")):
            print("torch.compile failed: --no-compile goes without it", file=sys.stderr)

    def write_error(self, message, text=""):
        """Write the line of a failure, from any rank. Return whether memory was short. text: the traceback."""
        is_short = re.search(OUT_OF_MEMORY, message) is not None
        self.write_from_any_rank({"kind": "error", "message": message, "traceback": text, "out_of_memory": is_short})
        return is_short
