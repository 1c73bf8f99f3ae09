"""Mismatch weights, token by token: constants for the gradient, 0 at masked slots (CIS Table 8).

Shared rules: 0 where the log-ratio is NaN or p = 0 (never a silent 1); at q = 0 (log-ratio ``+inf``) the cap.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.checks import bool_mask, in_range, ordered, same_shape
from trm_jax.correction._log_ratio import masked_log_ratio, usable_log_ratio
from trm_jax.divergences import binary_kl
from trm_jax.numerics import AnyArray, masked_values, safe_exp

__all__ = [
    "bernoulli_kl_weights",
    "calibrated_weights",
    "exact_weights",
    "masked_weights",
    "truncated_weights",
    "unit_weights",
]


def _checked(log_ratio: AnyArray, response_mask: AnyArray) -> tuple[Array, Array]:
    same_shape(log_ratio=log_ratio, response_mask=response_mask)
    bool_mask(response_mask=response_mask)
    return usable_log_ratio(log_ratio, response_mask)


def _checked_pair(proximal_logps: AnyArray, rollout_logps: AnyArray, response_mask: AnyArray) -> tuple[Array, Array]:
    same_shape(proximal_logps=proximal_logps, rollout_logps=rollout_logps, response_mask=response_mask)
    bool_mask(response_mask=response_mask)
    return usable_log_ratio(masked_log_ratio(proximal_logps, rollout_logps, response_mask), response_mask)


def unit_weights(log_ratio: Float[AnyArray, "B T"], response_mask: Bool[AnyArray, "B T"]) -> Float[Array, "B T"]:
    """1 on every response token: no correction.

    Args:
      log_ratio: ``[B, T]`` ``proximal_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool.

    Returns:
      ``importance_weights`` ``[B, T]`` float32; 0 at masked slots, at NaN and where p = 0.

    Raises:
      ValueError: on shapes that differ.

    >>> print(unit_weights(jnp.array([[3.0, 0.0]]), jnp.array([[True, False]])))
    [[1. 0.]]
    """
    _, usable = _checked(log_ratio, response_mask)
    return usable.astype(jnp.float32)


def exact_weights(
    log_ratio: Float[AnyArray, "B T"], response_mask: Bool[AnyArray, "B T"], *, low: float = 1e-6, high: float = 1e6
) -> Float[Array, "B T"]:
    """``clamp(k_t, low, high)``: the unbiased weight, with limits against overflow only (CIS Table 8).

    Args:
      log_ratio: ``[B, T]`` ``proximal_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool.
      low: smallest weight of a token with p > 0, at least 0.
      high: largest weight, above ``low``, finite.

    Returns:
      ``importance_weights`` ``[B, T]`` float32; 0 at masked slots, at NaN and where p = 0.

    Raises:
      ValueError: on limits that are not a band, or shapes that differ.

    >>> import numpy as np
    >>> print(np.asarray(exact_weights(jnp.log(jnp.array([[3.0, 0.5]])), jnp.ones((1, 2), bool)), float).round(4))
    [[3.  0.5]]
    """
    values, usable = _checked(log_ratio, response_mask)
    in_range("low", low, low=0.0)
    in_range("high", high, low=low, low_open=True, high_open=True)
    return masked_values(jnp.clip(safe_exp(values), low, high), usable)


def truncated_weights(
    log_ratio: Float[AnyArray, "B T"], response_mask: Bool[AnyArray, "B T"], *, cap: float = 2.0
) -> Float[Array, "B T"]:
    """``min(k_t, C)``: truncated importance sampling (TIS).

    Args:
      log_ratio: ``[B, T]`` ``proximal_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool.
      cap: C, above 0, finite.

    Returns:
      ``importance_weights`` ``[B, T]`` float32; 0 at masked slots, at NaN and where p = 0; the cap where q = 0.

    Raises:
      ValueError: on a cap out of range or shapes that differ.

    >>> print(truncated_weights(jnp.log(jnp.array([[3.0, 0.5]])), jnp.ones((1, 2), bool)))
    [[2.  0.5]]
    """
    values, usable = _checked(log_ratio, response_mask)
    in_range("cap", cap, low=0.0, low_open=True, high_open=True)
    return masked_values(jnp.minimum(safe_exp(values), cap), usable)


def masked_weights(
    log_ratio: Float[AnyArray, "B T"], response_mask: Bool[AnyArray, "B T"], *, low: float = 0.5, high: float = 5.0
) -> Float[Array, "B T"]:
    """``k_t · 1{low <= k_t <= high}``: token masking of the ratio (IcePop).

    Args:
      log_ratio: ``[B, T]`` ``proximal_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool.
      low: lower end of the band of the ratio, at least 0.
      high: upper end, above ``low``, finite.

    Returns:
      ``importance_weights`` ``[B, T]`` float32; 0 outside the band, at masked slots, at NaN, where p = 0 or q = 0.

    Raises:
      ValueError: on a band that is not one, or shapes that differ.

    >>> import numpy as np
    >>> print(np.asarray(masked_weights(jnp.log(jnp.array([[1.5, 6.0]])), jnp.ones((1, 2), bool)), float).round(4))
    [[1.5 0. ]]
    """
    values, usable = _checked(log_ratio, response_mask)
    in_range("low", low, low=0.0)
    in_range("high", high, high_open=True)
    ordered("low", low, "high", high)
    ratio = safe_exp(values)
    return masked_values(ratio, usable & (ratio >= low) & (ratio <= high))


def bernoulli_kl_weights(
    proximal_logps: Float[AnyArray, "B T"],
    rollout_logps: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    threshold: float = 2.0,
) -> Float[Array, "B T"]:
    """``k_t · 1{max(KL_B(p‖q), KL_B(q‖p)) <= φ}``: token masking by the Bernoulli divergence (KPop).

    Args:
      proximal_logps: ``[B, T]`` log p.
      rollout_logps: ``[B, T]`` log q.
      response_mask: ``[B, T]`` bool.
      threshold: φ in nats, above 0, finite.

    Returns:
      ``importance_weights`` ``[B, T]`` float32; 0 at masked slots, at NaN, where p = 0 or q = 0.

    Raises:
      ValueError: on a threshold out of range or shapes that differ.

    >>> import numpy as np
    >>> p, q = jnp.log(jnp.array([[0.6, 0.9]])), jnp.log(jnp.array([[0.5, 0.01]]))
    >>> print(np.asarray(bernoulli_kl_weights(p, q, jnp.ones((1, 2), bool)), float).round(4))
    [[1.2 0. ]]
    """
    values, usable = _checked_pair(proximal_logps, rollout_logps, response_mask)
    in_range("threshold", threshold, low=0.0, low_open=True, high_open=True)
    logp, logq = masked_values(proximal_logps, usable, -1.0), masked_values(rollout_logps, usable, -1.0)
    divergence = jnp.maximum(binary_kl(logp, logq), binary_kl(logq, logp))
    return masked_values(safe_exp(values), usable & (divergence <= threshold))


def calibrated_weights(
    proximal_logps: Float[AnyArray, "B T"],
    rollout_logps: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    cis_lambda: float = 2.3,
    cis_kappa: float = 5e-3,
    two_sided: bool = False,
) -> Float[Array, "B T"]:
    """``min(k_t, 1 + λ φ_t)``, ``φ_t = max(1 - p_t, κ)``: calibrated importance sampling (CIS).

    The cap follows from ``k = p + (1 - p) e^ε`` with the log-odds displacement bounded by ``e^ε <= 1 + λ``.

    Args:
      proximal_logps: ``[B, T]`` log p, float32 or bfloat16 (widened before ``1 - p`` is taken).
      rollout_logps: ``[B, T]`` log q.
      response_mask: ``[B, T]`` bool.
      cis_lambda: λ, at least 0, finite; 0 gives ``min(k, 1)``.
      cis_kappa: κ, the floor of the uncertainty, in [0, 1].
      two_sided: also raise the weight to at least ``(1 + p) / 2`` (an ablation of CIS, which found it to hurt).

    Returns:
      ``importance_weights`` ``[B, T]`` float32; 0 at masked slots, at NaN and where p = 0; the cap where q = 0.

    Raises:
      ValueError: on a parameter out of range or shapes that differ.

    >>> import numpy as np
    >>> p, q = jnp.log(jnp.array([[0.9, 0.9]])), jnp.log(jnp.array([[0.9, 0.3]]))
    >>> print(np.asarray(calibrated_weights(p, q, jnp.ones((1, 2), bool)), float).round(4))
    [[1.   1.23]]
    """
    values, usable = _checked_pair(proximal_logps, rollout_logps, response_mask)
    in_range("cis_lambda", cis_lambda, low=0.0, high_open=True)
    in_range("cis_kappa", cis_kappa, low=0.0, high=1.0)
    logp = jnp.minimum(masked_values(proximal_logps, usable, -1.0), 0.0)
    cap = 1.0 + cis_lambda * jnp.maximum(-jnp.expm1(logp), cis_kappa)
    weights = jnp.minimum(safe_exp(values), cap)
    if two_sided:
        weights = jnp.maximum(weights, 1.0 + 0.5 * jnp.expm1(logp))
    return masked_values(weights, usable)
