"""A tiny llama GGUF with known bytes, a NumPy forward pass, and the real file where it can be had."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trm_jax.models.pretrained import ModelUnavailableError, fetch_smollm2

LAYERS, WIDTH, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 40, 4, 2, 16
WORDS = ["<|pad|>", "<|start|>", "<|end|>", *"0123456789abcdfghijklmnopqrstuvwxyze", "he"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def _blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes of one ggml format, and the float32 values that the format's definition gives them."""
    if kind in ("F32", "F16"):
        raw = rng.normal(0.0, 0.3, shape).astype(np.float32 if kind == "F32" else np.float16)
        return raw, raw.astype(np.float32)
    if kind == "Q4_K":
        return _q4_k(rng, shape)
    rows, columns = shape
    blocks = columns // 32
    scale = rng.uniform(0.01, 0.06, (rows, blocks, 1)).astype(np.float16)
    low = rng.uniform(-0.4, -0.1, (rows, blocks, 1)).astype(np.float16)
    d, m = scale.astype(np.float32), low.astype(np.float32)
    if kind == "Q8_0":  # f16 d, 32 x int8 q: w = d q
        q = rng.integers(-9, 10, (rows, blocks, 32), dtype=np.int8)
        parts, values = [scale.view(np.uint8), q.view(np.uint8)], d * q.astype(np.float32)
    else:  # 4-bit q, two a byte: element j < 16 is the low nibble of byte j, j >= 16 the high nibble of byte j - 16
        q = rng.integers(0, 16, (rows, blocks, 32), dtype=np.uint8)
        nibbles = q[..., :16] | (q[..., 16:] << 4)
        if kind == "Q4_1":  # f16 d, f16 m: w = d q + m
            parts, values = [scale.view(np.uint8), low.view(np.uint8), nibbles], d * q.astype(np.float32) + m
        else:  # Q4_0, f16 d: w = d (q - 8)
            parts, values = [scale.view(np.uint8), nibbles], d * (q.astype(np.float32) - 8)
    return np.concatenate(parts, axis=-1).reshape(rows, -1), values.reshape(shape)


def _q4_k(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """144 bytes for 256 weights: f16 d, f16 dmin, eight 6-bit scales and minima in 12 bytes, 128 bytes of nibbles.

    Weight ``i`` of group ``j`` (of 32) is ``d sc_j q - dmin m_j``. Scales and minima 0-3 take the lower six bits of
    bytes 0-3 and 4-7; of those 4-7 the lower four bits are in bytes 8-11 (scale low nibble, minimum high), the upper
    two in the upper bits of bytes 0-3 and 4-7. Groups 2p and 2p + 1 share 32 bytes: low nibbles, high nibbles.
    """
    rows, columns = shape
    count = columns // 256
    d, dmin = (rng.uniform(0.001, 0.01, (rows, count, 1)).astype(np.float16) for _ in range(2))
    sc, m = (rng.integers(0, 64, (rows, count, 8), dtype=np.uint8) for _ in range(2))
    q = rng.integers(0, 16, (rows, count, 8, 32), dtype=np.uint8)
    packed = [
        sc[..., :4] | (sc[..., 4:] >> 4) << 6,
        m[..., :4] | (m[..., 4:] >> 4) << 6,
        (sc[..., 4:] & 15) | (m[..., 4:] & 15) << 4,
    ]
    nibbles = (q[..., 0::2, :] | q[..., 1::2, :] << 4).reshape(rows, count, 128)
    scale, low = (x.astype(np.float32) * y for x, y in ((d, sc), (dmin, m)))
    values = scale[..., None] * q - low[..., None]
    raw = np.concatenate([d.view(np.uint8), dmin.view(np.uint8), *packed, nibbles], axis=-1)
    return raw.reshape(rows, -1), values.reshape(shape).astype(np.float32)


@dataclasses.dataclass
class TinyLlama:
    """What was written: values in the file's own row order, by GGUF name."""

    path: Path
    values: dict[str, np.ndarray]


def _write_tiny_llama(
    path: Path,
    *,
    tied: bool = True,
    architecture: str = "llama",
    ffn: int = FFN,
    down: str = "Q4_1",
    words: bool = False,
    metadata: dict[str, Any] | None = None,
    replace: dict[str, np.ndarray | None] | None = None,
) -> TinyLlama:
    """Writes the file; ``replace`` swaps, adds or (None) drops tensors (uint8: raw Q4_1), ``metadata`` adds keys.

    ``down`` is the format of the down projection, ``ffn`` its input width (Q4_K needs a multiple of 256); ``words``
    gives it a tokenizer: three control tokens, digits, small letters and the space.
    """
    import gguf

    rng = np.random.default_rng(7)
    q_width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layout: dict[str, tuple[tuple[int, ...], str]] = {"token_embd.weight": ((VOCAB, WIDTH), "Q8_0")}
    for i in range(LAYERS):
        layout |= {
            f"blk.{i}.attn_norm.weight": ((WIDTH,), "F32"),
            f"blk.{i}.attn_q.weight": ((q_width, WIDTH), "Q4_1"),
            f"blk.{i}.attn_k.weight": ((kv_width, WIDTH), "Q4_1"),
            f"blk.{i}.attn_v.weight": ((kv_width, WIDTH), "Q4_0"),
            f"blk.{i}.attn_output.weight": ((WIDTH, q_width), "F16"),
            f"blk.{i}.ffn_norm.weight": ((WIDTH,), "F32"),
            f"blk.{i}.ffn_gate.weight": ((ffn, WIDTH), "Q4_1"),
            f"blk.{i}.ffn_up.weight": ((ffn, WIDTH), "Q8_0"),
            f"blk.{i}.ffn_down.weight": ((WIDTH, ffn), down),
        }
        if architecture == "qwen2":
            layout |= {f"blk.{i}.attn_{x}.bias": ((q_width if x == "q" else kv_width,), "F32") for x in "qkv"}
        if architecture == "qwen3":
            layout |= {f"blk.{i}.attn_{x}_norm.weight": ((HEAD_DIM,), "F32") for x in "qk"}
    layout["output_norm.weight"] = ((WIDTH,), "F32")
    if not tied:
        layout["output.weight"] = ((VOCAB, WIDTH), "Q4_0")

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if words:
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(WORDS)
        writer.add_token_types([3] * 3 + [1] * (VOCAB - 3))
        writer.add_token_merges(["h e"])
        writer.add_chat_template(TEMPLATE)
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key, value)

    values = {}
    for name, (shape, kind) in layout.items():
        raw, values[name] = _blocks(rng, shape, kind)
        if name in (replace or {}):
            continue
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name, array in (replace or {}).items():
        if array is not None:
            kind = gguf.GGMLQuantizationType.Q4_1 if array.dtype == np.uint8 else None
            writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyLlama(path, values)


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight


def _rotate(x: np.ndarray, theta: float, interleaved: bool) -> np.ndarray:
    """Turns coordinate pairs of ``x [S, heads, head_dim]`` by position x theta^(-2j/head_dim)."""
    length, _, width = x.shape
    angle = np.arange(length)[:, None] * theta ** (-np.arange(0, width, 2) / width)
    cos, sin = (f(angle)[:, None, :].astype(x.dtype) for f in (np.cos, np.sin))
    out = np.empty_like(x)
    half = width // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def _llama_forward(
    config: dict[str, Any], weights: dict[str, np.ndarray], ids: np.ndarray, *, interleaved: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence through a llama model: (final norm output ``[S, D]``, logits ``[S, V]``), in the weights' dtype."""
    length, hd, theta, eps = len(ids), config["head_dim"], config["rope_theta"], config["rms_norm_eps"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    x = weights["model.embed_tokens.weight"][ids]
    future = np.triu(np.ones((length, length), bool), 1)
    for i in range(config["num_hidden_layers"]):
        w = {key: weights[f"model.layers.{i}.{key}.weight"] for key in _PARTS}
        y = _rms_norm(x, w["input_layernorm"], eps)
        q, k, v = ((y @ w[f"self_attn.{n}_proj"].T).reshape(length, -1, hd) for n in "qkv")
        q, k = _rotate(q, theta, interleaved), _rotate(k, theta, interleaved)
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("shd,thd->hst", q, k) / x.dtype.type(np.sqrt(hd))
        scores[:, future] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hst,thd->shd", scores / scores.sum(-1, keepdims=True), v).reshape(length, -1)
        x = x + attended @ w["self_attn.o_proj"].T
        y = _rms_norm(x, w["post_attention_layernorm"], eps)
        gate = y @ w["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    hidden = _rms_norm(x, weights["model.norm.weight"], eps)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return hidden, hidden @ head.T


_PARTS = (
    *(f"self_attn.{n}_proj" for n in "qkvo"),
    *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)


@pytest.fixture
def write_tiny_llama(tmp_path: Path) -> Callable[..., TinyLlama]:
    pytest.importorskip("gguf")
    return lambda **options: _write_tiny_llama(tmp_path / "tiny.gguf", **options)


@pytest.fixture(scope="session")
def llama_forward() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    return _llama_forward


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    try:
        return fetch_smollm2()
    except ModelUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def goldens() -> dict[str, np.ndarray]:
    """Made by tools/goldens/make_smollm2_goldens.py with PyTorch and Transformers."""
    with np.load(Path(__file__).parent / "smollm2_goldens.npz") as file:
        return dict(file)
