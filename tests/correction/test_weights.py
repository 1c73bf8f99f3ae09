"""Each weight against float64 formulas, by hand, and at its edges."""

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import correction

B, T = 6, 8


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logp = -rng.gamma(0.5, 1.0, size=(B, T))
    logq = np.minimum(logp + 0.8 * rng.normal(size=(B, T)), -1e-4)
    mask = rng.random((B, T)) < 0.8
    logp[~mask], logq[~mask] = np.nan, -np.inf
    return logp, logq, mask


def bernoulli_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def token_oracle(name: str, logp: float, logq: float) -> float:
    k, p, q = math.exp(logp - logq), math.exp(logp), math.exp(logq)
    cap = 1 + 2.3 * max(1 - p, 5e-3)
    return {
        "unit": 1.0,
        "exact": min(max(k, 1e-6), 1e6),
        "tis": min(k, 2.0),
        "icepop": k if 0.5 <= k <= 5.0 else 0.0,
        "kpop": k if max(bernoulli_kl(p, q), bernoulli_kl(q, p)) <= 0.3 else 0.0,
        "cis": min(k, cap),
        "cis_two_sided": max(min(k, cap), (1 + p) / 2),
    }[name]


TOKEN_WEIGHTS = {
    "unit": lambda p, q, m: correction.unit_weights(p - q, m),
    "exact": lambda p, q, m: correction.exact_weights(p - q, m),
    "tis": lambda p, q, m: correction.truncated_weights(p - q, m),
    "icepop": lambda p, q, m: correction.masked_weights(p - q, m),
    "kpop": lambda p, q, m: correction.bernoulli_kl_weights(p, q, m, threshold=0.3),
    "cis": lambda p, q, m: correction.calibrated_weights(p, q, m),
    "cis_two_sided": lambda p, q, m: correction.calibrated_weights(p, q, m, two_sided=True),
}
SEQUENCE_WEIGHTS = {
    "seq_tis": lambda p, q, m: correction.sequence_truncated_weights(p - q, m),
    "seq_mis": lambda p, q, m: correction.sequence_masked_weights(p - q, m),
    "geo_unit": lambda p, q, m: correction.geometric_masked_weights(p - q, m, low=0.8, high=1.2),
    "geo_ratio": lambda p, q, m: correction.geometric_masked_weights(p - q, m, low=0.8, high=1.2, token_weight="ratio"),
}
WEIGHTS = TOKEN_WEIGHTS | SEQUENCE_WEIGHTS


@pytest.mark.parametrize("name", TOKEN_WEIGHTS)
def test_token_weights_against_float64(name: str) -> None:
    logp, logq, mask = batch()
    expected = [
        [token_oracle(name, p, q) if m else 0.0 for p, q, m in zip(*rows, strict=True)]
        for rows in zip(logp, logq, mask, strict=True)
    ]
    np.testing.assert_allclose(TOKEN_WEIGHTS[name](logp, logq, mask), expected, rtol=1e-5)


@pytest.mark.parametrize("name", SEQUENCE_WEIGHTS)
def test_sequence_weights_against_float64(name: str) -> None:
    logp, logq, mask = batch(seed=1)
    logq = logp - 0.3 * (logp - logq)  # ratios whose product does not saturate every cap
    expected = np.zeros((B, T))
    for b in range(B):
        x = (logp - logq)[b][mask[b]]
        product, geometric = math.exp(x.sum()), math.exp(x.mean())
        expected[b][mask[b]] = {
            "seq_tis": min(product, 2.0),
            "seq_mis": product if product <= 2.0 else 0.0,
            "geo_unit": float(0.8 <= geometric <= 1.2),
            "geo_ratio": np.exp(x) if 0.8 <= geometric <= 1.2 else 0.0,
        }[name]
    np.testing.assert_allclose(SEQUENCE_WEIGHTS[name](logp, logq, mask), expected, rtol=1e-5)


def test_overflowing_ratio() -> None:
    # log ratio -2 + 91 = 89: e^89 does not fit float32.
    logp, logq, mask = np.array([[-2.0, -2.0]]), np.array([[-91.0, -2.0]]), np.ones((1, 2), bool)
    np.testing.assert_allclose(TOKEN_WEIGHTS["tis"](logp, logq, mask), [[2.0, 1.0]])
    expected = 1 + 2.3 * (1 - math.exp(-2.0))
    np.testing.assert_allclose(TOKEN_WEIGHTS["cis"](logp, logq, mask), [[expected, 1.0]], rtol=1e-6)
    np.testing.assert_allclose(TOKEN_WEIGHTS["exact"](logp, logq, mask), [[1e6, 1.0]])
    np.testing.assert_allclose(SEQUENCE_WEIGHTS["seq_tis"](logp, logq, mask), [[2.0, 2.0]])


def test_truncation_is_monotone_up_to_infinity() -> None:
    log_ratio = np.array([[-1.0, 0.0, 0.5, 1.0, 88.0, 89.0, 1e30, np.inf]])
    out = np.asarray(correction.truncated_weights(log_ratio, np.ones((1, 8), bool)))[0]
    assert np.all(np.diff(out) >= 0)
    np.testing.assert_array_equal(out[3:], 2.0)


def test_zero_probabilities() -> None:
    """p = 0 weighs 0 whatever q is; q = 0 weighs the cap, or 0 where the ratio is out of a band."""
    logp = np.array([[-np.inf, -np.inf, -1.0]])
    logq = np.array([[-1.0, -np.inf, -np.inf]])
    mask = np.ones((1, 3), bool)
    caps = {"unit": 1.0, "exact": 1e6, "tis": 2.0, "icepop": 0.0, "kpop": 0.0}
    caps["cis"] = caps["cis_two_sided"] = 1 + 2.3 * (1 - math.exp(-1.0))
    log_ratio = np.array([[-np.inf, -np.inf, np.inf]])
    for name, cap in caps.items():
        if name in ("kpop", "cis", "cis_two_sided"):
            out = TOKEN_WEIGHTS[name](logp, logq, mask)
        else:
            out = TOKEN_WEIGHTS[name](log_ratio, np.zeros((1, 3)), mask)
        np.testing.assert_allclose(out, [[0.0, 0.0, cap]], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", WEIGHTS)
def test_nan_never_weighs_one(name: str) -> None:
    zeros, mask = np.zeros((2, 3)), np.ones((2, 3), bool)
    logp = np.where([[False] * 3, [False, True, False]], np.nan, zeros)
    out = np.asarray(WEIGHTS[name](logp, zeros, mask))
    np.testing.assert_array_equal(out[0], 1.0)
    if name in SEQUENCE_WEIGHTS:
        np.testing.assert_array_equal(out[1], 0.0)
    else:
        np.testing.assert_array_equal(out[1], [1.0, 0.0, 1.0])


def test_calibrated_edges() -> None:
    def weight(p: float, q: float, **options: float | bool) -> float:
        one = np.ones((1, 1), bool)
        return float(correction.calibrated_weights(np.log([[p]]), np.log([[q]]), one, **options)[0, 0])

    assert weight(0.5, 0.5) == 1.0
    # p = 1, q = e^-.5 = .6065: k = 1.6487 against the floored cap 1 + 2.3 · .005 = 1.0115
    np.testing.assert_allclose(weight(1.0, math.exp(-0.5)), 1.0115, rtol=1e-6)
    np.testing.assert_allclose(weight(0.9, 0.3, cis_lambda=0.0), 1.0, rtol=1e-6)
    np.testing.assert_allclose(weight(0.3, 0.9, cis_lambda=0.0), 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(weight(0.9, 0.89), 0.9 / 0.89, rtol=1e-6)  # below its cap 1.23: untouched
    np.testing.assert_allclose(weight(0.9, 0.3, cis_kappa=0.5), 1 + 2.3 * 0.5, rtol=1e-6)
    np.testing.assert_allclose(weight(0.4, 0.9, two_sided=True), 0.7, rtol=1e-6)  # k = .44 raised to (1 + .4)/2
    caps = [weight(p, 1e-6) for p in (0.1, 0.3, 0.5, 0.9, 0.99, 0.999, 1.0)]
    assert all(a >= b for a, b in itertools.pairwise(caps))


def test_saturated_tokens_are_kept_at_weight_one() -> None:
    mask = np.ones((1, 2), bool)
    logp, logq = np.array([[0.0, -1e-7]]), np.zeros((1, 2))
    for name in ("kpop", "cis", "tis", "icepop", "exact"):
        np.testing.assert_allclose(TOKEN_WEIGHTS[name](logp, logq, mask), [[1.0, 1.0]], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", WEIGHTS)
def test_on_policy_weight_is_exactly_one(name: str, dtype: jnp.dtype) -> None:
    logp = jnp.asarray(-np.random.default_rng(0).gamma(0.3, 1.0, size=(3, 50)), dtype)
    np.testing.assert_array_equal(WEIGHTS[name](logp, logp, np.ones((3, 50), bool)), 1.0)


def test_bfloat16_uncertainty() -> None:
    # p of -0.001 rounds to 1.0 in bfloat16; its cap is 1 + 2.3 · 9.99e-4 with κ = 0, not 1.
    logp = jnp.asarray([[-0.001]], jnp.bfloat16)
    out = correction.calibrated_weights(logp, jnp.asarray([[-9.0]], jnp.bfloat16), np.ones((1, 1), bool), cis_kappa=0.0)
    np.testing.assert_allclose(out, [[1 - 2.3 * math.expm1(float(logp[0, 0]))]], rtol=1e-6)
    assert out[0, 0] > 1.002


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, m: correction.truncated_weights(x, m, cap=math.inf), "cap must lie in"),
        (lambda x, m: correction.exact_weights(x, m, high=math.inf), "high must lie in"),
        (lambda x, m: correction.masked_weights(x, m, low=2.0, high=1.0), "low must be below high"),
        (lambda x, m: correction.calibrated_weights(x, x, m, cis_lambda=-1.0), "cis_lambda"),
        (lambda x, m: correction.calibrated_weights(x, x, m, cis_kappa=2.0), "cis_kappa"),
        (lambda x, m: correction.bernoulli_kl_weights(x, x, m, threshold=0.0), "threshold"),
        (lambda x, m: correction.sequence_masked_weights(x, m, low=3.0), "low must be below cap"),
    ],
)
def test_refused_parameters(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(jnp.zeros((1, 2)), jnp.ones((1, 2), bool))
