"""One operator of a forward and a backward pass, over shards of the vocabulary, whichever form computes a shard."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._head import Head, Scaling
from trm_jax.ops._partials import SoftmaxPartial, TokenGap, merge_softmax, sum_over
from trm_jax.ops._sharding import Layout, Shard, over_shards
from trm_jax.ops.linear_logps import _chunked
from trm_jax.ops.linear_logps._types import LinearLogps, LogpsSlopes, logps_slopes

__all__ = ["Plan", "linear_logps_fused"]


class Plan(NamedTuple):
    """Everything static.

    Attributes:
      implementation: ``"chunked"`` or ``"pallas_tpu"``.
      scaling: temperature and cap.
      layout: None on one device, or where the compiler shards.
      chunk_size: of the chunked form.
      rows_at_once: of the chunked form.
      interpret: of the kernel.
    """

    implementation: str
    scaling: Scaling
    layout: Layout | None
    chunk_size: int
    rows_at_once: int
    interpret: bool


_Rows = tuple[Array, Array, Array | None]


def _statistics(plan: Plan, shard: Shard, rows: _Rows, head: Head) -> tuple[SoftmaxPartial, TokenGap]:
    hidden, tokens, support = rows
    vocabulary = head.weight.shape[0]
    ids, bits = shard.tokens(tokens), shard.support(support, vocabulary)
    return _chunked.logps_statistics(
        hidden, head, ids, bits, scaling=plan.scaling, chunk_size=plan.chunk_size, rows_at_once=plan.rows_at_once
    )


def _forward(plan: Plan, hidden: Array, head: Head, tokens: Array, support: Array | None) -> LinearLogps:
    def body(shard: Shard, rows: _Rows, heads: tuple[Head, ...]) -> LinearLogps:
        part, token = _statistics(plan, shard, rows, heads[0])
        whole, logps = merge_softmax(part, token, shard.vocab_axis)
        return LinearLogps(logps=logps, logsumexp=whole.logsumexp, entropy=whole.entropy)

    out: LinearLogps = over_shards(plan.layout, body, (hidden, tokens, support), (head,))
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_logps(plan: Plan, hidden: Array, head: Head, tokens: Array, support: Array | None) -> LinearLogps:
    return _forward(plan, hidden, head, tokens, support)


_Residuals = tuple[Array, Head, Array, Array | None, LinearLogps]


def _linear_logps_fwd(
    plan: Plan, hidden: Array, head: Head, tokens: Array, support: Array | None
) -> tuple[LinearLogps, _Residuals]:
    out = _forward(plan, hidden, head, tokens, support)
    return out, (hidden, head, tokens, support, out)


def _linear_logps_bwd(plan: Plan, residuals: _Residuals, cotangents: LinearLogps) -> tuple[Array, Head, None, None]:
    hidden, head, tokens, support, out = residuals
    slopes = logps_slopes(out, cotangents)

    def body(
        shard: Shard, rows: tuple[_Rows, LogpsSlopes], heads: tuple[Head, ...]
    ) -> tuple[Array, tuple[Array, Array | None]]:
        (h, y, bits), slopes = rows
        vocabulary = heads[0].weight.shape[0]
        # What other devices add must be summed before it is rounded.
        dtype = jnp.dtype(jnp.float32) if shard.token_axis else head.weight.dtype
        grad_hidden, grad_weight, grad_bias = _chunked.logps_gradients(
            h,
            heads[0],
            shard.tokens(y),
            shard.support(bits, vocabulary),
            slopes,
            scaling=plan.scaling,
            chunk_size=plan.chunk_size,
            head_gradient_dtype=dtype,
        )
        grad_hidden = sum_over(shard.vocab_axis, grad_hidden).astype(hidden.dtype)
        grad_weight = sum_over(shard.token_axis, grad_weight).astype(head.weight.dtype)
        if grad_bias is not None:
            grad_bias = sum_over(shard.token_axis, grad_bias)
        return grad_hidden, (grad_weight, grad_bias)

    grad_hidden, (grad_weight, grad_bias) = over_shards(
        plan.layout, body, ((hidden, tokens, support), slopes), (head,), head_gradients=True
    )
    grad_head = Head(grad_weight, None, None if head.bias is None else grad_bias.astype(head.bias.dtype))
    return grad_hidden, grad_head, None, None


_linear_logps.defvjp(_linear_logps_fwd, _linear_logps_bwd)


@functools.partial(jax.jit, static_argnames=("plan",))
def linear_logps_fused(
    plan: Plan,
    hidden: Float[Array, "N D"],
    head: Head,
    tokens: Int[Array, " N"],
    support: UInt8[Array, "N V8"] | None,
) -> LinearLogps:
    """Log-probs, normaliser and entropy; differentiable in ``hidden``, ``head.weight`` and ``head.bias``."""
    return _linear_logps(plan, hidden, head, tokens, support)
