"""Mismatch weights of a whole sequence, spread over its tokens: constants for the gradient (CIS Table 8).

Shared rules: with ``K = Π_t k_t`` over the response tokens, 0 on the whole sequence when a log-ratio is NaN or K = 0.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax.checks import bool_mask, in_range, known_name, ordered, same_shape
from trm_jax.correction._ratio_masks import geometric_mask
from trm_jax.correction._weights import exact_weights, unit_weights
from trm_jax.numerics import AnyArray, as_float32, masked_values, over_tokens, safe_exp, sequence_sum

__all__ = ["geometric_masked_weights", "sequence_masked_weights", "sequence_truncated_weights"]


def _sequence_log_ratio(
    log_ratio: AnyArray, response_mask: AnyArray, segment_ids: AnyArray | None
) -> tuple[Array, Array]:
    """``log K`` at every token, and where it may carry weight."""
    same_shape(log_ratio=log_ratio, response_mask=response_mask, segment_ids=segment_ids)
    bool_mask(response_mask=response_mask)
    values = jax.lax.stop_gradient(as_float32(log_ratio))
    total = over_tokens(sequence_sum(values, response_mask, segment_ids), values)
    usable = jnp.asarray(response_mask) & (total > -jnp.inf)  # False for NaN
    return jnp.where(usable, total, 0.0), usable


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
      ``importance_weights`` ``[B, T]`` float32; 0 at masked slots.

    Raises:
      ValueError: on a cap out of range or shapes that differ.

    >>> import numpy as np
    >>> log_ratio = jnp.log(jnp.array([[1.5, 0.5], [2.0, 2.0]]))
    >>> print(np.asarray(sequence_truncated_weights(log_ratio, jnp.ones((2, 2), bool)), float).round(4))
    [[0.75 0.75]
     [2.   2.  ]]
    """
    total, usable = _sequence_log_ratio(log_ratio, response_mask, segment_ids)
    in_range("cap", cap, low=0.0, low_open=True, high_open=True)
    return masked_values(jnp.minimum(safe_exp(total), cap), usable)


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
      ``importance_weights`` ``[B, T]`` float32; 0 at masked slots.

    Raises:
      ValueError: on a band that is not one, or shapes that differ.

    >>> import numpy as np
    >>> log_ratio = jnp.log(jnp.array([[1.5, 0.5], [2.0, 2.0]]))
    >>> print(np.asarray(sequence_masked_weights(log_ratio, jnp.ones((2, 2), bool)), float).round(4))
    [[0.75 0.75]
     [0.   0.  ]]
    """
    total, usable = _sequence_log_ratio(log_ratio, response_mask, segment_ids)
    in_range("low", low, low=0.0)
    in_range("cap", cap, high_open=True)
    ordered("low", low, "cap", cap)
    ratio = safe_exp(total)
    return masked_values(ratio, usable & (ratio >= low) & (ratio <= cap))


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

    >>> print(geometric_masked_weights(jnp.array([[0.02, -0.02], [0.1, 0.1]]), jnp.ones((2, 2), bool)))
    [[1. 1.]
     [0. 0.]]
    """
    known_name("token_weight", token_weight, ("unit", "ratio"))
    in_range("high", high, high=math.inf, high_open=True)
    keep = geometric_mask(log_ratio, response_mask, low=low, high=high, segment_ids=segment_ids)
    weigh = unit_weights if token_weight == "unit" else exact_weights
    return masked_values(weigh(log_ratio, response_mask), over_tokens(keep, log_ratio))
