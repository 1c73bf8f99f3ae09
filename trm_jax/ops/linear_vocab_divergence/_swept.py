"""The kernels' form: one sweep over the head for everything but the total variation, a second sweep for that.

Between them the statistics of the shards are merged; no logit outlives its block.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._head import Head, Scaling
from trm_jax.ops._operands import lies_turned
from trm_jax.ops._partials import AxisName, divergence_of_sums, merge_divergence, sum_over
from trm_jax.ops._tiles import Units
from trm_jax.ops._token import token_gap, token_logits
from trm_jax.ops.linear_vocab_divergence._pallas_tpu import divergence_statistics, divergence_tv
from trm_jax.types import VocabDivergence

__all__ = ["vocab_divergence_swept"]

_DIGITS = 19
"""Binary ones, after the point, of a shift in logits."""


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
        # The shift moves the policy's reference instead: a normaliser that is small keeps the digits of small d. Its
        # product with a power of two is exact: fused into the sum or not, the compiler gets the same reference.
        grid = 2.0 ** -(_DIGITS + math.ceil(math.log2(units.unit)))
        reference = whole.policy.top + jnp.round(whole.shift * (1.0 / (grid * units.unit))) * grid
        moved_by = jnp.where(jnp.isneginf(reference), 0.0, units.unit * (reference - whole.policy.top))
        rows = (reference, whole.policy.log_total - moved_by, whole.rollout.top, whole.rollout.log_total)
        tv = sum_over(axis, divergence_tv(*operands, logits, *rows, (whole.shift - moved_by) + difference, **options))
        tv = jnp.where(jnp.isnan(difference), jnp.nan, jnp.clip(tv, 0.0, 1.0))
    return VocabDivergence(
        policy_logps=policy_logps,
        rollout_logps=rollout_logps,
        token_kl=kl,
        token_tv=tv,
        policy_entropy=whole.policy.entropy,
        rollout_entropy=whole.rollout.entropy,
    )
