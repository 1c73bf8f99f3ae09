"""TPU kernels: one sweep over both heads for normalisers, entropies and KL, a second one for TV.

First sweep, with ``x = (z_θ - z_roll) - shift``: beside each policy's online softmax it sums ``b = E_roll[x]`` and the
curvature ``E_roll[expm1(x) - x]``, whose terms are non-negative, as two terms of a series for small ``x`` and as
``w_θ κ - w_roll (1 + x)`` with the weights at hand otherwise (``κ`` refers the policy's weights to the rollout's):
no third exponential. Second sweep: ``½ Σ π_roll |expm1(x - normaliser)|``, or ``|π_θ - π_roll|`` where those differ.

Both read each head once for every block of tokens and keep one tile of logits. Epilogues stand in the same basic block
as the products of other token columns, the only place where the scheduler overlaps the vector with the matrix unit.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._partials import EXPONENT_LIMIT, DivergencePartial
from trm_jax.ops._softmax_rows import with_token
from trm_jax.ops._tiles import (
    CHUNK,
    LANES,
    SUBLANES,
    UNSEEN,
    Operands,
    Softmax,
    Tiling,
    Units,
    add_policy,
    fold_rows,
    is_token,
    logit_tile,
    row_of,
    softmax_finish,
    softmax_start,
    softmax_update,
)
from trm_jax.ops._vmem import chip_of
from trm_jax.ops.linear_vocab_divergence._config import divergence_blocks

__all__ = ["divergence_statistics", "divergence_tv"]

_SMALL = 1 / 16
"""Below it ``expm1(x) - x`` is two terms of its series, exact to 2e-4 of it; above, differences of weights are."""
_HALF = 0.5 * (1.0 + _SMALL**2 / 24)
"""Halves the largest error of those two terms."""

_TINY = 1 / 32
"""The same for the two terms of ``expm1`` that the second sweep takes: 2e-4 of a term, at most."""

_SUMS = 9  # policy's top, total, moment; the rollout's; mean shift; curvature; missing mass


class _Static(NamedTuple):
    vocabulary: int
    tiling: Tiling
    units: Units
    names: tuple[str, ...]
    group: int
    biased: bool

    def named(self, refs: Any) -> dict[str, Any]:
        return dict(zip(self.names, refs, strict=False))

    def tiles(self, refs: dict[str, Any], columns: slice, first: Array, ragged: bool) -> tuple[Array, Array]:
        """Both policies' logits for some columns of the tokens."""
        rollout_head = "rollout_" if "rollout_head" in refs else "policy_"
        policy, rollout = (
            logit_tile(refs, prefix, head, columns, self.units, first, self.vocabulary, ragged=ragged)
            for prefix, head in (("policy_", "policy_"), ("rollout_", rollout_head))
        )
        return policy, rollout

    def sweep(self, step: Any, finish: Any) -> None:
        """Runs ``step(columns, first, ragged)`` on this tile's token columns, and ``finish`` after the last tile."""
        j, last = pl.program_id(1), pl.num_programs(1) - 1
        first = j * self.tiling.vocabulary

        def tile(ragged: bool) -> None:
            for start in range(0, self.tiling.tokens, self.group):
                step(slice(start, start + self.group), first, ragged)

        if self.vocabulary % self.tiling.vocabulary:
            pl.when(j < last)(lambda: tile(False))
            pl.when(j == last)(lambda: tile(True))
        else:
            tile(False)
        pl.when(j == last)(finish)


def _difference(t: Array, r: Array, shift: Array, units: Units, exact: bool) -> Array:
    """``(z_θ - z_roll) - shift``; equal logits differ by exactly 0 before the unit is multiplied in."""
    d = t - r
    if exact:  # a multiplication before the subtraction may have been fused into it
        d = jnp.where(t == r, 0.0, d)
    return (d if units.unit == 1.0 else d * units.unit) - shift


def _statistics_kernel(static: _Static, *refs: Any) -> None:
    named = static.named(refs)
    out, state = refs[len(static.names) :]
    units, size = static.units, static.tiling.vocabulary

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        start = softmax_start(state.shape[1:])
        for i, value in enumerate((*start, *start)):
            state[i] = value
        state[6:] = jnp.zeros_like(state[6:])

    def step(columns: slice, first: Array, ragged: bool) -> None:
        t_tile, r_tile = static.tiles(named, columns, first, ragged)
        shift, tokens = named["shift"][:, columns], named["tokens"][:, columns]
        old = [state[i, :, columns] for i in range(_SUMS)]
        t_all, r_all = fold_rows(t_tile, 0, size), fold_rows(r_tile, 0, size)
        t_top = jnp.maximum(old[0], jnp.max(t_all, axis=0))
        r_top = jnp.maximum(old[3], jnp.max(r_all, axis=0))
        policy, _ = softmax_update(Softmax(*old[:3]), t_top, units.exponent)
        rollout, factor = softmax_update(Softmax(*old[3:6]), r_top, units.exponent)
        shifted, curved, missing = (factor * x for x in old[6:])
        kappa = jnp.exp(jnp.minimum(units.unit * (t_top - r_top) - shift, EXPONENT_LIMIT))
        sums = [policy.total, policy.moment, rollout.total, rollout.moment, shifted, curved, missing]
        for start in range(0, size, CHUNK):
            t, r = fold_rows(t_tile, start, CHUNK), fold_rows(r_tile, start, CHUNK)
            own = is_token(tokens, first, start, CHUNK)
            t_gap, r_gap = t - t_top, r - r_top
            w = jnp.where(own, 0.0, jnp.exp2(units.exponent * t_gap))
            v = jnp.where(own, 0.0, jnp.exp2(units.exponent * r_gap))
            x = _difference(t, r, shift, units, static.biased)
            if static.biased:
                absent = jnp.where((t <= UNSEEN) & (v > 0), v, 0.0)
                sums[6] += jnp.sum(absent, axis=0)
                x = jnp.where(absent > 0, 0.0, x)
            vx = v * x
            series = vx * x * (_HALF + x * (1 / 6))
            weights = w * kappa - (v + vx)
            curvature = jnp.where(jnp.abs(x) < _SMALL, series, weights)
            for i, value in enumerate((w, w * t_gap, v, v * r_gap, vx, curvature)):
                sums[i] += jnp.sum(value, axis=0)
        for i, value in enumerate((t_top, *sums[:2], r_top, *sums[2:])):
            state[i, :, columns] = value

    def finish() -> None:
        policy, _ = softmax_finish(Softmax(*(state[i] for i in range(3))), units.exponent)
        rollout, factor = softmax_finish(Softmax(*(state[i] for i in range(3, 6))), units.exponent)
        rest = [jnp.sum(factor * state[i], axis=0, keepdims=True) for i in range(6, _SUMS)]
        for i, value in enumerate((*policy, *rollout, *rest)):
            out[i : i + 1, :] = value

    static.sweep(step, finish)


def _tv_kernel(static: _Static, *refs: Any) -> None:
    named = static.named(refs)
    out, state = refs[len(static.names) :]
    units, size = static.units, static.tiling.vocabulary

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        state[...] = jnp.zeros_like(state)

    def step(columns: slice, first: Array, ragged: bool) -> None:
        t_tile, r_tile = static.tiles(named, columns, first, ragged)
        rows = ("shift", "normaliser", "policy_normaliser", "rollout_normaliser")
        shift, normaliser, t_norm, r_norm = (named[name][:, columns] for name in rows)
        tokens, total = named["tokens"][:, columns], state[:, columns]
        for start in range(0, size, CHUNK):
            t, r = fold_rows(t_tile, start, CHUNK), fold_rows(r_tile, start, CHUNK)
            p, q = jnp.exp2(units.exponent * (t - t_norm)), jnp.exp2(units.exponent * (r - r_norm))
            d = _difference(t, r, shift, units, static.biased) - normaliser
            gap = jnp.where(jnp.abs(d) < _TINY, q * d * (1.0 + 0.5 * d), p - q)
            total += jnp.sum(jnp.where(is_token(tokens, first, start, CHUNK), 0.0, jnp.abs(gap)), axis=0)
        state[:, columns] = total

    def finish() -> None:
        out[...] = 0.5 * jnp.sum(state[...], axis=0, keepdims=True)

    static.sweep(step, finish)


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
    group = math.gcd(block_n, 4 * LANES)
    static = _Static(v, tiling, units, tuple(operands.names), group, biased)
    grid = tiling.grid(n, v)
    reads = sum(head.size * head.dtype.itemsize for head in heads) * grid[0]
    out: Array = pl.pallas_call(
        functools.partial(kernel, static),
        out_shape=jax.ShapeDtypeStruct((sums, grid[0] * block_n), jnp.float32),
        grid=grid,
        in_specs=operands.specs,
        out_specs=pl.BlockSpec((sums, block_n), tiling.by_token(row=True)),
        scratch_shapes=[pltpu.VMEM((*state, block_n), jnp.float32)],
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


def _token_gap(policy: Array, rollout: Array) -> Array:
    """Exactly 0 for equal logits, also where the compiler fuses the division by the temperature into the difference."""
    return jnp.where(policy == rollout, 0.0, policy - rollout)


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
    shift: Float[Array, " N"],
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
      shift: ``[N]`` finite, near ``z_θ - z_roll``.
      interpret: of ``pl.pallas_call``.
      chip: name in ``CHIPS`` whose blocks to use; None asks the device.
      blocks: ``(tokens, vocabulary)`` of a block, multiples of 128 of which the second divides 1024; None picks.

    Returns:
      The record of this shard. ``growth`` counts policy mass outside the rollout's support, so ``uncovered`` is None.
    """
    units = Units(temperature, logit_soft_cap)
    shared = rollout_head is policy_head and rollout_scale is None
    head = None if shared else rollout_head
    policies = _Policies(
        policy_hidden, policy_head, policy_bias, rollout_hidden, head, rollout_scale, rollout_bias, support, tokens
    )
    rows = {"shift": row_of(shift)}
    state = (_SUMS, SUBLANES)
    out = _sweep(_statistics_kernel, policies, rows, 16, "divergence_statistics", state, units, interpret, chip, blocks)
    local = _local(tokens, policy_head.shape[0])
    policy_here = local & (policy_token_logit != -jnp.inf)
    rollout_here = local & (rollout_token_logit != -jnp.inf)
    policy, _, _ = with_token(out[0], out[1], out[2], policy_token_logit, policy_here, units.unit)
    rollout, weight, own = with_token(out[3], out[4], out[5], rollout_token_logit, rollout_here, units.unit)
    both = policy_here & rollout_here
    x = jnp.where(both, _token_gap(policy_token_logit, rollout_token_logit) - shift, 0.0)
    growth = jnp.expm1(jnp.minimum(x, EXPONENT_LIMIT))
    only_policy = jnp.where(rollout.top == -jnp.inf, 0.0, jnp.exp(policy_token_logit - shift - rollout.logsumexp))
    growth = jnp.where(both, own * growth, jnp.where(policy_here, only_policy, -own))
    lost = (out[8] > 0) | (rollout_here & ~policy_here)
    mean = weight * out[6] + own * x
    return DivergencePartial(
        policy=policy,
        rollout=rollout,
        growth=weight * ((out[7] + out[6]) - out[8]) + growth,
        mean_shift=jnp.where(lost, -jnp.inf, mean),
        uncovered=None,
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

    Operands as for ``divergence_statistics``, and of the whole vocabulary: ``normaliser`` ``logsumexp_θ -
    logsumexp_roll - shift`` (the accurate one) and both ``logsumexp``.
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
    d = jnp.where(both, _token_gap(policy_token_logit, rollout_token_logit) - shift - normaliser, jnp.inf)
    own = jnp.where(jnp.abs(d) < _SMALL, q * jnp.abs(jnp.expm1(jnp.where(jnp.isinf(d), 0.0, d))), jnp.abs(p - q))
    return out + jnp.where(local, 0.5 * own, 0.0)
