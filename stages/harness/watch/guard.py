"""Keeps a script from failing because our own code does."""

from .leave import leave


class Guard:
    """The guard of a watched script. log: a Log. lost: what our own code has failed to see, a set."""

    def __init__(self, log):
        self.log = log
        self.lost = set()

    def around(self, function, what, is_vital=False):
        """Return a function of ours that can't end the script. If it raises, that is said, and it returns None.

        what: it looks at, as "its steps". is_vital: whether nothing can be timed without it. If it fails then, a row of
        a bench ends, and a script runs on without another call of it. KeyboardInterrupt, which is no Exception, is
        meant for the script.
        """

        def guarded(*args, **kwargs):
            if is_vital and what in self.lost:
                return None
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.lose_sight(what, error, is_vital)
                return None

        return guarded

    def lose_sight(self, what, error, is_vital):
        """Say once that something can't be seen any more. The script goes on, but a row may end."""
        if what in self.lost:
            return
        self.lost.add(what)
        reason = in_a_line(error)
        if is_vital and self.log.is_row:
            self.end_row(f"{what} can't be watched: {reason}")
        self.log.notice(f"watch.py has lost sight of {what}, and the script goes on: {reason}")

    def end_row(self, message):
        """End a row of a bench, which reads the reason in its record."""
        self.log.write_error(message)
        leave(1)


def in_a_line(error):
    """Return an exception in one line. If it was in a worker of a DataLoader, the last line has the reason."""
    try:
        lines = str(error).strip().splitlines() or [""]
    except Exception:  # of a script's own class
        lines = ["its str() failed"]
    line = lines[-1] if "in DataLoader worker process" in lines[0] else lines[0]
    return f"{type(error).__name__}: {line}"
