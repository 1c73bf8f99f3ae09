"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads from one small vector.

Expanded, the latent becomes a key and a value for every head: cheapest over many positions at once. Absorbed, the
matrices that would expand it are applied to the query and to the attention's result instead, so that all heads attend
to the latents themselves as to one shared head: nothing of a head's size is held for an earlier position, which is what
decoding wants. Both are the same function; the rounding differs.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trm_jax.models._compute import ComputeConfig
from trm_jax.models._config import LatentConfig, TransformerConfig
from trm_jax.models._parts import dense, rms_norm
from trm_jax.models._quantize import dequantize
from trm_jax.models._rope import apply_rope

__all__ = ["absorbed_output", "latent_projections"]


def latent_projections(
    x: Float[Array, "N D"],
    position: Int[Array, " N"],
    block: dict[str, Any],
    config: TransformerConfig,
    compute: ComputeConfig,
    *,
    absorbed: bool,
) -> tuple[Array, Array, Array]:
    """Query, key and value of normed states ``x``.

    Args:
      x: normed stream.
      position: of every row.
      block: the block's parameters.
      config: the shape; ``latent`` is set.
      compute: the arithmetic.
      absorbed: see the module.

    Returns:
      Expanded: ``[N, H, h]``, ``[N, H, h]``, ``[N, H, value_dim]``. Absorbed: query ``[N, H, kv_rank + rope_dim]``,
      rotated shared key ``[N, 1, rope_dim]`` and latent ``[N, 1, kv_rank]``; the key to attend to is the latent and the
      shared key side by side, the value the latent.
    """
    latent = _latent(config)
    plain = config.head_dim - latent.rope_dim
    if latent.query_rank is None:
        q = dense(x, block["query"], compute)
    else:
        low = rms_norm(dense(x, block["query_down"], compute), block["query_norm"], latent.norm_eps)
        q = dense(low, block["query_up"], compute)
    q = q.reshape(-1, config.n_heads, config.head_dim)
    q_plain, q_rope = q[..., :plain], apply_rope(q[..., plain:], position, config)

    down = dense(x, block["kv_down"], compute)
    c = rms_norm(down[:, : latent.kv_rank], block["kv_norm"], latent.norm_eps)
    k_rope = apply_rope(down[:, None, latent.kv_rank :], position, config)
    if absorbed:
        q_latent = _einsum("nhp,rhp->nhr", q_plain, _up(block, config, compute)[..., :plain], compute)
        return jnp.concatenate([q_latent, q_rope], axis=-1), k_rope, c[:, None]
    kv = dense(c, block["kv_up"], compute).reshape(-1, config.n_heads, plain + latent.value_dim)
    shared = jnp.broadcast_to(k_rope, (*kv.shape[:2], latent.rope_dim))
    key = jnp.concatenate([kv[..., :plain], shared], axis=-1)
    return jnp.concatenate([q_plain, q_rope], axis=-1), key, kv[..., plain:]


def absorbed_output(
    mixed: Float[Array, "N H r"], block: dict[str, Any], config: TransformerConfig, compute: ComputeConfig
) -> Float[Array, "N H v"]:
    """The heads' values out of the latents that they attended to."""
    plain = config.head_dim - _latent(config).rope_dim
    return _einsum("nhr,rhv->nhv", mixed, _up(block, config, compute)[..., plain:], compute)


def _latent(config: TransformerConfig) -> LatentConfig:
    assert config.latent is not None
    return config.latent


def _up(block: dict[str, Any], config: TransformerConfig, compute: ComputeConfig) -> Float[Array, "r H pv"]:
    weight = dequantize(block["kv_up"], compute.jnp_dtype)
    return weight.reshape(weight.shape[0], config.n_heads, -1)


def _einsum(form: str, x: Array, weight: Array, compute: ComputeConfig) -> Array:
    y = jnp.einsum(form, x, weight, precision=compute.precision, preferred_element_type=jnp.float32)
    return y.astype(compute.jnp_dtype)
