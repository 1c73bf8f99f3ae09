"""Weight-only quantisation: what a serving engine keeps in memory instead of the trained weights."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

__all__ = ["QuantizedArray", "WeightFormat", "dequantize", "quantize"]

WeightFormat = Literal["float32", "bfloat16", "float16", "int8", "int4", "fp8"]

_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
_STORAGE = {"int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """A weight ``[..., in, out]`` as small integers (or fp8) and float32 scales, symmetric about zero.

    Attributes:
      values: ``[..., G, in/G, out]`` int8, int4 or float8_e4m3fn, ``G`` groups along the input axis.
      scales: ``[..., G, 1, out]`` float32, one for each group and output channel.
    """

    values: Array
    scales: Array


def quantize(weight: Array, fmt: Literal["int8", "int4", "fp8"], *, group_size: int | None = None) -> QuantizedArray:
    """Rounds a weight to the nearest representable value, ``w ≈ scale · q`` with ``scale = max|w| / q_max``.

    Args:
      weight: ``[..., in, out]`` floating point.
      fmt: "int8" (q_max 127), "int4" (7) or "fp8" (e4m3, 448).
      group_size: input channels that share a scale; None shares one over the whole input axis (per channel).

    Returns:
      The quantised weight. A group of zeros has scale 1 and comes back as zeros.

    Raises:
      ValueError: when ``group_size`` does not divide the input width.

    >>> import jax.numpy as jnp
    >>> q = quantize(jnp.array([[1.27], [-0.5]]), "int8")
    >>> q.values.reshape(-1).tolist()
    [127, -50]
    """
    *lead, n_in, n_out = weight.shape
    size = n_in if group_size is None else group_size
    if size < 1 or n_in % size:
        raise ValueError(f"group_size={group_size} must divide the weight's input width {n_in} (shape {weight.shape}).")
    grouped = weight.astype(jnp.float32).reshape(*lead, n_in // size, size, n_out)
    largest = jnp.max(jnp.abs(grouped), axis=-2, keepdims=True)
    scales = jnp.where(largest > 0, largest / _LARGEST[fmt], 1.0)
    scaled = grouped / scales
    if fmt != "fp8":
        scaled = jnp.clip(jnp.round(scaled), -_LARGEST[fmt], _LARGEST[fmt])
    return QuantizedArray(values=scaled.astype(_STORAGE[fmt]), scales=scales)


def dequantize(weight: Array | QuantizedArray, dtype: jnp.dtype) -> Array:
    """The weight as an array of ``dtype``, ``[..., in, out]``; plain arrays are only cast.

    >>> print(dequantize(quantize(jnp.array([[1.0], [0.3]]), "int4"), jnp.dtype("float32")).reshape(-1).round(4))
    [1.     0.2857]
    """
    if not isinstance(weight, QuantizedArray):
        return weight.astype(dtype)
    grouped = weight.values.astype(jnp.float32) * weight.scales
    *lead, groups, size, n_out = grouped.shape
    return grouped.reshape(*lead, groups * size, n_out).astype(dtype)
