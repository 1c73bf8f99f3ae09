"""The forward pass against an oracle, and what must not change it: later tokens, padding, packing, a cache."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import ComputeConfig, KVCache, Transformer, init_cache

KINDS = ["dense", "gqa", "tied", "moe"]
# Two layers of width 16 in float32: some hundred roundings of 6e-8 each on values of order one.
ATOL = 2e-5


def tokens_of(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 13, (batch, length)).astype(np.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_the_float64_oracle(build, to_numpy, numpy_forward, kind):
    model = build(kind)
    tokens = tokens_of(3, 9)
    out = model(jnp.asarray(tokens))
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


@pytest.mark.parametrize("k", [1, 3, 4])
def test_any_number_of_experts_a_token(build, to_numpy, numpy_forward, k):
    model = build("moe", experts_per_token=k)
    tokens = tokens_of(1, 7, seed=5)
    expected, _, gap = numpy_forward(to_numpy(model), model.config, tokens[0])
    assert gap > 1e-4
    np.testing.assert_allclose(model(jnp.asarray(tokens)).hidden[0], expected, atol=ATOL)


def test_rotary_base_and_norm_epsilon_are_used(build, to_numpy, numpy_forward):
    model = build("dense", rope_theta=50.0, norm_eps=0.3)
    tokens = tokens_of(1, 8)
    expected, *_ = numpy_forward(to_numpy(model), model.config, tokens[0])
    np.testing.assert_allclose(model(jnp.asarray(tokens)).hidden[0], expected, atol=ATOL)


def test_bfloat16_activations_are_near_the_oracle_and_not_float32(build, to_numpy, numpy_forward):
    model = build("dense")
    tokens = tokens_of(1, 9)
    expected, *_ = numpy_forward(to_numpy(model), model.config, tokens[0])
    hidden = model(jnp.asarray(tokens), compute=ComputeConfig(dtype="bfloat16")).hidden
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


def test_initial_weights_have_the_stated_spread(build):
    model = build("dense", d_model=64, d_ff=96, n_layers=2)
    # gain / sqrt(fan in); the two projections into the residual stream are smaller by sqrt(2 · layers).
    spread = {name: float(jnp.std(getattr(model.blocks, name).get_value())) for name in ("query", "gate", "down")}
    assert spread["query"] == pytest.approx(64**-0.5, rel=0.05)
    assert spread["gate"] == pytest.approx(64**-0.5, rel=0.05)
    assert spread["down"] == pytest.approx(96**-0.5 / 2, rel=0.05)
    assert float(jnp.std(model.head())) == pytest.approx(64**-0.5, rel=0.1)


@pytest.mark.parametrize("kind", ["gqa", "moe"])
def test_later_tokens_and_padding_never_change_earlier_states(build, kind):
    model = build(kind)
    run = jax.jit(lambda t: model(t).hidden)
    tokens = tokens_of(2, 10)
    before = np.asarray(run(tokens))
    for cut in (1, 4, 9):
        changed = tokens.copy()
        changed[:, cut:] = (changed[:, cut:] + 1 + np.arange(10 - cut)) % 13
        after = np.asarray(run(changed))
        np.testing.assert_array_equal(after[:, :cut], before[:, :cut])  # one program: the same bits
        assert not np.allclose(after[:, cut], before[:, cut], atol=1e-3)
    longer = np.concatenate([tokens, np.zeros((2, 5), np.int32)], axis=1)
    np.testing.assert_allclose(run(longer)[:, :10], before, atol=ATOL)


def test_no_gradient_flows_from_a_state_to_a_later_token(build):
    model = build("dense")

    def loss(table, tokens):
        changed = copy.deepcopy(model)
        changed.embedding.set_value(table)
        return jnp.sum(changed(tokens).hidden[0, 2])

    grad = jax.grad(loss)(model.embedding.get_value(), jnp.array([[1, 2, 3, 4, 5]]))
    assert np.all(np.asarray(grad)[[4, 5]] == 0)
    assert np.all(np.any(np.asarray(grad)[[1, 2, 3]] != 0, axis=1))


@pytest.mark.parametrize("invariant", [False, True])
def test_packed_rows_equal_unpacked_ones(build, invariant):
    model, compute = build("gqa"), ComputeConfig(batch_invariant=invariant)
    a, b = tokens_of(1, 4, 1)[0], tokens_of(1, 6, 2)[0]
    packed = np.concatenate([a, b, [0, 0]])[None]
    segments = np.array([[7] * 4 + [3] * 6 + [0] * 2])
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1]])
    out = model(packed, positions=positions, segment_ids=segments, compute=compute).hidden[0]
    np.testing.assert_allclose(out[:4], model(a[None], compute=compute).hidden[0], atol=ATOL)
    np.testing.assert_allclose(out[4:10], model(b[None], compute=compute).hidden[0], atol=ATOL)
    assert np.isfinite(out).all()
    mixed_up = model(packed, positions=positions, compute=compute).hidden[0]
    assert not np.allclose(mixed_up[4:10], out[4:10], atol=1e-2)  # without segments they do attend across


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode_with_a_cache_equal_the_full_forward(build, kind):
    model, compute = build(kind), ComputeConfig()
    tokens = tokens_of(3, 9)
    full = model(tokens).hidden
    cache = init_cache(model.config, 3, 12, compute)  # longer than needed
    first = model(tokens[:, :4], cache=cache)
    np.testing.assert_allclose(first.hidden, full[:, :4], atol=ATOL)
    step = jax.jit(lambda t, p, c: model(t, positions=p, cache=c))
    cache = first.cache
    for at in range(4, 9):
        out = step(tokens[:, at : at + 1], np.full((3, 1), at), cache)
        np.testing.assert_allclose(out.hidden[:, 0], full[:, at], atol=ATOL)
        cache = out.cache
    assert not np.asarray(cache.key)[:, :, 9:].any()


def test_rows_decode_at_their_own_positions_whatever_stands_behind_in_the_cache(build):
    model, compute = build("gqa"), ComputeConfig()
    tokens = tokens_of(2, 8)
    full = model(tokens).hidden
    garbage = jax.tree.map(lambda x: x + 5.0, init_cache(model.config, 2, 10, compute))
    cache = model(tokens[:, :6], cache=garbage).cache
    # Row 0 runs token 3 again (a retry), row 1 continues with token 6.
    out = model(tokens[[0, 1], [3, 6]][:, None], positions=np.array([[3], [6]]), cache=cache)
    np.testing.assert_allclose(out.hidden[:, 0], full[[0, 1], [3, 6]], atol=ATOL)


def test_init_cache_has_the_compute_dtype(build):
    cache = init_cache(build("gqa").config, 5, 7, ComputeConfig(dtype="bfloat16"))
    assert isinstance(cache, KVCache)
    assert cache.key.shape == cache.value.shape == (2, 5, 7, 2, 8)
    assert cache.key.dtype == jnp.bfloat16


def weighted_sum(model: Transformer, tokens, readout, **options):
    graphdef, params = nnx.split(model, nnx.Param)
    return jax.value_and_grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(tokens, **options).hidden * readout))(params)


@pytest.mark.parametrize("kind", ["gqa", "moe"])
def test_gradients_are_the_central_differences_of_the_oracle(build, to_numpy, numpy_forward, kind):
    model = build(kind)
    tokens = tokens_of(1, 5, seed=4)
    readout = np.random.default_rng(2).standard_normal((1, 5, 16)).astype(np.float32)
    _, grads = weighted_sum(model, tokens, readout)
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


@pytest.mark.parametrize("kind", ["gqa", "moe"])
@pytest.mark.parametrize("invariant", [False, True])
def test_remat_changes_no_gradient(build, kind, invariant):
    model, tokens = build(kind), tokens_of(2, 6)
    readout = np.random.default_rng(2).standard_normal((2, 6, 16)).astype(np.float32)
    compute = ComputeConfig(batch_invariant=invariant)
    kept_value, kept = weighted_sum(model, tokens, readout, compute=compute)
    again_value, again = weighted_sum(model, tokens, readout, compute=compute, remat=True)
    np.testing.assert_allclose(again_value, kept_value, rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5), again, kept)


@pytest.mark.parametrize("kind", ["gqa", "moe"])
def test_gradients_of_the_batch_invariant_form_are_those_of_the_plain_one(build, kind):
    model, tokens = build(kind), tokens_of(3, 7)
    readout = np.random.default_rng(2).standard_normal((3, 7, 16)).astype(np.float32)
    _, plain = weighted_sum(model, tokens, readout)
    _, tiled = weighted_sum(model, tokens, readout, compute=ComputeConfig(batch_invariant=True, row_tile=4))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5), tiled, plain)


def test_segments_with_a_cache_are_refused(build):
    model = build("dense")
    cache = init_cache(model.config, 1, 4, ComputeConfig())
    with pytest.raises(ValueError, match="segment_ids"):
        model(jnp.zeros((1, 4), jnp.int32), cache=cache, segment_ids=jnp.zeros((1, 4), jnp.int32))


def test_routing_jitter_without_seeds_is_refused(build):
    with pytest.raises(ValueError, match="routing_jitter=0.5 needs jitter_seeds"):
        build("moe")(jnp.zeros((1, 4), jnp.int32), compute=ComputeConfig(routing_jitter=0.5))
