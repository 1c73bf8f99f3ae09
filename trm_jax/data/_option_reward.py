"""Rewards by plain text: the letter of a choice, and an answer that must be given literally."""

from __future__ import annotations

import re

from trm_jax.data._answers import marked_answer
from trm_jax.data._problem import Problem

__all__ = ["exact_reward", "option_reward"]

_READ = 4096  # characters of a response's end that are looked at
_FRAME = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}")
_ALONE = re.compile(r"[\s(*\[]*([A-J])(?:[\s)*\].:]*|[).:]\s.*)", re.DOTALL)
_STATED = re.compile(r"\b(?i:answer|option|choice)(?i:\s+is)?\s*:?\s*[(*\[]*([A-J])\b(?!['’])")


def option_reward(problem: Problem, response: str) -> float:
    r"""1.0 when the response's choice is the reference letter, else 0.0.

    The choice is a letter in the last ``\boxed{...}``, after ``####`` or ``Answer:``; without such a mark, the last one
    stated as in ``the answer is (C)``, or the only thing on the response's first or last line. A mark around anything
    but one letter is wrong.

    Args:
      problem: its reference is a letter; with ``metadata["choices"]``, letters beyond them count as none.
      response: any text; only its last 4,096 characters are read.

    Returns:
      0.0 or 1.0.

    Example:
      >>> problem = Problem(prompt="?", reference="C", source="example", index=0)
      >>> [option_reward(problem, text) for text in (r"so \boxed{C}", "The answer is (C).", r"\boxed{B, C}", "A or C")]
      [1.0, 1.0, 0.0, 0.0]
    """
    tail = response[-_READ:]
    marked = marked_answer(tail)
    lines = [line for line in tail.strip().split("\n") if line.strip()] or [""]
    if marked is not None:
        letter = _letter(marked.text)
    else:
        stated = _STATED.findall(tail)
        letter = stated[-1] if stated else _letter(lines[-1]) or _letter(lines[0])
    return float(letter == problem.reference.strip())


def exact_reward(problem: Problem, response: str) -> float:
    r"""1.0 when the response's final answer is the reference itself, white space apart, else 0.0.

    The final answer is marked by ``\boxed{...}``, ``####`` or ``Answer:``; without a mark the whole response counts.

    Args:
      problem: has the reference.
      response: any text; only its last 4,096 characters are read.

    Returns:
      0.0 or 1.0.

    Example:
      >>> problem = Problem(prompt="?", reference="next Friday", source="example", index=0)
      >>> exact_reward(problem, "Answer: next  Friday"), exact_reward(problem, "Friday")
      (1.0, 0.0)
    """
    tail = response[-_READ:]
    marked = marked_answer(tail)
    given = tail if marked is None else marked.text
    return float(given.split() == problem.reference.split())


def _letter(text: str) -> str | None:
    found = _ALONE.fullmatch(_FRAME.sub(r"\1", text).strip())
    return found[1] if found else None
