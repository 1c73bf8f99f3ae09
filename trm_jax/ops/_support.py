"""Supports of truncated sampling: ``[N, ceil(V/8)]`` bits, bit ``v % 8`` of byte ``v // 8`` for token ``v``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt8

__all__ = ["in_support", "shard_support", "support_at", "unpack_support"]


def unpack_support(support: UInt8[Array, "N V8"], vocabulary: int) -> Bool[Array, "N V"]:
    """Whether each token is in each row's support."""
    if support.shape[0] == 0:  # which jnp.unpackbits divides by
        return jnp.zeros((0, vocabulary), bool)
    bits: Array = jnp.unpackbits(support, axis=1, count=vocabulary, bitorder="little")
    return bits.astype(bool)


def support_at(support: UInt8[Array, "N V8"], vocabulary: Int[Array, " C"]) -> Bool[Array, "N C"]:
    """Whether the given vocabulary ids are in each row's support."""
    out: Array = (jnp.take(support, vocabulary // 8, axis=1) >> (vocabulary % 8).astype(jnp.uint8)[None, :]) & 1 > 0
    return out


def in_support(support: UInt8[Array, "N V8"], tokens: Int[Array, " N"]) -> Bool[Array, " N"]:
    """Whether each row's token is in that row's support."""
    byte = jnp.take_along_axis(support, (tokens // 8)[:, None].astype(jnp.int32), axis=1)[:, 0]
    return (byte >> (tokens % 8).astype(jnp.uint8)) & 1 > 0


def shard_support(support: UInt8[Array, "N V8"], start: Int[Array, ""], vocabulary: int) -> UInt8[Array, "N S8"]:
    """The support of the ``vocabulary`` ids from ``start`` on, as a support of its own: its bit 0 is the id ``start``.

    Ids beyond the end are in no support.

    >>> bits = jnp.array([[0b1000_0001, 0b0000_0001]], jnp.uint8)
    >>> print(shard_support(bits, jnp.int32(7), 3))
    [[3]]
    """
    width = -(-vocabulary // 8)
    padded = jnp.pad(support, ((0, 0), (0, width + 1)))
    window = jax.lax.dynamic_slice_in_dim(padded, start // 8, width + 1, axis=1)
    shift = (start % 8).astype(jnp.uint8)
    # uint8 drops what is shifted beyond it; a shift by 8 is not defined, hence the two steps.
    out: Array = (window[:, :-1] >> shift) | ((window[:, 1:] << (jnp.uint8(7) - shift)) << jnp.uint8(1))
    return out
