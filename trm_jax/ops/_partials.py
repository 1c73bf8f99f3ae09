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
from jaxtyping import Array, Bool, Float

__all__ = [
    "EXPONENT_LIMIT",
    "AxisName",
    "DivergencePartial",
    "SoftmaxPartial",
    "TokenGap",
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
      uncovered: ``[N]`` probability, under the policy's softmax of these rows, of tokens that the rollout has not; None
        where there are none, or where ``growth`` contains it.
    """

    policy: SoftmaxPartial
    rollout: SoftmaxPartial
    growth: Float[Array, " N"]
    mean_shift: Float[Array, " N"]
    uncovered: Float[Array, " N"] | None


def sum_over(axis: AxisName, values: Array) -> Array:
    """Sum over the shards of a mesh axis; the values themselves without one."""
    return values if axis is None else jax.lax.psum(values, axis)


def _weighted(mass: Array, values: Array) -> Array:
    """``mass · values``, 0 where there is no mass, whatever the value; NaN mass stays NaN."""
    return jnp.where(mass > 0, mass * values, 0.0 * mass)


class TokenGap(NamedTuple):
    """Where each row's own token stands in a shard.

    Attributes:
      gap: ``[N]`` ``z_y - top``; ``-inf`` for a token that the head has not; anything when another shard holds it.
      owned: ``[N]`` whether this shard holds the token.
    """

    gap: Float[Array, " N"]
    owned: Bool[Array, " N"]


def _addends(part: SoftmaxPartial, token: TokenGap, top: Array) -> tuple[Array, list[Array]]:
    """This shard's mass in units of ``exp(top)``, and what it adds to the sums that ``_total`` takes."""
    gap = part.top - jnp.where(top == -jnp.inf, 0.0, top)
    mass = jnp.exp(gap + part.log_total)
    at_top = (part.top == top) & (top > -jnp.inf)
    rest = jnp.where(at_top, jnp.expm1(part.log_total), mass)
    moment = _weighted(mass, gap + part.mean_gap)
    return mass, [at_top.astype(jnp.float32), rest, moment, jnp.where(token.owned, token.gap + gap, 0.0)]


def _total(top: Array, at_top: Array, rest: Array, moment: Array, token_gap: Array) -> tuple[SoftmaxPartial, Array]:
    """The merged record and the log-probs."""
    log_total = jnp.log1p(jnp.where(top == -jnp.inf, 0.0 * rest, rest + (at_top - 1.0)))
    return SoftmaxPartial(top, log_total, moment / jnp.exp(log_total)), token_gap - log_total


def merge_softmax(part: SoftmaxPartial, token: TokenGap, axis: AxisName) -> tuple[SoftmaxPartial, Float[Array, " N"]]:
    """Statistics of the whole vocabulary and the tokens' log-probs; 20 bytes a token travel over ``axis``."""
    if axis is None:
        return part, token.gap - part.log_total
    top = jax.lax.pmax(part.top, axis)
    _, addends = _addends(part, token, top)
    return _total(top, *jax.lax.psum(jnp.stack(addends), axis))


def merge_divergence(
    part: DivergencePartial, policy_token: TokenGap, rollout_token: TokenGap, axis: AxisName
) -> tuple[DivergencePartial, Float[Array, " N"], Float[Array, " N"]]:
    """Statistics of the whole vocabulary and both policies' log-probs of the tokens.

    48 bytes a token travel over ``axis``, 52 when the two supports can differ.
    """
    if axis is None:
        policy_logps, rollout_logps = (
            token.gap - side.log_total for token, side in ((policy_token, part.policy), (rollout_token, part.rollout))
        )
        return part, policy_logps, rollout_logps
    tops = jax.lax.pmax(jnp.stack([part.policy.top, part.rollout.top]), axis)
    policy_mass, policy_addends = _addends(part.policy, policy_token, tops[0])
    rollout_mass, rollout_addends = _addends(part.rollout, rollout_token, tops[1])
    expectations = [_weighted(rollout_mass, part.growth), _weighted(rollout_mass, part.mean_shift)]
    if part.uncovered is not None:
        expectations.append(_weighted(policy_mass, part.uncovered))
    sums = jax.lax.psum(jnp.stack([*policy_addends, *rollout_addends, *expectations]), axis)
    policy, policy_logps = _total(tops[0], *sums[0:4])
    rollout, rollout_logps = _total(tops[1], *sums[4:8])
    policy_total, rollout_total = jnp.exp(policy.log_total), jnp.exp(rollout.log_total)
    uncovered = None if part.uncovered is None else sums[10] / policy_total
    whole = DivergencePartial(policy, rollout, sums[8] / rollout_total, sums[9] / rollout_total, uncovered)
    return whole, policy_logps, rollout_logps


def normaliser_difference(whole: DivergencePartial, shift: Float[Array, " N"]) -> Float[Array, " N"]:
    """``logsumexp_θ - logsumexp_roll - shift`` of a merged record, so that ``KL = difference - mean_shift``.

    ``log1p(u)`` corrected for policy mass outside the rollout's support; the plain difference for policies so far apart
    that it no longer cancels, or where ``u`` misses mass whose rollout probability underflowed. NaN at NaN logits.
    """
    policy, rollout = whole.policy, whole.rollout
    plain = (policy.top - rollout.top) + (policy.log_total - rollout.log_total)
    plain = jnp.where(jnp.isneginf(policy.top) | jnp.isneginf(rollout.top), 0.0, plain) - shift
    uncovered = jnp.zeros_like(plain) if whole.uncovered is None else whole.uncovered
    covered = jnp.log1p(-jnp.minimum(uncovered, _FAR_APART))
    close = jnp.log1p(jnp.clip(whole.growth, -_FAR_APART, _FAR_APART)) - covered
    apart = jnp.maximum(jnp.abs(whole.growth), uncovered) >= _FAR_APART
    far = apart | (jnp.abs(close - plain) > _LOST_MASS)
    difference = jnp.where(far, plain, close)
    return jnp.where(jnp.isnan(whole.growth) | jnp.isnan(plain), jnp.nan, difference)
