"""The readable specification: full logits of both policies."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.divergences import logits_divergence
from trm_jax.ops._head import Head, Scaling, head_logits
from trm_jax.ops._remat import as_one_step
from trm_jax.ops._support import unpack_support
from trm_jax.types import VocabDivergence

__all__ = ["linear_vocab_divergence_reference"]


def linear_vocab_divergence_reference(
    policy_hidden: Float[Array, "N D1"],
    policy_head: Head,
    rollout_hidden: Float[Array, "N D2"],
    rollout_head: Head,
    tokens: Int[Array, " N"],
    support: UInt8[Array, "N V8"] | None,
    *,
    scaling: Scaling,
    with_tv: bool,
) -> VocabDivergence:
    """Holds two ``[N, V]`` arrays of logits."""

    def divergence(
        hidden: tuple[Array, Array], heads: tuple[Head, Head], tokens: Array, support: Array | None
    ) -> VocabDivergence:
        logits = [head_logits(h, head, scaling.soft_cap) for h, head in zip(hidden, heads, strict=True)]
        if support is not None:
            allowed = unpack_support(support, logits[0].shape[1])
            logits = [jnp.where(allowed, z, -jnp.inf) for z in logits]
        out: VocabDivergence = logits_divergence(*logits, tokens, with_tv=with_tv, temperature=scaling.temperature)
        return out

    out: VocabDivergence = as_one_step(
        divergence, (policy_hidden, rollout_hidden), (policy_head, rollout_head), tokens, support
    )
    return out
