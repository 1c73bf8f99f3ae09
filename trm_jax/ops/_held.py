"""Statistics of logits that are held: ``[rows, V]`` float32, before the temperature, ``-inf`` where there is no token.

Equal logits differ by exactly 0, which is asked of them before they are subtracted: the compiler may contract
``cap · a - cap · b`` into a fused multiply-add, whose two roundings differ. A sum over the vocabulary ends in a select:
the CPU compiler then makes its addends in one vectorised loop and sums them in another, much faster than fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax.divergences import difference_about_tops, total_variation_of_sums
from trm_jax.numerics import expm1_minus_identity
from trm_jax.ops._partials import (
    AxisName,
    SoftmaxPartial,
    TokenGap,
    max_over,
    normaliser_difference,
    softmax_of_sums,
    sum_over,
)
from trm_jax.types import VocabDivergence

__all__ = ["divergence_of_rows", "softmax_of_rows", "token_of_rows"]


_NO_WEIGHT = -1e4
"""A gap (no multiple of -inf) whose exponential is 0."""


def _sum(values: Array, where: Array) -> Array:
    return jnp.sum(jnp.where(where, values, 0.0), axis=-1)


def _difference(a: Array, b: Array) -> Array:
    return jnp.where(a == b, 0.0, a - b)


def token_of_rows(logits: Float[Array, "N V"], tokens: Int[Array, " N"]) -> Float[Array, " N"]:
    """Each row's logit of its token; of the nearest one when the token is in another shard."""
    ids = jnp.clip(tokens, 0, logits.shape[-1] - 1)[:, None].astype(jnp.int32)
    return jnp.take_along_axis(logits, ids, axis=-1)[:, 0]


def _owned(logits: Array, tokens: Array) -> Array:
    return (tokens >= 0) & (tokens < logits.shape[-1])


class _Policy(NamedTuple):
    """One policy's logits of this shard, and the largest of all shards.

    Attributes:
      logits: ``[N, V]``.
      top: ``[N]`` of the whole vocabulary, before the temperature; NaN where it is infinite.
      gap: ``[N, V]`` ``(logits - top) / temperature``, near 0 exact.
    """

    logits: Float[Array, "N V"]
    top: Float[Array, " N"]
    gap: Float[Array, "N V"]


def _policies(logits: Sequence[Float[Array, "N V"]], temperature: float, axis: AxisName) -> list[_Policy]:
    tops = max_over(axis, jnp.stack([jnp.max(z, axis=-1, initial=-jnp.inf) for z in logits]))
    tops = jnp.where(tops == jnp.inf, jnp.nan, tops)  # a softmax with an infinite logit is none
    reference = jnp.where(tops == -jnp.inf, 0.0, tops)[..., None]
    return [
        _Policy(z, top, _difference(z, about) / temperature)
        for z, top, about in zip(logits, tops, reference, strict=True)
    ]


def _sums(policy: _Policy, tokens: Int[Array, " N"], temperature: float) -> list[Array]:
    """What ``softmax_of_sums`` takes, of this shard.

    The most likely tokens stay out of the sum that is added to 1, so that log-probs and entropies of nearly
    deterministic rows keep their relative accuracy.
    """
    weight, at_top = jnp.exp(policy.gap), policy.gap == 0
    ties = jnp.sum(at_top, axis=-1, dtype=jnp.float32)
    moment = _sum(weight * jnp.maximum(policy.gap, _NO_WEIGHT), weight > 0)  # a derivative of 0 · -inf would be NaN
    reference = jnp.where(policy.top == -jnp.inf, 0.0, policy.top)
    token_gap = _difference(token_of_rows(policy.logits, tokens), reference) / temperature
    return [ties, _sum(weight, ~at_top), moment, jnp.where(_owned(policy.logits, tokens), token_gap, 0.0)]


def softmax_of_rows(
    logits: Float[Array, "N V"], tokens: Int[Array, " N"], temperature: float
) -> tuple[SoftmaxPartial, TokenGap]:
    """Normaliser, mean and token of each row of this shard."""
    (policy,) = _policies([logits], temperature, None)
    *sums, token_gap = _sums(policy, tokens, temperature)
    return softmax_of_sums(policy.top, *sums), TokenGap(token_gap, _owned(logits, tokens))


def _growth(policy: _Policy, rollout: _Policy, x: Array, both: Array | None) -> Array:
    """This shard's addend to ``Σ π_roll expm1(x)``, in units of the rollout's top."""
    weight = jnp.exp(rollout.gap)
    # A weight may have underflowed where the policy's has not: far tokens count by the difference of the two.
    ratio = jnp.where(x <= 1.0, weight * jnp.expm1(jnp.minimum(x, 1.0)), jnp.exp(policy.gap) - weight)
    if both is None:
        return _sum(ratio, (weight > 0) | (x > 1.0))
    gained = _sum(jnp.exp(policy.gap), rollout.logits == -jnp.inf)
    return _sum(ratio, both) + gained - _sum(weight, (policy.logits == -jnp.inf) & (weight > 0))


def _log_ratio(policy: _Policy, rollout: _Policy, temperature: float, both: Array | None) -> Array:
    """``((z_θ - top_θ) - (z_roll - top_roll)) / t``: exact near the tops, however far apart these are, and between
    logits that are close."""
    one_sided = jnp.isinf(policy.top) | jnp.isinf(rollout.top)
    policy_top, rollout_top = (jnp.where(one_sided, 0.0, side.top) for side in (policy, rollout))
    x = difference_about_tops(policy.logits, rollout.logits, policy_top, rollout_top) / temperature
    return x if both is None else jnp.where(both, x, 0.0)


def _distances(
    sides: Sequence[tuple[_Policy, SoftmaxPartial]], d: Array, both: Array | None, with_tv: bool
) -> list[Array]:
    """``Σ π_roll (expm1(d) - d)`` and, for TV, ``Σ |t|``, ``Σ t`` and ``Σ ± π_θ`` of ``t = π_roll expm1 d``.

    Far tokens count by the difference of probabilities.
    """
    probability, weight = (jnp.exp(side.gap - whole.log_total[:, None]) for side, whole in sides)
    near = d <= 1.0 if both is None else (d <= 1.0) & both
    safe = jnp.where(near, d, 0.0)
    gap = probability - weight
    linear = weight * d if both is None else jnp.where(both, weight * d, 0.0)
    kl = jnp.sum(jnp.where(near, weight * expm1_minus_identity(safe), gap - linear), axis=-1)
    if both is not None:
        policy, rollout = (side.logits for side, _ in sides)
        lost = jnp.any((rollout > -jnp.inf) & (policy == -jnp.inf), axis=-1)
        kl = jnp.where(lost, jnp.inf, kl)
    if not with_tv:
        return [kl]
    terms = jnp.where(near, weight * jnp.expm1(safe), gap)
    slope = _sum(jnp.sign(terms) * (weight + terms), near)
    return [kl, jnp.sum(jnp.abs(terms), axis=-1), jnp.sum(terms, axis=-1), slope]


def divergence_of_rows(
    policy_logits: Float[Array, "N V"],
    rollout_logits: Float[Array, "N V"],
    tokens: Int[Array, " N"],
    allowed: Bool[Array, "N V"] | None,
    *,
    temperature: float,
    ragged: bool,
    with_tv: bool,
    axis: AxisName,
) -> VocabDivergence:
    """Both policies of each row, merged over the shards of ``axis``.

    KL is a sum of non-negative terms about the centred log-ratio ``d = x - log1p u``: the logits are at hand, and it is
    two digits better than the cumulant ``log1p(u) - b``.

    Args:
      policy_logits: ``[N, V]`` of this shard.
      rollout_logits: likewise.
      tokens: ids counted from this shard's first row; others belong to other shards.
      allowed: the support, applied to both.
      temperature: of both.
      ragged: logits may be ``-inf`` on one side only.
      with_tv: also the total variation.
      axis: mesh axis over which the vocabulary is sharded.
    """
    logits = [policy_logits, rollout_logits]
    if allowed is not None:
        logits = [jnp.where(allowed, z, -jnp.inf) for z in logits]
    policy, rollout = _policies(logits, temperature, axis)
    both = None
    if allowed is not None or ragged:  # NaN logits must still reach the result
        both = ~((policy.logits == -jnp.inf) | (rollout.logits == -jnp.inf))
    x = _log_ratio(policy, rollout, temperature, both)
    addends = [*_sums(policy, tokens, temperature), *_sums(rollout, tokens, temperature)]
    sums = sum_over(axis, jnp.stack([*addends, _growth(policy, rollout, x, both)]))
    whole = softmax_of_sums(policy.top, *sums[0:3]), softmax_of_sums(rollout.top, *sums[4:7])
    difference, _ = normaliser_difference(*whole, sums[8] * jnp.exp(-whole[1].log_total))
    sides = list(zip((policy, rollout), whole, strict=True))
    kl, *tv = sum_over(axis, jnp.stack(_distances(sides, x - difference[:, None], both, with_tv)))
    kl = jnp.where(jnp.isneginf(rollout.top), 0.0, kl)  # no token that the rollout could sample
    undefined = jnp.isnan(difference)
    return VocabDivergence(
        policy_logps=sums[3] - whole[0].log_total,
        rollout_logps=sums[7] - whole[1].log_total,
        token_kl=jnp.where(undefined, jnp.nan, jnp.maximum(kl, 0.0)),
        token_tv=jnp.where(undefined, jnp.nan, total_variation_of_sums(*tv)) if tv else None,
        policy_entropy=whole[0].entropy,
        rollout_entropy=whole[1].entropy,
    )
