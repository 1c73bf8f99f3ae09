"""What an operator's call comes to: the form that runs, where, and in chunks of what size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array

from trm_jax.ops._axis_types import check_devices, varying
from trm_jax.ops._dispatch import Implementation, choose_implementation, default_chunk_size, platform_of, rows_at_once
from trm_jax.ops._sharding import Layout, layout_of_types

__all__ = ["Choice", "choose"]


class Choice(NamedTuple):
    """Everything that a call leaves open.

    Attributes:
      implementation: that runs.
      layout: None on one device, or where the compiler shards.
      chunk_size: tokens whose logits are held at once.
      rows_at_once: of these, how many are reduced together.
    """

    implementation: Implementation
    layout: Layout | None
    chunk_size: int
    rows_at_once: int


def choose(
    operator: str,
    implementation: Implementation | None,
    layout: Layout | None,
    *,
    hidden: Array,
    head: Array,
    operands: Any,
    chunk_size: int | None,
    interpret: bool,
    check_blocks: Callable[[], None],
) -> Choice:
    """From what the caller gave; where that is None, from the types of the operands and the platform.

    Args:
      operator: named in the messages.
      implementation: as the user gave it; the errors are ``choose_implementation``'s.
      layout: of the user's mesh.
      hidden: whose type says over which explicit axes the tokens lie.
      head: likewise of the vocabulary.
      operands: all of them.
      chunk_size: as the user gave it, checked.
      interpret: as the user gave it.
      check_blocks: raises ``NotImplementedError`` when no block of the kernel fits the TPU.
    """
    if layout is not None:
        check_devices(layout.mesh, operands)
    if layout is None and implementation != "reference":
        layout = layout_of_types(hidden, head)
    mesh = None if layout is None else layout.mesh
    chosen = choose_implementation(
        operator,
        implementation,
        mesh=mesh,
        interpret=interpret,
        typed_by_shard_map=bool(varying(operands)),
        check_blocks=check_blocks,
    )
    if hidden.shape[0] == 0 and chosen == "pallas_tpu":
        chosen = "chunked"  # nothing to run a kernel on
    platform = platform_of(mesh)
    return Choice(chosen, layout, int(chunk_size or default_chunk_size(platform)), rows_at_once(platform))
