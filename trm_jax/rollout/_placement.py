"""Where slots lie when the weights are sharded."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from trm_jax.models import RULES
from trm_jax.rollout._slots import DecodeState

__all__ = ["in_place", "mesh_of", "placement"]


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh of several devices that arrays are sharded over, or None."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh.size > 1:
            mesh = leaf.sharding.mesh
            assert isinstance(mesh, Mesh)
            return mesh
    return None


def placement(state: DecodeState, mesh: Mesh) -> Any:
    """A sharding for every array of ``state``: slots over the batch's axis and heads over theirs, where they divide."""

    def one(path: tuple[Any, ...], x: Array) -> NamedSharding:
        is_cache = getattr(path[0], "name", "") == "cache"  # [L, C, S, K, ...]; every other array is [C]
        axes: list[str | None] = [None] * x.ndim
        axes[1 if is_cache else 0] = RULES["batch"]
        if is_cache:
            axes[3] = RULES["kv_heads"]
        fits = [
            axis if axis and not size % mesh.shape.get(axis, size + 1) else None
            for axis, size in zip(axes, x.shape, strict=True)
        ]
        while fits and fits[-1] is None:  # as the programs' own results have it
            fits.pop()
        return NamedSharding(mesh, PartitionSpec(*fits))

    return jax.tree_util.tree_map_with_path(one, state)


def in_place(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """In a program, ``state`` where ``placement`` has it: it is donated, and elsewhere the next call would compile."""
    if mesh is None:
        return state
    out: DecodeState = jax.tree.map(jax.lax.with_sharding_constraint, state, placement(state, mesh))
    return out
