"""What the types of operands say of a mesh: axes that are explicit, and those that a caller's own shard_map has split.

``jax.make_mesh`` makes explicit axes by default.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType

from trm_jax.ops._dispatch import AnyMesh

__all__ = ["as_varying", "automatic", "check_devices", "explicit_axes", "explicit_mesh", "rows_axes", "varying"]


def explicit_axes(mesh: AnyMesh) -> frozenset[str]:
    """Axes that are part of the types of arrays."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def check_devices(mesh: AnyMesh, operands: Any) -> None:
    """An abstract mesh gets its devices from ``jax.set_mesh`` or from an operand; a traced one may have them.

    Raises:
      ValueError: neither has any.
    """
    if isinstance(mesh, jax.sharding.Mesh) or not jax.sharding.get_abstract_mesh().empty:
        return
    leaves = jax.tree.leaves(operands)
    if not any(isinstance(x, jax.core.Tracer) or len(x.sharding.device_set) == mesh.size for x in leaves):
        raise ValueError(
            f"mesh is abstract, and no operand lies on {mesh.size} devices, given {mesh}: pass a jax.sharding.Mesh, or "
            "call inside jax.set_mesh"
        )


def explicit_mesh(operands: Any) -> AnyMesh | None:
    """The mesh with explicit axes that is part of the type of some operand, if there is one."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands))
    return next((mesh for mesh in meshes if explicit_axes(mesh)), None)


def rows_axes(x: jax.Array) -> tuple[str, ...]:
    """The explicit axes over which the rows of an array are sharded."""
    spec = jax.typeof(x).sharding.spec
    first = spec[0] if len(spec) else None
    return () if first is None else (first,) if isinstance(first, str) else tuple(first)


def automatic(mesh: AnyMesh) -> AnyMesh:
    """The mesh with its explicit axes made automatic."""
    kinds = (AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types)
    out: AnyMesh = mesh.update(axis_types=tuple(kinds))
    return out


def varying(operands: Any) -> frozenset[str]:
    """Axes of a caller's ``shard_map`` (with ``check_vma``) along which some operand may differ."""
    return frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(operands)))


def as_varying(arrays: Any, like: Any) -> Any:
    """The arrays, typed as varying along every axis along which some array of ``like`` varies."""
    axes = varying(like)

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, arrays)
