"""Masked reductions, sequence statistics and safe exponentials against float64 numpy."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import numerics

GARBAGE = [np.nan, np.inf, -np.inf, 1e30]


def garbled(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Values with garbage at masked slots, and the mask; the last row is empty."""
    mask = rng.random(shape) < 0.6
    mask[-1] = False
    values = rng.normal(size=shape)
    values[~mask] = rng.choice(GARBAGE, size=int((~mask).sum()))
    return values, mask


def test_masked_reductions_ignore_garbage() -> None:
    values, mask = garbled(np.random.default_rng(0), (5, 7))
    clean = [row[keep] for row, keep in zip(values, mask, strict=True)]
    np.testing.assert_allclose(
        numerics.masked_sum(values, mask, axis=1), [r.sum() for r in clean], rtol=1e-5, atol=1e-6
    )
    expected_mean = [r.mean() if r.size else 0.0 for r in clean]
    np.testing.assert_allclose(numerics.masked_mean(values, mask, axis=1), expected_mean, rtol=1e-5, atol=1e-6)
    expected_max = [r.max() if r.size else -3.0 for r in clean]
    np.testing.assert_allclose(numerics.masked_max(values, mask, axis=1, empty=-3.0), expected_max, rtol=1e-6)


def test_masked_max_shows_nan_at_a_true_slot() -> None:
    out = numerics.masked_max(jnp.array([1.0, jnp.nan]), jnp.array([True, True]))
    assert jnp.isnan(out)


def test_masked_sum_gradient_is_one_or_zero() -> None:
    values, mask = garbled(np.random.default_rng(1), (4, 6))
    grad = jax.grad(lambda v: numerics.masked_sum(v, mask))(jnp.asarray(values, jnp.float32))
    np.testing.assert_array_equal(grad, mask.astype(np.float32))


@pytest.mark.parametrize("x", [-50.0, -1.0, -0.35, -1e-3, -1e-8, 0.0, 1e-8, 1e-5, 1e-3, 0.2, 0.3499, 0.3501, 1.0, 80.0])
def test_expm1_minus_identity_keeps_relative_accuracy(x: float) -> None:
    x64 = float(np.float32(x))
    # float64 series below 1e-2, where expm1(x) - x has itself lost digits.
    series = x64**2 / 2 + x64**3 / 6 + x64**4 / 24 + x64**5 / 120
    expected = series if abs(x64) < 1e-2 else np.expm1(x64) - x64
    # 3e-6: at the switch of the two forms expm1(x) - x cancels one digit of float32's seven.
    np.testing.assert_allclose(numerics.expm1_minus_identity(jnp.float32(x)), expected, rtol=3e-6)


def test_expm1_minus_identity_at_infinities_and_its_gradient() -> None:
    assert numerics.expm1_minus_identity(jnp.float32(np.inf)) == np.inf
    assert numerics.expm1_minus_identity(jnp.float32(-np.inf)) == np.inf
    assert jnp.isnan(numerics.expm1_minus_identity(jnp.float32(np.nan)))
    for x in (-2.0, -0.1, 0.0, 0.1, 2.0):  # d/dx (e^x - 1 - x) = e^x - 1
        np.testing.assert_allclose(jax.grad(numerics.expm1_minus_identity)(x), np.expm1(x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("x", [-1e-7, -1e-3, -0.5, -0.7, -5.0, -80.0])
def test_log1mexp(x: float) -> None:
    x64 = float(np.float32(x))
    np.testing.assert_allclose(numerics.log1mexp(jnp.float32(x)), np.log1p(-np.exp(x64)), rtol=1e-5, atol=1e-37)


def test_safe_exp_never_overflows() -> None:
    out = numerics.safe_exp(jnp.array([-jnp.inf, 0.0, 89.0, jnp.inf]))
    np.testing.assert_allclose(out, [0.0, 1.0, np.exp(60.0), np.exp(60.0)], rtol=1e-5)
    assert jnp.isnan(numerics.safe_exp(jnp.float32(np.nan)))


def test_segment_index_is_equal_exactly_for_equal_ids() -> None:
    ids = np.array([[7, 7, -2, 7, 5, -2], [0, 1, 2, 3, 4, 5]])
    index = np.asarray(numerics.segment_index(ids))
    for row, named in zip(ids, index, strict=True):
        np.testing.assert_array_equal(row[:, None] == row, named[:, None] == named)
    assert index.min() >= 0
    assert index.max() < ids.shape[1]


@pytest.mark.parametrize("dtype", [np.float32, bool])
def test_segment_ids_must_be_integers(dtype: type) -> None:
    with pytest.raises(TypeError, match=f"must be integers, given dtype {np.dtype(dtype)}"):
        inspect.unwrap(numerics.segment_index)(np.zeros((2, 3), dtype))  # without the run-time types of the tests


def test_segment_statistics_of_packed_rows() -> None:
    rng = np.random.default_rng(2)
    values, mask = garbled(rng, (4, 12))
    ids = rng.integers(0, 3, size=(4, 12))  # scattered, not contiguous
    got = {
        "sum": numerics.sequence_sum(values, mask, ids),
        "mean": numerics.sequence_mean(values, mask, ids),
        "max": numerics.sequence_max(values, mask, ids),
        "after": numerics.tokens_after(mask, ids),
    }
    for b in range(4):
        for t in range(12):
            own = values[b][(ids[b] == ids[b, t]) & mask[b]]
            np.testing.assert_allclose(got["sum"][b, t], own.sum(), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got["mean"][b, t], own.mean() if own.size else 0.0, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got["max"][b, t], own.max() if own.size else -np.inf, rtol=1e-6)
            behind = ((ids[b] == ids[b, t]) & mask[b])[t + 1 :].sum()
            assert got["after"][b, t] == behind


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_sums_are_right_to_float32_at_any_length(compiled: bool) -> None:
    rng = np.random.default_rng(5)
    values = np.stack([np.full(6000, -1e-3), rng.normal(size=6000), 10.0 ** rng.uniform(-30, 20, 6000)])
    values, ids = values.astype(np.float32), rng.integers(0, 2, size=(3, 6000))
    mask = rng.random((3, 6000)) < 0.9
    function = jax.jit(numerics.sequence_sum) if compiled else numerics.sequence_sum
    got = np.asarray(function(values, mask, ids))
    for row, segment in np.ndindex(3, 2):
        own = values[row][(ids[row] == segment) & mask[row]].astype(np.float64)
        want = np.full((ids[row] == segment).sum(), own.sum())
        # The result is a float32; the digits that the coarse parts lack are 2e-7 of the largest sum of absolute values.
        np.testing.assert_allclose(got[row][ids[row] == segment], want, rtol=1.2e-7, atol=1e-9 * np.abs(own).sum())
    for odd in (np.inf, -np.inf, np.nan):
        values[0, 0], mask[0, 0] = odd, True
        got = np.asarray(function(values, mask, ids))
        np.testing.assert_array_equal(got[0][ids[0] == ids[0, 0]], odd)
        assert np.isfinite(got[0][ids[0] != ids[0, 0]]).all()


def test_packed_sums_have_the_gradient_of_a_sum() -> None:
    ids = np.array([[1, 2, 1, 2]])
    weights = np.array([[1.0, 2.0, 3.0, 5.0]])  # of the sum at each slot: segment 1 gets 1 + 3, segment 2 gets 2 + 5
    mask = np.array([[True, True, True, False]])
    gradient = jax.grad(lambda v: jnp.sum(weights * numerics.sequence_sum(v, mask, ids)))(jnp.array([[0.3, 7, -2, 1]]))
    np.testing.assert_array_equal(gradient, [[4, 7, 4, 0]])


def test_sequence_ends_mark_each_sequence_once() -> None:
    mask = np.array([[1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]], bool)
    np.testing.assert_array_equal(numerics.sequence_ends(mask), [[0, 0, 0, 1, 0, 0], [0] * 6])
    ids = np.array([[1, 1, 1, 2, 2, 3], [1, 1, 2, 2, 3, 3]])
    np.testing.assert_array_equal(numerics.sequence_ends(mask, ids), [[0, 1, 0, 1, 0, 0], [0] * 6])


def test_over_tokens_spreads_rows_and_keeps_slots() -> None:
    like = np.zeros((2, 3))
    np.testing.assert_array_equal(numerics.over_tokens(np.array([1.0, 2.0]), like), [[1] * 3, [2] * 3])
    full = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(numerics.over_tokens(full, like), full)
