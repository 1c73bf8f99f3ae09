"""Operators over a mesh: tokens along one axis, rows of the head along another; shards need not be equal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt8

from trm_jax.checks import known_name
from trm_jax.ops._axis_types import as_varying, automatic, explicit_axes, explicit_mesh, rows_axes
from trm_jax.ops._dispatch import AnyMesh
from trm_jax.ops._head import Head
from trm_jax.ops._partials import AxisName
from trm_jax.ops._support import shard_support

__all__ = ["Layout", "Shard", "layout_of", "layout_of_types", "over_shards", "with_automatic_axes"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the operands lie.

    Attributes:
      mesh: its other axes hold copies.
      vocab_axis: mesh axis (or axes) of the rows of the head; None where every device holds all of them.
      token_axis: mesh axis (or axes) of the tokens; None where every device holds all of them.
    """

    mesh: AnyMesh
    vocab_axis: AxisName
    token_axis: AxisName

    def devices(self, axis: AxisName) -> int:
        """How many shards an axis makes."""
        return math.prod(self.mesh.shape[name] for name in _names(axis))


class Shard(NamedTuple):
    """What one device knows of its place.

    Attributes:
      start: id of the first row of the head that it holds.
      vocab_axis: mesh axis over which statistics are merged; None when it holds the whole vocabulary.
      token_axis: mesh axis over which gradients of the head are summed; None when it holds all tokens.
    """

    start: Int[Array, ""] | int
    vocab_axis: AxisName
    token_axis: AxisName

    def tokens(self, tokens: Int[Array, " N"]) -> Int[Array, " N"]:
        """Ids counted from this shard's first row: negative, or beyond its last, for tokens of other shards."""
        return tokens.astype(jnp.int32) - self.start

    def support(self, support: UInt8[Array, "N V8"] | None, vocabulary: int) -> UInt8[Array, "N S8"] | None:
        """The support of this shard's rows."""
        if support is None or self.vocab_axis is None:
            return support
        return shard_support(support, jnp.asarray(self.start, jnp.int32), vocabulary)


def _names(axis: AxisName) -> tuple[str, ...]:
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def layout_of(mesh: Any, vocab_axis: Any, token_axis: Any) -> Layout | None:
    """The checked layout; None without a mesh. Axes without one are those of the context's (``jax.set_mesh``).

    Raises:
      TypeError: something else than a mesh, or than the names of its axes.
      ValueError: axes without a mesh, a mesh without ``vocab_axis``, an unknown axis, one that is given twice or that a
        surrounding ``shard_map`` has split, or another mesh than its.
    """
    if mesh is None:
        if vocab_axis is None and token_axis is None:
            return None
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                f"vocab_axis={vocab_axis!r} and token_axis={token_axis!r} are axes of a mesh, given mesh=None: "
                "pass the mesh too, call inside jax.set_mesh, or leave them out"
            )
    if not isinstance(mesh, AnyMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, given {mesh!r}: make one with jax.make_mesh")
    if vocab_axis is None or vocab_axis == ():
        raise ValueError(
            f"mesh with axes {list(mesh.axis_names)} needs vocab_axis, the axis that the rows of the head are sharded "
            f"over, given {vocab_axis!r}: name it (any axis may also split a head that lies whole on every device), or "
            "leave the mesh out and let the compiler follow the operands' shardings"
        )
    for name, axis in (("vocab_axis", vocab_axis), ("token_axis", token_axis)):
        if not isinstance(axis, (str, tuple, type(None))) or not all(isinstance(x, str) for x in _names(axis)):
            raise TypeError(f"{name} must be the name of a mesh axis or a tuple of names, given {axis!r}")
    names = [*_names(vocab_axis), *_names(token_axis)]
    for name in names:
        known_name("mesh axis", name, mesh.axis_names)
    if len(set(names)) < len(names):
        raise ValueError(
            f"vocab_axis={vocab_axis!r} and token_axis={token_axis!r} must not share an axis: give it to one of them"
        )
    return Layout(_around(mesh, names), vocab_axis, token_axis)


def _around(mesh: AnyMesh, names: list[str]) -> AnyMesh:
    """The mesh as a caller's own ``shard_map`` has left it: only axes that it has not split can be named."""
    context = jax.sharding.get_abstract_mesh()
    if not context.manual_axes:
        return mesh
    if dict(mesh.shape) != dict(context.shape):
        raise ValueError(
            f"mesh must be that of the shard_map around the call, with axes {dict(context.shape)}, given "
            f"{dict(mesh.shape)}: pass jax.sharding.get_abstract_mesh()"
        )
    for name in names:
        if name in context.manual_axes:
            raise ValueError(
                f"mesh axis {name!r} is split already by the shard_map around the call, in which operands are local: "
                "name an axis that is not in its axis_names, or leave mesh and its axes out"
            )
    return context


def layout_of_types(hidden: Array, head: Array) -> Layout | None:
    """The layout that operands with explicitly sharded rows have by their types; None without any."""
    mesh = explicit_mesh((hidden, head))
    of_head = rows_axes(head)
    of_tokens = tuple(name for name in rows_axes(hidden) if name not in of_head)
    return None if mesh is None or not (of_head or of_tokens) else Layout(mesh, of_head or None, of_tokens or None)


def with_automatic_axes(
    layout: Layout | None, function: Callable[..., Any], operands: tuple[Any, ...], like: Array
) -> Any:
    """``function(layout, *operands)``, inside a view of the mesh without explicit axes.

    There operands may lie anywhere, and shards need not be equal. Without a layout the mesh is that of the operands'
    types, if they have one.

    Args:
      layout: as ``layout_of`` or ``layout_of_types`` gave it.
      function: returns a pytree of ``[N, ...]`` arrays; its layout has automatic axes.
      operands: pytrees of arrays.
      like: ``[N, ...]``, one of them.

    Returns:
      Its results; where explicit axes are in the operands' types or the context, typed as sharded over those of
      ``like``'s rows, or else of ``token_axis`` (if they divide the rows), and the same along the others.
    """
    mesh = explicit_mesh(operands) if layout is None else layout.mesh
    if mesh is None or not explicit_axes(mesh):
        return function(layout, *operands)
    view = automatic(mesh)
    viewed = None if layout is None else dataclasses.replace(layout, mesh=view)
    if explicit_mesh(operands) is None and not explicit_axes(jax.sharding.get_abstract_mesh()):
        return function(viewed, *operands)  # no type speaks of the axes
    with jax.sharding.use_abstract_mesh(view.abstract_mesh if isinstance(view, Mesh) else view):
        out = function(viewed, *jax.tree.map(lambda x: jax.sharding.reshard(x, PartitionSpec()), operands))
    of_layout = () if layout is None else _names(layout.token_axis)
    names = rows_axes(like) or tuple(name for name in of_layout if name in explicit_axes(mesh))
    shards = math.prod(mesh.shape[name] for name in names)

    def typed(x: Array) -> Array:
        spec = PartitionSpec(names) if names and x.shape[0] % shards == 0 else PartitionSpec()
        placed: Array = jax.sharding.reshard(x, NamedSharding(mesh, spec))
        return placed

    return jax.tree.map(typed, out)


def _pad(x: Array, size: int, value: float = 0.0) -> Array:
    missing = size - x.shape[0]
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=value) if missing else x


def _pad_head(head: Head, size: int) -> Head:
    """Rows of padding have a bias of ``-inf``: they are in no softmax."""
    if size == head.weight.shape[0]:
        return head
    bias = jnp.zeros(head.weight.shape[0], jnp.float32) if head.bias is None else head.bias
    scale = None if head.scale is None else _pad(head.scale, size)
    return Head(_pad(head.weight, size), scale, _pad(bias, size, -jnp.inf))


def over_shards(
    layout: Layout | None,
    body: Callable[[Shard, Any, tuple[Head, ...]], Any],
    rows: Any,
    heads: tuple[Head, ...],
    *,
    head_gradients: bool = False,
) -> Any:
    """``body(shard, rows, heads)`` on every device, on its own tokens and its own rows of the heads.

    Collectives are those of the body. With a layout gradients are typed as the same along all axes of a caller's own
    ``shard_map``. A vocabulary (or a number of tokens) that the axis does not divide is padded:
    each device's share of the head is copied, and the head's gradient gathered, because JAX holds no array in unequal
    shards. Store the head with that many rows and a bias of ``-inf`` to avoid both.

    Args:
      layout: None runs the body once, on everything; else its mesh has no explicit axes.
      body: returns a pytree of ``[N, ...]`` arrays that are equal along ``vocab_axis``; with ``head_gradients`` a pair
        of such a pytree and one of ``[V, ...]`` arrays that are equal along ``token_axis``.
      rows: pytree of ``[N, ...]`` arrays.
      heads: over one vocabulary.
      head_gradients: what the body returns.
    """
    # Whoever calls from a shard_map of his own has operands that differ along its axes, and others that do not.
    rows, heads = as_varying((rows, heads), like=(rows, heads))
    if layout is None:
        return body(Shard(0, None, None), rows, heads)
    n, vocabulary = jax.tree.leaves(rows)[0].shape[0], heads[0].weight.shape[0]
    share = -(-vocabulary // layout.devices(layout.vocab_axis))
    padded_n = -(-n // layout.devices(layout.token_axis)) * layout.devices(layout.token_axis)
    padded_rows = jax.tree.map(lambda x: _pad(x, padded_n), rows)
    padded_heads = tuple(_pad_head(head, share * layout.devices(layout.vocab_axis)) for head in heads)

    # An axis of one device has nothing to merge.
    vocab_axis, token_axis = (
        axis if layout.devices(axis) > 1 else None for axis in (layout.vocab_axis, layout.token_axis)
    )

    def local(rows: Any, heads: tuple[Head, ...]) -> Any:
        start = 0 if vocab_axis is None else jax.lax.axis_index(vocab_axis) * share
        return body(Shard(start, vocab_axis, token_axis), rows, heads)

    along_tokens, along_head = PartitionSpec(layout.token_axis), PartitionSpec(layout.vocab_axis)
    out = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(along_tokens, along_head),
        out_specs=(along_tokens, along_head) if head_gradients else along_tokens,
        check_vma=False,  # Pallas kernels do not say along which axes their outputs vary
    )(padded_rows, padded_heads)
    if not head_gradients:
        return as_varying(jax.tree.map(lambda x: x[:n], out), like=(rows, heads))
    return jax.tree.map(lambda x: x[:n], out[0]), jax.tree.map(lambda x: x[:vocabulary], out[1])
