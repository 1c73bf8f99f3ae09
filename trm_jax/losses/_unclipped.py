"""Surrogates that bound the update by a mask or by the weight instead of clipping the ratio."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Real

from trm_jax.checks import in_range, same_shape
from trm_jax.losses._token_terms import Aggregation, Denominator, active_mean, aggregate, clip_band, prepare
from trm_jax.numerics import AnyArray, as_float32
from trm_jax.types import LossTotal

__all__ = ["cispo", "dppo", "masked_surrogate"]


def masked_surrogate(
    policy_logps: Float[AnyArray, "B T"],
    rollout_logps: Float[AnyArray, "B T"],
    advantages: Real[AnyArray, "..."],
    response_mask: Bool[AnyArray, "B T"],
    sequence_keep: Bool[AnyArray, "B *T"],
    *,
    importance_weights: Float[AnyArray, "B T"] | None = None,
    token_keep: Bool[AnyArray, "B T"] | None = None,
    aggregation: Aggregation = "constant_length",
    denominator: Denominator = "original",
    constant_length: int | None = 1,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> LossTotal:
    """``-E_roll[M A Σ_t ρ_t]``, ``ρ = π_θ/π_roll``: the masked surrogate (TRM 4.2).

    The expectation divides by the number of all sampled sequences, rejected ones included: ``constant_length`` with
    length 1 over the original sequences. A row without response tokens is not a sample.

    Args:
      policy_logps: ``[B, T]`` log π_θ of the sampled tokens; carries the gradient.
      rollout_logps: ``[B, T]`` log π_roll.
      advantages: ``[B]`` or ``[B, T]``.
      response_mask: ``[B, T]`` bool.
      sequence_keep: M, ``[B]``, or ``[B, T]`` for packed rows.
      importance_weights: ``[B, T]`` further constants on the tokens; 1 when None.
      token_keep: ``[B, T]``.
      aggregation: as in ``clipped_surrogate``.
      denominator: as in ``clipped_surrogate``.
      constant_length: as in ``clipped_surrogate``; 1 gives the sum over tokens.
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``LossTotal``, as ``clipped_surrogate``.

    Raises:
      ValueError: on shapes that differ or a name that is not legal.
      TypeError: on a mask that is not bool.

    >>> zeros = jnp.zeros((2, 3))
    >>> loss = masked_surrogate(zeros, zeros, jnp.ones(2), jnp.ones((2, 3), bool), jnp.array([True, False]))
    >>> print(loss.total, loss.denominator)
    -3.0 2.0
    """
    terms = prepare(
        policy_logps,
        rollout_logps,
        advantages,
        response_mask,
        importance_weights,
        sequence_keep,
        token_keep,
        segment_ids,
    )
    loss = -terms.weights * terms.advantages * jnp.exp(terms.log_ratio)
    return aggregate(loss, terms, aggregation, denominator, constant_length)


def cispo(
    policy_logps: Float[AnyArray, "B T"],
    proximal_logps: Float[AnyArray, "B T"],
    advantages: Real[AnyArray, "..."],
    response_mask: Bool[AnyArray, "B T"],
    *,
    importance_weights: Float[AnyArray, "B T"] | None = None,
    sequence_keep: Bool[AnyArray, "B *T"] | None = None,
    token_keep: Bool[AnyArray, "B T"] | None = None,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
    aggregation: Aggregation = "token_mean",
    denominator: Denominator = "original",
    constant_length: int | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> LossTotal:
    """``-w_t stop_gradient(clip(r_t, 1-ε_low, 1+ε_high)) A log π_θ`` (CISPO, arXiv 2506.13585).

    Every kept token keeps its gradient; only the size of its ratio is clipped.

    Args:
      policy_logps: ``[B, T]`` log π_θ of the sampled tokens; carries the gradient.
      proximal_logps: ``[B, T]`` log π_train.
      advantages: ``[B]`` or ``[B, T]``.
      response_mask: ``[B, T]`` bool.
      importance_weights: ``[B, T]`` w; 1 when None.
      sequence_keep: ``[B]``, or ``[B, T]`` for packed rows.
      token_keep: ``[B, T]``.
      clip_low: ε_low, in [0, 1]; 1, the default, is no lower bound, as in the paper.
      clip_high: ε_high, at least 0.
      aggregation: as in ``clipped_surrogate``.
      denominator: as in ``clipped_surrogate``.
      constant_length: as in ``clipped_surrogate``.
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``LossTotal``, as ``clipped_surrogate``. A token with π_θ = 0 contributes 0.

    Raises:
      ValueError: on shapes that differ, a range or name that is not legal.
      TypeError: on a mask that is not bool.

    >>> import numpy as np
    >>> loss = cispo(jnp.array([[-1.0]]), jnp.array([[-2.0]]), jnp.array([1.0]), jnp.ones((1, 1), bool))
    >>> print(np.asarray(loss.value, float).round(4))
    1.28
    """
    terms = prepare(
        policy_logps,
        proximal_logps,
        advantages,
        response_mask,
        importance_weights,
        sequence_keep,
        token_keep,
        segment_ids,
    )
    low, high = clip_band(clip_low, clip_high)
    ratio = jnp.exp(jax.lax.stop_gradient(terms.log_ratio))
    possible = terms.policy_logps > -jnp.inf
    possible = possible | jnp.isnan(terms.policy_logps)
    scale = jnp.where(possible, terms.weights * terms.advantages * jnp.clip(ratio, low, high), 0.0)
    loss = -scale * jnp.where(possible, terms.policy_logps, 0.0)
    aux = {"clip/fraction": active_mean((ratio < low) | (ratio > high), terms)}
    return aggregate(loss, terms, aggregation, denominator, constant_length, aux)


def dppo(
    policy_logps: Float[AnyArray, "B T"],
    proximal_logps: Float[AnyArray, "B T"],
    advantages: Real[AnyArray, "..."],
    response_mask: Bool[AnyArray, "B T"],
    *,
    threshold: float = 0.15,
    token_divergence: Float[AnyArray, "B T"] | None = None,
    importance_weights: Float[AnyArray, "B T"] | None = None,
    sequence_keep: Bool[AnyArray, "B *T"] | None = None,
    token_keep: Bool[AnyArray, "B T"] | None = None,
    aggregation: Aggregation = "token_mean",
    denominator: Denominator = "original",
    constant_length: int | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> LossTotal:
    """``-w_t M_t A r_t``; ``M_t = 0`` where the divergence exceeds its threshold and the update would move further away
    (``A > 0`` with ``r > 1``, or ``A < 0`` with ``r < 1``) (DPPO).

    Args:
      policy_logps: ``[B, T]`` log π_θ of the sampled tokens; carries the gradient.
      proximal_logps: ``[B, T]`` log-probs of the policy that anchors the trust region (``rollout_logps`` to anchor it
        at the sampler).
      advantages: ``[B]`` or ``[B, T]``.
      response_mask: ``[B, T]`` bool.
      threshold: largest divergence, at least 0, in the unit of the divergence.
      token_divergence: ``[B, T]`` a direct estimate (binary KL, top-K, full vocabulary; see ``divergences``); None
        takes the binary total variation ``|p - q|`` of the sampled token.
      importance_weights: ``[B, T]`` w; 1 when None.
      sequence_keep: ``[B]``, or ``[B, T]`` for packed rows.
      token_keep: ``[B, T]``.
      aggregation: as in ``clipped_surrogate``.
      denominator: as in ``clipped_surrogate``; the DPPO mask does not change it.
      constant_length: as in ``clipped_surrogate``.
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``LossTotal``, as ``clipped_surrogate``; ``clip/fraction`` counts the masked tokens. A NaN divergence masks.

    Raises:
      ValueError: on shapes that differ, a range or name that is not legal.
      TypeError: on a mask that is not bool.

    >>> import numpy as np
    >>> logp, logq = jnp.log(jnp.array([[0.9, 0.6]])), jnp.log(jnp.array([[0.5, 0.5]]))
    >>> loss = dppo(logp, logq, jnp.array([1.0]), jnp.ones((1, 2), bool), threshold=0.2)
    >>> print(np.asarray(loss.total, float).round(4))
    -1.2
    """
    terms = prepare(
        policy_logps,
        proximal_logps,
        advantages,
        response_mask,
        importance_weights,
        sequence_keep,
        token_keep,
        segment_ids,
    )
    threshold = in_range("threshold", threshold, low=0.0)
    if token_divergence is None:
        anchor = jnp.where(terms.active, as_float32(proximal_logps), 0.0)
        distance = jnp.abs(jnp.exp(terms.policy_logps) - jnp.exp(anchor))
    else:
        same_shape(token_divergence=token_divergence, response_mask=response_mask)
        distance = as_float32(token_divergence)
    distance = jax.lax.stop_gradient(distance)
    away = terms.advantages * terms.log_ratio > 0
    masked = away & ~(distance <= threshold)
    loss = jnp.where(masked, 0.0, -terms.weights * terms.advantages * jnp.exp(terms.log_ratio))
    aux = {"clip/fraction": active_mean(masked, terms)}
    return aggregate(loss, terms, aggregation, denominator, constant_length, aux)
