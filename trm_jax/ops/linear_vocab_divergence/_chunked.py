"""Portable form: chunks of tokens, each against all of the shard's vocabulary.

All logits of a chunk are at hand, so the total variation needs no second product with the heads, and KL can be the sum
of non-negative terms.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._head import Head, Scaling, head_logits
from trm_jax.ops._held import divergence_of_rows
from trm_jax.ops._partials import AxisName
from trm_jax.ops._rows import map_token_chunks
from trm_jax.ops._support import unpack_support
from trm_jax.types import VocabDivergence

__all__ = ["vocab_divergence_chunked"]


def vocab_divergence_chunked(
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
    chunk_size: int,
    rows_at_once: int,
) -> VocabDivergence:
    """Holds ``chunk_size × V`` logits of both policies at a time.

    Args:
      policy_hidden: all of the shard's tokens.
      policy_head: the shard's rows.
      rollout_hidden: likewise.
      rollout_head: likewise.
      tokens: ids counted from the shard's first row.
      support: of the shard's rows.
      scaling: temperature and cap of both.
      with_tv: also the total variation.
      axis: mesh axis over which each chunk is merged: 48 bytes a token, 12 more with the total
        variation.
      chunk_size: tokens whose logits are held at once.
      rows_at_once: of these, how many are reduced together.
    """
    ragged = policy_head.bias is not None or rollout_head.bias is not None

    def some(rows: tuple[Array, Array, Array, Array | None]) -> VocabDivergence:
        z_policy, z_rollout, y, bits = rows
        return divergence_of_rows(
            z_policy,
            z_rollout,
            y,
            None if bits is None else unpack_support(bits, z_policy.shape[1]),
            temperature=scaling.temperature,
            ragged=ragged,
            with_tv=with_tv,
            axis=axis,
        )

    def chunk(rows: tuple[Array, Array, Array, Array | None]) -> VocabDivergence:
        h_policy, h_rollout, y, bits = rows
        z_policy = head_logits(h_policy, policy_head, scaling.soft_cap)
        z_rollout = head_logits(h_rollout, rollout_head, scaling.soft_cap)
        out: VocabDivergence = map_token_chunks(some, (z_policy, z_rollout, y, bits), rows_at_once)
        return out

    rows = (policy_hidden, rollout_hidden, tokens, support)
    out: VocabDivergence = map_token_chunks(chunk, rows, chunk_size)
    return out
