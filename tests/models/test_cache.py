"""The int8 key/value cache: its rounding by hand and in float64, and what it does to a forward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import ComputeConfig, Transformer, TransformerConfig, init_cache

INT8 = ComputeConfig(kv_cache_dtype="int8")
SHAPE = TransformerConfig(vocab_size=11, d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=4, d_ff=16)


LAYER = jnp.int32(1)


def empty(rows: int = 1, length: int = 3, compute: ComputeConfig = INT8):
    return init_cache(SHAPE, rows, length, compute)


def test_rounding_by_hand():
    # Head 0: largest 1.27, scale .01: 127, -50, 0 (.004 is .4 of a step), 1. Head 1: all zeros come back as zeros.
    x = jnp.array([[[[1.27, -0.5, 0.004, 0.006], [0.0, 0.0, 0.0, 0.0]]]])
    kept = empty().put(x, -x, LAYER, jnp.array([[1]]))
    assert kept.key.dtype == kept.value.dtype == jnp.int8
    assert kept.key[1, 0, 1].tolist() == [[127, -50, 0, 1], [0, 0, 0, 0]]
    np.testing.assert_allclose(kept.key_scale[1, 0, 1], [0.01, 1.0], rtol=1e-6)
    key, value = kept.read(LAYER, jnp.dtype("float32"))
    np.testing.assert_allclose(key[0, 1, 0], [1.27, -0.5, 0.0, 0.01], rtol=1e-6)
    np.testing.assert_array_equal(value, -key)
    assert (np.asarray(key)[0, [0, 2]] == 0).all()  # the other positions
    assert not np.asarray(kept.key[0]).any()  # the other layer


def test_every_value_is_within_half_a_step_of_float64():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 2, 4)) * 10.0 ** rng.integers(-4, 4, (2, 5, 2, 1))
    position = np.broadcast_to(np.arange(5), (2, 5))
    given = jnp.asarray(x, jnp.float32)
    key, _ = empty(2, 5).put(given, given, LAYER, position).read(LAYER, jnp.float32)
    step = np.abs(x).max(-1, keepdims=True) / 127
    error = np.abs(np.asarray(key, np.float64) - x) / step
    assert error.max() <= 0.5 + 1e-4  # float32's own rounding of the quotient
    assert error.max() > 0.3


def test_a_nan_is_not_hidden_and_positions_past_the_end_are_lost():
    x = jnp.ones((1, 1, 2, 4)).at[0, 0, 0, 2].set(jnp.nan)
    key, _ = empty().put(x, x, LAYER, jnp.array([[2]])).read(LAYER, jnp.dtype("float32"))
    assert np.isnan(key[0, 2, 0]).all()
    np.testing.assert_allclose(key[0, 2, 1], 1.0, rtol=1e-6)
    lost = empty().put(x, x, LAYER, jnp.array([[3]]))
    assert not np.asarray(lost.key).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_may_be_of_another_type_than_the_arithmetic(dtype):
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    cache = empty(compute=ComputeConfig(dtype=dtype, kv_cache_dtype=other))
    x = jnp.full((1, 1, 2, 4), 1.001, dtype)
    kept = cache.put(x, x, LAYER, jnp.array([[0]]))
    assert kept.key.dtype == other
    assert kept.key_scale is None
    assert kept.read(LAYER, jnp.dtype(dtype))[0].dtype == dtype


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("gqa", {}), ("latent", {"n_experts": 0, "d_ff_shared": 0, "n_dense_layers": 0, "d_ff_dense": 0})],
)
def test_prompts_and_decoding_see_the_same_rounded_keys(build, forward, kind, changes):
    """All at once or token by token, a position attends to int8 keys, its own too; the full pass differs a little."""
    model = build(kind, **changes)
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 7))
    at_once = forward(model, tokens, cache=init_cache(model.config, 2, 9, INT8), compute=INT8)
    cache, states = init_cache(model.config, 2, 9, INT8), []
    for i in range(7):
        out = forward(model, tokens[:, i : i + 1], positions=np.full((2, 1), i), cache=cache, compute=INT8)
        cache = out.cache
        states.append(out.hidden[:, 0])
    # float32 rounding can turn the rounding to int8 of a value that lies half-way: one step of 1/127 of a key.
    np.testing.assert_allclose(np.stack(states, 1), at_once.hidden, atol=2e-2)
    exact = np.asarray(forward(model, tokens).hidden)
    difference = np.abs(np.asarray(at_once.hidden) - exact)
    assert 1e-4 < difference.max() < 0.2 * np.abs(exact).max()


def test_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="kv_cache_dtype='int4': choose one of float32, bfloat16, int8"):
        ComputeConfig(kv_cache_dtype="int4")


def test_a_decode_step_does_not_copy_the_cache():
    """Donated, it is written where it lies; as an input and an output of every layer it would be held twice."""
    shape = TransformerConfig(vocab_size=11, d_model=16, n_layers=4, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=16)
    graphdef, params = nnx.split(Transformer(shape, rngs=nnx.Rngs(0)), nnx.Param)
    cache = init_cache(shape, 16, 512, ComputeConfig())

    def step(params, cache, tokens, positions):
        return nnx.merge(graphdef, params)(tokens, positions=positions, cache=cache).cache

    tokens = jnp.zeros((16, 1), jnp.int32)
    compiled = jax.jit(step, donate_argnums=1).lower(params, cache, tokens, tokens).compile()
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 2 + whole / shape.n_layers
