"""The pieces of a block: normalisation, rotary positions, attention, gated feed-forward, mixture of experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax.models._config import ComputeConfig, TransformerConfig
from trm_jax.models._quantize import QuantizedArray, dequantize
from trm_jax.models._rowwise import map_tiles

__all__ = ["apply_rope", "attend", "dense", "feed_forward", "mixture", "rms_norm"]


def dense(x: Array, weight: Array | QuantizedArray, compute: ComputeConfig) -> Array:
    """``x @ weight`` accumulated in float32, in the compute dtype; ``x`` ``[..., in]``, ``weight`` ``[in, out]``."""
    w = dequantize(weight, compute.jnp_dtype)
    y = jnp.matmul(x.astype(compute.jnp_dtype), w, precision=compute.precision, preferred_element_type=jnp.float32)
    return y.astype(compute.jnp_dtype)


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """``x / sqrt(mean(x²) + eps) · scale`` over the last axis, in float32, returned in the type of ``x``."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps) * scale.astype(jnp.float32)).astype(x.dtype)


def apply_rope(x: Float[Array, "... H h"], positions: Int[Array, ...], theta: float) -> Array:
    """Rotary positions in the "rotate half" convention: coordinates ``i`` and ``i + h/2`` turn together."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _attend_one(query: Array, key: Array, value: Array, allowed: Array, *, compute: ComputeConfig) -> Array:
    """One row: query ``[Q, H, h]``, key and value ``[S, K, h]``, allowed ``[Q, S]``; returns ``[Q, H, h]``."""
    n_query, n_heads, width = query.shape
    n_kv = key.shape[1]
    grouped = query.reshape(n_query, n_kv, n_heads // n_kv, width)
    scores = jnp.einsum(
        "qkgh,skh->kgqs", grouped, key, precision=compute.precision, preferred_element_type=jnp.float32
    ) * (width**-0.5)
    scores = jnp.where(allowed[None, None], scores, -jnp.inf)
    # A row with nothing allowed (padding of a packed row) must give finite garbage, never NaN.
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1.0)).astype(value.dtype)
    out = jnp.einsum("kgqs,skh->qkgh", weights, value, precision=compute.precision, preferred_element_type=jnp.float32)
    return out.reshape(n_query, n_heads, width).astype(compute.jnp_dtype)


def attend(
    query: Float[Array, "B Q H h"],
    key: Float[Array, "B S K h"],
    value: Float[Array, "B S K h"],
    allowed: Bool[Array, "B Q S"],
    compute: ComputeConfig,
) -> Float[Array, "B Q H h"]:
    """Softmax attention of every query over the allowed keys; on fixed tiles of queries when ``batch_invariant``."""

    def one(q: Array, k: Array, v: Array, ok: Array) -> Array:
        return _attend_one(q, k, v, ok, compute=compute)

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
    return out.reshape(batch, tiles * size, n_heads, width)[:, :count]


def feed_forward(x: Array, block: dict[str, Any], compute: ComputeConfig) -> Array:
    """SwiGLU: ``(silu(x W_gate) · (x W_up)) W_down``."""
    gate = dense(x, block["gate"], compute)
    hidden = jax.nn.silu(gate.astype(jnp.float32)).astype(gate.dtype) * dense(x, block["up"], compute)
    return dense(hidden, block["down"], compute)


def mixture(
    x: Float[Array, "N D"],
    jitter: Float[Array, "N E"] | None,
    block: dict[str, Any],
    config: TransformerConfig,
    compute: ComputeConfig,
) -> tuple[Float[Array, "N D"], Int[Array, "N k"]]:
    """Dropless top-k mixture of SwiGLU experts; every expert runs on every token and the unchosen weigh 0.

    Router probabilities are a float32 softmax over the chosen logits. Returns the output and the chosen expert ids.
    """
    logits = jnp.matmul(
        x.astype(jnp.float32),
        dequantize(block["router"], jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    if jitter is not None:
        logits = logits + jitter
    chosen_logits, chosen = jax.lax.top_k(logits, config.experts_per_token)
    probability = jax.nn.softmax(chosen_logits, axis=-1)
    share = jnp.sum(jax.nn.one_hot(chosen, config.n_experts, dtype=jnp.float32) * probability[..., None], axis=-2)

    # One matmul over all experts' columns, not one an expert: the same sums, and a shape that every backend likes.
    gate, up = (_all_experts(x, block[name], compute) for name in ("gate", "up"))
    hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32) * share[..., None]
    down = dequantize(block["down"], compute.jnp_dtype)
    mixed = dense(hidden.reshape(x.shape[0], -1), down.reshape(-1, down.shape[-1]), compute)
    return mixed, chosen


def _all_experts(
    x: Float[Array, "N D"], weight: Array | QuantizedArray, compute: ComputeConfig
) -> Float[Array, "N E F"]:
    """``x @ weight[e]`` for every expert ``e``; ``weight`` ``[E, D, F]``."""
    full = dequantize(weight, compute.jnp_dtype)
    n_experts, width, ff = full.shape
    return dense(x, full.swapaxes(0, 1).reshape(width, n_experts * ff), compute).reshape(-1, n_experts, ff)
