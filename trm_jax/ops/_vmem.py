"""TPU generations and how large the blocks of a kernel may be on each.

The compiler accepts any ``vmem_limit_bytes`` and fails later, so a kernel asks for blocks whose bytes, added term by
term, stay below the memory that one core really has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from jax.experimental.pallas import tpu as pltpu

__all__ = ["CHIPS", "Chip", "chip_of", "padded_bytes", "pick_blocks"]

_MIB = 1024 * 1024
_SPARE = 0.9
"""Share of the limit that a budget may fill; the rest is the compiler's: spills, semaphores, alignment."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TensorCore of a TPU generation.

    Attributes:
      name: as in a topology name, ``"v5e"``.
      vmem_bytes: vector memory that a kernel can use.
      flops_per_cycle: bfloat16 matrix unit, multiply and add counted apart.
    """

    name: str
    vmem_bytes: int
    flops_per_cycle: int


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 16 * _MIB, 131_072),
        Chip("v5e", 128 * _MIB, 131_072),
        Chip("v5p", 63 * _MIB, 131_072),
        Chip("v6e", 128 * _MIB, 524_288),
        Chip("tpu7x", 64 * _MIB, 524_288),
    )
}
"""Limits seen in the compiler's refusals (v5p 63.94 MiB); peaks are the vendor's FLOP/s over the clock."""

_VERSIONS = {
    pltpu.ChipVersion.TPU_V4: "v4",
    pltpu.ChipVersion.TPU_V5E: "v5e",
    pltpu.ChipVersion.TPU_V5P: "v5p",
    pltpu.ChipVersion.TPU_V6E: "v6e",
    pltpu.ChipVersion.TPU_7: "tpu7x",
    pltpu.ChipVersion.TPU_7X: "tpu7x",
}


def chip_of(name: str | None) -> Chip:
    """The named chip; with None that of the abstract mesh or the default device; off TPU (interpreter) v5p.

    Raises:
      ValueError: on a name that is not in ``CHIPS``.
      NotImplementedError: on a TPU that is not in ``CHIPS``.

    >>> chip_of("v6e").flops_per_cycle
    524288
    """
    if name is not None:
        if name not in CHIPS:
            raise ValueError(f"unknown chip {name!r}: choose one of {', '.join(CHIPS)}")
        return CHIPS[name]
    try:
        version = pltpu.get_tpu_info().chip_version
    except ValueError:  # no TPU here
        return CHIPS["v5p"]
    if version not in _VERSIONS:
        raise NotImplementedError(f"no kernel blocks for {version}: pass implementation='chunked'")
    return CHIPS[_VERSIONS[version]]


def padded_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Bytes of a block in vector memory: tiles of 32 bytes by 128 lanes.

    >>> padded_bytes(1, 100, 4), padded_bytes(16, 256, 2)
    (4096, 8192)
    """
    tile = 32 // itemsize
    return -(-rows // tile) * tile * -(-columns // 128) * 128 * itemsize


def pick_blocks(
    chip: Chip, candidates: Iterable[tuple[int, int]], bytes_of: Callable[[int, int], int], what: str
) -> tuple[int, int]:
    """The first ``(tokens, vocabulary)`` block that fits the chip.

    Raises:
      NotImplementedError: when none does.
    """
    limit = int(chip.vmem_bytes * _SPARE)
    for tokens, vocabulary in candidates:
        if bytes_of(tokens, vocabulary) <= limit:
            return tokens, vocabulary
    raise NotImplementedError(
        f"{what} does not fit the {chip.vmem_bytes // _MIB} MiB of vector memory of {chip.name} in any block: "
        "pass implementation='chunked'"
    )
