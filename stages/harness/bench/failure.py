"""Why the process of a row failed: by the exception of a rank, by a signal, or by what it printed last."""

import re
import signal

LAST_LINES = 20  # of what a row printed, shown if it failed
TORCHRUNS_REPORT = re.compile(r"^.*torch/distributed/elastic/", re.MULTILINE)  # how its report of failed ranks begins
# What this report says of each failed rank. The last one in it is the one that failed first.
FAILED_RANK = re.compile(r"^ *rank *: (\d+).*\n *exitcode *: (-?\d+)", re.MULTILINE)
# How Python, PyTorch, cuBLAS and NCCL say that memory is short when they raise a plain error. The last one is oneDNN's.
# With "a primitive descriptor" it says that it has no kernel, so the pattern leaves that out.
OUT_OF_MEMORY = re.compile(
    r"out of memory|[Cc]an(no|')t allocate|ALLOC_FAILED|MemoryError|bad_alloc|Thread creation failed"
    r"|could not create a primitive(?! descriptor)"
)


def error_of(status, printed, errors):
    """Return the line of a record that says why a process failed. status: of its exit, not 0.

    printed: the end of what it printed. errors: {rank: the line "error" of its record}. Of several ranks only the first
    to fail counts, by torchrun's report, since the others may have failed because they lost it.
    """
    rank, status_of_rank, prefix = 0, status, ""
    failed_ranks = FAILED_RANK.findall(printed)
    if failed_ranks:
        rank, status_of_rank = map(int, failed_ranks[-1])
        prefix = f"rank {rank}: "
    if rank in errors:
        return error_in_words(prefix + errors[rank]["message"], errors[rank]["traceback"])
    details = last_lines(printed)
    if status_of_rank in (-signal.SIGKILL, 128 + signal.SIGKILL):  # hardly anything sends it but Linux
        message = f"{prefix}killed by SIGKILL, most likely because memory was short"
        return error_line(message, details, out_of_memory=True)
    message = f"{prefix}exit status {status_of_rank}"
    if status_of_rank < 0:
        message = f"{prefix}killed by signal {-status_of_rank}, {signal.strsignal(-status_of_rank)}"
    elif details:
        message += f"; last printed: {details.splitlines()[-1]}"
    return error_in_words(message, details)


def error_in_words(message, details):
    """Return the line of a record for a message of the script, or of a library, which may say that memory is short."""
    if OUT_OF_MEMORY.search(message):
        return error_line("out of memory", details or message, out_of_memory=True)
    return error_line(message, details)


def error_line(message, details="", out_of_memory=False):
    """Return the line of a record that says why a row failed. details: the traceback, or the last lines it printed."""
    return {"kind": "error", "message": message, "traceback": details, "out_of_memory": out_of_memory}


def last_lines(printed):
    """Return the last lines that a row printed, without torchrun's report of its ranks below them."""
    own_output = TORCHRUNS_REPORT.split(printed, maxsplit=1)[0]
    return "\n".join(own_output.strip().splitlines()[-LAST_LINES:])
