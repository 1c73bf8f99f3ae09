"""Worst-case bounds on ``|Error|``: an advantage factor times a context shift, summed over positions (TRM 3.2).

``Error = J(π_θ) - J(π_roll) - L'(π_θ)`` with ``L'(π_θ) = E_roll[R Σ_t (ρ_t - 1)]`` and rewards in [0, 1]. δ and ε are
maxima over every position and every *reachable* context. A maximum over sampled contexts is a lower estimate of them,
and what these functions make of it is an estimate of the bound, not a bound.
"""

from __future__ import annotations

from typing import SupportsIndex

from trm_jax.bounds._arrays import (
    Scalar,
    Value,
    capped,
    checked_length,
    coupled_shift,
    namespace,
    nonnegative,
    pinsker_shift,
)

__all__ = [
    "classical_bound",
    "coupling_bound",
    "mixed_bound_kl",
    "mixed_bound_tv",
    "pinsker_marginal_bound_kl",
    "pinsker_marginal_bound_tv",
]


def classical_bound(length: SupportsIndex, *, max_token_tv: Scalar) -> Value:
    """``2T(T-1)ε²``: nothing is capped, so it grows without limit (TRM 3.1, after Kakade and Langford 2002).

    Args:
      length: T, response tokens of a sequence, at least 1.
      max_token_tv: ε, at least 0.

    Returns:
      The bound, in reward units: float64, or a jax scalar when ε is a jax array. 0 at T = 1.

    Raises:
      ValueError: on a length below 1, or a known ε that is negative or NaN. A traced one gives NaN.

    >>> print(classical_bound(4096, max_token_tv=5e-3).round(3))
    838.656
    """
    steps, xp = checked_length(length), namespace(max_token_tv)
    tv = nonnegative("max_token_tv", max_token_tv, xp)
    bound: Value = 2.0 * steps * (steps - 1) * (tv if steps > 1 else xp.minimum(tv, 1.0)) ** 2  # 0 * inf is not 0
    return bound


def coupling_bound(length: SupportsIndex, *, max_token_tv: Scalar) -> Value:
    """``4 min(1, ε) Σ_{t=1..T} min(1, (t-1)ε)``: total variation alone, by coupling (TRM Theorem 3.5).

    Args:
      length: T, response tokens of a sequence, at least 1.
      max_token_tv: ε, at least 0.

    Returns:
      The bound, in reward units: float64, or a jax scalar when ε is a jax array. 0 at T = 1.

    Raises:
      ValueError: on a length below 1, or a known ε that is negative or NaN. A traced one gives NaN.

    >>> print(coupling_bound(4096, max_token_tv=5e-3).round(4))
    79.91
    """
    steps, xp = checked_length(length), namespace(max_token_tv)
    tv = capped("max_token_tv", max_token_tv, 1.0, xp)
    bound: Value = 4.0 * tv * xp.sum(coupled_shift(xp.arange(steps), tv, xp))
    return bound


def pinsker_marginal_bound_kl(length: SupportsIndex, *, max_token_kl: Scalar) -> Value:
    """``4 min(1, √(δ/2)) Σ_t min(1, √((t-1)δ/2))``: O(T^1.5) (TRM Theorem 3.3, B_PM^KL).

    Args:
      length: T, response tokens of a sequence, at least 1.
      max_token_kl: δ in nats, at least 0, ``inf`` included.

    Returns:
      The bound, in reward units: float64, or a jax scalar when δ is a jax array. 0 at T = 1.

    Raises:
      ValueError: on a length below 1, or a known δ that is negative or NaN. A traced one gives NaN.

    >>> print(pinsker_marginal_bound_kl(4096, max_token_kl=1e-4).round(4))
    34.9461
    """
    steps, xp = checked_length(length), namespace(max_token_kl)
    kl = capped("max_token_kl", max_token_kl, 2.0, xp)
    bound: Value = 4.0 * pinsker_shift(1, kl, xp) * xp.sum(pinsker_shift(xp.arange(steps), kl, xp))
    return bound


def pinsker_marginal_bound_tv(length: SupportsIndex, *, max_token_kl: Scalar, max_token_tv: Scalar) -> Value:
    """``4 min(1, ε) Σ_t min(1, √((t-1)δ/2))``: the advantage by TV, the shift by KL (TRM Theorem 3.3, B_PM^TV).

    Args:
      length: T, response tokens of a sequence, at least 1.
      max_token_kl: δ in nats, at least 0, ``inf`` included.
      max_token_tv: ε, at least 0.

    Returns:
      The bound, in reward units: float64, or a jax scalar when an input is a jax array. 0 at T = 1.

    Raises:
      ValueError: on a length below 1, or a known divergence that is negative or NaN. A traced one gives NaN.

    >>> print(pinsker_marginal_bound_tv(4096, max_token_kl=1e-4, max_token_tv=5e-3).round(4))
    24.7106
    """
    steps, xp = checked_length(length), namespace(max_token_kl, max_token_tv)
    kl = capped("max_token_kl", max_token_kl, 2.0, xp)
    tv = capped("max_token_tv", max_token_tv, 1.0, xp)
    bound: Value = 4.0 * tv * xp.sum(pinsker_shift(xp.arange(steps), kl, xp))
    return bound


def mixed_bound_kl(length: SupportsIndex, *, max_token_kl: Scalar, sequence_kl: Scalar) -> Value:
    """``4T min(1, √(δ/2)) min(1, √(D_KL^seq/2))``: O(T), good for sparse divergence (TRM Theorem 3.4, B_Mix^KL).

    Args:
      length: T, response tokens of a sequence, at least 1.
      max_token_kl: δ in nats, at least 0, ``inf`` included.
      sequence_kl: D_KL^seq in nats, at least 0, ``inf`` included.

    Returns:
      The bound, in reward units: float64, or a jax scalar when an input is a jax array.

    Raises:
      ValueError: on a length below 1, or a known divergence that is negative or NaN. A traced one gives NaN.

    >>> print(mixed_bound_kl(4096, max_token_kl=1e-4, sequence_kl=0.01).round(4))
    8.192
    """
    steps, xp = checked_length(length), namespace(max_token_kl, sequence_kl)
    token = pinsker_shift(1, capped("max_token_kl", max_token_kl, 2.0, xp), xp)
    bound: Value = 4.0 * steps * token * pinsker_shift(1, capped("sequence_kl", sequence_kl, 2.0, xp), xp)
    return bound


def mixed_bound_tv(length: SupportsIndex, *, max_token_tv: Scalar, sequence_tv: Scalar) -> Value:
    """``4T min(1, ε) min(1, D_TV^seq)`` (TRM Theorem 3.4, B_Mix^TV).

    Args:
      length: T, response tokens of a sequence, at least 1.
      max_token_tv: ε, at least 0.
      sequence_tv: D_TV^seq, at least 0.

    Returns:
      The bound, in reward units: float64, or a jax scalar when an input is a jax array.

    Raises:
      ValueError: on a length below 1, or a known divergence that is negative or NaN. A traced one gives NaN.

    >>> print(mixed_bound_tv(4096, max_token_tv=5e-3, sequence_tv=0.05).round(4))
    4.096
    """
    steps, xp = checked_length(length), namespace(max_token_tv, sequence_tv)
    token = capped("max_token_tv", max_token_tv, 1.0, xp)
    bound: Value = 4.0 * steps * token * capped("sequence_tv", sequence_tv, 1.0, xp)
    return bound
