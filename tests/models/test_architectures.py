"""Every architecture against goldens of Hugging Face Transformers (``tools/goldens/make_architecture_goldens.py``)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.models import ComputeConfig, Transformer, export_pretrained, init_cache, load_pretrained
from trm_jax.models.pretrained import write_safetensors

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(file.stem for file in GOLDENS.glob("*.npz"))
MIXTURES = [name for name in NAMES if "moe" in name or "deepseek" in name]
# Two or three blocks of width 24 in float32: some hundred roundings of 6e-8 each on values of up to four. Measured
# 2e-6 to 5e-6 on each of them; a term of the wrong kind (a missing factor, bias or norm) moves them by 1e-2 and more.
ATOL = 1.5e-5


def default(*fast: str) -> list[Any]:
    """All goldens, those that are not named marked slow: compiling is nearly all the time of these tests."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Transformer, dict[str, np.ndarray], Path]]:
    """Name to the model, loaded from a directory made of the golden's weights, the golden, and the directory."""

    @functools.cache
    def one(name: str) -> tuple[Transformer, dict[str, np.ndarray], Path]:
        golden = dict(np.load(GOLDENS / f"{name}.npz", allow_pickle=False))
        weights = {key.removeprefix("weights/"): value for key, value in golden.items() if key.startswith("weights/")}
        place = tmp_path_factory.mktemp(name)
        (place / "config.json").write_text(str(golden["config"]))
        shapes = {key: value.shape for key, value in weights.items()}
        write_safetensors(place, shapes, weights.__getitem__, dtype="float32", shard_bytes=10**9)
        return load_pretrained(place), golden, place

    return one


def test_goldens_cover_the_architectures():
    kinds = {json.loads(str(np.load(GOLDENS / f"{name}.npz")["config"]))["model_type"] for name in NAMES}
    assert kinds == {"llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2"}


@pytest.mark.parametrize("name", default(*(name for name in NAMES if name != "deepseek_v2_query")))
def test_logits_and_every_hidden_state_are_those_of_transformers(load, forward, name):
    model, golden, _ = load(name)
    out = forward(model, golden["tokens"], layer_states=True)
    states = np.concatenate([out.layer_states, out.hidden[None]])
    for layer, (ours, theirs) in enumerate(zip(states, golden["states"], strict=True)):
        np.testing.assert_allclose(ours, theirs, atol=ATOL, err_msg=f"state {layer}")
    np.testing.assert_allclose(out.hidden @ model.head().T, golden["logits"], atol=ATOL)
    if name in MIXTURES:
        assert float(out.router_margins.min()) > 1e-4  # else rounding could choose another expert


@pytest.mark.parametrize("experts", ["dense", "ragged_dot"])
@pytest.mark.parametrize(
    "name", [param for param in default("qwen2_moe") if isinstance(param, str) or param.values[0] in MIXTURES]
)
def test_every_form_of_the_mixture_agrees_with_transformers(load, forward, name, experts):
    model, golden, _ = load(name)
    out = forward(model, golden["tokens"], compute=ComputeConfig(experts=experts))
    np.testing.assert_allclose(out.hidden, golden["states"][-1], atol=ATOL)


@pytest.mark.parametrize("name", default("qwen3", "deepseek_v2"))
def test_prefill_and_decode_with_a_cache_equal_the_full_forward(load, forward, name):
    model, golden, _ = load(name)
    tokens, expected = golden["tokens"], golden["states"][-1]
    cache = init_cache(model.config, 2, 20, ComputeConfig())
    first = forward(model, tokens[:, :16], cache=cache)
    np.testing.assert_allclose(first.hidden, expected[:, :16], atol=ATOL)
    cache = first.cache
    for at in range(16, 19):
        out = forward(model, tokens[:, at : at + 1], positions=np.full((2, 1), at), cache=cache)
        np.testing.assert_allclose(out.hidden[:, 0], expected[:, at], atol=ATOL)
        cache = out.cache


def test_the_latent_cache_holds_one_small_vector_a_token(load):
    config = load("deepseek_v2")[0].config
    cache = init_cache(config, 2, 20, ComputeConfig())
    assert cache.key.shape == (3, 2, 20, 1, 4)  # rotary part of the key, one for all heads
    assert cache.value.shape == (3, 2, 20, 1, 12)  # the latent


@pytest.mark.parametrize("name", default("deepseek_v2"))
def test_packed_rows_equal_unpacked_ones(load, forward, name):
    model, golden, _ = load(name)
    a, b = golden["tokens"][0, :7], golden["tokens"][1, :12]
    out = forward(
        model,
        np.concatenate([a, b])[None],
        positions=np.concatenate([np.arange(7), np.arange(12)])[None],
        segment_ids=np.repeat([4, 2], [7, 12])[None],
    ).hidden[0]
    np.testing.assert_allclose(out[:7], golden["states"][-1][0, :7], atol=ATOL)
    np.testing.assert_allclose(out[7:], golden["states"][-1][1, :12], atol=ATOL)


@pytest.mark.parametrize("name", default("qwen3"))
def test_bfloat16_parameters_are_near(load, forward, name):
    _, golden, place = load(name)
    model = load_pretrained(place, param_dtype=jnp.dtype("bfloat16"))
    assert {x.dtype for x in jax.tree.leaves(model.blocks)} == {jnp.dtype("bfloat16")}
    out = forward(model, golden["tokens"])
    difference = np.asarray(out.hidden) - golden["states"][-1]
    flipped = 0 if out.router_margins is None else np.asarray(out.router_margins.min())
    # Weights rounded to 8 bits: a percent; a token near the edge of a choice may also change its expert.
    assert 1e-4 < np.median(np.abs(difference)) < 3e-2, flipped


@pytest.mark.parametrize("name", default("deepseek_v2", "qwen2", "qwen3_moe"))
def test_a_checkpoint_comes_back_with_the_same_bytes(load, tmp_path, name):
    model, golden, place = load(name)
    files = export_pretrained(model, tmp_path / "again", like=place)
    assert (files / "model.safetensors").read_bytes() != b""
    assert _tensors(files) == _tensors(place)
    raw = json.loads((files / "config.json").read_text())
    assert {**raw, "torch_dtype": None} == {**json.loads(str(golden["config"])), "torch_dtype": None}
    fresh = export_pretrained(model, tmp_path / "fresh", shard_bytes=20_000)
    assert (fresh / "model.safetensors.index.json").exists()
    assert load_pretrained(fresh).config == model.config
    assert _tensors(fresh) == _tensors(place)


def _tensors(place: Path) -> dict[str, Any]:
    from trm_jax.models.pretrained import open_safetensors

    files = open_safetensors(place)
    return {name: files.read(name).tobytes() for name in files.tensors}
