"""A reward for answers that are numbers, by plain comparison."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from trm_jax.data._problem import Problem

__all__ = ["number_reward"]

_NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+", re.ASCII)


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
