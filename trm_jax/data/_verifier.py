"""Rewards for mathematical answers: math-verify in worker processes, and a plain comparison of numbers."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from jaxtyping import Float32

from trm_jax.data._problem import Problem

__all__ = ["MathVerifier", "VerifierCounts", "number_reward"]

_NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+", re.ASCII)
_START_SECONDS = 120.0
_PROGRAM = Path(__file__).with_name("_math_worker.py")


def number_reward(problem: Problem, response: str) -> float:
    """1.0 when the response's final number equals the reference, else 0.0; needs no other package.

    The final number is the first one after the last ``####``, or, without one, the last number of the response.
    Thousands separators, a dollar sign and trailing zeros make no difference.

    Args:
      problem: its reference is a number.
      response: the decoded response; only its last 4,096 characters are read.

    Returns:
      0.0 or 1.0; 0.0 when there is no number.

    Raises:
      ValueError: the reference is not a number.

    Example:
      >>> problem = Problem(prompt="?", reference="1200", source="example", index=0)
      >>> number_reward(problem, "That makes $1,200.00 in 3 weeks. #### 1,200"), number_reward(problem, "12")
      (1.0, 0.0)
    """
    try:
        gold = Decimal(problem.reference.replace(",", "").replace("$", ""))
    except InvalidOperation:
        raise ValueError(
            f"the reference of problem {problem.name} is {problem.reference!r}; number_reward needs a number"
        ) from None
    tail = response[-4096:]
    _, marked, final = tail.rpartition("####")
    numbers = _NUMBER.findall(final)
    if not numbers:
        return 0.0
    return float(Decimal((numbers[0] if marked else numbers[-1]).replace(",", "").replace("$", "")) == gold)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifierCounts:
    """What became of the responses so far.

    Attributes:
      scored: compared to the end.
      timeouts: stopped by a time limit; rewarded 0.
      errors: the comparison failed, the reference could not be parsed, or the worker died; rewarded 0.
      truncated: longer than the bound, and compared by their end only (counted beside the other three).
    """

    scored: int = 0
    timeouts: int = 0
    errors: int = 0
    truncated: int = 0


class MathVerifier:
    """Compares answers as mathematics with math-verify, in worker processes that can be killed.

    A reward function: 1.0 for an answer equal to the reference, 0.0 for anything else, a failure or an overrun
    included (``counts`` tells them apart). The answer is taken from the last ``\\boxed{...}``, from after the last
    ``####``, or else as math-verify finds it, the last expression first.

    math-verify stops long work with an alarm signal, which only fires in a main thread and not inside one long
    arithmetic operation. So each worker runs it in its main thread, and the worker that overruns ``time_limit`` is
    killed and replaced.

    Use it as a context manager, or call ``close``. Workers also end when the process that made them does.

    Args:
      workers: number of processes, at least 1.
      time_limit: seconds of wall-clock a response may take, at least 1.
      max_response_chars: how much of a response's end is looked at, in characters.

    Raises:
      ValueError: a number out of its range.
      ImportError: math-verify is not installed.

    Example:
      >>> problem = Problem(prompt="Half of one?", reference=r"\\frac{1}{2}", source="example", index=0)
      >>> with MathVerifier(workers=1) as reward:  # doctest: +SKIP
      ...     reward(problem, r"It is \\boxed{0.5}.")
      1.0
    """

    def __init__(self, *, workers: int = 2, time_limit: float = 6.0, max_response_chars: int = 4096) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if not 1.0 <= time_limit < math.inf:
            raise ValueError(f"time_limit must be a finite number of seconds, at least 1, got {time_limit}")
        if max_response_chars < 1:
            raise ValueError(f"max_response_chars must be at least 1, got {max_response_chars}")
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("MathVerifier needs 'math_verify': pip install 'trm-jax[math]'", name="math_verify")
        self._time_limit = time_limit
        self._max_response_chars = max_response_chars
        self._counts = VerifierCounts()
        self._lock = threading.Lock()
        self._workers = [_Worker(time_limit) for _ in range(workers)]
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    @property
    def counts(self) -> VerifierCounts:
        """What became of the responses so far."""
        return self._counts

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(worker.pid for worker in self._workers)

    def __call__(self, problem: Problem, response: str) -> float:
        """Scores one response; ``score_batch`` keeps every worker busy."""
        return float(self.score_batch([problem], [response])[0])

    def score_batch(self, problems: Sequence[Problem], responses: Sequence[str]) -> Float32[np.ndarray, " B"]:
        """Scores a batch over all workers.

        Args:
          problems: ``B`` problems, one a response.
          responses: ``B`` decoded responses.

        Returns:
          ``[B]`` float32 rewards, 0 or 1.

        Raises:
          ValueError: the lists differ in length, or the verifier is closed.
          RuntimeError: a worker could not start.
        """
        if len(problems) != len(responses):
            raise ValueError(f"{len(problems)} problems but {len(responses)} responses; one a problem is required")
        if not self._finalizer.alive:
            raise ValueError("this MathVerifier is closed; make a new one")
        requests = [
            {"gold": problem.reference.strip().strip("$"), "answer": _final_part(response, self._max_response_chars)}
            for problem, response in zip(problems, responses, strict=True)
        ]
        truncated = sum(len(response) > self._max_response_chars for response in responses)
        with self._lock:
            outcomes = self._run(requests)
            tally = collections.Counter(status for status, _ in outcomes)
            self._counts = VerifierCounts(
                scored=self._counts.scored + tally["scored"],
                timeouts=self._counts.timeouts + tally["timeout"],
                errors=self._counts.errors + tally["error"],
                truncated=self._counts.truncated + truncated,
            )
        return np.asarray([correct for _, correct in outcomes], dtype=np.float32)

    def close(self) -> None:
        """Ends the workers; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, requests: Sequence[dict[str, str]]) -> list[_Outcome]:
        outcomes: list[_Outcome] = [("error", False)] * len(requests)
        pending = collections.deque(range(len(requests)))
        try:
            while pending or any(worker.job is not None for worker in self._workers):
                for place, worker in enumerate(self._workers):
                    if not pending or not worker.idle:
                        continue
                    if worker.send(pending[0], requests[pending[0]]):
                        pending.popleft()
                    else:
                        self._replace(place)  # it died while idle; the request stays pending
                self._wait(outcomes)
        except BaseException:
            self.close()  # replies that are still on their way would answer the wrong requests
            raise
        return outcomes

    def _wait(self, outcomes: list[_Outcome]) -> None:
        """Waits for a reply or the next deadline, and notes what came."""
        active = {worker.output: place for place, worker in enumerate(self._workers) if not worker.idle}
        nearest = min((self._workers[place].deadline for place in active.values()), default=0.0)
        speaking = connection.wait(list(active), timeout=max(0.0, nearest - time.monotonic()))
        for output, place in active.items():
            worker = self._workers[place]
            if output in speaking:
                outcome = worker.receive()
            elif time.monotonic() >= worker.deadline:
                outcome = worker.overrun()
            else:
                continue
            if outcome is not None and worker.job is not None:
                outcomes[worker.job] = outcome
                worker.job = None
            if worker.dead:
                self._replace(place)

    def _replace(self, place: int) -> None:
        self._workers[place].stop()
        self._workers[place] = _Worker(self._time_limit)


_Outcome = tuple[str, bool]


class _Worker:
    """One worker process: starting, then idle (no job) or busy (a job and a deadline), at last dead."""

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        soft, hard = max(1, int(time_limit // 3)), math.ceil(time_limit) + 1
        # A fresh interpreter, not a fork: nothing of JAX is in it. -P keeps this folder off its import path.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(soft), str(hard)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._received = b""
        self.job: int | None = None
        self.ready = False
        self.dead = False
        self.deadline = time.monotonic() + _START_SECONDS

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> Any:
        return self._process.stdout

    @property
    def idle(self) -> bool:
        return self.ready and self.job is None

    def send(self, job: int, request: dict[str, str]) -> bool:
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
        self.deadline = time.monotonic() + self._time_limit
        return True

    def receive(self) -> _Outcome | None:
        """Reads what has come; an outcome when a request is answered or the process ended on it."""
        received = os.read(self.output.fileno(), 65536)
        self._received += received
        if not received:
            self.dead = True
            if not self.ready:
                raise RuntimeError(f"a math-verify worker ended with status {self._process.wait()} before it was ready")
            return "error", False
        if not self._received.endswith(b"\n"):
            return None
        reply, self._received = json.loads(self._received), b""
        if reply["status"] == "failed":
            raise RuntimeError(f"a math-verify worker cannot start: {reply['error']}")
        if reply["status"] == "ready":
            self.ready = True
            return None
        return reply["status"], reply["correct"]

    def overrun(self) -> _Outcome:
        """The deadline has passed: the process must go."""
        self.dead = True
        if not self.ready:
            raise RuntimeError(f"a math-verify worker was not ready after {_START_SECONDS:g} seconds")
        return "timeout", False

    def stop(self) -> None:
        """Kills the process and frees what belongs to it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()


def _final_part(response: str, max_chars: int) -> str:
    """The end of a response; of that, what follows the last ``####`` unless a boxed answer stands later."""
    tail = response[-max_chars:]
    _, marked, final = tail.rpartition("####")
    if not marked or "\\boxed" in final:
        return tail
    final = final.strip().split("\n")[0]
    return f"${final}$" if "\\" in final and "$" not in final else final
