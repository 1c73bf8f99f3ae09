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
      key_scale: ``[L, B, S, K]`` float32 when keys are int8: ``key · key_scale`` is meant; else None.
      value_scale: likewise.
    """

    key: Array
    value: Array
    key_scale: Array | None = None
    value_scale: Array | None = None

    def put(self, key: Array, value: Array, layer: Array, position: Array) -> KVCache:
        """With a layer's keys and values ``[B, Q, K, h]`` of positions ``[B, Q]``; those past its end are lost.

        Int8 values are rounded to the nearest of ``scale · {-127 .. 127}`` with ``scale = max|x| / 127`` over a
        position's head.
        """
        at = (layer, jnp.arange(position.shape[0])[:, None], position)

        def written(old: Array, new: Array) -> Array:
            return old.at[at].set(new.astype(old.dtype), mode="drop")

        if self.key_scale is None or self.value_scale is None:
            return KVCache(written(self.key, key), written(self.value, value))
        (key, key_scale), (value, value_scale) = _to_int8(key), _to_int8(value)
        return KVCache(
            written(self.key, key),
            written(self.value, value),
            written(self.key_scale, key_scale),
            written(self.value_scale, value_scale),
        )

    def read(self, layer: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
        """A layer's keys and values ``[B, S, K, h]`` as arrays of ``dtype``."""
        one = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False), self)
        if one.key_scale is None or one.value_scale is None:
            return one.key.astype(dtype), one.value.astype(dtype)
        pairs = ((one.key, one.key_scale), (one.value, one.value_scale))
        key, value = ((x.astype(jnp.float32) * scale[..., None]).astype(dtype) for x, scale in pairs)
        return key, value


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


def _to_int8(x: Array) -> tuple[Array, Array]:
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(largest == 0, 1.0, largest / 127.0)  # a NaN stays in the scale: int8 has none
    return jnp.clip(jnp.round(x / scale[..., None]), -127, 127).astype(jnp.int8), scale


def init_cache(config: TransformerConfig, batch: int, length: int, compute: ComputeConfig) -> KVCache:
    """An empty cache for ``batch`` rows of at most ``length`` positions, of the compute's ``kv_cache_dtype``.

    >>> init_cache(TransformerConfig(vocab_size=16), batch=2, length=8, compute=ComputeConfig()).key.shape
    (2, 2, 8, 4, 24)
    """
    heads, key, value = config.n_kv_heads, config.head_dim, config.head_dim
    if config.latent is not None:
        heads, key, value = 1, config.latent.rope_dim, config.latent.kv_rank
    shape = (config.n_layers, batch, length, heads)
    dtype = jnp.dtype(compute.kv_cache_dtype or compute.dtype)

    def scale() -> Array | None:
        return jnp.zeros(shape, jnp.float32) if dtype == jnp.int8 else None

    return KVCache(jnp.zeros((*shape, key), dtype), jnp.zeros((*shape, value), dtype), scale(), scale())
