"""Mismatch weights, token by token: constants for the gradient, 0 at masked slots (CIS Table 8).

Shared rules: 0 where the log-ratio is NaN or p = 0 (never a silent 1); at q = 0 (log-ratio ``+inf``) the cap.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.checks import bool_mask, in_range, ordered, same_shape
from trm_jax.correction._log_ratio import log_weight, masked_log_ratio
from trm_jax.numerics import AnyArray, masked_values, safe_exp

__all__ = [
    "bernoulli_kl_formula",
    "bernoulli_kl_weights",
    "calibrated_formula",
    "calibrated_weights",
    "exact_weights",
    "masked_weights",
    "truncated_weights",
    "unit_weights",
]

_COMPLEMENT_FLOOR = 2.0**-24  # as in binary_kl: 1 - p below it is not information


def _checked(log_ratio: AnyArray, response_mask: AnyArray) -> Array:
    same_shape(log_ratio=log_ratio, response_mask=response_mask)
    bool_mask(response_mask=response_mask)
    return log_weight(log_ratio, response_mask)


def _checked_pair(
    proximal_logps: AnyArray, rollout_logps: AnyArray, response_mask: AnyArray
) -> tuple[Array, Array, Array]:
    """The log-weights, and both log-probs as constants, at most 0 and -1 wherever nothing weighs."""
    same_shape(proximal_logps=proximal_logps, rollout_logps=rollout_logps, response_mask=response_mask)
    bool_mask(response_mask=response_mask)
    values = log_weight(masked_log_ratio(proximal_logps, rollout_logps, response_mask), response_mask)
    logp, logq = (
        jnp.minimum(masked_values(jax.lax.stop_gradient(x), values > -jnp.inf, -1.0), 0.0)
        for x in (proximal_logps, rollout_logps)
    )
    return values, logp, logq


def unit_weights(log_ratio: Float[AnyArray, "B T"], response_mask: Bool[AnyArray, "B T"]) -> Float[Array, "B T"]:
    """1 on every response token: no correction.

    Args:
      log_ratio: ``[B, T]`` ``proximal_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool.

    Returns:
      ``importance_weights`` ``[B, T]`` float32; 0 at masked slots, at NaN and where p = 0.

    Raises:
      ValueError: on shapes that differ.
      TypeError: on a mask that is not bool.

    >>> print(unit_weights(jnp.array([[3.0, 0.0]]), jnp.array([[True, False]])))
    [[1. 0.]]
    """
    return (_checked(log_ratio, response_mask) > -jnp.inf).astype(jnp.float32)


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
      TypeError: on a mask that is not bool.

    >>> import numpy as np
    >>> print(np.asarray(exact_weights(jnp.log(jnp.array([[3.0, 0.5]])), jnp.ones((1, 2), bool)), float).round(4))
    [[3.  0.5]]
    """
    values = _checked(log_ratio, response_mask)
    low = in_range("low", low, low=0.0)
    high = in_range("high", high, low=low, low_open=True, high_open=True)
    return masked_values(jnp.clip(safe_exp(values), low, high), values > -jnp.inf)


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
      TypeError: on a mask that is not bool.

    >>> print(truncated_weights(jnp.log(jnp.array([[3.0, 0.5]])), jnp.ones((1, 2), bool)))
    [[2.  0.5]]
    """
    values = _checked(log_ratio, response_mask)
    cap = in_range("cap", cap, low=0.0, low_open=True, high_open=True)
    return jnp.minimum(safe_exp(values), cap)


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
      TypeError: on a mask that is not bool.

    >>> import numpy as np
    >>> print(np.asarray(masked_weights(jnp.log(jnp.array([[1.5, 6.0]])), jnp.ones((1, 2), bool)), float).round(4))
    [[1.5 0. ]]
    """
    values = _checked(log_ratio, response_mask)
    low = in_range("low", low, low=0.0)
    high = in_range("high", high, high_open=True)
    ordered("low", low, "high", high)
    log_low = math.log(low) if low > 0 else -math.inf
    return masked_values(safe_exp(values), (values >= log_low) & (values <= math.log(high)))


def bernoulli_kl_formula(values: Array, logp: Array, logq: Array, threshold: float) -> Array:
    """``bernoulli_kl_weights`` of log-weights and legal log-probs.

    Both divergences are exact to about 1e-7 nats, which a threshold can live with. ``binary_kl`` keeps relative
    accuracy as well, by branches that would make passes over memory of their own here.
    """
    rest_p, rest_q = (jnp.maximum(-jnp.expm1(x), _COMPLEMENT_FLOOR) for x in (logp, logq))
    difference = jnp.where(logp == logq, 0.0, logq - logp)
    complements = jnp.log1p((rest_q - rest_p) / rest_p)
    larger = jnp.maximum(  # NaN, which drops, where exactly one of p and q is 0
        -(jnp.exp(logp) * difference + rest_p * complements), jnp.exp(logq) * difference + rest_q * complements
    )
    return masked_values(safe_exp(values), larger <= threshold)


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
      TypeError: on a mask that is not bool.

    >>> import numpy as np
    >>> p, q = jnp.log(jnp.array([[0.6, 0.9]])), jnp.log(jnp.array([[0.5, 0.01]]))
    >>> print(np.asarray(bernoulli_kl_weights(p, q, jnp.ones((1, 2), bool)), float).round(4))
    [[1.2 0. ]]
    """
    values, logp, logq = _checked_pair(proximal_logps, rollout_logps, response_mask)
    threshold = in_range("threshold", threshold, low=0.0, low_open=True, high_open=True)
    return bernoulli_kl_formula(values, logp, logq, threshold)


def calibrated_formula(values: Array, logp: Array, cis_lambda: float, cis_kappa: float, two_sided: bool) -> Array:
    """``calibrated_weights`` of log-weights and legal log-probs."""
    rest = -jnp.expm1(logp)  # 1 - p
    weights = jnp.minimum(safe_exp(values), 1.0 + cis_lambda * jnp.maximum(rest, cis_kappa))
    if two_sided:
        weights = masked_values(jnp.maximum(weights, 1.0 - 0.5 * rest), values > -jnp.inf)
    return weights


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
      TypeError: on a mask that is not bool.

    >>> import numpy as np
    >>> p, q = jnp.log(jnp.array([[0.9, 0.9]])), jnp.log(jnp.array([[0.9, 0.3]]))
    >>> print(np.asarray(calibrated_weights(p, q, jnp.ones((1, 2), bool)), float).round(4))
    [[1.   1.23]]
    """
    values, logp, _ = _checked_pair(proximal_logps, rollout_logps, response_mask)
    cis_lambda = in_range("cis_lambda", cis_lambda, low=0.0, high_open=True)
    cis_kappa = in_range("cis_kappa", cis_kappa, low=0.0, high=1.0)
    return calibrated_formula(values, logp, cis_lambda, cis_kappa, two_sided)
