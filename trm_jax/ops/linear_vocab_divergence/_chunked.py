"""Portable form: the specification on chunks of tokens, each against the whole vocabulary.

All logits of a chunk are at hand, so the total variation needs no second product with the heads.
"""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._common import map_token_chunks
from trm_jax.ops.linear_vocab_divergence._reference import linear_vocab_divergence_reference
from trm_jax.types import VocabDivergence

__all__ = ["linear_vocab_divergence_chunked"]


@functools.partial(jax.jit, static_argnames=("temperature", "with_tv", "chunk_size"))
def linear_vocab_divergence_chunked(
    policy_hidden: Float[Array, "N D1"],
    policy_head: Float[Array, "V D1"],
    rollout_hidden: Float[Array, "N D2"],
    rollout_head: Float[Array, "V D2"],
    tokens: Int[Array, " N"],
    support: UInt8[Array, "N V8"] | None,
    *,
    temperature: float,
    with_tv: bool,
    chunk_size: int,
) -> VocabDivergence:
    """Holds ``chunk_size × V`` logits of both policies at a time."""

    def chunk(rows: tuple[Array, Array, Array, Array | None]) -> VocabDivergence:
        h_policy, h_rollout, y, bits = rows
        return linear_vocab_divergence_reference(
            h_policy, policy_head, h_rollout, rollout_head, y, bits, temperature=temperature, with_tv=with_tv
        )

    out: VocabDivergence = map_token_chunks(chunk, (policy_hidden, rollout_hidden, tokens, support), chunk_size)
    return out
