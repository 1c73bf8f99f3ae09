"""The arithmetic with which one side runs a transformer."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

__all__ = ["CacheDtype", "ComputeConfig", "ExpertImplementation"]

CacheDtype = Literal["float32", "bfloat16", "int8"]
ExpertImplementation = Literal["dense", "blocked", "ragged_dot", "megablox"]


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
      experts: how a mixture multiplies. "dense" runs every expert on every token; the others run the chosen ones only:
        "blocked" is a loop of plain matmuls that works everywhere, "ragged_dot" is JAX's own (on CPU and GPU its cost
        is that of "dense"), "megablox" the TPU kernel. None takes "dense" for ``batch_invariant``, else "megablox" for
        bfloat16 on a TPU, else "blocked".
      kv_cache_dtype: what keys and values of earlier positions are kept as; "int8" with a scale a token and head. A
        position attends to itself in this form too. None keeps ``dtype``.
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
    experts: ExpertImplementation | None = None
    kv_cache_dtype: CacheDtype | None = None
    routing_jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r}: choose 'float32' or 'bfloat16'.")
        if self.row_tile < 1 or self.query_tile < 1:
            raise ValueError(f"row_tile={self.row_tile} and query_tile={self.query_tile} must be at least 1.")
        if self.experts not in (None, *get_args(ExpertImplementation)):
            raise ValueError(f"experts={self.experts!r}: choose one of {', '.join(get_args(ExpertImplementation))}.")
        if self.batch_invariant and self.experts not in (None, "dense"):
            raise ValueError(
                f"experts={self.experts!r} groups tokens by expert, so their bits depend on the batch; "
                "batch_invariant=True takes experts='dense' (or None)."
            )
        if self.kv_cache_dtype not in (None, *get_args(CacheDtype)):
            raise ValueError(
                f"kv_cache_dtype={self.kv_cache_dtype!r}: choose one of {', '.join(get_args(CacheDtype))}."
            )
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
