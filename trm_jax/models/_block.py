"""One block, and groups of equal blocks run one after another under ``lax.scan``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trm_jax.models._attention import attend, grouped_projections
from trm_jax.models._cache import KVCache
from trm_jax.models._compute import ComputeConfig
from trm_jax.models._config import TransformerConfig
from trm_jax.models._latent import absorbed_output, latent_projections
from trm_jax.models._moe import mixture
from trm_jax.models._parts import dense, feed_forward, rms_norm
from trm_jax.models._rope import score_scale
from trm_jax.models._rowwise import rowwise

__all__ = ["BlockContext", "RematPolicy", "run_blocks"]

RematPolicy = Literal["none", "full", "dots"]
"""What the backward pass finds in memory: "none" recomputes nothing; "full" keeps the stream between blocks and
recomputes each block; "dots" also keeps the results of products with weights, and recomputes the rest."""

_ROUTING_ROLE = 2**32 - 1  # apart from the response indices, which sampling folds into the same seed


@dataclasses.dataclass(frozen=True)
class BlockContext:
    """What is the same in every block of one forward pass.

    Attributes:
      config: the shape.
      compute: the arithmetic.
      positions: ``[B, S]``.
      allowed: ``[B, S, keys]``, True where a query attends.
      jitter_seeds: ``[B]`` uint32, or None without routing jitter.
    """

    config: TransformerConfig
    compute: ComputeConfig
    positions: Int[Array, "B S"]
    allowed: Bool[Array, "B S K"]
    jitter_seeds: Array | None


def run_blocks(
    stream: Float[Array, "N D"],
    groups: list[dict[str, Any]],
    context: BlockContext,
    *,
    cache: KVCache | None,
    routed_experts: Int[Array, "M B S k"] | None,
    remat: RematPolicy,
    layer_states: bool,
) -> tuple[Array, KVCache | None, Array | None, Array | None, Array | None]:
    """The stream through all groups of stacked blocks: ``(stream, cache, experts, margins, layer states)``.

    Raises:
      ValueError: an unknown remat policy.
    """
    step = _rematerialised(functools.partial(_block, context=context, layer_states=layer_states), remat)
    first, found = 0, []
    for stacked in groups:
        count = jax.tree.leaves(stacked)[0].shape[0]
        layers = jnp.arange(first, first + count)
        routes = routed_experts if "router" in stacked else None
        # The cache is carried: as an input and an output of every layer it would be copied whole at every call.
        (stream, cache), per_layer = jax.lax.scan(step, (stream, cache), (stacked, layers, routes))
        found.append(per_layer)
        first += count

    def joined(parts: list[Any]) -> Any:
        parts = [part for part in parts if part is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    experts, margins, states = (joined(list(parts)) for parts in zip(*found, strict=True))
    return stream, cache, experts, margins, states


def _rematerialised(step: Callable[..., Any], remat: RematPolicy) -> Callable[..., Any]:
    if remat not in get_args(RematPolicy):
        raise ValueError(f"remat={remat!r}: choose one of {', '.join(get_args(RematPolicy))}.")
    if remat == "none":
        return step
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    return jax.checkpoint(step, policy=policy)


def _block(
    carry: tuple[Float[Array, "N D"], KVCache | None],
    xs: tuple[dict[str, Any], Array, Array | None],
    *,
    context: BlockContext,
    layer_states: bool,
) -> tuple[tuple[Array, KVCache | None], tuple[Array | None, Array | None, Array | None]]:
    """One block: attention and feed-forward, each around a residual connection."""
    (stream, cache), (block, layer, routes) = carry, xs
    config, compute, positions = context.config, context.compute, context.positions
    batch, length = positions.shape
    # The two forms of latent attention round differently, so arithmetic that must agree everywhere uses one of them.
    absorbed = config.latent is not None and (cache is not None or compute.batch_invariant)

    def project(x: Array, position: Array, weights: dict[str, Any]) -> tuple[Array, Array, Array]:
        normed = rms_norm(x, weights["attention_norm"], config.norm_eps)
        if config.latent is None:
            return grouped_projections(normed, position, weights, config, compute)
        return latent_projections(normed, position, weights, config, compute, absorbed=absorbed)

    def finish(
        x: Array, mixed: Array, jitter: Array | None, forced: Array | None, weights: dict[str, Any]
    ) -> tuple[Array, Array | None, Array | None]:
        if absorbed:
            mixed = absorbed_output(mixed, weights, config, compute)
        x = x + dense(mixed.reshape(x.shape[0], -1), weights["output"], compute)
        normed = rms_norm(x, weights["mlp_norm"], config.norm_eps)
        if "router" not in weights:
            return x + feed_forward(normed, weights, compute), None, None
        update, chosen, margin = mixture(normed, jitter, forced, weights, config, compute)
        return x + update, chosen, margin

    def by_row(y: Array) -> Array:
        return y.reshape(batch, length, *y.shape[1:])

    q, k, v = map(by_row, rowwise(project, compute, (stream, positions.reshape(-1)), (block,)))
    if cache is not None:
        cache = cache.put(k, v, layer, positions)
        k, v = cache.read(layer, compute.jnp_dtype)
    keys = jnp.concatenate([v, k], axis=-1) if absorbed else k
    mixed = attend(q, keys, v, context.allowed, compute, scale=score_scale(config))
    jitter = None
    if context.jitter_seeds is not None and "router" in block:
        jitter = compute.routing_jitter * _router_noise(context.jitter_seeds, positions, layer, config.n_experts)
    forced = None if routes is None else routes.reshape(batch * length, -1)
    mixed = mixed.reshape(batch * length, *mixed.shape[2:])
    new, chosen, margin = rowwise(finish, compute, (stream, mixed, jitter, forced), (block,))
    chosen, margin = (None if y is None else by_row(y) for y in (chosen, margin))
    return (new, cache), (chosen, margin, by_row(stream) if layer_states else None)


def _router_noise(seeds: Array, positions: Array, layer: Array, n_experts: int) -> Float[Array, "N E"]:
    """Standard normal noise that depends on the row's seed, the position and the layer only."""

    def one(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), jnp.uint32(_ROUTING_ROLE))
        key = jax.random.fold_in(jax.random.fold_in(key, position), layer)
        return jax.random.normal(key, (n_experts,), jnp.float32)

    noise = jax.vmap(jax.vmap(one, (None, 0)))(seeds, positions)
    return noise.reshape(-1, n_experts)
