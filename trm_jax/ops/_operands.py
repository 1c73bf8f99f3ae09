"""What a kernel reads: blocks of named operands, matrices as they lie in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from trm_jax.numerics import AnyArray
from trm_jax.ops._tiles import LANES, MASKED, SUBLANES

__all__ = [
    "Matrix",
    "Operand",
    "Operands",
    "Tiling",
    "add_policy",
    "by_name",
    "lies_turned",
    "row_of",
]


class Tiling(NamedTuple):
    """Blocks and grid of a kernel.

    Attributes:
      tokens: rows of ``hidden`` in a block.
      vocabulary: rows of ``head`` in a block.
      token_axis: grid axis that walks over the tokens; the other one walks over the vocabulary.
    """

    tokens: int
    vocabulary: int
    token_axis: int

    def grid(self, n: int, v: int) -> tuple[int, int]:
        """Blocks along both axes."""
        counts = (-(-n // self.tokens), -(-v // self.vocabulary))
        return counts if self.token_axis == 0 else counts[::-1]

    def by_token(self, row: bool) -> Callable[..., tuple[Any, int]]:
        """Index map of ``[N, ·]`` blocks, or of ``[·, N]`` ones with ``row``."""
        axis = self.token_axis
        return (lambda *g: (0, g[axis])) if row else (lambda *g: (g[axis], 0))

    def by_vocabulary(self, row: bool) -> Callable[..., tuple[Any, int]]:
        """Index map of ``[V, ·]`` blocks, or of ``[·, V]`` ones with ``row``."""
        axis = 1 - self.token_axis
        return (lambda *g: (0, g[axis])) if row else (lambda *g: (g[axis], 0))


class Operand(NamedTuple):
    """What a kernel's references are called.

    Attributes:
      name: of the operand.
      pieces: into how many references a matrix is cut along its width; 0 is one reference of anything else.
      turned: the matrix is given transposed.
    """

    name: str
    pieces: int
    turned: bool


class Matrix(NamedTuple):
    """A block of rows of a matrix, in pieces along its width."""

    refs: tuple[Any, ...]
    turned: bool

    @property
    def axis(self) -> int:
        """Of the rows in a part."""
        return 1 if self.turned else 0

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return self.refs[0].dtype

    @property
    def parts(self) -> list[slice]:
        """Places of the parts along the width."""
        width = self.refs[0].shape[0] if self.turned else sum(ref.shape[1] for ref in self.refs)
        size = _piece(width) if self.turned else self.refs[0].shape[1]
        return [slice(start, start + size) for start in range(0, width, size)]

    def part(self, place: slice, rows: slice = slice(None)) -> Array:
        """Some rows of one part, transposed if the matrix is."""
        if self.turned:
            out: Array = self.refs[0][place, rows]
        else:
            out = self.refs[place.start // (place.stop - place.start)][rows, :]
        return out


def _piece(width: int) -> int:
    return next((size for size in (512, 256) if width % size == 0), width)


class Operands:
    """Arrays of a kernel by name, each with its block; an array that is None is left out."""

    def __init__(self) -> None:
        self.layout: list[Operand] = []
        self.arrays: list[Any] = []
        self.specs: list[Any] = []

    def add(self, name: str, array: Any, block: tuple[int, int], index_map: Callable[..., Any]) -> None:
        """One more operand."""
        if array is not None:
            self.layout.append(Operand(name, 0, False))
            self.arrays.append(array)
            self.specs.append(pl.BlockSpec(block, index_map))

    def add_matrix(self, name: str, array: Array, rows: int, index_of: Callable[[bool], Callable[..., Any]]) -> None:
        """Blocks of ``rows`` whole rows of a matrix, as it lies in memory.

        A wide one comes in pieces of 512 columns: of wider bfloat16 blocks halves are read, which the vector unit
        puts together before each use.
        """
        width, turned = array.shape[1], lies_turned(array)
        size = width if turned else _piece(width)
        self.layout.append(Operand(name, width // size, turned))
        for k in range(width // size):
            self.arrays.append(array.T if turned else array)
            index_map = index_of(turned)
            if not turned:
                index_map = functools.partial(lambda k, index_map, *g: (index_map(*g)[0], k), k, index_map)
            self.specs.append(pl.BlockSpec((width, rows) if turned else (rows, size), index_map))

    def add_support(self, support: Array | None, tiling: Tiling) -> None:
        """Packed bits, as they lie: a block holds those of 1024 tokens, a whole number of blocks of the vocabulary."""
        if support is None:
            return
        share, axis, turned = 8 * LANES // tiling.vocabulary, tiling.token_axis, lies_turned(support)
        self.layout.append(Operand("support", 1, turned))
        self.arrays.append(support.T if turned else support)
        block = (tiling.tokens, LANES)

        def place(*g: Any) -> tuple[Any, Any]:
            where = (g[axis], g[1 - axis] // share)
            return where[::-1] if turned else where

        self.specs.append(pl.BlockSpec(block[::-1] if turned else block, place))


def by_name(layout: tuple[Operand, ...], refs: Any) -> tuple[dict[str, Any], Any]:
    """A kernel's inputs by name, and the references behind them: outputs and scratch."""
    named: dict[str, Any] = {}
    for name, pieces, turned in layout:
        count = max(1, pieces)
        named[name] = Matrix(tuple(refs[:count]), turned) if pieces else refs[0]
        refs = refs[count:]
    return named, refs


def lies_turned(array: AnyArray) -> bool:
    """Whether a TPU keeps a matrix with its first axis innermost by default: where fewer tiles of 8 by 128 pad it so.

    A kernel takes such a matrix transposed, which is how it lies already; taken upright it would be copied first.

    >>> [lies_turned(jnp.zeros(shape)) for shape in ((1024, 576), (1024, 632), (1024, 636), (1024, 640), (7, 100))]
    [True, True, False, False, False]
    """
    rows, columns = array.shape
    upright, turned = (-(-a // SUBLANES) * -(-b // LANES) for a, b in ((rows, columns), (columns, rows)))
    return turned < upright


def row_of(values: Array | None, dtype: Any = jnp.float32) -> Array | None:
    """``[N]`` as ``[1, N]``: a column would be padded to 128 lanes in memory."""
    return None if values is None else values.astype(dtype)[None, :]


def add_policy(
    operands: Operands,
    tiling: Tiling,
    prefix: str,
    hidden: Array,
    head: Array | None,
    scale: Array | None,
    bias: Array | None,
) -> None:
    """Adds the operands of one policy; ``head`` None shares the other policy's."""
    operands.add_matrix(f"{prefix}hidden", hidden, tiling.tokens, tiling.by_token)
    if head is not None:
        operands.add_matrix(f"{prefix}head", head, tiling.vocabulary, tiling.by_vocabulary)
        operands.add(f"{prefix}scale", row_of(scale), (1, tiling.vocabulary), tiling.by_vocabulary(row=True))
    if bias is not None:
        floor = jnp.maximum(bias.astype(jnp.float32)[None, :], MASKED)  # -inf minus -inf would be NaN
        operands.add(f"{prefix}bias", floor, (1, tiling.vocabulary), tiling.by_vocabulary(row=True))
