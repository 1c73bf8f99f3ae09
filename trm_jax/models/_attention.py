"""Grouped-query attention: projections, and the softmax over allowed keys that every kind of attention ends in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax.models._compute import ComputeConfig
from trm_jax.models._config import TransformerConfig
from trm_jax.models._parts import dense, rms_norm
from trm_jax.models._rope import apply_rope
from trm_jax.models._rowwise import map_tiles

__all__ = ["attend", "grouped_projections"]


def grouped_projections(
    x: Float[Array, "N D"],
    position: Int[Array, " N"],
    block: dict[str, Any],
    config: TransformerConfig,
    compute: ComputeConfig,
) -> tuple[Float[Array, "N H h"], Float[Array, "N K h"], Float[Array, "N K h"]]:
    """Queries, keys and values of normed states ``x``; with the biases and the norms of queries and keys that exist."""

    def project(name: str, heads: int) -> Array:
        y = dense(x, block[name], compute)
        if config.qkv_bias:
            y = y + block[f"{name}_bias"].astype(y.dtype)
        return y.reshape(-1, heads, config.head_dim)

    q, k, v = project("query", config.n_heads), project("key", config.n_kv_heads), project("value", config.n_kv_heads)
    if config.qk_norm:
        q, k = (rms_norm(y, block[f"{name}_norm"], config.norm_eps) for y, name in ((q, "query"), (k, "key")))
    return apply_rope(q, position, config), apply_rope(k, position, config), v


def _attend_one(
    query: Array, key: Array, value: Array, allowed: Array, *, scale: float, compute: ComputeConfig
) -> Array:
    """One row: query ``[Q, H, h]``, key ``[S, K, h]``, value ``[S, K, v]``, allowed ``[Q, S]``; ``[Q, H, v]``."""
    n_query, n_heads, width = query.shape
    n_kv = key.shape[1]
    grouped = query.reshape(n_query, n_kv, n_heads // n_kv, width)
    scores = scale * jnp.einsum(
        "qkgh,skh->kgqs", grouped, key, precision=compute.precision, preferred_element_type=jnp.float32
    )
    scores = jnp.where(allowed[None, None], scores, -jnp.inf)
    # A row with nothing allowed (padding of a packed row) must give finite garbage, never NaN.
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1.0)).astype(value.dtype)
    out = jnp.einsum("kgqs,skv->qkgv", weights, value, precision=compute.precision, preferred_element_type=jnp.float32)
    return out.reshape(n_query, n_heads, value.shape[-1]).astype(compute.jnp_dtype)


def attend(
    query: Float[Array, "B Q H h"],
    key: Float[Array, "B S K h"],
    value: Float[Array, "B S K v"],
    allowed: Bool[Array, "B Q S"],
    compute: ComputeConfig,
    *,
    scale: float,
) -> Float[Array, "B Q H v"]:
    """Softmax attention of every query over the allowed keys; on fixed tiles of queries when ``batch_invariant``."""

    def one(q: Array, k: Array, v: Array, ok: Array) -> Array:
        return _attend_one(q, k, v, ok, scale=scale, compute=compute)

    if not compute.batch_invariant:
        return jax.vmap(one)(query, key, value, allowed)
    batch, count, n_heads, width = query.shape
    size = compute.query_tile
    tiles = -(-count // size)
    pad = tiles * size - count
    query = jnp.pad(query, [(0, 0), (0, pad), (0, 0), (0, 0)]).reshape(batch * tiles, size, n_heads, width)
    allowed = jnp.pad(allowed, [(0, 0), (0, pad), (0, 0)]).reshape(batch * tiles, size, allowed.shape[-1])
    keys, values = (jnp.repeat(x, tiles, axis=0) for x in (key, value))
    out: Array = map_tiles(one, (query, keys, values, allowed), ())
    return out.reshape(batch, tiles * size, n_heads, value.shape[-1])[:, :count]
