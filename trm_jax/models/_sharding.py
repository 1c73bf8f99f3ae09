"""One table from logical axis names to mesh axes, and the shardings that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["RULES", "make_mesh", "param_shardings"]

RULES: Mapping[str, str | None] = {
    "batch": "data",
    "embed": None,
    "expert": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "layer": None,
    "mlp": "tensor",
    "norm": None,
    "router": None,
    "vocab": "tensor",
}


def make_mesh(data: int = 1, tensor: int = 1) -> Mesh:
    """A ``data × tensor`` mesh over the first devices.

    Raises:
      ValueError: when fewer than ``data · tensor`` devices exist.
    """
    if data < 1 or tensor < 1:
        raise ValueError(f"mesh data={data}, tensor={tensor}: both must be at least 1.")
    devices = jax.devices()
    if data * tensor > len(devices):
        raise ValueError(
            f"mesh data={data} x tensor={tensor} needs {data * tensor} devices, but JAX sees {len(devices)}. "
            "Lower the mesh sizes, or on CPU simulate devices with XLA_FLAGS=--xla_force_host_platform_device_count=N."
        )
    return jax.make_mesh((data, tensor), ("data", "tensor"), devices=devices[: data * tensor])


def param_shardings(params: nnx.State, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> Any:
    """The ``NamedSharding`` of every parameter, from its ``logical_axes`` and ``rules``; same structure as ``params``.

    Raises:
      ValueError: when a parameter's axis does not divide by its mesh axis, naming parameter, axis and sizes.
    """

    def one(path: tuple[Any, ...], variable: nnx.Variable[Any]) -> Any:
        axes = variable.get_metadata("logical_axes")
        value = variable.get_value()
        names = []
        for size, axis in zip(value.shape, axes, strict=True):
            mesh_axis = rules[axis]
            if mesh_axis is not None and size % mesh.shape[mesh_axis]:
                raise ValueError(
                    f"parameter {jax.tree_util.keystr(path)}: axis {axis!r} of size {size} does not divide by mesh axis "
                    f"{mesh_axis!r} of size {mesh.shape[mesh_axis]}. Choose a mesh size that divides it."
                )
            names.append(mesh_axis)
        return variable.replace(NamedSharding(mesh, PartitionSpec(*names)))

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
