"""A small configuration of each supported architecture, to be given its sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

from trm_jax.models._config import LatentConfig, TransformerConfig, YarnConfig
from trm_jax.models._hf_config import MODEL_TYPES

__all__ = ["architecture_config"]

_EXPERTS = 8


def architecture_config(
    kind: str, *, vocab_size: int, d_model: int = 96, n_layers: int = 2, n_heads: int = 4, d_ff: int = 256, **shape: Any
) -> TransformerConfig:
    """The parts of a Hugging Face model type at any size, for a policy of random weights.

    Args:
      kind: "llama", "qwen2" (Qwen2.5 too), "qwen3", "qwen2_moe" (Qwen1.5-MoE-A2.7B), "qwen3_moe" (30B-A3B) or
        "deepseek_v2" (Lite).
      vocab_size: ``V``.
      d_model: ``D``; a head is ``d_model / n_heads`` wide.
      n_layers: number of blocks.
      n_heads: query heads.
      d_ff: width of the feed-forward layer, of each expert where there are some.
      shape: any other field of ``TransformerConfig``, over the architecture's own. Mixtures have 8 experts, 2 a token,
        unless told otherwise.

    Raises:
      ValueError: an unknown architecture; experts in a dense one that its kind does not have; a shape that cannot be
        built.

    >>> architecture_config("qwen3_moe", vocab_size=16, n_experts=4).qk_norm
    True
    >>> architecture_config("qwen3", vocab_size=16, n_experts=4)
    Traceback (most recent call last):
      ...
    ValueError: architecture 'qwen3' has no experts, n_experts=4 is given; 'qwen3_moe' has.
    """
    if kind not in MODEL_TYPES:
        raise ValueError(f"architecture={kind!r} is not known; choose one of {', '.join(MODEL_TYPES)}.")
    if kind in ("qwen2", "qwen3") and shape.get("n_experts"):
        given = shape["n_experts"]
        raise ValueError(f"architecture {kind!r} has no experts, n_experts={given} is given; '{kind}_moe' has.")
    base = TransformerConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=d_model // n_heads,
        d_ff=d_ff,
    )
    return dataclasses.replace(base, **{**_parts(kind, base), **shape})


def _parts(kind: str, base: TransformerConfig) -> dict[str, Any]:
    """What the architecture has that the plain block has not."""
    match kind:
        case "qwen2":
            return {"qkv_bias": True}
        case "qwen3":
            return {"qk_norm": True}
        case "qwen3_moe":
            return {"qk_norm": True, "n_experts": _EXPERTS}
        case "qwen2_moe":
            return {
                "qkv_bias": True,
                "n_experts": _EXPERTS,
                "normalize_experts": False,
                "d_ff_shared": base.d_ff,
                "shared_router": True,
            }
        case "deepseek_v2":
            dense = min(1, base.n_layers - 1)
            return {
                "latent": LatentConfig(
                    kv_rank=max(2, base.d_model // 2), rope_dim=max(2, base.head_dim // 4 * 2), value_dim=base.head_dim
                ),
                "yarn": YarnConfig(factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707),
                "n_experts": _EXPERTS,
                "normalize_experts": False,
                "d_ff_shared": base.d_ff,
                "n_dense_layers": dense,
                "d_ff_dense": base.d_ff * dense,
            }
        case _:
            return {}
