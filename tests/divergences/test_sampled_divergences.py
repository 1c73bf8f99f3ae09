"""Estimators, Bernoulli divergences, displacement and top-K bounds against float64 numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import divergences


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_estimators_by_hand() -> None:
    # ρ = 1.5: k1 = -ln 1.5 = -0.405465, k2 = 0.405465²/2 = 0.0822010, k3 = 1.5 - 1 - 0.405465 = 0.094535
    log_ratio = jnp.log(jnp.float32(1.5))
    np.testing.assert_allclose(divergences.k1(log_ratio), -0.405465, rtol=1e-5)
    np.testing.assert_allclose(divergences.k2(log_ratio), 0.0822010, rtol=1e-5)
    np.testing.assert_allclose(divergences.k3(log_ratio), 0.094535, rtol=1e-5)


def test_expectations_of_k1_and_k3_are_the_kl() -> None:
    rng = np.random.default_rng(0)
    q, p = softmax(rng.normal(size=20)), softmax(rng.normal(size=20))
    kl = np.sum(q * np.log(q / p))
    log_ratio = np.log(p / q)
    np.testing.assert_allclose(np.sum(q * np.asarray(divergences.k1(log_ratio), float)), kl, rtol=1e-5)
    np.testing.assert_allclose(np.sum(q * np.asarray(divergences.k3(log_ratio), float)), kl, rtol=1e-5)


@pytest.mark.parametrize("delta", [1e-6, 1e-4, 1e-2, 0.3, 1.0])
def test_k3_keeps_digits_near_zero(delta: float) -> None:
    d = float(np.float32(delta))
    expected = d**2 / 2 + d**3 / 6 + d**4 / 24 if d < 0.05 else np.expm1(d) - d
    np.testing.assert_allclose(divergences.k3(jnp.float32(delta)), expected, rtol=3e-6)
    np.testing.assert_allclose(jax.grad(divergences.k3)(jnp.float32(delta)), np.expm1(d), rtol=1e-5)


def test_estimators_at_infinities() -> None:
    for fn in (divergences.k2, divergences.k3):
        np.testing.assert_array_equal(fn(jnp.array([jnp.inf, -jnp.inf])), [np.inf, np.inf])
        assert jnp.isnan(fn(jnp.float32(np.nan)))


def bernoulli_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def test_binary_divergences_on_a_grid() -> None:
    grid = np.array([1e-6, 1e-3, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
    logp, logq = (np.log(x).astype(np.float32) for x in np.meshgrid(grid, grid))
    p, q = np.exp(logp.astype(float)), np.exp(logq.astype(float))
    # 2e-5: log-probs near 0.01 carry 6e-8 absolute, which KL magnifies by its slope.
    np.testing.assert_allclose(divergences.binary_kl(logp, logq), bernoulli_kl(p, q), rtol=2e-5, atol=1e-9)
    np.testing.assert_allclose(divergences.binary_tv(logp, logq), np.abs(p - q), rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("p", [1e-4, 0.2, 0.9, 0.999])
@pytest.mark.parametrize("shift", [1e-4, -1e-4, 1e-2])
def test_binary_kl_of_close_policies_keeps_its_digits(p: float, shift: float) -> None:
    logp = np.float32(np.log(p))
    logq = np.float32(min(float(logp) + shift * (1 - p), 0.0))
    p64, q64 = np.exp(float(logp)), np.exp(float(logq))
    d1, d2 = np.log(q64 / p64), np.log1p((p64 - q64) / (1 - p64))
    expected = p64 * (np.expm1(d1) - d1) + (1 - p64) * (np.expm1(d2) - d2)
    np.testing.assert_allclose(divergences.binary_kl(logp, logq), expected, rtol=1e-3)


def test_binary_kl_is_finite_at_saturation() -> None:
    zero = jnp.float32(0.0)
    assert divergences.binary_kl(zero, zero) == 0
    assert divergences.binary_tv(zero, zero) == 0
    near = divergences.binary_kl(jnp.float32(-1e-7), zero)
    assert 0 <= near < 1e-6
    # q rounded to 1 against p = 1/2: large, so that a threshold of 2 drops it, and finite.
    assert 2.0 < divergences.binary_kl(jnp.log(jnp.float32(0.5)), zero) < 10.0


def test_binary_kl_at_zero_probability() -> None:
    half = jnp.log(jnp.float32(0.5))
    none = jnp.float32(-np.inf)
    np.testing.assert_allclose(divergences.binary_kl(none, half), np.log(2.0), rtol=1e-6)  # (1-0) log(1/(1-½))
    assert divergences.binary_kl(half, none) == np.inf
    assert divergences.binary_kl(none, none) == 0
    np.testing.assert_allclose(divergences.binary_tv(none, half), 0.5)
    assert jnp.isnan(divergences.binary_kl(half, jnp.float32(np.nan)))
    assert jnp.isnan(divergences.binary_tv(jnp.float32(np.nan), half))


def test_bfloat16_log_probs_are_widened_before_the_complement() -> None:
    # -0.001 in bfloat16 is -0.00099945; p itself would round to 1.0, 1 - p must be 9.9895e-4, not 0.
    logp = jnp.asarray(-0.001, jnp.bfloat16)
    expected = -np.expm1(float(logp))
    np.testing.assert_allclose(divergences.binary_tv(logp, jnp.asarray(0.0, jnp.bfloat16)), expected, rtol=1e-5)
    assert 9.9e-4 < expected < 1.0e-3


def test_binary_divergences_are_lower_bounds_of_the_full_ones() -> None:
    rng = np.random.default_rng(1)
    p, q = softmax(rng.normal(size=(50, 10))), softmax(rng.normal(size=(50, 10)))
    kl, tv = np.sum(q * np.log(q / p), -1), 0.5 * np.abs(p - q).sum(-1)
    for v in range(10):
        assert np.all(divergences.binary_kl(np.log(q[:, v]), np.log(p[:, v])) <= kl + 1e-6)
        assert np.all(divergences.binary_tv(np.log(q[:, v]), np.log(p[:, v])) <= tv + 1e-6)


def test_displacement_identity_and_oracle() -> None:
    rng = np.random.default_rng(2)
    p, q = rng.uniform(0.01, 0.99, size=(2, 200))
    logp, logq = np.log(p), np.log(q)
    displacement = divergences.log_odds_displacement(logp, logq)
    np.testing.assert_allclose(displacement, np.log(p / (1 - p)) - np.log(q / (1 - q)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(divergences.ratio_from_displacement(logp, displacement), p / q, rtol=1e-5)


@pytest.mark.parametrize("shift", [1e-5, -1e-5])
def test_displacement_of_close_policies_keeps_its_digits(shift: float) -> None:
    logp = np.float32(-1e-3)
    logq = np.float32(-1e-3 + shift)
    p, q = np.float64(logp), np.float64(logq)
    expected = (p - np.log(-np.expm1(p))) - (q - np.log(-np.expm1(q)))
    np.testing.assert_allclose(divergences.log_odds_displacement(logp, logq), expected, rtol=1e-4)


def test_displacement_at_the_edges() -> None:
    one, half, none = jnp.float32(0.0), jnp.log(jnp.float32(0.5)), jnp.float32(-np.inf)
    pairs = [(one, one), (one, half), (half, one), (none, half), (half, none)]
    for (p, q), expected in zip(pairs, [0.0, np.inf, -np.inf, -np.inf, np.inf], strict=True):
        assert divergences.log_odds_displacement(p, q) == expected
    assert jnp.isnan(divergences.log_odds_displacement(half, jnp.float32(np.nan)))


def test_displacement_from_logit_perturbations() -> None:
    # ε = δ_y - log Σ_{j≠y} w_j e^{δ_j}, w_j the renormalised rollout probabilities of the other tokens: exact.
    rng = np.random.default_rng(3)
    z, delta = rng.normal(size=8), 0.3 * rng.normal(size=8)
    q, p = softmax(z), softmax(z + delta)
    for y in range(8):
        others = np.arange(8) != y
        expected = delta[y] - np.log(np.sum(q[others] / q[others].sum() * np.exp(delta[others])))
        got = divergences.log_odds_displacement(np.log(p[y : y + 1]), np.log(q[y : y + 1]))
        np.testing.assert_allclose(got, [expected], rtol=1e-4, atol=1e-6)


def test_topk_bounds_enclose_the_full_divergences() -> None:
    rng = np.random.default_rng(4)
    p, q = softmax(2 * rng.normal(size=(100, 30))), softmax(2 * rng.normal(size=(100, 30)))
    kl, tv = np.sum(q * np.log(q / p), -1), 0.5 * np.abs(p - q).sum(-1)
    order = np.argsort(-q, axis=-1)
    previous = np.zeros(100)
    bounds = jax.jit(divergences.topk_divergence)
    for k in (1, 5, 30):
        top = order[:, :k]
        out = bounds(*(np.log(np.take_along_axis(x, top, -1)) for x in (p, q)))
        rest_p, rest_q = (1 - np.take_along_axis(x, top, -1).sum(-1) for x in (p, q))
        assert np.all(out.kl_lower <= kl + 1e-4)
        assert np.all(np.asarray(out.kl_lower) >= previous - 1e-4), "more tokens can only tighten the bound"
        assert np.all(out.tv_lower <= tv + 1e-5)
        assert np.all(out.tv_upper >= tv - 1e-5)
        np.testing.assert_allclose(out.tv_upper - out.tv_lower, np.minimum(rest_p, rest_q), atol=1e-5)
        previous = np.asarray(out.kl_lower)
        if k == 1:  # one token and the rest: the binary divergence, which a bound without the rest falls short of
            logp, logq = (np.log(np.take_along_axis(x, top, -1))[:, 0] for x in (p, q))
            np.testing.assert_allclose(out.kl_lower, divergences.binary_kl(logq, logp), rtol=1e-3, atol=1e-6)
    # All 30 tokens: nothing is merged, and rests that are rounding noise must not count.
    np.testing.assert_allclose(out.kl_lower, kl, rtol=1e-4)
    np.testing.assert_allclose(out.tv_lower, tv, rtol=1e-5)


def test_topk_of_equal_policies_is_zero_and_padding_is_ignored() -> None:
    logp = jnp.log(jnp.array([0.6, 0.3, 0.1]))
    out = divergences.topk_divergence(logp, logp)
    assert out.kl_lower == 0
    assert out.tv_lower == 0
    padded = jnp.append(logp[:2], -jnp.inf)
    other = jnp.log(jnp.array([0.5, 0.4]))
    with_pad = divergences.topk_divergence(padded, jnp.append(other, -jnp.inf))
    without = divergences.topk_divergence(logp[:2], other)
    for a, b in zip(with_pad, without, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.usefixtures("without_run_time_types")
def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"must have one shape, given logp \[2\], logq \[3\]"):
        divergences.binary_kl(jnp.zeros(2), jnp.zeros(3))
