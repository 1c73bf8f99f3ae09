"""Trust region masks: one decision a sequence, from the original response mask (TRM section 4, Appendix F).

Every mask keeps when ``statistic <= threshold``, so that a NaN rejects. A sequence without response tokens violates
nothing and is kept. The result is a constant for the gradient: ``[B]``, or ``[B, T]`` with ``segment_ids``.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax.checks import bool_mask, in_range, ordered, same_shape
from trm_jax.divergences import k2, k3
from trm_jax.numerics import (
    AnyArray,
    as_float32,
    safe_exp,
    sequence_count,
    sequence_max,
    sequence_mean,
    sequence_sum,
    tokens_after,
)

__all__ = [
    "geometric_mask",
    "length_neutral_mask",
    "max_kl_mask",
    "max_tv_mask",
    "mean_kl_mask",
    "sampled_mask",
    "sequence_error_ratio_mask",
    "token_outlier_mask",
]


def _checked(name: str, values: AnyArray, response_mask: AnyArray, segment_ids: AnyArray | None) -> Array:
    same_shape(**{name: values, "response_mask": response_mask, "segment_ids": segment_ids})
    bool_mask(response_mask=response_mask)
    return jax.lax.stop_gradient(as_float32(values))


def max_kl_mask(
    token_kl: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    threshold: float,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, B * T]:
    """``max_t D_KL(c_t) <= δ`` (TRM 4.1, trm_max).

    Args:
      token_kl: ``[B, T]`` full-vocabulary KL(π_roll ‖ π_θ), nats.
      response_mask: ``[B, T]`` bool.
      threshold: δ in nats, at least 0. It does not depend on the length; the chance to reject does.
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``sequence_keep``: False where a response token holds NaN, True for an empty sequence.

    Raises:
      ValueError: on shapes that differ or a negative threshold.

    >>> mask = jnp.ones((2, 2), bool)
    >>> print(max_kl_mask(jnp.array([[0.01, 0.02], [0.01, 0.2]]), mask, threshold=0.05))
    [ True False]
    """
    kl = _checked("token_kl", token_kl, response_mask, segment_ids)
    in_range("threshold", threshold, low=0.0)
    return sequence_max(kl, response_mask, segment_ids) <= threshold


def mean_kl_mask(
    token_kl: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    threshold: float,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, B * T]:
    """``(1/T) Σ_t D_KL(c_t) <= δ_avg`` (TRM 4.1, trm_avg).

    Args:
      token_kl: ``[B, T]`` full-vocabulary KL(π_roll ‖ π_θ), nats.
      response_mask: ``[B, T]`` bool; T of the formula counts its True slots.
      threshold: δ_avg in nats, at least 0.
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``sequence_keep``: False where a response token holds NaN, True for an empty sequence.

    Raises:
      ValueError: on shapes that differ or a negative threshold.

    >>> mask = jnp.ones((2, 2), bool)
    >>> print(mean_kl_mask(jnp.array([[0.01, 0.02], [0.01, 0.2]]), mask, threshold=0.05))
    [ True False]
    """
    kl = _checked("token_kl", token_kl, response_mask, segment_ids)
    in_range("threshold", threshold, low=0.0)
    return sequence_mean(kl, response_mask, segment_ids) <= threshold


def max_tv_mask(
    token_tv: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    threshold: float,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, B * T]:
    """``max_t D_TV(c_t) <= ε`` (TRM 4.1, trm_tv): certifies a small total variation directly.

    Args:
      token_tv: ``[B, T]`` full-vocabulary total variation, in [0, 1].
      response_mask: ``[B, T]`` bool.
      threshold: ε in [0, 1].
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``sequence_keep``: False where a response token holds NaN, True for an empty sequence.

    Raises:
      ValueError: on shapes that differ or a threshold outside [0, 1].

    >>> print(max_tv_mask(jnp.array([[0.01, 0.02]]), jnp.ones((1, 2), bool), threshold=0.1))
    [ True]
    """
    tv = _checked("token_tv", token_tv, response_mask, segment_ids)
    in_range("threshold", threshold, low=0.0, high=1.0)
    return sequence_max(tv, response_mask, segment_ids) <= threshold


def sampled_mask(
    log_ratio: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    max_k2: float | None = None,
    mean_k3: float | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, B * T]:
    """``max_t k2 <= δ`` and ``(1/T) Σ k3 <= δ_avg`` (TRM 4.3, trm_sample): needs sampled log-probs only.

    Args:
      log_ratio: ``[B, T]`` ``policy_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool.
      max_k2: δ, at least 0; None leaves the criterion out.
      mean_k3: δ_avg, at least 0; None leaves the criterion out.
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``sequence_keep``: False where a response token holds NaN or an infinity, True for an empty sequence.

    Raises:
      ValueError: when both thresholds are None, on a negative one, on shapes that differ.

    >>> print(sampled_mask(jnp.array([[0.1, -0.1], [0.1, 2.0]]), jnp.ones((2, 2), bool), max_k2=0.5))
    [ True False]
    """
    values = _checked("log_ratio", log_ratio, response_mask, segment_ids)
    if max_k2 is None and mean_k3 is None:
        raise ValueError("sampled_mask needs max_k2, mean_k3 or both, given neither: it would keep everything")
    in_range("max_k2", max_k2, low=0.0)
    in_range("mean_k3", mean_k3, low=0.0)
    keep = sequence_count(response_mask, segment_ids) >= 0
    if max_k2 is not None:
        keep = keep & (sequence_max(k2(values), response_mask, segment_ids) <= max_k2)
    if mean_k3 is not None:
        keep = keep & (sequence_mean(k3(values), response_mask, segment_ids) <= mean_k3)
    return keep


def length_neutral_mask(
    log_ratio: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    threshold: float,
    max_token_kl: float,
    max_token_tv: float,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, B * T]:
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

    >>> log_ratio = jnp.log(jnp.array([[1.1, 1.1, 1.1], [1.1, 3.0, 1.1]]))
    >>> mask = jnp.ones((2, 3), bool)
    >>> print(length_neutral_mask(log_ratio, mask, threshold=0.2, max_token_kl=1e-4, max_token_tv=5e-3))
    [ True False]
    """
    values = _checked("log_ratio", log_ratio, response_mask, segment_ids)
    in_range("threshold", threshold, low=0.0)
    in_range("max_token_kl", max_token_kl, low=0.0, low_open=True)
    in_range("max_token_tv", max_token_tv, low=0.0, low_open=True)
    horizon = jnp.maximum(tokens_after(response_mask, segment_ids), 0.0)
    by_kl = jnp.sqrt(horizon * (0.5 * max_token_kl))
    weight = jnp.minimum(1.0, jnp.minimum(horizon * max_token_tv, by_kl))
    # A NaN times a weight of 0 is NaN, and rejects; an infinite ratio is exponentiated to a finite one before.
    error = sequence_sum(_ratio_error(values) * weight, response_mask, segment_ids)
    return error <= threshold * sequence_sum(weight, response_mask, segment_ids)


def sequence_error_ratio_mask(
    log_ratio: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    threshold: float,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, B * T]:
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

    >>> log_ratio = jnp.log(jnp.array([[1.1, 0.9], [1.5, 1.0]]))
    >>> print(sequence_error_ratio_mask(log_ratio, jnp.ones((2, 2), bool), threshold=0.15))
    [ True False]
    """
    values = _checked("log_ratio", log_ratio, response_mask, segment_ids)
    in_range("threshold", threshold, low=0.0)
    return sequence_mean(_ratio_error(values), response_mask, segment_ids) <= threshold


def _ratio_error(log_ratio: Array) -> Array:
    """``|ρ - 1|`` without the cancellation near 1, finite for every ρ that is not NaN."""
    return jnp.where(log_ratio < 1.0, jnp.abs(jnp.expm1(jnp.minimum(log_ratio, 1.0))), safe_exp(log_ratio) - 1.0)


def geometric_mask(
    log_ratio: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    low: float,
    high: float,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, B * T]:
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

    >>> print(geometric_mask(jnp.log(jnp.array([[1.5], [0.65]])), jnp.ones((2, 1), bool), low=0.6, high=1.4))
    [False  True]
    """
    values = _checked("log_ratio", log_ratio, response_mask, segment_ids)
    in_range("low", low, low=0.0)
    ordered("low", low, "high", high)
    mean = sequence_mean(values, response_mask, segment_ids)
    log_low = math.log(low) if low > 0 else -math.inf
    inside = (mean >= log_low) & (mean <= math.log(high))
    return inside | (sequence_count(response_mask, segment_ids) == 0)


def token_outlier_mask(
    log_ratio: Float[AnyArray, "B T"], response_mask: Bool[AnyArray, "B T"], *, max_abs_log_ratio: float
) -> Bool[Array, "B T"]:
    """``|log ρ_t| <= τ``, token by token: a baseline that leaves the trust region violated (TRM 3.5), not a TRM.

    Args:
      log_ratio: ``[B, T]`` ``policy_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool.
      max_abs_log_ratio: τ in nats, at least 0.

    Returns:
      ``token_keep`` ``[B, T]``; False at masked slots and at NaN.

    Raises:
      ValueError: on a negative τ or shapes that differ.

    >>> print(token_outlier_mask(jnp.array([[0.1, -2.0]]), jnp.ones((1, 2), bool), max_abs_log_ratio=1.0))
    [[ True False]]
    """
    values = _checked("log_ratio", log_ratio, response_mask, None)
    in_range("max_abs_log_ratio", max_abs_log_ratio, low=0.0)
    return jnp.asarray(response_mask) & (jnp.abs(values) <= max_abs_log_ratio)
