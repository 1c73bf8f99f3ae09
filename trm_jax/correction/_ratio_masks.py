"""Masks on the ratio of the sampled tokens: length-neutral forms (TRM Appendix F) and baselines.

Every mask keeps when ``statistic <= threshold``, so that a NaN rejects. A sequence without response tokens violates
nothing and is kept. The result is a constant for the gradient: ``[B]``, or ``[B, T]`` with ``segment_ids``.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax.checks import in_range, ordered
from trm_jax.correction._statistics import Statistic, Totals, checked_statistic, keep_where, mean_within
from trm_jax.numerics import AnyArray, masked_values, safe_exp, tokens_after

__all__ = [
    "error_ratio_statistic",
    "geometric_mask",
    "geometric_statistic",
    "length_neutral_mask",
    "length_neutral_statistic",
    "sequence_error_ratio_mask",
    "token_outlier_mask",
]


def _ratio_error(log_ratio: Array) -> Array:
    """``|ρ - 1|`` without the cancellation near 1, finite for every ρ that is not NaN."""
    return jnp.where(log_ratio < 1.0, jnp.abs(jnp.expm1(jnp.minimum(log_ratio, 1.0))), safe_exp(log_ratio) - 1.0)


def length_neutral_statistic(
    log_ratio: Array,
    response_mask: AnyArray,
    segment_ids: AnyArray | None,
    *,
    threshold: float,
    max_token_kl: float,
    max_token_tv: float,
) -> Statistic:
    """``length_neutral_mask`` before its totals are taken."""
    horizon = jnp.maximum(tokens_after(response_mask, segment_ids), 0.0)
    by_kl = jnp.sqrt(horizon * (0.5 * max_token_kl))
    weight = jnp.minimum(1.0, jnp.minimum(horizon * max_token_tv, by_kl))
    # A NaN times a weight of 0 is NaN, and rejects; an infinite ratio is exponentiated to a finite one before.
    error = masked_values(_ratio_error(log_ratio) * weight, response_mask)

    def value(totals: Totals) -> Array:
        total, horizon = totals.sums
        keep: Array = total <= threshold * horizon
        return keep

    return Statistic(sums=(error, masked_values(weight, response_mask)), value=value)


def error_ratio_statistic(log_ratio: Array, response_mask: AnyArray, threshold: float) -> Statistic:
    """``sequence_error_ratio_mask`` before its totals are taken."""
    return mean_within(_ratio_error(log_ratio), response_mask, high=threshold)


def geometric_statistic(log_ratio: Array, response_mask: AnyArray, low: float, high: float) -> Statistic:
    """``geometric_mask`` before its totals are taken."""
    return mean_within(log_ratio, response_mask, low=math.log(low) if low > 0 else -math.inf, high=math.log(high))


def length_neutral_mask(
    log_ratio: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    threshold: float,
    max_token_kl: float,
    max_token_tv: float,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, "B *T"]:
    """``(1/Z) Σ_t |ρ_t - 1| w_t <= δ_W``, ``w_t = min(1, (T-t) ε, √((T-t) δ/2))``, ``Z = Σ w_t`` (TRM F.2, LN-TRM).

    Args:
      log_ratio: ``[B, T]`` ``policy_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool; t and T of the formula count its True slots.
      threshold: δ_W, at least 0.
      max_token_kl: δ of the horizon weight, nats, above 0.
      max_token_tv: ε of the horizon weight, above 0.
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``sequence_keep``: False where a response token holds NaN; True for an empty sequence and for one of a single
      token, whose horizon weight is 0.

    Raises:
      ValueError: on a threshold out of range or shapes that differ.
      TypeError: on a mask that is not bool.

    >>> log_ratio = jnp.log(jnp.array([[1.1, 1.1, 1.1], [1.1, 3.0, 1.1]]))
    >>> mask = jnp.ones((2, 3), bool)
    >>> print(length_neutral_mask(log_ratio, mask, threshold=0.2, max_token_kl=1e-4, max_token_tv=5e-3))
    [ True False]
    """
    values = checked_statistic("log_ratio", log_ratio, response_mask, segment_ids)
    threshold = in_range("threshold", threshold, low=0.0)
    max_token_kl = in_range("max_token_kl", max_token_kl, low=0.0, low_open=True)
    max_token_tv = in_range("max_token_tv", max_token_tv, low=0.0, low_open=True)
    statistic = length_neutral_statistic(
        values, response_mask, segment_ids, threshold=threshold, max_token_kl=max_token_kl, max_token_tv=max_token_tv
    )
    return keep_where(statistic, response_mask, segment_ids)


def sequence_error_ratio_mask(
    log_ratio: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    threshold: float,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, "B *T"]:
    """``(1/T) Σ_t |ρ_t - 1| <= δ_SER`` (TRM F.3, SER).

    Args:
      log_ratio: ``[B, T]`` ``policy_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool.
      threshold: δ_SER, at least 0.
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``sequence_keep``: False where a response token holds NaN, True for an empty sequence.

    Raises:
      ValueError: on a negative threshold or shapes that differ.
      TypeError: on a mask that is not bool.

    >>> log_ratio = jnp.log(jnp.array([[1.1, 0.9], [1.5, 1.0]]))
    >>> print(sequence_error_ratio_mask(log_ratio, jnp.ones((2, 2), bool), threshold=0.15))
    [ True False]
    """
    values = checked_statistic("log_ratio", log_ratio, response_mask, segment_ids)
    threshold = in_range("threshold", threshold, low=0.0)
    return keep_where(error_ratio_statistic(values, response_mask, threshold), response_mask, segment_ids)


def geometric_mask(
    log_ratio: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    low: float,
    high: float,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, "B *T"]:
    """``low <= (Π_t ρ_t)^(1/T) <= high``: the geometric mean of the ratio, not of its inverse.

    Args:
      log_ratio: ``[B, T]`` ``policy_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool.
      low: lower end of the band, at least 0.
      high: upper end, above ``low``.
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``sequence_keep``: False where a response token holds NaN, True for an empty sequence.

    Raises:
      ValueError: on a band that is not one, or shapes that differ.
      TypeError: on a mask that is not bool.

    >>> print(geometric_mask(jnp.log(jnp.array([[1.5], [0.65]])), jnp.ones((2, 1), bool), low=0.6, high=1.4))
    [False  True]
    """
    values = checked_statistic("log_ratio", log_ratio, response_mask, segment_ids)
    low = in_range("low", low, low=0.0)
    ordered("low", low, "high", high)
    return keep_where(geometric_statistic(values, response_mask, low, high), response_mask, segment_ids)


def token_outlier_mask(
    log_ratio: Float[AnyArray, "B T"], response_mask: Bool[AnyArray, "B T"], *, max_abs_log_ratio: float
) -> Bool[Array, "B T"]:
    """``|log ρ_t| <= τ``, token by token: a baseline that leaves the trust region violated (TRM 4.1), not a TRM.

    Args:
      log_ratio: ``[B, T]`` ``policy_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool.
      max_abs_log_ratio: τ in nats, at least 0.

    Returns:
      ``token_keep`` ``[B, T]``; False at masked slots and at NaN.

    Raises:
      ValueError: on a negative τ or shapes that differ.
      TypeError: on a mask that is not bool.

    >>> print(token_outlier_mask(jnp.array([[0.1, -2.0]]), jnp.ones((1, 2), bool), max_abs_log_ratio=1.0))
    [[ True False]]
    """
    values = checked_statistic("log_ratio", log_ratio, response_mask)
    max_abs_log_ratio = in_range("max_abs_log_ratio", max_abs_log_ratio, low=0.0)
    return jnp.asarray(response_mask) & (jnp.abs(values) <= max_abs_log_ratio)
