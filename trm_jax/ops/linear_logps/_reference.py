"""The readable specification: full logits, automatic differentiation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._head import Head, Scaling, head_logits
from trm_jax.ops._remat import as_one_step
from trm_jax.ops._support import unpack_support
from trm_jax.ops.linear_logps._types import LinearLogps

__all__ = ["linear_logps_reference"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def linear_logps_reference(
    hidden: Float[Array, "N D"],
    head: Head,
    tokens: Int[Array, " N"],
    support: UInt8[Array, "N V8"] | None,
    scaling: Scaling,
) -> LinearLogps:
    """Holds ``[N, V]`` logits; for tests and small vocabularies.

    A row without a cotangent takes no part in the gradients, so that NaN in one that nobody asked for stays out.
    """
    return _logps(hidden, head, tokens, support, scaling)


_Residuals = tuple[Array, Head, Array, Array | None]


def _forward(
    hidden: Array, head: Head, tokens: Array, support: Array | None, scaling: Scaling
) -> tuple[LinearLogps, _Residuals]:
    out: LinearLogps = as_one_step(functools.partial(_logps, scaling=scaling), hidden, head, tokens, support)
    return out, (hidden, head, tokens, support)


def _backward(scaling: Scaling, residuals: _Residuals, cotangents: LinearLogps) -> tuple[Array, Head, None, None]:
    hidden, head, tokens, support = residuals
    active = functools.reduce(jnp.logical_or, (g != 0 for g in cotangents))
    clean = jnp.where(active[:, None], hidden, 0)
    _, pull = jax.vjp(lambda h, w: _logps(h, w, tokens, support, scaling), clean, head)
    return *pull(cotangents), None, None


linear_logps_reference.defvjp(_forward, _backward)


def _logps(hidden: Array, head: Head, tokens: Array, support: Array | None, scaling: Scaling) -> LinearLogps:
    raw = head_logits(hidden, head, scaling.soft_cap) / scaling.temperature
    z = raw if support is None else jnp.where(unpack_support(support, raw.shape[1]), raw, -jnp.inf)
    possible = z != -jnp.inf
    alive = jnp.any(possible, axis=-1, keepdims=True)
    lse = jax.nn.logsumexp(jnp.where(alive, z, 0.0), axis=-1)
    log_p = jnp.where(possible, z - lse[:, None], 0.0)
    entropy = -jnp.sum(jnp.where(possible, jnp.exp(log_p) * log_p, 0.0), axis=-1)
    at_token = tokens[:, None].astype(jnp.int32)
    legal = jnp.take_along_axis(possible, at_token, axis=-1)[:, 0]
    logps = jnp.take_along_axis(jnp.where(possible, raw, 0.0), at_token, axis=-1)[:, 0] - lse
    return LinearLogps(
        logps=jnp.where(legal, logps, -jnp.inf),
        logsumexp=jnp.where(alive[:, 0], lse, -jnp.inf),
        entropy=jnp.where(alive[:, 0], entropy, 0.0),
    )
