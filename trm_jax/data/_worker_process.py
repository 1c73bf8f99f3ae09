"""One worker process that judges answers, seen from its parent: requests, replies and deadlines."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["START_SECONDS", "Outcome", "WorkerProcess"]

START_SECONDS = 600.0
"""How long a worker may take until it has imported what it needs."""

_PATIENCE = 20

Outcome = tuple[str, bool]
"""What became of a request (``scored``, ``timeout``, ``error`` or ``died``), and whether the answer is right."""


class WorkerProcess:
    """A worker process: starting, then idle (no job) or busy (a job and a deadline), at last dead.

    Args:
      program: run as a file with a soft and a hard limit, in seconds of processor time, and ``arguments``. It writes
        ``{"status": "ready"}``, then a line with ``status`` and ``correct`` for every line it reads.
      arguments: further ones.
      time_limit: seconds of processor time that a request may take. A verdict must not hang on how busy the machine
        is; a request that waits without computing is given up after ``_PATIENCE`` times as long by the clock.
    """

    def __init__(self, program: Path, arguments: Sequence[str], time_limit: float) -> None:
        self._time_limit = time_limit
        soft, hard = time_limit / 2, math.ceil(time_limit) + 1
        # A fresh interpreter, not a fork: nothing of JAX is in it. -P keeps this folder off its import path.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program), str(soft), str(hard), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._received = b""
        self.job: int | None = None
        self.ready = False
        self.dead = False
        self.deadline = time.monotonic() + START_SECONDS
        self._used = self._latest = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> Any:
        return self._process.stdout

    @property
    def idle(self) -> bool:
        return self.ready and self.job is None

    def send(self, job: int, request: dict[str, Any]) -> bool:
        """Hands over a request; False when the process is gone."""
        assert self._process.stdin is not None
        line = json.dumps(request).encode() + b"\n"
        try:
            while line:
                line = line[self._process.stdin.write(line) :]
        except OSError:
            self.dead = True
            return False
        self.job = job
        self._used = _processor_seconds(self.pid)
        self._latest = time.monotonic() + _PATIENCE * self._time_limit
        self.deadline = time.monotonic() + self._time_limit
        return True

    def receive(self) -> Outcome | None:
        """Reads what has come; an outcome when a request is answered or the process ended on it."""
        received = os.read(self.output.fileno(), 65536)
        self._received += received
        if not received:
            self.dead = True
            if not self.ready:
                raise RuntimeError(f"a worker for rewards ended with status {self._process.wait()} before it was ready")
            return "died", False
        if not self._received.endswith(b"\n"):
            return None
        reply, self._received = json.loads(self._received), b""
        if reply["status"] == "failed":
            raise RuntimeError(f"a worker for rewards cannot start: {reply['error']}")
        if reply["status"] == "ready":
            self.ready = True
            return None
        return reply["status"], reply["correct"]

    def overrun(self) -> Outcome | None:
        """The deadline has passed: the process must go, unless it did not get the processor for that long."""
        if not self.ready:
            self.dead = True
            raise RuntimeError(f"a worker for rewards was not ready after {START_SECONDS:g} seconds")
        left = self._time_limit - (_processor_seconds(self.pid) - self._used)
        now = time.monotonic()
        if left > 0 and now < self._latest:
            self.deadline = min(self._latest, now + max(left, 0.05))
            return None
        self.dead = True
        return "timeout", False

    def stop(self) -> None:
        """Kills the process and frees what belongs to it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _processor_seconds(pid: int) -> float:
    """User and system time of a process so far; where the system does not tell, the clock stands in."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
