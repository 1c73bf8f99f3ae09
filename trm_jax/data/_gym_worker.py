"""Program of the process that scores answers which reasoning-gym's own scorers would evaluate as code.

It is run as a file, not imported: JSON lines in, JSON lines out. ``eval`` is taken from the scorers (a full score never
needs it), an answer that sympy would evaluate must be plain arithmetic first, and whatever still runs away meets a
limit on processor time, on memory, or its parent.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import NoReturn

_limits = runpy.run_path(str(Path(__file__).parents[1] / "process_limits.py"))  # an import would bring JAX along

_BY_SYMPY = (*("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),)
_FUNCTIONS = (
    *("Abs", "acos", "asin", "atan", "cos", "cosh", "cot", "csc", "exp", "ln", "log", "sec", "sin", "sinh", "sqrt"),
    *("tan", "tanh"),
)
_PLAIN = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Name, ast.Load, ast.Call, ast.Constant),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd),
)

_GIBIBYTES = 4  # of address space


def main(name: str, params: str, hard_limit: int) -> None:
    """Answers ``{"answer", "entry"}`` with ``{"status", "correct"}`` until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    try:
        gym = importlib.import_module("reasoning_gym")
        dataset = gym.create_dataset(name, size=1, seed=0, **json.loads(params))
    except Exception as error:
        replies.write(json.dumps({"status": "failed", "error": f"{type(error).__name__}: {error}"}) + "\n")
        return
    sys.modules[type(dataset).__module__].eval = _no_eval  # type: ignore[attr-defined]
    _limits["limit_memory_and_core"](_GIBIBYTES)
    replies.write(json.dumps({"status": "ready"}) + "\n")
    for line in sys.stdin:
        _limits["limit_processor_time"](hard_limit)
        request = json.loads(line)
        try:
            plain = name not in _BY_SYMPY or is_arithmetic(request["answer"])
            correct = plain and dataset.score_answer(answer=request["answer"], entry=request["entry"]) == 1.0
            reply = {"status": "scored", "correct": bool(correct)}
        except BaseException:  # deep nesting or memory may end a scorer anywhere
            reply = {"status": "error", "correct": False}
        replies.write(json.dumps(reply) + "\n")


def is_arithmetic(text: str) -> bool:
    """Whether a text is numbers, names, + - * / ** and calls of elementary functions, and nothing else."""
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in nodes:
        if not isinstance(node, _PLAIN):
            return False
        if isinstance(node, ast.Constant) and (isinstance(node.value, bool) or not isinstance(node.value, int | float)):
            return False
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            return False
        if isinstance(node, ast.Call) and (
            node.keywords or not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS
        ):
            return False
    return True


def _no_eval(*_: object) -> NoReturn:
    raise ValueError("an answer is not evaluated")


if __name__ == "__main__":
    main(sys.argv[3], sys.argv[4], int(sys.argv[2]))
