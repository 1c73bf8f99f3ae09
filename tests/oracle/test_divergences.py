"""Divergences of sampled tokens, top-K lists and whole vocabularies against sums in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import divergences

from .batches import SCALES, close
from .reference import divergences as oracle

FLOAT32 = 4e-6  # a dozen float32 operations, each off by at most 2^-24 = 6e-8, some amplified by a logarithm
TINY = 1e-37  # below the smallest normal float32
DTYPES = [np.float32, jnp.bfloat16]


def logp_pairs(seed: int, scale: float, dtype, size: int = 200):
    """Pairs (log p, log q) below 0, from p = 1 - 1e-5 to e^-20, `scale` apart."""
    rng = np.random.default_rng(seed)
    q = -(10.0 ** rng.uniform(-5, 1.3, size))
    p = np.minimum(q + scale * rng.normal(size=size), q / 2)
    return np.asarray(jnp.asarray(p, dtype)), np.asarray(jnp.asarray(q, dtype))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_estimators(name, dtype):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=32) * s for s in (*SCALES, 1e-7)] + [[0.0, -200.0, 60.0, 80.0] * 2])
    x = np.minimum(x, 80.0)  # e^89 is no float32
    x = np.asarray(jnp.asarray(x, dtype))
    close(getattr(divergences, name)(x), oracle.each(getattr(oracle, name), x), relative=FLOAT32, absolute=TINY)


def test_estimators_at_zero_probability():
    """log rho = -inf (the policy gives it no probability): every divergence is infinite, never NaN."""
    for name in ("k1", "k2", "k3"):
        assert np.isposinf(getattr(divergences, name)(jnp.float32(-np.inf)))
    assert np.isposinf(divergences.k2(jnp.float32(np.inf)))


@pytest.mark.parametrize("scale", [1e-5, *SCALES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_divergences(scale, dtype):
    """1% relative where p and q are apart by 1e-5, as section 1 asks of a KL; far better once they differ."""
    p, q = logp_pairs(1, scale, dtype)
    kl, tv = oracle.each(oracle.binary_kl, p, q), oracle.each(oracle.binary_tv, p, q)
    close(divergences.binary_kl(p, q), kl, relative=1e-2 if scale < 1e-3 else 1e-4, absolute=1e-13)
    close(divergences.binary_tv(p, q), tv, relative=1e-2 if scale < 1e-3 else 1e-4, absolute=1e-13)


def test_binary_divergences_anywhere():
    """Any two probabilities between e^-30 and 1 - 1e-6, independent of each other."""
    rng = np.random.default_rng(10)
    for _ in range(20):
        p, q = (-(2.0 ** rng.uniform(-20, 4.9, (2, 200)))).astype(np.float32)
        close(divergences.binary_kl(p, q), oracle.each(oracle.binary_kl, p, q), relative=1e-3, absolute=1e-9)
        close(divergences.binary_tv(p, q), oracle.each(oracle.binary_tv, p, q), relative=1e-4, absolute=1e-9)


def test_binary_kl_is_not_symmetric():
    """p = .9, q = .5: .9 log 1.8 + .1 log .2 = .36806; the other way .5 log(5/9) + .5 log 5 = .51083."""
    p, q = np.log(np.float32([0.9])), np.log(np.float32([0.5]))
    close(divergences.binary_kl(p, q), [0.36806], relative=1e-4)
    close(divergences.binary_kl(q, p), [0.51083], relative=1e-4)


def test_binary_divergences_of_impossible_tokens():
    """p = 0: KL_B = log(1/(1-q)), TV = q. q = 0 < p: KL infinite, TV = p."""
    half, zero = np.log(np.float32([0.5])), np.float32([-np.inf])
    close(divergences.binary_kl(zero, half), [np.log(2.0)], relative=1e-6)
    assert np.isposinf(divergences.binary_kl(half, zero))[0]
    close(divergences.binary_tv(zero, half), [0.5], relative=1e-6)
    close(divergences.binary_tv(half, zero), [0.5], relative=1e-6)
    close(divergences.binary_kl(zero, zero), [0.0], relative=0)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_odds_displacement(scale, dtype):
    """The difference of two logits near 12 carries their float32 rounding, 12 * 6e-8 each, as an absolute error."""
    p, q = logp_pairs(2, scale, dtype)
    expected = oracle.each(oracle.log_odds_displacement, p, q)
    close(divergences.log_odds_displacement(p, q), expected, relative=1e-5, absolute=5e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_displacement_identity(scale):
    """k = p + (1-p) e^epsilon, in the oracle to float64 accuracy and in the package through both of its functions."""
    p, q = logp_pairs(3, scale, np.float32)
    displacement = oracle.each(oracle.log_odds_displacement, p, q)
    k = np.exp(p.astype(float) - q.astype(float))
    close(oracle.each(oracle.ratio_from_displacement, p, displacement), k, relative=1e-9)
    rounded = displacement.astype(np.float32)
    close(divergences.ratio_from_displacement(p, rounded), k, relative=1e-5, absolute=TINY)
    through = divergences.ratio_from_displacement(p, np.asarray(divergences.log_odds_displacement(p, q)))
    close(through, k, relative=3e-5, absolute=TINY)


def test_displacement_of_equal_log_probs_is_zero():
    p = np.float32([-1e-7, -0.3, -20.0, 0.0, -np.inf])
    close(divergences.log_odds_displacement(p, p), np.zeros(5), relative=0)


@pytest.mark.parametrize("scale", SCALES)
def test_topk(scale):
    rng = np.random.default_rng(4)
    q = rng.normal(size=(30, 12))
    p = q + scale * rng.normal(size=q.shape)
    q, p = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (q, p)]
    top = np.argsort(-q, -1)[:, :4]
    q4, p4 = [np.take_along_axis(x, top, -1).astype(np.float32) for x in (q, p)]
    got = divergences.topk_divergence(p4, q4)
    expected = np.array([oracle.topk(a, b) for a, b in zip(p4, q4, strict=True)])
    # The rest is 1 minus a float32 sum, off by 2e-7: its logarithm is known where the rest is large.
    known = np.minimum(1 - np.exp(p4).sum(-1), 1 - np.exp(q4).sum(-1)) > 1e-3
    assert known.any()
    close(np.asarray(got.kl_lower)[known], expected[known, 0], relative=1e-3, absolute=2e-7)
    close(got.tv_lower, expected[:, 1], relative=1e-5, absolute=2e-7)
    close(got.tv_upper, expected[:, 2], relative=1e-5, absolute=4e-7)
    full = np.array([oracle.vocab(a, b, 0) for a, b in zip(p, q, strict=True)])
    assert (np.asarray(got.kl_lower) <= full[:, 2] + 2e-7).all()
    assert (np.asarray(got.tv_lower) <= full[:, 3] + 2e-7).all()
    assert (np.asarray(got.tv_upper) >= full[:, 3] - 2e-7).all()


def test_topk_by_hand():
    """p = (.5, .2 | .3), q = (.4, .4 | .2): KL(q||p) = .4 log .8 + .4 log 2 + .2 log(2/3) = .106908;
    TV = (.1 + .2 + .1)/2 = .2; upper = .2 + min(.3, .2) = .4. Two lists that hold everything leave no rest."""
    got = divergences.topk_divergence(np.log(np.float32([0.5, 0.2])), np.log(np.float32([0.4, 0.4])))
    close([got.kl_lower, got.tv_lower, got.tv_upper], [0.106908, 0.2, 0.4], relative=1e-5)
    whole = divergences.topk_divergence(np.log(np.float32([0.5, 0.5])), np.log(np.float32([0.25, 0.75])))
    close(whole.tv_upper, 0.25, relative=1e-6)
    close(whole.tv_lower, 0.25, relative=1e-6)
