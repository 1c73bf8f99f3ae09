"""Makes ``tests/models/goldens/*.npz`` with PyTorch and Transformers: oracles that share no code with us.

Run it in an environment of its own (the tests need only the files that it writes)::

    python -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch 'transformers==4.57.*'
    /tmp/oracle/bin/python tools/goldens/make_architecture_goldens.py tests/models/goldens

One small random model of each architecture. Arrays (``L`` blocks, ``B, S`` = 2, 19):

* ``config``: its ``config.json``, as text; ``versions``: text;
* ``weights/NAME``: every tensor of its checkpoint, float32;
* ``tokens`` ``[B, S]``, ``logits`` ``[B, S, V]``;
* ``states`` ``[L + 1, B, S, D]``: what enters each block, then the output of the final norm.

Transformers 4.57 leaves out one factor of DeepSeek-V2: with YaRN the attention scores are multiplied by
``(1 + 0.1 mscale_all_dim ln(factor))²`` (``modeling_deepseek.py`` of the published checkpoints; Transformers has it
since its pull request 47435). It is put in here.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

SHAPE = {
    "vocab_size": 29,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 5}
DEEPSEEK = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 8,
}
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 4.0, "beta_slow": 1.0}


def configs() -> Iterator[tuple[str, Any]]:
    """Name and configuration of every golden model."""
    t = transformers
    yield "llama", t.LlamaConfig(**SHAPE, num_key_value_heads=2, rope_theta=1e5, tie_word_embeddings=True)
    yield "qwen2", t.Qwen2Config(**SHAPE, num_key_value_heads=2)
    yield "qwen2_yarn", t.Qwen2Config(**SHAPE, num_key_value_heads=2, rope_scaling=dict(YARN))
    yield "qwen3", t.Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5)
    shared = {"shared_expert_intermediate_size": 12}
    yield "qwen2_moe", t.Qwen2MoeConfig(**SHAPE, **EXPERTS, **shared, num_key_value_heads=4, num_experts_per_tok=3)
    sparse = {"num_experts_per_tok": 2, "norm_topk_prob": True}
    yield "qwen3_moe", t.Qwen3MoeConfig(**SHAPE, **EXPERTS, **sparse, num_key_value_heads=2, head_dim=8)
    lite = {"q_lora_rank": None, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}
    yield "deepseek_v2", t.DeepseekV2Config(**(SHAPE | DEEPSEEK), **lite)
    yield "deepseek_v2_query", t.DeepseekV2Config(**(SHAPE | DEEPSEEK), q_lora_rank=10, routed_scaling_factor=2.5)


def random_model(config: Any, seed: int) -> Any:
    """Weights of about unit gain, norms and biases away from their initial values, where a test could not see them."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1.0 + 0.3 * noise)
            else:
                weight.copy_(noise * (weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.5))
    scaling = config.rope_scaling or {}
    if config.model_type == "deepseek_v2" and scaling.get("mscale_all_dim"):
        for layer in model.model.layers:
            layer.self_attn.scaling *= (1 + 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"])) ** 2
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    for seed, (name, config) in enumerate(configs()):
        model = random_model(config, seed)
        tokens = torch.randint(0, config.vocab_size, (2, 19), generator=torch.Generator().manual_seed(100 + seed))
        with torch.no_grad():
            found = model(tokens, output_hidden_states=True)
        weights = {f"weights/{key}": value.numpy() for key, value in model.state_dict().items()}
        if config.tie_word_embeddings:
            del weights["weights/lm_head.weight"]
        file = out / f"{name}.npz"
        np.savez_compressed(
            file,
            config=np.array(json.dumps(config.to_diff_dict())),
            versions=np.array(f"torch {torch.__version__}, transformers {transformers.__version__}"),
            tokens=tokens.numpy().astype(np.int32),
            logits=found.logits.numpy(),
            states=np.stack([state.numpy() for state in found.hidden_states]),
            **weights,
        )
        print(file, file.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
