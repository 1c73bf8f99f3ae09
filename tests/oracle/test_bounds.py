"""Every bound against sums over positions, Table 1 of TRM, and traced against eager values."""

import math

import jax
import numpy as np
import pytest

from trm_jax import bounds

from .batches import close
from .reference import bounds as oracle

LENGTHS = [1, 2, 3, 17, 300]
LEVELS = [(1e-7, 1e-4), (1e-4, 5e-3), (0.02, 0.3), (0.5, 0.2), (3.0, 1.0)]  # (delta, eps)
NAMES = {  # name: (function, oracle, what it takes)
    "classical": (bounds.classical_bound, oracle.classical, ("max_token_tv",)),
    "coupling": (bounds.coupling_bound, oracle.coupling, ("max_token_tv",)),
    "pinsker_marginal_kl": (bounds.pinsker_marginal_bound_kl, oracle.pinsker_marginal_kl, ("max_token_kl",)),
    "pinsker_marginal_tv": (
        bounds.pinsker_marginal_bound_tv,
        oracle.pinsker_marginal_tv,
        ("max_token_kl", "max_token_tv"),
    ),
    "mixed_kl": (bounds.mixed_bound_kl, oracle.mixed_kl, ("max_token_kl", "sequence_kl")),
    "mixed_tv": (bounds.mixed_bound_tv, oracle.mixed_tv, ("max_token_tv", "sequence_tv")),
}
SUMS = 1e-11  # float64 sums of 300 terms


def divergences(delta, eps, length):
    return {
        "max_token_kl": delta,
        "max_token_tv": eps,
        "sequence_kl": 0.3 * length * delta,
        "sequence_tv": min(1.0, 0.2 * length * eps),
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", LENGTHS)
def test_worst_case_bound(name, length):
    function, reference, takes = NAMES[name]
    for delta, eps in LEVELS:
        inputs = {k: divergences(delta, eps, length)[k] for k in takes}
        got = function(length, **{k: np.float64(v) for k, v in inputs.items()})
        close(got, reference(length, **inputs), relative=SUMS)


@pytest.mark.parametrize("name", NAMES)
def test_worst_case_bound_traced(name):
    function, reference, takes = NAMES[name]
    traced = jax.jit(lambda **kw: function(17, **kw))
    for delta, eps in LEVELS:
        inputs = {k: divergences(delta, eps, 17)[k] for k in takes}
        close(traced(**inputs), reference(17, **inputs), relative=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("given", [("max_token_kl",), ("max_token_tv",), ("max_token_kl", "max_token_tv")])
def test_adaptive_bound(length, given):
    mean_tv = np.random.default_rng(length).uniform(0, 0.2, length)
    for delta, eps in LEVELS:
        inputs = {k: divergences(delta, eps, length)[k] for k in given}
        expected = oracle.adaptive(mean_tv.tolist(), **inputs)
        close(bounds.adaptive_bound(mean_tv, **inputs), expected, relative=SUMS)
        if length == 17:
            traced = jax.jit(lambda d, **kw: bounds.adaptive_bound(d, **kw))(mean_tv.astype(np.float32), **inputs)
            close(traced, expected, relative=1e-5)


def test_adaptive_weighs_the_future_of_each_position():
    """T = 3, D = (.1, .2, .4), eps = .3: 4 (.1*.6 + .2*.3 + .4*0) = .48; D reversed: 4 (.4*.6 + .2*.3) = 1.2."""
    close(bounds.adaptive_bound(np.array([0.1, 0.2, 0.4]), max_token_tv=0.3), 0.48, relative=1e-12)
    close(bounds.adaptive_bound(np.array([0.4, 0.2, 0.1]), max_token_tv=0.3), 1.2, relative=1e-12)


def test_crossover_of_the_hybrid():
    """At T - t = delta/(2 eps^2) = .02/(2*.0025) = 4 both routes give .2."""
    routes = [bounds.adaptive_bound(np.eye(7)[6 - s], max_token_kl=0.02, max_token_tv=0.05) / 4 for s in range(7)]
    close(routes, [min(0.05 * s, math.sqrt(0.01 * s)) for s in range(7)], relative=1e-12)
    close(routes[4], 0.2, relative=1e-12)


TABLE_1 = {  # T = 4096, exact sums; (KL only, KL and TV)
    "classical": (1677.312, 838.656),
    "coupling": (113.8382, 79.9100),
    "pinsker_marginal_kl": (34.9461, 34.9461),
    "pinsker_marginal_tv": (34.9461, 24.7106),
    "mixed_kl": (8.1920, 8.1920),
    "mixed_tv": (8.1920, 4.0960),
    "adaptive": (34.9461, 24.7106),
}
COLUMNS = [
    {"max_token_kl": 1e-4, "max_token_tv": math.sqrt(5e-5), "sequence_kl": 0.01, "sequence_tv": math.sqrt(0.005)},
    {"max_token_kl": 1e-4, "max_token_tv": 5e-3, "sequence_kl": 0.01, "sequence_tv": 0.05},
]


@pytest.mark.parametrize("column", [0, 1])
def test_table_1(column):
    """The oracle and the package give the printed digits; the unified bound is the mixed one, 409 times below 1677."""
    inputs = COLUMNS[column]
    mean_tv = np.full(4096, min(inputs["max_token_tv"], math.sqrt(inputs["max_token_kl"] / 2)))
    got = bounds.unified_bound(4096, **inputs, mean_token_tv_by_position=mean_tv)
    for name, values in TABLE_1.items():
        close(got.bounds[name], values[column], relative=0, absolute=6e-5 if values[column] < 800 else 6e-4)
    for name, (_, reference, takes) in NAMES.items():
        close(reference(4096, **{k: inputs[k] for k in takes}), got.bounds[name], relative=SUMS)
    close(got.minimum, (8.1920, 4.0960)[column], relative=1e-9)
    assert got.tightest in (("mixed_kl", "mixed_tv"), ("mixed_tv",))[column]
    close(TABLE_1["classical"][0] / 4.0960, 409.5, relative=1e-4)


def test_unified_bound_uses_what_it_is_given():
    """Every bound whose inputs are there, no other, and the least of them."""
    everything = divergences(0.01, 0.05, 20)
    mean_tv = np.full(20, 0.02)
    for bits in range(1, 32):
        inputs = {k: v for i, (k, v) in enumerate(everything.items()) if bits >> i & 1}
        if bits >> 4:
            inputs["mean_token_tv_by_position"] = mean_tv
        possible = {
            name: reference(20, **{k: everything[k] for k in takes})
            for name, (_, reference, takes) in NAMES.items()
            if set(takes) <= set(inputs)
        }
        if "mean_token_tv_by_position" in inputs:
            routes = {k: inputs[k] for k in ("max_token_kl", "max_token_tv") if k in inputs}
            for k in routes:
                possible[f"adaptive_{k[-2:]}"] = oracle.adaptive(mean_tv.tolist(), **{k: routes[k]})
            if len(routes) == 2:
                possible["adaptive"] = oracle.adaptive(mean_tv.tolist(), **routes)
        if not possible:
            with pytest.raises(ValueError, match="max_token"):
                bounds.unified_bound(20, **inputs)
            continue
        got = bounds.unified_bound(20, **inputs)
        assert set(got.bounds) == set(possible), inputs
        for name, value in possible.items():
            close(got.bounds[name], value, relative=SUMS)
        close(got.minimum, min(possible.values()), relative=SUMS)
        close(possible[got.tightest], min(possible.values()), relative=SUMS)


def test_lemmas():
    keys = ("max_token_kl", "max_token_tv", "sequence_kl", "sequence_tv")
    rng = np.random.default_rng(1)
    for _ in range(60):
        values = dict(zip(keys, 10.0 ** rng.uniform(-4, 0.5, 4), strict=True))
        values["max_token_tv"], values["sequence_tv"] = min(values["max_token_tv"], 1), min(values["sequence_tv"], 1)
        given = {k: v for k, v in values.items() if rng.random() < 0.6} or {"max_token_kl": values["max_token_kl"]}
        for t in (1, 2, 9, 1000):
            close(bounds.context_shift_bound(t, **given), oracle.context_shift(t, **given), relative=1e-12)
        token = {k: v for k, v in given.items() if k.startswith("max")}
        if token:
            close(bounds.advantage_bound(**token), oracle.advantage(**token), relative=1e-12)


def test_context_shift_of_many_positions():
    t = np.arange(1, 40)
    got = bounds.context_shift_bound(t, max_token_kl=0.05, max_token_tv=0.04, sequence_tv=0.6)
    expected = [oracle.context_shift(int(x), max_token_kl=0.05, max_token_tv=0.04, sequence_tv=0.6) for x in t]
    close(got, expected, relative=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_infinite_divergence_leaves_a_finite_bound_where_it_is_capped(name):
    """delta = inf caps at 1 per factor; the first position adds no shift (0, not 0 * inf)."""
    function, _, takes = NAMES[name]
    worst = {"max_token_kl": math.inf, "max_token_tv": 1.0, "sequence_kl": math.inf, "sequence_tv": 1.0}
    expected = {
        "classical": 2 * 5 * 4,
        "coupling": 16,
        "pinsker_marginal_kl": 16,
        "pinsker_marginal_tv": 16,
        "mixed_kl": 20,
        "mixed_tv": 20,
    }[name]
    close(function(5, **{k: np.float64(worst[k]) for k in takes}), expected, relative=1e-12)
