"""The seam between vocabulary shards: statistics of one shard's logits, merged over a mesh axis, and what follows.

Every implementation reduces the logits of the rows of the head it holds to the records of this module. With ``axis``
None they describe the whole vocabulary already; otherwise the shards of that mesh axis are merged: a shard weighs
``exp(top_s + log_total_s - logsumexp)``, the probability of its tokens. A merge is one ``pmax`` and one ``psum`` of
``[rows, N]``.

Maxima and the rest of the sum travel apart, because ``logsumexp`` alone has lost what the rest adds once it is below
the rounding of the largest logit: with them, entropies and log-probs of nearly deterministic rows keep their digits.

The divergence is a shifted cumulant. With ``x = (z_θ - top_θ) - (z_roll - top_roll) - shift``,
``c = E_roll[expm1(x) - x]``, ``b = E_roll[x]`` and ``u = E_roll[expm1 x] = c + b``

    ``log_total_θ - log_total_roll = shift + log1p(u)``  and  ``KL(π_roll ‖ π_θ) = log1p(u) - b = c - (u - log1p(u))``,

for any shift: ``c`` is a sum of non-negative terms and ``u - log1p(u)`` of second order, so that nothing of first order
cancels. Logits count from their tops, near which no difference rounds however far apart the tops are; with a shift of
0, ``x = 0`` at the most likely token, whichever token was sampled: a nearly deterministic row then has no large terms
at all. Equal operands give exactly 0.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.numerics import expm1_minus_identity

__all__ = [
    "BANNED",
    "AxisName",
    "Bans",
    "DivergencePartial",
    "SoftmaxPartial",
    "TokenGap",
    "difference_of",
    "divergence_of_sums",
    "max_over",
    "merge_divergence",
    "merge_softmax",
    "moved",
    "normaliser_difference",
    "softmax_of_sums",
    "sum_over",
]

AxisName: TypeAlias = str | tuple[str, ...] | None

BANNED = -30.0
"""Log-ratio ``x`` below which the policy all but bans a token, ``expm1(x) = -1``."""

_FAR_APART = 0.5
_LOST_MASS = 0.05
_SMALL_STEP = 0.1
_LARGE_CURVATURE = 16.0
_LARGE_SHIFT = 5.0
"""Mean log-ratios beyond it are left: policies that far apart have no small terms to keep."""


class SoftmaxPartial(NamedTuple):
    """One policy's logits over some rows of the head, float32; ``z = unit · r``.

    Tops stay as they were before the temperature, whose quotients round: near them, differences of ``r`` are exact.
    A row of tokens without any logit above ``-inf`` has ``(-inf, 0, 0)``; a NaN logit makes ``log_total`` NaN.

    Attributes:
      top: ``[N]`` largest ``r``, or another reference near it.
      log_total: ``[N]`` ``log Σ exp(z - unit · top)``.
      mean_gap: ``[N]`` ``E[z - unit · top]`` under the softmax of these rows.
    """

    top: Float[Array, " N"]
    log_total: Float[Array, " N"]
    mean_gap: Float[Array, " N"]

    def logsumexp(self, unit: float) -> Float[Array, " N"]:
        """``log Σ exp z``."""
        return unit * self.top + self.log_total

    @property
    def entropy(self) -> Float[Array, " N"]:
        """Of the softmax of these rows, nats; 0 for an empty one."""
        entropy = self.log_total - self.mean_gap
        return jnp.where(entropy < 0, 0.0, entropy)  # by rounding


class Bans(NamedTuple):
    """Sums over the tokens that the policy bans, by ``x < -30`` or altogether, as in ``DivergencePartial``.

    They have terms of their own: beside ``-Σ q x`` of a ban, ``Σ q expm1(x)`` would lose the digits that TV needs.

    Attributes:
      mass: ``[N]`` ``Σ exp(z_roll - top_roll)``.
      curvature: ``[N]`` ``Σ exp(z_roll - top_roll) (expm1(x) - x)``; ``+inf`` where only the rollout has a token.
    """

    mass: Float[Array, " N"]
    curvature: Float[Array, " N"]

    def moved(self, rollout_factor: Array, step: Array | float) -> Bans:
        """About other tops and another shift, as in ``moved``; an infinite one stays, whatever its weight is there."""
        curvature = rollout_factor * (self.curvature + step * self.mass)
        return Bans(rollout_factor * self.mass, jnp.where(self.curvature == jnp.inf, jnp.inf, curvature))


class DivergencePartial(NamedTuple):
    """Both policies' logits over some rows of the head, float32; ``x = (z_θ - top_θ) - (z_roll - top_roll) - shift``,
    the tops in logits here.

    The sums are in units of ``exp(top_roll)``; in units of ``exp(top_θ)`` where the rollout has none of these rows.

    Attributes:
      policy: statistics of ``z_θ``.
      rollout: statistics of ``z_roll``.
      shift: ``[N]`` small; 0 where either has none of these rows.
      curvature: ``[N]`` ``Σ exp(z_roll - top_roll) (expm1(x) - x)``; a token that only the policy has adds
        ``exp(z_θ - top_θ - shift)``, one that the policy bans nothing.
      moment: ``[N]`` ``Σ exp(z_roll - top_roll) x`` over the tokens that both have, but what the policy bans.
      bans: what the policy bans; None where no bias may.
    """

    policy: SoftmaxPartial
    rollout: SoftmaxPartial
    shift: Float[Array, " N"]
    curvature: Float[Array, " N"]
    moment: Float[Array, " N"]
    bans: Bans | None

    @property
    def growth(self) -> Float[Array, " N"]:
        """``u = E_roll[expm1 x]``."""
        gained = self.curvature + self.moment
        return (gained if self.bans is None else gained - self.bans.mass) * jnp.exp(-self.rollout.log_total)


def moved(
    curvature: Array,
    moment: Array,
    total: Array,
    grown: Array,
    policy_factor: Array,
    rollout_factor: Array,
    step: Array,
) -> tuple[Array, Array]:
    """``(curvature, moment)`` about other tops and a shift that is larger by ``step``.

    A curvature that is more than all of the policy's mass has lost what is less than its rounding; it is
    ``grown - total - moment`` too, about the others.

    Args:
      curvature: as in ``DivergencePartial``; ``moment`` too.
      total: ``Σ exp(z_roll - top_roll)`` over the tokens that both have.
      grown: ``Σ exp(z_roll - top_roll) exp(x)``, the policy's mass, about the other tops and shift.
      policy_factor: ``exp(-step) · rollout_factor``.
      rollout_factor: ``exp(old top_roll - new top_roll)``.
      step: new shift less the old one; finite, and 0 where there is no ``total``.
    """
    small = jnp.abs(step) < _SMALL_STEP
    s = jnp.where(small, -step, 0.0)
    second = s * s * (0.5 + s * (1 / 6 + s * (1 / 24 + s * (1 / 120))))  # expm1(s) - s, to 3e-7 of it
    kept, rest = rollout_factor * total, rollout_factor * moment
    drift = step * kept
    near = second * kept + (s + second) * rest
    far = (policy_factor - rollout_factor) * (total + moment) + drift
    scaled = policy_factor * curvature
    curvature = jnp.where(scaled > grown, grown - (kept + (rest - drift)), scaled + jnp.where(small, near, far))
    return curvature, rest - drift


def max_over(axis: AxisName, values: Array) -> Array:
    """Largest over the shards of a mesh axis; the values themselves without one.

    A constant for derivatives: what is counted from it does not depend on it (and ``pmax`` has none).
    """
    return values if axis is None else jax.lax.pmax(jax.lax.stop_gradient(values), axis)


def sum_over(axis: AxisName, values: Array) -> Array:
    """Sum over the shards of a mesh axis; the values themselves without one."""
    return values if axis is None else jax.lax.psum(values, axis)


def _weighted(mass: Array, values: Array) -> Array:
    """``mass · values``, 0 where there is no mass, whatever the value; NaN mass stays NaN."""
    return jnp.where(mass > 0, mass * values, 0.0 * mass)


class TokenGap(NamedTuple):
    """Where each row's own token stands in a shard.

    Attributes:
      gap: ``[N]`` ``z_y - unit · top``; ``-inf`` for a token that the head has not; anything in another's shard.
      owned: ``[N]`` whether this shard holds the token.
    """

    gap: Float[Array, " N"]
    owned: Bool[Array, " N"]


def _addends(part: SoftmaxPartial, token: TokenGap, top: Array, unit: float) -> tuple[Array, list[Array]]:
    """This shard's mass in units of ``exp(top)``; what it adds to the sums of ``softmax_of_sums``, and to the gap."""
    gap = unit * (part.top - jnp.where(top == -jnp.inf, 0.0, top))
    mass = jnp.exp(gap + part.log_total)
    at_top = (part.top == top) & (top > -jnp.inf)
    rest = jnp.where(at_top, jnp.expm1(gap + part.log_total), mass)
    moment = _weighted(mass, jnp.where(mass == 0, 0.0, gap + part.mean_gap))
    return mass, [at_top.astype(jnp.float32), rest, moment, jnp.where(token.owned, token.gap + gap, 0.0)]


def softmax_of_sums(top: Array, at_top: Array, rest: Array, moment: Array) -> SoftmaxPartial:
    """The record of a softmax.

    Args:
      top: ``[N]``.
      at_top: how often it occurs, by tokens or by shards.
      rest: ``Σ exp(z - top)`` of all else.
      moment: ``Σ exp(z - top) (z - top)``.
    """
    log_total = jnp.log1p(jnp.where(top == -jnp.inf, 0.0 * rest, rest + (at_top - 1.0)))
    return SoftmaxPartial(top, log_total, moment / jnp.exp(log_total))


def merge_softmax(
    part: SoftmaxPartial, token: TokenGap, unit: float, axis: AxisName
) -> tuple[SoftmaxPartial, Float[Array, " N"]]:
    """Statistics of the whole vocabulary and the tokens' log-probs; 20 bytes a token travel over ``axis``."""
    if axis is None:
        return part, token.gap - part.log_total
    top = max_over(axis, part.top)
    _, addends = _addends(part, token, top, unit)
    *sums, token_gap = jax.lax.psum(jnp.stack(addends), axis)
    whole = softmax_of_sums(top, *sums)
    return whole, token_gap - whole.log_total


def difference_of(a: Array, b: Array) -> Array:
    """``a - b``, exactly 0 where equal, also if the compiler fuses products into the subtraction; 0 where not finite.

    NaN stays.
    """
    return jnp.where((a == b) | jnp.isinf(a) | jnp.isinf(b), 0.0, a - b)


def merge_divergence(
    part: DivergencePartial, policy_token: TokenGap, rollout_token: TokenGap, unit: float, axis: AxisName
) -> tuple[DivergencePartial, Float[Array, " N"], Float[Array, " N"]]:
    """Statistics of the whole vocabulary and both policies' log-probs of the tokens.

    The shift becomes ``E_roll[x]``: where a top has moved alone, the mass about ``x = 0`` keeps its digits. 56 bytes a
    token travel over ``axis``, 64 when the two supports can differ.
    """
    if axis is None:
        policy_logps, rollout_logps = (
            token.gap - side.log_total for token, side in ((policy_token, part.policy), (rollout_token, part.rollout))
        )
        return part, policy_logps, rollout_logps
    tops = max_over(axis, jnp.stack([part.policy.top, part.rollout.top]))
    _, policy_addends = _addends(part.policy, policy_token, tops[0], unit)
    _, rollout_addends = _addends(part.rollout, rollout_token, tops[1], unit)

    one_sided = jnp.isneginf(part.policy.top) | jnp.isneginf(part.rollout.top)
    rollout_gap, policy_gap = (
        jnp.where(jnp.isneginf(top), 0.0, side.top - top)
        for side, top in ((part.rollout, tops[1]), (part.policy, tops[0]))
    )
    step = jnp.where(one_sided, 0.0, unit * difference_of(rollout_gap, policy_gap) - part.shift)
    rollout_factor = jnp.exp(unit * rollout_gap)
    total = jnp.exp(part.rollout.log_total) - (0.0 if part.bans is None else part.bans.mass)
    total = jnp.where(one_sided, 0.0, total)
    moment, mass = jax.lax.psum(rollout_factor[None] * jnp.stack([part.moment - step * total, total]), axis)
    mean = moment / jnp.where(mass > 0, mass, 1.0)
    shift = jnp.where(jnp.abs(mean) < _LARGE_SHIFT, mean, 0.0)
    step = jnp.where(one_sided, 0.0, step + shift)
    gap = jnp.where(jnp.isneginf(part.rollout.top), unit * policy_gap - shift, unit * rollout_gap - step)
    policy_factor = jnp.exp(gap)
    grown = jnp.where(jnp.isneginf(part.policy.top), 0.0, policy_factor * jnp.exp(part.policy.log_total - part.shift))
    expectations = [*moved(part.curvature, part.moment, total, grown, policy_factor, rollout_factor, step)]
    if part.bans is not None:
        expectations += part.bans.moved(rollout_factor, step)
    sums = jax.lax.psum(jnp.stack([*policy_addends, *rollout_addends, *expectations]), axis)
    policy, rollout = softmax_of_sums(tops[0], *sums[0:3]), softmax_of_sums(tops[1], *sums[4:7])
    bans = None if part.bans is None else Bans(sums[10], sums[11])
    whole = DivergencePartial(policy, rollout, shift, sums[8], sums[9], bans)
    return whole, sums[3] - policy.log_total, sums[7] - rollout.log_total


def normaliser_difference(
    policy: SoftmaxPartial, rollout: SoftmaxPartial, growth: Float[Array, " N"], shift: Float[Array, " N"] | float = 0.0
) -> tuple[Float[Array, " N"], Bool[Array, " N"]]:
    """``log_total_θ - log_total_roll - shift`` of the whole vocabulary, and where it is not ``log1p(u)``; NaN at NaN.

    ``log1p`` of the growth ``u``, and the plain difference of normalisers for policies so far apart that it no longer
    cancels, or where ``u`` misses mass whose rollout probability underflowed.
    """
    none = jnp.isneginf(policy.top) | jnp.isneginf(rollout.top)
    plain = jnp.where(none, 0.0, (policy.log_total - rollout.log_total) - shift)
    close = jnp.log1p(jnp.clip(growth, -_FAR_APART, _FAR_APART))
    far = (jnp.abs(growth) >= _FAR_APART) | (jnp.abs(close - plain) > _LOST_MASS)
    difference = jnp.where(far, plain, close)
    return jnp.where(jnp.isnan(growth) | jnp.isnan(plain), jnp.nan, difference), far


def divergence_of_sums(whole: DivergencePartial) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """``(log_total_θ - log_total_roll - shift, KL)`` of a merged record; NaN at NaN logits.

    KL is ``+inf`` where the rollout has a token that the policy has not, 0 where it has none at all.
    """
    scale = jnp.exp(-whole.rollout.log_total)
    # Beside a large curvature the moment, minus nearly as much, has lost the digits of u.
    growth = jnp.where(scale * whole.curvature > _LARGE_CURVATURE, jnp.inf, whole.growth)
    difference, far = normaliser_difference(whole.policy, whole.rollout, growth, whole.shift)
    near = scale * whole.curvature - expm1_minus_identity(jnp.where(far, 0.0, difference))
    kl = jnp.where(far, difference - scale * whole.moment, near)
    if whole.bans is not None:
        mass, curvature = whole.bans
        kl = jnp.where(curvature == jnp.inf, jnp.inf, kl + scale * (curvature + jnp.where(far, mass, 0.0)))
    kl = jnp.where(jnp.isneginf(whole.rollout.top), 0.0, jnp.maximum(kl, 0.0))
    return difference, jnp.where(jnp.isnan(difference), jnp.nan, kl)
