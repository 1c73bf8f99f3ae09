"""Rewards by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from trm_jax.data._number_reward import number_reward
from trm_jax.data._option_reward import exact_reward, option_reward
from trm_jax.data._problem import RewardFunction
from trm_jax.data._verifier import MathVerifier

__all__ = ["RewardKind", "open_reward"]

RewardKind = Literal["math", "number", "option", "exact"]


@contextlib.contextmanager
def open_reward(kind: RewardKind) -> Iterator[RewardFunction]:
    """A reward function by its name; worker processes live as long as the context.

    Args:
      kind: ``"math"`` (``MathVerifier``), ``"number"`` (``number_reward``), ``"option"`` (``option_reward``) or
        ``"exact"`` (``exact_reward``).

    Raises:
      ValueError: another name.
      ImportError: ``"math"`` without the extra ``math``.

    Example:
      >>> with open_reward("number") as reward:
      ...     reward is number_reward
      True
    """
    plain: dict[str, RewardFunction] = {"number": number_reward, "option": option_reward, "exact": exact_reward}
    if kind == "math":
        with MathVerifier() as verifier:
            yield verifier
        return
    if kind not in plain:
        raise ValueError(f"there is no reward {kind!r}; choose one of math, {', '.join(plain)}")
    yield plain[kind]
