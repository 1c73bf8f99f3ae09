"""One decoder-only transformer, built from parts: dense or mixture of experts, with or without a key/value cache.

Parameters are stacked over layers and the blocks run under ``lax.scan``, so compile time does not grow with depth.
Every parameter carries ``logical_axes`` metadata, which ``models.param_shardings`` maps to a mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from trm_jax.models._config import ComputeConfig, TransformerConfig
from trm_jax.models._parts import apply_rope, attend, dense, feed_forward, mixture, rms_norm
from trm_jax.models._rowwise import rowwise

__all__ = ["KVCache", "Transformer", "TransformerOutput", "init_cache"]

_FLOAT32 = jnp.dtype("float32")
_ROUTING_ROLE = 2**32 - 1  # apart from the response indices, which sampling folds into the same seed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of earlier positions; slot ``s`` of the third axis holds position ``s``.

    Attributes:
      key: ``[L, B, S, K, h]`` rotated keys.
      value: ``[L, B, S, K, h]``.
    """

    key: Array
    value: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransformerOutput:
    """What a forward pass returns.

    Attributes:
      hidden: ``[B, S, D]`` after the final norm; ``logits = hidden @ head.T``.
      cache: the cache with this call's positions written, or None when none was given.
      routed_experts: ``[L, B, S, k]`` int32 chosen experts, or None for a dense model.
    """

    hidden: Array
    cache: KVCache | None
    routed_experts: Array | None


def init_cache(config: TransformerConfig, batch: int, length: int, compute: ComputeConfig) -> KVCache:
    """An empty cache for ``batch`` rows of at most ``length`` positions, in the compute dtype.

    >>> init_cache(TransformerConfig(vocab_size=16), batch=2, length=8, compute=ComputeConfig()).key.shape
    (2, 2, 8, 4, 24)
    """
    shape = (config.n_layers, batch, length, config.n_kv_heads, config.head_dim)
    return KVCache(jnp.zeros(shape, compute.jnp_dtype), jnp.zeros(shape, compute.jnp_dtype))


class _Blocks(nnx.Module):
    """The parameters of all blocks, stacked on a leading layer axis."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs, param_dtype: jnp.dtype) -> None:
        width, ff, layers = config.d_model, config.d_ff, config.n_layers
        q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        residual = 1.0 / math.sqrt(2.0 * layers)

        def param(shape: tuple[int, ...], axes: tuple[str, ...], gain: float = 1.0) -> nnx.Param[Array]:
            scale = gain / math.sqrt(shape[-2])
            value = jax.random.normal(rngs.params(), (layers, *shape), param_dtype) * scale
            return nnx.Param(value, logical_axes=("layer", *axes))

        def ones() -> nnx.Param[Array]:
            return nnx.Param(jnp.ones((layers, width), param_dtype), logical_axes=("layer", "norm"))

        self.attention_norm = ones()
        self.query = param((width, q_width), ("embed", "heads"))
        self.key = param((width, kv_width), ("embed", "kv_heads"))
        self.value = param((width, kv_width), ("embed", "kv_heads"))
        self.output = param((q_width, width), ("heads", "embed"), residual)
        self.mlp_norm = ones()
        lead: tuple[int, ...] = (config.n_experts,) if config.n_experts else ()
        lead_axes: tuple[str, ...] = ("expert",) if config.n_experts else ()
        if config.n_experts:
            self.router = param((width, config.n_experts), ("embed", "router"))
        self.gate = param((*lead, width, ff), (*lead_axes, "embed", "mlp"))
        self.up = param((*lead, width, ff), (*lead_axes, "embed", "mlp"))
        self.down = param((*lead, ff, width), (*lead_axes, "mlp", "embed"), residual)


class Transformer(nnx.Module):
    """Decoder-only transformer; ``hidden`` and the output head are exposed apart, so that no logits need be held.

    Args:
      config: the shape.
      rngs: ``nnx.Rngs(params=...)``.
      param_dtype: type of the stored parameters.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> model = Transformer(TransformerConfig(vocab_size=16), rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 5), jnp.int32)).hidden.shape
    (2, 5, 96)
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs, param_dtype: jnp.dtype = _FLOAT32) -> None:
        self.config = config
        shape = (config.vocab_size, config.d_model)

        def table() -> nnx.Param[Array]:
            # Rows of unit expected norm: tied or not, initial logits then have a spread of about one.
            value = jax.random.normal(rngs.params(), shape, param_dtype) * (1.0 / math.sqrt(config.d_model))
            return nnx.Param(value, logical_axes=("vocab", "embed"))

        self.embedding = table()
        self.blocks = _Blocks(config, rngs=rngs, param_dtype=param_dtype)
        self.final_norm = nnx.Param(jnp.ones((config.d_model,), param_dtype), logical_axes=("norm",))
        if not config.tie_embeddings:
            self.lm_head = table()

    def head(self) -> Float[Array, "V D"]:
        """The output head, ``[V, D]``, in the parameters' own type."""
        return (self.embedding if self.config.tie_embeddings else self.lm_head).get_value()

    def __call__(
        self,
        tokens: Int[Array, "B S"],
        *,
        positions: Int[Array, "B S"] | None = None,
        segment_ids: Int[Array, "B S"] | None = None,
        cache: KVCache | None = None,
        compute: ComputeConfig = ComputeConfig(),  # noqa: B008 - frozen
        jitter_seeds: UInt32[Array, " B"] | None = None,
        remat: bool = False,
    ) -> TransformerOutput:
        """Final hidden states of every position.

        Args:
          tokens: ``[B, S]`` ids in ``[0, V)``, left-aligned rows; padding on the right never reaches an earlier token.
          positions: ``[B, S]``; default ``0 .. S-1``. With a cache, also the slots that are written.
          segment_ids: ``[B, S]`` for packed rows: a token attends within its segment. Not together with a cache.
          cache: earlier positions. Query ``p`` attends to slots ``0 .. p``.
          compute: the arithmetic.
          jitter_seeds: ``[B]`` seeds of the router's noise; required when ``compute.routing_jitter > 0``.
          remat: recompute the blocks in the backward pass instead of keeping their activations.

        Returns:
          Hidden states, the updated cache and the routed experts.

        Raises:
          ValueError: segment ids together with a cache, or routing jitter without seeds.
        """
        config = self.config
        batch, length = tokens.shape
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        if cache is not None and segment_ids is not None:
            raise ValueError("segment_ids describe packed training rows; decoding with a cache has one segment a row.")
        if compute.routing_jitter > 0 and jitter_seeds is None:
            raise ValueError(f"routing_jitter={compute.routing_jitter} needs jitter_seeds, one for each row.")
        if cache is not None:
            allowed = jnp.arange(cache.key.shape[2])[None, None, :] <= positions[:, :, None]
        else:
            index = jnp.arange(length)
            allowed = jnp.broadcast_to(index[None, None, :] <= index[None, :, None], (batch, length, length))
            if segment_ids is not None:
                allowed &= segment_ids[:, :, None] == segment_ids[:, None, :]

        table = self.embedding.get_value()
        stream = table[tokens].astype(compute.jnp_dtype).reshape(batch * length, config.d_model)
        step = functools.partial(
            _block,
            config=config,
            compute=compute,
            shape=(batch, length),
            positions=positions,
            allowed=allowed,
            jitter_seeds=jitter_seeds if compute.routing_jitter > 0 else None,
        )
        stacked = nnx.to_pure_dict(nnx.state(self.blocks))
        layers = jnp.arange(config.n_layers)
        body = jax.checkpoint(step) if remat else step
        kv = None if cache is None else (cache.key, cache.value)
        stream, (kv, experts) = jax.lax.scan(body, stream, (stacked, layers, kv))
        hidden = rowwise(
            functools.partial(rms_norm, eps=config.norm_eps), compute, (stream,), (self.final_norm.get_value(),)
        )
        return TransformerOutput(
            hidden=hidden.reshape(batch, length, config.d_model),
            cache=None if kv is None else KVCache(*kv),
            routed_experts=experts,
        )


def _block(
    stream: Float[Array, "N D"],
    xs: tuple[dict[str, Any], Array, tuple[Array, Array] | None],
    *,
    config: TransformerConfig,
    compute: ComputeConfig,
    shape: tuple[int, int],
    positions: Int[Array, "B S"],
    allowed: Array,
    jitter_seeds: Array | None,
) -> tuple[Array, tuple[tuple[Array, Array] | None, Array | None]]:
    """One block: attention and feed-forward, each around a residual connection."""
    block, layer, kv = xs
    batch, length = shape

    def project(x: Array, position: Array, weights: dict[str, Any]) -> tuple[Array, Array, Array]:
        normed = rms_norm(x, weights["attention_norm"], config.norm_eps)
        q = dense(normed, weights["query"], compute).reshape(-1, config.n_heads, config.head_dim)
        k = dense(normed, weights["key"], compute).reshape(-1, config.n_kv_heads, config.head_dim)
        v = dense(normed, weights["value"], compute).reshape(-1, config.n_kv_heads, config.head_dim)
        return apply_rope(q, position, config.rope_theta), apply_rope(k, position, config.rope_theta), v

    def finish(x: Array, mixed: Array, jitter: Array | None, weights: dict[str, Any]) -> tuple[Array, Array | None]:
        x = x + dense(mixed, weights["output"], compute)
        normed = rms_norm(x, weights["mlp_norm"], config.norm_eps)
        if not config.n_experts:
            return x + feed_forward(normed, weights, compute), None
        update, chosen = mixture(normed, jitter, weights, config, compute)
        return x + update, chosen

    q, k, v = rowwise(project, compute, (stream, positions.reshape(-1)), (block,))
    q, k, v = (y.reshape(batch, length, *y.shape[1:]) for y in (q, k, v))
    if kv is not None:
        row = jnp.arange(batch)[:, None]
        k = kv[0].at[row, positions].set(k, mode="drop")
        v = kv[1].at[row, positions].set(v, mode="drop")
        kv = (k, v)
    mixed = attend(q, k, v, allowed, compute).reshape(batch * length, config.n_heads * config.head_dim)
    jitter = None
    if jitter_seeds is not None and config.n_experts:
        jitter = compute.routing_jitter * _router_noise(jitter_seeds, positions, layer, config.n_experts)
    stream, chosen = rowwise(finish, compute, (stream, mixed, jitter), (block,))
    return stream, (kv, None if chosen is None else chosen.reshape(batch, length, -1))


def _router_noise(seeds: Array, positions: Array, layer: Array, n_experts: int) -> Float[Array, "N E"]:
    """Standard normal noise that depends on the row's seed, the position and the layer only."""

    def one(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), jnp.uint32(_ROUTING_ROLE))
        key = jax.random.fold_in(jax.random.fold_in(key, position), layer)
        return jax.random.normal(key, (n_experts,), jnp.float32)

    noise = jax.vmap(jax.vmap(one, (None, 0)))(seeds, positions)
    return noise.reshape(-1, n_experts)
