"""Wrong demonstrations on request: a warm start on them leaves a policy that knows the method and errs."""

from __future__ import annotations

import re

import numpy as np

from trm_jax.data._arithmetic import LARGEST_OFFSET, running_values
from trm_jax.data._problem import Problem

__all__ = ["corrupt_demonstration"]

_LAST_INTEGER = re.compile(r"[0-9]+(?!.*[0-9])", re.DOTALL)


def corrupt_demonstration(problem: Problem, rng: np.random.Generator, probability: float) -> str:
    """The problem's demonstration, with errors.

    Where the demonstration is a chain of results (``metadata["chain"]`` holds the expression), every result is made
    wrong with ``probability`` by adding 1, 2 or 3, and later results carry on from the wrong one: a chain of ``n``
    sums ends right with probability ``(1 - probability)^n``. Elsewhere the answer itself is wrong with
    ``probability``: its last number grows by 1, 2 or 3, or, without a number, two of its characters change places.

    Args:
      problem: a problem with a demonstration.
      rng: source of the errors.
      probability: chance of an error, in [0, 1]; 0 gives the demonstration itself.

    Returns:
      The text.

    Raises:
      ValueError: the problem has no demonstration, or the probability is out of range.

    Example:
      >>> problem = Problem(prompt="3+7-1+9=", reference="18", demonstration="10,9,18", source="example", index=0,
      ...                   metadata={"chain": "3+7-1+9"})
      >>> corrupt_demonstration(problem, np.random.default_rng(0), 0.0)
      '10,9,18'
      >>> int(corrupt_demonstration(problem, np.random.default_rng(0), 1.0).split(",")[-1]) > 18
      True
    """
    if problem.demonstration is None:
        raise ValueError(f"problem {problem.name} has no demonstration to corrupt")
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"probability must be in [0, 1], got {probability}")
    chain = problem.metadata.get("chain")
    if chain is not None:
        return ",".join(running_values(chain, rng=rng, probability=probability))
    if rng.random() >= probability:
        return problem.demonstration
    return _corrupt_text(problem.demonstration, rng)


def _corrupt_text(text: str, rng: np.random.Generator) -> str:
    """A wrong answer close to a right one, over the same characters (and digits).

    The last run of digits grows by 1, 2 or 3, keeping its leading zeros. Without digits, two unequal neighbours change
    places; without such neighbours (``aaa``) the last character is doubled.

    Args:
      text: the right answer; not empty.
      rng: source of the error.

    Returns:
      A text that differs from ``text`` and is at most one character longer.

    Example:
      >>> _corrupt_text("319,2", np.random.default_rng(0)) in ("319,3", "319,4", "319,5")
      True
      >>> _corrupt_text("Friday", np.random.default_rng(0)) != "Friday"
      True
    """
    match = _LAST_INTEGER.search(text)
    if match:
        number = int(match.group()) + int(rng.integers(1, LARGEST_OFFSET + 1))
        return text[: match.start()] + str(number).zfill(len(match.group())) + text[match.end() :]
    unequal = [i for i in range(len(text) - 1) if text[i] != text[i + 1]]
    if unequal:
        i = unequal[int(rng.integers(len(unequal)))]
        return text[:i] + text[i + 1] + text[i] + text[i + 2 :]
    return text + text[-1:]
