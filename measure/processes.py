"""Stages as processes: started, led step by step, watched, and always stopped."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from stages.record import WARMUP, read_record

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 5  # seconds in which a process ends that was told to, or that has closed its output


@dataclass
class Contender:
    """One row of a bench: a script of stages/ or measure/ with the flags it gets beyond those that all share."""

    name: str
    script: str
    flags: list = field(default_factory=list)
    launcher: list = field(default_factory=list)  # what stands between python and the script, such as torchrun
    env: dict = field(default_factory=dict)
    ranks: int = 1


class Process:
    """A contender at work. It waits for go() before each step, and ends by itself when this process dies."""

    def __init__(self, contender, flags, record, budget=None):
        """budget: bytes of resident memory past which the process is stopped, or None."""
        self.name, self.record, self.budget = contender.name, Path(record), budget
        self.log = self.record.with_suffix(".log")
        command = [sys.executable, *contender.launcher, str(ROOT / contender.script), *flags, *contender.flags]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*command, "--record", str(self.record), "--lockstep"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the bench alone, which then stops its children in order
                env=os.environ | contender.env,
            )
        self.steps, self.failure, self.speed = 0, None, "?"
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def go(self, timeout):
        """Let one step run, and return True when it has; False where the process ended or hung, see failure."""
        self.send()
        return self.wait(timeout)

    def send(self):
        """Let one step run, and do not wait for it."""
        self.sent = time.monotonic()
        with contextlib.suppress(OSError):  # the process is gone: its lines say so
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    def wait(self, timeout):
        """Whether the step that was sent came to its end within so many seconds; where not, see failure."""
        while (done := self.poll(timeout, 0.05 if self.budget else timeout)) is None:
            pass
        return done

    def poll(self, timeout, seconds):
        """Like wait, but None where it looked for so many seconds and there is time left."""
        left = self.sent + timeout - time.monotonic()
        try:
            line = self.lines.get(timeout=max(0.0, min(seconds, left)))
        except queue.Empty:
            if left <= seconds:
                self.failure = f"no step in {timeout:.0f} s: stopped; raise --timeout if it is only slow"
            elif self.budget and resident_memory(self.process.pid) > self.budget:
                self.failure = f"out of memory: more than the budget of {self.budget / 1e9:.1f} GB"
            else:
                return None
            self.stop()
            return False
        if line is None:
            self.failure = self._why_it_ended()
            return False
        if not line.startswith(b"step "):
            return None
        self.steps += 1
        self.speed = line.decode().rpartition("tok/sec ")[2].strip()
        return True

    def _why_it_ended(self):
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return "closed its output, and did not end"
        with contextlib.suppress(OSError):
            end = read_record(self.record)[2] or {}
            if "error" in end:
                return end["error"]
        if code == -signal.SIGKILL:
            return "killed by the system, most likely out of memory: try a smaller --batch-size"
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return f"exit status {code}" + (f": {last[0][:200]}" if last else "")

    def finish(self, timeout):
        """Let the process end by itself after its last step, so that its record has a summary."""
        self.send()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.failure = self.failure or f"did not end within {timeout:.0f} s of its last step"
        else:
            if self.process.returncode:
                self.failure = self._why_it_ended()
        self.stop()

    def stop(self):
        """End the process and all that it started, at once where it does not end by itself."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        self.signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def leave_reason(self):
        """Write why it failed into the record, also where the process itself had no time to."""
        if not self.failure:
            return
        end = (read_record(self.record)[2] if self.record.exists() else None) or {}
        if end.get("error") != self.failure:
            with contextlib.suppress(OSError), open(self.record, "a") as f:
                f.write("\n" + json.dumps(dict(kind="error", error=self.failure)) + "\n")

    def signal(self, number):
        """Send a signal to the process and to all that it started."""
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, number)  # it leads a group of its own
            else:
                self.process.send_signal(number)


class Session:
    """Fresh processes of some contenders, led through warm-up and steps, one record each in `folder`.

    lockstep: all live at once and take one step each in turn, so that whatever else the machine does hits them
    alike; the way to compare on a shared CPU. Otherwise one after the other, as an accelerator wants it.
    """

    def __init__(self, folder, number, flags, steps, timeout, say, timed=()):
        """steps: after the warm-up. say(line, brief): told how far it is, with the speed of those named in timed."""
        self.folder, self.number, self.flags, self.steps = Path(folder), number, flags, steps
        self.timeout, self.say, self.timed = timeout, say, timed
        self.live, self.failures = [], {}

    def _start(self, contender):
        flags = [*self.flags, "--steps", str(WARMUP + self.steps)]
        process = Process(contender, flags, self.folder / f"{self.number}-{contender.name}.jsonl")
        self.live.append(process)
        return process

    def _warm_up(self, contenders, room=lambda n: True, at_once=1):
        """Start contenders and take each through its warm-up steps, up to `at_once` at a time while there is room."""
        waiting, warming, count = list(contenders), {}, 0
        while waiting or warming:
            while waiting and len(warming) < at_once and room(len(warming) + 1):
                process, count = self._start(waiting.pop(0)), count + 1
                self.say(f"[{count}/{len(contenders)}] {process.name}: start and warm-up", brief=True)
                process.send()
                warming[process] = (WARMUP, time.monotonic())
            if not warming:
                return  # no room for those that wait
            for process, (left, began) in list(warming.items()):
                done = process.poll(self.timeout, 0.1)
                if done and left > 1:
                    process.send()
                    warming[process] = (left - 1, began)
                elif done is not None:
                    del warming[process]
                    if done:
                        took = f"warm after {time.monotonic() - began:.0f} s"
                        self.say(f"[{count}/{len(contenders)}] {process.name}: {took}")
            self._drop_failed()

    def _drop_failed(self):
        for process in [p for p in self.live if p.failure]:
            process.stop()
            self.live.remove(process)
            self.failures[process.name] = process.failure
            process.leave_reason()
            self.say(f"{process.name} failed: {process.failure}")

    def in_lockstep(self, contenders, room):
        """Run as many contenders at once as memory allows, the first always among them.

        The first warms up alone, and tells what one holds. The others warm up two at a time, since compilation keeps
        one core busy, and from both ends: neighbours in the ladder compile the same kernels, and one after the
        other they do so once.
        room(n): whether there is memory for n more processes, asked when the first is warm and before each start.
        """
        first, *others = contenders
        middle = (len(others) + 1) // 2
        ends = [c for pair in zip_longest(others[:middle], others[: middle - 1 : -1]) for c in pair if c]
        try:
            self._warm_up([first])
            self._warm_up(ends, room, at_once=2)
            self.live.sort(key=lambda process: [c.name for c in contenders].index(process.name))
            began = time.monotonic()
            for step in range(1, self.steps + 1):
                # there and back, so that a drift of the machine's speed hits the first and the last alike
                for process in self.live if step % 2 else self.live[::-1]:
                    time.sleep(0.02)  # the last one's threads may still spin, waiting for work
                    process.go(self.timeout)
                self._drop_failed()
                left = (time.monotonic() - began) / step * (self.steps - step)
                speeds = ", ".join(f"{p.name.split('_')[0]} {p.speed}" for p in self.live if p.name in self.timed)
                self.say(f"round {step}/{self.steps}, {left:.0f} s left | tok/sec {speeds}", brief=True)
            for process in self.live:
                process.send()  # to all before the first is waited for, since each takes its time to leave
            for process in self.live:
                process.finish(60)
            self._drop_failed()
        finally:
            self.stop()

    def one_by_one(self, contenders):
        """Run the contenders one after the other."""
        try:
            for i, contender in enumerate(contenders, 1):
                self._warm_up([contender])
                if not self.live:
                    continue
                process, began = self.live[0], time.monotonic()
                for step in range(1, self.steps + 1):
                    if process.failure or not process.go(self.timeout):
                        break
                    left = (time.monotonic() - began) / step * (self.steps - step)
                    at = f"[{i}/{len(contenders)}] {contender.name}: step {step}/{self.steps}"
                    self.say(f"{at}, tok/sec {process.speed}, {left:.0f} s left", brief=True)
                if not process.failure:
                    process.finish(60)
                self._drop_failed()
                self.live.clear()
        finally:
            self.stop()

    def stop(self):
        """Stop what still runs."""
        for process in self.live:
            process.signal(signal.SIGTERM)  # all at once, since each takes its time
        for process in self.live:
            process.stop()


def resident_memory(pid):
    """Bytes that a process holds in memory now; 0 where this system does not tell."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return 1024 * int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])
    with contextlib.suppress(OSError, ValueError):
        return 1024 * int(subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True).stdout)
    return 0


def free_memory():
    """Bytes that can be taken without swapping, as far as this system tells; None where it does not."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        text = Path("/proc/meminfo").read_text()
        free = 1024 * int(text.split("MemAvailable:")[1].split()[0])
        with contextlib.suppress(OSError, ValueError):  # a container may have less than its machine
            limit, used = (int(Path(f"/sys/fs/cgroup/memory.{x}").read_text()) for x in ("max", "current"))
            free = min(free, limit - used)
        return free
    with contextlib.suppress(OSError, AttributeError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None
