"""The tensors that a GGUF file of a dense model holds, and their Hugging Face names."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["LlamaConfig", "expected_tensors"]

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class LlamaConfig(TypedDict):
    """Shape of a dense model, in Hugging Face's words. A plain dict at run time; ids that the file lacks are None."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None


def expected_tensors(kind: str, config: LlamaConfig) -> dict[str, tuple[str, tuple[int, ...], int | None]]:
    """GGUF name → (Hugging Face name, shape, heads of a permuted projection)."""
    width, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    permuted = kind == "llama"  # only llama's converter reorders for rotary positions on neighbouring coordinates
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
        "attn_norm.weight": ((width,), None),
        "attn_q.weight": ((q_width, width), heads if permuted else None),
        "attn_k.weight": ((kv_width, width), kv_heads if permuted else None),
        "attn_v.weight": ((kv_width, width), None),
        "attn_output.weight": ((width, q_width), None),
        "ffn_norm.weight": ((width,), None),
        "ffn_gate.weight": ((ffn, width), None),
        "ffn_up.weight": ((ffn, width), None),
        "ffn_down.weight": ((width, ffn), None),
    }
    if kind == "qwen2":
        shapes |= {f"attn_{x}.bias": ((q_width if x == "q" else kv_width,), None) for x in "qkv"}
    if kind == "qwen3":
        shapes |= {f"attn_{x}_norm.weight": ((head_dim,), None) for x in "qk"}
    expected: dict[str, tuple[str, tuple[int, ...], int | None]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, width), None)
    }
    for layer in range(config["num_hidden_layers"]):
        for name, (shape, permuted_heads) in shapes.items():
            part, suffix = name.split(".")
            hf = f"model.layers.{layer}.{_BLOCK_NAMES[part]}.{suffix}"
            expected[f"blk.{layer}.{name}"] = (hf, shape, permuted_heads)
    expected["output_norm.weight"] = ("model.norm.weight", (width,), None)
    if not config["tie_word_embeddings"]:
        expected["output.weight"] = ("lm_head.weight", (vocab, width), None)
    return expected
