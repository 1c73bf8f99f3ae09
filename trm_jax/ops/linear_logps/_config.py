"""Block sizes of the log-prob kernels."""

from __future__ import annotations

from trm_jax.ops._online_softmax import Softmax
from trm_jax.ops._vmem import Chip, padded_bytes, pick_blocks

__all__ = ["STATE", "gradient_bytes", "logps_blocks", "statistics_bytes"]

STATE = len(Softmax._fields)
"""Arrays of ``[8, tokens]`` that the forward sweep keeps between tiles."""

_CANDIDATES = ((1024, 512), (512, 512), (512, 256), (256, 256), (256, 128), (128, 128))


def _operand_bytes(
    tokens: int, vocabulary: int, width: int, hidden_itemsize: int, head_itemsize: int, supported: bool
) -> int:
    """Double-buffered inputs, and the copies in which an int8 or float32 operand meets the matrix unit."""
    hidden, head = padded_bytes(tokens, width, hidden_itemsize), padded_bytes(vocabulary, width, head_itemsize)
    rows = 6 * padded_bytes(1, tokens, 4) + 2 * padded_bytes(1, vocabulary, 4) + padded_bytes(8, tokens, 4)
    bits = padded_bytes(tokens, 128, 1) if supported else 0
    copies = 0
    if head_itemsize != 2:
        copies += padded_bytes(vocabulary, width, 6 if head_itemsize == 4 else 2)
    if hidden_itemsize == 4:
        copies += padded_bytes(tokens, width, 6)
    return 2 * (hidden + head + rows + bits) + copies


def statistics_bytes(
    tokens: int, vocabulary: int, width: int, hidden_itemsize: int, head_itemsize: int, supported: bool
) -> int:
    """Vector memory of the forward sweep, term by term."""
    tiles = (2 + 2 * supported) * padded_bytes(vocabulary, tokens, 4)
    state = (STATE + 1) * padded_bytes(8, tokens, 4)  # and the token's logit, where the kernel picks it out
    return _operand_bytes(tokens, vocabulary, width, hidden_itemsize, head_itemsize, supported) + tiles + state


def gradient_bytes(
    tokens: int, vocabulary: int, width: int, hidden_itemsize: int, head_itemsize: int, supported: bool
) -> int:
    """Vector memory of either gradient sweep: operands, a float32 accumulator, the block it leaves in, tiles."""
    rows = max(tokens, vocabulary)
    accumulator = padded_bytes(rows, width, 4)
    output = 2 * padded_bytes(rows, width, 4)
    product = padded_bytes(rows, width, 4)  # before it is added to the accumulator
    cleaned = padded_bytes(tokens, width, hidden_itemsize)
    tiles = (4 + 2 * supported) * padded_bytes(vocabulary, tokens, 4) + padded_bytes(tokens, 128, 4)
    operands = _operand_bytes(tokens, vocabulary, width, hidden_itemsize, head_itemsize, supported)
    return operands + accumulator + output + product + cleaned + tiles


def logps_blocks(
    chip: Chip, n: int, width: int, hidden_itemsize: int, head_itemsize: int, *, supported: bool, gradient: bool
) -> tuple[int, int]:
    """``(tokens, vocabulary)``: the largest block that fits, no larger than the tokens need.

    >>> from trm_jax.ops._vmem import CHIPS
    >>> logps_blocks(CHIPS["v6e"], 4096, 4096, 2, 2, supported=False, gradient=False)
    (1024, 512)
    """
    enough = max(128, -(-n // 128) * 128)
    candidates = [(min(tokens, enough), vocabulary) for tokens, vocabulary in _CANDIDATES]
    count = gradient_bytes if gradient else statistics_bytes

    def bytes_of(tokens: int, vocabulary: int) -> int:
        return count(tokens, vocabulary, width, hidden_itemsize, head_itemsize, supported)

    return pick_blocks(chip, candidates, bytes_of, f"log-probs of width {width}")
