"""Advantages from groups of responses to the same prompt."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from trm_jax.checks import bool_mask, known_name, required, same_shape
from trm_jax.numerics import AnyArray, as_float32, segment_index

__all__ = ["group_advantages"]


def group_advantages(
    rewards: Real[AnyArray, " B"],
    group_ids: Int[AnyArray, " B"],
    *,
    normalize: Literal["std", "none", "loo"] = "std",
    scope: Literal["all", "kept"] = "all",
    sequence_keep: Bool[AnyArray, " B"] | None = None,
) -> Float[Array, " B"]:
    """``(R_i - mean of its group) / std of its group`` (GRPO), undivided (Dr. GRPO), or leave-one-out (RLOO).

    Args:
      rewards: ``[B]``.
      group_ids: ``[B]`` int; rows with one id answer one prompt, in any order.
      normalize: ``"std"`` (ddof 1), ``"none"``, or ``"loo"`` (reward minus the mean of the others).
      scope: which rows make the baseline: ``"all"`` of the group, rejected ones included, or only the ``"kept"`` ones.
      sequence_keep: ``[B]`` bool; rejected rows get advantage 0. None keeps all.

    Returns:
      ``[B]`` float32 constants. A group of one (whatever its reward), or of equal rewards, gives 0. A NaN reward at a
      row that makes the baseline gives NaN to its group of several.

    Raises:
      ValueError: on shapes that differ, an unknown name, or ``scope="kept"`` without ``sequence_keep``.
      TypeError: on a mask that is not bool.

    >>> import numpy as np
    >>> print(np.asarray(group_advantages(jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([7, 7, 3, 3])), float).round(4))
    [ 0.7071 -0.7071  0.      0.    ]
    """
    required(rewards=rewards, group_ids=group_ids)
    same_shape(rewards=rewards, group_ids=group_ids, sequence_keep=sequence_keep)
    bool_mask(sequence_keep=sequence_keep)
    known_name("normalize", normalize, ("std", "none", "loo"))
    known_name("scope", scope, ("all", "kept"))
    if scope == "kept" and sequence_keep is None:
        raise ValueError("scope='kept' needs sequence_keep, given None: pass the mask, or use scope='all'")
    reward = jax.lax.stop_gradient(as_float32(rewards))
    keep = jnp.ones(reward.shape, bool) if sequence_keep is None else jnp.asarray(sequence_keep)
    basis = keep if scope == "kept" else jnp.ones_like(keep)
    group = segment_index(jnp.asarray(group_ids)[None, :])[0]

    def total(values: Array) -> Array:
        return jnp.zeros_like(reward).at[group].add(jnp.where(basis, values, 0.0))[group]

    count = total(jnp.ones_like(reward))
    # Equality is decided on the rewards: a rounded mean would leave differences that the std then blows up to ±1.
    highest = jnp.full_like(reward, -jnp.inf).at[group].max(jnp.where(basis, reward, -jnp.inf))[group]
    lowest = jnp.full_like(reward, jnp.inf).at[group].min(jnp.where(basis, reward, jnp.inf))[group]
    flat = (highest == lowest) | (count <= 1)
    centred = reward - total(reward) / jnp.maximum(count, 1.0)
    others = jnp.where(flat, 1.0, count - 1.0)
    spread = jnp.where(flat, 1.0, highest - lowest)  # squares of rewards near 1e-25 or 1e25 are no float32
    if normalize == "loo":
        advantages = centred * count / others
    elif normalize == "std":
        variance = total(jnp.square(centred / spread)) / others
        advantages = centred / spread / jnp.sqrt(jnp.where(flat, 1.0, variance))
    else:
        advantages = centred
    return jnp.where(flat | ~keep, 0.0, advantages)
