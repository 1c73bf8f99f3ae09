"""SmolLM2 as a ``Transformer``: Hugging Face names to stacked parameters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from flax import nnx

from trm_jax.models._config import TransformerConfig
from trm_jax.models._transformer import Transformer

if TYPE_CHECKING:
    from trm_jax.models.pretrained import PretrainedTokenizer

__all__ = ["find_smollm2", "load_smollm2_model"]

_BLOCK = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "output",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}


def find_smollm2(path: str | Path | None = None) -> Path:
    """The model's file; None looks into the cache.

    Raises:
      ValueError: there is none; the message says how to get it.
    """
    from trm_jax.models.pretrained import cached_path

    place = cached_path() if path is None else Path(path)
    if not place.is_file():
        raise ValueError(f"no model at {place}. Get it with: trm-jax fetch smollm2 (93 MB), or give model.path.")
    return place


def load_smollm2_model(path: str | Path | None = None) -> tuple[Transformer, PretrainedTokenizer]:
    """The pretrained policy and its tokenizer, from a GGUF file.

    Args:
      path: the file; None takes the one that ``trm-jax fetch smollm2`` put into the cache.

    Returns:
      A float32 ``Transformer`` and a ``PretrainedTokenizer``.

    Raises:
      ValueError: no file at that place, or one that is not this model.
    """
    from trm_jax.models.pretrained import load_smollm2

    config, weights, tokenizer = load_smollm2(find_smollm2(path))
    shape = TransformerConfig(
        vocab_size=config["vocab_size"],
        d_model=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        d_ff=config["intermediate_size"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        tie_embeddings=config["tie_word_embeddings"],
    )
    model: Transformer = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0)))
    stacks: dict[str, np.ndarray] = {}
    for name, weight in weights:
        if name == "model.embed_tokens.weight":
            model.embedding.set_value(jnp.asarray(weight))
        elif name == "model.norm.weight":
            model.final_norm.set_value(jnp.asarray(weight))
        elif name == "lm_head.weight":
            model.lm_head.set_value(jnp.asarray(weight))
        else:
            _, _, layer, rest = name.split(".", 3)
            matrix = weight.T  # [out, in] to [in, out]; a vector stays as it is
            key = _BLOCK[rest.removesuffix(".weight")]
            stack = stacks.setdefault(key, np.empty((shape.n_layers, *matrix.shape), np.float32))
            stack[int(layer)] = matrix
    for key in list(stacks):
        getattr(model.blocks, key).set_value(jnp.asarray(stacks.pop(key)))
    return model, tokenizer
