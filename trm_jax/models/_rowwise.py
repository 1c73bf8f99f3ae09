"""Run a function of rows either on all rows at once or on tiles of one fixed shape.

A matmul or a reduction over one row may round differently when other rows stand beside it, because its blocking is
chosen from the whole shape. On tiles of a fixed shape there is nothing left to choose: a row's bits depend on that row.
The barriers keep the compiler from fusing a tile's work with its surroundings, which differ between programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from trm_jax.models._compute import ComputeConfig

__all__ = ["map_tiles", "rowwise"]


def map_tiles(fn: Callable[..., Any], operands: Any, constants: Any) -> Any:
    """``stack([fn(*tile, *constants) for tile in zip(*operands)])`` as one loop whose body is compiled alone."""

    def body(tile: Any) -> Any:
        tile, held = jax.lax.optimization_barrier((tile, constants))
        return jax.lax.optimization_barrier(fn(*tile, *held))

    return jax.lax.map(body, operands)


def rowwise(
    fn: Callable[..., Any], compute: ComputeConfig, rows: tuple[Any, ...], constants: tuple[Any, ...] = ()
) -> Any:
    """Applies ``fn(*rows, *constants)``, where ``fn`` treats each row by itself.

    Args:
      fn: takes arrays ``[N, ...]`` and constants (pytrees); returns a pytree of arrays ``[N, ...]``.
      compute: tiles of ``compute.row_tile`` rows when ``batch_invariant``, else all rows in one call.
      rows: arrays with one leading axis of ``N`` rows.
      constants: weights, handed to every call.

    Returns:
      What ``fn`` returns for all rows; the rows that pad the last tile are dropped.
    """
    if not compute.batch_invariant:
        return fn(*rows, *constants)
    size = compute.row_tile
    count = jax.tree.leaves(rows)[0].shape[0]
    tiles = -(-count // size)

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, tiles * size - count)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(tiles, size, *x.shape[1:])

    out = map_tiles(fn, jax.tree.map(split, rows), constants)
    return jax.tree.map(lambda y: y.reshape(tiles * size, *y.shape[2:])[:count], out)
