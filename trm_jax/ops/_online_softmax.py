"""An online softmax inside a kernel: eight sublanes of running statistics for every token."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from trm_jax.ops._tiles import UNSEEN

__all__ = ["Softmax", "softmax_finish", "softmax_start", "softmax_update"]


class Softmax(NamedTuple):
    """Running statistics of one policy, ``[8, tokens]`` each, in units of the kernel.

    Attributes:
      top: largest logit, or another reference near it.
      total: ``Σ exp(z - top)``.
      moment: ``Σ exp(z - top) (r - top)``.
    """

    top: Array
    total: Array
    moment: Array


def softmax_start(shape: tuple[int, int]) -> Softmax:
    """Before any column."""
    zeros = jnp.zeros(shape, jnp.float32)
    return Softmax(jnp.full(shape, UNSEEN, jnp.float32), zeros, zeros)


def softmax_update(old: Softmax, top: Array, exponent: float) -> tuple[Softmax, Array]:
    """The statistics referred to another top, and the factor that does so."""
    gap = old.top - top
    factor = jnp.exp2(exponent * gap)
    return Softmax(top, factor * old.total, factor * (old.moment + gap * old.total)), factor


def softmax_finish(parts: Softmax, exponent: float) -> tuple[Softmax, Array]:
    """The eight sublanes merged, ``[1, tokens]``, and the factor of each."""
    top = jnp.max(parts.top, axis=0, keepdims=True)
    scaled, factor = softmax_update(parts, jnp.broadcast_to(top, parts.top.shape), exponent)
    return Softmax(top, *(jnp.sum(x, axis=0, keepdims=True) for x in scaled[1:])), factor
