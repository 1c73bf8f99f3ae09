"""An online softmax inside a kernel: eight sublanes of running statistics for every token."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from trm_jax.ops._tiles import UNSEEN

__all__ = ["Softmax", "softmax_add", "softmax_finish", "softmax_merge", "softmax_start", "softmax_update"]


class Softmax(NamedTuple):
    """Running statistics of one policy, ``[8, tokens]`` each, in units of the kernel.

    Attributes:
      top: largest logit, or another reference near it.
      total: ``Σ exp(z - top)``.
      rounding: what ``total`` has lost; beside a top that has nearly all mass, most addends are below its rounding.
      moment: ``Σ exp(z - top) (r - top)``.
    """

    top: Array
    total: Array
    rounding: Array
    moment: Array


def softmax_start(shape: tuple[int, int]) -> Softmax:
    """Before any column."""
    zeros = jnp.zeros(shape, jnp.float32)
    return Softmax(jnp.full(shape, UNSEEN, jnp.float32), zeros, zeros, zeros)


def softmax_update(old: Softmax, top: Array, exponent: float) -> tuple[Softmax, Array]:
    """The statistics referred to another top, and the factor that does so."""
    gap = old.top - top
    factor = jnp.exp2(exponent * gap)
    return Softmax(top, factor * old.total, factor * old.rounding, factor * (old.moment + gap * old.total)), factor


def softmax_add(old: Softmax, total: Array, moment: Array) -> Softmax:
    """A tile's own sums added, about the same top."""
    whole = old.total + total
    added = whole - old.total
    rounding = (old.total - (whole - added)) + (total - added)
    return Softmax(old.top, whole, old.rounding + rounding, old.moment + moment)


def softmax_merge(parts: Softmax, top: Array, at_top: Array) -> tuple[Array, Array, Array, Array]:
    """Eight sublanes about one top as one, ``[1, tokens]``: top, ``Σ exp(z - top)``, that less 1, and moment.

    ``at_top`` are the sublanes that hold the top itself, whose weight, exactly 1, stays out of the third: each of both
    sums has its digits where the other one has lost them.
    """
    ones = at_top.astype(jnp.float32)
    rows = parts.total + parts.rounding, (parts.total - ones) + parts.rounding, parts.moment, ones
    total, rest, moment, tops = (jnp.sum(x, axis=0, keepdims=True) for x in rows)
    return top, total, rest + (tops - 1.0), moment


def softmax_finish(parts: Softmax, exponent: float) -> tuple[Array, Array, Array, Array]:
    """``softmax_merge`` about the largest of the eight tops."""
    top = jnp.max(parts.top, axis=0, keepdims=True)
    scaled, _ = softmax_update(parts, jnp.broadcast_to(top, parts.top.shape), exponent)
    return softmax_merge(scaled, top, parts.top == top)
