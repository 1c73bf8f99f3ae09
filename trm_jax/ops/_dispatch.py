"""Which implementation runs, and the sizes that suit the platform it runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax

from trm_jax.checks import known_name

__all__ = [
    "AnyMesh",
    "Implementation",
    "choose_implementation",
    "default_chunk_size",
    "placed",
    "platform_of",
    "rows_at_once",
]

Implementation: TypeAlias = Literal["reference", "chunked", "pallas_tpu"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "chunked", "pallas_tpu")

AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh


def platform_of(mesh: AnyMesh | None) -> str:
    """``"cpu"``, ``"tpu"`` or ``"gpu"``: of the mesh's devices, or the context's, or else the default backend."""
    if isinstance(mesh, jax.sharding.Mesh):
        return str(mesh.devices.flat[0].platform)
    for abstract in (mesh, jax.sharding.get_abstract_mesh()):
        platform = getattr(getattr(abstract, "abstract_device", None), "platform", None)
        if platform is not None:
            return str(platform)
    return jax.default_backend()


def placed(mesh: AnyMesh | None) -> bool:
    """Each device works on what it holds: under a mesh that was given, or as the only one.

    Elsewhere the compiler may have to follow operands that several devices share.
    """
    return mesh is not None or jax.device_count() == 1


def choose_implementation(
    operator: str,
    implementation: Implementation | None,
    *,
    mesh: AnyMesh | None = None,
    interpret: Any = False,
    typed_by_shard_map: bool = False,
    check_blocks: Callable[[], None] = lambda: None,
) -> Implementation:
    """``None`` picks the best that can run; a named one runs or raises, it never falls back.

    The best is the kernel on one TPU and on a mesh of them, as long as a block of it fits the chip; the chunked form
    elsewhere.

    Args:
      operator: named in the messages.
      implementation: as the user gave it.
      mesh: where the operands live, when they are sharded.
      interpret: run a kernel in Pallas' interpreter, on any platform.
      typed_by_shard_map: the operands are those of a caller's own ``shard_map``, which checks along which axes they
        vary; a kernel does not say that of its results.
      check_blocks: raises ``NotImplementedError`` when no block of the kernel fits the TPU.

    Raises:
      TypeError: ``interpret`` is not a bool.
      ValueError: an unknown name, or the reference on a mesh.
      NotImplementedError: a kernel on a platform that it has not been made for, or where it cannot run.
    """
    if not isinstance(interpret, bool):
        raise TypeError(f"{operator}: interpret must be True or False, given {interpret!r}")
    on_tpu = platform_of(mesh) == "tpu"
    if implementation is None:
        # The compiler cannot split a kernel: without a mesh it would gather operands that several devices share.
        if typed_by_shard_map or not ((on_tpu and placed(mesh)) or interpret):
            return "chunked"
        try:
            if not interpret:
                check_blocks()
        except NotImplementedError:
            return "chunked"
        return "pallas_tpu"
    known_name("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "reference" and mesh is not None:
        raise ValueError(
            f"{operator}: implementation='reference' holds full logits and takes no mesh: leave mesh and its axes out "
            "(the compiler shards it), or pass implementation='chunked'"
        )
    if implementation == "pallas_tpu" and not (on_tpu or interpret):
        raise NotImplementedError(
            f"{operator}: implementation='pallas_tpu' needs a TPU, given platform {platform_of(mesh)!r}: pass "
            "implementation='chunked' (the same values on every device) or None, or interpret=True to run the kernel "
            "slowly on this platform"
        )
    if implementation == "pallas_tpu" and typed_by_shard_map:
        raise NotImplementedError(
            f"{operator}: implementation='pallas_tpu' does not say along which axes of a shard_map its results vary: "
            "pass check_vma=False to your shard_map, or implementation='chunked' or None here"
        )
    if implementation == "pallas_tpu" and not interpret:
        check_blocks()
    return implementation


def default_chunk_size(platform: str) -> int:
    """Tokens whose logits are held at once: an accelerator wants larger products than a CPU."""
    return 256 if platform == "cpu" else 1024


def rows_at_once(platform: str) -> int:
    """Rows of held logits that are reduced together: a few stay in a CPU's cache, an accelerator wants them all."""
    return 8 if platform == "cpu" else 1 << 30
