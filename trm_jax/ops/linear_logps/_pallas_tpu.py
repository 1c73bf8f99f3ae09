"""TPU kernel of the forward sweep: an online softmax over blocks of the head, the sampled token left out."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._online_softmax import Softmax, softmax_add, softmax_finish, softmax_start, softmax_update
from trm_jax.ops._operands import Operand, Operands, Tiling, add_policy, by_name, row_of
from trm_jax.ops._partials import SoftmaxPartial
from trm_jax.ops._softmax_rows import logit_of_picked, near_top, with_token
from trm_jax.ops._tiles import CHUNK, LANES, SUBLANES, Units, as_kernel, fold_rows, is_token, logit_tile
from trm_jax.ops._vmem import chip_of
from trm_jax.ops.linear_logps._config import STATE, logps_blocks

__all__ = ["logps_statistics"]


class _Static(NamedTuple):
    vocabulary: int
    tiling: Tiling
    units: Units
    layout: tuple[Operand, ...]
    group: int
    picks: bool


def _kernel(static: _Static, *refs: Any) -> None:
    named, (out, state) = by_name(static.layout, refs)
    exponent, size = static.units.exponent, static.tiling.vocabulary
    j, last = pl.program_id(1), pl.num_programs(1) - 1

    @pl.when(j == 0)
    def _() -> None:
        for i, value in enumerate(softmax_start(state.shape[1:])):
            state[i] = value
        if static.picks:
            state[STATE] = jnp.zeros_like(state[STATE])

    def tile(ragged: bool) -> None:
        for begin in range(0, static.tiling.tokens, static.group):
            columns = slice(begin, begin + static.group)
            logits = logit_tile(named, "", "", columns, static.units, j * size, static.vocabulary, ragged=ragged)
            tokens = named["tokens"][:, columns]
            old = Softmax(*(state[i, :, columns] for i in range(STATE)))
            top = jnp.maximum(old.top, jnp.max(fold_rows(logits, 0, size), axis=0))
            total = moment = picked = jnp.zeros_like(top)
            for start in range(0, size, CHUNK):
                r, own = fold_rows(logits, start, CHUNK), is_token(tokens, j * size, start, CHUNK)
                gap = r - top
                w = jnp.where(own, 0.0, jnp.exp2(exponent * gap))
                total += jnp.sum(w, axis=0)
                moment += jnp.sum(w * gap, axis=0)
                if static.picks:
                    picked += jnp.sum(jnp.where(own, r, 0.0), axis=0)
            if static.picks:
                state[STATE, :, columns] += picked
            sums, _ = softmax_update(old, top, exponent)
            for i, value in enumerate(softmax_add(sums, total, moment)):
                state[i, :, columns] = value

    if static.vocabulary % size:
        pl.when(j < last)(lambda: tile(False))
        pl.when(j == last)(lambda: tile(True))
    else:
        tile(False)

    @pl.when(j == last)
    def _() -> None:
        merged = softmax_finish(Softmax(*(state[i] for i in range(STATE))), exponent)
        for i, value in enumerate(merged):
            out[i : i + 1, :] = value
        if static.picks:
            out[STATE : STATE + 1, :] = jnp.sum(state[STATE], axis=0, keepdims=True)


def logps_statistics(
    hidden: Float[Array, "N D"],
    head: Array,
    bias: Float[Array, " V"] | None,
    support: UInt8[Array, "N V8"] | None,
    tokens: Int[Array, " N"],
    token_logit: Float[Array, " N"] | None,
    *,
    temperature: float,
    logit_soft_cap: float | None = None,
    interpret: Any = False,
    chip: str | None = None,
    blocks: tuple[int, int] | None = None,
) -> tuple[SoftmaxPartial, Float[Array, " N"]]:
    """Statistics of the logits over the given rows of the head, in one sweep.

    Args:
      hidden: ``[N, D]``.
      head: ``[V, D]`` rows of this shard.
      bias: ``[V]``, ``-inf`` outside the softmax, or None.
      support: ``[N, ceil(V/8)]`` bits of these rows, or None.
      tokens: ``[N]`` sampled ids relative to this shard; outside ``[0, V)`` they are another shard's.
      token_logit: ``[N]`` their logits in units of the kernels, ``-inf`` outside the support; None has the kernel pick
        them out, for a little more work.
      interpret: of ``pl.pallas_call``.
      chip: name in ``CHIPS`` whose blocks to use; None asks the device.
      blocks: ``(tokens, vocabulary)`` of a block, multiples of 128 of which the second divides 1024; None picks.

    Returns:
      The record of this shard, and the tokens' logits; of other shards' tokens anything.
    """
    (n, width), v = hidden.shape, head.shape[0]
    this, units = chip_of(chip), Units(temperature, logit_soft_cap)
    sizes = hidden.dtype.itemsize, head.dtype.itemsize
    tiling = Tiling(*(blocks or logps_blocks(this, n, width, *sizes, supported=support is not None, gradient=False)), 0)
    operands = Operands()
    add_policy(operands, tiling, "", hidden, head, None, bias)
    operands.add_support(support, tiling)
    operands.add("tokens", row_of(tokens, jnp.int32), (1, tiling.tokens), tiling.by_token(row=True))
    grid = tiling.grid(n, v)
    group = 2 * LANES if tiling.tokens % (2 * LANES) == 0 else LANES
    static = _Static(v, tiling, units, tuple(operands.layout), group, token_logit is None)
    out = pl.pallas_call(
        as_kernel(_kernel, static),
        out_shape=jax.ShapeDtypeStruct((SUBLANES, grid[0] * tiling.tokens), jnp.float32),
        grid=grid,
        in_specs=operands.specs,
        out_specs=pl.BlockSpec((SUBLANES, tiling.tokens), tiling.by_token(row=True)),
        scratch_shapes=[pltpu.VMEM((STATE + static.picks, SUBLANES, tiling.tokens), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=this.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * n * v * width, transcendentals=n * v, bytes_accessed=head.nbytes * grid[0] + hidden.nbytes
        ),
        interpret=interpret,
        name="logps_statistics",
    )(*operands.arrays)[:, :n]
    token_logit = logit_of_picked(out[STATE]) if token_logit is None else token_logit
    here = (tokens >= 0) & (tokens < v) & (token_logit != -jnp.inf)
    near = near_top(out[0], token_logit, units.unit)
    return with_token(out[:4], token_logit, here, near, units.unit), token_logit
