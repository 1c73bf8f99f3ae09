"""From what a kernel sums to the record of a shard: units taken out, the sampled token put back.

Kernels leave the sampled token out of their sums. Where it is the most likely one, the sum of the others then keeps its
digits however small it is, and log-prob and entropy of a nearly deterministic row do too.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trm_jax.ops._partials import SoftmaxPartial

__all__ = ["with_token"]


def with_token(
    top: Float[Array, " N"],
    total: Float[Array, " N"],
    moment: Float[Array, " N"],
    token_logit: Float[Array, " N"],
    here: Bool[Array, " N"],
    unit: float,
) -> tuple[SoftmaxPartial, Float[Array, " N"], Float[Array, " N"]]:
    """``(record, weight of the kernel's sums, probability of the token)`` of one policy.

    Args:
      top: reference of the sums, in units; ``total`` and ``moment`` are ``Σ exp(z - top)`` and ``Σ exp(z - top) (r -
        top)`` over the other tokens.
      token_logit: logit of the sampled token.
      here: whether that token is one of this shard's, and in its softmax.
      unit: logits a unit.
    """
    z = unit * top
    alone = total == 0
    # A reference up to 1 above the token may be the token itself, rounded differently.
    at_token = here & (alone | (token_logit >= z - 1.0))
    reference = jnp.where(at_token, token_logit, jnp.where(alone, 0.0, z))
    factor = jnp.where(alone, 0.0, jnp.exp(z - reference))
    gap = jnp.where(alone, 0.0, z - reference)
    own = jnp.where(here, jnp.exp(token_logit - reference), 0.0)
    others = total * factor
    rest = jnp.where(at_token, others, jnp.where(alone, 0.0, (others - 1.0) + own))
    whole = 1.0 + rest
    moments = factor * (unit * moment + total * gap)
    moments = moments + jnp.where(here, own * (token_logit - reference), 0.0)
    empty = alone & ~here
    record = SoftmaxPartial(
        top=jnp.where(empty, -jnp.inf, reference), log_total=jnp.log1p(rest), mean_gap=moments / whole
    )
    return record, factor / whole, own / whole
