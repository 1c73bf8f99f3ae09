"""Matrix product of rows that are grouped by the weight they meet: the multiplication of a dropless mixture.

``jax.lax.ragged_dot`` costs as much as running every expert on every row on CPUs and, without a vendor's kernel, on
GPUs; so does its gradient by the weights on TPUs. Hence a portable form of our own, which pads each group to whole
tiles and multiplies tile by tile, and the kernel that JAX ships for TPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trm_jax.models._compute import ComputeConfig, ExpertImplementation

__all__ = ["Groups", "group_rows", "grouped_matmul", "tile_rows"]

_MEGABLOX_TILE = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Where every assignment of a row to a group stands in an array that is sorted by group.

    Attributes:
      source: ``[P]`` the assignment that stands at each place; ``R``, one past the last, where there is padding.
      place: ``[R]`` the place of each assignment.
      sizes: ``[E]`` rows of each group, padding included; they add up to ``P``.
    """

    source: Array
    place: Array
    sizes: Array


def tile_rows(rows: int, groups: int, implementation: ExpertImplementation) -> tuple[int, int]:
    """``(align, total)``: every group's size is a multiple of ``align``, and ``P``, which holds whatever groups come.

    A tile of the "blocked" form is a 16th to an eighth of an average group, which is what padding adds, or eight rows.
    """
    if implementation == "ragged_dot":
        return 1, rows
    if implementation == "megablox":
        return 1, -(-rows // _MEGABLOX_TILE) * _MEGABLOX_TILE
    align = 8
    while align < 256 and 32 * align * groups <= rows:
        align *= 2
    return align, align * (rows // align + min(groups, rows))


def group_rows(group: Int[Array, " R"], groups: int, *, align: int, total: int) -> Groups:
    """Sorts assignments by group, each group starting at a multiple of ``align``; what is over goes to the last group.

    >>> found = group_rows(jnp.array([2, 0, 2]), 3, align=2, total=6)
    >>> found.source.tolist(), found.place.tolist(), found.sizes.tolist()
    ([1, 3, 0, 2, 3, 3], [2, 0, 3], [2, 0, 4])
    """
    rows = group.shape[0]
    counts = jnp.zeros((groups,), jnp.int32).at[group].add(1)
    sizes = -(-counts // align) * align
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    ordered = group[order]
    shift = (jnp.cumsum(sizes) - sizes) - (jnp.cumsum(counts) - counts)
    at = jnp.arange(rows, dtype=jnp.int32) + shift[ordered]
    return Groups(
        source=jnp.full((total,), rows, jnp.int32).at[at].set(order, unique_indices=True),
        place=jnp.zeros((rows,), jnp.int32).at[order].set(at, unique_indices=True),
        sizes=sizes.at[-1].add(total - jnp.sum(sizes)),
    )


def grouped_matmul(
    rows: Float[Array, "P K"],
    weight: Float[Array, "E K N"],
    sizes: Int[Array, " E"],
    *,
    align: int,
    implementation: ExpertImplementation,
    compute: ComputeConfig,
    interpret: bool = False,
) -> Float[Array, "P N"]:
    """``out[r] = rows[r] @ weight[group of r]``, accumulated in float32, returned in the type of ``rows``.

    Args:
      rows: sorted by group.
      weight: one matrix a group, of the type of ``rows``.
      sizes: rows of each group, adding up to ``P``; a group may be empty.
      align: all sizes are multiples of it ("blocked": the tile).
      implementation: "blocked", "ragged_dot" or "megablox".
      compute: the arithmetic.
      interpret: run the TPU kernel in Pallas' interpreter.

    Raises:
      NotImplementedError: for "megablox" where neither a TPU nor ``interpret`` is there.

    >>> rows, weight = jnp.ones((4, 1)), jnp.array([[[2.0]], [[3.0]]])
    >>> found = grouped_matmul(
    ...     rows, weight, jnp.array([2, 2]), align=2, implementation="blocked", compute=ComputeConfig()
    ... )
    >>> found.ravel().tolist()
    [2.0, 2.0, 3.0, 3.0]
    """
    if implementation == "blocked":
        ends = jnp.cumsum(sizes)
        starts = jnp.arange(rows.shape[0] // align, dtype=sizes.dtype) * align
        owner = jnp.searchsorted(ends, starts, side="right").astype(jnp.int32)
        blocked: Array = _blocked(rows, weight, owner, align, compute)
        return blocked
    if implementation == "ragged_dot":
        out = jax.lax.ragged_dot(rows, weight, sizes, precision=compute.precision, preferred_element_type=jnp.float32)
        return out.astype(rows.dtype)
    if implementation == "megablox":
        from jax.experimental.pallas.ops.tpu.megablox import gmm

        tiling = (_MEGABLOX_TILE,) * 3
        kernel: Array = gmm(rows, weight, sizes, rows.dtype, tiling, None, None, False, interpret)
        return kernel
    raise NotImplementedError(f"grouped_matmul has no implementation {implementation!r}.")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _blocked(rows: Array, weight: Array, owner: Array, align: int, compute: ComputeConfig) -> Array:
    return _tiles("rk,kn->rn", rows, weight, owner, align, compute)


def _forward(rows: Array, weight: Array, owner: Array, align: int, compute: ComputeConfig) -> tuple[Array, Any]:
    return _blocked(rows, weight, owner, align, compute), (rows, weight, owner)


def _backward(align: int, compute: ComputeConfig, saved: Any, grad: Array) -> tuple[Array, Array, None]:
    rows, weight, owner = saved
    tiles = (rows.reshape(-1, align, rows.shape[-1]), grad.reshape(-1, align, grad.shape[-1]), owner)

    def add(total: Array, tile: Any) -> tuple[Array, None]:
        x, g, at = tile
        product = jnp.einsum("rk,rn->kn", x, g, precision=compute.precision, preferred_element_type=jnp.float32)
        return total.at[at].add(product), None  # in place: one matrix is touched, not all of them

    total, _ = jax.lax.scan(add, jnp.zeros(weight.shape, jnp.float32), tiles)
    by_rows = _tiles("rn,kn->rk", grad, weight, owner, align, compute)
    return by_rows, total.astype(weight.dtype), None


_blocked.defvjp(_forward, _backward)


def _tiles(form: str, rows: Array, weight: Array, owner: Array, align: int, compute: ComputeConfig) -> Array:
    def one(tile: tuple[Array, Array]) -> Array:
        x, at = tile
        w = jax.lax.dynamic_index_in_dim(weight, at, keepdims=False)
        y = jnp.einsum(form, x, w, precision=compute.precision, preferred_element_type=jnp.float32)
        return y.astype(rows.dtype)

    out: Array = jax.lax.map(one, (rows.reshape(-1, align, rows.shape[-1]), owner))
    return out.reshape(rows.shape[0], -1)
