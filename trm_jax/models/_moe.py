"""Mixture of experts: routing, its replay, shared experts, and the forms of multiplying by the chosen experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Int

from trm_jax.models._compute import ComputeConfig, ExpertImplementation
from trm_jax.models._config import TransformerConfig
from trm_jax.models._grouped_matmul import group_rows, grouped_matmul, tile_rows
from trm_jax.models._parts import dense, feed_forward, silu
from trm_jax.models._quantize import QuantizedArray, dequantize
from trm_jax.models._sharding import RULES

__all__ = ["mixture", "route"]


def route(
    x: Float[Array, "N D"],
    jitter: Float[Array, "N E"] | None,
    forced: Int[Array, "N k"] | None,
    block: dict[str, Any],
    config: TransformerConfig,
) -> tuple[Int[Array, "N k"], Float[Array, "N k"], Float[Array, " N"]]:
    """The experts of every token, their weights, and how near the choice was; float32 throughout.

    The choice is that of the largest logits, or ``forced`` wherever its first id is not negative. The weights always
    come from this router's own logits (and are differentiable): softmax over the chosen, or, without
    ``normalize_experts``, the chosen entries of the softmax over all; times ``expert_scale``.

    Returns:
      Ids in order of falling logit (or as forced), weights, and the margin: smallest logit that would be chosen here
      minus the largest that would not, infinite when all experts are chosen.
    """
    logits = jnp.matmul(
        x.astype(jnp.float32),
        dequantize(block["router"], jnp.dtype("float32")),
        precision=jax.lax.Precision.HIGHEST,
    )
    if jitter is not None:
        logits = logits + jitter
    k = config.experts_per_token
    top, own = jax.lax.top_k(logits, min(k + 1, config.n_experts))
    margin = top[:, k - 1] - top[:, k] if k < config.n_experts else jnp.full(x.shape[:1], jnp.inf, jnp.float32)
    chosen = own[:, :k] if forced is None else jnp.where(forced[:, :1] >= 0, forced, own[:, :k])
    taken = jnp.take_along_axis(logits, chosen, axis=-1)
    if config.normalize_experts:
        weights = jax.nn.softmax(taken, axis=-1)
    else:
        weights = jnp.exp(taken - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return chosen, weights * config.expert_scale, margin


def mixture(
    x: Float[Array, "N D"],
    jitter: Float[Array, "N E"] | None,
    forced: Int[Array, "N k"] | None,
    block: dict[str, Any],
    config: TransformerConfig,
    compute: ComputeConfig,
) -> tuple[Float[Array, "N D"], Int[Array, "N k"], Float[Array, " N"]]:
    """Dropless top-k mixture of SwiGLU experts, with the shared layer beside it where there is one.

    Returns the output, the experts that ran and the router's margin (see ``route``).
    """
    chosen, weights, margin = route(x, jitter, forced, block, config)
    form = _implementation(compute)
    if form == "dense":
        out = _every_expert(x, chosen, weights, block, config, compute)
    else:
        experts = {name: block[name] for name in ("gate", "up", "down")}
        run = functools.partial(_chosen_experts, config=config, compute=compute, form=form)
        out = _on_each_shard(run, x, chosen, weights, experts)
    if config.d_ff_shared:
        shared = feed_forward(x, block, compute, prefix="shared_")
        if config.shared_router:
            share = jax.nn.sigmoid(dense(x, block["shared_router"], compute).astype(jnp.float32))
            shared = (share * shared.astype(jnp.float32)).astype(shared.dtype)
        out = out + shared
    return out, chosen, margin


def _implementation(compute: ComputeConfig) -> ExpertImplementation:
    if compute.experts is not None:
        return compute.experts
    if compute.batch_invariant:
        return "dense"
    # The kernel multiplies in one bfloat16 pass, which is not what a float32 configuration asks for.
    return "megablox" if compute.dtype == "bfloat16" and jax.default_backend() == "tpu" else "blocked"


def _every_expert(
    x: Array, chosen: Array, weights: Array, block: dict[str, Any], config: TransformerConfig, compute: ComputeConfig
) -> Array:
    """Every expert runs on every token, and the unchosen weigh 0: the form whose bits know nothing of the batch."""
    share = jnp.sum(jax.nn.one_hot(chosen, config.n_experts, dtype=jnp.float32) * weights[..., None], axis=-2)
    # One matmul over all experts' columns, not one an expert: the same sums, and a shape that every backend likes.
    gate, up = (_all_columns(x, block[name], compute) for name in ("gate", "up"))
    hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32) * share[..., None]
    down = dequantize(block["down"], compute.jnp_dtype)
    return dense(hidden.reshape(x.shape[0], -1), down.reshape(-1, down.shape[-1]), compute)


def _all_columns(x: Float[Array, "N D"], weight: Array | QuantizedArray, compute: ComputeConfig) -> Array:
    """``x @ weight[e]`` for every expert ``e``, ``[N, E, F]``; ``weight`` ``[E, D, F]``."""
    full = dequantize(weight, compute.jnp_dtype)
    n_experts, width, ff = full.shape
    return dense(x, full.swapaxes(0, 1).reshape(width, n_experts * ff), compute).reshape(-1, n_experts, ff)


def _on_each_shard(run: Callable[..., Array], x: Array, chosen: Array, weights: Array, experts: Any) -> Array:
    """``run(x, chosen, weights, experts)`` on each device's own tokens, where a mesh is set that splits them.

    The compiler cannot see that sorting tokens by expert may stop at a device's edge: left alone it would gather all
    tokens everywhere. Needs ``jax.set_mesh``; without it the result is the same, and every device computes all of it.
    """
    mesh, axis = jax.sharding.get_abstract_mesh(), RULES["batch"]
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    # Inside a caller's own shard_map the tokens are local already.
    if axis is None or kinds.get(axis) != AxisType.Auto or mesh.shape[axis] == 1 or x.shape[0] % mesh.shape[axis]:
        return run(x, chosen, weights, experts)
    if jax.default_backend() == "cpu":  # whose compiler aborts on a bfloat16 sum over some of a mesh's axes
        experts = jax.tree.map(lambda w: w.astype(jnp.float32) if w.dtype == jnp.bfloat16 else w, experts)
    split = PartitionSpec(axis)
    local: Callable[..., Array] = jax.shard_map(
        run,
        in_specs=(split, split, split, PartitionSpec()),
        out_specs=split,
        axis_names={axis},
        check_vma=False,
    )
    return local(x, chosen, weights, experts)


def _chosen_experts(
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    experts: dict[str, Any],
    *,
    config: TransformerConfig,
    compute: ComputeConfig,
    form: ExpertImplementation,
) -> Float[Array, "N D"]:
    """Tokens sorted by expert, multiplied by their own expert only, and put back."""
    count, k = chosen.shape
    align, total = tile_rows(count * k, config.n_experts, form)
    groups = group_rows(chosen.reshape(-1), config.n_experts, align=align, total=total)

    def multiply(rows: Array, name: str) -> Array:
        weight = dequantize(experts[name], compute.jnp_dtype)
        return grouped_matmul(rows, weight, groups.sizes, align=align, implementation=form, compute=compute)

    rows = x.astype(compute.jnp_dtype).at[groups.source // k].get(mode="fill", fill_value=0)
    out = multiply(silu(multiply(rows, "gate")) * multiply(rows, "up"), "down")
    out = out[groups.place].reshape(count, k, -1).astype(jnp.float32)
    return jnp.sum(out * weights[..., None], axis=1).astype(compute.jnp_dtype)
