"""Rewards for mathematical answers, by math-verify in worker processes."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import math
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Float32

from trm_jax.data._answers import marked_answer, plain_answer
from trm_jax.data._problem import Problem
from trm_jax.data._worker_pool import WorkerPool

__all__ = ["PROGRAM", "MathVerifier", "Verdict", "VerifierCounts"]

_WORD = re.compile(r"[A-Za-z]{2,}")
_FORMULA = re.compile(r"[=^(\[{]|[\w)]\s*[+-]\s*\w|,(?!\d{3}(?!\d))")  # or a list: a comma of thousands makes none

PROGRAM = Path(__file__).with_name("_math_worker.py")
"""The program of a worker."""


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


class Verdict(NamedTuple):
    """Whether a response is right, and how that was found: ``scored``, or wrong by a ``timeout`` or an ``error``."""

    correct: bool
    status: str


class MathVerifier:
    """Compares answers as mathematics with math-verify, in worker processes that can be killed.

    A reward function: 1.0 for an answer equal to the reference, 0.0 for anything else, a failure or an overrun
    included (``counts`` tells them apart). The answer is taken from the last ``\\boxed{...}``, from after the last
    ``####`` or ``Answer:`` (as a formula, or as a number with words around it), or else as math-verify finds it, the
    last expression first. Where the problem's ``metadata["tolerance"]`` is a number, a number that close to the
    reference is right.

    math-verify stops long work with an alarm signal, which goes by the clock, only fires in a main thread, and not
    inside one long arithmetic operation. So each worker has a timer of its own that goes by processor time, half of
    ``time_limit``, and a worker that overruns ``time_limit`` is killed and replaced. A busy machine changes no verdict.

    Use it as a context manager, or call ``close``. Workers also end when the process that made them does.

    Args:
      workers: number of processes, at least 1.
      time_limit: seconds of processor time a response may take, at least 1.
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
        self._max_response_chars = max_response_chars
        self._counts = VerifierCounts()
        self._lock = threading.Lock()
        self._pool = WorkerPool(PROGRAM, (), workers=workers, time_limit=time_limit)

    @property
    def counts(self) -> VerifierCounts:
        """What became of the responses so far."""
        return self._counts

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return self._pool.process_ids

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
        return np.asarray([verdict.correct for verdict in self.judge(problems, responses)], dtype=np.float32)

    def judge(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
        """As ``score_batch``, and says how each verdict came about."""
        if len(problems) != len(responses):
            raise ValueError(f"{len(problems)} problems but {len(responses)} responses; one a problem is required")
        if self._pool.closed:
            raise ValueError("this MathVerifier is closed; make a new one")
        requests = [
            {
                "gold": problem.reference.strip().strip("$"),
                "answers": _readings(response, self._max_response_chars),
                "tolerance": problem.metadata.get("tolerance", 0.0),
            }
            for problem, response in zip(problems, responses, strict=True)
        ]
        truncated = sum(len(response) > self._max_response_chars for response in responses)
        with self._lock:
            outcomes = self._pool.run(requests)
            tally = collections.Counter(status for status, _ in outcomes)
            self._counts = VerifierCounts(
                scored=self._counts.scored + tally["scored"],
                timeouts=self._counts.timeouts + tally["timeout"],
                errors=self._counts.errors + tally["error"],
                truncated=self._counts.truncated + truncated,
            )
        return [Verdict(correct, status) for status, correct in outcomes]

    def close(self) -> None:
        """Ends the workers; a second call does nothing."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _readings(response: str, max_chars: int) -> list[str]:
    """The end of a response, or the answer marked in it, in the forms that math-verify reads; one must be right.

    What a line marks may be a formula (``2n``, ``MR=SRMC``, ``even``) or a number with words after it (``12 apples``):
    where it does not show which, it is read as either.
    """
    tail = response[-max_chars:]
    marked = marked_answer(tail)
    if marked is None:
        return [tail]
    text = plain_answer(marked.text)
    formula = rf"\boxed{{{text}}}"  # math-verify joins boxes that stand side by side: there is one
    if marked.mark == "box" or "\\" in text or (_FORMULA.search(text) and not _WORD.search(text)):
        return [formula]
    return [text, formula]
