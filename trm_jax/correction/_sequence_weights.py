"""Mismatch weights of a whole sequence, spread over its tokens: constants for the gradient (CIS Table 8).

Shared rules: with ``K = Π_t k_t`` over the response tokens, 0 on the whole sequence when a log-ratio is NaN or K = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax.checks import in_range, known_name, ordered
from trm_jax.correction._ratio_masks import geometric_statistic
from trm_jax.correction._statistics import Statistic, Totals, checked_statistic, evaluate
from trm_jax.correction._weights import exact_weights, unit_weights
from trm_jax.numerics import AnyArray, masked_values, over_tokens, safe_exp

__all__ = [
    "GEOMETRIC_TOKEN_WEIGHTS",
    "geometric_factor",
    "geometric_masked_weights",
    "masked_product",
    "sequence_masked_weights",
    "sequence_truncated_weights",
    "truncated_product",
]

GEOMETRIC_TOKEN_WEIGHTS: Mapping[str, Callable[[Array, AnyArray], Array]] = MappingProxyType(
    {"unit": unit_weights, "ratio": exact_weights}
)
"""What a token of a kept sequence weighs under Geo-MIS."""


def truncated_product(log_ratio: Array, response_mask: AnyArray, cap: float) -> Statistic:
    """``min(K, C)`` of each sequence, 0 where K is 0 or NaN; and whether that is the cap."""

    def value(totals: Totals) -> tuple[Array, Array]:
        product = safe_exp(totals.sums[0])
        return masked_values(jnp.minimum(product, cap), product > 0), product > cap

    return Statistic(sums=(masked_values(log_ratio, response_mask),), value=value)


def masked_product(log_ratio: Array, response_mask: AnyArray, low: float, cap: float) -> Statistic:
    """``K · 1{low <= K <= C}`` of each sequence, 0 where K is 0 or NaN; never a cap."""

    def value(totals: Totals) -> tuple[Array, Array]:
        product = safe_exp(totals.sums[0])
        weight = masked_values(product, (product >= low) & (product <= cap))
        return weight, jnp.zeros_like(weight, bool)

    return Statistic(sums=(masked_values(log_ratio, response_mask),), value=value)


def geometric_factor(log_ratio: Array, response_mask: AnyArray, low: float, high: float) -> Statistic:
    """1 for the sequences whose ``K^(1/T)`` lies in the band, 0 for the others; never a cap."""
    inside = geometric_statistic(log_ratio, response_mask, low, high)

    def value(totals: Totals) -> tuple[Array, Array]:
        keep = inside.value(totals)
        return keep.astype(jnp.float32), jnp.zeros_like(keep)

    return inside._replace(value=value)


def _spread(factor: Statistic, token_weights: Array, response_mask: AnyArray, segment_ids: AnyArray | None) -> Array:
    """The weights of the tokens times the factor of their sequence."""
    weight, _ = evaluate({"factor": factor}, response_mask, segment_ids)["factor"]
    return token_weights * over_tokens(weight, token_weights)


def sequence_truncated_weights(
    log_ratio: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    cap: float = 2.0,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """``min(K, C)`` on every token (Seq-TIS).

    Args:
      log_ratio: ``[B, T]`` ``proximal_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool.
      cap: C, above 0, finite.
      segment_ids: ``[B, T]`` for packed rows; K is then the product over the own segment.

    Returns:
      ``importance_weights`` ``[B, T]`` float32; 0 at masked slots, and on all of a sequence with a NaN or with K = 0.

    Raises:
      ValueError: on a cap out of range or shapes that differ.
      TypeError: on a mask that is not bool.

    >>> import numpy as np
    >>> log_ratio = jnp.log(jnp.array([[1.5, 0.5], [2.0, 2.0]]))
    >>> print(np.asarray(sequence_truncated_weights(log_ratio, jnp.ones((2, 2), bool)), float).round(4))
    [[0.75 0.75]
     [2.   2.  ]]
    """
    values = checked_statistic("log_ratio", log_ratio, response_mask, segment_ids)
    cap = in_range("cap", cap, low=0.0, low_open=True, high_open=True)
    unit = jnp.asarray(response_mask).astype(jnp.float32)
    return _spread(truncated_product(values, response_mask, cap), unit, response_mask, segment_ids)


def sequence_masked_weights(
    log_ratio: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    cap: float = 2.0,
    low: float = 0.0,
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """``K · 1{low <= K <= C}`` on every token (Seq-MIS).

    Args:
      log_ratio: ``[B, T]`` ``proximal_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool.
      cap: C, the largest K that is kept, finite.
      low: the smallest K that is kept, at least 0, below ``cap``.
      segment_ids: ``[B, T]`` for packed rows; K is then the product over the own segment.

    Returns:
      ``importance_weights`` ``[B, T]`` float32; 0 at masked slots, and on all of a sequence with a NaN or with K = 0.

    Raises:
      ValueError: on a band that is not one, or shapes that differ.
      TypeError: on a mask that is not bool.

    >>> import numpy as np
    >>> log_ratio = jnp.log(jnp.array([[1.5, 0.5], [2.0, 2.0]]))
    >>> print(np.asarray(sequence_masked_weights(log_ratio, jnp.ones((2, 2), bool)), float).round(4))
    [[0.75 0.75]
     [0.   0.  ]]
    """
    values = checked_statistic("log_ratio", log_ratio, response_mask, segment_ids)
    low = in_range("low", low, low=0.0)
    cap = in_range("cap", cap, high_open=True)
    ordered("low", low, "cap", cap)
    unit = jnp.asarray(response_mask).astype(jnp.float32)
    return _spread(masked_product(values, response_mask, low, cap), unit, response_mask, segment_ids)


def geometric_masked_weights(
    log_ratio: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
    *,
    low: float = 0.99,
    high: float = 1.01,
    token_weight: Literal["unit", "ratio"] = "unit",
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """1 or ``k_t`` on the sequences whose ``K^(1/T)`` lies in a band, 0 on the others (Geo-MIS).

    Args:
      log_ratio: ``[B, T]`` ``proximal_logps - rollout_logps``.
      response_mask: ``[B, T]`` bool.
      low: lower end of the band, at least 0.
      high: upper end, above ``low``, finite.
      token_weight: what a kept token weighs: ``"unit"`` 1, ``"ratio"`` k_t within [1e-6, 1e6].
      segment_ids: ``[B, T]`` for packed rows.

    Returns:
      ``importance_weights`` ``[B, T]`` float32; 0 at masked slots, at NaN and where p = 0.

    Raises:
      ValueError: on a band that is not one, an unknown ``token_weight`` or shapes that differ.
      TypeError: on a mask that is not bool.

    >>> print(geometric_masked_weights(jnp.array([[0.02, -0.02], [0.1, 0.1]]), jnp.ones((2, 2), bool)))
    [[1. 1.]
     [0. 0.]]
    """
    known_name("token_weight", token_weight, ("unit", "ratio"))
    high = in_range("high", high, high=math.inf, high_open=True)
    low = in_range("low", low, low=0.0)
    ordered("low", low, "high", high)
    values = checked_statistic("log_ratio", log_ratio, response_mask, segment_ids)
    tokens = GEOMETRIC_TOKEN_WEIGHTS[token_weight](values, response_mask)
    return _spread(geometric_factor(values, response_mask, low, high), tokens, response_mask, segment_ids)
