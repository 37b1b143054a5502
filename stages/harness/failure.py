"""How a run fails: what is told of an exception, what its record keeps, and what to try."""

import re
import sys
import traceback

from data import TextError

from .common import refuse, tell

# How Python, PyTorch, cuBLAS and NCCL say that memory is short, where they raise a plain error. The last one is
# oneDNN's. With "a primitive descriptor" it says that it has no kernel, so the pattern leaves that out.
OUT_OF_MEMORY = (
    r"out of memory|[Cc]an(no|')t allocate|ALLOC_FAILED|MemoryError|bad_alloc|Thread creation failed"
    r"|could not create a primitive(?! descriptor)"
)


def tell_failure(log, batch_size, error_type, error, trace):
    """Print an exception as Python does, and what to try where that is known, and write both to the record.

    Python calls it, as its sys.excepthook, once parse_args() has returned. log: the Log of the run. batch_size: of a
    micro-batch. A text that can't be trained on is the user's mistake, and one line. After Ctrl-C the figures so far
    are told.
    """
    message = f"{error_type.__name__}: {error}"
    if error_type is KeyboardInterrupt:
        if log.steps and not log.is_finished:
            log.finish({"sdpa": None})
    elif error_type is TextError:
        log.write_error(message)
        refuse(error)
    else:
        sys.__excepthook__(error_type, error, trace)
        remedy = remedy_for(error_type, message, batch_size)
        if remedy:
            tell(remedy)
            message = f"{remedy} ({message})"
        log.write_error(message, "".join(traceback.format_exception(error_type, error, trace)))


def remedy_for(error_type, message, batch_size):
    """Return what to try after an exception, in words, or None where that is not known."""
    if is_out_of_memory(message):
        smaller = f"--batch-size {batch_size // 2}" if batch_size > 1 else "a smaller --seq-len or --size"
        return f"memory is short at batch size {batch_size}: try {smaller}"
    if error_type.__module__.startswith(("torch._inductor", "torch._dynamo")):
        return "torch.compile failed: --no-compile goes without it"
    return None


def is_out_of_memory(message):
    """Tell whether the message of an exception says that memory is short."""
    return re.search(OUT_OF_MEMORY, message) is not None
