"""Each mask against a float64 loop over sequences, by hand, and at its edges."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import correction

B, T = 24, 9


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Statistics with garbage at masked slots and holes inside responses; the last row is empty."""
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T)) < 0.75
    mask[-1] = False
    data = {
        "log_ratio": 0.15 * rng.normal(size=(B, T)),
        "token_kl": rng.gamma(0.3, 0.1, size=(B, T)),
        "token_tv": rng.beta(1.0, 12.0, size=(B, T)),
    }
    for values in data.values():
        values[~mask] = rng.choice([np.nan, np.inf, -np.inf, 1e9], size=int((~mask).sum()))
    return data | {"mask": mask}


def horizon_statistic(x: np.ndarray, kl: float, tv: float) -> float:
    length = len(x)
    weights = [min(1.0, (length - t) * tv, math.sqrt((length - t) * kl / 2)) for t in range(1, length + 1)]
    total = sum(weights)
    return sum(abs(math.exp(v) - 1) * w for v, w in zip(x, weights, strict=True)) / total if total > 0 else 0.0


ORACLES = {
    "max_kl": ("token_kl", lambda x: max(x) <= 0.06),
    "mean_kl": ("token_kl", lambda x: np.mean(x) <= 0.015),
    "max_tv": ("token_tv", lambda x: max(x) <= 0.2),
    "sampled_max": ("log_ratio", lambda x: max(0.5 * x**2) <= 0.03),
    "sampled_mean": ("log_ratio", lambda x: np.mean(np.exp(x) - 1 - x) <= 0.01),
    "sampled_both": ("log_ratio", lambda x: max(0.5 * x**2) <= 0.03 and np.mean(np.exp(x) - 1 - x) <= 0.01),
    "length_neutral": ("log_ratio", lambda x: horizon_statistic(x, 1e-2, 0.2) <= 0.11),
    "error_ratio": ("log_ratio", lambda x: np.mean(np.abs(np.exp(x) - 1)) <= 0.11),
    "geometric": ("log_ratio", lambda x: 0.97 <= math.exp(np.mean(x)) <= 1.04),
}
MASKS = {
    "max_kl": lambda x, m: correction.max_kl_mask(x, m, threshold=0.06),
    "mean_kl": lambda x, m: correction.mean_kl_mask(x, m, threshold=0.015),
    "max_tv": lambda x, m: correction.max_tv_mask(x, m, threshold=0.2),
    "sampled_max": lambda x, m: correction.sampled_mask(x, m, max_k2=0.03),
    "sampled_mean": lambda x, m: correction.sampled_mask(x, m, mean_k3=0.01),
    "sampled_both": lambda x, m: correction.sampled_mask(x, m, max_k2=0.03, mean_k3=0.01),
    "length_neutral": lambda x, m: correction.length_neutral_mask(
        x, m, threshold=0.11, max_token_kl=1e-2, max_token_tv=0.2
    ),
    "error_ratio": lambda x, m: correction.sequence_error_ratio_mask(x, m, threshold=0.11),
    "geometric": lambda x, m: correction.geometric_mask(x, m, low=0.97, high=1.04),
}


@pytest.mark.parametrize("name", ORACLES)
def test_against_float64(name: str) -> None:
    data = batch()
    field, accept = ORACLES[name]
    expected = [
        bool(accept(row[keep])) if keep.any() else True for row, keep in zip(data[field], data["mask"], strict=True)
    ]
    assert 3 < sum(expected) < B - 3, "the case must exercise both decisions"
    np.testing.assert_array_equal(MASKS[name](data[field], data["mask"]), expected)


@pytest.mark.parametrize("name", MASKS)
def test_nan_at_a_response_token_rejects(name: str) -> None:
    values = np.zeros((2, 4))
    values[1, 2] = np.nan
    np.testing.assert_array_equal(MASKS[name](values, np.ones((2, 4), bool)), [True, False])


@pytest.mark.parametrize("name", ["max_kl", "mean_kl", "max_tv", "sampled_max", "sampled_mean", "geometric"])
def test_infinity_rejects(name: str) -> None:
    values = np.zeros((1, 4))
    values[0, 0] = np.inf
    assert not MASKS[name](values, np.ones((1, 4), bool))[0]


def test_impossible_tokens() -> None:
    # p = 0 gives log ratio -inf: |ρ - 1| = 1 there. Four tokens: mean 1/4.
    values = np.array([[-np.inf, 0.0, 0.0, 0.0]])
    mask = np.ones((1, 4), bool)
    assert correction.sequence_error_ratio_mask(values, mask, threshold=0.26)[0]
    assert not correction.sequence_error_ratio_mask(values, mask, threshold=0.24)[0]
    assert not correction.sampled_mask(values, mask, max_k2=100.0)[0]
    assert not correction.geometric_mask(values, mask, low=0.01, high=2.0)[0]


def test_thresholds_are_inclusive() -> None:
    values, mask = np.array([[0.25, 0.5]]), np.ones((1, 2), bool)
    assert correction.max_kl_mask(values, mask, threshold=0.5)[0]
    assert correction.mean_kl_mask(values, mask, threshold=0.375)[0]
    assert correction.max_tv_mask(values, mask, threshold=0.5)[0]
    assert correction.sampled_mask(values, mask, max_k2=0.125)[0]
    assert correction.token_outlier_mask(values, mask, max_abs_log_ratio=0.5).all()


def test_bounds_act_on_the_ratio_and_not_on_its_inverse() -> None:
    # Band [0.6, 1.4]: 1.5 is out although 1/1.5 = 0.67 is in; 0.65 is in although 1/0.65 = 1.54 is out.
    log_ratio, mask = np.log([[1.5], [0.65]]), np.ones((2, 1), bool)
    np.testing.assert_array_equal(correction.geometric_mask(log_ratio, mask, low=0.6, high=1.4), [False, True])
    token = correction.masked_weights(log_ratio, mask, low=0.6, high=1.4)
    np.testing.assert_allclose(token, [[0.0], [0.65]], rtol=1e-6)
    sequence = correction.sequence_masked_weights(log_ratio, mask, low=0.6, cap=1.4)
    np.testing.assert_allclose(sequence, [[0.0], [0.65]], rtol=1e-6)


@pytest.mark.parametrize("length", [1, pytest.param(100, marks=pytest.mark.slow), 8000])
def test_length_neutral_forms_decide_alike_at_every_length(length: int) -> None:
    # Ratio e^-0.001 on every token: geometric mean .999, mean |ρ - 1| = 9.995e-4, at every length.
    log_ratio, mask = np.full((1, length), -1e-3), np.ones((1, length), bool)
    for low, expected in ((0.998, True), (0.9995, False)):
        assert bool(correction.geometric_mask(log_ratio, mask, low=low, high=1.01)[0]) is expected
    for threshold, expected in ((1.1e-3, True), (0.9e-3, False)):
        assert bool(correction.sequence_error_ratio_mask(log_ratio, mask, threshold=threshold)[0]) is expected
        if length > 1:  # a single token has no later context to disturb
            keep = correction.length_neutral_mask(
                log_ratio, mask, threshold=threshold, max_token_kl=1e-4, max_token_tv=5e-3
            )
            assert bool(keep[0]) is expected


def test_length_neutral_by_hand() -> None:
    # T = 3, ε = .1, δ = .08: t=1: min(1, .2, √.08 = .2828) = .2; t=2: min(1, .1, √.04 = .2) = .1; t=3: 0.
    # ρ = 1.3, .9, 50: (.3·.2 + .1·.1 + 0) / .3 = .07/.3 = .23333
    log_ratio, mask = np.log([[1.3, 0.9, 50.0]]), np.ones((1, 3), bool)
    for threshold, expected in ((0.2334, True), (0.2333, False)):
        keep = correction.length_neutral_mask(log_ratio, mask, threshold=threshold, max_token_kl=0.08, max_token_tv=0.1)
        assert bool(keep[0]) is expected


def test_length_bias_of_the_max_criterion() -> None:
    # Violation probability p a token: acceptance (1-p)^T under max, about constant under the mean.
    rng = np.random.default_rng(3)
    p, rows = 0.01, 4000
    for length in (10, 100):
        kl = np.where(rng.random((rows, length)) < p, 1.0, 0.0)
        kept = np.mean(correction.max_kl_mask(kl, np.ones(kl.shape, bool), threshold=0.5))
        # Four standard errors of a binomial fraction at 4,000 rows: 4·√(.25/4000) = 0.032
        np.testing.assert_allclose(kept, (1 - p) ** length, atol=0.032)


def test_token_outliers() -> None:
    log_ratio = np.array([[0.1, -1.5, 0.8, -10.0, np.nan, np.inf, 0.3]])
    mask = np.array([[True] * 6 + [False]])
    expected = [[True, False, True, False, False, False, False]]
    np.testing.assert_array_equal(correction.token_outlier_mask(log_ratio, mask, max_abs_log_ratio=1.0), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, m: correction.max_kl_mask(x, m, threshold=-1.0), "threshold must lie in"),
        (lambda x, m: correction.max_tv_mask(x, m, threshold=1.5), "threshold must lie in"),
        (lambda x, m: correction.sampled_mask(x, m), "max_k2, mean_k3 or both"),
        (lambda x, m: correction.geometric_mask(x, m, low=1.2, high=0.8), "low must be below high"),
        (lambda x, m: correction.token_outlier_mask(x, m, max_abs_log_ratio=math.nan), "max_abs_log_ratio"),
        (
            lambda x, m: correction.length_neutral_mask(x, m, threshold=0.1, max_token_kl=0.0, max_token_tv=0.1),
            "max_token_kl",
        ),
    ],
)
def test_refused_thresholds(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(jnp.zeros((1, 2)), jnp.ones((1, 2), bool))


@pytest.mark.usefixtures("without_run_time_types")
def test_refused_arrays() -> None:
    with pytest.raises(ValueError, match=r"must have one shape, given token_kl \[1, 2\], response_mask \[1, 3\]"):
        correction.max_kl_mask(jnp.zeros((1, 2)), jnp.ones((1, 3), bool), threshold=0.1)
    with pytest.raises(TypeError, match=r"response_mask must be bool .*given dtype float32: pass response_mask > 0"):
        correction.max_kl_mask(jnp.zeros((1, 2)), jnp.ones((1, 2)), threshold=0.1)
