"""Trust region masks on divergences: one decision a sequence, from the original response mask (TRM section 4).

Every mask keeps when ``statistic <= threshold``, so that a NaN rejects. A sequence without response tokens violates
nothing and is kept. The result is a constant for the gradient: ``[B]``, or ``[B, T]`` with ``segment_ids``.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax.checks import in_range
from trm_jax.correction._statistics import Statistic, Totals, checked_statistic, keep_where, max_at_most, mean_within
from trm_jax.divergences import k2, k3
from trm_jax.numerics import AnyArray, masked_values

__all__ = ["max_kl_mask", "max_tv_mask", "mean_kl_mask", "sampled_mask", "sampled_statistic"]


def max_kl_mask(
    token_kl: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    threshold: float,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, "B *T"]:
    """``max_t D_KL(c_t) <= δ`` (TRM 4.3, trm_max).

    Args:
      token_kl: ``[B, T]`` full-vocabulary KL(π_roll ‖ π_θ), nats.
      response_mask: ``[B, T]`` bool.
      threshold: δ in nats, at least 0. It does not depend on the length; the chance to reject does.
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``sequence_keep``: False where a response token holds NaN, True for an empty sequence.

    Raises:
      ValueError: on shapes that differ or a negative threshold.
      TypeError: on a mask that is not bool.

    >>> mask = jnp.ones((2, 2), bool)
    >>> print(max_kl_mask(jnp.array([[0.01, 0.02], [0.01, 0.2]]), mask, threshold=0.05))
    [ True False]
    """
    kl = checked_statistic("token_kl", token_kl, response_mask, segment_ids)
    threshold = in_range("threshold", threshold, low=0.0)
    return keep_where(max_at_most(kl, response_mask, threshold), response_mask, segment_ids)


def mean_kl_mask(
    token_kl: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    threshold: float,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, "B *T"]:
    """``(1/T) Σ_t D_KL(c_t) <= δ_avg`` (TRM 4.3, trm_avg).

    Args:
      token_kl: ``[B, T]`` full-vocabulary KL(π_roll ‖ π_θ), nats.
      response_mask: ``[B, T]`` bool; T of the formula counts its True slots.
      threshold: δ_avg in nats, at least 0.
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``sequence_keep``: False where a response token holds NaN, True for an empty sequence.

    Raises:
      ValueError: on shapes that differ or a negative threshold.
      TypeError: on a mask that is not bool.

    >>> mask = jnp.ones((2, 2), bool)
    >>> print(mean_kl_mask(jnp.array([[0.01, 0.02], [0.01, 0.2]]), mask, threshold=0.05))
    [ True False]
    """
    kl = checked_statistic("token_kl", token_kl, response_mask, segment_ids)
    threshold = in_range("threshold", threshold, low=0.0)
    return keep_where(mean_within(kl, response_mask, high=threshold), response_mask, segment_ids)


def max_tv_mask(
    token_tv: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    threshold: float,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, "B *T"]:
    """``max_t D_TV(c_t) <= ε`` (TRM 4.3, trm_tv): certifies a small total variation directly.

    Args:
      token_tv: ``[B, T]`` full-vocabulary total variation, in [0, 1].
      response_mask: ``[B, T]`` bool.
      threshold: ε in [0, 1].
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``sequence_keep``: False where a response token holds NaN, True for an empty sequence.

    Raises:
      ValueError: on shapes that differ or a threshold outside [0, 1].
      TypeError: on a mask that is not bool.

    >>> print(max_tv_mask(jnp.array([[0.01, 0.02]]), jnp.ones((1, 2), bool), threshold=0.1))
    [ True]
    """
    tv = checked_statistic("token_tv", token_tv, response_mask, segment_ids)
    threshold = in_range("threshold", threshold, low=0.0, high=1.0)
    return keep_where(max_at_most(tv, response_mask, threshold), response_mask, segment_ids)


def sampled_statistic(
    log_ratio: AnyArray, response_mask: AnyArray, max_k2: float | None, mean_k3: float | None
) -> Statistic:
    """``sampled_mask`` before its totals are taken."""

    def value(totals: Totals) -> Array:
        keep = totals.tokens >= 0
        if max_k2 is not None:
            keep = keep & (totals.maxima[0] <= max_k2)
        if mean_k3 is not None:
            keep = keep & (totals.mean(totals.sums[0]) <= mean_k3)
        return keep

    return Statistic(
        value=value,
        sums=(masked_values(k3(log_ratio), response_mask),),
        maxima=(masked_values(k2(log_ratio), response_mask, -jnp.inf),),
    )


def sampled_mask(
    log_ratio: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    max_k2: float | None = None,
    mean_k3: float | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, "B *T"]:
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
      TypeError: on a mask that is not bool.

    >>> print(sampled_mask(jnp.array([[0.1, -0.1], [0.1, 2.0]]), jnp.ones((2, 2), bool), max_k2=0.5))
    [ True False]
    """
    values = checked_statistic("log_ratio", log_ratio, response_mask, segment_ids)
    if max_k2 is None and mean_k3 is None:
        raise ValueError("sampled_mask needs max_k2, mean_k3 or both, given neither: it would keep everything")
    max_k2 = in_range("max_k2", max_k2, low=0.0)
    mean_k3 = in_range("mean_k3", mean_k3, low=0.0)
    return keep_where(sampled_statistic(values, response_mask, max_k2, mean_k3), response_mask, segment_ids)
