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
from jaxtyping import Array, Bool, Float, Int

from trm_jax.checks import bool_mask, same_shape
from trm_jax.numerics import AnyArray, as_float32, masked_values, sequence_max, sequence_sum

__all__ = ["Statistic", "Totals", "checked_statistic", "evaluate", "keep_where", "max_at_most", "mean_within"]


class Totals(NamedTuple):
    """Of each sequence, over its tokens: ``[B]`` arrays, ``[B, T]`` for packed rows.

    Attributes:
      sums: in the structure in which they were asked for.
      maxima: likewise.
      tokens: number of response tokens.
    """

    sums: Any
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
      maxima: pytree of ``[B, T]`` float32 values whose maximum is taken, ``-inf`` at masked slots.
    """

    value: Callable[[Totals], Any]
    sums: Any = ()
    maxima: Any = ()


@functools.cache  # a new function each time would be a new reduction to the compiler
def _add_and_compare(sums: int) -> Callable[[list[Array], list[Array]], list[Array]]:
    """Adds the first ``sums`` of the paired values and takes the maximum of the others."""

    def combine(left: list[Array], right: list[Array]) -> list[Array]:
        pairs = list(zip(left, right, strict=True))
        return [a + b for a, b in pairs[:sums]] + [jnp.maximum(a, b) for a, b in pairs[sums:]]

    return combine


def evaluate(
    statistics: Mapping[str, Statistic],
    response_mask: Bool[AnyArray, "B T"],
    segment_ids: Int[AnyArray, "B T"] | None,
) -> dict[str, Any]:
    """The value of every statistic, from one reduction over T.

    Packed rows take one scatter a total instead: segments need not be contiguous, so there is no axis to reduce over.
    """
    mask = jnp.asarray(response_mask)
    sums, sum_tree = jax.tree.flatten(({name: s.sums for name, s in statistics.items()}, mask.astype(jnp.float32)))
    maxima, max_tree = jax.tree.flatten({name: s.maxima for name, s in statistics.items()})
    if segment_ids is None:
        start = [jnp.float32(0.0)] * len(sums) + [jnp.float32(-jnp.inf)] * len(maxima)
        totals = jax.lax.reduce([*sums, *maxima], start, _add_and_compare(len(sums)), dimensions=(1,))
    else:
        every = jnp.ones_like(mask)
        totals = [sequence_sum(values, every, segment_ids) for values in sums]
        totals += [sequence_max(values, every, segment_ids) for values in maxima]
    added, count = jax.tree.unflatten(sum_tree, totals[: len(sums)])
    largest = jax.tree.unflatten(max_tree, totals[len(sums) :])
    return {name: s.value(Totals(added[name], largest[name], count)) for name, s in statistics.items()}


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
