"""Which tensor of a Hugging Face checkpoint is which slice of which parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from trm_jax.models._config import TransformerConfig

__all__ = ["Slot", "checkpoint_slots"]


@dataclasses.dataclass(frozen=True)
class Slot:
    """One slice of a parameter: what stands at ``layer`` (of its group of blocks), or all of it.

    Attributes:
      path: of the parameter, as in ``nnx.state(model)``.
      layer: index on its leading axis; None for a parameter that is not stacked.
      names: the tensors that it is made of: one, or one for each expert.
      shape: of one such tensor, in the checkpoint's order ``[out, in]``.
      rows: our row ``i`` is row ``rows[i]`` of the tensor; None leaves them in order.
      expert_axis: the slice has an axis of experts before the tensors' own.
    """

    path: tuple[str, ...]
    layer: int | None
    names: tuple[str, ...]
    shape: tuple[int, ...]
    rows: np.ndarray | None = None
    expert_axis: bool = False


def checkpoint_slots(config: TransformerConfig) -> Iterator[Slot]:
    """Every tensor of a checkpoint of this shape, each once, in a checkpoint's usual order."""
    width = config.d_model
    yield Slot(("embedding",), None, ("model.embed_tokens.weight",), (config.vocab_size, width))
    for layer in range(config.n_layers):
        experts = config.n_experts > 0 and layer >= config.n_dense_layers
        group = "blocks" if experts or not config.n_experts else "dense_blocks"
        at = layer if group == "dense_blocks" else layer - config.n_dense_layers
        for name, own, shape, rows in _block(config, experts):
            full = f"model.layers.{layer}.{name}"
            by_expert = "{expert}" in name
            names = tuple(full.format(expert=e) for e in range(config.n_experts if by_expert else 1))
            yield Slot((group, own), at, names, shape, rows, by_expert)
    yield Slot(("final_norm",), None, ("model.norm.weight",), (width,))
    if not config.tie_embeddings:
        yield Slot(("lm_head",), None, ("lm_head.weight",), (config.vocab_size, width))


def _block(config: TransformerConfig, experts: bool) -> Iterator[tuple[str, str, tuple[int, ...], np.ndarray | None]]:
    """``(name after the layer, own name, shape, rows)`` of one block's tensors."""
    width = config.d_model
    yield "input_layernorm.weight", "attention_norm", (width,), None
    yield from _attention(config) if config.latent is None else _latent(config)
    yield "post_attention_layernorm.weight", "mlp_norm", (width,), None
    if not experts:
        yield from _feed_forward("mlp.", "", config.d_ff_dense if config.n_experts else config.d_ff, width)
        return
    yield "mlp.gate.weight", "router", (config.n_experts, width), None
    yield from _feed_forward("mlp.experts.{expert}.", "", config.d_ff, width)
    if config.d_ff_shared:
        name = "mlp.shared_expert" if config.shared_router else "mlp.shared_experts"
        yield from _feed_forward(f"{name}.", "shared_", config.d_ff_shared, width)
    if config.shared_router:
        yield "mlp.shared_expert_gate.weight", "shared_router", (1, width), None


def _feed_forward(
    name: str, own: str, ff: int, width: int
) -> Iterator[tuple[str, str, tuple[int, ...], np.ndarray | None]]:
    yield f"{name}gate_proj.weight", f"{own}gate", (ff, width), None
    yield f"{name}up_proj.weight", f"{own}up", (ff, width), None
    yield f"{name}down_proj.weight", f"{own}down", (width, ff), None


def _attention(config: TransformerConfig) -> Iterator[tuple[str, str, tuple[int, ...], np.ndarray | None]]:
    width, heads, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    for short, own, size in (("q", "query", heads), ("k", "key", kv), ("v", "value", kv)):
        yield f"self_attn.{short}_proj.weight", own, (size, width), None
        if config.qkv_bias:
            yield f"self_attn.{short}_proj.bias", f"{own}_bias", (size,), None
    if config.qk_norm:
        yield "self_attn.q_norm.weight", "query_norm", (config.head_dim,), None
        yield "self_attn.k_norm.weight", "key_norm", (config.head_dim,), None
    yield "self_attn.o_proj.weight", "output", (width, heads), None


def _latent(config: TransformerConfig) -> Iterator[tuple[str, str, tuple[int, ...], np.ndarray | None]]:
    """DeepSeek turns neighbouring coordinates ``(2j, 2j + 1)``, we turn the halves: rotary rows change order."""
    assert config.latent is not None
    latent, width, heads = config.latent, config.d_model, config.n_heads * config.head_dim
    halves = np.arange(latent.rope_dim).reshape(-1, 2).T.reshape(-1)  # 0, 2, 4, ..., 1, 3, 5, ...
    plain = config.head_dim - latent.rope_dim
    one_head = np.concatenate([np.arange(plain), plain + halves])
    q_rows = (np.arange(config.n_heads)[:, None] * config.head_dim + one_head).reshape(-1)
    if latent.query_rank is None:
        yield "self_attn.q_proj.weight", "query", (heads, width), q_rows
    else:
        yield "self_attn.q_a_proj.weight", "query_down", (latent.query_rank, width), None
        yield "self_attn.q_a_layernorm.weight", "query_norm", (latent.query_rank,), None
        yield "self_attn.q_b_proj.weight", "query_up", (heads, latent.query_rank), q_rows
    kv_rows = np.concatenate([np.arange(latent.kv_rank), latent.kv_rank + halves])
    yield "self_attn.kv_a_proj_with_mqa.weight", "kv_down", (kv_rows.size, width), kv_rows
    yield "self_attn.kv_a_layernorm.weight", "kv_norm", (latent.kv_rank,), None
    expanded = config.n_heads * (plain + latent.value_dim)
    yield "self_attn.kv_b_proj.weight", "kv_up", (expanded, latent.kv_rank), None
    yield "self_attn.o_proj.weight", "output", (width, config.n_heads * latent.value_dim), None
