"""Chunks of the rows of a head, for a loop over them that reads a head and writes its gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

__all__ = ["ContiguousChunks", "StridedChunks", "vocabulary_chunks"]


def vocabulary_chunks(vocabulary: int, held: int, chunk_size: int) -> tuple[int, int]:
    """``(size, number)`` of the backward chunks: ``[held, size]`` numbers take about the memory of ``[chunk_size, V]``.

    A number that divides the vocabulary is preferred, because strided chunks would be padded, a copy of the head; among
    those one whose size is a multiple of 16, so that every chunk splits evenly over devices that share the vocabulary.

    >>> vocabulary_chunks(151_936, 4_096, 128), vocabulary_chunks(101, 64, 16)
    ((9496, 16), (32, 4))
    """
    ideal = min(max(1, math.ceil(held / chunk_size)), vocabulary)
    numbers = [n for n in range(math.ceil(ideal / 2), min(2 * ideal, vocabulary) + 1) if vocabulary % n == 0]
    if numbers:
        number = min(numbers, key=lambda n: (-math.gcd(vocabulary // n, 16), abs(n - ideal)))
        return vocabulary // number, number
    size = min(16 * math.ceil(vocabulary / ideal / 16), vocabulary)
    return size, math.ceil(vocabulary / size)


class ContiguousChunks(NamedTuple):
    """Of neighbouring rows, the last first; arrays stay as they are.

    Where they do not divide the vocabulary the last one starts early enough to be whole. What it has of its neighbour's
    rows is not its own, and the neighbour overwrites it.
    """

    vocabulary: int
    size: int
    number: int

    def split(self, rows: Float[Array, "V *D"]) -> Array:
        """As the other methods take them."""
        return rows

    def _start(self, step: Array) -> tuple[Array, Array]:
        """Of its own rows, and of all."""
        own = (self.number - 1 - step) * self.size
        return own, jnp.minimum(own, self.vocabulary - self.size)

    def ids(self, step: Array) -> tuple[Int[Array, " size"], Bool[Array, " size"]]:
        """In the head, and which are its own."""
        own, start = self._start(step)
        ids = start + jnp.arange(self.size, dtype=jnp.int32)
        return ids, ids >= own

    def chunk(self, rows: Array, step: Array) -> Float[Array, "size *D"]:
        """Its rows."""
        out: Array = jax.lax.dynamic_slice_in_dim(rows, self._start(step)[1], self.size)
        return out

    def with_chunk(self, rows: Array, chunk: Float[Array, "size *D"], step: Array) -> Array:
        """Its rows replaced."""
        out: Array = jax.lax.dynamic_update_slice_in_dim(rows, chunk, self._start(step)[1], 0)
        return out

    def whole(self, rows: Array) -> Float[Array, "V *D"]:
        """What ``split`` was given."""
        return rows


class StridedChunks(NamedTuple):
    """Chunk ``j`` of ``k`` has the rows ``j, j + k, …``; arrays are padded where ``k`` does not divide them."""

    vocabulary: int
    size: int
    number: int

    def split(self, rows: Float[Array, "V *D"]) -> Array:
        """As the other methods take them."""
        pad = self.size * self.number - self.vocabulary
        padded = jnp.pad(rows, [(0, pad)] + [(0, 0)] * (rows.ndim - 1)) if pad else rows
        return padded.reshape(self.size, self.number, *rows.shape[1:])

    def ids(self, step: Array) -> tuple[Int[Array, " size"], Bool[Array, " size"]]:
        """In the head, and which are no padding."""
        ids = jnp.arange(self.size, dtype=jnp.int32) * self.number + step
        return jnp.minimum(ids, self.vocabulary - 1), ids < self.vocabulary

    def chunk(self, rows: Array, step: Array) -> Float[Array, "size *D"]:
        """Its rows."""
        out: Array = jax.lax.dynamic_index_in_dim(rows, step, 1, keepdims=False)
        return out

    def with_chunk(self, rows: Array, chunk: Float[Array, "size *D"], step: Array) -> Array:
        """Its rows replaced."""
        out: Array = jax.lax.dynamic_update_index_in_dim(rows, chunk, step, 1)
        return out

    def whole(self, rows: Array) -> Float[Array, "V *D"]:
        """What ``split`` was given."""
        return rows.reshape(-1, *rows.shape[2:])[: self.vocabulary]
