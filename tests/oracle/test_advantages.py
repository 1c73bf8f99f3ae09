"""Group baselines against loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trm_jax import losses

from .batches import close
from .reference import losses as oracle

NORMALIZE = ["std", "none", "loo"]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0, 1.0, -2.0]), min_size=8, max_size=8),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.sampled_from(NORMALIZE),
    st.sampled_from(["all", "kept"]),
)
def test_against_loops(rewards, groups, keep, normalize, scope):
    """A rejected row contributes nothing, so its advantage is not compared: it only must be a number."""
    arrays = (np.float32(rewards), np.array(groups, np.int32))
    for kept in ([True] * 8, keep):
        rows = np.array(kept)
        got = np.asarray(losses.group_advantages(*arrays, normalize=normalize, scope=scope, sequence_keep=rows))
        want = oracle.group_advantages(rewards, groups, normalize=normalize, scope=scope, sequence_keep=kept)
        close(got[rows], np.array(want)[rows], relative=1e-5, absolute=1e-6)
        assert np.isfinite(got).all()


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, -1e4 / 3, 1e-3])
def test_equal_rewards_give_exactly_zero(normalize, reward):
    """Also where the mean of n equal float32 numbers is not that number: rounding must not become an advantage."""
    for groups in ([0] * 8, [0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 2, 3, 3, 3, 3, 3]):
        got = losses.group_advantages(np.full(8, reward, np.float32), np.array(groups, np.int32), normalize=normalize)
        assert not np.asarray(got).any()


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_one_kept_row_of_a_group_gives_zero(normalize):
    got = losses.group_advantages(
        np.float32([1, 0, 0, 1, 1, 1, 1, 1]),
        np.array([5, 5, 5, 7, 7, 7, 7, 7]),
        normalize=normalize,
        scope="kept",
        sequence_keep=np.array([True, False, False] + [True] * 5),
    )
    assert float(got[0]) == 0.0


def test_order_of_rows_and_names_of_groups_do_not_matter():
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=8).astype(np.float32), np.repeat([7, 3], 4)
    order = rng.permutation(8)
    plain = np.asarray(losses.group_advantages(rewards, groups))
    close(losses.group_advantages(rewards[order], groups[order] + 100), plain[order], relative=1e-6)


def test_close_rewards_of_a_large_level_keep_their_difference():
    """Rewards 1000 and 1001 of two rows: (R - mean)/std = -/+ .5/.70711 = -/+ .70711."""
    got = losses.group_advantages(np.float32([1000, 1001] * 4), np.repeat([0, 1, 2, 3], 2))
    close(got, [-np.sqrt(0.5), np.sqrt(0.5)] * 4, relative=1e-5)
