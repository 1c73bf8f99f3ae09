"""The kernels' form: one sweep over the head for everything but the total variation, a second sweep for that.

Between them the statistics of the shards are merged; no logit outlives its block.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._head import Head, Scaling
from trm_jax.ops._operands import lies_turned
from trm_jax.ops._partials import (
    AxisName,
    DivergencePartial,
    divergence_of_sums,
    merge_divergence,
    sum_over,
)
from trm_jax.ops._tiles import Units
from trm_jax.ops._token import token_gap, token_logits
from trm_jax.ops.linear_vocab_divergence._pallas_tpu import divergence_statistics, divergence_tv
from trm_jax.ops.linear_vocab_divergence._references import short_references
from trm_jax.types import VocabDivergence

__all__ = ["vocab_divergence_swept"]


def _second_references(whole: DivergencePartial, difference: Array, unit: float) -> tuple[Array, ...]:
    """What ``divergence_tv`` takes of the merged record: both references, both log-totals about them, and by how much
    the log-ratio about them exceeds the centred one."""
    policy, rollout = whole.policy.top, whole.rollout.top
    seen = ~(jnp.isneginf(policy) | jnp.isneginf(rollout))
    tops = [jnp.where(seen, top, 0.0) for top in (policy, rollout)]
    *references, excess = short_references(tops[0], tops[1], whole.shift, unit)
    totals = (
        side.log_total + unit * (top - reference)
        for side, top, reference in zip((whole.policy, whole.rollout), tops, references, strict=True)
    )
    new = [*references, *totals, (whole.shift - unit * excess) + difference]
    old = [policy, rollout, whole.policy.log_total, whole.rollout.log_total, whole.shift + difference]
    a, b, a_total, b_total, normaliser = (jnp.where(seen, x, y) for x, y in zip(new, old, strict=True))
    return a, a_total, b, b_total, normaliser


def vocab_divergence_swept(
    policy_hidden: Float[Array, "N D1"],
    policy_head: Head,
    rollout_hidden: Float[Array, "N D2"],
    rollout_head: Head,
    tokens: Int[Array, " N"],
    support: UInt8[Array, "N V8"] | None,
    *,
    scaling: Scaling,
    with_tv: bool,
    axis: AxisName,
    interpret: bool,
) -> VocabDivergence:
    """Operands and options as for ``vocab_divergence_chunked``.

    Over ``axis`` travel 56 bytes a token, 4 more with the total variation and 8 more with a bias.
    """
    vocabulary, units = policy_head.weight.shape[0], Units(scaling.temperature, scaling.soft_cap)
    logits = None
    # The rows of a head that lies turned are not to be had without a copy of it.
    if not (lies_turned(policy_head.weight) or lies_turned(rollout_head.weight)):
        logits = (
            token_logits(policy_hidden, policy_head, tokens, support, units),
            token_logits(rollout_hidden, rollout_head, tokens, support, units),
        )

    operands = (
        *(policy_hidden, policy_head.weight, policy_head.bias),
        *(rollout_hidden, rollout_head.weight, rollout_head.scale, rollout_head.bias),
        *(support, tokens),
    )
    options: dict[str, Any] = {
        "temperature": scaling.temperature,
        "logit_soft_cap": scaling.soft_cap,
        "interpret": interpret,
        "blocks": (128, 128) if interpret else None,
    }
    part, logits = divergence_statistics(*operands, logits, **options)
    policy_gap, rollout_gap = (
        token_gap(logit, side, tokens, vocabulary, units.unit)
        for logit, side in zip(logits, (part.policy, part.rollout), strict=True)
    )
    whole, policy_logps, rollout_logps = merge_divergence(part, policy_gap, rollout_gap, units.unit, axis)
    difference, kl = divergence_of_sums(whole)
    tv = None
    if with_tv:
        rows = _second_references(whole, difference, units.unit)
        tv = sum_over(axis, divergence_tv(*operands, logits, *rows, **options))
        tv = jnp.where(jnp.isnan(difference), jnp.nan, jnp.clip(tv, 0.0, 1.0))
    return VocabDivergence(
        policy_logps=policy_logps,
        rollout_logps=rollout_logps,
        token_kl=kl,
        token_tv=tv,
        policy_entropy=whole.policy.entropy,
        rollout_entropy=whole.rollout.entropy,
    )
