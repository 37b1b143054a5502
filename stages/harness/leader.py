"""How the bench leads a run: through a Unix socket, whose path it puts into the environment.

stdin and stdout belong to a script of the reader's own, and torchrun closes other descriptors in its ranks. Each rank
connects for itself and is led for itself, because a collective of ours could meet one of the script's.

What a rank sends, each time a line of JSON:

    {"kind": "hello", "ranks": 2, "group": 4711}            first, as soon as it runs; ranks: of this machine
    {"kind": "ready"}                                       whenever it waits for a request
    {"kind": "notice", "message": "no step in the last 60 s"}   a remark for the terminal
    and the lines of its record, rank 0 alone; but an "error" comes from whatever rank fails
    {"kind": "loss", "step": 3, "loss": 10.9}               of its own data, all other ranks, behind each step

The bench sends STEP for each step that it wants, and END when it wants the summary. The connection ends with the
process at its other end, however that ends. So the bench hears when a rank dies, and a rank when the bench dies.
"""

import json
import os
import select
import signal
import threading
from multiprocessing.connection import Client

PATH = "SPEED_LADDER_SOCKET"  # the variable of the environment
STEP, END = b"step", b"end"


class Leader:
    """The bench, as seen by a process that it leads."""

    def __init__(self, path):
        """Connect to the bench that listens there, and tell who this is."""
        self.connection = Client(path)
        os.register_at_fork(after_in_child=self.connection.close)  # a child would keep it open after our death
        self.lock = threading.Lock()  # a notice comes from a thread of its own
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1")
        self.send({"kind": "hello", "ranks": ranks, "group": os.getpgrp()})
        threading.Thread(target=self.end_with_the_bench, daemon=True).start()

    def send(self, line):
        """Send a line, a dict."""
        with self.lock:
            self.connection.send_bytes(json.dumps(line).encode())

    def end_with_the_bench(self):
        """End this process and its children once the bench is gone, whatever they do. This is a thread."""
        poll = select.poll()
        poll.register(self.connection, select.POLLHUP)  # and not POLLIN, since wait_for_request() reads
        poll.poll()
        os.killpg(0, signal.SIGKILL)

    def wait_for_request(self):
        """Wait until the bench asks for a step or for the end. Return whether to take another step."""
        self.send({"kind": "ready"})
        return self.connection.recv_bytes() == STEP


def find_leader():
    """Return the Leader of this process, or None where no bench leads it.

    The variable goes: what a script starts by itself is led by nobody.
    """
    path = os.environ.pop(PATH, None)
    return Leader(path) if path else None
