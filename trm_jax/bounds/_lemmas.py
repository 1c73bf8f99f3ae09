"""The two building blocks of the worst-case bounds: how large an advantage, and how far the contexts move."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Float, Int

from trm_jax.bounds._arrays import Scalar, Value, capped, coupled_shift, is_traced, namespace, pinsker_shift
from trm_jax.numerics import AnyArray

__all__ = ["advantage_bound", "context_shift_bound"]


def _smallest(candidates: list[Any], given: str, xp: Any) -> Any:
    if not candidates:
        raise ValueError(f"no divergence was given: pass at least one of {given}")
    smallest = candidates[0]
    for candidate in candidates[1:]:
        smallest = xp.minimum(smallest, candidate)
    return smallest


def advantage_bound(*, max_token_kl: Scalar | None = None, max_token_tv: Scalar | None = None) -> Value:
    """``‖g_t‖_∞ <= 2 min(1, ε, √(δ/2))`` for rewards in [0, 1] (TRM Lemma 3.1).

    ``g_t(c) = E_{y~π_θ}[A_t(c, y)]``, with the advantage of π_roll: what one token drawn from π_θ is worth.

    Args:
      max_token_kl: δ in nats, at least 0, ``inf`` included; None leaves its term out.
      max_token_tv: ε, at least 0; None leaves its term out.

    Returns:
      The bound, in reward units: float64, or a jax scalar when an input is a jax array.

    Raises:
      ValueError: when neither is given, or a known value is negative or NaN. A traced one gives NaN.

    >>> print(advantage_bound(max_token_kl=0.02), advantage_bound(max_token_kl=0.02, max_token_tv=0.05))
    0.2 0.1
    """
    xp = namespace(max_token_kl, max_token_tv)
    candidates = []
    if max_token_tv is not None:
        candidates.append(coupled_shift(1, capped("max_token_tv", max_token_tv, 1.0, xp), xp))
    if max_token_kl is not None:
        candidates.append(pinsker_shift(1, capped("max_token_kl", max_token_kl, 2.0, xp), xp))
    bound: Value = 2.0 * _smallest(candidates, "max_token_kl, max_token_tv", xp)
    return bound


def context_shift_bound(
    t: SupportsIndex | Int[AnyArray, "*S"],
    *,
    max_token_kl: Scalar | None = None,
    max_token_tv: Scalar | None = None,
    sequence_kl: Scalar | None = None,
    sequence_tv: Scalar | None = None,
) -> Float[AnyArray, "*S"] | float:
    """``‖d_t^θ - d_t^roll‖_TV <= min(1, (t-1)ε, √((t-1)δ/2), D_TV^seq, √(D_KL^seq/2))`` (TRM Lemma 3.2).

    Args:
      t: position, counted from 1; an integer or an integer array of any shape.
      max_token_kl: δ in nats, at least 0, ``inf`` included; None leaves its term out, like each of the others.
      max_token_tv: ε, at least 0.
      sequence_kl: D_KL^seq in nats, at least 0.
      sequence_tv: D_TV^seq, at least 0.

    Returns:
      The bound on the total variation between the contexts, shape of ``t``: float64, or jax when an input is a jax
      array.

    Raises:
      ValueError: when no divergence is given, a known value is negative or NaN, or a known position is below 1. A
        traced one gives NaN.

    >>> print(context_shift_bound(101, max_token_kl=1e-4), context_shift_bound(101, max_token_tv=1e-4))
    0.0707... 0.01
    """
    xp = namespace(t, max_token_kl, max_token_tv, sequence_kl, sequence_tv)
    if not is_traced(t) and np.min(np.asarray(t), initial=1) < 1:
        raise ValueError(f"t counts positions from 1, given {np.min(np.asarray(t))}")
    position = xp.asarray(t, dtype=float)
    steps = xp.where(position >= 1, position - 1.0, xp.nan)
    candidates = []
    if max_token_tv is not None:
        candidates.append(coupled_shift(steps, capped("max_token_tv", max_token_tv, 1.0, xp), xp))
    if max_token_kl is not None:
        candidates.append(pinsker_shift(steps, capped("max_token_kl", max_token_kl, 2.0, xp), xp))
    if sequence_tv is not None:
        candidates.append(coupled_shift(1, capped("sequence_tv", sequence_tv, 1.0, xp), xp))
    if sequence_kl is not None:
        candidates.append(pinsker_shift(1, capped("sequence_kl", sequence_kl, 2.0, xp), xp))
    smallest = _smallest(candidates, "max_token_kl, max_token_tv, sequence_kl, sequence_tv", xp)
    bound: AnyArray | float = smallest + 0.0 * steps  # the shape of t, and NaN where it is no position
    return bound
