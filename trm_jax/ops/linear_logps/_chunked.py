"""Portable form that never holds ``[N, V]``: chunks of tokens forward, chunks of vocabulary backward.

Forward, a chunk of tokens meets the whole vocabulary (every logit is computed once). Backward, a chunk of the
vocabulary meets all tokens, so that each row of the head gradient is summed in float32 inside one product and never
added to. Both functions work on one shard of the vocabulary; ``_fused`` merges shards.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._axis_types import as_varying
from trm_jax.ops._head import Head, Scaling, cap_slope, head_logits, product_precision
from trm_jax.ops._held import softmax_of_rows
from trm_jax.ops._partials import SoftmaxPartial, TokenGap
from trm_jax.ops._rows import map_token_chunks
from trm_jax.ops._support import support_at, unpack_support
from trm_jax.ops.linear_logps._types import LogpsSlopes
from trm_jax.ops.linear_logps._vocabulary_chunks import ContiguousChunks, StridedChunks, vocabulary_chunks

__all__ = ["logps_gradients", "logps_statistics"]


_Gradients = tuple[Array, Array, Array | None]


def logps_statistics(
    hidden: Float[Array, "N D"],
    head: Head,
    tokens: Int[Array, " N"],
    support: UInt8[Array, "N V8"] | None,
    *,
    scaling: Scaling,
    chunk_size: int,
    rows_at_once: int,
) -> tuple[SoftmaxPartial, TokenGap]:
    """Statistics of these rows of the head; holds ``chunk_size × V`` logits.

    Args:
      hidden: all of the shard's tokens.
      head: the shard's rows.
      tokens: ids counted from the shard's first row.
      support: of these rows.
      scaling: temperature and cap.
      chunk_size: tokens whose logits are held at once.
      rows_at_once: of these, how many are reduced together.
    """

    def chunk(rows: tuple[Array, Array, Array | None]) -> tuple[SoftmaxPartial, TokenGap]:
        h, y, bits = rows
        logits = head_logits(h, head, scaling.soft_cap)

        def some(rows: tuple[Array, Array, Array | None]) -> tuple[SoftmaxPartial, TokenGap]:
            z, y, bits = rows
            z = z if bits is None else jnp.where(unpack_support(bits, z.shape[1]), z, -jnp.inf)
            return softmax_of_rows(z, y, scaling.temperature)

        out: tuple[SoftmaxPartial, TokenGap] = map_token_chunks(some, (logits, y, bits), rows_at_once)
        return out

    out: tuple[SoftmaxPartial, TokenGap] = map_token_chunks(chunk, (hidden, tokens, support), chunk_size)
    return out


def logps_gradients(
    hidden: Float[Array, "N D"],
    head: Head,
    tokens: Int[Array, " N"],
    support: UInt8[Array, "N V8"] | None,
    slopes: LogpsSlopes,
    *,
    scaling: Scaling,
    chunk_size: int,
    contiguous: bool,
    head_gradient_dtype: jnp.dtype,
) -> tuple[Float[Array, "N D"], Float[Array, "V D"], Float[Array, " V"] | None]:
    """What these rows of the head add to the gradient of the hidden states (float32), and their own gradients.

    With ``c = z - logsumexp`` the logit's gradient is ``exp(c) (slope + entropy_slope · c) + 1[v = y] token_slope``.

    Of a head that several devices share, as the compiler sees fit, every strided chunk keeps its share on each, as in
    ``map_token_chunks``. Contiguous ones are faster where there is nothing to keep; and where no chunk costs a sum over
    devices there are enough of them for the rows of the head and of its gradient, both in float32, to be held beside
    the logits.
    """
    vocabulary, width = head.weight.shape
    held = hidden.shape[0] + (2 * width if contiguous else 0)
    kind = ContiguousChunks if contiguous else StridedChunks
    chunks = kind(vocabulary, *vocabulary_chunks(vocabulary, held, chunk_size))
    whole_head = jax.tree.map(chunks.split, head)
    precision = product_precision(hidden, head.weight)
    # A row without a cotangent takes no part, so that NaN in a row nobody asked for stays out of the head gradient.
    active = slopes.active[:, None]
    h = jnp.where(active, hidden, 0)
    wide_h = h.astype(jnp.float32)

    def step(index: Array, carry: _Gradients) -> _Gradients:
        grad_hidden, grad_weight, grad_bias = carry
        part = jax.tree.map(lambda x: chunks.chunk(x, index), whole_head)
        ids, own = chunks.ids(index)
        allowed = own[None, :]
        if support is not None:
            allowed = allowed & support_at(support, ids)
        if head.bias is not None:
            allowed = allowed & ~jnp.isneginf(part.bias)[None, :]
        logits = head_logits(h, part, scaling.soft_cap)
        centred = jnp.where(allowed, logits / scaling.temperature - slopes.logsumexp[:, None], -jnp.inf)
        p = jnp.exp(centred)
        slope = slopes.all[:, None] + slopes.entropy[:, None] * jnp.where(p > 0, centred, 0.0)
        hit = (tokens[:, None] == ids[None, :]) & allowed
        dz = jnp.where(active, p * slope + jnp.where(hit, slopes.token[:, None], 0.0), 0.0) / scaling.temperature
        if scaling.soft_cap is not None:
            dz = dz * cap_slope(jnp.where(allowed, logits, 0.0), scaling.soft_cap)
        grad_hidden = grad_hidden + jnp.dot(
            dz, part.weight.astype(jnp.float32), precision=precision, preferred_element_type=jnp.float32
        )
        grad_rows = jax.lax.dot_general(
            dz, wide_h, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        grad_weight = chunks.with_chunk(grad_weight, grad_rows.astype(head_gradient_dtype), index)
        if grad_bias is not None:
            grad_bias = chunks.with_chunk(grad_bias, jnp.sum(dz, axis=0), index)
        return grad_hidden, grad_weight, grad_bias

    start = (
        jnp.zeros(hidden.shape, jnp.float32),
        jnp.zeros(whole_head.weight.shape, head_gradient_dtype),
        None if head.bias is None else jnp.zeros(whole_head.bias.shape, jnp.float32),
    )
    start = as_varying(start, like=(h, head, slopes))
    grads = step(jnp.int32(0), start) if chunks.number == 1 else jax.lax.fori_loop(0, chunks.number, step, start)
    grad_hidden, grad_weight, grad_bias = grads
    return grad_hidden, chunks.whole(grad_weight), None if grad_bias is None else chunks.whole(grad_bias)
