"""The seam between vocabulary shards: statistics of one shard's logits, merged over a mesh axis, and what follows.

Every implementation reduces the logits of the rows of the head it holds to the records of this module. With ``axis``
None they describe the whole vocabulary already; otherwise the shards of that mesh axis are merged: a shard weighs
``exp(top_s + log_total_s - logsumexp)``, the probability of its tokens. A merge is one ``pmax`` and one ``psum`` of
``[rows, N]``.

Maxima and the rest of the sum travel apart, because ``logsumexp`` alone has lost what the rest adds once it is below
the rounding of the largest logit: with them, entropies and log-probs of nearly deterministic rows keep their digits.

The divergence is a shifted cumulant. With ``x = (z_θ - z_roll) - shift``, ``u = E_roll[expm1 x]``, ``b = E_roll[x]``

    ``logsumexp_θ - logsumexp_roll = shift + log1p(u)``  and  ``KL(π_roll ‖ π_θ) = log1p(u) - b``,

for any shift; ``z_θ[y] - z_roll[y]`` of the sampled token keeps ``u`` small. Equal operands give exactly 0.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = [
    "EXPONENT_LIMIT",
    "AxisName",
    "DivergencePartial",
    "SoftmaxPartial",
    "merge_divergence",
    "merge_softmax",
    "normaliser_difference",
    "sum_over",
]

AxisName: TypeAlias = str | tuple[str, ...] | None

EXPONENT_LIMIT = 60.0
"""``x`` is cut here before ``expm1``: far-apart policies do not use ``u``, and it must not overflow."""

_FAR_APART = 0.5
_LOST_MASS = 0.05


class SoftmaxPartial(NamedTuple):
    """One policy's logits over some rows of the head, float32.

    A row of tokens without any logit above ``-inf`` has ``(-inf, 0, 0)``; a NaN logit makes ``log_total`` NaN.

    Attributes:
      top: ``[N]`` largest logit.
      log_total: ``[N]`` ``log Σ exp(z - top)``, at least 0.
      mean_gap: ``[N]`` ``E[z - top]`` under the softmax of these rows, at most 0.
    """

    top: Float[Array, " N"]
    log_total: Float[Array, " N"]
    mean_gap: Float[Array, " N"]

    @property
    def logsumexp(self) -> Float[Array, " N"]:
        """``log Σ exp z``."""
        return self.top + self.log_total

    @property
    def entropy(self) -> Float[Array, " N"]:
        """Of the softmax of these rows, nats; 0 for an empty one."""
        return self.log_total - self.mean_gap


class DivergencePartial(NamedTuple):
    """Both policies' logits over some rows of the head, float32; expectations are over the rollout's softmax of them.

    Attributes:
      policy: statistics of ``z_θ``.
      rollout: statistics of ``z_roll``.
      growth: ``[N]`` ``u = E_roll[expm1(min(x, EXPONENT_LIMIT))]``; a token that only the rollout has adds -1 times its
        probability; 0 when the rollout has none of these rows.
      mean_shift: ``[N]`` ``b = E_roll[x]``; ``-inf`` when the rollout has a token that the policy has not.
      uncovered: ``[N]`` probability, under the policy's softmax of these rows, of tokens that the rollout has not.
    """

    policy: SoftmaxPartial
    rollout: SoftmaxPartial
    growth: Float[Array, " N"]
    mean_shift: Float[Array, " N"]
    uncovered: Float[Array, " N"]


def sum_over(axis: AxisName, values: Array) -> Array:
    """Sum over the shards of a mesh axis; the values themselves without one."""
    return values if axis is None else jax.lax.psum(values, axis)


def _weighted(mass: Array, values: Array) -> Array:
    """``mass · values``, 0 where there is no mass, whatever the value; NaN mass stays NaN."""
    return jnp.where(mass > 0, mass * values, 0.0 * mass)


def _addends(part: SoftmaxPartial, top: Array) -> tuple[Array, list[Array]]:
    """This shard's mass in units of ``exp(top)``, and its addends to the total's parts and to ``E[z - top]``."""
    gap = part.top - jnp.where(top == -jnp.inf, 0.0, top)
    mass = jnp.exp(gap + part.log_total)
    at_top = (part.top == top) & (top > -jnp.inf)
    rest = jnp.where(at_top, jnp.expm1(part.log_total), mass)
    return mass, [at_top.astype(jnp.float32), rest, _weighted(mass, gap + part.mean_gap)]


def _total(top: Array, at_top: Array, rest: Array, moment: Array) -> tuple[SoftmaxPartial, Array]:
    """The merged record and the total in units of ``exp(top)`` (1 for a row without any token)."""
    empty = top == -jnp.inf
    excess = jnp.where(empty, 0.0 * rest, rest + (at_top - 1.0))
    total = 1.0 + excess
    return SoftmaxPartial(top, jnp.log1p(excess), moment / total), total


def merge_softmax(part: SoftmaxPartial, axis: AxisName) -> SoftmaxPartial:
    """Statistics of the whole vocabulary from those of the shards on ``axis``; 16 bytes a token."""
    if axis is None:
        return part
    top = jax.lax.pmax(part.top, axis)
    _, addends = _addends(part, top)
    return _total(top, *jax.lax.psum(jnp.stack(addends), axis))[0]


def merge_divergence(part: DivergencePartial, axis: AxisName) -> DivergencePartial:
    """Statistics of the whole vocabulary from those of the shards on ``axis``; 44 bytes a token."""
    if axis is None:
        return part
    tops = jax.lax.pmax(jnp.stack([part.policy.top, part.rollout.top]), axis)
    policy_mass, policy_addends = _addends(part.policy, tops[0])
    rollout_mass, rollout_addends = _addends(part.rollout, tops[1])
    expectations = [
        _weighted(rollout_mass, part.growth),
        _weighted(rollout_mass, part.mean_shift),
        _weighted(policy_mass, part.uncovered),
    ]
    sums = jax.lax.psum(jnp.stack([*policy_addends, *rollout_addends, *expectations]), axis)
    policy, policy_total = _total(tops[0], *sums[0:3])
    rollout, rollout_total = _total(tops[1], *sums[3:6])
    return DivergencePartial(policy, rollout, sums[6] / rollout_total, sums[7] / rollout_total, sums[8] / policy_total)


def normaliser_difference(whole: DivergencePartial, shift: Float[Array, " N"]) -> Float[Array, " N"]:
    """``logsumexp_θ - logsumexp_roll - shift`` of a merged record, so that ``KL = difference - mean_shift``.

    ``log1p(u)`` corrected for policy mass outside the rollout's support; the plain difference for policies so far apart
    that it no longer cancels, or where ``u`` misses mass whose rollout probability underflowed. NaN at NaN logits.
    """
    policy, rollout = whole.policy, whole.rollout
    plain = (policy.top - rollout.top) + (policy.log_total - rollout.log_total)
    plain = jnp.where(jnp.isneginf(policy.top) | jnp.isneginf(rollout.top), 0.0, plain) - shift
    covered = jnp.log1p(-jnp.minimum(whole.uncovered, _FAR_APART))
    close = jnp.log1p(jnp.clip(whole.growth, -_FAR_APART, _FAR_APART)) - covered
    far = (
        (jnp.abs(whole.growth) >= _FAR_APART) | (whole.uncovered >= _FAR_APART) | (jnp.abs(close - plain) > _LOST_MASS)
    )
    difference = jnp.where(far, plain, close)
    return jnp.where(jnp.isnan(whole.growth) | jnp.isnan(plain), jnp.nan, difference)
