"""Portable form that never holds ``[N, V]``: chunks of tokens forward, chunks of vocabulary backward.

Forward, a chunk of tokens meets the whole vocabulary (every logit is computed once). Backward, a chunk of the
vocabulary meets all tokens, so that each row of the head gradient is summed in float32 inside one product and written
once, in whatever dtype the head has. With ``p_v = exp(z_v - lse)`` the logit gradient is

    ``dz_v = g_logp (1[v = y] - p_v) + g_lse p_v - g_H p_v (z_v - lse + H)``.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.divergences import softmax_statistics
from trm_jax.ops._common import head_logits, in_support, map_token_chunks, product_precision, restrict, support_at
from trm_jax.ops.linear_logps._types import LinearLogps

__all__ = ["linear_logps_chunked"]


class _Static(NamedTuple):
    temperature: float
    chunk_size: int


def vocabulary_chunks(vocabulary: int, tokens: int, chunk_size: int) -> tuple[int, int]:
    """``(size, count)`` of the backward chunks: ``[tokens, size]`` logits take about the memory of ``[chunk_size, V]``.

    A count that divides the vocabulary is preferred, because padding would copy the head; among those one whose size is
    a multiple of 16, so that every chunk splits evenly over devices that share the vocabulary.

    >>> vocabulary_chunks(151_936, 4_096, 128), vocabulary_chunks(101, 64, 16)
    ((9496, 16), (32, 4))
    """
    ideal = min(max(1, math.ceil(tokens / chunk_size)), vocabulary)
    counts = [n for n in range(math.ceil(ideal / 2), min(2 * ideal, vocabulary) + 1) if vocabulary % n == 0]
    if counts:
        count = min(counts, key=lambda n: (-math.gcd(vocabulary // n, 16), abs(n - ideal)))
        return vocabulary // count, count
    size = 16 * math.ceil(vocabulary / ideal / 16)
    return size, math.ceil(vocabulary / size)


def _forward(static: _Static, hidden: Array, head: Array, tokens: Array, support: Array | None) -> LinearLogps:
    def chunk(rows: tuple[Array, Array, Array | None]) -> LinearLogps:
        h, y, bits = rows
        stats = softmax_statistics(restrict(head_logits(h, head, static.temperature), bits), y)
        return LinearLogps(logps=stats.logps, logsumexp=stats.logsumexp, entropy=stats.entropy)

    out: LinearLogps = map_token_chunks(chunk, (hidden, tokens, support), static.chunk_size)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_logps(static: _Static, hidden: Array, head: Array, tokens: Array, support: Array | None) -> LinearLogps:
    return _forward(static, hidden, head, tokens, support)


_Residuals = tuple[Array, Array, Array, Array | None, LinearLogps]


def _linear_logps_fwd(
    static: _Static, hidden: Array, head: Array, tokens: Array, support: Array | None
) -> tuple[LinearLogps, _Residuals]:
    out = _forward(static, hidden, head, tokens, support)
    return out, (hidden, head, tokens, support, out)


def _linear_logps_bwd(
    static: _Static, residuals: _Residuals, cotangents: LinearLogps
) -> tuple[Array, Array, None, None]:
    hidden, head, tokens, support, out = residuals
    vocabulary, width = head.shape
    size, count = vocabulary_chunks(vocabulary, hidden.shape[0], static.chunk_size)
    pad = size * count - vocabulary
    padded = jnp.pad(head, ((0, pad), (0, 0))) if pad else head
    split_head = padded.reshape(size, count, width)  # chunk j holds the rows j, j + count, …, as in map_token_chunks
    precision = product_precision(hidden, head)

    alive = out.logsumexp > -jnp.inf
    alive = alive | jnp.isnan(out.logsumexp)
    legal = alive if support is None else in_support(support, tokens)
    g_logp = jnp.where(legal, cotangents.logps, 0.0)
    g_lse, g_entropy = (jnp.where(alive, g, 0.0) for g in (cotangents.logsumexp, cotangents.entropy))
    # A row without a cotangent takes no part, so that NaN in a row nobody asked for stays out of the head gradient.
    active = ((g_logp != 0) | (g_lse != 0) | (g_entropy != 0))[:, None]
    h = jnp.where(active, hidden, 0)
    lse = jnp.where(active[:, 0], out.logsumexp, 0.0)[:, None]
    entropy = jnp.where(active[:, 0], out.entropy, 0.0)[:, None]

    def step(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        grad_hidden, grad_head = carry
        rows = jax.lax.dynamic_index_in_dim(split_head, index, 1, keepdims=False)
        ids = jnp.arange(size, dtype=jnp.int32) * count + index
        allowed = (ids < vocabulary)[None, :]
        if support is not None:
            allowed = allowed & support_at(support, jnp.minimum(ids, vocabulary - 1))
        centred = jnp.where(allowed, head_logits(h, rows, static.temperature) - lse, -jnp.inf)
        p = jnp.exp(centred)
        slope = (g_lse - g_logp)[:, None] - g_entropy[:, None] * (jnp.where(p > 0, centred, 0.0) + entropy)
        hit = (tokens[:, None] == ids[None, :]) & allowed
        dz = jnp.where(active, p * slope + jnp.where(hit, g_logp[:, None], 0.0), 0.0) / static.temperature
        grad_hidden = grad_hidden + jnp.dot(
            dz, rows.astype(jnp.float32), precision=precision, preferred_element_type=jnp.float32
        )
        grad_rows = jax.lax.dot_general(
            dz,
            h.astype(jnp.float32),
            (((0,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        grad_head = jax.lax.dynamic_update_index_in_dim(grad_head, grad_rows.astype(head.dtype), index, 1)
        return grad_hidden, grad_head

    start = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(split_head.shape, head.dtype))
    if count == 1:
        grad_hidden, grad_head = step(jnp.int32(0), start)
    else:
        grad_hidden, grad_head = jax.lax.fori_loop(0, count, step, start)
    grad_head = grad_head.reshape(size * count, width)[:vocabulary]
    return grad_hidden.astype(hidden.dtype), grad_head, None, None


_linear_logps.defvjp(_linear_logps_fwd, _linear_logps_bwd)


@functools.partial(jax.jit, static_argnames=("temperature", "chunk_size"))
def linear_logps_chunked(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, " N"],
    support: UInt8[Array, "N V8"] | None,
    *,
    temperature: float,
    chunk_size: int,
) -> LinearLogps:
    """Holds ``chunk_size × V`` logits at a time, forward and backward."""
    return _linear_logps(_Static(temperature, chunk_size), hidden, head, tokens, support)
