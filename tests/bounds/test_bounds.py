"""The closed forms: TRM Table 1, hand-computed cases, edges, gradients, jit."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax import bounds

T = 4096
KL_ONLY = {
    "max_token_kl": 1e-4,
    "max_token_tv": math.sqrt(0.5e-4),
    "sequence_kl": 0.01,
    "sequence_tv": math.sqrt(0.005),
}
KL_AND_TV = {"max_token_kl": 1e-4, "max_token_tv": 5e-3, "sequence_kl": 0.01, "sequence_tv": 0.05}
# TRM Table 1 with the sums taken exactly: name, KL only, KL and TV, and the digits that the paper prints.
TABLE = [
    ("classical", 1677.312, 838.656, 0, 1677, 839),
    ("coupling", 113.8382, 79.9100, 1, 113.8, 79.9),
    ("pinsker_marginal_kl", 34.9461, 34.9461, 1, None, None),  # printed as 35.0, from the integral of the root
    ("pinsker_marginal_tv", 34.9461, 24.7106, 1, None, 24.7),
    ("mixed_kl", 8.1920, 8.1920, 1, 8.2, 8.2),
    ("mixed_tv", 8.1920, 4.0960, 1, 8.2, 4.1),
    ("adaptive", 34.9461, 24.7106, 1, None, 24.7),
]


def table_column(inputs: dict[str, float]) -> bounds.UnifiedBound:
    worst = min(inputs["max_token_tv"], math.sqrt(inputs["max_token_kl"] / 2))
    return bounds.unified_bound(T, mean_token_tv_by_position=np.full(T, worst), **inputs)


@pytest.mark.parametrize(("name", "kl_only", "kl_and_tv", "digits", "printed_kl", "printed_tv"), TABLE)
def test_table_1(
    name: str, kl_only: float, kl_and_tv: float, digits: int, printed_kl: float | None, printed_tv: float | None
) -> None:
    for inputs, exact, printed in ((KL_ONLY, kl_only, printed_kl), (KL_AND_TV, kl_and_tv, printed_tv)):
        value = table_column(inputs).bounds[name]
        assert abs(value - exact) < 0.5001e-4  # four decimals are given
        if printed is not None:
            assert round(float(value), digits) == printed


def test_table_1_pinsker_marginal_is_printed_from_its_integral() -> None:
    # Σ_{k<T} √k is about (2/3)T^1.5: 4/3 T^1.5 δ = 4/3 · 262144 · 1e-4 = 34.95, which the paper rounds to 35.0.
    integral = 4 / 3 * T**1.5 * 1e-4
    assert round(integral, 2) == 34.95
    exact = float(bounds.pinsker_marginal_bound_kl(T, max_token_kl=1e-4))
    assert 0 < integral - exact < 0.01


def test_table_1_minimum() -> None:
    assert float(table_column(KL_ONLY).minimum) == pytest.approx(8.192, abs=5e-5)
    assert table_column(KL_ONLY).tightest in ("mixed_kl", "mixed_tv")  # equal but for rounding
    both = table_column(KL_AND_TV)
    assert (both.tightest, float(both.minimum)) == ("mixed_tv", pytest.approx(4.096, abs=5e-5))
    # "409 times" of the paper: the classical bound of the KL column over the unified one.
    assert float(table_column(KL_ONLY).classical) / float(both.minimum) == pytest.approx(409.5, abs=0.01)


def test_by_hand() -> None:
    # T = 3, ε = 0.1: 2·3·2·0.01 = 0.12; coupling 4·0.1·(0 + 0.1 + 0.2) = 0.12
    assert float(bounds.classical_bound(3, max_token_tv=0.1)) == pytest.approx(0.12)
    assert float(bounds.coupling_bound(3, max_token_tv=0.1)) == pytest.approx(0.12)
    # T = 3, ε = 0.6: 2·3·2·0.36 = 4.32; capped 4·0.6·(0 + 0.6 + min(1, 1.2)) = 3.84
    assert float(bounds.classical_bound(3, max_token_tv=0.6)) == pytest.approx(4.32)
    assert float(bounds.coupling_bound(3, max_token_tv=0.6)) == pytest.approx(3.84)
    # T = 3, δ = 0.5: √(δ/2) = 0.5; 4·0.5·(0 + 0.5 + √0.5) = 1 + √2 = 2.414214; with ε = 0.1, a fifth: 0.482843
    assert float(bounds.pinsker_marginal_bound_kl(3, max_token_kl=0.5)) == pytest.approx(2.414214, abs=1e-6)
    tv = bounds.pinsker_marginal_bound_tv(3, max_token_kl=0.5, max_token_tv=0.1)
    assert float(tv) == pytest.approx(0.482843, abs=1e-6)
    # T = 3: 4·3·√(0.5/2)·√(0.02/2) = 12·0.5·0.1 = 0.6; 4·3·0.1·0.2 = 0.24
    assert float(bounds.mixed_bound_kl(3, max_token_kl=0.5, sequence_kl=0.02)) == pytest.approx(0.6)
    assert float(bounds.mixed_bound_tv(3, max_token_tv=0.1, sequence_tv=0.2)) == pytest.approx(0.24)
    # D̄ = (0.3, 0.2, 0.1), T - t = (2, 1, 0). TV with ε = 0.3: 4·(0.3·0.6 + 0.2·0.3) = 0.96
    # KL with δ = 0.32: √(2·0.16) = 0.565685, √0.16 = 0.4: 4·(0.3·0.565685 + 0.2·0.4) = 0.998823
    # hybrid: 4·(0.3·0.565685 + 0.2·0.3) = 0.918823; the routes cross at δ/(2ε²) = 1.78, between T - t = 1 and 2
    means = np.array([0.3, 0.2, 0.1])
    assert float(bounds.adaptive_bound(means, max_token_tv=0.3)) == pytest.approx(0.96)
    assert float(bounds.adaptive_bound(means, max_token_kl=0.32)) == pytest.approx(0.998823, abs=1e-6)
    assert float(bounds.adaptive_bound(means, max_token_kl=0.32, max_token_tv=0.3)) == pytest.approx(0.918823, abs=1e-6)


def test_lemmas_by_hand() -> None:
    # 2·min(1, 0.3, √(0.08/2) = 0.2) = 0.4
    assert float(bounds.advantage_bound(max_token_kl=0.08, max_token_tv=0.3)) == pytest.approx(0.4)
    assert float(bounds.advantage_bound(max_token_tv=0.3)) == pytest.approx(0.6)
    # δ = 0.02: √((t-1)·0.01) = 0, 0.1, 0.2 at t = 1, 2, 5; ε = 0.06: 0, 0.06, 0.24
    position = np.array([1, 2, 5])
    shift = bounds.context_shift_bound(position, max_token_kl=0.02, max_token_tv=0.06)
    np.testing.assert_allclose(shift, [0.0, 0.06, 0.2], rtol=1e-12, atol=0)
    # D_TV^seq = 0.15, √(D_KL^seq/2) = √(0.0128/2) = 0.08
    shift = bounds.context_shift_bound(position, max_token_tv=0.06, sequence_tv=0.15)
    np.testing.assert_allclose(shift, [0.0, 0.06, 0.15], rtol=1e-12, atol=0)
    shift = bounds.context_shift_bound(position, max_token_tv=0.06, sequence_tv=0.15, sequence_kl=0.0128)
    np.testing.assert_allclose(shift, [0.0, 0.06, 0.08], rtol=1e-12, atol=0)
    assert float(bounds.context_shift_bound(50, max_token_tv=0.3)) == 1.0


FORMULAS: list[Callable[[int, float], Any]] = [
    lambda length, x: bounds.classical_bound(length, max_token_tv=x),
    lambda length, x: bounds.coupling_bound(length, max_token_tv=x),
    lambda length, x: bounds.pinsker_marginal_bound_kl(length, max_token_kl=x),
    lambda length, x: bounds.pinsker_marginal_bound_tv(length, max_token_kl=x, max_token_tv=x),
    lambda length, x: bounds.mixed_bound_kl(length, max_token_kl=x, sequence_kl=x),
    lambda length, x: bounds.mixed_bound_tv(length, max_token_tv=x, sequence_tv=x),
    lambda length, x: bounds.adaptive_bound(np.full(length, 0.25), max_token_kl=x, max_token_tv=x),
]


@pytest.mark.parametrize("formula", FORMULAS)
def test_edges(formula: Callable[[int, float], Any]) -> None:
    assert float(formula(7, 0.0)) == 0.0
    with pytest.raises(ValueError, match="must lie in"):
        formula(7, -1e-9)
    with pytest.raises(ValueError, match="must lie in"):
        formula(7, math.nan)
    if formula is not FORMULAS[-1]:
        with pytest.raises(ValueError, match="length must be at least 1"):
            formula(0, 0.1)


@pytest.mark.parametrize("formula", FORMULAS[:4] + FORMULAS[6:])
def test_one_token_has_no_error(formula: Callable[[int, float], Any]) -> None:
    for x in (0.0, 1e-3, 1.0, 30.0, math.inf):
        assert float(formula(1, x)) == 0.0


def test_beyond_the_caps() -> None:
    # Caps reached everywhere but at the first context: 4·1·(T-1) = 24, and 4T = 28 for the mixed ones.
    for x in (2.0, 50.0, math.inf):
        assert [float(f(7, x)) for f in FORMULAS[1:6]] == [24.0, 24.0, 24.0, 28.0, 28.0]
        assert float(FORMULAS[6](7, x)) == pytest.approx(4 * 6 * 0.25)
    assert float(bounds.classical_bound(7, max_token_tv=2.0)) == 2 * 7 * 6 * 4
    assert math.isinf(bounds.classical_bound(7, max_token_tv=math.inf))


def test_unified_gives_what_the_inputs_allow() -> None:
    def names(**inputs: Any) -> list[str]:
        return list(bounds.unified_bound(3, **inputs).bounds)

    means = np.array([0.3, 0.2, 0.1])
    assert names(max_token_tv=0.1) == ["classical", "coupling"]
    assert names(max_token_kl=0.1, sequence_tv=0.1) == ["pinsker_marginal_kl"]
    assert names(max_token_kl=0.1, sequence_kl=0.1) == ["pinsker_marginal_kl", "mixed_kl"]
    assert names(max_token_kl=0.1, mean_token_tv_by_position=means) == ["pinsker_marginal_kl", "adaptive_kl"]
    everything = names(
        max_token_kl=0.1, max_token_tv=0.1, sequence_kl=0.1, sequence_tv=0.1, mean_token_tv_by_position=means
    )
    assert everything == [
        "classical",
        "coupling",
        "pinsker_marginal_kl",
        "pinsker_marginal_tv",
        "mixed_kl",
        "mixed_tv",
        "adaptive_kl",
        "adaptive_tv",
        "adaptive",
    ]
    for inputs in ({}, {"sequence_kl": 0.1, "sequence_tv": 0.1}, {"mean_token_tv_by_position": means}):
        with pytest.raises(ValueError, match="no bound can be computed"):
            bounds.unified_bound(3, **inputs)
    with pytest.raises(ValueError, match="length T = 4"):
        bounds.unified_bound(4, max_token_kl=0.1, mean_token_tv_by_position=means)


def test_illegal_inputs_are_named() -> None:
    with pytest.raises(ValueError, match="max_token_kl, max_token_tv"):
        bounds.adaptive_bound(np.array([0.1]))
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        bounds.adaptive_bound(np.array([0.1, 1.1]), max_token_kl=0.1)
    with pytest.raises(ValueError, match=r"\[T\], with T at least 1, given shape \[0\]"):
        bounds.adaptive_bound(np.zeros(0), max_token_kl=0.1)
    with pytest.raises(ValueError, match=r"\[T\], with T at least 1, given shape \[2, 3\]"):
        inspect.unwrap(bounds.adaptive_bound)(np.zeros((2, 3)), max_token_kl=0.1)  # without the run-time types
    with pytest.raises(ValueError, match="no divergence was given"):
        bounds.advantage_bound()
    with pytest.raises(ValueError, match="no divergence was given"):
        bounds.context_shift_bound(3)
    with pytest.raises(ValueError, match="from 1"):
        bounds.context_shift_bound(np.array([1, 0]), max_token_tv=0.1)


def test_numpy_gives_float64_and_jax_gives_jax() -> None:
    assert isinstance(bounds.coupling_bound(5, max_token_tv=0.1), np.float64)
    assert isinstance(bounds.coupling_bound(5, max_token_tv=np.float32(0.1)), np.float64)
    assert isinstance(bounds.coupling_bound(5, max_token_tv=jnp.float32(0.1)), jax.Array)
    means = np.full(5, 0.1, np.float32)
    assert isinstance(bounds.adaptive_bound(means, max_token_kl=0.1), np.float64)
    assert isinstance(bounds.adaptive_bound(means, max_token_kl=jnp.float32(0.1)), jax.Array)


def test_jit_equals_eager_equals_float64() -> None:
    def all_bounds(kl: Any, tv: Any, means: Any) -> bounds.UnifiedBound:
        return bounds.unified_bound(
            300, max_token_kl=kl, max_token_tv=tv, sequence_kl=20 * kl, sequence_tv=tv, mean_token_tv_by_position=means
        )

    means = np.random.default_rng(0).uniform(0, 0.01, 300)
    exact = all_bounds(1e-3, 1e-2, means).bounds
    traced = jax.jit(all_bounds)(1e-3, 1e-2, jnp.asarray(means, jnp.float32))
    eager = all_bounds(jnp.float32(1e-3), jnp.float32(1e-2), jnp.asarray(means, jnp.float32))
    assert list(traced.bounds) == list(exact) == list(eager.bounds)
    for name, value in exact.items():
        np.testing.assert_allclose(traced.bounds[name], value, rtol=1e-5)  # float32 sums of 300 terms
        np.testing.assert_allclose(traced.bounds[name], eager.bounds[name], rtol=2e-6)
    assert traced.tightest == min(exact, key=lambda name: exact[name])
    np.testing.assert_allclose(jax.jit(lambda *a: all_bounds(*a).minimum)(1e-3, 1e-2, means), min(exact.values()), 1e-5)
    with pytest.raises(ValueError, match=r"outside jax\.jit"):
        jax.jit(lambda *a: all_bounds(*a).tightest)(1e-3, 1e-2, means)


def test_traced_illegal_inputs_become_nan() -> None:
    for formula in FORMULAS:
        assert jnp.isnan(jax.jit(lambda x, f=formula: f(3, x))(-0.1))
        assert jnp.isnan(jax.jit(lambda x, f=formula: f(3, x))(jnp.nan))
    illegal = jnp.array([0.1, 1.1])
    assert jnp.isnan(jax.jit(lambda d: bounds.adaptive_bound(d, max_token_kl=0.1))(illegal))
    shift = jax.jit(lambda t: bounds.context_shift_bound(t, max_token_tv=0.1))(jnp.array([0, 2]))
    assert jnp.isnan(shift[0])
    assert shift[1] == pytest.approx(0.1)


def test_gradients() -> None:
    # No cap reached: coupling = 2T(T-1)ε², slope 4T(T-1)ε = 4·5·4·0.01 = 0.8 (float32: 1e-6 relative)
    coupling = jax.grad(lambda x: bounds.coupling_bound(5, max_token_tv=x))
    assert float(coupling(0.01)) == pytest.approx(0.8, rel=1e-5)
    # pinsker_marginal_kl = 4·(δ/2)·Σ√(t-1): slope 2(1 + √2 + √3 + 2) = 12.292528
    assert float(jax.grad(lambda x: bounds.pinsker_marginal_bound_kl(5, max_token_kl=x))(0.01)) == pytest.approx(
        12.292528, rel=1e-5
    )
    # adaptive: the slope in D̄_t is 4·min(1, (T-t)ε)
    slope = jax.grad(lambda d: bounds.adaptive_bound(d, max_token_tv=0.3))(jnp.full(5, 0.1))
    np.testing.assert_allclose(slope, [4.0, 3.6, 2.4, 1.2, 0.0], rtol=1e-6)


@pytest.mark.parametrize("x", [0.0, 1e-30, 0.5, 3.0])
def test_gradients_are_finite_everywhere(x: float) -> None:
    for formula in FORMULAS:
        assert jnp.isfinite(jax.grad(lambda v, f=formula: f(4, v))(jnp.float32(x)))


def test_vmap() -> None:
    values = jnp.array([0.01, 0.1, 0.9])
    out = jax.vmap(lambda x: bounds.unified_bound(6, max_token_tv=x, sequence_tv=x))(values)
    for i, x in enumerate(np.asarray(values, float)):
        expected = bounds.unified_bound(6, max_token_tv=x, sequence_tv=x).bounds
        assert {n: float(v[i]) for n, v in out.bounds.items()} == pytest.approx(
            {n: float(v) for n, v in expected.items()}, rel=1e-5
        )
