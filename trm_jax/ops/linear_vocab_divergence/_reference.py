"""The readable specification: full logits of both policies."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.divergences import logits_divergence
from trm_jax.ops._head import Head, Scaling, head_logits
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

    def logits(hidden: Array, head: Head) -> Array:
        z = head_logits(hidden, head, scaling.soft_cap)
        return z if support is None else jnp.where(unpack_support(support, z.shape[1]), z, -jnp.inf)

    out: VocabDivergence = logits_divergence(
        logits(policy_hidden, policy_head),
        logits(rollout_hidden, rollout_head),
        tokens,
        with_tv=with_tv,
        temperature=scaling.temperature,
    )
    return out
