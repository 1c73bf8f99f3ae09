"""Block sizes of the divergence kernels."""

from __future__ import annotations

import math

from trm_jax.ops._online_softmax import Softmax
from trm_jax.ops._vmem import Chip, padded_bytes, pick_blocks

__all__ = ["STATE", "SUMS", "divergence_blocks", "divergence_bytes", "held_columns"]

SUMS = 2 * len(Softmax._fields) + 4
"""Running sums of the first sweep: both policies', curvature, moment, and both of the bans."""

STATE = SUMS + 5
"""Arrays of ``[8, tokens]`` kept between its tiles: the sums, both tops, and the numbers of ``outlook``."""

_CANDIDATES = ((1024, 512), (512, 512), (512, 256), (256, 256), (256, 128), (128, 128))
"""Large token blocks first: the head is read from memory once for each of them."""


def held_columns(tokens: int) -> int:
    """Token columns whose products an epilogue waits for, in a block of ``tokens``.

    >>> held_columns(1024), held_columns(128)
    (256, 128)
    """
    return math.gcd(tokens, 256)


def divergence_bytes(
    tokens: int,
    vocabulary: int,
    widths: tuple[int, int],
    hidden_itemsizes: tuple[int, int],
    head_itemsizes: tuple[int, ...],
    *,
    supported: bool,
) -> int:
    """Vector memory of either pass, term by term; a shared head is one entry of ``head_itemsizes``."""
    double = 2  # the next block is fetched while this one is used
    hidden = sum(padded_bytes(tokens, d, size) for d, size in zip(widths, hidden_itemsizes, strict=True))
    head = sum(padded_bytes(vocabulary, d, size) for d, size in zip(widths, head_itemsizes, strict=False))
    rows = 12 * padded_bytes(1, tokens, 4) + 4 * padded_bytes(1, vocabulary, 4) + padded_bytes(16, tokens, 4)
    bits = padded_bytes(tokens, 128, 1) if supported else 0
    state = (STATE + 2) * padded_bytes(8, tokens, 4)  # and the token's logits, where the kernel picks them out
    tile = padded_bytes(vocabulary, tokens, 4)
    # Both policies' logits, what the compiler spills of the epilogue, and the columns held over to the next tile.
    logits = (3 + 2 * supported) * tile + 2 * padded_bytes(vocabulary, held_columns(tokens), 4)
    # An int8 head is widened, and a float32 one split in three, before it meets the matrix unit.
    widened = sum(
        padded_bytes(vocabulary, d, 6 if size == 4 else 2)
        for d, size in zip(widths, head_itemsizes, strict=False)
        if size != 2
    )
    split = sum(padded_bytes(tokens, d, 6) for d, size in zip(widths, hidden_itemsizes, strict=True) if size == 4)
    return double * (hidden + head + rows + bits) + state + logits + widened + split


def divergence_blocks(
    chip: Chip,
    n: int,
    widths: tuple[int, int],
    hidden_itemsizes: tuple[int, int],
    head_itemsizes: tuple[int, ...],
    *,
    supported: bool,
) -> tuple[int, int]:
    """``(tokens, vocabulary)``: the largest block that fits, no larger than the tokens need.

    >>> from trm_jax.ops._vmem import CHIPS
    >>> divergence_blocks(CHIPS["v6e"], 4096, (4096, 4096), (2, 2), (2,), supported=False)
    (1024, 512)
    """
    enough = max(128, -(-n // 128) * 128)
    candidates = [(min(tokens, enough), vocabulary) for tokens, vocabulary in _CANDIDATES]

    def bytes_of(tokens: int, vocabulary: int) -> int:
        return divergence_bytes(tokens, vocabulary, widths, hidden_itemsizes, head_itemsizes, supported=supported)

    return pick_blocks(chip, candidates, bytes_of, f"a divergence of widths {widths}")
