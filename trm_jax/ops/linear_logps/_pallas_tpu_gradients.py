"""TPU kernels of the backward sweeps: logits are recomputed by blocks, ``[N, V]`` never exists.

With ``c = z - logsumexp`` and ``p = exp(c)`` the logit gradient is ``dz = p (slope + entropy_slope c) + [v = y]
token_slope``, and ``dz (1 - tanh²) / T`` before the cap. One sweep sums ``dz · head`` for a block of tokens over the
vocabulary, the other ``dzᵀ · hidden`` for a block of the head over the tokens; both in float32, written once. As in any
two-sweep scheme the logits are computed twice: 8 N V D operations, against 6 with them stored.

A block of tokens without any slope is passed over. One that holds a non-finite row without slopes is cleaned first,
because 0 times NaN would reach the head.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._head import product_dtype
from trm_jax.ops._operands import Operand, Operands, Tiling, add_policy, by_name, lies_turned
from trm_jax.ops._tiles import LANES, SUBLANES, Units, as_kernel, logit_tile, product
from trm_jax.ops._vmem import chip_of
from trm_jax.ops.linear_logps._config import logps_blocks

__all__ = ["logps_gradients"]

_LARGE_SLOPE = 1e4
"""Of an entropy in a logit, before its cotangent: times ``MASKED`` and that it must be finite."""
_IDLE, _CLEAN, _DIRTY = 0, 1, 2
_ROWS = ("normaliser", "token_slope", "slope", "entropy_slope", "active")


class _Static(NamedTuple):
    tokens: int
    vocabulary: int
    tiling: Tiling
    units: Units
    layout: tuple[Operand, ...]

    def logit_gradient(
        self, refs: dict[str, Any], params: Any, ids: Array, first: Array, *, ragged: bool, on_lanes: bool
    ) -> Array:
        """``dz`` before the cap, for a whole tile; ``params`` gives each row of ``_ROWS`` spread over the tile."""
        everything = slice(0, self.tiling.tokens)
        r = logit_tile(refs, "", "", everything, self.units, first, self.vocabulary, ragged=ragged, on_lanes=on_lanes)
        centred = r - params("normaliser")
        p = jnp.exp2(self.units.exponent * centred)
        if self.units.unit / self.units.temperature < _LARGE_SLOPE:
            dz = p * (params("slope") + params("entropy_slope") * centred)
        else:  # the product with what is masked would be infinite
            dz = p * params("slope") + params("entropy_slope") * (p * centred)
        place = jax.lax.broadcasted_iota(jnp.int32, r.shape, 0 if on_lanes else 1)
        dz = dz + jnp.where(ids - first == place, params("token_slope"), 0.0)
        if self.units.soft_cap is not None:
            dz = dz * (1.0 - jnp.minimum(r * r, 1.0))
        return jnp.where(params("active") > 0, dz, 0.0)

    def over_tiles(self, runs: Array, last: Array, tile: Any) -> None:
        """``tile(ragged)`` where ``runs``, with the check of ragged vocabulary only in the last block."""
        if self.vocabulary % self.tiling.vocabulary:
            pl.when(runs & jnp.logical_not(last))(lambda: tile(False))
            pl.when(runs & last)(lambda: tile(True))
        else:
            pl.when(runs)(lambda: tile(False))


def _hidden_kernel(static: _Static, kinds: Any, *refs: Any) -> None:
    named, (out, sums, columns) = by_name(static.layout, refs)
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j == 0)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)
        columns[...] = named["rows"][...].T  # slopes of a token beside its row of the tile

    def tile(ragged: bool) -> None:
        def params(name: str) -> Array:
            k = _ROWS.index(name)
            column: Array = columns[:, k : k + 1]
            return column

        ids = columns[:, len(_ROWS) : len(_ROWS) + 1].astype(jnp.int32)
        dz = static.logit_gradient(named, params, ids, j * static.tiling.vocabulary, ragged=ragged, on_lanes=False)
        head, hidden = named["head"], named["hidden"]
        dz = dz.astype(product_dtype(hidden, head))
        for place in head.parts:
            rows = head.part(place)
            if ragged:
                ids = j * static.tiling.vocabulary + jax.lax.broadcasted_iota(jnp.int32, rows.shape, head.axis)
                rows = jnp.where(ids < static.vocabulary, rows, jnp.zeros_like(rows))
            if hidden.turned:
                sums[place, :] += product(rows, dz, (head.axis, 1))
            else:
                sums[:, place] += product(dz, rows, (1, head.axis))

    last = j == pl.num_programs(1) - 1
    static.over_tiles(kinds[i] != _IDLE, last, tile)

    @pl.when(last)
    def _() -> None:
        out[...] = sums[...].astype(out.dtype)


def _head_kernel(static: _Static, kinds: Any, *refs: Any) -> None:
    named, rest = by_name(static.layout, refs)
    outs, scratch = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    j, i = pl.program_id(0), pl.program_id(1)

    @pl.when(i == 0)
    def _() -> None:
        for ref in scratch:
            ref[...] = jnp.zeros_like(ref)

    def tile(ragged: bool, dirty: bool) -> None:
        rows: Array = named["rows"][...]

        def params(name: str) -> Array:
            k = _ROWS.index(name)
            return rows[k : k + 1]

        ids = rows[len(_ROWS) : len(_ROWS) + 1].astype(jnp.int32)
        dz = static.logit_gradient(named, params, ids, j * static.tiling.vocabulary, ragged=ragged, on_lanes=True)
        hidden, head = named["hidden"], named["head"]
        active = params("active")
        if dirty and not hidden.turned:
            active = jnp.broadcast_to(active, (LANES, rows.shape[1])).T[:, :1]
        narrow = dz.astype(product_dtype(hidden, head))
        for place in hidden.parts:
            part = hidden.part(place)
            if dirty:
                part = jnp.where(active > 0, part, jnp.zeros_like(part))
            if head.turned:
                scratch[0][place, :] += product(part, narrow, (hidden.axis, 1))
            else:
                scratch[0][:, place] += product(narrow, part, (1, hidden.axis))
        if len(scratch) > 1:
            scratch[1][...] += sum(dz[:, k : k + LANES] for k in range(0, dz.shape[1], LANES))

    last = j == pl.num_programs(0) - 1
    for kind in (_CLEAN, _DIRTY):
        static.over_tiles(kinds[i] == kind, last, functools.partial(tile, dirty=kind == _DIRTY))

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        outs[0][...] = scratch[0][...].astype(outs[0].dtype)
        if len(outs) > 1:
            outs[1][...] = jnp.sum(scratch[1][...].T, axis=0, keepdims=True)


def logps_gradients(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    tokens: Int[Array, " N"],
    support: UInt8[Array, "N V8"] | None,
    logsumexp: Float[Array, " N"],
    token_slope: Float[Array, " N"],
    slope: Float[Array, " N"],
    entropy_slope: Float[Array, " N"],
    *,
    temperature: float,
    logit_soft_cap: float | None = None,
    hidden_grad_dtype: Any = jnp.float32,
    head_grad_dtype: Any = None,
    interpret: Any = False,
    chip: str | None = None,
    blocks: tuple[int, int] | None = None,
) -> tuple[Float[Array, "N D"], Float[Array, "V D"], Float[Array, " V"] | None]:
    """Gradients of ``hidden`` (this shard's addend), of the shard's head and of its bias.

    With ``c = z - logsumexp``, the gradient of a logit is ``exp(c) (slope + entropy_slope c) + [v = y] token_slope``.

    Args:
      hidden: ``[N, D]``; a row whose three slopes are 0 takes no part, whatever it holds.
      head: ``[V, D]`` rows of this shard.
      bias: ``[V]``, ``-inf`` outside the softmax, or None.
      tokens: ``[N]`` ids relative to this shard; outside ``[0, V)`` they are another shard's.
      support: ``[N, ceil(V/8)]`` bits of these rows, or None; tokens outside have a ``token_slope`` of 0.
      logsumexp: ``[N]`` of the whole vocabulary, finite where a slope is not 0.
      hidden_grad_dtype: dtype of the first output; float32 when it is summed over shards.
      head_grad_dtype: dtype of the second; None is the head's.
      blocks: ``(tokens, vocabulary)`` of a block, multiples of 128 of which the second divides 1024; None picks.

    Returns:
      ``(dhidden, dhead, dbias)``: summed in float32, written once; ``dbias`` is None without a bias.
    """
    (n, width), v = hidden.shape, head.shape[0]
    this, units = chip_of(chip), Units(temperature, logit_soft_cap)
    sizes = hidden.dtype.itemsize, head.dtype.itemsize
    block_n, block_v = blocks or logps_blocks(this, n, width, *sizes, supported=support is not None, gradient=True)
    count = -(-n // block_n)

    active = (token_slope != 0) | (slope != 0) | (entropy_slope != 0)
    dirty = ~active & ~jnp.all(jnp.isfinite(hidden), axis=1)  # a cap would make its logits finite
    # Slopes of dz before the division by T; entropy_slope meets centred logits in units.
    rows = jnp.stack(
        [
            jnp.where(active, logsumexp, 0.0) / units.unit,
            token_slope / temperature,
            slope / temperature,
            entropy_slope * (units.unit / temperature),
            active.astype(jnp.float32),
            jnp.where((tokens >= 0) & (tokens < v), tokens, -1).astype(jnp.float32),  # exact below 2^24
            jnp.zeros(n, jnp.float32),
            jnp.zeros(n, jnp.float32),
        ]
    )
    rows = jnp.pad(rows, ((0, 0), (0, count * block_n - n)))

    def blockwise(flags: Array) -> Array:
        return jnp.any(jnp.pad(flags, (0, count * block_n - n)).reshape(count, block_n), axis=1)

    kinds = jnp.where(blockwise(active), jnp.where(blockwise(dirty), _DIRTY, _CLEAN), _IDLE)
    if n % block_n:  # what stands behind the last row is not defined
        kinds = kinds.at[-1].set(jnp.where(kinds[-1] == _IDLE, _IDLE, _DIRTY))

    def call(kernel: Any, tiling: Tiling, name: str, outs: Any, specs: Any, scratch: Any) -> Any:
        operands = Operands()
        add_policy(operands, tiling, "", hidden, head, None, bias)
        operands.add_support(support, tiling)
        operands.add("rows", rows, (SUBLANES, block_n), tiling.by_token(row=True))
        grid = tiling.grid(n, v)
        still, streamed = (hidden, head) if tiling.token_axis == 0 else (head, hidden)
        moved = still.nbytes + streamed.nbytes * grid[0]
        return pl.pallas_call(
            as_kernel(kernel, _Static(n, v, tiling, units, tuple(operands.layout))),
            out_shape=outs,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=operands.specs,
                out_specs=specs,
                scratch_shapes=scratch,
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=this.vmem_bytes
            ),
            cost_estimate=pl.CostEstimate(flops=4 * n * v * width, transcendentals=n * v, bytes_accessed=moved),
            interpret=interpret,
            name=name,
        )(kinds.astype(jnp.int32), *operands.arrays)

    def gradient(array: Array, dtype: Any, rows: int, index_of: Any) -> tuple[Any, Any, Any, bool]:
        """Output, its block, its float32 sums, and whether it is written transposed, as its array lies."""
        (size, columns), turned = array.shape, lies_turned(array)
        shape, block = ((columns, size), (columns, rows)) if turned else ((size, columns), (rows, columns))
        out = jax.ShapeDtypeStruct(shape, dtype)
        return out, pl.BlockSpec(block, index_of(row=turned)), pltpu.VMEM(block, jnp.float32), turned

    over_tokens, over_vocabulary = Tiling(block_n, block_v, 0), Tiling(block_n, block_v, 1)
    out, spec, sums, turned = gradient(hidden, hidden_grad_dtype, block_n, over_tokens.by_token)
    columns = pltpu.VMEM((block_n, SUBLANES), jnp.float32)
    dhidden = call(_hidden_kernel, over_tokens, "logps_hidden_gradient", out, spec, [sums, columns])
    dhidden = dhidden.T if turned else dhidden

    out, spec, sums, turned = gradient(head, head_grad_dtype or head.dtype, block_v, over_vocabulary.by_vocabulary)
    outs, specs, scratch = [out], [spec], [sums]
    if bias is not None:
        outs.append(jax.ShapeDtypeStruct((1, v), jnp.float32))
        specs.append(pl.BlockSpec((1, block_v), over_vocabulary.by_vocabulary(row=True)))
        scratch.append(pltpu.VMEM((block_v, LANES), jnp.float32))
    dhead, *dbias = call(_head_kernel, over_vocabulary, "logps_head_gradient", outs, specs, scratch)
    return dhidden, dhead.T if turned else dhead, dbias[0][0] if dbias else None
