"""The kernels' form: one sweep over the head for everything but the total variation, a second sweep for that.

Between them the statistics of the shards are merged; no logit outlives its block.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._head import Head, Scaling
from trm_jax.ops._partials import AxisName, merge_divergence, normaliser_difference, sum_over
from trm_jax.ops._support import in_support
from trm_jax.ops._token import token_gap, token_logits
from trm_jax.ops.linear_vocab_divergence._pallas_tpu import divergence_statistics, divergence_tv
from trm_jax.types import VocabDivergence

__all__ = ["vocab_divergence_swept"]


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
    """Operands and options as for ``vocab_divergence_chunked``; 56 bytes a token travel over ``axis``."""
    vocabulary = policy_head.weight.shape[0]
    owned = (tokens >= 0) & (tokens < vocabulary)
    policy_logit, rollout_logit = (
        token_logits(hidden, head, tokens, None, scaling)
        for hidden, head in ((policy_hidden, policy_head), (rollout_hidden, rollout_head))
    )
    # A token outside the support still gives a good shift; one that a head has not gives none.
    # Equal logits differ by exactly 0, also where the compiler contracts a / T - b / T into a fused multiply-add.
    apart = owned & (policy_logit != rollout_logit)
    shift = sum_over(axis, jnp.where(apart, policy_logit - rollout_logit, 0.0))
    shift = jnp.where(jnp.isfinite(shift), shift, 0.0)
    if support is not None:
        legal = in_support(support, jnp.clip(tokens, 0, vocabulary - 1))
        policy_logit, rollout_logit = (jnp.where(legal, z, -jnp.inf) for z in (policy_logit, rollout_logit))

    operands = (
        *(policy_hidden, policy_head.weight, policy_head.bias),
        *(rollout_hidden, rollout_head.weight, rollout_head.scale, rollout_head.bias),
        *(support, tokens, policy_logit, rollout_logit, shift),
    )
    options: dict[str, Any] = {
        "temperature": scaling.temperature,
        "logit_soft_cap": scaling.soft_cap,
        "interpret": interpret,
        "blocks": (128, 128) if interpret else None,
    }
    part = divergence_statistics(*operands, **options)
    if axis is not None and (policy_head.bias is not None or rollout_head.bias is not None):
        # ``growth`` counts the policy's mass outside the rollout's support, but not in a shard without rollout mass.
        alone = jnp.isneginf(part.rollout.top) & ~jnp.isneginf(part.policy.top)
        part = part._replace(uncovered=alone.astype(jnp.float32))
    policy_gap = token_gap(policy_logit, part.policy, tokens, vocabulary)
    rollout_gap = token_gap(rollout_logit, part.rollout, tokens, vocabulary)
    whole, policy_logps, rollout_logps = merge_divergence(part, policy_gap, rollout_gap, axis)
    difference = normaliser_difference(whole, shift)
    undefined = jnp.isnan(difference)
    tv = None
    if with_tv:
        logsumexps = (whole.policy.logsumexp, whole.rollout.logsumexp)
        tv = sum_over(axis, divergence_tv(*operands, difference, *logsumexps, **options))
        tv = jnp.where(undefined, jnp.nan, jnp.clip(tv, 0.0, 1.0))
    return VocabDivergence(
        policy_logps=policy_logps,
        rollout_logps=rollout_logps,
        token_kl=jnp.where(undefined, jnp.nan, jnp.maximum(difference - whole.mean_shift, 0.0)),
        token_tv=tv,
        policy_entropy=whole.policy.entropy,
        rollout_entropy=whole.rollout.entropy,
    )
