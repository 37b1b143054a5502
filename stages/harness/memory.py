"""How a process gets its memory on a CPU: what the harness does about it in every stage, and how to see it.

A step of training allocates and frees gigabytes. glibc gives a large tensor's pages back to the system when it is
freed, and the system clears the pages of the next one before it hands them out. On a GPU, PyTorch keeps freed memory
itself. On a CPU, keep_freed() lets glibc keep it, and ask_for_huge_pages() makes the pages larger. LADDER_PLAIN=1
leaves both out. Imports no torch, because huge pages must be asked for before torch loads.
"""

import ctypes
import os
import resource

# Parameters of glibc's mallopt(3), as malloc.h numbers them.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4

# The environment variables that decide how a process gets its memory: ours, glibc's, PyTorch's, the dynamic linker's
# and jemalloc's.
VARIABLES = (
    "LADDER_PLAIN",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TRIM_THRESHOLD_",
    "THP_MEM_ALLOC_ENABLE",
    "LD_PRELOAD",
    "MALLOC_CONF",
)


def is_plain():
    """Tell whether LADDER_PLAIN asks for a process whose memory is that of a script without this harness."""
    return os.environ.get("LADDER_PLAIN", "") not in ("", "0")


def ask_for_huge_pages():
    """Let PyTorch put large tensors into pages of 2 MB, where Linux offers them."""
    if not is_plain():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed():
    """Let glibc keep freed memory for the next tensor, as PyTorch's own allocator does on a GPU."""
    if is_plain():
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except OSError:
        return  # not glibc
    mallopt(M_MMAP_MAX, 0)  # no tensor, however large, gets a mapping of its own, which freeing would unmap
    mallopt(M_TRIM_THRESHOLD, -1)  # the heap never shrinks


def variables():
    """Return those of VARIABLES that are set, as a dict."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def page_faults():
    """Return the page faults of this process so far that needed no disk.

    In a step nearly all are for fresh memory, which the system clears first: 4 kB for each, or 2 MB where the
    process asked for huge pages.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
