"""Program of a verifier's worker process: JSON lines in, JSON lines out, math-verify in the main thread.

It is run as a file, not imported: a worker must start without JAX, and without a fork of a process that has JAX's
threads. It ends when its input closes, which also happens when its parent is killed; while it computes, a limit on
processor time stands in for the parent.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

_limits = runpy.run_path(str(Path(__file__).parents[1] / "process_limits.py"))  # an import would bring JAX along

_GIBIBYTES = 4  # of address space
_SMALL = 1e-3  # below it, math-verify's six decimals leave less than three digits
_RELATIVE = 1e-2


class _OutOfTimeError(BaseException):
    """Not an ``Exception``: libraries swallow those."""


def main(soft_limit: float, hard_limit: int) -> None:
    """Answers ``{"gold", "answers", "tolerance"}`` requests with ``{"status", "correct"}`` until the input ends.

    Args:
      soft_limit: seconds of processor time after which an exception ends a request.
      hard_limit: seconds of processor time after which the kernel ends the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever a library prints stays out of the replies
    try:
        math_verify = importlib.import_module("math_verify")
        _compare(
            math_verify, {"gold": "1", "answers": [r"$\frac{2}{2}$"], "tolerance": 0.0}
        )  # the first time takes seconds
    except Exception as error:
        replies.write(json.dumps({"status": "failed", "error": f"{type(error).__name__}: {error}"}) + "\n")
        return
    _limits["limit_memory_and_core"](_GIBIBYTES)
    timer = _Timer()
    replies.write(json.dumps({"status": "ready"}) + "\n")
    for line in sys.stdin:
        _limits["limit_processor_time"](hard_limit)
        replies.write(json.dumps(_answer(math_verify, json.loads(line), timer, soft_limit)) + "\n")


class _Timer:
    """Ends a computation after so much processor time: math-verify's own alarm goes by the clock."""

    def __init__(self) -> None:
        self._armed = False
        self.rang = False
        signal.signal(signal.SIGVTALRM, self._ring)

    def start(self, seconds: float) -> None:
        self._armed, self.rang = True, False
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)  # again and again: a bare except swallows it

    def stop(self) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _ring(self, *_: object) -> None:
        if self._armed:
            self.rang = True
            raise _OutOfTimeError


def _answer(math_verify: Any, request: dict[str, Any], timer: _Timer, soft_limit: float) -> dict[str, Any]:
    try:
        timer.start(soft_limit)
        correct = _compare(math_verify, request)
        timer.stop()
    except BaseException:  # deep nesting or memory may end a call anywhere
        timer.stop()
        return {"status": "timeout" if timer.rang else "error", "correct": False}
    if correct is None:
        return {"status": "error", "correct": False}
    # A swallowed end of time says False: told from a plain one.
    return {"status": "timeout" if timer.rang and not correct else "scored", "correct": correct}


def _compare(math_verify: Any, request: dict[str, Any]) -> bool | None:
    """Whether one of the answer's readings is right; None for a reference that is no mathematics."""
    gold = math_verify.parse(f"${request['gold']}$", parsing_timeout=None)
    return any(_equal(math_verify, gold, text, request["tolerance"]) for text in request["answers"]) if gold else None


def _equal(math_verify: Any, gold: list[Any], text: str, tolerance: float) -> bool:
    answer = math_verify.parse(text, parsing_timeout=None)
    correct = bool(math_verify.verify(gold, answer, timeout_seconds=None))
    near, distance = _distance(gold, answer)
    if not correct and distance is not None:
        return bool(distance <= tolerance * (1 + 1e-9))  # room for the rounding of decimal fractions
    if correct and distance is not None and near < _SMALL:
        return bool(distance <= _RELATIVE * near)  # math-verify rounds to six decimals: all small numbers are alike
    return correct


def _distance(gold: list[Any], answer: list[Any]) -> tuple[float, float | None]:
    """The size of the reference and how far the answer is from it, where both are real numbers; else None."""
    numbers = [
        [value for value in values if getattr(value, "is_real", False) and value.is_number][:1]
        for values in (gold, answer)
    ]
    if not all(numbers):
        return 0.0, None
    first, second = (float(values[0]) for values in numbers)
    return abs(first), abs(first - second)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
