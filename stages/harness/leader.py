"""How the bench leads a run: through a Unix socket, whose path it puts into the environment.

stdin and stdout belong to a script of the reader's own, and torchrun closes other descriptors in its ranks. Each rank
connects for itself and is led for itself, because a collective of ours could meet one of the script's.

What a rank writes, a line of JSON each:

    {"kind": "hello", "pid": 4711, "ranks": 2}              first, as soon as it runs; ranks: of this machine
    {"kind": "ready"}                                       whenever it waits for a request
    {"kind": "notice", "message": "no step in 60 s, ..."}   from a script that shows no step
    and the lines of its record, rank 0 alone; but an "error" comes from whatever rank fails

What the bench writes: a line feed for each step that it wants. It closes its end when it wants the summary.
"""

import json
import os
import socket
import threading

from . import machine

PATH = "SPEED_LADDER_SOCKET"  # the variable of the environment


class Leader:
    """The bench, as seen by a process that it leads."""

    def __init__(self, path):
        """Connect to the bench that listens there, and tell who this is."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self.requests = connection.makefile("r", encoding="utf-8")
        self.answers = connection.makefile("w", encoding="utf-8")
        self.lock = threading.Lock()  # a notice comes from a thread of its own
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", machine.world_size()))
        self.tell({"kind": "hello", "pid": os.getpid(), "ranks": ranks})

    def tell(self, line):
        """Send a line, a dict."""
        with self.lock:
            print(json.dumps(line), file=self.answers, flush=True)

    def wait_for_request(self):
        """Wait until the bench asks for a step or for the end. Return whether to take another step."""
        self.tell({"kind": "ready"})
        return bool(self.requests.readline())


def find_leader():
    """Return the Leader of this process, or None where no bench leads it.

    The variable goes: what a script starts by itself is led by nobody.
    """
    path = os.environ.pop(PATH, None)
    return Leader(path) if path else None
