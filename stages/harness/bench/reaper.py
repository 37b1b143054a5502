"""The reaper: a process of its own that ends what the bench has started, however the bench itself ends.

A row that takes turns is stopped between its steps, and a stopped process outlives a bench that was killed. The reaper
reads the process groups of all rows from a pipe. When the pipe closes, the bench is no more.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PATIENCE = 40  # seconds that a process has to end after SIGTERM: torchrun gives its ranks 30
LONGEST_PATH = 80  # letters, since the path of a Unix socket may have about 100


class Reaper:
    """The reaper's process, as the bench sees it, and a folder for the bench's sockets, which it removes at the end."""

    def __init__(self):
        folder = tempfile.mkdtemp(prefix="bench-")
        if len(folder) > LONGEST_PATH:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="bench-", dir="/tmp")
        self.folder = folder
        self.sockets = 0
        self.process = subprocess.Popen(
            [sys.executable, __file__, folder],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # no signal of the terminal reaches it
        )

    def path_of_socket(self):
        """Return a path for a new socket."""
        self.sockets += 1
        return os.path.join(self.folder, str(self.sockets))

    def add(self, group):
        """Let it end a process group."""
        self.write(f"add {group}")

    def forget(self, group):
        """Tell it that a group has ended, so that it will not end a later one of the same number."""
        self.write(f"forget {group}")

    def write(self, line):
        """Send a line. Where somebody killed the reaper, the bench goes on without it."""
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()

    def close(self):
        """Let it end all groups that it was not told to forget, and then itself."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def send(group, *signals):
    """Send signals to a process group, which may be gone."""
    for signal_number in signals:
        with contextlib.suppress(OSError):
            os.killpg(group, signal_number)


def is_there(group):
    """Tell whether a process group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # as macOS says of one that has ended, and that nobody has waited for
        return False
    return True


def end(groups):
    """Ask process groups to end, wait for them for a while, and kill what is left."""
    for group in groups:
        send(group, signal.SIGTERM, signal.SIGCONT)
    deadline = time.monotonic() + PATIENCE
    while any(is_there(group) for group in groups) and time.monotonic() < deadline:
        time.sleep(0.1)
    for group in groups:
        send(group, signal.SIGKILL)


def main(lines, folder):
    """Note the groups of the bench until it ends, and then end them. lines: what Reaper.write() sends."""
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)  # as when somebody ends all that is called bench
    groups = set()
    for line in lines:
        word, group = line.split()
        if word == "add":
            groups.add(int(group))
        else:
            groups.discard(int(group))
    shutil.rmtree(folder, ignore_errors=True)
    end(groups)


if __name__ == "__main__":
    main(sys.stdin, sys.argv[1])
