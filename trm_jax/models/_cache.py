"""What goes into and comes out of a forward pass besides the tokens: the key/value cache and the output record."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from trm_jax.models._compute import ComputeConfig
from trm_jax.models._config import TransformerConfig

__all__ = ["KVCache", "TransformerOutput", "init_cache"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of earlier positions; slot ``s`` of the third axis holds position ``s``.

    Attributes:
      key: ``[L, B, S, K, h]`` rotated keys; with latent attention ``[L, B, S, 1, rope_dim]``, the rotated shared part.
      value: ``[L, B, S, K, h]``; with latent attention ``[L, B, S, 1, kv_rank]``, the latents.
    """

    key: Array
    value: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransformerOutput:
    """What a forward pass returns. ``M`` counts the blocks with experts, in order; a dense model has None there.

    Attributes:
      hidden: ``[B, S, D]`` after the final norm; ``logits = hidden @ head.T``.
      cache: the cache with this call's positions written, or None when none was given.
      routed_experts: ``[M, B, S, k]`` int32, the experts that ran.
      router_margins: ``[M, B, S]`` float32, logit units: the smallest logit that the router would choose minus the
        largest that it would not. A disturbance below half of it flips no expert.
      layer_states: ``[L, B, S, D]``, the stream that enters every block; None unless asked for.
    """

    hidden: Array
    cache: KVCache | None
    routed_experts: Array | None
    router_margins: Array | None = None
    layer_states: Array | None = None


def init_cache(config: TransformerConfig, batch: int, length: int, compute: ComputeConfig) -> KVCache:
    """An empty cache for ``batch`` rows of at most ``length`` positions, in the compute dtype.

    >>> init_cache(TransformerConfig(vocab_size=16), batch=2, length=8, compute=ComputeConfig()).key.shape
    (2, 2, 8, 4, 24)
    """
    heads, key, value = config.n_kv_heads, config.head_dim, config.head_dim
    if config.latent is not None:
        heads, key, value = 1, config.latent.rope_dim, config.latent.kv_rank
    shape = (config.n_layers, batch, length, heads)
    return KVCache(jnp.zeros((*shape, key), compute.jnp_dtype), jnp.zeros((*shape, value), compute.jnp_dtype))
