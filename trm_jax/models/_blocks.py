"""The parameters of a group of equal blocks, stacked on a leading layer axis."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from trm_jax.models._config import TransformerConfig

__all__ = ["Blocks"]


class Blocks(nnx.Module):
    """Parameters of ``layers`` equal blocks; matrices are ``[layer, in, out]``, of experts ``[layer, E, in, out]``.

    Args:
      config: the shape.
      layers: how many.
      experts: blocks with experts, or the dense ones of ``config``.
      rngs: ``nnx.Rngs(params=...)``.
      param_dtype: type of the stored parameters.
    """

    def __init__(
        self, config: TransformerConfig, *, layers: int, experts: bool, rngs: nnx.Rngs, param_dtype: jnp.dtype
    ) -> None:
        width = config.d_model
        residual = 1.0 / math.sqrt(2.0 * config.n_layers)

        def param(shape: tuple[int, ...], axes: tuple[str, ...], gain: float = 1.0) -> nnx.Param[Array]:
            scale = gain / math.sqrt(shape[-2])
            value = jax.random.normal(rngs.params(), (layers, *shape), param_dtype) * scale
            return nnx.Param(value, logical_axes=("layer", *axes))

        def ones(size: int = width) -> nnx.Param[Array]:
            return nnx.Param(jnp.ones((layers, size), param_dtype), logical_axes=("layer", "norm"))

        def zeros(size: int) -> nnx.Param[Array]:
            return nnx.Param(jnp.zeros((layers, size), param_dtype), logical_axes=("layer", "bias"))

        def feed_forward(prefix: str, ff: int, lead: tuple[int, ...] = ()) -> None:
            axes = ("expert",) * len(lead)
            setattr(self, prefix + "gate", param((*lead, width, ff), (*axes, "embed", "mlp")))
            setattr(self, prefix + "up", param((*lead, width, ff), (*axes, "embed", "mlp")))
            setattr(self, prefix + "down", param((*lead, ff, width), (*axes, "mlp", "embed"), residual))

        self.attention_norm = ones()
        heads = config.n_heads * config.head_dim
        if config.latent is None:
            kv_heads = config.n_kv_heads * config.head_dim
            self.query = param((width, heads), ("embed", "heads"))
            self.key = param((width, kv_heads), ("embed", "kv_heads"))
            self.value = param((width, kv_heads), ("embed", "kv_heads"))
            if config.qkv_bias:
                self.query_bias, self.key_bias, self.value_bias = zeros(heads), zeros(kv_heads), zeros(kv_heads)
            if config.qk_norm:
                self.query_norm, self.key_norm = ones(config.head_dim), ones(config.head_dim)
            values = heads
        else:
            latent = config.latent
            if latent.query_rank is None:
                self.query = param((width, heads), ("embed", "heads"))
            else:
                self.query_down = param((width, latent.query_rank), ("embed", "latent"))
                self.query_norm = ones(latent.query_rank)
                self.query_up = param((latent.query_rank, heads), ("latent", "heads"))
            values = config.n_heads * latent.value_dim
            expanded = heads - config.n_heads * latent.rope_dim + values
            self.kv_down = param((width, latent.kv_rank + latent.rope_dim), ("embed", "latent"))
            self.kv_norm = ones(latent.kv_rank)
            self.kv_up = param((latent.kv_rank, expanded), ("latent", "heads"))
        self.output = param((values, width), ("heads", "embed"), residual)

        self.mlp_norm = ones()
        if not experts:
            feed_forward("", config.d_ff_dense if config.n_experts else config.d_ff)
            return
        self.router = param((width, config.n_experts), ("embed", "router"))
        feed_forward("", config.d_ff, (config.n_experts,))
        if config.d_ff_shared:
            feed_forward("shared_", config.d_ff_shared)
        if config.shared_router:
            self.shared_router = param((width, 1), ("embed", "router"))
