"""TPU kernels: one sweep over both heads for normalisers, entropies and KL, a second one for TV.

First sweep, with ``x = (z_θ - z_roll) - (top_θ - top_roll)`` of the running tops: beside each policy's online softmax
it sums ``E_roll[x]`` and the curvature ``E_roll[expm1(x) - x]``, whose terms are non-negative, as two terms of a series
for small ``x`` and as ``w_θ - w_roll (1 + x)`` with the weights at hand otherwise, whichever is larger: no third
exponential. A new top
moves both sums exactly, so that they end about the most likely token. Second sweep: ``½ Σ π_roll |expm1(x -
normaliser)|``, or ``|π_θ - π_roll|`` where those differ.

Both read each head once for every block of tokens and keep one tile of logits. Epilogues stand in the same basic block
as the products of other token columns, the only place where the scheduler overlaps the vector with the matrix unit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.numerics import expm1_minus_identity
from trm_jax.ops._partials import EXPONENT_LIMIT, DivergencePartial, difference_of, moved
from trm_jax.ops._softmax_rows import near_top, with_token
from trm_jax.ops._tiles import (
    CHUNK,
    LANES,
    MASKED,
    SUBLANES,
    UNSEEN,
    Operand,
    Operands,
    Softmax,
    Tiling,
    Units,
    add_policy,
    by_name,
    fold_rows,
    is_token,
    logit_tile,
    row_of,
    softmax_start,
    softmax_update,
)
from trm_jax.ops._vmem import chip_of
from trm_jax.ops.linear_vocab_divergence._config import divergence_blocks, held_columns

__all__ = ["divergence_statistics", "divergence_tv"]

_ROUNDING = 2e-6
"""Above what rounding makes of ``w_θ - w_roll (1 + x)``, in units of ``w_roll``.

``x²/2 + x³/6`` never exceeds ``expm1(x) - x``, and neither does the difference less this: the larger of them is at most
6e-4 below, most where they meet, at ``|x| = 0.08``.
"""

_TINY = 1 / 32
"""Below it the second sweep takes two terms of ``expm1``, exact to 2e-4 of it; above, ``π_θ - π_roll``."""

_NEAR = 1.0
"""Below it the sampled token takes ``expm1``."""

_SUMS = 9  # the leaves of ``_Sums``


class _Static(NamedTuple):
    vocabulary: int
    tiling: Tiling
    units: Units
    layout: tuple[Operand, ...]
    group: int
    biased: bool

    def tiles(
        self, refs: dict[str, Any], columns: slice, first: Array, ragged: bool, beside: Iterator[None]
    ) -> tuple[Array, Array]:
        """Both policies' logits for some columns of the tokens, and ``beside`` run to its end."""
        rollout_head = "rollout_" if "rollout_head" in refs else "policy_"
        policy, rollout = (
            logit_tile(refs, prefix, head, columns, self.units, first, self.vocabulary, ragged=ragged, beside=beside)
            for prefix, head in (("policy_", "policy_"), ("rollout_", rollout_head))
        )
        for _ in beside:
            pass
        return policy, rollout

    def sweep(self, refs: dict[str, Any], held: Any, step: Any, finish: Any) -> None:
        """Runs the pieces of ``step(columns, first, tiles)`` on a tile's columns, and ``finish`` after the last tile.

        The last columns' logits are held over to the next tile, whose first product has nothing else beside it.
        """
        j, last = pl.program_id(1), pl.num_programs(1) - 1
        size, tokens = self.tiling.vocabulary, self.tiling.tokens
        first = j * size
        groups = [slice(start, start + self.group) for start in range(0, tokens, self.group)]

        @pl.when(j == 0)
        def _() -> None:
            held[...] = jnp.full_like(held, MASKED)  # adds nothing

        def tile(ragged: bool) -> None:
            waiting = groups[-1], first - size, (held[0], held[1])
            for columns in groups:
                tiles = self.tiles(refs, columns, first, ragged, step(*waiting))
                waiting = columns, first, tiles
            held[0], held[1] = waiting[2]

        def rest(k: Array, _: None) -> None:
            inside = pl.ds(pl.multiple_of(k * LANES, LANES), LANES)
            columns = pl.ds(pl.multiple_of(groups[-1].start + k * LANES, LANES), LANES)
            for _ in step(columns, first, (held[0, :, inside], held[1, :, inside])):
                pass

        if self.vocabulary % size:
            pl.when(j < last)(lambda: tile(False))
            pl.when(j == last)(lambda: tile(True))
        else:
            tile(False)

        @pl.when(j == last)
        def _() -> None:
            # A loop, because a branch of straight code would be made part of every step by predicates.
            jax.lax.fori_loop(0, self.group // LANES, rest, None)
            finish()


def _difference(t: Array, r: Array, shift: Array, units: Units, exact: bool) -> Array:
    """``(z_θ - z_roll) - shift``; equal logits differ by exactly 0 before the unit is multiplied in."""
    d = t - r
    if exact:  # a multiplication before the subtraction may have been fused into it
        d = jnp.where(t == r, 0.0, d)
    return (d if units.unit == 1.0 else d * units.unit) - shift


class _Sums(NamedTuple):
    """Running sums, ``[8, tokens]`` each, in the kernel's units; ``curvature`` and what follows as in the record."""

    policy: Softmax
    rollout: Softmax
    curvature: Array
    moment: Array
    lost: Array

    @classmethod
    def of(cls, rows: Any) -> _Sums:
        return cls(Softmax(*rows[:3]), Softmax(*rows[3:6]), *rows[6:])

    def shift(self, unit: float) -> Array:
        """In logits. A bit of the product is dropped, so that no later subtraction can take the unrounded product."""
        gap = self.policy.top - self.rollout.top
        if unit == 1.0:
            return gap
        bits = jax.lax.bitcast_convert_type(gap * unit, jnp.int32) & ~1
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def about(self, policy_top: Array, rollout_top: Array, units: Units) -> _Sums:
        """The same sums referred to larger tops."""
        policy, policy_factor = softmax_update(self.policy, policy_top, units.exponent)
        rollout, rollout_factor = softmax_update(self.rollout, rollout_top, units.exponent)
        unseen = (self.policy.top <= UNSEEN) | (self.rollout.top <= UNSEEN)
        new = self._replace(policy=policy, rollout=rollout)
        step = jnp.where(unseen, 0.0, new.shift(units.unit) - self.shift(units.unit))
        shared = jnp.where(unseen, 0.0, self.rollout.total - self.lost)
        curvature, moment = moved(self.curvature, self.moment, shared, policy_factor, rollout_factor, step)
        return _Sums(policy, rollout, curvature, moment, rollout_factor * self.lost)

    def merged(self, units: Units) -> _Sums:
        """The eight sublanes as one, ``[1, tokens]``."""
        shape = self.lost.shape
        policy_top, rollout_top = (jnp.max(side.top, axis=0, keepdims=True) for side in (self.policy, self.rollout))
        alike = self.about(jnp.broadcast_to(policy_top, shape), jnp.broadcast_to(rollout_top, shape), units)
        sums: _Sums = jax.tree.map(lambda x: jnp.sum(x, axis=0, keepdims=True), alike)
        policy, rollout = sums.policy._replace(top=policy_top), sums.rollout._replace(top=rollout_top)
        return sums._replace(policy=policy, rollout=rollout)


def _statistics_kernel(static: _Static, *refs: Any) -> None:
    named, (out, state, held) = by_name(static.layout, refs)
    units, size = static.units, static.tiling.vocabulary

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        start = softmax_start(state.shape[1:])
        for i, value in enumerate((*start, *start)):
            state[i] = value
        state[6:] = jnp.zeros_like(state[6:])

    def step(columns: Any, first: Array, tiles: tuple[Array, Array]) -> Iterator[None]:
        t_tile, r_tile = tiles
        tokens = named["tokens"][:, columns]
        old = _Sums.of([state[i, :, columns] for i in range(_SUMS)])
        t_top = jnp.maximum(old.policy.top, jnp.max(fold_rows(t_tile, 0, size), axis=0))
        r_top = jnp.maximum(old.rollout.top, jnp.max(fold_rows(r_tile, 0, size), axis=0))
        sums = old.about(t_top, r_top, units)
        shift, rows = sums.shift(units.unit), jax.tree.leaves(sums)
        for start in range(0, size, CHUNK):
            t, r = fold_rows(t_tile, start, CHUNK), fold_rows(r_tile, start, CHUNK)
            own = is_token(tokens, first, start, CHUNK)
            t_gap, r_gap = (z - jnp.where(own, -MASKED, top) for z, top in ((t, t_top), (r, r_top)))  # weighs 0
            w, v = jnp.exp2(units.exponent * t_gap), jnp.exp2(units.exponent * r_gap)
            x = _difference(t, r, shift, units, static.biased)
            if static.biased:
                absent = jnp.where((t <= UNSEEN) & (v > 0), v, 0.0)
                rows[8] += jnp.sum(absent, axis=0)
                x = jnp.where(absent > 0, 0.0, x)
            vx = v * x
            series = vx * x * (0.5 + x * (1 / 6))
            curvature = jnp.maximum(series, w - v * (x + (1.0 + _ROUNDING)))
            for i, value in ((1, w), (2, w * t_gap), (4, v), (5, v * r_gap), (6, curvature), (7, vx)):
                rows[i] += jnp.sum(value, axis=0)
            yield
        for i, value in enumerate(rows):
            state[i, :, columns] = value

    def finish() -> None:
        sums = _Sums.of([state[i] for i in range(_SUMS)]).merged(units)
        for i, value in enumerate((*jax.tree.leaves(sums), sums.shift(units.unit))):
            out[i : i + 1, :] = value

    static.sweep(named, held, step, finish)


def _tv_kernel(static: _Static, *refs: Any) -> None:
    named, (out, state, held) = by_name(static.layout, refs)
    units, size = static.units, static.tiling.vocabulary

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        state[...] = jnp.zeros_like(state)

    def step(columns: Any, first: Array, tiles: tuple[Array, Array]) -> Iterator[None]:
        t_tile, r_tile = tiles
        rows = ("shift", "normaliser", "policy_normaliser", "rollout_normaliser")
        shift, normaliser, t_norm, r_norm = (named[name][:, columns] for name in rows)
        tokens, total = named["tokens"][:, columns], state[:, columns]
        for start in range(0, size, CHUNK):
            t, r = fold_rows(t_tile, start, CHUNK), fold_rows(r_tile, start, CHUNK)
            p, q = jnp.exp2(units.exponent * (t - t_norm)), jnp.exp2(units.exponent * (r - r_norm))
            d = _difference(t, r, shift, units, static.biased) - normaliser
            gap = jnp.where(jnp.abs(d) < _TINY, q * d * (1.0 + 0.5 * d), p - q)
            total += jnp.sum(jnp.where(is_token(tokens, first, start, CHUNK), 0.0, jnp.abs(gap)), axis=0)
            yield
        state[:, columns] = total

    def finish() -> None:
        out[...] = 0.5 * jnp.sum(state[...], axis=0, keepdims=True)

    static.sweep(named, held, step, finish)


class _Policies(NamedTuple):
    """Operands of both policies as the public functions get them."""

    policy_hidden: Array
    policy_head: Array
    policy_bias: Array | None
    rollout_hidden: Array
    rollout_head: Array | None
    rollout_scale: Array | None
    rollout_bias: Array | None
    support: Array | None
    tokens: Array


def _sweep(
    kernel: Any,
    policies: _Policies,
    rows: dict[str, Array | None],
    sums: int,
    name: str,
    state: tuple[int, ...],
    units: Units,
    interpret: Any,
    chip: str | None,
    blocks: tuple[int, int] | None,
) -> Array:
    """One pass over both heads; ``[sums, N]``."""
    p = policies
    n, v = p.policy_hidden.shape[0], p.policy_head.shape[0]
    heads = (p.policy_head,) if p.rollout_head is None else (p.policy_head, p.rollout_head)
    widths = (p.policy_hidden.shape[1], p.rollout_hidden.shape[1])
    this = chip_of(chip)
    block_n, block_v = blocks or divergence_blocks(
        this,
        n,
        widths,
        (p.policy_hidden.dtype.itemsize, p.rollout_hidden.dtype.itemsize),
        tuple(head.dtype.itemsize for head in heads),
        supported=p.support is not None,
    )
    tiling = Tiling(block_n, block_v, 0)
    operands = Operands()
    add_policy(operands, tiling, "policy_", p.policy_hidden, p.policy_head, None, p.policy_bias)
    add_policy(operands, tiling, "rollout_", p.rollout_hidden, p.rollout_head, p.rollout_scale, p.rollout_bias)
    operands.add_support(p.support, tiling)
    for row, values in {"tokens": row_of(p.tokens, jnp.int32), **rows}.items():
        operands.add(row, values, (1, block_n), tiling.by_token(row=True))
    biased = any(x is not None for x in (p.policy_bias, p.rollout_bias, p.rollout_scale))
    group = held_columns(block_n)
    static = _Static(v, tiling, units, tuple(operands.layout), group, biased)
    grid = tiling.grid(n, v)
    reads = sum(head.size * head.dtype.itemsize for head in heads) * grid[0]
    out: Array = pl.pallas_call(
        functools.partial(kernel, static),
        out_shape=jax.ShapeDtypeStruct((sums, grid[0] * block_n), jnp.float32),
        grid=grid,
        in_specs=operands.specs,
        out_specs=pl.BlockSpec((sums, block_n), tiling.by_token(row=True)),
        scratch_shapes=[
            pltpu.VMEM((*state, block_n), jnp.float32),
            pltpu.VMEM((2, block_v, group), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=this.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * n * v * sum(widths), transcendentals=2 * n * v, bytes_accessed=reads + 4 * n * sum(widths)
        ),
        interpret=interpret,
        name=name,
    )(*operands.arrays)
    return out[:, :n]


def _local(tokens: Array, vocabulary: int) -> Array:
    return (tokens >= 0) & (tokens < vocabulary)


def divergence_statistics(
    policy_hidden: Float[Array, "N D1"],
    policy_head: Float[Array, "V D1"],
    policy_bias: Float[Array, " V"] | None,
    rollout_hidden: Float[Array, "N D2"],
    rollout_head: Array,
    rollout_scale: Float[Array, " V"] | None,
    rollout_bias: Float[Array, " V"] | None,
    support: UInt8[Array, "N V8"] | None,
    tokens: Int[Array, " N"],
    policy_token_logit: Float[Array, " N"],
    rollout_token_logit: Float[Array, " N"],
    *,
    temperature: float,
    logit_soft_cap: float | None = None,
    interpret: Any = False,
    chip: str | None = None,
    blocks: tuple[int, int] | None = None,
) -> DivergencePartial:
    """Statistics of both policies over the given rows of their heads, in one sweep.

    Args:
      policy_head: ``[V, D]`` rows of this shard; ``rollout_head`` the same object reads them once.
      rollout_head: ``[V, D]``, or int8 with ``rollout_scale`` ``[V]``.
      policy_bias: ``[V]``, ``-inf`` outside the softmax, or None; so is ``rollout_bias``.
      support: ``[N, ceil(V/8)]`` bits of these rows, or None.
      tokens: ``[N]`` sampled ids relative to this shard; outside ``[0, V)`` they are another shard's.
      policy_token_logit: ``[N]`` logits of the sampled tokens, ``-inf`` outside their support; so is the rollout's.
      interpret: of ``pl.pallas_call``.
      chip: name in ``CHIPS`` whose blocks to use; None asks the device.
      blocks: ``(tokens, vocabulary)`` of a block, multiples of 128 of which the second divides 1024; None picks.

    Returns:
      The record of this shard.
    """
    units = Units(temperature, logit_soft_cap)
    shared = rollout_head is policy_head and rollout_scale is None
    head = None if shared else rollout_head
    policies = _Policies(
        policy_hidden, policy_head, policy_bias, rollout_hidden, head, rollout_scale, rollout_bias, support, tokens
    )
    state = (_SUMS, SUBLANES)
    out = _sweep(_statistics_kernel, policies, {}, 16, "divergence_statistics", state, units, interpret, chip, blocks)
    local = _local(tokens, policy_head.shape[0])
    logits, tops = (policy_token_logit, rollout_token_logit), (out[0], out[3])
    here = [local & (logit != -jnp.inf) for logit in logits]
    near = near_top(out[0], logits[0], units.unit) & near_top(out[3], logits[1], units.unit)
    policy, rollout = (
        with_token(out[3 * i], out[3 * i + 1], out[3 * i + 2], logits[i], here[i], near, units.unit) for i in range(2)
    )
    seen = [top > UNSEEN for top in tops]
    shift = jnp.where(seen[0] & seen[1], out[9], 0.0)
    reference = [jnp.where(part.top == -jnp.inf, 0.0, part.top) for part in (policy, rollout)]
    gaps = [jnp.where(s, units.unit * top, r) - r for s, top, r in zip(seen, tops, reference, strict=True)]
    factor = jnp.exp(jnp.where(seen[1], gaps[1], gaps[0]))

    both = here[0] & here[1]
    x = jnp.where(both, difference_of(*logits) - shift, 0.0)
    weight = jnp.where(here[1], jnp.exp(rollout_token_logit - reference[1]), 0.0)
    alone = jnp.exp(policy_token_logit - jnp.where(seen[1], shift + reference[1], reference[0]))
    own = jnp.where(here[0] & ~here[1], alone, weight * expm1_minus_identity(jnp.minimum(x, EXPONENT_LIMIT)))
    biased = policy_bias is not None or rollout_bias is not None
    return DivergencePartial(
        policy=policy,
        rollout=rollout,
        shift=shift,
        curvature=factor * out[6] + own,
        moment=factor * out[7] + weight * x,
        lost=factor * out[8] + jnp.where(here[0], 0.0, weight) if biased else None,
    )


def divergence_tv(
    policy_hidden: Float[Array, "N D1"],
    policy_head: Float[Array, "V D1"],
    policy_bias: Float[Array, " V"] | None,
    rollout_hidden: Float[Array, "N D2"],
    rollout_head: Array,
    rollout_scale: Float[Array, " V"] | None,
    rollout_bias: Float[Array, " V"] | None,
    support: UInt8[Array, "N V8"] | None,
    tokens: Int[Array, " N"],
    policy_token_logit: Float[Array, " N"],
    rollout_token_logit: Float[Array, " N"],
    shift: Float[Array, " N"],
    normaliser: Float[Array, " N"],
    policy_logsumexp: Float[Array, " N"],
    rollout_logsumexp: Float[Array, " N"],
    *,
    temperature: float,
    logit_soft_cap: float | None = None,
    interpret: Any = False,
    chip: str | None = None,
    blocks: tuple[int, int] | None = None,
) -> Float[Array, " N"]:
    """This shard's addend to the total variation, in one sweep.

    Operands as for ``divergence_statistics``, and of the whole vocabulary: the record's ``shift``, ``normaliser``
    ``logsumexp_θ - logsumexp_roll - shift`` (the accurate one) and both ``logsumexp``.
    """
    units = Units(temperature, logit_soft_cap)
    shared = rollout_head is policy_head and rollout_scale is None
    head = None if shared else rollout_head
    policies = _Policies(
        policy_hidden, policy_head, policy_bias, rollout_hidden, head, rollout_scale, rollout_bias, support, tokens
    )
    lse_policy, lse_rollout = (jnp.where(x == -jnp.inf, 0.0, x) for x in (policy_logsumexp, rollout_logsumexp))
    rows = {
        "shift": row_of(shift),
        "normaliser": row_of(normaliser),
        "policy_normaliser": row_of(lse_policy / units.unit),
        "rollout_normaliser": row_of(lse_rollout / units.unit),
    }
    out = _sweep(_tv_kernel, policies, rows, 1, "divergence_tv", (SUBLANES,), units, interpret, chip, blocks)[0]
    local = _local(tokens, policy_head.shape[0])
    p, q = jnp.exp(policy_token_logit - lse_policy), jnp.exp(rollout_token_logit - lse_rollout)
    both = (policy_token_logit != -jnp.inf) & (rollout_token_logit != -jnp.inf)
    d = jnp.where(both, difference_of(policy_token_logit, rollout_token_logit) - shift - normaliser, jnp.inf)
    own = jnp.where(jnp.abs(d) < _NEAR, q * jnp.abs(jnp.expm1(jnp.where(jnp.isinf(d), 0.0, d))), jnp.abs(p - q))
    return out + jnp.where(local, 0.5 * own, 0.0)
