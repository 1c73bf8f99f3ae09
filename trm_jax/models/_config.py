"""The shape of a transformer and the arithmetic with which one side runs it."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

__all__ = ["ComputeConfig", "TransformerConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shape of a decoder-only transformer (RMSNorm, rotary positions, grouped-query attention, SwiGLU or MoE).

    Attributes:
      vocab_size: ``V``, number of token ids.
      d_model: ``D``, width of the residual stream.
      n_layers: number of blocks.
      n_heads: query heads.
      n_kv_heads: key/value heads; divides ``n_heads``.
      head_dim: width of one head; even (rotary positions turn pairs).
      d_ff: width of the gated feed-forward layer (of each expert when ``n_experts > 0``).
      n_experts: number of experts; 0 makes every block dense.
      experts_per_token: experts a token is sent to, 1 .. ``n_experts``.
      rope_theta: base of the rotary frequencies.
      norm_eps: added to the mean square in RMSNorm.
      tie_embeddings: the output head is the input embedding.

    Raises:
      ValueError: for a shape that cannot be built, naming field, value and rule.

    >>> TransformerConfig(vocab_size=16, n_heads=4, n_kv_heads=3)
    Traceback (most recent call last):
      ...
    ValueError: n_kv_heads=3 must divide n_heads=4.
    """

    vocab_size: int
    d_model: int = 96
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 4
    head_dim: int = 24
    d_ff: int = 256
    n_experts: int = 0
    experts_per_token: int = 2
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1.")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs of coordinates.")
        if self.n_experts < 0:
            raise ValueError(f"n_experts={self.n_experts}: must be 0 (dense) or more.")
        if self.n_experts and not 1 <= self.experts_per_token <= self.n_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} must lie in 1..n_experts={self.n_experts}.")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError(f"rope_theta={self.rope_theta} and norm_eps={self.norm_eps} must be positive.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """The arithmetic of one forward pass. Two sides with unequal values are two policies.

    Attributes:
      dtype: type of activations and matmul inputs. Matmuls accumulate in float32; norms, softmax and the router
        run in float32.
      batch_invariant: every reduction runs on tiles of one fixed shape, so that a token's result does not depend on
        what else is in the batch: decode, prefill, rescore and training agree to the bit (measured on CPU). Slower.
      row_tile: rows of such a tile.
      query_tile: queries of a tile of attention.
      routing_jitter: standard deviation of Gaussian noise on the router's logits, in logit units (MoE only); stands
        for the non-deterministic kernels that flip experts in a serving engine.

    Raises:
      ValueError: naming field, value and rule.

    >>> ComputeConfig(dtype="bfloat16").jnp_dtype
    dtype(bfloat16)
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    batch_invariant: bool = False
    row_tile: int = 64
    query_tile: int = 8
    routing_jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r}: choose 'float32' or 'bfloat16'.")
        if self.row_tile < 1 or self.query_tile < 1:
            raise ValueError(f"row_tile={self.row_tile} and query_tile={self.query_tile} must be at least 1.")
        if not self.routing_jitter >= 0:
            raise ValueError(f"routing_jitter={self.routing_jitter}: must be 0 or more.")

    @property
    def jnp_dtype(self) -> jnp.dtype:
        """``dtype`` as JAX wants it."""
        return jnp.dtype(self.dtype)

    @property
    def precision(self) -> jax.lax.Precision:
        """Float32 inputs are multiplied as float32 on every platform (a TPU would round them to bfloat16)."""
        return jax.lax.Precision.HIGHEST if self.dtype == "float32" else jax.lax.Precision.DEFAULT
