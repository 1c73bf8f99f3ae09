"""The readable specification: full logits, automatic differentiation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._common import head_logits, in_support, restrict
from trm_jax.ops.linear_logps._types import LinearLogps

__all__ = ["linear_logps_reference"]


def linear_logps_reference(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, " N"],
    support: UInt8[Array, "N V8"] | None,
    temperature: float,
) -> LinearLogps:
    """Holds ``[N, V]`` logits; for tests and small vocabularies."""
    raw = head_logits(hidden, head, temperature)
    z = restrict(raw, support)
    alive = jnp.any(z > -jnp.inf, axis=-1, keepdims=True)
    lse = jax.nn.logsumexp(jnp.where(alive, z, 0.0), axis=-1)
    log_p = jnp.where(z > -jnp.inf, z - lse[:, None], 0.0)
    entropy = -jnp.sum(jnp.where(z > -jnp.inf, jnp.exp(log_p) * log_p, 0.0), axis=-1)
    legal = alive[:, 0] if support is None else in_support(support, tokens)
    logps = jnp.take_along_axis(raw, tokens[:, None].astype(jnp.int32), axis=-1)[:, 0] - lse
    return LinearLogps(
        logps=jnp.where(legal, logps, -jnp.inf),
        logsumexp=jnp.where(alive[:, 0], lse, -jnp.inf),
        entropy=jnp.where(alive[:, 0], entropy, 0.0),
    )
