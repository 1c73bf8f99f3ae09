"""What the operators share: the choice of implementation, the head product, supports, chunking of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from trm_jax.checks import in_range, known_name
from trm_jax.numerics import AnyArray

__all__ = [
    "Implementation",
    "check_operands",
    "choose_implementation",
    "default_chunk_size",
    "head_logits",
    "in_support",
    "map_token_chunks",
    "support_at",
]

Implementation: TypeAlias = Literal["reference", "chunked", "pallas_tpu"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "chunked", "pallas_tpu")


def choose_implementation(operator: str, implementation: Implementation | None) -> Implementation:
    """``None`` picks the best available form; a named one runs or raises, it never falls back."""
    if implementation is None:
        return "chunked"
    known_name("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "pallas_tpu":
        raise NotImplementedError(
            f"{operator} has no 'pallas_tpu' kernel in this version: "
            "pass implementation='chunked' (the same values on every device) or None"
        )
    return implementation


def check_operands(
    hidden: AnyArray, head: AnyArray, tokens: AnyArray, support: AnyArray | None, temperature: float
) -> None:
    """Shapes and ranges of one policy's operands.

    Raises:
      ValueError: naming what was given and what is required.
    """
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
        raise ValueError(
            f"hidden must be [N, D] and head [V, D] (rows are tokens), given {list(hidden.shape)} and "
            f"{list(head.shape)}: flatten leading axes, transpose a [D, V] head"
        )
    if tuple(tokens.shape) != (hidden.shape[0],):
        raise ValueError(f"tokens must be [{hidden.shape[0]}], one for each row of hidden, given {list(tokens.shape)}")
    width = -(-head.shape[0] // 8)
    if support is not None and tuple(support.shape) != (hidden.shape[0], width):
        raise ValueError(
            f"support must be [{hidden.shape[0]}, {width}] uint8, one bit for each token of the head, "
            f"given {list(support.shape)}"
        )
    in_range("temperature", temperature, low=0.0, low_open=True, high_open=True)


def default_chunk_size() -> int:
    """Tokens whose logits are held at once: 128 is fastest on a CPU, an accelerator wants larger products."""
    return 128 if jax.default_backend() == "cpu" else 1024


def product_precision(*operands: AnyArray) -> jax.lax.Precision:
    """Exact products for float32 operands; one bfloat16 pass is already exact for bfloat16 ones."""
    exact = all(operand.dtype == jnp.float32 for operand in operands)
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT


def head_logits(hidden: Float[Array, "N D"], head: Float[Array, "V D"], temperature: float) -> Float[Array, "N V"]:
    """``hidden · headᵀ / temperature``, accumulated in float32 whatever the dtype of the operands."""
    dtype = jnp.promote_types(hidden.dtype, head.dtype)
    logits = jax.lax.dot_general(
        hidden.astype(dtype),
        head.astype(dtype),
        (((1,), (1,)), ((), ())),
        precision=product_precision(hidden, head),
        preferred_element_type=jnp.float32,
    )
    return logits / temperature


def support_at(support: UInt8[Array, "N V8"], vocabulary: Int[Array, " C"]) -> Bool[Array, "N C"]:
    """Whether the given vocabulary ids are in each row's support (bit ``v % 8`` of byte ``v // 8``)."""
    return (jnp.take(support, vocabulary // 8, axis=1) >> (vocabulary % 8).astype(jnp.uint8)) & 1 > 0


def in_support(support: UInt8[Array, "N V8"], tokens: Int[Array, " N"]) -> Bool[Array, " N"]:
    """Whether each row's token is in that row's support."""
    byte = jnp.take_along_axis(support, (tokens // 8)[:, None].astype(jnp.int32), axis=1)[:, 0]
    return (byte >> (tokens % 8).astype(jnp.uint8)) & 1 > 0


def restrict(logits: Float[Array, "N V"], support: UInt8[Array, "N V8"] | None) -> Float[Array, "N V"]:
    """Logits with ``-inf`` outside the support."""
    if support is None:
        return logits
    allowed = jnp.unpackbits(support, axis=1, count=logits.shape[1], bitorder="little").astype(bool)
    return jnp.where(allowed, logits, -jnp.inf)


def map_token_chunks(function: Callable[[Any], Any], rows: Any, chunk_size: int) -> Any:
    """``function`` over a pytree of ``[N, ...]`` arrays, at most ``chunk_size`` rows at a time.

    Chunk ``j`` of ``k`` takes the rows ``j, j + k, j + 2k, …``: when rows are sharded in contiguous blocks, every chunk
    keeps its share on every device, and the loop moves no rows between devices.
    """
    n = jax.tree.leaves(rows)[0].shape[0]
    count = max(1, math.ceil(n / chunk_size))
    if count == 1:
        return function(rows)
    size = math.ceil(n / count)
    pad = size * count - n

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)) if pad else x
        return padded.reshape(size, count, *x.shape[1:])

    def chunk(index: Array) -> Any:
        return function(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 1, keepdims=False), split_rows))

    split_rows = jax.tree.map(split, rows)
    outputs = jax.lax.map(chunk, jnp.arange(count))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(size * count, *x.shape[2:])[:n], outputs)
