"""Where logits of two policies are counted from, so that their differences are exact."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["difference_about_tops", "short_references"]

_SHORT = 10
"""Binary digits after the point of the distance of two references, in logits."""
_LOW = 4
"""The power of two whose multiple a reference is, of logits; 0 for tops below four of them."""


def short_references(
    policy_top: Float[Array, "*S"], rollout_top: Float[Array, "*S"], shift: Float[Array, "*S"] | float, unit: float
) -> tuple[Float[Array, "*S"], Float[Array, "*S"], Float[Array, "*S"]]:
    """``(a, b, excess)``: references near enough to the tops, with ``excess = (a - top_θ) - (b - top_roll)``, rounded
    once, and about ``shift / unit``.

    They are short numbers, which leave a logit as it is when subtracted from it, and take the policy whose top is
    larger in magnitude to where the other one is, since no digit is lost on the way down. So the difference of two
    logits that are equal or close stays exact, where distances from the tops would be rounded apart. Integers add up
    exactly, and products with powers of two are exact: whatever the compiler fuses and makes again, the references are
    the same.

    Args:
      policy_top: ``[...]`` finite; ``rollout_top`` too.
      shift: ``[...]`` small.
      unit: of a logit; ``shift`` is in logits.

    >>> [float(x) for x in short_references(jnp.float32(1000.25), jnp.float32(0.125), 0.0, 1.0)]
    [1000.125, 0.0, 0.0]
    """
    exponent = math.ceil(math.log2(unit))
    fine, coarse = 2.0 ** -(_SHORT + exponent), 2.0 ** (_LOW - exponent)
    apart = policy_top - rollout_top
    back = apart - policy_top
    lost = (policy_top - (apart - back)) - (rollout_top + back)
    distance = (jnp.round(apart * (1 / fine)) + jnp.round(shift * (1 / (fine * unit)))) * fine
    higher = jnp.abs(policy_top) >= jnp.abs(rollout_top)
    least = jnp.where(higher, rollout_top, policy_top)
    low = jnp.where(jnp.abs(least) > 4 * coarse, jnp.round(least * (1 / coarse)) * coarse, 0.0)
    a, b = low + jnp.where(higher, distance, 0.0), low - jnp.where(higher, 0.0, distance)
    return a, b, (distance - apart) - lost


def difference_about_tops(
    policy_logits: Float[Array, "*S V"],
    rollout_logits: Float[Array, "*S V"],
    policy_top: Float[Array, "*S"],
    rollout_top: Float[Array, "*S"],
) -> Float[Array, "*S V"]:
    """``(z_θ - top_θ) - (z_roll - top_roll)`` by short references; exactly 0 where logits and tops are equal.

    What is equal is asked for before it is subtracted: the compiler may contract a product into the subtraction.

    Args:
      policy_logits: ``[..., V]``; ``rollout_logits`` too. One that is not finite makes its token not finite.
      policy_top: ``[...]`` finite; ``rollout_top`` too.

    >>> z = jnp.array([0.0, -3.0])
    >>> [float(x) for x in difference_about_tops(z + 1.0, z, jnp.float32(1.0), jnp.float32(0.0))]
    [0.0, 0.0]
    """
    a, b, excess = (x[..., None] for x in short_references(policy_top, rollout_top, 0.0, 1.0))
    equal = (policy_logits == rollout_logits) & (a == b) & (excess == 0)
    policy, rollout = (jnp.where(z == about, 0.0, z - about) for z, about in ((policy_logits, a), (rollout_logits, b)))
    return jnp.where(equal, 0.0, (policy - rollout) + excess)
