"""Runs scripts in forks of a process that has imported torch, which is most of the time of a tiny stage.

Reads requests from stdin, one JSON object a line:

    "script", "flags", "folder", "env"  what runs, and where
    "stdin", "out", "err"               the files that are its standard streams
    "backend"                           null, or what torch.compile is to run what it traced by
    "accelerator"                       null, or the device that torch is to find on this machine
    "watch"                             whether to note what the script asks of torch, see watch.py
    "ranks"                             null, or how many ranks this process is to be the first of

Answers each on stdout, when its fork has ended, with one line of JSON: "status", for torch.compile "graphs"
and "breaks", and where it was watched "facts".
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "stages"))  # as Python does for a stage

from harness import StepLog, parse_args  # noqa: F401

import functorch.compile  # noqa: F401  # torch.compile imports it, in a second
import torch
import torch._dynamo
from watch import Watch

SECONDS = 600  # after which a fork that hangs is killed: on one busy core a first compilation took over 240


def answer(request):
    """Run a request in a fork, and return what its client is told."""
    reader, writer = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.close(reader)
        run(request, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    _, code = os.waitpid(fork, 0)
    seen = json.loads(told) if told else {}
    return {"status": os.waitstatus_to_exitcode(code), **seen}


def run(request, writer):
    """Be the script until it ends, and leave the process with its exit status."""
    signal.alarm(SECONDS)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    redirect(sys.stdin, request["stdin"], os.O_RDONLY)
    redirect(sys.stdout, request["out"], os.O_WRONLY | os.O_CREAT)
    redirect(sys.stderr, request["err"], os.O_WRONLY | os.O_CREAT)
    if request["backend"]:
        use_backend(request["backend"])
    if request["accelerator"]:
        pretend_accelerator(request["accelerator"])
    watch = Watch()
    if request["watch"]:
        watch.start()
    if request["ranks"]:
        pretend_ranks(request["ranks"])
        watch.note_all_reduces()
    sys.argv = [request["script"]] + request["flags"]
    status, scope = run_as_main(request["script"])
    sys.stdout.flush()
    sys.stderr.flush()
    counters = torch._dynamo.utils.counters
    seen = {"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}
    if request["watch"] and status == 0:
        seen["facts"] = watch.facts(scope)
    os.write(writer, json.dumps(seen).encode())
    os._exit(status)


def redirect(stream, path, flags):
    """Let a standard stream be a file."""
    os.dup2(os.open(path, flags), stream.fileno())


def use_backend(backend):
    """Let torch.compile trace as ever, and run what it traced by this backend, without a compiler."""
    compile_by_default = torch.compile

    def compile_by_backend(model):
        return compile_by_default(model, backend=backend)

    torch.compile = compile_by_backend


def pretend_accelerator(name):
    """Let torch find an accelerator, by which it chooses how processes talk if the script does not."""
    torch._C._get_accelerator = lambda: torch.device(name)


def pretend_ranks(world_size):
    """Let this process be rank 0 of so many. The others are not there, and what is sent to them goes nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group = torch.distributed.init_process_group

    def init_fake_process_group(backend):
        init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())

    torch.distributed.init_process_group = init_fake_process_group


def run_as_main(script):
    """Run a script as Python would; its exit status, and {name: value} of what it bound, {} if it failed."""
    try:
        try:
            return 0, runpy.run_path(script, run_name="__main__")
        except SystemExit:
            raise
        except BaseException:
            sys.excepthook(*sys.exc_info())
            return 1, {}
    except SystemExit as end:
        return end.code or 0, {}


def main():
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
