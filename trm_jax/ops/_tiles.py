"""What the TPU kernels compute alike: one tile of logits, in their units.

A tile is ``head · hiddenᵀ``: vocabulary on sublanes, tokens on lanes. Statistics of a token then live in one lane and
eight sublanes, a 1/16 of what they take with tokens on sublanes, and leave the kernel as rows of ``[k, N]``.

Inside a kernel a logit is ``r = z / unit``; ``unit`` holds the temperature (and the cap), so that neither costs a
multiplication. Columns outside the softmax hold ``MASKED``, finite, so that differences and products stay finite too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from trm_jax.ops._head import product_dtype

__all__ = [
    "CHUNK",
    "LANES",
    "MASKED",
    "SUBLANES",
    "UNSEEN",
    "Units",
    "as_kernel",
    "fold_rows",
    "is_token",
    "logit_tile",
    "product",
]

LANES, SUBLANES = 128, 8
MASKED = -1e30
"""Logit of a column outside the softmax."""
UNSEEN = 0.5 * MASKED
"""Running maximum before any column: far above ``MASKED``, so that masked columns weigh exactly 0."""
CHUNK = 64
"""Rows of a tile that an epilogue takes at a time: few enough values to stay in registers."""


class Units(NamedTuple):
    """How a product becomes a logit: ``z = unit · tanh(s / cap)`` with ``unit = cap / T``, or ``unit · s``."""

    temperature: float
    soft_cap: float | None

    @property
    def unit(self) -> float:
        """Logit of ``r = 1``."""
        return (1.0 if self.soft_cap is None else self.soft_cap) / self.temperature

    @property
    def exponent(self) -> float:
        """``exp(z) = 2^(exponent · r)``."""
        return self.unit * math.log2(math.e)


def as_kernel(function: Callable[..., None], static: Any) -> Callable[..., None]:
    """``function(static, *refs)``, traced as it is written whatever the caller lets ranks do."""

    def kernel(*refs: Any) -> None:
        with jax.numpy_rank_promotion("allow"):
            function(static, *refs)

    return kernel


def product(left: Array, right: Array, contract: tuple[int, int]) -> Array:
    """Matrix product summed in float32: exact for float32 operands, one pass of the matrix unit for bfloat16."""
    dtype = product_dtype(left, right)
    return jax.lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _along_vocabulary(row: Array, shape: tuple[int, ...], on_lanes: bool) -> Array:
    """``[1, bv]`` spread over a tile whose tokens lie on lanes (or on sublanes)."""
    if not on_lanes:
        return jnp.broadcast_to(row, shape)
    column = jnp.broadcast_to(row, (LANES, shape[0])).T
    return jnp.concatenate([column] * (shape[1] // LANES), axis=1)


def _support_tile(bits: Array, turned: bool, first: Array, size: int, on_lanes: bool) -> Array:
    """Whether each token of a tile is in its row's support; ``first`` is the tile's place in the block of bits, which
    has the tokens on lanes where it is ``turned``.

    The matrix unit spreads the bytes: a product with a one-hot matrix repeats byte ``v // 8`` exactly for every ``v``.
    """
    bytes_ = bits.astype(jnp.int32).astype(jnp.float32).astype(jnp.bfloat16)
    axis = 0 if turned else 1  # of a block's bytes
    side = 1 if turned and not on_lanes else 0  # of the vocabulary in the one-hot matrix
    shape = (LANES, size) if side else (size, LANES)
    place = first + jax.lax.broadcasted_iota(jnp.int32, shape, side)
    one_hot = (place // 8 == jax.lax.broadcasted_iota(jnp.int32, shape, 1 - side)).astype(jnp.float32)
    one_hot = one_hot.astype(jnp.bfloat16)
    spread = product(one_hot, bytes_, (1 - side, axis)) if on_lanes else product(bytes_, one_hot, (axis, 1 - side))
    bit = first + jax.lax.broadcasted_iota(jnp.int32, spread.shape, 0 if on_lanes else 1)
    return ((spread.astype(jnp.int32) >> (bit % 8)) & 1) > 0


def logit_tile(
    refs: dict[str, Any],
    prefix: str,
    head_prefix: str,
    columns: slice,
    units: Units,
    first: Array,
    vocabulary: int,
    *,
    ragged: bool,
    on_lanes: bool = True,
    beside: Iterator[None] | None = None,
) -> Array:
    """Logits in ``units`` of a block of the head (its first row is token ``first``) for some columns of the tokens.

    ``beside`` is other work, one piece of which is written down after each part of a long product: the scheduler mostly
    keeps the order of the program, and overlaps the vector with the matrix unit only where they alternate.
    """
    work = iter(()) if beside is None else beside
    head, hidden = refs[f"{head_prefix}head"], refs[f"{prefix}hidden"]
    r: Any = None
    for place in head.parts:
        pair = (head.part(place), 1 - head.axis), (hidden.part(place, columns), 1 - hidden.axis)
        (left, i), (right, k) = pair if on_lanes else pair[::-1]
        part = product(left, right, (i, k))
        r = part if r is None else r + part
        next(work, None)
    size = r.shape[0 if on_lanes else 1]
    allowed = None
    if (scale := refs.get(f"{head_prefix}scale")) is not None:
        r = r * _along_vocabulary(scale[...], r.shape, on_lanes)
    if (bias := refs.get(f"{prefix}bias")) is not None:
        offset = _along_vocabulary(bias[...], r.shape, on_lanes)
        r = r + offset
        allowed = ~(offset <= UNSEEN)  # NaN stays
    if units.soft_cap is not None:
        r = jnp.tanh(r * (1.0 / units.soft_cap))
    if ragged:
        inside = first + jax.lax.broadcasted_iota(jnp.int32, r.shape, 0 if on_lanes else 1) < vocabulary
        allowed = inside if allowed is None else allowed & inside
    if (support := refs.get("support")) is not None:
        (place,) = support.parts
        within = _support_tile(support.part(place, columns), support.turned, first % (8 * LANES), size, on_lanes)
        allowed = within if allowed is None else allowed & within
    return r if allowed is None else jnp.where(allowed, r, MASKED)


def fold_rows(tile: Array, start: int, size: int) -> Array:
    """Rows ``start … start + size`` of a tile as ``[size / 8, 8, tokens]``: axis 0 is summed without moving lanes."""
    return tile[start : start + size].reshape(size // SUBLANES, SUBLANES, tile.shape[1])


def is_token(tokens: Array, first: Array, start: int, size: int) -> Array:
    """Where a folded chunk holds each token's own column; ``tokens`` is ``[1, bn]``."""
    shape = (SUBLANES, tokens.shape[1])
    place = tokens - first - jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    folded = (size // SUBLANES, *shape)
    return place[None] == SUBLANES * jax.lax.broadcasted_iota(jnp.int32, folded, 0) + start
