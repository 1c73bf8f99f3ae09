"""Statistics of logits that are held: ``[rows, V]`` float32, before the temperature, ``-inf`` where there is no token.

Equal logits differ by exactly 0, which is asked of them before they are subtracted: the compiler may contract
``cap · a - cap · b`` into a fused multiply-add, whose two roundings differ. A sum over the vocabulary ends in a select:
the CPU compiler then makes its addends in one vectorised loop and sums them in another, much faster than fused.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax.numerics import expm1_minus_identity
from trm_jax.ops._partials import (
    EXPONENT_LIMIT,
    AxisName,
    DivergencePartial,
    SoftmaxPartial,
    TokenGap,
    difference_of,
    merge_divergence,
    normaliser_difference,
    sum_over,
)
from trm_jax.types import VocabDivergence

__all__ = ["divergence_of_rows", "softmax_of_rows", "token_of_rows"]


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


def _top_of_rows(logits: Array) -> Array:
    return jnp.max(logits, axis=-1, initial=-jnp.inf)


def softmax_of_rows(
    logits: Float[Array, "N V"], tokens: Int[Array, " N"], temperature: float
) -> tuple[SoftmaxPartial, TokenGap]:
    """Normaliser, mean and token of each row.

    The most likely tokens stay out of the sum that is added to 1, so that log-probs and entropies of nearly
    deterministic rows keep their relative accuracy.
    """
    top = _top_of_rows(logits)
    top = jnp.where(top == jnp.inf, jnp.nan, top)  # a softmax with an infinite logit is none
    empty = top == -jnp.inf
    finite_top = jnp.where(empty, 0.0, top)
    at_top = logits == finite_top[:, None]
    gap = jnp.where(at_top, 0.0, logits - finite_top[:, None]) / temperature
    unnormalised = jnp.exp(gap)
    rest = _sum(unnormalised, ~at_top)
    ties = jnp.sum(at_top, axis=-1, dtype=jnp.float32)
    log_total = jnp.log1p(jnp.where(empty, 0.0, rest + (ties - 1.0)))
    moment = _sum(unnormalised * gap, unnormalised > 0)
    token_gap = _difference(token_of_rows(logits, tokens), finite_top) / temperature
    part = SoftmaxPartial(top / temperature, log_total, moment / jnp.exp(log_total))
    return part, TokenGap(token_gap, _owned(logits, tokens))


def _probabilities(logits: Array, whole: SoftmaxPartial, temperature: float) -> Array:
    top = jnp.where(whole.top == -jnp.inf, 0.0, whole.top)
    return jnp.exp(logits / temperature - top[:, None] - whole.log_total[:, None])


def _sums_about_tops(
    policy: Array,
    rollout: Array,
    x: Array,
    both: Array | None,
    sides: tuple[SoftmaxPartial, SoftmaxPartial],
    t: float,
) -> DivergencePartial:
    """The record of held logits. Its curvature keeps ``u``, not the digits of KL: those come from ``_distances``."""
    shift, total = jnp.zeros_like(sides[0].top), jnp.exp(sides[1].log_total)
    weight = _probabilities(rollout, sides[1], t)
    ratio = weight * jnp.expm1(jnp.minimum(x, EXPONENT_LIMIT))
    if both is None:
        moment = _sum(weight * x, weight > 0)
        return DivergencePartial(*sides, shift, total * (_sum(ratio, weight > 0) - moment), total * moment, None)
    moment = _sum(weight * x, both)
    gained = jnp.exp(sides[0].log_total) * _sum(_probabilities(policy, sides[0], t), rollout == -jnp.inf)
    lost = total * _sum(weight, (policy == -jnp.inf) & (weight > 0))
    return DivergencePartial(*sides, shift, total * (_sum(ratio, both) - moment) + gained, total * moment, lost)


def _about_scaled_tops(
    policy: Array, rollout: Array, both: Array | None, sides: tuple[SoftmaxPartial, SoftmaxPartial], t: float
) -> Array:
    """Likewise, about tops that shards have merged: these have been divided already, and rounded by it.

    With a temperature, whose quotients round, ``(z_θ - z_roll) / t`` less the difference of the tops is the exact one
    as long as these are close.
    """
    if t == 1.0:
        return _about_tops(policy, rollout, both, (sides[0].top, sides[1].top), t)
    x = _difference(policy, rollout) / t - difference_of(sides[0].top, sides[1].top)[:, None]
    return x if both is None else jnp.where(both, x, 0.0)


def _about_tops(policy: Array, rollout: Array, both: Array | None, tops: tuple[Array, Array], t: float) -> Array:
    """``((z_θ - top_θ) - (z_roll - top_roll)) / t``: exact near the tops, however far apart these are."""
    one_sided = jnp.isinf(tops[0]) | jnp.isinf(tops[1])
    a, b = (jnp.where(one_sided, 0.0, top)[:, None] for top in tops)
    x = jnp.where((policy == rollout) & (a == b), 0.0, (policy - a) - (rollout - b)) / t
    return x if both is None else jnp.where(both, x, 0.0)


def _distances(
    policy: Array, rollout: Array, d: Array, both: Array | None, whole: DivergencePartial, t: float, with_tv: bool
) -> list[Array]:
    """``Σ π_roll (expm1(d) - d)`` and ``½ Σ π_roll |expm1 d|``; far tokens by the difference of probabilities."""
    weight = _probabilities(rollout, whole.rollout, t)
    near = d <= 1.0 if both is None else (d <= 1.0) & both
    safe = jnp.where(near, d, 0.0)
    gap = _probabilities(policy, whole.policy, t) - weight
    linear = weight * d if both is None else jnp.where(both, weight * d, 0.0)
    kl = jnp.sum(jnp.where(near, weight * expm1_minus_identity(safe), gap - linear), axis=-1)
    if both is not None:
        lost = jnp.any((rollout > -jnp.inf) & (policy == -jnp.inf), axis=-1)
        kl = jnp.where(lost, jnp.inf, kl)
    if not with_tv:
        return [kl]
    return [kl, 0.5 * jnp.sum(jnp.where(near, weight * jnp.abs(jnp.expm1(safe)), jnp.abs(gap)), axis=-1)]


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
    if allowed is None:
        policy, rollout = policy_logits, rollout_logits
    else:
        policy, rollout = (jnp.where(allowed, logits, -jnp.inf) for logits in (policy_logits, rollout_logits))
    (policy_part, policy_token), (rollout_part, rollout_token) = (
        softmax_of_rows(logits, tokens, temperature) for logits in (policy, rollout)
    )
    both = None
    if allowed is not None or ragged:
        both = ~((policy == -jnp.inf) | (rollout == -jnp.inf))  # NaN logits must still reach the result
    if axis is None:
        x = _about_tops(policy, rollout, both, (_top_of_rows(policy), _top_of_rows(rollout)), temperature)
    else:  # one value for every use: fused into a use, the division would be rounded as that use has it
        policy_part, rollout_part = jax.lax.optimization_barrier((policy_part, rollout_part))
        x = _about_scaled_tops(policy, rollout, both, (policy_part, rollout_part), temperature)
    part = _sums_about_tops(policy, rollout, x, both, (policy_part, rollout_part), temperature)
    whole, policy_logps, rollout_logps = merge_divergence(part, policy_token, rollout_token, axis)

    difference, _ = normaliser_difference(whole)
    if axis is not None:
        x = _about_scaled_tops(policy, rollout, both, (whole.policy, whole.rollout), temperature)
    d = x - difference[:, None]
    sums = _distances(policy, rollout, d, both, whole, temperature, with_tv)
    kl, *tv = sum_over(axis, jnp.stack(sums))
    undefined = jnp.isnan(difference)
    return VocabDivergence(
        policy_logps=policy_logps,
        rollout_logps=rollout_logps,
        token_kl=jnp.where(undefined, jnp.nan, jnp.maximum(kl, 0.0)),
        token_tv=jnp.where(undefined, jnp.nan, jnp.clip(tv[0], 0.0, 1.0)) if tv else None,
        policy_entropy=whole.policy.entropy,
        rollout_entropy=whole.rollout.entropy,
    )
