"""Sampling with options of its own for every row, against float64 sets and against the one-distribution sampler."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.rollout import RowSampling, SamplingConfig, row_support, sample_rows


def rows(count: int, **options) -> RowSampling:
    default = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "greedy": False}
    kinds = {"temperature": jnp.float32, "top_p": jnp.float32, "top_k": jnp.int32, "min_p": jnp.float32, "greedy": bool}
    values = default | options
    return RowSampling(**{name: jnp.broadcast_to(jnp.asarray(values[name], kinds[name]), count) for name in kinds})


def log_probs(count: int, size: int, seed: int = 0) -> np.ndarray:
    logits = 2.5 * np.random.default_rng(seed).standard_normal((count, size))
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


def kept64(logps: np.ndarray, top_p: float, top_k: int, min_p: float) -> set[int]:
    """The definition, token by token, in float64: min-p, then top-k, then the nucleus of what is left."""
    p = np.exp(logps.astype(np.float64))
    order = sorted(range(len(p)), key=lambda v: (-logps[v], v))
    left = [v for v in order if p[v] >= min_p * p[order[0]]][: top_k or None]
    total, mass, kept = sum(p[v] for v in left), 0.0, set()
    for v in left:
        kept.add(v)
        mass += p[v]
        if mass >= top_p * total:
            break
    return kept


@pytest.mark.parametrize("seed", range(3))
def test_the_support_is_the_one_of_the_definition(seed):
    options = [
        (1.0, 0, 0.0),
        (0.8, 0, 0.0),
        (0.5, 3, 0.0),
        (1.0, 5, 0.0),
        (1.0, 0, 0.2),
        (0.7, 4, 0.05),
        (1e-6, 0, 0.0),
    ]
    logps = log_probs(len(options), 23, seed)
    p, k, m = (np.array(column) for column in zip(*options, strict=True))
    found = np.asarray(row_support(jnp.asarray(logps), rows(len(options), top_p=p, top_k=k, min_p=m)))
    for row, option in enumerate(options):
        assert set(np.flatnonzero(found[row])) == kept64(logps[row], *option), option
    assert found[0].all()
    assert found[-1].sum() == 1


@pytest.mark.slow
def test_a_batch_of_different_rows_is_drawn_as_each_row_alone():
    configs = [
        SamplingConfig(),
        SamplingConfig(top_p=0.6),
        SamplingConfig(temperature=0.5),
        SamplingConfig(temperature=2.0, top_p=0.8),
        SamplingConfig(greedy=True),
    ]
    logps, seeds = log_probs(len(configs), 29, 3), jnp.arange(40, 45, dtype=jnp.uint32)
    mixed = rows(
        len(configs),
        temperature=[c.temperature for c in configs],
        top_p=[c.top_p for c in configs],
        greedy=[c.greedy for c in configs],
    )
    scaled = logps.astype(np.float64) / np.array([c.temperature for c in configs])[:, None]
    scaled = jnp.asarray(scaled - np.log(np.exp(scaled).sum(1, keepdims=True)), jnp.float32)
    drawn = set()
    for step in range(6):
        steps = jnp.full(len(configs), step)
        token, logp, support = sample_rows(scaled, seeds, steps, mixed)
        for row, config in enumerate(configs):
            one = slice(row, row + 1)
            expected = sample_rows(scaled[one], seeds[one], steps[one], RowSampling.of(config, 1))
            for found, alone in zip((token, logp, support), expected, strict=True):
                np.testing.assert_array_equal(found[row], alone[0])
            drawn.add((row, int(token[row])))
    assert len(drawn) > len(configs)  # the draws differ from step to step


def test_a_row_at_temperature_one_has_the_given_log_prob_to_the_bit():
    logps = jnp.asarray(log_probs(8, 13, 9))
    token, logp, _ = sample_rows(logps, jnp.arange(8, dtype=jnp.uint32), jnp.zeros(8, int), rows(8))
    np.testing.assert_array_equal(logp, np.take_along_axis(np.asarray(logps), np.asarray(token)[:, None], 1)[:, 0])


def test_a_nan_is_not_hidden():
    logps = jnp.full((2, 5), jnp.nan)
    for greedy in (False, True):
        _, logp, _ = sample_rows(logps, jnp.arange(2, dtype=jnp.uint32), jnp.zeros(2, int), rows(2, greedy=greedy))
        assert np.isnan(logp).all()
