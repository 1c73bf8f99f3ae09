"""Drawing tokens: the nucleus by hand, the support's bits, and distributions by chi-square over fixed seeds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from trm_jax.models import ComputeConfig
from trm_jax.rollout import RowSampling, SamplingConfig, pack_support, row_support, sample_rows

P = np.array([0.5, 0.3, 0.2])


def row(p) -> jax.Array:
    return jnp.log(jnp.asarray(p, jnp.float32))[None]


def nucleus(logps, top_p):
    return row_support(logps, RowSampling.of(SamplingConfig(top_p=top_p), len(logps)))


def kept_of(support, size) -> np.ndarray:
    return np.unpackbits(np.asarray(support), axis=1, count=size, bitorder="little")


@pytest.mark.parametrize(
    ("p", "top_p", "kept"),
    [
        # The smallest set that reaches the mass: .5 < .8 needs .3 too, .5 + .3 reaches .8.
        (P, 0.8, [1, 1, 0]),
        (P, 0.79, [1, 1, 0]),
        (P, 0.81, [1, 1, 1]),
        (P, 0.5, [1, 0, 0]),
        (P, 0.51, [1, 1, 0]),
        (P, 1e-6, [1, 0, 0]),  # never empty
        (P, 1.0, [1, 1, 1]),
        ([0.2, 0.5, 0.3], 0.6, [0, 1, 1]),  # any order
        ([0.25, 0.25, 0.25, 0.25], 0.5, [1, 1, 0, 0]),  # ties: lower ids first
        ([0.0, 1.0, 0.0], 0.9, [0, 1, 0]),  # -inf log-probs
    ],
)
def test_nucleus_by_hand(p, top_p, kept):
    assert np.asarray(nucleus(row(p), top_p))[0].astype(int).tolist() == kept


def test_rows_have_their_own_nucleus():
    kept = nucleus(jnp.concatenate([row(P), row([0.05, 0.05, 0.9])]), 0.8)
    assert np.asarray(kept).astype(int).tolist() == [[1, 1, 0], [0, 0, 1]]


def test_support_bits_by_hand():
    # Tokens 0, 3 and 9 of 11: byte 0 is 1 + 8 = 9, byte 1 is 2.
    kept = jnp.zeros((2, 11), bool).at[0, jnp.array([0, 3, 9])].set(True)
    bits = pack_support(kept)
    assert bits.dtype == jnp.uint8
    assert bits.tolist() == [[9, 2], [0, 0]]


def draw(p, sampling, seeds, step=0):
    n = len(seeds)
    logps = jnp.broadcast_to(row(p), (n, len(p)))
    rows = RowSampling.of(sampling, n)
    token, logp, support = jax.jit(lambda s: sample_rows(logps, s, jnp.full((n,), step), rows))(
        jnp.asarray(seeds, jnp.uint32)
    )
    return token, logp, kept_of(support, len(p))


@pytest.mark.parametrize("step", [0, 5])
def test_frequencies_over_seeds_are_the_probabilities(step):
    p = np.array([0.4, 0.05, 0.25, 0.2, 0.1])
    token, logp, kept = draw(p, SamplingConfig(), np.arange(4000), step)
    counts = np.bincount(np.asarray(token), minlength=5)
    assert stats.chisquare(counts, 4000 * p).pvalue > 1e-3  # the seeds are fixed
    np.testing.assert_allclose(logp, np.log(p)[np.asarray(token)], rtol=1e-6)
    assert kept.all()


def test_a_nucleus_is_renormalised_and_nothing_else_is_drawn():
    token, logp, kept = draw(P, SamplingConfig(top_p=0.75), np.arange(4000))
    counts = np.bincount(np.asarray(token), minlength=3)
    assert counts[2] == 0
    assert stats.chisquare(counts[:2], [2500.0, 1500.0]).pvalue > 1e-3  # .5 / .8 and .3 / .8 of 4,000
    np.testing.assert_allclose(np.exp(logp), np.array([0.625, 0.375])[np.asarray(token)], rtol=1e-6)
    assert kept.tolist() == [[1, 1, 0]] * 4000


def test_steps_of_one_seed_are_independent():
    p = np.full(4, 0.25)
    first, *_ = draw(p, SamplingConfig(), np.arange(3200), 0)
    second, *_ = draw(p, SamplingConfig(), np.arange(3200), 1)
    pairs = np.bincount(np.asarray(first) * 4 + np.asarray(second), minlength=16)
    assert stats.chisquare(pairs).pvalue > 1e-3


def test_a_row_draws_the_same_wherever_it_stands():
    logps = jnp.log(jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(9), 7), jnp.float32))
    seeds, steps = jnp.arange(7, dtype=jnp.uint32), jnp.arange(7)
    order = np.array([3, 6, 0, 1, 5, 4, 2])
    for compute in (ComputeConfig(), ComputeConfig(batch_invariant=True, row_tile=2)):
        rows = RowSampling.of(SamplingConfig(top_p=0.9), 7)
        run = jax.jit(functools.partial(sample_rows, rows=rows, compute=compute))
        token, logp, kept = run(logps, seeds, steps)
        turned = run(logps[order], seeds[order], steps[order])
        for x, y in zip((token, logp, kept), turned, strict=True):
            np.testing.assert_array_equal(np.asarray(x)[order], y)


def test_greedy_ignores_seed_and_nucleus():
    token, logp, kept = draw([0.2, 0.5, 0.3], SamplingConfig(greedy=True, top_p=0.1, temperature=9.0), np.arange(20))
    assert np.asarray(token).tolist() == [1] * 20
    assert np.asarray(logp).tolist() == [0.0] * 20
    assert kept.all()


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(temperature=0.5), SamplingConfig(temperature=1.5, top_p=0.6)]
)
def test_first_tokens_of_an_engine_follow_the_softmax(tools, sampling):
    """2,048 seeds of one prompt; the law is a float64 softmax of a full forward pass."""
    engine = tools.engine(slots=512, decode_chunk=1, prefill_rows=1, max_response_length=1)
    prompts = jax.tree.map(lambda x: jnp.repeat(x[:1], 2048, axis=0), tools.prompts(1, seed=3))
    seeds = jnp.arange(2048, dtype=jnp.uint32)
    found = engine.generate(
        type(prompts)(tokens=prompts.tokens, mask=prompts.mask, group_ids=prompts.group_ids, seeds=seeds), sampling
    )
    one = jax.tree.map(lambda x: x[:1], found)
    hidden = tools.teacher_forced(tools.model(), one)[0, 0]
    p = np.exp(tools.log_softmax64(hidden, tools.model().head(), sampling.temperature))
    order = np.argsort(-p)
    kept = order[: 1 + int(np.sum(np.cumsum(p[order])[:-1] < sampling.top_p))]
    law = np.zeros(13)
    law[kept] = p[kept] / p[kept].sum()
    tokens = np.asarray(found.response_tokens)[:, 0]
    counts = np.bincount(tokens, minlength=13)
    assert counts[law == 0].sum() == 0
    assert stats.chisquare(counts[law > 0], 2048 * law[law > 0]).pvalue > 1e-3
    np.testing.assert_allclose(found.rollout_logps[:, 0], np.log(law[tokens]), atol=1e-4)
