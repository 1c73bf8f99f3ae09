"""Masked reductions, sequence statistics and safe exponentials, in float32 and log space.

A masked slot may hold NaN, an infinity or garbage: every reduction replaces it before any arithmetic, so that neither
the value nor the gradient sees it. Statistics of a sequence are ``[B]``, one a row; with ``segment_ids`` (several
sequences packed into a row) they are ``[B, T]``, the statistic of its own sequence at every slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real

__all__ = [
    "MAX_LOG_RATIO",
    "AnyArray",
    "absent_values",
    "as_float32",
    "expm1_minus_identity",
    "log1mexp",
    "masked_max",
    "masked_mean",
    "masked_sum",
    "masked_values",
    "over_tokens",
    "safe_exp",
    "segment_index",
    "sequence_count",
    "sequence_ends",
    "sequence_max",
    "sequence_mean",
    "sequence_sum",
    "tokens_after",
]

if TYPE_CHECKING:
    AnyArray: TypeAlias = Array | np.ndarray[Any, Any] | np.generic
else:  # run-time type checkers want the bare class
    AnyArray = Array | np.ndarray | np.generic

MAX_LOG_RATIO = 60.0
"""Largest log-ratio that is exponentiated: ``e^60`` times any weight or advantage still fits float32."""

_ABSENT = -1e29
_SERIES_RADIUS = 0.35


def as_float32(values: Real[AnyArray, "..."] | float) -> Float[Array, "..."]:
    """The values as a float32 array; bfloat16 log-probs must be widened before ``1 - p`` is taken."""
    return jnp.asarray(values).astype(jnp.float32)


def safe_exp(log_values: Float[AnyArray, "..."], *, maximum: float = MAX_LOG_RATIO) -> Float[Array, "..."]:
    """``exp(min(x, maximum))``: never infinite, 0 at ``-inf``, NaN at NaN."""
    return jnp.exp(jnp.minimum(as_float32(log_values), maximum))


def log1mexp(log_values: Float[AnyArray, "..."]) -> Float[Array, "..."]:
    """``log(1 - exp(x))`` for ``x <= 0``; ``-inf`` at 0. For ``x = log p`` this is the log of ``1 - p``.

    >>> import numpy as np
    >>> print(np.asarray(log1mexp(jnp.log(jnp.float32(0.25))), float).round(4), log1mexp(jnp.float32(0.0)))
    -0.2877 -inf
    """
    values = as_float32(log_values)
    near_zero = values > -0.6931472
    close = jnp.log(-jnp.expm1(jnp.where(near_zero, values, -1.0)))
    far = jnp.log1p(-jnp.exp(jnp.where(near_zero, -1.0, values)))
    return jnp.where(near_zero, close, far)


def absent_values(values: Float[AnyArray, "..."]) -> Float[Array, "..."]:
    """Logits or biases with ``-inf`` for what is at most -1e29: masks are often the lowest finite number, whose sums
    are infinite. NaN stays; the dtype too.

    >>> absent_values(jnp.array([1.0, jnp.finfo(jnp.float32).min, jnp.nan])).tolist()
    [1.0, -inf, nan]
    """
    x = jnp.asarray(values)
    return jnp.where(x <= _ABSENT, -jnp.inf, x)


def expm1_minus_identity(values: Float[AnyArray, "..."]) -> Float[Array, "..."]:
    """``exp(x) - 1 - x``, non-negative, with full relative accuracy near 0; ``+inf`` at both infinities.

    >>> print(f"{expm1_minus_identity(jnp.float32(1e-4)):.4e}")
    5.0002e-09
    """
    x = as_float32(values)
    small = jnp.abs(x) < _SERIES_RADIUS
    s = jnp.where(small, x, 0.0)
    tail = 1.0 + s / 3 * (1.0 + s / 4 * (1.0 + s / 5 * (1.0 + s / 6 * (1.0 + s / 7 * (1.0 + s / 8)))))
    large = jnp.minimum(jnp.where(small, 1.0, x), 100.0)  # exp(100) is inf; inf - inf would be NaN
    return jnp.where(small, 0.5 * s * s * tail, jnp.expm1(large) - large)


def masked_values(values: Float[AnyArray, "*S"], mask: Bool[AnyArray, "*S"], fill: float = 0.0) -> Float[Array, "*S"]:
    """float32 values with ``fill`` wherever the mask is False."""
    return jnp.where(jnp.asarray(mask), as_float32(values), fill)


def masked_sum(
    values: Float[AnyArray, "*S"], mask: Bool[AnyArray, "*S"], *, axis: int | None = None
) -> Float[Array, "..."]:
    """Sum over the True slots; 0 when there is none."""
    return jnp.sum(masked_values(values, mask), axis=axis)


def masked_mean(
    values: Float[AnyArray, "*S"], mask: Bool[AnyArray, "*S"], *, axis: int | None = None
) -> Float[Array, "..."]:
    """Mean over the True slots; 0 when there is none."""
    count = jnp.sum(jnp.asarray(mask), axis=axis)
    return masked_sum(values, mask, axis=axis) / jnp.maximum(count, 1)


def masked_max(
    values: Float[AnyArray, "*S"], mask: Bool[AnyArray, "*S"], *, axis: int | None = None, empty: float = 0.0
) -> Float[Array, "..."]:
    """Maximum over the True slots; ``empty`` when there is none; NaN when a True slot holds NaN."""
    top = jnp.max(masked_values(values, mask, -jnp.inf), axis=axis, initial=-jnp.inf)
    return jnp.where(jnp.any(jnp.asarray(mask), axis=axis), top, empty)


def segment_index(segment_ids: Int[AnyArray, "B T"]) -> Int[Array, "B T"]:
    """Arbitrary ids renamed, row by row, into ``[0, T)``: equal ids share a number. Segments need not be contiguous.

    Raises:
      TypeError: on ids that are not integers.
    """
    ids = jnp.asarray(segment_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids of segments and groups must be integers, given dtype {ids.dtype}: number them instead")
    return jax.vmap(lambda row: jnp.searchsorted(jnp.sort(row), row))(ids).astype(jnp.int32)


def _coarse_and_fine(values: Float[Array, "B T"]) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Two parts of each value whose sum it is, such that float32 adds the coarse parts of a row without rounding."""
    finite = jnp.isfinite(values)
    usual = jnp.where(finite, values, 0.0)
    # Next to an offset above every partial sum, float32 keeps only digits that all partial sums can hold.
    offset = jax.lax.stop_gradient(2.0 * values.shape[1] * jnp.max(jnp.abs(usual), axis=1, keepdims=True, initial=0.0))
    coarse = (usual + offset) - offset
    return jnp.where(finite, coarse, values), usual - coarse


def sequence_sum(
    values: Float[AnyArray, "B T"] | Bool[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
    segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Float[Array, "B *T"]:
    """Sum of each sequence over its True slots; of flags, how many are True."""
    kept = jnp.where(jnp.asarray(mask), jnp.asarray(values).astype(jnp.float32), 0.0)
    if segment_ids is None:
        return jnp.sum(kept, axis=1)
    index = segment_index(segment_ids)

    def scattered(part: Array) -> Array:
        return jax.vmap(lambda v, i: jnp.zeros_like(v).at[i].add(v))(part, index)

    if values.dtype == jnp.bool_:
        sums = scattered(kept)
    else:  # a scatter adds one by one, and its rounding grows with the length
        coarse, fine = map(scattered, _coarse_and_fine(kept))
        sums = coarse + fine
    return jnp.take_along_axis(sums, index, axis=1)


def sequence_count(
    mask: Bool[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"] | None = None
) -> Float[Array, "B *T"]:
    """Number of True slots of each sequence."""
    return sequence_sum(mask, mask, segment_ids)


def sequence_mean(
    values: Float[AnyArray, "B T"], mask: Bool[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"] | None = None
) -> Float[Array, "B *T"]:
    """Mean of each sequence over its True slots; 0 for an empty one."""
    return sequence_sum(values, mask, segment_ids) / jnp.maximum(sequence_count(mask, segment_ids), 1.0)


def sequence_max(
    values: Float[AnyArray, "B T"], mask: Bool[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"] | None = None
) -> Float[Array, "B *T"]:
    """Maximum of each sequence over its True slots; ``-inf`` for an empty one; NaN where a True slot holds NaN."""
    kept = masked_values(values, mask, -jnp.inf)
    if segment_ids is None:
        return jnp.max(kept, axis=1, initial=-jnp.inf)
    index = segment_index(segment_ids)
    tops = jax.vmap(lambda v, i: jnp.full_like(v, -jnp.inf).at[i].max(v))(kept, index)
    return jnp.take_along_axis(tops, index, axis=1)


def _true_slots_after(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Of each row. 32 slots make a word whose bits are counted, so that no prefix sum of the row is ever written."""
    rows, length = mask.shape
    count = -(-length // 32)
    padded = jnp.pad(mask, ((0, 0), (0, 32 * count - length))).reshape(rows, count, 32)
    place = jnp.arange(32, dtype=jnp.uint32)
    bits = jnp.where(padded, jnp.uint32(1) << place, jnp.uint32(0))
    words = jnp.sum(bits, axis=-1, dtype=jnp.uint32)
    counts = jax.lax.population_count(words).astype(jnp.int32)
    in_later_words = jnp.sum(counts, axis=1, keepdims=True) - jnp.cumsum(counts, axis=1)
    later_in_word = jax.lax.population_count((words[..., None] >> place) >> jnp.uint32(1)).astype(jnp.int32)
    return (in_later_words[..., None] + later_in_word).reshape(rows, 32 * count)[:, :length].astype(jnp.float32)


def tokens_after(mask: Bool[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"] | None = None) -> Float[Array, "B T"]:
    """``T - t``: how many True slots of the same sequence stand behind each slot."""
    ones = jnp.asarray(mask).astype(jnp.float32)
    if segment_ids is None:
        return _true_slots_after(jnp.asarray(mask))

    def row(values: Array, index: Array) -> Array:
        order = jnp.argsort(index, stable=True)
        sorted_cumsum = jnp.cumsum(values[order])
        before = (sorted_cumsum - values[order])[index]  # index is where the segment starts in sorted order
        rank = jnp.zeros_like(values).at[order].set(sorted_cumsum) - before
        return jnp.zeros_like(values).at[index].add(values)[index] - rank

    return jax.vmap(row)(ones, segment_index(segment_ids))


def sequence_ends(mask: Bool[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"] | None = None) -> Bool[Array, "B T"]:
    """True at the last True slot of every sequence: exactly one slot for each sequence that has any."""
    return jnp.asarray(mask) & (tokens_after(mask, segment_ids) == 0)


def over_tokens(statistic: AnyArray, like: AnyArray) -> Array:
    """A ``[B]`` statistic spread over the ``[B, T]`` slots of ``like``; one that is ``[B, T]`` already stays."""
    value = jnp.asarray(statistic)
    return jnp.broadcast_to(value[:, None] if value.ndim == 1 else value, like.shape)
