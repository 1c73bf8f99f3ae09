"""The operator over shards of the vocabulary, whichever form computes a shard."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.ops._head import Head, Scaling
from trm_jax.ops._remat import as_one_step
from trm_jax.ops._sharding import Layout, Shard, over_shards
from trm_jax.ops.linear_vocab_divergence._chunked import vocab_divergence_chunked
from trm_jax.types import VocabDivergence

__all__ = ["Plan", "check_blocks", "linear_vocab_divergence_fused"]


class Plan(NamedTuple):
    """Everything static.

    Attributes:
      implementation: ``"chunked"`` or ``"pallas_tpu"``.
      scaling: temperature and cap.
      with_tv: also the total variation.
      layout: None on one device, or where the compiler shards.
      chunk_size: of the chunked form.
      rows_at_once: of the chunked form.
      interpret: of the kernel.
    """

    implementation: str
    scaling: Scaling
    with_tv: bool
    layout: Layout | None
    chunk_size: int
    rows_at_once: int
    interpret: bool


_Rows = tuple[Array, Array, Array, Array | None]


def check_blocks(hidden: tuple[Array, Array], heads: tuple[Head, ...], *, supported: bool) -> None:
    """The kernels run on this TPU.

    Raises:
      NotImplementedError: no block fits.
    """
    from trm_jax.ops._vmem import chip_of
    from trm_jax.ops.linear_vocab_divergence._config import divergence_blocks

    divergence_blocks(
        chip_of(None),
        1,
        (hidden[0].shape[1], hidden[1].shape[1]),
        (hidden[0].dtype.itemsize, hidden[1].dtype.itemsize),
        tuple(head.weight.dtype.itemsize for head in heads),
        supported=supported,
    )


@functools.partial(jax.jit, static_argnames=("plan",))
def linear_vocab_divergence_fused(
    plan: Plan,
    policy_hidden: Float[Array, "N D1"],
    rollout_hidden: Float[Array, "N D2"],
    heads: tuple[Head, ...],
    tokens: Int[Array, " N"],
    support: UInt8[Array, "N V8"] | None,
) -> VocabDivergence:
    """``heads`` are the policy's and the rollout's; one when they are shared."""

    def body(shard: Shard, rows: _Rows, heads: tuple[Head, ...]) -> VocabDivergence:
        h_policy, h_rollout, y, bits = rows
        vocabulary = heads[0].weight.shape[0]
        operands = (h_policy, heads[0], h_rollout, heads[-1], shard.tokens(y), shard.support(bits, vocabulary))
        if plan.implementation == "chunked":
            return vocab_divergence_chunked(
                *operands,
                scaling=plan.scaling,
                with_tv=plan.with_tv,
                axis=shard.vocab_axis,
                chunk_size=plan.chunk_size,
                rows_at_once=plan.rows_at_once,
            )
        from trm_jax.ops.linear_vocab_divergence._swept import vocab_divergence_swept  # imports the kernel language

        with jax.enable_x64(False):  # constants of kernels would have 64 bits, which no TPU kernel has
            return vocab_divergence_swept(
                *operands, scaling=plan.scaling, with_tv=plan.with_tv, axis=shard.vocab_axis, interpret=plan.interpret
            )

    rows = (policy_hidden, rollout_hidden, tokens, support)
    out: VocabDivergence = as_one_step(
        functools.partial(over_shards, plan.layout, body), rows, heads, barrier=plan.implementation == "chunked"
    )
    return out
