"""The readable specification: full logits of both policies."""

from __future__ import annotations

from jaxtyping import Array, Float, Int, UInt8

from trm_jax.divergences import logits_divergence
from trm_jax.ops._common import head_logits, restrict
from trm_jax.types import VocabDivergence

__all__ = ["linear_vocab_divergence_reference"]


def linear_vocab_divergence_reference(
    policy_hidden: Float[Array, "N D1"],
    policy_head: Float[Array, "V D1"],
    rollout_hidden: Float[Array, "N D2"],
    rollout_head: Float[Array, "V D2"],
    tokens: Int[Array, " N"],
    support: UInt8[Array, "N V8"] | None,
    *,
    temperature: float,
    with_tv: bool,
) -> VocabDivergence:
    """Holds two ``[N, V]`` arrays of logits."""
    policy_logits = restrict(head_logits(policy_hidden, policy_head, temperature), support)
    rollout_logits = restrict(head_logits(rollout_hidden, rollout_head, temperature), support)
    out: VocabDivergence = logits_divergence(policy_logits, rollout_logits, tokens, with_tv=with_tv)
    return out
