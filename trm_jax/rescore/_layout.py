"""Where the operands of the operators lie, in a program that is compiled for a mesh."""

from __future__ import annotations

from typing import Any

import jax

from trm_jax.models import RULES

__all__ = ["operator_layout"]


def operator_layout() -> dict[str, Any]:
    """``mesh``, ``vocab_axis`` and ``token_axis`` of the operators, by ``RULES``; nothing without such a mesh.

    The mesh is that of ``jax.set_mesh``. Left to the compiler, the operators would run in their portable form and sum
    the gradient of the hidden states over the mesh once for every chunk of the vocabulary.

    >>> operator_layout()
    {}
    """
    mesh = jax.sharding.get_abstract_mesh()
    vocab, tokens = RULES["vocab"], RULES["batch"]
    if vocab not in mesh.axis_names or mesh.manual_axes:  # inside a caller's own shard_map the rows are local already
        return {}
    return {"mesh": mesh, "vocab_axis": vocab, "token_axis": tokens if tokens in mesh.axis_names else None}
