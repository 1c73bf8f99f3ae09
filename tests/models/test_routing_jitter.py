"""Noise on the router depends on the row's seed, the position and the layer, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from trm_jax.models import ComputeConfig, init_cache

NOISY = ComputeConfig(routing_jitter=2.0)
SEEDS = np.array([5, 77, 5], np.uint32)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    drawn = np.random.default_rng(0).integers(0, 13, (3, 8)).astype(np.int32)
    drawn[2] = drawn[0]
    return drawn


def test_equal_seeds_give_equal_noise_in_any_row_and_any_company(build, forward, tokens):
    model = build("moe")
    out = forward(model, tokens, compute=NOISY, jitter_seeds=SEEDS)
    np.testing.assert_array_equal(out.hidden[2], out.hidden[0])
    turned = forward(model, tokens[[1, 2, 0]], compute=NOISY, jitter_seeds=SEEDS[[1, 2, 0]])
    np.testing.assert_array_equal(turned.routed_experts[:, [2, 0, 1]], out.routed_experts)


def test_other_seeds_give_other_experts(build, forward, tokens):
    model = build("moe")
    first = forward(model, tokens, compute=NOISY, jitter_seeds=SEEDS)
    other = forward(model, tokens, compute=NOISY, jitter_seeds=SEEDS + np.uint32(1))
    plain = forward(model, tokens)
    for x in (other, plain):
        assert np.mean(np.sort(x.routed_experts) != np.sort(first.routed_experts)) > 0.1


def test_decode_sees_the_noise_of_the_full_forward(build, forward, tokens):
    model = build("moe")
    full = forward(model, tokens, compute=NOISY, jitter_seeds=SEEDS)
    cache = init_cache(model.config, 3, 8, NOISY)
    for at in range(4):
        positions = np.full((3, 1), at)
        out = forward(
            model, tokens[:, at : at + 1], positions=positions, cache=cache, compute=NOISY, jitter_seeds=SEEDS
        )
        cache = out.cache
        np.testing.assert_allclose(out.hidden[:, 0], full.hidden[:, at], atol=2e-5)
        np.testing.assert_array_equal(out.routed_experts[:, :, 0], full.routed_experts[:, :, at])


def test_positions_and_layers_draw_apart(build, forward):
    """One repeated token at one position in all rows, no attention to speak of: what differs is the noise."""
    model = build("moe")
    same = np.zeros((3, 8), np.int32)
    heavy = ComputeConfig(routing_jitter=1e4)  # the noise alone decides
    experts = np.sort(forward(model, same, compute=heavy, jitter_seeds=SEEDS).routed_experts)
    layers = [tuple(map(tuple, experts[layer, 0])) for layer in range(2)]
    assert layers[0] != layers[1]
    assert len(set(layers[0])) > 1  # positions
    assert tuple(map(tuple, experts[0, 1])) != layers[0]  # seeds


def test_noise_has_the_stated_size_and_no_favourite(build, forward):
    """With overwhelming Gaussian noise every pair of 4 experts is chosen with probability 1/6."""
    seeds = np.arange(600, dtype=np.uint32)
    out = forward(
        build("moe"), np.zeros((600, 1), np.int32), compute=ComputeConfig(routing_jitter=1e4), jitter_seeds=seeds
    )
    pairs = np.sort(out.routed_experts[0, :, 0])
    counts = np.unique(pairs[:, 0] * 4 + pairs[:, 1], return_counts=True)[1]
    assert len(counts) == 6
    # Chi-square with 5 degrees of freedom: above 20.5 with probability 0.001 (the seeds are fixed).
    assert ((counts - 100) ** 2 / 100).sum() < 20.5


@pytest.mark.slow
def test_a_small_jitter_flips_few_experts(build, forward):
    seeds = np.arange(600, dtype=np.uint32)
    tokens = np.tile(np.arange(12, dtype=np.int32), 50)[:, None]
    model = build("moe")
    plain = np.sort(forward(model, tokens).routed_experts[0])
    flips = [
        np.mean(
            np.sort(
                forward(model, tokens, compute=ComputeConfig(routing_jitter=s), jitter_seeds=seeds).routed_experts[0]
            )
            != plain
        )
        for s in (1e-6, 0.3, 1e4)
    ]
    assert flips[0] == 0
    assert 0 < flips[1] < flips[2]
