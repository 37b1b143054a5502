"""Workers: each is the process of a row, and takes one step when the bench asks for it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

from .. import machine
from ..figures import COUNTED_STEPS, WARMUP
from ..ladder import FOLDER

PATIENCE = 600  # seconds that an answer may take: the first one includes the start and the compilation
PATIENCE_AT_THE_END = 40  # seconds that a process has to end after it was told to: torchrun gives its ranks 30
PAUSE = 0.02  # seconds between the steps of two workers: threads of the one that just stepped may still spin
# A row that runs alone stops when it has COUNTED_STEPS which took ENOUGH_SECONDS together, in which a card's clock
# settles, and at the latest after MOST_COUNTED_STEPS.
ENOUGH_SECONDS = 6.0
MOST_COUNTED_STEPS = 160
LAST_LINES = 20  # of stderr, shown where a process left no error line


class NotEnoughMemory(Exception):
    """The rows can't all be alive at once."""


def say(line):
    """Print a line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def about(seconds):
    """Return a time for people, as "about 4 min"."""
    return f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {seconds:.0f} s"


class Worker:
    """A row at work in a process of its own. It takes one step for each request, and ends with the bench.

    run: the results.Run that it fills.
    """

    def __init__(self, row, results, round_number):
        """Start the process. results: the Results that keep each line of its record."""
        self.row = row
        self.results = results
        self.round_number = round_number
        self.keep({"kind": "start"})
        self.run = results.runs[row.name, round_number]
        self.stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        python_path = str(FOLDER)  # where the harness is
        if os.environ.get("PYTHONPATH"):
            python_path += os.pathsep + os.environ["PYTHONPATH"]
        self.process = subprocess.Popen(
            row.command([*results.bench["flags"], "--worker"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=os.environ | {"PYTHONPATH": python_path} | results.bench["variables"],
            start_new_session=True,  # Ctrl-C reaches the bench alone, which then stops its workers
        )

    @property
    def is_live(self):
        """Whether it can be asked for another step, or for its summary."""
        return self.run.summary is None and self.run.error is None

    def keep(self, line):
        """Keep a line of its record."""
        self.results.add(line | {"name": self.row.name, "round": self.round_number})

    def step(self):
        """Ask for a step, and wait until it is taken."""
        if self.is_live:
            with contextlib.suppress(OSError):  # where the process is gone, wait() finds out why
                self.process.stdin.write("\n")
                self.process.stdin.flush()
            self.wait()

    def close(self):
        """Close its stdin, which asks for the summary. wait() receives that."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def wait(self):
        """Wait until the step, or the summary, has come. A process that comes to neither has failed."""
        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(PATIENCE)
        try:
            for text in self.process.stdout:
                line = line_of_record(text)
                if line is None:
                    continue
                self.keep(line)
                if line["kind"] == "error":
                    self.tell(line)
                if line["kind"] in ("step", "summary", "error"):
                    return
            self.fail(*self.last_words())
        except TimeoutError:
            self.send(signal.SIGTERM)
            self.fail(f"no answer in {PATIENCE} s: stopped")
        finally:
            signal.alarm(0)

    def last_words(self):
        """Return (message, last lines of stderr, whether memory was short) of a process that left no error line."""
        status = self.process.wait()
        self.stderr.seek(0)
        text = self.stderr.read()
        lines = []
        for line in text.strip().splitlines():
            if "torch/distributed/elastic/" in line:
                break  # torchrun reports, below what its ranks wrote
            lines.append(line)
        said = "\n".join(lines[-LAST_LINES:])
        if status == -signal.SIGKILL or "(SIGKILL)" in text:  # of the process, or of a rank that torchrun started
            return "killed by the system, most likely out of memory", said, True
        if status == 0:
            return "ended without log.finish()", said, False
        refusals = [line for line in lines if line.startswith("error: ")]  # as refuse() says it, in any rank
        if refusals:
            return refusals[-1], said, False
        return (lines[-1] if lines else f"exit status {status}"), said, False

    def fail(self, message, said="", out_of_memory=False):
        """Keep a line that says why the process can't go on, and tell it."""
        error = {"kind": "error", "message": message, "traceback": said, "out_of_memory": out_of_memory}
        self.keep(error)
        self.tell(error)

    def tell(self, error):
        """Print why the process failed, by the error line of its record."""
        say(f"{self.row.name} failed: {error['message']}")
        if not error["out_of_memory"] and error["traceback"] not in ("", error["message"]):
            say(error["traceback"])

    def stop(self):
        """End the process and its group. A process that sent its summary may first take its time to leave.

        What is left gets SIGTERM, and then SIGKILL.
        """
        self.close()
        if self.run.summary:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE_AT_THE_END)
        self.send(signal.SIGTERM)
        # torchrun starts its ranks in groups of their own, which send() does not reach. It ends them on SIGTERM.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_AT_THE_END)
        self.send(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.stderr.close()

    def send(self, signal_number):
        """Send a signal to the process and to all that it started in its group."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal_number)


def give_up(signal_number, frame):
    """Raise TimeoutError: what SIGALRM does in wait()."""
    raise TimeoutError


def line_of_record(text):
    """Return a line of a record as a dict, or None for what a script printed before parse_args() took its stdout."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    is_of_record = isinstance(line, dict) and line.get("kind") in ("header", "step", "summary", "error")
    return line if is_of_record else None


def has_enough(run):
    """Tell whether a run that is alone on its device has counted enough steps, for long enough."""
    return len(run.counted) >= COUNTED_STEPS and sum(step["dt"] for step in run.counted) >= ENOUGH_SECONDS


def lead(rows, results, round_number, tell_turn=None):
    """Take fresh workers of some rows through the warm-up, one after the other, and then through their counted steps.

    Counted steps are taken in turn. results: the Results that keep all lines. tell_turn: called after each turn with
    its number and the seconds of all turns so far. Raises NotEnoughMemory where the rows can't all be alive at once.
    """
    workers = []
    try:
        began = time.monotonic()
        for row in rows:
            # Later rounds start the same processes as the first one. The next process may need half as much again as
            # the largest so far. On a system without meters of memory both sides are 0.
            is_first_round = round_number == 0
            largest = max((worker.run.memory for worker in workers), default=0)
            if is_first_round and machine.free_memory() < 1.5 * largest:
                raise NotEnoughMemory(f"memory holds {len(workers)} of {len(rows)} processes at once")
            say(f"{row.name}: start and warm-up")
            worker = Worker(row, results, round_number)
            workers.append(worker)
            for _ in range(WARMUP):
                worker.step()
            if len(workers) < len(rows):
                left = seconds_left(workers, rows, results, time.monotonic() - began)
                say(f"{len(workers)} of {len(rows)} are warm, {about(left)} left in this round")
        take_turns(workers, results.bench["steps"] - WARMUP, results.bench["in_turn"], tell_turn)
        for worker in workers:
            worker.close()
        for worker in workers:
            if worker.is_live:
                worker.wait()
    finally:
        for worker in workers:
            worker.stop()


def seconds_left(workers, rows, results, elapsed):
    """Estimate the seconds that starts and turns will take, from those of the workers that are warm."""
    dts = [worker.run.steps[-1]["dt"] for worker in workers if worker.run.steps]
    seconds_of_turn = sum(dts) / len(workers) * len(rows)
    seconds_of_start = elapsed / len(workers)
    return seconds_of_start * (len(rows) - len(workers)) + seconds_of_turn * (results.bench["steps"] - WARMUP)


def take_turns(workers, steps, in_turn, tell_turn):
    """Take so many steps with each live worker, in turn. One that runs alone stops once it has_enough()."""
    began = time.monotonic()
    workers = list(workers)
    for turn in range(1, steps + 1):
        waiting = [worker for worker in workers if worker.is_live]
        if not in_turn:
            waiting = [worker for worker in waiting if not has_enough(worker.run)]
        if not waiting:
            return
        for worker in waiting:
            if len(waiting) > 1:
                time.sleep(PAUSE)
            worker.step()
        workers.reverse()  # there and back, so that a drift of the machine's speed affects all alike
        if tell_turn:
            tell_turn(turn, time.monotonic() - began)
