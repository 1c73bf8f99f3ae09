"""How old samples are, and which go: by hand, and against a plain loop over random records."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.train.staleness import UNKNOWN, drop_stale, token_ages
from trm_jax.types import RolloutBatch


def rollout(versions, mask=None, groups=None) -> RolloutBatch:
    versions = np.asarray(versions, np.int32)
    rows, length = versions.shape
    mask = np.ones(versions.shape, bool) if mask is None else np.asarray(mask, bool)
    return RolloutBatch(
        prompt_tokens=jnp.ones((rows, 2), jnp.int32),
        prompt_mask=jnp.ones((rows, 2), bool),
        response_tokens=jnp.ones((rows, length), jnp.int32),
        response_mask=jnp.asarray(mask),
        rollout_logps=jnp.full((rows, length), -1.0),
        versions=jnp.asarray(versions),
        finished=jnp.ones(rows, bool),
        group_ids=jnp.asarray(np.arange(rows) // 2 if groups is None else groups, jnp.int32),
    )


def kept_rows(batch: RolloutBatch) -> list[bool]:
    return np.asarray(batch.response_mask).any(axis=1).tolist()


def test_a_sample_is_as_old_as_its_oldest_token_and_its_group_goes_with_it():
    # The policy is at 9. Row 0: tokens of 9, 8, 7: two updates old. Row 2: 6, then 9: three. Row 4: 8: one.
    batch = rollout([[9, 8, 7], [9, 9, 9], [6, 9, 9], [9, 9, 9], [8, 8, 8], [9, 8, 8]])
    for most, kept, dropped in (
        (3, [True] * 6, 0),
        (2, [True, True, False, False, True, True], 1),
        (1, [False, False, False, False, True, True], 2),
        (0, [False] * 6, 3),
    ):
        fresh, ages = drop_stale(batch, version=9, most=most)
        assert kept_rows(fresh) == kept, most
        assert (ages.dropped_groups, ages.oldest) == (dropped, 3)
        # Ages 0 1 2 | 0 | 3 0 0 | 0 | 1 1 1 | 0 1 1 over 18 tokens; what is dropped counts too.
        assert ages.mean == 11 / 18


def test_nothing_but_the_response_mask_changes_and_without_need_not_even_that():
    batch = rollout([[3, 3], [4, 4], [4, 4], [4, 4]])
    same, ages = drop_stale(batch, version=4, most=1)
    assert same is batch
    assert ages.dropped_groups == 0
    fresh, _ = drop_stale(batch, version=4, most=0)
    assert kept_rows(fresh) == [False, False, True, True]
    for field in dataclasses.fields(RolloutBatch):
        if field.name != "response_mask":
            assert getattr(fresh, field.name) is getattr(batch, field.name)


def test_masked_slots_have_no_age():
    """An engine leaves -1, or anything, where there is no token."""
    batch = rollout([[5, -1], [5, 0], [5, 5], [5, 5]], mask=[[1, 0], [1, 0], [1, 1], [1, 1]])
    assert token_ages(batch, 6).tolist() == [[1, 0], [1, 0], [1, 1], [1, 1]]
    same, ages = drop_stale(batch, version=6, most=1)
    assert same is batch
    assert (ages.mean, ages.oldest) == (1.0, 1)


def test_weights_that_no_trainer_made_are_never_fresh():
    """A server that was started anew samples by its first weights, version -1, until it is given the policy's."""
    batch = rollout([[0, 0], [0, 0], [-1, 0], [0, 0]])
    fresh, ages = drop_stale(batch, version=0, most=1_000_000)
    assert kept_rows(fresh) == [True, True, False, False]
    assert (ages.mean, ages.oldest, ages.dropped_groups) == (0.0, 0, 1)
    assert token_ages(batch, 0).max() == UNKNOWN


@pytest.mark.parametrize("seed", range(5))
def test_against_a_loop_over_rows(seed):
    rng = np.random.default_rng(seed)
    versions, mask = rng.integers(3, 11, (12, 4)), rng.random((12, 4)) < 0.8
    groups = rng.integers(0, 5, 12)
    fresh, ages = drop_stale(rollout(versions, mask, groups), version=10, most=5)
    old = {g for g, v, m in zip(groups, versions, mask, strict=True) if m.any() and 10 - v[m].min() > 5}
    assert ages.dropped_groups == len(old)
    expected = [[bool(m) and g not in old for m in row] for g, row in zip(groups, mask, strict=True)]
    assert np.asarray(fresh.response_mask).tolist() == expected
    assert ages.oldest == (10 - versions[mask]).max()


def test_an_empty_rollout():
    batch = rollout([[1, 1], [1, 1]], mask=[[0, 0], [0, 0]])
    same, ages = drop_stale(batch, version=9, most=0)
    assert same is batch
    assert (ages.mean, ages.oldest, ages.dropped_groups) == (0.0, 0, 0)
