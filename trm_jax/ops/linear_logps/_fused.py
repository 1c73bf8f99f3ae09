"""One operator of a forward and a backward pass, over shards of the vocabulary, whichever form computes a shard."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._axis_types import as_varying, varying
from trm_jax.ops._head import Head, Scaling
from trm_jax.ops._operands import lies_turned
from trm_jax.ops._partials import AxisName, SoftmaxPartial, TokenGap, merge_softmax, sum_over
from trm_jax.ops._remat import as_one_step
from trm_jax.ops._sharding import Layout, Shard, over_shards
from trm_jax.ops._tiles import Units
from trm_jax.ops._token import token_gap, token_logits
from trm_jax.ops.linear_logps import _chunked
from trm_jax.ops.linear_logps._types import LinearLogps, LogpsSlopes, logps_slopes

__all__ = ["Plan", "check_blocks", "linear_logps_fused"]


class Plan(NamedTuple):
    """Everything static.

    Attributes:
      implementation: ``"chunked"`` or ``"pallas_tpu"``.
      scaling: temperature and cap.
      layout: None on one device, or where the compiler shards.
      chunk_size: of the chunked form.
      rows_at_once: of the chunked form.
      contiguous: of the chunked form, whose chunks of the vocabulary are then contiguous rows of the head.
      interpret: of the kernel.
    """

    implementation: str
    scaling: Scaling
    layout: Layout | None
    chunk_size: int
    rows_at_once: int
    contiguous: bool
    interpret: bool

    @property
    def units(self) -> Units:
        """Of the kernels."""
        return Units(*self.scaling)


_Rows = tuple[Array, Array, Array | None]


def _statistics(plan: Plan, shard: Shard, rows: _Rows, head: Head) -> tuple[SoftmaxPartial, TokenGap]:
    hidden, tokens, support = rows
    vocabulary = head.weight.shape[0]
    ids, bits = shard.tokens(tokens), shard.support(support, vocabulary)
    if plan.implementation == "chunked":
        return _chunked.logps_statistics(
            hidden, head, ids, bits, scaling=plan.scaling, chunk_size=plan.chunk_size, rows_at_once=plan.rows_at_once
        )
    from trm_jax.ops.linear_logps._pallas_tpu import logps_statistics  # the kernel language takes long to import

    # The rows of a head that lies turned are not to be had without a copy of it.
    logit = None if lies_turned(head.weight) else token_logits(hidden, head, ids, bits, plan.units)
    with jax.enable_x64(False):  # its constants would have 64 bits, which no TPU kernel has
        part, logit = logps_statistics(hidden, head.weight, head.bias, bits, ids, logit, **kernel_options(plan))
    return part, token_gap(logit, part, ids, vocabulary, plan.units.unit)


def kernel_options(plan: Plan) -> dict[str, Any]:
    """What every kernel takes; small blocks are much faster in the interpreter."""
    return {
        "temperature": plan.scaling.temperature,
        "logit_soft_cap": plan.scaling.soft_cap,
        "interpret": plan.interpret,
        "blocks": (128, 128) if plan.interpret else None,
    }


def check_blocks(hidden: Array, head: Array, *, supported: bool) -> None:
    """Both passes run as kernels on this TPU, or neither.

    Raises:
      NotImplementedError: no block fits.
    """
    from trm_jax.ops._vmem import chip_of
    from trm_jax.ops.linear_logps._config import logps_blocks

    sizes = hidden.dtype.itemsize, head.dtype.itemsize
    for gradient in (False, True):
        logps_blocks(chip_of(None), 1, hidden.shape[1], *sizes, supported=supported, gradient=gradient)


def _gradients(
    plan: Plan, shard: Shard, rows: _Rows, slopes: LogpsSlopes, head: Head, head_dtype: jnp.dtype
) -> tuple[Array, Array, Array | None]:
    """This shard's addend to the hidden states' gradient, and the gradients of its rows of the head."""
    hidden, tokens, support = rows
    ids, bits = shard.tokens(tokens), shard.support(support, head.weight.shape[0])
    if plan.implementation == "chunked":
        return _chunked.logps_gradients(
            hidden,
            head,
            ids,
            bits,
            slopes,
            scaling=plan.scaling,
            chunk_size=plan.chunk_size,
            contiguous=plan.contiguous,
            head_gradient_dtype=head_dtype,
        )
    from trm_jax.ops.linear_logps._pallas_tpu_gradients import logps_gradients

    with jax.enable_x64(False):  # as in the forward pass
        out: tuple[Array, Array, Array | None] = logps_gradients(
            hidden,
            head.weight,
            head.bias,
            ids,
            bits,
            slopes.logsumexp,
            slopes.token,
            slopes.all,
            slopes.entropy,
            hidden_grad_dtype=hidden.dtype if shard.vocab_axis is None else jnp.float32,
            head_grad_dtype=head_dtype,
            **kernel_options(plan),
        )
    return out


@jax.custom_jvp
def _once_differentiable(operands: Any) -> Any:
    """What kernels read to make a gradient, which has no derivative of its own."""
    return operands


@_once_differentiable.defjvp
def _once_differentiable_jvp(primals: Any, tangents: Any) -> NoReturn:
    raise NotImplementedError(
        "linear_logps: the kernel has no second derivatives: pass implementation='chunked' to differentiate a gradient"
    )


def _rounded(values: Array, dtype: jnp.dtype) -> Array:
    """``values.astype(dtype)``, which the TPU compiler would move ahead of a sum over devices; not so this rounding."""
    if values.dtype == dtype:
        return values
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(values, kind.nexp, kind.nmant).astype(dtype)


def _forward(plan: Plan, hidden: Array, head: Head, tokens: Array, support: Array | None) -> LinearLogps:
    def body(shard: Shard, rows: _Rows, heads: tuple[Head, ...]) -> LinearLogps:
        part, token = _statistics(plan, shard, rows, heads[0])
        unit = plan.units.unit if plan.implementation == "pallas_tpu" else 1.0 / plan.scaling.temperature
        whole, logps = merge_softmax(part, token, unit, shard.vocab_axis)
        return LinearLogps(logps=logps, logsumexp=whole.logsumexp(unit), entropy=whole.entropy)

    out: LinearLogps = over_shards(plan.layout, body, (hidden, tokens, support), (head,))
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_logps(plan: Plan, hidden: Array, head: Head, tokens: Array, support: Array | None) -> LinearLogps:
    return _forward(plan, hidden, head, tokens, support)


_Residuals = tuple[Array, Head, Array, Array | None, LinearLogps]


def _linear_logps_fwd(
    plan: Plan, hidden: Array, head: Head, tokens: Array, support: Array | None
) -> tuple[LinearLogps, _Residuals]:
    if plan.implementation == "pallas_tpu":
        hidden, head = _once_differentiable((hidden, head))
    forward, barrier = functools.partial(_forward, plan), plan.implementation == "chunked"
    out: LinearLogps = as_one_step(forward, hidden, head, tokens, support, barrier=barrier)
    return out, (hidden, head, tokens, support, out)


def _axes(names: frozenset[str]) -> AxisName:
    return tuple(sorted(names)) or None


def _linear_logps_bwd(plan: Plan, residuals: _Residuals, cotangents: LinearLogps) -> tuple[Array, Head, None, None]:
    hidden, head, tokens, support, out = residuals
    slopes = logps_slopes(out, cotangents)
    if plan.implementation == "pallas_tpu":
        slopes = _once_differentiable(slopes)
    # Inside a caller's shard_map an operand may be the same along axes along which others are not.
    of_hidden, of_weight, of_bias = (
        _axes(varying((hidden, head, tokens, support, slopes)) - varying(x)) for x in (hidden, head.weight, head.bias)
    )

    def body(
        shard: Shard, rows: tuple[_Rows, LogpsSlopes], heads: tuple[Head, ...]
    ) -> tuple[Array, tuple[Array, Array | None]]:
        # What other devices add is summed before it is rounded.
        dtype = jnp.dtype(jnp.float32) if shard.token_axis or of_weight else head.weight.dtype
        grad_hidden, grad_weight, grad_bias = _gradients(plan, shard, *rows, heads[0], dtype)
        grad_hidden = sum_over(of_hidden, sum_over(shard.vocab_axis, grad_hidden))
        grad_weight = sum_over(of_weight, sum_over(shard.token_axis, grad_weight))
        if grad_bias is not None:
            grad_bias = sum_over(of_bias, sum_over(shard.token_axis, grad_bias))
        return _rounded(grad_hidden, hidden.dtype), (_rounded(grad_weight, head.weight.dtype), grad_bias)

    grad_hidden, (grad_weight, grad_bias) = over_shards(
        plan.layout, body, ((hidden, tokens, support), slopes), (head,), head_gradients=True
    )
    grad_head = Head(grad_weight, None, None if head.bias is None else grad_bias.astype(head.bias.dtype))
    return as_varying(grad_hidden, like=hidden), jax.tree.map(as_varying, grad_head, head), None, None


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
