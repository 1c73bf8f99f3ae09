"""What every block is made of: the matrix product, the normalisation, the gated feed-forward layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from trm_jax.models._compute import ComputeConfig
from trm_jax.models._quantize import QuantizedArray, dequantize

__all__ = ["dense", "feed_forward", "rms_norm", "silu"]


def dense(x: Array, weight: Array | QuantizedArray, compute: ComputeConfig) -> Array:
    """``x @ weight`` accumulated in float32, in the compute dtype; ``x`` ``[..., in]``, ``weight`` ``[in, out]``."""
    w = dequantize(weight, compute.jnp_dtype)
    y = jnp.matmul(x.astype(compute.jnp_dtype), w, precision=compute.precision, preferred_element_type=jnp.float32)
    return y.astype(compute.jnp_dtype)


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """``x / sqrt(mean(x²) + eps) · scale`` over the last axis, in float32, returned in the type of ``x``."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps) * scale.astype(jnp.float32)).astype(x.dtype)


def silu(x: Array) -> Array:
    """``x · sigmoid(x)`` in float32, returned in the type of ``x``."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def feed_forward(x: Array, block: dict[str, Any], compute: ComputeConfig, prefix: str = "") -> Array:
    """SwiGLU: ``(silu(x W_gate) · (x W_up)) W_down``, with the block's weights whose names start with ``prefix``."""
    gate, up = (dense(x, block[prefix + name], compute) for name in ("gate", "up"))
    return dense(silu(gate) * up, block[prefix + "down"], compute)
