"""Routing replay: the experts that another engine chose, with the weights of this model's own router."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import ComputeConfig, init_cache

ATOL = 2e-5  # as in test_transformer: two layers of width 16 in float32
TOKENS = np.random.default_rng(0).integers(0, 13, (3, 9)).astype(np.int32)


def drawn_routes(seed: int = 1) -> np.ndarray:
    """``[2, 3, 9, 2]``: two different experts of four, at random."""
    return np.argsort(np.random.default_rng(seed).random((2, 3, 9, 4)), axis=-1)[..., :2].astype(np.int32)


def test_forced_experts_run_with_the_routers_own_weights(build, forward, to_numpy, numpy_forward):
    model, routes = build("moe"), drawn_routes()
    for experts in ("dense", "blocked"):
        out = forward(model, TOKENS, routed_experts=routes, compute=ComputeConfig(experts=experts))
        np.testing.assert_array_equal(out.routed_experts, routes)
        for b in range(3):
            expected, _, _ = numpy_forward(to_numpy(model), model.config, TOKENS[b], routes[:, b])
            np.testing.assert_allclose(out.hidden[b], expected, atol=ATOL)
    free = forward(model, TOKENS)
    assert np.abs(out.hidden - free.hidden).max() > 0.1  # another choice is another function


def test_replaying_ones_own_choice_changes_nothing(build, forward):
    model = build("moe")
    free = forward(model, TOKENS)
    again = forward(model, TOKENS, routed_experts=free.routed_experts)
    np.testing.assert_allclose(again.hidden, free.hidden, atol=ATOL)
    np.testing.assert_allclose(again.router_margins, free.router_margins, atol=ATOL)


def test_tokens_without_a_record_choose_for_themselves(build, forward, to_numpy, numpy_forward):
    model, routes = build("moe"), drawn_routes()
    unknown = np.random.default_rng(2).random((3, 9)) < 0.5
    partial = np.where(unknown[None, :, :, None], -1, routes)
    out = forward(model, TOKENS, routed_experts=partial)
    used = np.asarray(out.routed_experts)
    assert (used >= 0).all()
    np.testing.assert_array_equal(used[:, ~unknown], routes[:, ~unknown])
    assert np.any(np.sort(used[:, unknown]) != np.sort(routes[:, unknown]))
    for b in range(3):
        expected, _, _ = numpy_forward(to_numpy(model), model.config, TOKENS[b], used[:, b])
        np.testing.assert_allclose(out.hidden[b], expected, atol=ATOL)
    nothing = forward(model, TOKENS, routed_experts=np.full_like(routes, -1))
    np.testing.assert_array_equal(nothing.routed_experts, forward(model, TOKENS).routed_experts)


def test_replay_removes_the_mismatch_that_flipped_experts_make(build, forward):
    """A rollout side whose router is disturbed, token by token, and a training side that replays what it chose."""
    model = build("moe")
    tokens = np.random.default_rng(5).integers(0, 13, (32, 12)).astype(np.int32)
    noisy = ComputeConfig(routing_jitter=0.3)
    rollout = forward(model, tokens, compute=noisy, jitter_seeds=np.arange(32, dtype=np.uint32))
    free = forward(model, tokens)
    replayed = forward(model, tokens, routed_experts=rollout.routed_experts)
    flipped = np.mean(np.sort(free.routed_experts) != np.sort(rollout.routed_experts))
    assert flipped > 0.1
    np.testing.assert_array_equal(replayed.routed_experts, rollout.routed_experts)

    def worst(x):
        return float(np.quantile(np.abs(x.hidden - rollout.hidden).max(axis=-1), 0.99))

    # What stays is the jitter inside the weights, 0.3 logits at most on each of two experts.
    assert worst(replayed) < 0.6 * worst(free)


@pytest.mark.slow
def test_a_rollout_in_bfloat16_is_replayed_step_by_step_and_at_once(build, forward):
    model, compute = build("moe"), ComputeConfig(dtype="bfloat16")
    cache, routes = init_cache(model.config, 3, 9, compute), []
    for at in range(9):
        out = forward(model, TOKENS[:, at : at + 1], positions=np.full((3, 1), at), cache=cache, compute=compute)
        cache = out.cache
        routes.append(out.routed_experts)
    routes = np.concatenate(routes, axis=2)
    at_once = forward(model, TOKENS, routed_experts=routes)
    np.testing.assert_array_equal(at_once.routed_experts, routes)
    cache = init_cache(model.config, 3, 9, ComputeConfig())
    for at in range(9):
        out = forward(
            model,
            TOKENS[:, at : at + 1],
            positions=np.full((3, 1), at),
            cache=cache,
            routed_experts=routes[:, :, at : at + 1],
        )
        cache = out.cache
        np.testing.assert_allclose(out.hidden[:, 0], at_once.hidden[:, at], atol=ATOL)


@pytest.mark.slow
def test_the_router_still_learns(build, quick_jit):
    model, routes = build("moe"), drawn_routes()

    def loss(router):
        changed = copy.deepcopy(model)
        changed.blocks.router.set_value(router)
        return jnp.sum(changed(TOKENS, routed_experts=routes).hidden ** 3)

    router = model.blocks.router.get_value()
    grad = quick_jit(jax.grad(loss))(router)
    direction = jnp.asarray(np.random.default_rng(0).standard_normal(router.shape), jnp.float32)
    step = 1e-3
    slope = (quick_jit(loss)(router + step * direction) - quick_jit(loss)(router - step * direction)) / (2 * step)
    assert abs(float(slope)) > 1
    # float32 differences of a sum of order 1e3, over 2e-3: good to about a hundredth.
    np.testing.assert_allclose(jnp.vdot(grad, direction), slope, rtol=2e-2)


def test_routes_of_another_shape_are_refused(build):
    model = build("moe")
    with pytest.raises(ValueError, match=r"routed_experts has shape \(2, 3, 9, 1\).*need \(2, 3, 9, 2\)"):
        model(TOKENS, routed_experts=drawn_routes()[..., :1])
    with pytest.raises(ValueError, match=r"need \(0, 3, 9, 2\)"):
        build("dense")(TOKENS, routed_experts=drawn_routes())


def test_margins_are_those_of_the_oracle(build, forward, to_numpy, numpy_forward):
    model = build("moe")
    out = forward(model, TOKENS)
    assert out.router_margins.shape == (2, 3, 9)
    smallest = min(numpy_forward(to_numpy(model), model.config, row)[2] for row in TOKENS)
    np.testing.assert_allclose(out.router_margins.min(), smallest, atol=ATOL)
    assert forward(build("dense"), TOKENS).router_margins is None
    tiled = forward(model, TOKENS, compute=ComputeConfig(batch_invariant=True))
    np.testing.assert_allclose(tiled.router_margins, out.router_margins, atol=ATOL)


def test_output_is_a_pytree_with_all_its_parts(build, forward):
    model = build("moe")
    out = forward(model, TOKENS, layer_states=True)
    assert jax.tree.map(jnp.shape, out).layer_states == (2, 3, 9, 16)
    np.testing.assert_allclose(out.layer_states[0], np.asarray(model.embedding.get_value())[TOKENS], atol=1e-7)
    assert nnx.state(model, nnx.Param)  # the model itself is untouched
