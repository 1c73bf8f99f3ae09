"""What ``linear_logps`` returns, and what its backward pass needs of it."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

__all__ = ["LinearLogps", "LogpsSlopes", "logps_slopes"]


class LinearLogps(NamedTuple):
    """Log-probs of given tokens under a linear head, float32.

    Attributes:
      logps: ``[N]`` log-prob of each token; ``-inf`` outside the support.
      logsumexp: ``[N]`` normaliser of the scaled logits.
      entropy: ``[N]`` nats.
    """

    logps: Float[Array, " N"]
    logsumexp: Float[Array, " N"]
    entropy: Float[Array, " N"]


class LogpsSlopes(NamedTuple):
    """A token's part in the gradient of its logits ``z_v``: with ``c_v = z_v - logsumexp``,

    ``dz_v = exp(c_v) (all + entropy · c_v) + 1[v = y] token``.

    Attributes:
      logsumexp: ``[N]`` of the whole vocabulary; 0 in rows that take no part.
      token: ``[N]``.
      all: ``[N]``.
      entropy: ``[N]``.
      active: ``[N]`` rows that take part: some cotangent is not 0.
    """

    logsumexp: Float[Array, " N"]
    token: Float[Array, " N"]
    all: Float[Array, " N"]
    entropy: Float[Array, " N"]
    active: Bool[Array, " N"]


def logps_slopes(out: LinearLogps, cotangents: LinearLogps) -> LogpsSlopes:
    """From the results and their cotangents.

    ``dz_v = g_logp (1[v = y] - p_v) + g_lse p_v - g_H p_v (c_v + H)``. An impossible token has no gradient, neither has
    a row without any token.
    """
    g_logp = jnp.where(jnp.isneginf(out.logps), 0.0, cotangents.logps)
    alive = ~jnp.isneginf(out.logsumexp)
    g_lse, g_entropy = (jnp.where(alive, g, 0.0) for g in (cotangents.logsumexp, cotangents.entropy))
    active = (g_logp != 0) | (g_lse != 0) | (g_entropy != 0)
    logsumexp, entropy = (jnp.where(active, x, 0.0) for x in (out.logsumexp, out.entropy))
    return LogpsSlopes(logsumexp, g_logp, g_lse - g_logp - g_entropy * entropy, -g_entropy, active)
