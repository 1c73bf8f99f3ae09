"""Divergences from the log-probs of the sampled token alone."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from trm_jax.checks import same_shape
from trm_jax.numerics import AnyArray, as_float32, expm1_minus_identity

__all__ = [
    "TopKDivergence",
    "binary_kl",
    "binary_tv",
    "k1",
    "k2",
    "k3",
    "log_odds_displacement",
    "ratio_from_displacement",
    "topk_divergence",
]

# Float32 log-probs near 0 come from differences of logits with this resolution: 1 - p below it is not information.
_COMPLEMENT_FLOOR = 2.0**-24


class TopKDivergence(NamedTuple):
    """Divergences after merging all tokens outside the top K into one.

    Attributes:
      kl_lower: lower bound of KL(rollout ‖ policy), nats.
      tv_lower: lower bound of the total variation.
      tv_upper: upper bound of the total variation, at most 1.
    """

    kl_lower: Float[Array, "..."]
    tv_lower: Float[Array, "..."]
    tv_upper: Float[Array, "..."]


def k1(log_ratio: Float[AnyArray, "..."]) -> Float[Array, "..."]:
    """``-log ρ``: unbiased estimator of KL(π_roll ‖ π_θ) for samples of π_roll, any sign (TRM 4.3).

    Args:
      log_ratio: ``policy_logps - rollout_logps``, any shape.

    Returns:
      float32, same shape; NaN where the input is NaN.

    >>> print(k1(jnp.array([0.5])))
    [-0.5]
    """
    return -as_float32(log_ratio)


def k2(log_ratio: Float[AnyArray, "..."]) -> Float[Array, "..."]:
    """``(log ρ)² / 2``: symmetric, for the max criterion (TRM 4.3, Schulman 2020).

    Args:
      log_ratio: ``policy_logps - rollout_logps``, any shape.

    Returns:
      float32, same shape; ``+inf`` at both infinities; NaN where the input is NaN.

    >>> print(k2(jnp.array([2.0, -2.0])))
    [2. 2.]
    """
    return 0.5 * jnp.square(as_float32(log_ratio))


def k3(log_ratio: Float[AnyArray, "..."]) -> Float[Array, "..."]:
    """``ρ - 1 - log ρ``: unbiased and non-negative, for averages (TRM 4.3, Schulman 2020).

    Args:
      log_ratio: ``policy_logps - rollout_logps``, any shape.

    Returns:
      float32, same shape, exact to float32 rounding near 0; ``+inf`` at both infinities; NaN where the input is NaN.

    >>> import numpy as np
    >>> print(np.asarray(k3(jnp.array([1.0])), float).round(4))
    [0.7183]
    """
    return expm1_minus_identity(log_ratio)


def _bregman(p: Array, q: Array, log_ratio: Array) -> Array:
    """``p (expm1(d) - d) = q - p - p d`` for ``q = p e^d``: one non-negative term of a KL divergence."""
    large = log_ratio > 1.0
    near = p * expm1_minus_identity(jnp.where(large, 0.0, log_ratio))
    safe = jnp.where(large & (p > 0), log_ratio, 0.0)
    return jnp.where(p > 0, jnp.where(large, q - p - p * safe, near), q)


def _log_complement_ratio(logp: Array, logq: Array, floor: float) -> Array:
    """``log((1 - q) / (1 - p))``, accurate when p and q are close; complements are floored."""
    rest_p = jnp.maximum(-jnp.expm1(logp), floor)
    rest_q = jnp.maximum(-jnp.expm1(logq), floor)
    difference = jnp.where(logp == logq, 0.0, logq - logp)
    shift = -jnp.exp(logp) * jnp.expm1(jnp.minimum(difference, 1.0)) / jnp.where(rest_p > 0, rest_p, 1.0)
    near = (jnp.abs(shift) < 0.5) & (rest_p > floor) & (rest_q > floor) & (difference < 1.0)
    return jnp.where(near, jnp.log1p(jnp.where(near, shift, 0.0)), jnp.log(rest_q) - jnp.log(rest_p))


def binary_kl(logp: Float[AnyArray, "*S"], logq: Float[AnyArray, "*S"]) -> Float[Array, "*S"]:
    """``p log(p/q) + (1-p) log((1-p)/(1-q))``: KL between "this token" and "another" (TRM App. E, KPop).

    A lower bound of the full-vocabulary KL(p ‖ q) by data processing. ``1 - p`` below ``2^-24`` counts as ``2^-24``, so
    the value is finite at p = q = 1 and when only one of the two is rounded to 1.

    Args:
      logp: log p, at most 0, any shape.
      logq: log q, same shape.

    Returns:
      float32, non-negative; ``+inf`` when q = 0 and p > 0; NaN where an input is NaN.

    Raises:
      ValueError: on shapes that differ.

    >>> import numpy as np
    >>> print(np.asarray(binary_kl(jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25]))), float).round(4))
    [0.1438]
    """
    same_shape(logp=logp, logq=logq)
    lp, lq = jnp.minimum(as_float32(logp), 0.0), jnp.minimum(as_float32(logq), 0.0)
    rest_p = jnp.maximum(-jnp.expm1(lp), _COMPLEMENT_FLOOR)
    rest_q = jnp.maximum(-jnp.expm1(lq), _COMPLEMENT_FLOOR)
    token = _bregman(jnp.exp(lp), jnp.exp(lq), jnp.where(lp == lq, 0.0, lq - lp))
    rest = _bregman(rest_p, rest_q, _log_complement_ratio(lp, lq, _COMPLEMENT_FLOOR))
    return jnp.where(lp == lq, 0.0, token + rest)


def binary_tv(logp: Float[AnyArray, "*S"], logq: Float[AnyArray, "*S"]) -> Float[Array, "*S"]:
    """``|p - q|``: total variation between "this token" and "another", a lower bound of the full one (TRM App. E).

    Args:
      logp: log p, at most 0, any shape.
      logq: log q, same shape.

    Returns:
      float32 in [0, 1], relatively accurate when p and q are close; NaN where an input is NaN.

    Raises:
      ValueError: on shapes that differ.

    >>> print(binary_tv(jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25]))))
    [0.25]
    """
    same_shape(logp=logp, logq=logq)
    lp, lq = jnp.minimum(as_float32(logp), 0.0), jnp.minimum(as_float32(logq), 0.0)
    larger, smaller = jnp.maximum(lp, lq), jnp.minimum(lp, lq)
    return jnp.exp(larger) * -jnp.expm1(jnp.where(lp == lq, 0.0, smaller - larger))


def log_odds_displacement(
    proximal_logps: Float[AnyArray, "*S"], rollout_logps: Float[AnyArray, "*S"]
) -> Float[Array, "*S"]:
    """``ε = logit p - logit q``, ``logit p = log p - log(1 - p)`` (CIS).

    Args:
      proximal_logps: log p, at most 0, any shape.
      rollout_logps: log q, same shape.

    Returns:
      float32; 0 where both are equal; ``+inf`` when p = 1 or q = 0, ``-inf`` when p = 0 or q = 1; NaN where an input is
      NaN.

    Raises:
      ValueError: on shapes that differ.

    >>> import numpy as np
    >>> print(np.asarray(log_odds_displacement(jnp.log(jnp.array([0.8])), jnp.log(jnp.array([0.5]))), float).round(4))
    [1.3863]
    """
    same_shape(proximal_logps=proximal_logps, rollout_logps=rollout_logps)
    lp, lq = jnp.minimum(as_float32(proximal_logps), 0.0), jnp.minimum(as_float32(rollout_logps), 0.0)
    equal = lp == lq
    safe_lp = jnp.where(equal, -1.0, lp)
    safe_lq = jnp.where(equal, -1.0, lq)
    return jnp.where(equal, 0.0, safe_lp - safe_lq + _log_complement_ratio(safe_lp, safe_lq, 0.0))


def ratio_from_displacement(
    proximal_logps: Float[AnyArray, "*S"], displacement: Float[AnyArray, "*S"]
) -> Float[Array, "*S"]:
    """``k = p + (1 - p) e^ε``: the training-inference ratio from its displacement (the CIS identity).

    Args:
      proximal_logps: log p, at most 0, any shape.
      displacement: ``ε`` of ``log_odds_displacement``, same shape.

    Returns:
      float32; NaN where p = 1 and ``ε = +inf``, which leaves k undetermined.

    Raises:
      ValueError: on shapes that differ.

    >>> import numpy as np
    >>> print(np.asarray(ratio_from_displacement(jnp.log(jnp.array([0.8])), jnp.log(jnp.array([4.0]))), float).round(4))
    [1.6]
    """
    same_shape(proximal_logps=proximal_logps, displacement=displacement)
    lp = jnp.minimum(as_float32(proximal_logps), 0.0)
    return jnp.exp(lp) - jnp.expm1(lp) * jnp.exp(as_float32(displacement))


def topk_divergence(
    policy_logps_topk: Float[AnyArray, "*S K"], rollout_logps_topk: Float[AnyArray, "*S K"]
) -> TopKDivergence:
    """Bounds of the divergences from K tokens of both policies, the rest merged: ``KL_lower <= KL(rollout ‖ policy)``
    and ``TV_lower <= TV <= TV_lower + min(rest_policy, rest_rollout)`` (data processing).

    Args:
      policy_logps_topk: log-probs of K distinct tokens under the policy, last axis K; ``-inf`` pads unused places.
      rollout_logps_topk: log-probs of the same tokens under the rollout policy.

    Returns:
      ``TopKDivergence`` of float32 arrays without the last axis; NaN where an input is NaN.

    Raises:
      ValueError: on shapes that differ.

    >>> import numpy as np
    >>> p, q = jnp.log(jnp.array([0.5, 0.25])), jnp.log(jnp.array([0.25, 0.25]))
    >>> out = topk_divergence(p, q)
    >>> print(np.asarray(out.kl_lower, float).round(4), out.tv_lower, out.tv_upper)
    0.1733 0.25 0.5
    """
    same_shape(policy_logps_topk=policy_logps_topk, rollout_logps_topk=rollout_logps_topk)
    lp, lq = jnp.minimum(as_float32(policy_logps_topk), 0.0), jnp.minimum(as_float32(rollout_logps_topk), 0.0)
    p, q = jnp.exp(lp), jnp.exp(lq)
    rest_p, rest_q = jnp.maximum(1.0 - p.sum(-1), 0.0), jnp.maximum(1.0 - q.sum(-1), 0.0)
    # The rests carry the rounding of K probabilities: below that a rest is noise and both count as equal.
    floor = lp.shape[-1] * _COMPLEMENT_FLOOR
    floored_p, floored_q = jnp.maximum(rest_p, floor), jnp.maximum(rest_q, floor)
    terms = _bregman(q, p, jnp.where(lp == lq, 0.0, lp - lq))
    kl = terms.sum(-1) + _bregman(floored_q, floored_p, jnp.log(floored_p) - jnp.log(floored_q))
    tv = 0.5 * (binary_tv(lp, lq).sum(-1) + jnp.abs(rest_p - rest_q))
    return TopKDivergence(
        kl_lower=kl, tv_lower=jnp.minimum(tv, 1.0), tv_upper=jnp.minimum(tv + jnp.minimum(rest_p, rest_q), 1.0)
    )
