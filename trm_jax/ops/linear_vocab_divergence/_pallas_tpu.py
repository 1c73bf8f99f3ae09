"""Both sweeps as calls: operands, blocks and grid, and the sampled token, which the kernels leave out, put back."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.numerics import expm1_minus_identity
from trm_jax.ops._operands import Operands, Tiling, add_policy, row_of
from trm_jax.ops._partials import BANNED, Bans, DivergencePartial, difference_of
from trm_jax.ops._softmax_rows import logit_of_picked, near_top, with_token
from trm_jax.ops._tiles import SUBLANES, UNSEEN, Units, as_kernel
from trm_jax.ops._vmem import chip_of
from trm_jax.ops.linear_vocab_divergence._config import STATE, SUMS, divergence_blocks, held_columns
from trm_jax.ops.linear_vocab_divergence._pallas_tpu_kernels import Static, statistics_kernel, tv_kernel

__all__ = ["divergence_statistics", "divergence_tv"]

_NEAR = 1.0
"""Below it the sampled token takes ``expm1``."""


class _Policies(NamedTuple):
    """Operands of both policies as the public functions get them."""

    policy_hidden: Array
    policy_head: Array
    policy_bias: Array | None
    rollout_hidden: Array
    rollout_head: Array
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
    picks: bool = False,
) -> Array:
    """One pass over both heads; ``[sums, N]``."""
    p = policies
    n, v = p.policy_hidden.shape[0], p.policy_head.shape[0]
    shared = p.rollout_head is p.policy_head and p.rollout_scale is None  # is read once
    heads = (p.policy_head,) if shared else (p.policy_head, p.rollout_head)
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
    rollout_head = None if shared else p.rollout_head
    add_policy(operands, tiling, "rollout_", p.rollout_hidden, rollout_head, p.rollout_scale, p.rollout_bias)
    operands.add_support(p.support, tiling)
    for row, values in {"tokens": row_of(p.tokens, jnp.int32), **rows}.items():
        operands.add(row, values, (1, block_n), tiling.by_token(row=True))
    biased = p.policy_bias is not None or p.rollout_bias is not None
    group = held_columns(block_n)
    static = Static(v, tiling, units, tuple(operands.layout), group, biased, picks)
    grid = tiling.grid(n, v)
    reads = sum(head.size * head.dtype.itemsize for head in heads) * grid[0]
    out: Array = pl.pallas_call(
        as_kernel(kernel, static),
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
    token_logits: tuple[Float[Array, " N"], Float[Array, " N"]] | None,
    *,
    temperature: float,
    logit_soft_cap: float | None = None,
    interpret: Any = False,
    chip: str | None = None,
    blocks: tuple[int, int] | None = None,
) -> tuple[DivergencePartial, tuple[Float[Array, " N"], Float[Array, " N"]]]:
    """Statistics of both policies over the given rows of their heads, in one sweep.

    Args:
      policy_head: ``[V, D]`` rows of this shard; ``rollout_head`` the same object reads them once.
      rollout_head: ``[V, D]``, or int8 with ``rollout_scale`` ``[V]``.
      policy_bias: ``[V]``, ``-inf`` outside the softmax, or None; so is ``rollout_bias``.
      support: ``[N, ceil(V/8)]`` bits of these rows, or None.
      tokens: ``[N]`` sampled ids relative to this shard; outside ``[0, V)`` they are another shard's.
      token_logits: ``[N]`` logits of the sampled tokens, the policy's and the rollout's, in units of the kernels,
        ``-inf`` outside their support; None has the kernel pick them out, for a little more work.
      interpret: of ``pl.pallas_call``.
      chip: name in ``CHIPS`` whose blocks to use; None asks the device.
      blocks: ``(tokens, vocabulary)`` of a block, multiples of 128 of which the second divides 1024; None picks.

    Returns:
      The record of this shard, and the tokens' logits; of other shards' tokens anything.
    """
    units = Units(temperature, logit_soft_cap)
    unit = units.unit
    policies = _Policies(
        *(policy_hidden, policy_head, policy_bias, rollout_hidden, rollout_head, rollout_scale, rollout_bias),
        *(support, tokens),
    )
    picks = token_logits is None
    state, call = (STATE + 2 * picks, SUBLANES), (units, interpret, chip, blocks, picks)
    out = _sweep(statistics_kernel, policies, {}, 16, "divergence_statistics", state, *call)
    local = _local(tokens, policy_head.shape[0])
    logits = (logit_of_picked(out[SUMS]), logit_of_picked(out[SUMS + 1])) if token_logits is None else token_logits
    tops = out[0], out[4]
    here = [local & (logit != -jnp.inf) for logit in logits]
    near = near_top(tops[0], logits[0], unit) & near_top(tops[1], logits[1], unit)
    policy, rollout = (with_token(out[4 * i : 4 * i + 4], logits[i], here[i], near, unit) for i in range(2))
    seen = [top > UNSEEN for top in tops]
    reference = [jnp.where(part.top == -jnp.inf, 0.0, part.top) for part in (policy, rollout)]
    # In units, differences of two policies are exact near their references; the factor comes last.
    gaps = [jnp.where(s, top - r, 0.0) for s, top, r in zip(seen, tops, reference, strict=True)]
    shift = jnp.where(seen[0] & seen[1], unit * (gaps[0] - gaps[1]), 0.0)
    factor = jnp.exp(unit * jnp.where(seen[1], gaps[1], gaps[0]))

    both = here[0] & here[1]
    own_gaps = [jnp.where(h, z - r, 0.0) for h, z, r in zip(here, logits, reference, strict=True)]
    x = jnp.where(both, unit * (own_gaps[0] - own_gaps[1]) - shift, 0.0)
    weight = jnp.where(here[1], jnp.exp(unit * own_gaps[1]), 0.0)
    alone = jnp.exp(unit * own_gaps[0] - shift)
    # The rollout's weight may underflow where the policy's does not: a difference of the two, as in the sweep.
    far = here[0] & (~here[1] | (x > 1.0))
    own = jnp.where(far, alone - weight * (1.0 + x), weight * expm1_minus_identity(jnp.minimum(x, 1.0)))
    bans = None
    if policy_bias is not None or rollout_bias is not None:
        banned = here[1] & (~here[0] | (x < BANNED))
        others = Bans(out[10], out[11]).moved(factor, 0.0)
        own_ban = jnp.where(here[0], weight * (-1.0 - x), jnp.inf)
        bans = Bans(*(a + jnp.where(banned, b, 0.0) for a, b in zip(others, (weight, own_ban), strict=True)))
        own, x = (jnp.where(banned, 0.0, value) for value in (own, x))
    part = DivergencePartial(
        policy=policy,
        rollout=rollout,
        shift=shift,
        curvature=factor * out[8] + own,
        moment=factor * out[9] + weight * x,
        bans=bans,
    )
    return part, logits


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
    token_logits: tuple[Float[Array, " N"], Float[Array, " N"]],
    policy_top: Float[Array, " N"],
    policy_log_total: Float[Array, " N"],
    rollout_top: Float[Array, " N"],
    rollout_log_total: Float[Array, " N"],
    normaliser: Float[Array, " N"],
    *,
    temperature: float,
    logit_soft_cap: float | None = None,
    interpret: Any = False,
    chip: str | None = None,
    blocks: tuple[int, int] | None = None,
) -> Float[Array, " N"]:
    """This shard's addend to the total variation, in one sweep.

    Operands as for ``divergence_statistics``, and of the whole vocabulary: both tops, in units, both ``log_total`` and
    ``normaliser``, the accurate difference of the latter.
    """
    units = Units(temperature, logit_soft_cap)
    unit = units.unit
    policies = _Policies(
        *(policy_hidden, policy_head, policy_bias, rollout_hidden, rollout_head, rollout_scale, rollout_bias),
        *(support, tokens),
    )
    tops = [jnp.where(x == -jnp.inf, 0.0, x) for x in (policy_top, rollout_top)]
    rows = {
        "policy_top": row_of(tops[0]),
        "policy_total": row_of(policy_log_total / unit),
        "rollout_top": row_of(tops[1]),
        "rollout_total": row_of(rollout_log_total / unit),
        "normaliser": row_of(normaliser),
    }
    out = _sweep(tv_kernel, policies, rows, 1, "divergence_tv", (SUBLANES,), units, interpret, chip, blocks)[0]
    local = _local(tokens, policy_head.shape[0])
    gaps = [z - top for z, top in zip(token_logits, tops, strict=True)]
    p, q = jnp.exp(unit * gaps[0] - policy_log_total), jnp.exp(unit * gaps[1] - rollout_log_total)
    both = (token_logits[0] != -jnp.inf) & (token_logits[1] != -jnp.inf)
    d = jnp.where(both, unit * difference_of(*gaps) - normaliser, jnp.inf)
    own = jnp.where(jnp.abs(d) < _NEAR, q * jnp.abs(jnp.expm1(jnp.where(jnp.isinf(d), 0.0, d))), jnp.abs(p - q))
    return out + jnp.where(local, 0.5 * own, 0.0)
