"""One-sided confidence limits on a mean, valid at every sample size and for every distribution on a known range."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["upper_limits"]

_HALVINGS = 40


def _binary_kl(x: Any, mean: Any, xp: Any) -> Any:
    """``kl(x, μ)`` of two coins, 0 log 0 = 0, for μ in (0, 1)."""
    heads = xp.where(x > 0, x * xp.log(xp.where(x > 0, x, 1.0) / mean), 0.0)
    tails = xp.where(x < 1, (1 - x) * (xp.log1p(-xp.where(x < 1, x, 0.0)) - xp.log1p(-mean)), 0.0)
    return heads + tails


def _chernoff_limit(mean: Any, count: Any, error: float, xp: Any) -> Any:
    """Largest μ with ``n kl(mean, μ) <= log(1/error)``, by halving; the end that is returned is on the safe side."""

    def halve(_: Any, ends: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = ends
        middle = 0.5 * (low + high)
        inside = (middle > 0) & (middle < 1)
        kl = _binary_kl(mean, xp.where(inside, middle, 0.5), xp)
        beyond = inside & (count * kl > math.log(1 / error))
        return xp.where(beyond, low, middle), xp.where(beyond, middle, high)

    ends = mean, xp.ones_like(mean)
    if xp is jnp:
        ends = jax.lax.fori_loop(0, _HALVINGS, halve, ends)  # unrolled, it would be most of the compile time
    else:
        for step in range(_HALVINGS):
            ends = halve(step, ends)
    return ends[1]


def _bernstein_limit(mean: Any, variance: Any, count: Any, error: float, xp: Any) -> Any:
    log = math.log(2 / error)
    width = xp.sqrt(2 * variance * log / xp.maximum(count, 1)) + 7 * log / (3 * xp.maximum(count - 1, 1))
    return xp.where(count > 1, mean + width, 1.0)


def upper_limits(
    values: Any,
    counted: Any,
    *,
    low: Any,
    high: Any,
    error: float,
    xp: Any,
) -> tuple[Any, Any]:
    """Means of N variables over the counted rows, and upper limits on what they are means of.

    Of two limits the smaller is taken, each at half of ``error``, for ``x = (value - low)/(high - low)`` in [0, 1] and
    n counted rows:

    * Chernoff-Hoeffding (Hoeffding 1963, Theorem 1): the largest μ with ``n kl(x̄, μ) <= log(1/error)``. By Pinsker it
      is never above Hoeffding's ``x̄ + √(log(1/error)/2n)``; for ``x̄ = 0`` it is ``1 - error^(1/n)``.
    * Empirical Bernstein (Maurer and Pontil 2009, Theorem 11), with the sample variance V (divisor n - 1):
      ``x̄ + √(2V log(2/error)/n) + 7 log(2/error)/(3(n-1))``.

    Both theorems ask for independent rows, not for equal distributions: the limit is one on the mean of the rows'
    expectations.

    Args:
      values: ``[B, N]``; what stands in rows that are not counted is not looked at.
      counted: ``[B]`` bool.
      low: ``[N]``, least possible value.
      high: ``[N]``, greatest possible value, above ``low``.
      error: probability with which one limit may fail, in (0, 1). All N hold at once with probability 1 - N error.
      xp: ``numpy`` or ``jax.numpy``.

    Returns:
      ``[N]`` means and ``[N]`` limits, at most ``high``; 0 and ``high`` when no row is counted.
    """
    count = xp.sum(counted)
    scaled = xp.clip(xp.where(counted[:, None], (values - low) / (high - low), 0.0), 0.0, 1.0)
    mean = xp.sum(scaled, axis=0) / xp.maximum(count, 1)
    squares = xp.where(counted[:, None], (scaled - mean) ** 2, 0.0)
    variance = xp.sum(squares, axis=0) / xp.maximum(count - 1, 1)
    limit = xp.minimum(
        _chernoff_limit(mean, count, error / 2, xp), _bernstein_limit(mean, variance, count, error / 2, xp)
    )
    raw = xp.where(counted[:, None], values, 0.0)
    return xp.sum(raw, axis=0) / xp.maximum(count, 1), low + (high - low) * limit
