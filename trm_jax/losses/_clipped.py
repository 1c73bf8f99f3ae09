"""Clipped surrogates on one ratio a token or one a sequence."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from trm_jax.checks import in_range, same_shape
from trm_jax.losses._token_terms import (
    Aggregation,
    Denominator,
    TokenTerms,
    active_mean,
    aggregate,
    clip_band,
    log_ratio_to,
    prepare,
    sequence_log_ratio,
)
from trm_jax.numerics import AnyArray, expm1_minus_identity
from trm_jax.types import LossTotal

__all__ = ["clipped_surrogate", "gspo"]


def _clipped(
    ratio: Array, terms: TokenTerms, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Array, dict[str, tuple[Array, Array]]]:
    low, high = clip_band(clip_low, clip_high)
    dual_clip = in_range("dual_clip", dual_clip, low=1.0, low_open=True)
    unclipped = -terms.advantages * ratio
    clipped = -terms.advantages * jnp.clip(ratio, low, high)
    loss = jnp.maximum(unclipped, clipped)
    aux = {"clip/fraction": active_mean(clipped > unclipped, terms)}
    if dual_clip is not None:
        ceiling = -terms.advantages * dual_clip
        bound = (terms.advantages < 0) & (loss > ceiling)
        loss = jnp.where(bound, ceiling, loss)
        aux["clip/dual_fraction"] = active_mean(bound, terms)
    return terms.weights * loss, aux


def clipped_surrogate(
    policy_logps: Float[AnyArray, "B T"],
    proximal_logps: Float[AnyArray, "B T"],
    advantages: Real[AnyArray, "..."],
    response_mask: Bool[AnyArray, "B T"],
    *,
    importance_weights: Float[AnyArray, "B T"] | None = None,
    sequence_keep: Bool[AnyArray, "B *T"] | None = None,
    token_keep: Bool[AnyArray, "B T"] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    aggregation: Aggregation = "token_mean",
    denominator: Denominator = "original",
    constant_length: int | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
    reference_logps: Float[AnyArray, "B T"] | None = None,
    reference_coef: float = 0.0,
) -> LossTotal:
    """``w_t max(-A r_t, -A clip(r_t, 1-ε_low, 1+ε_high))``, ``r = π_θ/π_train`` (PPO; decoupled with w of CIS).

    The gradient flows through ``policy_logps`` only. Weights, masks and advantages are constants.

    Args:
      policy_logps: ``[B, T]`` log π_θ of the sampled tokens.
      proximal_logps: ``[B, T]`` log π_train; ``rollout_logps`` in bypass mode.
      advantages: ``[B]`` or ``[B, T]``.
      response_mask: ``[B, T]`` bool.
      importance_weights: ``[B, T]`` w; 1 when None. A token of weight 0 is not kept.
      sequence_keep: ``[B]``, or ``[B, T]`` for packed rows.
      token_keep: ``[B, T]``.
      clip_low: ε_low, in [0, 1].
      clip_high: ε_high, at least 0.
      dual_clip: c above 1: where A < 0 the loss is at most ``-A c``; None leaves that side open, as PPO does.
      aggregation: ``"token_mean"``, ``"sequence_mean"`` (of token means) or ``"constant_length"``.
      denominator: what the sum is divided by: the ``"original"`` tokens or sequences, or only the ``"kept"`` ones.
      constant_length: the length of ``"constant_length"``; the padded T when None.
      segment_ids: ``[B, T]`` for packed rows.
      reference_logps: ``[B, T]`` log-probs of a reference policy, for the penalty.
      reference_coef: β at least 0 of the penalty ``β k3(π_ref/π_θ)`` on every kept token.

    Returns:
      ``LossTotal``, float32: add totals and denominators over microbatches, then divide. With nothing kept the total is
      0, with zero gradients. Log-ratios beyond ±60 count as ±60, without gradient. A NaN at a kept token makes the
      total NaN; what stands at other slots is not looked at. ``aux`` holds clip fraction, mean and largest ratio and k3
      of the update over the kept tokens.

    Raises:
      ValueError: on shapes that differ, a range or name that is not legal, ``reference_coef`` without
        ``reference_logps``.
      TypeError: on a mask that is not bool.

    >>> import numpy as np
    >>> loss = clipped_surrogate(jnp.log(jnp.array([[0.75]])), jnp.log(jnp.array([[0.5]])), jnp.array([-1.0]),
    ...                          jnp.ones((1, 1), bool))
    >>> print(np.asarray(loss.value, float).round(4))
    1.5
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
    loss, aux = _clipped(jnp.exp(terms.log_ratio), terms, clip_low, clip_high, dual_clip)
    reference_coef = in_range("reference_coef", reference_coef, low=0.0, high_open=True)
    if (reference_coef > 0) != (reference_logps is not None):
        raise ValueError(
            f"reference_coef={reference_coef} with reference_logps {'missing' if reference_logps is None else 'given'}"
            ": a penalty needs both, no penalty neither"
        )
    if reference_logps is not None:
        same_shape(reference_logps=reference_logps, response_mask=response_mask)
        penalty = expm1_minus_identity(-log_ratio_to(reference_logps, terms.policy_logps, terms.active))
        loss = loss + reference_coef * penalty
        aux["kl/reference_k3_mean"] = active_mean(penalty, terms)
    return aggregate(loss, terms, aggregation, denominator, constant_length, aux)


def gspo(
    policy_logps: Float[AnyArray, "B T"],
    proximal_logps: Float[AnyArray, "B T"],
    advantages: Real[AnyArray, "..."],
    response_mask: Bool[AnyArray, "B T"],
    *,
    importance_weights: Float[AnyArray, "B T"] | None = None,
    sequence_keep: Bool[AnyArray, "B *T"] | None = None,
    token_keep: Bool[AnyArray, "B T"] | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    aggregation: Aggregation = "sequence_mean",
    denominator: Denominator = "original",
    constant_length: int | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> LossTotal:
    """``w max(-A s, -A clip(s, 1-ε_low, 1+ε_high))``, ``s = exp((1/T) Σ_t log r_t)`` (GSPO, arXiv 2507.18071).

    Sum and T run over the tokens that carry loss: one that a mask or a weight of 0 has dropped is in neither, since a
    single ratio that is not believed would move s for all others. GSPO itself drops no tokens.

    Args:
      policy_logps: ``[B, T]`` log π_θ of the sampled tokens.
      proximal_logps: ``[B, T]`` log π_train.
      advantages: ``[B]`` or ``[B, T]``.
      response_mask: ``[B, T]`` bool.
      importance_weights: ``[B, T]`` w; 1 when None. A token of weight 0 is not kept and stays out of s.
      sequence_keep: ``[B]``, or ``[B, T]`` for packed rows.
      token_keep: ``[B, T]``; tokens outside stay out of s.
      clip_low: ε_low, in [0, 1].
      clip_high: ε_high, at least 0.
      dual_clip: c above 1 bounds the side A < 0; None leaves it open.
      aggregation: as in ``clipped_surrogate``.
      denominator: as in ``clipped_surrogate``.
      constant_length: as in ``clipped_surrogate``.
      segment_ids: ``[B, T]`` for packed rows; s is then that of the own segment.

    Returns:
      ``LossTotal``, as ``clipped_surrogate``.

    Raises:
      ValueError: on shapes that differ, a range or name that is not legal.
      TypeError: on a mask that is not bool.

    >>> import numpy as np
    >>> loss = gspo(jnp.array([[0.2, 0.0]]) - 1, jnp.array([[0.0, 0.0]]) - 1, jnp.array([-1.0]), jnp.ones((1, 2), bool))
    >>> print(np.asarray(loss.value, float).round(4))
    1.1052
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
    loss, aux = _clipped(jnp.exp(sequence_log_ratio(terms)), terms, clip_low, clip_high, dual_clip)
    return aggregate(loss, terms, aggregation, denominator, constant_length, aux)
