"""Loops over rows that move none of them between devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

__all__ = ["map_token_chunks"]


def map_token_chunks(function: Callable[[Any], Any], rows: Any, chunk_size: int) -> Any:
    """``function`` over a pytree of ``[N, ...]`` arrays, at most ``chunk_size`` rows at a time.

    Chunk ``j`` of ``k`` takes the rows ``j, j + k, j + 2k, …``: when rows are sharded in contiguous blocks, every chunk
    keeps its share on every device, and the loop moves no rows between devices.
    """
    n = jax.tree.leaves(rows)[0].shape[0]
    count = max(1, math.ceil(n / chunk_size))
    if count == 1:
        return function(rows)
    size = math.ceil(n / count)
    pad = size * count - n

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)) if pad else x
        return padded.reshape(size, count, *x.shape[1:])

    def chunk(index: Array) -> Any:
        return function(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 1, keepdims=False), split_rows))

    split_rows = jax.tree.map(split, rows)
    outputs = jax.lax.map(chunk, jnp.arange(count))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(size * count, *x.shape[2:])[:n], outputs)
