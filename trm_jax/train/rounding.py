"""Parameters of few digits: moments and sums in float32, and updates that rounding does not lose."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["apply_updates", "in_float32", "round_at_random"]


def in_float32(tree: Any) -> Any:
    """Every array as float32; those that are stay as they are."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def apply_updates(params: Any, updates: Any, version: Int[Array, ""]) -> Any:
    """``params + updates`` in the parameters' own types.

    At a learning rate of 1e-6 an update is a hundredth of the distance between two bfloat16 numbers, and rounding to
    the nearest would leave such a parameter where it is for ever. Here it moves to the next number once in a hundred
    updates: the expectation is exact. The draw depends on the version and the parameter's place alone.

    Args:
      params: pytree of float32 or bfloat16 arrays.
      updates: the same structure in float32.
      version: optimizer updates so far.
    """
    leaves, structure = jax.tree.flatten(params)
    key = jax.random.fold_in(jax.random.key(0), version)

    def one(index: int, value: Array, update: Array) -> Array:
        moved = value.astype(jnp.float32) + update
        return round_at_random(moved, jax.random.fold_in(key, index)) if value.dtype == jnp.bfloat16 else moved

    moved = [one(i, *pair) for i, pair in enumerate(zip(leaves, jax.tree.leaves(updates), strict=True))]
    return jax.tree.unflatten(structure, moved)


def round_at_random(x: Float[Array, "..."], key: Array) -> Float[Array, "..."]:
    """float32 to bfloat16, up or down with the probability that makes the expectation ``x``.

    The lower 16 of a float32's bits are what bfloat16 drops: uniform bits added to them carry into the upper 16 with
    probability ``lower / 2¹⁶``. Numbers that bfloat16 has, and infinities, stay.

    >>> exact = jnp.array([1.0, -0.375, 0.0, jnp.inf])
    >>> print(round_at_random(exact, jax.random.key(0)))
    [1 -0.375 0 inf]
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    drawn = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    carried = jax.lax.bitcast_convert_type((bits + drawn) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), carried, x).astype(jnp.bfloat16)
