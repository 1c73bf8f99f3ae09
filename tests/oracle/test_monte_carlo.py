"""Estimators on 100,000 samples of a tabular pair against enumeration: within 4.5 standard errors (1 in 150,000)."""

import functools
import math

import jax
import numpy as np
import pytest

from trm_jax import bounds, correction, divergences, losses

from .reference import masks, weights
from .reference.tabular import Pair, random_tables, sample

SIZE = 100_000
WITHIN = 4.5


@functools.cache
def world(mismatch):
    """A pair, and a sample of it as float32 log-probs `[SIZE, T]`."""
    exact = Pair(*random_tables(21, 3, 4, mismatch))
    rows = sample(exact, SIZE, np.random.default_rng(22))
    logs = {
        y: ([math.log(exact.p[y[:t]][y[t]]) for t in range(4)], [math.log(exact.q[y[:t]][y[t]]) for t in range(4)])
        for y in exact.sequences
    }
    policy, rollout = [np.array([logs[y][side] for y in rows], np.float32) for side in (0, 1)]
    rewards = np.array([exact.rewards[y] for y in rows], np.float32)
    kl = {y: [exact.token_kl(y[:t]) for t in range(4)] for y in exact.sequences}
    return exact, policy, rollout, rewards, np.array([kl[y] for y in rows], np.float32)


def agree(values, expected):
    """The mean of one value a sample, within its own standard error (and float32 rounding)."""
    values = np.asarray(values, np.float64)
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - expected) <= WITHIN * error + 1e-6 * abs(expected), (values.mean(), expected, error)


def logs_of(exact, y):
    return [math.log(r) for r in exact.ratios(y)]


@pytest.mark.parametrize("mismatch", [0.05, 0.5])
def test_divergence_estimators_are_unbiased(mismatch):
    exact, policy, rollout, _, kl = world(mismatch)
    log_ratio = policy - rollout
    for name in ("k1", "k3"):
        agree(np.asarray(getattr(divergences, name)(log_ratio)).sum(1), exact.sequence_kl)
    agree(
        np.asarray(divergences.k2(log_ratio)).sum(1),
        exact.rollout_mean(lambda y: sum(x * x / 2 for x in logs_of(exact, y))),
    )
    agree(kl.sum(1), exact.sequence_kl)


@pytest.mark.parametrize("mismatch", [0.05, 0.5])
def test_weights(mismatch):
    """Exact weights are unbiased, by token and as a product with the reward; truncated ones have the oracle's mean."""
    exact, policy, rollout, rewards, _ = world(mismatch)
    log_ratio, mask = policy - rollout, np.ones(policy.shape, bool)
    k = np.asarray(correction.exact_weights(log_ratio, mask), np.float64)
    for t in range(4):
        agree(k[:, t], 1.0)
    agree(k.prod(1) * rewards - rewards, exact.improvement)
    for function, oracle in (
        (correction.truncated_weights, functools.partial(weights.tis, cap=1.1)),
        (correction.sequence_truncated_weights, functools.partial(weights.seq_tis, cap=1.1)),
        (correction.sequence_masked_weights, functools.partial(weights.seq_mis, cap=1.1)),
    ):
        got = np.asarray(function(log_ratio, mask, cap=1.1)).sum(1)
        agree(got, exact.rollout_mean(lambda y, oracle=oracle: sum(oracle(logs_of(exact, y)))))
    cis = correction.calibrated_weights(policy, rollout, mask, cis_lambda=0.2)
    agree(
        np.asarray(cis).sum(1),
        exact.rollout_mean(
            lambda y: sum(
                weights.cis(
                    [math.log(exact.p[y[:t]][y[t]]) for t in range(4)],
                    [math.log(exact.q[y[:t]][y[t]]) for t in range(4)],
                    cis_lambda=0.2,
                )
            )
        ),
    )


@pytest.mark.parametrize("mismatch", [0.05, 0.5])
def test_masked_surrogate_and_its_gradient(mismatch):
    """L_masked = E[M R sum rho], over all samples; its gradient in the log-probs adds up to it (d rho = rho d log)."""
    exact, policy, rollout, rewards, kl = world(mismatch)
    threshold = float(np.median(kl.max(1)))
    keep = np.asarray(correction.max_kl_mask(kl, np.ones(kl.shape, bool), threshold=threshold))
    kept = lambda y: masks.trm_max([float(np.float32(exact.token_kl(y[:t]))) for t in range(4)], threshold=threshold)  # noqa: E731
    agree(keep, exact.rollout_mean(kept))
    expected = exact.rollout_mean(lambda y: kept(y) * exact.rewards[y] * sum(exact.ratios(y)))
    per_row = keep * rewards * np.exp(policy.astype(float) - rollout).sum(1)
    agree(per_row, expected)

    def loss(policy):
        return losses.masked_surrogate(policy, rollout, rewards, np.ones(policy.shape, bool), keep).value

    value, gradient = jax.value_and_grad(loss)(policy)
    error = per_row.std() / math.sqrt(SIZE)
    assert abs(-float(value) - expected) <= WITHIN * error + 1e-5
    assert abs(-float(np.asarray(gradient, np.float64).sum()) - expected) <= WITHIN * error + 1e-5


def test_a_tabular_pair_samples_its_rollout_policy():
    """Frequencies of all sequences, the sampled rewards and divergences of `TabularPair.sample`."""
    rollout, policy, rewards = random_tables(23, 3, 3, 0.4)
    exact = Pair(rollout, policy, rewards)
    drawn = bounds.TabularPair(rollout=rollout, policy=policy, rewards=rewards).sample(SIZE, seed=24)
    rows = [tuple(r) for r in np.asarray(drawn.tokens).tolist()]
    for y in exact.sequences:
        p = exact.probability(exact.q, y)
        assert abs(rows.count(y) - SIZE * p) <= WITHIN * math.sqrt(SIZE * p * (1 - p))
    for i in range(50):
        y = rows[i]
        np.testing.assert_allclose(drawn.log_ratio[i], logs_of(exact, y), atol=1e-12)
        np.testing.assert_allclose(drawn.rewards[i], exact.rewards[y])
        np.testing.assert_allclose(drawn.token_kl[i], [exact.token_kl(y[:t]) for t in range(3)], atol=1e-12)
        np.testing.assert_allclose(drawn.token_tv[i], [exact.token_tv(y[:t]) for t in range(3)], atol=1e-12)
