"""Rewards for mathematical answers, by math-verify in worker processes."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import math
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing import connection
from types import TracebackType
from typing import Self

import numpy as np
from jaxtyping import Float32

from trm_jax.data._answers import marked_answer, plain_answer
from trm_jax.data._math_process import MathProcess, Outcome
from trm_jax.data._problem import Problem

__all__ = ["MathVerifier", "VerifierCounts"]


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
        self._workers = [MathProcess(time_limit) for _ in range(workers)]
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

    def _run(self, requests: Sequence[dict[str, str]]) -> list[Outcome]:
        outcomes: list[Outcome] = [("error", False)] * len(requests)
        again = set(range(len(requests)))  # a death may have had another cause than the request: each is tried twice
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
                for job, outcome in self._wait():
                    if outcome[0] == "died" and job in again:
                        again.remove(job)
                        pending.append(job)
                    else:
                        outcomes[job] = outcome if outcome[0] != "died" else ("error", False)
        except BaseException:
            self.close()  # replies that are still on their way would answer the wrong requests
            raise
        return outcomes

    def _wait(self) -> list[tuple[int, Outcome]]:
        """Waits for a reply or the next deadline; says what came."""
        came = []
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
                came.append((worker.job, outcome))
                worker.job = None
            if worker.dead:
                self._replace(place)
        return came

    def _replace(self, place: int) -> None:
        self._workers[place].stop()
        self._workers[place] = MathProcess(self._time_limit)


def _stop_all(workers: list[MathProcess]) -> None:
    for worker in workers:
        worker.stop()


def _final_part(response: str, max_chars: int) -> str:
    """The marked answer at the end of a response in a form that math-verify reads, or that end itself."""
    tail = response[-max_chars:]
    marked = marked_answer(tail)
    if marked is None:
        return tail
    text = plain_answer(marked.text)
    if marked.mark == "box" or "\\" in text:
        return rf"\boxed{{{text}}}"  # math-verify joins boxes that stand side by side: there is one
    return text
