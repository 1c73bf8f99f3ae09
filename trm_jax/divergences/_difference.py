"""Differences of two policies' logits that keep their digits, however far apart the policies' tops are."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["difference_about_tops"]


def _difference(a: Array, b: Array) -> tuple[Array, Array]:
    """``a - b`` rounded, and what the rounding took, exactly (Knuth, TAOCP 2, theorem 4.2.2 B)."""
    difference = a - b
    minus_b = difference - a
    return difference, (a - (difference - minus_b)) - (b + minus_b)


def difference_about_tops(
    policy_logits: Float[Array, "*S V"],
    rollout_logits: Float[Array, "*S V"],
    policy_top: Float[Array, "*S"],
    rollout_top: Float[Array, "*S"],
) -> Float[Array, "*S V"]:
    """``(z_θ - top_θ) - (z_roll - top_roll)``, rounded once, nearly; exactly 0 where logits and tops are equal.

    Distances from the tops would each be rounded, which close logits far below them have in common, and which an offset
    between the policies tells apart.

    What is equal is asked for before it is subtracted: the compiler may contract a product into the subtraction.

    Args:
      policy_logits: ``[..., V]``; ``rollout_logits`` too. One that is not finite makes its token NaN.
      policy_top: ``[...]`` finite; ``rollout_top`` too.

    >>> z = jnp.array([0.0, -3.0])
    >>> [float(x) for x in difference_about_tops(z + 1.0, z, jnp.float32(1.0), jnp.float32(0.0))]
    [0.0, 0.0]
    """
    policy_top, rollout_top = policy_top[..., None], rollout_top[..., None]
    apart, rest = _difference(policy_logits, rollout_logits)
    of_tops, rest_of_tops = _difference(policy_top, rollout_top)
    equal = (policy_logits == rollout_logits) & (policy_top == rollout_top)
    return jnp.where(equal, 0.0, (apart - of_tops) + (rest - rest_of_tops))
