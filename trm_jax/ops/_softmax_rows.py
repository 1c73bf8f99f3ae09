"""From what a kernel sums to the record of a shard: the sampled token put back.

Kernels leave the sampled token out of their sums. Where it is the most likely one, the sum of the others then keeps its
digits however small it is, and log-prob and entropy of a nearly deterministic row do too.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.ops._partials import SoftmaxPartial
from trm_jax.ops._tiles import UNSEEN

__all__ = ["logit_of_picked", "near_top", "with_token"]


def logit_of_picked(picked: Float[Array, " N"]) -> Float[Array, " N"]:
    """A token's logit as a kernel has it: ``-inf`` where that is masked; NaN stays."""
    return jnp.where(picked <= UNSEEN, -jnp.inf, picked)


def near_top(top: Float[Array, " N"], token_logit: Float[Array, " N"], unit: float) -> Bool[Array, " N"]:
    """Whether the token's logit is at most 1 below the reference of the sums: then it can be the reference itself."""
    return unit * (token_logit - top) >= -1.0


def with_token(
    rows: Float[Array, "4 N"],
    token_logit: Float[Array, " N"],
    here: Bool[Array, " N"],
    near: Bool[Array, " N"],
    unit: float,
) -> SoftmaxPartial:
    """The record of one policy.

    Args:
      rows: of the other tokens: reference ``top`` of the sums, ``Σ exp(z - top)``, that less 1, and ``Σ exp(z - top) (r
        - top)``; ``z = unit · r``, and ``r`` and ``top`` are in units of the kernel.
      token_logit: of the sampled token, in units too.
      here: whether that token is one of this shard's, and in its softmax.
      near: whether that token may be the reference; of two policies both take it or neither, so that the difference of
        their tops is that of one token, or lies between those of two.
      unit: logits a unit.
    """
    top, total, excess, moment = rows
    alone = total == 0
    # A reference up to 1 above the token may be the token itself, rounded differently.
    at_token = here & (alone | near)
    reference = jnp.where(at_token, token_logit, jnp.where(alone, 0.0, top))
    gap = jnp.where(alone, 0.0, unit * (top - reference))
    factor = jnp.where(alone, 0.0, jnp.exp(gap))
    own_gap = jnp.where(here, unit * (token_logit - reference), 0.0)
    own = jnp.where(here, jnp.exp(own_gap), 0.0)
    rest = jnp.where(at_token, total * factor, jnp.where(alone, 0.0, excess + own))
    moments = factor * (unit * moment + total * gap) + own * own_gap
    empty = alone & ~here
    return SoftmaxPartial(
        top=jnp.where(empty, -jnp.inf, reference), log_total=jnp.log1p(rest), mean_gap=moments / (1.0 + rest)
    )
