"""Sections about the policy: its shape, its devices, and what is kept of it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from trm_jax.train.config._rules import at_least, require

__all__ = ["CheckpointConfig", "MeshConfig", "ModelConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy.

    Attributes:
      source: "scratch" (random initial weights, the task's own characters as vocabulary) or "smollm2" (pretrained
        SmolLM2-135M-Instruct; fetch it once with `trm-jax fetch smollm2`).
      path: for smollm2, the GGUF file; empty takes it from the cache.
      d_model: for scratch, width of the residual stream.
      n_layers: for scratch, number of blocks.
      n_heads: for scratch, attention heads.
      d_ff: for scratch, width of the feed-forward layer, of each expert when there are experts.
      n_experts: for scratch, number of experts; 0 is dense.
      experts_per_token: for scratch, experts a token is sent to.
      dtype: type of activations in training, "float32" or "bfloat16" (parameters stay float32).
      batch_invariant: fixed-tile arithmetic on the training side (see rollout.numerics.batch_invariant).
      remat: recompute activations in the backward pass to save memory.
    """

    source: Literal["scratch", "smollm2"] = "scratch"
    path: str = ""
    d_model: int = 96
    n_layers: int = 2
    n_heads: int = 4
    d_ff: int = 256
    n_experts: int = 0
    experts_per_token: int = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    batch_invariant: bool = False
    remat: bool = False

    def __post_init__(self) -> None:
        at_least(self, 1, "d_model", "n_layers", "n_heads", "d_ff")
        require(self.d_model % self.n_heads == 0, f"n_heads={self.n_heads} must divide d_model={self.d_model}.")
        require(
            (self.d_model // self.n_heads) % 2 == 0,
            f"d_model/n_heads={self.d_model // self.n_heads}: the width of a head must be even (rotary positions).",
        )
        require(
            self.n_experts == 0 or 1 <= self.experts_per_token <= self.n_experts,
            f"experts_per_token={self.experts_per_token} must lie in 1..n_experts={self.n_experts}.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices: ``data`` x ``tensor``.

    Attributes:
      data: ways to split rows.
      tensor: ways to split heads, feed-forward and the vocabulary of the head.
    """

    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        at_least(self, 1, "data", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved.

    Attributes:
      every: steps between checkpoints; the last step is always saved.
      keep: newest checkpoints kept.
    """

    every: int = 20
    keep: int = 2

    def __post_init__(self) -> None:
        at_least(self, 1, "every", "keep")
