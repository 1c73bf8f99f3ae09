from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from trm_jax.report.estimates import Difference, difference, estimate_accuracy


@pytest.mark.parametrize(("right", "items"), [(0, 10), (10, 10), (3, 7), (512, 1024), (1, 1024)])
def test_one_seed_has_wilsons_interval(right: int, items: int):
    estimate = estimate_accuracy([right / items], items)
    expected = stats.binomtest(right, items).proportion_ci(method="wilson")
    assert estimate.low == pytest.approx(expected.low, abs=1e-6)
    assert estimate.high == pytest.approx(expected.high, abs=1e-6)
    assert (estimate.seeds, estimate.spread) == (1, None)


@pytest.mark.parametrize("seeds", [2, 3, 5, 31, 45])
def test_several_seeds_have_students_interval_when_it_is_wider(seeds: int):
    values = 0.5 + 0.2 * np.cos(np.arange(seeds))
    estimate = estimate_accuracy(list(values), items=10**9)
    expected = stats.t.interval(0.95, seeds - 1, loc=values.mean(), scale=stats.sem(values))
    # Three decimals of tabulated quantiles, and 0.1% beyond the table.
    assert estimate.low == pytest.approx(max(0.0, expected[0]), abs=3e-4)
    assert estimate.high == pytest.approx(min(1.0, expected[1]), abs=3e-4)
    assert estimate.spread == pytest.approx(values.std(ddof=1), rel=1e-12)


def test_equal_seeds_still_have_the_noise_of_the_items():
    several, one = estimate_accuracy([0.5, 0.5, 0.5], items=100), estimate_accuracy([0.5], items=100)
    assert (several.low, several.high) == (one.low, one.high)
    assert several.spread == 0


def test_missing_values_are_left_out_and_none_at_all_is_nan():
    assert estimate_accuracy([math.nan, 0.4, 0.6], items=100).value == pytest.approx(0.5)
    nothing = estimate_accuracy([math.nan], items=100)
    assert math.isnan(nothing.value)
    assert nothing.seeds == 0


def test_without_items_one_seed_has_no_interval_and_resolves_nothing():
    unknown = estimate_accuracy([0.9], items=0)
    assert math.isnan(unknown.low)
    gap = difference(unknown, estimate_accuracy([0.1], items=1000))
    assert gap.value == pytest.approx(0.8)
    assert not gap.resolved


def test_difference_against_newcombes_own_example():
    # Newcombe (1998), table II, example a: 56/70 − 48/80, method 10 without continuity correction: 0.0524 to 0.3339.
    gap = difference(estimate_accuracy([56 / 70], 70), estimate_accuracy([48 / 80], 80))
    assert gap.value == pytest.approx(0.2, abs=1e-12)
    assert gap.low == pytest.approx(0.0524, abs=5e-5)
    assert gap.high == pytest.approx(0.3339, abs=5e-5)


def test_difference_turns_sign_with_its_arguments():
    a, b = estimate_accuracy([0.8], 50), estimate_accuracy([0.3], 200)
    forward, back = difference(a, b), difference(b, a)
    assert (back.value, back.low, back.high) == pytest.approx((-forward.value, -forward.high, -forward.low))


@pytest.mark.parametrize(
    ("low", "high", "resolved"),
    [(0.01, 0.2, True), (-0.2, -0.01, True), (-0.1, 0.1, False), (math.nan, math.nan, False)],
)
def test_resolved_means_that_zero_is_outside(low: float, high: float, resolved: bool):
    assert Difference(value=0.0, low=low, high=high).resolved is resolved


def test_the_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(7)
    truth_a, truth_b, n, hits = 0.7, 0.55, 120, 0
    for _ in range(2000):
        a = estimate_accuracy([rng.binomial(n, truth_a) / n], n)
        b = estimate_accuracy([rng.binomial(n, truth_b) / n], n)
        gap = difference(a, b)
        hits += gap.low <= truth_a - truth_b <= gap.high
    # 2,000 trials at 95%: standard error 0.5 points; the method's coverage stands within 1 point of nominal.
    assert 0.93 < hits / 2000 < 0.975
