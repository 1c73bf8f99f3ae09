"""Every inequality of the theory, on random tabular pairs from nearly equal to disjoint, against the exact oracle."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trm_jax import bounds
from trm_jax.bounds import TabularPair

# Sums of 4096 products in float64: relative rounding, and an absolute one for differences of order 1.
RELATIVE, ABSOLUTE = 1e-9, 1e-13

fast = settings(derandomize=True, deadline=None, database=None, max_examples=150)


class Recipe(NamedTuple):
    """How to draw a pair: the draws themselves are made in the test, outside hypothesis."""

    shape: tuple[int, int]  # V, T
    seed: int
    spread: float  # of π_roll's logits: flat to sharp
    mismatch: float  # of the difference in logits
    touched: float  # share of contexts in which the policies differ at all
    excluded: float  # chance that a policy excludes a token
    binary: bool  # rewards


recipes = st.builds(
    Recipe,
    shape=st.sampled_from([(2, 1), (2, 2), (2, 5), (2, 8), (3, 3), (3, 5), (5, 3), (7, 2)]),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 1.0, 5.0]),
    mismatch=st.sampled_from([1e-8, 1e-4, 1e-2, 0.1, 0.5, 2.0, 30.0]),
    touched=st.sampled_from([0.1, 1.0]),
    excluded=st.sampled_from([0.0, 0.0, 0.3, 0.9]),
    binary=st.booleans(),
)


def make_pair(recipe: Recipe) -> TabularPair:
    (size, length), rng = recipe.shape, np.random.default_rng(recipe.seed)
    tables: dict[str, list[np.ndarray]] = {"roll": [], "theta": []}
    for t in range(length):
        shape = (size**t, size)
        base = recipe.spread * rng.normal(size=shape)
        moved = base + recipe.mismatch * rng.normal(size=shape) * (rng.random((size**t, 1)) < recipe.touched)
        for name, logits in (("roll", base), ("theta", moved)):
            closed = rng.random(shape) < recipe.excluded
            closed[np.arange(size**t), rng.integers(size, size=size**t)] = False
            tables[name].append(np.where(closed, -np.inf, logits))
    rewards = rng.random(size**length)
    return TabularPair.from_logits(tables["roll"], tables["theta"], np.round(rewards) if recipe.binary else rewards)


def at_most(value: float, bound: float) -> bool:
    return value <= bound * (1 + RELATIVE) + ABSOLUTE


def pair_bounds(pair: TabularPair) -> bounds.UnifiedBound:
    return bounds.unified_bound(
        pair.length,
        max_token_kl=pair.max_token_kl,
        max_token_tv=min(pair.max_token_tv, 1.0),
        sequence_kl=pair.sequence_kl,
        sequence_tv=min(pair.sequence_tv, 1.0),
        mean_token_tv_by_position=np.minimum(pair.mean_token_tv_by_position, 1.0),
    )


@fast
@given(recipes)
def test_error_is_within_every_bound(recipe: Recipe) -> None:
    pair = make_pair(recipe)
    error = abs(pair.error)
    assert pair.improvement - pair.surrogate == pytest.approx(pair.error, abs=1e-12)
    found = pair_bounds(pair)
    assert len(found.bounds) == 9
    for name, bound in found.bounds.items():
        assert error <= bound * (1 + RELATIVE) + 1e-15, name
    assert float(found.minimum) == min(map(float, found.bounds.values())) == float(found.bounds[found.tightest])


@fast
@given(recipes)
def test_adaptive_is_the_tightest_of_its_family(recipe: Recipe) -> None:
    pair = make_pair(recipe)
    found = {name: float(bound) for name, bound in pair_bounds(pair).bounds.items()}
    for other in ("coupling", "pinsker_marginal_kl", "pinsker_marginal_tv", "adaptive_kl", "adaptive_tv"):
        assert at_most(found["adaptive"], found[other]), other
    assert at_most(found["coupling"], found["classical"])


@fast
@given(recipes)
def test_lemmas(recipe: Recipe) -> None:
    pair = make_pair(recipe)
    scalars = {"max_token_kl": pair.max_token_kl, "max_token_tv": pair.max_token_tv}
    largest = max(float(np.abs(g).max()) for g in reachable_advantages(pair))
    assert at_most(largest, float(bounds.advantage_bound(**scalars)))
    position = np.arange(1, pair.length + 1)
    shift = pair.context_tv_by_position
    for inputs in (
        {"max_token_kl": pair.max_token_kl},
        {"max_token_tv": pair.max_token_tv},
        {"sequence_kl": pair.sequence_kl},
        {"sequence_tv": pair.sequence_tv},
        {**scalars, "sequence_kl": pair.sequence_kl, "sequence_tv": pair.sequence_tv},
    ):
        limit = bounds.context_shift_bound(position, **inputs)
        assert np.all(shift <= limit * (1 + RELATIVE) + ABSOLUTE), inputs


def reachable_advantages(pair: TabularPair) -> list[np.ndarray]:
    """``g_t`` at the contexts that tokens of positive probability (under either policy) lead to."""
    seen, out = np.ones(1, bool), []
    for g, q, p in zip(pair.expected_advantages, pair.rollout, pair.policy, strict=True):
        out.append(g[seen])
        seen = (seen[:, None] & ((q > 0) | (p > 0))).ravel()
    return out


@fast
@given(recipes)
def test_divergences_obey_their_identities(recipe: Recipe) -> None:
    pair = make_pair(recipe)
    # Chain rule: the KL of whole sequences, from their probabilities.
    q, p = pair.rollout_contexts[-1], pair.policy_contexts[-1]
    drawn = q > 0
    if np.any(drawn & (p == 0)):
        assert math.isinf(pair.sequence_kl)
    else:
        whole = float(np.sum(q[drawn] * (np.log(q[drawn]) - np.log(p[drawn]))))
        assert pair.sequence_kl == pytest.approx(whole, rel=1e-6, abs=1e-12)
    # Pinsker, token by token and for the sequence; subadditivity.
    assert np.all(pair.token_tv <= np.minimum(1, np.sqrt(pair.token_kl / 2)) * (1 + 1e-6) + 1e-9)
    assert at_most(pair.sequence_tv, min(1.0, math.sqrt(pair.sequence_kl / 2)) + 1e-9)
    assert at_most(pair.sequence_tv, float(pair.mean_token_tv_by_position.sum()))
    assert at_most(pair.sequence_kl, pair.length * pair.max_token_kl)
    # Martingale property: under π_roll the advantage of every context has mean 0.
    value = pair.rewards
    for table in reversed(pair.rollout):
        following = value.reshape(table.shape)
        value = (table * following).sum(axis=1)
        np.testing.assert_allclose((table * (following - value[:, None])).sum(axis=1), 0.0, atol=1e-14)
    assert float(value[0]) == pytest.approx(pair.rollout_return, rel=1e-12)


@fast
@given(recipes, st.sampled_from(["kl", "random", "all", "none", "deviation"]), st.floats(0, 1))
def test_guarantees_without_a_precondition(recipe: Recipe, kind: str, level: float) -> None:
    pair = make_pair(recipe)
    deviation = np.abs(np.expm1(np.minimum(pair.log_ratio, 50.0))).sum(axis=1)
    keep = {
        "kl": pair.token_kl.max(axis=1) <= level,
        "random": np.random.default_rng(int(level * 1e6)).random(len(pair.rewards)) < level,
        "all": np.ones(len(pair.rewards), bool),
        "none": np.zeros(len(pair.rewards), bool),
        "deviation": deviation <= 3 * level,
    }[kind]
    surrogate, accepted = pair.masked_surrogate(keep), pair.accepted_error(keep)
    ours = surrogate - accepted - pair.rejected_return(keep)
    paper = surrogate - accepted - pair.rejection_rate(keep) - pair.sequence_tv
    assert pair.improvement >= ours - 1e-12
    assert ours >= paper - 1e-12
    # The route by truncated ratios, for several caps.
    product = np.exp(np.minimum(np.where(pair.log_ratio < np.inf, pair.log_ratio, 0.0).sum(axis=1), 60.0))
    for cap in (1.5, 2.0, 50.0):
        gain = pair.rollout_mean(np.where(keep, pair.rewards * np.minimum(product, cap), 0.0) - pair.rewards)
        assert pair.improvement >= gain - 1e-12


@fast
@given(st.lists(st.floats(-1, 3), min_size=1, max_size=12))
def test_expansion_of_the_product(u: list[float]) -> None:
    deviation = sum(map(abs, u))
    left = abs(math.prod(1 + x for x in u) - 1 - sum(u))
    assert left <= (math.expm1(deviation) - deviation) * (1 + 1e-12) + 1e-12
