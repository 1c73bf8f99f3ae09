"""What is decided about whole sequences, from sums and maxima over their tokens.

A ``Statistic`` says what it adds up, what it takes the maximum of, and what it makes of the totals: True where a mask
keeps the sequence, or a weight of the sequence. The totals of all statistics that a correction needs, those of its
metrics included, come from *one* reduction, a single pass over the log-probs; a reduction for each would read them
again and again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from trm_jax.checks import bool_mask, same_shape
from trm_jax.numerics import AnyArray, as_float32, masked_values, sequence_max, sequence_sum

__all__ = ["Statistic", "Totals", "checked_statistic", "evaluate", "keep_where", "max_at_most", "mean_within"]


class Totals(NamedTuple):
    """Of each sequence, over its tokens: ``[B]`` arrays, ``[B, T]`` for packed rows.

    Attributes:
      sums: in the structure in which they were asked for.
      counts: likewise.
      maxima: likewise.
      tokens: number of response tokens.
    """

    sums: Any
    counts: Any
    maxima: Any
    tokens: Float[Array, "B *T"]

    def mean(self, total: Float[Array, "B *T"]) -> Float[Array, "B *T"]:
        """A sum divided by the number of response tokens; 0 for an empty sequence."""
        return total / jnp.maximum(self.tokens, 1.0)


class Statistic(NamedTuple):
    """A function of the totals of each sequence.

    Attributes:
      value: from the totals of ``sums`` and ``maxima`` to the result, ``[B]`` (``[B, T]`` for packed rows).
      sums: pytree of ``[B, T]`` float32 values to be added up, 0 at masked slots.
      counts: pytree of ``[B, T]`` flags to be counted, False at masked slots.
      maxima: pytree of ``[B, T]`` float32 values whose maximum is taken, ``-inf`` at masked slots.
    """

    value: Callable[[Totals], Any]
    sums: Any = ()
    counts: Any = ()
    maxima: Any = ()


@functools.cache  # a new function each time would be a new reduction to the compiler
def _combine(sums: int, counts: int) -> Callable[[list[Array], list[Array]], list[Array]]:
    """Adds paired sums, what their rounding lost, and counts, in this order; takes the maximum of everything behind."""

    def combine(left: list[Array], right: list[Array]) -> list[Array]:
        pairs = list(zip(left, right, strict=True))
        totals, lost = [], []
        for (a, b), (lost_a, lost_b) in zip(pairs[:sums], pairs[sums : 2 * sums], strict=True):
            total = a + b
            shared = total - a
            totals.append(total)
            lost.append(lost_a + lost_b + ((a - (total - shared)) + (b - shared)))  # Knuth's TwoSum
        added = [a + b for a, b in pairs[2 * sums : 2 * sums + counts]]
        return totals + lost + added + [jnp.maximum(a, b) for a, b in pairs[2 * sums + counts :]]

    return combine


def _reduce_rows(sums: list[Array], counts: list[Array], maxima: list[Array]) -> list[Array]:
    """Totals over T, in the order of the arguments.

    A compiler may add thousands of tokens one by one; with what each addition rounds away added up beside it, every sum
    is right to float32, whatever the order.
    """
    lost = [jnp.zeros_like(values) for values in sums]
    counted = [flags.astype(jnp.int32) for flags in counts]
    start = [np.float32(0)] * (2 * len(sums)) + [np.int32(0)] * len(counts) + [np.float32(-np.inf)] * len(maxima)
    operands = [*sums, *lost, *counted, *maxima]
    totals: list[Array] = jax.lax.reduce(operands, start, _combine(len(sums), len(counts)), dimensions=(1,))
    pairs = zip(totals[: len(sums)], totals[len(sums) : 2 * len(sums)], strict=True)
    # Beside an infinite or undefined sum stands no rounding, but NaN.
    return [jnp.where(jnp.isfinite(total), total + rest, total) for total, rest in pairs] + totals[2 * len(sums) :]


def _of_segments(total: Callable[..., Array], values: list[Array], segment_ids: AnyArray) -> list[Array]:
    """The totals of each segment, from one scatter for all arrays."""
    if not values:
        return []
    every = jnp.ones(values[0].shape, bool)
    return list(jax.vmap(lambda array: total(array, every, segment_ids))(jnp.stack(values)))


def evaluate(
    statistics: Mapping[str, Statistic],
    response_mask: Bool[AnyArray, "B T"],
    segment_ids: Int[AnyArray, "B T"] | None,
) -> dict[str, Any]:
    """The value of every statistic, from one reduction over T.

    Packed rows take scatters instead: segments need not be contiguous, so there is no axis to reduce over.
    """
    mask = jnp.asarray(response_mask)
    sums, sum_tree = jax.tree.flatten({name: s.sums for name, s in statistics.items()})
    counts, count_tree = jax.tree.flatten(({name: s.counts for name, s in statistics.items()}, mask))
    maxima, max_tree = jax.tree.flatten({name: s.maxima for name, s in statistics.items()})
    if segment_ids is None:
        totals = _reduce_rows(sums, counts, maxima)
    else:
        totals = [*_of_segments(sequence_sum, sums, segment_ids), *_of_segments(sequence_sum, counts, segment_ids)]
        totals += _of_segments(sequence_max, maxima, segment_ids)
    first, last = len(sums), len(sums) + len(counts)
    added = jax.tree.unflatten(sum_tree, totals[:first])
    counted, tokens = jax.tree.unflatten(count_tree, [n.astype(jnp.float32) for n in totals[first:last]])
    largest = jax.tree.unflatten(max_tree, totals[last:])
    return {name: s.value(Totals(added[name], counted[name], largest[name], tokens)) for name, s in statistics.items()}


def keep_where(
    statistic: Statistic, response_mask: Bool[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"] | None
) -> Bool[Array, "B *T"]:
    """``sequence_keep`` by one statistic."""
    keep: Array = evaluate({"keep": statistic}, response_mask, segment_ids)["keep"]
    return keep


def checked_statistic(
    name: str, values: AnyArray, response_mask: AnyArray, segment_ids: AnyArray | None = None
) -> Array:
    """float32 constants of the shape of the mask."""
    same_shape(**{name: values, "response_mask": response_mask, "segment_ids": segment_ids})
    bool_mask(response_mask=response_mask)
    return jax.lax.stop_gradient(as_float32(values))


def max_at_most(values: Float[AnyArray, "B T"], response_mask: Bool[AnyArray, "B T"], threshold: float) -> Statistic:
    """``max_t x_t <= threshold``: True for an empty sequence, False at NaN."""
    return Statistic(
        maxima=(masked_values(values, response_mask, -jnp.inf),), value=lambda totals: totals.maxima[0] <= threshold
    )


def mean_within(
    values: Float[AnyArray, "B T"], response_mask: Bool[AnyArray, "B T"], *, low: float = -jnp.inf, high: float
) -> Statistic:
    """``low <= (1/T) Σ_t x_t <= high``: True for an empty sequence, False at NaN."""

    def value(totals: Totals) -> Array:
        mean = totals.mean(totals.sums[0])
        return ((mean >= low) & (mean <= high)) | (totals.tokens == 0)

    return Statistic(sums=(masked_values(values, response_mask),), value=value)
