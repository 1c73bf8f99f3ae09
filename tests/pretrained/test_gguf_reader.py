"""Reading a GGUF: values, names, row order, and refusal of everything else."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from trm_jax.models.pretrained import read_gguf, unpermute_rope

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
NORM, GATE = "output_norm.weight", "blk.1.ffn_gate.weight"

HF_PART = {
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


def hf_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, kind = name.split(".")
        return f"model.layers.{layer}.{HF_PART[part]}.{kind}"
    return {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }[name]


def hf_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Row by row: GGUF keeps at 2j + s of a head what Hugging Face keeps at s * head_dim/2 + j."""
    out = np.empty_like(values)
    for head in range(heads):
        for j in range(HEAD_DIM // 2):
            for side in range(2):
                out[head * HEAD_DIM + side * (HEAD_DIM // 2) + j] = values[head * HEAD_DIM + 2 * j + side]
    return out


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_read_exactly(write_tiny_llama, tied):
    written = write_tiny_llama(tied=tied)
    model = read_gguf(written.path)
    assert set(model.tensors) == {hf_name(name) for name in written.values}
    assert next(iter(model.tensors)) == "model.embed_tokens.weight"
    for name, expected in written.values.items():
        if "attn_q" in name or "attn_k" in name:
            expected = hf_rows(expected, HEADS if "attn_q" in name else KV_HEADS)
        got = model.tensors[hf_name(name)]
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, expected, err_msg=name)


def test_config_in_hugging_face_words(write_tiny_llama):
    assert read_gguf(write_tiny_llama().path).config == {
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5_000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }


def test_untied_head_is_announced(write_tiny_llama):
    assert read_gguf(write_tiny_llama(tied=False).path).config["tie_word_embeddings"] is False


def test_tokenizer_metadata_are_handed_on(write_tiny_llama):
    metadata = read_gguf(write_tiny_llama().path).tokenizer
    assert metadata["tokenizer.ggml.model"] == "gpt2"
    assert all(key.startswith("tokenizer.") for key in metadata)


def test_tensors_are_fresh_writable_copies(write_tiny_llama):
    tensors = read_gguf(write_tiny_llama().path).tensors
    for name in ("model.norm.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        first = tensors[name]
        before = first.copy()
        first[...] = 0.0
        np.testing.assert_array_equal(tensors[name], before)
    with pytest.raises(KeyError):
        tensors["model.layers.2.mlp.up_proj.weight"]


def test_half_rotation_on_read_rows_equals_interleaved_rotation_on_file_rows(write_tiny_llama, llama_forward):
    """The reason for the reordering: llama.cpp's model on the file's rows is Hugging Face's model on ours."""
    written = write_tiny_llama(tied=False)
    model = read_gguf(written.path)
    ids = np.random.default_rng(3).integers(0, 40, 17)
    ours = {name: value.astype(np.float64) for name, value in model.tensors.items()}
    theirs = {hf_name(name): value.astype(np.float64) for name, value in written.values.items()}
    hidden, logits = llama_forward(model.config, ours, ids)
    hidden_file, logits_file = llama_forward(model.config, theirs, ids, interleaved=True)
    np.testing.assert_allclose(logits, logits_file, rtol=0, atol=1e-11)  # float64, sums in another order
    np.testing.assert_allclose(hidden, hidden_file, rtol=0, atol=1e-11)
    _, wrong = llama_forward(model.config, theirs, ids)
    assert np.abs(wrong - logits_file).max() > 1e-2  # the comparison can fail


def test_q4_1_block_by_hand(write_tiny_llama):
    """d = 0.5, m = -1, every byte 0x3A: low nibble 10 gives 0.5*10 - 1 = 4, high nibble 3 gives 0.5*3 - 1 = 0.5."""
    block = np.frombuffer(struct.pack("<ee", 0.5, -1.0) + bytes([0x3A] * 16), np.uint8)
    written = write_tiny_llama(replace={GATE: np.tile(block, (96, 2))})
    got = read_gguf(written.path).tensors["model.layers.1.mlp.gate_proj.weight"]
    np.testing.assert_array_equal(got, np.tile(([4.0] * 16 + [0.5] * 16) * 2, (96, 1)))


def test_unpermute_rope_by_hand():
    # Two heads of width 4, rows named by their Hugging Face position; the file interleaves halves: 0 2 1 3.
    file_rows = np.array([0, 2, 1, 3, 4, 6, 5, 7], np.float32)[:, None]
    np.testing.assert_array_equal(unpermute_rope(file_rows, 2)[:, 0], np.arange(8))


@pytest.mark.parametrize("heads", [0, 3, 8])
def test_unpermute_rope_refuses_heads_that_do_not_fit(heads):
    with pytest.raises(ValueError, match=f"8 rows do not split into n_heads={heads}"):
        unpermute_rope(np.zeros((8, 2), np.float32), heads)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replace": {NORM: None, GATE: None}}, f"missing: {GATE}; missing: {NORM}"),
        ({"replace": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, r"surplus: blk.0.attn_q.bias \(64,\)"),
        (
            {"replace": {GATE: np.zeros((64, 96), np.float32)}},
            rf"wrong shape: {GATE} is \(64, 96\), the metadata require \(96, 64\)",
        ),
        ({"replace": {GATE: np.zeros((96, 64), np.float64)}}, f"unsupported format: {GATE} is F64"),
        ({"architecture": "gemma"}, "architecture 'gemma' is not supported; 'llama' or 'qwen2' or 'qwen3' is required"),
        ({"metadata": {"llama.expert_count": 8}}, "llama.expert_count=8"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type='yarn'"),
        ({"metadata": {"llama.attention.value_length": 32}}, "llama.attention.value_length=32 must equal"),
    ],
)
def test_another_model_is_refused_by_name(write_tiny_llama, options, message):
    written = write_tiny_llama(**options)
    with pytest.raises(ValueError, match=message):
        read_gguf(written.path)


def test_many_problems_are_counted(write_tiny_llama):
    written = write_tiny_llama(metadata={"llama.attention.key_length": 16}, replace=dict.fromkeys(_all_block_names()))
    with pytest.raises(ValueError, match="and 10 more"):  # 18 block tensors, 8 shown
        read_gguf(written.path)


def _all_block_names() -> list[str]:
    return [f"blk.{layer}.{part}.weight" for layer in range(2) for part in HF_PART]


def test_missing_metadata_key_is_named(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(ValueError, match=r"metadata key 'llama.embedding_length' is missing"):
        read_gguf(tmp_path / "bare.gguf")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_an_error_naming_the_tensor(write_tiny_llama, bad):
    values = np.ones(64, np.float32)
    values[5] = bad
    tensors = read_gguf(write_tiny_llama(replace={NORM: values}).path).tensors
    with pytest.raises(ValueError, match=f"{NORM} holds NaN or infinite"):
        tensors["model.norm.weight"]


def _cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.03, 0.2, 0.7, 0.999])
def test_truncated_file_is_named(write_tiny_llama, share):
    path = write_tiny_llama().path
    keep = int(share * path.stat().st_size)
    _cut(path, keep)
    with pytest.raises(ValueError, match=rf"tiny.gguf \({keep} bytes\) is not a whole GGUF file"):
        read_gguf(path)


def test_another_kind_of_file_is_named(tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "notes.gguf"
    path.write_bytes(b"not a model " * 100)
    with pytest.raises(ValueError, match="is not a whole GGUF file"):
        read_gguf(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none.gguf"):
        read_gguf(tmp_path / "none.gguf")


def test_q4_k_by_its_definition(write_tiny_llama):
    written = write_tiny_llama(ffn=512, down="Q4_K")
    model = read_gguf(written.path)
    for layer in range(2):
        expected = written.values[f"blk.{layer}.ffn_down.weight"]
        got = model.tensors[f"model.layers.{layer}.mlp.down_proj.weight"]
        assert expected.std() > 0.1
        # d·sc and dmin·m are products of a half and a six-bit number: exact; one rounding of the difference.
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_files_keep_their_rows_and_bring_their_own_tensors(write_tiny_llama, architecture):
    written = write_tiny_llama(architecture=architecture)
    model = read_gguf(written.path)
    assert model.model_type == architecture
    own = {"qwen2": "self_attn.q_proj.bias", "qwen3": "self_attn.k_norm.weight"}[architecture]
    assert f"model.layers.1.{own}" in model.tensors
    for name, expected in written.values.items():
        np.testing.assert_array_equal(model.tensors[hf_name(name)], expected, err_msg=name)
    assert model.shapes() == {name: value.shape for name, value in model.tensors.items()}


def test_a_tensor_of_another_architecture_is_surplus(write_tiny_llama):
    bias = np.zeros(64, np.float32)
    with pytest.raises(ValueError, match=r"surplus: blk\.0\.attn_q\.bias \(64,\)"):
        read_gguf(write_tiny_llama(replace={"blk.0.attn_q.bias": bias}).path)
