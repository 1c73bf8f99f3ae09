"""The forward pass against an oracle, and what must not change it: later tokens, padding, packing, a cache."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import ComputeConfig, KVCache, Transformer, TransformerConfig, init_cache

KINDS = ["dense", "gqa", "tied", "moe"]
FAST = [kind if kind in ("gqa", "moe") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
# Two layers of width 16 in float32: some hundred roundings of 6e-8 each on values of order one.
ATOL = 2e-5


def tokens_of(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 13, (batch, length)).astype(np.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_the_float64_oracle(build, forward, to_numpy, numpy_forward, kind):
    model = build(kind)
    tokens = tokens_of(3, 9)
    out = forward(model, tokens)
    for b in range(3):
        expected, experts, gap = numpy_forward(to_numpy(model), model.config, tokens[b])
        np.testing.assert_allclose(out.hidden[b], expected, atol=ATOL)
        if kind == "moe":
            assert gap > 1e-4  # else rounding could choose another expert and the comparison would mean nothing
            routed = np.asarray(out.routed_experts)[:, b]
            assert [[set(x.tolist()) for x in layer] for layer in routed] == experts
        else:
            assert out.routed_experts is None
    assert out.cache is None


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_experts_a_token(build, forward, to_numpy, numpy_forward, k):
    model = build("moe", experts_per_token=k)
    tokens = tokens_of(1, 7, seed=5)
    expected, _, gap = numpy_forward(to_numpy(model), model.config, tokens[0])
    assert gap > 1e-4
    np.testing.assert_allclose(forward(model, tokens).hidden[0], expected, atol=ATOL)


def test_rotary_base_and_norm_epsilon_are_used(build, forward, to_numpy, numpy_forward):
    model = build("dense", rope_theta=50.0, norm_eps=0.3)
    tokens = tokens_of(1, 8)
    expected, *_ = numpy_forward(to_numpy(model), model.config, tokens[0])
    np.testing.assert_allclose(forward(model, tokens).hidden[0], expected, atol=ATOL)


def test_bfloat16_activations_are_near_the_oracle_and_not_float32(build, forward, to_numpy, numpy_forward):
    model = build("dense")
    tokens = tokens_of(1, 9)
    expected, *_ = numpy_forward(to_numpy(model), model.config, tokens[0])
    hidden = forward(model, tokens, compute=ComputeConfig(dtype="bfloat16")).hidden
    assert hidden.dtype == jnp.bfloat16
    error = np.asarray(hidden[0], np.float64) - expected
    # bfloat16 keeps 8 bits (4e-3 relative); a dozen roundings in a row stay within a few of them.
    assert 1e-3 < np.sqrt((error**2).mean() / (expected**2).mean()) < 2e-2


def test_the_head_is_the_embedding_when_tied(build):
    tied, apart = build("tied"), build("dense")
    np.testing.assert_array_equal(tied.head(), tied.embedding.get_value())
    assert not hasattr(tied, "lm_head")
    assert apart.head().shape == (13, 16)
    assert not np.array_equal(apart.head(), apart.embedding.get_value())


def test_initial_weights_have_the_stated_spread():
    config = TransformerConfig(vocab_size=13, d_model=64, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=96)
    model = Transformer(config, rngs=nnx.Rngs(0))
    # gain / sqrt(fan in); the two projections into the residual stream are smaller by sqrt(2 · layers) = 2.
    for name, expected in {"query": 1 / 8, "gate": 1 / 8, "output": 1 / 4 / 2, "down": 96**-0.5 / 2}.items():
        assert float(jnp.std(getattr(model.blocks, name).get_value())) == pytest.approx(expected, rel=0.05), name
    assert float(jnp.std(model.head())) == pytest.approx(1 / 8, rel=0.1)
    assert np.all(np.asarray(model.final_norm.get_value()) == 1)
    again = Transformer(config, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(again.blocks.down.get_value(), model.blocks.down.get_value())


@pytest.mark.parametrize("kind", ["gqa", "moe"])
def test_later_tokens_and_padding_never_change_earlier_states(build, forward, kind):
    model = build(kind)
    tokens = tokens_of(2, 10)
    before = np.asarray(forward(model, tokens).hidden)
    for cut in (1, 4, 9):
        changed = tokens.copy()
        changed[:, cut:] = (changed[:, cut:] + 1 + np.arange(10 - cut)) % 13
        after = np.asarray(forward(model, changed).hidden)
        np.testing.assert_array_equal(after[:, :cut], before[:, :cut])  # one program: the same bits
        assert not np.allclose(after[:, cut], before[:, cut], atol=1e-3)
    longer = np.concatenate([tokens, np.zeros((2, 5), np.int32)], axis=1)
    np.testing.assert_allclose(forward(model, longer).hidden[:, :10], before, atol=ATOL)


def test_no_gradient_flows_from_a_state_to_a_later_token(build, quick_jit):
    model = build("dense")

    def loss(table, tokens):
        changed = copy.deepcopy(model)
        changed.embedding.set_value(table)
        return jnp.sum(changed(tokens).hidden[0, 2])

    grad = quick_jit(jax.grad(loss))(model.embedding.get_value(), jnp.array([[1, 2, 3, 4, 5]]))
    assert np.all(np.asarray(grad)[[4, 5]] == 0)
    assert np.all(np.any(np.asarray(grad)[[1, 2, 3]] != 0, axis=1))


@pytest.mark.parametrize("invariant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_packed_rows_equal_unpacked_ones(build, forward, invariant):
    model, compute = build("gqa"), ComputeConfig(batch_invariant=invariant)
    a, b = tokens_of(1, 4, 1)[0], tokens_of(1, 6, 2)[0]
    packed = np.concatenate([a, b, [0, 0]])[None]
    segments = np.array([[7] * 4 + [3] * 6 + [0] * 2])
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1]])
    out = forward(model, packed, positions=positions, segment_ids=segments, compute=compute).hidden[0]
    np.testing.assert_allclose(out[:4], forward(model, a[None], compute=compute).hidden[0], atol=ATOL)
    np.testing.assert_allclose(out[4:10], forward(model, b[None], compute=compute).hidden[0], atol=ATOL)
    assert np.isfinite(out).all()
    mixed_up = forward(model, packed, positions=positions, compute=compute).hidden[0]
    assert not np.allclose(mixed_up[4:10], out[4:10], atol=1e-2)  # without segments they do attend across


@pytest.mark.parametrize("kind", FAST)
def test_prefill_and_decode_with_a_cache_equal_the_full_forward(build, forward, kind):
    model, compute = build(kind), ComputeConfig()
    tokens = tokens_of(3, 9)
    full = forward(model, tokens).hidden
    cache = init_cache(model.config, 3, 12, compute)  # longer than needed
    first = forward(model, tokens[:, :4], cache=cache)
    np.testing.assert_allclose(first.hidden, full[:, :4], atol=ATOL)
    cache = first.cache
    for at in range(4, 9):
        out = forward(model, tokens[:, at : at + 1], positions=np.full((3, 1), at), cache=cache)
        np.testing.assert_allclose(out.hidden[:, 0], full[:, at], atol=ATOL)
        cache = out.cache
    assert not np.asarray(cache.key)[:, :, 9:].any()


def test_rows_decode_at_their_own_positions_whatever_stands_behind_in_the_cache(build, forward):
    model, compute = build("gqa"), ComputeConfig()
    tokens = tokens_of(2, 8)
    full = forward(model, tokens).hidden
    garbage = jax.tree.map(lambda x: x + 5.0, init_cache(model.config, 2, 10, compute))
    cache = forward(model, tokens[:, :6], cache=garbage).cache
    # Row 0 runs token 3 again (a retry), row 1 continues with token 6.
    out = forward(model, tokens[[0, 1], [3, 6]][:, None], positions=np.array([[3], [6]]), cache=cache)
    np.testing.assert_allclose(out.hidden[:, 0], full[[0, 1], [3, 6]], atol=ATOL)


def test_init_cache_has_the_compute_dtype(build):
    cache = init_cache(build("gqa").config, 5, 7, ComputeConfig(dtype="bfloat16"))
    assert isinstance(cache, KVCache)
    assert cache.key.shape == cache.value.shape == (2, 5, 7, 2, 8)
    assert cache.key.dtype == jnp.bfloat16


def weighted_sum(quick_jit, model: Transformer, tokens, readout, **options):
    graphdef, params = nnx.split(model, nnx.Param)

    def value(p):
        return jnp.sum(nnx.merge(graphdef, p)(tokens, **options).hidden * readout)

    return quick_jit(jax.value_and_grad(value))(params)


@pytest.mark.parametrize("kind", [pytest.param("gqa", marks=pytest.mark.slow), "moe"])
def test_gradients_are_the_central_differences_of_the_oracle(build, quick_jit, to_numpy, numpy_forward, kind):
    model = build(kind)
    tokens = tokens_of(1, 5, seed=4)
    readout = np.random.default_rng(2).standard_normal((1, 5, 16)).astype(np.float32)
    _, grads = weighted_sum(quick_jit, model, tokens, readout)
    grads = nnx.to_pure_dict(grads)
    params = to_numpy(model)

    def value() -> float:
        hidden, _, gap = numpy_forward(params, model.config, tokens[0])
        assert gap > 1e-4
        return float((hidden * readout[0]).sum())

    rng = np.random.default_rng(8)
    names = [*(("blocks", name) for name in params["blocks"]), ("final_norm",), ("embedding",)]
    for name in names:
        array, grad = params, grads
        for part in name:
            array, grad = array[part], grad[part]
        for _ in range(2):
            index = tuple(rng.integers(0, n) for n in array.shape)
            if name == ("embedding",):
                index = (int(tokens[0, rng.integers(0, 5)]), index[1])
            kept = array[index]
            array[index] = kept + 1e-5
            above = value()
            array[index] = kept - 1e-5
            below = value()
            array[index] = kept
            # Float64 differences of a smooth function are good to 1e-9; the float32 gradient to about 1e-5.
            np.testing.assert_allclose(grad[index], (above - below) / 2e-5, rtol=2e-4, atol=5e-5, err_msg=str(name))


@pytest.mark.slow
def test_fixed_tiles_do_not_change_the_gradients(build, quick_jit):
    model, tokens = build("moe"), tokens_of(3, 7)
    readout = np.random.default_rng(2).standard_normal((3, 7, 16)).astype(np.float32)
    tiled = ComputeConfig(batch_invariant=True, row_tile=4)
    value, grads = weighted_sum(quick_jit, model, tokens, readout)
    other_value, other = weighted_sum(quick_jit, model, tokens, readout, compute=tiled, remat=True)
    np.testing.assert_allclose(other_value, value, rtol=1e-5)
    # Sums over 21 positions in another order: a few float32 roundings of terms of order ten.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5), other, grads)


def test_segments_with_a_cache_are_refused(build):
    model = build("dense")
    cache = init_cache(model.config, 1, 4, ComputeConfig())
    with pytest.raises(ValueError, match="segment_ids"):
        model(jnp.zeros((1, 4), jnp.int32), cache=cache, segment_ids=jnp.zeros((1, 4), jnp.int32))


def test_routing_jitter_without_seeds_is_refused(build):
    with pytest.raises(ValueError, match=r"routing_jitter=0\.5 needs jitter_seeds"):
        build("moe")(jnp.zeros((1, 4), jnp.int32), compute=ComputeConfig(routing_jitter=0.5))
