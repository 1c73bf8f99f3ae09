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
import time
from pathlib import Path
from typing import Any

_limits = runpy.run_path(str(Path(__file__).parents[1] / "process_limits.py"))  # an import would bring JAX along

_GIBIBYTES = 4  # of address space
_SMALL = 1e-3  # below it, math-verify's six decimals leave less than three digits
_RELATIVE = 1e-2


def main(soft_limit: int, hard_limit: int) -> None:
    """Answers ``{"gold", "answer", "tolerance"}`` requests with ``{"status", "correct"}`` until the input ends.

    Args:
      soft_limit: seconds that one parse or comparison may take before math-verify's alarm ends it.
      hard_limit: seconds of processor time after which the kernel ends the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever a library prints stays out of the replies
    try:
        math_verify = importlib.import_module("math_verify")
    except Exception as error:
        replies.write(json.dumps({"status": "failed", "error": f"{type(error).__name__}: {error}"}) + "\n")
        return
    _limits["limit_memory_and_core"](_GIBIBYTES)
    replies.write(json.dumps({"status": "ready"}) + "\n")
    for line in sys.stdin:
        _limits["limit_processor_time"](hard_limit)
        replies.write(json.dumps(_answer(math_verify, json.loads(line), soft_limit)) + "\n")


def _answer(math_verify: Any, request: dict[str, Any], soft_limit: int) -> dict[str, Any]:
    started = time.monotonic()
    try:
        gold = math_verify.parse(f"${request['gold']}$", parsing_timeout=soft_limit)
        if not gold:
            return {"status": "error", "correct": False}
        answer = math_verify.parse(request["answer"], parsing_timeout=soft_limit)
        correct = bool(math_verify.verify(gold, answer, timeout_seconds=soft_limit))
        near, distance = _distance(gold, answer)
        if not correct and distance is not None:
            # The margin leaves room for the rounding of decimal fractions.
            correct = distance <= request["tolerance"] * (1 + 1e-9)
        elif correct and distance is not None and near < _SMALL:
            correct = distance <= _RELATIVE * near  # math-verify rounds to six decimals: all small numbers are alike
    except BaseException:  # math-verify's timeout is no Exception, and deep nesting or memory may end a call anywhere
        return {"status": "error", "correct": False}
    # math-verify swallows its own alarm and says False: the clock tells such a False from a plain one.
    late = not correct and time.monotonic() - started >= soft_limit
    return {"status": "timeout" if late else "scored", "correct": correct}


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
    main(int(sys.argv[1]), int(sys.argv[2]))
