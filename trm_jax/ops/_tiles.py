"""What the TPU kernels share: blocks of named operands, one tile of logits, an online softmax.

A tile is ``head · hiddenᵀ``: vocabulary on sublanes, tokens on lanes. Statistics of a token then live in one lane and
eight sublanes, a 1/16 of what they take with tokens on sublanes, and leave the kernel as rows of ``[k, N]``.

Inside a kernel a logit is ``r = z / unit``; ``unit`` holds the temperature (and the cap), so that neither costs a
multiplication. Columns outside the softmax hold ``MASKED``, finite, so that differences and products stay finite too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from trm_jax.ops._vmem import padded_bytes

__all__ = [
    "CHUNK",
    "LANES",
    "MASKED",
    "SUBLANES",
    "UNSEEN",
    "Matrix",
    "Operand",
    "Operands",
    "Softmax",
    "Tiling",
    "Units",
    "add_policy",
    "by_name",
    "fold_rows",
    "is_token",
    "lies_turned",
    "logit_tile",
    "product",
    "row_of",
    "softmax_finish",
    "softmax_start",
    "softmax_update",
]

LANES, SUBLANES = 128, 8
MASKED = -1e30
"""Logit of a column outside the softmax."""
UNSEEN = 0.5 * MASKED
"""Running maximum before any column: far above ``MASKED``, so that masked columns weigh exactly 0."""
CHUNK = 64
"""Rows of a tile that an epilogue takes at a time: few enough values to stay in registers."""


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


class Units(NamedTuple):
    """How a product becomes a logit: ``z = unit · tanh(s / cap)`` with ``unit = cap / T``, or ``unit · s``."""

    temperature: float
    soft_cap: float | None

    @property
    def unit(self) -> float:
        """Logit of ``r = 1``."""
        return (1.0 if self.soft_cap is None else self.soft_cap) / self.temperature

    @property
    def exponent(self) -> float:
        """``exp(z) = 2^(exponent · r)``."""
        return self.unit * math.log2(math.e)


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
        """Packed bits: a block holds those of 1024 tokens, a whole number of blocks of the vocabulary."""
        share, axis = 8 * LANES // tiling.vocabulary, tiling.token_axis
        self.add("support", support, (tiling.tokens, LANES), lambda *g: (g[axis], g[1 - axis] // share))


def by_name(layout: tuple[Operand, ...], refs: Any) -> tuple[dict[str, Any], Any]:
    """A kernel's inputs by name, and the references behind them: outputs and scratch."""
    named: dict[str, Any] = {}
    for name, pieces, turned in layout:
        count = max(1, pieces)
        named[name] = Matrix(tuple(refs[:count]), turned) if pieces else refs[0]
        refs = refs[count:]
    return named, refs


def lies_turned(array: Array) -> bool:
    """Whether a TPU keeps a matrix with its first axis innermost by default: where that pads it to fewer tiles.

    A kernel takes such a matrix transposed, which is how it lies already; taken upright it would be copied first.

    >>> lies_turned(jnp.zeros((1024, 576))), lies_turned(jnp.zeros((1024, 640))), lies_turned(jnp.zeros((7, 100)))
    (True, False, False)
    """
    rows, columns = array.shape
    return padded_bytes(columns, rows, array.dtype.itemsize) < padded_bytes(rows, columns, array.dtype.itemsize)


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


def product(left: Array, right: Array, contract: tuple[int, int]) -> Array:
    """Matrix product summed in float32: exact for float32 operands, one pass of the matrix unit for bfloat16."""
    dtype = jnp.promote_types(left.dtype, right.dtype)
    if jnp.issubdtype(left.dtype, jnp.integer) or jnp.issubdtype(right.dtype, jnp.integer):
        dtype = right.dtype if jnp.issubdtype(left.dtype, jnp.integer) else left.dtype  # int8 fits bfloat16
    return jax.lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _along_vocabulary(row: Array, shape: tuple[int, ...], on_lanes: bool) -> Array:
    """``[1, bv]`` spread over a tile whose tokens lie on lanes (or on sublanes)."""
    if not on_lanes:
        return jnp.broadcast_to(row, shape)
    column = jnp.broadcast_to(row, (LANES, shape[0])).T
    return jnp.concatenate([column] * (shape[1] // LANES), axis=1)


def _support_tile(bits: Array, first: Array, size: int, on_lanes: bool) -> Array:
    """Whether each token of a tile is in its row's support; ``first`` is the tile's place in the block of bits.

    The matrix unit spreads the bytes: a product with a one-hot matrix repeats byte ``v // 8`` exactly for every ``v``.
    """
    bytes_ = bits.astype(jnp.int32).astype(jnp.float32).astype(jnp.bfloat16)
    shape = (size, bytes_.shape[1])
    place = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    one_hot = (place // 8 == jax.lax.broadcasted_iota(jnp.int32, shape, 1)).astype(jnp.float32).astype(jnp.bfloat16)
    spread = product(one_hot, bytes_, (1, 1)) if on_lanes else product(bytes_, one_hot, (1, 1))
    bit = first + jax.lax.broadcasted_iota(jnp.int32, spread.shape, 0 if on_lanes else 1)
    return ((spread.astype(jnp.int32) >> (bit % 8)) & 1) > 0


def logit_tile(
    refs: dict[str, Any],
    prefix: str,
    head_prefix: str,
    columns: slice,
    units: Units,
    first: Array,
    vocabulary: int,
    *,
    ragged: bool,
    on_lanes: bool = True,
    beside: Iterator[None] | None = None,
) -> Array:
    """Logits in ``units`` of a block of the head (its first row is token ``first``) for some columns of the tokens.

    ``beside`` is other work, one piece of which is written down after each part of a long product: the scheduler mostly
    keeps the order of the program, and overlaps the vector with the matrix unit only where they alternate.
    """
    work = iter(()) if beside is None else beside
    head, hidden = refs[f"{head_prefix}head"], refs[f"{prefix}hidden"]
    r: Any = None
    for place in head.parts:
        pair = (head.part(place), 1 - head.axis), (hidden.part(place, columns), 1 - hidden.axis)
        (left, i), (right, k) = pair if on_lanes else pair[::-1]
        part = product(left, right, (i, k))
        r = part if r is None else r + part
        next(work, None)
    size = r.shape[0 if on_lanes else 1]
    allowed = None
    if (scale := refs.get(f"{head_prefix}scale")) is not None:
        r = r * _along_vocabulary(scale[...], r.shape, on_lanes)
    if (bias := refs.get(f"{prefix}bias")) is not None:
        offset = _along_vocabulary(bias[...], r.shape, on_lanes)
        r = r + offset
        allowed = offset > UNSEEN
    if units.soft_cap is not None:
        r = jnp.tanh(r * (1.0 / units.soft_cap))
    if ragged:
        inside = first + jax.lax.broadcasted_iota(jnp.int32, r.shape, 0 if on_lanes else 1) < vocabulary
        allowed = inside if allowed is None else allowed & inside
    if (support := refs.get("support")) is not None:
        within = _support_tile(support[columns, :], first % (8 * LANES), size, on_lanes)
        allowed = within if allowed is None else allowed & within
    return r if allowed is None else jnp.where(allowed, r, MASKED)


def fold_rows(tile: Array, start: int, size: int) -> Array:
    """Rows ``start … start + size`` of a tile as ``[size / 8, 8, tokens]``: axis 0 is summed without moving lanes."""
    return tile[start : start + size].reshape(size // SUBLANES, SUBLANES, tile.shape[1])


def is_token(tokens: Array, first: Array, start: int, size: int) -> Array:
    """Where a folded chunk holds each token's own column; ``tokens`` is ``[1, bn]``."""
    shape = (SUBLANES, tokens.shape[1])
    place = tokens - first - jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    folded = (size // SUBLANES, *shape)
    return place[None] == SUBLANES * jax.lax.broadcasted_iota(jnp.int32, folded, 0) + start


class Softmax(NamedTuple):
    """Running statistics of one policy, ``[8, tokens]`` each, in units of the kernel.

    Attributes:
      top: largest logit.
      total: ``Σ exp(z - top)``.
      moment: ``Σ exp(z - top) (r - top)``.
    """

    top: Array
    total: Array
    moment: Array


def softmax_start(shape: tuple[int, int]) -> Softmax:
    """Before any column."""
    zeros = jnp.zeros(shape, jnp.float32)
    return Softmax(jnp.full(shape, UNSEEN, jnp.float32), zeros, zeros)


def softmax_update(old: Softmax, top: Array, exponent: float) -> tuple[Softmax, Array]:
    """The statistics referred to a larger top, and the factor that does so."""
    gap = old.top - top
    factor = jnp.exp2(exponent * gap)
    return Softmax(top, factor * old.total, factor * (old.moment + gap * old.total)), factor


def softmax_finish(parts: Softmax, exponent: float) -> tuple[Softmax, Array]:
    """The eight sublanes merged, ``[1, tokens]``, and the factor of each."""
    top = jnp.max(parts.top, axis=0, keepdims=True)
    scaled, factor = softmax_update(parts, jnp.broadcast_to(top, parts.top.shape), exponent)
    return Softmax(top, *(jnp.sum(x, axis=0, keepdims=True) for x in scaled[1:])), factor
