"""The log-ratio of two policies at the sampled tokens, with its rules for p = 0 and q = 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.numerics import AnyArray, as_float32

__all__ = ["log_weight", "masked_log_ratio"]


def masked_log_ratio(
    numerator_logps: Float[AnyArray, "B T"],
    denominator_logps: Float[AnyArray, "B T"],
    response_mask: Bool[AnyArray, "B T"],
) -> Float[Array, "B T"]:
    """``log p - log q`` as a float32 constant, 0 at masked slots.

    ``-inf`` when p = 0 (whatever q is), ``+inf`` when only q = 0, NaN when either is NaN. Log-probs above 0 count as 0.
    """
    logp = jnp.minimum(as_float32(numerator_logps), 0.0)
    logq = jnp.minimum(as_float32(denominator_logps), 0.0)
    undefined = jnp.isneginf(logp) & jnp.isneginf(logq)  # of 0/0: p = 0 decides
    difference = logp - jnp.where(undefined, 0.0, logq)
    return jax.lax.stop_gradient(jnp.where(jnp.asarray(response_mask), difference, 0.0))


def log_weight(log_ratio: Float[AnyArray, "B T"], response_mask: Bool[AnyArray, "B T"]) -> Float[Array, "B T"]:
    """The log-ratio as a constant, ``-inf`` where a token must weigh nothing: masked, NaN, p = 0."""
    values = jax.lax.stop_gradient(as_float32(log_ratio))
    return jnp.where(jnp.asarray(response_mask) & (values > -jnp.inf), values, -jnp.inf)
