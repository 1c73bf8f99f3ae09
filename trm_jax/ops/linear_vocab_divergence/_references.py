"""Where the second sweep counts the logits of two policies from, so that their differences are exact."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["short_references"]

_SHORT = 10
"""Binary digits after the point of the distance of two references, in logits."""
_LOW = 4
"""The power of two whose multiple a reference is, of logits; 0 for tops below four of them."""


def _rounded(value: Array, step: float) -> Array:
    """To a multiple of a power of two, which a value beyond all digits of it is already."""
    return jnp.where(jnp.abs(value) < step * 2**24, jnp.round(value * (1 / step)) * step, value)


def short_references(
    policy_top: Float[Array, "*S"], rollout_top: Float[Array, "*S"], shift: Float[Array, "*S"] | float, unit: float
) -> tuple[Float[Array, "*S"], Float[Array, "*S"], Float[Array, "*S"]]:
    """``(a, b, excess)``: references near enough to the tops, with ``excess = (a - top_θ) - (b - top_roll)``, rounded
    once, and about ``shift / unit``.

    They are short numbers, which leave a logit as it is when subtracted from it, and take the policy whose top is
    larger in magnitude to where the other one is, since no digit is lost on the way down. So the difference of two
    logits that are equal or close stays exact, where distances from the tops would be rounded apart. Products with
    powers of two are exact: whatever the compiler fuses and makes again, the references are the same. ``excess``
    counts from them as they are: of tops with many digits before the point, their distance is rounded once more.

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
    distance = _rounded(apart, fine) + jnp.round(shift * (1 / (fine * unit))) * fine
    higher = jnp.abs(policy_top) >= jnp.abs(rollout_top)
    least = jnp.where(higher, rollout_top, policy_top)
    low = jnp.where(jnp.abs(least) > 4 * coarse, _rounded(least, coarse), 0.0)
    a, b = low + jnp.where(higher, distance, 0.0), low - jnp.where(higher, 0.0, distance)
    return a, b, ((a - b) - apart) - lost
