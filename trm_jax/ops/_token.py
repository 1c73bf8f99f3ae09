"""Each row's own logit, from gathered rows of the head: kernels take it as an input instead of picking it out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._head import Head, finish_logits
from trm_jax.ops._partials import SoftmaxPartial, TokenGap
from trm_jax.ops._support import in_support
from trm_jax.ops._tiles import Units

__all__ = ["token_gap", "token_logits"]

_GATHERED_TOKENS = 256


def token_logits(
    hidden: Float[Array, "N D"],
    head: Head,
    tokens: Int[Array, " N"],
    support: UInt8[Array, "N V8"] | None,
    units: Units,
) -> Float[Array, " N"]:
    """Logits of one token a row in units of the kernels; ``-inf`` outside the support, anything in other shards.

    Some hundred rows of the head are gathered at a time, beside a slice of the hidden states, which are not copied.
    """
    n, ids = hidden.shape[0], jnp.clip(tokens, 0, head.weight.shape[0] - 1)
    size = min(n, _GATHERED_TOKENS)
    count = -(-n // size)

    def chunk(start: Array) -> Array:
        h, y = (jax.lax.dynamic_slice_in_dim(x, start, size) for x in (hidden, ids))
        weight, scale, bias = (None if x is None else jnp.take(x, y, axis=0) for x in head)
        product = jnp.sum(h.astype(jnp.float32) * jnp.asarray(weight).astype(jnp.float32), axis=-1)
        logits = finish_logits(product, scale, bias, None)
        if units.soft_cap is None:
            return logits
        capped = jnp.tanh(logits * (1.0 / units.soft_cap))
        return capped if bias is None else jnp.where(jnp.isneginf(bias), -jnp.inf, capped)

    # The last slice starts early enough to be whole.
    rows = jax.lax.map(chunk, jnp.minimum(jnp.arange(count) * size, n - size))
    logits = jnp.concatenate([rows[:-1].reshape(-1), rows[-1, count * size - n :]])
    return logits if support is None else jnp.where(in_support(support, ids), logits, -jnp.inf)


def token_gap(
    logit: Float[Array, " N"], part: SoftmaxPartial, tokens: Int[Array, " N"], vocabulary: int, unit: float
) -> TokenGap:
    """The token's place in the shard that holds it."""
    owned = (tokens >= 0) & (tokens < vocabulary)
    return TokenGap(jnp.where(jnp.isneginf(logit), -jnp.inf, unit * (logit - part.top)), owned)
