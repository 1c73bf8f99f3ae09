"""One table from logical axis names to mesh axes, and the shardings that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

__all__ = ["RULES", "make_mesh", "param_shardings"]

RULES: Mapping[str, str | None] = {
    "batch": "data",
    "bias": "tensor",
    "embed": None,
    "expert": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "latent": None,
    "layer": None,
    "mlp": "tensor",
    "norm": None,
    "router": None,
    "vocab": "tensor",
}


def make_mesh(data: int = 1, tensor: int = 1) -> Mesh:
    """A ``data × tensor`` mesh over the first devices.

    Args:
      data: devices that share the rows of a batch.
      tensor: devices that share heads, feed-forward columns and vocabulary.

    Returns:
      A mesh with the axes "data" and "tensor".

    Raises:
      ValueError: when fewer than ``data · tensor`` devices exist.

    >>> dict(make_mesh().shape)
    {'data': 1, 'tensor': 1}
    """
    if data < 1 or tensor < 1:
        raise ValueError(f"mesh data={data}, tensor={tensor}: both must be at least 1.")
    devices = jax.devices()
    if data * tensor > len(devices):
        raise ValueError(
            f"mesh data={data} x tensor={tensor} needs {data * tensor} devices, but JAX sees {len(devices)}. "
            "Lower the mesh sizes, or on CPU simulate devices with XLA_FLAGS=--xla_force_host_platform_device_count=N."
        )
    # The compiler propagates shardings from the parameters and the batch; no operation here names one.
    automatic = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=automatic, devices=devices[: data * tensor])


def param_shardings(params: nnx.State[Any, Any], mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> Any:
    """The ``NamedSharding`` of every parameter, from its ``logical_axes`` and ``rules``; same structure as ``params``.

    Args:
      params: the parameters of a ``Transformer``, arrays or shapes.
      mesh: where they shall lie.
      rules: logical axis to mesh axis; None replicates.

    Raises:
      ValueError: a parameter's axis that ``rules`` or the mesh lack, or that does not divide by its mesh axis, naming
        parameter, axis and sizes.

    >>> from trm_jax.models import Transformer, TransformerConfig
    >>> model = Transformer(TransformerConfig(vocab_size=16), rngs=nnx.Rngs(0))
    >>> shardings = param_shardings(nnx.state(model, nnx.Param), make_mesh())
    >>> tuple(shardings["embedding"].get_value().spec)
    ('tensor', None)
    """

    def one(path: tuple[Any, ...], variable: nnx.Variable[Any]) -> Any:
        axes = variable.get_metadata("logical_axes")
        value = variable.get_value()
        names = []
        for size, axis in zip(value.shape, axes, strict=True):
            where = f"parameter {jax.tree_util.keystr(path)}: axis {axis!r} of size {size}"
            if axis not in rules:
                raise ValueError(f"{where} has no rule; the rules name {sorted(rules)}. Add one (None replicates).")
            mesh_axis = rules[axis]
            if mesh_axis is not None and mesh_axis not in mesh.shape:
                raise ValueError(f"{where} goes to mesh axis {mesh_axis!r}, but the mesh has {list(mesh.axis_names)}.")
            if mesh_axis is not None and size % mesh.shape[mesh_axis]:
                raise ValueError(
                    f"{where} does not divide by mesh axis {mesh_axis!r} of size {mesh.shape[mesh_axis]}. "
                    "Choose a mesh size that divides it."
                )
            names.append(mesh_axis)
        return variable.replace(NamedSharding(mesh, PartitionSpec(*names)))

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
